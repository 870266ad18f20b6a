"""Executor of a producer's `TransactionState`: it asks the coordinator, waits until records are
delivered, and opens and shuts the producer for records. Belongs to the client's loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

from rayq.client.client import Client
from rayq.client.coordinator import GroupCoordinator, TransactionsCoordinator
from rayq.client.group_positions import GroupPositions
from rayq.client.producing.accumulator import Accumulator
from rayq.client.producing.sender import RETRY_BACKOFF_MAX_S, Sender
from rayq.client.producing.transaction_state import (
    End,
    TransactionNumbers,
    TransactionState,
)
from rayq.config import ProducerConfig
from rayq.errors import (
    CommitRefusedError,
    InvalidRequestError,
    ProducerFencedError,
    RayqError,
    TimeoutError,
    TransactionAbortedError,
    TransactionEndedError,
    from_wire,
)
from rayq.messages import (
    POSITIONS_MAX,
    AnyRequest,
    CommitOffsets,
    CommitOffsetsResponse,
    EndTransaction,
    EndTransactionResponse,
    InitProducer,
    InitProducerResponse,
    OffsetCommit,
)

logger = logging.getLogger(__name__)

NUMBERS_AGE_MAX_S = 86_400.0
"""Maximum idle time of the producer id and epoch before they are requested again: a coordinator
forgets a transactional id that nobody has used for a week."""


class TransactionCore:
    """The transactions of one producer."""

    def __init__(
        self,
        client: Client,
        config: ProducerConfig,
        accumulator: Accumulator,
        sender: Sender,
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        """`drain()` waits until everything accepted has an outcome."""
        assert config.transactional_id is not None
        self.state = TransactionState(config.transactional_id)
        self._id = config.transactional_id
        self._client = client
        self._config = config
        self._accumulator = accumulator
        self._sender = sender
        self._drain = drain
        self._coordinator = TransactionsCoordinator(client, self._id, config)
        self._owner = client.environment.new_id()
        self._ending: asyncio.Task[RayqError | None] | None = None
        self._how_it_ended: asyncio.Task[RayqError] | None = None
        """The task that asks, after a server reports that the open transaction has ended."""
        self._has_sent_offsets = False
        self._offsets_under_way: set[asyncio.Future[None]] = set()
        self._heard_at = client.now
        """The time of the coordinator's last answer."""
        self.sequences = itertools.count(1)
        """The sequence numbers of positions given without a consumer."""
        accumulator.refuse(self.state.refusal)

    # --- the beginning --------------------------------------------------------------------------

    async def begin(self, token: object, name: str | None) -> None:
        """Begins a transaction, identified by `token`. First settles an end that the previous one
        left open. Raises InvalidRequestError, ProducerFencedError, AlreadyCommittedError,
        TransactionCommittedError (the previous one was committed), TransactionLimitError,
        TimeoutError after `max_block_ms`."""
        deadline = self._deadline()
        if self._ending is not None:  # Nobody waits for it any longer.
            await asyncio.wait([self._ending], timeout=deadline - self._client.now)
        state = self.state
        state.begin(token, name)
        if self._client.now - self._heard_at > NUMBERS_AGE_MAX_S:
            state.numbers = None
        try:
            while (question := state.question) is not None:
                if isinstance(question, End):
                    await self._settle(question, deadline)
                else:
                    await self._init(deadline)
            numbers = state.open()
        except BaseException:
            state.begin_failed()
            self._accumulator.refuse(state.refusal)
            raise
        self._has_sent_offsets = False
        self._how_it_ended = None
        self._sender.begin(*numbers)
        self._accumulator.refuse(None)

    def withdraw(self, token: object) -> None:
        """Aborts the transaction: the thread that began it was interrupted, and will not end it."""
        if self.state.phase == "open" and self.state.token is token:
            self._spawn_end(is_commit=False)

    async def _init(self, deadline: float) -> None:
        def build(topic_id: str, partition: int, leader_epoch: int) -> AnyRequest:
            return InitProducer(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader_epoch,
                transactional_id=self._id,
                owner=self._owner,
                transaction_timeout_ms=self._config.transaction_timeout_ms,
            )

        try:
            response: InitProducerResponse = await self._coordinator.ask(
                build, timeout_s=self._left_s(deadline)
            )
        except RayqError as error:
            self.state.refused(error)
            raise
        self._heard_at = self._client.now
        numbers = TransactionNumbers(response.family, response.epoch)
        self.state.initialised(numbers, response.last_name)

    # --- the end --------------------------------------------------------------------------------

    def shut(self) -> None:
        """Stops accepting records; called before `end`, by the user's thread."""
        self._accumulator.shut(self.state.ending_refusal())

    async def end(self, token: object, *, is_commit: bool) -> None:
        """Ends the open transaction, after `shut`. An end that has begun continues if the caller is
        cancelled, except for a commit that was not requested yet: that becomes an abort. Raises
        TransactionAbortedError, TransactionCommittedError, TransactionOutcomeUnknownError,
        AlreadyCommittedError, ProducerFencedError, InvalidRequestError; TimeoutError from an
        abort."""
        self.check_open(token)
        ending = self._spawn_end(is_commit=is_commit)
        try:
            error = await asyncio.shield(ending)
        except asyncio.CancelledError:
            if self.state.interrupted():
                self._give_up()
            raise
        if error is not None:
            raise error

    def _spawn_end(self, *, is_commit: bool) -> asyncio.Task[RayqError | None]:
        self.state.end(is_commit=is_commit)
        self._accumulator.refuse(self.state.refusal)
        self._ending = self._client.environment.tasks.spawn(
            self._end(is_commit), f"end of a transaction of {self._id}"
        )
        return self._ending

    async def _end(self, is_commit: bool) -> RayqError | None:
        """Returns the error for the caller to raise."""
        state = self.state
        error: RayqError | None = None
        try:
            if is_commit and not state.has_failed:
                if self._offsets_under_way:
                    await asyncio.wait(self._offsets_under_way)
                await self._drain()
            if not is_commit or state.has_failed:
                self._sender.fail(
                    TransactionAbortedError(f"The transaction of {self._id!r} is aborted.")
                )
            await self._drain()
            state.decide(is_used=self._sender.has_numbered or self._has_sent_offsets)
            deadline = self._deadline()
            while state.unsettled is not None:
                await self._settle(state.unsettled, deadline)
        except RayqError as caught:
            error = caught
        except BaseException as caught:  # a bug of rayq: these numbers must not be used again
            if state.unsettled is None:
                state.failed(caught)
                state.decide(is_used=True)
            raise
        finally:
            self._ending = None
            outcome = state.finish(error)
            self._accumulator.refuse(state.refusal)
        return outcome

    async def _settle(self, end: End, deadline: float) -> None:
        """Asks how a transaction ended, or ends it. Raises the error that leaves this open, and
        ProducerFencedError."""
        is_repeated = self.state.was_asked
        build_end = self._build_end(end)

        def build(topic_id: str, partition: int, leader_epoch: int) -> AnyRequest:
            self.state.asked()
            return build_end(topic_id, partition, leader_epoch)

        try:
            response: EndTransactionResponse = await self._coordinator.ask(
                build,
                timeout_s=self._left_s(deadline),
                hold_s=self._end_wait_ms(end) / 1000,
            )
        except RayqError as error:
            self.state.refused(error)
            return
        if is_repeated:
            outcome = "committed" if response.is_committed else "aborted"
            logger.info("the transaction of %r that was in doubt is %s", self._id, outcome)
        self._heard_at = self._client.now
        numbers = TransactionNumbers(response.family, response.epoch)
        self.state.ended(response.is_committed, numbers)

    def _end_wait_ms(self, end: End) -> int:
        return self._config.commit_wait_ms if end.is_commit else 0

    def _build_end(self, end: End) -> Callable[[str, int, int], AnyRequest]:
        def build(topic_id: str, partition: int, leader_epoch: int) -> AnyRequest:
            return EndTransaction(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader_epoch,
                transactional_id=self._id,
                owner=self._owner,
                family=end.family,
                epoch=end.epoch,
                is_commit=end.is_commit,
                name=end.name,
                wait_ms=self._end_wait_ms(end),
            )

        return build

    async def close(self) -> None:
        """Waits for an end in progress, and aborts an open transaction. Raises as `end` does."""
        if self._ending is not None:
            await asyncio.wait([self._ending])
        elif self.state.phase == "open":
            await self.end(self.state.token, is_commit=False)

    # --- while it is open -----------------------------------------------------------------------

    def check_open(self, token: object) -> None:
        """Raises InvalidRequestError if the token's transaction is not the open one. May be called
        from any thread."""
        if self.state.token is not token or self.state.phase != "open":
            self.state.check_not_fenced()
            raise InvalidRequestError(
                f"This transaction of {self._id!r} is not open (any more): it lasts from the "
                "beginning of its block to the end."
            )

    def failed(self, error: RayqError) -> None:
        """Fails the open transaction after a record was not delivered: nothing else of it needs to
        be."""
        if not self.state.has_failed:
            self.state.failed(error)
            self._accumulator.refuse(self.state.refusal)
            asyncio.get_running_loop().call_soon(self._give_up)

    async def how_it_ended(self, error: RayqError, family: int, epoch: int) -> RayqError:
        """Returns the error for a transaction that has ended according to a server's `error`, after
        asking its coordinator how. It cannot be committed any longer: at worst this request aborts
        it."""
        numbers = TransactionNumbers(family, epoch)
        if numbers != self.state.numbers:
            return self.state.ended_unknown(error)  # Its end is already requested.
        if self._how_it_ended is None:
            self._how_it_ended = self._client.environment.tasks.spawn(
                self._ask_how_it_ended(numbers), f"ask how a transaction of {self._id} ended"
            )
        return await asyncio.shield(self._how_it_ended)

    async def _ask_how_it_ended(self, numbers: TransactionNumbers) -> RayqError:
        end = End(*numbers, is_commit=False, name=None)
        try:
            response: EndTransactionResponse = await self._coordinator.ask(
                self._build_end(end), timeout_s=self._left_s(self._deadline())
            )
        except ProducerFencedError as error:
            return error
        except RayqError as error:
            return self.state.ended_unknown(error)
        return self.state.how_it_ended(is_committed=response.is_committed)

    def _give_up(self) -> None:
        if self.state.has_failed and self.state.phase in ("open", "ending"):
            refusal = TransactionAbortedError(
                f"The transaction of {self._id!r} is aborted, since something of it was not "
                "written."
            )
            self._sender.fail(refusal)

    async def send_offsets(self, token: object, positions: GroupPositions) -> None:
        """Makes the transaction commit positions of a group. Any failure makes the transaction
        fail. Raises InvalidRequestError, CommitRefusedError, TransactionAbortedError,
        TransactionCommittedError, TransactionOutcomeUnknownError, TimeoutError after
        `max_block_ms`."""
        self.check_open(token)
        if not positions.offsets:
            return
        numbers = self.state.numbers
        assert numbers is not None
        self._has_sent_offsets = True
        under_way = asyncio.get_running_loop().create_future()
        self._offsets_under_way.add(under_way)
        try:
            await self._send_offsets(positions, numbers)
        except TransactionEndedError as error:
            ended = await self.how_it_ended(error, *numbers)
            self.failed(ended)
            raise ended.with_message(ended.message) from error
        except RayqError as error:
            self.failed(error)
            if error.ends_membership:
                raise CommitRefusedError(
                    f"Positions of group {positions.group!r} are not part of the transaction, "
                    f"which is aborted: {error} Poll again to continue with what this member owns "
                    "now."
                ) from error
            raise
        except BaseException:
            self.failed(InvalidRequestError("sending positions was interrupted"))
            raise
        finally:
            self._offsets_under_way.discard(under_way)
            under_way.set_result(None)

    async def _send_offsets(self, positions: GroupPositions, numbers: TransactionNumbers) -> None:
        coordinator = GroupCoordinator(self._client, positions.group, self._config)
        backoff = self._client.backoff(
            self._config.retry_backoff_ms / 1000, RETRY_BACKOFF_MAX_S
        )
        deadline = self._deadline()
        left = positions.offsets

        def build(topic_id: str, partition: int, leader_epoch: int) -> AnyRequest:
            return CommitOffsets(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader_epoch,
                group=positions.group,
                member=positions.member,
                member_epoch=positions.member_epoch,
                sequence=positions.sequence,
                offsets=[OffsetCommit(*offset) for offset in left[:POSITIONS_MAX]],
                transaction=numbers,
            )

        while True:
            response: CommitOffsetsResponse = await coordinator.ask(
                build, timeout_s=self._left_s(deadline)
            )
            asked, left = left[:POSITIONS_MAX], left[POSITIONS_MAX:]
            if not response.refused:
                if not left:
                    return
                continue
            errors = {
                (topic_id, partition): from_wire(code, text)
                for topic_id, partition, code, text in response.refused
            }
            final = next((error for error in errors.values() if not error.retriable), None)
            if final is not None:
                raise CommitRefusedError(
                    f"{len(errors)} positions of group {positions.group!r} are not part of the "
                    f"transaction, which is aborted: {final}"
                )
            wait_s = backoff.next_s()
            if self._client.now + wait_s >= deadline:
                raise TimeoutError(
                    f"Positions of group {positions.group!r} were not taken within max_block_ms "
                    f"({self._config.max_block_ms} ms): {next(iter(errors.values()))}"
                )
            await asyncio.sleep(wait_s)
            left += [position for position in asked if (position[0], position[1]) in errors]

    def _deadline(self) -> float:
        return self._client.now + self._config.max_block_ms / 1000

    def _left_s(self, deadline: float) -> float:
        return max(deadline - self._client.now, 0.001)

"""A leader's handling of transactions: it makes batches wait for their turn, ends transactions by
markers, and asks about those that stay open for too long.

`TransactionAdmission` decides, the log says what is open, and `Peers` ask the coordinators. See
docs/protocol.md, rules 25 to 28.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from rayq import messages
from rayq.actors.handlers import answers, answers_peer
from rayq.actors.peers import Peers
from rayq.actors.purgatory import Purgatory
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.transactions.admission import Step, TransactionAdmission
from rayq.errors import (
    AuthorizationError,
    InvalidRequestError,
    NotLeaderError,
    OpenTransactionError,
    RayqError,
    TimeoutError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)
from rayq.logs import log_event
from rayq.messages.transaction_ids import coordinator_of, family_of, is_transactional
from rayq.metrics import Sample
from rayq.storage.batch import BatchHeader, Marker, read_header
from rayq.storage.open_transactions import OpenTransactions
from rayq.wire.peer import Peer

logger = logging.getLogger(__name__)
T = TypeVar("T")

MARKER_WAIT_S = 5.0
"""Timeout of a marker's commit: after it, the marker is not acknowledged, and its coordinator sends
it again."""
CHECK_INTERVAL_S = 10.0
"""Interval at which a leader looks for transactions that are open for too long."""
OPEN_MAX_S = 16 * 60.0
"""Time after which an open transaction of a producer is suspicious. While its coordinator lives, it
ends after at most 15 minutes, and its marker comes soon after. That of a job may be open for an
hour."""
ASK_AGAIN_S = 60.0
THROTTLE_TOLD_S = 0.25
"""A coordinator is told of a longer wait of a producer when it is longer by this much."""
FINAL_REFUSALS = (TransactionEndedError, TransactionLimitError, AuthorizationError)
"""The answers of a coordinator to a join that no repetition changes."""

Key = tuple[int, int]
"""A transaction: `(family, epoch)`."""
Writer = tuple[int, str | None]
"""A family and a principal: batches of different writers do not wait for each other."""
Answer = messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]


class _Produce(Protocol):
    """Appends a batch as the leader does: `Leader.produce`."""

    def __call__(
        self, request: messages.Produce, payload: memoryview, *, principal: str | None
    ) -> Answer: ...


class _WaitingBatch(NamedTuple):
    epoch: int
    request: messages.Produce
    payload: memoryview
    deadline_s: float
    answer: asyncio.Future[messages.ProduceResponse]


@dataclass(slots=True)
class _Watched:
    """An open transaction."""

    is_before_unclean: bool
    """True if an unclean election came after its first record: its marker may have been
    truncated."""
    since_s: float
    """Time at which this leader found it open."""
    ask_s: float
    """Time at which its coordinator is asked next."""
    is_unknown: bool = False
    """True if its coordinator does not know it."""


class LeaderTransactions:
    """See the module. `append_marker(marker)` appends it as the leader does, and raises
    StorageError; `produce` repeats a request whose batch had to wait; `check()` raises when the
    process may no longer answer as leader."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        assignment: messages.PartitionAssignment,
        peers: Peers,
        *,
        append_marker: Callable[[Marker], None],
        produce: _Produce,
        check: Callable[[], None],
    ) -> None:
        self._replica_log = replica_log
        self._environment = replica_log.environment
        self._clock = replica_log.environment.clock
        self._assignment = assignment
        self._peers = peers
        self._append_marker = append_marker
        self._produce = produce
        self._check = check
        self._where = replica_log.where
        self._admission = TransactionAdmission()
        self._waiting: dict[Writer, list[_WaitingBatch]] = {}
        """Waiting batches, in the order of arrival."""
        self._throttled_until_s: dict[tuple[int, int, str | None], float] = {}
        """Time up to which the coordinators of transactions were told that producers wait."""
        self._joining: dict[tuple[int, int, str | None], asyncio.Task[None]] = {}
        """Questions to coordinators, by family, epoch and principal."""
        self._sealed_meanwhile: set[tuple[int, int, str | None]] = set()
        """Transactions among those that are joining: the answer may be from before the seal."""
        self._markers: Purgatory[messages.Done] = Purgatory()
        self._seals: Purgatory[messages.SealPartitionResponse] = Purgatory()
        self._watched: dict[Key, _Watched] = {}
        self._next_check_s = self._clock.monotonic()
        self._asking: asyncio.Task[None] | None = None

    @property
    def _log(self) -> OpenTransactions:
        return self._replica_log.log.producers.transactions

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes the partition's committed metadata, in this epoch."""
        self._assignment = assignment

    def end(self, error: NotLeaderError) -> None:
        """Fails all waiting requests, as another replica leads."""
        for task in self._joining.values():
            task.cancel()
        if self._asking is not None:
            self._asking.cancel()
        self._markers.fail(error)
        self._seals.fail(error)
        waiting, self._waiting = self._waiting, {}
        for batch in (batch for batches in waiting.values() for batch in batches):
            _fail(batch, error)

    # --- batches ----------------------------------------------------------------------------

    def admit(
        self,
        request: messages.Produce,
        payload: memoryview,
        header: BatchHeader,
        principal: str | None,
    ) -> asyncio.Future[messages.ProduceResponse] | None:
        """Returns None if the principal's batch of a transaction may be appended now. Else returns
        its answer: the batch waits for its turn, and later batches of its family and principal wait
        behind it. Raises InvalidRequestError, TransactionEndedError, TransactionLimitError."""
        if self._replica_log.topic_config.flush == "os":
            raise InvalidRequestError(
                f'{self._where} takes no transactions: its topic says flush="os", so that a part '
                'of one could be lost after its commit. Set flush="disk" with alter_topic_config, '
                "or write without a transaction. Nothing was written."
            )
        if request.acks != -1 or header.base_sequence is None:
            raise InvalidRequestError(
                f"A batch of a transaction is numbered, and sent with acks='all': {self._where} "
                "wrote nothing."
            )
        assert header.producer_id is not None
        family, epoch = family_of(header.producer_id), header.producer_epoch
        if (family, principal) not in self._waiting:
            step = self._next_step(family, epoch, principal)
            if step is Step.APPEND:
                return None
            if step is Step.JOIN:
                self._join(family, epoch, principal)
        answer: asyncio.Future[messages.ProduceResponse]
        answer = asyncio.get_running_loop().create_future()
        deadline_s = self._clock.monotonic() + request.timeout_ms / 1000
        self._waiting.setdefault((family, principal), []).append(
            _WaitingBatch(epoch, request, payload, deadline_s, answer)
        )
        return answer

    def throttled(self, payload: memoryview, throttle_s: float, principal: str | None) -> None:
        """Tells the coordinator of a batch's transaction that its producer has to wait."""
        header = read_header(payload)
        if not is_transactional(header.producer_id):
            return
        assert header.producer_id is not None
        now_s = self._clock.monotonic()
        key = family_of(header.producer_id), header.producer_epoch, principal
        until_s = now_s + throttle_s
        if until_s < self._throttled_until_s.get(key, 0.0) + THROTTLE_TOLD_S:
            return  # It has been told of nearly all of that.
        self._throttled_until_s = {
            other: other_s for other, other_s in self._throttled_until_s.items() if other_s > now_s
        }
        self._throttled_until_s[key] = until_s
        throttle_ms = min(throttle_s * 1000, messages.MILLISECONDS_MAX)
        self._environment.tasks.spawn(
            self._prolong(*key, math.ceil(throttle_ms)), f"prolong a transaction of {self._where}"
        )

    async def _prolong(
        self, family: int, epoch: int, principal: str | None, throttle_ms: int
    ) -> None:
        try:
            await self._peers.prolong(family, epoch, throttle_ms, principal=principal)
        except RayqError as error:  # Its coordinator cannot time it out either, while it is away.
            logger.info("transaction %d:%d was not prolonged: %s", family, epoch, error)

    def _next_step(self, family: int, epoch: int, principal: str | None) -> Step:
        log = self._log
        return self._admission.batch(
            family,
            epoch,
            principal=principal,
            open_epoch=log.open_epoch(family),
            ended_epoch=log.ended_epoch(family),
            open_count=log.open_count,
        )

    def _join(self, family: int, epoch: int, principal: str | None) -> None:
        if (family, epoch, principal) not in self._joining:
            self._joining[family, epoch, principal] = self._environment.tasks.spawn(
                self._ask_to_join(family, epoch, principal), f"join a transaction to {self._where}"
            )

    async def _ask_to_join(self, family: int, epoch: int, principal: str | None) -> None:
        refusal: RayqError | None = None
        try:
            await self._peers.join(
                family,
                epoch,
                self._assignment.topic_id,
                self._assignment.partition,
                principal=principal,
            )
            if (family, epoch, principal) not in self._sealed_meanwhile:
                self._admission.joined(
                    family,
                    epoch,
                    principal=principal,
                    ended_epoch=self._log.ended_epoch(family),
                )
        except RayqError as error:
            refusal = error
            if not isinstance(error, FINAL_REFUSALS):
                refusal = TransactionOrderError(
                    f"The coordinator of transaction {family}:{epoch} did not say that "
                    f"{self._where} takes part in it: nothing was written. It will be retried. "
                    f"({error})"
                )
        finally:
            del self._joining[family, epoch, principal]
            self._sealed_meanwhile.discard((family, epoch, principal))
        self._retry_waiting((family, principal), epoch, refusal)

    def _retry_waiting(
        self, writer: Writer, epoch: int, refusal: RayqError | None = None
    ) -> None:
        """Checks the waiting batches of a writer again, in order, as something happened that they
        may have waited for. Those of `epoch` fail if it was refused."""
        _, principal = writer
        for batch in self._waiting.pop(writer, []):
            if batch.answer.done():
                continue
            if refusal is not None and batch.epoch == epoch:
                _fail(batch, refusal)
                continue
            try:
                self._check()
                answer = self._produce(batch.request, batch.payload, principal=principal)
            except Exception as error:  # noqa: BLE001 - the batches behind it have an answer, too
                _fail(batch, error)
            else:
                _pass_on(answer, batch.answer)

    # --- markers ----------------------------------------------------------------------------

    @answers(messages.WriteMarker)
    def write_marker(
        self, request: messages.WriteMarker
    ) -> messages.Done | asyncio.Future[messages.Done]:
        """Ends a transaction in this partition. It answers once the marker is committed; a
        repetition is answered once everything that is now in the log is committed, because the
        marker that it repeats may not be committed yet. Raises FencedEpochError,
        TransactionOrderError, StorageError."""
        family, epoch = request.family, request.epoch
        is_new = self._admission.marker(
            family,
            epoch,
            request.coordinator_epoch,
            open_epoch=self._log.open_epoch(family),
            ended_epoch=self._log.ended_epoch(family),
        )
        if is_new:
            self._end(family, epoch, request.is_commit, request.coordinator_epoch)
        return self._once_committed()

    def _once_committed(self) -> messages.Done | asyncio.Future[messages.Done]:
        """Returns the answer to a request about a marker."""
        return self._when_committed(self._markers, messages.Done())

    def _when_committed(self, waiting: Purgatory[T], answer: T) -> T | asyncio.Future[T]:
        """Returns the answer, once everything that is now in the log is committed."""
        end_offset = self._replica_log.log.end_offset
        if end_offset <= self._replica_log.high_watermark:
            return answer
        deadline_s = self._clock.monotonic() + MARKER_WAIT_S
        return waiting.add(end_offset, answer, deadline_s=deadline_s)

    @answers_peer(messages.SealPartition)
    def _answer_seal(
        self, peer: Peer, request: messages.SealPartition, _: memoryview
    ) -> messages.SealPartitionResponse | Awaitable[messages.SealPartitionResponse]:
        if peer.principal is None:
            return self.seal(request)
        return self.seal_as(peer.principal, request)

    async def seal_as(
        self, principal: str, request: messages.SealPartition
    ) -> messages.SealPartitionResponse:
        """Seals for a named principal, once the coordinator has let it join: seals of strangers
        would make the partition join again and again."""
        with contextlib.suppress(TransactionEndedError):  # Sealed already, or without an id.
            await self._peers.join(
                request.family,
                request.epoch,
                self._assignment.topic_id,
                self._assignment.partition,
                principal=principal,
            )
        self._check()
        answer = self.seal(request)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def seal(
        self, request: messages.SealPartition
    ) -> messages.SealPartitionResponse | asyncio.Future[messages.SealPartitionResponse]:
        """See `messages.SealPartition`."""
        family, epoch = request.family, request.epoch
        self._admission.seal(
            family,
            epoch,
            open_epoch=self._log.open_epoch(family),
            ended_epoch=self._log.ended_epoch(family),
        )
        self._sealed_meanwhile.update(
            joining for joining in self._joining if joining[:2] == (family, epoch)
        )
        written = self._replica_log.log.producers.records_of(family, epoch)
        answer = messages.SealPartitionResponse(written, self._assignment.leader_epoch)
        return self._when_committed(self._seals, answer)

    def _end(self, family: int, epoch: int, is_commit: bool, coordinator_epoch: int) -> None:
        self._append_marker(
            Marker(family, epoch, is_commit, coordinator_of(family), coordinator_epoch)
        )
        for writer in [writer for writer in self._waiting if writer[0] == family]:
            self._retry_waiting(writer, epoch)

    def reached(self, high_watermark: int) -> None:
        """Answers waiting requests, as everything below is committed."""
        self._markers.reached(high_watermark)
        self._seals.reached(high_watermark)

    def check_decided(self, before_offset: int) -> None:
        """Raises OpenTransactionError if records below an offset are of an undecided
        transaction."""
        if before_offset <= self._replica_log.last_stable_offset:
            return
        undecided = self._log.undecided(self._replica_log.high_watermark)
        first = min(undecided, key=lambda transaction: transaction.first_offset)
        raise OpenTransactionError(
            f"Transaction {first.family}:{first.epoch} has records from offset "
            f"{first.first_offset} of {self._where} on and is not decided yet: nothing from there "
            f"up to {before_offset} can be deleted before it ends."
        )

    # --- what waits for too long ------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        """Fails the requests that waited too long."""
        if not (self._markers.is_empty and self._seals.is_empty):
            error = TimeoutError(
                f"The in-sync replicas of {self._where} did not confirm the end of a transaction "
                "in time."
            )
            self._markers.expire(now_s, error)
            self._seals.expire(now_s, error)
        for (family, principal), batches in list(self._waiting.items()):
            kept = [batch for batch in batches if batch.deadline_s > now_s]
            for batch in batches:
                if batch.deadline_s <= now_s:
                    _fail(batch, self._waited_too_long(family, batch.epoch))
            if kept:
                self._waiting[family, principal] = kept
            else:
                del self._waiting[family, principal]

    def _waited_too_long(self, family: int, epoch: int) -> TransactionOrderError:
        return TransactionOrderError(
            f"A batch of transaction {family}:{epoch} waited too long in {self._where}, for its "
            "coordinator or for the end of an older transaction of its producer: nothing was "
            "written. It will be retried."
        )

    # --- what is open for too long ----------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Notes the open transactions, and asks about those for which it is time."""
        if now_s < self._next_check_s or (self._asking is not None and not self._asking.done()):
            return
        self._next_check_s = now_s + CHECK_INTERVAL_S
        watched = {}
        for transaction in self._log.undecided(self._replica_log.log.end_offset):
            key = (transaction.family, transaction.epoch)
            known = self._watched.get(key)
            if known is None:
                is_doubtful = self._is_before_unclean(transaction.first_offset)
                ask_s = now_s if is_doubtful else now_s + OPEN_MAX_S
                known = _Watched(is_doubtful, now_s, ask_s)
            watched[key] = known
        self._watched = watched
        if any(transaction.ask_s <= now_s for transaction in watched.values()):
            self._asking = self._environment.tasks.spawn(
                self._ask(), f"ask about transactions of {self._where}"
            )

    def _is_before_unclean(self, offset: int) -> bool:
        """Returns whether an unclean election came after the record at `offset`."""
        unclean_epoch = self._assignment.last_unclean_epoch
        epoch = self._replica_log.log.epochs.epoch_of(offset)
        return unclean_epoch is not None and epoch is not None and epoch < unclean_epoch

    async def _ask(self) -> None:
        silent: set[int] = set()
        for (family, epoch), watched in self._watched.items():
            if watched.ask_s > self._clock.monotonic() or coordinator_of(family) in silent:
                continue
            try:
                state = await self._peers.outcome(family, epoch)
                self._check()
                is_over = state in messages.OUTCOMES_OVER
                if is_over and self._log.open_epoch(family) == epoch:
                    # The coordinator has forgotten the transaction, so it has seen all its markers
                    # committed, or lost its own log. In the first case an unclean election
                    # truncated the marker here.
                    watched.is_unknown = state == "unknown"
                    self._forgotten(family, epoch, state, abort=watched.is_before_unclean)
            except RayqError as error:
                logger.info("transaction %d:%d in %s: %s", family, epoch, self._where, error)
                silent.add(coordinator_of(family))
                continue
            watched.ask_s = self._clock.monotonic() + ASK_AGAIN_S

    @answers(messages.AbortUnknownTransaction)
    async def abort_unknown(self, request: messages.AbortUnknownTransaction) -> messages.Done:
        """See `messages.AbortUnknownTransaction`."""
        family, epoch = request.family, request.epoch
        if self._log.open_epoch(family) == epoch:
            state = await self._peers.outcome(family, epoch)
            self._check()
            if state not in messages.OUTCOMES_OVER:
                raise InvalidRequestError(
                    f"Transaction {family}:{epoch} in {self._where} is {state}: its coordinator "
                    "knows it, and ends it. Abort it by its transactional id."
                )
            if self._log.open_epoch(family) == epoch:
                self._forgotten(family, epoch, state, abort=True)
        answer = self._once_committed()
        return await answer if isinstance(answer, asyncio.Future) else answer

    def _forgotten(self, family: int, epoch: int, state: str, *, abort: bool) -> None:
        """Ends a transaction whose coordinator sends no marker (any more), with the outcome that
        the coordinator reports. If the outcome is unknown the transaction is aborted, or left
        open."""
        if state != "unknown" or abort:
            self._end(family, epoch, state == "committed", coordinator_epoch=0)
        log_event(
            logger,
            logging.ERROR,
            "transaction_unknown" if state == "unknown" else "transaction_marker_lost",
            **self._assignment.labels,
            epoch=self._assignment.leader_epoch,
            family=family,
            transaction_epoch=epoch,
            aborted=state == "aborted" or (state == "unknown" and abort),
        )

    # --- figures ----------------------------------------------------------------------------

    def measure(self, now_s: float) -> list[Sample]:
        """Returns the metrics; none if the log has no transactions."""
        log, sample = self._log, self._environment.metrics.sample
        if not log.is_used:
            return []
        at = self._assignment.labels
        watched = [
            transaction
            for (family, epoch), transaction in self._watched.items()
            if log.open_epoch(family) == epoch
        ]
        oldest_s = max((now_s - transaction.since_s for transaction in watched), default=0.0)
        unknown = sum(transaction.is_unknown for transaction in watched)
        lag = self._replica_log.high_watermark - self._replica_log.last_stable_offset
        return [
            sample("rayq_partition_last_stable_offset_lag", lag, **at),
            sample("rayq_partition_open_transactions", log.open_count, **at),
            sample("rayq_partition_oldest_transaction_seconds", oldest_s, **at),
            sample("rayq_partition_unknown_transactions", unknown, **at),
        ]


def _fail(batch: _WaitingBatch, error: Exception) -> None:
    if not batch.answer.done():
        batch.answer.set_exception(error)


def _pass_on(answer: Answer, waiting: asyncio.Future[messages.ProduceResponse]) -> None:
    """Answers a request that waited with the answer to the append of its batch."""
    if not isinstance(answer, asyncio.Future):
        waiting.set_result(answer)
        return

    def done(answer: asyncio.Future[messages.ProduceResponse]) -> None:
        if waiting.done():
            return
        error = answer.exception()
        if error is None:
            waiting.set_result(answer.result())
        else:
            waiting.set_exception(error)

    answer.add_done_callback(done)

"""The transaction coordinator of one `__transaction_state` partition.

It is a `Coordinator`. Its decisions take effect in partitions by markers: once a decision is
committed, it asks the leaders of all participants to write theirs, and repeats each request until
the leader has done so. If this coordinator ends before that, the next one continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.coordinator import Coordinator
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.peers import Build, Peers
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.backoff import Backoff
from rayq.core.access.rights import View, shows
from rayq.core.cluster.topic_changes import TRANSACTIONS_TOPIC
from rayq.core.decision import Decision, Times
from rayq.core.transactions import changes
from rayq.core.transactions.decisions import DECISIONS
from rayq.core.transactions.records import (
    Record,
    TransactionKey,
    TransactionRecord,
    TransactionValue,
    decode,
    encode,
)
from rayq.core.transactions.state import TransactionState
from rayq.errors import (
    CoordinatorLoadingError,
    InvalidRequestError,
    RayqError,
    TransactionLimitError,
)
from rayq.logs import log_event
from rayq.messages.secret_names import shown_part
from rayq.messages.transaction_ids import FAMILIES_MAX, coordinator_partition, make_family
from rayq.metrics import Sample
from rayq.records import TopicIdPartition
from rayq.wire.handler import Result
from rayq.wire.peer import Peer

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""Interval at which timeouts are checked."""
MARKER_RETRY_S = 0.1
MARKER_RETRY_MAX_S = 1.0
FORGOTTEN_AT_ONCE = 1000
UNUSED_CHECK_INTERVAL_S = 60.0


OWNERS_REQUESTS = (
    messages.InitProducer,
    messages.EndTransaction,
    messages.TouchTransaction,
    messages.SealTransaction,
)


class TransactionCoordinator(Coordinator[TransactionState, Record]):
    """See the module."""

    subject = "transactions"
    topic = TRANSACTIONS_TOPIC
    only_reads = (messages.ListTransactions, messages.DescribeTransaction)

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        *,
        access: Access,
        ask_broker: messages.Ask,
        peers: Peers,
        clock_watch: ClockWatch,
    ) -> None:
        """`ask_broker` sends a request to this node's broker, `peers` to the leaders of
        participants."""
        super().__init__(replica_log, leader, assignment, access=access, encode=encode)
        self._ask_broker = ask_broker
        self._peers = peers
        self._clock_watch = clock_watch
        self.state = TransactionState()
        self._markers: dict[TransactionKey, asyncio.Task[None]] = {}
        """Task of each transaction that has ended: done once each participant has its marker."""
        self._partitions: int | None = None
        """Number of partitions of `__transaction_state`; None until it is needed."""
        self._end_seconds = self._environment.metrics.histogram("rayq_transaction_end_seconds")
        self._forget_source = self._environment.metrics.add_source(self._measure)

    def _measure(self) -> list[Sample]:
        return [
            self._environment.metrics.sample(
                "rayq_open_transactions", len(self.state.transactions), partition=self._partition
            )
        ]

    def end(self, reason: str) -> None:
        """Ends this coordinator, as another process coordinates: the requests that wait are
        told."""
        self._forget_source()
        super().end(reason)

    # --- producers --------------------------------------------------------------------------

    @answers_peer(messages.InitProducer)
    async def init_producer(
        self, peer: Peer, request: messages.InitProducer, _: memoryview
    ) -> messages.InitProducerResponse:
        """See `messages.InitProducer`."""
        return await self._answer(
            lambda: changes.init_producer(self.state, request, self._times(), peer.principal)
        )

    @answers(messages.EndTransaction)
    async def end_transaction(
        self, request: messages.EndTransaction
    ) -> messages.EndTransactionResponse:
        """See `messages.EndTransaction`."""
        name, key = request.transactional_id, TransactionKey(request.family, request.epoch)
        is_committed, following = await self._answer(
            lambda: changes.end(self.state, request, self._times())
        )
        markers = self._markers.get(key)
        # If markers of an earlier one are still missing, some partition cannot be reached just now.
        if markers is not None and self.state.under_way(name)[:1] == [key]:
            await asyncio.wait([markers], timeout=request.wait_ms / 1000)
            self._check(None)
        return messages.EndTransactionResponse(
            is_committed, *following, is_complete=key not in self.state.transactions
        )

    # --- operators --------------------------------------------------------------------------

    @answers_peer(messages.ListTransactions)
    async def list_transactions(
        self, peer: Peer, request: messages.ListTransactions, _: memoryview
    ) -> messages.ListTransactionsResponse:
        """See `messages.ListTransactions`. Ids that the peer may not describe are left out."""

        def answer() -> messages.ListTransactionsResponse:
            view = self._access.view(peer)
            listed = {value.transactional_id for value in self.state.transactions.values()}
            if request.idle:
                listed.update(self.state.ids)
            left = sorted(
                name
                for name in listed
                if name > request.after and shows(view, "transactional_id", name)
            )
            names = left[: messages.LISTED_IDS_MAX]
            return messages.ListTransactionsResponse(
                [summary for name in names for summary in self._summaries(name)],
                names[-1] if len(names) < len(left) else None,
            )

        return await self._answer(lambda: Decision([], answer))

    @answers(messages.DescribeTransaction)
    async def describe(
        self, request: messages.DescribeTransaction
    ) -> messages.DescribeTransactionResponse:
        """See `messages.DescribeTransaction`."""
        name = request.transactional_id

        def answer() -> messages.DescribeTransactionResponse:
            value = self.state.ids.get(name)
            if value is None:
                raise InvalidRequestError(f"There is no transactional id {name!r}.")
            return messages.DescribeTransactionResponse(
                name,
                shown_part(value.owner),
                *value.next,
                value.transaction_timeout_ms,
                value.last_name,
                self._summaries(name),
                [
                    (*key, *participant, participant in self.state.written.get(key, ()))
                    for key in self.state.under_way(name)
                    for participant in sorted(self.state.transactions[key].participants)
                ],
            )

        return await self._answer(lambda: Decision([], answer))

    def _shown(self, view: View, answer: Result) -> Result:
        if not isinstance(answer, messages.DescribeTransactionResponse):
            return answer
        return msgspec.structs.replace(
            answer,
            participants=[
                participant
                for participant in answer.participants
                if view.shows_topic_id(participant[2])
            ],
        )

    @answers(messages.AbortTransaction)
    async def abort(self, request: messages.AbortTransaction) -> messages.Done:
        """See `messages.AbortTransaction`."""
        key = TransactionKey(request.family, request.epoch)
        transaction = self.state.transactions.get(key)
        if transaction is not None:
            name = transaction.transactional_id
            if request.transactional_id not in (None, name):
                return await self._answer(lambda: Decision([], messages.Done))
            await self._draw_family_for(name)
        return await self._answer(lambda: Decision(self._abort(key), messages.Done))

    def _summaries(self, name: str) -> list[messages.TransactionSummary]:
        """The transactions of an id that are in progress, oldest first; else its next one."""
        now_ms, value = self._clock_watch.now_ms(), self.state.ids[name]
        timeout_ms = value.transaction_timeout_ms
        summaries = []
        for key in self.state.under_way(name):
            transaction = self.state.transactions[key]
            age_ms = max(0, now_ms - transaction.start_ms)
            count = len(transaction.participants)
            most_ms = changes.TOUCHED_MS_MAX if transaction.is_touched else timeout_ms
            summaries.append(
                messages.TransactionSummary(name, *key, transaction.state, age_ms, count, most_ms)
            )
        following = value.next
        return summaries or [
            messages.TransactionSummary(name, *following, "ready", None, 0, timeout_ms)
        ]

    # --- before and after a decision --------------------------------------------------------

    async def _admit(self, request: messages.AnyRequest) -> None:
        """Returns when the request may be decided. Raises what `_begin` and `_draw_family_for`
        raise."""
        await super()._admit(request)
        if isinstance(request, OWNERS_REQUESTS):
            await self._draw_family_for(request.transactional_id)

    def _times(self) -> Times:
        clock = self._environment.clock
        return Times(clock.monotonic(), self._clock_watch.latest_ms())

    async def _draw_family_for(self, name: str) -> None:
        """Returns with a family in hand where a decision about this id needs one. Raises
        CoordinatorLoadingError, TransactionLimitError, and InvalidRequestError for the id of
        another coordinator."""
        generation = self._log.generation
        try:
            if self._partitions is None:
                self._partitions = await self._peers.coordinators()
            while changes.needs_family(self.state, name) and not self.state.families:
                await self._draw_family(generation)
        except RayqError as error:
            if isinstance(error, TransactionLimitError):
                raise
            raise CoordinatorLoadingError(
                f"The coordinator of {self.where} waits for its broker: {error}"
            ) from error
        self._check(generation)
        if coordinator_partition(name, self._partitions) != self._partition:
            raise InvalidRequestError(
                f"Transactional id {name!r} belongs to partition "
                f"{coordinator_partition(name, self._partitions)} of {TRANSACTIONS_TOPIC}, not to "
                f"{self._partition}."
            )

    async def _draw_family(self, generation: int) -> None:
        number = (await self._ask_broker(messages.DrawFamily())).number
        self._check(generation)
        if number >= FAMILIES_MAX:
            raise TransactionLimitError(
                "The cluster has given out all families of producer ids: no transactional id can "
                "be added."
            )
        self.state.families.append(make_family(self._partition, number))

    def _replay(self, record: Record) -> None:
        self.state.replay(record)

    def _append(self, records: Sequence[Record]) -> None:
        super()._append(records)
        for record in records:
            if isinstance(record, TransactionRecord) and record.value is not None:
                self._write_markers_of(record.key, record.value)

    def _abort(self, key: TransactionKey) -> list[Record]:
        return changes.abort(self.state, key, now_ms=self._clock_watch.latest_ms())

    # --- markers ----------------------------------------------------------------------------

    def _write_markers_of(self, key: TransactionKey, transaction: TransactionValue) -> None:
        if not transaction.is_decided:
            return

        async def write() -> None:
            started_s = self._environment.clock.monotonic()
            try:
                await self._log.until_committed()
            except RayqError:
                return  # If it is decided after all, the next coordinator finds that in the log.
            await asyncio.gather(
                *(
                    self._write_marker(key, transaction, participant)
                    for participant in transaction.participants
                )
            )
            self._end_seconds.observe(self._environment.clock.monotonic() - started_s)
            self._markers.pop(key, None)

        self._markers[key] = self._environment.tasks.spawn(
            self._replica_log.guard(write), f"markers of {key} of {self.where}"
        )

    async def _write_marker(
        self, key: TransactionKey, transaction: TransactionValue, participant: TopicIdPartition
    ) -> None:
        """Notes a participant's marker once it is durably written."""
        is_commit, epoch = transaction.state == "committing", self._leader.leader_epoch

        def build(topic_id: str, partition: int, leader_epoch: int) -> messages.WriteMarker:
            return messages.WriteMarker(topic_id, partition, leader_epoch, *key, is_commit, epoch)

        backoff = Backoff(self._environment, MARKER_RETRY_S, MARKER_RETRY_MAX_S)
        while True:
            if await self._is_marked(participant, build) and self._may_be_heard():
                break
            await asyncio.sleep(backoff.next_s())
        forgotten = changes.marker_written(self.state, key, participant)
        for record in forgotten:
            self.state.replay(record)
        self._log.append_later(forgotten)  # A coordinator that misses it writes markers again.

    async def _is_marked(
        self, participant: TopicIdPartition, build: Build[messages.Done]
    ) -> bool:
        """Makes another attempt. Returns whether the participant has its marker, or needs none: its
        topic is gone."""
        try:
            await self._peers.ask_leader(*participant, build)
        except RayqError as error:
            logger.debug("a marker of %s for %s: %s", self.where, participant, error)
            return self._peers.is_gone(participant[0])
        return True

    # --- starting over ----------------------------------------------------------------------

    def _fail_all(self, error: RayqError) -> None:
        super()._fail_all(error)
        markers, self._markers = self._markers, {}
        for task in markers.values():
            task.cancel()

    async def _load(self) -> None:
        state = TransactionState()
        count = await self._log.replay(lambda key, value: state.replay(decode(key, value)))
        self.state = state
        self._loaded()
        for key, transaction in state.transactions.items():
            self._write_markers_of(key, transaction)
        logger.info(
            "%s: %d transactional ids, %d transactions from %d records",
            self.where,
            len(state.ids),
            len(state.transactions),
            count,
        )

    # --- background -------------------------------------------------------------------------

    async def _work(self) -> None:
        """Aborts timed-out transactions and forgets unused ids, until the state is dropped."""
        clock = self._environment.clock
        generation = self._log.generation
        listening = ListeningClock(clock, TICK_S)
        unused_s = clock.monotonic() + UNUSED_CHECK_INTERVAL_S
        while True:
            await self._reset_wanted.wait(TICK_S)
            if generation != self._log.generation:
                return
            can_hear = self._may_be_heard()
            unheard_s = listening.look(can_hear=can_hear)
            if unheard_s > 0:
                changes.prolong(self.state, unheard_s)
            if not can_hear:
                continue
            if unheard_s > 0:
                await listening.read_arrived()
                if generation != self._log.generation:
                    return
            now_s = clock.monotonic()
            self._log.write_rest()
            for key in changes.expired(
                self.state, now_s=now_s, now_ms=self._clock_watch.now_ms()
            ):
                await self._expire(key, generation)
            if now_s >= unused_s and generation == self._log.generation:
                unused_s = now_s + UNUSED_CHECK_INTERVAL_S
                unused = changes.forget_unused(self.state, now_ms=self._clock_watch.now_ms())
                for first in range(0, len(unused), FORGOTTEN_AT_ONCE):
                    # All of them may exceed a batch; none depends on another.
                    self._append(unused[first : first + FORGOTTEN_AT_ONCE])

    async def _expire(self, key: TransactionKey, generation: int) -> None:
        """Aborts a timed-out transaction, or leaves it to the next check."""
        transaction = self.state.transactions.get(key)
        if transaction is None:
            return  # It ended while another transaction was aborted.
        name = transaction.transactional_id
        try:
            if changes.needs_family(self.state, name) and not self.state.families:
                await self._draw_family(generation)
            self._check(generation)
            aborted = self._abort(key)
            self._append(aborted)
        except RayqError as error:
            logger.info("%s: time-out of %r: %s", self.where, name, error)
            return
        if not aborted:
            return
        log_event(
            logger,
            logging.WARNING,
            "transaction_timed_out",
            transactional_id=name,
            timeout_ms=self.state.ids[name].transaction_timeout_ms,
        )


TransactionCoordinator.handlers = HandlerTable(
    "transaction coordinator", TransactionCoordinator, decisions=DECISIONS
)

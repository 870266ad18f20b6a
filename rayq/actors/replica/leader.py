"""The leader's part: append, wait for the in-sync set, answer; serve readers and followers.

One object leads in one leader epoch; newer metadata ends it. `PartitionState` holds what follows
from the facts; this is the shell that feeds it and acts on it (docs/protocol.md, rules 6 to 10).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.replica.replica_metrics import LeaderMetrics
from rayq.actors.signal import Signal
from rayq.config import MIB
from rayq.core.partition_state import Isr, PartitionState
from rayq.errors import (
    DivergedLogError,
    FencedEpochError,
    InvalidRequestError,
    InvalidTimestampError,
    LogTruncatedError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    NullKeyError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RayqError,
    RecordTooLargeError,
    StalePartitionError,
    StorageError,
    TimeoutError,
)
from rayq.logs import log_event
from rayq.storage.batch import (
    BatchHeader,
    check_body,
    check_produced,
    check_records,
    read_header,
)
from rayq.storage.log import Log
from rayq.storage.producer_state import ProducerState
from rayq.wire import messages
from rayq.wire.answer_room import AnswerRoom

logger = logging.getLogger(__name__)

REPLICA_FETCH_BYTES_MAX = 8 * MIB
CLIENT_FETCH_BYTES_MAX = 16 * MIB
CONFIRM_CHECK_S = 0.1
PROPOSAL_PAUSE_S = 0.1
"""After a proposal that failed: the metadata that says why is on its way. Each fetch of a follower
would else repeat it, as fast as the controller answers."""


class _DelayedProduce(NamedTuple):
    """A produce request that waits until the high watermark reaches `next_offset`."""

    next_offset: int
    deadline_s: float
    answer: messages.ProduceResponse
    future: asyncio.Future[messages.ProduceResponse]


class Leader:
    """See the module. `committed` takes each newer assignment of the same epoch; `end` is final.

    `check()` raises when the process may not answer as leader any more: it is asked again after
    every wait.
    """

    def __init__(
        self,
        replica_log: ReplicaLog,
        assignment: messages.PartitionAssignment,
        *,
        propose: Callable[[messages.AlterPartition], Awaitable[None]],
        has_lease: Callable[[], bool],
    ) -> None:
        self._replica_log = replica_log
        self._environment = replica_log.environment
        self._metrics = LeaderMetrics(
            replica_log.environment, assignment.topic, assignment.partition
        )
        self._assignment = assignment
        self._propose = propose
        self._has_lease = has_lease
        self._waiters: deque[_DelayedProduce] = deque()
        self._followers_moved = Signal()
        self._propose_from_s = 0.0
        self._ended: str | None = None
        self.where = replica_log.where
        log = replica_log.log
        self.state = PartitionState(
            broker=replica_log.broker,
            incarnation=replica_log.incarnation,
            leader_epoch=assignment.leader_epoch,
            epoch_start_offset=log.end_offset,
            min_insync=1,
            lag_time_max_s=replica_log.config.replica_lag_time_max_ms / 1000,
            end_offset=log.end_offset,
            flushed_offset=log.flushed_offset,
            high_watermark=min(replica_log.high_watermark, log.end_offset),
            started_s=self._environment.clock.monotonic(),
        )
        log_event(
            logger,
            logging.INFO,
            "leads",
            topic=assignment.topic,
            partition=assignment.partition,
            epoch=assignment.leader_epoch,
            broker=replica_log.broker,
            offset=log.end_offset,
        )

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """The partition's committed metadata, in this epoch."""
        self._assignment = assignment
        state = self.state
        if assignment.partition_epoch > state.partition_epoch:
            self._propose_from_s = 0.0  # On top of this one nothing has failed yet.
        state.committed(
            assignment.partition_epoch,
            assignment.isr,
            assignment.replicas,
            self._replica_log.topic_config.min_insync(
                assignment.replication_factor or len(assignment.replicas)
            ),
        )
        self._replica_log.wake_flusher()  # What was appended as a follower must be flushed.
        self._after_progress()
        if state.is_under_min_isr:
            self._fail_waiters(
                NotEnoughReplicasAfterAppendError(
                    f"The in-sync replicas of {self.where} fell below min_insync_replicas = "
                    f"{state.min_insync} after the record was appended: it may or may not be "
                    "written."
                )
            )
        self.propose_isr()

    def end(self, reason: str) -> None:
        """Another leads, or this process stops: whoever waits is told."""
        self._ended = reason
        self._fail_waiters(
            NotLeaderError(
                f"Broker {self._replica_log.broker} leads {self.where} no more ({reason}): the "
                "record may or may not be written."
            )
        )
        self._replica_log.appended.notify()
        self._replica_log.committed.notify()
        self._followers_moved.notify()

    def check(self) -> None:
        """Raises NotLeaderError unless this still leads and the process has its broker's lease."""
        if self._ended is not None or not self._has_lease():
            raise NotLeaderError(
                f"Broker {self._replica_log.broker} does not lead {self.where} "
                f"({self._ended or 'it lost its broker'}): ask for new metadata."
            )

    def flushed(self, flushed_offset: int) -> None:
        """This replica's disk holds everything below."""
        self.state.flushed(flushed_offset)
        self._after_progress()

    # --- producing --------------------------------------------------------------------------

    def produce(
        self, request: messages.Produce, payload: memoryview
    ) -> messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]:
        """Appends the payload's batch. See `messages.Produce` for the errors."""
        leader, log = self.state, self._replica_log.log
        if request.acks == -1 and leader.is_under_min_isr:
            raise NotEnoughReplicasError(
                f"{self.where} has {len(leader.isr)} in-sync replicas, acks='all' needs "
                f"min_insync_replicas = {leader.min_insync}. Nothing was written; it can be tried "
                "again when more brokers are back."
            )
        header = self._checked(payload)
        duplicate = log.producers.check(header)
        if duplicate is None:
            try:
                stamped = log.append_as_leader(
                    payload,
                    header,
                    leader_epoch=leader.leader_epoch,
                    now_ms=self._environment.clock.wall_ms(),
                )
            except StorageError as error:
                if log.failure is not None:
                    self._replica_log.fail(error)
                raise
            base_offset, append_time_ms = stamped.base_offset, stamped.append_time_ms
            next_offset = stamped.next_offset
            self._metrics.appended(header)
            leader.appended(log.end_offset)
            if leader.flushed_offset != log.flushed_offset:
                self.flushed(log.flushed_offset)  # flush="os": no flusher tells it later.
            self._replica_log.wake_flusher()
            self._replica_log.appended.notify()
        else:
            base_offset, append_time_ms = duplicate.base_offset, duplicate.append_time_ms
            next_offset = duplicate.last_offset + 1
        answer = messages.ProduceResponse(
            base_offset, append_time_ms, log.start_offset, duplicate is not None
        )
        if request.acks != -1:
            return answer
        self._after_progress()
        if next_offset <= self._replica_log.high_watermark:
            return answer
        loop = asyncio.get_running_loop()
        future: asyncio.Future[messages.ProduceResponse] = loop.create_future()
        deadline_s = self._environment.clock.monotonic() + request.timeout_ms / 1000
        waiter = _DelayedProduce(next_offset, deadline_s, answer, future)
        waiters = self._waiters
        place = len(waiters)
        while place and waiters[place - 1].next_offset > next_offset:
            place -= 1  # A duplicate waits among those of its original's time.
        waiters.insert(place, waiter)
        return future

    def _checked(self, payload: memoryview) -> BatchHeader:
        """The header of a batch that may be appended."""
        config = self._replica_log.topic_config
        if len(payload) > config.max_message_bytes:
            raise RecordTooLargeError(
                f"A batch of {len(payload)} bytes is above max_message_bytes = "
                f"{config.max_message_bytes} of topic {self._assignment.topic!r}: send smaller "
                "records, or raise it with alter_topic_config."
            )
        header = read_header(payload)
        if header.length != len(payload) or header.record_count == 0:
            raise InvalidRequestError("A produce request carries exactly one batch with records.")
        if header.has_null_keys and config.is_compacted:
            raise NullKeyError(
                f"{self.where} is compacted: it keeps the latest record of each key, and a record "
                "of this batch has none. Nothing was written; give every record a key."
            )
        if header.base_offset != 0 or header.last_offset_delta != header.record_count - 1:
            raise InvalidRequestError("The offsets of a new batch are its leader's to give.")
        check_body(payload, 0, header)
        check_produced(header)
        latest_ms = self._environment.clock.wall_ms() + config.message_timestamp_after_max_ms
        if header.max_timestamp_ms > latest_ms or header.first_timestamp_ms < 0:
            raise InvalidTimestampError(
                f"A record's timestamp {header.max_timestamp_ms} ms is negative or more than "
                f"message_timestamp_after_max_ms = {config.message_timestamp_after_max_ms} in the "
                "future: check the producer's clock and unit (milliseconds)."
            )
        # Last, since it costs most: whoever fails the others has not made this process unpack it.
        check_records(payload, 0, header, plain_bytes_max=config.plain_bytes_max)
        return header

    def _after_progress(self) -> None:
        """Takes the leader's high watermark over and answers those who waited for it."""
        high_watermark = self.state.high_watermark
        if self._ended is not None or high_watermark <= self._replica_log.high_watermark:
            return
        self._replica_log.high_watermark = high_watermark
        waiters = self._waiters
        while waiters and waiters[0].next_offset <= high_watermark:
            waiter = waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_result(waiter.answer)
        self._replica_log.committed.notify()

    def _fail_waiters(self, error: RayqError) -> None:
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)

    def expire_waiters(self, now_s: float) -> None:
        """Fails those who waited for too long."""
        if not any(waiter.deadline_s <= now_s for waiter in self._waiters):
            return
        kept: deque[_DelayedProduce] = deque()
        for waiter in self._waiters:
            if waiter.deadline_s > now_s:
                kept.append(waiter)
            elif not waiter.future.done():
                waiter.future.set_exception(
                    TimeoutError(
                        f"The in-sync replicas of {self.where} did not confirm the record in "
                        "time: it may or may not be written."
                    )
                )
        self._waiters = kept

    # --- reading ----------------------------------------------------------------------------

    async def fetch(
        self, request: messages.Fetch, room: AnswerRoom
    ) -> tuple[messages.FetchResponse, bytes]:
        """Committed batches; none are read before there is room for the answer. See
        `messages.Fetch` for the errors."""
        clock = self._environment.clock
        deadline_s = clock.monotonic() + request.wait_ms / 1000
        bytes_max = min(request.bytes_max, CLIENT_FETCH_BYTES_MAX)
        while True:
            async with room.take(bytes_max):
                limit = self._fetch_limit(request)
                log = self._replica_log.log
                if request.offset < limit:
                    data, next_offset = await self._replica_log.read(
                        request.offset, limit, bytes_max
                    )
                    self.check()
                    records = next_offset - request.offset
                    self._metrics.sent(data, records, is_at_end=next_offset == limit)
                    return self._read_answer(log, limit, next_offset), data
            remaining_s = deadline_s - clock.monotonic()
            if remaining_s <= 0 or not await self._replica_log.committed.wait(remaining_s):
                return self._read_answer(log, limit, request.offset), b""

    def _fetch_limit(self, request: messages.Fetch) -> int:
        """Below which offset it may read now."""
        self.check()
        log = self._replica_log.log
        if not self.state.may_serve:
            raise OffsetNotAvailableError(
                f"The new leader of {self.where} does not know its high watermark yet."
            )
        if request.offset < log.start_offset:
            raise OffsetOutOfRangeError(
                f"Offset {request.offset} of {self.where} is below the log start "
                f"{log.start_offset} (its end is {log.end_offset}): retention or delete_records "
                "removed it."
            )
        if request.last_epoch is not None:
            if request.last_epoch > self.leader_epoch:
                # A committed position can be newer than the metadata of the reader that took it up.
                raise NotLeaderError(
                    f"Broker {self._replica_log.broker} led {self.where} in epoch "
                    f"{self.leader_epoch}, and there are records of epoch {request.last_epoch}: "
                    "ask for new metadata."
                )
            epoch, end = log.epochs.end_for(request.last_epoch, log.end_offset)
            if epoch != request.last_epoch or end < request.offset:
                raise LogTruncatedError(
                    f"Offset {request.offset} of {self.where} is not in the log of its leader any "
                    f"more (it ends at {log.end_offset}): an unclean election cut it off. Seek to "
                    "go on."
                )
        if request.offset > log.end_offset:
            # No reader comes here by reading: what it was given is committed, so a leader that was
            # elected cleanly has it, and of another one the epoch that it names tells.
            raise OffsetOutOfRangeError(
                f"Offset {request.offset} of {self.where} is past the end of the log "
                f"{log.end_offset} (its start is {log.start_offset}): nothing was written there "
                "yet."
            )
        return self._replica_log.high_watermark

    def _read_answer(self, log: Log, limit: int, next_offset: int) -> messages.FetchResponse:
        return messages.FetchResponse(limit, log.start_offset, log.cleaned_offset, next_offset)

    def describe_producers(
        self, request: messages.DescribeProducers
    ) -> messages.DescribeProducersResponse:
        """Raises NotLeaderError, FencedEpochError, UnknownEpochError, OffsetNotAvailableError."""
        self._check_serving()
        return messages.DescribeProducersResponse(
            self._replica_log.log.producers.ids_from(
                request.first_producer_id, request.producer_id_count
            )
        )

    def _check_serving(self) -> None:
        if not self.state.may_serve:
            raise OffsetNotAvailableError(
                f"The new leader of {self.where} does not know its high watermark yet."
            )

    async def list_offsets(self, request: messages.ListOffsets) -> messages.ListOffsetsResponse:
        """Raises NotLeaderError, FencedEpochError, UnknownEpochError, OffsetNotAvailableError."""
        log = self._replica_log.log
        if request.timestamp_ms == messages.EARLIEST:
            return messages.ListOffsetsResponse(log.start_offset, None)
        self._check_serving()
        if request.timestamp_ms == messages.LATEST:
            return messages.ListOffsetsResponse(self._replica_log.high_watermark, None)
        found = await self._replica_log.offset_for_time(
            request.timestamp_ms, self._replica_log.high_watermark
        )
        if found is None:
            return messages.ListOffsetsResponse(None, None)
        return messages.ListOffsetsResponse(*found)

    async def describe_offset(
        self, request: messages.DescribeOffset
    ) -> messages.DescribeOffsetResponse:
        """See `messages.DescribeOffset`."""
        if not self.state.may_serve:
            raise OffsetNotAvailableError(
                f"The new leader of {self.where} does not know its high watermark yet."
            )
        limit = self._replica_log.high_watermark
        offset = max(request.offset, self._replica_log.log.start_offset)
        if offset >= limit:
            return messages.DescribeOffsetResponse(None, None)
        data, _ = await self._replica_log.read(offset, limit, 1)
        append_time_ms = read_header(data).append_time_ms
        age_ms = max(self._environment.clock.wall_ms() - append_time_ms, 0)
        return messages.DescribeOffsetResponse(append_time_ms, age_ms)

    # --- the log start ----------------------------------------------------------------------

    async def delete_records(
        self, request: messages.DeleteRecords
    ) -> messages.DeleteRecordsResponse:
        """Moves the log start; answers when whoever may lead next has moved it too, durably."""
        clock = self._environment.clock
        deadline_s = clock.monotonic() + request.timeout_ms / 1000
        leader = self.state
        self._check_serving()
        # Where others cannot copy past damage, only this lets them come back into sync.
        if leader.is_under_min_isr and not self._replica_log.serves_around_damage:
            raise NotEnoughReplicasError(
                f"{self.where} has {len(leader.isr)} in-sync replicas, delete_records needs "
                f"min_insync_replicas = {leader.min_insync}: another that leads later would have "
                "the records again. Nothing was deleted; it can be tried again when more brokers "
                "are back."
            )
        limit, before = self._replica_log.high_watermark, request.before_offset
        if before is None:
            before = limit
        if before > limit:
            raise OffsetOutOfRangeError(
                f"Offset {before} is past the high watermark {limit} of "
                f"{self.where}: only committed records can be deleted."
            )
        await self._replica_log.advance_log_start(before)
        self._replica_log.appended.notify()  # Followers hear of it with their next fetch.
        while True:
            if leader.is_log_start_committed(before):
                return messages.DeleteRecordsResponse(self._replica_log.log.start_offset)
            remaining_s = deadline_s - clock.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(
                    f"The in-sync replicas of {self.where} ({len(leader.isr)}, min_insync_replicas "
                    f"= {leader.min_insync}) did not confirm in time that they start at offset "
                    f"{before}: the records below may or may not be there again under another "
                    "leader. Try again."
                )
            await self._followers_moved.wait(min(remaining_s, CONFIRM_CHECK_S))
            self.check()

    # --- followers --------------------------------------------------------------------------

    async def replica_fetch(
        self, request: messages.ReplicaFetch
    ) -> tuple[messages.ReplicaFetchResponse, bytes]:
        """What a follower pulls. See `messages.ReplicaFetch`."""
        clock = self._environment.clock
        deadline_s = clock.monotonic() + request.wait_ms / 1000
        is_first = True
        while True:
            self.check()
            leader, log = self.state, self._replica_log.log
            if is_first:
                early = self._check_follower(leader, log, request)
                if early is not None:
                    return early, b""
                is_first = False
            horizon = log.tombstone_horizon
            if request.offset < log.end_offset:
                data, _ = await self._replica_log.read(
                    request.offset,
                    log.end_offset,
                    min(request.bytes_max, REPLICA_FETCH_BYTES_MAX),
                )
                self.check()
                if self._is_below_horizon(leader, log, request):
                    # Tombstones above its end went while it waited.
                    return self._fetch_answer(leader, reset_to=log.start_offset), b""
                if log.tombstone_horizon != horizon:
                    continue  # What was read may be from before; the answer would name the new one.
                self._metrics.replicated(data)
                return self._fetch_answer(leader), data
            if request.log_start_offset < log.start_offset:
                return self._fetch_answer(leader), b""  # It moves its own, and says so at once.
            remaining_s = deadline_s - clock.monotonic()
            if remaining_s <= 0 or not await self._replica_log.appended.wait(remaining_s):
                return self._fetch_answer(leader), b""

    def _check_follower(
        self, leader: PartitionState, log: Log, request: messages.ReplicaFetch
    ) -> messages.ReplicaFetchResponse | None:
        """Takes note of a follower whose log agrees with this one; else says what it has to do."""
        leader.check_process(request.broker, request.incarnation)
        if request.offset < log.start_offset:
            if (request.broker, request.incarnation) in leader.isr:
                raise DivergedLogError(
                    f"{self.where} on broker {request.broker} is in sync and yet its log ends at "
                    f"{request.offset}, below the log start {log.start_offset} of its leader."
                )
            return self._fetch_answer(leader, reset_to=log.start_offset)
        if self._is_below_horizon(leader, log, request):
            return self._fetch_answer(leader, reset_to=log.start_offset)
        if request.last_epoch is not None:
            epoch, end = log.epochs.end_for(request.last_epoch, log.end_offset)
            if epoch != request.last_epoch or end < request.offset:
                return self._fetch_answer(leader, diverging=(epoch, end))
        elif request.offset > log.end_offset:
            return self._fetch_answer(leader, diverging=(None, log.end_offset))
        leader.follower_fetched(
            request.broker,
            request.incarnation,
            flushed=min(request.flushed, request.offset),
            log_start_offset=request.log_start_offset,
            now_s=self._environment.clock.monotonic(),
        )
        self._followers_moved.notify()
        self._after_progress()
        self.propose_isr()
        return None

    def _is_below_horizon(
        self, leader: PartitionState, log: Log, request: messages.ReplicaFetch
    ) -> bool:
        """Whether the follower may hold records whose tombstones are gone here: it would keep them
        for ever (docs/protocol.md, rule 14). An empty log holds none, nor does one that was copied
        from here after they had gone: a copy that takes more than one fetch passes below the
        horizon."""
        if not request.log_start_offset < request.offset < log.tombstone_horizon:
            return False
        if request.copied_horizon >= log.tombstone_horizon:
            return False
        if (request.broker, request.incarnation) in leader.isr:
            raise DivergedLogError(
                f"{self.where} on broker {request.broker} is in sync and yet its log ends at "
                f"{request.offset}, below the tombstone horizon {log.tombstone_horizon} of its "
                "leader."
            )
        return True

    def _fetch_answer(
        self,
        leader: PartitionState,
        *,
        diverging: tuple[int | None, int] | None = None,
        reset_to: int | None = None,
    ) -> messages.ReplicaFetchResponse:
        epoch, end = (None, None) if diverging is None else diverging
        return messages.ReplicaFetchResponse(
            self._replica_log.high_watermark,
            self._replica_log.log.start_offset,
            leader.epoch_start_offset,
            epoch,
            end,
            reset_to,
            self._replica_log.log.cleaned_offset,
            self._replica_log.log.tombstone_horizon,
        )

    def replica_flushed(self, request: messages.ReplicaFlushed) -> None:
        self.state.follower_flushed(
            request.broker,
            request.incarnation,
            flushed=min(request.flushed, self._replica_log.log.end_offset),
            now_s=self._environment.clock.monotonic(),
        )
        self._after_progress()

    def replica_snapshot(
        self, request: messages.ReplicaSnapshot
    ) -> tuple[messages.ReplicaSnapshotResponse, bytes]:
        """Producer state and epochs for a follower that restarts at the log start.

        Only batches below the log start: the rest may never be committed, and the follower learns
        it from the batches themselves.
        """
        log = self._replica_log.log
        epochs = [(epoch, min(start, log.start_offset)) for epoch, start in log.epochs.entries()]
        kept = [entry for entry in epochs if entry[1] <= log.start_offset]
        answer = messages.ReplicaSnapshotResponse(log.start_offset, kept)
        producers = ProducerState()
        producers.load(log.producers.snapshot())
        producers.forget_from(log.start_offset)
        return answer, producers.snapshot()

    # --- the in-sync set --------------------------------------------------------------------

    def propose_isr(self) -> None:
        leader, now_s = self.state, self._environment.clock.monotonic()
        if self._ended is not None or not self._has_lease() or now_s < self._propose_from_s:
            return
        leader.log_start_offset = self._replica_log.log.start_offset
        isr = leader.proposal(now_s)
        if isr is None:
            return
        request = messages.AlterPartition(
            self._assignment.topic_id,
            self._assignment.partition,
            leader.broker,
            leader.incarnation,
            leader.leader_epoch,
            leader.partition_epoch,
            list(isr),
        )

        self._environment.tasks.spawn(
            self._send_proposal(isr, request), f"propose the ISR of {self.where}"
        )

    async def _send_proposal(self, isr: Isr, request: messages.AlterPartition) -> None:
        try:
            await self._propose(request)
        except (StalePartitionError, FencedEpochError) as error:
            logger.info("ISR of %s: %s", self.where, error)
            self.state.proposal_refused(isr, request.partition_epoch)
            self._pause_proposals(request.partition_epoch)
        except RayqError as error:
            logger.info("ISR of %s: %s", self.where, error)
            self.state.proposal_unknown(isr, request.partition_epoch)
            self._pause_proposals(request.partition_epoch)
        self._after_progress()

    def _pause_proposals(self, partition_epoch: int) -> None:
        if partition_epoch == self.state.partition_epoch:
            self._propose_from_s = self._environment.clock.monotonic() + PROPOSAL_PAUSE_S

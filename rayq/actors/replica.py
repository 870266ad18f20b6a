"""One replica of one partition: its log, and its part as leader or follower (PROTOCOL B and C).

A replica acts on committed metadata only (`apply`), and only while its process holds a lease: its
broker was heard within a session. Produce: check, stamp, append, group-commit in a thread, wait for
the in-sync set, answer. All state belongs to the event loop; threads run plans of the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from rayq.actors.follower import Follower
from rayq.actors.signal import Signal
from rayq.config import MIB, ClusterConfig, TopicConfig, parse
from rayq.core.partition_state import Isr, PartitionState
from rayq.environment import Environment
from rayq.errors import (
    FencedEpochError,
    InvalidRequestError,
    InvalidTimestampError,
    LogTruncatedError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RayqError,
    RecordTooLargeError,
    StalePartitionError,
    StorageError,
    TimeoutError,
    UnknownEpochError,
)
from rayq.storage.batch import BatchHeader, check_body, read_header
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.log import Log
from rayq.wire import messages
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)

REPLICA_FETCH_BYTES_MAX = 8 * MIB
CLIENT_FETCH_BYTES_MAX = 16 * MIB
TICK_S = 0.1


class _Waiter(NamedTuple):
    """A produce request that waits until the high watermark reaches `next_offset`."""

    next_offset: int
    deadline_s: float
    answer: messages.ProduceResponse
    future: asyncio.Future[messages.ProduceResponse]


class Replica:
    """See the module. `open` first, then `apply` each newer assignment; `close` or `abandon` last.

    `failure` says why the replica stopped (its disk failed, its log diverged); it then refuses
    everything, and the process's heartbeat tells.
    """

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        pool: ConnectionPool,
        assignment: messages.PartitionAssignment,
        *,
        broker: int,
        incarnation: str,
        has_lease: Callable[[], bool],
        propose: Callable[[messages.AlterPartition], Awaitable[None]],
        on_failure: Callable[[], None],
    ) -> None:
        self._environment = environment
        self._config = config
        self._pool = pool
        self.assignment = assignment
        self.topic_config = parse(TopicConfig, assignment.config)
        self.broker = broker
        self.incarnation = incarnation
        self._has_lease = has_lease
        self._propose = propose
        self._on_failure = on_failure
        self.where = f"{assignment.topic}-{assignment.partition}"
        self.failure: str | None = None
        self.high_watermark = 0
        self._log: Log | None = None
        self._directory: PartitionDirectory | None = None
        self._leader: PartitionState | None = None
        self._follower: Follower | None = None
        self._waiters: deque[_Waiter] = deque()
        self._dirty = Signal()
        self._checkpoint_wanted = False
        self.flush_lock = asyncio.Lock()
        self._appended = Signal()
        self._committed = Signal()
        self._followers_moved = Signal()
        self._last_wall_ms = environment.clock.wall_ms()
        self._last_tick_s = environment.clock.monotonic()
        self._retention_s = self._last_tick_s
        self._tasks: list[asyncio.Task[None]] = []

    # --- life -------------------------------------------------------------------------------

    async def open(self, directory: PartitionDirectory) -> None:
        """Recovers the log, in a thread. Raises StorageError, UnsupportedFormatError."""
        self._directory = directory
        self._log = await self._environment.threads.run(
            _open_log,
            self._environment,
            directory.path,
            self.topic_config,
            self._config.flush_checkpoint_bytes,
        )
        self.high_watermark = self._log.persisted_high_watermark
        spawn = self._environment.tasks.spawn
        self._tasks = [
            spawn(self._flush_for_ever(), f"flush {self.where}"),
            spawn(self._tick_for_ever(), f"tick {self.where}"),
        ]

    @property
    def is_open(self) -> bool:
        return self._log is not None and self.failure is None

    @property
    def log(self) -> Log:
        if self.failure is not None:
            raise StorageError(f"Replica of {self.where} on broker {self.broker}: {self.failure}")
        if self._log is None:
            raise NotLeaderError(f"The replica of {self.where} is still opening its log.")
        return self._log

    def status(self) -> messages.ReplicaStatus:
        log = self._log
        return messages.ReplicaStatus(
            self.assignment.topic_id,
            self.assignment.partition,
            None if log is None else log.last_epoch,
            -1 if log is None else log.flushed_offset,
            self.failure,
        )

    async def close(self) -> messages.ReplicaStatus:
        """A controlled stop: serves no more, flushes, and says exactly where the log ends."""
        self._end_role("it is stopping")
        for task in self._tasks:
            task.cancel()
        log = self._log
        if log is not None and self.failure is None:
            async with self.flush_lock:
                await self._environment.threads.run(log.close, self.high_watermark)
        status = self.status()
        self._release()
        return status

    def abandon(self) -> None:
        """Stops at once and leaves the disk as it is: the topic was deleted, or the disk failed."""
        self._end_role("it is gone")
        for task in self._tasks:
            task.cancel()
        self._release()

    def _release(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def fail(self, error: BaseException) -> None:
        """An error of the disk or of the log is final for this process (PROTOCOL C)."""
        if self.failure is not None:
            return
        logger.error("replica of %s on broker %d stops: %s", self.where, self.broker, error)
        self.failure = str(error)
        self._end_role(self.failure)
        self._on_failure()

    # --- role -------------------------------------------------------------------------------

    def apply(self, assignment: messages.PartitionAssignment) -> None:
        """Takes a newer committed assignment."""
        if assignment.partition_epoch < self.assignment.partition_epoch:
            return
        before, self.assignment = self.assignment, assignment
        if assignment.config != before.config:
            self.topic_config = parse(TopicConfig, assignment.config)
            if self._log is not None:
                self._log.config = self.topic_config
        if self._log is None or self.failure is not None:
            return
        is_leader = (assignment.leader, assignment.leader_incarnation) == (
            self.broker,
            self.incarnation,
        )
        if self._leader is not None and (
            not is_leader or self._leader.leader_epoch != assignment.leader_epoch
        ):
            self._end_role(
                f"broker {assignment.leader} leads {self.where} in epoch {assignment.leader_epoch}"
            )
        if is_leader:
            self._lead(assignment)
        else:
            self._follow(assignment)

    def _lead(self, assignment: messages.PartitionAssignment) -> None:
        if self._leader is None:
            self._stop_following()
            log = self.log
            now_s = self._environment.clock.monotonic()
            self._leader = PartitionState(
                broker=self.broker,
                incarnation=self.incarnation,
                leader_epoch=assignment.leader_epoch,
                epoch_start_offset=log.end_offset,
                min_insync=1,
                lag_time_max_s=self._config.replica_lag_time_max_ms / 1000,
                end_offset=log.end_offset,
                flushed_offset=log.flushed_offset,
                high_watermark=min(self.high_watermark, log.end_offset),
                started_s=now_s,
            )
            logger.info(
                "broker %d leads %s in epoch %d from offset %d",
                self.broker,
                self.where,
                assignment.leader_epoch,
                log.end_offset,
            )
        self._leader.committed(
            assignment.partition_epoch,
            assignment.isr,
            assignment.replicas,
            self.topic_config.min_insync(len(assignment.replicas)),
        )
        self._dirty.notify()  # What was appended as a follower must be flushed to count.
        self._after_progress()
        if self._leader.is_under_min_isr:
            self._fail_waiters(
                NotEnoughReplicasAfterAppendError(
                    f"The in-sync replicas of {self.where} fell below min_insync_replicas = "
                    f"{self._leader.min_insync} after the record was appended: it may or may not "
                    "be written."
                )
            )
        self._propose_isr()

    def _follow(self, assignment: messages.PartitionAssignment) -> None:
        follower = self._follower
        if follower is not None and follower.is_for(assignment):
            return
        self._stop_following()
        if assignment.leader is None or assignment.leader_host is None:
            return
        self._follower = Follower(self, self._environment, self._pool, assignment)
        self._follower.start()

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _end_role(self, reason: str) -> None:
        self._stop_following()
        self._leader = None
        self._fail_waiters(
            NotLeaderError(
                f"Broker {self.broker} leads {self.where} no more ({reason}): the record may or "
                "may not be written."
            )
        )
        self._appended.notify()
        self._committed.notify()
        self._followers_moved.notify()

    def _leading(self, leader_epoch: int) -> PartitionState:
        """The leader's state. Raises NotLeaderError, FencedEpochError, UnknownEpochError."""
        leader = self._leader
        if leader is None or not self._has_lease():
            if self.failure is not None:
                raise NotLeaderError(
                    f"The replica of {self.where} on broker {self.broker} stopped: {self.failure}"
                )
            raise NotLeaderError(
                f"Broker {self.broker} does not lead {self.where}: ask for new metadata."
            )
        if leader_epoch < leader.leader_epoch:
            raise FencedEpochError(
                f"{self.where} is in leader epoch {leader.leader_epoch}, the request in "
                f"{leader_epoch}: ask for new metadata."
            )
        if leader_epoch > leader.leader_epoch:
            raise UnknownEpochError(
                f"Broker {self.broker} knows leader epoch {leader.leader_epoch} of {self.where}, "
                f"the request is in {leader_epoch}: try again."
            )
        return leader

    # --- producing --------------------------------------------------------------------------

    def produce(
        self, request: messages.Produce, payload: memoryview
    ) -> messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]:
        """Appends the payload's batch. See `messages.Produce` for the errors."""
        leader = self._leading(request.leader_epoch)
        log = self.log
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
                    self.fail(error)
                raise
            base_offset, append_time_ms = stamped.base_offset, stamped.append_time_ms
            next_offset = stamped.next_offset
            leader.appended(log.end_offset)
            if leader.flushed_offset != log.flushed_offset:
                leader.flushed(log.flushed_offset)
            self._dirty.notify()
            self._appended.notify()
        else:
            base_offset, append_time_ms = duplicate.base_offset, duplicate.append_time_ms
            next_offset = duplicate.last_offset + 1
        answer = messages.ProduceResponse(base_offset, append_time_ms, log.start_offset)
        if request.acks != -1:
            return answer
        self._after_progress()
        if next_offset <= self.high_watermark:
            return answer
        loop = asyncio.get_running_loop()
        future: asyncio.Future[messages.ProduceResponse] = loop.create_future()
        deadline_s = self._environment.clock.monotonic() + request.timeout_ms / 1000
        self._waiters.append(_Waiter(next_offset, deadline_s, answer, future))
        return future

    def _checked(self, payload: memoryview) -> BatchHeader:
        """The header of a batch that may be appended."""
        config = self.topic_config
        if len(payload) > config.max_message_bytes:
            raise RecordTooLargeError(
                f"A batch of {len(payload)} bytes is above max_message_bytes = "
                f"{config.max_message_bytes} of topic {self.assignment.topic!r}: send smaller "
                "records, or raise it with alter_topic_config."
            )
        header = read_header(payload)
        if header.length != len(payload) or header.record_count == 0:
            raise InvalidRequestError("A produce request carries exactly one batch with records.")
        if header.base_offset != 0 or header.last_offset_delta != header.record_count - 1:
            raise InvalidRequestError("The offsets of a new batch are its leader's to give.")
        check_body(payload, 0, header)
        latest_ms = self._environment.clock.wall_ms() + config.message_timestamp_after_max_ms
        if header.max_timestamp_ms > latest_ms or header.first_timestamp_ms < 0:
            raise InvalidTimestampError(
                f"A record's timestamp {header.max_timestamp_ms} ms is negative or more than "
                f"message_timestamp_after_max_ms = {config.message_timestamp_after_max_ms} in the "
                "future: check the producer's clock and unit (milliseconds)."
            )
        return header

    def _after_progress(self) -> None:
        """Takes the leader's high watermark over and answers those who waited for it."""
        leader = self._leader
        if leader is None or leader.high_watermark <= self.high_watermark:
            return
        self.high_watermark = leader.high_watermark
        waiters = self._waiters
        while waiters and waiters[0].next_offset <= self.high_watermark:
            waiter = waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_result(waiter.answer)
        self._committed.notify()

    def _fail_waiters(self, error: RayqError) -> None:
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)

    def _expire_waiters(self, now_s: float) -> None:
        if not any(waiter.deadline_s <= now_s for waiter in self._waiters):
            return
        kept: deque[_Waiter] = deque()
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

    async def fetch(self, request: messages.Fetch) -> tuple[messages.FetchResponse, bytes]:
        """Committed batches. See `messages.Fetch` for the errors."""
        clock = self._environment.clock
        deadline_s = clock.monotonic() + request.wait_ms / 1000
        while True:
            leader = self._leading(request.leader_epoch)
            log = self.log
            if not leader.may_serve:
                raise OffsetNotAvailableError(
                    f"The new leader of {self.where} does not know its high watermark yet."
                )
            if request.last_epoch is not None:
                epoch, end = log.epochs.end_for(request.last_epoch, log.end_offset)
                if epoch != request.last_epoch or end < request.offset:
                    raise self._truncated(request.offset)
            if request.offset > log.end_offset:
                raise self._truncated(request.offset)
            if request.offset < log.start_offset:
                raise OffsetOutOfRangeError(
                    f"Offset {request.offset} of {self.where} is below the log start "
                    f"{log.start_offset}: retention or delete_records removed it."
                )
            limit = self.high_watermark
            if request.offset < limit:
                data, next_offset = await self._read(
                    request.offset, limit, min(request.bytes_max, CLIENT_FETCH_BYTES_MAX)
                )
                return messages.FetchResponse(limit, log.start_offset, 0, next_offset), data
            remaining_s = deadline_s - clock.monotonic()
            if remaining_s <= 0 or not await self._committed.wait(remaining_s):
                answer = messages.FetchResponse(limit, log.start_offset, 0, request.offset)
                return answer, b""

    def _truncated(self, offset: int) -> LogTruncatedError:
        return LogTruncatedError(
            f"Offset {offset} of {self.where} is not in the log of its leader any more (it ends "
            f"at {self.log.end_offset}): an unclean election cut it off. Seek to go on."
        )

    async def _read(self, offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
        """Whole batches of [offset, limit). A read that needs the disk runs in a thread."""
        plan = self.log.plan_read(offset, limit, bytes_max)
        result = plan.run_cached()
        if result is None:
            try:
                result = await self._environment.threads.run(plan.run)
            except OSError as error:
                failure = StorageError(f"Reading {self.where} at offset {offset}: {error}")
                self.fail(failure)
                raise failure from error
        return result.data, result.next_offset

    async def list_offsets(self, request: messages.ListOffsets) -> messages.ListOffsetsResponse:
        """Raises NotLeaderError, FencedEpochError, UnknownEpochError, OffsetNotAvailableError."""
        leader = self._leading(request.leader_epoch)
        if request.timestamp_ms == messages.EARLIEST:
            return messages.ListOffsetsResponse(self.log.start_offset, None)
        if not leader.may_serve:
            raise OffsetNotAvailableError(
                f"The new leader of {self.where} does not know its high watermark yet."
            )
        if request.timestamp_ms == messages.LATEST:
            return messages.ListOffsetsResponse(self.high_watermark, None)
        plan = self.log.plan_offset_for_time(request.timestamp_ms, self.high_watermark)
        found = await self._environment.threads.run(plan.run)
        if found is None:
            return messages.ListOffsetsResponse(None, None)
        return messages.ListOffsetsResponse(*found)

    async def check_range(self, request: messages.CheckRange) -> messages.Done:
        """Re-reads a batch that a reader found damaged; damage here ends this replica."""
        log = self.log
        if log.start_offset <= request.offset < log.end_offset:
            try:
                await self._environment.threads.run(log.verify_range, request.offset)
            except (StorageError, OSError) as error:
                self.fail(error)
                raise
        return messages.Done()

    def describe(self) -> messages.DescribeReplicaResponse:
        log = self.log
        return messages.DescribeReplicaResponse(
            self.broker,
            self._environment.pid,
            self.assignment.leader_epoch,
            self._leader is not None,
            log.start_offset,
            self.high_watermark,
            log.end_offset,
            log.flushed_offset,
            log.size_bytes,
        )

    # --- the log start ----------------------------------------------------------------------

    async def delete_records(
        self, request: messages.DeleteRecords
    ) -> messages.DeleteRecordsResponse:
        """Moves the log start; answers when all in-sync replicas have moved, durably."""
        clock = self._environment.clock
        deadline_s = clock.monotonic() + request.timeout_ms / 1000
        leader = self._leading(request.leader_epoch)
        before = self.high_watermark if request.before_offset is None else request.before_offset
        if before > self.high_watermark:
            raise OffsetOutOfRangeError(
                f"Offset {before} is past the high watermark {self.high_watermark} of "
                f"{self.where}: only committed records can be deleted."
            )
        await self.advance_log_start(before)
        self._appended.notify()  # Followers hear of it with their next fetch.
        while True:
            least = leader.isr_log_start_offset()
            if len(leader.isr) == 1 or (least is not None and least >= before):
                return messages.DeleteRecordsResponse(self.log.start_offset)
            remaining_s = deadline_s - clock.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"The replicas of {self.where} did not confirm in time.")
            await self._followers_moved.wait(min(remaining_s, TICK_S))
            leader = self._leading(request.leader_epoch)

    async def advance_log_start(self, offset: int) -> None:
        """Moves the log start up to `offset`, durably; removes old files in a thread."""
        log = self.log
        if offset <= log.start_offset:
            return
        paths = log.advance_start(min(offset, log.end_offset))
        await self.flush(checkpoint=True)
        if paths:
            await self._environment.threads.run(Log.remove_files, self._environment.disk, paths)

    async def _keep_retention(self) -> None:
        log = self.log
        start = log.retention_start(self._environment.clock.wall_ms(), self.high_watermark)
        if start > log.start_offset:
            logger.info("retention moves the log start of %s to %d", self.where, start)
            await self.advance_log_start(start)
            self._appended.notify()

    # --- followers --------------------------------------------------------------------------

    async def replica_fetch(
        self, request: messages.ReplicaFetch
    ) -> tuple[messages.ReplicaFetchResponse, bytes]:
        """What a follower pulls. See `messages.ReplicaFetch`."""
        clock = self._environment.clock
        deadline_s = clock.monotonic() + request.wait_ms / 1000
        is_first = True
        while True:
            leader = self._leading(request.leader_epoch)
            log = self.log
            if is_first:
                early = self._check_follower(leader, log, request)
                if early is not None:
                    return early, b""
                is_first = False
            start_offset = log.start_offset
            if request.offset < log.end_offset:
                data, _ = await self._read(
                    request.offset,
                    log.end_offset,
                    min(request.bytes_max, REPLICA_FETCH_BYTES_MAX),
                )
                self._leading(request.leader_epoch)
                return self._fetch_answer(leader), data
            remaining_s = deadline_s - clock.monotonic()
            if remaining_s <= 0 or not await self._appended.wait(remaining_s):
                return self._fetch_answer(leader), b""
            if start_offset != log.start_offset:
                self._leading(request.leader_epoch)
                return self._fetch_answer(leader), b""

    def _check_follower(
        self, leader: PartitionState, log: Log, request: messages.ReplicaFetch
    ) -> messages.ReplicaFetchResponse | None:
        """Takes note of a follower whose log agrees with this one; else says what it has to do."""
        if request.offset < log.start_offset:
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
        self._propose_isr()
        return None

    def _fetch_answer(
        self,
        leader: PartitionState,
        *,
        diverging: tuple[int | None, int] | None = None,
        reset_to: int | None = None,
    ) -> messages.ReplicaFetchResponse:
        epoch, end = (None, None) if diverging is None else diverging
        return messages.ReplicaFetchResponse(
            self.high_watermark,
            self.log.start_offset,
            leader.epoch_start_offset,
            epoch,
            end,
            reset_to,
        )

    def replica_flushed(self, request: messages.ReplicaFlushed) -> None:
        leader = self._leading(request.leader_epoch)
        leader.follower_flushed(
            request.broker,
            request.incarnation,
            flushed=min(request.flushed, self.log.end_offset),
            now_s=self._environment.clock.monotonic(),
        )
        self._after_progress()

    def replica_snapshot(
        self, request: messages.ReplicaSnapshot
    ) -> tuple[messages.ReplicaSnapshotResponse, bytes]:
        """Producer state and epochs for a follower that restarts at the log start.

        The producer state is that of the log's end: a superset, which the follower's own appends
        then only confirm.
        """
        self._leading(request.leader_epoch)
        log = self.log
        epochs = [(epoch, min(start, log.start_offset)) for epoch, start in log.epochs.entries()]
        kept = [entry for entry in epochs if entry[1] <= log.start_offset]
        answer = messages.ReplicaSnapshotResponse(log.start_offset, kept)
        return answer, log.producers.snapshot()

    def appended_as_follower(self) -> None:
        self._dirty.notify()

    # --- the in-sync set --------------------------------------------------------------------

    def _propose_isr(self) -> None:
        leader = self._leader
        if leader is None or not self._has_lease():
            return
        isr = leader.proposal(self._environment.clock.monotonic())
        if isr is None:
            return
        request = messages.AlterPartition(
            self.assignment.topic_id,
            self.assignment.partition,
            self.broker,
            self.incarnation,
            leader.leader_epoch,
            leader.partition_epoch,
            list(isr),
        )

        self._environment.tasks.spawn(
            self._send_proposal(leader, isr, request), f"propose the ISR of {self.where}"
        )

    async def _send_proposal(
        self, leader: PartitionState, isr: Isr, request: messages.AlterPartition
    ) -> None:
        try:
            await self._propose(request)
        except (StalePartitionError, FencedEpochError) as error:
            logger.info("ISR of %s: %s", self.where, error)
            leader.proposal_refused(isr)
        except RayqError as error:
            logger.info("ISR of %s: %s", self.where, error)
            leader.proposal_unknown(isr)
        self._after_progress()

    # --- background -------------------------------------------------------------------------

    async def _flush_for_ever(self) -> None:
        """Group commit: one flush at a time covers all that was appended meanwhile."""
        while True:
            if not await self._flush_once(checkpoint=False):
                await self._dirty.wait(60.0)

    async def flush(self, *, checkpoint: bool) -> None:
        await self._flush_once(checkpoint=checkpoint)

    async def _flush_once(self, *, checkpoint: bool) -> bool:
        """Whether there was something to do."""
        async with self.flush_lock:
            if self.failure is not None:
                return False
            log = self.log
            plan = log.plan_flush(self.high_watermark, checkpoint=checkpoint)
            if plan is None:
                return False
            try:
                await self._environment.threads.run(plan.run)
            except OSError as error:
                # The kernel may have dropped the pages: never retry, never trust them (fsyncgate).
                self.fail(StorageError(f"Flushing the log of {self.where} failed: {error}"))
                return False
            if not log.apply_flush(plan):
                return True
        if self._leader is not None:
            self._leader.flushed(log.flushed_offset)
            self._after_progress()
        elif self._follower is not None:
            self._follower.flushed(log.flushed_offset)
        return True

    async def _tick_for_ever(self) -> None:
        clock = self._environment.clock
        isr_s = clock.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = clock.monotonic()
            self._expire_waiters(now_s)
            if self._leader is None or self.failure is not None:
                continue
            if now_s - isr_s >= self._config.heartbeat_interval_ms / 1000:
                isr_s = now_s
                self._propose_isr()
            if now_s - self._retention_s >= self._config.retention_check_interval_ms / 1000:
                self._retention_s = now_s
                if not self._clock_leapt(now_s):
                    await self._keep_retention()

    def _clock_leapt(self, now_s: float) -> bool:
        """Whether wall and monotonic clock disagree since the last look: retention then waits."""
        wall_ms = self._environment.clock.wall_ms()
        leap_ms = (wall_ms - self._last_wall_ms) - (now_s - self._last_tick_s) * 1000
        self._last_wall_ms, self._last_tick_s = wall_ms, now_s
        if abs(leap_ms) < 60_000:
            return False
        logger.warning(
            "the wall clock leapt by %.0f s: retention of %s pauses", leap_ms / 1000, self.where
        )
        return True


def _open_log(
    environment: Environment, path: str, config: TopicConfig, checkpoint_bytes: int
) -> Log:
    return Log.open(
        environment.disk,
        path,
        config,
        checkpoint_bytes=checkpoint_bytes,
        now_ms=environment.clock.wall_ms(),
    )

"""A replica's log, with what both roles need: reads, the log start, cuts, failure.

All state belongs to the event loop; threads run the log's plans.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rayq import messages
from rayq.actors.replica.directory_jobs import DirectoryJobs
from rayq.actors.replica.flusher import Flusher
from rayq.actors.signal import Signal
from rayq.config import ClusterConfig, TopicConfig, parse_stored
from rayq.core.partition.state import PartitionState
from rayq.environment import Environment
from rayq.errors import (
    CorruptBatchError,
    NotLeaderError,
    OpenFilesLimitError,
    RayqError,
    StorageError,
)
from rayq.storage.appending import open_failed
from rayq.storage.batch import is_stand_in, read_header
from rayq.storage.clean_state import write_clean_state
from rayq.storage.cleaner import CleaningResult
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.log import Log
from rayq.storage.swap import Cleaning

logger = logging.getLogger(__name__)


class ReplicaLog:
    """See the module. `open` first; `close` or `abandon` last.

    `failure` says why the replica stopped (its disk failed, its log diverged): it then refuses
    everything. `on_flushed(offset)` is called when the disk holds more, `on_failure()` when the
    replica stops. While this replica leads and no other is in sync, a read of damage does not end
    it, for the rest of its log is all that there is.
    """

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        assignment: messages.PartitionAssignment,
        *,
        broker: int,
        incarnation: str,
        on_flushed: Callable[[int], None],
        on_failure: Callable[[], None],
    ) -> None:
        self.environment = environment
        self.config = config
        self.topic_config = parse_stored(TopicConfig, assignment.config)
        self.broker = broker
        self.incarnation = incarnation
        self.where = f"{assignment.topic}-{assignment.partition}"
        self.failure: str | None = None
        self.is_damaged = False
        """True if it stopped because its disk changed written data: the other replicas' logs are
        sound."""
        self.trouble: str | None = None
        """The reason that a follower cannot continue for now, such as a full disk."""
        self._known_high_watermark = 0
        self._leader_state: PartitionState | None = None
        """The state of the leader, while this replica leads."""
        self.held_offset: int | None = None
        """Maximum log start for retention, because of a queue that owns the topic. None: there is
        none."""
        self.deletes_what_is_done = False
        """True if the log start follows `held_offset`."""
        self.appended = Signal()
        """Notified when the log grew, or its start moved."""
        self.committed = Signal()
        """Notified when the high watermark moved, or the role ended."""
        self._jobs = DirectoryJobs(environment)
        self.flusher = Flusher(
            environment,
            self._jobs,
            self.where,
            is_open=lambda: self.is_open,
            high_watermark=lambda: self.high_watermark,
            on_flushed=on_flushed,
            on_failure=self.fail,
        )
        self.flush_lock = self.flusher.lock
        self.files_lock = asyncio.Lock()
        """Lock that is held while compacted segments are put in place. A truncation, a reset and a
        move of the log start hold it too, before the flush lock."""
        self.is_compacted_now = False
        """True while a pass of the cleaner runs. Segments below the log start stay until the next
        pass: without them this pass would be in vain, and if retention deletes more often than a
        pass takes, none would ever finish."""
        self.restarted_at: int | None = None
        """Offset at which this process restarted the log from the object store, to lead, as it
        lacked records that are there. Replicas in sync may lack them, too."""
        self._on_flushed = on_flushed
        self._on_failure = on_failure
        self._damaged_offset: int | None = None
        """Offset at which a read met a disk error while no other replica was in sync."""
        self._damaged_since_s = 0.0
        """Time of the monotonic clock at which a read met that error first."""
        self._salvages = False
        """True if that error was damage: then reads go around it."""
        self._log: Log | None = None
        self._segment_changes = 0
        """Number of times that segments were replaced or removed."""
        self._is_closed = False

    # --- life -------------------------------------------------------------------------------

    async def open(self, directory: PartitionDirectory) -> None:
        """Recovers the log, in a thread. Raises StorageError, UnsupportedFormatError."""
        self._jobs.directory = directory
        try:
            log = await self._jobs.run(
                partial(
                    _open_log,
                    self.environment,
                    directory,
                    self.topic_config,
                    self.config.flush_checkpoint_bytes,
                )
            )
        except BaseException:
            self._jobs.release()
            raise
        if self._is_closed:  # The topic was deleted meanwhile.
            self._jobs.release()
            return
        log.config = self.topic_config  # It may have changed meanwhile.
        self._log = log
        self._known_high_watermark = log.persisted_high_watermark
        self.flusher.begin(log)

    @property
    def is_open(self) -> bool:
        """True if the log can be used: it was opened, not closed, and did not fail."""
        return self._log is not None and self.failure is None and not self._is_closed

    @property
    def log(self) -> Log:
        """The open log. Raises StorageError when the replica stopped, NotLeaderError before it is
        open."""
        if self.failure is not None:
            raise StorageError(f"Replica of {self.where} on broker {self.broker}: {self.failure}")
        if self._log is None or self._is_closed:
            why = "" if self.trouble is None else f": {self.trouble}"
            raise NotLeaderError(f"The log of the replica of {self.where} is not open{why}.")
        return self._log

    # --- what is committed ------------------------------------------------------------------

    @property
    def high_watermark(self) -> int:
        """Offset below which all records are committed, as far as this replica knows. A leader's
        state decides it; a follower has it from its leader, and before that from a checkpoint."""
        state = self._leader_state
        return self._known_high_watermark if state is None else state.high_watermark

    def lead(self, state: PartitionState) -> None:
        """The high watermark is that of a leader's state, up to `stop_leading`."""
        self._leader_state = state
        if self._damaged_offset is not None:
            self._forget_damage()

    def stop_leading(self) -> None:
        """Keeps the high watermark as it is now: the leader's role ended."""
        self._known_high_watermark = self.high_watermark
        self._leader_state = None

    def advance_high_watermark(self, offset: int) -> None:
        """Takes the leader's high watermark, as far as it covers records that are here."""
        known = min(offset, self.log.end_offset)
        self._known_high_watermark = max(self._known_high_watermark, known)

    @property
    def last_stable_offset(self) -> int:
        """Offset below which everything is committed, and all transactions are decided. Raises as
        `log`."""
        return self.log.stable_offset(self.high_watermark)

    def is_led_by_us(self, assignment: messages.PartitionAssignment) -> bool:
        """Returns whether this very process leads, by that assignment."""
        leader = assignment.leader, assignment.leader_incarnation
        return leader == (self.broker, self.incarnation)

    def has_remote(self, assignment: messages.PartitionAssignment) -> bool:
        """Returns whether the topic has or gets records in the object store."""
        return assignment.remote is not None or self.topic_config.remote_storage is not False

    def configure(self, options: dict[str, object]) -> None:
        """Takes the topic's changed config."""
        self.topic_config = parse_stored(TopicConfig, options)
        if self._log is not None:
            self._log.config = self.topic_config
            self._on_flushed(self._log.flushed_offset)  # The flushed offset may have grown.

    def ends(self) -> tuple[int | None, int]:
        """Returns `(last epoch, flushed offset)`; the offset is -1 before the log is open."""
        log = self._log
        return (None, -1) if log is None else (log.last_epoch, log.flushed_offset)

    async def close(self) -> None:
        """Flushes and closes the log; then `ends` returns its exact end."""
        log = self._log
        self._is_closed = True
        # No swap and no flush runs now, and none starts.
        async with self.files_lock, self.flush_lock:
            self.flusher.stop()
            if log is not None and self.failure is None:
                try:
                    await self.environment.threads.run(log.close, self.high_watermark)
                except StorageError as error:
                    self.fail(error)  # Its end is not known for certain: as after a crash.
        self._jobs.release()

    def abandon(self) -> None:
        """Leaves the disk as it is: the topic was deleted, or the process ends."""
        self._is_closed = True
        self.flusher.stop(is_abandoned=True)
        self._jobs.release()

    def fail(self, error: BaseException, *, is_damage: bool | None = None) -> None:
        """Stops the replica: an error of the disk or of the log is final for this process
        (docs/protocol.md, rule 11). `is_damage`: see `is_damaged`; by default True for a damaged
        batch."""
        if self.failure is not None:
            return
        logger.error("replica of %s on broker %d stops: %s", self.where, self.broker, error)
        self.failure = str(error)
        if is_damage is None:
            is_damage = any(
                isinstance(cause, CorruptBatchError) for cause in (error, error.__cause__)
            )
        self.is_damaged = is_damage
        self.flusher.stop()
        self._on_failure()

    @property
    def directory(self) -> PartitionDirectory | None:
        """The directory of the open log."""
        return self._jobs.directory if self.is_open else None

    async def guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a background task of the replica: any error that ends it ends the replica, so that
        another leads instead of one that does half its work. (A function: a coroutine that was made
        and whose task is cancelled before it starts would never be awaited.)"""
        try:
            await work()
        except Exception as error:
            logger.exception("a background task of %s failed", self.where)
            self.fail(error)

    # --- reading ----------------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        return self._leader_state is not None and self._leader_state.is_alone

    @property
    def serves_around_damage(self) -> bool:
        """True if damage was found and no other replica is in sync: none can copy past it."""
        return self._salvages and self._is_alone

    async def read(self, offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
        """Reads whole batches of [offset, limit), and returns them with the offset of the next
        batch. May run in a thread. Raises StorageError. A leader that is alone replaces damage by
        `batch.stand_in`."""
        log = self.log
        generation = log.generation
        if self._salvages and offset < limit:
            return await self._salvage(log, offset, limit, bytes_max)
        try:
            plan = log.plan_read(offset, limit, bytes_max)
            result = plan.run_cached()
            if result is None:
                result = await self.environment.threads.run(plan.run)
        except OpenFilesLimitError:
            raise  # It heals.
        except (CorruptBatchError, OSError, StorageError) as error:
            told = self.unreadable(log, generation, offset, error)
            if not self._salvages:
                raise told from error
            return await self._salvage(log, offset, limit, bytes_max)
        return result.data, result.next_offset

    async def read_with_aborted(
        self, offset: int, limit: int, bytes_max: int
    ) -> tuple[bytes, int, list[tuple[int, int]]]:
        """Does `read`, and adds `(family, epoch)` of each aborted transaction with batches in the
        range. Compaction or retention may have removed their keys meanwhile, together with batches
        that were already read: then the range is read again."""
        while True:
            changes = self._segment_changes
            data, next_offset = await self.read(offset, limit, bytes_max)
            if changes == self._segment_changes:
                return data, next_offset, self.log.aborted_between(offset, next_offset)

    async def _salvage(
        self, log: Log, offset: int, limit: int, bytes_max: int
    ) -> tuple[bytes, int]:
        """Reads a log that is known to be damaged: readers get what is left, and are told what is
        missing (`batch.stand_in`). Once others are in sync again they may find the damage by
        ordinary reads, so that one of them takes over. Until others have had the time to come back
        into sync, a read of what is missing is refused with a retriable error: they may have it."""
        if not self._is_alone:
            self._forget_damage()
            return await self.read(offset, limit, bytes_max)
        try:
            plan = log.plan_salvage(offset, limit, bytes_max)
            result = await self.environment.threads.run(plan.run)
        except OpenFilesLimitError:
            raise  # It heals.
        except (OSError, StorageError) as error:
            raise self.unreadable(log, log.generation, offset, error) from error
        data = result.data
        if data and self._waits_for_others() and is_stand_in(data, 0, read_header(data)):
            raise StorageError(
                f"Reading {self.where} at offset {offset}: the log is damaged here, and no other "
                "replica is in sync. Another may come into sync and have what is missing, so this "
                f"is refused for up to {self.config.replica_lag_time_max_ms / 1000:g} s. Try again."
            )
        return data, result.next_offset

    def _waits_for_others(self) -> bool:
        """Returns whether a replica that fell out of sync may come back with what is damaged here.
        """
        state = self._leader_state
        if state is None or not state.has_other_replicas:
            return False
        damaged_for_s = self.environment.clock.monotonic() - self._damaged_since_s
        return damaged_for_s < self.config.replica_lag_time_max_ms / 1000

    async def offset_for_time(self, timestamp_ms: int, limit: int) -> tuple[int, int] | None:
        """The first record below `limit` that is not older than `timestamp_ms`, as (offset,
        timestamp). Raises as `read`."""
        log = self.log
        generation = log.generation
        try:
            plan = log.plan_offset_for_time(timestamp_ms, limit)
            return await self.environment.threads.run(plan.run)
        except OpenFilesLimitError:
            raise  # It heals.
        except (CorruptBatchError, OSError, StorageError) as error:
            raise self.unreadable(log, generation, log.local_start_offset, error) from error

    async def verify(self, offset: int) -> None:
        """Checks the result of a read from `offset`: a reader found it damaged, which may have
        happened in transit. Raises StorageError if that ends the replica."""
        log = self.log
        if not log.local_start_offset <= offset < log.end_offset:
            return
        generation = log.generation
        try:
            await self.environment.threads.run(log.plan_verify(offset).run)
        except OpenFilesLimitError:
            raise  # It heals.
        except (OSError, StorageError) as error:
            told = self.unreadable(log, generation, offset, error)
            if not self._salvages:
                raise told from error

    def unreadable(
        self, log: Log, generation: int, offset: int, error: RayqError | OSError
    ) -> RayqError:
        """Returns the error for a reader; it ends the replica if others can answer."""
        what = f"Reading {self.where} at offset {offset}: {error}"
        if log.generation != generation:
            return NotLeaderError(f"{what} The log was cut back meanwhile.")
        cause = error.__cause__ if isinstance(error.__cause__, CorruptBatchError) else error
        is_damage = isinstance(cause, CorruptBatchError)
        if self.is_open and self._is_alone:
            before = self.trouble
            self.trouble = (
                f"{what} No other replica is in sync, so this one continues without what is "
                "damaged. A replica that comes back into sync takes over; delete_records before "
                "the offset that follows lets the others copy the rest."
            )
            if self.trouble != before:
                logger.error("%s", self.trouble)
            if self._damaged_offset is None:
                self._damaged_since_s = self.environment.clock.monotonic()
            self._damaged_offset = offset
            self._salvages = self._salvages or is_damage
            return CorruptBatchError(self.trouble) if is_damage else StorageError(self.trouble)
        failure = StorageError(what)
        self.fail(failure, is_damage=is_damage)
        return failure

    def _forget_damage(self) -> None:
        """Forgets the damage: ordinary reads will show whether any is left."""
        self._damaged_offset, self._salvages, self.trouble = None, False, None

    # --- the log start ----------------------------------------------------------------------

    async def advance_log_start(self, offset: int) -> None:
        """Durably moves the log start up to `offset`; removes old files in a thread."""
        log = self.log
        if offset <= log.persisted_log_start:
            return
        async with self.files_lock:
            log = self.log
            self._segment_changes += 1
            try:
                paths = log.advance_start(
                    min(offset, log.end_offset), keeps_segments=self.is_compacted_now
                )
            except StorageError as error:
                self.fail(error)
                raise
        if self._damaged_offset is not None and self._damaged_offset < log.start_offset:
            self._forget_damage()
        try:
            await self.flusher.checkpoint()
        finally:  # Old files may be what fills the disk.
            await self._remove_files(paths)
        if log.removes_after_checkpoint:
            await self.remove_below_start()

    async def drop_local(self, offset: int) -> None:
        """Durably moves the local start up to `offset` (see `Log.drop_local`), then removes the
        files. Raises StorageError."""
        async with self.files_lock:
            log = self.log
            if offset > log.persisted_recovery_point:
                return  # The log was truncated or restarted meanwhile.
            log.drop_local(offset)
        await self.flusher.checkpoint()
        await self.remove_below_start()

    async def remove_below_start(self) -> None:
        """Removes the segments below the local start that were left to a pass of the cleaner, or
        until a checkpoint."""
        async with self.files_lock:
            if not self.is_open:
                return
            log = self.log
            self._segment_changes += 1
            try:
                paths = log.advance_start(log.start_offset)
            except StorageError as error:
                self.fail(error)
                return
        await self._remove_files(paths)

    async def _remove_files(self, paths: list[str]) -> None:
        if paths:
            try:
                await self._jobs.run(partial(Log.remove_files, self.environment.disk, paths))
            except OSError as error:  # Old files stay until the next start.
                logger.warning("%s: old segments could not be removed: %s", self.where, error)

    def hold_log_start(self, offset: int | None, *, deletes_what_is_done: bool = False) -> None:
        """Holds retention at `offset`, for the queues that own the topic (None: there are none).
        With `deletes_what_is_done` the log start follows the offset."""
        self.held_offset, self.deletes_what_is_done = offset, deletes_what_is_done

    # --- cutting ----------------------------------------------------------------------------

    def truncate(self, offset: int) -> None:
        """Cuts the log at `offset`. The caller holds both locks. Raises StorageError."""
        self.log.truncate(offset)
        self._known_high_watermark = min(self._known_high_watermark, self.log.end_offset)

    def restart(
        self,
        offset: int,
        epochs: list[tuple[int, int]],
        producer_snapshot: bytes,
        *,
        log_start: int,
        is_from_remote: bool = False,
    ) -> None:
        """Empties the log, which continues at `offset`: everything below is committed. The caller
        holds both locks. Raises StorageError."""
        self.log.reset(offset, epochs, producer_snapshot, log_start=log_start)
        self._known_high_watermark = offset
        if is_from_remote:
            self.restarted_at = offset

    # --- compaction -------------------------------------------------------------------------

    @contextmanager
    def compacting(self) -> Iterator[None]:
        """Marks the time in which a pass of the cleaner runs."""
        self.is_compacted_now = True
        try:
            yield
        finally:
            self.is_compacted_now = False

    async def swap(self, cleaning: Cleaning, result: CleaningResult, now_ms: int) -> bool:
        """Puts compacted segments in place, clean since `now_ms`. Returns False if nothing was
        changed, as the log is another by now.

        If it is cancelled half-way (the replica stops), it leaves the rest to the next start.
        """
        async with self.files_lock:
            if not self.is_open:
                return False
            log = self.log
            plan = log.plan_swap(cleaning, result, now_ms)
            if plan is None:
                logger.info("%s changed while it was compacted: dropped", self.where)
                return False
            try:
                segments = await self._jobs.run_and_wait(plan.prepare)
            except (OSError, StorageError) as error:
                logger.warning("compacted segments of %s are not used: %s", self.where, error)
                try:
                    await self._jobs.run_and_wait(plan.cancel)
                except OSError as failure:  # The next start may yet use them.
                    self.fail(failure)
                return False
            if self.failure is not None or self._is_closed:
                return False  # The next start finishes it.
            try:
                self._segment_changes += 1
                log.apply_swap(plan, segments)
                await self._jobs.run_and_wait(plan.finish)
            except (OSError, StorageError) as error:
                self.fail(StorageError(f"Compacting {self.where} failed: {error}"))
                return False
        return True

    async def learn(self, offset: int, cleaned_offset: int, tombstone_horizon: int) -> None:
        """Durably keeps the leader's statements about the records from `offset` on before they are
        appended: a copy of a cleaned log has its gaps and lacks its tombstones, and may lead later.
        Raises StorageError."""
        async with self.files_lock:
            log = self.log
            state = log.plan_learning(offset, cleaned_offset, tombstone_horizon)
            if state is None:
                return
            try:
                await self._jobs.run_and_wait(
                    partial(write_clean_state, self.environment.disk, log.directory, state)
                )
            except OSError as error:
                raise open_failed(log.directory, error) from error
            log.learned(state)


def _open_log(
    environment: Environment,
    directory: PartitionDirectory,
    config: TopicConfig,
    checkpoint_bytes: int,
) -> Log:
    directory.sync(environment.disk)
    return Log.open(
        environment.disk,
        directory.path,
        config,
        checkpoint_bytes=checkpoint_bytes,
        now_ms=environment.clock.wall_ms(),
    )

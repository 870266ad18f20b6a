"""The log of one partition replica: an append-only sequence of record batches on one disk."""

from __future__ import annotations

import logging
import os.path
from collections.abc import Callable

from rayq.config import TopicConfig
from rayq.environment import Buffer, Disk
from rayq.errors import (
    CorruptBatchError,
    OffsetOutOfRangeError,
    StorageError,
)
from rayq.storage import checked_file
from rayq.storage.appending import Room, check_order, count_fitting, is_full, open_failed
from rayq.storage.batch import (
    BatchHeader,
    check_body,
    check_produced,
    split_batches,
    stamp,
)
from rayq.storage.checkpoint import LogCheckpoint, write_checkpoint
from rayq.storage.clean_state import CleanState, write_clean_state
from rayq.storage.cleaner import CleaningJob, CleaningResult
from rayq.storage.epochs import EpochCache
from rayq.storage.plans import (
    CheckpointJob,
    ExactRead,
    FlushPlan,
    IndexedRead,
    NothingToRead,
    ReadPlan,
    TimeLookup,
    VerifyPlan,
    read_failed,
)
from rayq.storage.producer_state import ProducerState, snapshot_offsets, snapshot_path
from rayq.storage.recovery import (
    RecoveredLog,
    Reset,
    load_producers,
    recover,
    remove_segment,
    reset_log,
)
from rayq.storage.salvage import SalvageRead
from rayq.storage.segment import (
    DELETED_SUFFIX,
    SUFFIXES,
    Segment,
    pread,
    segment_path,
)
from rayq.storage.segment_list import RecentBatches, SegmentList
from rayq.storage.swap import Cleaning, SwapPlan, cleanable, grouped, is_due, swap_of

logger = logging.getLogger(__name__)

CLOCK_LEAP_MS = 60_000
"""Batches dated further in the future than this at a start are worth a warning."""


class Log:
    """One partition's batches, from `start_offset` up to `end_offset` (exclusive).

    Synchronous; one thread (the event loop) owns it. What may wait for the disk comes as a plan to
    run in another thread: `plan_flush`, `plan_read`, `plan_offset_for_time`, `plan_verify`, and
    `remove_files`.
    `truncate`, `reset` and `close` sync by themselves; no flush plan may be under way meanwhile.

    A disk that fails an operation makes the log useless: `failure` says why, and every call that
    would touch the disk raises `StorageError` from then on. A full disk (`DiskFullError`) does not:
    the log is as it was before the append.

    Files, in the partition's directory: segments, `checkpoint`, `leader-epochs`, `*.snapshot`; of
    compaction `cleaned`, `cleaning/` and, during a swap, `swap`.
    Nothing but what `flushed_offset` covers is sure to survive a power loss.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        config: TopicConfig,
        checkpoint_bytes: int,
        recovered: RecoveredLog,
    ) -> None:
        """Use `Log.open`."""
        self._disk = disk
        self.directory = directory
        self._config = config
        self._checkpoint_bytes = checkpoint_bytes
        self.failure: str | None = None
        self.generation = 0
        """Grows whenever batches are cut off."""
        self.epochs: EpochCache = recovered.epochs
        self.producers: ProducerState = recovered.producers
        self._clean = recovered.clean_state
        self._segments = SegmentList(recovered.segments)
        self._start = recovered.log_start
        self._end = self._segments.active.next_offset
        self._size_bytes = self._segments.size_bytes
        self._checkpoint = recovered.checkpoint
        self._flushed = self._synced = min(recovered.checkpoint.recovery_point, self._end)
        self._unsynced: list[Segment] = [
            segment for segment in recovered.unsynced if segment is not self._segments.active
        ]
        self._directory_changes = 1 if recovered.is_changed else 0
        self._directory_synced = 0
        self._directory_checkpointed = 0
        self._written_epoch_changes: int | None = None
        self._bytes_since_checkpoint = 0
        self._room = Room(disk, directory)
        self._last_append_time_ms = max(
            (segment.last_append_time_ms or 0 for segment in self._segments), default=0
        )
        self._recent = RecentBatches()

    @staticmethod
    def open(
        disk: Disk, directory: str, config: TopicConfig, *, checkpoint_bytes: int, now_ms: int
    ) -> Log:
        """Opens the log in `directory` (made when it is missing), recovering it after a crash.

        `checkpoint_bytes`: the recovery point moves after so many appended bytes. What is found is
        synced: `flushed_offset` equals `end_offset`. Raises `StorageError` when the disk fails or
        batches are damaged that had been synced, `UnsupportedFormatError` for a newer format.
        """
        try:
            checked_file.make_directory(disk, directory)
            recovered = recover(disk, directory, config)
            log = Log(disk, directory, config, checkpoint_bytes, recovered)
            if log._end < log._start:
                log._restart(log._start, log._start)
            elif recovered.is_changed:
                plan = log._flush_plan(recovered.checkpoint.high_watermark, checkpoint=True)
                log.apply_flush(plan, has_checkpoint=plan.run())
            else:
                # A process that died may have cut the file and not synced that.
                log._segments.active.file.sync_data()
        except OSError as error:
            raise open_failed(directory, error) from error
        if log._last_append_time_ms > now_ms + CLOCK_LEAP_MS:
            logger.warning(
                "%s: the newest batch is dated %d ms after now; appends keep that time until the "
                "clock has passed it",
                *(directory, log._last_append_time_ms - now_ms),
            )
        return log

    # --- what it is -------------------------------------------------------------------------------

    @property
    def config(self) -> TopicConfig:
        return self._config

    @config.setter
    def config(self, config: TopicConfig) -> None:
        # What counted as flushed under "os" goes on counting: offsets never go back unasked.
        self._flushed = self.flushed_offset
        self._config = config

    @property
    def start_offset(self) -> int:
        return self._start

    @property
    def end_offset(self) -> int:
        return self._end

    @property
    def flushed_offset(self) -> int:
        """The end of what counts as on disk: synced, or appended when config.flush is "os"."""
        return self._end if self._config.flush == "os" else self._flushed

    @property
    def persisted_high_watermark(self) -> int:
        """As of the last checkpoint."""
        return self._checkpoint.high_watermark

    @property
    def persisted_log_start(self) -> int:
        """As of the last checkpoint."""
        return self._checkpoint.log_start

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def last_epoch(self) -> int | None:
        """The leader epoch of the last batch (also when retention has removed it), None before the
        first."""
        return self.epochs.epoch_of(self._end - 1)

    @property
    def last_append_time_ms(self) -> int | None:
        """The append time of the newest batch, None in an empty log."""
        return self._last_append_time_ms or None

    @property
    def cleaned_offset(self) -> int:
        """Below it offsets may be missing: compaction took what was superseded."""
        return self._clean.cleaned_offset

    @property
    def tombstone_horizon(self) -> int:
        """Below it tombstones may be missing: see `CleanState`."""
        return self._clean.tombstone_horizon

    # --- appending --------------------------------------------------------------------------------

    def append_as_leader(
        self, batch: bytearray | memoryview, header: BatchHeader, *, leader_epoch: int, now_ms: int
    ) -> BatchHeader:
        """Stamps and appends exactly one batch, whose header, body and sequence the caller checked.

        Returns the header as it was stamped, in place. Raises `InvalidRecordError` or
        `UnsupportedFormatError` for what no reader could read, `DiskFullError`, `StorageError`.
        """
        self._check_usable()
        check_produced(header)
        assert len(batch) == header.length
        latest = self.epochs.latest()
        assert latest is None or leader_epoch >= latest, f"epoch {leader_epoch} after {latest}"
        self._make_room(header.length)
        stamped = stamp(
            batch,
            0,
            base_offset=self._end,
            leader_epoch=leader_epoch,
            append_time_ms=max(self._last_append_time_ms, now_ms),
            timestamp_from_append=self._config.message_timestamp_type == "append",
        )
        if count_fitting(self._config, self._segments.active, [(0, stamped)]) == 0:
            self._roll()
        self._write(batch, self._segments.active.size)
        self._appended(stamped)
        return stamped

    def append_as_follower(self, payload: Buffer) -> int:
        """Appends a leader's batches as they are; returns the new end.

        Offsets must follow on (gaps only below `cleaned_offset`: learn the leader's before) and
        epochs must not go back. An empty log also takes the batch that its start lies in; no flush
        plan may be running then. Raises `CorruptBatchError` or `UnsupportedFormatError` before
        anything is written; `DiskFullError` when only the first of them, or none, found room.
        """
        self._check_usable()
        view = memoryview(payload)
        batches = list(split_batches(view))
        if not batches:
            return self._end
        first = batches[0][1]
        is_restart = self._size_bytes == 0 and first.base_offset < self._end <= first.last_offset
        end = first.base_offset if is_restart else self._end
        last_epoch = self.epochs.epoch_of(end - 1)
        check_order(self.directory, batches, end, last_epoch, self.cleaned_offset)
        for position, header in batches:
            check_body(view, position, header)
        self._make_room(len(view))
        if is_restart:
            # The leader's log starts inside this batch.
            self._guarded(lambda: self._restart(first.base_offset, self._start))
        while batches:
            count = count_fitting(self._config, self._segments.active, batches)
            if count == 0:
                self._roll()
                continue
            begin, last, last_header = batches[0][0], *batches[count - 1]
            self._write(view[begin : last + last_header.length], self._segments.active.size)
            for _, header in batches[:count]:
                self._appended(header)
            del batches[:count]
        return self._end

    def _make_room(self, length: int) -> None:
        try:
            self._room.take(length)
        except OSError as error:
            raise self._fail("ask for free space", error) from error

    def _roll(self) -> None:
        """Begins a new segment. The old one is synced by the next flush plan, not here."""
        segment = Segment(self._disk, self.directory, self._end)
        try:
            segment.create()
        except OSError as error:
            if is_full(error):
                raise self._room.refused(error) from error
            raise self._fail("create a segment", error) from error
        old = self._segments.active
        old.seal()
        self._unsynced.append(old)
        self._segments.append(segment)
        self._directory_changes += 1
        self._recent.clear()

    def _write(self, data: Buffer, position: int) -> None:
        """Writes at the end of the active segment, all or nothing."""
        reason = "a short write"
        try:
            written = self._segments.active.file.pwrite(data, position)
        except OSError as error:
            if not is_full(error):
                raise self._fail("write", error) from error
            written, reason = 0, str(error)
        if written < len(data):
            try:
                self._segments.active.file.truncate(position)
            except OSError as error:
                raise self._fail("cut back a short write", error) from error
            raise self._room.refusal(reason)

    def _appended(self, header: BatchHeader) -> None:
        """Takes a batch into account that was written at the end of the active segment."""
        active = self._segments.active
        if header.base_offset != self._end:
            self._recent.clear()  # It knows of no gaps: the index does.
        self._recent.add(header.base_offset, active.size)
        active.appended(header, self._config.index_interval_bytes)
        if header.leader_epoch != self.epochs.latest():
            # After a gap it is where the epoch began for sure: compaction keeps the last batch of
            # the epoch before.
            self.epochs.assign(header.leader_epoch, self._end)
        self.producers.update(header)
        self._end = header.next_offset
        self._size_bytes += header.length
        self._bytes_since_checkpoint += header.length
        self._last_append_time_ms = max(self._last_append_time_ms, header.append_time_ms)

    # --- flushing ---------------------------------------------------------------------------------

    def plan_flush(
        self, high_watermark: int, *, checkpoint: bool = False, may_checkpoint: bool = True
    ) -> FlushPlan | None:
        """What brings all that is appended by now to disk; None when there is nothing to do.

        A checkpoint goes along after a roll, after `checkpoint_bytes`, or when asked for; none
        unless `may_checkpoint` (the last one found no room a moment ago). Under flush="os" there is
        nothing to do but checkpoints. Run it in a thread, then `apply_flush`.
        """
        self._check_usable()
        self._room.forget()
        is_due = may_checkpoint and (
            checkpoint
            or self._directory_checkpointed < self._directory_changes
            or self._bytes_since_checkpoint >= self._checkpoint_bytes
        )
        if not is_due and (self._synced == self._end or self._config.flush == "os"):
            return None
        return self._flush_plan(high_watermark, checkpoint=is_due)

    def _flush_plan(self, high_watermark: int, *, checkpoint: bool) -> FlushPlan:
        syncs_directory = self._directory_synced < self._directory_changes
        return FlushPlan(
            self._disk,
            self.directory,
            self.generation,
            self._end,
            tuple(self._unsynced),
            tuple(segment.file for segment in self._unsynced),
            syncs_directory,
            self._segments.active.file if self._synced < self._end or syncs_directory else None,
            self._checkpoint_job(high_watermark) if checkpoint else None,
            self._directory_changes,
            self._bytes_since_checkpoint,
        )

    def _checkpoint_job(self, high_watermark: int) -> CheckpointJob:
        writes = []
        for segment in self._segments:
            for index in (segment.offsets, segment.times):
                write = index.write()
                if write is not None:
                    writes.append((index, write))
        changed = self.epochs.changes != self._written_epoch_changes
        return CheckpointJob(
            LogCheckpoint(
                recovery_point=self._end,
                high_watermark=min(high_watermark, self._end),
                log_start=self._start,
            ),
            tuple(writes),
            self.epochs.encode() if changed else None,
            self.epochs.changes,
            self.producers.snapshot(),
        )

    def apply_flush(self, plan: FlushPlan, *, has_checkpoint: bool = True) -> bool:
        """Takes a finished plan into account, whose `run` said whether its checkpoint was written;
        False when the log was truncated meanwhile."""
        if plan.generation != self.generation:
            return False
        self._synced = max(self._synced, plan.end_offset)
        self._flushed = max(self._flushed, plan.end_offset)
        self._unsynced = [segment for segment in self._unsynced if segment not in plan.closed]
        for segment in plan.closed:
            self._segments.use(segment)
        self._directory_synced = max(self._directory_synced, plan.directory_changes)
        if plan.checkpoint is not None and has_checkpoint:
            for index, write in plan.checkpoint.index_writes:
                index.written(write.count)
            self._checkpoint = plan.checkpoint.state
            self._written_epoch_changes = plan.checkpoint.epoch_changes
            self._bytes_since_checkpoint -= plan.bytes_since_checkpoint
            self._directory_checkpointed = plan.directory_changes
            # Not before: should the start be lost in a crash, the epochs below it are needed.
            self.epochs.truncate_to_start(self._checkpoint.log_start)
        return True

    # --- reading ----------------------------------------------------------------------------------

    def plan_read(self, offset: int, limit_offset: int, bytes_max: int) -> ReadPlan:
        """A read of whole batches, the first of which contains `offset`, all below `limit_offset`
        (a batch boundary), of `bytes_max` in all but at least one; from one segment only.

        Raises `OffsetOutOfRangeError` outside the log, `StorageError` when the log has failed.
        """
        self._check_usable()
        if not self._start <= offset <= self._end:
            raise self._out_of_range(offset)
        if offset >= limit_offset:
            return NothingToRead(self.generation, offset)
        active = self._segments.active
        at = self._recent.locate(offset, limit_offset, bytes_max, active)
        if at is not None:
            return ExactRead(
                self.generation,
                active.path,
                active.file,
                at.start,
                at.end - at.start,
                at.next_offset,
            )
        segment = self._segments.find(offset)
        try:
            view = segment.view(offset, limit_offset, bytes_max)
        except OSError as error:
            raise read_failed(segment.path, None, error) from error
        self._use(segment)
        return IndexedRead(
            self.generation, view, offset, limit_offset, bytes_max, self.cleaned_offset
        )

    def plan_salvage(self, offset: int, limit_offset: int, bytes_max: int) -> SalvageRead:
        """As `plan_read`, for a segment that is damaged somewhere: batches in it that cannot be
        read are answered by stand-ins. To be run in a thread."""
        self._check_usable()
        if not self._start <= offset < min(limit_offset, self._end):
            raise self._out_of_range(offset)
        segment = self._segments.find(offset)
        try:
            view = segment.view(offset)
        except OSError as error:
            raise read_failed(segment.path, None, error) from error
        self._use(segment)
        epoch = self.epochs.epoch_of(offset) or 0
        return SalvageRead(view, offset, limit_offset, bytes_max, epoch)

    def plan_offset_for_time(self, timestamp_ms: int, limit_offset: int) -> TimeLookup:
        """A look-up of the first record below `limit_offset` with a timestamp >= `timestamp_ms`;
        its `run` returns (offset, timestamp) or None. Raises `StorageError`."""
        self._check_usable()
        views, pending = [], []
        for segment in self._segments:
            if segment.next_offset <= self._start or segment.max_timestamp_ms < timestamp_ms:
                continue
            try:
                views.append(segment.view(max(self._start, segment.base_offset)))
            except OSError as error:
                raise read_failed(segment.path, None, error) from error
            pending.append(tuple(segment.times.pending))
            self._use(segment)
            if segment.base_offset >= self._start:
                break
        return TimeLookup(
            self.generation,
            tuple(views),
            tuple(pending),
            timestamp_ms,
            self._start,
            min(limit_offset, self._end),
        )

    def plan_verify(self, offset: int) -> VerifyPlan:
        """A check of what a read from `offset` sends, on the disk; its `run` raises `StorageError`.

        Raises `OffsetOutOfRangeError` when the log holds no such offset.
        """
        self._check_usable()
        if not self._start <= offset < self._end:
            raise self._out_of_range(offset)
        segment = self._segments.find(offset)
        try:
            view = segment.view(offset)
        except OSError as error:
            raise read_failed(segment.path, None, error) from error
        self._use(segment)
        return VerifyPlan(self.generation, view, offset, self.cleaned_offset)

    def _out_of_range(self, offset: int) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            f"{self.directory}: offset {offset} is outside {self._start} to {self._end}."
        )

    def _use(self, segment: Segment) -> None:
        # A file that is closed before it is synced may take its errors along.
        if segment not in self._unsynced:
            self._segments.use(segment)

    # --- the end moves back -----------------------------------------------------------------------

    def truncate(self, offset: int) -> None:
        """Drops every batch that contains or follows `offset`, durably.

        No flush plan may be running. Raises `StorageError`.
        """
        self._check_usable()
        if offset < self._end:
            self._guarded(lambda: self._truncate(offset))

    def _truncate(self, offset: int) -> None:
        if offset < self._segments[0].base_offset:
            self._restart(offset, min(self._start, offset))
            return
        segment = self._segments.find(offset)
        place = segment.view(offset).locate(offset, pread)
        if place is None:
            raise CorruptBatchError(f"{segment.path}: no batch leads to offset {offset}.")
        end = place.header.base_offset
        if end > offset:  # In a gap: what stays ends before it.
            end = segment.view().end_before(offset, pread)
        lowered = LogCheckpoint(
            recovery_point=min(self._checkpoint.recovery_point, end),
            high_watermark=min(self._checkpoint.high_watermark, end),
            log_start=min(self._checkpoint.log_start, end),
        )
        if lowered != self._checkpoint:
            write_checkpoint(self._disk, self.directory, lowered)
            self._checkpoint = lowered
        for snapshot in snapshot_offsets(self._disk, self.directory):
            if snapshot > end:
                self._disk.remove(snapshot_path(self.directory, snapshot))
        while self._segments.active is not segment:
            dropped = self._segments.pop_last()
            remove_segment(self._disk, self.directory, dropped.base_offset)
        segment.truncate(place, end, self._config.index_interval_bytes)
        for unsynced in self._unsynced:
            if unsynced.base_offset < segment.base_offset:
                unsynced.file.sync_data()
        self._disk.sync_dir(self.directory)
        self._become(segment.next_offset)
        self.producers = load_producers(self._disk, self.directory, self._segments, self._end)
        if self._clean != (state := self._clean.cut(self._end)):
            write_clean_state(self._disk, self.directory, state)
            self._clean = state

    def reset(
        self, start_offset: int, epochs: list[tuple[int, int]], producer_snapshot: bytes
    ) -> None:
        """Empties the log and restarts it at `start_offset` with a leader's leader epochs and
        producer state, durably: a crash leaves the old log or the new one.

        No flush plan may be running. Raises `StorageError` (also for a damaged snapshot).
        """
        self._check_usable()
        producers = ProducerState()
        producers.load(producer_snapshot)
        reset = Reset(start_offset, start_offset, epochs, producer_snapshot)
        self._guarded(lambda: self._reset(reset, producers))

    def _restart(self, end_offset: int, log_start: int) -> None:
        """Empties the log, going on at `end_offset`; what is known of epochs and producers below
        stays."""
        self.epochs.truncate_to_end(end_offset)
        producers = self.producers
        producers.forget_from(end_offset)
        self._reset(
            Reset(
                end_offset,
                log_start,
                self.epochs.entries(),
                producers.snapshot(),
                self._clean.cut(end_offset),
            ),
            producers,
        )

    def _reset(self, reset: Reset, producers: ProducerState) -> None:
        self._segments = SegmentList([reset_log(self._disk, self.directory, reset)])
        self._checkpoint = LogCheckpoint(
            recovery_point=reset.end_offset,
            high_watermark=min(reset.log_start, reset.end_offset),
            log_start=reset.log_start,
        )
        self._start = reset.log_start
        self.epochs = EpochCache(reset.epochs)
        self._clean = reset.clean_state
        self._become(reset.end_offset)
        self.producers = producers

    def _become(self, end_offset: int) -> None:
        """The log ends at `end_offset` now, all of it synced."""
        self.generation += 1
        self._end = end_offset
        if self._segments.active.size:
            self._start = min(self._start, end_offset)
        self._flushed = self._synced = end_offset
        self._unsynced = []
        self._directory_synced = self._directory_changes
        self._size_bytes = self._segments.size_bytes
        self.epochs.truncate_to_end(end_offset)
        self._written_epoch_changes = None
        self._recent.clear()

    # --- the start moves on -----------------------------------------------------------------------

    def retention_start(self, now_ms: int, high_watermark: int) -> int:
        """The log start that retention_ms and retention_bytes call for: a segment's base offset at
        most `high_watermark`, or the present start. Closed segments only, by append time."""
        if not self._config.is_deleted_by_retention:
            return self._start
        start = self._segments.retention_start(self._config, now_ms, high_watermark)
        return self._start if start is None else max(start, self._start)

    def advance_start(self, offset: int, *, keeps_segments: bool = False) -> list[str]:
        """Moves the log start up to `offset` (not back, not past the end); the next checkpoint
        persists it.

        Closed segments that lie below it and below the last checkpoint are renamed to `*.deleted`;
        their paths are for `remove_files`, in a thread. `keeps_segments` leaves that to a later
        call: a pass of the cleaner reads them. Raises `StorageError`.
        """
        self._check_usable()
        self._start = max(self._start, min(offset, self._end))
        if keeps_segments:
            return []
        limit = min(self._start, self._checkpoint.recovery_point)
        renamed: list[str] = []
        try:
            while len(self._segments) > 1 and self._segments[1].base_offset <= limit:
                segment = self._segments[0]
                for suffix in SUFFIXES:
                    path = segment_path(self.directory, segment.base_offset, suffix)
                    if not self._disk.exists(path):
                        continue
                    self._disk.rename(path, path + DELETED_SUFFIX)
                    renamed.append(path + DELETED_SUFFIX)
                self._segments.pop_first()
                self._size_bytes -= segment.size
        except OSError as error:
            raise self._fail("delete an old segment", error) from error
        return renamed

    @staticmethod
    def remove_files(disk: Disk, paths: list[str]) -> None:
        """Removes what `advance_start` renamed; in a thread. Raises OSError.

        The renames reach the disk first: recovery takes the last one found for the log start.
        """
        for directory in sorted({os.path.dirname(path) for path in paths}):
            if disk.exists(directory):
                disk.sync_dir(directory)
        for path in paths:
            if disk.exists(path):
                disk.remove(path)

    # --- compaction -------------------------------------------------------------------------------

    def wants_checkpoint_to_clean(self, high_watermark: int) -> bool:
        """Whether closed segments wait for a checkpoint that says they are on disk and committed:
        only what a crash cannot take back is cleaned. It also writes indexes that were made anew
        at the start."""
        known = min(self._checkpoint.high_watermark, self._checkpoint.recovery_point)
        return any(
            known < segment.next_offset <= high_watermark or segment.has_pending_entries
            for segment in self._segments[:-1]
        )

    def roll_to_clean(self, now_ms: int) -> bool:
        """Closes the active segment when its first record is older than max_compaction_lag_ms.
        Raises `DiskFullError`, `StorageError`."""
        self._check_usable()
        lag_ms = self._config.max_compaction_lag_ms
        first_ms = self._segments.active.first_append_time_ms
        if lag_ms is None or first_ms is None or first_ms > now_ms - lag_ms:
            return False
        self._roll()
        return True

    def plan_cleaning(
        self, now_ms: int, *, memory_bytes: int, bytes_per_s: int, at_once: bool = False
    ) -> Cleaning | None:
        """The pass of the cleaner that is due, None when none is; `at_once`: as soon as anything
        is dirty. Let `cleaner.clean` do its job anywhere, then `plan_swap`.

        Only closed segments below the high watermark and the recovery point of the last checkpoint.
        """
        self._check_usable()
        if not self._config.is_compacted:
            return None
        limit_offset = min(self._checkpoint.high_watermark, self._checkpoint.recovery_point)
        segments = cleanable(self._config, self._segments, limit_offset, now_ms)
        if not segments or any(segment.has_pending_entries for segment in segments):
            return None
        is_dirty = segments[-1].next_offset > self._clean.clean_until
        if not is_due(self._config, segments, self._clean, now_ms) and not (at_once and is_dirty):
            return None
        job = CleaningJob(
            directory=self.directory,
            groups=grouped(self._config, segments),
            dirty_offset=self._clean.clean_until,
            tombstones_below=self._clean.removable_below(now_ms, self._config.delete_retention_ms),
            producer_batches=self.producers.batches_below(segments[-1].next_offset),
            index_interval_bytes=self._config.index_interval_bytes,
            memory_bytes=memory_bytes,
            bytes_per_s=bytes_per_s,
        )
        return Cleaning(job, self.generation, tuple(segments))

    def is_current(self, cleaning: Cleaning) -> bool:
        """Whether the log still has the segments that a pass was planned for."""
        by_base = {segment.base_offset: segment for segment in self._segments[:-1]}
        return cleaning.generation == self.generation and all(
            by_base.get(segment.base_offset) is segment for segment in cleaning.segments
        )

    def plan_swap(self, cleaning: Cleaning, result: CleaningResult, now_ms: int) -> SwapPlan | None:
        """How the log takes over what a pass has made; None when the log was truncated or lost
        segments meanwhile, so that the result is about another one."""
        self._check_usable()
        if not self.is_current(cleaning):
            return None
        state = self._clean.after_pass(
            result.end_offset,
            removed_below=cleaning.job.tombstones_below,
            horizon=result.horizon,
            tombstones=result.tombstones,
            now_ms=now_ms,
            delete_retention_ms=self._config.delete_retention_ms,
        )
        swap = swap_of(result, state)
        by_base = {segment.base_offset: segment for segment in self._segments}
        replaced = tuple(tuple(by_base[base] for base in one.base_offsets) for one in swap.groups)
        assert not any(old.has_pending_entries for group in replaced for old in group), (
            "their index entries were in the files when the pass was planned"
        )
        return SwapPlan(
            self._disk, self.directory, swap, replaced, cleaning.job.index_interval_bytes
        )

    def apply_swap(self, plan: SwapPlan, segments: list[Segment]) -> None:
        """Puts the segments that `plan.prepare` returned in the place of the old ones; a running
        read goes on with those. Raises `StorageError`."""
        self._check_usable()
        try:
            for old, new in zip(plan.replaced, segments, strict=True):
                new.move_to(self.directory)
                self._segments.replace(old, new)
        except OSError as error:
            raise self._fail("take over compacted segments", error) from error
        self._size_bytes = self._segments.size_bytes
        self._clean = plan.swap.state

    def plan_learning(
        self, offset: int, cleaned_offset: int, tombstone_horizon: int
    ) -> CleanState | None:
        """What a follower has to remember before it appends from `offset` on: how far the leader
        has compacted what it copies. None when that is known; else write it with
        `write_clean_state`, in a thread, then `learned`."""
        state = self._clean.learned(
            cleaned_offset if offset < cleaned_offset else 0,
            tombstone_horizon if offset < tombstone_horizon else 0,
        )
        return None if state == self._clean else state

    def learned(self, state: CleanState) -> None:
        """`state`, from `plan_learning`, is on disk."""
        self._clean = state

    # --- the end ----------------------------------------------------------------------------------

    def close(self, high_watermark: int) -> None:
        """Syncs everything, writes a checkpoint and lets go of the files; blocks on the disk.

        A log that has failed is only let go of. Raises `StorageError`.
        """
        if self.failure is not None:
            return
        plan = self._flush_plan(high_watermark, checkpoint=True)
        self._guarded(lambda: self.apply_flush(plan, has_checkpoint=plan.run()))
        self.failure = f"{self.directory}: the log is closed."
        for segment in self._segments:
            segment.release()

    # --- failing ----------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.failure is not None:
            raise StorageError(self.failure)

    def _guarded(self, change: Callable[[], object]) -> None:
        """Runs a change of several steps; half of it done is a failure of the log."""
        try:
            change()
        except OSError as error:
            raise self._fail("change the log", error) from error
        except (CorruptBatchError, StorageError) as error:
            self.failure = str(error)
            raise StorageError(self.failure) from error

    def _fail(self, what: str, error: OSError) -> StorageError:
        active = self._segments.active
        self.failure = (
            f"{active.path}, position {active.size}: could not {what}: {error}. This replica "
            "stops; check the disk."
        )
        return StorageError(self.failure)

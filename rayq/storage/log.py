"""The log of one partition replica: an append-only sequence of record batches on one disk."""

from __future__ import annotations

import logging
import os.path
from collections.abc import Callable, Sequence

from rayq.config import TopicConfig
from rayq.environment import Buffer, Disk
from rayq.errors import (
    CorruptBatchError,
    DiskFullError,
    OffsetOutOfRangeError,
    RemoteStorageError,
    StorageError,
)
from rayq.storage.aborted_index import AbortedIndex
from rayq.storage.appending import Room, check_order, count_fitting, is_full, open_failed
from rayq.storage.batch import (
    BatchHeader,
    Marker,
    check_body,
    check_produced,
    encode_marker,
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
    reset_log,
)
from rayq.storage.salvage import SalvageRead
from rayq.storage.segment import (
    DELETED_SUFFIX,
    SUFFIXES,
    Segment,
    SegmentView,
    pread,
    remove_segment,
    segment_path,
)
from rayq.storage.segment_list import RecentBatches, SegmentList
from rayq.storage.swap import Cleaning, SwapPlan, cleanable, grouped, is_due, swap_of
from rayq.storage.upload_plan import LocalSegment, UploadPlan

logger = logging.getLogger(__name__)

CLOCK_LEAP_MS = 60_000
"""A log whose newest batch is dated further in the future than this logs a warning at its start."""


class Log:
    """One partition's batches, from `start_offset` up to `end_offset` (exclusive).

    Those below `local_start_offset` are in the object store, and not on this disk any more. What
    the log knows of them is their leader epochs and the state of their producers.

    A log is synchronous, and one thread (the event loop) owns it. Work that may wait for the disk
    comes as a plan, which runs in another thread: `plan_flush`, `plan_read`,
    `plan_offset_for_time`, `plan_verify`, and `remove_files`. `truncate`, `reset` and `close` sync
    by themselves; no flush plan may run meanwhile.

    A disk that fails an operation makes the log useless: `failure` says why, and from then on every
    call that would use the disk raises `StorageError`. A full disk (`DiskFullError`) does not: the
    log is as it was before the append.

    The files in the partition's directory are segments, `checkpoint`, `leader-epochs`, `*.aborted`
    and `*.snapshot`; those of compaction are `cleaned`, `cleaning/` and, during a swap, `swap`.
    Only the batches below `flushed_offset` are sure to survive a power loss.
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
        """Grows with each truncation."""
        self.epochs: EpochCache = recovered.epochs
        self.producers: ProducerState = recovered.producers
        self._recent_producers = recovered.recent_producers
        self._aborted = recovered.aborted
        self._clean = recovered.clean_state
        self._segments = SegmentList(recovered.segments)
        self._start = recovered.log_start
        self._local_start = recovered.local_start
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
        self._written_epoch_changes = recovered.written_epoch_changes
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
        """Opens the log in `directory`, and recovers it after a crash. A missing directory is made.

        The directory that holds it is on disk already. After each `checkpoint_bytes` of appended
        bytes the recovery point moves. All that was found
        is synced: `flushed_offset` equals `end_offset`. Raises `StorageError` when the disk fails,
        or when batches that had been synced are damaged, `UnsupportedFormatError` for a newer
        format.
        """
        try:
            disk.make_dirs(directory, syncs=False)
            # The process that made it may have died before its sync.
            disk.sync_dir(os.path.dirname(directory))
            recovered = recover(disk, directory, config)
            log = Log(disk, directory, config, checkpoint_bytes, recovered)
            if log._end < log._start:
                log._restart(log._start, log._start)
            elif recovered.is_changed:
                plan = log._flush_plan(recovered.checkpoint.high_watermark, checkpoint=True)
                log.apply_flush(plan, has_checkpoint=plan.run())
            elif not recovered.is_new:
                # A process that died may have cut the file without a sync.
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

    # --- state ------------------------------------------------------------------------------------

    @property
    def config(self) -> TopicConfig:
        return self._config

    @config.setter
    def config(self, config: TopicConfig) -> None:
        # Offsets that counted as flushed under "os" still count: they must not go back.
        self._flushed = self.flushed_offset
        self._config = config

    @property
    def start_offset(self) -> int:
        return self._start

    @property
    def local_start_offset(self) -> int:
        """The first offset on this disk; above `start_offset` where records below are in the object
        store only."""
        return max(self._start, self._local_start)

    @property
    def end_offset(self) -> int:
        return self._end

    @property
    def active_base_offset(self) -> int:
        """The base offset of the active segment."""
        return self._segments.active.base_offset

    @property
    def persisted_recovery_point(self) -> int:
        """The recovery point of the last checkpoint: no crash loses what is below."""
        return self._checkpoint.recovery_point

    @property
    def flushed_offset(self) -> int:
        """Batches below count as on disk: synced, or appended when config.flush is "os"."""
        return self._end if self._config.flush == "os" else self._flushed

    @property
    def persisted_high_watermark(self) -> int:
        """The high watermark of the last checkpoint."""
        return self._checkpoint.high_watermark

    @property
    def persisted_log_start(self) -> int:
        """The log start of the last checkpoint."""
        return self._checkpoint.log_start

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def last_epoch(self) -> int | None:
        """The epoch of the last batch, even when retention has removed it; None before it."""
        return self.epochs.epoch_of(self._end - 1)

    @property
    def last_append_time_ms(self) -> int | None:
        """The append time of the newest batch, or None in an empty log."""
        return self._last_append_time_ms or None

    @property
    def cleaned_offset(self) -> int:
        """Below it offsets may be missing, since compaction removed superseded records."""
        return self._clean.cleaned_offset

    @property
    def tombstone_horizon(self) -> int:
        """Below it tombstones and markers may be missing: see `CleanState`."""
        return self._clean.tombstone_horizon

    def stable_offset(self, high_watermark: int) -> int:
        """The last stable offset: all batches below it are committed, and their transactions have
        ended by a marker that is committed. At most `high_watermark`."""
        first = self.producers.transactions.first_undecided(high_watermark)
        return high_watermark if first is None else min(high_watermark, max(first, self._start))

    def aborted_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """`(family, epoch)` of the aborted transactions that may have batches from `start` up to
        `end` (exclusive), which is at most the last stable offset."""
        return self._aborted.between(start, end)

    def ended_between(self, start: int, end: int) -> list[tuple[int, int]] | None:
        """`(family, epoch)` of the transactions whose markers lie from `start` up to `end`
        (exclusive). None: the log cannot tell any more, since retention or compaction may have
        taken markers there, or they are too many, or it was opened since."""
        if start < max(self._start, self.tombstone_horizon):
            return None
        return self.producers.transactions.ended_between(start, end)

    # --- appending --------------------------------------------------------------------------------

    def append_as_leader(
        self, batch: bytearray | memoryview, header: BatchHeader, *, leader_epoch: int, now_ms: int
    ) -> BatchHeader:
        """Stamps and appends exactly one batch, whose header, body and sequence the caller checked.

        Stamps it in place, and returns the stamped header. Raises `InvalidRecordError` or
        `UnsupportedFormatError` for a batch that no reader could read, `DiskFullError`,
        `StorageError`.
        """
        self._check_usable()
        check_produced(header)
        assert len(batch) == header.length
        self._make_room(header.length)
        is_append_time = self._config.message_timestamp_type == "append"
        return self._stamp_and_append(batch, leader_epoch, now_ms, is_append_time)

    def append_marker(self, marker: Marker, *, leader_epoch: int, now_ms: int) -> BatchHeader:
        """Appends the marker of a transaction, and returns its stamped header. A marker may use the
        reserve of the disk: it lets retention continue, which frees space. Raises `DiskFullError`,
        `StorageError`."""
        self._check_usable()
        return self._stamp_and_append(encode_marker(marker), leader_epoch, now_ms, False)

    def _stamp_and_append(
        self,
        batch: bytearray | memoryview,
        leader_epoch: int,
        now_ms: int,
        timestamp_from_append: bool,
    ) -> BatchHeader:
        latest = self.epochs.latest()
        assert latest is None or leader_epoch >= latest, f"epoch {leader_epoch} after {latest}"
        stamped = stamp(
            batch,
            0,
            base_offset=self._end,
            leader_epoch=leader_epoch,
            append_time_ms=max(self._last_append_time_ms, now_ms),
            timestamp_from_append=timestamp_from_append,
        )
        if self._count_fitting([(0, stamped)]) == 0:
            self._roll()
        self._write(batch, self._segments.active.size)
        self._appended(stamped)
        return stamped

    def append_as_follower(self, payload: Buffer) -> int:
        """Appends a leader's batches as they are, and returns the new end.

        Each offset must follow the one before. Gaps are legal only below `cleaned_offset`: learn
        that of the leader first. Epochs must not go back. An empty log also takes the batch that
        contains its start; no flush plan may run meanwhile. Raises `CorruptBatchError` or
        `UnsupportedFormatError` before anything is written, and `DiskFullError` when there was room
        for only the first batches, or for none.
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
        # Markers may use the reserve, as on the leader.
        self._make_room(sum(header.length for _, header in batches if not header.is_control))
        if is_restart:
            # The leader's log starts inside this batch.
            self._guarded(lambda: self._restart(first.base_offset, self._start))
        try:
            self._append_all(view, batches)
        except DiskFullError:
            if is_restart and self._size_bytes == 0:  # An empty log ends where it starts.
                self._guarded(lambda: self._restart(self._start, self._start))
            raise
        return self._end

    def _append_all(self, payload: memoryview, batches: list[tuple[int, BatchHeader]]) -> None:
        while batches:
            count = self._count_fitting(batches)
            if count == 0:
                self._roll()
                continue
            begin, last, last_header = batches[0][0], *batches[count - 1]
            self._write(payload[begin : last + last_header.length], self._segments.active.size)
            for _, header in batches[:count]:
                self._appended(header)
            del batches[:count]

    def _count_fitting(self, batches: Sequence[tuple[int, BatchHeader]]) -> int:
        return count_fitting(
            self._config,
            self._segments.active,
            batches,
            unsynced_segments=len(self._unsynced),
        )

    def _make_room(self, length: int) -> None:
        try:
            self._room.take(length)
        except OSError as error:
            raise self._fail("ask for free space", error) from error

    def _roll(self) -> None:
        """Begins a new segment. The next flush plan syncs the old one."""
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
        """Counts a batch that was written at the end of the active segment."""
        active = self._segments.active
        if header.base_offset != self._end:
            self._recent.clear()  # It cannot hold gaps. The index can.
        self._recent.add(header.base_offset, active.size)
        active.appended(header, self._config.index_interval_bytes)
        if header.leader_epoch != self.epochs.latest():
            # After a gap, too, the epoch begins at the end: compaction keeps the last batch of the
            # epoch before.
            self.epochs.assign(header.leader_epoch, self._end)
        aborted = self.producers.update(header)
        if aborted is not None:
            self._aborted.add(aborted)
        self._end = header.next_offset
        self._recent_producers.appended(self._end, self.producers)
        self._size_bytes += header.length
        self._bytes_since_checkpoint += header.length
        self._last_append_time_ms = max(self._last_append_time_ms, header.append_time_ms)

    # --- flushing ---------------------------------------------------------------------------------

    def plan_flush(
        self, high_watermark: int, *, checkpoint: bool = False, may_checkpoint: bool = True
    ) -> FlushPlan | None:
        """The plan that brings all appended batches to disk, or None when there is nothing to do.

        The plan has a checkpoint after a roll, after `checkpoint_bytes`, or when `checkpoint` asks
        for it, but never without `may_checkpoint`: the disk may have refused one a moment ago.
        Under flush="os" there are only checkpoints to do. Run the plan in a thread, then call
        `apply_flush`.
        """
        self._check_usable()
        self._room.forget()
        self.producers.transactions.forget_decided(high_watermark)
        self._recent_producers.forget_below(high_watermark)
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
        is_dirty = self._synced < self._end or syncs_directory
        return FlushPlan(
            disk=self._disk,
            directory=self.directory,
            generation=self.generation,
            end_offset=self._end,
            closed=tuple(self._unsynced),
            files=tuple(segment.file for segment in self._unsynced),
            syncs_directory=syncs_directory,
            active=self._segments.active.file if is_dirty else None,
            checkpoint=self._checkpoint_job(high_watermark) if checkpoint else None,
            directory_changes=self._directory_changes,
            bytes_since_checkpoint=self._bytes_since_checkpoint,
        )

    def _checkpoint_job(self, high_watermark: int) -> CheckpointJob:
        writes = []
        for segment in self._segments:
            if not segment.size:
                continue  # Without batches it needs no index.
            for index in (segment.offsets, segment.times):
                write = index.write()
                if write is not None:
                    writes.append((index, write))
        changed = self.epochs.changes != self._written_epoch_changes
        used_from = self.producers.transactions.used_from
        state = LogCheckpoint(
            recovery_point=self._end,
            high_watermark=min(high_watermark, self._end),
            log_start=self._start,
            local_start=self._local_start,
        )
        drops = state.has_remote_part and self._local_start != self._checkpoint.local_start
        return CheckpointJob(
            state=state,
            index_writes=tuple(writes),
            epochs=self.epochs.encode() if changed else None,
            epoch_changes=self.epochs.changes,
            aborted=(
                ()
                if used_from is None
                else tuple(self._aborted.to_write(self._segments, used_from))
            ),
            producer_snapshot=self.producers.snapshot(high_watermark),
            local_snapshot=self.producer_snapshot_at(self._local_start) if drops else None,
        )

    def apply_flush(self, plan: FlushPlan, *, has_checkpoint: bool = True) -> bool:
        """Applies a finished plan. `has_checkpoint` is the result of its `run`. Returns False when
        the log was truncated meanwhile."""
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
            for base_offset, content in plan.checkpoint.aborted:
                self._aborted.written(base_offset, content)
            self._checkpoint = plan.checkpoint.state
            self._written_epoch_changes = plan.checkpoint.epoch_changes
            self._bytes_since_checkpoint -= plan.bytes_since_checkpoint
            self._directory_checkpointed = plan.directory_changes
            # Not earlier: a crash before the checkpoint brings the old log start back, and with it
            # the need for the epochs below the new one.
            self.epochs.truncate_to_start(self._checkpoint.log_start)
        return True

    # --- reading ----------------------------------------------------------------------------------

    def plan_read(self, offset: int, limit_offset: int, bytes_max: int) -> ReadPlan:
        """A read of whole batches from one segment. The first contains `offset`; all lie below
        `limit_offset`, which is the end of a batch. They have at most `bytes_max` together, except
        that the first is always read.

        Raises `OffsetOutOfRangeError` outside the log, `RemoteStorageError` below
        `local_start_offset`, `StorageError` when the log has failed.
        """
        self._check_usable()
        if not self.local_start_offset <= offset <= self._end:
            raise self._out_of_range(offset)
        if offset >= limit_offset:
            return NothingToRead(self.generation, offset)
        active = self._segments.active
        at = self._recent.locate(offset, limit_offset, bytes_max, active)
        if at is not None:
            return ExactRead(
                generation=self.generation,
                path=active.path,
                file=active.file,
                position=at.start,
                length=at.end - at.start,
                next_offset=at.next_offset,
            )
        return IndexedRead(
            generation=self.generation,
            view=self._view(self._segments.find(offset), offset, limit_offset, bytes_max),
            offset=offset,
            limit_offset=limit_offset,
            bytes_max=bytes_max,
            gaps_below=self.cleaned_offset,
        )

    def plan_salvage(self, offset: int, limit_offset: int, bytes_max: int) -> SalvageRead:
        """Like `plan_read`, for a damaged segment: stand-ins take the place of batches that cannot
        be read. Run it in a thread."""
        self._check_usable()
        if not self.local_start_offset <= offset < min(limit_offset, self._end):
            raise self._out_of_range(offset)
        return SalvageRead(
            view=self._view(self._segments.find(offset), offset),
            offset=offset,
            limit_offset=limit_offset,
            bytes_max=bytes_max,
            leader_epoch=self.epochs.epoch_of(offset) or 0,
        )

    def plan_offset_for_time(self, timestamp_ms: int, limit_offset: int) -> TimeLookup:
        """A look-up of the first record on this disk, below `limit_offset`, with a timestamp >=
        `timestamp_ms`; its `run` returns (offset, timestamp) or None. Raises `StorageError`."""
        self._check_usable()
        views, pending = [], []
        start_offset = self.local_start_offset
        for segment in self._segments:
            if segment.next_offset <= start_offset or segment.max_timestamp_ms < timestamp_ms:
                continue
            views.append(self._view(segment, max(start_offset, segment.base_offset)))
            pending.append(tuple(segment.times.pending))
            if segment.base_offset >= start_offset:
                break
        return TimeLookup(
            generation=self.generation,
            views=tuple(views),
            pending=tuple(pending),
            timestamp_ms=timestamp_ms,
            start_offset=start_offset,
            limit_offset=min(limit_offset, self._end),
        )

    def plan_verify(self, offset: int) -> VerifyPlan:
        """A check on the disk of the batches that a read from `offset` gives. Its `run` raises
        `StorageError`.

        Raises `OffsetOutOfRangeError` when the log holds no such offset, `RemoteStorageError` below
        `local_start_offset`.
        """
        self._check_usable()
        if not self.local_start_offset <= offset < self._end:
            raise self._out_of_range(offset)
        view = self._view(self._segments.find(offset), offset)
        return VerifyPlan(self.generation, view, offset, self.cleaned_offset)

    def _out_of_range(self, offset: int) -> OffsetOutOfRangeError | RemoteStorageError:
        if self._start <= offset < self._local_start:
            return RemoteStorageError(
                f"{self.directory}: offset {offset} is below the local start "
                f"{self.local_start_offset}: it is in the object store only. Try again."
            )
        return OffsetOutOfRangeError(
            f"{self.directory}: offset {offset} is outside {self._start} to {self._end}."
        )

    def _view(
        self, segment: Segment, offset: int, limit_offset: int | None = None, bytes_max: int = 0
    ) -> SegmentView:
        try:
            view = segment.view(offset, limit_offset, bytes_max)
        except OSError as error:
            raise read_failed(segment.path, None, error) from error
        # A file that closes before its sync may hide the error of a write.
        if segment not in self._unsynced:
            self._segments.use(segment)
        return view

    # --- the end moves back -----------------------------------------------------------------------

    def may_truncate(self, offset: int) -> bool:
        """Returns whether the log can be cut at `offset` and stay whole. It cannot below what was
        cleaned, nor below its local start: then copy it from scratch."""
        return offset >= max(self.cleaned_offset, self.local_start_offset)

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
        if end > offset:  # `offset` lies in a gap: the log then ends before the gap.
            end = segment.view().end_before(offset, pread)
        lowered = LogCheckpoint(
            recovery_point=min(self._checkpoint.recovery_point, end),
            high_watermark=min(self._checkpoint.high_watermark, end),
            log_start=min(self._checkpoint.log_start, end),
            local_start=min(self._checkpoint.local_start, end),
        )
        if lowered != self._checkpoint:
            write_checkpoint(self._disk, self.directory, lowered)
            self._checkpoint = lowered
        for snapshot in snapshot_offsets(self._disk, self.directory):
            if snapshot > end:
                self._disk.remove(snapshot_path(self.directory, snapshot))
        self._aborted.cut(end, segment.base_offset)
        while self._segments.active is not segment:
            dropped = self._segments.pop_last()
            remove_segment(self._disk, self.directory, dropped.base_offset)
        segment.truncate(place, end, self._config.index_interval_bytes)
        for unsynced in self._unsynced:
            if unsynced.base_offset < segment.base_offset:
                unsynced.file.sync_data()
        self._disk.sync_dir(self.directory)
        self._become(segment.next_offset)
        state = self._clean.cut(self._end)
        self.producers = load_producers(
            self._disk,
            self.directory,
            self._segments,
            self._end,
            state.clean_until,
            self._recent_producers.cut(self._end),
        )
        if self._clean != state:
            write_clean_state(self._disk, self.directory, state)
            self._clean = state

    def reset(
        self,
        start_offset: int,
        epochs: list[tuple[int, int]],
        producer_snapshot: bytes,
        *,
        log_start: int | None = None,
    ) -> None:
        """Empties the log and restarts it at `start_offset` with the leader epochs and the producer
        state of a leader, or of a manifest, durably: a crash leaves the old log or the new one.
        Records from `log_start` up to there are in the object store; None: there are none.

        No flush plan may be running. Raises `StorageError`, also for a damaged snapshot.
        """
        self._check_usable()
        producers = ProducerState()
        producers.load(producer_snapshot)
        reset = Reset(
            end_offset=start_offset,
            log_start=start_offset if log_start is None else log_start,
            epochs=epochs,
            producer_snapshot=producer_snapshot,
            local_start=start_offset,
        )
        self._guarded(lambda: self._reset(reset, producers))

    def _restart(self, end_offset: int, log_start: int) -> None:
        """Empties the log, which continues at `end_offset` with its epochs and producers."""
        self.epochs.truncate_to_end(end_offset)
        producers = self.producers
        producers.forget_from(end_offset)
        self._reset(
            Reset(
                end_offset=end_offset,
                log_start=log_start,
                epochs=self.epochs.entries(),
                producer_snapshot=producers.snapshot(),
                clean_state=self._clean.cut(end_offset),
                local_start=min(self._local_start, end_offset),
            ),
            producers,
        )

    def _reset(self, reset: Reset, producers: ProducerState) -> None:
        self._segments = SegmentList([reset_log(self._disk, self.directory, reset)])
        self._checkpoint = reset.checkpoint
        self._start = reset.log_start
        self._local_start = reset.local_start
        self.epochs = EpochCache(reset.epochs)
        self._clean = reset.clean_state
        self._become(reset.end_offset)
        self.producers = producers
        self._recent_producers.begin(reset.end_offset, producers)
        self._aborted = AbortedIndex()

    def _become(self, end_offset: int) -> None:
        """The log ends at `end_offset` now, all of it synced."""
        self.generation += 1
        self._end = end_offset
        if self._segments.active.size:
            self._start = min(self._start, end_offset)
        self._local_start = min(self._local_start, end_offset)
        self._flushed = self._synced = end_offset
        self._unsynced = []
        self._directory_synced = self._directory_changes
        self._size_bytes = self._segments.size_bytes
        self.epochs.truncate_to_end(end_offset)
        self._written_epoch_changes = None
        self._recent.clear()

    # --- the start moves on -----------------------------------------------------------------------

    def retention_start(self, now_ms: int, high_watermark: int) -> int:
        """The log start that retention_ms and retention_bytes call for: the base offset of a
        segment, at most the last stable offset, or the present start. Only closed segments go, by
        their append times."""
        if not self._config.is_deleted_by_retention:
            return self._start
        stable_offset = self.stable_offset(high_watermark)
        start = self._segments.retention_start(
            now_ms,
            stable_offset,
            retention_ms=self._config.retention_ms,
            retention_bytes=self._config.retention_bytes,
        )
        return self._start if start is None else max(start, self._start)

    def advance_start(self, offset: int, *, keeps_segments: bool = False) -> list[str]:
        """Moves the log start up to `offset` (never back, never past the end). The next checkpoint
        persists it.

        Renames the closed segments below it and below the last checkpoint to `*.deleted`, and
        returns their paths for `remove_files`, in a thread. With `keeps_segments` a later call does
        that, since a pass of the cleaner still reads them. So does a later call where
        `removes_after_checkpoint`. Raises `StorageError`.
        """
        self._check_usable()
        self._start = max(self._start, min(offset, self._end))
        return [] if keeps_segments else self._rename_old_segments()

    @property
    def removes_after_checkpoint(self) -> bool:
        """True if segments are removed only after a checkpoint that says why. From their absence
        alone the next start could not tell what retention has taken from what is in the object
        store."""
        return (
            self._config.remote_storage is not False
            or self._local_start > self._start
            or self._checkpoint.has_remote_part
        )

    def _rename_old_segments(self) -> list[str]:
        start = self.local_start_offset
        if self.removes_after_checkpoint:
            start = self._checkpoint.local_start_offset
        limit = min(start, self._checkpoint.recovery_point)
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
                self._aborted.drop([segment.base_offset], segment.next_offset)
                self._size_bytes -= segment.size
        except OSError as error:
            raise self._fail("delete an old segment", error) from error
        return renamed

    @staticmethod
    def remove_files(disk: Disk, paths: list[str]) -> None:
        """In a thread: removes the files that `advance_start` renamed. Raises OSError.

        The renames reach the disk first: recovery derives the log start from the renamed files.
        """
        for directory in sorted({os.path.dirname(path) for path in paths}):
            if disk.exists(directory):
                disk.sync_dir(directory)
        for path in paths:
            if disk.exists(path):
                disk.remove(path)

    # --- records that are in the object store -----------------------------------------------------

    def local_segments(self) -> list[LocalSegment]:
        """The segments, oldest first; the last one is active."""
        return [
            LocalSegment(
                segment.base_offset,
                segment.next_offset,
                segment.size,
                segment.first_append_time_ms,
                segment.last_append_time_ms,
                segment is not self._segments.active,
            )
            for segment in self._segments
        ]

    def plan_upload(self, start: int, limit_offset: int, bytes_max: int) -> UploadPlan | None:
        """The next range for the object store: whole batches from the one that holds `start` on,
        below `limit_offset` and the recovery point, out of closed segments that are on disk. None
        where there are none. Raises `StorageError`, and what `plan_read` raises for `start`."""
        self._check_usable()
        if not self.local_start_offset <= start <= self._end:
            raise self._out_of_range(start)
        limit = min(limit_offset, self._checkpoint.recovery_point)
        views, size_bytes, offset = [], 0, start
        for segment in self._segments[:-1]:
            if segment.next_offset <= start or not segment.size:
                continue
            if offset >= limit or size_bytes >= bytes_max or segment in self._unsynced:
                break
            views.append(self._view(segment, offset))
            if len(views) > 1:
                size_bytes += segment.size
            offset = segment.next_offset
        if not views:
            return None
        return UploadPlan(self.generation, tuple(views), start, limit, bytes_max)

    def roll_to_upload(self, now_ms: int) -> bool:
        """Closes the active segment when its first append is older than remote_max_lag_ms. Returns
        whether it did. Raises `DiskFullError`, `StorageError`."""
        return self._roll_if_older(self._config.remote_max_lag_ms, now_ms)

    def producer_snapshot_at(self, offset: int) -> bytes:
        """The producer state of the batches below `offset`, of what is known now. Nothing counts
        as open there: who restarts a log from it has none of the batches before."""
        producers = ProducerState()
        producers.load(self.producers.snapshot())
        producers.forget_from(offset)
        return producers.snapshot()

    def local_retention_start(self, now_ms: int, remote_end: int) -> int | None:
        """The local start that local_retention_ms and local_retention_bytes call for, or None where
        no segment goes. At most `remote_end`, where the committed list of remote objects ends, and
        what the last checkpoint has on disk. The active segment stays."""
        return self._segments.retention_start(
            now_ms,
            min(remote_end, self._checkpoint.recovery_point),
            retention_ms=self._config.local_retention_ms,
            retention_bytes=self._config.local_retention_bytes,
        )

    def drop_local(self, offset: int) -> None:
        """Moves the local start up to `offset`, a result of `local_retention_start`. The next
        checkpoint persists it; then `advance_start` removes the segments below."""
        self._check_usable()
        assert offset <= self._checkpoint.recovery_point, f"{offset} may be cut off"
        self._local_start = max(self._local_start, offset)

    def learn_epochs(self, entries: list[tuple[int, int]]) -> None:
        """Adds leader epochs of records that are in the object store only: a log whose file of
        epochs was lost knows those of its own batches."""
        self.epochs.learn(entries)

    # --- compaction -------------------------------------------------------------------------------

    def wants_checkpoint_to_clean(self, high_watermark: int) -> bool:
        """Returns whether closed segments wait for a checkpoint that covers them, and that says
        that they are committed: only what a crash cannot take back is cleaned. A checkpoint also
        writes the indexes that were rebuilt at the start."""
        known = min(self._checkpoint.high_watermark, self._checkpoint.recovery_point)
        return any(
            known < segment.next_offset <= high_watermark or segment.has_pending_entries
            for segment in self._segments[:-1]
        )

    def roll_to_clean(self, now_ms: int) -> bool:
        """Closes the active segment when its first record is older than max_compaction_lag_ms.
        Returns whether it did. Raises `DiskFullError`, `StorageError`."""
        lag_ms = self._config.max_compaction_lag_ms
        return lag_ms is not None and self._roll_if_older(lag_ms, now_ms)

    def _roll_if_older(self, age_ms: int, now_ms: int) -> bool:
        self._check_usable()
        first_ms = self._segments.active.first_append_time_ms
        if first_ms is None or first_ms > now_ms - age_ms:
            return False
        self._roll()
        return True

    def plan_cleaning(
        self, now_ms: int, *, memory_bytes: int, bytes_per_s: int, at_once: bool = False
    ) -> Cleaning | None:
        """The pass of the cleaner that is due, or None. With `at_once` a pass is due as soon as
        anything is dirty. `cleaner.clean` does the job in any process; then call `plan_swap`.

        A pass covers closed segments below the high watermark and the recovery point of the last
        checkpoint, and below the last stable offset.
        """
        self._check_usable()
        if not self._config.is_compacted:
            return None
        known = min(self._checkpoint.high_watermark, self._checkpoint.recovery_point)
        limit_offset = self.stable_offset(known)
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
            aborted=frozenset(self.aborted_between(self._segments[0].base_offset, limit_offset)),
            producer_batches=self.producers.batches_below(segments[-1].next_offset),
            index_interval_bytes=self._config.index_interval_bytes,
            memory_bytes=memory_bytes,
            bytes_per_s=bytes_per_s,
        )
        return Cleaning(job, self.generation, tuple(segments))

    def is_current(self, cleaning: Cleaning) -> bool:
        """Returns whether the log still has the segments that a pass was planned for."""
        by_base = {segment.base_offset: segment for segment in self._segments[:-1]}
        return cleaning.generation == self.generation and all(
            by_base.get(segment.base_offset) is segment for segment in cleaning.segments
        )

    def plan_swap(self, cleaning: Cleaning, result: CleaningResult, now_ms: int) -> SwapPlan | None:
        """The plan by which the log takes over the segments of a pass. None when the log was
        truncated or lost segments meanwhile: then the result is about another log."""
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
        replaced = tuple(
            tuple(by_base[base] for base in group.base_offsets) for group in swap.groups
        )
        assert not any(old.has_pending_entries for group in replaced for old in group), (
            "their index entries were in the files when the pass was planned"
        )
        aborted = [
            self._aborted.content(max(group.base_offsets[0], state.clean_until), group.next_offset)
            for group in swap.groups
        ]
        return SwapPlan(
            disk=self._disk,
            directory=self.directory,
            swap=swap,
            replaced=replaced,
            index_interval_bytes=cleaning.job.index_interval_bytes,
            aborted=tuple(aborted) if self.producers.transactions.is_used else (),
        )

    def apply_swap(self, plan: SwapPlan, segments: list[Segment]) -> None:
        """Puts the segments that `plan.prepare` returned in the place of the old ones. Reads that
        run continue with the old ones. Raises `StorageError`."""
        self._check_usable()
        try:
            for old, new in zip(plan.replaced, segments, strict=True):
                new.move_to(self.directory)
                self._segments.replace(old, new)
                # Below the clean offset no aborted records are left.
                clean_until = min(new.next_offset, plan.swap.state.clean_until)
                self._aborted.drop([segment.base_offset for segment in old], clean_until)
        except OSError as error:
            raise self._fail("take over compacted segments", error) from error
        self._size_bytes = self._segments.size_bytes
        self._clean = plan.swap.state

    def plan_learning(
        self, offset: int, cleaned_offset: int, tombstone_horizon: int
    ) -> CleanState | None:
        """The state that a follower must have on disk before it appends from `offset` on: how far
        the leader has compacted that part of the log. None when the state is there already. Else
        write it with `write_clean_state`, in a thread, then call `learned`."""
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
        """Syncs everything, writes a checkpoint and releases the files. It waits for the disk.

        A log that has failed stays as it is. Raises `StorageError`.
        """
        if self.failure is not None:
            return
        plan = self._flush_plan(high_watermark, checkpoint=True)
        assert plan.checkpoint is not None
        if plan.is_dirty or plan.checkpoint.is_news(self._checkpoint):
            self._guarded(lambda: self.apply_flush(plan, has_checkpoint=plan.run()))
        self.failure = f"{self.directory}: the log is closed."
        for segment in self._segments:
            segment.release()

    # --- failing ----------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.failure is not None:
            raise StorageError(self.failure)

    def _guarded(self, change: Callable[[], object]) -> None:
        """Runs a change of several steps. A change that ends half-way is a failure of the log."""
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

"""The log of one partition replica: an append-only sequence of record batches on one disk."""

from __future__ import annotations

import errno
import logging
import os.path
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence

from rayq.config import MIB, TopicConfig
from rayq.environment import Buffer, Disk
from rayq.errors import (
    CorruptBatchError,
    DiskFullError,
    OffsetOutOfRangeError,
    StorageError,
)
from rayq.storage import checked_file
from rayq.storage.batch import (
    BatchHeader,
    check_body,
    check_produced,
    split_batches,
    stamp,
)
from rayq.storage.checkpoint import Checkpoint, write_checkpoint
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
    Recovered,
    Reset,
    load_producers,
    recover,
    remove_segment,
    reset_log,
)
from rayq.storage.segment import (
    DELETED_SUFFIX,
    SUFFIXES,
    Segment,
    pread,
    segment_path,
)

logger = logging.getLogger(__name__)

RESERVED_BYTES = 64 * MIB
"""Room that data leaves to the metadata on each disk."""
ROOM_CHECK_BYTES = 4 * MIB
"""Free space is looked up once for so many bytes appended."""
OPEN_SEGMENTS_MAX = 64
"""Closed segments whose files stay open for readers."""
RECENT_BATCHES = 4096
"""Batches at the tail whose places are remembered, so that tail reads ask no index."""
CLOCK_LEAP_MS = 60_000
"""Batches dated further in the future than this at a start are worth a warning."""
RELATIVE_OFFSET_MAX = 2**32 - 2
"""Offsets in a segment fit the index entries."""


class Log:
    """One partition's batches, from `start_offset` up to `end_offset` (exclusive).

    Synchronous; one thread (the event loop) owns it. What may wait for the disk comes as a plan to
    run in another thread: `plan_flush`, `plan_read`, `plan_offset_for_time`, `plan_verify`, and
    `remove_files`.
    `truncate`, `reset` and `close` sync by themselves; no flush plan may be under way meanwhile.

    A disk that fails an operation makes the log useless: `failure` says why, and every call that
    would touch the disk raises `StorageError` from then on. A full disk (`DiskFullError`) does not:
    the log is as it was before the append.

    Files, in the partition's directory: segments, `checkpoint`, `leader-epochs`, `*.snapshot`.
    Nothing but what `flushed_offset` covers is sure to survive a power loss.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        config: TopicConfig,
        checkpoint_bytes: int,
        recovered: Recovered,
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
        self._segments = recovered.segments
        self._active = recovered.segments[-1]
        self._start = recovered.log_start
        self._end = self._active.next_offset
        self._size_bytes = sum(segment.size for segment in self._segments)
        self._checkpoint = recovered.checkpoint
        self._flushed = self._synced = min(recovered.checkpoint.recovery_point, self._end)
        self._unsynced: list[Segment] = [
            segment for segment in recovered.unsynced if segment is not self._active
        ]
        self._directory_changes = 1 if recovered.is_changed else 0
        self._directory_synced = 0
        self._directory_checkpointed = 0
        self._written_epoch_changes: int | None = None
        self._bytes_since_checkpoint = 0
        self._unchecked_bytes = ROOM_CHECK_BYTES
        self._last_append_time_ms = max(
            (segment.last_append_time_ms or 0 for segment in self._segments), default=0
        )
        self._recent_offsets: list[int] = []
        self._recent_positions: list[int] = []
        self._open_segments: OrderedDict[int, Segment] = OrderedDict()

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
                plan.run()
                log.apply_flush(plan)
            else:
                # A process that died may have cut the file and not synced that.
                log._active.file.sync_data()
        except OSError as error:
            raise StorageError(f"{directory}: the log cannot be opened: {error}") from error
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

    # --- appending --------------------------------------------------------------------------------

    def append_as_leader(
        self, batch: bytearray | memoryview, header: BatchHeader, *, leader_epoch: int, now_ms: int
    ) -> BatchHeader:
        """Stamps and appends exactly one batch, whose header, body and sequence the caller checked.

        Returns the header as it was stamped, in place. Raises `CorruptBatchError` or
        `UnsupportedFormatError` for what no reader could read, `DiskFullError`, `StorageError`.
        """
        self._check_usable()
        check_produced(header)
        assert len(batch) == header.length
        latest = self.epochs.latest()
        assert latest is None or leader_epoch >= latest, f"epoch {leader_epoch} after {latest}"
        append_time_ms = max(self._last_append_time_ms, now_ms)
        self._make_room(header.length)
        if self._must_roll(header, append_time_ms, self._active.size):
            self._roll()
        stamped = stamp(
            batch,
            0,
            base_offset=self._end,
            leader_epoch=leader_epoch,
            append_time_ms=append_time_ms,
            timestamp_from_append=self._config.message_timestamp_type == "append",
        )
        self._write(batch, self._active.size)
        self._appended(stamped)
        return stamped

    def append_as_follower(self, payload: Buffer, *, allow_gaps_below: int = 0) -> int:
        """Appends a leader's batches as they are; returns the new end.

        Offsets must follow on (gaps only below `allow_gaps_below`, the leader's cleaned offset) and
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
        self._check_order(batches, first.base_offset if is_restart else self._end, allow_gaps_below)
        for position, header in batches:
            check_body(view, position, header)
        self._make_room(len(view))
        if is_restart:
            # The leader's log starts inside this batch.
            self._guarded(lambda: self._restart(first.base_offset, self._start))
        start = 0
        while start < len(batches):
            if self._must_roll(batches[start][1], batches[start][1].append_time_ms, 0):
                self._roll()
            stop, size = start, self._active.size
            while stop < len(batches) and not (
                stop > start
                and self._must_roll(batches[stop][1], batches[stop][1].append_time_ms, size)
            ):
                size += batches[stop][1].length
                stop += 1
            begin = batches[start][0]
            self._write(view[begin : begin + size - self._active.size], self._active.size)
            for _, header in batches[start:stop]:
                self._appended(header)
            start = stop
        return self._end

    def _check_order(
        self, batches: Sequence[tuple[int, BatchHeader]], end: int, allow_gaps_below: int
    ) -> None:
        epoch = self.epochs.epoch_of(end - 1)
        for _, header in batches:
            if header.base_offset != end and not end < header.base_offset <= allow_gaps_below:
                raise CorruptBatchError(
                    f"{self.directory}: the leader sent offset {header.base_offset} where {end} "
                    "comes next."
                )
            if epoch is not None and header.leader_epoch < epoch:
                raise CorruptBatchError(
                    f"{self.directory}: the leader sent offset {header.base_offset} of epoch "
                    f"{header.leader_epoch} after epoch {epoch}."
                )
            end, epoch = header.next_offset, header.leader_epoch

    def _make_room(self, length: int) -> None:
        """Keeps the metadata's reserve free."""
        self._unchecked_bytes += length
        if self._unchecked_bytes < ROOM_CHECK_BYTES:
            return
        try:
            free_bytes = self._disk.free_bytes(self.directory)
        except OSError as error:
            raise self._fail("ask for free space", error) from error
        if free_bytes < RESERVED_BYTES + length:
            raise self._disk_full(f"{free_bytes} bytes are free, {RESERVED_BYTES} are reserved")
        self._unchecked_bytes = 0

    def _disk_full(self, why: str) -> DiskFullError:
        self._unchecked_bytes = ROOM_CHECK_BYTES
        return DiskFullError(
            f"{self.directory}: no room for the append ({why}). Free space on this disk or shorten "
            "retention; appends go on by themselves then."
        )

    def _must_roll(self, header: BatchHeader, append_time_ms: int, size: int) -> bool:
        """Whether a batch must begin a new segment, the active one having `size` bytes by then
        (0: as it is)."""
        active, config = self._active, self._config
        size = size or active.size
        if size == 0:
            return False
        first_append_time_ms = active.first_append_time_ms
        return (
            size + header.length > config.segment_bytes
            or (
                first_append_time_ms is not None
                and append_time_ms - first_append_time_ms >= config.segment_ms
            )
            or header.last_offset_delta + self._end - active.base_offset > RELATIVE_OFFSET_MAX
        )

    def _roll(self) -> None:
        """Begins a new segment. The old one is synced by the next flush plan, not here."""
        segment = Segment(self._disk, self.directory, self._end)
        try:
            segment.create()
        except OSError as error:
            if _is_full(error):
                raise self._disk_full(str(error)) from error
            raise self._fail("create a segment", error) from error
        old = self._active
        old.seal()
        self._unsynced.append(old)
        self._segments.append(segment)
        self._active = segment
        self._directory_changes += 1
        self._forget_recent()

    def _write(self, data: Buffer, position: int) -> None:
        """Writes at the end of the active segment, all or nothing."""
        reason = "a short write"
        try:
            written = self._active.file.pwrite(data, position)
        except OSError as error:
            if not _is_full(error):
                raise self._fail("write", error) from error
            written, reason = 0, str(error)
        if written < len(data):
            try:
                self._active.file.truncate(position)
            except OSError as error:
                raise self._fail("cut back a short write", error) from error
            raise self._disk_full(reason)

    def _appended(self, header: BatchHeader) -> None:
        """Takes a batch into account that was written at the end of the active segment."""
        active = self._active
        self._recent_offsets.append(header.base_offset)
        self._recent_positions.append(active.size)
        if len(self._recent_offsets) > 2 * RECENT_BATCHES:
            del self._recent_offsets[:RECENT_BATCHES]
            del self._recent_positions[:RECENT_BATCHES]
        active.appended(header, self._config.index_interval_bytes)
        if header.leader_epoch != self.epochs.latest():
            self.epochs.assign(header.leader_epoch, header.base_offset)
        self.producers.update(header)
        self._end = header.next_offset
        self._size_bytes += header.length
        self._bytes_since_checkpoint += header.length
        self._last_append_time_ms = max(self._last_append_time_ms, header.append_time_ms)

    # --- flushing ---------------------------------------------------------------------------------

    def plan_flush(self, high_watermark: int, *, checkpoint: bool = False) -> FlushPlan | None:
        """What brings all that is appended by now to disk; None when there is nothing to do.

        A checkpoint goes along after a roll, after `checkpoint_bytes`, or when asked for. Under
        flush="os" there is nothing to do but checkpoints. Run it in a thread, then `apply_flush`.
        """
        self._check_usable()
        is_due = (
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
            self._active.file if self._synced < self._end or syncs_directory else None,
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
            Checkpoint(
                recovery_point=self._end,
                high_watermark=min(high_watermark, self._end),
                log_start=self._start,
            ),
            tuple(writes),
            self.epochs.encode() if changed else None,
            self.epochs.changes,
            self.producers.snapshot(),
        )

    def apply_flush(self, plan: FlushPlan) -> bool:
        """Takes a finished plan into account; False when the log was truncated meanwhile."""
        if plan.generation != self.generation:
            return False
        self._synced = max(self._synced, plan.end_offset)
        self._flushed = max(self._flushed, plan.end_offset)
        self._unsynced = [segment for segment in self._unsynced if segment not in plan.closed]
        for segment in plan.closed:
            self._use(segment)
        self._directory_synced = max(self._directory_synced, plan.directory_changes)
        if plan.checkpoint is not None:
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
        if self._recent_offsets and offset >= self._recent_offsets[0]:
            return self._plan_recent(offset, limit_offset, bytes_max)
        segment = self._segment_of(offset)
        try:
            view = segment.view(offset)
        except OSError as error:
            raise read_failed(segment.path, None, error) from error
        self._use(segment)
        return IndexedRead(self.generation, view, offset, limit_offset, bytes_max)

    def _plan_recent(self, offset: int, limit_offset: int, bytes_max: int) -> ReadPlan:
        offsets, positions, active = self._recent_offsets, self._recent_positions, self._active
        number = bisect_right(offsets, offset) - 1
        start = positions[number]
        limit = bisect_left(offsets, limit_offset)
        stop = min(max(bisect_right(positions, start + bytes_max) - 1, number + 1), limit)
        if limit == len(offsets) and active.size - start <= bytes_max:
            stop = limit
        if stop < len(offsets):
            end, next_offset = positions[stop], offsets[stop]
        else:
            end, next_offset = active.size, self._end
        return ExactRead(self.generation, active.path, active.file, start, end - start, next_offset)

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
        """A check of the batch that contains `offset`, from disk; its `run` raises `StorageError`.

        Raises `OffsetOutOfRangeError` when the log holds no such offset.
        """
        self._check_usable()
        if not self._start <= offset < self._end:
            raise self._out_of_range(offset)
        segment = self._segment_of(offset)
        try:
            view = segment.view(offset)
        except OSError as error:
            raise read_failed(segment.path, None, error) from error
        self._use(segment)
        return VerifyPlan(self.generation, view, offset)

    def verify_range(self, offset: int) -> None:
        """As `plan_verify`, at once: blocks on the disk. Nothing to check outside the log."""
        if self._start <= offset < self._end:
            self.plan_verify(offset).run()

    def _out_of_range(self, offset: int) -> OffsetOutOfRangeError:
        return OffsetOutOfRangeError(
            f"{self.directory}: offset {offset} is outside {self._start} to {self._end}."
        )

    def _segment_of(self, offset: int) -> Segment:
        place = bisect_right(self._segments, offset, key=lambda segment: segment.base_offset)
        return self._segments[max(place - 1, 0)]

    def _use(self, segment: Segment) -> None:
        """Keeps the files of the most recently used closed segments open, and lets go of others."""
        if segment is self._active or segment in self._unsynced:
            return  # A file that is closed before it is synced may take its errors along.
        self._open_segments[segment.base_offset] = segment
        self._open_segments.move_to_end(segment.base_offset)
        if len(self._open_segments) > OPEN_SEGMENTS_MAX:
            _, idle = self._open_segments.popitem(last=False)
            idle.release()

    def _forget_recent(self) -> None:
        self._recent_offsets.clear()
        self._recent_positions.clear()

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
        segment = self._segment_of(offset)
        place = segment.view(offset).locate(offset, pread)
        if place is None:
            raise CorruptBatchError(f"{segment.path}: no batch leads to offset {offset}.")
        end = place.header.base_offset
        lowered = Checkpoint(
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
        while self._segments[-1] is not segment:
            dropped = self._segments.pop()
            self._open_segments.pop(dropped.base_offset, None)
            remove_segment(self._disk, self.directory, dropped.base_offset)
        self._open_segments.pop(segment.base_offset, None)
        segment.truncate(place, self._config.index_interval_bytes)
        for unsynced in self._unsynced:
            if unsynced.base_offset < segment.base_offset:
                unsynced.file.sync_data()
        self._disk.sync_dir(self.directory)
        self._become(segment.next_offset)
        self.producers = load_producers(self._disk, self.directory, self._segments, self._end)

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
        producers = self.producers if end_offset >= self._end else ProducerState()
        reset = Reset(end_offset, log_start, self.epochs.entries(), producers.snapshot())
        self._reset(reset, producers)

    def _reset(self, reset: Reset, producers: ProducerState) -> None:
        self._segments = [reset_log(self._disk, self.directory, reset)]
        self._open_segments.clear()
        self._checkpoint = Checkpoint(
            recovery_point=reset.end_offset,
            high_watermark=min(reset.log_start, reset.end_offset),
            log_start=reset.log_start,
        )
        self._start = reset.log_start
        self.epochs = EpochCache(reset.epochs)
        self._become(reset.end_offset)
        self.producers = producers

    def _become(self, end_offset: int) -> None:
        """The log ends at `end_offset` now, all of it synced."""
        self.generation += 1
        self._active = self._segments[-1]
        self._end = end_offset
        self._start = min(self._start, end_offset) if self._active.size else self._start
        self._flushed = self._synced = end_offset
        self._unsynced = []
        self._directory_synced = self._directory_changes
        self._size_bytes = sum(segment.size for segment in self._segments)
        self.epochs.truncate_to_end(end_offset)
        self._written_epoch_changes = None
        self._forget_recent()

    # --- the start moves on -----------------------------------------------------------------------

    def retention_start(self, now_ms: int, high_watermark: int) -> int:
        """The log start that retention_ms and retention_bytes call for: a segment's base offset at
        most `high_watermark`, or the present start. Closed segments only, by append time."""
        start, size_bytes = self._start, self._size_bytes
        retention_ms, retention_bytes = self._config.retention_ms, self._config.retention_bytes
        for segment, following in zip(self._segments, self._segments[1:], strict=False):
            if following.base_offset > high_watermark:
                break
            is_old = (
                retention_ms is not None
                and now_ms - (segment.last_append_time_ms or 0) > retention_ms
            )
            is_too_much = retention_bytes is not None and size_bytes > retention_bytes
            if not (is_old or is_too_much):
                break
            start = max(start, following.base_offset)
            size_bytes -= segment.size
        return start

    def advance_start(self, offset: int) -> list[str]:
        """Moves the log start up to `offset` (not back, not past the end); the next checkpoint
        persists it.

        Closed segments that lie below it and below the last checkpoint are renamed to `*.deleted`;
        their paths are for `remove_files`, in a thread. Raises `StorageError`.
        """
        self._check_usable()
        self._start = max(self._start, min(offset, self._end))
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
                del self._segments[0]
                self._open_segments.pop(segment.base_offset, None)
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

    # --- the end ----------------------------------------------------------------------------------

    def close(self, high_watermark: int) -> None:
        """Syncs everything, writes a checkpoint and lets go of the files; blocks on the disk.

        A log that has failed is only let go of. Raises `StorageError`.
        """
        if self.failure is not None:
            return
        plan = self._flush_plan(high_watermark, checkpoint=True)
        self._guarded(plan.run)
        self.apply_flush(plan)
        self.failure = f"{self.directory}: the log is closed."
        for segment in self._segments:
            segment.release()

    # --- failing ----------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.failure is not None:
            raise StorageError(self.failure)

    def _guarded(self, change: Callable[[], None]) -> None:
        """Runs a change of several steps; half of it done is a failure of the log."""
        try:
            change()
        except OSError as error:
            raise self._fail("change the log", error) from error
        except (CorruptBatchError, StorageError) as error:
            self.failure = str(error)
            raise StorageError(self.failure) from error

    def _fail(self, what: str, error: OSError) -> StorageError:
        self.failure = (
            f"{self._active.path}, position {self._active.size}: could not {what}: {error}. "
            "This replica stops; check the disk."
        )
        return StorageError(self.failure)


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)

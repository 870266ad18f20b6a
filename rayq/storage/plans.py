"""Jobs of a log that may wait for the disk. They are immutable, run in a thread, and their results
are applied on the event loop.

A plan holds the open files that it needs, so it can run on while the log deletes them. Its
`generation` is that of the log when the plan was made. After a truncation the log has another
generation: then the result is about bytes that are gone, so drop it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rayq.config import MIB
from rayq.environment import Disk, File
from rayq.errors import CorruptBatchError, StorageError, UnsupportedFormatError
from rayq.storage import checked_file
from rayq.storage.aborted_index import write_aborted
from rayq.storage.appending import is_full, open_failed
from rayq.storage.batch import check_body, decode_columns, split_batches
from rayq.storage.checkpoint import LogCheckpoint, write_checkpoint
from rayq.storage.epochs import write_epochs
from rayq.storage.index import DamagedIndexError, Index, IndexWrite, Reader
from rayq.storage.producer_state import SNAPSHOTS_KEPT, snapshot_offsets, snapshot_path
from rayq.storage.segment import BODY_SCAN_BYTES, Place, Segment, SegmentView, pread, scan

logger = logging.getLogger(__name__)

VERIFY_BYTES_MAX = 16 * MIB
"""A fetch sends a reader at most this much."""

# --- flushing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointJob:
    """A new checkpoint, and the writes that must be on disk before it."""

    state: LogCheckpoint
    index_writes: tuple[tuple[Index, IndexWrite], ...]
    epochs: bytes | None
    """The content of `leader-epochs`. None when the file has it already."""
    epoch_changes: int
    aborted: tuple[tuple[int, bytes], ...]
    """Base offsets and contents of the files `*.aborted` that change."""
    producer_snapshot: bytes
    local_snapshot: bytes | None = None
    """The producer state at a local start that is new: a log that is cut anywhere above it cannot
    read it from the batches below."""

    def is_news(self, checkpoint: LogCheckpoint) -> bool:
        """Returns whether it would write anything that `checkpoint` did not write yet."""
        return self.state != checkpoint or bool(self.index_writes) or self.epochs is not None

    def run(self, disk: Disk, directory: str) -> None:
        for _, write in self.index_writes:
            checked_file.write_all(write.file, write.data, write.position)
            write.file.sync_data()
        if self.epochs is not None:
            write_epochs(disk, directory, self.epochs)
        for base_offset, content in self.aborted:
            write_aborted(disk, directory, base_offset, content)
        path = snapshot_path(directory, self.state.recovery_point)
        checked_file.replace(disk, path, self.producer_snapshot, syncs_directory=False)
        local_start = self.state.local_start if self.state.has_remote_part else None
        if self.local_snapshot is not None:
            path = snapshot_path(directory, self.state.local_start)
            checked_file.replace(disk, path, self.local_snapshot, syncs_directory=False)
        disk.sync_dir(directory)
        write_checkpoint(disk, directory, self.state)
        for offset in snapshot_offsets(disk, directory)[:-SNAPSHOTS_KEPT]:
            if offset != local_start:
                disk.remove(snapshot_path(directory, offset))


@dataclass(frozen=True)
class FlushPlan:
    """Brings everything below `end_offset` to disk, older files first."""

    disk: Disk
    directory: str
    generation: int
    end_offset: int
    closed: tuple[Segment, ...]
    """The closed segments that the plan syncs. Only `Log.apply_flush` looks at them."""
    files: tuple[File, ...]
    syncs_directory: bool
    active: File | None
    checkpoint: CheckpointJob | None
    directory_changes: int
    bytes_since_checkpoint: int
    """Both are as they were when the plan was made. Only `Log.apply_flush` looks at them."""

    @property
    def is_dirty(self) -> bool:
        """True if batches or names of files are not on disk yet."""
        return self.active is not None or bool(self.files)

    def run(self) -> bool:
        """In a thread. Returns whether the plan had a checkpoint and wrote it. A checkpoint that
        finds no room can be tried again from its beginning; the batches are on disk all the same.

        Raises OSError. Then nobody knows what is on disk, so do not try again: the kernel may have
        dropped the pages that it could not write."""
        for file in self.files:
            file.sync_data()
        if self.syncs_directory:
            self.disk.sync_dir(self.directory)
        if self.active is not None:
            self.active.sync_data()
        if self.checkpoint is None:
            return False
        try:
            self.checkpoint.run(self.disk, self.directory)
        except OSError as error:
            if not is_full(error):
                raise
            logger.warning("%s: no room for a checkpoint: %s", self.directory, error)
            return False
        return True


# --- reading ------------------------------------------------------------------------------------


class ReadResult(NamedTuple):
    """Whole batches, and the offset after the last of them."""

    data: bytes
    next_offset: int


CACHED_READ_BYTES_MAX = 1024**2
"""A longer read runs in a thread even from the page cache, since copying would block the loop."""


class _WouldWait(Exception):  # noqa: N818
    """A read needs bytes that are not in the page cache, or too many of them."""


def _pread_cached(file: File, length: int, position: int) -> bytes:
    data = file.pread_cached(length, position) if length <= CACHED_READ_BYTES_MAX else None
    if data is None:
        raise _WouldWait
    return data


class ReadPlan(Protocol):
    """One read. Both ways raise `CorruptBatchError` (the log is damaged there, or was truncated
    meanwhile) and `StorageError` (the disk failed)."""

    @property
    def generation(self) -> int: ...

    def run_cached(self) -> ReadResult | None:
        """On the loop. None where the read would have to wait for the disk."""
        ...

    def run(self) -> ReadResult:
        """In a thread."""
        ...


@dataclass(frozen=True)
class NothingToRead:
    """The read of a reader that has reached the end."""

    generation: int
    next_offset: int

    def run_cached(self) -> ReadResult | None:
        return ReadResult(b"", self.next_offset)

    def run(self) -> ReadResult:
        return ReadResult(b"", self.next_offset)


@dataclass(frozen=True)
class ExactRead:
    """A read at the tail, whose position in the file is known."""

    generation: int
    path: str
    file: File
    position: int
    length: int
    next_offset: int

    def run_cached(self) -> ReadResult | None:
        try:
            return self._read(_pread_cached)
        except _WouldWait:
            return None

    def run(self) -> ReadResult:
        return self._read(pread)

    def _read(self, read: Reader) -> ReadResult:
        try:
            data = read(self.file, self.length, self.position)
        except OSError as error:
            raise read_failed(self.path, self.position, error) from error
        if len(data) < self.length:
            raise CorruptBatchError(
                f"{self.path}, position {self.position}: {len(data)} bytes of {self.length}."
            )
        return ReadResult(data, self.next_offset)


@dataclass(frozen=True)
class IndexedRead:
    """A read that first looks its position up in the index."""

    generation: int
    view: SegmentView
    offset: int
    limit_offset: int
    bytes_max: int
    gaps_below: int
    """Compaction may have left gaps below this offset; any other one is damage."""

    def run_cached(self) -> ReadResult | None:
        try:
            return self._read(_pread_cached)
        except _WouldWait:
            return None

    def run(self) -> ReadResult:
        return self._read(pread)

    def _read(self, read: Reader) -> ReadResult:
        view = self.view
        try:
            first = view.locate(self.offset, read)
            if self.offset >= self.gaps_below and (
                first is None or first.header.base_offset > self.offset
            ):
                raise nothing_leads_to(view, self.offset)
            if first is None or first.header.base_offset >= self.limit_offset:
                return ReadResult(b"", self.offset)
            end, next_offset = end_of_read(view, first, self.bytes_max, self.limit_offset, read)
            data = read(view.file, end - first.position, first.position)
        except OSError as error:
            raise read_failed(view.path, None, error) from error
        if len(data) < end - first.position:
            raise CorruptBatchError(f"{view.path}, position {first.position}: cut off.")
        return ReadResult(data, next_offset)


def end_of_read(
    view: SegmentView, first: Place, bytes_max: int, limit_offset: int, read: Reader
) -> tuple[int, int]:
    """Position and offset where a read from the batch `first` on stops: at the segment's end, else
    at a batch that the index knows, else behind the last batch that fits, but always behind the
    first batch. Raises as `scan`, and OSError."""
    start, header = first
    position_max = start + bytes_max
    if view.size <= position_max and view.next_offset <= limit_offset:
        return view.size, view.next_offset
    next_offset, end = view.boundary(position_max, limit_offset, read)
    if end > start:
        return end, next_offset
    end, next_offset = start + header.length, header.next_offset
    for position, header in scan(view.file, end, view.size, read, path=view.path):
        if position + header.length > position_max or header.next_offset > limit_offset:
            break
        end, next_offset = position + header.length, header.next_offset
    return end, next_offset


@dataclass(frozen=True)
class TimeLookup:
    """The first record from `start_offset` on, below `limit_offset`, that is not older than
    `timestamp_ms`. `views` are the segments that can hold it, in order."""

    generation: int
    views: tuple[SegmentView, ...]
    pending: tuple[tuple[tuple[int, int], ...], ...]
    """The time index entries of each segment that are not in its file yet."""
    timestamp_ms: int
    start_offset: int
    limit_offset: int

    def run(self) -> tuple[int, int] | None:
        """In a thread: (offset, timestamp), or None. Raises the errors of a `ReadPlan`."""
        for view, pending in zip(self.views, self.pending, strict=True):
            try:
                found = self._search(view, self._floor(view, pending))
            except OSError as error:
                raise read_failed(view.path, None, error) from error
            if found is not None:
                return found if found[0] < self.limit_offset else None
        return None

    def _floor(self, view: SegmentView, pending: tuple[tuple[int, int], ...]) -> int:
        """An offset before which all records in the segment are older."""
        older = [relative for timestamp_ms, relative in pending if timestamp_ms < self.timestamp_ms]
        try:
            if older:
                relative = older[-1]
            else:
                number = view.times.last_below(self.timestamp_ms, pread)
                relative = 0 if number is None else view.times.entry(number, pread)[1]
        except DamagedIndexError:
            relative = 0
        return max(view.base_offset + relative, self.start_offset)

    def _search(self, view: SegmentView, floor: int) -> tuple[int, int] | None:
        first = view.locate(floor, pread)
        if first is None:
            return None
        for position, header in scan(view.file, first.position, view.size, path=view.path):
            if header.newest_timestamp_ms < self.timestamp_ms:
                continue
            data = pread(view.file, header.length, position)
            found = first_not_older(data, self.timestamp_ms, self.start_offset)
            if found is not None:
                return found
        return None


def first_not_older(
    data: bytes, timestamp_ms: int, start_offset: int
) -> tuple[int, int] | None:
    """The first record from `start_offset` on, in whole batches, that is not older than
    `timestamp_ms`, as (offset, timestamp). Raises CorruptBatchError."""
    for position, header in split_batches(data):
        if header.newest_timestamp_ms < timestamp_ms:
            continue
        check_body(data, position, header)
        try:
            columns = decode_columns(data, position, header, check_crc=False)
        except (CorruptBatchError, UnsupportedFormatError):
            # The CRC is right, and yet this is not a batch of records. Its header says that it
            # reaches the time, and a reader from there gets the error.
            return max(header.base_offset, start_offset), header.newest_timestamp_ms
        for offset, record_ms in zip(columns.offsets, columns.timestamps_ms, strict=True):
            if offset >= start_offset and record_ms >= timestamp_ms:
                return offset, record_ms
    return None


@dataclass(frozen=True)
class VerifyPlan:
    """A check of all that a read from `offset` can have sent, headers and bodies: the batch that
    contains it, and the batches after it in the segment, up to `VERIFY_BYTES_MAX`."""

    generation: int
    view: SegmentView
    offset: int
    gaps_below: int
    """The same as in an `IndexedRead`."""

    def run(self) -> None:
        """In a thread. Raises `StorageError` with file and position when a batch is damaged."""
        view = self.view
        try:
            place = view.locate(self.offset, pread)
            if place is None:
                raise nothing_leads_to(view, self.offset)
            start, expected = place.position, self.offset
            for position, header in scan(
                view.file,
                start,
                view.size,
                path=view.path,
                bodies=True,
                chunk_bytes=BODY_SCAN_BYTES,
            ):
                if header.base_offset > expected >= self.gaps_below:
                    raise nothing_leads_to(view, expected)
                expected = header.next_offset
                if position + header.length - start >= VERIFY_BYTES_MAX:
                    break
        except CorruptBatchError as error:
            raise StorageError(f"{error} The disk damaged the log; nothing was deleted.") from error
        except OSError as error:
            raise read_failed(view.path, None, error) from error


def nothing_leads_to(view: SegmentView, offset: int) -> CorruptBatchError:
    return CorruptBatchError(f"{view.path}: no batch leads to offset {offset}.")


def read_failed(path: str, position: int | None, error: OSError) -> StorageError:
    if is_full(error):
        return open_failed(path, error)
    where = path if position is None else f"{path}, position {position}"
    return StorageError(f"{where}: the disk could not read it: {error}. Check the disk.")

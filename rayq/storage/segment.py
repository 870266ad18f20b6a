"""One segment of a log: the file `<base offset, 20 digits>.log` and its two indexes. A file of the
index of aborted transactions may be beside them."""

from __future__ import annotations

import os.path
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from rayq.environment import Disk, File
from rayq.errors import CorruptBatchError, StorageError
from rayq.storage.batch import HEADER_BYTES, BatchHeader, check_body, read_header
from rayq.storage.index import (
    OFFSET_ENTRY,
    TIME_ENTRY,
    DamagedIndexError,
    Index,
    IndexView,
    Reader,
)

LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX = ".log", ".index", ".timeindex"
ABORTED_SUFFIX = ".aborted"
SUFFIXES = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX)
DELETED_SUFFIX = ".deleted"
HEADER_SCAN_BYTES = 8 * 1024
"""A scan for a batch between two index entries reads this much at once."""
BODY_SCAN_BYTES = 4 * 1024 * 1024
"""A scan that checks whole batches reads this much at once."""


def segment_path(directory: str, base_offset: int, suffix: str) -> str:
    return f"{directory}/{base_offset:020d}{suffix}"


def remove_segment(disk: Disk, directory: str, base_offset: int) -> None:
    """Removes the files of a segment; durable after a sync of the directory. Raises OSError."""
    for suffix in SUFFIXES:
        path = segment_path(directory, base_offset, suffix)
        if disk.exists(path):
            disk.remove(path)


def base_offsets(names: list[str], suffix: str) -> list[int]:
    """The base offsets in the file names of a partition directory that end in `suffix`."""
    stems = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def pread(file: File, length: int, position: int) -> bytes:
    """The `Reader` that waits for the disk."""
    return file.pread(length, position)


class Place(NamedTuple):
    """The position and the header of a batch."""

    position: int
    header: BatchHeader


def scan(
    file: File,
    position: int,
    end: int,
    read: Reader = pread,
    *,
    path: str,
    bodies: bool = False,
    chunk_bytes: int = HEADER_SCAN_BYTES,
) -> Iterator[Place]:
    """The batches between two positions of a log file, read in chunks of at least `chunk_bytes`.
    With `bodies` the scan checks their bodies too.

    Raises `CorruptBatchError` with `path` and the position of the first batch that is not intact.
    """
    chunk, start = b"", position
    while position < end:
        needed = HEADER_BYTES
        if position + needed > start + len(chunk):
            chunk, start = read(file, min(chunk_bytes, end - position), position), position
        try:
            header = read_header(chunk, position - start)
            if position + header.length > end:
                raise CorruptBatchError(f"The batch is cut off after {end - position} bytes.")
            if bodies:
                if position + header.length > start + len(chunk):
                    length = max(header.length, min(chunk_bytes, end - position))
                    chunk, start = read(file, length, position), position
                check_body(chunk, position - start, header)
        except CorruptBatchError as error:
            raise CorruptBatchError(f"{path}, position {position}: {error}") from error
        yield Place(position, header)
        position += header.length


def headers_between(
    segments: Sequence[Segment], start_offset: int, end_offset: int
) -> Iterator[BatchHeader]:
    """The headers of the batches from the batch that contains `start_offset` up to `end_offset`.

    Raises `CorruptBatchError` with file and position.
    """
    for segment in segments:
        if segment.next_offset <= start_offset or segment.base_offset >= end_offset:
            continue
        first = segment.view(start_offset).locate(start_offset, pread)
        if first is None:
            continue
        for place in scan(segment.file, first.position, segment.size, path=segment.path):
            if place.header.base_offset >= end_offset:
                return
            yield place.header


@dataclass(frozen=True)
class SegmentView:
    """A segment as it stood at one moment, for a job in a thread.

    `floor` is a known place at or before the offset that the job is about, None: ask the index.
    `ceiling` is a batch, offset and position, that a read may end before, None: ask the index.
    """

    path: str
    file: File
    base_offset: int
    next_offset: int
    size: int
    offsets: IndexView
    times: IndexView
    floor: int | None = None
    ceiling: tuple[int, int] | None = None

    def locate(self, offset: int, read: Reader) -> Place | None:
        """The batch that contains `offset` (in a gap, the next batch), or None past the end.

        Raises `CorruptBatchError` where the log itself is damaged.
        """
        try:
            start = self._indexed(offset, read) if self.floor is None else self.floor
            return self._find(start, offset, read)
        except (DamagedIndexError, CorruptBatchError):
            return self._find(0, offset, read)

    def _indexed(self, offset: int, read: Reader) -> int:
        number = self.offsets.last_at_most(offset - self.base_offset, read)
        if number is None:
            return 0
        relative, position = self.offsets.entry(number, read)
        if relative > offset - self.base_offset:
            raise DamagedIndexError(f"entries are in disorder: {relative} comes before {offset}")
        self._check(relative, position, read)
        return position

    def _check(self, relative: int, position: int, read: Reader) -> None:
        """Raises DamagedIndexError unless an index entry leads to the batch that it names."""
        if position + HEADER_BYTES > self.size:
            raise DamagedIndexError(f"an entry points to {position}, behind the log's end")
        header = read_header(read(self.file, HEADER_BYTES, position))
        if header.base_offset != self.base_offset + relative:
            raise DamagedIndexError(f"an entry for {relative} points to {header.base_offset}")

    def end_before(self, offset: int, read: Reader) -> int:
        """The end of the last batch that begins before `offset`."""
        end = self.base_offset
        for place in scan(self.file, 0, self.size, read, path=self.path):
            if place.header.base_offset >= offset:
                break
            end = place.header.next_offset
        return end

    def _find(self, start: int, offset: int, read: Reader) -> Place | None:
        for place in scan(self.file, start, self.size, read, path=self.path):
            if place.header.next_offset > offset:
                return place
        return None

    def boundary(self, position_max: int, offset_max: int, read: Reader) -> tuple[int, int]:
        """Offset and position of the last batch in the index that begins at or before both limits,
        or of the segment's start."""
        return max(self._indexed_boundary(position_max, offset_max, read), self.ceiling or (0, 0))

    def _indexed_boundary(
        self, position_max: int, offset_max: int, read: Reader
    ) -> tuple[int, int]:
        try:
            by_position = self.offsets.last_at_most(position_max, read, column=1)
            by_offset = self.offsets.last_at_most(offset_max - self.base_offset, read)
            if by_position is None or by_offset is None:
                return self.base_offset, 0
            relative, position = self.offsets.entry(min(by_position, by_offset), read)
            if position > position_max or relative > offset_max - self.base_offset:
                return self.base_offset, 0
            self._check(relative, position, read)
        except (DamagedIndexError, CorruptBatchError):
            return self.base_offset, 0
        return self.base_offset + relative, position


class Segment:
    """The files of one segment, and the figures of its batches.

    The log file has batches back to back and nothing else. A crash may leave its unsynced end
    short, torn or with holes; `recovery` cuts it there.
    """

    def __init__(
        self, disk: Disk, directory: str, base_offset: int, *, writable: bool = True
    ) -> None:
        self._disk = disk
        self._writable = writable
        self.directory = directory
        self.base_offset = base_offset
        self.path = segment_path(directory, base_offset, LOG_SUFFIX)
        index_path = segment_path(directory, base_offset, INDEX_SUFFIX)
        self.offsets = Index(disk, index_path, OFFSET_ENTRY, writable=writable)
        time_index_path = segment_path(directory, base_offset, TIME_INDEX_SUFFIX)
        self.times = Index(disk, time_index_path, TIME_ENTRY, writable=writable)
        self._file: File | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets all batches. The files stay as they are."""
        self.size = 0
        self.next_offset = self.base_offset
        self.max_timestamp_ms = -1
        self.first_append_time_ms: int | None = None
        self.last_append_time_ms: int | None = None
        self._unindexed_bytes = 0

    @property
    def paths(self) -> tuple[str, str, str]:
        return self.path, self.offsets.path, self.times.path

    @property
    def has_pending_entries(self) -> bool:
        """True if index entries wait for the next checkpoint."""
        return bool(self.offsets.pending or self.times.pending)

    def move_to(self, directory: str) -> None:
        """Renames the files into another directory, over existing files of their names. Durable
        after a sync of both directories. Open files stay open. Raises OSError."""
        for holder in (self.offsets, self.times, self):
            target = f"{directory}/{os.path.basename(holder.path)}"
            self._disk.rename(holder.path, target)
            holder.path = target
        self.directory = directory

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = self._disk.open(self.path, create=self._writable, writable=self._writable)
        return self._file

    def create(self) -> None:
        """Makes the files. Durable after a sync of the directory. Raises OSError.

        The log file comes last: the next start removes indexes without a log file, so a failure
        on the way leaves no segment behind.
        """
        assert self.offsets.file is not None
        assert self.times.file is not None
        assert self.file is not None

    def release(self) -> None:
        """Drops the files. They close when no plan uses them any more."""
        self._file = None
        self.offsets.release()
        self.times.release()

    def appended(self, header: BatchHeader, index_interval_bytes: int) -> None:
        """Counts a batch that was appended to the file, and adds an index entry when one is due."""
        if self._unindexed_bytes >= index_interval_bytes:
            relative = header.base_offset - self.base_offset
            self.offsets.add(relative, self.size)
            self.times.add(self.max_timestamp_ms, relative)
            self._unindexed_bytes = 0
        self.count(header)

    def count(self, header: BatchHeader) -> None:
        """Counts a batch without a new index entry."""
        if self.first_append_time_ms is None:
            self.first_append_time_ms = header.append_time_ms
        self.last_append_time_ms = header.append_time_ms
        self.max_timestamp_ms = max(self.max_timestamp_ms, header.newest_timestamp_ms)
        self.size += header.length
        self.next_offset = header.next_offset
        self._unindexed_bytes += header.length

    def seal(self) -> None:
        """Adds the last entry of the time index: no batch will be added any more."""
        self.times.add(self.max_timestamp_ms, self.next_offset - self.base_offset)

    def view(
        self, offset: int | None = None, limit_offset: int | None = None, bytes_max: int = 0
    ) -> SegmentView:
        """The segment as it is now, for a job about the batch at `offset`, or about the batches
        from there on, below `limit_offset`, of up to `bytes_max`."""
        floor = ceiling = None
        pending = self.offsets.pending
        if offset is not None and pending and pending[0][0] <= offset - self.base_offset:
            place = bisect_right(pending, offset - self.base_offset, key=itemgetter(0))
            floor = pending[place - 1][1]
        elif offset is not None and not self.offsets.count:
            floor = 0
        if limit_offset is not None and floor is not None:
            place = min(
                bisect_right(pending, limit_offset - self.base_offset, key=itemgetter(0)),
                bisect_right(pending, floor + bytes_max, key=itemgetter(1)),
            )
            if place > 0:
                relative, position = pending[place - 1]
                ceiling = (self.base_offset + relative, position)
        return SegmentView(
            path=self.path,
            file=self.file,
            base_offset=self.base_offset,
            next_offset=self.next_offset,
            size=self.size,
            offsets=self.offsets.view(),
            times=self.times.view(),
            floor=floor,
            ceiling=ceiling,
        )

    # --- opening ----------------------------------------------------------------------------------

    def load(self, until: int, index_interval_bytes: int, *, is_closed: bool) -> bool:
        """Counts the batches below `until`, all of which are on disk. Returns False when the index
        had to be rebuilt.

        Trusts the index when the batches from its last entry on lead to `until`. Else it scans the
        segment and rebuilds the index (pending). A closed segment ends at `until`. Raises
        `StorageError` when the log does not lead to `until` exactly.
        """
        self.clear()
        try:
            loaded = self._load_indexed(until, is_closed)
        except (DamagedIndexError, CorruptBatchError):
            loaded = False
        if not loaded:
            self._rebuild(until, index_interval_bytes)
            if is_closed:
                self.seal()
        return loaded

    def truncate(self, place: Place, until: int, index_interval_bytes: int) -> None:
        """Cuts the batch at `place` and all batches after it, durably. The segment then ends at
        `until`. Raises OSError, or `StorageError` when a batch that stays is damaged.
        """
        self.file.truncate(place.position)
        self.file.sync_data()
        relative = until - self.base_offset
        entries = bisect_left(self.offsets.pending, relative, key=itemgetter(0))
        try:
            if entries > 0:
                entries += self.offsets.count
            else:
                kept = self.offsets.view().last_at_most(relative - 1, pread)
                entries = 0 if kept is None else kept + 1
            self.offsets.keep(entries)
            self.times.keep(entries)
            self.clear()
            if self._resume(entries, until):
                return
        except (DamagedIndexError, CorruptBatchError):
            pass
        self._rebuild(until, index_interval_bytes)

    def _load_indexed(self, until: int, is_closed: bool) -> bool:
        if not (self.offsets.load() and self.times.load()):
            return False
        kept = self.offsets.view().last_at_most(until - 1 - self.base_offset, pread)
        entries = 0 if kept is None else kept + 1
        if self.times.count < entries:
            return False
        if not is_closed:
            self.offsets.keep(entries)
            self.times.keep(entries)
            return self._resume(entries, until)
        if self.offsets.count != entries:
            return False
        if not self._resume(entries, until) or self.size != self.file.size():
            return False
        if self.times.count == entries:
            self.seal()  # The segment was closed after the last checkpoint.
        return self._is_sealed()

    def _is_sealed(self) -> bool:
        """Returns whether the last entry of the time index has the segment's end and greatest
        timestamp."""
        if len(self.times) != len(self.offsets) + 1:
            return False
        newest, end = self.times.entry(len(self.times) - 1, pread)
        return (newest, end) == (self.max_timestamp_ms, self.next_offset - self.base_offset)

    def _resume(self, entries: int, until: int) -> bool:
        """Counts the batches from the last of the index `entries` to `until`. Returns whether they
        and the entries fit together."""
        if until == self.base_offset:
            return True
        log_bytes = self.file.size()
        first = next(scan(self.file, 0, log_bytes, path=self.path), None)
        if first is None:
            return False
        if entries:
            relative, self.size = self.offsets.entry(entries - 1, pread)
            newest, same = self.times.entry(entries - 1, pread)
            if same != relative:
                return False
            self.max_timestamp_ms = max(self.max_timestamp_ms, newest)
            self.next_offset = self.base_offset + relative
        if not self._count_until(until, log_bytes, self.count):
            return False
        self.first_append_time_ms = first.header.append_time_ms
        return True

    def _count_until(
        self,
        until: int,
        log_bytes: int,
        count: Callable[[BatchHeader], None],
        chunk_bytes: int = HEADER_SCAN_BYTES,
    ) -> bool:
        """Counts the batches from the counted end to `until`, or to the gap before it. Returns
        False when they miss it."""
        if self.next_offset == until:
            return True
        for place in scan(
            self.file,
            self.size,
            log_bytes,
            path=self.path,
            bodies=True,
            chunk_bytes=chunk_bytes,
        ):
            if place.header.base_offset < self.next_offset:
                return False
            if place.header.base_offset >= until:
                return True
            count(place.header)
            if self.next_offset >= until:
                break
        return self.next_offset == until

    def _rebuild(self, until: int, index_interval_bytes: int) -> None:
        self.clear()
        for index in (self.offsets, self.times):
            index.load()
            index.keep(0)

        def count(header: BatchHeader) -> None:
            self.appended(header, index_interval_bytes)

        log_bytes = self.file.size()
        try:
            reached = self._count_until(until, log_bytes, count, BODY_SCAN_BYTES)
        except CorruptBatchError as error:
            raise StorageError(
                f"{error} Batches below offset {until} were on disk: nothing was deleted. Check "
                "the disk; without this partition's directory the log is copied from its leader."
            ) from error
        if not reached:
            raise StorageError(
                f"{self.path}, position {self.size}: the log leads to offset {self.next_offset} "
                f"where batches up to {until} were on disk. Nothing was deleted. Check the disk; "
                "without this partition's directory the log is copied from its leader."
            )

"""Compaction of closed segments: the latest record of each key stays, at its offset.

A pass has two halves. First it reads the dirty part, what was appended since the last pass, and
maps each key to its latest offset there. Then it copies the log from its start on without the
records that the map supersedes. The map has a limit: when it is full the pass covers less, and the
next one goes on from there. KIP-58, and the cleaner of Kafka that it describes.

What also stays: records without a key, control batches, and of batches that lose all their records
the header alone where it tells something: the last batches of each live producer (so that a retry
is still recognised by who copies the log), the last batch of a leader epoch and of a segment (so
that it is known where they end). Tombstones, records without a value, stay for
`delete_retention_ms` after the pass that first left nothing else of their key. A batch whose bytes
are as they were written, and which is no batch of records all the same, stays as it is and is told
of: it is not the disk's fault, and no reason to stop.

This reads segments that do not change any more and writes into `<partition>/cleaning/`; only
`swap` touches the log. So it can run anywhere, be stopped at any step and be forgotten: it is a
generator of small steps, for whoever paces them.
"""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager

import msgspec

from rayq.config import MIB
from rayq.environment import Buffer, Disk, File
from rayq.errors import (
    CorruptBatchError,
    DirectoryInUseError,
    DiskFullError,
    RayqError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from rayq.storage import checked_file
from rayq.storage.appending import RESERVED_BYTES
from rayq.storage.batch import (
    HEADER_BYTES,
    BatchHeader,
    Columns,
    check_body,
    decode_columns,
    keep_records,
    read_header,
)
from rayq.storage.segment import LOG_SUFFIX, Segment, pread, segment_path

CLEANING = "cleaning"
"""The directory, within the partition's, of segments that are being made."""
CLEANER_LOCK = "cleaner.lock"
"""In the broker's directory: one pass at a time on one disk."""
STEP_BYTES = 1 * MIB
"""Read at once; a single batch may be larger."""
SYNC_BYTES = 1 * MIB
"""Written between two syncs, so that no other sync on the disk waits behind a long one."""
LEFT_BYTES = 2 * RESERVED_BYTES
"""Of free space a pass leaves so much: more than appends must leave, so that they go on."""
BYTES_PER_KEY = 256
"""Of memory in the map, while it grows: measured 130 to 230."""
DIGEST_BYTES = 16
"""Two of 2**32 keys share a digest with a probability of 2**-65."""


class SourceSegment(msgspec.Struct, array_like=True, frozen=True):
    """A closed segment as it stands."""

    base_offset: int
    next_offset: int
    size_bytes: int


class CleaningJob(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over one log, as `Log.plan_cleaning` wants it."""

    directory: str
    groups: tuple[tuple[SourceSegment, ...], ...]
    """From the log's first segment on, in order; each group becomes one segment."""
    dirty_offset: int
    """What lies below was compacted before."""
    tombstones_below: int
    """Tombstones below go."""
    producer_batches: tuple[int, ...]
    """Base offsets of the batches whose headers tell the state of live producers."""
    index_interval_bytes: int
    memory_bytes: int
    """For the map of keys."""
    bytes_per_s: int
    """The most to read and write."""

    @property
    def keys_max(self) -> int:
        return max(self.memory_bytes // BYTES_PER_KEY, 1)


class CleanedGroup(msgspec.Struct, array_like=True, frozen=True):
    """A group and the segment made of it, in `cleaning/` under the first base offset."""

    base_offsets: tuple[int, ...]
    next_offset: int
    size_bytes: int | None
    """None: the segment stays as it is, nothing was to be removed."""


class CleaningResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass has made; all of it is on disk."""

    groups: tuple[CleanedGroup, ...]
    end_offset: int
    """The log is compacted up to here; less than was asked for when the map was full."""
    tombstones: int
    """How many stay."""
    horizon: int
    """The last tombstone that went was just below; 0: none did."""
    keys: int
    records_read: int = 0
    records_kept: int = 0
    bytes_read: int = 0
    bytes_kept: int = 0
    unreadable_batches: int = 0
    """So many were kept as they are, since they are no batches of records."""
    unreadable_offset: int | None = None
    """Where the first of them is."""
    peak_memory_bytes: int | None = None
    """Of the helper process, where there is one."""


Steps = Generator[int, None, CleaningResult]
"""Each step yields how many bytes it has read and written; the result is the return value."""


@contextmanager
def cleaner_turn(disk: Disk, partition_directory: str) -> Iterator[None]:
    """Holds the lock of the data directory. Raises DirectoryInUseError when another pass runs."""
    path = f"{os.path.dirname(partition_directory)}/{CLEANER_LOCK}"
    with closing(disk.open(path, create=True)) as file:
        if not file.try_lock():
            raise DirectoryInUseError(f"{path}: another log of this broker is being compacted.")
        yield


def clean(disk: Disk, job: CleaningJob) -> Steps:
    """The pass, in steps. The caller has the turn (`cleaner_turn`).

    Raises CorruptBatchError naming file and position where the disk damaged a batch, DiskFullError,
    OSError.
    """
    try:
        return (yield from _clean(disk, job))
    except (RayqError, OSError):
        remove_cleaning(disk, job.directory)  # It may be what fills the disk.
        raise


def remove_cleaning(disk: Disk, directory: str) -> None:
    """Removes what a pass has made and nobody wants. Raises OSError."""
    for name in disk.list(f"{directory}/{CLEANING}"):
        path = f"{directory}/{CLEANING}/{name}"
        if disk.exists(path):  # A cleaner that outlived its broker may tidy up as well.
            disk.remove(path)


def _clean(disk: Disk, job: CleaningJob) -> Steps:
    directory = f"{job.directory}/{CLEANING}"
    remove_cleaning(disk, job.directory)
    checked_file.make_directory(disk, directory)
    latest, end_offset = yield from _latest_offsets(disk, job)
    cleaning = _Pass(disk, job, directory, latest)
    for group in job.groups:
        sources = [source for source in group if source.base_offset < end_offset]
        if sources:
            yield from cleaning.run(sources)
    disk.sync_dir(directory)
    return CleaningResult(
        groups=tuple(cleaning.groups),
        end_offset=end_offset,
        tombstones=cleaning.tombstones,
        horizon=cleaning.horizon,
        keys=len(latest),
        records_read=cleaning.records_read,
        records_kept=cleaning.records_kept,
        bytes_read=cleaning.bytes_read,
        bytes_kept=cleaning.bytes_kept,
        unreadable_batches=cleaning.unreadable_batches,
        unreadable_offset=cleaning.unreadable_offset,
    )


def _digest(key: bytes) -> bytes:
    """Stands for the key in the map. A short key stands for itself: no digest is as short."""
    if len(key) < DIGEST_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()


def _latest_offsets(
    disk: Disk, job: CleaningJob
) -> Generator[int, None, tuple[dict[bytes, int], int]]:
    """The latest offset of each key in the dirty part, and how far that is known."""
    latest: dict[bytes, int] = {}
    end_offset = job.dirty_offset
    for source in (source for group in job.groups for source in group):
        if source.next_offset <= job.dirty_offset:
            continue
        for data, batches in _chunks(disk, job.directory, source):
            for position, header in batches:
                if header.next_offset <= job.dirty_offset:
                    continue
                if latest and len(latest) + header.record_count > job.keys_max:
                    return latest, end_offset
                columns = None if header.is_control else _columns(data, position, header)
                if columns is not None:
                    for offset, key in zip(columns.offsets, columns.keys or (), strict=False):
                        if key is not None:
                            latest[_digest(key)] = offset
                end_offset = header.next_offset
            yield len(data)
    return latest, end_offset


def _columns(data: bytes, position: int, header: BatchHeader) -> Columns | None:
    """None: no batch of records, although its bytes are as they were written. Raises
    CorruptBatchError where they are not."""
    check_body(data, position, header)
    try:
        return decode_columns(data, position, header, check_crc=False)
    except (CorruptBatchError, UnsupportedFormatError):
        return None


def _chunks(
    disk: Disk, directory: str, source: SourceSegment
) -> Iterator[tuple[bytes, list[tuple[int, BatchHeader]]]]:
    """The segment in pieces of whole batches, with their places. Bodies are not checked."""
    path = segment_path(directory, source.base_offset, LOG_SUFFIX)
    file = disk.open(path, writable=False)
    position = 0
    while position < source.size_bytes:
        try:
            data, batches, length = _chunk(file, position, source.size_bytes)
        except CorruptBatchError as error:
            raise CorruptBatchError(f"{path}, from position {position}: {error}") from error
        yield data, batches
        position += length
    file.close()  # Of a pass that is given up it closes by itself.


def _chunk(file: File, start: int, end: int) -> tuple[bytes, list[tuple[int, BatchHeader]], int]:
    data = pread(file, min(STEP_BYTES, end - start), start)
    first = read_header(data)
    if first.length > len(data):
        data = pread(file, min(first.length, end - start), start)
        if first.length > len(data):
            raise CorruptBatchError(f"The last batch is cut off after {len(data)} bytes.")
    batches, position = [(0, first)], first.length
    while position + HEADER_BYTES <= len(data):
        header = read_header(data, position)
        if position + header.length > len(data):
            break
        batches.append((position, header))
        position += header.length
    return data, batches, position


class _Pass:
    """The second half: copies groups of segments without what the map supersedes."""

    def __init__(
        self, disk: Disk, job: CleaningJob, directory: str, latest: dict[bytes, int]
    ) -> None:
        self._disk = disk
        self._job = job
        self._directory = directory
        self._latest = latest
        self._producer_batches = frozenset(job.producer_batches)
        self.groups: list[CleanedGroup] = []
        self.tombstones = 0
        self.horizon = 0
        self.records_read = self.records_kept = 0
        self.bytes_read = self.bytes_kept = 0
        self.unreadable_batches = 0
        self.unreadable_offset: int | None = None

    def run(self, sources: list[SourceSegment]) -> Generator[int, None, None]:
        size_bytes = sum(source.size_bytes for source in sources)
        free_bytes = self._disk.free_bytes(self._directory)
        if free_bytes < LEFT_BYTES + size_bytes:
            raise DiskFullError(
                f"{self._job.directory} is not compacted: {free_bytes} bytes are free on the disk, "
                f"it may need {size_bytes} for a while and leaves {LEFT_BYTES} to others."
            )
        output = _Output(self._disk, self._directory, sources[0].base_offset, self._job)
        is_changed = len(sources) > 1
        emptied: tuple[BatchHeader, Buffer] | None = None
        for source in sources:
            for data, batches in _chunks(self._disk, self._job.directory, source):
                for position, before in batches:
                    if emptied is not None and emptied[0].leader_epoch != before.leader_epoch:
                        output.add(*emptied)  # It says where its epoch ends.
                    emptied = None
                    batch = self._filtered(data, position, before)
                    header = read_header(batch)
                    is_changed |= header.record_count != before.record_count
                    if header.record_count or header.base_offset in self._producer_batches:
                        output.add(header, batch)
                    else:
                        emptied = header, batch
                yield len(data) + output.write()
        if emptied is not None:
            output.add(*emptied)  # It says where the segment ends.
        yield output.finish()
        segment = output.segment
        assert segment.next_offset == sources[-1].next_offset
        self.bytes_read += size_bytes
        self.bytes_kept += segment.size
        is_same = not is_changed and segment.size == size_bytes
        if is_same:
            for path in segment.paths:
                self._disk.remove(path)
        self.groups.append(
            CleanedGroup(
                tuple(source.base_offset for source in sources),
                segment.next_offset,
                None if is_same else segment.size,
            )
        )

    def _filtered(self, data: bytes, position: int, header: BatchHeader) -> Buffer:
        """The batch as it is to be: the same bytes, or fewer records between the same first and
        last offset. So logs that were cleaned differently agree on where batches end."""
        whole = data[position : position + header.length]
        columns = _columns(whole, 0, header)
        self.records_read += header.record_count
        if columns is None:
            self.unreadable_batches += 1
            if self.unreadable_offset is None:
                self.unreadable_offset = header.base_offset
        if columns is None or header.is_control:
            self.records_kept += header.record_count
            return whole
        latest, tombstones_below = self._latest, self._job.tombstones_below
        keys = columns.keys or [None] * header.record_count
        kept: list[int] = []
        for place, (offset, key) in enumerate(zip(columns.offsets, keys, strict=True)):
            if key is not None:
                if latest.get(_digest(key), -1) > offset:
                    continue
                if columns.values[place] is None:
                    if offset < tombstones_below:
                        self.horizon = max(self.horizon, offset + 1)
                        continue
                    self.tombstones += 1
            kept.append(place)
        if len(kept) < header.record_count:
            try:
                batch = keep_records(header, columns, kept)
            except RecordTooLargeError:  # A large batch with its offsets spelled out: let it be.
                self.records_kept += header.record_count
                return whole
            self.records_kept += len(kept)
            return batch
        self.records_kept += header.record_count
        return whole


class _Output:
    """The segment that is being made, with its indexes."""

    def __init__(self, disk: Disk, directory: str, base_offset: int, job: CleaningJob) -> None:
        self._index_interval_bytes = job.index_interval_bytes
        self._buffer = bytearray()
        self._written = self._synced = 0
        self.segment = Segment(disk, directory, base_offset)
        self.segment.create()
        # An empty file has no index header yet.
        self.segment.offsets.load()
        self.segment.times.load()

    def add(self, header: BatchHeader, batch: Buffer) -> None:
        self._buffer += batch
        self.segment.appended(header, self._index_interval_bytes)

    def write(self) -> int:
        """Brings what was added to the file; returns how much that was."""
        length = len(self._buffer)
        if length:
            checked_file.write_all(self.segment.file, self._buffer, self._written)
            self._written += length
            self._buffer = bytearray()
        if self._written - self._synced >= SYNC_BYTES:
            self.segment.file.sync_data()
            self._synced = self._written
        return length

    def finish(self) -> int:
        """All of it, indexes included, is on disk when this returns."""
        length = self.write()
        self.segment.file.sync_data()
        self.segment.seal()
        for index in (self.segment.offsets, self.segment.times):
            write = index.write()
            assert write is not None
            checked_file.write_all(write.file, write.data, write.position)
            write.file.sync_data()
            length += len(write.data)
        self.segment.release()
        return length

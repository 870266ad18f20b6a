"""Compaction of closed segments: the latest record of each key stays, at its offset.

A pass has two halves. First it reads the dirty part, which was appended since the last pass, and
maps each key to its latest offset there. Then it copies the log from its start on, without the
records that the map supersedes. The map has a limit: when it is full, the pass covers less, and the
next pass continues from there. This follows the cleaner of Kafka, which KIP-58 describes.

The log is compacted up to the last stable offset at most, so each transaction has ended. Records of
aborted transactions go, and supersede nothing. The batches of committed transactions lose the
attribute that says so: from then on they need no marker, and markers go as tombstones go.

Records without a key stay too. Of a batch that loses all its records the header stays in three
cases: for the last batches of each live producer (so that the replicas that copy the log still
recognise a retry), and for the last batch of a leader epoch and of a segment (so that their ends
are known). Tombstones, which are records without a value, stay for `delete_retention_ms` after the
pass that first left nothing else of their key. A batch whose CRC is right, and whose bytes are no
batch of records all the same, stays as it is and is reported: the disk did not damage it, so the
pass continues.

A pass reads segments that do not change any more and writes into `<partition>/cleaning/`. Only
`swap` changes the log. So a pass can run in any process, and can be stopped and dropped at any
step: it is a generator of small steps, which its caller paces.
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
from rayq.messages.transaction_ids import family_of
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
    without_records,
    without_transaction,
)
from rayq.storage.segment import LOG_SUFFIX, Segment, pread, segment_path

CLEANING = "cleaning"
"""The directory for new segments, within the partition's directory."""
CLEANER_LOCK = "cleaner.lock"
"""A lock in the broker's directory, so that one pass runs at a time on one disk."""
STEP_BYTES = 1 * MIB
"""A pass reads this much at once. A single batch may be larger."""
SYNC_BYTES = 1 * MIB
"""A pass writes this much between two syncs, so that no other sync waits behind a long one."""
LEFT_BYTES = 2 * RESERVED_BYTES
"""A pass leaves this much free space: more than appends must leave, so that they continue."""
BYTES_PER_KEY = 256
"""The memory of one key in the map while the map grows. Measured: 130 to 230 bytes."""
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
    """The segments from the log's first on, in order. Each group becomes one segment."""
    dirty_offset: int
    """The log below was compacted before."""
    tombstones_below: int
    """Tombstones and markers below this offset go."""
    aborted: frozenset[tuple[int, int]]
    """Families and epochs of the aborted transactions with batches in these segments."""
    producer_batches: tuple[int, ...]
    """The base offsets of the batches whose headers hold the state of live producers."""
    index_interval_bytes: int
    memory_bytes: int
    """The limit for the map of keys."""
    bytes_per_s: int
    """The maximum that the pass reads and writes in a second."""

    @property
    def keys_max(self) -> int:
        return max(self.memory_bytes // BYTES_PER_KEY, 1)


class CleanedGroup(msgspec.Struct, array_like=True, frozen=True):
    """A group and its new segment, in `cleaning/` under the first base offset."""

    base_offsets: tuple[int, ...]
    next_offset: int
    size_bytes: int | None
    """The size of the new segment. None: the old segment stays, since no record had to go."""


class CleaningResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a pass. All of it is on disk."""

    groups: tuple[CleanedGroup, ...]
    end_offset: int
    """The log is compacted up to here. When the map was full, this is before the job's end."""
    tombstones: int
    """The number of tombstones and markers that stay."""
    horizon: int
    """The offset after the last tombstone or marker that went. 0: none went."""
    keys: int
    records_read: int = 0
    records_kept: int = 0
    bytes_read: int = 0
    bytes_kept: int = 0
    unreadable_batches: int = 0
    """The number of batches that stay as they are, since they are not batches of records."""
    unreadable_offset: int | None = None
    """The offset of the first of them."""
    peak_memory_bytes: int | None = None
    """The peak of the cleaner process, where a process of its own runs the pass."""


Steps = Generator[int, None, CleaningResult]
"""Each step yields the number of bytes that it read and wrote. The result is returned."""


@contextmanager
def cleaner_turn(disk: Disk, partition_directory: str) -> Iterator[None]:
    """Holds the lock of the data directory. Raises DirectoryInUseError when another pass runs."""
    path = f"{os.path.dirname(partition_directory)}/{CLEANER_LOCK}"
    with closing(disk.open(path, create=True)) as file:
        if not file.try_lock():
            raise DirectoryInUseError(f"{path}: another log of this broker is being compacted.")
        yield


def clean(disk: Disk, job: CleaningJob) -> Steps:
    """The pass, in steps. The caller holds the lock (`cleaner_turn`).

    Raises CorruptBatchError with file and position where the disk damaged a batch, DiskFullError,
    OSError.
    """
    try:
        return (yield from _clean(disk, job))
    except (RayqError, OSError):
        remove_cleaning(disk, job.directory)  # These files may be what fills the disk.
        raise


def remove_cleaning(disk: Disk, directory: str) -> None:
    """Removes the files of a pass whose result is not used. Raises OSError."""
    for name in disk.list(f"{directory}/{CLEANING}"):
        path = f"{directory}/{CLEANING}/{name}"
        if disk.exists(path):  # A cleaner that outlived its broker may remove it meanwhile.
            disk.remove(path)


def _clean(disk: Disk, job: CleaningJob) -> Steps:
    directory = f"{job.directory}/{CLEANING}"
    remove_cleaning(disk, job.directory)
    checked_file.make_directory(disk, directory)
    latest, end_offset = yield from _latest_offsets(disk, job)
    cleaning = _Pass(disk, job, directory, latest, end_offset)
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
    """The key in the map. A short key is its own digest: no real digest is as short."""
    if len(key) < DIGEST_BYTES:
        return key
    return hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()


def _latest_offsets(
    disk: Disk, job: CleaningJob
) -> Generator[int, None, tuple[dict[bytes, int], int]]:
    """The latest offset of each key in the dirty part, and the offset up to which the map holds."""
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
                is_mapped = not header.is_control and not _is_aborted(job, header)
                columns = _columns(data, position, header) if is_mapped else None
                if columns is not None:
                    for offset, key in zip(columns.offsets, columns.keys or (), strict=False):
                        if key is not None:
                            latest[_digest(key)] = offset
                end_offset = header.next_offset
            yield len(data)
    return latest, end_offset


def _is_aborted(job: CleaningJob, header: BatchHeader) -> bool:
    if not header.is_transactional or header.producer_id is None:
        return False
    return (family_of(header.producer_id), header.producer_epoch) in job.aborted


def _columns(data: Buffer, position: int, header: BatchHeader) -> Columns | None:
    """The records of a batch. None: it is not a batch of records, although its CRC is right. Raises
    CorruptBatchError where the CRC is wrong."""
    check_body(data, position, header)
    try:
        return decode_columns(data, position, header, check_crc=False)
    except (CorruptBatchError, UnsupportedFormatError):
        return None


def _chunks(
    disk: Disk, directory: str, source: SourceSegment
) -> Iterator[tuple[bytes, list[tuple[int, BatchHeader]]]]:
    """The segment in pieces of whole batches, with their positions. Bodies are not checked."""
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
    file.close()  # When a pass is given up, the file closes with its last reference.


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
    """The second half of a pass: copies groups of segments without superseded records."""

    def __init__(
        self,
        disk: Disk,
        job: CleaningJob,
        directory: str,
        latest: dict[bytes, int],
        end_offset: int,
    ) -> None:
        self._disk = disk
        self._job = job
        self._directory = directory
        self._latest = latest
        self._end_offset = end_offset
        """The batches of a segment from here on stay as they are: the map does not cover them."""
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
                        output.add(*emptied)  # This header says where its epoch ends.
                    emptied = None
                    batch = self._filtered(data, position, before)
                    header = read_header(batch)
                    is_changed |= header != before
                    if (
                        header.record_count
                        or header.base_offset in self._producer_batches
                        or (header.is_control and self._keeps_marker(header))
                    ):
                        output.add(header, batch)
                    else:
                        emptied = header, batch
                yield len(data) + output.write()
        if emptied is not None:
            output.add(*emptied)  # This header says where the segment ends.
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

    def _keeps_marker(self, header: BatchHeader) -> bool:
        if header.base_offset < self._job.tombstones_below:
            self.horizon = max(self.horizon, header.next_offset)
            return False
        self.tombstones += 1
        return True

    def _filtered(self, data: bytes, position: int, header: BatchHeader) -> Buffer:
        """The batch as it is to be: the same bytes, or fewer records between the same first and
        last offset. So logs that were cleaned differently agree on where batches end."""
        whole: Buffer = data[position : position + header.length]
        self.records_read += header.record_count
        if header.is_transactional:
            check_body(whole, 0, header)
            if header.is_control or header.base_offset >= self._end_offset:
                return whole
            is_aborted = _is_aborted(self._job, header)
            whole = without_transaction(without_records(header) if is_aborted else whole)
            header = read_header(whole)
        columns = _columns(whole, 0, header)
        if columns is None:
            self.unreadable_batches += 1
            if self.unreadable_offset is None:
                self.unreadable_offset = header.base_offset
        if columns is None:
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
            except RecordTooLargeError:  # The column of offsets makes it too large: it stays.
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
        """Writes the added batches to the file. Returns their size in bytes."""
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
        """Brings the whole segment, with its indexes, to disk. Returns the bytes written."""
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

"""A log in a temporary directory, and disks that count or fail."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rayq.config import GIB, TopicConfig
from rayq.environment import Buffer
from rayq.storage.batch import BatchHeader, decode_columns, encode_batch, read_header, split_batches
from rayq.storage.clean_state import write_clean_state
from rayq.storage.disk import LocalDisk, LocalFile
from rayq.storage.log import Log

NOW_MS = 1_000_000


def value_of(number: int, size: int = 20) -> bytes:
    return (b"%09d " % number * (size // 10 + 1))[:size]


def make_batch(
    first: int,
    count: int = 1,
    *,
    size: int = 20,
    timestamp_ms: int = NOW_MS,
    producer_id: int | None = None,
    producer_epoch: int = 0,
    base_sequence: int | None = None,
) -> bytearray:
    """A batch whose values name their records. It is not compressed, so that sizes are known."""
    return encode_batch(
        [value_of(number, size) for number in range(first, first + count)],
        timestamps_ms=timestamp_ms,
        compression="none",
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def append(
    log: Log,
    count: int = 1,
    *,
    epoch: int = 0,
    now_ms: int = NOW_MS,
    size: int = 20,
    timestamp_ms: int = NOW_MS,
    producer_id: int | None = None,
    base_sequence: int | None = None,
) -> BatchHeader:
    """Appends one batch of `count` records whose values name their offsets."""
    batch = make_batch(
        log.end_offset,
        count,
        size=size,
        timestamp_ms=timestamp_ms,
        producer_id=producer_id,
        base_sequence=base_sequence,
    )
    return log.append_as_leader(batch, read_header(batch), leader_epoch=epoch, now_ms=now_ms)


def flush(log: Log, *, checkpoint: bool = False, high_watermark: int = 0) -> None:
    plan = log.plan_flush(high_watermark, checkpoint=checkpoint)
    if plan is not None:
        assert log.apply_flush(plan, has_checkpoint=plan.run())


def learn(log: Log, cleaned_offset: int, tombstone_horizon: int = 0) -> None:
    """Tells the log a leader's statement about the records that come next."""
    state = log.plan_learning(log.end_offset, cleaned_offset, tombstone_horizon)
    if state is not None:
        write_clean_state(LocalDisk(), log.directory, state)
        log.learned(state)


def read_bytes(log: Log, start: int | None = None, bytes_max: int = 1 << 20) -> bytes:
    """All bytes of the log from `start` on, by as many reads as it takes."""
    offset, data = log.start_offset if start is None else start, b""
    while offset < log.end_offset:
        result = log.plan_read(offset, log.end_offset, bytes_max).run()
        assert result.next_offset > offset
        offset, data = result.next_offset, data + result.data
    return data


def values_in(data: bytes) -> list[bytes | None]:
    values: list[bytes | None] = []
    for position, header in split_batches(data):
        values += decode_columns(data, position, header).values
    return values


def assert_holds(log: Log, start: int, end: int, size: int = 20) -> None:
    """The log holds the records `start` to `end` as `append` made them."""
    assert log.end_offset == end
    expected = [value_of(number, size) for number in range(start, end)]
    assert values_in(read_bytes(log, start)) == expected


class CountingFile(LocalFile):
    def sync_data(self) -> None:
        self._disk.syncs += 1

    def __init__(self, descriptor: int, disk: CountingDisk) -> None:
        super().__init__(descriptor)
        self._disk = disk

    def pread(self, length: int, position: int) -> bytes:
        data = super().pread(length, position)
        self._disk.bytes_read += len(data)
        return data


class CountingDisk(LocalDisk):
    """Counts the bytes that are read, and the syncs. It does not sync: these tests kill processes,
    and the simulated disk is for power losses."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self.syncs = 0

    def sync_dir(self, path: str) -> None:
        self.syncs += 1

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> LocalFile:
        file = super().open(path, create=create, writable=writable)
        descriptor, file._descriptor = file.descriptor, None
        return CountingFile(descriptor, self)


class FaultyFile(LocalFile):
    def __init__(self, descriptor: int, path: str, disk: FaultyDisk) -> None:
        super().__init__(descriptor)
        self._path = path
        self._disk = disk

    def pwrite(self, data: Buffer, position: int) -> int:
        self._disk.check("write", self._path)
        if self._disk.short_write is not None:
            data = memoryview(data)[: self._disk.short_write]
        return super().pwrite(data, position)

    def pread(self, length: int, position: int) -> bytes:
        self._disk.check("read", self._path)
        return super().pread(length, position)

    def truncate(self, size: int) -> None:
        self._disk.check("truncate", self._path)
        super().truncate(size)

    def sync_data(self) -> None:
        self._disk.check("sync", self._path)


class FaultyDisk(LocalDisk):
    """Fails the operations named in `faults` (operation -> errno), writes short, or is full. It
    does not really sync."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.path_part = ""
        self.short_write: int | None = None
        self.free: int | None = None

    def check(self, operation: str, path: str) -> None:
        error = self.faults.get(operation)
        if error is not None and self.path_part in path:
            raise OSError(error, errno.errorcode[error], path)

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> LocalFile:
        self.check("open", path)
        if create:
            self.check("create", path)
        file = super().open(path, create=create, writable=writable)
        descriptor, file._descriptor = file.descriptor, None
        return FaultyFile(descriptor, path, self)

    def sync_dir(self, path: str) -> None:
        self.check("sync", path)

    def rename(self, source: str, target: str) -> None:
        self.check("rename", source)
        super().rename(source, target)

    def free_bytes(self, path: str) -> int:
        return super().free_bytes(path) if self.free is None else self.free


@dataclass
class Place:
    """The directory where a test keeps its log. `open` opens the log, again and again if need
    be."""

    path: Path
    disk: LocalDisk = field(default_factory=CountingDisk)
    config: TopicConfig = field(default_factory=TopicConfig)
    checkpoint_bytes: int = GIB

    def open(self, disk: LocalDisk | None = None) -> Log:
        return Log.open(
            disk or self.disk,
            str(self.path),
            self.config,
            checkpoint_bytes=self.checkpoint_bytes,
            now_ms=NOW_MS,
        )

    def files(self, suffix: str) -> list[Path]:
        return sorted(self.path.glob(f"*{suffix}"))

    def edit(self, path: Path, change: Callable[[bytearray], None]) -> None:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    def names(self) -> list[str]:
        return sorted(file.name for file in self.path.iterdir())

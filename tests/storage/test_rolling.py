"""A segment is rolled on a disk that fails: the running log and the next start agree on the
records."""

from __future__ import annotations

import errno

import pytest

from rayq.config import TopicConfig
from rayq.errors import DiskFullError, StorageError
from rayq.storage import appending
from rayq.storage.disk import LocalFile
from rayq.storage.log import Log
from tests.storage.support import (
    CountingDisk,
    FaultyDisk,
    Place,
    append,
    flush,
    read_bytes,
    values_in,
)

CONFIG = TopicConfig(segment_bytes=1024, index_interval_bytes=100)


class FailingDisk(FaultyDisk):
    """Fails one of the next operations, by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_after: int | None = None
        self.error = 0

    def check(self, operation: str, path: str) -> None:
        super().check(operation, path)
        if self.fails_after is None or operation == "read":
            return
        self.fails_after -= 1
        if self.fails_after < 0:
            self.fails_after = None
            raise OSError(self.error, errno.errorcode[self.error], path)

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> LocalFile:
        if not create:
            self.check("open", path)
        return super().open(path, create=create, writable=writable)

    def remove(self, path: str) -> None:
        self.check("remove", path)
        super().remove(path)


@pytest.fixture
def disk(place: Place) -> FailingDisk:
    place.disk, place.config = FailingDisk(), CONFIG
    return place.disk


def begun(place: Place) -> Log:
    """A log whose segment has room for one more small batch."""
    log = place.open()
    for _ in range(9):
        append(log)
    flush(log, checkpoint=True)
    return log


@pytest.mark.parametrize("suffix", [".log", ".index", ".timeindex"])
def test_a_log_that_found_no_room_for_a_new_segment_can_be_opened_again(
    place: Place, disk: FailingDisk, suffix: str
) -> None:
    log = begun(place)
    disk.faults["create"], disk.path_part = errno.ENOSPC, f"{log.end_offset:020d}{suffix}"
    with pytest.raises(DiskFullError):
        append(log, 5, size=100)
    disk.faults.clear()
    append(log)  # the batch fits the old segment, where the new one would begin
    for _ in range(20):
        append(log)
    flush(log, checkpoint=True)
    written = read_bytes(log)
    again = place.open()
    assert again.end_offset == 30
    assert read_bytes(again) == written


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_whatever_fails_while_segments_are_rolled_nothing_that_was_flushed_is_lost(
    place: Place, disk: FailingDisk, error: int
) -> None:
    root, number, was_met = place.path, 0, True
    while was_met:
        place.path = root / str(number)
        log = begun(place)
        disk.fails_after, disk.error = number, error
        flushed, written = log.flushed_offset, b""
        for size in (600, 20, 600, 20):
            try:
                append(log, size=size)
                flush(log)
            except StorageError:
                if log.failure is not None:
                    break
            except OSError:
                break  # the error of a sync: the replica ends
            flushed = log.flushed_offset
            written = log.failure or read_bytes(log)
        was_met, disk.fails_after = disk.fails_after is None, None
        again = place.open()
        assert again.end_offset >= flushed, f"operation {number}"
        assert read_bytes(again)[: len(written)] == written, f"operation {number}"
        append(again, 3)
        assert len(values_in(read_bytes(again))) == again.end_offset
        number += 1
    assert number > 30


@pytest.mark.parametrize("operation", ["create", "write"])
@pytest.mark.parametrize("path_part", ["/checkpoint", ".snapshot", ".index", "/leader-epochs"])
def test_a_checkpoint_without_room_costs_nothing_and_is_written_once_there_is_room(
    place: Place, disk: FailingDisk, operation: str, path_part: str
) -> None:
    log = begun(place)
    for _ in range(30):
        append(log, epoch=7)
    disk.faults[operation], disk.path_part = errno.EDQUOT, path_part
    flush(log)
    assert log.flushed_offset == log.end_offset == 39
    is_refused = operation == "write" or path_part != ".index"  # Those files are there already.
    assert (log.plan_flush(0) is not None) == is_refused
    assert log.plan_flush(0, may_checkpoint=False) is None
    assert place.open(CountingDisk()).end_offset == 39
    append(log, epoch=7)
    disk.faults.clear()
    flush(log)
    assert log.plan_flush(0) is None
    again = place.open()
    assert (again.end_offset, again.plan_flush(0)) == (40, None)
    assert read_bytes(again) == read_bytes(log)


def test_segments_are_closed_no_faster_than_the_disk_syncs_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits with its files open: small segments used up the descriptors of the process."""
    monkeypatch.setattr(appending, "UNSYNCED_SEGMENTS_MAX", 3)
    place.config = CONFIG
    log = place.open()

    def write(count: int) -> None:
        for _ in range(count):
            append(log, size=400)

    write(40)
    assert len(log.local_segments()) == 4
    assert log.local_segments()[-1].size_bytes > 10 * CONFIG.segment_bytes
    flush(log)
    write(40)
    assert len(log.local_segments()) == 7
    flush(log)
    monkeypatch.setattr(appending, "SEGMENT_BYTES_MAX", 4096)
    write(40)
    assert len(log.local_segments()) > 10, "a file holds no more"
    assert log.end_offset == 120
    assert place.open().end_offset == 120

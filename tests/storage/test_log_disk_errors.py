"""Full disks heal; disks that fail end the log."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from rayq.config import KIB, MIB, TopicConfig
from rayq.errors import DiskFullError, StorageError
from rayq.storage import appending, checked_file
from rayq.storage.batch import stamp
from rayq.storage.log import Log
from rayq.storage.producer_state import ProducerState
from tests.storage.support import (
    NOW_MS,
    FaultyDisk,
    Place,
    append,
    assert_holds,
    flush,
    make_batch,
)


@pytest.fixture
def faulty(place: Place) -> FaultyDisk:
    place.disk = FaultyDisk()
    return place.disk


def payload_of(first: int, batches: int) -> bytearray:
    data = bytearray()
    for number in range(first, first + batches):
        batch = make_batch(number)
        stamp(batch, 0, base_offset=number, leader_epoch=0, append_time_ms=NOW_MS)
        data += batch
    return data


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_refuses_the_append_and_heals(
    place: Place, faulty: FaultyDisk, error: int
) -> None:
    log = place.open()
    append(log, 3)
    faulty.faults["write"] = error
    for _ in range(3):
        with pytest.raises(DiskFullError, match="Free space"):
            append(log, 3)
        with pytest.raises(DiskFullError):
            log.append_as_follower(payload_of(3, 4))
    assert log.failure is None
    assert_holds(log, 0, 3)
    faulty.faults.clear()
    append(log, 2)
    flush(log)
    assert_holds(log, 0, 5)
    assert_holds(place.open(), 0, 5)


def test_a_file_is_not_replaced_on_a_disk_that_takes_no_byte_and_reports_no_error(
    faulty: FaultyDisk, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    checked_file.write(faulty, path, "checkpoint", 1, b"old")
    faulty.short_write = 0
    with pytest.raises(OSError, match="a write of nothing") as failed:
        checked_file.write(faulty, path, "checkpoint", 1, b"new")
    assert appending.is_full(failed.value)
    assert checked_file.read(faulty, path, "checkpoint", 1) == b"old"
    faulty.short_write = 2
    checked_file.write(faulty, path, "checkpoint", 1, b"new")
    assert checked_file.read(faulty, path, "checkpoint", 1) == b"new"


@pytest.mark.parametrize("written", [0, 1, 30, 80, 150])
def test_a_short_write_is_cut_back(place: Place, faulty: FaultyDisk, written: int) -> None:
    log = place.open()
    append(log, 3)
    size = log.size_bytes
    faulty.short_write = written
    with pytest.raises(DiskFullError):
        append(log, 10)
    with pytest.raises(DiskFullError):
        log.append_as_follower(payload_of(3, 4))
    assert place.files(".log")[0].stat().st_size == size
    faulty.short_write = None
    append(log, 2)
    assert_holds(log, 0, 5)
    assert_holds(place.open(), 0, 5)


def test_an_empty_log_without_room_for_the_batch_around_its_start_stays_where_it_is(
    place: Place, faulty: FaultyDisk
) -> None:
    # It ended before the batch, below its own start and its high watermark (seed 14 of `swarm`).
    payload = make_batch(0, 10)
    stamp(payload, 0, base_offset=0, leader_epoch=0, append_time_ms=NOW_MS)
    log = place.open()
    log.reset(4, [(0, 0)], ProducerState().snapshot())
    faulty.short_write = 30
    with pytest.raises(DiskFullError):
        log.append_as_follower(payload)
    assert (log.start_offset, log.end_offset, log.size_bytes) == (4, 4, 0)
    faulty.short_write = None
    for one in place.open(), log:
        assert (one.start_offset, one.end_offset, one.size_bytes) == (4, 4, 0)
    assert log.append_as_follower(payload) == 10
    assert log.start_offset == 4


def test_a_follower_keeps_the_whole_batches_that_found_room(
    place: Place, faulty: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.config = TopicConfig(segment_bytes=1024)
    log = place.open()
    calls = []

    def create_nothing_more(operation: str, path: str) -> None:
        if operation == "create" and path.endswith(".log"):
            calls.append(path)
            raise OSError(errno.ENOSPC, "full", path)

    monkeypatch.setattr(faulty, "check", create_nothing_more)
    with pytest.raises(DiskFullError):
        log.append_as_follower(payload_of(0, 50))
    assert calls
    end = log.end_offset
    assert 5 < end < 50
    assert_holds(log, 0, end)
    monkeypatch.undo()
    assert log.append_as_follower(payload_of(end, 50 - end)) == 50
    assert_holds(place.open(), 0, 50)


def test_data_leaves_room_for_the_metadata(place: Place, faulty: FaultyDisk) -> None:
    log = place.open()
    append(log)
    faulty.free = 64 * MIB
    append(log)

    def append_much() -> None:
        for _ in range(100):
            append(log, 100, size=1000)

    with pytest.raises(DiskFullError, match="reserved"):
        append_much()
    end = log.end_offset
    assert end < 2 + 100 * 50
    with pytest.raises(DiskFullError):
        append(log)
    faulty.free = 65 * MIB
    append(log)
    assert log.end_offset == end + 1


@pytest.mark.parametrize(
    ("operation", "use"),
    [
        ("write", lambda log: append(log)),
        ("write", lambda log: log.append_as_follower(payload_of(20, 1))),
        ("truncate", lambda log: log.truncate(3)),
        ("sync", lambda log: log.truncate(3)),
        ("write", lambda log: log.reset(5, [], b"")),
        ("sync", lambda log: log.close(0)),
        ("rename", lambda log: log.truncate(3)),
    ],
)
def test_a_disk_that_fails_ends_the_log(
    place: Place, faulty: FaultyDisk, operation: str, use: Callable[[Log], object]
) -> None:
    log = place.open()
    for _ in range(20):
        append(log)
    flush(log, checkpoint=True, high_watermark=10)
    faulty.faults[operation] = errno.EIO
    with pytest.raises(StorageError, match="EIO") as raised:
        use(log)
    assert not isinstance(raised.value, DiskFullError)
    assert log.failure is not None
    faulty.faults.clear()
    for refused in (
        lambda: append(log),
        lambda: log.append_as_follower(payload_of(20, 1)),
        lambda: log.plan_flush(0),
        lambda: log.plan_read(0, 1, 1),
        lambda: log.truncate(1),
        lambda: log.reset(1, [], b""),
        lambda: log.advance_start(1),
    ):
        with pytest.raises(StorageError):
            refused()
    log.close(0)
    again = place.open()
    if operation != "write" or again.end_offset != 5:
        assert_holds(again, 0, again.end_offset)


def test_a_cut_back_that_fails_ends_the_log(place: Place, faulty: FaultyDisk) -> None:
    log = place.open()
    append(log)
    faulty.short_write = 10
    faulty.faults["truncate"] = errno.EIO
    with pytest.raises(StorageError, match="cut back"):
        append(log)
    assert log.failure is not None
    faulty.short_write = None
    faulty.faults.clear()
    assert_holds(place.open(), 0, 1)


def test_a_sync_that_fails_reaches_whoever_ran_the_plan(place: Place, faulty: FaultyDisk) -> None:
    log = place.open()
    append(log)
    plan = log.plan_flush(0)
    assert plan is not None
    faulty.faults["sync"] = errno.EIO
    with pytest.raises(OSError, match="EIO"):
        plan.run()
    assert log.flushed_offset == 0


def test_a_read_that_fails_names_the_file(place: Place, faulty: FaultyDisk) -> None:
    log = place.open()
    for _ in range(10):
        append(log, 5)
    log.close(0)
    log = place.open()
    path = str(place.files(".log")[0])
    faulty.faults["read"] = errno.EIO
    for read in (
        log.plan_read(0, 50, 100).run,
        log.plan_offset_for_time(0, 50).run,
        lambda: log.plan_verify(0).run(),
    ):
        with pytest.raises(StorageError, match=path):
            read()
    with pytest.raises(StorageError, match="cannot be opened"):
        place.open()
    faulty.faults.clear()
    assert_holds(log, 0, 50)


def test_free_space_is_not_asked_for_at_every_append(
    place: Place, faulty: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(faulty, "free_bytes", lambda path: asked.append(path) or 1 << 40)
    monkeypatch.setattr(appending, "ROOM_CHECK_BYTES", 10_000)
    log = place.open()
    for _ in range(100):
        append(log, 10)
    assert 1 <= len(asked) <= log.size_bytes // 10_000 + 1


def test_many_logs_on_one_disk_leave_the_reserve_to_the_metadata(
    place: Place, faulty: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = []
    root = place.path
    for number in range(200):
        place.path = root / str(number)
        logs.append(place.open())
    used_before = sum(log.size_bytes for log in logs)
    room = 256 * KIB

    def free_bytes(path: str) -> int:
        used = sum(log.size_bytes for log in logs) - used_before
        return appending.RESERVED_BYTES + room - used

    monkeypatch.setattr(faulty, "free_bytes", free_bytes)
    refused = set()
    while len(refused) < len(logs):
        for number, log in enumerate(logs):
            try:
                append(log, 4, size=1000)
            except DiskFullError:
                refused.add(number)
    assert free_bytes("") >= appending.RESERVED_BYTES


def test_a_log_that_was_idle_while_others_filled_the_disk_looks_again(
    place: Place, faulty: FaultyDisk
) -> None:
    log = place.open()
    append(log)
    flush(log)
    faulty.free = appending.RESERVED_BYTES
    with pytest.raises(DiskFullError, match="reserved"):
        append(log)

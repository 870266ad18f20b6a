"""Opening a log after kill -9, with torn tails, missing indexes and damage."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import google_crc32c
import pytest

from rayq.config import MIB, TopicConfig
from rayq.errors import StorageError, UnsupportedFormatError
from rayq.storage.batch import read_header
from rayq.storage.log import Log
from rayq.storage.producer_state import DuplicateBatch
from tests.storage.support import (
    NOW_MS,
    CountingDisk,
    Place,
    append,
    assert_holds,
    flush,
    make_batch,
    read_bytes,
)

SMALL = TopicConfig(segment_bytes=4096, index_interval_bytes=300)


def test_a_log_left_by_a_killed_process_has_all_it_had(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    for number in range(100):
        append(log, 5, epoch=number // 30)
    before = read_bytes(log)
    again = place.open()
    assert read_bytes(again) == before
    assert again.epochs.entries() == log.epochs.entries() == [(0, 0), (1, 150), (2, 300), (3, 450)]
    assert again.flushed_offset == again.end_offset == 500
    assert again.last_epoch == 3
    assert again.size_bytes == log.size_bytes
    assert again.plan_flush(0) is None


@pytest.mark.slow
def test_a_torn_tail_is_cut_at_open_wherever_it_was_torn(place: Place, tmp_path: Path) -> None:
    log = place.open()
    append(log, 3)
    flush(log, checkpoint=True, high_watermark=3)
    append(log, 2)
    end = log.size_bytes
    append(log, 4)
    data = place.files(".log")[0].read_bytes()
    for size in range(end, len(data)):
        copy = Place(tmp_path / "copy")
        shutil.copytree(place.path, copy.path)
        copy.files(".log")[0].write_bytes(data[:size])
        again = copy.open()
        assert_holds(again, 0, 5)
        assert copy.files(".log")[0].stat().st_size == end
        assert again.flushed_offset == 5
        assert again.persisted_high_watermark == 3
        append(again, 1)
        assert_holds(copy.open(), 0, 6)
        shutil.rmtree(copy.path)


def test_a_batch_behind_a_torn_one_is_cut_as_well(place: Place) -> None:
    log = place.open()
    edges = [0]
    for _ in range(5):
        append(log, 2)
        edges.append(log.size_bytes)
    path = place.files(".log")[0]
    place.edit(path, lambda data: data.__setitem__(slice(edges[2], edges[3]), bytes(edges[1])))
    assert_holds(place.open(), 0, 4)
    assert path.stat().st_size == edges[2]


def test_segments_behind_a_torn_one_are_cut_as_well(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    for _ in range(100):
        append(log, 5)
    paths = place.files(".log")
    place.edit(paths[1], lambda data: data.pop())
    again = place.open()
    assert again.end_offset == int(paths[2].name[:20]) - 5
    assert place.files(".log") == paths[:2]
    append(again, 5)
    assert_holds(place.open(), 0, int(paths[2].name[:20]))


def test_a_missing_unsynced_segment_ends_the_log_there(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    for _ in range(100):
        append(log, 5)
    paths = place.files(".log")
    paths[2].unlink()
    again = place.open()
    assert_holds(again, 0, int(paths[2].name[:20]))
    assert place.files(".log") == paths[:2]


def test_times_are_found_in_segments_that_were_never_synced(place: Place) -> None:
    log = many_segments(place, checkpoint=False)
    place.open().close(500)
    again = place.open()
    for segment in log.local_segments():
        offset = segment.next_offset - 5
        found = again.plan_offset_for_time(NOW_MS + offset // 5, 500).run()
        assert found == (offset, NOW_MS + offset // 5)


def many_segments(place: Place, *, checkpoint: bool = True) -> Log:
    place.config = SMALL
    log = place.open()
    for number in range(100):
        append(log, 5, epoch=number // 40, timestamp_ms=NOW_MS + number)
    if checkpoint:
        log.close(500)
        log = place.open()
    return log


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-8]),
        lambda path: path.write_bytes(b"RQIX\x02\x00" + path.read_bytes()[6:]),
        lambda path: path.write_bytes(path.read_bytes() + b"123456789012"),
        lambda path: path.write_bytes(path.read_bytes()[:8] + bytes(len(path.read_bytes()) - 8)),
        lambda path: path.write_bytes(path.read_bytes()[:-6] + b"\xff" * 6),
    ],
)
@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_or_damaged_index_is_made_again(
    place: Place, suffix: str, which: int, damage: Callable[[Path], None]
) -> None:
    good = many_segments(place)
    expected = read_bytes(good)
    times = [good.plan_offset_for_time(NOW_MS + n, 500).run() for n in range(110)]
    damage(place.files(suffix)[which])
    for _ in range(2):
        log = place.open()
        assert read_bytes(log) == expected
        for offset in range(0, 500, 17):
            assert log.plan_read(offset, 500, 1).run() == good.plan_read(offset, 500, 1).run()
        assert [log.plan_offset_for_time(NOW_MS + n, 500).run() for n in range(110)] == times


@pytest.mark.parametrize(
    "damage",
    [
        lambda entries: bytes((byte * 7 + 3) % 256 for byte in entries),
        # A little too far: inside of a batch.
        lambda entries: b"".join(
            struct.pack("<II", relative, position + 1)
            for relative, position in struct.iter_unpack("<II", entries)
        ),
        # At the batch of the entry after it.
        lambda entries: b"".join(
            struct.pack("<II", one[0], after[1])
            for one, after in pairwise(struct.iter_unpack("<II", entries + entries[-8:]))
        ),
    ],
)
def test_an_index_that_goes_wrong_while_the_log_is_open_costs_time_only(
    place: Place, damage: Callable[[bytes], bytes]
) -> None:
    log = many_segments(place)
    expected = read_bytes(log)
    for path in place.files(".index"):
        data = path.read_bytes()
        path.write_bytes(data[:8] + damage(data[8:]))
    for path in place.files(".timeindex"):
        data = path.read_bytes()
        path.write_bytes(data[:8] + bytes((byte * 7 + 3) % 256 for byte in data[8:]))
    assert read_bytes(log) == expected
    for offset in range(500):
        for bytes_max in (1, 1000):
            result = log.plan_read(offset, 500, bytes_max).run()
            assert read_header(result.data).base_offset <= offset < result.next_offset


def test_damage_below_the_recovery_point_is_refused_and_nothing_deleted(place: Place) -> None:
    many_segments(place)
    names = place.names()
    for path in place.files(".log"):
        good = path.read_bytes()
        for spoil in (good[:-1], good[:100], b"", good[:-30] + bytes(30)):
            path.write_bytes(spoil)
            with pytest.raises(StorageError, match=rf"{path}, position \d+"):
                place.open()
            assert place.names() == names
            assert path.read_bytes() == spoil
        path.write_bytes(good)
    assert place.open().end_offset == 500


def test_a_missing_segment_below_the_recovery_point_is_refused(place: Place) -> None:
    many_segments(place)
    for path in place.files(".log")[1:]:
        good = path.read_bytes()
        path.unlink()
        with pytest.raises(StorageError, match=str(place.path)):
            place.open()
        path.write_bytes(good)
    for path in place.files(".log"):
        path.unlink()
    with pytest.raises(StorageError, match=r"0\.log.* missing"):
        place.open()


def test_damage_in_the_unsynced_tail_costs_the_tail_only(place: Place) -> None:
    log = many_segments(place)
    append(log, 5, epoch=3)
    append(log, 5, epoch=3)
    path = place.files(".log")[-1]
    place.edit(path, lambda data: data.__setitem__(-1, data[-1] ^ 1))
    assert_holds(place.open(), 0, 505)


def test_a_missing_or_damaged_checkpoint_is_refused(place: Place) -> None:
    many_segments(place)
    path = place.path / "checkpoint"
    good = path.read_bytes()
    path.unlink()
    with pytest.raises(StorageError, match="checkpoint is missing"):
        place.open()
    for spoil in (b"", good[:-1], good.replace(b"recovery_point 500", b"recovery_point 400")):
        path.write_bytes(spoil)
        with pytest.raises(StorageError, match="checkpoint is damaged"):
            place.open()
    path.write_bytes(good)
    assert_holds(place.open(), 0, 500)


def test_a_first_segment_without_a_checkpoint_is_a_new_log_only_while_it_is_empty(
    place: Place,
) -> None:
    place.open()
    (place.path / "checkpoint").unlink()
    log = place.open()
    append(log, 5)
    flush(log, checkpoint=True)
    (place.path / "checkpoint").unlink()
    with pytest.raises(StorageError, match="checkpoint is missing"):
        place.open()


@pytest.mark.parametrize("name", ["checkpoint", "leader-epochs", ".snapshot"])
@pytest.mark.parametrize("version", [b"0", b"3"])
def test_another_format_is_refused(place: Place, name: str, version: bytes) -> None:
    many_segments(place)
    path = place.files(name)[0]
    kind, _, rest = path.read_bytes().split(b" ", 3)[1:]
    path.write_bytes(b"rayq %b %b %b" % (kind, version, rest))
    with pytest.raises(UnsupportedFormatError, match=str(path)):
        place.open()


def test_a_log_with_batches_of_a_newer_format_is_refused_and_left_alone(place: Place) -> None:
    log = place.open()
    append(log, 2)
    batch = make_batch(2)
    struct.pack_into("<QIIB", batch, 0, 2, len(batch), 0, 9)
    struct.pack_into("<I", batch, 25, google_crc32c.value(bytes(batch[:25])))
    path = place.files(".log")[0]
    data = path.read_bytes() + batch
    path.write_bytes(data)
    with pytest.raises(UnsupportedFormatError):
        place.open()
    assert path.read_bytes() == data


def test_lost_leader_epochs_are_read_from_the_log(place: Place) -> None:
    expected = many_segments(place).epochs.entries()
    (place.path / "leader-epochs").unlink()
    assert place.open().epochs.entries() == expected
    (place.path / "leader-epochs").write_bytes(b"rubbish")
    assert place.open().epochs.entries() == expected


# --- producers over a reopen ----------------------------------------------------------------------


def produce(log: Log, producers: int, batches: int) -> None:
    for number in range(batches):
        for producer in range(producers):
            append(log, 2, producer_id=producer, base_sequence=2 * number)


def assert_knows_duplicates(log: Log, producers: int, batches: int) -> None:
    for producer in range(producers):
        for number in range(batches):
            batch = make_batch(0, 2, producer_id=producer, base_sequence=2 * number)
            offset = 2 * (number * producers + producer)
            if number >= batches - 5:
                expected = DuplicateBatch(offset, offset + 1, NOW_MS)
                assert log.producers.check(read_header(batch)) == expected
        following = make_batch(0, 2, producer_id=producer, base_sequence=2 * batches)
        assert log.producers.check(read_header(following)) is None


@pytest.mark.parametrize("stop", ["close", "kill", "checkpoint, then kill", "old snapshot"])
def test_duplicates_are_remembered_over_a_reopen(place: Place, stop: str) -> None:
    place.config = SMALL
    log = place.open()
    produce(log, 3, 12)
    if stop == "close":
        log.close(0)
    elif stop == "checkpoint, then kill":
        flush(log, checkpoint=True)
        append(log, 1)
    elif stop == "old snapshot":
        flush(log, checkpoint=True)
        append(log, 1)
        flush(log, checkpoint=True)
        place.files(".snapshot")[-1].write_bytes(b"rubbish")
    assert_knows_duplicates(place.open(), 3, 12)


def test_without_any_snapshot_producers_are_read_from_the_log(place: Place) -> None:
    log = place.open()
    produce(log, 3, 12)
    log.close(0)
    for path in place.files(".snapshot"):
        path.unlink()
    assert_knows_duplicates(place.open(), 3, 12)


def test_only_the_newest_snapshots_are_kept(place: Place) -> None:
    log = place.open()
    for _ in range(10):
        append(log)
        flush(log, checkpoint=True)
    assert [int(path.name[:20]) for path in place.files(".snapshot")] == [8, 9, 10]


def test_a_snapshot_that_no_checkpoint_covers_does_not_count(place: Place) -> None:
    log = place.open()
    produce(log, 1, 3)
    flush(log, checkpoint=True)
    (place.path / f"{100:020d}.snapshot").write_bytes(b"rubbish")
    assert_knows_duplicates(place.open(), 1, 3)
    assert [int(path.name[:20]) for path in place.files(".snapshot")] == [6]


# --- what a start costs ---------------------------------------------------------------------------


def test_a_start_reads_the_unsynced_tail_and_not_the_log(place: Place) -> None:
    place.checkpoint_bytes = 1 << 40

    def bytes_read_at_open() -> int:
        disk = CountingDisk()
        log = place.open(disk)
        assert log.end_offset > 0
        return disk.bytes_read

    log = place.open()
    for _ in range(64):
        append(log, 10, size=6400)
    log.close(0)
    small = bytes_read_at_open()
    log = place.open()
    for _ in range(640):
        append(log, 10, size=6400)
    log.close(0)
    assert log.size_bytes > 40 * MIB
    large = bytes_read_at_open()
    assert large < small + 64 * 1024 < 256 * 1024
    log = place.open()
    for _ in range(32):
        append(log, 10, size=6400)
    tail = 32 * 10 * 6400
    flush(log)
    # The tail is read once to check it, and once to write it again.
    assert tail < bytes_read_at_open() < 2 * tail + 512 * 1024
    assert bytes_read_at_open() < 256 * 1024, "the recovery has written a checkpoint"


def test_a_checkpoint_is_due_after_so_many_bytes_and_after_a_roll(place: Place) -> None:
    place.checkpoint_bytes = 1000
    log = place.open()
    append(log)
    plan = log.plan_flush(0)
    assert plan is not None
    assert plan.checkpoint is None
    append(log, 50)
    plan = log.plan_flush(0)
    assert plan is not None
    assert plan.checkpoint is not None
    plan.run()
    log.apply_flush(plan)
    append(log)
    plan = log.plan_flush(0)
    assert plan is not None
    assert plan.checkpoint is None


def test_many_segments_open_without_being_read(place: Place) -> None:
    place.config = TopicConfig(segment_bytes=64 * 1024)
    log = place.open()
    for number in range(1000):
        append(log, 10, size=640)
        if number % 100 == 99:
            flush(log)
    segments = len(place.files(".log"))
    assert segments > 90
    log.close(0)
    disk = CountingDisk()
    place.open(disk)
    assert disk.bytes_read < segments * 20_000 < log.size_bytes / 3


def test_a_crash_right_after_a_roll_does_not_cost_the_closed_segment(place: Place) -> None:
    place.config = TopicConfig(segment_bytes=1 * MIB)
    log = place.open()
    while len(place.files(".log")) == 1:
        flush(log, checkpoint=True)
        append(log, 10, size=6400)
    disk = CountingDisk()
    log = place.open(disk)
    assert disk.bytes_read < 300_000
    disk.bytes_read = 0
    assert_end = log.end_offset
    assert log.plan_offset_for_time(NOW_MS, assert_end).run() == (0, NOW_MS)

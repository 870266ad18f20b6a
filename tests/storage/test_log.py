"""Appending to a log and reading it back."""

from __future__ import annotations

import gc
import os

import msgspec
import pytest

from rayq.config import TopicConfig
from rayq.errors import (
    CorruptBatchError,
    InvalidRecordError,
    OffsetOutOfRangeError,
    StorageError,
)
from rayq.storage import segment_list
from rayq.storage.batch import encode_batch, read_header, split_batches, stamp
from rayq.storage.log import Log
from rayq.storage.plans import ExactRead, IndexedRead
from tests.storage.support import (
    NOW_MS,
    CountingDisk,
    Place,
    append,
    assert_holds,
    flush,
    learn,
    make_batch,
    read_bytes,
    value_of,
    values_in,
)

SMALL = TopicConfig(segment_bytes=4096, index_interval_bytes=300)


def test_a_new_log_is_empty_and_durable(place: Place) -> None:
    log = place.open()
    assert (log.start_offset, log.end_offset, log.flushed_offset, log.size_bytes) == (0, 0, 0, 0)
    assert (log.last_epoch, log.last_append_time_ms, log.persisted_high_watermark) == (
        None,
        None,
        0,
    )
    assert log.plan_flush(0) is None
    assert log.plan_read(0, 0, 100).run().data == b""


def test_the_leader_stamps_what_it_appends(place: Place) -> None:
    log = place.open()
    append(log, 3, epoch=4)
    header = append(log, 2, epoch=5, now_ms=NOW_MS + 7)
    assert (header.base_offset, header.leader_epoch, header.append_time_ms) == (3, 5, NOW_MS + 7)
    assert (log.end_offset, log.last_epoch, log.last_append_time_ms) == (5, 5, NOW_MS + 7)
    assert log.epochs.entries() == [(4, 0), (5, 3)]
    assert_holds(log, 0, 5)


def test_append_time_never_goes_back(place: Place) -> None:
    log = place.open()
    append(log, now_ms=NOW_MS + 50)
    assert append(log, now_ms=NOW_MS).append_time_ms == NOW_MS + 50


def test_the_leader_refuses_a_batch_with_holes(place: Place) -> None:
    log = place.open()
    append(log, 2)
    batch = make_batch(0, 2)
    header = read_header(batch)
    with pytest.raises(InvalidRecordError):
        log.append_as_leader(
            batch,
            msgspec.structs.replace(header, last_offset_delta=9),
            leader_epoch=0,
            now_ms=NOW_MS,
        )
    assert_holds(log, 0, 2)


def test_flushing_moves_the_flushed_offset_to_what_the_plan_saw(place: Place) -> None:
    log = place.open()
    append(log)
    plan = log.plan_flush(0)
    assert plan is not None
    append(log)
    assert log.flushed_offset == 0
    plan.run()
    assert log.apply_flush(plan)
    assert (log.flushed_offset, log.end_offset) == (1, 2)
    flush(log)
    assert log.flushed_offset == 2
    assert log.plan_flush(0) is None


def test_under_flush_os_what_is_appended_counts_as_flushed(place: Place) -> None:
    place.config = TopicConfig(flush="os")
    log = place.open()
    append(log)
    assert log.flushed_offset == 1
    assert log.plan_flush(0) is None
    assert log.plan_flush(0, checkpoint=True) is not None
    log.config = TopicConfig(flush="disk")
    append(log)
    assert log.flushed_offset == 1


def test_an_outdated_flush_plan_is_not_applied(place: Place) -> None:
    log = place.open()
    append(log)
    append(log)
    plan = log.plan_flush(0)
    assert plan is not None
    plan.run()
    log.truncate(1)
    assert not log.apply_flush(plan)
    assert (log.flushed_offset, log.end_offset) == (1, 1)


def test_segments_roll_by_size_and_one_flush_syncs_all_of_them(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    for _ in range(60):
        append(log, 5)
    assert len(place.files(".log")) >= 3

    assert all(file.stat().st_size <= 4096 for file in place.files(".log"))
    assert log.size_bytes == sum(file.stat().st_size for file in place.files(".log"))
    flush(log, high_watermark=250)
    assert (log.flushed_offset, log.persisted_high_watermark) == (300, 250)
    assert_holds(log, 0, 300)
    assert_holds(place.open(), 0, 300)


def test_a_segment_rolls_when_its_first_append_is_too_old(place: Place) -> None:
    place.config = TopicConfig(segment_ms=1000)
    log = place.open()
    append(log, now_ms=NOW_MS)
    append(log, now_ms=NOW_MS + 999)
    assert len(place.files(".log")) == 1
    append(log, now_ms=NOW_MS + 1000)
    assert [file.name[:20] for file in place.files(".log")] == [f"{0:020d}", f"{2:020d}"]
    assert_holds(log, 0, 3)


def test_a_batch_larger_than_a_segment_gets_one_of_its_own(place: Place) -> None:
    place.config = TopicConfig(segment_bytes=1024)
    log = place.open()
    for size in (10, 5000, 10):
        append(log, size=size)
    assert len(place.files(".log")) == 3
    assert len(values_in(read_bytes(log))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("reopened", [False, True])
def test_every_read_gives_whole_batches_from_the_one_that_holds_the_offset(
    place: Place, reopened: bool
) -> None:
    place.config = SMALL
    log = place.open()
    sizes = [1, 3, 2, 7, 1, 1, 30, 2] * 12
    edges = [0]
    for count in sizes:
        append(log, count)
        edges.append(log.end_offset)
    if reopened:
        log.close(0)
        log = place.open()
    everything = read_bytes(log)
    starts = {header.base_offset: position for position, header in split_batches(everything)}
    starts[log.end_offset] = len(everything)
    for offset in range(log.end_offset):
        for bytes_max in (1, 500, 1500, 1 << 20):
            for limit in (edge for edge in (*edges[-3:], edges[len(edges) // 2]) if edge > offset):
                plan = log.plan_read(offset, limit, bytes_max)
                result = plan.run()
                assert plan.run_cached() in (result, None)
                first = max(edge for edge in edges if edge <= offset)
                assert first < result.next_offset <= limit
                assert result.data == everything[starts[first] : starts[result.next_offset]]
                if len(result.data) > bytes_max:
                    assert len(list(split_batches(result.data))) == 1


def test_tail_reads_need_no_index_and_long_ones_fill_what_was_asked_for(place: Place) -> None:
    log = place.open()
    for _ in range(100):
        append(log, 10)
    plan = log.plan_read(500, log.end_offset, 3000)
    assert isinstance(plan, ExactRead)
    assert 2500 < len(plan.run().data) <= 3000
    assert plan.run_cached() == plan.run()
    log.close(0)
    cold = place.open().plan_read(500, 1000, 3000)
    assert isinstance(cold, IndexedRead)
    assert len(cold.run().data) > 0


@pytest.mark.parametrize("bytes_max", [20_000, 1 << 30])
def test_a_read_of_many_small_batches_looks_at_few_of_them(place: Place, bytes_max: int) -> None:
    """This holds also for batches that no checkpoint has brought to the index file, and for a limit
    below the end."""
    disk = place.disk = CountingDisk()
    log = place.open()
    for _ in range(3 * segment_list.RECENT_BATCHES):
        append(log, 1, size=10)
    before = disk.bytes_read
    plan = log.plan_read(100, log.end_offset - 10, bytes_max)
    assert isinstance(plan, IndexedRead)
    result = plan.run()
    assert len(result.data) > min(bytes_max - 10_000, log.size_bytes // 2)
    assert disk.bytes_read - before < 1.2 * len(result.data) + 10_000
    for offset in (50, 500):
        (first, *_) = split_batches(log.plan_read(offset, log.end_offset, 1).run().data)
        assert first[1].base_offset == offset


def test_much_is_not_copied_on_the_loop(place: Place) -> None:
    log = place.open()
    for _ in range(40):
        append(log, 1, size=100_000)
    log.close(0)
    plan = place.open().plan_read(0, 40, 1 << 30)
    assert plan.run_cached() is None
    assert len(plan.run().data) > 4_000_000


def test_a_read_at_the_limit_has_nothing_and_one_outside_the_log_is_refused(place: Place) -> None:
    log = place.open()
    append(log, 10)
    append(log, 10)
    result = log.plan_read(10, 10, 1000).run()
    assert (result.data, result.next_offset) == (b"", 10)
    assert log.plan_read(20, 20, 1000).run_cached() == (b"", 20)
    with pytest.raises(OffsetOutOfRangeError):
        log.plan_read(21, 20, 1000)
    log.advance_start(5)
    with pytest.raises(OffsetOutOfRangeError):
        log.plan_read(4, 20, 1000)


def test_the_remembered_tail_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_list, "RECENT_BATCHES", 8)
    log = place.open()
    for _ in range(100):
        append(log)
    assert isinstance(log.plan_read(99, 100, 10), ExactRead)
    assert isinstance(log.plan_read(50, 100, 10), IndexedRead)
    assert_holds(log, 0, 100)


def test_only_so_many_segment_files_stay_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_list, "OPEN_SEGMENTS_MAX", 3)
    place.config = SMALL

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    log = place.open()
    for _ in range(200):
        append(log, 5)
    assert len(place.files(".log")) > 9
    flush(log)
    assert_holds(log, 0, 1000)
    assert descriptors() - before <= 3 * (3 + 1)
    log.close(0)
    del log
    assert descriptors() == before


def test_a_read_planned_before_its_segment_was_deleted_still_runs(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    for _ in range(60):
        append(log, 5)
    flush(log)
    plan = log.plan_read(0, 300, 1000)
    expected = plan.run()
    Log.remove_files(place.disk, log.advance_start(200))
    assert not (place.path / f"{0:020d}.log").exists()
    assert plan.run() == expected


# --- followers ----------------------------------------------------------------------------------


def leader_bytes(place: Place, counts: list[int], *, epoch: int = 0, start: int = 0) -> bytearray:
    """The bytes of batches as a leader stamped them."""
    data = bytearray()
    for count in counts:
        batch = make_batch(start, count)
        stamp(batch, 0, base_offset=start, leader_epoch=epoch, append_time_ms=NOW_MS)
        data += batch
        start += count
    return data


def test_a_follower_holds_the_leaders_bytes(place: Place) -> None:
    log = place.open()
    payload = leader_bytes(place, [3, 2, 5], epoch=2)
    assert log.append_as_follower(payload) == 10
    assert log.append_as_follower(memoryview(leader_bytes(place, [1], epoch=3, start=10))) == 11
    assert log.append_as_follower(b"") == 11
    assert read_bytes(log)[: len(payload)] == payload
    assert log.epochs.entries() == [(2, 0), (3, 10)]
    assert_holds(place.open(), 0, 11)


def test_a_follower_rolls_in_the_midst_of_what_it_was_sent(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    payload = leader_bytes(place, [5] * 100)
    assert log.append_as_follower(payload) == 500
    assert len(place.files(".log")) >= 3

    assert read_bytes(log) == payload


@pytest.mark.parametrize("damage", ["body", "header", "cut", "gap", "overlap", "epoch"])
def test_a_follower_appends_nothing_of_what_has_a_fault(place: Place, damage: str) -> None:
    log = place.open()
    log.append_as_follower(leader_bytes(place, [2], epoch=5))
    payload = leader_bytes(place, [3], epoch=5, start=2)
    if damage == "body":
        payload += leader_bytes(place, [3], epoch=5, start=5)
        payload[-1] ^= 1
    elif damage == "header":
        payload[9] ^= 1
    elif damage == "cut":
        payload.pop()
    elif damage == "gap":
        payload += leader_bytes(place, [3], epoch=5, start=6)
    elif damage == "overlap":
        payload = leader_bytes(place, [3], epoch=5, start=1)
    else:
        payload += leader_bytes(place, [3], epoch=4, start=5)
    with pytest.raises(CorruptBatchError):
        log.append_as_follower(payload)
    assert_holds(log, 0, 2)
    assert log.failure is None


def test_gaps_are_legal_below_the_leaders_cleaned_offset_only(place: Place) -> None:
    log = place.open()
    payload = leader_bytes(place, [2], start=0) + leader_bytes(place, [2], start=10)
    learn(log, 9)
    with pytest.raises(CorruptBatchError):
        log.append_as_follower(payload)
    learn(log, 10)
    assert log.append_as_follower(payload) == 12
    for one in (log, place.open()):
        assert one.end_offset == 12
        assert read_bytes(one) == payload
        assert one.plan_read(5, 12, 1).run().next_offset > 5


# --- times --------------------------------------------------------------------------------------


def test_an_offset_is_found_by_time(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    times = [1000 + (number * 7919) % 500 + number * 3 for number in range(300)]
    for number in range(100):
        three = times[3 * number : 3 * number + 3]
        batch = encode_batch([b"x"] * 3, timestamps_ms=three)
        log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=NOW_MS)
    for start in (0, 100, 299):
        for one in (log, place.open()):
            one.advance_start(start)
            for wanted in range(900, 2500, 13):
                offset = next((n for n in range(start, 300) if times[n] >= wanted), None)
                expected = None if offset is None else (offset, times[offset])
                assert one.plan_offset_for_time(wanted, 300).run() == expected
                if offset is not None:
                    assert one.plan_offset_for_time(wanted, offset).run() is None


def test_by_append_time_where_the_topic_says_so(place: Place) -> None:
    place.config = TopicConfig(message_timestamp_type="append")
    log = place.open()
    append(log, 2, now_ms=NOW_MS + 5, timestamp_ms=3)
    append(log, 2, now_ms=NOW_MS + 9, timestamp_ms=1)
    assert log.plan_offset_for_time(0, 4).run() == (0, NOW_MS + 5)
    assert log.plan_offset_for_time(NOW_MS + 6, 4).run() == (2, NOW_MS + 9)


def test_reading_a_large_log_by_offset_costs_little(place: Place) -> None:
    log = place.open()
    for _ in range(400):
        append(log, 50)
    log.close(0)
    disk = CountingDisk()
    log = place.open(disk)
    disk.bytes_read = 0
    result = log.plan_read(9999, 20_000, 4000).run()
    assert values_in(result.data)[49] == value_of(9999)
    assert disk.bytes_read < 40_000


# --- checking -----------------------------------------------------------------------------------


def test_a_range_is_verified_from_disk(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    for _ in range(60):
        append(log, 5)
    flush(log)
    for offset in range(0, 300, 7):
        log.plan_verify(offset).run()
    with pytest.raises(OffsetOutOfRangeError):
        log.plan_verify(10_000)
    path = place.files(".log")[1]
    place.edit(path, lambda data: data.__setitem__(200, data[200] ^ 1))
    base = int(path.name[:20])
    for offset in (base, base + 5):  # Its own batch, and the one before it.
        with pytest.raises(StorageError, match=f"{path}, position 189"):
            log.plan_verify(offset).run()
    assert log.end_offset == 300


def test_a_closed_log_refuses_everything(place: Place) -> None:
    log = place.open()
    append(log)
    log.close(1)
    log.close(1)
    for use in (
        lambda: append(log),
        lambda: log.plan_flush(0),
        lambda: log.plan_read(0, 1, 1),
        lambda: log.truncate(0),
        lambda: log.advance_start(1),
    ):
        with pytest.raises(StorageError, match="closed"):
            use()
    assert place.open().persisted_high_watermark == 1

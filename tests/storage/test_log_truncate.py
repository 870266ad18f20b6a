"""The end of a log moves back, or the whole log goes; the start moves on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayq.config import TopicConfig
from rayq.errors import StorageError
from rayq.storage.batch import read_header, stamp
from rayq.storage.log import Log
from rayq.storage.producer_state import DuplicateBatch
from tests.storage.support import (
    NOW_MS,
    Place,
    append,
    assert_holds,
    flush,
    make_batch,
    read_bytes,
    value_of,
    values_in,
)

SMALL = TopicConfig(segment_bytes=4096, index_interval_bytes=300)


def filled(place: Place, *, checkpoint: bool) -> Log:
    place.config = SMALL
    log = place.open()
    for number in range(100):
        append(
            log,
            5,
            epoch=number // 10,
            timestamp_ms=NOW_MS + number,
            now_ms=NOW_MS + number,
            producer_id=number % 3,
            base_sequence=5 * (number // 3),
        )
        if number in (30, 60):
            flush(log, checkpoint=checkpoint, high_watermark=5 * number)
    flush(log, checkpoint=checkpoint, high_watermark=500)
    return log


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("offset", [499, 497, 495, 494, 333, 211, 210, 100, 5, 4, 1, 0])
def test_truncation_drops_every_batch_that_contains_or_follows_the_offset(
    place: Place, offset: int, checkpoint: bool
) -> None:
    log = filled(place, checkpoint=checkpoint)
    end = offset // 5 * 5
    generation = log.generation
    log.truncate(offset)
    assert log.generation > generation
    for one in (log, place.open()):
        assert_holds(one, 0, end)
        assert one.flushed_offset == end
        assert one.persisted_high_watermark <= end
        assert one.epochs.entries() == [(n, 50 * n) for n in range(10) if 50 * n < end]
        assert one.last_epoch == ((end - 1) // 50 if end else None)
        assert (
            one.last_append_time_ms is None
            or end == 0
            or (one.last_append_time_ms >= NOW_MS + end // 5 - 1)
        )
        batches = end // 5
        for number in range(max(0, batches - 12), batches):
            batch = make_batch(0, 5, producer_id=number % 3, base_sequence=5 * (number // 3))
            time_ms = NOW_MS + number
            assert one.producers.check(read_header(batch)) == DuplicateBatch(
                5 * number, 5 * number + 4, time_ms
            )
        assert len(one.producers) == min(3, batches)
        for ago in range(0, end, 7):
            assert one.plan_read(ago, end, 1).run().next_offset > ago
        found = one.plan_offset_for_time(NOW_MS + 50, end).run()
        assert found == ((250, NOW_MS + 50) if end > 250 else None)
    log = place.open()
    for number in range(40):
        append(log, 5, epoch=20, timestamp_ms=NOW_MS + 200 + number, now_ms=NOW_MS + 200)
    flush(log, checkpoint=True)
    again = place.open()
    assert_holds(again, 0, end + 200)
    assert again.epochs.start_of(20) == end
    assert again.last_epoch == 20
    assert again.size_bytes == sum(path.stat().st_size for path in place.files(".log"))


def test_what_follows_a_truncation_is_read_from_where_it_lies(place: Place) -> None:
    log = place.open()
    for _ in range(8):
        append(log, 5, size=20)
    log.truncate(10)
    append(log, 5, size=100)
    append(log, 5, size=100)
    for first in (10, 15):
        assert values_in(log.plan_read(first, 20, 1).run().data)[0] == value_of(first, 100)


def test_truncating_at_or_past_the_end_changes_nothing(place: Place) -> None:
    log = place.open()
    append(log, 5)
    log.truncate(5)
    log.truncate(9)
    assert log.generation == 0
    assert_holds(log, 0, 5)


def test_truncation_lowers_the_checkpoint_before_it_cuts(place: Place) -> None:
    log = filled(place, checkpoint=True)
    log.truncate(200)
    content = (place.path / "checkpoint").read_bytes()
    assert b"recovery_point 200\n" in content
    assert b"high_watermark 200\n" in content
    assert all(int(path.name[:20]) <= 200 for path in place.files(".snapshot"))


def test_truncation_below_the_log_start_restarts_the_log_there(place: Place) -> None:
    log = filled(place, checkpoint=True)
    Log.remove_files(place.disk, log.advance_start(400))
    first = int(place.files(".log")[0].name[:20])
    assert first > 0
    log.truncate(first - 10)
    for one in (log, place.open()):
        assert (one.start_offset, one.end_offset, one.size_bytes) == (first - 10, first - 10, 0)
        assert one.last_epoch == (first - 11) // 50
    append(log, 5, epoch=11)
    assert_holds(place.open(), first - 10, first - 5)


# --- reset ----------------------------------------------------------------------------------------


def test_a_reset_log_begins_where_it_is_told_with_the_leaders_state(
    place: Place, tmp_path: Path
) -> None:
    leader = filled(Place(tmp_path / "leader-0"), checkpoint=False)
    log = place.open()
    append(log, 10)
    log.reset(500, leader.epochs.entries(), leader.producers.snapshot())
    for one in (log, place.open()):
        assert (one.start_offset, one.end_offset, one.flushed_offset) == (500, 500, 500)
        assert one.persisted_high_watermark == 500
        assert one.last_epoch == 9
        assert one.epochs.entries() == leader.epochs.entries()
        last = make_batch(0, 5, producer_id=0, base_sequence=5 * 33)
        assert one.producers.check(read_header(last)) == DuplicateBatch(495, 499, NOW_MS + 99)
    append(log, 5, epoch=12)
    assert_holds(place.open(), 500, 505)


def test_a_reset_leaves_the_files_of_its_new_segment_on_disk(place: Place) -> None:
    # The names of the files are synced with the reset: the flush of a first record does not do
    # that.
    log = place.open()
    append(log, 10)
    log.reset(500, [(3, 0)], b"")
    assert [path.name for path in sorted(place.path.glob("0*"))] == [
        f"{500:020d}{suffix}" for suffix in (".index", ".log", ".timeindex")
    ]


def test_a_reset_with_a_damaged_snapshot_changes_nothing(place: Place) -> None:
    log = place.open()
    append(log, 10)
    with pytest.raises(StorageError):
        log.reset(500, [], b"rubbish")
    assert_holds(log, 0, 10)
    assert log.failure is None
    log.reset(500, [], b"")
    assert_holds(log, 500, 500)


def test_a_reset_log_takes_the_leaders_batch_that_its_start_lies_in(place: Place) -> None:
    log = place.open()
    append(log, 10)
    log.reset(503, [(4, 480)], b"")
    payload = make_batch(500, 10)
    stamp(payload, 0, base_offset=500, leader_epoch=5, append_time_ms=NOW_MS)
    assert log.append_as_follower(payload) == 510
    for one in (log, place.open()):
        assert (one.start_offset, one.end_offset, one.last_epoch) == (503, 510, 5)
        result = one.plan_read(503, 510, 1).run()
        assert (result.data, result.next_offset) == (payload, 510)


def test_a_torn_first_batch_leaves_a_reset_log_at_its_start(place: Place) -> None:
    log = place.open()
    log.reset(503, [(4, 480)], b"")
    payload = make_batch(500, 10)
    stamp(payload, 0, base_offset=500, leader_epoch=5, append_time_ms=NOW_MS)
    log.append_as_follower(payload)
    place.edit(place.files(".log")[0], lambda data: data.pop())
    again = place.open()
    assert (again.start_offset, again.end_offset, again.last_epoch) == (503, 503, 4)
    assert again.append_as_follower(payload) == 510


# --- retention ------------------------------------------------------------------------------------


def test_retention_goes_by_append_time_not_by_record_time(place: Place) -> None:
    place.config = TopicConfig(segment_bytes=2048, retention_ms=1000)
    log = place.open()
    for number in range(100):
        append(log, 5, timestamp_ms=1, now_ms=NOW_MS + 100 * number)
    end = log.end_offset
    assert log.retention_start(NOW_MS, end) == 0
    start = log.retention_start(NOW_MS + 5000, end)
    closed = [int(path.name[:20]) for path in place.files(".log")]
    assert start in closed
    newest_append_below = NOW_MS + 100 * (start // 5 - 1)
    assert NOW_MS + 5000 - newest_append_below > 1000
    following = closed[closed.index(start) + 1]
    assert NOW_MS + 5000 - (NOW_MS + 100 * (following // 5 - 1)) <= 1000
    assert log.retention_start(10 * NOW_MS, end) == closed[-1], "the active segment stays"
    assert place.open().retention_start(NOW_MS + 5000, end) == start
    log.config = TopicConfig(segment_bytes=2048, retention_ms=None)
    assert log.retention_start(10 * NOW_MS, end) == 0


def test_retention_by_size_keeps_the_newest(place: Place) -> None:
    place.config = TopicConfig(segment_bytes=2048, retention_ms=None, retention_bytes=6000)
    log = place.open()
    for _ in range(100):
        append(log, 5)
    flush(log)
    Log.remove_files(place.disk, log.advance_start(log.retention_start(NOW_MS, log.end_offset)))
    assert 3000 < log.size_bytes <= 6000
    assert log.size_bytes == sum(path.stat().st_size for path in place.files(".log"))
    assert log.retention_start(NOW_MS, log.end_offset) == log.start_offset


def test_retention_stops_at_the_high_watermark(place: Place) -> None:
    place.config = TopicConfig(segment_bytes=2048, retention_ms=0)
    log = place.open()
    for _ in range(100):
        append(log, 5)
    assert log.retention_start(NOW_MS + 5, 120) <= 120
    assert log.retention_start(NOW_MS + 5, 0) == 0


def test_the_log_start_moves_to_any_offset_and_never_back(place: Place) -> None:
    log = filled(place, checkpoint=False)
    flush(log)
    log.advance_start(123)
    assert log.start_offset == 123
    log.advance_start(50)
    assert log.start_offset == 123
    assert values_in(read_bytes(log)) == [value_of(number) for number in range(120, 500)]
    log.advance_start(9999)
    assert log.start_offset == 500
    flush(log, checkpoint=True)
    again = place.open()
    assert (again.start_offset, again.end_offset, again.last_epoch) == (500, 500, 9)


def test_an_unsaved_log_start_is_kept_as_far_as_files_went(place: Place) -> None:
    log = filled(place, checkpoint=False)
    paths = log.advance_start(300)
    assert paths
    assert all(path.endswith(".deleted") for path in paths)
    kept = int(place.files(".log")[0].name[:20])
    for removed in range(len(paths) + 1):
        again = place.open()
        assert (again.start_offset, again.end_offset) == (kept, 500)
        if removed < len(paths):
            Log.remove_files(place.disk, paths[removed : removed + 1])
    assert not place.files(".deleted")


def test_renames_that_did_not_reach_the_disk_are_done_at_open(place: Place) -> None:
    log = filled(place, checkpoint=False)
    bases = [int(path.name[:20]) for path in place.files(".log")]
    log.advance_start(bases[3])
    first = place.path / f"{bases[0]:020d}.log"
    first.with_suffix(".log.deleted").rename(first)
    again = place.open()
    assert again.start_offset == bases[3]
    assert [int(path.name[:20]) for path in place.files(".log")] == bases[3:]


def test_segments_above_the_last_checkpoint_are_not_deleted_yet(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    for _ in range(100):
        append(log, 5)
    assert log.advance_start(400) == []
    assert log.start_offset == 400
    flush(log)
    assert log.advance_start(400) != []
    assert place.open().end_offset == 500

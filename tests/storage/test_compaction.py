"""Compaction of one log: which records stay and go, and what readers and restarts see of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayq.config import GIB, MIB, TopicConfig
from rayq.errors import (
    CorruptBatchError,
    DirectoryInUseError,
    DiskFullError,
    UnsupportedFormatError,
)
from rayq.records import Headers
from rayq.storage.batch import (
    BatchHeader,
    decode_columns,
    encode_batch,
    keep_records,
    read_header,
    split_batches,
)
from rayq.storage.batch import body as batch_body
from rayq.storage.clean_state import CleanState, Mark
from rayq.storage.cleaner import BYTES_PER_KEY, CLEANING, CleaningResult, clean, cleaner_turn
from rayq.storage.disk import LocalDisk
from rayq.storage.epochs import LEADER_EPOCHS
from rayq.storage.log import Log
from rayq.storage.segment import Segment
from rayq.storage.swap import is_due
from rayq.storage.verify import verify
from tests.storage.support import (
    NOW_MS,
    CountingDisk,
    FaultyDisk,
    Place,
    flush,
    learn,
    read_bytes,
)
from tests.wrong_batches import KEYED, WRONG_BODIES, moved, mutated_batches, sealed

SMALL = TopicConfig(
    cleanup_policy="compact",
    segment_bytes=1024,
    index_interval_bytes=200,
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=1000,
)
KeyValue = tuple[bytes | None, bytes | None]


@pytest.fixture
def compacted(place: Place) -> Place:
    place.config = SMALL
    return place


def write(
    log: Log,
    *records: KeyValue,
    epoch: int = 0,
    now_ms: int = NOW_MS,
    producer_id: int | None = None,
    base_sequence: int | None = None,
    headers: list[Headers | None] | None = None,
    timestamps_ms: int | list[int] = NOW_MS,
) -> BatchHeader:
    batch = encode_batch(
        [value for _, value in records],
        [key for key, _ in records],
        headers,
        timestamps_ms,
        producer_id=producer_id,
        base_sequence=base_sequence,
    )
    return log.append_as_leader(batch, read_header(batch), leader_epoch=epoch, now_ms=now_ms)


def commit(log: Log) -> None:
    """Makes all records durable and committed, with a checkpoint."""
    flush(log, checkpoint=True, high_watermark=log.end_offset)


def roll(log: Log) -> None:
    """Closes the active segment."""
    log.config = TopicConfig(
        **{**vars(SMALL), "max_compaction_lag_ms": 1},  # type: ignore[arg-type]
    )
    log.roll_to_clean(NOW_MS * 1000)
    log.config = SMALL
    commit(log)


def run_pass(log: Log, now_ms: int = NOW_MS, memory_bytes: int = MIB) -> CleaningResult | None:
    """Runs one pass, if one is due."""
    cleaning = log.plan_cleaning(now_ms, memory_bytes=memory_bytes, bytes_per_s=MIB)
    if cleaning is None:
        return None
    result = finish(clean(CountingDisk(), cleaning.job))
    plan = log.plan_swap(cleaning, result, now_ms)
    assert plan is not None
    log.apply_swap(plan, plan.prepare())
    plan.finish()
    return result


def finish(steps: object) -> CleaningResult:
    while True:
        try:
            next(steps)  # type: ignore[call-overload]
        except StopIteration as end:
            assert isinstance(end.value, CleaningResult)
            return end.value


def records_in(data: bytes) -> list[tuple[int, bytes | None, bytes | None]]:
    found = []
    for position, header in split_batches(data):
        columns = decode_columns(data, position, header)
        keys = columns.keys or [None] * len(columns.values)
        found += list(zip(columns.offsets, keys, columns.values, strict=True))
    return found


def records(log: Log, start: int | None = None, bytes_max: int = 300) -> list[
    tuple[int, bytes | None, bytes | None]
]:
    return records_in(read_bytes(log, start, bytes_max))


def replayed(found: Sequence[tuple[int, bytes | None, bytes | None]]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for _, key, value in found:
        if key is None:
            continue
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return state


def test_the_latest_record_of_each_key_stays_at_its_offset(compacted: Place) -> None:
    log = compacted.open()
    for number in range(40):
        write(log, *((b"k%d" % (number % 7), b"%d" % (10 * number + one)) for one in range(10)))
    roll(log)
    before = records(log)
    assert run_pass(log) is not None
    latest = {key: (offset, key, value) for offset, key, value in before}
    assert records(log) == sorted(latest.values())
    assert log.cleaned_offset == log.end_offset == 400
    assert records(compacted.open()) == sorted(latest.values())
    assert compacted.open().cleaned_offset == 400


def test_headers_and_timestamps_stay_with_their_records(compacted: Place) -> None:
    log = compacted.open()
    write(
        log,
        (b"a", b"1"),
        (b"b", b"2"),
        (b"a", b"3"),
        headers=[[("h", b"1")], None, [("h", b"3"), ("h", b"4")]],
        timestamps_ms=[30, 20, 10],
    )
    write(log, (b"b", b"4"), timestamps_ms=5)
    roll(log)
    run_pass(log)
    data = read_bytes(log)
    (position, header), *_ = split_batches(data)
    assert (header.base_offset, header.next_offset, header.record_count) == (0, 3, 1)
    columns = decode_columns(data, position, header)
    assert list(columns.offsets) == [2]
    assert columns.timestamps_ms == [10]
    assert columns.headers == [[("h", b"3"), ("h", b"4")]]
    assert log.plan_offset_for_time(6, 4).run() == (2, 10)
    assert log.plan_offset_for_time(5, 4).run() == (2, 10)
    assert log.plan_offset_for_time(11, 4).run() is None


def test_records_without_a_key_and_control_batches_stay(compacted: Place) -> None:
    log = compacted.open()
    write(log, (None, b"1"), (b"a", b"2"), (None, None))
    write(log, (b"a", b"3"))
    roll(log)
    run_pass(log)
    assert records(log) == [(0, None, b"1"), (2, None, None), (3, b"a", b"3")]


def test_chunks_from_before_the_topic_was_compacted_stay_and_manifests_are_superseded(
    compacted: Place,
) -> None:
    log = compacted.open()
    for key in (b"a", b"b", b"a"):
        for batch in (
            encode_batch([b"piece"], headers=[[("rayq.chunk", b"")]], is_chunk=True),
            encode_batch([b"manifest"], [key], is_large=True),
        ):
            log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=NOW_MS)
    roll(log)
    run_pass(log)
    assert [offset for offset, _, _ in records(log)] == [0, 2, 3, 4, 5]
    headers = [header for _, header in split_batches(read_bytes(log)) if header.record_count]
    assert [header.is_chunk for header in headers] == [True, True, False, True, False]
    assert [header.is_large for header in headers] == [False, False, True, False, True]


@pytest.mark.parametrize("what", WRONG_BODIES)
def test_a_batch_that_is_none_although_its_crcs_are_right_is_kept_as_it_is_and_told(
    compacted: Place, what: str
) -> None:
    log = compacted.open()
    write(log, (b"a", b"1"))
    wrong = moved(sealed({}, WRONG_BODIES[what]), 1)
    log.append_as_follower(wrong)
    unknown = moved(sealed({"attributes": 1 << 12}, KEYED), 2)
    log.append_as_follower(unknown)
    write(log, (b"a", b"2"))
    roll(log)
    result = run_pass(log)
    assert result is not None
    assert (result.unreadable_batches, result.unreadable_offset) == (2, 1)
    assert (result.records_read, result.records_kept) == (4, 3)
    data = read_bytes(log)
    (at, first), (_, second), (last, _) = split_batches(data)
    assert data[at:last] == wrong + unknown
    assert (first.base_offset, second.base_offset) == (1, 2)
    assert records_in(data[last:]) == [(3, b"a", b"2")]
    assert log.plan_offset_for_time(5, 4).run() == (1, 5), "by its header"


def test_a_batch_whose_offsets_find_no_room_in_it_is_kept_as_it_is(
    compacted: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compacted.open()
    write(log, (b"a", b"1"), (b"b", b"1"))
    write(log, (b"a", b"2"))
    roll(log)
    monkeypatch.setattr(batch_body, "PLAIN_BODY_BYTES_MAX", 5)
    assert run_pass(log) is not None
    monkeypatch.undo()
    assert replayed(records(log)) == {b"a": b"2", b"b": b"1"}


@settings(max_examples=30)
@given(st.lists(mutated_batches(), min_size=1, max_size=4))
def test_no_body_stops_a_pass_or_costs_a_readable_record(
    tmp_path_factory: pytest.TempPathFactory, mutated: list[bytes]
) -> None:
    place = Place(tmp_path_factory.mktemp("log"))
    place.config = SMALL
    log = place.open()
    write(log, (b"k", b"1"))
    for batch in mutated:
        moved_batch = moved(batch, log.end_offset)
        with contextlib.suppress(CorruptBatchError):  # Its header contradicts itself.
            log.append_as_follower(moved_batch)
        write(log, (b"k", b"2"))
    roll(log)
    readable_before = _readable(read_bytes(log))
    assert run_pass(log) is not None
    assert replayed(_readable(read_bytes(log))) == replayed(readable_before)


def _readable(data: bytes) -> list[tuple[int, bytes | None, bytes | None]]:
    found = []
    for position, header in split_batches(data):
        if header.is_control:
            continue
        with contextlib.suppress(CorruptBatchError, UnsupportedFormatError):
            found += records_in(data[position : position + header.length])
    return found


def test_what_comes_after_a_truncation_was_not_compacted_before_it(compacted: Place) -> None:
    log = compacted.open()
    for number in range(4):
        write(log, (b"%d" % number, b"1"))
    roll(log)
    assert run_pass(log) is not None
    log.truncate(1)
    write(log, (b"a", b"1"))
    write(log, (b"a", b"2"))
    roll(log)
    assert run_pass(log) is not None
    assert [key for _, key, _ in records_in(read_bytes(log))] == [b"0", b"a"]


def test_the_active_segment_and_what_is_not_committed_are_left_alone(compacted: Place) -> None:
    log = compacted.open()
    write(log, (b"a", b"1"))
    write(log, (b"a", b"2"))
    commit(log)
    assert run_pass(log) is None
    log.config = TopicConfig(**{**vars(SMALL), "max_compaction_lag_ms": 10})  # type: ignore[arg-type]
    assert not log.roll_to_clean(NOW_MS + 9)
    assert log.roll_to_clean(NOW_MS + 10)
    flush(log, checkpoint=True, high_watermark=1)
    assert run_pass(log) is None, "offset 1 is not committed"
    assert log.wants_checkpoint_to_clean(2)
    flush(log, checkpoint=True, high_watermark=2)
    assert not log.wants_checkpoint_to_clean(2)
    assert run_pass(log) is not None


def test_a_young_record_is_not_compacted_and_an_old_one_is_at_the_latest_by_the_lag(
    compacted: Place,
) -> None:
    log = compacted.open()
    write(log, (b"a", b"1"))
    roll(log)
    options = {**vars(SMALL), "min_cleanable_dirty_ratio": 0.5, "min_compaction_lag_ms": 100}
    log.config = TopicConfig(**options)  # type: ignore[arg-type]
    assert run_pass(log, NOW_MS + 100) is not None
    for number in range(20):
        write(log, (b"b%d" % number, b"x" * 50), now_ms=NOW_MS + 200)
    roll(log)
    log.config = TopicConfig(**options)  # type: ignore[arg-type]
    assert run_pass(log, NOW_MS + 250) is None
    assert run_pass(log, NOW_MS + 300) is not None
    write(log, (b"a", b"2"), now_ms=NOW_MS + 300)
    roll(log)
    options["max_compaction_lag_ms"] = 500
    log.config = TopicConfig(**options)  # type: ignore[arg-type]
    assert run_pass(log, NOW_MS + 799) is None, "little of it is dirty"
    assert run_pass(log, NOW_MS + 800) is not None


def test_a_tombstone_goes_delete_retention_after_the_pass_that_cleaned_it(
    compacted: Place,
) -> None:
    log = compacted.open()
    write(log, (b"a", b"1"), (b"b", b"1"))
    write(log, (b"a", None))
    roll(log)
    run_pass(log, NOW_MS)
    assert records(log) == [(1, b"b", b"1"), (2, b"a", None)]
    assert log.tombstone_horizon == 0
    assert run_pass(log, NOW_MS + 999) is None
    log = compacted.open()
    assert run_pass(log, NOW_MS + 1000) is not None, "nothing is dirty, but a tombstone is owed"
    assert records(log) == [(1, b"b", b"1")]
    assert log.tombstone_horizon == 3
    assert compacted.open().tombstone_horizon == 3
    assert run_pass(log, NOW_MS + 5000) is None


def test_without_tombstones_no_pass_is_due_for_them(compacted: Place) -> None:
    segments = [Segment(LocalDisk(), str(compacted.path), 0)]
    for tombstones in (0, 1):
        state = CleanState(clean_until=100, marks=(Mark(100, 0),), tombstones=tombstones)
        assert is_due(SMALL, segments, state, NOW_MS) == bool(tombstones)


def test_marks_that_are_close_together_become_one() -> None:
    state, removed = CleanState(), 0
    for number in range(1, 5000):
        removed = max(removed, state.removable_below(number, 1000))
        assert number - 1100 <= removed <= max(number - 1000, 0)
        state = state.after_pass(
            number,
            removed_below=removed,
            horizon=0,
            tombstones=1,
            now_ms=number,
            delete_retention_ms=1000,
        )
        assert len(state.marks) < 80
    assert state.cut(5).marks[-1] == Mark(5, state.marks[-1].time_ms)


def test_small_segments_become_one_and_big_ones_do_not(compacted: Place) -> None:
    log = compacted.open()
    for number in range(30):
        write(log, (b"a", b"%d" % number * 100))
        write(log, (b"b%d" % number, b"x"))
        roll(log)
    assert len(compacted.files(".log")) == 31
    run_pass(log)
    assert len(compacted.files(".log")) < 10
    write(log, (b"a", b"last"))
    roll(log)
    run_pass(log)
    names = compacted.files(".log")
    assert len(names) < 8
    assert all(path.stat().st_size <= 1024 for path in names)
    assert len(compacted.files(".index")) == len(names)
    assert log.size_bytes == sum(path.stat().st_size for path in names)
    assert len(records(log)) == 31
    assert read_bytes(compacted.open()) == read_bytes(log)


def test_a_full_map_means_several_passes(compacted: Place) -> None:
    log = compacted.open()
    for number in range(100):
        write(log, (b"k%d" % (number * 7 % 50), b"%d" % number), (b"one", b"%d" % number))
    roll(log)
    expected = replayed(records(log))
    reached = []
    while (result := run_pass(log, memory_bytes=20 * BYTES_PER_KEY)) is not None:
        assert result.keys <= 20
        assert replayed(records(log)) == expected
        reached.append(result.end_offset)
    assert len(reached) >= 3
    assert reached == sorted(set(reached))
    assert reached[-1] == 200
    found = records(log)
    assert len(found) == len(expected)


def test_a_batch_with_more_keys_than_the_map_takes_is_a_pass_of_its_own(compacted: Place) -> None:
    log = compacted.open()
    for _ in range(2):
        write(log, *((b"k%d" % number, b"v") for number in range(50)))
    roll(log)
    assert run_pass(log, memory_bytes=1).end_offset == 50  # type: ignore[union-attr]
    assert run_pass(log, memory_bytes=1).end_offset == 100  # type: ignore[union-attr]
    assert [offset for offset, _, _ in records(log)] == list(range(50, 100))


def test_producers_and_epochs_are_as_before_for_who_copies_the_log(
    compacted: Place, tmp_path: Path
) -> None:
    log = compacted.open()
    for number in range(60):
        write(
            log,
            (b"a", b"%d" % number),
            epoch=number // 7,
            producer_id=number % 3,
            base_sequence=number // 3,
        )
    roll(log)
    run_pass(log)
    run_pass(log, NOW_MS + 10_000)
    assert [record[0] for record in records(log)] == [59]
    copy = Place(tmp_path / "copy", config=SMALL).open()
    learn(copy, log.cleaned_offset)
    copy.append_as_follower(read_bytes(log))
    assert copy.end_offset == 60
    assert copy.epochs.entries() == log.epochs.entries() == [(n, 7 * n) for n in range(9)]
    assert copy.producers.snapshot() == log.producers.snapshot()
    for path in compacted.files(".snapshot"):
        path.unlink()
    (compacted.path / LEADER_EPOCHS).unlink()
    again = compacted.open()
    assert again.epochs.entries() == log.epochs.entries()
    assert again.producers.snapshot() == log.producers.snapshot()


def test_a_reader_gets_across_gaps_and_emptied_batches(compacted: Place, tmp_path: Path) -> None:
    log = compacted.open()
    for number in range(100):
        write(log, (b"a", b"%d" % number), (b"a", b"again"))
        if number == 50:
            roll(log)
    roll(log)
    run_pass(log)
    write(log, (b"b", b"tail"))
    copy = Place(tmp_path / "copy", config=SMALL).open()
    learn(copy, log.cleaned_offset)
    copy.append_as_follower(read_bytes(log))
    for one in (log, compacted.open(), copy):
        for offset in range(201):
            found = records(one, offset, 1)
            assert [record[0] for record in found if record[0] >= offset] == [
                wanted for wanted in (199, 200) if wanted >= offset
            ]
            one.plan_verify(offset).run()
            if offset < 150:
                found_below = split_batches(one.plan_read(offset, 150, 1).run().data)
                assert all(header.base_offset < 150 for _, header in found_below)
        assert one.plan_offset_for_time(0, 201).run() == (199, NOW_MS)
    for path in compacted.files(".index") + compacted.files(".timeindex"):
        path.unlink()
    assert records(compacted.open()) == records(log)


def test_a_running_read_goes_on_with_the_segments_of_before(compacted: Place) -> None:
    log = compacted.open()
    for number in range(50):
        write(log, (b"a", b"%d" % number))
    roll(log)
    plan = log.plan_read(0, 50, 1000)
    expected = plan.run()
    run_pass(log)
    assert plan.run() == expected


@pytest.mark.parametrize("change", ["truncate", "reset", "start"])
def test_a_result_about_another_log_is_dropped(compacted: Place, change: str) -> None:
    log = compacted.open()
    for number in range(50):
        write(log, (b"a", b"%d" % number * 20))
    roll(log)
    cleaning = log.plan_cleaning(NOW_MS, memory_bytes=MIB, bytes_per_s=MIB)
    assert cleaning is not None
    result = finish(clean(CountingDisk(), cleaning.job))
    if change == "truncate":
        log.truncate(45)
    elif change == "reset":
        log.reset(0, [], b"")
    else:
        Log.remove_files(LocalDisk(), log.advance_start(25))
        commit(log)
    before = read_bytes(log)
    assert log.plan_swap(cleaning, result, NOW_MS) is None
    assert not log.is_current(cleaning)
    assert read_bytes(compacted.open()) == before


def test_delete_records_in_a_gap_and_below_it(compacted: Place) -> None:
    log = compacted.open()
    for number in range(60):
        write(log, (b"k%d" % (number % 20), b"x" * 30))
    roll(log)
    run_pass(log)
    log.advance_start(10)
    assert [record[0] for record in records(log, 10)] == list(range(40, 60))
    log.advance_start(45)
    commit(log)
    assert [record[0] for record in records(compacted.open()) if record[0] >= 45] == list(
        range(45, 60)
    )


def test_compact_alone_keeps_what_retention_would_delete(compacted: Place) -> None:
    log = compacted.open()
    for number in range(60):
        write(log, (b"k%d" % number, b"x" * 30))
    roll(log)
    much_later_ms = NOW_MS + 100 * 86_400_000
    assert log.retention_start(much_later_ms, 60) == 0
    log.config = TopicConfig(**{**vars(SMALL), "cleanup_policy": "compact,delete"})  # type: ignore[arg-type]
    assert log.retention_start(much_later_ms, 60) == 60


def test_retention_deletes_old_keys_of_a_compacted_log_that_goes_on_growing(
    compacted: Place,
) -> None:
    """Each pass merges old records with new ones: the result must not count as new forever."""
    retention_ms, step_ms = 1000, 100
    compacted.config = TopicConfig(
        **{  # type: ignore[arg-type]
            **vars(SMALL),
            "cleanup_policy": "compact,delete",
            "retention_ms": retention_ms,
            "max_compaction_lag_ms": 1,
        }
    )
    log = compacted.open()
    write(log, *((b"old-%d" % number, b"x") for number in range(10)))
    for now_ms in range(NOW_MS, NOW_MS + 2 * retention_ms + 3 * step_ms, step_ms):
        write(log, (b"new", b"%d" % now_ms), now_ms=now_ms)
        log.roll_to_clean(now_ms + 1)
        commit(log)
        run_pass(log, now_ms)
        log.advance_start(log.retention_start(now_ms, log.end_offset))
    assert {key for _, key, _ in records(log)} == {b"new"}


def test_a_gap_above_the_cleaned_offset_is_cut_and_told_by_verify(
    compacted: Place, tmp_path: Path
) -> None:
    log = compacted.open()
    for number in range(60):
        write(log, (b"a", b"%d" % number))
    roll(log)
    run_pass(log)
    data = read_bytes(log)
    copied = Place(tmp_path / "copy", config=SMALL)
    copy = copied.open()
    with pytest.raises(CorruptBatchError):
        copy.append_as_follower(data)
    learn(copy, log.cleaned_offset)
    copy.append_as_follower(data)
    assert copied.open().end_offset == 60
    assert all(report.is_sound for report in verify(LocalDisk(), str(compacted.path)))
    (compacted.path / "cleaned").unlink()
    (report,) = verify(LocalDisk(), str(compacted.path))
    assert "are missing" in report.damage[0]


def test_one_log_of_a_disk_is_cleaned_at_a_time_and_only_with_room(
    compacted: Place,
) -> None:
    log = compacted.open()
    for number in range(60):
        write(log, (b"a", b"%d" % number))
    roll(log)
    disk = LocalDisk()
    with cleaner_turn(disk, log.directory):
        with pytest.raises(DirectoryInUseError):
            with cleaner_turn(disk, log.directory):
                pass
    with cleaner_turn(disk, log.directory):
        pass
    cleaning = log.plan_cleaning(NOW_MS, memory_bytes=MIB, bytes_per_s=MIB)
    assert cleaning is not None
    full = FaultyDisk()
    full.free = 64 * MIB
    with pytest.raises(DiskFullError):
        finish(clean(full, cleaning.job))
    assert run_pass(log) is not None


def test_a_pass_that_runs_out_of_room_leaves_nothing_behind(compacted: Place) -> None:
    log = compacted.open()
    for number in range(60):
        write(log, (b"a", b"%d" % number * 40), (b"unique %d" % number, b"x" * 50))
    roll(log)
    cleaning = log.plan_cleaning(NOW_MS, memory_bytes=MIB, bytes_per_s=MIB)
    assert cleaning is not None and len(cleaning.job.groups) > 3

    class FillingDisk(FaultyDisk):
        def free_bytes(self, path: str) -> int:
            """The free bytes of a disk to which others write as well."""
            made.update(self.list(path))
            return GIB if len(made) < 6 else 64 * MIB

    made: set[str] = set()
    with pytest.raises(DiskFullError):
        finish(clean(FillingDisk(), cleaning.job))
    assert made, "something was written"
    assert list((compacted.path / CLEANING).iterdir()) == []


def test_a_swap_of_many_segments_needs_few_open_files(compacted: Place) -> None:
    log = compacted.open()
    for number in range(400):
        write(log, (b"a", b"x"), (b"unique %d" % number, b"y" * 300))
    roll(log)
    cleaning = log.plan_cleaning(NOW_MS, memory_bytes=MIB, bytes_per_s=MIB)
    assert cleaning is not None and len(cleaning.job.groups) >= 40
    result = finish(clean(CountingDisk(), cleaning.job))
    plan = log.plan_swap(cleaning, result, NOW_MS)
    assert plan is not None
    before = len(os.listdir("/proc/self/fd"))
    segments = plan.prepare()
    assert len(os.listdir("/proc/self/fd")) < before + 20
    log.apply_swap(plan, segments)
    plan.finish()
    assert len(os.listdir("/proc/self/fd")) < before + 20
    assert len(records(log)) == 401


def test_what_is_left_of_a_batch_has_what_the_whole_one_had() -> None:
    batch = encode_batch(
        [b"1", None, b"3"],
        [b"a", b"b", b"c"],
        timestamps_ms=[5, 3, 9],
        producer_id=7,
        producer_epoch=2,
        base_sequence=11,
    )
    header = read_header(batch)
    columns = decode_columns(batch, 0, header)
    for kept in ([], [0], [1], [2], [0, 2], [1, 2]):
        less = keep_records(header, columns, kept)
        smaller = read_header(less)
        assert smaller.record_count == len(kept)
        assert (smaller.next_offset, smaller.last_sequence) == (3, 13)
        assert (smaller.producer_id, smaller.producer_epoch) == (7, 2)
        left = decode_columns(less, 0, smaller)
        assert list(left.offsets) == kept
        assert left.values == [columns.values[place] for place in kept]
        assert left.timestamps_ms == [columns.timestamps_ms[place] for place in kept]


# --- any mix of it ------------------------------------------------------------------------------

_batches = st.tuples(
    st.just("write"),
    st.lists(
        st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 99))),
        min_size=1,
        max_size=8,
    ),
)
_steps = st.lists(
    st.one_of(
        _batches,
        _batches,
        _batches,
        st.tuples(st.just("roll"), st.just(0)),
        st.tuples(st.just("clean"), st.sampled_from([1, 3, 8, 1000])),
        st.tuples(st.just("wait"), st.sampled_from([1, 400, 2000])),
        st.tuples(st.just("epoch"), st.just(0)),
        st.tuples(st.just("cut"), st.integers(0, 30)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("copy"), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(_steps)
def test_a_compacted_log_replays_to_the_same_state(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]]
) -> None:
    """Any mix of batches, tombstones, passes (with room for few keys or many), restarts, copies by
    a follower, and truncations of what was not cleaned."""
    place = Place(tmp_path_factory.mktemp("any") / "topic-0", config=SMALL)
    log = place.open()
    written: list[tuple[int, bytes | None, bytes | None]] = []
    now_ms, epoch, copies = NOW_MS, 0, 0
    for step, detail in steps:
        if step == "write":
            pairs: list[KeyValue] = [
                (b"%d" % key, None if value is None else b"%d" % value)
                for key, value in detail  # type: ignore[attr-defined]
            ]
            header = write(log, *pairs, epoch=epoch, now_ms=now_ms, producer_id=epoch % 2)
            written += [(header.base_offset + n, *pair) for n, pair in enumerate(pairs)]
        elif step == "roll":
            roll(log)
        elif step == "clean":
            assert isinstance(detail, int)
            commit(log)
            run_pass(log, now_ms, memory_bytes=detail * BYTES_PER_KEY)
        elif step == "wait":
            assert isinstance(detail, int)
            now_ms += detail
        elif step == "epoch":
            epoch += 1
        elif step == "cut":
            assert isinstance(detail, int)
            log.truncate(max(log.cleaned_offset, log.end_offset - detail))
            written = [record for record in written if record[0] < log.end_offset]
            epoch += 1
        elif step == "reopen":
            commit(log)
            before = read_bytes(log)
            log = place.open()
            assert read_bytes(log) == before
        else:
            copies += 1
            place = Place(place.path.parent / f"copy-{copies}", config=SMALL)
            follower = place.open()
            learn(follower, log.cleaned_offset, log.tombstone_horizon)
            follower.append_as_follower(read_bytes(log))
            assert follower.epochs.entries() == log.epochs.entries()
            assert follower.producers.snapshot() == log.producers.snapshot()
            log = follower
        check_log(log, written, now_ms)
    commit(log)
    for report in verify(LocalDisk(), str(place.path)):
        assert report.is_sound, report.damage


def check_log(
    log: Log, written: list[tuple[int, bytes | None, bytes | None]], now_ms: int
) -> None:
    found = records(log)
    assert set(found) <= set(written)
    assert found == sorted(found)
    assert replayed(found) == replayed(written)
    latest = {key: record for record in written for key in [record[1]]}
    held = set(found)
    for offset, _, value in latest.values():
        if (offset, _, value) not in held:
            assert value is None and offset < log.tombstone_horizon
    assert [record for record in written if record[0] >= log.cleaned_offset] == [
        record for record in found if record[0] >= log.cleaned_offset
    ]


def test_a_long_life_of_passes_keeps_the_state(compacted: Place) -> None:
    rng = Random(7)
    log = compacted.open()
    state: dict[bytes, bytes] = {}
    now_ms = NOW_MS
    for number in range(1500):
        key = b"key-%d-that-is-longer-than-a-digest" % rng.randrange(60)
        value = None if rng.random() < 0.2 else b"%d" % number
        write(log, (key, value), now_ms=now_ms)
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
        if rng.random() < 0.02:
            now_ms += 700
            commit(log)
            run_pass(log, now_ms)
    roll(log)
    run_pass(log, now_ms + 1000)
    run_pass(log, now_ms + 3000)
    assert replayed(records(log, bytes_max=5000)) == state
    assert {key for _, key, _ in records(log, bytes_max=5000)} == set(state)

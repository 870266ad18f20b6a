"""What a log keeps of transactions, on disk and in memory, and what it costs and allows."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from proving.simulation import ProcessDied, World
from rayq.config import DAY_MS, MIB, TopicConfig
from rayq.environment import Disk
from rayq.errors import DiskFullError, TransactionLimitError
from rayq.messages.transaction_ids import make_family
from rayq.storage import open_transactions, producer_state
from rayq.storage.batch import (
    BatchHeader,
    Marker,
    encode_batch,
    encode_marker,
    read_header,
    split_batches,
    stamp,
)
from rayq.storage.checked_file import make_directory
from rayq.storage.cleaner import clean
from rayq.storage.disk import LocalDisk
from rayq.storage.log import Log
from rayq.storage.open_transactions import OpenTransaction, OpenTransactions
from rayq.storage.producer_state import ProducerState
from rayq.storage.verify import verify
from tests.storage.support import NOW_MS, FaultyDisk, Place, flush, make_batch, read_bytes

ONE, TWO = make_family(0, 1), make_family(0, 2)
SMALL = TopicConfig(segment_bytes=1024, index_interval_bytes=200)


def data_header(
    family: int, epoch: int, offset: int, *, sequence: int = 0, now_ms: int = NOW_MS
) -> BatchHeader:
    batch = encode_batch(
        [b"v"],
        producer_id=family,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
    )
    return stamp(batch, 0, base_offset=offset, leader_epoch=0, append_time_ms=now_ms)


def marker_header(
    family: int, epoch: int, offset: int, *, is_commit: bool = True, now_ms: int = NOW_MS
) -> BatchHeader:
    batch = encode_marker(Marker(family, epoch, is_commit, 0, 0))
    return stamp(batch, 0, base_offset=offset, leader_epoch=0, append_time_ms=now_ms)


def append_transactional(log: Log, family: int, epoch: int, sequence: int = 0) -> BatchHeader:
    batch = encode_batch(
        [b"v" * 20],
        producer_id=family,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
    )
    return log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=NOW_MS)


def end(log: Log, family: int, epoch: int, *, is_commit: bool = False) -> BatchHeader:
    marker = Marker(family, epoch, is_commit, 0, 0)
    return log.append_marker(marker, leader_epoch=0, now_ms=NOW_MS)


def append_plain(log: Log, count: int = 1) -> None:
    for _ in range(count):
        batch = make_batch(log.end_offset)
        log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=NOW_MS)


# --- which transactions are open ------------------------------------------------------------------


def test_a_transaction_is_open_from_its_first_batch_to_its_marker() -> None:
    one = OpenTransactions()
    assert (one.is_used, one.open_epoch(ONE), one.ended_epoch(ONE)) == (False, None, -1)
    one.update(data_header(ONE, 3, 10), 0)
    one.update(data_header(ONE + 5, 3, 11), 0)
    one.update(data_header(TWO, 0, 12), 0)
    assert (one.is_used, one.open_epoch(ONE), one.ended_epoch(ONE)) == (True, 3, -1)
    assert one.undecided(13) == [OpenTransaction(ONE, 3, 10), OpenTransaction(TWO, 0, 12)]
    assert one.update(marker_header(ONE, 3, 13), 0) is None
    assert (one.open_epoch(ONE), one.ended_epoch(ONE), one.open_epoch(TWO)) == (None, 3, 0)
    aborted = one.update(marker_header(TWO, 0, 14, is_commit=False), 0)
    assert aborted is not None and tuple(aborted) == (TWO, 0, 12, 14, 15)


def test_a_transaction_counts_until_its_marker_is_below_the_high_watermark() -> None:
    one = OpenTransactions()
    one.update(data_header(ONE, 1, 5), 0)
    one.update(data_header(TWO, 1, 6), 0)
    one.update(marker_header(ONE, 1, 7), 0)
    for high_watermark in (5, 6, 7):
        assert one.first_undecided(high_watermark) == 5
    assert one.first_undecided(8) == 6
    assert one.undecided(7) == [OpenTransaction(ONE, 1, 5), OpenTransaction(TWO, 1, 6)]
    assert one.undecided(8) == [OpenTransaction(TWO, 1, 6)]


def test_a_marker_ends_its_own_epoch_only() -> None:
    one = OpenTransactions()
    one.update(data_header(ONE, 4, 0), 0)
    one.update(marker_header(ONE, 3, 1), 0)
    assert (one.open_epoch(ONE), one.ended_epoch(ONE)) == (4, 3)
    one.update(marker_header(TWO, 7, 2, is_commit=False), 0)
    assert (one.open_epoch(TWO), one.ended_epoch(TWO)) == (None, 7)
    assert one.undecided(0) == [OpenTransaction(ONE, 4, 0)], "a fence holds nothing back"


def test_the_markers_of_a_range_are_told_as_far_back_as_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_transactions, "ENDED_REMEMBERED", 3)
    one = OpenTransactions()
    for number in range(6):
        one.update(marker_header(ONE, number, 10 + number), 0)
    assert one.ended_between(0, 12) == [(ONE, 0), (ONE, 1)]
    one.forget_decided(11)
    assert (one.ended_between(10, 99), one.ended_between(11, 12)) == (None, [(ONE, 1)])
    one.forget_decided(99)
    assert (one.ended_between(12, 99), one.ended_between(13, 15)) == (None, [(ONE, 3), (ONE, 4)])


def test_producers_of_open_transactions_are_neither_too_old_nor_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_state, "PRODUCERS_MAX", 3)
    state = ProducerState()
    state.update(data_header(ONE, 1, 0))
    state.update(data_header(TWO, 1, 1))
    state.update(marker_header(TWO, 1, 2))
    for number in range(2 * DAY_MS // 600_000):  # Two days, in steps of ten minutes.
        batch = make_batch(0, producer_id=number, base_sequence=0)
        now_ms = NOW_MS + number * 600_000
        state.update(
            stamp(batch, 0, base_offset=3 + number, leader_epoch=0, append_time_ms=now_ms)
        )
    loaded = ProducerState()
    loaded.load(state.snapshot())
    for one in (state, loaded):
        assert one.check(data_header(ONE, 1, 999)) is not None, "the retry is known"
        assert one.transactions.open_epoch(ONE) == 1
        assert one.transactions.ended_epoch(TWO) == -1, "forgotten with its producer"


def test_a_writer_that_would_be_forgotten_at_once_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_state, "PRODUCERS_MAX", 3)
    state = ProducerState()
    for task in range(3):
        assert state.check(data_header(ONE + task, 1, task)) is None
        state.update(data_header(ONE + task, 1, task))
    with pytest.raises(TransactionLimitError, match="fewer tasks"):
        state.check(data_header(ONE + 3, 1, 3))
    with pytest.raises(TransactionLimitError):
        state.check(data_header(TWO, 1, 3))
    assert state.check(data_header(ONE, 1, 0)) is not None, "who is known goes on"
    state.update(marker_header(ONE, 1, 3))
    assert state.check(data_header(TWO, 1, 4)) is None


def test_a_snapshot_holds_what_is_open_and_what_the_high_watermark_has_not_reached() -> None:
    state = ProducerState()
    state.update(data_header(ONE, 1, 0))
    state.update(marker_header(ONE, 1, 1))
    state.update(data_header(ONE, 2, 2))
    state.update(data_header(TWO, 9, 3))
    state.update(marker_header(ONE, 2, 4, is_commit=False))
    loaded = ProducerState()
    loaded.load(state.snapshot(high_watermark=3))
    for high_watermark in (3, 4, 5):
        expected = state.transactions.undecided(high_watermark)
        assert loaded.transactions.undecided(high_watermark) == expected
    assert loaded.transactions.ended_between(3, 9) == [(ONE, 2)]
    assert loaded.transactions.ended_between(0, 9) is None
    assert loaded.transactions.ended_epoch(ONE) == 2


@pytest.mark.parametrize("high_watermark", range(9))
def test_a_snapshot_tells_what_is_undecided_from_its_high_watermark_on(
    high_watermark: int,
) -> None:
    """Whoever goes on from the snapshot tells readers of committed records the same stable offset:
    a marker that is not committed yet decides nothing."""
    state = ProducerState()
    for header in (
        data_header(ONE, 1, 0),
        data_header(TWO, 1, 1),
        marker_header(ONE, 1, 2, is_commit=False),
        data_header(ONE, 2, 3),
        marker_header(TWO, 1, 4),
        marker_header(ONE, 2, 5, is_commit=False),
        marker_header(ONE, 2, 6, is_commit=False),
        data_header(TWO, 2, 7),
    ):
        state.update(header)
    known = state.transactions
    loaded = ProducerState()
    loaded.load(state.snapshot(high_watermark))
    for later in range(high_watermark, 9):
        assert loaded.transactions.undecided(later) == known.undecided(later)
        assert loaded.transactions.first_undecided(later) == known.first_undecided(later)
        for end in range(later, 10):
            expected = known.ended_between(later, end)
            assert loaded.transactions.ended_between(later, end) == expected


# --- the log --------------------------------------------------------------------------------------


def test_retention_stops_at_an_open_transaction(place: Place) -> None:
    place.config = TopicConfig(segment_bytes=1024, retention_ms=1)
    log = place.open()
    append_plain(log, 30)
    first = append_transactional(log, ONE, 1).base_offset
    append_plain(log, 60)
    later_ms = NOW_MS + 1000
    assert log.stable_offset(log.end_offset) == first
    assert log.retention_start(later_ms, log.end_offset) <= first
    assert log.stable_offset(first - 3) == first - 3
    end(log, ONE, 1)
    append_plain(log, 30)
    assert log.stable_offset(log.end_offset) == log.end_offset
    assert log.retention_start(later_ms, log.end_offset) > first


def test_a_marker_may_use_the_reserve_of_a_full_disk(place: Place) -> None:
    disk = FaultyDisk()
    log = place.open(disk)
    leader = Place(place.path.parent / "leader").open()
    append_transactional(log, ONE, 1)
    append_transactional(leader, ONE, 1)
    disk.free = 1 * MIB
    log.plan_flush(0)
    with pytest.raises(DiskFullError):
        append_transactional(log, ONE, 1, 1)
    assert end(log, ONE, 1).base_offset == 1
    end(leader, ONE, 1)
    # A follower takes markers as well, and records no more than before.
    follower = Place(place.path.parent / "follower").open(disk)
    with pytest.raises(DiskFullError):
        follower.append_as_follower(read_bytes(leader))
    disk.free = None
    data = read_bytes(leader)
    (_, first), (second, _) = split_batches(data)
    follower.append_as_follower(data[: first.length])
    disk.free = 1 * MIB
    follower.plan_flush(0)
    assert follower.append_as_follower(data[second:]) == 2
    disk.faults, disk.path_part = {"write": errno.ENOSPC}, ".log"
    with pytest.raises(DiskFullError):
        end(log, TWO, 1)
    disk.faults = {}
    assert end(log, TWO, 1).base_offset == 2, "the refusal left the log as it was"


def test_a_log_without_transactions_has_no_files_of_them(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    append_plain(log, 100)
    log.close(100)
    assert place.files(".aborted") == []
    log = place.open()
    append_transactional(log, ONE, 1)
    end(log, ONE, 1, is_commit=True)
    log.close(100)
    assert len(place.files(".aborted")) == 1, "the segments before hold no transactions"


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
def test_a_lost_index_is_made_again(
    place: Place, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    place.config = SMALL
    log = place.open()
    for epoch in range(40):
        append_transactional(log, ONE, epoch)
        if epoch % 3 == 0:
            append_transactional(log, TWO, epoch)
            append_plain(log)
            end(log, TWO, epoch)
        end(log, ONE, epoch, is_commit=epoch % 2 == 0)
    ranges = [(start, stop) for start in range(0, log.end_offset, 7) for stop in (40, 90)]
    expected = [log.aborted_between(*between) for between in ranges]
    assert len({key for keys in expected for key in keys}) > 20
    log.close(log.end_offset)
    path = place.files(".aborted")[1]
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else content[:-1] + b"\xff")
        notes = [note for report in verify(place.disk, str(place.path)) for note in report.notes]
        assert any("damaged" in note and "aborted" in note for note in notes)
    log = place.open()
    assert "rebuilt" in caplog.text
    assert [log.aborted_between(*between) for between in ranges] == expected
    assert path.read_bytes() == content
    caplog.clear()
    log = place.open()
    assert [log.aborted_between(*between) for between in ranges] == expected
    assert not caplog.text


def test_the_index_goes_with_its_segments(place: Place) -> None:
    place.config = SMALL
    log = place.open()
    for epoch in range(60):
        append_transactional(log, ONE, epoch)
        end(log, ONE, epoch)
    flush(log, checkpoint=True, high_watermark=log.end_offset)
    before = len(place.files(".aborted"))
    assert before == len(place.files(".log")) > 3
    Log.remove_files(place.disk, log.advance_start(60))
    assert len(place.files(".aborted")) == len(place.files(".log")) < before
    assert log.aborted_between(0, 3) == []
    log.truncate(70)
    assert len(place.files(".aborted")) == len(place.files(".log"))
    assert log.aborted_between(60, 200) == [(ONE, epoch) for epoch in range(30, 35)]
    log.reset(500, [], b"")
    assert place.files(".aborted") == []
    assert log.aborted_between(0, 500) == []


def run_pass(log: Log, now_ms: int) -> None:
    cleaning = log.plan_cleaning(now_ms, memory_bytes=MIB, bytes_per_s=MIB, at_once=True)
    assert cleaning is not None
    steps = clean(LocalDisk(), cleaning.job)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            plan = log.plan_swap(cleaning, stop.value, now_ms)
            break
    assert plan is not None
    log.apply_swap(plan, plan.prepare())
    plan.finish()


def test_an_old_snapshot_opens_no_transaction_whose_marker_compaction_took(place: Place) -> None:
    place.config = TopicConfig(
        cleanup_policy="compact", delete_retention_ms=1000, max_compaction_lag_ms=1
    )
    log = place.open()
    append_plain(log)
    append_transactional(log, ONE, 1)
    flush(log, checkpoint=True, high_watermark=2)
    end(log, ONE, 1, is_commit=True)
    append_transactional(log, TWO, 1)
    end(log, TWO, 1)
    append_plain(log)
    log.roll_to_clean(2 * NOW_MS)
    append_transactional(log, TWO, 2)
    flush(log, checkpoint=True, high_watermark=6)
    for later_ms in (0, 2000):
        run_pass(log, 2 * NOW_MS + later_ms)
    assert log.tombstone_horizon == 5
    assert not any(header.is_control for _, header in split_batches(read_bytes(log)))
    place.files(".snapshot")[-1].unlink()
    for _ in range(2):
        log = place.open()
        assert log.producers.transactions.undecided(0) == [OpenTransaction(TWO, 2, 6)]
        assert log.stable_offset(7) == 6


def test_what_was_aborted_in_the_oldest_segment_supersedes_nothing(place: Place) -> None:
    place.config = TopicConfig(cleanup_policy="compact", max_compaction_lag_ms=1)
    log = place.open()

    def put(value: bytes, **transaction: Any) -> None:
        batch = encode_batch([value], [b"k"], compression="none", **transaction)
        log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=NOW_MS)

    put(b"committed")
    put(b"aborted", producer_id=ONE, producer_epoch=1, base_sequence=0, is_transactional=True)
    end(log, ONE, 1)
    log.roll_to_clean(2 * NOW_MS)
    append_plain(log)
    log.roll_to_clean(3 * NOW_MS)
    append_plain(log)
    flush(log, checkpoint=True, high_watermark=log.end_offset)
    run_pass(log, 3 * NOW_MS)
    data = read_bytes(log)
    assert b"committed" in data and b"aborted" not in data


# --- crashes --------------------------------------------------------------------------------------


def seen(log: Log) -> object:
    """What the log knows, and what its headers say of the same by one plain scan."""
    firsts: dict[tuple[int, int], int] = {}
    aborted: list[tuple[int, int, int, int]] = []
    for _, header in split_batches(read_bytes(log)):
        key = (header.producer_id or 0, header.producer_epoch)
        if header.is_control:
            first = firsts.pop(key, None)
            if header.is_abort and first is not None:
                aborted.append((*key, first, header.base_offset))
        elif header.is_transactional:
            firsts.setdefault(key, header.base_offset)
    undecided = [OpenTransaction(*key, first) for key, first in firsts.items()]
    assert log.producers.transactions.undecided(log.end_offset) == undecided
    stable_offset = min([log.end_offset, *firsts.values()])
    for start in range(0, stable_offset, 5):
        for stop in (start + 1, (start + stable_offset) // 2 + 1, stable_offset):
            expected = [one[:2] for one in aborted if one[2] < stop and one[3] >= start]
            assert log.aborted_between(start, stop) == expected
    return undecided


def work(log: Log) -> None:
    """Interleaved transactions in several segments, with flushes, checkpoints and truncations."""
    epochs = {ONE: 0, TWO: 0}
    for number in range(90):
        family = ONE if number % 3 else TWO
        if number % 10 == 9 and log.producers.transactions.open_epoch(family) is not None:
            end(log, family, epochs[family], is_commit=number % 20 == 9)
            epochs[family] += 1
        elif number % 7 == 3:
            append_plain(log)
        elif log.producers.transactions.ended_epoch(family) < epochs[family]:
            append_transactional(log, family, epochs[family])
        if number % 8 == 7:
            plan = log.plan_flush(log.end_offset // 2, checkpoint=number % 3 == 0)
            if plan is not None:
                log.apply_flush(plan, has_checkpoint=plan.run())
        if number in (40, 75):
            log.truncate(log.end_offset - 17)
            for family in epochs:
                open_epoch = log.producers.transactions.open_epoch(family)
                ended_epoch = log.producers.transactions.ended_epoch(family)
                epochs[family] = ended_epoch + 1 if open_epoch is None else open_epoch
    log.close(log.end_offset // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "power_loss_at", ["odd", pytest.param("even", marks=pytest.mark.thorough)]
)
def test_after_a_crash_anywhere_a_log_knows_what_its_headers_say(
    caplog: pytest.LogCaptureFixture, power_loss_at: str
) -> None:
    """At each operation of the disk: an end of the process at one, a power loss at the next."""

    def open_log(disk: Disk) -> Log:
        return Log.open(disk, "/data/topic-0", SMALL, checkpoint_bytes=2000, now_ms=NOW_MS)

    count, is_through = 0, False
    while not is_through:
        count += 1
        power_loss = count % 2 == (power_loss_at == "odd")
        with World(1000 * count + power_loss) as world:
            host = world.host()
            process = host.process("replica")
            make_directory(process.environment.disk, "/data")
            log = open_log(process.environment.disk)
            process.kill_at_disk_operation(count, power_loss=power_loss)
            try:
                work(log)
                is_through = True
            except ProcessDied:
                pass
            if process.alive:
                process.kill()
            disk = host.process("replica").environment.disk
            for _ in range(2):
                log = open_log(disk)
                seen(log)
            for report in verify(disk, "/data/topic-0"):
                assert report.is_sound, report.damage
    assert count > 50, "the test crashed in each of them"
    # (The sparse index of a segment may end with a write of the checkpoint that was under way.)
    is_lost = "index of aborted transactions was missing" in caplog.text
    assert not is_lost, "no crash damages what a checkpoint covers"

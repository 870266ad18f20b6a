"""The leader-epoch cache and the memory of idempotent producers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.config import DAY_MS
from rayq.errors import (
    OutOfOrderSequenceError,
    ProducerFencedError,
    StorageError,
    UnknownProducerError,
    UnsupportedFormatError,
)
from rayq.storage import producer_state
from rayq.storage.batch import BatchHeader, read_header
from rayq.storage.epochs import EpochCache
from rayq.storage.producer_state import DuplicateBatch, ProducerState
from tests.storage.support import NOW_MS, make_batch


def test_epochs_know_where_they_start_and_end() -> None:
    cache = EpochCache([(2, 0), (5, 100), (9, 250)])
    assert [cache.start_of(epoch) for epoch in (1, 2, 5, 6, 9)] == [None, 0, 100, None, 250]
    assert cache.end_for(9, 300) == (9, 300)
    assert cache.end_for(12, 300) == (9, 300)
    assert cache.end_for(5, 300) == (5, 250)
    assert cache.end_for(8, 300) == (5, 250)
    assert cache.end_for(2, 300) == (2, 100)
    assert cache.end_for(1, 300) == (None, 0)
    assert EpochCache().end_for(3, 70) == (None, 70)
    assert [cache.epoch_of(offset) for offset in (0, 99, 100, 400)] == [2, 2, 5, 9]
    assert EpochCache([(3, 10)]).epoch_of(9) is None


def test_an_epoch_starts_once_and_replaces_those_that_left_no_records() -> None:
    cache = EpochCache([(1, 0), (2, 50)])
    cache.assign(2, 70)
    assert cache.entries() == [(1, 0), (2, 50)]
    cache.assign(3, 50)
    assert cache.entries() == [(1, 0), (3, 50)]
    with pytest.raises(AssertionError):
        cache.assign(2, 80)


def test_epochs_are_cut_at_both_ends() -> None:
    entries = [(1, 0), (2, 50), (3, 80)]
    for offset, kept in ((81, 3), (80, 2), (51, 2), (50, 1), (1, 1), (0, 0)):
        cache = EpochCache(entries)
        cache.truncate_to_end(offset)
        assert cache.entries() == entries[:kept]
    for offset, dropped in ((0, 0), (50, 0), (51, 1), (80, 1), (81, 2), (500, 2)):
        cache = EpochCache(entries)
        cache.truncate_to_start(offset)
        assert cache.entries() == entries[dropped:]
        assert cache.epoch_of(offset - 1) == EpochCache(entries).epoch_of(offset - 1)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))), st.integers(0, 25))
def test_epochs_and_starts_always_ascend(assignments: list[tuple[int, int]], cut: int) -> None:
    cache = EpochCache()
    for epoch, start in assignments:
        latest = cache.latest()
        if latest is None or epoch >= latest:
            cache.assign(epoch, start)
    cache.truncate_to_end(cut)
    epochs = [epoch for epoch, _ in cache.entries()]
    starts = [start for _, start in cache.entries()]
    assert epochs == sorted(set(epochs))
    assert starts == sorted(set(starts))
    assert all(start < cut for start in starts)


# --- producers ------------------------------------------------------------------------------------


def header_of(
    sequence: int | None,
    count: int = 1,
    *,
    producer: int | None = 7,
    epoch: int = 0,
    offset: int = 0,
    now_ms: int = NOW_MS,
) -> BatchHeader:
    batch = make_batch(0, count, producer_id=producer, producer_epoch=epoch, base_sequence=sequence)
    return msgspec.structs.replace(read_header(batch), base_offset=offset, append_time_ms=now_ms)


def test_batches_without_idempotence_are_not_looked_at() -> None:
    state = ProducerState()
    state.update(header_of(None, producer=None))
    assert state.check(header_of(None, producer=None)) is None
    assert len(state) == 0


def test_a_batch_is_new_or_one_of_the_last_five_or_refused() -> None:
    state = ProducerState()
    for number in range(8):
        header = header_of(number * 3, 3, offset=100 + number * 3)
        assert state.check(header) is None
        state.update(header)
    for number in range(3, 8):
        assert state.check(header_of(number * 3, 3)) == DuplicateBatch(
            100 + number * 3, 102 + number * 3, NOW_MS
        )
    for sequence, count in ((6, 3), (25, 1), (27, 3), (21, 2), (22, 2)):
        with pytest.raises(OutOfOrderSequenceError, match="expected 24"):
            state.check(header_of(sequence, count))
    assert state.check(header_of(24, 9)) is None


def test_sequences_wrap_around() -> None:
    state = ProducerState()
    state.update(header_of(0, 1))
    state = ProducerState()
    state.update(header_of(2**31 - 2, 4))
    assert state.check(header_of(2, 1)) is None
    assert state.check(header_of(2**31 - 2, 4)) is not None


def test_an_unknown_producer_begins_at_zero() -> None:
    state = ProducerState()
    assert state.check(header_of(0)) is None
    with pytest.raises(UnknownProducerError):
        state.check(header_of(5))


def test_a_new_producer_epoch_fences_the_old_one_and_begins_at_zero() -> None:
    state = ProducerState()
    state.update(header_of(0, 5, epoch=3))
    with pytest.raises(ProducerFencedError):
        state.check(header_of(5, epoch=2))
    with pytest.raises(OutOfOrderSequenceError):
        state.check(header_of(5, epoch=4))
    assert state.check(header_of(0, epoch=4)) is None
    state.update(header_of(0, epoch=4))
    with pytest.raises(ProducerFencedError):
        state.check(header_of(5, epoch=3))
    assert state.check(header_of(1, epoch=4)) is None


def test_a_producer_id_is_that_of_the_principal_that_writes_under_it() -> None:
    state = ProducerState()
    state.check_principal(7, "orders")  # Nobody has written.
    state.update(header_of(0))
    state.check_principal(7, "orders")  # It is not known who has, as after a change of the leader.
    state.wrote(7, "orders")
    state.wrote(7, None)
    state.check_principal(7, "orders")
    with pytest.raises(ProducerFencedError, match="'billing'.*nothing was written"):
        state.check_principal(7, "billing")
    state.update(header_of(0, producer=8))
    state.wrote(8, None)
    with pytest.raises(ProducerFencedError):
        state.check_principal(8, "orders")  # A superuser's.


def write_for_a_day(state: ProducerState, producer: int, since_ms: int) -> None:
    for passed_ms in range(0, DAY_MS + 1, producer_state.APPEND_STEP_MAX_MS):
        state.update(header_of(0, producer=producer, now_ms=since_ms + passed_ms))


def test_producers_expire_by_the_partitions_own_time() -> None:
    state = ProducerState()
    state.update(header_of(0, now_ms=NOW_MS))
    assert state.check(header_of(0, now_ms=NOW_MS)) is not None, "an only writer never expires"
    write_for_a_day(state, 8, NOW_MS)
    assert state.check(header_of(1)) is None
    state.update(header_of(1, producer=8, now_ms=NOW_MS + DAY_MS + 1))
    with pytest.raises(UnknownProducerError):
        state.check(header_of(1))
    assert state.check(header_of(0)) is None
    loaded = ProducerState()
    loaded.load(state.snapshot())
    assert len(loaded) == len(state) == 1


def test_a_leaders_clock_that_leaps_ahead_makes_no_retry_a_new_batch() -> None:
    state = ProducerState()
    state.update(header_of(0, now_ms=NOW_MS))
    for leaps in range(1, 10):
        state.update(header_of(0, producer=8, now_ms=NOW_MS + 7 * leaps * DAY_MS))
    assert state.check(header_of(0)) is not None
    loaded = ProducerState()
    loaded.load(state.snapshot())
    assert loaded.check(header_of(0)) is not None


def test_only_so_many_producers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "PRODUCERS_MAX", 3)
    state = ProducerState()
    for producer in (1, 2, 3, 1, 4):
        state.update(header_of(0, producer=producer))
    known = [producer for producer in range(1, 5) if state.check(header_of(0, producer=producer))]
    assert known == [1, 3, 4]


def test_the_producers_of_a_range_of_ids_are_listed_while_they_are_known() -> None:
    state = ProducerState()
    state.update(header_of(0, producer=12, now_ms=NOW_MS))
    write_for_a_day(state, 7, NOW_MS)
    state.update(header_of(0, producer=10, now_ms=NOW_MS + DAY_MS))
    assert state.ids_from(8, 5) == [10, 12]
    state.update(header_of(0, producer=7, now_ms=NOW_MS + DAY_MS + 1, epoch=1))
    assert state.ids_from(8, 5) == [10], "12 is forgotten by now"
    assert state.ids_from(0, 10) == [7]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans(), st.integers(0, DAY_MS)),
        max_size=30,
    )
)
def test_a_snapshot_stands_for_the_batches_it_was_made_of(
    batches: list[tuple[int, int, bool, int]],
) -> None:
    state, offset, now_ms = ProducerState(), 0, NOW_MS
    following: dict[int, tuple[int, int]] = {}
    headers = []
    for producer, count, takes_over, passed_ms in batches:
        now_ms += passed_ms // 4
        epoch, sequence = following.get(producer, (0, 0))
        if takes_over:
            epoch, sequence = epoch + 1, 0
        header = header_of(
            sequence, count, producer=producer, epoch=epoch, offset=offset, now_ms=now_ms
        )
        state.update(header)
        headers.append(header)
        following[producer] = epoch, sequence + count
        offset += count
    loaded = ProducerState()
    loaded.load(state.snapshot())

    def outcome(of: ProducerState, header: BatchHeader) -> object:
        try:
            return of.check(header)
        except (OutOfOrderSequenceError, ProducerFencedError, UnknownProducerError) as error:
            return type(error)

    for header in headers:
        assert outcome(loaded, header) == outcome(state, header)
    assert loaded.snapshot() == state.snapshot()


def test_a_damaged_snapshot_changes_nothing() -> None:
    state = ProducerState()
    state.update(header_of(0))
    good = state.snapshot()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 4
        with pytest.raises((StorageError, UnsupportedFormatError)):
            state.load(bytes(bad))
    assert state.check(header_of(0)) is not None
    state.load(b"")
    assert len(state) == 0

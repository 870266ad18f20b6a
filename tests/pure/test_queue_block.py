"""Sets of offsets as integers, and what a block says of each offset, against sets and dicts."""

from __future__ import annotations

import random

import pytest

from rayq.core.queues.block import (
    ALL,
    LAST_INDEX,
    Block,
    bits_of,
    count_of,
    lowest,
    mask_of,
    raise_counts,
    runs_of,
)
from rayq.core.queues.delays import Delay

STATES = ("ready", "blocked", "locked", "delayed", "claimed", "moving", "done")
INDEXES = (*range(13), *range(250, LAST_INDEX + 1))


def some_of(chosen: random.Random) -> set[int]:
    return set(chosen.sample(INDEXES, chosen.choice([0, 1, 2, 5, 9, len(INDEXES)])))


def mask(indexes: set[int] | range | list[int]) -> int:
    return sum(1 << index for index in set(indexes))


@pytest.mark.parametrize("first, last", [(0, 0), (0, 7), (3, 3), (3, 9), (255, 255), (0, 255)])
def test_a_mask_has_both_of_its_ends(first: int, last: int) -> None:
    assert mask_of(first, last) == mask(range(first, last + 1))
    assert list(runs_of(mask_of(first, last))) == [(first, last)]


@pytest.mark.parametrize("seed", range(40))
def test_a_set_is_read_in_its_order_and_by_its_lowest(seed: int) -> None:
    indexes = some_of(random.Random(seed))
    ordered = sorted(indexes)
    assert list(bits_of(mask(indexes))) == ordered
    runs = list(runs_of(mask(indexes)))
    assert [one for first, last in runs for one in range(first, last + 1)] == ordered
    assert all(last + 1 < first for (_, last), (first, _) in zip(runs, runs[1:], strict=False))
    for count in range(len(ordered) + 2):
        assert lowest(mask(indexes), count) == mask(ordered[:count])


def by_index(counts: dict[int, int]) -> dict[int, int]:
    """Each index with its count. None has two."""
    pairs = [(index, count) for count, bits in counts.items() for index in bits_of(bits)]
    found = dict(pairs)
    assert len(found) == len(pairs) and 0 not in counts.values() and 0 not in counts
    return found


@pytest.mark.parametrize("seed", range(20))
def test_counts_grow_by_one_for_each_that_is_named(seed: int) -> None:
    chosen = random.Random(seed)
    raises = [one for one in (some_of(chosen) for _ in range(8)) if one]
    counts: dict[int, int] = {}
    expected: dict[int, int] = {}
    for indexes in raises:
        told = raise_counts(counts, mask(indexes))
        for index in indexes:
            expected[index] = expected.get(index, 0) + 1
        assert by_index(counts) == expected
        assert by_index(dict(told)) == {index: expected[index] for index in indexes}
        assert len(dict(told)) == len(told)
    for index in (*INDEXES, 13, 249):
        assert count_of(counts, 1 << index) == expected.get(index, 0)


class Offsets:
    """What a block has to say, offset by offset."""

    def __init__(self) -> None:
        self.block = Block()
        self.holders: dict[int, str] = {}
        self.ends: dict[int, int] = {}
        self.counts: dict[int, int] = {}

    def lock(self, indexes: set[int], holder: str, timer: tuple[int, int]) -> None:
        told = self.block.lock(mask(indexes), holder, timer)
        for index in indexes:
            self.holders[index], self.ends[index] = holder, timer[0]
            self.counts[index] = self.counts.get(index, 0) + 1
        assert by_index(dict(told)) == {index: self.counts[index] for index in indexes}

    def set_timer(self, indexes: set[int], timer: tuple[int, int]) -> None:
        self.block.set_timer(mask(indexes), timer)
        self.ends.update(dict.fromkeys(indexes, timer[0]))

    def unlock(self, indexes: set[int], holder: str) -> None:
        self.block.unlock(mask(indexes), holder)
        for index in indexes:
            del self.holders[index]

    def compare(self) -> None:
        block = self.block
        assert 0 not in block.holders.values() and 0 not in block.timers.values()
        assert sum(map(int.bit_count, block.timers.values())) == len(self.ends), "one timer each"
        for index in range(LAST_INDEX + 1):
            assert block.holder_of(1 << index) == self.holders.get(index)
            assert block.end_tick_of(1 << index) == self.ends.get(index)
        assert by_index(block.counts) == self.counts


@pytest.mark.parametrize("seed", range(6))
def test_each_locked_offset_has_one_holder_and_one_end(seed: int) -> None:
    chosen = random.Random(seed)
    offsets = Offsets()
    for _ in range(40):
        free = sorted(set(range(8)) - set(offsets.holders))
        held = sorted(offsets.holders)
        timer = chosen.choice([(30, 20), (31, 20), (40, 30)])
        if free and chosen.random() < 0.5:
            some = set(chosen.sample(free, chosen.randint(1, len(free))))
            offsets.lock(some, chosen.choice("ab"), timer)
        elif held:
            some = set(chosen.sample(held, chosen.randint(1, len(held))))
            if chosen.random() < 0.5:
                offsets.set_timer(some, timer)
            else:  # Who has them is not always known, and they may be several holders'.
                offsets.unlock(some, chosen.choice([offsets.holders[min(some)], "a", "b", ""]))
        offsets.compare()


def test_what_was_never_seen_is_in_no_state_and_all_else_stays() -> None:
    block = Block()
    for number, state in enumerate(STATES):
        setattr(block, state, mask([number, 200 + number]))
    block.counts = {1: mask([0, 1, 200]), 3: mask([2])}
    block.excused = {1: mask([1, 201]), 2: mask([5])}
    block.holders = {"a": mask([2]), "b": mask([3, 202])}
    block.due = {3: Delay(5), 203: Delay(6), 4: Delay(7), 204: Delay(8)}
    block.forget(mask_of(0, 100))
    for number, state in enumerate(STATES):
        assert getattr(block, state) == 1 << 200 + number
    assert block.counts == {1: 1 << 200} and block.excused == {1: 1 << 201}
    assert block.holders == {"b": 1 << 202}
    assert block.due == {203: Delay(6), 204: Delay(8)}
    block.forget(ALL)
    assert not any(getattr(block, state) for state in STATES)
    assert not block.counts and not block.excused and not block.holders and not block.due


def test_a_new_block_knows_nothing() -> None:
    block = Block()
    assert not any(getattr(block, state) for state in STATES)
    assert block.holder_of(1) is None and block.end_tick_of(1) is None
    assert not block.counts and not block.excused and not block.due and not block.is_listed

"""Which records a take gives, over several blocks of offsets, and where nothing more is given."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rayq.config import QueueConfig
from rayq.core.queues import offset_states
from rayq.core.queues import state as queue_state
from rayq.core.queues.state import QueueState
from tests.pure.queue_model import QueueModel
from tests.pure.test_queue_state import again, opened

EDGES = (0, 1, 2, 254, 255, 256, 257, 510, 511, 512, 513, 700, 767, 768, 769)


class Both:
    """A queue and its model, with the same records."""

    def __init__(self, keys: Sequence[bytes | None]) -> None:
        config = QueueConfig(ordered_by_key=any(keys), max_deliveries=1000)
        self.state = QueueState.begin(config, 0, state_epoch=0)
        self.model = QueueModel(config, 0, 0)
        self.state.learn(len(keys) - 1, keys if any(keys) else None)
        self.model.learn(len(keys) - 1, keys)

    def take(self, holder: str, count_max: int, low: int, high: int) -> list[int]:
        given = self.state.take(holder, count_max, now_s=0, from_offset=low, below_offset=high)
        offsets = [(one, n) for first, last, n in given for one in range(first, last + 1)]
        assert offsets == self.model.take(holder, count_max, low, high, 0)
        for (_, last, count), (first, _, following) in zip(given, given[1:], strict=False):
            assert last + 1 < first or count != following, "what lies together is told as one"
        lost = self.state.ack("other", 0, [(first, last, 0) for first, last, _count in given])
        assert {who for _, _, who in lost} <= {f"consumer {holder} has it"}
        assert sum(last - first + 1 for first, last, _who in lost) == len(offsets)
        return [offset for offset, _count in offsets]

    def ack(self, offset: int) -> None:
        holder, count = self.model.records[offset].holder or "a", self.model.records[offset].count
        lost = self.state.ack(holder, 0, [(offset, offset, count)])
        assert self.model.ack(holder, 0, offset, count) == (not lost)

    def release(self, offset: int) -> None:
        holder, count = self.model.records[offset].holder or "a", self.model.records[offset].count
        lost = self.state.release(holder, 0, [(offset, offset, count)])
        assert self.model.release(holder, 0, offset, count) == (not lost)

    def compare(self) -> None:
        ready = [
            one
            for one, record, before in self.model.in_line()
            if record.state == "free" and before is None
        ]
        for edge in EDGES:
            expected = next((one for one in ready if one >= edge), None)
            assert self.state.first_ready(edge) == expected
        counts = self.state.counts()
        free = sum(record.state == "free" for record in self.model.records.values())
        assert (counts.ready, counts.ready + counts.blocked) == (len(ready), free)
        assert counts.locked == self.model.locked()


def keys_in_runs(chosen: random.Random) -> list[bytes | None]:
    """Long runs of few keys: blocks of which nothing is ready lie between others."""
    keys: list[bytes | None] = []
    while len(keys) < 770:
        keys += [chosen.choice([b"x", b"x", b"y", None])] * chosen.choice([1, 2, 50, 255, 256, 300])
    return keys[:770]


@pytest.mark.parametrize("seed", range(24))
def test_a_take_gives_the_first_that_are_ready_in_the_order_of_their_keys(seed: int) -> None:
    chosen = random.Random(seed)
    both = Both(keys_in_runs(chosen) if seed % 4 else [None] * 770)
    for _ in range(6):
        low, high = sorted(chosen.sample(EDGES, 2)) if chosen.random() < 0.6 else (0, 770)
        taken = both.take("a", chosen.choice([1, 2, 60, 256, 257, 770]), low, high)
        both.compare()
        # Of a key they are settled in any order.
        for offset in chosen.sample(taken, min(len(taken), 4)):
            both.ack(offset) if chosen.random() < 0.6 else both.release(offset)
        both.compare()


@pytest.mark.parametrize("below", [1, 255, 256, 257, 511, 512, 513, 600, 601, 10**9])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_take_ends_right_below_its_end(below: int, ordered: bool) -> None:
    state, _keeper = opened(ready=600, ordered_by_key=ordered)
    assert state.take("a", 1000, now_s=0, below_offset=below) == [(0, min(below, 600) - 1, 1)]
    assert state.counts().locked == min(below, 600)
    assert not state.take("a", 1000, now_s=0, below_offset=below)


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 511, 512, 513, 1000])
def test_later_ones_of_a_key_follow_over_blocks_in_which_nothing_is_ready(count: int) -> None:
    # The key of the first record has all of the second block, too. Others' are ready behind it.
    keys = [b"x", *[b"y"] * 255, *[b"x"] * 256, *[b"z"] * 256]
    both = Both(keys)
    assert both.take("a", count, 0, 1000) == list(range(min(count, 768)))
    both.compare()
    # What follows is not taken from outside of the range, nor past a record that is not in it.
    both = Both(keys)
    assert both.take("a", 1000, 1, 300) == [*range(1, 256)]
    assert both.take("b", 1000, 0, 400) == [0, *range(256, 400)]
    assert both.take("c", 1000, 0, 1000) == [*range(512, 768)]


def test_a_take_is_kept_and_one_of_nothing_is_no_decision() -> None:
    state, keeper = opened(ready=2)
    assert state.take("a", 0, now_s=0) == state.take("a", -1, now_s=0) == []
    assert not state.is_changed
    assert state.take("a", 5, now_s=0, from_offset=1) == [(1, 1, 1)] and state.is_changed
    assert again(state, keeper).counts().locked == 1
    assert not state.take("b", 5, now_s=0, from_offset=1) and not state.is_changed


# --- bounds (rule 55) ----------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are reached soon."""
    for name, many in (("DELAYED_MAX", 4), ("READY_MAX", 300), ("BLOCKED_MAX", 400)):
        monkeypatch.setattr(queue_state, name, many)
    monkeypatch.setattr(queue_state, "BLOCKS_MAX", 3)
    monkeypatch.setattr(queue_state, "LOCKS_MAX", 5)
    monkeypatch.setattr(queue_state, "LOCKS_MAX", 5)


def test_the_bounds_are_those_that_users_are_told() -> None:
    assert queue_state.LOCKS_MAX == 10_000
    assert (queue_state.DELAYED_MAX, queue_state.BLOCKED_MAX) == (100_000, 20_000)
    assert offset_states.BLOCKS_MAX == 4_096
    assert queue_state.DELAY_MS_MAX == 366 * 24 * 3600 * 1000


@pytest.mark.usefixtures("few")
def test_no_more_is_locked_than_may_be() -> None:
    state, _keeper = opened(ready=8)
    assert state.take("a", 3, now_s=0) == [(0, 2, 1)]
    assert state.take("b", 1, now_s=0) == [(3, 3, 1)]
    assert state.trouble is None and state.first_ready() == 4
    assert state.take("b", 3, now_s=0) == [(4, 4, 1)], "one more may be locked"
    assert state.first_ready() is None and not state.take("b", 1, now_s=0)
    assert (state.trouble or "").startswith("5 records are locked,")
    assert not state.ack("a", 0, [(1, 1, 1)])
    assert state.trouble is None and state.first_ready() == 5
    assert state.take("b", 3, now_s=0) == [(5, 5, 1)]


@pytest.mark.usefixtures("few")
def test_nothing_is_learned_while_as_many_wait_as_may() -> None:
    state, _keeper = opened(ready=5)
    for count in (1, 2, 3):
        state.take("a", 1, now_s=0)
        state.nack("a", 0, [(count - 1, count - 1, 1, 1000)], now_ms=0, now_s=0)
    assert state.trouble is None and state.room() == 298
    state.learn_due(3, 1)
    assert state.room() == state.room(is_listing=True) == 0
    assert (state.trouble or "").startswith("4 records are delayed,")
    assert state.take("a", 9, now_s=0) == [(4, 4, 1)], "what is known is still given out"
    assert state.due(now_ms=1, now_s=0) == 1
    assert state.room() == 299 and state.trouble is None


@pytest.mark.usefixtures("few")
def test_no_more_is_learned_than_takes_soon_ask_for_but_who_lists_sees_more() -> None:
    state, _keeper = opened(ready=1)
    assert (state.room(), state.room(is_listing=True)) == (299, 400)
    state.learn(298)
    assert (state.room(), state.room(is_listing=True)) == (1, 256)
    state.learn(299)
    assert (state.room(), state.room(is_listing=True)) == (0, 256)
    state.learn(400)
    assert (state.room(), state.room(is_listing=True)) == (0, 256)
    assert state.trouble is None


@pytest.mark.usefixtures("few")
def test_what_waits_for_earlier_ones_of_its_key_is_bounded() -> None:
    state, _keeper = opened(ready=300, ordered_by_key=True)
    assert (state.counts().blocked, state.room(), state.room(is_listing=True)) == (299, 101, 101)
    state.learn(399, [b"k"] * 100)
    assert (state.room(), state.trouble) == (1, None)
    state.learn(400, [b"k"])
    assert state.room() == 0
    assert (state.trouble or "").startswith("400 records wait for earlier ones of their keys,")
    state.learn(401, [b"k"])
    assert state.room() == 0
    state.take("a", 3, now_s=0)
    assert (state.counts().blocked, state.room(), state.trouble) == (399, 1, None)


@pytest.mark.usefixtures("few")
def test_unsettled_records_lie_in_so_many_blocks_only() -> None:
    state, _keeper = opened(ready=1)
    for number in (1, 2):
        assert state.trouble is None
        state.learn_gap(256 * number - 1)
        assert state.room(is_listing=True) == min(400, (3 - number) * 256)
        state.learn(256 * number)
    assert state.room() == state.room(is_listing=True) == 0
    assert "scattered over 3 blocks" in (state.trouble or "")
    state.purge(1)
    assert state.room() == 256 and state.trouble is None

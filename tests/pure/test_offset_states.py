"""Transitions of a queue's offsets between their states: which are legal, and what each keeps."""

from __future__ import annotations

import pytest

from rayq.core.queues.block import (
    BLOCKED,
    CLAIMED,
    DELAYED,
    DONE,
    LOCKED,
    MOVING,
    READY,
    UNKNOWN,
    UNSETTLED,
    Block,
    State,
)
from rayq.core.queues.delays import Delay
from rayq.core.queues.offset_states import IllegalTransitionError, OffsetStates

STATES: tuple[State, ...] = (UNKNOWN, *UNSETTLED, DONE)
LEGAL: dict[State, set[State]] = {
    UNKNOWN: {READY, BLOCKED, DONE},
    READY: {BLOCKED, LOCKED, DELAYED, CLAIMED, DONE, UNKNOWN},
    BLOCKED: {READY, LOCKED, DELAYED, CLAIMED, DONE, UNKNOWN},
    LOCKED: {READY, BLOCKED, DELAYED, MOVING, DONE, UNKNOWN},
    DELAYED: {READY, BLOCKED, CLAIMED, DONE, UNKNOWN},
    CLAIMED: {READY, BLOCKED, DELAYED, MOVING, DONE},
    MOVING: {READY, BLOCKED, DONE, UNKNOWN},
    DONE: set(),
}
AGAIN_BY_ITSELF = {
    *((old, new) for old in (UNKNOWN, READY, BLOCKED) for new in (READY, BLOCKED)),
    *((old, CLAIMED) for old in (READY, BLOCKED, DELAYED)),
    *((CLAIMED, new) for new in (READY, BLOCKED, DELAYED)),
}
"""Transitions that a new leader makes again, or that are not kept."""
MAY_WAIT = {
    (UNKNOWN, DONE),
    *((old, DELAYED) for old in (READY, BLOCKED)),
    *((DELAYED, new) for new in (READY, BLOCKED)),
    *((old, UNKNOWN) for old in STATES),
}
"""Transitions that are kept with the next decision."""
MASK = 0b111 << 40
OTHER = 0b1 << 60
PATHS: dict[State, list[State]] = {
    UNKNOWN: [],
    READY: [READY],
    BLOCKED: [BLOCKED],
    LOCKED: [READY, LOCKED],
    DELAYED: [READY, DELAYED],
    CLAIMED: [READY, DELAYED, CLAIMED],
    MOVING: [READY, LOCKED, MOVING],
    DONE: [DONE],
}


def move(offsets: OffsetStates, block: Block, mask: int, old: State, new: State) -> None:
    """A transition, with what goes with it."""
    if new == LOCKED:
        offsets.lock(0, block, mask, "a", (30, 10))
    elif new == DELAYED and old != CLAIMED:
        for index in (40, 41, 42):
            offsets.delay(0, block, mask & 1 << index, old, Delay(5_000))
    else:
        offsets.transition(0, block, mask, old, new, "a")


def in_state(state: State) -> tuple[OffsetStates, Block]:
    """Three offsets in a state, and one that is ready."""
    offsets = OffsetStates(0, ordered_by_key=False)
    offsets.learned = 256
    block = offsets.blocks[0] = Block()
    offsets.transition(0, block, OTHER, UNKNOWN, READY)
    old: State = UNKNOWN
    for new in PATHS[state]:
        move(offsets, block, MASK, old, new)
        old = new
    offsets.changed.clear()
    offsets.is_decided = False
    return offsets, block


def sets_of(block: Block) -> dict[State, int]:
    return {state: getattr(block, state) for state in (*UNSETTLED, DONE)}


@pytest.mark.parametrize("old", STATES)
@pytest.mark.parametrize("new", STATES)
def test_a_legal_transition_moves_offsets_and_counters_and_any_other_is_refused(
    old: State, new: State
) -> None:
    offsets, block = in_state(old)
    sets, counts = sets_of(block), dict(offsets.counts)
    if new not in LEGAL[old]:
        with pytest.raises(IllegalTransitionError, match=f"3 offsets from 40 .* {old} to {new}"):
            offsets.transition(0, block, MASK, old, new)
        assert (sets_of(block), offsets.counts) == (sets, counts)
        assert not offsets.changed and not offsets.is_decided
        return
    move(offsets, block, MASK, old, new)
    expected = {state: bits & ~MASK | (MASK if state == new else 0) for state, bits in sets.items()}
    assert sets_of(block) == expected
    assert offsets.counts == {state: expected[state].bit_count() for state in UNSETTLED}
    assert bool(block.holders) == (new == LOCKED), "a holder goes with its lock"
    assert bool(block.due) == (new == DELAYED or (old, new) == (DELAYED, CLAIMED))
    pair = old, new
    assert bool(offsets.changed) == (pair not in AGAIN_BY_ITSELF)
    assert offsets.is_decided == (pair not in AGAIN_BY_ITSELF | MAY_WAIT)
    if new == READY:
        assert list(offsets.ready(0, 256)) == [40, 41, 42, 60]


@pytest.mark.parametrize("old", UNSETTLED)
def test_offsets_that_are_in_another_state_are_refused(old: State) -> None:
    offsets, block = in_state(old)
    sets, counts = sets_of(block), dict(offsets.counts)
    for wrong in (MASK | 0b1, 0b1):
        with pytest.raises(IllegalTransitionError, match=f"{old} to {DONE}"):
            offsets.transition(0, block, wrong, old, DONE)
    assert (sets_of(block), offsets.counts) == (sets, counts)

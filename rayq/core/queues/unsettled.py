"""Listing of a queue's unsettled records in one partition, page by page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from rayq.core.queues.block import (
    BLOCK_BITS,
    DELAYED,
    LOCKED,
    MOVING,
    READY,
    Block,
    bits_of,
    lowest,
)
from rayq.core.queues.offset_states import OffsetStates


class Unsettled(msgspec.Struct, array_like=True, frozen=True):
    """An unsettled record."""

    offset: int
    state: str
    """`READY` (a blocked one too), `LOCKED`, `DELAYED` or `MOVING` (a claimed one too)."""
    count: int
    holder: str | None
    due_ms: int | None
    """End of a delay by the wall clock; for a lock, the remaining time in ms."""


def page_of(
    offsets: OffsetStates,
    from_offset: int,
    states: Iterable[str],
    count_max: int,
    *,
    now_ms: int,
    now_s: float,
) -> tuple[list[Unsettled], int | None]:
    """One page of the unsettled records in [from_offset, learned), and the start of the next one.
    No `states`: all."""
    asked = set(states) or {READY, LOCKED, DELAYED, MOVING}
    page: list[Unsettled] = []
    for number in sorted(
        number for number in offsets.blocks if number >= from_offset >> BLOCK_BITS
    ):
        block = offsets.blocks[number]
        base = number << BLOCK_BITS
        mask = (block.ready | block.blocked) if READY in asked else 0
        mask |= block.locked if LOCKED in asked else 0
        mask |= block.delayed if DELAYED in asked else 0
        mask |= (block.moving | block.claimed) if MOVING in asked else 0
        if base < from_offset:
            mask = mask >> (from_offset - base) << (from_offset - base)
        listed = lowest(mask, count_max - len(page))
        page += _unsettled(offsets, block, base, listed, now_ms, now_s)
        if listed != mask:
            behind = mask ^ listed
            return page, base + (behind & -behind).bit_length() - 1
    return page, None


def _unsettled(
    offsets: OffsetStates, block: Block, base: int, mask: int, now_ms: int, now_s: float
) -> Iterator[Unsettled]:
    counts, holders = block.counts_by_index(mask), block.holders_by_index(mask)
    end_ticks = block.end_ticks_by_index(mask & block.locked)
    for index in bits_of(mask):
        bit, offset, count = 1 << index, base + index, counts.get(index, 0)
        if block.locked & bit:
            end = end_ticks.get(index)
            left_ms = None if end is None else offsets.lock_times.left_ms(end, now_s)
            yield Unsettled(offset, LOCKED, count, holders.get(index), left_ms)
        elif block.delayed & bit:
            due_ms = block.due[index].due_at_ms(now_ms=now_ms, now_s=now_s)
            yield Unsettled(offset, DELAYED, count, None, due_ms)
        else:
            is_ready = (block.ready | block.blocked) & bit
            yield Unsettled(offset, READY if is_ready else MOVING, count, None, None)

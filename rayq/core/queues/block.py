"""Block of 256 offsets of a queue's partition: the state and the delivery count of each.

Sets of offsets are integers, with bit i for the i-th offset, so that changing many costs as little
as changing one. `OffsetStates` says what the states mean, and is the only one that changes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeVar

from rayq.core.queues.delays import Delay

T = TypeVar("T")

State = Literal["unknown", "ready", "blocked", "locked", "delayed", "claimed", "moving", "done"]
UNKNOWN: Final = "unknown"
READY: Final = "ready"
BLOCKED: Final = "blocked"
LOCKED: Final = "locked"
DELAYED: Final = "delayed"
CLAIMED: Final = "claimed"
MOVING: Final = "moving"
DONE: Final = "done"
UNSETTLED: tuple[State, ...] = (READY, BLOCKED, LOCKED, DELAYED, CLAIMED, MOVING)

BLOCK_BITS = 8
BLOCK_OFFSETS = 1 << BLOCK_BITS
LAST_INDEX = BLOCK_OFFSETS - 1
ALL = (1 << BLOCK_OFFSETS) - 1


def mask_of(first: int, last: int) -> int:
    """The bits of [first, last]."""
    return (2 << last) - (1 << first)


def runs_of(mask: int) -> Iterator[tuple[int, int]]:
    """`(first, last)` of each run of bits, ascending."""
    while mask:
        low = mask & -mask
        # Adding the lowest bit carries through its run: what changes is the run and the bit behind.
        end = (mask ^ (mask + low)).bit_length() - 1
        yield low.bit_length() - 1, end - 1
        mask = mask >> end << end


def bits_of(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def lowest(mask: int, count: int) -> int:
    """The lowest `count` bits of it."""
    if count == 1:
        return mask & -mask
    if mask.bit_count() <= count:
        return mask
    bits = 0
    for first, last in runs_of(mask):
        if count <= last - first:
            return bits | mask_of(first, first + count - 1) if count else bits
        bits |= mask_of(first, last)
        count -= last - first + 1
    return bits


def raise_counts(counts: dict[int, int], mask: int) -> list[tuple[int, int]]:
    """Adds one to the count of each bit of `mask`; counts of 0 are not in `counts`. Returns
    `(new count, bits)`."""
    raised = []
    fresh = mask
    for count in sorted(counts, reverse=True):
        again = counts[count] & fresh
        if again:
            fresh ^= again
            left = counts[count] ^ again
            if left:
                counts[count] = left
            else:
                del counts[count]
            counts[count + 1] = counts.get(count + 1, 0) | again
            raised.append((count + 1, again))
    if fresh:
        counts[1] = counts.get(1, 0) | fresh
        raised.append((1, fresh))
    return raised


def count_of(counts: dict[int, int], bit: int) -> int:
    for count, mask in counts.items():
        if mask & bit:
            return count
    return 0


def _by_index(bits_by_value: Mapping[T, int], mask: int) -> dict[int, T]:
    """Maps many offsets at once to their values: a block may have as many values as offsets."""
    return {
        index: value for value, bits in bits_by_value.items() for index in bits_of(bits & mask)
    }


class Block:
    """An offset that was learned is in one of `ready` to `done`."""

    __slots__ = (
        "blocked",
        "claimed",
        "counts",
        "delayed",
        "done",
        "due",
        "excused",
        "holders",
        "is_listed",
        "locked",
        "moving",
        "ready",
        "timed",
        "timers",
        "unbegun",
    )

    def __init__(self) -> None:
        self.ready = 0
        self.blocked = 0
        self.locked = 0
        self.delayed = 0
        self.claimed = 0
        self.moving = 0
        self.done = 0
        self.counts: dict[int, int] = {}
        """Delivery count -> bits. Bits of done offsets may stay."""
        self.excused: dict[int, int] = {}
        """Deliveries that do not count as failures."""
        self.unbegun = 0
        """Locked offsets whose consumer reports when it begins them: until then the delivery does
        not count."""
        self.holders: dict[str, int] = {}
        self.timers: dict[tuple[int, int], int] = {}
        """`(tick of the end, tick when taken)` -> bits; those that are not locked any more stay."""
        self.timed = 0
        """All bits that are in `timers`."""
        self.due: dict[int, Delay] = {}
        """Delays by index, of delayed offsets, and of claimed ones that were delayed."""
        self.is_listed = False
        """True if `OffsetStates` has it in its list of blocks with ready offsets."""

    def lock(self, mask: int, holder: str, timer: tuple[int, int]) -> list[tuple[int, int]]:
        """Notes the holder, the timer and the delivery of locked offsets. Returns
        `(count, bits)`."""
        self.holders[holder] = self.holders.get(holder, 0) | mask
        self.set_timer(mask, timer)
        return raise_counts(self.counts, mask)

    def set_timer(self, mask: int, timer: tuple[int, int]) -> None:
        if self.timed & mask:
            for other, bits in list(self.timers.items()):
                left = bits & ~mask
                if left:
                    self.timers[other] = left
                else:
                    del self.timers[other]
        self.timers[timer] = self.timers.get(timer, 0) | mask
        self.timed |= mask

    def move_timer(self, mask: int, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Gives the offsets that have the old timer the new one."""
        left = self.timers[old] & ~mask
        if left:
            self.timers[old] = left
        else:
            del self.timers[old]
        self.timers[new] = self.timers.get(new, 0) | mask

    def unlock(self, mask: int, holder: str) -> None:
        """Forgets who has the offsets. `holder` is the likely holder."""
        if self.unbegun:
            self.unbegun &= ~mask
        holders = self.holders
        held = holders.get(holder, 0)
        if held & mask == mask:
            if held == mask:
                del holders[holder]
            else:
                holders[holder] = held ^ mask
            return
        for name, held in list(holders.items()):
            left = held & ~mask
            if left == held:
                continue
            if left:
                holders[name] = left
            else:
                del holders[name]
            mask &= ~held
            if not mask:
                return

    def forget(self, mask: int) -> None:
        """Forgets these offsets, as if they had never been seen."""
        keep = ~mask
        self.ready &= keep
        self.blocked &= keep
        self.locked &= keep
        self.unbegun &= keep
        self.delayed &= keep
        self.claimed &= keep
        self.moving &= keep
        self.done &= keep
        self.counts = {count: bits & keep for count, bits in self.counts.items() if bits & keep}
        self.excused = {count: bits & keep for count, bits in self.excused.items() if bits & keep}
        self.holders = {holder: bits & keep for holder, bits in self.holders.items() if bits & keep}
        for index in list(self.due):
            if mask >> index & 1:
                del self.due[index]

    def state_of(self, bit: int) -> State:
        """The state of an unsettled offset."""
        return next(state for state in UNSETTLED if getattr(self, state) & bit)

    def held(self, holder: str, count: int) -> int:
        """The offsets that the holder has locked by the delivery with this count."""
        return self.locked & self.counts.get(count, 0) & self.holders.get(holder, 0)

    def counts_by_index(self, mask: int) -> dict[int, int]:
        """Delivery count of each of these offsets that was given out."""
        return _by_index(self.counts, mask)

    def holders_by_index(self, mask: int) -> dict[int, str]:
        return _by_index(self.holders, mask)

    def end_ticks_by_index(self, mask: int) -> dict[int, int]:
        """End ticks of the locks of these offsets."""
        return {index: end for index, (end, _) in _by_index(self.timers, mask).items()}

    def holder_of(self, bit: int) -> str | None:
        for holder, bits in self.holders.items():
            if bits & bit:
                return holder
        return None

    def end_tick_of(self, bit: int) -> int | None:
        for (end, _taken), bits in self.timers.items():
            if bits & bit:
                return end
        return None

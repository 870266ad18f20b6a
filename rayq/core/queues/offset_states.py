"""State of each offset of a queue's partition, and the transitions from one state to another.

`QueueState` decides; this keeps the books. Kafka's share groups are the model, whose states are on
the right:

    unknown   not learned from the log yet, or lost by it
    ready     may be given out                                          AVAILABLE
    blocked   an earlier record of its key is unsettled                 AVAILABLE
    delayed   waits for its time                                        AVAILABLE
    locked    a consumer has it                                         ACQUIRED
    claimed   an operator's move is about to take it; this is not kept
    moving    goes to the dead letters, or where an operator sends it
    done      settled, or no record for consumers         ACKNOWLEDGED, ARCHIVED

`TRANSITIONS` lists the legal ones, and `OffsetStates.transition` is the only way from one state to
another. It keeps the bit sets, the counters, and what goes with a state (holders, delays).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rayq.core.queues.block import (
    ALL,
    BLOCK_BITS,
    BLOCK_OFFSETS,
    BLOCKED,
    CLAIMED,
    DELAYED,
    DONE,
    LAST_INDEX,
    LOCKED,
    MOVING,
    READY,
    UNKNOWN,
    UNSETTLED,
    Block,
    State,
    bits_of,
    mask_of,
    runs_of,
)
from rayq.core.queues.delays import Delay, DelayTimes
from rayq.core.queues.key_order import KeyOrder
from rayq.core.queues.lock_times import LockTimes
from rayq.core.queues.number_runs import NumberRuns
from rayq.core.queues.records import Kept
from rayq.errors import CorruptBatchError

BLOCKS_MAX = 4_096
"""Maximum number of blocks with unsettled records; beyond it no more records are learned."""
_BLOCKS_READ_MAX = 16 * BLOCKS_MAX
"""Maximum number of kept blocks; more are damage, since the leader stays near `BLOCKS_MAX`."""


class Effect(NamedTuple):
    is_kept: bool
    """True if the record of the block changes by it."""
    is_decision: bool
    """True if the record must be kept before anybody hears of it."""


def _pairs(olds: Iterable[State], news: Iterable[State]) -> list[tuple[State, State]]:
    return [(old, new) for old in olds for new in news if old != new]


_FREE: tuple[State, ...] = READY, BLOCKED
_WAITING: tuple[State, ...] = READY, BLOCKED, DELAYED
TRANSITIONS: dict[tuple[State, State], Effect] = dict.fromkeys(
    # The next leader finds out by itself.
    [
        *_pairs((UNKNOWN, *_FREE), _FREE),
        *_pairs(_WAITING, (CLAIMED,)),
        *_pairs((CLAIMED,), _WAITING),
    ],
    Effect(False, False),
)
TRANSITIONS |= dict.fromkeys(
    # The log and the clock say so again.
    [
        (UNKNOWN, DONE),
        *_pairs(_FREE, (DELAYED,)),
        *_pairs((DELAYED,), _FREE),
        *_pairs((*_WAITING, LOCKED, MOVING), (UNKNOWN,)),
    ],
    Effect(True, False),
)
TRANSITIONS |= dict.fromkeys(
    [
        *_pairs(_FREE, (LOCKED,)),
        *_pairs((LOCKED,), (*_WAITING, MOVING)),
        (CLAIMED, MOVING),
        *_pairs((MOVING,), _FREE),
        *_pairs(UNSETTLED, (DONE,)),
    ],
    Effect(True, True),
)
_HAVE_DUE = DELAYED, CLAIMED
"""States that have an entry in `Block.due`. Claimed ones have it if they were delayed."""


class IllegalTransitionError(Exception):
    """A bug of this module's callers. It is not a `RayqError`, so it ends the opening of the queue,
    whose state cannot be trusted any more and is loaded again from what is kept."""

    def __init__(self, number: int, mask: int, old: State, new: State) -> None:
        first = (number << BLOCK_BITS) + (mask & -mask).bit_length() - 1
        super().__init__(
            f"{mask.bit_count()} offsets from {first} on cannot go from {old} to {new}."
        )


class OffsetStates:
    """The offsets of one queue in one partition, under one leader.

    All blocks with offsets of [start, learned) are either in `blocks` or, once all their offsets
    are done, in `done_blocks`.
    """

    def __init__(self, start_offset: int, *, ordered_by_key: bool) -> None:
        self.start_offset = start_offset
        """Offset below which everything is settled, or removed by retention."""
        self.learned = start_offset
        """Offset below which records are known; the leader learns on from here. Kept."""
        self.epochs: list[tuple[int, int]] = []
        """`(leader epoch, its first offset)` of the log in [start, learned), ascending; the first
        may begin below the start. Kept: the next leader sees by it what the log lost (rule 51)."""
        self.blocks: dict[int, Block] = {}
        self.done_blocks = NumberRuns()
        self.counts: dict[State, int] = dict.fromkeys(UNSETTLED, 0)
        """Number of offsets in each unsettled state."""
        self.keys = KeyOrder() if ordered_by_key else None
        self.keys_wanted = NumberRuns()
        """Known records whose keys are to be told."""
        self.lock_times = LockTimes()
        self.delays = DelayTimes()
        self.changed: set[int] = set()
        """Blocks that changed since the state was last kept."""
        self.is_decided = False
        """True if a decision was made since the state was last kept."""
        self._listed: list[int] = []
        """Blocks that have ready offsets, ascending; some may have none any more."""

    @classmethod
    def restore(
        cls, kept: Kept, *, ordered_by_key: bool, timeout_s: float, now_ms: int, now_s: float
    ) -> OffsetStates:
        """Restores the offsets from what is kept. Each lock lasts for `timeout_s` from now on.
        Raises CorruptBatchError."""
        head = kept.head
        offsets = cls(head.start_offset, ordered_by_key=ordered_by_key)
        offsets.learned, offsets.epochs = head.learned, head.epochs
        offsets.done_blocks = NumberRuns(head.done_blocks)
        first, end = head.start_offset >> BLOCK_BITS, -(-head.learned // BLOCK_OFFSETS)
        if end - first - offsets.done_blocks.count() > _BLOCKS_READ_MAX:
            raise CorruptBatchError(
                f"The kept state of a queue goes from {head.start_offset} to {head.learned}, which "
                f"is more than {_BLOCKS_READ_MAX} blocks."
            )
        for number, block in kept.blocks.items():
            # Blocks outside are leftovers of an interrupted write.
            if first <= number < end and number not in offsets.done_blocks:
                offsets.blocks[number] = block
            else:
                offsets.changed.add(number)
        for number in offsets._missing(first, end):
            offsets.blocks[number] = Block()
        moving = [*kept.failed]
        moving += [record.offset for move in kept.moves.values() for record in move.records]
        for offset in moving:
            moved = offsets.blocks.get(offset >> BLOCK_BITS)
            if moved is not None:
                moved.moving |= 1 << (offset & LAST_INDEX)
        timer = offsets.lock_times.timer(now_s, timeout_s)
        for number in sorted(offsets.blocks):
            block = offsets.blocks[number]
            offsets._restore_block(number, block, timer)
            for index, delay in block.due.items():
                taken_up = block.due[index] = delay.taken_up(now_ms=now_ms, now_s=now_s)
                offsets.delays.add((number << BLOCK_BITS) + index, taken_up)
        offsets._advance()
        return offsets

    def _missing(self, first: int, end: int) -> Iterator[int]:
        number = first
        while number < end:
            number = self.done_blocks.last_of_run(number) + 1
            if number < end and number not in self.blocks:
                yield number
            number += 1

    def _restore_block(self, number: int, block: Block, timer: tuple[int, int]) -> None:
        base = number << BLOCK_BITS
        if base < self.start_offset:
            below = mask_of(0, min(LAST_INDEX, self.start_offset - base - 1))
            block.forget(below)
            block.done |= below
        if base + LAST_INDEX >= self.learned:
            block.forget(mask_of(self.learned - base, LAST_INDEX))
            known = mask_of(0, self.learned - base - 1)
        else:
            known = ALL
        block.moving &= ~(block.done | block.locked | block.delayed)
        block.ready = known & ~(block.done | block.locked | block.delayed | block.moving)
        if block.locked:
            block.set_timer(block.locked, timer)
            self.lock_times.watch(timer[0], number)
        if self.keys is not None:
            # Which of these are ready is known once their keys are.
            for first, last in runs_of(known & ~block.done):
                self.keys_wanted.add(base + first, base + last)
        for state in UNSETTLED:
            self.counts[state] += getattr(block, state).bit_count()
        if block.ready:
            block.is_listed = True
            self._listed.append(number)

    # --- from state to state ---------------------------------------------------------------------

    def transition(
        self, number: int, block: Block, mask: int, old: State, new: State, holder: str = ""
    ) -> None:
        """Moves the offsets of `mask`, which are all `old`, to the state `new`. `holder` is the
        likely holder of locked ones. Raises IllegalTransitionError."""
        effect = TRANSITIONS.get((old, new))
        left: int = 0 if old == UNKNOWN else getattr(block, old) ^ mask
        if effect is None or left & mask:
            raise IllegalTransitionError(number, mask, old, new)
        many = mask.bit_count()
        if old != UNKNOWN:
            setattr(block, old, left)
            self.counts[old] -= many
            if old == LOCKED:
                block.unlock(mask, holder)
            elif block.due and old in _HAVE_DUE and new not in _HAVE_DUE:
                for index in bits_of(mask):
                    block.due.pop(index, None)
        if new == DONE:
            block.done |= mask
        elif new != UNKNOWN:
            setattr(block, new, getattr(block, new) | mask)
            self.counts[new] += many
            if new == READY and not block.is_listed:
                block.is_listed = True
                insort(self._listed, number)
        is_kept, is_decision = effect
        if is_kept:
            self.changed.add(number)
            if is_decision:
                self.is_decided = True

    def free(self, number: int, block: Block, mask: int, old: State, holder: str = "") -> None:
        """Makes offsets ready, or blocked where an earlier record of their key is unsettled."""
        keys = self.keys
        if keys is not None:
            base = number << BLOCK_BITS
            behind = 0
            for index in bits_of(mask):
                if not keys.is_first(base + index):
                    behind |= 1 << index
            if behind:
                self.transition(number, block, behind, old, BLOCKED, holder)
                mask ^= behind
        if mask:
            self.transition(number, block, mask, old, READY, holder)

    def lock(
        self, number: int, block: Block, mask: int, holder: str, timer: tuple[int, int]
    ) -> list[tuple[int, int]]:
        """Locks ready and blocked offsets. Returns `(delivery count, bits)`."""
        blocked = block.blocked & mask
        if blocked:
            self.transition(number, block, blocked, BLOCKED, LOCKED)
        if blocked != mask:
            self.transition(number, block, mask ^ blocked, READY, LOCKED)
        if timer not in block.timers:
            self.lock_times.watch(timer[0], number)
        return block.lock(mask, holder, timer)

    def delay(
        self, number: int, block: Block, bit: int, old: State, delay: Delay, holder: str = ""
    ) -> None:
        self.transition(number, block, bit, old, DELAYED, holder)
        index = bit.bit_length() - 1
        block.due[index] = delay
        self.delays.add((number << BLOCK_BITS) + index, delay)

    def finish(
        self, number: int, block: Block, mask: int, old: State | None = None, holder: str = ""
    ) -> None:
        """Makes offsets done, which are `old`; None: in any unsettled state. The block may be
        forgotten by that."""
        if old is not None:
            self.transition(number, block, mask, old, DONE, holder)
        else:
            self._move_all(number, block, mask, DONE)
        if self.keys is not None:
            base = number << BLOCK_BITS
            for index in bits_of(mask):
                first = self.keys.remove(base + index)
                if first is not None:
                    self._unblock(first)
        start = self.start_offset
        if number == start >> BLOCK_BITS:
            if block.done >> (start & LAST_INDEX) & 1:
                self._advance()
        elif block.done == ALL:
            del self.blocks[number]
            self.done_blocks.add(number, number)

    def _move_all(self, number: int, block: Block, mask: int, new: State) -> None:
        """Moves the unsettled offsets of `mask` to `new`."""
        for old in UNSETTLED:
            bits: int = getattr(block, old) & mask
            if bits:
                self.transition(number, block, bits, old, new)

    def _unblock(self, offset: int) -> None:
        """Makes `offset` ready if it is blocked, as nothing of its key is before it any more."""
        number, bit = offset >> BLOCK_BITS, 1 << (offset & LAST_INDEX)
        block = self.blocks[number]
        if block.blocked & bit:
            self.transition(number, block, bit, BLOCKED, READY)

    def tell_keys(self, first: int, keys: Sequence[bytes | None]) -> None:
        """Takes the keys of the known records from `first` on: see `QueueState.tell_keys`."""
        assert self.keys is not None
        for offset, key in enumerate(keys, first):
            if key is None or offset not in self.keys_wanted:
                continue
            self.keys.add(offset, key)
            number, bit = offset >> BLOCK_BITS, 1 << (offset & LAST_INDEX)
            block = self.blocks[number]
            if block.ready & bit and not self.keys.is_first(offset):
                self.transition(number, block, bit, READY, BLOCKED)
        self.keys_wanted.remove_below(first + len(keys))

    # --- the known offsets -----------------------------------------------------------------------

    def learn(self, last: int, keys: Sequence[bytes | None] | None) -> None:
        """Learns the offsets from `learned` up to and including `last` as ready or blocked."""
        first, self.learned = self.learned, max(self.learned, last + 1)
        if self.keys is not None:
            assert keys is not None and len(keys) == last + 1 - first
            for offset, key in enumerate(keys, first):
                if key is not None:
                    self.keys.add(offset, key)
        for number in range(first >> BLOCK_BITS, (last >> BLOCK_BITS) + 1):
            base = number << BLOCK_BITS
            mask = mask_of(max(0, first - base), min(LAST_INDEX, last - base))
            self.free(number, self._block_to_learn(number), mask, UNKNOWN)

    def learn_done(self, last: int) -> None:
        """Learns the offsets from `learned` up to and including `last` as done."""
        first, self.learned = self.learned, max(self.learned, last + 1)
        whole_first, whole_end = -(-first // BLOCK_OFFSETS), (last + 1) >> BLOCK_BITS
        if whole_first < whole_end:
            self.done_blocks.add(whole_first, whole_end - 1)
        # Both ends are there before the start passes the first of them.
        ends = {
            number: self._block_to_learn(number)
            for number in (first >> BLOCK_BITS, last >> BLOCK_BITS)
            if first <= last and not whole_first <= number < whole_end
        }
        for number, block in ends.items():
            base = number << BLOCK_BITS
            mask = mask_of(max(0, first - base), min(LAST_INDEX, last - base))
            self.finish(number, block, mask, UNKNOWN)
        self._advance()

    def _block_to_learn(self, number: int) -> Block:
        block = self.blocks.get(number)
        if block is None:
            block = self.blocks[number] = Block()
            if number == self.start_offset >> BLOCK_BITS:
                block.done = (1 << (self.start_offset & LAST_INDEX)) - 1
        return block

    def _advance(self) -> None:
        """Moves the start past settled offsets."""
        start = self.start_offset
        while start < self.learned:
            number = start >> BLOCK_BITS
            block = self.blocks.get(number)
            if block is None:
                start = (self.done_blocks.last_of_run(number) + 1) << BLOCK_BITS
                continue
            if block.done != ALL:
                undone = ~block.done & ALL
                start = (number << BLOCK_BITS) + (undone & -undone).bit_length() - 1
                break
            del self.blocks[number]
            self.changed.add(number)
            start = (number + 1) << BLOCK_BITS
        self.start_offset = start
        self.done_blocks.remove_below(start >> BLOCK_BITS)
        while len(self.epochs) > 1 and self.epochs[1][1] <= start:
            del self.epochs[0]

    def drop_below(self, offset: int) -> int:
        """Makes all offsets below done, also those that were not learned. Returns the number of
        unsettled ones."""
        before = sum(self.counts.values())
        for number, block, mask in self.parts(self.start_offset, offset - 1):
            self.finish(number, block, mask & ~block.done)
        if offset > self.learned:
            self.learn_done(offset - 1)
        self.keys_wanted.remove_below(offset)
        return before - sum(self.counts.values())

    def drop_from(self, offset: int) -> None:
        """Forgets `offset` and everything above, as if it had not been learned."""
        cut = offset >> BLOCK_BITS
        if cut in self.done_blocks and offset & LAST_INDEX:
            self.blocks[cut] = Block()
            self.blocks[cut].done = ALL
        self.done_blocks.remove_from(cut)
        for number in [number for number in self.blocks if number >= cut]:
            block = self.blocks[number]
            index = max(0, offset - (number << BLOCK_BITS))
            lost = mask_of(index, LAST_INDEX)
            self._move_all(number, block, lost, UNKNOWN)
            block.forget(lost)
            self.changed.add(number)
            if not index:
                del self.blocks[number]
        self._listed = [number for number in self._listed if number in self.blocks]
        self.keys_wanted.remove_from(offset)
        self.learned = min(self.learned, offset)
        self.start_offset = min(self.start_offset, offset)
        self.epochs = [epoch for epoch in self.epochs if epoch[1] < offset]

    # --- looking ---------------------------------------------------------------------------------

    def parts(self, first: int, last: int) -> Sequence[tuple[int, Block, int]]:
        """`(number, block, bits)` of the known offsets of [first, last] that lie in blocks with
        unsettled ones."""
        if first < self.start_offset:
            first = self.start_offset
        if last >= self.learned:
            last = self.learned - 1
        if first > last:
            return ()
        low, high = first >> BLOCK_BITS, last >> BLOCK_BITS
        if low == high:
            block = self.blocks.get(low)
            if block is None:
                return ()
            return ((low, block, (2 << (last & LAST_INDEX)) - (1 << (first & LAST_INDEX))),)
        numbers: Sequence[int] = range(low, high + 1)
        if high - low > len(self.blocks):
            numbers = sorted(number for number in self.blocks if low <= number <= high)
        parts = []
        for number in numbers:
            block = self.blocks.get(number)
            if block is not None:
                base = number << BLOCK_BITS
                mask = mask_of(max(0, first - base), min(LAST_INDEX, last - base))
                parts.append((number, block, mask))
        return parts

    def next_ready(self, first: int, end: int) -> tuple[int, Block, int] | None:
        """`(number, block, bits)` of the ready offsets of [first, end) in the first block that has
        some."""
        listed = self._listed
        at = bisect_left(listed, first >> BLOCK_BITS)
        while at < len(listed):
            number = listed[at]
            block = self.blocks.get(number)
            if block is None or not block.ready:
                if block is not None:
                    block.is_listed = False
                del listed[at]
                continue
            base, bits = number << BLOCK_BITS, block.ready
            if base >= end:
                return None
            if base < first:
                bits = bits >> (first - base) << (first - base)
            if base + LAST_INDEX >= end:
                bits &= (1 << (end - base)) - 1
            if bits:
                return number, block, bits
            at += 1
        return None

    def ready(self, first: int, end: int) -> Iterator[int]:
        """The ready offsets of [first, end), ascending. They may be locked meanwhile."""
        while (found := self.next_ready(first, end)) is not None:
            number, _, bits = found
            for index in bits_of(bits):
                yield (number << BLOCK_BITS) + index
            first = (number + 1) << BLOCK_BITS

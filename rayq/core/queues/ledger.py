"""The books of a queue in one partition, and the transitions of an offset from state to state.

`QueueState` decides; the ledger holds the blocks of offsets, the lines of keys, the delays, and the
changes since the state was last kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rayq.config import QueueConfig
from rayq.core.large.holds import LargeHolds
from rayq.core.queues.block import (
    ALL,
    BLOCK_BITS,
    BLOCK_OFFSETS,
    LAST_INDEX,
    Block,
    bits_of,
    mask_of,
    runs_of,
)
from rayq.core.queues.delays import Delay, DelayTimes
from rayq.core.queues.kept_queues import KeptRecord
from rayq.core.queues.key_order import KeyOrder
from rayq.core.queues.lock_times import TICKS_A_SECOND, LockTimes
from rayq.core.queues.moves import Dying, Move
from rayq.core.queues.number_runs import NumberRuns
from rayq.core.queues.records import (
    HEAD,
    block_record,
    decode,
    dying_record,
    head_record,
    move_record,
)
from rayq.errors import CorruptBatchError

BLOCKS_MAX = 4_096
"""Maximum number of blocks with unsettled records; beyond it no more records are learned."""
PASSED_AT_ONCE = 10_000
"""Maximum number of them in a write."""
_BLOCKS_READ_MAX = 16 * BLOCKS_MAX
"""Maximum number of kept blocks; more are damage, since the leader stays near `BLOCKS_MAX`."""


class Counts(NamedTuple):
    ready: int
    blocked: int
    """Number of records that are not ready since an earlier record of the key is unsettled."""
    locked: int
    delayed: int
    moving: int
    done: int
    """Number of offsets that are settled at or above the start, including gaps."""


class QueueLedger:
    """The books of one queue in one partition, under one leader.

    All blocks with offsets of [start, learned) are either in `_blocks` or, once all their offsets
    are done, in `_done_blocks`.
    """

    def __init__(self, config: QueueConfig, state_epoch: int, start_offset: int) -> None:
        self.config = config
        """The queue's config. It may be replaced at any time, except `ordered_by_key`."""
        self.state_epoch = state_epoch
        self.start_offset = start_offset
        """Offset below which everything is settled, or removed by retention."""
        self.learned = start_offset
        """Offset below which records are known; the leader learns on from here. Kept."""
        self.epochs: list[tuple[int, int]] = []
        """`(leader epoch, its first offset)` of the log in [start, learned), ascending; the first
        may begin below the start. Kept: the next leader sees by it what the log lost (rule 51)."""
        self.holds: LargeHolds | None = None
        """Holds of a queue that its topic's retention waits for: the learner tells it of large
        values. Kept."""
        self.dead = 0
        """Records that became dead letters, or were dropped instead, under this leader."""
        self.expired = 0
        """Records that retention removed before they were settled, under this leader."""
        self._blocks: dict[int, Block] = {}
        self._done_blocks = NumberRuns()
        self._listed: list[int] = []
        """Blocks that have ready offsets, ascending; some may have none any more."""
        self._ready = 0
        self._blocked = 0
        self._locked = 0
        self._delayed = 0
        self._keys = KeyOrder() if config.ordered_by_key else None
        self._keys_wanted = NumberRuns()
        self._times = LockTimes()
        self._timer_of_tick: tuple[int, int] | None = None
        self._delays = DelayTimes()
        self._dying: dict[int, Dying] = {}
        self._moves: dict[int, Move] = {}
        self._kept: set[int] = set()
        """Blocks that the keeper has."""
        self._kept_head = b""
        self._changed: set[int] = set()
        self._changed_dying: set[int] = set()
        self._passed_dying: deque[int] = deque()
        """Dying records that the start has passed, and that the keeper still has. They no longer
        mean anything, so their tombstones may wait: retention may remove a million at once."""
        self._changed_moves: set[int] = set()
        self._is_decided = False
        self.given = 0
        """Number of records that were locked since the last `changes`."""

    # --- opening ---------------------------------------------------------------------------------

    def _restore(self, records: Iterable[KeptRecord], *, now_ms: int, now_s: float) -> bool:
        records = list(records)
        kept = decode(records)
        if kept is None:
            return False
        head = kept.head
        self.state_epoch = head.state_epoch
        self.start_offset = head.start_offset
        self.learned = head.learned
        self.epochs = head.epochs
        self.holds = None if head.holds is None else LargeHolds(head.holds)
        self._done_blocks = NumberRuns(head.done_blocks)
        self._kept = set(kept.blocks)
        first, end = head.start_offset >> BLOCK_BITS, -(-head.learned // BLOCK_OFFSETS)
        if end - first - self._done_blocks.count() > _BLOCKS_READ_MAX:
            raise CorruptBatchError(
                f"The kept state of a queue goes from {head.start_offset} to {head.learned}, which "
                f"is more than {_BLOCKS_READ_MAX} blocks."
            )
        for number, block in kept.blocks.items():
            # Blocks outside are leftovers of an interrupted write.
            if first <= number < end and number not in self._done_blocks:
                self._blocks[number] = block
            else:
                self._changed.add(number)
        self._dying = {
            offset: dying for offset, dying in kept.dying.items() if self._is_known(offset)
        }
        self._changed_dying = set(kept.dying) - set(self._dying)
        self._moves = kept.moves
        moving = [*self._dying]
        moving += [record.offset for move in self._moves.values() for record in move.records]
        for number in self._missing(first, end):
            self._blocks[number] = Block()
        for offset in moving:
            at = self._blocks.get(offset >> BLOCK_BITS)
            if at is not None and self._is_known(offset):
                at.moving |= 1 << (offset & LAST_INDEX)
        timer = self._timer(now_s)
        for number in sorted(self._blocks):
            block = self._blocks[number]
            self._restore_block(number, block, timer)
            for index, delay in block.due.items():
                taken_up = block.due[index] = delay.taken_up(now_ms=now_ms, now_s=now_s)
                self._delays.add((number << BLOCK_BITS) + index, taken_up)
        self._kept_head = next(value or b"" for key, value in records if key == HEAD)
        self._advance()
        return True

    def _is_known(self, offset: int) -> bool:
        return self.start_offset <= offset < self.learned

    def _missing(self, first: int, end: int) -> Iterator[int]:
        number = first
        while number < end:
            number = self._done_blocks.last_of_run(number) + 1
            if number < end and number not in self._blocks:
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
            self._times.watch(timer[0], number)
        if self._keys is not None:
            # Which of these are ready is known once their keys are.
            for first, last in runs_of(known & ~block.done):
                self._keys_wanted.add(base + first, base + last)
        self._ready += block.ready.bit_count()
        self._locked += block.locked.bit_count()
        self._delayed += block.delayed.bit_count()
        self._list(number, block)

    def _timer(self, now_s: float) -> tuple[int, int]:
        """Timer of a lock that is taken now. All locks of one tick share it."""
        tick = self._times.tick(now_s)
        timer = self._timer_of_tick
        if timer is None or timer[1] != tick:
            timeout = math.ceil(self.config.visibility_timeout_s * TICKS_A_SECOND)
            timer = self._timer_of_tick = tick + 1 + timeout, tick
        return timer

    # --- from state to state ---------------------------------------------------------------------
    # The bits of `mask` are in no state before `_free_bits` and `_finish`.

    def _block_to_learn(self, number: int) -> Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = Block()
            if number == self.start_offset >> BLOCK_BITS:
                block.done = (1 << (self.start_offset & LAST_INDEX)) - 1
        return block

    def _list(self, number: int, block: Block) -> None:
        if block.ready and not block.is_listed:
            block.is_listed = True
            insort(self._listed, number)

    def _free_bits(self, number: int, block: Block, mask: int) -> None:
        """Makes offsets ready, or blocked."""
        keys = self._keys
        if keys is not None:
            base = number << BLOCK_BITS
            behind = 0
            for index in bits_of(mask):
                if not keys.is_first(base + index):
                    behind |= 1 << index
            block.blocked |= behind
            self._blocked += behind.bit_count()
            mask ^= behind
        block.ready |= mask
        self._ready += mask.bit_count()
        self._list(number, block)

    def _delay(self, number: int, block: Block, index: int, delay: Delay) -> None:
        block.delayed |= 1 << index
        block.due[index] = delay
        self._delayed += 1
        self._delays.add((number << BLOCK_BITS) + index, delay)

    def _finish(self, number: int, block: Block, mask: int) -> None:
        """Makes offsets done. The block may be forgotten by that."""
        block.done |= mask
        self._changed.add(number)
        if self._keys is not None:
            base = number << BLOCK_BITS
            for index in bits_of(mask):
                self._unblock(self._keys.remove(base + index))
        start = self.start_offset
        if number == start >> BLOCK_BITS:
            if block.done >> (start & LAST_INDEX) & 1:
                self._advance()
        elif block.done == ALL:
            del self._blocks[number]
            self._done_blocks.add(number, number)

    def _unblock(self, offset: int | None) -> None:
        """Makes `offset` ready, as nothing of its key is before it any more."""
        if offset is None:
            return
        number, bit = offset >> BLOCK_BITS, 1 << (offset & LAST_INDEX)
        block = self._blocks[number]
        if block.blocked & bit:
            block.blocked ^= bit
            self._blocked -= 1
            block.ready |= bit
            self._ready += 1
            self._list(number, block)

    def _advance(self) -> None:
        """Moves the start past settled offsets."""
        start = self.start_offset
        while start < self.learned:
            number = start >> BLOCK_BITS
            block = self._blocks.get(number)
            if block is None:
                start = (self._done_blocks.last_of_run(number) + 1) << BLOCK_BITS
                continue
            if block.done != ALL:
                undone = ~block.done & ALL
                start = (number << BLOCK_BITS) + (undone & -undone).bit_length() - 1
                break
            del self._blocks[number]
            self._changed.add(number)
            start = (number + 1) << BLOCK_BITS
        self.start_offset = start
        self._done_blocks.remove_below(start >> BLOCK_BITS)
        while len(self.epochs) > 1 and self.epochs[1][1] <= start:
            del self.epochs[0]

    def _learn_done(self, last: int) -> None:
        """Learns the offsets from `learned` up to and including `last` as done."""
        first, self.learned = self.learned, max(self.learned, last + 1)
        whole_first, whole_end = -(-first // BLOCK_OFFSETS), (last + 1) >> BLOCK_BITS
        if whole_first < whole_end:
            self._done_blocks.add(whole_first, whole_end - 1)
        # Both ends are there before the start passes the first of them.
        ends = {
            number: self._block_to_learn(number)
            for number in (first >> BLOCK_BITS, last >> BLOCK_BITS)
            if first <= last and not whole_first <= number < whole_end
        }
        for number, block in ends.items():
            base = number << BLOCK_BITS
            mask = mask_of(max(0, first - base), min(LAST_INDEX, last - base))
            self._finish(number, block, mask)
        self._advance()

    def _take_out(self, block: Block, mask: int) -> None:
        """Takes ready, blocked and delayed offsets out of their states."""
        for index in bits_of(block.delayed & mask):
            del block.due[index]
        self._ready -= (block.ready & mask).bit_count()
        self._blocked -= (block.blocked & mask).bit_count()
        self._delayed -= (block.delayed & mask).bit_count()
        block.ready &= ~mask
        block.blocked &= ~mask
        block.delayed &= ~mask

    def _drop_below(self, offset: int) -> int:
        """Forgets all offsets below, and starts there. Returns the number of unsettled ones."""
        unsettled = 0
        for number in sorted(number for number in self._blocks if number <= offset >> BLOCK_BITS):
            block = self._blocks[number]
            base = number << BLOCK_BITS
            if base >= offset:
                break
            gone = mask_of(0, min(LAST_INDEX, offset - base - 1)) & ~block.done
            if base + LAST_INDEX >= self.learned:
                gone &= (1 << max(0, self.learned - base)) - 1
            unsettled += gone.bit_count()
            for index in bits_of(block.moving & gone):
                if self._dying.pop(base + index, None) is not None:
                    self._changed_dying.add(base + index)
            self._take_out(block, gone)
            self._locked -= (block.locked & gone).bit_count()
            block.forget(gone)
            self._finish(number, block, gone)
        self._keys_wanted.remove_below(offset)
        if offset > self.start_offset:
            for number in [number for number in self._blocks if number < offset >> BLOCK_BITS]:
                del self._blocks[number]
                self._changed.add(number)
            self.start_offset = offset
            self.learned = max(self.learned, offset)
            self._done_blocks.remove_below(offset >> BLOCK_BITS)
            if offset & LAST_INDEX:
                # A block that begins below the start says so itself.
                block = self._block_to_learn(offset >> BLOCK_BITS)
                block.done |= (1 << (offset & LAST_INDEX)) - 1
            self._advance()
        return unsettled

    def _drop_from(self, offset: int) -> None:
        """Forgets `offset` and everything above, as if it had not been learned."""
        for number in [number for number in self._blocks if number >= offset >> BLOCK_BITS]:
            block = self._blocks[number]
            index = max(0, offset - (number << BLOCK_BITS))
            lost = mask_of(index, LAST_INDEX)
            self._take_out(block, lost)
            self._locked -= (block.locked & lost).bit_count()
            block.forget(lost)
            self._changed.add(number)
            if not index:
                del self._blocks[number]
        if offset >> BLOCK_BITS in self._done_blocks and offset & LAST_INDEX:
            block = self._blocks[offset >> BLOCK_BITS] = Block()
            block.done = mask_of(0, (offset & LAST_INDEX) - 1)
            self._changed.add(offset >> BLOCK_BITS)
        self._done_blocks.remove_from(offset >> BLOCK_BITS)
        self._listed = [number for number in self._listed if number in self._blocks]
        for dying in [known for known in self._dying if known >= offset]:
            del self._dying[dying]
            self._changed_dying.add(dying)
        self._keys_wanted.remove_from(offset)
        self.learned = min(self.learned, offset)
        self.start_offset = min(self.start_offset, offset)
        self.epochs = [epoch for epoch in self.epochs if epoch[1] < offset]

    def _parts(self, first: int, last: int) -> Sequence[tuple[int, Block, int]]:
        """`(number, block, bits)` of the known offsets of [first, last] that lie in blocks with
        unsettled ones."""
        first, last = max(first, self.start_offset), min(last, self.learned - 1)
        if first > last:
            return ()
        low, high = first >> BLOCK_BITS, last >> BLOCK_BITS
        if low == high:
            block = self._blocks.get(low)
            if block is None:
                return ()
            return ((low, block, (2 << (last & LAST_INDEX)) - (1 << (first & LAST_INDEX))),)
        numbers: Iterable[int] = range(low, high + 1)
        if high - low > len(self._blocks):
            numbers = sorted(number for number in self._blocks if low <= number <= high)
        parts = []
        for number in numbers:
            block = self._blocks.get(number)
            if block is not None:
                base = number << BLOCK_BITS
                mask = mask_of(max(0, first - base), min(LAST_INDEX, last - base))
                parts.append((number, block, mask))
        return parts

    def _next_listed(self, number: int) -> tuple[int, Block] | None:
        """The first block from `number` on that has ready offsets."""
        listed = self._listed
        at = bisect_left(listed, number)
        while at < len(listed):
            block = self._blocks.get(listed[at])
            if block is not None:
                if block.ready:
                    return listed[at], block
                block.is_listed = False
            del listed[at]
        return None

    # --- looking and keeping ---------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """`counts().ready`, at no cost."""
        return self._ready

    @property
    def locked(self) -> int:
        """`counts().locked`, at no cost."""
        return self._locked

    @property
    def blocked(self) -> int:
        """`counts().blocked`, at no cost."""
        return self._blocked

    def counts(self) -> Counts:
        done = self._done_blocks.count() << BLOCK_BITS
        moving = 0
        for number, block in self._blocks.items():
            done += block.done.bit_count()
            moving += (block.moving | block.claimed).bit_count()
            if number == self.start_offset >> BLOCK_BITS:
                done -= self.start_offset & LAST_INDEX
        return Counts(self._ready, self._blocked, self._locked, self._delayed, moving, done)

    @property
    def is_changed(self) -> bool:
        """True if a decision was made since the last `changes`."""
        return self._is_decided

    def changes(self) -> list[KeptRecord]:
        """The records to keep for all decisions since the last call, the head first. Either all of
        them are kept or none, and in the order of the calls."""
        kept = []
        head = head_record(
            self.state_epoch,
            self.start_offset,
            self.learned,
            self.epochs,
            self._done_blocks.runs(),
            None if self.holds is None else self.holds.kept(),
        )
        if head[1] != self._kept_head:
            self._kept_head = head[1] or b""
            kept.append(head)
        changed_dying = sorted(self._changed_dying)
        passed = bisect_left(changed_dying, self.start_offset)
        self._passed_dying += changed_dying[:passed]
        for _ in range(min(PASSED_AT_ONCE, len(self._passed_dying))):
            kept.append(dying_record(self._passed_dying.popleft(), None))
        for offset in changed_dying[passed:]:
            kept.append(dying_record(offset, self._dying.get(offset)))
        for move_id in sorted(self._changed_moves):
            kept.append(move_record(move_id, self._moves.get(move_id)))
        for number in sorted(self._changed):
            block = self._blocks.get(number)
            if block is not None:
                self._kept.add(number)
                kept.append(block_record(number, block))
            elif number in self._kept:
                self._kept.discard(number)
                kept.append(block_record(number, None))
        self._changed.clear()
        self._changed_dying.clear()
        self._changed_moves.clear()
        self._is_decided = False
        self.given = 0
        return kept

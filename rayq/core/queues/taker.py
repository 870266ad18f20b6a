"""Delivery of a queue's records: the first ready ones, in the order of their keys."""

from __future__ import annotations

import heapq

from rayq.core.queues.block import BLOCK_BITS, LAST_INDEX, Block, lowest, runs_of
from rayq.core.queues.ledger import QueueLedger

Lock = tuple[int, int, int]
"""`(first offset, last offset, count)`."""

LOCKS_MAX = 10_000
"""Maximum number of locked records of a partition."""


class QueueTaker(QueueLedger):
    def first_ready(self, from_offset: int = 0) -> int | None:
        """The first offset at or above `from_offset` that `take` would give; None if it would give
        nothing."""
        if self._keys_wanted or self._locked >= LOCKS_MAX:
            return None
        listed = self._next_listed(from_offset >> BLOCK_BITS)
        while listed is not None:
            number, block = listed
            base = number << BLOCK_BITS
            ready = block.ready
            if base < from_offset:
                ready = ready >> (from_offset - base) << (from_offset - base)
            if ready:
                return base + (ready & -ready).bit_length() - 1
            listed = self._next_listed(number + 1)
        return None

    def take(
        self,
        holder: str,
        count_max: int,
        *,
        now_s: float,
        from_offset: int = 0,
        below_offset: int | None = None,
        tells_begins: bool = False,
    ) -> list[Lock]:
        """Locks up to `count_max` ready records of [from_offset, below_offset) for `holder`, the
        first ones. With `ordered_by_key` also those that only wait for records of this very take.
        Also [] at a bound (`trouble`). `tells_begins`: the holder reports which of the `unbegun`
        records it begins."""
        left = min(count_max, LOCKS_MAX - self._locked)
        if left <= 0 or self._keys_wanted:
            return []
        end = self.learned if below_offset is None else min(below_offset, self.learned)
        timer = self._timer(now_s)
        given: list[Lock] = []
        following: list[int] = []
        """Blocked records (a heap) that may follow this take's records of their keys."""
        listed = self._next_listed(from_offset >> BLOCK_BITS)
        while listed is not None:
            number, block = listed
            base = number << BLOCK_BITS
            while following and following[0] < base and left:
                left -= self._follow(heapq.heappop(following), holder, timer, given, following, end)
            if base >= end or not left:
                break
            ready = block.ready
            if base < from_offset:
                ready = ready >> (from_offset - base) << (from_offset - base)
            if base + LAST_INDEX >= end:
                ready &= (1 << (end - base)) - 1
            if self._keys is not None:
                left -= self._take_in_order(
                    number, block, ready, left, holder, timer, given, following, end
                )
            elif ready:
                mask = lowest(ready, left)
                left -= mask.bit_count()
                self._lock(number, block, mask, holder, timer, given)
            listed = self._next_listed(number + 1) if left else None
        while following and left:
            left -= self._follow(heapq.heappop(following), holder, timer, given, following, end)
        if tells_begins:
            self._leave_unbegun(given)
        return given

    def _leave_unbegun(self, given: list[Lock]) -> None:
        """A record may end its consumer, and with it the locks of records that nobody has seen yet.
        The first delivery of a record counts anyway, if it is not the last one, so that most need
        no report; later ones count once they have begun."""
        is_first_last = self.config.max_deliveries == 1
        for first, last, count in given:
            if count == 1 and not is_first_last:
                continue
            for _, block, mask in self._parts(first, last):
                is_first = 0 if is_first_last else block.excused.get(count - 1, 0)
                block.unbegun |= mask & ~is_first

    def unbegun(self, locks: list[Lock]) -> list[tuple[int, int]]:
        """`(first, last)` of those locked records whose beginning their consumer must report."""
        return [
            ((number << BLOCK_BITS) + first, (number << BLOCK_BITS) + last)
            for start, end, _ in locks
            for number, block, mask in self._parts(start, end)
            if block.unbegun
            for first, last in runs_of(block.unbegun & mask)
        ]

    def _take_in_order(
        self,
        number: int,
        block: Block,
        ready: int,
        left: int,
        holder: str,
        timer: tuple[int, int],
        given: list[Lock],
        following: list[int],
        end: int,
    ) -> int:
        """Takes records one by one from a block, each time the first of the ready and following
        ones. Returns their number."""
        assert self._keys is not None
        base = number << BLOCK_BITS
        taken = 0
        while taken < left:
            first = base + (ready & -ready).bit_length() - 1 if ready else None
            if following and (first is None or following[0] < first):
                if following[0] > base + LAST_INDEX:
                    break
                taken += self._follow(
                    heapq.heappop(following), holder, timer, given, following, end
                )
                continue
            if first is None:
                break
            ready &= ready - 1
            self._lock(number, block, 1 << (first - base), holder, timer, given)
            self._push_following(first, following, end)
            taken += 1
        return taken

    def _push_following(self, offset: int, following: list[int], end: int) -> None:
        assert self._keys is not None
        after = self._keys.after(offset)
        if after is not None and after < end:
            block = self._blocks[after >> BLOCK_BITS]
            if block.blocked >> (after & LAST_INDEX) & 1:
                heapq.heappush(following, after)

    def _follow(
        self,
        offset: int,
        holder: str,
        timer: tuple[int, int],
        given: list[Lock],
        following: list[int],
        end: int,
    ) -> int:
        number, bit = offset >> BLOCK_BITS, 1 << (offset & LAST_INDEX)
        block = self._blocks[number]
        self._lock(number, block, bit, holder, timer, given)
        self._push_following(offset, following, end)
        return 1

    def _lock(
        self,
        number: int,
        block: Block,
        mask: int,
        holder: str,
        timer: tuple[int, int],
        given: list[Lock],
    ) -> None:
        """Locks ready (or blocked) offsets."""
        many = mask.bit_count()
        self._locked += many
        self.given += many
        self._ready -= many
        if block.blocked & mask:
            of_blocked = (block.blocked & mask).bit_count()
            self._ready += of_blocked
            self._blocked -= of_blocked
            block.blocked &= ~mask
        block.ready &= ~mask
        if timer not in block.timers:
            self._times.watch(timer[0], number)
        self._changed.add(number)
        self._is_decided = True
        base = number << BLOCK_BITS
        raised = block.lock(mask, holder, timer)
        if many == 1:
            index = mask.bit_length() - 1
            parts = [(index, index, raised[0][0])]
        elif len(raised) == 1:
            count, bits = raised[0]
            parts = [(first, last, count) for first, last in runs_of(bits)]
        else:
            parts = sorted(
                (first, last, count) for count, bits in raised for first, last in runs_of(bits)
            )
        for first, last, count in parts:
            if given and given[-1][1] == base + first - 1 and given[-1][2] == count:
                given[-1] = (given[-1][0], base + last, count)
            else:
                given.append((base + first, base + last, count))

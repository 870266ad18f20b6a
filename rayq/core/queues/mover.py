"""Removal of records from a queue other than by consumers: by moves, purges, retention."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import msgspec

from rayq.core.queues.block import BLOCK_BITS, LAST_INDEX, Block, bits_of, lowest, mask_of
from rayq.core.queues.ledger import QueueLedger
from rayq.core.queues.moves import Dying, Move
from rayq.messages.secret_names import shown_holder

READY = "ready"
LOCKED = "locked"
DELAYED = "delayed"
MOVING = "moving"


class Unsettled(msgspec.Struct, array_like=True, frozen=True):
    """An unsettled record."""

    offset: int
    state: str
    """`READY` (a blocked one too), `LOCKED`, `DELAYED` or `MOVING`."""
    count: int
    holder: str | None
    due_ms: int | None
    """End of a delay by the wall clock; for a lock, the remaining time in ms."""


class QueueMover(QueueLedger):
    # --- moves -----------------------------------------------------------------------------------

    def to_move(self, count_max: int) -> list[Dying]:
        """The records that failed for good and are in no move yet, ascending."""
        return [self._dying[offset] for offset in heapq.nsmallest(count_max, self._dying)]

    def claim(self, offsets: Iterable[int]) -> tuple[list[int], list[int], list[tuple[int, str]]]:
        """Claims records for a requested move: `(claimed, settled already, (offset, why not))`.
        Only ready and delayed records can be claimed. They are given to nobody until `begin_move`,
        `discard` or `unclaim` names them. A claim is not kept."""
        claimed: list[int] = []
        settled: list[int] = []
        refused: list[tuple[int, str]] = []
        for offset in offsets:
            if offset >= self.learned:
                refused.append((offset, "the queue has not read it yet"))
                continue
            number, bit = offset >> BLOCK_BITS, 1 << (offset & LAST_INDEX)
            block = self._blocks.get(number)
            if offset < self.start_offset or block is None or block.done & bit:
                settled.append(offset)
            elif block.locked & bit:
                holder = block.holder_of(bit) or ""
                refused.append((offset, f"consumer {shown_holder(holder)} has it"))
            elif (block.moving | block.claimed) & bit:
                refused.append((offset, "it is being moved already"))
            else:
                delay = block.due.get(offset & LAST_INDEX)
                self._take_out(block, bit)
                if delay is not None:
                    block.due[offset & LAST_INDEX] = delay
                block.claimed |= bit
                claimed.append(offset)
        return claimed, settled, refused

    def unclaim(self, offsets: Iterable[int]) -> None:
        """Returns claimed records to their state before."""
        for number, block, bit in self._claimed(offsets):
            block.claimed ^= bit
            self._come_back(number, block, bit)

    def _come_back(self, number: int, block: Block, bit: int) -> None:
        index = bit.bit_length() - 1
        delay = block.due.pop(index, None)
        if delay is None:
            self._free_bits(number, block, bit)
        else:
            self._delay(number, block, index, delay)

    def _claimed(self, offsets: Iterable[int]) -> Iterable[tuple[int, Block, int]]:
        for offset in offsets:
            for number, block, bit in self._parts(offset, offset):
                if block.claimed & bit:
                    yield number, block, bit

    def discard(self, offsets: Iterable[int]) -> None:
        """Makes claimed or dying records done."""
        for offset in offsets:
            for number, block, bit in self._parts(offset, offset):
                if block.claimed & bit:
                    block.claimed ^= bit
                elif offset in self._dying:
                    block.moving ^= bit
                    self._forget_dying(offset)
                    self.dead += 1
                else:
                    continue
                block.due.pop(offset & LAST_INDEX, None)
                self._finish(number, block, bit)
                self._is_decided = True

    def begin_move(self, move: Move) -> None:
        """Begins the move of a batch of dying or claimed records under its number. Append it only
        once this is kept."""
        for record in move.records:
            for number, block, bit in self._parts(record.offset, record.offset):
                if block.claimed & bit:
                    block.claimed ^= bit
                    block.due.pop(record.offset & LAST_INDEX, None)
                    block.moving |= bit
                    self._changed.add(number)
                elif record.offset in self._dying:
                    self._forget_dying(record.offset)
        self._moves[move.move_id] = move
        self._changed_moves.add(move.move_id)
        self._is_decided = True

    def end_move(self, move_id: int) -> None:
        """Ends a move whose batch is in the target's log: its records are done."""
        move = self._remove_move(move_id)
        if move.outcome == "dead":
            self.dead += len(move.records)
        for record in move.records:
            for number, block, bit in self._parts(record.offset, record.offset):
                if block.moving & bit:
                    block.moving ^= bit
                    self._finish(number, block, bit)

    def release_move(self, move_id: int, *, is_in_doubt: bool = False) -> None:
        """Releases a move whose batch never gets into the target, or of which that `is_in_doubt`:
        its records are dying or ready again, in no move."""
        move = self._remove_move(move_id)
        for record in move.records:
            for number, block, bit in self._parts(record.offset, record.offset):
                if not block.moving & bit:
                    continue
                if move.outcome == "dead":
                    self._dying[record.offset] = (
                        msgspec.structs.replace(record, is_in_doubt=True) if is_in_doubt else record
                    )
                    self._changed_dying.add(record.offset)
                else:
                    block.moving ^= bit
                    self._changed.add(number)
                    self._free_bits(number, block, bit)

    def _cut_moves(self, offset: int) -> None:
        """Removes the records from `offset` on from moves, as the log was truncated. The others of
        a batch stay in its move: they may be in the target."""
        for move_id, move in list(self._moves.items()):
            left = tuple(record for record in move.records if record.offset < offset)
            if not left:
                self._remove_move(move_id)
            elif len(left) < len(move.records):
                self._moves[move_id] = msgspec.structs.replace(move, records=left)
                self._changed_moves.add(move_id)

    def moves(self) -> list[Move]:
        """All moves that were begun and not ended, also those of earlier leaders."""
        return list(self._moves.values())

    def _remove_move(self, move_id: int) -> Move:
        self._changed_moves.add(move_id)
        self._is_decided = True
        return self._moves.pop(move_id)

    def _forget_dying(self, offset: int) -> None:
        del self._dying[offset]
        self._changed_dying.add(offset)

    # --- start -----------------------------------------------------------------------------------

    def advance_start(self, offset: int) -> int:
        """Moves the start to the log's new start. Returns the number of unsettled records that were
        lost by that; moves in progress continue."""
        if offset <= self.start_offset:
            return 0
        gone = self._drop_below(offset)
        self.expired += gone
        self._is_decided = True
        return gone

    def purge(self, end_offset: int) -> int:
        """Settles all records below `end_offset` that are neither locked nor moving, also those
        that were not learned yet. Returns the number of offsets."""
        purged = 0
        for number in sorted(self._blocks):
            base = number << BLOCK_BITS
            block = self._blocks.get(number)
            if block is None or base >= end_offset:
                continue
            mask = mask_of(0, min(LAST_INDEX, end_offset - base - 1))
            mask &= block.ready | block.blocked | block.delayed
            if mask:
                purged += mask.bit_count()
                self._take_out(block, mask)
                self._finish(number, block, mask)
        if end_offset > self.learned:
            purged += end_offset - self.learned
            self._learn_done(end_offset - 1)
        self._is_decided = True
        return purged

    # --- looking ---------------------------------------------------------------------------------

    def first_unsettled_ready(self) -> int | None:
        """The oldest record that nobody holds, for its age."""
        for number in sorted(self._blocks) if self._ready + self._blocked else ():
            block = self._blocks[number]
            free = block.ready | block.blocked
            if free:
                return (number << BLOCK_BITS) + (free & -free).bit_length() - 1
        return None

    def unsettled(
        self, from_offset: int, states: Iterable[str], count_max: int, *, now_ms: int, now_s: float
    ) -> tuple[list[Unsettled], int | None]:
        """One page of the unsettled records in [from_offset, learned), and the start of the next
        one. No `states`: all."""
        asked = set(states) or {READY, LOCKED, DELAYED, MOVING}
        unsettled: list[Unsettled] = []
        for number in sorted(
            number for number in self._blocks if number >= from_offset >> BLOCK_BITS
        ):
            block = self._blocks[number]
            base = number << BLOCK_BITS
            moving = block.moving | block.claimed
            mask = (block.ready | block.blocked) if READY in asked else 0
            mask |= block.locked if LOCKED in asked else 0
            mask |= block.delayed if DELAYED in asked else 0
            mask |= moving if MOVING in asked else 0
            if base < from_offset:
                mask = mask >> (from_offset - base) << (from_offset - base)
            page = lowest(mask, count_max - len(unsettled))
            unsettled += self._unsettled(block, base, page, now_ms, now_s)
            if page != mask:
                behind = mask ^ page
                return unsettled, base + (behind & -behind).bit_length() - 1
        return unsettled, None

    def _unsettled(
        self, block: Block, base: int, mask: int, now_ms: int, now_s: float
    ) -> Iterator[Unsettled]:
        counts, holders = block.counts_by_index(mask), block.holders_by_index(mask)
        end_ticks = block.end_ticks_by_index(mask & block.locked)
        for index in bits_of(mask):
            bit, offset, count = 1 << index, base + index, counts.get(index, 0)
            if block.locked & bit:
                end = end_ticks.get(index)
                left_ms = None if end is None else self._times.left_ms(end, now_s)
                yield Unsettled(offset, LOCKED, count, holders.get(index), left_ms)
            elif block.delayed & bit:
                due_ms = block.due[index].due_at_ms(now_ms=now_ms, now_s=now_s)
                yield Unsettled(offset, DELAYED, count, None, due_ms)
            else:
                is_ready = (block.ready | block.blocked) & bit
                yield Unsettled(offset, READY if is_ready else MOVING, count, None, None)

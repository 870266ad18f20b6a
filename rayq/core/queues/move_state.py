"""Records on their way out of a queue's partition: those that failed for good, and moves.

`QueueState` has one `MoveState`, which changes the offsets through `OffsetStates`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from rayq.core.queues.block import BLOCK_BITS, CLAIMED, LAST_INDEX, MOVING, Block
from rayq.core.queues.moves import ERROR_BYTES_MAX, FailedRecord, Move
from rayq.core.queues.offset_states import OffsetStates
from rayq.core.queues.queue_states import KeptRecord
from rayq.core.queues.records import Kept, failed_record, move_record
from rayq.messages.secret_names import shown_holder

PASSED_AT_ONCE = 10_000
"""Maximum number of failed records that the start has passed in a write."""


class MoveState:
    """See the module. One queue in one partition, under one leader."""

    def __init__(self, offsets: OffsetStates) -> None:
        self.dead = 0
        """Records that became dead letters, or were dropped instead, under this leader."""
        self._offsets = offsets
        self._failed: dict[int, FailedRecord] = {}
        """Records that failed for good and are in no move yet."""
        self._moves: dict[int, Move] = {}
        self._changed_failed: set[int] = set()
        self._passed_failed: deque[int] = deque()
        """Failed records that the start has passed, and that are still kept. They no longer mean
        anything, so their tombstones may wait: retention may remove a million at once."""
        self._changed_moves: set[int] = set()

    def restore(self, kept: Kept) -> None:
        """Takes what is kept."""
        first, end = kept.head.start_offset, kept.head.learned
        self._failed = {at: failed for at, failed in kept.failed.items() if first <= at < end}
        self._changed_failed = set(kept.failed) - set(self._failed)
        self._moves = kept.moves

    # --- failed records ---------------------------------------------------------------------------

    def to_move(self, count_max: int) -> list[FailedRecord]:
        """The records that failed for good and are in no move yet, ascending."""
        return [self._failed[offset] for offset in heapq.nsmallest(count_max, self._failed)]

    def add_failed(self, offset: int, count: int, reason: str, error: str) -> None:
        """Adds a moving record that failed for good."""
        kept = error.encode(errors="replace")[:ERROR_BYTES_MAX].decode(errors="ignore")
        self._failed[offset] = FailedRecord(offset, count, reason, kept)
        self._changed_failed.add(offset)

    def _forget_failed(self, offset: int) -> None:
        del self._failed[offset]
        self._changed_failed.add(offset)

    def drop_below(self, offset: int) -> None:
        """Forgets the failed records below, which retention removed. Moves continue."""
        for failed in [known for known in self._failed if known < offset]:
            self._forget_failed(failed)

    # --- claims ----------------------------------------------------------------------------------

    def claim(self, offsets: Iterable[int]) -> tuple[list[int], list[int], list[tuple[int, str]]]:
        """Claims records for a requested move: `(claimed, settled already, (offset, why not))`.
        Only ready and delayed records can be claimed. They are given to nobody until `begin`,
        `discard` or `unclaim` names them. A claim is not kept."""
        claimed: list[int] = []
        settled: list[int] = []
        refused: list[tuple[int, str]] = []
        for offset in offsets:
            if offset >= self._offsets.learned:
                refused.append((offset, "the queue has not read it yet"))
                continue
            number, bit = offset >> BLOCK_BITS, 1 << (offset & LAST_INDEX)
            block = self._offsets.blocks.get(number)
            if offset < self._offsets.start_offset or block is None or block.done & bit:
                settled.append(offset)
            elif block.locked & bit:
                holder = block.holder_of(bit) or ""
                refused.append((offset, f"consumer {shown_holder(holder)} has it"))
            elif (block.moving | block.claimed) & bit:
                refused.append((offset, "it is being moved already"))
            else:
                self._offsets.transition(number, block, bit, block.state_of(bit), CLAIMED)
                claimed.append(offset)
        return claimed, settled, refused

    def unclaim(self, offsets: Iterable[int]) -> None:
        """Returns claimed records to their state before."""
        for offset in offsets:
            for number, block, bit in self._offsets.parts(offset, offset):
                if not block.claimed & bit:
                    continue
                delay = block.due.get(offset & LAST_INDEX)
                if delay is None:
                    self._offsets.free(number, block, bit, CLAIMED)
                else:
                    self._offsets.delay(number, block, bit, CLAIMED, delay)

    def discard(self, offsets: Iterable[int]) -> None:
        """Makes claimed or failed records done."""
        for offset in offsets:
            for number, block, bit in self._offsets.parts(offset, offset):
                if block.claimed & bit:
                    self._offsets.finish(number, block, bit, CLAIMED)
                elif offset in self._failed:
                    self._forget_failed(offset)
                    self.dead += 1
                    self._offsets.finish(number, block, bit, MOVING)

    # --- moves -----------------------------------------------------------------------------------

    def all(self) -> list[Move]:
        """All moves that were begun and not ended, also those of earlier leaders."""
        return list(self._moves.values())

    def begin(self, move: Move) -> None:
        """Begins the move of a batch of failed or claimed records under its number. Append it only
        once this is kept."""
        for record in move.records:
            for number, block, bit in self._offsets.parts(record.offset, record.offset):
                if block.claimed & bit:
                    self._offsets.transition(number, block, bit, CLAIMED, MOVING)
                elif record.offset in self._failed:
                    self._forget_failed(record.offset)
        self._moves[move.move_id] = move
        self._changed_moves.add(move.move_id)
        self._offsets.is_decided = True

    def end(self, move_id: int) -> None:
        """Ends a move whose batch is in the target's log: its records are done."""
        move = self._remove(move_id)
        if move.outcome == "dead":
            self.dead += len(move.records)
        for _, number, block, bit in self._moving(move):
            self._offsets.finish(number, block, bit, MOVING)

    def release(self, move_id: int, *, is_in_doubt: bool = False) -> None:
        """Releases a move whose batch never gets into the target, or of which that `is_in_doubt`:
        its records are failed or ready again, in no move."""
        move = self._remove(move_id)
        for record, number, block, bit in self._moving(move):
            if move.outcome == "dead":
                self._failed[record.offset] = (
                    msgspec.structs.replace(record, is_in_doubt=True) if is_in_doubt else record
                )
                self._changed_failed.add(record.offset)
            else:
                self._offsets.free(number, block, bit, MOVING)

    def _moving(self, move: Move) -> Iterator[tuple[FailedRecord, int, Block, int]]:
        """The records of a move that are moving."""
        for record in move.records:
            for number, block, bit in self._offsets.parts(record.offset, record.offset):
                if block.moving & bit:
                    yield record, number, block, bit

    def _remove(self, move_id: int) -> Move:
        self._changed_moves.add(move_id)
        self._offsets.is_decided = True
        return self._moves.pop(move_id)

    def cut(self, offset: int) -> None:
        """Forgets the records from `offset` on, as the log was truncated. The others of a batch
        stay in its move: they may be in the target."""
        for move_id, move in list(self._moves.items()):
            left = tuple(record for record in move.records if record.offset < offset)
            if not left:
                self._remove(move_id)
            elif len(left) < len(move.records):
                self._moves[move_id] = msgspec.structs.replace(move, records=left)
                self._changed_moves.add(move_id)
        for failed in [known for known in self._failed if known >= offset]:
            self._forget_failed(failed)

    # --- keeping ---------------------------------------------------------------------------------

    def changes(self) -> list[KeptRecord]:
        """The records to keep for all decisions since the last call."""
        changed_failed = sorted(self._changed_failed)
        passed = bisect_left(changed_failed, self._offsets.start_offset)
        self._passed_failed += changed_failed[:passed]
        kept = [
            failed_record(self._passed_failed.popleft(), None)
            for _ in range(min(PASSED_AT_ONCE, len(self._passed_failed)))
        ]
        for offset in changed_failed[passed:]:
            kept.append(failed_record(offset, self._failed.get(offset)))
        for move_id in sorted(self._changed_moves):
            kept.append(move_record(move_id, self._moves.get(move_id)))
        self._changed_failed.clear()
        self._changed_moves.clear()
        return kept

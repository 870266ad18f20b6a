"""The invariants of queues, checked with each batch of `__queue_state` that its leader commits.

- the fence of a part of a queue rises, and the epoch of the data leader that opened it never falls;
- its state epoch never falls, nor does its start while the state epoch stays;
- within a state epoch what is done stays done, no count falls, and a record has another holder only
  under a higher count;
- a block is dropped only below a start that is committed, or as wholly done;
- what moves append was noted before under its number; a move whose records are done is in its
  target, and one that is given up is not;
- a leader stays within its bounds;
- what a new leader would read is the state of the leader that serves (`check_live`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from proving.simulation import queue_bounds
from proving.simulation.invariants import InvariantError
from proving.simulation.server_view import (
    fence_of,
    is_all_kept,
    opening_of,
    partition_of,
)
from rayq.actors.queues.leader import QueueLeader
from rayq.actors.replica.replica import Replica
from rayq.core.cluster.topic_changes import QUEUES_TOPIC
from rayq.core.queues import queue_states
from rayq.core.queues import records as queue_records
from rayq.core.queues.block import BLOCK_OFFSETS, DELAYED, READY, Block, bits_of
from rayq.core.queues.moves import Move
from rayq.core.queues.queue_states import QueueStates, StateKey
from rayq.core.queues.records import Head, Kept
from rayq.core.queues.state import QueueState
from rayq.storage.batch import decode_columns, read_header

RECORDS_MAX = 100_000


class _Number(NamedTuple):
    """The number of a batch in the partition that it is appended to."""

    topic_id: str
    partition: int
    producer_id: int
    producer_epoch: int | None


class QueueInvariants:
    """See the module."""

    def __init__(self) -> None:
        self._kept = QueueStates()
        self._known: dict[StateKey, Kept] = {}
        self._openings: dict[StateKey, queue_states.Opening] = {}
        self.moved_to: frozenset[str] = frozenset()
        """Topics that get records by moves only."""
        self.sure_moves: frozenset[str] = frozenset()
        """The ids of queues out of which nothing is taken but by moves and settlements."""
        self.on_move: Callable[[StateKey, Move], None] | None = None
        """Called with each move whose note is committed."""
        self._noted: set[_Number] = set()
        self._appended: set[_Number] = set()
        """The numbers of all batches that a leader of any topic has committed."""
        self.replays = 0
        """The number of times that a live state was compared with what is kept of it."""

    def committed(self, replica: Replica, leader_epoch: int, batch: bytes) -> None:
        """Takes a committed batch of any topic."""
        if replica.assignment.topic != QUEUES_TOPIC:
            self._note_appended(replica, batch)
            return
        columns = decode_columns(batch, 0, read_header(batch))
        changed: dict[StateKey, None] = {}
        for key, value in zip(columns.keys or (), columns.values, strict=True):
            record = queue_states.decode(key, value)
            self._kept.replay(record)
            changed[record.state_key] = None
        for state_key in changed:
            self._check_opening(state_key)
            self._check_state(state_key)

    def check_live(self, leader: QueueLeader) -> None:
        """The live state of a queue's leader is within its bounds. Where no decision of it is under
        way it is what a new leader would read."""
        opened = leader.open
        if opened is None:
            return
        beyond = queue_bounds.fault_of(opened.state)
        if beyond is not None:
            raise InvariantError(f"{leader.where}: {beyond}")
        state, commits = opened.state, opened.commits
        state_key = StateKey(leader.queue.queue_id, partition_of(leader))
        opening = self._openings.get(state_key)
        if opening is None:
            return
        is_idle = is_all_kept(commits) and not state.is_changed
        if not is_idle or fence_of(commits) != opening.fence:
            return
        if any(block.claimed for block in state.offsets.blocks.values()):
            return  # An operator moves records: what they were is kept until they are moved.
        records = list(self._read(state_key))
        replayed = QueueState.replay(leader.config, records, now_ms=0, now_s=0.0)
        assert replayed is not None
        self.replays += 1
        # What was only learned of the log above is learned again, and delays may be over.
        mine, kept = _summary(state, replayed.learned), _summary(replayed, replayed.learned)
        delays, kept_delays = _delays(state), _delays(replayed)
        if mine != kept or any(
            kept_delays.get(offset) != delay
            for offset, delay in delays.items()
            if offset < replayed.learned
        ):
            raise InvariantError(
                f"{leader.where}: the leader has {sorted(mine - kept)[:10]}, and kept is "
                f"{sorted(kept - mine)[:10]}; delays {delays}, and kept are {kept_delays}"
            )

    def kept(self, queue_id: str, partition: int) -> Kept:
        """The kept state of a queue in one partition."""
        return self._known[StateKey(queue_id, partition)]

    # --- moves ------------------------------------------------------------------------------------

    def _note_appended(self, replica: Replica, batch: bytes) -> None:
        header, assignment = read_header(batch), replica.assignment
        if header.producer_id is None:
            return
        place = assignment.topic_id, assignment.partition
        number = _Number(*place, header.producer_id, header.producer_epoch)
        self._appended.add(number)
        if assignment.topic in self.moved_to and number not in self._noted:
            raise InvariantError(f"{assignment.topic} has {number}, which no move noted before")

    def _note_moves(self, state_key: StateKey, before: Kept, kept: Kept) -> None:
        for move in _missing(kept.moves, before.moves):
            self._noted.add(_number_of(move))
            if self.on_move is not None:
                self.on_move(state_key, move)

    def _check_end(self, state_key: StateKey, move: Move, kept: Kept) -> None:
        done = sum(is_done(kept, record.offset) for record in move.records)
        is_there = _number_of(move) in self._appended
        if (done == len(move.records)) != is_there or 0 < done < len(move.records):
            raise InvariantError(
                f"{state_key}: {move} ends; {done} of its records are done, and its batch is "
                f"{'' if is_there else 'not '}in the target"
            )

    # --- inside -----------------------------------------------------------------------------------

    def _read(self, state_key: StateKey) -> Iterator[queue_states.KeptRecord]:
        after: bytes | None = b""
        while after is not None:
            page, after = self._kept.read(state_key, after)
            yield from page

    def _check_opening(self, state_key: StateKey) -> None:
        opening = opening_of(self._kept, state_key)
        before = self._openings.pop(state_key, None)
        if opening is None:
            return  # The queue was deleted.
        self._openings[state_key] = opening
        if before is not None and (
            opening.fence < before.fence
            or opening.data_leader_epoch < before.data_leader_epoch
            or (opening.fence == before.fence and opening != before)
        ):
            raise InvariantError(f"{state_key} was open as {before}, and now as {opening}")

    def _check_state(self, state_key: StateKey) -> None:
        kept = queue_records.decode(self._read(state_key))
        before = self._known.pop(state_key, None)
        if kept is None:
            if before is not None and state_key in self._openings:
                raise InvariantError(f"{state_key} has no head any more")
            return
        self._known[state_key] = kept
        if before is None:
            return
        self._note_moves(state_key, before, kept)
        old, new = before.head, kept.head
        if new.state_epoch < old.state_epoch:
            raise InvariantError(f"{state_key} goes back from {old} to {new}")
        if new.state_epoch > old.state_epoch:
            return  # An unclean election took records away.
        if new.start_offset < old.start_offset:
            raise InvariantError(f"{state_key}: its start goes back from {old} to {new}")
        if state_key.queue_id in self.sure_moves:
            for move in _missing(before.moves, kept.moves):
                self._check_end(state_key, move, kept)
        for number in {*before.blocks, *kept.blocks}:
            self._check_block(state_key, number, before, kept)
        for number in _numbers(old) - _numbers(new):
            if (number + 1) * BLOCK_OFFSETS > new.start_offset:
                raise InvariantError(f"{state_key}: block {number} was all done, and is not now")

    def _check_block(
        self, state_key: StateKey, number: int, before: Kept, kept: Kept
    ) -> None:
        old, new = before.blocks.get(number), kept.blocks.get(number)
        if new is None:
            is_below = (number + 1) * BLOCK_OFFSETS <= kept.head.start_offset
            if not is_below and number not in _numbers(kept.head):
                raise InvariantError(
                    f"{state_key}: block {number} is dropped, and the head is {kept.head}"
                )
            return
        if old is None:
            return
        above = _from(kept.head.start_offset - number * BLOCK_OFFSETS)
        wrong = old.done & ~new.done
        for count, bits in old.counts.items():
            same = _counted(new, count)
            more = _counted(new, count + 1)
            wrong |= bits & ~new.done & ~same
            for holder, held in new.holders.items():
                wrong |= bits & held & ~old.holders.get(holder, 0) & ~more
        if wrong & above:
            offset = number * BLOCK_OFFSETS + (wrong & above).bit_length() - 1
            raise InvariantError(
                f"{state_key}, offset {offset}: {_told(old, offset)} was committed, and now "
                f"{_told(new, offset)}"
            )


def is_done(kept: Kept, offset: int) -> bool:
    """Returns whether the record at this offset is settled."""
    number, index = divmod(offset, BLOCK_OFFSETS)
    if offset < kept.head.start_offset or number in _numbers(kept.head):
        return True
    block = kept.blocks.get(number)
    return block is not None and bool(block.done >> index & 1)


def _missing(these: dict[int, Move], those: dict[int, Move]) -> list[Move]:
    """The moves of `these` that are not among `those`."""
    return [move for move_id, move in these.items() if those.get(move_id) != move]


def _number_of(move: Move) -> _Number:
    return _Number(move.topic_id, move.partition, move.producer_id, move.producer_epoch)


def _from(index: int) -> int:
    """The bits of a block from this one on."""
    return (1 << BLOCK_OFFSETS) - (1 << index) if index > 0 else (1 << BLOCK_OFFSETS) - 1


def _counted(block: Block, count: int) -> int:
    """The bits of what was given out so often, or more often."""
    found = 0
    for number, bits in block.counts.items():
        if number >= count:
            found |= bits
    return found


def _numbers(head: Head) -> set[int]:
    return {number for first, last in head.done_blocks for number in range(first, last + 1)}


def _told(block: Block, offset: int) -> str:
    bit = 1 << offset % BLOCK_OFFSETS
    counts = [count for count, bits in block.counts.items() if bits & bit]
    holders = [holder for holder, bits in block.holders.items() if bits & bit]
    return f"count {counts}, holder {holders}, {'done' if block.done & bit else 'not done'}"


def _summary(state: QueueState, end_offset: int) -> set[tuple[object, ...]]:
    """Returns the records that have to outlive the leader. A record that is ready for the first
    time may not be kept."""
    found: set[tuple[object, ...]] = {("start", state.start_offset, state.state_epoch)}
    records, _ = state.unsettled(0, (), RECORDS_MAX, now_ms=0, now_s=0.0)
    for record in records:
        kind = READY if record.state == DELAYED else record.state
        if record.offset < end_offset and (kind != READY or record.count):
            found.add((kind, record.offset, record.count, record.holder or ""))
    for number, block in state.offsets.blocks.items():
        for index in bits_of(block.unbegun):
            found.add(("unbegun", number * BLOCK_OFFSETS + index))
        for index in bits_of(block.done):
            offset = number * BLOCK_OFFSETS + index
            if state.start_offset <= offset < end_offset:
                found.add(("done", offset))
    return found


def _delays(state: QueueState) -> dict[int, tuple[int, int | None]]:
    """The due time of each delayed offset, and how long it waits."""
    return {
        number * BLOCK_OFFSETS + index: (delay.due_ms, delay.length_ms)
        for number, block in state.offsets.blocks.items()
        for index, delay in block.due.items()
        if block.delayed >> index & 1
    }

"""Bugs planted into queues: see `mutations`."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq.actors.queues import scanner, waiting
from rayq.actors.queues.leader import QueueLeader
from rayq.actors.queues.numbered_moves import MoveTargets, NumberedMoves
from rayq.actors.queues.open_queue import OpenQueue
from rayq.actors.queues.persister import GroupCommit
from rayq.actors.queues.scanner import LogScanner
from rayq.actors.queues.state_coordinator import QueueStateCoordinator
from rayq.client.queues.queue_core import QueueCore
from rayq.core.queues import block as queue_block
from rayq.core.queues import state as queue_state
from rayq.core.queues.block import Block
from rayq.core.queues.key_order import KeyOrder
from rayq.core.queues.queue_states import QueueStates, Record
from rayq.core.queues.records import HEAD, block_record, head_record
from rayq.core.queues.state import QueueState
from rayq.errors import RayqError

QUEUES = "queues"


# --- answers and locks ----------------------------------------------------------------------------


@plants("48", "a take is answered before its locks are kept", QUEUES)
def take_answered_early() -> list[Patch]:
    def mutated(self: Any, take: Any, locks: Any, parts: Any) -> None:
        answer = self.response(locks), parts
        self.commits.kept()
        take.finish(answer)

    return [(OpenQueue, "_answer", mutated)]


@plants("49", "what a consumer has locked and not begun is a delivery", QUEUES)
def unbegun_counts() -> list[Patch]:
    return [(QueueState, "_leave_unbegun", lambda self, given: None)]


@plants("56", "a consumer keeps what it took for nobody", QUEUES)
def surplus_kept() -> list[Patch]:
    return [(QueueCore, "_look_at_surplus", lambda self: None)]


@plants("48", "a settlement is answered before it is kept", QUEUES)
def ack_answered_early() -> list[Patch]:
    settle = OpenQueue.settle

    def mutated(self: Any, request: Any) -> Any:
        commits = self.commits
        self.commits = _Early(commits)
        try:
            return settle(self, request)
        finally:
            self.commits = commits

    return [(OpenQueue, "settle", mutated)]


class _Early:
    """Commits that nobody waits for."""

    def __init__(self, commits: GroupCommit) -> None:
        self._commits = commits

    def kept(self, *, may_linger: bool) -> None:
        self._commits.kept(may_linger=may_linger)


@plants("49", "who holds a record is in the leader's memory only", QUEUES)
def locks_in_memory() -> list[Patch]:
    return [(queue_state, "block_record", _without("holders"))]


@plants("49", "how often a record was given out is in the leader's memory only", QUEUES)
def count_reset_by_failover() -> list[Patch]:
    return [(queue_state, "block_record", _without("counts", "excused"))]


@plants("50", "delays are in the leader's memory only", QUEUES)
def delay_in_memory() -> list[Patch]:
    return [(queue_state, "block_record", _without("due"))]


def _without(*fields: str) -> Any:
    """`block_record` of blocks without these fields."""
    def mutated(number: int, block: Block | None) -> Any:
        if block is None:
            return block_record(number, None)
        left = Block()
        for name in Block.__slots__:
            setattr(left, name, getattr(block, name))
        for name in fields:
            setattr(left, name, {})
        return block_record(number, left)

    return mutated


@plants("49", "who acknowledges need not name the lock that holds now", QUEUES)
def late_ack_accepted() -> list[Patch]:
    ack = QueueState.ack

    def mutated(self: Any, holder: str, state_epoch: int, locks: Any) -> Any:
        named = []
        for first, last, _ in locks:
            for number, block, mask in self.offsets.parts(first, last):
                for count, bits in block.counts.items():
                    for bit in range(queue_block.BLOCK_OFFSETS):
                        if bits & mask & 1 << bit:
                            offset = (number << queue_block.BLOCK_BITS) + bit
                            has_it = block.holder_of(1 << bit) or holder
                            named.append((has_it, (offset, offset, count)))
        for has_it, lock in named:
            ack(self, has_it, self.state_epoch, [lock])
        return []

    return [(QueueState, "ack", mutated)]


@plants("50", "locks run out by the wall clock", QUEUES)
def locks_by_wall_clock() -> list[Patch]:
    init = OpenQueue.__init__

    def mutated(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._clock = _WallClock(self._clock)
        self._scanner._clock = self._clock

    return [(OpenQueue, "__init__", mutated)]


class _WallClock:
    """A clock whose monotonic time leaps with the wall clock."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def monotonic(self) -> Any:
        return self._clock.wall_ms() / 1000

    def wall_ms(self) -> Any:
        return self._clock.wall_ms()


@plants("50", "delays end by a wall clock that may have leapt", QUEUES)
def delays_by_a_leaping_clock() -> list[Patch]:
    init = OpenQueue.__init__

    def mutated(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._clock_watch = _LeapingWatch(self._clock)

    return [(OpenQueue, "__init__", mutated)]


class _LeapingWatch:
    """A `ClockWatch` that believes the wall clock."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def now_ms(self) -> Any:
        return self._clock.wall_ms()

    latest_ms = now_ms


@plants("56", "locks of a holder that is gone stay until they run out of deliveries", QUEUES)
def nothing_runs_out() -> list[Patch]:
    return [
        (QueueState, "expire", lambda self, now_s: 0),
        (QueueState, "free_holders", lambda self, holders: 0),
    ]


@plants("56", "a dead consumer keeps its locks for as long as they last", QUEUES)
def gone_holders_keep_locks() -> list[Patch]:
    return [(QueueLeader, "_holders_gone", lambda self, holders: None)]


@plants("56", "a consumer whose connection breaks loses its locks at once", QUEUES)
def no_grace_for_holders() -> list[Patch]:
    return [(waiting, "GRACE_S", 0.0)]


# --- the keeper -----------------------------------------------------------------------------------


@plants("47", "the keeper takes what any leader writes", QUEUES)
def old_leader_writes() -> list[Patch]:
    def write(
        self: Any, state_key: Any, fence: int, records: Any, *, gives_out: bool = True
    ) -> list[Record]:
        return [Record(state_key, key, value) for key, value in records]

    return [(QueueStates, "write", write)]


@plants("47", "a write that comes again later undoes those between", QUEUES)
def held_back_write_applied() -> list[Patch]:
    write = QueueStateCoordinator._write
    held: dict[Any, Any] = {}

    def mutated(self: Any, state_key: Any, request: Any, records: Any) -> Any:
        decided = write(self, state_key, request, records)
        before = held.get((self, state_key))
        held[self, state_key] = request.fence, records
        if before is not None and before[0] == request.fence and request.sequence % 7 == 0:
            again = [Record(state_key, key, value) for key, value in before[1]]
            return [*decided, *again]
        return decided

    return [(QueueStateCoordinator, "_write", mutated)]


@plants("47", "a write is answered before it is committed", QUEUES)
def write_answered_early() -> list[Patch]:
    async def mutated(self: Any, peer: Any, request: Any, payload: Any) -> Any:
        until = self._until_committed

        async def at_once() -> None:
            self._check(None)

        self._until_committed = at_once
        try:
            return await write(self, peer, request, payload)
        finally:
            self._until_committed = until

    write = QueueStateCoordinator.write
    return [(QueueStateCoordinator, "write", mutated)]


# --- the start ------------------------------------------------------------------------------------


@plants("52", "the start of a queue passes what is locked", QUEUES)
def start_over_unsettled() -> list[Patch]:
    changes = QueueState.changes

    def mutated(self: Any) -> Any:
        locked = 0
        block = self.offsets.blocks.get(self.start_offset >> queue_block.BLOCK_BITS)
        first = self.start_offset & queue_block.LAST_INDEX
        while block is not None and block.locked >> first + locked & 1:
            locked += 1

        def head(state_epoch: int, start: int, *rest: Any) -> Any:
            return head_record(state_epoch, start + locked, *rest)

        with mock.patch.object(queue_state, "head_record", head):
            return changes(self)

    return [(QueueState, "changes", mutated)]


@plants("52", "blocks are dropped before the start that has passed them is kept", QUEUES)
def blocks_before_head() -> list[Patch]:
    run = QueueState.changes
    held: dict[Any, list[Any]] = {}

    def mutated(self: Any) -> Any:
        found = run(self)
        heads = [record for record in found if record[0] == HEAD]
        rest = [record for record in found if record[0] != HEAD]
        late, held[self] = held.get(self, []), heads
        return [*late, *rest] or found

    return [(QueueState, "changes", mutated)]


# --- what is taken away ---------------------------------------------------------------------------


@plants("51", "what an unclean election cut off stays done", QUEUES)
def truncated_stays_done() -> list[Patch]:
    return [(scanner, "_compare", lambda *args, **options: None)]


@plants("51", "what was cut off is given out again under the old locks", QUEUES)
def cut_within_the_state_epoch() -> list[Patch]:
    cut = QueueState.cut

    def mutated(self: Any, *args: Any, **options: Any) -> None:
        before = self.state_epoch
        cut(self, *args, **options)
        self.state_epoch = before

    return [(QueueState, "cut", mutated)]


@plants("53", "a purge is not kept", QUEUES)
def purge_not_kept() -> list[Patch]:
    purge = QueueState.purge

    def mutated(self: Any, *args: Any, **options: Any) -> Any:
        is_decided, changed = self.offsets.is_decided, set(self.offsets.changed)
        try:
            return purge(self, *args, **options)
        finally:
            self.offsets.is_decided = is_decided
            self.offsets.changed.intersection_update(changed)

    return [(QueueState, "purge", mutated)]


@plants("55", "there are as many locks as consumers ask for", QUEUES)
def locks_without_bound() -> list[Patch]:
    def unbounded(method: Any) -> Any:
        def mutated(*args: Any, **options: Any) -> Any:
            with mock.patch.object(queue_state, "LOCKS_MAX", 1 << 30):
                return method(*args, **options)

        return mutated

    return [
        (QueueState, "take", unbounded(QueueState.take)),
        (QueueState, "first_ready", unbounded(QueueState.first_ready)),
    ]


# --- moves ----------------------------------------------------------------------------------------


@plants("54", "a dead letter is settled before it is written, which is tried once", QUEUES)
def dead_before_written() -> list[Patch]:
    async def mutated(self: Any, move: Any, payload: Any, *_: Any, is_new: bool) -> None:
        self._state.moves.end(move.move_id)
        await self._source.commit()
        with contextlib.suppress(RayqError):
            await self._targets.append(move, payload)

    return [(NumberedMoves, "_carry_out", mutated)]


@plants("54", "a move that is begun again gets a new number", QUEUES)
def move_unnumbered() -> list[Patch]:
    async def resume(self: Any, move: Any) -> str:
        self._state.moves.release(move.move_id)
        await self._source.commit()
        return "begun again"

    return [(NumberedMoves, "resume", resume)]


@plants("54", "a batch is appended again without a look at its target, under any number", QUEUES)
def moved_batch_not_recognised() -> list[Patch]:
    encode = NumberedMoves._encode

    async def look(self: Any, move: Any, before: Any) -> Any:
        return before

    def mutated(self: Any, outcome: Any, records: Any, number: Any) -> Any:
        self._epoch += 1
        return encode(self, outcome, records, (number[0], self._epoch))

    return [(MoveTargets, "look", look), (NumberedMoves, "_encode", mutated)]


# --- the order of keys ----------------------------------------------------------------------------


@plants("57", "who gives the first record of a key back keeps the later ones", QUEUES)
def nack_keeps_later_of_key() -> list[Patch]:
    return [(QueueState, "_free_later", lambda self, offset: None)]


@plants("57", "a later record of a key is given out beside the first one", QUEUES)
def key_order_ignored() -> list[Patch]:
    return [(KeyOrder, "is_first", lambda self, offset: True)]


@plants("57", "a new leader does not know which records have one key", QUEUES)
def keys_not_told_again() -> list[Patch]:
    async def tell_keys(self: Any) -> None:
        self.state.tell_keys(self.state.learned, [])

    return [(LogScanner, "_tell_keys", tell_keys)]

"""The decisions of a queue's leader about each record of one partition.

Pure: facts come in (offsets learned from the log, takes, settlements, the passing of time),
decisions come out as return values, and `changes` gives the records to keep. A decision may be
answered only once the records of a later `changes` are kept.

`OffsetStates` has the state of each offset, and a table of what the states mean. Times: `now_s` is
the leader's monotonic clock, for locks and for the delays of records that were given back; `now_ms`
is the wall clock, for records that wait for a time of day.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from rayq.config import QueueConfig
from rayq.core.large.holds import LargeHolds
from rayq.core.queues.block import (
    BLOCK_BITS,
    BLOCK_OFFSETS,
    BLOCKED,
    CLAIMED,
    DELAYED,
    LAST_INDEX,
    LOCKED,
    MOVING,
    READY,
    Block,
    bits_of,
    count_of,
    lowest,
    raise_counts,
    runs_of,
)
from rayq.core.queues.delays import Delay
from rayq.core.queues.lock_times import TICKS_A_SECOND
from rayq.core.queues.move_state import MoveState
from rayq.core.queues.moves import DELIVERIES, REJECTED
from rayq.core.queues.offset_states import BLOCKS_MAX, OffsetStates
from rayq.core.queues.queue_states import KeptRecord
from rayq.core.queues.records import (
    HEAD,
    block_record,
    decode,
    head_record,
)
from rayq.core.queues.unsettled import Unsettled, page_of
from rayq.messages.secret_names import shown_holder

__all__ = ["Counts", "KeptRecord", "Lock", "Lost", "QueueState"]

Lock = tuple[int, int, int]
"""`(first offset, last offset, count)`."""
Lost = tuple[int, int, str]
"""`(first offset, last offset, who has it now)`."""
Settle = Callable[..., int]
"""`(number, block, live, named, count, *rest)`: handles the offsets of a block that a settlement
names. `live` are the holder's, `named` all that have this delivery count. Returns those that count
as settled."""

LOCKS_MAX = 10_000
"""Maximum number of locked records of a partition."""
DELAYED_MAX = 100_000
READY_MAX = 20_000
"""Maximum number of ready records; beyond it no more are learned. It is twice the maximum of a
take."""
BLOCKED_MAX = 20_000
"""Maximum number of records that wait for earlier ones of their keys. Each costs some 400 bytes."""
NOT_HELD = "another delivery has begun since, or it is settled"
DELAY_MS_MAX = 366 * 24 * 3_600_000


class Counts(NamedTuple):
    ready: int
    blocked: int
    """Number of records that are not ready since an earlier record of the key is unsettled."""
    locked: int
    delayed: int
    moving: int
    done: int
    """Number of offsets that are settled at or above the start, including gaps."""


class QueueState:
    """One queue in one partition, under one leader."""

    def __init__(self, config: QueueConfig, state_epoch: int, offsets: OffsetStates) -> None:
        self.config = config
        """The queue's config. It may be replaced at any time, except `ordered_by_key`."""
        self.state_epoch = state_epoch
        self.offsets = offsets
        self.moves = MoveState(offsets)
        self.holds: LargeHolds | None = None
        """Holds of a queue that its topic's retention waits for: the scanner tells it of large
        values. Kept."""
        self.expired = 0
        """Records that retention removed before they were settled, under this leader."""
        self.given = 0
        """Number of records that were locked since the last `changes`."""
        self._kept: set[int] = set()
        """Blocks that are kept."""
        self._kept_head = b""

    # --- opening ---------------------------------------------------------------------------------

    @classmethod
    def begin(cls, config: QueueConfig, start_offset: int, *, state_epoch: int) -> QueueState:
        """A new queue of which nothing is kept yet. Keep `changes` before anything else: the start
        of the queue must not move."""
        offsets = OffsetStates(start_offset, ordered_by_key=config.ordered_by_key)
        offsets.is_decided = True
        return cls(config, state_epoch, offsets)

    @classmethod
    def replay(
        cls, config: QueueConfig, records: Iterable[KeptRecord], *, now_ms: int, now_s: float
    ) -> QueueState | None:
        """Restores the state from its kept records; None if there is no head among them. Each lock
        has a full timeout again, and no record that was given back waits for longer than after
        that. Raises CorruptBatchError, UnsupportedFormatError."""
        records = list(records)
        kept = decode(records)
        if kept is None:
            return None
        offsets = OffsetStates.restore(
            kept,
            ordered_by_key=config.ordered_by_key,
            timeout_s=config.visibility_timeout_s,
            now_ms=now_ms,
            now_s=now_s,
        )
        state = cls(config, kept.head.state_epoch, offsets)
        state.holds = None if kept.head.holds is None else LargeHolds(kept.head.holds)
        state._kept = set(kept.blocks)
        state._kept_head = next(value or b"" for key, value in records if key == HEAD)
        state.moves.restore(kept)
        return state

    def cut(self, offset: int, state_epoch: int) -> None:
        """Forgets the records at `offset` and above, which the log lost (by an unclean election).
        The other records there now are learned again, and no older lock counts. The lost records
        leave their moves. Only right after `replay`, if `offset` is below `learned`."""
        self.moves.cut(offset)
        self.offsets.drop_from(offset)
        self.void_locks(state_epoch)

    def void_locks(self, state_epoch: int) -> None:
        """Voids all older locks from this state epoch on, which nobody has had before, as locks and
        delivery counts may be lost. Only right after `replay`."""
        self.state_epoch = state_epoch
        for number, block in list(self.offsets.blocks.items()):
            if block.locked:
                self._free(number, block, block.locked, "", is_excused=True)
        self.offsets.is_decided = True

    def keys_wanted(self) -> list[tuple[int, int]]:
        """`(first, last)` of known records whose keys the leader must provide by `tell_keys`,
        ascending, before anything is learned, taken or settled. Only after `replay` with
        `ordered_by_key`."""
        return self.offsets.keys_wanted.runs()

    def tell_keys(self, first: int, keys: Sequence[bytes | None]) -> None:
        """Takes the keys of the known records from `first` on, which is not above the first wanted
        one; settled offsets are skipped."""
        self.offsets.tell_keys(first, keys)

    # --- learning --------------------------------------------------------------------------------

    def room(self, *, is_listing: bool = False) -> int:
        """Number of further offsets that the leader may learn now: 0 if enough are ready, or at a
        bound (`trouble`). An operator who lists records may look further than takes do."""
        counts = self.offsets.counts
        if self.offsets.keys_wanted or counts[DELAYED] >= DELAYED_MAX:
            return 0
        blocks = BLOCKS_MAX - len(self.offsets.blocks)
        room = min(BLOCKED_MAX - counts[BLOCKED], blocks * BLOCK_OFFSETS)
        if not is_listing:
            room = min(room, READY_MAX - counts[READY])
        return max(0, room)

    def learn_epoch(self, epoch: int, first_offset: int) -> None:
        """Notes that records from `first_offset` on (not above `learned`) were appended under this
        leader epoch. Call it before they are learned; a repetition changes nothing."""
        if not self.epochs or self.epochs[-1][0] < epoch:
            self.epochs.append((epoch, first_offset))

    def learn(self, last: int, keys: Sequence[bytes | None] | None = None) -> None:
        """Learns that the offsets from `learned` up to and including `last` have records, which are
        ready. `keys`: one for each, with `ordered_by_key`."""
        self.offsets.learn(last, keys)

    def learn_gap(self, last: int) -> None:
        """Learns that the offsets from `learned` up to and including `last` have no record for
        consumers: markers, aborted, compacted away."""
        self.offsets.learn_done(last)

    def learn_due(self, offset: int, due_ms: int) -> None:
        """Delays a record that was just learned until `due_ms`."""
        for number, block, bit in self.offsets.parts(offset, offset):
            if bit & (block.ready | block.blocked):
                self.offsets.delay(number, block, bit, block.state_of(bit), Delay(due_ms))

    # --- giving out ------------------------------------------------------------------------------

    def first_ready(self, from_offset: int = 0) -> int | None:
        """The first offset at or above `from_offset` that `take` would give; None if it would give
        nothing."""
        if self.offsets.keys_wanted or self.locked >= LOCKS_MAX:
            return None
        return next(self.offsets.ready(from_offset, self.learned), None)

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
        offsets = self.offsets
        left = min(count_max, LOCKS_MAX - offsets.counts[LOCKED])
        if left <= 0 or not offsets.counts[READY] or offsets.keys_wanted:
            return []
        end = offsets.learned if below_offset is None else min(below_offset, offsets.learned)
        timer = offsets.lock_times.timer(now_s, self.config.visibility_timeout_s)
        given: list[Lock] = []
        if offsets.keys is None:
            while left and (found := offsets.next_ready(from_offset, end)) is not None:
                number, block, ready = found
                left -= self._lock(number, block, lowest(ready, left), holder, timer, given)
                from_offset = (number + 1) << BLOCK_BITS
        else:
            for offset in self._in_order(from_offset, end):
                number, bit = offset >> BLOCK_BITS, 1 << (offset & LAST_INDEX)
                left -= self._lock(number, offsets.blocks[number], bit, holder, timer, given)
                if not left:
                    break
        if tells_begins:
            self._leave_unbegun(given)
        return given

    def _in_order(self, from_offset: int, end: int) -> Iterator[int]:
        """The records of a take with `ordered_by_key`: each time the first of the ready ones, and
        of the blocked ones that follow those of this take in the order of their keys."""
        keys, blocks = self.offsets.keys, self.offsets.blocks
        assert keys is not None
        following: list[int] = []
        ready = self.offsets.ready(from_offset, end)
        first = next(ready, None)
        while following or first is not None:
            if first is None or (following and following[0] < first):
                offset = heapq.heappop(following)
            else:
                offset, first = first, next(ready, None)
            after = keys.after(offset)
            yield offset
            if after is not None and after < end:
                block = blocks[after >> BLOCK_BITS]
                if block.blocked >> (after & LAST_INDEX) & 1:
                    heapq.heappush(following, after)

    def _lock(
        self,
        number: int,
        block: Block,
        mask: int,
        holder: str,
        timer: tuple[int, int],
        given: list[Lock],
    ) -> int:
        """Locks ready (or blocked) offsets, and adds them to `given`. Returns their number."""
        many = mask.bit_count()
        self.given += many
        raised = self.offsets.lock(number, block, mask, holder, timer)
        base = number << BLOCK_BITS
        if many == 1:
            index = mask.bit_length() - 1
            parts = [(index, index, raised[0][0])]
        else:
            parts = sorted((*run, count) for count, bits in raised for run in runs_of(bits))
        for first, last, count in parts:
            if given and given[-1][1] == base + first - 1 and given[-1][2] == count:
                given[-1] = (given[-1][0], base + last, count)
            else:
                given.append((base + first, base + last, count))
        return many

    def _leave_unbegun(self, given: list[Lock]) -> None:
        """A record may end its consumer, and with it the locks of records that nobody has seen yet.
        The first delivery of a record counts anyway, if it is not the last one, so that most need
        no report; later ones count once they have begun."""
        is_first_last = self.config.max_deliveries == 1
        for first, last, count in given:
            if count == 1 and not is_first_last:
                continue
            for _, block, mask in self.offsets.parts(first, last):
                is_first = 0 if is_first_last else block.excused.get(count - 1, 0)
                block.unbegun |= mask & ~is_first

    # --- settling --------------------------------------------------------------------------------
    # Each names locks by holder, state epoch, offsets and count, and returns those that are lost:
    # no two deliveries have the same count, and nobody else knows the holder's name. Records that
    # are already settled, or below the start, count as success (rule 53).

    def ack(self, holder: str, state_epoch: int, locks: Iterable[Lock]) -> list[Lost]:
        """Settles the records: they are done."""

        def finish(number: int, block: Block, live: int, named: int, count: int) -> int:
            if live:
                self.offsets.finish(number, block, live, LOCKED, holder)
            return live

        return self._settle(holder, state_epoch, locks, finish)

    def nack(
        self,
        holder: str,
        state_epoch: int,
        locks: Iterable[tuple[int, int, int, int | None]],
        *,
        now_ms: int,
        now_s: float,
    ) -> list[Lost]:
        """Settles the records as failed: `(first, last, count, delay_ms)`. They are due again after
        `delay_ms`, or the backoff if it is None; or become dead letters, after the maximum number
        of deliveries. Records that were freed meanwhile and given to nobody wait as long, too."""

        def delay_of(offset: int, failures: int, delay_ms: int | None) -> Delay | None:
            wait_ms = self._backoff_ms(offset, failures) if delay_ms is None else delay_ms
            wait_ms = min(wait_ms, DELAY_MS_MAX)
            return Delay.of_length(wait_ms, now_ms=now_ms, now_s=now_s) if wait_ms > 0 else None

        def fail(
            number: int, block: Block, live: int, named: int, count: int, delay_ms: int | None
        ) -> int:
            base = number << BLOCK_BITS
            for index in bits_of(live):
                bit = 1 << index
                if not block.locked & bit:
                    continue
                self._free_later(base + index)
                failures = count - count_of(block.excused, bit)
                if self._is_last(failures):
                    error = f"It was released after delivery {failures}, the last one."
                    self._fail_for_good(number, block, bit, failures, DELIVERIES, error, holder)
                elif (delay := delay_of(base + index, failures, delay_ms)) is not None:
                    self.offsets.delay(number, block, bit, LOCKED, delay, holder)
                else:
                    self.offsets.free(number, block, bit, LOCKED, holder)
            for index in bits_of(named & (block.ready | block.blocked)):
                bit = 1 << index
                failures = count - count_of(block.excused, bit)
                if (delay := delay_of(base + index, failures, delay_ms)) is not None:
                    self.offsets.delay(number, block, bit, block.state_of(bit), delay)
                    self.offsets.is_decided = True
            return live | named & ~block.locked

        return self._settle(holder, state_epoch, locks, fail)

    def release(self, holder: str, state_epoch: int, locks: Iterable[Lock]) -> list[Lost]:
        """Takes records back unhandled: they are ready at once, and this delivery does not count
        against `max_deliveries`."""

        def free(number: int, block: Block, live: int, named: int, count: int) -> int:
            if live:
                self._free(number, block, live, holder, is_excused=True)
            return live | named & ~block.locked

        return self._settle(holder, state_epoch, locks, free)

    def reject(
        self,
        holder: str,
        state_epoch: int,
        locks: Iterable[tuple[int, int, str]],
        *,
        now_ms: int,
        now_s: float,
        reason: str = REJECTED,
    ) -> list[Lost]:
        """Rejects records, `(offset, count, error)`: they become dead letters at once. If they stay
        instead, they wait for the maximum backoff."""
        if self._stays:
            wait_ms = round(self.config.backoff_max_s * 1000)
            waiting = [(offset, offset, count, wait_ms) for offset, count, _ in locks]
            return self.nack(holder, state_epoch, waiting, now_ms=now_ms, now_s=now_s)

        def die(
            number: int, block: Block, live: int, named: int, count: int, error: str
        ) -> int:
            if live:
                failures = count - count_of(block.excused, live)
                self._fail_for_good(number, block, live, failures, reason, error, holder)
            return live | named & block.moving

        singles = ((offset, offset, count, error) for offset, count, error in locks)
        return self._settle(holder, state_epoch, singles, die)

    def extend(
        self,
        holder: str,
        state_epoch: int,
        locks: Iterable[tuple[int, int, int, int]],
        *,
        now_s: float,
    ) -> list[Lost]:
        """Extends the locks `(first, last, count, timeout_ms)` to at least `timeout_ms` from
        `now_s` on, but never past `max_handling_s` after they were taken. It changes nothing that
        is kept."""
        lock_times = self.offsets.lock_times
        longest = math.ceil(self.config.max_handling_s * TICKS_A_SECOND)

        def prolong(
            number: int, block: Block, live: int, named: int, count: int, timeout_ms: int
        ) -> int:
            timeout_s = min(timeout_ms / 1000, self.config.max_handling_s)
            wanted = lock_times.tick_after(now_s, timeout_s)
            for timer, bits in list(block.timers.items()) if live else ():
                end, taken = timer
                later = min(wanted, taken + longest)
                if bits & live and later > end:
                    block.move_timer(bits & live, timer, (later, taken))
                    lock_times.watch(later, number)
            return live

        return self._settle(holder, state_epoch, locks, prolong)

    def note_begun(self, holder: str, state_epoch: int, locks: Iterable[Lock]) -> list[Lost]:
        """Notes that a user is about to get these records: from now on their delivery counts. A
        consumer that no longer holds them is told so, even if they are settled: they must not be
        handled again."""
        lost: list[Lost] = []
        is_ours = state_epoch == self.state_epoch
        for first, last, count in locks:
            told = first
            for number, block, mask in self.offsets.parts(first, last) if is_ours else ():
                live = block.held(holder, count) & mask
                if live & block.unbegun:
                    block.unbegun &= ~live
                    self.offsets.changed.add(number)
                    self.offsets.is_decided = True
                base = number << BLOCK_BITS
                for begin, end in runs_of(live):
                    if told < base + begin:
                        lost.append((told, base + begin - 1, NOT_HELD))
                    told = base + end + 1
            if told <= last:
                lost.append((told, last, NOT_HELD))
        return lost

    def _settle(
        self, holder: str, state_epoch: int, locks: Iterable[tuple[Any, ...]], settle: Settle
    ) -> list[Lost]:
        """Calls `settle` for each block of the locks `(first, last, count, *rest)`. Returns those
        that are lost: all that are neither done nor settled by it."""
        gone: dict[int, int] = {}
        unknown: list[Lost] = []
        is_ours = state_epoch == self.state_epoch
        parts, learned = self.offsets.parts, self.learned
        for first, last, count, *rest in locks:
            for number, block, mask in parts(first, last):
                named = block.counts.get(count, 0) & mask if is_ours else 0
                live = named & block.locked & block.holders.get(holder, 0)
                settled = settle(number, block, live, named, count, *rest)
                if settled != mask:
                    gone[number] = gone.get(number, 0) | mask & ~settled
            if first <= last and last >= learned:
                unknown.append((max(first, learned), last, "no consumer has it"))
        return self._lost(gone) + unknown if gone else unknown

    def _lost(self, gone: dict[int, int]) -> list[Lost]:
        """Lists all lost locks in one pass: it iterates over the holders of each block once,
        however many ranges name it."""
        lost: list[Lost] = []
        for number, mask in sorted(gone.items()):
            block = self.offsets.blocks.get(number)
            if block is not None and mask & ~block.done:
                self._tell_lost(number, block, mask & ~block.done, lost)
        return lost

    def _tell_lost(self, number: int, block: Block, mask: int, lost: list[Lost]) -> None:
        base = number << BLOCK_BITS
        held = 0
        for holder, bits in block.holders.items():
            held |= bits
            for first, last in runs_of(bits & mask):
                lost.append((base + first, base + last, f"consumer {shown_holder(holder)} has it"))
        for first, last in runs_of(block.moving & mask):
            lost.append((base + first, base + last, "it is on its way to the dead letters"))
        for first, last in runs_of(mask & ~(held | block.moving)):
            lost.append((base + first, base + last, "no consumer has it"))

    # --- failures --------------------------------------------------------------------------------

    @property
    def _stays(self) -> bool:
        """True if no record ever fails for good."""
        return self.config.dead_letters == "stay"

    def _is_last(self, failures: int) -> bool:
        """Returns whether a record that failed so often fails for good."""
        return failures >= self.config.max_deliveries and not self._stays

    def _backoff_ms(self, offset: int, failures: int) -> int:
        """Backoff that doubles with each failure. A jitter of a fifth separates records that failed
        together."""
        longest_ms = self.config.backoff_max_s * 1000
        wait_ms = min(longest_ms, self.config.backoff_s * 1000 * 2.0 ** min(failures - 1, 60))
        scattered = (offset * 2_654_435_761 + failures * 40_503) % 1024 / 1024
        return round(min(longest_ms, wait_ms * (0.8 + 0.4 * scattered)))

    def _free(
        self, number: int, block: Block, mask: int, holder: str, *, is_excused: bool
    ) -> None:
        """Frees locked records of which nobody reported a failure. A holder of "" is unknown."""
        unbegun = 0 if is_excused else mask & block.unbegun
        if unbegun:
            self._free(number, block, unbegun, holder, is_excused=True)
            mask &= block.locked
            if not mask:
                return
        few = self.config.max_deliveries
        may_be_last = not is_excused and any(
            bits & mask for count, bits in block.counts.items() if count >= few
        )
        if self.offsets.keys is None and not may_be_last:
            if is_excused:
                raise_counts(block.excused, mask)
            self.offsets.free(number, block, mask, LOCKED, holder)
            return
        base = number << BLOCK_BITS
        for index in bits_of(mask):
            bit = 1 << index
            if not block.locked & bit:
                continue
            self._free_later(base + index)
            failures = count_of(block.counts, bit) - count_of(block.excused, bit)
            if is_excused:
                raise_counts(block.excused, bit)
            elif self._is_last(failures):
                error = f"Delivery {failures}, the last one, was not settled in time."
                self._fail_for_good(number, block, bit, failures, DELIVERIES, error, holder)
                continue
            self.offsets.free(number, block, bit, LOCKED, holder)

    def _free_later(self, offset: int) -> None:
        """Frees the later records of the key of `offset`, whose lock goes: they would be handled
        before it (rule 57). They did not fail themselves."""
        if self.offsets.keys is None:
            return
        for later in self.offsets.keys.all_after(offset):
            number, bit = later >> BLOCK_BITS, 1 << (later & LAST_INDEX)
            block = self.offsets.blocks[number]
            if block.locked & bit:
                raise_counts(block.excused, bit)
                self.offsets.free(number, block, bit, LOCKED)
            elif not block.moving & bit:
                return

    def _fail_for_good(
        self, number: int, block: Block, bit: int, count: int, reason: str, error: str, holder: str
    ) -> None:
        if self.config.dead_letters == "discard":
            self.moves.dead += 1
            self.offsets.finish(number, block, bit, LOCKED, holder)
            return
        self.offsets.transition(number, block, bit, LOCKED, MOVING, holder)
        offset = (number << BLOCK_BITS) + bit.bit_length() - 1
        self.moves.add_failed(offset, count, reason, error)

    def free_holders(self, holders: Set[str]) -> int:
        """Frees the records of holders that are gone: they are ready, or dead letters after the
        maximum number of deliveries. Returns their number."""
        before = self.locked
        for number in sorted(self.offsets.blocks):
            block = self.offsets.blocks.get(number)
            for holder in () if block is None else sorted(block.holders.keys() & holders):
                # The lock of a later record of a key may have gone with an earlier one's.
                if block is not None and holder in block.holders:
                    self._free(number, block, block.holders[holder], holder, is_excused=False)
        return before - self.locked

    # --- time ------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> int:
        """Frees the expired locks, as `free_holders` does. Returns their number."""
        before = self.locked
        tick = self.offsets.lock_times.tick_at(now_s)
        for number in self.offsets.lock_times.ended(tick):
            block = self.offsets.blocks.get(number)
            if block is None:
                continue
            ended = 0
            for timer, bits in list(block.timers.items()):
                if timer[0] <= tick:
                    ended |= bits & block.locked
                    del block.timers[timer]
            if ended:
                self._free(number, block, ended, "", is_excused=False)
        return before - self.locked

    def prolong(self, by_s: float) -> None:
        """Prolongs all locks by time in which nobody could be heard."""
        self.offsets.lock_times.prolong(by_s)

    def due(self, *, now_ms: int, now_s: float) -> int:
        """Makes the delayed records ready whose time has come. Returns their number."""
        before = self.offsets.counts[DELAYED]
        for offset, delay in self.offsets.delays.ended(now_ms=now_ms, now_s=now_s):
            number, index = offset >> BLOCK_BITS, offset & LAST_INDEX
            block = self.offsets.blocks.get(number)
            if block is None or block.due.get(index) != delay or not block.delayed >> index & 1:
                continue
            self.offsets.free(number, block, 1 << index, DELAYED)
        return before - self.offsets.counts[DELAYED]

    @property
    def next_expiry_s(self) -> float | None:
        """Time at which `expire` may have something to do. None: nothing is locked."""
        return self.offsets.lock_times.next_s if self.locked else None

    def due_in_ms(self, *, now_ms: int, now_s: float) -> int | None:
        """Time until the next delayed record is due. None: none is delayed."""
        if not self.offsets.counts[DELAYED]:
            return None
        return self.offsets.delays.next_in_ms(now_ms=now_ms, now_s=now_s)

    # --- start -----------------------------------------------------------------------------------

    def advance_start(self, offset: int) -> int:
        """Moves the start to the log's new start. Returns the number of unsettled records that were
        lost by that; moves in progress continue."""
        if offset <= self.start_offset:
            return 0
        gone = self.offsets.drop_below(offset)
        self.moves.drop_below(offset)
        self.expired += gone
        self.offsets.is_decided = True
        return gone

    def purge(self, end_offset: int) -> int:
        """Settles all records below `end_offset` that are neither locked nor moving, also those
        that were not learned yet. Returns the number of offsets."""
        purged = 0
        for number, block, mask in self.offsets.parts(self.start_offset, end_offset - 1):
            mask &= block.ready | block.blocked | block.delayed
            purged += mask.bit_count()
            self.offsets.finish(number, block, mask)
        if end_offset > self.learned:
            purged += end_offset - self.learned
            self.offsets.learn_done(end_offset - 1)
        self.offsets.is_decided = True
        return purged

    # --- looking ---------------------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        return self.offsets.start_offset

    @property
    def learned(self) -> int:
        return self.offsets.learned

    @property
    def epochs(self) -> list[tuple[int, int]]:
        return self.offsets.epochs

    @property
    def ready(self) -> int:
        return self.offsets.counts[READY]

    @property
    def dead(self) -> int:
        """Records that became dead letters, or were dropped instead, under this leader."""
        return self.moves.dead

    @property
    def locked(self) -> int:
        return self.offsets.counts[LOCKED]

    @property
    def blocked(self) -> int:
        return self.offsets.counts[BLOCKED]

    def counts(self) -> Counts:
        counts = self.offsets.counts
        moving = counts[MOVING] + counts[CLAIMED]
        done = self.learned - self.start_offset - sum(counts.values())
        return Counts(self.ready, self.blocked, self.locked, counts[DELAYED], moving, done)

    def first_unsettled_ready(self) -> int | None:
        """The oldest record that nobody holds, for its age."""
        for number in sorted(self.offsets.blocks) if self.ready + self.blocked else ():
            block = self.offsets.blocks[number]
            free = block.ready | block.blocked
            if free:
                return (number << BLOCK_BITS) + (free & -free).bit_length() - 1
        return None

    def unsettled(
        self, from_offset: int, states: Iterable[str], count_max: int, *, now_ms: int, now_s: float
    ) -> tuple[list[Unsettled], int | None]:
        """See `page_of`."""
        return page_of(self.offsets, from_offset, states, count_max, now_ms=now_ms, now_s=now_s)

    def oldest_lock(self, now_s: float) -> tuple[int, str] | None:
        """`(age in ms, holder)` of the lock that was taken first under this leader."""
        oldest: tuple[int, str] | None = None
        for block in self.offsets.blocks.values():
            for (_, taken), bits in block.timers.items() if block.locked else ():
                held = bits & block.locked
                if held and (oldest is None or taken < oldest[0]):
                    oldest = taken, block.holder_of(held & -held) or ""
        if oldest is None:
            return None
        return self.offsets.lock_times.age_ms(oldest[0], now_s), oldest[1]

    def excused(self, locks: Iterable[Lock]) -> list[Lock]:
        """`(first, last, number)`: number of deliveries of these locked records that were no
        failures, if there are any."""
        return [
            ((number << BLOCK_BITS) + first, (number << BLOCK_BITS) + last, many)
            for start, end, _ in locks
            for number, block, mask in self.offsets.parts(start, end)
            for many, bits in block.excused.items()
            for first, last in runs_of(bits & mask)
        ]

    def unbegun(self, locks: list[Lock]) -> list[tuple[int, int]]:
        """`(first, last)` of those locked records whose beginning their consumer must report."""
        return [
            ((number << BLOCK_BITS) + first, (number << BLOCK_BITS) + last)
            for start, end, _ in locks
            for number, block, mask in self.offsets.parts(start, end)
            if block.unbegun
            for first, last in runs_of(block.unbegun & mask)
        ]

    @property
    def trouble(self) -> str | None:
        """The bound that keeps `take` or `learn` from continuing (rule 55)."""
        counts, blocks = self.offsets.counts, len(self.offsets.blocks)
        if counts[LOCKED] >= LOCKS_MAX:
            so_many, why = f"{counts[LOCKED]} records are locked", (
                "consumers take records and do not settle them."
            )
        elif counts[DELAYED] >= DELAYED_MAX:
            so_many, why = f"{counts[DELAYED]} records are delayed", "others wait for them."
        elif counts[BLOCKED] >= BLOCKED_MAX:
            so_many, why = f"{counts[BLOCKED]} records wait for earlier ones of their keys", (
                "what comes after them waits, too."
            )
        elif blocks >= BLOCKS_MAX:
            so_many, why = f"Unsettled records lie scattered over {blocks} blocks", (
                "later ones wait for them."
            )
        else:
            return None
        return f"{so_many}, as many as may be: {why}"

    # --- keeping ---------------------------------------------------------------------------------

    @property
    def is_changed(self) -> bool:
        """True if a decision was made since the last `changes`."""
        return self.offsets.is_decided

    def changes(self) -> list[KeptRecord]:
        """The records to keep for all decisions since the last call, the head first. Either all of
        them are kept or none, and in the order of the calls."""
        offsets, kept = self.offsets, []
        head = head_record(
            self.state_epoch,
            offsets.start_offset,
            offsets.learned,
            offsets.epochs,
            offsets.done_blocks.runs(),
            None if self.holds is None else self.holds.kept(),
        )
        if head[1] != self._kept_head:
            self._kept_head = head[1] or b""
            kept.append(head)
        kept += self.moves.changes()
        for number in sorted(offsets.changed):
            block = offsets.blocks.get(number)
            if block is not None:
                self._kept.add(number)
                kept.append(block_record(number, block))
            elif number in self._kept:
                self._kept.discard(number)
                kept.append(block_record(number, None))
        offsets.changed.clear()
        offsets.is_decided = False
        self.given = 0
        return kept

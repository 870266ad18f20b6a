"""The decisions of a queue's leader about each record of one partition.

Pure: facts come in (offsets learned from the log, takes, settlements, the passing of time),
decisions come out as return values, and `changes` gives the records to keep. A decision may be
answered only once the records of a later `changes` are kept.

Each offset is in one state: *ready*, *blocked* (an earlier record of its key is unsettled),
*locked*, *delayed*, *moving* (to the dead letters, or where an operator sends it) or *done*. Times:
`now_s` is the leader's monotonic clock, for locks and for the delays of records that were given
back; `now_ms` is the wall clock, for records that wait for a time of day.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

from rayq.config import QueueConfig
from rayq.core.queues.block import (
    BLOCK_BITS,
    BLOCK_OFFSETS,
    LAST_INDEX,
    Block,
    bits_of,
    count_of,
    mask_of,
    raise_counts,
    runs_of,
)
from rayq.core.queues.delays import Delay
from rayq.core.queues.kept_queues import KeptRecord
from rayq.core.queues.ledger import BLOCKS_MAX, Counts
from rayq.core.queues.lock_times import TICKS_A_SECOND
from rayq.core.queues.mover import QueueMover
from rayq.core.queues.moves import DELIVERIES, ERROR_BYTES_MAX, REJECTED, Dying
from rayq.core.queues.taker import LOCKS_MAX, Lock, QueueTaker
from rayq.messages.secret_names import shown_holder

__all__ = ["Counts", "KeptRecord", "Lock", "Lost", "QueueState"]

Lost = tuple[int, int, str]
"""`(first offset, last offset, who has it now)`."""

DELAYED_MAX = 100_000
READY_MAX = 20_000
"""Maximum number of ready records; beyond it no more are learned. It is twice the maximum of a
take."""
BLOCKED_MAX = 20_000
"""Maximum number of records that wait for earlier ones of their keys. Each costs some 400 bytes."""
NOT_HELD = "another delivery has begun since, or it is settled"
DELAY_MS_MAX = 366 * 24 * 3_600_000


class QueueState(QueueTaker, QueueMover):
    """One queue in one partition, under one leader."""

    # --- opening ---------------------------------------------------------------------------------

    @classmethod
    def begin(cls, config: QueueConfig, start_offset: int, *, state_epoch: int) -> QueueState:
        """A new queue of which nothing is kept yet. Keep `changes` before anything else: the start
        of the queue must not move."""
        state = cls(config, state_epoch, start_offset)
        state._is_decided = True
        return state

    @classmethod
    def replay(
        cls, config: QueueConfig, records: Iterable[KeptRecord], *, now_ms: int, now_s: float
    ) -> QueueState | None:
        """Restores the state from its kept records; None if there is no head among them. Each lock
        has a full timeout again, and no record that was given back waits for longer than after
        that. Raises CorruptBatchError, UnsupportedFormatError."""
        state = cls(config, 0, 0)
        return state if state._restore(records, now_ms=now_ms, now_s=now_s) else None

    def cut(self, offset: int, state_epoch: int) -> None:
        """Forgets the records at `offset` and above, which the log lost (by an unclean election).
        The other records there now are learned again, and no older lock counts. The lost records
        leave their moves. Only right after `replay`, if `offset` is below `learned`."""
        self._cut_moves(offset)
        self._drop_from(offset)
        self.void_locks(state_epoch)

    def void_locks(self, state_epoch: int) -> None:
        """Voids all older locks from this state epoch on, which nobody has had before, as locks and
        delivery counts may be lost. Only right after `replay`."""
        self.state_epoch = state_epoch
        for number, block in list(self._blocks.items()):
            if block.locked:
                self._free(number, block, block.locked, "", is_excused=True)
        self._is_decided = True

    def keys_wanted(self) -> list[tuple[int, int]]:
        """`(first, last)` of known records whose keys the leader must provide by `tell_keys`,
        ascending, before anything is learned, taken or settled. Only after `replay` with
        `ordered_by_key`."""
        return self._keys_wanted.runs()

    def tell_keys(self, first: int, keys: Sequence[bytes | None]) -> None:
        """Takes the keys of the known records from `first` on, which is not above the first wanted
        one; settled offsets are skipped."""
        assert self._keys is not None
        for offset, key in enumerate(keys, first):
            if key is None or offset not in self._keys_wanted:
                continue
            self._keys.add(offset, key)
            before = self._keys.before(offset)
            if before is None:
                continue
            number, bit = offset >> BLOCK_BITS, 1 << (offset & LAST_INDEX)
            block = self._blocks[number]
            if block.ready & bit:
                block.ready ^= bit
                self._ready -= 1
                block.blocked |= bit
                self._blocked += 1
        self._keys_wanted.remove_below(first + len(keys))

    # --- learning --------------------------------------------------------------------------------

    def room(self, *, is_listing: bool = False) -> int:
        """Number of further offsets that the leader may learn now: 0 if enough are ready, or at a
        bound (`trouble`). An operator who lists records may look further than takes do."""
        if self._keys_wanted or self._delayed >= DELAYED_MAX:
            return 0
        room = min(BLOCKED_MAX - self._blocked, (BLOCKS_MAX - len(self._blocks)) * BLOCK_OFFSETS)
        if not is_listing:
            room = min(room, READY_MAX - self._ready)
        return max(0, room)

    def learn_epoch(self, epoch: int, first_offset: int) -> None:
        """Notes that records from `first_offset` on (not above `learned`) were appended under this
        leader epoch. Call it before they are learned; a repetition changes nothing."""
        if not self.epochs or self.epochs[-1][0] < epoch:
            self.epochs.append((epoch, first_offset))

    def learn(self, last: int, keys: Sequence[bytes | None] | None = None) -> None:
        """Learns that the offsets from `learned` up to and including `last` have records, which are
        ready. `keys`: one for each, with `ordered_by_key`."""
        first, self.learned = self.learned, max(self.learned, last + 1)
        if self._keys is not None:
            assert keys is not None and len(keys) == last + 1 - first
            for offset, key in enumerate(keys, first):
                if key is not None:
                    self._keys.add(offset, key)
        for number in range(first >> BLOCK_BITS, (last >> BLOCK_BITS) + 1):
            base = number << BLOCK_BITS
            block = self._block_to_learn(number)
            mask = mask_of(max(0, first - base), min(LAST_INDEX, last - base))
            self._free_bits(number, block, mask)

    def learn_gap(self, last: int) -> None:
        """Learns that the offsets from `learned` up to and including `last` have no record for
        consumers: markers, aborted, compacted away."""
        self._learn_done(last)

    def learn_due(self, offset: int, due_ms: int) -> None:
        """Delays a record that was just learned until `due_ms`."""
        for number, block, bit in self._parts(offset, offset):
            if bit & (block.ready | block.blocked):
                self._take_out(block, bit)
                self._delay(number, block, offset & LAST_INDEX, Delay(due_ms))
                self._changed.add(number)

    # --- settling --------------------------------------------------------------------------------
    # Each names locks by holder, state epoch, offsets and count, and returns those that are lost:
    # no two deliveries have the same count, and nobody else knows the holder's name. Records that
    # are already settled, or below the start, count as success (rule 53).

    def ack(self, holder: str, state_epoch: int, locks: Iterable[Lock]) -> list[Lost]:
        """Settles the records: they are done."""
        gone: dict[int, int] = {}
        unknown: list[Lost] = []
        is_ours = state_epoch == self.state_epoch
        for first, last, count in locks:
            for number, block, mask in self._parts(first, last):
                live = block.held(holder, count) & mask if is_ours else 0
                if live:
                    self._unlock(block, live, holder)
                    self._finish(number, block, live)
                if mask & ~block.done:
                    gone[number] = gone.get(number, 0) | mask
            if last >= self.learned:
                self._tell_unknown(first, last, unknown)
        return self._lost(gone, unknown)

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
        gone: dict[int, int] = {}
        unknown: list[Lost] = []
        is_ours = state_epoch == self.state_epoch
        for first, last, count, delay_ms in locks:
            for number, block, mask in self._parts(first, last):
                named = block.counts.get(count, 0) & mask if is_ours else 0
                live = block.held(holder, count) & named
                if live:
                    self._fail(number, block, live, holder, count, delay_ms, now_ms, now_s)
                free = named & (block.ready | block.blocked)
                if free:
                    self._delay_free(number, block, free, count, delay_ms, now_ms, now_s)
                not_settled = mask & ~(block.done | (named & ~block.locked) | live)
                if not_settled:
                    gone[number] = gone.get(number, 0) | not_settled
            if last >= self.learned:
                self._tell_unknown(first, last, unknown)
        return self._lost(gone, unknown)

    def release(self, holder: str, state_epoch: int, locks: Iterable[Lock]) -> list[Lost]:
        """Takes records back unhandled: they are ready at once, and this delivery does not count
        against `max_deliveries`."""
        gone: dict[int, int] = {}
        unknown: list[Lost] = []
        is_ours = state_epoch == self.state_epoch
        for first, last, count in locks:
            for number, block, mask in self._parts(first, last):
                named = block.counts.get(count, 0) & mask if is_ours else 0
                live = block.held(holder, count) & named
                if live:
                    self._free(number, block, live, holder, is_excused=True)
                not_settled = mask & ~(block.done | (named & ~block.locked) | live)
                if not_settled:
                    gone[number] = gone.get(number, 0) | not_settled
            if last >= self.learned:
                self._tell_unknown(first, last, unknown)
        return self._lost(gone, unknown)

    def note_begun(self, holder: str, state_epoch: int, locks: Iterable[Lock]) -> list[Lost]:
        """Notes that a user is about to get these records: from now on their delivery counts. A
        consumer that no longer holds them is told so, even if they are settled: they must not be
        handled again."""
        lost: list[Lost] = []
        is_ours = state_epoch == self.state_epoch
        for first, last, count in locks:
            told = first
            for number, block, mask in self._parts(first, last) if is_ours else ():
                live = block.held(holder, count) & mask
                if live & block.unbegun:
                    block.unbegun &= ~live
                    self._changed.add(number)
                    self._is_decided = True
                base = number << BLOCK_BITS
                for begin, end in runs_of(live):
                    if told < base + begin:
                        lost.append((told, base + begin - 1, NOT_HELD))
                    told = base + end + 1
            if told <= last:
                lost.append((told, last, NOT_HELD))
        return lost

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
        gone: dict[int, int] = {}
        unknown: list[Lost] = []
        is_ours = state_epoch == self.state_epoch
        for offset, count, error in locks:
            for number, block, bit in self._parts(offset, offset):
                named = block.counts.get(count, 0) & bit if is_ours else 0
                if block.held(holder, count) & named:
                    self._unlock(block, bit, holder)
                    failures = count - count_of(block.excused, bit)
                    self._die(number, block, offset & LAST_INDEX, failures, reason, error)
                elif not bit & (block.done | (block.moving & named)):
                    gone[number] = gone.get(number, 0) | bit
            if offset >= self.learned:
                self._tell_unknown(offset, offset, unknown)
        return self._lost(gone, unknown)

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
        gone: dict[int, int] = {}
        unknown: list[Lost] = []
        is_ours = state_epoch == self.state_epoch
        longest = math.ceil(self.config.max_handling_s * TICKS_A_SECOND)
        for first, last, count, timeout_ms in locks:
            timeout_s = min(timeout_ms / 1000, self.config.max_handling_s)
            wanted = self._times.tick_after(now_s, timeout_s)
            for number, block, mask in self._parts(first, last):
                live = block.held(holder, count) & mask if is_ours else 0
                not_settled = mask & ~(block.done | live)
                if not_settled:
                    gone[number] = gone.get(number, 0) | not_settled
                for timer, bits in list(block.timers.items()) if live else ():
                    end, taken = timer
                    later = min(wanted, taken + longest)
                    if bits & live and later > end:
                        block.move_timer(bits & live, timer, (later, taken))
                        self._times.watch(later, number)
                    live &= ~bits
                    if not live:
                        break
            if last >= self.learned:
                self._tell_unknown(first, last, unknown)
        return self._lost(gone, unknown)

    def free_holders(self, holders: Set[str]) -> int:
        """Frees the records of holders that are gone: they are ready, or dead letters after the
        maximum number of deliveries. Returns their number."""
        before = self._locked
        for number in sorted(self._blocks):
            block = self._blocks.get(number)
            for holder in () if block is None else sorted(block.holders.keys() & holders):
                # The lock of a later record of a key may have gone with an earlier one's.
                if block is not None and holder in block.holders:
                    self._free(number, block, block.holders[holder], holder, is_excused=False)
        return before - self._locked

    @property
    def _stays(self) -> bool:
        """True if no record ever fails for good."""
        return self.config.dead_letters == "stay"

    def _unlock(self, block: Block, mask: int, holder: str) -> None:
        block.unlock(mask, holder)
        self._locked -= mask.bit_count()
        self._is_decided = True

    def _fail(
        self,
        number: int,
        block: Block,
        mask: int,
        holder: str,
        count: int,
        delay_ms: int | None,
        now_ms: int,
        now_s: float,
    ) -> None:
        """Handles records with which a consumer failed."""
        self._changed.add(number)
        base = number << BLOCK_BITS
        for index in bits_of(mask):
            bit = 1 << index
            if not block.locked & bit:
                continue
            self._unlock(block, bit, holder)
            self._free_later(base + index)
            failures = count - count_of(block.excused, bit)
            if failures >= self.config.max_deliveries and not self._stays:
                error = f"It was given back after delivery {failures}, the last one it has."
                self._die(number, block, index, failures, DELIVERIES, error)
                continue
            wait_ms = self._backoff_ms(base + index, failures) if delay_ms is None else delay_ms
            if wait_ms > 0:
                self._delay(number, block, index, _delay_of(wait_ms, now_ms, now_s))
            else:
                self._free_bits(number, block, bit)

    def _delay_free(
        self,
        number: int,
        block: Block,
        mask: int,
        count: int,
        delay_ms: int | None,
        now_ms: int,
        now_s: float,
    ) -> None:
        """Delays records with which a consumer failed after they were freed."""
        for index in bits_of(mask):
            wait_ms = delay_ms
            if wait_ms is None:
                failures = count - count_of(block.excused, 1 << index)
                wait_ms = self._backoff_ms((number << BLOCK_BITS) + index, failures)
            if wait_ms > 0:
                self._take_out(block, 1 << index)
                self._delay(number, block, index, _delay_of(wait_ms, now_ms, now_s))
                self._changed.add(number)
                self._is_decided = True

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
        """Frees records that nobody holds any more, and of which nobody reported a failure. A
        holder of "" is unknown.
        """
        self._changed.add(number)
        unbegun = 0 if is_excused else mask & block.unbegun
        if unbegun:
            self._free(number, block, unbegun, holder, is_excused=True)
            mask &= block.locked
            if not mask:
                return
        if is_excused and self._keys is None:
            self._unlock(block, mask, holder)
            raise_counts(block.excused, mask)
            self._free_bits(number, block, mask)
            return
        few = self.config.max_deliveries
        is_never_last = self._stays or not any(
            bits & mask for count, bits in block.counts.items() if count >= few
        )
        if self._keys is None and is_never_last:
            self._unlock(block, mask, holder)
            self._free_bits(number, block, mask)
            return
        base = number << BLOCK_BITS
        for index in bits_of(mask):
            bit = 1 << index
            if not block.locked & bit:
                continue
            self._unlock(block, bit, holder)
            self._free_later(base + index)
            failures = count_of(block.counts, bit) - count_of(block.excused, bit)
            if is_excused:
                raise_counts(block.excused, bit)
            elif failures >= few and not self._stays:
                error = f"Nobody settled delivery {failures}, the last one it has, in its time."
                self._die(number, block, index, failures, DELIVERIES, error)
                continue
            self._free_bits(number, block, bit)

    def _free_later(self, offset: int) -> None:
        """Frees the later records of the key of `offset`, whose lock is gone: they would be handled
        before it (rule 57). They did not fail themselves."""
        if self._keys is None:
            return
        for later in self._keys.all_after(offset):
            number, bit = later >> BLOCK_BITS, 1 << (later & LAST_INDEX)
            block = self._blocks[number]
            if block.locked & bit:
                self._changed.add(number)
                self._unlock(block, bit, "")
                raise_counts(block.excused, bit)
                self._free_bits(number, block, bit)
            elif not block.moving & bit:
                return

    def _die(
        self, number: int, block: Block, index: int, count: int, reason: str, error: str
    ) -> None:
        if self.config.dead_letters == "discard":
            self.dead += 1
            self._finish(number, block, 1 << index)
            return
        block.moving |= 1 << index
        offset = (number << BLOCK_BITS) + index
        kept = error.encode(errors="replace")[:ERROR_BYTES_MAX].decode(errors="ignore")
        self._dying[offset] = Dying(offset, count, reason, kept)
        self._changed.add(number)
        self._changed_dying.add(offset)

    def _lost(self, gone: dict[int, int], unknown: list[Lost]) -> list[Lost]:
        """Lists all lost locks in one pass: it iterates over the holders of each block once,
        however many ranges name it."""
        lost: list[Lost] = []
        for number, mask in sorted(gone.items()):
            block = self._blocks.get(number)
            if block is not None and mask & ~block.done:
                self._tell_lost(number, block, mask & ~block.done, lost)
        return lost + unknown

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
            lost.append((base + first, base + last, "nobody has it"))

    def _tell_unknown(self, first: int, last: int, lost: list[Lost]) -> None:
        if first <= last:
            lost.append((max(first, self.learned), last, "nobody has it"))

    # --- time ------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> int:
        """Frees the expired locks, as `free_holders` does. Returns their number."""
        before = self._locked
        tick = self._times.tick(now_s)
        for number in self._times.ended(tick):
            block = self._blocks.get(number)
            if block is None:
                continue
            ended = 0
            for timer, bits in list(block.timers.items()):
                if timer[0] <= tick:
                    ended |= bits & block.locked
                    del block.timers[timer]
            if ended:
                self._free(number, block, ended, "", is_excused=False)
        return before - self._locked

    def prolong(self, by_s: float) -> None:
        """Prolongs all locks by time in which nobody could be heard."""
        self._times.prolong(by_s)

    def due(self, *, now_ms: int, now_s: float) -> int:
        """Makes the delayed records ready whose time has come. Returns their number."""
        before = self._delayed
        for offset, delay in self._delays.ended(now_ms=now_ms, now_s=now_s):
            number, index = offset >> BLOCK_BITS, offset & LAST_INDEX
            block = self._blocks.get(number)
            if block is None or block.due.get(index) != delay or not block.delayed >> index & 1:
                continue
            self._take_out(block, 1 << index)
            self._free_bits(number, block, 1 << index)
            self._changed.add(number)
        return before - self._delayed

    @property
    def next_expiry_s(self) -> float | None:
        """Time at which `expire` may have something to do. None: nothing is locked."""
        return self._times.next_s if self._locked else None

    def due_in_ms(self, *, now_ms: int, now_s: float) -> int | None:
        """Time until the next delayed record is due. None: none is delayed."""
        return self._delays.next_in_ms(now_ms=now_ms, now_s=now_s) if self._delayed else None

    # --- looking ---------------------------------------------------------------------------------

    def oldest_lock(self, now_s: float) -> tuple[int, str] | None:
        """`(age in ms, holder)` of the lock that was taken first under this leader."""
        oldest: tuple[int, str] | None = None
        for block in self._blocks.values():
            for (_, taken), bits in block.timers.items() if block.locked else ():
                held = bits & block.locked
                if held and (oldest is None or taken < oldest[0]):
                    oldest = taken, block.holder_of(held & -held) or ""
        return None if oldest is None else (self._times.age_ms(oldest[0], now_s), oldest[1])

    def excused(self, locks: Iterable[Lock]) -> list[Lock]:
        """`(first, last, number)`: number of deliveries of these locked records that were no
        failures, if there are any."""
        return [
            ((number << BLOCK_BITS) + first, (number << BLOCK_BITS) + last, many)
            for start, end, _ in locks
            for number, block, mask in self._parts(start, end)
            for many, bits in block.excused.items()
            for first, last in runs_of(bits & mask)
        ]

    @property
    def trouble(self) -> str | None:
        """The bound that keeps `take` or `learn` from continuing (rule 55)."""
        if self._locked >= LOCKS_MAX:
            return (
                f"{self._locked} records are locked, as many as may be: consumers take records "
                "and do not settle them."
            )
        if self._delayed >= DELAYED_MAX:
            return f"{self._delayed} records are delayed, as many as may be: others wait for them."
        if self._blocked >= BLOCKED_MAX:
            return (
                f"{self._blocked} records wait for earlier ones of their keys, as many as may be: "
                "what comes after them waits, too."
            )
        if len(self._blocks) >= BLOCKS_MAX:
            return (
                f"Unsettled records lie scattered over {len(self._blocks)} blocks, as many as may "
                "be: later ones wait for them."
            )
        return None


def _delay_of(length_ms: int, now_ms: int, now_s: float) -> Delay:
    return Delay.of_length(min(length_ms, DELAY_MS_MAX), now_ms=now_ms, now_s=now_s)

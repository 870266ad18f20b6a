"""What a queue's leader of one partition knows about each record, and what it decides.

Pure: facts come in (offsets that were learned from the log, takes, settlements, the passing of
time), decisions come out as return values, and `changes` gives the records to keep. A decision may
be answered only once the records of a later `changes` are kept.

Each offset is in one state: *ready*, *blocked* (an earlier record of its key is unsettled),
*locked*, *delayed*, *moving* (to the dead letters, or where an operator sends it) or *done*.
Times: `now_s` is the leader's monotonic clock, for locks; `now_ms` the wall clock, for delays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rayq.config import QueueConfig
from rayq.core.queue_moves import Dying, Move

Lock = tuple[int, int, int]
"""`(first offset, last offset, count)`."""
Lost = tuple[int, int, str]
"""`(first offset, last offset, who has it now)`."""


class KeptRecord(NamedTuple):
    """A record of this queue and partition with the keeper. The key is opaque to all but
    `core.queue_records`; None as value ends it."""

    key: bytes
    value: bytes | None


class Counts(NamedTuple):
    ready: int
    blocked: int
    """Not ready, since an earlier record of the key is unsettled."""
    locked: int
    delayed: int
    moving: int
    done: int
    """Settled at or above the start, gaps too."""


class Unsettled(NamedTuple):
    """An unsettled record, for `list`."""

    offset: int
    state: str
    """`ready`, `locked`, `delayed` or `moving`. A blocked one is called ready."""
    count: int
    holder: str | None
    due_ms: int | None
    """By the wall clock for a delay; how many ms are left for a lock."""


class QueueState:
    """One queue in one partition, under one leader."""

    config: QueueConfig
    """May be replaced at any time, but for `ordered_by_key`."""
    state_epoch: int
    start_offset: int
    """All below is settled, or gone by retention."""
    learned: int
    """Offsets below are known; the leader goes on to learn here. Kept."""
    epochs: list[tuple[int, int]]
    """`(leader epoch, its first offset)` of the log in [start, learned), ascending; the first may
    begin below the start. Kept, so that the next leader sees what the log lost (rule 5)."""
    dead: int
    """Records that became dead letters, or were dropped instead, under this leader."""
    expired: int
    """Records that retention removed before they were settled, under this leader."""

    # --- opening ---------------------------------------------------------------------------------

    @classmethod
    def begin(cls, config: QueueConfig, start_offset: int) -> QueueState:
        """A queue of which nothing is kept yet. Keep `changes` before anything else: where the
        queue starts must not move."""
        raise NotImplementedError

    @classmethod
    def replay(
        cls, config: QueueConfig, records: Iterable[KeptRecord], *, now_s: float
    ) -> QueueState | None:
        """The state that these records were kept of; None where there is no head among them. Each
        lock has a full timeout again. Raises CorruptBatchError, UnsupportedFormatError."""
        raise NotImplementedError

    def cut(self, offset: int) -> None:
        """The log lost what was at `offset` and above (an unclean election), and has other records
        there: they are learned anew. The state epoch rises, so all older locks are lost. Moves that
        are under way stay. Only right after `replay`, where `offset` is below `learned`."""
        raise NotImplementedError

    def keys_wanted(self) -> list[tuple[int, int]]:
        """`(first, last)` of known records whose keys the leader has to tell by `tell_keys` before
        anything is taken or settled. Only after `replay` with `ordered_by_key`."""
        raise NotImplementedError

    def tell_keys(self, first: int, keys: Sequence[bytes | None]) -> None:
        """The keys of the known records from `first` on; offsets that are settled are passed by."""
        raise NotImplementedError

    # --- learning --------------------------------------------------------------------------------

    def room(self) -> int:
        """How many more offsets the leader may learn now: 0 where enough are ready, or at a
        bound (`trouble`)."""
        raise NotImplementedError

    def learn_epoch(self, epoch: int, first_offset: int) -> None:
        """Records from `first_offset` on (not above `learned`) were appended under this leader
        epoch. Before they are learned; again with the same is nothing."""
        raise NotImplementedError

    def learn(self, last: int, keys: Sequence[bytes | None] | None = None) -> None:
        """The offsets from `learned` up to and with `last` have records, that are ready. `keys`:
        one for each, with `ordered_by_key`."""
        raise NotImplementedError

    def learn_gap(self, last: int) -> None:
        """The offsets from `learned` up to and with `last` have no record for consumers: markers,
        aborted, compacted away."""
        raise NotImplementedError

    def learn_due(self, offset: int, due_ms: int) -> None:
        """A record that was just learned is delayed until `due_ms`."""
        raise NotImplementedError

    # --- giving out ------------------------------------------------------------------------------

    def first_ready(self, from_offset: int = 0) -> int | None:
        """The first offset at or above `from_offset` that `take` would give; None where it would
        give nothing."""
        raise NotImplementedError

    def take(
        self,
        holder: str,
        count_max: int,
        *,
        now_s: float,
        from_offset: int = 0,
        below_offset: int | None = None,
    ) -> list[Lock]:
        """Locks up to `count_max` ready records of [from_offset, below_offset) for `holder`, the
        first ones. With `ordered_by_key` also those that only wait for records of this very take.
        [] at a bound (`trouble`) too."""
        raise NotImplementedError

    def give_back(self, holder: str, locks: Iterable[Lock]) -> None:
        """These locks of a take never left the leader: the records are ready, and this delivery
        does not count against `max_deliveries`."""
        raise NotImplementedError

    # --- settling --------------------------------------------------------------------------------
    # Each names locks by state epoch, offsets and count, and returns those that are lost. What is
    # settled already, or below the start, is success (rule 7). `holder` makes it fast, and is not
    # what is checked: no two deliveries have the same count.

    def ack(self, holder: str, state_epoch: int, locks: Iterable[Lock]) -> list[Lost]:
        """The records are done."""
        raise NotImplementedError

    def nack(
        self,
        holder: str,
        state_epoch: int,
        locks: Iterable[tuple[int, int, int, int | None]],
        *,
        now_ms: int,
    ) -> list[Lost]:
        """The records failed: `(first, last, count, delay_ms)`. They are due again after
        `delay_ms`, or the back-off where it is None; or become dead letters, after the most
        deliveries."""
        raise NotImplementedError

    def reject(
        self, holder: str, state_epoch: int, locks: Iterable[tuple[int, int, str]]
    ) -> list[Lost]:
        """`(offset, count, error)`: the records become dead letters at once."""
        raise NotImplementedError

    def extend(
        self,
        holder: str,
        state_epoch: int,
        locks: Iterable[tuple[int, int, int, int]],
        *,
        now_s: float,
    ) -> list[Lost]:
        """The locks `(first, last, count, timeout_ms)` hold for `timeout_ms` from `now_s` on, but
        never past `max_handling_s` from when they were taken. Nothing to keep follows from it."""
        raise NotImplementedError

    def free_holder(self, holder: str) -> int:
        """This holder is gone: its records are ready, or dead letters after the most deliveries.
        How many they were."""
        raise NotImplementedError

    # --- time ------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> int:
        """Frees the locks that have run out, as `free_holder` does. How many they were."""
        raise NotImplementedError

    def prolong(self, by_s: float) -> None:
        """Time in which nobody could be heard counts for no lock."""
        raise NotImplementedError

    def due(self, now_ms: int) -> int:
        """Makes the delayed records ready whose time has come. How many they were."""
        raise NotImplementedError

    @property
    def next_expiry_s(self) -> float | None:
        """When `expire` may have something to do. None: nothing is locked."""
        raise NotImplementedError

    @property
    def next_due_ms(self) -> int | None:
        """When the next delayed record is due. None: none is delayed."""
        raise NotImplementedError

    # --- moves -----------------------------------------------------------------------------------

    def to_move(self, count_max: int) -> list[Dying]:
        """The records that failed for good and are in no move yet, ascending."""
        raise NotImplementedError

    def claim(self, offsets: Iterable[int]) -> tuple[list[int], list[int], list[tuple[int, str]]]:
        """For a move that somebody asked for: `(claimed, settled already, (offset, why not))`. Only
        ready and delayed records can be claimed. They are given to nobody until `begin_move`,
        `discard` or `unclaim` names them. A claim is not kept."""
        raise NotImplementedError

    def unclaim(self, offsets: Iterable[int]) -> None:
        """The claimed records are what they were."""
        raise NotImplementedError

    def discard(self, offsets: Iterable[int]) -> None:
        """Claimed or dying records are done."""
        raise NotImplementedError

    def begin_move(self, move: Move) -> None:
        """A batch of dying or claimed records has its number. Append it only once this is kept."""
        raise NotImplementedError

    def end_move(self, move_id: int) -> None:
        """The batch is in the target's log: its records are done."""
        raise NotImplementedError

    def release_move(self, move_id: int) -> None:
        """The batch never gets there: its records are dying or ready again, in no move."""
        raise NotImplementedError

    def moves(self) -> list[Move]:
        """All moves that were begun and not ended, also those of leaders before."""
        raise NotImplementedError

    # --- start -----------------------------------------------------------------------------------

    def advance_start(self, offset: int) -> int:
        """The log begins at `offset` now. How many unsettled records were lost by that; moves that
        are under way go on."""
        raise NotImplementedError

    def purge(self, end_offset: int) -> int:
        """Settles all below `end_offset` that is neither locked nor moving, also what was not
        learned yet. How many they were."""
        raise NotImplementedError

    # --- looking ---------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Which bound keeps `take` or `learn` from going on (rule 9)."""
        raise NotImplementedError

    def counts(self) -> Counts:
        raise NotImplementedError

    def unsettled(
        self, from_offset: int, states: Iterable[str], count_max: int, *, now_s: float
    ) -> tuple[list[Unsettled], int | None]:
        """One page of what is unsettled in [from_offset, learned), and where the next one begins.
        No `states`: all."""
        raise NotImplementedError

    def first_unsettled_ready(self) -> int | None:
        """The oldest record that nobody has, for its age."""
        raise NotImplementedError

    # --- keeping ---------------------------------------------------------------------------------

    @property
    def is_changed(self) -> bool:
        """Whether a decision was made since the last `changes`."""
        raise NotImplementedError

    def changes(self) -> list[KeptRecord]:
        """What to keep of all decisions since the last call; the head first. To be kept all or
        none, and in the order of the calls."""
        raise NotImplementedError

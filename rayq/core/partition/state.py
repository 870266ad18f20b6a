"""A leader's view of its partition: the progress of each replica, the high watermark, the ISR.

Pure: facts come in (an append, a flush, a follower's fetch, a committed change), `high_watermark`
and `proposal` follow from them. One object lives for one leader epoch. It implements rules 6 to 8
of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rayq.errors import FencedEpochError

Isr = tuple[tuple[int, str], ...]
"""`(broker, incarnation)` pairs, sorted by broker."""


@dataclass(slots=True)
class _Follower:
    incarnation: str
    flushed: int = 0
    log_start_offset: int = 0
    is_heard: bool = False
    """True if a fetch of this very incarnation came in this epoch, so that `flushed` is known."""
    end_at_last_fetch: int = 0
    """The end of the leader's log when the follower fetched last: once the follower has flushed so
    far, it was caught up at that moment (as Kafka's followers are judged)."""
    last_fetch_s: float = 0.0
    caught_up_s: float = 0.0


@dataclass(slots=True)
class PartitionState:
    """The leader's state in one epoch. Its high watermark is that of the replica while it leads.

    `isr` is the committed in-sync set; `undecided` are sets that were proposed since, with unknown
    outcome: until a newer partition epoch is seen, the high watermark waits for the members of all
    of them.
    """

    broker: int
    incarnation: str
    leader_epoch: int
    epoch_start_offset: int
    min_insync: int
    lag_time_max_s: float
    end_offset: int
    flushed_offset: int
    high_watermark: int
    started_s: float
    log_start_offset: int = 0
    """Start offset of the leader's own log."""
    partition_epoch: int = -1
    isr: Isr = ()
    has_other_replicas: bool = False
    """True if the partition has more replicas than this one, be they alive or not."""
    undecided: list[Isr] = field(default_factory=list)
    _in_flight: bool = False
    _maybe_under_way: set[Isr] = field(default_factory=set)
    _followers: dict[int, _Follower] = field(default_factory=dict)

    # --- facts ------------------------------------------------------------------------------

    def committed(
        self,
        partition_epoch: int,
        isr: Iterable[tuple[int, str]],
        processes: Iterable[tuple[int, str | None]],
        min_insync: int,
    ) -> None:
        """Takes the partition's present metadata; `processes` are the incarnations registered of
        all its replicas."""
        self.min_insync = min_insync
        registered = dict(processes)
        self.has_other_replicas = any(broker != self.broker for broker in registered)
        for broker in [broker for broker in self._followers if broker not in registered]:
            del self._followers[broker]  # It moved away: it is no longer a replica.
        for broker, incarnation in registered.items():
            known = self._followers.get(broker)
            if broker == self.broker or incarnation is None:
                continue
            if known is None or known.incarnation != incarnation:
                self._followers[broker] = _Follower(incarnation, caught_up_s=self.started_s)
        if partition_epoch > self.partition_epoch:
            self.partition_epoch = partition_epoch
            self.isr = tuple(sorted(isr))
            self.undecided.clear()
            self._maybe_under_way.clear()
            self._in_flight = False
        self._advance()

    def appended(self, end_offset: int, *, now_s: float) -> None:
        """Notes that the leader's log grew. A follower that had all of it was caught up until now,
        however long ago it was heard: its fetch waits here."""
        for follower in self._followers.values():
            if self._is_at_the_end(follower):
                follower.caught_up_s = now_s
        self.end_offset = end_offset

    def flushed(self, flushed_offset: int) -> None:
        """Notes that the leader's own disk holds everything below `flushed_offset`."""
        self.flushed_offset = flushed_offset
        self._advance()

    def check_process(self, broker: int, incarnation: str) -> None:
        """Raises FencedEpochError for a process that is not the registered one."""
        self._current(broker, incarnation)

    def follower_fetched(
        self, broker: int, incarnation: str, *, flushed: int, log_start_offset: int, now_s: float
    ) -> None:
        """Takes a follower's fetch. Raises FencedEpochError for a process that is not the
        registered one."""
        follower = self._current(broker, incarnation)
        follower.is_heard = True
        follower.log_start_offset = log_start_offset
        # A notice of a flush may overtake the fetch that was sent before it; once its log agrees
        # with ours, a follower does not truncate in this epoch, so what it flushed stays.
        follower.flushed = max(follower.flushed, flushed)
        if follower.flushed >= self.end_offset:
            follower.caught_up_s = now_s
        elif follower.flushed >= follower.end_at_last_fetch:
            follower.caught_up_s = max(follower.caught_up_s, follower.last_fetch_s)
        follower.end_at_last_fetch = self.end_offset
        follower.last_fetch_s = now_s
        self._advance()

    def follower_flushed(
        self, broker: int, incarnation: str, *, flushed: int, now_s: float
    ) -> None:
        """Takes a follower's notice of a flush. Raises FencedEpochError for a process that is not
        the registered one."""
        follower = self._current(broker, incarnation)
        if not follower.is_heard:
            return  # A notice that outran the fetch of this connection: the fetch will tell.
        follower.flushed = max(follower.flushed, flushed)
        if follower.flushed >= self.end_offset:
            follower.caught_up_s = now_s
        self._advance()

    # --- what follows -----------------------------------------------------------------------

    @property
    def may_serve(self) -> bool:
        """True if the high watermark is known: it has reached this epoch's start (docs/protocol.md,
        rule 10)."""
        return self.high_watermark >= self.epoch_start_offset

    @property
    def is_alone(self) -> bool:
        """True if no other replica is in sync."""
        return len(self.isr) == 1

    @property
    def is_under_min_isr(self) -> bool:
        return len(self.isr) < self.min_insync

    def proposal(self, now_s: float) -> Isr | None:
        """The in-sync set to propose now on top of `partition_epoch`, or None.

        The caller then reports the outcome, naming that epoch: `proposal_refused` or
        `proposal_unknown`; an accepted proposal ends with the newer partition epoch that
        `committed` brings.
        """
        if self._in_flight or self.partition_epoch < 0:
            return None
        wanted = [(self.broker, self.incarnation)]
        members = dict(self.isr)
        for broker, follower in self._followers.items():
            # A follower that lags leaves, and joins again only once it does not lag: otherwise a
            # silent follower would leave and join as fast as the controller answers.
            keeps = now_s - follower.caught_up_s <= self.lag_time_max_s
            if members.get(broker) == follower.incarnation:
                keeps = keeps or self._is_at_the_end(follower)
            else:
                keeps = (
                    keeps
                    and follower.is_heard
                    and follower.flushed >= self.high_watermark
                    and follower.flushed >= self.epoch_start_offset
                    # Otherwise the follower could lead with records that were deleted for good.
                    and follower.log_start_offset >= self.log_start_offset
                )
            if keeps:
                wanted.append((broker, follower.incarnation))
        proposed = tuple(sorted(wanted))
        if proposed == self.isr and not self.undecided:
            return None
        self._in_flight = True
        if proposed not in self.undecided:
            self.undecided.append(proposed)
        return proposed

    def proposal_refused(self, proposed: Isr, partition_epoch: int) -> None:
        """Notes that a proposal was certainly refused. A set that was sent before with an unknown
        outcome stays undecided: the earlier copy may still arrive."""
        if partition_epoch != self.partition_epoch:
            return  # The same set may have been proposed again since, and that is undecided yet.
        self._in_flight = False
        if proposed not in self._maybe_under_way and proposed in self.undecided:
            self.undecided.remove(proposed)
            self._advance()

    def proposal_unknown(self, proposed: Isr, partition_epoch: int) -> None:
        """Notes that no answer came to a proposal: it may have been accepted, or may still be
        accepted."""
        if partition_epoch != self.partition_epoch:
            return
        self._in_flight = False
        self._maybe_under_way.add(proposed)

    def is_log_start_committed(self, offset: int) -> bool:
        """Returns whether each replica that may lead next starts at `offset` or above: all that are
        in the in-sync set or proposed for it do, and they are so many that no other can be
        elected."""
        return len(self.isr) >= self.min_insync and all(
            follower is not None and follower.log_start_offset >= offset
            for follower in self._heard_followers()
        )

    def committed_log_start(self, own_start: int) -> int:
        """The log start that all those replicas have reached, at most `own_start`, the leader's: it
        may be ahead of what any `delete_records` was told. Call it if `is_log_start_committed`
        holds for some offset."""
        starts = (
            follower.log_start_offset
            for follower in self._heard_followers()
            if follower is not None
        )
        return min((own_start, *starts))

    def validate(self) -> None:
        """Checks the invariants after every step; for tests and the simulation."""
        assert self.flushed_offset <= self.end_offset
        assert self.high_watermark <= self.end_offset

    # --- inside -----------------------------------------------------------------------------

    def _is_at_the_end(self, follower: _Follower) -> bool:
        return follower.is_heard and follower.flushed >= self.end_offset

    def _current(self, broker: int, incarnation: str) -> _Follower:
        follower = self._followers.get(broker)
        if follower is None or follower.incarnation != incarnation:
            raise FencedEpochError(
                f"The process of broker {broker} with incarnation {incarnation} is not the "
                "registered replica: wait for the newer metadata."
            )
        return follower

    def _advance(self) -> None:
        if len(self.isr) < self.min_insync:
            return
        least = self.flushed_offset
        for follower in self._heard_followers():
            if follower is None:
                return
            least = min(least, follower.flushed)
        self.high_watermark = max(self.high_watermark, least)

    def _heard_followers(self) -> Iterator[_Follower | None]:
        """The followers that are in sync, or may be by a proposal whose fate is unknown; None
        stands for a follower that has not been heard in this epoch."""
        for broker, incarnation in {
            *self.isr,
            *(member for isr in self.undecided for member in isr),
        }:
            if broker == self.broker:
                continue
            follower = self._followers.get(broker)
            is_heard = (
                follower is not None
                and follower.incarnation == incarnation
                and follower.is_heard
            )
            yield follower if is_heard else None

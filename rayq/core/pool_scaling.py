"""Number of consumers that a pool needs: pure, computed from successive looks at the group's
progress.

Lag is measured in seconds: the age of the oldest record that is not committed yet. The age counts
from when the log was *seen* to grow past the committed offset. It does not use the records'
timestamps, which come from the producers (a replayed archive is years old when it arrives), nor
offsets divided by the rate of consumption, which says nothing while nothing is consumed. Records
from before the first look count as old as that look. This is a lower bound and does no harm, since
the size of the backlog counts as well:

    wanted = (records that come in per second x HEADROOM + backlog / target_lag_s)
             / records that one consumer handles per second

The divisor is measured only while consumers are busy, so it is what they can do, not what they were
given to do. If by this formula there are enough consumers but the lag stays above the target (one
partition gets all records, say, or handlers wait for something), one consumer is added at a time.

Consumers are added at once (while the lag is below its target, a need of a tenth more is noise),
but their number at most doubles at a time, because the first measurements come from cold consumers.
Consumers are removed only after a cool-down during which fewer would have been enough all the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

HEADROOM = 1.25
"""Factor by which consumers' capacity should exceed the incoming rate: below full load queues are
short."""
WINDOW_S = 5.0
"""The time over which rates and slopes are taken."""
SETTLE_S = 3.0
"""Minimum time between two increases: the new consumers must show what they can do."""
BUSY_S_MIN = 0.05
"""Minimum working time over which a capacity is measured."""
CAPACITY_WEIGHT = 0.2
"""The weight of the newest measurement. Heavier: more consumers come and go with the noise."""
TOLERANCE = 1.1
"""Factor by which the needed consumers may exceed the present ones without an increase while the
lag is below its target: HEADROOM is there for that."""
POINTS_MAX = 512
"""Maximum number of points of a partition's growth. Beyond it every second one is dropped: older
points are coarser."""


class Limits(NamedTuple):
    """The limits that the user set."""

    consumers_min: int
    consumers_max: int | None
    target_lag_s: float
    cool_down_s: float
    one_each: bool = True
    """True if a partition is read by one consumer at a time, as in a group; False for a queue."""


class PartitionProgress(NamedTuple):
    """Progress of the group in one partition: it continues at `position`; the log ends at `end`.
    For a queue, the difference is the number of records that wait or are in hand."""

    position: int
    end: int
    oldest_s: float | None = None
    """Age of the oldest waiting record, if known (of a queue)."""

    @property
    def lag(self) -> int:
        return max(self.end - self.position, 0)


class Look(NamedTuple):
    """A pool's observations at one time."""

    at_s: float
    """Time on the monotonic clock."""
    partitions: Mapping[int, PartitionProgress]
    consumers: int
    """Number of wanted consumers: those that run and those that are starting."""
    running: int
    """Number of them that run."""
    handled: int
    """Number of records that all consumers so far have handled."""
    busy_s: float
    """Time that they worked on these records."""


class Decision(NamedTuple):
    """The decided number of consumers, and the figures it is based on."""

    wanted: int
    lag: int
    """Lag in records."""
    lag_s: float
    lag_slope: float
    """Seconds of lag that are added each second."""
    incoming_per_s: float
    handled_per_s: float
    capacity_per_s: float | None
    """Records that one consumer can handle each second; None before it was measured."""
    reason: str


class Growth:
    """Growth of one partition's log over time, which gives the age of the record at an offset."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, at_s: float, end: int, position: int) -> None:
        points = self._points
        if points and end < points[-1][1]:
            points.clear()  # The topic was created again, or the log was truncated.
        if len(points) >= 2 and points[-1][1] == points[-2][1] == end:
            points[-1] = (at_s, end)  # No growth: the two ends of such a time are enough.
        else:
            points.append((at_s, end))
        while len(points) >= 2 and points[1][1] <= position:
            points.popleft()
        if len(points) > POINTS_MAX:
            self._points = deque([*list(points)[:-1:2], points[-1]])

    def age_s(self, position: int, now_s: float) -> float:
        """The age of the record at `position`; 0 if there is none yet."""
        points = self._points
        if not points or position >= points[-1][1]:
            return 0.0
        before_s, before = points[0]
        for at_s, end in points:
            if end > position:
                if position < before or end == before:
                    return now_s - before_s  # The record is older than the first look.
                share = (position - before) / (end - before)
                return now_s - (before_s + share * (at_s - before_s))
            before_s, before = at_s, end
        return 0.0


class PoolScaling:
    """Scaling decisions from past looks; call `decide` at each look, which brings the time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._growth: dict[int, Growth] = {}
        self._totals: deque[tuple[float, int, int, float]] = deque()
        """`(time, records produced since the first look, records handled, lag_s)`."""
        self._produced = 0
        self._ends: dict[int, int] = {}
        self._capacity: float | None = None
        self._measured = (0, 0.0)
        """`(records handled, busy_s)` at the last measurement of the capacity."""
        self._recommended: deque[tuple[float, int]] = deque()
        self._increased_at_s = -math.inf

    def decide(self, look: Look) -> Decision:
        lag, lag_s = self._see(look)
        now_s = look.at_s
        first_s, produced, handled, lag_s_then = self._totals[0]
        passed_s = now_s - first_s
        incoming = (self._produced - produced) / passed_s if passed_s > 0 else 0.0
        handling = (look.handled - handled) / passed_s if passed_s > 0 else 0.0
        slope = (lag_s - lag_s_then) / passed_s if passed_s > 0 else 0.0
        self._measure(look)

        needed, reason = self._needed(look, lag, lag_s, slope=slope, incoming=incoming)
        wanted = self._cooled(now_s, needed, look.consumers)
        if wanted > needed:
            reason = f"{wanted} were needed within the last {self.limits.cool_down_s:g} s"
        wanted, reason = self._limited(wanted, reason, len(look.partitions))
        if wanted > look.consumers:
            most = max(2 * look.consumers, 1, self._least(len(look.partitions)))
            if now_s - self._increased_at_s < SETTLE_S and look.consumers >= 1:
                most = max(look.consumers, self._least(len(look.partitions)))
            wanted = min(wanted, most)
            if wanted > look.consumers:
                self._increased_at_s = now_s
        return Decision(
            wanted=wanted,
            lag=lag,
            lag_s=lag_s,
            lag_slope=slope,
            incoming_per_s=incoming,
            handled_per_s=handling,
            capacity_per_s=self._capacity,
            reason=reason,
        )

    # --- what is seen ---------------------------------------------------------------------------

    def _see(self, look: Look) -> tuple[int, float]:
        """The lag in records and in seconds."""
        lag, lag_s = 0, 0.0
        for partition, progress in look.partitions.items():
            growth = self._growth.setdefault(partition, Growth())
            growth.add(look.at_s, progress.end, progress.position)
            self._produced += max(progress.end - self._ends.get(partition, progress.end), 0)
            self._ends[partition] = progress.end
            if progress.lag:
                lag += progress.lag
                age_s = progress.oldest_s
                if age_s is None:
                    age_s = growth.age_s(progress.position, look.at_s)
                lag_s = max(lag_s, age_s)
        totals = self._totals
        totals.append((look.at_s, self._produced, look.handled, lag_s))
        while len(totals) > 2 and totals[1][0] <= look.at_s - WINDOW_S:
            totals.popleft()
        return lag, lag_s

    def _measure(self, look: Look) -> None:
        handled_then, busy_then_s = self._measured
        handled, busy_s = look.handled - handled_then, look.busy_s - busy_then_s
        if busy_s < BUSY_S_MIN or handled == 0:
            return
        self._measured = (look.handled, look.busy_s)
        measured, known = handled / busy_s, self._capacity
        self._capacity = (
            measured if known is None else known + CAPACITY_WEIGHT * (measured - known)
        )

    # --- what follows ---------------------------------------------------------------------------

    def _needed(
        self, look: Look, lag: int, lag_s: float, slope: float, incoming: float
    ) -> tuple[int, str]:
        """Number of consumers needed by the present look, without limits."""
        if lag == 0 and incoming == 0:
            return 0, "nothing waits and nothing comes in"
        shown = f"{incoming:.0f}/s come in, {lag} wait ({lag_s:.1f} s)"
        if self._capacity is None:
            return max(look.consumers, 1), f"{shown}, how fast a consumer is has yet to be seen"
        load = incoming * HEADROOM + lag / self.limits.target_lag_s
        needed = max(math.ceil(load / self._capacity), 1)
        if (
            needed > look.consumers >= load / self._capacity / TOLERANCE
            and lag_s <= self.limits.target_lag_s
        ):
            needed = look.consumers
        reason = f"{shown}, one consumer handles {self._capacity:.0f}/s"
        is_settled = look.at_s - self._increased_at_s >= SETTLE_S
        if (
            needed <= look.consumers
            and lag_s > self.limits.target_lag_s
            and slope >= 0
            and look.running == look.consumers
        ):
            reason += f", but the lag stays above {self.limits.target_lag_s:g} s"
            needed = look.consumers + (1 if is_settled else 0)
        return needed, reason

    def _cooled(self, now_s: float, needed: int, consumers: int) -> int:
        """Maximum number that was needed within the cool-down."""
        recommended = self._recommended
        if not recommended:  # The pool starts over: its consumers were needed.
            recommended.append((now_s, consumers))
        while recommended and recommended[-1][1] <= needed:
            recommended.pop()
        recommended.append((now_s, needed))
        while recommended[0][0] < now_s - self.limits.cool_down_s:
            recommended.popleft()
        return recommended[0][1]

    def _least(self, partitions: int) -> int:
        least = self.limits.consumers_min
        return min(least, partitions) if self.limits.one_each else least

    def _limited(self, wanted: int, reason: str, partitions: int) -> tuple[int, str]:
        least = self._least(partitions)
        most = partitions if self.limits.one_each else max(wanted, least)
        if self.limits.consumers_max is not None:
            most = min(most, self.limits.consumers_max)
        if wanted < least:
            return least, f"min_consumers; {reason}"
        if wanted > most:
            is_full = self.limits.one_each and most == partitions
            limit = "there are no more partitions" if is_full else "max_consumers"
            return most, f"{limit}: {wanted} would be better; {reason}"
        return wanted, reason

"""Estimator of the records that a consumer handles in a second: pure. It decides how many may be
locked ahead.

A record locked ahead by a consumer that takes a minute for each has to wait, while other consumers
are idle. So a consumer takes ahead no more than it handles in a fifth of a second, and nothing if
it is slow: asking for one record at a time then costs next to nothing.
"""

from __future__ import annotations

import math

AHEAD_S = 0.2
TICK_S = 0.05
MOMENT_S = 0.05
"""Records handled within this time are not worth giving back."""
QUICK_PER_S = 20
"""Minimum throughput for taking ahead, in records per second."""
WINDOW_S = 1.0
"""Length of a measurement that counts for two thirds of the estimate."""
MEASURED_S_MIN = 0.02


class ThroughputEstimator:
    """The throughput of a consumer, fed with events while users hold records."""

    def __init__(self) -> None:
        self.per_s: float | None = None
        """None before the first measurement."""
        self._since_s: float | None = None
        """None while users hold nothing."""
        self._quiet_ticks = 0
        """The number of ticks since users asked for records, were given some, or settled some."""
        self._count = 0

    def began(self, now_s: float) -> None:
        """Users hold records."""
        if self._since_s is None:
            self._since_s = now_s
            self._quiet_ticks = 0

    def settled(self, count: int, now_s: float, *, is_idle: bool) -> None:
        """Users have settled `count` records; `is_idle`: they hold none now."""
        if self._since_s is None:
            return
        self._count += count
        self._quiet_ticks = 0
        passed_s = now_s - self._since_s
        if self._count and (is_idle or passed_s >= MEASURED_S_MIN):
            found = self._count / max(passed_s, 1e-6)
            weight = 1.0 if self.per_s is None else 1 - math.exp(-passed_s / WINDOW_S)
            self.per_s = found if self.per_s is None else self.per_s + weight * (found - self.per_s)
            self._count, self._since_s = 0, now_s
        if is_idle:
            self._since_s = None

    def asked(self) -> None:
        """A user has asked for records."""
        self._quiet_ticks = 0

    def tick(self) -> None:
        """Counts a tick, every `TICK_S`. A process that got no processor time has not become slow:
        it has missed its ticks, too."""
        self._quiet_ticks += 1

    def ahead(self, most: int) -> int:
        """The number of records to take ahead, at most `most`: none before the first measurement,
        and none if a record in hand takes long, or users do something else."""
        has_stopped = self._quiet_ticks * TICK_S > AHEAD_S
        if self.per_s is None or self.per_s < QUICK_PER_S or has_stopped:
            return 0
        return min(most, int(self.per_s * AHEAD_S))

    def in_a_moment(self) -> int:
        """The number of records handled so soon that nobody else would have them sooner."""
        return int((self.per_s or 0.0) * MOMENT_S)

"""How fast a consumer handles records: pure. It says how many may be locked ahead.

Records that are locked ahead by a consumer that takes a minute for each wait, while other consumers
have nothing to do. So a consumer takes ahead no more than it handles in a fifth of a second, and
nothing where it handles few: to ask for one at a time costs it next to nothing then.
"""

from __future__ import annotations

import math

AHEAD_S = 0.2
TICK_S = 0.05
MOMENT_S = 0.05
"""What is handled within so long is not worth giving back."""
QUICK_PER_S = 20
"""Who handles fewer takes nothing ahead."""
WINDOW_S = 1.0
"""A measurement of so long counts for two thirds of what is known."""
MEASURED_S_MIN = 0.02


class Pace:
    """Fed with what becomes of records while users have some in hand."""

    def __init__(self) -> None:
        self.per_s: float | None = None
        """None before it was measured."""
        self._since_s: float | None = None
        """None while users have nothing in hand."""
        self._quiet_ticks = 0
        """Ticks since users asked for something, were given it, or have settled it."""
        self._count = 0

    def began(self, now_s: float) -> None:
        """Users have records in hand."""
        if self._since_s is None:
            self._since_s = now_s
            self._quiet_ticks = 0

    def settled(self, count: int, now_s: float, *, is_idle: bool) -> None:
        """Users have settled so many; `is_idle`: they have none in hand now."""
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
        """To be called every `TICK_S`. A process that had no processor meanwhile has not become
        slow: it has missed its ticks, too."""
        self._quiet_ticks += 1

    def ahead(self, most: int) -> int:
        """How many to take ahead, at most `most`; none before anything was measured, and none where
        what is in hand takes long, or users do something else."""
        has_stopped = self._quiet_ticks * TICK_S > AHEAD_S
        if self.per_s is None or self.per_s < QUICK_PER_S or has_stopped:
            return 0
        return min(most, int(self.per_s * AHEAD_S))

    def in_a_moment(self) -> int:
        """How many are handled so soon that nobody else would have them sooner."""
        return int((self.per_s or 0.0) * MOMENT_S)

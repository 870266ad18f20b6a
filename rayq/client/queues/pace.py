"""How fast a consumer handles records: pure. It says how many may be locked ahead.

Records that are locked ahead by a consumer that takes a minute for each wait, while other consumers
have nothing to do. So a consumer takes ahead no more than it handles in half a second.
"""

from __future__ import annotations

import math

AHEAD_S = 0.5
WINDOW_S = 1.0
"""A measurement of so long counts for two thirds of what is known."""
MEASURED_S_MIN = 0.02


class Pace:
    """Fed with what becomes of records while users have some in hand."""

    def __init__(self) -> None:
        self.per_s: float | None = None
        """None before it was measured."""
        self._since_s: float | None = None
        self._count = 0

    def began(self, now_s: float) -> None:
        """Users have records in hand."""
        if self._since_s is None:
            self._since_s = now_s

    def settled(self, count: int, now_s: float, *, is_idle: bool) -> None:
        """Users have settled so many; `is_idle`: they have none in hand now."""
        if self._since_s is None:
            return
        self._count += count
        passed_s = now_s - self._since_s
        if self._count and (is_idle or passed_s >= MEASURED_S_MIN):
            found = self._count / max(passed_s, 1e-6)
            weight = 1.0 if self.per_s is None else 1 - math.exp(-passed_s / WINDOW_S)
            self.per_s = found if self.per_s is None else self.per_s + weight * (found - self.per_s)
            self._count, self._since_s = 0, now_s
        if is_idle:
            self._since_s = None

    def ahead(self, most: int, at_first: int, now_s: float) -> int:
        """How many to take ahead, at most `most`; before anything was measured `at_first`. What has
        been in hand for long tells as much as what was settled."""
        count = at_first if self.per_s is None else int(self.per_s * AHEAD_S)
        if self._since_s is not None and now_s > self._since_s:
            count = min(count, int((self._count + 1) / (now_s - self._since_s) * AHEAD_S))
        return min(most, count)

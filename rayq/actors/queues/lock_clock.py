"""The clock by which locks expire: it stands still while a leader cannot hear its clients."""

from __future__ import annotations

from collections.abc import Callable

from rayq.environment import Clock

GAP_S = 1.0
"""A longer time between two looks is a pause of the process: only so much of it counts."""


class LockClock:
    """See the module. `can_hear()` says whether requests are answered just now."""

    def __init__(self, clock: Clock, can_hear: Callable[[], bool]) -> None:
        self._clock = clock
        self._can_hear = can_hear
        self._looked_s = clock.monotonic()

    def look(self) -> float:
        """To be called a few times a second: by how much each lock is prolonged."""
        now_s = self._clock.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if not self._can_hear():
            return passed_s
        return max(passed_s - GAP_S, 0.0)

"""The clock by which locks expire: it stands still while a leader cannot hear its clients."""

from __future__ import annotations

from collections.abc import Callable

from rayq.environment import Clock

GAP_S = 1.0
"""Maximum time between two looks that counts: a longer time is a pause of the process."""


class LockClock:
    """See the module. `can_hear()` says whether requests are currently answered."""

    def __init__(self, clock: Clock, can_hear: Callable[[], bool]) -> None:
        self._clock = clock
        self._can_hear = can_hear
        self._looked_s = clock.monotonic()

    def look(self) -> float:
        """Returns the time by which each lock is prolonged; call it a few times per second."""
        now_s = self._clock.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if not self._can_hear():
            return passed_s
        return max(passed_s - GAP_S, 0.0)

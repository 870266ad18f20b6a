"""Whether the wall clock can be trusted: what is deleted by age waits when it has leapt."""

from __future__ import annotations

import logging

from rayq.environment import Clock

logger = logging.getLogger(__name__)

CLOCK_LEAP_MS = 60_000


class ClockWatch:
    """Compares the two clocks between one look and the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wall_ms = clock.wall_ms()
        self._monotonic_s = clock.monotonic()

    def leapt(self) -> bool:
        """Whether they disagree since the last look; logged."""
        wall_ms, monotonic_s = self._clock.wall_ms(), self._clock.monotonic()
        leap_ms = (wall_ms - self._wall_ms) - (monotonic_s - self._monotonic_s) * 1000
        self._wall_ms, self._monotonic_s = wall_ms, monotonic_s
        if abs(leap_ms) < CLOCK_LEAP_MS:
            return False
        logger.warning("the wall clock leapt by %.0f s", leap_ms / 1000)
        return True

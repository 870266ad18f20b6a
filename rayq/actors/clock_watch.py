"""The clock for deletion by age: it follows the wall clock, but slowly where that leaps ahead."""

from __future__ import annotations

import logging

from rayq.environment import Clock

logger = logging.getLogger(__name__)

CLOCK_LEAP_MS = 60_000
CATCH_UP_RATE = 24
"""Behind a clock that leapt ahead, each minute makes things older by so many minutes more."""
DELAYS_RATE = 0.02
"""A wall clock that leapt takes delays along by so much of the time for which it is wrong."""
DELAYS_DOUBT_MS = 300_000
"""A wall clock that is ahead for so long is believed: it was behind, or the machine has slept."""
LOOK_INTERVAL_MS = 60_000
"""Of a longer time between two looks only so much counts for catching up."""


class ClockWatch:
    """A time that a wall clock which is wrong for a while does not carry away.

    It goes on with the monotonic clock. Where the wall clock is ahead it follows slowly: one that
    is ten days ahead for a minute makes nothing older than 25 minutes. Where the wall clock is
    behind it goes back at once, since what is deleted later does no harm.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ms = float(clock.wall_ms())
        self._wall_ms = clock.wall_ms()
        self._monotonic_s = clock.monotonic()

    def doubt(self, known_ms: int) -> None:
        """The newest date of anything here is `known_ms`. How long ago that was, only the wall
        clock says, which has not been watched yet."""
        self._now_ms = min(self._now_ms, known_ms)

    def look(self) -> None:
        """Compares the two clocks; to be called at least every `LOOK_INTERVAL_MS`."""
        wall_ms, monotonic_s = self._clock.wall_ms(), self._clock.monotonic()
        passed_ms = (monotonic_s - self._monotonic_s) * 1000
        leap_ms = wall_ms - self._wall_ms - passed_ms
        if abs(leap_ms) >= CLOCK_LEAP_MS:
            logger.warning("the wall clock leapt by %.0f s", leap_ms / 1000)
        self._wall_ms, self._monotonic_s = wall_ms, monotonic_s
        ahead_ms = wall_ms - self._now_ms - passed_ms
        catch_up_ms = CATCH_UP_RATE * min(passed_ms, LOOK_INTERVAL_MS)
        self._now_ms += passed_ms + min(ahead_ms, catch_up_ms)

    def now_ms(self) -> int:
        """Looks, and says what time it is."""
        self.look()
        return int(self._now_ms)

    def latest_ms(self) -> int:
        """The latest time that it may be, to date what happens now. What is dated so never counts
        as older than it is, also when `now_ms` has caught up with the wall clock."""
        return max(self.now_ms(), self._wall_ms)


class DelayClock(ClockWatch):
    """What time it is for delays: none ends early because the wall clock is ahead for a while, and
    those that wait because it is behind go on as soon as it is right again.

    It is the wall clock, but never ahead of a time that goes on with the monotonic clock, and comes
    nearer to the wall clock only slowly, until that has been ahead for `DELAYS_DOUBT_MS`. What the
    wall clock says at the beginning is believed, unless something is known to be newer.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._trusted_ms = self._now_ms
        self._ahead_since_s: float | None = None
        self._least_ahead_ms = 0.0
        """By how much the wall clock was ahead all the time since then."""

    def begin_after(self, known_ms: int) -> None:
        """Something here is dated `known_ms`: a wall clock that says less is behind, and may be set
        right at once."""
        self._trusted_ms = max(self._trusted_ms, known_ms)

    def look(self) -> None:
        """Compares the two clocks, at any time."""
        wall_ms, monotonic_s = self._clock.wall_ms(), self._clock.monotonic()
        passed_ms = (monotonic_s - self._monotonic_s) * 1000
        self._wall_ms, self._monotonic_s = wall_ms, monotonic_s
        self._trusted_ms += passed_ms
        most_ms = DELAYS_RATE * passed_ms
        self._trusted_ms += max(-most_ms, min(most_ms, wall_ms - self._trusted_ms))
        self._trusted_ms += self._believed_ms(wall_ms - self._trusted_ms, monotonic_s)
        self._now_ms = min(float(wall_ms), self._trusted_ms)

    def _believed_ms(self, ahead_ms: float, monotonic_s: float) -> float:
        """How much of it to believe: as much as it was ahead for all of the time of doubt."""
        if ahead_ms <= 0:
            self._ahead_since_s = None
            return 0.0
        if self._ahead_since_s is None:
            self._ahead_since_s, self._least_ahead_ms = monotonic_s, ahead_ms
        self._least_ahead_ms = min(self._least_ahead_ms, ahead_ms)
        if (monotonic_s - self._ahead_since_s) * 1000 < DELAYS_DOUBT_MS:
            return 0.0
        self._ahead_since_s = None
        return self._least_ahead_ms

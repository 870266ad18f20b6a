"""The clock for deletion by age: it follows the wall clock, but slowly where that leaps ahead."""

from __future__ import annotations

import logging

from rayq.environment import Clock

logger = logging.getLogger(__name__)

CLOCK_LEAP_MS = 60_000
CATCH_UP_RATE = 24
"""Maximum catch-up with a clock that leapt ahead, in extra minutes of age for each minute."""
DELAYS_RATE = 0.02
"""Maximum effect of a wall clock that leapt on delays, as a fraction of the time that it is
wrong."""
DELAYS_DOUBT_MS = 300_000
"""Time after which a wall clock that is ahead is believed: it was behind, or the machine has
slept."""
LOOK_INTERVAL_MS = 60_000
"""Maximum time between two looks that counts for catching up."""


class ClockWatch:
    """A clock that tolerates a wall clock which is wrong for a while.

    It advances with the monotonic clock. It follows a wall clock that is ahead slowly: one that is
    ten days ahead for a minute makes nothing older than 25 minutes. It follows a wall clock that is
    behind at once, since deleting later does no harm.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ms = float(clock.wall_ms())
        self._wall_ms = clock.wall_ms()
        self._monotonic_s = clock.monotonic()

    def doubt(self, known_ms: int) -> None:
        """Sets the time back to `known_ms`, the newest date of anything here. Only the wall clock,
        which has not been watched yet, says how long ago that was."""
        self._now_ms = min(self._now_ms, known_ms)

    def look(self) -> None:
        """Compares the two clocks; call it at least every `LOOK_INTERVAL_MS`."""
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
        """Looks, and returns the time."""
        self.look()
        return int(self._now_ms)

    def latest_ms(self) -> int:
        """The latest possible time, to date what happens now. What is dated so never counts as
        older than it is, even when `now_ms` has caught up with the wall clock."""
        return max(self.now_ms(), self._wall_ms)


class DelayClock(ClockWatch):
    """The clock for delays: none ends early because the wall clock is ahead for a while, and those
    that wait because it is behind resume as soon as it is right again.

    It is the wall clock, but never ahead of a trusted time. That advances with the monotonic clock,
    and approaches the wall clock only slowly until the latter has been ahead for `DELAYS_DOUBT_MS`.
    The wall clock is believed at the start, unless something is known to be newer.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._trusted_ms = self._now_ms
        self._ahead_since_s: float | None = None
        self._least_ahead_ms = 0.0
        """Least lead of the wall clock since then."""

    def begin_after(self, known_ms: int) -> None:
        """Takes note that something here is dated `known_ms`: a wall clock that says less is
        behind, and may be corrected at once."""
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
        """The part of the lead to believe: the least lead during the whole time of doubt."""
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

"""Clock for session timeouts: it counts only time in which this process could receive.

A process that was stopped, or that is behind with its work, has not read all that has arrived: the
heartbeat that it misses may be among it (docs/protocol.md, rule 5). Such a process therefore never
expires a session.
"""

from __future__ import annotations

import asyncio

from rayq.environment import Clock
from rayq.metrics import Metrics

SLACK_S = 0.05
"""Maximum delay of a look that is not late: what arrived is read within that time."""
TURNS = 4
"""Number of the loop's turns in which it reads and handles what has arrived: it polls the sockets,
decodes frames, and runs the tasks that answer them."""


class ListeningClock:
    """A monotonic clock that is looked at in each interval, and stands still when a look is late.

    Of the time between two looks at most one interval counts. While looks come in time, it runs as
    the monotonic clock does, so what is dead or cut off is noticed in its time.
    """

    def __init__(self, clock: Clock, interval_s: float, metrics: Metrics | None = None) -> None:
        """`metrics` get the delays; of the clocks of a process only one tells them."""
        self._clock = clock
        self._lag = None if metrics is None else metrics.histogram("rayq_loop_lag_seconds")
        if metrics is not None:
            metrics.add_source(
                lambda: [metrics.sample("rayq_unheard_seconds_total", self.unheard_s())]
            )
        self._interval_s = interval_s
        self._counted_s_max = interval_s + SLACK_S
        self._now_s = self._looked_s = clock.monotonic()

    def now_s(self) -> float:
        """The time in seconds by which silence is measured."""
        return self._now_s + min(self._clock.monotonic() - self._looked_s, self._counted_s_max)

    def unheard_s(self) -> float:
        """The time in seconds that did not count so far."""
        return self._clock.monotonic() - self.now_s()

    def look(self, *, can_hear: bool = True) -> float:
        """Returns the part of the time since the last look that does not count: what the look is
        late, or all of it if nobody could be heard."""
        now_s = self._clock.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if self._lag is not None:
            self._lag.observe(max(passed_s - self._interval_s, 0.0))
        counted_s = min(passed_s, self._counted_s_max) if can_hear else 0.0
        self._now_s += counted_s
        return passed_s - counted_s

    async def run(self) -> None:
        """Looks in each interval, forever."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.look()

    @staticmethod
    async def read_arrived() -> None:
        """Returns once the loop has read and handled what has arrived. Call it before a session
        ends: the heartbeat may wait in a socket."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

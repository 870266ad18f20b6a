"""The maximum age that something may seem to have on a host whose wall clock leaps, by rule 16.

Ages go by a clock that follows a wall clock that leapt ahead slowly, and one that goes back at
once. So a leap makes things older by so much for each second that it lasts, and nothing is older
once it is over. What is dated while a wall clock is behind may look older by all of that.
"""

from __future__ import annotations

from collections.abc import Iterable

from proving.simulation.world import START_WALL_MS, Host

CATCH_UP = 24.0
"""Seconds of a leap that a server catches up with in each second."""
NOTICED_S = 0.5
"""Maximum time until a server notices a leap. It counts for catching up, too."""

LEAP_S_MAX = 10.0
"""Maximum duration of a leap."""


def most_aged_s(hosts: Iterable[Host], judging: Host, since_s: float, now_s: float) -> float:
    """The most seconds for which something may look to have passed since `since_s` on the host
    `judging`, up to `now_s`. Any of the `hosts` may have dated it."""
    if any(at_s > since_s - LEAP_S_MAX for at_s in judging.began_ahead_s):
        return float("inf")  # Who begins believes its clock.
    behind_s = max(-_offset_s(host, since_s) for host in hosts)
    return now_s - since_s + max(behind_s, 0.0) + _most_ahead_s(judging, since_s, now_s)


def dated_s(host: Host, wall_ms: int, now_s: float) -> float:
    """Returns when the wall clock of a host said `wall_ms`, at most `now_s`: the first time, if it
    said so twice."""
    since_start_s = (wall_ms - START_WALL_MS) / 1000
    found = [now_s]
    for offset_ms in {0, *(offset_ms for _, offset_ms in host.clock_changes)}:
        at_s = since_start_s - offset_ms / 1000
        if 0 <= at_s <= now_s and _offset_s(host, at_s) == offset_ms / 1000:
            found.append(at_s)
    return min(found)


def _offset_s(host: Host, at_s: float) -> float:
    """Difference between the wall clock and the true time, then."""
    found = [offset_ms for time_s, offset_ms in host.clock_changes if time_s <= at_s]
    return found[-1] / 1000 if found else 0.0


def _most_ahead_s(host: Host, since_s: float, until_s: float) -> float:
    """The most by which the clock for ages may have been ahead in that time."""
    most_s = ahead_s = offset_s = last_s = 0.0
    for time_s, offset_ms in [*host.clock_changes, (until_s, host.clock_offset_ms)]:
        if time_s > until_s:
            break
        if offset_s > ahead_s:
            ahead_s = min(offset_s, ahead_s + CATCH_UP * (time_s - last_s + NOTICED_S))
        if time_s >= since_s:
            most_s = max(most_s, ahead_s)
        offset_s, last_s = offset_ms / 1000, time_s
        # A process that begins now believes its clock, whatever those before it still catch up.
        ahead_s = offset_s if offset_s <= 0 else min(ahead_s, offset_s)
    return most_s

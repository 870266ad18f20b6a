"""The time that is left of a call which asks several times."""

from __future__ import annotations

from rayq.errors import TimeoutError


def time_left_s(now_s: float, deadline_s: float) -> float:
    """Seconds until the deadline of a call. Raises TimeoutError once it is over: servers that
    answer at once would else have the call go on for as long as they like."""
    left_s = deadline_s - now_s
    if left_s <= 0:
        raise TimeoutError(
            "The call took as long as it may, and not all of it was answered. Changes that it "
            "asked for may have been made. Give it more time, or ask for less at once."
        )
    return left_s

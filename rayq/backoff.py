"""Backoff between two attempts, with jitter."""

from __future__ import annotations

from rayq.environment import Environment


class Backoff:
    """Wait times that double from one attempt to the next, with jitter."""

    def __init__(self, environment: Environment, first_s: float, max_s: float) -> None:
        self._environment = environment
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    @property
    def is_at_max(self) -> bool:
        """True once the next wait time is the maximum."""
        return self._next_s == self._max_s

    def reset(self) -> None:
        self._next_s = self._first_s

    def next_s(self) -> float:
        """The next wait time in seconds: 0.75 to 1.25 times a value that doubles with each call."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._max_s)
        return wait_s * (0.75 + 0.5 * self._environment.random.random())

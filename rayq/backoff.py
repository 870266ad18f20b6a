"""Backoff between two attempts, with jitter, and the budget of repetitions of a client."""

from __future__ import annotations

from rayq.environment import Clock, Environment

BUDGET_MAX = 100.0
"""Number of repetitions that a client may make at once."""
BUDGET_PER_S = 10.0
BUDGET_PER_ANSWER = 0.1


class RetryBudget:
    """The repetitions that a client may make before it slows down: a few per second, and one for
    each ten answers. So requests of which many fail, or are late, add little to the load."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left = BUDGET_MAX
        self._at_s = clock.monotonic()

    def answered(self) -> None:
        """Notes an answer in time."""
        self._left = min(self._left + BUDGET_PER_ANSWER, BUDGET_MAX)

    def take(self) -> bool:
        """Takes one repetition. Returns False if none is left."""
        now_s = self._clock.monotonic()
        self._left = min(self._left + BUDGET_PER_S * (now_s - self._at_s), BUDGET_MAX)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Backoff:
    """Wait times that double from one attempt to the next, with jitter. Once the `budget` is used
    up, the next wait time is the maximum."""

    def __init__(
        self,
        environment: Environment,
        first_s: float,
        max_s: float,
        budget: RetryBudget | None = None,
    ) -> None:
        self._environment = environment
        self._first_s = first_s
        self._max_s = max_s
        self._budget = budget
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
        if self._budget is not None and not self._budget.take():
            wait_s = self._max_s
        self._next_s = min(2 * wait_s, self._max_s)
        return wait_s * (0.75 + 0.5 * self._environment.random.random())

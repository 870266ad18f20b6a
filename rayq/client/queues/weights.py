"""Deficit round robin over several queues: pure.

Each queue in turn gives as many records as its weight. One whose records are on their way is waited
for: so of any 2 x sum(weights) records each queue with a backlog gets its share.
"""

from __future__ import annotations

from collections.abc import Sequence


class Rounds:
    """Whose turn it is, record by record."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = weights
        self._at = 0
        self._credit = weights[0]

    def plan(self, count: int, limits: Sequence[int]) -> list[int]:
        """How many of the next `count` records each queue gives where it has as many as its limit.
        They are not given yet."""
        at, credit, left = self._at, self._credit, list(limits)
        planned = [0] * len(left)
        count = min(count, sum(left))
        while count:
            some = min(credit, left[at], count)
            planned[at] += some
            left[at] -= some
            count -= some
            at = (at + 1) % len(left)
            credit = self._weights[at]
        return planned

    def next(self, waiting: Sequence[int], is_coming: Sequence[bool]) -> int | None:
        """The queue that gives the next record. `waiting` says how many each has here, `is_coming`
        whether more are on their way. None: there is none, or it has to come first."""
        at, credit = self._at, self._credit
        for _ in range(len(self._weights) + 1):
            if credit and waiting[at]:
                self._at, self._credit = at, credit - 1
                return at
            if credit and is_coming[at]:
                return None
            at = (at + 1) % len(self._weights)
            credit = self._weights[at]
        return None

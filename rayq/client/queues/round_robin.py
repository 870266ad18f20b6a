"""Deficit round robin over several queues: pure.

Each queue in turn gives as many records as its weight. A queue whose records are on their way is
waited for, so each queue with a backlog gets its share of any 2 x sum(weights) records.
"""

from __future__ import annotations

from collections.abc import Sequence


class DeficitRoundRobin:
    """The turns of the queues, record by record."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = weights
        self._at = 0
        self._credit = weights[0]

    def plan(self, count: int, limits: Sequence[int]) -> list[int]:
        """The number of the next `count` records that each queue gives if it has as many as its
        limit. They are not given yet."""
        at, credit, left = self._at, self._credit, list(limits)
        planned = [0] * len(left)
        count = min(count, sum(left))
        while count:
            given = min(credit, left[at], count)
            planned[at] += given
            left[at] -= given
            count -= given
            at = (at + 1) % len(left)
            credit = self._weights[at]
        return planned

    def next(self, waiting: Sequence[int], is_coming: Sequence[bool]) -> int | None:
        """The queue that gives the next record. `waiting` is the number of records that each has
        here, `is_coming` whether more are on their way. None: there is no record, or it has to
        arrive first."""
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

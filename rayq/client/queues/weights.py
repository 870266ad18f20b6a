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

    def next(self, waiting: Sequence[int], is_coming: Sequence[bool]) -> int | None:
        """The queue that gives the next record. `waiting` says how many each has here, `is_coming`
        whether more are on their way. None: there is none, or it has to come first."""
        for _ in range(len(self._weights) + 1):
            at = self._at
            if self._credit and waiting[at]:
                self._credit -= 1
                return at
            if self._credit and is_coming[at]:
                return None
            self._at = (at + 1) % len(self._weights)
            self._credit = self._weights[self._at]
        return None

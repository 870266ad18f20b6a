"""Deficit round robin over several queues: pure.

Each queue in turn gets as many records as its weight. One that has records at its leaders, but none
here at the moment, keeps its credit, up to twice its weight, and catches up: so of any
2 x sum(weights) records each queue with a backlog gets its share.
"""

from __future__ import annotations

from collections.abc import Sequence


class Rounds:
    """Whose turn it is, record by record."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = weights
        self._credit = [0] * len(weights)
        self._at = 0
        self._credit[0] = weights[0]

    def next(self, waiting: Sequence[int], has_backlog: Sequence[bool]) -> int | None:
        """The queue that gives the next record. `waiting` says how many each has here. None: no
        queue has any."""
        for _ in range(2 * len(self._weights)):
            at = self._at
            if waiting[at] and self._credit[at]:
                self._credit[at] -= 1
                return at
            if not waiting[at] and not has_backlog[at]:
                self._credit[at] = 0
            at = self._at = (at + 1) % len(self._weights)
            weight = self._weights[at]
            self._credit[at] = min(self._credit[at] + weight, 2 * weight)
        return None

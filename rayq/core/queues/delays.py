"""Due times of delayed records: at a time of day, or after a delay.

The delay of a record that a consumer gave back runs by the leader's monotonic clock. The end of the
delay by the wall clock and its length are kept: a leader that opens the queue makes the record wait
no longer than either says, so that a wrong clock holds back nothing for long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple


class Delay(NamedTuple):
    """The delay of one record."""

    due_ms: int
    """End by the wall clock."""
    length_ms: int | None = None
    """Length of the delay. None: it ends at `due_ms`, however long that takes."""
    end_s: float | None = None
    """End by the monotonic clock of this leader, if it has a length. Not kept."""

    @classmethod
    def of_length(cls, length_ms: int, *, now_ms: int, now_s: float) -> Delay:
        return cls(now_ms + length_ms, length_ms, now_s + length_ms / 1000)

    def taken_up(self, *, now_ms: int, now_s: float) -> Delay:
        """The delay under a leader that opens the queue now. It is never too short by its length,
        which began before now."""
        if self.length_ms is None:
            return self
        left_ms = min(max(self.due_ms - now_ms, 0), self.length_ms)
        return self._replace(end_s=now_s + left_ms / 1000)

    def due_at_ms(self, *, now_ms: int, now_s: float) -> int:
        """End by a wall clock that says `now_ms`."""
        if self.end_s is None:
            return self.due_ms
        return now_ms + math.ceil((self.end_s - now_s) * 1000)


class DelayTimes:
    """The delays of all offsets, by when they end. Some may be over already."""

    __slots__ = ("_by_due", "_by_end")

    def __init__(self) -> None:
        self._by_due: list[tuple[int, int, Delay]] = []
        self._by_end: list[tuple[float, int, Delay]] = []

    def add(self, offset: int, delay: Delay) -> None:
        if delay.end_s is None:
            heapq.heappush(self._by_due, (delay.due_ms, offset, delay))
        else:
            heapq.heappush(self._by_end, (delay.end_s, offset, delay))

    def ended(self, *, now_ms: int, now_s: float) -> Iterator[tuple[int, Delay]]:
        """Takes out what is over now."""
        while self._by_due and self._by_due[0][0] <= now_ms:
            yield heapq.heappop(self._by_due)[1:]
        while self._by_end and self._by_end[0][0] <= now_s:
            yield heapq.heappop(self._by_end)[1:]

    def next_in_ms(self, *, now_ms: int, now_s: float) -> int | None:
        """Time until the next one is over. None: there is none."""
        firsts = [heap[0][2] for heap in (self._by_due, self._by_end) if heap]
        left_ms = [delay.due_at_ms(now_ms=now_ms, now_s=now_s) - now_ms for delay in firsts]
        return max(min(left_ms), 0) if left_ms else None

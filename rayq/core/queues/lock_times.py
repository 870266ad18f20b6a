"""Expiry times of locks, in ticks of a tenth of a second, so that many locks share one."""

from __future__ import annotations

import heapq
import math

TICKS_A_SECOND = 10
LONG_TIMEOUTS = 10
"""Number of visibility timeouts after which a record in handling is worth a warning: its consumer
may hang."""


class LockTimes:
    """Index of the blocks whose locks may expire, by tick.

    Ticks are of the leader's monotonic clock, less the time in which nobody could be heard.
    """

    __slots__ = ("_blocks", "_heap", "_last_timer", "_prolonged_s")

    def __init__(self) -> None:
        self._blocks: dict[int, set[int]] = {}
        self._heap: list[int] = []
        self._prolonged_s = 0.0
        self._last_timer: tuple[int, int] | None = None

    def tick_at(self, now_s: float) -> int:
        """The last tick that has come."""
        return math.floor((now_s - self._prolonged_s) * TICKS_A_SECOND)

    def tick_after(self, now_s: float, wait_s: float) -> int:
        """The first tick that is not before `wait_s` from now."""
        return math.ceil((now_s - self._prolonged_s + wait_s) * TICKS_A_SECOND)

    def timer(self, now_s: float, timeout_s: float) -> tuple[int, int]:
        """`(tick of the end, tick when taken)` of a lock that is taken now. All locks of one tick
        share it."""
        tick, timer = self.tick_at(now_s), self._last_timer
        if timer is None or timer[1] != tick:
            end = tick + 1 + math.ceil(timeout_s * TICKS_A_SECOND)
            timer = self._last_timer = end, tick
        return timer

    def left_ms(self, tick: int, now_s: float) -> int:
        left_s = tick / TICKS_A_SECOND + self._prolonged_s - now_s
        return max(0, round(left_s * 1000))

    def age_ms(self, tick: int, now_s: float) -> int:
        """Time since that tick came."""
        return max(0, round((now_s - self._prolonged_s) * 1000) - tick * 1000 // TICKS_A_SECOND)

    def prolong(self, by_s: float) -> None:
        self._prolonged_s += by_s

    def watch(self, tick: int, number: int) -> None:
        """Watches a block of which a lock may expire at that tick."""
        blocks = self._blocks.get(tick)
        if blocks is None:
            self._blocks[tick] = {number}
            heapq.heappush(self._heap, tick)
        else:
            blocks.add(number)

    def ended(self, tick: int) -> list[int]:
        """The blocks of all ticks up to this one, ascending; they are not watched any more."""
        numbers: set[int] = set()
        while self._heap and self._heap[0] <= tick:
            numbers |= self._blocks.pop(heapq.heappop(self._heap))
        return sorted(numbers)

    @property
    def next_s(self) -> float | None:
        """Time of the next tick that has blocks to check."""
        return self._heap[0] / TICKS_A_SECOND + self._prolonged_s if self._heap else None

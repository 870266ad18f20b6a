"""The bound that large values put on a queue's release of its topic's log start.

A queue skips chunks at once, so its start may be above the chunks of a value that nobody has
handled yet. Whatever deletes records below the start of a queue asks here first. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

OPEN_VALUE_MS_MAX = 3_600_000
"""So long the chunks are kept of a value whose manifest is not in the log yet. A producer has given
up by then: `delivery_timeout_ms` is far below."""
MOVED_VALUE_MS = 7 * 24 * 3_600_000
"""So long the chunks are kept of a record that was moved, to the dead letters or elsewhere: its
copy points at them."""
_STEPS = 8
"""Times are rounded up to such a part of how long something is kept: so there are few of them."""

Hold = tuple[int, int, int]
"""`(first chunk, below, until_ms)`: the log start stays at `first chunk` while the start of the
queue is below `below`, and until that time."""


class LargeHolds:
    """What holds the log start of one partition below the start of a queue. The order in which it
    is told does not matter."""

    def __init__(self, kept: Iterable[Hold] = ()) -> None:
        """What `kept` said before."""
        self._timed: dict[int, int] = {}
        """Until when -> the lowest chunk that is kept so long."""
        self._manifests: list[tuple[int, int]] = []
        """A heap: the first chunk of each value, and the offset behind its manifest."""
        self._manifests_end = 0
        for first_chunk, below, until_ms in kept:
            self._hold(first_chunk, below)
            self._hold_until(first_chunk, until_ms)

    def chunk(self, offset: int, append_time_ms: int) -> None:
        """A chunk lies at this offset, or above it, and its manifest may be on its way."""
        self._hold_for(offset, append_time_ms, OPEN_VALUE_MS_MAX)

    def large(self, offset: int, first_chunk: int) -> None:
        """The manifest of a value lies at `offset`, its first chunk at the other one."""
        self._hold(first_chunk, offset + 1)

    def moved(self, first_chunk: int, now_ms: int) -> None:
        """The record of a value was copied to another partition, its chunks were not."""
        self._hold_for(first_chunk, now_ms, MOVED_VALUE_MS)

    def _hold_for(self, offset: int, from_ms: int, duration_ms: int) -> None:
        step_ms = duration_ms // _STEPS
        self._hold_until(offset, -(-(from_ms + duration_ms) // step_ms) * step_ms)

    def _hold_until(self, offset: int, until_ms: int) -> None:
        if until_ms:
            self._timed[until_ms] = min(self._timed.get(until_ms, offset), offset)

    def _hold(self, first_chunk: int, below: int) -> None:
        if below:
            heapq.heappush(self._manifests, (first_chunk, below))
            self._manifests_end = max(self._manifests_end, below)

    def floor(self, start: int, now_ms: int) -> int:
        """How far the log start may go, for a queue whose first unsettled record is at `start`."""
        for until_ms in [one for one in self._timed if one < now_ms]:
            del self._timed[until_ms]
        while self._manifests and self._manifests[0][1] <= start:
            heapq.heappop(self._manifests)
        lowest = self._manifests[0][0] if self._manifests else start
        return min(start, lowest, *self._timed.values())

    def kept(self) -> list[Hold]:
        """What a later leader has to know: of all unsettled values together, where the first chunk
        and the last manifest are."""
        found = [(offset, 0, until_ms) for until_ms, offset in sorted(self._timed.items())]
        if self._manifests:
            found.append((self._manifests[0][0], self._manifests_end, 0))
        return found

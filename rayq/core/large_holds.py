"""How far a queue may let its topic's log start go, where large values are in the log.

A queue passes over chunks at once, and so its start may be above the chunks of a value that nobody
has handled yet. Whatever deletes behind the start of a queue asks here first. Pure.
"""

from __future__ import annotations

import heapq
from collections import deque

OPEN_VALUE_MS_MAX = 3_600_000
"""So long the chunks are kept of a value whose manifest is not in the log yet. A producer has given
up by then: `delivery_timeout_ms` is far below."""


class LargeHolds:
    """Chunks and manifests of one partition, told in the order of their offsets. What was told
    before a restart is told again from the queue's start on; chunks below it are known by their
    manifests."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int]] = deque()
        """Offset and append time of the chunks; the first of each run of neighbours is enough."""
        self._last_chunk = -2
        self._manifests: list[tuple[int, int]] = []
        """A heap: the first chunk of each value, and the offset of its manifest."""

    def chunk(self, offset: int, append_time_ms: int) -> None:
        """A chunk lies at this offset."""
        is_neighbour = offset == self._last_chunk + 1
        self._last_chunk = offset
        if is_neighbour and self._chunks:
            first, _ = self._chunks.pop()
            self._chunks.append((first, append_time_ms))
        else:
            self._chunks.append((offset, append_time_ms))

    def large(self, offset: int, first_chunk_offset: int) -> None:
        """The manifest of a value lies at `offset`, its first chunk at the other one."""
        heapq.heappush(self._manifests, (first_chunk_offset, offset))

    def floor(self, start: int, now_ms: int) -> int:
        """How far the log start may go, for a queue whose first unsettled record is at `start`."""
        while self._chunks and self._chunks[0][1] + OPEN_VALUE_MS_MAX < now_ms:
            self._chunks.popleft()
        while self._manifests and self._manifests[0][1] < start:
            heapq.heappop(self._manifests)
        floors = [start]
        if self._chunks:
            floors.append(self._chunks[0][0])
        if self._manifests:
            floors.append(self._manifests[0][0])
        return min(floors)

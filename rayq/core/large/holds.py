"""The bound that large values put on a queue's release of its topic's log start.

A queue skips chunks at once, so its start may be above the chunks of a value that nobody has
handled yet. Whatever deletes records below the start of a queue asks here first. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

OPEN_VALUE_MS_MAX = 3_600_000
"""Time for which the chunks of a value are kept whose manifest is not in the log yet. A producer
has given up by then: `delivery_timeout_ms` is far below."""
MOVED_VALUE_MS = 7 * 24 * 3_600_000
"""Time for which the chunks of a record are kept that was moved, to the dead letters or elsewhere:
its copy points at them."""
_STEPS = 8
"""Times are rounded up to this fraction of the time for which something is kept, so that there are
few of them."""

Hold = tuple[int, int, int]
"""`(first chunk, below, until_ms)`: the log start stays at `first chunk` while the start of the
queue is below `below`, and until that time."""


class LargeHolds:
    """Holds that keep the log start of one partition below the start of a queue. The order of the
    calls does not matter."""

    def __init__(self, kept: Iterable[Hold] = ()) -> None:
        """Takes what `kept` returned before."""
        self._timed: dict[int, int] = {}
        """Time -> the lowest chunk that is kept until then."""
        self._manifests: list[tuple[int, int]] = []
        """A heap: the first chunk of each value, and the offset behind its manifest."""
        self._manifests_end = 0
        for first_chunk, below, until_ms in kept:
            self._hold(first_chunk, below)
            self._hold_until(first_chunk, until_ms)

    def chunk(self, offset: int, append_time_ms: int) -> None:
        """Notes a chunk at this offset, or above it, whose manifest may be on its way."""
        self._hold_for(offset, append_time_ms, OPEN_VALUE_MS_MAX)

    def large(self, offset: int, first_chunk: int) -> None:
        """Notes the manifest of a value at `offset`, with its first chunk."""
        self._hold(first_chunk, offset + 1)

    def moved(self, first_chunk: int, now_ms: int) -> None:
        """Notes that the record of a value was copied to another partition, without its chunks."""
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
        """Maximum log start, for a queue whose first unsettled record is at `start`."""
        for until_ms in [expiry_ms for expiry_ms in self._timed if expiry_ms < now_ms]:
            del self._timed[until_ms]
        while self._manifests and self._manifests[0][1] <= start:
            heapq.heappop(self._manifests)
        lowest = self._manifests[0][0] if self._manifests else start
        return min(start, lowest, *self._timed.values())

    def kept(self) -> list[Hold]:
        """The holds that a later leader must know: for all unsettled values together, the offsets
        of the first chunk and the last manifest."""
        holds = [(offset, 0, until_ms) for until_ms, offset in sorted(self._timed.items())]
        if self._manifests:
            holds.append((self._manifests[0][0], self._manifests_end, 0))
        return holds

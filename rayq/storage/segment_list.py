"""The segments of one log, and the positions of the newest batches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, overload

from rayq.storage.segment import Segment

OPEN_SEGMENTS_MAX = 64
"""The files of this many closed segments stay open for readers."""
RECENT_BATCHES = 4096
"""The positions of the last batches are in memory, so that reads at the tail need no index."""


class SegmentList(Sequence[Segment]):
    """The segments in order, at least one. The last is the active segment.

    The files of the closed segments that were used last stay open. The list releases the others.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._opened: OrderedDict[int, Segment] = OrderedDict()
        self.active = segments[-1]

    @overload
    def __getitem__(self, place: int) -> Segment: ...

    @overload
    def __getitem__(self, place: slice) -> list[Segment]: ...

    def __getitem__(self, place: int | slice) -> Segment | list[Segment]:
        return self._segments[place]

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def find(self, offset: int) -> Segment:
        """The segment that holds `offset`, or the first segment for an offset before it."""
        place = bisect_right(self._segments, offset, key=lambda segment: segment.base_offset)
        return self._segments[max(place - 1, 0)]

    def use(self, segment: Segment) -> None:
        """Keeps the files of a segment open for a reader. A closed segment must be synced."""
        if segment is self.active:
            return
        self._opened[segment.base_offset] = segment
        self._opened.move_to_end(segment.base_offset)
        if len(self._opened) > OPEN_SEGMENTS_MAX:
            _, idle = self._opened.popitem(last=False)
            idle.release()

    def append(self, segment: Segment) -> None:
        self._segments.append(segment)
        self.active = segment

    def replace(self, old: Sequence[Segment], new: Segment) -> None:
        """Puts one closed segment in the place of consecutive closed segments."""
        first = self._segments.index(old[0])
        assert self._segments[first : first + len(old)] == list(old)
        assert old[-1] is not self.active
        self._segments[first : first + len(old)] = [new]
        for segment in old:
            self._opened.pop(segment.base_offset, None)

    def pop_first(self) -> Segment:
        assert len(self._segments) > 1
        segment = self._segments.pop(0)
        self._opened.pop(segment.base_offset, None)
        return segment

    def pop_last(self) -> Segment:
        """Removes the active segment. The segment before it becomes the active one."""
        assert len(self._segments) > 1
        segment = self._segments.pop()
        self.active = self._segments[-1]
        self._opened.pop(self.active.base_offset, None)
        return segment

    def retention_start(
        self,
        now_ms: int,
        limit_offset: int,
        *,
        retention_ms: int | None,
        retention_bytes: int | None,
    ) -> int | None:
        """The base offset of the first segment that is kept, or None when all are.

        Closed segments go, oldest first, when their newest append is older than `retention_ms`, or
        when the log is larger than `retention_bytes`. No segment goes that ends above
        `limit_offset`.
        """
        start, size_bytes = None, self.size_bytes
        for segment, following in zip(self._segments, self._segments[1:], strict=False):
            if following.base_offset > limit_offset:
                break
            is_old = (
                retention_ms is not None
                and now_ms - (segment.last_append_time_ms or 0) > retention_ms
            )
            is_too_much = retention_bytes is not None and size_bytes > retention_bytes
            if not (is_old or is_too_much):
                break
            start = following.base_offset
            size_bytes -= segment.size
        return start


class SegmentRange(NamedTuple):
    """A range of whole batches in the file of the active segment."""

    start: int
    end: int
    next_offset: int


class RecentBatches:
    """Offsets and positions of the newest batches of the active segment."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._positions: list[int] = []

    def add(self, base_offset: int, position: int) -> None:
        self._offsets.append(base_offset)
        self._positions.append(position)
        if len(self._offsets) > 2 * RECENT_BATCHES:
            del self._offsets[:RECENT_BATCHES]
            del self._positions[:RECENT_BATCHES]

    def clear(self) -> None:
        self._offsets.clear()
        self._positions.clear()

    def locate(
        self, offset: int, limit_offset: int, bytes_max: int, active: Segment
    ) -> SegmentRange | None:
        """The batches from the batch that holds `offset` on, all below `limit_offset`. They have at
        most `bytes_max` together, except that the first is always there. None when the first is not
        among the newest batches."""
        offsets, positions = self._offsets, self._positions
        if not offsets or offset < offsets[0]:
            return None
        first = bisect_right(offsets, offset) - 1
        start = positions[first]
        limit = bisect_left(offsets, limit_offset)
        stop = min(max(bisect_right(positions, start + bytes_max) - 1, first + 1), limit)
        if limit == len(offsets) and active.size - start <= bytes_max:
            stop = limit
        if stop < len(offsets):
            return SegmentRange(start, positions[stop], offsets[stop])
        return SegmentRange(start, active.size, active.next_offset)

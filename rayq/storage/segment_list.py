"""The segments of one log, and the places of the newest batches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, overload

from rayq.config import TopicConfig
from rayq.storage.segment import Segment

OPEN_SEGMENTS_MAX = 64
"""Closed segments whose files stay open for readers."""
RECENT_BATCHES = 4096
"""Batches at the tail whose places are remembered, so that tail reads ask no index."""


class SegmentList(Sequence[Segment]):
    """The segments in order, never none; the last is the active one.

    Keeps the files of the most recently used closed segments open and lets go of the others.
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
        """The segment that holds `offset`, the first one for what lies before."""
        place = bisect_right(self._segments, offset, key=lambda segment: segment.base_offset)
        return self._segments[max(place - 1, 0)]

    def use(self, segment: Segment) -> None:
        """A closed segment, synced already, is read: its files stay open for now."""
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
        """One closed segment instead of some that follow on each other."""
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
        """The one before becomes the active one."""
        assert len(self._segments) > 1
        segment = self._segments.pop()
        self.active = self._segments[-1]
        self._opened.pop(self.active.base_offset, None)
        return segment

    def retention_start(self, config: TopicConfig, now_ms: int, limit_offset: int) -> int | None:
        """The base offset of the first segment that `config` keeps; None when it keeps all.

        Only closed segments go, oldest first, and none that ends above `limit_offset`: those whose
        newest append is older than retention_ms, and those beyond retention_bytes.
        """
        start, size_bytes = None, self.size_bytes
        for segment, following in zip(self._segments, self._segments[1:], strict=False):
            if following.base_offset > limit_offset:
                break
            is_old = (
                config.retention_ms is not None
                and now_ms - (segment.last_append_time_ms or 0) > config.retention_ms
            )
            is_too_much = config.retention_bytes is not None and size_bytes > config.retention_bytes
            if not (is_old or is_too_much):
                break
            start = following.base_offset
            size_bytes -= segment.size
        return start


class SegmentRange(NamedTuple):
    """A stretch of whole batches in the active segment's file."""

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
        """The batches from the one that holds `offset`, all below `limit_offset`, of `bytes_max`
        in all but at least one; None when that batch is not among the newest."""
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

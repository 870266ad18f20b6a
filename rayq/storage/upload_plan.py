"""The plan, run by a thread, of the bytes of a log that go to the object store next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayq.storage.plans import end_of_read, nothing_leads_to, read_failed
from rayq.storage.segment import SegmentView, pread


class LocalSegment(NamedTuple):
    """One segment of a log, for decisions about its age and size."""

    base_offset: int
    next_offset: int
    size_bytes: int
    first_append_time_ms: int | None
    last_append_time_ms: int | None
    is_closed: bool


class UploadRange(NamedTuple):
    """Whole batches of the offsets from `start` up to `end` (exclusive), in order."""

    start: int
    end: int
    ranges: list[tuple[str, int, int]]
    """`(path, position, length)` in segment files."""

    @property
    def size_bytes(self) -> int:
        return sum(length for _, _, length in self.ranges)


@dataclass(frozen=True)
class UploadPlan:
    """The batches from the one that holds `start_offset` on that fit into `bytes_max`, but one at
    least. `views` are closed segments that are on disk, in order."""

    generation: int
    views: tuple[SegmentView, ...]
    start_offset: int
    limit_offset: int
    bytes_max: int

    def run(self) -> UploadRange | None:
        """In a thread. None: no whole batch lies below the limit. Raises `CorruptBatchError` and
        `StorageError` as reads do."""
        start, next_offset, left = self.start_offset, self.start_offset, self.bytes_max
        ranges: list[tuple[str, int, int]] = []
        for view in self.views:
            try:
                first = view.locate(next_offset, pread)
                if first is None or first.header.base_offset > next_offset:
                    raise nothing_leads_to(view, next_offset)
                header = first.header
                if header.next_offset > self.limit_offset or (ranges and header.length > left):
                    break
                end, next_offset = end_of_read(view, first, left, self.limit_offset, pread)
            except OSError as error:
                raise read_failed(view.path, None, error) from error
            if not ranges:
                start = header.base_offset
            ranges.append((view.path, first.position, end - first.position))
            left -= end - first.position
            if end < view.size:
                break
        return UploadRange(start, next_offset, ranges) if ranges else None

"""The batches in the files of a log, found on the simulated disk: looking changes nothing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from proving.simulation.disk import SimulatedDisk
from proving.simulation.server_view import segments_of
from rayq.storage.batch import read_header
from rayq.storage.log import Log


class LogBatch(NamedTuple):
    """A batch in a log file."""

    path: str
    start: int
    stop: int
    base_offset: int
    next_offset: int

    def read(self, disk: SimulatedDisk) -> bytes:
        """Returns the bytes of the batch, as processes see them."""
        return bytes(disk.find_file(self.path).current[self.start : self.stop])


@dataclass(slots=True)
class LogBatches:
    """Positions of the batches of a log, in one generation of it."""

    generation: int
    found: list[LogBatch] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """The next offset of each batch."""
    segment: int = 0
    position: int = 0
    """The segment (by base offset) and the position where the scan continues."""

    def between(self, disk: SimulatedDisk, log: Log, start: int, end: int) -> list[LogBatch]:
        """The batches from the one that ends above `start` to the one that reaches `end`."""
        if start >= end:
            return []  # Nothing more is read: a failed sync may have lost it.
        if not self.ends or self.ends[-1] < end:
            self._find(disk, log, end)
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, end)
        return self.found[first : last + 1]

    def _find(self, disk: SimulatedDisk, log: Log, end: int) -> None:
        segments = segments_of(log)
        number = bisect_right(segments, self.segment, key=lambda entry: entry.base_offset) - 1
        for segment in segments[max(number, 0) :]:
            if segment.base_offset != self.segment:
                self.segment, self.position = segment.base_offset, 0
            content = disk.find_file(segment.path).current
            while self.position < segment.size:
                header = read_header(content, self.position)
                start, self.position = self.position, self.position + header.length
                self.found.append(
                    LogBatch(
                        *(segment.path, start, self.position),
                        *(header.base_offset, header.next_offset),
                    )
                )
                self.ends.append(header.next_offset)
                if header.next_offset >= end:
                    return


def first_offset_of(log: Log) -> int:
    """The offset below which the log's batches are not on its disk: they were removed, or they are
    in the object store only."""
    return segments_of(log)[0].base_offset

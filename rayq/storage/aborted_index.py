"""The index of aborted transactions: which batches readers of committed records pass over.

It has an entry for each marker that aborted batches of this log. The entries are in memory, since a
read asks for them in the turn in which it is planned. On disk each segment has those of its own
markers, in the file `<base offset>.aborted`. The content is a sequence of entries by their markers,
little endian::

    family u64 | epoch u16 | first offset u64 | marker offset u64 | stable offset u64

The files are derived from the headers of the log. They are written with a checkpoint, and trusted
below its recovery point. Segments that end before the log's first transaction have none.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from rayq.environment import Disk
from rayq.errors import RayqError
from rayq.storage import checked_file
from rayq.storage.open_transactions import AbortedTransaction
from rayq.storage.segment import ABORTED_SUFFIX, Segment, segment_path

_ENTRY = struct.Struct("<QHQQQ")
_KIND, _VERSION = "aborted", 1


class AbortedIndex:
    """The entries of one log, ascending by their markers."""

    def __init__(self) -> None:
        self._entries = bytearray()
        self._bytes_in_files: dict[int, int] = {}
        """By base offset: the size of what a segment's file has. Others must be written."""

    def between(self, start: int, end: int) -> list[tuple[int, int]]:
        """`(family, epoch)` of the transactions with a first batch below `end` and their marker
        from `start` on."""
        found = []
        for number in range(self._number(start), len(self._entries) // _ENTRY.size):
            entry = self._entry(number)
            if entry.first_offset < end:
                found.append((entry.family, entry.epoch))
            if entry.stable_offset >= end:
                break
        return found

    def add(self, aborted: AbortedTransaction) -> None:
        self._entries += _ENTRY.pack(*aborted)

    def cut(self, end_offset: int, base_offset: int) -> None:
        """Drops the entries from `end_offset` on, the new end of the log. It lies in the segment
        with `base_offset`."""
        del self._entries[self._number(end_offset) * _ENTRY.size :]
        for base in [base for base in self._bytes_in_files if base >= base_offset]:
            del self._bytes_in_files[base]

    def drop(self, base_offsets: Sequence[int], end_offset: int) -> None:
        """Drops the files of consecutive segments, and their entries below `end_offset`."""
        start, end = self._number(base_offsets[0]), self._number(end_offset)
        del self._entries[start * _ENTRY.size : end * _ENTRY.size]
        for base in base_offsets:
            self._bytes_in_files.pop(base, None)

    def content(self, start: int, end: int) -> bytes:
        """The entries whose markers lie from `start` up to `end` (exclusive), as a file has
        them."""
        return bytes(
            self._entries[self._number(start) * _ENTRY.size : self._number(end) * _ENTRY.size]
        )

    # --- files ------------------------------------------------------------------------------------

    def load(self, disk: Disk, segment: Segment) -> bool:
        """Adds the entries of a segment, from its file. Returns False where the file is missing or
        damaged. Raises OSError."""
        path = segment_path(segment.directory, segment.base_offset, ABORTED_SUFFIX)
        try:
            content = checked_file.read(disk, path, _KIND, _VERSION)
        except RayqError:
            return False
        if content is None or len(content) % _ENTRY.size:
            return False
        before = len(self._entries)
        self._entries += content
        # An entry beyond the recovery point may be about batches that are gone.
        del self._entries[self._number(segment.next_offset) * _ENTRY.size :]
        if len(self._entries) == before + len(content):
            self.written(segment.base_offset, content)
        return True

    def to_write(self, segments: Iterable[Segment], used_from: int) -> list[tuple[int, bytes]]:
        """Base offsets and contents of the files that are not up to date. `used_from` is the offset
        of the log's first transaction."""
        found = []
        for segment in segments:
            if not segment.size or segment.next_offset <= used_from:
                continue
            start, end = segment.base_offset, segment.next_offset
            length = (self._number(end) - self._number(start)) * _ENTRY.size
            if self._bytes_in_files.get(start) != length:
                found.append((start, self.content(start, end)))
        return found

    def written(self, base_offset: int, content: bytes) -> None:
        """The file of a segment has this content now."""
        self._bytes_in_files[base_offset] = len(content)

    # --- entries ----------------------------------------------------------------------------------

    def _number(self, offset: int) -> int:
        """The number of the first entry whose marker is at `offset` or later."""
        numbers = range(len(self._entries) // _ENTRY.size)
        return bisect_left(numbers, offset, key=lambda number: self._entry(number).marker_offset)

    def _entry(self, number: int) -> AbortedTransaction:
        return AbortedTransaction(*_ENTRY.unpack_from(self._entries, number * _ENTRY.size))


def write_aborted(disk: Disk, directory: str, base_offset: int, content: bytes) -> None:
    """Replaces the file of a segment; durable after a sync of the directory. Raises OSError."""
    path = segment_path(directory, base_offset, ABORTED_SUFFIX)
    checked_file.write(disk, path, _KIND, _VERSION, content, syncs_directory=False)

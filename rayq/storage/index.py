"""The sparse indexes of a segment: from offset to file position, from time to offset.

Both are files of ascending entries of a fixed size, behind eight bytes of file header (`RQIX`,
version u16, entry size u16, little endian). Entries are made as batches are appended, one for about
every `index_interval_bytes` of log. They wait in memory, and reach the file, synced, with the
checkpoint that covers them. So a file may hold rubbish after a crash, but only beyond the recovery
point of the checkpoint, where it is cut and rebuilt from the log. An index need not be right: a
reader checks that the batch of an entry starts at its position, and scans the segment otherwise.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayq.environment import Disk, File

Reader = Callable[[File, int, int], bytes]
"""`read(file, length, position)`: as `File.pread`, or a read that raises rather than wait."""

OFFSET_ENTRY = struct.Struct("<II")
"""Offset index: (base offset of a batch - base offset of the segment, its position in the file)."""
TIME_ENTRY = struct.Struct("<qI")
"""Time index: (greatest timestamp of all batches before, relative base offset of the batch that
follows them). It has one entry for each entry of the offset index. In a closed segment it has one
more, for the segment's end."""

_FILE_HEADER = struct.Struct("<4sHH")
_MAGIC = b"RQIX"
_VERSION = 1


class DamagedIndexError(Exception):
    """An index file is too short, or its entries are wrong: scan the log instead."""


@dataclass(frozen=True)
class IndexView:
    """The entries of an index file at one moment. The file only grows while the view is used."""

    file: File
    format: struct.Struct
    count: int

    def entry(self, number: int, read: Reader) -> tuple[int, int]:
        data = read(self.file, self.format.size, _FILE_HEADER.size + number * self.format.size)
        if len(data) < self.format.size:
            raise DamagedIndexError(f"entry {number} of {self.count} is missing")
        first, second = self.format.unpack(data)
        return first, second

    def last_at_most(self, key: int, read: Reader, column: int = 0) -> int | None:
        """The number of the last entry whose `column` is <= `key`, or None."""
        place = bisect_right(_Column(self, column, read), key)
        return place - 1 if place > 0 else None

    def last_below(self, key: int, read: Reader) -> int | None:
        """The number of the last entry whose first column is < `key`, or None."""
        place = bisect_left(_Column(self, 0, read), key)
        return place - 1 if place > 0 else None


class _Column:
    """One column of an index file as a sequence, for bisect."""

    def __init__(self, view: IndexView, column: int, read: Reader) -> None:
        self._view, self._column, self._read = view, column, read

    def __len__(self) -> int:
        return self._view.count

    def __getitem__(self, number: int) -> Any:
        return self._view.entry(number, self._read)[self._column]


@dataclass(frozen=True)
class IndexWrite:
    """Pending entries and their place in the file, for a thread that writes them."""

    file: File
    position: int
    data: bytes
    count: int
    """The number of entries in the file after the write."""


class Index:
    """One index of one segment: `count` entries in the file, the newer ones in `pending`."""

    def __init__(
        self, disk: Disk, path: str, entry: struct.Struct, *, writable: bool = True
    ) -> None:
        self.path = path
        self._disk = disk
        self._format = entry
        self._writable = writable
        self._file: File | None = None
        self._has_header = False
        self.count = 0
        self.pending: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.count + len(self.pending)

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = self._disk.open(self.path, create=self._writable, writable=self._writable)
        return self._file

    def release(self) -> None:
        """Drops the file. It is opened again when it is needed."""
        self._file = None

    def load(self) -> bool:
        """Counts the entries of the file. Returns False when it has no valid header."""
        header = self.file.pread(_FILE_HEADER.size, 0)
        self.pending.clear()
        self.count = 0
        self._has_header = header == _FILE_HEADER.pack(_MAGIC, _VERSION, self._format.size)
        if not self._has_header:
            return False
        self.count = (self.file.size() - _FILE_HEADER.size) // self._format.size
        return True

    def add(self, first: int, second: int) -> None:
        self.pending.append((first, second))

    def keep(self, count: int) -> None:
        """Drops all entries but the first `count`."""
        self.count = min(count, self.count)
        del self.pending[count - self.count :]
        if self.file.size() > self._end():
            self.file.truncate(self._end())

    def entry(self, number: int, read: Reader) -> tuple[int, int]:
        """One entry, from the file or pending. Raises `DamagedIndexError`."""
        if number >= self.count:
            return self.pending[number - self.count]
        return self.view().entry(number, read)

    def view(self) -> IndexView:
        return IndexView(self.file, self._format, self.count)

    def write(self) -> IndexWrite | None:
        """The write that brings the file up to date, or None. The first also has the header."""
        if self._has_header and not self.pending:
            return None
        data = b"".join(self._format.pack(*entry) for entry in self.pending)
        if not self._has_header:
            header = _FILE_HEADER.pack(_MAGIC, _VERSION, self._format.size)
            return IndexWrite(self.file, 0, header + data, len(self.pending))
        return IndexWrite(self.file, self._end(), data, len(self))

    def written(self, count: int) -> None:
        """The file has `count` entries now."""
        self._has_header = True
        if count > self.count:
            del self.pending[: count - self.count]
            self.count = count

    def _end(self) -> int:
        return _FILE_HEADER.size + self.count * self._format.size

"""Reading around damage: what is left of a segment, for readers of a replica that is alone.

Where a header does not match its CRC, nothing says where the next batch begins: it is looked for.
The offsets between are answered by a batch that nobody can read (`batch.stand_in`), so that readers
learn which they are and may go on behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayq.errors import CorruptBatchError, UnsupportedFormatError
from rayq.storage.batch import HEADER_BYTES, MAGIC, BatchHeader, check_body, read_header, stand_in
from rayq.storage.index import DamagedIndexError
from rayq.storage.plans import ReadResult, read_failed
from rayq.storage.segment import Place, SegmentView, pread

_MAGIC_POSITION = 16
STRETCH_BYTES = 8 * 1024 * 1024
"""Read at once; more where a batch is longer."""


@dataclass(frozen=True)
class SalvageRead:
    """As an `IndexedRead`, in a segment that is known to be damaged somewhere."""

    view: SegmentView
    offset: int
    limit_offset: int
    bytes_max: int
    leader_epoch: int
    """Of the batch at `offset`, as the epochs say."""

    def run(self) -> ReadResult:
        """In a thread. Raises `StorageError` when the disk fails."""
        try:
            return self._read()
        except OSError as error:
            raise read_failed(self.view.path, None, error) from error

    def _read(self) -> ReadResult:
        view = self.view
        position, expected = self._floor()
        kept, next_offset = bytearray(), self.offset
        while position < view.size and next_offset < self.limit_offset:
            place = self._next_batch(position, expected)
            if place is None or place.position > position:
                end = view.next_offset if place is None else place.header.base_offset
                if kept:
                    break  # What is sound goes first, by itself: a follower can append it.
                if end > max(expected, self.offset):
                    end = min(end, self.limit_offset)
                    kept += stand_in(max(expected, self.offset), end, self.leader_epoch)
                    return ReadResult(bytes(kept), end)
                if place is None:
                    break
            header = place.header
            if header.next_offset > self.offset:
                if header.base_offset >= self.limit_offset or (
                    kept and len(kept) + header.length > self.bytes_max
                ):
                    break
                kept += pread(view.file, header.length, place.position)
                next_offset = header.next_offset
            position, expected = place.position + header.length, header.next_offset
        return ReadResult(bytes(kept), next_offset)

    def _floor(self) -> tuple[int, int]:
        """Position and offset of a batch at or before the offset that the index leads to."""
        view = self.view
        try:
            number = view.offsets.last_at_most(self.offset - view.base_offset, pread)
            for before in range(-1 if number is None else number, -1, -1):
                relative, position = view.offsets.entry(before, pread)
                place = self._batch_at(position, view.base_offset + relative)
                if place is not None and place.header.base_offset == view.base_offset + relative:
                    return position, place.header.base_offset
        except DamagedIndexError:
            pass
        return 0, view.base_offset

    def _next_batch(self, position: int, expected: int) -> Place | None:
        """The batch at `position`, or the first sound one behind it."""
        place = self._batch_at(position, expected)
        if place is not None:
            return place
        view = self.view
        while position + HEADER_BYTES <= view.size:
            data = pread(view.file, STRETCH_BYTES + HEADER_BYTES, position)
            at = data.find(MAGIC, _MAGIC_POSITION + 1)
            while at >= 0:
                place = self._batch_at(position + at - _MAGIC_POSITION, expected)
                if place is not None:
                    return place
                at = data.find(MAGIC, at + 1)
            position += STRETCH_BYTES
        return None

    def _batch_at(self, position: int, expected: int) -> Place | None:
        view = self.view
        data = pread(view.file, min(HEADER_BYTES, view.size - position), position)
        try:
            header: BatchHeader = read_header(data)
        except (CorruptBatchError, UnsupportedFormatError):
            return None
        if position + header.length > view.size or header.base_offset < expected:
            return None
        try:
            check_body(pread(view.file, header.length, position), 0, header)
        except CorruptBatchError:
            return None
        return Place(position, header)

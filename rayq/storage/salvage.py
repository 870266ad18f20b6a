"""Reads the sound batches of a damaged segment, for readers when no other replica has them.

Where a header does not match its CRC, nothing says where the next batch begins, so the read
searches for it. A batch that no reader can decode (`batch.stand_in`) takes the place of the offsets
between. So readers learn which offsets are damaged, and can continue behind them.
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
"""The search reads this much at once."""


@dataclass(frozen=True)
class SalvageRead:
    """An `IndexedRead` in a segment that is damaged somewhere."""

    view: SegmentView
    offset: int
    limit_offset: int
    bytes_max: int
    leader_epoch: int
    """The leader epoch of the batch at `offset`, from the epoch cache."""

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
                    break  # Sound batches go first, without a stand-in: a follower can append them.
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
        """Position and offset of a sound batch at or before `offset` that the index knows, or of
        the segment's start."""
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
        """The batch at `position`, or the first sound batch behind it."""
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

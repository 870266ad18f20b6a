"""Reads of a partition's log for its queues: whole batches below the last stable offset.

The queues of a partition share the last read: the same bytes are scanned for new records, and serve
the takes that follow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rayq.actors.replica.leader import Leader
from rayq.config import MIB
from rayq.environment import Clock
from rayq.errors import CorruptBatchError, OffsetOutOfRangeError, UnsupportedFormatError
from rayq.records import Headers
from rayq.storage.batch import (
    BatchHeader,
    Columns,
    decode_columns,
    due_ms_of,
    is_as_written,
    is_stand_in,
    keep_records,
    split_batches,
)
from rayq.transaction_ids import family_of

PIECE_BYTES = MIB
"""So much is read at once, at least one batch."""
PIECES_MAX = 4
"""How many pieces are kept: takes of several consumers are near each other."""
KEPT_S = 2.0
"""A piece that nobody used for so long is dropped."""
RECUT_BYTES_MIN = 4096
"""A smaller batch is sent whole, also where one record of it was given out."""
RECUT_SHARE = 4
"""A larger batch is sent whole where one record in so many of it was given out."""

Runs = Sequence[tuple[int, int, int]]
"""`(first offset, last offset, count)`, ascending."""


class Found(NamedTuple):
    """Offsets `[first, next_offset)` of the log, which are of one kind."""

    first: int
    next_offset: int
    is_gap: bool
    """Whether no record is there for readers: a marker, an aborted transaction, what compaction
    removed."""
    keys: Sequence[bytes | None] | None = None
    """By offset, where they were asked for. None: no record has one, or nobody asked."""
    due_ms: Sequence[int | None] | None = None
    """By offset: when each record is due. None: all are due at once."""


class Piece:
    """Whole batches as they lie in the log, from the first on, and where the next one begins."""

    def __init__(
        self, offset: int, data: bytes, next_offset: int, aborted: frozenset[tuple[int, int]]
    ) -> None:
        """The piece of a read from `offset`. Raises CorruptBatchError."""
        self.next_offset = next_offset
        self._data = memoryview(data)
        self._aborted = aborted
        self._positions: list[int] = []
        self._headers: list[BatchHeader] = []
        for position, header in split_batches(data):
            self._positions.append(position)
            self._headers.append(header)
        self._last_offsets = [header.last_offset for header in self._headers]
        self._ends = [*self._positions[1:], len(data)]
        self.first = min(offset, self._headers[0].base_offset) if self._headers else offset
        self.used_s = 0.0
        self._decoded: tuple[int, Columns] | None = None
        """The columns of the batch that was decoded last, and its place."""

    # --- what is there --------------------------------------------------------------------------

    def found(self, offset: int, *, with_keys: bool) -> Iterator[Found]:
        """All from `offset` on, without holes between. Neighbours of one kind come together where
        nothing is said of their records. Raises CorruptBatchError."""
        plain: Found | None = None
        for one in self._kinds(offset, with_keys=with_keys):
            is_plain = one.keys is None and one.due_ms is None
            if plain is not None and is_plain and plain.is_gap == one.is_gap:
                plain = plain._replace(next_offset=one.next_offset)
                continue
            if plain is not None:
                yield plain
            plain = one if is_plain else None
            if not is_plain:
                yield one
        if plain is not None:
            yield plain

    def _kinds(self, offset: int, *, with_keys: bool) -> Iterator[Found]:
        for place in range(bisect_left(self._last_offsets, offset), len(self._headers)):
            header = self._headers[place]
            first = max(header.base_offset, offset)
            if offset < header.base_offset:
                yield Found(offset, header.base_offset, True)
            offset = header.next_offset
            if _is_for_nobody(header) or self._is_aborted(header):
                yield Found(first, offset, True)
            elif (with_keys or header.is_delayed or _has_gaps(header)) and self._is_readable(place):
                yield from self._records(place, first, with_keys=with_keys)
            else:
                yield Found(first, offset, False)
        if offset < self.next_offset:
            yield Found(offset, self.next_offset, True)

    def _records(self, place: int, first: int, *, with_keys: bool) -> Iterator[Found]:
        """Those of a batch that has to be decoded, from the offset `first` on."""
        header, columns = self._headers[place], self._columns(place)
        behind = first
        for begin, end in _runs_of(columns.offsets, first):
            offset = columns.offsets[begin]
            if behind < offset:
                yield Found(behind, offset, True)
            behind = columns.offsets[end - 1] + 1
            due_ms = None
            if header.is_delayed and columns.headers is not None:
                due_ms = [due_ms_of(headers) for headers in columns.headers[begin:end]]
                if not any(due_ms):
                    due_ms = None
            keys = columns.keys[begin:end] if with_keys and columns.keys is not None else None
            yield Found(offset, behind, False, keys, due_ms)
        if behind < header.next_offset:
            yield Found(behind, header.next_offset, True)

    def large(self, first: int, end: int) -> Iterator[tuple[int, int, bytes | None]]:
        """`(offset, append time, manifest)` of what belongs to large values in [first, end): for a
        chunk the last is None."""
        for place in range(bisect_left(self._last_offsets, first), len(self._headers)):
            header = self._headers[place]
            if header.base_offset >= end:
                return
            if header.is_chunk:
                yield header.base_offset, header.append_time_ms, None
            elif header.is_large and self._is_readable(place):
                columns = self._columns(place)
                for offset, value in zip(columns.offsets, columns.values, strict=True):
                    yield offset, header.append_time_ms, value or b""

    def _is_aborted(self, header: BatchHeader) -> bool:
        if not self._aborted or not header.is_transactional or header.producer_id is None:
            return False
        return (family_of(header.producer_id), header.producer_epoch) in self._aborted

    def _is_readable(self, place: int) -> bool:
        """Whether a batch can be decoded. One that nobody can decode is given out like others, as
        its consumer tells of it. Raises CorruptBatchError for one that is damaged here, and may be
        whole elsewhere."""
        try:
            self._columns(place)
        except (CorruptBatchError, UnsupportedFormatError):
            where = self._data, self._positions[place], self._headers[place]
            if not (is_as_written(*where) or is_stand_in(*where)):
                raise
            return False
        return True

    def _may_be_cut(self, place: int) -> bool:
        try:
            return self._is_readable(place)
        except CorruptBatchError:  # Its consumer finds that out, too.
            return False

    def _columns(self, place: int) -> Columns:
        if self._decoded is None or self._decoded[0] != place:
            header = self._headers[place]
            columns = decode_columns(self._data, self._positions[place], header)
            self._decoded = place, columns
        return self._decoded[1]

    # --- answers --------------------------------------------------------------------------------

    def end_of(self, offset: int, bytes_max: int, *, at_least_one: bool) -> int:
        """Where the batches from the one of `offset` on end that have at most `bytes_max` bytes
        together: perhaps at `offset`, unless there is to be one in any case."""
        place = bisect_left(self._last_offsets, offset)
        if place >= len(self._headers):
            return self.next_offset
        behind = bisect_right(self._ends, self._positions[place] + bytes_max)
        if at_least_one:
            behind = max(behind, place + 1)
        return offset if behind <= place else self._last_offsets[behind - 1] + 1

    def has_some(self, first: int, last: int) -> bool:
        """Whether some offset of [first, last] lies in this piece."""
        return last >= self.first and first < self.next_offset

    def bytes_between(self, offset: int, end: int) -> int:
        """How many bytes the batches have from the one of `offset` on that begin below `end`."""
        begin = bisect_left(self._last_offsets, offset)
        behind = bisect_left(self._last_offsets, end)
        if begin >= behind:
            return 0
        return self._ends[behind - 1] - self._positions[begin]

    def cut(self, runs: Runs) -> list[memoryview | bytearray]:
        """The batches that have records of these runs, which lie in this piece. A large batch of
        which little was given out comes with that only."""
        parts: list[memoryview | bytearray] = []
        begin = end = -1
        number, last = 0, len(runs) - 1
        place = bisect_left(self._last_offsets, runs[0][0])
        while number <= last and place < len(self._headers):
            header = self._headers[place]
            if runs[number][1] < header.base_offset:
                number += 1  # Compaction removed it.
                continue
            if header.last_offset < runs[number][0]:
                place = bisect_left(self._last_offsets, runs[number][0], place)
                continue
            given, after = _records_in(runs, number, header)
            is_whole = header.length < RECUT_BYTES_MIN or (
                given * RECUT_SHARE >= header.record_count
            )
            if is_whole or not self._may_be_cut(place):
                if self._positions[place] != end:
                    if end > begin:
                        parts.append(self._data[begin:end])
                    begin = self._positions[place]
                end = self._ends[place]
            else:
                if end > begin:
                    parts.append(self._data[begin:end])
                begin = end = -1
                parts.append(self._recut(place, runs[number : after + 1]))
            number = after if runs[min(after, last)][1] > header.last_offset else after + 1
            place += 1
        if end > begin:
            parts.append(self._data[begin:end])
        return parts

    def record(
        self, offset: int
    ) -> tuple[bytes | None, bytes | None, Headers, bool] | None:
        """`(key, value, headers, whether the value is a manifest)` of a record here. None: there is
        none for readers. Of a record that nobody can read the offset is all there is."""
        place = bisect_left(self._last_offsets, offset)
        if place >= len(self._headers) or offset < self._headers[place].base_offset:
            return None
        header = self._headers[place]
        if _is_for_nobody(header) or self._is_aborted(header):
            return None
        if not self._is_readable(place):
            return None, None, [], False
        columns = self._columns(place)
        at = bisect_left(columns.offsets, offset)
        if at >= len(columns.offsets) or columns.offsets[at] != offset:
            return None
        return (
            None if columns.keys is None else columns.keys[at],
            columns.values[at],
            [] if columns.headers is None else columns.headers[at] or [],
            header.is_large,
        )

    def _recut(self, place: int, runs: Runs) -> bytearray:
        header, columns = self._headers[place], self._columns(place)
        offsets = columns.offsets
        kept: list[int] = []
        for first, last, _ in runs:
            kept += range(bisect_left(offsets, first), bisect_right(offsets, last))
        return keep_records(header, columns, kept)


def _is_for_nobody(header: BatchHeader) -> bool:
    """Markers have no records; chunks of a large value belong to the record that names them."""
    return header.is_control or header.is_chunk or header.record_count == 0


def _has_gaps(header: BatchHeader) -> bool:
    return header.record_count != header.last_offset_delta + 1


def _runs_of(offsets: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """The places `[begin, end)` of records whose offsets follow each other, from `first` on."""
    begin = bisect_left(offsets, first)
    for place in range(begin + 1, len(offsets)):
        if offsets[place] != offsets[place - 1] + 1:
            yield begin, place
            begin = place
    if begin < len(offsets):
        yield begin, len(offsets)


def _records_in(runs: Runs, number: int, header: BatchHeader) -> tuple[int, int]:
    """How many offsets of the runs from `number` on lie in a batch, and which run is the last
    there."""
    given, after = 0, number
    while number < len(runs) and runs[number][0] <= header.last_offset:
        first, last, _ = runs[number]
        given += min(last, header.last_offset) - max(first, header.base_offset) + 1
        after = number
        number += 1
    return given, after


class QueueReads:
    """See the module. Made for the queues of one partition, as long as it is led here."""

    def __init__(self, leader: Leader, clock: Clock) -> None:
        self._leader = leader
        self._clock = clock
        self._pieces: list[Piece] = []
        """Used last at the end."""

    async def piece(self, offset: int) -> Piece:
        """Batches from the one with `offset` on, all below the last stable offset; below it lies
        `offset`, too. Raises OffsetOutOfRangeError below the log start, NotLeaderError,
        StorageError, CorruptBatchError, and what remote storage raises."""
        pieces = self._pieces
        for place in range(len(pieces) - 1, -1, -1):
            if pieces[place].first <= offset < pieces[place].next_offset:
                piece = pieces.pop(place)
                break
        else:
            data, next_offset, aborted = await self._leader.reads.read_stable(offset, PIECE_BYTES)
            if next_offset <= offset:
                raise OffsetOutOfRangeError(f"There is nothing to read at offset {offset} yet.")
            piece = Piece(offset, data, next_offset, frozenset(aborted))
            if len(pieces) >= PIECES_MAX:
                del pieces[0]
        piece.used_s = self._clock.monotonic()
        pieces.append(piece)
        return piece

    def drop_all(self) -> None:
        """Some of it is damaged."""
        self._pieces = []

    def drop_unused(self) -> None:
        """Drops what nobody used for a while; to be called now and then."""
        if self._pieces:
            before_s = self._clock.monotonic() - KEPT_S
            self._pieces = [piece for piece in self._pieces if piece.used_s > before_s]

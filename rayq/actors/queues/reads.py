"""Reads of a partition's log for its queues: whole batches below the last stable offset.

The queues of a partition share the last read: the same bytes are scanned for new records, and serve
the takes that follow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rayq.actors.access import Access
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.peers import Peers
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import MIB
from rayq.environment import Clock
from rayq.errors import CorruptBatchError, OffsetOutOfRangeError, UnsupportedFormatError
from rayq.messages.transaction_ids import family_of
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

PIECE_BYTES = MIB
"""Size of a read; it has at least one batch."""
PIECES_MAX = 4
"""Maximum number of cached pieces: takes of several consumers are near each other."""
KEPT_S = 2.0
"""Time after which an unused piece is dropped."""
RECUT_BYTES_MIN = 4096
"""Minimum size of a batch that is cut: a smaller one is sent whole, even if only one record of it
was given out."""
RECUT_SHARE = 4
"""A larger batch is sent whole if at least one record in this many of it was given out."""

Runs = Sequence[tuple[int, int, int]]
"""`(first offset, last offset, count)`, ascending."""


class Found(NamedTuple):
    """Offsets `[first, next_offset)` of the log, which are of one kind."""

    first: int
    next_offset: int
    is_gap: bool
    """True if there is no record for readers: a marker, an aborted transaction, removed by
    compaction."""
    keys: Sequence[bytes | None] | None = None
    """Keys by offset, if they were requested. None: no record has one, or nobody asked."""
    due_ms: Sequence[int | None] | None = None
    """Due time of each record, by offset. None: all are due at once."""


class Piece:
    """Whole contiguous batches of the log, and the offset of the next one."""

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
        """The columns of the batch that was decoded last, and its index."""

    # --- what is there --------------------------------------------------------------------------

    def found(self, offset: int, *, with_keys: bool) -> Iterator[Found]:
        """Yields everything from `offset` on, without holes. Neighbours of one kind are merged if
        they have no data about records. Raises CorruptBatchError."""
        plain: Found | None = None
        for found in self._kinds(offset, with_keys=with_keys):
            is_plain = found.keys is None and found.due_ms is None
            if plain is not None and is_plain and plain.is_gap == found.is_gap:
                plain = plain._replace(next_offset=found.next_offset)
                continue
            if plain is not None:
                yield plain
            plain = found if is_plain else None
            if not is_plain:
                yield found
        if plain is not None:
            yield plain

    def _kinds(self, offset: int, *, with_keys: bool) -> Iterator[Found]:
        for index in range(bisect_left(self._last_offsets, offset), len(self._headers)):
            header = self._headers[index]
            first = max(header.base_offset, offset)
            if offset < header.base_offset:
                yield Found(offset, header.base_offset, True)
            offset = header.next_offset
            if _is_for_nobody(header) or self._is_aborted(header):
                yield Found(first, offset, True)
            elif (with_keys or header.is_delayed or _has_gaps(header)) and self._is_readable(index):
                yield from self._records(index, first, with_keys=with_keys)
            else:
                yield Found(first, offset, False)
        if offset < self.next_offset:
            yield Found(offset, self.next_offset, True)

    def _records(self, index: int, first: int, *, with_keys: bool) -> Iterator[Found]:
        """Yields the ranges of a batch that must be decoded, from the offset `first` on."""
        header, columns = self._headers[index], self._columns(index)
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
        """Yields `(offset, append time, manifest)` of the records of large values in [first, end):
        for a chunk the manifest is None."""
        for index in range(bisect_left(self._last_offsets, first), len(self._headers)):
            header = self._headers[index]
            if header.base_offset >= end:
                return
            if header.is_chunk:
                yield header.base_offset, header.append_time_ms, None
            elif header.is_large and self._is_readable(index):
                columns = self._columns(index)
                for offset, value in zip(columns.offsets, columns.values, strict=True):
                    yield offset, header.append_time_ms, value or b""

    def _is_aborted(self, header: BatchHeader) -> bool:
        if not self._aborted or not header.is_transactional or header.producer_id is None:
            return False
        return (family_of(header.producer_id), header.producer_epoch) in self._aborted

    def _is_readable(self, index: int) -> bool:
        """Returns whether a batch can be decoded. One that nobody can decode is given out like
        others, and its consumer reports it. Raises CorruptBatchError for one that is damaged here,
        and may be intact elsewhere."""
        try:
            self._columns(index)
        except (CorruptBatchError, UnsupportedFormatError):
            where = self._data, self._positions[index], self._headers[index]
            if not (is_as_written(*where) or is_stand_in(*where)):
                raise
            return False
        return True

    def _may_be_cut(self, index: int) -> bool:
        try:
            return self._is_readable(index)
        except CorruptBatchError:  # Its consumer will find that out.
            return False

    def _columns(self, index: int) -> Columns:
        if self._decoded is None or self._decoded[0] != index:
            header = self._headers[index]
            columns = decode_columns(self._data, self._positions[index], header)
            self._decoded = index, columns
        return self._decoded[1]

    # --- answers --------------------------------------------------------------------------------

    def end_of(self, offset: int, bytes_max: int, *, at_least_one: bool) -> int:
        """The end of the batches from the one at `offset` on that have at most `bytes_max` bytes
        together: perhaps `offset` itself, unless `at_least_one`."""
        index = bisect_left(self._last_offsets, offset)
        if index >= len(self._headers):
            return self.next_offset
        behind = bisect_right(self._ends, self._positions[index] + bytes_max)
        if at_least_one:
            behind = max(behind, index + 1)
        return offset if behind <= index else self._last_offsets[behind - 1] + 1

    def has_some(self, first: int, last: int) -> bool:
        """Returns whether any offset of [first, last] is in this piece."""
        return last >= self.first and first < self.next_offset

    def bytes_between(self, offset: int, end: int) -> int:
        """Size in bytes of the batches from the one at `offset` on that begin below `end`."""
        begin = bisect_left(self._last_offsets, offset)
        behind = bisect_left(self._last_offsets, end)
        if begin >= behind:
            return 0
        return self._ends[behind - 1] - self._positions[begin]

    def cut(self, runs: Runs) -> list[memoryview | bytearray]:
        """The batches with records of these runs, which are in this piece. A large batch of which
        little was given out is cut to those records."""
        parts: list[memoryview | bytearray] = []
        begin = end = -1
        number, last = 0, len(runs) - 1
        index = bisect_left(self._last_offsets, runs[0][0])
        while number <= last and index < len(self._headers):
            header = self._headers[index]
            if runs[number][1] < header.base_offset:
                number += 1  # Compaction removed it.
                continue
            if header.last_offset < runs[number][0]:
                index = bisect_left(self._last_offsets, runs[number][0], index)
                continue
            given, after = _records_in(runs, number, header)
            is_whole = header.length < RECUT_BYTES_MIN or (
                given * RECUT_SHARE >= header.record_count
            )
            if is_whole or not self._may_be_cut(index):
                if self._positions[index] != end:
                    if end > begin:
                        parts.append(self._data[begin:end])
                    begin = self._positions[index]
                end = self._ends[index]
            else:
                if end > begin:
                    parts.append(self._data[begin:end])
                begin = end = -1
                parts.append(self._recut(index, runs[number : after + 1]))
            number = after if runs[min(after, last)][1] > header.last_offset else after + 1
            index += 1
        if end > begin:
            parts.append(self._data[begin:end])
        return parts

    def record(
        self, offset: int
    ) -> tuple[bytes | None, bytes | None, Headers, bool] | None:
        """Returns `(key, value, headers, whether the value is a manifest)` of a record here. None:
        there is none for readers. Of a record that nobody can read, only the offset is known."""
        index = bisect_left(self._last_offsets, offset)
        if index >= len(self._headers) or offset < self._headers[index].base_offset:
            return None
        header = self._headers[index]
        if _is_for_nobody(header) or self._is_aborted(header):
            return None
        if not self._is_readable(index):
            return None, None, [], False
        columns = self._columns(index)
        at = bisect_left(columns.offsets, offset)
        if at >= len(columns.offsets) or columns.offsets[at] != offset:
            return None
        return (
            None if columns.keys is None else columns.keys[at],
            columns.values[at],
            [] if columns.headers is None else columns.headers[at] or [],
            header.is_large,
        )

    def _recut(self, index: int, runs: Runs) -> bytearray:
        header, columns = self._headers[index], self._columns(index)
        offsets = columns.offsets
        kept: list[int] = []
        for first, last, _ in runs:
            kept += range(bisect_left(offsets, first), bisect_right(offsets, last))
        return keep_records(header, columns, kept)


def _is_for_nobody(header: BatchHeader) -> bool:
    """Returns whether no consumer gets this batch: markers have no records, and chunks of a large
    value belong to the record that names them."""
    return header.is_control or header.is_chunk or header.record_count == 0


def _has_gaps(header: BatchHeader) -> bool:
    return header.record_count != header.last_offset_delta + 1


def _runs_of(offsets: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """Yields the index ranges `[begin, end)` of records with consecutive offsets, from `first`
    on."""
    begin = bisect_left(offsets, first)
    for index in range(begin + 1, len(offsets)):
        if offsets[index] != offsets[index - 1] + 1:
            yield begin, index
            begin = index
    if begin < len(offsets):
        yield begin, len(offsets)


def _records_in(runs: Runs, number: int, header: BatchHeader) -> tuple[int, int]:
    """Number of offsets of the runs from `number` on that are in a batch, and the last such run."""
    given, after = 0, number
    while number < len(runs) and runs[number][0] <= header.last_offset:
        first, last, _ = runs[number]
        given += min(last, header.last_offset) - max(first, header.base_offset) + 1
        after = number
        number += 1
    return given, after


class QueueReads:
    """See the module. It serves the queues of one partition, as long as that is led here."""

    def __init__(self, leader: Leader, clock: Clock) -> None:
        self._leader = leader
        self._clock = clock
        self._pieces: list[Piece] = []
        """Cached pieces, least recently used first."""

    async def piece(self, offset: int) -> Piece:
        """Returns batches from the one with `offset` on, all below the last stable offset; `offset`
        must be below it, too. Raises OffsetOutOfRangeError below the log start, NotLeaderError,
        StorageError, CorruptBatchError, and the errors of remote storage."""
        pieces = self._pieces
        for index in range(len(pieces) - 1, -1, -1):
            if pieces[index].first <= offset < pieces[index].next_offset:
                piece = pieces.pop(index)
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
        """Drops all pieces, as some of them are damaged."""
        self._pieces = []

    def drop_unused(self) -> None:
        """Drops pieces that were unused for a while; call it from time to time."""
        if self._pieces:
            before_s = self._clock.monotonic() - KEPT_S
            self._pieces = [piece for piece in self._pieces if piece.used_s > before_s]


class DataPartition(NamedTuple):
    """A partition that queues read, under one leader: what all its queues share."""

    partition: int
    replica_log: ReplicaLog
    leader: Leader
    reads: QueueReads
    peers: Peers
    clock_watch: ClockWatch
    """Wall clock for delays."""
    access: Access

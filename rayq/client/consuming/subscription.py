"""Partitions that a consumer reads, and its position in each. No network.

A `Stream` is one uninterrupted run of reading a partition. `seek`, `assign` and a reset replace it
by another; they never change it. So a fetch that was in flight before a seek fills a stream that
nobody looks at any longer, without a lock and without a flag.

Two threads meet here: the loop fills a stream, the consumer's thread empties it. Each attribute has
one writer, which its comment names; appends to and pops from the deque are atomic.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from rayq.errors import (
    BatchTooLargeError,
    CorruptBatchError,
    InvalidRequestError,
    LargeValueError,
    RayqError,
    UnreadableRecordError,
    UnsupportedBatchError,
    UnsupportedFormatError,
)
from rayq.messages import EARLIEST
from rayq.messages.transaction_ids import family_of, is_transactional
from rayq.records import Headers, TopicPartition
from rayq.storage.batch import (
    HEADER_BYTES,
    PLAIN_BODY_BYTES_MAX,
    BatchHeader,
    Columns,
    decode_columns,
    decoded_bytes,
    is_as_written,
)

HEADER_BYTES_MIN = 64
"""Minimum memory taken by a record's header."""

Start = int | None
"""Start of reading: an offset from 0; EARLIEST or LATEST; None: at the group's last commit, and
without a commit or a group as `auto_offset_reset` says."""

LargeValue = bytes | RayqError | None
"""A large value, or the error why it is unavailable; None: it has expired, and is skipped."""

Transactions = frozenset[tuple[int, int]]
"""`(family, epoch)` of each."""


class Fetched(NamedTuple):
    """One answer of the leader: whole batches, checked by header."""

    payload: memoryview
    batches: list[tuple[int, BatchHeader]]
    next_offset: int
    """The offset at which reading continues, even if compaction has emptied all the batches."""
    is_jump: bool = False
    """True if reading continues at `next_offset` even if the records before end elsewhere."""
    aborted: Transactions = frozenset()
    """The transactions whose batches are skipped."""
    large: Mapping[int, LargeValue] = MappingProxyType({})
    """The large values of these batches, by offset."""

    @property
    def size_bytes(self) -> int:
        """Size in memory."""
        large_bytes = sum(len(value) for value in self.large.values() if isinstance(value, bytes))
        return len(self.payload) + large_bytes


class Slice(NamedTuple):
    """Records of one batch, column by column."""

    topic: str
    partition: int
    offsets: range | list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None] | None
    values: list[bytes | None]
    headers: list[Headers | None] | None


class _Decoded:
    """A decoded batch, of which the records before `first` were returned."""

    __slots__ = ("columns", "first", "next_offset", "last_epoch", "next_epoch", "size_bytes")

    def __init__(
        self,
        columns: Columns,
        first: int,
        next_offset: int,
        last_epoch: int | None,
        size_bytes: int = 0,
    ) -> None:
        self.columns = columns
        self.first = first
        self.next_offset = next_offset
        """The position once the whole batch is returned."""
        self.last_epoch = last_epoch
        """The leader epoch of its records."""
        self.next_epoch = last_epoch
        """The leader epoch of the offset before `next_offset`; None: not known."""
        self.size_bytes = size_bytes
        """The size before compression."""


class Stream:
    """One run of reading a partition from `start`."""

    def __init__(
        self,
        partition: TopicPartition,
        start: Start,
        last_epoch: int | None = None,
        topic_id: str | None = None,
        end: int | None = None,
        without: Transactions | None = None,
        begin_otherwise: int | None = None,
        timestamp_max_ms: int | None = None,
    ) -> None:
        self.partition = partition
        self.topic_id = topic_id
        """The id of the topic that is read; None: the topic of that name that exists when reading
        begins, whose id is here from then on. Written by the loop."""
        self.start = start
        self.end = end
        """The offset from which on nothing is fetched or returned; None: reading never ends."""
        self.without = without
        """Transactions whose batches are skipped, whatever their outcome. With these, reading waits
        for no transaction: all others are decided below `end`. None: it waits as `isolation_level`
        says."""
        self.begin_otherwise = begin_otherwise
        """The start of a stream without a `start` if its group has committed nothing. None: as
        `auto_offset_reset` says."""
        self.timestamp_max_ms = timestamp_max_ms
        """The latest time that this reader can express; None: any."""
        self.task: asyncio.Task[None] | None = None
        # Written by the loop.
        self.begin_offset: int | None = start if start is not None and start >= 0 else None
        """The offset at which reading began; None until that is known."""
        self.fetch_offset: int | None = None
        """The offset of the next fetch; None until the start is known."""
        self.last_epoch = last_epoch
        """The leader epoch of the last batch fetched."""
        self.fetched: deque[Fetched] = deque()
        self.received_bytes = 0
        self.log_end: int | None = None
        """The end of the log for this reader, as of the last answer."""
        self.error: RayqError | None = None
        """The error that ended this stream, or keeps it until it is allowed to continue; raised
        once all fetched records are returned."""
        self.trouble: RayqError | None = None
        """The error of the last fetch, which is tried again; None since one succeeded."""
        # Written by the consumer's thread, once the loop has set `fetch_offset` the first time.
        self.position: int | None = start if start is not None and start >= 0 else None
        self.consumed_epoch = last_epoch
        self.consumed_bytes = 0
        self._decoded: deque[_Decoded] = deque()
        self._batch_index = 0

    @property
    def buffered_bytes(self) -> int:
        return self.received_bytes - self.consumed_bytes

    @property
    def has_records(self) -> bool:
        return bool(self._decoded or self.fetched)

    @property
    def is_fetched(self) -> bool:
        """True if everything that this stream reads has arrived."""
        return self.end is not None and (self.fetch_offset or 0) >= self.end

    @property
    def is_finished(self) -> bool:
        """True if everything that this stream reads was returned."""
        return self.end is not None and self.position is not None and self.position >= self.end

    @property
    def position_epoch(self) -> int | None:
        """The leader epoch of the record before `position`, as far as it is known."""
        if self._decoded and self._decoded[0].first > 0:
            return self._decoded[0].last_epoch
        return self.consumed_epoch

    def offset_known(self, offset: int, last_epoch: int | None = None) -> None:
        """Sets the offset at which reading begins; the record before it has the leader epoch
        `last_epoch`. Called by the loop before anything is fetched."""
        if last_epoch is not None:
            self.last_epoch = self.consumed_epoch = last_epoch
        self.begin_offset = offset
        self.fetch_offset = offset
        self.position = offset

    def received(self, fetched: Fetched, log_end: int) -> None:
        """Adds one answer of the leader. Called by the loop."""
        self.log_end = log_end
        self.trouble = self.error = None
        self.fetch_offset = fetched.next_offset
        if fetched.batches:
            self.last_epoch = fetched.batches[-1][1].leader_epoch
        self.received_bytes += fetched.size_bytes
        self.fetched.append(fetched)

    def jump(self, offset: int) -> None:
        """Continues at `offset`, because the next offset to fetch is not in the log. Records
        fetched before are still returned. Called by the loop."""
        self.fetch_offset = offset
        self.last_epoch = None
        self.fetched.append(Fetched(memoryview(b""), [], offset, is_jump=True))

    def peek(
        self,
        records_max: int,
        check_crc: bool,
        bytes_max: int = PLAIN_BODY_BYTES_MAX,
        below: int | None = None,
    ) -> list[tuple[_Decoded, Slice]]:
        """Returns up to `records_max` records, decoded but not consumed. It takes no more batches
        than reach `bytes_max` before compression, and only records `below` an offset. Raises
        CorruptBatchError, UnsupportedBatchError and BatchTooLargeError (a batch larger than
        `bytes_max`), for the first batch only: records before a bad batch are good."""
        found: list[tuple[_Decoded, Slice]] = []
        index = size_bytes = 0
        while records_max > 0 and size_bytes < bytes_max:
            if index == len(self._decoded):
                try:
                    if not self._decode_next(check_crc, bytes_max, below):
                        break
                except RayqError:
                    if found:
                        break
                    raise
                continue
            batch = self._decoded[index]
            index += 1
            part = self._slice(batch, records_max, below)
            if not part.values:  # the other records are not below that offset
                break
            records_max -= len(part.values)
            size_bytes += batch.size_bytes
            found.append((batch, part))
        return found

    def peek_batch(self, records_max: int, check_crc: bool) -> tuple[_Decoded, Slice] | None:
        """Does the same as `peek` for one batch; None when nothing has arrived."""
        if not self._decoded and not self._decode_next(check_crc, PLAIN_BODY_BYTES_MAX, None):
            return None
        batch = self._decoded[0]
        return batch, self._slice(batch, records_max, None)

    def has_passed(self, end: int) -> bool:
        """Returns whether every record below `end` was returned, as far as is known here: after a
        `peek` below it that found nothing, this sees records behind a gap."""
        if self._decoded:
            batch = self._decoded[0]
            return batch.columns.offsets[batch.first] >= end
        if self.position is None:
            return False
        if self.position > end:
            # A position that nobody has read from may be out of range: then it is reset.
            is_reset = bool(self.fetched) and self.fetched[0].is_jump
            return self.log_end is not None and not is_reset
        if self.position == end:
            return True
        upcoming = self.fetched[0].batches[self._batch_index :] if self.fetched else []
        return bool(upcoming) and upcoming[0][1].base_offset >= end

    def _slice(self, batch: _Decoded, records_max: int, below: int | None) -> Slice:
        topic, partition = self.partition
        columns, first = batch.columns, batch.first
        stop = first + records_max
        if below is not None and columns.offsets[-1] >= below:
            stop = min(stop, bisect_left(columns.offsets, below, first))
        if first == 0 and len(columns.values) <= stop:
            return Slice(topic, partition, *columns)
        keys, headers = columns.keys, columns.headers
        return Slice(
            topic=topic,
            partition=partition,
            offsets=columns.offsets[first:stop],
            timestamps_ms=columns.timestamps_ms[first:stop],
            keys=None if keys is None else keys[first:stop],
            values=columns.values[first:stop],
            headers=None if headers is None else headers[first:stop],
        )

    def skip_batch(self) -> None:
        """Skips the next batch, which could not be decoded."""
        assert not self._decoded, "what comes before it is handed out first"
        _, header = self.fetched[0].batches[self._batch_index]
        self._batch_index += 1
        self._skip_to(header.next_offset, header.leader_epoch)

    def _decode_next(self, check_crc: bool, bytes_max: int, below: int | None) -> bool:
        """Decodes one more batch, leaving out records before the position. Returns False if there
        is no further batch that begins `below` that offset."""
        while self.fetched:
            fetched = self.fetched[0]
            if self._batch_index == len(fetched.batches):
                self._batch_index = 0
                self.fetched.popleft()
                self.consumed_bytes += fetched.size_bytes
                if fetched.is_jump:
                    self._go_to(fetched.next_offset)
                else:
                    self._skip_to(fetched.next_offset, None)
                continue
            at, header = fetched.batches[self._batch_index]
            if below is not None and header.base_offset >= below:
                return False
            wanted = self._decoded[-1].next_offset if self._decoded else self.position
            assert wanted is not None, "records come after the start is known"
            is_past_end = self.end is not None and header.base_offset >= self.end
            is_shown = not is_past_end and self.is_shown(header, fetched.aborted)
            if is_shown and header.is_large:
                is_shown = fetched.large.get(header.base_offset, _UNREAD) is not None
            if header.next_offset > wanted and is_shown:
                size_bytes = self._size_of(fetched, at, header, bytes_max)
                self._check_times(header)
                try:
                    columns = decode_columns(fetched.payload, at, header, check_crc)
                    if header.is_large:
                        columns = _with_large(columns, header, fetched.large)
                        size_bytes += sum(map(len, filter(None, columns.values)))
                except LargeValueError:
                    raise
                except CorruptBatchError as error:
                    raise self._located(fetched, wanted, error) from error
                except UnsupportedFormatError as error:
                    offset = max(wanted, header.base_offset)
                    told = _unreadable(self.partition, offset, header.next_offset, error)
                    raise self._of_batch(UnsupportedBatchError, header, told) from error
                if self.end is not None and header.next_offset > self.end:
                    columns = _below(columns, self.end)
                if columns.headers is not None:
                    size_bytes += HEADER_BYTES_MIN * sum(map(len, filter(None, columns.headers)))
                first = bisect_left(columns.offsets, wanted)
                if first < len(columns.values):
                    self._decoded.append(
                        _Decoded(
                            columns=columns,
                            first=first,
                            next_offset=header.next_offset,
                            last_epoch=header.leader_epoch,
                            size_bytes=size_bytes,
                        )
                    )
                    self._batch_index += 1
                    return True
            self._batch_index += 1
            self._skip_to(header.next_offset, header.leader_epoch)
        return False

    def is_shown(self, header: BatchHeader, aborted: Transactions) -> bool:
        """Returns whether users may see the records of a batch. The transaction bit does not decide
        this: compaction clears it once the transaction is committed."""
        if header.is_control or header.is_chunk:
            return False
        if not aborted and not self.without:
            return True
        transaction = transaction_of(header)
        return transaction not in aborted and transaction not in (self.without or ())

    def _size_of(self, fetched: Fetched, at: int, header: BatchHeader, bytes_max: int) -> int:
        """The size of a batch before compression. Raises BatchTooLargeError. A size that no batch
        can have is left to `decode_columns`."""
        body = fetched.payload[at + HEADER_BYTES : at + header.length]
        size_bytes = decoded_bytes(body, header)
        if bytes_max < size_bytes <= PLAIN_BODY_BYTES_MAX:
            topic, partition = self.partition
            raise self._of_batch(
                BatchTooLargeError,
                header,
                f"The batch of offsets {header.base_offset} to {header.last_offset} of "
                f"{topic}-{partition} takes {size_bytes} bytes of memory before it is read, this "
                f"consumer unpacks {bytes_max}: raise fetch_buffer_bytes, or seek to "
                f"{header.next_offset} to continue without it.",
            )
        return size_bytes

    def _check_times(self, header: BatchHeader) -> None:
        """Checks that this reader can express the times of a batch. Raises
        UnreadableRecordError."""
        limit_ms, latest_ms = self.timestamp_max_ms, header.max_timestamp_ms
        if limit_ms is None or latest_ms <= limit_ms or header.has_append_time:
            return
        topic, partition = self.partition
        raise self._of_batch(
            UnreadableRecordError,
            header,
            f"A record of offsets {header.base_offset} to {header.last_offset} of "
            f"{topic}-{partition} is of {latest_ms} ms, and this reader's columns hold times up to "
            f"{limit_ms} ms. Continue at {header.next_offset} without them.",
        )

    def _of_batch(
        self, kind: type[UnreadableRecordError], header: BatchHeader, message: str
    ) -> UnreadableRecordError:
        """An error of a whole batch, as far as it is still to be read."""
        wanted = self._decoded[-1].next_offset if self._decoded else self.position
        error = kind(message)
        error.topic_partition = self.partition
        error.offset = max(wanted or 0, header.base_offset)
        error.next_offset = header.next_offset
        return error

    def _located(
        self, fetched: Fetched, wanted: int, error: CorruptBatchError
    ) -> CorruptBatchError:
        """The same error with the place of the batch, and the offset at which to continue."""
        at, header = fetched.batches[self._batch_index]
        crc_matches = is_as_written(fetched.payload, at, header)
        next_offset = header.next_offset
        if not crc_matches:
            # The CRC that does not match covers the end of the batch, so the end is taken from the
            # next batch.
            following = fetched.batches[self._batch_index + 1 :]
            next_offset = following[0][1].base_offset if following else fetched.next_offset
        offset = max(wanted, header.base_offset)
        next_offset = max(next_offset, offset + 1)
        located = CorruptBatchError(_unreadable(self.partition, offset, next_offset, error))
        located.topic_partition = self.partition
        located.offset, located.next_offset = offset, next_offset
        located.crc_matches = crc_matches
        return located

    def _skip_to(self, offset: int, epoch: int | None) -> None:
        """Moves to `offset`: there are no records below it beyond the decoded ones. The epoch of
        the offset before is kept along, if known: a position under an epoch that ended before it
        would look as if the log had been truncated."""
        if self._decoded:
            last = self._decoded[-1]
            if offset > last.next_offset:
                last.next_offset, last.next_epoch = offset, epoch
        elif self.position is not None and offset > self.position:
            self.position, self.consumed_epoch = offset, epoch

    def _go_to(self, offset: int) -> None:
        """Continues at `offset` after the decoded records, ahead or back."""
        if self._decoded:
            last = self._decoded[-1]
            last.next_offset, last.next_epoch = offset, None
        else:
            self.position, self.consumed_epoch = offset, None

    def consume(self, batch: _Decoded, count: int) -> None:
        """Consumes the next `count` records of `batch`, the first one decoded."""
        assert batch is self._decoded[0]
        batch.first += count
        if batch.first == len(batch.columns.values):
            self._decoded.popleft()
            self.position = batch.next_offset
            self.consumed_epoch = batch.next_epoch
        else:
            self.position = batch.columns.offsets[batch.first]

    def give_back(self, columns: Columns) -> None:
        """Puts returned records back in front."""
        assert self.position is not None
        self._decoded.appendleft(_Decoded(columns, 0, self.position, self.consumed_epoch))
        self.position = columns.offsets[0]


def _unreadable(
    place: TopicPartition, offset: int, next_offset: int, error: RayqError
) -> str:
    return (
        f"Offsets {offset} to {next_offset - 1} of {place.topic}-{place.partition} cannot be read: "
        f"{error.message} Seek to {next_offset} to continue without them, or consume with "
        "on_corrupt='skip'."
    )


_UNREAD = CorruptBatchError("It stands for a large value, and cannot be read.")
"""The stand-in for a large value whose manifest arrived with a wrong CRC."""


def _with_large(
    columns: Columns, header: BatchHeader, large: Mapping[int, LargeValue]
) -> Columns:
    """The records with the values that they stand for. Raises the error of such a value."""
    if not columns.values:  # Compaction or an abort removed the record.
        return columns
    if len(columns.values) > 1:
        raise CorruptBatchError(
            f"The batch at offset {header.base_offset} stands for a large value, and has "
            f"{len(columns.values)} records."
        )
    found = large.get(header.base_offset, _UNREAD)
    if isinstance(found, RayqError):
        raise found.with_message(found.message) from found.__cause__
    return columns._replace(values=[found])


def transaction_of(header: BatchHeader) -> tuple[int, int] | None:
    """The `(family, epoch)` of a batch, None for a batch without a transaction."""
    if header.producer_id is None or not is_transactional(header.producer_id):
        return None
    return family_of(header.producer_id), header.producer_epoch


def _below(columns: Columns, end: int) -> Columns:
    """The records whose offset is below `end`."""
    stop = bisect_left(columns.offsets, end)
    keys, headers = columns.keys, columns.headers
    return Columns(
        columns.offsets[:stop],
        columns.timestamps_ms[:stop],
        None if keys is None else keys[:stop],
        columns.values[:stop],
        None if headers is None else headers[:stop],
    )


class AssignedPartition:
    """A partition that the consumer reads, its current stream, and whether it is paused."""

    __slots__ = ("partition", "stream", "is_paused")

    def __init__(self, stream: Stream) -> None:
        self.partition = stream.partition
        self.stream = stream
        self.is_paused = False


class Subscription:
    """The partitions that are read: those of `topics`, or those assigned by hand. Used by the
    consumer's thread; the loop only checks whether a stream is still current."""

    def __init__(self) -> None:
        self.topics: tuple[str, ...] | None = None
        self.assigned: dict[TopicPartition, AssignedPartition] = {}
        """Replaced, never changed, so that other threads see one assignment or the next."""
        self._rotation = 0

    def replace(
        self,
        partitions: Iterable[TopicPartition],
        start: Start,
        topic_ids: Mapping[TopicPartition, str] | None = None,
    ) -> list[Stream]:
        """Replaces the assignment; partitions that stay keep their stream. Returns the new
        streams."""
        known_ids = topic_ids or {}
        kept = self.assigned
        fresh: list[Stream] = []
        assigned: dict[TopicPartition, AssignedPartition] = {}
        for partition in partitions:
            if partition in kept:
                assigned[partition] = kept[partition]
            else:
                stream = Stream(partition, start, topic_id=known_ids.get(partition))
                fresh.append(stream)
                assigned[partition] = AssignedPartition(stream)
        self.assigned = assigned
        return fresh

    def forget(self, partition: TopicPartition) -> None:
        """Reads a partition no more."""
        self.assigned = {
            place: assigned for place, assigned in self.assigned.items() if place != partition
        }

    def get(self, partition: TopicPartition) -> AssignedPartition:
        """The state of an assigned partition. Raises InvalidRequestError for one that is not
        assigned."""
        found = self.assigned.get(partition)
        if found is None:
            raise InvalidRequestError(
                f"{tuple(partition)!r} is not assigned to this consumer: assign or subscribe first."
            )
        return found

    def restart(self, partition: TopicPartition, stream: Stream) -> None:
        """Continues reading with another stream."""
        self.get(partition).stream = stream

    def is_current(self, stream: Stream) -> bool:
        assigned = self.assigned.get(stream.partition)
        return assigned is not None and assigned.stream is stream

    def is_paused(self, stream: Stream) -> bool:
        assigned = self.assigned.get(stream.partition)
        return assigned is None or assigned.is_paused

    def in_turn(self) -> list[AssignedPartition]:
        """All partitions that are not paused, starting with another one each time."""
        reading = [assigned for assigned in self.assigned.values() if not assigned.is_paused]
        if not reading:
            return reading
        self._rotation = (self._rotation + 1) % len(reading)
        return reading[self._rotation :] + reading[: self._rotation]


START_OF_NEW_PARTITIONS = EARLIEST
"""Start of a partition that was added to a subscribed topic: it is read from its beginning,
whatever `auto_offset_reset` says, because its records came after the subscription."""

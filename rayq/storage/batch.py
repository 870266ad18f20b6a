"""The record batch: the unit that is produced, stored, replicated, fetched and checked.

The same bytes stand on disk, on the wire and on every replica; only producers and consumers look
into the body. Little endian::

    base_offset u64 | length u32 | leader_epoch u32 | magic u8 | append_time_ms i64
    header_crc u32        crc32c of all before it: the leader stamps the fields above, and this
    body_crc u32          crc32c of all after it: never changes on the way
    attributes u16 | record_count u32 | last_offset_delta u32
    first_timestamp_ms i64 | max_timestamp_ms i64
    producer_id i64 (-1: none) | producer_epoch u16 | base_sequence i32 (-1: none)
    body

`length` counts the whole batch, header included. Attributes: bits 0-2 compression (0 none, 1 lz4),
bit 3 records carry the append time, bit 4 transactional, bit 5 control, bit 6 some record has no
key. Producers set neither 4 nor 5.

The body is a msgpack array of columns, compressed as one lz4 block (with its plain size in front)
only when that is smaller::

    [offset_deltas | nil, timestamp_deltas | nil, keys | nil, values, headers | nil]

`nil` stands for the usual case: offsets without gaps, one timestamp for all, no keys, no headers.
Compaction takes records out of a batch and leaves the others at their offsets; its first and last
offset stay, also when no record does.

A torn write is noticed by one of the two CRCs; what follows a bad batch has no meaning.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import google_crc32c
import lz4.block
import msgspec

from rayq.environment import Buffer
from rayq.errors import (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from rayq.records import Headers

_HEADER = struct.Struct("<QIIBqIIHIIqqqHi")
_STAMP = struct.Struct("<QIIBq")
_CRC = struct.Struct("<I")
_ATTRIBUTES = struct.Struct("<H")
_PLAIN_SIZE = struct.Struct("<I")
_BODY_CRC_POSITION = _STAMP.size + _CRC.size
_PRODUCER_ID, _BASE_SEQUENCE = 12, 14
"""Places among the header's fields of those that may be absent."""
_COVERED = _BODY_CRC_POSITION + _CRC.size
"""Where the bytes begin that the body CRC covers."""

HEADER_BYTES = _HEADER.size
MAGIC = 1
BATCH_BYTES_MAX = 64 * 1024 * 1024
"""The largest batch, header included: the ceiling of `max_message_bytes`."""
PLAIN_BODY_BYTES_MAX = BATCH_BYTES_MAX
"""The largest body after decompression; checked before anything is decompressed."""
RECORD_BYTES_MIN = 24
"""A record counts for so much at least wherever the size of a batch is limited: that is what an
empty one costs its reader. So the limits on bytes bound the number of records, too."""
BATCH_RECORDS_MAX = PLAIN_BODY_BYTES_MAX // RECORD_BYTES_MIN
"""The most records of a batch."""
HEADERS_BYTES_MAX = 4 * 1024 * 1024
"""The largest column of headers before compression. Nothing grows as much when it is decoded: 16
times where names and values are empty."""
OFFSET_MAX = 2**62
"""Offsets stay below, so that they and their ends fit signed 64 bits everywhere."""
SEQUENCE_COUNT = 2**31
"""Sequences of a producer run from 0 to this, exclusive, and wrap."""
_LZ4_RATIO_MAX = 256
"""No lz4 block grows by more than about 255 when it is decompressed."""

_COMPRESSION_MASK = 0b111
_LZ4 = 1
_APPEND_TIME = 1 << 3
_TRANSACTIONAL = 1 << 4
_CONTROL = 1 << 5
_NULL_KEYS = 1 << 6
_KNOWN_ATTRIBUTES = _LZ4 | _APPEND_TIME | _TRANSACTIONAL | _CONTROL | _NULL_KEYS
_SERVER_ATTRIBUTES = _TRANSACTIONAL | _CONTROL
"""Not for producers to set: readers pass over control batches."""

_encoder = msgspec.msgpack.Encoder()
_Body = tuple[
    list[int] | None,
    list[int] | None,
    list[bytes | None] | None,
    list[bytes | None],
    list[list[tuple[str, bytes]] | None] | None,
]
_decoder = msgspec.msgpack.Decoder(_Body)
_raw_decoder = msgspec.msgpack.Decoder(
    tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw, msgspec.Raw, msgspec.Raw]
)
"""Finds where the columns begin and end, and builds nothing of what is in them."""


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The header of one batch, as `read_header` or `stamp` found it.

    `producer_id` and `base_sequence` are None for a batch of a producer without idempotence.
    """

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    append_time_ms: int
    header_crc: int
    body_crc: int
    attributes: int
    record_count: int
    last_offset_delta: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int | None
    producer_epoch: int
    base_sequence: int | None

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int | None:
        if self.base_sequence is None:
            return None
        return (self.base_sequence + self.last_offset_delta) % SEQUENCE_COUNT

    @property
    def is_compressed(self) -> bool:
        return self.attributes & _COMPRESSION_MASK != 0

    @property
    def has_append_time(self) -> bool:
        """Whether its records carry the time of the append instead of the producer's."""
        return self.attributes & _APPEND_TIME != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & _CONTROL != 0

    @property
    def has_null_keys(self) -> bool:
        """Whether some record has no key: compacted topics refuse such a batch."""
        return self.attributes & _NULL_KEYS != 0

    @property
    def newest_timestamp_ms(self) -> int:
        """The greatest timestamp that a reader sees in this batch, -1 when it has no records."""
        if self.record_count == 0:
            return -1
        return self.append_time_ms if self.has_append_time else self.max_timestamp_ms


class Columns(NamedTuple):
    """The records of a batch, column by column; `keys` or `headers` is None when no record has any.
    Offsets and timestamps are absolute."""

    offsets: range | list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None] | None
    values: list[bytes | None]
    headers: list[Headers | None] | None


def encode_batch(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
    timestamps_ms: int | Sequence[int] = 0,
    *,
    compression: Literal["lz4", "none"] = "lz4",
    producer_id: int | None = None,
    producer_epoch: int = 0,
    base_sequence: int | None = None,
    append_time: bool = False,
) -> bytearray:
    """One batch of at least one record, offsets from 0, to be stamped by the leader.

    The caller has checked that keys and values are bytes or None, header names str, timestamps not
    negative. `timestamps_ms` is one time for all records or one for each. `append_time` makes
    readers see the leader's append time instead. Raises `RecordTooLargeError` above 64 MiB.
    """
    count = len(values)
    assert count > 0
    assert keys is None or len(keys) == count
    assert headers is None or len(headers) == count
    attributes = _APPEND_TIME if append_time else 0
    # Whether all keys are true is asked at C speed; only an empty or missing one needs a look.
    if keys is None or (not all(keys) and any(key is None for key in keys)):
        attributes |= _NULL_KEYS
        if keys is not None and keys[0] is None and all(key is None for key in keys):
            keys = None
    if headers is not None and not any(headers):
        headers = None
    first, newest, deltas = _time_column(timestamps_ms, count)
    return _pack(
        (None, deltas, keys, values, headers),
        is_compressed=compression == "lz4",
        stamped=(0, 0, 0),
        attributes=attributes,
        count=count,
        last_offset_delta=count - 1,
        times=(first, newest),
        producer=(producer_id, producer_epoch, base_sequence),
    )


def keep_records(header: BatchHeader, columns: Columns, kept: Sequence[int]) -> bytearray:
    """The batch with only the records at the places `kept` (ascending, perhaps none), as compaction
    leaves it: offsets, stamp, producer and sequences as they were.

    Raises `RecordTooLargeError` where the column of offsets makes the largest batch too large.
    """
    keys, headers = columns.keys, columns.headers
    timestamps_ms = [columns.timestamps_ms[place] for place in kept]
    first, newest, deltas = _time_column(timestamps_ms, len(kept))
    if header.has_append_time or not kept:
        # Readers see the append time, or nothing: the producer's times need not be known.
        first, newest, deltas = header.first_timestamp_ms, header.first_timestamp_ms, None
    offset_deltas = [columns.offsets[place] - header.base_offset for place in kept]
    return _pack(
        (
            offset_deltas,
            deltas,
            None if keys is None else [keys[place] for place in kept],
            [columns.values[place] for place in kept],
            None if headers is None else [headers[place] for place in kept],
        ),
        is_compressed=header.is_compressed,
        stamped=(header.base_offset, header.leader_epoch, header.append_time_ms),
        attributes=header.attributes & ~_COMPRESSION_MASK,
        count=len(kept),
        last_offset_delta=header.last_offset_delta,
        times=(first, newest),
        producer=(header.producer_id, header.producer_epoch, header.base_sequence),
    )


def _time_column(
    timestamps_ms: int | Sequence[int], count: int
) -> tuple[int, int, list[int] | None]:
    """First and greatest timestamp, and the column: None when all are the same."""
    if isinstance(timestamps_ms, int):
        return timestamps_ms, timestamps_ms, None
    assert len(timestamps_ms) == count
    if not timestamps_ms:
        return 0, 0, None
    first, newest = timestamps_ms[0], max(timestamps_ms)
    if newest == first and min(timestamps_ms) == first:
        return first, newest, None
    return first, newest, [timestamp - first for timestamp in timestamps_ms]


def _pack(
    columns: tuple[object, ...],
    *,
    is_compressed: bool,
    stamped: tuple[int, int, int],
    attributes: int,
    count: int,
    last_offset_delta: int,
    times: tuple[int, int],
    producer: tuple[int | None, int, int | None],
) -> bytearray:
    """The bytes of a batch with these columns; `stamped` is (base offset, epoch, append time)."""
    body = _encoder.encode(columns)
    if len(body) > PLAIN_BODY_BYTES_MAX:
        raise _too_large(len(body))
    if is_compressed:
        packed = lz4.block.compress(body, store_size=True)
        if len(packed) < len(body):
            body = packed
            attributes |= _LZ4
    length = HEADER_BYTES + len(body)
    if length > BATCH_BYTES_MAX:
        raise _too_large(length)
    base_offset, leader_epoch, append_time_ms = stamped
    producer_id, producer_epoch, base_sequence = producer
    batch = bytearray(HEADER_BYTES)
    _HEADER.pack_into(
        batch,
        0,
        *(base_offset, length, leader_epoch, MAGIC, append_time_ms, 0, 0),
        attributes,
        count,
        last_offset_delta,
        *times,
        -1 if producer_id is None else producer_id,
        producer_epoch,
        -1 if base_sequence is None else base_sequence,
    )
    body_crc = google_crc32c.extend(google_crc32c.value(bytes(batch[_COVERED:])), body)
    _CRC.pack_into(batch, _BODY_CRC_POSITION, body_crc)
    _CRC.pack_into(batch, _STAMP.size, google_crc32c.value(bytes(batch[: _STAMP.size])))
    batch += body
    return batch


def stand_in(base_offset: int, next_offset: int, leader_epoch: int) -> bytes:
    """A batch without a body in place of those of these offsets that cannot be read any more. Its
    body CRC is wrong on purpose: whoever reads it learns which offsets are damaged."""
    fields = (0, 1, next_offset - base_offset - 1, 0, 0, -1, 0, -1)
    batch = bytearray(HEADER_BYTES)
    _HEADER.pack_into(batch, 0, base_offset, HEADER_BYTES, leader_epoch, MAGIC, 0, 0, 0, *fields)
    body_crc = google_crc32c.value(bytes(batch[_COVERED:])) ^ 0xFFFFFFFF
    _CRC.pack_into(batch, _BODY_CRC_POSITION, body_crc)
    _CRC.pack_into(batch, _STAMP.size, google_crc32c.value(bytes(batch[: _STAMP.size])))
    return bytes(batch)


def _too_large(size_bytes: int) -> RecordTooLargeError:
    return RecordTooLargeError(
        f"A record batch of {size_bytes} bytes is larger than any partition takes "
        f"({BATCH_BYTES_MAX} bytes, {PLAIN_BODY_BYTES_MAX} before compression): send "
        "smaller records."
    )


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`, its own CRC and length checked; the body may be missing or bad.

    Raises `CorruptBatchError`, or `UnsupportedFormatError` when an intact header has another magic.
    """
    if len(buffer) - position < HEADER_BYTES:
        raise CorruptBatchError(
            f"{len(buffer) - position} bytes at {position} are too few for a batch header."
        )
    fields = list(_HEADER.unpack_from(buffer, position))
    covered = bytes(buffer[position : position + _STAMP.size])
    if google_crc32c.value(covered) != fields[5]:
        raise CorruptBatchError(f"The batch header at {position} does not match its CRC.")
    base_offset, length, magic = fields[0], fields[1], fields[3]
    if magic != MAGIC:
        raise UnsupportedFormatError(
            f"The batch at {position} has format {magic}; this rayq reads {MAGIC}: use a matching "
            "rayq."
        )
    if not HEADER_BYTES <= length <= BATCH_BYTES_MAX or base_offset >= OFFSET_MAX:
        raise CorruptBatchError(
            f"The batch header at {position} cannot be: length {length}, base offset {base_offset}."
        )
    for optional in (_PRODUCER_ID, _BASE_SEQUENCE):
        if fields[optional] < 0:
            fields[optional] = None
    return BatchHeader(*fields)


def append_time_of(buffer: Buffer) -> int:
    """When the first batch of a buffer, one that was checked before, was appended; ms."""
    append_time_ms: int = _STAMP.unpack_from(buffer)[4]
    return append_time_ms


def check_body(buffer: Buffer, position: int, header: BatchHeader) -> None:
    """Checks everything that `read_header` left open except the columns inside the body.

    Raises `CorruptBatchError`.
    """
    end = position + header.length
    if len(buffer) < end:
        raise CorruptBatchError(
            f"The batch at {position} (offset {header.base_offset}) has {header.length} bytes, of "
            f"which {len(buffer) - position} are there."
        )
    if google_crc32c.value(bytes(buffer[position + _COVERED : end])) != header.body_crc:
        raise CorruptBatchError(
            f"The batch at {position} (offset {header.base_offset}) does not match its CRC."
        )
    if header.record_count > header.last_offset_delta + 1:
        raise CorruptBatchError(
            f"The batch at {position} (offset {header.base_offset}) claims {header.record_count} "
            f"records on {header.last_offset_delta + 1} offsets."
        )
    if not 0 <= header.first_timestamp_ms <= header.max_timestamp_ms < OFFSET_MAX:
        raise CorruptBatchError(
            f"The batch at {position} (offset {header.base_offset}) has impossible timestamps: "
            f"first {header.first_timestamp_ms}, greatest {header.max_timestamp_ms}."
        )


def check_produced(header: BatchHeader) -> None:
    """What a leader asks of a header beyond intact bytes: records on offsets without gaps, and only
    attributes that are for producers to set, and that this version's readers know.

    Raises `InvalidRecordError` or `UnsupportedFormatError`.
    """
    if header.record_count == 0 or header.last_offset_delta != header.record_count - 1:
        raise InvalidRecordError(
            f"A produced batch needs one offset for each record; this one has "
            f"{header.last_offset_delta + 1} for {header.record_count}. Nothing was written."
        )
    if header.attributes & _SERVER_ATTRIBUTES:
        raise InvalidRecordError(
            f"A produced batch has attributes {header.attributes:#x}; {_SERVER_ATTRIBUTES:#x} "
            "(control, transactional) are not for producers to set. Nothing was written."
        )
    _check_attributes(header)


def check_records(
    buffer: Buffer, position: int, header: BatchHeader, *, plain_bytes_max: int
) -> None:
    """What a leader asks of the body of a produced batch, whose CRC and header were checked: that
    every reader can decode it, and that it is no larger than `plain_bytes_max` before compression.

    It decodes the body by the decoder that readers use, and drops the result, so what is accepted
    can be read: see docs/wire.md for what that costs. Raises `InvalidRecordError`,
    `RecordTooLargeError`.
    """
    body = memoryview(buffer)[position + HEADER_BYTES : position + header.length]
    check_size(body, header, plain_bytes_max)
    try:
        offset_deltas, timestamp_deltas, keys, _, _ = _unpack(body, header)
        _offsets(header, offset_deltas)
        if timestamp_deltas is not None:
            _check_times(header, timestamp_deltas)
    except CorruptBatchError as error:
        raise InvalidRecordError(
            f"The bytes of the batch arrived as they were sent, but no reader could read them, so "
            f"nothing was written: {error}"
        ) from error
    if not header.has_null_keys and (keys is None or (not all(keys) and None in keys)):
        raise InvalidRecordError(
            "A record of the batch has no key, and the batch's attributes do not say so (bit 6). "
            "Nothing was written."
        )


def check_size(body: Buffer, header: BatchHeader, plain_bytes_max: int) -> None:
    """Whether a body may be decompressed and decoded, by what it claims.

    Raises `RecordTooLargeError`.
    """
    size_bytes = decoded_bytes(body, header)
    if size_bytes > plain_bytes_max:
        raise RecordTooLargeError(
            f"A batch of {header.record_count} records counts {size_bytes} bytes before "
            f"compression, at least {RECORD_BYTES_MIN} for each record; the limit is "
            f"{plain_bytes_max}."
        )


def decoded_bytes(body: Buffer, header: BatchHeader) -> int:
    """How large the batch is before compression, by what it claims; a record counts for
    `RECORD_BYTES_MIN` at least."""
    plain_bytes = len(body)
    if header.is_compressed and plain_bytes >= _PLAIN_SIZE.size:
        (plain_bytes,) = _PLAIN_SIZE.unpack_from(body)
    return max(plain_bytes, header.record_count * RECORD_BYTES_MIN)


def _check_attributes(header: BatchHeader) -> None:
    if header.attributes & ~_KNOWN_ATTRIBUTES:
        raise UnsupportedFormatError(
            f"The batch at offset {header.base_offset} has attributes {header.attributes:#x}, of "
            f"which this rayq knows {_KNOWN_ATTRIBUTES:#x}: a newer rayq wrote it."
        )


def stamp(
    buffer: bytearray | memoryview,
    position: int,
    *,
    base_offset: int,
    leader_epoch: int,
    append_time_ms: int,
    timestamp_from_append: bool = False,
) -> BatchHeader:
    """Writes the leader's fields into the checked batch at `position`, in place.

    The body stays as it is, and unread, except that `timestamp_from_append` marks a batch whose
    producer had not marked it, which costs a new body CRC.
    """
    (length,) = _CRC.unpack_from(buffer, position + 8)
    _STAMP.pack_into(buffer, position, base_offset, length, leader_epoch, MAGIC, append_time_ms)
    covered = bytes(buffer[position : position + _STAMP.size])
    _CRC.pack_into(buffer, position + _STAMP.size, google_crc32c.value(covered))
    if timestamp_from_append:
        (attributes,) = _ATTRIBUTES.unpack_from(buffer, position + _COVERED)
        if not attributes & _APPEND_TIME:
            _ATTRIBUTES.pack_into(buffer, position + _COVERED, attributes | _APPEND_TIME)
            body = bytes(buffer[position + _COVERED : position + length])
            _CRC.pack_into(buffer, position + _BODY_CRC_POSITION, google_crc32c.value(body))
    return read_header(buffer, position)


def decode_columns(
    buffer: Buffer, position: int, header: BatchHeader, check_crc: bool = True
) -> Columns:
    """The records of the batch at `position`, whose header was read with `read_header`.

    Raises `CorruptBatchError`, or `UnsupportedFormatError` for attributes of a newer rayq, whatever
    the bytes are. `check_crc=False` leaves out the body CRC only.
    """
    if check_crc:
        check_body(buffer, position, header)
    _check_attributes(header)
    end = position + header.length
    body = memoryview(buffer)[position + HEADER_BYTES : end]
    if len(body) != header.length - HEADER_BYTES:
        raise CorruptBatchError(
            f"The batch at offset {header.base_offset} is cut off: {len(body)} bytes of its body."
        )
    if header.record_count > BATCH_RECORDS_MAX:
        raise CorruptBatchError(
            f"The batch at offset {header.base_offset} claims {header.record_count} records; no "
            f"batch has more than {BATCH_RECORDS_MAX}."
        )
    offset_deltas, timestamp_deltas, keys, values, headers = _unpack(body, header)
    return Columns(
        _offsets(header, offset_deltas),
        _timestamps(header, timestamp_deltas),
        keys,
        values,
        headers,
    )


def _unpack(body: memoryview, header: BatchHeader) -> _Body:
    """The columns as they are stored, each of the right types and with an item for each record.

    Raises `CorruptBatchError`.
    """
    try:
        plain = _decompress(body, header) if header.is_compressed else body
        if len(plain) > HEADERS_BYTES_MAX:
            _check_columns(plain, header)
        columns: _Body = _decoder.decode(plain)
    except (msgspec.DecodeError, MemoryError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptBatchError(
            f"The body of the batch at offset {header.base_offset} is not a batch body: {error}"
        ) from error
    count = header.record_count
    for column in columns:
        if column is not None and len(column) != count:
            raise CorruptBatchError(
                f"The batch at offset {header.base_offset} has {count} records and a column of "
                f"{len(column)}."
            )
    return columns


def _check_columns(plain: Buffer, header: BatchHeader) -> None:
    """Looks how large the columns of a large body are, before anything is built of them."""
    columns = [memoryview(raw) for raw in _raw_decoder.decode(plain)]
    count = header.record_count
    if any(_array_length(column) not in (None, count) for column in columns):
        raise CorruptBatchError(
            f"The batch at offset {header.base_offset} has {count} records and a column of other "
            "length."
        )
    if len(columns[-1]) > HEADERS_BYTES_MAX:
        raise CorruptBatchError(
            f"The batch at offset {header.base_offset} has {len(columns[-1])} bytes of headers; no "
            f"batch has more than {HEADERS_BYTES_MAX}."
        )


def _array_length(column: memoryview) -> int | None:
    """Of a msgpack array, None of anything else: the decoder refuses what is wrong then."""
    kind = column[0]
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    if kind in (0xDC, 0xDD):
        return int.from_bytes(column[1 : 3 if kind == 0xDC else 5], "big")
    return None


def _decompress(body: memoryview, header: BatchHeader) -> bytes:
    if len(body) < _PLAIN_SIZE.size:
        raise CorruptBatchError(f"The batch at offset {header.base_offset} has no body.")
    (plain_bytes,) = _PLAIN_SIZE.unpack_from(body)
    if plain_bytes > min(PLAIN_BODY_BYTES_MAX, _LZ4_RATIO_MAX * len(body)):
        raise CorruptBatchError(
            f"The body of the batch at offset {header.base_offset} claims {plain_bytes} bytes "
            f"before compression, out of {len(body)}."
        )
    try:
        plain: bytes = lz4.block.decompress(body)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise CorruptBatchError(
            f"The body of the batch at offset {header.base_offset} does not decompress: {error}"
        ) from error
    return plain


def _offsets(header: BatchHeader, deltas: list[int] | None) -> range | list[int]:
    base = header.base_offset
    if deltas is None:
        if header.last_offset_delta != header.record_count - 1:
            raise CorruptBatchError(
                f"The batch at offset {base} has gaps but no column that says where."
            )
        return range(base, base + header.record_count)
    previous = -1
    for delta in deltas:
        if not previous < delta <= header.last_offset_delta:
            raise CorruptBatchError(f"The offsets in the batch at offset {base} do not ascend.")
        previous = delta
    return [base + delta for delta in deltas]


def _timestamps(header: BatchHeader, deltas: list[int] | None) -> list[int]:
    if header.has_append_time:
        return [header.append_time_ms] * header.record_count
    first = header.first_timestamp_ms
    if deltas is None:
        return [first] * header.record_count
    _check_times(header, deltas)
    return [first + delta for delta in deltas]


def _check_times(header: BatchHeader, deltas: list[int]) -> None:
    first = header.first_timestamp_ms
    if deltas and not -first <= min(deltas) <= max(deltas) <= header.max_timestamp_ms - first:
        raise CorruptBatchError(
            f"The batch at offset {header.base_offset} has timestamps outside those of its header."
        )


def split_batches(buffer: Buffer) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of each batch in a buffer of whole batches; bodies are not checked.

    Raises `CorruptBatchError` (also for a partial batch at the end) or `UnsupportedFormatError`.
    """
    position = 0
    while position < len(buffer):
        header = read_header(buffer, position)
        if position + header.length > len(buffer):
            raise CorruptBatchError(
                f"The batch at {position} (offset {header.base_offset}) has {header.length} bytes, "
                f"of which {len(buffer) - position} are there."
            )
        yield position, header
        position += header.length

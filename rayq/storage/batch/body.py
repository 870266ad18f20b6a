"""The body of a record batch: its records, column by column, encoded, decoded and checked."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import lz4.block
import msgspec

from rayq.environment import Buffer
from rayq.errors import CorruptBatchError, InvalidRecordError, RecordTooLargeError
from rayq.records import Headers
from rayq.storage.batch.due import any_is_due_later
from rayq.storage.batch.header import (
    APPEND_TIME,
    BATCH_BYTES_MAX,
    CHUNK,
    COMPRESSION_MASK,
    DEAD_LETTER,
    DELAYED,
    HEADER_BYTES,
    LARGE,
    LZ4,
    NULL_KEYS,
    TRANSACTIONAL,
    BatchHeader,
    assemble,
    check_attributes,
    check_body,
)

PLAIN_BODY_BYTES_MAX = BATCH_BYTES_MAX
"""The largest body after decompression. It is checked before anything is decompressed."""
RECORD_BYTES_MIN = 24
"""Wherever the size of a batch is limited, each record counts for at least this much: so much
memory an empty record costs its reader. So the limits on bytes also limit the number of records."""
BATCH_RECORDS_MAX = PLAIN_BODY_BYTES_MAX // RECORD_BYTES_MIN
HEADERS_BYTES_MAX = 4 * 1024 * 1024
"""The largest column of headers before compression. Headers grow most of all columns when they are
decoded: 16 times where names and values are empty."""
_PLAIN_SIZE = struct.Struct("<I")
_LZ4_RATIO_MAX = 256
"""No lz4 block grows by more than about 255 when it is decompressed."""

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
"""Finds where the columns begin and end, without building their items."""


class Columns(NamedTuple):
    """The records of a batch, column by column. `keys` or `headers` is None when no record has any.
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
    is_transactional: bool = False,
    is_large: bool = False,
    is_chunk: bool = False,
    is_dead_letter: bool = False,
) -> bytearray:
    """One batch of at least one record, with offsets from 0. The leader stamps it.

    The caller has checked that keys and values are bytes or None, header names str, timestamps not
    negative. `timestamps_ms` is one time for all records, or one time for each record.
    `append_time` makes readers see the leader's append time instead. `is_transactional` goes with
    the producer ids of transactions. A record with the header `rayq.due` makes the batch DELAYED.
    `is_large` and `is_chunk` are what the header's attributes of these names say, of one record;
    `is_dead_letter` is for queue leaders. Raises `RecordTooLargeError` above 64 MiB.
    """
    count = len(values)
    assert count > 0
    assert keys is None or len(keys) == count
    assert headers is None or len(headers) == count
    assert count == 1 or not (is_large or is_chunk)
    attributes = (APPEND_TIME if append_time else 0) | (TRANSACTIONAL if is_transactional else 0)
    # `all` runs at the speed of C. Only an empty or a missing key needs a closer look.
    if keys is None or (not all(keys) and any(key is None for key in keys)):
        attributes |= NULL_KEYS
        if keys is not None and keys[0] is None and all(key is None for key in keys):
            keys = None
    if headers is not None and not any(headers):
        headers = None
    if headers is not None and any_is_due_later(headers):
        attributes |= DELAYED
    attributes |= (LARGE if is_large else 0) | (CHUNK if is_chunk else 0)
    attributes |= DEAD_LETTER if is_dead_letter else 0
    first, newest, deltas = _time_column(timestamps_ms, count)
    body, compressed = _encode_body(
        (None, deltas, keys, values, headers), is_compressed=compression == "lz4"
    )
    header = BatchHeader(
        base_offset=0,
        length=HEADER_BYTES + len(body),
        leader_epoch=0,
        attributes=attributes | compressed,
        record_count=count,
        last_offset_delta=count - 1,
        first_timestamp_ms=first,
        max_timestamp_ms=newest,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    return assemble(header, body)


def keep_records(header: BatchHeader, columns: Columns, kept: Sequence[int]) -> bytearray:
    """The batch with only the records at the places `kept` (ascending, perhaps none), as compaction
    leaves it. Offsets, stamp, producer and sequences stay as they were.

    Raises `RecordTooLargeError` where the column of offsets makes a large batch too large.
    """
    keys, headers = columns.keys, columns.headers
    timestamps_ms = [columns.timestamps_ms[place] for place in kept]
    first, newest, deltas = _time_column(timestamps_ms, len(kept))
    if header.has_append_time or not kept:
        # Readers see the append time, or no record: the producer's times are not needed.
        first, newest, deltas = header.first_timestamp_ms, header.first_timestamp_ms, None
    offset_deltas = [columns.offsets[place] - header.base_offset for place in kept]
    body, compressed = _encode_body(
        (
            offset_deltas,
            deltas,
            None if keys is None else [keys[place] for place in kept],
            [columns.values[place] for place in kept],
            None if headers is None else [headers[place] for place in kept],
        ),
        is_compressed=header.is_compressed,
    )
    header = msgspec.structs.replace(
        header,
        length=HEADER_BYTES + len(body),
        attributes=header.attributes & ~COMPRESSION_MASK | compressed,
        record_count=len(kept),
        first_timestamp_ms=first,
        max_timestamp_ms=newest,
    )
    return assemble(header, body)


def without_records(header: BatchHeader) -> bytearray:
    """The batch without any of its records, as `keep_records` leaves it."""
    return keep_records(header, Columns(range(0), [], None, [], None), [])


def _time_column(
    timestamps_ms: int | Sequence[int], count: int
) -> tuple[int, int, list[int] | None]:
    """The first and the greatest timestamp, and the column, None when all timestamps are equal."""
    if isinstance(timestamps_ms, int):
        return timestamps_ms, timestamps_ms, None
    assert len(timestamps_ms) == count
    if not timestamps_ms:
        return 0, 0, None
    first, newest = timestamps_ms[0], max(timestamps_ms)
    if newest == first and min(timestamps_ms) == first:
        return first, newest, None
    return first, newest, [timestamp - first for timestamp in timestamps_ms]


def _encode_body(columns: tuple[object, ...], *, is_compressed: bool) -> tuple[bytes, int]:
    """The body with these columns, and the attribute that says how it is compressed."""
    body = _encoder.encode(columns)
    if len(body) > PLAIN_BODY_BYTES_MAX:
        raise _too_large(len(body))
    attributes = 0
    if is_compressed:
        packed = lz4.block.compress(body, store_size=True)
        if len(packed) < len(body):
            body, attributes = packed, LZ4
    if HEADER_BYTES + len(body) > BATCH_BYTES_MAX:
        raise _too_large(HEADER_BYTES + len(body))
    return body, attributes


def _too_large(size_bytes: int) -> RecordTooLargeError:
    return RecordTooLargeError(
        f"A record batch of {size_bytes} bytes is larger than any partition takes "
        f"({BATCH_BYTES_MAX} bytes, {PLAIN_BODY_BYTES_MAX} before compression): send "
        "smaller records."
    )


def check_records(
    buffer: Buffer, position: int, header: BatchHeader, *, plain_bytes_max: int
) -> None:
    """A leader accepts only bodies that every reader can decode, and that are no larger than
    `plain_bytes_max` before compression. CRC and header of the batch were checked before.

    The check decodes the body with the decoder of the readers, and drops the result. So readers can
    read what a leader accepts; docs/wire.md says what that costs. Raises `InvalidRecordError`,
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
    """Raises `RecordTooLargeError` for a body that claims to be too large to be decoded."""
    size_bytes = decoded_bytes(body, header)
    if size_bytes > plain_bytes_max:
        raise RecordTooLargeError(
            f"A batch of {header.record_count} records counts {size_bytes} bytes before "
            f"compression, at least {RECORD_BYTES_MIN} for each record; the limit is "
            f"{plain_bytes_max}."
        )


def decoded_bytes(body: Buffer, header: BatchHeader) -> int:
    """The size that the batch claims to have before compression. Each record counts for at least
    `RECORD_BYTES_MIN`."""
    plain_bytes = len(body)
    if header.is_compressed and plain_bytes >= _PLAIN_SIZE.size:
        (plain_bytes,) = _PLAIN_SIZE.unpack_from(body)
    return max(plain_bytes, header.record_count * RECORD_BYTES_MIN)


def decode_columns(
    buffer: Buffer, position: int, header: BatchHeader, check_crc: bool = True
) -> Columns:
    """The records of the batch at `position`, whose header `read_header` has read.

    Whatever the bytes are, it raises nothing but `CorruptBatchError`, or `UnsupportedFormatError`
    for attributes of a newer rayq. `check_crc=False` leaves out `check_body`.
    """
    if check_crc:
        check_body(buffer, position, header)
    check_attributes(header)
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
    """The columns as they are stored. Each has the right types, and an item for each record.

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
    """Checks the sizes of the columns of a large body before their items are built."""
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
    """The length of a msgpack array. None for anything else: the decoder judges that."""
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

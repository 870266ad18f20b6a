"""The header of a record batch, and what can be checked and stamped without decoding the body."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import google_crc32c
import msgspec

from rayq.environment import Buffer
from rayq.errors import CorruptBatchError, InvalidRecordError, UnsupportedFormatError
from rayq.messages.transaction_ids import is_transactional

_HEADER = struct.Struct("<QIIBqIIHIIqqqHi")
_STAMP = struct.Struct("<QIIBq")
_CRC = struct.Struct("<I")
_ATTRIBUTES = struct.Struct("<H")
_LENGTH = struct.Struct("<I")
_LENGTH_POSITION = 8
_BODY_CRC_POSITION = _STAMP.size + _CRC.size
_PRODUCER_ID, _BASE_SEQUENCE = 12, 14
"""The places of these two among the header's fields. A negative number there stands for None."""
_COVERED = _BODY_CRC_POSITION + _CRC.size
"""The position at which the bytes begin that the body CRC covers."""

HEADER_BYTES = _HEADER.size
MAGIC = 1
BATCH_BYTES_MAX = 64 * 1024 * 1024
"""The largest batch, header included: the ceiling of `max_message_bytes`."""
OFFSET_MAX = 2**62
"""Offsets stay below, so that they and the ends of batches fit signed 64 bits everywhere."""
SEQUENCE_COUNT = 2**31
"""The sequences of a producer run from 0 to this, exclusive, and wrap."""

COMPRESSION_MASK = 0b111
LZ4 = 1
APPEND_TIME = 1 << 3
TRANSACTIONAL = 1 << 4
CONTROL = 1 << 5
NULL_KEYS = 1 << 6
ABORT = 1 << 7
LARGE = 1 << 8
DELAYED = 1 << 9
CHUNK = 1 << 10
DEAD_LETTER = 1 << 11
KNOWN_ATTRIBUTES = (
    LZ4
    | APPEND_TIME
    | TRANSACTIONAL
    | CONTROL
    | NULL_KEYS
    | ABORT
    | LARGE
    | DELAYED
    | CHUNK
    | DEAD_LETTER
)
_SERVER_ATTRIBUTES = CONTROL | ABORT
"""Producers must not set these: readers pass over control batches."""


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The header of one batch.

    `producer_id` and `base_sequence` are None for a batch of a producer without idempotence.
    """

    base_offset: int
    length: int
    leader_epoch: int
    magic: int = MAGIC
    append_time_ms: int = 0
    header_crc: int = 0
    body_crc: int = 0
    attributes: int = 0
    record_count: int = 0
    last_offset_delta: int = 0
    first_timestamp_ms: int = 0
    max_timestamp_ms: int = 0
    producer_id: int | None = None
    producer_epoch: int = 0
    base_sequence: int | None = None

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
        return self.attributes & COMPRESSION_MASK != 0

    @property
    def has_append_time(self) -> bool:
        """True if the records carry the time of the append instead of the producer's time."""
        return self.attributes & APPEND_TIME != 0

    @property
    def is_transactional(self) -> bool:
        """True if the batch is part of a transaction, or its marker. Compaction clears the
        attribute of records whose transaction has committed."""
        return self.attributes & TRANSACTIONAL != 0

    @property
    def is_control(self) -> bool:
        """True if the batch is the marker of a transaction, and has no records."""
        return self.attributes & CONTROL != 0

    @property
    def is_abort(self) -> bool:
        """True if this marker says that the transaction was aborted."""
        return self.attributes & ABORT != 0

    @property
    def has_null_keys(self) -> bool:
        """True if some record has no key: compacted topics refuse such a batch."""
        return self.attributes & NULL_KEYS != 0

    @property
    def is_large(self) -> bool:
        """True if the batch's one record stands for a large value: its own value is a manifest,
        which says where that is (`rayq.core.large.values`)."""
        return self.attributes & LARGE != 0

    @property
    def is_chunk(self) -> bool:
        """True if the batch is a chunk of a large value. Readers skip its one record, and in queues
        it counts as done."""
        return self.attributes & CHUNK != 0

    @property
    def is_dead_letter(self) -> bool:
        """True if a queue's leader wrote the records as dead letters, with the headers that say
        where they came from. No client can set it."""
        return self.attributes & DEAD_LETTER != 0

    @property
    def is_delayed(self) -> bool:
        """True if some record has the header `rayq.due`: queues deliver it later."""
        return self.attributes & DELAYED != 0

    @property
    def newest_timestamp_ms(self) -> int:
        """The greatest timestamp that a reader sees in this batch, -1 when it has no records."""
        if self.record_count == 0:
            return -1
        return self.append_time_ms if self.has_append_time else self.max_timestamp_ms


def assemble(header: BatchHeader, body: bytes) -> bytearray:
    """The bytes of a batch. Both CRCs are computed here, whatever `header` says."""
    batch = bytearray(HEADER_BYTES)
    _HEADER.pack_into(
        batch,
        0,
        header.base_offset,
        header.length,
        header.leader_epoch,
        MAGIC,
        header.append_time_ms,
        0,
        0,
        header.attributes,
        header.record_count,
        header.last_offset_delta,
        header.first_timestamp_ms,
        header.max_timestamp_ms,
        -1 if header.producer_id is None else header.producer_id,
        header.producer_epoch,
        -1 if header.base_sequence is None else header.base_sequence,
    )
    body_crc = google_crc32c.extend(google_crc32c.value(bytes(batch[_COVERED:])), body)
    _CRC.pack_into(batch, _BODY_CRC_POSITION, body_crc)
    _CRC.pack_into(batch, _STAMP.size, google_crc32c.value(bytes(batch[: _STAMP.size])))
    batch += body
    return batch


def stand_in(base_offset: int, next_offset: int, leader_epoch: int) -> bytes:
    """A batch without a body, in the place of batches with these offsets that cannot be read any
    more. Its body CRC is wrong on purpose: a reader learns from it which offsets are damaged."""
    batch = assemble(
        BatchHeader(
            base_offset=base_offset,
            length=HEADER_BYTES,
            leader_epoch=leader_epoch,
            record_count=1,
            last_offset_delta=next_offset - base_offset - 1,
        ),
        b"",
    )
    (body_crc,) = _CRC.unpack_from(batch, _BODY_CRC_POSITION)
    _CRC.pack_into(batch, _BODY_CRC_POSITION, body_crc ^ 0xFFFFFFFF)
    return bytes(batch)


def is_stand_in(buffer: Buffer, position: int, header: BatchHeader) -> bool:
    """Returns whether a leader says by this batch that its disk has nothing better."""
    is_bare = header.length == HEADER_BYTES and header.record_count == 1
    return is_bare and not is_as_written(buffer, position, header)


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`. Its CRC and its length are checked; the body may be missing or bad.

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
    """The append time in ms of the first batch of a buffer, whose header was checked before."""
    append_time_ms: int = _STAMP.unpack_from(buffer)[4]
    return append_time_ms


def is_as_written(buffer: Buffer, position: int, header: BatchHeader) -> bool:
    """Returns whether a batch's bytes are those that its producer sent: no other copy of them is
    better."""
    end = position + header.length
    if len(buffer) < end:
        return False
    crc: int = google_crc32c.value(bytes(buffer[position + _COVERED : end]))
    return crc == header.body_crc


def check_body(buffer: Buffer, position: int, header: BatchHeader) -> None:
    """Checks the body's CRC, and the counts and times of the header, but not the columns inside the
    body. Raises `CorruptBatchError`."""
    end = position + header.length
    if len(buffer) < end:
        raise CorruptBatchError(
            f"The batch at {position} (offset {header.base_offset}) has {header.length} bytes, of "
            f"which {len(buffer) - position} are there."
        )
    if not is_as_written(buffer, position, header):
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
    """A leader accepts only headers with one offset for each record, and with attributes that
    producers may set and readers of this version know.

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
            "(control, abort) are not for producers to set. Nothing was written."
        )
    if (header.is_large or header.is_chunk) and header.record_count > 1:
        raise InvalidRecordError(
            f"A produced batch has attributes {header.attributes:#x} and {header.record_count} "
            f"records: a chunk of a large value ({CHUNK:#x}) and a manifest ({LARGE:#x}) have each "
            "a batch of its own. Nothing was written."
        )
    if header.is_large and header.is_chunk:
        raise InvalidRecordError(
            f"A produced batch is a chunk of a large value ({CHUNK:#x}) and a manifest "
            f"({LARGE:#x}) at once. Nothing was written."
        )
    if header.is_transactional != is_transactional(header.producer_id):
        raise InvalidRecordError(
            f"A produced batch has attributes {header.attributes:#x} and producer id "
            f"{header.producer_id}: the batches of transactions have the attribute "
            f"{TRANSACTIONAL:#x} and an id that a coordinator drew, all others have neither. "
            "Nothing was written."
        )
    check_attributes(header)


def check_attributes(header: BatchHeader) -> None:
    """Raises `UnsupportedFormatError` where a newer rayq wrote the batch."""
    if header.attributes & ~KNOWN_ATTRIBUTES:
        raise UnsupportedFormatError(
            f"The batch at offset {header.base_offset} has attributes {header.attributes:#x}, of "
            f"which this rayq knows {KNOWN_ATTRIBUTES:#x}: a newer rayq wrote it."
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

    The body is neither read nor changed. `timestamp_from_append` also sets the attribute for the
    append time; where the producer had not set it, that costs a new body CRC.
    """
    (length,) = _CRC.unpack_from(buffer, position + 8)
    _STAMP.pack_into(buffer, position, base_offset, length, leader_epoch, MAGIC, append_time_ms)
    covered = bytes(buffer[position : position + _STAMP.size])
    _CRC.pack_into(buffer, position + _STAMP.size, google_crc32c.value(covered))
    if timestamp_from_append:
        (attributes,) = _ATTRIBUTES.unpack_from(buffer, position + _COVERED)
        if not attributes & APPEND_TIME:
            _ATTRIBUTES.pack_into(buffer, position + _COVERED, attributes | APPEND_TIME)
            body = bytes(buffer[position + _COVERED : position + length])
            _CRC.pack_into(buffer, position + _BODY_CRC_POSITION, google_crc32c.value(body))
    return read_header(buffer, position)


def without_transaction(batch: Buffer) -> bytearray:
    """One checked batch, without the attribute that makes it part of a transaction."""
    cleared = bytearray(batch)
    (attributes,) = _ATTRIBUTES.unpack_from(cleared, _COVERED)
    _ATTRIBUTES.pack_into(cleared, _COVERED, attributes & ~TRANSACTIONAL)
    body_crc = google_crc32c.value(bytes(cleared[_COVERED:]))
    _CRC.pack_into(cleared, _BODY_CRC_POSITION, body_crc)
    return cleared


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


def parts_of(buffer: Buffer, batches: int) -> Iterator[memoryview]:
    """A buffer of whole batches in parts of so many. Nothing is checked: what follows a length that
    cannot be is one part."""
    view = memoryview(buffer)
    start = end = count = 0
    while end + HEADER_BYTES <= len(view):
        (length,) = _LENGTH.unpack_from(view, end + _LENGTH_POSITION)
        if length < HEADER_BYTES:
            break
        end += length
        count += 1
        if count == batches:
            yield view[start:end]
            start, count = end, 0
    if start < len(view):
        yield view[start:]

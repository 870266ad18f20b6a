"""Data objects: a range of whole batches as they are in the log, and a footer that describes them.

Little endian::

    batches                 as replicas store them, without a gap
    content                 msgpack of `Footer`
    content_length u32 | content_crc u32 (crc32c of the content) | b"rayqobj1"

The footer has a *place* (first offset, position, greatest timestamp) for each 256 KiB of batches:
readers begin and end there. It has a CRC32C for each MiB, by which any range is checked without the
rest. A reader of one range needs no manifest besides, and a lost manifest could be rebuilt from the
footers.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import msgspec

from rayq.config import KIB, MIB
from rayq.environment import Buffer
from rayq.errors import CorruptBatchError, RemoteDamagedError
from rayq.storage.batch import check_body, split_batches

OBJECT_DATA_BYTES_MAX = 64 * MIB
"""The maximum size of an object, without its footer: it is sent from memory, by one PUT. (A single
batch that is larger is an object of its own.)"""
PLACE_BYTES = 256 * KIB
CRC_BYTES = MIB
_PLACE = struct.Struct("<QQq")
_CRC = struct.Struct("<I")
_TRAILER = struct.Struct("<II8s")
_MAGIC = b"rayqobj1"
TRAILER_BYTES = _TRAILER.size


class Place(NamedTuple):
    """The position of a batch, and the greatest timestamp from it up to the next place (-1: there
    are no records)."""

    offset: int
    position: int
    newest_timestamp_ms: int


class Span(NamedTuple):
    """Whole batches of an object: their offsets (end exclusive) and their bytes."""

    start: int
    end: int
    position: int
    length: int


class Footer(msgspec.Struct, array_like=True, frozen=True):
    """The description of a data object's batches."""

    topic_id: str
    partition: int
    start: int
    end: int
    """Exclusive."""
    end_epoch: int
    """The leader epoch of the last batch."""
    data_bytes: int
    """Size without the footer."""
    first_append_ms: int
    last_append_ms: int
    newest_timestamp_ms: int
    """The greatest timestamp of its records, -1 without any."""
    epochs: list[tuple[int, int]]
    """`(leader epoch, start offset)`; the first is that of the first batch."""
    aborted: list[tuple[int, int]]
    """`(family, epoch)` of the aborted transactions that may have batches in it."""
    packed_places: bytes
    packed_crcs: bytes
    encryption: None = None
    """For a later version."""

    @property
    def places(self) -> list[Place]:
        """In order; the first is the start of the object."""
        return [Place(*fields) for fields in _PLACE.iter_unpack(self.packed_places)]

    def span(self, start: int, end: int, bytes_max: int | None = None) -> Span:
        """The smallest run between places that holds the offsets from `start` up to `end`. Of
        `bytes_max` it ends earlier, but has one place at least. `start` lies in the object."""
        places = self.places
        first = max(0, bisect_right(places, start, key=lambda place: place.offset) - 1)
        last = max(first + 1, bisect_left(places, end, key=lambda place: place.offset))
        position = places[first].position
        if bytes_max is not None:
            fits = bisect_right(places, position + bytes_max, key=lambda place: place.position) - 1
            if last < len(places) or self.data_bytes > position + bytes_max:
                last = max(first + 1, min(last, fits))
        ends = places[last].position if last < len(places) else self.data_bytes
        end_offset = places[last].offset if last < len(places) else self.end
        return Span(places[first].offset, end_offset, position, ends - position)

    def place_of_time(self, timestamp_ms: int) -> Place | None:
        """The first place with a record of `timestamp_ms` or later behind it, before the next
        place."""
        for place in self.places:
            if place.newest_timestamp_ms >= timestamp_ms:
                return place
        return None

    def crc_parts(self, position: int, length: int) -> list[tuple[int, int, int]]:
        """`(position, length, CRC32C)` of the parts that cover these bytes, in order. They may
        begin earlier and end later."""
        end = min(position + length, self.data_bytes)
        return [
            (
                number * CRC_BYTES,
                min(CRC_BYTES, self.data_bytes - number * CRC_BYTES),
                _CRC.unpack_from(self.packed_crcs, number * _CRC.size)[0],
            )
            for number in range(position // CRC_BYTES, -(-end // CRC_BYTES))
        ]


class DataObject(NamedTuple):
    """An object that is ready to be stored: its bytes are `data`, then `tail`."""

    footer: Footer
    tail: bytes
    object_bytes: int
    crc32c: int
    """The CRC of all bytes."""


def describe_batches(
    data: Buffer,
    *,
    topic_id: str,
    partition: int,
    start: int,
    end: int,
    aborted: Sequence[tuple[int, int]],
) -> DataObject:
    """Checks the batches that shall be an object, and makes the footer.

    They have intact CRCs, follow each other from `start` up to `end` without a gap, and their
    epochs do not go back. Raises CorruptBatchError, UnsupportedFormatError.
    """
    places: list[Place] = []
    epochs: list[tuple[int, int]] = []
    next_offset = start
    first_append_ms = last_append_ms = 0
    for position, header in split_batches(data):
        check_body(data, position, header)
        if header.base_offset != next_offset:
            raise CorruptBatchError(
                f"The batch at {position} begins at offset {header.base_offset}, not at "
                f"{next_offset}: these bytes are not the range {start} to {end} of the log."
            )
        if not epochs or header.leader_epoch != epochs[-1][0]:
            if epochs and header.leader_epoch < epochs[-1][0]:
                raise CorruptBatchError(
                    f"The batch at {position} (offset {header.base_offset}) has leader epoch "
                    f"{header.leader_epoch} after {epochs[-1][0]}."
                )
            epochs.append((header.leader_epoch, header.base_offset))
        if not places:
            first_append_ms = last_append_ms = header.append_time_ms
        first_append_ms = min(first_append_ms, header.append_time_ms)
        last_append_ms = max(last_append_ms, header.append_time_ms)
        newest_ms = header.newest_timestamp_ms
        if not places or position - places[-1].position >= PLACE_BYTES:
            places.append(Place(header.base_offset, position, newest_ms))
        elif newest_ms > places[-1].newest_timestamp_ms:
            places[-1] = places[-1]._replace(newest_timestamp_ms=newest_ms)
        next_offset = header.next_offset
    if next_offset != end or not places:
        raise CorruptBatchError(
            f"{len(data)} bytes hold the offsets {start} to {next_offset}, not up to {end}."
        )
    view = memoryview(data)
    crcs = bytearray()
    crc = 0
    for position in range(0, len(data), CRC_BYTES):
        chunk = bytes(view[position : position + CRC_BYTES])
        crcs += _CRC.pack(google_crc32c.value(chunk))
        crc = google_crc32c.extend(crc, chunk)
    footer = Footer(
        topic_id=topic_id,
        partition=partition,
        start=start,
        end=end,
        end_epoch=epochs[-1][0],
        data_bytes=len(data),
        first_append_ms=first_append_ms,
        last_append_ms=last_append_ms,
        newest_timestamp_ms=max(place.newest_timestamp_ms for place in places),
        epochs=epochs,
        aborted=list(aborted),
        packed_places=b"".join(_PLACE.pack(*place) for place in places),
        packed_crcs=bytes(crcs),
    )
    content = msgspec.msgpack.encode(footer)
    tail = content + _TRAILER.pack(len(content), google_crc32c.value(content), _MAGIC)
    return DataObject(footer, tail, len(data) + len(tail), google_crc32c.extend(crc, tail))


def footer_bytes(trailer: bytes, name: str) -> int:
    """The length of the footer, by the last `TRAILER_BYTES` bytes of an object of unknown shape.
    Raises RemoteDamagedError."""
    return _trailer(trailer, name)[0] + TRAILER_BYTES


def read_footer(tail: bytes, name: str) -> Footer:
    """The footer of the object `name`, whose last bytes `tail` are: at least from `data_bytes` on.

    Raises RemoteDamagedError, also for a format of another version.
    """
    length, crc = _trailer(tail[-TRAILER_BYTES:], name)
    content = tail[-TRAILER_BYTES - length : -TRAILER_BYTES]
    if len(content) != length or google_crc32c.value(content) != crc:
        raise RemoteDamagedError(f"The footer of {name} does not match its CRC.")
    try:
        footer = msgspec.msgpack.decode(content, type=Footer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteDamagedError(f"The footer of {name} cannot be read: {error}") from error
    if (
        not footer.packed_places
        or len(footer.packed_places) % _PLACE.size
        or len(footer.packed_crcs) != -(-footer.data_bytes // CRC_BYTES) * _CRC.size
    ):
        raise RemoteDamagedError(f"The footer of {name} describes no object of this format.")
    return footer


def _trailer(trailer: bytes, name: str) -> tuple[int, int]:
    if len(trailer) != TRAILER_BYTES or (fields := _TRAILER.unpack(trailer))[2] != _MAGIC:
        raise RemoteDamagedError(
            f"{name} does not end like a data object of this version of rayq."
        )
    return fields[0], fields[1]

"""Batches with right CRCs and other errors, as a client that has the token can send them."""

from __future__ import annotations

import struct

import google_crc32c
import lz4.block
import msgspec
from hypothesis import strategies as st

from rayq.storage.batch import HEADER_BYTES, encode_batch, read_header, stamp

CONTROL, TRANSACTIONAL, NULL_KEYS, LZ4 = 1 << 5, 1 << 4, 1 << 6, 1
LARGE, CHUNK, DEAD_LETTER = 1 << 8, 1 << 10, 1 << 11


def pack(*columns: object) -> bytes:
    """A body of these columns."""
    return msgspec.msgpack.encode(columns)


GOOD = pack(None, None, None, [b"v"], None)


def sealed(header: dict[str, int], body: bytes) -> bytes:
    """These fields and this body under right CRCs; one record at offset 0 unless the fields
    differ."""
    fields = {
        "base_offset": 0,
        "length": HEADER_BYTES + len(body),
        "leader_epoch": 0,
        "magic": 1,
        "attributes": 0,
        "record_count": 1,
        "last_offset_delta": 0,
        "first": 5,
        "max": 5,
        "producer_id": -1,
    } | header
    head = struct.pack(
        "<QIIBq",
        fields["base_offset"],
        fields["length"],
        fields["leader_epoch"],
        fields["magic"],
        0,
    )
    tail = struct.pack(
        "<HIIqqqHi",
        fields["attributes"],
        fields["record_count"],
        fields["last_offset_delta"],
        fields["first"],
        fields["max"],
        fields["producer_id"],
        0,
        -1,
    )
    crcs = struct.pack("<II", google_crc32c.value(head), google_crc32c.value(tail + body))
    return head + crcs + tail + body


def moved(batch: bytes, base_offset: int) -> bytes:
    """The same batch at another offset, as if a leader had stamped it."""
    data = bytearray(batch)
    stamp(data, 0, base_offset=base_offset, leader_epoch=0, append_time_ms=5)
    return bytes(data)


def records(count: int) -> dict[str, int]:
    """The fields of a produced batch of so many records."""
    return {"record_count": count, "last_offset_delta": count - 1}


def bomb(count: int) -> bytes:
    """A batch of so many records without key and value, in a two-hundredth of as many bytes."""
    body = b"\x95\xc0\xc0\xc0\xdd" + struct.pack(">I", count) + b"\xc0" * count + b"\xc0"
    return sealed({"attributes": LZ4 | NULL_KEYS} | records(count), lz4.block.compress(body))


KEYED = pack(None, None, [b"k"], [b"v"], None)
WRONG_BODIES = {
    "no body": b"",
    "not msgpack": b"\xc1garbage",
    "other counts": pack(None, None, None, [b"a", b"b"], None),
    "a key too many": pack(None, None, [b"k", b"l"], [b"v"], None),
    "text for a value": pack(None, None, [b"k"], ["text"], None),
    "a number for a key": pack(None, None, [1], [b"v"], None),
    "no values": pack(None, None, [b"k"], None, None),
    "too few columns": pack(None, None, [b"k"], [b"v"]),
    "more after the end": KEYED + b"x",
    "an offset that is not there": pack([5], None, [b"k"], [b"v"], None),
    "a time before the first": pack(None, [-6], [b"k"], [b"v"], None),
    "a header of three": pack(None, None, [b"k"], [b"v"], [[("a", b"b", b"c")]]),
    "a header's name that is no text": b"\x95\xc0\xc0\x91\xc4\x01k\x91\xc4\x01v\x91\x91\x92\xa1\xff"
    b"\xc4\x01v",
    "an array of 4 billion": b"\x95\xc0\xc0\xc0\xdd\xff\xff\xff\xff",
}
"""The fields of a batch of one record."""


@st.composite
def mutated_batches(draw: st.DrawFn) -> bytes:
    """A batch of keyed records whose body and counts were altered, under right CRCs."""
    count = draw(st.integers(1, 4))
    column = st.lists(st.binary(max_size=6), min_size=count, max_size=count)
    compression = draw(st.sampled_from(["lz4", "none"]))
    times = draw(st.lists(st.integers(5, 20), min_size=count, max_size=count))
    headers = [[("name", b"value")], *[None] * (count - 1)] if draw(st.booleans()) else None
    batch = encode_batch(draw(column), draw(column), headers, times, compression=compression)
    header = read_header(batch)
    body = bytearray(batch[HEADER_BYTES:])
    if draw(st.booleans()) and header.is_compressed:
        body = bytearray(lz4.block.decompress(bytes(body)))
        _mutate(draw, body)
        body = bytearray(lz4.block.compress(bytes(body)))
    else:
        _mutate(draw, body)
    fields = {
        "attributes": header.attributes,
        "first": header.first_timestamp_ms,
        "max": header.max_timestamp_ms,
        **records(count),
    }
    other = st.fixed_dictionaries(
        {},
        optional={
            "attributes": st.integers(0, 255),
            "record_count": st.integers(0, 6) | st.just(2**32 - 1),
            "last_offset_delta": st.integers(0, 6) | st.just(2**24),
            "first": st.integers(0, 30),
            "max": st.integers(0, 30),
        },
    )
    return sealed(fields | draw(other), bytes(body))


def _mutate(draw: st.DrawFn, body: bytearray) -> None:
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(body) - 1, 0)))
        body[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))

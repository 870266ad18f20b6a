"""The record batch: the records that go in come out, and no other bytes are ever believed."""

from __future__ import annotations

import struct

import google_crc32c
import lz4.block
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.errors import (
    CorruptBatchError,
    InvalidRecordError,
    RayqError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from rayq.messages.transaction_ids import make_family
from rayq.records import Headers
from rayq.storage.batch import (
    HEADER_BYTES,
    BatchHeader,
    Columns,
    Marker,
    check_body,
    check_produced,
    check_records,
    decode_columns,
    due_header,
    due_ms_of,
    encode_batch,
    encode_marker,
    parts_of,
    read_header,
    read_marker,
    split_batches,
    stamp,
)
from rayq.storage.batch import body as batch_body
from tests.wrong_batches import (
    GOOD,
    KEYED,
    WRONG_BODIES,
    bomb,
    mutated_batches,
    pack,
    sealed,
)

TIMES = st.integers(min_value=0, max_value=2**41)
VALUES = st.none() | st.binary(max_size=40)
FAMILY = make_family(0, 0)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3)


@st.composite
def record_columns(
    draw: st.DrawFn,
) -> tuple[
    list[bytes | None], list[bytes | None] | None, list[Headers | None] | None, int | list[int]
]:
    count = draw(st.integers(1, 20))

    def column(of: st.SearchStrategy) -> list:  # type: ignore[type-arg]
        return draw(st.lists(of, min_size=count, max_size=count))

    return (
        column(VALUES),
        draw(st.none() | st.just(column(VALUES))),
        draw(st.none() | st.just(column(HEADERS))),
        draw(TIMES | st.just(column(TIMES))),
    )


def decode(data: bytes | bytearray, position: int = 0) -> Columns:
    return decode_columns(data, position, read_header(data, position))


@pytest.mark.slow
@given(record_columns(), st.sampled_from(["lz4", "none"]))
def test_records_survive_encoding_and_stamping(records, compression) -> None:  # type: ignore[no-untyped-def]
    values, keys, headers, timestamps = records
    data = encode_batch(values, keys, headers, timestamps, compression=compression)
    header = stamp(data, 0, base_offset=1000, leader_epoch=7, append_time_ms=99)
    check_body(data, 0, header)
    check_produced(header)
    columns = decode(data)
    count = len(values)
    assert list(columns.offsets) == list(range(1000, 1000 + count))
    assert columns.values == values
    assert (columns.keys or [None] * count) == (keys or [None] * count)
    expected = [timestamps] * count if isinstance(timestamps, int) else timestamps
    assert columns.timestamps_ms == expected
    assert header.max_timestamp_ms == max(expected)
    assert [list(one or []) for one in columns.headers or [None] * count] == [
        list(one or []) for one in headers or [None] * count
    ]
    assert (header.leader_epoch, header.append_time_ms) == (7, 99)
    assert (header.last_offset, header.next_offset) == (999 + count, 1000 + count)


def test_the_header_is_as_documented() -> None:
    data = encode_batch(
        [b"a", b"b"],
        timestamps_ms=[5, 9],
        compression="none",
        producer_id=77,
        producer_epoch=3,
        base_sequence=10,
    )
    stamp(data, 0, base_offset=4, leader_epoch=2, append_time_ms=1234)
    body = msgspec.msgpack.encode([None, [0, 4], None, [b"a", b"b"], None])
    head = struct.pack("<QIIBq", 4, 73 + len(body), 2, 1, 1234)
    tail = struct.pack("<HIIqqqHi", 1 << 6, 2, 1, 5, 9, 77, 3, 10) + body
    crcs = struct.pack("<II", google_crc32c.value(head), google_crc32c.value(tail))
    assert data == head + crcs + tail
    assert HEADER_BYTES == 73


def test_absent_columns_cost_nothing_and_absent_numbers_are_none() -> None:
    data = encode_batch([b"a"], [None], [[]], 5, compression="none")
    header = read_header(data)
    assert (header.producer_id, header.base_sequence, header.last_sequence) == (None, None, None)
    columns = decode(data)
    assert columns.keys is None
    assert columns.headers is None
    assert data[HEADER_BYTES:] == msgspec.msgpack.encode([None, None, None, [b"a"], None])


def test_header_names_keep_their_order_and_duplicates() -> None:
    headers: list[Headers | None] = [[("a", b"1"), ("b", b"2"), ("a", b"3")], None]
    assert decode(encode_batch([b"x", b"y"], None, headers, 1)).headers == headers


def test_a_body_that_does_not_shrink_stays_plain() -> None:
    assert not read_header(encode_batch([bytes(range(200))])).is_compressed
    assert read_header(encode_batch([b"a" * 1000])).is_compressed


def test_records_carry_the_append_time_when_the_producer_or_the_leader_says_so() -> None:
    by_producer = encode_batch([b"a", b"b"], timestamps_ms=[5, 6], append_time=True)
    stamp(by_producer, 0, base_offset=0, leader_epoch=0, append_time_ms=100)
    by_leader = encode_batch([b"a", b"b"], timestamps_ms=[5, 6])
    stamp(
        by_leader,
        0,
        base_offset=0,
        leader_epoch=0,
        append_time_ms=100,
        timestamp_from_append=True,
    )
    for data in (by_producer, by_leader):
        assert decode(data).timestamps_ms == [100, 100]
        assert read_header(data).newest_timestamp_ms == 100


def test_stamping_leaves_the_body_and_its_crc_alone() -> None:
    data = encode_batch([b"a" * 100])
    before = bytes(data[29:])
    stamp(data, 0, base_offset=10, leader_epoch=1, append_time_ms=2)
    stamp(memoryview(data), 0, base_offset=20, leader_epoch=2, append_time_ms=3)
    assert data[29:] == before
    assert list(decode(data).offsets) == [20]


def test_sequences_wrap() -> None:
    data = encode_batch([b"a"] * 10, producer_id=1, base_sequence=2**31 - 3)
    assert read_header(data).last_sequence == 6


def test_every_flipped_bit_is_noticed() -> None:
    data = encode_batch([b"value"], [b"key"], [[("h", b"x")]], 77, producer_id=5, base_sequence=0)
    stamp(data, 0, base_offset=3, leader_epoch=1, append_time_ms=9)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises((CorruptBatchError, UnsupportedFormatError)):
                decode(damaged)


def test_every_cut_is_noticed() -> None:
    data = encode_batch([b"value"], [b"key"])
    for length in range(len(data)):
        with pytest.raises(CorruptBatchError):
            decode(data[:length])


def test_batches_split_where_they_end() -> None:
    data = bytearray()
    for number in range(5):
        one = encode_batch([b"x" * number])
        stamp(one, 0, base_offset=number, leader_epoch=0, append_time_ms=0)
        data += one
    found = list(split_batches(data))
    assert [header.base_offset for _, header in found] == [0, 1, 2, 3, 4]
    assert [decode(data, position).values for position, _ in found] == [
        [b"x" * number] for number in range(5)
    ]
    with pytest.raises(CorruptBatchError):
        list(split_batches(data[:-1]))
    assert list(split_batches(b"")) == []
    starts = [position for position, _ in found]
    assert [len(part) for part in parts_of(data, 2)] == [
        *(starts[2], starts[4] - starts[2], len(data) - starts[4])
    ]
    assert [bytes(part) for part in parts_of(data, 5)] == [data]


@given(st.binary(max_size=200), st.integers(1, 3), st.integers(0, 3))
def test_parts_are_all_there_is_whatever_the_bytes(noise: bytes, batches: int, whole: int) -> None:
    data = bytes(encode_batch([b"value"]) * whole) + noise
    parts = [bytes(part) for part in parts_of(data, batches)]
    assert b"".join(parts) == data
    assert all(parts)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"length": 10}, GOOD),
        ({"length": 65 * 2**20}, GOOD),
        ({"base_offset": 2**63}, GOOD),
        ({"record_count": 2}, GOOD),
        ({"record_count": 2, "last_offset_delta": 1}, GOOD),
        ({"last_offset_delta": 5}, GOOD),
        ({"first": -1}, GOOD),
        ({"max": 4}, GOOD),
        ({}, b""),
        ({}, b"\xdd\xff\xff\xff\xff"),
        ({}, GOOD + b"x"),
        ({}, pack(None, None, None, [b"v"])),
        ({}, pack(None, None, None, ["text"], None)),
        ({}, pack(None, None, None, None, None)),
        ({}, pack(None, None, [1], [b"v"], None)),
        ({}, pack(None, None, [b"k", b"l"], [b"v"], None)),
        ({}, pack([1], None, None, [b"v"], None)),
        ({}, pack([-1], None, None, [b"v"], None)),
        ({}, pack(None, [1], None, [b"v"], None)),
        ({}, pack(None, [-6], None, [b"v"], None)),
        ({}, pack(None, None, None, [b"v"], [[("n",)]])),
        ({}, b"\x95\xc0\xc0\xc0\x91\xc4\x01v\x91\x91\x92\xa1\xff\xc4\x01v"),
        ({"record_count": 2, "last_offset_delta": 5}, pack([3, 3], None, None, [b"", b""], None)),
        ({"attributes": 1}, b""),
        ({"attributes": 1}, b"\xff\xff\xff\xff" + b"x" * 50),
        ({"attributes": 1}, struct.pack("<I", 50) + b"x" * 50),
        ({"attributes": 1}, lz4.block.compress(GOOD, store_size=False)),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused_in_spite_of_its_crcs(
    header: dict[str, int], body: bytes
) -> None:
    with pytest.raises(CorruptBatchError):
        decode(sealed(header, body))


def test_a_decompression_bomb_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_body, "PLAIN_BODY_BYTES_MAX", 1000)
    bomb = lz4.block.compress(pack(None, None, None, [bytes(2000)], None))
    monkeypatch.setattr(batch_body.lz4.block, "decompress", lambda _: pytest.fail("unpacked"))
    with pytest.raises(CorruptBatchError, match="before compression"):
        decode(sealed({"attributes": 1}, bomb))


def test_a_newer_magic_or_unknown_attributes_are_an_unsupported_format() -> None:
    with pytest.raises(UnsupportedFormatError):
        read_header(sealed({"magic": 2}, GOOD))
    with pytest.raises(UnsupportedFormatError):
        decode(sealed({"attributes": 2}, GOOD))
    with pytest.raises(UnsupportedFormatError):
        check_produced(read_header(sealed({"attributes": 1 << 12}, GOOD)))


def test_a_leader_takes_dense_batches_with_records_only() -> None:
    for fields in ({"record_count": 0}, {"record_count": 1, "last_offset_delta": 3}):
        with pytest.raises(InvalidRecordError):
            check_produced(read_header(sealed(fields, GOOD)))


@pytest.mark.parametrize("bit", [5, 7])
def test_a_producer_may_not_set_the_attributes_that_are_for_servers(bit: int) -> None:
    with pytest.raises(InvalidRecordError, match="not for producers"):
        check_produced(read_header(sealed({"attributes": 1 << bit}, GOOD)))


@pytest.mark.parametrize("producer_id", [None, 7, FAMILY, FAMILY + 3])
@pytest.mark.parametrize("is_marked", [False, True])
def test_the_batches_of_transactions_have_the_attribute_and_no_others(
    producer_id: int | None, is_marked: bool
) -> None:
    batch = encode_batch(
        [b"v"], producer_id=producer_id, base_sequence=0, is_transactional=is_marked
    )
    header = read_header(batch)
    assert header.is_transactional == is_marked
    assert decode(batch).values == [b"v"]
    if is_marked == (producer_id is not None and producer_id >= FAMILY):
        check_produced(header)
    else:
        with pytest.raises(InvalidRecordError, match="coordinator drew"):
            check_produced(header)


@given(
    st.builds(
        Marker,
        st.integers(FAMILY, 2**62),
        st.integers(0, 65_535),
        st.booleans(),
        st.integers(0, 255),
        st.integers(0, 2**31),
    )
)
def test_a_marker_survives_encoding_and_stamping(marker: Marker) -> None:
    batch = encode_marker(marker)
    header = stamp(batch, 0, base_offset=70, leader_epoch=3, append_time_ms=9)
    assert read_marker(b"x" + batch, 1, header) == marker
    assert header.is_control and header.is_transactional and header.is_abort != marker.is_commit
    assert (header.base_offset, header.next_offset, header.record_count) == (70, 71, 0)
    assert header.base_sequence is None
    with pytest.raises(InvalidRecordError):
        check_produced(header)


def test_a_marker_that_cannot_be_read_is_an_error() -> None:
    fields = {"attributes": 1 << 4 | 1 << 5, "record_count": 0, "producer_id": FAMILY}

    def read(fields: dict[str, int], body: object) -> Marker:
        batch = sealed(fields, msgspec.msgpack.encode(body))
        return read_marker(batch, 0, read_header(batch))

    assert read(fields, [1, 2, 3]) == Marker(FAMILY, 0, True, 2, 3)
    with pytest.raises(UnsupportedFormatError):
        read(fields, [2, 2, 3])
    for wrong in ([1, 2], [1, "2", 3], 1):
        with pytest.raises(CorruptBatchError):
            read(fields, wrong)
    for changes in ({"attributes": 1 << 4}, {"attributes": 1 << 5}, {"producer_id": -1}):
        with pytest.raises(CorruptBatchError):
            read(fields | changes, [1, 2, 3])


def check(data: bytes, plain_bytes_max: int = 4 * 2**20) -> None:
    """Checks the bytes of a producer as a leader does."""
    header = read_header(data)
    check_body(data, 0, header)
    check_produced(header)
    check_records(data, 0, header, plain_bytes_max=plain_bytes_max)


def test_a_leader_takes_no_batch_that_hides_a_record_without_a_key() -> None:
    keyless, keyed = pack(None, None, [None], [b"v"], None), pack(None, None, [b""], [b"v"], None)
    for body in (GOOD, keyless):
        check(sealed({"attributes": 1 << 6}, body))
        with pytest.raises(InvalidRecordError, match="no key"):
            check(sealed({}, body))
    check(sealed({}, keyed))


def test_a_leader_takes_no_bomb_and_does_not_unpack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_body, "_unpack", lambda *_: pytest.fail("unpacked"))
    with pytest.raises(RecordTooLargeError, match="200000 records counts 4800000 bytes"):
        check(bomb(200_000))
    large = pack(None, None, None, [bytes(5_000_000)], None)
    with pytest.raises(RecordTooLargeError, match="the limit is 4194304"):
        check(sealed({"attributes": 65}, lz4.block.compress(large)))


def test_a_batch_emptied_by_compaction_still_has_its_offsets() -> None:
    data = sealed({"record_count": 0, "last_offset_delta": 9}, pack([], None, None, [], None))
    assert read_header(data).next_offset == 10
    assert decode(data).values == []


def test_a_batch_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_body, "BATCH_BYTES_MAX", 1000)
    with pytest.raises(RecordTooLargeError):
        encode_batch([bytes(2000)], compression="none")
    monkeypatch.setattr(batch_body, "PLAIN_BODY_BYTES_MAX", 1000)
    with pytest.raises(RecordTooLargeError):
        encode_batch([bytes(2000)])


def read_anything(data: bytes) -> BatchHeader | None:
    try:
        header = read_header(data)
        decode_columns(data, 0, header)
        decode_columns(data, 0, header, check_crc=False)
    except (CorruptBatchError, UnsupportedFormatError):
        return None
    return header


@given(st.binary(max_size=300))
def test_any_bytes_are_a_batch_or_a_corrupt_batch(data: bytes) -> None:
    read_anything(data)
    try:
        list(split_batches(data))
    except (CorruptBatchError, UnsupportedFormatError):
        pass


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "attributes": st.integers(0, 70),
            "record_count": st.integers(0, 4),
            "last_offset_delta": st.integers(0, 6),
            "first": st.integers(-5, 10),
            "max": st.integers(-5, 10),
            "length": st.integers(0, 400),
        },
    ),
    st.binary(max_size=100)
    | st.recursive(
        st.none() | st.integers(-10, 2**63) | st.binary(max_size=3) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=6),
    ).map(msgspec.msgpack.encode),
    st.booleans(),
)
def test_any_body_under_right_crcs_is_a_batch_or_a_corrupt_batch(
    header: dict[str, int], body: bytes, is_compressed: bool
) -> None:
    if is_compressed:
        body = lz4.block.compress(body)
        header = header | {"attributes": 1}
    read_anything(sealed(header, body))


def test_of_a_large_body_the_columns_are_looked_at_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five million headers of four bytes each would become 320 MB of tuples."""
    monkeypatch.setattr(batch_body, "_decoder", None)
    head = b"\x95\xc0\xc0\xc0\x91\xc0\x91\xdd" + struct.pack(">I", 5_000_000)
    headers = lz4.block.compress(head + b"\x92\xa0\xc4\x00" * 5_000_000)
    with pytest.raises(InvalidRecordError, match="bytes of headers"):
        check(sealed({"attributes": 65}, headers), 64 * 2**20)
    head = b"\x95\xc0\xc0\xc0\xdd" + struct.pack(">I", 5_000_000)
    values = lz4.block.compress(head + b"\xc0" * 5_000_001)
    with pytest.raises(InvalidRecordError, match="a column of other length"):
        check(sealed({"attributes": 65}, values), 64 * 2**20)
    monkeypatch.undo()
    large = [bytes(3 * 2**20)] * 2
    assert decode(encode_batch(large, large, [[("a", b"b")], None])).values == large


@pytest.mark.parametrize("what", WRONG_BODIES)
def test_a_leader_takes_no_body_that_readers_could_not_read(what: str) -> None:
    check(sealed({}, KEYED))
    with pytest.raises(InvalidRecordError, match="nothing was written"):
        check(sealed({}, WRONG_BODIES[what]))


@given(mutated_batches())
def test_whatever_a_leader_takes_can_be_read(data: bytes) -> None:
    try:
        check(data)
    except RayqError:
        read_anything(data)
        return
    header = read_header(data)
    columns = decode_columns(data, 0, header)
    assert len(columns.values) == len(columns.offsets) == header.record_count
    assert header.has_null_keys or (columns.keys is not None and None not in columns.keys)


@pytest.mark.slow
@given(record_columns(), st.integers(0), st.binary(min_size=1, max_size=4))
def test_overwritten_bytes_are_noticed_wherever_they_are(records, place, noise) -> None:  # type: ignore[no-untyped-def]
    values, keys, headers, timestamps = records
    data = encode_batch(values, keys, headers, timestamps)
    place %= len(data)
    damaged = bytearray(data)
    damaged[place : place + len(noise)] = noise
    damaged = damaged[: len(data)]
    assert damaged == data or read_anything(bytes(damaged)) is None


def test_a_batch_tells_that_a_record_of_it_is_due_later() -> None:
    headers = [None, [("name", b"x")], [due_header(1_700_000_000_000)]]
    batch = encode_batch([b"a", b"b", b"c"], None, headers)
    _, header = next(split_batches(batch))
    assert header.is_delayed
    found = decode_columns(batch, 0, header).headers
    assert found is not None
    assert [due_ms_of(one) for one in found] == [None, None, 1_700_000_000_000]
    plain = encode_batch([b"a", b"b"], None, headers[:2])
    assert not next(split_batches(plain))[1].is_delayed
    assert due_ms_of([("rayq.due", b"soon")]) is None, "what is no time holds up nothing"

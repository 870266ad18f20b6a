"""Large values, cut and joined: whatever is put together is what was cut, or an error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.client.large.cache import ChunkCache
from rayq.core.large.holds import MOVED_VALUE_MS, OPEN_VALUE_MS_MAX, LargeHolds
from rayq.core.large.values import (
    CHUNK_OFFSETS_MAX,
    Manifest,
    Place,
    check_chunk,
    chunk_headers,
    crc_of,
    cut,
    first_chunk_in,
    join,
    manifest_of_chunks,
    manifest_of_object,
    pinned,
    read_manifest,
    runs,
)
from rayq.errors import InvalidRecordError, LargeValueError, LargeValueRefusedError
from rayq.records import Headers
from rayq.storage.batch import check_produced, encode_batch, read_header

ID = b"0123456789abcdef"
VALUES = st.binary(min_size=1, max_size=200)
OFFSETS = st.lists(st.integers(0, 2**61), min_size=200, max_size=200, unique=True)


@pytest.mark.slow
@given(value=VALUES, chunk_bytes=st.integers(1, 60), offsets=OFFSETS)
def test_a_value_that_was_cut_is_joined_to_the_same(
    value: bytes, chunk_bytes: int, offsets: list[int]
) -> None:
    pieces = [value[start:end] for start, end in cut(len(value), chunk_bytes)]
    assert all(0 < len(piece) <= chunk_bytes for piece in pieces)
    packed = manifest_of_chunks(len(value), crc_of(value), ID, offsets[: len(pieces)])
    manifest = read_manifest(packed, offset=2**62)
    assert manifest.offsets == offsets[: len(pieces)]
    for index in range(len(pieces)):
        check_chunk(manifest, index, chunk_headers(ID, index))
    assert join(manifest, pieces) == value


@given(
    value=VALUES,
    chunk_bytes=st.integers(1, 60),
    order=st.randoms(use_true_random=False),
    lost=st.integers(0, 3),
)
def test_other_pieces_make_the_same_value_or_none(
    value: bytes, chunk_bytes: int, order: object, lost: int
) -> None:
    pieces = [value[start:end] for start, end in cut(len(value), chunk_bytes)]
    packed = manifest_of_chunks(len(value), crc_of(value), ID, list(range(len(pieces))))
    order.shuffle(pieces)  # type: ignore[attr-defined]
    pieces = pieces[lost:] + pieces[: max(lost - 1, 0)]
    try:
        joined = join(read_manifest(packed), pieces)
    except LargeValueError:
        assert b"".join(pieces) != value
    else:
        assert joined == value


@pytest.mark.parametrize(
    ("size_bytes", "chunk_bytes", "expected"),
    [
        (0, 4, []),
        (1, 4, [(0, 1)]),
        (4, 4, [(0, 4)]),
        (5, 4, [(0, 4), (4, 5)]),
        (8, 4, [(0, 4), (4, 8)]),
        (9, 4, [(0, 4), (4, 8), (8, 9)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_value_is_cut_into_full_chunks_and_what_is_left(
    size_bytes: int, chunk_bytes: int, expected: list[tuple[int, int]]
) -> None:
    assert cut(size_bytes, chunk_bytes) == expected


def test_the_crc_of_a_value_is_that_of_everybody() -> None:
    assert crc_of(b"123456789") == crc_of(memoryview(b"123456789")) == 0xE3069283


def test_a_manifest_is_stored_as_it_is_said_and_read_as_it_was_stored() -> None:
    """Other versions read these bytes, too."""
    chunks = manifest_of_chunks(300, 7, ID, [5, 6, 4, 100])
    assert msgspec.msgpack.decode(chunks) == [1, 300, 7, ID, [5, 1, -2, 96], None, None]
    assert read_manifest(chunks) == Manifest(1, 300, 7, ID, offset_steps=[5, 1, -2, 96])
    assert read_manifest(chunks).offsets == [5, 6, 4, 100]
    copied = pinned(chunks, "t", "T", 3)
    assert copied is not None
    assert msgspec.msgpack.decode(copied) == [1, 300, 7, ID, [5, 1, -2, 96], ["t", "T", 3], None]
    assert read_manifest(copied) == Manifest(
        1, 300, 7, ID, offset_steps=[5, 1, -2, 96], place=Place("t", "T", 3)
    )
    there = manifest_of_object(300, 7, ID, "s3://b/o")
    assert msgspec.msgpack.decode(there) == [1, 300, 7, ID, None, None, "s3://b/o"]
    [(name, data)] = chunk_headers(ID, 4)
    assert (name, msgspec.msgpack.decode(data)) == ("rayq.chunk", [ID, 4])


HERE = Manifest(1, 300, 7, ID, [3, 1, 2])
THERE = Place("t", "T", 0)


@pytest.mark.parametrize(
    ("change", "offset", "is_possible"),
    [
        ({}, None, True),
        ({}, 7, True),  # Its last chunk is at 6.
        ({}, 6, False),
        ({"offset_steps": [6, -2]}, 7, True),
        ({"offset_steps": [6, -2]}, 6, False),
        ({"place": THERE}, 3, True),  # Offsets of another log.
        ({"place": msgspec.structs.replace(THERE, partition=-1)}, 3, False),
        ({"size_bytes": 3}, None, True),
        ({"size_bytes": 2}, None, False),
        ({"size_bytes": 0, "offset_steps": None, "uri": "u"}, None, False),
        ({"size_bytes": 1, "offset_steps": None, "uri": "u"}, None, True),
        ({"size_bytes": 1, "offset_steps": [], "uri": "u"}, 0, True),
        ({"uri": "u"}, None, False),
        ({"offset_steps": None}, None, False),
        ({"offset_steps": []}, None, False),
        ({"offset_steps": [3, 0]}, None, False),
        ({"offset_steps": [3, 2, -2]}, None, False),
        ({"offset_steps": [0]}, None, True),
        ({"offset_steps": [0]}, 1, True),
        ({"offset_steps": [0]}, 0, False),
        ({"offset_steps": [-1]}, None, False),
        ({"offset_steps": [0, -1]}, None, False),
        ({"value_id": ID[1:]}, None, False),
        ({"value_id": ID + b"x"}, None, False),
        ({"size_bytes": 10**6, "offset_steps": [1] * CHUNK_OFFSETS_MAX}, None, True),
        ({"size_bytes": 10**6, "offset_steps": [1] * (CHUNK_OFFSETS_MAX + 1)}, None, False),
        ({"place": THERE, "offset_steps": [2**62]}, None, False),
        ({"place": THERE, "offset_steps": [2**63, 2**63]}, None, False),
        ({"place": msgspec.structs.replace(THERE, topic="")}, None, False),
        ({"place": msgspec.structs.replace(THERE, topic="t" * 201)}, None, False),
    ],
)
def test_a_manifest_names_what_can_be_or_is_refused(
    change: dict[str, Any], offset: int | None, is_possible: bool
) -> None:
    manifest = msgspec.structs.replace(HERE, **change)
    packed = msgspec.msgpack.encode(manifest)
    if is_possible:
        assert read_manifest(packed, offset=offset) == manifest
    else:
        with pytest.raises(LargeValueError, match="cannot be|it is none"):
            read_manifest(packed, offset=offset)


def test_what_is_no_manifest_and_one_of_another_version_are_told_apart() -> None:
    for value in (None, b"", b"x", b"\x91\x01"):
        with pytest.raises(LargeValueError, match="it is none"):
            read_manifest(value)
    for version in (0, 2):
        newer = msgspec.msgpack.encode(msgspec.structs.replace(HERE, version=version))
        for manifest in (newer, msgspec.msgpack.encode([version, "other", {}])):
            with pytest.raises(LargeValueRefusedError, match=f"version {version}; this rayq reads"):
                read_manifest(manifest)


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (chunk_headers(ID, 2), None),
        ([("other", b""), *chunk_headers(ID, 2)], None),
        (chunk_headers(ID, 1), "chunk 1 of the value"),
        (chunk_headers(ID, 3), "chunk 3 of the value"),
        (chunk_headers(ID[::-1], 2), f"{ID[::-1].hex()}, and it is {ID.hex()}"),
        (None, "no header"),
        ([], "no header"),
        ([("other", chunk_headers(ID, 2)[0][1])], "no header"),
        ([("rayq.chunk", b"x")], "no header"),
    ],
)
def test_a_chunk_is_taken_for_that_of_its_value_and_number_only(
    headers: Headers | None, said: str | None
) -> None:
    if said is None:
        check_chunk(HERE, 2, headers)
    else:
        with pytest.raises(LargeValueError, match=said):
            check_chunk(HERE, 2, headers)


def test_pieces_that_make_another_value_are_told_by_size_or_by_crc() -> None:
    manifest = read_manifest(manifest_of_chunks(4, crc_of(b"abcd"), ID, [1, 2]))
    assert join(manifest, [b"ab", memoryview(b"cd")]) == b"abcd"
    for pieces in ([b"ab", b"c"], [b"abc", b"de"], []):
        with pytest.raises(LargeValueError, match=f"{len(b''.join(pieces))} bytes.* have 4"):
            join(manifest, pieces)
    with pytest.raises(LargeValueError, match="CRC32C"):
        join(manifest, [b"cd", b"ab"])


@given(data=st.binary(max_size=80), position=st.integers(0, 60), byte=st.integers(0, 255))
def test_no_bytes_make_a_reader_fail_otherwise(data: bytes, position: int, byte: int) -> None:
    changed = bytearray(manifest_of_chunks(300, 7, ID, [3, 4, 6]))
    changed[position % len(changed)] = byte
    for manifest in (data, bytes(changed)):
        try:
            found = read_manifest(manifest, offset=10)
        except (LargeValueError, LargeValueRefusedError):
            continue
        assert isinstance(found, Manifest) and all(0 <= one < 10 for one in found.offsets)
    with pytest.raises(LargeValueError):
        read_manifest(manifest_of_chunks(2, 7, ID, [3, 4, 6]))
    for headers in (None, [], [("rayq.chunk", data)], [("other", b"")]):
        with pytest.raises(LargeValueError):
            check_chunk(read_manifest(manifest_of_chunks(300, 7, ID, [3])), 0, headers)


@given(data=st.binary(max_size=40))
def test_a_copy_of_anything_else_stays_as_it_is(data: bytes) -> None:
    assert pinned(data, "t", "id", 0) == data
    manifest = manifest_of_chunks(300, 7, ID, [3, 4])
    place = read_manifest(pinned(manifest, "t", "id", 5)).place
    assert place is not None and (place.topic, place.topic_id, place.partition) == ("t", "id", 5)
    # Copied once more, the chunks are still where they were; an object has no partition.
    copied = pinned(manifest, "t", "id", 5)
    assert pinned(copied, "u", "other", 6) == copied
    there = manifest_of_object(9, 1, ID, "s3://b/o")
    assert pinned(there, "t", "id", 5) == there
    assert pinned(None, "t", "id", 5) is None


def test_a_manifest_names_the_first_chunk_of_its_own_partition_only() -> None:
    here = manifest_of_chunks(9, 1, ID, [7, 5, 6])
    assert first_chunk_in(here, "T", 0) == 5
    there = pinned(here, "t", "T", 1)
    assert [first_chunk_in(there, *at) for at in (("T", 1), ("T", 0), ("U", 1))] == [5, None, None]
    assert first_chunk_in(manifest_of_object(9, 1, ID, "s3://b/o"), "T", 0) is None
    assert first_chunk_in(b"none", "T", 0) is None


def test_a_manifest_of_an_object_is_read_as_it_was_written() -> None:
    found = read_manifest(manifest_of_object(9, 1, ID, "s3://b/o"))
    assert (found.size_bytes, found.crc, found.value_id, found.uri) == (9, 1, ID, "s3://b/o")
    assert found.offsets == [] and found.place is None


def test_offsets_without_gaps_are_one_run() -> None:
    assert runs([4, 7, 3, 5, 9]) == [range(3, 6), range(7, 8), range(9, 10)]
    assert runs([]) == []
    assert runs([0]) == [range(1)]
    assert runs([8, 6]) == [range(6, 7), range(8, 9)]
    assert runs([1, 2, 3, 5, 6]) == [range(1, 4), range(5, 7)]


def test_a_leader_refuses_batches_that_are_both_or_have_company() -> None:
    for attributes in ({"is_large": True}, {"is_chunk": True}):
        check_produced(read_header(encode_batch([b"x"], **attributes)))
        header = read_header(encode_batch([b"x", b"y"]))
        alone = read_header(encode_batch([b"x"], **attributes))
        both = read_header(encode_batch([b"x"], is_large=True, is_chunk=True))
        together = msgspec.structs.replace(header, attributes=alone.attributes)
        for wrong in (together, both):
            with pytest.raises(InvalidRecordError, match="large value"):
                check_produced(wrong)


def test_the_cache_keeps_what_came_last_and_gives_it_once() -> None:
    cache = ChunkCache(bytes_max=10)
    for offset in range(4):
        cache.add(("t", 0, offset), b"1234")
    assert [cache.take(("t", 0, offset)) for offset in range(4)] == [None, None, b"1234", b"1234"]
    assert cache.take(("t", 0, 3)) is None
    cache.add(("t", 0, 9), b"0123456789")
    assert cache.take(("t", 0, 9)) == b"0123456789", "nothing else counts any more"


def test_the_log_start_waits_for_the_manifests_of_chunks() -> None:
    holds = LargeHolds()
    for offset in (10, 11, 15):
        holds.chunk(offset, append_time_ms=1000)
    assert holds.floor(20, now_ms=1000) == 10, "its record may be on its way"
    holds.large(16, first_chunk=10)
    late_ms = 1000 + 2 * OPEN_VALUE_MS_MAX
    assert holds.floor(16, late_ms) == 10, "its record is not settled"
    assert holds.floor(17, late_ms) == 17
    holds.chunk(30, append_time_ms=late_ms)
    assert holds.floor(25, late_ms) == 25, "no hold goes beyond the start of the queue"


def test_what_is_held_and_for_how_long_is_kept_in_few_words() -> None:
    holds = LargeHolds()
    assert (holds.kept(), holds.floor(7, now_ms=0)) == ([], 7)
    # An hour, in steps of an eighth of it.
    eighth_ms = OPEN_VALUE_MS_MAX // 8
    for offset, append_time_ms in ((5, 0), (8, 1), (9, eighth_ms), (6, 2), (4, eighth_ms + 1)):
        holds.chunk(offset, append_time_ms)
    holds.moved(2, now_ms=0)
    holds.moved(3, now_ms=MOVED_VALUE_MS // 8)
    timed = [
        (5, 0, 8 * eighth_ms),
        (6, 0, 9 * eighth_ms),
        (4, 0, 10 * eighth_ms),
        (2, 0, MOVED_VALUE_MS),
        (3, 0, MOVED_VALUE_MS // 8 * 9),
    ]
    assert holds.kept() == timed
    holds.large(20, first_chunk=11)
    assert holds.kept() == [*timed, (11, 21, 0)]
    holds.large(18, first_chunk=7)
    assert holds.kept() == [*timed, (7, 21, 0)], "of all values the first chunk and the last end"
    assert LargeHolds(holds.kept()).kept() == holds.kept()


def test_chunks_are_kept_for_an_hour_and_those_of_a_moved_record_for_a_week() -> None:
    """As operators are told (docs/queues.md; rule 58)."""
    hour_ms = 60 * 60 * 1000
    week_ms = 7 * 24 * hour_ms
    holds = LargeHolds()
    holds.chunk(5, append_time_ms=0)
    assert [holds.floor(40, now_ms) for now_ms in (hour_ms, hour_ms + 1)] == [5, 40]
    holds.moved(5, now_ms=0)
    assert [holds.floor(40, now_ms) for now_ms in (week_ms, week_ms + 1)] == [5, 40]


def test_a_hold_ends_with_its_time_or_with_the_record_and_no_sooner() -> None:
    holds = LargeHolds()
    holds.chunk(5, 0)
    holds.moved(2, now_ms=0)
    for now_ms, floor in (
        (0, 2),
        (OPEN_VALUE_MS_MAX, 2),
        (MOVED_VALUE_MS, 2),
        (MOVED_VALUE_MS + 1, 40),
    ):
        assert holds.floor(40, now_ms) == floor
    holds = LargeHolds([(5, 0, 1000), (8, 21, 0)])
    assert holds.floor(3, 1000) == 3, "nothing goes beyond the start of the queue"
    assert holds.floor(40, 1000) == 5
    assert holds.kept() == [(5, 0, 1000)], "its records are settled"
    assert holds.floor(40, 1001) == 40 and holds.kept() == []
    # Values whose chunks lie between each other's.
    holds = LargeHolds()
    holds.large(20, first_chunk=10)
    holds.large(30, first_chunk=5)
    assert [holds.floor(start, 0) for start in (4, 9, 20, 21, 30, 31)] == [4, 5, 5, 5, 5, 31]
    holds.large(30, first_chunk=12)
    holds.large(20, first_chunk=10)
    assert [holds.floor(start, 0) for start in (11, 20, 21, 30, 31)] == [10, 10, 12, 12, 31]


@given(
    told=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 4 * OPEN_VALUE_MS_MAX)), max_size=40),
    manifests=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), max_size=10),
    moved=st.integers(0, 999),
    start=st.integers(0, 1200),
)
def test_a_later_leader_holds_what_the_one_before_held(
    told: list[tuple[int, int]], manifests: list[tuple[int, int]], moved: int, start: int
) -> None:
    holds = LargeHolds()
    for offset, append_time_ms in told:
        holds.chunk(offset, append_time_ms)
    for offset, first_chunk in manifests:
        holds.large(offset, min(offset, first_chunk))
    holds.moved(moved, now_ms=OPEN_VALUE_MS_MAX)
    now_ms = 3 * OPEN_VALUE_MS_MAX
    kept = holds.kept()
    assert len(kept) < 50, "it is small, whatever was told"
    later = LargeHolds(kept)
    assert later.kept() == kept
    floor = holds.floor(start, now_ms)
    assert later.floor(start, now_ms) <= floor <= min(start, moved)
    for offset, append_time_ms in told:
        assert floor <= offset or append_time_ms + OPEN_VALUE_MS_MAX < now_ms
    for offset, first_chunk in manifests:
        assert floor <= min(offset, first_chunk) or offset < start
    late_ms = now_ms + 2 * MOVED_VALUE_MS
    assert later.floor(1000, late_ms) == 1000 == holds.floor(1000, late_ms)

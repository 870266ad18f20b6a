"""Large values, cut and joined: whatever is put together is what was cut, or an error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.client.large.cache import ChunkCache
from rayq.core.large_holds import MOVED_VALUE_MS, OPEN_VALUE_MS_MAX, LargeHolds
from rayq.core.large_values import (
    Manifest,
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
from rayq.errors import InvalidRecordError, LargeValueError
from rayq.storage.batch import check_produced, encode_batch, read_header

ID = b"0123456789abcdef"
VALUES = st.binary(min_size=1, max_size=200)
OFFSETS = st.lists(st.integers(0, 2**61), min_size=200, max_size=200, unique=True)


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


@given(data=st.binary(max_size=80), position=st.integers(0, 60), byte=st.integers(0, 255))
def test_no_bytes_make_a_reader_fail_otherwise(data: bytes, position: int, byte: int) -> None:
    changed = bytearray(manifest_of_chunks(300, 7, ID, [3, 4, 6]))
    changed[position % len(changed)] = byte
    for manifest in (data, bytes(changed)):
        try:
            found = read_manifest(manifest, offset=10)
        except LargeValueError:
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

"""Records of `__consumer_offsets`: records that are written are read, and no other bytes are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayq.core.groups.records import (
    EndedRecord,
    EndedTransaction,
    GroupRecord,
    GroupValue,
    MemberRecord,
    MemberValue,
    OffsetRecord,
    OffsetValue,
    PendingOffset,
    PendingRecord,
    Record,
    decode,
    encode,
    partition_of_group,
)
from rayq.errors import CorruptBatchError, UnsupportedFormatError

names = st.text(max_size=8)
numbers = st.integers(0, 2**62)
partitions = st.frozensets(st.tuples(st.sampled_from(["t", "u"]), st.integers(0, 9)), max_size=6)
values = st.builds(
    MemberValue, st.none() | names, names, st.lists(names, max_size=3).map(tuple), st.none() | names, names,
    numbers, numbers, numbers, numbers, partitions, partitions, partitions, principal=st.just(None),
) | st.builds(
    MemberValue, st.none(), names, st.just(()), names, names, numbers, numbers,
    target=partitions, principal=names, host=names,
)
records = st.one_of(
    st.builds(GroupRecord, names, st.none() | st.builds(GroupValue, names, numbers, names, numbers, st.none() | numbers)),
    st.builds(MemberRecord, names, names, st.none() | values),
    st.builds(
        OffsetRecord, names, names, st.integers(0, 999),
        st.none() | st.builds(OffsetValue, numbers, st.none() | numbers, names, numbers),
    ),
    st.builds(
        PendingRecord, names, names, st.integers(0, 999),
        st.none() | st.builds(
            PendingOffset, numbers, numbers, names, numbers, numbers, st.none() | numbers, names
        ),
    ),
    st.builds(
        EndedRecord, numbers, st.none() | st.builds(EndedTransaction, numbers, numbers, numbers)
    ),
)


@given(records)
@example(MemberRecord("g", "m", MemberValue(
    "i", "c", ("t", "u"), "p", "a", 1, 2, 3, 4,
    frozenset({("t", 0), ("t", 1), ("u", 1)}), frozenset({("t", 0)}), frozenset({("u", 2)}),
)))
def test_what_is_encoded_is_decoded(record: Record) -> None:
    assert decode(*encode(record)) == record


MEMBER = MemberValue(
    "i", "c", ("t", "u"), "p", "a", 1, 2, 3, 4,
    frozenset({("u", 1), ("t", 10), ("t", 9)}), frozenset({("t", 9)}), frozenset({("u", 2)}),
)


@pytest.mark.parametrize(
    "record, key, value",
    [
        (GroupRecord("g", None), ["group", "g"], None),
        (GroupRecord("g", GroupValue("a", 1, "r", 2, 3)), ["group", "g"], [1, "a", 1, "r", 2, 3]),
        (GroupRecord("g", GroupValue()), ["group", "g"], [1, "uniform", 0, "", 0, None]),
        (MemberRecord("g", "m", None), ["member", "g", "m"], None),
        (
            MemberRecord("g", "m", MEMBER),
            ["member", "g", "m"],
            [
                1, "i", "c", ["t", "u"], "p", "a", 1, 2, 3, 4,
                [["t", [9, 10]], ["u", [1]]], [["t", [9]]], [["u", [2]]],
            ],
        ),
        (
            MemberRecord("g", "m", MemberValue(None, "c", (), None, "a", 1, 2)),
            ["member", "g", "m"],
            [1, None, "c", [], None, "a", 1, 2, 0, 0, [], [], []],
        ),
        (
            MemberRecord("g", "m", MemberValue(None, "c", (), "p.*", "a", 1, 2, principal="n", host="h")),
            ["member", "g", "m"],
            [1, None, "c", [], "p.*", "a", 1, 2, 0, 0, [], [], [], "n", "h"],
        ),
        (OffsetRecord("g", "t", 4, None), ["offset", "g", "t", 4], None),
        (
            OffsetRecord("g", "t", 4, OffsetValue(5, 6, "note", 7)),
            ["offset", "g", "t", 4],
            [1, 5, 6, "note", 7],
        ),
        (PendingRecord("g", "t", 4, None), ["pending", "g", "t", 4], None),
        (
            PendingRecord("g", "t", 4, PendingOffset(1, 2, "m", 3, 4, None, "note")),
            ["pending", "g", "t", 4],
            [1, 1, 2, "m", 3, 4, None, "note"],
        ),
        (EndedRecord(9, None), ["ended", 9], None),
        (EndedRecord(9, EndedTransaction(1, 2, 3)), ["ended", 9], [1, 1, 2, 3]),
    ],
)
def test_what_stands_in_the_log_stays_readable(record: Record, key: Any, value: Any) -> None:
    written = msgspec.msgpack.encode(key), None if value is None else msgspec.msgpack.encode(value)
    assert encode(record) == written
    assert decode(*written) == record


@pytest.mark.parametrize(
    "key, value",
    [
        (None, None), (["group"], None), (["id", "i"], None), (["offset", "g", "t"], None),
        (["group", "g"], []), (["group", "g"], [1]), (["group", "g"], ["1", "a", 1, "r", 2, 3]),
        (["member", "g", "m"], [1, 5, 6, "note", 7]), (["offset", "g", "t", 4], [1, 5, 6, "note"]),
        (["pending", "g", "t", 4], [1, 2, 3]), (["ended", 9], [1, None, 2, 3]),
    ],
)
def test_what_is_no_record_of_groups_is_named(key: Any, value: Any) -> None:
    written = None if key is None else msgspec.msgpack.encode(key)
    with pytest.raises(CorruptBatchError) as caught:
        decode(written, None if value is None else msgspec.msgpack.encode(value))
    assert f"A record of __consumer_offsets with key {written!r} is not a group's" in str(caught.value)


def test_a_group_has_its_partition_forever() -> None:
    """By the crc32 of its name: another number would lose the positions that are committed."""
    assert [partition_of_group(name, 50) for name in ("", "g", "orders", "größe")] == [0, 28, 12, 3]
    assert {partition_of_group(str(number), 3) for number in range(20)} == {0, 1, 2}
    assert partition_of_group("orders", 1) == 0


@given(st.none() | st.binary(max_size=30), st.none() | st.binary(max_size=30))
@example(b"\x91\xa3\x00\x00\x80", None)  # not UTF-8
def test_other_bytes_are_an_error_that_says_so(key: bytes | None, value: bytes | None) -> None:
    try:
        decode(key, value)
    except (CorruptBatchError, UnsupportedFormatError):
        pass


def test_a_value_of_a_newer_rayq_is_refused() -> None:
    key, _ = encode(GroupRecord("g", None))
    with pytest.raises(UnsupportedFormatError, match="newer"):
        decode(key, msgspec.msgpack.encode([2, "whatever"]))


def test_fields_that_were_appended_later_are_passed_over() -> None:
    key, value = encode(GroupRecord("g", GroupValue(epoch=3)))
    assert value is not None
    fields = msgspec.msgpack.decode(value)
    assert decode(key, msgspec.msgpack.encode([*fields, "more"])) == GroupRecord("g", GroupValue(epoch=3))

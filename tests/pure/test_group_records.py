"""Records of `__consumer_offsets`: records that are written are read, and no other bytes are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayq.core.group_records import (
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
)
from rayq.errors import CorruptBatchError, UnsupportedFormatError

names = st.text(max_size=8)
numbers = st.integers(0, 2**62)
partitions = st.frozensets(st.tuples(st.sampled_from(["t", "u"]), st.integers(0, 9)), max_size=6)
values = st.builds(
    MemberValue, st.none() | names, names, st.lists(names, max_size=3).map(tuple), st.none() | names, names,
    numbers, numbers, numbers, numbers, partitions, partitions, partitions,
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

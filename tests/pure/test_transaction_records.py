"""Records of `__transaction_state`: records that are written are read, and no other bytes are."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayq.core.transactions.records import (
    IdRecord,
    IdValue,
    Outcome,
    Record,
    State,
    TransactionKey,
    TransactionRecord,
    TransactionValue,
    decode,
    encode,
)
from rayq.errors import CorruptBatchError, UnsupportedFormatError
from rayq.messages import OUTCOMES_OVER

names = st.text(max_size=8)
numbers = st.integers(0, 2**62)
keys = st.builds(TransactionKey, numbers, st.integers(0, 65_535))
partitions = st.frozensets(st.tuples(st.sampled_from(["t", "u"]), st.integers(0, 9)), max_size=6)
records = st.one_of(
    st.builds(
        IdRecord,
        names,
        st.none()
        | st.builds(
            IdValue, names, numbers, keys, numbers, st.none() | st.builds(Outcome, keys, st.booleans()),
            st.none() | names, st.lists(names, max_size=3).map(tuple), st.none() | names,
        ),
    ),
    st.builds(
        TransactionRecord,
        keys,
        st.none()
        | st.builds(
            TransactionValue,
            names,
            st.sampled_from(["open", "sealed", "committing", "aborting"]),
            numbers,
            partitions,
            st.booleans(),
        ),
    ),
)


@given(records)
def test_what_is_encoded_is_decoded(record: Record) -> None:
    found = decode(*encode(record))
    assert found == record
    if isinstance(found, IdRecord) and found.value is not None and found.value.last is not None:
        assert isinstance(found.value.next, TransactionKey)
        assert isinstance(found.value.last.key, TransactionKey)


KEY = TransactionKey(9, 5)
OPEN = TransactionValue("i", "open", 7, frozenset([("u", 1), ("t", 2), ("t", 0)]))


@pytest.mark.parametrize(
    "record, key, value",
    [
        (IdRecord("i", None), ["id", "i"], None),
        (IdRecord("i", IdValue("o", 1, KEY, 2)), ["id", "i"], [1, "o", 1, [9, 5], 2, None, None, [], None]),
        (
            IdRecord("i", IdValue("o", 1, KEY, 2, Outcome(TransactionKey(9, 4), True), "n", ("p", "q"))),
            ["id", "i"],
            [1, "o", 1, [9, 5], 2, [[9, 4], True], "n", ["p", "q"], None],
        ),
        (TransactionRecord(KEY, None), ["transaction", 9, 5], None),
        (
            TransactionRecord(KEY, OPEN),
            ["transaction", 9, 5],
            [1, "i", "open", 7, {"t": [0, 2], "u": [1]}, False],
        ),
        (
            TransactionRecord(KEY, TransactionValue("i", "sealed", 7, frozenset(), True)),
            ["transaction", 9, 5],
            [1, "i", "sealed", 7, {}, True],
        ),
    ],
)
def test_what_stands_in_the_log_stays_readable(record: Record, key: Any, value: Any) -> None:
    written = msgspec.msgpack.encode(key), None if value is None else msgspec.msgpack.encode(value)
    assert encode(record) == written
    assert decode(*written) == record


def test_an_id_that_an_older_rayq_wrote_belongs_to_a_superuser() -> None:
    value = msgspec.msgpack.encode([1, "o", 1, [9, 5], 2, None, None, []])
    expected = IdRecord("i", IdValue("o", 1, KEY, 2))
    assert decode(encode(expected)[0], value) == expected
    owned = IdRecord("i", IdValue("o", 1, KEY, 2, principal="orders"))
    assert decode(*encode(owned)) == owned


def test_a_transaction_of_an_older_rayq_was_never_touched() -> None:
    value = msgspec.msgpack.encode([1, "i", "open", 7, {"t": [0, 2], "u": [1]}])
    assert decode(encode(TransactionRecord(KEY, None))[0], value) == TransactionRecord(KEY, OPEN)


@pytest.mark.parametrize(
    "key, value",
    [
        (None, None), (["id"], None), (["group", "g"], None), (["transaction", 1], None),
        (["id", "i"], [1]), (["id", "i"], []), (["id", "i"], ["1", "o", 1, [9, 5], 2, None, None, []]),
        (["transaction", 9, 5], [1, "i", "lost", 7, {}, False]),
        (["transaction", 9, 5], [1, "i", "open", 7, [], False]),
    ],
)
def test_what_is_no_record_of_transactions_is_named(key: Any, value: Any) -> None:
    written = None if key is None else msgspec.msgpack.encode(key)
    with pytest.raises(CorruptBatchError) as caught:
        decode(written, None if value is None else msgspec.msgpack.encode(value))
    assert f"A record of __transaction_state with key {written!r} is not a transaction's" in str(caught.value)


@pytest.mark.parametrize(
    "state, is_decided", [("open", False), ("sealed", False), ("committing", True), ("aborting", True)]
)
def test_a_transaction_is_decided_from_its_end_on(state: State, is_decided: bool) -> None:
    assert TransactionValue("i", state, 7, frozenset()).is_decided is is_decided


def test_whoever_asks_for_an_outcome_knows_each_state_of_what_is_under_way() -> None:
    assert not set(get_args(State)) & set(OUTCOMES_OVER), "else a leader takes it for ended"


@given(st.none() | st.binary(max_size=30), st.none() | st.binary(max_size=30))
@example(b"\x92\xa2id\xa3\x00\x00\x80", None)  # not UTF-8
def test_other_bytes_are_an_error_that_says_so(key: bytes | None, value: bytes | None) -> None:
    try:
        decode(key, value)
    except (CorruptBatchError, UnsupportedFormatError):
        pass


def test_a_value_of_a_newer_rayq_is_refused() -> None:
    key, _ = encode(IdRecord("i", None))
    with pytest.raises(UnsupportedFormatError, match="newer"):
        decode(key, msgspec.msgpack.encode([2, "whatever"]))


def test_fields_that_were_appended_later_are_passed_over() -> None:
    record = TransactionRecord(
        TransactionKey(1, 2), TransactionValue("i", "open", 3, frozenset([("t", 0)]))
    )
    key, value = encode(record)
    assert value is not None
    fields = msgspec.msgpack.decode(value)
    assert decode(key, msgspec.msgpack.encode([*fields, "more"])) == record

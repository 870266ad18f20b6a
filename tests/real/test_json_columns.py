"""JSON objects as typed columns: which objects parse, which do not and why, each record by
itself."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.data.json_columns import JsonColumns
from rayq.errors import InvalidRequestError

FLIGHT = pa.schema([("carrier", pa.string()), ("number", pa.int32()), ("delay", pa.float64())])
NUMBERS = st.none() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = NUMBERS | st.booleans() | st.text() | st.lists(st.integers()) | st.just({})


def parse_one(kind: pa.DataType, text: str) -> tuple[Any, str | None]:
    """The value of the field `x`, and its error."""
    (column,), (error,) = JsonColumns(pa.schema([("x", kind)])).parse([f'{{"x":{text}}}'.encode()])
    assert column.type == kind
    return (column.to_pylist() or [None])[0], error


@pytest.mark.parametrize(
    "kind, text, expected",
    [
        (pa.bool_(), "true", True),
        (pa.int8(), "-128", -128),
        (pa.uint16(), "65535", 65535),
        (pa.int64(), str(2**63 - 1), 2**63 - 1),
        (pa.uint64(), str(2**64 - 1), 2**64 - 1),
        (pa.float64(), "7", 7.0),
        (pa.float32(), "0.5", 0.5),
        (pa.large_string(), '"\\u00e9"', "é"),
        (pa.decimal128(6, 2), '"12.50"', Decimal("12.50")),
        (pa.decimal128(6, 2), "12.5", Decimal("12.50")),
        (pa.timestamp("ms"), '"2026-01-02T03:04:05"', datetime(2026, 1, 2, 3, 4, 5)),
        (
            pa.timestamp("us", tz="UTC"),
            '"2026-01-02T04:04:05+01:00"',
            datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        ),
        (pa.date32(), '"2026-01-02"', date(2026, 1, 2)),
        (pa.binary(), '"aGk="', b"hi"),
        (pa.list_(pa.int64()), "[1,null]", [1, None]),
        (pa.struct([("a", pa.int64()), ("b", pa.string())]), '{"a":1}', {"a": 1, "b": None}),
        (pa.map_(pa.string(), pa.float64()), '{"a":1}', [("a", 1.0)]),
        (pa.int64(), "null", None),
    ],
)
def test_values_become_what_the_schema_says(kind: pa.DataType, text: str, expected: object) -> None:
    assert parse_one(kind, text) == (expected, None)


@pytest.mark.parametrize(
    "kind, text",
    [
        (pa.int8(), "128"),
        (pa.uint8(), "-1"),
        (pa.int64(), str(2**63)),
        (pa.uint64(), str(2**64)),
        (pa.int64(), "1.5"),
        (pa.int64(), '"1"'),
        (pa.int64(), "true"),
        (pa.float64(), "NaN"),
        (pa.string(), "1"),
        (pa.string(), '"\\ud800"'),
        (pa.decimal128(4, 2), "123.45"),
        (pa.timestamp("ms"), '"2026-01-02T03:04:05Z"'),
        (pa.timestamp("ns", tz="UTC"), '"2926-01-02T03:04:05Z"'),
        (pa.binary(), '"??"'),
        (pa.list_(pa.int32()), "[3000000000]"),
        (pa.struct([("a", pa.int64())]), "[]"),
    ],
)
def test_what_is_not_of_the_type_is_told(kind: pa.DataType, text: str) -> None:
    _, error = parse_one(kind, text)
    assert error


def test_a_field_that_must_be_there_is_missed() -> None:
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    (column,), errors = JsonColumns(schema).parse([b'{"x":1}', b"{}", b'{"x":null}'])
    assert column.to_pylist() == [1]
    assert errors[0] is None
    assert all("missing" in (error or "") for error in errors[1:])


def test_one_bad_record_does_not_harm_its_neighbours() -> None:
    values = [b'{"carrier":"UA","number":1}', b"{", b'{"number":2}', b'{"number":"3"}', None]
    (carriers, found, _), errors = JsonColumns(FLIGHT).parse(values)
    assert (carriers.to_pylist(), found.to_pylist()) == (["UA", None], [1, 2])
    assert [error is None for error in errors] == [True, False, True, False, False]


@given(st.lists(st.none() | st.binary() | st.text() | VALUES.map(json.dumps)))
def test_any_value_is_a_row_or_a_dead_letter(values: list[Any]) -> None:
    columns, errors = JsonColumns(FLIGHT).parse(values)
    assert len(errors) == len(values)
    assert {len(column) for column in columns} == {errors.count(None)}


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "carrier": st.none() | st.text(st.characters(codec="utf-8")),
                "number": st.integers(-(2**31), 2**31 - 1),
                "delay": NUMBERS.filter(lambda one: one is None or abs(one) < 1e300),
                "more": VALUES,
            },
        )
    )
)
def test_objects_of_the_schema_all_parse(rows: list[dict[str, Any]]) -> None:
    columns, errors = JsonColumns(FLIGHT).parse([json.dumps(row) for row in rows])
    assert errors == [None] * len(rows)
    for name, column in zip(FLIGHT.names, columns, strict=True):
        assert column.to_pylist() == [row.get(name) for row in rows]


def test_a_schema_that_json_cannot_fill_is_refused() -> None:
    for schema in (pa.schema([]), pa.schema([("x", pa.duration("s"))])):
        with pytest.raises(InvalidRequestError):
            JsonColumns(schema)


def test_a_parser_pickles() -> None:
    again = pickle.loads(pickle.dumps(JsonColumns(FLIGHT)))
    assert again.parse([b"{}"])[1] == [None]

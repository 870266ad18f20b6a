"""JSON values as typed Arrow columns. Each record is parsed by itself, and fails by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec
import pyarrow as pa
from ray.data import Dataset

from rayq.errors import InvalidRequestError

ERROR = "error"
"""The column of dead letters that says why a record does not parse."""


class Parsed(NamedTuple):
    """The two parts of a parsed JSON column. Both are lazy, and each reads its input again:
    `materialize()` the input where you use both."""

    rows: Dataset
    dead_letters: Dataset


def from_json(
    dataset: Dataset, schema: pa.Schema, *, column: str = "value", keep: Sequence[str] = ()
) -> Parsed:
    """Turns a column of JSON objects (binary or string, UTF-8) into the typed columns of `schema`.

    `rows` has the fields of `schema`, behind those columns of the Dataset that `keep` names.
    `dead_letters` has the records that do not parse, with all columns of the Dataset and a column
    `error`: a value that is not JSON, or not an object, or null (a tombstone), or that has a field
    of another type than `schema` says (or beyond its range). A field that is missing, or null, is
    null; fields that `schema` does not name are left out. To keep dead letters::

        parsed = from_json(dataset.materialize(), schema)
        write_topic(parsed.dead_letters, "dead", key="key", header_columns=["error"])

    Types: bool, integers, floats (JSON integers too), strings, decimals (from numbers or strings),
    timestamps (ISO 8601; with a zone where the type has one, without where it has none), date32,
    binary (base64), lists, structs and maps with string keys. Raises InvalidRequestError.
    """
    parser = JsonColumns(schema)
    twice = sorted(set(keep) & set(schema.names))
    if twice or ERROR in keep:
        raise InvalidRequestError(
            f"{', '.join(twice) or ERROR} would be there twice: rename the column before, or leave "
            "it out of keep or of the schema."
        )

    def rows(table: pa.Table) -> pa.Table:
        _check_columns(table, [column, *keep])
        parsed, errors = parser.parse(table.column(column).to_pylist())
        good = pa.array([error is None for error in errors], pa.bool_())
        kept = table.select(list(keep)).filter(good)
        for field, values in zip(schema, parsed, strict=True):
            kept = kept.append_column(field, values)
        return kept

    def dead_letters(table: pa.Table) -> pa.Table:
        _check_columns(table, [column])
        _, errors = parser.parse(table.column(column).to_pylist())
        if ERROR in table.column_names:
            table = table.drop_columns([ERROR])  # It is from an earlier attempt.
        failed = table.append_column(ERROR, pa.array(errors, pa.string()))
        return failed.filter(pa.array([error is not None for error in errors], pa.bool_()))

    def each(change: Callable[[pa.Table], pa.Table]) -> Dataset:
        return dataset.map_batches(
            change, batch_size=None, batch_format="pyarrow", zero_copy_batch=True
        )

    return Parsed(each(rows), each(dead_letters))


def _check_columns(table: pa.Table, wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        raise InvalidRequestError(
            f"There is no column {', '.join(map(repr, missing))}; there are "
            f"{', '.join(map(repr, table.column_names))}."
        )


class JsonColumns:
    """Parses JSON objects into the columns of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        if len(schema) == 0 or len(set(schema.names)) < len(schema):
            raise InvalidRequestError("A schema for JSON has at least one field, each name once.")
        self._schema = schema
        names = [f"f{place}" for place in range(len(schema))]
        kind = msgspec.defstruct(
            "JsonRecord",
            [
                (name, _python_type(field.type, field.name) | None, None)
                for name, field in zip(names, schema, strict=True)
            ],
            rename=dict(zip(names, schema.names, strict=True)),
        )
        self._decoder = msgspec.json.Decoder(kind)
        self._names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonColumns, (self._schema,)

    def parse(
        self, values: Sequence[bytes | str | None]
    ) -> tuple[list[pa.Array], list[str | None]]:
        """The columns of the values that parse, and for each value its error, or None."""
        errors: list[str | None] = [None] * len(values)
        places: list[int] = []
        found: list[Any] = []
        decode = self._decoder.decode
        for place, value in enumerate(values):
            if value is None:
                errors[place] = "the value is null"
                continue
            try:
                found.append(decode(value))
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                errors[place] = str(error)
            else:
                places.append(place)
        while True:
            columns: list[pa.Array] = []
            for name, field in zip(self._names, self._schema, strict=True):
                items = [getattr(record, name) for record in found]
                try:
                    columns.append(_column(items, field))
                except _NOT_OF_TYPE as error:
                    failure = error
                    break
            else:
                return columns, errors
            # This is rare: a field has values that are too large for its type. These are removed.
            before = len(found)
            for index in reversed(range(before)):
                try:
                    _column([getattr(found[index], name)], field)
                except _NOT_OF_TYPE as error:
                    errors[places[index]] = f"{error} - at `$.{field.name}`"
                    del found[index], places[index]
            if len(found) == before:
                raise failure  # Each value fits, but all together are too large for Arrow.


_NOT_OF_TYPE = (pa.ArrowException, OverflowError, ValueError, UnicodeError)


def _column(items: list[Any], field: pa.Field) -> pa.Array:
    column = pa.array(items, field.type)
    if not field.nullable and column.null_count:
        raise ValueError("Object missing required field, or it is null")
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _python_type(kind: pa.DataType, name: str) -> Any:
    """The type to which msgspec decodes for `pa.array`. Raises InvalidRequestError."""
    is_ = pa.types
    if is_.is_boolean(kind):
        return bool
    if is_.is_integer(kind):
        if kind.bit_width == 64:
            return int  # pyarrow refuses larger numbers: msgspec has no such limits.
        bits = kind.bit_width - (0 if is_.is_unsigned_integer(kind) else 1)
        least = 0 if is_.is_unsigned_integer(kind) else -(2**bits)
        return Annotated[int, msgspec.Meta(ge=least, le=2**bits - 1)]
    if is_.is_floating(kind) and kind.bit_width > 16:
        return float
    if is_.is_string(kind) or is_.is_large_string(kind):
        return str
    if is_.is_binary(kind) or is_.is_large_binary(kind):
        return bytes
    if is_.is_decimal(kind):
        return Decimal
    if is_.is_timestamp(kind):
        return Annotated[datetime, msgspec.Meta(tz=kind.tz is not None)]
    if is_.is_date32(kind):
        return date
    if is_.is_list(kind) or is_.is_large_list(kind):
        return list[_python_type(kind.value_type, name) | None]  # type: ignore[misc]
    if is_.is_struct(kind):
        fields = {f.name: _python_type(f.type, f"{name}.{f.name}") | None for f in kind}
        return TypedDict("JsonStruct", fields, total=False)  # type: ignore[operator]
    if is_.is_map(kind) and is_.is_string(kind.key_type):
        return dict[str, _python_type(kind.item_type, name) | None]  # type: ignore[misc]
    raise InvalidRequestError(
        f"JSON does not become {kind} (the field {name!r}): take a string and convert it later."
    )

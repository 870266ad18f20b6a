"""Rows that a task writes, as they arrive from Arrow. Needs the extra `arrow`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rayq.client.consuming.arrow import load_pyarrow
from rayq.errors import InvalidRequestError
from rayq.records import Headers

COLUMNS = ("key", "value", "partition", "timestamp", "headers")
"""The columns that may be written. Only `value` is required."""
ROWS_AT_A_TIME = 8192
"""Number of rows that are turned from Arrow into Python objects at once."""


class TaskRows(NamedTuple):
    """A number of rows, column by column; None for a missing column."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    partitions: list[int | None] | None
    timestamps_ms: list[int | None] | None
    headers: list[Headers | None] | None


def rows_of(batches: Iterable[Any]) -> Iterator[TaskRows]:
    """The rows of RecordBatches or Tables, in parts. Raises InvalidRequestError for other columns
    or types."""
    pa = load_pyarrow()
    for given in batches:
        if not isinstance(given, (pa.RecordBatch, pa.Table)):
            raise InvalidRequestError(
                f"What is written are pyarrow RecordBatches or Tables, not {type(given).__name__}."
            )
        names = given.schema.names
        unknown = [name for name in names if name not in COLUMNS]
        if "value" not in names or unknown or len(set(names)) < len(names):
            raise InvalidRequestError(
                f"The columns to write are value and, where wanted, key, partition, timestamp and "
                f"headers; not {', '.join(names) or 'none'}. Select or rename columns first."
            )
        for start in range(0, given.num_rows, ROWS_AT_A_TIME):
            part = given.slice(start, ROWS_AT_A_TIME)
            columns = {name: part.column(name) for name in names}
            partitions = columns.get("partition")
            timestamps = columns.get("timestamp")
            yield TaskRows(
                values=bytes_of("value", columns["value"]),
                keys=bytes_of("key", columns["key"]) if "key" in columns else None,
                partitions=None if partitions is None else _partitions(pa, partitions),
                timestamps_ms=None if timestamps is None else _times_ms(pa, timestamps),
                headers=headers_of(columns["headers"]) if "headers" in columns else None,
            )


def _wrong_type(name: str, kind: Any, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"The column {name} has type {kind}; it has to be {wanted}.")


def bytes_of(name: str, column: Any) -> list[bytes | None]:
    """The values of a binary or string column. Raises InvalidRequestError for other types."""
    pa = load_pyarrow()
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_string(kind):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(kind):
        column = column.cast(pa.large_binary())
    elif not (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_null(kind)
    ):
        raise _wrong_type(name, kind, "binary or string")
    found: list[bytes | None] = column.to_pylist()
    return found


def _partitions(pa: Any, column: Any) -> list[int | None]:
    if not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise _wrong_type("partition", column.type, "an integer")
    found: list[int | None] = column.to_pylist()
    return found


def _times_ms(pa: Any, column: Any) -> list[int | None]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        in_ms = column.cast(pa.timestamp("ms", tz=kind.tz), safe=False)
        column = in_ms.cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise _wrong_type("timestamp", kind, "a timestamp, or an integer of milliseconds")
    found: list[int | None] = column.to_pylist()
    if any(time is not None and time < 0 for time in found):
        raise InvalidRequestError("The column timestamp has a time before 1970.")
    return found


def headers_of(column: Any) -> list[Headers | None]:
    """The headers of a column as `write_task` takes it. Raises InvalidRequestError for other
    types."""
    pa = load_pyarrow()
    kind = column.type
    wanted = "a list of structs of key (or name) and value"
    if pa.types.is_null(kind):
        return [None] * len(column)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and pa.types.is_null(kind.value_type):
        return [None] * len(column)  # Arrow makes this of lists that are all empty
    if not is_list or not pa.types.is_struct(kind.value_type):
        raise _wrong_type("headers", kind, wanted)
    fields = [field.name for field in kind.value_type]
    names = [name for name in ("key", "name") if name in fields]
    if len(fields) != 2 or len(names) != 1 or "value" not in fields:
        raise _wrong_type("headers", kind, wanted)
    (name,) = names
    found: list[Headers | None] = []
    for headers in column.to_pylist():
        pairs = [(header[name], header["value"]) for header in headers or ()]
        for key, value in pairs:
            if not isinstance(key, str) or not isinstance(value, bytes):
                raise InvalidRequestError(
                    f"A header is a pair of str and bytes, neither of them null, not "
                    f"{(key, value)!r}."
                )
        found.append(pairs or None)
    return found

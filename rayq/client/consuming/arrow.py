"""Records as Arrow tables. Needs the extra `arrow`."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any

from rayq.client.consuming.subscription import Slice
from rayq.errors import MissingExtraError, RecordTooLargeError
from rayq.records import Headers

ARROW_RECORDS_MAX = 100_000
"""Default of `poll_arrow(max_records=...)`."""


def load_pyarrow() -> Any:
    """Imports pyarrow. Raises MissingExtraError."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingExtraError("Arrow tables need pyarrow: pip install 'rayq[arrow]'") from error


def record_schema() -> Any:
    """The columns of `poll_arrow`: topic, partition, offset, timestamp, key, value, headers."""
    pa = load_pyarrow()
    header = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])
    return pa.schema(
        [
            pa.field("topic", pa.dictionary(pa.int32(), pa.string())),
            pa.field("partition", pa.int32()),
            pa.field("offset", pa.int64()),
            pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
            pa.field("key", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("headers", pa.list_(header)),
        ]
    )


def table_of(slices: Sequence[Slice], topics: Sequence[str]) -> Any:
    """One table of all the slices, in order, with `topics` as the dictionary of the first column.
    Without slices, an empty table of the same schema."""
    pa = load_pyarrow()
    schema = record_schema()
    counts = [len(part.values) for part in slices]
    places = [topics.index(part.topic) for part in slices]
    columns = [
        pa.DictionaryArray.from_arrays(
            _repeated(pa, places, counts), pa.array(topics, pa.string())
        ),
        _repeated(pa, [part.partition for part in slices], counts),
        int64_column(pa, [part.offsets for part in slices], pa.int64()),
        int64_column(pa, [part.timestamps_ms for part in slices], schema.field("timestamp").type),
        binary_column(pa, [part.keys for part in slices], counts),
        binary_column(pa, [part.values for part in slices], counts),
        headers_column(pa, [part.headers for part in slices], counts, schema.field("headers").type),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _repeated(pa: Any, values: Sequence[int], counts: Sequence[int]) -> Any:
    """Repeats each value `count` times."""
    items = array("i")
    for value, count in zip(values, counts, strict=True):
        items += array("i", [value]) * count
    return pa.Array.from_buffers(pa.int32(), len(items), [None, pa.py_buffer(items)])


def int64_column(pa: Any, parts: Iterable[Iterable[int]], kind: Any) -> Any:
    items = array("q", chain.from_iterable(parts))
    return pa.Array.from_buffers(kind, len(items), [None, pa.py_buffer(items)])


def binary_column(
    pa: Any, parts: Sequence[Sequence[bytes | None] | None], counts: Sequence[int]
) -> Any:
    """A binary column; a part that is None consists of nulls only."""
    if all(part is None for part in parts):
        return pa.nulls(sum(counts), pa.binary())
    items: list[bytes | None] = []
    for part, count in zip(parts, counts, strict=True):
        items.extend(part if part is not None else repeat(None, count))
    return _one_chunk(pa, pa.array(items, pa.binary()))


def _one_chunk(pa: Any, found: Any) -> Any:
    """Checks that a column has one chunk: pyarrow splits above 2 GiB, and the other columns would
    have to follow."""
    if isinstance(found, pa.ChunkedArray):
        raise RecordTooLargeError(
            "These records hold more than 2 GiB, too much for one Arrow table: pass a lower "
            "max_records to poll_arrow."
        )
    return found


def headers_column(
    pa: Any, parts: Sequence[Sequence[Headers | None] | None], counts: Sequence[int], kind: Any
) -> Any:
    """A column of headers. The Python loop covers only the parts that have headers."""
    names: list[str] = []
    values: list[bytes] = []
    ends = array("i", [0])
    for part, count in zip(parts, counts, strict=True):
        if part is None:
            ends += array("i", [len(names)]) * count
            continue
        for headers in part:
            for name, value in headers or ():
                names.append(name)
                values.append(value)
            ends.append(len(names))
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, pa.string()), _one_chunk(pa, pa.array(values, pa.binary()))],
        fields=list(kind.value_type),
    )
    offsets = pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(ends)])
    return pa.ListArray.from_arrays(offsets, pairs, type=kind)

"""Batches for a pool's handler: lists of records, or Arrow tables, of one topic."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any, Protocol

from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.records import Record


class PoolBatch(Protocol):
    """Records in the order of the log within each partition. It does not change."""

    @property
    def given(self) -> Any:
        """The argument for the handler."""
        ...

    def __len__(self) -> int: ...

    def partitions(self) -> list[int]: ...

    def ends(self) -> dict[int, int]:
        """The offset after the last record, by partition."""
        ...

    def halves(self) -> tuple[PoolBatch, PoolBatch]:
        """The earlier and the later half."""
        ...

    def without(self, partitions: Collection[int]) -> PoolBatch: ...

    def record(self) -> Record:
        """The only record."""
        ...


class RecordBatch:
    """A list of records."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    @property
    def given(self) -> list[Record]:
        return list(self._records)  # The handler may modify it, and fail.

    def __len__(self) -> int:
        return len(self._records)

    def partitions(self) -> list[int]:
        return sorted({record.partition for record in self._records})

    def ends(self) -> dict[int, int]:
        return {record.partition: record.offset + 1 for record in self._records}

    def halves(self) -> tuple[RecordBatch, RecordBatch]:
        middle = len(self._records) // 2
        return RecordBatch(self._records[:middle]), RecordBatch(self._records[middle:])

    def without(self, partitions: Collection[int]) -> RecordBatch:
        return RecordBatch(
            [record for record in self._records if record.partition not in partitions]
        )

    def record(self) -> Record:
        (record,) = self._records
        return record


class TableBatch:
    """A `pyarrow.Table` with the columns of `poll_arrow`."""

    def __init__(self, table: Any) -> None:
        self._table = table

    @property
    def given(self) -> Any:
        return self._table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def partitions(self) -> list[int]:
        return sorted(self._table.column("partition").unique().to_pylist())

    def ends(self) -> dict[int, int]:
        last = self._table.group_by("partition").aggregate([("offset", "max")]).to_pydict()
        return {
            partition: offset + 1
            for partition, offset in zip(last["partition"], last["offset_max"], strict=True)
        }

    def halves(self) -> tuple[TableBatch, TableBatch]:
        middle = self._table.num_rows // 2
        return TableBatch(self._table.slice(0, middle)), TableBatch(self._table.slice(middle))

    def without(self, partitions: Collection[int]) -> TableBatch:
        pa, compute = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.compute")
        gone = pa.array(sorted(partitions), pa.int32())
        rows = compute.invert(compute.is_in(self._table.column("partition"), value_set=gone))
        return TableBatch(self._table.filter(rows))

    def record(self) -> Record:
        timestamps = self._table.column("timestamp").cast("int64")
        (timestamp_ms,) = timestamps.to_pylist()
        (row,) = self._table.drop_columns("timestamp").to_pylist()
        return Record(
            topic=row["topic"],
            partition=row["partition"],
            offset=row["offset"],
            timestamp_ms=timestamp_ms,
            key=row["key"],
            value=row["value"],
            headers=[(header["name"], header["value"]) for header in row["headers"] or ()],
        )


async def poll_batch(
    consumer: AsyncConsumer, kind: str, timeout_s: float, records_max: int
) -> PoolBatch:
    """The next batch, empty if there is none in time. Raises the errors of `poll`."""
    if kind == "arrow":
        return TableBatch(await consumer.poll_arrow(timeout_s, records_max))
    return RecordBatch(await consumer.poll(timeout_s, records_max))

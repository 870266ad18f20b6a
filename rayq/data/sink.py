"""Topics as a sink of Ray Data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from ray.data import Dataset
from ray.data.block import Block, BlockAccessor
from ray.data.datasource import Datasink, WriteResult

from rayq.batch.task_rows import bytes_of, headers_of
from rayq.batch.task_writer import (
    TaskWritten,
    finish_write,
    job_for,
    write_task,
    writing,
)
from rayq.batch.write_job import WriteJob
from rayq.client.cluster import Cluster
from rayq.errors import InvalidRequestError
from rayq.records import OffsetRange


class Written(NamedTuple):
    """The result of a write. `repeated` counts the records that the log had already, from an
    earlier attempt at a task. `ranges` are sorted, and may hold records of other producers too."""

    records: int
    repeated: int
    ranges: list[OffsetRange]


def write_topic(
    dataset: Dataset,
    topic: str,
    *,
    cluster: Cluster | None = None,
    value: str = "value",
    key: str | None = None,
    headers: str | None = None,
    partition: str | None = None,
    timestamp: str | None = None,
    header_columns: Sequence[str] = (),
    job: WriteJob | None = None,
    atomic: bool = False,
    timeout_s: float = 120.0,
    ray_remote_args: dict[str, Any] | None = None,
    concurrency: int | None = None,
) -> Written:
    """Writes the rows of a Dataset to a topic, with acks="all"; returns when all are committed.

    `value`, `key`, `headers`, `partition` and `timestamp` name columns; other columns are not
    written. Values and keys are binary or strings (a null value is a tombstone). Headers are lists
    of structs of key (or name) and value, in order and with their duplicates. Without `partition` a
    record goes where a producer would send its key. Without `timestamp` it has the time at which
    the write began. `header_columns` are further columns (binary or string): each value that is not
    null becomes a header under the column's name, for example the `error` of dead letters.
    `cluster`: None means the process's current cluster.

    A task that Ray retries sends the same batches under the same numbers, and no batch is appended
    twice. If it makes other rows than before, it fails with RewriteMismatchError. A write that
    fails leaves the records that it has written so far. Another call writes all records again,
    unless it has the same `job` (of `begin_write`) and the Dataset consists of the same blocks.
    `rayq.batch.task_writer` describes the limits.

    With `atomic`, the write is one transaction. Readers see all of its records at once, once it has
    succeeded; they see none of a failed write. Until then readers wait in all partitions that it
    writes to, and also for later records of others; a write may take an hour at most. `job` may be
    a transaction as well: see `begin_write`.

    Raises the errors of `write_task`, `finish_write` and `begin_write`.
    """
    found = cluster or Cluster.current()
    job = job_for(found, topic, job, atomic=atomic, timeout_s=timeout_s)
    sink = TopicDatasink(
        job,
        cluster=found,
        columns={
            "value": value,
            "key": key,
            "headers": headers,
            "partition": partition,
            "timestamp": timestamp,
        },
        header_columns=header_columns,
        timeout_s=timeout_s,
    )
    with writing(found, job, timeout_s=timeout_s):
        dataset.write_datasink(sink, ray_remote_args=ray_remote_args, concurrency=concurrency)
    assert sink.written is not None, "write_datasink returns after on_write_complete, or raises"
    return sink.written


class TopicDatasink(Datasink[TaskWritten]):
    """Writes to a topic, for `Dataset.write_datasink`, which `write_topic` calls. After the write
    `written` has the result."""

    def __init__(
        self,
        job: WriteJob,
        *,
        cluster: Cluster,
        columns: dict[str, str | None],
        header_columns: Sequence[str] = (),
        timeout_s: float = 120.0,
    ) -> None:
        """`columns` maps "value", and perhaps "key", "headers", "partition" and "timestamp", to
        columns of the Dataset. None: there is no such column."""
        self.job = job
        self.written: Written | None = None
        self._cluster = cluster
        self._columns = {role: name for role, name in columns.items() if name is not None}
        self._header_columns = tuple(header_columns)
        self._timeout_s = timeout_s

    def get_name(self) -> str:
        return "Topic"

    def write(self, blocks: Iterable[Block], ctx: Any) -> TaskWritten:
        return write_task(
            self._cluster,
            self.job,
            ctx.task_idx,
            self._tables(blocks),
            timeout_s=self._timeout_s,
        )

    def on_write_complete(self, write_result: WriteResult[TaskWritten]) -> None:
        tasks = write_result.write_returns
        finish_write(
            self._cluster,
            self.job,
            ((done.task, done.partitions) for done in tasks),
            timeout_s=self._timeout_s,
        )
        self.written = Written(
            sum(task.records for task in tasks),
            sum(task.repeated for task in tasks),
            _merged(written for task in tasks for written in task.ranges),
        )

    def _tables(self, blocks: Iterable[Block]) -> Iterator[pa.Table]:
        for block in blocks:
            table = BlockAccessor.for_block(block).to_arrow()
            if table.num_rows == 0:
                continue
            wanted = [*self._columns.values(), *self._header_columns]
            missing = [name for name in wanted if name not in table.column_names]
            if missing:
                raise InvalidRequestError(
                    f"The Dataset has no column {', '.join(map(repr, missing))}; it has "
                    f"{', '.join(map(repr, table.column_names))}. Name the columns to write."
                )
            made = {role: table.column(name) for role, name in self._columns.items()}
            if self._header_columns:
                made["headers"] = self._headers(table, made.get("headers"))
            yield pa.table(made)

    def _headers(self, table: pa.Table, given: Any) -> pa.Array:
        """The given headers, and the headers from columns."""
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        found: list[list[Any]] = [[] for _ in range(table.num_rows)]
        if given is not None:
            for headers, given_headers in zip(found, headers_of(given), strict=True):
                headers += given_headers or ()
        for name in self._header_columns:
            values = bytes_of(name, table.column(name))
            for headers, value in zip(found, values, strict=True):
                if value is not None:
                    headers.append((name, value))
        return pa.array(
            [[{"key": key, "value": value} for key, value in headers] for headers in found], kind
        )


def _merged(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """The ranges, sorted. Ranges that touch become one."""
    merged: list[OffsetRange] = []
    for span in sorted(ranges):
        last = merged[-1] if merged else None
        if last is not None and last[:2] == span[:2] and span.start <= last.end:
            merged[-1] = last._replace(end=max(last.end, span.end))
        else:
            merged.append(span)
    return merged

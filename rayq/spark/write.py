"""Batch writes: the rows of a DataFrame as records of a topic.

Each Spark task appends its own rows. Spark may run a task again, or twice at once. Then
`rayq.batch.task_writer` prevents duplicates: every attempt at a task sends the same batches under
the same numbers, and the leaders append each batch once. For that, all attempts have to make the
same rows in the same order. `_ordered` ensures that for the rows of one aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as fn
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rayq.batch.task_writer import finish_write, job_for, write_task, writing
from rayq.batch.write_job import WriteJob
from rayq.client.cluster import Cluster
from rayq.client.consuming.arrow import load_pyarrow
from rayq.errors import InvalidRequestError
from rayq.spark.schema import HEADERS_TYPE

_RESULT = StructType(
    [
        StructField("task", LongType(), False),
        StructField("records", LongType(), False),
        StructField("repeated", LongType(), False),
        StructField("partitions", ArrayType(LongType(), False), False),
        StructField("counts", ArrayType(LongType(), False), False),
    ]
)
_BINARY = (BinaryType, StringType)
_ACCEPTED: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "value": (_BINARY, "binary or string; for other columns use to_json(struct(...))"),
    "key": (_BINARY, "binary or string; cast others, for example to string"),
    "partition": ((ByteType, ShortType, IntegerType, LongType), "a whole number"),
    "timestamp": ((TimestampType,), "a timestamp"),
}


class Written(NamedTuple):
    """The result of a write: the number of records, and the number of those that the log already
    had, from an earlier attempt at a task."""

    records: int
    repeated: int


def write(
    df: DataFrame,
    topic: str,
    *,
    key: str | Column | None = None,
    value: str | Column = "value",
    partition: str | Column | None = None,
    headers: str | Column | None = None,
    timestamp: str | Column | None = None,
    cluster: Cluster | None = None,
    job: WriteJob | None = None,
    atomic: bool = False,
    timeout_s: float = 120.0,
) -> Written:
    """Evaluates `df` and appends each of its rows to `topic`. Returns when all are committed.

    Columns are given by name or as expressions: `value` (binary, or string as UTF-8; null writes a
    tombstone), `key` (the same; None: no keys), `partition` (a whole number; None: by the key's
    hash), `headers` (array of (key string, value binary)), `timestamp` (None: the time of the
    call). `timeout_s` is the time, in seconds, that a leader may be away before an attempt at a
    task fails; Spark makes `spark.task.maxFailures` (4) attempts before the job fails.

    A task that is run again, and a speculative copy of a task, write nothing twice if they make the
    same rows in the same order. Read, map and filter do, and so does one aggregation followed only
    by maps and filters, because `write` sorts such rows by all of their columns. After anything
    else that shuffles (repartition, join, a union of aggregations, an explode of one) Spark
    promises no order: use `sortWithinPartitions` there. An attempt that makes other rows than the
    attempt before raises RewriteMismatchError, rather than write a row twice or not at all. This
    ends with the job: a failed job leaves the records that its tasks have written, and another
    write appends all records again. `job` is the result of `rayq.spark.begin_write`, which you keep
    to repeat a job that may have run.

    Readers may see a part of the records, unless the write is `atomic`: then it is a transaction.
    Readers see all of its records at once, once it has succeeded; they see none of a failed job.
    Until then readers wait in all partitions that the job writes to, and also for later records of
    others; a write may take an hour at most. `job` may be a transaction as well: see `begin_write`.

    Raises InvalidRequestError (a column of the wrong type), UnknownTopicError, NoClusterError; for
    a transaction TransactionAbortedError, TransactionCommittedError,
    TransactionOutcomeUnknownError, AlreadyCommittedError. A task's errors reach the driver as
    PySpark's PythonException, whose text has rayq's error.
    """
    cluster = cluster or Cluster.current()
    columns = {
        "value": value,
        "key": key,
        "partition": partition,
        "headers": headers,
        "timestamp": timestamp,
    }
    records = records_of(df, columns)
    job = job_for(cluster, topic, job, atomic=atomic, timeout_s=timeout_s)
    return write_job(cluster, records, job, timeout_s=timeout_s)


def records_of(df: DataFrame, columns: Mapping[str, str | Column | None]) -> DataFrame:
    """The rows as records, in the order in which they are written. `columns` are those of
    `write`."""
    records = df.select(
        *(
            (fn.col(given) if isinstance(given, str) else given).alias(name)
            for name, given in columns.items()
            if given is not None
        )
    )
    _check_types(records)
    return _ordered(_with_long_partition(records))


def write_job(
    cluster: Cluster, records: DataFrame, job: WriteJob, *, timeout_s: float
) -> Written:
    """Writes the rows of `records_of` as a job, and finishes it."""
    with writing(cluster, job, timeout_s=timeout_s):
        done = records.mapInArrow(_appender(cluster, job, timeout_s), _RESULT).collect()
        tasks = [(row.task, dict(zip(row.partitions, row.counts, strict=True))) for row in done]
        finish_write(cluster, job, tasks, timeout_s=timeout_s)
    return Written(sum(row.records for row in done), sum(row.repeated for row in done))


def _check_types(records: DataFrame) -> None:
    for field in records.schema.fields:
        if field.name == "headers":
            is_right = _is_headers(field.dataType)
            wanted = f"{HEADERS_TYPE.simpleString()}"
        else:
            kinds, wanted = _ACCEPTED[field.name]
            is_right = isinstance(field.dataType, kinds)
        if not is_right:
            raise InvalidRequestError(
                f"The {field.name} of a record cannot be {field.dataType.simpleString()}: it has "
                f"to be {wanted}."
            )


def _is_headers(found: DataType) -> bool:
    """Returns whether this is the type of headers, with or without nulls."""
    return found.simpleString() == HEADERS_TYPE.simpleString()


def _with_long_partition(records: DataFrame) -> DataFrame:
    if "partition" not in records.columns:
        return records
    return records.withColumn("partition", fn.col("partition").cast("long"))


def _ordered(records: DataFrame) -> DataFrame:
    """The rows in an order that is the same in every attempt at a task. The rows of an aggregation
    arrive in the order of the blocks of its shuffle. That order means nothing, so they are sorted.
    The order of other rows may mean something, even if Spark does not promise it. So the search for
    an aggregation passes only projections and filters."""
    plan = records._jdf.queryExecution().optimizedPlan()
    while plan.nodeName() in ("Project", "Filter"):
        plan = plan.child()
    if plan.nodeName() != "Aggregate":
        return records
    return records.sortWithinPartitions(*records.columns)


def _appender(
    cluster: Cluster, job: WriteJob, timeout_s: float
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function that a task runs. It pickles with these arguments and no more."""

    def append(batches: Iterable[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None, "a task has a context"
        done = write_task(cluster, job, context.partitionId(), batches, timeout_s=timeout_s)
        pa = load_pyarrow()
        yield pa.record_batch(
            [
                pa.array([done.task], pa.int64()),
                pa.array([done.records], pa.int64()),
                pa.array([done.repeated], pa.int64()),
                pa.array([list(done.partitions)], pa.list_(pa.int64())),
                pa.array([list(done.partitions.values())], pa.list_(pa.int64())),
            ],
            names=_RESULT.names,
        )

    return append

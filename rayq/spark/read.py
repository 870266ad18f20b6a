"""Batch reads: a topic as a DataFrame, with the columns and options of Spark's Kafka source.

The driver fixes the ranges of offsets once (`rayq.batch.offset_ranges.snapshot`). Each Spark task
gets one range, and fetches it from the partition's leader, or from the object store, into Arrow
when Spark runs the task. A range is a plain value, so a task that Spark runs again reads the same
records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession

from rayq.batch.offset_ranges import Offsets, Split, Time, Times, snapshot, split_ranges
from rayq.batch.pins import DAY_S, pin_ranges
from rayq.batch.range_reader import COLUMNS, read_range
from rayq.batch.stored_ranges import object_starts
from rayq.client.cluster import Cluster
from rayq.config import ConsumerConfig, OnCorrupt, check_values_url
from rayq.spark.schema import read_schema

PINNED_MAX_S = DAY_S
"""Maximum time the driver keeps the records of a DataFrame from retention, in topics with remote
storage. Nothing tells when a DataFrame is evaluated for the last time."""


def read(
    spark: SparkSession,
    topics: str | Iterable[str] = (),
    *,
    pattern: str | re.Pattern[str] | None = None,
    cluster: Cluster | None = None,
    starting_offsets: Offsets = "earliest",
    ending_offsets: Offsets = "latest",
    starting_timestamp: Time | None = None,
    starting_timestamps: Times | None = None,
    ending_timestamp: Time | None = None,
    ending_timestamps: Times | None = None,
    new_partitions: Literal["error", "earliest"] = "error",
    min_partitions: int | None = None,
    fail_on_data_loss: bool = True,
    include_headers: bool = False,
    large_values: str | None = None,
    on_corrupt: OnCorrupt = "raise",
    timeout_s: float = 60.0,
) -> DataFrame:
    """Reads the records of `topics` (or of the topics whose whole name `pattern` matches) as a
    DataFrame.

    The columns are key and value (binary), topic (string), partition (int), offset (long) and
    timestamp. With `include_headers` there is also headers, an array of (key string, value binary)
    that is empty for a record without headers.

    The start and the end are "earliest", "latest", or offsets for every partition, as
    `{TopicPartition("t", 0): 23}` or `{"t": {0: 23}}`; or a time (Unix milliseconds, or a datetime
    with a time zone), one for all or one for each partition. Ends are exclusive. "latest" is the
    high watermark at this call: records that are appended later are not part of the DataFrame,
    however often and late it is evaluated. Of each transaction it has all records or none: a
    transaction that is not decided at this call is left out. Nothing is fetched before it is
    evaluated. If a later read continues at the ends of this one, end all of them at "last_stable",
    below the first undecided transaction. Below an end by offset or time, tasks wait for undecided
    transactions. A mapping names every partition; with `new_partitions="earliest"` the partitions
    that `starting_offsets` leaves out, such as new ones, begin at their log start. A time after the
    last record stands for the partition's end, even as a start (where Spark's Kafka source raises).

    Each topic partition becomes one Spark partition. `min_partitions` cuts large ranges by offset
    until there are at least as many. `fail_on_data_loss` decides whether expired records are an
    error, or are left out with a warning. `timeout_s` is the time, in seconds, that a leader may be
    away, here and in a task, before that attempt at the task fails; Spark makes
    `spark.task.maxFailures` (4) attempts before the job fails. A read never returns fewer records
    instead. Tasks read records of a topic with `remote_storage` from the object store if they are
    there; while the driver runs, for a day at most, retention leaves them.

    Large values arrive whole: chunked ones always, and objects if `large_values` is the URL of
    their producers, read with the credentials of the executors. Records that cannot be read fail
    their task with an UnreadableRecordError that has their offsets; with `on_corrupt="skip"` they
    are left out, with a warning in the executor's log.

    Raises the errors of `rayq.batch.offset_ranges.snapshot`: UnknownTopicError,
    OffsetOutOfRangeError, InvalidRequestError, PartitionOfflineError, TimeoutError; NoClusterError.
    A task's errors reach the driver as PySpark's PythonException, with rayq's error in its text.
    """
    check_values_url(large_values)
    cluster = cluster or Cluster.current()
    ranges = snapshot(
        cluster,
        topics,
        pattern=pattern,
        starting_offsets=starting_offsets,
        ending_offsets=ending_offsets,
        starting_timestamp=starting_timestamp,
        starting_timestamps=starting_timestamps,
        ending_timestamp=ending_timestamp,
        ending_timestamps=ending_timestamps,
        new_partitions=new_partitions,
        fail_on_data_loss=fail_on_data_loss,
        timeout_s=timeout_s,
    )
    cuts = None if min_partitions is None else object_starts(cluster, ranges, timeout_s=timeout_s)
    splits = split_ranges(ranges, min_partitions, cuts)
    pin_ranges(cluster, ranges, timeout_s=timeout_s, age_max_s=PINNED_MAX_S)
    return read_ranges(
        spark,
        cluster,
        splits,
        include_headers=include_headers,
        fail_on_data_loss=fail_on_data_loss,
        large_values=large_values,
        on_corrupt=on_corrupt,
        timeout_s=timeout_s,
    )


def read_ranges(
    spark: SparkSession,
    cluster: Cluster,
    splits: Sequence[Split],
    *,
    include_headers: bool = False,
    fail_on_data_loss: bool = True,
    large_values: str | None = None,
    on_corrupt: OnCorrupt = "raise",
    timeout_s: float = 60.0,
) -> DataFrame:
    """The records of exactly these ranges, with one Spark partition for each, in their order."""
    columns = (*COLUMNS, "headers") if include_headers else COLUMNS
    schema = read_schema(columns)
    if not splits:
        return spark.createDataFrame([], schema)
    count = len(splits)
    ConsumerConfig(on_corrupt=on_corrupt)  # This checks it.
    fetch = _fetcher(
        cluster, list(splits), columns, fail_on_data_loss, large_values, on_corrupt, timeout_s
    )
    # Spark cuts a range of `count` numbers into `count` partitions of one number each.
    return spark.range(0, count, 1, count).mapInArrow(fetch, schema)


def _fetcher(
    cluster: Cluster,
    splits: list[Split],
    columns: Sequence[str],
    fail_on_data_loss: bool,
    large_values: str | None,
    on_corrupt: OnCorrupt,
    timeout_s: float,
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function that a task runs. It pickles with these arguments and no more."""

    def fetch(numbers: Iterable[Any]) -> Iterator[Any]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from read_range(
                    cluster,
                    splits[number],
                    columns=columns,
                    fail_on_data_loss=fail_on_data_loss,
                    large_values=large_values,
                    on_corrupt=on_corrupt,
                    timeout_s=timeout_s,
                )

    return fetch

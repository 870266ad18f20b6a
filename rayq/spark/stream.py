"""Micro-batch streaming: a topic as a sequence of DataFrames, for each of which your function runs.

    query = (
        rayq.spark.stream(spark, "flights", checkpoint="./checkpoint", trigger="5 seconds")
        .foreach_batch(save)
        .start()
    )
    query.awaitTermination()

The offsets of each batch are written to the checkpoint before the batch runs, and its commit
afterwards. So after a crash at any point the one batch that may have been in progress is run again
with the same id and the same offsets, and no batch is left out. That is at-least-once. It is
exactly once if the function does nothing twice for one batch id, for example because it replaces
the earlier result of that id, or if `to_topic` takes the place of the function.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import InheritableThread
from pyspark.sql import Column, DataFrame, SparkSession

from rayq.batch.offset_ranges import Offsets, Split, Time, Times, split_ranges
from rayq.batch.write_job import WriteJob
from rayq.client.cluster import Cluster
from rayq.client.timeouts import seconds
from rayq.config import ConsumerConfig, OnCorrupt, check_values_url
from rayq.errors import CheckpointMismatchError, InvalidRequestError
from rayq.spark.batches import Resumption, with_topics
from rayq.spark.checkpoint import Checkpoint, QueryMetadata
from rayq.spark.read import read_ranges
from rayq.spark.streaming_query import BatchFunction, Engine, StreamingQuery, patiently
from rayq.spark.topic_sink import TopicSink
from rayq.spark.topic_source import TopicSource
from rayq.spark.trigger import Trigger, parse_trigger
from rayq.spark.write import records_of, write_job
from rayq.user_functions import check_function, check_ran

logger = logging.getLogger(__name__)


def stream(
    spark: SparkSession,
    topics: str | Iterable[str] = (),
    *,
    checkpoint: str | os.PathLike[str],
    pattern: str | re.Pattern[str] | None = None,
    cluster: Cluster | None = None,
    trigger: str | None = None,
    starting_offsets: Offsets = "earliest",
    starting_timestamp: Time | None = None,
    starting_timestamps: Times | None = None,
    max_offsets_per_trigger: int | None = None,
    min_partitions: int | None = None,
    fail_on_data_loss: bool = True,
    include_headers: bool = False,
    large_values: str | None = None,
    on_corrupt: OnCorrupt = "raise",
    group: str | None = None,
    name: str | None = None,
    timeout_s: float = 60.0,
    retry_timeout_s: float = 120.0,
) -> TopicStream:
    """Makes a stream of `topics` (or of the topics whose whole name `pattern` matches). Give it a
    function by `foreach_batch`, then start it. The columns are those of `rayq.spark.read`.

    `checkpoint` is a directory, or a URL that fsspec knows, for this query alone. It says where the
    query continues. A later start may have other options (the trigger, the limits), but not other
    topics. `starting_...` (see `read`) count only for a new checkpoint; the default is the log
    start. Partitions that are added later are read from their start, and so are topics that begin
    to match the pattern.

    `trigger` is "5 seconds" (the query looks for new records at this or another interval),
    "available_now" (it reads the records that are there at the start, in one or more batches, then
    ends), or None (one batch follows the other). The partitions share `max_offsets_per_trigger` in
    proportion to their new records. `min_partitions` cuts large ranges for more Spark tasks.

    `fail_on_data_loss` decides whether records that expired before they were read end the query, or
    are left out with a warning. `timeout_s` is the time, in seconds, that a leader may be away
    while a task reads; `retry_timeout_s` the time while the query looks for new records.

    `large_values` and `on_corrupt` are those of `rayq.spark.read`. A query that ended at records
    that cannot be read continues after them when it is started again with `on_corrupt="skip"`.

    With `group`, the query commits its positions to this consumer group after each batch, so that
    people can see its lag. The group must have no members.

    Raises InvalidRequestError; NoClusterError.
    """
    if max_offsets_per_trigger is not None and (
        type(max_offsets_per_trigger) is not int or max_offsets_per_trigger < 1
    ):
        raise InvalidRequestError(
            "max_offsets_per_trigger must be an int from 1, or None, not "
            f"{max_offsets_per_trigger!r}."
        )
    split_ranges([], min_partitions)  # This checks min_partitions.
    ConsumerConfig(on_corrupt=on_corrupt)  # This checks it.
    check_values_url(large_values)
    source = TopicSource(
        cluster or Cluster.current(), topics, pattern, fail_on_data_loss=fail_on_data_loss
    )
    engine = SparkEngine(
        spark,
        source.cluster,
        min_partitions=min_partitions,
        options={
            "include_headers": include_headers,
            "large_values": large_values,
            "on_corrupt": on_corrupt,
            "fail_on_data_loss": fail_on_data_loss,
            "timeout_s": seconds(timeout_s),
        },
    )
    return TopicStream(
        engine=engine,
        source=source,
        checkpoint=checkpoint,
        trigger=parse_trigger(trigger),
        starting={
            "starting_offsets": starting_offsets,
            "starting_timestamp": starting_timestamp,
            "starting_timestamps": starting_timestamps,
        },
        offsets_max=max_offsets_per_trigger,
        group=group,
        name=name,
        retry_timeout_s=seconds(retry_timeout_s),
    )


@dataclass(frozen=True, kw_only=True)
class TopicStream:
    """A stream that needs a function for its batches."""

    engine: Engine
    source: TopicSource
    checkpoint: str | os.PathLike[str]
    trigger: Trigger
    starting: Mapping[str, Any]
    offsets_max: int | None
    group: str | None
    name: str | None
    retry_timeout_s: float

    def foreach_batch(self, function: Callable[[DataFrame, int], object]) -> StreamStarter:
        """Sets the function of the stream: `function(df, batch_id)` is called for each batch, in
        the query's own thread of the driver. Each evaluation of `df` reads the same records from
        the log again: persist it if you evaluate it more than once. The batch is done when the
        function returns. An exception ends the query. Raises HandlerError (for example, for a
        coroutine function, or one with `yield`, of which nothing would run)."""
        check_function("The function of foreach_batch", function)
        return StreamStarter(self, lambda query_id: function)

    def to_topic(
        self,
        topic: str,
        function: Callable[[DataFrame], DataFrame] | None = None,
        *,
        key: str | Column | None = None,
        value: str | Column = "value",
        partition: str | Column | None = None,
        headers: str | Column | None = None,
        timestamp: str | Column | None = None,
        timeout_s: float = 120.0,
    ) -> StreamStarter:
        """Writes each batch to `topic` exactly once, whatever is restarted: it is a transaction,
        whose records become visible all at once.

        `function(df)` turns a batch into the rows to write, the same in each run of the batch; None
        writes the batch's records. The columns and `timeout_s` are those of `rayq.spark.write`,
        which says what a task's attempts must have in common. A batch may take an hour at most. The
        query ends with a CheckpointMismatchError if a later batch of it is committed. Raises
        HandlerError, as `foreach_batch` does."""
        if function is not None:
            check_function("The function of to_topic", function)
        columns = {
            "value": value,
            "key": key,
            "partition": partition,
            "headers": headers,
            "timestamp": timestamp,
        }
        cluster, timeout_s = self.source.cluster, seconds(timeout_s)

        def write(df: DataFrame, job: WriteJob) -> None:
            rows = df
            if function is not None:
                rows = function(df)
                check_ran("The function of to_topic", rows)
            write_job(cluster, records_of(rows, columns), job, timeout_s=timeout_s)

        return StreamStarter(
            self, lambda query_id: TopicSink(cluster, topic, query_id, write, timeout_s=timeout_s)
        )


class StreamStarter:
    """A stream that can be started."""

    def __init__(
        self, stream: TopicStream, function_of: Callable[[str], BatchFunction]
    ) -> None:
        """`function_of(query id)` is called for each batch."""
        self._stream = stream
        self._function_of = function_of

    def start(self) -> StreamingQuery:
        """Starts the query, in its own thread. Returns once the checkpoint is read, or created, and
        the topics are found.

        Raises CheckpointInUseError (another query uses it), CheckpointMismatchError (it is of
        another cluster, or of other topics, or a topic was deleted and created again),
        CheckpointDamagedError, UnsupportedFormatError, CheckpointError, UnknownTopicError,
        OffsetOutOfRangeError, GroupNotEmptyError, and retriable errors of the cluster that last for
        `retry_timeout_s`.
        """
        stream = self._stream
        run_id = str(uuid.uuid4())
        checkpoint = Checkpoint.open(stream.checkpoint, run_id)
        try:
            metadata = self._metadata(checkpoint)
            resumption = self._without_deleted(checkpoint.resume(metadata))
            self._commit_to_group(resumption)
            query = StreamingQuery(
                query_id=metadata.id,
                run_id=run_id,
                name=stream.name,
                source=stream.source,
                checkpoint=checkpoint,
                resumption=resumption,
                engine=stream.engine,
                function=self._function_of(metadata.id),
                trigger=stream.trigger,
                offsets_max=stream.offsets_max,
                group=stream.group,
                retry_timeout_s=stream.retry_timeout_s,
            )
            query.begin()
        except BaseException:
            checkpoint.close()
            raise
        return query

    def _metadata(self, checkpoint: Checkpoint) -> QueryMetadata:
        """The metadata of the checkpoint, which must belong to this query. A new checkpoint gets
        it."""
        source = self._stream.source
        found = checkpoint.metadata()
        cluster_id = self._ask(source.cluster_id)
        if found is not None:
            _check_same_query(checkpoint.path, found, source, cluster_id)
            return found
        made = QueryMetadata(
            id=str(uuid.uuid4()),
            cluster_id=cluster_id,
            topics=source.topics,
            pattern=source.pattern,
            created_ms=time.time_ns() // 1_000_000,
            start=self._ask(lambda timeout_s: source.start(self._stream.starting, timeout_s)),
        )
        checkpoint.create(made)
        return made

    def _without_deleted(self, found: Resumption) -> Resumption:
        """The resumption without deleted topics. Raises UnknownTopicError for these unless
        `fail_on_data_loss` is False; CheckpointMismatchError."""
        source = self._stream.source
        positions = found.progress.positions
        topics = self._ask(lambda timeout_s: source.check_topics(positions, timeout_s))
        if found.replay is not None:
            gone = sorted({split.topic for split in found.replay.ranges} - topics)
            if gone:
                logger.warning(
                    "batch %d is run again without %s, which was deleted (fail_on_data_loss=False)",
                    found.replay.batch_id,
                    ", ".join(gone),
                )
        return with_topics(found, topics)

    def _commit_to_group(self, resumption: Resumption) -> None:
        """Commits the present position, so that an unusable group is an error at the start."""
        group = self._stream.group
        if group is None:
            return
        replay = resumption.replay
        positions = (
            resumption.progress.offsets
            if replay is None
            else {split.place: split.start for split in replay.ranges}
        )
        source = self._stream.source
        self._ask(lambda timeout_s: source.commit(group, positions, timeout_s))

    def _ask(self, question: Callable[[float], Any]) -> Any:
        return patiently(
            f"Asking for {self._stream.source}",
            question,
            self._stream.retry_timeout_s,
            threading.Event(),
            lambda _: None,
        )


def _check_same_query(
    path: str, found: QueryMetadata, source: TopicSource, cluster_id: str
) -> None:
    if found.cluster_id != cluster_id:
        raise CheckpointMismatchError(
            f"The checkpoint {path} is of cluster {found.cluster_id}, this is {cluster_id}: "
            "connect to that one, or use another checkpoint."
        )
    if (found.topics, found.pattern) != (source.topics, source.pattern):
        of = ", ".join(found.topics) or f"pattern {found.pattern!r}"
        raise CheckpointMismatchError(
            f"The checkpoint {path} is of a query of {of}, this one is of {source}: each query has "
            "a checkpoint of its own."
        )


class SparkEngine:
    """Batches as DataFrames of one Spark session."""

    def __init__(
        self,
        spark: SparkSession,
        cluster: Cluster,
        *,
        min_partitions: int | None,
        options: Mapping[str, Any],
    ) -> None:
        self._spark = spark
        self._cluster = cluster
        self._min_partitions = min_partitions
        self._options = options

    def thread(
        self,
        work: Callable[[], None],
        never_ran: Callable[[BaseException], None],
        name: str,
    ) -> threading.Thread:
        return _QueryThread(work, never_ran, name)

    def begin(self, group: str, description: str) -> None:
        self._spark.sparkContext.setJobGroup(group, description, interruptOnCancel=True)

    def frame(self, ranges: Sequence[Split]) -> DataFrame:
        splits = split_ranges(ranges, self._min_partitions)
        return read_ranges(self._spark, self._cluster, splits, **self._options)

    def cancel(self, group: str) -> None:
        try:
            self._spark.sparkContext.cancelJobGroup(group)
        except (Py4JError, OSError, AttributeError) as error:  # Spark was stopped, or its JVM died.
            logger.info("no jobs to cancel: %s", error)


class _QueryThread(InheritableThread):
    """A thread of Spark's own class, with its own thread of the JVM, which holds its job group. It
    asks the JVM before it begins to work, and fails there if the JVM has died."""

    def __init__(
        self,
        work: Callable[[], None],
        never_ran: Callable[[BaseException], None],
        name: str,
    ) -> None:
        super().__init__(target=self._begin, name=name, daemon=True)
        self._work = work
        self._never_ran = never_ran
        self._has_begun = False

    def _begin(self) -> None:
        self._has_begun = True
        self._work()

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            if self._has_begun:
                raise
            self._never_ran(error)

"""Streaming queries without Spark: a batch's frame is the list of its records."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import InheritableThread, SparkContext

from rayq import Cluster, TopicPartition
from rayq.batch.offset_ranges import Split
from rayq.batch.range_reader import read_range
from rayq.batch.task_writer import finish_write, write_task, writing
from rayq.batch.write_job import WriteJob
from rayq.errors import (
    AuthorizationError,
    CheckpointInUseError,
    CheckpointMismatchError,
    ClosedError,
    GroupNotEmptyError,
    HandlerError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    PartitionOfflineError,
    RayqError,
    StreamingQueryError,
    UnknownTopicError,
)
from rayq.spark import streaming_query
from rayq.spark.checkpoint import Checkpoint, QueryMetadata
from rayq.spark.stream import SparkEngine, StreamStarter, TopicStream
from rayq.spark.streaming_query import StreamingQuery
from rayq.spark.topic_sink import TopicSink
from rayq.spark.topic_source import TopicSource
from rayq.spark.trigger import parse_trigger
from rayq.testing import LocalCluster
from tests.local.conftest import NewTopic
from tests.local.principal_support import Named
from tests.local.support import eventually, partition_of, read_all

Seen = tuple[str, int, int]
"""Topic, partition and offset of a record."""
Frame = list[Seen]


class ListEngine:
    """An engine that reads a batch at once, in the query's thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.cancelled = threading.Event()

    def thread(
        self,
        work: Callable[[], None],
        never_ran: Callable[[BaseException], None],
        name: str,
    ) -> threading.Thread:
        return threading.Thread(target=work, name=name, daemon=True)

    def begin(self, group: str, description: str) -> None:
        pass

    def frame(self, ranges: Sequence[Split]) -> Frame:
        found: Frame = []
        for one in ranges:
            for batch in read_range(self._cluster, one, columns=("offset",)):
                offsets = batch.column("offset").to_pylist()
                found += [(one.topic, one.partition, offset) for offset in offsets]
        return found

    def cancel(self, group: str) -> None:
        self.cancelled.set()


def stream(
    cluster: Cluster,
    topics: str | Sequence[str],
    checkpoint: Path,
    *,
    pattern: str | None = None,
    trigger: str | None = "available_now",
    starting_offsets: Any = "earliest",
    fail_on_data_loss: bool = True,
    offsets_max: int | None = None,
    group: str | None = None,
    retry_timeout_s: float = 20.0,
) -> TopicStream:
    return TopicStream(
        engine=ListEngine(cluster),
        source=TopicSource(cluster, topics, pattern, fail_on_data_loss=fail_on_data_loss),
        checkpoint=checkpoint,
        trigger=parse_trigger(trigger),
        starting={"starting_offsets": starting_offsets},
        offsets_max=offsets_max,
        group=group,
        name=None,
        retry_timeout_s=retry_timeout_s,
    )


class Sink:
    """Keeps one result for each batch id, as a sink has to. `runs` counts the runs of each
    batch."""

    def __init__(self) -> None:
        self.batches: dict[int, Frame] = {}
        self.runs: list[int] = []

    def __call__(self, frame: Frame, batch_id: int) -> None:
        assert self.batches.setdefault(batch_id, frame) == frame, "a replay reads the same records"
        self.runs.append(batch_id)

    @property
    def seen(self) -> list[Seen]:
        return sorted(one for frame in self.batches.values() for one in frame)


def drain(stream: TopicStream, function: Any) -> StreamingQuery:
    query = stream.foreach_batch(function).start()
    assert query.awaitTermination(100) is True
    return query


def produce(cluster: Cluster, topic: str, count: int, partition: int = 0) -> None:
    with cluster.producer() as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, partition=partition)


def offsets(topic: str, count: int, partition: int = 0, first: int = 0) -> list[Seen]:
    return [(topic, partition, offset) for offset in range(first, count)]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def queries() -> Iterator[list[StreamingQuery]]:
    """A list of queries that are stopped when the test is over, however it ends."""
    started: list[StreamingQuery] = []
    yield started
    for query in started:
        query.stop()


# --- what is read ---------------------------------------------------------------------------------


def test_available_now_reads_what_is_there_in_limited_batches_and_ends(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path, sink: Sink
) -> None:
    topic = new_topic(partitions=2)
    produce(cluster, topic, 30)
    produce(cluster, topic, 10, partition=1)

    def run(frame: Frame, batch_id: int) -> None:
        sink(frame, batch_id)
        if batch_id == 0:
            produce(cluster, topic, 5)  # too late for this run

    query = drain(stream(cluster, topic, tmp_path, offsets_max=16), run)
    assert sink.seen == offsets(topic, 30) + offsets(topic, 10, 1)
    assert sink.runs == [0, 1, 2] and [len(one) for one in sink.batches.values()] == [16, 16, 8]
    assert query.exception() is None and not query.isActive
    assert query.status["message"] == "Stopped"

    drain(stream(cluster, topic, tmp_path), sink)
    assert sink.runs == [0, 1, 2, 3] and sink.batches[3] == offsets(topic, 35, first=30)
    drain(stream(cluster, topic, tmp_path), sink)
    assert sink.runs == [0, 1, 2, 3], "nothing new is no batch"


def test_an_empty_topic_is_no_batch(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    query = drain(stream(cluster, topic, tmp_path), sink)
    assert sink.runs == [] and query.lastProgress is None


def test_a_query_that_starts_at_the_latest_still_starts_there_after_a_restart(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 10)
    drain(stream(cluster, topic, tmp_path, starting_offsets="latest"), sink)
    assert sink.runs == []
    produce(cluster, topic, 5)
    drain(stream(cluster, topic, tmp_path, starting_offsets="latest"), sink)
    assert sink.seen == offsets(topic, 15, first=10)


def test_a_query_may_start_at_given_offsets(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 10)
    drain(stream(cluster, topic, tmp_path, starting_offsets={topic: {0: 7}}), sink)
    assert sink.seen == offsets(topic, 10, first=7)


def test_a_batch_ends_below_a_transaction_that_is_open_and_a_later_one_reads_it(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 3)
    with cluster.producer(transactional_id=topic) as producer:
        with producer.transaction():
            producer.send(topic, b"in it")
            producer.flush()
            produce(cluster, topic, 2)
            drain(stream(cluster, topic, tmp_path / "all"), sink)
            drain(stream(cluster, topic, tmp_path / "new", starting_offsets="latest"), sink)
            assert sink.seen == offsets(topic, 3)
        late = Sink()
        drain(stream(cluster, topic, tmp_path / "all"), late)
        assert late.seen == offsets(topic, 6, first=3), "the marker has no record"
        late = Sink()
        drain(stream(cluster, topic, tmp_path / "new", starting_offsets="latest"), late)
        assert late.seen == offsets(topic, 6, first=3)
        drain(stream(cluster, topic, tmp_path / "all"), late)
        assert len(late.runs) == 1, "a marker is no batch"


def test_new_partitions_are_read_from_their_start(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink, queries: list[StreamingQuery]
) -> None:
    query = stream(cluster, topic, tmp_path, trigger="50 ms", starting_offsets="latest")
    queries.append(query.foreach_batch(sink).start())
    produce(cluster, topic, 3)
    queries[0].processAllAvailable()
    cluster.admin.create_partitions(topic, 2)
    produce(cluster, topic, 4, partition=1)
    queries[0].processAllAvailable()
    assert sink.seen == offsets(topic, 3) + offsets(topic, 4, 1)


def test_topics_that_begin_to_match_the_pattern_are_read_from_their_start(
    cluster: LocalCluster, tmp_path: Path, sink: Sink
) -> None:
    cluster.create_topic("pattern-one", replication_factor=1)
    produce(cluster, "pattern-one", 2)
    by_pattern: dict[str, Any] = {"pattern": "pattern-.*"}
    drain(stream(cluster, (), tmp_path, **by_pattern), sink)
    cluster.create_topic("pattern-two", replication_factor=1)
    produce(cluster, "pattern-two", 3)
    drain(stream(cluster, (), tmp_path, **by_pattern), sink)
    assert sink.seen == offsets("pattern-one", 2) + offsets("pattern-two", 3)

    cluster.admin.delete_topic("pattern-one")
    with pytest.raises(UnknownTopicError, match="pattern-one"):
        stream(cluster, (), tmp_path, **by_pattern).foreach_batch(sink).start()
    produce(cluster, "pattern-two", 1)
    drain(stream(cluster, (), tmp_path, fail_on_data_loss=False, **by_pattern), sink)
    assert sink.seen == offsets("pattern-one", 2) + offsets("pattern-two", 4)


def test_a_query_may_start_where_the_last_progress_of_another_ended(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path, sink: Sink
) -> None:
    topic = new_topic(partitions=2)
    produce(cluster, topic, 4)
    progress = drain(stream(cluster, topic, tmp_path / "a"), Sink()).lastProgress
    assert progress is not None
    produce(cluster, topic, 2)
    (source,) = progress["sources"]
    starting = source["endOffset"]
    drain(stream(cluster, topic, tmp_path / "b", starting_offsets=starting), sink)
    assert sink.seen == offsets(topic, 6, first=4)


# --- failures -------------------------------------------------------------------------------------


def test_what_the_function_raises_ends_the_query_and_the_batch_is_run_again(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 10)

    def fail(frame: Frame, batch_id: int) -> None:
        sink(frame, batch_id)
        if batch_id == 1:
            raise ZeroDivisionError("this one is odd")

    limited = stream(cluster, topic, tmp_path, offsets_max=4)
    query = limited.foreach_batch(fail).start()
    with pytest.raises(StreamingQueryError, match="ended at batch 1: .*this one is odd") as caught:
        query.awaitTermination(100)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert query.exception() is caught.value and not query.isActive
    assert "this one is odd" in query.status["message"]
    assert query.lastProgress is not None and query.lastProgress["batchId"] == 0

    produce(cluster, topic, 90)  # the batch stays what it was
    other_limit = stream(cluster, topic, tmp_path, offsets_max=1000)
    drain(other_limit, sink)
    assert sink.runs == [0, 1, 1, 2] and sink.seen == offsets(topic, 100)


def test_records_that_expired_end_the_query_or_are_left_out(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 5)
    drain(stream(cluster, topic, tmp_path), sink)
    produce(cluster, topic, 15)
    cluster.admin.delete_records({TopicPartition(topic, 0): 12})
    query = stream(cluster, topic, tmp_path).foreach_batch(sink).start()
    with pytest.raises(StreamingQueryError, match="fail_on_data_loss=False") as caught:
        query.awaitTermination(100)
    assert isinstance(caught.value.__cause__, OffsetOutOfRangeError)
    drain(stream(cluster, topic, tmp_path, fail_on_data_loss=False), sink)
    assert sink.seen == offsets(topic, 5) + offsets(topic, 20, first=12)


def at_offset(cluster: LocalCluster, topic: str, checkpoint: Path, position: int) -> None:
    """The checkpoint of a query that has read up to `position`, which is beyond the end of the log:
    the log lost records."""
    topic_id = cluster.admin.describe_topic(topic).topic_id
    start = [Split(topic, topic_id, 0, position, position)]
    made = Checkpoint.open(checkpoint, "made")
    cluster_id = cluster.admin.describe_cluster().cluster_id
    made.create(QueryMetadata("query", cluster_id, [topic], None, 1, start))
    made.close()


def test_a_query_that_is_past_the_end_goes_on_at_the_end_that_it_found(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink, queries: list[StreamingQuery]
) -> None:
    produce(cluster, topic, 6)
    at_offset(cluster, topic, tmp_path, 10)
    looking = stream(cluster, topic, tmp_path, trigger="20 ms", fail_on_data_loss=False)
    queries.append(looking.foreach_batch(sink).start())
    queries[0].processAllAvailable()
    produce(cluster, topic, 2)
    queries[0].processAllAvailable()
    assert sink.seen == offsets(topic, 8, first=6)
    assert queries[0].exception() is None


def test_a_query_that_is_past_the_end_keeps_the_end_that_it_found_for_the_next_start(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 6)
    at_offset(cluster, topic, tmp_path, 10)
    refused = stream(cluster, topic, tmp_path).foreach_batch(sink).start()
    with pytest.raises(StreamingQueryError, match="past the end 6"):
        refused.awaitTermination(100)
    drain(stream(cluster, topic, tmp_path, fail_on_data_loss=False), sink)
    produce(cluster, topic, 2)
    drain(stream(cluster, topic, tmp_path), sink)  # nothing more was lost
    assert sink.seen == offsets(topic, 8, first=6)


@pytest.mark.parametrize("is_replay", [True, False], ids=["a batch to run again", "nothing to run"])
def test_a_start_without_a_topic_of_the_pattern_goes_on_with_the_other_ones(
    cluster: LocalCluster,
    new_topic: NewTopic,
    tmp_path: Path,
    sink: Sink,
    caplog: pytest.LogCaptureFixture,
    is_replay: bool,
) -> None:
    kept, gone = sorted((new_topic(replication_factor=1), new_topic(replication_factor=1)))
    produce(cluster, kept, 3)
    produce(cluster, gone, 2)

    def run(_frame: Frame, _batch_id: int) -> None:
        if is_replay:
            raise ZeroDivisionError("before it wrote anything")

    going_on = stream(
        cluster,
        (),
        tmp_path,
        pattern=f"{kept}|{gone}",
        fail_on_data_loss=False,
        group=f"of-{kept}",
    )
    first = going_on.foreach_batch(run).start()
    if is_replay:
        with pytest.raises(StreamingQueryError):
            first.awaitTermination(100)
    else:
        assert first.awaitTermination(100)
    cluster.admin.delete_topic(gone)
    produce(cluster, kept, 1)
    query = drain(going_on, sink)
    assert sink.runs == ([0, 1] if is_replay else [1])
    assert sink.seen == offsets(kept, 4, first=0 if is_replay else 3)
    assert query.lastProgress is not None and query.lastProgress["group"]["error"] is None
    assert cluster.admin.describe_group(f"of-{kept}").lag == 0
    without = f"batch 0 is run again without {gone}"
    assert any(without in one for one in caplog.messages) is is_replay


def test_a_topic_of_the_pattern_that_is_hidden_for_a_while_was_not_deleted(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path, sink: Sink
) -> None:
    kept, hidden = sorted((new_topic(replication_factor=1), new_topic(replication_factor=1)))
    produce(cluster, kept, 3)
    produce(cluster, hidden, 2)
    anna = Named(cluster, ("read", "topic", kept), ("read", "topic", hidden))
    with anna.connect() as connection:
        pattern = f"{kept}|{hidden}"
        query = stream(connection, (), tmp_path, pattern=pattern, fail_on_data_loss=False)
        drain(query, sink)
        anna.forbid(("read", "topic", hidden))
        with pytest.raises(AuthorizationError, match=hidden):
            query.foreach_batch(sink).start()
        anna.allow(("read", "topic", hidden))
        produce(cluster, hidden, 1)
        drain(query, sink)
    assert sink.seen == sorted(offsets(kept, 3) + offsets(hidden, 3))


def test_a_query_whose_thread_never_ran_has_ended_and_lets_go_of_the_checkpoint(
    cluster: LocalCluster,
    topic: str,
    tmp_path: Path,
    sink: Sink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def the_jvm_is_gone(_thread: threading.Thread) -> None:
        raise ConnectionRefusedError("the JVM does not answer")

    produce(cluster, topic, 5)
    spark: Any = None
    on_spark = dataclasses.replace(
        stream(cluster, topic, tmp_path, trigger=None),
        engine=SparkEngine(spark, cluster, min_partitions=None, options={}),
    )
    with monkeypatch.context() as patch:
        patch.setattr(SparkContext, "_gateway", None)  # from an earlier Spark, which has ended
        patch.setattr(InheritableThread, "run", the_jvm_is_gone)
        query = on_spark.foreach_batch(sink).start()
        with pytest.raises(StreamingQueryError, match="the JVM does not answer") as caught:
            query.awaitTermination(100)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert not query.isActive and query not in streaming_query._active
    with pytest.raises(StreamingQueryError):
        query.processAllAvailable()
    query.stop()
    drain(stream(cluster, topic, tmp_path), sink)
    assert sink.seen == offsets(topic, 5)


def test_an_unknown_topic_is_said_at_the_start(
    cluster: LocalCluster, tmp_path: Path, sink: Sink
) -> None:
    with pytest.raises(UnknownTopicError, match="nosuch"):
        stream(cluster, "nosuch", tmp_path).foreach_batch(sink).start()
    cluster.create_topic("nosuch", replication_factor=1)
    drain(stream(cluster, "nosuch", tmp_path), sink)  # nothing was left behind
    cluster.admin.delete_topic("nosuch")


def test_a_topic_that_is_deleted_meanwhile_ends_the_query(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path, sink: Sink
) -> None:
    topic = new_topic(replication_factor=1)
    produce(cluster, topic, 5)
    query = stream(cluster, topic, tmp_path, trigger="50 ms").foreach_batch(sink).start()
    query.processAllAvailable()
    cluster.admin.delete_topic(topic)
    with pytest.raises(StreamingQueryError) as caught:
        query.awaitTermination(100)
    assert isinstance(caught.value.__cause__, UnknownTopicError)

    cluster.create_topic(topic, replication_factor=1)
    produce(cluster, topic, 50)
    with pytest.raises(CheckpointMismatchError, match="deleted and created again"):
        stream(cluster, topic, tmp_path).foreach_batch(sink).start()


def test_a_topic_made_again_while_the_query_runs_is_not_read(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path, sink: Sink
) -> None:
    topic = new_topic(replication_factor=1, partitions=2)
    produce(cluster, topic, 5)
    query = stream(cluster, topic, tmp_path, trigger="3 seconds").foreach_batch(sink).start()
    eventually(lambda: query.lastProgress is not None, "the first batch is done")
    cluster.admin.delete_topic(topic)
    cluster.create_topic(topic, replication_factor=1)
    with pytest.raises(StreamingQueryError) as caught:
        query.awaitTermination(100)
    assert isinstance(caught.value.__cause__, CheckpointMismatchError)


def test_a_partition_that_is_offline_is_waited_for_then_named(
    fragile: LocalCluster, tmp_path: Path, sink: Sink
) -> None:
    fragile.create_topic("flights", replication_factor=1)
    produce(fragile, "flights", 5)
    leader = fragile.admin.describe_topic("flights").partitions[0].leader
    assert leader is not None
    waiting = (
        stream(fragile, "flights", tmp_path / "a", trigger="50 ms").foreach_batch(sink).start()
    )
    waiting.processAllAvailable()
    fragile.kill_broker(leader)
    eventually(lambda: partition_of(fragile, "flights").leader is None, "the partition is offline")
    impatient = stream(fragile, "flights", tmp_path / "b", retry_timeout_s=3)
    with pytest.raises(RayqError, match="retried for 3 s") as caught:
        impatient.foreach_batch(sink).start()
    assert isinstance(caught.value, PartitionOfflineError), caught.value
    eventually(lambda: "flights-0" in waiting.status["message"], "the status says what is awaited")
    fragile.start_broker(leader)
    produce(fragile, "flights", 5)
    waiting.processAllAvailable()
    waiting.stop()
    assert sink.seen == offsets("flights", 10)


# --- one query, one checkpoint --------------------------------------------------------------------


def test_a_second_query_on_a_checkpoint_is_refused_while_the_first_is_active(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink, queries: list[StreamingQuery]
) -> None:
    same = stream(cluster, topic, tmp_path, trigger="1 second").foreach_batch(sink)
    queries.append(same.start())
    with pytest.raises(CheckpointInUseError, match="in use by process"):
        same.start()
    queries[0].stop()
    queries.append(same.start())
    assert queries[1].isActive and queries[1].id == queries[0].id
    assert queries[1].runId != queries[0].runId


def test_a_checkpoint_of_other_topics_is_refused(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path, sink: Sink
) -> None:
    one, other = new_topic(), new_topic()
    drain(stream(cluster, one, tmp_path), sink)
    with pytest.raises(
        CheckpointMismatchError, match=f"of a query of {one}, this one is of {other}"
    ):
        stream(cluster, other, tmp_path).foreach_batch(sink).start()
    drain(stream(cluster, one, tmp_path), sink)  # the lock was given back


def test_a_checkpoint_of_another_cluster_is_refused(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    drain(stream(cluster, topic, tmp_path / "checkpoint"), sink)
    with LocalCluster(brokers=1, data_dir=tmp_path / "data") as elsewhere:
        elsewhere.create_topic(topic)
        with pytest.raises(CheckpointMismatchError, match="is of cluster"):
            stream(elsewhere, topic, tmp_path / "checkpoint").foreach_batch(sink).start()
    cluster.make_current()


# --- the query's face -----------------------------------------------------------------------------


def test_progress_and_status_say_what_spark_says(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink, queries: list[StreamingQuery]
) -> None:
    produce(cluster, topic, 8)
    limited = stream(cluster, topic, tmp_path, trigger="50 ms", offsets_max=5)
    query = limited.foreach_batch(sink).start()
    queries.append(query)
    assert query.isActive and query.awaitTermination(0.01) is False
    query.processAllAvailable()
    first, last = query.recentProgress
    assert last == query.lastProgress
    assert (first["batchId"], last["batchId"], last["numInputRows"]) == (0, 1, 3)
    assert (first["id"], first["runId"]) == (query.id, query.runId)
    (source,) = first["sources"]
    assert source["startOffset"] == {topic: {"0": 0}} and source["endOffset"] == {topic: {"0": 5}}
    assert source["latestOffset"] == {topic: {"0": 8}}
    assert source["metrics"]["maxOffsetsBehindLatest"] == "3"
    assert first["inputRowsPerSecond"] == 0, "there was no trigger before the first"
    assert 0 < last["inputRowsPerSecond"] < 1_000_000
    steps = {"latestOffset", "walCommit", "addBatch", "commitOffsets", "triggerExecution"}
    assert set(first["durationMs"]) == steps
    eventually(
        lambda: query.status["message"] == "Waiting for data to arrive", "the query says it waits"
    )
    query.stop()
    assert query.exception() is None and query.awaitTermination() is None
    with pytest.raises(InvalidRequestError):
        query.awaitTermination(-1)


def test_a_stop_cancels_the_batch_that_runs_and_it_is_run_again(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 5)
    running = threading.Event()
    started = stream(cluster, topic, tmp_path, trigger=None)
    engine = started.engine
    assert isinstance(engine, ListEngine)

    def until_cancelled(frame: Frame, batch_id: int) -> None:
        sink(frame, batch_id)
        running.set()
        assert engine.cancelled.wait(100)
        raise RuntimeError("Job 7 cancelled part of cancelled job group")

    query = started.foreach_batch(until_cancelled).start()
    assert running.wait(100)
    query.stop()
    assert not query.isActive and query.exception() is None
    drain(stream(cluster, topic, tmp_path), sink)
    assert sink.runs == [0, 0]


def test_the_function_may_stop_its_query_after_the_batch(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 5)
    made: list[StreamingQuery] = []
    is_there = threading.Event()

    def once(frame: Frame, batch_id: int) -> None:
        sink(frame, batch_id)
        assert is_there.wait(100)
        made[0].stop()
        with pytest.raises(InvalidRequestError, match="wait for itself"):
            made[0].processAllAvailable()

    made.append(stream(cluster, topic, tmp_path, trigger=None).foreach_batch(once).start())
    is_there.set()
    assert made[0].awaitTermination(100) is True
    drain(stream(cluster, topic, tmp_path), sink)
    assert sink.runs == [0], "it returned, so the batch is done"


def test_process_all_available_raises_what_ended_the_query(
    cluster: LocalCluster, topic: str, tmp_path: Path
) -> None:
    produce(cluster, topic, 5)

    def fail(_frame: Frame, _batch_id: int) -> None:
        raise ValueError("no")

    query = stream(cluster, topic, tmp_path, trigger=None).foreach_batch(fail).start()
    with pytest.raises(StreamingQueryError, match="no"):
        query.processAllAvailable()


def test_a_group_shows_how_far_the_query_is(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    produce(cluster, topic, 10)
    place = TopicPartition(topic, 0)
    lags: list[int | None] = []

    def look(frame: Frame, batch_id: int) -> None:
        sink(frame, batch_id)
        lags.append(cluster.admin.describe_group("dashboards").partitions[place].lag)

    limited = stream(cluster, topic, tmp_path, offsets_max=4, group="dashboards")
    query = drain(limited, look)
    assert lags == [10, 6, 2]
    assert cluster.admin.describe_group("dashboards").lag == 0
    assert query.lastProgress is not None
    assert query.lastProgress["group"] == {"name": "dashboards", "error": None}

    with cluster.consumer(topic, group="dashboards") as consumer:
        eventually(lambda: not consumer.poll(0.1) and bool(consumer.assignment()), "it has joined")
        with pytest.raises(GroupNotEmptyError):
            limited.foreach_batch(sink).start()


def test_a_query_whose_cluster_is_closed_ends(
    cluster: LocalCluster, topic: str, tmp_path: Path, sink: Sink
) -> None:
    other = Cluster(cluster.addresses, cluster._access.key)  # its own connections
    query = stream(other, topic, tmp_path, trigger="50 ms").foreach_batch(sink).start()
    query.processAllAvailable()
    other.close()
    with pytest.raises(StreamingQueryError) as caught:
        query.awaitTermination(100)
    assert isinstance(caught.value.__cause__, ClosedError)


# --- a topic as sink ------------------------------------------------------------------------------


def to_topic(
    stream: TopicStream, out: str, *, crash_before: int | None = None
) -> StreamStarter:
    """A query that writes offsets of its source to a topic, as one task for each batch. It fails
    before the end of batch `crash_before`."""
    cluster = stream.source.cluster

    def write(frame: Frame, job: WriteJob) -> None:
        rows = pa.table({"value": pa.array([b"%d" % offset for _, _, offset in frame], pa.binary())})
        with writing(cluster, job):
            task = write_task(cluster, job, 0, [rows])
            if job.name == str(crash_before):
                raise ZeroDivisionError
            finish_write(cluster, job, [(0, task.partitions)])

    return StreamStarter(
        stream, lambda query_id: TopicSink(cluster, out, query_id, write, timeout_s=60.0)
    )


def written(cluster: LocalCluster, topic: str) -> list[int]:
    return sorted(int(record.value or b"") for record in read_all(cluster, topic))


def test_batches_are_written_to_a_topic_once_over_failures_and_lost_commits(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic, out = new_topic(), new_topic(partitions=2)
    produce(cluster, topic, 10)
    source = stream(cluster, topic, tmp_path, offsets_max=4)
    query = to_topic(source, out, crash_before=1).start()
    with pytest.raises(StreamingQueryError, match="batch 1"):
        query.awaitTermination(100)
    assert written(cluster, out) == [0, 1, 2, 3], "nothing of the batch that failed"
    query = to_topic(source, out).start()
    assert query.awaitTermination(100) is True
    assert query.lastProgress is not None
    assert query.lastProgress["sink"] == {"description": f"rayq[{out}]"}
    (tmp_path / "commits" / "2").unlink()  # The driver died before it wrote this.
    produce(cluster, topic, 2)
    assert to_topic(source, out).start().awaitTermination(100) is True
    assert written(cluster, out) == list(range(12))


def test_a_checkpoint_that_was_set_back_is_told(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic, out = new_topic(), new_topic()
    produce(cluster, topic, 10)
    source = stream(cluster, topic, tmp_path, offsets_max=4)
    assert to_topic(source, out).start().awaitTermination(100) is True
    for number in (1, 2):
        (tmp_path / "commits" / str(number)).unlink()
    (tmp_path / "offsets" / "2").unlink()
    query = to_topic(source, out).start()
    with pytest.raises(StreamingQueryError, match="batch 2 of this query is committed") as caught:
        query.awaitTermination(100)
    assert isinstance(caught.value.__cause__, CheckpointMismatchError)
    assert written(cluster, out) == list(range(10))


def test_an_id_of_a_query_that_another_program_uses_is_told(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    with cluster.producer(transactional_id="rayq-stream-q") as producer:
        with producer.transaction(name="monday"):
            pass
    sink = TopicSink(cluster, new_topic(), "q", lambda frame, job: None, timeout_s=60.0)
    with pytest.raises(CheckpointMismatchError, match="monday"):
        sink([], 0)


# --- the user's function --------------------------------------------------------------------------


async def _coroutine(frame: Frame, batch_id: int) -> None:
    pass


def _generator(frame: Frame, batch_id: int) -> Iterator[None]:
    yield


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("function", [_coroutine, _generator, Sink])
def test_a_function_that_would_not_run_is_refused(
    cluster: LocalCluster, tmp_path: Path, function: Any
) -> None:
    queries = stream(cluster, "t", tmp_path)
    with pytest.raises(HandlerError, match="foreach_batch"):
        queries.foreach_batch(function)
    if function is not Sink:
        with pytest.raises(HandlerError, match="to_topic"):
            queries.to_topic("t", function)


@pytest.mark.parametrize(
    "function", [lambda *given: _coroutine(*given), lambda *given: _generator(*given)]
)
def test_a_batch_of_which_nothing_has_run_is_not_committed(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path, function: Any
) -> None:
    topic = new_topic()
    with cluster.producer() as producer:
        producer.send(topic, b"1")
    query = stream(cluster, topic, tmp_path).foreach_batch(function).start()
    with pytest.raises(StreamingQueryError, match="returned a"):
        query.awaitTermination(30)
    sink = Sink()
    stream(cluster, topic, tmp_path).foreach_batch(sink).start().awaitTermination(30)
    assert sink.seen == [(topic, 0, 0)] and sink.runs == [0]


@pytest.mark.parametrize("kind", [SystemExit, StopIteration, GeneratorExit, _UnprintableError])
def test_whatever_the_function_raises_ends_the_query_with_an_error(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path, kind: type[BaseException]
) -> None:
    topic = new_topic()
    with cluster.producer() as producer:
        producer.send(topic, b"1")

    def fails(_frame: Frame, _id: int) -> None:
        raise kind

    query = stream(cluster, topic, tmp_path).foreach_batch(fails).start()
    with pytest.raises(StreamingQueryError, match="ended at batch 0: "):
        query.awaitTermination(30)

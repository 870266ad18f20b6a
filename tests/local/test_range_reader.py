"""Ranges of offsets: taken once, split, and read exactly, whatever happens to the log meanwhile."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rayq import Cluster, TopicPartition
from rayq.actors.replica import produced_batch
from rayq.batch.offset_ranges import (
    Split,
    end_offsets,
    snapshot,
    split_ranges,
)
from rayq.batch.range_reader import COLUMNS, read_range, read_schema
from rayq.batch.task_writer import begin_write, write_task
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    PartitionOfflineError,
    UnknownTopicError,
)
from rayq.testing import LocalCluster
from tests.local.support import eventually, leader_of, produce_raw
from tests.wrong_batches import sealed

NewTopic = Callable[..., str]


def fill(cluster: Cluster, topic: str, count: int, partition: int = 0, first: int = 0) -> None:
    with cluster.producer(batch_size=256) as producer:
        producer.send_many(
            topic, [b"%d" % number for number in range(first, first + count)], partition=partition
        )


def table_of(cluster: Cluster, splits: Sequence[Split], **options: Any) -> pa.Table:
    options.setdefault("timeout_s", 60.0)
    schema = read_schema(options.get("columns", COLUMNS))
    batches = [batch for one in splits for batch in read_range(cluster, one, **options)]
    return pa.Table.from_batches(batches, schema=schema)


def values(table: pa.Table) -> list[int]:
    return [int(value) for value in table["value"].to_pylist()]


# --- the snapshot ---------------------------------------------------------------------------------


def test_a_snapshot_names_every_partition_with_its_start_and_its_end_now(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=3)
    fill(cluster, topic, 10, partition=2)
    taken = snapshot(cluster, topic)
    fill(cluster, topic, 5, partition=2)
    assert [(one.partition, one.start, one.end) for one in taken] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 10),
    ]
    assert {one.topic_id for one in taken} == {cluster.admin.describe_topic(topic).topic_id}
    assert pickle.loads(pickle.dumps(taken)) == taken
    assert values(table_of(cluster, taken)) == list(range(10)), "not what came afterwards"


def test_the_end_of_one_snapshot_is_the_start_of_the_next(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 10)
    first = snapshot(None, topic)
    fill(cluster, topic, 5, first=10)
    second = snapshot(cluster, [topic], starting_offsets=end_offsets(first))
    assert values(table_of(cluster, second)) == list(range(10, 15))


def test_topics_are_found_by_a_pattern_of_the_whole_name(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    one, other = new_topic(), new_topic()
    found = snapshot(cluster, pattern=f"{one}|{other}")
    assert [split.topic for split in found] == sorted([one, other])
    with pytest.raises(UnknownTopicError, match="matches the pattern"):
        snapshot(cluster, pattern=one[:-1] + "x")


def test_bounds_may_be_given_for_each_partition_in_two_ways(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    fill(cluster, topic, 10, partition=0)
    fill(cluster, topic, 10, partition=1)
    by_place = {TopicPartition(topic, 0): 3, TopicPartition(topic, 1): "latest"}
    nested = {topic: {0: 8, 1: "latest"}}
    taken = snapshot(cluster, topic, starting_offsets=by_place, ending_offsets=nested)  # type: ignore[arg-type]
    assert [(one.start, one.end) for one in taken] == [(3, 8), (10, 10)]


def test_a_partition_that_a_mapping_leaves_out_is_an_error_or_new(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    fill(cluster, topic, 4, partition=0)
    known = {topic: {0: 4}}
    with pytest.raises(InvalidRequestError, match=f"leave out {topic}-1"):
        snapshot(cluster, topic, starting_offsets=known)
    taken = snapshot(cluster, topic, starting_offsets=known, new_partitions="earliest")
    assert [one.start for one in taken] == [4, 0]
    with pytest.raises(InvalidRequestError, match=f"{topic}-7"):
        snapshot(cluster, topic, starting_offsets={topic: {0: 0, 1: 0, 7: 0}})


def test_bounds_by_time_are_the_first_records_at_or_after_it(
    cluster: LocalCluster, topic: str
) -> None:
    with cluster.producer() as producer:
        for second in range(1, 6):
            producer.send(topic, b"%d" % second, timestamp_ms=second * 1000).result()
    taken = snapshot(cluster, topic, starting_timestamp=1500, ending_timestamp=4000)
    assert values(table_of(cluster, taken)) == [2, 3]
    (late,) = snapshot(cluster, topic, starting_timestamps={TopicPartition(topic, 0): 6000})
    assert (late.start, late.end) == (5, 5), "nothing is so late"
    with pytest.raises(InvalidRequestError, match="ends before it starts"):
        snapshot(cluster, topic, starting_timestamp=4000, ending_timestamp=1500)


def test_an_end_before_its_start_is_refused(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 10)
    for start in ({topic: {0: 5}}, "latest"):
        with pytest.raises(InvalidRequestError, match="ends before it starts"):
            snapshot(cluster, topic, starting_offsets=start, ending_offsets={topic: {0: 4}})


def test_offsets_past_the_end_are_an_error_or_clipped(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 10)
    beyond: dict[str, Any] = {"ending_offsets": {topic: {0: 11}}}
    with pytest.raises(OffsetOutOfRangeError, match="ends at offset 11, past the end 10"):
        snapshot(cluster, topic, **beyond)
    (taken,) = snapshot(cluster, topic, fail_on_data_loss=False, **beyond)
    assert (taken.start, taken.end) == (0, 10)


def test_expired_offsets_are_an_error_or_what_is_left_is_read(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 10)
    cluster.admin.delete_records({TopicPartition(topic, 0): 6})
    expired: dict[str, Any] = {"starting_offsets": {topic: {0: 2}}}
    with pytest.raises(OffsetOutOfRangeError, match="below the log start 6"):
        snapshot(cluster, topic, **expired)
    taken = snapshot(cluster, topic, fail_on_data_loss=False, **expired)
    assert values(table_of(cluster, taken)) == [6, 7, 8, 9]
    assert values(table_of(cluster, snapshot(cluster, topic))) == [6, 7, 8, 9], "earliest"


def test_an_unknown_topic_is_told(cluster: LocalCluster) -> None:
    with pytest.raises(UnknownTopicError, match="nosuch"):
        snapshot(cluster, "nosuch")


# --- reading --------------------------------------------------------------------------------------


def test_splits_of_a_partition_hold_each_record_once_wherever_they_are_cut(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 1000)
    splits = split_ranges(snapshot(cluster, topic), 7)
    assert len(splits) == 7
    assert values(table_of(cluster, splits)) == list(range(1000))


def test_columns_have_the_types_of_sparks_kafka_source(cluster: LocalCluster, topic: str) -> None:
    headers = [("a", b"1"), ("b", b""), ("a", b"2")]
    with cluster.producer() as producer:
        producer.send(topic, b"v", key=b"k", headers=headers, timestamp_ms=1_234)
        producer.send(topic, None, key=b"k", timestamp_ms=1_235).result()
    columns = (*COLUMNS, "headers")
    table = table_of(cluster, snapshot(cluster, topic), columns=columns)
    assert table.schema == read_schema(columns)
    first, second = table.to_pylist()
    assert first["headers"] == [{"key": name, "value": value} for name, value in headers]
    assert second["headers"] == []
    assert (first["key"], first["value"], second["value"]) == (b"k", b"v", None)
    assert (first["topic"], first["partition"], second["offset"]) == (topic, 0, 1)
    assert [stamp.timestamp() for stamp in table["timestamp"].to_pylist()] == [1.234, 1.235]


def test_only_the_columns_asked_for_are_read(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 3)
    (batch,) = read_range(cluster, *snapshot(cluster, topic), columns=("offset", "value"))
    assert batch.to_pydict() == {"offset": [0, 1, 2], "value": [b"0", b"1", b"2"]}
    for bad in ((), ("value", "value"), ("name",)):
        with pytest.raises(InvalidRequestError, match="columns"):
            read_range(cluster, *snapshot(cluster, topic), columns=bad)


def test_batches_have_at_most_so_many_records(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 1000)
    batches = list(read_range(cluster, *snapshot(cluster, topic), batch_records=300))
    assert [batch.num_rows for batch in batches] == [300, 300, 300, 100]


def test_records_larger_than_a_step_come_whole(cluster: LocalCluster, topic: str) -> None:
    large = [bytes([number]) * 700_000 for number in range(30)]
    with cluster.producer() as producer:
        producer.send_many(topic, large)
    assert table_of(cluster, snapshot(cluster, topic))["value"].to_pylist() == large


def test_an_empty_topic_has_no_records_and_its_schema(cluster: LocalCluster, topic: str) -> None:
    taken = snapshot(cluster, topic)
    assert split_ranges(taken, 5) == []
    assert table_of(cluster, taken).num_rows == 0


def test_a_compacted_log_is_read_to_the_end_of_the_range(tmp_path: Path) -> None:
    with LocalCluster(brokers=1, data_dir=tmp_path, compaction_check_interval_ms=100) as cluster:
        cluster.create_topic(
            "t",
            cleanup_policy="compact",
            segment_bytes=2048,
            min_cleanable_dirty_ratio=0.0,
            max_compaction_lag_ms=1,
        )
        job = begin_write(cluster, "t")
        rows = pa.table(
            {"value": [str(n) for n in range(900)], "key": [str(n % 5) for n in range(900)]}
        )
        job = job._replace(batch_bytes=256)
        write_task(cluster, job, 0, [rows])
        taken = snapshot(cluster, "t")
        assert taken[0].end == 900

        def seen() -> list[int]:
            return values(table_of(cluster, split_ranges(taken, 4)))

        eventually(lambda: len(seen()) < 300, "most records are compacted")
        left = seen()
        assert left == sorted(left)
        assert left[-5:] == [895, 896, 897, 898, 899]
        assert write_task(cluster, job, 0, [rows]).repeated == 900, "what is gone counts as written"
        assert snapshot(cluster, "t") == taken


def test_a_reader_that_is_closed_half_way_stops_fetching(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 1000)
    batches: Iterator[Any] = read_range(cluster, *snapshot(cluster, topic), batch_records=10)
    assert next(batches).num_rows == 10
    batches.close()  # type: ignore[attr-defined]
    assert next(batches, None) is None


def test_a_cluster_that_was_pickled_reads_over_the_shared_connection(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 10)
    taken = snapshot(cluster, topic)
    other = pickle.loads(pickle.dumps(cluster))
    assert other.shared_client()[0] is cluster.shared_client()[0]
    assert values(table_of(other, taken)) == list(range(10))


# --- what happens meanwhile -----------------------------------------------------------------------


def test_records_that_expired_after_the_snapshot_are_an_error_or_left_out(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 100)
    taken = snapshot(cluster, topic)
    cluster.admin.delete_records({TopicPartition(topic, 0): 60})
    with pytest.raises(OffsetOutOfRangeError, match="fail_on_data_loss=False"):
        table_of(cluster, taken)
    assert values(table_of(cluster, taken, fail_on_data_loss=False)) == list(range(60, 100))


def test_a_split_past_the_end_is_an_error_or_an_end_and_never_other_records(
    cluster: LocalCluster, topic: str
) -> None:
    """As after an unclean election that cut the range off."""
    fill(cluster, topic, 10)
    (whole,) = snapshot(cluster, topic)
    gone = [whole._replace(start=12, end=20)]
    with pytest.raises(OffsetOutOfRangeError, match="past the end"):
        table_of(cluster, gone)
    assert table_of(cluster, gone, fail_on_data_loss=False).num_rows == 0


def test_all_of_a_split_expired_is_an_end_without_records(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 100)
    (whole,) = snapshot(cluster, topic)
    cluster.admin.delete_records({TopicPartition(topic, 0): 60})
    early = [whole._replace(end=50)]
    assert table_of(cluster, early, fail_on_data_loss=False).num_rows == 0


def test_a_topic_deleted_after_the_snapshot_is_told(cluster: LocalCluster, topic: str) -> None:
    fill(cluster, topic, 10)
    taken = snapshot(cluster, topic)
    cluster.admin.delete_topic(topic)
    with pytest.raises(UnknownTopicError):
        table_of(cluster, taken)


def test_a_topic_created_again_is_not_read_in_place_of_the_old_one(
    cluster: LocalCluster, topic: str
) -> None:
    fill(cluster, topic, 10)
    taken = snapshot(cluster, topic)
    cluster.admin.delete_topic(topic)
    cluster.create_topic(topic)
    fill(cluster, topic, 10)
    with pytest.raises(UnknownTopicError, match="created again"):
        table_of(cluster, taken)


def test_a_topic_deleted_while_it_is_read_is_told(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic()
    value = bytes(range(256)) * 1000
    with cluster.producer(compression_type="none") as producer:
        for _ in range(100):
            producer.send(topic, value)
    batches = read_range(cluster, *snapshot(cluster, topic), batch_records=1, timeout_s=60.0)
    next(batches)
    cluster.admin.delete_topic(topic)
    with pytest.raises(UnknownTopicError, match=f"Reading {topic}-0 from offset 0 to 100"):
        list(batches)


def test_a_leader_that_dies_during_a_read_is_followed(fragile: LocalCluster) -> None:
    fragile.create_topic("t")
    value = b"x" * 50_000
    with fragile.producer(compression_type="none") as producer:
        for number in range(1000):
            producer.send("t", b"%d " % number + value)
    batches = read_range(fragile, *snapshot(fragile, "t"), batch_records=100, timeout_s=60.0)
    read = [next(batches)]
    fragile.kill_broker(leader_of(fragile, "t"))
    read += batches
    numbers = [int(one.split(b" ")[0]) for batch in read for one in batch["value"].to_pylist()]
    assert numbers == list(range(1000))


def test_a_partition_that_stays_offline_is_an_error_and_never_a_short_read(
    fragile: LocalCluster,
) -> None:
    fragile.create_topic("t", replication_factor=1)
    fill(fragile, "t", 100)
    taken = snapshot(fragile, "t")
    leader = leader_of(fragile, "t")
    fragile.kill_broker(leader)
    eventually(
        lambda: fragile.admin.describe_topic("t").partitions[0].leader is None,
        "the partition is offline",
    )
    with pytest.raises(PartitionOfflineError, match="t-0"):
        snapshot(fragile, "t", timeout_s=3)
    with pytest.raises(PartitionOfflineError, match="no progress for 3 s"):
        table_of(fragile, taken, timeout_s=3)
    fragile.start_broker(leader)
    assert values(table_of(fragile, taken)) == list(range(100)), "it heals"


def test_a_batch_that_nobody_can_read_is_an_exact_error_and_the_rest_can_be_read(
    cluster: LocalCluster, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()
    fill(cluster, topic, 5)
    with monkeypatch.context() as patch:  # as a leader of an older version, which did not check
        patch.setattr(produced_batch, "check_records", lambda *_, **__: None)
        produce_raw(cluster, topic, sealed({}, b"\xc1garbage"))
    fill(cluster, topic, 5, first=5)
    (split,) = split_ranges(snapshot(cluster, topic))
    for options in ({}, {"fail_on_data_loss": False}):
        with pytest.raises(CorruptBatchError, match="stopped at 5") as caught:
            table_of(cluster, [split], **options)
        error = caught.value
        assert (error.topic_partition, error.offset) == (TopicPartition(topic, 0), 5)
        assert error.next_offset == 6
    around = [split._replace(end=error.offset), split._replace(start=error.next_offset)]
    assert values(table_of(cluster, around)) == list(range(10))

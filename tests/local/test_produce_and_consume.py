"""Records from `send` to `poll`: they do not change on the way."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pyarrow
import pytest

import rayq
from rayq import RecordMetadata
from rayq.testing import LocalCluster
from tests.local.support import eventually, place, read_all, values

NewTopic = Callable[..., str]


def test_a_record_arrives_with_all_that_it_was_sent_with(cluster: LocalCluster, topic: str) -> None:
    headers = [("b", b"1"), ("a", b"2"), ("b", b"3"), ("empty", b"")]
    with cluster.producer() as producer:
        metadata = producer.send(
            topic, b"\x00value\xff", key=b"key", headers=headers, timestamp_ms=1_357_000_000_000
        ).result(60)
    assert metadata == RecordMetadata(topic, 0, 0, 1_357_000_000_000)
    (record,) = read_all(cluster, topic)
    assert record == rayq.Record(topic, 0, 0, 1_357_000_000_000, b"key", b"\x00value\xff", headers)


def test_null_and_empty_keys_and_values_stay_what_they_are(
    cluster: LocalCluster, topic: str
) -> None:
    pairs = [(None, b"v"), (b"k", None), (None, None), (b"", b""), (b"k", b"")]
    with cluster.producer() as producer:
        for key, value in pairs:
            producer.send(topic, value, key=key)
    found = read_all(cluster, topic)
    assert [(record.key, record.value) for record in found] == pairs
    assert all(record.headers == [] for record in found)


def test_a_record_without_a_timestamp_gets_the_time_of_sending(
    cluster: LocalCluster, topic: str
) -> None:
    before_ms = time.time_ns() // 1_000_000
    with cluster.producer() as producer:
        producer.send(topic, b"x")
    (record,) = read_all(cluster, topic)
    assert before_ms <= record.timestamp_ms <= time.time_ns() // 1_000_000


def test_a_topic_of_append_time_overrides_the_producers_timestamps(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(message_timestamp_type="append")
    before_ms = time.time_ns() // 1_000_000
    with cluster.producer() as producer:
        metadata = producer.send(topic, b"x", timestamp_ms=1000).result(60)
    (record,) = read_all(cluster, topic)
    assert record.timestamp_ms == metadata.timestamp_ms >= before_ms


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_every_level_of_acks_delivers(cluster: LocalCluster, topic: str, acks: Any) -> None:
    sent = [b"%d" % number for number in range(101)]
    with cluster.producer() as producer:
        producer.send(topic, sent[0]).result(60)  # acks=0 goes to a leader that serves, or is lost
    with cluster.producer(acks=acks) as producer:
        futures = [producer.send(topic, value) for value in sent[1:]]
        producer.flush(timeout_s=60)
        offsets = [future.result(0).offset for future in futures]
    assert offsets == ([None] * 100 if acks == 0 else list(range(1, 101)))
    eventually(lambda: len(read_all(cluster, topic)) >= 101, "all records are committed")
    assert values(read_all(cluster, topic)) == sent


def test_send_many_keeps_the_order_and_says_where_everything_went(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    sent = [b"%d" % number for number in range(5000)]
    keys = [b"%d" % (number % 11) for number in range(5000)]
    with cluster.producer() as producer:
        ranges = producer.send_many(topic, sent, keys=keys).result(60)
    assert sum(one.end - one.start for one in ranges) == 5000
    by_key: dict[bytes | None, list[bytes | None]] = defaultdict(list)
    for record in read_all(cluster, topic):
        by_key[record.key].append(record.value)
        assert record.key is not None and record.partition == zlib.crc32(record.key) % 2
    for key in set(keys):
        assert by_key[key] == [value for value, at in zip(sent, keys, strict=True) if at == key]


def test_records_without_a_key_spread_over_the_partitions(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    with cluster.producer(batch_size=1000, linger_ms=0) as producer:
        producer.send_many(topic, [b"x" * 100] * 500).result(60)
    assert {record.partition for record in read_all(cluster, topic)} == {0, 1}


def test_a_partition_or_a_partitioner_of_ones_own_decides(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=3)
    with cluster.producer(partitioner=lambda key, count: len(key or b"") % count) as producer:
        assert producer.send(topic, b"x", key=b"12").result(60).partition == 2
        assert producer.send(topic, b"x").result(60).partition == 0
        assert producer.send(topic, b"x", key=b"12", partition=1).result(60).partition == 1


def test_what_a_single_replica_took_without_the_disk_is_readable_at_once(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    """The record is readable although neither a flush nor a follower comes after the append."""
    topic = new_topic(replication_factor=1, flush="os")
    with cluster.producer(acks=1) as producer:
        producer.send(topic, b"x").result(60)
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        assert values(consumer.poll(timeout_s=60)) == [b"x"]


def test_incompressible_and_large_records_pass_unchanged(cluster: LocalCluster, topic: str) -> None:
    import random

    sent: list[bytes] = [random.Random(1).randbytes(900_000), b"a" * 1_000_000, b"small"]
    for compression in ("lz4", "none"):
        with cluster.producer(compression_type=compression) as producer:
            producer.send_many(topic, sent).result(60)
    assert values(read_all(cluster, topic)) == sent * 2


def test_on_delivery_is_called_with_the_metadata(cluster: LocalCluster, topic: str) -> None:
    delivered: list[Any] = []
    with cluster.producer() as producer:
        producer.send(topic, b"x", on_delivery=lambda *outcome: delivered.append(outcome))
        producer.flush(timeout_s=10)
    ((metadata, error),) = delivered
    assert error is None and metadata.offset == 0


def test_iteration_yields_record_by_record_and_position_counts_only_those(
    cluster: LocalCluster, topic: str
) -> None:
    with cluster.producer() as producer:
        producer.send_many(topic, [b"%d" % number for number in range(10)]).result(60)
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        seen = [record.value for record, _ in zip(consumer, range(3), strict=False)]
        assert seen == [b"0", b"1", b"2"]
        # zip takes one more from the iterator before it sees that the range is over.
        assert consumer.position(place(topic)) == 4
        assert consumer.poll(timeout_s=60)[0].offset == 4


def test_poll_returns_as_soon_as_there_is_a_record(cluster: LocalCluster, topic: str) -> None:
    with cluster.consumer(topic) as consumer, cluster.producer() as producer:
        producer.send(topic, b"x")
        started_s = time.monotonic()
        assert values(consumer.poll(timeout_s=30)) == [b"x"]
        assert time.monotonic() - started_s < 10


def test_poll_returns_nothing_when_the_time_is_up(cluster: LocalCluster, topic: str) -> None:
    with cluster.consumer(topic) as consumer:
        assert consumer.poll(timeout_s=0.05) == []
        assert consumer.poll_arrow(timeout_s=0.05).num_rows == 0


def test_poll_arrow_gives_the_same_records_as_columns(cluster: LocalCluster, topic: str) -> None:
    with cluster.producer() as producer:
        producer.send(topic, b"1", key=b"k", headers=[("h", b"x"), ("h", b"y")], timestamp_ms=5)
        producer.send(topic, None, timestamp_ms=6)
        producer.flush()
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        table = consumer.poll_arrow(timeout_s=5)
        while table.num_rows < 2:
            table = pyarrow.concat_tables([table, consumer.poll_arrow(timeout_s=5)])
    assert table.column("value").to_pylist() == [b"1", None]
    assert table.column("key").to_pylist() == [b"k", None]
    assert table.column("offset").to_pylist() == [0, 1]
    assert table.column("partition").to_pylist() == [0, 0]
    assert table.column("topic").to_pylist() == [topic, topic]
    assert [int(one.timestamp() * 1000) for one in table.column("timestamp").to_pylist()] == [5, 6]
    assert table.column("headers").to_pylist()[0] == [
        {"name": "h", "value": b"x"},
        {"name": "h", "value": b"y"},
    ]


def test_the_async_classes_do_the_same_as_coroutines(cluster: LocalCluster, topic: str) -> None:
    async def both() -> list[bytes | None]:
        async with cluster.async_producer() as producer:
            future = await producer.send(topic, b"0", key=b"k")
            assert (await future).offset == 0
            ranges = await (await producer.send_many(topic, [b"1", b"2"]))
            assert [(one.start, one.end) for one in ranges] == [(1, 3)]
            await producer.flush()
        seen: list[bytes | None] = []
        async with cluster.async_consumer(topic, auto_offset_reset="earliest") as consumer:
            assert await consumer.assignment() == {place(topic)}
            async for record in consumer:
                seen.append(record.value)
                if len(seen) == 3:
                    break
            assert await consumer.position(place(topic)) == 3
            assert await consumer.end_offsets([place(topic)]) == {place(topic): 3}
        return seen

    assert asyncio.run(both()) == [b"0", b"1", b"2"]


def test_a_consumer_sees_partitions_that_are_added(cluster: LocalCluster, topic: str) -> None:
    with cluster.consumer(topic) as consumer, cluster.producer() as producer:
        cluster.admin.create_partitions(topic, 2)
        producer.send(topic, b"late", partition=1).result(60)
        assert values(consumer.poll(timeout_s=60)) == [b"late"]
        assert consumer.assignment() == {place(topic, 0), place(topic, 1)}


def test_a_local_cluster_listens_where_its_config_says() -> None:
    with LocalCluster(brokers=1, bind_host="127.0.0.7") as cluster:
        cluster.create_topic("there", 1)
        (broker,) = cluster.admin.describe_cluster().brokers
        (replica,) = cluster.admin.describe_topic("there").partitions[0].replicas
        assert broker.host == replica.host == "127.0.0.7"

"""What consumers show of transactions, and what they pass over, against a played cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayq.client.cluster import Cluster
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.consumer import Consumer
from rayq.messages import (
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    DescribeOpenTransactions,
    Fetch,
    ListOffsets,
)
from rayq.records import TopicPartition
from rayq.storage.batch import read_header, without_transaction
from tests.client.fake_broker import FakeCluster
from tests.client.fake_transaction_log import PlayedTransactions, transaction

T0 = TopicPartition("t", 0)
A, B, C = transaction(1), transaction(2, epoch=3), transaction(2, epoch=4)
EARLIEST: dict[str, Any] = {"auto_offset_reset": "earliest", "fetch_max_wait_ms": 50}
UNCOMMITTED: dict[str, Any] = {**EARLIEST, "isolation_level": "read_uncommitted"}
WAYS = ["poll", "poll_arrow", "iterate", "until_end"]


def values_of(
    consumer: Consumer, way: str, place: TopicPartition = T0
) -> list[bytes | None]:
    """What a consumer reads up to the end as it is now."""
    end = consumer.end_offsets([place])[place]
    if way == "until_end":
        return [record.value for record in consumer.until_end(10)]
    if way == "iterate":
        until = consumer.begin_until_end(10)
        return [record.value for record in iter(lambda: consumer._next(until), None)]
    found: list[bytes | None] = []
    while consumer.position(place) < end:
        if way == "poll":
            found += [record.value for record in consumer.poll(0.2, 3)]
        else:
            found += consumer.poll_arrow(0.2)["value"].to_pylist()
    return found


async def values_of_async(consumer: AsyncConsumer, way: str) -> list[bytes | None]:
    end = (await consumer.end_offsets([T0]))[T0]
    if way in ("until_end", "iterate"):
        return [record.value async for record in consumer.until_end(10)]
    found: list[bytes | None] = []
    while await consumer.position(T0) < end:
        if way == "poll":
            found += [record.value for record in await consumer.poll(0.2, 3)]
        else:
            found += (await consumer.poll_arrow(0.2))["value"].to_pylist()
    return found


def interleave(fake: FakeCluster) -> None:
    """Aborted A, committed B and C of one producer, and records of none, mixed."""
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0", b"a1"])
    fake.write_in(B, "t", [b"b0"])
    fake.write("t", [b"n0"])
    fake.end_in(B, "t")
    fake.write_in(A, "t", [b"a2"], writer=7)
    fake.write_in(C, "t", [b"c0", b"c1"])
    fake.end_in(A, "t", is_commit=False)
    fake.write("t", [b"n1"])
    fake.end_in(C, "t")


COMMITTED = [b"b0", b"n0", b"c0", b"c1", b"n1"]
ALL = [b"a0", b"a1", b"b0", b"n0", b"a2", b"c0", b"c1", b"n1"]


@pytest.mark.parametrize("way", WAYS)
def test_committed_records_come_and_aborted_ones_do_not(
    fake: FakeCluster, cluster: Cluster, way: str
) -> None:
    interleave(fake)
    with cluster.consumer("t", **EARLIEST) as consumer:
        assert values_of(consumer, way) == COMMITTED
        assert consumer.position(T0) == fake.topics["t"].partitions[0].end
        assert consumer.lag() == {T0: 0}
    with cluster.consumer("t", **UNCOMMITTED) as consumer:
        assert values_of(consumer, way) == ALL


@pytest.mark.parametrize("way", WAYS)
def test_an_async_consumer_shows_the_same(
    fake: FakeCluster, cluster: Cluster, way: str
) -> None:
    interleave(fake)

    async def read(**config: Any) -> list[bytes | None]:
        async with cluster.async_consumer("t", **config) as consumer:
            return await values_of_async(consumer, way)

    assert asyncio.run(read(**EARLIEST)) == COMMITTED
    assert asyncio.run(read(**UNCOMMITTED)) == ALL


def test_every_question_names_its_isolation(fake: FakeCluster, cluster: Cluster) -> None:
    interleave(fake)
    for config, isolation in ((EARLIEST, READ_COMMITTED), (UNCOMMITTED, READ_UNCOMMITTED)):
        fake.requests.clear()
        with cluster.consumer("t", **config) as consumer:
            consumer.poll(5)
            consumer.seek_to_last(2)
            consumer.seek_to_end()
            consumer.offsets_for_times({T0: 5})
            asked = fake.asked(Fetch) + fake.asked(ListOffsets)
            assert {one.isolation for one in asked} == {isolation}


def test_reading_stops_below_a_transaction_that_is_open(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"n0"])
    fake.write_in(A, "t", [b"a0"])
    fake.write("t", [b"n1"])
    with cluster.consumer("t", **EARLIEST) as consumer:
        assert consumer.end_offsets([T0]) == {T0: 1}
        assert [record.value for record in consumer.until_end(10)] == [b"n0"]
        assert consumer.poll(0.1) == [] and consumer.lag() == {T0: 0}
        fake.end_in(A, "t")
        assert [record.value for record in consumer.until_end(10)] == [b"a0", b"n1"]
        assert consumer.position(T0) == 4
    with cluster.consumer("t", **UNCOMMITTED) as consumer:
        assert consumer.end_offsets([T0]) == {T0: 4}
        assert [record.value for record in consumer.until_end(10)] == [b"n0", b"a0", b"n1"]


def test_latest_is_below_what_is_open(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0"])
    with (
        cluster.consumer("t", auto_offset_reset="latest") as consumer,
        cluster.consumer("t", **{**UNCOMMITTED, "auto_offset_reset": "latest"}) as other,
    ):
        assert (consumer.position(T0), other.position(T0)) == (0, 1)
        fake.end_in(A, "t")
        assert [record.value for record in consumer.poll(5)] == [b"a0"]


def test_a_poll_that_finds_only_markers_moves_the_position(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.end_in(A, "t")
    fake.write_in(B, "t", [b"b0"] * 5)
    fake.end_in(B, "t", is_commit=False)
    for config, shown in ((EARLIEST, 0), (UNCOMMITTED, 5)):
        with cluster.consumer("t", **config) as consumer:
            read = 0
            while consumer.position(T0) < 7:
                read += len(consumer.poll(0.1))
            assert read == shown and consumer.lag() == {T0: 0}


def test_a_group_is_not_behind_a_marker_that_follows_its_last_record(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0", b"a1"])
    fake.end_in(A, "t")
    with cluster.consumer("t", group="g", **EARLIEST) as consumer:
        assert [record.value for record in consumer.until_end(20)] == [b"a0", b"a1"]
        consumer.commit()
        assert consumer.committed([T0]) == {T0: 3}


def test_a_compacted_batch_without_its_bit_is_committed(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0"])
    fake.end_in(A, "t")
    batches = fake.topics["t"].partitions[0].batches
    data = without_transaction(batches[0][1])
    fake.call(lambda: batches.__setitem__(0, (read_header(data), data)))
    fake.replace_batch("t", 1, None)  # Compaction takes markers away in the end.
    with cluster.consumer("t", **EARLIEST) as consumer:
        assert [record.value for record in consumer.until_end(10)] == [b"a0"]


@pytest.mark.parametrize("way", ["poll", "poll_arrow"])
def test_a_long_aborted_transaction_does_not_fill_the_buffer_forever(
    fake: FakeCluster, cluster: Cluster, way: str
) -> None:
    fake.create_topic("t")
    for _ in range(100):
        fake.write_in(A, "t", [bytes(1000)], compression="none")
    fake.end_in(A, "t", is_commit=False)
    fake.write("t", [b"n0"])
    small = {"fetch_max_bytes": 4096, "fetch_buffer_bytes": 8192}
    with cluster.consumer("t", **{**EARLIEST, **small}) as consumer:
        found = consumer.poll(10) if way == "poll" else consumer.poll_arrow(10)["value"].to_pylist()
        assert len(found) == 1


# --- the last records -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(8))
def test_the_last_records_are_counted_without_markers_and_aborted_ones(
    fake: FakeCluster, cluster: Cluster, count: int
) -> None:
    interleave(fake)
    for config, there in ((EARLIEST, COMMITTED), (UNCOMMITTED, ALL)):
        with cluster.consumer("t", **config) as consumer:
            consumer.seek_to_last(count)
            last = there[max(len(there) - count, 0) :]
            assert values_of(consumer, "until_end") == last


def test_the_last_records_of_an_ordinary_log_take_no_more_questions(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"n"] * 10)
    with cluster.consumer("t", **EARLIEST) as consumer:
        fake.requests.clear()
        consumer.seek_to_last(3)
        assert consumer.position(T0) == 7
        latest = [one for one in fake.asked(ListOffsets) if one.timestamp_ms == LATEST]
        assert (len(latest), len(fake.asked(DescribeOpenTransactions))) == (0, 1)


# --- any log --------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["write", "commit", "abort"])), max_size=25
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, bytes_max=st.sampled_from([1024, 100_000]), way=st.sampled_from(WAYS))
def test_any_log_shows_what_is_decided(
    fake: FakeCluster, cluster: Cluster, steps: list[tuple[int, str]], bytes_max: int, way: str
) -> None:
    """Producer 0 uses no transactions; of the others each end begins the next epoch."""
    topic = f"t{len(fake.topics)}"
    place = TopicPartition(topic, 0)
    fake.create_topic(topic)
    epochs = [0, 0, 0, 0]
    written: list[tuple[tuple[int, int] | None, bytes]] = []
    committed: set[tuple[int, int] | None] = {None}
    for number, (producer, step) in enumerate(steps):
        of = transaction(producer, epochs[producer])
        value = b"%d" % number
        if producer == 0:
            fake.write(topic, [value])
            written.append((None, value))
        elif step == "write":
            fake.write_in(of, topic, [value])
            written.append((of, value))
        else:
            fake.end_in(of, topic, is_commit=step == "commit")
            epochs[producer] += 1
            if step == "commit":
                committed.add(of)
    transactions: PlayedTransactions = fake.topics[topic].partitions[0].transactions
    shown: list[bytes] = []
    for of, value in written:
        if of in transactions.open:
            break
        if of in committed:
            shown.append(value)
    with cluster.consumer(topic, **{**EARLIEST, "fetch_max_bytes": bytes_max}) as consumer:
        assert values_of(consumer, way, place) == shown
        assert consumer.lag() == {place: 0}

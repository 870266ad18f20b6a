"""Positions of a consumer: seek, times, pause, resets, lag."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import rayq
from rayq import TopicPartition
from rayq.testing import LocalCluster
from tests.local.support import eventually, place, values

NewTopic = Callable[..., str]


@pytest.fixture
def ten(cluster: LocalCluster, topic: str) -> str:
    """A topic with the records 0 to 9, a second apart, each in a batch of its own."""
    with cluster.producer() as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number, timestamp_ms=1000 * number).result(60)
    return topic


def test_latest_reads_what_comes_after_and_earliest_everything(
    cluster: LocalCluster, ten: str
) -> None:
    with (
        cluster.consumer(ten) as late,
        cluster.consumer(ten, auto_offset_reset="earliest") as early,
        cluster.producer() as producer,
    ):
        assert late.position(place(ten)) == 10
        producer.send(ten, b"new").result(60)
        assert values(late.poll(timeout_s=60)) == [b"new"]
        assert early.poll(timeout_s=60, max_records=1)[0].offset == 0


def test_seek_moves_the_next_poll(cluster: LocalCluster, ten: str) -> None:
    with cluster.consumer(ten) as consumer:
        consumer.seek(place(ten), 7)
        assert values(consumer.poll(timeout_s=60, max_records=2)) == [b"7", b"8"]
        consumer.seek_to_beginning()
        assert consumer.poll(timeout_s=60, max_records=1)[0].offset == 0
        assert consumer.position(place(ten)) == 1
        consumer.seek_to_end(place(ten))
        assert consumer.position(place(ten)) == 10
        consumer.seek(place(ten), 9)
        assert values(consumer.poll(timeout_s=60)) == [b"9"]


def test_offsets_are_found_by_time(cluster: LocalCluster, ten: str) -> None:
    at = place(ten)
    with cluster.consumer(ten) as consumer:
        assert consumer.offsets_for_times({at: 3000}) == {at: 3}
        assert consumer.offsets_for_times({at: 3001}) == {at: 4}
        assert consumer.offsets_for_times({at: 0}) == {at: 0}
        assert consumer.offsets_for_times({at: 9001}) == {at: None}
        assert consumer.beginning_offsets([at]) == {at: 0}
        assert consumer.end_offsets([at]) == {at: 10}


def test_lag_counts_down_to_zero(cluster: LocalCluster, ten: str) -> None:
    with cluster.consumer(ten, auto_offset_reset="earliest") as consumer:
        assert consumer.lag() == {place(ten): 10}
        assert len(consumer.poll(timeout_s=60, max_records=4)) == 4
        assert consumer.lag() == {place(ten): 6}


def test_a_paused_partition_gives_nothing_until_it_is_resumed(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    with cluster.producer() as producer:
        for partition in (0, 1):
            producer.send(topic, b"%d" % partition, partition=partition)
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        consumer.pause(place(topic, 0))
        assert values(consumer.poll(timeout_s=60)) == [b"1"]
        assert consumer.poll(timeout_s=0.1) == []
        consumer.resume(place(topic, 0))
        assert values(consumer.poll(timeout_s=60)) == [b"0"]


def test_assign_replaces_what_is_read(cluster: LocalCluster, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=2)
    with cluster.producer() as producer:
        for partition in (0, 1):
            producer.send(topic, b"%d" % partition, partition=partition)
    with cluster.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, 1)])
        assert consumer.assignment() == {place(topic, 1)}
        assert values(consumer.poll(timeout_s=60)) == [b"1"]
        consumer.assign([place(topic, 0)])
        assert values(consumer.poll(timeout_s=60)) == [b"0"]
        consumer.subscribe([topic])
        assert consumer.assignment() == {place(topic, 0), place(topic, 1)}


def test_deleted_records_send_the_reader_to_where_it_was_told_to_go(
    cluster: LocalCluster, ten: str
) -> None:
    at = place(ten)
    assert cluster.admin.delete_records({at: 6}) == {at: 6}
    with cluster.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([at])
        consumer.seek(at, 2)
        assert consumer.poll(timeout_s=60)[0].offset == 6
    with cluster.consumer(auto_offset_reset="latest") as consumer:
        consumer.assign([at])
        consumer.seek(at, 2)
        eventually(lambda: consumer.poll(timeout_s=0.1) == [] and consumer.position(at) == 10, "")
    with cluster.consumer(auto_offset_reset="none") as consumer:
        consumer.assign([at])
        consumer.seek(at, 2)
        with pytest.raises(rayq.OffsetOutOfRangeError, match=r"below the log start 6 \(its end is 10\)"):
            consumer.poll(timeout_s=60)
        consumer.seek(at, 8)
        assert values(consumer.poll(timeout_s=60)) == [b"8", b"9"]


def test_without_a_reset_a_consumer_without_a_position_says_so(
    cluster: LocalCluster, ten: str
) -> None:
    with (
        cluster.consumer(ten, auto_offset_reset="none") as consumer,
        pytest.raises(rayq.OffsetOutOfRangeError),
    ):
        consumer.poll(timeout_s=60)


def test_a_position_past_the_end_follows_the_reset_policy(cluster: LocalCluster, ten: str) -> None:
    at = place(ten)
    with cluster.consumer(ten, auto_offset_reset="earliest") as consumer:
        consumer.seek(at, 11)
        assert consumer.poll(timeout_s=60, max_records=1)[0].offset == 0
    with cluster.consumer(ten, auto_offset_reset="none") as consumer:
        consumer.seek(at, 11)
        told = r"11 .* past the end of the log 10 \(its start is 0\).* seek to an offset"
        with pytest.raises(rayq.OffsetOutOfRangeError, match=told):
            consumer.poll(timeout_s=60)
        consumer.seek(at, 9)
        assert values(consumer.poll(timeout_s=60)) == [b"9"]
    group = f"past-the-end-of-{ten}"
    with cluster.consumer(ten, group=group, auto_offset_reset="latest") as consumer:
        eventually(
            lambda: consumer.poll(timeout_s=0.1) == [] and consumer.assignment() == {at}, "joined"
        )
        consumer.commit({at: 1000})  # accepted: the coordinator does not have the log
    with (
        cluster.consumer(ten, group=group, auto_offset_reset="none") as consumer,
        pytest.raises(rayq.OffsetOutOfRangeError, match="1000 .* past the end of the log 10 "),
    ):
        consumer.poll(timeout_s=60)
    with cluster.consumer(ten, group=group, auto_offset_reset="latest") as consumer:
        eventually(
            lambda: consumer.poll(timeout_s=0.1) == [] and consumer.assignment() == {at}, "joined"
        )
        eventually(
            lambda: consumer.poll(timeout_s=0.1) == [] and consumer.position(at) == 10, "the end"
        )


def test_bad_positions_are_refused(cluster: LocalCluster, ten: str) -> None:
    with cluster.consumer(ten) as consumer:
        with pytest.raises(rayq.RayqError, match="-1"):
            consumer.seek(place(ten), -1)
        with pytest.raises(TypeError):
            consumer.seek(place(ten), "3")  # type: ignore[arg-type]
        with pytest.raises(rayq.RayqError, match="assigned"):
            consumer.seek(place("another"), 0)
        with pytest.raises(rayq.RayqError):
            consumer.offsets_for_times({place(ten): -5})
        with pytest.raises(rayq.errors.InvalidRequestError, match="not 7"):
            consumer.assign([place(ten, 7)])
        with pytest.raises(rayq.RayqError, match="max_records"):
            consumer.poll(max_records=0)


def test_commits_need_a_group(cluster: LocalCluster, ten: str) -> None:
    with cluster.consumer(ten) as consumer, pytest.raises(rayq.RayqError, match="group"):
        consumer.commit()


def test_a_closed_consumer_says_that_it_is_closed(cluster: LocalCluster, ten: str) -> None:
    consumer = cluster.consumer(ten)
    consumer.close()
    consumer.close()
    with pytest.raises(rayq.errors.ClosedError):
        consumer.poll()

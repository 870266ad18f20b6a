"""What leaders of partitions do about transactions, as clients see it."""

from __future__ import annotations

import pytest

from rayq import messages
from rayq.errors import InvalidRequestError, TimeoutError, UnsupportedVersionError
from rayq.testing import LocalCluster
from tests.local.conftest import NewTopic
from tests.local.support import (
    ask,
    client_identity,
    eventually,
    leader_endpoint,
    leader_of,
    place,
    read_all,
    values,
    wait_in_sync,
)


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_transaction_goes_on_under_each_new_leader_and_ends_as_a_whole(
    fragile: LocalCluster, is_commit: bool
) -> None:
    fragile.create_topic("t")
    with fragile.producer(transactional_id="one") as producer:
        producer.begin_transaction()
        for number in range(3):
            producer.send("t", b"%d" % number).result(60)
            assert read_all(fragile, "t") == []
            fragile.kill_replica("t", 0, leader_of(fragile, "t"))
            wait_in_sync(fragile, "t")
        producer.send("t", b"3").result(60)
        if is_commit:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
        with producer.transaction():
            producer.send("t", b"next")
    expected = [b"0", b"1", b"2", b"3"] if is_commit else []
    eventually(
        lambda: values(read_all(fragile, "t")) == [*expected, b"next"], "both have their markers"
    )


def test_nothing_undecided_is_deleted_by_anybody(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(retention_bytes=1000, segment_bytes=100_000)

    def start() -> int:
        with cluster.consumer() as consumer:
            return consumer.beginning_offsets([place(topic)])[place(topic)]

    with (
        cluster.producer(transactional_id="deletes") as producer,
        cluster.producer(compression_type="none") as plain,
    ):
        plain.send(topic, b"x" * 50_000).result(60)
        producer.begin_transaction()
        held = producer.send(topic, b"held").result(60).offset
        for _ in range(8):
            plain.send(topic, b"x" * 50_000).result(60)
        with pytest.raises(TimeoutError, match="is not decided"):
            cluster.admin.delete_records({place(topic): held + 1}, timeout_s=1)
        assert start() <= held
        producer.commit_transaction()
    eventually(lambda: start() > held, "retention goes on")


def test_a_client_that_knows_no_transactions_is_refused_where_there_are_any(
    cluster: LocalCluster, topic: str
) -> None:
    info = cluster.admin.describe_topic(topic)
    epoch = info.partitions[0].leader_epoch
    fetch = messages.Fetch(info.topic_id, 0, epoch, 0, None, 1000, 0)
    with cluster.producer() as plain:
        plain.send(topic, b"plain").result(60)
    endpoint, identity = leader_endpoint(cluster, topic), client_identity(cluster)
    assert ask(endpoint, identity, fetch).next_offset == 1
    with cluster.producer(transactional_id="modern") as producer, producer.transaction():
        producer.send(topic, b"one")
    with pytest.raises(UnsupportedVersionError, match="Update it"):
        ask(endpoint, identity, fetch)


def test_a_topic_that_does_not_wait_for_its_disk_takes_no_transactions(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(flush="os")
    with cluster.producer(transactional_id="hasty") as producer:
        producer.begin_transaction()
        with pytest.raises(InvalidRequestError, match='flush="disk"'):
            producer.send(topic, b"one").result(60)
        producer.abort_transaction()


def test_figures_tell_how_far_readers_are_held_up(cluster: LocalCluster, topic: str) -> None:
    def told() -> dict[str, float]:
        return {
            one.name.removeprefix("rayq_partition_"): one.value
            for one in cluster.metrics()
            if one.labels.get("topic") == topic and "partition" in one.name
        }

    assert "open_transactions" not in told()
    with cluster.producer(transactional_id="measured") as producer:
        with producer.transaction():
            producer.send(topic, b"one").result(60)
            producer.send(topic, b"two").result(60)
            figures = told()
        assert (figures["open_transactions"], figures["last_stable_offset_lag"]) == (1, 2)
    figures = told()
    assert (figures["open_transactions"], figures["last_stable_offset_lag"]) == (0, 0)
    assert figures["unknown_transactions"] == 0

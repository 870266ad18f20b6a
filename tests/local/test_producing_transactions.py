"""Transactions of producers on real servers, while replicas die."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rayq
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from rayq.core.transactions import changes as transaction_changes
from rayq.errors import AlreadyCommittedError, ProducerFencedError, TransactionAbortedError
from rayq.testing import LocalCluster
from tests.local.support import FAST, eventually, leader_of, place, wait_in_sync


@pytest.fixture
def three(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(brokers=3, data_dir=tmp_path / "data", **FAST) as cluster:
        cluster.create_topic("in", partitions=2)
        cluster.create_topic("out", partitions=3)
        yield cluster


def values(cluster: rayq.Cluster, topic: str = "out") -> list[bytes | None]:
    return [record.value for record in cluster.tail(topic, 10_000)]


def stable_offset(cluster: rayq.Cluster) -> int:
    """Of `out-0`: what lies below is decided."""
    with cluster.consumer() as consumer:
        return consumer.end_offsets([place("out")])[place("out")]


def test_each_input_is_taken_into_account_once_whatever_dies(three: LocalCluster) -> None:
    source = random.Random(1)
    victims = [("out", 0), ("in", 0), (TRANSACTIONS_TOPIC, 0), (OFFSETS_TOPIC, 0), ("out", 1)]

    def kill() -> None:
        for topic, partition in victims:
            wait_in_sync(three, topic, partition=partition)
            three.kill_replica(topic, partition, leader_of(three, topic, partition))

    inputs = three.producer()
    consumer = three.consumer("in", group="g", auto_offset_reset="earliest", max_poll_records=10)
    killer = threading.Thread(target=kill)
    sent = taken = 0
    with inputs, consumer, three.producer(transactional_id="billing") as producer:
        while killer.is_alive() or taken < sent or sent == 0:
            if killer.is_alive() or sent == 0:
                inputs.send_many("in", [b"%d" % (sent + number) for number in range(10)])
                sent += 10
            count = 0
            try:
                with producer.transaction(reads=consumer) as tx:
                    for record in consumer.poll(0.2):
                        tx.send("out", record.value)
                        count += 1
                    if source.random() < 0.2:
                        raise ZeroDivisionError
            except (ZeroDivisionError, TransactionAbortedError):
                continue
            taken += count
            if not killer.ident and taken:
                killer.start()  # All topics exist now.
        places = consumer.assignment()
        assert consumer.committed(places) == consumer.end_offsets(places)
    assert sorted(values(three)) == sorted(b"%d" % number for number in range(sent))


def test_a_transaction_has_its_time(three: LocalCluster) -> None:
    with three.producer(transactional_id="slow", transaction_timeout_ms=3000) as producer:
        with pytest.raises(TransactionAbortedError), producer.transaction() as tx:
            tx.send("out", b"late", partition=0).result(30)
            eventually(lambda: stable_offset(three) == 2, "its marker is written")
        with producer.transaction() as tx:
            tx.send("out", b"in time", partition=0)
    assert values(three) == [b"in time"]


def test_what_is_open_when_the_whole_cluster_dies_ends_by_its_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_changes, "FAILOVER_TIMEOUT_MS", 200)
    with LocalCluster(brokers=3, data_dir=tmp_path, **FAST) as cluster:
        cluster.create_topic("out")
        producer = cluster.producer(
            transactional_id="dies", transaction_timeout_ms=4000, max_block_ms=5000
        )
        producer.begin_transaction()
        producer.send("out", b"open").result(30)
        with cluster.producer() as plain:
            plain.send("out", b"after it").result(30)
        assert stable_offset(cluster) == 0
        cluster.abort()
    with LocalCluster(data_dir=tmp_path, **FAST) as cluster:
        eventually(lambda: stable_offset(cluster) == 3, "its marker is written")
        assert values(cluster) == [b"after it"]
        eventually(lambda: not cluster.admin.list_transactions(), "it is forgotten")


def test_the_last_owner_of_an_id_writes_and_the_one_before_does_not(three: LocalCluster) -> None:
    old = three.producer(transactional_id="shared")
    old.begin_transaction()
    old.send("out", b"lost").result(30)
    with three.producer(transactional_id="shared") as new:
        with new.transaction(name="batch 1") as tx:
            tx.send("out", b"new")
        with pytest.raises((ProducerFencedError, TransactionAbortedError)):
            old.commit_transaction()
        with pytest.raises(ProducerFencedError):
            old.begin_transaction()
    old.close()
    with three.producer(transactional_id="shared") as again:
        with pytest.raises(AlreadyCommittedError), again.transaction(name="batch 1"):
            raise AssertionError("the block does not run")
    assert values(three) == [b"new"]


def test_an_event_loop_has_the_same(three: LocalCluster) -> None:
    async def story() -> None:
        async with three.async_producer(transactional_id="async") as producer:
            for number in range(20):
                try:
                    async with producer.transaction() as tx:
                        for partition in range(3):
                            await tx.send("out", b"%d" % number, partition=partition)
                        if number % 3 == 0:
                            raise ZeroDivisionError
                except ZeroDivisionError:
                    pass

    asyncio.run(story())
    expected = [b"%d" % number for number in range(20) if number % 3]
    assert sorted(values(three)) == sorted(3 * expected)

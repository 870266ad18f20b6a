"""Brokers that are killed and start again are found by clients that were open before."""

from __future__ import annotations

import socket

import pytest

from rayq.testing import LocalCluster
from tests.local.support import FAST


@pytest.mark.parametrize("brokers", [1, 3])
def test_a_client_goes_on_when_each_broker_in_turn_was_killed_and_started(brokers: int) -> None:
    with LocalCluster(brokers=brokers, **FAST) as cluster:
        cluster.create_topic("t", partitions=2)
        with cluster.producer() as producer, cluster.consumer("t") as consumer:
            producer.send("t", b"0").result(60)
            assert [record.value for record in consumer.poll(60.0)] == [b"0"]
            addresses = sorted(cluster.addresses)
            for number in range(brokers):
                cluster.kill_broker(number)
                cluster.start_broker(number)
                value = b"after broker %d" % number
                producer.send("t", value).result(100)
                found = []
                while not found:
                    found = [record.value for record in consumer.poll(60.0)]
                assert found == [value]
            assert sorted(cluster.addresses) == addresses
            assert cluster.admin.describe_topic("t").name == "t"


def test_a_client_finds_a_broker_whose_port_was_taken_meanwhile() -> None:
    with LocalCluster(brokers=3, **FAST) as cluster:
        cluster.create_topic("t")
        with cluster.producer() as producer, cluster.connection() as idle:
            producer.send("t", b"0").result(60)
            idle.admin.list_topics()
            with socket.socket() as other:
                host, port = cluster.addresses[0].rsplit(":", 1)
                number = next(
                    broker.broker
                    for broker in cluster.admin.describe_cluster().brokers
                    if broker.port == int(port)
                )
                cluster.kill_broker(number)
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind((host, int(port)))
                other.listen()
                cluster.start_broker(number)
                for another in {0, 1, 2} - {number}:
                    cluster.kill_broker(another)
                    cluster.start_broker(another)
                producer.send("t", b"1").result(100)
                assert idle.admin.list_topics(timeout_s=100) == ["t"]

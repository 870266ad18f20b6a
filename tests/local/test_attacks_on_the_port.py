"""Attacks by clients that reach a server's port, with and without the token: others are served."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from proving.raw_socket import RawSocket
from rayq import messages
from rayq.errors import ProtocolError
from rayq.messages import Fetch, Metadata, MetadataResponse
from rayq.storage.data_directory import DataDirectory
from rayq.testing import LocalCluster
from rayq.wire.tokens import key_of_token
from tests.local.support import ask, client_identity, eventually, leader_endpoint

MIB = 1024**2
Address = tuple[str, int]


def authenticated(cluster: LocalCluster, at: Address) -> RawSocket:
    client = RawSocket(at, timeout_s=20)
    client.authenticate(key_of_token(cluster.token))
    return client


def broker_endpoint(cluster: LocalCluster) -> Address:
    host, _, port = cluster.addresses[0].rpartition(":")
    return host, int(port)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("what", ["broker", "replica"])
def test_silent_sockets_keep_nobody_out(cluster: LocalCluster, topic: str, what: str) -> None:
    at = broker_endpoint(cluster) if what == "broker" else leader_endpoint(cluster, topic)
    silent = [socket.create_connection(at, timeout=10) for _ in range(150)]
    try:
        for _ in range(3):
            assert ask(at, client_identity(cluster), messages.DescribeMetrics(), timeout_s=30)
    finally:
        for one in silent:
            one.close()


def test_fetches_whose_answers_nobody_reads_cost_a_server_little_memory(
    cluster: LocalCluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(replication_factor=1)
    with cluster.producer(compression_type="none", batch_size=MIB) as producer:
        for _ in range(4):
            producer.send(topic, os.urandom(900_000))
        producer.flush()
        info = cluster.admin.describe_topic(topic)
        epoch = info.partitions[0].leader_epoch
        client = authenticated(cluster, leader_endpoint(cluster, topic))
        before = resident_bytes()
        client.ask([Fetch(info.topic_id, 0, epoch, 0, None, 4 * MIB, 0)] * 100)
        client.ask([Fetch(info.topic_id, 0, epoch, 4, None, 4 * MIB, 60_000)] * 300)
        most = 0
        for _ in range(20):  # Each request wakes those that are held.
            producer.send(topic, os.urandom(50_000)).result(60)
            most = max(most, resident_bytes() - before)
        client.close()
    assert most < 150 * MIB


def test_a_topic_that_is_named_again_and_again_is_told_once_or_refused(
    cluster: LocalCluster, topic: str
) -> None:
    at = broker_endpoint(cluster)
    client = authenticated(cluster, at)
    topics = ([topic] * messages.METADATA_TOPICS_MAX, [topic] * 100_000, [])
    client.ask([Metadata(named) for named in topics])
    began_s = time.monotonic()
    assert ask(at, client_identity(cluster), Metadata([topic]), timeout_s=30)
    assert time.monotonic() - began_s < 15
    answers = []
    for _ in range(3):
        try:
            answers.append(client.read_header().count(topic.encode()))
        except ProtocolError as error:
            assert "length <= 10000" in str(error)
    assert sorted(answers) == [0, 1]
    client.close()


def test_metadata_of_many_partitions_comes_in_pages_and_nothing_is_left_out(
    cluster: LocalCluster, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = {new_topic(partitions=2, replication_factor=1) for _ in range(4)}
    monkeypatch.setattr(messages, "METADATA_PARTITIONS_MAX", 3)
    page = ask(broker_endpoint(cluster), client_identity(cluster), Metadata())
    assert isinstance(page, MetadataResponse)
    *others, _ = page.topics  # The page ends with the topic that reaches the limit.
    assert sum(len(topic.partitions) for topic in others) < 3
    assert page.next_after == page.topics[-1].name
    assert topics <= set(cluster.admin.list_topics())
    with cluster.producer() as producer:
        for topic in topics:
            producer.send(topic, b"x", partition=1).result(60)
    with cluster.consumer(*sorted(topics), auto_offset_reset="earliest") as consumer:
        assert len(consumer.assignment()) == 8


def test_a_replica_process_goes_on_after_a_heartbeat_that_found_no_descriptor(
    cluster: LocalCluster, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_endpoint = DataDirectory.read_endpoint
    failures = [OSError(errno.EMFILE, "Too many open files")]

    def read_or_fail(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return read_endpoint(*arguments)

    monkeypatch.setattr(DataDirectory, "read_endpoint", read_or_fail)
    topic = new_topic(replication_factor=1)
    with cluster.producer() as producer:
        producer.send(topic, b"x").result(60)
        eventually(lambda: not failures, "a heartbeat found no descriptor")
        producer.send(topic, b"y").result(60)

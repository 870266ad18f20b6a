"""What whoever reaches a server's port can try, with and without the token: the others are served."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from rayq.errors import ProtocolError
from rayq.storage.data_directory import DataDirectory
from rayq.testing import LocalCluster
from rayq.wire import messages
from rayq.wire.authentication import HANDSHAKE_VERSION, NONCE_BYTES, ClientHandshake, Identity
from rayq.wire.codec import ENCODER, decode_error
from rayq.wire.frames import FLAG_ERROR, HANDSHAKE_API, PREFIX, PREFIX_BYTES, encode_head
from rayq.wire.messages import Fetch, Metadata, MetadataResponse, Request
from tests.local.support import ask, client_identity, leader_endpoint

MIB = 1024**2
Endpoint = tuple[str, int]


class RawClient:
    """Authenticated; sends what it is told to, and reads when it is told to."""

    def __init__(self, identity: Identity, at: Endpoint) -> None:
        self.socket = socket.create_connection(at, timeout=20)
        handshake = ClientHandshake(identity, os.urandom(NONCE_BYTES), None)
        self._write_handshake(handshake.hello())
        self._write_handshake(handshake.answer(self.read_header()))
        handshake.finish(self.read_header())

    def _write_handshake(self, header: bytes) -> None:
        self.socket.sendall(encode_head(HANDSHAKE_VERSION, 0, HANDSHAKE_API, 0, header, 0))

    def write(self, *requests: Request) -> None:
        frames = [
            encode_head(1, 0, request.api, number, ENCODER.encode(request), 0)
            for number, request in enumerate(requests, start=1)
        ]
        self.socket.sendall(b"".join(frames))

    def read_header(self) -> bytes:
        length, _, flags, _, _, header_bytes = PREFIX.unpack(self._read(PREFIX_BYTES))
        header = self._read(length + 4 - PREFIX_BYTES)[:header_bytes]
        if flags & FLAG_ERROR:
            raise decode_error(header)
        return header

    def _read(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            some = self.socket.recv(size - len(received))
            if not some:
                raise ConnectionError("closed")
            received += some
        return received


def broker_endpoint(cluster: LocalCluster) -> Endpoint:
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
            assert ask(at, client_identity(cluster), messages.DescribeMetrics(), timeout_s=5)
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
        client = RawClient(client_identity(cluster), leader_endpoint(cluster, topic))
        before = resident_bytes()
        client.write(
            *[Fetch(info.topic_id, 0, epoch, 0, None, 4 * MIB, 0)] * 100,
            *[Fetch(info.topic_id, 0, epoch, 4, None, 4 * MIB, 60_000)] * 300,
        )
        most = 0
        for _ in range(20):  # Each wakes those that are held.
            producer.send(topic, os.urandom(50_000)).result(10)
            most = max(most, resident_bytes() - before)
        client.socket.close()
    assert most < 150 * MIB


def test_a_topic_that_is_named_again_and_again_is_told_once_or_refused(
    cluster: LocalCluster, topic: str
) -> None:
    at = broker_endpoint(cluster)
    client = RawClient(client_identity(cluster), at)
    client.write(
        Metadata([topic] * messages.METADATA_TOPICS_MAX), Metadata([topic] * 100_000), Metadata([])
    )
    began_s = time.monotonic()
    assert ask(at, client_identity(cluster), Metadata([topic]), timeout_s=10)
    assert time.monotonic() - began_s < 2
    answers = []
    for _ in range(3):
        try:
            answers.append(client.read_header().count(topic.encode()))
        except ProtocolError as error:
            assert "length <= 10000" in str(error)
    assert sorted(answers) == [0, 1]
    client.socket.close()


def test_metadata_of_many_partitions_comes_in_pages_and_nothing_is_left_out(
    cluster: LocalCluster, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = {new_topic(partitions=2, replication_factor=1) for _ in range(4)}
    monkeypatch.setattr(messages, "METADATA_PARTITIONS_MAX", 3)
    page = ask(broker_endpoint(cluster), client_identity(cluster), Metadata())
    assert isinstance(page, MetadataResponse)
    assert sum(len(one.partitions) for one in page.topics) <= 4
    assert page.next_after == page.topics[-1].name
    assert topics <= set(cluster.admin.list_topics())
    with cluster.producer() as producer:
        for topic in topics:
            producer.send(topic, b"x", partition=1).result(10)
    with cluster.consumer(*sorted(topics), auto_offset_reset="earliest") as consumer:
        assert len(consumer.assignment()) == 8


def test_a_replica_process_goes_on_after_a_heartbeat_that_found_no_descriptor(
    cluster: LocalCluster, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_endpoint = DataDirectory.read_endpoint
    failures = iter([OSError(errno.EMFILE, "Too many open files")])

    def read_or_fail(*arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return read_endpoint(*arguments)

    monkeypatch.setattr(DataDirectory, "read_endpoint", read_or_fail)
    topic = new_topic(replication_factor=1)
    with cluster.producer() as producer:
        producer.send(topic, b"x").result(10)
    assert next(failures, None) is None

"""Garbage, truncated and oversized frames, wrong secrets, damaged batches: each is refused, and the
servers go on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayq
from rayq.client.environment import system_environment
from rayq.errors import (
    AuthenticationError,
    ConfigError,
    CorruptBatchError,
    FencedEpochError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidTimestampError,
    RayqError,
    RecordTooLargeError,
    UnknownTopicError,
    UnsupportedFormatError,
    WrongClusterError,
)
from rayq.messages import BrokerHeartbeat, Fetch, ListOffsets, Metadata, Produce, ReplicaFetch
from rayq.storage.batch import encode_batch, read_header
from rayq.testing import LocalCluster
from rayq.wire.authentication import Identity, token_of
from rayq.wire.connection import Connection
from tests.local.support import (
    ask,
    client_identity,
    leader_endpoint,
    place,
    produce_raw,
    read_all,
    values,
)
from tests.wrong_batches import (
    CHUNK,
    CONTROL,
    DEAD_LETTER,
    GOOD,
    LARGE,
    NULL_KEYS,
    TRANSACTIONAL,
    WRONG_BODIES,
    bomb,
    mutated_batches,
    sealed,
)

GARBAGE = {
    "text": b"GET / HTTP/1.1\r\nHost: rayq\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "a frame of 4 GiB": struct.pack("<IBBHII", 2**32 - 1, 1, 0, 0, 0, 0),
    "a frame above the limit before the handshake": struct.pack("<IBBHII", 2000, 1, 0, 0, 0, 10),
    "a header longer than its frame": struct.pack("<IBBHII", 20, 1, 0, 0, 0, 2**31),
    "a request before the handshake": struct.pack("<IBBHII", 13, 1, 0, 1, 1, 1) + b"\x90",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
}


@pytest.fixture(params=["a broker", "a replica"])
def endpoint(
    request: pytest.FixtureRequest, cluster: LocalCluster, topic: str
) -> Iterator[tuple[str, int]]:
    """The port of a server, which has to work afterwards as before."""
    if request.param == "a replica":
        at = leader_endpoint(cluster, topic)
    else:
        host, _, port = cluster.addresses[0].rpartition(":")
        at = host, int(port)
    yield at
    with cluster.producer() as producer:
        producer.send(topic, b"still works").result(60)


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_closes_the_connection_without_an_answer(
    endpoint: tuple[str, int], what: str
) -> None:
    with socket.create_connection(endpoint, timeout=10) as connection:
        connection.sendall(GARBAGE[what])
        assert _received_until_closed(connection) == b""


def _received_until_closed(connection: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            some = connection.recv(4096)
        except ConnectionResetError:
            return received
        if not some:
            return received
        received += some


def test_a_truncated_frame_and_a_sudden_end_harm_nobody(endpoint: tuple[str, int]) -> None:
    for cut in (1, 3, 10, 16, 20):
        with socket.create_connection(endpoint, timeout=10) as connection:
            connection.sendall(struct.pack("<IBBHII", 500, 1, 0, 0, 0, 400)[:cut] + bytes(cut))


def test_a_wrong_token_is_refused(cluster: LocalCluster) -> None:
    stranger = rayq.Cluster(cluster.addresses, b"k" * 32)
    with stranger, pytest.raises(AuthenticationError, match=r"secret|token"):
        stranger.admin.list_topics(timeout_s=5)
    with pytest.raises(ConfigError, match="token"):
        rayq.connect(cluster.addresses[0], token="nonsense")
    with pytest.raises(AuthenticationError):
        rayq.connect(cluster.addresses[0], token=token_of(b"another secret")).create_topic("t")
    cluster.make_current()


def test_a_client_that_expects_another_cluster_is_refused(cluster: LocalCluster) -> None:
    key = client_identity(cluster).key
    mistaken = rayq.Cluster(cluster.addresses, key, cluster_id="0" * 32)
    with mistaken, pytest.raises(WrongClusterError):
        mistaken.admin.list_topics(timeout_s=5)


def test_the_token_of_the_cluster_lets_a_client_in(cluster: LocalCluster, topic: str) -> None:
    with rayq.connect(cluster.addresses[1], token=cluster.token) as other:
        assert topic in other.admin.list_topics()
        with pytest.raises(rayq.RayqError, match="stop it where it was started"):
            other.stop()
    cluster.make_current()


def test_a_client_may_not_ask_what_only_servers_ask(cluster: LocalCluster, topic: str) -> None:
    topic_id = cluster.admin.describe_topic(topic).topic_id
    at = leader_endpoint(cluster, topic)
    identity = client_identity(cluster)
    with pytest.raises(AuthenticationError, match="for the cluster's servers"):
        ask(at, identity, ReplicaFetch(topic_id, 0, 1, "x", 1, 0, 0, 0, None, 1000, 0))
    host, _, port = cluster.addresses[0].rpartition(":")
    with pytest.raises(AuthenticationError, match="for the cluster's servers"):
        ask((host, int(port)), identity, BrokerHeartbeat(0, "x"))
    forged = Identity(role="server", key=identity.key, cluster_id=None, broker=1)
    with pytest.raises(RayqError):
        ask(at, forged, ReplicaFetch(topic_id, 0, 1, "x", 1, 0, 0, 0, None, 1000, 0))


def batch() -> bytearray:
    return encode_batch([b"x" * 100, b"y"], timestamps_ms=1000, compression="none")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.__setitem__(-1, data[-1] ^ 1),
        lambda data: data.__setitem__(40, data[40] ^ 1),
        lambda data: data.__setitem__(9, data[9] ^ 1),
        lambda data: data.__delitem__(slice(-5, None)),
        lambda data: data.__delitem__(slice(20, None)),
        lambda data: data.clear(),
        lambda data: data.extend(b"more"),
        lambda data: data.extend(bytes(batch())),
    ],
    ids=["body", "crc", "length", "cut", "only a head", "nothing", "more", "two batches"],
)
def test_a_damaged_batch_is_refused_and_nothing_is_written(
    cluster: LocalCluster, topic: str, damage: Callable[[bytearray], object]
) -> None:
    data = batch()
    damage(data)
    with pytest.raises((CorruptBatchError, InvalidRequestError)):
        produce_raw(cluster, topic, data)
    produce_raw(cluster, topic, batch())
    assert values(read_all(cluster, topic)) == [b"x" * 100, b"y"]


def test_a_batch_with_right_crcs_and_a_wrong_body_is_refused_and_nothing_is_written(
    cluster: LocalCluster, topic: str
) -> None:
    for body in WRONG_BODIES.values():
        with pytest.raises(InvalidRecordError, match="nothing was written"):
            produce_raw(cluster, topic, sealed({}, body))
    produce_raw(cluster, topic, batch())
    assert values(read_all(cluster, topic)) == [b"x" * 100, b"y"]


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(mutated_batches(), min_size=20, max_size=40))
def test_whatever_bodies_are_sent_the_leader_serves_on_and_readers_read_what_it_took(
    cluster: LocalCluster, topic: str, mutated: list[bytes]
) -> None:
    info = cluster.admin.describe_topic(topic)
    request = Produce(info.topic_id, 0, info.partitions[0].leader_epoch, -1, 10_000)
    at, identity = leader_endpoint(cluster, topic), client_identity(cluster)

    async def send_all() -> int:
        connection = await Connection.open(system_environment(None), *at, identity)
        taken = 0
        try:
            for data in mutated:
                with contextlib.suppress(
                    InvalidRecordError,
                    InvalidRequestError,
                    CorruptBatchError,
                    RecordTooLargeError,
                    UnsupportedFormatError,
                ):
                    await connection.request(request, bytearray(data), timeout_s=10)
                    taken += read_header(data).record_count
        finally:
            connection.close()
        return taken

    before = len(read_all(cluster, topic))
    taken = asyncio.run(send_all())
    produce_raw(cluster, topic, batch())
    assert len(read_all(cluster, topic)) == before + taken + 2


def test_a_batch_with_attributes_that_clients_may_not_set_is_refused(
    cluster: LocalCluster, topic: str
) -> None:
    for attributes in (CONTROL, TRANSACTIONAL, CONTROL | NULL_KEYS, 1 << 7):
        refusal = "a coordinator drew" if attributes == TRANSACTIONAL else "not for producers"
        with pytest.raises(InvalidRecordError, match=refusal):
            produce_raw(cluster, topic, sealed({"attributes": attributes}, GOOD))
    with pytest.raises(InvalidRecordError, match="at once"):
        produce_raw(cluster, topic, sealed({"attributes": NULL_KEYS | LARGE | CHUNK}, GOOD))
    with pytest.raises(InvalidRecordError, match="only leaders may say so"):
        produce_raw(cluster, topic, sealed({"attributes": NULL_KEYS | DEAD_LETTER}, GOOD))
    for bit in (1, 2, *range(12, 16)):
        with pytest.raises(UnsupportedFormatError):
            produce_raw(cluster, topic, sealed({"attributes": NULL_KEYS | 1 << bit}, GOOD))
    with pytest.raises(InvalidRecordError, match="no key"):
        produce_raw(cluster, topic, sealed({}, GOOD))
    assert read_all(cluster, topic) == []


def test_a_batch_that_unpacks_into_too_much_is_refused(cluster: LocalCluster, topic: str) -> None:
    with pytest.raises(RecordTooLargeError, match="2000000 records"):
        produce_raw(cluster, topic, bomb(2_000_000))
    large = encode_batch([bytes(5_000_000)], timestamps_ms=1)
    assert len(large) < 100_000
    with pytest.raises(RecordTooLargeError, match="before compression"):
        produce_raw(cluster, topic, large)
    with (
        cluster.producer() as producer,
        pytest.raises(RecordTooLargeError, match="before compression"),
    ):
        producer.send(topic, bytes(5_000_000))
    assert read_all(cluster, topic) == []


def test_records_that_are_too_large_are_refused_on_both_sides(
    cluster: LocalCluster, topic: str
) -> None:
    large = bytes(i * i % 251 for i in range(1_100_000))
    with cluster.producer(compression_type="none") as producer:
        with pytest.raises(RecordTooLargeError, match="max_message_bytes"):
            producer.send(topic, large)
        with pytest.raises(RecordTooLargeError, match="max_message_bytes"):
            producer.send_many(topic, [b"small", large])
    with pytest.raises(RecordTooLargeError, match="max_message_bytes"):
        produce_raw(cluster, topic, encode_batch([large], timestamps_ms=1, compression="none"))
    assert read_all(cluster, topic) == []


def test_timestamps_far_in_the_future_or_below_zero_are_refused(
    cluster: LocalCluster, topic: str
) -> None:
    in_two_hours_ms = int(time.time() * 1000) + 7_200_000
    with cluster.producer() as producer:
        with pytest.raises(InvalidTimestampError, match=r"future|after"):
            producer.send(topic, b"x", timestamp_ms=in_two_hours_ms).result(60)
        with pytest.raises(rayq.DeliveryError):
            producer.flush()
        with pytest.raises(InvalidTimestampError):
            producer.send(topic, b"x", timestamp_ms=-1)
        assert producer.send(topic, b"x").result(60).offset == 0
    with pytest.raises(InvalidTimestampError):
        produce_raw(cluster, topic, encode_batch([b"x"], timestamps_ms=in_two_hours_ms))


def test_values_that_are_not_bytes_are_type_errors(cluster: LocalCluster, topic: str) -> None:
    with cluster.producer() as producer:
        for value in ("text", 7, {}, bytearray(b"x"), [b"x"]):
            with pytest.raises(TypeError, match="bytes"):
                producer.send(topic, value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bytes"):
            producer.send(topic, b"x", key="k")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bytes"):
            producer.send_many(topic, [b"x", "y"])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            producer.send(topic, b"x", headers=[("h", "text")])  # type: ignore[list-item]
        with pytest.raises(RayqError, match="values and 1 keys"):
            producer.send_many(topic, [b"x", b"y"], keys=[b"k"])
        for partition in (-1, 1, 99):
            with pytest.raises(RayqError, match="partition"):
                producer.send(topic, b"x", partition=partition)
    assert read_all(cluster, topic) == []


def test_a_topic_that_does_not_exist_is_named(cluster: LocalCluster) -> None:
    with pytest.raises(UnknownTopicError, match="no-such-topic"):
        cluster.consumer("no-such-topic")
    with cluster.producer() as producer, pytest.raises(UnknownTopicError, match="no-such-topic"):
        producer.send("no-such-topic", b"x")


def test_requests_out_of_place_are_answered_with_their_error(
    cluster: LocalCluster, topic: str
) -> None:
    info = cluster.admin.describe_topic(topic)
    epoch = info.partitions[0].leader_epoch
    at, identity = leader_endpoint(cluster, topic), client_identity(cluster)
    with pytest.raises(UnknownTopicError):
        ask(at, identity, ListOffsets("f" * 32, 0, epoch, -1))
    with pytest.raises(UnknownTopicError):
        ask(at, identity, ListOffsets(info.topic_id, 5, epoch, -1))
    with pytest.raises(FencedEpochError):
        ask(at, identity, ListOffsets(info.topic_id, 0, epoch - 1, -1))
    with pytest.raises(rayq.errors.UnknownEpochError):
        ask(at, identity, ListOffsets(info.topic_id, 0, epoch + 1, -1))
    with pytest.raises(RayqError):
        ask(at, identity, Fetch(info.topic_id, 0, epoch, -5, None, 1000, 0))
    with pytest.raises(RayqError):
        ask(at, identity, Metadata())
    follower = next(
        copy for copy in info.partitions[0].replicas if copy.broker != info.partitions[0].leader
    )
    assert follower.host is not None and follower.port is not None
    with pytest.raises(rayq.errors.NotLeaderError):
        ask(
            (follower.host, follower.port),
            identity,
            Produce(info.topic_id, 0, epoch, -1, 1000),
            batch(),
        )
    assert cluster.admin.delete_records({place(topic): None}) == {place(topic): 0}

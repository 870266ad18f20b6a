"""Helpers of the local floor: waiting, reading back, a load that keeps accounts."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rayq import Cluster, Record, RecordMetadata, TopicPartition
from rayq.client.environment import system_environment
from rayq.client.producing.futures import DeliveryFuture
from rayq.errors import NotLeaderError, RayqError, UnknownEpochError
from rayq.messages import AnyRequest, Metadata, Produce
from rayq.records import PartitionInfo
from rayq.wire.authentication import Identity
from rayq.wire.connection import Connection
from rayq.wire.tokens import key_of_token

STILL_RUNNING: list[Cluster] = []
"""The cluster that the tests of the floor share, while it runs."""

FAST: dict[str, Any] = {
    "heartbeat_interval_ms": 100,
    "session_timeout_ms": 800,
    "controller_patience_ms": 500,
}
"""Sessions short enough for tests that kill servers."""


def eventually(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Waits for a condition. Fails when it has not come true in time; the time is generous, for a
    machine that is busy with other work."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"after {timeout_s:.0f} s still not: {what}"
        time.sleep(0.01)


def read_all(
    cluster: Cluster, topic: str, *, timeout_s: float = 60.0, large_values: str | None = None
) -> list[Record]:
    """Every record from the log start up to the present end."""
    with cluster.consumer(
        topic,
        auto_offset_reset="earliest",
        max_poll_records=10_000,
        large_values=large_values,
    ) as consumer:
        return list(consumer.until_end(timeout_s))


def values(records: Iterable[Record]) -> list[bytes | None]:
    return [record.value for record in records]


def partition_of(cluster: Cluster, topic: str, partition: int = 0) -> PartitionInfo:
    return cluster.admin.describe_topic(topic).partitions[partition]


def leader_of(cluster: Cluster, topic: str, partition: int = 0) -> int:
    leader = partition_of(cluster, topic, partition).leader
    assert leader is not None
    return leader


def wait_in_sync(
    cluster: Cluster, topic: str, brokers: int = 3, partition: int = 0, timeout_s: float = 60.0
) -> PartitionInfo:
    eventually(
        lambda: len(partition_of(cluster, topic, partition).isr) == brokers,
        f"{topic}-{partition} has {brokers} replicas in sync",
        timeout_s,
    )
    return partition_of(cluster, topic, partition)


def log_size(directory: Path) -> int:
    """The bytes of all segments in a partition's directory. Segments may be removed meanwhile."""
    while True:
        try:
            return sum(path.stat().st_size for path in directory.glob("*.log"))
        except FileNotFoundError:
            continue


class Load:
    """Produces numbered records to one topic from a thread until the `with` block ends, then waits
    for every delivery. `check` compares the acknowledged records with those in the log."""

    def __init__(self, cluster: Cluster, topic: str, *, pause_s: float = 0.002) -> None:
        self._cluster = cluster
        self._topic = topic
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._futures: list[DeliveryFuture] = []
        self._acknowledged_s: list[float] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        self.wait_for_more()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        if kind is None and self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Sends no more records and waits for those under way, inside the `with` block."""
        self.__exit__(None)

    def _produce(self) -> None:
        try:
            with self._cluster.producer(request_timeout_ms=2000) as producer:
                while not self._stop.is_set():
                    number = len(self._futures)
                    future = producer.send(
                        self._topic,
                        b"%d" % number,
                        key=b"%d" % (number % 7),
                        on_delivery=self._delivered,
                    )
                    self._futures.append(future)
                    time.sleep(self._pause_s)
        except RayqError as error:
            self._failure = error

    def _delivered(self, metadata: RecordMetadata | None, _error: RayqError | None) -> None:
        if metadata is not None:
            self._acknowledged_s.append(time.monotonic())

    def wait_for_more(self, count: int = 20, timeout_s: float = 60.0) -> None:
        """Waits until so many more records are acknowledged."""
        wanted = len(self._acknowledged_s) + count
        eventually(
            lambda: len(self._acknowledged_s) >= wanted or self._failure is not None,
            f"{count} more records are acknowledged ({len(self._acknowledged_s)} are)",
            timeout_s,
        )
        if self._failure is not None:
            raise self._failure

    def forget_pauses(self) -> None:
        """Only what comes from now on counts for `longest_pause_s`."""
        self._acknowledged_s = self._acknowledged_s[-1:]

    @property
    def longest_pause_s(self) -> float:
        """The longest time in which no record was acknowledged."""
        at = self._acknowledged_s
        return max((later - sooner for sooner, later in itertools.pairwise(at)), default=0)

    def failures(self) -> list[BaseException]:
        """The errors of the writes, once all have their answer."""
        errors = (future.exception(0) for future in self._futures)
        return [error for error in errors if error is not None]

    def check(self, cluster: Cluster | None = None) -> None:
        """Every acknowledged record is there once, at its offset, and each key's order holds."""
        records = read_all(cluster or self._cluster, self._topic)
        at = {(record.partition, record.offset): record.value for record in records}
        assert len(at) == len(records)
        lost = []
        for number, future in enumerate(self._futures):
            if future.exception(0) is None:
                metadata = future.result(0)
                if at.get((metadata.partition, metadata.offset or 0)) != b"%d" % number:
                    lost.append((number, metadata))
        assert not lost, f"{len(lost)} of {len(self._futures)} lost, first {lost[:3]}"
        by_key: dict[bytes | None, list[int]] = defaultdict(list)
        for record in records:
            assert record.value is not None
            by_key[record.key].append(int(record.value))
        for key, numbers in by_key.items():
            assert len(numbers) == len(set(numbers)), f"duplicates under key {key!r}"
            assert numbers == sorted(numbers), f"disorder under key {key!r}"


def place(topic: str, partition: int = 0) -> TopicPartition:
    return TopicPartition(topic, partition)


# --- servers spoken to without rayq's client ------------------------------------------------------


def client_identity(cluster: Cluster) -> Identity:
    return Identity(role="client", key=key_of_token(cluster.token), cluster_id=None, broker=None)


def ask(
    endpoint: tuple[str, int],
    identity: Identity,
    request: AnyRequest,
    payload: bytes | bytearray = b"",
    *,
    timeout_s: float = 60.0,
) -> Any:
    """Sends one request over a connection of its own. Raises the error that the server answers."""

    async def connect_and_ask() -> Any:
        environment = system_environment(None)
        connection = await Connection.open(environment, *endpoint, identity)
        try:
            response, _ = await connection.request(request, payload, timeout_s=timeout_s)
        finally:
            connection.close()
        return response

    return asyncio.run(connect_and_ask())


def wait_until_all_brokers_know(cluster: Cluster, topic: str) -> None:
    """A broker hears of a topic a moment after the topic's creator."""

    def all_know() -> bool:
        return all(
            ask((one.host, one.port), client_identity(cluster), Metadata([topic])).topics
            for one in cluster.admin.describe_cluster().brokers
        )

    eventually(all_know, f"every broker knows {topic}")


def leader_endpoint(cluster: Cluster, topic: str, partition: int = 0) -> tuple[str, int]:
    info = partition_of(cluster, topic, partition)
    (leader,) = (one for one in info.replicas if one.broker == info.leader)
    assert leader.host is not None and leader.port is not None
    return leader.host, leader.port


def produce_raw(
    cluster: Cluster, topic: str, batch: bytes | bytearray, *, acks: int = -1, timeout_s: float = 60
) -> Any:
    """Sends one batch to the leader of partition 0, without a producer's retries. Only tries again
    while a new leader has yet to hear that it leads."""
    deadline_s = time.monotonic() + 60
    while True:
        info = cluster.admin.describe_topic(topic)
        request = Produce(
            topic_id=info.topic_id,
            partition=0,
            leader_epoch=info.partitions[0].leader_epoch,
            acks=acks,
            timeout_ms=int(timeout_s * 1000),
        )
        endpoint = leader_endpoint(cluster, topic)
        try:
            return ask(endpoint, client_identity(cluster), request, bytearray(batch))
        except (NotLeaderError, UnknownEpochError):
            if time.monotonic() > deadline_s:
                raise

"""rayq's side: three brokers on a Ray of this machine, each server a real process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import state
from ray.exceptions import RayError

import rayq
from benchmarks.density import local_ray, server_pids
from benchmarks.peers.side import BROKERS, REPLICATION_FACTOR
from rayq import RayqError, RecordMetadata
from rayq.records import PartitionInfo
from rayq.runtime.ray import lookup as ray_lookup

WAIT_TIMEOUT_S = 300.0
POLL_S = 0.1
POLL_RECORDS_MAX = 10_000
NAME = "peers"


@contextmanager
def on_ray(root: Path) -> Iterator[RayqSide]:
    with (
        local_ray(),
        rayq.start(
            str(root),
            brokers=BROKERS,
            name=NAME,
            max_replicas_per_broker=10_000,
        ) as cluster,
    ):
        yield RayqSide(cluster)
        cluster.stop()


class RayqSide:
    """See `Side`."""

    def __init__(self, cluster: rayq.Cluster) -> None:
        self._cluster = cluster
        self._producer = cluster.producer()

    def create_topic(self, name: str, partitions: int) -> None:
        self._cluster.create_topic(
            name, partitions, REPLICATION_FACTOR, timeout_s=WAIT_TIMEOUT_S
        )

    def delete_topic(self, name: str) -> None:
        self._cluster.admin.delete_topic(name)

    def send_each(self, topic: str, values: Sequence[bytes]) -> None:
        send = self._producer.send
        for value in values:
            send(topic, value)
        self._producer.flush()

    def send_many(self, topic: str, values: Sequence[bytes]) -> bool:
        for first in range(0, len(values), POLL_RECORDS_MAX):
            self._producer.send_many(topic, values[first : first + POLL_RECORDS_MAX])
        self._producer.flush()
        return True

    def write_to_all(self, topic: str, partitions: int) -> None:
        for number in range(partitions):
            self._producer.send(topic, b"one record", partition=number)
        self._producer.flush()

    def send_paced(self, topic: str, value: bytes, per_s: int, count: int) -> list[float]:
        done_s = [0.0] * count

        def report(index: int) -> Callable[[RecordMetadata | None, BaseException | None], None]:
            def delivered(_: RecordMetadata | None, error: BaseException | None) -> None:
                done_s[index] = time.monotonic()

            return delivered

        with self._cluster.producer(linger_ms=0) as producer:
            started_s = time.monotonic() + 0.01
            for index in range(count):
                if (left_s := started_s + index / per_s - time.monotonic()) > 0:
                    time.sleep(left_s)
                producer.send(topic, value, on_delivery=report(index))
            producer.flush()
        return [1000 * (at_s - started_s - index / per_s) for index, at_s in enumerate(done_s)]

    def consume(self, topic: str, partitions: int, count: int) -> None:
        size_bytes = 0
        with self._cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
            while count > 0:
                records = consumer.poll(timeout_s=WAIT_TIMEOUT_S, max_records=POLL_RECORDS_MAX)
                if not records:
                    raise TimeoutError(f"{count} records did not come.")
                for record in records:
                    size_bytes += len(record.value or b"")
                count -= len(records)

    def leader_pid(self, topic: str) -> int:
        return _pid(self._partition(topic), self._leader(topic))

    def leader_broker_pids(self, topic: str) -> list[int]:
        leader = self._leader(topic)
        name = ray_lookup.broker_name(NAME, leader)
        listed: dict[str, dict[str, Any]] = state.actors()
        broker = next(one for one in listed.values() if one["Name"] == name)
        return [int(broker["Pid"]), _pid(self._partition(topic), leader)]

    def heal(self, topic: str) -> None:
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while not self._is_whole(topic):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"rayq was not whole within {WAIT_TIMEOUT_S:.0f} s.")
            time.sleep(POLL_S)

    def server_pids(self) -> list[int]:
        return [pid for kind, pids in server_pids().items() if kind != "ray" for pid in pids]

    # --- who is where -----------------------------------------------------------------------------

    def _partition(self, topic: str) -> PartitionInfo:
        return self._cluster.admin.describe_topic(topic).partitions[0]

    def _leader(self, topic: str) -> int:
        leader = self._partition(topic).leader
        assert leader is not None
        return leader

    def _is_whole(self, topic: str) -> bool:
        """Whether all brokers have a session, by their own word, and all replicas are in sync."""
        try:
            for broker in range(BROKERS):
                name = ray_lookup.broker_name(NAME, broker)
                actor: Any = ray.get_actor(name, namespace=ray_lookup.NAMESPACE)
                if not ray.get(actor.is_registered.remote(), timeout=10.0):
                    return False
            partition = self._partition(topic)
        except (RayError, RayqError, ValueError):
            return False
        return len(partition.isr) == REPLICATION_FACTOR and all(
            one.pid is not None for one in partition.replicas
        )


def _pid(partition: PartitionInfo, broker: int) -> int:
    pid = next(one.pid for one in partition.replicas if one.broker == broker)
    assert pid is not None
    return pid

"""Kafka's side: the cluster, and loads by confluent-kafka (librdkafka)."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.kafka_cluster import KafkaCluster
from benchmarks.peers.kafka_install import install
from benchmarks.peers.side import BROKERS, REPLICATION_FACTOR

WAIT_TIMEOUT_S = 300.0
POLL_S = 0.02
POLL_RECORDS_MAX = 10_000
WRITES: dict[str, Any] = {"acks": "all", "enable.idempotence": True, "compression.type": "lz4"}


@contextmanager
def kafka(root: Path) -> Iterator[KafkaSide]:
    installed = install()
    sys.path.append(str(installed.client))
    cluster = KafkaCluster(root, installed.jars)
    try:
        yield KafkaSide(cluster)
    finally:
        cluster.close()


class KafkaSide:
    """See `Side`."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self._client: Any = importlib.import_module("confluent_kafka")
        admin: Any = importlib.import_module("confluent_kafka.admin")
        self._new_topic = admin.NewTopic
        self._to_cluster = {"bootstrap.servers": cluster.bootstrap_servers}
        self._admin = admin.AdminClient(self._to_cluster)
        self._undelivered: list[Any] = []
        # Reports cost the client time: this producer gets those of failures only.
        self._producer = self._client.Producer(
            self._to_cluster
            | WRITES
            | {
                "delivery.report.only.error": True,
                "on_delivery": lambda error, _: self._undelivered.append(error),
            }
        )
        self._wait(lambda: len(self._metadata().brokers) == BROKERS)

    def create_topic(self, name: str, partitions: int) -> None:
        topic = self._new_topic(name, partitions, REPLICATION_FACTOR)
        self._admin.create_topics([topic], request_timeout=WAIT_TIMEOUT_S)[name].result()
        self._wait(lambda: self._is_in_sync(name, partitions))

    def delete_topic(self, name: str) -> None:
        self._admin.delete_topics([name])[name].result()

    def send_each(self, topic: str, values: Sequence[bytes]) -> None:
        produce = self._producer.produce
        for value in values:
            while True:
                try:
                    produce(topic, value)
                    break
                except BufferError:
                    self._producer.poll(0.01)
        self._flush()

    def send_many(self, topic: str, values: Sequence[bytes]) -> bool:
        return False

    def write_to_all(self, topic: str, partitions: int) -> None:
        for number in range(partitions):
            self._producer.produce(topic, b"one record", partition=number)
        self._flush()

    def _flush(self) -> None:
        left = self._producer.flush(WAIT_TIMEOUT_S)
        if left or self._undelivered:
            raise RuntimeError(f"{left} records were not acknowledged: {self._undelivered[:3]}")

    def send_paced(self, topic: str, value: bytes, per_s: int, count: int) -> list[float]:
        done_s = [0.0] * count
        producer = self._client.Producer(self._to_cluster | WRITES | {"linger.ms": 0})

        def report(index: int) -> Callable[[Any, Any], None]:
            def delivered(error: Any, _: Any) -> None:
                if error is not None:
                    raise RuntimeError(f"record {index} was not acknowledged: {error}")
                done_s[index] = time.monotonic()

            return delivered

        started_s = time.monotonic() + 0.01
        for index in range(count):
            due_s = started_s + index / per_s
            # The reports are called in here, as they come.
            while (left_s := due_s - time.monotonic()) > 0:
                producer.poll(left_s)
            producer.produce(topic, value, on_delivery=report(index))
        if producer.flush(WAIT_TIMEOUT_S):
            raise RuntimeError("Some records were not acknowledged.")
        return [1000 * (at_s - started_s - index / per_s) for index, at_s in enumerate(done_s)]

    def consume(self, topic: str, partitions: int, count: int) -> None:
        consumer = self._client.Consumer(
            self._to_cluster
            | {
                "group.id": "peers",
                "enable.auto.commit": False,
                # By default a client that has fetched ahead pauses for a second, until long after
                # its queue is empty: it would be measured at a third of what it can do.
                "fetch.queue.backoff.ms": 10,
            }
        )
        begin = self._client.OFFSET_BEGINNING
        consumer.assign(
            [self._client.TopicPartition(topic, number, begin) for number in range(partitions)]
        )
        size_bytes = 0
        while count > 0:
            records = consumer.consume(min(count, POLL_RECORDS_MAX), timeout=WAIT_TIMEOUT_S)
            if not records:
                raise TimeoutError(f"{count} records did not come.")
            for record in records:
                if record.error() is not None:
                    raise RuntimeError(str(record.error()))
                size_bytes += len(record.value())
            count -= len(records)
        consumer.close()

    def leader_pid(self, topic: str) -> int:
        return self._cluster.pid(self._metadata(topic).topics[topic].partitions[0].leader)

    def leader_broker_pids(self, topic: str) -> list[int]:
        return [self.leader_pid(topic)]

    def heal(self, topic: str) -> None:
        self._cluster.start_missing()
        self._wait(lambda: len(self._metadata().brokers) == BROKERS)
        self._wait(lambda: self._is_in_sync(topic, 1))

    def server_pids(self) -> list[int]:
        return self._cluster.pids()

    # --- waiting ----------------------------------------------------------------------------------

    def _metadata(self, topic: str | None = None) -> Any:
        return self._admin.list_topics(topic, timeout=10.0)

    def _is_in_sync(self, topic: str, partitions: int) -> bool:
        found = self._metadata(topic).topics[topic].partitions.values()
        return len(found) == partitions and all(
            one.leader >= 0 and len(one.isrs) == REPLICATION_FACTOR for one in found
        )

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Raises TimeoutError, and RuntimeError where a broker has ended."""
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while True:
            self._cluster.check_running()
            try:
                if holds():
                    return
            except self._client.KafkaException:  # No broker answers yet.
                pass
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Kafka was not ready within {WAIT_TIMEOUT_S:.0f} s.")
            time.sleep(POLL_S)

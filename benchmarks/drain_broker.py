"""Drains a broker that holds 1 GiB under load: do writes fail, and how late are they?

    python -m benchmarks.drain_broker [--gib 1] [--throttle-mb-s 50] [--rate 200] [--json FILE]

Four brokers on this machine's Ray, each replica a process of its own, all on one disk. A producer
(acks="all") writes 1 KiB records at a steady rate, one batch each; a latency is from `send` to the
acknowledgement. Exit 1 when a write failed, an acknowledged record is not there afterwards, or the
broker still holds something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import rayq
from rayq import Cluster, DrainProgress, RayqError, RecordMetadata
from rayq.client.producing.producer import Producer

BROKERS = 4
PARTITIONS = 8
REPLICATION_FACTOR = 3
RECORD_BYTES = 1024
TOPIC = "drained"
BASELINE_S = 10.0
MIB = 1024**2


@dataclass
class Latencies:
    """The latencies of the writes of one phase, in milliseconds."""

    writes: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    most_ms: float = 0.0


@dataclass
class Result:
    held_mib: int = 0
    replicas: int = 0
    throttle_mb_s: float | None = None
    drained_after_s: float = 0.0
    copied_mb_s: float = 0.0
    failed_writes: int = 0
    before: Latencies = field(default_factory=Latencies)
    during: Latencies = field(default_factory=Latencies)
    problems: list[str] = field(default_factory=list)


class Writing:
    """Writes at a steady rate from a thread until the `with` block ends."""

    def __init__(self, cluster: Cluster, rate: float) -> None:
        self._cluster = cluster
        self._rate = rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self.latencies: list[tuple[float, float]] = []
        """`(sent, latency)`, in seconds."""
        self.acknowledged: list[tuple[int, int, bytes]] = []
        """`(partition, offset, value)`"""
        self.failures: list[BaseException] = []

    def __enter__(self) -> Writing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        with self._cluster.producer(linger_ms=0) as producer:
            begin_s, count = time.monotonic(), 0
            while not self._stop.is_set():
                self._send(producer, count)
                count += 1
                time.sleep(max(0.0, begin_s + count / self._rate - time.monotonic()))

    def _send(self, producer: Producer, number: int) -> None:
        value = b"%d " % number + os.urandom(RECORD_BYTES - 20)
        sent_s = time.monotonic()

        def delivered(metadata: RecordMetadata | None, error: BaseException | None) -> None:
            if metadata is None or metadata.offset is None:
                self.failures.append(error or RayqError("no offset"))
                return
            self.latencies.append((sent_s, time.monotonic() - sent_s))
            self.acknowledged.append((metadata.partition, metadata.offset, value))

        producer.send(TOPIC, value, partition=number % PARTITIONS, on_delivery=delivered)

    def between(self, begin_s: float, end_s: float) -> Latencies:
        found = sorted(taken for sent, taken in self.latencies if begin_s <= sent < end_s)
        if not found:
            return Latencies()
        return Latencies(
            len(found),
            round(found[len(found) // 2] * 1000, 2),
            round(found[int(len(found) * 0.99)] * 1000, 2),
            round(found[-1] * 1000, 2),
        )


def fill(cluster: Cluster, mib: int) -> None:
    chunk = [os.urandom(RECORD_BYTES) for _ in range(4096)]
    with cluster.producer(compression_type="none", batch_size=256 * 1024) as producer:
        for _ in range(mib // 4):
            producer.send_many(TOPIC, chunk).result(120)


def directory_mib(path: Path) -> int:
    return sum(one.stat().st_size for one in path.glob(f"{TOPIC}-*/*.log")) // MIB


def measure(cluster: Cluster, root: Path, options: argparse.Namespace) -> Result:
    result = Result(throttle_mb_s=options.throttle_mb_s)
    cluster.create_topic(TOPIC, PARTITIONS, REPLICATION_FACTOR, segment_bytes=64 * MIB)
    # Each broker holds a share of the data: factor / brokers.
    fill(cluster, int(options.gib * 1024 * BROKERS / REPLICATION_FACTOR))
    victim = 1
    directory = root / f"broker-{victim}"
    result.held_mib = directory_mib(directory)
    result.replicas = len(cluster.admin.plan_drain(victim))
    print(f"broker {victim} holds {result.replicas} replicas, {result.held_mib} MiB", flush=True)
    throttle = None if options.throttle_mb_s is None else int(options.throttle_mb_s * 1e6)

    def told(progress: DrainProgress) -> None:
        print(f"  {progress.done} done, {progress.moving} moving", flush=True)

    with Writing(cluster, options.rate) as writing:
        time.sleep(2.0)
        begin_s = time.monotonic()
        time.sleep(BASELINE_S)
        drain_s = time.monotonic()
        cluster.admin.drain_broker(victim, throttle_bytes_per_s=throttle, on_progress=told)
        end_s = time.monotonic()
        time.sleep(2.0)
    result.drained_after_s = round(end_s - drain_s, 1)
    result.copied_mb_s = round(result.held_mib * MIB / 1e6 / (end_s - drain_s), 1)
    result.before = writing.between(begin_s, drain_s)
    result.during = writing.between(drain_s, end_s)
    result.failed_writes = len(writing.failures)
    result.problems += [f"a write failed: {error}" for error in writing.failures[:3]]
    if cluster.admin.plan_drain(victim):
        result.problems.append("the broker still holds replicas")
    else:
        cluster.stop_broker(victim)
        cluster.admin.remove_broker(victim)
        print(f"broker {victim} is stopped and removed", flush=True)
    missing = missing_records(cluster, writing)
    if missing:
        result.problems.append(f"{missing} acknowledged records are not there")
    return result


def missing_records(cluster: Cluster, writing: Writing) -> int:
    """How many records that were acknowledged while the broker was drained are missing."""
    wanted = {(partition, offset): value for partition, offset, value in writing.acknowledged}
    first: dict[int, int] = {}
    for partition, offset in wanted:
        first[partition] = min(offset, first.get(partition, offset))
    with cluster.consumer() as consumer:
        places = [rayq.TopicPartition(TOPIC, partition) for partition in first]
        consumer.assign(places)
        for place in places:
            consumer.seek(place, first[place.partition])
        ends = consumer.end_offsets(places)
        while any(consumer.position(place) < ends[place] for place in places):
            for record in consumer.poll(timeout_s=5.0, max_records=10_000):
                if wanted.get((record.partition, record.offset)) == record.value:
                    del wanted[record.partition, record.offset]
    return len(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="what the broker holds")
    parser.add_argument("--throttle-mb-s", type=float, help="the most that the drain copies")
    parser.add_argument("--rate", type=float, default=200.0, help="records per second")
    parser.add_argument("--json", type=Path, help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rayq-drain-") as root:
        cluster = rayq.start(root, brokers=BROKERS, name="drain-benchmark")
        try:
            result = measure(cluster, Path(root), options)
        finally:
            cluster.stop()
    print(json.dumps(asdict(result), indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())

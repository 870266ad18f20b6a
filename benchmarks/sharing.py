"""What replicas that share processes cost each other: three brokers on a local Ray.

    python -m benchmarks.sharing

A quiet partition beside busy ones, busy ones beside 300 idle replicas, and the loss of a process
that leads a hundred partitions.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import rayq
from benchmarks.density import local_ray
from benchmarks.machine import describe
from benchmarks.on_ray import quantile

BROKERS = 3
RECORD_BYTES = 1024
PACED_PER_S = 200
PACED_S = 5.0
PRODUCED_BYTES = 128 * 1024**2
CHUNK = 1000
REPETITIONS = 3
KILLS = 3
PARTITIONS_OF_ONE = 100
LEADING_TIMEOUT_S = 60.0


def paced_ms(cluster: rayq.Cluster, topic: str) -> tuple[float, float]:
    """p50 and p99 of single records at a steady pace, from when each was due."""
    value = os.urandom(RECORD_BYTES)
    took_ms = []
    with cluster.producer(linger_ms=0) as producer:
        producer.send(topic, value).result(60)
        start_s = time.perf_counter()
        for number in range(int(PACED_PER_S * PACED_S)):
            due_s = start_s + number / PACED_PER_S
            time.sleep(max(0.0, due_s - time.perf_counter()))
            producer.send(topic, value).result(60)
            took_ms.append(1000 * (time.perf_counter() - due_s))
    return quantile(took_ms, 0.5), quantile(took_ms, 0.99)


def throughput_mb_s(cluster: rayq.Cluster, topic: str) -> float:
    """1 KB records into all partitions of a topic, default settings."""
    values = [os.urandom(RECORD_BYTES) for _ in range(CHUNK)]
    calls = PRODUCED_BYTES // (RECORD_BYTES * CHUNK)
    with cluster.producer() as producer:
        producer.send_many(topic, values).result(60)
        start_s = time.perf_counter()
        for future in [producer.send_many(topic, values) for _ in range(calls)]:
            future.result(120)
        took_s = time.perf_counter() - start_s
    return calls * CHUNK * RECORD_BYTES / 1e6 / took_s


def _keep_busy(address: str, token: str, topic: str, bytes_per_s: int, stop: Event) -> None:
    values = [os.urandom(RECORD_BYTES) for _ in range(100)]
    with rayq.connect(address, token=token) as cluster, cluster.producer() as producer:
        start_s, sent_bytes = time.perf_counter(), 0
        while not stop.is_set():
            producer.send_many(topic, values)
            sent_bytes += len(values) * RECORD_BYTES
            ahead_s = sent_bytes / bytes_per_s - (time.perf_counter() - start_s)
            if ahead_s > 0:
                stop.wait(ahead_s)


@contextmanager
def busy(cluster: rayq.Cluster, topic: str, bytes_per_s: int) -> Iterator[None]:
    """Another process writes to the topic meanwhile."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    arguments = (cluster.addresses[0], cluster.token, topic, bytes_per_s, stop)
    writer = context.Process(target=_keep_busy, args=arguments)
    writer.start()
    time.sleep(3)
    try:
        yield
    finally:
        stop.set()
        writer.join()


def lost_leaders_s(cluster: rayq.Cluster, topic: str) -> tuple[int, float]:
    """Kills the process that leads most partitions. Returns how many it led, and the time until
    each of them has acknowledged a record."""
    by_pid: dict[int, list[int]] = {}
    for number, partition in enumerate(cluster.admin.describe_topic(topic).partitions):
        pids = {one.broker: one.pid for one in partition.replicas}
        pid = pids[partition.leader] if partition.leader is not None else None
        if pid is not None:
            by_pid.setdefault(pid, []).append(number)
    pid, led = max(by_pid.items(), key=lambda one: len(one[1]))
    with cluster.producer(linger_ms=0) as producer:
        for number in led:
            producer.send(topic, b"before", partition=number).result(60)
        os.kill(pid, signal.SIGKILL)
        start_s = time.perf_counter()
        futures = [producer.send(topic, b"after", partition=number) for number in led]
        for future in futures:
            future.result(LEADING_TIMEOUT_S)
        took_s = time.perf_counter() - start_s
    time.sleep(10)  # The next kill finds a settled cluster.
    return len(led), took_s


def main() -> None:
    print(describe())
    with tempfile.TemporaryDirectory(prefix="rayq-sharing-") as directory:
        with local_ray(), rayq.start(directory, brokers=BROKERS) as cluster:
            cluster.create_topic("quiet", 1, BROKERS)
            cluster.create_topic("loaded", 6, BROKERS)
            throughput_mb_s(cluster, "loaded")
            p50_ms, p99_ms = paced_ms(cluster, "quiet")
            print(f"a quiet partition: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms")
            for mb in (10, 50):
                with busy(cluster, "loaded", mb * 1_000_000):
                    p50_ms, p99_ms = paced_ms(cluster, "quiet")
                print(f"  beside {mb} MB/s: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms")
            without = [throughput_mb_s(cluster, "loaded") for _ in range(REPETITIONS)]
            cluster.create_topic("idle", 100, BROKERS, timeout_s=120)
            time.sleep(5)
            beside = [throughput_mb_s(cluster, "loaded") for _ in range(REPETITIONS)]
            ratio = statistics.median(beside) / statistics.median(without)
            print(f"6 partitions, MB/s: {[round(one) for one in without]}")
            print(f"  beside 300 idle replicas: {[round(one) for one in beside]}, {ratio:.2f}x")
            cluster.create_topic("many", 2 * BROKERS * PARTITIONS_OF_ONE, BROKERS, timeout_s=120)
            time.sleep(10)
            for _ in range(KILLS):
                led, took_s = lost_leaders_s(cluster, "many")
                print(f"SIGKILL of the leader of {led} partitions: all lead after {took_s:.2f} s")
            cluster.stop()


if __name__ == "__main__":
    main()

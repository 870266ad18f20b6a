"""Quotas of two tenants on three brokers: how exactly they hold while the load shifts, and what the
other tenant notices.

Tenant A has 20 producers that send as much as they may, to all six partitions, then to two, then
to one. Tenant B sends single records at a steady pace: alone, beside an A that keeps to its quota
by itself, and beside the A that the quota limits. The second shows what the load of A costs on
this machine, whoever limits it. A quota is judged over 10 s, from 2 s after each shift on.
`--cost` measures what quotas cost a server for each request instead.

Run: python -m benchmarks.quotas [--cost]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

import rayq
from benchmarks.machine import describe
from benchmarks.on_ray import quantile
from rayq import Cluster
from rayq.actors.quotas import Quotas
from rayq.client.environment import system_environment
from rayq.messages import Fetch, Produce, Quota
from rayq.messages.acls import Acl
from rayq.testing import LocalCluster

BROKERS = 3
PARTITIONS = 6
PRODUCERS, PRODUCER_PROCESSES = 20, 2
RATE = 2_000_000
RECORD_BYTES = 10_000
BATCH_BYTES = 32_000
SHIFTED_S, JUDGED_S = 2.0, 10.0
PHASES = (("all six partitions", 0b111111), ("two of them", 0b000011), ("one of them", 0b100000))
PACED_PER_S = 100
LOOPS = 200_000


def _saturate(
    address: str,
    token: str,
    topic: str,
    mask: Synchronized[int],
    stop: Event,
    producers: int,
    pace_s: float,
) -> None:
    def send(cluster: Cluster) -> None:
        values, number = [os.urandom(RECORD_BYTES) for _ in range(50)], 0
        with cluster.producer(
            compression_type="none", batch_size=BATCH_BYTES, buffer_memory=2 * BATCH_BYTES
        ) as producer:
            while not stop.wait(pace_s):
                chosen = [bit for bit in range(PARTITIONS) if mask.value >> bit & 1]
                number += 1
                with contextlib.suppress(rayq.RayqError):
                    producer.send(
                        topic, values[number % 50], partition=chosen[number % len(chosen)]
                    )

    with rayq.connect(address, token=token) as cluster:
        threads = [threading.Thread(target=send, args=(cluster,)) for _ in range(producers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _paced(address: str, token: str, topic: str, seconds: float, answer: object) -> None:
    value, took_ms = os.urandom(1000), []
    with rayq.connect(address, token=token) as cluster, cluster.producer(linger_ms=0) as producer:
        for number in range(PARTITIONS):
            producer.send(topic, value, partition=number).result(60)
        start_s = time.perf_counter()
        for number in range(int(PACED_PER_S * seconds)):
            due_s = start_s + number / PACED_PER_S
            time.sleep(max(0.0, due_s - time.perf_counter()))
            producer.send(topic, value, partition=number % PARTITIONS).result(60)
            took_ms.append(1000 * (time.perf_counter() - due_s))
    answer.put((quantile(took_ms, 0.5), quantile(took_ms, 0.99)))  # type: ignore[attr-defined]


def paced_ms(cluster: Cluster, token: str, topic: str, seconds: float) -> tuple[float, float]:
    """p50 and p99 of B's records, from when each was due."""
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    process = context.Process(
        target=_paced, args=(cluster.addresses[0], token, topic, seconds, answer)
    )
    process.start()
    found: tuple[float, float] = answer.get()
    process.join()
    return found


@contextlib.contextmanager
def sending(
    cluster: Cluster, token: str, topic: str, pace_s: float = 0.0
) -> Iterator[Synchronized[int]]:
    """A's producers, which send to the partitions of a mask: as much as they may, or each a record
    in every `pace_s`."""
    context = multiprocessing.get_context("spawn")
    stop, mask = context.Event(), context.Value("i", PHASES[0][1])
    each = PRODUCERS // PRODUCER_PROCESSES
    processes = [
        context.Process(
            target=_saturate, args=(cluster.addresses[0], token, topic, mask, stop, each, pace_s)
        )
        for _ in range(PRODUCER_PROCESSES)
    ]
    for process in processes:
        process.start()
    try:
        yield mask
    finally:
        stop.set()
        for process in processes:
            process.join(30)
            process.kill()


def appended_bytes(cluster: Cluster, topic: str) -> float:
    return sum(
        sample.value
        for sample in cluster.metrics()
        if sample.name == "rayq_bytes_in_total" and sample.labels["topic"] == topic
    )


def tenant(cluster: Cluster, name: str) -> str:
    """Creates a principal with a topic, and returns its token."""
    cluster.create_topic(name, partitions=PARTITIONS, replication_factor=BROKERS)
    cluster.admin.create_principal(name)
    cluster.admin.create_acls(Acl(name, "allow", "all", "topic", name))
    return cluster.admin.create_token(name).token


def hold() -> None:
    with LocalCluster(brokers=BROKERS) as cluster:
        a, b = tenant(cluster, "a"), tenant(cluster, "b")
        cluster.admin.set_quota("a", producer_byte_rate=RATE)
        cluster.admin.set_quota("b", producer_byte_rate=RATE)
        seconds = len(PHASES) * (SHIFTED_S + JUDGED_S)
        paced_ms(cluster, b, "b", 5.0)
        alone = paced_ms(cluster, b, "b", seconds)
        print(f"B alone: p50 {alone[0]:.2f} ms, p99 {alone[1]:.2f} ms")
        with sending(cluster, a, "a", PRODUCERS * RECORD_BYTES / RATE):
            time.sleep(SHIFTED_S)
            paced = paced_ms(cluster, b, "b", seconds)
        print(f"B beside an A at that pace: {compared(paced, alone)}")
        with sending(cluster, a, "a") as mask:
            before_bytes = appended_bytes(cluster, "a")
            while appended_bytes(cluster, "a") < before_bytes + 2 * RATE:
                time.sleep(0.1)
            beside: list[tuple[float, float]] = []
            probe = threading.Thread(
                target=lambda: beside.append(paced_ms(cluster, b, "b", seconds))
            )
            probe.start()
            for name, chosen in PHASES:
                mask.value = chosen
                time.sleep(SHIFTED_S)
                start_s, start_bytes = time.monotonic(), appended_bytes(cluster, "a")
                time.sleep(JUDGED_S)
                rate = (appended_bytes(cluster, "a") - start_bytes) / (time.monotonic() - start_s)
                print(f"A to {name}: {rate / 1e6:.3f} MB/s, {rate / RATE - 1:+.1%} of its quota")
            probe.join()
        print(f"B beside A: {compared(beside[0], alone)}, {beside[0][1] / paced[1]:.2f}x paced")


def compared(beside: tuple[float, float], alone: tuple[float, float]) -> str:
    p50_ms, p99_ms = beside
    return f"p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms, {p99_ms / alone[1]:.2f}x alone"


def cost() -> None:
    """The time that a request costs where quotas are asked, and are not used up."""

    async def measure() -> None:
        quotas = Quotas(system_environment(None))
        client = quotas.connect("anna", "", lambda name, seconds: None)

        def of_each(what: str, kind: type[Produce] | type[Fetch]) -> None:
            start_s = time.process_time()
            for _ in range(LOOPS):
                if client.limited_by:  # As the server asks.
                    client.admits(kind, 1000)
                    client.spent(1e-9)
            took_us = (time.process_time() - start_s) / LOOPS * 1e6
            print(f"{kind.__name__}, {what}: {took_us:.2f} us")

        of_each("no quota", Produce)
        limits = {"producer_byte_rate": 1e15, "request_percentage": 1e6}
        quotas.replace([Quota("anna", None, limits)])
        of_each("two quotas", Produce)
        of_each("two quotas", Fetch)

    asyncio.run(measure())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cost", action="store_true")
    print(describe())
    if parser.parse_args().cost:
        cost()
    else:
        hold()


if __name__ == "__main__":
    main()

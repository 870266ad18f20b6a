"""Many clients: three brokers on a local Ray, and hundreds of producers and consumers, each with
connections of its own, as in processes of their own.

    python -m benchmarks.many_clients [500]

Reports how long it takes until all are connected and read, what the servers use while all wait, and
how evenly the clients are served at load. Each record goes to every consumer of its partition.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time

import rayq
from benchmarks.density import BROKERS, local_ray, server_pids
from benchmarks.machine import describe
from benchmarks.on_ray import quantile
from benchmarks.usage import watch

CLIENTS = 500
PARTITIONS = 12
WATCHED_S = 15.0
LOADED_S = 15.0
RECORD_BYTES = 1024
CONNECT_TIMEOUT_S = 300.0


async def _run(clusters: list[rayq.Cluster], count: int) -> None:
    value = os.urandom(RECORD_BYTES)
    started_s = time.monotonic()
    producers = [one.async_producer(linger_ms=0) for one in clusters[:count]]
    consumers = [one.async_consumer(auto_offset_reset="earliest") for one in clusters[count:]]
    for number, one in enumerate(consumers):
        await one.assign([rayq.TopicPartition("t", number % PARTITIONS)])
    await asyncio.gather(
        *(
            one.send_and_wait("t", value, partition=number % PARTITIONS)
            for number, one in enumerate(producers)
        )
    )
    reads = [0] * count

    async def read_on(number: int) -> None:
        while True:
            reads[number] += len(await consumers[number].poll(timeout_s=5))

    readers = [asyncio.create_task(read_on(number)) for number in range(count)]
    while not all(reads):
        await asyncio.sleep(0.1)
        assert time.monotonic() - started_s < CONNECT_TIMEOUT_S
    took_s = time.monotonic() - started_s
    print(f"{count} producers have written and {count} consumers read after {took_s:.1f} s")
    await asyncio.sleep(10)
    for kind, usage in watch(server_pids(), WATCHED_S).items():
        print(
            f"  idle, {kind}: {usage.processes} processes, {usage.unique_mb:.0f} MB unique, "
            f"{usage.cpu_percent:.1f} % of a core, {usage.descriptors} descriptors"
        )
    sent = [0] * count
    took_ms: list[float] = []
    end_s = time.monotonic() + LOADED_S

    async def write_on(number: int) -> None:
        while time.monotonic() < end_s:
            began_s = time.perf_counter()
            await producers[number].send_and_wait("t", value, partition=number % PARTITIONS)
            took_ms.append(1000 * (time.perf_counter() - began_s))
            sent[number] += 1

    await asyncio.gather(*(write_on(number) for number in range(count)))
    ordered = sorted(sent)
    print(
        f"one record at a time from each, for {LOADED_S:g} s: {sum(sent) / LOADED_S:.0f} records/s"
        f", p50 {quantile(took_ms, 0.5):.0f} ms, p99 {quantile(took_ms, 0.99):.0f} ms; the slowest "
        f"producer sent {ordered[0]}, the median {ordered[count // 2]}, the fastest {ordered[-1]}; "
        f"each record went to {count / PARTITIONS:.0f} consumers"
    )
    for task in readers:
        task.cancel()
    await asyncio.gather(*(one.close() for one in producers))
    await asyncio.gather(*(one.close() for one in consumers))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else CLIENTS
    print(describe())
    with tempfile.TemporaryDirectory(prefix="rayq-clients-") as directory:
        with local_ray(), rayq.start(directory, brokers=BROKERS, name="density") as cluster:
            cluster.create_topic("t", PARTITIONS, BROKERS)
            # Clusters with different settings share no connections, as if in other processes.
            clusters = [
                rayq.connect(cluster.addresses[0], token=cluster.token, max_connections=5000 + one)
                for one in range(2 * count)
            ]
            asyncio.run(_run(clusters, count))
            for one in clusters:
                one.close()
            cluster.stop()


if __name__ == "__main__":
    main()

"""What tiered storage costs and yields: uploads beside producing, cold reads through the leader,
batch reads of the objects themselves, and what a replay does to readers at the end.

    python -m benchmarks.tiered_storage [MIB [URL]]

MIB is how much is produced, 1,024 by default. One broker on a local Ray, so that each kind of work
has a process of its own. The store is a directory in memory (/dev/shm), so that the figures are
rayq's and not those of a second copy on the same disk; or the one that URL names, with the
credentials of the environment. What is left there is in a folder of the cluster's id.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import ray

import rayq
from benchmarks import machine
from benchmarks.machine import MIB
from benchmarks.on_ray import quantile
from benchmarks.profiles import cpu_s
from benchmarks.report import Row, table, wide_console
from proving.chaos.processes import with_descendants
from rayq.batch import range_reader
from rayq.batch.offset_ranges import snapshot
from rayq.environment import ObjectStore
from rayq.messages.remote_names import ObjectKind, parse_name
from rayq.records import RemotePartitionInfo
from rayq.runtime.object_store import open_store

NAME = "tiered"
TOPIC = "cold"
PARTITIONS = 2
PRODUCED_MIB = 1024
VALUE_BYTES = 1024
CHUNK = 2048
SEGMENT_BYTES = 64 * MIB
TIMEOUT_S = 300.0
REPETITIONS = 3
UPLOAD_CPU_PERCENT = 15.0
"""Of a core, for each 100 MB/s that are stored."""
TAIL_S = 15.0
TAIL_INTERVAL_S = 0.005
READ_AT_ONCE = 8 * MIB
CACHE_BYTES = 128 * MIB
"""Much less than what is read, so that each reading is a cold one."""


def tiered_storage(
    cluster: rayq.Cluster,
    directory: Path,
    produced_mib: int = PRODUCED_MIB,
    url: str | None = None,
) -> list[Row]:
    """Starts a cluster of its own on the Ray of the others."""
    del cluster
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as path:
        store_url = url or f"file://{path}"
        own = rayq.start(
            str(directory / NAME),
            brokers=1,
            name=NAME,
            port=19792,
            remote_storage_url=store_url,
            retention_check_interval_ms=500,
            remote_cache_bytes=CACHE_BYTES,
        )
        try:
            return measure(own, directory, store_url, produced_mib * MIB)
        finally:
            own.stop()


def measure(cluster: rayq.Cluster, directory: Path, url: str, produced_bytes: int) -> list[Row]:
    disk_mb_s = machine.sequential_write_mb_s(directory / "raw")
    create(cluster, TOPIC)
    rows = [
        Row(name="this disk, written in one go", unit="MB/s", samples=[disk_mb_s]),
        *storing(cluster, produced_bytes, disk_mb_s / 2),
    ]
    wait_until_cold(cluster)
    return [*rows, *reading(cluster, url), *tail_beside_replay(cluster)]


def create(cluster: rayq.Cluster, topic: str) -> None:
    cluster.create_topic(
        topic,
        PARTITIONS,
        1,
        remote_storage=True,
        segment_bytes=SEGMENT_BYTES,
        local_retention_bytes=0,
        timeout_s=TIMEOUT_S,
    )


# --- storing --------------------------------------------------------------------------------------


def storing(cluster: rayq.Cluster, produced_bytes: int, pace_mb_s: float) -> list[Row]:
    """Produces at half of the disk's rate. The store should have what was closed, soon after."""
    pid = object_server_pid()
    values = [os.urandom(VALUE_BYTES) for _ in range(CHUNK)]
    chunk_bytes = CHUNK * VALUE_BYTES
    with cluster.producer(compression_type="none", batch_size=512 * 1024) as producer:
        began_s, cpu_before_s = time.perf_counter(), cpu_s(pid)
        for number in range(produced_bytes // chunk_bytes):
            early_s = began_s + number * chunk_bytes / 1e6 / pace_mb_s - time.perf_counter()
            if early_s > 0:
                time.sleep(early_s)
            producer.send_many(TOPIC, values, partition=number % PARTITIONS)
        producer.flush(TIMEOUT_S)
        produced_s = time.perf_counter() - began_s
        stored_while_produced = stored_bytes(cluster)
    wait_until_stored(cluster)
    stored_s, stored = time.perf_counter() - began_s, stored_bytes(cluster)
    used_s = cpu_s(pid) - cpu_before_s
    # What is still open cannot be stored.
    closed = stored_while_produced + PARTITIONS * SEGMENT_BYTES
    return [
        Row(
            name=f"produced at {pace_mb_s:.0f} MB/s, half of it",
            unit="MB/s",
            samples=[produced_bytes / 1e6 / produced_s],
        ),
        Row(
            name="  stored meanwhile, of what was produced",
            unit="%",
            samples=[100 * min(closed / produced_bytes, 1.0)],
            target=90.0,
            note=f"but for the segments that are open; all of it {stored_s - produced_s:.1f} s "
            "after the last record",
        ),
        Row(
            name="  the object server, for each 100 MB/s stored",
            unit="% of a core",
            samples=[100 * used_s / (stored / 1e8)],
            target=UPLOAD_CPU_PERCENT,
            better="lower",
            note="its processor time; the leader and the disk are not in it",
        ),
    ]


def object_server_pid() -> int:
    """Among the processes of the local Ray that this process has started."""
    for pid in with_descendants(os.getpid()):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ObjectServerActor"):
            return pid
    raise RuntimeError("There is no object server.")


def states(cluster: rayq.Cluster) -> list[RemotePartitionInfo]:
    return cluster.admin.describe_remote_storage(TOPIC, timeout_s=TIMEOUT_S)


def stored_bytes(cluster: rayq.Cluster) -> int:
    return sum(one.remote_bytes or 0 for one in states(cluster))


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.1)


def wait_until_stored(cluster: rayq.Cluster) -> None:
    def is_stored() -> bool:
        return all(one.remote_end_offset and one.lag_bytes == 0 for one in states(cluster))

    wait_until(is_stored, "what is closed is stored")


def wait_until_cold(cluster: rayq.Cluster) -> None:
    def is_cold() -> bool:
        return all(one.local_start_offset == one.remote_end_offset for one in states(cluster))

    wait_until(is_cold, "what is stored has left the disk")


# --- reading --------------------------------------------------------------------------------------


def reading(cluster: rayq.Cluster, url: str) -> list[Row]:
    ends = [one.remote_end_offset or 0 for one in states(cluster)]
    size_mb = stored_bytes(cluster) / 1e6
    client, background = cluster.shared_client()
    store = open_store(url, client.environment)
    raw = [
        size_mb / timed(lambda: background.run(read_store(store, cluster.cluster_id or "")))
        for _ in range(REPETITIONS)
    ]
    consume(cluster, ends)  # It also pays for imports.
    cold = [size_mb / timed(lambda: consume(cluster, ends)) for _ in range(REPETITIONS)]
    tasks: dict[bool, list[float]] = {True: [], False: []}
    actor = ray.remote(num_cpus=0)(Reader)
    readers = [actor.remote(cluster) for _ in range(PARTITIONS)]
    for number in range(1 + REPETITIONS):  # The first of each kind warms up.
        for is_direct, kept in tasks.items():
            took_s = timed(lambda is_direct=is_direct: read_in_tasks(readers, ends, is_direct))  # type: ignore[misc]
            if number:
                kept.append(size_mb / took_s)
    return [
        Row(
            name="the store's objects, one GET of 8 MiB after the other",
            unit="MB/s",
            samples=raw,
        ),
        Row(
            name="consumed from the beginning, through the leader",
            unit="MB/s",
            samples=cold,
            ratio=statistics.median(cold) / statistics.median(raw),
            # No store over a network is as fast as a directory in memory.
            target_ratio=None if url.startswith("file:") else 0.5,
            note="of the objects alone; one consumer of both partitions, as Arrow",
        ),
        Row(
            name=f"batch reads in {PARTITIONS} tasks, through the leader",
            unit="MB/s",
            samples=tasks[False],
        ),
        Row(
            name=f"batch reads in {PARTITIONS} tasks, the objects themselves",
            unit="MB/s",
            samples=tasks[True],
            ratio=statistics.median(tasks[True]) / statistics.median(tasks[False]),
            target_ratio=1.5,
            note="of the same through the leader",
        ),
    ]


def timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


async def read_store(store: ObjectStore, cluster_id: str) -> None:
    after = ""
    while page := await store.list(f"{cluster_id}/", after):
        after = page[-1].name
        for one in page:
            name = parse_name(one.name)
            if name is not None and name.kind is ObjectKind.DATA:
                for position in range(0, one.size_bytes, READ_AT_ONCE):
                    await store.get(one.name, position, READ_AT_ONCE)


def consume(cluster: rayq.Cluster, ends: list[int]) -> None:
    """Reads what is in the store, and a little more."""
    left = sum(ends)
    with cluster.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        while left > 0:
            left -= consumer.poll_arrow(TIMEOUT_S, 50_000).num_rows


class Reader:
    """A task's process, which stays for the next measurement."""

    def __init__(self, cluster: rayq.Cluster) -> None:
        self._cluster = cluster

    def read(self, partition: int, end: int, is_direct: bool) -> int:
        """How many records the store has of a partition, by reading them."""

        async def uses_remote_storage(*_: object) -> bool:
            return is_direct

        module: Any = range_reader
        module.uses_remote_storage = uses_remote_storage
        (split,) = (one for one in snapshot(self._cluster, TOPIC) if one.partition == partition)
        split = split._replace(end=min(split.end, end))
        batches = range_reader.read_range(self._cluster, split, columns=("value",))
        return sum(batch.num_rows for batch in batches)


def read_in_tasks(readers: list[Any], ends: list[int], is_direct: bool) -> None:
    found = [
        reader.read.remote(number, end, is_direct)
        for number, (reader, end) in enumerate(zip(readers, ends, strict=True))
    ]
    assert ray.get(found) == ends


# --- readers at the end ---------------------------------------------------------------------------


def tail_beside_replay(cluster: rayq.Cluster) -> list[Row]:
    """From a send to the poll that returns the record, without and with somebody who reads the
    topic from its beginning all the while, in another process."""
    alone_ms = tail_latencies_ms(cluster)
    spawning = multiprocessing.get_context("spawn")
    has_begun = spawning.Event()
    process = spawning.Process(target=replay, args=(cluster.connection(), has_begun), daemon=True)
    process.start()
    try:
        if not has_begun.wait(TIMEOUT_S):
            raise TimeoutError("the replay did not begin")
        beside_ms = tail_latencies_ms(cluster)
    finally:
        process.kill()
        process.join()
    p99_ms = quantile(alone_ms, 0.99)
    return [
        Row(
            name="send to poll at the end, p99",
            unit="ms",
            samples=[p99_ms],
            better="lower",
            note=f"p50 {quantile(alone_ms, 0.5):.1f} ms",
        ),
        Row(
            name="  beside a replay from the store, p99",
            unit="ms",
            samples=[quantile(beside_ms, 0.99)],
            target=1.5 * p99_ms,
            better="lower",
            note=f"p50 {quantile(beside_ms, 0.5):.1f} ms; the target is 1.5 times the one alone",
        ),
    ]


def replay(cluster: rayq.Cluster, has_begun: Event) -> None:
    """Reads from the beginning again and again, until it is killed."""
    while True:
        with cluster.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
            while consumer.poll_arrow(5.0, 50_000).num_rows:
                has_begun.set()


def tail_latencies_ms(cluster: rayq.Cluster) -> list[float]:
    found = []
    with (
        cluster.producer(linger_ms=0) as producer,
        cluster.consumer(TOPIC, auto_offset_reset="latest") as consumer,
    ):
        consumer.poll(timeout_s=0.5)
        until_s = time.perf_counter() + TAIL_S
        while (began_s := time.perf_counter()) < until_s:
            producer.send(TOPIC, b"%.9f" % began_s, partition=0)
            while not any(one.value == b"%.9f" % began_s for one in consumer.poll(timeout_s=5.0)):
                pass
            found.append((time.perf_counter() - began_s) * 1000)
            time.sleep(TAIL_INTERVAL_S)
    return found


def main() -> None:
    produced_mib = int(sys.argv[1]) if len(sys.argv) > 1 else PRODUCED_MIB
    url = sys.argv[2] if len(sys.argv) > 2 else None
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    directory = Path(tempfile.mkdtemp(dir="."))
    try:
        with rayq.start(str(directory / "unused"), brokers=1) as unused:
            rows = tiered_storage(unused, directory.resolve(), produced_mib, url)
            unused.stop()
        wide_console().print(table(rows, machine.describe()))
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()

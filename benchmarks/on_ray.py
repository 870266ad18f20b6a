"""rayq on a local Ray, three brokers on one disk, replication factor 3, acks="all"."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import rayq
from benchmarks import profiles
from benchmarks.machine import MIB, cpu_share, sequential_write_mb_s, unique_memory_mb
from benchmarks.report import Row
from rayq.records import PartitionInfo, RecordMetadata

REPETITIONS = 3
RESULT_TIMEOUT_S = 120.0
"""How long to wait for the next of many results."""
HEALED_TIMEOUT_S = 600.0
READ_NOTHING_S = 120.0
"""These are no budgets: what takes so long hangs, also on a slow machine."""


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --- throughput against the disk ------------------------------------------------------------------

PRODUCED_MIB = 256
PROFILES = Path(".bench") / "profiles"
PROFILED_S = 3
RATIO_TARGET = 0.8
MEMORY_REPORTED_S = 4.0
"""After so long a hypervisor has taken back the memory that was freed last."""
RECORDS_PER_CALL = 2048


def produce_throughput(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """Produces 1 KB records that do not compress. Each repetition runs beside a raw write.

    The files of one measurement stay until the last, so that none runs on page-cache memory that
    another has just given back (`sequential_write_mb_s`).
    """
    time.sleep(MEMORY_REPORTED_S)
    cluster.create_topic("throughput", partitions=1, replication_factor=3)
    values = [os.urandom(1024) for _ in range(RECORDS_PER_CALL)]
    calls = PRODUCED_MIB * MIB // (1024 * RECORDS_PER_CALL)
    raw, produced, onto_disk, ratios, busy = [], [], [], [], []
    with cluster.producer(compression_type="none", batch_size=512 * 1024) as producer:

        def produce() -> None:
            sent = [producer.send_many("throughput", values) for _ in range(calls)]
            for future in sent:
                future.result(timeout=RESULT_TIMEOUT_S)

        producer.send_many("throughput", values).result(timeout=RESULT_TIMEOUT_S)
        for repetition in range(REPETITIONS):
            raw.append(sequential_write_mb_s(directory / f"raw-{repetition}"))
            with cpu_share() as cpu:
                started_s = time.perf_counter()
                produce()
                took_s = time.perf_counter() - started_s
            produced.append(PRODUCED_MIB * MIB / 1e6 / took_s)
            onto_disk.append(3 * produced[-1])
            ratios.append(onto_disk[-1] / raw[-1])
            busy.append(100 * cpu.busy)
        pids = _pids_of(cluster.admin.describe_topic("throughput").partitions[0])
        pids["producer"] = os.getpid()
        profile = profiles.while_running(produce, pids, PROFILES, PROFILED_S)
    warm = [sequential_write_mb_s(directory / "raw-0") for _ in range(REPETITIONS)]
    cluster.admin.delete_topic("throughput")
    for repetition in range(REPETITIONS):
        (directory / f"raw-{repetition}").unlink()
    return [
        Row(name="raw sequential write", unit="MB/s", samples=raw, note="a fresh file, one sync"),
        Row(name="  of the same file again", unit="MB/s", samples=warm, note="memory is warm"),
        Row(name="produce 1 KB, acks=all, RF 3", unit="MB/s", samples=produced),
        Row(
            name="  written by all three replicas",
            unit="MB/s",
            samples=onto_disk,
            ratio=statistics.median(ratios),
            target_ratio=RATIO_TARGET,
            note="ratio to the raw write of a fresh file",
        ),
        Row(
            name="  or both cores busy",
            unit="%",
            samples=busy,
            # The share of busy cores is the target where the disk is not the limit.
            target=None if statistics.median(ratios) >= RATIO_TARGET else 90.0,
            note="profiles below and in .bench/profiles",
            details=profile,
        ),
    ]


def _pids_of(partition: PartitionInfo) -> dict[str, int]:
    pids: dict[str, int] = {}
    for replica in partition.replicas:
        name = "leader" if replica.broker == partition.leader else f"follower-{replica.broker}"
        if replica.pid is not None:
            pids[name] = replica.pid
    return pids


# --- end to end -----------------------------------------------------------------------------------

END_TO_END_RECORDS = 480_000
PACED_PER_S = 200_000
PACED_S = 3
CHUNK = 2_000


def end_to_end(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """100-byte records from a producer in this process to a consumer in a process of its own."""
    del directory
    cluster.create_topic("end-to-end", partitions=3, replication_factor=3)
    chunk = [_like_json(number) for number in range(CHUNK)]
    sent_per_s, polled_per_s, p50_ms, p99_ms = [], [], [], []
    with cluster.producer() as producer, _reader(cluster, "end-to-end") as reader:
        for repetition in range(REPETITIONS + 1):
            count = END_TO_END_RECORDS if repetition else END_TO_END_RECORDS // 4
            assert count % CHUNK == 0
            reader.send(count)
            started_s = time.monotonic()
            futures = [producer.send_many("end-to-end", chunk) for _ in range(count // CHUNK)]
            for future in futures:
                future.result(timeout=RESULT_TIMEOUT_S)
            acknowledged_s = time.monotonic()
            all_read_s, _ = _reply(reader)
            if repetition:  # the first repetition warms up
                sent_per_s.append(count / (acknowledged_s - started_s))
                polled_per_s.append(count / (all_read_s - started_s))
        for _ in range(REPETITIONS):
            count = PACED_PER_S * PACED_S
            reader.send(count)
            started_s = time.monotonic()
            futures = []
            for index in range(count // CHUNK):
                _sleep_until(started_s + index * CHUNK / PACED_PER_S)
                futures.append(producer.send_many("end-to-end", chunk))
            for future in futures:
                future.result(timeout=RESULT_TIMEOUT_S)
            _, delays_ms = _reply(reader)
            p50_ms.append(quantile(delays_ms, 0.5))
            p99_ms.append(quantile(delays_ms, 0.99))
    cluster.admin.delete_topic("end-to-end")
    paced = f"at {PACED_PER_S:,}/s, from the record's timestamp to poll's return"
    return [
        Row(
            name="end to end 100 B, RF 3: send_many",
            unit="records/s",
            samples=sent_per_s,
            target=200_000,
            note="acknowledged, with a consumer beside it",
        ),
        Row(
            name="  polled by another process",
            unit="records/s",
            samples=polled_per_s,
            target=200_000,
            note="from the first send to the last poll",
        ),
        Row(name="  send to poll, p50", unit="ms", samples=p50_ms, better="lower", note=paced),
        Row(name="  send to poll, p99", unit="ms", samples=p99_ms, better="lower", note=paced),
    ]


def _like_json(number: int) -> bytes:
    word = f"{random.Random(number).getrandbits(64):x}"
    text = f'{{"number":{number},"word":"{word}","flag":true,"x":"'
    return (text + "a" * (98 - len(text)) + '"}').encode()


@contextmanager
def _reader(cluster: rayq.Cluster, topic: str) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read_on_demand, args=(cluster, topic, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    try:
        yield ours
    finally:
        ours.close()
        process.join(timeout=20)


def _reply(reader: Connection) -> tuple[float, list[float]]:
    try:
        answer: tuple[float, list[float]] = reader.recv()
    except EOFError:
        raise RuntimeError("The reading process failed: it says above why.") from None
    return answer


def _read_on_demand(cluster: rayq.Cluster, topic: str, requests: Connection) -> None:
    """Reads as many records as each request says. Answers with the time, and a sample of the
    delays."""
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        requests.send("ready")
        while True:
            try:
                left: int = requests.recv()
            except EOFError:
                return
            delays_ms: list[float] = []
            while left > 0:
                records = consumer.poll(timeout_s=READ_NOTHING_S, max_records=10_000)
                if not records:
                    raise TimeoutError(f"{left} records did not come in {READ_NOTHING_S:.0f} s.")
                now_ms = time.time() * 1000
                delays_ms += [now_ms - record.timestamp_ms for record in records[::10]]
                left -= len(records)
            requests.send((time.monotonic(), delays_ms))


# --- one record at a time -------------------------------------------------------------------------

SINGLE_PER_S = 1000
SINGLE_S = 2


def single_latency(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """Sends 1,000 records of 1 KB a second, open loop: each latency begins when the record was
    due. With it the processor time that each process takes for a record."""
    del directory
    cluster.create_topic("single", partitions=1, replication_factor=3)
    pids = _pids_of(cluster.admin.describe_topic("single").partitions[0])
    pids["producer"] = os.getpid()
    rows = []
    with cluster.producer(linger_ms=0) as producer:
        rows += _single_rows(producer, pids, "linger_ms=0", p50_target_ms=1.2, p99_target_ms=4.0)
    with cluster.producer() as producer:
        rows += _single_rows(producer, {}, "default settings")
    cluster.admin.delete_topic("single")
    return rows


def _single_rows(
    producer: rayq.Producer,
    pids: dict[str, int],
    settings: str,
    p50_target_ms: float | None = None,
    p99_target_ms: float | None = None,
) -> list[Row]:
    p50_ms: list[float] = []
    p99_ms: list[float] = []
    cpu_us: dict[str, list[float]] = {name: [] for name in pids}
    for repetition in range(REPETITIONS + 1):
        count = SINGLE_PER_S * (SINGLE_S if repetition else 1)
        before_s = {name: profiles.cpu_s(pid) for name, pid in pids.items()}
        latencies_ms = _single_latencies_ms(producer, count)
        if repetition:  # the first repetition warms up
            p50_ms.append(quantile(latencies_ms, 0.5))
            p99_ms.append(quantile(latencies_ms, 0.99))
            for name, pid in pids.items():
                cpu_us[name].append((profiles.cpu_s(pid) - before_s[name]) / count * 1e6)
    return [
        Row(
            name=f"single 1 KB, acks=all, {settings}: p50",
            unit="ms",
            samples=p50_ms,
            target=p50_target_ms,
            better="lower",
            note=f"open loop at {SINGLE_PER_S:,}/s",
        ),
        Row(
            name=f"single 1 KB, acks=all, {settings}: p99",
            unit="ms",
            samples=p99_ms,
            target=p99_target_ms,
            better="lower",
        ),
        *(
            Row(name=f"  CPU per record: {name}", unit="us", samples=samples, better="lower")
            for name, samples in cpu_us.items()
        ),
    ]


def _single_latencies_ms(producer: rayq.Producer, count: int) -> list[float]:
    value = os.urandom(1024)
    done_s = [0.0] * count
    futures = []
    started_s = time.monotonic() + 0.01
    for index in range(count):
        _sleep_until(started_s + index / SINGLE_PER_S)
        stamp = _Stamp(done_s, index)
        futures.append(producer.send("single", value, on_delivery=stamp))
    for future in futures:
        future.result(timeout=RESULT_TIMEOUT_S)
    return [
        (at_s - started_s - index / SINGLE_PER_S) * 1000 for index, at_s in enumerate(done_s)
    ]


class _Stamp:
    """Notes when a record was delivered."""

    def __init__(self, done_s: list[float], index: int) -> None:
        self._done_s = done_s
        self._index = index

    def __call__(self, metadata: RecordMetadata | None, error: BaseException | None) -> None:
        self._done_s[self._index] = time.monotonic()


def _sleep_until(at_s: float) -> None:
    if (left_s := at_s - time.monotonic()) > 0:
        time.sleep(left_s)


# --- failover -------------------------------------------------------------------------------------


def failover(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """The time from the signal to the leader until a write that was sent after it is
    acknowledged."""
    del directory
    cluster.create_topic("failover", partitions=1, replication_factor=3)
    killed_s = [_pause_s(cluster, signal.SIGKILL) for _ in range(REPETITIONS)]
    stopped_s = [_pause_s(cluster, signal.SIGSTOP) for _ in range(REPETITIONS)]
    cluster.admin.delete_topic("failover")
    return [
        Row(
            name="leader SIGKILLed: until the next write",
            unit="s",
            samples=killed_s,
            target=1.0,
            better="lower",
        ),
        Row(
            name="leader SIGSTOPped: until the next write",
            unit="s",
            samples=stopped_s,
            target=5.0,
            better="lower",
        ),
    ]


def _pause_s(cluster: rayq.Cluster, fault: signal.Signals) -> float:
    pid = _wait_until_whole(cluster, "failover")
    with cluster.producer() as producer:
        for _ in range(50):
            producer.send("failover", b"before").result(timeout=RESULT_TIMEOUT_S)
        started_s = time.monotonic()
        os.kill(pid, fault)
        try:
            producer.send("failover", b"after").result(timeout=RESULT_TIMEOUT_S)
            return time.monotonic() - started_s
        finally:
            _end(pid)


def _wait_until_whole(cluster: rayq.Cluster, topic: str) -> int:
    """Waits until all three replicas are in sync. Returns the pid of the leader."""
    deadline_s = time.monotonic() + HEALED_TIMEOUT_S
    while True:
        partition = cluster.admin.describe_topic(topic).partitions[0]
        pid = _leader_pid(partition)
        if len(partition.isr) == 3 and pid is not None:
            return pid
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{topic} has only {partition.isr} in sync.")
        time.sleep(0.1)


def _leader_pid(partition: PartitionInfo) -> int | None:
    return next((r.pid for r in partition.replicas if r.broker == partition.leader), None)


def _end(pid: int) -> None:
    """Ends a stopped process, unless its broker has killed it already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


# --- memory ---------------------------------------------------------------------------------------


def idle_memory(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """The memory of the processes of a topic that never had a record."""
    del directory
    cluster.create_topic("idle", partitions=1, replication_factor=3)
    time.sleep(3.0)  # memory that the start needed is free by then
    replicas = cluster.admin.describe_topic("idle").partitions[0].replicas
    samples = [unique_memory_mb(replica.pid) for replica in replicas if replica.pid is not None]
    cluster.admin.delete_topic("idle")
    return [
        Row(
            name="unique memory of an idle replica",
            unit="MB",
            samples=samples,
            target=75.0,
            better="lower",
            note="USS of its process",
        )
    ]


SECTIONS = {
    "idle-memory": idle_memory,
    "single-latency": single_latency,
    "throughput": produce_throughput,
    "end-to-end": end_to_end,
    "failover": failover,
}

"""`rayq bench profile`: measures what a byte costs on the running cluster, for `rayq plan`."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rayq.cli import output
from rayq.cli.bench import BENCH_TOPIC, TIMEOUT_S, Replicas, bench_topic
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Json
from rayq.cli.values import WrongUseError
from rayq.client.cluster import Cluster
from rayq.config import GIB, MIB
from rayq.core.capacity.measured_costs import COUNTED_ON, MeasuredCosts, measured_costs
from rayq.core.capacity.measured_load import Growth
from rayq.errors import DiskFullError
from rayq.metrics import Sample
from rayq.records import OffsetRange, TopicPartition

PLACE = TopicPartition(BENCH_TOPIC, 0)
RECORD_BYTES = 1000
CALL_RECORDS = 500
CALLS_IN_FLIGHT = 64
KEPT_BYTES = 512 * MIB
"""Bytes of the topic that are kept when older ones are deleted, each time that there are twice as
many. They fit into the page cache, from which consumers that keep up are served."""
SEGMENT_BYTES = 64 * MIB
FREE_BYTES_MIN = 4 * GIB
"""The free space of every disk below which nothing is written: the topic's records, and as many
again while deletions are on their way."""
IDLE_SHARE, WRITE_SHARE = 1 / 6, 1 / 2
"""Shares of the time: at rest, then written. The rest is read."""
CLIENT_BUSY = 0.9
"""The share of a core from which on this program may be what limited a rate."""
OTHERS_SHARE = 0.02


def profile(
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The file for `rayq plan --profile`."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Duration of the measurement.", min=1, max=3600)
    ] = 60.0,
    replicas: Replicas = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Measure what a byte costs here: one partition at full speed, in a topic made for it."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise WrongUseError(
            f"{file} cannot be written: it is a directory, or its directory does not exist."
        )
    with connected(cluster) as connection:
        _check_disks(connection.metrics())
        with bench_topic(connection, 1, replicas, segment_bytes=SEGMENT_BYTES):
            output.hush()
            measured, notes = _measured(connection, seconds)
    costs = measured.costs
    if file is not None:
        file.write_text(json_module.dumps(costs, indent=2) + "\n")
    if json:
        output.print_json({**dataclasses.asdict(measured), "costs": costs, "notes": notes})
        return
    _show(measured, costs, notes)
    if file is not None:
        output.say(f"Written to {file}: rayq plan --profile {file} ...")


def _check_disks(samples: Sequence[Sample]) -> None:
    for sample in samples:
        if sample.name == "rayq_disk_free_bytes" and sample.value < FREE_BYTES_MIN:
            raise DiskFullError(
                f"Broker {sample.labels['broker']} has {output.human_size(int(sample.value))} "
                f"free, and below {output.human_size(FREE_BYTES_MIN)} nothing is written: the "
                f"measurement keeps about {output.human_size(2 * KEPT_BYTES)} on each replica. "
                "Free some space first."
            )


def _measured(cluster: Cluster, seconds: float) -> tuple[MeasuredCosts, list[str]]:
    """The measured costs, and what to know about them."""
    clock = _Clock(cluster)
    copies = len(cluster.admin.describe_topic(BENCH_TOPIC).partitions[0].replicas)
    with output.progress("measuring", int(seconds)) as advance:
        _write(cluster, 0.0)  # The producer's way to the leader is known from here on.
        clock.start()
        time.sleep(seconds * IDLE_SHARE)
        idle = clock.growth()
        advance(int(seconds * IDLE_SHARE))
        cpu_s = time.process_time()
        _write(cluster, seconds * WRITE_SHARE)
        writing = clock.growth()
        writer_cores = (time.process_time() - cpu_s) / writing.seconds
        advance(int(seconds * (IDLE_SHARE + WRITE_SHARE)))
        cpu_s = time.process_time()
        _read(cluster, seconds * (1 - IDLE_SHARE - WRITE_SHARE))
        reading = clock.growth()
        reader_cores = (time.process_time() - cpu_s) / reading.seconds
    found = measured_costs(BENCH_TOPIC, copies, idle=idle, writing=writing, reading=reading)
    return found, _notes(found, writer_cores, reader_cores)


class _Clock:
    """Collects the metrics of the cluster, and the growth since the last time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def start(self) -> None:
        self._samples, self._at_s = self._cluster.metrics(), time.perf_counter()

    def growth(self) -> Growth:
        before, before_s = self._samples, self._at_s
        self.start()
        return Growth(before, self._samples, self._at_s - before_s)


def _write(cluster: Cluster, seconds: float) -> None:
    """Writes records that do not compress, until the time is over and all are acknowledged."""
    values = [os.urandom(RECORD_BYTES) for _ in range(CALL_RECORDS)]
    kept = KEPT_BYTES // RECORD_BYTES
    deleted = 0
    until_s = time.perf_counter() + seconds
    with cluster.producer() as producer:
        sent = deque([producer.send_many(BENCH_TOPIC, values)])
        while time.perf_counter() < until_s:
            sent.append(producer.send_many(BENCH_TOPIC, values))
            if len(sent) > CALLS_IN_FLIGHT:
                end = _end(sent.popleft().result(timeout=TIMEOUT_S))
                if end - deleted > 2 * kept:
                    deleted = end - kept
                    cluster.admin.delete_records({PLACE: deleted})
        for delivery in sent:
            delivery.result(timeout=TIMEOUT_S)


def _end(written: Sequence[OffsetRange]) -> int:
    return max(offsets.end for offsets in written)


def _read(cluster: Cluster, seconds: float) -> None:
    """Reads all records again and again, until the time is over."""
    until_s = time.perf_counter() + seconds
    with cluster.consumer(BENCH_TOPIC, auto_offset_reset="earliest") as consumer:
        end = consumer.end_offsets([PLACE])[PLACE]
        while time.perf_counter() < until_s:
            consumer.poll(0.1, 10_000)
            if consumer.position(PLACE) >= end:
                consumer.seek_to_beginning(PLACE)


def _notes(measured: MeasuredCosts, writer_cores: float, reader_cores: float) -> list[str]:
    notes = []
    if measured.write_cpu_s_per_byte is None:
        notes.append(
            "The servers do not tell their processor time (they share a process with others, or "
            "are older): the plan takes the defaults for it."
        )
    if measured.fdatasync_p50_s is None:
        notes.append("No flush was measured.")
    notes.append(
        "The network between brokers carried what replication copied; its limit was not measured: "
        "give --net."
    )
    for what, cores in (("writing", writer_cores), ("reading", reader_cores)):
        if cores >= CLIENT_BUSY:
            notes.append(
                f"This program took {cores:.1f} cores while {what}: the partition may do more."
            )
    rate = min(measured.acknowledged_bytes_per_s, measured.read_bytes_per_s)
    if measured.others_bytes_per_s > OTHERS_SHARE * rate:
        notes.append(
            f"Others wrote and read {measured.others_bytes_per_s / 1e6:,.1f} MB/s meanwhile: the "
            "costs are less exact. Measure at rest."
        )
    return notes


def _show(measured: MeasuredCosts, costs: dict[str, float], notes: Sequence[str]) -> None:
    unknown = "not measured"

    def rate(bytes_per_s: float) -> str:
        return f"{bytes_per_s / 1e6:,.1f} MB/s"

    def ms(seconds: float | None) -> str:
        return unknown if seconds is None else f"{1000 * seconds:.2f} ms"

    def cpu(name: str) -> str:
        return f"{1e9 * costs[name]:.3g} ms for each MB" if name in costs else unknown

    output.table(
        ("WHAT", "MEASURED"),
        [
            ("one partition, acknowledged", rate(measured.acknowledged_bytes_per_s)),
            ("one consumer", rate(measured.read_bytes_per_s)),
            ("servers' CPU, written, each replica", cpu("write_cpu_s_per_byte")),
            ("servers' CPU, read", cpu("read_cpu_s_per_byte")),
            ("fdatasync, p50", ms(measured.fdatasync_p50_s)),
            ("fdatasync, p99", ms(measured.fdatasync_p99_s)),
            ("network between brokers, at least", rate(measured.replication_bytes_per_s)),
        ],
    )
    output.say(f"A plan counts on {COUNTED_ON:.0%} of the two rates.")
    for note in notes:
        output.say(note)

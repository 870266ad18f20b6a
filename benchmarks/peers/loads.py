"""The loads: each section yields figures of one side, by the same steps for both."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec

from benchmarks.on_ray import quantile
from benchmarks.peers.side import REPLICATION_FACTOR, Side
from benchmarks.usage import Usage, watch

REPETITIONS = 5
WARM_S = 15.0
"""How long each section first loads the servers: a JVM compiles what it runs often."""
PARTITIONS = 6


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure: the median of `samples`."""

    name: str
    unit: str
    samples: list[float]
    better: Literal["higher", "lower"] = "higher"
    beside: str | None = None
    """The name of the other side's figure to compare with, where that side has none of this
    name."""


def _values(size_bytes: int, count: int) -> list[bytes]:
    """Values that do not compress."""
    some = [os.urandom(size_bytes) for _ in range(10_000)]
    return list(itertools.islice(itertools.cycle(some), count))


def _repeated_s(step: Callable[..., object], *arguments: object) -> list[float]:
    """The seconds of each repetition."""
    took_s = []
    for _ in range(REPETITIONS):
        gc.collect()
        started_s = time.perf_counter()
        step(*arguments)
        took_s.append(time.perf_counter() - started_s)
    return took_s


def _warm(side: Side) -> None:
    side.create_topic("warm", PARTITIONS)
    values = _values(1024, 20_000)
    until_s = time.monotonic() + WARM_S
    while time.monotonic() < until_s:
        side.send_each("warm", values)
    side.consume("warm", PARTITIONS, len(values))
    side.delete_topic("warm")


# --- throughput -----------------------------------------------------------------------------------


class _Records(NamedTuple):
    """What one throughput is measured with, and in which unit it is told."""

    name: str
    size_bytes: int
    how_many: int
    unit: str

    def figure(self, name: str, took_s: list[float], beside: str | None = None) -> Figure:
        factor = 1.0 if self.unit == "records/s" else self.size_bytes / 1e6
        return Figure(
            name=name,
            unit=self.unit,
            samples=[self.how_many * factor / one for one in took_s],
            beside=beside,
        )


SMALL = _Records("100 B", 100, 500_000, "records/s")
LARGE = _Records("1 KB", 1024, 100_000, "MB/s")
READ_FACTOR = 2
"""Reading is faster than writing: so many times more records are read."""


def produce(side: Side) -> Iterator[Figure]:
    _warm(side)
    for records in (SMALL, LARGE):
        side.create_topic("produced", PARTITIONS)
        values = _values(records.size_bytes, records.how_many)
        side.send_each("produced", values)
        one_send_each = f"produce {records.name}, one send each"
        each_s = _repeated_s(side.send_each, "produced", values)
        yield records.figure(one_send_each, each_s)
        if side.send_many("produced", values):
            many_s = _repeated_s(side.send_many, "produced", values)
            name = f"produce {records.name}, send_many (Kafka: one send each)"
            yield records.figure(name, many_s, beside=one_send_each)
        side.delete_topic("produced")


def consume(side: Side) -> Iterator[Figure]:
    _warm(side)
    for written in (SMALL, LARGE):
        records = written._replace(how_many=READ_FACTOR * written.how_many)
        side.create_topic("consumed", PARTITIONS)
        side.send_each("consumed", _values(records.size_bytes, records.how_many))
        side.consume("consumed", PARTITIONS, records.how_many)
        took_s = _repeated_s(side.consume, "consumed", PARTITIONS, records.how_many)
        yield records.figure(f"consume {records.name}", took_s)
        side.delete_topic("consumed")


# --- latency --------------------------------------------------------------------------------------

PACED_PER_S = 1000
PACED_S = 5


def latency(side: Side) -> Iterator[Figure]:
    _warm(side)
    side.create_topic("paced", 1)
    value = os.urandom(LARGE.size_bytes)
    runs_ms = [
        side.send_paced("paced", value, PACED_PER_S, PACED_PER_S * PACED_S)
        for _ in range(1 + REPETITIONS)
    ][1:]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        yield Figure(
            name=f"1 KB at 1,000/s, linger 0, {name}",
            unit="ms",
            samples=[quantile(run_ms, share) for run_ms in runs_ms],
            better="lower",
        )


# --- failover -------------------------------------------------------------------------------------

KILLS = 3


def failover(side: Side) -> Iterator[Figure]:
    side.create_topic("failover", 1)
    yield Figure(
        name="SIGKILL of the leader's process until the next acknowledgement",
        unit="s",
        samples=[_pause_s(side, lambda: [side.leader_pid("failover")]) for _ in range(KILLS)],
        better="lower",
    )
    yield Figure(
        name="SIGKILL of all processes of the leader's broker until then",
        unit="s",
        samples=[
            _pause_s(side, lambda: side.leader_broker_pids("failover")) for _ in range(KILLS)
        ],
        better="lower",
    )


def _pause_s(side: Side, victims: Callable[[], list[int]]) -> float:
    side.heal("failover")
    for _ in range(50):
        side.send_each("failover", [b"before"])
    pids = victims()
    started_s = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    side.send_each("failover", [b"after"])
    return time.monotonic() - started_s


# --- many partitions ------------------------------------------------------------------------------

MANY = (100, 1000)
CALM_S = 10.0
"""Between the last start of something and the watching."""
WATCHED_S = 20.0


def partitions(side: Side) -> Iterator[Figure]:
    _warm(side)
    empty = _all_servers(side)
    for count in MANY:
        name = f"many-{count}"
        started_s = time.monotonic()
        side.create_topic(name, count)
        in_sync_s = time.monotonic() - started_s
        side.write_to_all(name, count)
        written_s = time.monotonic() - started_s
        what = f"{count:,} new partitions, RF 3"
        yield Figure(
            name=f"{what}, until all are in sync", unit="s", samples=[in_sync_s], better="lower"
        )
        yield Figure(
            name=f"{what}, until each has acknowledged a record",
            unit="s",
            samples=[written_s],
            better="lower",
        )
    whole = _all_servers(side)
    replicas = sum(MANY) * REPLICATION_FACTOR
    for name, unit, empty_value, whole_value in (
        ("idle CPU", "% of a core", empty.cpu_percent, whole.cpu_percent),
        ("unique memory", "MB", empty.unique_mb, whole.unique_mb),
    ):
        yield Figure(
            name=f"{name} of all servers for each of {replicas:,} replicas",
            unit=unit,
            samples=[whole_value / replicas],
            better="lower",
        )
        yield Figure(
            name=f"{name} that a replica adds to the empty cluster",
            unit=unit,
            samples=[(whole_value - empty_value) / replicas],
            better="lower",
        )


def _all_servers(side: Side) -> Usage:
    time.sleep(CALM_S)
    return watch({"servers": side.server_pids()}, WATCHED_S)["servers"]


# --- all of them ----------------------------------------------------------------------------------


class Section(NamedTuple):
    measure: Callable[[Side], Iterator[Figure]]
    timeout_s: float
    """For one side, with the start of its cluster."""


SECTIONS = {
    "produce": Section(produce, 420.0),
    "consume": Section(consume, 420.0),
    "latency": Section(latency, 240.0),
    "failover": Section(failover, 420.0),
    "partitions": Section(partitions, 600.0),
}

"""`make bench`: this disk's own figures, then rayq's; a table, and .bench/results.json.

    python -m benchmarks.run [section ...]

No test depends on a figure. The exit code is 1 when a section could not be measured, not when it
missed a target or took long: each section does a fixed amount of work. The time-outs in the
sections are for calls that hang.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import ray
from rich.console import Console

import rayq
from benchmarks import machine, on_ray
from benchmarks.compaction import compaction
from benchmarks.groups import groups, groups_local
from benchmarks.queues import queues
from benchmarks.ray_data import ray_data_read
from benchmarks.reopen import reopen
from benchmarks.report import Row, print_all, wide_console
from benchmarks.spark import spark_read
from benchmarks.tiered_storage import tiered_storage
from benchmarks.transactions import transactions
from rayq.testing import LocalCluster

OUTPUT = Path(".bench")
LOCAL_STARTS = 6


def disk(directory: Path) -> list[Row]:
    """The time of a write and of a sync without rayq."""
    machine.write_and_sync_ms(directory, 64 * 1024, 20)
    return [
        Row(
            name="raw write + fdatasync of 64 KiB",
            unit="ms",
            samples=machine.write_and_sync_ms(directory, 64 * 1024, 200),
            better="lower",
        ),
        Row(
            name="raw write + fdatasync of 1 MiB",
            unit="ms",
            samples=machine.write_and_sync_ms(directory, 1024 * 1024, 60),
            better="lower",
        ),
    ]


def local_start(directory: Path) -> list[Row]:
    """The time from nothing to a topic that takes records, in this process."""
    samples = []
    for number in range(LOCAL_STARTS):
        started_s = time.perf_counter()
        with LocalCluster(brokers=3, data_dir=str(directory / f"local-{number}")) as cluster:
            cluster.create_topic("ready", partitions=1, replication_factor=3)
            samples.append(time.perf_counter() - started_s)
    return [
        Row(
            name="LocalCluster(brokers=3) and a topic ready",
            unit="s",
            samples=samples[1:],  # the first start pays for imports
            target=0.5,
            better="lower",
        )
    ]


def client_speed(directory: Path) -> list[Row]:
    """The client alone, against servers that answer at once (benchmarks/client_speed.py)."""
    del directory
    command = [sys.executable, "-m", "benchmarks.client_speed"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return [Row(**line) for line in lines]


ALONE: dict[str, Callable[[Path], list[Row]]] = {
    "disk": disk,
    "local-start": local_start,
    "client-speed": client_speed,
    "reopen": reopen,
    "compaction": compaction,
    "transactions": transactions,
    "groups-local": groups_local,
}
ON_RAY = {
    **on_ray.SECTIONS,
    "groups": groups,
    "queues": queues,
    "ray-data": ray_data_read,
    "tiered-storage": tiered_storage,
    "spark": spark_read,
}


class Bench:
    """Runs sections one after the other. Where one fails, its error is printed and the others go
    on."""

    def __init__(self, console: Console, chosen: list[str]) -> None:
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self._console = console
        self._chosen = chosen

    def wants(self, name: str) -> bool:
        return not self._chosen or name in self._chosen

    def run(self, name: str, measure: Callable[..., list[Row]], *arguments: object) -> None:
        if not self.wants(name):
            return
        started_s = time.monotonic()
        self._console.print(f"measuring {name} ...", end=" ")
        try:
            self.rows += measure(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is reported
            traceback.print_exc()
            self.failures.append(f"{name} could not be measured: {error}")
        self._console.print(f"{time.monotonic() - started_s:.0f} s")


def run_on_ray(bench: Bench, directory: Path) -> None:
    """Runs the sections that share one cluster on Ray."""
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    # Ray prints on stdout about each process that dies, and some sections kill processes.
    with (
        contextlib.redirect_stdout(io.StringIO()),
        rayq.start(str(directory / "ray"), brokers=3) as cluster,
    ):
        for name, measure in ON_RAY.items():
            bench.run(name, measure, cluster, directory)
        cluster.stop()
        ray.shutdown()


def main(chosen: list[str]) -> int:
    unknown = set(chosen) - ALONE.keys() - ON_RAY.keys()
    if unknown:
        known = ", ".join([*ALONE, *ON_RAY])
        print(f"No such section: {', '.join(unknown)}. Known: {known}")
        return 2
    console = wide_console()
    bench = Bench(console, chosen)
    OUTPUT.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=OUTPUT)).resolve()
    try:
        for name, measure_alone in ALONE.items():
            bench.run(name, measure_alone, directory)
        if any(bench.wants(name) for name in ON_RAY):
            try:
                run_on_ray(bench, directory)
            except Exception as error:  # noqa: BLE001 - what was measured before is told all the same
                traceback.print_exc()
                bench.failures.append(f"The cluster on Ray did not start or stop: {error}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print_all(console, OUTPUT / "results.json", bench.rows, machine.describe(), bench.failures)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

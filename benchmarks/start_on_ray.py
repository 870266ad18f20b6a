"""From nothing to the first record on this machine: Ray, three brokers, a topic of six partitions
with three replicas each, one record with acks="all". Beside it what Ray alone needs.

    python -m benchmarks.start_on_ray [--replicas-per-process N]

A line for each stage: its seconds, the seconds of CPU that all processes have used meanwhile, and
the number of Ray's worker processes after it. On a busy machine only the CPU says something.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

BROKERS = 3
PARTITIONS = 6
REPLICAS = 3
CREATE_TIMEOUT_S = 180.0
"""Not a budget: what takes so long hangs."""
ALL_PROCESSES = 7
"""A start needs at least so many worker processes of Ray: one for each broker, the controller, and
one for the replicas of each broker."""


class Stages:
    """Prints what each stage took."""

    def __init__(self) -> None:
        self._started_s = self._last_s = time.monotonic()
        self._cpu_s = 0.0

    def passed(self, what: str) -> None:
        now_s = time.monotonic()
        cpu_s, workers = _used()
        print(
            f"{now_s - self._started_s:6.1f} s  +{now_s - self._last_s:4.1f} s"
            f"  +{cpu_s - self._cpu_s:4.1f} s of CPU  {workers:2} workers  {what}",
            flush=True,
        )
        self._last_s, self._cpu_s = now_s, cpu_s


def _used() -> tuple[float, int]:
    """The seconds of CPU of this process and all below it, also of those that ended; and how many
    of them are workers of Ray."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    found: dict[int, tuple[int, float, bool]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        is_worker = command.startswith(b"ray::") and b"Agent" not in command
        cpu_s = sum(map(int, fields[11:15])) / ticks_per_s
        found[int(entry.name)] = (int(fields[1]), cpu_s, is_worker)
    ours = {os.getpid()}
    while more := {pid for pid, (parent, *_) in found.items() if parent in ours} - ours:
        ours |= more
    return sum(found[pid][1] for pid in ours), sum(found[pid][2] for pid in ours)


def ray_alone() -> None:
    """What any program pays that starts a Ray and as many actors."""
    stages = Stages()
    import ray

    class Idle:
        def answer(self) -> None:
            return None

    stages.passed("Ray is imported")
    _start_ray()
    stages.passed("Ray is up")
    actor: Any = ray.remote(Idle).options(num_cpus=0)
    first = actor.remote()
    ray.get(first.answer.remote())
    stages.passed("one actor answers")
    others = [actor.remote() for _ in range(ALL_PROCESSES - 1)]
    ray.get([one.answer.remote() for one in others])
    stages.passed(f"{ALL_PROCESSES} actors answer, the others started at once")


def with_rayq(config: dict[str, Any]) -> None:
    stages = Stages()
    import rayq

    start = rayq.start
    stages.passed("rayq is imported")
    _start_ray()
    stages.passed("Ray is imported and up")
    with tempfile.TemporaryDirectory() as directory:
        with start(directory, brokers=BROKERS, **config) as cluster:
            stages.passed(f"{BROKERS} brokers are registered")
            cluster.create_topic(
                "first",
                partitions=PARTITIONS,
                replication_factor=REPLICAS,
                timeout_s=CREATE_TIMEOUT_S,
            )
            stages.passed(f"a topic of {PARTITIONS} partitions x {REPLICAS} replicas, all in sync")
            with cluster.producer(acks="all") as producer:
                producer.send("first", b"hello").result(CREATE_TIMEOUT_S)
            stages.passed("a record is on three disks")
            cluster.stop()


def _start_ray() -> None:
    """As `rayq.start` does where there is none."""
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _run(what: Callable[[], None]) -> bool:
    """Runs it in a process of its own, in which nothing is imported yet."""
    process = multiprocessing.get_context("spawn").Process(target=what)
    process.start()
    process.join()
    return process.exitcode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Times a start from nothing on this machine.")
    parser.add_argument("--replicas-per-process", type=int)
    given = parser.parse_args().replicas_per_process
    config = {} if given is None else {"replicas_per_process": given}
    print(f"Ray alone (load {os.getloadavg()[0]:.1f})")
    if not _run(ray_alone):
        return 1
    print(f"rayq (load {os.getloadavg()[0]:.1f})")
    return 0 if _run(partial(with_rayq, config)) else 1


if __name__ == "__main__":
    sys.exit(main())

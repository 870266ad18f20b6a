"""What many partitions cost: three brokers on a local Ray, N partitions of three replicas each.

    python -m benchmarks.density 1000 [--replicas-per-process 100] [--json FILE]

Reports how long it takes until all replicas are in sync, what the processes use while nobody uses
the topic, and how long a stop and a start of all servers take. Each server is a real process. Ray
itself stays up: it is told as a group of its own. An empty cluster is watched first, so that what a
replica adds can be told from what the servers take without one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from ray._private import state

import rayq
from benchmarks import machine
from benchmarks.usage import Usage, watch
from proving.chaos.processes import with_descendants
from rayq.runtime.ray import cluster as ray_cluster
from rayq.runtime.ray import lookup as ray_lookup

BROKERS = 3
REPLICATION_FACTOR = 3
NAME = "density"
TOPIC = "many"
WATCHED_S = 20.0
CALM_S = 10.0
"""Between the last start of a process and the watching: what a start leaves behind is over."""
STEP_TIMEOUT_S = 600.0
POLL_S = 0.1
T = TypeVar("T")


class Density(msgspec.Struct, kw_only=True):
    """The result. A time is None where that step was not reached."""

    partitions: int
    replicas_per_process: int | None
    in_sync_s: float | None = None
    """From `create_topic` until all replicas of all partitions are in sync."""
    first_writes_s: float | None = None
    """From the first record to the acknowledgement of one record in each partition."""
    lost_processes: int | None = None
    """Replica processes that died, or were killed as silent, before the stop."""
    empty: dict[str, Usage] = {}
    idle: dict[str, Usage] = {}
    """By kind: "replicas", "brokers", "controller", "ray"."""
    stop_s: float | None = None
    start_s: float | None = None
    """Until `rayq.start` returns: all brokers are registered, and all replicas are in sync, or 30 s
    are over."""
    leading_again_s: float | None = None
    """From the begin of the stop until each partition has acknowledged another record."""
    in_sync_again_s: float | None = None
    """From the begin of the stop until all replicas are in sync."""
    lost_processes_again: int | None = None
    """Replica processes that died, or were killed as silent, after the second start."""

    @property
    def replicas(self) -> int:
        return self.partitions * REPLICATION_FACTOR

    def for_each_replica(self, figure: str) -> tuple[float, float]:
        """A field of `Usage` over all servers: the whole of it divided by the replicas, and what
        each replica has added to the empty cluster."""
        whole = _of_servers(self.idle, figure)
        return whole / self.replicas, (whole - _of_servers(self.empty, figure)) / self.replicas


def _of_servers(kinds: dict[str, Usage], figure: str) -> float:
    return sum(float(getattr(usage, figure)) for kind, usage in kinds.items() if kind != "ray")


def density(
    root: Path,
    partitions: int,
    replicas_per_process: int | None,
    *,
    watched_s: float = WATCHED_S,
    restart: bool = True,
    told: Callable[[str], None] = lambda _: None,
) -> Density:
    """Measures on the Ray that this process is connected to. `root` has to be empty. `told` is
    called with a line after each step."""
    result = Density(partitions=partitions, replicas_per_process=replicas_per_process)

    def start() -> rayq.Cluster:
        return rayq.start(
            str(root),
            brokers=BROKERS,
            name=NAME,
            replicas_per_process=replicas_per_process,
            max_replicas_per_broker=partitions,
        )

    with start() as cluster:
        time.sleep(CALM_S)
        result.empty = watch(server_pids(), watched_s)
        told(f"the empty cluster: {_described(result.empty)}")
        result.in_sync_s, _ = _timed(
            lambda: cluster.create_topic(
                TOPIC, partitions, REPLICATION_FACTOR, timeout_s=STEP_TIMEOUT_S
            )
        )
        told(f"{partitions} partitions are in sync after {result.in_sync_s:.2f} s")
        result.first_writes_s, _ = _timed(lambda: _write_to_all(cluster, partitions))
        told(f"each has taken its first record after {result.first_writes_s:.2f} s")
        time.sleep(CALM_S)
        result.idle = watch(server_pids(), watched_s)
        told(f"idle: {_described(result.idle)}")
        for figure in ("unique_mb", "cpu_percent"):
            whole, added = result.for_each_replica(figure)
            told(f"{figure} for each replica: {whole:.4f}, of which it adds {added:.4f}")
        result.lost_processes = _ended_replica_processes()
        told(f"replica processes that were lost so far: {result.lost_processes}")
        stopping_s = time.monotonic()
        result.stop_s, _ = _timed(cluster.stop)
    told(f"all servers are stopped after {result.stop_s:.2f} s")
    if not restart:
        return result
    ended = _ended_replica_processes()
    result.start_s, cluster = _timed(start)
    told(f"rayq.start has returned after {result.start_s:.2f} s")
    with cluster:
        _write_to_all(cluster, partitions)
        result.leading_again_s = time.monotonic() - stopping_s
        told(f"all partitions lead again {result.leading_again_s:.2f} s after the stop began")
        _wait_recovered()
        result.in_sync_again_s = time.monotonic() - stopping_s
        told(f"all replicas are in sync {result.in_sync_again_s:.2f} s after the stop began")
        result.lost_processes_again = _ended_replica_processes() - ended
        told(f"replica processes that were lost meanwhile: {result.lost_processes_again}")
        cluster.stop()
    return result


def _timed(step: Callable[[], T]) -> tuple[float, T]:
    started_s = time.monotonic()
    value = step()
    return time.monotonic() - started_s, value


def _write_to_all(cluster: rayq.Cluster, partitions: int) -> None:
    with cluster.producer(delivery_timeout_ms=int(STEP_TIMEOUT_S * 1000)) as producer:
        sent = [
            producer.send(TOPIC, b"one record", partition=number) for number in range(partitions)
        ]
        for future in sent:
            future.result(timeout=STEP_TIMEOUT_S)


def _wait_recovered() -> None:
    """Raises TimeoutError."""
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    broker: Any = ray.get_actor(
        ray_lookup.broker_name(NAME, 0), namespace=ray_lookup.NAMESPACE
    )
    while ray.get(broker.is_recovering.remote()):
        if time.monotonic() > deadline_s:
            behind = ray.get(broker.recovering_partitions.remote())
            raise TimeoutError(f"{len(behind)} partitions are not in sync: {min(behind.items())}.")
        time.sleep(POLL_S)


# --- processes ------------------------------------------------------------------------------------

KINDS = {
    "ray::BrokerActor": "brokers",
    "ray::ReplicaHostActor": "replicas",
    "ray::ControllerActor": "controller",
}
"""By how the title of the process begins. Whatever else this process has started is Ray's."""


def server_pids() -> dict[str, list[int]]:
    """The processes of the local Ray that this process has started, by kind."""
    pids: dict[str, list[int]] = {"ray": []}
    servers: set[int] = set()
    for pid in with_descendants(os.getpid())[1:]:
        if pid in servers:
            continue
        kind = _kind(pid)
        # What a server has started, such as its cleaner, is part of it.
        some = [pid] if kind == "ray" else with_descendants(pid)
        pids.setdefault(kind, []).extend(some)
        if kind != "ray":
            servers.update(some)
    return pids


def _kind(pid: int) -> str:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        title = ""
    return next((kind for start, kind in KINDS.items() if title.startswith(start)), "ray")


def _ended_replica_processes() -> int:
    listed: dict[str, dict[str, Any]] = state.actors()
    return sum(
        one["ActorClassName"] == "ReplicaHostActor" and one["State"] == "DEAD"
        for one in listed.values()
    )


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of this process's own. Ray gives the processes that it starts the niceness 15: the
    clients on the same cores, and the servers that rayq is compared with, run at 0."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


# --- the command ----------------------------------------------------------------------------------


def _described(kinds: dict[str, Usage]) -> str:
    return "".join(
        f"\n  {kind:10} {usage.processes:4} processes  {usage.unique_mb:7.1f} MB unique  "
        f"{usage.cpu_percent:7.2f} % of a core  {usage.descriptors:6} descriptors  "
        f"{usage.threads:5} threads"
        for kind, usage in sorted(kinds.items())
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("partitions", type=int)
    parser.add_argument("--replicas-per-process", type=int, help="by default as rayq does")
    parser.add_argument("--watched-s", type=float, default=WATCHED_S, help="for the idle CPU")
    parser.add_argument("--no-restart", action="store_true", help="leave out the second start")
    parser.add_argument("--json", type=Path, help="write the result there too")
    options = parser.parse_args()
    # A start that takes long logs a line for each partition that is not in sync.
    logging.getLogger(ray_cluster.__name__).setLevel(logging.ERROR)
    Path(".bench").mkdir(exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="density-", dir=".bench")).resolve()
    try:
        with local_ray():
            print(f"{machine.describe()}; load {os.getloadavg()[0]:.1f}", flush=True)
            result = density(
                root,
                options.partitions,
                options.replicas_per_process,
                watched_s=options.watched_s,
                restart=not options.no_restart,
                told=lambda line: print(line, flush=True),
            )
    finally:
        shutil.rmtree(root, ignore_errors=True)
    found = json.dumps(msgspec.to_builtins(result), indent=2)
    if options.json is None:
        print(found)
    else:
        options.json.write_text(found + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

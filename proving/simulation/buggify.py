"""Points at which a seed makes rare things common that are allowed all the same.

FoundationDB calls this buggify. A timer may fire late, a thread may take long, a connection may
break while an answer is under way, a read may end after one batch. All of that happens on real
machines, and seldom where it hurts. A seed of the scenario `swarm` draws few of the points
(`drawn`). Each is a knob of the simulated world, a field of the cluster's config, or a constant of
the code that is patched while the seed runs: so there is nothing of it in the code of production.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections.abc import Callable, Iterator
from typing import Any

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.loop import Call
from proving.simulation.owner import OWNER
from proving.simulation.patches import applied
from proving.simulation.process import ProcessThreads
from rayq.actors import coordinator_log
from rayq.actors.metadata import quorum
from rayq.actors.replica import follower, leader_followers, leader_reads, replica_host
from rayq.storage import cleaner, plans, recent_producers
from rayq.wire import accepted_connection

POINTS: dict[str, str] = {
    # Constants of the code
    "one-batch-reads": "each fetch, and each read of a coordinator's log, returns one batch",
    "one-record-writes": "coordinators write one decision at a time, voters get one record at once",
    "small-steps-of-compaction": "the cleaner reads batch by batch, and syncs after each",
    "one-snapshot": "a log keeps one snapshot of its producers instead of three, and takes one in "
    "memory after every second batch",
    "one-request-a-turn": "servers serve one request a turn, and open one replica at once",
    # Fields of the config
    "snapshots-at-once": "metadata is cut down after each record, each flush moves the checkpoint",
    "false-alarms": "sessions and the lag time are so short that healthy servers miss them",
    # Knobs of the world
    "late-timers": "timers of processes fire late",
    "late-threads": "a job waits long for its thread, or the loop hears late of the job's end",
    "stutters": "processes stand still for a moment, many times",
    "late-bytes": "one connection is late while others between the same hosts are not",
    "breaking-connections": "connections break just when bytes arrive: a request or an answer",
    "bytes-in-parts": "receivers get what arrives in small parts",
    "cold-reads": "no byte is in the page cache",
    "early-write-backs": "the kernel writes pages before it is asked to",
    "short-writes": "writes stop early",
}

POINTS_MAX = 4
ONE_BYTE = 1
"""Limit by which the first batch or record always goes, and no second one."""
CONSTANTS: dict[str, tuple[tuple[object, str, int], ...]] = {
    "one-batch-reads": (
        (follower, "BATCHES_AT_ONCE", 1),
        (leader_followers, "REPLICA_FETCH_BYTES_MAX", ONE_BYTE),
        (leader_reads, "CLIENT_FETCH_BYTES_MAX", ONE_BYTE),
        (coordinator_log, "READ_BYTES", ONE_BYTE),
    ),
    "one-record-writes": (
        (coordinator_log, "BATCH_BYTES", ONE_BYTE),
        (coordinator_log, "WRITES_MAX", 1),
        (quorum, "APPEND_BYTES_MAX", ONE_BYTE),
    ),
    "small-steps-of-compaction": (
        (cleaner, "STEP_BYTES", 256),
        (cleaner, "SYNC_BYTES", ONE_BYTE),
    ),
    "one-snapshot": (
        (plans, "SNAPSHOTS_KEPT", 1),
        (recent_producers, "STEP_BATCHES", 2),
    ),
    "one-request-a-turn": (
        (accepted_connection, "REQUESTS_PER_TURN", 1),
        (replica_host, "OPENED_AT_ONCE_MAX", 1),
        (replica_host, "ASSIGNED_AT_ONCE_MAX", 1),
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "snapshots-at-once": {"metadata_snapshot_records": 1, "flush_checkpoint_bytes": 1},
    "false-alarms": {
        "heartbeat_interval_ms": 200,
        "session_timeout_ms": 600,
        "replica_lag_time_max_ms": 400,
    },
}
LATE_SHARES = (0.003, 0.03)
LATE_S = (0.05, 0.5, 3.0)
"""Choices of a seed for the maximum lateness of a timer or a thread."""
STUTTERS_PER_S = (2.0, 20.0)
STUTTER_S = 0.2
LATE_BYTES_SHARE = 0.05
LATE_BYTES_S = 1.0
BREAK_SHARES = (0.0005, 0.005)
SHORT_WRITES = 0.1


def drawn(seed: int) -> frozenset[str]:
    """The points of a seed, by random numbers of their own: none in a fifth of the seeds."""
    rng = random.Random(f"{seed}/buggify")
    return frozenset(rng.sample(list(POINTS), rng.randint(0, POINTS_MAX)))


def options(points: frozenset[str]) -> dict[str, Any]:
    """Fields of the cluster's config."""
    return {
        name: value for point in sorted(points) for name, value in OPTIONS.get(point, {}).items()
    }


@contextlib.contextmanager
def patched(points: frozenset[str]) -> Iterator[None]:
    """The constants of the code, while a seed runs."""
    with applied(patch for point in sorted(points) for patch in CONSTANTS.get(point, ())):
        yield


class Disturbance:
    """The points that are knobs of the world. They end with `calm_down`, because a cluster has to
    come to rest in the end; what only costs time stays. Before and after the loss of a disk, which
    waits until all replicas are in sync, nothing is late and nothing stutters: where sessions are
    short, too, they would hardly ever be in sync all at once."""

    def __init__(self, cluster: SimulatedCluster, points: frozenset[str]) -> None:
        self._cluster = cluster
        self._points = points
        self._rng = rng = cluster.world.new_random("disturbance")
        self._late_share = rng.choice(LATE_SHARES)
        self._late_s = rng.choice(LATE_S)
        self._stutters_per_s = rng.choice(STUTTERS_PER_S)
        self._break_share = rng.choice(BREAK_SHARES)
        self._is_on = True

    def start(self) -> None:
        """Call it in the world, once the cluster runs."""
        cluster, points = self._cluster, self._points
        cluster.world.trace.note(f"BUGGIFY {', '.join(sorted(points)) or 'nothing'}")
        if points & {"late-timers", "late-threads"}:
            self._make_late()
        if "stutters" in points:
            self._stuttering = asyncio.create_task(self._stutter())
        network = cluster.world.network
        if "late-bytes" in points:
            network.disturb(
                late_share=LATE_BYTES_SHARE, late_times=LATE_BYTES_S / network.delay_s[1]
            )
        if "breaking-connections" in points:
            network.disturb(break_share=self._break_share)
        if "bytes-in-parts" in points:
            network.disturb(chunking=0.7)
        for host in cluster.hosts:
            if "cold-reads" in points:
                host.disk.cold_reads = 1.0
            if "early-write-backs" in points:
                host.disk.writebacks = 1.0
            if "short-writes" in points:
                host.disk.short_writes = SHORT_WRITES

    def calm_down(self) -> None:
        self._is_on = False
        self._cluster.world.network.disturb()

    def _make_late(self) -> None:
        """Makes some timers of processes late. A thread's job is such a timer, too. What belongs to
        the world (bytes that arrive, disks, the script) is never late by this."""
        loop, rng = self._cluster.world.loop, self._rng
        call_at = loop.call_at
        root = loop.root

        def call_late(
            when: float,
            callback: Callable[..., object],
            *args: Any,
            context: contextvars.Context | None = None,
        ) -> Call:
            owner = OWNER.get(root) if context is None else context.get(OWNER, root)
            is_on = self._is_on and not self._cluster.loses_a_disk
            if is_on and owner is not root and rng.random() < self._late_share:
                is_thread = isinstance(getattr(callback, "__self__", None), ProcessThreads)
                if ("late-threads" if is_thread else "late-timers") in self._points:
                    when += rng.random() * self._late_s
            return call_at(when, callback, *args, context=context)

        loop.call_at = call_late  # type: ignore[method-assign, assignment]

    async def _stutter(self) -> None:
        loop, rng = self._cluster.world.loop, self._rng
        hosts = [*self._cluster.hosts, self._cluster.controller_host]
        while self._is_on:
            await asyncio.sleep(rng.expovariate(self._stutters_per_s))
            processes = rng.choice(hosts).processes
            if processes and not self._cluster.loses_a_disk:
                loop.block(rng.choice(processes), STUTTER_S * rng.random() ** 2)

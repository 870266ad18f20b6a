"""The faults of a simulated cluster: each begins, lasts, and is undone.

A fault is a coroutine function of `Faults`: it chooses a victim, notes what it does, waits, and
undoes it. They stand in `faults_*.py`, by subject; `faults_ordinary.ORDINARY` has those that may
meet each other at any moment. Faults that take a disk away for good happen alone, to one broker at
a time: rayq promises to keep records while fewer than min_insync_replicas disks are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import Fault as DiskFault
from proving.simulation.link import NetworkHost
from proving.simulation.process import Process
from proving.simulation.server_view import (
    failed_count,
    replica_log_of,
    replicas_of,
)
from proving.simulation.world import Host

CALM_LIMIT_S = 30.0
AFTERMATH_SHARE = 0.3
MOMENT_WAIT_S = 1.0

Injection = Callable[["Faults"], Coroutine[Any, Any, None]]


class Faults:
    """Injects faults into a cluster. `count` is the number of faults, `log` describes each. What
    the faults themselves need is below `for the faults`."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        clients: list[Host],
        acknowledged: Callable[[], int],
        *,
        topics: Sequence[str],
        kinds: Sequence[Injection],
        aftermaths: Sequence[Injection],
        loss_of_a_disk: Injection | None,
    ) -> None:
        """`acknowledged()` is the number of records that clients know to be written. Disk errors
        hit one of the `topics` at a time. Faults are of `kinds`. Those of `aftermaths` come just
        when the victim of another fault is coming back. `loss_of_a_disk` comes alone, and in half
        of the runs."""
        self.log: list[str] = []
        self.topics = topics
        self._kinds = kinds
        self._aftermaths = aftermaths
        self._loss_of_a_disk = loss_of_a_disk
        self.cluster = cluster
        self.clients = clients
        self._acknowledged = acknowledged
        self.world = cluster.world
        self.rng = cluster.world.new_random("faults")
        self.disk_faults: list[DiskFault] = []

    @property
    def count(self) -> int:
        return len(self.log)

    async def inject(self, until_s: float) -> None:
        """Injects faults of all kinds, several at a time. All end before the world has this age."""
        running: set[asyncio.Task[None]] = set()
        intensity_s = self.rng.choice((1.5, 3.0, 4.0))
        loses_disk_s = self.world.now_s + self.rng.uniform(5, max(6, until_s - 25))
        loses_disk = self.rng.random() < 0.5
        while self.world.now_s < until_s:
            await asyncio.sleep(self.rng.expovariate(1 / intensity_s))
            lose_a_disk = self._loss_of_a_disk if loses_disk else None
            if lose_a_disk is not None and self.world.now_s > loses_disk_s:
                loses_disk = False
                if running:
                    await asyncio.wait(running)
                await lose_a_disk(self)
                continue
            fault = self.rng.choice(self._kinds)
            task = asyncio.create_task(self._with_aftermath(fault))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running)

    async def _with_aftermath(self, fault: Injection) -> None:
        """A fault, and sometimes another fault just when its victim comes back."""
        await fault(self)
        if self.rng.random() < AFTERMATH_SHARE:
            await asyncio.sleep(self.rng.choice((0.02, 0.2, 0.6)) * self.rng.random())
            await self.rng.choice(self._aftermaths)(self)

    async def heal(self) -> None:
        """Undoes all faults of network, disks, clocks and pauses, and starts all dead processes."""
        self.note("everything heals")
        self.world.network.heal()
        self.cluster.objects.heal()
        for fault in self.disk_faults:
            fault.heal()
        for host in self.world.hosts:
            host.disk.capacity_bytes = None
            host.disk.short_writes = 0.0
            host.slowness = 1.0
            for process in list(host.processes):
                process.resume()
        for number in range(len(self.cluster.hosts)):
            if self.has_failed_replicas(number):
                await self.crash_host(number)
            self.ensure_broker(number)
        self.ensure_controller()

    async def calm(self) -> None:
        """Heals everything and waits until every replica is in sync."""
        await self.heal()
        await self.cluster.wait_until(
            self.cluster.is_whole, "all replicas in sync", limit_s=CALM_LIMIT_S
        )

    # --- for the faults ---------------------------------------------------------------------------

    def note(self, what: str) -> None:
        self.world.trace.note(f"FAULT {what}")

    def begin(self, what: str) -> None:
        self.log.append(f"{self.world.now_s:.3f} {what}")
        self.note(what)

    async def last(self, least_s: float = 0.1, most_s: float = 8.0) -> None:
        await asyncio.sleep(least_s + (most_s - least_s) * self.rng.random() ** 2)

    async def moment(self) -> None:
        """Returns now, or just after the next acknowledgement: records that should be on a disk by
        then, and are not, are lost in the fault that follows."""
        if self.rng.random() < 0.4:
            return
        before, until_s = self._acknowledged(), self.world.now_s + MOMENT_WAIT_S
        while self._acknowledged() == before and self.world.now_s < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)

    def any_broker(self) -> int:
        return self.rng.randrange(len(self.cluster.hosts))

    def servers(self) -> list[Process]:
        hosts = [*self.cluster.hosts, self.cluster.controller_host]
        return [process for host in hosts for process in host.processes]

    def hosts(self) -> list[NetworkHost]:
        return [*self.cluster.hosts, self.cluster.controller_host, *self.clients]

    def ensure_broker(self, number: int) -> None:
        process = self.cluster.broker_processes.get(number)
        if process is None or not process.alive:
            self.cluster.start_broker(number)

    def ensure_controller(self) -> None:
        process = self.cluster.controller_process
        if process is None or not process.alive:
            self.cluster.start_controller()

    def has_failed_replicas(self, number: int) -> bool:
        """Returns whether a disk error ended a replica: its broker process does not start it again.
        """
        broker = self.cluster.broker_of.get(self.cluster.broker_processes[number])
        return (broker is not None and failed_count(broker) > 0) or any(
            replica_log_of(replica).failure is not None
            for process in self.cluster.replica_processes(number)
            if (host := self.cluster.replica_hosts.get(process)) is not None
            for replica in replicas_of(host).values()
        )

    async def crash_host(self, number: int) -> None:
        for process in list(self.cluster.hosts[number].processes):
            process.kill()

    async def cut(
        self, side: list[NetworkHost], other: list[NetworkHost], both_ways: bool
    ) -> None:
        self.world.network.cut(side, other, both_ways=both_ways)
        await self.last(0.3, 10.0)
        self.world.network.heal(side, other)

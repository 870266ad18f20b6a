"""The faults of a simulated cluster: each begins, lasts, and is undone.

A fault is a coroutine of `Faults`. `ORDINARY` has those that may meet each other at any moment.
Faults that take a disk away for good happen alone, to one broker at a time: rayq promises to keep
records while fewer than min_insync_replicas disks are lost.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import Fault as DiskFault
from proving.simulation.link import NetworkHost
from proving.simulation.process import Process
from proving.simulation.server_view import (
    coordinator_of,
    failed_count,
    replica_log_of,
    replicas_of,
    role_of,
)
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.replica.leader import Leader
from rayq.errors import RayqError
from rayq.wire.authentication import Identity
from rayq.wire.pool import ConnectionPool

CLOCK_JUMPS_MS = (-1_200_000, -60_000, -1_000, 1_000, 60_000, 1_200_000)
CALM_LIMIT_S = 30.0
AFTERMATH_SHARE = 0.3
MOMENT_WAIT_S = 1.0


class Faults:
    """Injects faults into a cluster. `count` is the number of faults, `log` describes each."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        clients: list[Host],
        acknowledged: Callable[[], int],
        *,
        topics: Sequence[str],
        kinds: Sequence[Injection],
        more: Sequence[Injection],
        lose_disks: bool,
    ) -> None:
        """`acknowledged()` is the number of records that clients know to be written. Disk errors
        hit one of the `topics` at a time. Faults are of `kinds` and `more`. Those of `more` also
        come just when the victim of another fault is coming back. `lose_disks`: a broker may lose
        its disk, once all replicas are in sync."""
        self.log: list[str] = []
        self._topics = topics
        self._kinds = [*kinds, *more]
        self._lose_disks = lose_disks
        self._aftermaths = [*AFTERMATHS, *more]
        self._cluster = cluster
        self._clients = clients
        self._acknowledged = acknowledged
        self._world = cluster.world
        self._rng = cluster.world.new_random("faults")
        self._disk_faults: list[DiskFault] = []

    @property
    def count(self) -> int:
        return len(self.log)

    async def inject(self, until_s: float) -> None:
        """Injects faults of all kinds, several at a time. All end before the world has this age."""
        running: set[asyncio.Task[None]] = set()
        intensity_s = self._rng.choice((1.5, 3.0, 4.0))
        loses_disk_s = self._world.now_s + self._rng.uniform(5, max(6, until_s - 25))
        loses_disk = self._rng.random() < 0.5 and self._lose_disks
        while self._world.now_s < until_s:
            await asyncio.sleep(self._rng.expovariate(1 / intensity_s))
            if loses_disk and self._world.now_s > loses_disk_s:
                loses_disk = False
                if running:
                    await asyncio.wait(running)
                await self._lose_a_disk()
                continue
            fault = self._rng.choice(self._kinds)
            task = asyncio.create_task(self._with_aftermath(fault))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running)

    async def _with_aftermath(self, fault: Injection) -> None:
        """A fault, and sometimes another fault just when its victim comes back."""
        await fault(self)
        if self._rng.random() < AFTERMATH_SHARE:
            await asyncio.sleep(self._rng.choice((0.02, 0.2, 0.6)) * self._rng.random())
            await self._rng.choice(self._aftermaths)(self)

    async def heal(self) -> None:
        """Undoes all faults of network, disks, clocks and pauses, and starts all dead processes."""
        self._note("everything heals")
        self._world.network.heal()
        self._cluster.objects.heal()
        for fault in self._disk_faults:
            fault.heal()
        for host in self._world.hosts:
            host.disk.capacity_bytes = None
            host.disk.short_writes = 0.0
            for process in list(host.processes):
                process.resume()
        for number in range(len(self._cluster.hosts)):
            if self._has_failed_replicas(number):
                await self._crash_host(number)
            self._ensure_broker(number)
        self._ensure_controller()

    # --- helpers ----------------------------------------------------------------------------------

    def _note(self, what: str) -> None:
        self._world.trace.note(f"FAULT {what}")

    def _begin(self, what: str) -> None:
        self.log.append(f"{self._world.now_s:.3f} {what}")
        self._note(what)

    async def _last(self, least_s: float = 0.1, most_s: float = 8.0) -> None:
        await asyncio.sleep(least_s + (most_s - least_s) * self._rng.random() ** 2)

    async def _moment(self) -> None:
        """Returns now, or just after the next acknowledgement: records that should be on a disk by
        then, and are not, are lost in the fault that follows."""
        if self._rng.random() < 0.4:
            return
        before, until_s = self._acknowledged(), self._world.now_s + MOMENT_WAIT_S
        while self._acknowledged() == before and self._world.now_s < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)

    def _any_broker(self) -> int:
        return self._rng.randrange(len(self._cluster.hosts))

    def _servers(self) -> list[Process]:
        hosts = [*self._cluster.hosts, self._cluster.controller_host]
        return [process for host in hosts for process in host.processes]

    def _ensure_broker(self, number: int) -> None:
        process = self._cluster.broker_processes.get(number)
        if process is None or not process.alive:
            self._cluster.start_broker(number)

    def _ensure_controller(self) -> None:
        process = self._cluster.controller_process
        if process is None or not process.alive:
            self._cluster.start_controller()

    def _has_failed_replicas(self, number: int) -> bool:
        """Returns whether a disk error ended a replica: its broker process does not start it again.
        """
        broker = self._cluster.broker_of.get(self._cluster.broker_processes[number])
        return (broker is not None and failed_count(broker) > 0) or any(
            replica_log_of(replica).failure is not None
            for process in self._cluster.replica_processes(number)
            if (host := self._cluster.replica_hosts.get(process)) is not None
            for replica in replicas_of(host).values()
        )

    async def _crash_host(self, number: int) -> None:
        for process in list(self._cluster.hosts[number].processes):
            process.kill()

    # --- processes die ----------------------------------------------------------------------------

    async def kill_a_replica(self) -> None:
        number = self._any_broker()
        processes = self._cluster.replica_processes(number)
        if processes:
            victim = self._rng.choice(processes)
            self._begin(f"kill {victim.name}")
            victim.kill()

    async def kill_a_leader(self) -> None:
        await self._moment()
        leaders = [
            process
            for number in range(len(self._cluster.hosts))
            for process in self._cluster.replica_processes(number)
            if (host := self._cluster.replica_hosts.get(process)) is not None
            and any(isinstance(role_of(replica), Leader) for replica in replicas_of(host).values())
        ]
        if leaders:
            victim = self._rng.choice(leaders)
            self._begin(f"kill the leader {victim.name}")
            victim.kill()

    async def kill_a_broker(self) -> None:
        """Kills only the broker's process. Its replicas run on."""
        number = self._any_broker()
        self._begin(f"kill broker {number}'s process")
        self._cluster.kill_broker(number)
        await self._last()
        self._ensure_broker(number)

    async def kill_a_host(self) -> None:
        """Kills all processes of a host at once. The page cache survives."""
        await self._moment()
        number = self._any_broker()
        self._begin(f"kill all of broker {number}")
        await self._crash_host(number)
        await self._last()
        self._ensure_broker(number)

    async def power_loss(self) -> None:
        await self._moment()
        number = self._any_broker()
        self._begin(f"power loss of broker {number}")
        self._cluster.hosts[number].power_loss()
        await self._last()
        self._ensure_broker(number)

    async def power_loss_of_all(self) -> None:
        await self._moment()
        self._begin("power loss of all")
        hosts = [*self._cluster.hosts, self._cluster.controller_host]
        self._rng.shuffle(hosts)
        for host in hosts:
            host.power_loss()
            if self._rng.random() < 0.3:
                await asyncio.sleep(self._rng.uniform(0, 0.05))
        await self._last(0.1, 3.0)
        numbers = list(range(len(self._cluster.hosts)))
        self._rng.shuffle(numbers)
        for number in numbers:
            self._ensure_broker(number)
            if self._rng.random() < 0.6:
                await asyncio.sleep(self._rng.uniform(0, 4))
        self._ensure_controller()

    async def crash_at_a_disk_operation(self) -> None:
        """Ends a process, or its whole host, in the middle of one of its next writes or syncs."""
        await self._crash_at_an_operation(only_names=False)

    async def crash_at_a_change_of_names(self) -> None:
        """The same at operations where names and lengths of files change: snapshots, checkpoints,
        new and removed segments, swaps, truncations."""
        await self._crash_at_an_operation(only_names=True)

    async def _crash_at_an_operation(self, *, only_names: bool) -> None:
        processes = self._servers()
        if not processes:
            return
        victim = self._rng.choice(processes)
        power_loss = self._rng.random() < 0.5
        how = "power loss" if power_loss else "crash"
        where = "a change of names" if only_names else "a disk operation"
        self._begin(f"{how} of {victim.name} in {where} to come")
        victim.kill_at_disk_operation(
            self._rng.randint(1, 6 if only_names else 30),
            power_loss=power_loss,
            only_names=only_names,
        )
        await self._last(1.0, 8.0)
        victim.spare_disk_operations()
        for number in range(len(self._cluster.hosts)):
            self._ensure_broker(number)
        self._ensure_controller()

    async def kill_the_controller(self) -> None:
        """Ends the controller, perhaps in the middle of a write of metadata."""
        self._begin("kill the controller")
        await asyncio.sleep(self._rng.choice((0.0, self._rng.uniform(0, 0.5))))
        cluster = self._cluster
        hosting = [
            number
            for number, broker in cluster.brokers.items()
            if cluster.broker_processes[number].alive
            and broker.controller_host.controller is not None
        ]
        if cluster.controller_process is not None and cluster.controller_process.alive:
            cluster.controller_process.kill()
        for number in hosting:
            cluster.kill_broker(number)
        await self._last()
        for number in range(len(cluster.hosts)):
            self._ensure_broker(number)
        if self._rng.random() < 0.5:
            await self._last()
        self._ensure_controller()

    async def stop_a_broker(self) -> None:
        """Stops a broker in a controlled way. It comes back with exactly the logs that it
        reported."""
        number = self._any_broker()
        process = self._cluster.broker_processes[number]
        broker = self._cluster.brokers.get(number)
        if not process.alive or broker is None or self._cluster.broker_of.get(process) is None:
            return
        self._begin(f"controlled stop of broker {number}")
        operator = self._cluster.controller_host.process("operator")

        async def ask() -> None:
            identity = Identity(
                role="server",
                key=self._cluster.secret,
                cluster_id=self._cluster.cluster_id,
                broker=None,
            )
            pool = ConnectionPool(operator.environment, identity, self._cluster.config)
            try:
                await pool.request(*broker.endpoint, messages.StopBroker(), timeout_s=20.0)
            except RayqError as error:
                self._note(f"broker {number} did not stop: {error}")
            pool.close()

        await asyncio.wait(
            [operator.start(ask()), operator.exited], return_when=asyncio.FIRST_COMPLETED
        )
        operator.kill()
        await self._last(0.3, 5.0)
        await self._crash_host(number)
        self._ensure_broker(number)

    # --- coordinators of groups -------------------------------------------------------------------

    def _coordinators(self) -> list[tuple[int, Process]]:
        """The broker and the process of each replica that coordinates groups."""
        return [
            (number, process)
            for number in range(len(self._cluster.hosts))
            for process in self._cluster.replica_processes(number)
            if (host := self._cluster.replica_hosts.get(process)) is not None
            and any(coordinator_of(replica) is not None for replica in replicas_of(host).values())
        ]

    async def kill_a_coordinator(self) -> None:
        await self._moment()
        coordinators = self._coordinators()
        if coordinators:
            _, victim = self._rng.choice(coordinators)
            self._begin(f"kill the coordinator {victim.name}")
            victim.kill()

    async def kill_the_host_of_a_coordinator(self) -> None:
        coordinators = self._coordinators()
        if not coordinators:
            return
        number, _ = self._rng.choice(coordinators)
        if self._rng.random() < 0.5:
            self._begin(f"kill all of broker {number}, which coordinates groups")
            await self._crash_host(number)
        else:
            self._begin(f"power loss of broker {number}, which coordinates groups")
            self._cluster.hosts[number].power_loss()
        await self._last()
        self._ensure_broker(number)

    async def pause_a_coordinator(self) -> None:
        coordinators = self._coordinators()
        if coordinators:
            _, victim = self._rng.choice(coordinators)
            self._begin(f"pause the coordinator {victim.name}")
            victim.pause()
            await self._last(0.5, 9.0)
            victim.resume()

    async def isolate_a_coordinator(self) -> None:
        """Cuts a coordinator off from the servers, while members still reach it, or from the
        clients."""
        coordinators = self._coordinators()
        if not coordinators:
            return
        number, _ = self._rng.choice(coordinators)
        host = self._cluster.hosts[number]
        servers = [*self._cluster.hosts, self._cluster.controller_host]
        others: list[NetworkHost] = list(self._clients)
        if self._rng.random() < 0.5:
            others = [server for server in servers if server is not host]
        self._begin(f"cut broker {number}, which coordinates groups, off from {len(others)} hosts")
        await self._cut([host], others, self._rng.random() < 0.7)

    # --- pauses -----------------------------------------------------------------------------------

    async def pause_a_process(self) -> None:
        processes = self._servers()
        if processes:
            victim = self._rng.choice(processes)
            self._begin(f"pause {victim.name}")
            victim.pause()
            await self._last(0.5, 9.0)
            victim.resume()

    async def pause_a_host(self) -> None:
        host = self._rng.choice([*self._cluster.hosts, self._cluster.controller_host])
        self._begin(f"pause all of {host.name}")
        victims = list(host.processes)
        for victim in victims:
            victim.pause()
        await self._last(0.5, 9.0)
        for victim in victims:
            victim.resume()

    async def pause_replicas_while_their_broker_restarts(self) -> None:
        """The new broker process finds directories that are held by paused processes."""
        number = self._any_broker()
        self._begin(f"pause broker {number}'s replicas, and restart the broker")
        victims = self._cluster.replica_processes(number)
        for victim in victims:
            victim.pause()
        self._cluster.kill_broker(number)
        await self._last(0.1, 1.0)
        self._ensure_broker(number)
        await self._last(0.5, 8.0)
        for victim in victims:
            victim.resume()

    async def pause_at_a_disk_operation(self) -> None:
        """Pauses a process just after one of its next writes or syncs: the change is on disk, and
        the process has neither heard of that nor told any other process."""
        processes = self._servers()
        if processes:
            victim = self._rng.choice(processes)
            self._begin(f"pause {victim.name} in a disk operation to come")
            victim.pause_at_disk_operation(self._rng.randint(1, 30))
            await self._last(1.0, 12.0)
            victim.resume()

    # --- the network ------------------------------------------------------------------------------

    def _hosts(self) -> list[NetworkHost]:
        return [*self._cluster.hosts, self._cluster.controller_host, *self._clients]

    async def isolate_a_broker(self) -> None:
        """Cuts a host off from the other servers, perhaps also from clients."""
        number = self._any_broker()
        host = self._cluster.hosts[number]
        others: list[NetworkHost] = [
            other
            for other in [*self._cluster.hosts, self._cluster.controller_host]
            if other is not host
        ]
        if self._rng.random() < 0.5:
            others += self._clients
        both_ways = self._rng.random() < 0.7
        way = "both ways" if both_ways else "one way"
        self._begin(f"cut broker {number} off from {len(others)} hosts, {way}")
        await self._cut([host], others, both_ways)

    async def leave_a_broker_behind(self) -> None:
        """Cuts a host off from the other servers for so long that logs have moved on when it is
        back."""
        host = self._rng.choice(self._cluster.hosts)
        servers = [*self._cluster.hosts, self._cluster.controller_host]
        self._begin(f"leave {host.name} behind")
        self._world.network.cut([host], [server for server in servers if server is not host])
        await asyncio.sleep(self._rng.uniform(8.0, 20.0))
        self._world.network.heal([host], servers)

    async def split(self) -> None:
        """Cuts any set of hosts off from any other set."""
        hosts = self._hosts()
        self._rng.shuffle(hosts)
        size = self._rng.randint(1, len(hosts) - 1)
        side, other = hosts[:size], hosts[size:]
        both_ways = self._rng.random() < 0.8
        self._begin(f"split {', '.join(host.name for host in side)} from the rest")
        await self._cut(side, other, both_ways)

    async def _cut(
        self, side: list[NetworkHost], other: list[NetworkHost], both_ways: bool
    ) -> None:
        self._world.network.cut(side, other, both_ways=both_ways)
        await self._last(0.3, 10.0)
        self._world.network.heal(side, other)

    async def slow_links(self) -> None:
        pair = self._rng.sample(self._hosts(), 2)
        self._begin(f"slow links of {pair[0].name} and {pair[1].name}")
        delay_s = self._rng.choice(((0.01, 0.2), (0.2, 1.0)))
        self._world.network.slow(pair, self._hosts(), delay_s=delay_s)
        await self._last(0.5, 8.0)
        self._world.network.heal(pair, self._hosts())

    async def reset_connections(self) -> None:
        hosts = self._hosts()
        chosen = self._rng.sample(hosts, self._rng.randint(1, len(hosts)))
        self._begin(f"reset connections of {len(chosen)} hosts")
        self._world.network.reset(chosen, hosts)

    # --- clocks and disks -------------------------------------------------------------------------

    async def jump_a_clock(self) -> None:
        host = self._rng.choice(self._cluster.hosts)
        jump_ms = self._rng.choice(CLOCK_JUMPS_MS)
        self._begin(f"the clock of {host.name} jumps by {jump_ms} ms")
        host.jump_clock(jump_ms)
        await self._last()
        host.jump_clock(-jump_ms)

    async def disk_errors(self) -> None:
        """Gives one broker's partitions EIO: such a replica stops, and is started again later."""
        await self._fail_disk(self._rng.choice(("write", "read", "rename")))

    async def failed_syncs(self) -> None:
        """Like `disk_errors`. Afterwards the page cache shows bytes that the disk does not hold."""
        await self._fail_disk("sync")

    async def _fail_disk(self, operation: str) -> None:
        number = self._any_broker()
        host = self._cluster.hosts[number]
        times = self._rng.choice((1, 1, 3, None))
        topic = f"/{self._rng.choice(self._topics)}-"
        self._begin(f"disk errors of broker {number}: {operation} below {topic}")
        fault = host.disk.fail(operation, path_part=topic, error=errno.EIO, times=times)
        self._disk_faults.append(fault)
        await self._last(0.5, 6.0)
        fault.heal()
        if self._has_failed_replicas(number):
            await self._crash_host(number)
            await asyncio.sleep(self._rng.uniform(0, 1))
            self._ensure_broker(number)

    async def disk_full(self) -> None:
        number = self._any_broker()
        disk = self._cluster.hosts[number].disk
        self._begin(f"the disk of broker {number} is full")
        fault = disk.fail("write", path_part=f"/{self._topics[0]}-", error=errno.ENOSPC, times=20)
        self._disk_faults.append(fault)
        if self._rng.random() < 0.5:
            # Not all writes fail: the metadata still has its reserve.
            fault.heal()
            disk.capacity_bytes = (1 << 40) - disk.free_bytes() + (32 << 20)
        disk.short_writes = 0.2
        await self._last(0.5, 12.0)
        fault.heal()
        disk.capacity_bytes, disk.short_writes = None, 0.0

    async def disk_stall(self) -> None:
        number = self._any_broker()
        seconds = self._rng.uniform(0.5, 6.0)
        self._begin(f"the disk of broker {number} stalls for {seconds:.1f} s")
        self._cluster.hosts[number].disk.stall(seconds)
        await asyncio.sleep(seconds)

    # --- disks that are gone ----------------------------------------------------------------------

    async def calm(self) -> None:
        """Heals everything and waits until every replica is in sync."""
        await self.heal()
        await self._cluster.wait_until(
            self._cluster.is_whole, "all replicas in sync", limit_s=CALM_LIMIT_S
        )

    async def _lose_a_disk(self) -> None:
        """No other fault may meet this one: where a partition has two replicas, and the other one
        restarts now, it waits for the disk that is gone (rule 2)."""
        self._cluster.loses_a_disk = True
        await self.calm()
        number = self._any_broker()
        if self._rng.random() < 0.5:
            await self._return_with_an_empty_disk(number)
        else:
            await self._return_with_an_old_copy(number)
        await self.calm()
        self._cluster.loses_a_disk = False

    async def _return_with_an_empty_disk(self, number: int) -> None:
        """Starts the victim again, sometimes before any server has noticed that it was gone."""
        self._begin(f"broker {number} loses its disk")
        self._cluster.hosts[number].power_loss()
        await self._last(*self._rng.choice(((0.05, 1.0), (0.1, 8.0))))
        self._cluster.format_empty_disk(number)
        self._ensure_broker(number)

    async def _return_with_an_old_copy(self, number: int) -> None:
        """Gives a broker its disk as it was before its last start, as a restored backup does."""
        host = self._cluster.hosts[number]
        self._begin(f"broker {number} returns with an old copy of its disk")
        host.power_loss()
        copy = host.disk.copy(f"{host.name}.copy")
        await self._last(0.1, 2.0)
        self._ensure_broker(number)
        await self.calm()
        await self._last(0.5, 6.0)
        await self.calm()
        host.power_loss()
        host.swap_disk(copy)
        await self._last(0.1, 3.0)
        self._ensure_broker(number)


Injection = Callable[[Faults], Coroutine[Any, Any, None]]

AFTERMATHS: list[Injection] = [
    Faults.kill_a_leader,
    Faults.kill_a_leader,
    Faults.power_loss,
    Faults.kill_the_controller,
]

WITH_GROUPS: list[Injection] = [
    Faults.kill_a_coordinator,
    Faults.kill_a_coordinator,
    Faults.kill_the_host_of_a_coordinator,
    Faults.pause_a_coordinator,
    Faults.isolate_a_coordinator,
]
"""The faults beside the ordinary ones, where there are groups."""

BETWEEN_STEPS: list[Injection] = [
    Faults.pause_at_a_disk_operation,
    Faults.crash_at_a_change_of_names,
    Faults.leave_a_broker_behind,
]
"""The faults beside the ordinary ones, where few kinds of faults meet in a run."""

ORDINARY: list[Injection] = [
    Faults.kill_a_replica,
    Faults.kill_a_leader,
    Faults.kill_a_broker,
    Faults.kill_a_host,
    Faults.power_loss,
    Faults.power_loss,
    Faults.power_loss_of_all,
    Faults.power_loss_of_all,
    Faults.crash_at_a_disk_operation,
    Faults.crash_at_a_disk_operation,
    Faults.kill_the_controller,
    Faults.stop_a_broker,
    Faults.pause_a_process,
    Faults.pause_a_process,
    Faults.pause_a_host,
    Faults.pause_replicas_while_their_broker_restarts,
    Faults.isolate_a_broker,
    Faults.split,
    Faults.slow_links,
    Faults.reset_connections,
    Faults.jump_a_clock,
    Faults.disk_errors,
    Faults.failed_syncs,
    Faults.disk_full,
    Faults.disk_stall,
]

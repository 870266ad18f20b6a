"""The faults of coordinators of groups and transactions."""

from __future__ import annotations

from proving.simulation.faults import Faults, Injection
from proving.simulation.link import NetworkHost
from proving.simulation.process import Process
from proving.simulation.server_view import coordinator_of, replicas_of


def _coordinators(faults: Faults) -> list[tuple[int, Process]]:
    """The broker and the process of each replica that coordinates groups."""
    return [
        (number, process)
        for number in range(len(faults.cluster.hosts))
        for process in faults.cluster.replica_processes(number)
        if (host := faults.cluster.replica_hosts.get(process)) is not None
        and any(coordinator_of(replica) is not None for replica in replicas_of(host).values())
    ]


async def kill_a_coordinator(faults: Faults) -> None:
    await faults.moment()
    coordinators = _coordinators(faults)
    if coordinators:
        _, victim = faults.rng.choice(coordinators)
        faults.begin(f"kill the coordinator {victim.name}")
        victim.kill()


async def kill_the_host_of_a_coordinator(faults: Faults) -> None:
    coordinators = _coordinators(faults)
    if not coordinators:
        return
    number, _ = faults.rng.choice(coordinators)
    if faults.rng.random() < 0.5:
        faults.begin(f"kill all of broker {number}, which coordinates groups")
        await faults.crash_host(number)
    else:
        faults.begin(f"power loss of broker {number}, which coordinates groups")
        faults.cluster.hosts[number].power_loss()
    await faults.last()
    faults.ensure_broker(number)


async def pause_a_coordinator(faults: Faults) -> None:
    coordinators = _coordinators(faults)
    if coordinators:
        _, victim = faults.rng.choice(coordinators)
        faults.begin(f"pause the coordinator {victim.name}")
        victim.pause()
        await faults.last(0.5, 9.0)
        victim.resume()


async def isolate_a_coordinator(faults: Faults) -> None:
    """Cuts a coordinator off from the servers, while members still reach it, or from the
    clients."""
    coordinators = _coordinators(faults)
    if not coordinators:
        return
    number, _ = faults.rng.choice(coordinators)
    host = faults.cluster.hosts[number]
    servers = [*faults.cluster.hosts, faults.cluster.controller_host]
    others: list[NetworkHost] = list(faults.clients)
    if faults.rng.random() < 0.5:
        others = [server for server in servers if server is not host]
    faults.begin(f"cut broker {number}, which coordinates groups, off from {len(others)} hosts")
    await faults.cut([host], others, faults.rng.random() < 0.7)


WITH_GROUPS: list[Injection] = [
    kill_a_coordinator,
    kill_a_coordinator,
    kill_the_host_of_a_coordinator,
    pause_a_coordinator,
    isolate_a_coordinator,
]
"""The faults beside the ordinary ones, where there are groups."""

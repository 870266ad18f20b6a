"""The faults of the metadata log: controllers that are cut off, and disks that fail its writes.

They are aimed: most begin while a change is written and not committed.
"""

from __future__ import annotations

import asyncio
import errno

from proving.simulation.faults import Faults, Injection
from proving.simulation.faults_aimed import found_soon
from proving.simulation.faults_disks import (
    disk_stall,
)
from proving.simulation.faults_network import (
    isolate_a_broker,
    leave_a_broker_behind,
    reset_connections,
    slow_links,
    split,
)
from proving.simulation.faults_processes import (
    crash_at_a_change_of_names,
    crash_at_a_disk_operation,
    kill_a_broker,
    kill_a_host,
    kill_the_controller,
    pause_a_host,
    pause_a_process,
    power_loss,
    power_loss_of_all,
    stop_a_broker,
)
from proving.simulation.link import NetworkHost
from proving.simulation.process import ProcessHost
from proving.simulation.server_view import quorum_of
from rayq.actors.controller.controller import Controller

TAIL = 4
"""The number of records that make a tail."""
PATIENCE_S = 2.0
"""The longest wait for a change that is under way."""
LOOK_S = 0.0005


async def cut_off_the_controller(faults: Faults) -> None:
    """Cuts the controller off from most of the voters, while clients may still reach it: what it
    writes is not committed, and the next controller cuts it away."""
    await _while_a_change_is_under_way(faults)
    hosting = _controllers(faults)
    if not hosting:
        return
    rng, cluster = faults.rng, faults.cluster
    host, _ = rng.choice(hosting)
    servers: list[NetworkHost] = [*cluster.hosts, cluster.controller_host]
    others = [other for other in servers if other is not host]
    with_it = rng.sample(others, rng.choice((0, 1, 1)))
    both_ways = rng.random() < 0.7
    one_side, other_side = [host, *with_it], [other for other in others if other not in with_it]
    if rng.random() < 0.3:
        other_side += faults.clients
    faults.begin(f"cut the controller on {host.name} off, with {len(with_it)} beside it")
    await faults.cut(one_side, other_side, both_ways)


async def depose_the_controller_with_a_tail(faults: Faults) -> None:
    """Cuts the controller off with one voter beside it, until that voter alone has several changes,
    and kills it. Where the cut ends first the next controller takes this tail over, and the other
    voters lack all of it; where it ends later, the tail is longer than what the next one brings."""
    await _while_a_change_is_under_way(faults)
    hosting = _controllers(faults)
    if not hosting:
        return
    rng, cluster = faults.rng, faults.cluster
    host, controller = rng.choice(hosting)
    beside = rng.choice([other for other in cluster.hosts if other is not host])
    servers: list[NetworkHost] = [*cluster.hosts, cluster.controller_host]
    side: list[NetworkHost] = [host, beside]
    others = [other for other in servers if other not in side]
    faults.begin(f"depose the controller on {host.name}, with a tail on {beside.name}")
    faults.world.network.cut(side, others)
    quorum, until_s = quorum_of(controller), faults.world.now_s + PATIENCE_S
    while quorum.last_index - quorum.commit_index < TAIL and faults.world.now_s < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(rng.uniform(0, 0.05))
    heals_first = rng.random() < 0.5
    if heals_first:
        faults.world.network.heal(side, others)
    for process in list(host.processes):
        if process.name.startswith(("broker-", "controller")):
            process.kill()
    await faults.last(1.0, 6.0)
    if not heals_first:
        faults.world.network.heal(side, others)
    for number in range(len(cluster.hosts)):
        faults.ensure_broker(number)
    faults.ensure_controller()


async def pause_the_controller(faults: Faults) -> None:
    """Pauses the process that hosts the controller: another takes over, and it wakes up deposed."""
    await _while_a_change_is_under_way(faults)
    hosting = _controllers(faults)
    if not hosting:
        return
    host, _ = faults.rng.choice(hosting)
    names = ("broker-", "controller")
    victims = [process for process in host.processes if process.name.startswith(names)]
    faults.begin(f"pause the controller on {host.name}")
    for victim in victims:
        victim.pause()
    await faults.last(0.5, 9.0)
    for victim in victims:
        victim.resume()


async def fail_writes_of_metadata(faults: Faults) -> None:
    """Fails some writes or syncs of one broker's metadata log."""
    number = faults.any_broker()
    disk = faults.cluster.hosts[number].disk
    operation = faults.rng.choice(("write", "sync", "rename", "sync_dir"))
    times = faults.rng.choice((1, 1, 2, 5))
    faults.begin(f"broker {number}: {operation} of its metadata fails {times} times")
    fault = disk.fail(operation, path_part="/metadata/", error=errno.EIO, times=times)
    faults.disk_faults.append(fault)
    await faults.last(0.5, 6.0)
    fault.heal()


async def lose_power_during_a_change(faults: Faults) -> None:
    """Takes the power of one host, or of all, while a change is under way."""
    await _while_a_change_is_under_way(faults)
    await faults.rng.choice((power_loss, power_loss_of_all))(faults)


async def _while_a_change_is_under_way(faults: Faults) -> None:
    """Returns as soon as a controller has written something that is not committed, mostly."""
    if faults.rng.random() < 0.2:
        return
    if await found_soon(
        faults, lambda: _with_a_change(faults), patience_s=PATIENCE_S, look_s=LOOK_S
    ):
        await asyncio.sleep(faults.rng.choice((0.0, 0.0005, 0.005)))


def _with_a_change(faults: Faults) -> list[Controller]:
    return [
        controller
        for _, controller in _controllers(faults)
        if quorum_of(controller).commit_index < quorum_of(controller).last_index
    ]


def _controllers(faults: Faults) -> list[tuple[ProcessHost, Controller]]:
    """The controllers that live, and their hosts."""
    cluster = faults.cluster
    found: list[tuple[ProcessHost, Controller]] = []
    for process, broker in cluster.broker_of.items():
        controller = broker.controller_host.controller
        if process.alive and controller is not None:
            found.append((process.host, controller))
    preferred, server = cluster.controller_process, cluster.controller
    if preferred is not None and preferred.alive and server is not None:
        controller = server.controller_host.controller
        if controller is not None:
            found.append((preferred.host, controller))
    return found


OF_METADATA: list[Injection] = [
    cut_off_the_controller,
    cut_off_the_controller,
    depose_the_controller_with_a_tail,
    depose_the_controller_with_a_tail,
    depose_the_controller_with_a_tail,
    pause_the_controller,
    fail_writes_of_metadata,
    fail_writes_of_metadata,
    lose_power_during_a_change,
    lose_power_during_a_change,
    kill_the_controller,
    kill_a_broker,
    kill_a_host,
    power_loss_of_all,
    power_loss_of_all,
    pause_a_process,
    pause_a_host,
    isolate_a_broker,
    leave_a_broker_behind,
    split,
    slow_links,
    reset_connections,
    stop_a_broker,
    disk_stall,
    crash_at_a_disk_operation,
    crash_at_a_change_of_names,
]
"""The faults of the scenario `metadata`."""

"""The faults of the metadata log: controllers that are cut off, and disks that fail its writes.

They are aimed: most begin while a change is written and not committed.
"""

from __future__ import annotations

import asyncio
import errno

from proving.simulation.faults import Faults, Injection
from proving.simulation.faults_aimed import found_soon
from proving.simulation.link import NetworkHost
from proving.simulation.process import ProcessHost
from proving.simulation.server_view import controller_host_of, quorum_of
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
    rng, cluster = faults._rng, faults._cluster
    host, _ = rng.choice(hosting)
    servers: list[NetworkHost] = [*cluster.hosts, cluster.controller_host]
    others = [other for other in servers if other is not host]
    with_it = rng.sample(others, rng.choice((0, 1, 1)))
    both_ways = rng.random() < 0.7
    one_side, other_side = [host, *with_it], [other for other in others if other not in with_it]
    if rng.random() < 0.3:
        other_side += faults._clients
    faults._begin(f"cut the controller on {host.name} off, with {len(with_it)} beside it")
    await faults._cut(one_side, other_side, both_ways)


async def depose_the_controller_with_a_tail(faults: Faults) -> None:
    """Cuts the controller off with one voter beside it, until that voter alone has several changes,
    and kills it. Where the cut ends first the next controller takes this tail over, and the other
    voters lack all of it; where it ends later, the tail is longer than what the next one brings."""
    await _while_a_change_is_under_way(faults)
    hosting = _controllers(faults)
    if not hosting:
        return
    rng, cluster = faults._rng, faults._cluster
    host, controller = rng.choice(hosting)
    beside = rng.choice([other for other in cluster.hosts if other is not host])
    servers: list[NetworkHost] = [*cluster.hosts, cluster.controller_host]
    side: list[NetworkHost] = [host, beside]
    others = [other for other in servers if other not in side]
    faults._begin(f"depose the controller on {host.name}, with a tail on {beside.name}")
    faults._world.network.cut(side, others)
    quorum, until_s = quorum_of(controller), faults._world.now_s + PATIENCE_S
    while quorum.last_index - quorum.commit_index < TAIL and faults._world.now_s < until_s:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(rng.uniform(0, 0.05))
    heals_first = rng.random() < 0.5
    if heals_first:
        faults._world.network.heal(side, others)
    for process in list(host.processes):
        if process.name.startswith(("broker-", "controller")):
            process.kill()
    await faults._last(1.0, 6.0)
    if not heals_first:
        faults._world.network.heal(side, others)
    for number in range(len(cluster.hosts)):
        faults._ensure_broker(number)
    faults._ensure_controller()


async def pause_the_controller(faults: Faults) -> None:
    """Pauses the process that hosts the controller: another takes over, and it wakes up deposed."""
    await _while_a_change_is_under_way(faults)
    hosting = _controllers(faults)
    if not hosting:
        return
    host, _ = faults._rng.choice(hosting)
    names = ("broker-", "controller")
    victims = [process for process in host.processes if process.name.startswith(names)]
    faults._begin(f"pause the controller on {host.name}")
    for victim in victims:
        victim.pause()
    await faults._last(0.5, 9.0)
    for victim in victims:
        victim.resume()


async def fail_writes_of_metadata(faults: Faults) -> None:
    """Fails some writes or syncs of one broker's metadata log."""
    number = faults._any_broker()
    disk = faults._cluster.hosts[number].disk
    operation = faults._rng.choice(("write", "sync", "rename", "sync_dir"))
    times = faults._rng.choice((1, 1, 2, 5))
    faults._begin(f"broker {number}: {operation} of its metadata fails {times} times")
    fault = disk.fail(operation, path_part="/metadata/", error=errno.EIO, times=times)
    faults._disk_faults.append(fault)
    await faults._last(0.5, 6.0)
    fault.heal()


async def lose_power_during_a_change(faults: Faults) -> None:
    """Takes the power of one host, or of all, while a change is under way."""
    await _while_a_change_is_under_way(faults)
    await faults._rng.choice((Faults.power_loss, Faults.power_loss_of_all))(faults)


async def _while_a_change_is_under_way(faults: Faults) -> None:
    """Returns as soon as a controller has written something that is not committed, mostly."""
    if faults._rng.random() < 0.2:
        return
    if await found_soon(
        faults, lambda: _with_a_change(faults), patience_s=PATIENCE_S, look_s=LOOK_S
    ):
        await asyncio.sleep(faults._rng.choice((0.0, 0.0005, 0.005)))


def _with_a_change(faults: Faults) -> list[Controller]:
    return [
        controller
        for _, controller in _controllers(faults)
        if quorum_of(controller).commit_index < quorum_of(controller).last_index
    ]


def _controllers(faults: Faults) -> list[tuple[ProcessHost, Controller]]:
    """The controllers that live, and their hosts."""
    cluster = faults._cluster
    found: list[tuple[ProcessHost, Controller]] = []
    for process, broker in cluster.broker_of.items():
        controller = broker.controller_host.controller
        if process.alive and controller is not None:
            found.append((process.host, controller))
    preferred, server = cluster.controller_process, cluster.controller
    if preferred is not None and preferred.alive and server is not None:
        host = controller_host_of(server)
        if host is not None and host.controller is not None:
            found.append((preferred.host, host.controller))
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
    Faults.kill_the_controller,
    Faults.kill_a_broker,
    Faults.kill_a_host,
    Faults.pause_a_process,
    Faults.pause_a_host,
    Faults.isolate_a_broker,
    Faults.leave_a_broker_behind,
    Faults.split,
    Faults.slow_links,
    Faults.reset_connections,
    Faults.stop_a_broker,
    Faults.disk_stall,
    Faults.crash_at_a_disk_operation,
    Faults.crash_at_a_change_of_names,
]
"""The faults of the scenario `metadata`."""

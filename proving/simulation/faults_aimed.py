"""Faults that are aimed at a state: they strike a host just while something is going on there.

A *target* says on which hosts that is so now. Rare states last for a moment: a delay is waited for,
a list is being loaded, a move is under way. Faults that come at any moment hardly ever meet them,
and then on another host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.faults import Faults, Injection
from proving.simulation.link import NetworkHost
from proving.simulation.process import Process
from proving.simulation.server_view import (
    coordinator_of,
    has_holders_away,
    is_loading_list,
    loaded_list,
    queue_leaders_of,
    role_of,
)
from proving.simulation.world import Host
from rayq.actors.queues.leader import QueueLeader
from rayq.actors.queues.open_queue import OpenQueue
from rayq.actors.remote.leader_remote import LeaderRemote
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica import Replica
from rayq.actors.transactions.transaction_coordinator import TransactionCoordinator

PATIENCE_S = 4.0
"""The longest wait for a target."""
LOOK_S = 0.002
LEAPS_MS = (1_200_000, 1_200_000, 60_000, -1_200_000)
LEAP_S = (0.2, 1.8)
"""The duration of a leap: soon over, so that it may shorten a delay of a minute by no more than a
part."""
STRIKES = (*("leap",) * 5, "kill a process", "kill", "pause", "cut off", "power loss")

T = TypeVar("T")
Target = Callable[[SimulatedCluster], list[Process]]
"""The processes in which it is so now."""


async def found_soon(
    faults: Faults,
    find: Callable[[], list[T]],
    *,
    patience_s: float = PATIENCE_S,
    look_s: float = LOOK_S,
) -> list[T]:
    """Waits until `find` finds something, and returns that; [] if it finds nothing for
    `patience_s`."""
    until_s = faults.world.now_s + patience_s
    while faults.world.now_s < until_s:
        found = find()
        if found:
            return found
        await asyncio.sleep(look_s)
    return []


def aimed_at(what: str, target: Target) -> Injection:
    """A fault of any kind that strikes where `target` says. `what` is going on there."""

    async def strike(faults: Faults) -> None:
        victims = await found_soon(faults, lambda: target(faults.cluster))
        if not victims:
            return
        rng = faults.rng
        victim = rng.choice(victims)
        host = next(host for host in faults.cluster.hosts if host is victim.host)
        kind = rng.choice(STRIKES)
        faults.begin(f"while {what}: {kind} of {victim.name} on {host.name}")
        await _strike(faults, kind, victim, host)

    return strike


async def _strike(faults: Faults, kind: str, victim: Process, host: Host) -> None:
    number = faults.cluster.hosts.index(host)
    if kind == "leap":
        leap_ms = faults.rng.choice(LEAPS_MS)
        host.jump_clock(leap_ms)
        await asyncio.sleep(faults.rng.uniform(*LEAP_S))
        host.jump_clock(-leap_ms)
    elif kind == "pause":
        victim.pause()
        await faults.last(0.5, 9.0)
        victim.resume()
    elif kind == "cut off":
        servers: list[NetworkHost] = [*faults.cluster.hosts, faults.cluster.controller_host]
        others = [server for server in servers if server is not host]
        await faults.cut([host], others, faults.rng.random() < 0.7)
    else:
        if kind == "kill a process":
            victim.kill()
        elif kind == "kill":
            await faults.crash_host(number)
        else:
            host.power_loss()
        await faults.last(0.1, 4.0)
        faults.ensure_broker(number)


# --- where something is going on ------------------------------------------------------------------


def queues_with_delays(cluster: SimulatedCluster) -> list[Process]:
    """The servers where a queue's records wait for a time of day, or after a failure."""
    return _queues(cluster, lambda leader, opened: opened.state.counts().delayed > 0)


def queues_with_holders_away(cluster: SimulatedCluster) -> list[Process]:
    """Hosts of queues where a consumer has just lost its connection, and its locks have a
    second."""
    return _queues(cluster, lambda leader, opened: has_holders_away(leader.owners))


def queues_with_moves(cluster: SimulatedCluster) -> list[Process]:
    """Hosts of queues where dead letters or redriven records are being moved."""
    return _queues(cluster, lambda leader, opened: bool(opened.state.moves.all()))


def _queues(
    cluster: SimulatedCluster, holds: Callable[[QueueLeader, OpenQueue], bool]
) -> list[Process]:
    return [
        process
        for process, replica in cluster.live_replicas()
        if any(
            leader.open is not None and holds(leader, leader.open)
            for leader in queue_leaders_of(replica)
        )
    ]


def lists_being_loaded(
    cluster: SimulatedCluster, topic_id: str | None = None
) -> list[Process]:
    """Leaders that are loading the object list of a partition, of any topic or of this one."""
    return _remote(
        cluster,
        lambda replica, remote: (
            is_loading_list(remote) and topic_id in (None, replica.assignment.topic_id)
        ),
    )


def objects_to_be_deleted(cluster: SimulatedCluster) -> list[Process]:
    """The leaders whose list has objects that are deleted after a delay."""
    return _remote(
        cluster,
        lambda replica, remote: (
            (loaded := loaded_list(remote)) is not None and bool(loaded.removed)
        ),
    )


def _remote(
    cluster: SimulatedCluster, holds: Callable[[Replica, LeaderRemote], bool]
) -> list[Process]:
    return [
        process
        for process, replica in cluster.live_replicas()
        if isinstance(role := role_of(replica), Leader)
        and role.remote is not None
        and holds(replica, role.remote)
    ]


def deleted_topics(cluster: SimulatedCluster) -> list[Process]:
    """The broker that removes what deleted topics have left in the store, after a delay."""
    for process, broker in cluster.broker_of.items():
        state = broker.metadata.state
        lowest = min(
            (broker for broker, known in state.brokers.items() if known.live), default=None
        )
        if process.alive and state.garbage and process is cluster.broker_processes.get(lowest or 0):
            return [process]
    return []


def open_transactions(cluster: SimulatedCluster) -> list[Process]:
    """The coordinators of a transaction whose time runs."""
    return _transactions(cluster, is_decided=False)


def missing_markers(cluster: SimulatedCluster) -> list[Process]:
    """The coordinators of a transaction that is decided, and lacks markers."""
    return _transactions(cluster, is_decided=True)


def _transactions(cluster: SimulatedCluster, *, is_decided: bool) -> list[Process]:
    return [
        process
        for process, replica in cluster.live_replicas()
        if isinstance(coordinator := coordinator_of(replica), TransactionCoordinator)
        and any(
            transaction.is_decided is is_decided
            for transaction in coordinator.state.transactions.values()
        )
    ]


def reassignments(cluster: SimulatedCluster) -> list[Process]:
    """The leaders of a partition that is being moved."""
    newest = max(
        cluster.brokers.values(), key=lambda server: server.metadata.version
    ).metadata.state
    moving = {
        (topic.topic_id, number)
        for topic, number, partition in newest.all_partitions()
        if partition.value.target
    }
    return [
        process
        for process, replica in (cluster.live_replicas() if moving else ())
        if isinstance(role_of(replica), Leader)
        and (replica.assignment.topic_id, replica.assignment.partition) in moving
    ]


_MOVE = aimed_at("a partition is moved", reassignments)
_DELAY = aimed_at("records wait for a time", queues_with_delays)

OF_QUEUES: list[Injection] = [
    _DELAY,
    _DELAY,
    aimed_at("a consumer has just gone", queues_with_holders_away),
    aimed_at("records are moved", queues_with_moves),
    _MOVE,
]
OF_REMOTE_STORAGE: list[Injection] = [
    *[aimed_at("objects wait for their deletion", objects_to_be_deleted)] * 3,
    *[aimed_at("a deleted topic waits for its removal", deleted_topics)] * 3,
    aimed_at("a list is loaded", lists_being_loaded),
    _MOVE,
]
OF_TRANSACTIONS: list[Injection] = [
    aimed_at("a transaction's time runs", open_transactions),
    aimed_at("markers are missing", missing_markers),
]

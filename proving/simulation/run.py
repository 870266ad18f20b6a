"""One seed: a cluster, the ordinary workload, faults, healing, and the verdict."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proving.simulation.charged import ChargedTime, slow_machine
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.faults import Faults
from proving.simulation.faults_access import taking_rights
from proving.simulation.faults_disks import lose_a_disk
from proving.simulation.faults_ordinary import AFTERMATHS
from proving.simulation.invariants import Invariants
from proving.simulation.network import OTHER_HOST_S
from proving.simulation.overload import Overload
from proving.simulation.owner import ProcessDied
from proving.simulation.principals import PATIENCES_MS, Principals
from proving.simulation.situations import watched
from proving.simulation.workload import Workload
from proving.simulation.workload_groups import GroupWorkload
from proving.simulation.workload_metadata import MetadataWorkload
from proving.simulation.workload_moves import GroupMovesWorkload, MovesWorkload, Operators
from proving.simulation.workload_overload import OverloadWorkload
from proving.simulation.workload_queue_moves import QueueMovesWorkload
from proving.simulation.workload_swarm import SwarmWorkload
from proving.simulation.workload_tiered import TieredTransactionWorkload, TieredWorkload
from proving.simulation.workload_transactions import TransactionWorkload
from proving.simulation.world import World
from rayq.config import ClusterConfig
from rayq.testing.checker import check

RECOVERY_LIMIT_S = 60.0
RECORDS_LIMIT_S = 240.0
"""A single producer whose every request waits for slow threads writes some ten records a second."""
READ_LIMIT_S = 60.0
READ_BESIDE_GUESTS_LIMIT_S = 120.0
"""The same in a seed with principals: groups read the records of guests, too."""
VIRTUAL_LIMIT_S = 900.0
PROBLEMS_MAX = 20


@dataclass
class Outcome:
    """The result of a seed. `problems` is empty when every invariant held."""

    seed: int
    scenario: str = "ordinary"
    features: frozenset[str] | None = None
    """Features that the run was told to have instead of those that the seed draws. None: the
    latter."""
    problems: list[str] = field(default_factory=list)
    acknowledged: int = 0
    unknown: int = 0
    failed: int = 0
    polled: int = 0
    elections: int = 0
    moves: int = 0
    cancels: int = 0
    faults: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    events: int = 0
    cpu_s: float = 0.0
    """The CPU seconds of this process, from the start of the world until its memory is free."""
    trace: str = ""
    situations: dict[str, int] = field(default_factory=dict)
    """The number of times that the run met each of `situations`, where the run was watched."""


SCENARIOS: dict[str, type[Workload]] = {
    "ordinary": Workload,
    "groups": GroupWorkload,
    "metadata": MetadataWorkload,
    "moves": MovesWorkload,
    "group-moves": GroupMovesWorkload,
    "swarm": SwarmWorkload,
    "transactions": TransactionWorkload,
    "queues": QueueMovesWorkload,
    "tiered": TieredWorkload,
    "tiered-transactions": TieredTransactionWorkload,
    "overload": OverloadWorkload,
}


def run_watched(
    seed: int, scenario: str = "ordinary", features: frozenset[str] | None = None
) -> Outcome:
    """Like `run_seed`, and also notes which situations of the protocol the run meets. The probes
    only look on, so the run is the same."""
    with watched() as reached:
        outcome = run_seed(seed, scenario, features)
        outcome.situations = dict(reached)
    return outcome


def run_seed(
    seed: int, scenario: str = "ordinary", features: frozenset[str] | None = None
) -> Outcome:
    """Runs one seed of a scenario. Errors of the cluster are results, and are not raised."""
    outcome = Outcome(seed, scenario, features)
    sys.unraisablehook = _hear_unraisable
    began_s = time.process_time()
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # No collection looks through all modules again: it takes only what the seed made.
    try:
        _simulate(outcome)
    finally:
        gc.collect()  # A world has many cycles. A thousand worlds would not fit into memory.
        gc.unfreeze()
        if collecting:
            gc.enable()
    outcome.cpu_s = time.process_time() - began_s
    return outcome


def _simulate(outcome: Outcome) -> None:
    kind = SCENARIOS[outcome.scenario].of_seed(outcome.seed, outcome.features)
    with kind.conditions(outcome.seed), World(outcome.seed) as world:
        rng = world.new_random("config")
        options: dict[str, Any] = {
            "metadata_snapshot_records": rng.choice((20, 100, 10_000)),
            "flush_checkpoint_bytes": rng.choice((2_000, 20_000, 1 << 26)),
            "replicas_per_process": rng.choice((1, 2, 100, 100)),
            "replica_lag_time_max_ms": rng.choice((2_000, 10_000)),
        }
        options |= kind.cluster_options(rng)
        has_principals = kind.has_principals(outcome.seed, outcome.features)
        if has_principals:
            options["access_patience_ms"] = world.new_random("patience").choice(PATIENCES_MS)
        config = ClusterConfig(**options)
        cluster = SimulatedCluster(world, brokers=kind.broker_count(rng), config=config)
        _choose_hardware(world, rng, kind.syncs_s)
        workload = kind(cluster)
        if has_principals:
            workload.principals = Principals(
                cluster,
                workload.rights(),
                workload.rights_of_guests(),
            )
        invariants = Invariants(cluster)
        invariants.access = None if workload.principals is None else workload.principals.judge
        world.loop.observer = workload.observer(invariants)
        charged = None
        if kind.is_charged(outcome.seed, outcome.features):
            charged = ChargedTime(world, [*cluster.hosts, cluster.controller_host])
            world.loop.observer = charged.observer(world.loop.observer)
        try:
            with invariants.judging(), workload.judging():
                script = _script(outcome, cluster, workload, invariants, charged)
                world.run(script, limit_s=VIRTUAL_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the seed's result
            outcome.problems.append("".join(traceback.format_exception(error)))
        for reported in world.errors[:PROBLEMS_MAX]:
            text = f"at {reported.time_s:.3f} in {reported.owner}: {reported.message}"
            if reported.exception is not None:
                text += "\n" + "".join(traceback.format_exception(reported.exception))
            outcome.problems.append(text)
        try:
            _judge(outcome, workload)
        except Exception as error:  # noqa: BLE001 - the other seeds run on
            outcome.problems.append("".join(traceback.format_exception(error)))
        outcome.elections = invariants.elections
        if isinstance(workload, Operators):
            outcome.moves, outcome.cancels = workload.moves.completed, workload.moves.cancelled
        outcome.virtual_s = world.now_s
        outcome.events = world.loop.events
        outcome.trace = world.trace.digest()


def _hear_unraisable(told: Any) -> None:
    """Ignores errors that are raised when generators of dead processes are collected."""
    if not isinstance(told.exc_value, ProcessDied):
        sys.__unraisablehook__(told)


def _choose_hardware(
    world: World, rng: random.Random, syncs_s: Sequence[tuple[float, float]]
) -> None:
    """Makes the disk fast or slow, so that different work is under way when a process dies."""
    world.network.delay_s = rng.choice((OTHER_HOST_S, OTHER_HOST_S, (0.001, 0.02)))
    sync_s = rng.choice(syncs_s)
    for host in world.hosts:
        host.disk.sync_s = sync_s
        host.disk.writebacks = rng.choice((0.05, 0.5))


def _judge(outcome: Outcome, workload: Workload) -> None:
    verdict = check(workload.recorder.events)
    outcome.acknowledged, outcome.unknown = verdict.acknowledged, verdict.unknown
    outcome.failed, outcome.polled = verdict.failed, verdict.polled
    if not outcome.problems:
        if not verdict.is_clean:
            outcome.problems.append(str(verdict))
        outcome.problems.extend(workload.problems[:PROBLEMS_MAX])


async def _script(
    outcome: Outcome,
    cluster: SimulatedCluster,
    workload: Workload,
    invariants: Invariants,
    charged: ChargedTime | None,
) -> None:
    world = cluster.world
    await cluster.start()
    principals = workload.principals
    if principals is not None:
        await workload.set_up_principals()
    await workload.create_topics()
    begin_s = world.now_s
    workload.start()
    kinds = [*workload.fault_kinds, *workload.more_faults]
    if charged is not None:
        kinds += [slow_machine] * (1 + len(kinds) // 8)
    if principals is not None:
        workload.start_guests()
        strike = taking_rights(principals, cuts_brokers=workload.cuts_brokers)
        kinds += [strike] * (1 + len(kinds) // 2)
    faults = Faults(
        cluster,
        workload.hosts,
        lambda: workload.recorder.acknowledged,
        topics=workload.topics_on_disk,
        kinds=kinds,
        aftermaths=[*AFTERMATHS, *workload.more_faults],
        loss_of_a_disk=lose_a_disk if workload.lose_disks else None,
    )
    outcome.faults = faults.log
    await faults.inject(begin_s + workload.heals_at_s)
    while faults.count < workload.faults_min:
        await faults.inject(world.now_s + 5.0)
    workload.calm_down()
    await faults.heal()
    await cluster.wait_until(
        cluster.is_whole, "all replicas in sync after healing", limit_s=RECOVERY_LIMIT_S
    )
    before = dict(workload.acknowledged_by)
    await cluster.wait_until(
        lambda: all(now > before[name] for name, now in workload.acknowledged_by.items()),
        "every producer to make progress after healing",
        limit_s=RECOVERY_LIMIT_S,
    )
    if charged is not None:
        await Overload(cluster, invariants, faults, charged).run()
    if principals is not None:
        await principals.revoke_in_calm(workload.acknowledged_by)
    await asyncio.sleep(max(0.0, begin_s + workload.lasts_s - world.now_s))
    await cluster.wait_until(
        lambda: workload.recorder.acknowledged >= workload.records_min,
        f"{workload.records_min} acknowledged records",
        limit_s=RECORDS_LIMIT_S,
    )
    if principals is not None:
        await workload.end_guests()
    await workload.stop_sending()
    await workload.read_all(
        READ_LIMIT_S if principals is None else READ_BESIDE_GUESTS_LIMIT_S
    )
    await cluster.wait_until(
        lambda: cluster.is_whole() and cluster.is_replicated(),
        "every replica to have everything",
        limit_s=RECOVERY_LIMIT_S,
    )
    invariants.check_ends()
    await workload.stop_reading()


def quiet() -> None:
    """Silences rayq's log: the faults that it reports are intended here."""
    logging.getLogger("rayq").setLevel(logging.CRITICAL + 1)

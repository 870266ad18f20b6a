"""A load that comes and goes, while nothing else is broken, and its invariants.

Machines are slow for a while, and a broker, a leader or the controller may die meanwhile. A process
that lives keeps its session, and a partition changes its leader no more often than a death takes.
Soon after the load has gone all is well, and stays so: nothing that the load began keeps itself
going.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from proving.simulation.charged import ChargedTime, drawn_slowness
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.faults import Faults, Injection
from proving.simulation.faults_processes import kill_a_host, kill_a_leader, kill_the_controller
from proving.simulation.invariants import InvariantError, Invariants
from proving.simulation.process import Process
from proving.simulation.server_view import incarnation_of, replicas_of
from rayq.core.cluster.records import (
    BrokerFenced,
    EpochStarted,
    MetadataRecord,
    PartitionChanged,
)
from rayq.core.cluster.state import ClusterState
from rayq.records import TopicIdPartition

ROUNDS_MAX = 2
ROUND_S = (3.0, 8.0)
DEATHS: tuple[Injection | None, ...] = (None, kill_a_host, kill_a_leader, kill_the_controller)
PRICE_MAX = 500.0
"""The highest price of computing, as a multiple of what was measured, at which nothing that lives
may lose its session: 7.5 ms for an event."""
SESSION_MS_MIN = 3000
"""Sessions that are shorter may end by load: a seed may make them so short that all miss them."""
ELECTIONS_PER_DEATH = 2
"""A partition whose leader dies gets another one, and then its preferred one again."""
CALM_S = 10.0
"""Maximum time until all replicas are in sync, once the load has gone."""
QUIET_S = 5.0
"""After that no leader changes for so long, except that preferred replicas lead again."""


class Overload:
    """See the module. `run` it once the cluster is whole."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        invariants: Invariants,
        faults: Faults,
        charged: ChargedTime,
    ) -> None:
        self._cluster = cluster
        self._faults = faults
        self._charged = charged
        self._rng = cluster.world.new_random("overload")
        self._deaths: Counter[Injection] = Counter()
        self._elections: Counter[TopicIdPartition] = Counter()
        self._is_on = False
        self._is_quiet = False
        self._hear_too = invariants.on_record
        invariants.on_record = self._hear
        cluster.on_kill = self._check_kill

    async def run(self) -> None:
        """Raises InvariantError, or AssertionError where the cluster does not recover."""
        cluster = self._cluster
        self._charged.price_max = 0.0
        self._is_on = True
        for _ in range(self._rng.randint(1, ROUNDS_MAX)):
            await self._round()
        await self._faults.heal()
        self._faults.note("the load has gone")
        await cluster.wait_until(
            cluster.is_whole, "all replicas in sync after the load", limit_s=CALM_S
        )
        self._is_quiet = True
        await asyncio.sleep(QUIET_S)
        self._is_on = False

    async def _round(self) -> None:
        rng, faults = self._rng, self._faults
        machines = [*self._cluster.hosts, self._cluster.controller_host]
        slow = rng.sample(machines, rng.choice((1, len(machines), rng.randint(1, len(machines)))))
        for host in slow:
            host.slowness = drawn_slowness(rng)
        named = ", ".join(f"{host.name} {host.slowness:.0f} times" for host in slow)
        faults.begin(f"load: {named} as slow")
        ends_s = faults.world.now_s + rng.uniform(*ROUND_S)
        await asyncio.sleep(rng.uniform(0, 2.0))
        death = rng.choice(DEATHS)
        if death is not None:
            self._deaths[death] += 1
            await death(faults)
        await asyncio.sleep(ends_s - faults.world.now_s)
        for host in slow:
            host.slowness = 1.0

    # --- the judge --------------------------------------------------------------------------------

    def _is_judged(self) -> bool:
        is_long = self._cluster.config.session_timeout_ms >= SESSION_MS_MIN
        return self._is_on and is_long and self._charged.price_max <= PRICE_MAX

    def _hear(self, state: ClusterState, record: MetadataRecord) -> None:
        if self._hear_too is not None:
            self._hear_too(state, record)
        if not self._is_judged():
            return
        if isinstance(record, BrokerFenced):
            self._check_session(record)
        elif isinstance(record, EpochStarted):
            self._check_controller(record)
        elif isinstance(record, PartitionChanged):
            self._check_election(state, record)

    def _check_session(self, record: BrokerFenced) -> None:
        process = self._cluster.broker_processes[record.broker]
        broker = self._cluster.broker_of.get(process)
        if process.alive and broker is not None and incarnation_of(broker) == record.incarnation:
            raise InvariantError(
                f"broker {record.broker} lives and lost its session by load, {self._price()}"
            )

    def _check_controller(self, record: EpochStarted) -> None:
        if not self._deaths[kill_the_controller] and not self._deaths[kill_a_host]:
            raise InvariantError(
                f"the controller lives and was replaced in epoch {record.epoch}, {self._price()}"
            )

    def _check_kill(self, process: Process) -> None:
        host = self._cluster.replica_hosts.get(process)
        if self._is_judged() and host is not None and replicas_of(host):
            raise InvariantError(f"{process.name} lives and its broker killed it, {self._price()}")

    def _check_election(self, state: ClusterState, record: PartitionChanged) -> None:
        value, key = record.value, (record.topic_id, record.partition)
        before = state.partition(*key)
        if before is None or not 0 < before.value.leader_epoch < value.leader_epoch:
            return
        self._elections[key] += 1
        where = f"{state.topics[record.topic_id].name}-{record.partition}"
        if self._is_quiet and value.leader != value.replicas[0]:
            raise InvariantError(f"{where} gets another leader, {value.leader}, after the load")
        if self._elections[key] > 1 + ELECTIONS_PER_DEATH * self._deaths.total():
            raise InvariantError(
                f"{where} has changed its leader {self._elections[key]} times, while "
                f"{self._deaths.total()} processes died, {self._price()}"
            )

    def _price(self) -> str:
        return f"at {self._charged.price_max:.0f} times the measured price"

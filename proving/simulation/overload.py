"""A load that comes and goes, while nothing else is broken, and its invariants.

Machines are slow for a while, and a broker, a leader or the controller may die meanwhile. A process
that lives keeps its session, and a partition changes its leader no more often than a death takes.
Soon after the load has gone all is well, and stays so: nothing that the load began keeps itself
going.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter

from proving.simulation.charged import ChargedTime, drawn_slowness
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.faults import Faults, Injection
from proving.simulation.faults_processes import kill_a_host, kill_a_leader, kill_the_controller
from proving.simulation.invariants import InvariantError, Invariants
from proving.simulation.process import Process, ProcessHost
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
PRICE_MAX = 1000.0
"""The highest price of computing, as a multiple of what was measured, at which nothing that lives
may lose its session: 15 ms for an event."""
PRICE_MAX_WITH_GUESTS = 500.0
"""The same in a seed with principals: guests and strangers log in over and over."""
SESSION_MS_MIN = 3000
"""Sessions that are shorter may end by load: a seed may make them so short that all miss them."""
LONG_STEP_SHARE = 0.3
LONG_STEP_S = (2.5, 4.0)
"""In some rounds the controller computes for so long at once, and then judges others."""
AFTER_A_STEP_S = 0.5
ELECTIONS_PER_DEATH = 2
"""A partition whose leader dies gets another one, and then its preferred one again."""
WORK_MAX = 3.0
"""Maximum number of events in a second under load, as a multiple of those without: what is late is
not asked for again and again."""
CALM_S = 20.0
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
        self._silent_until_s: dict[Process, float] = {}
        """The ends of the long steps of processes."""
        self._elections: Counter[TopicIdPartition] = Counter()
        self._events_per_s: list[float] = []
        """Events of the world in each round."""
        self._is_on = False
        self._is_quiet = False
        self._machines = [*cluster.hosts, cluster.controller_host]
        self._price_max = PRICE_MAX if invariants.access is None else PRICE_MAX_WITH_GUESTS
        self._judge = invariants.judge
        self._hear_too = invariants.on_record
        invariants.on_record = self._hear
        cluster.on_kill = self._check_kill

    async def run(self) -> None:
        """Raises InvariantError, or AssertionError where the cluster does not recover."""
        cluster, world = self._cluster, self._cluster.world
        self._charged.prices_max.clear()
        self._is_on = True
        for _ in range(self._rng.randint(1, ROUNDS_MAX)):
            await self._round()
        await self._faults.heal()
        # A long step is load as well, and so is what its process does right after it.
        steps_end_s = max(self._silent_until_s.values(), default=world.now_s)
        await asyncio.sleep(max(steps_end_s - world.now_s, 0.0) + AFTER_A_STEP_S)
        self._faults.note("the load has gone")
        await cluster.wait_until(
            cluster.is_whole, "all replicas in sync after the load", limit_s=CALM_S
        )
        self._is_quiet = True
        events, began_s = world.loop.events, world.now_s
        await asyncio.sleep(QUIET_S)
        self._is_on = False
        self._check_work((world.loop.events - events) / (world.now_s - began_s))

    def _check_work(self, events_per_s: float) -> None:
        if max(self._events_per_s) > WORK_MAX * events_per_s:
            raise InvariantError(
                f"{max(self._events_per_s):.0f} events a second under load, and {events_per_s:.0f} "
                "without: what is late is asked for too often"
            )

    async def _round(self) -> None:
        rng, faults = self._rng, self._faults
        most = len(self._machines)
        slow = rng.sample(self._machines, rng.choice((1, most, rng.randint(1, most))))
        for host in slow:
            host.slowness = drawn_slowness(rng)
        named = ", ".join(f"{host.name} {host.slowness:.0f} times" for host in slow)
        faults.begin(f"load: {named} as slow")
        events, began_s = faults.world.loop.events, faults.world.now_s
        ends_s = began_s + rng.uniform(*ROUND_S)
        await asyncio.sleep(rng.uniform(0, 2.0))
        death = rng.choice(DEATHS)
        if rng.random() < LONG_STEP_SHARE:
            self._take_a_long_step()
        elif death is not None:
            self._deaths[death] += 1
            await death(faults)
        await asyncio.sleep(ends_s - faults.world.now_s)
        for host in slow:
            host.slowness = 1.0
        passed_s = faults.world.now_s - began_s
        self._events_per_s.append((faults.world.loop.events - events) / passed_s)

    def _take_a_long_step(self) -> None:
        """The voters may replace a controller that is silent meanwhile, as one that is dead."""
        self._deaths[kill_the_controller] += 1
        cluster, seconds = self._cluster, self._rng.uniform(*LONG_STEP_S)
        servers = [*cluster.broker_of.items(), (cluster.controller_process, cluster.controller)]
        for process, server in servers:
            if (
                process is not None
                and process.alive
                and server is not None
                and server.controller_host.controller is not None
            ):
                self._faults.begin(f"{process.name} computes for {seconds:.1f} s at once")
                cluster.world.loop.block(process, seconds)
                self._silent_until_s[process] = cluster.world.now_s + seconds

    # --- the judge --------------------------------------------------------------------------------

    def _is_judged(self, *hosts: ProcessHost) -> bool:
        """Returns whether computing was cheap enough on these machines for what is judged."""
        is_long = self._cluster.config.session_timeout_ms >= SESSION_MS_MIN
        return self._is_on and is_long and self._price(*hosts) <= self._price_max

    def _price(self, *hosts: ProcessHost) -> float:
        return max((self._charged.prices_max.get(host, 0.0) for host in hosts), default=0.0)

    def _hear(self, state: ClusterState, record: MetadataRecord) -> None:
        if self._hear_too is not None:
            self._hear_too(state, record)
        if not self._is_on:
            return
        if isinstance(record, BrokerFenced):
            self._check_session(record)
        elif isinstance(record, EpochStarted):
            self._check_controller(record)
        elif isinstance(record, PartitionChanged):
            self._check_election(state, record)

    def _check_session(self, record: BrokerFenced) -> None:
        """The price on the broker's own machine counts: a controller that is late judges nobody. A
        broker that computed for about a session at once, as the host of a controller that was
        replaced meanwhile, was silent by itself. Its session may end when the next controller is
        through with a long step of its own."""
        process = self._cluster.broker_processes[record.broker]
        session_s = self._cluster.config.session_timeout_ms / 1000
        silent_until_s = self._silent_until_s.get(process, -math.inf)
        if self._cluster.world.now_s < silent_until_s + session_s + LONG_STEP_S[1]:
            return
        broker = self._cluster.broker_of.get(process)
        is_gone = (
            not process.alive or broker is None or incarnation_of(broker) != record.incarnation
        )
        if not is_gone and self._is_judged(process.host):
            raise InvariantError(
                f"broker {record.broker} lives and lost its session by load, at "
                f"{self._price(process.host):.0f} times the measured price"
            )

    def _check_controller(self, record: EpochStarted) -> None:
        deaths = self._deaths[kill_the_controller] + self._deaths[kill_a_host]
        if not deaths and self._is_judged(*self._machines):
            raise InvariantError(
                f"the controller lives and was replaced in epoch {record.epoch}, at "
                f"{self._price(*self._machines):.0f} times the measured price"
            )

    def _check_kill(self, process: Process) -> None:
        host = self._cluster.replica_hosts.get(process)
        if host is not None and replicas_of(host) and self._is_judged(process.host):
            # Not raised: the code of its broker runs.
            self._judge.fault = (
                f"{process.name} lives and its broker killed it, at "
                f"{self._price(process.host):.0f} times the measured price"
            )

    def _check_election(self, state: ClusterState, record: PartitionChanged) -> None:
        value, key = record.value, (record.topic_id, record.partition)
        before = state.partition(*key)
        if before is None or not 0 < before.value.leader_epoch < value.leader_epoch:
            return
        self._elections[key] += 1
        where = f"{state.topics[record.topic_id].name}-{record.partition}"
        if self._is_quiet and value.leader != value.replicas[0]:
            raise InvariantError(f"{where} gets another leader, {value.leader}, after the load")
        deaths = self._deaths.total()
        if self._elections[key] > 1 + ELECTIONS_PER_DEATH * deaths and self._is_judged(
            *self._machines
        ):
            raise InvariantError(
                f"{where} has changed its leader {self._elections[key]} times, while {deaths} "
                f"processes died, at {self._price(*self._machines):.0f} times the measured price"
            )

"""One situation in the simulated world: a cluster, a client, and questions that tests ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from proving.simulation import World
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.invariants import Invariants
from proving.simulation.server_view import replica_log_of, role_of
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica import Replica
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ClusterConfig, ProducerConfig
from rayq.core.cluster.records import PartitionValue


class Stage:
    """A running cluster, and a client on a host of its own. Its calls are for partition 0."""

    def __init__(self, world: World, cluster: SimulatedCluster) -> None:
        self.world = world
        self.cluster = cluster
        self.network = world.network
        self.hosts = cluster.hosts
        self.client_host = world.host("client")
        self.process = self.client_host.process("client")

    def open(self) -> None:
        self.client = Client(
            self.process.environment,
            self.cluster.client_identity,
            self.cluster.endpoints,
            self.cluster.config,
        )
        self.admin = AsyncAdmin(self.client)

    async def send(self, topic: str, values: Iterable[bytes]) -> None:
        """Returns once all records are acknowledged (acks=all)."""

        async def send() -> None:
            producer = AsyncProducer(self.client, ProducerConfig())
            for value in values:
                await producer.send(topic, value)
            await producer.close()

        await self.process.run(send())

    def value(self, topic: str) -> PartitionValue:
        """The partition as the broker with the newest metadata knows it."""
        newest = max(self.cluster.brokers.values(), key=lambda broker: broker.metadata.version)
        state = newest.metadata.state
        return state.topics[state.topic_ids[topic]].partitions[0].value

    def log(self, topic: str, broker: int) -> ReplicaLog | None:
        """The replica's log on a broker; None while its process does not run, or has not opened
        it."""
        for replica in self._replicas(topic, broker):
            held = replica_log_of(replica)
            if held.is_open:
                return held
        return None

    def leads(self, topic: str, broker: int) -> bool:
        return any(
            isinstance(role_of(replica), Leader) for replica in self._replicas(topic, broker)
        )

    def _replicas(self, topic: str, broker: int) -> list[Replica]:
        """The replicas of a topic on a broker, in processes that live."""
        return [
            replica
            for _, replica in self.cluster.live_replicas()
            if replica.assignment.topic == topic and replica_log_of(replica).broker == broker
        ]

    def in_sync(self, topic: str) -> set[int]:
        return {member.broker for member in self.value(topic).isr}

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, holds: Callable[[], bool], what: str, *, limit_s: float = 30) -> None:
        await self.cluster.wait_until(holds, what, limit_s=limit_s)


def play(
    script: Callable[[Stage], Awaitable[None]],
    *,
    seed: int = 1,
    brokers: int = 3,
    config: ClusterConfig | None = None,
    keeps_invariants: bool = True,
    limit_s: float = 300,
) -> None:
    """Runs `script` on a fresh cluster. `keeps_invariants` is False where acknowledged records may
    be lost on purpose."""
    with World(seed) as world:
        cluster = SimulatedCluster(world, brokers=brokers, config=config)
        stage = Stage(world, cluster)
        invariants = Invariants(cluster)
        if keeps_invariants:
            world.loop.observer = invariants.observe

        async def run() -> None:
            await cluster.start()
            stage.open()
            await script(stage)
            stage.client.close()

        with invariants.judge.judging() if keeps_invariants else contextlib.nullcontext():
            world.run(run(), limit_s=limit_s)
        if keeps_invariants:
            invariants.check_ends()
        assert world.errors == []

"""No change of leaders that could wait happens while a broker in question starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from proving.simulation import World
from proving.simulation.cluster import SimulatedCluster
from rayq.actors.controller.controller import BALANCE_INTERVAL_S
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ProducerConfig
from rayq.records import TopicPartition

AWAY_S = 1.5
"""How long a killed broker takes to start again."""
HUNG_S = 2.5
"""Shorter than a session."""


class Stage:
    """A simulated cluster, and a client that writes to `t-0` while `script` goes on."""

    def __init__(self, world: World, brokers: int) -> None:
        self.cluster = SimulatedCluster(world, brokers=brokers)
        self.world = world
        self.acknowledged_s: list[float] = []
        self.started_s = 0.0

    def leader(self) -> int | None:
        state = next(iter(self.cluster.brokers.values())).metadata.state
        return next(iter(state.topics.values())).partitions[0].value.leader

    async def run(self, script: Callable[[AsyncAdmin], Awaitable[None]]) -> None:
        cluster = self.cluster
        await cluster.start()
        self.started_s = self.world.loop.time()
        process = self.world.host("client").process("client")

        async def produce_while_it_runs() -> None:
            client = Client(
                process.environment, cluster.client_identity, cluster.endpoints, cluster.config
            )
            admin = AsyncAdmin(client)
            await admin.create_topic("t", 1, 3)
            producer = AsyncProducer(client, ProducerConfig())
            running = asyncio.ensure_future(script(admin))
            while not running.done():
                await (await producer.send("t", b"v"))
                self.acknowledged_s.append(self.world.loop.time())
                await asyncio.sleep(0.02)
            await running
            await producer.close()

        await process.run(produce_while_it_runs())
        assert self.world.errors == []

    async def longest_pause_s(
        self, number: int, until: Callable[[], bool], *, hangs: bool = False
    ) -> float:
        """A broker's process is killed, or hangs, for a while; then the leadership moves. The
        longest time without an acknowledgement."""
        away_s = self.world.loop.time()
        process = self.cluster.broker_processes[number]
        if hangs:
            process.pause()
            await asyncio.sleep(HUNG_S)
            process.resume()
        else:
            process.kill()
            await asyncio.sleep(AWAY_S)
            self.cluster.start_broker(number)
        await self.cluster.wait_until(until, "the leadership to move")
        await asyncio.sleep(0.5)
        within_s = [one for one in self.acknowledged_s if one > away_s]
        return max(
            later - sooner
            for sooner, later in pairwise([away_s, *within_s, self.world.loop.time()])
        )


@pytest.mark.parametrize(
    ("before_s", "hangs"), [(0.95, False), (0.65, False), (0.35, False), (0.05, False), (1.6, True)]
)
def test_no_write_waits_for_a_broker_that_is_just_away(before_s: float, hangs: bool) -> None:
    """A follower without its broker does not hear of a new leader. Fails where leadership goes back
    to the preferred replica in the time in which the broker starts again."""

    async def script(_: AsyncAdmin) -> None:
        await cluster.wait_until(lambda: len(stage.acknowledged_s) > 10, "the first records")
        preferred = stage.leader()
        assert preferred is not None
        for replica in cluster.replica_processes(preferred):
            replica.kill()
        await cluster.wait_until(lambda: stage.leader() not in (None, preferred), "another leader")
        kill_s = stage.started_s + BALANCE_INTERVAL_S + 0.25 - before_s
        await asyncio.sleep(kill_s - world.loop.time())
        leader = stage.leader()
        assert leader != preferred
        follower = next(one for one in cluster.brokers if one not in (preferred, leader))
        pause_s = await stage.longest_pause_s(
            follower, lambda: stage.leader() == preferred, hangs=hangs
        )
        assert pause_s < 0.5

    with World(1) as world:
        stage = Stage(world, brokers=3)
        cluster = stage.cluster
        world.run(stage.run(script), limit_s=60)


def test_no_write_waits_for_a_move_that_ends_while_a_broker_is_just_away() -> None:
    """The same of a move that takes the leadership to another broker."""

    async def script(admin: AsyncAdmin) -> None:
        await cluster.wait_until(lambda: len(stage.acknowledged_s) > 10, "the first records")
        state = next(iter(cluster.brokers.values())).metadata.state
        leader, other, follower = next(iter(state.topics.values())).partitions[0].value.replicas
        assert stage.leader() == leader
        (new,) = set(cluster.brokers) - {leader, other, follower}
        target = {TopicPartition("t", 0): [new, other, follower]}
        await admin.reassign_partitions(target, wait=False)
        assert stage.leader() == leader
        assert await stage.longest_pause_s(follower, lambda: stage.leader() == new) < 0.5

    with World(1) as world:
        stage = Stage(world, brokers=4)
        cluster = stage.cluster
        world.run(stage.run(script), limit_s=60)

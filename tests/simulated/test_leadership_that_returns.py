"""Leadership goes back to the preferred replica, and no write waits for it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from proving.simulation import World
from proving.simulation.cluster import SimulatedCluster
from rayq.actors.controller.controller import BALANCE_INTERVAL_S
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ProducerConfig

AWAY_S = 1.5


@pytest.mark.parametrize("before_s", [0.95, 0.65, 0.35, 0.05])
def test_no_write_waits_for_a_broker_that_is_just_away(before_s: float) -> None:
    """A follower without its broker does not hear of a new leader. Fails where leadership moves in
    the time in which the broker starts again: writes then wait for that broker."""
    with World(1) as world:
        cluster = SimulatedCluster(world)
        world.run(_script(world, cluster, BALANCE_INTERVAL_S + 0.25 - before_s), limit_s=60)
        assert world.errors == []


async def _script(world: World, cluster: SimulatedCluster, killed_s: float) -> None:
    await cluster.start()
    started_s = world.loop.time()
    process = world.host("client").process("client")
    acknowledged_s: list[float] = []

    def leader() -> int | None:
        state = next(iter(cluster.brokers.values())).metadata.state
        return next(iter(state.topics.values())).partitions[0].value.leader

    async def produce() -> None:
        client = Client(
            process.environment, cluster.client_identity, cluster.endpoints, cluster.config
        )
        await AsyncAdmin(client).create_topic("t", 1, 3)
        producer = AsyncProducer(client, ProducerConfig())
        while world.loop.time() < started_s + killed_s + AWAY_S + BALANCE_INTERVAL_S:
            await (await producer.send("t", b"v"))
            acknowledged_s.append(world.loop.time())
            await asyncio.sleep(0.02)
        await producer.close()

    async def break_things() -> None:
        await cluster.wait_until(lambda: len(acknowledged_s) > 10, "the first records")
        preferred = leader()
        assert preferred is not None
        for replica in cluster.replica_processes(preferred):
            replica.kill()
        await cluster.wait_until(lambda: leader() not in (None, preferred), "another leader")
        await asyncio.sleep(started_s + killed_s - world.loop.time())
        assert leader() != preferred
        follower = next(one for one in cluster.brokers if one not in (preferred, leader()))
        away_s = world.loop.time()
        cluster.kill_broker(follower)
        await asyncio.sleep(AWAY_S)
        cluster.start_broker(follower)
        await cluster.wait_until(lambda: leader() == preferred, "the leadership to return")
        await asyncio.sleep(0.5)
        now_s = world.loop.time()
        times_s = [away_s, *(one for one in acknowledged_s if one > away_s), now_s]
        assert max(later - sooner for sooner, later in pairwise(times_s)) < 0.5

    await asyncio.gather(process.run(produce()), break_things())

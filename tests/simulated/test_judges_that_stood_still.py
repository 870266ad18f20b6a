"""Judges that stood still, who do not judge by that time: an object server its broker, a consumer
its pool, and a pool its consumers (docs/protocol.md, rule 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq.actors.objects import object_server
from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import PoolSpec
from rayq.config import PoolConfig
from rayq.errors import NotEnoughResourcesError, OverloadedError
from rayq.pools.member import LEASE_S, Member, MemberReport
from rayq.pools.running_pool import RunningPool
from rayq.runtime.local_runtime import wait_until
from tests.simulated.test_object_server import Node

STOOD_STILL_S = 2 * LEASE_S
CONFIG = PoolConfig(max_poll_interval_ms=30_000)
SPEC = PoolSpec(name="pool", topic="t", group="g", queue=None, config=CONFIG)


class Consumer(Member):
    """A consumer that only looks whether its pool is there."""

    async def _consume(self) -> None:
        while self._is_going_on:
            await self._sleep(0.5)
            await self._check_lease()


async def nothing() -> None: ...


def judging(script: Callable[[World, Process], Coroutine[Any, Any, None]]) -> None:
    with World(seed=1) as world:
        steering = world.host("machine").process("steering")
        world.run(steering.run(script(world, steering)))
        assert world.errors == []


async def stand_still(process: Process, seconds: float) -> None:
    process.pause()
    await asyncio.sleep(seconds)
    process.resume()


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_consumer_that_stood_still_ends_only_without_its_pool(is_asked: bool) -> None:
    async def script(world: World, steering: Process) -> None:
        process = world.host("node").process("consumer")
        handler: Any = SimpleNamespace(make=nothing, close=nothing)
        consumer = process.call(lambda: Consumer(process.environment, SPEC, handler))

        async def ask() -> None:
            while is_asked:
                consumer.report()
                await asyncio.sleep(1)

        running = process.start(consumer.run())
        process.start(ask())
        await asyncio.sleep(LEASE_S / 2 + 0.2)  # It looks before it is asked again.
        await stand_still(process, STOOD_STILL_S)
        await asyncio.sleep(LEASE_S / 4)
        assert not running.done()
        await asyncio.sleep(LEASE_S / 2)
        assert running.done() is not is_asked
        if is_asked:
            consumer.drain()
            await asyncio.sleep(1)

    judging(script)


class Handle:
    """A consumer that answers after a while."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.late_s = 0.1
        self.is_killed = False

    async def report(self) -> MemberReport:
        await asyncio.sleep(self.late_s)
        return MemberReport("node", 1, [], 0, 0.0, 0, 0, 0.0, None, False, None)

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_pool_that_stood_still_kills_only_a_consumer_that_is_silent(is_silent: bool) -> None:
    async def script(world: World, steering: Process) -> None:
        process = world.host("node").process("pool")
        handle = Handle(process.environment)

        async def members() -> dict[str, Any]:
            return {"one": handle}

        async def measure(*, has_consumers: bool) -> list[int]:
            return []

        async def start_member(name: str) -> Any:
            raise NotEnoughResourcesError("There is no room for another one.")

        hosting: Any = SimpleNamespace(find_members=members, start_member=start_member)
        progress = SimpleNamespace(measure=measure, close=nothing, partitions={})
        client = SimpleNamespace(addresses=list)
        cluster = SimpleNamespace(
            name="c", new_client=lambda: client, add_addresses=lambda at: None
        )
        pool = process.call(
            lambda: RunningPool(process.environment, cast(Cluster, cluster), SPEC, hosting)
        )
        cast(Any, pool)._measuring = lambda client: progress
        process.call(pool.start)
        await asyncio.sleep(10)
        handle.late_s = 10_000 if is_silent else 2.0
        member = pool._members["one"]
        await wait_until(lambda: member.asking is None, 5, "the report")
        await wait_until(lambda: member.asking is not None, 5, "the next question")
        await asyncio.sleep(0.2)
        await stand_still(process, STOOD_STILL_S)
        await asyncio.sleep(10)
        assert not handle.is_killed
        await asyncio.sleep(30)
        assert handle.is_killed is is_silent
        await process.run(pool.stop(False, 1))

    judging(script)


def test_an_object_server_that_stood_still_does_not_end_without_its_broker() -> None:
    class BusyNode(Node):
        is_busy = False

        def _broker_answers(self, peer: object, request: Any, payload: memoryview) -> Any:
            if self.is_busy:
                self.is_busy = False
                raise OverloadedError("Not now.")
            return super()._broker_answers(peer, request, payload)

    node = BusyNode()

    async def script() -> None:
        task = node.start()
        await node.until_attached()
        node.is_busy = True
        await stand_still(node.process, 2 * object_server.ORPHAN_S)
        since = len(node.attached)
        await asyncio.sleep(10)
        assert not task.done()
        assert len(node.attached) > since

    node.run(script(), starts=False)

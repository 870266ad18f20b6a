"""Controller, three brokers, replicas and a producer run together in the simulated world."""

from __future__ import annotations

import asyncio

import pytest

from proving.simulation import Process, World
from proving.simulation.cluster import SimulatedCluster
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig, ProducerConfig


@pytest.mark.parametrize("seed", range(3))
def test_nothing_acknowledged_is_lost_when_leader_controller_and_power_go(seed: int) -> None:
    with World(seed) as world:
        cluster = SimulatedCluster(world)
        world.run(_script(world, cluster), limit_s=300)
        assert world.errors == []


def test_a_broker_that_answers_the_first_controller_late_is_told_of_it() -> None:
    """The broker knows no other broker: only the controller can tell it."""
    with World(1) as world:
        cluster = SimulatedCluster(world)
        cluster.peers = []
        world.network.cut([cluster.controller_host], [cluster.hosts[2]])

        async def script() -> None:
            started = asyncio.ensure_future(cluster.start())
            await cluster.wait_until(
                lambda: [one.is_registered for one in cluster.brokers.values()].count(True) == 2,
                "the others to register",
            )
            world.network.heal()
            await started

        world.run(script(), limit_s=30)
        assert world.errors == []


@pytest.mark.parametrize("brokers", [2, 3])
def test_no_broker_of_a_new_cluster_stands_in_for_a_controller_that_starts_late(
    brokers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would know no other broker, and the controller, which knows all, would leave it in peace:
    the others would never hear of any controller."""
    with World(1) as world:
        cluster = SimulatedCluster(world, brokers=brokers)
        cluster.peers = []
        start = cluster.start_controller
        monkeypatch.setattr(cluster, "start_controller", lambda: world.loop.call_later(15, start))
        world.run(cluster.start(), limit_s=25)
        assert world.errors == []


async def _script(world: World, cluster: SimulatedCluster) -> None:
    await cluster.start()
    process = world.host("client").process("client")
    acknowledged: dict[tuple[int, int], bytes] = {}

    async def produce() -> None:
        client = Client(
            process.environment, cluster.client_identity, cluster.endpoints, cluster.config
        )
        await AsyncAdmin(client).create_topic("t", 2, 3)
        producer = AsyncProducer(client, ProducerConfig())

        async def send(number: int) -> None:
            value = b"%d" % number
            future = await producer.send("t", value)
            metadata = await future
            acknowledged[metadata.partition, metadata.offset] = value

        for start in range(0, 300, 20):
            await asyncio.gather(*(send(number) for number in range(start, start + 20)))
            await asyncio.sleep(0.2)
        await producer.close()

    async def break_things() -> None:
        await cluster.wait_until(lambda: len(acknowledged) > 60, "the first records")
        leader = _leader(cluster)
        for replica in cluster.replica_processes(leader):
            replica.kill()
        await cluster.wait_until(lambda: len(acknowledged) > 140, "records after a leader's end")
        cluster.kill_controller()
        await cluster.wait_until(lambda: len(acknowledged) > 200, "records without controller")
        cluster.hosts[leader].power_loss()
        await asyncio.sleep(1)
        cluster.start_broker(leader)

    await asyncio.gather(process.run(produce()), break_things())
    assert len(acknowledged) == 300
    await cluster.wait_until(lambda: len(cluster.brokers) == 3, "the broker to be back")
    assert await process.run(_read_all(cluster, process)) == acknowledged


async def _read_all(cluster: SimulatedCluster, process: Process) -> dict[tuple[int, int], bytes]:
    client = Client(
        process.environment, cluster.client_identity, cluster.endpoints, cluster.config
    )
    config = ConsumerConfig(auto_offset_reset="earliest")
    found: dict[tuple[int, int], bytes] = {}
    async with AsyncConsumer(client, config, ["t"], client.close) as consumer:
        while len(found) < 300:
            records = await consumer.poll(timeout_s=30)
            assert records, f"only {len(found)} records were found"
            for record in records:
                assert record.value is not None
                assert (record.partition, record.offset) not in found
                found[record.partition, record.offset] = record.value
    return found


def _leader(cluster: SimulatedCluster) -> int:
    state = next(iter(cluster.brokers.values())).metadata.state
    leader = next(iter(state.topics.values())).partitions[0].value.leader
    assert leader is not None
    return leader

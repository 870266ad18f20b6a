"""A broker that comes back with an empty disk copies a compacted log of many segments."""

from __future__ import annotations

from proving.simulation import World
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.invariants import Invariants
from proving.simulation.server_view import open_log_of, role_of
from rayq.actors.replica.leader import Leader
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ClusterConfig, ProducerConfig
from rayq.storage.log import Log

KEYS = 200


def test_a_copy_that_takes_many_fetches_passes_below_the_horizon_of_its_leader() -> None:
    with World(1) as world:
        cluster = SimulatedCluster(
            world, config=ClusterConfig(compaction_check_interval_ms=500, flush_checkpoint_bytes=1)
        )
        invariants = Invariants(cluster)
        world.loop.observer = invariants.observe
        world.run(_script(world, cluster), limit_s=300)
        invariants.check_ends()
        assert world.errors == []


async def _script(world: World, cluster: SimulatedCluster) -> None:
    await cluster.start()
    process = world.host("client").process("client")

    async def produce() -> None:
        client = Client(
            process.environment, cluster.client_identity, cluster.endpoints, cluster.config
        )
        await AsyncAdmin(client).create_topic(
            "t",
            1,
            3,
            cleanup_policy="compact",
            segment_bytes=2048,
            min_cleanable_dirty_ratio=0.01,
            delete_retention_ms=100,
        )
        producer = AsyncProducer(client, ProducerConfig(batch_size=256, compression_type="none"))
        for number in range(KEYS):
            await producer.send("t", b"value", key=b"%d" % number)
        await producer.send("t", None, key=b"0")
        for number in range(KEYS):
            await producer.send("t", b"value", key=b"other-%d" % number)
        await producer.close()
        client.close()

    await process.run(produce())
    await cluster.wait_until(
        lambda: all(log.tombstone_horizon > KEYS for log in _logs(cluster)),
        "the tombstone to go everywhere",
    )
    assert all(len(log.local_segments()) > 3 for log in _logs(cluster))
    number = next(
        number
        for number in range(3)
        for process, replica in cluster.live_replicas()
        if process.host is cluster.hosts[number] and not isinstance(role_of(replica), Leader)
    )
    cluster.hosts[number].power_loss()
    cluster.format_empty_disk(number)
    cluster.start_broker(number)
    await cluster.wait_until(
        lambda: cluster.is_whole() and cluster.is_replicated(), "the empty disk to be filled"
    )


def _logs(cluster: SimulatedCluster) -> list[Log]:
    logs = [open_log_of(replica) for _, replica in cluster.live_replicas()]
    return [log for log in logs if log is not None]

"""A replica leaves a broker and comes back, and its leader hears of both at once.

The process that hosted it lives on, because it hosts another replica. If it hosted this one again,
in a new directory, the leader would count what the old replica had flushed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest

from proving.simulation import World
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.invariants import InvariantError, Invariants
from proving.simulation.invariants_moves import MoveInvariants
from rayq.actors.broker.replica_processes import ReplicaProcesses
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ClusterConfig, ProducerConfig
from rayq.core.cluster import broker_changes
from rayq.core.cluster.records import PartitionValue
from rayq.core.partition.state import PartitionState
from rayq.records import TopicPartition

RECORDS = 50


def test_a_replica_that_comes_back_counts_for_what_it_has_now() -> None:
    run()


def test_counting_what_it_had_before_would_be_found() -> None:
    with followers_kept_over_moves(), pytest.raises(InvariantError, match="has flushed 0"):
        run()


def run() -> None:
    with World(1) as world:
        cluster = SimulatedCluster(
            world,
            brokers=4,
            config=ClusterConfig(
                replicas_per_process=4, session_timeout_ms=8_000, replica_lag_time_max_ms=60_000
            ),
        )
        invariants = Invariants(cluster)
        moves = MoveInvariants(cluster)
        moves.watch(invariants)
        world.loop.observer = invariants.observe
        world.run(_script(world, cluster, moves), limit_s=120)
        invariants.check_ends()
        assert world.errors == []
        assert moves.completed == 2


async def _script(world: World, cluster: SimulatedCluster, moves: MoveInvariants) -> None:
    await cluster.start()
    process = world.host("client").process("client")
    client = Client(
        process.environment, cluster.client_identity, cluster.endpoints, cluster.config
    )
    admin = AsyncAdmin(client)
    place = TopicPartition("t", 0)

    def value() -> PartitionValue:
        state = moves.state
        return state.topics[state.topic_ids["t"]].partitions[0].value

    async def begin() -> None:
        await admin.create_topic("other", 1, 4)  # its replicas keep each broker's one process alive
        await admin.create_topic("t", 1, 3)
        producer = AsyncProducer(client, ProducerConfig())
        for number in range(RECORDS):
            await producer.send("t", b"%d" % number)
        await producer.close()

    await process.run(begin())
    before = value()
    leader, stays, leaves = before.replicas
    assert before.leader == leader
    (joins,) = set(range(4)) - set(before.replicas)
    directory = f"/data/broker-{leaves}/t-0"
    network, hosts = world.network, cluster.hosts
    disk = hosts[leaves].disk

    async def move(target: list[int]) -> None:
        await admin.reassign_partitions({place: target}, wait=False)

    def known_to_leader() -> bool:
        state = cluster.brokers[leader].metadata.state
        return joins in state.topics[state.topic_ids["t"]].partitions[0].processes

    def back_for_leader() -> bool:
        state = cluster.brokers[leader].metadata.state
        partition = state.topics[state.topic_ids["t"]].partitions[0]
        return leaves in partition.value.target and leaves in partition.processes

    network.cut([hosts[joins]], [hosts[leader]])
    await process.run(move([leader, stays, joins]))
    await cluster.wait_until(known_to_leader, "the leader to hear of the new replica", limit_s=5)
    # From now on the leader is heard, and proposes that the new replica joins, but does not hear
    # the answer.
    network.cut([cluster.controller_host], [hosts[leader]], both_ways=False)
    network.heal([hosts[joins]], [hosts[leader]])
    await cluster.wait_until(lambda: not value().target, "the move to be over", limit_s=3)
    await cluster.wait_until(
        lambda: disk.find(directory) is None, "the directory to be removed", limit_s=3
    )
    network.cut([hosts[leaves]], [hosts[leader]])  # so that the replica comes back empty
    await process.run(move([leader, stays, leaves]))
    await cluster.wait_until(
        lambda: leaves in moves.state.topics[moves.state.topic_ids["t"]].partitions[0].processes,
        "the replica to be back",
        limit_s=3,
    )
    network.heal([cluster.controller_host], [hosts[leader]])
    await cluster.wait_until(back_for_leader, "the leader to hear of all that", limit_s=20)
    await asyncio.sleep(2.0)
    network.heal([hosts[leaves]], [hosts[leader]])
    await cluster.wait_until(lambda: not value().target, "the move back to be over", limit_s=20)
    await cluster.wait_until(
        lambda: cluster.is_whole() and cluster.is_replicated(), "all replicas to have everything"
    )
    client.close()


@contextlib.contextmanager
def followers_kept_over_moves() -> Iterator[None]:
    """Takes out the code that keeps two replicas of one process apart: the process hosts a
    partition again, in a new directory, and its leader has not forgotten the first."""
    committed = PartitionState.committed
    register = broker_changes.register_replicas

    def kept(self: Any, epoch: int, isr: Any, processes: Any, min_insync: int) -> None:
        followers = dict(self._followers)
        committed(self, epoch, isr, processes, min_insync)
        self._followers = {**followers, **self._followers}

    def trusting(state: Any, broker: int, reports: Any, heard: Any) -> Any:
        reports = [msgspec.structs.replace(each, partition_epoch=1 << 30) for each in reports]
        return register(state, broker, reports, heard)

    class _Forgetful(set[Any]):
        def add(self, item: Any) -> None:
            pass

    assign = ReplicaProcesses.assign

    def forgets(self: Any, partitions: Any) -> None:
        assign(self, partitions)
        for host in self:
            host.let_go = _Forgetful()

    apply = ReplicaHost._apply

    def hosts_again(self: Any, assignment: Any) -> None:
        self._let_go.clear()
        apply(self, assignment)

    patches: list[tuple[Any, str, Any]] = [
        (ReplicaHost, "_apply", hosts_again),
        (PartitionState, "committed", kept),
        (broker_changes, "register_replicas", trusting),
        (ReplicaProcesses, "assign", forgets),
    ]
    with contextlib.ExitStack() as stack:
        for target, attribute, instead in patches:
            stack.enter_context(mock.patch.object(target, attribute, instead))
        yield

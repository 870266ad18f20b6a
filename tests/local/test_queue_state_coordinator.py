"""Keepers of queues, through the journals of leaders that the test plays."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from rayq import messages
from rayq.actors.peers import Peers
from rayq.actors.queues import state_coordinator
from rayq.actors.queues.persister import QueueStatePersister
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.core.queues import queue_states
from rayq.core.queues.queue_states import KeptRecord, queue_state_partition
from rayq.errors import (
    CoordinatorLoadingError,
    QueueFencedError,
    QueueLimitError,
    RayqError,
)
from rayq.storage.data_directory import read_secret
from rayq.testing import LocalCluster
from rayq.wire.authentication import Identity
from rayq.wire.pool import ConnectionPool
from tests.local.queue_support import Raw, running
from tests.local.support import FAST, leader_of, wait_in_sync

KEEPERS = "__queue_state"
PATIENCE_S = 60.0
PARTITION = 100
"""A data partition that the topic of a queue does not have: only the test leads it."""
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state_coordinator, "DELETED_CHECK_INTERVAL_S", 0.1)
        directory = tmp_path_factory.mktemp("keepers")
        with LocalCluster(brokers=3, data_dir=directory, **FAST) as cluster:
            yield cluster


class Leaders:
    """What the process of a data partition's leader has at hand, and a queue of the test's own."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.environment = system_environment(None)
        secret = read_secret(self.environment.disk, f"{cluster.data_dir}/broker-0")
        identity = Identity(role="server", key=secret, cluster_id=None, broker=0)
        self.pool = ConnectionPool(self.environment, identity, ClusterConfig())
        brokers = cluster.admin.describe_cluster().brokers
        self._broker = next((one.host, one.port) for one in brokers if one.broker == 0)
        self.peers = Peers(self.environment, self.pool, ask_broker=self.ask)
        self.queue = f"kept-{next(_numbers)}"
        self.queue_id = ""

    async def ask(self, request: messages.Request[messages.ResponseT]) -> messages.ResponseT:
        answer, _ = await self.pool.request(*self._broker, request, timeout_s=30)
        return answer

    async def create(self, **fields: Any) -> messages.QueueMetadata:
        changed = await self.ask(
            messages.CreateQueue(
                name=self.queue, topic=self.queue, partitions=2, config={}, **fields
            )
        )
        found = await self.described(changed.version)
        assert found is not None
        self.queue_id = found.queue_id
        return found

    async def described(self, version: int) -> messages.QueueMetadata | None:
        answer = await self.ask(
            messages.DescribeQueues([self.queue], version_min=version, wait_ms=30_000)
        )
        assert answer.version >= version
        return answer.queues[0] if answer.queues else None

    def persister(self, *, epoch: int = 1, partition: int = PARTITION) -> QueueStatePersister:
        return QueueStatePersister(
            self.environment,
            self.peers,
            queue_id=self.queue_id,
            data_partition=partition,
            data_leader_epoch=epoch,
        )

    async def kept(self, epoch: int) -> list[KeptRecord]:
        """What a leader of this epoch finds."""
        return await self.persister(epoch=epoch).open()

    async def kill_keeper(self) -> None:
        partition = queue_state_partition(self.queue_id, 4)

        def kill() -> None:
            wait_in_sync(self.cluster, KEEPERS, partition=partition)
            leader = leader_of(self.cluster, KEEPERS, partition)
            self.cluster.kill_replica(KEEPERS, partition, leader)

        await asyncio.to_thread(kill)


def run(cluster: LocalCluster, story: Callable[[Leaders], Awaitable[None]]) -> None:
    async def play() -> None:
        leaders = Leaders(cluster)
        try:
            await leaders.create()
            await asyncio.wait_for(story(leaders), PATIENCE_S)
        finally:
            leaders.pool.close()

    asyncio.run(play())


def test_what_is_written_is_there_for_the_next_leader_in_pages(
    servers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_states, "PAGE_BYTES", 1000)

    async def story(leaders: Leaders) -> None:
        first = leaders.persister()
        assert await first.open() == []
        records = [(b"block-%03d" % number, b"v" * number) for number in range(50)]
        await first.write(records)
        await first.write([(b"block-000", b"another"), (b"block-001", None)])
        expected = [(b"block-000", b"another"), *records[2:]]
        assert await leaders.kept(epoch=2) == expected
        assert await leaders.persister(partition=PARTITION + 1).open() == []

    run(servers, story)


def test_only_the_newest_opening_writes(servers: LocalCluster) -> None:
    async def story(leaders: Leaders) -> None:
        old, new = leaders.persister(epoch=3), leaders.persister(epoch=4)
        await old.open()
        await old.write([(b"head", b"old")])
        await new.open()
        assert new.fence > old.fence
        with pytest.raises(QueueFencedError, match="another leader"):
            await old.write([(b"head", b"held back")])
        with pytest.raises(QueueFencedError, match="epoch 3?"):
            await leaders.persister(epoch=3).open()
        again = leaders.persister(epoch=4)  # The same leader, after an opening that it gave up.
        assert await again.open() == [(b"head", b"old")]
        with pytest.raises(QueueFencedError):
            await new.write([(b"head", b"given up")])
        await again.write([(b"head", b"new")])
        assert await leaders.kept(epoch=4) == [(b"head", b"new")]

    run(servers, story)


def test_a_write_that_was_held_back_undoes_nothing(servers: LocalCluster) -> None:
    async def story(leaders: Leaders) -> None:
        persister = leaders.persister()
        await persister.open()
        await persister.write([(b"head", b"1")])
        await persister.write([(b"head", b"2")])

        async def write(sequence: int, value: bytes) -> None:
            await leaders.peers.ask_queue_state(
                leaders.queue_id,
                lambda *at: messages.WriteQueueState(
                    *at, leaders.queue_id, PARTITION, persister.fence, sequence
                ),
                queue_states.pack([(b"head", value)]),
            )

        with pytest.raises(QueueFencedError, match="held back"):
            await write(1, b"1")
        await write(2, b"2")  # A repetition, whose first answer was lost.
        assert await leaders.kept(epoch=2) == [(b"head", b"2")]

    run(servers, story)


def test_a_leader_does_not_notice_that_its_keeper_was_killed(servers: LocalCluster) -> None:
    async def story(leaders: Leaders) -> None:
        persister = leaders.persister()
        await persister.open()
        for number in range(3):
            await persister.write([(b"%d" % number, b"v")])
            await leaders.kill_keeper()
        await persister.write([(b"last", b"v")])
        assert await leaders.kept(epoch=1) == [(b"0", b"v"), (b"1", b"v"), (b"2", b"v"), (b"last", b"v")]
        with pytest.raises(QueueFencedError):
            await persister.write([(b"last", b"fenced")])

    run(servers, story)


@pytest.mark.parametrize("what", ["queue", "topic"])
def test_a_deleted_queue_leaves_nothing(servers: LocalCluster, what: str) -> None:
    async def story(leaders: Leaders) -> None:
        persister, sister = leaders.persister(), leaders.persister(partition=PARTITION + 1)
        for one in persister, sister:
            await one.open()
            await one.write([(b"head", b"v")])
        request: Any = messages.DeleteQueue(name=leaders.queue)
        if what == "topic":
            request = messages.DeleteTopic(leaders.queue)
        changed = await leaders.ask(request)
        assert await leaders.described(changed.version) is None
        for one in persister, sister:
            with pytest.raises(QueueFencedError, match="deleted"):
                while True:  # Until the keeper has heard of it.
                    await one.write([(b"head", b"v")])
                    await asyncio.sleep(0.05)
        assert await leaders.kept(epoch=1) == []

    run(servers, story)


class Broker:
    """A broker whose metadata have a version and these queues; the controller is ahead of it."""

    def __init__(self, version: int, queue_ids: set[str], *, newest: int, catches_up: set[str]) -> None:
        self.version, self.queue_ids = version, queue_ids
        self.newest, self.after = newest, catches_up

    async def ask(self, request: Any) -> Any:
        if isinstance(request, messages.ConfirmMetadata):
            return messages.ChangeResponse(self.newest)
        if self.version < request.version_min and self.after:
            self.version, self.queue_ids = self.newest, self.after
        found = sorted(self.queue_ids & set(request.queue_ids))
        return messages.DescribeQueuesResponse(
            self.version, [messages.QueueMetadata(one, one, "T", "t", {}, 1) for one in found]
        )


def test_a_queue_of_which_a_broker_has_not_heard_is_not_taken_for_deleted() -> None:
    def deleted(broker: Broker) -> set[str]:
        return asyncio.run(state_coordinator.deleted_queues({"a", "b"}, broker.ask))

    assert deleted(Broker(9, {"a", "b"}, newest=9, catches_up=set())) == set()
    assert deleted(Broker(5, {"a"}, newest=9, catches_up={"a", "b"})) == set()
    assert deleted(Broker(5, {"a"}, newest=9, catches_up={"b"})) == set()
    assert deleted(Broker(9, {"a"}, newest=9, catches_up=set())) == {"b"}
    with pytest.raises(CoordinatorLoadingError):
        deleted(Broker(5, {"a"}, newest=9, catches_up=set()))


def test_a_full_keeper_says_so_and_takes_what_makes_it_smaller(
    servers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_states, "HELD_BYTES_MAX", 100_000)
    monkeypatch.setattr(queue_states, "RESERVE_BYTES", 100_000)

    async def story(leaders: Leaders) -> None:
        persister = leaders.persister()
        await persister.open()
        await persister.write([(b"1", bytes(50_000))])
        assert not persister.is_full
        await persister.write([(b"2", bytes(100_000))])
        assert persister.is_full
        with pytest.raises(QueueLimitError, match="settle"):
            await persister.write([(b"3", bytes(100_000))])
        await persister.write([(b"2", bytes(10_000))])
        assert not persister.is_full
        await persister.write([(b"1", None), (b"2", None)])

    run(servers, story)


def test_a_keeper_refuses_what_no_leader_sends(servers: LocalCluster) -> None:
    async def story(leaders: Leaders) -> None:
        persister = leaders.persister()
        await persister.open()

        async def write(payload: bytes) -> None:
            await leaders.peers.ask_queue_state(
                leaders.queue_id,
                lambda *at: messages.WriteQueueState(*at, leaders.queue_id, PARTITION, persister.fence, 1),
                payload,
            )

        for payload in (b"", b"\xc1", queue_states.pack([(b"", b"v")])):
            with pytest.raises(RayqError, match="payload|empty key"):
                await write(payload)
        assert await leaders.kept(epoch=1) == []

    run(servers, story)


def test_nothing_is_given_out_while_the_keeper_is_full(
    servers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"kept-{next(_numbers)}"
    servers.admin.create_queue(name)
    with servers.producer() as producer:
        for number in range(10):
            producer.send(name, b"%d" % number)
    consumer = Raw(servers, name)

    async def story() -> None:
        first = await consumer.take(1)
        with monkeypatch.context() as full:
            full.setattr(queue_states, "HELD_BYTES_MAX", 0)
            full.setattr(queue_states, "RESERVE_BYTES", 0)
            assert await consumer.settle(first, acks=first.locks) == []  # Smaller than before.
            taken = []
            while "full" not in ((await consumer.describe()).trouble or "") or not taken:
                taken.append(await consumer.take(1, wait_ms=10))
            assert (await consumer.take(1, wait_ms=100)).offsets == []
            # Once nothing is locked a few are: else what is held would never become less.
            held = [one for one in taken if one.offsets]
            for one in held:
                assert await consumer.settle(one, acks=one.locks) == []
            assert (await consumer.take(1, wait_ms=30_000)).offsets
        assert (await consumer.take(1, wait_ms=30_000)).offsets
        consumer.close()

    running(story)

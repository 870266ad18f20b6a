"""Coordinators of transactions by their messages alone, without rayq's producer. Their requests for
markers go through the test, which holds them back where it wants to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rayq import messages
from rayq.actors import peers
from rayq.actors.replica.leader_transactions import LeaderTransactions
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.client.metadata import LeaderAndEpoch
from rayq.config import ClusterConfig
from rayq.core.transactions import changes as transaction_changes
from rayq.errors import (
    AlreadyCommittedError,
    AuthenticationError,
    InvalidRequestError,
    InvalidTopicError,
    NotLeaderError,
    ProducerFencedError,
    TransactionEndedError,
)
from rayq.messages.transaction_ids import coordinator_of, coordinator_partition
from rayq.storage.batch import encode_batch
from rayq.storage.data_directory import read_secret
from rayq.testing import LocalCluster
from rayq.wire.authentication import Identity
from rayq.wire.tokens import key_of_token
from tests.local.support import FAST, leader_of, produce_raw, wait_in_sync

TOPIC = "__transaction_state"
_numbers = itertools.count(1)
Key = tuple[int, int]


class Markers:
    """The markers that leaders were asked for, as `(topic id, partition, family, epoch, commit)`.
    Those of partitions in `held` are refused."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, int, bool]] = []
        self.epochs: set[int] = set()
        self.held: set[int] = set()

    def take(self, request: messages.WriteMarker) -> None:
        if request.partition in self.held:
            raise NotLeaderError("held back by a test")
        key = (request.family, request.epoch)
        self.asked.append((request.topic_id, request.partition, *key, request.is_commit))
        self.epochs.add(request.coordinator_epoch)

    def of(self, key: Key) -> list[tuple[int, bool]]:
        return sorted({(one[1], one[4]) for one in self.asked if one[2:4] == key})


@pytest.fixture
def markers(monkeypatch: pytest.MonkeyPatch) -> Markers:
    taken = Markers()
    write_marker = LeaderTransactions.write_marker

    def write(leader: LeaderTransactions, request: messages.WriteMarker) -> Any:
        taken.take(request)
        return write_marker(leader, request)

    monkeypatch.setattr(LeaderTransactions, "write_marker", write)
    return taken


class Coordinators:
    """Asks the coordinators of a cluster, as a producer or (to join) as a leader does."""

    def __init__(self, cluster: LocalCluster, role: Any = "client") -> None:
        endpoints = [
            (one.host, one.port) for one in cluster.admin.describe_cluster().brokers if one.live
        ]
        environment = system_environment(None)
        if role == "server":
            key = read_secret(environment.disk, f"{cluster.data_dir}/broker-0")
        else:
            key = key_of_token(cluster.token)
        identity = Identity(role=role, key=key, cluster_id=None, broker=None)
        self.client = Client(environment, identity, endpoints, ClusterConfig())

    async def ask(self, kind: Callable[..., Any], partition: int, *arguments: Any) -> Any:
        def build(topic_id: str, leader: LeaderAndEpoch) -> Any:
            return kind(topic_id, partition, leader.epoch, *arguments)

        return await self.client.ask_leader(
            TOPIC, partition, build, timeout_s=60, attempt_timeout_s=5
        )

    async def of(self, kind: Callable[..., Any], name: str, *arguments: Any) -> Any:
        topic = await self.client.topic(TOPIC, timeout_s=60)
        partition = coordinator_partition(name, len(topic.partitions))
        return await self.ask(kind, partition, name, *arguments)


class Transactions:
    """One transactional id, as its producer and the leaders of its partitions see it."""

    def __init__(self, cluster: LocalCluster, producers: Coordinators, leaders: Coordinators) -> None:
        self.cluster = cluster
        self.producers, self.leaders = producers, leaders
        self.name = f"id-{next(_numbers)}"

    async def init(self, owner: str = "a", timeout_ms: int = 60_000) -> Key:
        answer = await self.producers.of(messages.InitProducer, self.name, owner, timeout_ms)
        return answer.family, answer.epoch

    async def join(self, key: Key, topic: str, *partitions: int) -> None:
        topic_id = (await self.producers.client.topic(topic, timeout_s=60)).topic_id
        for partition in partitions:
            await self.leaders.ask(
                messages.JoinTransaction, coordinator_of(key[0]), *key, topic_id, partition
            )

    async def end(
        self,
        key: Key,
        is_commit: bool = True,
        *,
        owner: str = "a",
        name: str | None = None,
        wait_ms: int = 30_000,
    ) -> messages.EndTransactionResponse:
        answer = await self.producers.of(
            messages.EndTransaction, self.name, owner, *key, is_commit, name, wait_ms
        )
        assert isinstance(answer, messages.EndTransactionResponse)
        return answer

    async def abort(self, key: Key) -> None:
        await self.producers.ask(messages.AbortTransaction, coordinator_of(key[0]), *key)

    async def outcome(self, key: Key) -> str:
        asked = messages.DescribeOutcome
        return str((await self.leaders.ask(asked, coordinator_of(key[0]), *key)).state)

    async def until_forgotten(self, *keys: Key) -> None:
        """Returns once all participants have their markers."""
        async with asyncio.timeout(60):
            for key in keys:
                # Each look takes a commit.
                while await self.outcome(key) not in messages.OUTCOMES_OVER:
                    pass

    async def describe(self) -> messages.DescribeTransactionResponse:
        answer = await self.producers.of(messages.DescribeTransaction, self.name)
        assert isinstance(answer, messages.DescribeTransactionResponse)
        return answer


@asynccontextmanager
async def transactions(cluster: LocalCluster) -> AsyncIterator[Transactions]:
    producers, leaders = Coordinators(cluster), Coordinators(cluster, "server")
    try:
        await producers.client.change(messages.EnsureTransactionsTopic(), timeout_s=60)
        yield Transactions(cluster, producers, leaders)
    finally:
        producers.client.close()
        leaders.client.close()
        await asyncio.sleep(0)


def run(cluster: LocalCluster, story: Callable[[Transactions], Awaitable[None]]) -> None:
    async def told() -> None:
        async with transactions(cluster) as of:
            await story(of)

    asyncio.run(told())


@pytest.fixture
def topic(cluster: LocalCluster) -> str:
    name = f"transactions-{next(_numbers)}"
    cluster.create_topic(name, partitions=3)
    return name


# --- a whole transaction --------------------------------------------------------------------------


@pytest.mark.parametrize("is_commit", [True, False])
def test_each_participant_gets_one_marker_and_no_other_partition(
    cluster: LocalCluster, topic: str, markers: Markers, is_commit: bool
) -> None:
    async def story(of: Transactions) -> None:
        key = await of.init()
        await of.join(key, topic, 0, 2, 2)
        assert await of.outcome(key) == "open"
        answer = await of.end(key, is_commit)
        assert answer == messages.EndTransactionResponse(is_commit, key[0], key[1] + 1, True)
        assert markers.of(key) == [(0, is_commit), (2, is_commit)]
        assert len([one for one in markers.asked if one[2:4] == key]) == 2
        assert await of.outcome(key) == ("committed" if is_commit else "aborted")
        assert await of.end(key, not is_commit) == answer
        with pytest.raises(TransactionEndedError):
            await of.join(key, topic, 1)
        committed = (await of.producers.client.topic(TOPIC, timeout_s=60)).partitions[0]
        assert markers.epochs <= {committed.leader_epoch}

    run(cluster, story)


def test_the_end_answers_in_time_where_a_participant_is_offline(
    cluster: LocalCluster, topic: str, markers: Markers
) -> None:
    async def story(of: Transactions) -> None:
        markers.held.add(1)
        key = await of.init()
        ended = []
        for _ in range(5):
            await of.join(key, topic, 0, 1)
            # Behind one that is not complete nobody waits: some partition cannot be reached.
            ending = of.end(key, wait_ms=60_000 if ended else 100)
            answer = await asyncio.wait_for(ending, 30)
            assert answer.is_committed and not answer.is_complete
            assert markers.of(key) in ([(0, True)], [])
            ended.append(key)
            key = (answer.family, answer.epoch)
        described = await of.describe()
        assert [one.epoch for one in described.transactions] == [one[1] for one in ended]
        assert {one.state for one in described.transactions} == {"committing"}
        joining = asyncio.create_task(of.join(key, topic, 0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(joining), 0.5)
        markers.held.clear()
        await joining
        await of.until_forgotten(*ended)
        assert (await of.end(ended[-1])).is_complete
        assert all(markers.of(one) == [(0, True), (1, True)] for one in ended)

    run(cluster, story)


def test_owners_names_and_operators(cluster: LocalCluster, topic: str) -> None:
    async def story(of: Transactions) -> None:
        first = await of.init()
        assert await of.init() == first
        answer = await of.end(first, name="n")
        key = (answer.family, answer.epoch)
        with pytest.raises(AlreadyCommittedError):
            await of.end(key, name="n")
        key = (await of.end(key, False)).family, key[1] + 1
        await of.join(key, topic, 0)
        for _ in range(2):
            await of.abort(key)
        assert not (await of.end(key)).is_committed
        following = await of.init("b" * 32)
        for late in (of.init("a"), of.end(following)):
            with pytest.raises(ProducerFencedError):
                await late
        await of.join(following, topic, 0, 1)
        listed = await of.producers.ask(messages.ListTransactions, 0)
        (summary,) = (one for one in listed.transactions if one.transactional_id == of.name)
        assert (summary.family, summary.epoch) == following
        assert (summary.state, summary.partitions) == ("open", 2) and summary.age_ms >= 0
        described = await of.describe()
        assert (described.owner, described.last_name) == ("b" * 8, "n"), "who has all can end it"
        assert [one[3:] for one in described.participants] == [(0, False), (1, False)]
        await of.end(following, owner="b" * 32)
        listed = await of.producers.ask(messages.ListTransactions, 0, "", True)
        (summary,) = (one for one in listed.transactions if one.transactional_id == of.name)
        assert (summary.state, summary.age_ms) == ("ready", None)

    run(cluster, story)


def test_ids_are_listed_in_pages(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(of: Transactions) -> None:
        for _ in range(3):
            of.name = f"{of.name}-more"
            await of.init()
        whole = await of.producers.ask(messages.ListTransactions, 0, "", True)
        assert whole.next_after is None
        monkeypatch.setattr(messages, "LISTED_IDS_MAX", 2)
        listed, after = [], ""
        while after is not None:
            page = await of.producers.ask(messages.ListTransactions, 0, after, True)
            listed, after = listed + page.transactions, page.next_after
        assert [(one.transactional_id, one.epoch) for one in listed] == [
            (one.transactional_id, one.epoch) for one in whole.transactions
        ]
        assert len({one.transactional_id for one in listed}) > 2

    run(cluster, story)


def test_a_transaction_that_takes_too_long_is_aborted(
    cluster: LocalCluster, topic: str, markers: Markers
) -> None:
    async def story(of: Transactions) -> None:
        key = await of.init(timeout_ms=1000)
        await of.join(key, topic, 0)
        await of.until_forgotten(key)
        assert markers.of(key) == [(0, False)]
        assert not (await of.end(key)).is_committed

    run(cluster, story)


def test_only_what_is_open_is_aborted(cluster: LocalCluster, topic: str) -> None:
    async def story(of: Transactions) -> None:
        key = await of.init()
        await of.abort(key)
        await of.join(key, topic, 0)
        await of.abort(key)
        answer = await of.end(key)
        assert not answer.is_committed
        await of.abort(key)
        assert await of.init() == (answer.family, answer.epoch)

    run(cluster, story)


def test_a_deleted_topic_needs_no_marker(
    cluster: LocalCluster, topic: str, markers: Markers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "TOPIC_GONE_S", 0.5)

    async def story(of: Transactions) -> None:
        key = await of.init()
        await of.join(key, topic, 0, 1)
        await asyncio.to_thread(cluster.admin.delete_topic, topic)
        assert (await of.end(key)).is_complete

    run(cluster, story)


# --- who may ask ----------------------------------------------------------------------------------


def test_clients_cannot_join(cluster: LocalCluster, topic: str) -> None:
    async def story(of: Transactions) -> None:
        key = await of.init()
        of.leaders = of.producers
        with pytest.raises(AuthenticationError, match="for the cluster's servers"):
            await of.join(key, topic, 0)

    run(cluster, story)


def test_the_topic_is_rayqs_own(cluster: LocalCluster) -> None:
    async def story(of: Transactions) -> None:
        for request in (
            messages.DeleteTopic(TOPIC),
            messages.CreatePartitions(TOPIC, 9),
            messages.AlterTopicConfig(TOPIC, {"cleanup.policy": "delete"}),
            messages.AlterTopicConfig(TOPIC, {"flush": "os"}),
        ):
            with pytest.raises(InvalidTopicError, match="rayq's own"):
                await of.producers.client.change(request, timeout_s=30)

    run(cluster, story)
    with pytest.raises(InvalidTopicError, match="rayq's own"):
        produce_raw(cluster, TOPIC, encode_batch([b"v"], [b"k"], timestamps_ms=0))


# --- failover -------------------------------------------------------------------------------------


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three brokers to kill, with a topic `t` of three partitions and four coordinators."""
    with LocalCluster(
        brokers=3, data_dir=tmp_path, transaction_state_partitions=4, **FAST
    ) as cluster:
        cluster.create_topic("t", partitions=3)
        yield cluster


async def kill_coordinator(of: Transactions) -> None:
    partition = coordinator_partition(of.name, 4)

    def kill() -> None:
        wait_in_sync(of.cluster, TOPIC, partition=partition)
        of.cluster.kill_replica(TOPIC, partition, leader_of(of.cluster, TOPIC, partition))

    await asyncio.to_thread(kill)


def test_an_open_transaction_survives_its_coordinator(
    failing: LocalCluster, markers: Markers
) -> None:
    async def story(of: Transactions) -> None:
        key = await of.init()
        await of.join(key, "t", 0)
        await kill_coordinator(of)
        assert await of.init() == key
        await of.join(key, "t", 2)
        await kill_coordinator(of)
        answer = await of.end(key)
        assert answer.is_committed and answer.is_complete
        assert markers.of(key) == [(0, True), (2, True)]
        await kill_coordinator(of)
        assert await of.end(key) == answer
        other = f"{of.name}-other"
        here = coordinator_partition(other, 4)
        with pytest.raises(InvalidRequestError, match=f"belongs to partition {here}"):
            await of.producers.ask(messages.InitProducer, (here + 1) % 4, other, "a", 60_000)

    run(failing, story)


def test_markers_go_on_under_the_next_coordinator(
    failing: LocalCluster, markers: Markers
) -> None:
    async def story(of: Transactions) -> None:
        markers.held |= {0, 1, 2}
        key = await of.init()
        await of.join(key, "t", 0, 1, 2)
        assert not (await of.end(key, wait_ms=0)).is_complete
        assert markers.of(key) == []
        await kill_coordinator(of)
        assert await of.outcome(key) == "committing"
        markers.held.clear()
        assert (await of.end(key, False)).is_committed
        await of.until_forgotten(key)
        assert markers.of(key) == [(0, True), (1, True), (2, True)]

    run(failing, story)


def test_what_a_dead_producer_has_open_ends_under_the_next_coordinator(
    failing: LocalCluster, markers: Markers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_changes, "FAILOVER_TIMEOUT_MS", 2000)

    async def story(of: Transactions) -> None:
        key = await of.init(timeout_ms=2000)
        await of.join(key, "t", 1)
        await kill_coordinator(of)
        assert await of.outcome(key) == "open"
        await of.until_forgotten(key)
        assert markers.of(key) == [(1, False)]

    run(failing, story)

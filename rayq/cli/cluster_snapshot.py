"""A description of the whole cluster, for the commands `status` and `health`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

from rayq.client.admin.access import principals_known
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.admin.health import Problem, find_problems
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.core.cluster.topic_changes import INTERNAL_PREFIX, TRANSACTIONS_TOPIC
from rayq.errors import (
    DisconnectedError,
    RayqError,
    TimeoutError,
    UnknownGroupError,
    UnknownTopicError,
)
from rayq.messages import Metadata, MetadataResponse
from rayq.records import (
    BrokerInfo,
    ClusterInfo,
    GroupInfo,
    HangingTransaction,
    ObjectStoreInfo,
    PrincipalInfo,
    QueueInfo,
    Reassignment,
    RemotePartitionInfo,
    TopicInfo,
    TransactionListing,
)

T = TypeVar("T")

COORDINATORS_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 2.0
"""The time after which a broker that has not answered counts as silent."""


class ClusterSnapshot(NamedTuple):
    """A cluster, its topics (rayq's own too), its groups, the moves and transactions that are under
    way, the object store (None: no topic uses it), and its queues.
    `silent` are the brokers that count as live and do not answer: where the voters have no
    majority, no controller can declare them dead."""

    cluster: ClusterInfo
    topics: list[TopicInfo]
    groups: list[GroupInfo]
    moves: list[Reassignment]
    silent: frozenset[int]
    transactions: list[TransactionListing]
    hanging: list[HangingTransaction]
    store: ObjectStoreInfo | None
    remote: list[RemotePartitionInfo]
    queues: list[QueueInfo]
    troubles: dict[int, str]
    """Why brokers have given up their sessions, of those that can say so."""
    principals: list[PrincipalInfo]
    now_ms: int

    @property
    def users_topics(self) -> list[TopicInfo]:
        return [topic for topic in self.topics if not topic.name.startswith(INTERNAL_PREFIX)]

    def problems(self) -> list[Problem]:
        return find_problems(**self._asdict())


def topics_of(cluster: Cluster, *, internal: bool) -> list[TopicInfo]:
    """Describes all topics at the same time: a server that does not answer costs one wait only."""
    client, background = cluster.shared_client()
    return background.run(_topics(AsyncAdmin(client), internal))


async def _topics(admin: AsyncAdmin, internal: bool) -> list[TopicInfo]:
    async def describe(name: str) -> TopicInfo | None:
        try:
            return await admin.describe_topic(name)
        except UnknownTopicError:
            return None

    names = await admin.list_topics(internal=internal)
    found = await asyncio.gather(*map(describe, names))
    return [info for info in found if info is not None]


def snapshot_of(cluster: Cluster) -> ClusterSnapshot:
    """Describes the whole cluster. A topic or group that is deleted meanwhile is left out, and so
    is a group or a transaction whose coordinator does not answer: the partitions say why. Raises
    RayqError where no broker answers."""
    client, background = cluster.shared_client()
    return background.run(_snapshot(client, AsyncAdmin(client)))


async def _snapshot(client: Client, admin: AsyncAdmin) -> ClusterSnapshot:
    info = await admin.describe_cluster()
    silent, troubles = await _asked(client, info)
    topics = await _topics(admin, internal=True)
    # Without a controller nothing moves, and no process knows of moves.
    moves = [] if info.controller is None else await admin.list_reassignments()
    store, remote = await _remote(admin, topics)
    return ClusterSnapshot(
        cluster=info,
        topics=topics,
        groups=await _groups(admin),
        moves=moves,
        silent=silent,
        transactions=await _or_without(
            admin.list_transactions(timeout_s=COORDINATORS_TIMEOUT_S), []
        ),
        hanging=await _hanging(admin, topics),
        store=store,
        remote=remote,
        queues=await _or_without(admin.describe_queues(timeout_s=COORDINATORS_TIMEOUT_S), []),
        troubles=troubles,
        principals=await _or_without(
            principals_known(client, timeout_s=COORDINATORS_TIMEOUT_S), []
        ),
        now_ms=client.environment.clock.wall_ms(),
    )


async def _or_without(question: Awaitable[T], nothing: T) -> T:
    """The answer, or `nothing` where the servers that know it do not answer, or it was deleted
    meanwhile."""
    try:
        return await question
    except RayqError as error:
        if error.retriable or isinstance(error, UnknownGroupError | UnknownTopicError):
            return nothing
        raise


async def _groups(admin: AsyncAdmin) -> list[GroupInfo]:
    async def describe(group: str) -> GroupInfo | None:
        question = admin.describe_group(group, timeout_s=COORDINATORS_TIMEOUT_S)
        return await _or_without(question, None)

    listed = await _or_without(admin.list_groups(timeout_s=COORDINATORS_TIMEOUT_S), [])
    found = await asyncio.gather(*(describe(listing.group) for listing in listed))
    return [info for info in found if info is not None]


async def _hanging(admin: AsyncAdmin, topics: list[TopicInfo]) -> list[HangingTransaction]:
    if not any(topic.name == TRANSACTIONS_TOPIC for topic in topics):
        return []  # Nobody uses transactions.
    led = [
        topic.name
        for topic in topics
        if not topic.name.startswith(INTERNAL_PREFIX)
        and all(partition.leader is not None for partition in topic.partitions)
    ]
    question = admin.find_hanging_transactions(led, timeout_s=COORDINATORS_TIMEOUT_S)
    return await _or_without(question, [])


async def _remote(
    admin: AsyncAdmin, topics: list[TopicInfo]
) -> tuple[ObjectStoreInfo | None, list[RemotePartitionInfo]]:
    names = [topic.name for topic in topics if topic.config.get("remote_storage")]
    if not names:
        return None, []
    return await _or_without(
        asyncio.gather(
            admin.describe_object_store(timeout_s=COORDINATORS_TIMEOUT_S),
            admin.describe_remote_storage(names, timeout_s=COORDINATORS_TIMEOUT_S),
        ),
        (None, []),
    )


async def _asked(client: Client, info: ClusterInfo) -> tuple[frozenset[int], dict[int, str]]:
    """The brokers that count as live and do not answer, and the troubles of those that answer,
    live or not."""

    async def ask(broker: BrokerInfo) -> MetadataResponse | None:
        try:
            answer, _ = await client.ask(
                (broker.host, broker.port), Metadata(topics=[]), timeout_s=ANSWER_TIMEOUT_S
            )
        except (DisconnectedError, TimeoutError):
            return None
        return answer

    answers = dict(
        zip(info.brokers, await asyncio.gather(*map(ask, info.brokers)), strict=True)
    )
    silent = frozenset(
        broker.broker for broker, answer in answers.items() if broker.live and answer is None
    )
    return silent, {
        broker.broker: answer.trouble
        for broker, answer in answers.items()
        if answer is not None and answer.trouble is not None
    }


def troubles_of(cluster: Cluster, info: ClusterInfo) -> dict[int, str]:
    """Why brokers have given up their sessions, of those that can say so."""
    client, background = cluster.shared_client()
    _, troubles = background.run(_asked(client, info))
    return troubles

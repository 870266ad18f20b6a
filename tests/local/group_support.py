"""Groups by their messages alone, without rayq's consumer: members that a test drives."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rayq import Cluster, TopicPartition, messages
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.client.metadata import LeaderAndEpoch
from rayq.config import ClusterConfig
from rayq.core.groups.assignors import Assignment, MemberSubscription
from rayq.wire.authentication import Identity
from rayq.wire.tokens import key_of_token

OFFSETS_TOPIC = "__consumer_offsets"
_numbers = itertools.count(1)
TopicIdPartition = tuple[str, int]


def new_group() -> str:
    return f"group-{next(_numbers)}"


class Coordinator:
    """Asks the coordinators of a cluster."""

    def __init__(self, client: Client, *, attempt_timeout_s: float = 10.0) -> None:
        self.client = client
        self.attempt_timeout_s = attempt_timeout_s

    async def ask(
        self,
        kind: Callable[..., messages.AnyRequest],
        group: str,
        *arguments: Any,
        timeout_s: float = 60.0,
        **named: Any,
    ) -> Any:
        """`arguments` follow topic id, partition, leader epoch and group."""
        topic = await self.client.topic(OFFSETS_TOPIC, timeout_s=timeout_s)
        partition = zlib.crc32(group.encode()) % len(topic.partitions)

        def build(topic_id: str, leader: LeaderAndEpoch) -> messages.AnyRequest:
            return kind(topic_id, partition, leader.epoch, group, *arguments, **named)

        return await self.client.ask_leader(
            OFFSETS_TOPIC,
            partition,
            build,
            timeout_s=timeout_s,
            attempt_timeout_s=self.attempt_timeout_s,
        )

    async def describe(self, group: str) -> messages.DescribeGroupResponse:
        answer = await self.ask(messages.DescribeGroup, group)
        assert isinstance(answer, messages.DescribeGroupResponse)
        return answer

    async def committed(self, group: str) -> dict[TopicIdPartition, int]:
        answer = await self.ask(messages.FetchCommitted, group, None)
        return {(one.topic_id, one.partition): one.offset for one in answer.offsets}


class Member:
    """A member that does what it is told. `beat` sends one heartbeat and remembers the answer. Its
    partitions change only by `obey` (or by hand)."""

    def __init__(
        self,
        coordinator: Coordinator,
        group: str,
        topics: Sequence[str] = (),
        *,
        name: str | None = None,
        instance: str | None = None,
        pattern: str | None = None,
        assignor: str = "uniform",
        session_timeout_ms: int = 45_000,
        max_poll_interval_ms: int = 300_000,
    ) -> None:
        self.coordinator = coordinator
        self.group = group
        self.topics = list(topics)
        self.member = f"m{next(_numbers):05d}{10**5}" if name is None else name
        self.instance = instance
        self.pattern = pattern
        self.assignor = assignor
        self.session_timeout_ms = session_timeout_ms
        self.max_poll_interval_ms = max_poll_interval_ms
        self.epoch = 0
        self.assigned: set[TopicIdPartition] = set()
        self.owned: set[TopicIdPartition] = set()
        self.sequence = 0

    @property
    def partitions(self) -> list[int]:
        return sorted(partition for _, partition in self.assigned)

    async def beat(
        self, *, wait_ms: int = 0, epoch: int | None = None, timeout_s: float = 60.0
    ) -> None:
        answer = await self.coordinator.ask(
            messages.GroupHeartbeat,
            self.group,
            self.member,
            self.epoch if epoch is None else epoch,
            self.instance,
            "a test",
            self.topics,
            self.pattern,
            self.assignor,
            self.session_timeout_ms,
            self.max_poll_interval_ms,
            sorted(self.owned),
            wait_ms,
            timeout_s=timeout_s,
        )
        self.epoch = answer.member_epoch
        self.assigned = {(one.topic_id, one.partition) for one in answer.assigned}

    def obey(self) -> None:
        self.owned = set(self.assigned)

    async def settle(self) -> None:
        """Heartbeats, with each answer obeyed at once, until an answer brings no news."""
        while True:
            epoch = self.epoch
            await self.beat()
            is_news = epoch != self.epoch or self.owned != self.assigned
            self.obey()
            if not is_news:
                return

    async def run(self, wait_ms: int = 3000) -> None:
        """Heartbeats as a prompt consumer does, until cancelled."""
        while True:
            await self.beat(wait_ms=wait_ms if self.owned == self.assigned else 0)
            self.obey()

    async def leave(self, epoch: int = messages.MEMBER_EPOCH_LEAVE) -> None:
        await self.beat(epoch=epoch)
        self.owned = set()

    async def commit(
        self, offset: int, *partitions: int, epoch: int | None = None, sequence: int | None = None
    ) -> list[Any]:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        chosen = [one for one in sorted(self.owned) if not partitions or one[1] in partitions]
        answer = await self.coordinator.ask(
            messages.CommitOffsets,
            self.group,
            self.member,
            self.epoch if epoch is None else epoch,
            sequence,
            [(*one, offset, None, "") for one in chosen],
        )
        refused: list[Any] = answer.refused
        return refused


async def settle(*members: Member) -> None:
    """Rounds of heartbeats until no member has news and some member owns a partition: a coordinator
    hears of a topic a moment after the topic's creator."""
    async with asyncio.timeout(120):
        while True:
            before = [(one.epoch, set(one.owned)) for one in members]
            for one in members:
                await one.settle()
            after = [(one.epoch, set(one.owned)) for one in members]
            if before == after and any(owned for _, owned in after):
                return


@asynccontextmanager
async def coordinators(cluster: Cluster, **options: Any) -> AsyncIterator[Coordinator]:
    """Coordinators by a client of its own, with connections of its own."""
    endpoints = [
        (one.host, one.port) for one in cluster.admin.describe_cluster().brokers if one.live
    ]
    identity = Identity(
        role="client", key=key_of_token(cluster.token), cluster_id=None, broker=None
    )
    client = Client(system_environment(None), identity, endpoints, ClusterConfig())
    try:
        await client.change(messages.EnsureOffsetsTopic(), timeout_s=60)
        yield Coordinator(client, **options)
    finally:
        client.close()
        await asyncio.sleep(0)


# --- assignors of a user's own --------------------------------------------------------------------


def all_to_the_first(
    members: Mapping[str, MemberSubscription], partitions: Mapping[str, int], current: Assignment
) -> Assignment:
    first = min(members)
    return {first: [TopicPartition(t, one) for t, n in partitions.items() for one in range(n)]}


def fails(
    members: Mapping[str, MemberSubscription], partitions: Mapping[str, int], current: Assignment
) -> Assignment:
    raise RuntimeError("boom")

"""A coordinator of groups alone: members, broker and coordinators of transactions are played."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from proving.simulation.process import Process
from rayq import messages
from rayq.actors.access import Access
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.actors.peers import Peers
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.errors import (
    AuthorizationError,
    RayqError,
)
from rayq.messages.transaction_ids import make_family
from rayq.wire.peer import Peer
from tests.simulated.coordinator_stage import EPOCH, Led, leading

WHERE = ("offsets", 0, EPOCH)
"""Topic id, partition and leader epoch of the coordinator's partition."""
FAMILY, OTHER = make_family(0, 1), make_family(0, 2)


class Transactions(Peers):
    """Answers each join when the test says so, or at once."""

    def __init__(self) -> None:  # It has no network.
        self.joins: list[tuple[int, int, str, int]] = []
        self.aborts: list[tuple[int, int]] = []
        self.outcomes: dict[tuple[int, int], str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: RayqError | None = None
        self.principal: str | None = None
        """The principal of all families."""

    async def join(
        self, family: int, epoch: int, topic_id: str, partition: int, *, principal: str | None
    ) -> None:
        self.joins.append((family, epoch, topic_id, partition))
        await self.gate.wait()
        if principal not in (None, self.principal):
            raise AuthorizationError(f"{principal!r} may not write in the transaction")
        if self.refusal is not None:
            raise self.refusal

    async def abort(self, family: int, epoch: int) -> None:
        self.aborts.append((family, epoch))
        if self.refusal is not None:
            raise self.refusal

    async def outcome(self, family: int, epoch: int) -> str:
        await self.gate.wait()
        return self.outcomes[family, epoch]


class Groups(Led):
    """The coordinator of one group, `g`, and the broker whose metadata have these topics."""

    topic, topic_id = OFFSETS_TOPIC, WHERE[0]

    def __init__(
        self, process: Process, log: ReplicaLog, given: messages.PartitionAssignment
    ) -> None:
        self.transactions = Transactions()
        super().__init__(process, log, given)
        self.topics = {"t": 2}
        """Partitions of each; the ids are the names in capitals."""
        self.version = 1
        self.failure: RayqError | None = None
        self.looks: list[messages.Metadata] = []
        self.clock_watch = ClockWatch(log.environment.clock)
        self.peer = self.connection()
        self.begin()

    def peers(self) -> Peers:
        return self.transactions

    def begin(self) -> None:
        self.coordinator = GroupCoordinator(
            self.log,
            self.leader,
            self.given,
            access=Access(self.log.environment.clock),
            ask_broker=self._metadata,
            metadata_version=1,
            clock_watch=self.clock_watch,
            peers=self.transactions,
        )

    def begin_again(self) -> None:
        self.coordinator.end("a test")
        self.begin()

    async def _metadata(self, request: messages.Request[Any]) -> messages.MetadataResponse:
        assert isinstance(request, messages.Metadata)
        self.looks.append(request)
        await asyncio.sleep(0.1)
        if self.failure is not None:
            raise self.failure
        topics = [
            messages.TopicMetadata(
                name,
                name.upper(),
                {},
                [
                    messages.PartitionMetadata(number, 1, 1, 1, [], [], None)
                    for number in range(partitions)
                ],
            )
            for name, partitions in self.topics.items()
        ]
        return messages.MetadataResponse("c", self.version, 1, None, [], [], topics)

    def change_topics(self, **topics: int) -> None:
        self.topics, self.version = topics, self.version + 1

    async def ask(
        self, request: messages.Request[messages.ResponseT], peer: Peer | None = None
    ) -> messages.ResponseT:
        return cast(Any, await self.coordinator.handle(peer or self.peer, request))

    async def heartbeat(
        self,
        member: str,
        *owned: int,
        epoch: int = 0,
        peer: Peer | None = None,
        instance: str | None = None,
        topics: Sequence[str] = ("t",),
        session_ms: int = 45_000,
        wait_ms: int = 0,
        reason: str = "",
        group: str = "g",
    ) -> messages.GroupHeartbeatResponse:
        request = messages.GroupHeartbeat(
            *WHERE,
            group,
            member,
            epoch,
            instance,
            "a test",
            list(topics),
            None,
            "uniform",
            session_ms,
            60_000,
            [("T", number) for number in owned],
            wait_ms,
            reason,
        )
        return await self.ask(request, peer)

    async def beat(self, member: str, *owned: int, epoch: int = 0, **fields: Any) -> int:
        return (await self.heartbeat(member, *owned, epoch=epoch, **fields)).member_epoch

    async def describe(self, group: str = "g") -> messages.DescribeGroupResponse:
        return await self.ask(messages.DescribeGroup(*WHERE, group))

    async def members(self) -> list[str]:
        return [member.member for member in (await self.describe()).members]

    async def list_groups(self) -> list[messages.GroupSummary]:
        return (await self.ask(messages.ListGroups(*WHERE))).groups

    async def set_offsets(self, offset: int, *partitions: int, group: str = "g") -> None:
        offsets = [("T", number, offset) for number in partitions]
        await self.ask(messages.SetGroupOffsets(*WHERE, group, offsets))

    async def delete(self, group: str = "g") -> None:
        await self.ask(messages.DeleteGroup(*WHERE, group))

    async def send(
        self,
        offset: int,
        *partitions: int,
        transaction: tuple[int, int] | None = (FAMILY, 0),
        member: str = "",
        member_epoch: int = 0,
        sequence: int = 1,
        principal: str | None = None,
    ) -> list[tuple[str, int, str, str]]:
        offsets = [messages.OffsetCommit("T", number, offset, None, "") for number in partitions]
        answer = await self.ask(
            messages.CommitOffsets(
                *WHERE, "g", member, member_epoch, sequence, offsets, transaction
            ),
            dataclasses.replace(self.peer, principal=principal),
        )
        return answer.refused

    async def end(
        self,
        epoch: int = 0,
        *,
        family: int = FAMILY,
        is_commit: bool = True,
        coordinator_epoch: int = 3,
    ) -> None:
        await self.ask(
            messages.WriteMarker(*WHERE, family, epoch, is_commit, coordinator_epoch)
        )

    async def committed(self, *partitions: int, group: str = "g") -> list[messages.CommittedOffset]:
        answer = await self.ask(
            messages.FetchCommitted(*WHERE, group, [("T", number) for number in partitions] or None)
        )
        return answer.offsets

    async def fetch(self, *partitions: int) -> dict[int, int]:
        return {
            position.partition: position.offset for position in await self.committed(*partitions)
        }

    def measured(self, name: str) -> dict[str, float]:
        """A metric of each group."""
        return {
            sample.labels["group"]: sample.value
            for sample in self.environment.metrics.collect()
            if sample.name == name
        }


def coordinating(work: Callable[[Groups], Awaitable[None]]) -> None:
    leading(Groups, work)

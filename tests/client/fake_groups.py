"""The coordinator of every group, as a test plays it: the test says which member owns what.

By default the last member that joined owns every partition of its topics. `grant` says otherwise.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayq import messages as m
from rayq.errors import (
    FencedMemberError,
    GroupNotEmptyError,
    UnknownGroupError,
    UnknownMemberError,
)
from rayq.messages.secret_names import shown_part

if TYPE_CHECKING:
    from tests.client.fake_broker import FakeCluster

Pair = tuple[str, int]
"""`(topic id, partition)`"""


@dataclass
class FakeMember:
    request: m.GroupHeartbeat
    epoch: int
    assigned: list[m.TopicPartitionId] = field(default_factory=list)
    told: tuple[int, list[m.TopicPartitionId]] | None = None
    owned: set[Pair] = field(default_factory=set)
    beats: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass
class FakeGroup:
    epoch: int = 0
    members: dict[str, FakeMember] = field(default_factory=dict)
    left: list[m.GroupHeartbeat] = field(default_factory=list)
    committed: dict[Pair, m.CommittedOffset] = field(default_factory=dict)
    grants_nothing: bool = False


class FakeGroups:
    """The state belongs to the fake cluster's loop; a test calls the methods for the test only."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.groups: dict[str, FakeGroup] = {}

    # --- for the test ---------------------------------------------------------------------------

    def group(self, name: str = "g") -> FakeGroup:
        return self.groups.setdefault(name, FakeGroup())

    def member(self, name: str = "g") -> FakeMember:
        """The only member of a group."""
        (member,) = self.group(name).members.values()
        return member

    def grant(self, *partitions: tuple[str, int], group: str = "g") -> None:
        """From now on the only member may own exactly these partitions."""

        def change() -> None:
            member, found = self.member(group), self.group(group)
            found.epoch += 1
            member.epoch = found.epoch
            member.assigned = [
                m.TopicPartitionId(topic, self._cluster.topics[topic].topic_id, number)
                for topic, number in partitions
            ]
            member.wake()

        self._cluster.call(change)

    def forget_member(self, group: str = "g") -> None:
        """Removes the only member, as when its session ends."""

        def forget() -> None:
            member = self.member(group)
            self.group(group).members.clear()
            member.wake()

        self._cluster.call(forget)

    def commit(self, topic: str, partition: int, offset: int, **more: Any) -> None:
        def put() -> None:
            topic_id = self._cluster.topics[topic].topic_id
            self.group(more.pop("group", "g")).committed[topic_id, partition] = m.CommittedOffset(
                topic_id, partition, offset, more.get("last_epoch"), more.get("metadata", ""), 1000
            )

        self._cluster.call(put)

    def committed(self, topic: str, partition: int = 0, group: str = "g") -> int | None:
        def get() -> int | None:
            topic_id = self._cluster.topics[topic].topic_id
            found = self.group(group).committed.get((topic_id, partition))
            return None if found is None else found.offset

        return self._cluster.call(get)

    # --- the coordinator ------------------------------------------------------------------------

    def apply(self, request: m.AnyRequest) -> Any:
        match request:
            case m.GroupHeartbeat():
                return self._heartbeat(request)
            case m.CommitOffsets():
                return self._commit(request)
            case m.FetchCommitted():
                found = self.group(request.group).committed
                wanted = found if request.partitions is None else request.partitions
                return m.FetchCommittedResponse([found[one] for one in wanted if one in found])
            case m.ListGroups():
                return m.ListGroupsResponse(
                    [
                        m.GroupSummary(name, "stable" if one.members else "empty", len(one.members))
                        for name, one in self.groups.items()
                    ]
                )
            case m.DescribeGroup():
                return self._describe(request.group)
            case m.DeleteGroup():
                self._find_empty(request.group)
                del self.groups[request.group]
                return m.Done()
            case m.SetGroupOffsets():
                group = self._find_empty(request.group)
                for topic_id, partition, offset in request.offsets:
                    group.committed[topic_id, partition] = m.CommittedOffset(
                        topic_id, partition, offset, None, "", 2000
                    )
                return m.Done()
        return None

    def _find_empty(self, name: str) -> FakeGroup:
        if name not in self.groups:
            raise UnknownGroupError(f"There is no group {name!r}.")
        if self.groups[name].members:
            raise GroupNotEmptyError(f"Group {name!r} has members.")
        return self.groups[name]

    def _describe(self, name: str) -> m.DescribeGroupResponse:
        if name not in self.groups:
            raise UnknownGroupError(f"There is no group {name!r}.")
        group = self.groups[name]
        members = [
            m.GroupMemberDescription(
                shown_part(one),
                member.request.instance,
                member.request.client,
                member.epoch,
                member.assigned,
                [],
            )
            for one, member in group.members.items()
        ]
        return m.DescribeGroupResponse(
            name,
            "stable" if members else "empty",
            group.epoch,
            "uniform",
            members,
            list(group.committed.values()),
            "somebody joined",
            3000,
        )

    def _commit(self, request: m.CommitOffsets) -> m.CommitOffsetsResponse:
        taken, refused = self.check(request)
        self.put(request.group, taken)
        return m.CommitOffsetsResponse(refused)

    def check(self, request: m.CommitOffsets) -> tuple[list[Any], list[tuple[str, int, str, str]]]:
        """The positions that may be committed, and those that are refused."""
        group = self.group(request.group)
        if request.member:
            member = group.members.get(request.member)
            if member is None:
                raise UnknownMemberError("No such member.")
            if request.member_epoch not in (member.epoch, member.epoch - 1):
                raise FencedMemberError(f"Epoch {request.member_epoch} is over.")
            owned = member.owned | {(one.topic_id, one.partition) for one in member.assigned}
        elif group.members:
            raise GroupNotEmptyError("The group has members.")
        taken = [
            commit
            for commit in request.offsets
            if not request.member or (commit.topic_id, commit.partition) in owned
        ]
        return taken, [
            (commit.topic_id, commit.partition, "CommitRefusedError", "it is not yours")
            for commit in request.offsets
            if commit not in taken
        ]

    def put(self, name: str, commits: list[m.OffsetCommit]) -> None:
        for commit in commits:
            self.group(name).committed[commit.topic_id, commit.partition] = m.CommittedOffset(
                *commit, 1000
            )

    async def _heartbeat(self, request: m.GroupHeartbeat) -> m.GroupHeartbeatResponse:
        group = self.group(request.group)
        if request.member_epoch < 0:
            group.left.append(request)
            gone = group.members.pop(request.member, None)
            if gone is not None:
                gone.wake()
            return m.GroupHeartbeatResponse(0, [])
        member = group.members.get(request.member)
        if request.member_epoch == 0:
            group.epoch += 1
            member = group.members[request.member] = FakeMember(request, group.epoch)
            if not group.grants_nothing:
                member.assigned = self._all_of(request)
        elif member is None:
            raise UnknownMemberError("No such member.")
        elif request.member_epoch not in (member.epoch, member.epoch - 1):
            raise FencedMemberError(f"Epoch {request.member_epoch} is over.")
        member.wake()  # the heartbeat before this one is answered
        member.request = request
        member.owned = set(request.owned)
        member.beats += 1
        if member.told == (member.epoch, member.assigned):
            try:
                async with asyncio.timeout(request.wait_ms / 1000):
                    await member.changed.wait()
            except TimeoutError:
                pass
        if request.member not in group.members:
            raise UnknownMemberError("Its session ended.")
        member.told = (member.epoch, member.assigned)
        return m.GroupHeartbeatResponse(member.epoch, member.assigned)

    def _all_of(self, request: m.GroupHeartbeat) -> list[m.TopicPartitionId]:
        return [
            m.TopicPartitionId(topic.name, topic.topic_id, one.number)
            for topic in self._cluster.topics.values()
            if topic.name in request.topics
            or (request.pattern is not None and re.fullmatch(request.pattern, topic.name))
            for one in topic.partitions
        ]

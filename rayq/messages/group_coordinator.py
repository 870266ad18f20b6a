"""Requests of consumers to the coordinator of their group.

The coordinator of a group is the leader of one partition of `__consumer_offsets`: partition
crc32(group) % partitions. `topic_id`, `partition` and `leader_epoch` name that partition, as in
every request to a leader. The coordinator answers NotLeader, FencedEpoch, UnknownEpoch and
UnknownTopic errors as any leader does, and CoordinatorLoading (retriable) until it has read the log
of the coordinators before it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import msgspec

from rayq.messages.acls import QuotaName, Right, Rights
from rayq.messages.base import (
    CheckedName,
    CommitMetadata,
    Counter,
    Done,
    Family,
    GroupName,
    HeldEpoch,
    Id,
    MemberEpoch,
    Milliseconds,
    Name,
    Offset,
    Partition,
    Reason,
    Response,
    Text,
    ToGroupCoordinator,
    TransactionEpoch,
)
from rayq.messages.limits import (
    OWNED_MAX,
    POSITIONS_MAX,
    TOPICS_LISTED_MAX,
)

#
MEMBER_EPOCH_JOIN = 0
MEMBER_EPOCH_LEAVE = -1
MEMBER_EPOCH_LEAVE_STATIC = -2
"""A static member goes away and keeps its partitions until its session ends (KIP-345)."""


class TopicPartitionId(Response, frozen=True):
    """A partition that a member may own. The id tells a deleted topic from a new one."""

    topic: str
    topic_id: str
    partition: int


class GroupHeartbeatResponse(Response, frozen=True):
    member_epoch: int
    """The epoch that the member sends from now on. 0 after it has left."""
    assigned: list[TopicPartitionId]
    """All partitions that the member may own now. It gives up the others that it owns at its next
    poll, then sends a heartbeat with the smaller `owned`. Only then does another member get them.
    """


class GroupHeartbeat(ToGroupCoordinator[GroupHeartbeatResponse], frozen=True):
    """Joins (`member_epoch` 0), stays in, or leaves (-1, -2) a group. The coordinator answers after
    `wait_ms`, or at once when the assignment of the member changes, or when a newer heartbeat of
    the member arrives. Raises UnknownMember (join again), FencedMember (an old epoch, or another
    process took over the `instance`), UnknownAssignor, InvalidRequest (a pattern that does not
    compile)."""

    api: ClassVar[int] = 30
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (Right("read", "group", "group"),)
    checked_when_answered: ClassVar[bool] = True
    group: GroupName
    member: Id
    """A random id that the member chooses at its start (KIP-848). Who has it acts as the member."""
    member_epoch: MemberEpoch
    instance: Name | None
    """`group_instance_id` of a static member."""
    client: CheckedName
    """Host and process of the member, for operators."""
    topics: Annotated[list[Name], msgspec.Meta(max_length=TOPICS_LISTED_MAX)]
    pattern: Text | None
    """A regular expression over topic names (whole match), beside `topics`."""
    assignor: Name
    session_timeout_ms: Milliseconds
    max_poll_interval_ms: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    """Maximum time for the member to give up a partition before it is removed from the group."""
    owned: Annotated[list[tuple[Id, Partition]], msgspec.Meta(max_length=OWNED_MAX)]
    """`(topic id, partition)` pairs that the member reads now."""
    wait_ms: Milliseconds
    reason: Reason = ""
    """The reason that the member leaves."""


class OffsetCommit(NamedTuple):
    """A position that is committed."""

    topic_id: Id
    partition: Partition
    offset: Offset
    """The offset of the next record."""
    last_epoch: HeldEpoch | None
    """The leader epoch of the record before it."""
    metadata: CommitMetadata


class CommitOffsetsResponse(Response, frozen=True):
    refused: list[tuple[str, int, str, str]]
    """`(topic id, partition, error code, message)` of each partition whose offset was not
    committed. The others were."""


class CommitOffsets(ToGroupCoordinator[CommitOffsetsResponse], frozen=True):
    """Commits offsets. The coordinator answers once they are in `__consumer_offsets` under
    acks=all.

    A member sends its current `member_epoch` or the one before, and owns (or is giving up) each
    partition. Its `sequence` grows with each commit; the coordinator drops a commit with a lower
    sequence than the last, and answers it as done, since a newer commit is there. A consumer whose
    partitions were assigned by hand leaves `member` empty, and may commit while the group has no
    members. Raises UnknownMember, FencedMember, GroupNotEmpty."""

    api: ClassVar[int] = 31
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (Right("read", "group", "group"),)
    group: GroupName
    member: CheckedName
    member_epoch: MemberEpoch
    sequence: Counter
    offsets: Annotated[list[OffsetCommit], msgspec.Meta(max_length=POSITIONS_MAX)]
    transaction: tuple[Family, TransactionEpoch] | None = None
    """`(family, epoch)`: the positions take effect if this transaction commits. Until it has ended
    they are pending: FetchCommitted of them, and every other write of them, is refused with
    OffsetPending. Within the transaction, too, the position of the highest `sequence` counts.
    Raises also TransactionEnded, TransactionLimit."""


class CommittedOffset(Response, frozen=True):
    topic_id: str
    partition: int
    offset: int
    last_epoch: int | None
    metadata: str
    commit_time_ms: int


class FetchCommittedResponse(Response, frozen=True):
    offsets: list[CommittedOffset]
    """Partitions without a commit are missing."""


class FetchCommitted(ToGroupCoordinator[FetchCommittedResponse], frozen=True):
    api: ClassVar[int] = 32
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (Right("describe", "group", "group"),)
    checked_when_answered: ClassVar[bool] = True
    group: GroupName
    partitions: (
        Annotated[list[tuple[Id, Partition]], msgspec.Meta(max_length=POSITIONS_MAX)] | None
    )
    """None: all partitions that the group has committed."""


class GroupSummary(Response, frozen=True):
    group: str
    state: str
    """"empty", "stable" or "rebalancing"."""
    members: int


class ListGroupsResponse(Response, frozen=True):
    groups: list[GroupSummary]


class ListGroups(ToGroupCoordinator[ListGroupsResponse], frozen=True):
    """The groups of one partition of `__consumer_offsets`."""

    api: ClassVar[int] = 33
    rights: ClassVar[Rights] = ()
    checked_when_answered: ClassVar[bool] = True


class GroupMemberDescription(Response, frozen=True):
    member: str
    """The beginning: see `rayq.messages.secret_names`."""
    instance: str | None
    client: str
    member_epoch: int
    assigned: list[TopicPartitionId]
    revoking: list[TopicPartitionId]
    """The partitions that the member was asked to give up and still owns."""


class DescribeGroupResponse(Response, frozen=True):
    group: str
    state: str
    epoch: int
    assignor: str
    members: list[GroupMemberDescription]
    offsets: list[CommittedOffset]
    rebalance_reason: str
    """The reason of the last rebalance."""
    rebalance_time_ms: int


class DescribeGroup(ToGroupCoordinator[DescribeGroupResponse], frozen=True):
    """Describes a group. Raises UnknownGroup."""

    api: ClassVar[int] = 34
    rights: ClassVar[Rights] = (Right("describe", "group", "group"),)
    checked_when_answered: ClassVar[bool] = True
    group: GroupName


class DeleteGroup(ToGroupCoordinator[Done], frozen=True):
    """Forgets a group and its offsets. Raises UnknownGroup, GroupNotEmpty."""

    api: ClassVar[int] = 35
    rights: ClassVar[Rights] = (Right("delete", "group", "group"),)
    group: GroupName


class SetGroupOffsets(ToGroupCoordinator[Done], frozen=True):
    """Sets the committed offsets of a group without members. Raises GroupNotEmpty."""

    api: ClassVar[int] = 36
    rights: ClassVar[Rights] = (Right("alter", "group", "group"),)
    group: GroupName
    offsets: Annotated[
        list[tuple[Id, Partition, Offset]], msgspec.Meta(max_length=POSITIONS_MAX)
    ]

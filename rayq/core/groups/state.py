"""The groups of one `__consumer_offsets` partition, as its coordinator holds them.

Durable state comes from records alone: only `replay` changes it, and start-up is the same replay
over the compacted log. `changes` reads it and returns records. Soft state (when members were
heard, the topics of the cluster) is rebuilt by each coordinator: every member then has a full
session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rayq.core.groups.assignors import Assignor, MemberSubscription
from rayq.core.groups.records import (
    NOTHING,
    EndedRecord,
    EndedTransaction,
    GroupRecord,
    GroupValue,
    MemberRecord,
    MemberValue,
    OffsetRecord,
    OffsetValue,
    Partitions,
    PendingOffset,
    PendingRecord,
    Record,
)
from rayq.core.groups.topic_pattern import matches
from rayq.records import TopicIdPartition

PATTERNS_MAX = 250
"""Maximum number of different patterns of all members together: each costs up to 2 ms, and 30 us
for each topic, when a coordinator starts."""
PATTERNS_OF_PRINCIPAL_MAX = PATTERNS_MAX // 4
"""Maximum number of different patterns of a named principal's members: it does not take those of
others."""


class SubscribedTopic(NamedTuple):
    topic_id: str
    partitions: int


class Reader(NamedTuple):
    """A named principal, from one address."""

    principal: str
    host: str


MayRead = Callable[[Reader, str], bool]
"""Returns whether a reader may read the topic of that name."""


def nobody_reads(_reader: Reader, _topic: str) -> bool:
    return False


@dataclass(slots=True)
class Session:
    """A member's soft state since this coordinator started. Times are on the monotonic clock."""

    heard_s: float | None = None
    """Time at which the member was last heard; None: it was not checked yet."""
    is_acked: bool = False
    """True if a heartbeat came under the member's present epoch, so that the member knows what it
    may own. Until then that does not change, so that each epoch means one assignment."""
    disconnected_s: float | None = None
    revoking_since_s: float | None = None
    last_sequence: int | None = None
    transaction_sequence: int = -1
    """Sequence of the last commit inside a transaction: plain commits from before it are
    outdated."""
    gained: Partitions = NOTHING
    """Partitions that came with this epoch: a commit of them under the previous one is outdated."""


@dataclass(slots=True)
class Group:
    value: GroupValue = field(default_factory=GroupValue)
    members: dict[str, MemberValue] = field(default_factory=dict)
    offsets: dict[TopicIdPartition, OffsetValue] = field(default_factory=dict)
    pending: dict[TopicIdPartition, PendingOffset] = field(default_factory=dict)
    """Positions that transactions hold."""
    metadata_characters: int = 0
    """Number of characters of metadata of all these positions together."""
    sessions: dict[str, Session] = field(default_factory=dict)
    settled: bool | None = None
    """True if every member has its target; None: not computed yet."""

    @property
    def is_settled(self) -> bool:
        if self.settled is None:
            self.settled = all(
                not member.revoking and member.assigned == member.target
                for member in self.members.values()
            )
        return self.settled

    @property
    def name_of_state(self) -> str:
        """The group's state, as `messages.GroupSummary` names it."""
        if not self.members:
            return "empty"
        return "stable" if self.is_settled else "rebalancing"

    def member_of_instance(self, instance: str | None) -> str | None:
        if instance is None:
            return None
        return next(
            (key for key, member in self.members.items() if member.instance == instance), None
        )


@dataclass(slots=True)
class OpenTransaction:
    """A transaction that holds positions here."""

    epoch: int
    offsets: set[tuple[str, str, int]] = field(default_factory=set)
    """`(group, topic id, partition)`"""
    members: set[tuple[str, str]] = field(default_factory=set)
    """`(group, member)` of the members that committed them."""


class GroupState:
    """See the module. `assignors` are those that members may name (`load_assignors`). The answers
    of `may_read` hold until the next `take_topics`."""

    def __init__(
        self, assignors: Mapping[str, Assignor | str], may_read: MayRead = nobody_reads
    ) -> None:
        self.assignors = assignors
        self._may_read = may_read
        self._readable: dict[tuple[str, Reader], set[str]] = {}
        """The matches of a pattern that a reader may read."""
        self.groups: dict[str, Group] = {}
        self.positions = 0
        """Number of positions of all groups together, including pending ones."""
        self.transactions: dict[int, OpenTransaction] = {}
        """Open transactions by family, which has at most one at a time."""
        self.ended: dict[int, EndedTransaction] = {}
        """Ended transactions by family."""
        self.topics: dict[str, SubscribedTopic] = {}
        self._names: dict[str, str] = {}
        self._matches: dict[str, set[str]] = {}
        self.topics_gone: dict[str, float] = {}
        """Topic ids of committed offsets that no topic has, each with the time since when."""

    # --- topics -----------------------------------------------------------------------------

    def take_topics(self, topics: Mapping[str, SubscribedTopic]) -> None:
        """Takes the cluster's present topics."""
        added = [name for name in topics if name not in self.topics]
        self.topics = dict(topics)
        self._readable.clear()
        self._forget_patterns()
        for pattern, names in self._matches.items():
            names.intersection_update(topics)
            names |= matches(pattern, added)
        used = {
            topic_id
            for _, _, _, member in self.all_members()
            for partitions in (member.target, member.assigned, member.revoking)
            for topic_id, _ in partitions
        }
        kept = {topic_id: name for topic_id, name in self._names.items() if topic_id in used}
        self._names = {**kept, **{info.topic_id: name for name, info in topics.items()}}

    def name_of_topic(self, topic_id: str) -> str:
        """The topic's name; its id if the name is not known (any more)."""
        return self._names.get(topic_id, topic_id)

    def subscription(self, member: MemberValue) -> MemberSubscription:
        """A member's subscription, with the existing topics."""
        names = {name for name in member.topics if name in self.topics}
        if member.pattern is not None:
            names |= self._matching(member.pattern, reader_of(member))
        return MemberSubscription(frozenset(names), member.instance)

    def _matching(self, pattern: str, reader: Reader | None) -> set[str]:
        """The topics that match a pattern, as far as the reader may read them."""
        if pattern not in self._matches:
            if len(self._matches) >= 2 * PATTERNS_MAX:
                self._forget_patterns()
            self._matches[pattern] = matches(pattern, self.topics)
        found = self._matches[pattern]
        if reader is None:
            return found
        readable = self._readable.get((pattern, reader))
        if readable is None:
            if len(self._readable) >= 2 * PATTERNS_MAX:
                self._readable.clear()
            readable = {name for name in found if self._may_read(reader, name)}
            self._readable[pattern, reader] = readable
        return readable

    def patterns(self) -> set[str]:
        """The patterns of all members."""
        return {
            member.pattern for _, _, _, member in self.all_members() if member.pattern is not None
        }

    def patterns_of(self, principal: str) -> set[str]:
        """The patterns of the members of a named principal."""
        return {
            member.pattern
            for _, _, _, member in self.all_members()
            if member.pattern is not None and member.principal == principal
        }

    def _forget_patterns(self) -> None:
        """Forgets the patterns that no member has any more."""
        used = self.patterns()
        self._matches = {
            pattern: names for pattern, names in self._matches.items() if pattern in used
        }

    def all_members(self) -> Iterator[tuple[str, Group, str, MemberValue]]:
        for name, group in self.groups.items():
            for member, value in group.members.items():
                yield name, group, member, value

    # --- the only change --------------------------------------------------------------------

    def replay(self, record: Record) -> None:
        """Applies one record. Records of different keys may come in any order (compaction)."""
        if isinstance(record, EndedRecord):
            if record.value is None:
                self.ended.pop(record.family, None)
            else:
                self.ended[record.family] = record.value
            return
        group = self.groups.get(record.group)
        if group is None:
            if record.value is None:
                return
            group = self.groups[record.group] = Group()
        if isinstance(record, OffsetRecord):
            at = (record.topic_id, record.partition)
            self.positions -= len(group.offsets)
            replaced = group.offsets.pop(at, None)
            group.metadata_characters -= 0 if replaced is None else len(replaced.metadata)
            if record.value is not None:
                group.offsets[at] = record.value
                group.metadata_characters += len(record.value.metadata)
            self.positions += len(group.offsets)
        elif isinstance(record, PendingRecord):
            self._replay_pending(group, record)
        elif isinstance(record, MemberRecord):
            group.settled = None
            self._replay_member(group, record.member, record.value)
        else:
            assert isinstance(record, GroupRecord)
            if record.value is not None:
                group.value = record.value
            elif group.members or group.offsets or group.pending:
                group.value = GroupValue()
            else:
                del self.groups[record.group]

    def _replay_pending(self, group: Group, record: PendingRecord) -> None:
        name, topic_id, partition, value = record
        self.positions -= len(group.pending)
        before = group.pending.pop((topic_id, partition), None)
        if before is not None:
            group.metadata_characters -= len(before.metadata)
            transaction = self.transactions[before.family]
            transaction.offsets.discard((name, topic_id, partition))
            if not transaction.offsets:
                del self.transactions[before.family]
        if value is not None:
            group.pending[topic_id, partition] = value
            group.metadata_characters += len(value.metadata)
            transaction = self.transactions.setdefault(value.family, OpenTransaction(value.epoch))
            transaction.offsets.add((name, topic_id, partition))
            if value.member:
                transaction.members.add((name, value.member))
        self.positions += len(group.pending)

    def _replay_member(self, group: Group, member: str, value: MemberValue | None) -> None:
        if value is None:
            group.members.pop(member, None)
            group.sessions.pop(member, None)
            return
        before = group.members.get(member)
        group.members[member] = value
        session = group.sessions.setdefault(member, Session())
        if before is None or before.member_epoch != value.member_epoch:
            session.is_acked = False
            session.gained = NOTHING if before is None else value.assigned - before.owned

    # --- for tests --------------------------------------------------------------------------

    def validate(self) -> None:
        """Asserts what must hold after each decision."""
        all_groups = self.groups.values()
        assert self.positions == sum(
            len(group.offsets) + len(group.pending) for group in all_groups
        )
        for name, group in self.groups.items():
            owner: dict[TopicIdPartition, str] = {}
            aimed: dict[TopicIdPartition, str] = {}
            for member, value in group.members.items():
                where = (name, member)
                assert not value.assigned & value.revoking, where
                if group.sessions[member].is_acked:  # Until then the target may be ahead.
                    assert value.assigned <= value.target, where
                    assert not value.revoking & value.target, where
                assert value.previous_epoch <= value.member_epoch <= group.value.epoch, where
                for partition in value.owned:
                    assert partition not in owner, (where, partition, owner[partition])
                    owner[partition] = member
                for partition in value.target:
                    assert partition not in aimed, (where, partition, aimed[partition])
                    aimed[partition] = member
            assert (group.value.empty_since_ms is None) == bool(group.members), name
            characters = sum(len(value.metadata) for value in group.offsets.values())
            characters += sum(len(value.metadata) for value in group.pending.values())
            assert group.metadata_characters == characters, name
            for at, pending in group.pending.items():
                transaction = self.transactions[pending.family]
                assert transaction.epoch == pending.epoch, (name, at)
                assert (name, *at) in transaction.offsets


def reader_of(member: MemberValue) -> Reader | None:
    """The named principal whose pattern a member has. None: it may read all topics."""
    return None if member.principal is None else Reader(member.principal, member.host)


def partitions_of(topic_ids: Mapping[str, SubscribedTopic]) -> Partitions:
    """Every partition of the topics."""
    return frozenset(
        (topic.topic_id, number)
        for topic in topic_ids.values()
        for number in range(topic.partitions)
    )

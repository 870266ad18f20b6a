"""Working copy of a group for one decision: members, targets, and partitions that may move now.

`changes` decides with it; the records follow from the differences to the state before.
"""

from __future__ import annotations

import msgspec

from rayq.core.groups.assignors import find_assignor, run_assignor
from rayq.core.groups.records import (
    GroupRecord,
    GroupValue,
    MemberRecord,
    MemberValue,
    Partitions,
    Record,
)
from rayq.core.groups.state import Group, GroupState, SubscribedTopic
from rayq.errors import GroupLimitError, InvalidAssignmentError, UnknownAssignorError
from rayq.records import TopicIdPartition, TopicPartition

GROUPS_MAX = 10_000
"""Maximum number of groups of a coordinator."""
REASON_LENGTH_MAX = 512
INSTEAD = " (uniform instead of "
"""Beginning of the part of a rebalance's reason that says why an assignor failed."""


def check_group_count(state: GroupState) -> None:
    if len(state.groups) >= GROUPS_MAX:
        raise GroupLimitError(
            f"This coordinator has {len(state.groups)} groups, the most there may be: delete old "
            "ones, or let them expire sooner (offsets_retention_ms)."
        )


class GroupDraft:
    """The new state of a group, from which the records follow. Raises GroupLimitError if there are
    too many groups."""

    def __init__(self, state: GroupState, group: str, now_ms: int) -> None:
        known = state.groups.get(group)
        if known is None:
            check_group_count(state)
            known = Group()
        self._state = state
        self._group = group
        self._now_ms = now_ms
        self._before = known
        self._next_epoch = known.value.epoch + 1
        self._renewed: set[str] = set()
        self.members = dict(known.members)
        self.sessions = known.sessions
        self._value = known.value

    def member_of_instance(self, instance: str | None) -> str | None:
        return self._before.member_of_instance(instance)

    def put(self, member: str, *, revoking: Partitions) -> None:
        self.members[member] = msgspec.structs.replace(self.members[member], revoking=revoking)

    def remove(self, member: str) -> None:
        self.members.pop(member)

    def renew(self, member: str) -> None:
        """Starts a member under a new epoch: no earlier one is accepted."""
        self._renewed.add(member)
        self._value = msgspec.structs.replace(self._value, epoch=self._next_epoch)
        self.members[member] = msgspec.structs.replace(
            self.members[member], member_epoch=self._next_epoch, previous_epoch=self._next_epoch
        )

    def topics_read(self) -> dict[str, SubscribedTopic]:
        """The existing topics that any member subscribes to."""
        subscription = self._state.subscription
        names = {name for member in self.members.values() for name in subscription(member).topics}
        return {name: self._state.topics[name] for name in sorted(names)}

    def rebalance(self, reason: str, *, may_fail: bool) -> None:
        """Computes every member's target. If a user's assignor fails, the request that caused the
        rebalance is refused (`may_fail`), or `uniform` is used instead."""
        name = self._choose_assignor()
        topics = self.topics_read()
        members = {
            member: self._state.subscription(value)
            for member, value in sorted(self.members.items())
        }
        names = {info.topic_id: topic for topic, info in topics.items()}
        current = {
            member: frozenset(
                TopicPartition(names[topic_id], number)
                for topic_id, number in self.members[member].target
                if topic_id in names
            )
            for member in members
        }
        partitions = {topic: info.partitions for topic, info in topics.items()}

        def run(name: str) -> dict[str, frozenset[TopicPartition]]:
            assignor = find_assignor(self._state.assignors, name)
            return run_assignor(
                name, assignor, members=members, partitions=partitions, current=current
            )

        try:
            targets = run(name)
        except (InvalidAssignmentError, UnknownAssignorError) as error:
            if may_fail:
                raise
            reason = f"{reason}{INSTEAD}{name!r}: {error})"
            targets = run("uniform")
        for member, given in targets.items():
            target = frozenset(
                (topics[partition.topic].topic_id, partition.partition) for partition in given
            )
            if target != self.members[member].target:
                self.members[member] = msgspec.structs.replace(
                    self.members[member], target=target
                )
        self._value = GroupValue(
            assignor=name,
            epoch=self._next_epoch,
            reason=reason[:REASON_LENGTH_MAX],
            rebalance_time_ms=self._now_ms,
            empty_since_ms=None if self.members else self._now_ms,
        )

    def _choose_assignor(self) -> str:
        """The assignor that most members name; in a tie, the group's present assignor."""
        votes: dict[str, int] = {}
        for member in self.members.values():
            votes[member.assignor] = votes.get(member.assignor, 0) + 1
        present = self._value.assignor
        if not votes:
            return present
        return max(sorted(votes), key=lambda name: (votes[name], name == present))

    def reconcile(self) -> None:
        """Moves the partitions that may move now."""
        changed: dict[str, MemberValue] = {}
        taken: set[TopicIdPartition] = set()
        for member, value in self.members.items():
            if self._may_change(member) and (value.revoking or value.assigned != value.target):
                lost = value.assigned - value.target
                back = value.revoking & value.target
                if lost or back:
                    value = changed[member] = msgspec.structs.replace(
                        value,
                        assigned=(value.assigned - lost) | back,
                        revoking=(value.revoking | lost) - back,
                    )
            taken |= value.assigned
            taken |= value.revoking
        for member, value in self.members.items():
            if self._may_change(member):
                value = changed.get(member, value)
                gained = value.target - value.assigned - taken
                if gained:
                    changed[member] = msgspec.structs.replace(
                        value, assigned=value.assigned | gained
                    )
        for member, value in changed.items():
            if member not in self._renewed:
                value = msgspec.structs.replace(
                    value, member_epoch=self._next_epoch, previous_epoch=value.member_epoch
                )
            self.members[member] = value
        if changed:
            self._value = msgspec.structs.replace(self._value, epoch=self._next_epoch)

    def _may_change(self, member: str) -> bool:
        return member in self._renewed or self.sessions[member].is_acked

    def records(self) -> list[Record]:
        """The records of the differences: members first, the group last."""
        records: list[Record] = [
            MemberRecord(self._group, member, None)
            for member in self._before.members
            if member not in self.members
        ]
        records += [
            MemberRecord(self._group, member, value)
            for member, value in self.members.items()
            if self._before.members.get(member) is not value
        ]
        if self._value is not self._before.value:
            records.append(GroupRecord(self._group, self._value))
        return records

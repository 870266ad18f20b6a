"""Working copy of a group for one decision: members, targets, and partitions that may move now.

`group_changes` decides with it; the records follow from the differences to the state before.
"""

from __future__ import annotations

import msgspec

from rayq.core.assignors import find_assignor, run_assignor
from rayq.core.group_records import (
    GroupRecord,
    GroupValue,
    MemberRecord,
    MemberValue,
    Partitions,
    Record,
)
from rayq.core.group_state import Group, GroupState, SubscribedTopic
from rayq.errors import GroupLimitError, InvalidAssignmentError, UnknownAssignorError
from rayq.records import TopicIdPartition, TopicPartition

GROUPS_MAX = 10_000
"""The most groups of one coordinator."""
REASON_LENGTH_MAX = 512


def check_group_count(state: GroupState) -> None:
    if len(state.groups) >= GROUPS_MAX:
        raise GroupLimitError(
            f"This coordinator has {len(state.groups)} groups, the most there may be: delete old "
            "ones, or let them expire sooner (offsets_retention_ms)."
        )


class GroupDraft:
    """A group as it will be, from which the records follow. Raises GroupLimitError for one group
    too many."""

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
        """The member begins under a new epoch: no earlier one is accepted."""
        self._renewed.add(member)
        self._value = msgspec.structs.replace(self._value, epoch=self._next_epoch)
        self.members[member] = msgspec.structs.replace(
            self.members[member], member_epoch=self._next_epoch, previous_epoch=self._next_epoch
        )

    def topics_read(self) -> dict[str, SubscribedTopic]:
        """The existing topics that any member subscribes to."""
        subscription = self._state.subscription
        names = {name for one in self.members.values() for name in subscription(one).topics}
        return {name: self._state.topics[name] for name in sorted(names)}

    def rebalance(self, reason: str, *, may_fail: bool) -> None:
        """Computes every member's target. Where a user's assignor fails, the request that caused
        the rebalance is refused (`may_fail`), or `uniform` stands in for it."""
        name = self._choose_assignor()
        topics = self.topics_read()
        members = {
            member: self._state.subscription(one)
            for member, one in sorted(self.members.items())
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
            found = run(name)
        except (InvalidAssignmentError, UnknownAssignorError) as error:
            if may_fail:
                raise
            reason = f"{reason} (uniform instead of {name!r}: {error})"
            found = run("uniform")
        for member, given in found.items():
            target = frozenset((topics[one.topic].topic_id, one.partition) for one in given)
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
        for one in self.members.values():
            votes[one.assignor] = votes.get(one.assignor, 0) + 1
        present = self._value.assignor
        if not votes:
            return present
        return max(sorted(votes), key=lambda name: (votes[name], name == present))

    def reconcile(self) -> None:
        """Moves the partitions that may move now."""
        changed: dict[str, MemberValue] = {}
        taken: set[TopicIdPartition] = set()
        for member, one in self.members.items():
            if self._may_change(member) and (one.revoking or one.assigned != one.target):
                lost = one.assigned - one.target
                back = one.revoking & one.target
                if lost or back:
                    one = changed[member] = msgspec.structs.replace(
                        one,
                        assigned=(one.assigned - lost) | back,
                        revoking=(one.revoking | lost) - back,
                    )
            taken |= one.assigned
            taken |= one.revoking
        for member, one in self.members.items():
            if self._may_change(member):
                one = changed.get(member, one)
                gained = one.target - one.assigned - taken
                if gained:
                    changed[member] = msgspec.structs.replace(one, assigned=one.assigned | gained)
        for member, one in changed.items():
            if member not in self._renewed:
                one = msgspec.structs.replace(
                    one, member_epoch=self._next_epoch, previous_epoch=one.member_epoch
                )
            self.members[member] = one
        if changed:
            self._value = msgspec.structs.replace(self._value, epoch=self._next_epoch)

    def _may_change(self, member: str) -> bool:
        return member in self._renewed or self.sessions[member].is_acked

    def records(self) -> list[Record]:
        """The records of what differs from before: members first, the group last."""
        records: list[Record] = [
            MemberRecord(self._group, member, None)
            for member in self._before.members
            if member not in self.members
        ]
        records += [
            MemberRecord(self._group, member, one)
            for member, one in self.members.items()
            if self._before.members.get(member) is not one
        ]
        if self._value is not self._before.value:
            records.append(GroupRecord(self._group, self._value))
        return records

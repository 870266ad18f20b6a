"""A group coordinator's answers about the state of its groups."""

from __future__ import annotations

from typing import Any

import msgspec

from rayq import messages
from rayq.core.access.rights import View
from rayq.core.decision import Decision, Times
from rayq.core.groups.changes import TOPICS_CHANGED, find_group
from rayq.core.groups.draft import INSTEAD
from rayq.core.groups.offsets import committed_offsets
from rayq.core.groups.records import Partitions, Record
from rayq.core.groups.state import GroupState
from rayq.messages import TopicPartitionId
from rayq.messages.secret_names import shown_part


def list_groups(
    state: GroupState, _request: messages.ListGroups, _: Times
) -> Decision[Record, messages.ListGroupsResponse]:
    def answer() -> messages.ListGroupsResponse:
        return messages.ListGroupsResponse(
            [
                messages.GroupSummary(name, group.name_of_state, len(group.members))
                for name, group in sorted(state.groups.items())
            ]
        )

    return Decision([], answer)


def describe_group(
    state: GroupState, request: messages.DescribeGroup, _: Times
) -> Decision[Record, messages.DescribeGroupResponse]:
    """Describes a group. Raises UnknownGroupError."""
    group = find_group(state, request.group)

    def answer() -> messages.DescribeGroupResponse:
        return messages.DescribeGroupResponse(
            group=request.group,
            state=group.name_of_state,
            epoch=group.value.epoch,
            assignor=group.value.assignor,
            members=[
                messages.GroupMemberDescription(
                    member=shown_part(member),
                    instance=value.instance,
                    client=value.client,
                    member_epoch=value.member_epoch,
                    assigned=named(state, value.assigned),
                    revoking=named(state, value.revoking),
                )
                for member, value in sorted(group.members.items())
            ],
            offsets=committed_offsets(group, sorted(group.offsets)),
            rebalance_reason=group.value.reason,
            rebalance_time_ms=group.value.rebalance_time_ms,
        )

    return Decision([], answer)


def shown(view: View, answer: Any) -> Any:
    """An answer to a named principal, without the groups and topics that it may not describe."""
    if isinstance(answer, messages.ListGroupsResponse):
        return messages.ListGroupsResponse(
            [group for group in answer.groups if view.shows("group", group.group)]
        )
    if isinstance(answer, messages.FetchCommittedResponse):
        return messages.FetchCommittedResponse(_shown_offsets(view, answer.offsets))
    if isinstance(answer, messages.DescribeGroupResponse):
        return msgspec.structs.replace(
            answer,
            members=[
                msgspec.structs.replace(
                    member,
                    assigned=_shown_partitions(view, member.assigned),
                    revoking=_shown_partitions(view, member.revoking),
                )
                for member in answer.members
            ],
            offsets=_shown_offsets(view, answer.offsets),
            rebalance_reason=_shown_reason(view, answer.rebalance_reason),
        )
    return answer


def _shown_partitions(
    view: View, partitions: list[TopicPartitionId]
) -> list[TopicPartitionId]:
    return [partition for partition in partitions if view.shows("topic", partition.topic)]


def _shown_offsets(
    view: View, offsets: list[messages.CommittedOffset]
) -> list[messages.CommittedOffset]:
    return [offset for offset in offsets if view.shows_topic_id(offset.topic_id)]


def _shown_reason(view: View, reason: str) -> str:
    """The reason of a rebalance without names of hidden topics, and without the words of an
    assignor that failed, which may have such names."""
    reason, _, failure = reason.partition(INSTEAD)
    if reason.startswith(TOPICS_CHANGED):
        names = reason.removeprefix(TOPICS_CHANGED).removesuffix(" changed").split(", ")
        if not all(name == "..." or view.shows("topic", name) for name in names):
            reason = "the partitions of its topics changed"
    return f"{reason} (uniform instead of its assignor, which failed)" if failure else reason


def named(state: GroupState, partitions: Partitions) -> list[TopicPartitionId]:
    """The partitions with the names of their topics, sorted."""
    listed = sorted(
        (state.name_of_topic(topic_id), topic_id, partition) for topic_id, partition in partitions
    )
    return [TopicPartitionId(topic, topic_id, partition) for topic, topic_id, partition in listed]

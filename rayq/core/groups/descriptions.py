"""A group coordinator's answers about the state of its groups."""

from __future__ import annotations

from rayq import messages
from rayq.core.decision import Decision, Times
from rayq.core.groups.changes import find_group
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


def named(state: GroupState, partitions: Partitions) -> list[TopicPartitionId]:
    """The partitions with the names of their topics, sorted."""
    listed = sorted(
        (state.name_of_topic(topic_id), topic_id, partition) for topic_id, partition in partitions
    )
    return [TopicPartitionId(topic, topic_id, partition) for topic, topic_id, partition in listed]

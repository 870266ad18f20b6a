"""A group coordinator's answers about the state of its groups."""

from __future__ import annotations

from collections.abc import Iterable

from rayq import messages
from rayq.core.groups.records import Partitions
from rayq.core.groups.state import Group, GroupState
from rayq.messages import TopicPartitionId
from rayq.messages.secret_names import shown_part
from rayq.records import TopicIdPartition


def summaries(state: GroupState) -> list[messages.GroupSummary]:
    return [
        messages.GroupSummary(name, group.name_of_state, len(group.members))
        for name, group in sorted(state.groups.items())
    ]


def description(state: GroupState, name: str, group: Group) -> messages.DescribeGroupResponse:
    return messages.DescribeGroupResponse(
        group=name,
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


def committed_offsets(
    group: Group, wanted: Iterable[TopicIdPartition]
) -> list[messages.CommittedOffset]:
    """The committed offsets of those wanted partitions that have one."""
    return [
        messages.CommittedOffset(
            topic_id=topic_id,
            partition=partition,
            offset=committed.offset,
            last_epoch=committed.last_epoch,
            metadata=committed.metadata,
            commit_time_ms=committed.commit_time_ms,
        )
        for topic_id, partition in wanted
        if (committed := group.offsets.get((topic_id, partition))) is not None
    ]


def named(state: GroupState, partitions: Partitions) -> list[TopicPartitionId]:
    """The partitions with the names of their topics, sorted."""
    listed = sorted(
        (state.name_of_topic(topic_id), topic_id, partition) for topic_id, partition in partitions
    )
    return [TopicPartitionId(topic, topic_id, partition) for topic, topic_id, partition in listed]

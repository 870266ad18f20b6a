"""A coordinator's answers to named principals: without what they may not describe."""

from __future__ import annotations

import msgspec

from rayq.core.access.acls import AclTable
from rayq.core.access.rights import View
from rayq.core.cluster.records import TopicCreated
from rayq.core.cluster.state import ClusterState
from rayq.core.groups.descriptions import shown
from rayq.messages import (
    CommittedOffset,
    DescribeGroupResponse,
    Done,
    FetchCommittedResponse,
    GroupMemberDescription,
    GroupSummary,
    ListGroupsResponse,
    TopicPartitionId,
)
from rayq.messages.acls import Acl


def view(*acls: Acl) -> View:
    state = ClusterState()
    for name in ("orders", "secret"):
        state.replay(TopicCreated(f"id of {name}", name, {}, 1))
    return View(AclTable(acls), "anna", "h", state)


ORDERS = view(Acl("anna", "allow", "read", "topic", "orders"))


def owned(name: str) -> TopicPartitionId:
    return TopicPartitionId(name, f"id of {name}", 0)


def offset(topic_id: str) -> CommittedOffset:
    return CommittedOffset(topic_id, 0, 1, None, "", 1)


def described(reason: str) -> DescribeGroupResponse:
    both = [owned("orders"), owned("secret")]
    member = GroupMemberDescription("m", None, "c", 1, both, both)
    offsets = [offset("id of orders"), offset("id of secret"), offset("id of a deleted one")]
    return DescribeGroupResponse("g", "stable", 1, "uniform", [member], offsets, reason, 1)


def test_a_group_is_described_without_hidden_topics() -> None:
    answer = shown(ORDERS, described("member m joined"))
    (member,) = answer.members
    assert member.assigned == member.revoking == [owned("orders")]
    assert [topic.topic_id for topic in answer.offsets] == ["id of orders", "id of a deleted one"]
    assert answer.rebalance_reason == "member m joined"
    assert b"secret" not in msgspec.msgpack.encode(answer)


def test_the_reason_of_a_rebalance_has_no_hidden_name() -> None:
    for reason, told in {
        "the partitions of orders changed": "the partitions of orders changed",
        "the partitions of orders, secret changed": "the partitions of its topics changed",
        "the partitions of secr": "the partitions of its topics changed",
        "member m joined (uniform instead of 'mine': secret-0 failed)": (
            "member m joined (uniform instead of its assignor, which failed)"
        ),
    }.items():
        assert shown(ORDERS, described(reason)).rebalance_reason == told


def test_lists_have_what_may_be_described() -> None:
    groups = [GroupSummary(name, "empty", 0) for name in ("billing", "mails")]
    seen = view(Acl("anna", "allow", "describe", "group", "mails"))
    assert shown(seen, ListGroupsResponse(groups)).groups == groups[1:]
    answer = FetchCommittedResponse([offset("id of orders"), offset("id of secret")])
    assert shown(ORDERS, answer).offsets == [offset("id of orders")]
    assert shown(ORDERS, Done()) == Done()

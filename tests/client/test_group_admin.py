"""The admin's group calls, against a played coordinator; and keys for compacted topics."""

from __future__ import annotations

import pytest

from rayq.client.cluster import Cluster
from rayq.errors import (
    GroupNotEmptyError,
    InvalidRequestError,
    NullKeyError,
    OutcomeUnknownError,
    UnknownGroupError,
    UnknownTopicError,
)
from rayq.messages import DeleteGroup, EnsureOffsetsTopic, Produce, SetGroupOffsets
from rayq.records import GroupListing, GroupOffset, TopicPartition
from tests.client.fake_broker import FakeCluster

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def two(fake: FakeCluster) -> FakeCluster:
    """A topic of two partitions with ten records each, and a group that has read some."""
    fake.create_topic("t", partitions=2)
    fake.create_topic("__consumer_offsets")
    for partition in range(2):
        fake.write("t", [b"%d" % number for number in range(10)], partition, timestamps_ms=500)
    fake.groups.commit("t", 0, 4, metadata="half")
    return fake


def test_looking_at_groups_creates_nothing(fake: FakeCluster, cluster: Cluster) -> None:
    assert cluster.admin.list_groups() == []
    with pytest.raises(UnknownGroupError):
        cluster.admin.describe_group("g")
    with pytest.raises(UnknownGroupError):
        cluster.admin.delete_group("g")
    assert fake.asked(EnsureOffsetsTopic) == []


def test_a_group_is_listed_and_described(two: FakeCluster, cluster: Cluster) -> None:
    assert cluster.admin.list_groups() == [GroupListing("g", "empty", 0)]
    assert cluster.admin.list_topics() == ["t"]
    with cluster.consumer("t", group="g", auto_offset_reset="earliest") as consumer:
        while not consumer.assignment():
            consumer.poll(timeout_s=0.1)
        info = cluster.admin.describe_group("g")
    (member,) = info.members
    assert (info.state, info.assignor, info.lag) == ("stable", "uniform", 6)
    assert member.assigned == [T0, T1] and member.revoking == []
    assert ":" in member.client
    assert info.partitions == {
        T0: GroupOffset(4, 10, 6, "half", 1000, member.member),
        T1: GroupOffset(None, 10, None, "", None, member.member),
    }
    assert (info.rebalance_reason, info.rebalance_time_ms) == ("somebody joined", 3000)


def test_offsets_are_set_in_every_way(two: FakeCluster, cluster: Cluster) -> None:
    set_offsets = cluster.admin.set_group_offsets
    two.write("t", [b"late"], 0, timestamps_ms=900)
    assert set_offsets("g", "t", to="earliest", dry_run=True) == {T0: 0, T1: 0}
    assert two.asked(SetGroupOffsets) == []
    assert set_offsets("g", "t", to="latest") == {T0: 11, T1: 10}
    assert two.groups.committed("t", 0) == 11
    assert set_offsets("g", ["t"], to=3) == {T0: 3, T1: 3}
    assert set_offsets("g", [T1], to=99) == {T1: 10}
    assert set_offsets("g", to={T0: 7}) == {T0: 7}
    assert set_offsets("g", shift=-2) == {T0: 5, T1: 8}
    assert set_offsets("g", shift=100, dry_run=True) == {T0: 11, T1: 10}
    assert set_offsets("g", "t", timestamp_ms=600) == {T0: 10, T1: 10}
    assert two.groups.committed("t", 0) == 10


def test_a_group_whose_deletion_is_repeated_is_deleted(two: FakeCluster, cluster: Cluster) -> None:
    two.fault(DeleteGroup, disconnect=True, carry_out=True)
    cluster.admin.delete_group("g")
    with pytest.raises(UnknownGroupError):
        cluster.admin.delete_group("g")


def test_offsets_that_may_have_been_set_before_members_joined_are_not_called_refused(
    two: FakeCluster, cluster: Cluster
) -> None:
    two.fault(SetGroupOffsets, disconnect=True, carry_out=True)
    two.fault(SetGroupOffsets, error=GroupNotEmptyError("Group 'g' has members."))
    with pytest.raises(OutcomeUnknownError, match="describe_group"):
        cluster.admin.set_group_offsets("g", "t", to=3)
    two.fault(SetGroupOffsets, error=GroupNotEmptyError("Group 'g' has members."))
    with pytest.raises(GroupNotEmptyError):
        cluster.admin.set_group_offsets("g", "t", to=3)


def test_offsets_are_not_set_by_mistake(two: FakeCluster, cluster: Cluster) -> None:
    set_offsets = cluster.admin.set_group_offsets
    with pytest.raises(InvalidRequestError, match="one of"):
        set_offsets("g", "t")
    with pytest.raises(InvalidRequestError, match="one of"):
        set_offsets("g", "t", to="latest", shift=3)
    with pytest.raises(InvalidRequestError, match="t-1 has no committed offset"):
        set_offsets("g", "t", shift=1)
    with pytest.raises(InvalidRequestError, match="names the partitions"):
        set_offsets("g", "t", to={T0: 1})
    for wrong in ("begin", -1):
        with pytest.raises(InvalidRequestError, match="earliest"):
            set_offsets("g", "t", to=wrong)
    with pytest.raises(UnknownTopicError):
        set_offsets("g", "nowhere", to=1)
    with cluster.consumer("t", group="g") as consumer:
        while not consumer.assignment():
            consumer.poll(timeout_s=0.1)
        with pytest.raises(GroupNotEmptyError):
            set_offsets("g", "t", to=1)
        with pytest.raises(GroupNotEmptyError):
            cluster.admin.delete_group("g")


def test_a_deleted_group_is_gone(two: FakeCluster, cluster: Cluster) -> None:
    cluster.admin.delete_group("g")
    assert cluster.admin.list_groups() == []


def test_a_compacted_topic_takes_no_record_without_a_key(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("c", cleanup_policy="compact")
    fake.create_topic("d", cleanup_policy="compact,delete")
    with cluster.producer() as producer:
        for topic in ("c", "d"):
            with pytest.raises(NullKeyError, match="every record needs"):
                producer.send(topic, b"v")
            with pytest.raises(NullKeyError):
                producer.send_many(topic, [b"v"])
            with pytest.raises(NullKeyError):
                producer.send_many(topic, [b"v", b"w"], keys=[b"k", None])
            producer.send(topic, None, key=b"k").result(30)
            producer.send_many(topic, [b"v"], keys=[b"k"]).result(30)
    assert len(fake.asked(Produce)) == 4

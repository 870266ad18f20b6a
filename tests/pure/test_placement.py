"""Where the replicas of new partitions go, and how many a broker carries at most."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core.cluster.placement import check_replica_limits, place
from rayq.core.cluster.records import (
    BrokerRegistered,
    PartitionChanged,
    PartitionValue,
    TopicCreated,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import ReplicaLimitError


def test_replicas_spread_over_nodes_and_leaders_over_brokers() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    placed = place(nodes, [], partitions=60, replication_factor=3)
    for replicas in placed:
        assert len({nodes[broker] for broker in replicas}) == 3
    leads = [sum(replicas[0] == broker for replicas in placed) for broker in nodes]
    carries = [sum(broker in replicas for replicas in placed) for broker in nodes]
    assert leads == [10] * 6
    assert max(carries) - min(carries) <= 1


@settings(max_examples=50)
@given(st.data())
def test_replicas_of_a_partition_are_on_different_brokers_and_as_many_nodes_as_can_be(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 6))
    nodes = {broker: f"n{data.draw(st.integers(0, 3))}" for broker in range(count)}
    factor = data.draw(st.integers(1, count))
    placed = place(nodes, [], partitions=count * 2, replication_factor=factor)
    assert len(placed) == count * 2
    for replicas in placed:
        assert len(set(replicas)) == factor
        spread_over = {nodes[broker] for broker in replicas}
        assert len(spread_over) == min(factor, len(set(nodes.values())))
    assert Counter(replicas[0] for replicas in placed) == dict.fromkeys(nodes, 2)


def test_brokers_follow_each_other_equally_often() -> None:
    """The leadership of a broker that is lost then goes to all others alike."""
    nodes = {broker: f"n{broker}" for broker in range(4)}
    placed = place(nodes, [], partitions=24, replication_factor=2)
    pairs = Counter(placed)
    assert len(pairs) == 12 and set(pairs.values()) == {2}


@pytest.mark.parametrize(
    "existing, placed",
    [
        ([], [(0, 1), (2, 0), (1, 2)]),
        ([(0, 1), (1, 2)], [(2, 0), (0, 2), (1, 0)]),
        ([(0, 1), (0, 1), (0, 1)], [(2, 0), (1, 2), (2, 1)]),
        # Broker 1 leads none and carries most, 2 leads none either.
        ([(0, 1), (0, 1)], [(2, 0), (1, 2), (2, 1)]),
    ],
)
def test_what_is_there_already_counts(
    existing: list[tuple[int, ...]], placed: list[tuple[int, ...]]
) -> None:
    nodes = {0: "a", 1: "b", 2: "c"}
    assert place(nodes, existing, partitions=3, replication_factor=2) == placed


def test_brokers_lead_equally_many_once_those_that_led_fewer_have_caught_up() -> None:
    nodes = {0: "a", 1: "b", 2: "c"}
    existing = [(0, 1)] * 4
    everything = existing + place(nodes, existing, partitions=8, replication_factor=2)
    assert Counter(replicas[0] for replicas in everything) == dict.fromkeys(nodes, 4)


def test_a_broker_carries_as_many_replicas_as_it_may_and_no_more() -> None:
    state = ClusterState()
    for broker in (0, 1):
        state.replay(BrokerRegistered(broker, f"d{broker}", 1, "i", "h", 1, "n", 3 + broker))
    state.replay(TopicCreated("id-t", "t", {}, 2))
    for number, replicas in enumerate([(0, 1), (1, 0)]):
        state.replay(PartitionChanged("id-t", number, PartitionValue(replicas)))
    check_replica_limits(state, {}, "This")
    check_replica_limits(state, {0: 1, 1: 2}, "This")
    with pytest.raises(ReplicaLimitError, match=r"This would give broker 1 2 \+ 3 = 5 .* = 4 "):
        check_replica_limits(state, {1: 3, 0: 1}, "This")
    with pytest.raises(ReplicaLimitError, match=r"broker 0 2 \+ 2 = 4 "):
        check_replica_limits(state, {1: 3, 0: 2}, "This")

"""What happens to a few partitions costs the same in a large cluster: the work is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rayq.core.cluster import broker_changes, reassignment
from rayq.core.cluster.records import MetadataRecord, PartitionChanged, PartitionValue, TopicCreated
from rayq.core.cluster.state import ClusterState
from tests.pure.test_cluster_state import EVERYONE, apply, cluster, create, run_replicas
from tests.pure.work import lines_run

OTHERS = 300
"""Number of partitions of a large cluster in which the brokers in question have no part."""
Decision = Callable[[ClusterState], list[MetadataRecord]]


def state_with(others: int) -> ClusterState:
    """Brokers 0, 1 and 2 have topic t. The others have so many more partitions."""
    state = cluster(5, replicas_max=1000)
    create(state, partitions=4)
    run_replicas(state, 0, 1, 2)
    apply(state, [
        TopicCreated("O", "others", {}, 2),
        *(
            PartitionChanged("O", number, PartitionValue((3, 4), leader_epoch=1))
            for number in range(others)
        ),
    ])  # fmt: skip
    return state


def fenced(state: ClusterState) -> list[MetadataRecord]:
    return broker_changes.fence_broker(state, 0, EVERYONE)


def balanced(state: ClusterState) -> list[MetadataRecord]:
    return broker_changes.balance_leaders(state, EVERYONE)


def completed(state: ClusterState) -> list[MetadataRecord]:
    return reassignment.complete_moves(state, EVERYONE)


def rebuilt(state: ClusterState) -> list[MetadataRecord]:
    return reassignment.rebuild(state, {9})


def voting(state: ClusterState) -> list[MetadataRecord]:
    return broker_changes.next_voters(state, EVERYONE)


@pytest.mark.parametrize("decide", [fenced, balanced, completed, rebuilt, voting])
def test_a_decision_costs_what_it_concerns(decide: Decision) -> None:
    small, large = state_with(0), state_with(OTHERS)
    assert len(decide(small)) == len(decide(large))
    assert lines_run(lambda: decide(large)) == lines_run(lambda: decide(small))


def test_a_broker_that_returns_costs_what_it_holds() -> None:
    small, large = state_with(0), state_with(OTHERS)
    for state in (small, large):
        for record in fenced(state):
            state.replay(record)

    def heard(state: ClusterState) -> int:
        return lines_run(lambda: broker_changes.hear_broker(state, 0, EVERYONE))

    assert heard(large) == heard(small)


def test_a_record_costs_the_same_in_a_large_cluster() -> None:
    small, large = state_with(0), state_with(OTHERS)
    records = fenced(small)

    def replayed(state: ClusterState) -> int:
        return lines_run(lambda: [state.replay(record) for record in records])

    assert replayed(large) == replayed(small)


def test_rebuilding_costs_no_plan_of_all_partitions_while_no_further_move_can_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reassignment, "REBUILDS_MAX", 1)
    small, large = state_with(0), state_with(OTHERS)
    for state in (small, large):
        for record in fenced(state):
            state.replay(record)
        for record in reassignment.rebuild(state, {0}):
            state.replay(record)
        assert len(state.moving) == 1

    def rebuilt_again(state: ClusterState) -> int:
        return lines_run(lambda: reassignment.rebuild(state, {0}))

    assert rebuilt_again(large) == rebuilt_again(small)

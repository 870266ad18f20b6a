"""Moving partitions, as the controller decides it: moves begin, complete, and may be taken back."""

from __future__ import annotations

from typing import Any

import pytest

from rayq import messages
from rayq.core.cluster import broker_changes, reassignment, topic_changes
from rayq.core.cluster.records import (
    BrokerRegistered,
    MetadataRecord,
    PartitionValue,
    Voter,
    VotersChanged,
    decode_records,
    encode_records,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    BrokerInUseError,
    ConfigError,
    InvalidReassignmentError,
    InvalidReplicationFactorError,
    NoReassignmentError,
    ReassignmentInProgressError,
    ReplicaLimitError,
    StalePartitionError,
    UnknownBrokerError,
    UnknownTopicError,
)
from rayq.messages import ReplicaRegistration
from tests.pure.deciding import decide

EVERYONE = frozenset(range(6))


def apply(state: ClusterState, records: list[MetadataRecord]) -> None:
    for record in records:
        state.replay(record)
    state.validate()


def register(state: ClusterState, broker: int, start: int = 1) -> None:
    registration = BrokerRegistered(
        broker, f"d{broker}", start, f"b{broker}.{start}", "h", 9000, f"n{broker}", 100
    )
    apply(state, broker_changes.register_broker(state, registration, (), EVERYONE))


def run(state: ClusterState, *brokers: int, incarnation: str = "a", epoch: int | None = None) -> None:
    """Replica processes start; their brokers know the newest metadata, or that of `epoch`."""
    for broker in brokers:
        known = value(state).partition_epoch if epoch is None else epoch
        report = ReplicaRegistration("id-t", 0, f"{broker}{incarnation}", "h", 1, None, 0, known)
        apply(state, broker_changes.register_replicas(state, broker, [report], EVERYONE))


def in_sync(state: ClusterState, *brokers: int) -> None:
    """The leader proposes this set, and it is accepted."""
    now = value(state)
    processes = state.topics["id-t"].partitions[0].processes
    apply(state, broker_changes.alter_partition(state, messages.AlterPartition(
        topic_id="id-t", partition=0, broker=now.leader,
        incarnation=now.leader_incarnation, leader_epoch=now.leader_epoch,
        partition_epoch=now.partition_epoch,
        isr=[(broker, processes[broker].incarnation) for broker in brokers])))


def value(state: ClusterState) -> PartitionValue:
    return state.topics["id-t"].partitions[0].value


def members(state: ClusterState) -> list[int]:
    return sorted(member.broker for member in value(state).isr)


def move(state: ClusterState, *target: int, throttle: int | None = None, name: str = "t") -> None:
    apply(state, decide(state, messages.AlterReassignments([(name, 0, target)], throttle), heard=EVERYONE))


def cancel(state: ClusterState) -> None:
    apply(state, decide(state, messages.AlterReassignments([("t", 0, None)], None), heard=EVERYONE))


def complete(state: ClusterState, heard: Any = EVERYONE) -> None:
    apply(state, reassignment.complete_moves(state, heard))


def three_brokers(topic: str, partitions: int) -> ClusterState:
    """A topic on all three of them. No replica runs yet."""
    state = ClusterState()
    for broker in range(3):
        register(state, broker)
    apply(state, topic_changes.new_topic(
        state, topic_id=f"id-{topic}", name=topic, partitions=partitions, replication_factor=3,
        options={}))
    return state


@pytest.fixture
def state() -> ClusterState:
    """Five brokers. Topic t is on 0, 1 and 2, is led by 0, and is all in sync."""
    state = three_brokers("t", partitions=1)
    run(state, 0, 1, 2)
    register(state, 3)
    register(state, 4)
    assert (value(state).replicas, value(state).leader) == ((0, 1, 2), 0)
    return state


def test_a_move_adds_replicas_and_takes_nothing_away(state: ClusterState) -> None:
    move(state, 3, 1, 2, throttle=1000)
    now = value(state)
    assert now.replicas == (3, 1, 2, 0)
    assert (now.target, now.origin) == ((3, 1, 2), (0, 1, 2))
    assert (now.adding, now.removing) == ((3,), (0,))
    assert (now.leader, members(state), now.throttle_bytes_per_s) == (0, [0, 1, 2], 1000)
    complete(state)
    assert value(state) == now


def test_it_is_over_when_all_of_the_target_are_in_sync(state: ClusterState) -> None:
    move(state, 3, 1, 4)
    run(state, 3, 4)
    in_sync(state, 0, 1, 2, 3)
    complete(state)
    assert value(state).target
    in_sync(state, 0, 1, 2, 3, 4)
    epoch = value(state).leader_epoch
    complete(state)
    now = value(state)
    assert (now.replicas, members(state), now.elr) == ((3, 1, 4), [1, 3, 4], ())
    assert (now.leader, now.leader_incarnation, now.leader_epoch) == (3, "3a", epoch + 1)
    assert not now.target and not now.origin and now.throttle_bytes_per_s is None
    assert set(state.topics["id-t"].partitions[0].processes) == {1, 3, 4}
    assert not state.moving


def test_a_leader_that_keeps_its_replica_goes_on_in_its_epoch(state: ClusterState) -> None:
    epoch = value(state).leader_epoch
    move(state, 3, 0, 1)
    run(state, 3)
    in_sync(state, 0, 1, 2, 3)
    complete(state)
    assert (value(state).leader, value(state).leader_epoch) == (0, epoch)


def test_a_member_of_the_target_that_is_dead_holds_the_move_up(state: ClusterState) -> None:
    move(state, 3, 1, 2)
    run(state, 3)
    in_sync(state, 0, 1, 2, 3)
    apply(state, broker_changes.fence_broker(state, 2, EVERYONE))
    complete(state)
    assert value(state).replicas == (3, 1, 2, 0)


def test_nothing_completes_on_what_is_said_of_brokers_that_were_not_heard(
    state: ClusterState,
) -> None:
    move(state, 3, 1, 2)
    run(state, 3)
    in_sync(state, 0, 1, 2, 3)
    complete(state, heard={1, 2})
    assert value(state).target
    complete(state, heard={1, 2, 3})
    assert not value(state).target


def test_another_order_takes_effect_at_once(state: ClusterState) -> None:
    move(state, 2, 0, 1)
    assert (value(state).replicas, value(state).target) == ((2, 0, 1), ())
    assert (value(state).leader, members(state)) == (0, [0, 1, 2])
    now = value(state)
    move(state, 2, 0, 1)
    assert value(state) == now


def test_a_cancelled_move_leaves_what_was_there_before(state: ClusterState) -> None:
    move(state, 3, 4, 2)
    run(state, 3)
    in_sync(state, 0, 1, 2, 3)
    epoch = value(state).leader_epoch
    cancel(state)
    now = value(state)
    assert (now.replicas, members(state)) == ((0, 1, 2), [0, 1, 2])
    assert (now.leader, now.leader_epoch, now.target) == (0, epoch, ())
    with pytest.raises(NoReassignmentError):
        cancel(state)


def test_a_move_whose_new_replicas_hold_acknowledged_records_is_not_cancelled(
    state: ClusterState,
) -> None:
    move(state, 3, 4, 2)
    run(state, 3, 4)
    in_sync(state, 0, 1, 2, 3, 4)
    apply(state, broker_changes.fence_broker(state, 0, EVERYONE))
    apply(state, broker_changes.fence_broker(state, 1, EVERYONE))
    assert (value(state).leader, members(state)) == (3, [2, 3, 4])
    with pytest.raises(InvalidReassignmentError, match=r"only \[2\] are in sync"):
        cancel(state)
    complete(state)
    assert value(state).replicas == (3, 4, 2)


def test_a_cancelled_move_takes_the_leadership_back(state: ClusterState) -> None:
    move(state, 3, 1, 2)
    run(state, 3)
    in_sync(state, 0, 1, 2, 3)
    apply(state, broker_changes.balance_leaders(state, EVERYONE))
    assert value(state).leader == 3
    cancel(state)
    assert (value(state).leader, members(state)) == (0, [0, 1, 2])


def test_a_replica_that_left_cannot_join_again_by_what_was_known_before(
    state: ClusterState,
) -> None:
    before = value(state).partition_epoch
    move(state, 3, 1, 2)
    run(state, 3)
    in_sync(state, 0, 1, 2, 3)
    complete(state)
    with pytest.raises(StalePartitionError, match="Broker 0 cannot be in sync"):
        apply(state, broker_changes.alter_partition(state, messages.AlterPartition(
            topic_id="id-t", partition=0, broker=3, incarnation="3a",
            leader_epoch=value(state).leader_epoch,
            partition_epoch=value(state).partition_epoch,
            isr=[(3, "3a"), (1, "1a"), (2, "2a"), (0, "0a")])))
    move(state, 0, 1, 2)
    run(state, 0, epoch=before)  # on its way since before the move
    assert 0 not in state.topics["id-t"].partitions[0].processes
    run(state, 0, incarnation="b")
    assert state.topics["id-t"].partitions[0].processes[0].incarnation == "0b"


def test_impossible_moves_are_refused_and_none_of_the_others_begins(state: ClusterState) -> None:
    for target, why in [
        ((0, 1, 9), "no broker 9"),
        ((0, 1, 1), "named twice"),
        ((0, 1), "name 3 brokers"),
        ((), "name 3 brokers"),
    ]:
        with pytest.raises(InvalidReassignmentError, match=why):
            move(state, *target)
    with pytest.raises(UnknownTopicError):
        move(state, 0, 1, 2, name="nope")
    with pytest.raises(UnknownTopicError, match="no partition 7"):
        decide(state, messages.AlterReassignments([("t", 7, (0, 1, 2))], None), heard=EVERYONE)
    with pytest.raises(InvalidReassignmentError, match="positive"):
        move(state, 3, 1, 2, throttle=0)
    with pytest.raises(InvalidReassignmentError, match="t-0 is named twice"):
        twice = [("t", 0, (3, 1, 2)), ("t", 0, (4, 1, 2))]
        decide(state, messages.AlterReassignments(twice, None), heard=EVERYONE)
    apply(state, broker_changes.fence_broker(state, 4, EVERYONE))
    with pytest.raises(InvalidReassignmentError, match="broker 4 is not running"):
        move(state, 4, 1, 2)
    apply(state, decide(state, messages.CordonBroker(3, True)))
    with pytest.raises(InvalidReassignmentError, match="broker 3 is cordoned"):
        move(state, 3, 1, 2)
    assert not state.moving


def test_a_move_that_would_leave_too_few_running_is_refused(state: ClusterState) -> None:
    for broker in (1, 2):
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    with pytest.raises(InvalidReassignmentError, match=r"only \[3\].*min_insync_replicas is 2"):
        move(state, 3, 1, 2)


def test_a_second_move_is_refused_and_the_same_one_takes_a_new_throttle(
    state: ClusterState,
) -> None:
    move(state, 3, 1, 2, throttle=1000)
    with pytest.raises(ReassignmentInProgressError):
        move(state, 4, 1, 2)
    now = value(state)
    move(state, 3, 1, 2, throttle=1000)
    assert value(state) == now
    move(state, 3, 1, 2)
    assert value(state).throttle_bytes_per_s is None
    assert value(state).target == (3, 1, 2)


def test_a_move_takes_a_new_throttle_whoever_is_down(state: ClusterState) -> None:
    move(state, 3, 1, 2, throttle=1000)
    for broker in (1, 2):
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    move(state, 3, 1, 2, throttle=5)
    assert value(state).throttle_bytes_per_s == 5


def test_a_move_that_waits_for_a_broker_that_is_down_takes_another_target(
    state: ClusterState,
) -> None:
    register(state, 5)
    move(state, 3, 4, 2, throttle=1000)
    run(state, 3, 4)
    in_sync(state, 0, 1, 2, 3)
    for broker in (0, 1, 4):  # Too few old replicas are left to cancel the move.
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    with pytest.raises(InvalidReassignmentError, match="give it another"):
        cancel(state)
    with pytest.raises(ReassignmentInProgressError, match="all added ones that are in sync"):
        move(state, 5, 1, 2)
    epoch = value(state).partition_epoch
    move(state, 3, 5, 2, throttle=7)
    now = value(state)
    assert (now.replicas, now.target, now.origin) == ((3, 5, 2, 0, 1), (3, 5, 2), (0, 1, 2))
    assert (members(state), now.throttle_bytes_per_s, now.placed_epoch) == ([2, 3], 7, epoch + 1)
    assert 4 not in state.topics["id-t"].partitions[0].processes
    run(state, 5)
    in_sync(state, 2, 3, 5)
    complete(state)
    assert value(state).replicas == (3, 5, 2)


def test_the_replicas_of_before_as_another_target_end_the_move(state: ClusterState) -> None:
    move(state, 3, 1, 2)
    apply(state, broker_changes.fence_broker(state, 3, EVERYONE))
    move(state, 2, 0, 1)
    now = value(state)
    assert (now.replicas, now.target, now.origin) == ((2, 0, 1), (), ())
    assert members(state) == [0, 1, 2] and not state.moving


def test_a_move_cannot_exceed_what_a_broker_may_carry(state: ClusterState) -> None:
    registration = BrokerRegistered(5, "d5", 1, "b5.1", "h", 9000, "n5", 0)
    apply(state, broker_changes.register_broker(state, registration, (), EVERYONE))
    with pytest.raises(ReplicaLimitError, match="max_replicas_per_broker = 0"):
        move(state, 5, 1, 2)


def test_an_unclean_election_prefers_a_replica_that_is_not_being_added(
    state: ClusterState,
) -> None:
    apply(state, topic_changes.alter_topic_config(state, "t", {"unclean_leader_election": True}))
    move(state, 3, 1, 2)
    run(state, 3)
    in_sync(state, 0)
    for broker in (0, 1):
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    assert value(state).leader == 2


def test_a_cordoned_broker_takes_no_new_replicas_and_stays_cordoned_when_it_restarts(
    state: ClusterState,
) -> None:
    for broker in (3, 4):
        apply(state, decide(state, messages.CordonBroker(broker, True)))
    register(state, 4, start=2)
    apply(state, topic_changes.new_topic(
        state, topic_id="id-u", name="u", partitions=3, replication_factor=None, options={}))
    placed = {
        host
        for number in range(3)
        for host in state.topics["id-u"].partitions[number].value.replicas
    }
    assert placed == {0, 1, 2}
    with pytest.raises(InvalidReplicationFactorError, match=r"cordoned: \[3, 4\]"):
        topic_changes.new_topic(
            state, topic_id="id-v", name="v", partitions=1, replication_factor=4, options={})
    for broker in (0, 1):
        apply(state, decide(state, messages.CordonBroker(broker, True)))
    with pytest.raises(InvalidReassignmentError, match="the last one"):
        decide(state, messages.CordonBroker(2, True))
    with pytest.raises(UnknownBrokerError):
        decide(state, messages.CordonBroker(9, True))
    apply(state, decide(state, messages.CordonBroker(3, False)))
    assert decide(state, messages.CordonBroker(3, False)) == []


def voters(state: ClusterState) -> list[int]:
    return [voter.broker for voter in state.voters]


def steps(state: ClusterState) -> list[list[int]]:
    """The voters after each single change, until nothing is left to change."""
    seen = []
    while records := broker_changes.next_voters(state, EVERYONE):
        apply(state, records)
        seen.append(voters(state))
        assert len(seen) < 10
    return seen


def test_a_cordoned_voter_is_replaced_and_the_other_joins_first(state: ClusterState) -> None:
    apply(state, [VotersChanged(tuple(Voter(voter, f"d{voter}") for voter in (0, 1, 2)))])
    assert steps(state) == []
    apply(state, decide(state, messages.CordonBroker(1, True)))
    assert steps(state) == [[0, 1, 2, 3], [0, 2, 3]]
    apply(state, decide(state, messages.CordonBroker(0, True)))
    assert steps(state) == [[0, 2, 3, 4], [2, 3, 4]]
    apply(state, decide(state, messages.CordonBroker(2, True)))
    assert steps(state) == []  # no broker can take its place


def test_a_cluster_that_forms_keeps_voters_that_have_not_registered_yet() -> None:
    state = ClusterState()
    apply(state, [VotersChanged(tuple(Voter(voter, f"d{voter}") for voter in (0, 1, 2)))])
    register(state, 0)
    assert steps(state) == []
    register(state, 1)
    assert steps(state) == []


def test_a_broker_is_removed_when_it_holds_nothing_and_is_stopped(state: ClusterState) -> None:
    apply(state, [VotersChanged(tuple(Voter(voter, f"d{voter}") for voter in (0, 1, 4)))])
    with pytest.raises(UnknownBrokerError):
        reassignment.remove_broker(state, 9)
    with pytest.raises(BrokerInUseError, match="holds replicas of 't-0'"):
        reassignment.remove_broker(state, 0)
    with pytest.raises(BrokerInUseError, match="is running"):
        reassignment.remove_broker(state, 4)
    apply(state, broker_changes.fence_broker(state, 4, EVERYONE))
    apply(state, reassignment.remove_broker(state, 4))
    assert sorted(state.brokers) == [0, 1, 2, 3]
    assert voters(state) == [0, 1]
    assert steps(state) == [[0, 1, 2]]
    two = ClusterState()
    for broker in (0, 1):
        register(two, broker)
    apply(two, [VotersChanged((Voter(0, "d0"),))])
    apply(two, broker_changes.fence_broker(two, 1, EVERYONE))
    apply(two, reassignment.remove_broker(two, 1))
    with pytest.raises(BrokerInUseError, match="the last one"):
        reassignment.remove_broker(two, 0)
    register(state, 4, start=2)  # the broker started again and joins again
    assert state.brokers[4].live and not state.brokers[4].cordoned


def test_the_replicas_of_a_broker_that_is_gone_are_moved_to_others(state: ClusterState) -> None:
    apply(state, broker_changes.fence_broker(state, 0, EVERYONE))
    apply(state, reassignment.rebuild(state, {0}))
    assert (value(state).target, value(state).origin) == ((3, 1, 2), (0, 1, 2))
    assert reassignment.rebuild(state, {0}) == []
    # The broker that was to take the replicas goes, too: the move starts over.
    apply(state, broker_changes.fence_broker(state, 3, EVERYONE))
    apply(state, reassignment.rebuild(state, {0, 3}))
    assert (value(state).target, value(state).origin) == ((4, 1, 2), (0, 1, 2))
    run(state, 4)
    in_sync(state, 1, 2, 4)
    complete(state)
    assert value(state).replicas == (4, 1, 2)


def test_what_a_rebuilt_move_has_copied_stays_in_sync_and_it_keeps_its_throttle(
    state: ClusterState,
) -> None:
    register(state, 5)
    move(state, 3, 4, 2, throttle=1000)
    run(state, 3, 4)
    in_sync(state, 0, 1, 2, 3)
    for broker in (0, 1, 4):
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    apply(state, reassignment.rebuild(state, {0, 1, 4}))
    assert (value(state).target, members(state)) == ((3, 5, 2), [2, 3])
    assert value(state).throttle_bytes_per_s == 1000


def test_a_move_ends_where_the_replicas_of_before_are_all_that_is_left(
    state: ClusterState,
) -> None:
    apply(state, broker_changes.fence_broker(state, 4, EVERYONE))
    move(state, 3, 1, 2)
    apply(state, broker_changes.fence_broker(state, 3, EVERYONE))
    apply(state, reassignment.rebuild(state, {3, 4}))
    assert (value(state).replicas, value(state).target) == ((0, 1, 2), ())


def test_as_many_replicas_are_rebuilt_as_there_are_brokers_for(state: ClusterState) -> None:
    for broker in (0, 1, 4):
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    assert members(state) == [2]  # no record can be written, though broker 3 is idle
    apply(state, reassignment.rebuild(state, {0, 1, 4}))
    assert value(state).target == (3, 1, 2)
    run(state, 3)
    in_sync(state, 2, 3)
    assert reassignment.rebuild(state, {0, 1, 4}) == []
    register(state, 4, start=2)
    apply(state, reassignment.rebuild(state, {0, 1}))
    assert (value(state).target, members(state)) == ((3, 4, 2), [2, 3])


def test_a_rebuild_fills_a_broker_and_no_more() -> None:
    state = three_brokers("u", partitions=3)
    for number in range(3):
        reports = [ReplicaRegistration("id-u", number, f"u{number}", "h", 1, None, 0)]
        for broker in range(3):
            apply(state, broker_changes.register_replicas(state, broker, reports, EVERYONE))
    small = BrokerRegistered(3, "d3", 1, "b3.1", "h", 9000, "n3", 2)
    apply(state, broker_changes.register_broker(state, small, (), EVERYONE))
    apply(state, broker_changes.fence_broker(state, 0, EVERYONE))
    apply(state, reassignment.rebuild(state, {0}))
    assert len(state.moving) == 2
    apply(state, decide(state, messages.DeleteTopic("u"), now_ms=0))
    assert not state.moving


def test_so_many_partitions_are_rebuilt_at_once(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(state, 5)
    apply(state, topic_changes.new_topic(
        state, topic_id="id-u", name="u", partitions=6, replication_factor=3, options={}))
    for number, partition in state.topics["id-u"].partitions.items():
        for broker in partition.value.replicas:
            report = ReplicaRegistration("id-u", number, f"{broker}u{number}", "h", 1, None, 0)
            apply(state, broker_changes.register_replicas(state, broker, [report], EVERYONE))
    apply(state, broker_changes.fence_broker(state, 0, EVERYONE))
    monkeypatch.setattr(reassignment, "REBUILDS_MAX", 1)
    apply(state, reassignment.rebuild(state, {0}))
    ((topic_id, number),) = state.moving
    assert reassignment.rebuild(state, {0}) == []
    # What is being moved gets another target, whatever else is to be rebuilt.
    moved = state.topics[topic_id].partitions[number]
    (taker,) = moved.value.adding
    apply(state, broker_changes.fence_broker(state, taker, EVERYONE))
    apply(state, reassignment.rebuild(state, {0, taker}))
    assert set(state.moving) == {(topic_id, number)}
    assert not {0, taker} & set(moved.value.target)
    monkeypatch.setattr(reassignment, "REBUILDS_MAX", 2)
    apply(state, reassignment.rebuild(state, {0, taker}))
    assert len(state.moving) == 2


def test_a_partition_without_a_leader_is_not_rebuilt(state: ClusterState) -> None:
    for broker in (0, 1, 2):
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    assert value(state).leader is None
    assert reassignment.rebuild(state, {0, 1, 2}) == []


def test_a_snapshot_keeps_moves_and_cordons(state: ClusterState) -> None:
    move(state, 3, 1, 2, throttle=5)
    apply(state, decide(state, messages.CordonBroker(4, True)))
    copy = ClusterState()
    for record in decode_records(encode_records(state.snapshot())):
        copy.replay(record)
    copy.validate()
    assert copy.snapshot() == state.snapshot()
    assert copy.moving == {("id-t", 0)}
    assert copy.brokers[4].cordoned and not copy.brokers[3].cordoned


# --- another replication factor -------------------------------------------------------------------


def set_factor(state: ClusterState, factor: int, throttle: int | None = None) -> None:
    apply(state, decide(state, messages.SetReplicationFactor("t", factor, throttle)))


def factor_of(state: ClusterState) -> int:
    return state.topics["id-t"].replication_factor


def min_insync(state: ClusterState) -> int:
    return state.topics["id-t"].min_insync(value(state))


def test_more_replicas_are_added_and_the_majority_is_theirs_once_all_are_in_sync(
    state: ClusterState,
) -> None:
    set_factor(state, 5, throttle=1000)
    now = value(state)
    assert (now.target, now.origin) == ((0, 1, 2, 3, 4), (0, 1, 2))
    assert (now.leader, now.throttle_bytes_per_s) == (0, 1000)
    # Added partitions have the new factor at once. Writes need no more replicas than before.
    assert (factor_of(state), min_insync(state)) == (5, 2)
    set_factor(state, 5, throttle=None)
    assert value(state).throttle_bytes_per_s is None
    run(state, 3, 4)
    in_sync(state, 0, 1, 2, 3, 4)
    complete(state)
    assert (value(state).replicas, value(state).leader) == ((0, 1, 2, 3, 4), 0)
    assert (factor_of(state), min_insync(state)) == (5, 3)
    copy = ClusterState()
    apply(copy, decode_records(encode_records(state.snapshot())))
    assert factor_of(copy) == 5


def test_fewer_replicas_keep_the_leader_and_need_fewer_in_sync_at_the_end_only(
    state: ClusterState,
) -> None:
    epoch = value(state).leader_epoch
    set_factor(state, 1)
    assert (value(state).target, min_insync(state)) == ((0,), 2)
    complete(state)
    assert (value(state).replicas, value(state).leader, members(state)) == ((0,), 0, [0])
    assert (value(state).leader_epoch, min_insync(state), factor_of(state)) == (epoch, 1, 1)


def test_a_change_of_the_factor_can_be_cancelled(state: ClusterState) -> None:
    for factor in (5, 2):
        set_factor(state, factor)
        assert factor_of(state) == factor
        cancel(state)
        assert (value(state).replicas, factor_of(state)) == ((0, 1, 2), 3)


def test_partitions_that_are_added_are_of_the_factor_of_now(state: ClusterState) -> None:
    set_factor(state, 2)
    complete(state)
    apply(state, decide(state, messages.CreatePartitions(name="t", total=2)))
    assert len(state.topics["id-t"].partitions[1].value.replicas) == 2


def test_min_insync_replicas_goes_up_only_once_there_are_so_many(state: ClusterState) -> None:
    set_factor(state, 5)
    with pytest.raises(ConfigError, match="above the replication factor 3"):
        topic_changes.alter_topic_config(state, "t", {"min_insync_replicas": 4})
    cancel(state)
    set_factor(state, 2)
    with pytest.raises(ConfigError, match="above the replication factor 2"):
        topic_changes.alter_topic_config(state, "t", {"min_insync_replicas": 3})


def test_an_impossible_factor_is_refused_with_what_to_do(state: ClusterState) -> None:
    for factor, why in [(0, "one replica at least"), (-1, "at least"), (6, "Add brokers")]:
        with pytest.raises(InvalidReplicationFactorError, match=why):
            set_factor(state, factor)
    with pytest.raises(UnknownTopicError):
        decide(state, messages.SetReplicationFactor("nope", 1, None))
    with pytest.raises(InvalidReassignmentError, match="positive"):
        set_factor(state, 2, throttle=0)
    apply(state, topic_changes.alter_topic_config(state, "t", {"min_insync_replicas": 2}))
    with pytest.raises(InvalidReplicationFactorError, match="min_insync_replicas is 2.*Lower that"):
        set_factor(state, 1)
    move(state, 3, 1, 2)
    with pytest.raises(ReassignmentInProgressError, match="cancel it"):
        set_factor(state, 2)
    set_factor(state, 3)
    assert value(state).target == (3, 1, 2)
    cancel(state)
    apply(state, decide(state, messages.CordonBroker(3, True)))
    with pytest.raises(InvalidReplicationFactorError, match="of which .*take replicas"):
        set_factor(state, 5)
    for broker in (1, 2):
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    with pytest.raises(InvalidReplicationFactorError, match=r"only \[0\] are running"):
        set_factor(state, 2)
    apply(state, broker_changes.fence_broker(state, 0, EVERYONE))
    assert value(state).leader is None
    with pytest.raises(InvalidReplicationFactorError, match="t-0 has no leader"):
        set_factor(state, 4)
    assert not state.moving

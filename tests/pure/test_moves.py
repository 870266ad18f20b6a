"""The value of a partition through a move, and what operators may ask for: whole values, so that
what a move does not decide is seen to stay."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rayq import messages
from rayq.core.cluster import broker_changes, reassignment, topic_changes
from rayq.core.cluster.reassignment import begun, cancelled, completed, retargeted
from rayq.core.cluster.records import (
    BrokerCordoned,
    BrokerRemoved,
    Member,
    PartitionChanged,
    PartitionValue,
    ReplicaRegistered,
    TopicConfigChanged,
    VotersChanged,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    BrokerInUseError,
    InvalidReassignmentError,
    InvalidReplicationFactorError,
    ReassignmentInProgressError,
    ReplicaLimitError,
    UnknownBrokerError,
    UnknownTopicError,
)
from tests.pure.deciding import decide
from tests.pure.test_broker_changes import voters_of
from tests.pure.test_cluster_state import EVERYONE, apply, cluster, registration


def members(*brokers: int) -> tuple[Member, ...]:
    return tuple(Member(broker, f"d{broker}", f"{broker}a") for broker in brokers)


def running(*brokers: int, incarnation: str = "a", last_epoch: int = 5) -> Any:
    return {
        broker: ReplicaRegistered(
            "id-t", 0, broker, f"d{broker}", f"{broker}{incarnation}", "h", 1, last_epoch, 10
        )
        for broker in brokers
    }


STILL = PartitionValue(
    (0, 1, 2), members(0, 1), members(2), 0, "0a", 5, 9, last_unclean_epoch=3, placed_epoch=4,
    restored_epoch=2,
)


def changed(value: PartitionValue, **changes: Any) -> PartitionValue:
    """With these fields, in the next partition epoch."""
    return msgspec.structs.replace(value, partition_epoch=value.partition_epoch + 1, **changes)


def moving(target: tuple[int, ...], isr: tuple[Member, ...], **changes: Any) -> PartitionValue:
    """STILL on its way to a target."""
    origin = STILL.replicas
    removing = tuple(broker for broker in origin if broker not in target)
    return msgspec.structs.replace(
        STILL, replicas=(*target, *removing), target=target, origin=origin, isr=isr,
        **{"elr": (), "throttle_bytes_per_s": 7, **changes},
    )


def ended(value: PartitionValue, replicas: tuple[int, ...], **changes: Any) -> PartitionValue:
    return changed(
        value, replicas=replicas, target=(), origin=(), throttle_bytes_per_s=None, **changes
    )


# --- a partition's value --------------------------------------------------------------------------


@pytest.mark.parametrize("throttle", [None, 100])
@pytest.mark.parametrize(
    "target, replicas",
    [
        ((3, 1, 2), (3, 1, 2, 0)),
        ((1, 4, 3), (1, 4, 3, 0, 2)),
        ((2, 3), (2, 3, 0, 1)),
        ((1,), (1, 0, 2)),
        ((2, 1, 0, 3), (2, 1, 0, 3)),
        ((3, 4, 5), (3, 4, 5, 0, 1, 2)),
    ],
)
def test_a_move_that_begins_adds_to_the_replicas(
    target: tuple[int, ...], replicas: tuple[int, ...], throttle: int | None
) -> None:
    assert begun(STILL, list(target), throttle) == changed(
        STILL, replicas=replicas, target=target, origin=(0, 1, 2),
        throttle_bytes_per_s=throttle, placed_epoch=10,
    )


def test_another_order_of_the_same_replicas_is_no_move() -> None:
    assert begun(STILL, [2, 0, 1], 100) == changed(STILL, replicas=(2, 0, 1))


def test_a_move_that_completes_leaves_the_target_in_sync_and_a_leader_on_it() -> None:
    value = moving((3, 1), members(0, 1, 3), elr=members(2))
    assert completed(value, running(0, 1, 2, 3)) == ended(
        value, (3, 1), isr=members(3, 1), elr=(), leader=3, leader_incarnation="3a",
        leader_epoch=6,
    )
    assert completed(value, running(0, 1, 3, last_epoch=8)) == ended(
        value, (3, 1), isr=members(3, 1), elr=(), leader=3, leader_incarnation="3a",
        leader_epoch=9,
    )
    led = msgspec.structs.replace(value, leader=1, leader_incarnation="1a")
    assert completed(led, running(0, 1, 3)) == ended(led, (3, 1), isr=members(3, 1), elr=())


def test_a_move_does_not_complete_without_a_leader_or_while_one_of_its_target_lacks() -> None:
    value = moving((3, 1), members(0, 1, 3))
    assert completed(value, running(0, 1)) is None
    assert completed(value, {**running(0, 1), **running(3, incarnation="b")}) is None
    assert completed(moving((3, 1), members(0, 1)), running(0, 1, 3)) is None
    assert completed(moving((3, 1), members(0, 1), elr=members(3)), running(0, 1, 3)) is None
    led_by_none = msgspec.structs.replace(value, leader=None, leader_incarnation=None)
    assert completed(led_by_none, running(0, 1, 3)) is None


def test_a_move_whose_added_replicas_hold_nothing_yet_is_cancelled_whoever_runs() -> None:
    for value in (
        moving((3, 1, 2), members(0)),
        moving((3, 1, 2), members(0), elr=members(1, 2)),
        moving((3, 1, 2), members(0, 1), leader=None, leader_incarnation=None),
    ):
        assert cancelled(value, {}, min_insync=2) == ended(value, (0, 1, 2))


def test_a_move_whose_added_replicas_are_in_sync_is_cancelled_where_enough_others_are() -> None:
    value = moving((3, 1, 2), members(0, 1, 3))
    back = ended(value, (0, 1, 2), isr=members(0, 1))
    assert cancelled(value, running(0, 1, 3), min_insync=2) == back
    assert cancelled(value, running(0, 1), min_insync=2) == back
    assert cancelled(value, running(0, 1, 3), min_insync=3) is None
    assert cancelled(value, running(0, 2, 3), min_insync=2) is None
    assert cancelled(value, {**running(0), **running(1, incarnation="b")}, min_insync=2) is None
    eligible = moving((3, 1, 2), members(0, 1), elr=members(3))
    assert cancelled(eligible, running(0), min_insync=2) is None
    assert cancelled(eligible, running(0, 1), min_insync=2) == ended(
        eligible, (0, 1, 2), isr=members(0, 1), elr=())  # fmt: skip
    offline = moving((3, 1, 2), members(0, 1, 3), leader=None, leader_incarnation=None)
    assert cancelled(offline, running(0, 1, 3), min_insync=2) is None


def test_an_added_replica_that_leads_hands_over_to_the_first_of_before_that_runs() -> None:
    value = moving((3, 1, 2), members(3, 2, 1, 0), leader=3, leader_incarnation="3a")
    assert cancelled(value, running(1, 2, 3), min_insync=2) == ended(
        value, (0, 1, 2), isr=members(2, 1, 0), leader=1, leader_incarnation="1a", leader_epoch=6
    )


def test_another_target_keeps_what_was_there_and_all_that_is_in_sync() -> None:
    value = moving((3, 4, 2), members(0, 3), elr=members(1))
    assert retargeted(value, [3, 5, 1]) == changed(
        value, replicas=(3, 5, 1, 0, 2), target=(3, 5, 1), placed_epoch=10
    )
    assert retargeted(value, [4, 5, 1]) is None  # Broker 3 is in sync.
    eligible = moving((3, 4, 2), members(0), elr=members(4))
    assert retargeted(eligible, [3, 5, 1]) is None
    assert retargeted(eligible, [4, 5, 1]) == changed(
        eligible, replicas=(4, 5, 1, 0, 2), target=(4, 5, 1), placed_epoch=10
    )
    none_added = moving((3, 4, 2), members(0, 2))
    assert retargeted(none_added, [2, 1, 0]) == ended(none_added, (2, 1, 0))
    assert retargeted(none_added, [2, 1]) == changed(
        none_added, replicas=(2, 1, 0), target=(2, 1), placed_epoch=10
    )


# --- what operators ask for -----------------------------------------------------------------------


@pytest.fixture
def state() -> ClusterState:
    """Six brokers, of which 5 may carry one replica. Topic t has three partitions on 0, 1 and 2,
    led by 0 and all in sync."""
    state = cluster(5)
    apply(state, [registration(5, replicas_max=1)])
    apply(state, topic_changes.new_topic(
        state, topic_id="id-t", name="t", partitions=3, replication_factor=3, options={}))  # fmt: skip
    for number in range(3):
        place(state, number, LED)
    return state


LED = PartitionValue((0, 1, 2), members(0, 1, 2), (), 0, "0a", 5, 9)


def place(state: ClusterState, number: int, value: PartitionValue) -> None:
    apply(state, [PartitionChanged("id-t", number, value)])
    for process in running(*value.replicas).values():
        apply(state, [msgspec.structs.replace(process, partition=number)])


def fence(state: ClusterState, *brokers: int) -> None:
    for broker in brokers:
        apply(state, broker_changes.fence_broker(state, broker, ()))


def values(records: Any) -> dict[int, PartitionValue]:
    return {record.partition: record.value for record in records}


def alter(
    state: ClusterState, moves: dict[int, tuple[int, ...] | None], throttle: int | None = None
) -> dict[int, PartitionValue]:
    asked = [("t", number, target) for number, target in moves.items()]
    return values(decide(state, messages.AlterReassignments(asked, throttle), heard=EVERYONE))


def test_moves_begin_together_and_what_is_so_already_is_no_record(state: ClusterState) -> None:
    asked = {2: (3, 1, 2), 0: (0, 1, 2), 1: (2, 1, 0)}
    assert alter(state, asked, 7) == {2: begun(LED, (3, 1, 2), 7), 1: begun(LED, (2, 1, 0), 7)}


def test_moves_together_may_not_give_a_broker_more_than_it_may_carry(state: ClusterState) -> None:
    assert alter(state, {0: (5, 1, 2)}).keys() == {0}
    with pytest.raises(ReplicaLimitError, match=r"The moves would give broker 5 0 \+ 2"):
        alter(state, {0: (5, 1, 2), 1: (5, 1, 2)})
    place(state, 0, begun(LED, (5, 1, 2), None))
    with pytest.raises(ReplicaLimitError, match=r"broker 5 1 \+ 1"):
        alter(state, {1: (5, 1, 2)})
    assert alter(state, {0: (5, 1, 2)}, 7).keys() == {0}  # It has that replica already.


def test_what_a_broker_has_already_is_not_counted_twice(state: ClusterState) -> None:
    for broker in (0, 1, 2):
        apply(state, [registration(broker, replicas_max=3)])
    assert alter(state, {0: (3, 1, 2), 1: (0, 4, 2)}).keys() == {0, 1}
    assert set_factor(state, 4).keys() == {0, 1, 2}
    fence(state, 2)
    assert values(reassignment.rebuild(state, {2})).keys() == {0, 1, 2}


@pytest.mark.parametrize("throttle", [0, -1])
def test_a_throttle_lets_something_through(state: ClusterState, throttle: int) -> None:
    with pytest.raises(InvalidReassignmentError, match="positive"):
        alter(state, {}, throttle)
    with pytest.raises(InvalidReassignmentError, match="positive"):
        decide(state, messages.SetReplicationFactor("t", 3, throttle))
    assert alter(state, {0: (3, 1, 2)}, 1)[0].throttle_bytes_per_s == 1


@pytest.mark.parametrize(
    "down, target, min_insync, error",
    [
        ((), (3, 4, 2), None, None),
        ((1,), (3, 1, 2), None, None),  # A broker that is down may keep its replica.
        ((3,), (3, 1, 2), None, "broker 3 is not running"),
        ((1, 2), (3, 1, 2), None, r"only \[3\] of these.*min_insync_replicas is 2"),
        ((1, 2), (3, 1, 2), 1, None),
        ((2,), (3, 1, 2), 3, r"only \[3, 1\] of these.*min_insync_replicas is 3"),
        ((1, 2), (2, 1, 0), None, None),  # Only the order changes.
    ],
)
def test_so_many_of_a_target_have_to_run_as_its_writes_need(
    state: ClusterState,
    down: tuple[int, ...],
    target: tuple[int, ...],
    min_insync: int | None,
    error: str | None,
) -> None:
    apply(state, [TopicConfigChanged("id-t", {"min_insync_replicas": min_insync})])
    for broker in down:
        state.brokers[broker].live = False
    if error is None:
        assert alter(state, {0: target}) == {0: begun(LED, target, None)}
    else:
        with pytest.raises(InvalidReassignmentError, match=error):
            alter(state, {0: target})


def test_a_cordoned_broker_keeps_the_replica_that_it_has(state: ClusterState) -> None:
    apply(state, [BrokerCordoned(1, True), BrokerCordoned(4, True)])
    assert alter(state, {0: (3, 1, 2)}).keys() == {0}
    with pytest.raises(InvalidReassignmentError, match="broker 4 is cordoned"):
        alter(state, {0: (4, 1, 2)})


def test_a_move_under_way_takes_another_target_only_where_a_broker_of_it_is_down(
    state: ClusterState,
) -> None:
    value = begun(LED, (3, 1, 2), 7)
    place(state, 0, value)
    with pytest.raises(ReassignmentInProgressError, match=r"t-0 is being moved to \[3, 1, 2\]"):
        alter(state, {0: (4, 1, 2)})
    fence(state, 3)
    assert alter(state, {0: (4, 1, 2)}, 8) == {
        0: changed(
            value, replicas=(4, 1, 2, 0), target=(4, 1, 2), placed_epoch=11, throttle_bytes_per_s=8
        )
    }
    assert alter(state, {0: (2, 1, 0)}, 8) == {0: ended(value, (2, 1, 0))}
    with pytest.raises(InvalidReassignmentError, match="replication factor is 3"):
        alter(state, {0: (4, 1)})
    assert alter(state, {0: (3, 1, 2)}, 8) == {0: changed(value, throttle_bytes_per_s=8)}
    assert alter(state, {0: (3, 1, 2)}, 7) == {}


def test_a_cancel_counts_only_on_replicas_whose_brokers_were_heard(state: ClusterState) -> None:
    value = msgspec.structs.replace(begun(LED, (3, 1, 2), 7), isr=members(0, 1, 3))
    place(state, 0, value)
    asked = [("t", 0, None)]
    with pytest.raises(InvalidReassignmentError, match=r"only \[0, 1\] are in sync.*is 2"):
        decide(state, messages.AlterReassignments(asked, None), heard={0, 2, 3})
    records = decide(state, messages.AlterReassignments(asked, None), heard={0, 1})
    assert values(records) == {0: ended(value, (0, 1, 2), isr=members(0, 1))}


def test_moves_complete_whose_target_was_heard_and_is_in_sync(state: ClusterState) -> None:
    for number, isr in enumerate([(0, 3, 1, 2), (0, 1, 2), (0, 4, 1, 2)]):
        target = (4 if number == 2 else 3, 1, 2)
        place(state, number, msgspec.structs.replace(begun(LED, target, 7), isr=members(*isr)))
    moving = state.topics["id-t"].partitions[0].value
    done = ended(
        moving, (3, 1, 2), isr=members(3, 1, 2), leader=3, leader_incarnation="3a", leader_epoch=6)
    assert values(reassignment.complete_moves(state, {1, 2, 3})) == {0: done}
    assert values(reassignment.complete_moves(state, {1, 2, 3, 4})).keys() == {0, 2}
    assert reassignment.complete_moves(state, {0, 1, 2}) == []


# --- another replication factor -------------------------------------------------------------------


def set_factor(
    state: ClusterState, factor: int, throttle: int | None = None
) -> dict[int, PartitionValue]:
    return values(decide(state, messages.SetReplicationFactor("t", factor, throttle)))


def test_every_partition_that_is_not_of_the_factor_gets_a_move(state: ClusterState) -> None:
    two = msgspec.structs.replace(LED, replicas=(0, 1), isr=members(0, 1))
    under_way = begun(two, (0, 1, 2), 7)
    place(state, 0, two)
    place(state, 1, under_way)
    assert set_factor(state, 3, 8) == {
        0: begun(two, (0, 1, 3), 8), 1: changed(under_way, throttle_bytes_per_s=8)
    }
    assert set_factor(state, 3, 7).keys() == {0}
    place(state, 1, begun(LED, (3, 1, 2), 7))  # A move that has nothing to do with the factor.
    assert set_factor(state, 3, 8).keys() == {0}
    with pytest.raises(ReassignmentInProgressError, match=r"t-1 is being moved to \[3, 1, 2\]"):
        set_factor(state, 2)


def test_of_too_many_replicas_those_in_sync_and_the_leader_stay(state: ClusterState) -> None:
    lags = msgspec.structs.replace(LED, isr=members(0, 2))
    led_by_2 = msgspec.structs.replace(LED, leader=2, leader_incarnation="2a")
    place(state, 0, lags)
    place(state, 1, led_by_2)
    after = set_factor(state, 2)
    assert after[0] == begun(lags, (0, 2), None)
    assert 2 in after[1].target and set_factor(state, 1)[1] == begun(led_by_2, (2,), None)


def test_no_partition_changes_where_one_of_them_cannot(state: ClusterState) -> None:
    place(state, 1, msgspec.structs.replace(LED, leader=None, leader_incarnation=None))
    with pytest.raises(InvalidReplicationFactorError, match="t-1 has no leader"):
        set_factor(state, 2)
    assert set_factor(state, 3) == {}
    place(state, 1, LED)
    with pytest.raises(InvalidReplicationFactorError, match=r"t-0 would need 7 brokers.* are 6, "):
        set_factor(state, 7)
    with pytest.raises(ReplicaLimitError, match=r"broker 5 0 \+ 3"):
        set_factor(state, 6)


@pytest.mark.parametrize(
    "factor, down, min_insync, works",
    [
        (2, (1,), 1, True),
        (3, (), 4, False),
        (4, (2,), 3, True),
        (4, (1, 2), 3, False),
        (2, (), 2, True),
        (1, (), 2, False),
        (1, (), None, True),
        (0, (), None, False),
    ],
)
def test_a_factor_leaves_enough_that_run(
    state: ClusterState, factor: int, down: tuple[int, ...], min_insync: int | None, works: bool
) -> None:
    apply(state, [TopicConfigChanged("id-t", {"min_insync_replicas": min_insync})])
    for broker in down:
        state.brokers[broker].live = False
    if works:
        assert set_factor(state, factor).keys() == {0, 1, 2}
    else:
        with pytest.raises(InvalidReplicationFactorError):
            set_factor(state, factor)


# --- brokers --------------------------------------------------------------------------------------


def test_a_cordon_is_a_record_where_it_changes_something(state: ClusterState) -> None:
    assert decide(state, messages.CordonBroker(0, True)) == [BrokerCordoned(0, True)]
    assert decide(state, messages.CordonBroker(0, False)) == []
    apply(state, [BrokerCordoned(0, True)])
    assert decide(state, messages.CordonBroker(0, True)) == []
    assert decide(state, messages.CordonBroker(0, False)) == [BrokerCordoned(0, False)]
    with pytest.raises(UnknownBrokerError, match=r"no broker 9; the cluster has \[0, 1, 2"):
        decide(state, messages.CordonBroker(9, True))


def test_the_last_broker_that_runs_and_takes_replicas_is_not_cordoned() -> None:
    state = cluster(3)
    apply(state, [BrokerCordoned(2, True)])
    assert decide(state, messages.CordonBroker(1, True)) == [BrokerCordoned(1, True)]
    fence(state, 1)
    with pytest.raises(InvalidReassignmentError, match="Broker 0 cannot be cordoned"):
        decide(state, messages.CordonBroker(0, True))
    assert decide(state, messages.CordonBroker(1, True)) == [BrokerCordoned(1, True)]


def test_a_brokers_vote_goes_before_it_does(state: ClusterState) -> None:
    fence(state, 3, 4)
    apply(state, [VotersChanged(voters_of(0, 1, 4))])
    assert reassignment.remove_broker(state, 3) == [BrokerRemoved(3)]
    assert reassignment.remove_broker(state, 4) == [
        VotersChanged(voters_of(0, 1)), BrokerRemoved(4)
    ]
    apply(state, [VotersChanged(voters_of(4))])
    with pytest.raises(BrokerInUseError, match="Broker 4 is the only voter"):
        reassignment.remove_broker(state, 4)


@pytest.mark.parametrize(
    "partitions, told", [(1, "'t-0':"), (3, "'t-0', 't-1', 't-2':"), (5, "'t-0', 't-1', 't-2' and 2 more:")]
)
def test_a_broker_that_holds_replicas_is_not_removed(partitions: int, told: str) -> None:
    state = cluster(2)
    apply(state, topic_changes.new_topic(
        state, topic_id="id-t", name="t", partitions=partitions, replication_factor=2, options={}))
    fence(state, 1)
    with pytest.raises(BrokerInUseError, match=f"Broker 1 holds replicas of {told}"):
        reassignment.remove_broker(state, 1)


def test_what_is_not_there_is_not_moved(state: ClusterState) -> None:
    with pytest.raises(UnknownTopicError, match="Topic 't' has no partition 3"):
        alter(state, {3: (3, 1, 2)})
    with pytest.raises(InvalidReassignmentError, match=r"t-0 cannot be moved to \[0, 8, 9\].*no broker 8"):
        alter(state, {0: (0, 8, 9)})


# --- dead brokers ---------------------------------------------------------------------------------


def test_a_rebuild_begins_moves_without_a_limit_of_speed(state: ClusterState) -> None:
    fence(state, 2)
    led = state.topics["id-t"].partitions[0].value
    place(state, 1, msgspec.structs.replace(led, leader=None, leader_incarnation=None))
    assert values(reassignment.rebuild(state, {2})) == {
        0: begun(led, (0, 1, 3), None), 2: begun(led, (0, 1, 5), None)
    }
    assert reassignment.rebuild(state, {4}) == []


def test_a_rebuild_goes_on_with_other_partitions_where_a_move_cannot_be_changed(
    state: ClusterState,
) -> None:
    value = msgspec.structs.replace(begun(LED, (3, 1, 2), 7), isr=members(0, 1, 2, 3))
    place(state, 0, value)
    fence(state, 2)
    apply(state, [PartitionChanged("id-t", 0, value)])  # Broker 3 is in sync and is gone, too.
    records = values(reassignment.rebuild(state, {2, 3}))
    assert records.keys() == {1, 2}


def test_a_rebuild_stops_where_there_is_no_room(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence(state, 1, 2, 3, 4)
    records = values(reassignment.rebuild(state, {1, 2, 3, 4}))
    assert {number: record.adding for number, record in records.items()} == {0: (5,)}
    apply(state, [registration(5, 2)])
    for most, moved in [(0, set()), (1, {0}), (2, {0, 1}), (9, {0, 1, 2})]:
        monkeypatch.setattr(reassignment, "REBUILDS_MAX", most)
        assert values(reassignment.rebuild(state, {1, 2, 3, 4})).keys() == moved

"""What the controller commits when brokers and replica processes come, go and report: the very
records, so nothing else with them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from rayq import messages
from rayq.core.cluster import broker_changes
from rayq.core.cluster.records import (
    BrokerFenced,
    BrokerUnfenced,
    Member,
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    ProducerIdsAllocated,
    ReplicaGone,
    ReplicaRegistered,
    Voter,
    VotersChanged,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    FencedEpochError,
    StaleBrokerError,
    StalePartitionError,
    UnknownTopicError,
    WrongClusterError,
)
from rayq.messages import ReplicaRegistration
from tests.pure.deciding import decide
from tests.pure.test_cluster_state import (
    EVERYONE,
    apply,
    cluster,
    create,
    registration,
    report,
    run_replicas,
    value,
)


@pytest.fixture
def state() -> ClusterState:
    """Four brokers. Topic t is on 0, 1 and 2, is led by 0, and is all in sync. Topic u, on the same
    three, has not begun."""
    state = cluster(3)
    create(state)
    run_replicas(state, 0, 1, 2)
    create(state, "u", factor=3)
    apply(state, broker_changes.register_broker(state, registration(3), (), EVERYONE))
    assert (value(state).replicas, value(state).leader) == ((0, 1, 2), 0)
    return state


def member(broker: int, incarnation: str = "a") -> Member:
    return Member(broker, f"d{broker}", f"{broker}{incarnation}")


def t_changed(state: ClusterState, **changes: Any) -> PartitionChanged:
    """The record that changes these fields of the partition of t."""
    epoch = value(state).partition_epoch + 1
    changed = msgspec.structs.replace(value(state), partition_epoch=epoch, **changes)
    return PartitionChanged("id-t", 0, changed)


def led_by(broker: int, *isr: int, epoch: int = 2) -> dict[str, Any]:
    return {
        "leader": broker, "leader_incarnation": f"{broker}a", "leader_epoch": epoch,
        "isr": tuple(member(number) for number in isr),
    }


# --- brokers --------------------------------------------------------------------------------------


def test_a_broker_that_restarts_loses_the_replica_processes_that_it_does_not_hold(
    state: ClusterState,
) -> None:
    again = registration(0, 2)
    assert broker_changes.register_broker(state, again, [("id-u", 0)], EVERYONE) == [
        again, ReplicaGone("id-t", 0, 0, "0a"), t_changed(state, **led_by(1, 1, 2)),
    ]  # fmt: skip
    assert broker_changes.register_broker(state, again, [("id-t", 0)], EVERYONE) == [again]
    follower = registration(1, 2)
    assert broker_changes.register_broker(state, follower, [], EVERYONE) == [
        follower, ReplicaGone("id-t", 0, 1, "1a"), t_changed(state, isr=(member(0), member(2))),
    ]  # fmt: skip
    other = registration(3, 2)
    assert broker_changes.register_broker(state, other, [], EVERYONE) == [other]


def test_a_process_on_another_disk_is_gone_whoever_holds_its_directory(
    state: ClusterState,
) -> None:
    apply(state, broker_changes.fence_broker(state, 1, EVERYONE))
    new = registration(1, 1, directory_id="new", incarnation="new")
    assert broker_changes.register_broker(state, new, [("id-t", 0)], EVERYONE) == [
        new, ReplicaGone("id-t", 0, 1, "1a")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "start, directory, is_live, heard, error",
    [
        (1, "d1", True, EVERYONE, StaleBrokerError),
        (0, "d1", False, set(), StaleBrokerError),
        (2, "d1", True, EVERYONE, None),
        (1, "new", True, {1}, WrongClusterError),
        (1, "new", True, {0, 2}, None),  # It may have been lost while nobody controlled.
        (1, "new", False, EVERYONE, None),
    ],
)
def test_which_process_may_be_a_broker_that_is_known(
    state: ClusterState,
    start: int,
    directory: str,
    is_live: bool,
    heard: Collection[int],
    error: type[Exception] | None,
) -> None:
    if not is_live:
        apply(state, broker_changes.fence_broker(state, 1, EVERYONE))
    new = registration(1, start, directory_id=directory, incarnation="new")
    if error is None:
        assert broker_changes.register_broker(state, new, (), heard)[0] == new
    else:
        with pytest.raises(error, match="roker 1"):
            broker_changes.register_broker(state, new, (), heard)


def test_a_session_that_ends_and_begins_again_is_told_once(state: ClusterState) -> None:
    assert broker_changes.hear_broker(state, 0, EVERYONE) == []
    fenced = broker_changes.fence_broker(state, 0, EVERYONE)
    assert fenced == [BrokerFenced(0, "b0.1"), t_changed(state, **led_by(1, 1, 2))]
    apply(state, fenced)
    assert broker_changes.fence_broker(state, 0, EVERYONE) == []
    assert broker_changes.hear_broker(state, 0, EVERYONE) == [BrokerUnfenced(0, "b0.1")]


def test_a_partition_waits_for_the_fate_of_each_member_whose_broker_was_not_heard(
    state: ClusterState,
) -> None:
    fenced = BrokerFenced(0, "b0.1")
    change = t_changed(state, **led_by(1, 1, 2))
    for heard, records in [
        ({1}, [fenced]), ({1, 2}, [fenced, change]), ({0, 1, 3}, [fenced]), (set(), [fenced]),
    ]:  # fmt: skip
        assert broker_changes.fence_broker(state, 0, heard) == records
    # A member that left the ISR may lead next: it is waited for, too.
    waits = msgspec.structs.replace(value(state), isr=(member(0), member(1)), elr=(member(2),))
    apply(state, [PartitionChanged("id-t", 0, waits)])
    assert broker_changes.fence_broker(state, 0, {1, 3}) == [fenced]
    apply(state, broker_changes.fence_broker(state, 2, {2}))
    assert broker_changes.fence_broker(state, 0, {1, 3})[0:1] == [fenced]
    assert len(broker_changes.fence_broker(state, 0, {1, 3})) == 2


def test_who_is_heard_for_the_first_time_in_an_epoch_is_heard_already(state: ClusterState) -> None:
    apply(state, broker_changes.fail_replicas(state, 1, [("id-t", 0, "1a")], {0}))
    assert value(state).isr == (member(0), member(1), member(2))
    assert broker_changes.hear_broker(state, 1, {0}) == []
    change = t_changed(state, isr=(member(0), member(2)))
    assert broker_changes.hear_broker(state, 2, {0, 1}) == [change]
    apply(state, [BrokerFenced(2, "b2.1")])
    assert broker_changes.hear_broker(state, 2, {0, 1}) == [BrokerUnfenced(2, "b2.1"), change]


# --- replica processes ----------------------------------------------------------------------------


def test_a_report_becomes_a_record_that_has_all_of_it(state: ClusterState) -> None:
    told = ReplicaRegistration("id-u", 0, "1z", "elsewhere", 77, 4, 55)
    assert broker_changes.register_replicas(state, 1, [told], EVERYONE) == [
        ReplicaRegistered("id-u", 0, 1, "d1", "1z", "elsewhere", 77, 4, 55)
    ]


def test_a_report_of_a_replica_that_is_not_the_brokers_is_passed_over(state: ClusterState) -> None:
    good = report(1, "b", topic="u")
    reports = [
        msgspec.structs.replace(good, topic_id="id-none"),
        msgspec.structs.replace(good, partition=1),
        good,
        report(1, "a"),
    ]
    records = broker_changes.register_replicas(state, 1, reports, EVERYONE)
    assert records == [ReplicaRegistered("id-u", 0, 1, "d1", "1b", "h", 1, None, 0)]
    assert broker_changes.register_replicas(state, 3, [report(3, topic="u")], EVERYONE) == []


@pytest.mark.parametrize(
    "changes",
    [{"last_epoch": 2**32 - 1}, {"last_epoch": 2**30 + 1}, {"last_epoch": -1}, {"flushed": -1}],
)
def test_a_log_that_cannot_end_so_is_passed_over_and_the_others_of_its_broker_are_not(
    state: ClusterState, changes: dict[str, Any]
) -> None:
    wrong, sound = msgspec.structs.replace(report(1, "b"), **changes), report(1, "b", topic="u")
    records = broker_changes.register_replicas(state, 1, [wrong, sound], EVERYONE)
    told = [record.topic_id for record in records if isinstance(record, ReplicaRegistered)]
    assert told == ["id-u"]
    records = broker_changes.stop_broker(state, 1, [wrong, sound], EVERYONE, cluster_stops=False)
    assert [record.topic_id for record in records if isinstance(record, ReplicaGone)] == ["id-u"]


@pytest.mark.parametrize("known, counts", [(3, False), (4, True), (5, True)])
def test_a_report_from_before_the_replicas_placement_is_passed_over(
    state: ClusterState, known: int, counts: bool
) -> None:
    apply(state, [PartitionChanged("id-u", 0, PartitionValue((0, 1, 2), placed_epoch=4))])
    told = msgspec.structs.replace(report(1, topic="u"), partition_epoch=known)
    assert bool(broker_changes.register_replicas(state, 1, [told], EVERYONE)) is counts


def test_the_last_replica_to_start_founds_the_partition(state: ClusterState) -> None:
    run_replicas(state, 1, 2, topic="u")
    registered, changed = broker_changes.register_replicas(
        state, 0, [report(0, topic="u")], EVERYONE)  # fmt: skip
    assert isinstance(registered, ReplicaRegistered) and registered.broker == 0
    before = value(state, "u")
    assert changed == PartitionChanged("id-u", 0, PartitionValue(
        before.replicas, isr=tuple(member(replica) for replica in before.replicas),
        leader=before.replicas[0], leader_incarnation=f"{before.replicas[0]}a", leader_epoch=1,
        partition_epoch=before.partition_epoch + 1,
    ))  # fmt: skip


def test_a_process_that_replaces_its_leader_before_that_was_told_is_not_the_leader(
    state: ClusterState,
) -> None:
    records = broker_changes.register_replicas(state, 0, [report(0, "b", epoch=1)], EVERYONE)
    assert records[1:] == [t_changed(state, **led_by(1, 1, 2))]


def test_processes_that_are_gone_are_told_for_each_that_was_registered(
    state: ClusterState,
) -> None:
    failed = [("id-none", 0, "0a"), ("id-t", 3, "0a"), ("id-t", 0, "0z"), ("id-u", 0, "0a")]
    assert broker_changes.fail_replicas(state, 0, failed, EVERYONE) == []
    run_replicas(state, 0, topic="u")
    assert broker_changes.fail_replicas(state, 0, [*failed, ("id-t", 0, "0a")], EVERYONE) == [
        ReplicaGone("id-u", 0, 0, "0a"), ReplicaGone("id-t", 0, 0, "0a"),
        t_changed(state, **led_by(1, 1, 2)),
    ]  # fmt: skip
    assert broker_changes.fail_replicas(state, 3, [("id-t", 0, "0a")], EVERYONE) == []


# --- a controlled stop ----------------------------------------------------------------------------


def at(broker: int, end: tuple[int | None, int]) -> Member:
    return msgspec.structs.replace(member(broker), stopped_at=end)


def test_a_broker_that_stops_alone_leaves_its_logs_end_with_who_is_waited_for(
    state: ClusterState,
) -> None:
    ends = [report(0, epoch=1, flushed=50)]
    stop = broker_changes.stop_broker(state, 0, ends, EVERYONE, cluster_stops=False)
    assert stop == [
        BrokerFenced(0, "b0.1"), ReplicaGone("id-t", 0, 0, "0a"),
        t_changed(state, **led_by(1, 1, 2)),
    ]  # fmt: skip
    apply(state, stop)
    ends = [report(2, epoch=2, flushed=60)]
    apply(state, broker_changes.stop_broker(state, 2, ends, EVERYONE, cluster_stops=False))
    assert (value(state).isr, value(state).elr) == ((member(1),), (at(2, (2, 60)),))
    # With that very log it returns as if it had never been gone, which is a change to be told.
    back = [report(2, "b", epoch=2, flushed=60)]
    registered, changed = broker_changes.register_replicas(state, 2, back, EVERYONE)
    assert isinstance(registered, ReplicaRegistered)
    assert changed == t_changed(state, elr=(member(2, "b"),))


def test_a_broker_that_stops_without_a_word_of_a_replica_is_missed_as_if_it_had_died(
    state: ClusterState,
) -> None:
    for ends in ([], [report(0, topic="none")]):
        stop = broker_changes.stop_broker(state, 0, ends, EVERYONE, cluster_stops=False)
        assert stop == [BrokerFenced(0, "b0.1"), t_changed(state, **led_by(1, 1, 2))]


def test_while_the_cluster_stops_members_keep_their_place_and_nobody_is_elected(
    state: ClusterState,
) -> None:
    def stop(broker: int, *ends: ReplicaRegistration) -> list[MetadataRecord]:
        return broker_changes.stop_broker(state, broker, ends, EVERYONE, cluster_stops=True)

    gone = ReplicaGone("id-t", 0, 1, "1a")
    follower = stop(1, report(1, epoch=1, flushed=50))
    assert follower == [
        BrokerFenced(1, "b1.1"), gone,
        t_changed(state, isr=(member(0), at(1, (1, 50)), member(2))),
    ]  # fmt: skip
    # Another process than the member is known by: what it says of its log is not the member's.
    other = stop(1, report(1, "b", epoch=1, flushed=50))
    assert other == [BrokerFenced(1, "b1.1"), ReplicaGone("id-t", 0, 1, "1b")]
    assert stop(1) == [BrokerFenced(1, "b1.1")]
    led = {"leader": None, "leader_incarnation": None, "leader_epoch": 2}
    assert stop(0) == [BrokerFenced(0, "b0.1"), t_changed(state, **led)]
    left = msgspec.structs.replace(value(state), isr=(member(0),), elr=(member(1), member(2)))
    apply(state, [PartitionChanged("id-t", 0, left)])
    eligible = stop(2, report(2, epoch=None, flushed=0))
    assert eligible[2] == t_changed(state, elr=(member(1), at(2, (None, 0))))


# --- what leaders and operators ask for -----------------------------------------------------------


def propose(state: ClusterState, *isr: tuple[int, str], **changes: Any) -> list[MetadataRecord]:
    now = value(state)
    asked: dict[str, Any] = {
        "topic_id": "id-t", "partition": 0, "broker": now.leader,
        "incarnation": now.leader_incarnation, "leader_epoch": now.leader_epoch,
        "partition_epoch": now.partition_epoch, "isr": isr, **changes,
    }
    return broker_changes.alter_partition(state, messages.AlterPartition(**asked))


def test_an_accepted_proposal_is_in_the_order_of_the_replicas(state: ClusterState) -> None:
    two = propose(state, (2, "2a"), (0, "0a"))
    assert two == [t_changed(state, isr=(member(0), member(2)))]
    proposal = propose(state, (0, "0a"))
    assert proposal == [t_changed(state, isr=(member(0),), elr=(member(1), member(2)))]
    apply(state, proposal)
    run_replicas(state, 1, incarnation="b")
    back = propose(state, (1, "1b"), (0, "0a"))
    assert back == [t_changed(state, isr=(member(0), member(1, "b")), elr=())]


def test_each_of_several_proposals_is_taken_or_refused_by_itself(
    state: ClusterState,
) -> None:
    now = value(state)

    def proposal(**changes: Any) -> messages.AlterPartition:
        asked: dict[str, Any] = {
            "topic_id": "id-t", "partition": 0, "broker": now.leader,
            "incarnation": now.leader_incarnation, "leader_epoch": now.leader_epoch,
            "partition_epoch": now.partition_epoch, "isr": [(0, "0a")], **changes,
        }
        return messages.AlterPartition(**asked)

    records, refused = broker_changes.alter_partitions(
        state,
        [proposal(partition=9), proposal(partition_epoch=99), proposal(), proposal()],
    )
    assert records == propose(state, (0, "0a"))
    assert [(partition, code) for _, partition, code, _ in refused] == [
        (9, "UnknownTopicError"), (0, "StalePartitionError"), (0, "StalePartitionError"),
    ]


@pytest.mark.parametrize(
    "isr, changes, error",
    [
        ([(0, "0a")], {"topic_id": "id-none"}, UnknownTopicError),
        ([(0, "0a")], {"broker": 1}, FencedEpochError),
        ([(0, "0a")], {"leader_epoch": 0}, FencedEpochError),
        ([(0, "0a")], {"leader_epoch": 2}, FencedEpochError),
        ([(0, "0a")], {"partition_epoch": 99}, StalePartitionError),
        ([(0, "0a"), (1, "1z")], {}, StalePartitionError),
        ([(0, "0a"), (3, "3a")], {}, StalePartitionError),  # It has no replica.
        ([(1, "1a"), (2, "2a")], {}, StalePartitionError),
        ([], {}, StalePartitionError),
    ],
)
def test_a_proposal_that_is_not_the_leaders_of_now_is_refused(
    state: ClusterState, isr: list[tuple[int, str]], changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        propose(state, *isr, **changes)


def test_a_member_whose_brokers_session_ended_is_not_in_sync(state: ClusterState) -> None:
    apply(state, broker_changes.fence_broker(state, 1, EVERYONE))
    with pytest.raises(StalePartitionError, match="Broker 1 cannot be in sync for t-0"):
        propose(state, (0, "0a"), (1, "1a"))


def test_ids_of_producers_are_told_as_the_first_that_is_free(state: ClusterState) -> None:
    assert decide(state, messages.ConfirmMetadata()) == [ProducerIdsAllocated(0)]
    assert decide(state, messages.AllocateProducerIds(0, "b0.1")) == [ProducerIdsAllocated(1000)]
    apply(state, [ProducerIdsAllocated(5000)])
    assert decide(state, messages.ConfirmMetadata()) == [ProducerIdsAllocated(5000)]
    assert decide(state, messages.AllocateProducerIds(0, "b0.1")) == [ProducerIdsAllocated(6000)]


def test_families_have_numbers_of_their_own_above_those_that_were_producer_ids(
    state: ClusterState,
) -> None:
    apply(state, [ProducerIdsAllocated(5000)])  # Families had the same counter once.
    draw = messages.AllocateProducerIds(0, "b0.1", of_families=True)
    apply(state, decide(state, draw))
    assert (state.next_producer_id, state.next_family) == (5000, 6000)
    for _ in range(3):
        apply(state, decide(state, messages.AllocateProducerIds(0, "b0.1")))
        apply(state, decide(state, messages.ConfirmMetadata()))
    assert (state.next_producer_id, state.next_family) == (8000, 6000), "producers use none up"
    apply(state, decide(state, draw))
    assert (state.next_producer_id, state.next_family) == (8000, 7000)
    with pytest.raises(StaleBrokerError):
        decide(state, messages.AllocateProducerIds(0, "b0.0", of_families=True))


def test_partitions_are_settled_by_topic_or_all_of_them(state: ClusterState) -> None:
    run_replicas(state, 0, 1, 2, topic="u")
    for topic in "tu":
        for broker in (0, 1, 2):
            gone = [(f"id-{topic}", 0, f"{broker}a")]
            apply(state, broker_changes.fail_replicas(state, broker, gone, EVERYONE))
            run_replicas(state, broker, topic=topic, incarnation="b")
    for topic in "tu":
        # What was decided is taken back: there is something to settle in both topics.
        before = value(state, topic)
        apply(state, [PartitionChanged(f"id-{topic}", 0, msgspec.structs.replace(
            before, leader=None, leader_incarnation=None))])  # fmt: skip
    t, u = state.topics["id-t"], state.topics["id-u"]
    of_t = broker_changes.settle_topic(state, t, EVERYONE)
    of_u = broker_changes.settle_topic(state, u, EVERYONE)
    assert [proposed.topic_id for proposed in of_t + of_u] == ["id-t", "id-u"]  # type: ignore[attr-defined]
    assert broker_changes.settle_everything(state, EVERYONE) == [*of_t, *of_u]
    assert broker_changes.settle_everything(state, set()) == []


def test_a_new_partition_is_founded_without_who_starts_yet_only_when_that_is_asked_for(
    state: ClusterState,
) -> None:
    topic = state.topics["id-u"]
    assert broker_changes.found_partition(state, topic, 0, EVERYONE) == []
    run_replicas(state, 1, topic="u")
    assert broker_changes.settle_topic(state, topic, EVERYONE) == []
    apply(state, broker_changes.found_partition(state, topic, 0, EVERYONE))
    assert (value(state, "u").leader, value(state, "u").isr) == (1, (member(1),))


def test_only_partitions_that_another_than_the_preferred_replica_leads_change(
    state: ClusterState,
) -> None:
    apply(state, decide(state, messages.CreatePartitions(name="t", total=3)))
    live = (member(0), member(1), member(2))
    for number, leader in enumerate([1, 0, 2]):
        led = PartitionValue((0, 1, 2), live, (), leader, f"{leader}a", 4, 7)
        apply(state, [PartitionChanged("id-t", number, led)])
    changed = broker_changes.balance_leaders(state, EVERYONE)
    led = PartitionValue((0, 1, 2), live, (), 0, "0a", 5, 8)
    assert changed == [PartitionChanged("id-t", 0, led), PartitionChanged("id-t", 2, led)]


def test_leadership_stays_while_a_broker_in_the_in_sync_set_is_silent(state: ClusterState) -> None:
    """Its replica could not hear of the new leader, and every write would wait for it."""
    apply(state, decide(state, messages.CreatePartitions(name="t", total=2)))
    for number, isr in enumerate([(0, 1, 2), (0, 1)]):
        members = tuple(member(broker) for broker in isr)
        led = PartitionValue((0, 1, 2), members, (), 1, "1a", 4, 7)
        apply(state, [PartitionChanged("id-t", number, led)])
    led = PartitionValue((0, 1, 2), (member(0), member(1)), (), 0, "0a", 5, 8)
    assert broker_changes.balance_leaders(state, {0, 1}) == [PartitionChanged("id-t", 1, led)]
    assert broker_changes.balance_leaders(state, {0, 2}) == []


# --- voters ---------------------------------------------------------------------------------------


def voters_of(*brokers: int) -> tuple[Voter, ...]:
    return tuple(Voter(broker, f"d{broker}") for broker in brokers)


@pytest.mark.parametrize(
    "brokers, voters, heard, cordoned, fenced, then",
    [
        (1, (0,), {0}, (), (), None),
        (2, (0,), {0, 1}, (), (), None),  # Two voters need both of them: one is better.
        (2, (0, 1), {0, 1}, (), (), (0,)),
        (2, (0, 1), {0}, (), (), (0,)),
        (2, (0, 1), {1}, (), (), (1,)),
        (2, (0, 1), {0, 1}, (0,), (), (1,)),
        (3, (0,), {0, 1, 2}, (), (), (0, 1)),
        (3, (1,), {0, 1, 2}, (), (), (1, 0)),
        (3, (0, 1), {0, 1, 2}, (), (), (0, 1, 2)),
        (3, (0, 1), {0, 1}, (), (), None),
        (3, (0, 1), {0, 1, 2}, (), (2,), None),
        (3, (0, 1), {0, 1, 2}, (2,), (), None),
        (4, (0, 1, 2), {0, 1, 2, 3}, (), (), None),
        (4, (0, 1, 2), {0, 1, 2, 3}, (), (1,), None),  # Who is down keeps its vote.
        (4, (0, 1, 2), {0, 1, 2, 3}, (1,), (), (0, 1, 2, 3)),
        (4, (0, 1, 2), {0, 1, 2}, (1,), (), None),
        (4, (0, 1, 2, 3), {0, 1, 2, 3}, (1,), (), (0, 2, 3)),
        (4, (0, 1, 2, 3), {0, 1, 2, 3}, (), (), (0, 1, 2)),
        (4, (0, 1, 2, 3), {0, 2, 3}, (), (), (0, 2, 3)),
        (4, (0, 1, 2, 3), {0, 2, 3}, (0,), (), (1, 2, 3)),
        (5, (0, 1, 2), {0, 1, 2, 3, 4}, (0, 1), (), (0, 1, 2, 3)),
        (5, (0, 1, 2, 3), {0, 1, 2, 3, 4}, (0, 1), (), (0, 2, 3)),
    ],
)
def test_voters_change_by_one_step_towards_a_full_set(
    brokers: int,
    voters: tuple[int, ...],
    heard: set[int],
    cordoned: tuple[int, ...],
    fenced: tuple[int, ...],
    then: tuple[int, ...] | None,
) -> None:
    state = cluster(brokers)
    apply(state, [VotersChanged(voters_of(*voters))])
    for broker in cordoned:
        apply(state, decide(state, messages.CordonBroker(broker, True)))
    for broker in fenced:
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    step = broker_changes.next_voters(state, heard)
    assert step == ([] if then is None else [VotersChanged(voters_of(*then))])


def test_a_voter_whose_disk_was_replaced_is_dropped_unless_it_is_the_last() -> None:
    state = cluster(3)
    lost = (Voter(0, "lost"), *voters_of(1, 2))
    apply(state, [VotersChanged(lost)])
    assert broker_changes.next_voters(state, {1, 2}) == []  # Nobody has heard of the new disk.
    assert broker_changes.next_voters(state, {0, 1, 2}) == [VotersChanged(voters_of(1, 2))]
    apply(state, [VotersChanged(lost[:1])])
    joined = (*lost[:1], Voter(1, "d1"))
    assert broker_changes.next_voters(state, {0, 1, 2}) == [VotersChanged(joined)]
    apply(state, [VotersChanged(joined)])
    assert broker_changes.next_voters(state, {0, 1, 2}) == [VotersChanged(voters_of(1))]

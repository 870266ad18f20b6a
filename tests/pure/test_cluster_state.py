"""The cluster's metadata: handlers return records, replay builds the state, a snapshot rebuilds it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rayq import messages
from rayq.config import ClusterConfig
from rayq.core.cluster import (
    broker_changes,
    remote_changes,
    topic_changes,
)
from rayq.core.cluster import records as metadata_records
from rayq.core.cluster import state as cluster_state
from rayq.core.cluster.records import (
    BrokerRegistered,
    EpochStarted,
    MetadataRecord,
    ReplicaGone,
    RequestDone,
    TopicConfigChanged,
    Voter,
    VotersChanged,
    decode_entry,
    decode_records,
    encode_record,
    encode_records,
    encode_together,
)
from rayq.core.cluster.remote_changes import ObjectStoreFacts
from rayq.core.cluster.state import REQUESTS_REMEMBERED_MAX, ClusterState
from rayq.errors import (
    ConfigError,
    FencedEpochError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    PartitionOfflineError,
    RayqError,
    ReplicaLimitError,
    StaleBrokerError,
    StalePartitionError,
    TopicExistsError,
    UnknownTopicError,
    WrongClusterError,
)
from rayq.messages import ReplicaRegistration
from rayq.messages.remote_names import ObjectKind, RemoteName, partition_prefix
from rayq.messages.remote_pointer import RemotePointer
from tests.pure.deciding import decide

EVERYONE = {0, 1, 2, 3, 4}
STORE = ObjectStoreFacts("s3://bucket", dict.fromkeys(EVERYONE))


def registration(broker: int, start: int = 1, **changes: Any) -> BrokerRegistered:
    values: dict[str, Any] = {
        "broker": broker, "directory_id": f"d{broker}", "start_counter": start,
        "incarnation": f"b{broker}.{start}", "host": "h", "port": 9000 + broker,
        "node_id": f"n{broker}", "replicas_max": 100,
    }
    return BrokerRegistered(**{**values, **changes})


def apply(state: ClusterState, records: list[MetadataRecord]) -> None:
    for record in records:
        state.replay(record)
    state.validate()


def cluster(brokers: int = 3, **changes: Any) -> ClusterState:
    state = ClusterState()
    for broker in range(brokers):
        apply(state, broker_changes.register_broker(state, registration(broker, **changes), (), ()))
    return state


def create(state: ClusterState, name: str = "t", partitions: int = 1, factor: int | None = None,
           **options: Any) -> None:
    apply(state, topic_changes.new_topic(
        state, topic_id=f"id-{name}", name=name, partitions=partitions,
        replication_factor=factor, options=options))


def report(broker: int, incarnation: str = "a", *, topic: str = "t", epoch: int | None = None,
           flushed: int = 0) -> ReplicaRegistration:
    return ReplicaRegistration(f"id-{topic}", 0, f"{broker}{incarnation}", "h", 1, epoch, flushed)


def run_replicas(state: ClusterState, *brokers: int, incarnation: str = "a", **changes: Any) -> None:
    for broker in brokers:
        one = report(broker, incarnation, **changes)
        apply(state, broker_changes.register_replicas(state, broker, [one], EVERYONE))


def value(state: ClusterState, topic: str = "t") -> Any:
    return state.topics[f"id-{topic}"].partitions[0].value


def brokers_of(members: Any) -> list[int]:
    return sorted(member.broker for member in members)


def test_every_record_of_the_metadata_is_decoded_and_replayed() -> None:
    records = metadata_records.MetadataRecord.__subclasses__()
    assert set(metadata_records.RECORDS) == set(cluster_state._REPLAY) == set(records)



def test_a_topic_is_led_once_all_its_live_replicas_have_started() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1)
    assert value(state).leader is None
    run_replicas(state, 2)
    assert value(state).leader == value(state).replicas[0]
    assert len(value(state).isr) == 3


def test_a_topic_starts_without_a_broker_whose_session_ended() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1)
    apply(state, broker_changes.fence_broker(state, 2, EVERYONE))
    assert value(state).leader in (0, 1)


@pytest.mark.parametrize("name", ["", "a b", "..", ".", "__mine", "x" * 201, "ä", "a/b"])
def test_an_illegal_topic_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidTopicError):
        create(cluster(), name)


def test_a_topic_name_has_up_to_200_characters() -> None:
    create(cluster(), "x" * 200)


def test_impossible_topics_are_refused_with_what_is_possible() -> None:
    state = cluster()
    create(state)
    with pytest.raises(TopicExistsError):
        create(state)
    for partitions in (0, -1, 10_001):
        with pytest.raises(InvalidPartitionsError):
            create(state, "u", partitions)
    for factor in (0, 4):
        with pytest.raises(InvalidReplicationFactorError, match="1 up to"):
            create(state, "u", factor=factor)
    with pytest.raises(ConfigError, match="min_insync_replicas 3"):
        create(state, "u", factor=2, min_insync_replicas=3)
    with pytest.raises(ConfigError, match="retention_ms"):
        create(state, "u", retenton_ms=1)
    with pytest.raises(UnknownTopicError):
        decide(state, messages.DeleteTopic("nope"), now_ms=1)


def test_config_keys_of_tomorrow_are_carried_along_and_those_of_a_user_are_checked() -> None:
    state = cluster()
    create(state)
    (topic,) = state.topics.values()
    tomorrow = {"retention_ms": 5, "warp_factor": {"of": 9}}
    apply(state, [TopicConfigChanged(topic.topic_id, tomorrow)])
    assert topic.config.retention_ms == 5
    assert topic.whole_config["warp_factor"] == {"of": 9}
    for changes in ({"warp_factor": 3}, {"warp.factor": 3}):
        with pytest.raises(ConfigError, match="warp"):
            topic_changes.alter_topic_config(state, "t", changes)
    apply(state, topic_changes.alter_topic_config(state, "t", {"retention.ms": 7}))
    assert topic.options == {**tomorrow, "retention_ms": 7}
    again = ClusterState()
    for record in decode_records(encode_records(state.snapshot())):
        again.replay(record)
    assert again.topics[topic.topic_id].options == topic.options


def test_a_broker_that_is_down_or_cordoned_is_given_no_new_replica() -> None:
    state = cluster(5)
    apply(state, broker_changes.fence_broker(state, 0, EVERYONE))
    apply(state, decide(state, messages.CordonBroker(4, True)))
    create(state, partitions=4, factor=3)
    placed = [one.value.replicas for one in state.topics["id-t"].partitions.values()]
    assert {broker for replicas in placed for broker in replicas} == {1, 2, 3}
    with pytest.raises(InvalidReplicationFactorError):
        create(state, "u", factor=4)


def test_too_many_replicas_are_refused_with_the_arithmetic() -> None:
    state = cluster(replicas_max=10)
    create(state, partitions=8)
    with pytest.raises(ReplicaLimitError, match=r"8 \+ 3 = 11"):
        create(state, "u", 3)


def test_partitions_are_only_added() -> None:
    state = cluster()
    create(state, partitions=2)
    apply(state, decide(state, messages.CreatePartitions(name="t", total=5)))
    assert len(state.topics["id-t"].partitions) == 5
    for total in (5, 1):
        with pytest.raises(InvalidPartitionsError):
            decide(state, messages.CreatePartitions(name="t", total=total))


def test_an_old_copy_of_a_data_directory_is_refused() -> None:
    state = cluster()
    with pytest.raises(StaleBrokerError, match="old copy"):
        broker_changes.register_broker(
            state, registration(1, 1, incarnation="other"), (), EVERYONE
        )


def test_a_second_directory_under_a_live_brokers_id_is_refused() -> None:
    state = cluster()
    other = registration(1, 9, directory_id="elsewhere", incarnation="other")
    with pytest.raises(WrongClusterError):
        broker_changes.register_broker(state, other, (), EVERYONE)
    apply(state, broker_changes.fence_broker(state, 1, EVERYONE))
    apply(state, broker_changes.register_broker(state, other, (), EVERYONE))
    assert state.brokers[1].registration.directory_id == "elsewhere"


def test_a_broker_process_that_presents_itself_again_is_heard_and_nothing_else() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    before = value(state)
    assert broker_changes.register_broker(state, registration(1), (), EVERYONE) == []
    apply(state, broker_changes.fence_broker(state, 1, EVERYONE))
    assert not state.is_live(1)
    apply(state, broker_changes.register_broker(state, registration(1), (), EVERYONE))
    assert state.is_live(1)
    assert state.topics["id-t"].partitions[0].processes.keys() == {0, 1, 2}
    assert value(state).leader_epoch == before.leader_epoch


def test_a_report_of_a_replica_process_is_recorded_once_and_a_newer_process_replaces_it() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    assert broker_changes.register_replicas(state, 1, [report(1)], EVERYONE) == []
    run_replicas(state, 1, incarnation="b")  # That the one before is gone was not reported yet.
    assert state.topics["id-t"].partitions[0].processes[1].incarnation == "1b"


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_after_a_power_loss_everywhere_two_of_three_suffice_whoever_stays_away(gone: int) -> None:
    # The metadata still shows dead processes as live: no replica may be elected or dropped on it.
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    heard: set[int] = set()
    back = [broker for broker in range(3) if broker != gone]
    for broker in back:
        records = broker_changes.register_broker(state, registration(broker, 2), (), heard)
        apply(state, records)
        heard.add(broker)
        again = [report(broker, "b", epoch=1, flushed=5 + broker)]
        apply(state, broker_changes.register_replicas(state, broker, again, heard))
    assert brokers_of(value(state).isr) == [0, 1, 2]  # the third is not settled yet
    apply(state, broker_changes.fence_broker(state, gone, heard))
    assert value(state).leader == back[-1]  # the replica that holds the most


def test_a_replica_process_that_outlived_its_broker_stays_in_sync() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    before = value(state)
    apply(state, broker_changes.register_broker(
        state, registration(0, 2), [("id-t", 0)], EVERYONE))
    assert value(state) == before
    apply(state, broker_changes.register_broker(state, registration(0, 3), [], EVERYONE))
    assert brokers_of(value(state).isr) == [1, 2]


def test_nothing_is_settled_before_a_new_controller_has_heard_the_members_brokers() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    leader = value(state).leader
    gone = [("id-t", 0, f"{leader}a")]
    apply(state, broker_changes.fail_replicas(state, leader, gone, {leader}))
    assert value(state).leader == leader
    others = [broker for broker in range(3) if broker != leader]
    apply(state, broker_changes.hear_broker(state, others[0], {leader}))
    apply(state, broker_changes.hear_broker(state, others[1], {leader, others[0]}))
    assert value(state).leader in others


def test_a_new_partition_is_founded_without_a_replica_that_does_not_start() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1)
    assert value(state).leader is None
    topic = state.topics["id-t"]
    apply(state, broker_changes.found_partition(state, topic, 0, EVERYONE))
    assert value(state).leader in (0, 1)


def test_after_a_stop_of_the_whole_cluster_everyone_returns_in_sync() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    leader = value(state).leader
    for broker in sorted(range(3), key=lambda one: one == leader):
        assert value(state).leader == leader  # It leads until it stops itself.
        apply(state, broker_changes.stop_broker(
            state, broker, [report(broker, epoch=1, flushed=50)], EVERYONE, cluster_stops=True))
    assert value(state).leader is None and len(value(state).isr) == 3
    assert (value(state).leader_epoch, value(state).leader_incarnation) == (2, None)
    apply(state, broker_changes.register_broker(state, registration(0, 2), (), EVERYONE))
    run_replicas(state, 0, incarnation="b", epoch=1, flushed=50)
    assert value(state).leader == 0


def test_elections_that_waited_for_the_end_of_the_cluster_are_held_when_it_does_not_come() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    leader, before = value(state).leader, value(state).partition_epoch
    apply(state, broker_changes.stop_broker(
        state, leader, [report(leader, epoch=1, flushed=50)], EVERYONE, cluster_stops=True))
    assert value(state).leader is None and value(state).partition_epoch > before
    assert topic_changes.offline_reason(state, state.topics["id-t"], 0)
    apply(state, broker_changes.settle_everything(state, EVERYONE))
    assert value(state).leader in {0, 1, 2} - {leader}


def test_only_the_process_that_is_registered_speaks_for_a_broker() -> None:
    state = cluster()
    apply(state, broker_changes.register_broker(state, registration(1, 2), (), EVERYONE))
    broker_changes.check_broker(state, 1, "b1.2")
    for broker, incarnation in ((1, "b1.1"), (9, "b9.1")):
        with pytest.raises(StaleBrokerError, match="not registered"):
            broker_changes.check_broker(state, broker, incarnation)


def test_no_producer_id_is_allocated_twice() -> None:
    state, given = cluster(), []
    for _ in range(3):
        given.append(state.next_producer_id)
        apply(state, decide(state, messages.AllocateProducerIds(0, "b0.1")))
        given.append(state.next_producer_id)
    assert given == sorted(given) and given[1::2][:-1] == given[2::2]
    assert given[1] - given[0] == broker_changes.PRODUCER_ID_BLOCK


def test_a_process_that_is_gone_does_not_take_its_successor_along() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1)
    run_replicas(state, 1, incarnation="b")
    for broker, incarnation in ((1, "1a"), (2, "2a")):
        state.replay(ReplicaGone("id-t", 0, broker, incarnation))
    processes = state.topics["id-t"].partitions[0].processes
    assert {one.incarnation for one in processes.values()} == {"0a", "1b"}


def test_records_of_one_entry_are_read_in_their_order() -> None:
    records: list[MetadataRecord] = [VotersChanged((Voter(0, "d0"),)), registration(1)]
    assert decode_entry(encode_together(records)) == records
    assert [decode_entry(encode_record(one)) for one in records] == [[one] for one in records]


def test_a_broker_that_stops_alone_hands_its_leadership_over() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    leader = value(state).leader
    apply(state, broker_changes.stop_broker(
        state, leader, [report(leader, epoch=1, flushed=50)], EVERYONE, cluster_stops=False))
    assert value(state).leader not in (None, leader)


def test_a_late_report_of_a_process_that_was_replaced_takes_nothing_out() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    gone = [("id-t", 0, "1a")]
    apply(state, broker_changes.fail_replicas(state, 1, gone, EVERYONE))
    assert broker_changes.fail_replicas(state, 1, gone, EVERYONE) == []
    run_replicas(state, 1, incarnation="b")
    assert broker_changes.fail_replicas(state, 1, gone, EVERYONE) == []
    assert state.topics["id-t"].partitions[0].processes[1].incarnation == "1b"


def lead_by_another(state: ClusterState) -> int:
    """The preferred replica restarts and is in sync again, while another one leads. Returns the
    preferred replica's broker."""
    preferred: int = value(state).leader
    gone = [("id-t", 0, f"{preferred}a")]
    apply(state, broker_changes.fail_replicas(state, preferred, gone, EVERYONE))
    run_replicas(state, preferred, incarnation="b")
    now = value(state)
    processes = state.topics["id-t"].partitions[0].processes.values()
    apply(state, broker_changes.alter_partition(state, messages.AlterPartition(
        topic_id="id-t", partition=0, broker=now.leader,
        incarnation=now.leader_incarnation, leader_epoch=now.leader_epoch,
        partition_epoch=now.partition_epoch,
        isr=[(one.broker, one.incarnation) for one in processes])))
    assert value(state).leader not in (None, preferred)
    return preferred


def test_leadership_goes_back_to_the_preferred_replica_once() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    preferred = lead_by_another(state)
    apply(state, broker_changes.balance_leaders(state, EVERYONE))
    assert value(state).leader == preferred
    assert broker_changes.balance_leaders(state, EVERYONE) == []


def fail_all_replicas(state: ClusterState) -> None:
    for broker in range(3):
        gone = [("id-t", 0, f"{broker}a")]
        apply(state, broker_changes.fail_replicas(state, broker, gone, EVERYONE))


def test_an_unclean_election_takes_whichever_replica_lives() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    fail_all_replicas(state)
    assert value(state).leader is None
    with pytest.raises(PartitionOfflineError):
        decide(state, messages.ElectLeaders("t", None, True))
    run_replicas(state, 1, incarnation="b")
    assert decide(state, messages.ElectLeaders("t", None, False)) == []
    apply(state, decide(state, messages.ElectLeaders("t", None, True)))
    assert (value(state).leader, brokers_of(value(state).isr)) == (1, [1])


def test_a_config_that_allows_an_unclean_election_decides_it() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    fail_all_replicas(state)
    run_replicas(state, 1, incarnation="b")
    assert value(state).leader is None
    assert topic_changes.settle_after_config_change(state, "t", EVERYONE) == []
    apply(state, topic_changes.alter_topic_config(state, "t", {"unclean_leader_election": True}))
    apply(state, topic_changes.settle_after_config_change(state, "t", EVERYONE))
    assert value(state).leader == 1


def test_an_isr_proposal_is_decided_by_compare_and_swap() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    now = value(state)
    ask: dict[str, Any] = {
        "topic_id": "id-t", "partition": 0, "broker": now.leader,
        "incarnation": now.leader_incarnation, "leader_epoch": now.leader_epoch,
        "partition_epoch": now.partition_epoch,
        "isr": [(one.broker, one.incarnation) for one in now.isr][:2],
    }
    with pytest.raises(StalePartitionError):
        broker_changes.alter_partition(state, messages.AlterPartition(**{**ask, "partition_epoch": 0}))
    with pytest.raises(FencedEpochError):
        broker_changes.alter_partition(state, messages.AlterPartition(**{**ask, "incarnation": "old"}))
    with pytest.raises(StalePartitionError, match="not live"):
        broker_changes.alter_partition(state, messages.AlterPartition(**{**ask, "isr": [*ask["isr"], (2, "old")]}))
    with pytest.raises(StalePartitionError, match="own ISR"):
        broker_changes.alter_partition(state, messages.AlterPartition(**{**ask, "isr": ask["isr"][1:]}))
    with pytest.raises(UnknownTopicError):
        broker_changes.alter_partition(state, messages.AlterPartition(**{**ask, "partition": 7}))
    apply(state, broker_changes.alter_partition(state, messages.AlterPartition(**ask)))
    assert len(value(state).isr) == 2
    with pytest.raises(StalePartitionError):
        broker_changes.alter_partition(state, messages.AlterPartition(**ask))


def test_voters_change_one_at_a_time_up_to_three() -> None:
    state = cluster(1)
    apply(state, [VotersChanged((Voter(0, "d0"),))])
    assert broker_changes.next_voters(state, range(10)) == []
    state = cluster(4)
    apply(state, [VotersChanged((Voter(0, "d0"),))])
    steps = []
    while step := broker_changes.next_voters(state, range(10)):
        apply(state, step)
        steps.append([voter.broker for voter in state.voters])
    assert steps == [[0, 1], [0, 1, 2]]


def test_only_a_broker_that_was_heard_in_this_epoch_becomes_a_voter() -> None:
    """The log's state of the other brokers may be older than the loss of their disks."""
    state = cluster(3)
    apply(state, [VotersChanged((Voter(2, "d2"),))])
    assert broker_changes.next_voters(state, {2}) == []
    apply(state, broker_changes.next_voters(state, {1, 2}))
    assert [voter.broker for voter in state.voters] == [2, 1]


def test_a_voter_with_a_new_disk_is_dropped_and_then_joins_as_another() -> None:
    state = cluster(3)
    apply(state, [VotersChanged(tuple(Voter(one, f"d{one}") for one in range(3)))])
    apply(state, broker_changes.fence_broker(state, 2, EVERYONE))
    other = registration(2, 1, directory_id="new", incarnation="new")
    apply(state, broker_changes.register_broker(state, other, (), ()))
    apply(state, broker_changes.next_voters(state, range(10)))
    assert [voter.broker for voter in state.voters] == [0, 1]
    apply(state, broker_changes.next_voters(state, range(10)))
    assert state.voters[2] == Voter(2, "new")
    again = ClusterState()
    for record in decode_records(encode_records(state.snapshot())):
        again.replay(record)
    assert again.voters == state.voters


def test_the_newest_requests_that_are_done_are_remembered_and_no_more() -> None:
    state = ClusterState()
    asked = [f"request-{number}" for number in range(REQUESTS_REMEMBERED_MAX + 5)]
    apply(state, [RequestDone(one) for one in asked])
    assert list(state.requests_done) == asked[5:]


class Metadata(RuleBasedStateMachine):
    """Random lives of brokers, topics and replicas: the state stays valid, and its snapshot
    rebuilds it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.state.replay(EpochStarted(1, "h", 1, "c" * 32))
        self.starts: dict[int, int] = {}
        self.serial = 0

    def do(self, decide: Any) -> None:
        try:
            records = decide()
        except RayqError:
            return
        apply(self.state, decode_records(encode_records(records)))

    @rule(broker=st.integers(0, 3))
    def start_broker(self, broker: int) -> None:
        self.starts[broker] = self.starts.get(broker, 0) + 1
        one = registration(broker, self.starts[broker])
        self.do(lambda: broker_changes.register_broker(self.state, one, (), EVERYONE))

    @rule(broker=st.integers(0, 3))
    def silence(self, broker: int) -> None:
        if broker in self.state.brokers:
            self.do(lambda: broker_changes.fence_broker(self.state, broker, EVERYONE))

    @rule(broker=st.integers(0, 3))
    def speak(self, broker: int) -> None:
        if broker in self.state.brokers:
            self.do(lambda: broker_changes.hear_broker(self.state, broker, EVERYONE))

    @rule(
        name=st.sampled_from("ab"),
        factor=st.integers(1, 3),
        options=st.sampled_from([{}, {"cleanup_policy": "compact"}, {"remote_storage": True}]),
    )
    def create(self, name: str, factor: int, options: dict[str, Any]) -> None:
        self.serial += 1
        self.do(lambda: topic_changes.new_topic(
            self.state, topic_id=f"{name}{self.serial:031d}", name=name, partitions=2,
            replication_factor=factor, options=options, store=STORE))

    @rule(name=st.sampled_from("ab"), changes=st.sampled_from(
        [{"cleanup_policy": "delete"}, {"remote_storage": True}, {"remote_storage": "read"}]))
    def configure(self, name: str, changes: dict[str, Any]) -> None:
        self.do(lambda: topic_changes.alter_topic_config(self.state, name, changes, store=STORE))

    @rule(name=st.sampled_from("ab"))
    def leave_the_store(self, name: str) -> None:
        self.do(lambda: decide(self.state, messages.EndRemoteStorage(name=name), now_ms=1))

    @rule(name=st.sampled_from("qr"), topic=st.sampled_from(["a", "b", "q.dead"]),
          partitions=st.sampled_from([None, 2]), letters=st.sampled_from(["keep", "discard"]))
    def create_queue(self, name: str, topic: str, partitions: int | None, letters: str) -> None:
        self.serial += 1
        serials = itertools.count(self.serial * 10)
        self.do(lambda: decide(
            self.state,
            messages.CreateQueue(
                name=name, topic=topic, config={"dead_letters": letters}, partitions=partitions,
                replication_factor=1),
            new_id=lambda: f"id{next(serials)}", config=ClusterConfig(queue_state_partitions=1)))

    @rule(name=st.sampled_from(["q", "r", "q.dead"]))
    def delete_queue(self, name: str) -> None:
        self.do(lambda: decide(self.state, messages.DeleteQueue(name=name)))

    @rule()
    def remove_garbage(self) -> None:
        for one in list(self.state.garbage.values()):
            self.do(lambda one=one: decide(self.state, messages.RemoveGarbage(one.topic_id, one.deleted_ms)))

    @rule()
    def begin_removal(self) -> None:
        for one in list(self.state.garbage.values()):
            self.do(lambda one=one: decide(self.state, messages.BeginRemoval(one.topic_id, one.deleted_ms)))

    @rule(name=st.sampled_from("ab"), again=st.booleans())
    def restore(self, name: str, again: bool) -> None:
        """One that is deleted, or lives."""
        self.serial += 1
        for topic_id in [*(self.state.topics if again else ()), *self.state.garbage]:
            pointer = RemotePointer(1, 9, self.manifest(topic_id, 0, 1, 9), 0, 5, 1, 1)
            self.do(lambda pointer=pointer: topic_changes.new_topic(
                self.state, topic_id=f"{name}{self.serial:031d}", name=name, partitions=1,
                replication_factor=1, options={"remote_storage": True}, store=STORE,
                restored=[pointer]))

    @staticmethod
    def manifest(topic_id: str, number: int, version: int, epoch: int) -> str:
        prefix = partition_prefix("c" * 32, topic_id, number)
        return str(RemoteName(prefix, ObjectKind.MANIFEST, version, epoch, 0))

    @rule(end=st.integers(0, 9))
    def store_remotely(self, end: int) -> None:
        for topic, number, one in self.state.all_partitions():
            value, version = one.value, 1 + (0 if one.remote is None else one.remote.version)
            name = self.manifest(topic.topic_id, number, version, value.leader_epoch)
            pointer = RemotePointer(
                version, value.leader_epoch, name, 0, end, value.leader_epoch if end else None, 1)
            if value.leader is not None and value.leader_incarnation is not None:
                self.do(lambda at=(topic.topic_id, number), value=value, pointer=pointer: (
                    decide(self.state, messages.MoveRemote(
                        *at, value.leader, value.leader_incarnation, value.leader_epoch, pointer))))

    @rule()
    def doubt(self) -> None:
        self.do(lambda: remote_changes.doubt_everything(self.state))

    @rule(pin=st.sampled_from("xyz"), name=st.sampled_from("ab"))
    def pin(self, pin: str, name: str) -> None:
        topic_id = self.state.topic_ids.get(name, "")
        self.do(lambda: decide(self.state, messages.PinSnapshot(
            pin_id=pin, topic_id=topic_id, starts={0: 1}, ttl_ms=1)))

    @rule(pin=st.sampled_from("xyz"))
    def unpin(self, pin: str) -> None:
        self.do(lambda: remote_changes.unpin_snapshots(self.state, {pin}))

    @rule(name=st.sampled_from("ab"))
    def delete(self, name: str) -> None:
        self.do(lambda: decide(self.state, messages.DeleteTopic(name), now_ms=1))

    @rule(broker=st.integers(0, 3), flushed=st.integers(0, 9), data=st.data())
    def start_replica(self, broker: int, flushed: int, data: st.DataObject) -> None:
        mine = [(topic, number) for topic, number, _ in self.state.replicas_on(broker)]
        if broker not in self.state.brokers or not mine:
            return
        topic, number = data.draw(st.sampled_from(mine))
        self.serial += 1
        one = ReplicaRegistration(topic.topic_id, number, f"i{self.serial}", "h", 1, 1, flushed)
        self.do(lambda: broker_changes.register_replicas(self.state, broker, [one], EVERYONE))

    @rule(broker=st.integers(0, 3), data=st.data())
    def kill_replica(self, broker: int, data: st.DataObject) -> None:
        mine = [
            (topic.topic_id, number, partition.processes[broker].incarnation)
            for topic, number, partition in self.state.all_partitions()
            if broker in partition.processes
        ]
        if mine:
            gone = data.draw(st.sampled_from(mine))
            self.do(lambda: broker_changes.fail_replicas(self.state, broker, [gone], EVERYONE))

    @rule()
    def finish_a_request(self) -> None:
        self.serial += 1
        self.do(lambda: [RequestDone(f"r{self.serial}")])

    @rule()
    def balance(self) -> None:
        self.do(lambda: broker_changes.balance_leaders(self.state, EVERYONE))

    @invariant()
    def a_snapshot_rebuilds_the_state(self) -> None:
        rebuilt = ClusterState()
        for record in decode_records(encode_records(self.state.snapshot())):
            rebuilt.replay(record)
        assert rebuilt.brokers == self.state.brokers
        assert rebuilt.topics == self.state.topics
        assert rebuilt.topic_ids == self.state.topic_ids
        assert list(rebuilt.requests_done) == list(self.state.requests_done)
        assert (rebuilt.pins, rebuilt.garbage) == (self.state.pins, self.state.garbage)
        assert (rebuilt.queues, rebuilt.queue_ids) == (self.state.queues, self.state.queue_ids)

    @invariant()
    def leaders_are_live_members_of_their_isr(self) -> None:
        for _, _, partition in self.state.all_partitions():
            if partition.value.leader is not None:
                live = self.state.live_processes(partition)
                process = live[partition.value.leader]
                assert process.incarnation == partition.value.leader_incarnation


Metadata.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestMetadata = pytest.mark.slow(Metadata.TestCase)

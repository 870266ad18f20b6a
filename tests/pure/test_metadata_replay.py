"""What each record of the metadata log changes, and that a snapshot says all of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rayq.config import QueueConfig, TopicConfig
from rayq.core.cluster.partition_index import PartitionIndex
from rayq.core.cluster.records import (
    AclCreated,
    AclDeleted,
    BrokerCordoned,
    BrokerFenced,
    BrokerRemoved,
    BrokerUnfenced,
    EpochStarted,
    Member,
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    PrincipalCreated,
    PrincipalDeleted,
    ProducerIdsAllocated,
    QueueChanged,
    QueueDeleted,
    QuotaChanged,
    RemoteDoubted,
    RemoteGarbage,
    RemoteGarbageRemoved,
    RemoteMoved,
    ReplicaGone,
    ReplicaRegistered,
    RequestDone,
    SnapshotPinned,
    SnapshotUnpinned,
    TokenCreated,
    TokenRevoked,
    TopicConfigChanged,
    TopicCreated,
    TopicDeleted,
    Voter,
    VotersChanged,
    decode_entry,
    decode_record,
    decode_records,
    encode_record,
    encode_records,
    encode_together,
)
from rayq.core.cluster.state import (
    ClusterState,
    Partition,
    Principal,
    Queue,
    RegisteredBroker,
    Topic,
    find_queue,
    find_topic,
)
from rayq.errors import UnknownQueueError, UnknownTopicError
from rayq.messages.access import TokenVerifiers
from rayq.messages.acls import Acl
from rayq.messages.quotas import Quota
from rayq.messages.remote_pointer import RemotePointer
from tests.pure.test_cluster_state import apply, registration


def process(broker: int, incarnation: str = "a", topic: str = "T", number: int = 0) -> Any:
    return ReplicaRegistered(
        topic, number, broker, f"d{broker}", f"{broker}{incarnation}", "h", 1, 3, 20
    )


POINTER = RemotePointer(1, 1, "m", 0, 5, 1, 10)
VALUE = PartitionValue(
    (0, 1), isr=(Member(0, "d0", "0a"),), elr=(Member(1, "d1", "1a", (3, 20)),), leader=0,
    leader_incarnation="0a", leader_epoch=3, partition_epoch=4, last_unclean_epoch=2,
    placed_epoch=1, restored_epoch=1,
)
MOVING = PartitionValue(
    (2, 0, 1), target=(2, 0), origin=(0, 1), throttle_bytes_per_s=9, partition_epoch=1
)
VERIFIERS = TokenVerifiers(b"a" * 32, b"b" * 32, b"c" * 64, b"d" * 64)
ANNA_READS = Acl("anna", "allow", "read", "topic", "t")
BEN_READS = Acl("ben", "allow", "read", "topic", "t")
RECORDS: list[MetadataRecord] = [
    EpochStarted(1, "old", 1, "c", "first"),
    EpochStarted(2, "h", 9, "c", "second"),
    VotersChanged((Voter(0, "d0"), Voter(1, "d1"))),
    registration(0),
    registration(1),
    registration(2),
    BrokerFenced(1, "b1.1"),
    BrokerCordoned(2, True),
    TopicCreated("T", "t", {"remote_storage": True, "warp": 1}, 2),
    PartitionChanged("T", 0, VALUE),
    process(0),
    process(1),
    RemoteMoved("T", 0, POINTER),
    PartitionChanged("T", 1, MOVING),
    RemoteDoubted("T", 1),
    TopicCreated("U", "u", {"cleanup_policy": "compact"}, 1),
    PartitionChanged("U", 0, PartitionValue((2,))),
    TopicConfigChanged("U", {"retention_ms": 7}),
    QueueChanged("Q", "q", "T", {"max_deliveries": 3, "warp": 2}, 2),
    QueueChanged("P", "p", "T", {}, 2),
    RemoteGarbage("X", "x", 5, ("c/X/",)),
    SnapshotPinned("one", "T", {0: 4, 1: 8}, 100),
    SnapshotPinned("two", "T", {0: 3}, 50),
    SnapshotPinned("three", "U", {1: 1}, 50, "anna"),
    PrincipalCreated("anna", b"s" * 16, 7),
    PrincipalCreated("ben", b"t" * 16, 8),
    TokenCreated("anna", "01", VERIFIERS, 9, None),
    TokenCreated("anna", "02", VERIFIERS, 10, 99),
    AclCreated(ANNA_READS),
    AclCreated(BEN_READS),
    QuotaChanged(None, None, {"max_topics": 3.0}),
    QuotaChanged("anna", None, {"producer_byte_rate": 1e6, "warp": 1.5}),
    QuotaChanged("anna", "etl", {"producer_byte_rate": 0.0}),
    ProducerIdsAllocated(3000, 70),
    RequestDone("r1"),
    RequestDone("r2"),
]


def whole(state: ClusterState) -> dict[str, Any]:
    """All that a state holds; of what was done it keeps the order, too."""
    listed = ("requests_done", "acls", "quotas")
    return {**vars(state), **{name: list(getattr(state, name)) for name in listed}}


def built(records: list[MetadataRecord]) -> ClusterState:
    state = ClusterState()
    apply(state, records)
    return state


@pytest.fixture
def state() -> ClusterState:
    return built(RECORDS)


def changed(state: ClusterState, *records: MetadataRecord) -> dict[str, Any]:
    """What is another now, after these records."""
    before = whole(built(state.snapshot()))
    apply(state, list(records))
    return {name: part for name, part in whole(state).items() if part != before[name]}


def test_records_build_a_state_that_has_all_of_them(state: ClusterState) -> None:
    assert whole(state) == {
        "cluster_id": "c",
        "controller_epoch": 2,
        "controller": ("h", 9),
        "voters": (Voter(0, "d0"), Voter(1, "d1")),
        "brokers": {
            0: RegisteredBroker(registration(0), live=True),
            1: RegisteredBroker(registration(1), live=False),
            2: RegisteredBroker(registration(2), live=True, cordoned=True),
        },
        "topics": {
            "T": Topic(
                "T", "t", TopicConfig(remote_storage=True), {"remote_storage": True, "warp": 1}, 2,
                partitions={
                    0: Partition(VALUE, {0: process(0), 1: process(1)}, POINTER),
                    1: Partition(MOVING, is_remote_doubted=True),
                },
            ),
            "U": Topic(
                "U", "u", TopicConfig(retention_ms=7), {"retention_ms": 7}, 1, was_compacted=True,
                partitions={0: Partition(PartitionValue((2,)))},
            ),
        },
        "topic_ids": {"t": "T", "u": "U"},
        "queues": {
            "Q": Queue(
                "Q", "q", "T", QueueConfig(max_deliveries=3), {"max_deliveries": 3, "warp": 2}, 2
            ),
            "P": Queue("P", "p", "T", QueueConfig(), {}, 2),
        },
        "queue_ids": {"q": "Q", "p": "P"},
        "_queues_of": {"T": {"Q", "P"}},
        "moving": {("T", 1)},
        "index": PartitionIndex(
            {
                0: dict.fromkeys([("T", 0), ("T", 1)]),
                1: dict.fromkeys([("T", 0), ("T", 1)]),
                2: dict.fromkeys([("T", 1), ("U", 0)]),
            },
            unfounded=dict.fromkeys([("T", 1), ("U", 0)]),
        ),
        "next_producer_id": 3000,
        "next_family": 70,
        "requests_done": ["r1", "r2"],
        "pins": {
            "one": SnapshotPinned("one", "T", {0: 4, 1: 8}, 100),
            "two": SnapshotPinned("two", "T", {0: 3}, 50),
            "three": SnapshotPinned("three", "U", {1: 1}, 50, "anna"),
        },
        "garbage": {"X": RemoteGarbage("X", "x", 5, ("c/X/",))},
        "marks": {1: "first", 2: "second"},
        "principals": {
            "anna": Principal(
                PrincipalCreated("anna", b"s" * 16, 7),
                {
                    "01": TokenCreated("anna", "01", VERIFIERS, 9, None),
                    "02": TokenCreated("anna", "02", VERIFIERS, 10, 99),
                },
            ),
            "ben": Principal(PrincipalCreated("ben", b"t" * 16, 8)),
        },
        "acls": [ANNA_READS, BEN_READS],
        "quotas": [
            Quota(None, None, {"max_topics": 3.0}),
            Quota("anna", None, {"producer_byte_rate": 1e6, "warp": 1.5}),
            Quota("anna", "etl", {"producer_byte_rate": 0.0}),
        ],
    }


def test_a_snapshot_builds_the_very_state_that_it_was_taken_of(state: ClusterState) -> None:
    copy = built(decode_records(encode_records(state.snapshot())))
    assert whole(copy) == whole(state)
    assert copy.snapshot() == state.snapshot()
    empty = ClusterState()
    assert whole(built(empty.snapshot())) == whole(empty)


def test_a_snapshot_of_an_epoch_without_a_mark_tells_who_controls_now(state: ClusterState) -> None:
    apply(state, [EpochStarted(3, "new", 10, "c")])
    assert (state.controller_epoch, state.controller) == (3, ("new", 10))
    assert state.marks == {1: "first", 2: "second"}
    assert whole(built(state.snapshot())) == whole(state)


def test_every_record_is_read_as_it_was_written() -> None:
    assert [decode_record(encode_record(record)) for record in RECORDS] == RECORDS
    assert decode_records(encode_records(RECORDS)) == RECORDS
    assert decode_entry(encode_together(RECORDS)) == RECORDS
    assert decode_entry(encode_together([])) == []


def test_look_ups_find_what_is_there_and_nothing_else(state: ClusterState) -> None:
    assert state.topic_named("t") is state.topics["T"] is find_topic(state, "t")
    assert state.topic_named("T") is None
    with pytest.raises(UnknownTopicError, match="no topic 'T'"):
        find_topic(state, "T")
    assert find_queue(state, "q") is state.queues["Q"]
    with pytest.raises(UnknownQueueError, match="no queue 'Q'"):
        find_queue(state, "Q")
    assert state.partition("T", 1) is state.topics["T"].partitions[1]
    assert (state.partition("T", 2), state.partition("t", 0)) == (None, None)
    assert [state.is_live(broker) for broker in range(4)] == [True, False, True, False]
    assert state.takers() == {0: "n0"}
    assert state.live_processes(state.topics["T"].partitions[0]) == {0: process(0)}
    found = [(topic.name, number) for topic, number, _ in state.all_partitions()]
    assert found == [("t", 0), ("t", 1), ("u", 0)]
    on = [
        [(topic.name, number) for topic, number, _ in state.replicas_on(host)] for host in range(4)
    ]
    assert on == [[("t", 0), ("t", 1)], [("t", 0), ("t", 1)], [("t", 1), ("u", 0)], []]
    assert [queue.name for queue in state.queues_of("T")] == ["p", "q"]
    assert state.queues_of("U") == []


def test_retention_keeps_what_the_lowest_pin_of_that_partition_needs(state: ClusterState) -> None:
    asked = [("T", 0), ("T", 1), ("T", 2), ("U", 0), ("U", 1)]
    assert [state.pinned_offset(*place) for place in asked] == [3, 8, None, None, 1]
    apply(state, [SnapshotUnpinned("two", "T"), SnapshotPinned("one", "T", {1: 9}, 100)])
    assert [state.pinned_offset(*place) for place in asked] == [None, 9, None, None, 1]


def test_what_a_config_does_not_say_is_told_with_its_default(state: ClusterState) -> None:
    topic, queue = state.topics["T"], state.queues["Q"]
    assert topic.whole_config["warp"] == 1 and topic.whole_config["remote_storage"] is True
    assert topic.whole_config["retention_ms"] == TopicConfig().retention_ms
    assert queue.whole_config["warp"] == 2 and queue.whole_config["max_deliveries"] == 3
    assert queue.whole_config["backoff_s"] == QueueConfig().backoff_s


def test_min_insync_replicas_of_a_moving_partition_counts_those_of_before() -> None:
    topic = Topic("T", "t", TopicConfig(), {}, 3)
    value = PartitionValue((3, 4, 5, 0, 1, 2), target=(3, 4, 5), origin=(0, 1, 2))
    assert (value.adding, value.removing, value.replication_factor) == ((3, 4, 5), (0, 1, 2), 3)
    assert topic.min_insync(value) == 2
    assert topic.min_insync(PartitionValue((0, 1, 2, 3, 4))) == 3


# --- brokers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record, live",
    [
        (BrokerFenced(0, "b0.1"), [False, False]),
        (BrokerFenced(0, "b0.0"), [True, False]),  # An earlier process of it.
        (BrokerUnfenced(1, "b1.1"), [True, True]),
        (BrokerUnfenced(1, "b1.0"), [True, False]),
    ],
)
def test_a_session_ends_and_begins_for_the_process_that_it_is_of(
    state: ClusterState, record: MetadataRecord, live: list[bool]
) -> None:
    apply(state, [record])
    assert [state.is_live(broker) for broker in (0, 1)] == live


def test_a_broker_that_restarts_lives_stays_cordoned_and_keeps_what_its_disk_has(
    state: ClusterState,
) -> None:
    apply(state, [BrokerCordoned(1, True)])
    before = state.topics["T"].partitions[0].processes
    assert changed(state, registration(1, 2), registration(2, 2)).keys() == {"brokers"}
    assert state.brokers[1] == RegisteredBroker(registration(1, 2), live=True, cordoned=True)
    assert state.topics["T"].partitions[0].processes == before
    apply(state, [BrokerCordoned(1, False), registration(1, 3)])
    assert not state.brokers[1].cordoned


def test_a_broker_with_another_disk_has_none_of_the_processes_of_before(
    state: ClusterState,
) -> None:
    apply(state, [registration(1, 2, directory_id="new")])
    assert state.topics["T"].partitions[0].processes == {0: process(0)}


def test_a_broker_that_is_removed_is_forgotten_with_its_cordon(state: ClusterState) -> None:
    apply(state, [TopicDeleted("U"), PartitionChanged("T", 1, PartitionValue((0, 1)))])
    assert changed(state, BrokerRemoved(2)).keys() == {"brokers"}
    assert sorted(state.brokers) == [0, 1]
    apply(state, [registration(2, 2)])
    assert state.brokers[2] == RegisteredBroker(registration(2, 2), live=True)


# --- partitions -----------------------------------------------------------------------------------


def test_a_process_counts_until_that_very_process_is_gone(state: ClusterState) -> None:
    processes = state.topics["T"].partitions[0].processes
    apply(state, [process(1, "b"), ReplicaGone("T", 0, 1, "1a"), ReplicaGone("T", 1, 1, "1b")])
    assert processes == {0: process(0), 1: process(1, "b")}
    apply(state, [ReplicaGone("T", 0, 1, "1b"), ReplicaGone("T", 0, 1, "1b")])
    assert processes == {0: process(0)}


def test_a_replica_that_moves_away_takes_its_process_along(state: ClusterState) -> None:
    moved = PartitionValue((1, 2), partition_epoch=5)
    assert changed(state, PartitionChanged("T", 0, moved)).keys() == {"topics", "index"}
    assert state.topics["T"].partitions[0] == Partition(moved, {1: process(1)}, POINTER)


def test_a_topic_is_of_the_factor_that_its_first_partition_has_or_gets(
    state: ClusterState,
) -> None:
    def factor_after(number: int, value: PartitionValue) -> int:
        apply(state, [PartitionChanged("T", number, value)])
        return state.topics["T"].replication_factor

    assert factor_after(1, PartitionValue((0, 1, 2))) == 2
    assert factor_after(0, PartitionValue((0, 1, 2))) == 3
    assert factor_after(0, PartitionValue((0, 1, 2), target=(0,), origin=(0, 1, 2))) == 1
    assert state.moving == {("T", 0)}
    assert factor_after(0, PartitionValue((0,))) == 1
    assert state.moving == set()


def test_what_is_in_the_store_is_known_until_it_is_garbage(state: ClusterState) -> None:
    later = RemotePointer(2, 3, "m2", 0, 9, 3, 20)
    doubtful = state.topics["T"].partitions[0]
    apply(state, [RemoteDoubted("T", 0)])
    assert (doubtful.remote, doubtful.is_remote_doubted) == (POINTER, True)
    apply(state, [RemoteMoved("T", 0, later)])
    assert (doubtful.remote, doubtful.is_remote_doubted) == (later, False)
    garbage = RemoteGarbage("T", "t", 9, ("c/T/",))
    assert changed(state, garbage).keys() == {"topics", "garbage"}
    partitions = state.topics["T"].partitions.values()
    assert [(found.remote, found.is_remote_doubted) for found in partitions] == [(None, False)] * 2
    apply(state, [RemoteGarbageRemoved("X")])
    assert state.garbage == {"T": garbage}


# --- topics and queues ----------------------------------------------------------------------------


def test_a_topic_takes_all_that_is_its_own_along(state: ClusterState) -> None:
    apply(state, [
        PartitionChanged("U", 0, PartitionValue((0, 2), target=(0,), origin=(2,))),
        QueueChanged("R", "r", "U", {}, 1),
        TopicDeleted("T"),
    ])  # fmt: skip
    assert (set(state.topics), state.topic_ids) == ({"U"}, {"u": "U"})
    assert state.moving == {("U", 0)}
    assert set(state.pins) == {"three"}
    assert (set(state.queues), state.queue_ids) == ({"R"}, {"r": "R"})
    assert [queue.name for queue in state.queues_of("U")] == ["r"]
    apply(state, [TopicCreated("T", "t", {}, 1)])
    assert state.queues_of("T") == []


@pytest.mark.parametrize(
    "created, told, later, was_compacted",
    [
        ({}, False, {}, False),
        ({}, True, {}, True),
        ({"cleanup_policy": "compact"}, False, {}, True),
        ({}, False, {"cleanup_policy": "compact,delete"}, True),
        ({}, True, {"cleanup_policy": "delete"}, True),
    ],
)
def test_a_topic_that_was_compacted_once_is_known_for_it(
    created: dict[str, Any], told: bool, later: dict[str, Any], was_compacted: bool
) -> None:
    state = built([TopicCreated("T", "t", created, 1, told), TopicConfigChanged("T", later)])
    assert state.topics["T"].was_compacted is was_compacted
    assert state.topics["T"].options == later


def test_a_queue_is_altered_and_deleted_by_its_id(state: ClusterState) -> None:
    altered = QueueChanged("Q", "q", "T", {"max_deliveries": 9}, 2)
    assert changed(state, altered).keys() == {"queues"}
    assert find_queue(state, "q").config == QueueConfig(max_deliveries=9)
    assert changed(state, QueueDeleted("Q", "T")).keys() == {"queues", "queue_ids", "_queues_of"}
    assert (set(state.queues), state.queue_ids) == ({"P"}, {"p": "P"})
    assert [queue.name for queue in state.queues_of("T")] == ["p"]
    apply(state, [QueueDeleted("P", "T")])
    assert state.queues_of("T") == [] and "T" in state.topics
    assert whole(built(state.snapshot())) == whole(state)


# --- the cluster ----------------------------------------------------------------------------------


def test_a_forced_set_of_voters_forgets_the_marks(state: ClusterState) -> None:
    two = (Voter(0, "d0"), Voter(2, "d2"))
    assert changed(state, VotersChanged(two)) == {"voters": two}
    alone = (Voter(2, "d2"),)
    assert changed(state, VotersChanged(alone, clean=False)) == {"voters": alone, "marks": {}}


def test_a_request_and_a_block_of_ids_change_nothing_else(state: ClusterState) -> None:
    assert changed(state, ProducerIdsAllocated(4000)) == {"next_producer_id": 4000}
    assert changed(state, ProducerIdsAllocated(4000, 80)) == {"next_family": 80}
    assert changed(state, RequestDone("r3")) == {"requests_done": ["r1", "r2", "r3"]}
    assert changed(state, RequestDone("r1")) == {}


def test_a_principal_that_is_deleted_takes_all_that_is_its_own_along(state: ClusterState) -> None:
    without = changed(state, PrincipalDeleted("anna"))
    assert list(without["principals"]) == ["ben"] and without["acls"] == [BEN_READS]
    assert without["quotas"] == [Quota(None, None, {"max_topics": 3.0})]
    again = changed(state, PrincipalCreated("anna", b"u" * 16, 9))
    assert again["principals"]["anna"].tokens == {} and "acls" not in again


def test_a_token_that_is_revoked_and_an_acl_that_is_deleted_are_gone(state: ClusterState) -> None:
    revoked = changed(state, TokenRevoked("anna", "01"))
    assert list(revoked["principals"]["anna"].tokens) == ["02"]
    assert changed(state, AclDeleted(ANNA_READS)) == {"acls": [BEN_READS]}


# --- what must hold -------------------------------------------------------------------------------


def wrong(**changes: Any) -> PartitionChanged:
    return PartitionChanged("T", 0, msgspec.structs.replace(VALUE, **changes))


@pytest.mark.parametrize(
    "record",
    [
        PartitionChanged("T", 0, PartitionValue(())),
        PartitionChanged("U", 0, PartitionValue((2, 2))),
        wrong(isr=(*VALUE.isr, Member(2, "d2", "2a"))),  # It has no replica.
        wrong(elr=(Member(2, "d2", "2a"),)),
        wrong(elr=(Member(0, "d0", "0a"),)),  # It is in the ISR, too.
        wrong(isr=VALUE.isr * 2),
        wrong(target=(0, 1)),
        wrong(origin=(0, 1)),
        wrong(replicas=(1, 0), target=(0, 1), origin=(0, 1)),
        wrong(replicas=(0, 1, 2), target=(0,), origin=(2, 1)),
        wrong(leader=None),
        wrong(leader=1, leader_incarnation="1a"),  # It is not in the ISR.
        wrong(leader_incarnation="0b"),
        wrong(leader_incarnation=None),
        process(2),
        RemoteMoved("U", 0, POINTER),  # The topic has nothing in the store.
        RemoteMoved("T", 0, RemotePointer(1, 1, "m", 6, 5, 1, 10)),
        SnapshotPinned("four", "V", {0: 0}, 1),
        EpochStarted(0, "h", 9, "c", "of an epoch before"),
    ],
)
def test_a_state_that_cannot_be_is_told(state: ClusterState, record: MetadataRecord) -> None:
    state.replay(record)
    with pytest.raises(AssertionError):
        state.validate()


def test_an_empty_range_in_the_store_and_a_partition_nobody_leads_can_be(
    state: ClusterState,
) -> None:
    apply(state, [
        RemoteMoved("T", 0, RemotePointer(1, 1, "m", 5, 5, None, 0)),
        wrong(leader=None, leader_incarnation=None),
    ])  # fmt: skip


def test_names_and_moves_that_are_not_those_of_their_topics_are_told(state: ClusterState) -> None:
    def spoilt(attribute: str, value: Any) -> ClusterState:
        copy = built(state.snapshot())
        setattr(copy, attribute, value)
        return copy

    for attribute, value in [
        ("topic_ids", {"t": "U", "u": "T"}),
        ("moving", set()),
        ("index", PartitionIndex()),
        ("moving", {("T", 0), ("T", 1)}),
        ("queue_ids", {"q": "P", "p": "Q"}),
        ("garbage", {"T": RemoteGarbage("T", "t", 5, ())}),
        ("_queues_of", {"T": {"Q"}}),
        ("_queues_of", {"T": {"Q", "P"}, "U": {"Q"}}),
    ]:
        with pytest.raises((AssertionError, KeyError)):
            spoilt(attribute, value).validate()

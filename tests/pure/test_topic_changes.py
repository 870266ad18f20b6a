"""What the controller decides about topics: the very records, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rayq import messages
from rayq.core.cluster import broker_changes, topic_changes
from rayq.core.cluster.placement import place
from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    RemoteGarbage,
    RemoteMoved,
    SnapshotPinned,
    TopicConfigChanged,
    TopicCreated,
    TopicDeleted,
)
from rayq.core.cluster.remote_changes import RESTORED_PIN_MS
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    ConfigError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    PartitionOfflineError,
    ReplicaLimitError,
    TopicExistsError,
    UnknownTopicError,
)
from tests.pure.deciding import decide
from tests.pure.test_cluster_state import (
    EVERYONE,
    STORE,
    apply,
    cluster,
    create,
    fail_all_replicas,
    lead_by_another,
    registration,
    run_replicas,
    value,
)
from tests.pure.test_remote_changes import OTHER, folder, manifest, pointer

OWN = ("__consumer_offsets", "__transaction_state", "__queue_state")


def created(
    state: ClusterState, *, name: str = "t", partitions: int = 1, factor: int | None = None,
    **changes: Any,
) -> list[MetadataRecord]:
    values: dict[str, Any] = {
        "topic_id": f"id-{name}", "name": name, "partitions": partitions,
        "replication_factor": factor, "options": {},
    }
    return topic_changes.new_topic(state, **{**values, **changes})


def placed(
    state: ClusterState, partitions: int, factor: int, existing: Any = ()
) -> list[tuple[int, ...]]:
    return place(state.takers(), existing, partitions=partitions, replication_factor=factor)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a", "_a", "a__", "...", "-", ".a", "A.b_c-9", "Z", "x" * 199, "x" * 200]
)
def test_a_legal_name_is_taken(name: str) -> None:
    topic_changes.check_topic_name(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "A queue name cannot be empty."),
        ("x" * 201, "A queue name has at most 200 characters, not 201."),
        (".", "'.' is not a legal queue name"),
        ("..", "'..' is not a legal queue name"),
        ("a b", "'a b' is not a legal queue name"),
        ("a\n", r"'a\\n' is not a legal queue name"),
        ("a/b", "'a/b' is not a legal queue name"),
        ("é", "'é' is not a legal queue name"),
        ("__", "'__' is reserved"),
        ("__a", "'__a' is reserved"),
    ],
)
def test_an_illegal_name_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(InvalidTopicError, match=why):
        topic_changes.check_topic_name(name, "queue")


# --- creation ------------------------------------------------------------------------------------


def test_a_new_topic_is_its_options_and_the_placed_replicas_of_each_partition() -> None:
    state = cluster(4)
    create(state, "before", 3, 2)
    existing = [one.value.replicas for one in state.topics["id-before"].partitions.values()]
    replicas = placed(state, 5, 3, existing)
    assert replicas != placed(state, 5, 3)  # What is there already counts.
    options = {"retention.ms": 5, "flush": "os"}
    assert created(state, partitions=5, factor=3, options=options) == [
        TopicCreated("id-t", "t", {"retention_ms": 5, "flush": "os"}, 3),
        *(PartitionChanged("id-t", number, PartitionValue(one))
          for number, one in enumerate(replicas)),
    ]


def test_restored_partitions_get_their_pointers_and_begin_above_their_epochs() -> None:
    state = cluster()
    names = [manifest(4, folder(number, "old", OTHER)) for number in range(4)]
    restored = [
        pointer(4, 9, start=3, leader_epoch=7, end_epoch=5, manifest=names[0]),
        None,
        pointer(4, 9, start=2, leader_epoch=5, end_epoch=8, manifest=names[2]),
        pointer(4, 0, leader_epoch=6, manifest=names[3]),
    ]
    found = created(
        state, partitions=5, factor=3, options={"remote_storage": True}, restored=restored,
        store=STORE)
    assert found == [
        TopicCreated("id-t", "t", {"remote_storage": True}, 3),
        *(PartitionChanged("id-t", number, PartitionValue(one, restored_epoch=epoch))
          for number, (one, epoch) in enumerate(
              zip(placed(state, 5, 3), [7, 0, 8, 6, 0], strict=True))),
        RemoteMoved("id-t", 0, restored[0]),
        RemoteMoved("id-t", 2, restored[2]),
        RemoteMoved("id-t", 3, restored[3]),
        SnapshotPinned("restore-id-t", "id-t", {0: 3, 2: 2, 3: 0}, RESTORED_PIN_MS),
    ]


@pytest.mark.parametrize(
    ("brokers", "cordoned", "away", "factor"),
    [
        (1, 0, 0, 1),
        (2, 0, 0, 2),
        (3, 0, 0, 3),
        (5, 0, 0, 3),
        (3, 1, 0, 2),
        (4, 1, 0, 3),
        (5, 3, 0, 2),
        # Who is away may come back: a restart must not cost a replica.
        (3, 0, 1, None),
        (2, 0, 1, None),
        (4, 0, 1, 3),
        (3, 1, 1, None),
        (0, 0, 0, None),
    ],
)
def test_the_default_factor_counts_all_brokers_that_are_to_stay(
    brokers: int, cordoned: int, away: int, factor: int | None
) -> None:
    state = cluster(brokers)
    for broker in range(cordoned):
        apply(state, decide(state, messages.CordonBroker(broker, True)))
    for broker in range(brokers - away, brokers):
        apply(state, broker_changes.fence_broker(state, broker, EVERYONE))
    if factor is None:
        with pytest.raises(InvalidReplicationFactorError):
            created(state)
    else:
        topic, partition = created(state)
        assert isinstance(topic, TopicCreated) and isinstance(partition, PartitionChanged)
        assert topic.replication_factor == len(partition.value.replicas) == factor


def test_a_factor_that_is_not_possible_is_refused_with_who_lives_and_who_is_cordoned() -> None:
    state = cluster(5)
    create(state, "small", 1, 3)
    apply(state, broker_changes.fence_broker(state, 1, EVERYONE))
    for factor in (0, -1, 5):
        with pytest.raises(InvalidReplicationFactorError, match=(
            rf"factor {factor} of topic 't' .* live brokers, now 4 \(\[0, 2, 3, 4\]\) of 5\. Wait"
        )):
            created(state, factor=factor)
    for broker in (4, 3):
        apply(state, decide(state, messages.CordonBroker(broker, True)))
    with pytest.raises(InvalidReplicationFactorError, match=(
        r"now 2 \(\[0, 2\]\) of 5 \(cordoned: \[3, 4\]\)\. Wait"
    )):
        created(state, factor=3)
    with pytest.raises(InvalidReplicationFactorError, match=(
        r"'small' need 3 live brokers; there are 2 \(cordoned: \[3, 4\]\)\."
    )):
        decide(state, messages.CreatePartitions(name="small", total=2))
    for factor in (1, 2):
        created(state, factor=factor)


def test_a_topic_has_one_to_ten_thousand_partitions() -> None:
    state = cluster(replicas_max=100_000)
    assert len(created(state, partitions=10_000, factor=1)) == 10_001
    create(state, "t", 1, 1)
    assert len(decide(state, messages.CreatePartitions(name="t", total=10_000))) == 9_999
    for partitions in (0, 10_001):
        why = f"1 to 10000 partitions, not {partitions}"
        with pytest.raises(InvalidPartitionsError, match=why):
            created(state, name="u", partitions=partitions)
        with pytest.raises(InvalidPartitionsError, match=why):
            decide(state, messages.CreatePartitions(name="t", total=partitions))


def test_a_topic_that_is_there_is_not_created_again() -> None:
    state = cluster()
    create(state)
    with pytest.raises(TopicExistsError, match="'t' exists already"):
        created(state, topic_id="another")
    apply(state, decide(state, messages.DeleteTopic("t"), now_ms=1))
    assert created(state)


@pytest.mark.parametrize(("factor", "least", "fits"), [
    (1, None, True), (1, 1, True), (2, 2, True), (3, 2, True), (1, 2, False), (2, 3, False),
])
def test_as_many_in_sync_as_there_are_replicas_is_the_most(
    factor: int, least: int | None, fits: bool
) -> None:
    state = cluster()
    create(state, "plain", 1, factor)
    options = {"min.insync.replicas": least}
    if fits:
        assert created(state, factor=factor, options=options)
        assert topic_changes.alter_topic_config(state, "plain", options)
        return
    why = f"min_insync_replicas {least} is above the replication factor {factor}:"
    with pytest.raises(ConfigError, match=why):
        created(state, factor=factor, options=options)
    with pytest.raises(ConfigError, match=why):
        topic_changes.alter_topic_config(state, "plain", options)


def test_a_broker_takes_as_many_replicas_as_it_may_carry_and_not_one_more() -> None:
    state = cluster(replicas_max=4)
    create(state, "t", 2, 3)
    assert len(created(state, name="u", partitions=2, factor=3)) == 3
    with pytest.raises(ReplicaLimitError, match=r"^3 partitions x 3 replicas would .* 2 \+ 3 = 5 "):
        created(state, name="u", partitions=3, factor=3)
    assert len(decide(state, messages.CreatePartitions(name="t", total=4))) == 2
    with pytest.raises(ReplicaLimitError, match=r"^3 partitions x 3 replicas would .* 2 \+ 3 = 5 "):
        decide(state, messages.CreatePartitions(name="t", total=5))


# --- rayq's own topics ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_an_own_topic_is_created_once_with_the_options_that_it_needs(name: str) -> None:
    state = cluster()
    options = {
        "cleanup_policy": "compact", "segment_bytes": 16 << 20, "max_message_bytes": 64 << 20,
    }
    if name == "__queue_state":
        options["delete_retention_ms"] = 600_000
    records = topic_changes.ensure_own_topic(state, name, topic_id="id", partitions=2)
    assert records == [
        TopicCreated("id", name, options, 3),
        *(PartitionChanged("id", number, PartitionValue(one))
          for number, one in enumerate(placed(state, 2, 3))),
    ]
    apply(state, records)
    assert topic_changes.ensure_own_topic(state, name, topic_id="another", partitions=3) == []


@pytest.mark.parametrize(
    ("name", "calls"), list(zip(OWN, ["group", "transaction", "queue"], strict=True))
)
def test_clients_change_nothing_that_an_own_topic_depends_on(name: str, calls: str) -> None:
    state = cluster()
    apply(state, topic_changes.ensure_own_topic(state, name, topic_id="id", partitions=1))
    why = f"^'{name}' is rayq's own: .* Use the {calls} calls of the admin instead"
    fixed = [
        {"cleanup_policy": "delete"}, {"flush": "os"}, {"max_message_bytes": 1},
        {"retention_ms": 1}, {"remote_storage": True}, {"retention_bytes": 1},
        {"unclean_leader_election": True}, {"cleanup.policy": "delete"},
        {"segment_ms": 5, "retention.ms": 1},
    ]
    refused: list[Callable[[], object]] = [
        lambda: topic_changes.check_not_internal(name),
        lambda: decide(state, messages.DeleteTopic(name), now_ms=1),
        lambda: decide(state, messages.CreatePartitions(name=name, total=2)),
        *(lambda one=one: topic_changes.alter_topic_config(state, name, one, store=STORE)
          for one in fixed),
    ]
    for call in refused:
        with pytest.raises(InvalidTopicError, match=why):
            call()
    options = state.topics["id"].options
    assert topic_changes.alter_topic_config(state, name, {"segment.ms": 5}) == [
        TopicConfigChanged("id", {**options, "segment_ms": 5})
    ]
    # What these keys mean to a client's topic is the client's business.
    topic_changes.check_not_internal("t")
    create(state)
    for one in fixed:
        assert topic_changes.alter_topic_config(state, "t", one, store=STORE)


# --- changes of a topic --------------------------------------------------------------------------


def test_a_topic_that_is_not_there_is_neither_changed_nor_told_of() -> None:
    state = cluster()
    calls: list[Callable[[], object]] = [
        lambda: decide(state, messages.DeleteTopic("t"), now_ms=1),
        lambda: decide(state, messages.CreatePartitions(name="t", total=2)),
        lambda: topic_changes.alter_topic_config(state, "t", {"flush": "os"}),
        lambda: decide(state, messages.EndRemoteStorage(name="t"), now_ms=1),
        lambda: decide(state, messages.ElectLeaders("t", None, False)),
        lambda: topic_changes.settle_after_config_change(state, "t", EVERYONE),
    ]
    for call in calls:
        with pytest.raises(UnknownTopicError):
            call()


def test_a_topic_that_is_deleted_leaves_what_it_has_in_the_object_store() -> None:
    state = cluster()
    state.cluster_id = "c"
    create(state)
    apply(state, created(state, name="u", options={"remote_storage": True}, store=STORE))
    assert decide(state, messages.DeleteTopic("t"), now_ms=7) == [TopicDeleted("id-t")]
    assert decide(state, messages.DeleteTopic("u"), now_ms=7) == [
        TopicDeleted("id-u"), RemoteGarbage("id-u", "u", 7, ("c/id-u/",)),
    ]


def test_partitions_that_are_added_follow_those_that_are_there() -> None:
    state = cluster(4)
    create(state, "t", 3, 2)
    existing = [one.value.replicas for one in state.topics["id-t"].partitions.values()]
    replicas = placed(state, 3, 2, existing)
    assert replicas != placed(state, 3, 2)
    assert decide(state, messages.CreatePartitions(name="t", total=6)) == [
        PartitionChanged("id-t", 3 + number, PartitionValue(one))
        for number, one in enumerate(replicas)
    ]
    assert len(decide(state, messages.CreatePartitions(name="t", total=4))) == 1
    for total in (3, 2):
        with pytest.raises(InvalidPartitionsError, match=f"has 3 partitions; .* so {total} is not"):
            decide(state, messages.CreatePartitions(name="t", total=total))


def test_added_partitions_need_as_many_brokers_as_each_has_replicas() -> None:
    state = cluster()
    create(state, "t", 1, 2)
    apply(state, broker_changes.fence_broker(state, 0, EVERYONE))
    assert decide(state, messages.CreatePartitions(name="t", total=2))
    apply(state, broker_changes.fence_broker(state, 1, EVERYONE))
    with pytest.raises(InvalidReplicationFactorError, match=(
        r"of 't' need 2 live brokers; there are 1\."
    )):
        decide(state, messages.CreatePartitions(name="t", total=2))


def test_a_config_change_keeps_the_keys_that_it_does_not_name() -> None:
    state = cluster()
    create(state, flush="os", segment_bytes=4096)
    changes = {"segment.bytes": 8192, "segment_ms": 5}
    assert topic_changes.alter_topic_config(state, "t", changes) == [
        TopicConfigChanged("id-t", {"flush": "os", "segment_bytes": 8192, "segment_ms": 5})
    ]
    with pytest.raises(ConfigError):
        topic_changes.alter_topic_config(state, "t", {"flush": "sometimes"})


@pytest.mark.parametrize("smaller", [
    PartitionValue((0, 1)),
    PartitionValue((0, 1, 2), target=(0, 1), origin=(0, 1, 2)),
    PartitionValue((0, 1, 2), target=(0, 1, 2), origin=(0, 1)),
])
@pytest.mark.parametrize("number", [0, 1])
def test_as_many_in_sync_as_the_smallest_partition_has_before_and_after_its_move_is_the_most(
    smaller: PartitionValue, number: int
) -> None:
    state = cluster()
    create(state, "t", 2, 3)
    apply(state, [PartitionChanged("id-t", number, smaller)])
    assert topic_changes.alter_topic_config(state, "t", {"min_insync_replicas": 2})
    with pytest.raises(ConfigError, match="3 is above the replication factor 2"):
        topic_changes.alter_topic_config(state, "t", {"min_insync_replicas": 3})


def test_remote_storage_is_turned_on_by_its_key_and_off_only_by_name() -> None:
    state = cluster()
    state.cluster_id = "c"
    create(state, flush="os")
    assert decide(state, messages.EndRemoteStorage(name="t"), now_ms=7) == []
    on = {"remote_storage": True}
    apply(state, topic_changes.alter_topic_config(state, "t", on, store=STORE))
    for changes in ({"remote_storage": "read"}, {"segment_ms": 5}):
        records = topic_changes.alter_topic_config(state, "t", changes)
        assert records == [
            TopicConfigChanged("id-t", {"flush": "os", "remote_storage": True, **changes})
        ]
    with pytest.raises(ConfigError, match="what 't' has in the object store"):
        topic_changes.alter_topic_config(state, "t", {"remote_storage": False})
    assert decide(state, messages.EndRemoteStorage(name="t"), now_ms=7) == [
        TopicConfigChanged("id-t", {"flush": "os", "remote_storage": False}),
        RemoteGarbage("id-t", "t", 7, ("c/id-t/",)),
    ]


# --- elections -----------------------------------------------------------------------------------


def test_a_preferred_replica_is_elected_in_the_partitions_that_are_named() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    preferred = lead_by_another(state)
    before = value(state)
    (record,) = decide(state, messages.ElectLeaders("t", None, False))
    assert isinstance(record, PartitionChanged)
    assert (record.topic_id, record.partition) == ("id-t", 0)
    assert (record.value.leader, record.value.leader_incarnation, record.value.leader_epoch) == (
        preferred, f"{preferred}b", before.leader_epoch + 1
    )
    assert decide(state, messages.ElectLeaders("t", [0], False)) == [record]
    assert decide(state, messages.ElectLeaders("t", [0] * 1000, False)) == [record]
    assert decide(state, messages.ElectLeaders("t", [], False)) == []
    with pytest.raises(UnknownTopicError, match="'t' has no partition 1"):
        decide(state, messages.ElectLeaders("t", [0, 1], False))


def test_an_unclean_election_is_for_partitions_without_a_leader_and_needs_a_live_replica() -> None:
    state = cluster()
    create(state)
    run_replicas(state, 0, 1, 2)
    replicas = value(state).replicas
    assert decide(state, messages.ElectLeaders("t", [0], True)) == []
    fail_all_replicas(state)
    listed = ", ".join(map(str, replicas))
    with pytest.raises(PartitionOfflineError, match=(
        rf"^No replica of t-0 is running: start one of the brokers \[{listed}\]"
    )):
        decide(state, messages.ElectLeaders("t", [0], True))
    run_replicas(state, 2, incarnation="b")
    (record,) = decide(state, messages.ElectLeaders("t", [0], True))
    assert isinstance(record, PartitionChanged)
    assert (record.topic_id, record.partition) == ("id-t", 0)
    assert (record.value.leader, record.value.leader_incarnation) == (2, "2b")
    assert record.value.last_unclean_epoch == record.value.leader_epoch


def test_all_partitions_are_elected_in_their_order_where_none_is_named() -> None:
    state = cluster()
    create(state, "t", 3)
    values = {
        number: PartitionValue(one.value.replicas, leader_epoch=3)
        for number, one in state.topics["id-t"].partitions.items()
    }
    for number in (2, 0, 1):
        apply(state, [PartitionChanged("id-t", number, values[number])])
    topic = state.topics["id-t"]
    topic.partitions = {number: topic.partitions[number] for number in (2, 0, 1)}
    for number in range(3):
        one = messages.ReplicaRegistration("id-t", number, f"r{number}", "h", 1, 1, 0)
        apply(state, broker_changes.register_replicas(state, 1, [one], set()))
    records = decide(state, messages.ElectLeaders("t", None, True))
    found = [
        (one.partition, one.value.leader_incarnation)
        for one in records if isinstance(one, PartitionChanged)
    ]
    assert found == [(0, "r0"), (1, "r1"), (2, "r2")]


def test_why_a_partition_has_no_leader_is_told_in_full() -> None:
    state = cluster()
    create(state)
    topic = state.topics["id-t"]
    assert topic_changes.offline_reason(state, topic, 0) == (
        "its replicas are starting for the first time"
    )
    run_replicas(state, 0, 1, 2)
    assert topic_changes.offline_reason(state, topic, 0) is None
    fail_all_replicas(state)
    end = ", which may hold acknowledged records that the others lack"
    assert topic_changes.offline_reason(state, topic, 0) == f"waits for broker 1 or 2{end}"
    apply(state, broker_changes.register_broker(
        state, registration(1, 2, directory_id="new"), (), ()))
    run_replicas(state, 1, incarnation="b")
    assert topic_changes.offline_reason(state, topic, 0) == (
        f"waits for broker 1 with its former directory d1 or 2{end}"
    )

"""What the controller decides about the object store: pointers, pins, garbage, restored topics."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rayq import messages
from rayq.config import ClusterConfig, TopicConfig
from rayq.core.cluster import broker_changes, remote_changes, topic_changes
from rayq.core.cluster.records import (
    EpochStarted,
    RemoteDoubted,
    RemoteGarbage,
    RemoteGarbageRemoved,
    RemoteMoved,
    SnapshotPinned,
    SnapshotUnpinned,
    VotersChanged,
    decode_records,
    encode_records,
)
from rayq.core.cluster.remote_changes import PINS_MAX, RESTORED_PIN_MS, ObjectStoreFacts
from rayq.core.cluster.state import MARKS_REMEMBERED_MAX, ClusterState, Partition
from rayq.errors import (
    ConfigError,
    FencedEpochError,
    InvalidRequestError,
    InvalidTopicError,
    OverloadedError,
    RemoteStorageError,
    StalePartitionError,
    UnknownTopicError,
)
from rayq.messages import ReplicaRegistration
from rayq.messages.remote_names import (
    ObjectKind,
    RemoteName,
    parse_folder,
    partition_prefix,
    topic_prefix,
)
from rayq.messages.remote_pointer import RESTORED_EPOCH_MAX, RemotePointer
from tests.pure.deciding import decide
from tests.pure.test_cluster_state import EVERYONE, apply, cluster

CLUSTER, OTHER = "c" * 32, "a" * 32
WORKS = ObjectStoreFacts("s3://bucket", dict.fromkeys(range(3)))


def id_of(name: str) -> str:
    """The id of the topic of that name."""
    return name.encode().hex().zfill(32)


def folder(partition: int = 0, topic: str = "t", cluster_id: str = CLUSTER) -> str:
    return partition_prefix(cluster_id, id_of(topic), partition)


def manifest(version: int, prefix: str = folder(), epoch: int = 1) -> str:
    return str(RemoteName(prefix, ObjectKind.MANIFEST, version, epoch, 7))


def run_replicas(state: ClusterState, *brokers: int, topic: str = "t") -> None:
    for broker in brokers:
        registration = ReplicaRegistration(id_of(topic), 0, f"{broker}a", "h", 1, None, 0)
        apply(state, broker_changes.register_replicas(state, broker, [registration], EVERYONE))


def tiered(name: str = "t", **arguments: Any) -> ClusterState:
    """A cluster with a topic that is stored remotely, and led."""
    state = cluster()
    apply(state, [EpochStarted(1, "h", 1, CLUSTER)])
    create(state, name, **arguments)
    run_replicas(state, 0, 1, 2)
    return state


def create(
    state: ClusterState, name: str = "t", *, partitions: int = 1, stored: Any = True, **changes: Any
) -> None:
    apply(state, topic_changes.new_topic(
        state, topic_id=id_of(name), name=name, partitions=partitions, replication_factor=3,
        options={"remote_storage": stored}, **{"store": WORKS, **changes}))


def partition(state: ClusterState, name: str = "t") -> Partition:
    return state.topics[id_of(name)].partitions[0]


def pointer(version: int = 1, end: int = 10, start: int = 0, **changes: Any) -> RemotePointer:
    values: dict[str, Any] = {
        "version": version, "leader_epoch": 1, "manifest": manifest(version, epoch=changes.get("leader_epoch", 1)),
        "start": start, "end": end, "end_epoch": 1 if end else None, "data_bytes": 100 * end,
    }
    return RemotePointer(**{**values, **changes})


def move(state: ClusterState, asked: RemotePointer, **changes: Any) -> Any:
    now = partition(state).value
    values: dict[str, Any] = {
        "topic_id": id_of("t"), "partition": 0, "broker": now.leader,
        "incarnation": now.leader_incarnation, "leader_epoch": now.leader_epoch, "pointer": asked,
    }
    records = decide(state, messages.MoveRemote(**{**values, **changes}))
    apply(state, decode_records(encode_records(records)))
    return records


def check_snapshot(state: ClusterState) -> None:
    rebuilt = ClusterState()
    apply(rebuilt, decode_records(encode_records(state.snapshot())))
    assert (rebuilt.topics, rebuilt.pins, rebuilt.garbage, rebuilt.marks) == (
        state.topics, state.pins, state.garbage, state.marks
    )
    assert (rebuilt.controller_epoch, rebuilt.controller) == (
        state.controller_epoch, state.controller
    )


# --- pointers ------------------------------------------------------------------------------------


def test_the_leader_moves_the_pointer_one_version_at_a_time_and_the_partition_epoch_stays() -> None:
    state = tiered()
    before = partition(state).value
    move(state, pointer(1))
    assert partition(state).remote == pointer(1) and partition(state).value == before
    with pytest.raises(StalePartitionError, match="which is 1"):
        move(state, pointer(3, 20))
    with pytest.raises(StalePartitionError):
        move(state, pointer(1, 20))
    assert move(state, pointer(1)) == []  # The answer was lost, and the leader asks again.
    move(state, pointer(2, 20, start=5))
    check_snapshot(state)


def test_only_the_leader_of_this_epoch_moves_the_pointer() -> None:
    state = tiered()
    for changes in ({"broker": 9}, {"incarnation": "old"}, {"leader_epoch": 0}):
        with pytest.raises(FencedEpochError):
            move(state, pointer(), **changes)
    with pytest.raises(UnknownTopicError):
        move(state, pointer(), partition=5)
    move(state, pointer())
    with pytest.raises(FencedEpochError):  # Not even what is committed already.
        move(state, pointer(), incarnation="old")


@pytest.mark.parametrize(
    "wrong",
    [
        pointer(2, 9),
        pointer(2, 20, start=1),
        pointer(2, 20, start=21),
        pointer(2, 20, leader_epoch=2),
        pointer(2, 20, end_epoch=None),
        pointer(2, 20, manifest="m"),
        pointer(2, 20, manifest=manifest(2, folder(1))),
        pointer(2, 20, data_bytes=-1),
    ],
)
def test_a_pointer_that_cannot_be_is_refused(wrong: RemotePointer) -> None:
    state = tiered()
    move(state, pointer(1, 10, start=2))
    with pytest.raises(InvalidRequestError):
        move(state, wrong)
    assert partition(state).remote == pointer(1, 10, start=2)


def test_the_range_goes_back_only_where_another_manifest_is_adopted() -> None:
    """Metadata came back from a copy, or the manifest is lost."""
    state = tiered()
    create(state, "plain", stored=False)
    move(state, pointer(1, 10))
    doubts = remote_changes.doubt_everything(state)
    assert doubts == [RemoteDoubted(id_of("t"), 0)]
    apply(state, doubts)
    check_snapshot(state)
    with pytest.raises(StalePartitionError):
        move(state, pointer(1, 5), is_adopted=True)
    with pytest.raises(StalePartitionError, match="adopt"):
        move(state, pointer(2, 20))
    move(state, pointer(2, 5), is_adopted=True)
    assert not partition(state).is_remote_doubted


def test_where_older_metadata_do_not_know_of_remote_storage_its_leader_looks_once_it_is_on() -> None:
    state = tiered(stored=False)
    assert remote_changes.doubt_everything(state) == []  # The cluster has no object store.
    apply(state, [EpochStarted(2, "h", 1, CLUSTER, "mark")])
    apply(state, remote_changes.doubt_everything(state))
    assert partition(state).is_remote_doubted
    before = partition(state).value
    apply(state, topic_changes.alter_topic_config(state, "t", {"remote_storage": True}, store=WORKS))
    after = partition(state).value
    assert (after.leader, after.leader_epoch) == (before.leader, before.leader_epoch + 1)


def test_who_does_not_want_to_know_what_was_in_the_store_gives_it_up() -> None:
    state = tiered(stored=False)
    apply(state, [EpochStarted(2, "h", 1, CLUSTER, "mark")])
    apply(state, remote_changes.doubt_everything(state))
    apply(state, decide(state, messages.EndRemoteStorage(name="t"), now_ms=5))
    assert not partition(state).is_remote_doubted and id_of("t") in state.garbage


# --- pins ----------------------------------------------------------------------------------------


def pin(state: ClusterState, pin_id: str, start: int = 0, **changes: Any) -> None:
    values: dict[str, Any] = {"topic_id": id_of("t"), "starts": {0: start}, "ttl_ms": 1000}
    apply(state, decide(state, messages.PinSnapshot(pin_id=pin_id, **{**values, **changes})))


def test_the_lowest_pin_of_a_partition_holds_until_the_last_is_gone() -> None:
    state = tiered(partitions=2)
    pin(state, "a", 7)
    pin(state, "b", 5)
    pin(state, "b", 6)  # Renewed.
    assert (state.pinned_offset(id_of("t"), 0), state.pinned_offset(id_of("t"), 1)) == (6, None)
    check_snapshot(state)
    apply(state, remote_changes.unpin_snapshots(state, {"b", "never"}))
    assert state.pinned_offset(id_of("t"), 0) == 7
    apply(state, decide(state, messages.DeleteTopic("t"), now_ms=1))
    assert not state.pins


def test_a_pin_that_keeps_nothing_is_refused() -> None:
    state = tiered()
    create(state, "plain", stored=False)
    for changes in ({"starts": {}}, {"starts": {1: 0}}, {"starts": {0: -1}}, {"topic_id": id_of("plain")}):
        with pytest.raises(InvalidRequestError):
            pin(state, "a", **changes)
    with pytest.raises(UnknownTopicError):
        pin(state, "a", topic_id="never")


def test_a_pin_is_what_was_asked_for_and_only_those_that_are_named_end() -> None:
    state = tiered(partitions=2)
    create(state, "u")
    asked = messages.PinSnapshot(pin_id="a", topic_id=id_of("t"), starts={0: 0, 1: 9}, ttl_ms=5)
    assert decide(state, asked) == [SnapshotPinned("a", id_of("t"), {0: 0, 1: 9}, 5)]
    for starts in ({0: 1, 2: 0}, {0: -1, 1: 0}, {-1: 0}):
        with pytest.raises(InvalidRequestError, match="pin of 't' names offsets"):
            pin(state, "a", starts=starts)
    pin(state, "a")
    pin(state, "b", topic_id=id_of("u"))
    pin(state, "c")
    assert remote_changes.unpin_snapshots(state, ["b", "never", "a"]) == [
        SnapshotUnpinned("a", id_of("t")), SnapshotUnpinned("b", id_of("u")),
    ]
    assert remote_changes.unpin_snapshots(state, []) == []
    assert remote_changes.unpin_snapshots(state, ["never"]) == []


def test_there_is_a_limit_of_pins_and_those_there_are_can_be_renewed() -> None:
    state = tiered()
    for number in range(PINS_MAX):
        pin(state, f"{number}")
    with pytest.raises(OverloadedError, match="1000 pins") as caught:
        pin(state, "one more")
    assert caught.value.retriable, "jobs end, and pins with them"
    pin(state, "0", 3)
    with pytest.raises(InvalidRequestError, match="another topic"):
        create(state, "u")
        pin(state, "0", topic_id=id_of("u"))


def test_all_pins_together_name_so_many_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer tells of all of them."""
    monkeypatch.setattr(remote_changes, "PINNED_PARTITIONS_MAX", 3)
    state = tiered(partitions=2)
    pin(state, "a", starts={0: 1, 1: 1})
    pin(state, "b", starts={0: 1})
    pin(state, "a", starts={0: 2, 1: 2})
    with pytest.raises(InvalidRequestError, match="more than 3 partitions together"):
        pin(state, "c", starts={0: 1})


# --- the end -------------------------------------------------------------------------------------


def test_a_deleted_topic_leaves_garbage_until_a_broker_has_removed_it() -> None:
    state = tiered()
    create(state, "plain", stored=False)
    move(state, pointer())
    apply(state, decide(state, messages.DeleteTopic("plain"), now_ms=5))
    assert not state.garbage
    apply(state, decide(state, messages.DeleteTopic("t"), now_ms=5))
    left = state.garbage[id_of("t")]
    assert (left.name, left.deleted_ms, left.prefixes) == ("t", 5, (topic_prefix(CLUSTER, id_of("t")),))
    check_snapshot(state)
    with pytest.raises(InvalidRequestError, match="not being removed yet"):
        decide(state, messages.RemoveGarbage(id_of("t"), 5))
    apply(state, decide(state, messages.BeginRemoval(id_of("t"), 5)))
    check_snapshot(state)
    assert decide(state, messages.BeginRemoval(id_of("t"), 5)) == []  # For each page that is listed.
    assert decide(state, messages.RemoveGarbage(id_of("t"), 4)) == []  # Of an earlier time.
    apply(state, decide(state, messages.RemoveGarbage(id_of("t"), 5)))
    assert not state.garbage and decide(state, messages.RemoveGarbage(id_of("t"), None)) == []


@pytest.mark.parametrize(
    ("stored", "doubted", "may"),
    [
        (False, [], False), (True, [], True), ("read", [], True), (False, [1], True),
        (False, [0, 1], True), (True, [0], True),
    ],
)
def test_objects_may_be_left_of_a_topic_that_is_stored_or_in_doubt(
    stored: Any, doubted: list[int], may: bool
) -> None:
    state = tiered(stored=stored, partitions=2)
    apply(state, [RemoteDoubted(id_of("t"), number) for number in doubted])
    topic = state.topics[id_of("t")]
    found = remote_changes.may_have_objects(topic)
    assert found is may
    garbage = [RemoteGarbage(id_of("t"), "t", 7, (topic_prefix(CLUSTER, id_of("t")),))]
    assert remote_changes.give_up_remote(state, topic, 7) == (garbage if may else [])


def test_a_restored_topic_gives_up_the_objects_that_it_came_with_too() -> None:
    state = tiered("other")
    manifests = [
        manifest(3, place)
        for place in (folder(1, "old", OTHER), folder(0, "gone"), folder(2, "gone"))
    ]
    restored = [pointer(3, manifest=name) for name in manifests]
    create(state, partitions=5, restored=[None, *restored])
    assert remote_changes.give_up_remote(state, state.topics[id_of("t")], 9) == [
        RemoteGarbage(id_of("t"), "t", 9, (
            topic_prefix(CLUSTER, id_of("t")), folder(1, "old", OTHER), folder(0, "gone"),
            folder(2, "gone")))
    ]


def test_a_topic_leaves_the_object_store_only_when_that_is_asked_for_by_name() -> None:
    state = tiered()
    move(state, pointer())
    with pytest.raises(ConfigError, match="delete_remote=True"):
        topic_changes.alter_topic_config(state, "t", {"remote.storage": False})
    apply(state, topic_changes.alter_topic_config(state, "t", {"remote_storage": "read"}))
    move(state, pointer(2, start=5))  # Retention goes on.
    apply(state, decide(state, messages.EndRemoteStorage(name="t"), now_ms=5))
    assert partition(state).remote is None and id_of("t") in state.garbage
    assert decide(state, messages.EndRemoteStorage(name="t"), now_ms=6) == []
    check_snapshot(state)
    with pytest.raises(StalePartitionError, match="any more"):
        move(state, pointer(3, 20))
    back = {"remote_storage": True}
    with pytest.raises(ConfigError, match="still being removed"):
        topic_changes.alter_topic_config(state, "t", back, store=WORKS)
    remove(state)
    apply(state, topic_changes.alter_topic_config(state, "t", back, store=WORKS))


# --- restored topics -----------------------------------------------------------------------------


def test_a_restored_topic_has_its_pointers_pinned_and_leads_in_later_epochs() -> None:
    state = tiered()
    old = pointer(4, 90, start=30, leader_epoch=1007, end_epoch=7,
                  manifest=manifest(4, folder(0, "topic", OTHER)))
    create(state, "back", partitions=2, restored=[old])
    run_replicas(state, 0, topic="back")
    found = broker_changes.found_partition(state, state.topics[id_of("back")], 0, EVERYONE)
    apply(state, found)
    back = partition(state, "back")
    assert back.remote == old and back.value.leader_epoch == 1008
    assert state.topics[id_of("back")].partitions[1].remote is None
    assert state.pinned_offset(id_of("back"), 0) == 30
    check_snapshot(state)
    apply(state, decide(state, messages.DeleteTopic("back"), now_ms=1))
    assert state.garbage[id_of("back")].prefixes == (topic_prefix(CLUSTER, id_of("back")), folder(0, "topic", OTHER))


def test_what_is_deleted_by_mistake_is_garbage_no_more_once_it_is_restored() -> None:
    state = tiered()
    move(state, pointer())
    with pytest.raises(InvalidRequestError, match="those of 't-0'"):
        create(state, "copy", restored=[pointer(2)])
    apply(state, decide(state, messages.DeleteTopic("t"), now_ms=1))
    create(state, "t2", restored=[pointer(2)])
    assert not state.garbage
    assert partition(state, "t2").remote == pointer(2)


def test_only_the_garbage_that_a_restored_topic_needs_is_kept() -> None:
    state = tiered()
    for name in ("t2", "u"):
        create(state, name)
    move(state, pointer())
    for name in ("t", "t2", "u"):
        apply(state, decide(state, messages.DeleteTopic(name), now_ms=1))
    back = [None, pointer(5, 10, start=4, manifest=manifest(5, folder(0, "u"))),
            pointer(3, 8, start=2, manifest=manifest(3, folder(3, "t")))]
    assert remote_changes.restore(state, id_of("back"), back) == [
        RemoteGarbageRemoved(id_of("t")),
        RemoteGarbageRemoved(id_of("u")),
        RemoteMoved(id_of("back"), 1, back[1]),
        RemoteMoved(id_of("back"), 2, back[2]),
        SnapshotPinned(f"restore-{id_of('back')}", id_of("back"), {1: 4, 2: 2}, RESTORED_PIN_MS),
    ]
    assert remote_changes.restore(state, id_of("back"), [None]) == []
    assert remote_changes.restore(state, id_of("back"), []) == []
    apply(state, decide(state, messages.BeginRemoval(id_of("t"), 1)))
    assert decide(state, messages.RemoveGarbage(id_of("t"), None)) == [RemoteGarbageRemoved(id_of("t"))]


def elsewhere(number: int, version: int = 1, **changes: Any) -> RemotePointer:
    return pointer(version, manifest=manifest(version, folder(number, "other", OTHER)), **changes)


@pytest.mark.parametrize(
    ("stored", "restored", "why"),
    [
        (True, [elsewhere(0), elsewhere(1)], None),
        ("read", [elsewhere(0)], None),
        (True, [None, elsewhere(0)], None),
        (True, [elsewhere(0, leader_epoch=RESTORED_EPOCH_MAX, end_epoch=5)], None),
        (True, [elsewhere(0, end=0)], None),
        (True, [elsewhere(0, start=10, data_bytes=0)], None),
        (False, [], None),
        (False, [None, None, None], None),
        (False, [None, elsewhere(0)], "has to have remote_storage=True"),
        (True, [elsewhere(0), None, None], "3 partitions .* the topic gets 2"),
        (True, [None, elsewhere(0, 0)], "Partition 1 cannot be restored: .* is of no range"),
        (True, [elsewhere(0, start=11)], "Partition 0 cannot .* is of no range"),
        (True, [elsewhere(0, start=-1)], "is of no range"),
        (True, [elsewhere(0, data_bytes=-1)], "is of no range"),
        (True, [elsewhere(0, end_epoch=None)], "record before 10 is None"),
        (True, [pointer(manifest="a/b")], "not the name of a manifest"),
        (True, [None, pointer(9)], "Partition 1 cannot .* its objects are those of 't-0', which"),
        (True, [elsewhere(4), elsewhere(4, 2)], "Partition 1 cannot .* those of partition 0,"),
        # A partition without a pointer yet, and one that the topic does not have.
        (True, [pointer(manifest=manifest(1, folder(1)))], "its objects are those of 't', which"),
        (True, [pointer(manifest=manifest(1, folder(7)))], "its objects are those of 't', which"),
        (True, [pointer(manifest=manifest(1, folder(0, "plain")))], "are those of 'plain', which"),
        (True, [elsewhere(0, leader_epoch=RESTORED_EPOCH_MAX + 1)], "of a restored topic begin"),
        (True, [elsewhere(0, end_epoch=RESTORED_EPOCH_MAX + 1)], "of a restored topic begin"),
        (True, [elsewhere(0, leader_epoch=2**64 - 1)], "leader epochs 18446744073709551615 and 1"),
        (True, [elsewhere(0, end=2**62, start=2**62)], "is of no range"),
        (True, [elsewhere(0, data_bytes=2**63)], "is of no range"),
        (True, [elsewhere(0, end=2**62 - 1, data_bytes=1)], "no room for new records"),
        (True, [elsewhere(0, 2**62 - 1)], "no room for new records"),
        (True, [pointer(2, manifest=manifest(1, folder(0, "other", OTHER)))], "is version 1 of"),
        (True, [elsewhere(0, leader_epoch=0)], "is version 1 of epoch 1, not 1 of 0"),
    ],
)
def test_two_partitions_never_share_objects_and_what_is_restored_can_be_true(
    stored: Any, restored: list[RemotePointer | None], why: str | None
) -> None:
    state = tiered(partitions=2)
    create(state, "plain", stored=False)
    move(state, pointer())
    config = TopicConfig(remote_storage=stored)
    if why is None:
        remote_changes.check_restored(state, config, 2, restored)
        return
    with pytest.raises(InvalidRequestError, match=why):
        remote_changes.check_restored(state, config, 2, restored)


@pytest.mark.parametrize(
    ("stored", "restored", "why"),
    [
        (False, [pointer()], "remote_storage=True"),
        (True, [None, pointer()], "2 partitions are to be restored"),
        (True, [pointer(0)], "no range"),
    ],
)
def test_a_topic_that_cannot_be_restored_is_refused(stored: bool, restored: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        create(cluster(), stored=stored, restored=restored)


HEX = "0" * 32
NOT_OF_RAYQ = [
    "", "/", "//", "a/b/c", f"{HEX}/", f"{HEX}/{HEX}/", f"{HEX}/{HEX}/0/", "../../x", "..",
    f"/{manifest(1)}", f"{manifest(1)}/", f"{manifest(1)}\n", f" {manifest(1)}",
    f"{manifest(1)}\0", manifest(1).replace("/0/", "/00/"), manifest(1).replace("/0/", "/-1/"),
    manifest(1).replace("/0/", "/1000000/"), manifest(1).replace("/0/", "/../"),
    manifest(1).replace("/0/", "//"), manifest(1).replace("/", "\\"),
    manifest(1).replace("/", "\N{FRACTION SLASH}"), manifest(1).replace("/", "\N{FULLWIDTH SOLIDUS}"),
    manifest(1).replace("/0/", "/\N{ARABIC-INDIC DIGIT ZERO}/"),
    manifest(1).replace("manifest", "data"), manifest(1).replace("manifest", "page"),
    manifest(1).replace("manifest", "m\N{CYRILLIC SMALL LETTER A}nifest"),
    manifest(1).upper(), manifest(1).replace(CLUSTER, "C" * 32), manifest(1).replace(CLUSTER, ""),
    manifest(1).replace(f"{id_of('t')}/", ""), manifest(1).replace(id_of("t"), "owners"),
    manifest(1).replace("0000000001-", "9999999999-"), manifest(1)[:-1], f"{manifest(1)}0",
    f"{CLUSTER}/{manifest(1)}", manifest(10**19), f"{CLUSTER}/owners/0/manifest/1-2-3",
]


@pytest.mark.parametrize("text", NOT_OF_RAYQ)
def test_a_manifest_whose_name_is_not_one_that_rayq_writes_becomes_nobodys_pointer(
    text: str
) -> None:
    """Retention, sweeps and the end of a topic delete below the manifest's folder."""
    state = tiered(partitions=1)
    with pytest.raises(InvalidRequestError, match="not the name of a manifest"):
        move(state, pointer(manifest=text))
    with pytest.raises(InvalidRequestError, match="not the name of a manifest"):
        create(state, "r", restored=[pointer(manifest=text)])
    assert parse_folder(text) is None or text in (f"{HEX}/{HEX}/", f"{HEX}/{HEX}/0/")


def test_a_leader_moves_to_a_manifest_of_its_own_in_its_own_folder_only() -> None:
    state = tiered()
    for elsewhere_ in (folder(1), folder(0, "u"), folder(0, "t", OTHER)):
        for is_adopted in (False, True):
            with pytest.raises(InvalidRequestError, match="the partition's objects are in c"):
                move(state, pointer(manifest=manifest(1, elsewhere_)), is_adopted=is_adopted)
    with pytest.raises(InvalidRequestError, match="its manifest is of leader epoch 0"):
        move(state, pointer(manifest=manifest(1, epoch=0)))
    old = pointer(4, leader_epoch=1000, manifest=manifest(4, folder(0, "old", OTHER)))
    create(state, "back", restored=[old])
    run_replicas(state, 0, 1, 2, topic="back")
    apply(state, broker_changes.found_partition(state, state.topics[id_of("back")], 0, EVERYONE))
    led = partition(state, "back").value
    asked: dict[str, Any] = {
        "topic_id": id_of("back"), "broker": led.leader, "incarnation": led.leader_incarnation,
        "leader_epoch": 1001,
    }
    with pytest.raises(InvalidRequestError, match="the partition's objects are in a"):
        next_one = manifest(5, folder(0, "back"), 1001)
        move(state, pointer(5, leader_epoch=1001, manifest=next_one), **asked)
    next_one = manifest(5, folder(0, "old", OTHER), 1001)
    move(state, pointer(5, leader_epoch=1001, manifest=next_one), **asked)


# --- garbage that is being removed ----------------------------------------------------------------


def remove(state: ClusterState, name: str = "t") -> None:
    """A broker removes what the topic left."""
    deleted_ms = state.garbage[id_of(name)].deleted_ms
    apply(state, decide(state, messages.BeginRemoval(id_of(name), deleted_ms)))
    apply(state, decide(state, messages.RemoveGarbage(id_of(name), deleted_ms)))


def test_what_is_being_removed_is_not_restored_and_what_was_restored_is_not_removed() -> None:
    """A sweep may be slow, and know old metadata: each page of it asks."""
    state = tiered()
    move(state, pointer())
    apply(state, decide(state, messages.DeleteTopic("t"), now_ms=1))
    with pytest.raises(InvalidRequestError, match="not garbage"):
        decide(state, messages.BeginRemoval(id_of("t"), 2))  # Of another time.
    create(state, "t2", restored=[pointer(2)])
    with pytest.raises(InvalidRequestError, match="it was restored"):
        decide(state, messages.BeginRemoval(id_of("t"), 1))
    apply(state, decide(state, messages.DeleteTopic("t2"), now_ms=3))
    apply(state, decide(state, messages.BeginRemoval(id_of("t2"), 3)))
    with pytest.raises(InvalidRequestError, match="are being removed, since 't2' was deleted"):
        create(state, "t3", restored=[pointer(3)])
    remove(state, "t2")
    with pytest.raises(InvalidRequestError, match="is removed already"):
        decide(state, messages.BeginRemoval(id_of("t2"), 3))


def test_nothing_is_removed_that_a_pointer_or_a_pin_has_a_use_for() -> None:
    state = tiered()
    create(state, "u")
    run_replicas(state, 0, 1, 2, topic="u")
    led = partition(state, "u").value
    move(state, pointer(manifest=manifest(1, folder(0, "u"))), topic_id=id_of("u"),
         broker=led.leader, incarnation=led.leader_incarnation)
    for prefixes in (
        (f"{CLUSTER}/",), ("",), (topic_prefix(CLUSTER, id_of("u")),), (folder(0, "u"),),
        (f"{folder(0, 'u')}manifest/",), ("x/", folder(0, "u")),
    ):
        # As metadata of an earlier rayq may have it.
        state.garbage["g"] = RemoteGarbage("g", "gone", 7, prefixes)
        with pytest.raises(InvalidRequestError, match="stays: topic 'u' has its objects in c"):
            decide(state, messages.BeginRemoval("g", 7))
    del state.garbage["g"]
    pin(state, "job", 3)
    apply(state, decide(state, messages.EndRemoteStorage(name="t"), now_ms=5))
    with pytest.raises(InvalidRequestError, match=r"while it is pinned: \['job'\]"):
        decide(state, messages.BeginRemoval(id_of("t"), 5))
    apply(state, remote_changes.unpin_snapshots(state, {"job"}))
    remove(state)


# --- configs -------------------------------------------------------------------------------------


def test_what_deleted_topics_leave_has_a_bound_and_no_topic_is_kept_from_being_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_changes, "FOLDERS_MAX", 3)
    state = tiered()
    apply(state, decide(state, messages.DeleteTopic("t"), now_ms=1))
    create(state, "u")
    create(state, "v")
    with pytest.raises(OverloadedError, match="3 folders.*3 is the most"):
        create(state, "w")
    create(state, "w", stored=False)
    with pytest.raises(OverloadedError):
        topic_changes.alter_topic_config(state, "w", {"remote_storage": True}, store=WORKS)
    topic_changes.alter_topic_config(state, "u", {"remote_storage": "read"}, store=WORKS)
    for name in ("u", "v"):
        apply(state, decide(state, messages.DeleteTopic(name), now_ms=1))
    with pytest.raises(OverloadedError):
        create(state, "w2")
    apply(state, [RemoteGarbageRemoved(id_of("t"))])
    with pytest.raises(OverloadedError):
        create(state, "w2", partitions=2, restored=[elsewhere(0), elsewhere(1)])
    create(state, "w2")


def test_what_is_asked_of_folders_costs_as_much_as_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not as much as the product of those that are asked for and those that were left."""
    monkeypatch.setattr(topic_changes, "check_replica_limits", lambda *_: None)

    def costs_s(count: int) -> list[float]:
        state = tiered()
        asked = [elsewhere(number) for number in range(count)]
        create(state, "back", partitions=count, restored=asked)
        more = [
            pointer(manifest=manifest(1, folder(number, "more", OTHER))) for number in range(count)
        ]
        for index in range(4):
            left = tuple(folder(number, f"left{index}", OTHER) for number in range(count))
            state.garbage[f"g{index}"] = RemoteGarbage(f"g{index}", "g", 0, left, index % 2 == 0)
        config, costs = TopicConfig(remote_storage=True), []
        for asks in (
            lambda: remote_changes.check_restored(state, config, count, more),
            lambda: remote_changes.restore(state, "g2", more),
            lambda: decide(state, messages.BeginRemoval("g1", 0)),
        ):
            began_s = time.process_time()
            asks()
            costs.append(time.process_time() - began_s)
        return costs

    for few_s, many_s in zip(costs_s(200), costs_s(3200), strict=True):
        assert many_s < 64 * few_s + 0.02  # 16 times as many.


@pytest.mark.parametrize(
    ("store", "error", "why"),
    [
        (ObjectStoreFacts(None, {}), ConfigError, "remote_storage_url"),
        (ObjectStoreFacts("s3://b", {0: None}), RemoteStorageError, "Broker 1.*not heard"),
        (ObjectStoreFacts("s3://b", {0: None, 1: "403", 2: None}), RemoteStorageError, "1.*403"),
    ],
)
def test_remote_storage_waits_until_every_live_broker_reaches_the_store(
    store: ObjectStoreFacts, error: type[Exception], why: str
) -> None:
    state = cluster()
    with pytest.raises(error, match=why):
        create(state, store=store)
    create(state, stored=False)
    with pytest.raises(error, match=why):
        topic_changes.alter_topic_config(state, "t", {"remote_storage": True}, store=store)


@pytest.mark.parametrize(
    ("before", "after", "needs_a_store"),
    [
        (None, False, False), (None, True, True), (None, "read", True),
        (False, False, False), (False, True, True), (False, "read", True),
        (True, False, False), (True, True, False), (True, "read", False),
        ("read", False, False), ("read", True, True), ("read", "read", False),
    ],
)
def test_a_store_is_needed_where_a_topic_begins_to_use_it(
    before: Any, after: Any, needs_a_store: bool
) -> None:
    state = tiered(stored=before or False)
    topic = None if before is None else state.topics[id_of("t")]
    config = TopicConfig(remote_storage=after)
    none, away = ObjectStoreFacts(None, {}), ObjectStoreFacts("s3://b", {})
    if not needs_a_store:
        remote_changes.check_remote_config(state, config, topic, none)
        return
    with pytest.raises(ConfigError, match="remote_storage needs an object store"):
        remote_changes.check_remote_config(state, config, topic, none)
    with pytest.raises(RemoteStorageError, match="^Broker 0 .*: it was not heard of yet"):
        remote_changes.check_remote_config(state, config, topic, away)
    remote_changes.check_remote_config(state, config, topic, WORKS)


def test_the_first_broker_with_trouble_is_named() -> None:
    state = cluster(4)
    apply(state, broker_changes.fence_broker(state, 0, EVERYONE))
    config = TopicConfig(remote_storage=True)
    facts = ObjectStoreFacts("s3://b", {0: "gone", 1: None, 3: "403", 2: "it is full", 7: "?"})
    with pytest.raises(RemoteStorageError, match="^Broker 2 cannot .*: it is full"):
        remote_changes.check_remote_config(state, config, None, facts)


def test_a_broker_that_is_away_is_not_waited_for() -> None:
    state = cluster()
    create(state, stored=False)
    apply(state, broker_changes.fence_broker(state, 2, EVERYONE))
    two = ObjectStoreFacts("s3://b", {0: None, 1: None, 2: "it is away"})
    apply(state, topic_changes.alter_topic_config(state, "t", {"remote_storage": True}, store=two))


def test_topics_that_are_or_were_compacted_stay_on_disk() -> None:
    state = cluster()
    apply(state, topic_changes.new_topic(
        state, topic_id=id_of("t"), name="t", partitions=1, replication_factor=3,
        options={"cleanup_policy": "compact"}))
    with pytest.raises(ConfigError, match="not for compacted"):
        topic_changes.alter_topic_config(state, "t", {"remote_storage": True}, store=WORKS)
    apply(state, topic_changes.alter_topic_config(state, "t", {"cleanup_policy": "delete"}))
    check_snapshot(state)
    with pytest.raises(ConfigError, match="was compacted"):
        topic_changes.alter_topic_config(state, "t", {"remote_storage": True}, store=WORKS)
    with pytest.raises(ConfigError, match="not for compacted"):
        topic_changes.alter_topic_config(tiered(), "t", {"cleanup_policy": "compact"})


def test_topics_of_rayq_itself_stay_on_disk() -> None:
    state = cluster()
    apply(state, topic_changes.ensure_own_topic(
        state, topic_changes.OFFSETS_TOPIC, topic_id="id", partitions=1))
    with pytest.raises(InvalidTopicError):
        topic_changes.alter_topic_config(
            state, topic_changes.OFFSETS_TOPIC, {"remote_storage": True}, store=WORKS)


@pytest.mark.parametrize("url", [
    "s3://key:s3cret@bucket/prefix", "http://s3cret", "s3://", "file://s3cret", "s3://b?k=s3cret",
    "file:///mnt/../s3cret", "bucket/s3cret",
])
def test_a_url_with_credentials_or_of_no_store_is_refused_and_not_told(url: str) -> None:
    with pytest.raises(ConfigError, match="remote_storage_url") as refused:
        ClusterConfig(remote_storage_url=url)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://b", "gs://b/p/q", "az://c/p", "file:///mnt/store"])
def test_urls_of_stores(url: str) -> None:
    assert ClusterConfig(remote_storage_url=url).remote_storage_url == url


# --- marks ---------------------------------------------------------------------------------------


def test_a_later_mark_that_the_metadata_do_not_know_is_of_another_cluster() -> None:
    state = ClusterState()
    assert remote_changes.unknown_marks(state, [(5, "whose?")]) == []  # No store so far.
    for epoch in (3, 4):
        state.replay(EpochStarted(epoch, "h", 1, "c", f"mark-{epoch}"))
    check_snapshot(state)
    known = [(3, "mark-3"), (4, "mark-4"), (2, "long ago")]
    assert remote_changes.unknown_marks(state, known) == []
    assert remote_changes.unknown_marks(state, [*known, (4, "clone"), (5, "clone")]) == [4, 5]


def test_marks_count_from_the_oldest_one_that_is_remembered_on() -> None:
    state = ClusterState()
    for epoch in (3, 5):
        state.replay(EpochStarted(epoch, "h", 1, "c", f"mark-{epoch}"))
    seen = [(6, "x"), (2, "x"), (5, "mark-3"), (4, "x"), (3, "mark-5"), (5, "mark-5")]
    seen.append((3, "mark-3"))
    assert remote_changes.unknown_marks(state, seen) == [3, 4, 5, 6]
    assert remote_changes.unknown_marks(state, []) == []


def test_after_a_recovery_the_marks_of_forgotten_epochs_count_for_nothing() -> None:
    state = ClusterState()
    state.replay(EpochStarted(3, "h", 1, "c", "mark-3"))
    state.replay(VotersChanged((), clean=False))
    state.replay(EpochStarted(1004, "h", 1, "c", "mark-1004"))
    marks = [(3, "mark-3"), (4, "forgotten"), (1004, "mark-1004")]
    assert remote_changes.unknown_marks(state, marks) == []
    assert remote_changes.unknown_marks(state, [*marks, (1 << 31, "restored elsewhere")]) == [1 << 31]


def test_so_many_marks_are_remembered_and_no_more() -> None:
    state = ClusterState()
    for epoch in range(1, MARKS_REMEMBERED_MAX + 10):
        state.replay(EpochStarted(epoch, "h", 1, "c", f"mark-{epoch}"))
    assert len(state.marks) == MARKS_REMEMBERED_MAX and min(state.marks) == 10
    check_snapshot(state)

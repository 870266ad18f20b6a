"""What the controller decides about the object store: pointers, pins, garbage, restored topics."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.config import ClusterConfig, TopicConfig
from rayq.core import broker_changes, remote_changes, topic_changes
from rayq.core.cluster_state import MARKS_REMEMBERED_MAX, ClusterState, Partition
from rayq.core.metadata_records import (
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
from rayq.core.remote_changes import PINS_MAX, RESTORED_PIN_MS, ObjectStoreFacts
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
from rayq.remote_pointer import RemotePointer
from tests.pure.test_cluster_state import EVERYONE, apply, cluster, report, run_replicas

WORKS = ObjectStoreFacts("s3://bucket", dict.fromkeys(range(3)))


def tiered(name: str = "t", **arguments: Any) -> ClusterState:
    """A cluster with a topic that is stored remotely, and led."""
    state = cluster()
    apply(state, [EpochStarted(1, "h", 1, "cluster")])
    create(state, name, **arguments)
    run_replicas(state, 0, 1, 2)
    return state


def create(
    state: ClusterState, name: str = "t", *, partitions: int = 1, stored: Any = True, **changes: Any
) -> None:
    apply(state, topic_changes.create_topic(
        state, topic_id=f"id-{name}", name=name, partitions=partitions, replication_factor=3,
        options={"remote_storage": stored}, **{"store": WORKS, **changes}))


def partition(state: ClusterState, name: str = "t") -> Partition:
    return state.topics[f"id-{name}"].partitions[0]


def pointer(version: int = 1, end: int = 10, start: int = 0, **changes: Any) -> RemotePointer:
    values: dict[str, Any] = {
        "version": version, "leader_epoch": 1, "manifest": f"cluster/id-t/0/manifest/{version}",
        "start": start, "end": end, "end_epoch": 1 if end else None, "data_bytes": 100 * end,
    }
    return RemotePointer(**{**values, **changes})


def move(state: ClusterState, asked: RemotePointer, **changes: Any) -> Any:
    now = partition(state).value
    values: dict[str, Any] = {
        "topic_id": "id-t", "partition": 0, "broker": now.leader,
        "incarnation": now.leader_incarnation, "leader_epoch": now.leader_epoch, "pointer": asked,
    }
    records = remote_changes.move_remote(state, **{**values, **changes})
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
    assert doubts == [RemoteDoubted("id-t", 0)]
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
    apply(state, [EpochStarted(2, "h", 1, "cluster", "mark")])
    apply(state, remote_changes.doubt_everything(state))
    assert partition(state).is_remote_doubted
    before = partition(state).value
    apply(state, topic_changes.alter_topic_config(state, "t", {"remote_storage": True}, store=WORKS))
    after = partition(state).value
    assert (after.leader, after.leader_epoch) == (before.leader, before.leader_epoch + 1)


def test_who_does_not_want_to_know_what_was_in_the_store_gives_it_up() -> None:
    state = tiered(stored=False)
    apply(state, [EpochStarted(2, "h", 1, "cluster", "mark")])
    apply(state, remote_changes.doubt_everything(state))
    apply(state, topic_changes.end_remote_storage(state, "t", now_ms=5))
    assert not partition(state).is_remote_doubted and "id-t" in state.garbage


# --- pins ----------------------------------------------------------------------------------------


def pin(state: ClusterState, pin_id: str, start: int = 0, **changes: Any) -> None:
    values: dict[str, Any] = {"topic_id": "id-t", "starts": {0: start}, "ttl_ms": 1000}
    apply(state, remote_changes.pin_snapshot(state, pin_id=pin_id, **{**values, **changes}))


def test_the_lowest_pin_of_a_partition_holds_until_the_last_is_gone() -> None:
    state = tiered(partitions=2)
    pin(state, "a", 7)
    pin(state, "b", 5)
    pin(state, "b", 6)  # Renewed.
    assert (state.pinned_offset("id-t", 0), state.pinned_offset("id-t", 1)) == (6, None)
    check_snapshot(state)
    apply(state, remote_changes.unpin_snapshots(state, {"b", "never"}))
    assert state.pinned_offset("id-t", 0) == 7
    apply(state, topic_changes.delete_topic(state, "t", now_ms=1))
    assert not state.pins


def test_a_pin_that_keeps_nothing_is_refused() -> None:
    state = tiered()
    create(state, "plain", stored=False)
    for changes in ({"starts": {}}, {"starts": {1: 0}}, {"starts": {0: -1}}, {"topic_id": "id-plain"}):
        with pytest.raises(InvalidRequestError):
            pin(state, "a", **changes)
    with pytest.raises(UnknownTopicError):
        pin(state, "a", topic_id="never")


def test_a_pin_is_what_was_asked_for_and_only_those_that_are_named_end() -> None:
    state = tiered(partitions=2)
    create(state, "u")
    assert remote_changes.pin_snapshot(
        state, pin_id="a", topic_id="id-t", starts={0: 0, 1: 9}, ttl_ms=5
    ) == [SnapshotPinned("a", "id-t", {0: 0, 1: 9}, 5)]
    for starts in ({0: 1, 2: 0}, {0: -1, 1: 0}, {-1: 0}):
        with pytest.raises(InvalidRequestError, match="pin of 't' names offsets"):
            pin(state, "a", starts=starts)
    pin(state, "a")
    pin(state, "b", topic_id="id-u")
    pin(state, "c")
    assert remote_changes.unpin_snapshots(state, ["b", "never", "a"]) == [
        SnapshotUnpinned("a", "id-t"), SnapshotUnpinned("b", "id-u"),
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
        pin(state, "0", topic_id="id-u")


# --- the end -------------------------------------------------------------------------------------


def test_a_deleted_topic_leaves_garbage_until_a_broker_has_removed_it() -> None:
    state = tiered()
    create(state, "plain", stored=False)
    move(state, pointer())
    apply(state, topic_changes.delete_topic(state, "plain", now_ms=5))
    assert not state.garbage
    apply(state, topic_changes.delete_topic(state, "t", now_ms=5))
    left = state.garbage["id-t"]
    assert (left.name, left.deleted_ms, left.prefixes) == ("t", 5, ("cluster/id-t/",))
    check_snapshot(state)
    apply(state, remote_changes.remove_garbage(state, "id-t"))
    assert not state.garbage and remote_changes.remove_garbage(state, "id-t") == []


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
    apply(state, [RemoteDoubted("id-t", number) for number in doubted])
    topic = state.topics["id-t"]
    found = remote_changes.may_have_objects(topic)
    assert found is may
    garbage = [RemoteGarbage("id-t", "t", 7, ("cluster/id-t/",))]
    assert remote_changes.give_up_remote(state, topic, 7) == (garbage if may else [])


def test_a_restored_topic_gives_up_the_objects_that_it_came_with_too() -> None:
    state = tiered("other")
    manifests = ["z/old/1/manifest/3", "cluster/id-other/0/manifest/3", "cluster/id-t/2/manifest/3"]
    restored = [pointer(3, manifest=one) for one in manifests]
    create(state, partitions=5, restored=[None, *restored])
    assert remote_changes.give_up_remote(state, state.topics["id-t"], 9) == [
        RemoteGarbage("id-t", "t", 9, ("cluster/id-t/", "cluster/id-other/0/", "z/old/1/"))
    ]


def test_a_topic_leaves_the_object_store_only_when_that_is_asked_for_by_name() -> None:
    state = tiered()
    move(state, pointer())
    with pytest.raises(ConfigError, match="delete_remote=True"):
        topic_changes.alter_topic_config(state, "t", {"remote.storage": False})
    apply(state, topic_changes.alter_topic_config(state, "t", {"remote_storage": "read"}))
    move(state, pointer(2, start=5))  # Retention goes on.
    apply(state, topic_changes.end_remote_storage(state, "t", now_ms=5))
    assert partition(state).remote is None and "id-t" in state.garbage
    assert topic_changes.end_remote_storage(state, "t", now_ms=6) == []
    check_snapshot(state)
    with pytest.raises(StalePartitionError, match="any more"):
        move(state, pointer(3, 20))
    back = {"remote_storage": True}
    with pytest.raises(ConfigError, match="still being removed"):
        topic_changes.alter_topic_config(state, "t", back, store=WORKS)
    apply(state, remote_changes.remove_garbage(state, "id-t"))
    apply(state, topic_changes.alter_topic_config(state, "t", back, store=WORKS))


# --- restored topics -----------------------------------------------------------------------------


def test_a_restored_topic_has_its_pointers_pinned_and_leads_in_later_epochs() -> None:
    state = tiered()
    old = pointer(4, 90, start=30, leader_epoch=1007, end_epoch=7,
                  manifest="other/topic/0/manifest/4")
    create(state, "back", partitions=2, restored=[old])
    apply(state, broker_changes.register_replicas(
        state, 0, [report(0, topic="back")], EVERYONE))
    found = broker_changes.found_partition(state, state.topics["id-back"], 0, EVERYONE)
    apply(state, found)
    back = partition(state, "back")
    assert back.remote == old and back.value.leader_epoch == 1008
    assert state.topics["id-back"].partitions[1].remote is None
    assert state.pinned_offset("id-back", 0) == 30
    check_snapshot(state)
    apply(state, topic_changes.delete_topic(state, "back", now_ms=1))
    assert state.garbage["id-back"].prefixes == ("cluster/id-back/", "other/topic/0/")


def test_what_is_deleted_by_mistake_is_garbage_no_more_once_it_is_restored() -> None:
    state = tiered()
    move(state, pointer())
    with pytest.raises(InvalidRequestError, match="those of t-0"):
        create(state, "copy", restored=[pointer(2)])
    apply(state, topic_changes.delete_topic(state, "t", now_ms=1))
    create(state, "t2", restored=[pointer(2)])
    assert not state.garbage
    assert partition(state, "t2").remote == pointer(2)


def test_only_the_garbage_that_a_restored_topic_needs_is_kept() -> None:
    state = tiered()
    for name in ("t2", "u"):
        create(state, name)
    move(state, pointer())
    for name in ("t", "t2", "u"):
        apply(state, topic_changes.delete_topic(state, name, now_ms=1))
    back = [None, pointer(5, 10, start=4, manifest="cluster/id-u/0/manifest/5"),
            pointer(3, 8, start=2, manifest="cluster/id-t/3/manifest/3")]
    assert remote_changes.restore(state, "id-back", back) == [
        RemoteGarbageRemoved("id-t"),
        RemoteGarbageRemoved("id-u"),
        RemoteMoved("id-back", 1, back[1]),
        RemoteMoved("id-back", 2, back[2]),
        SnapshotPinned("restore-id-back", "id-back", {1: 4, 2: 2}, RESTORED_PIN_MS),
    ]
    assert remote_changes.restore(state, "id-back", [None]) == []
    assert remote_changes.restore(state, "id-back", []) == []
    assert remote_changes.remove_garbage(state, "id-t") == [RemoteGarbageRemoved("id-t")]


def elsewhere(number: int, version: int = 1, **changes: Any) -> RemotePointer:
    return pointer(version, manifest=f"c/other/{number}/manifest/{version}", **changes)


@pytest.mark.parametrize(
    ("stored", "restored", "why"),
    [
        (True, [elsewhere(0), elsewhere(1)], None),
        ("read", [elsewhere(0)], None),
        (True, [None, elsewhere(0)], None),
        (True, [pointer(manifest="cluster/id-t/1/manifest/1")], None),
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
        (True, [pointer(manifest="a/b")], "no name of a manifest"),
        (True, [None, pointer(9)], "Partition 1 cannot .* its objects are those of t-0, which"),
        (True, [elsewhere(4), elsewhere(4, 2)], "Partition 1 cannot .* those of partition 0,"),
    ],
)
def test_two_partitions_never_share_objects_and_what_is_restored_can_be_true(
    stored: Any, restored: list[RemotePointer | None], why: str | None
) -> None:
    state = tiered(partitions=2)
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


# --- configs -------------------------------------------------------------------------------------


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
    topic = None if before is None else state.topics["id-t"]
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
    apply(state, topic_changes.create_topic(
        state, topic_id="id-t", name="t", partitions=1, replication_factor=3,
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

"""How remote pointers move: what is taken, what is refused and why, and what is in doubt."""

from __future__ import annotations

import msgspec
import pytest

from rayq.core.cluster import remote_changes, topic_changes
from rayq.core.cluster.records import (
    EpochStarted,
    Member,
    PartitionChanged,
    RemoteDoubted,
    RemoteMoved,
    ReplicaRegistered,
    TopicConfigChanged,
)
from rayq.errors import (
    FencedEpochError,
    InvalidRequestError,
    StalePartitionError,
    UnknownTopicError,
)
from rayq.messages.remote_pointer import RemotePointer
from tests.pure.test_cluster_state import apply
from tests.pure.test_remote_changes import (
    CLUSTER,
    WORKS,
    create,
    id_of,
    move,
    partition,
    pointer,
    run_replicas,
    tiered,
)


@pytest.mark.parametrize(
    "asked",
    [
        pointer(2, 10, start=2),
        pointer(2, 10, start=10),
        pointer(2, 11, start=2),
        pointer(2, 10, start=3),
        pointer(2, 11, start=3, end_epoch=0, data_bytes=0),
    ],
)
def test_a_pointer_that_does_not_go_back_is_taken_as_it_is(asked: RemotePointer) -> None:
    state = tiered(partitions=2)
    move(state, pointer(1, 10, start=2))
    assert move(state, asked) == [RemoteMoved(id_of("t"), 0, asked)]
    assert partition(state).remote == asked
    assert state.topics[id_of("t")].partitions[1].remote is None


@pytest.mark.parametrize(
    ("wrong", "error", "why"),
    [
        (pointer(0), StalePartitionError, "Version 0 .* of t-0 .* which is 0"),
        (pointer(2), StalePartitionError, "Version 2 .* of t-0 .* which is 0"),
        (pointer(1, start=-1), InvalidRequestError, "of t-0 is refused: .* is of no range"),
        (pointer(1, start=11), InvalidRequestError, "is of no range"),
        (pointer(1, data_bytes=-1), InvalidRequestError, "is of no range"),
        (pointer(1, 0, end_epoch=1), InvalidRequestError, "record before 0 is 1"),
        (pointer(1, 5, end_epoch=None), InvalidRequestError, "record before 5 is None"),
        (pointer(1, manifest="a/b"), InvalidRequestError, "'a/b' is not the name of a manifest"),
        (pointer(1, leader_epoch=0), InvalidRequestError, "it is of leader epoch 0, not 1"),
        (pointer(1, leader_epoch=2), InvalidRequestError, "it is of leader epoch 2, not 1"),
        (pointer(1, end_epoch=2), InvalidRequestError, "record is of leader epoch 2, above 1"),
    ],
)
@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_first_pointer_is_checked_like_every_other(
    wrong: RemotePointer, error: type[Exception], why: str, is_adopted: bool
) -> None:
    state = tiered()
    with pytest.raises(error, match=why):
        move(state, wrong, is_adopted=is_adopted)
    empty = pointer(1, 0, data_bytes=0)
    assert move(state, empty, is_adopted=is_adopted) == [RemoteMoved(id_of("t"), 0, empty)]


def test_a_move_that_is_refused_says_whose_it_is_and_what_counts() -> None:
    state = tiered()
    create(state, "plain", stored=False)
    now = partition(state).value
    with pytest.raises(UnknownTopicError, match="partition 1 of a topic with id 0+74"):
        move(state, pointer(), partition=1)
    with pytest.raises(UnknownTopicError, match="partition 0 of a topic with id never"):
        move(state, pointer(), topic_id="never")
    for changes in ({"broker": 9}, {"incarnation": "old"}, {"leader_epoch": 2}):
        asked = {"broker": now.leader, "leader_epoch": 1, **changes}
        with pytest.raises(FencedEpochError, match=(
            f"Broker {asked['broker']} does not lead t-0 in epoch {asked['leader_epoch']} .* "
            f"the leader is {now.leader} in epoch 1"
        )):
            move(state, pointer(), **changes)
    move(state, pointer(1, 10, start=2))
    for back in (pointer(2, 9, start=2), pointer(2, 12, start=1)):
        with pytest.raises(InvalidRequestError, match=(
            rf"of t-0 is refused: {back.start}\.\.{back.end} goes back from 2\.\.10"
        )):
            move(state, back)
    run_replicas(state, 0, 1, 2, topic="plain")
    led = partition(state, "plain").value
    with pytest.raises(StalePartitionError, match="^plain keeps nothing in the object store"):
        move(state, pointer(), topic_id=id_of("plain"), broker=led.leader,
             incarnation=led.leader_incarnation)


def test_an_adopted_manifest_may_begin_and_end_anywhere_also_where_nothing_is_in_doubt() -> None:
    state = tiered()
    move(state, pointer(1, 10, start=5))
    for adopted in (pointer(2, 8, start=2), pointer(3, 9, start=4), pointer(4, 3, start=1)):
        assert move(state, adopted, is_adopted=True) == [RemoteMoved(id_of("t"), 0, adopted)]
    apply(state, remote_changes.doubt_everything(state))
    for again in (False, True):  # What is committed already may be the wrong one now.
        with pytest.raises(StalePartitionError):
            move(state, adopted, is_adopted=again)
    with pytest.raises(StalePartitionError, match="of t-0 came back from an older copy"):
        move(state, pointer(5, 20, start=1))
    move(state, pointer(5, 3, start=1), is_adopted=True)
    move(state, pointer(6, 4, start=1))


@pytest.mark.parametrize(
    ("mark", "doubted"),
    [("", ["t", "t", "r"]), ("mark", ["t", "t", "r", "plain"])],
)
def test_in_doubt_is_what_may_have_objects_that_nobody_knows_of(
    mark: str, doubted: list[str]
) -> None:
    """Without a mark the cluster has no object store; compacted topics never go there."""
    state = tiered(partitions=2)
    create(state, "r", stored="read")
    create(state, "plain", stored=False)
    apply(state, topic_changes.new_topic(
        state, topic_id=id_of("keys"), name="keys", partitions=1, replication_factor=3,
        options={"cleanup_policy": "compact"}))
    apply(state, [EpochStarted(2, "h", 1, CLUSTER, mark)])
    found = remote_changes.doubt_everything(state)
    assert found == [
        RemoteDoubted(id_of(name), doubted[:number].count(name))
        for number, name in enumerate(doubted)
    ]


def test_only_leaders_in_doubt_begin_again_when_remote_storage_is_turned_on() -> None:
    state = tiered(stored=False, partitions=3)
    led = msgspec.structs.replace(
        partition(state).value, replicas=(1,), isr=(Member(1, "d1", "r"),), leader=1,
        leader_incarnation="r", leader_epoch=4, partition_epoch=6)
    apply(state, [PartitionChanged(id_of("t"), number, led) for number in (1, 2)])
    apply(state, [PartitionChanged(id_of("t"), 0, msgspec.structs.replace(
        led, leader=None, leader_incarnation=None))])
    state.topics[id_of("t")].partitions[1].processes[1] = ReplicaRegistered(
        id_of("t"), 1, 1, "d1", "r", "h", 1, last_epoch=8, flushed=0)
    apply(state, [RemoteDoubted(id_of("t"), number) for number in (0, 1)])
    other, on = {"segment_ms": 5}, {"remote_storage": True}
    assert topic_changes.alter_topic_config(state, "t", other) == [
        TopicConfigChanged(id_of("t"), {"remote_storage": False, **other})
    ]
    begun = topic_changes.alter_topic_config(state, "t", on, store=WORKS)
    assert begun == [
        TopicConfigChanged(id_of("t"), on),
        # Above every epoch of which a replica holds batches.
        PartitionChanged(
            id_of("t"), 1, msgspec.structs.replace(led, leader_epoch=9, partition_epoch=7)),
    ]
    state.replay(begun[0])
    assert topic_changes.alter_topic_config(state, "t", other, store=WORKS) == [
        TopicConfigChanged(id_of("t"), {**on, **other})
    ]

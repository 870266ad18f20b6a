"""The controller's decisions about the object store: pointers, pins, garbage, and who may use it.

Each function reads the state and returns a decision, or its records; it changes nothing. Without
records there is nothing to do, so every request may be repeated. Errors are those of `rayq.errors`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

import msgspec

from rayq import messages
from rayq.config import DAY_MS, TopicConfig
from rayq.core.access.unknown import unknown_topic
from rayq.core.cluster import election
from rayq.core.cluster.facts import ClusterDecision, Facts, ObjectStoreFacts, changed
from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    RemoteDoubted,
    RemoteGarbage,
    RemoteGarbageRemoved,
    RemoteMoved,
    SnapshotPinned,
    SnapshotUnpinned,
)
from rayq.core.cluster.state import ClusterState, Topic, find_led_partition
from rayq.errors import (
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    QuotaLimitError,
    RemoteStorageError,
    StalePartitionError,
    sentence,
)
from rayq.messages.remote_names import RemoteName, parse_folder, partition_prefix, topic_prefix
from rayq.messages.remote_pointer import (
    RESTORED_EPOCH_MAX,
    RESTORED_OFFSET_MAX,
    RemotePointer,
    what_is_wrong,
)

PINS_MAX = 1000
PINNED_PARTITIONS_MAX = 100_000
"""Maximum number of partitions that all pins name together, each pin counted separately."""
SHARE_OF_PRINCIPAL = 4
"""A named principal has at most one part in so many of all pins, and of the partitions that they
name: it does not take those of others."""
FOLDERS_MAX = 100_000
"""Maximum number of object store folders in the metadata: one for each topic that is or was stored
there, until all of it is removed, and one for each restored partition."""
RESTORED_PIN_MS = DAY_MS
"""Time for which retention removes nothing of a restored topic: most of it may be older than its
retention allows, and somebody has just asked for it."""


def move_remote(
    state: ClusterState, request: messages.MoveRemote, _: Facts
) -> ClusterDecision:
    """Decides on a leader's new remote pointer, by compare-and-swap on its version. The partition
    epoch stays: proposals of the ISR continue independently. `is_adopted` says that the leader
    adopts another manifest in place of the committed one, which may be lost or too old: only then
    may the range go back.

    Raises UnknownTopicError, FencedEpochError (not the leader of this epoch), StalePartitionError
    (the version moved on, or the topic gave its remote objects up), InvalidRequestError.
    """
    topic, known = find_led_partition(state, request)
    pointer, leader_epoch = request.pointer, request.leader_epoch
    where = f"{topic.name}-{request.partition}"
    if known.remote == pointer and not known.is_remote_doubted:
        return changed(())  # It was committed, and the answer was lost.
    if not topic.config.remote_storage:
        raise StalePartitionError(f"{topic.name} keeps nothing in the object store any more.")
    if known.is_remote_doubted and not request.is_adopted:
        raise StalePartitionError(
            f"The metadata of {where} came back from an older copy: its leader has to adopt the "
            "newest manifest first."
        )
    committed = 0 if known.remote is None else known.remote.version
    if pointer.version != committed + 1:
        raise StalePartitionError(
            f"Version {pointer.version} of the remote pointer of {where} does not follow the "
            f"committed version, which is {committed}."
        )
    problem = what_is_wrong(pointer)
    if problem is None and pointer.leader_epoch != leader_epoch:
        problem = f"it is of leader epoch {pointer.leader_epoch}, not {leader_epoch}"
    if problem is None and (pointer.end_epoch or 0) > leader_epoch:
        # Its leader could not append after a record of a later one.
        problem = f"its last record is of leader epoch {pointer.end_epoch}, above {leader_epoch}"
    if problem is None:
        problem = _is_elsewhere(state, known.remote, request)
    before = None if request.is_adopted else known.remote
    if (
        problem is None
        and before is not None
        and (pointer.start < before.start or pointer.end < before.end)
    ):
        problem = f"{pointer.start}..{pointer.end} goes back from {before.start}..{before.end}"
    if problem is not None:
        raise InvalidRequestError(f"The remote pointer of {where} is refused: {problem}.")
    return changed([RemoteMoved(request.topic_id, request.partition, pointer)])


def _is_elsewhere(
    state: ClusterState,
    committed: RemotePointer | None,
    request: messages.MoveRemote,
) -> str | None:
    """Returns the problem if a leader's new manifest is not its own, or not in the partition's
    folder: that of the committed manifest, for a restored topic continues in the folder of the old
    one."""
    assert state.cluster_id is not None, "with a controller it is known"
    folder = partition_prefix(state.cluster_id, request.topic_id, request.partition)
    if committed is not None and committed.name is not None:
        folder = committed.name.prefix
    pointer = request.pointer
    name = pointer.name
    assert name is not None, pointer
    if name.prefix != folder:
        return f"its manifest is in {name.prefix}, and the partition's objects are in {folder}"
    if name.leader_epoch != pointer.leader_epoch:
        return f"its manifest is of leader epoch {name.leader_epoch}"
    return None


def doubt_everything(state: ClusterState) -> list[MetadataRecord]:
    """Marks all remote pointers as doubted. Metadata that came back from an older copy may lack the
    newest ones, and, if the cluster has an object store, also the fact that a topic has any."""
    return [
        RemoteDoubted(topic.topic_id, number)
        for topic, number, _ in state.all_partitions()
        if topic.config.remote_storage or (state.marks and not topic.was_compacted)
    ]


def begin_in_doubt(state: ClusterState, topic: Topic) -> list[MetadataRecord]:
    """Returns the records that follow when remote_storage is turned on. In case an older copy of
    the metadata did not know that it was on already, leaders start over, and check the contents of
    the object store."""
    records: list[MetadataRecord] = []
    for number, partition in topic.partitions.items():
        value = partition.value
        if partition.is_remote_doubted and value.leader is not None:
            epoch = election.next_epoch(value, state.live_processes(partition))
            begun = msgspec.structs.replace(
                value, leader_epoch=epoch, partition_epoch=value.partition_epoch + 1
            )
            records.append(PartitionChanged(topic.topic_id, number, begun))
    return records


# --- pins ----------------------------------------------------------------------------------------


def pin_snapshot(
    state: ClusterState, request: messages.PinSnapshot, _: Facts
) -> ClusterDecision:
    """Keeps records from retention, or renews that. Raises UnknownTopicError, OverloadedError if
    there are too many pins, InvalidRequestError if the pin makes no sense. `own_pin` checks those
    of a named principal."""
    pin_id, topic_id, starts = request.pin_id, request.topic_id, request.starts
    topic = state.topics.get(topic_id)
    if topic is None:
        raise unknown_topic(topic_id)
    if not topic.config.remote_storage:
        raise InvalidRequestError(
            f"Topic {topic.name!r} has no remote_storage, and pins keep nothing of it."
        )
    wrong = [
        number for number, start in starts.items() if number not in topic.partitions or start < 0
    ]
    if wrong or not starts:
        raise InvalidRequestError(
            f"A pin of {topic.name!r} names offsets of its partitions, from 0 on; this one does "
            f"not: {dict(starts)}."
        )
    known = state.pins.get(pin_id)
    if known is None and len(state.pins) >= PINS_MAX:
        raise OverloadedError(
            f"There are {PINS_MAX} pins already. Wait until jobs have ended, or unpin what is left "
            "over."
        )
    if known is not None and known.topic_id != topic_id:
        raise InvalidRequestError(f"Pin {pin_id} belongs to another topic.")
    pinned = sum(len(pin.starts) for other, pin in state.pins.items() if other != pin_id)
    if pinned + len(starts) > PINNED_PARTITIONS_MAX:
        raise InvalidRequestError(
            f"With this one all pins would name more than {PINNED_PARTITIONS_MAX} partitions "
            "together, the most there may be. Wait until jobs have ended, or unpin what is left "
            "over."
        )
    owner = None if known is None else known.owner
    return changed([SnapshotPinned(pin_id, topic_id, starts, request.ttl_ms, owner)])


def own_pin(state: ClusterState, principal: str, pin: SnapshotPinned) -> SnapshotPinned:
    """The pin as that of the named principal that asks for it; a renewed one stays its owner's.
    Raises QuotaLimitError where the owner would have more than its part."""
    known = state.pins.get(pin.pin_id)
    owner = principal if known is None else known.owner
    if owner is None:
        return pin
    others = [
        other
        for other in state.pins.values()
        if other.owner == owner and other.pin_id != pin.pin_id
    ]
    partitions = len(pin.starts) + sum(len(other.starts) for other in others)
    pins_max = PINS_MAX // SHARE_OF_PRINCIPAL
    partitions_max = PINNED_PARTITIONS_MAX // SHARE_OF_PRINCIPAL
    if len(others) >= pins_max or partitions > partitions_max:
        raise QuotaLimitError(
            f"A principal has up to {pins_max} pins, of {partitions_max} partitions together, and "
            f"{owner!r} would have more. Wait until its jobs have ended, or unpin what is left "
            "over."
        )
    return msgspec.structs.replace(pin, owner=owner)


def unpin_snapshot(
    state: ClusterState, request: messages.UnpinSnapshot, _: Facts
) -> ClusterDecision:
    """Ends a pin. One that is not there has ended."""
    return changed(unpin_snapshots(state, {request.pin_id}))


def unpin_snapshots(state: ClusterState, pin_ids: Collection[str]) -> list[MetadataRecord]:
    """Ends pins. One that is not there has ended."""
    return [
        SnapshotUnpinned(pin_id, pin.topic_id)
        for pin_id, pin in state.pins.items()
        if pin_id in pin_ids
    ]


# --- the end of what a topic has there -----------------------------------------------------------


def may_have_objects(topic: Topic) -> bool:
    """Returns whether objects of the topic may be in the object store, as far as the metadata can
    know."""
    is_doubted = any(partition.is_remote_doubted for partition in topic.partitions.values())
    return bool(topic.config.remote_storage) or is_doubted


def give_up_remote(state: ClusterState, topic: Topic, now_ms: int) -> list[MetadataRecord]:
    """Returns the garbage of a topic that is deleted, or no longer stored remotely. There may be
    objects without a pointer: uploads in progress."""
    if not may_have_objects(topic):
        return []
    assert state.cluster_id is not None, "with a controller it is known"
    own = topic_prefix(state.cluster_id, topic.topic_id)
    restored = sorted(_restored_folders(topic, own))
    return [RemoteGarbage(topic.topic_id, topic.name, now_ms, (own, *restored))]


def begin_removal(
    state: ClusterState, request: messages.BeginRemoval, _: Facts
) -> ClusterDecision:
    """Confirms to a broker that it may delete the listed objects of this garbage. Once that is
    committed nobody can restore them any more; an earlier restore is respected.

    Raises InvalidRequestError if they are not garbage, or a pointer or a pin refers to them.
    """
    topic_id = request.topic_id
    garbage = state.garbage.get(topic_id)
    if garbage is None or garbage.deleted_ms != request.deleted_ms:
        raise InvalidRequestError(
            f"What the topic {topic_id} had in the object store is not garbage (any more): it was "
            "restored, or is removed already."
        )
    prefixes = frozenset(garbage.prefixes)
    # Metadata of an earlier rayq may have such.
    strange = [prefix for prefix in prefixes if parse_folder(prefix) is None]
    for topic in state.topics.values():
        folder = _folder_in(prefixes, strange, state, topic)
        if folder is not None:
            raise InvalidRequestError(
                f"What {garbage.name!r} left in the object store stays: topic {topic.name!r} has "
                f"its objects in {folder}."
            )
    pins = [pin.pin_id for pin in state.pins.values() if pin.topic_id == topic_id]
    if pins:
        raise InvalidRequestError(
            f"What {garbage.name!r} left in the object store stays while it is pinned: {pins}. "
            "Pins end by themselves, or by `rayq storage unpin`."
        )
    if garbage.is_removing:
        return changed(())
    return changed([msgspec.structs.replace(garbage, is_removing=True)])


def remove_garbage(
    state: ClusterState, request: messages.RemoveGarbage, _: Facts
) -> ClusterDecision:
    """Forgets garbage that a broker has removed completely. Raises InvalidRequestError if nobody
    has begun to."""
    garbage = state.garbage.get(request.topic_id)
    if garbage is None or request.deleted_ms not in (None, garbage.deleted_ms):
        return changed(())  # It is of an earlier deletion, which is over.
    if not garbage.is_removing:
        raise InvalidRequestError(
            f"What {garbage.name!r} left in the object store is not being removed yet."
        )
    return changed([RemoteGarbageRemoved(request.topic_id)])


# --- topics whose records are in the object store already ----------------------------------------


def check_restored(
    state: ClusterState,
    config: TopicConfig,
    partitions: int,
    restored: Sequence[RemotePointer | None],
) -> None:
    """Raises InvalidRequestError if a topic with these pointers, by partition, must not exist."""
    if not any(restored):
        return
    if not config.remote_storage:
        raise InvalidRequestError("A topic that is restored has to have remote_storage=True.")
    if len(restored) > partitions:
        raise InvalidRequestError(
            f"{len(restored)} partitions are to be restored, and the topic gets {partitions}."
        )
    _check_folders(state, sum(pointer is not None for pointer in restored))
    removing = {
        prefix: garbage.name
        for garbage in state.garbage.values()
        if garbage.is_removing
        for prefix in garbage.prefixes
    }
    used = {
        partition.remote.name.prefix: f"'{topic.name}-{number}'"
        for topic, number, partition in state.all_partitions()
        if partition.remote is not None and partition.remote.name is not None
    }
    for number, pointer in enumerate(restored):
        if pointer is None:
            continue
        problem = _is_not_to_restore(state, pointer, used, removing)
        if problem is not None:
            raise InvalidRequestError(f"Partition {number} cannot be restored: {problem}.")
        assert pointer.name is not None, pointer
        used[pointer.name.prefix] = f"partition {number}"


def _is_not_to_restore(
    state: ClusterState,
    pointer: RemotePointer,
    used: Mapping[str, str],
    removing: Mapping[str, str],
) -> str | None:
    """The reason that a topic must not be created with this pointer. `used` names the owner of each
    folder, and `removing` the former owner of the folders that are being removed."""
    problem = what_is_wrong(pointer)
    name = pointer.name
    if problem is not None or name is None:
        return problem
    if max(pointer.leader_epoch, pointer.end_epoch or 0) > RESTORED_EPOCH_MAX:
        return f"leader epochs of a restored topic begin at {RESTORED_EPOCH_MAX} at most"
    if max(pointer.end, pointer.version, pointer.data_bytes) > RESTORED_OFFSET_MAX:
        return f"{pointer} leaves a restored topic no room for new records"
    user = used.get(name.prefix)
    if user is None and name.cluster_id == state.cluster_id and name.topic_id in state.topics:
        # It may have objects that no pointer tells of yet, or store there later.
        user = repr(state.topics[name.topic_id].name)
    if user is not None:
        return (
            f"its objects are those of {user}, which would delete them: restore a copy of them"
        )
    deleted = next(
        (removing[folder] for folder in _folders_around(name) if folder in removing), None
    )
    if deleted is not None:
        return (
            f"its objects are being removed, since {deleted!r} was deleted longer ago than "
            "remote_delete_delay_ms"
        )
    return None


def restore(
    state: ClusterState, topic_id: str, restored: Sequence[RemotePointer | None]
) -> list[MetadataRecord]:
    """Returns the records that follow the creation of a topic whose records are already in the
    object store. They are pinned for a day, and no longer garbage."""
    pointers = {number: pointer for number, pointer in enumerate(restored) if pointer is not None}
    if not pointers:
        return []
    names = [pointer.name for pointer in pointers.values() if pointer.name is not None]
    folders = {folder for name in names for folder in _folders_around(name)}
    records: list[MetadataRecord] = [
        RemoteGarbageRemoved(garbage.topic_id)
        for garbage in state.garbage.values()
        if not folders.isdisjoint(garbage.prefixes)
    ]
    records.extend(RemoteMoved(topic_id, number, pointer) for number, pointer in pointers.items())
    starts = {number: pointer.start for number, pointer in pointers.items()}
    records.append(SnapshotPinned(f"restore-{topic_id}", topic_id, starts, RESTORED_PIN_MS))
    return records


# --- configs -------------------------------------------------------------------------------------


def check_remote_config(
    state: ClusterState, config: TopicConfig, before: Topic | None, store: ObjectStoreFacts
) -> None:
    """Raises unless the new config of a topic (`before` is None for a new one) fits the cluster's
    object store: ConfigError if it never will, RemoteStorageError if it may later."""
    stored_before = False if before is None else before.config.remote_storage
    if not config.remote_storage or config.remote_storage == stored_before:
        return
    if stored_before and config.remote_storage == "read":
        return  # Nothing more goes there: that may be why.
    if store.url is None:
        raise ConfigError(
            "remote_storage needs an object store: start the cluster with remote_storage_url=..."
        )
    if before is not None and before.was_compacted:
        raise ConfigError(
            f"remote_storage is not for {before.name!r}, which was compacted: offsets are missing "
            "between its records. Write what is left of it to a new topic."
        )
    if before is not None and before.topic_id in state.garbage:
        raise ConfigError(
            f"What {before.name!r} had in the object store is still being removed: that takes "
            "remote_delete_delay_ms and a day. See `rayq storage status`, and try again then."
        )
    _check_folders(state, 1)
    for broker in sorted(broker for broker in state.brokers if state.is_live(broker)):
        trouble = store.troubles.get(broker, "it was not heard of yet")
        if trouble is not None:
            raise RemoteStorageError(
                f"Broker {broker} cannot use the object store: {sentence(trouble)} remote_storage "
                "waits until every live broker has written and read a probe there."
            )


# --- marks of the clusters that use the store -----------------------------------------------------


def unknown_marks(state: ClusterState, marks: Collection[tuple[int, str]]) -> list[int]:
    """The controller epochs of marks, as `(epoch, mark)`, that another cluster has left under this
    cluster's id. Marks that are older than all remembered ones count as this cluster's own."""
    oldest = next(iter(state.marks), None)
    if oldest is None:
        return []
    return sorted(
        epoch for epoch, mark in marks if epoch >= oldest and state.marks.get(epoch) != mark
    )


# --- folders --------------------------------------------------------------------------------------
# There are as many as partitions: every query must cost no more than linear time.


def _restored_folders(topic: Topic, own: str) -> set[str]:
    """The folders of partitions, outside of the topic's `own`, where its pointers are."""
    pointers = [
        partition.remote for partition in topic.partitions.values() if partition.remote is not None
    ]
    names = [name.name for name in pointers if not name.manifest.startswith(own)]
    return {name.prefix for name in names if name is not None}


def _folders_around(name: RemoteName) -> tuple[str, str]:
    """The folder of the object's partition, and that of its topic."""
    return name.prefix, topic_prefix(name.cluster_id, name.topic_id)


def _folder_in(
    prefixes: Set[str], strange: Sequence[str], state: ClusterState, topic: Topic
) -> str | None:
    """A folder with objects of the topic that is one of `prefixes`, or in one of them; `strange`
    are those of them that are not folders. None: there is none."""
    assert state.cluster_id is not None, "with a controller it is known"
    own = topic_prefix(state.cluster_id, topic.topic_id)
    for number, partition in topic.partitions.items():
        pointer = partition.remote
        if pointer is None:
            continue
        if pointer.manifest.startswith(own):
            around = (partition_prefix(state.cluster_id, topic.topic_id, number), own)
        elif pointer.name is not None:
            around = _folders_around(pointer.name)
        else:
            continue
        if not prefixes.isdisjoint(around) or any(
            around[0].startswith(folder) or folder.startswith(around[0]) for folder in strange
        ):
            return around[0]
    return None


def _check_folders(state: ClusterState, added: int) -> None:
    """Raises OverloadedError if topics and the garbage of deleted ones have too many folders. A
    deleted topic leaves no more than it had, so it can always be deleted."""
    count = sum(len(garbage.prefixes) for garbage in state.garbage.values())
    for topic in state.topics.values():
        if may_have_objects(topic):
            assert state.cluster_id is not None, "with a controller it is known"
            own = topic_prefix(state.cluster_id, topic.topic_id)
            count += 1 + len(_restored_folders(topic, own))
    if count + added > FOLDERS_MAX:
        raise OverloadedError(
            f"Topics have {count} folders in the object store, with those that deleted topics have "
            f"left there, and {FOLDERS_MAX} is the most. Wait until what was deleted is removed "
            "(remote_delete_delay_ms and a day): see `rayq storage status`."
        )

"""The controller's decisions about topics: create, delete, grow, configure, elect.

Each function reads the state and returns a decision, or its records; it changes nothing. Errors are
those of `rayq.errors`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rayq import messages
from rayq.config import DAY_MS, MIB, TopicConfig, only_known, parse
from rayq.core.cluster import broker_changes, election, remote_changes
from rayq.core.cluster.facts import (
    NO_OBJECT_STORE,
    ClusterDecision,
    Facts,
    ObjectStoreFacts,
    changed,
)
from rayq.core.cluster.placement import check_replica_limits, place
from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    TopicConfigChanged,
    TopicCreated,
    TopicDeleted,
)
from rayq.core.cluster.state import ClusterState, Topic, find_topic
from rayq.errors import (
    ConfigError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    PartitionOfflineError,
    TopicExistsError,
    UnknownTopicError,
    counted,
)
from rayq.messages.remote_pointer import RemotePointer

TOPIC_NAME_LENGTH_MAX = 200
PARTITIONS_MAX = 10_000
DEFAULT_REPLICATION_FACTOR = 3
INTERNAL_PREFIX = "__"
"""Prefix of the names of rayq's own topics."""
OFFSETS_TOPIC = "__consumer_offsets"
"""Rayq's internal topic of committed offsets and groups. Clients neither read nor write it: its
contents let a reader act as any member."""
TRANSACTIONS_TOPIC = "__transaction_state"
"""Rayq's internal topic of the decisions of transaction coordinators, likewise."""
QUEUES_TOPIC = "__queue_state"
"""Rayq's internal topic of the state of queues, likewise."""
AUDIT_TOPIC = "__audit"
"""Rayq's internal topic of the audit: who changed the metadata, logged in, or was denied."""
OWN_TOPICS = (OFFSETS_TOPIC, TRANSACTIONS_TOPIC, QUEUES_TOPIC, AUDIT_TOPIC)
_INSTEAD = {
    OFFSETS_TOPIC: ("group", "group describe"),
    TRANSACTIONS_TOPIC: ("transaction", "transactions list"),
    QUEUES_TOPIC: ("queue", "queue describe"),
    AUDIT_TOPIC: ("audit", "audit"),
}
"""Alternatives for clients that want the contents of the topic: calls, and a command."""
OWN_TOPIC_OPTIONS = {
    "cleanup_policy": "compact",
    "segment_bytes": 16 * MIB,
    "max_message_bytes": 64 * MIB,
}
QUEUES_TOPIC_OPTIONS = {**OWN_TOPIC_OPTIONS, "delete_retention_ms": 600_000}
"""Config of the internal topic of queues. Each 256 settled records leave a tombstone: a day's would
be gigabytes. Only followers read them, and one that was away for longer copies the log from its
beginning."""
AUDIT_TOPIC_OPTIONS = {
    **OWN_TOPIC_OPTIONS,
    "cleanup_policy": "delete",
    "retention_ms": 30 * DAY_MS,
}
_OPTIONS_OF = {QUEUES_TOPIC: QUEUES_TOPIC_OPTIONS, AUDIT_TOPIC: AUDIT_TOPIC_OPTIONS}
OWN_TOPIC_FIXED = {
    "cleanup_policy",
    "flush",
    "max_message_bytes",
    "retention_ms",
    "remote_storage",
    "retention_bytes",
    "unclean_leader_election",
}
"""The keys of their config that cannot be changed."""
_AUDIT_TOPIC_FREE = {"retention_ms", "retention_bytes"}
"""Configs of the audit's topic that can be changed: each company decides how long it keeps the
audit."""
_LEGAL_NAME = re.compile(r"[A-Za-z0-9._-]+")


def check_topic_name(name: str, what: str = "topic") -> None:
    """Checks a name. Raises InvalidTopicError. Names become directory names; a leading "__" is
    reserved. `what` is the kind of thing that has the name, for messages."""
    if not name:
        raise InvalidTopicError(f"A {what} name cannot be empty.")
    if len(name) > TOPIC_NAME_LENGTH_MAX:
        raise InvalidTopicError(
            f"A {what} name has at most {TOPIC_NAME_LENGTH_MAX} characters, not {len(name)}."
        )
    if name in {".", ".."} or not _LEGAL_NAME.fullmatch(name):
        raise InvalidTopicError(
            f"{name!r} is not a legal {what} name: use letters, digits, '.', '_' and '-', "
            "and more than dots."
        )
    if name.startswith("__"):
        raise InvalidTopicError(
            f"{name!r} is reserved: names that start with two underscores are rayq's own."
        )


def create_topic(
    state: ClusterState, request: messages.CreateTopic | messages.RestoreTopic, facts: Facts
) -> ClusterDecision:
    """Creates a topic. Raises the errors of `new_topic`."""
    return changed(
        new_topic(
            state,
            topic_id=facts.new_id(),
            name=request.name,
            partitions=request.partitions,
            replication_factor=request.replication_factor,
            options=request.config,
            store=facts.store,
            restored=request.pointers if isinstance(request, messages.RestoreTopic) else (),
        )
    )


def new_topic(
    state: ClusterState,
    *,
    topic_id: str,
    name: str,
    partitions: int,
    replication_factor: int | None,
    options: Mapping[str, Any],
    restored: Sequence[RemotePointer | None] = (),
    store: ObjectStoreFacts = NO_OBJECT_STORE,
) -> list[MetadataRecord]:
    """Creates a topic and places its partitions. `restored` are, by partition, the pointers to
    records that are in the object store already. Raises InvalidTopicError, TopicExistsError,
    InvalidPartitionsError, InvalidReplicationFactorError, ConfigError, ReplicaLimitError,
    InvalidRequestError, RemoteStorageError."""
    check_topic_name(name)
    if name in state.topic_ids:
        raise TopicExistsError(f"Topic {name!r} exists already.")
    config = parse(TopicConfig, options)
    remote_changes.check_remote_config(state, config, None, store)
    remote_changes.check_restored(state, config, partitions, restored)
    return _create(
        state,
        topic_id,
        name,
        options,
        partitions=partitions,
        replication_factor=replication_factor,
        restored=restored,
    )


def ensure_offsets_topic(
    state: ClusterState, _: messages.EnsureOffsetsTopic, facts: Facts
) -> ClusterDecision:
    """Creates `__consumer_offsets`, unless it exists."""
    count = facts.config.offsets_topic_partitions
    return changed(
        ensure_own_topic(state, OFFSETS_TOPIC, topic_id=facts.new_id(), partitions=count)
    )


def ensure_transactions_topic(
    state: ClusterState, _: messages.EnsureTransactionsTopic, facts: Facts
) -> ClusterDecision:
    """Creates `__transaction_state`, unless it exists."""
    count = facts.config.transaction_state_partitions
    return changed(
        ensure_own_topic(state, TRANSACTIONS_TOPIC, topic_id=facts.new_id(), partitions=count)
    )


def ensure_own_topic(
    state: ClusterState, name: str, *, topic_id: str, partitions: int
) -> list[MetadataRecord]:
    """Creates one of `OWN_TOPICS`, unless it exists. Raises InvalidReplicationFactorError while too
    few brokers live, ReplicaLimitError."""
    if state.topic_named(name) is not None:
        return []
    return _create(
        state,
        topic_id,
        name,
        _OPTIONS_OF.get(name, OWN_TOPIC_OPTIONS),
        partitions=partitions,
        replication_factor=None,
    )


def check_not_internal(name: str) -> None:
    """Raises InvalidTopicError for a topic that is rayq's own."""
    if name in OWN_TOPICS:
        calls, command = _INSTEAD[name]
        raise InvalidTopicError(
            f"{name!r} is rayq's own: clients cannot read it, write to it, grow, reconfigure or "
            f"delete it. Use the {calls} calls of the admin instead, or `rayq {command}`."
        )


def _create(
    state: ClusterState,
    topic_id: str,
    name: str,
    options: Mapping[str, Any],
    *,
    partitions: int,
    replication_factor: int | None,
    restored: Sequence[RemotePointer | None] = (),
) -> list[MetadataRecord]:
    _check_partitions(partitions)
    nodes = state.takers()
    if replication_factor is None:
        # All brokers count, not only those that live now: a restart must not cost a replica.
        stay = sum(not broker.cordoned for broker in state.brokers.values())
        replication_factor = max(1, min(DEFAULT_REPLICATION_FACTOR, stay))
    if not 1 <= replication_factor <= len(nodes):
        raise InvalidReplicationFactorError(
            f"replication_factor {replication_factor} of topic {name!r} is not possible: it takes "
            f"1 up to the number of live brokers, now {len(nodes)} ({sorted(nodes)}) of "
            f"{len(state.brokers)}{_cordoned(state)}. Wait for the others, or say "
            "replication_factor=."
        )
    _check_min_insync(parse(TopicConfig, options), replication_factor)
    options = {key.replace(".", "_"): value for key, value in options.items()}
    placed = _place(state, nodes, partitions, replication_factor)
    epochs = {
        number: max(pointer.leader_epoch, pointer.end_epoch or 0)
        for number, pointer in enumerate(restored)
        if pointer is not None
    }
    return [
        TopicCreated(topic_id, name, options, replication_factor),
        *(
            PartitionChanged(
                topic_id, number, PartitionValue(replicas, restored_epoch=epochs.get(number, 0))
            )
            for number, replicas in enumerate(placed)
        ),
        *remote_changes.restore(state, topic_id, restored),
    ]


def delete_topic(
    state: ClusterState, request: messages.DeleteTopic, facts: Facts
) -> ClusterDecision:
    """Deletes a topic. Raises UnknownTopicError, InvalidTopicError."""
    check_not_internal(request.name)
    topic = find_topic(state, request.name)
    garbage = remote_changes.give_up_remote(state, topic, facts.now_ms())
    return changed([TopicDeleted(topic.topic_id), *garbage])


def create_partitions(
    state: ClusterState, request: messages.CreatePartitions, _: Facts
) -> ClusterDecision:
    """Adds partitions, up to `total`. Keys may then hash to other partitions. Raises
    UnknownTopicError, InvalidPartitionsError, ReplicaLimitError, InvalidReplicationFactorError,
    InvalidTopicError."""
    name, total = request.name, request.total
    check_not_internal(name)  # A group's partition depends on the number.
    topic = find_topic(state, name)
    _check_partitions(total)
    count = len(topic.partitions)
    if total <= count:
        raise InvalidPartitionsError(
            f"Topic {name!r} has {counted(count, 'partition')}; their number can only grow, "
            f"so {total} is not possible."
        )
    nodes = state.takers()
    if topic.replication_factor > len(nodes):
        raise InvalidReplicationFactorError(
            f"New partitions of {name!r} need {topic.replication_factor} live brokers; there are "
            f"{len(nodes)}{_cordoned(state)}."
        )
    placed = _place(state, nodes, total - count, topic.replication_factor)
    return changed(
        [
            PartitionChanged(topic.topic_id, count + number, PartitionValue(replicas))
            for number, replicas in enumerate(placed)
        ]
    )


def alter_topic_config(
    state: ClusterState,
    name: str,
    changes: Mapping[str, Any],
    *,
    store: ObjectStoreFacts = NO_OBJECT_STORE,
) -> list[MetadataRecord]:
    """Changes single keys of a topic's config. Raises UnknownTopicError, ConfigError,
    RemoteStorageError, InvalidTopicError for what rayq's own topics depend on."""
    free = _AUDIT_TOPIC_FREE if name == AUDIT_TOPIC else set[str]()
    if any(key.replace(".", "_") in OWN_TOPIC_FIXED - free for key in changes):
        check_not_internal(name)
    topic = find_topic(state, name)
    changes = {key.replace(".", "_"): value for key, value in changes.items()}
    factors = [  # For a partition that moves, the minimum of before and after.
        min(
            partition.value.replication_factor,
            len(partition.value.target or partition.value.replicas),
        )
        for partition in topic.partitions.values()
    ]
    config = parse(TopicConfig, {**only_known(TopicConfig, topic.options), **changes})
    _check_min_insync(config, min(factors))
    remote_changes.check_remote_config(state, config, topic, store)
    if topic.config.remote_storage and not config.remote_storage:
        raise ConfigError(
            f"remote_storage=False deletes what {name!r} has in the object store, also what is on "
            'no disk any more: say delete_remote=True, or remote_storage="read" to keep it.'
        )
    records: list[MetadataRecord] = [
        TopicConfigChanged(topic.topic_id, {**topic.options, **changes})
    ]
    if config.remote_storage and not topic.config.remote_storage:
        records.extend(remote_changes.begin_in_doubt(state, topic))
    return records


def end_remote_storage(
    state: ClusterState, request: messages.EndRemoteStorage, facts: Facts
) -> ClusterDecision:
    """Turns remote_storage off: records that are only in the object store are lost. Raises
    UnknownTopicError."""
    topic = find_topic(state, request.name)
    if not remote_changes.may_have_objects(topic):
        return changed(())
    off = TopicConfigChanged(topic.topic_id, {**topic.options, "remote_storage": False})
    return changed([off, *remote_changes.give_up_remote(state, topic, facts.now_ms())])


def elect_leaders(
    state: ClusterState, request: messages.ElectLeaders, _: Facts
) -> ClusterDecision:
    """Elects the preferred replica of each partition if that is in sync; with `unclean`, any live
    replica of the partitions that have no leader (acknowledged records may be lost). Raises
    UnknownTopicError, PartitionOfflineError if no replica is live."""
    name, wanted = request.name, request.partitions
    topic = find_topic(state, name)
    records: list[MetadataRecord] = []
    for number in sorted(topic.partitions if wanted is None else set(wanted)):
        partition = topic.partitions.get(number)
        if partition is None:
            raise UnknownTopicError(f"Topic {name!r} has no partition {number}.")
        live = state.live_processes(partition)
        if not request.unclean:
            elected = election.elect_preferred(partition.value, live)
        elif partition.value.leader is not None:
            elected = None
        elif live:
            elected = election.elect_unclean(partition.value, live)
        else:
            raise PartitionOfflineError(
                f"No replica of {name}-{number} is running: start one of the brokers "
                f"{list(partition.value.replicas)}."
            )
        if elected is not None:
            records.append(PartitionChanged(topic.topic_id, number, elected))
    return changed(records)


def settle_after_config_change(
    state: ClusterState, name: str, heard: Collection[int]
) -> list[MetadataRecord]:
    """Settles elections that a new `min_insync_replicas` or `unclean_leader_election` may
    decide."""
    return broker_changes.settle_topic(state, find_topic(state, name), heard)


def offline_reason(state: ClusterState, topic: Topic, partition: int) -> str | None:
    """The reason that a partition has no leader, and the brokers that it waits for; None if it has
    a leader."""
    known = topic.partitions[partition]
    if known.value.leader is not None:
        return None
    if known.value.leader_epoch == 0:
        return "its replicas are starting for the first time"
    live = state.live_processes(known)
    waited_for = [
        f"{member.broker}"
        if member.broker not in live
        else f"{member.broker} with its former directory {member.directory_id}"
        for member in election.missing(known.value, live)
    ]
    return (
        f"waits for broker {' or '.join(waited_for)}, which may hold acknowledged records that the "
        "others lack"
    )


def _check_partitions(partitions: int) -> None:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidPartitionsError(
            f"A topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}."
        )


def _check_min_insync(config: TopicConfig, replication_factor: int) -> None:
    if (config.min_insync_replicas or 1) > replication_factor:
        raise ConfigError(
            f"min_insync_replicas {config.min_insync_replicas} is above the replication factor "
            f"{replication_factor}: no write with acks='all' would ever succeed."
        )


def _cordoned(state: ClusterState) -> str:
    """Text about the brokers that do not count."""
    cordoned = [number for number, broker in state.brokers.items() if broker.cordoned]
    return f" (cordoned: {sorted(cordoned)})" if cordoned else ""


def _place(
    state: ClusterState, nodes: Mapping[int, str], partitions: int, replication_factor: int
) -> list[tuple[int, ...]]:
    existing = [partition.value.replicas for _, _, partition in state.all_partitions()]
    placed = place(
        nodes, existing, partitions=partitions, replication_factor=replication_factor
    )
    added = Counter(broker for replicas in placed for broker in replicas)
    what = f"{partitions} partitions x {replication_factor} replicas"
    check_replica_limits(state, added, what)
    return placed

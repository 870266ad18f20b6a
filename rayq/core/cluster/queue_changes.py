"""The controller's decisions about queues: create, alter, delete.

Each decision reads the state and changes nothing. A queue goes
with its topic. Errors are those of `rayq.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayq import messages
from rayq.config import (
    MESSAGE_BYTES_CEILING,
    QueueConfig,
    TopicConfig,
    only_known,
    parse,
    parse_stored,
)
from rayq.core.cluster import topic_changes
from rayq.core.cluster.facts import ClusterDecision, Facts, changed
from rayq.core.cluster.records import MetadataRecord, QueueChanged, QueueDeleted, TopicCreated
from rayq.core.cluster.state import ClusterState, Topic, find_queue, find_topic
from rayq.errors import (
    ConfigError,
    InvalidPartitionsError,
    QueueExistsError,
    QueueLimitError,
    TopicExistsError,
)

QUEUES_OF_A_TOPIC_MAX = 100
"""Maximum number of queues of a topic: the leader of each partition serves a part of each of its
queues."""
DEAD = ".dead"
"""Suffix of the name of a dead-letter queue, and of its topic."""
DEAD_QUEUE: dict[str, Any] = {
    "dead_letters": "stay",
    "max_deliveries": 1000,
    "retention": "delete_done",
}
"""Dead letters have no dead letters of their own: they stay until they are acknowledged, or
somebody redrives, discards or purges them, and then leave the disk."""
DEAD_HEADERS_BYTES = 64 * 1024
"""Maximum growth of a dead letter's batch over its source's: its headers say why it failed."""
FIXED = ("ordered_by_key", "start")
"""The keys of a queue's config that cannot be changed."""


def create_queue(
    state: ClusterState, request: messages.CreateQueue, facts: Facts
) -> ClusterDecision:
    """Creates a queue, its topic if `partitions` is given, the topic and queue of its dead letters,
    and the first time `__queue_state`. Raises QueueExistsError, QueueLimitError, UnknownTopicError,
    ConfigError, and the errors of `topic_changes.new_topic`."""
    name, topic, new_id = request.name, request.topic, facts.new_id
    topic_changes.check_topic_name(name, "queue")
    if name in state.queue_ids:
        raise QueueExistsError(f"Queue {name!r} exists already.")
    config = parse(QueueConfig, request.config)
    if topic == name + DEAD and config.dead_letters == "keep":
        raise ConfigError(
            f"Queue {name!r} would read its own dead letters in {topic!r}: give it another name, "
            'or say dead_letters="discard".'
        )
    records = topic_changes.ensure_own_topic(
        state,
        topic_changes.QUEUES_TOPIC,
        topic_id=new_id(),
        partitions=facts.config.queue_state_partitions,
    )
    if request.partitions is None:
        topic_changes.check_not_internal(topic)
        existing = find_topic(state, topic)
        topic_id, topic_config = existing.topic_id, existing.config
        count, factor = len(existing.partitions), existing.replication_factor
        _check_readers(state, existing, name, config)
    else:
        if topic in state.topic_ids:
            raise TopicExistsError(
                f"Topic {topic!r} exists already: say topic={topic!r}, and no partitions, for a "
                "queue that reads it."
            )
        created = topic_changes.new_topic(
            state,
            topic_id=new_id(),
            name=topic,
            partitions=request.partitions,
            replication_factor=request.replication_factor,
            options=request.topic_config,
            store=facts.store,
        )
        records += created
        made = created[0]
        assert isinstance(made, TopicCreated)
        topic_id, count, factor = made.topic_id, request.partitions, made.replication_factor
        topic_config = parse(TopicConfig, made.config)
    _check_retention(topic, topic_config, config)
    if config.dead_letters == "keep":
        records += _dead_letters(state, name, topic_config, factor, new_id)
    records.append(QueueChanged(new_id(), name, topic_id, _plain(request.config), count))
    return changed(records)


def alter_queue(
    state: ClusterState, request: messages.AlterQueue, facts: Facts
) -> ClusterDecision:
    """Changes single keys of a queue's config. Raises UnknownQueueError, ConfigError."""
    name, changes = request.name, _plain(request.config)
    queue = find_queue(state, name)
    config = parse(QueueConfig, {**only_known(QueueConfig, queue.options), **changes})
    for key in FIXED:
        if getattr(config, key) != getattr(queue.config, key):
            raise ConfigError(
                f"{key} of a queue cannot be changed: delete queue {name!r} and create it again, "
                "or another one beside it."
            )
    topic = state.topics[queue.topic_id]
    _check_readers(state, topic, name, config)
    _check_retention(topic.name, topic.config, config)
    records: list[MetadataRecord] = []
    if config.dead_letters == "keep":
        factor = topic.replication_factor
        records += _dead_letters(state, name, topic.config, factor, facts.new_id)
    options = {**queue.options, **changes}
    records.append(
        QueueChanged(queue.queue_id, name, queue.topic_id, options, queue.partitions)
    )
    return changed(records)


def delete_queue(
    state: ClusterState, request: messages.DeleteQueue, _: Facts
) -> ClusterDecision:
    """Forgets a queue; its topic and its dead letters stay. Raises UnknownQueueError."""
    queue = find_queue(state, request.name)
    _check_not_for_dead_letters(state, request.name, "the queue")
    return changed([QueueDeleted(queue.queue_id, queue.topic_id)])


def check_new_partitions(state: ClusterState, topic_name: str, *, force: bool) -> None:
    """Raises InvalidPartitionsError if new partitions would separate records of a key from earlier
    ones, for a queue that handles them in order."""
    topic = state.topic_named(topic_name)
    queues = () if topic is None or force else state.queues_of(topic.topic_id)
    for queue in queues:
        if queue.config.ordered_by_key:
            raise InvalidPartitionsError(
                f"Queue {queue.name!r} handles the records of {topic_name!r} in the order of their "
                "keys. With more partitions a key's new records may be handled before its older "
                "ones: drain the queue first, then say force=True."
            )


def check_topic_config(state: ClusterState, topic_name: str, changes: Mapping[str, Any]) -> None:
    """Raises ConfigError if compaction would remove records that a queue holds, or dead letters."""
    topic = state.topic_named(topic_name)
    if topic is None:
        return
    config = parse_stored(TopicConfig, {**topic.options, **_plain(changes)})
    if not config.is_compacted:
        return
    owner = _owner_of(state, topic_name)
    if owner is not None:
        raise ConfigError(
            f"{topic_name!r} takes the dead letters of queue {owner!r}, and compaction would keep "
            f'one of each key: alter {owner!r} to dead_letters="discard" first.'
        )
    for queue in state.queues_of(topic.topic_id):
        if queue.config.retention != "topic":
            raise ConfigError(
                f"Queue {queue.name!r} holds the records of {topic_name!r} "
                f"(retention={queue.config.retention!r}), and compaction would remove some that "
                'nobody has handled: alter the queue to retention="topic" first, or delete it.'
            )


def check_deleted_topic(state: ClusterState, topic_name: str) -> None:
    """Raises ConfigError if a queue would lose the topic of its dead letters."""
    _check_not_for_dead_letters(state, topic_name, "the topic")


def _check_not_for_dead_letters(state: ClusterState, name: str, what: str) -> None:
    owner = _owner_of(state, name)
    if owner is not None:
        raise ConfigError(
            f"{name!r} is {what} of the dead letters of queue {owner!r}: delete {owner!r} first, "
            'or alter it to dead_letters="discard".'
        )


def _owner_of(state: ClusterState, name: str) -> str | None:
    """The queue whose dead letters go to the topic and the queue of this name."""
    owner_id = state.queue_ids.get(name.removesuffix(DEAD)) if name.endswith(DEAD) else None
    owner = None if owner_id is None else state.queues[owner_id]
    return owner.name if owner is not None and owner.config.dead_letters == "keep" else None


def _check_readers(state: ClusterState, topic: Topic, name: str, config: QueueConfig) -> None:
    """Raises ConfigError if one queue deletes records that another one has not read,
    QueueLimitError."""
    others = [queue for queue in state.queues_of(topic.topic_id) if queue.name != name]
    if len(others) >= QUEUES_OF_A_TOPIC_MAX:
        raise QueueLimitError(
            f"Topic {topic.name!r} already has {len(others)} queues, the maximum."
        )
    if others and config.retention == "delete_done":
        raise ConfigError(
            f'retention="delete_done" is for a topic that only this queue reads: {topic.name!r} '
            f"has queue {others[0].name!r}, too."
        )
    for other in others:
        if other.config.retention == "delete_done":
            raise ConfigError(
                f"Queue {other.name!r} deletes what it has settled of {topic.name!r} "
                '(retention="delete_done"), so no other queue can read this topic.'
            )


def _check_retention(topic: str, topic_config: TopicConfig, config: QueueConfig) -> None:
    if topic_config.is_compacted and config.retention != "topic":
        raise ConfigError(
            f'retention="{config.retention}" is for topics that are not compacted, and {topic!r} '
            'is: say retention="topic".'
        )


def _dead_letters(
    state: ClusterState,
    name: str,
    source: TopicConfig,
    replication_factor: int,
    new_id: Callable[[], str],
) -> list[MetadataRecord]:
    """Creates the topic and the queue of a queue's dead letters, as far as they are missing."""
    dead = f"{name}{DEAD}"
    topic = state.topic_named(dead)
    topic_id, count = (new_id(), 1) if topic is None else (topic.topic_id, len(topic.partitions))
    records: list[MetadataRecord] = []
    if topic is None:
        records += topic_changes.new_topic(
            state,
            topic_id=topic_id,
            name=dead,
            partitions=count,
            replication_factor=replication_factor,
            options={
                "retention_ms": None,
                "flush": source.flush,
                "max_message_bytes": min(
                    source.max_message_bytes + DEAD_HEADERS_BYTES, MESSAGE_BYTES_CEILING
                ),
            },
        )
    elif topic.config.is_compacted:
        raise ConfigError(
            f"Topic {dead!r} would take the dead letters of queue {name!r}, but it is compacted, "
            "which keeps one of each key: alter it to cleanup_policy=\"delete\", or say "
            'dead_letters="discard".'
        )
    known = state.queue_ids.get(dead)
    if known is None:
        options = dict(DEAD_QUEUE)
        if topic is not None:
            # Somebody made this topic, and may have other readers of it.
            options["retention"] = "hold"
        records.append(QueueChanged(new_id(), dead, topic_id, options, count))
    elif state.queues[known].topic_id != topic_id:
        raise QueueExistsError(
            f"Queue {dead!r} would take the dead letters of {name!r}, but it reads another topic: "
            'delete it first, or say dead_letters="discard".'
        )
    return records


def new_dead_letters(state: ClusterState, name: str, options: Mapping[str, Any]) -> int:
    """Number of partitions that are created for the dead letters of a queue when it gets these
    options."""
    known = state.queue_ids.get(name)
    before = QueueConfig.dead_letters if known is None else state.queues[known].config.dead_letters
    keeps = _plain(options).get("dead_letters", before) == "keep"
    return int(keeps and name + DEAD not in state.topic_ids)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace(".", "_"): value for key, value in options.items()}

"""What the controller decides about queues."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rayq.core import queue_changes, topic_changes
from rayq.core.cluster_state import ClusterState, Queue
from rayq.core.metadata_records import decode_records, encode_records
from rayq.errors import (
    ConfigError,
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    QueueExistsError,
    QueueLimitError,
    RayqError,
    TopicExistsError,
    UnknownQueueError,
    UnknownTopicError,
)
from tests.pure.test_cluster_state import apply, cluster, create

_ids = itertools.count(1)


def new_id() -> str:
    return f"id-{next(_ids)}"


def make(state: ClusterState, name: str = "q", topic: str = "t", partitions: int | None = None,
         topic_options: dict[str, Any] | None = None, factor: int | None = None,
         **options: Any) -> Queue:
    apply(state, queue_changes.create_queue(
        state, new_id=new_id, name=name, topic=topic, options=options, partitions=partitions,
        replication_factor=factor, topic_options=topic_options or {}, keeper_partitions=4))
    return state.queues[state.queue_ids[name]]


def alter(state: ClusterState, name: str, **changes: Any) -> Queue:
    apply(state, queue_changes.alter_queue(state, name, changes, new_id=new_id))
    return state.queues[state.queue_ids[name]]


def test_a_queue_comes_with_its_topic_its_dead_letters_and_the_topic_of_its_keepers() -> None:
    state = cluster()
    queue = make(state, "tasks", "tasks", 6, {"flush": "os"}, max_deliveries=3)
    topic, dead, keepers = map(state.topic_named, ("tasks", "tasks.dead", "__queue_state"))
    assert topic and dead and keepers
    assert (len(topic.partitions), len(dead.partitions), len(keepers.partitions)) == (6, 1, 4)
    assert (queue.topic_id, queue.partitions, queue.config.max_deliveries) == (topic.topic_id, 6, 3)
    assert (dead.config.retention_ms, dead.config.flush) == (None, "os")
    assert dead.config.max_message_bytes > topic.config.max_message_bytes
    [letters] = state.queues_of(dead.topic_id)
    assert (letters.name, letters.config.dead_letters) == ("tasks.dead", "discard")
    copy = ClusterState()
    apply(copy, decode_records(encode_records(state.snapshot())))
    assert copy.queues == state.queues and copy.queue_ids == state.queue_ids


def test_a_queue_of_an_existing_topic_takes_what_is_there_of_its_dead_letters() -> None:
    state = cluster()
    create(state, "t", 3)
    create(state, "q.dead", 2)
    assert make(state, "q").partitions == 3
    letters = state.queues[state.queue_ids["q.dead"]]
    # The topic may have other readers: what is settled stays.
    assert (letters.partitions, letters.config.retention) == (2, "topic")
    apply(state, queue_changes.delete_queue(state, "q"))
    assert list(state.queue_ids) == ["q.dead"]
    make(state, "q")
    assert state.queues[state.queue_ids["q.dead"]] is letters


def test_impossible_queues_are_refused_and_leave_nothing() -> None:
    state = cluster()
    create(state, "t")
    create(state, "keyed", cleanup_policy="compact")
    make(state, "q")
    create(state, "s.dead", cleanup_policy="compact")
    make(state, "eats", "eaten", 1, retention="delete_done")
    before = encode_records(state.snapshot())
    refused: list[tuple[type[RayqError], str, dict[str, Any]]] = [
        (QueueExistsError, "exists already", {"name": "q"}),
        (InvalidTopicError, "queue name", {"name": "a/b"}),
        (InvalidTopicError, "reserved", {"name": "__q"}),
        (InvalidTopicError, "at most 200", {"name": "q" * 200}),  # with .dead behind it
        (UnknownTopicError, "no topic 'u'", {"topic": "u"}),
        (TopicExistsError, "say topic='t'", {"partitions": 1}),
        (InvalidTopicError, "rayq's own", {"topic": "__queue_state"}),
        (ConfigError, "Did you mean 'max_deliveries'", {"max_delivery": 1}),
        (ConfigError, "max_handling_s", {"visibility_timeout_s": 30, "max_handling_s": 20}),
        (ConfigError, "own dead letters", {"topic": "r.dead", "partitions": 1}),
        (ConfigError, "only this queue reads", {"retention": "delete_done"}),
        (ConfigError, "'eats' deletes", {"topic": "eaten"}),
        (ConfigError, "not compacted", {"topic": "keyed", "retention": "hold"}),
        (ConfigError, "'s.dead' .* is compacted", {"name": "s"}),
        (InvalidReplicationFactorError, "not possible",
         {"topic": "u", "partitions": 1, "factor": 9}),
    ]
    for kind, said, arguments in refused:
        with pytest.raises(kind, match=said):
            make(state, **{"name": "r", **arguments})
    assert encode_records(state.snapshot()) == before


def test_a_topic_has_so_many_queues_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_changes, "QUEUES_OF_A_TOPIC_MAX", 2)
    state = cluster()
    create(state)
    for name in "ab":
        make(state, name)
    with pytest.raises(QueueLimitError, match="no more"):
        make(state, "c")
    alter(state, "a", max_deliveries=7)


def test_single_keys_are_altered_and_those_of_tomorrow_stay() -> None:
    state = cluster()
    create(state)
    queue = make(state, "q", dead_letters="discard", backoff_s=2)
    assert state.topic_named("q.dead") is None
    queue = alter(state, "q", visibility_timeout_s=60)
    assert (queue.config.visibility_timeout_s, queue.config.backoff_s) == (60, 2)
    alter(state, "q", dead_letters="keep")
    assert "q.dead" in state.queue_ids
    for key, value in (("ordered_by_key", True), ("start", "latest")):
        with pytest.raises(ConfigError, match=f"{key} of a queue cannot be changed"):
            alter(state, "q", **{key: value})
    alter(state, "q", start="earliest")
    with pytest.raises(UnknownQueueError, match="no queue 'r'"):
        alter(state, "r", backoff_s=1)


def test_what_takes_dead_letters_is_not_deleted_before_its_queue() -> None:
    state = cluster()
    make(state, "q", "t", 1)
    with pytest.raises(ConfigError, match="delete 'q' first"):
        queue_changes.delete_queue(state, "q.dead")
    with pytest.raises(ConfigError, match="the topic of the dead letters of queue 'q'"):
        queue_changes.check_deleted_topic(state, "q.dead")
    alter(state, "q", dead_letters="discard")
    queue_changes.check_deleted_topic(state, "q.dead")
    apply(state, queue_changes.delete_queue(state, "q.dead"))
    with pytest.raises(UnknownQueueError, match=r"no queue 'q\.dead'"):
        queue_changes.delete_queue(state, "q.dead")


def test_a_queue_goes_with_its_topic() -> None:
    state = cluster()
    make(state, "q", "t", 1)
    make(state, "other", dead_letters="discard")
    queue_changes.check_deleted_topic(state, "t")
    apply(state, topic_changes.delete_topic(state, "t", now_ms=0))
    assert list(state.queue_ids) == ["q.dead"]
    assert len(state.queues) == 1
    make(state, "q", "t", 1)


def test_a_topic_whose_records_a_queue_holds_is_not_compacted() -> None:
    state = cluster()
    make(state, "held", "t", 1, retention="hold")
    make(state, "reads", "t")
    for topic, said in (("t", "Queue 'held' holds"), ("held.dead", "dead letters of queue 'held'")):
        for policy in ("compact", "compact,delete"):
            with pytest.raises(ConfigError, match=said):
                queue_changes.check_topic_config(state, topic, {"cleanup.policy": policy})
        queue_changes.check_topic_config(state, topic, {"retention_ms": 1})
    alter(state, "held", retention="topic", dead_letters="discard")
    queue_changes.check_topic_config(state, "t", {"cleanup_policy": "compact"})
    with pytest.raises(ConfigError, match=r"Queue 'held\.dead' holds"):
        queue_changes.check_topic_config(state, "held.dead", {"cleanup_policy": "compact"})
    queue_changes.check_topic_config(state, "unknown", {"cleanup_policy": "compact"})


def test_partitions_that_would_break_the_order_of_keys_need_force() -> None:
    state = cluster()
    make(state, "q", "t", 1, ordered_by_key=True)
    make(state, "plain", "u", 1)
    with pytest.raises(InvalidPartitionsError, match="force=True"):
        queue_changes.check_new_partitions(state, "t", force=False)
    queue_changes.check_new_partitions(state, "t", force=True)
    queue_changes.check_new_partitions(state, "u", force=False)
    queue_changes.check_new_partitions(state, "unknown", force=False)

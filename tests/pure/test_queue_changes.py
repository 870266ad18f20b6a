"""What the controller decides about queues."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from rayq import messages
from rayq.config import MESSAGE_BYTES_CEILING, ClusterConfig
from rayq.core.cluster import queue_changes
from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    QueueChanged,
    QueueDeleted,
    TopicCreated,
    decode_records,
    encode_records,
)
from rayq.core.cluster.state import ClusterState, Queue
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
from tests.pure.deciding import decide
from tests.pure.test_cluster_state import apply, cluster, create

FOUR_KEEPERS = ClusterConfig(queue_state_partitions=4)
_ids = itertools.count(1)


def new_id() -> str:
    return f"id-{next(_ids)}"


def make(state: ClusterState, name: str = "q", topic: str = "t", partitions: int | None = None,
         topic_options: dict[str, Any] | None = None, factor: int | None = None,
         **options: Any) -> Queue:
    request = messages.CreateQueue(
        name=name, topic=topic, config=options, partitions=partitions, replication_factor=factor,
        topic_config=topic_options or {})
    apply(state, decide(state, request, new_id=new_id, config=FOUR_KEEPERS))
    return state.queues[state.queue_ids[name]]


def alter(state: ClusterState, name: str, **changes: Any) -> Queue:
    apply(state, decide(state, messages.AlterQueue(name=name, config=changes), new_id=new_id))
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
    assert (letters.name, letters.config.dead_letters) == ("tasks.dead", "stay")
    copy = ClusterState()
    apply(copy, decode_records(encode_records(state.snapshot())))
    assert copy.queues == state.queues and copy.queue_ids == state.queue_ids


def test_a_queue_of_an_existing_topic_takes_what_is_there_of_its_dead_letters() -> None:
    state = cluster()
    create(state, "t", 3)
    create(state, "q.dead", 2)
    assert make(state, "q").partitions == 3
    letters = state.queues[state.queue_ids["q.dead"]]
    # The topic may have other readers: what is settled stays, and what is not in any case.
    assert (letters.partitions, letters.config.retention) == (2, "hold")
    apply(state, decide(state, messages.DeleteQueue(name="q")))
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
    with pytest.raises(QueueLimitError, match="the maximum"):
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
        decide(state, messages.DeleteQueue(name="q.dead"))
    with pytest.raises(ConfigError, match="the topic of the dead letters of queue 'q'"):
        queue_changes.check_deleted_topic(state, "q.dead")
    alter(state, "q", dead_letters="discard")
    queue_changes.check_deleted_topic(state, "q.dead")
    apply(state, decide(state, messages.DeleteQueue(name="q.dead")))
    with pytest.raises(UnknownQueueError, match=r"no queue 'q\.dead'"):
        decide(state, messages.DeleteQueue(name="q.dead"))


def test_a_queue_goes_with_its_topic() -> None:
    state = cluster()
    make(state, "q", "t", 1)
    make(state, "other", dead_letters="discard")
    queue_changes.check_deleted_topic(state, "t")
    apply(state, decide(state, messages.DeleteTopic("t"), now_ms=0))
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


def ids() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"n{next(numbers)}"


def create_records(state: ClusterState, **changes: Any) -> list[MetadataRecord]:
    request = messages.CreateQueue(**{"name": "q", "topic": "t", "config": {}, **changes})
    return decide(state, request, new_id=ids(), config=FOUR_KEEPERS)


def alter_records(state: ClusterState, config: dict[str, Any]) -> list[MetadataRecord]:
    return decide(state, messages.AlterQueue(name="q", config=config), new_id=ids())


def test_a_queue_is_created_together_with_what_it_needs_and_is_not_there() -> None:
    state = cluster()
    records = create_records(
        state, topic="t", config={"max.deliveries": 3}, partitions=2, replication_factor=2,
        topic_config={"flush": "os", "max_message_bytes": 1000},
    )
    topics = [one for one in records if isinstance(one, TopicCreated)]
    assert [(one.name, one.replication_factor) for one in topics] == [
        ("__queue_state", 3), ("t", 2), ("q.dead", 2)
    ]
    assert [one.config for one in topics[1:]] == [
        {"flush": "os", "max_message_bytes": 1000},
        {"flush": "os", "max_message_bytes": 1000 + 64 * 1024, "retention_ms": None},
    ]
    ids_of = {one.name: one.topic_id for one in topics}
    assert len(set(ids_of.values())) == 3
    queues = [one for one in records if isinstance(one, QueueChanged)]
    assert [(one.name, one.topic_id, one.config, one.partitions) for one in queues] == [
        ("q.dead", ids_of["q.dead"], queue_changes.DEAD_QUEUE, 1),
        ("q", ids_of["t"], {"max_deliveries": 3}, 2),
    ]
    assert len({one.queue_id for one in queues} | set(ids_of.values())) == 5
    assert records[-1] == queues[-1], "what it needs is there before it is"
    # The second one finds the topic, and needs dead letters of its own.
    apply(state, records)
    names = [one.name for one in create_records(state, name="r")
             if isinstance(one, TopicCreated | QueueChanged)]
    assert names == ["r.dead", "r.dead", "r"]
    options = {"dead_letters": "discard"}
    [only] = create_records(state, name="r", config=options)
    assert only == QueueChanged(only.queue_id, "r", ids_of["t"], options, 2)  # type: ignore[attr-defined]
    # A topic of dead letters has as many copies as the topic that they come from.
    dead = next(one for one in create_records(state, name="r")
                if isinstance(one, TopicCreated) and one.name == "r.dead")
    assert dead.replication_factor == 2


@pytest.mark.parametrize(("source_bytes", "dead_bytes"), [
    (1, 1 + 64 * 1024),
    (MESSAGE_BYTES_CEILING - 64 * 1024 - 1, MESSAGE_BYTES_CEILING - 1),
    (MESSAGE_BYTES_CEILING - 1, MESSAGE_BYTES_CEILING),
    (MESSAGE_BYTES_CEILING, MESSAGE_BYTES_CEILING),
])
def test_dead_letters_have_room_for_their_headers_up_to_the_most(
    source_bytes: int, dead_bytes: int
) -> None:
    state = cluster()
    make(state, "q", "t", 1, {"max_message_bytes": source_bytes})
    dead = state.topic_named("q.dead")
    assert dead is not None and dead.config.max_message_bytes == dead_bytes


def test_a_queue_over_a_topic_of_dead_letters_drops_its_own() -> None:
    state = cluster()
    with pytest.raises(ConfigError, match="own dead letters"):
        make(state, "r", "r.dead", 1)
    make(state, "r", "r.dead", 1, dead_letters="discard")
    make(state, "s", "r.dead")
    assert state.queue_ids.keys() == {"r", "s", "s.dead"}


def test_whose_dead_letters_go_to_a_name_is_told_by_both() -> None:
    state = cluster()
    make(state, "keeps", "t", 1)
    make(state, "drops", "t", dead_letters="discard")
    create(state, "drops.dead")
    create(state, "nobody.dead")
    create(state, "keeps_dead")
    for topic in ("t", "drops.dead", "nobody.dead", "keeps_dead", "keeps", "unknown"):
        queue_changes.check_deleted_topic(state, topic)
        queue_changes.check_topic_config(state, topic, {"cleanup_policy": "compact"})
    apply(state, decide(state, messages.DeleteQueue(name="drops")))
    for check in (
        lambda: queue_changes.check_deleted_topic(state, "keeps.dead"),
        lambda: decide(state, messages.DeleteQueue(name="keeps.dead")),
        lambda: queue_changes.check_topic_config(
            state, "keeps.dead", {"cleanup_policy": "compact"}
        ),
    ):
        with pytest.raises(ConfigError, match="dead letters of queue 'keeps'"):
            check()
    [deleted] = decide(state, messages.DeleteQueue(name="keeps"))
    topic = state.topic_named("t")
    assert topic is not None
    assert deleted == QueueDeleted(state.queue_ids["keeps"], topic.topic_id)


def test_dead_letters_go_to_a_queue_of_the_same_topic_only() -> None:
    state = cluster()
    create(state, "t")
    create(state, "u")
    make(state, "q.dead", "u", dead_letters="discard")
    before = encode_records(state.snapshot())
    for change in (lambda: make(state, "q"), lambda: make(state, "q", "new", 1)):
        with pytest.raises(QueueExistsError, match="reads another topic"):
            change()
    assert encode_records(state.snapshot()) == before
    make(state, "q", dead_letters="discard")
    with pytest.raises(QueueExistsError, match="reads another topic"):
        alter(state, "q", dead_letters="keep")
    apply(state, decide(state, messages.DeleteQueue(name="q.dead")))
    create(state, "q.dead", 3)
    make(state, "q.dead", "q.dead", dead_letters="discard", max_deliveries=7)
    alter(state, "q", dead_letters="keep")
    letters = state.queues[state.queue_ids["q.dead"]]
    assert (letters.partitions, letters.config.max_deliveries) == (3, 7)


def test_a_queue_is_altered_to_what_it_could_be_created_with() -> None:
    state = cluster()
    create(state, "keyed", cleanup_policy="compact")
    make(state, "keyed", "keyed", dead_letters="discard")
    make(state, "one", "t", 1, dead_letters="discard")
    make(state, "alone", "own", 1, dead_letters="discard")
    for retention in ("hold", "delete_done"):
        with pytest.raises(ConfigError, match="not compacted"):
            alter(state, "keyed", retention=retention)
        assert alter(state, "alone", retention=retention).config.retention == retention
    make(state, "two", "t", dead_letters="discard")
    with pytest.raises(ConfigError, match="'t' has queue 'two', too"):
        alter(state, "one", retention="delete_done")
    assert alter(state, "one", retention="hold").config.retention == "hold"
    with pytest.raises(ConfigError, match="'alone' deletes"):
        make(state, "other", "own")
    alter(state, "alone", retention="topic")
    make(state, "other", "own")
    with pytest.raises(ConfigError, match="Did you mean"):
        alter(state, "one", retentions="hold")


def test_an_altered_queue_keeps_all_that_was_not_named() -> None:
    state = cluster()
    create(state, "t", 3)
    before = make(state, "q", dead_letters="discard", backoff_s=2, ordered_by_key=True)
    # Options of a rayq of tomorrow stay, though this one does not know them.
    options = {**before.options, "tomorrow": 1}
    apply(state, [QueueChanged(before.queue_id, "q", before.topic_id, options, 3)])
    [record] = alter_records(
        state, {"backoff.max.s": 90, "ordered_by_key": True, "start": "earliest"})
    changed = {"backoff_max_s": 90, "start": "earliest"}
    assert record == QueueChanged(before.queue_id, "q", before.topic_id, {**options, **changed}, 3)
    # What becomes its dead letters comes with it, once.
    records = alter_records(state, {"dead_letters": "keep"})
    assert [type(one) for one in records if not isinstance(one, PartitionChanged)] == [
        TopicCreated, QueueChanged, QueueChanged
    ]
    assert records[-1] == QueueChanged(
        before.queue_id, "q", before.topic_id, {**options, "dead_letters": "keep"}, 3
    )
    apply(state, records)
    [_only] = alter_records(state, {"backoff_s": 3})


def test_every_queue_of_a_topic_counts_and_its_own_does_not(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_changes, "QUEUES_OF_A_TOPIC_MAX", 1)
    state = cluster()
    create(state)
    create(state, "u")
    make(state, "a", dead_letters="discard", retention="delete_done")
    make(state, "b", "u", dead_letters="discard")
    alter(state, "a", retention="hold")
    alter(state, "a", retention="delete_done")
    with pytest.raises(QueueLimitError, match="'t' already has 1 queues"):
        make(state, "c")


def test_compaction_looks_at_what_a_topic_would_be() -> None:
    state = cluster()
    make(state, "q", "t", 1, retention="delete_done", dead_letters="discard")
    for changes in ({}, {"cleanup_policy": "delete"}, {"cleanup.policy": "delete"}):
        queue_changes.check_topic_config(state, "t", changes)
    with pytest.raises(ConfigError, match=r"\(retention='delete_done'\)"):
        queue_changes.check_topic_config(state, "t", {"cleanup_policy": "compact"})

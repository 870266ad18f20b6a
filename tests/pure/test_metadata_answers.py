"""A broker's descriptions of topics: encoded once, and again only where something changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from rayq.actors.broker.metadata_answers import MetadataAnswers
from rayq.core.cluster.records import (
    RECORDS,
    AclDeleted,
    BrokerFenced,
    BrokerRemoved,
    BrokerUnfenced,
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    PrincipalDeleted,
    QueueDeleted,
    RemoteGarbageRemoved,
    ReplicaGone,
    RequestDone,
    SnapshotUnpinned,
    TokenRevoked,
    TopicCreated,
    TopicDeleted,
)
from rayq.core.cluster.state import ClusterState
from tests.pure.test_cluster_state import registration
from tests.pure.test_metadata_replay import ANNA_READS, MOVING, process
from tests.pure.test_metadata_replay import RECORDS as FIRST

LATER: list[MetadataRecord] = [
    PartitionChanged("T", 1, msgspec.structs.replace(MOVING, leader_epoch=4)),  # Nobody leads it.
    BrokerUnfenced(1, "b1.1"),
    BrokerFenced(0, "b0.1"),
    registration(0, 2, directory_id="other"),
    ReplicaGone("T", 0, 1, "1a"),
    process(0, "b", "T", 0),
    RequestDone("r3"),
    TokenRevoked("anna", "01"),
    AclDeleted(ANNA_READS),
    PrincipalDeleted("ben"),
    SnapshotUnpinned("one", "T"),
    QueueDeleted("P", "T"),
    TopicDeleted("T"),
    RemoteGarbageRemoved("X"),
    TopicCreated("V", "t", {}, 1),  # Another topic of that name.
    PartitionChanged("V", 0, PartitionValue((2,))),
    registration(5),
    BrokerRemoved(5),
]


def answers_of(state: ClusterState) -> MetadataAnswers:
    return MetadataAnswers(cast(Any, SimpleNamespace(state=state)), "c", is_registered=lambda: True)


def described(answers: MetadataAnswers, state: ClusterState) -> dict[str, bytes]:
    return {
        topic_id: bytes(cast(Any, answers._described(topic)))
        for topic_id, topic in state.topics.items()
    }


def test_what_is_kept_is_what_would_be_described_now() -> None:
    state = ClusterState()
    kept = answers_of(state)
    for record in [*FIRST, *LATER]:
        state.replay(record)
        kept.forget([record])
        assert described(kept, state) == described(answers_of(state), state), record
    assert {type(record) for record in [*FIRST, *LATER]} == set(RECORDS)


@pytest.mark.parametrize(
    "record, described_again",
    [
        (RequestDone("r3"), set()),
        (ReplicaGone("T", 0, 1, "1a"), {"T"}),
        (PartitionChanged("U", 0, PartitionValue((1,))), {"U"}),
        (BrokerFenced(0, "b0.1"), {"T", "U"}),
    ],
)
def test_a_change_of_one_topic_costs_no_description_of_the_others(
    record: MetadataRecord, described_again: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ClusterState()
    for first in FIRST:
        state.replay(first)
    kept = answers_of(state)
    described(kept, state)
    again: set[str] = set()
    describe = MetadataAnswers._describe

    def counted(self: MetadataAnswers, topic: Any) -> Any:
        again.add(topic.topic_id)
        return describe(self, topic)

    monkeypatch.setattr(MetadataAnswers, "_describe", counted)
    state.replay(record)
    kept.forget([record])
    described(kept, state)
    assert again == described_again
    kept.forget(None)
    described(kept, state)
    assert again == {"T", "U"}

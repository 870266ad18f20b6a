"""Drains and cancellations as the client makes them, against the controller's own decisions.

The controller's state is here in the test. The test says which brokers live, and lets the copied
replicas come into sync. Time passes with each look at the metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rayq import messages
from rayq.client.admin import brokers, moves
from rayq.client.admin.admin import AsyncAdmin
from rayq.core.cluster import broker_changes
from rayq.core.cluster.records import (
    BrokerRegistered,
    Member,
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    TopicCreated,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    InvalidReassignmentError,
    NoReassignmentError,
    ReplicaLimitError,
)
from rayq.records import TopicPartition
from tests.pure.deciding import decide

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


class Played:
    """A client whose every look at the metadata takes a second, and calls `on_look` first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.admin = AsyncAdmin(self)  # type: ignore[arg-type]
        self.state = ClusterState()
        self.version = 0
        self.on_look: Callable[[], None] = lambda: None
        self.on_cancel: Callable[[], None] = lambda: None
        self.heard = set(range(4))

    def apply(self, records: Iterable[MetadataRecord]) -> None:
        for record in records:
            self.version += 1
            self.state.replay(record)
        self.state.validate()

    def add_broker(self, broker: int, replicas_max: int = 10) -> None:
        start = self.version + 1
        registered = BrokerRegistered(
            broker, f"d{broker}", start, f"b{start}", "h", 1, f"n{broker}", replicas_max
        )
        self.apply(broker_changes.register_broker(self.state, registered, (), self.heard))

    def add_topic(self, name: str, *replicas: int) -> None:
        self.apply([TopicCreated(name, name, {}, len(replicas)), self._in_sync(name, replicas)])

    def _in_sync(self, name: str, replicas: Iterable[int]) -> PartitionChanged:
        isr = tuple(Member(one, f"d{one}", f"{name}{one}") for one in replicas)
        leader = isr[0]
        value = PartitionValue(
            tuple(replicas), isr, leader=leader.broker, leader_incarnation=leader.incarnation
        )
        return PartitionChanged(name, 0, value)

    def complete(self, name: str) -> None:
        target = self.value(name).target
        assert target
        self.apply([self._in_sync(name, target)])

    def value(self, name: str) -> PartitionValue:
        return self.state.topics[name].partitions[0].value

    async def fetch_all(self, **options: Any) -> messages.MetadataResponse:
        self.now += 1
        self.on_look()
        brokers = [
            messages.BrokerEndpoint(number, "h", 1, f"n{number}", one.live, one.cordoned)
            for number, one in sorted(self.state.brokers.items())
        ]
        topics = []
        for topic in self.state.topics.values():
            value = topic.partitions[0].value
            described = messages.PartitionMetadata(
                0,
                value.leader,
                value.leader_epoch,
                value.partition_epoch,
                [member.broker for member in value.isr],
                [messages.ReplicaEndpoint(one, None, None) for one in value.replicas],
                None,
                list(value.target),
                list(value.origin),
                value.throttle_bytes_per_s,
            )
            topics.append(messages.TopicMetadata(topic.name, topic.topic_id, {}, [described]))
        return messages.MetadataResponse("c", self.version, 1, "h:1", [], brokers, topics)

    async def change(self, request: Any, *, timeout_s: float) -> None:
        if isinstance(request, messages.AlterReassignments) and any(
            target is None for _, _, target in request.moves
        ):
            self.on_cancel()
        self.apply(decide(self.state, request, heard=self.heard))

    def drain(self, broker: int, throttle: int | None = None, concurrency: int = 1) -> None:
        asyncio.run(
            self.admin.drain_broker(
                broker, throttle_bytes_per_s=throttle, concurrency=concurrency
            )
        )

    def cancel(self, partitions: Iterable[TopicPartition] | None = None) -> list[TopicPartition]:
        return asyncio.run(self.admin.cancel_reassignments(partitions))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Four brokers, 0 to 3: topic a is on 0 and 1, topic b on 0 and 2."""
    for module in (moves, brokers):
        monkeypatch.setattr(module, "PAUSE_S", 0.0)
    played = Played()
    for broker in range(4):
        played.add_broker(broker)
    played.add_topic("a", 0, 1)
    played.add_topic("b", 0, 2)
    return played


def complete_all(played: Played) -> None:
    for name in ("a", "b"):
        if played.value(name).target:
            played.complete(name)


def test_a_partition_that_cannot_move_does_not_hold_up_the_others(played: Played) -> None:
    played.apply(broker_changes.fence_broker(played.state, 1, played.heard))
    played.on_look = lambda: complete_all(played)
    with pytest.raises(InvalidReassignmentError, match=r"a-0 cannot.* are running.*Start the oth"):
        played.drain(0)
    assert played.value("b").replicas == (3, 2)
    assert played.value("a").replicas == (0, 1)
    assert played.state.brokers[0].cordoned
    played.add_broker(1)
    played.drain(0)
    assert 0 not in played.value("a").replicas


def test_a_drain_waits_a_while_for_room(played: Played) -> None:
    for broker in (1, 2, 3):  # each has room for b or for a, not for both
        played.add_broker(broker, replicas_max=1)
    played.on_look = lambda: complete_all(played)
    with pytest.raises(ReplicaLimitError, match="max_replicas_per_broker = 1"):
        played.drain(0)


def test_a_drain_ends_when_the_broker_is_undrained(played: Played) -> None:
    def undrain() -> None:
        if played.value("a").target:
            played.apply(decide(played.state, messages.CordonBroker(0, False)))

    played.on_look = undrain
    with pytest.raises(NoReassignmentError, match="undrained by another client"):
        played.drain(0)
    assert played.value("a").target and not played.value("b").target


def test_what_an_earlier_drain_began_takes_the_throttle_of_the_next(played: Played) -> None:
    def interrupt() -> None:
        if played.value("a").target and played.value("b").target:
            raise KeyboardInterrupt

    played.on_look = interrupt
    with pytest.raises(KeyboardInterrupt):
        played.drain(0, throttle=20, concurrency=2)
    assert played.value("a").throttle_bytes_per_s == 10
    looks = 0

    def complete_in_time() -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            throttles = [played.value(name).throttle_bytes_per_s for name in ("a", "b")]
            assert throttles == [None, None]
            complete_all(played)

    played.on_look = complete_in_time
    played.drain(0, concurrency=2)
    assert looks > 4


def test_all_moves_are_cancelled_though_one_is_over_in_that_moment(played: Played) -> None:
    played.apply(
        decide(
            played.state,
            messages.AlterReassignments([("a", 0, [3, 1]), ("b", 0, [3, 2])], None),
            heard=played.heard,
        )
    )

    def complete_first() -> None:
        if played.value("a").target:
            played.complete("a")

    played.on_cancel = complete_first
    assert played.cancel() == [B]
    assert (played.value("a").replicas, played.value("b").replicas) == ((3, 1), (0, 2))
    assert played.cancel() == []
    with pytest.raises(NoReassignmentError):
        played.cancel([A])


def test_a_cancellation_of_which_half_was_done_before_an_answer_came_is_finished(
    played: Played,
) -> None:
    begin = [("a", 0, [3, 1]), ("b", 0, [3, 2])]
    played.apply(decide(played.state, messages.AlterReassignments(begin, None), heard=played.heard))

    def cancel_half() -> None:
        """The controller dies with half of the records committed, and the next controller is
        asked."""
        if played.value("a").target:
            request = messages.AlterReassignments([("a", 0, None)], None)
            played.apply(decide(played.state, request, heard=played.heard))

    played.on_cancel = cancel_half
    assert played.cancel([A, B]) == [A, B]
    assert not played.state.moving

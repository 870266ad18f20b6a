"""Metadata of the cluster that a client knows: brokers, topics, leaders. It never goes back to
older metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rayq.messages import (
    METADATA_TOPICS_MAX,
    BrokerEndpoint,
    MetadataResponse,
    PartitionMetadata,
    ReplicaEndpoint,
    TopicMetadata,
)

DENIED_MAX = METADATA_TOPICS_MAX
"""Maximum number of denied topics that are remembered, the newest ones."""


@dataclass(frozen=True, slots=True)
class LeaderAndEpoch:
    """The leader of a partition, under one leader epoch."""

    broker: int
    host: str
    port: int
    epoch: int


class MetadataCache:
    """The newest metadata seen. It never goes back (docs/protocol.md, rule 17): an answer with a
    lower version than one seen before is refused, and so is, within one topic id, a lower leader
    epoch."""

    def __init__(self) -> None:
        self.version = 0
        self.version_min = 0
        """The minimum version of acceptable answers: it contains the changes made by this client,
        and the queues that it was told of."""
        self.cluster_id: str | None = None
        self.controller: str | None = None
        self.controller_epoch = 0
        self.voters: list[int] = []
        self.brokers: dict[int, BrokerEndpoint] = {}
        self.topics: dict[str, TopicMetadata] = {}
        self.denied: dict[str, str] = {}
        """The missing topics that this client's principal may not describe, whether they exist or
        not, each with the reason."""
        self._listeners: dict[Callable[[], None], None] = {}

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Adds a function that is called on the loop after each change."""
        self._listeners[listener] = None

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.pop(listener, None)

    def require(self, version: int) -> None:
        """Makes only answers of at least this version acceptable."""
        self.version_min = max(self.version_min, version)

    @property
    def oldest_acceptable(self) -> int:
        """The lowest version that is not too old."""
        return max(self.version, self.version_min)

    def is_acceptable(self, response: MetadataResponse) -> bool:
        return response.version >= self.oldest_acceptable

    def apply(self, response: MetadataResponse, asked: Iterable[str] | None) -> bool:
        """Applies the answer to a request for `asked` topics (None: all topics), and nothing about
        other topics. Returns False if the answer is too old, and changes nothing."""
        if not self.is_acceptable(response):
            return False
        self.version = response.version
        self.cluster_id = response.cluster_id
        self.controller = response.controller
        self.controller_epoch = response.controller_epoch
        self.voters = list(response.voters)
        self.brokers = {broker.broker: broker for broker in response.brokers}
        found = {topic.name: topic for topic in response.topics}
        names = {*self.topics, *found} if asked is None else asked
        for name in names:
            self.denied.pop(name, None)
            if name in found:
                self.topics[name] = _newest(self.topics.get(name), found[name])
            else:
                self.topics.pop(name, None)
        self.denied |= response.denied
        while len(self.denied) > DENIED_MAX:
            del self.denied[next(iter(self.denied))]
        for listener in list(self._listeners):
            listener()
        return True

    def forget(self, topic: str) -> None:
        """Forgets a topic until it is asked for again."""
        self.topics.pop(topic, None)

    def partition(self, topic: str, topic_id: str, partition: int) -> PartitionMetadata | None:
        """The metadata of a partition; None if it is unknown, or the topic of that id is gone."""
        found = self.topics.get(topic)
        if found is None or found.topic_id != topic_id or partition >= len(found.partitions):
            return None
        return found.partitions[partition]

    def leader(self, topic: str, topic_id: str, partition: int) -> LeaderAndEpoch | None:
        """The leader; None if the partition has no leader now, or the leader's process is not
        running."""
        found = self.partition(topic, topic_id, partition)
        if found is None or found.leader is None:
            return None
        return leader_of(found)


def leader_of(partition: PartitionMetadata) -> LeaderAndEpoch | None:
    replica = next((r for r in partition.replicas if r.broker == partition.leader), None)
    if replica is None or not _is_running(replica):
        return None
    assert replica.host is not None and replica.port is not None
    return LeaderAndEpoch(replica.broker, replica.host, replica.port, partition.leader_epoch)


def _is_running(replica: ReplicaEndpoint) -> bool:
    return replica.host is not None and replica.port is not None


def _newest(known: TopicMetadata | None, answered: TopicMetadata) -> TopicMetadata:
    """The answer, except for partitions whose leader epoch it would take back."""
    if known is None or known.topic_id != answered.topic_id:
        return answered
    partitions = sorted(answered.partitions, key=lambda partition: partition.partition)
    for index, older in enumerate(known.partitions[: len(partitions)]):
        if older.leader_epoch > partitions[index].leader_epoch:
            partitions[index] = older
    return TopicMetadata(
        name=answered.name,
        topic_id=answered.topic_id,
        config=answered.config,
        partitions=partitions,
    )

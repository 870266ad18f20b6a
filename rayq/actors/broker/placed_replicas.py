"""The replicas that the committed metadata places on this broker."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set

from rayq import messages
from rayq.actors.broker.replica_processes import ReplicaProcess
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.core.cluster.records import (
    BrokerRegistered,
    MetadataRecord,
    PartitionChanged,
    QueueChanged,
    QueueDeleted,
    RemoteDoubted,
    RemoteGarbage,
    RemoteMoved,
    ReplicaGone,
    ReplicaRegistered,
    SnapshotPinned,
    SnapshotUnpinned,
    TopicConfigChanged,
    TopicDeleted,
)
from rayq.core.cluster.state import Partition, Queue, Topic
from rayq.records import TopicIdPartition


def described_queue(queue: Queue, topic: str) -> messages.QueueMetadata:
    """A queue's description for the leaders of its topic, and for clients."""
    return messages.QueueMetadata(
        queue_id=queue.queue_id,
        name=queue.name,
        topic_id=queue.topic_id,
        topic=topic,
        config=queue.whole_config,
        partitions=queue.partitions,
    )


class PlacedReplicas:
    """See the module. `incarnation` is that of the broker's process."""

    def __init__(self, metadata: MetadataKeeper, broker: int, incarnation: str) -> None:
        self._metadata = metadata
        self._broker = broker
        self._incarnation = incarnation
        self._changed_at: dict[TopicIdPartition, int] = {}
        """Versions in which assignments changed, in ascending order."""
        self._known_since = metadata.version
        """Version up to which any assignment may have changed, at an unknown version."""

    def __iter__(self) -> Iterator[TopicIdPartition]:
        for topic, number, _ in self._metadata.state.replicas_on(self._broker):
            yield topic.topic_id, number

    def find(self, key: TopicIdPartition) -> tuple[Topic, Partition] | None:
        """The topic and its partition; None if the partition is not placed here."""
        topic = self._metadata.state.topics.get(key[0])
        partition = None if topic is None else topic.partitions.get(key[1])
        if topic is None or partition is None or self._broker not in partition.value.replicas:
            return None
        return topic, partition

    def assignment(
        self, number: int, topic: Topic, partition: Partition
    ) -> messages.PartitionAssignment:
        """The assignment of the replica here: all that it must know of its partition."""
        value = partition.value
        leader = None if value.leader is None else partition.processes.get(value.leader)
        running = {broker: process.incarnation for broker, process in partition.processes.items()}
        return messages.PartitionAssignment(
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=number,
            config=topic.whole_config,
            leader=value.leader,
            leader_incarnation=value.leader_incarnation,
            leader_host=None if leader is None else leader.host,
            leader_port=None if leader is None else leader.port,
            leader_epoch=value.leader_epoch,
            partition_epoch=value.partition_epoch,
            last_unclean_epoch=value.last_unclean_epoch,
            isr=[(member.broker, member.incarnation) for member in value.isr],
            replicas=[(broker, running.get(broker)) for broker in value.replicas],
            replication_factor=value.replication_factor,
            throttle_bytes_per_s=(
                value.throttle_bytes_per_s if self._broker in value.adding else None
            ),
            remote=partition.remote,
            pinned_offset=self._metadata.state.pinned_offset(topic.topic_id, number),
            partitions=len(topic.partitions),
            is_remote_doubted=partition.is_remote_doubted,
            queues=[
                described_queue(queue, topic.name)
                for queue in self._metadata.state.queues_of(topic.topic_id)
            ],
        )

    def take(
        self, records: Sequence[MetadataRecord] | None, hosts: Iterable[ReplicaProcess]
    ) -> set[TopicIdPartition]:
        """Takes note of committed records (None: a snapshot). Returns the partitions whose
        assignments they change; `hosts` are the processes here."""
        version = self._metadata.version
        touched: set[TopicIdPartition] = set()
        topics: set[str] = set()
        """Topics all of whose partitions here are touched."""
        if records is None:
            touched.update(self)
            touched.update(key for host in hosts for key in host.keys)
        for record in records or ():
            match record:
                case PartitionChanged():
                    touched.add((record.topic_id, record.partition))
                    if record.value.partition_epoch == 0:
                        topics.add(record.topic_id)  # It has one more partition.
                case ReplicaRegistered() | ReplicaGone() | RemoteMoved() | RemoteDoubted():
                    touched.add((record.topic_id, record.partition))
                case SnapshotPinned():
                    touched.update((record.topic_id, number) for number in record.starts)
                case (
                    TopicConfigChanged()
                    | SnapshotUnpinned()
                    | RemoteGarbage()
                    | QueueChanged()
                    | QueueDeleted()
                ):
                    topics.add(record.topic_id)
                case TopicDeleted():
                    touched.update(
                        key for host in hosts for key in host.keys if key[0] == record.topic_id
                    )
                case BrokerRegistered() if record.broker == self._broker:
                    # Re-registering with another disk drops its replica processes.
                    touched.update(self)
        for topic_id in topics & self._metadata.state.topics.keys():
            numbers = self._metadata.state.topics[topic_id].partitions
            keys = ((topic_id, number) for number in numbers)
            touched.update(key for key in keys if self.find(key) is not None)
        for key in touched:
            self._changed_at.pop(key, None)  # It comes last.
            self._changed_at[key] = version
        return touched

    def changed_since(
        self, version: int, *, among: Set[TopicIdPartition]
    ) -> Set[TopicIdPartition]:
        """Those of the partitions whose assignments may have changed since that version of the
        metadata."""
        if version < self._known_since:
            return among
        changed = set()
        for key, changed_at in reversed(self._changed_at.items()):
            if changed_at <= version:
                break
            changed.add(key)
        return changed & among

    def forget_all_but(self, here: Collection[TopicIdPartition]) -> None:
        """Forgets the partitions of which nothing is here: most are of other brokers."""
        self._changed_at = {
            key: version for key, version in self._changed_at.items() if key in here
        }

    @property
    def is_current(self) -> bool:
        """Returns whether the metadata here is known to be current: it has this process
        registered."""
        known = self._metadata.state.brokers.get(self._broker)
        return known is not None and known.registration.incarnation == self._incarnation

    def may_remove(self, key: TopicIdPartition) -> bool:
        """Returns whether the files of a partition that is not placed here may be removed: its
        topic was deleted while this process watched, or the partition was moved away and has what
        it needs elsewhere.

        Call it only once the metadata `is_current`: a broker that has just started may apply
        records from long ago, when a partition that it holds had not been placed here yet. Metadata
        that is behind does no harm after that: even if the partition is placed here again by now,
        no other server counts on the files here before this broker reports a replica process that
        it starts after this, on newer metadata (`placed_epoch`).
        """
        topic = self._metadata.state.topics.get(key[0])
        if topic is None:
            return key in self._changed_at
        partition = topic.partitions.get(key[1])
        return (
            partition is not None
            and partition.value.leader is not None
            and len(partition.value.isr) >= topic.min_insync(partition.value)
        )

"""The cluster's metadata, built from records: the controller and every broker hold a copy.

Only `replay` changes it. The controller's handlers (`broker_changes`, `topic_changes`) read it and
return records, which every broker replays once they are committed, in the same order. Start-up is
the same replay over the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayq import messages
from rayq.config import QueueConfig, TopicConfig, as_dict, parse_stored
from rayq.core.access.acls import AclTable
from rayq.core.access.quotas import QuotaTable
from rayq.core.cluster.partition_index import PartitionIndex
from rayq.core.cluster.records import (
    AclCreated,
    AclDeleted,
    BrokerCordoned,
    BrokerFenced,
    BrokerRegistered,
    BrokerRemoved,
    BrokerUnfenced,
    EpochStarted,
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    PrincipalCreated,
    PrincipalDeleted,
    ProducerIdsAllocated,
    QueueChanged,
    QueueDeleted,
    QuotaChanged,
    RemoteDoubted,
    RemoteGarbage,
    RemoteGarbageRemoved,
    RemoteMoved,
    ReplicaGone,
    ReplicaRegistered,
    RequestDone,
    SnapshotPinned,
    SnapshotUnpinned,
    TokenCreated,
    TokenRevoked,
    TopicConfigChanged,
    TopicCreated,
    TopicDeleted,
    Voter,
    VotersChanged,
)
from rayq.errors import FencedEpochError, UnknownQueueError, UnknownTopicError
from rayq.messages.acls import ANY
from rayq.messages.audit import AuditedChange
from rayq.messages.remote_pointer import RemotePointer
from rayq.records import TopicIdPartition

REQUESTS_REMEMBERED_MAX = 1000
"""Maximum number of remembered ids of done requests. A client retries a request for as long as its
call lasts, half a minute by default."""
CHANGES_REMEMBERED_MAX = 5000
"""Maximum number of remembered changes that the audit tells. Those that `__audit` does not have by
then are lost to it."""
MARKS_REMEMBERED_MAX = 1000
"""Maximum number of controller epochs whose marks this cluster can tell from those of another."""


@dataclass(slots=True)
class RegisteredBroker:
    """A broker with its last registration; `live` while its session lasts."""

    registration: BrokerRegistered
    live: bool
    cordoned: bool = False
    """The broker takes no new replicas."""


@dataclass(slots=True)
class Partition:
    """A partition's decided value and the replica processes that registered, by broker."""

    value: PartitionValue
    processes: dict[int, ReplicaRegistered] = field(default_factory=dict)
    remote: RemotePointer | None = None
    """Pointer to the records in the object store. None: there are none."""
    is_remote_doubted: bool = False
    """See `RemoteDoubted`."""


@dataclass(slots=True)
class Topic:
    topic_id: str
    name: str
    config: TopicConfig
    options: Mapping[str, Any]
    """The config's keys that were given; the rest follows the defaults. Keys that only a newer
    version knows are kept as they are."""
    replication_factor: int
    """Replication factor of added partitions: that of the first partition, or its factor after its
    move."""
    was_compacted: bool = False
    """The topic is or was compacted: offsets may have gaps."""
    owner: str | None = None
    """The principal for whose quotas it counts."""
    partitions: dict[int, Partition] = field(default_factory=dict)

    @property
    def whole_config(self) -> dict[str, Any]:
        """The value of every key, default or not, also of keys that only a newer version knows."""
        return {**self.options, **as_dict(self.config)}

    def min_insync(self, value: PartitionValue) -> int:
        """Number of replicas of a partition that must be in sync for it to take writes."""
        return self.config.min_insync(value.replication_factor)


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue with its last change. It reads one topic, forever."""

    queue_id: str
    name: str
    topic_id: str
    config: QueueConfig
    options: Mapping[str, Any]
    """The given keys of the config, as those of a topic."""
    partitions: int
    """Number of partitions of the topic when the queue was created."""

    @property
    def whole_config(self) -> dict[str, Any]:
        """The value of every key, as that of a topic."""
        return {**self.options, **as_dict(self.config)}


@dataclass(frozen=True, slots=True)
class Principal:
    """A principal and its tokens."""

    created: PrincipalCreated
    tokens: dict[str, TokenCreated] = field(default_factory=dict)
    """Tokens by id, the oldest first."""

    def has(self, token_id: str | None, key: bytes | None) -> bool:
        """Returns whether the token of this id is the one whose proofs are checked with this key:
        whoever creates a token chooses its id, which may be that of a revoked one. Both are None
        for a connection without a token, which needs none."""
        if token_id is None:
            return True
        token = self.tokens.get(token_id)
        return token is not None and token.verifiers.stored_key_sha256 == key


class ClusterState:
    """See the module. Lookups return None for a missing object."""

    def __init__(self) -> None:
        self.cluster_id: str | None = None
        self.controller_epoch = 0
        self.controller: tuple[str, int] | None = None
        self.voters: tuple[Voter, ...] = ()
        self.brokers: dict[int, RegisteredBroker] = {}
        self.topics: dict[str, Topic] = {}
        self.topic_ids: dict[str, str] = {}
        self.queues: dict[str, Queue] = {}
        """Queues by id."""
        self.queue_ids: dict[str, str] = {}
        """Queue ids by name."""
        self._queues_of: dict[str, set[str]] = {}
        """Queue ids by topic id."""
        self.moving: set[TopicIdPartition] = set()
        """The partitions that are being moved."""
        self.index = PartitionIndex()
        self.next_producer_id = 0
        self.next_family = 0
        """The next number of a family of producer ids (`messages.transaction_ids`). 0: none was
        drawn, or all were producer ids, as they were once."""
        self.requests_done: dict[str, AuditedChange | None] = {}
        """The ids of clients' requests that changed something, the newest last, with what the audit
        tells of each."""
        self.pins: dict[str, SnapshotPinned] = {}
        """Pins by id: the offsets from which on retention keeps a topic's records."""
        self.garbage: dict[str, RemoteGarbage] = {}
        """Garbage to remove from the object store, by topic id."""
        self.marks: dict[int, str] = {}
        """Marks that this cluster has left in the object store, by controller epoch, oldest first.
        A later mark that is missing here is of another cluster with the same id: a copy of this
        one's disks."""
        self.principals: dict[str, Principal] = {}
        """Principals by name."""
        self.acls = AclTable()
        self.quotas = QuotaTable()

    # --- look-ups ---------------------------------------------------------------------------

    def topic_named(self, name: str) -> Topic | None:
        topic_id = self.topic_ids.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def partition(self, topic_id: str, partition: int) -> Partition | None:
        topic = self.topics.get(topic_id)
        return None if topic is None else topic.partitions.get(partition)

    def takers(self) -> dict[int, str]:
        """The brokers that may take new replicas, and their nodes."""
        return {
            number: broker.registration.node_id
            for number, broker in self.brokers.items()
            if broker.live and not broker.cordoned
        }

    def is_live(self, broker: int) -> bool:
        known = self.brokers.get(broker)
        return known is not None and known.live

    def live_processes(self, partition: Partition) -> dict[int, ReplicaRegistered]:
        """The replica processes that run, on brokers that have a session."""
        return {
            broker: process
            for broker, process in partition.processes.items()
            if self.is_live(broker)
        }

    def all_partitions(self) -> Iterator[tuple[Topic, int, Partition]]:
        for topic in self.topics.values():
            for number, partition in topic.partitions.items():
                yield topic, number, partition

    def replicas_on(self, broker: int) -> Iterator[tuple[Topic, int, Partition]]:
        return self.found(self.index.by_broker.get(broker, ()))

    def found(
        self, keys: Iterable[TopicIdPartition]
    ) -> Iterator[tuple[Topic, int, Partition]]:
        """Those partitions, which exist."""
        for topic_id, number in keys:
            topic = self.topics[topic_id]
            yield topic, number, topic.partitions[number]

    def pinned_offset(self, topic_id: str, partition: int) -> int | None:
        """The lowest pinned offset of a partition, from which on retention keeps its records."""
        starts = (
            pin.starts[partition]
            for pin in self.pins.values()
            if pin.topic_id == topic_id and partition in pin.starts
        )
        return min(starts, default=None)

    def queues_of(self, topic_id: str) -> list[Queue]:
        """The queues that read a topic, by name."""
        queues = (self.queues[queue_id] for queue_id in self._queues_of.get(topic_id, ()))
        return sorted(queues, key=lambda queue: queue.name)

    def changes_after(self, time_ms: int, count_max: int) -> list[AuditedChange]:
        """The oldest changes after that time which the audit tells, at most so many."""
        later: list[AuditedChange] = []
        for change in reversed(self.requests_done.values()):
            if change is not None:
                if change.time_ms <= time_ms:
                    break
                later.append(change)
        return later[::-1][:count_max]

    # --- names, as `rayq.core.access.rights` asks for them -----------------------------------

    def topic_name(self, topic_id: str) -> str | None:
        topic = self.topics.get(topic_id)
        return None if topic is None else topic.name

    other_topic_name = topic_name

    def queue_name(self, queue_id: str) -> str | None:
        queue = self.queues.get(queue_id)
        return None if queue is None else queue.name

    def topic_of_queue(self, name: str) -> str | None:
        queue_id = self.queue_ids.get(name)
        return None if queue_id is None else self.topic_name(self.queues[queue_id].topic_id)

    def topic_exists(self, name: str) -> bool:
        return name in self.topic_ids

    def pinned_topic_id(self, pin_id: str) -> str | None:
        pin = self.pins.get(pin_id)
        return None if pin is None else pin.topic_id

    # --- the only change --------------------------------------------------------------------

    def replay(self, record: MetadataRecord) -> None:
        """Applies one committed record."""
        _REPLAY[type(record)](self, record)

    def _epoch_started(self, record: EpochStarted) -> None:
        self.cluster_id = record.cluster_id
        self.controller_epoch = record.epoch
        self.controller = (record.host, record.port)
        if record.mark:
            self.marks[record.epoch] = record.mark
            if len(self.marks) > MARKS_REMEMBERED_MAX:
                del self.marks[next(iter(self.marks))]

    def _voters_changed(self, record: VotersChanged) -> None:
        self.voters = record.voters
        if not record.clean:
            self.marks.clear()  # Marks of forgotten epochs would pass for another cluster's.

    def _broker_registered(self, record: BrokerRegistered) -> None:
        before = self.brokers.get(record.broker)
        is_cordoned = before is not None and before.cordoned
        self.brokers[record.broker] = RegisteredBroker(record, live=True, cordoned=is_cordoned)
        if before is not None and before.registration.directory_id != record.directory_id:
            # The earlier processes used another disk; they are not this broker's.
            for _, _, partition in self.replicas_on(record.broker):
                partition.processes.pop(record.broker, None)

    def _broker_fenced(self, record: BrokerFenced) -> None:
        broker = self.brokers[record.broker]
        if broker.registration.incarnation == record.incarnation:
            broker.live = False

    def _broker_unfenced(self, record: BrokerUnfenced) -> None:
        broker = self.brokers[record.broker]
        if broker.registration.incarnation == record.incarnation:
            broker.live = True

    def _broker_cordoned(self, record: BrokerCordoned) -> None:
        self.brokers[record.broker].cordoned = record.cordoned

    def _broker_removed(self, record: BrokerRemoved) -> None:
        del self.brokers[record.broker]

    def _topic_created(self, record: TopicCreated) -> None:
        config = parse_stored(TopicConfig, record.config)
        self.topics[record.topic_id] = Topic(
            topic_id=record.topic_id,
            name=record.name,
            config=config,
            options=record.config,
            replication_factor=record.replication_factor,
            was_compacted=record.was_compacted or config.is_compacted,
            owner=record.owner,
        )
        self.topic_ids[record.name] = record.topic_id

    def _topic_config_changed(self, record: TopicConfigChanged) -> None:
        topic = self.topics[record.topic_id]
        topic.config = parse_stored(TopicConfig, record.config)
        topic.options = record.config
        topic.was_compacted |= topic.config.is_compacted

    def _topic_deleted(self, record: TopicDeleted) -> None:
        topic = self.topics.pop(record.topic_id)
        del self.topic_ids[topic.name]
        self.moving = {key for key in self.moving if key[0] != record.topic_id}
        for number, partition in topic.partitions.items():
            self.index.replace((record.topic_id, number), partition.value, None)
        self.pins = {
            pin_id: pin for pin_id, pin in self.pins.items() if pin.topic_id != record.topic_id
        }
        for queue in self.queues_of(record.topic_id):
            del self.queues[queue.queue_id], self.queue_ids[queue.name]
        self._queues_of.pop(record.topic_id, None)

    def _partition_changed(self, record: PartitionChanged) -> None:
        topic = self.topics[record.topic_id]
        partitions = topic.partitions
        if record.partition == 0:
            topic.replication_factor = len(record.value.target or record.value.replicas)
        known = partitions.get(record.partition)
        key = (record.topic_id, record.partition)
        self.index.replace(key, None if known is None else known.value, record.value)
        if known is None:
            partitions[record.partition] = Partition(record.value)
        else:
            known.value = record.value
            for broker in [
                broker for broker in known.processes if broker not in record.value.replicas
            ]:
                # The replica moved away: if the partition comes back, a process must register
                # again. A replica that leaves is a follower that was away for long, in neither ISR
                # nor ELR, so no election depends on it.
                del known.processes[broker]
        if record.value.target:
            self.moving.add(key)
        else:
            self.moving.discard(key)

    def _replica_registered(self, record: ReplicaRegistered) -> None:
        partition = self.topics[record.topic_id].partitions[record.partition]
        partition.processes[record.broker] = record

    def _replica_gone(self, record: ReplicaGone) -> None:
        partition = self.topics[record.topic_id].partitions[record.partition]
        known = partition.processes.get(record.broker)
        if known is not None and known.incarnation == record.incarnation:
            del partition.processes[record.broker]

    def _remote_moved(self, record: RemoteMoved) -> None:
        partition = self.topics[record.topic_id].partitions[record.partition]
        partition.remote, partition.is_remote_doubted = record.pointer, False

    def _remote_doubted(self, record: RemoteDoubted) -> None:
        self.topics[record.topic_id].partitions[record.partition].is_remote_doubted = True

    def _remote_garbage(self, record: RemoteGarbage) -> None:
        self.garbage[record.topic_id] = record
        topic = self.topics.get(record.topic_id)
        for partition in () if topic is None else topic.partitions.values():
            partition.remote, partition.is_remote_doubted = None, False

    def _remote_garbage_removed(self, record: RemoteGarbageRemoved) -> None:
        del self.garbage[record.topic_id]

    def _snapshot_pinned(self, record: SnapshotPinned) -> None:
        self.pins[record.pin_id] = record

    def _snapshot_unpinned(self, record: SnapshotUnpinned) -> None:
        del self.pins[record.pin_id]

    def _queue_changed(self, record: QueueChanged) -> None:
        self.queues[record.queue_id] = Queue(
            queue_id=record.queue_id,
            name=record.name,
            topic_id=record.topic_id,
            config=parse_stored(QueueConfig, record.config),
            options=record.config,
            partitions=record.partitions,
        )
        self.queue_ids[record.name] = record.queue_id
        self._queues_of.setdefault(record.topic_id, set()).add(record.queue_id)

    def _queue_deleted(self, record: QueueDeleted) -> None:
        del self.queue_ids[self.queues.pop(record.queue_id).name]
        queues = self._queues_of[record.topic_id]
        queues.discard(record.queue_id)
        if not queues:
            # A snapshot knows nothing of a topic without queues.
            del self._queues_of[record.topic_id]

    def _producer_ids_allocated(self, record: ProducerIdsAllocated) -> None:
        self.next_producer_id = record.next_producer_id
        self.next_family = record.next_family or self.next_family

    def _request_done(self, record: RequestDone) -> None:
        done = self.requests_done
        done[record.request_id] = record.change
        while len(done) > REQUESTS_REMEMBERED_MAX:
            oldest = next(iter(done))
            if done[oldest] is not None and len(done) <= CHANGES_REMEMBERED_MAX:
                break
            del done[oldest]

    def _principal_created(self, record: PrincipalCreated) -> None:
        self.principals[record.name] = Principal(record)

    def _principal_deleted(self, record: PrincipalDeleted) -> None:
        del self.principals[record.name]
        for acl in [acl for acl in self.acls if acl.principal == record.name]:
            self.acls.remove(acl)
        self.quotas.forget(record.name)
        for topic in self.topics.values():
            if topic.owner == record.name:
                topic.owner = None  # A later principal of that name did not create it.

    def _token_created(self, record: TokenCreated) -> None:
        self.principals[record.principal].tokens[record.token_id] = record

    def _token_revoked(self, record: TokenRevoked) -> None:
        del self.principals[record.principal].tokens[record.token_id]

    def _acl_created(self, record: AclCreated) -> None:
        self.acls.add(record.acl)

    def _acl_deleted(self, record: AclDeleted) -> None:
        self.acls.remove(record.acl)

    def _quota_changed(self, record: QuotaChanged) -> None:
        self.quotas.replace(record.principal, record.client_id, record.limits)

    # --- snapshot ---------------------------------------------------------------------------

    def access_records(self) -> list[MetadataRecord]:
        """Records of the principals, tokens, ACLs and quotas."""
        records: list[MetadataRecord] = []
        for principal in self.principals.values():
            records.append(principal.created)
            records.extend(principal.tokens.values())
        records.extend(AclCreated(acl) for acl in self.acls)
        records.extend(
            QuotaChanged(quota.principal, quota.client_id, quota.limits) for quota in self.quotas
        )
        return records

    def snapshot(self) -> list[MetadataRecord]:
        """Records that build this very state from an empty one."""
        records: list[MetadataRecord] = []
        if self.cluster_id is not None and self.controller is not None:
            host, port = self.controller
            marks = {**self.marks, self.controller_epoch: self.marks.get(self.controller_epoch, "")}
            records.extend(
                EpochStarted(epoch, host, port, self.cluster_id, mark)
                for epoch, mark in marks.items()
            )
        records.append(VotersChanged(self.voters))
        for number, broker in self.brokers.items():
            records.append(broker.registration)
            if not broker.live:
                records.append(BrokerFenced(number, broker.registration.incarnation))
            if broker.cordoned:
                records.append(BrokerCordoned(number, True))
        records.extend(self.garbage.values())
        for topic in self.topics.values():
            records.append(
                TopicCreated(
                    topic.topic_id,
                    topic.name,
                    topic.options,
                    topic.replication_factor,
                    topic.was_compacted,
                    topic.owner,
                )
            )
            for number, partition in topic.partitions.items():
                records.append(PartitionChanged(topic.topic_id, number, partition.value))
                records.extend(partition.processes.values())
                if partition.remote is not None:
                    records.append(RemoteMoved(topic.topic_id, number, partition.remote))
                if partition.is_remote_doubted:
                    records.append(RemoteDoubted(topic.topic_id, number))
        records.extend(
            QueueChanged(
                queue.queue_id, queue.name, queue.topic_id, queue.options, queue.partitions
            )
            for queue in self.queues.values()
        )
        records.extend(self.pins.values())
        records.extend(self.access_records())
        records.append(ProducerIdsAllocated(self.next_producer_id, self.next_family))
        records.extend(RequestDone(*done) for done in self.requests_done.items())
        return records

    def validate(self) -> None:
        """Checks the invariants of every state; for tests and the simulation. Raises
        AssertionError."""
        for name, topic_id in self.topic_ids.items():
            assert self.topics[topic_id].name == name
        index = PartitionIndex()
        for topic, number, partition in self.all_partitions():
            index.replace((topic.topic_id, number), None, partition.value)
            value, where = partition.value, f"{topic.name}-{number}: {partition.value}"
            isr = [member.broker for member in value.isr]
            elr = [member.broker for member in value.elr]
            assert value.replicas, where
            assert len(set(value.replicas)) == len(value.replicas), where
            assert set(isr) <= set(value.replicas), where
            assert set(elr) <= set(value.replicas), where
            assert not set(isr) & set(elr), where
            assert len(set(isr)) == len(isr), where
            assert set(partition.processes) <= set(value.replicas), where
            assert ((topic.topic_id, number) in self.moving) == bool(value.target), where
            assert bool(value.target) == bool(value.origin), where
            if value.target:
                removing = tuple(broker for broker in value.origin if broker not in value.target)
                assert value.replicas == (*value.target, *removing), where
            if value.leader is None:
                assert value.leader_incarnation is None, where
            else:
                assert any(
                    member.broker == value.leader
                    and member.incarnation == value.leader_incarnation
                    for member in value.isr
                ), where
            if partition.remote is not None:
                assert topic.config.remote_storage, where
                assert topic.topic_id not in self.garbage, where
                assert partition.remote.start <= partition.remote.end, f"{where} {partition.remote}"
                for garbage in self.garbage.values():
                    assert not partition.remote.manifest.startswith(garbage.prefixes), where
        assert self.index == index, (self.index, index)
        for pin in self.pins.values():
            assert pin.topic_id in self.topics, pin
        for name, queue_id in self.queue_ids.items():
            assert self.queues[queue_id].name == name
        for queue in self.queues.values():
            assert queue.topic_id in self.topics, queue
            assert self.queue_ids[queue.name] == queue.queue_id, queue
            assert queue in self.queues_of(queue.topic_id), queue
        assert sum(map(len, self._queues_of.values())) == len(self.queues)
        for acl in self.acls:
            assert acl.principal == ANY or acl.principal in self.principals, acl
        for quota in self.quotas:
            assert quota.limits, quota
            assert quota.principal is None or quota.principal in self.principals, quota
            assert quota.principal is not None or quota.client_id is None, quota
        assert list(self.marks) == sorted(self.marks), self.marks


def find_topic(state: ClusterState, name: str) -> Topic:
    """The topic of that name. Raises UnknownTopicError."""
    topic = state.topic_named(name)
    if topic is None:
        raise UnknownTopicError(f"There is no topic {name!r}.")
    return topic


def find_led_partition(
    state: ClusterState, request: messages.AlterPartition | messages.MoveRemote
) -> tuple[Topic, Partition]:
    """The partition that a leader's request is about. Raises UnknownTopicError, FencedEpochError if
    the sender is not the leader of this epoch."""
    topic = state.topics.get(request.topic_id)
    known = None if topic is None else topic.partitions.get(request.partition)
    if topic is None or known is None:
        raise UnknownTopicError(
            f"No partition {request.partition} of a topic with id {request.topic_id}."
        )
    value = known.value
    sender = (request.broker, request.incarnation, request.leader_epoch)
    if (value.leader, value.leader_incarnation, value.leader_epoch) != sender:
        raise FencedEpochError(
            f"Broker {request.broker} does not lead {topic.name}-{request.partition} in epoch "
            f"{request.leader_epoch} under this incarnation: the leader is {value.leader} in epoch "
            f"{value.leader_epoch}."
        )
    return topic, known


def find_queue(state: ClusterState, name: str) -> Queue:
    """The queue of that name. Raises UnknownQueueError."""
    queue_id = state.queue_ids.get(name)
    if queue_id is None:
        raise UnknownQueueError(f"There is no queue {name!r}.")
    return state.queues[queue_id]


_REPLAY: dict[type[MetadataRecord], Callable[[ClusterState, Any], None]] = {
    EpochStarted: ClusterState._epoch_started,
    VotersChanged: ClusterState._voters_changed,
    BrokerRegistered: ClusterState._broker_registered,
    BrokerFenced: ClusterState._broker_fenced,
    BrokerUnfenced: ClusterState._broker_unfenced,
    TopicCreated: ClusterState._topic_created,
    TopicConfigChanged: ClusterState._topic_config_changed,
    TopicDeleted: ClusterState._topic_deleted,
    PartitionChanged: ClusterState._partition_changed,
    ReplicaRegistered: ClusterState._replica_registered,
    ReplicaGone: ClusterState._replica_gone,
    ProducerIdsAllocated: ClusterState._producer_ids_allocated,
    BrokerCordoned: ClusterState._broker_cordoned,
    BrokerRemoved: ClusterState._broker_removed,
    RequestDone: ClusterState._request_done,
    RemoteMoved: ClusterState._remote_moved,
    RemoteDoubted: ClusterState._remote_doubted,
    RemoteGarbage: ClusterState._remote_garbage,
    RemoteGarbageRemoved: ClusterState._remote_garbage_removed,
    SnapshotPinned: ClusterState._snapshot_pinned,
    SnapshotUnpinned: ClusterState._snapshot_unpinned,
    QueueChanged: ClusterState._queue_changed,
    QueueDeleted: ClusterState._queue_deleted,
    PrincipalCreated: ClusterState._principal_created,
    PrincipalDeleted: ClusterState._principal_deleted,
    TokenCreated: ClusterState._token_created,
    TokenRevoked: ClusterState._token_revoked,
    AclCreated: ClusterState._acl_created,
    AclDeleted: ClusterState._acl_deleted,
    QuotaChanged: ClusterState._quota_changed,
}

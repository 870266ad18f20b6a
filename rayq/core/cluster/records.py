"""The records of the metadata log: nothing else changes the cluster's state.

Each is a msgpack array with its class name as tag. Fields may be appended with a default, never
reordered or removed: a log outlives the software that wrote it. An older version passes over a
further field, and gives up its session at a record that it does not know. So anything that takes a
right away, such as a condition of an ACL, is another record and not a further field.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rayq.messages.access import TokenVerifiers
from rayq.messages.acls import Acl
from rayq.messages.audit import AuditedChange
from rayq.messages.remote_pointer import RemotePointer


class MetadataRecord(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of the records."""


class Member(msgspec.Struct, array_like=True, frozen=True):
    """A replica as a member of an in-sync set, with its disk and its process.

    `stopped_at` is where its log ended, `(last epoch, end offset)`, when it was stopped in a
    controlled way: a process that returns with exactly this log counts as not restarted.
    """

    broker: int
    directory_id: str
    incarnation: str
    stopped_at: tuple[int | None, int] | None = None


class PartitionValue(msgspec.Struct, array_like=True, frozen=True):
    """All that is decided about a partition. A change replaces the whole value.

    `isr` is the in-sync set. `elr` (eligible leader replicas, KIP-966) are the replicas that left
    it while too few were left in it: they hold every committed record. `last_unclean_epoch` is the
    last leader epoch whose leader was elected from neither. `leader_epoch` 0: no replica led yet.

    While a move is in progress (KIP-455) `target` are the replicas that the move ends with,
    `origin` those from before, and `replicas` all of both, the target first. Both are empty
    otherwise.
    """

    replicas: tuple[int, ...]
    isr: tuple[Member, ...] = ()
    elr: tuple[Member, ...] = ()
    leader: int | None = None
    leader_incarnation: str | None = None
    leader_epoch: int = 0
    partition_epoch: int = 0
    last_unclean_epoch: int | None = None
    target: tuple[int, ...] = ()
    origin: tuple[int, ...] = ()
    throttle_bytes_per_s: int | None = None
    """Maximum rate at which each added replica copies while it is not in sync; None: no limit."""
    placed_epoch: int = 0
    """The partition epoch in which replicas were added last. A broker that reports a replica
    process on older knowledge may mean one of an earlier placement, whose directory it removes."""
    restored_epoch: int = 0
    """The partition was created with remote records of leader epochs up to this one: its own leader
    epochs begin above it."""

    @property
    def replication_factor(self) -> int:
        """Number of replicas, without those that a current move only adds: with them, a majority of
        six would be four. `min_insync_replicas` follows from this number, so one record that
        completes a move may ask for more in sync, or fewer."""
        return len(self.origin or self.replicas)

    @property
    def adding(self) -> tuple[int, ...]:
        return tuple(broker for broker in self.target if broker not in self.origin)

    @property
    def removing(self) -> tuple[int, ...]:
        return tuple(broker for broker in self.origin if broker not in self.target)


class Voter(msgspec.Struct, array_like=True, frozen=True):
    """A broker that keeps the metadata log, in this very data directory."""

    broker: int
    directory_id: str


class EpochStarted(MetadataRecord, frozen=True):
    """The first record of each controller epoch. Once it is committed, so is everything before
    it."""

    epoch: int
    host: str
    port: int
    cluster_id: str
    mark: str = ""
    """A random id, if the cluster has an object store: see `ClusterState.marks`."""


class VotersChanged(MetadataRecord, frozen=True):
    """A set of voters with one more or one fewer (at the cluster's formatting all come at once)."""

    voters: tuple[Voter, ...]
    clean: bool = True
    """False: forced by an operator after the majority was lost."""


class BrokerRegistered(MetadataRecord, frozen=True):
    """A new process of a broker. Its session begins."""

    broker: int
    directory_id: str
    start_counter: int
    incarnation: str
    host: str
    port: int
    node_id: str
    replicas_max: int


class BrokerFenced(MetadataRecord, frozen=True):
    """A broker's session ended, by silence or by a controlled stop."""

    broker: int
    incarnation: str


class BrokerUnfenced(MetadataRecord, frozen=True):
    """The same process of a broker was heard again after its session had ended."""

    broker: int
    incarnation: str


class BrokerCordoned(MetadataRecord, frozen=True):
    """A change of a broker's `cordoned` flag. A cordoned broker takes no new replicas, and gives up
    its vote if another broker can have it."""

    broker: int
    cordoned: bool


class BrokerRemoved(MetadataRecord, frozen=True):
    """A broker that was ended for good is forgotten. It held no replicas."""

    broker: int


class TopicCreated(MetadataRecord, frozen=True):
    topic_id: str
    name: str
    config: Mapping[str, Any]
    replication_factor: int
    was_compacted: bool = False
    """The topic was compacted once, though its config may not say so any more."""
    owner: str | None = None
    """The principal that created it, for whose quotas it counts. None: a superuser, or nobody."""


class TopicConfigChanged(MetadataRecord, frozen=True):
    topic_id: str
    config: Mapping[str, Any]


class TopicDeleted(MetadataRecord, frozen=True):
    topic_id: str


class PartitionChanged(MetadataRecord, frozen=True):
    """The partition's new value; the first of a partition creates it."""

    topic_id: str
    partition: int
    value: PartitionValue


class ReplicaRegistered(MetadataRecord, frozen=True):
    """A replica process runs: where it listens and what its disk held when it started."""

    topic_id: str
    partition: int
    broker: int
    directory_id: str
    incarnation: str
    host: str
    port: int
    last_epoch: int | None
    flushed: int


class ReplicaGone(MetadataRecord, frozen=True):
    """A replica process ended, or its replica stopped on a disk error."""

    topic_id: str
    partition: int
    broker: int
    incarnation: str


class RemoteMoved(MetadataRecord, frozen=True):
    """The partition's new remote pointer. The partition epoch stays as it is."""

    topic_id: str
    partition: int
    pointer: RemotePointer


class RemoteDoubted(MetadataRecord, frozen=True):
    """The metadata came back from an older copy: the partition's remote pointer may be old, or
    missing. Its leader adopts the newest manifest of the object store before it appends. The next
    `RemoteMoved` ends the doubt."""

    topic_id: str
    partition: int


class RemoteGarbage(MetadataRecord, frozen=True):
    """A topic with remote objects was deleted, or gave them up: its partitions have no pointers any
    more, and all that it has in the object store is to be removed."""

    topic_id: str
    name: str
    deleted_ms: int
    prefixes: tuple[str, ...]
    """Prefixes of the names of its objects. A topic that was restored has the objects of the topic
    that it was restored from."""
    is_removing: bool = False
    """A broker has begun to delete them: nobody restores them from then on. Until it says so no
    object is deleted."""


class RemoteGarbageRemoved(MetadataRecord, frozen=True):
    """Nothing of that topic is left to be removed from the object store."""

    topic_id: str


class SnapshotPinned(MetadataRecord, frozen=True):
    """A pin: for `ttl_ms`, or until `SnapshotUnpinned`, retention keeps all records of these
    partitions from the given offsets on. The same id again renews it. The time counts from when the
    controller decided it; a new controller counts from its own start."""

    pin_id: str
    topic_id: str
    starts: Mapping[int, int]
    """Partition to offset."""
    ttl_ms: int
    owner: str | None = None
    """The named principal that has pinned it. None: a superuser, or a server."""


class SnapshotUnpinned(MetadataRecord, frozen=True):
    pin_id: str
    topic_id: str


class QueueChanged(MetadataRecord, frozen=True):
    """A queue's whole value; the first record of an id creates it. `config` has the keys that were
    given."""

    queue_id: str
    name: str
    topic_id: str
    config: Mapping[str, Any]
    partitions: int
    """Number of partitions of the topic when the queue was created."""


class QueueDeleted(MetadataRecord, frozen=True):
    queue_id: str
    topic_id: str


class ProducerIdsAllocated(MetadataRecord, frozen=True):
    """Producer ids below `next_producer_id` are handed out, and numbers of families below
    `next_family`. 0: it does not say."""

    next_producer_id: int
    next_family: int = 0


class PrincipalCreated(MetadataRecord, frozen=True):
    """A principal exists from now on."""

    name: str
    salt: bytes
    created_ms: int


class PrincipalDeleted(MetadataRecord, frozen=True):
    """A principal is gone, with all its tokens, ACLs and quotas."""

    name: str


class TokenCreated(MetadataRecord, frozen=True):
    """A token of a principal, as servers know it. A second record of the same id has it expire
    sooner."""

    principal: str
    token_id: str
    verifiers: TokenVerifiers
    created_ms: int
    expires_ms: int | None
    """None: it does not expire."""


class TokenRevoked(MetadataRecord, frozen=True):
    principal: str
    token_id: str


class AclCreated(MetadataRecord, frozen=True):
    acl: Acl


class AclDeleted(MetadataRecord, frozen=True):
    acl: Acl


class QuotaChanged(MetadataRecord, frozen=True):
    """All limits of a principal, of one of its client ids, or by default of each principal."""

    principal: str | None
    client_id: str | None
    limits: Mapping[str, float]
    """Empty: it has none any more."""


ACCESS_RECORDS = (
    PrincipalCreated,
    PrincipalDeleted,
    TokenCreated,
    TokenRevoked,
    AclCreated,
    AclDeleted,
    QuotaChanged,
)
"""Records of principals, their tokens, ACLs and quotas."""


class RequestDone(MetadataRecord, frozen=True):
    """The records before this one are what a client's request asked for: if the client asks again
    under the same id, because the answer was lost, it is done already."""

    request_id: str
    """Id of the request: the name of the principal that sent it, if any, and a space, then the id
    that the client drew. So nobody repeats the request of another."""
    change: AuditedChange | None = None
    """None: the audit does not tell it, or the cluster had no principals yet."""


RECORDS: tuple[type[MetadataRecord], ...] = tuple(MetadataRecord.__subclasses__())


class Together(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Several records as one entry of the log: a controller that dies leaves all of them, or none.
    """

    records: tuple[msgspec.Raw, ...]


_UNION: Any = functools.reduce(operator.or_, RECORDS)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_UNION)
_entry_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_UNION | Together)
_list_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[_UNION])
_raw_list_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
STEP_RECORDS = 1000
"""Number of a snapshot's records that are decoded and replayed in one go: 20 ms of work."""


def encode_record(record: MetadataRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(data: bytes | memoryview) -> MetadataRecord:
    """The record of these bytes. Raises msgspec.DecodeError."""
    record: MetadataRecord = _decoder.decode(data)
    return record


def encode_together(records: Sequence[MetadataRecord]) -> bytes:
    """The entry of the log that has all these records."""
    return _encoder.encode(
        Together(tuple(msgspec.Raw(encode_record(record)) for record in records))
    )


def decode_entry(data: bytes | memoryview) -> list[MetadataRecord]:
    """The records of one entry of the log. Raises msgspec.DecodeError."""
    entry: MetadataRecord | Together = _entry_decoder.decode(data)
    if isinstance(entry, Together):
        return [decode_record(record) for record in entry.records]
    return [entry]


def encode_records(records: list[MetadataRecord]) -> bytes:
    return _encoder.encode(records)


def decode_records(data: bytes | memoryview) -> list[MetadataRecord]:
    """The records of these bytes. Raises msgspec.DecodeError."""
    records: list[MetadataRecord] = _list_decoder.decode(data)
    return records


def decode_in_steps(data: bytes | memoryview) -> Iterator[list[MetadataRecord]]:
    """The records of these bytes, STEP_RECORDS at once: an event loop that takes up a large
    snapshot does other work in between. Raises msgspec.DecodeError."""
    raw_records = _raw_list_decoder.decode(data)
    for first in range(0, len(raw_records), STEP_RECORDS):
        yield [decode_record(raw) for raw in raw_records[first : first + STEP_RECORDS]]

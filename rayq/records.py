"""The values that users see: records, positions and descriptions of topics and brokers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import msgspec

if TYPE_CHECKING:  # Only Python 3.13 has defaults for type variables; type checkers know them.
    from typing_extensions import TypeVar

    ValueT_co = TypeVar("ValueT_co", default=bytes | None, covariant=True)
    KeyT_co = TypeVar("KeyT_co", default=bytes | None, covariant=True)
else:
    from typing import TypeVar

    ValueT_co = TypeVar("ValueT_co", covariant=True)
    KeyT_co = TypeVar("KeyT_co", covariant=True)

Headers = list[tuple[str, bytes]]


class OfValueAndKey:
    """A generic class whose second type may be left out at runtime, too: `Record[Order]`."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __class_getitem__(cls, types: Any) -> Any:
            given = types if isinstance(types, tuple) else (types,)
            return super().__class_getitem__(given if len(given) > 1 else (*given, bytes | None))


TopicIdPartition = tuple[str, int]
"""`(topic id, partition)`: what a partition is called within the servers."""


class TopicPartition(NamedTuple):
    """One partition of a topic; hashable."""

    topic: str
    partition: int


class Record(OfValueAndKey, msgspec.Struct, Generic[ValueT_co, KeyT_co], frozen=True, gc=False):
    """One record as a consumer sees it.

    `key` and `value` are bytes or None (a None value is a tombstone in a compacted topic), or what
    the consumer's deserializers make of the bytes: `Record[Order]` is one whose value is an
    `Order`, `Record[Order, str]` one whose key is a str, too. `headers` keeps order and duplicates,
    `[]` when there are none; `timestamp_ms` is Unix time.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: KeyT_co
    value: ValueT_co
    headers: Headers


class Outgoing(msgspec.Struct, frozen=True):
    """A record to send, which the handler of a consumer pool with `exactly_once` returns. The
    fields mean what the arguments of `producer.send` mean."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Iterable[tuple[str, bytes]] | None = None
    partition: int | None = None
    timestamp_ms: int | None = None


class RecordMetadata(NamedTuple):
    """The position at which a record was written. `offset` is None under acks=0, which waits for no
    answer."""

    topic: str
    partition: int
    offset: int | None
    timestamp_ms: int


class OffsetRange(NamedTuple):
    """Records of one partition with offsets `start <= offset < end`."""

    topic: str
    partition: int
    start: int
    end: int


class OffsetAndMetadata(NamedTuple):
    """A position to commit, or committed: the offset of the next record, and a text of the user's
    own (up to 4096 characters)."""

    offset: int
    metadata: str = ""


class GroupMembership(NamedTuple):
    """A consumer's place in its group. `member_epoch` is 0 while it is not in the group. Whoever
    knows the whole `member` can commit and leave in its place: do not publish it."""

    group: str
    member: str
    member_epoch: int
    instance: str | None


class ReplicaInfo(msgspec.Struct, frozen=True):
    """One replica of a partition as it answered just now; what follows the port is None when it did
    not answer."""

    broker: int
    host: str | None
    port: int | None
    pid: int | None
    log_start_offset: int | None
    high_watermark: int | None
    log_end_offset: int | None
    size_bytes: int | None = None
    """The size of its log on disk."""
    disk_free_bytes: int | None = None
    """The free space of the log's file system."""
    trouble: str | None = None
    """The reason why a follower makes no progress, such as a full disk; None: it knows of none."""


class PartitionInfo(msgspec.Struct, frozen=True):
    """One partition: `leader` is a broker id, None while offline (`offline_reason` says why)."""

    partition: int
    leader: int | None
    leader_epoch: int
    isr: list[int]
    replicas: list[ReplicaInfo]
    offline_reason: str | None = None
    target: list[int] = []
    """While the partition is being moved: the brokers whose replicas stay in the end."""
    origin: list[int] = []
    """While the partition is being moved: the brokers that had its replicas before."""
    remote_end_offset: int | None = None
    """The object store has the records from the log start up to this offset (exclusive); None: it
    has nothing."""
    remote_bytes: int = 0
    """The size of its records in the object store."""


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic, its partitions in order and its whole config (defaults included)."""

    name: str
    topic_id: str
    partitions: list[PartitionInfo]
    config: Mapping[str, object]


class BrokerInfo(msgspec.Struct, frozen=True):
    """One broker; `live` says whether it holds a session with the controller."""

    broker: int
    host: str
    port: int
    node_id: str
    live: bool
    cordoned: bool = False
    """The broker takes no new replicas: it is being drained, or was."""


class Reassignment(msgspec.Struct, frozen=True):
    """A partition that is being moved.

    `replicas` are all that there are now, `target` those that stay, of which `adding` are new and
    copy the log; `removing` go when the whole target is in sync. `waits_for` says what still lacks,
    and why where that is known (a broker that is not running, a disk that is full).
    """

    topic_partition: TopicPartition
    replicas: list[int]
    adding: list[int]
    removing: list[int]
    target: list[int]
    throttle_bytes_per_s: int | None = None
    waits_for: str | None = None


class DrainProgress(msgspec.Struct, frozen=True):
    """The progress of a drain: partitions that have left the broker, those that are moving, and
    those that wait for their turn. `waits_for` has what the moves lack, by partition."""

    done: int
    moving: int
    waiting: int
    waits_for: dict[TopicPartition, str]


class ClusterInfo(msgspec.Struct, frozen=True):
    """The cluster: `controller` is `host:port` of the acting controller, `voters` the brokers that
    keep the metadata log."""

    cluster_id: str
    brokers: list[BrokerInfo]
    controller: str | None
    controller_epoch: int
    voters: list[int]


class GroupListing(msgspec.Struct, frozen=True):
    """A group in a list: `state` is "empty", "stable" or "rebalancing"."""

    group: str
    state: str
    members: int


class GroupMemberInfo(msgspec.Struct, frozen=True):
    """A member of a group: `member` is the beginning of its id, `client` names its host and
    process, `instance` is the `group_instance_id` of a static member. `revoking` are partitions
    that it has been asked to give up and still holds."""

    member: str
    client: str
    instance: str | None
    member_epoch: int
    assigned: list[TopicPartition]
    revoking: list[TopicPartition]


class GroupOffset(msgspec.Struct, frozen=True):
    """The position of a group in one partition. `offset` (and with it `lag`) is None before the
    first commit, `end_offset` and `lag` while the partition's leader cannot be asked. `member` owns
    the partition now; None: no member does."""

    offset: int | None
    end_offset: int | None
    lag: int | None
    metadata: str
    commit_time_ms: int | None
    member: str | None


class GroupInfo(msgspec.Struct, frozen=True):
    """A group. `epoch` grows with each rebalance; reason and time (Unix, milliseconds) are of the
    last rebalance."""

    group: str
    state: str
    epoch: int
    assignor: str
    members: list[GroupMemberInfo]
    partitions: dict[TopicPartition, GroupOffset]
    """Every partition that is assigned or has a committed offset, sorted."""
    rebalance_reason: str
    rebalance_time_ms: int

    @property
    def lag(self) -> int:
        """The sum over all partitions whose lag is known."""
        return sum(
            position.lag for position in self.partitions.values() if position.lag is not None
        )


class TransactionListing(msgspec.Struct, frozen=True):
    """A transaction in a list. `state` is "open", or "committing" or "aborting" while it is decided
    and some partitions lack its marker; "ready" is the next one of an id that has none under way.
    That of a batch write is "sealed" between its last record and its decision.
    `producer_id` and `epoch` name it in errors and logs."""

    transactional_id: str
    state: str
    producer_id: int
    epoch: int
    age_ms: int | None
    """The time since its first partition joined; None for "ready"."""
    transaction_timeout_ms: int
    partitions: int

    @property
    def is_hanging(self) -> bool:
        """True if it should have ended a minute ago, by its timeout at the latest."""
        return self.age_ms is not None and self.age_ms > self.transaction_timeout_ms + 60_000


class TransactionParticipant(msgspec.Struct, frozen=True):
    """A partition that takes part in the transaction of this `producer_id` and `epoch`. A partition
    of `__consumer_offsets` takes part with positions of a group."""

    producer_id: int
    epoch: int
    topic_partition: TopicPartition
    has_marker: bool
    """True if readers of the partition see how the transaction ended."""


class TransactionInfo(msgspec.Struct, frozen=True):
    """A transactional id: `owner` tells the producer that has it now from others (the beginning of
    the name that it drew at its start), `last_name` is the name of its last named transaction that
    committed."""

    transactional_id: str
    owner: str
    transaction_timeout_ms: int
    last_name: str | None
    transactions: list[TransactionListing]
    """Those under way, the oldest first; else the next one."""
    participants: list[TransactionParticipant]


class HangingTransaction(msgspec.Struct, frozen=True):
    """A transaction that is open in a partition, and of which its coordinator knows nothing: so
    nobody ends it, and readers of what is committed wait at `first_offset`."""

    topic_partition: TopicPartition
    producer_id: int
    epoch: int
    first_offset: int


class RemotePartitionInfo(msgspec.Struct, frozen=True):
    """The state of a partition in the object store, as its leader answered just now. The following
    fields are None where no leader answered; `trouble` says why."""

    topic_partition: TopicPartition
    log_start_offset: int | None
    """The first readable offset."""
    local_start_offset: int | None
    """The first one that the leader has on its own disk."""
    remote_end_offset: int | None
    """The first one that is not in the object store; None, too, where nothing is."""
    high_watermark: int | None
    remote_bytes: int | None
    """The size of its records in the object store."""
    lag_bytes: int | None
    """The size of closed segments that are not in the object store yet."""
    lag_ms: int | None
    """The time since the oldest of them could have been stored."""
    trouble: str | None
    """The reason why nothing is stored now. None: it works."""


class RemoteProblem(msgspec.Struct, frozen=True):
    """An object that is missing, or is not what was stored."""

    object: str
    start_offset: int
    end_offset: int
    """Exclusive."""
    what: str


class RemoteVerification(msgspec.Struct, frozen=True):
    """The result of a check of a partition's objects."""

    topic_partition: TopicPartition
    checked_objects: int
    problems: list[RemoteProblem]
    repaired: list[str]
    """The objects with problems that were replaced by objects made from the leader's own records.
    """


class SnapshotPin(msgspec.Struct, frozen=True):
    """Retention keeps a topic's records from these offsets on (by partition): for a batch job, or
    since the topic was restored. Unless it is renewed it ends after `ttl_ms`."""

    pin_id: str
    topic: str
    starts: dict[int, int]
    ttl_ms: int


class DeletedRemoteTopic(msgspec.Struct, frozen=True):
    """A deleted topic that still has objects in the object store."""

    name: str
    topic_id: str
    deleted_ms: int


class ObjectStoreInfo(msgspec.Struct, frozen=True):
    """The cluster's object store, as its brokers told just now."""

    url: str | None
    """None: it has none."""
    troubles: dict[int, str]
    """Brokers that do not reach it, and why."""
    pins: list[SnapshotPin]
    """The pins that hold retention back."""
    garbage: list[DeletedRemoteTopic]
    """Deleted topics that still have objects there."""


class TokenInfo(msgspec.Struct, frozen=True):
    """A token of a principal, without its secret part; times are Unix time."""

    token_id: str
    created_ms: int
    expires_ms: int | None
    """The token is refused from then on. None: it does not expire."""


class PrincipalInfo(msgspec.Struct, frozen=True):
    """A principal: a program or a person that has rights of its own."""

    name: str
    created_ms: int
    tokens: list[TokenInfo]
    """The oldest first; also those that have expired, until the next one is created."""

    @property
    def tokens_end_ms(self) -> int | None:
        """Unix time from which on none of its tokens is valid. None: it has none, or one that does
        not expire."""
        ends = [token.expires_ms for token in self.tokens if token.expires_ms is not None]
        return max(ends) if ends and len(ends) == len(self.tokens) else None


class QuotaInfo(msgspec.Struct, frozen=True):
    """A limit that holds for a principal, and how far it is used up, as the processes that answered
    told just now."""

    name: str
    value: float
    client_id: str | None
    """None: for all clients of the principal without such a limit of their own."""
    is_default: bool
    """True if it is the limit of each principal that has no such limit of its own."""
    throttled_s: float = 0.0
    """Time in seconds so far in which a rate was used up, since the start of the processes, in the
    one where that was longest."""
    wait_s: float = 0.0
    """Time in seconds until a rate is no longer used up, in the process where that takes longest.
    Infinite where nothing is allowed."""


class QueuePartitionInfo(msgspec.Struct, frozen=True):
    """The state of a queue in one partition of its topic, as its leader answered just now. The
    fields after the partition are None where no leader answered; `trouble` says why."""

    partition: int
    trouble: str | None = None
    """The reason why it cannot deliver records, or write its dead letters. None: it works."""
    start_offset: int | None = None
    """All below is settled."""
    end_offset: int | None = None
    """Records from here on are not given out yet."""
    ready: int | None = None
    """Records that could be taken now."""
    blocked: int | None = None
    """Records that wait for an earlier one of their key (`ordered_by_key`)."""
    locked: int | None = None
    """Records that consumers hold."""
    delayed: int | None = None
    """Records that wait for their time."""
    moving: int | None = None
    """Records that failed for good and are being written to the dead letters."""
    dead: int | None = None
    """Records moved to the dead letters since this leader began."""
    expired: int | None = None
    """Records that retention removed before they were settled, since this leader began."""
    oldest_ready_ms: int | None = None
    """The time that the oldest record that could be taken has waited."""
    next_due_ms: int | None = None
    """The time until the next delayed record is due."""
    waiting_takes: int | None = None
    """Consumers that wait for records."""
    oldest_locked_ms: int | None = None
    """The time that a consumer has held the record that was taken first, since this leader began.
    """
    oldest_holder: str | None = None
    """The consumer that holds it: its host and process, and a random part."""


class QueueInfo(msgspec.Struct, frozen=True):
    """A queue, its partitions in order and its whole config (defaults included)."""

    name: str
    queue_id: str
    topic: str
    partitions: list[QueuePartitionInfo]
    config: Mapping[str, object]


class QueueRecordInfo(msgspec.Struct, frozen=True):
    """An unsettled record of a queue. `state` is "ready", "locked", "delayed" or "moving"; `count`
    is how often it was handed to a user: of these deliveries a queue allows `max_deliveries`."""

    topic_partition: TopicPartition
    offset: int
    state: str
    count: int
    holder: str | None
    """The consumer that has it, while it is locked: the beginning of its name."""
    due_ms: int | None
    """Unix time at which its delay ends; for a lock, how many ms are left of it."""


class MovedRecords(msgspec.Struct, frozen=True):
    """The outcome for the records of one partition that were to be moved out of a queue."""

    moved: list[int]
    """The offsets that are settled by it, or were before."""
    refused: dict[int, str]
    """The reason why each other record was not moved, by offset."""


class PoolConsumer(msgspec.Struct, frozen=True):
    """One consumer of a pool. `state` is "pending" (it waits for room on a node, or starts),
    "running" or "draining" (it finishes its batch and leaves). The counts are since its start;
    `problem` is what it last failed with, None once all is well again."""

    consumer: str
    state: str
    node: str
    pid: int | None
    partitions: list[int]
    records: int
    retries: int
    dead_letters: int
    problem: str | None


class PoolStatus(msgspec.Struct, frozen=True):
    """A consumer pool as it saw itself last."""

    name: str
    topic: str
    group: str
    wanted: int
    """The number of consumers that should run, for the `reason` that follows."""
    reason: str
    consumers: list[PoolConsumer]
    partitions: int
    lag: int | None
    """The number of records that were not handled and committed at the last measurement; None
    before the first."""
    lag_s: float
    """The age of the oldest of these, in seconds since it was seen to come in."""
    lag_slope: float
    """Seconds of lag that are added each second."""
    target_lag_s: float
    incoming_per_s: float
    handled_per_s: float
    capacity_per_s: float | None
    """Records that one consumer can handle each second; None before that was measured."""
    records: int
    """The number of records handled by all consumers that this pool has seen, those that went to
    the dead letters included."""
    retries: int
    dead_letters: int
    problem: str | None
    """The problem that keeps the pool from its work, and its cause; None while all is well."""
    looks: int
    """The number of times that the pool has measured its lag in every partition."""

    @property
    def running(self) -> int:
        return sum(consumer.state == "running" for consumer in self.consumers)

    @property
    def pending(self) -> int:
        return sum(consumer.state == "pending" for consumer in self.consumers)

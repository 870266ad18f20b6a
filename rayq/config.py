"""Typed configs: Kafka's names in snake_case, each with unit, default and trade-off.

A config is a frozen dataclass that checks itself when made. `parse(Kind, {...})` makes one from a
user's keywords: the dotted Kafka spelling is accepted too, and an unknown key is a `ConfigError`
that says what Kafka's name for it is called here, or suggests the nearest.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from rayq.errors import ConfigError, HandlerError
from rayq.kafka_names import said_here
from rayq.urls import check_url
from rayq.user_functions import check_kind

KIB, MIB, GIB = 1024, 1024**2, 1024**3
SECOND_MS, HOUR_MS, DAY_MS = 1000, 3_600_000, 86_400_000
INT64_MAX = 2**63 - 1

MESSAGE_BYTES_CEILING = 64 * MIB
"""The maximum of `max_message_bytes`, and the maximum size of a batch before compression. may have
before compression."""
PLAIN_BYTES_FACTOR, PLAIN_BYTES_MIN = 4, 4 * MIB
"""A batch may have this many times `max_message_bytes` before compression, and this minimum in any
case. Without a limit a small request could take all memory of the process that reads it: lz4 blocks
grow by up to 255 times."""

Partitioner = Callable[[bytes | None, int], int]
Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(what)


def is_unicode(text: str) -> bool:
    """Returns whether a text can be sent: a str may hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Bounds(NamedTuple):
    """The range of a number, both ends included."""

    least: float = 0
    most: float = math.inf
    above_zero: bool = False
    """True if 0 itself is refused, where `least` is 0."""
    in_bytes: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        return self.least <= value <= self.most and not (self.above_zero and value == 0)

    def __str__(self) -> str:
        if self.most < math.inf:
            least = "above 0" if self.above_zero else f"from {self.said(self.least)}"
            return f"{least} to {self.said(self.most)}"
        if self.above_zero or self.least == 1:
            return "positive"
        return f"at least {self.said(self.least)}"

    def said(self, number: float) -> str:
        """A number of this kind, as people write it: 64 KiB, 45,000."""
        for unit, title in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if self.in_bytes else ():
            if number >= unit and number % unit == 0:
                return f"{number // unit} {title}"
        return "2**63 - 1" if number == INT64_MAX else f"{number:,}"


Positive = Annotated[int, Bounds(1)]
NotNegative = Annotated[int, Bounds(0)]
PositiveBytes = Annotated[int, Bounds(1, in_bytes=True)]
NotNegativeBytes = Annotated[int, Bounds(0, in_bytes=True)]
PositiveSeconds = Annotated[float, Bounds(0, above_zero=True)]
NotNegativeSeconds = Annotated[float, Bounds(0)]
SessionMs = Annotated[int, Bounds(100, HOUR_MS)]
PollIntervalMs = Annotated[int, Bounds(1, INT64_MAX)]
TransactionTimeoutMs = Annotated[int, Bounds(1000, 15 * 60_000)]


def _plain_functions(config: object, *names: str) -> None:
    for name in names:
        try:
            check_kind(name, getattr(config, name))
        except HandlerError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class TopicConfig:
    """The settings of one topic. Set at `create_topic`, changed by `alter_topic_config`."""

    min_insync_replicas: Positive | None = None
    """The minimum number of in-sync replicas for an acks="all" write, 1 up to the replication
    factor. None: the majority of the factor (2 of 3). Higher: survives more lost disks, but refuses
    writes sooner."""

    unclean_leader_election: bool = False
    """Allow a replica that may lack acknowledged records to become leader when no other is left.
    True trades records for availability."""

    flush: Literal["disk", "os"] = "disk"
    """The point at which a record counts as written: "disk" after fdatasync, "os" once it is in the
    page cache (a power loss of all replicas at once may then lose acknowledged records)."""

    cleanup_policy: Literal["delete", "compact", "compact,delete"] = "delete"
    """The policy for old records: deleted by retention, compacted to the latest record of each key,
    or both. Compacted topics refuse records without a key."""

    min_cleanable_dirty_ratio: Annotated[float, Bounds(0, 1)] = 0.5
    """The share of the cleanable log that is not compacted yet at which compaction starts. Lower:
    less disk, more work."""

    min_compaction_lag_ms: NotNegative = 0
    """The minimum time after its append before a record may be compacted."""

    max_compaction_lag_ms: Positive | None = None
    """The maximum time after its append before a record is compacted, whatever the ratio; at least
    `min_compaction_lag_ms`. None: the ratio alone decides."""

    delete_retention_ms: NotNegative = DAY_MS
    """The time that a tombstone (a record without a value) stays after it was compacted. A reader
    from the beginning, or a follower that was away, has this time to see it."""

    retention_ms: NotNegative | None = 7 * DAY_MS
    """The age of a closed segment's newest append at which the segment is deleted. None: never."""

    retention_bytes: NotNegativeBytes | None = None
    """The maximum size of a partition: the oldest closed segments are deleted while it is larger.
    None: unlimited."""

    segment_bytes: Annotated[int, Bounds(KIB, 2 * GIB, in_bytes=True)] = GIB
    """The size at which a segment file is closed. Smaller: finer retention, but more open files."""

    segment_ms: Positive = 7 * DAY_MS
    """The age of a segment's first append at which the segment is closed, at the next append."""

    index_interval_bytes: PositiveBytes = 4096
    """The approximate number of log bytes for each index entry. Smaller: faster look-ups, larger
    indexes."""

    max_message_bytes: Annotated[int, Bounds(1, MESSAGE_BYTES_CEILING, in_bytes=True)] = MIB
    """The maximum size of a record batch as it is stored. Before compression the batch may have
    four times as much (at least 4 MiB, at most 64 MiB), where each record counts for at least 24
    bytes."""

    remote_storage: bool | Literal["read"] = False
    """Keep closed segments in the cluster's object store (`remote_storage_url`). "read": no new
    segments go there; those already there stay readable until retention deletes them. Not for
    compacted topics."""

    local_retention_ms: NotNegative | None = DAY_MS
    """With `remote_storage`: the age of its newest append at which a segment that is in the object
    store leaves the brokers' disks; at most `retention_ms`. None: segments leave only when
    retention deletes them."""

    local_retention_bytes: NotNegativeBytes | None = None
    """With `remote_storage`: the maximum size of a replica on the brokers' disks; while it is
    larger, its oldest closed segments that are in the object store leave the disk. At most
    `retention_bytes`. None: unlimited."""

    remote_max_lag_ms: Positive = HOUR_MS
    """With `remote_storage`: the age of a segment's first append at which the segment is closed, so
    that it goes to the object store."""

    message_timestamp_type: Literal["create", "append"] = "create"
    """The timestamp that a record carries: the producer's, or the leader's at the append."""

    message_timestamp_after_max_ms: NotNegative = HOUR_MS
    """The maximum that a producer's timestamp may be in the future; records beyond it are refused.
    """

    def __post_init__(self) -> None:
        _check_values(self)
        _require(
            self.max_compaction_lag_ms is None
            or self.max_compaction_lag_ms >= self.min_compaction_lag_ms,
            "max_compaction_lag_ms must be at least min_compaction_lag_ms.",
        )
        _require(
            not (self.remote_storage and self.is_compacted),
            "remote_storage is not for compacted topics: compaction rewrites old segments, and "
            "objects are never changed.",
        )

    @property
    def plain_bytes_max(self) -> int:
        """The largest record batch before compression, in bytes: what readers unpack. It also
        limits the number of records in a batch: each counts for at least 24 bytes."""
        wanted_bytes = max(PLAIN_BYTES_FACTOR * self.max_message_bytes, PLAIN_BYTES_MIN)
        return min(wanted_bytes, MESSAGE_BYTES_CEILING)

    @property
    def is_compacted(self) -> bool:
        return self.cleanup_policy != "delete"

    @property
    def is_deleted_by_retention(self) -> bool:
        return self.cleanup_policy != "compact"

    def min_insync(self, replication_factor: int) -> int:
        """`min_insync_replicas`, or the majority of the factor."""
        return self.min_insync_replicas or replication_factor // 2 + 1


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """The settings by which a queue delivers its records. Set at `create_queue`, changed by
    `alter_queue`."""

    visibility_timeout_s: Annotated[float, Bounds(1, 12 * 3600)] = 30.0
    """The time that a taken record stays locked for its consumer without a sign of life. rayq's
    consumers extend the lock by themselves after a third of it."""

    max_handling_s: Annotated[float, Bounds(1, 7 * 24 * 3600)] = 3600.0
    """The maximum time that one consumer may handle a record, extensions included; after it the
    record is given to another."""

    max_deliveries: Annotated[int, Bounds(1, 1000)] = 5
    """The maximum number of deliveries without an acknowledgement; after it a record goes to the
    dead letters."""

    backoff_s: Annotated[float, Bounds(0, 24 * 3600)] = 1.0
    """The wait before a failed record's next delivery; doubles with each one, with jitter."""

    backoff_max_s: Annotated[float, Bounds(0, 7 * 24 * 3600)] = 3600.0
    """The maximum back-off."""

    ordered_by_key: bool = False
    """Handle the records of one key one after the other, in their order, even when some fail."""

    dead_letters: Literal["keep", "discard", "stay"] = "keep"
    """The action for a record that failed for good: "keep" moves it to the queue `<name>.dead`,
    "discard" drops it, "stay" delivers it again (a rejected one after `backoff_max_s`). Queues of
    dead letters are created with "stay"."""

    start: Literal["earliest", "latest"] = "earliest"
    """The position where a new queue begins in a topic that has records."""

    retention: Literal["topic", "hold", "delete_done"] = "topic"
    """"topic": the topic's own retention, which also deletes records that were not handled yet
    (these are counted). "hold": no record is deleted before it is settled. "delete_done": records
    that this queue settled are deleted at once. The latter two are for topics that only this queue
    reads."""

    def __post_init__(self) -> None:
        _check_values(self)
        _require(
            self.max_handling_s >= self.visibility_timeout_s,
            "max_handling_s must be at least visibility_timeout_s.",
        )
        _require(
            self.backoff_max_s >= self.backoff_s, "backoff_max_s must be at least backoff_s."
        )


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The servers' timeouts and limits, given to `rayq.start`. None of them affects the data
    format."""

    heartbeat_interval_ms: Positive = 500
    """The interval of heartbeats from brokers to the controller, and from replica processes to
    their broker."""

    session_timeout_ms: Positive = 3000
    """The time without a heartbeat after which a broker or replica process counts as dead; at least
    twice `heartbeat_interval_ms`. Lower: faster failover, and more false alarms on a busy machine.
    """

    controller_patience_ms: Positive = 3000
    """The time without a word from a controller (plus up to half of it, at random) after which a
    voter stands for election."""

    replica_lag_time_max_ms: Positive = 10_000
    """The maximum time that a follower may be behind before it leaves the in-sync set."""

    max_replicas_per_broker: NotNegative | None = None
    """The maximum number of replicas on a broker. None: limited by its share of the node's memory
    (100 MiB for each process and 1 MiB for each replica), and by the number of files that its
    processes may open."""

    replica_rebuild_delay_ms: Positive | None = None
    """The time after the end of a broker's session until its replicas are rebuilt on other brokers;
    at least `session_timeout_ms`. None: never. Set it longer than any restart takes, or a restart
    copies data that the broker still has."""

    replicas_per_process: Positive | None = None
    """The number of replicas that share a process. None: each has its own until a node has two
    processes for each core; then they share, spread by topic. 1: each always has its own, which
    takes 70 MB and most of a second to start."""

    metadata_snapshot_records: Positive = 10_000
    """The number of records after which the metadata log is cut down to a snapshot."""

    flush_checkpoint_bytes: PositiveBytes = 64 * MIB
    """The number of new bytes after which the recovery point moves: at most about this much is read
    again by a start after kill -9."""

    retention_check_interval_ms: Positive = 30_000
    """The interval at which closed segments are checked against the topic's retention."""

    compaction_check_interval_ms: Positive = 15_000
    """The interval at which compacted partitions are checked for a due compaction."""

    compaction_bytes_per_s: PositiveBytes = 32 * MIB
    """The maximum rate at which compaction reads and writes on one broker's disk."""

    compaction_memory_bytes: PositiveBytes = 128 * MIB
    """The maximum memory for the keys of one pass; a log with more keys takes several passes."""

    offsets_topic_partitions: Positive = 1
    """The number of partitions of `__consumer_offsets`, fixed when the first group is used. Each
    has a coordinator of its own."""

    transaction_state_partitions: Annotated[int, Bounds(1, 256)] = 1
    """The number of partitions of `__transaction_state`, fixed at the first transaction. Each has a
    coordinator of its own."""

    queue_state_partitions: Annotated[int, Bounds(1, 256)] = 4
    """The number of partitions of `__queue_state`, fixed at the first queue. Each has a keeper of
    its own."""

    offsets_retention_ms: Positive = 7 * DAY_MS
    """The time after which the positions of a group without members are deleted."""

    group_disconnect_grace_ms: Positive = 1000
    """The time in which a member whose connection broke may come back before it counts as gone."""

    group_assignors: dict[str, str] | None = dataclasses.field(default=None, hash=False)
    """Your own assignors, name to `module:function`, importable where the servers run; see
    `rayq.core.assignors`."""

    max_frame_bytes: Annotated[int, Bounds(65 * MIB, in_bytes=True)] = 80 * MIB
    """The maximum size of a frame that a server or client accepts; at least the largest batch plus
    a header."""

    max_connections: Positive = 4096
    """The maximum number of connections of one server process."""

    max_requests_in_flight: Positive = 1024
    """The maximum number of unanswered requests on one client's connection; the server reads no
    further until some are answered."""

    idle_connection_ms: Positive = 600_000
    """The time without a request after which a client connection is closed."""

    metrics_interval_ms: Positive = 5000
    """The interval at which each process on Ray reports its measurements to Ray's metrics, and at
    which the lag of groups is measured. Ray drops a value that is not reported again within 20 s.
    """

    remote_storage_url: str | None = None
    """The object store in which topics with `remote_storage` keep old segments:
    `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or `file:///path` of a
    mount of all nodes. Credentials come from each node, never from the URL."""

    remote_storage_credentials: str | None = None
    """The path of this node's file with lines of `NAME=value`, such as AWS_ACCESS_KEY_ID, readable
    only by its owner (mode 0600). None: from the servers' environment, or the node's role."""

    remote_upload_bytes_per_s: PositiveBytes | None = None
    """The maximum rate at which one broker writes to the object store. None: no limit."""

    remote_read_bytes_per_s: PositiveBytes | None = None
    """The maximum rate at which one broker reads from the object store. None: no limit."""

    remote_cache_bytes: NotNegativeBytes = GIB
    """The size of each broker's cache on disk for data read from the object store."""

    remote_backlog_bytes: PositiveBytes | None = None
    """The maximum backlog on a broker's disk while the object store takes no data; topics with
    `remote_storage` refuse writes while more bytes wait. None: as much as the disk has free
    besides."""

    remote_delete_delay_ms: NotNegative = DAY_MS
    """The time that an object which nothing refers to any longer stays in the object store."""

    remote_sweep_interval_ms: Positive = DAY_MS
    """The interval at which each partition's leader looks for objects that a crash left behind."""

    bind_host: str | None = None
    """The address that servers bind to. None: the node's own address, never 0.0.0.0; or 127.0.0.1
    where rayq starts Ray as well, which then runs all hosts on this machine."""

    broker_resource: str | None = None
    """The Ray resource that a node must offer (`ray start --resources '{"rayq_broker": 1}'`) to get
    a broker. None: every node gets one. Set it where nodes that only compute come and go."""

    advertised_host: str | None = None
    """The address that clients are told, where it differs from `bind_host` (NAT, Kubernetes)."""

    tls_certificate: str | None = None
    """The path of this node's PEM certificate chain. With `tls_key` and `tls_ca` it turns TLS on
    for every connection, and each side is verified against the CA."""

    tls_key: str | None = None
    """The path of the PEM private key."""

    tls_ca: str | None = None
    """The path of the PEM certificates of the authorities trusted to sign peers' certificates."""

    tls_check_hostname: bool = True
    """Require that a server's certificate names the host or address by which it was reached. False
    accepts any certificate of the CA: for clusters whose nodes share one. Then everyone who holds
    it can pose as a server."""

    def __post_init__(self) -> None:
        _check_values(self)
        _require(
            self.session_timeout_ms >= 2 * self.heartbeat_interval_ms,
            "session_timeout_ms must be at least twice heartbeat_interval_ms, or one late "
            "heartbeat ends a session.",
        )
        _require(
            self.replica_rebuild_delay_ms is None
            or self.replica_rebuild_delay_ms >= self.session_timeout_ms,
            "replica_rebuild_delay_ms must be None or at least session_timeout_ms.",
        )
        tls = (self.tls_certificate, self.tls_key, self.tls_ca)
        _require(
            all(tls) or not any(tls),
            "TLS needs all three of tls_certificate, tls_key and tls_ca; without TLS all three are "
            "None.",
        )
        if self.remote_storage_url is not None:
            check_remote_storage_url(self.remote_storage_url)


REMOTE_STORAGE_SCHEMES = ("s3", "gs", "az", "file")


def check_remote_storage_url(url: str) -> None:
    """Raises ConfigError, which does not show the URL."""
    check_url("remote_storage_url", url, schemes=REMOTE_STORAGE_SCHEMES)
    scheme, _, rest = url.partition("://")
    _require(
        (scheme == "file") == rest.startswith("/"),
        "remote_storage_url is s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or "
        "file:///path.",
    )


Acks = Literal["all", 0, 1]
OnCorrupt = Literal["raise", "skip"]


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """The settings by which a producer batches, waits and retries."""

    acks: Acks = "all"
    """The meaning of a delivery: "all" in-sync replicas have the record, 1: the leader has appended
    it, 0: it was handed to the network. With 0, records that a leader refuses or that were on a
    connection that breaks are lost; refusals are logged as warnings."""

    enable_idempotence: bool = True
    """Number the batches so that retries never append a batch twice. Needs acks="all"; with acks 0
    or 1 it is off."""

    linger_ms: NotNegative = 5
    """The maximum time that a record waits for its batch to fill. A record is sent at once while
    nothing of its partition is in flight, so a lone record does not wait."""

    batch_size: PositiveBytes = 256 * KIB
    """The size of keys, values and headers at which a batch is closed. Records of 1 KB take half as
    much CPU in batches of 256 KiB as in batches of 64 KiB; still larger ones gain little."""

    compression_type: Literal["lz4", "none"] = "lz4"
    """The compression of batch bodies; a body that would not shrink is stored uncompressed."""

    max_in_flight_requests_per_connection: Positive = 5
    """The maximum number of batches of one partition in flight, 1 to 5 with idempotence."""

    delivery_timeout_ms: Positive = 120_000
    """The maximum time from `send` to the result, retries included; after it the future fails."""

    request_timeout_ms: Positive = 10_000
    """The maximum time that one request waits for its answer before it is retried."""

    retry_backoff_ms: Positive = 20
    """Wait before a retry; doubles up to 1 s, with jitter."""

    buffer_memory: PositiveBytes = 32 * MIB
    """The maximum size of all records that wait or are in flight. A full buffer blocks `send`
    (back-pressure). At least `batch_size`."""

    max_block_ms: Positive = 60_000
    """The maximum time that `send` blocks on a full buffer or missing metadata before it raises."""

    partitioner: Partitioner | None = None
    """`f(key, partition_count) -> partition`. None: crc32 of the key (as librdkafka's
    `consistent`); without a key one partition for 0.1 s or one full batch, then another. (Under
    `linger_ms=0` for one batch.)"""

    value_serializer: Serializer | None = None
    """`f(value) -> bytes`, called by `send` with each value but None. None: values are bytes."""

    key_serializer: Serializer | None = None
    """The same for keys. A partitioner gets the bytes."""

    large_values: str | None = None
    """The handling of a record larger than the topic's `max_message_bytes`. None: `send` raises.
    "chunks": the value is written to the log in pieces, which readers reassemble (at least acks=1;
    not into compacted topics). A URL (`s3://bucket/prefix`, `file:///directory`, any that fsspec
    knows): the value becomes an object there, and the record names it; `send` waits for the store,
    and readers need the same URL as their `large_values`. See docs/how-to/large-values.md."""

    transactional_id: str | None = None
    """Write in transactions, under an id that stays the same over restarts: a producer that starts
    with it fences the previous one. 1 to 256 characters. Needs acks="all" and enable_idempotence.
    """

    transaction_timeout_ms: TransactionTimeoutMs = 60_000
    """The maximum time from a transaction's first record to its end; after it the transaction is
    aborted, since the producer may have died. Readers of its partitions wait for it meanwhile."""

    commit_wait_ms: NotNegative = 1000
    """The maximum time that a decided commit waits until all readers see it. In a loop of short
    transactions 0 saves a third of the time, but readers see each transaction some milliseconds
    later."""

    def __post_init__(self) -> None:
        _check_values(self)
        _require(
            not self.idempotent or self.max_in_flight_requests_per_connection <= 5,
            "max_in_flight_requests_per_connection must be at most 5 with enable_idempotence: "
            "partitions remember the last five batches of each producer.",
        )
        _require(
            self.buffer_memory >= self.batch_size,
            "buffer_memory must be at least batch_size, or no batch would ever fill.",
        )
        _require(
            self.transactional_id is None
            or (1 <= len(self.transactional_id) <= 256 and is_unicode(self.transactional_id)),
            "transactional_id has 1 to 256 characters of Unicode.",
        )
        _require(
            self.transactional_id is None or self.idempotent,
            'transactional_id needs enable_idempotence and acks="all": a transaction that may lose '
            "records is none.",
        )
        _require(
            self.large_values != "chunks" or self.acks != 0,
            'large_values="chunks" needs acks="all" or 1: a value is complete once the leader has '
            "acknowledged each chunk.",
        )
        check_values_url(self.large_values, "chunks")
        _plain_functions(self, "value_serializer", "key_serializer", "partitioner")

    @property
    def idempotent(self) -> bool:
        return self.enable_idempotence and self.acks == "all"


GROUP_KEYS = (
    "group_instance_id",
    "assignor",
    "group_session_timeout_ms",
    "group_heartbeat_interval_ms",
    "max_poll_interval_ms",
    "enable_auto_commit",
    "auto_commit_interval_ms",
)
"""The keys of a consumer that have no effect without a group."""


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig:
    """The settings of a consumer: its start position, its fetches and its group membership."""

    auto_offset_reset: Literal["earliest", "latest", "none"] | timedelta = "latest"
    """The position to start from when there is none, or when it is not in the log: it fell below
    the log start, or a `seek` or a commit set it past the end (neither is checked). A duration:
    that long ago (KIP-1106). "none": raise `OffsetOutOfRangeError` instead. If records that were
    read were lost by an unclean election, `LogTruncatedError` is raised in any case."""

    group_instance_id: str | None = None
    """The id of a static member (KIP-345): a process that comes back under the same id within the
    session keeps its partitions, without a rebalance. 1 to 249 characters."""

    assignor: str = "uniform"
    """The assignment of partitions: "uniform" (balanced within one, sticky), "range" (consecutive
    partitions, the same of each topic), or one of the cluster's `group_assignors`."""

    group_session_timeout_ms: SessionMs = 45_000
    """The time without a heartbeat after which a member is removed from its group. (If its process
    dies, the broken connection shows it within about a second.)"""

    group_heartbeat_interval_ms: Positive = 3_000
    """The time that a heartbeat is held while nothing changes; at most half of
    `group_session_timeout_ms`."""

    max_poll_interval_ms: PollIntervalMs = 300_000
    """The maximum time between two polls; a member that takes longer loses its partitions."""

    enable_auto_commit: bool = False
    """Commit automatically what earlier polls returned: every `auto_commit_interval_ms`, when
    partitions are revoked and at `close`. At-least-once only if each record is processed before the
    next poll."""

    auto_commit_interval_ms: Positive = 5_000
    """The interval of commits with `enable_auto_commit`."""

    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """"read_committed" returns records of transactions that committed, and stops below the first
    undecided transaction. "read_uncommitted" returns everything that is replicated. Where nobody
    uses transactions they are the same."""

    max_poll_records: Positive = 500
    """The maximum number of records that one `poll` returns, unless the call gives another."""

    fetch_max_bytes: PositiveBytes = 4 * MIB
    """The maximum bytes of one partition per fetch; at least one batch is always returned."""

    fetch_max_wait_ms: Positive = 500
    """The maximum time that a leader holds a fetch that has nothing to return."""

    fetch_buffer_bytes: PositiveBytes = 64 * MIB
    """The maximum size of prefetched data over all partitions; fetching pauses beyond it. Also the
    maximum that one `poll` unpacks (but always a whole batch, and at least 16 MiB)."""

    request_timeout_ms: Positive = 10_000
    """The maximum time that a request waits for its answer (on top of `fetch_max_wait_ms`) before
    it is retried."""

    default_api_timeout_ms: Positive = 60_000
    """The time that a call without a timeout of its own (offsets, metadata) retries before it
    raises."""

    retry_backoff_ms: Positive = 20
    """Wait before a retry; doubles up to 1 s, with jitter."""

    on_corrupt: OnCorrupt = "raise"
    """The action for records that cannot be read, such as a damaged batch, or a large value that is
    missing or exceeds this reader's limit. "raise": raise `UnreadableRecordError`, which has their
    offset and the next one, and stay there until a `seek`. "skip": continue after them, with a
    warning in the log. Problems that can be fixed outside the record (a deserializer that raises, a
    store that refuses the credentials) are raised in any case."""

    large_value_max_bytes: PositiveBytes = 256 * MIB
    """The maximum size of a value that is reassembled from chunks, or read from an object. A larger
    one raises `LargeValueRefusedError`."""

    large_values: str | None = None
    """The URL below which large values may be read from objects (producers' `large_values`), with
    this process's credentials. None: a value in an object raises `LargeValueRefusedError`. Values
    in chunks need no permission."""

    check_crcs: bool = True
    """Check each batch's CRC before its records are handed out."""

    value_deserializer: Deserializer | None = None
    """`f(bytes) -> value`, called by `poll` with each value but None. None: values are bytes."""

    key_deserializer: Deserializer | None = None
    """The same for keys."""

    def __post_init__(self) -> None:
        _check_values(self)
        _require(
            self.group_session_timeout_ms >= 2 * self.group_heartbeat_interval_ms,
            "group_session_timeout_ms must be at least twice group_heartbeat_interval_ms, or one "
            "late heartbeat ends a session.",
        )
        for name in ("group_instance_id", "assignor"):
            value = getattr(self, name)
            _require(
                value is None or (0 < len(value) <= 249 and is_unicode(value)),
                f"{name} has 1 to 249 characters of Unicode text, not {value!r}.",
            )
        _require(
            not isinstance(self.auto_offset_reset, timedelta)
            or self.auto_offset_reset >= timedelta(0),
            "auto_offset_reset cannot be a negative duration.",
        )
        check_values_url(self.large_values)
        _plain_functions(self, "value_deserializer", "key_deserializer")


def check_values_url(url: str | None, *others: str) -> None:
    """Checks the URL of large values. Raises ConfigError, which does not show the URL."""
    if url is None or url in others:
        return
    words = "".join(f'"{word}", ' for word in others)
    check_url(f"large_values (None, {words}or a URL such as s3://bucket/prefix)", url)


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """The settings of a consumer pool: its size, its handler, its retries and dead letters."""

    min_consumers: NotNegative = 0
    """The minimum number of running consumers. 0: none run while no records wait."""

    max_consumers: Positive | None = None
    """The maximum number of running consumers, at least `min_consumers`. None: the number of
    partitions of the topic (more would be idle)."""

    target_lag_s: PositiveSeconds = 10.0
    """The target for the age of the oldest unhandled record, in seconds; it also sets how fast a
    backlog is worked off. Smaller: more consumers."""

    cool_down_s: NotNegativeSeconds = 30.0
    """The time for which fewer consumers would have been enough before some are stopped. Shorter:
    less idling, more starts."""

    resources: dict[str, float | int] | None = None
    """The Ray resources of each consumer: "num_cpus", "num_gpus", "memory" (bytes), or a custom
    resource. None: one CPU. Consumers that do not fit wait, which makes Ray's autoscaler add nodes.
    """

    batch: Literal["records", "arrow"] = "records"
    """The handler's argument: a list of `Record`, or a `pyarrow.Table` as of `poll_arrow`."""

    max_records: Positive = 500
    """The maximum number of records in one call of the handler."""

    auto_offset_reset: Literal["earliest", "latest"] = "earliest"
    """The start position of partitions for which the group has none: their log start, or their end
    when the pool was started."""

    retries: NotNegative = 5
    """The number of retries of a batch for which the handler raised an error. After them the batch
    is split, and records that still fail go to the dead letters."""

    retry_backoff_ms: Positive = 200
    """Wait before a retry; doubles up to `retry_backoff_max_ms`, with jitter."""

    retry_backoff_max_ms: Positive = 30_000
    """The maximum wait before a retry; at least `retry_backoff_ms`."""

    dead_letter_topic: str | None = None
    """The topic for records that keep failing, with the reason in headers. None: they are retried
    until they succeed, and later records of their partition wait."""

    exactly_once: bool = False
    """Handle each batch in a transaction: sending what the handler returns (an `Outgoing`, an
    iterable of them, or None) and marking the batch as handled take effect together or not at all.
    The same holds for dead letters."""

    max_poll_interval_ms: PollIntervalMs = 300_000
    """The maximum time for one call of the handler. A consumer that takes longer loses its
    partitions, and is killed."""

    group_session_timeout_ms: SessionMs = 45_000
    """The time without a heartbeat after which a consumer is removed from its group."""

    drain_timeout_s: Annotated[float, Bounds(0, DAY_MS // 1000, above_zero=True)] = 60.0
    """The maximum time that a consumer that is stopped may take to finish its batch; after it the
    consumer is killed, and others handle that batch again."""

    def __post_init__(self) -> None:
        _check_values(self)
        _require(
            self.max_consumers is None or self.max_consumers >= self.min_consumers,
            f"max_consumers must be at least min_consumers, not {self.max_consumers}.",
        )
        _require(
            self.retry_backoff_max_ms >= self.retry_backoff_ms,
            "retry_backoff_max_ms must be at least retry_backoff_ms.",
        )
        _check_resources(self.resources or {})


RAY_OPTIONS = ("num_cpus", "num_gpus", "memory")
"""The resources for which Ray has an option of its own; every other name is a custom resource."""


def _check_resources(resources: Mapping[str, float]) -> None:
    """A misspelt name would be a custom resource that no node has: consumers would wait for it
    forever."""
    for name, amount in resources.items():
        _require(
            0 <= amount < math.inf, f"resources[{name!r}] must be at least 0, not {amount}."
        )
        if name in RAY_OPTIONS:
            continue
        meant = {"cpu": "num_cpus", "gpu": "num_gpus"}.get(name.lower())
        near = [meant] if meant else difflib.get_close_matches(name, RAY_OPTIONS, n=1, cutoff=0.6)
        _require(
            not near, f"Unknown resource {name!r}. Did you mean {near[0] if near else name!r}?"
        )


NEAR = 0.7
"""The minimum similarity (by difflib) of a known name that is suggested; a less similar one would
mislead."""
Config = TypeVar(
    "Config",
    TopicConfig,
    ClusterConfig,
    ProducerConfig,
    ConsumerConfig,
    PoolConfig,
    QueueConfig,
)


def parse(kind: type[Config], options: Mapping[str, Any]) -> Config:
    """A config of `kind` from a user's keywords. Raises `ConfigError`."""
    names = [field.name for field in dataclasses.fields(kind)]
    known: dict[str, Any] = {}
    for given, value in options.items():
        name = given.replace(".", "_")
        if name not in names:
            raise ConfigError(f"Unknown {_title(kind)} config {given!r}{_hint(kind, name, names)}")
        if name in known:
            raise ConfigError(f"{_title(kind)} config {name!r} was given twice.")
        known[name] = value
    return kind(**known)


def given_values(kind: type[Config], options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that were given, under their names, with the values that `parse` makes of them.
    Raises `ConfigError`."""
    config = parse(kind, options)
    return {name: getattr(config, name) for name in (key.replace(".", "_") for key in options)}


def parse_stored(kind: type[Config], options: Mapping[str, Any]) -> Config:
    """A config of `kind` as it came over the wire or from disk. Keys that this version does not
    know are ignored: a newer version wrote them. Raises `ConfigError` for other mistakes."""
    any_kind: Any = kind  # mypy takes no class with a __hash__ of its own for hashable.
    parsed: Config = _parsed(any_kind, msgspec.msgpack.encode(options))
    return parsed


@lru_cache(256)
def _parsed(kind: Any, encoded: bytes) -> Any:
    """Caches parsed configs: a broker with many partitions receives few different configs many
    times."""
    return parse(kind, only_known(kind, msgspec.msgpack.decode(encoded)))


def only_known(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a stored config that this version knows."""
    names = types_of(kind)
    return {name: value for name, value in options.items() if name in names}


def _hint(kind: type, name: str, names: list[str]) -> str:
    """Names the key that may have been meant."""
    said = said_here(_title(kind), name)
    if said is not None:
        return f": {said}."
    for other in (TopicConfig, ProducerConfig, ConsumerConfig, ClusterConfig):
        if name in {field.name for field in dataclasses.fields(other)}:
            return f": it is a config of a {_title(other)}."
    near = difflib.get_close_matches(name, names, n=1, cutoff=NEAR)
    return f". Did you mean {near[0]!r}?" if near else f". Known: {', '.join(names)}."


def check_group_keys(config: ConsumerConfig) -> None:
    """Checks the config of a consumer without a group. Raises ConfigError where it has a key that
    only the members of a group use: its user believes that the consumer is a member."""
    defaults = ConsumerConfig()
    for name in GROUP_KEYS:
        if getattr(config, name) != getattr(defaults, name):
            raise ConfigError(f"{name} is for members of a group: say group= too.")


def as_dict(config: TopicConfig | QueueConfig) -> dict[str, Any]:
    """The whole config as plain values, defaults included; `parse` takes it back."""
    kind: Any = type(config)
    return {name: getattr(config, name) for name in types_of(kind)}


def _title(kind: type) -> str:
    return kind.__name__.removesuffix("Config").lower()


@cache
def types_of(kind: type[Any]) -> dict[str, Any]:
    """The types of a config's keys, with their ranges."""
    return get_type_hints(kind, include_extras=True)


def range_of(hint: Any) -> Bounds | None:
    """The range of the numbers that a key takes; None where it takes every number, or none."""
    if get_origin(hint) is Annotated:
        return next(each for each in hint.__metadata__ if isinstance(each, Bounds))
    found = (range_of(argument) for argument in get_args(hint))
    return next((each for each in found if each is not None), None)


def _check_values(config: Any) -> None:
    """Refuses a value of the wrong type, which would otherwise fail far from the mistake, and one
    out of range."""
    kind: type = type(config)
    for name, hint in types_of(kind).items():
        value = getattr(config, name)
        if not _is_of_type(value, hint):
            raise ConfigError(f"{name} cannot be {value!r}: it takes {described(hint)}.")
        allowed = range_of(hint)
        if allowed is not None and value is not None:
            _require(value in allowed, f"{name} must be {allowed}, not {value}.")


def _is_of_type(value: Any, hint: Any) -> bool:
    arguments, origin = get_args(hint), get_origin(hint)
    if origin is Annotated:
        return _is_of_type(value, arguments[0])
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (Union, UnionType):
        return any(_is_of_type(value, argument) for argument in arguments)
    if origin is dict:
        return type(value) is dict and all(
            _is_of_type(key, arguments[0]) and _is_of_type(item, arguments[1])
            for key, item in value.items()
        )
    if hint is type(None):
        return value is None
    if isinstance(hint, type):  # An int will do for a float, as to type checkers.
        return type(value) is hint or (hint is float and type(value) is int)
    return callable(value)


def described(hint: Any) -> str:
    """A type in words."""
    arguments, origin = get_args(hint), get_origin(hint)
    if origin is Annotated:
        return described(arguments[0])
    if origin is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(described(argument) for argument in arguments)
    if origin is dict:
        return f"a dict of {described(arguments[0])} to {described(arguments[1])}"
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) else "a function"

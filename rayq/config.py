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
"""The most that `max_message_bytes` may be, and that a batch may have before compression."""
PLAIN_BYTES_FACTOR, PLAIN_BYTES_MIN = 4, 4 * MIB
"""Before compression a batch may have so many times `max_message_bytes`, and so much in any case.
Without a limit a small request could take all memory of the process that reads it: lz4 blocks grow
by up to 255 times."""

Partitioner = Callable[[bytes | None, int], int]
Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(what)


def is_unicode(text: str) -> bool:
    """Whether a text can be sent: a str may hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Bounds(NamedTuple):
    """What a number may be, both ends included."""

    least: float = 0
    most: float = math.inf
    above_zero: bool = False
    """Whether 0 itself is refused, where `least` is 0."""
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
    """How one topic is kept. Set at `create_topic`, changed by `alter_topic_config`."""

    min_insync_replicas: Positive | None = None
    """How many in-sync replicas an acks="all" write needs, 1 up to the replication factor. None:
    the majority of the factor (2 of 3). Higher survives more lost disks, refuses writes sooner."""

    unclean_leader_election: bool = False
    """Let a replica lead that may lack acknowledged records when no other is left. True trades
    records for availability."""

    flush: Literal["disk", "os"] = "disk"
    """What counts as written: "disk" after fdatasync, "os" once it is in the page cache (a power
    loss of all replicas at once may then lose acknowledged records)."""

    cleanup_policy: Literal["delete", "compact", "compact,delete"] = "delete"
    """What becomes of old records: deleted by retention, compacted to the latest of each key, or
    both. Compacted topics refuse records without a key."""

    min_cleanable_dirty_ratio: Annotated[float, Bounds(0, 1)] = 0.5
    """Compaction begins when this share of the cleanable log is not compacted yet. Lower: less
    disk, more work."""

    min_compaction_lag_ms: NotNegative = 0
    """A record stays as it is for at least so long after its append."""

    max_compaction_lag_ms: Positive | None = None
    """A record is compacted at the latest so long after its append, whatever the ratio; at least
    `min_compaction_lag_ms`. None: by the ratio alone."""

    delete_retention_ms: NotNegative = DAY_MS
    """A tombstone (a record without a value) stays for so long after it was compacted: the time a
    reader from the beginning, or a follower that was away, has to see it."""

    retention_ms: NotNegative | None = 7 * DAY_MS
    """Closed segments whose newest append is older are deleted. None: never."""

    retention_bytes: NotNegativeBytes | None = None
    """The oldest closed segments are deleted while the partition is larger. None: unlimited."""

    segment_bytes: Annotated[int, Bounds(KIB, 2 * GIB, in_bytes=True)] = GIB
    """A segment file is closed at this size. Smaller: retention is finer, more
    files are open."""

    segment_ms: Positive = 7 * DAY_MS
    """A segment whose first append is older is closed at the next append."""

    index_interval_bytes: PositiveBytes = 4096
    """One index entry for about so many bytes of log. Smaller: faster look-ups, larger indexes."""

    max_message_bytes: Annotated[int, Bounds(1, MESSAGE_BYTES_CEILING, in_bytes=True)] = MIB
    """The largest record batch, as it is stored. Before compression it may have
    four times as much, and 4 MiB in any case, but 64 MiB at most; a record counts for 24 bytes
    there at least."""

    remote_storage: bool | Literal["read"] = False
    """Keep closed segments in the cluster's object store (`remote_storage_url`). "read": no more
    goes there, what is there stays readable until retention takes it. Not for compacted topics."""

    local_retention_ms: NotNegative | None = DAY_MS
    """With `remote_storage`: what is in the object store leaves the brokers' disks when its newest
    append is older; at most `retention_ms`. None: only as retention takes it."""

    local_retention_bytes: NotNegativeBytes | None = None
    """With `remote_storage`: the oldest closed segments that are in the object store leave the
    brokers' disks while a replica is larger; at most `retention_bytes`. None: unlimited."""

    remote_max_lag_ms: Positive = HOUR_MS
    """With `remote_storage`: a segment whose first append is older is closed, so that it goes to
    the object store."""

    message_timestamp_type: Literal["create", "append"] = "create"
    """Which time a record carries: the producer's, or the leader's at the append."""

    message_timestamp_after_max_ms: NotNegative = HOUR_MS
    """A producer's timestamp further in the future than this is refused."""

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
        """The largest record batch before compression, in bytes: what readers unpack. It bounds the
        records of a batch too: each counts for 24 bytes at least."""
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
    """How a queue gives out its records. Set at `create_queue`, changed by `alter_queue`."""

    visibility_timeout_s: Annotated[float, Bounds(1, 12 * 3600)] = 30.0
    """How long a taken record stays with its consumer without a sign of life. Consumers of rayq
    extend by themselves after a third of it."""

    max_handling_s: Annotated[float, Bounds(1, 7 * 24 * 3600)] = 3600.0
    """A record that one consumer handles for longer is given to another: the longest that it may be
    extended."""

    max_deliveries: Annotated[int, Bounds(1, 1000)] = 5
    """After so many deliveries without an acknowledgement a record goes to the dead letters."""

    backoff_s: Annotated[float, Bounds(0, 24 * 3600)] = 1.0
    """A record that failed waits so long before its next delivery; doubles with each one, with
    jitter."""

    backoff_max_s: Annotated[float, Bounds(0, 7 * 24 * 3600)] = 3600.0
    """The most that the back-off grows to."""

    ordered_by_key: bool = False
    """Records of one key are handled one after the other, in their order, also over failures."""

    dead_letters: Literal["keep", "discard", "stay"] = "keep"
    """What becomes of a record that failed for good: "keep" moves it to the queue `<name>.dead`,
    "discard" drops it, "stay" has it come again, a rejected one after `backoff_max_s`. Queues of
    dead letters begin with "stay"."""

    start: Literal["earliest", "latest"] = "earliest"
    """Where a new queue begins in a topic that has records."""

    retention: Literal["topic", "hold", "delete_done"] = "topic"
    """"topic": the topic's own retention, also of what was not handled yet (it is counted). "hold":
    nothing goes before it is settled. "delete_done": what is settled by this queue goes at once.
    The latter two are for topics that only this queue reads."""

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
    """How the servers behave. Given to `rayq.start`; times and limits, no data format."""

    heartbeat_interval_ms: Positive = 500
    """How often brokers tell the controller, and replica processes their broker, that they live."""

    session_timeout_ms: Positive = 3000
    """A broker or replica process silent for so long counts as dead; at least twice
    `heartbeat_interval_ms`. Lower: faster failover, and more false alarms on a busy machine."""

    controller_patience_ms: Positive = 3000
    """A voter that hears no controller for so long (plus up to half of it, at random) stands in."""

    replica_lag_time_max_ms: Positive = 10_000
    """A follower not caught up for so long leaves the in-sync set."""

    max_replicas_per_broker: NotNegative | None = None
    """How many replicas a broker may carry. None: by its share of the node's memory, 100 MiB for
    each process and one for each replica, and by how many files its processes may open."""

    replica_rebuild_delay_ms: Positive | None = None
    """The replicas of a broker whose session has been over for so long are rebuilt on others.
    None: never; at least `session_timeout_ms`. Longer than any restart takes, or a restart copies
    what it would have found."""

    replicas_per_process: Positive | None = None
    """Replicas that share a process. None: each has its own until a node has two processes for each
    core, then they share, spread by topic. 1: each always has its own; that takes 70 MB and most of
    a second for each to start."""

    metadata_snapshot_records: Positive = 10_000
    """The metadata log is cut down to a snapshot after so many records."""

    flush_checkpoint_bytes: PositiveBytes = 64 * MIB
    """The recovery point moves after so many new bytes: what a start after kill -9 re-reads."""

    retention_check_interval_ms: Positive = 30_000
    """How often closed segments are checked against the topic's retention."""

    compaction_check_interval_ms: Positive = 15_000
    """How often compacted partitions are looked at whether to compact them."""

    compaction_bytes_per_s: PositiveBytes = 32 * MIB
    """The most that compaction reads and writes on one broker's disk."""

    compaction_memory_bytes: PositiveBytes = 128 * MIB
    """The most memory for the keys of one pass; a log with more keys takes several passes."""

    offsets_topic_partitions: Positive = 1
    """Partitions of `__consumer_offsets`, fixed when the first group is used: each has a
    coordinator of its own."""

    transaction_state_partitions: Annotated[int, Bounds(1, 256)] = 1
    """Partitions of `__transaction_state`, fixed at the first transaction: each has a coordinator
    of its own."""

    queue_state_partitions: Annotated[int, Bounds(1, 256)] = 4
    """Partitions of `__queue_state`, fixed at the first queue: each has a keeper of its own."""

    offsets_retention_ms: Positive = 7 * DAY_MS
    """Positions of a group without members are forgotten after so long."""

    group_disconnect_grace_ms: Positive = 1000
    """A member whose connection broke has so long to come back before it counts as gone."""

    group_assignors: dict[str, str] | None = dataclasses.field(default=None, hash=False)
    """Assignors of your own, name to `module:function`, importable where the servers run; see
    `rayq.core.assignors`."""

    max_frame_bytes: Annotated[int, Bounds(65 * MIB, in_bytes=True)] = 80 * MIB
    """The largest frame a server or client accepts, at least the largest batch plus a header."""

    max_connections: Positive = 4096
    """Connections one server process accepts."""

    max_requests_in_flight: Positive = 1024
    """Requests one client's connection may have unanswered; the server reads no more until some
    are."""

    idle_connection_ms: Positive = 600_000
    """A client connection without a request for so long is closed."""

    metrics_interval_ms: Positive = 5000
    """How often each process on Ray hands what it measures to Ray's metrics, and how often the lag
    of groups is looked at. Ray forgets what it is not told again within 20 s."""

    remote_storage_url: str | None = None
    """Where topics with `remote_storage` keep old segments: `s3://bucket/prefix`,
    `gs://bucket/prefix`, `az://container/prefix`, or `file:///path` of a mount of all nodes.
    Credentials come from each node, never from the URL."""

    remote_storage_credentials: str | None = None
    """Path of this node's file with lines of `NAME=value`, such as AWS_ACCESS_KEY_ID, which only
    its owner may read (mode 0600). None: from the environment of the servers, or the node's role.
    """

    remote_upload_bytes_per_s: PositiveBytes | None = None
    """The most that one broker writes to the object store. None: no limit."""

    remote_read_bytes_per_s: PositiveBytes | None = None
    """The most that one broker reads from the object store. None: no limit."""

    remote_cache_bytes: NotNegativeBytes = GIB
    """What each broker keeps on its disk of what was read from the object store."""

    remote_backlog_bytes: PositiveBytes | None = None
    """Topics with `remote_storage` refuse writes while more bytes on a broker's disk wait for an
    object store that takes none. None: as much as the disk has free besides."""

    remote_delete_delay_ms: NotNegative = DAY_MS
    """What nothing refers to any more stays in the object store for so long."""

    remote_sweep_interval_ms: Positive = DAY_MS
    """How often each partition's leader looks for objects that a crash left behind."""

    bind_host: str | None = None
    """Address that servers bind to. None: the node's own address; never 0.0.0.0 unasked. Where it
    is not given, and rayq starts the Ray as well, which then plays all hosts: 127.0.0.1."""

    broker_resource: str | None = None
    """Only nodes that offer this Ray resource (`ray start --resources '{"rayq_broker": 1}'`) get a
    broker. None: every node does; so set it where nodes come and go that only compute."""

    advertised_host: str | None = None
    """Address told to clients, where it differs from `bind_host` (NAT, Kubernetes)."""

    tls_certificate: str | None = None
    """Path of this node's PEM certificate chain; with `tls_key` and `tls_ca` it turns TLS on for
    every connection, each side verified against the CA."""

    tls_key: str | None = None
    """Path of the PEM private key."""

    tls_ca: str | None = None
    """Path of the PEM certificates of the authorities trusted to sign peers' certificates."""

    tls_check_hostname: bool = True
    """A server's certificate must name the host or address it was reached by. False accepts any
    certificate of the CA: for clusters whose nodes share one, at the price that each of its holders
    can pose as a server."""

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
    """How a producer batches, waits and retries."""

    acks: Acks = "all"
    """What a delivery means: "all" in-sync replicas have it, 1 the leader has appended it, 0 it was
    handed to the network. Under 0 what a leader refuses, or a lost connection takes along, is lost:
    a warning in the log tells of refusals."""

    enable_idempotence: bool = True
    """Number the batches so that a retry appends once. Needs acks="all"; with acks 0 or 1 it is
    off."""

    linger_ms: NotNegative = 5
    """The most a record waits for company. It goes at once while nothing of its partition is in
    flight, so a lone record does not wait."""

    batch_size: PositiveBytes = 256 * KIB
    """Bytes of keys, values and headers that close a batch. Records of 1 KB take half as much CPU
    in batches of 256 KiB as in batches of 64 KiB; still larger ones gain little."""

    compression_type: Literal["lz4", "none"] = "lz4"
    """How batch bodies are compressed; a body that would not shrink is kept plain."""

    max_in_flight_requests_per_connection: Positive = 5
    """Batches of one partition under way at once, 1 to 5 with idempotence."""

    delivery_timeout_ms: Positive = 120_000
    """From `send` to the result, retries included; then the future fails."""

    request_timeout_ms: Positive = 10_000
    """How long one request waits for its answer before it is retried."""

    retry_backoff_ms: Positive = 20
    """Wait before a retry; doubles up to 1 s, with jitter."""

    buffer_memory: PositiveBytes = 32 * MIB
    """Bytes of records waiting or in flight. A full buffer blocks `send` (back-pressure).
    At least `batch_size`."""

    max_block_ms: Positive = 60_000
    """How long `send` blocks on a full buffer or missing metadata before it raises."""

    partitioner: Partitioner | None = None
    """`f(key, partition_count) -> partition`. None: crc32 of the key (as librdkafka's
    `consistent`); without a key one partition for 0.1 s or one full batch, then another. (Under
    `linger_ms=0` for one batch.)"""

    value_serializer: Serializer | None = None
    """`f(value) -> bytes`, called by `send` with each value but None. None: values are bytes."""

    key_serializer: Serializer | None = None
    """The same for keys. A partitioner gets the bytes."""

    large_values: str | None = None
    """What `send` does with a record above the topic's `max_message_bytes`. None: it raises.
    "chunks": the value goes into the log in pieces, which readers put together (at least acks=1;
    not into compacted topics). A URL (`s3://bucket/prefix`, `file:///directory`, any that fsspec
    knows): the value becomes an object there, and the record names it; `send` waits for the store,
    and readers need the same URL as their `large_values`. See docs/how-to/large-values.md."""

    transactional_id: str | None = None
    """Writes in transactions, under a name that stays over restarts: a producer that starts with it
    fences the one before. 1 to 256 characters. Needs acks="all" and enable_idempotence."""

    transaction_timeout_ms: TransactionTimeoutMs = 60_000
    """A transaction that has not ended so long after its first record is aborted, as of a producer
    that died: readers of its partitions wait for it meanwhile."""

    commit_wait_ms: NotNegative = 1000
    """How long a commit that is decided waits until all readers see it. In a loop of short
    transactions 0 saves a third of the time; readers see each one some milliseconds later."""

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
    """How a consumer fetches, where it starts, and how it takes part in a group."""

    auto_offset_reset: Literal["earliest", "latest", "none"] | timedelta = "latest"
    """Where to start without a position, and where to go when the position is not in the log: it
    fell below the log start, or a `seek` or a commit set it past the end (neither is checked). A
    duration: that long ago (KIP-1106); "none" raises `OffsetOutOfRangeError` instead. Records that
    were read and that an unclean election took back are a `LogTruncatedError` in any case."""

    group_instance_id: str | None = None
    """Makes a static member (KIP-345): a process that comes back under the same id within the
    session keeps its partitions, without a rebalance. 1 to 249 characters."""

    assignor: str = "uniform"
    """How partitions are given out: "uniform" (balanced within one, sticky), "range" (consecutive
    partitions, the same of each topic), or one of the cluster's `group_assignors`."""

    group_session_timeout_ms: SessionMs = 45_000
    """A member that is silent for so long is taken out of its group. (One whose process dies is
    noticed by its connection, within about a second.)"""

    group_heartbeat_interval_ms: Positive = 3_000
    """How long a heartbeat is held while nothing changes; at most half of
    `group_session_timeout_ms`."""

    max_poll_interval_ms: PollIntervalMs = 300_000
    """The most time between two polls; a member that takes longer loses its partitions."""

    enable_auto_commit: bool = False
    """Commit by itself what earlier polls returned: every `auto_commit_interval_ms`, when
    partitions are given up and at `close`. At-least-once only if each record is dealt with before
    the next poll."""

    auto_commit_interval_ms: Positive = 5_000
    """How often, with `enable_auto_commit`."""

    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """"read_committed" returns records of transactions that committed, and stops below the first
    transaction that is not decided. "read_uncommitted" returns everything that is replicated. Where
    nobody uses transactions they are the same."""

    max_poll_records: Positive = 500
    """The most records that one `poll` returns unless it says otherwise."""

    fetch_max_bytes: PositiveBytes = 4 * MIB
    """Bytes asked of one partition per fetch; at least one batch always comes."""

    fetch_max_wait_ms: Positive = 500
    """How long a leader holds a fetch that has nothing to return."""

    fetch_buffer_bytes: PositiveBytes = 64 * MIB
    """Prefetched bytes over all partitions that wait for `poll`; fetching pauses beyond it. Also
    the most that one `poll` unpacks (but a whole batch, and 16 MiB, in any case)."""

    request_timeout_ms: Positive = 10_000
    """How long a request waits for its answer (on top of `fetch_max_wait_ms`) before it is
    retried."""

    default_api_timeout_ms: Positive = 60_000
    """How long a call without a timeout of its own (offsets, metadata) retries before it raises."""

    retry_backoff_ms: Positive = 20
    """Wait before a retry; doubles up to 1 s, with jitter."""

    on_corrupt: OnCorrupt = "raise"
    """What becomes of records that cannot be read, such as a damaged batch, or a large value that
    is not there or larger than this reader takes: "raise" tells of them by an
    `UnreadableRecordError` that has their offset and the next one, and stays there until a `seek`;
    "skip" goes on after them, with a warning in the log. What may be mended outside the record (a
    deserializer that raises, a store that refuses the credentials) is raised in any case."""

    large_value_max_bytes: PositiveBytes = 256 * MIB
    """The largest value that is put together of chunks, or read from an object. A larger one is a
    `LargeValueRefusedError`."""

    large_values: str | None = None
    """Below which URL large values are read from objects (producers' `large_values`), by this
    process's credentials. None: a value in an object is a `LargeValueRefusedError`. Values in
    chunks need no permission."""

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
    """Where large values are objects. Raises ConfigError, which does not show the URL."""
    if url is None or url in others:
        return
    words = "".join(f'"{one}", ' for one in others)
    check_url(f"large_values (None, {words}or a URL such as s3://bucket/prefix)", url)


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """How a consumer pool grows, shrinks, and deals with records that its handler refuses."""

    min_consumers: NotNegative = 0
    """So many run always; 0: none while nothing waits."""

    max_consumers: Positive | None = None
    """The most that run, at least `min_consumers`. None: as many as the topic has partitions, the
    most that can be of use."""

    target_lag_s: PositiveSeconds = 10.0
    """How old the oldest record that is not handled yet should be at most, in seconds, and how fast
    a backlog is worked off. Smaller: more consumers."""

    cool_down_s: NotNegativeSeconds = 30.0
    """Consumers are stopped once fewer would have done for so long. Shorter: less idling, more
    starting."""

    resources: dict[str, float | int] | None = None
    """What each consumer takes of Ray: "num_cpus", "num_gpus", "memory" (bytes), or a custom
    resource. None: one CPU. Consumers that find no room wait, which makes Ray's autoscaler add
    nodes."""

    batch: Literal["records", "arrow"] = "records"
    """What the handler is given: a list of `Record`, or a `pyarrow.Table` as of `poll_arrow`."""

    max_records: Positive = 500
    """The most records that the handler is given at once."""

    auto_offset_reset: Literal["earliest", "latest"] = "earliest"
    """Where partitions begin that the group has no position of: at their log start, or where they
    ended when the pool was started."""

    retries: NotNegative = 5
    """How often a batch that the handler raised an error for is tried again, before it is taken
    apart and what still fails goes to the dead letters."""

    retry_backoff_ms: Positive = 200
    """Wait before a retry; doubles up to `retry_backoff_max_ms`, with jitter."""

    retry_backoff_max_ms: Positive = 30_000
    """The longest wait before a retry; at least `retry_backoff_ms`."""

    dead_letter_topic: str | None = None
    """Where records go that the handler keeps refusing, with the reason in headers. None: nowhere,
    they are tried again until they succeed, and what follows in their partition waits."""

    exactly_once: bool = False
    """Each batch is a transaction: what the handler returns (an `Outgoing`, an iterable of them, or
    None) is sent, and the batch counts as handled, both or neither. So is what goes to the dead
    letters."""

    max_poll_interval_ms: PollIntervalMs = 300_000
    """The most time that one call of the handler may take. A consumer that takes longer loses its
    partitions, and is killed."""

    group_session_timeout_ms: SessionMs = 45_000
    """A consumer that is silent for so long is taken out of its group."""

    drain_timeout_s: Annotated[float, Bounds(0, DAY_MS // 1000, above_zero=True)] = 60.0
    """How long a consumer that is stopped may take to finish the batch it is at; then it is killed,
    and others handle that batch again."""

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
    """A misspelt name would be a custom resource that no node has: consumers would wait for it for
    ever."""
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
"""A known name that is so similar (by difflib) is suggested; a less similar one would mislead."""
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
    know are passed over: a newer one wrote them. Raises `ConfigError` for other mistakes."""
    any_kind: Any = kind  # mypy takes no class with a __hash__ of its own for hashable.
    parsed: Config = _parsed(any_kind, msgspec.msgpack.encode(options))
    return parsed


@lru_cache(256)
def _parsed(kind: Any, encoded: bytes) -> Any:
    """A broker with many partitions is told few configs many times."""
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
    only the members of a group use: its user takes the consumer for a member."""
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
    """A type, for people."""
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

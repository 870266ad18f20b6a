"""Configs that the cluster keeps: of topics, of queues and of the cluster itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rayq.config.urls import check_url
from rayq.config.values import (
    DAY_MS,
    GIB,
    HOUR_MS,
    KIB,
    MIB,
    Bounds,
    NotNegative,
    NotNegativeBytes,
    Positive,
    PositiveBytes,
    check_values,
    require,
)
from rayq.messages.acls import PRINCIPAL_NAME, SUPERUSER

MESSAGE_BYTES_CEILING = 64 * MIB
"""The maximum of `max_message_bytes`, and the maximum size of a batch before compression."""
PLAIN_BYTES_FACTOR, PLAIN_BYTES_MIN = 4, 4 * MIB
"""A batch may have this many times `max_message_bytes` before compression, and this minimum in any
case. Without a limit a small request could take all memory of the process that reads it: lz4 blocks
grow by up to 255 times."""


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
        check_values(self)
        require(
            self.max_compaction_lag_ms is None
            or self.max_compaction_lag_ms >= self.min_compaction_lag_ms,
            "max_compaction_lag_ms must be at least min_compaction_lag_ms.",
        )
        require(
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
        check_values(self)
        require(
            self.max_handling_s >= self.visibility_timeout_s,
            "max_handling_s must be at least visibility_timeout_s.",
        )
        require(
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

    access_patience_ms: Positive = 15_000
    """The time without news of the metadata after which a server refuses named principals: somebody
    may have revoked their tokens meanwhile. Superusers are still served. Set it longer than it
    takes until another controller is elected: `controller_patience_ms` and some seconds."""

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
    """The number of records after which the metadata log is cut down to a snapshot, once they take
    as many bytes as the last one."""

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
    """The number of partitions of `__queue_state`, fixed at the first queue. Each has a coordinator
    of its own."""

    offsets_retention_ms: Positive = 7 * DAY_MS
    """The time after which the positions of a group without members are deleted."""

    group_disconnect_grace_ms: Positive = 1000
    """The time in which a member whose connection broke may come back before it counts as gone."""

    group_assignors: dict[str, str] | None = field(default=None, hash=False)
    """Your own assignors, name to `module:function`, importable where the servers run; see
    `rayq.core.groups.assignors`."""

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

    remote_direct_reads: Literal["all", "superuser", "none"] = "all"
    """The clients whose batch jobs get signed URLs, by which they read objects past the leaders.
    Nobody can take a URL back: it is valid for up to 15 minutes, and no longer than the client's
    token. "superuser": only those without a principal's token. The others read through the
    leaders."""

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

    tls_client_ca: str | None = None
    """The path of the PEM certificates of the authorities that sign certificates of principals. A
    client that shows one is that principal without a token; it cannot pose as a server. None: no
    certificate names a principal."""

    tls_principals: Literal["san_uri", "cn"] | None = None
    """The place of the principal's name in such a certificate: the only URI of its
    subjectAltName (as SPIFFE has it), or its common name. Set it together with `tls_client_ca`."""

    inside_ray_principal: str | None = None
    """The principal that `rayq.connect()` is in programs of the cluster's Ray, unless `token` or
    RAYQ_TOKEN names another. None: the superuser. Create the principal first. It guards against
    mistakes: code in Ray can read the cluster's secret."""

    def __post_init__(self) -> None:
        check_values(self)
        require(
            self.session_timeout_ms >= 2 * self.heartbeat_interval_ms,
            "session_timeout_ms must be at least twice heartbeat_interval_ms, or one late "
            "heartbeat ends a session.",
        )
        require(
            self.replica_rebuild_delay_ms is None
            or self.replica_rebuild_delay_ms >= self.session_timeout_ms,
            "replica_rebuild_delay_ms must be None or at least session_timeout_ms.",
        )
        tls = (self.tls_certificate, self.tls_key, self.tls_ca)
        require(
            all(tls) or not any(tls),
            "TLS needs all three of tls_certificate, tls_key and tls_ca; without TLS all three are "
            "None.",
        )
        require(
            bool(self.tls_client_ca) == bool(self.tls_principals)
            and bool(self.tls_ca or not self.tls_client_ca),
            "tls_client_ca and tls_principals are set together, and need TLS.",
        )
        if self.remote_storage_url is not None:
            check_remote_storage_url(self.remote_storage_url)
        inside = self.inside_ray_principal
        require(
            inside is None
            or (inside != SUPERUSER and re.fullmatch(PRINCIPAL_NAME, inside) is not None),
            "inside_ray_principal is the name of a principal, such as analytics. Without it "
            f"programs in Ray are the {SUPERUSER}.",
        )


REMOTE_STORAGE_SCHEMES = ("s3", "gs", "az", "file")


def check_remote_storage_url(url: str) -> None:
    """Raises ConfigError, which does not show the URL."""
    check_url("remote_storage_url", url, schemes=REMOTE_STORAGE_SCHEMES)
    scheme, _, rest = url.partition("://")
    require(
        (scheme == "file") == rest.startswith("/"),
        "remote_storage_url is s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or "
        "file:///path.",
    )

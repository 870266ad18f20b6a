"""Requests between replicas, and between a replica's process and its broker."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from rayq.messages.access import AccessDigest, AccessNews
from rayq.messages.base import (
    Answerer,
    BrokerId,
    Bytes,
    CheckedInt,
    CheckedName,
    Counter,
    Done,
    Epoch,
    HeldEpoch,
    HostName,
    Id,
    Milliseconds,
    Offset,
    Port,
    Response,
    Text,
    ToBroker,
    ToLeader,
    ToPartition,
    ToReplicaHost,
)
from rayq.messages.limits import HOSTED_MAX
from rayq.messages.queues import QueueMetadata
from rayq.messages.quotas import QuotaDemands, QuotaShare
from rayq.messages.remote_pointer import RemotePointer

# --- between replicas ---------------------------------------------------------------------------


class ReplicaFetchResponse(Response, frozen=True):
    """Either batches (the payload) or a divergence: the follower's log may agree with the leader's
    only up to (`diverging_epoch`, `diverging_end`). Then the follower truncates and fetches again
    before it looks at the other fields."""

    high_watermark: int
    log_start_offset: int
    epoch_start_offset: int
    """Start offset of the leader's epoch."""
    diverging_epoch: int | None = None
    diverging_end: int | None = None
    reset_to: int | None = None
    """Not None if the follower's log ends below the leader's local start, or below its tombstone
    horizon: the follower copies the leader's `ReplicaSnapshot` and restarts its log at this offset.
    """
    cleaned_offset: int = 0
    """Below it compaction may have left gaps between offsets."""
    tombstone_horizon: int = 0
    """Below it tombstones may be missing. A follower that copies from below remembers that."""


class ReplicaFetch(ToPartition[ReplicaFetchResponse], frozen=True):
    """A follower's fetch. Its log ends at `offset`; its disk holds all below `flushed`."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("leader",)
    api: ClassVar[int] = 40
    ends_with_connection: ClassVar[bool] = True
    broker: BrokerId
    incarnation: Id
    leader_epoch: Epoch
    offset: Offset
    flushed: Offset
    log_start_offset: Offset
    last_epoch: HeldEpoch | None
    """The leader epoch of the follower's last batch. None: its log is empty."""
    bytes_max: Bytes
    wait_ms: Milliseconds
    copied_horizon: Offset = 0
    """The follower copied its whole log from this leader while the leader's tombstone horizon was
    this: so it holds no record whose tombstone was gone by then. 0: not so, or not known."""
    local_start_offset: Offset = 0
    """Records below, down to `log_start_offset`, are not on the follower's disk."""


class ReplicaFlushed(ToPartition[Done], frozen=True):
    """One-way: the follower's disk holds everything below `flushed`."""

    answered_by: ClassVar[tuple[Answerer, ...]] = ("leader",)
    api: ClassVar[int] = 41
    broker: BrokerId
    incarnation: Id
    leader_epoch: Epoch
    flushed: Offset


class ReplicaSnapshotResponse(Response, frozen=True):
    """The payload is the producer state at the local start, in the format of a snapshot file."""

    log_start_offset: int
    epochs: list[tuple[int, int]]
    """`(leader epoch, start offset)` pairs up to the local start, ascending."""
    local_start_offset: int | None = None
    """Offset at which the follower's log restarts: the leader's first local offset. The producer
    state is of that offset. None: from a leader without remote storage, the log start."""


class ReplicaSnapshot(ToLeader[ReplicaSnapshotResponse], frozen=True):
    api: ClassVar[int] = 42


class ReplicaStatus(msgspec.Struct, array_like=True, frozen=True):
    """One replica in a process."""

    topic_id: CheckedName
    partition: CheckedInt
    last_epoch: CheckedInt | None
    """The leader epoch of the last batch. None: the log is empty, or not open yet."""
    flushed: CheckedInt
    failure: Text | None = None
    """The reason that the replica stopped (a disk error). None: it works."""
    is_damaged: bool = False
    """The replica stopped because bytes of its log are damaged, on a disk that works otherwise."""


class PartitionAssignment(msgspec.Struct, array_like=True, frozen=True):
    """The data of a partition that its replica needs, from committed metadata."""

    topic: str
    topic_id: str
    partition: int
    config: dict[str, Any]
    leader: int | None
    leader_incarnation: str | None
    leader_host: str | None
    leader_port: int | None
    leader_epoch: int
    partition_epoch: int
    last_unclean_epoch: int | None
    """The last leader epoch whose leader may have lacked committed records, or None."""
    isr: list[tuple[int, str]]
    """`(broker, incarnation)` of each in-sync replica."""
    replicas: list[tuple[int, str | None]]
    """`(broker, incarnation registered now)` of each replica, in order of preference."""
    replication_factor: int = 0
    """The topic's: a partition that is being moved has more replicas. 0: as many as `replicas`."""
    throttle_bytes_per_s: int | None = None
    """Maximum rate at which this replica copies while it is not in sync. None: no limit."""
    remote: RemotePointer | None = None
    """The committed remote pointer. None: nothing of the partition is in the object store."""
    pinned_offset: int | None = None
    """Retention keeps everything from here on (the lowest pin). None: nothing is pinned."""
    partitions: int = 0
    """Number of partitions of the topic. 0: from a broker that does not send it."""
    is_remote_doubted: bool = False
    """The metadata came back from an older copy, so `remote` may be old, or missing. The leader
    adopts the newest manifest, or makes an empty one, before it appends: the next pointer that is
    committed ends the doubt."""
    queues: list[QueueMetadata] = msgspec.field(default_factory=list)
    """The queues that read this topic, by name."""

    @property
    def labels(self) -> dict[str, object]:
        """Labels of the partition's metrics, and fields of its log lines."""
        return {"topic": self.topic, "partition": self.partition}


class AttachReplicaHostResponse(Response, frozen=True):
    cluster_id: str
    session: int = 0
    """Number of this presentation: heartbeats with it may leave out replicas that have not changed
    since this request, or since a heartbeat after it. 0: they must name all."""


class AttachReplicaHost(ToBroker[AttachReplicaHostResponse], frozen=True):
    """A replica process presents itself to its broker, and again after the broker's restart."""

    api: ClassVar[int] = 50
    incarnation: Id
    pid: Counter
    pid_start_time: Counter
    host: HostName
    port: Port
    replicas: Annotated[list[ReplicaStatus], msgspec.Meta(max_length=HOSTED_MAX)]
    let_go: Annotated[
        list[tuple[CheckedName, CheckedInt]], msgspec.Meta(max_length=HOSTED_MAX)
    ] = msgspec.field(default_factory=list)
    """`(topic id, partition)` pairs that the process hosted and closed at the broker's word. It
    never hosts them again under this incarnation, which stands for a log that is gone."""


class ReplicaHostHeartbeatResponse(Response, frozen=True):
    version: int
    assignments: list[PartitionAssignment]
    """The assignments that changed since `version` of the request."""
    removed: list[tuple[str, int]]
    """`(topic id, partition)` pairs that this process must close: deleted, or moved away."""
    object_server: tuple[str, int] | None = None
    """Address of this node's object server. None: there is none, or it is starting."""
    remote_halt: str | None = None
    """The reason that leaders may now neither store nor delete objects, only read them: another
    cluster uses the same folder under the same id, or that is not known yet. None: they may."""
    remote_backlog_bytes: int = 0
    """Bytes on the node's disk that wait to be uploaded to the object store, in all replica
    processes."""
    deleted: list[str] = msgspec.field(default_factory=list)
    """The ids of topics of which the process has closed replicas, and which were deleted: no topic
    has such an id again, so it need not remember them."""
    access: AccessNews | None = None
    """None: there are no principals, and the process knows that."""
    quota_part: float = 1.0
    """The fraction of each quota of the whole cluster that is the process's own, but for those
    in `quota_shares`."""
    quota_shares: list[QuotaShare] = msgspec.field(default_factory=list)


class ReplicaHostHeartbeat(ToBroker[ReplicaHostHeartbeatResponse], frozen=True):
    """The broker answers after `wait_ms`, or at once when an assignment, or the access, changes.

    A heartbeat whose `wait_ms` is not 0 leaves only after the answers to all before it were acted
    on, or given up. One with 0 may report something while the broker holds another.
    """

    api: ClassVar[int] = 51
    ends_with_connection: ClassVar[bool] = True
    incarnation: Id
    version: Counter
    replicas: Annotated[list[ReplicaStatus], msgspec.Meta(max_length=HOSTED_MAX)]
    wait_ms: Milliseconds
    remote_backlog_bytes: Counter = 0
    """Size of the records in closed segments of its replicas that are not in the object store
    yet."""
    access_digest: AccessDigest = b""
    """The digest of the access that the process knows."""
    has_all: bool = True
    """False: `replicas` has only those that changed since the process attached itself, or since its
    last heartbeat. So the cost of a heartbeat does not grow with the replicas of the process, as in
    a fetch session (KIP-227)."""
    closed: Annotated[
        list[tuple[CheckedName, CheckedInt]], msgspec.Meta(max_length=HOSTED_MAX)
    ] = msgspec.field(default_factory=list)
    """`(topic id, partition)` pairs that it no longer has, where `replicas` does not have all."""
    session: Counter = 0
    """The number in the answer to its `AttachReplicaHost`. The broker refuses another one: that
    heartbeat came late, over an earlier connection. 0: it was told none."""
    quota_demands: QuotaDemands = msgspec.field(default_factory=list)
    """The demands of clients for the quotas that they use here now."""


class StopReplicaHostResponse(Response, frozen=True):
    replicas: list[ReplicaStatus]


class StopReplicaHost(ToReplicaHost[StopReplicaHostResponse], frozen=True):
    """Tells a replica process to stop serving, flush, answer where each log ends, and exit."""

    api: ClassVar[int] = 52

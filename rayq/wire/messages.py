"""The typed messages of the protocol: one struct for each request and each answer.

A request class names its number on the wire and its answer; both are encoded as msgpack arrays
(field order is the format: append fields with a default, never reorder). Bulk bytes (record
batches, metadata records) travel beside the message as the frame's raw payload, never inside it.

An answer may also be an error: `(code, message)` of `rayq.errors`, marked by a flag of the frame.

Topics are named by id (a UUID in hex), so that a topic deleted and created anew is another topic.
Roles: a *client* holds the cluster's secret or a token; a *server* is a rayq process.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar, get_args

import msgspec

from rayq.metrics import Sample

Offset = Annotated[int, msgspec.Meta(ge=0)]
Epoch = Annotated[int, msgspec.Meta(ge=0)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=249)]
GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=249)]
CommitMetadata = Annotated[str, msgspec.Meta(max_length=4096)]
Partition = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000)]
MILLISECONDS_MAX = 3_600_000
"""The longest wait that a request may ask for."""
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=MILLISECONDS_MAX)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]

EARLIEST = -2
"""`ListOffsets.timestamp_ms` for the log start (the value Kafka uses)."""
LATEST = -1
"""`ListOffsets.timestamp_ms` for the high watermark (the value Kafka uses)."""


class Response(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of the answers."""


ResponseT_co = TypeVar("ResponseT_co", bound=Response, covariant=True)
ResponseT = TypeVar("ResponseT", bound=Response)
"""Of functions that ask: they take a `Request[ResponseT]` and give a `ResponseT`."""


REQUESTS: dict[int, type[Request[Any]]] = {}
"""Every kind of request by its number. To declare one is enough to have it here."""


class Request(msgspec.Struct, Generic[ResponseT_co], array_like=True, frozen=True, gc=False):
    """Base of the requests. A kind is a class of `Request[ItsAnswer]`, or of the base below that
    says who answers it, with a number of its own in `api`. Work on one that `ends_with_connection`
    is cancelled when whoever asked is gone: it only reads or waits."""

    api: ClassVar[int]
    response: ClassVar[type[Response]]
    ends_with_connection: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in getattr(cls, "__orig_bases__", ()):
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, Response):
                    cls.response = argument
        if "api" in vars(cls):
            assert cls.api not in REQUESTS, f"{cls.__name__} and {REQUESTS[cls.api].__name__}"
            REQUESTS[cls.api] = cls


AnyRequest = Request[Any]


class Ask(Protocol):
    """Sends a request to where it is answered, and returns the answer. Raises RayqError."""

    def __call__(self, request: Request[ResponseT]) -> Awaitable[ResponseT]: ...


class ToController(Request[ResponseT_co], frozen=True):
    """Base of what the controller answers. Any broker forwards it there."""


class ToPartition(Request[ResponseT_co], frozen=True):
    """Base of what the process of a partition's replica answers."""

    topic_id: Id
    partition: Partition


class ToLeader(ToPartition[ResponseT_co], frozen=True):
    """Base of what the leader of a partition answers, in the epoch that it is asked in. Raises
    NotLeaderError, FencedEpochError, UnknownEpochError."""

    leader_epoch: Epoch


class ToCoordinator(ToLeader[ResponseT_co], frozen=True):
    """Base of what the coordinator of a group answers: it lives with the leader of a partition of
    `__consumer_offsets`."""


class Done(Response, frozen=True):
    """An answer that carries nothing."""


# --- what clients ask any broker ----------------------------------------------------------------


class BrokerEndpoint(Response, frozen=True):
    broker: int
    host: str
    port: int
    node_id: str
    live: bool
    cordoned: bool = False
    """It takes no new replicas."""


class ReplicaEndpoint(Response, frozen=True):
    """Where a replica's process listens; host and port are None while it is not running."""

    broker: int
    host: str | None
    port: int | None


class PartitionMetadata(Response, frozen=True):
    partition: int
    leader: int | None
    leader_epoch: int
    partition_epoch: int
    isr: list[int]
    replicas: list[ReplicaEndpoint]
    offline_reason: str | None
    target: list[int] = []
    """While the partition is being moved: the replicas that stay; else empty, as is `origin`."""
    origin: list[int] = []
    """The replicas that there were before the move."""
    throttle_bytes_per_s: int | None = None


class TopicMetadata(Response, frozen=True):
    name: str
    topic_id: str
    config: dict[str, Any]
    """The topic's whole config, as `rayq.config.as_dict` gives it."""
    partitions: list[PartitionMetadata]


class MetadataResponse(Response, frozen=True):
    cluster_id: str
    version: int
    """Grows with every committed change; a client never goes back to a lower one."""
    controller_epoch: int
    controller: str | None
    """`host:port`. None: not known, or the broker has not registered since its start, and may know
    little of the cluster as it is now."""
    voters: list[int]
    brokers: list[BrokerEndpoint]
    topics: list[TopicMetadata]
    """In the order of their names."""
    next_after: str | None = None
    """There are more topics than one answer holds: ask again with this as `after`."""


METADATA_TOPICS_MAX = 10_000
"""The most topics that one Metadata request names, repetitions included."""

METADATA_PARTITIONS_MAX = 2_000
"""An answer ends with the topic that brings it to so many partitions."""


class Metadata(Request[MetadataResponse], frozen=True):
    """The cluster as this broker knows it. A broker waits up to `wait_ms` for a version of at least
    `version_min`, then answers with what it has; where that is much, in pages (`metadata_pages`
    asks for them all)."""

    api: ClassVar[int] = 1
    ends_with_connection: ClassVar[bool] = True
    topics: Annotated[list[str], msgspec.Meta(max_length=METADATA_TOPICS_MAX)] | None = None
    """None: all. A name that does not exist is missing in the answer."""
    version_min: int = 0
    wait_ms: Milliseconds = 0
    after: str = ""
    """Only topics with names after this one."""


class AllocateProducerIdResponse(Response, frozen=True):
    producer_id: int
    producer_epoch: int


class AllocateProducerId(Request[AllocateProducerIdResponse], frozen=True):
    """A producer id that no producer had before, epoch 0."""

    api: ClassVar[int] = 2


class ChangeResponse(Response, frozen=True):
    """A change of metadata is committed. `version` is that of the change: ask brokers for metadata
    of at least this version to see it."""

    version: int


class Change(ToController[ChangeResponse], frozen=True, kw_only=True):
    """Base of the changes that clients ask for. A client repeats one whose answer was lost, under
    the same `request_id`: what was done already is answered as the first time, and not done again.
    Any broker forwards them to the controller."""

    request_id: Id | None = None
    """Drawn by the client, once for each call. None: a repetition is another request."""


class CreateTopic(Change, frozen=True):

    api: ClassVar[int] = 3
    name: str
    partitions: int
    replication_factor: int | None
    config: dict[str, Any]


class DeleteTopic(Change, frozen=True):
    api: ClassVar[int] = 4
    name: str


class CreatePartitions(Change, frozen=True):
    api: ClassVar[int] = 5
    name: str
    total: int


class AlterTopicConfig(Change, frozen=True):
    api: ClassVar[int] = 6
    name: str
    changes: dict[str, Any]
    """A key set to None where None is not a legal value goes back to its default."""


class ElectLeaders(Change, frozen=True):
    """Elects the preferred leader (the first replica) where it is in sync; with `unclean`, any live
    replica for a partition that has no leader."""

    api: ClassVar[int] = 7
    name: str
    partitions: list[int] | None
    unclean: bool


class EnsureOffsetsTopic(ToController[ChangeResponse], frozen=True):
    """Creates `__consumer_offsets` unless it is there already: the first use of a group asks for
    it. Any broker forwards this to the controller."""

    api: ClassVar[int] = 8


class AlterReassignments(Change, frozen=True):
    """Moves partitions (KIP-455): adds the target's replicas, and removes the others once all of
    the target are in sync. All of the moves begin, or none."""

    api: ClassVar[int] = 9
    moves: list[tuple[str, int, list[int] | None]]
    """`(topic, partition, brokers)`, the preferred leader first; None cancels the move that is
    under way."""
    throttle_bytes_per_s: int | None = None
    """The most that each added replica copies; None: no limit."""


class SetReplicationFactor(Change, frozen=True):
    """Begins the moves after which every partition of a topic has so many replicas, all of them or
    none. The same factor again changes the throttle."""

    api: ClassVar[int] = 12
    name: str
    replication_factor: int
    throttle_bytes_per_s: int | None = None


class CordonBroker(Change, frozen=True):
    """The broker takes no new replicas from now on, and gives up its vote where it can; or does so
    again no more."""

    api: ClassVar[int] = 10
    broker: int
    cordoned: bool


class RemoveBroker(Change, frozen=True):
    """Forgets a broker that is stopped and holds no replicas."""

    api: ClassVar[int] = 11
    broker: int


class DescribeMetricsResponse(Response, frozen=True):
    samples: list[Sample]


class DescribeMetrics(Request[DescribeMetricsResponse], frozen=True):
    """What this process measures. Any server answers."""

    api: ClassVar[int] = 19


# --- what clients ask a partition's leader ------------------------------------------------------


class ProduceResponse(Response, frozen=True):
    base_offset: int
    append_time_ms: int
    """The leader's clock at the append (that of the original for a duplicate)."""
    log_start_offset: int
    is_repeat: bool = False
    """Whether the batch was there already, under the same numbers of the same producer."""


class Produce(ToLeader[ProduceResponse], frozen=True):
    """Appends the one record batch that is the payload.

    Under `acks` 0 the server answers nothing but errors (the frame is marked one-way), under 1
    after its own append, under -1 ("all") once the high watermark passed the batch.
    Raises NotLeader, FencedEpoch, UnknownTopic, CorruptBatch, RecordTooLarge, InvalidTimestamp,
    NotEnoughReplicas(AfterAppend), OutOfOrderSequence, UnknownProducer, ProducerFenced, Storage,
    DiskFull, Timeout errors.
    """

    api: ClassVar[int] = 20
    """The epoch the client knows; an older one than the leader's is fenced."""
    acks: Annotated[int, msgspec.Meta(ge=-1, le=1)]
    timeout_ms: Milliseconds


class FetchResponse(Response, frozen=True):
    """The payload holds whole record batches; the first may begin below the offset asked for."""

    high_watermark: int
    log_start_offset: int
    cleaned_offset: int
    """Below it gaps between offsets are legal (compaction)."""
    next_offset: int
    """Where to fetch next: the end of the payload's last batch (or the offset asked for)."""


class Fetch(ToLeader[FetchResponse], frozen=True):
    """Reads committed batches from `offset`; held up to `wait_ms` while there are none.

    `last_epoch` is the leader epoch of the last batch the client read (None at first): where the
    log branched off since, the answer is LogTruncatedError. Raises NotLeader, FencedEpoch,
    UnknownEpoch, UnknownTopic, OffsetOutOfRange (below the log start, or past the end),
    OffsetNotAvailable, LogTruncated, Storage errors.
    """

    api: ClassVar[int] = 21
    ends_with_connection: ClassVar[bool] = True
    offset: Offset
    last_epoch: int | None
    bytes_max: Bytes
    wait_ms: Milliseconds


class ListOffsetsResponse(Response, frozen=True):
    offset: int | None
    """None: no record has so late a timestamp."""
    timestamp_ms: int | None


class ListOffsets(ToLeader[ListOffsetsResponse], frozen=True):
    """The first offset whose record has a timestamp >= `timestamp_ms`, or EARLIEST, or LATEST."""

    api: ClassVar[int] = 22
    timestamp_ms: Annotated[int, msgspec.Meta(ge=-2)]


class DeleteRecordsResponse(Response, frozen=True):
    log_start_offset: int


class DeleteRecords(ToLeader[DeleteRecordsResponse], frozen=True):
    """Moves the log start up to `before_offset` (None: the high watermark); answered once every
    replica that may lead next has moved it. NotEnoughReplicasError while fewer than
    `min_insync_replicas` are in sync."""

    api: ClassVar[int] = 23
    before_offset: Offset | None
    timeout_ms: Milliseconds


class DescribeReplicaResponse(Response, frozen=True):
    broker: int
    pid: int
    leader_epoch: int
    is_leader: bool
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    flushed_offset: int
    size_bytes: int
    trouble: str | None = None
    """What keeps a follower from going on, such as a full disk; None: nothing that it knows of."""
    disk_free_bytes: int | None = None
    """Of the file system that the log is on."""


class DescribeReplica(ToPartition[DescribeReplicaResponse], frozen=True):
    """Any replica answers, leader or not."""

    api: ClassVar[int] = 24


class CheckRange(ToPartition[Done], frozen=True):
    """A reader found a wrong CRC in this range: the leader reads it again from its disk, and steps
    down when the damage is its own."""

    api: ClassVar[int] = 25
    offset: Offset


class DescribeOffsetResponse(Response, frozen=True):
    """The batch that holds the record; both None at the high watermark: there is none yet."""

    append_time_ms: int | None
    age_ms: int | None
    """By the clock of the leader, which stamped it (or followed who did)."""


class DescribeOffset(ToLeader[DescribeOffsetResponse], frozen=True):
    """When the record at `offset` was appended, or, where it is gone, the oldest one left. Raises
    NotLeader, FencedEpoch, UnknownEpoch, UnknownTopic, OffsetNotAvailable, Storage errors."""

    api: ClassVar[int] = 26
    offset: Offset


class DescribeProducersResponse(Response, frozen=True):
    producer_ids: list[int]


class DescribeProducers(ToLeader[DescribeProducersResponse], frozen=True):
    """Which producers, of a range of ids, the leader remembers a batch of (after KIP-664)."""

    api: ClassVar[int] = 27
    first_producer_id: Annotated[int, msgspec.Meta(ge=0)]
    producer_id_count: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


# --- what group members ask their coordinator ---------------------------------------------------
#
# The coordinator of a group is the leader of one partition of `__consumer_offsets`: partition
# crc32(group) % partitions. `topic_id`, `partition` and `leader_epoch` name that partition, as in
# every request to a leader; it answers NotLeader, FencedEpoch, UnknownEpoch, UnknownTopic as there,
# and CoordinatorLoading (retriable) until it has read what its predecessors wrote.

MEMBER_EPOCH_JOIN = 0
MEMBER_EPOCH_LEAVE = -1
MEMBER_EPOCH_LEAVE_STATIC = -2
"""A static member goes away and keeps its partitions until its session ends (KIP-345)."""


class TopicPartitionId(Response, frozen=True):
    """A partition that a member may own. The id tells apart a topic deleted and created anew."""

    topic: str
    topic_id: str
    partition: int


class GroupHeartbeatResponse(Response, frozen=True):
    member_epoch: int
    """The epoch to send from now on; 0 after leaving."""
    assigned: list[TopicPartitionId]
    """What the member may own now, whole. What it owns beyond that it gives up at its next poll,
    then says so by a heartbeat with the smaller `owned`; only then is it given to another."""


class GroupHeartbeat(ToCoordinator[GroupHeartbeatResponse], frozen=True):
    """Joins (`member_epoch` 0), stays in, or leaves (-1, -2) a group. Held up to `wait_ms`,
    answered at once when what the member may own changes, or when a newer heartbeat of the same
    member arrives. Raises UnknownMember (join anew), FencedMember (an epoch of before, or another
    process took over the `instance`), UnknownAssignor, InvalidRequest (a pattern that does not
    compile)."""

    api: ClassVar[int] = 30
    group: GroupName
    member: Id
    """Chosen at random by the member when it is made (KIP-848)."""
    member_epoch: Annotated[int, msgspec.Meta(ge=-2)]
    instance: Name | None
    """`group_instance_id` of a static member."""
    client: str
    """Who it is, for operators: host and process."""
    topics: list[Name]
    pattern: str | None
    """A regular expression over topic names (whole match), beside `topics`."""
    assignor: Name
    session_timeout_ms: Milliseconds
    max_poll_interval_ms: Annotated[int, msgspec.Meta(ge=1)]
    """How long the member may take to give up a partition before it is taken out of the group."""
    owned: list[tuple[Id, Partition]]
    """`(topic id, partition)` pairs the member reads now."""
    wait_ms: Milliseconds
    reason: str = ""
    """Why it leaves."""


class CommitOffsetsResponse(Response, frozen=True):
    refused: list[tuple[str, int, str, str]]
    """`(topic id, partition, error code, message)` of what was not committed; the rest was."""


class CommitOffsets(ToCoordinator[CommitOffsetsResponse], frozen=True):
    """Commits positions, answered once they are in `__consumer_offsets` under acks=all.

    Of a member: its `member_epoch` is the current or the previous one, and it owns (or is giving
    up) each partition; `sequence` grows with each commit of the member, a lower one than the last
    is dropped (answered as done: a newer one is there). With `member` empty: of a consumer with
    partitions assigned by hand, while the group has no members. Raises UnknownMember,
    FencedMember, GroupNotEmpty."""

    api: ClassVar[int] = 31
    group: GroupName
    member: str
    member_epoch: int
    sequence: int
    offsets: list[tuple[Id, Partition, Offset, int | None, CommitMetadata]]
    """`(topic id, partition, offset of the next record, leader epoch of the last one, metadata)`"""


class CommittedOffset(Response, frozen=True):
    topic_id: str
    partition: int
    offset: int
    last_epoch: int | None
    metadata: str
    commit_time_ms: int


class FetchCommittedResponse(Response, frozen=True):
    offsets: list[CommittedOffset]
    """Partitions without a commit are missing."""


class FetchCommitted(ToCoordinator[FetchCommittedResponse], frozen=True):
    api: ClassVar[int] = 32
    group: GroupName
    partitions: list[tuple[Id, Partition]] | None
    """None: all of the group."""


class GroupSummary(Response, frozen=True):
    group: str
    state: str
    """"empty", "stable" or "rebalancing"."""
    members: int


class ListGroupsResponse(Response, frozen=True):
    groups: list[GroupSummary]


class ListGroups(ToCoordinator[ListGroupsResponse], frozen=True):
    """The groups of one partition of `__consumer_offsets`."""

    api: ClassVar[int] = 33


class GroupMemberDescription(Response, frozen=True):
    member: str
    instance: str | None
    client: str
    member_epoch: int
    assigned: list[TopicPartitionId]
    revoking: list[TopicPartitionId]
    """What it has been asked to give up and still owns."""


class DescribeGroupResponse(Response, frozen=True):
    group: str
    state: str
    epoch: int
    assignor: str
    members: list[GroupMemberDescription]
    offsets: list[CommittedOffset]
    rebalance_reason: str
    """Of the last rebalance."""
    rebalance_time_ms: int


class DescribeGroup(ToCoordinator[DescribeGroupResponse], frozen=True):
    """Raises UnknownGroup."""

    api: ClassVar[int] = 34
    group: GroupName


class DeleteGroup(ToCoordinator[Done], frozen=True):
    """Forgets a group and its offsets. Raises UnknownGroup, GroupNotEmpty."""

    api: ClassVar[int] = 35
    group: GroupName


class SetGroupOffsets(ToCoordinator[Done], frozen=True):
    """Sets positions of a group without members, whatever they were. Raises GroupNotEmpty."""

    api: ClassVar[int] = 36
    group: GroupName
    offsets: list[tuple[Id, Partition, Offset]]


# --- between replicas ---------------------------------------------------------------------------


class ReplicaFetchResponse(Response, frozen=True):
    """Either batches (the payload) or a divergence: the follower's log may agree with the leader's
    only up to (`diverging_epoch`, `diverging_end`), so it truncates and fetches anew before it
    looks at anything else here."""

    high_watermark: int
    log_start_offset: int
    epoch_start_offset: int
    """Where the leader's own epoch starts."""
    diverging_epoch: int | None = None
    diverging_end: int | None = None
    reset_to: int | None = None
    """The follower lies below the leader's log start, or below its tombstone horizon: copy the
    leader's `ReplicaSnapshot`, restart the log at this offset."""
    cleaned_offset: int = 0
    """Below it gaps between offsets are legal (compaction)."""
    tombstone_horizon: int = 0
    """Below it tombstones may be missing: who copies from below remembers that, for the time when
    it leads."""


class ReplicaFetch(ToPartition[ReplicaFetchResponse], frozen=True):
    """A follower's pull. What it has on disk is `flushed`; `offset` is only its end."""

    api: ClassVar[int] = 40
    ends_with_connection: ClassVar[bool] = True
    broker: int
    incarnation: Id
    leader_epoch: Epoch
    offset: Offset
    flushed: Offset
    log_start_offset: Offset
    last_epoch: int | None
    """The leader epoch of the follower's last batch, None for an empty log."""
    bytes_max: Bytes
    wait_ms: Milliseconds
    copied_horizon: Offset = 0
    """All that the follower has was copied from this leader while its tombstone horizon was this:
    it holds nothing whose tombstone was gone by then. 0: that is not so, or not known."""


class ReplicaFlushed(ToPartition[Done], frozen=True):
    """One-way: the follower's disk holds everything below `flushed`."""

    api: ClassVar[int] = 41
    broker: int
    incarnation: Id
    leader_epoch: Epoch
    flushed: Offset


class ReplicaSnapshotResponse(Response, frozen=True):
    """The payload is the producer state at `log_start_offset`, as a snapshot file holds it."""

    log_start_offset: int
    epochs: list[tuple[int, int]]
    """`(leader epoch, start offset)` pairs up to the log start, ascending."""


class ReplicaSnapshot(ToLeader[ReplicaSnapshotResponse], frozen=True):
    api: ClassVar[int] = 42


# --- between a replica's process and its node's broker ------------------------------------------


class ReplicaStatus(msgspec.Struct, array_like=True, frozen=True):
    """One replica in a process: None where its log is not open yet."""

    topic_id: str
    partition: int
    last_epoch: int | None
    flushed: int
    failure: str | None = None
    """Why the replica stopped (a disk error), None while it works."""
    is_damaged: bool = False
    """It stopped because what its log holds is damaged, on a disk that works otherwise."""


class PartitionAssignment(msgspec.Struct, array_like=True, frozen=True):
    """What a replica must know of its partition: a committed metadata version of it."""

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
    """The last leader epoch whose leader may have lacked committed records; None: there was
    none."""
    isr: list[tuple[int, str]]
    """`(broker, incarnation)` of each in-sync member."""
    replicas: list[tuple[int, str | None]]
    """`(broker, incarnation registered now)` of each replica, in order of preference."""
    replication_factor: int = 0
    """Of the topic: a partition that is being moved has more replicas. 0: as many as there are."""
    throttle_bytes_per_s: int | None = None
    """How much this very replica may copy while it is not in sync; None: no limit."""


class AttachReplicaHostResponse(Response, frozen=True):
    cluster_id: str


class AttachReplicaHost(Request[AttachReplicaHostResponse], frozen=True):
    """A replica process presents itself to its broker; also after the broker was restarted."""

    api: ClassVar[int] = 50
    incarnation: Id
    pid: int
    pid_start_time: int
    host: str
    port: int
    replicas: list[ReplicaStatus]
    let_go: list[tuple[str, int]] = []
    """`(topic id, partition)` pairs that it hosted once and was told to close: never again under
    this incarnation, which stands for a log that is gone."""


class ReplicaHostHeartbeatResponse(Response, frozen=True):
    version: int
    assignments: list[PartitionAssignment]
    """Those that changed since `version` of the request."""
    removed: list[tuple[str, int]]
    """`(topic id, partition)` pairs this process is to close: their topic was deleted, or they were
    moved away."""


class ReplicaHostHeartbeat(Request[ReplicaHostHeartbeatResponse], frozen=True):
    """Held for up to one heartbeat interval, answered at once when an assignment changes."""

    api: ClassVar[int] = 51
    ends_with_connection: ClassVar[bool] = True
    incarnation: Id
    version: int
    replicas: list[ReplicaStatus]
    wait_ms: Milliseconds


class StopReplicaHostResponse(Response, frozen=True):
    replicas: list[ReplicaStatus]


class StopReplicaHost(Request[StopReplicaHostResponse], frozen=True):
    """Broker to replica process: stop serving, flush, say where each log ends, exit."""

    api: ClassVar[int] = 52


# --- brokers and replicas to the controller -----------------------------------------------------


class FindControllerResponse(Response, frozen=True):
    epoch: int
    host: str | None
    port: int | None
    heard_ms_ago: int | None
    """How long ago this broker last heard from that controller."""


class FindController(Request[FindControllerResponse], frozen=True):
    """Any broker says which controller it follows."""

    api: ClassVar[int] = 60


class RegisterBrokerResponse(Response, frozen=True):
    controller_epoch: int


class RegisterBroker(ToController[RegisterBrokerResponse], frozen=True):
    """A broker process presents itself. Refused with StaleBrokerError when its directory is an old
    copy (`start_counter` not above the recorded one): it takes a new directory id and tries
    again."""

    api: ClassVar[int] = 61
    cluster_id: str
    broker: int
    directory_id: Id
    start_counter: int
    incarnation: Id
    host: str
    port: int
    node_id: str
    replicas_max: int
    held: list[tuple[str, int]]
    """`(topic id, partition)` of the directories that replica processes hold now: those of an
    earlier broker process that live on. All others are gone."""


class BrokerHeartbeatResponse(Response, frozen=True):
    controller_epoch: int


class BrokerHeartbeat(ToController[BrokerHeartbeatResponse], frozen=True):
    """Renews the broker's session. Raises StaleBrokerError: register (again) first."""

    api: ClassVar[int] = 62
    broker: int
    incarnation: Id


class ReplicaRegistration(msgspec.Struct, array_like=True, frozen=True):
    """A replica process as its broker vouches for it: where it listens, what its disk holds."""

    topic_id: str
    partition: int
    incarnation: str
    host: str
    port: int
    last_epoch: int | None
    flushed: int
    partition_epoch: int = 0
    """Of the partition in the metadata by which the broker knows that it is placed there."""


class RegisterReplicas(ToController[ChangeResponse], frozen=True):
    """New replica processes, with logs recovered. Idempotent: the broker repeats it until the
    metadata shows the incarnations."""

    api: ClassVar[int] = 63
    broker: int
    incarnation: Id
    replicas: list[ReplicaRegistration]


class ReplicasFailed(ToController[ChangeResponse], frozen=True):
    """Replica processes that are gone, or replicas that stopped on a disk error."""

    api: ClassVar[int] = 64
    broker: int
    incarnation: Id
    replicas: list[tuple[str, int, str]]
    """`(topic id, partition, incarnation)`"""
    reason: str


class AlterPartition(ToController[ChangeResponse], frozen=True):
    """A leader proposes a new in-sync set, on top of `partition_epoch`. Forwarded by its broker.
    Raises StalePartition (the epoch moved on) or FencedEpoch errors; on any other failure the
    outcome is unknown until a newer partition epoch is seen."""

    api: ClassVar[int] = 65
    topic_id: Id
    partition: Partition
    broker: int
    incarnation: Id
    leader_epoch: Epoch
    partition_epoch: Epoch
    isr: list[tuple[int, str]]
    """`(broker, incarnation)`"""


class BrokerStopped(ToController[ChangeResponse], frozen=True):
    """A controlled stop: the broker's replicas ended at exactly these places."""

    api: ClassVar[int] = 66
    broker: int
    incarnation: Id
    replicas: list[ReplicaRegistration]


class AllocateProducerIdsResponse(Response, frozen=True):
    first: int
    count: int


class AllocateProducerIds(ToController[AllocateProducerIdsResponse], frozen=True):
    """A block of producer ids for a broker to hand out."""

    api: ClassVar[int] = 67
    broker: int
    incarnation: Id


class PrepareStop(ToController[Done], frozen=True):
    """The whole cluster is about to stop: elect nobody while its members leave."""

    api: ClassVar[int] = 68


class StopBroker(Request[Done], frozen=True):
    """To a broker: stop the replicas, report their ends to the controller, then answer and exit."""

    api: ClassVar[int] = 69


# --- the controller to the voters ---------------------------------------------------------------


class PrepareResponse(Response, frozen=True):
    """A promise: this voter accepts nothing from an epoch below. `directory_id` says whose log."""

    broker: int
    directory_id: str
    start_counter: int
    incarnation: str
    promised_epoch: int
    last_epoch: int
    last_index: int
    voters: list[tuple[int, str]]
    """`(broker, directory id)` pairs of the last voter set in this log, committed or not."""
    heard_ms_ago: int | None
    """How long ago this broker heard a controller; None: not since it started."""


class Prepare(Request[PrepareResponse], frozen=True):
    """Asks a voter to promise `epoch`, on disk before it answers. Raises FencedEpochError when it
    promised a higher one; the message ends with that epoch."""

    api: ClassVar[int] = 80
    cluster_id: str
    epoch: Epoch
    host: str
    port: int
    is_probe: bool = False
    """True: only report, promise nothing."""


class ReadMetadataLogResponse(Response, frozen=True):
    """The payload is a msgpack list of `(index, epoch, record)` entries, in order."""

    snapshot_index: int | None
    snapshot_epoch: int | None
    """With these, the first entry's record is the snapshot that stands for all up to that index."""
    is_last: bool


class ReadMetadataLog(Request[ReadMetadataLogResponse], frozen=True):
    """Reads a voter's log from `first_index`, the snapshot first when that is gone."""

    api: ClassVar[int] = 81
    epoch: Epoch
    first_index: int
    bytes_max: Bytes


class AppendMetadataResponse(Response, frozen=True):
    directory_id: str
    """Whose disk holds it: only the directory that is named as voter counts."""
    last_index: int
    """How far this log is known to agree with the controller's, on disk."""


class AppendMetadata(Request[AppendMetadataResponse], frozen=True):
    """Appends the payload's entries after (`previous_index`, `previous_epoch`), cutting what
    conflicts; synced before the answer. Every broker keeps the log; those that are voters count for
    the majority. Raises FencedEpochError (a higher epoch was promised) or
    StalePartitionError (the previous record is not there: start further back).
    Without entries it only tells the commit index, and that the controller lives."""

    api: ClassVar[int] = 82
    epoch: Epoch
    host: str
    port: int
    previous_index: int
    previous_epoch: int
    commit_index: int


class InstallMetadataSnapshot(Request[AppendMetadataResponse], frozen=True):
    """Replaces a voter's log up to `last_index` by the snapshot in the payload."""

    api: ClassVar[int] = 83
    epoch: Epoch
    last_index: int
    last_epoch: int

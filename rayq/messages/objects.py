"""Requests of replicas and brokers to their node's object server, and requests about remote storage
to the controller and to leaders.

The object server alone has the object store's client and credentials. Bytes of records do not pass
through these messages: it reads the files of the log itself, and answers reads with a range in a
file of its cache. Names of objects are relative to `remote_storage_url`. Each request to it raises
RemoteStorageError, RemoteDeniedError, RemoteMissingError.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from rayq.messages.access import AccessDigest, AccessNews
from rayq.messages.acls import QuotaName, Right, Rights
from rayq.messages.any_broker import Change, ChangeResponse
from rayq.messages.base import (
    BrokerId,
    Bytes,
    CheckedInt,
    CheckedName,
    Counter,
    Done,
    Epoch,
    FilePath,
    HostName,
    Id,
    Milliseconds,
    Offset,
    Partition,
    Port,
    Response,
    Text,
    ToBroker,
    ToController,
    ToLeader,
    ToObjectServer,
)
from rayq.messages.limits import (
    PARTITIONS_LISTED_MAX,
    SEGMENT_PARTS_MAX,
    ConfigOptions,
)
from rayq.messages.remote_pointer import RemotePointer

ObjectName = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
OBJECT_NAMES_MAX = 1000
ObjectNames = Annotated[list[ObjectName], msgspec.Meta(max_length=OBJECT_NAMES_MAX)]

# --- the object server ---------------------------------------------------------------------------


class LocalRange(msgspec.Struct, array_like=True, frozen=True):
    """Whole batches in a segment file of this node."""

    path: FilePath
    position: Offset
    length: Bytes


class StoreRecordsResponse(Response, frozen=True):
    object_bytes: int
    data_bytes: int
    """Size without the footer."""
    crc32c: int
    """CRC of the whole object."""
    first_append_ms: int
    last_append_ms: int
    newest_timestamp_ms: int
    end_epoch: int
    """The leader epoch of the last batch."""


class StoreRecords(ToObjectServer[StoreRecordsResponse], frozen=True):
    """Makes one data object of the batches from `start` up to `end` (exclusive), which `ranges`
    hold in order. The object server checks each batch (CRCs, offsets without a hole, epochs that do
    not go back) in the very bytes that it sends. Raises CorruptBatchError if the local files are
    damaged."""

    api: ClassVar[int] = 90
    name: ObjectName
    start: Offset
    end: Offset
    ranges: Annotated[list[LocalRange], msgspec.Meta(max_length=SEGMENT_PARTS_MAX)]
    aborted: Annotated[list[tuple[Counter, Counter]], msgspec.Meta(max_length=SEGMENT_PARTS_MAX)]
    """`(family, epoch)` of the aborted transactions that may have batches in the range."""


class PutBlob(ToObjectServer[Done], frozen=True):
    """Stores the payload as the object `name`: a manifest, a page of one, a mark."""

    api: ClassVar[int] = 91
    name: ObjectName


class GetBlob(ToObjectServer[Done], frozen=True):
    """Answers the whole object as the payload."""

    api: ClassVar[int] = 92
    name: ObjectName


class ReadObjectResponse(Response, frozen=True):
    path: str
    """A file on the node's disk, which stays readable for a process that has opened it."""
    position: int
    length: int


class ReadObject(ToObjectServer[ReadObjectResponse], frozen=True):
    """Loads `length` bytes from `position` on of a data object, its footer included, into the
    cache, checked by their CRCs. Less is answered only at the object's end. Raises RemoteSlowError
    after `wait_ms` (the read continues), RemoteDamagedError."""

    api: ClassVar[int] = 93
    ends_with_connection: ClassVar[bool] = True
    name: ObjectName
    object_bytes: Bytes
    data_bytes: Bytes
    """Size of the data, as in the manifest."""
    position: Offset
    length: Bytes
    read_ahead_bytes: Bytes
    """Number of bytes after it that will probably be requested next."""
    wait_ms: Milliseconds


class DropCached(ToObjectServer[Done], frozen=True):
    """Drops cached bytes that a reader found wrong: the next read loads them again."""

    api: ClassVar[int] = 94
    name: ObjectName


class ListObjectsResponse(Response, frozen=True):
    objects: list[tuple[str, int, int]]
    """`(name, bytes, last modified in ms by the store's clock)`, by name."""
    next_after: str | None
    """Not None where there may be more: ask again with this as `after`."""


class ListObjects(ToObjectServer[ListObjectsResponse], frozen=True):
    """The objects whose names begin with `prefix` and come after `after`, one page of them."""

    api: ClassVar[int] = 95
    prefix: FilePath
    after: FilePath = ""


class DeleteObjects(ToObjectServer[Done], frozen=True):
    """Deletes these objects. One that is not there counts as deleted."""

    api: ClassVar[int] = 96
    names: ObjectNames


class HeadObjectsResponse(Response, frozen=True):
    objects: list[tuple[int, int] | None]
    """`(bytes, last modified in ms)` of each object asked for; None: it is not there."""


class HeadObjects(ToObjectServer[HeadObjectsResponse], frozen=True):
    api: ClassVar[int] = 97
    names: ObjectNames


class SignObjectsResponse(Response, frozen=True):
    """The answer, with a URL for each name. Its repr has none, since reprs end up in logs."""

    urls: list[str]
    """A URL for each object, which anybody may read by an HTTP GET with a range until it expires,
    or `file:///...`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.urls)} URLs)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("urls", len(self.urls))]


class SignObjects(ToObjectServer[SignObjectsResponse], frozen=True):
    api: ClassVar[int] = 98
    names: ObjectNames
    expires_ms: Milliseconds


class AttachObjectServerResponse(Response, frozen=True):
    access: AccessNews | None = None
    """The same as in `ReplicaHostHeartbeatResponse`."""


class AttachObjectServer(ToBroker[AttachObjectServerResponse], frozen=True):
    """Heartbeat of the object server to its broker. Raises StaleBrokerError if the broker does not
    want it (any more): then it exits."""

    api: ClassVar[int] = 57
    incarnation: Id
    pid: Counter
    pid_start_time: Counter
    host: HostName
    port: Port
    trouble: Text | None = None
    """The reason that the object store does not work now. None: its probe was written and read."""
    access_digest: AccessDigest = b""


# --- the controller ------------------------------------------------------------------------------


class MoveRemote(ToController[ChangeResponse], frozen=True):
    """The leader has stored objects and a manifest, and asks to make it the partition's pointer.
    Raises FencedEpochError (another epoch or process leads), StalePartitionError (the committed
    version is not `pointer.version - 1`, or the topic gave its remote objects up),
    UnknownTopicError, InvalidRequestError. Without an answer its outcome is unknown: repeat the
    same request."""

    api: ClassVar[int] = 84
    topic_id: Id
    partition: Partition
    broker: BrokerId
    incarnation: Id
    leader_epoch: Epoch
    pointer: RemotePointer
    is_adopted: bool = False
    """Another manifest takes the place of the committed one, which may be lost, or of older
    metadata. Only then `start` and `end` may go back."""


class PinSnapshot(Change, frozen=True, kw_only=True):
    """Retention keeps the topic's records from these offsets on for `ttl_ms`, at most a day; the
    same id again renews it. Raises UnknownTopicError, InvalidRequestError; OverloadedError where
    there are 1,000."""

    api: ClassVar[int] = 85
    rights: ClassVar[Rights] = (Right("read", "topic", "topic_id"),)
    is_audited: ClassVar[bool] = False
    pin_id: Id
    topic_id: Id
    starts: Annotated[dict[CheckedInt, CheckedInt], msgspec.Meta(max_length=PARTITIONS_LISTED_MAX)]
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]


class UnpinSnapshot(Change, frozen=True, kw_only=True):
    """Ends a pin; one that is not there has ended."""

    api: ClassVar[int] = 86
    rights: ClassVar[Rights] = ()
    is_audited: ClassVar[bool] = False
    pin_id: Id


class RestoreTopic(Change, frozen=True, kw_only=True):
    """Creates a topic whose records are in the object store already. Retention takes none of them
    for a day. Raises the errors of `CreateTopic`, and InvalidRequestError where the pointers do not
    fit, or another topic has these objects."""

    api: ClassVar[int] = 88
    quotas: ClassVar[tuple[QuotaName, ...]] = ("controller_mutation_rate", "request_percentage")
    rights: ClassVar[Rights] = (
        Right("alter", "cluster"),
        Right("create", "topic", "name"),
    )
    name: CheckedName
    partitions: CheckedInt
    replication_factor: CheckedInt | None
    config: ConfigOptions
    """The topic's config, with `remote_storage`."""
    pointers: Annotated[list[RemotePointer | None], msgspec.Meta(max_length=PARTITIONS_LISTED_MAX)]
    """Pointers by partition. None, or no entry: it begins empty."""


class EndRemoteStorage(Change, frozen=True, kw_only=True):
    """Sets a topic's `remote_storage` to False. All that it has in the object store is removed
    later; what is on no replica's disk any more is lost at once."""

    api: ClassVar[int] = 89
    rights: ClassVar[Rights] = (Right("alter_configs", "topic", "name"),)
    name: CheckedName


class BeginRemoval(ToController[ChangeResponse], frozen=True):
    """A broker has listed objects of a deleted topic, and asks whether they are garbage, before it
    deletes them: for each page that it has listed. From the first answer on nobody restores them.
    Raises InvalidRequestError where they were restored, are in use, or are pinned."""

    api: ClassVar[int] = 99
    topic_id: Id
    deleted_ms: Counter
    """Time of the deletion, as the broker knows it."""


class RemoveGarbage(ToController[ChangeResponse], frozen=True):
    """A broker has removed all objects of a deleted topic."""

    api: ClassVar[int] = 87
    topic_id: Id
    deleted_ms: Counter | None = None
    """Time of the deletion. None: a broker of an older rayq does not send it."""


# --- any broker ----------------------------------------------------------------------------------


class PinSummary(msgspec.Struct, array_like=True, frozen=True):
    pin_id: str
    topic: str
    starts: dict[int, int]
    """Partition to offset."""
    ttl_ms: int


class GarbageSummary(msgspec.Struct, array_like=True, frozen=True):
    topic_id: str
    name: str
    deleted_ms: int


class DescribeObjectStoreResponse(Response, frozen=True):
    url: str | None
    """`remote_storage_url`. None: the cluster has no object store."""
    pins: list[PinSummary]
    garbage: list[GarbageSummary]
    """Deleted topics that still have objects there."""
    object_server: tuple[str, int] | None
    """Address of this broker's object server. None: there is none, or it is starting."""
    trouble: str | None
    """The reason that this broker does not reach the object store. None: it does, or there is
    none."""
    version: int = 0
    """Metadata version of the pins and the garbage, as in `MetadataResponse`."""
    hides_topics: bool = False
    """True if there are topics, or were deleted ones, that the sender may not describe."""


class DescribeObjectStore(ToBroker[DescribeObjectStoreResponse], frozen=True):
    """This broker's knowledge of the object store."""

    api: ClassVar[int] = 37
    rights: ClassVar[Rights] = (Right("describe", "cluster"),)
    checked_when_answered: ClassVar[bool] = True


# --- leaders -------------------------------------------------------------------------------------


class RemoteRange(msgspec.Struct, array_like=True, frozen=True):
    """One object with records of a partition: all those of its offsets, in whole batches. Its repr
    does not have the URL."""

    name: str
    start_offset: int
    end_offset: int
    data_bytes: int
    object_bytes: int
    """Behind the data is the footer: where batches begin, and which transactions were aborted."""
    url: str | None
    """See `SignObjects`. None where none was asked for, or this client gets none
    (`remote_direct_reads`): it reads the records through the leader."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [
            (name, "hidden" if name == "url" and self.url else getattr(self, name))
            for name in self.__struct_fields__
        ]


class DescribeRemoteResponse(Response, frozen=True):
    ranges: list[RemoteRange]
    """Objects in order, without a hole, from the one that holds `start` on. [] if `start` is not in
    the object store: then the leader has it on its disk."""
    log_start_offset: int


class DescribeRemote(ToLeader[DescribeRemoteResponse], frozen=True):
    """Names the objects that hold the records from `start` up to `end`, at most `ranges_max` of
    them. Only a manifest is read from the store, if the leader does not have it yet. Raises the
    errors of `Fetch`, and RemoteStorageError, RemoteMissingError."""

    api: ClassVar[int] = 100
    quotas: ClassVar[tuple[QuotaName, ...]] = ("consumer_byte_rate", "request_percentage")
    rights: ClassVar[Rights] = (Right("read", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True
    start: Offset
    end: Offset
    ranges_max: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 64
    expires_ms: Milliseconds = 0
    """Validity of the URLs: at most 15 minutes, and no longer than the client's token is valid. 0:
    none are made."""


class DescribeRemoteStorageResponse(Response, frozen=True):
    pointer: RemotePointer | None
    log_start_offset: int
    local_start_offset: int
    high_watermark: int
    lag_bytes: int
    """Size of closed segments that are not stored yet."""
    lag_ms: int
    """Time since the oldest of it could have been stored."""
    trouble: str | None
    """The reason that nothing is stored now. None: it works."""


class DescribeRemoteStorage(ToLeader[DescribeRemoteStorageResponse], frozen=True):
    """Describes the progress of this partition in the object store."""

    api: ClassVar[int] = 101
    rights: ClassVar[Rights] = (Right("describe", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True


class VerifyRemoteResponse(Response, frozen=True):
    checked_objects: int
    next_offset: int | None
    """Start of the next page. None: everything was checked."""
    problems: list[tuple[str, int, int, str]]
    """`(object, start offset, end offset, what is wrong)`."""
    repaired: list[str]
    """The objects of `problems` that others, made from local records, took the place of."""


class VerifyRemote(ToLeader[VerifyRemoteResponse], frozen=True):
    """Checks that the objects from `start` on are there with their sizes; with `deep` reads them
    and checks CRCs, offsets and epochs. With `repair` those that local records cover are made
    again.
    """

    api: ClassVar[int] = 102
    rights: ClassVar[Rights] = (Right("alter", "topic", "topic_id"),)
    checked_when_answered: ClassVar[bool] = True
    start: Offset
    deep: bool
    repair: bool
    objects_max: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100

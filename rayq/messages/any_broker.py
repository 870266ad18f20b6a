"""Requests of clients to any broker: metadata, and changes to it, which are forwarded to the
controller."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from rayq.messages.acls import QuotaName, Right, Rights
from rayq.messages.base import (
    Answerer,
    CheckedInt,
    CheckedName,
    Counter,
    Id,
    Milliseconds,
    Request,
    Response,
    ToBroker,
    ToController,
)
from rayq.messages.limits import (
    MOVES_MAX,
    PARTITIONS_LISTED_MAX,
    REPLICAS_MAX,
    ConfigOptions,
)
from rayq.messages.remote_pointer import RemotePointer
from rayq.metrics import Sample


class BrokerEndpoint(Response, frozen=True):
    broker: int
    host: str
    port: int
    node_id: str
    live: bool
    cordoned: bool = False
    """The broker takes no new replicas."""


class ReplicaEndpoint(Response, frozen=True):
    """Address of a replica's process; host and port are None while it is not running."""

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
    target: list[int] = msgspec.field(default_factory=list)
    """The replicas that stay after a move. Empty, as is `origin`, when there is no move."""
    origin: list[int] = msgspec.field(default_factory=list)
    """The replicas before the move."""
    throttle_bytes_per_s: int | None = None
    remote: RemotePointer | None = None
    """Pointer to the partition's records in the object store. None: there are none."""


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
    """`host:port`. None if the broker knows none, or has not registered since its start: then its
    metadata may be outdated."""
    voters: list[int]
    brokers: list[BrokerEndpoint]
    topics: list[TopicMetadata]
    """Sorted by name."""
    next_after: str | None = None
    """Not None if one answer does not hold all topics: ask again with this as `after`."""
    trouble: str | None = None
    """The reason that this broker has given up its session; None if it has not."""
    denied: dict[str, str] = msgspec.field(default_factory=dict)
    """The topics that were named, and that the client's principal may not describe, whether they
    exist or not, each with the message of the AuthorizationError."""


METADATA_TOPICS_MAX = 10_000
"""Maximum number of topics that a Metadata request names, repetitions included."""

METADATA_PARTITIONS_MAX = 2_000
"""Page size: an answer ends with the topic that brings it to this number of partitions."""


class Metadata(ToBroker[MetadataResponse], frozen=True):
    """The cluster as this broker knows it. The broker waits up to `wait_ms` for a version of at
    least `version_min`, then answers with the version that it has. Many topics come in pages:
    `metadata_pages` asks for all of them."""

    api: ClassVar[int] = 1
    rights: ClassVar[Rights] = ()
    ends_with_connection: ClassVar[bool] = True
    topics: Annotated[list[CheckedName], msgspec.Meta(max_length=METADATA_TOPICS_MAX)] | None = None
    """None: all topics. A name that does not exist is missing in the answer, and so is one that the
    client's principal may not describe."""
    version_min: Counter = 0
    wait_ms: Milliseconds = 0
    after: CheckedName = ""
    """Only topics with names after this one."""
    topic_ids: Annotated[list[Id], msgspec.Meta(max_length=METADATA_TOPICS_MAX)] = msgspec.field(
        default_factory=list
    )
    """The topics with these ids, too."""


class AllocateProducerIdResponse(Response, frozen=True):
    producer_id: int
    producer_epoch: int


class AllocateProducerId(ToBroker[AllocateProducerIdResponse], frozen=True):
    """A producer id that no producer had before, epoch 0, for whoever may write to some topic: it
    names one (KIP-679 asks for no more, either)."""

    api: ClassVar[int] = 2
    rights: ClassVar[Rights] = (Right("write", "topic", "topic"),)
    topic: CheckedName | None = None
    """A topic that the producer writes to; the id counts for all. None: whoever may alter the
    cluster."""


class DrawFamilyResponse(Response, frozen=True):
    number: int
    """For `transaction_ids.make_family`."""


class DrawFamily(ToBroker[DrawFamilyResponse], frozen=True):
    """Draws the number of a family of producer ids that nobody had before. There are far fewer of
    them than of producer ids, which many may ask for: so they have a counter of their own."""

    api: ClassVar[int] = 149


class ChangeResponse(Response, frozen=True):
    """The change is committed: it is in all metadata of at least this `version`."""

    version: int


class Change(ToController[ChangeResponse], frozen=True, kw_only=True):
    """Base of the changes that clients ask for. A client repeats a change whose answer was lost,
    under the same `request_id`: then it is answered as the first time, and not applied again."""

    is_audited: ClassVar[bool] = True
    """False: it changes nothing that administrators care about, and comes often."""
    request_id: Id | None = None
    """A random id that the client makes for each call. None: a repetition is another request."""


class CreateTopic(Change, frozen=True):
    api: ClassVar[int] = 3
    quotas: ClassVar[tuple[QuotaName, ...]] = ("controller_mutation_rate", "request_percentage")
    rights: ClassVar[Rights] = (Right("create", "topic", "name"),)
    name: CheckedName
    partitions: CheckedInt
    replication_factor: CheckedInt | None
    config: ConfigOptions


class DeleteTopic(Change, frozen=True):
    api: ClassVar[int] = 4
    quotas: ClassVar[tuple[QuotaName, ...]] = ("controller_mutation_rate", "request_percentage")
    rights: ClassVar[Rights] = (Right("delete", "topic", "name"),)
    name: CheckedName


class _Total(Change, frozen=True):
    name: CheckedName
    total: CheckedInt


class CreatePartitions(_Total, frozen=True, kw_only=True):
    """Adds partitions, up to `total`."""

    # `force` came later: it has to stand behind the fields of `Change`, where kw_only puts it.
    api: ClassVar[int] = 5
    quotas: ClassVar[tuple[QuotaName, ...]] = ("controller_mutation_rate", "request_percentage")
    rights: ClassVar[Rights] = (Right("alter", "topic", "name"),)
    force: bool = False
    """True: also if a queue handles records in the order of their keys, which may then be lost."""


class AlterTopicConfig(Change, frozen=True):
    api: ClassVar[int] = 6
    rights: ClassVar[Rights] = (Right("alter_configs", "topic", "name"),)
    name: CheckedName
    changes: ConfigOptions
    """A key set to None where None is not a legal value goes back to its default."""


class ElectLeaders(Change, frozen=True):
    """Elects the preferred leader (the first replica) if it is in sync. `unclean` elects any live
    replica, for partitions that have no leader."""

    api: ClassVar[int] = 7
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    name: CheckedName
    partitions: Annotated[list[CheckedInt], msgspec.Meta(max_length=PARTITIONS_LISTED_MAX)] | None
    unclean: bool


class EnsureOffsetsTopic(ToController[ChangeResponse], frozen=True):
    """Creates `__consumer_offsets` unless it exists, at the first use of a group."""

    api: ClassVar[int] = 8
    rights: ClassVar[Rights] = ()


class ConfirmMetadata(ToController[ChangeResponse], frozen=True):
    """Changes nothing. Metadata of at least the version of the answer have all that was committed
    before this was asked, whichever controller or broker is out of date."""

    api: ClassVar[int] = 14
    rights: ClassVar[Rights] = ()


BrokerList = Annotated[list[CheckedInt], msgspec.Meta(max_length=REPLICAS_MAX)]


class AlterReassignments(Change, frozen=True):
    """Moves partitions (KIP-455): adds the replicas of the target, and removes the others once all
    replicas of the target are in sync. All of the moves begin, or none."""

    api: ClassVar[int] = 9
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    moves: Annotated[
        list[tuple[CheckedName, CheckedInt, BrokerList | None]],
        msgspec.Meta(max_length=MOVES_MAX),
    ]
    """`(topic, partition, brokers)`, the preferred leader first. None cancels a move."""
    throttle_bytes_per_s: CheckedInt | None = None
    """Maximum rate at which each added replica copies. None: no limit."""


class SetReplicationFactor(Change, frozen=True):
    """Begins the moves after which every partition of a topic has this many replicas: all of the
    moves, or none. The same factor again changes the throttle."""

    api: ClassVar[int] = 12
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    name: CheckedName
    replication_factor: CheckedInt
    throttle_bytes_per_s: CheckedInt | None = None


class CordonBroker(Change, frozen=True):
    """Cordons a broker: it takes no new replicas, and gives up its vote if it can. With `cordoned`
    False it takes replicas again."""

    api: ClassVar[int] = 10
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    broker: CheckedInt
    cordoned: bool


class RemoveBroker(Change, frozen=True):
    """Forgets a broker that is stopped and holds no replicas."""

    api: ClassVar[int] = 11
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    broker: CheckedInt


class DescribeMetricsResponse(Response, frozen=True):
    samples: list[Sample]


class DescribeMetrics(Request[DescribeMetricsResponse], frozen=True):
    """The metrics of this process. Any server answers."""

    api: ClassVar[int] = 19
    answered_by: ClassVar[tuple[Answerer, ...]] = ("broker", "replica host", "object server")
    rights: ClassVar[Rights] = (Right("describe", "cluster"),)
    checked_when_answered: ClassVar[bool] = True

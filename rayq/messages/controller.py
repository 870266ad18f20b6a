"""Requests of brokers and replicas to the controller, and the requests that stop a cluster."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from rayq.messages.any_broker import ChangeResponse
from rayq.messages.base import (
    BrokerId,
    CheckedInt,
    CheckedName,
    Counter,
    Done,
    Epoch,
    HostName,
    Id,
    Partition,
    Port,
    Response,
    Text,
    ToBroker,
    ToController,
)
from rayq.messages.limits import (
    HOSTED_MAX,
    PROPOSALS_MAX,
    REPLICAS_MAX,
)
from rayq.messages.quotas import QuotaDemands, QuotaShare


class FindControllerResponse(Response, frozen=True):
    epoch: int
    host: str | None
    port: int | None
    heard_ms_ago: int | None
    """Time since this broker last heard from that controller."""


class FindController(ToBroker[FindControllerResponse], frozen=True):
    """Any broker answers which controller it follows."""

    api: ClassVar[int] = 60


class RegisterBrokerResponse(Response, frozen=True):
    controller_epoch: int


class RegisterBroker(ToController[RegisterBrokerResponse], frozen=True):
    """Registers a broker process. Raises StaleBrokerError when its directory is an old copy (its
    `start_counter` is not above the recorded one): then the broker takes a new directory id and
    tries again."""

    api: ClassVar[int] = 61
    cluster_id: CheckedName
    broker: BrokerId
    directory_id: Id
    start_counter: Counter
    incarnation: Id
    host: HostName
    port: Port
    node_id: CheckedName
    replicas_max: Counter
    held: Annotated[list[tuple[CheckedName, CheckedInt]], msgspec.Meta(max_length=HOSTED_MAX)]
    """`(topic id, partition)` of the directories that replica processes of an earlier broker
    process still hold. Its other replica processes are gone."""


class BrokerHeartbeatResponse(Response, frozen=True):
    controller_epoch: int
    quota_shares: list[QuotaShare] = msgspec.field(default_factory=list)
    """The broker's shares of the quotas that the request names."""
    last_index: Counter | None = None
    """Index of the last record that the controller has, committed or not: a broker that has applied
    it knows all that was acknowledged before. None: an older controller does not say."""


class BrokerHeartbeat(ToController[BrokerHeartbeatResponse], frozen=True):
    """Renews the broker's session. Raises StaleBrokerError where the broker must register first."""

    api: ClassVar[int] = 62
    broker: BrokerId
    incarnation: Id
    remote_trouble: Text | None = "it was started without remote_storage_url"
    """The reason that the broker cannot use the object store. None: it has written and read a probe
    there."""
    quota_demands: QuotaDemands = msgspec.field(default_factory=list)
    """The demands of clients for the quotas that they use here now."""


class ReplicaRegistration(msgspec.Struct, array_like=True, frozen=True):
    """A replica process, as its broker reports it: where it listens, and what its disk holds."""

    topic_id: CheckedName
    partition: CheckedInt
    incarnation: CheckedName
    host: HostName
    port: Port
    last_epoch: CheckedInt | None
    flushed: CheckedInt
    partition_epoch: CheckedInt = 0
    """The partition's epoch in the metadata that places the replica on this broker."""


class RegisterReplicas(ToController[ChangeResponse], frozen=True):
    """Reports new replica processes whose logs are recovered. The broker repeats the report until
    the metadata shows the incarnations; a repetition changes nothing."""

    api: ClassVar[int] = 63
    broker: BrokerId
    incarnation: Id
    replicas: Annotated[list[ReplicaRegistration], msgspec.Meta(max_length=HOSTED_MAX)]


class ReplicasFailed(ToController[ChangeResponse], frozen=True):
    """Reports replica processes that are gone, or replicas that stopped on a disk error."""

    api: ClassVar[int] = 64
    broker: BrokerId
    incarnation: Id
    replicas: Annotated[
        list[tuple[CheckedName, CheckedInt, CheckedName]], msgspec.Meta(max_length=HOSTED_MAX)
    ]
    """`(topic id, partition, incarnation)`"""
    reason: Text


class AlterPartition(ToController[ChangeResponse], frozen=True):
    """A leader proposes a new in-sync set, on top of `partition_epoch`. Raises StalePartition (the
    epoch has moved on) or FencedEpoch errors. After any other failure the leader does not know the
    outcome until it sees a newer partition epoch."""

    api: ClassVar[int] = 65
    topic_id: Id
    partition: Partition
    broker: BrokerId
    incarnation: Id
    leader_epoch: Epoch
    partition_epoch: Epoch
    isr: Annotated[list[tuple[BrokerId, CheckedName]], msgspec.Meta(max_length=REPLICAS_MAX)]
    """`(broker, incarnation)`"""


class AlterPartitionsResponse(Response, frozen=True):
    refused: list[tuple[str, int, str, str]]
    """`(topic id, partition, code and text of the error)` of those that were certainly not taken.
    The others are committed."""


class AlterPartitions(ToController[AlterPartitionsResponse], frozen=True):
    """The leaders of a replica process propose new in-sync sets: see `AlterPartition`. Each is
    taken or refused by itself."""

    api: ClassVar[int] = 104
    proposals: Annotated[
        list[AlterPartition], msgspec.Meta(min_length=1, max_length=PROPOSALS_MAX)
    ]


class BrokerStopped(ToController[ChangeResponse], frozen=True):
    """Reports a controlled stop: the logs of the broker's replicas end exactly here."""

    api: ClassVar[int] = 66
    broker: BrokerId
    incarnation: Id
    replicas: Annotated[list[ReplicaRegistration], msgspec.Meta(max_length=HOSTED_MAX)]


class AllocateProducerIdsResponse(Response, frozen=True):
    first: int
    count: int


class AllocateProducerIds(ToController[AllocateProducerIdsResponse], frozen=True):
    """Asks for a block of producer ids, or of numbers of families, which the broker hands out one
    by one."""

    api: ClassVar[int] = 67
    broker: BrokerId
    incarnation: Id
    of_families: bool = False


class PrepareStop(ToController[Done], frozen=True):
    """The whole cluster is about to stop: the controller elects no leaders while brokers leave."""

    api: ClassVar[int] = 68


class StopBroker(ToBroker[Done], frozen=True):
    """Tells a broker to stop its replicas, report their ends to the controller, answer and exit."""

    api: ClassVar[int] = 69

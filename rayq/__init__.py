"""rayq: a distributed, durable log on Ray.

Start a cluster with `start`, or find one with `connect`: each returns a `Cluster`, which makes
everything else. Every error derives from `RayqError`; those that programs often catch are here, and
all of them are in `rayq.errors`. In tests, `rayq.testing.LocalCluster` is a cluster without Ray.
"""

from __future__ import annotations

TYPE_CHECKING = False  # Also `typing` would be loaded.
if TYPE_CHECKING:
    from typing import Any as _Any

    from rayq import errors as errors
    from rayq.client.admin.access import NewToken
    from rayq.client.admin.admin import Admin, AsyncAdmin
    from rayq.client.admin.audit import AuditPage
    from rayq.client.cluster import Cluster
    from rayq.client.consumer_pool import ConsumerPool
    from rayq.client.consuming.async_consumer import AsyncConsumer
    from rayq.client.consuming.consumer import Consumer
    from rayq.client.producing.futures import DeliveryFuture, ManyDeliveryFuture
    from rayq.client.producing.producer import AsyncProducer, Producer
    from rayq.client.producing.transaction import AsyncTransaction, Transaction
    from rayq.client.queues.functions import TaskFunction
    from rayq.client.queues.queue import AsyncQueue, Queue
    from rayq.client.queues.task import QueueTask
    from rayq.client.serialization import (
        json_deserializer,
        json_serializer,
        typed_json_deserializer,
    )
    from rayq.config import (
        ClusterConfig,
        ConsumerConfig,
        PoolConfig,
        ProducerConfig,
        QueueConfig,
        TopicConfig,
    )
    from rayq.core.access.acls import AclVerdict
    from rayq.core.access.audit import AuditLine
    from rayq.core.capacity.check import CapacityCheck
    from rayq.core.capacity.plan import CapacityPlan
    from rayq.entry import connect, start
    from rayq.errors import (
        AlreadyCommittedError,
        AuthenticationError,
        AuthorizationError,
        BufferFullError,
        CommitRefusedError,
        ConfigError,
        DeliveryError,
        DeliveryTimeoutError,
        DeserializationError,
        LockLostError,
        OffsetOutOfRangeError,
        OutcomeUnknownError,
        ProducerFencedError,
        QueueExistsError,
        QuotaLimitError,
        RayqError,
        RecordTooLargeError,
        SerializationError,
        TimeoutError,
        TopicExistsError,
        TransactionAbortedError,
        TransactionCommittedError,
        TransactionOutcomeUnknownError,
        UnknownQueueError,
        UnknownTopicError,
        UnreadableRecordError,
    )
    from rayq.messages.acls import Acl
    from rayq.messages.quotas import Quota
    from rayq.metrics import Sample
    from rayq.records import (
        BrokerInfo,
        ClusterInfo,
        DeletedRemoteTopic,
        DrainProgress,
        GroupInfo,
        GroupListing,
        GroupMemberInfo,
        GroupMembership,
        GroupOffset,
        HangingTransaction,
        MovedRecords,
        ObjectStoreInfo,
        OffsetAndMetadata,
        OffsetRange,
        Outgoing,
        PartitionInfo,
        PoolConsumer,
        PoolStatus,
        PrincipalInfo,
        QueueInfo,
        QueuePartitionInfo,
        QueueRecordInfo,
        QuotaInfo,
        Reassignment,
        Record,
        RecordMetadata,
        RemotePartitionInfo,
        RemoteProblem,
        RemoteVerification,
        ReplicaInfo,
        SnapshotPin,
        TokenInfo,
        TopicInfo,
        TopicPartition,
        TransactionInfo,
        TransactionListing,
        TransactionParticipant,
    )

    __version__: str
del TYPE_CHECKING

# Importing rayq costs next to nothing: what is used is imported when it is first used. `rayq
# --version` needs none of it, and a Ctrl+C in its first moment finds nothing half imported.
_HOMES = {
    "rayq.client.admin.access": ("NewToken",),
    "rayq.client.admin.admin": ("Admin", "AsyncAdmin"),
    "rayq.client.admin.audit": ("AuditPage",),
    "rayq.client.cluster": ("Cluster",),
    "rayq.client.consumer_pool": ("ConsumerPool",),
    "rayq.client.consuming.async_consumer": ("AsyncConsumer",),
    "rayq.client.consuming.consumer": ("Consumer",),
    "rayq.client.producing.futures": ("DeliveryFuture", "ManyDeliveryFuture"),
    "rayq.client.producing.producer": ("AsyncProducer", "Producer"),
    "rayq.client.producing.transaction": ("AsyncTransaction", "Transaction"),
    "rayq.client.queues.functions": ("TaskFunction",),
    "rayq.client.queues.queue": ("AsyncQueue", "Queue"),
    "rayq.client.queues.task": ("QueueTask",),
    "rayq.config.reference": (
        "ClusterConfig",
        "ConsumerConfig",
        "PoolConfig",
        "ProducerConfig",
        "QueueConfig",
        "TopicConfig",
    ),
    "rayq.core.access.acls": ("AclVerdict",),
    "rayq.core.access.audit": ("AuditLine",),
    "rayq.core.capacity.plan": ("CapacityPlan",),
    "rayq.core.capacity.check": ("CapacityCheck",),
    "rayq.entry": ("connect", "start"),
    "rayq.messages.acls": ("Acl",),
    "rayq.messages.quotas": ("Quota",),
    "rayq.metrics": ("Sample",),
    "rayq.client.serialization": (
        "json_deserializer",
        "json_serializer",
        "typed_json_deserializer",
    ),
}
"""The modules that define the exported names. The names that are missing here are those of errors,
and of `rayq.records`."""
_MODULES = ("data", "errors", "spark")


def __getattr__(name: str) -> _Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"rayq.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'rayq' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        value: _Any = version("rayq")
    else:
        other = "rayq.errors" if name.endswith("Error") else "rayq.records"
        home = next((module for module, names in _HOMES.items() if name in names), other)
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


__all__ = [
    "Acl",
    "AclVerdict",
    "Admin",
    "AlreadyCommittedError",
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncQueue",
    "AsyncTransaction",
    "AuditLine",
    "AuditPage",
    "AuthenticationError",
    "AuthorizationError",
    "BrokerInfo",
    "BufferFullError",
    "CapacityCheck",
    "CapacityPlan",
    "Cluster",
    "ClusterConfig",
    "ClusterInfo",
    "CommitRefusedError",
    "ConfigError",
    "Consumer",
    "ConsumerConfig",
    "ConsumerPool",
    "DeletedRemoteTopic",
    "DeliveryError",
    "DeliveryFuture",
    "DeliveryTimeoutError",
    "DeserializationError",
    "DrainProgress",
    "GroupInfo",
    "GroupListing",
    "GroupMemberInfo",
    "GroupMembership",
    "GroupOffset",
    "HangingTransaction",
    "LockLostError",
    "ManyDeliveryFuture",
    "MovedRecords",
    "NewToken",
    "ObjectStoreInfo",
    "OffsetAndMetadata",
    "OffsetOutOfRangeError",
    "OffsetRange",
    "OutcomeUnknownError",
    "Outgoing",
    "PartitionInfo",
    "PoolConfig",
    "PoolConsumer",
    "PoolStatus",
    "PrincipalInfo",
    "Producer",
    "ProducerConfig",
    "ProducerFencedError",
    "Queue",
    "QueueConfig",
    "QueueExistsError",
    "QueueInfo",
    "QueuePartitionInfo",
    "QueueRecordInfo",
    "QueueTask",
    "Quota",
    "QuotaInfo",
    "QuotaLimitError",
    "RayqError",
    "Reassignment",
    "Record",
    "RecordMetadata",
    "RecordTooLargeError",
    "RemotePartitionInfo",
    "RemoteProblem",
    "RemoteVerification",
    "ReplicaInfo",
    "Sample",
    "SerializationError",
    "SnapshotPin",
    "TaskFunction",
    "TimeoutError",
    "TokenInfo",
    "TopicConfig",
    "TopicExistsError",
    "TopicInfo",
    "TopicPartition",
    "Transaction",
    "TransactionAbortedError",
    "TransactionCommittedError",
    "TransactionInfo",
    "TransactionListing",
    "TransactionOutcomeUnknownError",
    "TransactionParticipant",
    "UnknownQueueError",
    "UnknownTopicError",
    "UnreadableRecordError",
    "__version__",
    "connect",
    "json_deserializer",
    "json_serializer",
    "start",
    "typed_json_deserializer",
]

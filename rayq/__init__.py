"""rayq: a distributed, durable log on Ray.

Start or find a cluster with `start` and `connect`; everything else hangs on the `Cluster` they
return. Every error derives from `RayqError`. In tests, `rayq.testing.LocalCluster` is a cluster
without Ray.
"""

from __future__ import annotations

TYPE_CHECKING = False  # Also `typing` would be loaded.
if TYPE_CHECKING:
    from typing import Any as _Any

    from rayq.client.admin.admin import Admin
    from rayq.client.cluster import Cluster
    from rayq.client.consumer_pool import ConsumerPool
    from rayq.client.consuming.consumer import AsyncConsumer, Consumer
    from rayq.client.producing.producer import AsyncProducer, Producer
    from rayq.config import (
        ClusterConfig,
        ConsumerConfig,
        PoolConfig,
        ProducerConfig,
        TopicConfig,
    )
    from rayq.entry import connect, start
    from rayq.errors import (
        AuthenticationError,
        BrokerInUseError,
        BufferFullError,
        CheckpointDamagedError,
        CheckpointError,
        CheckpointInUseError,
        CheckpointMismatchError,
        ClosedError,
        CommitRefusedError,
        ConcurrentUseError,
        ConfigError,
        ControllerUnavailableError,
        CoordinatorLoadingError,
        CorruptBatchError,
        DeliveryError,
        DeliveryTimeoutError,
        DeserializationError,
        DirectoryInUseError,
        DisconnectedError,
        DiskFullError,
        DivergedLogError,
        FencedEpochError,
        FencedMemberError,
        GroupLimitError,
        GroupNotEmptyError,
        HandlerError,
        InvalidAssignmentError,
        InvalidPartitionsError,
        InvalidReassignmentError,
        InvalidRecordError,
        InvalidReplicationFactorError,
        InvalidRequestError,
        InvalidTimestampError,
        InvalidTopicError,
        JavaError,
        LogTruncatedError,
        MaxPollIntervalError,
        MissingExtraError,
        NoClusterError,
        NoReassignmentError,
        NotControllerError,
        NotEnoughReplicasAfterAppendError,
        NotEnoughReplicasError,
        NotEnoughResourcesError,
        NotLeaderError,
        NullKeyError,
        OffsetNotAvailableError,
        OffsetOutOfRangeError,
        OpenFilesLimitError,
        OutcomeUnknownError,
        OutOfOrderSequenceError,
        OverloadedError,
        PartitionOfflineError,
        PoolExistsError,
        ProducerFencedError,
        ProtocolError,
        RayqError,
        ReassignmentInProgressError,
        RecordTooLargeError,
        ReplicaLimitError,
        RewriteMismatchError,
        SerializationError,
        SparkSessionError,
        StaleBrokerError,
        StalePartitionError,
        StorageError,
        StreamingQueryError,
        TimeoutError,
        TopicExistsError,
        UnknownAssignorError,
        UnknownBrokerError,
        UnknownEpochError,
        UnknownGroupError,
        UnknownMemberError,
        UnknownPoolError,
        UnknownProducerError,
        UnknownServerError,
        UnknownTopicError,
        UnsupportedFormatError,
        UnsupportedVersionError,
        WrongClusterError,
    )
    from rayq.records import (
        DrainProgress,
        GroupInfo,
        GroupListing,
        GroupMemberInfo,
        GroupMembership,
        GroupOffset,
        OffsetAndMetadata,
        OffsetRange,
        PoolConsumer,
        PoolStatus,
        Reassignment,
        Record,
        RecordMetadata,
        TopicPartition,
    )
    from rayq.serialization import json_deserializer, json_serializer, typed_json_deserializer

    __version__: str
del TYPE_CHECKING

# Importing rayq costs next to nothing: what is used is imported when it is first used. `rayq
# --version` needs none of it, and a Ctrl+C in its first moment finds nothing half imported.
_HOMES = {
    "Admin": "rayq.client.admin.admin",
    "AsyncConsumer": "rayq.client.consuming.consumer",
    "AsyncProducer": "rayq.client.producing.producer",
    "Cluster": "rayq.client.cluster",
    "ClusterConfig": "rayq.config_reference",
    "Consumer": "rayq.client.consuming.consumer",
    "ConsumerConfig": "rayq.config_reference",
    "ConsumerPool": "rayq.client.consumer_pool",
    "PoolConfig": "rayq.config_reference",
    "Producer": "rayq.client.producing.producer",
    "ProducerConfig": "rayq.config_reference",
    "TopicConfig": "rayq.config_reference",
    "connect": "rayq.entry",
    "json_deserializer": "rayq.serialization",
    "json_serializer": "rayq.serialization",
    "start": "rayq.entry",
    "typed_json_deserializer": "rayq.serialization",
}
_RECORDS = (
    "DrainProgress",
    "GroupInfo",
    "GroupListing",
    "GroupMemberInfo",
    "GroupMembership",
    "GroupOffset",
    "OffsetAndMetadata",
    "OffsetRange",
    "PoolConsumer",
    "PoolStatus",
    "Reassignment",
    "Record",
    "RecordMetadata",
    "TopicPartition",
)
_EXTRAS = ("data", "spark")


def __getattr__(name: str) -> _Any:
    import importlib

    if name in _EXTRAS:
        return importlib.import_module(f"rayq.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'rayq' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        value: _Any = version("rayq")
    else:
        home = _HOMES.get(name) or ("rayq.records" if name in _RECORDS else "rayq.errors")
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_EXTRAS})


__all__ = [
    "Admin",
    "AsyncConsumer",
    "AsyncProducer",
    "AuthenticationError",
    "BrokerInUseError",
    "BufferFullError",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointInUseError",
    "CheckpointMismatchError",
    "ClosedError",
    "Cluster",
    "ClusterConfig",
    "CommitRefusedError",
    "ConcurrentUseError",
    "ConfigError",
    "Consumer",
    "ConsumerConfig",
    "ConsumerPool",
    "ControllerUnavailableError",
    "CoordinatorLoadingError",
    "CorruptBatchError",
    "DeliveryError",
    "DeliveryTimeoutError",
    "DeserializationError",
    "DirectoryInUseError",
    "DisconnectedError",
    "DiskFullError",
    "DivergedLogError",
    "DrainProgress",
    "FencedEpochError",
    "FencedMemberError",
    "GroupInfo",
    "GroupLimitError",
    "GroupListing",
    "GroupMemberInfo",
    "GroupMembership",
    "GroupNotEmptyError",
    "GroupOffset",
    "HandlerError",
    "InvalidAssignmentError",
    "InvalidPartitionsError",
    "InvalidReassignmentError",
    "InvalidRecordError",
    "InvalidReplicationFactorError",
    "InvalidRequestError",
    "InvalidTimestampError",
    "InvalidTopicError",
    "JavaError",
    "LogTruncatedError",
    "MaxPollIntervalError",
    "MissingExtraError",
    "NoClusterError",
    "NoReassignmentError",
    "NotControllerError",
    "NotEnoughReplicasAfterAppendError",
    "NotEnoughReplicasError",
    "NotEnoughResourcesError",
    "NotLeaderError",
    "NullKeyError",
    "OffsetAndMetadata",
    "OffsetNotAvailableError",
    "OffsetOutOfRangeError",
    "OffsetRange",
    "OpenFilesLimitError",
    "OutOfOrderSequenceError",
    "OutcomeUnknownError",
    "OverloadedError",
    "PartitionOfflineError",
    "PoolConfig",
    "PoolConsumer",
    "PoolExistsError",
    "PoolStatus",
    "Producer",
    "ProducerConfig",
    "ProducerFencedError",
    "ProtocolError",
    "RayqError",
    "Reassignment",
    "ReassignmentInProgressError",
    "Record",
    "RecordMetadata",
    "RecordTooLargeError",
    "ReplicaLimitError",
    "RewriteMismatchError",
    "SerializationError",
    "SparkSessionError",
    "StaleBrokerError",
    "StalePartitionError",
    "StorageError",
    "StreamingQueryError",
    "TimeoutError",
    "TopicConfig",
    "TopicExistsError",
    "TopicPartition",
    "UnknownAssignorError",
    "UnknownBrokerError",
    "UnknownEpochError",
    "UnknownGroupError",
    "UnknownMemberError",
    "UnknownPoolError",
    "UnknownProducerError",
    "UnknownServerError",
    "UnknownTopicError",
    "UnsupportedFormatError",
    "UnsupportedVersionError",
    "WrongClusterError",
    "__version__",
    "connect",
    "json_deserializer",
    "json_serializer",
    "start",
    "typed_json_deserializer",
]

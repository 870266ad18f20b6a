"""Types of the `**config` keywords of public calls, for editors and type checkers.

`make configs` writes this file from the configs, which have each key's meaning, range and default.
Serializers and deserializers are named parameters of the calls.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypedDict

from rayq.config import Partitioner


class TopicKeywords(TypedDict, total=False):
    """The keys of `TopicConfig`."""

    min_insync_replicas: int | None
    unclean_leader_election: bool
    flush: Literal["disk", "os"]
    cleanup_policy: Literal["delete", "compact", "compact,delete"]
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int | None
    delete_retention_ms: int
    retention_ms: int | None
    retention_bytes: int | None
    segment_bytes: int
    segment_ms: int
    index_interval_bytes: int
    max_message_bytes: int
    remote_storage: bool | Literal["read"]
    local_retention_ms: int | None
    local_retention_bytes: int | None
    remote_max_lag_ms: int
    message_timestamp_type: Literal["create", "append"]
    message_timestamp_after_max_ms: int


class ClusterKeywords(TypedDict, total=False):
    """The keys of `ClusterConfig`."""

    heartbeat_interval_ms: int
    session_timeout_ms: int
    controller_patience_ms: int
    access_patience_ms: int
    replica_lag_time_max_ms: int
    max_replicas_per_broker: int | None
    replica_rebuild_delay_ms: int | None
    replicas_per_process: int | None
    metadata_snapshot_records: int
    flush_checkpoint_bytes: int
    retention_check_interval_ms: int
    compaction_check_interval_ms: int
    compaction_bytes_per_s: int
    compaction_memory_bytes: int
    offsets_topic_partitions: int
    transaction_state_partitions: int
    queue_state_partitions: int
    offsets_retention_ms: int
    group_disconnect_grace_ms: int
    group_assignors: dict[str, str] | None
    max_frame_bytes: int
    max_connections: int
    max_requests_in_flight: int
    idle_connection_ms: int
    metrics_interval_ms: int
    remote_storage_url: str | None
    remote_storage_credentials: str | None
    remote_direct_reads: Literal["all", "superuser", "none"]
    remote_upload_bytes_per_s: int | None
    remote_read_bytes_per_s: int | None
    remote_cache_bytes: int
    remote_backlog_bytes: int | None
    remote_delete_delay_ms: int
    remote_sweep_interval_ms: int
    bind_host: str | None
    broker_resource: str | None
    advertised_host: str | None
    tls_certificate: str | None
    tls_key: str | None
    tls_ca: str | None
    tls_check_hostname: bool
    tls_client_ca: str | None
    tls_principals: Literal["san_uri", "cn"] | None
    inside_ray_principal: str | None


class ProducerKeywords(TypedDict, total=False):
    """The keys of `ProducerConfig`."""

    acks: Literal["all", 0, 1]
    enable_idempotence: bool
    linger_ms: int
    batch_size: int
    compression_type: Literal["lz4", "none"]
    max_in_flight_requests_per_connection: int
    delivery_timeout_ms: int
    request_timeout_ms: int
    retry_backoff_ms: int
    buffer_memory: int
    max_block_ms: int
    partitioner: Partitioner | None
    large_values: str | None
    transactional_id: str | None
    transaction_timeout_ms: int
    commit_wait_ms: int


class ConsumerKeywords(TypedDict, total=False):
    """The keys of `ConsumerConfig`."""

    auto_offset_reset: Literal["earliest", "latest", "none"] | timedelta
    group_instance_id: str | None
    assignor: str
    group_session_timeout_ms: int
    group_heartbeat_interval_ms: int
    max_poll_interval_ms: int
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    isolation_level: Literal["read_committed", "read_uncommitted"]
    max_poll_records: int
    fetch_max_bytes: int
    fetch_max_wait_ms: int
    fetch_buffer_bytes: int
    request_timeout_ms: int
    default_api_timeout_ms: int
    retry_backoff_ms: int
    on_corrupt: Literal["raise", "skip"]
    large_value_max_bytes: int
    large_values: str | None
    check_crcs: bool


class PoolKeywords(TypedDict, total=False):
    """The keys of `PoolConfig`."""

    min_consumers: int
    max_consumers: int | None
    target_lag_s: float
    cool_down_s: float
    resources: dict[str, float | int] | None
    batch: Literal["records", "arrow"]
    max_records: int
    auto_offset_reset: Literal["earliest", "latest"]
    retries: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    dead_letter_topic: str | None
    exactly_once: bool
    max_poll_interval_ms: int
    group_session_timeout_ms: int
    drain_timeout_s: float


class QueueKeywords(TypedDict, total=False):
    """The keys of `QueueConfig`."""

    visibility_timeout_s: float
    max_handling_s: float
    max_deliveries: int
    backoff_s: float
    backoff_max_s: float
    ordered_by_key: bool
    dead_letters: Literal["keep", "discard", "stay"]
    start: Literal["earliest", "latest"]
    retention: Literal["topic", "hold", "delete_done"]

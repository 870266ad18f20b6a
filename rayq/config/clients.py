"""Configs of clients: of producers, consumers and consumer pools."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from rayq.config.urls import check_url
from rayq.config.values import (
    DAY_MS,
    KIB,
    MIB,
    Bounds,
    NotNegative,
    NotNegativeSeconds,
    PollIntervalMs,
    Positive,
    PositiveBytes,
    PositiveSeconds,
    SessionMs,
    TransactionTimeoutMs,
    check_plain_functions,
    check_values,
    is_unicode,
    require,
)
from rayq.errors import ConfigError

Partitioner = Callable[[bytes | None, int], int]
Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]
Acks = Literal["all", 0, 1]
OnCorrupt = Literal["raise", "skip"]


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """The settings by which a producer batches, waits and retries. Reasons for the defaults that
    people ask about are in docs/reference/configs.md, "Why these defaults"."""

    acks: Acks = "all"
    """The meaning of a delivery: "all" in-sync replicas have the record, 1: the leader has appended
    it, 0: it was handed to the network. With 0, records that a leader refuses or that were on a
    connection that breaks are lost; refusals are logged as warnings."""

    enable_idempotence: bool = True
    """Number the batches so that retries never append a batch twice. Needs acks="all"; with acks 0
    or 1 it is off."""

    linger_ms: NotNegative = 5
    """The maximum time that a record waits for its batch to fill. A record is sent at once while
    nothing of its partition is in flight, so a lone record does not wait. The default is Kafka's
    since 4.0 (KIP-1030): larger batches under load, and no delay without it."""

    batch_size: PositiveBytes = 256 * KIB
    """The size of keys, values and headers at which a batch is closed. Records of 1 KB take half as
    much CPU in batches of 256 KiB as in batches of 64 KiB; still larger ones gain little."""

    compression_type: Literal["lz4", "none"] = "lz4"
    """The compression of batch bodies; a body that would not shrink is stored uncompressed."""

    max_in_flight_requests_per_connection: Positive = 5
    """The maximum number of batches of one partition in flight, 1 to 5 with idempotence."""

    delivery_timeout_ms: Positive = 120_000
    """The maximum time from `send` to the result, retries included; after it the future fails."""

    request_timeout_ms: Positive = 10_000
    """The maximum time that one request waits for its answer before it is retried."""

    retry_backoff_ms: Positive = 20
    """Wait before a retry; doubles up to 1 s, with jitter."""

    buffer_memory: PositiveBytes = 32 * MIB
    """The maximum size of all records that wait or are in flight. A full buffer blocks `send`
    (back-pressure). At least `batch_size`."""

    max_block_ms: Positive = 60_000
    """The maximum time that `send` blocks on a full buffer or missing metadata before it raises."""

    partitioner: Partitioner | None = None
    """`f(key, partition_count) -> partition`. None: crc32 of the key (as librdkafka's
    `consistent`); without a key one partition for 0.1 s or one full batch, then another. (Under
    `linger_ms=0` for one batch.)"""

    value_serializer: Serializer | None = None
    """`f(value) -> bytes`, called by `send` with each value but None. None: values are bytes."""

    key_serializer: Serializer | None = None
    """The same for keys. A partitioner gets the bytes."""

    large_values: str | None = None
    """The handling of a record larger than the topic's `max_message_bytes`. None: `send` raises.
    "chunks": the value is written to the log in pieces, which readers reassemble (at least acks=1;
    not into compacted topics). A URL (`s3://bucket/prefix`, `file:///directory`, any that fsspec
    knows): the value becomes an object there, and the record names it; `send` waits for the store,
    and readers need the same URL as their `large_values`. See docs/how-to/large-values.md."""

    transactional_id: str | None = None
    """Write in transactions, under an id that stays the same over restarts: a producer that starts
    with it fences the previous one. 1 to 256 characters. Needs acks="all" and enable_idempotence.
    """

    transaction_timeout_ms: TransactionTimeoutMs = 60_000
    """The maximum time from a transaction's first record to its end; after it the transaction is
    aborted, since the producer may have died. Readers of its partitions wait for it meanwhile."""

    commit_wait_ms: NotNegative = 1000
    """The maximum time that a decided commit waits until all readers see it. In a loop of short
    transactions 0 saves a third of the time, but readers see each transaction some milliseconds
    later."""

    def __post_init__(self) -> None:
        check_values(self)
        require(
            not self.idempotent or self.max_in_flight_requests_per_connection <= 5,
            "max_in_flight_requests_per_connection must be at most 5 with enable_idempotence: "
            "partitions remember the last five batches of each producer.",
        )
        require(
            self.buffer_memory >= self.batch_size,
            "buffer_memory must be at least batch_size, or no batch would ever fill.",
        )
        require(
            self.transactional_id is None
            or (1 <= len(self.transactional_id) <= 256 and is_unicode(self.transactional_id)),
            "transactional_id has 1 to 256 characters of Unicode.",
        )
        require(
            self.transactional_id is None or self.idempotent,
            'transactional_id needs enable_idempotence and acks="all": a transaction must not lose '
            "records.",
        )
        require(
            self.large_values != "chunks" or self.acks != 0,
            'large_values="chunks" needs acks="all" or 1: a value is complete once the leader has '
            "acknowledged each chunk.",
        )
        check_values_url(self.large_values, "chunks")
        check_plain_functions(self, "value_serializer", "key_serializer", "partitioner")

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
    """The settings of a consumer: its start position, its fetches and its group membership."""

    auto_offset_reset: Literal["earliest", "latest", "none"] | timedelta = "latest"
    """The position to start from when there is none, or when it is not in the log: it fell below
    the log start, or a `seek` or a commit set it past the end (neither is checked). A duration:
    that long ago (KIP-1106). "none": raise `OffsetOutOfRangeError` instead. If records that were
    read were lost by an unclean election, `LogTruncatedError` is raised in any case."""

    group_instance_id: str | None = None
    """The id of a static member (KIP-345): a process that comes back under the same id within the
    session keeps its partitions, without a rebalance. 1 to 249 characters."""

    assignor: str = "uniform"
    """The assignment of partitions: "uniform" (balanced within one, sticky), "range" (consecutive
    partitions, the same of each topic), or one of the cluster's `group_assignors`."""

    group_session_timeout_ms: SessionMs = 45_000
    """The time without a heartbeat after which a member is removed from its group. (If its process
    dies, the broken connection shows it within about a second.)"""

    group_heartbeat_interval_ms: Positive = 3_000
    """The time that a heartbeat is held while nothing changes; at most half of
    `group_session_timeout_ms`."""

    max_poll_interval_ms: PollIntervalMs = 300_000
    """The maximum time between two polls; a member that takes longer loses its partitions."""

    enable_auto_commit: bool = False
    """Commit automatically what earlier polls returned: every `auto_commit_interval_ms`, when
    partitions are revoked and at `close`. At-least-once only if each record is processed before the
    next poll."""

    auto_commit_interval_ms: Positive = 5_000
    """The interval of commits with `enable_auto_commit`."""

    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """"read_committed" returns records of transactions that committed, and stops below the first
    undecided transaction. "read_uncommitted" returns everything that is replicated. Where nobody
    uses transactions they are the same."""

    max_poll_records: Positive = 500
    """The maximum number of records that one `poll` returns, unless the call gives another."""

    fetch_max_bytes: PositiveBytes = 4 * MIB
    """The maximum bytes of one partition per fetch; at least one batch is always returned."""

    fetch_max_wait_ms: Positive = 500
    """The maximum time that a leader holds a fetch that has nothing to return."""

    fetch_buffer_bytes: PositiveBytes = 64 * MIB
    """The maximum size of prefetched data over all partitions; fetching pauses beyond it. Also the
    maximum that one `poll` unpacks (but always a whole batch, and at least 16 MiB)."""

    request_timeout_ms: Positive = 10_000
    """The maximum time that a request waits for its answer (on top of `fetch_max_wait_ms`) before
    it is retried."""

    default_api_timeout_ms: Positive = 60_000
    """The time that a call without a timeout of its own (offsets, metadata) retries before it
    raises."""

    retry_backoff_ms: Positive = 20
    """Wait before a retry; doubles up to 1 s, with jitter."""

    on_corrupt: OnCorrupt = "raise"
    """The action for records that cannot be read, such as a damaged batch, or a large value that is
    missing or exceeds this reader's limit. "raise": raise `UnreadableRecordError`, which has their
    offset and the next one, and stay there until a `seek`. "skip": continue after them, with a
    warning in the log. Problems that can be fixed outside the record (a deserializer that raises, a
    store that refuses the credentials) are raised in any case."""

    large_value_max_bytes: PositiveBytes = 256 * MIB
    """The maximum size of a value that is reassembled from chunks, or read from an object. A larger
    one raises `LargeValueRefusedError`."""

    large_values: str | None = None
    """The URL below which large values may be read from objects (producers' `large_values`), with
    this process's credentials. None: a value in an object raises `LargeValueRefusedError`. Values
    in chunks need no permission."""

    check_crcs: bool = True
    """Check each batch's CRC before its records are handed out."""

    value_deserializer: Deserializer | None = None
    """`f(bytes) -> value`, called by `poll` with each value but None. None: values are bytes."""

    key_deserializer: Deserializer | None = None
    """The same for keys."""

    def __post_init__(self) -> None:
        check_values(self)
        require(
            self.group_session_timeout_ms >= 2 * self.group_heartbeat_interval_ms,
            "group_session_timeout_ms must be at least twice group_heartbeat_interval_ms, or one "
            "late heartbeat ends a session.",
        )
        for name in ("group_instance_id", "assignor"):
            value = getattr(self, name)
            require(
                value is None or (0 < len(value) <= 249 and is_unicode(value)),
                f"{name} has 1 to 249 characters of Unicode text, not {value!r}.",
            )
        require(
            not isinstance(self.auto_offset_reset, timedelta)
            or self.auto_offset_reset >= timedelta(0),
            "auto_offset_reset cannot be a negative duration.",
        )
        check_values_url(self.large_values)
        check_plain_functions(self, "value_deserializer", "key_deserializer")


def check_values_url(url: str | None, *others: str) -> None:
    """Checks the URL of large values. Raises ConfigError, which does not show the URL."""
    if url is None or url in others:
        return
    words = "".join(f'"{word}", ' for word in others)
    check_url(f"large_values (None, {words}or a URL such as s3://bucket/prefix)", url)


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """The settings of a consumer pool: its size, its handler, its retries and dead letters."""

    min_consumers: NotNegative = 0
    """The minimum number of running consumers. 0: none run while no records wait."""

    max_consumers: Positive | None = None
    """The maximum number of running consumers, at least `min_consumers`. None: the number of
    partitions of the topic (more would be idle)."""

    target_lag_s: PositiveSeconds = 10.0
    """The target for the age of the oldest unhandled record, in seconds; it also sets how fast a
    backlog is worked off. Smaller: more consumers."""

    cool_down_s: NotNegativeSeconds = 30.0
    """The time for which fewer consumers would have been enough before some are stopped. Shorter:
    less idling, more starts."""

    resources: dict[str, float | int] | None = None
    """The Ray resources of each consumer: "num_cpus", "num_gpus", "memory" (bytes), or a custom
    resource. None: one CPU. Consumers that do not fit wait, which makes Ray's autoscaler add nodes.
    """

    batch: Literal["records", "arrow"] = "records"
    """The handler's argument: a list of `Record`, or a `pyarrow.Table` as of `poll_arrow`."""

    max_records: Positive = 500
    """The maximum number of records in one call of the handler."""

    auto_offset_reset: Literal["earliest", "latest"] = "earliest"
    """The start position of partitions for which the group has none: their log start, or their end
    when the pool was started."""

    retries: NotNegative = 5
    """The number of retries of a batch for which the handler raised an error. After them the batch
    is split, and records that still fail go to the dead letters."""

    retry_backoff_ms: Positive = 200
    """Wait before a retry; doubles up to `retry_backoff_max_ms`, with jitter."""

    retry_backoff_max_ms: Positive = 30_000
    """The maximum wait before a retry; at least `retry_backoff_ms`."""

    dead_letter_topic: str | None = None
    """The topic for records that keep failing, with the reason in headers. None: they are retried
    until they succeed, and later records of their partition wait."""

    exactly_once: bool = False
    """Handle each batch in a transaction: sending what the handler returns (an `Outgoing`, an
    iterable of them, or None) and marking the batch as handled take effect together or not at all.
    The same holds for dead letters."""

    max_poll_interval_ms: PollIntervalMs = 300_000
    """The maximum time for one call of the handler. A consumer that takes longer loses its
    partitions, and is killed."""

    group_session_timeout_ms: SessionMs = 45_000
    """The time without a heartbeat after which a consumer is removed from its group."""

    drain_timeout_s: Annotated[float, Bounds(0, DAY_MS // 1000, above_zero=True)] = 60.0
    """The maximum time that a consumer that is stopped may take to finish its batch; after it the
    consumer is killed, and others handle that batch again."""

    def __post_init__(self) -> None:
        check_values(self)
        require(
            self.max_consumers is None or self.max_consumers >= self.min_consumers,
            f"max_consumers must be at least min_consumers, not {self.max_consumers}.",
        )
        require(
            self.retry_backoff_max_ms >= self.retry_backoff_ms,
            "retry_backoff_max_ms must be at least retry_backoff_ms.",
        )
        _check_resources(self.resources or {})


RAY_OPTIONS = ("num_cpus", "num_gpus", "memory")
"""The resources for which Ray has an option of its own; every other name is a custom resource."""


def _check_resources(resources: Mapping[str, float]) -> None:
    """A misspelt name would be a custom resource that no node has: consumers would wait for it
    forever."""
    for name, amount in resources.items():
        require(
            0 <= amount < math.inf, f"resources[{name!r}] must be at least 0, not {amount}."
        )
        if name in RAY_OPTIONS:
            continue
        meant = {"cpu": "num_cpus", "gpu": "num_gpus"}.get(name.lower())
        near = [meant] if meant else difflib.get_close_matches(name, RAY_OPTIONS, n=1, cutoff=0.6)
        require(
            not near, f"Unknown resource {name!r}. Did you mean {near[0] if near else name!r}?"
        )


def check_group_keys(config: ConsumerConfig) -> None:
    """Checks the config of a consumer without a group. Raises ConfigError where it has a key that
    only the members of a group use: its user believes that the consumer is a member."""
    defaults = ConsumerConfig()
    for name in GROUP_KEYS:
        if getattr(config, name) != getattr(defaults, name):
            raise ConfigError(f"{name} is for members of a group: say group= too.")

"""Typed configs: Kafka's names in snake_case, each with unit, default and trade-off.

A config is a frozen dataclass that checks itself when made. `parse(Kind, {...})` makes one from a
user's keywords: the dotted Kafka spelling is accepted too, and an unknown key is a `ConfigError`
that says what Kafka's name for it is called here, or suggests the nearest.
"""

from __future__ import annotations

from rayq.config.clients import (
    GROUP_KEYS,
    RAY_OPTIONS,
    Acks,
    ConsumerConfig,
    Deserializer,
    OnCorrupt,
    Partitioner,
    PoolConfig,
    ProducerConfig,
    Serializer,
    check_group_keys,
    check_values_url,
)
from rayq.config.parsing import as_dict, given_values, only_known, parse, parse_stored
from rayq.config.servers import (
    MESSAGE_BYTES_CEILING,
    ClusterConfig,
    QueueConfig,
    TopicConfig,
    check_remote_storage_url,
)
from rayq.config.values import (
    DAY_MS,
    GIB,
    HOUR_MS,
    INT64_MAX,
    KIB,
    MIB,
    Bounds,
    described,
    is_unicode,
    range_of,
    types_of,
)

__all__ = [
    "DAY_MS",
    "GIB",
    "GROUP_KEYS",
    "HOUR_MS",
    "INT64_MAX",
    "KIB",
    "MESSAGE_BYTES_CEILING",
    "MIB",
    "RAY_OPTIONS",
    "Acks",
    "Bounds",
    "ClusterConfig",
    "ConsumerConfig",
    "Deserializer",
    "OnCorrupt",
    "Partitioner",
    "PoolConfig",
    "ProducerConfig",
    "QueueConfig",
    "Serializer",
    "TopicConfig",
    "as_dict",
    "check_group_keys",
    "check_remote_storage_url",
    "check_values_url",
    "described",
    "given_values",
    "is_unicode",
    "only_known",
    "parse",
    "parse_stored",
    "range_of",
    "types_of",
]

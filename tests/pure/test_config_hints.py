"""A config key under another name: the error says what it is called here."""

from __future__ import annotations

import inspect
import re

import pytest

import rayq
from rayq.client.cluster import Cluster
from rayq.config import (
    GROUP_KEYS,
    ClusterConfig,
    ConsumerConfig,
    PoolConfig,
    ProducerConfig,
    QueueConfig,
    TopicConfig,
    check_group_keys,
    kafka_names,
    parse,
)
from rayq.errors import ConfigError

KINDS = {
    "topic": TopicConfig,
    "cluster": ClusterConfig,
    "producer": ProducerConfig,
    "consumer": ConsumerConfig,
    "pool": PoolConfig,
    "queue": QueueConfig,
}


@pytest.mark.parametrize(
    ("kind", "key", "said"),
    [
        ("consumer", "group_id", "say group="),
        ("consumer", "group.id", "say group="),
        ("consumer", "bootstrap_servers", "rayq.connect"),
        ("consumer", "deserializer", "say value_deserializer="),
        ("consumer", "value_serializer", "a config of a producer"),
        ("consumer", "session.timeout.ms", "say group_session_timeout_ms="),
        ("consumer", "linger_ms", "a config of a producer"),
        ("producer", "bootstrap.servers", "rayq.connect"),
        ("producer", "serializer", "say value_serializer="),
        ("producer", "key.deserializer", "a config of a consumer"),
        ("producer", "retries", "delivery_timeout_ms"),
        ("producer", "group_instance_id", "a config of a consumer"),
        ("topic", "num_partitions", "say partitions="),
        ("topic", "partitions", "create_partitions adds more"),
        ("topic", "min.isr", "say min_insync_replicas="),
        ("cluster", "replication_factor", "each topic has its own"),
        ("cluster", "retention_ms", "a config of a topic"),
        ("cluster", "num_brokers", "say brokers="),
        ("pool", "group_id", "the group comes second"),
        ("pool", "value_deserializer", "handler gets the bytes"),
        # A name that no other system uses is compared with the keys that exist.
        ("topic", "retention_msec", "Did you mean 'retention_ms'?"),
        ("topic", "colour", "Known: min_insync_replicas, "),
    ],
)
def test_the_error_says_the_right_name(kind: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(KINDS[kind], {key: 1})  # type: ignore[type-var]
    assert said in str(caught.value) and repr(key) in str(caught.value)


def test_the_dotted_spelling_of_a_key_that_there_is_is_accepted() -> None:
    assert parse(ProducerConfig, {"linger.ms": 7}).linger_ms == 7


def test_a_key_that_takes_a_float_takes_a_whole_number_as_type_checkers_allow() -> None:
    assert parse(TopicConfig, {"min_cleanable_dirty_ratio": 1}).min_cleanable_dirty_ratio == 1
    assert parse(PoolConfig, {"target_lag_s": 1}).target_lag_s == 1


def test_hints_name_what_there_is_and_hide_nothing() -> None:
    """No hint stands for a known key, and each names a key or an argument of the public face."""
    faces = (
        *(rayq.start, rayq.connect, Cluster.consumer, Cluster.consumer_pool, Cluster.create_topic),
        rayq.Admin.alter_topic_config,
    )
    arguments = {name for face in faces for name in inspect.signature(face).parameters}
    keys = {key for kind in KINDS.values() for key in vars(kind)["__dataclass_fields__"]}
    for title, hints in kafka_names._BY_KIND.items():
        own = set(vars(KINDS[title])["__dataclass_fields__"])
        assert not own & (set(hints) | set(kafka_names._EVERYWHERE)), title
        for hint in hints.values():
            for name in re.findall(r"\b([a-z_]+)=", hint):
                assert name in keys | arguments | {"timeout_s", "max_records"}, hint


@pytest.mark.parametrize("key", GROUP_KEYS)
def test_what_only_members_of_a_group_do_is_refused_without_one(key: str) -> None:
    default = getattr(ConsumerConfig(), key)
    check_group_keys(parse(ConsumerConfig, {key: default}))
    other = {str: "range", bool: True, type(None): "me"}.get(type(default), 7000)
    with pytest.raises(ConfigError, match=f"{key} is for members of a group: say group= too"):
        check_group_keys(parse(ConsumerConfig, {key: other}))

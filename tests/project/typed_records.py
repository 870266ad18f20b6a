"""The types of producers, consumers and records. `make lint` checks this file; it never runs."""

from __future__ import annotations

from typing import Any, assert_type

import msgspec

import rayq
from rayq import AsyncConsumer, AsyncProducer, Consumer, Producer, Record


class Order(msgspec.Struct):
    item: str
    cups: int = 1


def of_bytes(cluster: rayq.Cluster, record: Record, producer: Producer) -> None:
    assert_type(record.value, bytes | None)
    assert_type(record.key, bytes | None)
    assert_type(cluster.producer(acks=1), Producer[bytes, bytes])
    assert_type(cluster.consumer("t").poll()[0].value, bytes | None)
    producer.send("t", None, key=b"a tombstone")
    producer.send("t", "text")  # type: ignore[arg-type]


def of_configs(cluster: rayq.Cluster, options: dict[str, Any]) -> None:
    cluster.create_topic("t", 3, retention_ms=1000, **options)
    cluster.admin.alter_topic_config("t", cleanup_policy="compact")
    cluster.producer(linger_ms=5)
    cluster.producer(linger_m=5)  # type: ignore[call-arg]
    cluster.consumer("t", auto_offset_reset="first")  # type: ignore[arg-type]
    rayq.start("/data", flush_checkpoint_bytes="1 MiB")  # type: ignore[arg-type]


def of_the_admin(admin: rayq.Admin) -> None:
    assert_type(admin.list_topics(internal=True), list[str])
    assert_type(admin.describe_topic("t", timeout_s=1.0), rayq.TopicInfo)
    assert_type(admin.delete_records({rayq.TopicPartition("t", 0): None}), dict[rayq.TopicPartition, int])
    admin.create_topic("t", partition=3)  # type: ignore[call-arg]
    admin.delete_topic(7)  # type: ignore[arg-type]


def of_types(cluster: rayq.Cluster) -> None:
    orders = cluster.consumer("t", value_deserializer=rayq.typed_json_deserializer(Order))
    assert_type(orders, Consumer[Order, bytes | None])
    assert_type(orders.poll()[0].value, Order)
    assert_type(next(orders).value, Order)
    by_table = cluster.consumer(
        "t",
        group="g",
        value_deserializer=rayq.typed_json_deserializer(Order),
        key_deserializer=bytes.decode,
    )
    assert_type(by_table.poll(), list[Record[Order, str]])
    json = cluster.consumer("t", value_deserializer=rayq.json_deserializer)
    assert_type(json, Consumer[Any, bytes | None])
    with_tombstones: Consumer[Order | None] = cluster.consumer(
        "t", value_deserializer=rayq.typed_json_deserializer(Order)
    )
    assert_type(with_tombstones.poll()[0].value, Order | None)


def of_what_is_sent(cluster: rayq.Cluster) -> None:
    assert_type(cluster.producer(value_serializer=str.encode), Producer[str, bytes])
    producer: Producer[Order, str] = cluster.producer(
        value_serializer=rayq.json_serializer, key_serializer=str.encode
    )
    producer.send("t", Order("tea"), key="table-7")
    producer.send_many("t", [Order("tea"), None], keys=["table-7", "table-8"])
    producer.send_and_wait("t", {"item": "tea"})  # type: ignore[arg-type]
    producer.send("t", Order("tea"), key=b"table-7")  # type: ignore[arg-type]


async def of_asyncio(cluster: rayq.Cluster) -> None:
    async with cluster.async_producer(value_serializer=str.encode) as producer:
        assert_type(producer, AsyncProducer[str, bytes])
        await producer.send_and_wait("t", b"bytes")  # type: ignore[arg-type]
    async with cluster.async_consumer("t", value_deserializer=bytes.decode) as consumer:
        assert_type(consumer, AsyncConsumer[str, bytes | None])
        async for record in consumer:
            assert_type(record.value, str)

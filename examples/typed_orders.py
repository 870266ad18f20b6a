"""Typed records: objects go in, objects come out, and a record that cannot be read is put aside.

    python examples/typed_orders.py

A type checker knows that `record.value` is an `Order`. One record is no order: the consumer stays
at it and says so, with the record as it was sent, until it is told to continue.
"""

from __future__ import annotations

import msgspec

import rayq
from rayq import Record
from rayq.testing import LocalCluster

ORDERS = 100


class Order(msgspec.Struct):
    item: str
    cups: int = 1


def cups_of(record: Record[Order, str]) -> int:
    """The number of cups of a table's order."""
    assert record.key.startswith("table-")
    return record.value.cups


def sell(cluster: rayq.Cluster) -> None:
    producer: rayq.Producer[Order, str]  # the type checker refuses to send anything else
    with cluster.producer(
        value_serializer=rayq.json_serializer, key_serializer=str.encode
    ) as producer:
        for number in range(ORDERS):
            producer.send("orders", Order("tea", 1 + number % 3), key=f"table-{number % 7}")
    with cluster.producer() as by_hand:  # sends bytes that are no order
        by_hand.send_and_wait("orders", b'{"item": "tea", "cups": "two"}', key=b"table-1")


def brew(cluster: rayq.Cluster) -> int:
    """Handles all orders, and puts aside records that are no order. Returns how many cups were
    ordered."""
    cups = 0
    with (
        cluster.producer() as aside,
        cluster.consumer(
            "orders",
            group="kitchen",
            auto_offset_reset="earliest",
            value_deserializer=rayq.typed_json_deserializer(Order),
            key_deserializer=bytes.decode,
        ) as consumer,
    ):
        while True:
            try:
                records = consumer.poll(timeout_s=1.0)
            except rayq.DeserializationError as error:
                bad, place, next_offset = error.record, error.topic_partition, error.next_offset
                assert bad is not None and place is not None and next_offset is not None
                print(f"no order: {bad.value!r}: {error.__cause__}")
                aside.send_and_wait("no-orders", bad.value, key=bad.key)
                consumer.seek(place, next_offset)
                consumer.commit()
                continue
            if not records:
                return cups
            cups += sum(map(cups_of, records))
            consumer.commit()


if __name__ == "__main__":
    with LocalCluster(brokers=1) as cluster:
        cluster.create_topic("orders", partitions=2)
        cluster.create_topic("no-orders")
        sell(cluster)
        print(f"brewed {brew(cluster)} cups")
        print(f"the group is {cluster.admin.describe_group('kitchen').lag} records behind")

"""Wrong arguments: the call itself raises an error that says what to give."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from ray import cloudpickle

from rayq.client.cluster import Cluster
from rayq.errors import (
    ConfigError,
    InvalidRequestError,
    InvalidTimestampError,
    RayqError,
    UnknownBrokerError,
)
from rayq.records import OffsetAndMetadata, TopicPartition
from tests.client.fake_broker import FakeCluster

T0 = TopicPartition("t", 0)
HUGE = 2**80

NO_NAMES: list[Any] = [None, 5, b"t", ("t", 0), T0, ["t"], {"t"}]
NO_LISTS_OF_NAMES: list[Any] = [None, 5, b"t", ("t", 0), T0, [5], [["t", None]], [{"t": 1}]]
NO_PARTITIONS: list[Any] = [
    *(None, 5, "t", b"t", ("t",), ("t", 0, 1), ["t", 0], [T0]),
    *(("t", "0"), ("t", True), ("t", 0.0), (0, "t"), (None, 0), (b"t", 0)),
]
NO_LISTS_OF_PARTITIONS: list[Any] = [
    *(None, 5, "t", b"t", T0, ("t", 0), ["t"], [0], [["t", 0]], [("t", "0")]),
]
NO_MAPPINGS: list[Any] = [None, 5, "t", b"t", T0, [T0], [(T0, 1)], {T0}]
NO_INTS: list[Any] = ["1", 1.0, float("nan"), True, (1,)]
NO_BYTES: list[Any] = ["text", 5, 1.5, True, ("a",), object()]


def hashable(values: list[Any]) -> list[Any]:
    return [one for one in values if not isinstance(one, list | set)]


class Given:
    """The objects whose methods a user calls."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.admin = cluster.admin
        self.consumer = cluster.consumer("t", auto_offset_reset="earliest")
        self.group = cluster.consumer(group="g")
        self.group.assign([T0])
        self.producer = cluster.producer(max_block_ms=30_000)

    def close(self) -> None:
        for made in (self.consumer, self.group, self.producer):
            made.close()


Row = tuple[str, Callable[[Given, Any], object], list[Any], str, type[Exception]]


def rows() -> list[Row]:
    """The calls, with a wrong argument and the text of the error for each."""
    one_name: dict[str, Callable[[Given, Any], object]] = {
        "create_topic": lambda of, one: of.admin.create_topic(one),
        "cluster.create_topic": lambda of, one: of.cluster.create_topic(one),
        "delete_topic": lambda of, one: of.admin.delete_topic(one),
        "describe_topic": lambda of, one: of.admin.describe_topic(one),
        "create_partitions": lambda of, one: of.admin.create_partitions(one, 2),
        "alter_topic_config": lambda of, one: of.admin.alter_topic_config(one, flush="os"),
        "elect_leaders": lambda of, one: of.admin.elect_leaders(one),
        "set_replication_factor": lambda of, one: of.admin.set_replication_factor(one, 1),
        "consumer_pool": lambda of, one: of.cluster.consumer_pool(one, "g", print),
        "tail": lambda of, one: of.cluster.tail(one),
        "send": lambda of, one: of.producer.send(one, b"v"),
        "send_many": lambda of, one: of.producer.send_many(one, [b"v"]),
    }
    one_partition: dict[str, Callable[[Given, Any], object]] = {
        "seek": lambda of, one: of.consumer.seek(one, 0),
        "seek_to_beginning": lambda of, one: of.consumer.seek_to_beginning(one),
        "seek_to_end": lambda of, one: of.consumer.seek_to_end(one),
        "seek_to_last": lambda of, one: of.consumer.seek_to_last(1, one),
        "position": lambda of, one: of.consumer.position(one),
        "pause": lambda of, one: of.consumer.pause(one),
        "resume": lambda of, one: of.consumer.resume(one),
    }
    key: dict[str, Callable[[Given, Any], object]] = {
        "offsets_for_times": lambda of, one: of.consumer.offsets_for_times({one: 0}),
        "commit": lambda of, one: of.group.commit({one: 0}),
        "commit_async": lambda of, one: of.group.commit_async({one: 0}),
        "delete_records": lambda of, one: of.admin.delete_records({one: 0}),
        "reassign_partitions": lambda of, one: of.admin.reassign_partitions({one: [1]}),
        "set_group_offsets": lambda of, one: of.admin.set_group_offsets("g", to={one: 0}),
    }
    several_partitions: dict[str, Callable[[Given, Any], object]] = {
        "assign": lambda of, some: of.consumer.assign(some),
        "beginning_offsets": lambda of, some: of.consumer.beginning_offsets(some),
        "end_offsets": lambda of, some: of.consumer.end_offsets(some),
        "committed": lambda of, some: of.group.committed(some),
        "committed_with_metadata": lambda of, some: of.group.committed_with_metadata(some),
        "cancel_reassignments": lambda of, some: of.admin.cancel_reassignments(some),
    }
    mapping: dict[str, Callable[[Given, Any], object]] = {
        "offsets_for_times": lambda of, some: of.consumer.offsets_for_times(some),
        "delete_records": lambda of, some: of.admin.delete_records(some),
        "reassign_partitions": lambda of, some: of.admin.reassign_partitions(some),
    }
    broker: dict[str, Callable[[Given, Any], object]] = {
        "plan_drain": lambda of, one: of.admin.plan_drain(one),
        "drain_broker": lambda of, one: of.admin.drain_broker(one),
        "undrain_broker": lambda of, one: of.admin.undrain_broker(one),
        "remove_broker": lambda of, one: of.admin.remove_broker(one),
        "restart_broker": lambda of, one: of.cluster.restart_broker(one),
        "stop_broker": lambda of, one: of.cluster.stop_broker(one),
        "replace_disk": lambda of, one: of.cluster.replace_disk(one),
    }
    group: dict[str, Callable[[Given, Any], object]] = {
        "consumer(group=)": lambda of, one: of.cluster.consumer("t", group=one),
        "describe_group": lambda of, one: of.admin.describe_group(one),
        "delete_group": lambda of, one: of.admin.delete_group(one),
        "set_group_offsets": lambda of, one: of.admin.set_group_offsets(one, "t", to=0),
    }
    timed: dict[str, Callable[[Given, Any], object]] = {
        "poll": lambda of, time_s: of.consumer.poll(time_s),
        "until_end": lambda of, time_s: of.consumer.until_end(time_s),
        "tail": lambda of, time_s: of.cluster.tail("t", timeout_s=time_s),
        "create_topic": lambda of, time_s: of.admin.create_topic("u", timeout_s=time_s),
    }
    count = "int from 0, not"
    return [
        *((n, call, NO_NAMES, "name must be a str", TypeError) for n, call in one_name.items()),
        *((n, call, [b"g", 5, ["g"]], "name must be a str", TypeError) for n, call in group.items()),
        *(
            (n, call, NO_PARTITIONS, "such as TopicPartition('orders', 0)", TypeError)
            for n, call in one_partition.items()
        ),
        *(
            (n, call, hashable(NO_PARTITIONS), "such as TopicPartition('orders', 0)", TypeError)
            for n, call in key.items()
        ),
        *(
            (n, call, NO_LISTS_OF_PARTITIONS[n == "cancel_reassignments" :], "such as", TypeError)
            for n, call in several_partitions.items()
        ),
        *((n, call, NO_MAPPINGS, "A mapping of each", TypeError) for n, call in mapping.items()),
        *((n, call, [None, *NO_INTS], "broker must be an int", TypeError) for n, call in broker.items()),
        *((n, call, [None, "1"], "number of seconds", TypeError) for n, call in timed.items()),
        *(
            (n, call, [-1, float("nan")], "number of seconds", InvalidRequestError)
            for n, call in timed.items()
        ),
        (
            "subscribe",
            lambda of, some: of.consumer.subscribe(some),
            NO_LISTS_OF_NAMES,
            "such as",
            TypeError,
        ),
        (
            "consumer",
            lambda of, some: of.cluster.consumer(some),
            [None, 5, b"t", {"t": 1}, ["t", 5]],
            "such as",
            TypeError,
        ),
        (
            "consumer(pattern=)",
            lambda of, one: of.cluster.consumer(group="g", pattern=one),
            [5, b"t", ["t"]],
            "str or re.compile",
            TypeError,
        ),
        (
            "on_assigned",
            lambda of, one: of.cluster.consumer("t", group="g", on_assigned=one),
            [5, "print"],
            "on_assigned has to be a function",
            TypeError,
        ),
        ("seek", lambda of, at: of.consumer.seek(T0, at), [None, *NO_INTS], "an int", TypeError),
        ("seek", lambda of, at: of.consumer.seek(T0, at), [-1, HUGE], "from 0", InvalidRequestError),
        ("commit", lambda of, some: of.group.commit(some), NO_MAPPINGS[1:], "{part", TypeError),
        ("commit", lambda of, at: of.group.commit({T0: at}), [None, *NO_INTS], "an int", TypeError),
        (
            "commit",
            lambda of, at: of.group.commit({T0: at}),
            [-1, HUGE],
            "count from 0",
            InvalidRequestError,
        ),
        (
            "commit metadata",
            lambda of, text: of.group.commit({T0: OffsetAndMetadata(1, text)}),
            [None, b"text", 5],
            "OffsetAndMetadata(offset, metadata)",
            TypeError,
        ),
        (
            "offsets_for_times",
            lambda of, at: of.consumer.offsets_for_times({T0: at}),
            [None, -1, *NO_INTS],
            "Unix time in milliseconds",
            InvalidRequestError,
        ),
        (
            "delete_records",
            lambda of, at: of.admin.delete_records({T0: at}),
            [-1, *NO_INTS],
            "needs an offset from 0",
            InvalidRequestError,
        ),
        ("tail", lambda of, n: of.cluster.tail("t", n), [-1, *NO_INTS], count, InvalidRequestError),
        (
            "seek_to_last",
            lambda of, n: of.consumer.seek_to_last(n),
            [T0, -1, *NO_INTS],
            count,
            InvalidRequestError,
        ),
        (
            "max_records",
            lambda of, n: of.consumer.poll(0, n),
            [0, -1, *NO_INTS],
            "positive int",
            InvalidRequestError,
        ),
        (
            "set_group_offsets(topics)",
            lambda of, some: of.admin.set_group_offsets("g", some, to=0),
            [5, b"t", [5], [("t", "0")]],
            "not",
            TypeError,
        ),
        (
            "set_group_offsets(to)",
            lambda of, to: of.admin.set_group_offsets("g", "t", to=to),
            [-1, "start", *NO_INTS],
            'to is "earliest", "latest", an offset from 0',
            InvalidRequestError,
        ),
        (
            "set_group_offsets(shift)",
            lambda of, by: of.admin.set_group_offsets("g", "t", shift=by),
            NO_INTS,
            "shift must be an int",
            TypeError,
        ),
        (
            "create_topic(partitions)",
            lambda of, n: of.admin.create_topic("u", n),
            [None, *NO_INTS],
            "partitions must be an int",
            TypeError,
        ),
        (
            "create_topic(replication_factor)",
            lambda of, n: of.admin.create_topic("u", 1, n),
            NO_INTS,
            "replication_factor must be an int",
            TypeError,
        ),
        (
            "create_partitions",
            lambda of, n: of.admin.create_partitions("t", n),
            [None, *NO_INTS],
            "total must be an int",
            TypeError,
        ),
        (
            "elect_leaders(partitions)",
            lambda of, some: of.admin.elect_leaders("t", some),
            [0, "0", b"0", 1.5],
            "partitions must be a list of numbers",
            TypeError,
        ),
        (
            "elect_leaders(partitions)",
            lambda of, one: of.admin.elect_leaders("t", [one]),
            [None, *NO_INTS],
            "A partition must be an int",
            TypeError,
        ),
        (
            "reassign_partitions",
            lambda of, to: of.admin.reassign_partitions({T0: to}),
            [None, 1, "1", ["1"], [True], [1.0]],
            "list of broker ids",
            TypeError,
        ),
        (
            "throttle",
            lambda of, rate: of.admin.reassign_partitions({T0: [1]}, throttle_bytes_per_s=rate),
            NO_INTS,
            "throttle_bytes_per_s must be an int",
            TypeError,
        ),
        (
            "concurrency",
            lambda of, n: of.admin.drain_broker(1, concurrency=n),
            [None, *NO_INTS],
            "concurrency must be an int",
            TypeError,
        ),
        (
            "restart_broker",
            lambda of, one: of.cluster.restart_broker(one),
            [-1, 7, HUGE],
            "the brokers are",
            UnknownBrokerError,
        ),
        ("value", lambda of, v: of.producer.send("t", v), NO_BYTES, "to be bytes", TypeError),
        ("key", lambda of, k: of.producer.send("t", b"", key=k), NO_BYTES, "to be bytes", TypeError),
        (
            "headers",
            lambda of, some: of.producer.send("t", b"", headers=some),
            [5, "ab", [5], [("a",)], [("a", b"1", 2)], [("a", "1")], [(b"a", b"1")], {"a": b"1"}],
            "pair",
            TypeError,
        ),
        (
            "partition",
            lambda of, n: of.producer.send("t", b"", partition=n),
            NO_INTS,
            "A partition must be an int",
            TypeError,
        ),
        (
            "partition",
            lambda of, n: of.producer.send("t", b"", partition=n),
            [-1, 1, HUGE],
            "has partitions 0 to 0",
            InvalidRequestError,
        ),
        (
            "timestamp_ms",
            lambda of, at: of.producer.send("t", b"", timestamp_ms=at),
            NO_INTS,
            "timestamp_ms must be an int",
            TypeError,
        ),
        (
            "timestamp_ms",
            lambda of, at: of.producer.send("t", b"", timestamp_ms=at),
            [-1, HUGE],
            "Unix time in milliseconds",
            InvalidTimestampError,
        ),
        (
            "on_delivery",
            lambda of, one: of.producer.send("t", b"", on_delivery=one),
            [5, "print"],
            "on_delivery has to be a function",
            TypeError,
        ),
        (
            "send_many",
            lambda of, some: of.producer.send_many("t", some),
            [None, 5, "text", b"bytes", {"a": b"1"}],
            "list of bytes",
            TypeError,
        ),
        (
            "send_many",
            lambda of, one: of.producer.send_many("t", [b"", one]),
            NO_BYTES,
            "has to be bytes",
            TypeError,
        ),
        (
            "keys",
            lambda of, some: of.producer.send_many("t", [b""], keys=some),
            [5, "t", b"t"],
            "list of bytes",
            TypeError,
        ),
        (
            "addresses",
            lambda of, some: of.cluster.add_addresses(some),
            [None, 5, b"host:1", [5], [("host",)]],
            "address",
            TypeError,
        ),
        (
            "addresses",
            lambda of, some: of.cluster.add_addresses(some),
            ["", "host:0", "host:port", [("host", "x")]],
            "is not an address",
            ConfigError,
        ),
    ]


def test_what_is_wrong_is_refused_by_an_error_that_says_what_to_write(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    of = Given(cluster)
    of.producer.send("t", b"v").result(30)
    bad = []
    for name, call, wrong, say, kind in rows():
        for argument in wrong:
            try:
                result: object = call(of, argument)
            except (RayqError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, kind) and say.lower() in str(error).lower():
                    continue
                result = error
            bad.append(f"{name} of {argument!r}: {result!r}")
    of.close()
    assert not bad, "\n".join(bad)
    assert fake.values("t") == [b"v"], "nothing of it was sent"
    assert set(fake.topics) == {"t", "__consumer_offsets"}


def test_names_and_partitions_are_taken_in_every_shape_that_is_clear(
    fake: FakeCluster, cluster: Cluster
) -> None:
    for topic in ("a", "b"):
        fake.create_topic(topic)
        fake.write(topic, [topic.encode()])
    both = {TopicPartition("a", 0), TopicPartition("b", 0)}
    shapes: list[Any] = [["a", "b"], ("a", "b"), {"a", "b"}, ["a", "b", "a"]]
    for shape in shapes:
        with cluster.consumer(shape) as consumer:
            assert consumer.assignment() == both, shape
    with cluster.consumer(["a"], "b") as consumer:
        assert consumer.assignment() == both
        consumer.subscribe("a")
        assert consumer.assignment() == {TopicPartition("a", 0)}
        consumer.subscribe(name for name in ("a", "b"))
        assert consumer.assignment() == both
        consumer.assign([("a", 0)])  # type: ignore[list-item]
        consumer.seek(("a", 0), 1)  # type: ignore[arg-type]
        assert consumer.position(("a", 0)) == 1  # type: ignore[arg-type]
        ends = consumer.end_offsets([("b", 0)])  # type: ignore[list-item]
        assert ends == {TopicPartition("b", 0): 1}
    plain: Any = {("a", 0): 1}
    assert cluster.admin.delete_records(plain) == {TopicPartition("a", 0): 1}
    assert cluster.admin.set_group_offsets("g", to=plain) == {TopicPartition("a", 0): 1}
    one = TopicPartition("a", 0)
    assert cluster.admin.set_group_offsets("g", one, to="latest") == {one: 1}

    async def read() -> None:
        async with cluster.async_consumer(["a", "b"]) as consumer:
            assert await consumer.assignment() == both
            await consumer.subscribe("b")
            assert await consumer.assignment() == {TopicPartition("b", 0)}
            with pytest.raises(TypeError, match="such as"):
                await consumer.end_offsets(T0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="such as"):
            cluster.async_consumer(5)  # type: ignore[arg-type]

    asyncio.run(read())


def test_what_stays_in_its_process_says_what_to_send(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    producer = cluster.producer()

    async def use_async() -> None:
        async with cluster.async_producer() as sending, cluster.async_consumer("t") as reading:
            check([sending, reading])

    def check(kept: list[object]) -> None:
        for library in (pickle, cloudpickle):
            for made in kept:
                with pytest.raises(TypeError, match=r"send the Cluster, and make a \w+ from it"):
                    library.dumps(made)

    with cluster.consumer("t") as consumer:
        check([producer, producer.send, consumer])
    asyncio.run(use_async())
    for library in (pickle, cloudpickle):
        for future in (producer.send("t", b"v"), producer.send_many("t", [b"v"])):
            with pytest.raises(TypeError, match=r"send its result\(\) instead"):
                library.dumps(future)
        with pickle.loads(library.dumps(cluster)) as sent:
            assert sent.admin.list_topics() == ["t"]
    producer.close()

"""Serializers of producers and deserializers of consumers: what they are given, and their errors."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rayq
from rayq.client.cluster import Cluster
from rayq.client.consuming import poll_errors
from rayq.client.consuming.consumer import Consumer
from rayq.client.consuming.deserializing import Deserializers
from rayq.client.consuming.subscription import Slice
from rayq.client.serialization import json_deserializer, json_serializer, typed_json_deserializer
from rayq.errors import ConfigError, DeserializationError, SerializationError, UnknownTopicError
from rayq.records import Record, TopicPartition
from tests.client.fake_broker import FakeCluster

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Order(msgspec.Struct):
    item: str
    cups: int = 1


def number(data: bytes) -> int:
    return int(data)


def numbers_of(consumer: Consumer[Any, Any], count: int) -> list[Any]:
    """The values of that many records."""
    found: list[Any] = []
    deadline_s = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline_s:
        found += [record.value for record in consumer.poll(timeout_s=0.2)]
    return found


def error_of(consumer: Consumer[Any, Any]) -> DeserializationError:
    with pytest.raises(DeserializationError) as caught:
        for _ in range(400):
            consumer.poll(timeout_s=0.1)
    return caught.value


# --- there and back -------------------------------------------------------------------------------


def test_values_and_keys_go_through_the_users_functions(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(value_serializer=json_serializer, key_serializer=str.encode) as producer:
        producer.send("t", {"cups": 2}, key="tea", headers=[("a", b"1")], timestamp_ms=7).result(30)
        producer.send_and_wait("t", [1, "é"], key="täa")
        producer.send("t", None, key="tea")
        producer.send("t", False)
        producer.send_many("t", [1, None, 0], keys=["a", "b", None]).result(30)
    wanted = [
        ("tea", {"cups": 2}),
        ("täa", [1, "é"]),
        ("tea", None),
        (None, False),
        ("a", 1),
        ("b", None),
        (None, 0),
    ]
    assert fake.values("t")[:4] == [b'{"cups":2}', '[1,"é"]'.encode(), None, b"false"]
    options: dict[str, Any] = {
        "auto_offset_reset": "earliest",
        "value_deserializer": json_deserializer,
        "key_deserializer": bytes.decode,
    }
    with cluster.consumer("t", **options) as consumer:
        records = consumer.poll(30, 2) + consumer.poll(30)
    assert [(record.key, record.value) for record in records] == wanted
    assert (records[0].headers, records[0].timestamp_ms) == ([("a", b"1")], 7)
    with cluster.consumer("t", **options) as consumer:
        assert [(one.key, one.value) for _, one in zip(range(7), consumer, strict=False)] == wanted

    async def scenario() -> None:
        async with cluster.async_producer(
            value_serializer=json_serializer, key_serializer=str.encode
        ) as producer:
            await producer.send("t", {"n": 1}, key="k")
            await producer.send_and_wait("t", {"n": 2})
            await (await producer.send_many("t", [{"n": 3}, None]))
        async with cluster.async_consumer("t", **options) as consumer:
            found: list[Record[Any, Any]] = []
            while len(found) < 11:
                found += await consumer.poll(30)
            assert [record.value for record in found[7:]] == [{"n": 1}, {"n": 2}, {"n": 3}, None]
            await consumer.seek(T0, 9)
            async for record in consumer:
                assert record.value == {"n": 3}
                break

    asyncio.run(scenario())


def test_one_of_the_two_leaves_the_other_as_it_is(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(key_serializer=str.encode) as producer:
        producer.send("t", b"raw", key="k")
        with pytest.raises(TypeError, match="value_serializer"):
            producer.send("t", "text", key="k")  # type: ignore[arg-type]
    with cluster.producer(value_serializer=str.encode) as producer:
        producer.send("t", "text", key=b"k")
        with pytest.raises(TypeError, match="key_serializer"):
            producer.send("t", "text", key="k")  # type: ignore[arg-type]
    for options, wanted in (
        ({"key_deserializer": bytes.decode}, [("k", b"raw"), ("k", b"text")]),
        ({"value_deserializer": bytes.decode}, [(b"k", "raw"), (b"k", "text")]),
    ):
        with cluster.consumer("t", auto_offset_reset="earliest", **options) as consumer:
            found = consumer.poll(30)
            assert [(record.key, record.value) for record in found] == wanted


def test_a_partitioner_and_a_compacted_topic_see_the_keys_bytes(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2, cleanup_policy="compact")
    given: list[bytes | None] = []

    def partitioner(key: bytes | None, count: int) -> int:
        given.append(key)
        return len(key or b"") % count

    with cluster.producer(key_serializer=str.encode, partitioner=partitioner) as producer:
        assert producer.send("t", b"v", key="odd").result(30).partition == 1
        assert producer.send("t", b"v", key="even").result(30).partition == 0
    assert given == [b"odd", b"even"]


def test_typed_records_are_checked_as_they_are_read(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(value_serializer=json_serializer) as producer:
        producer.send("t", Order("tea", 2))
        producer.send("t", {"item": "milk"})
        producer.send("t", {"item": 5})
    with cluster.consumer(
        "t", auto_offset_reset="earliest", value_deserializer=typed_json_deserializer(Order)
    ) as consumer:
        assert numbers_of(consumer, 2) == [Order("tea", 2), Order("milk", 1)]
        error = error_of(consumer)
        assert "Decoder.decode" in str(error) and "Expected `str`, got `int`" in str(error)
        assert isinstance(error.__cause__, msgspec.ValidationError)


# --- serializers that fail ------------------------------------------------------------------------


def no_bytes(value: object) -> Any:
    return {"str": "text", "none": None, "bytearray": bytearray(b"x")}[str(value)]


def test_a_serializer_that_raises_fails_that_record_only(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(value_serializer=json_serializer, key_serializer=str.encode) as producer:
        for _ in range(2):  # before the topic is known, and after
            with pytest.raises(SerializationError) as caught:
                producer.send("t", object())
            assert isinstance(caught.value.__cause__, TypeError)
            assert (caught.value.topic, caught.value.index) == ("t", None)
            for said in ("value_serializer", "rayq.client.serialization.json_serializer", "'t'", "object"):
                assert said in str(caught.value)
            producer.send("t", "good").result(30)
        with pytest.raises(SerializationError, match=r"key_serializer str.encode .* the key"):
            producer.send("t", "v", key=5)  # type: ignore[arg-type]
        with pytest.raises(SerializationError):
            producer.send_and_wait("t", {1, object()})
        with pytest.raises(UnknownTopicError):
            producer.send("nowhere", "v")
    assert fake.values("t") == [b'"good"'] * 2


@pytest.mark.parametrize("what", ["str", "none", "bytearray"])
def test_a_serializer_that_returns_no_bytes_is_refused(
    fake: FakeCluster, cluster: Cluster, what: str
) -> None:
    fake.create_topic("t")
    with cluster.producer(value_serializer=no_bytes) as producer:
        with pytest.raises(SerializationError, match="returned .*, not bytes"):
            producer.send("t", what)

    async def scenario() -> None:
        async with cluster.async_producer(key_serializer=no_bytes) as producer:
            with pytest.raises(SerializationError, match="returned .*, not bytes"):
                await producer.send("t", b"v", key=what)
            with pytest.raises(SerializationError, match=r"keys\[1\]"):
                await producer.send_many("t", [b"v", b"w"], keys=[None, what])

    asyncio.run(scenario())
    assert fake.values("t") == []


class Bytes(bytes):
    pass


def test_a_subclass_of_bytes_is_bytes(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(value_serializer=lambda text: Bytes(text.encode())) as producer:
        producer.send("t", "a").result(30)
        producer.send_many("t", ["b"]).result(30)
    assert fake.values("t") == [b"a", b"b"]


def test_send_many_says_which_record_and_accepts_none(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(value_serializer=json_serializer, key_serializer=str.encode) as producer:
        for _ in range(2):
            with pytest.raises(SerializationError, match=r"values\[2\] of a record") as caught:
                producer.send_many("t", [1, 2, object(), 4])
            assert (caught.value.topic, caught.value.index) == ("t", 2)
        keys: Any = ["a", 5]
        with pytest.raises(SerializationError, match=r"keys\[1\]"):
            producer.send_many("t", [1, 2], keys=keys)
        assert producer.send_many("t", iter([1, 2])).result(30)  # type: ignore[arg-type]
    assert fake.values("t") == [b"1", b"2"]


def test_what_is_not_bytes_is_told_of_the_serializers(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    bad: Any = {"cups": 2}
    with cluster.producer() as producer:
        for send in (
            lambda: producer.send("t", bad),
            lambda: producer.send_many("t", [b"v", bad]),
            lambda: producer.send_and_wait("t", bad),
        ):
            with pytest.raises(TypeError, match=r"value.*dict.*value_serializer="):
                send()
        with pytest.raises(TypeError, match=r"key.*dict.*key_serializer="):
            producer.send("t", b"v", key=bad)


@pytest.mark.parametrize("wrong", ["json", 5, b"x", {}])
def test_what_is_no_function_is_refused_when_the_client_is_made(
    fake: FakeCluster, cluster: Cluster, wrong: Any
) -> None:
    fake.create_topic("t")
    for name in ("key", "value"):
        with pytest.raises(ConfigError, match=f"{name}_serializer"):
            cluster.producer(**{f"{name}_serializer": wrong})
        with pytest.raises(ConfigError, match=f"{name}_deserializer"):
            cluster.consumer("t", **{f"{name}_deserializer": wrong})


def test_coroutine_functions_and_names_of_the_other_side_are_refused(cluster: Cluster) -> None:
    async def serializer(value: object) -> bytes:
        return b""

    with pytest.raises(ConfigError, match="plain function"):
        cluster.producer(value_serializer=serializer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="plain function"):
        cluster.consumer(key_deserializer=serializer)
    with pytest.raises(ConfigError, match="a config of a consumer"):
        cluster.producer(value_deserializer=number)
    with pytest.raises(ConfigError, match="value_serializer="):
        cluster.producer(serializer=json_serializer)


# --- deserializers that fail ----------------------------------------------------------------------


@pytest.fixture
def bad(fake: FakeCluster) -> FakeCluster:
    """Numbers but for offset 3 of partition 0 (of 0 to 6); partition 1 has 10 and 11."""
    fake.create_topic("t", partitions=2)
    fake.write("t", [b"0", b"1"])
    fake.write("t", [b"2", b"bad", b"4"], headers=[[], [("h", b"1")], []])
    fake.write("t", [None, b"6"])
    fake.write("t", [b"10", b"11"], partition=1)
    return fake


@pytest.fixture
def numbers(bad: FakeCluster, cluster: Cluster) -> Iterator[Consumer[int | None]]:
    with cluster.consumer(
        "t", auto_offset_reset="earliest", on_corrupt="skip", value_deserializer=number
    ) as consumer:
        yield consumer


def test_the_error_says_where_has_the_bytes_and_a_seek_goes_past_it(
    numbers: Consumer[int | None],
) -> None:
    assert sorted(numbers_of(numbers, 5)) == [0, 1, 2, 10, 11]
    error = error_of(numbers)
    assert (error.topic_partition, error.offset, error.next_offset) == (T0, 3, 4)
    assert isinstance(error.__cause__, ValueError)
    assert error.record is not None
    assert (error.record.value, error.record.key) == (b"bad", None)
    assert error.record.headers == [("h", b"1")]
    for said in ("value_deserializer", "number", "offset 3 of t-0", "ValueError", "seek to 4"):
        assert said in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.next_offset, copy.record) == (4, error.record)
    assert numbers.position(T0) == 3
    assert error_of(numbers) is not error
    numbers.seek(T0, error.next_offset or 0)
    assert numbers_of(numbers, 3) == [4, None, 6]
    assert numbers.position(T0) == 7


def test_a_key_that_cannot_be_read_is_told_of_its_function(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"1", b"2"], keys=[b"1", b"k"])
    fake.write("t", [b"bad", b"4"], keys=[b"k", None])
    with cluster.consumer(
        "t",
        auto_offset_reset="earliest",
        value_deserializer=number,
        key_deserializer=number,
    ) as consumer:
        assert [(record.key, record.value) for record in consumer.poll(30)] == [(1, 1)]
        for offset in (1, 2):
            error = error_of(consumer)
            assert error.offset == offset and "key_deserializer" in str(error)
            consumer.seek(T0, offset + 1)
        assert [(record.key, record.value) for record in consumer.poll(30)] == [(None, 4)]


def test_who_polls_on_after_errors_does_not_spin_and_reads_the_other_partitions(
    numbers: Consumer[int | None], fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_errors, "ERROR_PAUSE_S", 0.1)
    errors, found = 0, 0
    assert len(numbers_of(numbers, 5)) == 5
    error_of(numbers)
    began_s = time.monotonic()
    while errors < 4:
        fake.write("t", [b"12"], partition=1)
        try:
            found += len(numbers.poll(timeout_s=30))
        except DeserializationError:
            errors += 1
    assert time.monotonic() - began_s >= 4 * 0.1 - 0.05
    assert found >= 4


def test_a_message_that_is_another_each_time_is_one_error_all_the_same(
    bad: FakeCluster, cluster: Cluster
) -> None:
    def fail(data: bytes) -> int:
        raise ValueError(f"at {time.monotonic_ns()}")

    calls = 0
    with cluster.consumer("t", auto_offset_reset="earliest", value_deserializer=fail) as consumer:
        for _ in (T0, T1):
            with pytest.raises(DeserializationError):
                consumer.poll(30)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.3:
            with pytest.raises(DeserializationError):
                consumer.poll(timeout_s=0.1)
            calls += 1
    assert calls <= 5


def test_iterating_stops_at_it_too_and_goes_on_after_a_seek(numbers: Consumer[int | None]) -> None:
    found: list[int | None] = []
    while True:
        try:
            found.append(next(numbers).value)
        except DeserializationError as error:
            assert error.topic_partition == T0 and error.next_offset is not None
            numbers.seek(error.topic_partition, error.next_offset)
            break
    assert sorted(one for one in found if one is not None) == [0, 1, 2, 10, 11]
    assert [next(numbers).value for _ in range(3)] == [4, None, 6]


def test_the_async_consumer_does_the_same(bad: FakeCluster, cluster: Cluster) -> None:
    async def scenario() -> list[int | None]:
        found: list[int | None] = []
        async with cluster.async_consumer(
            auto_offset_reset="earliest", value_deserializer=number
        ) as consumer:
            await consumer.assign([T0])
            with pytest.raises(DeserializationError) as caught:
                while True:
                    found += [one.value for one in await consumer.poll(30)]
            assert await consumer.position(T0) == 3
            await consumer.seek(T0, caught.value.next_offset or 0)
            async for record in consumer:
                found.append(record.value)
                if len(found) == 6:
                    break
        return found

    assert asyncio.run(scenario()) == [0, 1, 2, 4, None, 6]


def test_what_iteration_took_ahead_comes_again_as_it_was(
    bad: FakeCluster, cluster: Cluster
) -> None:
    calls: list[bytes] = []

    def counted(data: bytes) -> int:
        calls.append(data)
        return int(data)

    with cluster.consumer(auto_offset_reset="earliest", value_deserializer=counted) as consumer:
        consumer.assign([T0])
        assert next(consumer).value == 0
        assert consumer.position(T0) == 1
        assert next(consumer).value == 1
        consumer.pause(T0)
        consumer.resume(T0)
        assert next(consumer).value == 2
        assert set(calls) == {b"0", b"1", b"2", b"bad"}, "only bytes"
        consumer.seek(T0, 4)
        assert next(consumer).value == 4
        table = consumer.poll_arrow(30)
        assert table["value"].to_pylist() == [None, b"6"], "tables have the bytes"
        consumer.seek(T0, 3)
        assert consumer.poll_arrow(30)["value"].to_pylist() == [b"bad", b"4", None, b"6"]


def test_a_deserializer_that_heals_goes_on_without_a_seek(
    bad: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    knows = False

    def schema(data: bytes) -> str:
        if not knows:
            raise ConnectionError("no schema registry")
        return data.decode()

    with cluster.consumer(auto_offset_reset="earliest", value_deserializer=schema) as consumer:
        consumer.assign([T1])
        with pytest.raises(DeserializationError, match="no schema registry"):
            consumer.poll(30)
        knows = True
        assert numbers_of(consumer, 2) == ["10", "11"]


@pytest.mark.parametrize("kind", [asyncio.CancelledError, StopIteration, MemoryError])
def test_whatever_else_a_deserializer_raises_is_an_error_of_its_record(
    bad: FakeCluster, kind: type[BaseException]
) -> None:
    """A CancelledError that went through would cancel the task of whoever polls."""

    def odd(data: bytes) -> int:
        if data == b"2":
            raise kind
        return int(data)

    async def main() -> None:
        with bad.cluster() as cluster:
            options: dict[str, Any] = {
                "auto_offset_reset": "earliest", "value_deserializer": odd
            }  # fmt: skip
            async with cluster.async_consumer(**options) as consumer:
                await consumer.assign([T0])
                found: list[int] = []
                with pytest.raises(DeserializationError) as caught:
                    while True:
                        found += [one.value for one in await consumer.poll(30)]
                assert found == [0, 1] and isinstance(caught.value.__cause__, kind)
                assert (caught.value.offset, caught.value.next_offset) == (2, 3)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_deserializer_loses_nothing(
    bad: FakeCluster, cluster: Cluster, kind: type[BaseException]
) -> None:
    left = [kind()]

    def interrupted(data: bytes) -> int:
        if left and data == b"1":
            raise left.pop()
        return int(data)

    with cluster.consumer(auto_offset_reset="earliest", value_deserializer=interrupted) as consumer:
        consumer.assign([T0])
        with pytest.raises(kind):
            consumer.poll(30)
        assert numbers_of(consumer, 3) == [0, 1, 2]


def test_a_stop_iteration_is_an_error_and_no_end(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", [b"1", b"2"])

    def stop(data: bytes) -> int:
        if data == b"2":
            raise StopIteration
        return int(data)

    with cluster.consumer("t", auto_offset_reset="earliest", value_deserializer=stop) as consumer:
        assert numbers_of(consumer, 1) == [1]
        assert error_of(consumer).offset == 1


def test_a_group_commits_no_further_than_the_record_that_cannot_be_read(
    bad: FakeCluster, cluster: Cluster
) -> None:
    options: dict[str, Any] = {
        "group": "g",
        "auto_offset_reset": "earliest",
        "value_deserializer": number,
    }
    with cluster.consumer("t", **options) as consumer:
        assert sorted(numbers_of(consumer, 5)) == [0, 1, 2, 10, 11]
        error_of(consumer)
        consumer.commit()
        assert consumer.committed([T0, T1]) == {T0: 3, T1: 2}
    with cluster.consumer("t", **options) as consumer:
        assert error_of(consumer).offset == 3


# --- types ----------------------------------------------------------------------------------------


def test_a_record_of_any_type_pickles_and_says_what_it_is() -> None:
    record: Record[Order] = Record("t", 0, 5, 7, b"k", Order("tea"), [("a", b"1")])
    assert pickle.loads(pickle.dumps(record)) == record
    assert repr(record) == (
        "Record(topic='t', partition=0, offset=5, timestamp_ms=7, key=b'k', "
        "value=Order(item='tea', cups=1), headers=[('a', b'1')])"
    )


def test_types_may_be_left_out_also_where_python_looks_at_them() -> None:
    for kind in (
        rayq.Record,
        rayq.Producer,
        rayq.AsyncProducer,
        rayq.Consumer,
        rayq.AsyncConsumer,
    ):
        generic: Any = kind
        assert generic[Order].__origin__ is kind
        assert generic[Order].__args__[0] is generic[Order, str].__args__[0] is Order


# --- whatever there is ----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=50)
@given(JSON)
def test_whatever_json_there_is_comes_back(value: Any) -> None:
    data = json_serializer(value)
    assert json_deserializer(data) == json.loads(data) == value


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from([b"1", b"2", b"bad", None]), st.sampled_from([b"3", b"bad", None])),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
    st.booleans(),
)
def test_whatever_cannot_be_read_is_told_once_and_the_rest_is_read(
    pairs: list[tuple[bytes | None, bytes | None]], with_keys: bool, with_values: bool
) -> None:
    """A reader that seeks past each error gets each record, or an error about it."""
    deserializers = Deserializers(number if with_keys else None, number if with_values else None)
    read: list[tuple[int, Any, Any]] = []
    told: list[int] = []
    at = 0
    while at < len(pairs):
        rest = pairs[at:]
        part = Slice(
            "t",
            0,
            range(at, len(pairs)),
            [5] * len(rest),
            [key for key, _ in rest],
            [value for _, value in rest],
            None,
        )
        found, error = deserializers.apply(part)
        assert found.keys is not None
        assert len(found.keys) == len(found.values) == len(found.offsets)
        read += zip(found.offsets, found.keys, found.values, strict=True)
        at += len(found.values)
        if error is None:
            assert at == len(pairs)
        else:
            assert error.offset == at and error.record is not None
            assert (error.record.key, error.record.value) == pairs[at]
            told.append(at)
            at += 1

    def is_bad(key: bytes | None, value: bytes | None) -> bool:
        return (with_keys and key == b"bad") or (with_values and value == b"bad")

    def seen(data: bytes | None, deserialized: bool) -> object:
        return int(data) if deserialized and data is not None else data

    assert told == [n for n, pair in enumerate(pairs) if is_bad(*pair)]
    assert read == [
        (n, seen(key, with_keys), seen(value, with_values))
        for n, (key, value) in enumerate(pairs)
        if not is_bad(key, value)
    ]

"""Timeouts: negative ones and NaN are refused everywhere; infinite and huge ones wait."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

from rayq.batch import offset_ranges, range_reader, task_writer
from rayq.client.admin.admin import Admin, AsyncAdmin
from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import ConsumerPool
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.consumer import Consumer
from rayq.client.producing.producer import AsyncProducer, Producer
from rayq.client.queues.queue import AsyncQueue, Queue
from rayq.client.timeouts import TIMEOUT_S_MAX, seconds, takes_timeout
from rayq.errors import InvalidRequestError
from rayq.records import TopicPartition
from tests.client.fake_broker import FakeCluster

LONG = (math.inf, 1e300, 10**400, 2**63, TIMEOUT_S_MAX)


def test_a_timeout_is_a_number_of_seconds_from_0() -> None:
    for given in (0, 0.5, 3):
        assert seconds(given) == given and type(seconds(given)) is float
    for given in LONG:
        assert seconds(given) == TIMEOUT_S_MAX
    for given in (-1, -0.001, -math.inf, math.nan, -(10**400)):
        with pytest.raises(InvalidRequestError, match="number of seconds"):
            seconds(given)
    for given in ("1", None, 1j, b"", True, False):
        with pytest.raises(TypeError, match="number of seconds"):
            seconds(given)


def test_a_timeout_given_by_place_or_by_name_is_checked() -> None:
    @takes_timeout
    def wait(what: str, timeout_s: float | None = None, *, more: int = 0) -> object:
        return what, timeout_s, more

    assert wait("a") == ("a", None, 0)
    assert wait("a", None, more=1) == ("a", None, 1)
    assert wait("a", math.inf) == wait("a", timeout_s=math.inf) == ("a", TIMEOUT_S_MAX, 0)
    for bad in (lambda: wait("a", -1), lambda: wait("a", timeout_s=math.nan)):
        with pytest.raises(InvalidRequestError):
            bad()


def test_every_public_timeout_is_checked() -> None:
    faces = (
        AsyncAdmin,
        AsyncConsumer,
        Consumer,
        AsyncProducer,
        Producer,
        AsyncQueue,
        Queue,
        ConsumerPool,
        Cluster,
    )
    functions = [
        method
        for face in faces
        for name, method in inspect.getmembers(face, inspect.isroutine)
        if not name.startswith("_")
    ]
    for module in (range_reader, task_writer, offset_ranges):
        functions += [one for one in vars(module).values() if inspect.isfunction(one)]
    unchecked = {
        one.__qualname__
        for one in functions
        if "timeout_s" in inspect.signature(one).parameters
        and not one.__name__.startswith("_")
        and one is not seconds
        and one.__module__.startswith(("rayq.batch", "rayq.client"))
        and not hasattr(one, "__wrapped__")
    }
    # `snapshot` checks it itself, since it refuses 0 too; the others are internal.
    assert unchecked == {
        "snapshot",
        "take_cut",
        "job_for",
        "uses_remote_storage",
        "AsyncProducer.load_topic",
        "Producer.closing",
    }
    for name, method in vars(Admin).items():
        if not name.startswith("_") and "timeout_s" in inspect.signature(method).parameters:
            assert hasattr(getattr(AsyncAdmin, name), "__wrapped__"), name


@pytest.mark.parametrize("timeout_s", LONG)
def test_a_call_that_may_take_forever_returns_when_it_is_done(
    fake: FakeCluster, cluster: Cluster, timeout_s: float
) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        sent = producer.send("t", b"v")
        producer.flush(timeout_s)
        assert sent.result(timeout_s).offset == 0
        assert sent.exception(timeout_s) is None
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert [record.value for record in consumer.poll(timeout_s)] == [b"v"]
        consumer.close(timeout_s)
    admin = cluster.admin
    admin.create_topic("u", timeout_s=timeout_s)
    assert admin.describe_topic("u", timeout_s=timeout_s).name == "u"
    place = TopicPartition("t", 0)
    assert admin.delete_records({place: 1}, timeout_s=timeout_s) == {place: 1}
    admin.delete_topic("u", timeout_s=timeout_s)

    async def read() -> list[bytes | None]:
        fake.write("t", [b"w"])
        async with cluster.async_consumer("t") as consumer:
            await consumer.seek_to_beginning()
            return [one.value for one in await consumer.poll(timeout_s)]

    assert asyncio.run(read()) == [b"w"]


@pytest.mark.parametrize("timeout_s", [-1, math.nan])
def test_a_timeout_that_is_none_is_refused_at_once(
    fake: FakeCluster, cluster: Cluster, timeout_s: float
) -> None:
    fake.create_topic("t")
    producer, consumer = cluster.producer(), cluster.consumer("t")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: consumer.poll(timeout_s),
        lambda: consumer.close(timeout_s),
        lambda: producer.flush(timeout_s),
        lambda: producer.close(timeout_s),
        lambda: producer.send("t", b"v").result(timeout_s),
        lambda: cluster.admin.list_topics(timeout_s=timeout_s),
        lambda: cluster.admin.create_topic("u", timeout_s=timeout_s),
        lambda: cluster.metrics(timeout_s=timeout_s),
    )
    for call in calls:
        with pytest.raises(InvalidRequestError, match="number of seconds"):
            call()
    producer.close()
    consumer.close()

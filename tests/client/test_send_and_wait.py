"""`send_and_wait`: one record and its delivery in one call, without a linger."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from rayq.client.cluster import Cluster
from rayq.config import KIB
from rayq.errors import (
    BufferFullError,
    ClosedError,
    DeliveryError,
    DeliveryTimeoutError,
    InvalidRequestError,
    OutcomeUnknownError,
    RayqError,
    RecordTooLargeError,
    TimeoutError,
    UnknownTopicError,
)
from rayq.messages import Metadata, Produce
from rayq.records import RecordMetadata
from rayq.storage.batch import decode_columns
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]


def test_it_answers_where_the_record_went(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)
    with cluster.producer() as producer:
        sent = producer.send_and_wait(
            "t", b"v", key=b"k", headers=[("a", b"1")], partition=1, timestamp_ms=77
        )
        assert sent == RecordMetadata("t", 1, 0, 77)
        assert producer.send_and_wait("t", None, key=b"k", partition=1).offset == 1
    header, data = fake.topics["t"].partitions[1].batches[0]
    columns = decode_columns(data, 0, header)
    assert (columns.values, columns.keys) == ([b"v"], [b"k"])
    assert columns.headers == [[("a", b"1")]]


def test_it_does_not_linger_behind_a_batch_that_is_under_way(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    producer = cluster.producer(linger_ms=60_000)
    producer.send("t", b"warm").result(timeout=30)
    fake.fault(Produce, is_lost=True, carry_out=True)
    slow = producer.send("t", b"slow")
    eventually(lambda: len(fake.asked(Produce)) == 2)
    lingers = producer.send("t", b"lingers")
    assert producer.send_and_wait("t", b"at once", timeout_s=30).offset == 3
    assert lingers.done() and not slow.done()
    with pytest.raises(TimeoutError):
        producer.close(timeout_s=0.01)
    assert [header.record_count for header in fake.headers("t")] == [1, 1, 2]


def test_those_who_wait_at_the_same_time_share_batches(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.fault(Produce, times=1000, delay_s=0.2, carry_out=True)
    with cluster.producer(linger_ms=60_000, max_in_flight_requests_per_connection=1) as producer:
        with ThreadPoolExecutor(50) as threads:
            sent = list(threads.map(lambda n: producer.send_and_wait("t", b"%d" % n), range(50)))
    assert sorted(one.offset or 0 for one in sent) == list(range(50))
    assert len(fake.headers("t")) <= 25

    async def scenario() -> None:
        async with cluster.async_producer(linger_ms=60_000) as producer:
            sent = await asyncio.gather(*(producer.send_and_wait("t", b"v") for _ in range(50)))
            assert [one.offset for one in sent] == list(range(50, 100))

    before = len(fake.headers("t"))
    asyncio.run(scenario())
    assert len(fake.headers("t")) == before + 1


def test_it_raises_what_send_raises(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        with pytest.raises(UnknownTopicError):
            producer.send_and_wait("nowhere", b"v")
        for _ in range(2):  # before the topic is known, and after
            with pytest.raises(TypeError, match="value has to be bytes"):
                producer.send_and_wait("t", 5)  # type: ignore[arg-type]
            producer.send_and_wait("t", b"v")
        with pytest.raises(InvalidRequestError, match="partitions 0 to 0"):
            producer.send_and_wait("t", b"v", partition=1)
    with pytest.raises(ClosedError):
        producer.send_and_wait("t", b"v")


def test_it_raises_what_the_delivery_fails_with(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    producer = cluster.producer(delivery_timeout_ms=2000, request_timeout_ms=1000)
    fake.fault(Produce, error=RecordTooLargeError("too large"))
    with pytest.raises(RecordTooLargeError, match="too large"):
        producer.send_and_wait("t", b"v")
    fake.fault(Produce, times=1000, is_lost=True)
    with pytest.raises((DeliveryTimeoutError, OutcomeUnknownError)):
        producer.send_and_wait("t", b"v")
    with pytest.raises(DeliveryError, match="2 records"):
        producer.close()

    async def scenario() -> None:
        producer = cluster.async_producer()
        fake.clear_faults()
        fake.fault(Produce, error=RecordTooLargeError("too large"))
        with pytest.raises(RecordTooLargeError, match="too large"):
            await producer.send_and_wait("t", b"v")
        producer.abandon()

    asyncio.run(scenario())


def test_after_its_timeout_the_record_is_still_on_its_way(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")

    async def scenario() -> None:
        async with cluster.async_producer() as producer:
            await producer.send_and_wait("t", b"warm")
            slow = fake.fault(Produce, is_held=True, carry_out=True)
            with pytest.raises(TimeoutError, match=r"within 0.5 s.*may be written"):
                await producer.send_and_wait("t", b"b", timeout_s=0.5)
            fake.release(slow)

    with cluster.producer() as producer:
        producer.send_and_wait("t", b"warm")
        slow = fake.fault(Produce, is_held=True, carry_out=True)
        with pytest.raises(TimeoutError, match=r"within 0.5 s.*may be written"):
            producer.send_and_wait("t", b"a", timeout_s=0.5)
        fake.release(slow)
        producer.flush(30)
    asyncio.run(scenario())
    assert fake.values("t") == [b"warm", b"a", b"warm", b"b"]


def test_its_timeout_counts_from_the_call_also_before_the_record_is_accepted(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    options = {"buffer_memory": 4 * KIB, "batch_size": 4 * KIB}
    with cluster.producer(**options) as producer:
        fake.fault(Metadata, times=1000, is_lost=True)
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            producer.send_and_wait("t", b"v", timeout_s=0.2)
        assert time.monotonic() - began_s < 25
        fake.clear_faults()
        producer.send_and_wait("t", b"v")
        slow = fake.fault(Produce, is_held=True, carry_out=True)
        producer.send("t", bytes(3 * KIB))
        with pytest.raises(BufferFullError, match=r"stayed full for timeout_s \(0.05 s\)"):
            producer.send_and_wait("t", bytes(3 * KIB), timeout_s=0.05)
        fake.release(slow)

    async def scenario() -> None:
        async with cluster.async_producer(**options) as producer:
            await producer.send_and_wait("t", b"v")
            slow = fake.fault(Produce, is_held=True, carry_out=True)
            await producer.send("t", bytes(3 * KIB))
            with pytest.raises(BufferFullError, match=r"stayed full for timeout_s \(0.05 s\)"):
                await producer.send_and_wait("t", bytes(3 * KIB), timeout_s=0.05)
            fake.release(slow)

    asyncio.run(scenario())


def test_a_delivery_callback_cannot_wait_and_nothing_is_sent(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    told: list[RayqError] = []
    over = threading.Event()

    def on_delivery(_metadata: object, _error: object) -> None:
        try:
            producer.send_and_wait("t", b"from the callback")
        except RayqError as error:
            told.append(error)
        over.set()

    with cluster.producer() as producer:
        producer.send("t", b"v", on_delivery=on_delivery)
        assert over.wait(30)
        producer.flush(30)
    assert isinstance(told[0], InvalidRequestError) and "callback" in str(told[0])
    assert fake.values("t") == [b"v"]


def test_under_acks_0_it_waits_until_the_network_has_it(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(acks=0, linger_ms=60_000) as producer:
        assert producer.send_and_wait("t", b"v").offset is None

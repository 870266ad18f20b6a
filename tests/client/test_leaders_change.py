"""What a producer does when leaders die, hang, move and come back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rayq.client import broker_client, client
from rayq.client.producing import sender
from rayq.client.producing.sender import Sender
from rayq.errors import (
    AuthorizationError,
    DeliveryError,
    DisconnectedError,
    NotLeaderError,
    TimeoutError,
    UnknownTopicError,
)
from rayq.messages import AllocateProducerId, Metadata, Produce
from rayq.wire.connection import Connection
from rayq.wire.pool import ConnectionPool
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]


def later(delay_s: float, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(delay_s, action)
    timer.start()
    return timer


def test_writing_goes_on_within_a_second_after_a_leader_dies(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    pauses_s: list[float] = []
    with fake3.cluster() as cluster, cluster.producer() as producer:
        producer.send("t", b"before").result(30)
        for turn in range(2):  # The machine may be busy with other work during one of them.
            fake3.stop_broker(1 + turn)
            timer = later(0.2, partial(fake3.move_leader, "t", 0, 2 + turn))
            start = time.monotonic()
            assert producer.send("t", b"after").result(30).offset == 1 + turn
            pauses_s.append(time.monotonic() - start)
            timer.join()
    assert min(pauses_s) < 1


def test_a_connection_to_a_dead_leader_is_not_waited_for_when_another_is_elected(
    fake3: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's host is gone, so nothing refuses the connection."""
    fake3.create_topic("t")
    fake3.create_topic("other")
    fake3.move_leader("other", 0, 2)
    get, connect = ConnectionPool.get, Sender._connect
    tried = threading.Event()

    async def get_unless_dead(self: ConnectionPool, host: str, port: int) -> Connection:
        if port == fake3.brokers[1].port:
            await asyncio.Event().wait()
        return await get(self, host, port)

    async def tell_and_connect(self: Sender, channel: Any, leader: Any) -> None:
        tried.set()
        await connect(self, channel, leader)

    monkeypatch.setattr(sender, "CONNECT_TIMEOUT_S", 60.0)
    with fake3.cluster() as cluster, cluster.producer() as producer:
        producer.send("other", b"which asks for a producer id").result(30)
        cluster.admin.describe_topic("t")
        monkeypatch.setattr(ConnectionPool, "get", get_unless_dead)
        monkeypatch.setattr(Sender, "_connect", tell_and_connect)
        fake3.stop_broker(1)
        future = producer.send("t", b"1")
        assert tried.wait(30)
        fake3.move_leader("t", 0, 2)
        assert future.result(30).offset == 0


def test_a_leader_that_hangs_is_given_up_when_another_is_elected(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    with fake3.cluster() as cluster, cluster.producer(request_timeout_ms=100_000) as producer:
        producer.send("t", b"before").result(30)
        fake3.fault(
            Produce,
            times=100,
            is_lost=True,
            carry_out=True,
            matches=lambda _one, broker: broker == 1,
        )
        future = producer.send("t", b"in doubt")
        timer = later(1.3, lambda: fake3.move_leader("t", 0, 3))
        assert future.result(60).offset == 1
        timer.join()
    assert fake3.values("t") == [b"before", b"in doubt"]


def test_a_broker_that_hangs_does_not_keep_back_what_another_hears(
    fake3: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broker 3 knows less than the client at first, and hears of the election a moment later."""
    monkeypatch.setattr(client, "ASK_TIMEOUT_S", 30.0)  # the client would wait for so long
    # It asks brokers at random: broker 3 may be the one that answers, several times in a row.
    monkeypatch.setattr(client, "UNKNOWN_TOPIC_PATIENCE_S", 5.0)
    fake3.create_topic("t")
    fake3.freeze_metadata(3)
    fake3.create_topic("newer")
    with fake3.cluster() as cluster, cluster.producer() as producer:
        producer.send("newer", b"which broker 3 has not heard of").result(30)
        producer.send("t", b"before").result(30)
        fake3.fault(Metadata, times=1000, is_lost=True, matches=lambda _one, broker: broker == 2)
        fake3.stop_broker(1)

        def elect() -> None:
            fake3.move_leader("t", 0, 2)
            fake3.thaw_metadata(3)

        timer = later(1.2, elect)
        start = time.monotonic()
        assert producer.send("t", b"after").result(60).offset == 1
        assert time.monotonic() - start < 15
        timer.join()


def test_order_and_single_appends_survive_many_elections(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    values = [str(number).encode() for number in range(20_000)]
    stop = threading.Event()

    def elect() -> None:
        turn = 0
        while not stop.wait(0.03):
            turn += 1
            fake3.move_leader("t", 0, 1 + turn % 3)

    elections = threading.Thread(target=elect)
    elections.start()
    try:
        with fake3.cluster() as cluster, cluster.producer(batch_size=2048) as producer:
            futures = []
            for value in values:
                futures.append(producer.send("t", value))
                if len(futures) % 500 == 0:
                    time.sleep(0.01)
            offsets = [future.result(30).offset for future in futures]
    finally:
        stop.set()
        elections.join()
    assert fake3.values("t") == values
    assert offsets == list(range(20_000))


def test_a_broker_that_tells_old_metadata_is_not_believed(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    with fake3.cluster() as cluster, cluster.producer() as producer:
        producer.send("t", b"a").result(30)
        fake3.freeze_metadata(1)
        fake3.freeze_metadata(2)
        fake3.move_leader("t", 0, 3)
        assert producer.send("t", b"b").result(30).offset == 1
        for _ in range(5):
            assert cluster.admin.describe_topic("t").partitions[0].leader == 3


def test_metadata_comes_from_any_live_broker(
    fake3: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_client, "ASK_TIMEOUT_S", 60.0)  # the client would wait for so long
    fake3.create_topic("t")
    fake3.stop_broker(1)
    fake3.fault(Metadata, times=1000, is_lost=True, matches=lambda _one, broker: broker == 2)
    fake3.move_leader("t", 0, 3)
    with fake3.cluster() as cluster, cluster.producer() as producer:
        assert producer.send("t", b"a").result(30).offset == 0


def test_a_cluster_that_is_away_is_named_in_the_error(fake3: FakeCluster) -> None:
    for broker in fake3.brokers:
        fake3.stop_broker(broker)
    with fake3.cluster() as cluster:
        with pytest.raises(TimeoutError, match=r"127\.0\.0\.1:.*Check that the cluster runs"):
            cluster.admin.list_topics(timeout_s=0.3)
        with cluster.producer(max_block_ms=300) as producer, pytest.raises(TimeoutError):
            producer.send("t", b"v")


def test_a_producer_waits_for_its_id_through_errors(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    fake3.fault(AllocateProducerId, times=4, error=DisconnectedError("gone"))
    with fake3.cluster() as cluster, cluster.producer() as producer:
        assert producer.send("t", b"v").result(30).offset == 0


def test_a_topic_that_a_producer_may_not_write_to_leaves_its_others_alone(
    fake3: FakeCluster,
) -> None:
    for topic in ("mine", "foreign"):
        fake3.create_topic(topic, partitions=2)
    fake3.fault(
        AllocateProducerId,
        times=1000,
        error=AuthorizationError("not there"),
        matches=lambda request, _: request.topic == "foreign",
    )
    with fake3.cluster() as cluster, cluster.producer(linger_ms=0) as producer:
        sent = [
            producer.send(topic, b"v", partition=number)
            for number in (0, 1)
            for topic in ("foreign", "mine")
        ]
        for refused, written in zip(sent[::2], sent[1::2], strict=True):
            with pytest.raises(AuthorizationError, match="not there"):
                refused.result(30)
            assert written.result(30).offset == 0
        with pytest.raises(DeliveryError):
            producer.flush()


def test_a_partition_without_a_leader_is_waited_for(
    fake3: FakeCluster, eventually: Eventually
) -> None:
    fake3.create_topic("t", partitions=2)
    with fake3.cluster() as cluster, cluster.producer() as producer:
        producer.send("t", b"a", partition=0).result(30)
        waits_s: list[float] = []
        for turn in range(3):  # The machine may be busy with other work during two of them.
            fake3.move_leader("t", 0, None)
            waiting = producer.send("t", b"b", partition=0)
            assert producer.send("t", b"c", partition=1).result(30).offset == turn
            assert not waiting.done()
            start = time.monotonic()
            fake3.move_leader("t", 0, 3)
            assert waiting.result(30).offset == 1 + turn
            waits_s.append(time.monotonic() - start)
        assert min(waits_s) < 0.5


def test_a_leader_that_does_not_know_the_topic_yet_is_asked_again(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    fake3.fault(Produce, times=3, error=UnknownTopicError("not here yet"))
    with fake3.cluster() as cluster, cluster.producer() as producer:
        assert producer.send("t", b"v").result(30).offset == 0


def test_offsets_are_asked_of_the_new_leader(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    fake3.write("t", [b"v"])
    with fake3.cluster() as cluster, cluster.consumer() as consumer:
        assert consumer.end_offsets([("t", 0)]) == {("t", 0): 1}  # type: ignore[list-item]
        fake3.move_leader("t", 0, 2)
        assert consumer.end_offsets([("t", 0)]) == {("t", 0): 1}  # type: ignore[list-item]
        fake3.stop_broker(2)
        timer = later(0.1, lambda: fake3.move_leader("t", 0, 3))
        assert consumer.end_offsets([("t", 0)]) == {("t", 0): 1}  # type: ignore[list-item]
        timer.join()


def test_a_leader_that_keeps_refusing_costs_waits_and_not_the_processor(
    fake3: FakeCluster,
) -> None:
    fake3.create_topic("t")
    fake3.fault(Produce, times=10_000, error=NotLeaderError("not I"))
    with fake3.cluster() as cluster, cluster.producer(delivery_timeout_ms=3000) as producer:
        future = producer.send("t", b"v")
        assert future.exception(30) is not None
        assert len(fake3.asked(Produce)) < 15
        assert len(fake3.asked(Metadata)) < 60
        fake3.clear_faults()
        assert producer.send("t", b"w").result(30).offset == 0
        with pytest.raises(Exception, match="not delivered"):
            producer.flush()

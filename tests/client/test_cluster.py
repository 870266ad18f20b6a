"""The cluster object: addresses, pickling, forks, interrupts, the shared connection."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest

import rayq
from rayq.client import client as client_module
from rayq.client.addresses import format_address, parse_address
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.client.producing.producer import Producer
from rayq.config import ClusterConfig
from rayq.errors import (
    AuthenticationError,
    ClosedError,
    ConfigError,
    DisconnectedError,
    InvalidRequestError,
    NoClusterError,
    UnknownTopicError,
    WrongClusterError,
)
from rayq.messages import Metadata, Produce, TopicMetadata
from rayq.wire.authentication import client_key
from rayq.wire.tokens import token_of_key
from tests.client.fake_broker import SECRET, FakeCluster

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture(autouse=True)
def no_current_cluster() -> Iterator[None]:
    Cluster._current = None
    yield
    Cluster._current = None


@pytest.mark.parametrize(
    "given, address",
    [
        ("node1:9000", ("node1", 9000)),
        (" node1 ", ("node1", 9392)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:9000", ("::1", 9000)),
        ("[::1]", ("::1", 9392)),
        (("node1", 7), ("node1", 7)),
    ],
)
def test_addresses_are_read(given: str, address: tuple[str, int]) -> None:
    assert parse_address(given) == address
    assert parse_address(format_address(address)) == address


@pytest.mark.parametrize(
    "given",
    [
        *("", ":9392", "node1:", "node1:0", "node1:70000", "node1:x", "node1:+1", "node1:1_0"),
        *("node1:\u0661", "node 1:9392", "a/b:9392", "user@node1:9392", "node1:9392,", ",node1"),
        *("http://node1:9392", "::1", "::1:9392", "node1:1:2", "[node1]:9392", "[::1]9392", "a;b:1"),
        *(["node1:1,node2:2"], [("node1", True)], [("node1", 1.5)], [("node1,node2", 1)]),
    ],
)
def test_what_is_no_address_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not an address|address is host:port alone"):
        Cluster(given, b"key")


def test_several_addresses_are_a_list_or_have_commas_between_them() -> None:
    for given in ("node1:1,node2:2", "node1:1, node2:2", ["node1:1", ("node2", 2)]):
        assert Cluster(given, b"key").addresses == ["node1:1", "node2:2"]
    assert rayq.connect("node1:1,node2", token=token_of_key(b"k" * 32)).addresses == ["node1:1", "node2:9392"]


def test_a_cluster_needs_an_address() -> None:
    with pytest.raises(ConfigError, match="at least one broker"):
        Cluster([], b"key")


def test_a_cluster_pickles_and_knows_all_brokers(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    one = Cluster([("127.0.0.1", fake3.brokers[1].port)], client_key(SECRET), name="mine")
    with one:
        assert one.cluster_id is None
        one.admin.list_topics()
        copied = pickle.loads(pickle.dumps(one))
        assert copied.name == "mine"
        assert copied.cluster_id == fake3.cluster_id
        assert len(copied.addresses) == 3
        fake3.stop_broker(1)
        fake3.move_leader("t", 0, 2)
        with copied, copied.producer() as producer:
            producer.send("t", b"v").result(30)
    assert "secret" not in repr(one)


def test_clusters_of_one_place_share_their_connections(fake: FakeCluster) -> None:
    fake.create_topic("t")
    with fake.cluster() as first, fake.cluster() as second:
        assert first.shared_client()[0] is second.shared_client()[0]
        first.admin.list_topics()
        second.admin.list_topics()
        assert fake.connections() == 1
        first.close()
        second.admin.list_topics()


def test_a_shared_client_learns_where_the_brokers_went(fake: FakeCluster) -> None:
    old = Cluster(["127.0.0.1:1"], client_key(SECRET), cluster_id=fake.cluster_id)
    new = Cluster(fake.cluster().addresses, client_key(SECRET), cluster_id=fake.cluster_id)
    with old, new:
        assert old.shared_client()[0] is new.shared_client()[0]
        assert old.admin.list_topics(timeout_s=30) == []


def test_connections_end_with_the_last_user(fake: FakeCluster, eventually: Eventually) -> None:
    fake.create_topic("t")
    with fake.cluster() as cluster:

        async def scenario() -> None:
            async with cluster.async_producer() as producer, cluster.async_consumer("t"):
                await (await producer.send("t", b"v"))
                assert fake.connections() == 1
            await asyncio.sleep(0.05)

        asyncio.run(scenario())
        gc.collect()
        eventually(lambda: fake.connections() == 0)


def test_the_current_cluster_is_the_last_one_made_so(fake: FakeCluster) -> None:
    with pytest.raises(NoClusterError, match=r"rayq\.start"):
        Cluster.current()
    cluster = fake.cluster().make_current()
    assert Cluster.current() is cluster
    cluster.close()
    with pytest.raises(NoClusterError):
        Cluster.current()


class Lifecycle:
    stopped = 0

    def stop(self) -> None:
        Lifecycle.stopped += 1


def test_stop_stops_the_servers_and_close_does_not(fake: FakeCluster) -> None:
    fake.create_topic("t")
    with fake.cluster(lifecycle=Lifecycle()) as cluster:
        producer = cluster.producer()
        future = producer.send("t", b"v")
    assert Lifecycle.stopped == 0
    assert future.done()
    stopping = pickle.loads(pickle.dumps(fake.cluster(lifecycle=Lifecycle())))
    stopping.stop()
    assert Lifecycle.stopped == 1
    with pytest.raises(ClosedError):
        stopping.producer()
    with fake.cluster() as connected, pytest.raises(InvalidRequestError, match="was started"):
        connected.stop()


def test_reprs_say_topics_group_and_state(fake: FakeCluster) -> None:
    fake.create_topic("t", 2)
    with fake.cluster(name="orders") as cluster:
        assert repr(cluster) == f"<Cluster 'orders' at 127.0.0.1:{fake.brokers[1].port}, open>"
        producer, consumer = cluster.producer(), cluster.consumer("t")
        assert repr(producer) == "<Producer to no topic yet, open>"
        producer.send("t", b"v").result(30)
        assert repr(producer) == "<Producer to 't', open>"
        assert repr(consumer) == "<Consumer 't', 2 partitions assigned, open>"
        member = cluster.consumer("t", group="g")
        assert repr(member).startswith("<Consumer 't', group 'g', ")

        async def scenario() -> None:
            async with cluster.async_consumer(pattern=re.compile("t.*"), group="h") as one:
                assert repr(one) == (
                    "<AsyncConsumer pattern 't.*', group 'h', 0 partitions assigned, open>"
                )
            async with cluster.async_producer() as other:
                assert repr(other) == "<AsyncProducer to no topic yet, open>"

        asyncio.run(scenario())
    assert repr(cluster).endswith(", closed>")
    assert repr(consumer).endswith(", closed>") and repr(producer).endswith(", closed>")


def test_a_closed_cluster_says_so(fake: FakeCluster) -> None:
    cluster = fake.cluster()
    cluster.close()
    cluster.close()
    for use in (cluster.producer, cluster.consumer, cluster.admin.list_topics, cluster.__enter__):
        with pytest.raises(ClosedError, match="connect again"):
            use()


def test_a_wrong_key_and_a_wrong_cluster_are_told_at_once(fake: FakeCluster) -> None:
    address = ("127.0.0.1", fake.brokers[1].port)
    start = time.monotonic()
    with Cluster([address], b"x" * 32) as cluster, pytest.raises(AuthenticationError):
        cluster.admin.list_topics()
    with (
        Cluster([address], client_key(SECRET), cluster_id="other") as cluster,
        pytest.raises(WrongClusterError),
    ):
        cluster.admin.list_topics()
    assert time.monotonic() - start < 15


def _in_child(cluster: Cluster, producer: Producer, pipe: Pipe) -> None:
    told = []
    try:
        producer.send("t", b"from the parent's producer")
    except ClosedError as error:
        told.append(type(error).__name__)
    try:
        producer.flush()
    except ClosedError as error:
        told.append(type(error).__name__)
    with cluster.producer() as mine:
        told.append(str(mine.send("t", b"child").result(30).offset))
    pipe.send(told)
    os._exit(0)


def test_after_a_fork_the_cluster_works_and_old_producers_say_so(fake: FakeCluster) -> None:
    fake.create_topic("t")
    with fake.cluster() as cluster, cluster.producer() as producer:
        producer.send("t", b"parent").result(30)
        near, far = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _in_child(cluster, producer, far)
            finally:
                os._exit(1)
        assert near.poll(30)
        assert near.recv() == ["ClosedError", "ClosedError", "1"]
        os.waitpid(pid, 0)
        assert producer.send("t", b"parent").result(30).offset == 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lets SIGINT raise again: a shell that runs the tests in the background makes them ignore
    it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("what", ["result", "poll", "flush", "send", "end_offsets"])
def test_an_interrupt_ends_every_wait(
    fake: FakeCluster, what: str, eventually: Eventually
) -> None:
    fake.create_topic("t")
    with fake.cluster() as cluster:
        consumer = cluster.consumer("t")
        fake.fault(Produce, times=1000, is_lost=True)
        producer = cluster.producer(batch_size=1000, buffer_memory=2000)
        future = producer.send("t", b"x")
        eventually(lambda: bool(fake.asked(Produce)))
        waits = {
            "result": lambda: future.result(60),
            "poll": lambda: consumer.poll(timeout_s=60),
            "flush": lambda: producer.flush(timeout_s=60),
            "send": lambda: [producer.send("t", bytes(900)) for _ in range(10)],
            "end_offsets": lambda: consumer.end_offsets([("t", 0)]),  # type: ignore[list-item]
        }
        if what == "end_offsets":
            fake.move_leader("t", 0, None)
        timer = threading.Timer(
            0.2, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        )
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            waits[what]()
        assert time.monotonic() - start < 25
        timer.join()
        fake.clear_faults()
        with pytest.raises(Exception, match="not delivered"):
            producer.close(timeout_s=0.05)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_poll_loses_nothing(fake: FakeCluster) -> None:
    fake.create_topic("t")
    with fake.cluster() as cluster, cluster.consumer("t") as consumer:
        timer = threading.Timer(
            0.1, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            consumer.poll(timeout_s=60)
        timer.join()
        fake.write("t", [b"v"])
        assert [record.value for record in consumer.poll(timeout_s=30)] == [b"v"]


def test_a_client_needs_bootstrap_addresses() -> None:
    with pytest.raises(InvalidRequestError, match="bootstrap"):
        Client(None, None, [], ClusterConfig())  # type: ignore[arg-type]


def test_those_who_want_a_topic_at_once_ask_for_it_together(fake: FakeCluster) -> None:
    fake.create_topic("t")
    fake.fault(Metadata, delay_s=0.2)

    async def scenario() -> None:
        client = fake.cluster().new_client()

        def want(name: str) -> asyncio.Task[TopicMetadata]:
            return asyncio.ensure_future(client.topic(name, timeout_s=10))

        try:
            impatient, *others = [want("t") for _ in range(20)]
            await asyncio.sleep(0.01)
            impatient.cancel()  # It asks for all callers: another one goes on.
            found = await asyncio.gather(*others)
            assert {topic.name for topic in found} == {"t"}
            assert len(fake.asked(Metadata)) <= 2
            for error in await asyncio.gather(
                *(want("none") for _ in range(5)), return_exceptions=True
            ):
                assert isinstance(error, UnknownTopicError)
        finally:
            client.close()

    asyncio.run(scenario())


def test_brokers_that_fail_beside_one_that_answers_leave_no_traceback(
    monkeypatch: pytest.MonkeyPatch, fake: FakeCluster
) -> None:
    said: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: said.append(what))
        client = fake.cluster().new_client()
        client.add_bootstrap([("127.0.0.1", port) for port in range(1, 6)])
        all_asked = asyncio.Event()

        async def ask(address: tuple[str, int], _request: object, **_: object) -> tuple[str, bytes]:
            if address[1] > 5:
                all_asked.set()
            await all_asked.wait()
            if address[1] > 5:
                return "an answer", b""
            raise DisconnectedError("nobody is here")

        monkeypatch.setattr(client, "ask", ask)
        monkeypatch.setattr(client, "addresses", lambda: client._bootstrap)
        answer = await client.ask_any(Metadata([]), timeout_s=10, hedge_s=0.001)
        assert answer == "an answer"
        client.close()
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(scenario())
    assert said == []


def test_only_a_client_that_uses_topics_warns_that_its_metadata_grows_old(
    fake: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    monkeypatch.setattr(client_module, "METADATA_AGE_MAX_S", 0.05)
    fake.create_topic("t")

    def levels() -> list[int]:
        return [one.levelno for one in caplog.records if "be refreshed" in one.getMessage()]

    with caplog.at_level(logging.DEBUG, "rayq.client.client"), fake.cluster() as cluster:
        with cluster.producer() as producer:
            producer.send("t", b"x").result(30)
            fake.stop_broker(1)
            eventually(lambda: logging.WARNING in levels())
        caplog.clear()
        eventually(lambda: len(levels()) >= 2)
        assert set(levels()[1:]) == {logging.DEBUG}


def address_of(fake: FakeCluster, broker: int = 1) -> str:
    return f"127.0.0.1:{fake.brokers[broker].port}"


def test_addresses_that_are_added_reach_a_client_that_is_open(fake: FakeCluster) -> None:
    fake.create_topic("t")
    with Cluster("127.0.0.1:1", client_key(SECRET)) as cluster:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(cluster.admin.list_topics, timeout_s=60)
            while not cluster._access._clients:
                time.sleep(0.001)
            cluster.add_addresses(address_of(fake))
            assert asked.result(60) == ["t"]
        with cluster.producer() as producer:  # on the same client
            producer.send("t", b"v").result(60)

    async def scenario() -> list[str]:
        cluster = Cluster("127.0.0.1:1", client_key(SECRET))
        async with cluster.async_admin() as admin:
            asked = asyncio.ensure_future(admin.list_topics(timeout_s=60))
            await asyncio.sleep(0.05)
            cluster.add_addresses(address_of(fake))
            return await asked

    assert asyncio.run(scenario()) == ["t"]


def test_a_client_remembers_where_brokers_were(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    others = {number: fake3.brokers[number] for number in (2, 3)}
    with Cluster(address_of(fake3), client_key(SECRET)) as cluster:
        assert cluster.admin.list_topics() == ["t"]
        for number in others:
            del fake3.brokers[number]  # The metadata names them no more.
        fake3.create_topic("u")
        assert cluster.admin.list_topics() == ["t", "u"]
        fake3.brokers.update(others)
        fake3.stop_broker(1)
        assert cluster.admin.list_topics(timeout_s=60) == ["t", "u"]


def test_a_port_that_is_another_clusters_by_now_is_forgotten(fake3: FakeCluster) -> None:
    of_one = Cluster(address_of(fake3), client_key(SECRET), cluster_id=fake3.cluster_id)
    with FakeCluster() as other, of_one as cluster:
        cluster.admin.list_topics()
        client, background = cluster.shared_client()
        address = ("127.0.0.1", other.brokers[1].port)
        client._learned[address] = None

        async def ask() -> None:
            with pytest.raises(DisconnectedError):
                await client.ask(address, Metadata([]), timeout_s=60)

        background.run(ask())
        assert address not in client.addresses()

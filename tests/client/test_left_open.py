"""Producers and consumers that nobody closes: they leave anyway, and a ResourceWarning says so."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rayq import AsyncQueue, Cluster, QueueTask
from rayq.client import finalizers
from rayq.client.client import Client
from rayq.errors import OutcomeUnknownError
from rayq.messages import Produce, Settle
from tests.client.fake_broker import FakeCluster
from tests.programs import run_to_its_end

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture(autouse=True)
def what_earlier_tests_dropped_is_gone() -> None:
    """Otherwise the collector might find it in the middle of a test, which counts the warnings."""
    gc.collect()


def alive(client: Client) -> tuple[int, int]:
    """The numbers of a client's tasks, and of the listeners to its metadata."""
    return len(client.environment.tasks._tasks), len(client.metadata._listeners)  # type: ignore[attr-defined]


def drop(kept: list[Any]) -> None:
    """Drops the last references, also those in circles."""
    kept.clear()
    gc.collect()


def test_a_dropped_producer_delivers_and_leaves(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    client, _ = cluster.shared_client()
    before = alive(client)[1]
    kept = [cluster.producer()]
    kept[0].send("t", b"warm").result(30)
    slow = fake.fault(Produce, is_held=True)
    futures = [kept[0].send("t", b"v") for _ in range(3)]
    with pytest.warns(ResourceWarning, match=r"producer was dropped .*3 records are unsent"):
        drop(kept)
    fake.release(slow)
    assert [future.result(30).offset for future in futures] == [1, 2, 3]
    eventually(lambda: not client._interests)
    eventually(lambda: alive(client)[1] == before)


def test_a_dropped_producer_delivers_although_its_cluster_is_closed(fake: FakeCluster) -> None:
    fake.create_topic("t")
    cluster = fake.cluster()
    kept = [cluster.producer()]
    slow = fake.fault(Produce, is_held=True)
    future = kept[0].send("t", b"v")
    with pytest.warns(ResourceWarning, match="1 record is unsent"):
        drop(kept)
    fake.release(slow)
    cluster.close()
    assert future.result(30).offset == 0


@pytest.mark.parametrize("group", [None, "g"])
def test_dropped_consumers_leave(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually, group: str | None
) -> None:
    fake.create_topic("t", partitions=2)
    client, _ = cluster.shared_client()
    other = cluster.consumer("t", group=group)
    other.poll(0.05)
    before = alive(client)
    for _ in range(3):
        kept = [cluster.consumer("t", group=group)]
        if group is not None:
            kept[0].subscribe(["t"], on_revoked=partial(print, kept[0]))
        kept[0].poll(0.05)
        with pytest.warns(ResourceWarning, match=r"consumer.* of 't' was dropped"):
            drop(kept)
    eventually(lambda: alive(client) <= before)
    if group is not None:
        eventually(lambda: _share(other) == 2)
    other.close()


def _share(consumer: Any) -> int:
    consumer.poll(0.01)
    return len(consumer.assignment())


def test_async_clients_that_are_dropped_leave(fake: FakeCluster) -> None:
    fake.create_topic("t")
    cluster = fake.cluster()

    async def work() -> None:
        kept: list[Any] = [cluster.async_producer(), cluster.async_consumer("t", group="g")]
        # This runs in a task of its own, since a task refers to the place where it was last
        # cancelled.
        await asyncio.create_task(kept[1].poll(0.05))
        client = kept[0].client
        future = await kept[0].send("t", b"v")
        with pytest.warns(ResourceWarning) as told:
            drop(kept)
        names = sorted(str(one.message).split(" was dropped")[0] for one in told)
        assert names == ["An async consumer of group 'g' of 't'", "An async producer"]
        assert (await future).offset == 0
        deadline = asyncio.get_running_loop().time() + 30
        while not client._closed:
            await asyncio.sleep(0.005)
            assert asyncio.get_running_loop().time() < deadline

    asyncio.run(work())
    assert not fake.groups.group("g").members


@pytest.mark.parametrize("ends_with", ["dropped", "open when its event loop ended"])
def test_async_admins_that_nobody_closes_leave(fake: FakeCluster, ends_with: str) -> None:
    fake.create_topic("t")
    cluster = fake.cluster()
    kept: list[Any] = []
    clients: list[Client] = []

    async def work() -> None:
        kept.append(cluster.async_admin())
        # This runs in a task of its own, since a task refers to the place where it was last
        # cancelled.
        assert await asyncio.create_task(kept[0].list_topics()) == ["t"]
        clients.append(kept[0]._client)
        if ends_with == "dropped":
            drop(kept)
            deadline = asyncio.get_running_loop().time() + 30
            while not clients[0]._closed:
                await asyncio.sleep(0.005)
                assert asyncio.get_running_loop().time() < deadline

    with pytest.warns(ResourceWarning, match=f"An async admin was {ends_with}"):
        asyncio.run(work())
    assert clients[0]._closed


def test_async_clients_that_are_open_when_their_loop_ends_leave(fake: FakeCluster) -> None:
    fake.create_topic("t")
    cluster = fake.cluster()
    kept: list[object] = []

    async def work() -> None:
        producer = cluster.async_producer()
        consumer = cluster.async_consumer("t", group="g")
        kept.extend([producer, consumer])
        await consumer.poll(0.05)
        for _ in range(5):
            await producer.send("t", b"v")

    with pytest.warns(ResourceWarning) as told:
        asyncio.run(work())
    texts = sorted(str(one.message) for one in told)
    assert "An async consumer of group 'g' of 't' was open when its event loop ended" in texts[0]
    assert "producer was open when its event loop ended" in texts[1]
    assert fake.values("t") == [b"v"] * 5
    assert not fake.groups.group("g").members


async def _acked(queue: AsyncQueue, _fake: FakeCluster) -> list[object]:
    one, two = await queue.take(2, 30)
    one.ack()
    return [two]


async def _acked_before(queue: AsyncQueue, _fake: FakeCluster) -> list[object]:
    kept = await _acked(queue, _fake)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return kept


async def _acked_and_being_told(queue: AsyncQueue, fake: FakeCluster) -> list[object]:
    one, two, three = await queue.take(3, 30)
    await asyncio.to_thread(lambda: fake.fault(Settle, is_held=True))
    one.ack()
    while not fake.asked(Settle):  # noqa: ASYNC110 - it comes from another thread
        await asyncio.sleep(0.005)
    two.reject("no")
    return [three]


async def _at_a_take(queue: AsyncQueue, fake: FakeCluster) -> list[object]:
    kept = await _acked(queue, fake)
    return [*kept, asyncio.ensure_future(queue.take(10, 30))]


async def _at_work(queue: AsyncQueue, fake: FakeCluster) -> list[object]:
    kept = await _acked(queue, fake)
    begun: asyncio.Queue[None] = asyncio.Queue()

    async def handler(_task: QueueTask) -> None:
        begun.put_nowait(None)
        await asyncio.sleep(30)

    kept.append(asyncio.ensure_future(queue.work(handler, concurrency=2)))
    for _ in range(2):
        await begun.get()
    return kept


@pytest.mark.parametrize("use", [_acked, _acked_before, _acked_and_being_told, _at_a_take, _at_work])
def test_an_async_queue_that_is_open_when_its_loop_ends_settles_and_gives_back(
    fake: FakeCluster, use: Callable[[AsyncQueue, FakeCluster], Any]
) -> None:
    played = fake.queues.create("q")
    fake.write("q", [b"%d" % number for number in range(5)])
    cluster = fake.cluster()
    kept: list[object] = []

    async def work() -> None:
        # Nothing is taken ahead: what an answer brings that nobody waits for, a leader frees later.
        queue = cluster.async_queue("q", prefetch=0)
        kept.append(queue)
        kept.append(await use(queue, fake))

    began_s = time.monotonic()
    with pytest.warns(ResourceWarning, match="async queue of 'q' was open when its event loop"):
        asyncio.run(work())
    assert time.monotonic() - began_s < finalizers.LAST_PATIENCE_S
    assert played.done == ({(0, 0), (0, 1)} if use is _acked_and_being_told else {(0, 0)})
    assert not played.locks


def test_what_a_closed_loop_takes_with_it_is_told(
    fake: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    fake.create_topic("t")
    fake.fault(Produce, times=1000, is_lost=True)
    cluster = fake.cluster()
    loop = asyncio.new_event_loop()

    async def make() -> Any:
        producer = cluster.async_producer()
        await producer.load_topic("t", timeout_s=30)
        return producer, [await producer.send("t", b"v") for _ in range(4)]

    *kept, futures = loop.run_until_complete(make())
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()
    with pytest.warns(ResourceWarning, match="4 records have no outcome, and are lost unless they were sent"):
        drop(kept)
    assert "4 records" in caplog.text
    assert isinstance(futures[0].exception(30), OutcomeUnknownError), "it was sent"


AT_EXIT = """
import atexit, time
told = []
atexit.register(lambda: print(len(fake.values("t"))))
from tests.client.fake_broker import FakeCluster
fake = FakeCluster().__enter__()
fake.create_topic("t")
cluster = fake.cluster()
producer = cluster.producer(linger_ms=60_000)
for number in range(1000):
    producer.send("t", b"%d" % number)
"""


@pytest.mark.slow
def test_a_program_that_ends_without_close_delivers() -> None:
    assert run_to_its_end(AT_EXIT) == (0, "1000\n", "")


QUEUE_AT_EXIT = """
import atexit
atexit.register(lambda: print(sorted(played.done), sorted(played.locks)))
from tests.client.fake_broker import FakeCluster
fake = FakeCluster().__enter__()
played = fake.queues.create("q")
fake.write("q", [b"1", b"2", b"3"])
cluster = fake.cluster()
queue = cluster.queue("q")
one, two = queue.take(2, 30)
one.ack()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_program_that_ends_without_close_settles_and_gives_back(is_dropped: bool) -> None:
    program = QUEUE_AT_EXIT + ("two.nack(0)\ndel one, two, queue\n" if is_dropped else "")
    code, out, _ = run_to_its_end(program)
    assert (code, out) == (0, "[(0, 0)] []\n")

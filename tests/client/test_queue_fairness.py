"""No task waits in one consumer while another has nothing to do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rayq import messages as m
from rayq.client.cluster import Cluster
from rayq.client.queues.queue import Queue
from rayq.client.queues.task import QueueTask
from tests.client.fake_broker import FakeCluster

CONSUMERS = 6
BEGIN_S = 5.0
"""The handlers of these tests wait for each other for so long. A consumer that keeps a task which
is not begun gives it back after a third of the timeout, which is 10 s."""
QUICK = 60


class Handler:
    """Quick ones end at once; each slow one ends once `wanted` are at work."""

    def __init__(self, wanted: int) -> None:
        self.all = threading.Barrier(wanted)
        self.quick = 0
        self.deliveries: list[int] = []

    def __call__(self, task: QueueTask) -> None:
        if task.value == b"quick":
            self.quick += 1
            return
        self.all.wait(BEGIN_S)
        self.deliveries.append(task.delivery_count)


@contextmanager
def working(queues: list[Queue], handler: Handler, concurrency: int = 1) -> Iterator[None]:
    threads = [
        threading.Thread(target=queue.work, args=(handler,), kwargs={"concurrency": concurrency})
        for queue in queues
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for queue in queues:
            queue.stop()
        for thread in threads:
            thread.join(BEGIN_S)


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 4 * BEGIN_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("partitions", [1, CONSUMERS, 20])
@pytest.mark.parametrize("is_warm", [False, True])
def test_as_many_tasks_as_consumers_begin_at_once(
    fake: FakeCluster, cluster: Cluster, partitions: int, is_warm: bool
) -> None:
    played = fake.queues.create("q", partitions=partitions)
    handler = Handler(CONSUMERS)
    queues = [cluster.queue("q") for _ in range(CONSUMERS)]
    if not is_warm:
        for number in range(CONSUMERS):
            fake.write("q", [b"slow"], number % partitions)
    with working(queues, handler):
        if is_warm:
            for number in range(QUICK):
                fake.write("q", [b"quick"] * 5, number % partitions)
            until(lambda: handler.quick == 5 * QUICK)
            for number in range(CONSUMERS):
                fake.write("q", [b"slow"], number % partitions)
        until(lambda: len(handler.deliveries) == CONSUMERS)
    for queue in queues:
        queue.close()
    assert len(played.done) == CONSUMERS + (5 * QUICK if is_warm else 0)


@pytest.mark.parametrize("weights", [[8, 1], [1, 1]])
def test_so_it_is_over_several_queues(
    fake: FakeCluster, cluster: Cluster, weights: list[int]
) -> None:
    for name in ("urgent", "bulk"):
        fake.queues.create(name, partitions=2)
        for number in range(2 * CONSUMERS):
            fake.write(name, [b"slow"], number % 2)
    handler = Handler(CONSUMERS)
    queues = [cluster.queue(["urgent", "bulk"], weights=weights) for _ in range(CONSUMERS)]
    with working(queues, handler):
        until(lambda: len(handler.deliveries) == 4 * CONSUMERS)
    for queue in queues:
        queue.close()


def test_a_fresh_consumer_takes_one_task_for_each_that_it_handles_at_once(
    fake: FakeCluster, cluster: Cluster
) -> None:
    played = fake.queues.create("q", partitions=8)
    for number in range(8):
        fake.write("q", [b"slow"] * 10, number)
    handler = Handler(4)
    with cluster.queue("q") as queue, working([queue], handler, concurrency=3):
        until(lambda: handler.all.n_waiting == 3)
        assert len(played.locks) == 3
        handler.all.abort()


def test_on_a_loop_as_in_threads(fake: FakeCluster) -> None:
    fake.queues.create("q", partitions=3)
    for number in range(CONSUMERS):
        fake.write("q", [b"slow"], number % 3)

    async def script() -> None:
        begun: set[int] = set()
        all_have = asyncio.Event()

        async def handle(task: QueueTask) -> None:
            begun.add(task.partition * 100 + task.offset)
            if len(begun) == CONSUMERS:
                all_have.set()
            await asyncio.wait_for(all_have.wait(), BEGIN_S)

        async with asyncio.TaskGroup() as group:
            queues = [own.async_queue("q") for _ in range(CONSUMERS)]
            for queue in queues:
                group.create_task(queue.work(handle, stop_when_idle_s=0.2))
        assert all_have.is_set()
        for queue in queues:
            await queue.close()

    with fake.cluster() as own:
        asyncio.run(script())


def test_what_waits_is_given_back_where_the_leader_says_that_others_have_nothing(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = fake.queues.create("q")
    monkeypatch.setattr("rayq.client.queues.throughput.ThroughputEstimator.ahead", lambda *_: 40)
    fake.write("q", [b"%d" % number for number in range(41)])
    with cluster.queue("q") as queue:
        [task] = queue.take(1, BEGIN_S)
        until(lambda: len(played.locks) == 41)
        settle = fake.queues.settle

        def settled(broker: int, request: m.Settle) -> m.SettleResponse:
            answer = settle(broker, request)
            return m.SettleResponse(answer.lost, wanted=3 if request.acks else 0)

        monkeypatch.setattr(fake.queues, "settle", settled)
        task.ack()
        until(lambda: len(played.locks) == 10)


def test_what_follows_a_record_of_its_key_that_is_given_back_goes_with_it(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leader has freed it, too: nobody may handle it before the other one."""
    monkeypatch.setattr("rayq.client.queues.throughput.ThroughputEstimator.ahead", lambda *_: 10)
    fake.queues.create("q", ordered_by_key=True)
    fake.write("q", [b"0", b"1", b"2"], keys=[b"a", b"b", b"b"])
    with cluster.queue("q") as queue:
        [first, _] = queue.take(3, BEGIN_S)
        [partition] = queue.core.queues[0].partitions
        [batch] = partition.batches
        assert [record.offset for record in batch.records] == [2]
        queue.core.loop.call_soon_threadsafe(partition.acknowledger.release, batch, [1])
        until(lambda: sorted(batch.open) == [0] and not batch.records)
        first.ack()

"""Consumers of a queue with real leaders: who gets what when, and what their deaths cost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proving.simulation.process import Process
from rayq.client.client import Client
from rayq.client.producing.producer import AsyncProducer
from rayq.client.queues.queue import AsyncQueue
from rayq.client.queues.queue_core import QueueCore
from rayq.client.queues.task import QueueTask
from rayq.config import ProducerConfig
from tests.simulated.staged import Stage, play

TASK_S = 5.0
BEGIN_S = 1.0
"""Within so long all tasks begin for which there is a consumer."""
Handle = Callable[["Worker", QueueTask], Awaitable[None]]


class Worker:
    """A consumer in a process of its own."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        handle: Handle,
        weights: dict[str, int],
        *,
        concurrency: int,
    ) -> None:
        self._stage = stage
        self._handle = handle
        self._weights = weights
        self._concurrency = concurrency
        self.is_stopped = False
        self.process: Process = stage.world.host(name).process(name)
        self.running = self.process.start(self._work())

    async def _work(self) -> None:
        cluster = self._stage.cluster
        client = Client(
            self.process.environment, cluster.client_identity, cluster.endpoints, cluster.config
        )
        core = QueueCore(client, [*self._weights], [*self._weights.values()], 256, lambda: None)
        queue = AsyncQueue(core, lambda: AsyncProducer(client, ProducerConfig()))
        spawn = self.process.environment.tasks.spawn
        await asyncio.wait(
            [spawn(self._take(queue), "takes") for _ in range(self._concurrency)]
        )
        await queue.close()
        client.close()


    async def _take(self, queue: AsyncQueue) -> None:
        while not self.is_stopped:
            for task in await queue.take(1, 0.5):
                await self._handle(self, task)
                task.ack()

    async def stop(self) -> None:
        self.is_stopped = True
        if self.process.alive:
            await self.running


async def put(stage: Stage, topic: str, value: bytes, *, partition: int, count: int = 1) -> None:
    async def send() -> None:
        producer = AsyncProducer(stage.client, ProducerConfig())
        for _ in range(count):
            await producer.send(topic, value, partition=partition)
        await producer.close()

    await stage.process.run(send())


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("weights", [[1], [8, 1]])
def test_as_many_long_tasks_as_consumers_begin_within_a_second(
    partitions: int, is_warm: bool, weights: list[int]
) -> None:
    consumers, concurrency = 4, 2
    names = [f"q{number}" for number in range(len(weights))]

    async def script(stage: Stage) -> None:
        run, loop = stage.process.run, asyncio.get_running_loop()
        for name in names:
            await run(stage.admin.create_queue(name, partitions=partitions, replication_factor=1))
        begun_s: list[float] = []
        quick = 0

        async def handle(_worker: Worker, task: QueueTask) -> None:
            nonlocal quick
            if task.value == b"quick":
                quick += 1
                return
            begun_s.append(loop.time())
            await asyncio.sleep(TASK_S)

        workers = [
            Worker(
                stage,
                f"worker-{number}",
                handle,
                dict(zip(names, weights, strict=True)),
                concurrency=concurrency,
            )
            for number in range(consumers)
        ]
        if is_warm:
            for name in names:
                await put(stage, name, b"quick", partition=0, count=300)
            await stage.until(lambda: quick == 300 * len(names), "the quick ones")
        began_s = loop.time()
        slots = consumers * concurrency
        # Twice as many, as they finish at once.
        for number in range(2 * slots):
            await put(stage, names[number % len(names)], b"slow", partition=number % partitions)
        await stage.until(lambda: len(begun_s) == 2 * slots, "all to begin")
        assert begun_s[slots - 1] - began_s < BEGIN_S
        assert begun_s[-1] - began_s < TASK_S + 2 * BEGIN_S
        for worker in workers:
            await worker.stop()

    play(script, brokers=1)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_task_that_ends_its_workers_takes_no_other_along(is_alone: bool) -> None:
    """Each worker is warm, and has others locked ahead, when the task ends it."""
    max_deliveries = 3

    async def script(stage: Stage) -> None:
        run = stage.process.run
        await run(
            stage.admin.create_queue(
                "q",
                partitions=2,
                replication_factor=1,
                max_deliveries=max_deliveries,
                visibility_timeout_s=5,
            )
        )
        handled: set[tuple[int, int]] = set()
        deaths = 0
        workers: list[Worker] = []

        async def handle(worker: Worker, task: QueueTask) -> None:
            nonlocal deaths
            if task.value == b"poison":
                deaths += 1
                assert task.delivery_count == deaths
                worker.process.kill()
                await asyncio.sleep(3600)
            await asyncio.sleep(0.001)
            handled.add((task.partition, task.offset))

        for partition in (0, 1):
            await put(stage, "q", b"task", partition=partition, count=150)
        await put(stage, "q", b"poison", partition=0)
        for partition in (0, 1):
            await put(stage, "q", b"task", partition=partition, count=150)
        while len(workers) < 10 and not (len(handled) == 600 and deaths == max_deliveries):
            started = [
                Worker(
                    stage,
                    f"worker-{len(workers)}-{n}",
                    handle,
                    {"q": 1},
                    concurrency=1,
                )
                for n in range(1 if is_alone else 2)
            ]
            workers += started
            await stage.until(
                lambda started=started: (  # type: ignore[misc]
                    any(not one.process.alive for one in started)
                    or (len(handled) == 600 and deaths == max_deliveries)
                ),
                "a death, or all to be handled",
            )
        await asyncio.sleep(10)
        found = await run(stage.admin.describe_queue("q"))
        assert sum(one.dead or 0 for one in found.partitions) == 1
        assert deaths == max_deliveries and len(handled) == 600
        for worker in workers:
            await worker.stop()

    play(script, brokers=1)

"""Consumers of a queue that use rayq's own client, and note in the history what it tells them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from functools import partial

from proving.simulation.loop import START_S
from proving.simulation.queue_workers import HOLD_MAX, HOLD_SHARE, QueuePlan
from proving.simulation.server_view import batch_of
from rayq.client.client import Client
from rayq.client.producing.producer import AsyncProducer
from rayq.client.queues.partition_client import ResolvedQueue
from rayq.client.queues.queue import AsyncQueue
from rayq.client.queues.queue_core import QueueCore
from rayq.client.queues.task import HandedOut, QueueTask, lock_count
from rayq.config import ProducerConfig
from rayq.errors import LockLostError, RayqError, TimeoutError, UnknownQueueError
from rayq.testing.checker import Recorder

FLUSH_TIMEOUT_S = 8.0
LOOK_S = 0.25
WAITS_MAX_S = 1.0
"""Maximum time that a record may wait in a worker whose user does not ask for it."""


class _NotingCore(QueueCore):
    """Tells `note` of what leaders are about to hear that it begins."""

    def __init__(
        self,
        note: Callable[[HandedOut], None],
        client: Client,
        names: list[str],
        weights: list[int],
        prefetch: int,
    ) -> None:
        super().__init__(client, names, weights, prefetch, lambda: None)
        self._note = note

    @property
    def is_asked(self) -> bool:
        return self._demand > 0

    async def _begin(self, handed_out: HandedOut, deadline_s: float) -> HandedOut:
        self._note(handed_out)
        return await super()._begin(handed_out, deadline_s)


class TaskWorker:
    """See the module. It takes from the queues of all `plans`, by weight."""

    def __init__(
        self,
        name: str,
        client: Client,
        rng: random.Random,
        plans: Sequence[QueuePlan],
        recorder: Recorder,
        now_s: Callable[[], float],
        problems: list[str],
    ) -> None:
        self._name = name
        self._rng = rng
        self._plans = {plan.name: plan for plan in plans}
        self._timeout_s = min(plan.timeout_s for plan in plans)
        self._recorder = recorder
        self._now_s = now_s
        weights = [rng.randint(1, 5) for _ in plans]
        prefetch = rng.choice((0, 8, 64))
        self._core = _NotingCore(self._note_begun, client, [*self._plans], weights, prefetch)
        self._queue = AsyncQueue(self._core, partial(AsyncProducer, client, ProducerConfig()))
        self._client = client
        self._problems = problems
        self._asked = 0
        """The number of times that its user has asked for records."""

    async def work(self, goes_on: Callable[[], bool], is_wild: Callable[[], bool]) -> None:
        watching = self._client.environment.tasks.spawn(self._watch(), f"{self._name} is watched")
        while goes_on():
            self._asked += 1
            try:
                tasks = await self._queue.take(self._rng.choice((1, 10, 100)), timeout_s=0.5)
            except UnknownQueueError:
                break  # It was deleted. There may be one of that name for the next consumer.
            except RayqError:
                await asyncio.sleep(self._rng.uniform(0.05, 0.5))
                continue
            self._note_taken(tasks)
            await self._handle(tasks, is_wild())
        watching.cancel()
        with contextlib.suppress(LockLostError):  # A record that was never settled, of that queue.
            await self._queue.close()

    async def _watch(self) -> None:
        """Nothing waits here for long while the worker is at something else."""
        waits_since_s: dict[tuple[object, int], float] = {}
        looked_s, asked = self._now_s(), self._asked
        while True:
            await asyncio.sleep(LOOK_S)
            now_s, before_s = self._now_s(), looked_s
            looked_s = now_s
            # Who asks gets none of them while their leader cannot be told that they are begun.
            was_asked, asked = self._asked > asked, self._asked
            waiting = {
                (batch, offset)
                for queue in self._core.queues
                for partition in queue.partitions
                for batch in partition.batches
                for offset in batch.waiting_offsets()
            }
            was_paused = now_s - before_s > 2 * LOOK_S
            if was_paused or was_asked or self._core.is_asked:
                waiting.clear()
            waits_since_s = {task: waits_since_s.get(task, now_s) for task in waiting}
            if any(now_s - since_s > WAITS_MAX_S for since_s in waits_since_s.values()):
                self._problems.append(
                    f"{len(waiting)} records of {', '.join(self._plans)} wait in {self._name}, "
                    "which does something else"
                )
                return

    def _note_begun(self, handed_out: HandedOut) -> None:
        for delivery, records in handed_out:
            for record in records:
                queue = delivery.batch.partition.queue
                self._recorder.begun(self._noted_queue(queue), [record.value or b""])

    def _noted_as(self, task: QueueTask) -> str:
        return self._noted_queue(batch_of(task).partition.queue)

    def _noted_queue(self, queue: ResolvedQueue) -> str:
        return self._plans[queue.name].noted_as(queue.queue_id)

    def _note_taken(self, tasks: Sequence[QueueTask]) -> None:
        by_answer: dict[int, list[QueueTask]] = {}
        for task in tasks:
            by_answer.setdefault(id(batch_of(task)), []).append(task)
        for some in by_answer.values():
            batch = batch_of(some[0])
            self._recorder.took(
                self._noted_as(some[0]),
                self._name,
                batch.partition.number,
                [(task.offset, lock_count(task), task.value or b"", task.key) for task in some],
                asked_s=batch.acquired_at_s - START_S,
                at_s=self._now_s(),
                state_epoch=batch.state_epoch,
            )

    async def _handle(self, tasks: Sequence[QueueTask], is_wild: bool) -> None:
        rng = self._rng
        settled: list[tuple[int, QueueTask]] = []
        if is_wild and rng.random() < HOLD_SHARE:
            await asyncio.sleep(rng.uniform(0, HOLD_MAX * self._timeout_s))
        for task in tasks:
            what = "ack"
            if is_wild:
                choices = ("ack", "fail", "nack", "reject", "slow", "slow too long", "forget")
                what = rng.choices(choices, (90, 2, 2, 1, 1, 1, 1))[0]
            if what.startswith("slow"):
                most_s = 2.0 * self._timeout_s if what == "slow" else 8.0
                await asyncio.sleep(rng.uniform(0.0, most_s))
                what = "ack"
            settled += self._settle(task, what)
            if rng.random() < 0.05:
                await asyncio.sleep(rng.uniform(0, 0.1))
        if rng.random() < 0.7 or not is_wild:
            await self._note_settled(settled)
        else:
            for number, _ in settled:
                error = TimeoutError("Nobody waited.")
                self._recorder.not_settled(self._name, number, error, at_s=self._now_s())

    def _settle(self, task: QueueTask, what: str) -> list[tuple[int, QueueTask]]:
        delay_s = self._rng.choice((None, 0.0, 0.3, 1.5)) if what == "nack" else None
        if what == "fail":
            config = batch_of(task).partition.queue.config
            is_last = task.delivery_count >= config.max_deliveries
            noted = "reject" if is_last else "nack"
        else:
            noted = "nack" if what == "forget" else what
        number = self._recorder.settling(
            self._noted_as(task),
            self._name,
            task.partition,
            noted,  # type: ignore[arg-type]
            [(task.offset, lock_count(task))],
            at_s=self._now_s(),
            state_epoch=batch_of(task).state_epoch,
            seconds=delay_s,
        )
        if what == "forget":  # The client gives it back when the task is collected.
            error = TimeoutError("Nobody said anything.")
            self._recorder.not_settled(self._name, number, error, at_s=self._now_s())
            return []
        try:
            if what == "ack":
                task.ack()
            elif what == "nack":
                task.nack(delay_s)
            elif what == "reject":
                task.reject("unwanted")
            else:
                task.fail(ValueError("it failed"))
        except LockLostError:
            self._recorder.settled(self._name, number, at_s=self._now_s(), lost=[task.offset])
            return []
        return [(number, task)]

    async def _note_settled(self, settled: list[tuple[int, QueueTask]]) -> None:
        failed: RayqError | None = None
        try:
            await self._queue.flush(FLUSH_TIMEOUT_S)
        except LockLostError:
            pass  # Each task's own error says so.
        except RayqError as error:
            failed = error
        at_s = self._now_s()
        for number, task in settled:
            lost = task.lost
            doubt = lost if lost is not None and "could not be told" in str(lost) else failed
            if doubt is not None:
                self._recorder.not_settled(self._name, number, doubt, at_s=at_s)
            else:
                offsets = [] if lost is None else [task.offset]
                self._recorder.settled(self._name, number, at_s=at_s, lost=offsets)

"""Batch writes in a simulated cluster: each job is one transaction of many writers.

A driver begins jobs under one transactional id and, one after the other, under names. Each task of
a job has one attempt or two, in processes of their own: some make the same rows again, some make
others, and some outlive their driver (stragglers). The driver commits what the first attempt of
each task reported. A name is tried until it is committed, also by drivers that come later.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Literal

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.process import Process
from rayq.batch.batch_cutter import Cutter
from rayq.batch.job_partition import JobPartition
from rayq.batch.job_transaction import JobTransaction
from rayq.batch.taking_cuts import together
from rayq.batch.task_rows import TaskRows
from rayq.batch.task_writer import _commit, _Writing
from rayq.batch.write_job import WriteJob
from rayq.client.client import Client
from rayq.errors import AlreadyCommittedError, RayqError, TransactionOutcomeUnknownError
from rayq.messages import LATEST
from rayq.records import TopicPartition
from rayq.testing.checker.transactions import TransactionHistory

ID = "job"
TASKS = 3
ROWS_MAX = 4
TIMEOUT_S = 15.0
JOB_LIMIT_S = 30.0
SETTLE_LIMIT_S = 60.0

Rows = list[tuple[int, bytes]]
"""Partitions and values."""


class AtomicJobs:
    """See the module."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        history: TransactionHistory,
        topic: str,
        partitions: int,
        new_client: Callable[[Process], Client],
    ) -> None:
        self.is_settled = True
        """True if nothing of the id is open."""
        self.hosts = [cluster.world.host(f"executor-{number}") for number in range(TASKS)]
        self._history = history
        self._topic = topic
        self._partitions = partitions
        self._new_client = new_client
        self._batch = 0
        """The number in the name of the batch that is to be written."""
        self._in_doubt: str | None = None
        """The job, in the history, whose commit was asked for last, and perhaps not answered."""
        self._jobs = 0
        self._attempts: list[tuple[Process, asyncio.Task[None]]] = []

    async def drive(self, client: Client, rng: random.Random, is_on: Callable[[], bool]) -> None:
        """A driver's life. Nothing of the id is open once it returns."""
        self.is_settled = False
        while is_on():
            try:
                await self._run(client, rng)
            except RayqError:
                pass  # What became of it, the next one finds out.
            await asyncio.sleep(rng.uniform(0.1, 3.0))
        await self._begin(client, SETTLE_LIMIT_S)
        self.is_settled = True

    async def end(self, limit_s: float) -> None:
        """Waits for the last stragglers."""
        if not self._attempts:
            return
        done, late = await asyncio.wait([task for _, task in self._attempts], timeout=limit_s)
        assert not late, f"{len(late)} attempts at tasks did not end"
        for task in done:
            task.result()
        for process, _ in self._attempts:
            process.kill()

    async def _begin(self, client: Client, timeout_s: float) -> JobTransaction | None:
        """None: the batch is committed already."""
        name = f"batch-{self._batch}"
        try:
            transaction, _ = await JobTransaction.begin(client, ID, name, timeout_s=timeout_s)
        except AlreadyCommittedError:
            assert self._in_doubt is not None, f"{name} is committed, and nobody asked for it"
            self._ended("committed")
            return None
        if self._in_doubt is not None:
            self._ended("aborted")  # A name commits once, and this try of it may.
        return transaction

    def _ended(self, outcome: Literal["committed", "aborted"]) -> None:
        assert self._in_doubt is not None
        self._history.ended(self._in_doubt, outcome)
        self._in_doubt = None
        self._batch += outcome == "committed"

    async def _run(self, client: Client, rng: random.Random) -> None:
        """One job. Raises RayqError where it is aborted, or in doubt."""
        topic = await client.topic(self._topic, timeout_s=TIMEOUT_S)
        places = [TopicPartition(self._topic, number) for number in range(self._partitions)]
        ends = await together(
            JobPartition(client, place, topic.topic_id, TIMEOUT_S).offset(LATEST)
            for place in places
        )
        transaction = await self._begin(client, TIMEOUT_S)
        if transaction is None:
            return
        job = WriteJob(
            topic=self._topic,
            topic_id=topic.topic_id,
            start_offsets=[end or 0 for end in ends],
            first_producer_id=transaction.family,
            timestamp_ms=client.environment.clock.wall_ms(),
            batch_bytes=rng.choice((100, 10_000)),
            append_time=False,
            transactional_id=ID,
            name=transaction.name,
            owner=transaction.owner,
            epoch=transaction.epoch,
        )
        keeping = client.environment.tasks.spawn(transaction.keep_open(), "keep a job open")
        self._jobs += 1
        whole = f"job-{self._jobs}"
        self._history.begun(whole)
        try:
            async with asyncio.timeout(JOB_LIMIT_S):
                reports = await asyncio.gather(
                    *(self._task(job, whole, task, rng) for task in range(TASKS))
                )
            self._in_doubt = whole
            self._history.ended(whole, "unknown")
            await _commit(transaction, self._topic, _by_partition(reports))
            self._ended("committed")
        except TransactionOutcomeUnknownError:
            raise
        except (RayqError, TimeoutError):
            if self._in_doubt is not None:  # Its commit was refused, or not even asked for.
                self._ended("aborted")
            await transaction.abort()
        finally:
            keeping.cancel()

    # --- tasks --------------------------------------------------------------------------------

    async def _task(
        self, job: WriteJob, whole: str, task: int, rng: random.Random
    ) -> dict[int, int]:
        """Returns the number of records in each partition, as the first attempt says that has
        written them; another one may continue."""
        loop = asyncio.get_running_loop()
        report: asyncio.Future[tuple[Rows, dict[int, int]]] = loop.create_future()
        tries = [self._rows(f"{whole}/{task}", rng)]
        if rng.random() < 0.5:
            tries.append(self._rows(f"{whole}/{task}b", rng) if rng.random() < 0.5 else tries[0])
        mine = self._history.transactions[whole].values
        for number, rows in enumerate(tries):
            if number == 0 or rows is not tries[0]:
                mine += [value for _, value in rows]
            process = self.hosts[task].process(f"executor-{task}.{len(self._attempts)}")
            attempt = self._attempt(process, job, task, rows, report, rng.getrandbits(64))
            self._attempts.append((process, process.start(attempt)))
        reported, counts = await report
        for rows in tries:
            if rows is not reported:  # What is committed is what was reported, and nothing else.
                name = f"{whole}/{task}, not reported"
                self._history.begun(name)
                for _, value in rows:
                    mine.remove(value)
                    self._history.sending(name, value)
        return counts

    def _rows(self, name: str, rng: random.Random) -> Rows:
        return [
            (rng.randrange(self._partitions), b"%s/%d" % (name.encode(), number))
            for number in range(rng.randint(1, ROWS_MAX))
        ]

    async def _attempt(
        self,
        process: Process,
        job: WriteJob,
        task: int,
        rows: Rows,
        report: asyncio.Future[tuple[Rows, dict[int, int]]],
        seed: int,
    ) -> None:
        rng = random.Random(seed)
        client = self._new_client(process)
        writing = _Writing(client, job, job.first_producer_id + task, TIMEOUT_S)
        cutter = Cutter(job, task)
        try:
            for partition, value in rows:
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.uniform(0, 6.0))
                some = TaskRows([value], [b"key of " + value], [partition], None, None)
                for place, payload in cutter.cut(some):
                    await writing.put(place, payload)
            for place, payload in cutter.rest():
                await writing.put(place, payload)
            await writing.finish()
        except RayqError:
            return  # Its job is over, or fails by its time.
        finally:
            writing.close()
            client.close()
        if not report.done():
            report.set_result(
                (rows, {place: sender.count for place, sender in writing.senders.items()})
            )


def _by_partition(reports: list[dict[int, int]]) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = {}
    for task, counts in enumerate(reports):
        for partition, count in counts.items():
            found.setdefault(partition, {})[task] = count
    return found

"""Batch writes that a retried or speculative task does not repeat. Needs the extra `arrow`.

`begin_write` on the driver makes a `WriteJob`: the topic (by id), its current ends, one timestamp
and a range of producer ids. Task `n` of the job writes as producer `first_producer_id + n`, and
cuts its batches by its rows alone: not by time, and not by how the rows arrive. So every attempt at
the task sends the same batches under the same numbers, and the leader appends each once, even when
two attempts run at the same time.

Guarantees without transactions:

- A task writes its rows exactly once if the rows, and their order, are the same in every attempt.
  If they are not, the attempt fails with `RewriteMismatchError` as soon as it meets a batch of an
  earlier attempt that differs; it never skips rows because other rows have their numbers.
  `finish_write`, on the driver after the last task, finds records that attempts wrote elsewhere:
  to partitions that the last attempt at a task did not write to, or as tasks that the job no longer
  has.
- A failed job leaves the records that its tasks had written. The next `begin_write` is another job.
  A kept `WriteJob` (for example in a checkpoint) makes writing again a repetition. Leaders forget a
  producer a day after its last append. In an older job, batches that are still in the log are
  recognised, but a task that was cut short cannot be finished (`UnknownProducerError`). A
  partition's leader knows 100,000 producers; each task that writes to it is one.
- Readers see records as soon as they are committed, even those of a job that fails later.

A job may be one transaction instead (`transactional_id`): then readers see all of its records at
once, or none. `job_transaction` says how that works.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rayq.batch.batch_cutter import Cutter
from rayq.batch.job_partition import JobPartition
from rayq.batch.job_transaction import JobTransaction
from rayq.batch.numbered_sender import NumberedSender
from rayq.batch.offset_ranges import snapshot
from rayq.batch.taking_cuts import together
from rayq.batch.task_rows import rows_of
from rayq.batch.write_job import WriteJob
from rayq.client.admin.transactions import check_transactional_id
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.client.producing.accumulator import (
    BATCH_OVERHEAD_BYTES,
)
from rayq.client.producing.transaction import check_name
from rayq.client.timeouts import takes_timeout
from rayq.config import HOUR_MS, TopicConfig, parse_stored
from rayq.errors import (
    InvalidRequestError,
    RayqError,
    RewriteMismatchError,
    TransactionCommittedError,
    TransactionEndedError,
    TransactionOutcomeUnknownError,
)
from rayq.messages import DescribeProducers
from rayq.records import OffsetRange, TopicPartition

logger = logging.getLogger(__name__)

BATCH_BYTES = 512 * 1024
"""Number of bytes of keys, values and headers that close a batch, if `max_message_bytes` allows."""
TASKS_MAX = 2**20
CHOSEN_IDS_FIRST = 2**62
"""First producer id of those that jobs choose, at random; lower ones are allocated in turn."""
JOB_BITS = 41
YOUNG_JOB_MS = HOUR_MS
"""Maximum age of a job whose producers leaders certainly still know: they remember them for a
day."""


class TaskWritten(NamedTuple):
    """The result of a task's writes. `repeated` records were already there, sent by an earlier
    attempt or by a try whose answer was lost. `partitions` has the number of records of each
    partition, `ranges` are by partition, in order."""

    task: int
    records: int
    repeated: int
    partitions: dict[int, int]
    ranges: list[OffsetRange]


@takes_timeout
def begin_write(
    cluster: Cluster | None,
    topic: str,
    *,
    transactional_id: str | None = None,
    name: str | None = None,
    timeout_s: float = 60.0,
) -> WriteJob:
    """Begins a job: call it once, on the driver. `cluster`: None means the process's current one.

    With a `transactional_id` the job is a transaction, and an open one of an earlier job with this
    id is aborted. With a `name`, too, it commits once: while it is the last name that committed
    under this id, a job of that name raises AlreadyCommittedError.

    Raises UnknownTopicError, PartitionOfflineError, TimeoutError, AlreadyCommittedError,
    TransactionLimitError, InvalidRequestError (a bad id or name, or a name without an id)."""
    if transactional_id is not None:
        check_transactional_id(transactional_id)
    elif name is not None:
        raise InvalidRequestError("A name is that of a transaction: give a transactional_id, too.")
    check_name(name)
    found = cluster or Cluster.current()
    ranges = snapshot(found, topic, starting_offsets="latest", timeout_s=timeout_s)
    client, background = found.shared_client()

    async def config() -> TopicConfig:
        return parse_stored(TopicConfig, (await client.topic(topic, timeout_s=timeout_s)).config)

    topic_config = background.run(config())
    room_bytes = max(topic_config.max_message_bytes - BATCH_OVERHEAD_BYTES, 1)
    job_number = client.environment.random.getrandbits(JOB_BITS)
    job = WriteJob(
        topic=topic,
        topic_id=ranges[0].topic_id,
        start_offsets=[split.end for split in ranges],
        first_producer_id=CHOSEN_IDS_FIRST + job_number * TASKS_MAX,
        timestamp_ms=client.environment.clock.wall_ms(),
        batch_bytes=min(BATCH_BYTES, room_bytes),
        append_time=topic_config.message_timestamp_type == "append",
    )
    if transactional_id is None:
        return job
    transaction, last_name = background.run(
        JobTransaction.begin(client, transactional_id, name, timeout_s=timeout_s)
    )
    return job._replace(
        first_producer_id=transaction.family,
        transactional_id=transactional_id,
        name=name,
        last_name=last_name,
        owner=transaction.owner,
        epoch=transaction.epoch,
    )


def job_for(
    cluster: Cluster, topic: str, kept: WriteJob | None, *, atomic: bool, timeout_s: float
) -> WriteJob:
    """The job that the caller kept, else a new one. A job that is a transaction begins again,
    because the cluster may have ended the kept one. Raises InvalidRequestError for a job of another
    topic, and for one that is not a transaction if it is to be `atomic`; and the errors of
    `begin_write`."""
    if kept is None:
        client, _ = cluster.shared_client()
        new_id = f"rayq-write-{client.environment.new_id()}" if atomic else None
        return begin_write(cluster, topic, transactional_id=new_id, timeout_s=timeout_s)
    if kept.topic != topic:
        raise InvalidRequestError(f"The job is one of topic {kept.topic!r}, not {topic!r}.")
    if kept.transactional_id is not None:
        begun = begin_write(
            cluster,
            topic,
            transactional_id=kept.transactional_id,
            name=kept.name,
            timeout_s=timeout_s,
        )
        return begun._replace(topic_id=kept.topic_id)
    if atomic:
        raise InvalidRequestError(
            "The job is not a transaction: begin_write makes one with a transactional_id and a "
            "name."
        )
    return kept


@contextmanager
def writing(cluster: Cluster | None, job: WriteJob, *, timeout_s: float = 60.0) -> Iterator[None]:
    """Wraps the tasks of a job and its `finish_write`, on the driver: the job's transaction stays
    open, for an hour at most, and an exception aborts it. Does nothing for other jobs."""
    client, background = (cluster or Cluster.current()).shared_client()
    transaction = job.transaction(client, timeout_s)
    if transaction is None:
        yield
        return

    async def keep() -> asyncio.Task[None]:
        return client.environment.tasks.spawn(
            transaction.keep_open(), f"keep the transaction of {job.transactional_id} open"
        )

    task = background.run(keep())
    try:
        yield
    except TransactionOutcomeUnknownError:
        raise  # A commit was requested, so no abort is.
    except BaseException:
        try:
            background.run(transaction.abort())
        except TransactionCommittedError:
            raise
        except RayqError as error:
            logger.warning("the transaction ends by its time-out: %s", error)
        raise
    finally:
        background.call_soon(task.cancel)


@takes_timeout
def write_task(
    cluster: Cluster | None,
    job: WriteJob,
    task: int,
    batches: Iterable[Any],
    *,
    timeout_s: float = 120.0,
) -> TaskWritten:
    """Writes the rows of one task; returns once every in-sync replica has them all.

    `task` numbers the task within the job, from 0, the same for each attempt at it. `batches` are
    `pyarrow.RecordBatch`es or tables with the columns value (binary or string; null is a tombstone)
    and, optionally, key (binary or string), partition (int; else by the key's crc32 as a producer
    does, without a key in runs over all partitions), timestamp (a timestamp, or milliseconds; else
    the job's time) and headers (a list of structs of key, or name, and value).

    Raises InvalidRequestError (other columns or types, a partition that does not exist),
    RewriteMismatchError (see above), OutcomeUnknownError or PartitionOfflineError (a batch was not
    acknowledged for `timeout_s` seconds), UnknownTopicError (the topic was deleted meanwhile),
    RecordTooLargeError, NullKeyError, InvalidTimestampError, DiskFullError, MissingExtraError,
    TransactionAbortedError; to a late copy of a task TransactionCommittedError, or
    TransactionOutcomeUnknownError while the driver ends the job.
    """
    if type(task) is not int or not 0 <= task < TASKS_MAX:
        raise InvalidRequestError(f"Tasks are numbered from 0 to {TASKS_MAX - 1}, not {task!r}.")
    client, background = (cluster or Cluster.current()).shared_client()
    attempt = _Writing(client, job, job.first_producer_id + task, timeout_s)
    cutter = Cutter(job, task)
    records = 0
    try:
        for rows in rows_of(batches):
            records += len(rows.values)
            for partition, batch in cutter.cut(rows):
                background.run(attempt.put(partition, batch))
        for partition, batch in cutter.rest():
            background.run(attempt.put(partition, batch))
        background.run(attempt.finish())
    except TransactionEndedError as error:
        transaction = job.transaction(client, timeout_s)
        if transaction is None:
            raise
        raise background.run(transaction.told_to_task(error)) from error
    finally:
        background.call_soon(attempt.close)
    senders = [attempt.senders[partition] for partition in sorted(attempt.senders)]
    return TaskWritten(
        task=task,
        records=records,
        repeated=sum(sender.repeated for sender in senders),
        partitions={number: attempt.senders[number].count for number in sorted(attempt.senders)},
        ranges=[written for sender in senders for written in sender.ranges],
    )


@takes_timeout
def finish_write(
    cluster: Cluster | None,
    job: WriteJob,
    written: Iterable[tuple[int, Mapping[int, int]]],
    *,
    timeout_s: float = 60.0,
) -> None:
    """Ends a job: call it once, on the driver, after the last task. `written` are the tasks, each
    with its `TaskWritten.partitions`.

    A task compares its records with those of an earlier attempt, in the partitions it writes to.
    This call finds the rest: the records of an attempt whose rows went to other partitions, and of
    a job that was divided into more tasks. Leaders remember for a day which producers wrote.

    A job that is a transaction is committed here, if exactly the records that its tasks reported
    are there.

    Raises RewriteMismatchError, UnknownTopicError, PartitionOfflineError, TimeoutError; and of a
    transaction TransactionAbortedError, TransactionCommittedError (this job is committed already),
    TransactionOutcomeUnknownError, AlreadyCommittedError (another of its name is).
    """
    tasks: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for task, partitions in written:
        for partition, count in partitions.items():
            tasks[partition][task] = count
    client, background = (cluster or Cluster.current()).shared_client()
    transaction = job.transaction(client, timeout_s)
    if transaction is not None:
        background.run(_commit(transaction, job.topic, tasks))
        return

    async def check(partition: int) -> None:
        place = TopicPartition(job.topic, partition)
        answer, _ = await JobPartition(client, place, job.topic_id, timeout_s).exchange(
            lambda leader_epoch: DescribeProducers(
                topic_id=job.topic_id,
                partition=partition,
                leader_epoch=leader_epoch,
                first_producer_id=job.first_producer_id,
                producer_id_count=TASKS_MAX,
            )
        )
        found = {producer_id - job.first_producer_id for producer_id in answer.producer_ids}
        unknown = sorted(found - tasks[partition].keys())
        if unknown:
            raise RewriteMismatchError(
                f"An earlier attempt at task {unknown[0]} of this job wrote to "
                f"{job.topic}-{partition}, and the last one did not: its rows changed, or the job "
                "was divided into other tasks. The topic holds rows twice, or rows that are none "
                "of the result. Make the job repeatable: persist what is written before the write."
            )

    background.run(together(check(partition) for partition in range(len(job.start_offsets))))


async def _commit(
    transaction: JobTransaction, topic: str, reported: Mapping[int, Mapping[int, int]]
) -> None:
    found = await transaction.seal(topic)
    for partition in sorted({*found, *reported}):
        there, wanted = found.get(partition, {}), reported.get(partition, {})
        if there == wanted:
            continue
        task = min(
            number for number in {*there, *wanted} if there.get(number) != wanted.get(number)
        )
        raise RewriteMismatchError(
            f"Task {task} of this job reported {wanted.get(task, 0)} records for "
            f"{topic}-{partition}, and {there.get(task, 0)} are there: the rows of a task changed "
            "between its attempts, or the job was divided into other tasks. Nothing of it becomes "
            "visible. Make the job repeatable: persist what is written before the write."
        )
    await transaction.commit()


class _Writing:
    """The senders of one attempt, by partition. Belongs to the client's loop."""

    def __init__(self, client: Client, job: WriteJob, producer_id: int, timeout_s: float) -> None:
        self._client = client
        self._job = job
        self._producer_id = producer_id
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        self.senders: dict[int, NumberedSender] = {}

    async def put(self, partition: int, payload: bytearray) -> None:
        """Passes a batch to the sender of its partition. Waits while too many wait there."""
        job = self._job
        sender = self.senders.get(partition)
        if sender is None:
            place = TopicPartition(job.topic, partition)
            target = JobPartition(self._client, place, job.topic_id, self._timeout_s)
            await target.load_topic()
            age_ms = self._client.environment.clock.wall_ms() - job.timestamp_ms
            sender = self.senders[partition] = NumberedSender(
                target,
                self._producer_id,
                epoch=job.epoch,
                scan_from=job.start_offsets[partition],
                scan_first=age_ms > YOUNG_JOB_MS,
                on_change=self._changed.set,
            )
        await self._until(lambda: sender.has_room)
        sender.put(payload)

    async def finish(self) -> None:
        senders = self.senders.values()
        await self._until(lambda: all(sender.is_idle for sender in senders))
        await asyncio.gather(*(sender.check_end() for sender in senders))

    async def _until(self, holds: Callable[[], bool]) -> None:
        while True:
            self._changed.clear()
            for sender in self.senders.values():
                if sender.failure is not None:
                    raise sender.failure
            if holds():
                return
            await self._changed.wait()

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()

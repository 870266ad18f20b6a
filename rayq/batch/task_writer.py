"""Batch writes that a retried or speculative task does not repeat. Needs the extra `arrow`.

`begin_write` on the driver makes a `WriteJob`: which topic (by id), its ends now, one time stamp
and a range of producer ids. Task `n` of the job writes as producer `first_producer_id + n`, and
cuts its batches by its rows alone: not by time, and not by how the rows arrive. So every attempt at
the task sends the same batches under the same numbers, and the leader appends each once, also when
two attempts run at the same time.

What this promises, without transactions:

- A task writes its rows exactly once where the rows, and their order, are the same in every
  attempt. Where they are not, the attempt fails with `RewriteMismatchError` as soon as it meets a
  batch of an earlier attempt that differs; it never skips rows because other rows have their
  numbers. `finish_write`, on the driver after the last task, finds what attempts wrote elsewhere:
  to partitions that the last attempt at a task did not write to, or as tasks that the job no longer
  has.
- A job that fails leaves what its tasks had written. The next `begin_write` is another job. A
  `WriteJob` that was kept (in a checkpoint, say) makes writing again a repetition. Leaders forget a
  producer a day after its last append. In a job that is older, what is still in the log is
  recognised, but a task that was cut short cannot be finished (`UnknownProducerError`). A
  partition's leader knows 100,000 producers; each task that writes to it is one.
- Readers see records as soon as they are committed, also those of a job that fails later.

A job may be one transaction instead (`transactional_id`): then readers see all of its records at
once, or none. `job_transaction` says how that works.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

from rayq.batch.job_partition import JobPartition
from rayq.batch.job_transaction import JobTransaction, aborted
from rayq.batch.numbered_sender import NumberedSender
from rayq.batch.offset_ranges import snapshot
from rayq.batch.taking_cuts import together
from rayq.client.admin.transactions import check_transactional_id
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.client.consuming.arrow import load_pyarrow
from rayq.client.producing.accumulator import (
    BATCH_OVERHEAD_BYTES,
    HEADER_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
)
from rayq.client.producing.partitioner import partition_of_key
from rayq.client.producing.transaction import check_name
from rayq.client.timeouts import takes_timeout
from rayq.config import HOUR_MS, TopicConfig, parse_stored
from rayq.errors import (
    InvalidRequestError,
    RayqError,
    RecordTooLargeError,
    RewriteMismatchError,
    TransactionEndedError,
    TransactionOutcomeUnknownError,
)
from rayq.records import Headers, OffsetRange, TopicPartition
from rayq.storage.batch import SEQUENCE_COUNT, encode_batch
from rayq.wire.messages import DescribeProducers

logger = logging.getLogger(__name__)

COLUMNS = ("key", "value", "partition", "timestamp", "headers")
"""What may be written. Only `value` has to be there."""

BATCH_BYTES = 512 * 1024
"""Bytes of keys, values and headers that close a batch, where `max_message_bytes` allows."""
BATCH_RECORDS = 8192
ROWS_AT_A_TIME = 8192
"""Rows that are turned from Arrow into Python objects at once."""
KEYLESS_RUN = 4096
"""So many rows without a key and a partition go to one partition, the next so many to the next."""
TASKS_MAX = 2**20
CHOSEN_IDS_FIRST = 2**62
"""Producer ids from here on are chosen by jobs, at random; those below are handed out in turn."""
JOB_BITS = 41
YOUNG_JOB_MS = HOUR_MS
"""Leaders still know the producers of a job that is younger: they remember them for a day."""


class WriteJob(NamedTuple):
    """One batch write, the same in every process that writes. It has plain values only: it pickles,
    and `WriteJob(*list)` makes it of its JSON."""

    topic: str
    topic_id: str
    start_offsets: list[int]
    """The end of each partition when the job began."""
    first_producer_id: int
    timestamp_ms: int
    """Of records without a time of their own: the job's, not the attempt's. The CRC by which
    attempts are compared covers it."""
    batch_bytes: int
    append_time: bool
    """Whether the topic's records carry the leader's time (`message_timestamp_type`)."""
    transactional_id: str | None = None
    """Whose transaction the job is; None: it is none. Then the producer ids are its family."""
    name: str | None = None
    """Under which it commits once."""
    last_name: str | None = None
    """The last name that committed under the transactional id when the job began."""
    owner: str = ""
    epoch: int = 0

    def transaction(self, client: Client, timeout_s: float) -> JobTransaction | None:
        """The job's transaction; None: its records become visible one after the other."""
        if self.transactional_id is None:
            return None
        return JobTransaction(
            client,
            self.transactional_id,
            self.name,
            self.owner,
            self.first_producer_id,
            self.epoch,
            timeout_s,
        )


class TaskWritten(NamedTuple):
    """What became of a task's records: `repeated` of them were there already, sent by an earlier
    attempt or by a try whose answer was lost. `partitions` tells how many each partition got,
    `ranges` are by partition, in order."""

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

    With a `transactional_id` the job is a transaction, and what an earlier job of this id has open
    is aborted. With a `name`, too, it commits once: while it is the last name that committed under
    this id, a job of that name raises AlreadyCommittedError.

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
        start_offsets=[one.end for one in ranges],
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
    """The job that the caller kept, else a new one. A job that is a transaction begins anew: the
    cluster may have ended the one that was kept. Raises InvalidRequestError for a job of another
    topic, and for one that is no transaction where it is to be `atomic`; and what `begin_write`
    raises."""
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
            "The job is no transaction: begin_write makes one with a transactional_id and a name."
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
        raise  # Whoever asked for a commit does not ask for an abort.
    except BaseException:
        try:
            background.run(transaction.abort())
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
    and, where wanted, key (binary or string), partition (int; else by the key's crc32 as a producer
    does, without a key in runs over all partitions), timestamp (a timestamp, or milliseconds; else
    the job's time) and headers (a list of structs of key, or name, and value).

    Raises InvalidRequestError (other columns or types, a partition that does not exist),
    RewriteMismatchError (see above), OutcomeUnknownError or PartitionOfflineError (a batch was not
    acknowledged for `timeout_s` seconds), UnknownTopicError (the topic was deleted meanwhile),
    RecordTooLargeError, NullKeyError, InvalidTimestampError, DiskFullError, MissingExtraError,
    TransactionAbortedError.
    """
    if type(task) is not int or not 0 <= task < TASKS_MAX:
        raise InvalidRequestError(f"Tasks are numbered from 0 to {TASKS_MAX - 1}, not {task!r}.")
    client, background = (cluster or Cluster.current()).shared_client()
    attempt = _Writing(client, job, job.first_producer_id + task, timeout_s)
    cutter = _Cutter(job, task)
    records = 0
    try:
        for rows in _rows_of(batches):
            records += len(rows.values)
            for partition, batch in cutter.cut(rows):
                background.run(attempt.put(partition, batch))
        for partition, batch in cutter.rest():
            background.run(attempt.put(partition, batch))
        background.run(attempt.finish())
    except TransactionEndedError as error:
        raise aborted(error) from error
    finally:
        background.call_soon(attempt.close)
    senders = [attempt.senders[partition] for partition in sorted(attempt.senders)]
    return TaskWritten(
        task=task,
        records=records,
        repeated=sum(sender.repeated for sender in senders),
        partitions={one: attempt.senders[one].count for one in sorted(attempt.senders)},
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
    with what `TaskWritten.partitions` says.

    A task compares what it writes with what an earlier attempt wrote, in the partitions it writes
    to. This call finds the rest: the records of an attempt whose rows went to other partitions, and
    of a job that was divided into more tasks. Leaders remember for a day which producers wrote.

    A job that is a transaction is committed here, if all its tasks reported is there and nothing
    else is.

    Raises RewriteMismatchError, UnknownTopicError, PartitionOfflineError, TimeoutError; and of a
    transaction TransactionAbortedError, TransactionOutcomeUnknownError, AlreadyCommittedError.
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
        task = min(one for one in {*there, *wanted} if there.get(one) != wanted.get(one))
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


# --- from rows to numbered batches ----------------------------------------------------------------


class _Rows(NamedTuple):
    """Some rows, column by column; None where a column is missing."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    partitions: list[int | None] | None
    timestamps_ms: list[int | None] | None
    headers: list[Headers | None] | None


class _Open:
    """The rows of one partition that wait until a batch of them is full."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.timestamps_ms: list[int] = []
        self.headers: list[Headers | None] = []
        self.sizes: list[int] = []
        self.next_sequence = 0


class _Cutter:
    """Divides rows by partition and cuts them into batches. What it makes depends on the rows
    alone."""

    def __init__(self, job: WriteJob, task: int) -> None:
        self._job = job
        self._task = task
        self._open: defaultdict[int, _Open] = defaultdict(_Open)
        self._row = 0

    def cut(self, rows: _Rows) -> Iterator[tuple[int, bytearray]]:
        """Takes rows in. Yields the batches that are full by now, each with its partition."""
        for partition, some in self._divide(rows):
            open_ = self._open[partition]
            self._add(open_, some)
            yield from ((partition, batch) for batch in self._full(open_))

    def rest(self) -> Iterator[tuple[int, bytearray]]:
        """Yields the batches that are not full, at the end."""
        for partition in sorted(self._open):
            open_ = self._open[partition]
            if open_.values:
                yield partition, self._batch(open_, len(open_.values))

    # --- by partition ---------------------------------------------------------------------------

    def _divide(self, rows: _Rows) -> Iterator[tuple[int, _Rows]]:
        places = self._places(rows)
        self._row += len(places)
        distinct = dict.fromkeys(places)
        if len(distinct) <= 1:
            yield from ((partition, rows) for partition in distinct)
            return
        members: dict[int, list[int]] = {partition: [] for partition in distinct}
        for index, partition in enumerate(places):
            members[partition].append(index)
        for partition, chosen in members.items():
            yield partition, _Rows(*(_taken(column, chosen) for column in rows))

    def _places(self, rows: _Rows) -> list[int]:
        """The partition of each row."""
        count = len(self._job.start_offsets)
        length = len(rows.values)
        if rows.partitions is None and rows.keys is None:
            return [self._keyless(index, count) for index in range(self._row, self._row + length)]
        keys: Sequence[bytes | None] = rows.keys or [None] * length
        if rows.partitions is None:
            given: Sequence[int | None] = [None] * length
        else:
            given = rows.partitions
            for partition in set(given):
                if partition is not None and not 0 <= partition < count:
                    raise InvalidRequestError(
                        f"Topic {self._job.topic!r} has partitions 0 to {count - 1}, not "
                        f"{partition}, which the column partition names."
                    )
        return [
            partition
            if partition is not None
            else (self._keyless(row, count) if key is None else partition_of_key(key, count))
            for row, (partition, key) in enumerate(zip(given, keys, strict=True), self._row)
        ]

    def _keyless(self, row: int, count: int) -> int:
        return (self._task + row // KEYLESS_RUN) % count

    # --- into batches ---------------------------------------------------------------------------

    def _add(self, open_: _Open, rows: _Rows) -> None:
        count = len(rows.values)
        default_ms = self._job.timestamp_ms
        keys = rows.keys or [None] * count
        headers = rows.headers or [None] * count
        times = rows.timestamps_ms
        open_.values += rows.values
        open_.keys += keys
        open_.headers += headers
        open_.timestamps_ms += (
            [default_ms] * count
            if times is None
            else [default_ms if time is None else time for time in times]
        )
        open_.sizes += [
            RECORD_OVERHEAD_BYTES + len(value or b"") + len(key or b"")
            for value, key in zip(rows.values, keys, strict=True)
        ]
        if rows.headers is not None:
            first = len(open_.sizes) - count
            for index, some in enumerate(rows.headers, first):
                for name, value in some or ():
                    open_.sizes[index] += HEADER_OVERHEAD_BYTES + len(name.encode()) + len(value)

    def _full(self, open_: _Open) -> Iterator[bytearray]:
        """Yields the full batches. A batch is full when the row after it does not fit in; one row
        always fits."""
        while True:
            ends = list(accumulate(open_.sizes[: BATCH_RECORDS + 1]))
            fitting = max(bisect_right(ends, self._job.batch_bytes), 1)
            fitting = min(fitting, BATCH_RECORDS)
            if fitting >= len(open_.sizes):
                return
            yield self._batch(open_, fitting)

    def _batch(self, open_: _Open, count: int) -> bytearray:
        if open_.next_sequence + count > SEQUENCE_COUNT:
            raise RecordTooLargeError(
                f"One task writes at most {SEQUENCE_COUNT} records to a partition: use more tasks."
            )
        producer = self._job.first_producer_id + self._task
        batch = encode_batch(
            open_.values[:count],
            open_.keys[:count],
            open_.headers[:count],
            open_.timestamps_ms[:count],
            producer_id=producer,
            producer_epoch=self._job.epoch,
            base_sequence=open_.next_sequence,
            append_time=self._job.append_time,
            is_transactional=self._job.transactional_id is not None,
        )
        open_.next_sequence += count
        for column in (open_.values, open_.keys, open_.headers, open_.timestamps_ms, open_.sizes):
            del column[:count]
        return batch


def _taken(column: list[Any] | None, chosen: Sequence[int]) -> Any:
    return None if column is None else [column[index] for index in chosen]


# --- from Arrow to rows ---------------------------------------------------------------------------


def _rows_of(batches: Iterable[Any]) -> Iterator[_Rows]:
    pa = load_pyarrow()
    for given in batches:
        if not isinstance(given, (pa.RecordBatch, pa.Table)):
            raise InvalidRequestError(
                f"What is written are pyarrow RecordBatches or Tables, not {type(given).__name__}."
            )
        names = given.schema.names
        unknown = [name for name in names if name not in COLUMNS]
        if "value" not in names or unknown or len(set(names)) < len(names):
            raise InvalidRequestError(
                f"The columns to write are value and, where wanted, key, partition, timestamp and "
                f"headers; not {', '.join(names) or 'none'}. Select or rename columns first."
            )
        for start in range(0, given.num_rows, ROWS_AT_A_TIME):
            some = given.slice(start, ROWS_AT_A_TIME)
            columns = {name: some.column(name) for name in names}
            partitions = columns.get("partition")
            timestamps = columns.get("timestamp")
            yield _Rows(
                values=bytes_of("value", columns["value"]),
                keys=bytes_of("key", columns["key"]) if "key" in columns else None,
                partitions=None if partitions is None else _partitions(pa, partitions),
                timestamps_ms=None if timestamps is None else _times_ms(pa, timestamps),
                headers=headers_of(columns["headers"]) if "headers" in columns else None,
            )


def _wrong_type(name: str, kind: Any, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"The column {name} has type {kind}; it has to be {wanted}.")


def bytes_of(name: str, column: Any) -> list[bytes | None]:
    """A binary or string column; raises InvalidRequestError for another one."""
    pa = load_pyarrow()
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_string(kind):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(kind):
        column = column.cast(pa.large_binary())
    elif not (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_null(kind)
    ):
        raise _wrong_type(name, kind, "binary or string")
    found: list[bytes | None] = column.to_pylist()
    return found


def _partitions(pa: Any, column: Any) -> list[int | None]:
    if not (pa.types.is_integer(column.type) or pa.types.is_null(column.type)):
        raise _wrong_type("partition", column.type, "an integer")
    found: list[int | None] = column.to_pylist()
    return found


def _times_ms(pa: Any, column: Any) -> list[int | None]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        in_ms = column.cast(pa.timestamp("ms", tz=kind.tz), safe=False)
        column = in_ms.cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise _wrong_type("timestamp", kind, "a timestamp, or an integer of milliseconds")
    found: list[int | None] = column.to_pylist()
    if any(time is not None and time < 0 for time in found):
        raise InvalidRequestError("The column timestamp has a time before 1970.")
    return found


def headers_of(column: Any) -> list[Headers | None]:
    """A column of headers as `write_task` takes it; raises InvalidRequestError for another one."""
    pa = load_pyarrow()
    kind = column.type
    wanted = "a list of structs of key (or name) and value"
    if pa.types.is_null(kind):
        return [None] * len(column)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and pa.types.is_null(kind.value_type):
        return [None] * len(column)  # what Arrow makes of lists that are all empty
    if not is_list or not pa.types.is_struct(kind.value_type):
        raise _wrong_type("headers", kind, wanted)
    fields = [field.name for field in kind.value_type]
    names = [name for name in ("key", "name") if name in fields]
    if len(fields) != 2 or len(names) != 1 or "value" not in fields:
        raise _wrong_type("headers", kind, wanted)
    (name,) = names
    found: list[Headers | None] = []
    for some in column.to_pylist():
        pairs = [(one[name], one["value"]) for one in some or ()]
        for key, value in pairs:
            if not isinstance(key, str) or not isinstance(value, bytes):
                raise InvalidRequestError(
                    f"A header is a pair of str and bytes, neither of them null, not "
                    f"{(key, value)!r}."
                )
        found.append(pairs or None)
    return found

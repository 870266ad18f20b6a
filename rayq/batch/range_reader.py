"""Reader of one range of offsets of one partition into Arrow: it returns all of it, or raises.
Needs the extra `arrow`.

The consumer's code fetches, retries and finds leaders that moved. Only the end differs: reading
stops at an offset, and it fails after some time without progress. Records in the object store are
read there (`rayq.batch.direct_reads`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rayq.batch.direct_reads import DirectReads
from rayq.batch.job_partition import JobPartition
from rayq.batch.offset_ranges import Split
from rayq.batch.stored_ranges import uses_remote_storage
from rayq.client.background import BackgroundLoop
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.client.consuming.arrow import binary_column, headers_column, int64_column, load_pyarrow
from rayq.client.consuming.fetcher import Fetcher
from rayq.client.consuming.subscription import AssignedPartition, Slice, Stream, Subscription
from rayq.client.record_errors import is_final, is_skipped
from rayq.client.timeouts import takes_timeout
from rayq.client.wakeup import Wakeup
from rayq.config import MIB, ConsumerConfig, OnCorrupt
from rayq.core.cluster.topic_changes import TRANSACTIONS_TOPIC
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    OpenTransactionError,
    PartitionOfflineError,
    RayqError,
    TimeoutError,
    UnreadableRecordError,
)
from rayq.messages import ListTransactions
from rayq.messages.transaction_ids import coordinator_of

logger = logging.getLogger(__name__)

COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp")
"""The columns read by default, in this order. There is one more column, `headers`."""

BATCH_RECORDS = 65_536
"""Default of `read_range(batch_records=...)`."""
BATCH_BYTES = 64 * MIB
"""Size at which a record batch is returned, however few records it has."""
TIMESTAMP_MAX_MS = (2**63 - 1) // 1000
"""Maximum timestamp: batch jobs have times in microseconds."""
STEP_RECORDS = 4096
STEP_BYTES = 8 * MIB
"""Maximum number of records and bytes turned into Arrow at a time, while they are in the
processor's cache."""
COORDINATOR_TIMEOUT_S = 5.0
"""Timeout for the name of an open transaction, for an error."""
FETCH_BUFFER_BYTES = 16 * MIB
"""Maximum number of bytes fetched ahead of the reader; a process may read many splits at once."""


def read_schema(columns: Sequence[str] = COLUMNS) -> Any:
    """The `pyarrow.Schema` of the batches of `read_range`, with the types of Spark's Kafka source:
    key and value binary, topic string, partition int32, offset int64, timestamp in microseconds
    (UTC), headers a list of structs of key and value, never null. Raises InvalidRequestError,
    MissingExtraError."""
    pa = load_pyarrow()
    header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    kinds = {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "headers": pa.list_(header),
    }
    unknown = [name for name in columns if name not in kinds]
    if unknown or not columns or len(set(columns)) < len(columns):
        raise InvalidRequestError(
            f"The columns of records are {', '.join(kinds)}, each at most once; not "
            f"{', '.join(map(repr, unknown or columns)) or 'none'}."
        )
    return pa.schema([pa.field(name, kinds[name]) for name in columns])


@takes_timeout
def read_range(
    cluster: Cluster | None,
    split: Split,
    *,
    columns: Sequence[str] = COLUMNS,
    batch_records: int = BATCH_RECORDS,
    fail_on_data_loss: bool = True,
    large_values: str | None = None,
    on_corrupt: OnCorrupt = "raise",
    timeout_s: float = 60.0,
) -> Iterator[Any]:
    """Yields the records of the split, in order, as `pyarrow.RecordBatch`es of at most
    `batch_records` records and about 64 MiB.

    These are exactly the records with offsets `split.start <= offset < split.end` that the log
    holds (a compacted log has gaps), never fewer, and without those of transactions that were
    aborted or that `split.without` names. Leaders that move are followed, failures are retried, and
    without any progress for `timeout_s` seconds it raises. All readers of a process share their
    connections. `cluster`: None means the process's current one. `large_values` is the URL below
    which values that are objects are read, with this process's credentials. Closing the generator
    stops fetching.

    Raises PartitionOfflineError or TimeoutError (no progress), OpenTransactionError (no progress,
    because `split.without` is None and a transaction is not decided), UnknownTopicError (the topic
    was deleted meanwhile, or is another one of that name by now), OffsetOutOfRangeError (records of
    the split expired meanwhile) and LogTruncatedError (an unclean election took them back); with
    `fail_on_data_loss=False` the last two are logged, and the rest is read. Also raises
    UnreadableRecordError (records of the split cannot be read: it is raised after all records
    before them, with their `offset` and the `next_offset`, to read the rest as another split; with
    `on_corrupt="skip"` they are logged and left out), InvalidRequestError, MissingExtraError.
    """
    schema = read_schema(columns)
    if type(batch_records) is not int or batch_records < 1:
        raise InvalidRequestError(f"batch_records has to be a positive int, not {batch_records!r}.")
    client, background = (cluster or Cluster.current()).shared_client()
    reset: Literal["none", "earliest"] = "none" if fail_on_data_loss else "earliest"
    reader = _Reader(client, background, split, reset, timeout_s, large_values, on_corrupt)
    return _batches(reader, schema, batch_records)


def _batches(reader: _Reader, schema: Any, batch_records: int) -> Iterator[Any]:
    if reader.split.is_empty:
        return
    pa = load_pyarrow()
    background = reader.background
    background.run(reader.open())
    try:
        steps: list[Any] = []
        records = size_bytes = 0
        while True:
            try:
                slices = reader.next_slices(batch_records - records)
            except RayqError:
                if steps:  # Records read before are returned first.
                    yield _joined(pa, steps)
                raise
            if not slices:
                break
            step = _batch_of(slices, schema)
            steps.append(step)
            records += step.num_rows
            size_bytes += step.nbytes
            if records >= batch_records or size_bytes >= BATCH_BYTES:
                yield _joined(pa, steps)
                steps, records, size_bytes = [], 0, 0
                reader.made_progress()
        if steps:
            yield _joined(pa, steps)
    finally:
        background.call_soon(reader.close)


def _joined(pa: Any, steps: list[Any]) -> Any:
    if len(steps) == 1:
        return steps[0]
    (batch,) = pa.Table.from_batches(steps).combine_chunks().to_batches()
    return batch


def _batch_of(slices: list[Slice], schema: Any) -> Any:
    """One record batch from slices of one partition."""
    pa = load_pyarrow()
    counts = [len(part.values) for part in slices]
    count = sum(counts)
    made: list[Any] = []
    for field in schema:
        if field.name in ("key", "value"):
            parts = [part.keys if field.name == "key" else part.values for part in slices]
            made.append(binary_column(pa, parts, counts))
        elif field.name == "topic":
            made.append(pa.repeat(slices[0].topic, count))
        elif field.name == "partition":
            made.append(pa.repeat(pa.scalar(slices[0].partition, pa.int32()), count))
        elif field.name == "offset":
            made.append(int64_column(pa, [part.offsets for part in slices], pa.int64()))
        elif field.name == "timestamp":
            kind = pa.timestamp("ms", tz="UTC")
            times = int64_column(pa, [part.timestamps_ms for part in slices], kind)
            made.append(times.cast(field.type))
        else:
            made.append(headers_column(pa, [part.headers for part in slices], counts, field.type))
    return pa.RecordBatch.from_arrays(made, schema=schema)


class _Reader:
    """A stream with an end, and the fetcher that fills it. The reading thread calls `next_slices`;
    `open` and `close` run on the client's loop."""

    def __init__(
        self,
        client: Client,
        background: BackgroundLoop,
        split: Split,
        reset: Literal["none", "earliest"],
        timeout_s: float,
        large_values: str | None,
        on_corrupt: OnCorrupt,
    ) -> None:
        self._client = client
        self.background = background
        self.split = split
        self._timeout_s = timeout_s
        self._partition = JobPartition(client, split.place, split.topic_id, timeout_s)
        self._news = Wakeup()
        self._config = ConsumerConfig(
            auto_offset_reset=reset,
            fetch_buffer_bytes=FETCH_BUFFER_BYTES,
            large_values=large_values,
            on_corrupt=on_corrupt,
        )
        self._assigned = AssignedPartition(self._stream_from(split.start))
        self._fetcher: Fetcher | None = None
        self._direct: DirectReads | None = None
        self._progress_at = 0.0
        self._received_bytes = 0

    def _stream_from(self, offset: int) -> Stream:
        split = self.split
        return Stream(
            split.place,
            offset,
            topic_id=split.topic_id,
            end=split.end,
            without=None if split.without is None else frozenset(split.without),
            timestamp_max_ms=TIMESTAMP_MAX_MS,
        )

    # --- the loop -------------------------------------------------------------------------------

    async def open(self) -> None:
        split = self.split
        await self._partition.load_topic()
        subscription = Subscription()
        subscription.assigned = {split.place: self._assigned}
        if await uses_remote_storage(self._client, split.topic, self._timeout_s):
            self._direct = DirectReads(self._partition, split.end)
        self._fetcher = Fetcher(
            self._client,
            self._config,
            subscription,
            read_directly=None if self._direct is None else self._direct.next,
        )
        self._fetcher.add_listener(self._news.set)
        self._fetcher.start([self._assigned.stream])
        self.made_progress()

    async def _open_transaction(self) -> str | None:
        """A description of the transaction that reading waits for; None if there is none."""
        log = await self._partition.open_transactions()
        first = min(log.open, key=lambda transaction: transaction[2], default=None)
        if first is None or first[2] >= self.split.end:
            return None
        family, epoch, offset = first
        transactional_id = await self._transactional_id(family)
        return (
            f"the transaction of {transactional_id} (producer {family}, epoch {epoch}) that began "
            f"at offset {offset} is not decided"
        )

    async def _transactional_id(self, family: int) -> str:
        """A text with the transactional id of a producer family, as far as the coordinator tells
        it."""
        partition = coordinator_of(family)
        try:
            answer, _ = await self._client.exchange_with_leader(
                TRANSACTIONS_TOPIC,
                partition,
                lambda topic_id, leader: ListTransactions(topic_id, partition, leader.epoch),
                timeout_s=COORDINATOR_TIMEOUT_S,
                attempt_timeout_s=COORDINATOR_TIMEOUT_S,
            )
        except RayqError as error:
            logger.info("no transactional id of producer %d: %s", family, error)
        else:
            for transaction in answer.transactions:
                if transaction.family == family:
                    return f"transactional id {transaction.transactional_id!r}"
        return "a transactional id"

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
        self._read_through_leader()

    def _read_through_leader(self) -> None:
        if self._direct is not None:
            self._direct.stop()

    # --- the reading thread ---------------------------------------------------------------------

    def made_progress(self) -> None:
        self._progress_at = self._client.environment.clock.monotonic()

    def next_slices(self, records_max: int) -> list[Slice]:
        """The next records, at most `records_max`; waits for the first. [] once all were
        returned."""
        while not self._assigned.stream.is_finished:
            self._news.clear()
            if slices := self._take(min(records_max, STEP_RECORDS)):
                self.made_progress()
                return slices
            stream = self._assigned.stream
            if stream.is_finished:
                break
            if (error := stream.error) is not None and not stream.has_records:
                self._ended_by(error)
                break
            self._wait(stream)
        return []

    def _take(self, records_max: int) -> list[Slice]:
        assert self._fetcher is not None
        taken: list[Slice] = []
        size_bytes = 0
        while records_max > 0 and size_bytes < STEP_BYTES:
            stream = self._assigned.stream
            try:
                found = stream.peek_batch(records_max, self._config.check_crcs)
            except RayqError as error:
                if taken:
                    break
                if not isinstance(error, UnreadableRecordError):
                    raise
                if not is_final(error):
                    assert isinstance(error, CorruptBatchError)
                    self._fetch_again(stream, error)
                    break
                if not is_skipped(error, self._config.on_corrupt):
                    self._ended_by(error)
                stream.skip_batch()
                continue
            if found is None:
                break
            batch, part = found
            taken.append(part)
            stream.consume(batch, len(part.values))
            records_max -= len(part.values)
            size_bytes += sum(map(len, filter(None, part.values)))
        self._fetcher.has_room()
        return taken

    def _fetch_again(self, stream: Stream, error: CorruptBatchError) -> None:
        assert self._fetcher is not None and stream.position is not None
        self.background.call_soon(self._read_through_leader)
        fresh = self._stream_from(stream.position)
        self._assigned.stream = fresh
        self._fetcher.replace_corrupt(stream, fresh, stream.position, error)

    def _ended_by(self, error: RayqError) -> None:
        """Raises the error, unless it is a loss that the caller accepts."""
        if self._config.auto_offset_reset == "none" or not isinstance(error, LogTruncatedError):
            raise error.with_message(self._told(error))
        logger.warning("%s Reading what is left (fail_on_data_loss=False).", self._told(error))

    def _told(self, error: RayqError) -> str:
        split = self.split
        hint = ""
        if isinstance(error, OffsetOutOfRangeError):
            hint = " Records of it are gone; fail_on_data_loss=False reads the rest."
        return (
            f"Reading {split.topic}-{split.partition} from offset {split.start} to {split.end} "
            f"stopped at {self._assigned.stream.position}: {error}{hint}"
        )

    def _wait(self, stream: Stream) -> None:
        """Waits until there is news. Raises PartitionOfflineError, OpenTransactionError or
        TimeoutError after `timeout_s` without progress."""
        if stream.received_bytes != self._received_bytes:
            self._received_bytes = stream.received_bytes
            self.made_progress()
        left_s = self._progress_at + self._timeout_s - self._client.environment.clock.monotonic()
        if left_s > 0:
            self._news.wait(left_s)
            return
        trouble = stream.trouble
        waits_for_lso = self.split.without is None and (stream.log_end or 0) < self.split.end
        if trouble is None and waits_for_lso:
            found = self.background.run(self._open_transaction())
            if found is not None:
                reason = f"for {self._timeout_s:g} s {found}: it ends with its commit or time-out."
                raise OpenTransactionError(self._told(OpenTransactionError(reason)))
        kind = PartitionOfflineError if isinstance(trouble, PartitionOfflineError) else TimeoutError
        last = trouble or "its leader answers, but has no such records (yet)"
        raise kind(
            self._told(kind(f"no progress for {self._timeout_s:g} s. The last reason: {last}"))
        )

"""Producers: `AsyncProducer` on the caller's event loop, `Producer` for threads.

Records are appended by the caller's own thread; everything else happens on the client's loop.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from zlib import crc32

from rayq.client.accumulator import (
    BATCH_OVERHEAD_BYTES,
    HEADER_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    Accumulator,
    Batch,
    PartitionQueue,
    running_sizes,
)
from rayq.client.background import BackgroundLoop
from rayq.client.client import Client
from rayq.client.futures import DeliveryFuture, ManyDeliveryFuture, OnDelivery, Part, discard
from rayq.client.partitioner import call_partitioner, next_sticky_partition
from rayq.client.sender import Sender
from rayq.config import Partitioner, ProducerConfig, TopicConfig, parse
from rayq.errors import (
    BufferFullError,
    ClosedError,
    DeliveryError,
    InvalidRequestError,
    InvalidTimestampError,
    RayqError,
    RecordTooLargeError,
    TimeoutError,
)
from rayq.records import Headers
from rayq.storage.batch import encode_batch
from rayq.wire.messages import TopicMetadata

logger = logging.getLogger(__name__)


class _Topic:
    """A topic as `send` sees it: its queues, and which of them is next without a key."""

    def __init__(
        self, metadata: TopicMetadata, config: ProducerConfig, known: _Topic | None
    ) -> None:
        topic_config = parse(TopicConfig, metadata.config)
        self.topic_id = metadata.topic_id
        self.max_message_bytes = topic_config.max_message_bytes
        room_bytes = max(self.max_message_bytes - BATCH_OVERHEAD_BYTES, 1)
        self.limit_bytes = min(config.batch_size, room_bytes)
        append_time = topic_config.message_timestamp_type == "append"
        self.queues: list[PartitionQueue] = []
        if known is not None and known.topic_id == metadata.topic_id:
            self.queues = known.queues[:]
            for queue in self.queues:
                queue.limit_bytes = self.limit_bytes
                queue.append_time = append_time
        for partition in range(len(self.queues), len(metadata.partitions)):
            self.queues.append(
                PartitionQueue(
                    metadata.name, metadata.topic_id, partition, self.limit_bytes, append_time
                )
            )
        self.count = len(self.queues)
        led = [one.partition for one in metadata.partitions if one.leader is not None]
        self.sticky_candidates = led or list(range(self.count))
        self.sticky = self.queues[self.sticky_candidates[0]]


class AsyncProducer:
    """Produces on the running event loop; made by `cluster.async_producer(**config)`.

    Its `send` may be awaited for the acceptance of the record; what it returns, for its delivery::

        future = await producer.send("flights", b"value")
        metadata = await future
    """

    def __init__(
        self,
        client: Client,
        config: ProducerConfig,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.client = client
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._topics: dict[str, _Topic] = {}
        self._dirty: dict[PartitionQueue, None] = {}
        self._is_work_announced = False
        self._undelivered = 0
        self._first_error: RayqError | None = None
        self.is_closed = False
        self._wall_ms = client.env.clock.wall_ms
        self.accumulator = Accumulator(config, client.env.clock.monotonic, self._announce)
        self._sender = Sender(client, config, self.accumulator, self._failed)
        client.metadata.add_listener(self._metadata_changed)

    # --- any thread -----------------------------------------------------------------------------

    def offer(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Iterable[tuple[str, bytes]] | None,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> DeliveryFuture | None:
        """Appends a record without waiting, from any thread. None: the topic's metadata is missing
        or the buffer is full."""
        known = self._topics.get(topic)
        if known is None:
            return None
        size_bytes = RECORD_OVERHEAD_BYTES
        if value is not None:
            if not isinstance(value, bytes):
                raise _not_bytes("value", value)
            size_bytes += len(value)
        if key is not None:
            if not isinstance(key, bytes):
                raise _not_bytes("key", key)
            size_bytes += len(key)
        checked: Headers | None = None
        if headers:
            checked, headers_bytes = _check_headers(headers)
            size_bytes += headers_bytes
        if timestamp_ms is None:
            timestamp_ms = self._wall_ms()
        else:
            _check_timestamp(timestamp_ms)
        if partition is not None:
            queue = _queue_of(known, topic, partition)
        elif self.config.partitioner is not None:
            queue = known.queues[call_partitioner(self.config.partitioner, key, known.count)]
        elif key is not None:
            queue = known.queues[crc32(key) % known.count]
        else:
            queue = known.sticky
            batch = queue.open
            if batch is None or batch.size_bytes + size_bytes > batch.reserved_bytes:
                queue = self._next_sticky(known)
        if size_bytes > known.limit_bytes:
            self._check_size(known, value, key, checked, size_bytes)
        return self.accumulator.append(queue, value, key, checked, timestamp_ms, size_bytes)

    def offer_many(self, job: _ManyJob) -> bool:
        """Appends what it can of a `send_many`, from any thread. False: not all went in."""
        accumulator = self.accumulator
        while job.pending:
            queue, column = job.pending[0]
            if queue is not None:
                target = queue
            else:
                target = job.topic.sticky
                if target.open is None or job.is_sticky_full:
                    target = self._next_sticky(job.topic)
            before = column.start
            column.start = accumulator.append_many(
                target,
                column.values,
                column.keys,
                column.ends,
                before,
                job.timestamp_ms,
                job.parts,
                one_batch=queue is None,
            )
            if column.start == len(column.values):
                job.pending.pop(0)
            elif column.start == before:
                return False
            job.is_sticky_full = queue is None
        return True

    def job_of_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        partition: int | None,
    ) -> _ManyJob | None:
        """Checks the arguments of a `send_many` and divides them by partition. None: the topic's
        metadata is missing."""
        known = self._topics.get(topic)
        if known is None:
            return None
        values = values if isinstance(values, list) else list(values)
        _check_column("value", values)
        if keys is not None:
            keys = keys if isinstance(keys, list) else list(keys)
            _check_column("key", keys)
            if len(keys) != len(values):
                raise InvalidRequestError(
                    f"send_many got {len(values)} values and {len(keys)} keys: it needs one each."
                )
        ends = running_sizes(values, keys)
        longest = max(map(int.__sub__, ends[1:], ends), default=0) + RECORD_OVERHEAD_BYTES
        if longest > known.limit_bytes:
            for index, value in enumerate(values):
                size_bytes = ends[index + 1] - ends[index] + RECORD_OVERHEAD_BYTES
                if size_bytes > known.limit_bytes:
                    key = None if keys is None else keys[index]
                    self._check_size(known, value, key, None, size_bytes)
        job = _ManyJob(known, self._wall_ms())
        if not values:
            return job
        if partition is not None:
            job.add(_queue_of(known, topic, partition), _Column(values, keys, ends))
        elif keys is None and self.config.partitioner is None:
            job.add(None, _Column(values, None, ends))
        else:
            self._divide(job, known, values, keys)
        return job

    def _divide(
        self,
        job: _ManyJob,
        known: _Topic,
        values: list[bytes | None],
        keys: list[bytes | None] | None,
    ) -> None:
        partitioner: Partitioner | None = self.config.partitioner
        count = known.count
        all_keys: Sequence[bytes | None] = [None] * len(values) if keys is None else keys
        columns: dict[int | None, tuple[list[bytes | None], list[bytes | None]]] = {}
        places: list[int | None]
        if partitioner is not None:
            places = [call_partitioner(partitioner, key, count) for key in all_keys]
        else:
            places = [None if key is None else crc32(key) % count for key in all_keys]
        for place in dict.fromkeys(places):
            columns[place] = ([], [])
        appends = {place: (pair[0].append, pair[1].append) for place, pair in columns.items()}
        for place, value, key in zip(places, values, all_keys, strict=True):
            add_value, add_key = appends[place]
            add_value(value)
            add_key(key)
        for place, (some_values, some_keys) in columns.items():
            queue = None if place is None else known.queues[place]
            kept_keys = None if keys is None or place is None else some_keys
            ends = running_sizes(some_values, kept_keys)
            job.add(queue, _Column(some_values, kept_keys, ends))

    def _next_sticky(self, known: _Topic) -> PartitionQueue:
        partition = next_sticky_partition(
            known.sticky_candidates, known.sticky.partition, self.client.env.random
        )
        known.sticky = known.queues[partition]
        return known.sticky

    def knows(self, topic: str) -> bool:
        return topic in self._topics

    def forked(self) -> None:
        """In a forked child nothing sends: every use raises ClosedError. The accumulator is another
        one, because the parent's may have been copied while a thread held its lock."""
        self.is_closed = True
        self.accumulator = Accumulator(self.config, self._wall_ms, lambda _queue: None)
        self.accumulator.close()
        self._topics = {}

    def _check_size(
        self,
        known: _Topic,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        size_bytes: int,
    ) -> None:
        """A record larger than a batch goes alone; the topic's limit is on its stored size."""
        if size_bytes + BATCH_OVERHEAD_BYTES <= known.max_message_bytes:
            return
        stored_bytes = len(
            encode_batch([value], [key], [headers], compression=self.config.compression_type)
        )
        if stored_bytes > known.max_message_bytes:
            raise RecordTooLargeError(
                f"A record of {size_bytes} bytes ({stored_bytes} as it would be stored) is above "
                f"the topic's max_message_bytes of {known.max_message_bytes}: send less, or raise "
                "it with admin.alter_topic_config."
            )

    def _announce(self, queue: PartitionQueue) -> None:
        """Passes a queue to the sender, on its loop. Called under the accumulator's lock."""
        self._dirty[queue] = None
        if self._is_work_announced:
            return
        self._is_work_announced = True
        if threading.get_ident() == self._loop_thread:
            self._loop.call_soon(self._work)
        else:
            self._loop.call_soon_threadsafe(self._work)

    # --- the loop -------------------------------------------------------------------------------

    def _work(self) -> None:
        self._is_work_announced = False
        dirty, self._dirty = self._dirty, {}
        self._sender.work(list(dirty))

    def _failed(self, batch: Batch, error: RayqError) -> None:
        self._undelivered += batch.count
        if self._first_error is None:
            self._first_error = error

    def _metadata_changed(self) -> None:
        for name, known in list(self._topics.items()):
            metadata = self.client.metadata.topics.get(name)
            if metadata is None:
                del self._topics[name]
                self.client.drop_interest(name)
            else:
                self._topics[name] = _Topic(metadata, self.config, known)

    async def load_topic(self, topic: str, *, timeout_s: float) -> None:
        """Fetches the metadata that `offer` needs. Raises UnknownTopicError."""
        self.check_open()
        metadata = await self.client.topic(topic, timeout_s=timeout_s)
        if topic not in self._topics:
            self._topics[topic] = _Topic(metadata, self.config, None)
            self.client.add_interest(topic)

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> DeliveryFuture:
        """As `Producer.send`: returns once the record is accepted."""
        deadline = self._block_deadline()
        while True:
            self.check_open()
            future = self.offer(topic, value, key, headers, partition, timestamp_ms)
            if future is not None:
                if on_delivery is not None:
                    future.call_on_delivery(on_delivery)
                return future
            await self._wait_ready(topic, len(value or b""), deadline)

    async def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        partition: int | None = None,
    ) -> ManyDeliveryFuture:
        """As `Producer.send_many`: returns once all records are accepted."""
        deadline = self._block_deadline()
        self.check_open()
        while (job := self.job_of_many(topic, values, keys, partition)) is None:
            await self._wait_ready(topic, 0, deadline)
        while not self.offer_many(job):
            self.check_open()
            await self._wait_ready(topic, job.next_size_bytes(), self._block_deadline())
        return ManyDeliveryFuture(job.parts)

    def _block_deadline(self) -> float:
        return self.client.now + self.config.max_block_ms / 1000

    async def _wait_ready(self, topic: str, size_bytes: int, deadline: float) -> None:
        left_s = max(deadline - self.client.now, 0.001)
        if topic not in self._topics:
            await self.load_topic(topic, timeout_s=left_s)
            return
        room = self._loop.create_future()

        def arrive() -> None:
            if not room.done():
                room.set_result(None)

        self.accumulator.when_room(
            size_bytes + RECORD_OVERHEAD_BYTES,
            lambda: discard(self._loop.call_soon_threadsafe(arrive)),
        )
        try:
            async with asyncio.timeout(left_s):
                await room
        except builtins.TimeoutError:
            raise buffer_full_error(self.config) from None

    async def flush(self, timeout_s: float | None = None) -> None:
        """As `Producer.flush`."""
        self.accumulator.is_flushing += 1
        try:
            self._sender.hurry()
            batches = self.accumulator.incomplete()
            future = ManyDeliveryFuture([Part(batch, 0, 0) for batch in batches])
            try:
                async with asyncio.timeout(timeout_s):
                    await _settled(future)
            except builtins.TimeoutError:
                waiting = sum(not batch.is_done for batch in batches)
                raise TimeoutError(
                    f"flush: {waiting} batches are still under way after {timeout_s} s. They go "
                    "on until delivery_timeout_ms: flush again to wait for them."
                ) from None
        finally:
            self.accumulator.is_flushing -= 1
        count, error = self._undelivered, self._first_error
        self._undelivered, self._first_error = 0, None
        if error is not None:
            raise DeliveryError(
                f"{count} records that were accepted since the last flush were not delivered. The "
                f"first failed with {type(error).__name__}: {error}"
            ) from error

    async def close(self, timeout_s: float | None = None) -> None:
        """As `Producer.close`."""
        if self.is_closed:
            return
        self.is_closed = True
        self.accumulator.close()
        try:
            await self.flush(timeout_s)
        finally:
            self._release()

    def abandon(self) -> None:
        """Closes without waiting: what is not delivered fails."""
        if not self.is_closed:
            self.is_closed = True
            self.accumulator.close()
            self._release()

    def _release(self) -> None:
        self._sender.close()
        self.client.metadata.remove_listener(self._metadata_changed)
        for topic in self._topics:
            self.client.drop_interest(topic)
        self._topics = {}
        self._on_close()

    def check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("The producer is closed: make a new one from the cluster.")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except RayqError as undelivered:
            if error is None:
                raise
            logger.error("%s", undelivered)  # the error of the block goes first


class Producer:
    """Produces from any number of threads; made by `cluster.producer(**config)`.

    `send` returns at once; the record travels in a batch with others of its partition. Use it as a
    context manager, or call `close`: both deliver what was sent.
    """

    def __init__(self, core: AsyncProducer, background: BackgroundLoop) -> None:
        self._core = core
        self._background = background
        self._offer = core.offer
        background.on_fork(self._forked)

    @property
    def config(self) -> ProducerConfig:
        return self._core.config

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> DeliveryFuture:
        """Accepts one record and returns the future of its `RecordMetadata`.

        `value` is bytes, or None for a tombstone. Without `partition` the configured partitioner
        chooses. `timestamp_ms` is Unix time, now by default. `on_delivery(metadata, error)` is
        called on the client's event-loop thread, where it must not block.

        Blocks up to `max_block_ms` while the topic is not known yet or the buffer is full. Raises
        BufferFullError, UnknownTopicError, RecordTooLargeError, InvalidTimestampError,
        InvalidRequestError (no such partition), ClosedError, TypeError (not bytes).
        """
        future = self._offer(topic, value, key, headers, partition, timestamp_ms)
        if future is None:
            deadline = self._deadline()
            while future is None:
                self._wait_ready(topic, len(value or b""), deadline)
                future = self._offer(topic, value, key, headers, partition, timestamp_ms)
        if on_delivery is not None:
            future.call_on_delivery(on_delivery)
        return future

    def send_many(
        self,
        topic: str,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        partition: int | None = None,
    ) -> ManyDeliveryFuture:
        """Accepts any number of records and returns the future of where they went:
        `list[OffsetRange]`, one for each run of offsets.

        `keys` has one entry (or None) for each value; without keys the batches spread over the
        partitions. Blocks as `send` does, each time the buffer is full. When it raises
        BufferFullError half-way, the records before stay accepted. Raises as `send` does.
        """
        deadline = self._deadline()
        while (job := self._core.job_of_many(topic, values, keys, partition)) is None:
            self._wait_ready(topic, 0, deadline)
        while not self._core.offer_many(job):
            self._wait_ready(topic, job.next_size_bytes(), self._deadline())
        return ManyDeliveryFuture(job.parts)

    def _deadline(self) -> float:
        return self._core.client.now + self.config.max_block_ms / 1000

    def _wait_ready(self, topic: str, size_bytes: int, deadline: float) -> None:
        core = self._core
        core.check_open()
        if self._background.is_current_thread:
            raise BufferFullError(
                "send() would have to wait (the buffer is full, or the topic is not known yet), "
                "which a delivery callback must not: send from another thread."
            )
        left_s = max(deadline - core.client.now, 0.001)
        if not core.knows(topic):
            self._background.run(core.load_topic(topic, timeout_s=left_s))
            return
        self._background.check_callable()
        room = threading.Event()
        core.accumulator.when_room(size_bytes + RECORD_OVERHEAD_BYTES, room.set)
        if not room.wait(left_s):
            raise buffer_full_error(self.config)

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything accepted before is delivered. Raises DeliveryError if anything
        accepted since the last flush was not, TimeoutError after `timeout_s` seconds."""
        self._background.run(self._core.flush(timeout_s))

    def close(self, timeout_s: float | None = None) -> None:
        """Flushes, then closes; idempotent. What is not delivered after `timeout_s` seconds (None:
        `delivery_timeout_ms` decides) fails. Raises as `flush` does."""
        if not self._core.is_closed:
            self._background.run(self._core.close(timeout_s))

    def _forked(self) -> None:
        self._core.forked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RayqError as undelivered:
            if error is None:
                raise
            logger.error("%s", undelivered)  # the error of the block goes first


class _Column:
    """Records of `send_many` for one partition, of which those from `start` are still to go."""

    def __init__(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        ends: Sequence[int],
    ) -> None:
        self.values = values
        self.keys = keys
        self.ends = ends
        self.start = 0


class _ManyJob:
    """A `send_many` under way."""

    def __init__(self, topic: _Topic, timestamp_ms: int) -> None:
        self.topic = topic
        self.timestamp_ms = timestamp_ms
        self.parts: list[Part] = []
        self.pending: list[tuple[PartitionQueue | None, _Column]] = []
        """By partition; the queue is None for records without a key."""
        self.is_sticky_full = False

    def add(self, queue: PartitionQueue | None, column: _Column) -> None:
        self.pending.append((queue, column))

    def next_size_bytes(self) -> int:
        column = self.pending[0][1]
        return column.ends[column.start + 1] - column.ends[column.start]


async def _settled(future: ManyDeliveryFuture) -> None:
    """Waits until a future is done, whatever became of it."""
    try:
        await future
    except RayqError:
        return


def buffer_full_error(config: ProducerConfig) -> BufferFullError:
    return BufferFullError(
        f"The producer's buffer of {config.buffer_memory} bytes stayed full for max_block_ms "
        f"({config.max_block_ms} ms): the cluster takes records more slowly than they are sent. "
        "Send more slowly, or raise buffer_memory."
    )


def _queue_of(known: _Topic, topic: str, partition: int) -> PartitionQueue:
    if type(partition) is not int:
        raise TypeError(f"A partition is an int, not {type(partition).__name__}.")
    if not 0 <= partition < known.count:
        raise InvalidRequestError(
            f"Topic {topic!r} has partitions 0 to {known.count - 1}, not {partition}."
        )
    return known.queues[partition]


def _not_bytes(what: str, found: object) -> TypeError:
    return TypeError(
        f"A record's {what} has to be bytes (or None), not {type(found).__name__}: encode it first."
    )


def _check_column(what: str, column: Sequence[object]) -> None:
    kinds = set(map(type, column))
    if kinds - {bytes, type(None)}:
        for item in column:
            if item is not None and not isinstance(item, bytes):
                raise _not_bytes(what, item)


def _check_headers(headers: Iterable[tuple[str, bytes]]) -> tuple[Headers, int]:
    """A copy, and its size in a batch."""
    if isinstance(headers, Mapping):
        raise TypeError("Headers are a list of (name, value) pairs: use list(headers.items()).")
    checked: Headers = []
    size_bytes = 0
    for name, value in headers:
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise TypeError(
                "A header is a pair of a str and bytes, not of "
                f"{type(name).__name__} and {type(value).__name__}."
            )
        checked.append((name, value))
        size_bytes += len(name.encode()) + len(value) + HEADER_OVERHEAD_BYTES
    return checked, size_bytes


def _check_timestamp(timestamp_ms: Any) -> None:
    if type(timestamp_ms) is not int:
        raise TypeError(f"timestamp_ms is an int, not {type(timestamp_ms).__name__}.")
    if not 0 <= timestamp_ms < 2**62:
        raise InvalidTimestampError(
            f"timestamp_ms is Unix time in milliseconds, not {timestamp_ms}: it cannot be negative."
        )

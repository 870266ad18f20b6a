"""Producers: `AsyncProducer` on the caller's event loop, `Producer` for threads.

Records are appended by the caller's own thread; everything else happens on the client's loop.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from rayq.client.accumulator import RECORD_OVERHEAD_BYTES, Accumulator, Batch, PartitionQueue
from rayq.client.background import BackgroundLoop
from rayq.client.client import Client
from rayq.client.futures import DeliveryFuture, ManyDeliveryFuture, OnDelivery, Part, discard
from rayq.client.intake import Intake, TopicQueues
from rayq.client.sender import Sender
from rayq.client.timeouts import takes_timeout
from rayq.config import ProducerConfig
from rayq.errors import (
    BufferFullError,
    ClosedError,
    DeliveryError,
    RayqError,
    TimeoutError,
)

logger = logging.getLogger(__name__)


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
        self._dirty: deque[PartitionQueue] = deque()
        self._is_work_announced = False
        self._undelivered = 0
        self._first_error: RayqError | None = None
        self.is_closed = False
        clock = client.env.clock
        self.accumulator = Accumulator(config, clock.monotonic, self._announce)
        self.intake = Intake(config, self.accumulator, clock.wall_ms, client.env.random)
        self._sender = Sender(client, config, self.accumulator, self._failed)
        client.metadata.add_listener(self._metadata_changed)

    # --- any thread -----------------------------------------------------------------------------

    def forked(self) -> None:
        """In a forked child nothing sends: every use raises ClosedError. Locks are left alone, as
        the parent's threads may have held them."""
        self.is_closed = True
        self.intake.topics = {}

    def _announce(self, queue: PartitionQueue) -> None:
        """Passes a queue to the sender, on its loop. Called under the accumulator's lock."""
        self._dirty.append(queue)
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
        queues: dict[PartitionQueue, None] = {}
        while self._dirty:
            queues[self._dirty.popleft()] = None
        self._sender.work(list(queues))

    def _failed(self, batch: Batch, error: RayqError) -> None:
        self._undelivered += batch.count
        if self._first_error is None:
            self._first_error = error

    def _metadata_changed(self) -> None:
        topics = self.intake.topics
        for name, known in list(topics.items()):
            metadata = self.client.metadata.topics.get(name)
            if metadata is None:
                del topics[name]
                self.client.drop_interest(name)
            elif metadata != known.metadata:
                topics[name] = TopicQueues(metadata, self.config, known)

    async def load_topic(self, topic: str, *, timeout_s: float) -> None:
        """Fetches the metadata that `send` needs. Raises UnknownTopicError."""
        self.check_open()
        metadata = await self.client.topic(topic, timeout_s=timeout_s)
        if topic not in self.intake.topics:
            self.intake.topics[topic] = TopicQueues(metadata, self.config, None)
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
            future = self.intake.offer(topic, value, key, headers, partition, timestamp_ms)
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
        while (job := self.intake.job_of_many(topic, values, keys, partition)) is None:
            await self._wait_ready(topic, 0, deadline)
        while not self.intake.offer_many(job):
            self.check_open()
            await self._wait_ready(topic, job.next_size_bytes(), self._block_deadline())
        return ManyDeliveryFuture(job.parts)

    def _block_deadline(self) -> float:
        return self.client.now + self.config.max_block_ms / 1000

    async def _wait_ready(self, topic: str, size_bytes: int, deadline: float) -> None:
        left_s = max(deadline - self.client.now, 0.001)
        if topic not in self.intake.topics:
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

    @takes_timeout
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

    @takes_timeout
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
        for topic in self.intake.topics:
            self.client.drop_interest(topic)
        self.intake.topics = {}
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
        self._offer = core.intake.offer
        background.on_fork(self._forked)
        weakref.finalize(self, _tell_of_the_undelivered, core)

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
        while (job := self._core.intake.job_of_many(topic, values, keys, partition)) is None:
            self._wait_ready(topic, 0, deadline)
        while not self._core.intake.offer_many(job):
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
        if topic not in core.intake.topics:
            self._background.run(core.load_topic(topic, timeout_s=left_s))
            return
        self._background.check_callable()
        room = threading.Event()
        core.accumulator.when_room(size_bytes + RECORD_OVERHEAD_BYTES, room.set)
        if not room.wait(left_s):
            raise buffer_full_error(self.config)

    @takes_timeout
    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything accepted before is delivered. Raises DeliveryError if anything
        accepted since the last flush was not, TimeoutError after `timeout_s` seconds."""
        self._background.run(self._core.flush(timeout_s))

    @takes_timeout
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


async def _settled(future: ManyDeliveryFuture) -> None:
    """Waits until a future is done, whatever became of it."""
    try:
        await future
    except RayqError:
        return


def _tell_of_the_undelivered(core: AsyncProducer) -> None:
    """At the end of the program, or of the last reference: nothing is dropped quietly."""
    batches = len(core.accumulator.incomplete())
    if batches and not core.is_closed:
        logger.error(
            "a producer was dropped with %d batches on their way, which may get lost: call "
            "close(), or use it in a `with` block",
            batches,
        )


def buffer_full_error(config: ProducerConfig) -> BufferFullError:
    return BufferFullError(
        f"The producer's buffer of {config.buffer_memory} bytes stayed full for max_block_ms "
        f"({config.max_block_ms} ms): the cluster takes records more slowly than they are sent. "
        "Send more slowly, or raise buffer_memory."
    )

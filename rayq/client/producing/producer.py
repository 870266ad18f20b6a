"""Producers: `AsyncProducer` on the caller's event loop, `Producer` for threads.

Records are appended by the caller's own thread; everything else happens on the client's loop.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, Self

from rayq.client.background import BackgroundLoop
from rayq.client.client import Client
from rayq.client.producing.accumulator import RECORD_OVERHEAD_BYTES
from rayq.client.producing.futures import (
    DeliveryFuture,
    ManyDeliveryFuture,
    OnAsyncDelivery,
    OnDelivery,
)
from rayq.client.producing.intake import value_bytes
from rayq.client.producing.producer_core import ProducerCore, buffer_full_error, no_result_error
from rayq.client.producing.serializing import Serializers
from rayq.client.producing.transaction import (
    AsyncReading,
    AsyncTransaction,
    KeyT_contra,
    Reading,
    Transaction,
    ValueT_contra,
    none_begun_error,
)
from rayq.client.timeouts import takes_timeout
from rayq.client.user_objects import closing_after, no_pickle_error
from rayq.client.wakeup import Wakeup
from rayq.config import ProducerConfig
from rayq.errors import BufferFullError
from rayq.records import OfValueAndKey, RecordMetadata
from rayq.user_functions import check_function

INSTEAD = "async_producer() takes coroutine functions, too."


class AsyncProducer(OfValueAndKey, Generic[ValueT_contra, KeyT_contra]):
    """A producer on the running event loop, made by `cluster.async_producer(**config)`.

    Await `send` for the acceptance of the record, and its result for the delivery::

        async with cluster.async_producer() as producer:
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
        self.core = ProducerCore(client, config, on_close)
        self._writes_objects = self.core.writes_objects
        self._serializers = Serializers.of(config)
        self._begun: AsyncTransaction[ValueT_contra, KeyT_contra] | None = None

    def __repr__(self) -> str:
        return f"<AsyncProducer {self.core.describe()}>"

    async def load_topic(self, topic: str, *, timeout_s: float) -> None:
        """Fetches the metadata that `send` needs. Raises UnknownTopicError."""
        await self.core.load_topic(topic, timeout_s=timeout_s)

    async def send(
        self,
        topic: str,
        value: ValueT_contra | None,
        *,
        key: KeyT_contra | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnAsyncDelivery | None = None,
    ) -> DeliveryFuture:
        """Sends as `Producer.send` does, and returns once the record is accepted. `on_delivery` may
        be a coroutine function, which then runs as its own task; `flush` and `close` wait for
        it."""
        if on_delivery is not None:
            check_function("on_delivery", on_delivery, is_awaited=True)
        core = self.core
        core.check_open()
        if self._serializers is not None:
            value, key = self._serializers.pair(topic, value, key)
        if self._writes_objects:
            headers, value = await self._stored(topic, value, key, headers)
        future = core.intake.offer(topic, value, key, headers, partition, timestamp_ms)
        if future is None:
            future = await self._accepted(topic, value, key, headers, partition, timestamp_ms)
        if on_delivery is not None:
            future.call_on_delivery(on_delivery, core.finish_callback)
        return future

    @takes_timeout
    async def send_and_wait(
        self,
        topic: str,
        value: ValueT_contra | None,
        *,
        key: KeyT_contra | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        timeout_s: float | None = None,
    ) -> RecordMetadata:
        """Sends and waits as `Producer.send_and_wait` does. A record may be delivered even if the
        call is cancelled."""
        core = self.core
        ends_at = None if timeout_s is None else core.client.now + timeout_s
        if self._serializers is not None:
            value, key = self._serializers.pair(topic, value, key)
        if self._writes_objects:
            headers, value = await self._stored(topic, value, key, headers, timeout_s)
        future = await self._accepted(
            topic, value, key, headers, partition, timestamp_ms, timeout_s
        )
        core.accumulator.hurry(future)
        try:
            async with asyncio.timeout(None if ends_at is None else ends_at - core.client.now):
                return await future
        except builtins.TimeoutError:
            if future.done():
                return await future
            raise no_result_error(timeout_s) from None

    async def _stored(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Iterable[tuple[str, bytes]] | None,
        timeout_s: float | None = None,
    ) -> tuple[list[tuple[str, bytes]] | None, Any]:
        """The headers and the value to append: a large value becomes an object."""
        core = self.core
        kept = None if headers is None else list(headers)
        deadline = core.block_deadline(timeout_s)
        while topic not in core.intake.topics:
            core.check_open()
            await self._wait_ready(topic, 0, deadline, timeout_s)
        if core.intake.needs_object(topic, value, key, kept):
            threads = core.client.environment.threads
            value = await threads.run(core.write_object, topic, value)
        return kept, value

    async def _accepted(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Iterable[tuple[str, bytes]] | None,
        partition: int | None,
        timestamp_ms: int | None,
        timeout_s: float | None = None,
    ) -> DeliveryFuture:
        """Waits until the record is accepted, as long as `send` may, or `timeout_s` if that is
        shorter."""
        core = self.core
        deadline = core.block_deadline(timeout_s)
        while True:
            core.check_open()
            future = core.intake.offer(topic, value, key, headers, partition, timestamp_ms)
            if future is not None:
                return future
            await self._wait_ready(topic, value_bytes(value), deadline, timeout_s)

    async def send_many(
        self,
        topic: str,
        values: Sequence[ValueT_contra | None],
        *,
        keys: Sequence[KeyT_contra | None] | None = None,
        partition: int | None = None,
    ) -> ManyDeliveryFuture:
        """Sends as `Producer.send_many` does, and returns once all records are accepted."""
        core = self.core
        core.check_open()
        if self._serializers is not None:
            values, keys = self._serializers.columns(topic, values, keys)
        deadline = core.block_deadline()
        while (job := core.intake.job_of_many(topic, values, keys, partition)) is None:
            await self._wait_ready(topic, 0, deadline)
        while not core.intake.offer_many(job):
            core.check_open()
            await self._wait_ready(topic, job.next_size_bytes(), core.block_deadline())
        return ManyDeliveryFuture(job.parts)

    async def _wait_ready(
        self, topic: str, size_bytes: int, deadline: float, timeout_s: float | None = None
    ) -> None:
        core = self.core
        core.accumulator.check_accepts()
        left_s = max(deadline - core.client.now, 0.001)
        if topic not in core.intake.topics:
            await core.load_topic(topic, timeout_s=left_s)
            return
        loop = core.loop
        room = loop.create_future()

        def arrive() -> None:
            if not room.done():
                room.set_result(None)

        def wake() -> None:
            loop.call_soon_threadsafe(arrive)

        size_bytes += RECORD_OVERHEAD_BYTES
        core.accumulator.when_room(size_bytes, wake)
        try:
            async with asyncio.timeout(left_s):
                await room
        except builtins.TimeoutError:
            raise buffer_full_error(self.config, timeout_s) from None
        finally:
            core.accumulator.stop_waiting(size_bytes, wake)

    # --- transactions ---------------------------------------------------------------------------

    def transaction(
        self, *, name: str | None = None, reads: AsyncReading | None = None
    ) -> AsyncTransaction[ValueT_contra, KeyT_contra]:
        """Makes a transaction as `Producer.transaction` does, for `async with`."""
        return AsyncTransaction(
            self.core, self.send, self.send_many, self._note_begun, name, reads
        )

    def _note_begun(self, begun: AsyncTransaction[ValueT_contra, KeyT_contra]) -> None:
        self._begun = begun

    async def begin_transaction(
        self, *, name: str | None = None, reads: AsyncReading | None = None
    ) -> AsyncTransaction[ValueT_contra, KeyT_contra]:
        """Begins a transaction as `Producer.begin_transaction` does."""
        begun = self.transaction(name=name, reads=reads)
        await begun.begin()
        return begun

    async def commit_transaction(self) -> None:
        """Commits as `Producer.commit_transaction` does."""
        if self._begun is None:
            raise none_begun_error()
        await self._begun.commit()

    async def abort_transaction(self) -> None:
        """Aborts as `Producer.abort_transaction` does."""
        if self._begun is None:
            raise none_begun_error()
        await self._begun.abort()

    # --- the end --------------------------------------------------------------------------------

    @takes_timeout
    async def flush(self, timeout_s: float | None = None) -> None:
        """Flushes as `Producer.flush` does."""
        await self.core.flush(timeout_s)

    @takes_timeout
    async def close(self, timeout_s: float | None = None) -> None:
        """Closes as `Producer.close` does."""
        await self.core.close(timeout_s)

    def abandon(self) -> None:
        """Closes without waiting: undelivered records fail."""
        self.core.abandon()

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "a producer")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with closing_after(error):
            await self.close()


class Producer(OfValueAndKey, Generic[ValueT_contra, KeyT_contra]):
    """A producer for any number of threads, made by `cluster.producer(**config)`.

    `send` returns at once; the record travels in a batch with others of its partition. Use the
    producer as a context manager, or call `close`: both deliver everything sent. `Producer[Order,
    str]` has serializers that take values of `Order` and keys of str; without type arguments they
    are bytes.
    """

    def __init__(self, core: ProducerCore, background: BackgroundLoop) -> None:
        self._core = core
        self._background = background
        self._offer = core.intake.offer
        self._writes_objects = core.writes_objects
        self._serializers = Serializers.of(core.config)
        self._begun: Transaction[ValueT_contra, KeyT_contra] | None = None
        background.on_fork(self._forked)

    def __repr__(self) -> str:
        return f"<Producer {self._core.describe()}>"

    @property
    def config(self) -> ProducerConfig:
        return self._core.config

    def send(
        self,
        topic: str,
        value: ValueT_contra | None,
        *,
        key: KeyT_contra | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> DeliveryFuture:
        """Accepts one record and returns the future of its `RecordMetadata`.

        `value` and `key` are bytes, or anything that the producer's `value_serializer` and
        `key_serializer` turn into bytes; None as the value is a tombstone. Without `partition` the
        configured partitioner chooses. `timestamp_ms` is Unix time, now by default.
        `on_delivery(metadata, error)` is called on the client's event-loop thread, where it must
        not block; or by this call, if the delivery is over before `send` returns (so do not hold a
        lock that `on_delivery` takes).

        Blocks up to `max_block_ms` while the topic is not known yet or the buffer is full, and
        while a large value is written as an object, if `large_values` says so (then it also raises
        RemoteStorageError, RemoteDeniedError and MissingExtraError). Raises BufferFullError,
        UnknownTopicError, RecordTooLargeError, InvalidTimestampError, InvalidRequestError (no such
        partition), ClosedError, TypeError (not bytes), SerializationError (a serializer raised, or
        did not return bytes), HandlerError (for example, `on_delivery` is a coroutine function),
        and the errors of a partitioner.
        """
        if on_delivery is not None:
            check_function("on_delivery", on_delivery, instead=INSTEAD)
        if self._serializers is not None:
            value, key = self._serializers.pair(topic, value, key)
        if self._writes_objects:
            headers, value = self._stored(topic, value, key, headers)
        future = self._offer(topic, value, key, headers, partition, timestamp_ms)
        if future is None:
            future = self._accepted(topic, value, key, headers, partition, timestamp_ms)
        if on_delivery is not None:
            future.call_on_delivery(on_delivery)
        return future

    @takes_timeout
    def send_and_wait(
        self,
        topic: str,
        value: ValueT_contra | None,
        *,
        key: KeyT_contra | None = None,
        headers: Iterable[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        timeout_s: float | None = None,
    ) -> RecordMetadata:
        """Sends one record, waits for its delivery and returns its `RecordMetadata`. The record
        does not linger, but records that other threads send at the same time may share its batch.
        For many records, `send` and one `flush` are much faster.

        Raises the errors of `send` and of the delivery; TimeoutError after `timeout_s` seconds if
        the record is still in flight (None: `max_block_ms` and then `delivery_timeout_ms` decide),
        or BufferFullError if it was not accepted by then; InvalidRequestError in a delivery
        callback, which must not wait.
        """
        self._background.check_callable()
        core = self._core
        ends_at = None if timeout_s is None else core.client.now + timeout_s
        if self._serializers is not None:
            value, key = self._serializers.pair(topic, value, key)
        if self._writes_objects:
            headers, value = self._stored(topic, value, key, headers, timeout_s)
        future = self._accepted(topic, value, key, headers, partition, timestamp_ms, timeout_s)
        core.accumulator.hurry(future)
        try:
            return future.result(None if ends_at is None else max(ends_at - core.client.now, 0.0))
        except builtins.TimeoutError:
            if future.done():
                raise
            raise no_result_error(timeout_s) from None

    def _stored(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Iterable[tuple[str, bytes]] | None,
        timeout_s: float | None = None,
    ) -> tuple[list[tuple[str, bytes]] | None, Any]:
        """The headers and the value to append: a large value becomes an object."""
        core = self._core
        kept = None if headers is None else list(headers)
        deadline = core.block_deadline(timeout_s)
        while topic not in core.intake.topics:
            self._wait_ready(topic, 0, deadline, timeout_s)
        if core.intake.needs_object(topic, value, key, kept):
            self._background.check_callable()
            value = core.write_object(topic, value)
        return kept, value

    def _accepted(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Iterable[tuple[str, bytes]] | None,
        partition: int | None,
        timestamp_ms: int | None,
        timeout_s: float | None = None,
    ) -> DeliveryFuture:
        """Waits until the record is accepted, as long as `send` may, or `timeout_s` if that is
        shorter."""
        deadline = self._core.block_deadline(timeout_s)
        while True:
            future = self._offer(topic, value, key, headers, partition, timestamp_ms)
            if future is not None:
                return future
            self._wait_ready(topic, value_bytes(value), deadline, timeout_s)

    def send_many(
        self,
        topic: str,
        values: Sequence[ValueT_contra | None],
        *,
        keys: Sequence[KeyT_contra | None] | None = None,
        partition: int | None = None,
    ) -> ManyDeliveryFuture:
        """Accepts any number of records and returns the future of their offsets:
        `list[OffsetRange]`, one for each run of offsets.

        `keys` has one entry (or None) for each value; without keys the batches spread over the
        partitions. Blocks as `send` does, each time the buffer is full. If it raises
        BufferFullError half-way, the records before stay accepted. Raises as `send` does; after any
        other error, including SerializationError (which has the record's `index`), no record is
        accepted.
        """
        core = self._core
        if self._serializers is not None:
            values, keys = self._serializers.columns(topic, values, keys)
        deadline = core.block_deadline()
        while (job := core.intake.job_of_many(topic, values, keys, partition)) is None:
            self._wait_ready(topic, 0, deadline)
        while not core.intake.offer_many(job):
            self._wait_ready(topic, job.next_size_bytes(), core.block_deadline())
        return ManyDeliveryFuture(job.parts)

    def _wait_ready(
        self, topic: str, size_bytes: int, deadline: float, timeout_s: float | None = None
    ) -> None:
        core = self._core
        core.check_open()
        core.accumulator.check_accepts()
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
        room = Wakeup()
        size_bytes += RECORD_OVERHEAD_BYTES
        core.accumulator.when_room(size_bytes, room.set)
        try:
            if not room.wait(left_s):
                raise buffer_full_error(self.config, timeout_s)
        finally:
            core.accumulator.stop_waiting(size_bytes, room.set)

    # --- transactions ---------------------------------------------------------------------------

    def transaction(
        self, *, name: str | None = None, reads: Reading | None = None
    ) -> Transaction[ValueT_contra, KeyT_contra]:
        """A transaction for a `with` block: everything sent within it becomes visible together at
        the end of the block, or not at all::

            with producer.transaction() as tx:
                tx.send("orders", b"one")
                tx.send("payments", b"two")

        A transaction with a `name` (1 to 256 characters) commits once: the cluster keeps the name
        that the transactional id committed last, and a second attempt with it raises
        AlreadyCommittedError. `reads` is a consumer of a group, without `enable_auto_commit`: its
        positions are committed with the records. If the transaction is aborted, the consumer goes
        back to the committed position and reads the rest again, so poll just before the block, or
        in it. See `Transaction` for the errors of the end of the block.

        The begin of the block raises as `begin_transaction` does; InvalidRequestError (no
        transactional_id, a bad name)."""
        return Transaction(
            self._core,
            self._background,
            self.send,
            self.send_many,
            self._note_begun,
            name,
            reads,
        )

    def _note_begun(self, begun: Transaction[ValueT_contra, KeyT_contra]) -> None:
        self._begun = begun

    def begin_transaction(
        self, *, name: str | None = None, reads: Reading | None = None
    ) -> Transaction[ValueT_contra, KeyT_contra]:
        """Begins a transaction that `commit_transaction` or `abort_transaction` ends; a `with`
        block of `transaction` is safer. If the outcome of the previous one is unknown, it is
        determined first.

        Raises InvalidRequestError (one is open already), ProducerFencedError (another producer has
        the transactional id), AlreadyCommittedError, TransactionLimitError, TimeoutError after
        `max_block_ms`."""
        begun = self.transaction(name=name, reads=reads)
        begun.begin()
        return begun

    def commit_transaction(self) -> None:
        """Commits the open transaction. Raises as the end of a `Transaction` block does, and
        InvalidRequestError if none is open."""
        if self._begun is None:
            raise none_begun_error()
        self._begun.commit()

    def abort_transaction(self) -> None:
        """Aborts the open transaction, so no reader of committed records sees it. Raises
        ProducerFencedError, InvalidRequestError if none is open, TimeoutError after `max_block_ms`:
        then it ends by `transaction_timeout_ms`, or before the next one begins."""
        if self._begun is None:
            raise none_begun_error()
        self._begun.abort()

    # --- the end --------------------------------------------------------------------------------

    @takes_timeout
    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything accepted before is delivered. Raises DeliveryError if anything
        accepted since the last flush was not, TimeoutError after `timeout_s` seconds, and
        InvalidRequestError in a delivery callback, which must not wait."""
        self._background.check_callable()
        self._core.accumulator.close_open_batches()
        self._background.run(self._core.flush(timeout_s))

    @takes_timeout
    def close(self, timeout_s: float | None = None) -> None:
        """Aborts an open transaction, flushes, then closes; idempotent. Records not delivered after
        `timeout_s` seconds (None: `delivery_timeout_ms` decides) fail: with ClosedError if not
        written, with OutcomeUnknownError if sent and not answered. Raises DeliveryError as `flush`
        does, and TimeoutError, which counts both."""
        if not self._core.is_closed:
            self._background.check_callable()
            self._background.run(self.closing(timeout_s))

    def closing(self, timeout_s: float | None = None) -> Coroutine[Any, Any, None]:
        """The coroutine that `close` runs on the client's loop."""
        if not self._core.is_closed:
            self._core.accumulator.close_open_batches()
        return self._core.close(timeout_s)

    def _forked(self) -> None:
        self._core.forked()

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "a producer")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with closing_after(error):
            self.close()

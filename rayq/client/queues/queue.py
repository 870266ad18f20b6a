"""Queues for users: `Queue` for threads, `AsyncQueue` on the caller's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from rayq.client.background import BackgroundLoop
from rayq.client.producing.futures import DeliveryFuture
from rayq.client.producing.producer import AsyncProducer, Producer
from rayq.client.queues.arguments import (
    CONCURRENCY_MAX,
    TAKEN_MAX,
    PutHeaders,
    whole_between,
    with_due_time,
    with_keys,
    worker_times,
)
from rayq.client.queues.functions import Functions, TaskFunction
from rayq.client.queues.queue_core import QueueCore
from rayq.client.queues.task import QueueTask, tasks_of
from rayq.client.queues.workers import STOP_TIMEOUT_S, AsyncWorker, Handler, ThreadWorker
from rayq.client.timeouts import takes_timeout
from rayq.client.user_objects import closing_after, no_pickle_error
from rayq.errors import InvalidRequestError
from rayq.records import RecordMetadata

P = ParamSpec("P")
R = TypeVar("R")
PutT = TypeVar("PutT")
WorkerT = TypeVar("WorkerT", ThreadWorker, AsyncWorker)


class _BaseQueue(Generic[PutT, WorkerT]):
    """The part that both kinds of queue share. `put` returns a `PutT`."""

    put: Callable[..., PutT]

    def __init__(self, core: QueueCore) -> None:
        self._core = core
        self._functions: Functions[PutT] = Functions()
        self._workers: list[WorkerT] = []

    @property
    def name(self) -> str:
        """The queue's name; for several queues, their names with commas."""
        return ",".join(self._core.names)

    @property
    def core(self) -> QueueCore:
        """The core that the cluster watches, so that a dropped queue gives back its records."""
        return self._core

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core.describe()}>"

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "a queue")

    def _addressed(
        self, headers: PutHeaders, delay_s: Any, deliver_at: Any
    ) -> tuple[str, PutHeaders]:
        """The topic that records are put into, and their headers with the due time. Raises
        InvalidRequestError, ClosedError."""
        self._core.check_open()
        if len(self._core.queues) != 1:
            raise InvalidRequestError(
                f"This takes from several queues ({', '.join(self._core.names)}): put records by "
                "cluster.queue(name) of one of them."
            )
        wall_ms = self._core.client.environment.clock.wall_ms()
        headers = with_due_time(headers, delay_s, deliver_at, wall_ms)
        return self._core.queues[0].queue.topic, headers

    # --- tasks and workers ----------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, R], /) -> TaskFunction[P, R, PutT]: ...
    @overload
    def task(
        self, /, *, name: str | None = None, retries: int | None = None
    ) -> Callable[[Callable[P, R]], TaskFunction[P, R, PutT]]: ...
    def task(
        self,
        function: Callable[P, R] | None = None,
        /,
        *,
        name: str | None = None,
        retries: int | None = None,
    ) -> Any:
        """Makes a function a task: `function.delay(...)` writes a record, and a worker (`work`)
        calls the function for it. `name` (module and qualified name by default) identifies the
        function in every process. After `retries` further tries (and after the queue's
        `max_deliveries` in any case) the record goes to the dead letters. Arguments travel as JSON
        and arrive as the annotations say: `delay` refuses an argument that would arrive as
        something else. With an `AsyncQueue`, `delay` returns a coroutine to await, and functions
        may be coroutine functions; others run in threads. Raises HandlerError (no function, or one
        with `yield`), InvalidRequestError."""
        if function is not None:
            return self._functions.add(function, name, retries, self.put)
        return lambda given: self._functions.add(given, name, retries, self.put)

    def stop(self) -> None:
        """Makes each `work` of this queue return, once its handlers have ended. May be called from
        any thread."""
        for worker in list(self._workers):
            worker.stop()


class Queue(_BaseQueue[RecordMetadata, ThreadWorker]):
    """A queue for any number of threads, which puts records into it and takes them out; made by
    `cluster.queue(name)` or `cluster.create_queue(name)`.

    A taken record is this consumer's until it is settled (see `QueueTask`), or until its lock is
    lost: the client extends locks by itself every third of `visibility_timeout_s`, up to
    `max_handling_s`. Delivery is at-least-once. Use the queue as a context manager, or call
    `close`: the records that it holds then go to others at once.
    """

    def __init__(
        self,
        core: QueueCore,
        background: BackgroundLoop,
        make_producer: Callable[[], Producer[bytes, bytes]],
    ) -> None:
        super().__init__(core)
        self._background = background
        self._make_producer = make_producer
        self._producers: list[Producer[bytes, bytes]] = []
        """At most one, made at the first put."""
        background.on_fork(core.forked)

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return self._background.run(work)

    # --- putting --------------------------------------------------------------------------------

    def _sender(self) -> Producer[bytes, bytes]:
        if not self._producers:
            self._producers.append(self._make_producer())  # Two threads may make one each.
        return self._producers[0]

    @takes_timeout
    def put(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: PutHeaders = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> RecordMetadata:
        """Writes one record, and returns its partition and offset once it is durable. Records of
        one `key` go to one partition.

        No consumer gets it before `delay_s` seconds (up to ten years) have passed, or before
        `deliver_at` (a datetime with a time zone), by the servers' clocks. Raises the errors of
        `Producer.send_and_wait`, such as DeliveryTimeoutError and RecordTooLargeError, and
        InvalidRequestError (several queues, a time without zone).
        """
        topic, headers = self._addressed(headers, delay_s, deliver_at)
        return self._sender().send_and_wait(
            topic, value, key=key, headers=headers, timeout_s=timeout_s
        )

    def send(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: PutHeaders = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> DeliveryFuture:
        """Writes one record as `put` does, without waiting: the future's `result()` has its
        partition and offset. Use it for many records: they travel in batches. `close` waits for
        them."""
        topic, headers = self._addressed(headers, delay_s, deliver_at)
        return self._sender().send(topic, value, key=key, headers=headers)

    def put_many(
        self,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> None:
        """Writes many records; `keys` has one (or None) for each. Returns once all are durable.
        Raises as `put` does; some of the records may be written then."""
        sender = self._sender()
        topic, headers = self._addressed(None, delay_s, deliver_at)
        if headers is None:
            sender.send_many(topic, values, keys=keys).result()
            return
        sent = [
            sender.send(topic, value, key=key, headers=headers)
            for value, key in with_keys(values, keys)
        ]
        for future in sent:
            future.result()

    # --- taking ---------------------------------------------------------------------------------

    @takes_timeout
    def take(self, count: int = 1, timeout_s: float = 1.0) -> list[QueueTask]:
        """Returns up to `count` records (at most 10,000), as soon as there is one; [] after
        `timeout_s` seconds without any (or a quarter of a second later, while an answer is in
        flight).

        Settle each of them: a record that is dropped unsettled is given back. In a queue that is
        `ordered_by_key`, one record of each key is handed out at a time. Raises UnknownQueueError
        (the queue was deleted), ClosedError, and the error with which a leader refuses.
        """
        whole_between("count", count, 1, TAKEN_MAX)
        self._background.check_callable()
        if tasks := self._core.at_hand(count):
            return tasks
        return tasks_of(self._run(self._core.take(count, timeout_s, is_for_threads=True)))

    def __iter__(self) -> Iterator[QueueTask]:
        """Yields one record after another, forever."""
        while True:
            yield from self.take(1, 10.0)

    @takes_timeout
    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything settled before this call is durable. Raises LockLostError if any
        of it came too late since the last flush (`QueueTask.lost` says which), and TimeoutError."""
        self._core.check_open()
        self._run(self._core.flush(timeout_s))

    # --- tasks and workers ----------------------------------------------------------------------

    def work(
        self,
        handler: Handler | None = None,
        *,
        concurrency: int = 1,
        prefetch: int | None = None,
        stop_when_idle_s: float | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """Handles records in `concurrency` threads (up to 10,000) until `stop`: with
        `handler(task)`, or with the functions of `@task`. A record is acknowledged when its handler
        returns. If the handler raises anything, the record is given back, and goes to the dead
        letters with its error after the last delivery. The same holds if it returns an awaitable or
        a generator, of which nothing has run. `prefetch` is as in `cluster.queue`, whose value
        applies if it is None.

        Ends after `stop_when_idle_s` seconds without a record (None: never), after SIGTERM (in the
        main thread), and by Ctrl+C, which it raises: running handlers then have `stop_timeout_s`
        seconds. Raises UnknownQueueError, LockLostError (the last acks came too late), and, before
        anything is taken, HandlerError (for example, a coroutine function, or one with `yield`).
        """
        whole_between("concurrency", concurrency, 1, CONCURRENCY_MAX)
        idle_s, stop_timeout_s = worker_times(stop_when_idle_s, stop_timeout_s)
        self._core.set_prefetch(prefetch)
        self._core.check_open()
        self._background.check_callable()
        worker = ThreadWorker(self.take, handler, self._functions)
        self._workers.append(worker)
        ended_by: BaseException | None = None
        try:
            worker.run(concurrency, idle_s, stop_timeout_s)
        except BaseException as error:
            ended_by = error
            raise
        finally:
            self._workers.remove(worker)
            with closing_after(ended_by):
                self._run(self._core.rest())

    # --- the end --------------------------------------------------------------------------------

    @takes_timeout
    def close(self, timeout_s: float | None = None) -> None:
        """Writes everything sent, tells the leaders everything settled, and gives back all other
        records; idempotent. That may take `timeout_s` (default: 5 s, and the time of the delivery).
        Raises LockLostError as `flush` does, DeliveryError, and TimeoutError: then the records
        settled last may be delivered again, and the futures of the records sent last tell their
        outcome."""
        if self._core.is_closed:
            return
        self._background.check_callable()
        self.stop()
        try:
            for producer in self._producers:
                producer.close(timeout_s)
        finally:
            self._run(self._core.close(timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with closing_after(error):
            self.close()


class AsyncQueue(_BaseQueue[Coroutine[Any, Any, RecordMetadata], AsyncWorker]):
    """A `Queue` on the running event loop, made by `cluster.async_queue(name)`. Each method does
    the same as the method of `Queue` with that name, as a coroutine; the methods of a `QueueTask`
    are plain calls here, too."""

    def __init__(
        self, core: QueueCore, make_producer: Callable[[], AsyncProducer[bytes, bytes]]
    ) -> None:
        super().__init__(core)
        self._make_producer = make_producer
        self._producer: AsyncProducer[bytes, bytes] | None = None

    def _sender(self) -> AsyncProducer[bytes, bytes]:
        if self._producer is None:
            self._producer = self._make_producer()
        return self._producer

    @takes_timeout
    async def put(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: PutHeaders = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> RecordMetadata:
        """Puts a record as `Queue.put` does."""
        await self._core.open()
        topic, headers = self._addressed(headers, delay_s, deliver_at)
        return await self._sender().send_and_wait(
            topic, value, key=key, headers=headers, timeout_s=timeout_s
        )

    async def send(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: PutHeaders = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> DeliveryFuture:
        """Sends a record as `Queue.send` does, and returns once it is accepted."""
        await self._core.open()
        topic, headers = self._addressed(headers, delay_s, deliver_at)
        return await self._sender().send(topic, value, key=key, headers=headers)

    async def put_many(
        self,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> None:
        """Puts records as `Queue.put_many` does."""
        await self._core.open()
        sender = self._sender()
        topic, headers = self._addressed(None, delay_s, deliver_at)
        if headers is None:
            await (await sender.send_many(topic, values, keys=keys))
            return
        sent = [
            await sender.send(topic, value, key=key, headers=headers)
            for value, key in with_keys(values, keys)
        ]
        for future in sent:
            await future

    @takes_timeout
    async def take(self, count: int = 1, timeout_s: float = 1.0) -> list[QueueTask]:
        """Takes records as `Queue.take` does."""
        whole_between("count", count, 1, TAKEN_MAX)
        return tasks_of(await self._core.take(count, timeout_s))

    async def __aiter__(self) -> AsyncIterator[QueueTask]:
        """Yields one record after another, forever."""
        while True:
            for task in await self.take(1, 10.0):
                yield task

    @takes_timeout
    async def flush(self, timeout_s: float | None = None) -> None:
        """Flushes as `Queue.flush` does."""
        self._core.check_open()
        await self._core.flush(timeout_s)

    async def work(
        self,
        handler: Handler | None = None,
        *,
        concurrency: int = 1,
        prefetch: int | None = None,
        stop_when_idle_s: float | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """Handles records as `Queue.work` does: coroutine functions run on the event loop, others
        in threads, and an awaitable that they return is awaited on the loop; `concurrency` records
        are handled at once. SIGTERM stops it if the loop runs in the main thread. Cancelled (for
        example by Ctrl+C in `asyncio.run`), it cancels the handlers, and gives their records
        back."""
        whole_between("concurrency", concurrency, 1, CONCURRENCY_MAX)
        idle_s, stop_timeout_s = worker_times(stop_when_idle_s, stop_timeout_s)
        self._core.set_prefetch(prefetch)
        await self._core.open()
        worker = AsyncWorker(self.take, handler, self._functions)
        self._workers.append(worker)
        ended_by: BaseException | None = None
        try:
            await worker.run(concurrency, idle_s, stop_timeout_s)
        except BaseException as error:
            ended_by = error
            raise
        finally:
            self._workers.remove(worker)
            with closing_after(ended_by):
                await self._core.rest()

    @takes_timeout
    async def close(self, timeout_s: float | None = None) -> None:
        """Closes as `Queue.close` does."""
        if self._core.is_closed:
            return
        self.stop()
        try:
            if self._producer is not None:
                await self._producer.close(timeout_s)
        finally:
            await self._core.close(timeout_s)

    async def __aenter__(self) -> Self:
        await self._core.open()
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with closing_after(error):
            await self.close()

"""`queue.work`: handles one record after another, several at once, until it is told to stop.

A handler may raise anything: the record is given back, and at the last of its deliveries goes to
the dead letters with the error. A record whose arguments no function takes is rejected at once:
another try would not mend it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

from rayq.client.queues.functions import Functions
from rayq.client.queues.task import QueueTask
from rayq.errors import (
    ClosedError,
    InvalidRequestError,
    LockLostError,
    RayqError,
    TaskArgumentsError,
)

logger = logging.getLogger(__name__)

TAKE_S = 0.5
"""How long a worker waits for a record at a time."""
FAILED_TAKE_PAUSE_S = 1.0
STOP_TIMEOUT_S = 60.0
WATCH_S = 0.1

Handler = Callable[[QueueTask], Any]


class TakesTasks(Protocol):
    """The queue of a worker for threads."""

    def take(self, count: int = 1, timeout_s: float = 1.0) -> list[QueueTask]: ...


class AsyncTakesTasks(Protocol):
    """The queue of a worker on an event loop."""

    async def take(self, count: int = 1, timeout_s: float = 1.0) -> list[QueueTask]: ...


def call_of(
    task: QueueTask, handler: Handler | None, functions: Functions[Any]
) -> tuple[Callable[[], Any], int | None]:
    """What handles a record, and how many retries it has. Raises LookupError,
    TaskArgumentsError."""
    if handler is not None:
        return lambda: handler(task), None
    function = functions.of(task)
    args, kwargs = function.arguments(task.value)
    return lambda: function.function(*args, **kwargs), function.retries


def note_failure(task: QueueTask, error: BaseException, retries: int | None) -> None:
    """Gives a record back, or rejects it, after its handler raised."""
    logger.warning(
        "queue %s: offset %d of %s-%d failed (delivery %d): %r",
        task.queue,
        task.offset,
        task.topic,
        task.partition,
        task.delivery_count,
        error,
    )
    if task.is_settled:
        return
    try:
        if isinstance(error, TaskArgumentsError):
            task.reject(str(error))
        else:
            task.fail(error, retries)
    except (LockLostError, ClosedError) as lost:
        logger.warning("queue %s: %s", task.queue, lost)


def note_success(task: QueueTask) -> None:
    if task.is_settled:
        return
    try:
        task.ack()
    except (LockLostError, ClosedError) as lost:
        logger.warning("queue %s: %s", task.queue, lost)


class Activity:
    """When a worker last had something to do. From any thread."""

    def __init__(self) -> None:
        self.busy = 0
        self.last_s = time.monotonic()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            self.last_s = time.monotonic()

    def idle_s(self) -> float:
        return 0.0 if self.busy else time.monotonic() - self.last_s


class ThreadWorker:
    """One call of `Queue.work`."""

    def __init__(
        self, queue: TakesTasks, handler: Handler | None, functions: Functions[Any]
    ) -> None:
        if handler is not None and inspect.iscoroutinefunction(handler):
            raise TypeError("A coroutine function needs an event loop: use cluster.async_queue().")
        self._queue = queue
        self._handler = handler
        self._functions = functions
        self._activities: list[Activity] = []
        self._is_stopped = False
        self.failure: Exception | None = None

    def stop(self) -> None:
        """From any thread, a handler, or a signal handler: so it takes no lock."""
        self._is_stopped = True

    def run(self, concurrency: int, stop_when_idle_s: float | None, stop_timeout_s: float) -> None:
        """Until it is stopped. An interrupt (Ctrl+C) lets what is being handled finish, a second
        one does not."""
        threads: list[threading.Thread] = []
        try:
            for number in range(concurrency):
                activity = Activity()
                thread = threading.Thread(
                    target=self._work, args=(activity,), name=f"rayq-worker-{number}", daemon=True
                )
                thread.start()
                threads.append(thread)
                self._activities.append(activity)
            with _stopped_by_sigterm(self.stop):
                while self._goes_on():
                    time.sleep(WATCH_S)
                    idle_s = min(one.idle_s() for one in self._activities)
                    if stop_when_idle_s is not None and idle_s >= stop_when_idle_s:
                        break
        finally:
            self._is_stopped = True
            deadline_s = time.monotonic() + stop_timeout_s
            for thread in threads:
                thread.join(max(deadline_s - time.monotonic(), 0.0))
            stuck = sum(thread.is_alive() for thread in threads)
            if stuck:
                logger.warning(
                    "%d handlers have not ended within %g s: their records come again elsewhere",
                    stuck,
                    stop_timeout_s,
                )
        if self.failure is not None:
            raise self.failure

    def _work(self, activity: Activity) -> None:
        try:
            self._loop(activity)
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self.failure = error
            self._is_stopped = True

    def _goes_on(self) -> bool:
        return not self._is_stopped

    def _loop(self, activity: Activity) -> None:
        while self._goes_on():
            try:
                tasks = self._queue.take(1, TAKE_S)
            except RayqError as error:
                if not self._goes_on():  # The queue was closed meanwhile.
                    return
                if not error.retriable:
                    raise
                logger.warning("a worker's take failed: %s", error)
                time.sleep(FAILED_TAKE_PAUSE_S)
                continue
            for task in tasks:
                with activity.at_work():
                    self._handle(task)

    def _handle(self, task: QueueTask) -> None:
        retries: int | None = None
        try:
            call, retries = call_of(task, self._handler, self._functions)
            result = call()
            if inspect.iscoroutine(result):
                result.close()
                raise InvalidRequestError(
                    "The function is a coroutine function: run it by cluster.async_queue().work()."
                )
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            note_failure(task, error, retries)
        else:
            note_success(task)


@contextlib.contextmanager
def _stopped_by_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """In the main thread SIGTERM stops the worker, unless the program handles it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class AsyncWorker:
    """One call of `AsyncQueue.work`."""

    def __init__(
        self, queue: AsyncTakesTasks, handler: Handler | None, functions: Functions[Any]
    ) -> None:
        self._queue = queue
        self._handler = handler
        self._functions = functions
        self._activities: list[Activity] = []
        self._wanted = asyncio.Event()

    def stop(self) -> None:
        """On the loop."""
        self._wanted.set()

    async def run(
        self, concurrency: int, stop_when_idle_s: float | None, stop_timeout_s: float
    ) -> None:
        """Until it is stopped. Cancelled, it cancels the handlers, whose records are given back."""
        workers: list[asyncio.Task[None]] = []
        for _ in range(concurrency):
            self._activities.append(Activity())
            workers.append(asyncio.ensure_future(self._loop(self._activities[-1])))
        try:
            while not self._wanted.is_set() and not any(one.done() for one in workers):
                idle_s = min(one.idle_s() for one in self._activities)
                if stop_when_idle_s is not None and idle_s >= stop_when_idle_s:
                    break
                with contextlib.suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(WATCH_S):
                        await self._wanted.wait()
            self._wanted.set()
            _, stuck = await asyncio.wait(workers, timeout=stop_timeout_s)
            if stuck:
                logger.warning(
                    "%d handlers have not ended within %g s: they are cancelled",
                    len(stuck),
                    stop_timeout_s,
                )
        finally:
            for worker in workers:
                worker.cancel()
            outcomes = await asyncio.gather(*workers, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, RayqError):
                raise outcome

    async def _loop(self, activity: Activity) -> None:
        while not self._wanted.is_set():
            try:
                tasks = await self._queue.take(1, TAKE_S)
            except RayqError as error:
                if self._wanted.is_set():  # The queue was closed meanwhile.
                    return
                if not error.retriable:
                    raise
                logger.warning("a worker's take failed: %s", error)
                await asyncio.sleep(FAILED_TAKE_PAUSE_S)
                continue
            for task in tasks:
                with activity.at_work():
                    await self._handle(task)

    async def _handle(self, task: QueueTask) -> None:
        retries: int | None = None
        try:
            call, retries = call_of(task, self._handler, self._functions)
            is_async = self._is_async(task)
            work: Coroutine[Any, Any, Any] = call() if is_async else asyncio.to_thread(call)
            await work
        except asyncio.CancelledError as error:
            note_failure(task, error, retries)
            raise
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            note_failure(task, error, retries)
        else:
            note_success(task)

    def _is_async(self, task: QueueTask) -> bool:
        handler = self._handler
        if handler is None:
            return self._functions.of(task).is_async
        return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - it is known to be callable
        )

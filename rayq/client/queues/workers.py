"""Workers of `queue.work`: they handle records, several at once, until they are told to stop.

A handler may raise anything: the record is given back, and at the last of its deliveries goes to
the dead letters with the error. A record whose arguments no function takes is rejected at once:
another try would not help.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from rayq.client.callbacks import call_here, outcome_of
from rayq.client.queues.functions import Functions
from rayq.client.queues.task import QueueTask
from rayq.environment import ThreadPool
from rayq.errors import ClosedError, LockLostError, RayqError, TaskArgumentsError
from rayq.user_functions import (
    call,
    check_function,
    check_ran,
    is_awaitable,
    is_coroutine_function,
    told,
)

logger = logging.getLogger(__name__)

TAKE_S = 0.5
"""Maximum time a worker waits for a record at a time."""
FAILED_TAKE_PAUSE_S = 1.0
STOP_TIMEOUT_S = 60.0
WATCH_S = 0.1

Handler = Callable[[QueueTask], Any]


Take = Callable[[int, float], list[QueueTask]]
AsyncTake = Callable[[int, float], Awaitable[list[QueueTask]]]
Call = tuple[Callable[[], Any], bool, int | None]
"""The call that handles a record, whether it is of a coroutine function, and its number of
retries."""


def check_done(result: object) -> BaseException | None:
    """The error of a function's result that shows that the function has not done its work."""
    return None if result is None else call(check_ran, "The function", result)[1]


def settle(task: QueueTask, error: BaseException | None, retries: int | None) -> None:
    """Acknowledges a record. If its handler raised, gives it back, or rejects it at its last
    delivery."""
    if error is None:
        _settle(task, task.ack)
        return
    failure = error
    logger.warning(
        "queue %s: offset %d of %s-%d failed (delivery %d): %s",
        task.queue,
        task.offset,
        task.topic,
        task.partition,
        task.delivery_count,
        told(failure),
    )
    _settle(task, lambda: task.fail(failure, retries))


def settle_uncalled(task: QueueTask, error: BaseException) -> None:
    """Settles a record of which nothing was called. Another try would not help with arguments that
    no function takes; another worker may know the function."""
    if not isinstance(error, TaskArgumentsError):
        settle(task, error, None)
        return
    logger.warning("queue %s: %s was rejected: %s", task.queue, task, error)
    _settle(task, lambda: task.reject(str(error)))


def give_back(task: QueueTask) -> None:
    """Gives a record back after its worker was cancelled, or the program interrupted, in the middle
    of its handler."""
    _settle(task, lambda: task.nack(0))


def first_of(failures: Sequence[BaseException]) -> BaseException | None:
    """The first error that ended a worker, to be raised; the others are logged."""
    for later in failures[1:]:
        logger.error("a worker failed: %s", told(later), exc_info=later)
    return failures[0] if failures else None


def _settle(task: QueueTask, decide: Callable[[], None]) -> None:
    """Settles a record unless the handler has settled it."""
    if task.is_settled:
        return
    try:
        decide()
    except (LockLostError, ClosedError) as lost:
        logger.warning("queue %s: %s", task.queue, lost)


class Activity:
    """The time at which a worker last had something to do. May be read from any thread."""

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


class Worker:
    """The part that both kinds of worker share. `is_async`: the handler is a coroutine function."""

    def __init__(
        self, handler: Handler | None, functions: Functions[Any], *, is_async: bool = False
    ) -> None:
        self._handler = handler
        self._functions = functions
        self._is_async = is_async
        self._activities: list[Activity] = []

    def _new_activity(self) -> Activity:
        self._activities.append(Activity())
        return self._activities[-1]

    def _is_idle(self, stop_when_idle_s: float | None) -> bool:
        """Returns whether the worker had nothing to do for so long that it ends."""
        idle_s = min(activity.idle_s() for activity in self._activities)
        return stop_when_idle_s is not None and idle_s >= stop_when_idle_s

    def _call_of(self, task: QueueTask) -> Call | None:
        """The call that handles a record. None: there is none, and the record is settled."""
        found, error = call_here(self._find, task)
        if error is not None:
            settle_uncalled(task, error)
            return None
        call: Call = found
        return call

    def _find(self, task: QueueTask) -> Call:
        """Raises LookupError, TaskArgumentsError."""
        if (handler := self._handler) is not None:
            return lambda: handler(task), self._is_async, None
        function = self._functions.of(task)
        args, kwargs = function.arguments(task.value)
        return lambda: function.function(*args, **kwargs), function.is_async, function.retries


class ThreadWorker(Worker):
    """One call of `Queue.work`."""

    def __init__(
        self, take: Take, handler: Handler | None, functions: Functions[Any]
    ) -> None:
        instead = "It needs an event loop: use cluster.async_queue()."
        if handler is not None:
            check_function("The handler", handler, instead=instead)
        else:
            functions.check_plain(instead)
        super().__init__(handler, functions)
        self._take = take
        self._is_stopped = False
        self.failures: list[BaseException] = []

    def stop(self) -> None:
        """Stops the worker. May be called from any thread, a handler, or a signal handler, so it
        takes no lock."""
        self._is_stopped = True

    def run(self, concurrency: int, stop_when_idle_s: float | None, stop_timeout_s: float) -> None:
        """Runs until it is stopped. An interrupt (Ctrl+C) lets running handlers finish, a second
        one does not."""
        threads: list[threading.Thread] = []
        try:
            for number in range(concurrency):
                target, name = partial(self._work, self._new_activity()), f"rayq-worker-{number}"
                thread = threading.Thread(target=target, name=name, daemon=True)
                thread.start()
                threads.append(thread)
            with _stopped_by_sigterm(self.stop):
                while self._is_working():
                    time.sleep(WATCH_S)
                    if self._is_idle(stop_when_idle_s):
                        break
        finally:
            self._is_stopped = True
            deadline_s = time.monotonic() + stop_timeout_s
            for thread in threads:
                thread.join(max(deadline_s - time.monotonic(), 0.0))
            stuck = sum(thread.is_alive() for thread in threads)
            if stuck:
                logger.warning(
                    "%d handlers have not ended within %g s: their records are redelivered "
                    "elsewhere",
                    stuck,
                    stop_timeout_s,
                )
        if (failure := first_of(self.failures)) is not None:
            raise failure

    def _work(self, activity: Activity) -> None:
        try:
            self._loop(activity)
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self.failures.append(error)
            self._is_stopped = True

    def _is_working(self) -> bool:
        return not self._is_stopped

    def _loop(self, activity: Activity) -> None:
        while self._is_working():
            try:
                tasks = self._take(1, TAKE_S)
            except RayqError as error:
                if not self._is_working():  # The queue was closed meanwhile.
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
        if (found := self._call_of(task)) is None:
            return
        handle, _, retries = found
        result, error = call(handle)
        settle(task, check_done(result) if error is None else error, retries)


@contextlib.contextmanager
def _stopped_by_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Makes SIGTERM stop the worker in the main thread, unless the program handles it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop())
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is ours:  # otherwise the program handles it by now
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_stops: list[Callable[[], None]] = []
"""The workers on the main thread's event loop: SIGTERM stops all of them."""


def _stop_all() -> None:
    for stop in list(_stops):
        stop()


@contextlib.contextmanager
def _loop_stopped_by_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Does the same as `_stopped_by_sigterm`, for one of the workers of an event loop."""
    is_main = threading.current_thread() is threading.main_thread()
    is_first = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    loop = asyncio.get_running_loop()
    if is_first:
        loop.add_signal_handler(signal.SIGTERM, _stop_all)
        _stops.clear()  # Those of an abandoned loop are gone.
    elif not is_main or not _stops:
        yield
        return
    _stops.append(stop)
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if stop in _stops:
            _stops.remove(stop)
        if not _stops and signal.getsignal(signal.SIGTERM) is ours:
            loop.remove_signal_handler(signal.SIGTERM)


class AsyncWorker(Worker):
    """One call of `AsyncQueue.work`. Coroutine functions run on the event loop, others in threads,
    as many as the worker handles records at once; awaitables that they return are awaited on the
    loop."""

    def __init__(
        self, take: AsyncTake, handler: Handler | None, functions: Functions[Any]
    ) -> None:
        if handler is not None:
            check_function("The handler", handler, is_awaited=True)
        is_async = handler is not None and is_coroutine_function(handler)
        super().__init__(handler, functions, is_async=is_async)
        self._take = take
        self._wanted = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Stops the worker. May be called from any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._event_loop.call_soon_threadsafe(self._wanted.set)

    async def run(
        self, concurrency: int, stop_when_idle_s: float | None, stop_timeout_s: float
    ) -> None:
        """Runs until it is stopped. Cancelled, it cancels the handlers, whose records are given
        back."""
        threads = ThreadPool(concurrency)
        workers = [
            asyncio.ensure_future(self._loop(self._new_activity(), threads))
            for _ in range(concurrency)
        ]
        try:
            with _loop_stopped_by_sigterm(self.stop):
                while not self._wanted.is_set() and not any(worker.done() for worker in workers):
                    if self._is_idle(stop_when_idle_s):
                        break
                    with contextlib.suppress(asyncio.TimeoutError):
                        async with asyncio.timeout(WATCH_S):
                            await self._wanted.wait()
            self._wanted.set()
            _, stuck = await asyncio.wait(workers, timeout=stop_timeout_s)
            if stuck:
                logger.warning(
                    "%d handlers have not ended within %g s: they are cancelled, those in threads "
                    "continue, and their records are redelivered elsewhere",
                    len(stuck),
                    stop_timeout_s,
                )
        finally:
            self._wanted.set()
            ended = [worker for worker in workers if worker.done()]
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            failure = first_of(
                [
                    error
                    for worker in workers
                    if not worker.cancelled() and (error := worker.exception()) is not None
                ]
            )
        if failure is not None:
            raise failure
        if any(worker.cancelled() for worker in ended):
            raise asyncio.CancelledError("A worker task was cancelled.")

    async def _loop(self, activity: Activity, threads: ThreadPool) -> None:
        while not self._wanted.is_set():
            try:
                tasks = await self._take(1, TAKE_S)
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
                    await self._handle(task, threads)

    async def _handle(self, task: QueueTask, threads: ThreadPool) -> None:
        try:
            if (found := self._call_of(task)) is None:
                return
            handle, is_async, retries = found
            error = await self._failure(handle, is_async, threads)
        except BaseException:  # The worker is cancelled, or the program interrupted.
            give_back(task)
            raise
        settle(task, error, retries)

    async def _failure(
        self, handle: Callable[[], Any], is_async: bool, threads: ThreadPool
    ) -> BaseException | None:
        """Calls a function, and awaits its result if needed; returns the error that it raised.
        Raises CancelledError only if this worker is cancelled."""
        if is_async:
            result, error = call_here(handle)  # This only makes the coroutine.
        else:
            result, error = await threads.run(copy_context().run, call, handle)
        if error is None and is_awaitable(result):
            result, error = await outcome_of(result)
        return check_done(result) if error is None else error

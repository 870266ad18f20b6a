"""The futures that `send` and `send_many` return: light enough to make a million a second.

All records of a batch share one `Outcome`. A future is only (outcome, index within the batch); its
result is computed when somebody asks for it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from rayq.client.callbacks import ends_program
from rayq.client.timeouts import seconds
from rayq.client.wakeup import Wakeup
from rayq.errors import InvalidRequestError, RayqError, TimeoutError
from rayq.records import OffsetRange, RecordMetadata
from rayq.user_functions import check_function, check_ran

logger = logging.getLogger(__name__)
T = TypeVar("T")

OnDelivery = Callable[[RecordMetadata | None, BaseException | None], None]
"""`on_delivery(metadata, error)`: exactly one of the two is None."""


OnAsyncDelivery = Callable[[RecordMetadata | None, BaseException | None], Awaitable[None] | None]
"""The same callback for an async producer, which awaits its result."""


class Outcome:
    """The outcome of one batch. The sender sets it once; any thread may read it.

    No lock is held, because a signal handler or a finalizer that gets here too may interrupt the
    thread that holds it. Appending to a deque and popping from it are atomic, and the thread that
    pops a callback calls it.
    """

    __slots__ = (
        "topic",
        "partition",
        "loop_thread",
        "is_done",
        "error",
        "base_offset",
        "append_time_ms",
        "_callbacks",
        "_waiters",
    )

    def __init__(self, topic: str, partition: int, loop_thread: int) -> None:
        """`loop_thread` is the thread that sets the outcome, by its `threading.get_ident()`."""
        self.topic = topic
        self.partition = partition
        self.loop_thread = loop_thread
        self.is_done = False
        self.error: RayqError | None = None
        self.base_offset: int | None = None
        self.append_time_ms: int | None = None
        """The leader's time, if the topic's records carry it."""
        self._callbacks: deque[Callable[[], None]] = deque()
        self._waiters: deque[Wakeup] = deque()

    def timestamp_ms(self, index: int) -> int:
        """The producer's timestamp of one record."""
        raise NotImplementedError

    def succeed(self, base_offset: int | None, append_time_ms: int | None) -> None:
        self.base_offset = base_offset
        self.append_time_ms = append_time_ms
        self._finish()

    def fail(self, error: RayqError) -> None:
        self.error = error
        self._finish()

    def give_up(self, error: RayqError) -> None:
        """Fails the batch in a forked child, or after the loop has ended, where nothing is sent any
        longer: threads stop waiting. Callbacks are not called, because they belong to the loop. Any
        thread may call this."""
        self._callbacks.clear()
        self.fail(error)

    def _finish(self) -> None:
        assert not self.is_done, "a batch has one outcome"
        self.is_done = True
        for waiter in list(self._waiters):
            waiter.set()
        self._call_all()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once: now if the batch has its outcome already, else later on the
        sender's thread."""
        self._callbacks.append(callback)
        if not self.is_done:
            return
        try:
            self._callbacks.remove(callback)
        except ValueError:
            return  # the sender calls it
        _call(callback)  # only this one: the sender calls the others

    def _call_all(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                _call(callback)
            except BaseException:
                self._call_all()
                raise

    def wait(self, timeout_s: float | None) -> bool:
        """Blocks until the batch has its outcome; returns False if `timeout_s` passed first. Raises
        InvalidRequestError on the sender's thread, where the wait would never end."""
        if self.is_done:
            return True
        if threading.get_ident() == self.loop_thread:
            raise InvalidRequestError(
                "The result of a delivery cannot be waited for on the thread that brings it about, "
                "which is where delivery callbacks run: await it, give it a callback "
                "(add_done_callback), or wait in another thread."
            )
        waiter = Wakeup()
        self._waiters.append(waiter)
        try:
            if not self.is_done:
                waiter.wait(timeout_s)
        finally:
            self._waiters.remove(waiter)
        return self.is_done

    def metadata(self, index: int) -> RecordMetadata:
        """The partition, offset and timestamp of the record at `index` of the batch. Raises the
        error of the delivery."""
        if self.error is not None:
            raise copy.copy(self.error)
        offset = None if self.base_offset is None else self.base_offset + index
        timestamp_ms = self.append_time_ms
        if timestamp_ms is None:
            timestamp_ms = self.timestamp_ms(index)
        return RecordMetadata(self.topic, self.partition, offset, timestamp_ms)


def _call(callback: Callable[[], None]) -> None:
    """Runs a callback: its errors are logged, and other callbacks still run. On the main thread
    SystemExit and KeyboardInterrupt may come from a signal, and end the program as they should."""
    try:
        callback()
    except (KeyboardInterrupt, SystemExit) as error:
        if ends_program(error):
            raise
        logger.exception("a delivery callback cannot end the program: raise it elsewhere")
    except BaseException:  # such as a CancelledError or StopIteration of the callback itself
        logger.exception("a delivery callback failed")


class _Future(msgspec.Struct, Generic[T], gc=False, eq=False):
    """The methods of `concurrent.futures.Future`, and `await`. An accepted record cannot be
    withdrawn, so `cancel` always returns False."""

    def done(self) -> bool:
        raise NotImplementedError

    def _value(self) -> T:
        """The result, or the error, raised. Call it only once `done`."""
        raise NotImplementedError

    def _wait(self, timeout_s: float | None) -> bool:
        raise NotImplementedError

    def _when_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        return not self.done()

    def result(self, timeout: float | None = None) -> T:
        """Waits up to `timeout` seconds (None: until `delivery_timeout_ms` decides). Raises the
        error of the delivery; TimeoutError, after which the record is still in flight;
        InvalidRequestError instead of waiting in a delivery callback."""
        if not self._wait(None if timeout is None else seconds(timeout)):
            raise TimeoutError(
                f"No result of the delivery after {timeout} s. It continues until "
                "delivery_timeout_ms: ask again, or call flush()."
            )
        return self._value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the delivery, or None if it succeeded. Waits as `result` does."""
        if not self._wait(None if timeout is None else seconds(timeout)):
            raise TimeoutError(f"No result of the delivery after {timeout} s. It continues.")
        try:
            self._value()
        except RayqError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Calls `callback(future)` once the future is done: at once, or on the client's event-loop
        thread, where it must not block. Raises HandlerError for a coroutine function, which nobody
        would await."""
        check_function("A callback", callback)

        def call_back() -> None:
            check_ran("A callback", callback(self), may_go_on=True)

        self._when_done(call_back)

    def __reduce__(self) -> str:
        raise TypeError(
            f"{type(self).__name__} stays in the process that sent: send its result() instead."
        )

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()

            def arrive() -> None:
                if not arrived.done():
                    arrived.set_result(None)

            self._when_done(lambda: discard(loop.call_soon_threadsafe(arrive)))
            yield from arrived
        return self._value()


def discard(_value: object) -> None:
    """Turns a callback that returns something into one that returns None."""


def _check_delivered(result: object) -> None:
    check_ran("on_delivery", result, may_go_on=True)


class DeliveryFuture(_Future[RecordMetadata], gc=False, eq=False):
    """The delivery of one record. Its result is a
    `RecordMetadata(topic, partition, offset, timestamp_ms)`."""

    outcome: Outcome
    index: int

    def done(self) -> bool:
        return self.outcome.is_done

    def _value(self) -> RecordMetadata:
        return self.outcome.metadata(self.index)

    def _wait(self, timeout_s: float | None) -> bool:
        return self.outcome.wait(timeout_s)

    def _when_done(self, callback: Callable[[], None]) -> None:
        self.outcome.when_done(callback)

    def call_on_delivery(
        self, on_delivery: OnAsyncDelivery, finish: Callable[[object], None] = _check_delivered
    ) -> None:
        """Calls `on_delivery(metadata, error)` once the outcome is known, and then `finish` with
        its result."""

        def deliver() -> None:
            if self.outcome.error is not None:
                result = on_delivery(None, copy.copy(self.outcome.error))
            else:
                result = on_delivery(self._value(), None)
            if result is not None:
                finish(result)

        self.outcome.when_done(deliver)


class BatchRange(msgspec.Struct, frozen=True, gc=False):
    """Consecutive records of `send_many` in one batch."""

    outcome: Outcome
    first_index: int
    count: int


class ManyDeliveryFuture(_Future[list[OffsetRange]], gc=False, eq=False):
    """The delivery of a `send_many`. Its result is the list of offsets written, one `OffsetRange`
    for each run of offsets. With acks=0 the client learns no offsets, and the list is empty. The
    future is done when all records have their outcome; it raises the first failure."""

    parts: Sequence[BatchRange]

    def done(self) -> bool:
        return all(part.outcome.is_done for part in self.parts)

    def _value(self) -> list[OffsetRange]:
        ranges: list[OffsetRange] = []
        last: dict[tuple[str, int], int] = {}
        for part in self.parts:
            metadata = part.outcome.metadata(part.first_index)
            if metadata.offset is None:
                continue
            end = metadata.offset + part.count
            partition = (metadata.topic, metadata.partition)
            index = last.get(partition)
            if index is not None and ranges[index].end == metadata.offset:
                ranges[index] = ranges[index]._replace(end=end)
            else:
                last[partition] = len(ranges)
                ranges.append(OffsetRange(*partition, metadata.offset, end))
        return ranges

    def _wait(self, timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for part in self.parts:
            left_s = None if deadline is None else deadline - time.monotonic()
            if not part.outcome.wait(left_s):
                return False
        return True

    def _when_done(self, callback: Callable[[], None]) -> None:
        pending = {id(part.outcome): part.outcome for part in self.parts}
        if not pending:
            _call(callback)
            return
        left = [None] * (len(pending) - 1)
        """One entry for each outcome except the last. Popping is atomic."""

        def count_down() -> None:
            try:
                left.pop()
            except IndexError:
                callback()

        for outcome in pending.values():
            outcome.when_done(count_down)

"""What `send` and `send_many` return: futures so light that a million a second can be made.

All records of a batch share one `Outcome`. A future is only (outcome, index within the batch): its
result is worked out when somebody asks for it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from rayq.client.timeouts import seconds
from rayq.errors import RayqError, TimeoutError
from rayq.records import OffsetRange, RecordMetadata

logger = logging.getLogger(__name__)
T = TypeVar("T")

OnDelivery = Callable[[RecordMetadata | None, BaseException | None], None]
"""`on_delivery(metadata, error)`: exactly one of the two is None."""


class Outcome:
    """What became of one batch. Set once, by the sender; read by any thread."""

    __slots__ = (
        "topic",
        "partition",
        "is_done",
        "error",
        "base_offset",
        "append_time_ms",
        "_callbacks",
        "_lock",
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.is_done = False
        self.error: RayqError | None = None
        self.base_offset: int | None = None
        self.append_time_ms: int | None = None
        """The leader's time, where the topic's records carry it."""
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

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

    def _finish(self) -> None:
        assert not self.is_done, "a batch has one outcome"
        with self._lock:
            self.is_done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls back once, at once when it is done already, else on the thread of the sender."""
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        _call(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Takes back a `when_done` that is no longer wanted."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def wait(self, timeout_s: float | None) -> bool:
        """Blocks until done; False when the time was up first."""
        if not self.is_done:
            event = threading.Event()
            self.when_done(event.set)
            try:
                event.wait(timeout_s)
            finally:
                self.forget(event.set)
        return self.is_done

    def metadata(self, index: int) -> RecordMetadata:
        if self.error is not None:
            raise copy.copy(self.error)
        offset = None if self.base_offset is None else self.base_offset + index
        timestamp_ms = self.append_time_ms
        if timestamp_ms is None:
            timestamp_ms = self.timestamp_ms(index)
        return RecordMetadata(self.topic, self.partition, offset, timestamp_ms)


def _call(callback: Callable[[], None]) -> None:
    """Runs a callback as concurrent.futures does: what it raises is logged, others still run."""
    try:
        callback()
    except Exception:
        logger.exception("a delivery callback failed")


class _Future(msgspec.Struct, Generic[T], gc=False, eq=False):
    """The methods of `concurrent.futures.Future`, and `await`. An accepted record cannot be taken
    back, so `cancel` always answers False."""

    def done(self) -> bool:
        raise NotImplementedError

    def _value(self) -> T:
        """The result, or the error raised; only once `done`."""
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
        error of the delivery, or TimeoutError, after which the record is still on its way."""
        if not self._wait(None if timeout is None else seconds(timeout)):
            raise TimeoutError(
                f"No result of the delivery after {timeout} s. It goes on until "
                "delivery_timeout_ms: ask again, or call flush()."
            )
        return self._value()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the delivery, None when it succeeded. Waits as `result` does."""
        if not self._wait(None if timeout is None else seconds(timeout)):
            raise TimeoutError(f"No result of the delivery after {timeout} s. It goes on.")
        try:
            self._value()
        except RayqError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Calls `callback(future)` once it is done: at once, or on the client's event-loop thread,
        where it must not block."""
        self._when_done(lambda: discard(callback(self)))

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
    """Makes a callback that returns None of one that returns something."""


class DeliveryFuture(_Future[RecordMetadata], gc=False, eq=False):
    """Of one record: `RecordMetadata(topic, partition, offset, timestamp_ms)`."""

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

    def call_on_delivery(self, on_delivery: OnDelivery) -> None:
        """Arranges for `on_delivery(metadata, error)`."""

        def deliver() -> None:
            if self.outcome.error is not None:
                on_delivery(None, copy.copy(self.outcome.error))
            else:
                on_delivery(self._value(), None)

        self.outcome.when_done(deliver)


class Part(msgspec.Struct, frozen=True, gc=False):
    """Some records of `send_many`, one after another in one batch."""

    outcome: Outcome
    first_index: int
    count: int


class ManyDeliveryFuture(_Future[list[OffsetRange]], gc=False, eq=False):
    """Of `send_many`: where its records went, one range for each run of offsets. Under acks=0,
    which learns no offsets, the list is empty. Done when all are; raises the first failure."""

    parts: Sequence[Part]

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
            place = (metadata.topic, metadata.partition)
            index = last.get(place)
            if index is not None and ranges[index].end == metadata.offset:
                ranges[index] = ranges[index]._replace(end=end)
            else:
                last[place] = len(ranges)
                ranges.append(OffsetRange(*place, metadata.offset, end))
        return ranges

    def _wait(self, timeout_s: float | None) -> bool:
        if not self.done():
            event = threading.Event()
            self._when_done(event.set)
            event.wait(timeout_s)
        return self.done()

    def _when_done(self, callback: Callable[[], None]) -> None:
        pending = {id(part.outcome): part.outcome for part in self.parts}
        remaining = len(pending)
        if remaining == 0:
            _call(callback)
            return
        lock = threading.Lock()

        def count_down() -> None:
            nonlocal remaining
            with lock:
                remaining -= 1
                is_last = remaining == 0
            if is_last:
                callback()

        for outcome in pending.values():
            outcome.when_done(count_down)

"""Collects records into batches. Knows no network and no event loop; safe to call from any thread.

User threads append, the sender takes. The lock is held for a few appends only, never while waiting
or encoding.

Memory: a batch reserves its full size when it is opened and gives back what it did not use when it
is closed, so that `send` counts nothing but the batch. When the buffer is exhausted, `append`
answers None, open batches become due at once, and whoever waits is called when there is room again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, repeat
from operator import add
from typing import cast

from rayq.client.futures import DeliveryFuture, Outcome, Part
from rayq.config import ProducerConfig
from rayq.errors import ClosedError
from rayq.records import Headers

RECORD_OVERHEAD_BYTES = 24
"""Most that a record takes in a batch beside its key, value and headers (msgpack's lengths: 5 for
the key, 5 for the value, 9 for the timestamp, 5 for the list of headers)."""
HEADER_OVERHEAD_BYTES = 12
"""Most that a header takes in a batch beside its name and value."""
BATCH_OVERHEAD_BYTES = 256
"""Most that a batch takes beside its records: its header and the lengths of its columns."""

Row = tuple[bytes | None, bytes | None, Headers | None, int]
"""`(value, key, headers, timestamp_ms)`. One append of one tuple: a Ctrl+C cannot tear it."""


class Batch(Outcome):
    """Records of one partition that travel together, and what became of them."""

    __slots__ = (
        "queue",
        "rows",
        "size_bytes",
        "reserved_bytes",
        "opened_at",
        "count",
        "values",
        "keys",
        "headers",
        "timestamps_ms",
    )

    def __init__(self, queue: PartitionQueue, reserved_bytes: int, opened_at: float) -> None:
        super().__init__(queue.topic, queue.partition)
        self.queue = queue
        self.rows: list[Row] = []
        self.size_bytes = 0
        self.reserved_bytes = reserved_bytes
        self.opened_at = opened_at
        # Set by `seal`.
        self.count = 0
        self.values: Sequence[bytes | None] = ()
        self.keys: Sequence[bytes | None] | None = None
        self.headers: Sequence[Headers | None] | None = None
        self.timestamps_ms: int | list[int] = 0

    def seal(self) -> None:
        """Turns the rows into columns; nothing is appended from here on."""
        values, keys, headers, timestamps_ms = zip(*self.rows, strict=True)
        self.count = len(self.rows)
        self.values = list(values)
        self.keys = list(keys) if keys.count(None) < self.count else None
        self.headers = list(headers) if any(headers) else None
        first = timestamps_ms[0]
        self.timestamps_ms = (
            first if timestamps_ms.count(first) == self.count else list(timestamps_ms)
        )
        self.rows = []

    def timestamp_ms(self, index: int) -> int:
        times = self.timestamps_ms
        if isinstance(times, int):
            return times
        return times[index]


class PartitionQueue:
    """The batches of one partition that the sender has not taken yet."""

    __slots__ = (
        "topic",
        "topic_id",
        "partition",
        "limit_bytes",
        "append_time",
        "open",
        "closed",
    )

    def __init__(
        self, topic: str, topic_id: str, partition: int, limit_bytes: int, append_time: bool
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self.limit_bytes = limit_bytes
        """Size at which a batch is closed."""
        self.append_time = append_time
        """Whether records carry the leader's time."""
        self.open: Batch | None = None
        self.closed: deque[Batch] = deque()


class Accumulator:
    """All queues of one producer, within `buffer_memory`."""

    def __init__(
        self,
        config: ProducerConfig,
        now: Callable[[], float],
        on_work: Callable[[PartitionQueue], None],
    ) -> None:
        """`on_work(queue)` is called, from any thread and with the lock held, when there is news of
        a queue (a batch was opened, perhaps one closed): it only passes the word on."""
        self._config = config
        self._now = now
        self._on_work = on_work
        self._lock = threading.Lock()
        self._reserved_bytes = 0
        self._room_waiters: deque[tuple[int, Callable[[], None]]] = deque()
        self._incomplete: dict[Batch, None] = {}
        self._closed = False
        self.is_flushing = 0
        """How many `flush` calls wait: while any does, open batches are due at once."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes reserved by batches that wait or are in flight."""
        return self._reserved_bytes

    @property
    def is_exhausted(self) -> bool:
        """Somebody waits for room."""
        return bool(self._room_waiters)

    def incomplete(self) -> list[Batch]:
        """Every batch that has records and no outcome yet."""
        with self._lock:
            return list(self._incomplete)

    def close(self) -> None:
        """Refuses records from here on; wakes those that wait for room, to find that out."""
        with self._lock:
            self._closed = True
            waiters, self._room_waiters = self._room_waiters, deque()
        for _, waiter in waiters:
            waiter()

    # --- user threads ---------------------------------------------------------------------------

    def append(
        self,
        queue: PartitionQueue,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        timestamp_ms: int,
        size_bytes: int,
    ) -> DeliveryFuture | None:
        """Adds one record; `size_bytes` includes RECORD_OVERHEAD_BYTES. None: there is no room."""
        with self._lock:
            batch = queue.open
            if batch is None or batch.size_bytes + size_bytes > batch.reserved_bytes:
                batch = self._open(queue, size_bytes)
                if batch is None:
                    return None
            rows = batch.rows
            index = len(rows)
            rows.append((value, key, headers, timestamp_ms))
            batch.size_bytes += size_bytes
        return DeliveryFuture(batch, index)

    def append_many(
        self,
        queue: PartitionQueue,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        ends: Sequence[int],
        start: int,
        timestamp_ms: int,
        parts: list[Part],
        *,
        one_batch: bool,
    ) -> int:
        """Adds `values[start:]` (with `ends` from `running_sizes`) to one partition, until all are
        in, there is no room, or, with `one_batch`, a batch is full. Answers where it stopped, and
        appends to `parts` where they went."""
        total = len(values)
        with self._lock:
            while start < total:
                batch = queue.open
                count = 0
                if batch is not None:
                    count = _fitting(ends, start, batch.reserved_bytes - batch.size_bytes)
                if batch is None or count == 0:
                    size_bytes = ends[start + 1] - ends[start] + RECORD_OVERHEAD_BYTES
                    batch = self._open(queue, size_bytes)
                    if batch is None:
                        break
                    count = _fitting(ends, start, batch.reserved_bytes)
                assert count > 0, "a batch is opened with room for a record"
                index = len(batch.rows)
                stop = start + count
                batch.rows.extend(
                    zip(
                        values[start:stop],
                        repeat(None, count) if keys is None else keys[start:stop],
                        repeat(None, count),
                        repeat(timestamp_ms, count),
                        strict=True,
                    )
                )
                batch.size_bytes += ends[stop] - ends[start] + count * RECORD_OVERHEAD_BYTES
                parts.append(Part(batch, index, count))
                start = stop
                if one_batch:
                    break
        return start

    def when_room(self, size_bytes: int, waiter: Callable[[], None]) -> None:
        """Calls back once when there should be room for a record of that size."""
        with self._lock:
            call_now = self._closed or self._has_room(size_bytes)
            if not call_now:
                self._room_waiters.append((size_bytes, waiter))
                for batch in self._incomplete:
                    if batch.queue.open is batch:
                        self._on_work(batch.queue)
        if call_now:
            waiter()

    def _has_room(self, size_bytes: int) -> bool:
        """Once full, the buffer counts as full until it is half empty: waking a sender for each
        batch would make the two threads take turns at every batch."""
        used_bytes, limit_bytes = self._reserved_bytes, self._config.buffer_memory
        need_bytes = max(size_bytes, self._config.batch_size)
        return used_bytes == 0 or used_bytes + need_bytes <= max(limit_bytes // 2, need_bytes)

    def _open(self, queue: PartitionQueue, size_bytes: int) -> Batch | None:
        """Closes the open batch, if any, and opens one that takes `size_bytes` at least."""
        if self._closed:
            raise ClosedError("The producer is closed: make a new one with cluster.producer().")
        self._close_open(queue)
        reserve_bytes = max(queue.limit_bytes, size_bytes)
        room_bytes = self._config.buffer_memory - self._reserved_bytes
        if reserve_bytes > room_bytes and self._reserved_bytes > 0:
            self._on_work(queue)
            return None
        batch = Batch(queue, reserve_bytes, self._now())
        self._reserved_bytes += reserve_bytes
        self._incomplete[batch] = None
        queue.open = batch
        self._on_work(queue)
        return batch

    def _close_open(self, queue: PartitionQueue) -> None:
        batch = queue.open
        if batch is None:
            return
        queue.open = None
        if not batch.rows:  # an interrupt came between opening it and the append
            self._reserved_bytes -= batch.reserved_bytes
            del self._incomplete[batch]
            batch.succeed(None, None)
            return
        self._reserved_bytes -= batch.reserved_bytes - batch.size_bytes
        batch.reserved_bytes = batch.size_bytes
        queue.closed.append(batch)

    # --- the sender -----------------------------------------------------------------------------

    def take(self, queue: PartitionQueue, *, is_open_due: bool) -> Batch | None:
        """The next batch of the queue, sealed; the open one only where it is due."""
        with self._lock:
            if not queue.closed and is_open_due:
                self._close_open(queue)
            if not queue.closed:
                return None
            batch = queue.closed.popleft()
        batch.seal()
        return batch

    def take_all(self, queue: PartitionQueue) -> list[Batch]:
        """Every batch of the queue, to be failed."""
        batches = []
        while (batch := self.take(queue, is_open_due=True)) is not None:
            batches.append(batch)
        return batches

    def oldest_opened_at(self, queue: PartitionQueue) -> float | None:
        """When the oldest batch of the queue was opened."""
        with self._lock:
            if queue.closed:
                return queue.closed[0].opened_at
            return None if queue.open is None else queue.open.opened_at

    def release(self, batch: Batch) -> None:
        """The batch has an outcome: its memory is free again."""
        ready: list[Callable[[], None]] = []
        with self._lock:
            del self._incomplete[batch]
            self._reserved_bytes -= batch.reserved_bytes
            while self._room_waiters and self._has_room(self._room_waiters[0][0]):
                ready.append(self._room_waiters.popleft()[1])
        for waiter in ready:
            waiter()


def running_sizes(values: Sequence[bytes | None], keys: Sequence[bytes | None] | None) -> list[int]:
    """`ends[i]` is the size in bytes of the first `i` values and keys, without overhead."""
    ends = list(accumulate(_lengths(values), initial=0))
    if keys is not None:
        ends = list(map(add, ends, accumulate(_lengths(keys), initial=0)))
    return ends


def _lengths(column: Sequence[bytes | None]) -> Iterable[int]:
    if None in column:
        return (0 if item is None else len(item) for item in column)
    return map(len, cast("Sequence[bytes]", column))


def _fitting(ends: Sequence[int], first: int, room_bytes: int) -> int:
    """How many records from `first` fit into `room_bytes`. By halving: the running size grows with
    each record."""
    start = ends[first]
    low, high = 0, min(len(ends) - 1 - first, max(room_bytes, 0) // RECORD_OVERHEAD_BYTES)
    while low < high:
        middle = (low + high + 1) // 2
        if ends[first + middle] - start + middle * RECORD_OVERHEAD_BYTES <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return low

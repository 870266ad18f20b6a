"""Accumulator of a producer: collects records into batches. Knows no network and no event loop;
safe to call from any thread.

User threads append and the sender takes. A thread holds the lock only for a few assignments, never
while it waits or encodes, and **calls nothing while it holds the lock**, except an append at the
very end: at a call Python may run signal handlers and finalizers, which may send too, and wait for
the result. (Some version of Python may interrupt elsewhere. So the holder may take the lock again,
and the sender does not wait for a stalled holder.)

Memory: a batch reserves a little when it is opened, and twice as much each time that is full, up to
the size at which it is closed; it then gives back the unused part. So `send` counts nothing but the
batch, and batches of many partitions are open at once. When the buffer is exhausted, `append`
returns None, open batches become due at once, and each waiter is called when there is room again.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import add
from typing import cast

from rayq.client.producing.futures import BatchRange, DeliveryFuture, Outcome
from rayq.config import KIB, ProducerConfig
from rayq.errors import ClosedError, RayqError
from rayq.records import Headers

RECORD_OVERHEAD_BYTES = 24
"""Maximum size of a record in a batch beyond its key, value and headers (msgpack's lengths: 5 for
the key, 5 for the value, 9 for the timestamp, 5 for the list of headers)."""
HEADER_OVERHEAD_BYTES = 12
"""Maximum size of a header in a batch beyond its name and value."""
BATCH_OVERHEAD_BYTES = 256
"""Maximum size of a batch beyond its records: its header and the lengths of its columns."""

FIRST_RESERVE_BYTES = 16 * KIB
"""Number of bytes that an open batch reserves at first."""

LOCK_PATIENCE_S = 0.002
"""Maximum time the sender waits for a sending thread. After a timeout the sender does not wait
again for a stalled thread (in a signal handler, or without a processor) until it continues."""

Row = tuple[bytes | None, bytes | None, Headers | None, int]
"""`(value, key, headers, timestamp_ms)`. A record is appended as one tuple, so that a Ctrl+C leaves
all of it or nothing."""


class ProducerBatch(Outcome):
    """Records of one partition that travel together, and their outcome."""

    __slots__ = (
        "queue",
        "rows",
        "count",
        "size_bytes",
        "reserved_bytes",
        "opened_at",
        "is_announced",
        "is_urgent",
        "is_chunk",
        "is_large",
        "is_barrier",
        "values",
        "keys",
        "headers",
        "timestamps_ms",
    )

    def __init__(
        self, queue: PartitionQueue, reserved_bytes: int, opened_at: float, loop_thread: int
    ) -> None:
        super().__init__(queue.topic, queue.partition, loop_thread)
        self.queue = queue
        self.rows: list[Row] = []
        self.count = 0
        self.size_bytes = 0
        self.reserved_bytes = reserved_bytes
        self.opened_at = opened_at
        self.is_announced = False
        """True if the sender was told of the batch. The thread that adds the first record does
        that; if an interrupt comes in between, the thread that adds the next one."""
        self.is_urgent = False
        """True if a thread waits for the batch and sends nothing more meanwhile. Then the batch
        does not linger."""
        self.is_chunk = False
        """True if its only record is a chunk of a large value, and so not a record of the user."""
        self.is_large = False
        """True if its only record stands for a large value."""
        self.is_barrier = False
        """True if it is taken only once all batches taken before have their outcome."""
        # Set by `seal`.
        self.values: Sequence[bytes | None] = ()
        self.keys: Sequence[bytes | None] | None = None
        self.headers: Sequence[Headers | None] | None = None
        self.timestamps_ms: int | list[int] = 0

    @property
    def record_count(self) -> int:
        """The number of the user's records in it."""
        return 0 if self.is_chunk else self.count

    def seal(self) -> None:
        """Turns the rows into columns; nothing is appended from here on. Idempotent. Raises the
        error that keeps a large value from being sent."""
        if not self.rows:
            return
        assert len(self.rows) == self.count, "each record has its place"
        values, keys, headers, timestamps_ms = zip(*self.rows, strict=True)
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


@dataclass(slots=True, eq=False)
class PartitionQueue:
    """The batches of one partition that the sender has not taken yet."""

    topic: str
    topic_id: str
    partition: int
    limit_bytes: int
    """The size at which a batch is closed."""
    append_time: bool
    """True if records carry the leader's time."""
    open: ProducerBatch | None = None
    closed: deque[ProducerBatch] = field(default_factory=deque)


class Accumulator:
    """All queues of one producer, within `buffer_memory`."""

    def __init__(
        self,
        config: ProducerConfig,
        now: Callable[[], float],
        on_work: Callable[[PartitionQueue], None],
    ) -> None:
        """Made in the sender's thread. `now` is a monotonic clock, in seconds. `on_work(queue)` is
        called, from any thread, when a queue has a new batch or one that became due. It only tells
        the sender."""
        self._config = config
        self._now = now
        self._on_work = on_work
        self._lock = threading.RLock()
        self._lock_patience_s = LOCK_PATIENCE_S
        self._loop_thread = threading.get_ident()
        self._reserved_bytes = 0
        """The bytes that all batches so far reserved. Only a holder of the lock writes it."""
        self._released_bytes = 0
        """The part of them that belongs to batches with an outcome. Only the sender writes it."""
        self._room_waiters: deque[tuple[int, Callable[[], None]]] = deque()
        self._incomplete: dict[ProducerBatch, None] = {}
        self._closed = False
        self._refusal: RayqError | None = None
        """The reason why no record is accepted now."""
        self.is_flushing = 0
        """The number of waiting `flush` calls: while there is any, open batches are due at once."""

    @property
    def buffered_bytes(self) -> int:
        """The bytes reserved by batches that wait or are in flight."""
        return self._reserved_bytes - self._released_bytes

    def incomplete(self) -> list[ProducerBatch]:
        """All batches that have records and no outcome yet, the oldest first."""
        return list(self._incomplete)

    def close(self) -> None:
        """Refuses records from here on. Wakes the threads that wait for room, so that they see
        it."""
        self._closed = True
        self._refusal = ClosedError(
            "The producer is closed: make a new one with cluster.producer()."
        )
        self._wake_all()

    def refuse(self, error: RayqError | None) -> None:
        """Refuses records with `error` from here on, apart from those that still fit into an open
        batch; None accepts them again. Has no effect once closed."""
        if self._closed:
            return
        self._refusal = error
        if error is not None:
            self._wake_all()

    def _wake_all(self) -> None:
        for _, waiter in list(self._room_waiters):
            waiter()

    def check_accepts(self) -> None:
        """Raises the error with which records are refused, if they are."""
        refusal = self._refusal
        if refusal is not None:
            raise copy.copy(refusal) from refusal.__cause__

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
        """Adds one record and returns its future, or None if there is no room. `size_bytes` is the
        record's size with RECORD_OVERHEAD_BYTES. Raises the error with which records are
        refused."""
        row = (value, key, headers, timestamp_ms)
        while True:
            with self._lock:
                batch = queue.open
                if batch is not None and batch.size_bytes + size_bytes <= batch.reserved_bytes:
                    index = batch.count
                    batch.count = index + 1
                    batch.size_bytes += size_bytes
                    batch.rows.append(row)
                    break
            if not self._make_room(queue, batch, size_bytes, size_bytes):
                return None
        if not batch.is_announced:
            self._announce(batch)
        return DeliveryFuture(batch, index)

    def append_many(
        self,
        queue: PartitionQueue,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        ends: Sequence[int],
        start: int,
        timestamp_ms: int,
        parts: list[BatchRange],
        *,
        one_batch: bool,
    ) -> int:
        """Adds `values[start:]` (with `ends` from `running_sizes`) to one partition, until all are
        added, there is no room, or, with `one_batch`, a batch is full. Returns the index of the
        first value that was not added, and appends the parts of the others to `parts`. Raises the
        error with which records are refused."""
        total = len(values)
        while start < total:
            batch = queue.open
            count = 0
            if batch is not None:
                count = _fitting(ends, start, batch.reserved_bytes - batch.size_bytes)
            if batch is None or count == 0:
                size_bytes = ends[start + 1] - ends[start] + RECORD_OVERHEAD_BYTES
                all_bytes = ends[total] - ends[start] + (total - start) * RECORD_OVERHEAD_BYTES
                if not self._make_room(queue, batch, size_bytes, all_bytes):
                    break
                continue
            stop = start + count
            rows = list(
                zip(
                    values[start:stop],
                    repeat(None, count) if keys is None else keys[start:stop],
                    repeat(None, count),
                    repeat(timestamp_ms, count),
                    strict=True,
                )
            )
            size_bytes = ends[stop] - ends[start] + count * RECORD_OVERHEAD_BYTES
            with self._lock:
                index = batch.count
                fits = queue.open is batch
                fits = fits and batch.size_bytes + size_bytes <= batch.reserved_bytes
                if fits:
                    batch.count = index + count
                    batch.size_bytes += size_bytes
                    batch.rows += rows
            if not fits:
                continue  # another thread was faster
            parts.append(BatchRange(batch, index, count))
            if not batch.is_announced:
                self._announce(batch)
            start = stop
            if one_batch and _fitting(ends, start, queue.limit_bytes - batch.size_bytes) == 0:
                break
        return start

    def append_closed(self, queue: PartitionQueue, batches: tuple[ProducerBatch, ...]) -> bool:
        """Adds batches that are already full, all of them or none, after the records that this
        thread appended before. They reserve their sizes. Returns False if there is no room; batches
        larger than the whole buffer get room once the buffer is empty. Raises the error with which
        records are refused."""
        self._close_open(queue, queue.open)
        opened_at = self._now()
        for batch in batches:
            batch.opened_at, batch.loop_thread = opened_at, self._loop_thread
        added = dict.fromkeys(batches)
        size_bytes = sum(batch.reserved_bytes for batch in batches)
        limit_bytes = self._config.buffer_memory
        with self._lock:
            is_refused = self._refusal is not None
            has_room = False
            if not is_refused:
                used_bytes = self._reserved_bytes - self._released_bytes
                has_room = used_bytes == 0 or used_bytes + size_bytes <= limit_bytes
                if has_room:
                    self._reserved_bytes += size_bytes
                    self._incomplete |= added
                    queue.closed += batches
        if is_refused:
            self.check_accepts()
        self._on_work(queue)
        return has_room

    def _announce(self, batch: ProducerBatch) -> None:
        self._on_work(batch.queue)
        batch.is_announced = True

    def hurry(self, future: DeliveryFuture) -> None:
        """Makes the record's batch go out without lingering, with everything in it by then."""
        batch = future.outcome
        assert isinstance(batch, ProducerBatch), "records travel in batches"
        if batch.queue.open is batch:
            batch.is_urgent = True
            self._on_work(batch.queue)

    def when_room(self, size_bytes: int, waiter: Callable[[], None]) -> None:
        """Calls `waiter` when there should be room for a record of `size_bytes`, perhaps more than
        once."""
        self._room_waiters.append((size_bytes, waiter))
        if self._refusal is not None or self._has_room(size_bytes):
            self.stop_waiting(size_bytes, waiter)
            waiter()
            return
        for batch in self.incomplete():
            if batch.queue.open is batch:
                self._on_work(batch.queue)

    def stop_waiting(self, size_bytes: int, waiter: Callable[[], None]) -> None:
        """Takes back a `when_room` whose waiter was not called yet."""
        try:
            self._room_waiters.remove((size_bytes, waiter))
        except ValueError:
            pass  # it was woken already

    def shut(self, error: RayqError) -> None:
        """Refuses records as `refuse` does, from a user's thread: when it returns, nothing more is
        accepted, whatever other threads are about to do."""
        with self._lock:
            self._refusal = self._refusal or error
        self.close_open_batches()

    def close_open_batches(self) -> None:
        """Closes open batches. Called before a thread waits for everything sent: the sender then
        needs no lock to take them."""
        for batch in self.incomplete():
            if batch.queue.open is batch:
                self._close_open(batch.queue, batch)

    def _has_room(self, size_bytes: int) -> bool:
        """Returns whether there is room. Once full, the buffer counts as full until it is half
        empty. Otherwise a sending thread would be woken for each batch, and would take turns with
        the sender at every batch."""
        used_bytes, limit_bytes = self.buffered_bytes, self._config.buffer_memory
        need_bytes = max(size_bytes, self._config.batch_size)
        return used_bytes == 0 or used_bytes + need_bytes <= max(limit_bytes // 2, need_bytes)

    def _make_room(
        self,
        queue: PartitionQueue,
        full: ProducerBatch | None,
        size_bytes: int,
        wanted_bytes: int,
    ) -> bool:
        """Makes room for at least `size_bytes`, and `wanted_bytes` if they fit: in the open batch,
        which is `full`, or in a new one, unless another thread did. Returns False if there is none.
        Raises the error with which records are refused."""
        if full is not None and self._grow(queue, full, size_bytes, wanted_bytes):
            return True
        self._close_open(queue, full)
        reserve_bytes = min(max(wanted_bytes, FIRST_RESERVE_BYTES), queue.limit_bytes)
        reserve_bytes = max(reserve_bytes, size_bytes)
        batch = ProducerBatch(queue, reserve_bytes, self._now(), self._loop_thread)
        limit_bytes = self._config.buffer_memory
        with self._lock:
            is_refused = self._refusal is not None
            has_room = True
            if not is_refused and queue.open is None:
                used_bytes = self._reserved_bytes - self._released_bytes
                has_room = used_bytes == 0 or used_bytes + reserve_bytes <= limit_bytes
                if has_room:
                    self._reserved_bytes += reserve_bytes
                    self._incomplete[batch] = None
                    queue.open = batch
        if is_refused:
            self.check_accepts()
        if not has_room:
            self._on_work(queue)
        return has_room

    def _grow(
        self, queue: PartitionQueue, full: ProducerBatch, size_bytes: int, wanted_bytes: int
    ) -> bool:
        """Makes the open batch reserve more, if it is still `full`. Returns False if it has its
        maximum size, or the buffer has no room."""
        if full.size_bytes + size_bytes > queue.limit_bytes:
            return False
        reserve_bytes = max(2 * full.reserved_bytes, full.size_bytes + wanted_bytes)
        reserve_bytes = min(reserve_bytes, queue.limit_bytes)
        limit_bytes = self._config.buffer_memory
        with self._lock:
            if queue.open is not full:
                return False
            more_bytes = reserve_bytes - full.reserved_bytes
            if self._reserved_bytes - self._released_bytes + more_bytes > limit_bytes:
                return False
            if more_bytes > 0:
                self._reserved_bytes += more_bytes
                full.reserved_bytes = reserve_bytes
        return True

    def _close_open(self, queue: PartitionQueue, known: ProducerBatch | None) -> None:
        """Closes the open batch of the queue, if it is still `known`."""
        if known is None:
            return
        parcel = (known,)
        with self._lock:
            if queue.open is not known:
                return
            queue.open = None
            self._reserved_bytes -= known.reserved_bytes - known.size_bytes
            known.reserved_bytes = known.size_bytes
            if known.count > 0:
                queue.closed += parcel
                return
            # An interrupt came between opening it and the append.
            del self._incomplete[known]
        known.succeed(None, None)

    # --- the sender -----------------------------------------------------------------------------

    def take(self, queue: PartitionQueue, *, is_open_due: bool) -> ProducerBatch | None:
        """The next batch of the queue, or None. The open batch is taken only if it is due, and not
        while a stalled thread holds the lock."""
        if is_open_due and not queue.closed and queue.open is not None:
            self._try_to_close_open(queue)
        return queue.closed.popleft() if queue.closed else None

    def _try_to_close_open(self, queue: PartitionQueue) -> None:
        is_free = self._lock.acquire(timeout=self._lock_patience_s)
        self._lock_patience_s = LOCK_PATIENCE_S if is_free else 0.0
        if is_free:
            try:
                self._close_open(queue, queue.open)
            finally:
                self._lock.release()

    def has_barrier(self, queue: PartitionQueue) -> bool:
        """Returns whether the next batch of the queue waits for all batches taken before."""
        return bool(queue.closed) and queue.closed[0].is_barrier

    def is_hurried(self, queue: PartitionQueue) -> bool:
        """Returns whether the open batch of the queue does not linger: somebody waits for it, for
        all batches, or for room."""
        if self.is_flushing > 0 or self._room_waiters:
            return True
        batch = queue.open
        return batch is not None and batch.is_urgent

    def oldest_opened_at(self, queue: PartitionQueue) -> float | None:
        """The time at which the oldest batch of the queue was opened, in seconds of the monotonic
        clock; None without a batch."""
        if queue.closed:
            return queue.closed[0].opened_at
        batch = queue.open
        return None if batch is None else batch.opened_at

    def release(self, batch: ProducerBatch) -> None:
        """Frees the memory of a batch that has an outcome."""
        del self._incomplete[batch]
        self._released_bytes += batch.reserved_bytes
        while True:
            try:
                size_bytes, waiter = self._room_waiters[0]
            except IndexError:
                return
            if not self._has_room(size_bytes):
                return
            self.stop_waiting(size_bytes, waiter)
            waiter()


def running_sizes(values: Sequence[bytes | None], keys: Sequence[bytes | None] | None) -> list[int]:
    """The running sizes: `ends[i]` is the size in bytes of the first `i` values and keys, without
    overhead."""
    ends = list(accumulate(_lengths(values), initial=0))
    if keys is not None:
        ends = list(map(add, ends, accumulate(_lengths(keys), initial=0)))
    return ends


def _lengths(column: Sequence[bytes | None]) -> Iterable[int]:
    if None in column:
        return (0 if item is None else len(item) for item in column)
    return map(len, cast("Sequence[bytes]", column))


def _fitting(ends: Sequence[int], first: int, room_bytes: int) -> int:
    """The number of records from `first` on that fit into `room_bytes`. It is found by bisection,
    because the running size grows with each record."""
    start = ends[first]
    low, high = 0, min(len(ends) - 1 - first, max(room_bytes, 0) // RECORD_OVERHEAD_BYTES)
    while low < high:
        middle = (low + high + 1) // 2
        if ends[first + middle] - start + middle * RECORD_OVERHEAD_BYTES <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return low

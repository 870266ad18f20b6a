"""The batches that a large value is sent as: one for each chunk, and one for the record itself.

They stand in the queue of their partition one after the other, so nothing of the same producer
comes between the value and the records sent after it. The record is a *barrier*: the sender takes
it only when everything sent before has its outcome. So its manifest can name the offset of each
chunk. The accumulator says when a batch was opened.
"""

from __future__ import annotations

import google_crc32c

from rayq.client.producing.accumulator import (
    BATCH_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    Accumulator,
    PartitionQueue,
    ProducerBatch,
)
from rayq.client.producing.futures import DeliveryFuture
from rayq.core.large.values import (
    CHUNK_OVERHEAD_BYTES,
    OFFSET_BYTES_MAX,
    chunk_headers,
    cut,
    manifest_of_chunks,
)
from rayq.errors import DeliveryTimeoutError, OutcomeUnknownError, RayqError
from rayq.records import Headers

MANIFEST_BYTES_MAX = 256
"""Maximum size of a manifest without the offsets of its chunks or its URI."""


class _Value:
    """A value in flight, and the outcomes of its chunks so far."""

    def __init__(self, value: bytes, value_id: bytes, chunk_count: int) -> None:
        self.data = value
        self.value_id = value_id
        self.crc = 0
        self.offsets: list[int | None] = [None] * chunk_count
        self.failure: RayqError | None = None

    def check(self) -> None:
        """Raises the error of a chunk that was not delivered. The outcome of a chunk may be
        unknown, but that of the record is known: it was never sent."""
        if isinstance(self.failure, OutcomeUnknownError):
            raise DeliveryTimeoutError(
                f"A chunk of the value was not acknowledged, so its record was not sent, and "
                f"nobody sees the value. {self.failure}"
            )
        if self.failure is not None:
            raise self.failure


class _ChunkBatch(ProducerBatch):
    """A chunk in flight."""

    __slots__ = ("_value", "_index", "_start", "_end")

    def __init__(
        self, queue: PartitionQueue, timestamp_ms: int, value: _Value
    ) -> None:
        super().__init__(queue, 0, 0.0, 0)
        self.is_announced = True
        self.is_chunk = True
        self.count = 1
        self.timestamps_ms = timestamp_ms
        self._value = value
        self._index = self._start = self._end = 0

    def holds(self, index: int, start: int, end: int) -> None:
        """Sets the piece of the value that this chunk holds."""
        self._index, self._start, self._end = index, start, end
        self.reserved_bytes = self.size_bytes = end - start

    def seal(self) -> None:
        """Copies its piece. Batches are sealed in order, so the CRC is extended in order."""
        value = self._value
        value.check()
        if self.values:
            return
        piece = value.data[self._start : self._end]
        value.crc = google_crc32c.extend(value.crc, piece)
        self.values = [piece]
        self.headers = [chunk_headers(value.value_id, self._index)]

    def succeed(self, base_offset: int | None, append_time_ms: int | None) -> None:
        self._value.offsets[self._index] = base_offset
        super().succeed(base_offset, append_time_ms)

    def fail(self, error: RayqError) -> None:
        self._value.failure = self._value.failure or error
        super().fail(error)


class _RecordBatch(ProducerBatch):
    """The record that stands for a large value. The user waits for its outcome."""

    __slots__ = ("_value", "_manifest")

    def __init__(
        self,
        queue: PartitionQueue,
        timestamp_ms: int,
        key: bytes | None,
        headers: Headers | None,
        size_bytes: int,
    ) -> None:
        super().__init__(queue, size_bytes, 0.0, 0)
        self.is_announced = True
        self.is_large = True
        self.count = 1
        self.size_bytes = size_bytes
        self.timestamps_ms = timestamp_ms
        self.keys = None if key is None else [key]
        self.headers = None if headers is None else [headers]
        self._value: _Value | None = None
        self._manifest: bytes | None = None

    def stands_for(self, value: _Value) -> None:
        """Makes this the record of `value`: its manifest names the chunks, once they are
        acknowledged."""
        self.is_barrier = True
        self._value = value

    def has_manifest(self, manifest: bytes) -> None:
        """Makes this the record of a value stored as an object."""
        self._manifest = manifest

    def seal(self) -> None:
        if self._manifest is None:
            value = self._value
            assert value is not None
            value.check()
            offsets = [offset for offset in value.offsets if offset is not None]
            assert len(offsets) == len(value.offsets), "all chunks have their outcome"
            self._manifest = manifest_of_chunks(
                len(value.data), value.crc, value.value_id, offsets
            )
            self._value = None
        self.values = [self._manifest]


def chunk_bytes_of(max_message_bytes: int) -> int:
    """The length of the chunks in a topic."""
    overhead_bytes = BATCH_OVERHEAD_BYTES + RECORD_OVERHEAD_BYTES + CHUNK_OVERHEAD_BYTES
    return max(max_message_bytes - overhead_bytes, max_message_bytes // 2, 1)


def record_bytes(chunk_count: int, rest_bytes: int) -> int:
    """The maximum size of the record of a value with `chunk_count` chunks. `rest_bytes` is the size
    of its key and headers."""
    return rest_bytes + RECORD_OVERHEAD_BYTES + MANIFEST_BYTES_MAX + OFFSET_BYTES_MAX * chunk_count


def send_chunks(
    accumulator: Accumulator,
    queue: PartitionQueue,
    value: bytes,
    key: bytes | None,
    headers: Headers | None,
    timestamp_ms: int,
    *,
    value_id: bytes,
    chunk_bytes: int,
    rest_bytes: int,
) -> DeliveryFuture | None:
    """Appends a value in chunks, and its record. Returns None if there is no room. Raises the error
    with which records are refused."""
    pieces = cut(len(value), chunk_bytes)
    shared = _Value(value, value_id, len(pieces))
    chunks: list[ProducerBatch] = []
    for index, (start, end) in enumerate(pieces):
        chunk = _ChunkBatch(queue, timestamp_ms, shared)
        chunk.holds(index, start, end)
        chunks.append(chunk)
    record = _RecordBatch(
        queue,
        timestamp_ms,
        key,
        headers,
        record_bytes(len(pieces), rest_bytes),
    )
    record.stands_for(shared)
    if not accumulator.append_closed(queue, (*chunks, record)):
        return None
    return DeliveryFuture(record, 0)


def send_manifest(
    accumulator: Accumulator,
    queue: PartitionQueue,
    manifest: bytes,
    key: bytes | None,
    headers: Headers | None,
    timestamp_ms: int,
    *,
    rest_bytes: int,
) -> DeliveryFuture | None:
    """Appends the record of a value that is an object. Otherwise the same as `send_chunks`."""
    size_bytes = rest_bytes + RECORD_OVERHEAD_BYTES + len(manifest)
    record = _RecordBatch(
        queue,
        timestamp_ms,
        key,
        headers,
        size_bytes,
    )
    record.has_manifest(manifest)
    if not accumulator.append_closed(queue, (record,)):
        return None
    return DeliveryFuture(record, 0)

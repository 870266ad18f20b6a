"""Intake of a producer: turns the arguments of `send` and `send_many` into records in the
accumulator.

It runs in the user's thread: it checks arguments, chooses a partition, and divides many records.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from rayq.client.arguments import many, shown, topic_name
from rayq.client.producing.accumulator import (
    BATCH_OVERHEAD_BYTES,
    HEADER_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    Accumulator,
    PartitionQueue,
    running_sizes,
)
from rayq.client.producing.futures import BatchRange, DeliveryFuture
from rayq.client.producing.large_batches import (
    chunk_bytes_of,
    record_bytes,
    send_chunks,
    send_manifest,
)
from rayq.client.producing.partitioner import call_partitioner, next_sticky_partition
from rayq.config import ProducerConfig, TopicConfig, parse_stored
from rayq.core.large.values import CHUNK_OFFSETS_MAX, VALUE_ID_BYTES
from rayq.environment import Clock
from rayq.errors import (
    InvalidRequestError,
    InvalidTimestampError,
    NullKeyError,
    RecordTooLargeError,
)
from rayq.messages import TopicMetadata
from rayq.records import Headers
from rayq.storage.batch import encode_batch

TIMESTAMP_END_MS = 2**62
STICKY_S = 0.1
"""Time for which records without a key go to one partition, unless a batch of it fills up before.
If each batch went to another partition, most would find nothing in flight there and be sent at
once, with a record or two in each. Each batch costs a copy, a sync and, in a queue, a lock."""
_REMEDY = (
    "send less, raise it with admin.alter_topic_config, or send large values with "
    'producer(large_values="chunks").'
)


class StoredValue(NamedTuple):
    """A stand-in for a value that was written to an object store."""

    manifest: bytes


class TopicQueues:
    """A topic for `send`: its queues, and the next one for records without a key."""

    def __init__(
        self, metadata: TopicMetadata, config: ProducerConfig, known: TopicQueues | None
    ) -> None:
        topic_config = parse_stored(TopicConfig, metadata.config)
        self.metadata = metadata
        self.topic_id = metadata.topic_id
        self.needs_keys = topic_config.is_compacted
        self.max_message_bytes = topic_config.max_message_bytes
        self.plain_bytes_max = topic_config.plain_bytes_max
        room_bytes = max(self.max_message_bytes - BATCH_OVERHEAD_BYTES, 1)
        self.limit_bytes = min(config.batch_size, room_bytes)
        append_time = topic_config.message_timestamp_type == "append"
        self.queues: list[PartitionQueue] = []
        if known is not None and known.topic_id == metadata.topic_id:
            self.queues = known.queues[:]
            for queue in self.queues:
                queue.limit_bytes = self.limit_bytes
                queue.append_time = append_time
        for partition in range(len(self.queues), len(metadata.partitions)):
            self.queues.append(
                PartitionQueue(
                    topic=metadata.name,
                    topic_id=metadata.topic_id,
                    partition=partition,
                    limit_bytes=self.limit_bytes,
                    append_time=append_time,
                )
            )
        self.count = len(self.queues)
        led = [p.partition for p in metadata.partitions if p.leader is not None]
        self.sticky_candidates = led or list(range(self.count))
        self.sticky = self.queues[self.sticky_candidates[0]]
        self.sticky_until_s = 0.0
        """The time from which on the next batch that is opened goes to another partition."""


@dataclass(slots=True, eq=False)
class PartitionRecords:
    """Records of a `send_many` for one partition. The records from `start` on are not appended
    yet."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None
    ends: Sequence[int]
    """The running sizes, as `running_sizes` returns them."""
    start: int = 0


@dataclass(slots=True, eq=False)
class SendManyJob:
    """A `send_many` in progress."""

    topic: TopicQueues
    timestamp_ms: int
    parts: list[BatchRange] = field(default_factory=list)
    pending: list[tuple[PartitionQueue | None, PartitionRecords]] = field(default_factory=list)
    """The records left, by partition; the queue is None for records without a key."""
    is_sticky_full: bool = False

    def add(self, queue: PartitionQueue | None, records: PartitionRecords) -> None:
        self.pending.append((queue, records))

    def next_size_bytes(self) -> int:
        records = self.pending[0][1]
        return records.ends[records.start + 1] - records.ends[records.start]


class Intake:
    """Entry point of records. Its methods may be called from any thread, and never wait."""

    def __init__(
        self,
        config: ProducerConfig,
        accumulator: Accumulator,
        clock: Clock,
        source: random.Random,
    ) -> None:
        self.topics: dict[str, TopicQueues] = {}
        """The topics whose metadata is known. Only the loop writes here; it replaces entries and
        never changes one."""
        self._config = config
        self._accumulator = accumulator
        self._wall_ms = clock.wall_ms
        self._now = clock.monotonic
        self._sticky_s = STICKY_S if config.linger_ms else 0.0
        self._random = source

    def offer(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Iterable[tuple[str, bytes]] | None,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> DeliveryFuture | None:
        """Appends a record without waiting. Returns None if the topic's metadata is missing or the
        buffer is full. Raises TypeError, NullKeyError, RecordTooLargeError, InvalidTimestampError,
        InvalidRequestError, ClosedError."""
        try:
            known = self.topics.get(topic)
        except TypeError:  # not hashable
            topic_name(topic)
            raise
        if known is None:
            return None
        size_bytes = RECORD_OVERHEAD_BYTES
        is_stored = False
        if value is not None:
            if type(value) is not bytes:
                is_stored = type(value) is StoredValue
                value = value.manifest if is_stored else _plain_bytes("value", value)
            size_bytes += len(value)
        if key is not None:
            if type(key) is not bytes:
                key = _plain_bytes("key", key)
            size_bytes += len(key)
        elif known.needs_keys:
            raise _no_key(topic)
        checked: Headers | None = None
        if headers:
            checked, headers_bytes = _check_headers(headers)
            size_bytes += headers_bytes
        if timestamp_ms is None:
            timestamp_ms = self._wall_ms()
        else:
            _check_timestamp(timestamp_ms)
        if partition is not None:
            queue = _queue_of(known, topic, partition)
        elif self._config.partitioner is not None:
            queue = known.queues[call_partitioner(self._config.partitioner, key, known.count)]
        elif key is not None:
            queue = known.queues[crc32(key) % known.count]  # `partition_of_key`, in line
        else:
            queue = known.sticky
            batch = queue.open
            if batch is None:
                if self._now() >= known.sticky_until_s:
                    queue = self._next_sticky(known)
            elif batch.size_bytes + size_bytes > queue.limit_bytes:
                queue = self._next_sticky(known)
        if is_stored:
            return send_manifest(
                self._accumulator,
                queue,
                value,
                key,
                checked,
                timestamp_ms,
                rest_bytes=size_bytes - len(value),
            )
        if size_bytes > known.limit_bytes:
            error = self._size_error(known, value, key, checked, size_bytes)
            if error is not None and self._config.large_values == "chunks":
                return self._offer_chunks(
                    known, queue, value, key, checked, timestamp_ms, size_bytes, error
                )
            if error is not None:
                raise error
        return self._accumulator.append(queue, value, key, checked, timestamp_ms, size_bytes)

    def _offer_chunks(
        self,
        known: TopicQueues,
        queue: PartitionQueue,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        timestamp_ms: int,
        size_bytes: int,
        error: RecordTooLargeError,
    ) -> DeliveryFuture | None:
        """Does the same as `offer` for a record that is too large for a batch, as `error` says."""
        if known.needs_keys:
            raise InvalidRequestError(
                f"{queue.topic!r} is compacted (cleanup_policy), which would separate the chunks "
                "of a large value from each other: give the producer the URL of an object store as "
                f"large_values. {error}"
            )
        value = value or b""
        chunk_bytes = chunk_bytes_of(known.max_message_bytes)
        chunk_count = -(-len(value) // chunk_bytes)
        rest_bytes = size_bytes - len(value)
        needed_bytes = record_bytes(chunk_count, rest_bytes) + BATCH_OVERHEAD_BYTES
        if not value or needed_bytes > known.max_message_bytes or chunk_count > CHUNK_OFFSETS_MAX:
            raise error.with_message(
                f"{error} Chunks do not help: the key, the headers and the offsets of "
                f"{chunk_count} chunks are too large together."
            )
        return send_chunks(
            self._accumulator,
            queue,
            value,
            key,
            headers,
            timestamp_ms,
            value_id=self._random.randbytes(VALUE_ID_BYTES),
            chunk_bytes=chunk_bytes,
            rest_bytes=rest_bytes,
        )

    def needs_object(
        self, topic: str, value: Any, key: Any, headers: Iterable[tuple[str, bytes]] | None
    ) -> bool:
        """Returns whether a record is too large for a batch; False if the topic's metadata is not
        known. Raises TypeError, InvalidRequestError."""
        known = self.topics.get(topic)
        if known is None or value is None:
            return False
        value = _plain_bytes("value", value)
        key = None if key is None else _plain_bytes("key", key)
        checked, headers_bytes = _check_headers(headers or ())
        size_bytes = RECORD_OVERHEAD_BYTES + len(value) + len(key or b"") + headers_bytes
        if size_bytes <= known.limit_bytes:
            return False
        return self._size_error(known, value, key, checked or None, size_bytes) is not None

    def offer_many(self, job: SendManyJob) -> bool:
        """Appends as much of a `send_many` as fits. Returns False if the buffer is full before
        everything is appended."""
        accumulator = self._accumulator
        while job.pending:
            queue, records = job.pending[0]
            if queue is not None:
                target = queue
            else:
                target = job.topic.sticky
                if target.open is None or job.is_sticky_full:
                    target = self._next_sticky(job.topic)
            before = records.start
            records.start = accumulator.append_many(
                target,
                records.values,
                records.keys,
                records.ends,
                before,
                job.timestamp_ms,
                job.parts,
                one_batch=queue is None,
            )
            if records.start == len(records.values):
                job.pending.pop(0)
            elif records.start == before:
                return False
            job.is_sticky_full = queue is None
        return True

    def job_of_many(
        self,
        topic: str,
        values: Sequence[Any],
        keys: Sequence[Any] | None,
        partition: int | None,
    ) -> SendManyJob | None:
        """Checks the arguments of a `send_many` and divides them by partition. Returns None if the
        topic's metadata is missing."""
        known = self.topics.get(topic_name(topic))
        if known is None:
            return None
        values = _plain_column("value", many("values", values))
        if keys is not None:
            keys = _plain_column("key", many("keys", keys))
            if len(keys) != len(values):
                raise InvalidRequestError(
                    f"send_many got {len(values)} values and {len(keys)} keys: it needs one each."
                )
        if known.needs_keys and values and (keys is None or None in keys):
            raise _no_key(topic)
        ends = running_sizes(values, keys)
        longest = max(map(int.__sub__, ends[1:], ends), default=0) + RECORD_OVERHEAD_BYTES
        if longest > known.limit_bytes:
            for index, value in enumerate(values):
                size_bytes = ends[index + 1] - ends[index] + RECORD_OVERHEAD_BYTES
                if size_bytes > known.limit_bytes:
                    key = None if keys is None else keys[index]
                    if error := self._size_error(known, value, key, None, size_bytes):
                        raise error.with_message(f"{error} send_many sends no large values.")
        job = SendManyJob(known, self._wall_ms())
        if not values:
            return job
        if partition is not None:
            job.add(_queue_of(known, topic, partition), PartitionRecords(values, keys, ends))
        elif keys is None and self._config.partitioner is None:
            job.add(None, PartitionRecords(values, None, ends))
        else:
            self._divide(job, known, values, keys)
        return job

    def _divide(
        self,
        job: SendManyJob,
        known: TopicQueues,
        values: list[bytes | None],
        keys: list[bytes | None] | None,
    ) -> None:
        partitioner = self._config.partitioner
        count = known.count
        all_keys: Sequence[bytes | None] = [None] * len(values) if keys is None else keys
        columns: dict[int | None, tuple[list[bytes | None], list[bytes | None]]] = {}
        places: list[int | None]
        if partitioner is not None:
            places = [call_partitioner(partitioner, key, count) for key in all_keys]
        else:
            places = [None if key is None else crc32(key) % count for key in all_keys]
        for place in dict.fromkeys(places):
            columns[place] = ([], [])
        appends = {place: (pair[0].append, pair[1].append) for place, pair in columns.items()}
        for place, value, key in zip(places, values, all_keys, strict=True):
            add_value, add_key = appends[place]
            add_value(value)
            add_key(key)
        for place, (some_values, some_keys) in columns.items():
            queue = None if place is None else known.queues[place]
            kept_keys = None if keys is None or place is None else some_keys
            ends = running_sizes(some_values, kept_keys)
            job.add(queue, PartitionRecords(some_values, kept_keys, ends))

    def _next_sticky(self, known: TopicQueues) -> PartitionQueue:
        partition = next_sticky_partition(
            known.sticky_candidates, known.sticky.partition, self._random
        )
        known.sticky = known.queues[partition]
        known.sticky_until_s = self._now() + self._sticky_s
        return known.sticky

    def _size_error(
        self,
        known: TopicQueues,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        size_bytes: int,
    ) -> RecordTooLargeError | None:
        """Checks a record that is larger than `limit_bytes`, and so has a batch of its own, against
        the topic's limits: one on its stored size, and the wider one on its size before
        compression. Returns None if it is within them."""
        if size_bytes + BATCH_OVERHEAD_BYTES <= known.max_message_bytes:
            return None
        if size_bytes > known.plain_bytes_max:
            return RecordTooLargeError(
                f"A record of {size_bytes} bytes is above {known.plain_bytes_max}, what the "
                f"topic's max_message_bytes of {known.max_message_bytes} allows before "
                f"compression: {_REMEDY}"
            )
        stored_bytes = len(
            encode_batch([value], [key], [headers], compression=self._config.compression_type)
        )
        if stored_bytes <= known.max_message_bytes:
            return None
        return RecordTooLargeError(
            f"A record of {size_bytes} bytes ({stored_bytes} as it would be stored) is above "
            f"the topic's max_message_bytes of {known.max_message_bytes}: {_REMEDY}"
        )


def _queue_of(known: TopicQueues, topic: str, partition: int) -> PartitionQueue:
    if type(partition) is not int:
        raise TypeError(f"A partition must be an int, not {type(partition).__name__}.")
    if not 0 <= partition < known.count:
        raise InvalidRequestError(
            f"Topic {topic!r} has partitions 0 to {known.count - 1}, not {partition}."
        )
    return known.queues[partition]


def _no_key(topic: str) -> NullKeyError:
    return NullKeyError(
        f"A record without a key was sent to {topic!r}, which is compacted (cleanup_policy): it "
        "keeps the latest record of each key, so every record needs one."
    )


def value_bytes(value: Any) -> int:
    """The size of a value, 0 for None. Raises TypeError."""
    if type(value) is StoredValue:
        return len(value.manifest)
    return 0 if value is None else len(_plain_bytes("value", value))


def _plain_bytes(what: str, found: object) -> bytes:
    """Plain bytes from an instance of a subclass of bytes (numpy's, for example), which cannot be
    packed. Raises TypeError for anything else."""
    if not isinstance(found, bytes):
        raise TypeError(
            f"A record's {what} has to be bytes (or None), not {type(found).__name__}: encode it "
            f"first, or give the producer a function that does, such as {what}_serializer="
            "rayq.json_serializer or str.encode."
        )
    return b"".join((found,))


def _plain_column(what: str, column: list[bytes | None]) -> list[bytes | None]:
    if set(map(type, column)) <= {bytes, type(None)}:
        return column
    return [item if item is None else _plain_bytes(what, item) for item in column]


def _check_headers(headers: Iterable[tuple[str, bytes]]) -> tuple[Headers, int]:
    """A copy of the headers, and its size in a batch in bytes. Raises TypeError,
    InvalidRequestError."""
    if isinstance(headers, Mapping):
        raise TypeError("Headers are a list of (name, value) pairs: use list(headers.items()).")
    if not isinstance(headers, Iterable):
        raise TypeError(f"Headers must be a list of (name, value) pairs, not {shown(headers)}.")
    checked: Headers = []
    size_bytes = 0
    for header in headers:
        try:
            name, value = header
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"A header must be a pair of a name and a value, not {shown(header)}."
            ) from error
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise TypeError(
                "A header is a pair of a str and bytes, not of "
                f"{type(name).__name__} and {type(value).__name__}."
            )
        if type(name) is not str:
            name = "".join((name,))  # plain characters, because msgpack knows no subclasses
        if type(value) is not bytes:
            value = b"".join((value,))
        try:
            name_bytes = len(name.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The name of a header must be text that UTF-8 can encode, not {name!r}."
            ) from error
        checked.append((name, value))
        size_bytes += name_bytes + len(value) + HEADER_OVERHEAD_BYTES
    return checked, size_bytes


def _check_timestamp(timestamp_ms: Any) -> None:
    if type(timestamp_ms) is not int:
        raise TypeError(f"timestamp_ms must be an int, not {type(timestamp_ms).__name__}.")
    if not 0 <= timestamp_ms < TIMESTAMP_END_MS:
        raise InvalidTimestampError(
            f"timestamp_ms is Unix time in milliseconds, from 0 and below 2**62, not "
            f"{shown(timestamp_ms)}."
        )

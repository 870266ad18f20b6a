"""The last records of a partition, counted as records: compaction leaves gaps between offsets."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, TypeVar

from rayq.client.client import Client
from rayq.client.consuming.fetcher import Fetcher
from rayq.client.metadata import LeaderAndEpoch
from rayq.config import MIB, ConsumerConfig
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    UnsupportedFormatError,
)
from rayq.records import Record, TopicPartition
from rayq.storage.batch import BatchHeader, decode_columns, split_batches
from rayq.wire.messages import EARLIEST, LATEST, AnyRequest, Fetch, FetchResponse

R = TypeVar("R", bound=Record[Any, Any])

SCAN_BYTES = 1 * MIB
"""What one fetch asks for while records are counted."""
OFFSETS_MIN = 1000
"""How many offsets are looked through at a time, at least."""


def check_count(count: object) -> int:
    """Raises InvalidRequestError."""
    if type(count) is not int or not 0 <= count < 2**62:
        raise InvalidRequestError(f"The number of last records is an int from 0, not {count!r}.")
    return count


def newest(records: Iterable[R], count: int) -> list[R]:
    """The `count` newest of records that come in the order of each partition: merged by their
    timestamps, without changing that order."""
    by_partition: dict[tuple[str, int], deque[R]] = defaultdict(lambda: deque(maxlen=count))
    for record in records:
        by_partition[record.topic, record.partition].append(record)
    merged = heapq.merge(*by_partition.values(), key=lambda record: record.timestamp_ms)
    return list(deque(merged, maxlen=count))


class LastRecords:
    """Finds out where the last records of partitions begin. Belongs to the loop."""

    def __init__(self, client: Client, config: ConsumerConfig, fetcher: Fetcher) -> None:
        self._client = client
        self._config = config
        self._fetcher = fetcher

    async def offset(self, place: TopicPartition, count: int) -> int:
        """The offset of the first of the last `count` records, as the log is now; the log start
        where there are fewer, the end for none. Only what compaction may have been at is read,
        backwards from the end."""
        first, end = await self._bound(place, EARLIEST), await self._bound(place, LATEST)
        if count >= end - first:
            return first
        answer, _ = await self._fetch(place, end - count, 1)
        stop = max(first, min(end, answer.cleaned_offset))
        missing = count - (end - stop)  # From `stop` on every offset has a record.
        if missing <= 0:
            return end - count
        width = max(missing, OFFSETS_MIN)
        while stop > first:
            start = max(first, stop - width)
            try:
                found = await self._offsets(place, start, stop, missing)
            except OffsetOutOfRangeError:
                first = await self._bound(place, EARLIEST)
                if first <= start:
                    raise
                continue  # Retention deleted them meanwhile.
            if len(found) == missing:
                return found[0]
            missing -= len(found)
            stop, width = start, 2 * width
        return first

    async def _offsets(
        self, place: TopicPartition, start: int, stop: int, count: int
    ) -> deque[int]:
        """The last `count` offsets from `start` to `stop` that have a record."""
        found: deque[int] = deque(maxlen=count)
        while start < stop:
            answer, payload = await self._fetch(place, start, SCAN_BYTES)
            for at, header in split_batches(payload):
                offsets = _offsets_of(payload, at, header)
                found.extend(offset for offset in offsets if start <= offset < stop)
            if answer.next_offset <= start:
                break
            start = answer.next_offset
        return found

    async def _bound(self, place: TopicPartition, which: int) -> int:
        offset = await self._fetcher.list_offset(place, which)
        assert offset is not None, "a log has a beginning and an end"
        return offset

    async def _fetch(
        self, place: TopicPartition, offset: int, bytes_max: int
    ) -> tuple[FetchResponse, memoryview]:
        def build(topic_id: str, leader: LeaderAndEpoch) -> AnyRequest:
            return Fetch(
                topic_id=topic_id,
                partition=place.partition,
                leader_epoch=leader.epoch,
                offset=offset,
                last_epoch=None,
                bytes_max=bytes_max,
                wait_ms=0,
            )

        config = self._config
        return await self._client.exchange_with_leader(
            *place,
            build,
            timeout_s=config.default_api_timeout_ms / 1000,
            attempt_timeout_s=config.request_timeout_ms / 1000,
            retry_backoff_s=config.retry_backoff_ms / 1000,
        )


def _offsets_of(payload: memoryview, at: int, header: BatchHeader) -> Iterable[int]:
    """None of a batch that holds nothing to read."""
    if header.is_control:
        return ()
    try:
        return decode_columns(payload, at, header).offsets
    except (CorruptBatchError, UnsupportedFormatError):
        return ()

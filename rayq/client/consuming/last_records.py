"""Last records of a partition, counted as records: compaction leaves gaps between offsets, and so
do transactions and the chunks of large values."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rayq.client.client import Client
from rayq.client.consuming.fetcher import Fetcher
from rayq.client.consuming.subscription import transaction_of
from rayq.client.leader_requests import fetch_now
from rayq.client.metadata import LeaderAndEpoch
from rayq.config import MIB, ConsumerConfig
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    UnsupportedFormatError,
)
from rayq.messages import (
    EARLIEST,
    READ_COMMITTED,
    DescribeOpenTransactions,
    DescribeOpenTransactionsResponse,
    FetchResponse,
    Request,
    ResponseT,
)
from rayq.records import Record, TopicPartition
from rayq.storage.batch import BatchHeader, decode_columns, split_batches

R = TypeVar("R", bound=Record[Any, Any])

SCAN_BYTES = 1 * MIB
"""Size of one fetch while records are counted."""
OFFSETS_MIN = 1000
"""Minimum number of offsets looked through at a time."""


def check_count(count: object) -> int:
    """Checks a number of last records. Raises InvalidRequestError."""
    if type(count) is not int or not 0 <= count < 2**62:
        raise InvalidRequestError(
            f"The number of last records must be an int from 0, not {count!r}."
        )
    return count


def newest(records: Iterable[R], count: int) -> list[R]:
    """The `count` newest of records that arrive in the order of each partition: merged by
    timestamp, without changing that order."""
    by_partition: dict[tuple[str, int], deque[R]] = defaultdict(lambda: deque(maxlen=count))
    for record in records:
        by_partition[record.topic, record.partition].append(record)
    merged = heapq.merge(*by_partition.values(), key=lambda record: record.timestamp_ms)
    return list(deque(merged, maxlen=count))


class LastRecords:
    """A search for the offsets at which the last records of partitions begin. Belongs to the
    loop."""

    def __init__(self, client: Client, config: ConsumerConfig, fetcher: Fetcher) -> None:
        self._client = client
        self._config = config
        self._fetcher = fetcher

    async def offset(self, place: TopicPartition, count: int) -> int:
        """The offset of the first of the last `count` records of the current log; the log start if
        there are fewer, the end for 0. Records are decoded only where there may be gaps, backwards
        from the end: where compaction may have run, where there are chunks of large values, and
        everywhere in a log with transactions, whose markers take offsets."""
        first, log = await self._log_start(place), await self._describe(place)
        is_committed = self._fetcher.isolation == READ_COMMITTED
        end = log.last_stable_offset if is_committed else log.high_watermark
        if count >= end - first:
            return first
        stop = end
        if not log.is_used:
            answer, _ = await self._fetch(place, end - count, 1)
            stop = max(first, min(end, answer.cleaned_offset))
        if await self._has_chunks(place, max(stop, end - count), end):
            stop = end
        missing = count - (end - stop)  # From `stop` on every offset has a record.
        if missing <= 0:
            return end - count
        width = max(missing, OFFSETS_MIN)
        while stop > first:
            start = max(first, stop - width)
            try:
                found = await self._offsets(place, start, stop, missing)
            except OffsetOutOfRangeError:
                first = await self._log_start(place)
                if first <= start:
                    raise
                continue  # Retention deleted them meanwhile.
            if len(found) == missing:
                return found[0]
            missing -= len(found)
            stop, width = start, 2 * width
        return first

    async def _has_chunks(self, place: TopicPartition, start: int, stop: int) -> bool:
        """Returns whether there are chunks of large values, which are not records, from `start` to
        `stop`."""
        while start < stop:
            answer, payload = await self._fetch(place, start, SCAN_BYTES)
            if any(header.is_chunk for _, header in split_batches(payload)):
                return True
            if answer.next_offset <= start:
                break
            start = answer.next_offset
        return False

    async def _offsets(
        self, place: TopicPartition, start: int, stop: int, count: int
    ) -> deque[int]:
        """The last `count` offsets from `start` to `stop` that have a record."""
        found: deque[int] = deque(maxlen=count)
        while start < stop:
            answer, payload = await self._fetch(place, start, SCAN_BYTES)
            aborted = answer.aborted if self._fetcher.isolation == READ_COMMITTED else ()
            for at, header in split_batches(payload):
                if transaction_of(header) in aborted:
                    continue
                offsets = _offsets_of(payload, at, header)
                found.extend(offset for offset in offsets if start <= offset < stop)
            if answer.next_offset <= start:
                break
            start = answer.next_offset
        return found

    async def _log_start(self, place: TopicPartition) -> int:
        offset = await self._fetcher.list_offset(place, EARLIEST)
        assert offset is not None, "a log has a beginning"
        return offset

    async def _describe(self, place: TopicPartition) -> DescribeOpenTransactionsResponse:
        answer, _ = await self._ask(
            place,
            lambda topic_id, leader: DescribeOpenTransactions(
                topic_id=topic_id,
                partition=place.partition,
                leader_epoch=leader.epoch,
                since_offset=None,
            ),
        )
        return answer

    async def _fetch(
        self, place: TopicPartition, offset: int, bytes_max: int
    ) -> tuple[FetchResponse, memoryview]:
        return await self._ask(
            place,
            fetch_now(place.partition, offset, bytes_max, self._fetcher.isolation),
        )

    async def _ask(
        self, place: TopicPartition, build: Callable[[str, LeaderAndEpoch], Request[ResponseT]]
    ) -> tuple[ResponseT, memoryview]:
        config = self._config
        return await self._client.exchange_with_leader(
            *place,
            build,
            timeout_s=config.default_api_timeout_ms / 1000,
            attempt_timeout_s=config.request_timeout_ms / 1000,
            retry_backoff_s=config.retry_backoff_ms / 1000,
        )


def _offsets_of(payload: memoryview, at: int, header: BatchHeader) -> Iterable[int]:
    """The offsets of a batch; empty if it has nothing to read."""
    if header.is_control or header.is_chunk:
        return ()
    try:
        return decode_columns(payload, at, header).offsets
    except (CorruptBatchError, UnsupportedFormatError):
        return ()

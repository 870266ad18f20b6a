"""Reader of large values: it assembles them from their chunks, or reads them from their objects.

A value is returned whole and checked, or there is a typed error. Nothing is remembered of
incomplete values, so a reader may begin anywhere, seek and end at any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from rayq.client.client import UNKNOWN_TOPIC_PATIENCE_S, Client
from rayq.client.large.cache import ChunkCache
from rayq.client.large.objects import is_below, read_object
from rayq.client.leader_requests import check_range, fetch_now, list_offset
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.record_errors import of_large_value
from rayq.config import MIB, ConsumerConfig
from rayq.config.urls import without_credentials
from rayq.core.large.values import Manifest, Place, check_chunk, join, read_manifest
from rayq.errors import (
    AuthorizationError,
    ConfigError,
    CorruptBatchError,
    LargeValueError,
    LargeValueRefusedError,
    LargeValueUnavailableError,
    MissingExtraError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RayqError,
    RemoteDeniedError,
    RemoteMissingError,
    UnknownTopicError,
    UnreadableRecordError,
    counted,
)
from rayq.logs import RateLimitedLogger
from rayq.messages import (
    EARLIEST,
    READ_UNCOMMITTED,
    Request,
    ResponseT,
)
from rayq.records import TopicPartition
from rayq.storage.batch import BatchHeader, decode_columns, read_header, split_batches

logger = logging.getLogger(__name__)

FETCH_BYTES = 4 * MIB
"""Maximum size of one fetch while chunks are read back."""
CHUNK_SLACK_BYTES = 1024
"""Maximum excess of a chunk's batch over its share of the value."""
TRIES_MAX = 5
"""Maximum number of times chunks may arrive with a wrong CRC before the reader is told."""
STALE_LEADER_S = 5.0
"""Time for which a chunk is requested that is not committed where its manifest says: longer than a
replaced leader answers without knowing it. Each chunk was committed before its manifest was
written."""


class LargeValues:
    """The large values of one reader. Belongs to the loop."""

    def __init__(self, client: Client, config: ConsumerConfig) -> None:
        self.expired = 0
        """The number of values skipped because chunks of them were below the log start."""
        self._client = client
        self._config = config
        self._cache = ChunkCache()
        clock = client.environment.clock
        self._expirations = RateLimitedLogger(logger, logging.WARNING, clock.monotonic)

    def came_by(
        self, topic_id: str, partition: int, payload: memoryview, at: int, header: BatchHeader
    ) -> None:
        """Caches a fetched chunk: its manifest may follow."""
        batch = bytes(payload[at : at + header.length])
        self._cache.add((topic_id, partition, header.base_offset), batch)

    async def value(
        self, place: TopicPartition, topic_id: str, offset: int, manifest: bytes | None
    ) -> bytes | None:
        """The value that the record at `offset` stands for. None: it expired before it was read.

        Raises LargeValueError (nobody can read it), LargeValueRefusedError (this reader does not),
        both with the record's partition and offset; and as any request to a leader does, if it
        failed for now.
        """
        try:
            return await self._value(place, topic_id, offset, manifest)
        except Exception as error:
            found = of_large_value(error)
            if found is None:
                raise
            if not isinstance(error, RayqError):
                logger.exception("the large value at offset %d of %s-%d", offset, *place)
            cause = error if found is not error else error.__cause__
            raise located(found, place, offset) from cause

    async def _value(
        self, place: TopicPartition, topic_id: str, offset: int, manifest: bytes | None
    ) -> bytes | None:
        found = read_manifest(manifest, offset=offset)
        if found.size_bytes > self._config.large_value_max_bytes:
            raise LargeValueRefusedError(
                f"it has {found.size_bytes} bytes, and this reader takes "
                f"{self._config.large_value_max_bytes}: raise large_value_max_bytes."
            )
        if found.uri is not None:
            return await self._of_object(found, found.uri)
        if found.place is not None:
            return await self._of_other_topic(found, found.place)
        try:
            # Whoever reads its own topic finds out whether that is gone, or denied for a while.
            return await self._of_chunks(found, Place(place.topic, topic_id, place.partition))
        except OffsetOutOfRangeError:
            pass
        self.expired += 1
        self._expirations.say(
            "%s-%d: the large value at offset %d has expired: chunks of it are below the log "
            "start",
            *place,
            offset,
        )
        return None

    # --- objects --------------------------------------------------------------------------------

    async def _of_object(self, manifest: Manifest, uri: str) -> bytes:
        url, shown = self._config.large_values, without_credentials(uri)
        if url is None:
            raise LargeValueRefusedError(
                f"it is in {shown!r}, and this reader reads no objects: give it large_values=, the "
                "URL that the producer has."
            )
        if not is_below(uri, url):
            raise LargeValueRefusedError(
                f"it is in {shown!r}, and this reader reads only what is below "
                f"large_values={url!r}."
            )
        threads = self._client.environment.threads
        try:
            data: bytes = await threads.run(read_object, uri, manifest.size_bytes, url)
        except RemoteMissingError as error:
            raise LargeValueError(f"its object is gone: {error}") from error
        except (RemoteDeniedError, MissingExtraError, ConfigError) as error:
            raise LargeValueUnavailableError(f"its object cannot be read here: {error}") from error
        return await threads.run(join, manifest, [data])

    # --- chunks ---------------------------------------------------------------------------------

    async def _of_other_topic(self, manifest: Manifest, place: Place) -> bytes:
        try:
            await self._find(place)
            return await self._of_chunks(manifest, place)
        except OffsetOutOfRangeError as error:
            raise LargeValueError(
                f"its chunks stayed in {place.topic}-{place.partition}, and have expired there: "
                f"{error}"
            ) from error
        except UnknownTopicError as error:
            raise _gone(place, str(error)) from error
        except AuthorizationError as error:
            raise LargeValueUnavailableError(f"its chunks cannot be read here: {error}") from error

    async def _of_chunks(self, manifest: Manifest, place: Place) -> bytes:
        client = self._client
        threads = client.environment.threads
        is_cached = True
        tries = 0
        until_s = client.now + STALE_LEADER_S
        while True:
            try:
                batches, is_cached = await self._batches(manifest, place, use_cache=is_cached)
            except OffsetNotAvailableError as error:
                if client.now > until_s:
                    raise LargeValueError(
                        f"a chunk of the value was never written: {error}"
                    ) from error
                await asyncio.sleep(STALE_LEADER_S / 20)
                await self._find(place, age_max_s=0.0)
                continue
            try:
                joined: bytes = await threads.run(_joined, manifest, batches)
                return joined
            except LargeValueError:
                if not is_cached:
                    raise
                is_cached = False  # An unclean election may have put others in their place.
            except CorruptBatchError as error:
                tries += 1
                is_cached = False
                if tries == TRIES_MAX:
                    raise LargeValueError(f"a chunk of it cannot be read: {error}") from error
                await self._check_leader(place, manifest.offsets[0], error)
                await asyncio.sleep(tries * self._config.retry_backoff_ms / 1000)

    async def _batches(
        self, manifest: Manifest, place: Place, *, use_cache: bool
    ) -> tuple[list[bytes], bool]:
        """The batch of each chunk, and whether some came from the cache. Raises LargeValueError if
        the log has something else, OffsetOutOfRangeError."""
        offsets = manifest.offsets
        found: dict[int, bytes] = {}
        for offset in offsets:
            batch = self._cache.take((place.topic_id, place.partition, offset))
            if batch is not None and use_cache:
                found[offset] = batch
        is_cached = bool(found)
        missing = deque(sorted(set(offsets) - found.keys()))
        chunk_bytes = manifest.size_bytes // len(offsets) + CHUNK_SLACK_BYTES
        left_bytes = manifest.size_bytes + len(offsets) * CHUNK_SLACK_BYTES
        left_bytes -= sum(map(len, found.values()))
        while missing:
            first = missing[0]
            run = next((n for n, offset in enumerate(missing) if offset != first + n), len(missing))
            payload = await self._fetch(place, first, min(run * chunk_bytes, FETCH_BYTES))
            for at, header in split_batches(payload):
                if missing and header.is_chunk and header.base_offset == missing[0]:
                    found[missing.popleft()] = bytes(payload[at : at + header.length])
                    left_bytes -= header.length
            if (missing and missing[0] == first) or left_bytes < 0:
                raise LargeValueError(
                    f"a chunk of it is not at offset {first} of {place.topic}-{place.partition}, "
                    "where its manifest says."
                )
        return [found[offset] for offset in offsets], is_cached

    async def _fetch(self, place: Place, offset: int, bytes_max: int) -> memoryview:
        """Fetches chunks. Raises CorruptBatchError, which is retriable, for a truncated answer;
        OffsetOutOfRangeError below the log start, OffsetNotAvailableError above the committed
        end."""
        try:
            answer, payload = await self._ask(
                place, fetch_now(place.partition, offset, bytes_max, READ_UNCOMMITTED)
            )
        except OffsetOutOfRangeError:
            first = await self._ask(
                place, list_offset(place.partition, EARLIEST, READ_UNCOMMITTED)
            )
            if offset < (first[0].offset or 0):
                raise
        else:
            if payload or answer.high_watermark > offset:
                return payload
        raise OffsetNotAvailableError(
            f"{place.topic}-{place.partition}: offset {offset} is not committed, as its leader "
            "says."
        )

    async def _check_leader(self, place: Place, offset: int, error: CorruptBatchError) -> None:
        logger.warning("%s-%d at offset %d: %s", place.topic, place.partition, offset, error)
        try:
            await self._ask(place, check_range(place.partition, offset))
        except RayqError as failure:
            logger.warning("the leader did not check offset %d: %s", offset, failure)

    async def _find(self, place: Place, age_max_s: float | None = None) -> None:
        """Raises UnknownTopicError if the cluster has no such partition. For a while a broker, or
        the metadata here, may only be behind."""
        client, config = self._client, self._config
        until_s = client.now + UNKNOWN_TOPIC_PATIENCE_S
        options = {} if age_max_s is None else {"age_max_s": age_max_s}
        while True:
            topic = await client.topic(
                place.topic, timeout_s=config.default_api_timeout_ms / 1000, **options
            )
            has_partition = place.partition < len(topic.partitions)
            if topic.topic_id == place.topic_id and has_partition:
                return
            if client.now > until_s:
                why = f"it has {counted(len(topic.partitions), 'partition')}."
                raise UnknownTopicError(_ANOTHER_TOPIC if has_partition else why)
            options = {"age_max_s": 0.0}
            await asyncio.sleep(UNKNOWN_TOPIC_PATIENCE_S / 10)

    async def _ask(
        self, place: Place, build: Callable[[str, LeaderAndEpoch], Request[ResponseT]]
    ) -> tuple[ResponseT, memoryview]:
        config = self._config

        def build_checked(topic_id: str, leader: LeaderAndEpoch) -> Request[ResponseT]:
            if topic_id != place.topic_id:
                raise UnknownTopicError(_ANOTHER_TOPIC)
            return build(topic_id, leader)

        return await self._client.exchange_with_leader(
            place.topic,
            place.partition,
            build_checked,
            timeout_s=config.default_api_timeout_ms / 1000,
            attempt_timeout_s=config.request_timeout_ms / 1000,
            retry_backoff_s=config.retry_backoff_ms / 1000,
        )


_ANOTHER_TOPIC = "it is another topic now: the one that it was has been deleted."


def _gone(place: Place, why: str) -> LargeValueError:
    return LargeValueError(
        f"its chunks are in {place.topic}-{place.partition}, which is not there: {why}"
    )


def located(
    error: UnreadableRecordError, place: TopicPartition, offset: int
) -> UnreadableRecordError:
    """The same error with the place of the record, and the offset at which to continue."""
    found = error.with_message(
        f"The large value of offset {offset} of {place.topic}-{place.partition} cannot be read: "
        f"{error.message} Seek to {offset + 1} to continue without it."
    )
    found.topic_partition = place
    found.offset, found.next_offset = offset, offset + 1
    return found


def _joined(manifest: Manifest, batches: list[bytes]) -> bytes:
    """Assembles a value from the batches of its chunks. Raises LargeValueError, CorruptBatchError
    (a wrong CRC)."""
    pieces: list[bytes] = []
    left_bytes = manifest.size_bytes
    for index, batch in enumerate(batches):
        columns = decode_columns(batch, 0, read_header(batch))
        if len(columns.values) != 1:
            raise LargeValueError(f"its chunk {index} was removed from its batch.")
        check_chunk(manifest, index, None if columns.headers is None else columns.headers[0])
        piece = columns.values[0] or b""
        left_bytes -= len(piece)
        if left_bytes < 0:
            raise LargeValueError(f"its chunks have more than its {manifest.size_bytes} bytes.")
        pieces.append(piece)
    return join(manifest, pieces)

"""Fetcher of a consumer: each partition has one task, with one fetch in flight at a time, ahead of
the consumer.

Memory is bounded by shares: with `n` partitions each asks for at most `fetch_buffer_bytes / 2n`
bytes, and only while it holds less than that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta

from rayq.client.client import Client
from rayq.client.consuming.group_offsets import GroupOffsets
from rayq.client.consuming.large_parts import LargeParts
from rayq.client.consuming.subscription import Fetched, Start, Stream, Subscription
from rayq.client.large.reader import LargeValues
from rayq.client.leader_requests import (
    LEADER_PATIENCE_S,
    check_range,
    epoch_of,
    known_end,
    list_offset,
    may_retry,
)
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.record_errors import is_skipped
from rayq.config import ConsumerConfig
from rayq.errors import (
    AuthorizationError,
    CorruptBatchError,
    LogTruncatedError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RayqError,
    TimeoutError,
    UnknownServerError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from rayq.messages import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Fetch,
)
from rayq.records import TopicPartition
from rayq.storage.batch import BatchHeader, split_batches

logger = logging.getLogger(__name__)

FETCH_BYTES_MIN = 1024
"""Minimum size that each partition asks for, however many there are."""
FIRST_FETCH_BYTES = 128 * 1024
"""Size of the first fetch of a stream with an end: the stream may be short, and the fetch tells how
long records are."""
EMPTY_ANSWERS_MAX = 10
QUICK_S = 0.02
"""A leader that has nothing holds a fetch. After `EMPTY_ANSWERS_MAX` answers in a row without
records, each of which came within this time, the fetcher pauses before each further fetch."""
BACKOFF_MAX_S = 1.0
TOPIC_WAIT_S = 0.2
"""Interval between two checks for a partition that a group's coordinator granted and the metadata
lacks."""
ReadDirectly = Callable[[int, int], Awaitable[Fetched | None]]
"""`read_directly(offset, bytes_max)` gets committed batches without the leader. None: ask the
leader."""
CORRUPT_TRIES_MAX = 5
"""Maximum number of times in a row that one batch may arrive with a wrong CRC before the consumer
is told."""


class Fetcher:
    """The fetcher of a consumer. Belongs to the loop; the consumer's thread may call the methods
    under "any thread"."""

    def __init__(
        self,
        client: Client,
        config: ConsumerConfig,
        subscription: Subscription,
        *,
        group_offsets: GroupOffsets | None = None,
        read_directly: ReadDirectly | None = None,
    ) -> None:
        """In a group, `group_offsets` know where a stream without a start begins."""
        self._client = client
        self._config = config
        self._subscription = subscription
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._listeners: dict[Callable[[], None], None] = {}
        self._waiting: dict[Stream, asyncio.Future[None]] = {}
        """The streams that wait for room, or are paused."""
        self._corrupt: dict[TopicPartition, tuple[int, int]] = {}
        """`(offset, tries)` of the last batch with a wrong CRC."""
        self._streams: dict[Stream, None] = {}
        """The streams, as an ordered set."""
        self._closed = False
        is_committed = config.isolation_level == "read_committed"
        self.isolation = READ_COMMITTED if is_committed else READ_UNCOMMITTED
        self._group_offsets = group_offsets
        self._read_directly = read_directly
        self.large = LargeValues(client, config)

    # --- any thread -----------------------------------------------------------------------------

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Adds a function that is called on the loop whenever records, an error or a start have
        arrived."""
        self._listeners[listener] = None

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.pop(listener, None)

    def start(self, streams: list[Stream]) -> None:
        """Begins to fetch for these streams."""
        self._on_loop(lambda: self._start(streams))

    def has_room(self) -> None:
        """Wakes streams that wait for room. Called when the consumer took records, or resumed a
        partition."""
        if self._waiting:
            self._on_loop(self._wake)

    def stop_stale(self) -> None:
        """Stops streams that were replaced or are no longer assigned."""
        self._on_loop(self._stop_stale)

    def replace_corrupt(
        self, stream: Stream, fresh: Stream, offset: int, error: CorruptBatchError
    ) -> None:
        """Replaces a stream after a wrong CRC. Called when the consumer found one in `stream`, and
        put `fresh` in its place. The leader is asked to check its disk, then `fresh` starts."""
        self._on_loop(lambda: self._replace_corrupt(stream, fresh, offset, error))

    def _on_loop(self, action: Callable[[], None]) -> None:
        if threading.get_ident() == self._loop_thread:
            action()
        else:
            self._loop.call_soon_threadsafe(action)

    # --- the loop -------------------------------------------------------------------------------

    def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            self._stop(stream)
        self.tell()

    def _start(self, streams: list[Stream]) -> None:
        if self._closed:
            return
        for stream in streams:
            self._streams[stream] = None
            topic, partition = stream.partition
            stream.task = self._client.environment.tasks.spawn(
                self._run(stream), f"fetch {topic}-{partition}"
            )

    def _stop(self, stream: Stream) -> None:
        self._streams.pop(stream, None)
        self._waiting.pop(stream, None)
        if stream.task is not None:
            stream.task.cancel()

    def _stop_stale(self) -> None:
        for stream in list(self._streams):
            if not self._subscription.is_current(stream):
                self._stop(stream)

    def _wake(self) -> None:
        for stream, waiting in list(self._waiting.items()):
            if self._may_fetch(stream) and not waiting.done():
                waiting.set_result(None)

    def tell(self) -> None:
        """Wakes all waiting listeners: there is something new to look at."""
        for listener in list(self._listeners):
            listener()

    @property
    def _bytes_max(self) -> int:
        share_bytes = self._config.fetch_buffer_bytes // (2 * max(len(self._streams), 1))
        return min(self._config.fetch_max_bytes, max(share_bytes, FETCH_BYTES_MIN))

    def _bytes_wanted(self, stream: Stream) -> int:
        """The number of bytes one fetch asks for: not many beyond the end of a stream that has
        one."""
        if stream.end is None or stream.fetch_offset is None or stream.start is None:
            return self._bytes_max
        wanted = FIRST_FETCH_BYTES
        if stream.received_bytes and stream.fetch_offset > stream.start:
            bytes_per_offset = stream.received_bytes / (stream.fetch_offset - stream.start)
            wanted += int(bytes_per_offset * (stream.end - stream.fetch_offset))
        return min(self._bytes_max, wanted)

    def _may_fetch(self, stream: Stream) -> bool:
        is_paused = self._subscription.is_paused(stream)
        return not is_paused and stream.buffered_bytes < self._bytes_max

    async def _run(self, stream: Stream) -> None:
        """Reads one partition until the stream is replaced or cannot continue."""
        backoff = self._client.backoff(TOPIC_WAIT_S, BACKOFF_MAX_S)
        is_over = False
        while not is_over and not stream.is_fetched:
            try:
                await self._fetch_forever(stream)
            except (UnknownTopicError, AuthorizationError) as error:
                # The coordinator decides which partitions a member reads.
                if self._group_offsets is not None and self._group_offsets.member is not None:
                    await self._wait_for_topic(stream, error, TOPIC_WAIT_S)
                    continue
                # Whoever polls is told, and reading continues where it was once it is allowed
                # again.
                stream.error = error
                self.tell()
                await self._wait_for_topic(stream, error, backoff.next_s())
                is_over = isinstance(error, UnknownTopicError) and self._is_gone(stream)
            except RayqError as error:
                stream.error, is_over = error, True
            except Exception as error:
                logger.exception("fetching %s failed", stream.partition)
                stream.error = UnknownServerError(f"The fetcher failed: {error!r}.")
                is_over = True
        self.tell()

    async def _wait_for_topic(self, stream: Stream, error: RayqError, wait_s: float) -> None:
        """Waits, and asks again for a topic that the metadata here do not have, or that this client
        may not read. In a group the metadata may be older than those of the coordinator, which
        granted the partition, or it will take the partition back."""
        logger.info("%s cannot be read now: %s", stream.partition, error)
        await asyncio.sleep(wait_s)
        client = self._client
        try:
            await client.fetch_with_others(stream.partition.topic, client.now + BACKOFF_MAX_S)
        except RayqError as failure:
            logger.info("no metadata of %s: %s", stream.partition.topic, failure)

    def _is_gone(self, stream: Stream) -> bool:
        """Returns whether the partition was deleted, as far as this client may know."""
        metadata = self._client.metadata
        topic, number = stream.partition
        known = metadata.topics.get(topic)
        if known is None:
            return topic not in metadata.denied
        return metadata.partition(topic, stream.topic_id or known.topic_id, number) is None

    async def _fetch_forever(self, stream: Stream) -> None:
        if stream.topic_id is None:
            stream.topic_id = await self._topic_id(stream)
        topic = stream.topic_id
        first_s = self._config.retry_backoff_ms / 1000
        backoff = self._client.backoff(first_s, BACKOFF_MAX_S)
        if stream.fetch_offset is None:
            await self._begin(stream, topic)
            self.tell()
        empty_answers, quick_s = 0, min(QUICK_S, self._config.fetch_max_wait_ms / 2000)
        while not stream.is_fetched:
            await self._wait_for_room(stream)
            leader = self._client.metadata.leader(*self._place(stream, topic))
            try:
                if await self._fetch_directly(stream, topic):
                    continue
                if leader is None:
                    raise self._client.no_leader_error(*self._place(stream, topic))
                asked_s = self._client.now
                has_batches = await self._fetch(stream, topic, leader)
                is_empty = not has_batches and self._client.now - asked_s < quick_s
                empty_answers = empty_answers + 1 if is_empty else 0
                if empty_answers > EMPTY_ANSWERS_MAX:
                    await asyncio.sleep(backoff.next_s())
                else:
                    backoff.reset()
            except OffsetOutOfRangeError as error:
                await self._reset(stream, error)
                await asyncio.sleep(backoff.next_s())  # The leader may refuse that offset, too.
            except RayqError as error:
                await self._recover(stream, topic, leader, error, backoff.next_s())

    async def _wait_for_room(self, stream: Stream) -> None:
        while not self._may_fetch(stream):
            waiting = self._waiting[stream] = self._loop.create_future()
            if self._may_fetch(stream):  # Room was made before this stream was seen to wait.
                break
            await waiting
        self._waiting.pop(stream, None)

    async def _reset(self, stream: Stream, error: OffsetOutOfRangeError) -> None:
        """Continues where `auto_offset_reset` says."""
        if self._config.auto_offset_reset == "none":
            if stream.end is not None:  # The batch job that reads it handles this.
                raise error
            raise error.with_message(
                f'{error} auto_offset_reset is "none": seek to an offset that is in the log.'
            )
        logger.warning("%s: %s", stream.partition, error)
        offset = await self._resolve(stream, None)
        assert stream.fetch_offset is not None
        if stream.end is not None and offset < stream.fetch_offset:
            # The ranges of batch jobs consist of offsets that were in the log.
            raise LogTruncatedError(f"{error} Yet it was there: an unclean election cut it off.")
        stream.jump(offset)

    async def _begin(self, stream: Stream, topic_id: str) -> None:
        """Finds the offset at which reading begins."""
        if stream.start is not None and stream.start >= 0:
            stream.offset_known(stream.start)
            return
        if stream.start is None and self._group_offsets is not None:
            found = await self._group_offsets.lookup(stream.partition, topic_id)
            if found is not None:
                stream.offset_known(found.offset, found.last_epoch)
                return
            if stream.begin_otherwise is not None:
                stream.offset_known(stream.begin_otherwise)
                return
        stream.offset_known(await self._resolve(stream, stream.start))

    def _place(self, stream: Stream, topic_id: str) -> tuple[str, str, int]:
        return stream.partition.topic, topic_id, stream.partition.partition

    async def _topic_id(self, stream: Stream) -> str:
        timeout_s = self._config.default_api_timeout_ms / 1000
        while True:
            try:
                found = await self._client.topic(stream.partition.topic, timeout_s=timeout_s)
                return found.topic_id
            except TimeoutError as error:
                logger.warning("no metadata of %s yet: %s", stream.partition.topic, error)

    async def _resolve(self, stream: Stream, start: Start) -> int:
        """The offset at which reading begins. Retries until a leader answers."""
        if start is None:
            start = self._reset_to(stream.partition)
        while True:
            try:
                offset = await self.list_offset(stream.partition, start)
                if offset is not None:
                    return offset
                start = LATEST  # no record is so late
            except TimeoutError as error:
                logger.warning("no offset of %s yet: %s", stream.partition, error)

    def _reset_to(self, partition: TopicPartition) -> int:
        """The meaning of `auto_offset_reset`, as a timestamp to list offsets by."""
        reset = self._config.auto_offset_reset
        if isinstance(reset, timedelta):
            ago_ms = reset // timedelta(milliseconds=1)
            return max(self._client.environment.clock.wall_ms() - ago_ms, 0)
        if reset == "none":
            raise OffsetOutOfRangeError(
                f"{partition.topic}-{partition.partition} has no position, and "
                'auto_offset_reset is "none": seek to an offset first.'
            )
        return EARLIEST if reset == "earliest" else LATEST

    async def list_offset(
        self, partition: TopicPartition, timestamp_ms: int, *, timeout_s: float | None = None
    ) -> int | None:
        """The first offset at or after a time, or the offset of EARLIEST or LATEST. None: no record
        is that late."""
        if timeout_s is None:
            timeout_s = self._config.default_api_timeout_ms / 1000
        response = await self._client.ask_leader(
            partition.topic,
            partition.partition,
            list_offset(partition.partition, timestamp_ms, self.isolation),
            timeout_s=timeout_s,
            attempt_timeout_s=self._config.request_timeout_ms / 1000,
            retry_backoff_s=self._config.retry_backoff_ms / 1000,
        )
        if timestamp_ms < 0:
            return known_end(response, str(partition))
        return response.offset

    async def _fetch(self, stream: Stream, topic_id: str, leader: LeaderAndEpoch) -> bool:
        """Returns whether batches came."""
        config = self._config
        assert stream.fetch_offset is not None
        isolation = self.isolation if stream.without is None else READ_UNCOMMITTED
        request = Fetch(
            topic_id=topic_id,
            partition=stream.partition.partition,
            leader_epoch=leader.epoch,
            offset=stream.fetch_offset,
            last_epoch=stream.last_epoch,
            bytes_max=self._bytes_wanted(stream),
            wait_ms=config.fetch_max_wait_ms,
            isolation=isolation,
        )
        response, payload = await self._client.ask_while_leader(
            *self._place(stream, topic_id),
            leader,
            request,
            timeout_s=(config.fetch_max_wait_ms + config.request_timeout_ms) / 1000,
            patience_s=config.fetch_max_wait_ms / 1000 + LEADER_PATIENCE_S,
        )
        next_offset = max(response.next_offset, stream.fetch_offset)
        batches: list[tuple[int, BatchHeader]] = []
        try:
            batches.extend(split_batches(payload))
        except CorruptBatchError as error:
            await self._check_leader(stream, stream.fetch_offset, error)
            raise
        except UnsupportedFormatError:
            if not batches:
                raise
            next_offset = batches[-1][1].next_offset  # The batches before it are returned first.
        log_end = response.high_watermark
        if isolation == READ_COMMITTED and response.last_stable_offset is not None:
            log_end = response.last_stable_offset
        is_news = bool(batches) or next_offset > stream.fetch_offset
        if is_news:
            hides_aborted = self.isolation == READ_COMMITTED
            aborted = frozenset(response.aborted if hides_aborted else ())
            fetched = Fetched(payload, batches, next_offset, aborted=aborted)
            await self._deliver(stream, topic_id, fetched, log_end)
        elif next_offset < log_end and (
            isolation != READ_COMMITTED or response.last_stable_offset is not None
        ):
            # Without this error it would be asked for again at once, and forever.
            raise OffsetNotAvailableError(
                f"The leader of {stream.partition} gives nothing from offset {next_offset} on, and "
                f"says that the log extends to {log_end}."
            )
        else:
            is_first = stream.log_end is None
            stream.log_end = log_end
            stream.trouble = stream.error = None
            if is_first:  # The position is in the log.
                self.tell()
        return bool(batches)

    async def _deliver(
        self, stream: Stream, topic_id: str, fetched: Fetched, log_end: int
    ) -> None:
        """Hands an answer to the stream, with the large values in it. Those are larger than the
        size that was asked for, so an answer with several may be handed over in parts, as the
        consumer takes them."""
        if not any(header.is_large or header.is_chunk for _, header in fetched.batches):
            stream.received(fetched, log_end)
            self.tell()
            return
        # Batch jobs read everything that is there, or report a loss.
        refuses_loss = stream.end is not None and self._config.auto_offset_reset == "none"
        parts = LargeParts(
            self.large, stream, topic_id, fetched, refuses_loss=refuses_loss
        )
        while (part := await parts.next()) is not None:
            stream.received(part, log_end)
            self.tell()
            if not parts.is_over:
                await self._wait_for_room(stream)

    async def _fetch_directly(self, stream: Stream, topic_id: str) -> bool:
        """Fetches without the leader, if possible. Returns False if the leader has to be asked."""
        if self._read_directly is None:
            return False
        assert stream.fetch_offset is not None
        # Half the size, so that the next one arrives while the user's thread takes records of this
        # one.
        found = await self._read_directly(stream.fetch_offset, max(self._bytes_max // 2, 1))
        if found is None:
            return False
        await self._deliver(
            stream, topic_id, found, max(stream.log_end or 0, found.next_offset)
        )
        return True

    async def _recover(
        self,
        stream: Stream,
        topic_id: str,
        leader: LeaderAndEpoch | None,
        error: RayqError,
        wait_s: float,
    ) -> None:
        """Waits before the next fetch, or raises an error that a retry would not fix."""
        if not may_retry(error):
            raise error
        metadata = self._client.metadata
        if metadata.partition(*self._place(stream, topic_id)) is None:
            raise self._client.missing_topic_error(
                stream.partition.topic,
                f"{stream.partition.topic}-{stream.partition.partition} is gone: the topic was "
                "deleted (and perhaps created again). Subscribe or assign again.",
            )
        logger.info("fetching %s again: %s", stream.partition, error)
        stream.trouble = error
        if error.stale_metadata:
            self._client.suspect(*self._place(stream, topic_id), epoch_of(leader))
        await self._client.wait_for_leader(*self._place(stream, topic_id), leader, wait_s)

    # --- wrong CRCs -----------------------------------------------------------------------------

    def _replace_corrupt(
        self, stream: Stream, fresh: Stream, offset: int, error: CorruptBatchError
    ) -> None:
        known_offset, tries = self._corrupt.get(stream.partition, (offset, 0))
        tries = tries + 1 if known_offset == offset else 1
        self._corrupt[stream.partition] = (offset, tries)
        self._stop(stream)
        if tries >= CORRUPT_TRIES_MAX:
            if not is_skipped(error, self._config.on_corrupt):
                fresh.error = error
                self.tell()
                return
            assert error.next_offset is not None
            fresh.jump(error.next_offset)
        self._streams[fresh] = None
        fresh.task = self._client.environment.tasks.spawn(
            self._start_again(fresh, offset, error, tries), f"refetch {stream.partition}"
        )

    async def _start_again(
        self, fresh: Stream, offset: int, error: CorruptBatchError, tries: int
    ) -> None:
        await self._check_leader(fresh, offset, error)
        await asyncio.sleep(tries * self._config.retry_backoff_ms / 1000)
        await self._run(fresh)

    async def _check_leader(self, stream: Stream, offset: int, error: CorruptBatchError) -> None:
        """Asks the leader to compare its disk with the CRC, and to act on the result."""
        topic, partition = stream.partition
        logger.warning("%s-%d at offset %d: %s", topic, partition, offset, error)
        try:
            await self._client.ask_leader(
                topic,
                partition,
                check_range(partition, offset),
                timeout_s=self._config.request_timeout_ms / 1000,
                attempt_timeout_s=self._config.request_timeout_ms / 1000,
            )
        except RayqError as failure:
            logger.warning("the leader did not check offset %d: %s", offset, failure)

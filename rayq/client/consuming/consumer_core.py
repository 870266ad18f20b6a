"""The part that both consumers share: the assignment, taking records out of streams, asking for
offsets."""

from __future__ import annotations

import asyncio
import builtins
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import msgspec

from rayq.client.arguments import as_partition, topic_names
from rayq.client.client import Client, check_partition
from rayq.client.consuming.arrow import load_pyarrow, table_of
from rayq.client.consuming.deserializing import Deserializers, records_of
from rayq.client.consuming.fetcher import Fetcher
from rayq.client.consuming.group_consumer import Callbacks, GroupConsumer, pattern_text
from rayq.client.consuming.group_offsets import GroupOffsets
from rayq.client.consuming.last_records import LastRecords, check_count
from rayq.client.consuming.member_state import Interest
from rayq.client.consuming.poll_errors import PollErrors
from rayq.client.consuming.subscription import (
    START_OF_NEW_PARTITIONS,
    AssignedPartition,
    Slice,
    Start,
    Stream,
    Subscription,
)
from rayq.client.coordinator import GroupCoordinator
from rayq.client.group_positions import check_group
from rayq.client.record_errors import is_final, is_skipped
from rayq.config import MIB, ConsumerConfig, check_group_keys
from rayq.errors import (
    ClosedError,
    CorruptBatchError,
    InvalidRequestError,
    RayqError,
    TimeoutError,
    UnknownTopicError,
    UnreadableRecordError,
)
from rayq.messages import EARLIEST, LATEST
from rayq.records import Record, TopicPartition
from rayq.storage.batch import Columns

logger = logging.getLogger(__name__)
T = TypeVar("T")

ARROW_STEP_RECORDS = 4096
"""Maximum number of records turned into Arrow at a time, while they are in the processor's
cache."""

UNPACK_BYTES_MIN = 16 * MIB
"""Minimum number of bytes that a poll may unpack, however small `fetch_buffer_bytes` is."""

START_PATIENCE_S = 5.0
"""Maximum time `subscribe` waits to learn which offset "latest" is, so that a consumer reads all
that is produced after it was made. Without an answer it finds out later, in the background."""


class _Piece(NamedTuple):
    """Records about to be returned."""

    stream: Stream
    batch: Any
    records: Slice


class ConsumerCore:
    """The work of both consumers that needs no waiting."""

    def __init__(
        self,
        client: Client,
        config: ConsumerConfig,
        on_close: Callable[[], None],
        group: str | None = None,
    ) -> None:
        self.client = client
        self.config = config
        self.subscription = Subscription()
        offsets: GroupOffsets | None = None
        if group is None:
            check_group_keys(config)
        else:
            coordinator = GroupCoordinator(client, check_group(group), config)
            offsets = GroupOffsets(coordinator, config)
        self.fetcher = Fetcher(client, config, self.subscription, group_offsets=offsets)
        self.group = None if offsets is None else GroupConsumer(self, client, config, offsets)
        self.is_closed = False
        self.loop = asyncio.get_running_loop()
        self.ahead: deque[Record[Any, Any]] = deque()
        """Records that iteration has taken and not yet yielded."""
        self.ahead_until: object | None = None
        """The iteration with an end that has taken them; None for the iteration without an end."""
        self._deserializers = Deserializers.of(config)
        self._taken: list[tuple[TopicPartition, Columns]] = []
        """The batches of which the last poll took records, before deserialization. Empty without
        deserializers."""
        self._on_close = on_close
        self._seen_version = -1
        self._unpack_bytes_max = max(config.fetch_buffer_bytes, UNPACK_BYTES_MIN)
        self.errors = PollErrors(client.environment.clock)

    def describe(self, topics: Iterable[str] = (), pattern: object = None) -> str:
        """The topics, pattern and group that the consumer reads, for a repr. `topics` and `pattern`
        are those that it will subscribe to."""
        topics = (*topics, *(self.subscription.topics or ()))
        parts = []
        if self.group is not None:
            parts.append(f"group {self.group.group!r}")
            if self.group.member is not None:
                interest = self.group.member.state.interest
                topics, pattern = (*topics, *interest.topics), pattern or interest.pattern
        if pattern is not None:
            parts.insert(0, f"pattern {getattr(pattern, 'pattern', pattern)!r}")
        if topics:
            parts.insert(0, ", ".join(map(repr, topics)))
        parts.append(f"{len(self.subscription.assigned)} partitions assigned")
        parts.append("closed" if self.is_closed else "open")
        return ", ".join(parts)

    def check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("The consumer is closed: make a new one from the cluster.")

    def close(self) -> None:
        """Stops reading. Called on the loop."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.group is not None:
            self.group.close()
        self.fetcher.close()
        for topic in self.subscription.topics or ():
            self.client.drop_interest(topic)
        self._on_close()

    async def leave(self, timeout_s: float | None) -> None:
        """Leaves the group, then closes. It commits nothing, because it is not known here which
        records the user has handled."""
        try:
            if self.group is not None:
                await self.group.leave(timeout_s)
        finally:
            self.close()

    def loop_has_ended(self) -> None:
        self.is_closed = True
        self._on_close()

    def unsent_count(self) -> int:
        return 0

    # --- what is read ---------------------------------------------------------------------------

    def assign(
        self,
        partitions: Iterable[TopicPartition],
        start: Start = None,
        topic_ids: Mapping[TopicPartition, str] | None = None,
    ) -> list[Stream]:
        """Sets the partitions to read from now on. Those that are read already continue."""
        self.give_back()
        fresh = self.subscription.replace(partitions, start, topic_ids)
        self.fetcher.stop_stale()
        self.fetcher.start(fresh)
        return fresh

    def partitions_of(self, topics: Iterable[str]) -> list[TopicPartition]:
        known = self.client.metadata.topics
        return [
            TopicPartition(topic, partition.partition)
            for topic in topics
            if topic in known
            for partition in known[topic].partitions
        ]

    def look_for_new_partitions(self) -> None:
        """Starts reading the partitions that were added to a subscribed topic."""
        topics = self.subscription.topics
        version = self.client.metadata.version
        if topics is None or version == self._seen_version:
            return
        self._seen_version = version
        known = self.subscription.assigned
        added = [partition for partition in self.partitions_of(topics) if partition not in known]
        if added:
            logger.info("new partitions: %s", added)
            self.assign([*known, *added], START_OF_NEW_PARTITIONS)

    def restart(
        self, partition: TopicPartition, start: Start, begin_otherwise: int | None = None
    ) -> Stream:
        self.give_back()
        topic_id = self.subscription.get(partition).stream.topic_id
        fresh = Stream(partition, start, topic_id=topic_id, begin_otherwise=begin_otherwise)
        self.subscription.restart(partition, fresh)
        self.fetcher.stop_stale()
        self.fetcher.start([fresh])
        return fresh

    def _begin_ended_again(self) -> None:
        """Makes partitions whose topic was not there any more readable again, when the user
        subscribes or assigns again. Those of another topic, which has the name now, start over."""
        self.give_back()
        for place, assigned in list(self.subscription.assigned.items()):
            stream = assigned.stream
            if not isinstance(stream.error, UnknownTopicError):
                continue
            topic_id = stream.topic_id or ""
            if self.client.metadata.partition(place.topic, topic_id, place.partition) is None:
                self.subscription.forget(place)
            else:
                self.restart(place, stream.position)

    def set_paused(self, partitions: Iterable[TopicPartition], is_paused: bool) -> None:
        self.check_open()
        self.give_back()
        for assigned in [
            self.subscription.get(as_partition(partition)) for partition in partitions
        ]:
            assigned.is_paused = is_paused
        self.fetcher.has_room()

    # --- records --------------------------------------------------------------------------------

    def collect(
        self,
        records_max: int,
        deserializers: Deserializers | None = None,
        ends: Mapping[TopicPartition, int] | None = None,
    ) -> list[_Piece]:
        """Returns up to `records_max` records that have arrived; `advance` consumes them. With
        `ends`, only records of those partitions, and below their ends. If there are no records, or
        the error of a partition has waited for long, raises that error; see `PollErrors`."""
        self.check_open()
        self.look_for_new_partitions()
        self.errors.begin()
        pieces: list[_Piece] = []
        failed: dict[TopicPartition, RayqError] = {}
        bytes_left = self._unpack_bytes_max
        for assigned in self.subscription.in_turn():
            if ends is not None and assigned.partition not in ends:
                continue
            below = None if ends is None else ends[assigned.partition]
            stream = assigned.stream
            if not stream.has_records:
                if (failure := stream.error) is not None:
                    failed[assigned.partition] = failure
                continue
            try:
                found = self._peek(assigned, records_max, below)
            except RayqError as error:
                failed[assigned.partition] = error
                continue
            if deserializers is not None:
                found, failure = deserializers.apply_all(found)
                if failure is not None and not found:
                    failed[assigned.partition] = failure
            for batch, records in found:
                pieces.append(_Piece(stream, batch, records))
                records_max -= len(records.values)
                bytes_left -= batch.size_bytes
            if records_max <= 0 or bytes_left <= 0:
                break
        if failed and (not pieces or self.errors.is_overdue(failed)):
            self.errors.raise_next(failed)
        return pieces

    def _peek(
        self, assigned: AssignedPartition, records_max: int, below: int | None
    ) -> list[tuple[Any, Slice]]:
        """The next records of one partition. Raises the error that keeps it from continuing."""
        stream = assigned.stream
        while True:
            try:
                return stream.peek(
                    records_max, self.config.check_crcs, self._unpack_bytes_max, below
                )
            except UnreadableRecordError as error:
                if is_final(error):
                    if not is_skipped(error, self.config.on_corrupt):
                        raise
                    stream.skip_batch()
                    continue
                offset = stream.position
                assert offset is not None and isinstance(error, CorruptBatchError)
                fresh = Stream(stream.partition, offset, stream.position_epoch, stream.topic_id)
                assigned.stream = fresh
                self.fetcher.replace_corrupt(stream, fresh, offset, error)
                return []

    def advance(self, pieces: list[_Piece]) -> None:
        """Consumes these records. This is the last step of a poll, so an interrupt before it loses
        no record."""
        for stream, batch, records in pieces:
            stream.consume(batch, len(records.values))
        self.fetcher.has_room()

    def take_records(
        self, records_max: int, ends: Mapping[TopicPartition, int] | None = None
    ) -> list[Record[Any, Any]]:
        if self.ahead:
            self.give_back()
        pieces = self.collect(records_max, self._deserializers, ends)
        records: list[Record[Any, Any]] = []
        for piece in pieces:
            records += records_of(piece.records)
        if self._deserializers is not None:
            self._taken = [(piece.stream.partition, piece.batch.columns) for piece in pieces]
        self.advance(pieces)
        return records

    def take_table(self, records_max: int) -> Any:
        """Returns a table of records, or None if there are none."""
        if self.ahead:
            self.give_back()
        topics = sorted({topic for topic, _ in self.subscription.assigned})
        tables: list[Any] = []
        begun: dict[TopicPartition, int | None] = {}
        bytes_left = self._unpack_bytes_max
        try:
            while records_max > 0 and bytes_left > 0:
                try:
                    pieces = self.collect(min(records_max, ARROW_STEP_RECORDS))
                except RayqError:
                    if tables:
                        break  # the next poll raises it
                    raise
                if not pieces:
                    self.fetcher.has_room()  # Skipped records made room.
                    break
                tables.append(table_of([piece.records for piece in pieces], topics))
                for piece in pieces:
                    begun.setdefault(piece.stream.partition, piece.stream.position)
                self.advance(pieces)
                records_max -= tables[-1].num_rows
                bytes_left -= tables[-1].nbytes
        except BaseException:  # An interrupt half-way: taken records are read again.
            for partition, position in begun.items():
                self.restart(partition, position)
            raise
        return load_pyarrow().concat_tables(tables) if tables else None

    def is_ahead(self, until: object | None) -> bool:
        """Returns whether the next record of this iteration is in `ahead`, and may be yielded at
        once."""
        if not self.ahead or self.ahead_until is not until:
            return False
        return self.group is None or self.group.may_go_on()

    def give_back(self) -> None:
        """Puts records that iteration took ahead, and has not yielded, back in front."""
        self.ahead_until = None
        by_partition: dict[TopicPartition, list[Record[Any, Any]]] = {}
        while self.ahead:
            record = self.ahead.popleft()
            place = TopicPartition(record.topic, record.partition)
            by_partition.setdefault(place, []).append(record)
        for partition, records in by_partition.items():
            if self._deserializers is not None and not self._as_they_were(partition, records):
                self.restart(partition, records[0].offset)  # fetched again
                continue
            columns = Columns(
                offsets=[record.offset for record in records],
                timestamps_ms=[record.timestamp_ms for record in records],
                keys=[record.key for record in records],
                values=[record.value for record in records],
                headers=[record.headers for record in records],
            )
            self.subscription.get(partition).stream.give_back(columns)

    def _as_they_were(self, place: TopicPartition, records: list[Record[Any, Any]]) -> bool:
        """Restores the keys and values that the records had before they were deserialized. Returns
        False if these are no longer known, because another poll came in between."""
        raw: dict[int, tuple[bytes | None, bytes | None]] = {}
        for taken, columns in self._taken:
            if taken == place:
                keys = columns.keys or repeat(None)
                pairs = zip(keys, columns.values, strict=False)
                raw.update(zip(columns.offsets, pairs, strict=True))
        if any(record.offset not in raw for record in records):
            return False
        for index, record in enumerate(records):
            key, value = raw[record.offset]
            records[index] = msgspec.structs.replace(record, key=key, value=value)
        return True

    def positions(self) -> dict[TopicPartition, tuple[int, int | None]]:
        """The position of each partition that has one, and the leader epoch of the record before
        it. Records that iteration has taken and not yielded do not count."""
        ahead: dict[tuple[str, int], int] = {}
        for record in self.ahead:
            ahead.setdefault((record.topic, record.partition), record.offset)
        found: dict[TopicPartition, tuple[int, int | None]] = {}
        for partition, assigned in self.subscription.assigned.items():
            offset = ahead.get(partition, assigned.stream.position)
            if offset is not None:
                found[partition] = (offset, assigned.stream.position_epoch)
        return found

    def records_max(self, given: int | None) -> int:
        if given is None:
            return self.config.max_poll_records
        if type(given) is not int or given <= 0:
            raise InvalidRequestError(f"max_records has to be a positive int, not {given!r}.")
        return given

    # --- answers over the network ---------------------------------------------------------------

    async def subscribe(
        self,
        topics: str | Iterable[str],
        pattern: str | re.Pattern[str] | None = None,
    ) -> None:
        self.check_open()
        wanted = topic_names(topics)
        if self.group is None and pattern is not None:
            raise InvalidRequestError("A pattern needs a group: consumer(group=...).")
        text = None if pattern is None else pattern_text(pattern)
        timeout_s = self.config.default_api_timeout_ms / 1000
        for topic in wanted:
            await self.client.topic(topic, timeout_s=timeout_s)
        if self.group is not None:
            if self.group.member is None:
                self.assign([])  # to drop partitions that were assigned by hand
            self.group.subscribe(Interest(wanted, text))
            return
        for topic in wanted:
            self.client.add_interest(topic)
        for topic in self.subscription.topics or ():
            self.client.drop_interest(topic)
        self.subscription.topics = wanted
        self._seen_version = self.client.metadata.version
        self._begin_ended_again()
        await self._started(self.assign(self.partitions_of(wanted)))

    def check_callbacks(self, callbacks: Callbacks) -> None:
        """Raises InvalidRequestError for callbacks without a group."""
        if callbacks.given and self.group is None:
            raise InvalidRequestError(
                "on_assigned, on_revoked and on_lost need a group: consumer(group=...)."
            )

    async def assign_by_hand(self, wanted: list[TopicPartition]) -> None:
        self.check_open()
        timeout_s = self.config.default_api_timeout_ms / 1000
        for topic, partition in wanted:
            check_partition(await self.client.topic(topic, timeout_s=timeout_s), partition)
        if self.group is not None:
            await self.group.leave()
        for topic in self.subscription.topics or ():
            self.client.drop_interest(topic)
        self.subscription.topics = None
        self._begin_ended_again()
        await self._started(self.assign(dict.fromkeys(wanted)))

    async def _started(self, streams: list[Stream]) -> None:
        """Resolves the starting offset of a consumer without a group that begins at "latest", so
        that it reads everything produced from now on. In a group there may be a commit to begin
        at."""
        if self.config.auto_offset_reset == "latest" and self.group is None:
            await self.resolved(streams)

    async def resolved(self, streams: list[Stream]) -> None:
        """Waits until each stream knows its offset or has failed, at most START_PATIENCE_S."""
        await self.when(
            lambda: all(s.fetch_offset is not None or s.error is not None for s in streams),
            START_PATIENCE_S,
        )

    async def when(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Waits for news of the fetcher until `holds()`; returns False if the time was up first."""
        news = asyncio.Event()
        self.fetcher.add_listener(news.set)
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    news.clear()
                    await news.wait()
        except builtins.TimeoutError:
            return holds()
        finally:
            self.fetcher.remove_listener(news.set)
        return True

    async def position(self, partition: TopicPartition) -> int:
        self.check_open()
        self.give_back()
        assigned = self.subscription.get(as_partition(partition))
        stream = assigned.stream
        timeout_s = self.config.default_api_timeout_ms / 1000
        await self.when(lambda: stream.position is not None or stream.error is not None, timeout_s)
        if stream.position is not None:
            return stream.position
        if (error := stream.error) is not None:
            raise error.with_message(error.message)
        raise TimeoutError(
            f"{tuple(partition)!r} has no position after {timeout_s:g} s "
            "(default_api_timeout_ms): its leader could not be asked where to start."
        )

    async def offsets(
        self,
        times: Mapping[TopicPartition, int],
        *,
        by_time: bool,
        timeout_s: float | None = None,
    ) -> dict[TopicPartition, int | None]:
        """The result of `Fetcher.list_offset` for each partition, within `timeout_s` (default:
        `default_api_timeout_ms`)."""
        self.check_open()
        for timestamp_ms in times.values():
            if by_time and (type(timestamp_ms) is not int or timestamp_ms < 0):
                raise InvalidRequestError(
                    f"A time must be Unix time in milliseconds, at least 0, not {timestamp_ms!r}."
                )
        if timeout_s is None:
            timeout_s = self.config.default_api_timeout_ms / 1000
        for topic in {topic for topic, _ in times}:  # once for all its partitions
            await self.client.topic(topic, timeout_s=timeout_s)
        answers = await asyncio.gather(
            *(
                self.fetcher.list_offset(partition, time_ms, timeout_s=timeout_s)
                for partition, time_ms in times.items()
            )
        )
        return dict(zip(times, answers, strict=True))

    async def end_offsets(
        self, partitions: Iterable[TopicPartition], *, timeout_s: float | None = None
    ) -> dict[TopicPartition, int]:
        ends = dict.fromkeys(partitions, LATEST)
        found = await self.offsets(ends, by_time=False, timeout_s=timeout_s)
        return _all_known(found)

    async def beginning_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        found = await self.offsets(dict.fromkeys(partitions, EARLIEST), by_time=False)
        return _all_known(found)

    async def lag(self) -> dict[TopicPartition, int]:
        self.check_open()
        assigned = list(self.subscription.assigned)
        ends = await self.end_offsets(assigned)
        return {
            partition: max(ends[partition] - await self.position(partition), 0)
            for partition in assigned
        }

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.check_open()
        place = as_partition(partition)
        self.subscription.get(place)
        if type(offset) is not int:
            raise TypeError(f"An offset must be an int, not {type(offset).__name__}.")
        if not 0 <= offset < 2**62:
            raise InvalidRequestError(
                f"Offsets count from 0: {offset} is not an offset. See seek_to_beginning and "
                "seek_to_end."
            )
        self.restart(place, offset)

    def seek_to(self, partitions: Iterable[TopicPartition], start: int) -> list[Stream]:
        """Seeks to EARLIEST or LATEST in these partitions, or in all if none are given."""
        self.check_open()
        return [self.restart(partition, start) for partition in self._places(partitions)]

    def _places(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """The given partitions, or all assigned ones if none are given. Raises
        InvalidRequestError."""
        places = [as_partition(partition) for partition in partitions] or list(
            self.subscription.assigned
        )
        for place in places:
            self.subscription.get(place)
        return places

    async def seek_to_last(self, count: int, partitions: Iterable[TopicPartition]) -> None:
        self.check_open()
        count = check_count(count)
        places = self._places(partitions)
        last = LastRecords(self.client, self.config, self.fetcher)
        starts = await asyncio.gather(*(last.offset(partition, count) for partition in places))
        for partition, start in zip(places, starts, strict=True):
            self.restart(partition, start)

    def committing_group(self) -> GroupConsumer:
        """The group of this consumer. Raises InvalidRequestError without a group."""
        self.check_open()
        if self.group is not None:
            return self.group
        raise InvalidRequestError(
            "This consumer has no group, so there is nowhere to commit to. Keep positions of your "
            "own with position() and seek()."
        )


def _all_known(found: Mapping[TopicPartition, int | None]) -> dict[TopicPartition, int]:
    known = {partition: offset for partition, offset in found.items() if offset is not None}
    assert len(known) == len(found), "a log has a beginning and an end"
    return known

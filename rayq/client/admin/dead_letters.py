"""Operations on dead letters: look at them, send them back, drop them.

The dead letters of a queue are the unsettled records of the queue `<name>.dead`. Those of a
consumer pool are a topic; the first one that is sent back or dropped creates a queue of that name
over the topic, which remembers the settled ones. So each call can be stopped half-way and repeated,
or made twice at once: settled records are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import msgspec

from rayq.client.admin.base import ATTEMPT_TIMEOUT_S, Call
from rayq.client.admin.queues import (
    MOVED_AT_ONCE,
    create_queue,
    find_queue,
    list_queues,
    move_records_in,
    unsettled_records,
)
from rayq.client.client import Client
from rayq.client.consuming.subscription import transaction_of
from rayq.client.large.reader import LargeValues
from rayq.client.leader_requests import fetch_now, known_end
from rayq.config import MIB, ConsumerConfig
from rayq.core.cluster.queue_changes import DEAD, DEAD_QUEUE
from rayq.core.queues.moved_records import (
    ERROR_HEADER,
    POOL_ERROR_HEADERS,
    REASON_HEADER,
    header_of,
    source_of,
)
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    LargeValueError,
    LargeValueRefusedError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    UnknownQueueError,
    UnknownTopicError,
    UnsupportedFormatError,
)
from rayq.messages import EARLIEST, LATEST, READ_COMMITTED, CreateQueue, ListOffsets, QueueMetadata
from rayq.records import QueueRecordInfo, Record, TopicPartition
from rayq.storage.batch import decode_columns, is_as_written, split_batches

FETCH_BYTES = 4 * MIB
SETTLED_AT_ONCE_S = 1.0
"""Maximum number of seconds whose records go in one request, with a rate."""


class DeadLetter(NamedTuple):
    """A dead letter, and its state in its queue."""

    record: Record
    state: str
    """The same values as `QueueRecordInfo.state`."""
    manifest: bytes | None = None
    """The manifest of its large value, for which `record` has None."""
    unread: str | None = None
    """The reason why the value was not read."""
    is_by_queue: bool = False
    """True if a queue's leader wrote it. Else a producer did, which chose all of its headers: such
    are the dead letters of consumer pools, those from before this mark, and forged ones."""

    @property
    def target(self) -> str | None:
        """The topic to which a redrive sends it that names no topic: the one that its header says
        it came from. None: the header does not say."""
        source = source_of(self.record.headers)
        return None if source is None else source[0]

    @property
    def is_large(self) -> bool:
        return self.manifest is not None

    @property
    def error(self) -> str:
        """The error of its consumer, or the reason why it is a dead letter."""
        headers = self.record.headers
        said = [header_of(headers, name) for name in (*POOL_ERROR_HEADERS, ERROR_HEADER)]
        texts = [text.decode(errors="replace") for text in said if text]
        return ": ".join(texts) or (header_of(headers, REASON_HEADER) or b"").decode(
            errors="replace"
        )


class Filter(NamedTuple):
    """Filter for dead letters: all of its conditions must hold."""

    errors: tuple[str, ...] = ()
    """Substrings of the error, ignoring case. All must match."""
    keys: tuple[bytes, ...] = ()
    """Keys, of which the record must have one."""
    since_ms: int | None = None
    """Minimum timestamp of the record."""
    headers: tuple[tuple[str, bytes], ...] = ()
    """Headers, all of which the record must have."""

    def holds(self, letter: DeadLetter) -> bool:
        record = letter.record
        error = letter.error.lower()
        return (
            all(part.lower() in error for part in self.errors)
            and (not self.keys or record.key in self.keys)
            and (self.since_ms is None or record.timestamp_ms >= self.since_ms)
            and all(header in record.headers for header in self.headers)
        )


class Aim(NamedTuple):
    """Dead letters that go to one topic."""

    letters: int
    by_producers: int
    """The number of those that no queue's leader wrote: a producer chose their target."""


class Progress(NamedTuple):
    """Progress of a redrive or a discard."""

    seen: int
    """The number of dead letters looked at."""
    matched: int
    moved: int
    refused: dict[str, int]
    """The number of dead letters left, by reason."""
    targets: dict[str | None, Aim]
    """Those that match, by the topic to which they are sent (None: they have no possible one).
    Empty where they are dropped."""


class _Place(NamedTuple):
    """Location of dead letters. `queue` is None for a topic that no queue reads yet."""

    topic: str
    queue: QueueMetadata | None


class DeadLetters:
    """The dead letters of one queue, or of a consumer pool. One call may take `timeout_s`. Redrive
    and discard have no timeout, but each of their requests may take `timeout_s`."""

    def __init__(self, client: Client, name: str, *, timeout_s: float) -> None:
        """`name` is the queue whose dead letters they are, or `<name>.dead` itself, or a topic."""
        self._client = client
        self._name = name
        self._timeout_s = timeout_s

    def _call(self) -> Call:
        return Call(self._client, self._timeout_s)

    @property
    def _queue_name(self) -> str:
        return self._name if self._name.endswith(DEAD) else self._name + DEAD

    async def _find(self) -> _Place:
        """Finds the queue or topic. Raises UnknownQueueError, AuthorizationError."""
        found = {
            queue.name: queue
            for queue in await list_queues(self._call(), [self._name, self._queue_name])
        }
        if self._queue_name in found:
            queue = found[self._queue_name]
            return _Place(queue.topic, queue)
        if self._name in found:
            try:  # It may only be hidden.
                queue = await find_queue(self._call(), self._queue_name)
            except UnknownQueueError:
                raise UnknownQueueError(
                    f"Queue {self._name!r} has no dead letters: it drops what fails for good "
                    '(dead_letters="discard").'
                ) from None
            return _Place(queue.topic, queue)
        try:
            topic = await self._client.topic(
                self._name, timeout_s=self._timeout_s, age_max_s=0.0
            )
        except UnknownTopicError:
            raise UnknownQueueError(
                f"There is no queue {self._name!r}, and no topic of that name with the dead "
                "letters of a pool. rayq queue list and rayq topic list show what there is."
            ) from None
        return _Place(topic.name, None)

    async def topic(self) -> str:
        """The topic of the dead letters. Raises UnknownQueueError."""
        return (await self._find()).topic

    async def listed(self, which: Filter, limit: int) -> list[DeadLetter]:
        """The oldest dead letters of each partition, up to `limit` in all. Raises
        UnknownQueueError."""
        place = await self._find()
        found: list[DeadLetter] = []
        for partition, end in (await self._ends(place)).items():
            async for letters in self._letters(place, partition, end):
                found += [letter for letter in letters if which.holds(letter)]
                if len(found) >= limit:
                    return found[:limit]
        return found

    async def show(self, partition: int, offset: int) -> DeadLetter:
        """One dead letter with its value, also if that is a large one in chunks. Raises
        UnknownQueueError, InvalidRequestError if it is not there."""
        place = await self._find()
        end = (await self._ends(place)).get(partition, 0)
        if offset < end:
            async for letters in self._letters(place, partition, end, offset):
                for letter in letters:
                    if letter.record.offset == offset:
                        return await self._with_value(letter) if letter.is_large else letter
                break
        raise InvalidRequestError(
            f"There is no unsettled dead letter {partition}/{offset} in {place.topic}: it was sent "
            "back or dropped, or never was."
        )

    async def _with_value(self, letter: DeadLetter) -> DeadLetter:
        record = letter.record
        topic = await self._client.topic(record.topic, timeout_s=self._timeout_s)
        place = TopicPartition(record.topic, record.partition)
        values = LargeValues(self._client, ConsumerConfig())
        try:
            value = await values.value(place, topic.topic_id, record.offset, letter.manifest)
        except (LargeValueError, LargeValueRefusedError) as error:
            return letter._replace(unread=str(error))
        if value is None:
            return letter._replace(unread="Its chunks have expired.")
        return letter._replace(record=msgspec.structs.replace(record, value=value))

    async def settle(
        self,
        which: Filter,
        *,
        to_topic: str | None,
        rate_per_s: float | None = None,
        dry_run: bool = False,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> Progress:
        """Sends dead letters back, or drops them (`to_topic` as in `MoveQueueRecords`): those that
        are there when the call begins. Raises UnknownQueueError."""
        place = await self._find()
        if place.queue is None and not dry_run:
            place = await self._with_queue(place)
        pace = _Pace(self._client, rate_per_s)
        seen = matched = moved = 0
        refused: dict[str, int] = {}
        targets: dict[str | None, Aim] = {}
        for partition, end in (await self._ends(place)).items():
            async for letters in self._letters(place, partition, end):
                matching = [letter for letter in letters if which.holds(letter)]
                offsets = [letter.record.offset for letter in matching]
                seen += len(letters)
                matched += len(offsets)
                if to_topic is not None:
                    _count_targets(targets, matching, to_topic)
                while offsets and not dry_run:
                    assert place.queue is not None
                    some = offsets[: await pace.next(len(offsets))]
                    del offsets[: len(some)]
                    outcome = await move_records_in(
                        self._call(), place.queue, partition, some, to_topic
                    )
                    moved += len(outcome.moved)
                    for why in outcome.refused.values():
                        refused[why] = refused.get(why, 0) + 1
                    on_progress(Progress(seen, matched, moved, refused, targets))
        return Progress(seen, matched, moved, refused, targets)

    async def _with_queue(self, place: _Place) -> _Place:
        """Creates the queue that remembers which dead letters of a pool are settled."""
        request = CreateQueue(
            name=self._queue_name, topic=place.topic, config={**DEAD_QUEUE, "retention": "topic"}
        )
        call = self._call()
        await create_queue(call, request, exist_ok=True)
        return _Place(place.topic, await find_queue(call, self._queue_name))

    # --- reading --------------------------------------------------------------------------------

    async def _ends(self, place: _Place) -> dict[int, int]:
        """The current end of each partition. Later dead letters are not followed, because one that
        fails again would come round forever."""
        topic = await self._client.topic(
            place.topic, timeout_s=self._timeout_s, age_max_s=0.0
        )
        numbers = range(len(topic.partitions))
        ends = await asyncio.gather(
            *(self._offset(TopicPartition(place.topic, number), LATEST) for number in numbers)
        )
        return dict(zip(numbers, ends, strict=True))

    async def _letters(
        self, place: _Place, partition: int, end: int, start: int = 0
    ) -> AsyncIterator[list[DeadLetter]]:
        """The unsettled dead letters of [start, end) of one partition, a page at a time."""
        where = TopicPartition(place.topic, partition)
        if place.queue is None:
            at = max(start, await self._offset(where, EARLIEST))
            while at < end:
                letters, next_offset = await self._fetch(where, at)
                if next_offset <= at:
                    raise OffsetNotAvailableError(
                        f"{where}: its leader gives nothing from offset {at} on, and the dead "
                        f"letters continue to {end}: try again."
                    )
                at = next_offset
                yield [letter for letter in letters if start <= letter.record.offset < end]
            return
        offset: int | None = start
        while offset is not None and offset < end:
            page, offset = await unsettled_records(self._call(), place.queue, partition, offset)
            page = [record for record in page if record.offset < end]
            async for letters in self._read(where, page):
                yield letters

    async def _read(
        self, where: TopicPartition, page: Sequence[QueueRecordInfo]
    ) -> AsyncIterator[list[DeadLetter]]:
        """Reads the dead letters for these records from the log."""
        states = {record.offset: record.state for record in page}
        wanted = sorted(states)
        while wanted:
            letters, next_offset = await self._fetch(where, wanted[0])
            yield [
                letter._replace(state=states[letter.record.offset])
                for letter in letters
                if letter.record.offset in states
            ]
            wanted = [offset for offset in wanted if offset >= max(next_offset, wanted[0] + 1)]

    async def _fetch(self, where: TopicPartition, offset: int) -> tuple[list[DeadLetter], int]:
        """The records from `offset` on, as if all were ready, and the offset at which to continue.
        If the log start is above `offset`, that is the log start."""
        try:
            answer, payload = await self._client.exchange_with_leader(
                *where,
                fetch_now(where.partition, offset, FETCH_BYTES, READ_COMMITTED),
                timeout_s=self._timeout_s,
                attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            )
        except OffsetOutOfRangeError:
            return [], await self._offset(where, EARLIEST)
        aborted = frozenset(answer.aborted)
        letters: list[DeadLetter] = []
        for position, header in split_batches(payload):
            if header.is_control or header.is_chunk or transaction_of(header) in aborted:
                continue
            try:
                columns = decode_columns(payload, position, header)
            except (CorruptBatchError, UnsupportedFormatError) as error:
                if not is_as_written(payload, position, header):
                    raise
                # It can at least be dropped.
                letters += [
                    DeadLetter(
                        Record(*where, bad, header.max_timestamp_ms, None, None, []),
                        "ready",
                        unread=error.message,
                        is_by_queue=header.is_dead_letter,
                    )
                    for bad in range(max(header.base_offset, offset), header.next_offset)
                ]
                continue
            for at, found in enumerate(columns.offsets):
                if found >= offset:
                    keys, headers = columns.keys, columns.headers
                    record = Record(
                        *where,
                        found,
                        columns.timestamps_ms[at],
                        None if keys is None else keys[at],
                        None if header.is_large else columns.values[at],
                        [] if headers is None else list(headers[at] or ()),
                    )
                    manifest = (columns.values[at] or b"") if header.is_large else None
                    letters.append(
                        DeadLetter(record, "ready", manifest, is_by_queue=header.is_dead_letter)
                    )
        return letters, answer.next_offset

    async def _offset(self, where: TopicPartition, which: int) -> int:
        answer = await self._call().ask_leader(*where, ListOffsets, which, READ_COMMITTED)
        return known_end(answer, str(where))


def _count_targets(
    targets: dict[str | None, Aim], letters: Sequence[DeadLetter], to_topic: str
) -> None:
    for letter in letters:
        target = to_topic or letter.target
        known = targets.get(target, Aim(0, 0))
        targets[target] = Aim(known.letters + 1, known.by_producers + (not letter.is_by_queue))


class _Pace:
    """A limit of `rate_per_s` records a second; None means no limit."""

    def __init__(self, client: Client, rate_per_s: float | None) -> None:
        self._client = client
        self._rate_per_s = rate_per_s
        self._next_s = client.now

    async def next(self, wanted: int) -> int:
        """Waits for the turn, and returns the number of records that may go now."""
        count = min(wanted, MOVED_AT_ONCE)
        if self._rate_per_s is None:
            return count
        count = min(count, max(1, int(self._rate_per_s * SETTLED_AT_ONCE_S)))
        wait_s = self._next_s - self._client.now
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        self._next_s = max(self._next_s, self._client.now) + count / self._rate_per_s
        return count

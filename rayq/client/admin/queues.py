"""Administration of queues: create, alter, delete, list, describe, look at their records, and move
or settle them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayq.client.admin.topics import until_ready
from rayq.client.arguments import shown
from rayq.client.client import Client
from rayq.client.deadlines import time_left_s
from rayq.config import QueueConfig
from rayq.errors import (
    InvalidRequestError,
    QueueExistsError,
    RayqError,
    TopicExistsError,
    UnknownQueueError,
    UnknownTopicError,
)
from rayq.messages import (
    AlterQueue,
    CreateQueue,
    DeleteQueue,
    DescribeQueue,
    DescribeQueueResponse,
    DescribeQueues,
    DescribeQueuesResponse,
    ListQueueRecords,
    ListQueueRecordsResponse,
    MoveQueueRecords,
    MoveQueueRecordsResponse,
    PurgeQueue,
    PurgeQueueResponse,
    QueueMetadata,
)
from rayq.records import (
    MovedRecords,
    QueueInfo,
    QueuePartitionInfo,
    QueueRecordInfo,
    TopicPartition,
)
from rayq.wire.paging import check_goes_on

DESCRIBE_TIMEOUT_S = 5.0
"""Timeout for a partition's leader; without its answer the partition is shown without figures."""
ATTEMPT_TIMEOUT_S = 10.0
MOVE_ATTEMPT_TIMEOUT_S = 30.0
"""Timeout of one request that moves records."""
MOVED_AT_ONCE = 500
"""Maximum number of records that one request moves."""
LISTED_AT_ONCE = 1000
UNKNOWN_QUEUE_PATIENCE_S = 1.0
"""Time for which a broker may not have heard of a queue that another client has just created."""
RETRY_S = 0.1
STATES = ("ready", "locked", "delayed", "moving")
NAMES_AT_ONCE = 1000


def queue_name(given: object) -> str:
    """The name of one queue. Raises TypeError."""
    if not isinstance(given, str):
        raise TypeError(f"A queue is named by a str, such as 'tasks', not by {shown(given)}.")
    return given


async def create_queue(
    client: Client, request: CreateQueue, *, exist_ok: bool, timeout_s: float
) -> None:
    """Creates a queue: see `AsyncAdmin.create_queue`."""
    deadline = client.now + timeout_s
    if not await QueueAdmin(client, timeout_s).create(request, exist_ok=exist_ok):
        return
    if request.partitions is not None:  # It has a topic of its own.
        await until_ready(client, request.topic, request.partitions, timeout_s=timeout_s)
        deadline = client.now + timeout_s
    await QueueAdmin(client, max(deadline - client.now, 0.0)).until_open(request.name)


class QueueAdmin:
    """One call of the admin on queues, which may take `timeout_s`."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._deadline = client.now + timeout_s

    @property
    def _left_s(self) -> float:
        return time_left_s(self._client.now, self._deadline)

    # --- metadata -------------------------------------------------------------------------------

    async def create(self, request: CreateQueue, *, exist_ok: bool) -> bool:
        """Creates a queue, and returns whether it is new. With `exist_ok` an existing queue is
        accepted if it is as requested."""
        while True:
            try:
                await self._client.change(request, timeout_s=self._left_s)
                return True
            except (QueueExistsError, TopicExistsError) as caught:
                if not exist_ok:
                    raise
                error = caught
            try:
                found = await self.find(request.name)
            except UnknownQueueError:
                if isinstance(error, TopicExistsError):
                    raise error from None
                continue  # It was deleted meanwhile.
            _check_as_asked(found, request)
            return False

    async def until_open(self, name: str) -> None:
        """Waits until the leader of each partition has started the queue: if `start` is "latest",
        that is where it begins."""
        queue = await self.find(name)
        topic = await self._client.topic(queue.topic, timeout_s=self._left_s)
        numbers = range(len(topic.partitions))
        await asyncio.gather(*(self._until_open(queue, number) for number in numbers))

    async def _until_open(self, queue: QueueMetadata, number: int) -> None:
        while True:
            try:
                await self._ask_to_describe(queue, number, self._left_s)
                return
            except UnknownQueueError:  # The leader's process has not heard of it yet.
                if self._client.now + RETRY_S > self._deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    async def alter(self, name: str, changes: Mapping[str, Any]) -> None:
        await self._client.change(
            AlterQueue(name=name, config=dict(changes)), timeout_s=self._left_s
        )

    async def delete(self, name: str) -> None:
        await self._client.change(DeleteQueue(name=name), timeout_s=self._left_s)

    async def listed(self, names: Sequence[str] | None = None) -> list[QueueMetadata]:
        """All queues, sorted by name; or those of `names` that exist."""
        if names is not None and len(names) > NAMES_AT_ONCE:
            found = await self.listed()
            return [queue for queue in found if queue.name in set(names)]
        queues: list[QueueMetadata] = []
        after: str | None = ""
        metadata = self._client.metadata
        while after is not None:
            # As with topics it never goes back: a broker that has just started knows old metadata,
            # and would deny a queue that this client has already seen.
            answer: DescribeQueuesResponse = await self._client.ask_any(
                DescribeQueues(
                    names=None if names is None else list(names),
                    version_min=metadata.oldest_acceptable,
                    after=after,
                ),
                timeout_s=self._left_s,
                accept=lambda answer: answer.version >= metadata.oldest_acceptable,
            )
            metadata.require(answer.version)
            queues += answer.queues
            check_goes_on(after, answer.next_after, "the cluster's queues")
            after = answer.next_after
        return queues

    async def find(self, name: str) -> QueueMetadata:
        """Finds a queue. Raises UnknownQueueError, once brokers have denied it for a second."""
        patience = min(self._deadline, self._client.now + UNKNOWN_QUEUE_PATIENCE_S)
        while True:
            if found := await self.listed([name]):
                return found[0]
            if self._client.now + RETRY_S > patience:
                raise UnknownQueueError(
                    f"There is no queue {name!r} in this cluster. Create it with "
                    f"cluster.create_queue({name!r}); rayq queue list shows those that there are."
                )
            await asyncio.sleep(RETRY_S)

    # --- leaders --------------------------------------------------------------------------------

    async def describe_all(self) -> list[QueueInfo]:
        return list(await asyncio.gather(*map(self._describe, await self.listed())))

    async def describe(self, name: str) -> QueueInfo:
        return await self._describe(await self.find(name))

    async def _describe(self, queue: QueueMetadata) -> QueueInfo:
        try:
            topic = await self._client.topic(queue.topic, timeout_s=self._left_s, age_max_s=0.0)
            numbers = range(len(topic.partitions))
        except UnknownTopicError:  # It is being deleted, and the queue with it.
            numbers = range(0)
        return QueueInfo(
            name=queue.name,
            queue_id=queue.queue_id,
            topic=queue.topic,
            partitions=list(
                await asyncio.gather(
                    *(self._describe_partition(queue, number) for number in numbers)
                )
            ),
            # In the order of the documentation; a newer server may know more keys.
            config={key: queue.config[key] for key in _ordered(queue.config)},
        )

    async def _describe_partition(self, queue: QueueMetadata, number: int) -> QueuePartitionInfo:
        try:
            answer = await self._ask_to_describe(
                queue, number, min(self._left_s, DESCRIBE_TIMEOUT_S)
            )
        except RayqError as error:
            if not (error.retriable or isinstance(error, UnknownTopicError | UnknownQueueError)):
                raise
            return QueuePartitionInfo(number, trouble=str(error))
        return QueuePartitionInfo(
            partition=number,
            trouble=answer.trouble,
            start_offset=answer.start_offset,
            end_offset=answer.end_offset,
            ready=answer.ready,
            blocked=answer.blocked,
            locked=answer.locked,
            delayed=answer.delayed,
            moving=answer.moving,
            dead=answer.dead,
            expired=answer.expired,
            oldest_ready_ms=answer.oldest_ready_ms,
            oldest_locked_ms=answer.oldest_locked_ms,
            oldest_holder=answer.oldest_holder,
            next_due_ms=answer.next_due_ms,
            waiting_takes=answer.waiting_takes,
        )

    async def _ask_to_describe(
        self, queue: QueueMetadata, number: int, timeout_s: float
    ) -> DescribeQueueResponse:
        return await self._client.ask_leader(
            queue.topic,
            number,
            lambda topic_id, leader: DescribeQueue(
                topic_id, number, leader.epoch, queue.queue_id
            ),
            timeout_s=timeout_s,
            attempt_timeout_s=DESCRIBE_TIMEOUT_S,
        )

    async def records(
        self, name: str, *, states: Sequence[str], limit: int
    ) -> list[QueueRecordInfo]:
        """The oldest unsettled records of each partition, up to `limit` in all."""
        queue = await self.find(name)
        topic = await self._client.topic(queue.topic, timeout_s=self._left_s)
        found: list[QueueRecordInfo] = []
        for number in range(len(topic.partitions)):
            offset: int | None = 0
            while offset is not None and len(found) < limit:
                page, offset = await self.page(
                    queue, number, offset, states, min(limit - len(found), LISTED_AT_ONCE)
                )
                found += page
        return found

    async def page(
        self,
        queue: QueueMetadata,
        partition: int,
        offset: int,
        states: Sequence[str] = (),
        records_max: int = LISTED_AT_ONCE,
    ) -> tuple[list[QueueRecordInfo], int | None]:
        """Unsettled records of one partition from `offset` on, and the offset at which to continue
        (None: there are no more)."""
        place = TopicPartition(queue.topic, partition)
        answer: ListQueueRecordsResponse = await self._client.ask_leader(
            *place,
            lambda topic_id, leader: ListQueueRecords(
                topic_id,
                partition,
                leader.epoch,
                queue.queue_id,
                offset,
                list(states),
                records_max,
            ),
            timeout_s=self._left_s,
            attempt_timeout_s=ATTEMPT_TIMEOUT_S,
        )
        records = [
            QueueRecordInfo(place, r.offset, r.state, r.count, r.holder, r.due_ms)
            for r in answer.records
        ]
        what = f"the unsettled records of queue {queue.name!r} in {place}"
        check_goes_on(offset, answer.next_offset, what)
        return records, answer.next_offset

    async def purge(self, name: str) -> int:
        queue = await self.find(name)
        topic = await self._client.topic(queue.topic, timeout_s=self._left_s, age_max_s=0.0)
        answers: list[PurgeQueueResponse] = await asyncio.gather(
            *(self._purge(queue, number) for number in range(len(topic.partitions)))
        )
        return sum(answer.purged for answer in answers)

    async def _purge(self, queue: QueueMetadata, number: int) -> PurgeQueueResponse:
        return await self._client.ask_leader(
            queue.topic,
            number,
            lambda topic_id, leader: PurgeQueue(
                topic_id, number, leader.epoch, queue.queue_id
            ),
            timeout_s=self._left_s,
            attempt_timeout_s=ATTEMPT_TIMEOUT_S,
        )

    async def move(
        self,
        name: str,
        records: Mapping[TopicPartition, Iterable[int]],
        *,
        to_topic: str | None,
    ) -> dict[TopicPartition, MovedRecords]:
        """Moves or settles records; `to_topic` as in `MoveQueueRecords`."""
        queue = await self.find(name)
        for partition in records:
            if partition.topic != queue.topic:
                raise InvalidRequestError(
                    f"Queue {name!r} reads topic {queue.topic!r}, not {partition.topic!r}."
                )
        outcomes = await asyncio.gather(
            *(
                self.move_in(queue, place.partition, sorted(set(offsets)), to_topic)
                for place, offsets in records.items()
            )
        )
        return dict(zip(records, outcomes, strict=True))

    async def move_in(
        self,
        queue: QueueMetadata,
        partition: int,
        offsets: Sequence[int],
        to_topic: str | None,
    ) -> MovedRecords:
        """Moves records of one partition. After a lost answer the request is repeated: records that
        the first one moved count as moved."""
        moved: list[int] = []
        refused: dict[int, str] = {}
        for start in range(0, len(offsets), MOVED_AT_ONCE):
            some = list(offsets[start : start + MOVED_AT_ONCE])
            answer: MoveQueueRecordsResponse = await self._client.ask_leader(
                queue.topic,
                partition,
                lambda topic_id, leader, some=some: MoveQueueRecords(  # type: ignore[misc]
                    topic_id,
                    partition,
                    leader.epoch,
                    queue.queue_id,
                    some,
                    to_topic,
                ),
                timeout_s=self._left_s,
                attempt_timeout_s=MOVE_ATTEMPT_TIMEOUT_S,
            )
            moved += answer.moved
            refused.update(answer.refused)
        return MovedRecords(moved, refused)


def by_place(records: Iterable[QueueRecordInfo]) -> dict[TopicPartition, list[int]]:
    """The offsets of records by their partitions."""
    found: defaultdict[TopicPartition, list[int]] = defaultdict(list)
    for record in records:
        found[record.topic_partition].append(record.offset)
    return dict(found)


def check_states(states: Iterable[str]) -> list[str]:
    """Checks states of unsettled records. Raises InvalidRequestError for an unknown one."""
    given = [states] if isinstance(states, str) else list(states)
    for state in given:
        if state not in STATES:
            raise InvalidRequestError(
                f"{shown(state)} is no state of a queue's records: {', '.join(STATES)}."
            )
    return given


def _check_as_asked(found: QueueMetadata, asked: CreateQueue) -> None:
    """Raises QueueExistsError if a queue differs from what a `create_queue` asked for."""
    differences = [
        f"{key} {found.config[key]!r}, not {value!r}"
        for key, value in asked.config.items()
        if found.config[key] != value
    ]
    if asked.partitions not in (None, found.partitions):
        differences.insert(0, f"{found.partitions} partitions, not {asked.partitions}")
    if found.topic != asked.topic:
        differences.insert(0, f"topic {found.topic!r}, not {asked.topic!r}")
    if differences:
        raise QueueExistsError(
            f"Queue {asked.name!r} exists already, and is not as it was asked for. It has "
            f"{'; '.join(differences)}. Ask for what it has, or change it by alter_queue."
        )


def _ordered(config: Mapping[str, Any]) -> list[str]:
    known = [field.name for field in dataclasses.fields(QueueConfig)]
    return [*(key for key in known if key in config), *(config.keys() - set(known))]

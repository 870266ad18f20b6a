"""Administration of queues: create, alter, delete, list, describe, look at their records, and move
or settle them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from rayq.client.admin.base import ADMIN_TIMEOUT_S, AdminMethods, Call
from rayq.client.admin.topics import until_ready
from rayq.client.arguments import by_partition, shown, topic_name, whole_number
from rayq.client.timeouts import takes_timeout
from rayq.config import QueueConfig, given_values
from rayq.config.keywords import QueueKeywords
from rayq.errors import (
    AuthorizationError,
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
    ListQueueRecords,
    MoveQueueRecords,
    PurgeQueue,
    QueueMetadata,
)
from rayq.records import (
    MovedRecords,
    QueueInfo,
    QueuePartitionInfo,
    QueueRecordInfo,
    TopicPartition,
)
from rayq.wire.paging import check_advances

DESCRIBE_TIMEOUT_S = 5.0
"""Timeout for a partition's leader; without its answer the partition is shown without figures."""
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
        raise TypeError(f"A queue name must be a str, such as 'tasks', not {shown(given)}.")
    return given


class QueueAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about queues and their records."""

    @takes_timeout
    async def create_queue(
        self,
        name: str,
        *,
        topic: str | None = None,
        partitions: int = 1,
        replication_factor: int | None = None,
        exist_ok: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **config: Unpack[QueueKeywords],
    ) -> None:
        """Creates a queue; returns when the leader of each partition has started it.

        With `topic` None, the queue has its own topic of the same name. That topic is created with
        `partitions` and `replication_factor` as in `create_topic`, and its retention removes only
        settled records (`retention="hold"` is the default then). Otherwise the queue reads the
        given topic, which stays as it is. With `dead_letters="keep"` there is also a queue
        `<name>.dead`, over a topic of that name.

        `config` is as in `QueueConfig`. With `exist_ok` an existing queue is left as it is; if it
        reads another topic, or differs in a value given here, QueueExistsError is raised.

        Raises QueueExistsError, QueueLimitError, ConfigError, UnknownTopicError (`topic`), and the
        errors of `create_topic`: TopicExistsError if a topic of that name exists without such a
        queue.
        """
        is_own = topic is None
        given: dict[str, Any] = {"retention": "hold"} if is_own else {}
        request = CreateQueue(
            name=queue_name(name),
            topic=name if topic is None else topic_name(topic),
            config={**given, **given_values(QueueConfig, config)},
            partitions=whole_number("partitions", partitions) if is_own else None,
            replication_factor=None
            if replication_factor is None
            else whole_number("replication_factor", replication_factor),
        )
        call = Call(self._client, timeout_s)
        if not await create_queue(call, request, exist_ok=exist_ok):
            return
        if is_own:
            await until_ready(self._client, name, partitions, timeout_s=timeout_s)
            call = Call(self._client, timeout_s)
        await _until_open(call, name)

    @takes_timeout
    async def alter_queue(
        self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S, **changes: Unpack[QueueKeywords]
    ) -> None:
        """Changes the given keys of a queue's config. Raises ConfigError, UnknownQueueError."""
        if not changes:
            raise InvalidRequestError("alter_queue needs at least one key to change.")
        request = AlterQueue(name=queue_name(name), config=given_values(QueueConfig, changes))
        await self._client.change(request, timeout_s=timeout_s)

    @takes_timeout
    async def delete_queue(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Deletes a queue and the state of its records. Its topic stays, with its records, and so
        do its dead letters. Raises UnknownQueueError."""
        await self._client.change(DeleteQueue(name=queue_name(name)), timeout_s=timeout_s)

    @takes_timeout
    async def list_queues(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[str]:
        """The names of all queues, sorted."""
        return [queue.name for queue in await list_queues(Call(self._client, timeout_s))]

    @takes_timeout
    async def describe_queue(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> QueueInfo:
        """Describes a queue and its state in each partition as its leader reports it; without
        figures if none answers. Raises UnknownQueueError."""
        return await describe_queue(Call(self._client, timeout_s), queue_name(name))

    @takes_timeout
    async def describe_queues(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[QueueInfo]:
        """Describes all queues, each as `describe_queue` does."""
        call = Call(self._client, timeout_s)
        return await asyncio.gather(*(_describe(call, queue) for queue in await list_queues(call)))

    @takes_timeout
    async def list_queue_records(
        self,
        name: str,
        *,
        states: str | Iterable[str] = (),
        limit: int = 1000,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> list[QueueRecordInfo]:
        """The unsettled records of a queue, by partition and from the oldest, up to `limit`.
        `states` restricts them to "ready", "locked", "delayed" or "moving" ones. Nothing is taken.
        Raises UnknownQueueError."""
        chosen = check_states(states)
        queue_name(name)
        whole_number("limit", limit)
        call = Call(self._client, timeout_s)
        queue = await find_queue(call, name)
        topic = await self._client.topic(queue.topic, timeout_s=call.left_s)
        found: list[QueueRecordInfo] = []
        for number in range(len(topic.partitions)):
            offset: int | None = 0
            while offset is not None and len(found) < limit:
                page, offset = await unsettled_records(
                    call, queue, number, offset, chosen, min(limit - len(found), LISTED_AT_ONCE)
                )
                found += page
        return found

    @takes_timeout
    async def purge_queue(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> int:
        """Settles all records of a queue that no consumer holds, and returns their number. They
        stay in the topic. Raises UnknownQueueError."""
        call = Call(self._client, timeout_s)
        queue = await find_queue(call, queue_name(name))
        topic = await self._client.topic(queue.topic, timeout_s=call.left_s, age_max_s=0.0)
        answers = await asyncio.gather(
            *(
                call.ask_leader(queue.topic, number, PurgeQueue, queue.queue_id)
                for number in range(len(topic.partitions))
            )
        )
        return sum(answer.purged for answer in answers)

    @takes_timeout
    async def move_queue_records(
        self,
        name: str,
        records: Mapping[TopicPartition, Iterable[int]],
        *,
        to_topic: str | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[TopicPartition, MovedRecords]:
        """Writes records of a queue, given by partition and offset, to another topic, each exactly
        once, and settles them. With `to_topic` None, each goes to the topic that its header
        `rayq.source` names, as dead letters have it. The headers that made it a dead letter are
        left out. Records that are settled already count as moved; records that cannot be moved (for
        example because a consumer holds them) are in `refused`. May be repeated. Raises
        UnknownQueueError, InvalidRequestError."""
        call = Call(self._client, timeout_s)
        target = "" if to_topic is None else topic_name(to_topic)
        return await _move_records(call, queue_name(name), by_partition(records, "offsets"), target)

    @takes_timeout
    async def discard_queue_records(
        self,
        name: str,
        records: Mapping[TopicPartition, Iterable[int]],
        *,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[TopicPartition, MovedRecords]:
        """Settles records of a queue, given by partition and offset, so that nobody gets them. They
        stay in the topic. Returns and raises as `move_queue_records` does."""
        call = Call(self._client, timeout_s)
        return await _move_records(call, queue_name(name), by_partition(records, "offsets"), None)


# --- metadata -------------------------------------------------------------------------------------


async def create_queue(call: Call, request: CreateQueue, *, exist_ok: bool) -> bool:
    """Creates a queue, and returns whether it is new. With `exist_ok` an existing queue is
    accepted if it is as requested."""
    while True:
        try:
            await call.client.change(request, timeout_s=call.left_s)
            return True
        except (QueueExistsError, TopicExistsError) as caught:
            if not exist_ok:
                raise
            error = caught
        try:
            found = await find_queue(call, request.name)
        except UnknownQueueError:
            if isinstance(error, TopicExistsError):
                raise error from None
            continue  # It was deleted meanwhile.
        _check_as_asked(found, request)
        return False


async def _until_open(call: Call, name: str) -> None:
    """Waits until the leader of each partition has started the queue: if `start` is "latest", that
    is where it begins. A client that may create the queue but not describe it does not wait."""
    try:
        queue = await find_queue(call, name)
    except AuthorizationError:
        return
    topic = await call.client.topic(queue.topic, timeout_s=call.left_s)
    numbers = range(len(topic.partitions))
    await asyncio.gather(*(_until_partition_open(call, queue, number) for number in numbers))


async def _until_partition_open(call: Call, queue: QueueMetadata, number: int) -> None:
    while True:
        try:
            await _ask_to_describe(call, queue, number, call.left_s)
            return
        except UnknownQueueError:  # The leader's process has not heard of it yet.
            if call.client.now + RETRY_S > call.deadline:
                raise
        await asyncio.sleep(RETRY_S)


async def list_queues(call: Call, names: Sequence[str] | None = None) -> list[QueueMetadata]:
    """All queues, sorted by name; or those of `names` that exist."""
    if names is not None and len(names) > NAMES_AT_ONCE:
        found = await list_queues(call)
        return [queue for queue in found if queue.name in set(names)]
    queues, _ = await _list_queues(call, names)
    return queues


async def _list_queues(
    call: Call, names: Sequence[str] | None
) -> tuple[list[QueueMetadata], dict[str, str]]:
    """The queues, sorted by name, and those of `names` that this client may not describe, each with
    the reason."""
    queues: list[QueueMetadata] = []
    denied: dict[str, str] = {}
    after: str | None = ""
    while after is not None:
        answer = await call.ask_metadata(
            DescribeQueues(
                names=None if names is None else list(names),
                version_min=call.client.metadata.oldest_acceptable,
                after=after,
            )
        )
        queues += answer.queues
        denied |= answer.denied
        check_advances(after, answer.next_after, "the cluster's queues")
        after = answer.next_after
    return queues, denied


async def find_queue(call: Call, name: str) -> QueueMetadata:
    """Finds a queue. Raises UnknownQueueError, once brokers have denied it for a second, and
    AuthorizationError where this client may not know whether it exists."""
    patience = min(call.deadline, call.client.now + UNKNOWN_QUEUE_PATIENCE_S)
    while True:
        found, denied = await _list_queues(call, [name])
        if found:
            return found[0]
        if call.client.now + RETRY_S > patience:
            if name in denied:
                raise AuthorizationError(denied[name])
            raise UnknownQueueError(
                f"There is no queue {name!r} in this cluster. Create it with "
                f"cluster.create_queue({name!r}); rayq queue list shows those that there are."
            )
        await asyncio.sleep(RETRY_S)


# --- leaders --------------------------------------------------------------------------------------


async def describe_queue(call: Call, name: str) -> QueueInfo:
    return await _describe(call, await find_queue(call, name))


async def _describe(call: Call, queue: QueueMetadata) -> QueueInfo:
    try:
        topic = await call.client.topic(queue.topic, timeout_s=call.left_s, age_max_s=0.0)
        numbers = range(len(topic.partitions))
    except UnknownTopicError:  # It is being deleted, and the queue with it.
        numbers = range(0)
    return QueueInfo(
        name=queue.name,
        queue_id=queue.queue_id,
        topic=queue.topic,
        partitions=await asyncio.gather(
            *(_describe_partition(call, queue, number) for number in numbers)
        ),
        # In the order of the documentation; a newer server may know more keys.
        config={key: queue.config[key] for key in _ordered(queue.config)},
    )


async def _describe_partition(call: Call, queue: QueueMetadata, number: int) -> QueuePartitionInfo:
    try:
        timeout_s = min(call.left_s, DESCRIBE_TIMEOUT_S)
        answer = await _ask_to_describe(call, queue, number, timeout_s)
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
    call: Call, queue: QueueMetadata, number: int, timeout_s: float
) -> DescribeQueueResponse:
    return await call.ask_leader(
        queue.topic,
        number,
        DescribeQueue,
        queue.queue_id,
        timeout_s=timeout_s,
        attempt_timeout_s=DESCRIBE_TIMEOUT_S,
    )


async def unsettled_records(
    call: Call,
    queue: QueueMetadata,
    partition: int,
    offset: int,
    states: Sequence[str] = (),
    records_max: int = LISTED_AT_ONCE,
) -> tuple[list[QueueRecordInfo], int | None]:
    """Unsettled records of one partition from `offset` on, and the offset at which to continue
    (None: there are no more)."""
    place = TopicPartition(queue.topic, partition)
    answer = await call.ask_leader(
        *place, ListQueueRecords, queue.queue_id, offset, list(states), records_max
    )
    records = [
        QueueRecordInfo(place, r.offset, r.state, r.count, r.holder, r.due_ms)
        for r in answer.records
    ]
    what = f"the unsettled records of queue {queue.name!r} in {place}"
    check_advances(offset, answer.next_offset, what)
    return records, answer.next_offset


async def _move_records(
    call: Call, name: str, records: Mapping[TopicPartition, Iterable[int]], to_topic: str | None
) -> dict[TopicPartition, MovedRecords]:
    """Moves or settles records; `to_topic` as in `MoveQueueRecords`."""
    queue = await find_queue(call, name)
    for partition in records:
        if partition.topic != queue.topic:
            raise InvalidRequestError(
                f"Queue {name!r} reads topic {queue.topic!r}, not {partition.topic!r}."
            )
    outcomes = await asyncio.gather(
        *(
            move_records_in(call, queue, place.partition, sorted(set(offsets)), to_topic)
            for place, offsets in records.items()
        )
    )
    return dict(zip(records, outcomes, strict=True))


async def move_records_in(
    call: Call,
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
        answer = await call.ask_leader(
            queue.topic,
            partition,
            MoveQueueRecords,
            queue.queue_id,
            some,
            to_topic,
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
                f"{shown(state)} is not a state of a queue's records: {', '.join(STATES)}."
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

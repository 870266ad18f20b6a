"""Administration of remote storage: how much of partitions is in the object store, whether their
objects are there and sound, and what retention keeps for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rayq.client.admin.base import ADMIN_TIMEOUT_S, AdminMethods, Call
from rayq.client.arguments import partition_numbers, topic_name, topic_names
from rayq.client.client import check_partition
from rayq.client.timeouts import TIMEOUT_S_MAX, takes_timeout
from rayq.environment import Address
from rayq.errors import InvalidRequestError, RayqError, UnknownTopicError
from rayq.messages import (
    DescribeObjectStore,
    DescribeObjectStoreResponse,
    DescribeRemoteStorage,
    UnpinSnapshot,
    VerifyRemote,
)
from rayq.records import (
    DeletedRemoteTopic,
    ObjectStoreInfo,
    RemotePartitionInfo,
    RemoteProblem,
    RemoteVerification,
    SnapshotPin,
    TopicPartition,
)
from rayq.wire.paging import check_advances

BROKER_TIMEOUT_S = 2.0
DESCRIBE_TIMEOUT_S = 5.0
"""Timeout for a partition's leader; without its answer the partition is shown without figures."""
VERIFY_TIMEOUT_S = 300.0
"""Timeout of a leader for one page."""
VERIFIED_AT_ONCE, VERIFIED_DEEP_AT_ONCE = 1000, 4
"""Maximum number of objects of a page. With `deep`, each of them is read, at most 64 MiB."""


class RemoteAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about the object store and what topics have in it."""

    @takes_timeout
    async def describe_object_store(
        self, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> ObjectStoreInfo:
        """Describes the cluster's object store, the pins at which retention stops, and the deleted
        topics that still have objects there."""
        return await _describe_object_store(Call(self._client, timeout_s))

    @takes_timeout
    async def describe_remote_storage(
        self, topics: str | Iterable[str] | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[RemotePartitionInfo]:
        """Describes how much of each partition of these topics (None: of all with `remote_storage`)
        is in the object store, as its leader reports; without figures if none answers. Raises
        UnknownTopicError."""
        names = None if topics is None else topic_names(topics)
        call = Call(self._client, timeout_s)
        if names is None:
            response = await self._client.fetch_all(timeout_s=call.left_s)
            found = [topic for topic in response.topics if topic.config.get("remote_storage")]
        else:
            found = [
                await self._client.topic(name, timeout_s=call.left_s, age_max_s=0.0)
                for name in names
            ]
        return await asyncio.gather(
            *(
                _describe_partition(call, TopicPartition(topic.name, partition.partition))
                for topic in found
                for partition in topic.partitions
            )
        )

    @takes_timeout
    async def verify_remote(
        self,
        topic: str,
        partitions: Iterable[int] | None = None,
        *,
        deep: bool = False,
        repair: bool = False,
        timeout_s: float | None = None,
    ) -> list[RemoteVerification]:
        """Checks that the objects of a topic's partitions (None: of all) are in the object store
        with their sizes. With `deep` each object is read, and its CRCs, offsets and epochs are
        checked. With `repair` missing or damaged objects are stored again, if the leader still has
        the records on its own disk. `timeout_s` None means no timeout. Raises UnknownTopicError,
        RemoteStorageError."""
        topic_name(topic)
        chosen = partition_numbers(partitions)
        call = Call(self._client, TIMEOUT_S_MAX if timeout_s is None else timeout_s)
        found = await self._client.topic(topic, timeout_s=call.left_s, age_max_s=0.0)
        numbers = range(len(found.partitions)) if chosen is None else sorted(set(chosen))
        for number in numbers:
            check_partition(found, number)
        return [  # One after the other: the leaders continue their work meanwhile.
            await _verify(call, TopicPartition(topic, number), deep=deep, repair=repair)
            for number in numbers
        ]

    @takes_timeout
    async def unpin(self, pin_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Ends a pin: retention continues. A batch job that still reads may then find records gone.
        Raises InvalidRequestError if there is no such pin."""
        call = Call(self._client, timeout_s)
        pins = (await _describe_object_store(call)).pins
        if not any(pin.pin_id == pin_id for pin in pins):
            raise InvalidRequestError(f"There is no pin {pin_id!r}: it has ended, or never was.")
        await self._client.change(UnpinSnapshot(pin_id=pin_id), timeout_s=call.left_s)


async def _describe_object_store(call: Call) -> ObjectStoreInfo:
    """Describes the object store. All live brokers are asked at once; the trouble of one that does
    not answer is reported elsewhere."""
    client = call.client
    response = await client.fetch_all(timeout_s=call.left_s)
    live = [broker for broker in response.brokers if broker.live]
    answers = await asyncio.gather(*(_ask(call, (broker.host, broker.port)) for broker in live))
    found: DescribeObjectStoreResponse = await client.ask_any(
        DescribeObjectStore(),
        timeout_s=call.left_s,
        accept=lambda answer: answer.version >= client.metadata.version_min,
    )
    return ObjectStoreInfo(
        url=found.url,
        troubles={
            broker.broker: answer.trouble
            for broker, answer in zip(live, answers, strict=True)
            if answer is not None and answer.trouble is not None
        },
        pins=[SnapshotPin(pin.pin_id, pin.topic, pin.starts, pin.ttl_ms) for pin in found.pins],
        garbage=[
            DeletedRemoteTopic(topic.name, topic.topic_id, topic.deleted_ms)
            for topic in found.garbage
        ],
    )


async def _ask(call: Call, address: Address) -> DescribeObjectStoreResponse | None:
    try:
        answer, _ = await call.client.ask(
            address, DescribeObjectStore(), timeout_s=min(call.left_s, BROKER_TIMEOUT_S)
        )
    except RayqError as error:
        if not error.retriable:
            raise
        return None
    return answer


async def _describe_partition(call: Call, place: TopicPartition) -> RemotePartitionInfo:
    try:
        answer = await call.ask_leader(
            *place,
            DescribeRemoteStorage,
            timeout_s=min(call.left_s, DESCRIBE_TIMEOUT_S),
            attempt_timeout_s=DESCRIBE_TIMEOUT_S,
        )
    except RayqError as error:
        if not (error.retriable or isinstance(error, UnknownTopicError)):
            raise
        return RemotePartitionInfo(
            place, None, None, None, None, None, None, None, trouble=str(error)
        )
    pointer = answer.pointer
    return RemotePartitionInfo(
        topic_partition=place,
        log_start_offset=answer.log_start_offset,
        local_start_offset=answer.local_start_offset,
        remote_end_offset=None if pointer is None else pointer.end,
        high_watermark=answer.high_watermark,
        remote_bytes=0 if pointer is None else pointer.data_bytes,
        lag_bytes=answer.lag_bytes,
        lag_ms=answer.lag_ms,
        trouble=answer.trouble,
    )


async def _verify(
    call: Call, place: TopicPartition, *, deep: bool, repair: bool
) -> RemoteVerification:
    checked = 0
    problems: list[RemoteProblem] = []
    repaired: list[str] = []
    next_offset: int | None = 0
    while (start := next_offset) is not None:
        answer = await call.ask_leader(
            *place,
            VerifyRemote,
            start,
            deep,
            repair,
            VERIFIED_DEEP_AT_ONCE if deep else VERIFIED_AT_ONCE,
            attempt_timeout_s=VERIFY_TIMEOUT_S,
            patience_s=VERIFY_TIMEOUT_S,
        )
        checked += answer.checked_objects
        problems += [RemoteProblem(*problem) for problem in answer.problems]
        repaired += answer.repaired
        next_offset = answer.next_offset
        check_advances(start, next_offset, f"the objects of {place}")
    return RemoteVerification(place, checked, problems, repaired)

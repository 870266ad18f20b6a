"""Administration of remote storage: how much of partitions is in the object store, whether their
objects are there and sound, and what retention keeps for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rayq.client.client import Client, check_partition
from rayq.client.deadlines import time_left_s
from rayq.environment import Address
from rayq.errors import InvalidRequestError, RayqError, UnknownTopicError
from rayq.messages import (
    DescribeObjectStore,
    DescribeObjectStoreResponse,
    DescribeRemoteStorage,
    DescribeRemoteStorageResponse,
    TopicMetadata,
    UnpinSnapshot,
    VerifyRemote,
    VerifyRemoteResponse,
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
from rayq.wire.paging import check_goes_on

BROKER_TIMEOUT_S = 2.0
DESCRIBE_TIMEOUT_S = 5.0
"""Timeout for a partition's leader; without its answer the partition is shown without figures."""
VERIFY_TIMEOUT_S = 300.0
"""Timeout of a leader for one page."""
VERIFIED_AT_ONCE, VERIFIED_DEEP_AT_ONCE = 1000, 4
"""Maximum number of objects of a page. With `deep`, each of them is read, at most 64 MiB."""


class RemoteAdmin:
    """One call of the admin on remote storage, which may take `timeout_s`."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._deadline = client.now + timeout_s

    @property
    def _left_s(self) -> float:
        return time_left_s(self._client.now, self._deadline)

    async def describe_object_store(self) -> ObjectStoreInfo:
        """Describes the object store. All live brokers are asked at once; the trouble of one that
        does not answer is reported elsewhere."""
        response = await self._client.fetch_all(timeout_s=self._left_s)
        live = [broker for broker in response.brokers if broker.live]
        answers = dict(
            zip(
                (broker.broker for broker in live),
                await asyncio.gather(*(self._ask((broker.host, broker.port)) for broker in live)),
                strict=True,
            )
        )
        found: DescribeObjectStoreResponse = await self._client.ask_any(
            DescribeObjectStore(),
            timeout_s=self._left_s,
            accept=lambda answer: answer.version >= self._client.metadata.version_min,
        )
        return ObjectStoreInfo(
            url=found.url,
            troubles={
                broker: answer.trouble
                for broker, answer in answers.items()
                if answer is not None and answer.trouble is not None
            },
            pins=[
                SnapshotPin(pin.pin_id, pin.topic, pin.starts, pin.ttl_ms) for pin in found.pins
            ],
            garbage=[
                DeletedRemoteTopic(topic.name, topic.topic_id, topic.deleted_ms)
                for topic in found.garbage
            ],
        )

    async def _ask(self, address: Address) -> DescribeObjectStoreResponse | None:
        try:
            answer, _ = await self._client.ask(
                address, DescribeObjectStore(), timeout_s=min(self._left_s, BROKER_TIMEOUT_S)
            )
        except RayqError as error:
            if not error.retriable:
                raise
            return None
        return answer

    async def unpin(self, pin_id: str) -> None:
        pins = (await self.describe_object_store()).pins
        if not any(pin.pin_id == pin_id for pin in pins):
            raise InvalidRequestError(f"There is no pin {pin_id!r}: it has ended, or never was.")
        await self._client.change(UnpinSnapshot(pin_id=pin_id), timeout_s=self._left_s)

    # --- leaders --------------------------------------------------------------------------------

    async def describe(self, topics: Iterable[str] | None) -> list[RemotePartitionInfo]:
        """Describes each partition of these topics; None: of all that have remote storage."""
        if topics is None:
            response = await self._client.fetch_all(timeout_s=self._left_s)
            found = [topic for topic in response.topics if topic.config.get("remote_storage")]
        else:
            found = [
                await self._client.topic(name, timeout_s=self._left_s, age_max_s=0.0)
                for name in topics
            ]
        return list(
            await asyncio.gather(*(self._describe(partition) for partition in _places(found)))
        )

    async def _describe(self, place: TopicPartition) -> RemotePartitionInfo:
        try:
            answer: DescribeRemoteStorageResponse = await self._client.ask_leader(
                place.topic,
                place.partition,
                lambda topic_id, leader: DescribeRemoteStorage(
                    topic_id, place.partition, leader.epoch
                ),
                timeout_s=min(self._left_s, DESCRIBE_TIMEOUT_S),
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

    async def verify(
        self, topic: str, partitions: Iterable[int] | None, *, deep: bool, repair: bool
    ) -> list[RemoteVerification]:
        """Verifies one partition after the other: the leaders continue their work meanwhile."""
        found = await self._client.topic(topic, timeout_s=self._left_s, age_max_s=0.0)
        numbers = range(len(found.partitions)) if partitions is None else sorted(set(partitions))
        for number in numbers:
            check_partition(found, number)
        return [
            await self._verify(TopicPartition(topic, number), deep=deep, repair=repair)
            for number in numbers
        ]

    async def _verify(
        self, place: TopicPartition, *, deep: bool, repair: bool
    ) -> RemoteVerification:
        checked = 0
        problems: list[RemoteProblem] = []
        repaired: list[str] = []
        next_offset: int | None = 0
        while (start := next_offset) is not None:
            answer: VerifyRemoteResponse = await self._client.ask_leader(
                place.topic,
                place.partition,
                lambda topic_id, leader, start=start: VerifyRemote(  # type: ignore[misc]
                    topic_id,
                    place.partition,
                    leader.epoch,
                    start,
                    deep,
                    repair,
                    VERIFIED_DEEP_AT_ONCE if deep else VERIFIED_AT_ONCE,
                ),
                timeout_s=self._left_s,
                attempt_timeout_s=VERIFY_TIMEOUT_S,
                patience_s=VERIFY_TIMEOUT_S,
            )
            checked += answer.checked_objects
            problems += [RemoteProblem(*problem) for problem in answer.problems]
            repaired += answer.repaired
            next_offset = answer.next_offset
            check_goes_on(start, next_offset, f"the objects of {place}")
        return RemoteVerification(place, checked, problems, repaired)


def _places(topics: Iterable[TopicMetadata]) -> list[TopicPartition]:
    return [
        TopicPartition(topic.name, partition.partition)
        for topic in topics
        for partition in topic.partitions
    ]

"""A topic that is deleted and created again under its name, while operators move its partitions.

An owner creates the topic, with another number of partitions and replicas each time, writes, reads
all of it, and deletes it, with records in flight or without. What was acknowledged for the present
topic is there at its offset. Nothing of an earlier topic is, but for records that were in flight
when that was deleted: a producer sends them to the topic that has the name then.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from proving.simulation.compacted_topic import new_producer
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig
from rayq.errors import DeliveryError, RayqError, UnknownTopicError
from rayq.records import RecordMetadata, TopicInfo, TopicPartition

TOPIC = "baskets"
PARTITIONS_MAX = 3
ROUNDS_MAX = 4
ROUND_RECORDS_MAX = 10
PAUSES_S = (0.0, 0.05, 0.5, 3.0)
"""Pauses between a round and the next, and between a deletion and the next creation."""
QUESTION_TIMEOUT_S = 6.0
RETRY_S = 0.3
Place = tuple[int, int]
"""(partition, offset)"""


class RecreatedTopic:
    """See the module."""

    def __init__(self, problems: list[str], options: dict[str, Any]) -> None:
        self.created = 0
        self._problems = problems
        self._options = options
        self._topic_id = ""
        self._deleted_ids: set[str] = set()
        self._acknowledged: dict[bytes, Place] = {}
        """The values of the present topic."""
        self._in_flight: set[bytes] = set()
        """The values without an outcome, of all topics."""
        self._may_follow: set[bytes] = set()
        """The values that were in flight when their topic was deleted."""

    # --- the owner --------------------------------------------------------------------------------

    async def own(self, client: Client, rng: random.Random, is_on: Callable[[], bool]) -> None:
        """Creates, fills and deletes the topic while `is_on()`; leaves one that is there."""
        admin = AsyncAdmin(client)
        producer = new_producer(client, rng)
        while True:
            await self._create(admin, rng)
            for _ in range(rng.randint(1, ROUNDS_MAX)):
                await self._send(producer, rng)
                await asyncio.sleep(rng.choice(PAUSES_S))
                if rng.random() < 0.3:
                    with contextlib.suppress(RayqError):  # No broker could say where it ends.
                        await self.read(client)
            if not is_on():
                break
            if rng.random() < 0.5:
                with contextlib.suppress(RayqError):
                    await producer.flush(timeout_s=QUESTION_TIMEOUT_S)
            await self._delete(admin)
            await asyncio.sleep(rng.choice(PAUSES_S))
        with contextlib.suppress(DeliveryError):
            await producer.close()

    async def _create(self, admin: AsyncAdmin, rng: random.Random) -> None:
        """Returns once a topic of the name is there that is none of those before."""
        partitions, replicas = rng.randint(1, PARTITIONS_MAX), rng.choice((2, 3, 3))
        while True:
            info = await self._describe(admin)
            if info is not None and info.topic_id not in self._deleted_ids:
                break
            with contextlib.suppress(RayqError):
                await admin.create_topic(
                    TOPIC, partitions, replicas, timeout_s=QUESTION_TIMEOUT_S, **self._options
                )
            await asyncio.sleep(rng.choice((0.0, RETRY_S)))
        self.created += 1
        self._topic_id = info.topic_id

    async def _delete(self, admin: AsyncAdmin) -> None:
        self._may_follow |= self._in_flight
        self._deleted_ids.add(self._topic_id)
        self._acknowledged = {}
        while True:
            with contextlib.suppress(RayqError):
                await admin.delete_topic(TOPIC, timeout_s=QUESTION_TIMEOUT_S)
            info = await self._describe(admin)
            if info is None or info.topic_id not in self._deleted_ids:
                return
            await asyncio.sleep(RETRY_S)

    async def _describe(self, admin: AsyncAdmin) -> TopicInfo | None:
        """The topic; None if there is none."""
        while True:
            try:
                return await admin.describe_topic(TOPIC, timeout_s=QUESTION_TIMEOUT_S)
            except UnknownTopicError:
                return None
            except RayqError:
                await asyncio.sleep(RETRY_S)

    async def _send(self, producer: AsyncProducer, rng: random.Random) -> None:
        for number in range(rng.randint(1, ROUND_RECORDS_MAX)):
            value = b"%d/%d/%d" % (self.created, rng.getrandbits(40), number)
            value += b"." * rng.randint(0, 300)
            self._in_flight.add(value)
            try:
                future = await producer.send(TOPIC, value)
            except RayqError:
                self._in_flight.discard(value)
            else:
                future.call_on_delivery(partial(self._delivered, self._topic_id, value))

    def _delivered(
        self,
        topic_id: str,
        value: bytes,
        metadata: RecordMetadata | None,
        error: BaseException | None,
    ) -> None:
        self._in_flight.discard(value)
        # Of a record that was in flight nobody knows which topic took it.
        if metadata is not None and topic_id == self._topic_id and topic_id not in (
            self._deleted_ids
        ):
            assert metadata.offset is not None
            self._acknowledged[value] = (metadata.partition, metadata.offset)

    # --- reading ----------------------------------------------------------------------------------

    async def read(self, client: Client) -> None:
        """Reads all of the topic. Raises RayqError."""
        admin = AsyncAdmin(client)
        info = await self._describe(admin)
        if info is None or info.topic_id != self._topic_id:
            self._problems.append(f"{TOPIC} is {info}, and was created as {self._topic_id}")
            return
        wanted = dict(self._acknowledged)
        places = [TopicPartition(TOPIC, number) for number in range(len(info.partitions))]
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        found: dict[bytes, Place] = {}
        try:
            await consumer.assign(places)
            await consumer.seek_to_beginning(*places)
            ends = await consumer.end_offsets(places)
            while any([await consumer.position(place) < ends[place] for place in places]):
                for record in await consumer.poll(0.5):
                    assert record.value is not None
                    place = (record.partition, record.offset)
                    if found.setdefault(record.value, place) != place:
                        self._problems.append(f"{TOPIC}: {record.value!r} comes twice")
        finally:
            await consumer.close()
        own = b"%d/" % self.created
        strange = [
            value
            for value in found
            if not value.startswith(own) and value not in self._may_follow
        ]
        if strange:
            self._problems.append(f"{TOPIC} {self._topic_id} has records of another: {strange[:3]}")
        lost = [value for value, place in wanted.items() if found.get(value) != place]
        if lost:
            expected = [(wanted[value], found.get(value)) for value in lost[:3]]
            self._problems.append(
                f"{TOPIC} {self._topic_id} lacks {len(lost)} of {len(wanted)} acknowledged "
                f"records: {lost[:3]}, at {expected}"
            )

"""A compacted topic in a simulated cluster: its producers, its readers, and what they must read.

Producers write values and tombstones under a few keys of their own. A reader that reads the topic
from its start to its end, faster than `delete_retention_ms`, knows of each key the write that was
acknowledged last below that end, or a later one: nothing is lost, nothing deleted comes back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proving.simulation.compacted_history import CompactedHistory
from proving.simulation.world import World
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.errors import DeliveryError, RayqError
from rayq.records import Record, RecordMetadata, TopicPartition

TOPIC = "profiles"
PARTITIONS = 2
PLACES = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
KEYS = 6
TOMBSTONE_SHARE = 0.3
ROUND_S = 0.3
ROUND_RECORDS_MAX = 6
READ_AGAIN_S = (2.0, 8.0)
READS_MAX = 100


@dataclass(slots=True)
class _Write:
    value: bytes | None
    outcome: str = "under way"
    at: tuple[int, int] = (0, -1)
    """The partition and the offset, once they are known."""


@dataclass(slots=True)
class _Key:
    """The writes under one key, in order. One producer sends all of them."""

    writes: list[_Write] = field(default_factory=list)

    def acknowledged_below(self, ends: Mapping[TopicPartition, int]) -> int:
        """The number of the last write that is surely below these offsets, or -1."""
        for number in range(len(self.writes) - 1, -1, -1):
            partition, offset = self.writes[number].at
            if 0 <= offset < ends[TopicPartition(TOPIC, partition)]:
                return number
        return -1

    def may_be(self, value: bytes | None, acknowledged: int) -> bool:
        """Returns whether a reader that reads up to the write of that number, or further, may find
        this value (None: a tombstone, or no record)."""
        if acknowledged < 0 and value is None:
            return True
        return any(
            write.value == value and (number == acknowledged or write.outcome != "failed")
            for number, write in enumerate(self.writes)
            if number >= acknowledged
        )


def new_producer(client: Client, rng: random.Random) -> AsyncProducer:
    """A producer that is patient or not, and sends large batches or small ones."""
    return AsyncProducer(
        client,
        ProducerConfig(
            delivery_timeout_ms=rng.choice((4_000, 15_000)),
            request_timeout_ms=2_000,
            batch_size=rng.choice((512, 65_536)),
            linger_ms=rng.choice((0, 20)),
        ),
    )


class CompactedTopic:
    """See the module."""

    def __init__(self, world: World, rng: random.Random, problems: list[str]) -> None:
        self.acknowledged = 0
        self.reads = 0
        self._world = world
        self._problems = problems
        self._keys: dict[bytes, _Key] = {}
        self.delete_retention_ms = rng.choice((300, 1_500, 6_000))
        self.options: dict[str, Any] = {
            "cleanup_policy": "compact",
            "segment_bytes": rng.choice((1024, 4096)),
            "index_interval_bytes": rng.choice((256, 4096)),
            "min_cleanable_dirty_ratio": rng.choice((0.01, 0.3)),
            "delete_retention_ms": self.delete_retention_ms,
            "max_compaction_lag_ms": rng.choice((None, 1_000, 5_000)),
        }

    # --- writing ----------------------------------------------------------------------------------

    async def write(self, name: str, client: Client, rng: random.Random, is_on: Any) -> None:
        """Writes while `is_on()`; returns once every record has an outcome."""
        producer = new_producer(client, rng)
        count = 0
        while is_on():
            for _ in range(rng.randint(1, ROUND_RECORDS_MAX)):
                count += 1
                key = b"%s-%d" % (name.encode(), rng.randrange(KEYS))
                value = b"%d " % count + b"." * rng.randint(0, 100)
                await self._send(producer, key, None if rng.random() < TOMBSTONE_SHARE else value)
            await asyncio.sleep(rng.uniform(0, 2 * ROUND_S))
        try:
            await producer.close()
        except DeliveryError:
            pass  # Each record's own outcome has the error.

    async def _send(self, producer: AsyncProducer, key: bytes, value: bytes | None) -> None:
        known = self._keys.setdefault(key, _Key())
        write = _Write(value)
        known.writes.append(write)

        def delivered(metadata: RecordMetadata | None, error: BaseException | None) -> None:
            if metadata is not None:
                assert metadata.offset is not None
                write.outcome, write.at = "ok", (metadata.partition, metadata.offset)
                self.acknowledged += 1
            else:
                is_unknown = not isinstance(error, RayqError) or error.outcome_unknown
                write.outcome = "unknown" if is_unknown else "failed"

        try:
            future = await producer.send(TOPIC, value, key=key)
        except RayqError as error:
            delivered(None, error)
        else:
            future.call_on_delivery(delivered)

    # --- reading ----------------------------------------------------------------------------------

    async def read_now_and_then(self, client: Client, rng: random.Random, is_on: Any) -> None:
        while is_on():
            await asyncio.sleep(rng.uniform(*READ_AGAIN_S))
            await self.read(client)

    async def read(self, client: Client) -> dict[bytes | None, bytes] | None:
        """Reads all records and judges them. Returns the latest values; None when the reading took
        too long for a verdict."""
        began_s = self._world.now_s
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        try:
            await consumer.assign(PLACES)
            ends = await consumer.end_offsets(PLACES)
            found: dict[bytes | None, bytes | None] = {}
            last: dict[int, int] = {}
            while any([await consumer.position(place) < ends[place] for place in PLACES]):
                for record in await consumer.poll(0.5):
                    self._check_order(record, last)
                    found[record.key] = record.value
        except RayqError:
            return None  # No broker could say where the log ends.
        finally:
            await consumer.close()
        if (self._world.now_s - began_s) * 1000 >= self.delete_retention_ms:
            return None
        self.reads += 1
        for key, known in self._keys.items():
            acknowledged = known.acknowledged_below(ends)
            if not known.may_be(found.get(key), acknowledged):
                self._problems.append(
                    f"{TOPIC}: a reader found {found.get(key)!r} under {key!r}; acknowledged was "
                    f"number {acknowledged}: {known.writes[max(0, acknowledged - 2) :]}; "
                    f"it read from {began_s:.3f} to {self._world.now_s:.3f}, up to {ends}"
                )
        return {key: value for key, value in found.items() if value is not None}

    def _check_order(self, record: Record, last: dict[int, int]) -> None:
        if record.offset <= last.get(record.partition, -1):
            self._problems.append(
                f"{TOPIC}-{record.partition}: a reader got {record.offset} after "
                f"{last[record.partition]}"
            )
        last[record.partition] = record.offset

    async def read_in_the_end(self, client: Client, histories: list[CompactedHistory]) -> None:
        """Once no client writes any more: a reader gets what is committed, key by key."""
        committed: dict[bytes | None, bytes] = {}
        for history in histories:
            committed.update(history.state())
            if repeated := history.repeated():
                self._problems.append(f"{TOPIC}: written more than once: {repeated}")
        for _ in range(READS_MAX):
            found = await self.read(client)
            if found is None:
                continue
            if found != committed:
                differing = {
                    key: (found.get(key), committed.get(key))
                    for key in found.keys() | committed.keys()
                    if found.get(key) != committed.get(key)
                }
                self._problems.append(f"{TOPIC}: read and committed differ: {differing}")
            return
        raise AssertionError(f"{TOPIC} was never read within {self.delete_retention_ms} ms")

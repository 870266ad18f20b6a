"""A topic whose oldest records are removed: by retention_bytes, and by delete_records.

Producers write values that are never the same, operators delete records, and readers read from the
start of the log. Records that are read are those that were sent, in order, each at one offset
forever. A deleted record is never read again. No record is removed that neither retention nor an
operator may remove.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.compacted_topic import new_producer
from proving.simulation.server_view import log_of
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.config import ConsumerConfig
from rayq.errors import DeliveryError, RayqError
from rayq.records import Record, RecordMetadata, TopicPartition

TOPIC = "clicks"
PARTITIONS = 2
PLACES = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
ROUND_S = 0.3
ROUND_RECORDS_MAX = 8
TRIM_S = 1.0
"""About how often an operator deletes records."""
QUESTION_TIMEOUT_S = 6.0
READ_AGAIN_S = (0.5, 5.0)


class TrimmedTopic:
    """See the module."""

    def __init__(
        self, cluster: SimulatedCluster, rng: random.Random, problems: list[str]
    ) -> None:
        self.acknowledged = 0
        self._cluster = cluster
        self._problems = problems
        self._at: dict[tuple[int, int], bytes] = {}
        """The values by partition and offset, as a producer or a reader was told first."""
        self._places: dict[bytes, tuple[int, int]] = {}
        """The place of each value, which is written once."""
        self._failed: set[bytes] = set()
        self._ends: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        """By partition: an offset above every acknowledged record."""
        self._deleted: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        """By partition: the offset below which an operator was told that records are deleted."""
        self._asked: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        """By partition: the offset below which an operator may have deleted records."""
        self.retention_bytes: int | None = rng.choice((None, 2_000, 6_000))
        segment_bytes = rng.choice((1024, 2048))
        # Retention removes whole segments, until the log is no larger than it may be.
        self._kept_bytes_min = (self.retention_bytes or 1 << 62) - segment_bytes
        self.options: dict[str, Any] = {
            "segment_bytes": segment_bytes,
            "index_interval_bytes": rng.choice((256, 4096)),
            "retention_bytes": self.retention_bytes,
        }

    # --- writing ----------------------------------------------------------------------------------

    async def write(
        self, name: str, client: Client, rng: random.Random, is_on: Callable[[], bool]
    ) -> None:
        """Writes while `is_on()`; returns once every record has an outcome."""
        producer = new_producer(client, rng)
        count = 0
        while is_on():
            for _ in range(rng.randint(1, ROUND_RECORDS_MAX)):
                count += 1
                value = b"%s/%d " % (name.encode(), count) + b"." * rng.randint(0, 100)
                try:
                    future = await producer.send(TOPIC, value)
                except RayqError as error:
                    self._delivered(value, None, error)
                else:
                    future.call_on_delivery(partial(self._delivered, value))
            await asyncio.sleep(rng.uniform(0, 2 * ROUND_S))
        with contextlib.suppress(DeliveryError):  # The record's own outcome has the error.
            await producer.close()

    def _delivered(
        self, value: bytes, metadata: RecordMetadata | None, error: BaseException | None
    ) -> None:
        if metadata is not None:
            assert metadata.offset is not None
            self.acknowledged += 1
            self._found(metadata.partition, metadata.offset, value)
            end = max(self._ends[metadata.partition], metadata.offset + 1)
            self._ends[metadata.partition] = end
        elif isinstance(error, RayqError) and not error.outcome_unknown:
            self._failed.add(value)

    def _found(self, partition: int, offset: int, value: bytes) -> None:
        known = self._at.setdefault((partition, offset), value)
        if known != value:
            self._problems.append(
                f"{TOPIC}-{partition}: {known!r} and {value!r} at offset {offset}"
            )
        place = self._places.setdefault(value, (partition, offset))
        if place != (partition, offset):
            self._problems.append(f"{TOPIC}: {value!r} is at {place} and at {(partition, offset)}")

    # --- deleting ---------------------------------------------------------------------------------

    async def trim(self, client: Client, rng: random.Random, is_on: Callable[[], bool]) -> None:
        admin = AsyncAdmin(client)
        while is_on():
            await asyncio.sleep(rng.expovariate(1 / TRIM_S))
            place = rng.choice(PLACES)
            end = self._ends[place.partition]
            if not end:
                continue
            # None stands for all committed records: only the answer says how many they are.
            before = None if rng.random() < 0.1 else rng.randint(0, end)
            asked = 1 << 62 if before is None else before
            self._asked[place.partition] = max(self._asked[place.partition], asked)
            with contextlib.suppress(RayqError):
                starts = await admin.delete_records(
                    {place: before}, timeout_s=rng.choice((0.5, QUESTION_TIMEOUT_S))
                )
                deleted = self._deleted[place.partition]
                self._deleted[place.partition] = max(deleted, starts[place])

    # --- reading ----------------------------------------------------------------------------------

    async def read_now_and_then(
        self, client: Client, rng: random.Random, is_on: Callable[[], bool]
    ) -> None:
        while is_on():
            await asyncio.sleep(rng.uniform(*READ_AGAIN_S))
            with contextlib.suppress(RayqError):  # No broker could say where it ends.
                await self.read(client)

    async def read(self, client: Client) -> None:
        """Reads each partition from its start up to its present end. Raises RayqError."""
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        try:
            deleted = dict(self._deleted)
            await consumer.assign(PLACES)
            await consumer.seek_to_beginning(*PLACES)
            ends = await consumer.end_offsets(PLACES)
            last: dict[int, int] = {}
            while any([await consumer.position(place) < ends[place] for place in PLACES]):
                for record in await consumer.poll(0.5):
                    self._judge(record, last, deleted[record.partition])
        finally:
            await consumer.close()

    def _judge(self, record: Record, last: dict[int, int], deleted: int) -> None:
        where = f"{TOPIC}-{record.partition}"
        assert record.value is not None
        self._found(record.partition, record.offset, record.value)
        if record.offset <= last.get(record.partition, -1):
            self._problems.append(
                f"{where}: a reader got {record.offset} after {last[record.partition]}"
            )
        if record.offset < deleted:
            self._problems.append(
                f"{where}: a reader got {record.offset}; all below {deleted} had been deleted"
            )
        if record.value in self._failed:
            self._problems.append(f"{where}: a reader got {record.value!r}, which had failed")
        last[record.partition] = record.offset

    async def read_in_the_end(self, client: Client) -> None:
        """Once no records are written or deleted any more: a reader gets all that the log must
        have."""
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        await consumer.assign(PLACES)
        ends = await consumer.end_offsets(PLACES)
        found: dict[int, set[int]] = {number: set() for number in range(PARTITIONS)}
        last: dict[int, int] = {}
        while any([await consumer.position(place) < ends[place] for place in PLACES]):
            for record in await consumer.poll(1.0):
                self._judge(record, last, self._deleted[record.partition])
                found[record.partition].add(record.offset)
        # Retention may remove more while the reader reads.
        starts = await consumer.beginning_offsets(PLACES)
        await consumer.close()
        for place in PLACES:
            number = place.partition
            if ends[place] < self._ends[number]:
                self._problems.append(
                    f"{place} ends at {ends[place]}; up to {self._ends[number]} is acknowledged"
                )
            missing = sorted(set(range(starts[place], ends[place])) - found[number])
            if missing:
                self._problems.append(
                    f"{place}: it is from {starts[place]} to {ends[place]}; nobody finds {missing}"
                )
        self._check_what_is_kept()

    def _check_what_is_kept(self) -> None:
        """The log of each replica starts no later than it may."""
        topic_id = self._cluster.topic_id(TOPIC)
        for process, replica in self._cluster.live_replicas():
            log = log_of(replica)
            if replica.assignment.topic_id != topic_id or log is None:
                continue
            asked = self._asked[replica.assignment.partition]
            if log.start_offset > asked and log.size_bytes < self._kept_bytes_min:
                self._problems.append(
                    f"{replica.where} of {process.name} starts at {log.start_offset} and has "
                    f"{log.size_bytes} bytes; retention_bytes is {self.retention_bytes}, and "
                    f"nobody asked to delete more than what is below {asked}"
                )

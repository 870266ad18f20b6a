"""A topic that may be led by a replica that was behind: then what is in the object store stays.

A producer writes values that are never the same. Now and then all replicas but one fail, which had
failed earlier and returns: it leads, and what it lacks is gone, unless it was stored. Whatever the
committed list of objects has had stands there in the end, at its offset, and readers find the log
without a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Callable
from functools import partial

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.compacted_topic import new_producer
from proving.simulation.faults import Faults
from proving.simulation.server_view import replicas_of
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.config import ConsumerConfig
from rayq.core.cluster.records import PartitionValue
from rayq.errors import DeliveryError, RayqError
from rayq.records import RecordMetadata, TopicPartition

TOPIC = "loose"
PLACE = TopicPartition(TOPIC, 0)
ROUND_S = 0.2
ROUND_RECORDS_MAX = 5
STEP_LIMIT_S = 15.0


class UncleanTopic:
    """See the module."""

    def __init__(self, cluster: SimulatedCluster, problems: list[str]) -> None:
        self.acknowledged = 0
        self._cluster = cluster
        self._problems = problems

    async def write(
        self, name: str, client: Client, rng: random.Random, is_on: Callable[[], bool]
    ) -> None:
        producer = new_producer(client, rng)
        count = 0
        while is_on():
            for _ in range(rng.randint(1, ROUND_RECORDS_MAX)):
                count += 1
                value = b"%s/%d " % (name.encode(), count) + b"." * rng.randint(0, 100)
                with contextlib.suppress(RayqError):
                    future = await producer.send(TOPIC, value)
                    future.call_on_delivery(partial(self._delivered, value))
            await asyncio.sleep(rng.uniform(0, 2 * ROUND_S))
        with contextlib.suppress(DeliveryError):
            await producer.close()

    def _delivered(
        self, value: bytes, metadata: RecordMetadata | None, error: BaseException | None
    ) -> None:
        self.acknowledged += metadata is not None

    async def read_in_the_end(self, client: Client, stored: dict[int, bytes]) -> None:
        """`stored` are the values, by offset, that the committed list has had."""
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        await consumer.assign([PLACE])
        await consumer.seek_to_beginning(PLACE)
        start = (await consumer.beginning_offsets([PLACE]))[PLACE]
        end = (await consumer.end_offsets([PLACE]))[PLACE]
        found: dict[int, bytes] = {}
        while await consumer.position(PLACE) < end:
            for record in await consumer.poll(1.0):
                assert record.value is not None
                found[record.offset] = record.value
        await consumer.close()
        gone = sorted(offset for offset in range(start, end) if offset not in found)
        if start or gone:
            self._problems.append(f"{PLACE} is from {start} to {end}; nobody finds {gone[:20]}")
        wrong = [offset for offset, value in stored.items() if found.get(offset) != value]
        if wrong:
            self._problems.append(
                f"{PLACE}: {stored[wrong[0]]!r} was stored at {wrong[0]}; there is "
                f"{found.get(wrong[0])!r} now; {len(wrong)} such offsets"
            )
        if len(set(found.values())) < len(found):
            self._problems.append(f"{PLACE}: a value stands there twice")


async def elect_uncleanly(
    place: TopicPartition, faults: Faults, *, kills: bool = False
) -> None:
    """A replica stops at a disk error, and the others continue. Then they stop too, and it returns.
    Where the topic allows no unclean election somebody else has to ask for it.

    The others stop at a write, too; so a leader that may not write any more, since too few are in
    sync, continues, and no election comes. Where it `kills` their processes it comes for sure."""
    cluster, rng = faults.cluster, faults.rng
    value = value_of(cluster, place)
    if value is None or value.leader is None or len(value.isr) < 2:
        return
    behind = rng.choice([broker.broker for broker in value.isr if broker.broker != value.leader])
    faults.begin(f"broker {behind}, which is behind, will lead {place}")
    disk = cluster.hosts[behind].disk
    failing = disk.fail("write", path_part=f"/{place.topic}-", error=errno.EIO)
    faults.disk_faults.append(failing)
    try:
        is_out = await _until(
            faults, place, lambda now: behind not in [broker.broker for broker in now.isr]
        )
        if not is_out:
            return
        await faults.last(0.2, 5.0)
        failing.heal()
        others = [replica for replica in value.replicas if replica != behind]
        operations = ("write", "open") if kills else ("write",)
        rest = [
            cluster.hosts[broker].disk.fail(
                *operations, path_part=f"/{place.topic}-", error=errno.EIO
            )
            for broker in others
        ]
        faults.disk_faults += rest
        if kills:
            for broker in others:
                _kill_replica(place, cluster, broker)
        # It leads at once where another fault has started it again meanwhile.
        led_by = (None, behind) if kills else (None,)
        await _until(faults, place, lambda now: now.leader in led_by)
        await faults.crash_host(behind)
        faults.ensure_broker(behind)
        await _until(faults, place, lambda now: now.leader == behind)
        await faults.last(0.0, 3.0)
    finally:
        for fault in faults.disk_faults:
            fault.heal()
        for number in range(len(cluster.hosts)):
            if faults.has_failed_replicas(number):
                await faults.crash_host(number)
            faults.ensure_broker(number)


def _kill_replica(place: TopicPartition, cluster: SimulatedCluster, broker: int) -> None:
    for process in cluster.replica_processes(broker):
        host = cluster.replica_hosts.get(process)
        if host is not None and any(
            (replica.assignment.topic, replica.assignment.partition) == place
            for replica in replicas_of(host).values()
        ):
            process.kill()


def value_of(cluster: SimulatedCluster, place: TopicPartition) -> PartitionValue | None:
    """The newest metadata of a partition that any broker has. None where there is none."""
    newest = max(cluster.brokers.values(), key=lambda broker: broker.metadata.version)
    state = newest.metadata.state
    if place.topic not in state.topic_ids:
        return None
    found = state.topics[state.topic_ids[place.topic]].partitions.get(place.partition)
    return None if found is None else found.value


async def _until(
    faults: Faults, place: TopicPartition, holds: Callable[[PartitionValue], bool]
) -> bool:
    """Returns whether it came to that in time."""
    until_s = faults.world.now_s + STEP_LIMIT_S
    while faults.world.now_s < until_s:
        value = value_of(faults.cluster, place)
        if value is not None and holds(value):
            return True
        await asyncio.sleep(0.05)
    return False

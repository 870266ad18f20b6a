"""A queue from which something is taken away: records of its topic, or what it knows of them.

A seed draws what: unclean elections of the topic's partition, records that an operator deletes,
purges, or the queue itself, which is deleted and created again while its consumers work. Or the
topic keeps next to nothing but what the queue holds back, or deletes what it has settled. In the
end each record that is still there was handled in some state epoch, or is a dead letter; within a
state epoch all promises hold (`rayq.testing.checker.queues`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.compacted_topic import new_producer
from proving.simulation.faults import Faults, Injection
from proving.simulation.new_topic import create_topic
from proving.simulation.queue_workers import QueuePlan
from proving.simulation.server_view import replica_log_of
from proving.simulation.unclean_topic import elect_uncleanly
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    QueueChanged,
    QueueDeleted,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import DeliveryError, RayqError
from rayq.messages import (
    AlterQueue,
    CreateQueue,
    DeleteQueue,
    DescribeQueueResponse,
    DescribeQueues,
)
from rayq.records import TopicPartition
from rayq.storage.log import Log
from rayq.testing.checker import Recorder

NAME = TOPIC = "loose"
PLACE = TopicPartition(TOPIC, 0)
RETENTIONS = ("hold", "delete_done")
TREATMENTS = ("unclean", "unclean", "delete records", "purge", "create again", *RETENTIONS)
ROUND_S = 0.3
ROUND_RECORDS_MAX = 6
TREATED_S = (0.5, 4.0)
OPERATOR_TIMEOUT_S = 8.0
UNCLEAN_WEIGHT = 12
"""The weight of unclean elections among the faults."""

Describe = Callable[[], Awaitable[DescribeQueueResponse | None]]


class LooseQueue:
    """See the module. `queue_id` is that of the newest one of this name."""

    def __init__(
        self, cluster: SimulatedCluster, rng: random.Random, recorder: Recorder
    ) -> None:
        self.treatment = rng.choice(TREATMENTS)
        self.plan = QueuePlan(NAME, TOPIC, rng.choice((1.0, 2.0)), False, is_loose=True)
        self.queue_id = ""
        self._queue_ids: set[str] = set()
        """The ids of all queues of this name that were ever created."""
        self._cluster = cluster
        self._recorder = recorder
        self._deliveries = rng.choice((3, 1000))
        self._unclean_epochs: set[int] = set()
        self._cut_at = 1 << 62
        self._is_electing = False

    @property
    def faults(self) -> tuple[Injection, ...]:
        if self.treatment != "unclean":
            return ()
        return (self._elect_uncleanly,) * UNCLEAN_WEIGHT

    async def _elect_uncleanly(self, faults: Faults) -> None:
        if self._is_electing:
            return  # Two at once seldom take anything away.
        self._is_electing = True
        try:
            await elect_uncleanly(PLACE, faults, kills=True)
        finally:
            self._is_electing = False

    # --- the beginning ----------------------------------------------------------------------------

    async def create(self, client: Client, topic_options: dict[str, object]) -> None:
        options = dict(topic_options)
        options["unclean_leader_election"] = self.treatment == "unclean"
        if self.treatment in RETENTIONS:
            options |= {"retention_bytes": 1_000, "segment_bytes": 1_024}
        await create_topic(client, TOPIC, 1, **options)
        await self._make(client, 60.0)
        kept = AlterQueue(request_id="-", name=f"{NAME}.dead", config={"retention": "topic"})
        await client.change(kept, timeout_s=60.0)

    async def _make(self, client: Client, timeout_s: float) -> None:
        holds = self.treatment in RETENTIONS
        change = CreateQueue(
            request_id="-",
            name=NAME,
            topic=TOPIC,
            config={
                "retention": self.treatment if holds else "topic",
                "visibility_timeout_s": self.plan.timeout_s,
                "max_handling_s": 6.0,
                "max_deliveries": self._deliveries,
                "backoff_s": 0.2,
                "backoff_max_s": 2.0,
            },
        )
        with contextlib.suppress(RayqError):  # It may be there: an answer was lost.
            await client.change(change, timeout_s=timeout_s)
        while True:
            answer = await client.ask_any(DescribeQueues(), timeout_s=timeout_s)
            found = [queue.queue_id for queue in answer.queues if queue.name == NAME]
            if found and found[0] != self.queue_id:
                break
            await asyncio.sleep(0.2)
            with contextlib.suppress(RayqError):
                await client.change(change, timeout_s=timeout_s)
        self.queue_id = found[0]

    def heard(self, state: ClusterState, record: MetadataRecord) -> None:
        """Takes each committed record of the metadata."""
        match record:
            case QueueChanged(name=name, queue_id=queue_id) if name == NAME:
                if queue_id not in self._queue_ids:
                    self._queue_ids.add(queue_id)
                    self._note_opened(queue_id)
            case QueueDeleted(queue_id=queue_id) if queue_id in self._queue_ids:
                self._recorder.queue_closed(self.plan.noted_as(queue_id))
            case PartitionChanged(topic_id=topic_id) if topic_id == state.topic_ids.get(TOPIC):
                self._note_unclean(record)
            case _:
                pass

    def _note_opened(self, queue_id: str) -> None:
        self._recorder.queue_opened(
            self.plan.noted_as(queue_id),
            TOPIC,
            dead_letters=f"{NAME}.dead",
            timeout_s=self.plan.timeout_s,
            is_own=True,
            is_loose=True,
            holds=self.treatment in RETENTIONS,
        )

    def _note_unclean(self, record: PartitionChanged) -> None:
        epoch = record.value.last_unclean_epoch
        if epoch is None:
            return
        if epoch not in self._unclean_epochs:
            # A later one may bring back older records at these offsets: the log does not tell then.
            leader = record.value.leader
            ends = [log.end_offset for broker, log in self._logs() if broker == leader]
            self._cut_at = min([self._cut_at, *ends])
        self._unclean_epochs.add(epoch)

    # --- while it runs ----------------------------------------------------------------------------

    async def write(
        self, name: str, client: Client, rng: random.Random, is_on: Callable[[], bool]
    ) -> None:
        """Puts records whose values are never the same."""
        recorder = self._recorder
        recorder.opened(name)
        producer = new_producer(client, rng)
        count = 0
        while is_on():
            for _ in range(rng.randint(1, ROUND_RECORDS_MAX)):
                count += 1
                value = b"%s/%d" % (name.encode(), count)
                number = recorder.sending(name, TOPIC, None, value)
                try:
                    future = await producer.send(TOPIC, value)
                except RayqError as error:
                    recorder.not_delivered(name, number, error)
                else:
                    future.call_on_delivery(partial(recorder.outcome, name, number))
            await asyncio.sleep(rng.uniform(0, 2 * ROUND_S))
        with contextlib.suppress(DeliveryError):
            await producer.close()

    async def treat(
        self, client: Client, rng: random.Random, is_on: Callable[[], bool], describe: Describe
    ) -> None:
        """Takes something away, now and then."""
        treatments = {
            "delete records": self._delete_records,
            "purge": self._purge,
            "create again": self._make_again,
        }
        treat = treatments.get(self.treatment)
        while treat is not None and is_on():
            await asyncio.sleep(rng.uniform(*TREATED_S))
            self._cluster.world.trace.note(f"LOOSE {self.treatment}")
            with contextlib.suppress(RayqError):
                await treat(client, rng, describe)

    async def _delete_records(
        self, client: Client, rng: random.Random, describe: Describe
    ) -> None:
        found = await describe()
        if found is not None:
            offset = rng.randint(found.start_offset, found.end_offset)
            await AsyncAdmin(client).delete_records({PLACE: offset}, timeout_s=OPERATOR_TIMEOUT_S)

    async def _purge(self, client: Client, rng: random.Random, describe: Describe) -> None:
        before = await describe()
        if before is not None:
            await AsyncAdmin(client).purge_queue(NAME, timeout_s=OPERATOR_TIMEOUT_S)
            self._recorder.purged(
                self.plan.noted_as(self.queue_id),
                0,
                before.end_offset,
                at_s=self._cluster.world.now_s,
            )

    async def _make_again(self, client: Client, rng: random.Random, describe: Describe) -> None:
        await client.change(DeleteQueue(request_id="-", name=NAME), timeout_s=60.0)
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.5)))
        await self._make(client, 60.0)

    # --- the end ----------------------------------------------------------------------------------

    async def calm_down(self, describe: Describe) -> None:
        """Once the cluster is whole and nobody treats it any more: what comes later has to be
        handled."""
        if self.treatment != "purge":
            return
        found = None
        while found is None:
            await asyncio.sleep(0.2)
            found = await describe()
        self._recorder.purged(
            self.plan.noted_as(self.queue_id),
            0,
            found.end_offset,
            at_s=self._cluster.world.now_s,
            is_sure=False,
        )

    def note_cuts(self) -> None:
        """Notes where unclean elections have cut the log at most: there their epochs begin."""
        if self._unclean_epochs:
            first = min(self._unclean_epochs)
            for _, log in self._logs():
                later = [start for epoch, start in log.epochs.entries() if epoch >= first]
                self._cut_at = min([self._cut_at, log.end_offset, *later])
        self._recorder.cut(TOPIC, 0, self._cut_at)

    def _logs(self) -> list[tuple[int, Log]]:
        """The broker of each replica whose log is open, and that log."""
        found = [
            replica_log_of(replica)
            for _, replica in self._cluster.live_replicas()
            if replica.assignment.topic == TOPIC
        ]
        return [(held.broker, held.log) for held in found if held.is_open]

"""Queues over two topics, their consumers, and operators that redrive dead letters.

The ordinary producers write `orders`, which two queues read: `plain`, and `by-key`, whose records
of one key are handled in order. `later` is a topic of a queue alone; most of its records are
delayed. Each queue has consumers, one life after the other: they are killed, hang, are cut off,
and handle records badly, by single messages (`queue_workers`) or rayq's own client
(`queue_tasks`). Operators move dead letters back (`redrives`), those of `later` to `later`, the
others to `again`; they are killed half-way as well. In the end every queue has to be settled, and
the checker judges what the consumers saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from proving.simulation import queue_bounds
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import SYNC_S
from proving.simulation.faults import Injection
from proving.simulation.faults_aimed import OF_QUEUES
from proving.simulation.faults_groups import WITH_GROUPS
from proving.simulation.faults_queues import MoveFaults
from proving.simulation.gone_holders import LOOK_S as HOLDERS_LOOK_S
from proving.simulation.gone_holders import GoneHolders
from proving.simulation.invariants import Invariants
from proving.simulation.invariants_queues import QueueInvariants
from proving.simulation.loose_queue import TOPIC as LOOSE
from proving.simulation.loose_queue import LooseQueue
from proving.simulation.new_topic import create_topic
from proving.simulation.owner import Owner
from proving.simulation.principals import Rights, may
from proving.simulation.process import Process
from proving.simulation.queue_lives import Lives
from proving.simulation.queue_tasks import TaskWorker
from proving.simulation.queue_workers import QueuePlan, RawWorker
from proving.simulation.redrives import Redrives
from proving.simulation.server_view import queue_leaders_of
from proving.simulation.unclean_keeper import UncleanKeeper
from proving.simulation.workload import Workload
from proving.simulation.world import START_WALL_MS
from rayq.actors.queues.leader import QueueLeader
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.core.cluster.topic_changes import QUEUES_TOPIC
from rayq.errors import DeliveryError, RayqError
from rayq.messages import (
    AlterQueue,
    ConfigOptions,
    CreateQueue,
    DescribeQueue,
    DescribeQueueResponse,
    DescribeQueues,
    Request,
)
from rayq.records import Record, TopicPartition
from rayq.storage.batch import due_header

ORDERS, LATER, AGAIN = "orders", "later", "again"
PARTITIONS = 2
PRODUCERS = 2
WORKERS = {"plain": 2, "by-key": 2, "later": 1, LOOSE: 2}
REDRIVERS = 2
END_LIMIT_S = 90.0
LOOK_S = 0.7
IDLE_MAX_S = 5.0
"""Maximum time that a record may be ready beside a take that waits, once the cluster is whole."""
FULL_MAX_S = 15.0
"""The same where as many are locked as may be: whoever has them may have died just then, and locks
last for some seconds."""
CALM_S = 15.0
"""After the last fault, so long records may be ready and not be given out."""
ALTERS_SHARE, WEIGHTS_SHARE, LARGE_SHARE, LOOSE_SHARE = 0.25, 0.25, 0.25, 0.5
"""Share of the seeds that have each of these."""
UNCLEAN_KEEPER_SHARE = 0.2
LARGE_BYTES = 600
"""`max_message_bytes` of a topic with large values."""
LARGE_VALUES = 0.2


class QueueWorkload(Workload):
    """See the module."""

    topics = (ORDERS,)
    topics_on_disk: tuple[str, ...] = (ORDERS, LATER, "plain.dead", QUEUES_TOPIC)
    more_faults: Sequence[Injection] = (*WITH_GROUPS, *OF_QUEUES)
    lasts_s = 24.0
    heals_at_s = 18.0
    records_min = 300
    syncs_s = (SYNC_S, (0.002, 0.03), (0.005, 0.1))

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        rng = cluster.world.new_random("queues")
        self.plans = {
            name: QueuePlan(name, topic, rng.choice((1.0, 2.0, 4.0)), name == "by-key")
            for name, topic in (("plain", ORDERS), ("by-key", ORDERS), ("later", LATER))
        }
        self.has_alters = rng.random() < ALTERS_SHARE
        self.has_weights = rng.random() < WEIGHTS_SHARE
        self.has_large_values = rng.random() < LARGE_SHARE
        self.loose = None
        if rng.random() < LOOSE_SHARE:
            # A run has its cost: these kinds of queues are enough.
            del self.plans[rng.choice(("plain", "by-key"))]
            self.loose = LooseQueue(cluster, rng, self.recorder)
            self.more_faults = (*self.more_faults, *self.loose.faults)
        self.keeper = None
        if rng.random() < UNCLEAN_KEEPER_SHARE:
            self.keeper = UncleanKeeper(cluster, rng, self.recorder)
            self.more_faults = (*self.more_faults, *self.keeper.faults)
        self.invariants = QueueInvariants()
        if self.keeper is None:
            self.invariants.moved_to = frozenset({AGAIN, *(f"{name}.dead" for name in self.plans)})
        self._gone_holders = GoneHolders(self.problems)
        self._move_faults = MoveFaults(cluster, cluster.world.new_random("move faults"))
        self.invariants.on_move = self._move_faults.noted
        self._queue_ids: dict[str, str] = {}
        self._is_wild = True
        self._is_working = True
        self._is_moving = True
        self._calm_since_s = 0.0
        self._lives = Lives(cluster, self.hosts, self.recorder)
        self._redrives = Redrives(self.plans, self.invariants, own=LATER, aside=AGAIN)

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "queue_state_partitions": rng.choice((1, 2)),
            "compaction_check_interval_ms": rng.choice((1_000, 3_000)),
            "retention_check_interval_ms": rng.choice((200, 2_000)),
        }

    @classmethod
    def conditions(cls, seed: int) -> AbstractContextManager[None]:
        return queue_bounds.lowered(seed)

    def rights(self) -> Rights:
        plans = [*self.plans.values(), *([] if self.loose is None else [self.loose.plan])]
        queues = [plan.name for plan in plans]
        topics = sorted({plan.topic for plan in plans})
        dead = [f"{name}.dead" for name in queues]
        describe = [*may("describe", "queue", *queues), *may("describe", "topic", *topics)]
        return {
            **super().rights(),
            "watcher": describe,
            "settled-watcher": describe,
            "delayer": may("write", "topic", LATER),
            "loose-writer": may("write", "topic", LOOSE),
            "alterer": may("alter", "queue", *queues),
            "|".join(f"worker-{name}" for name in queues): [
                *may("read", "queue", *queues),
                *may("read", "topic", *topics),
            ],
            "redriver": [
                *may("alter", "queue", *queues),
                *may("read", "queue", *queues),
                *may("read", "topic", *topics, *dead),
                *may("write", "topic", *topics, *dead, AGAIN),
            ],
            "final-queue-reader": may("read", "topic", *topics, *dead, AGAIN, LATER),
        }

    def observer(self, invariants: Invariants) -> Callable[[Owner], None]:
        invariants.on_committed = self.invariants.committed
        unclean = []
        if self.loose is not None:
            invariants.on_record = self.loose.heard
            unclean.append(LOOSE)
        if self.keeper is not None:
            unclean.append(QUEUES_TOPIC)
        invariants.unclean_topics = frozenset(unclean)
        return invariants.observe

    def judging(self) -> AbstractContextManager[None]:
        return self._gone_holders.judging()

    def partition_count(self, topic: str) -> int:
        """The number of partitions that a topic has now."""
        return 1 if topic == LOOSE else PARTITIONS

    @property
    def places(self) -> list[TopicPartition]:
        return [
            TopicPartition(ORDERS, partition) for partition in range(self.partition_count(ORDERS))
        ]

    # --- the beginning ----------------------------------------------------------------------------

    async def create_topics(self) -> None:
        await super().create_topics()
        process = self._process("queues-admin")
        rng = self._rng

        async def create() -> None:
            client = self._client(process)
            await create_topic(client, AGAIN, 1, **self.topic_options)
            later = dict(self.topic_options)
            if self.has_large_values:
                later["max_message_bytes"] = LARGE_BYTES
            await create_topic(client, LATER, PARTITIONS, **later)
            for plan in self.plans.values():
                change = CreateQueue(
                    request_id="-",
                    name=plan.name,
                    topic=plan.topic,
                    config={
                        "visibility_timeout_s": plan.timeout_s,
                        "max_handling_s": 6.0,
                        "max_deliveries": rng.choice((2, 3, 5)),
                        "backoff_s": rng.choice((0.0, 0.2, 1.0)),
                        "backoff_max_s": 2.0,
                        "ordered_by_key": plan.ordered,
                    },
                )
                await client.change(change, timeout_s=END_LIMIT_S)
                self.recorder.queue_opened(
                    plan.name,
                    plan.topic,
                    dead_letters=f"{plan.name}.dead",
                    timeout_s=plan.timeout_s,
                    ordered_by_key=plan.ordered,
                    is_own=plan.topic == LATER,
                )
                # In the end the dead letters are counted, also those that were redriven.
                kept = AlterQueue(
                    request_id="-", name=f"{plan.name}.dead", config={"retention": "topic"}
                )
                await client.change(kept, timeout_s=END_LIMIT_S)
            if self.loose is not None:
                await self.loose.create(client, self.topic_options)
            names = {*self.plans, *(f"{name}.dead" for name in self.plans)}
            while not names <= self._queue_ids.keys():
                answer = await client.ask_any(DescribeQueues(), timeout_s=END_LIMIT_S)
                self._queue_ids = {queue.name: queue.queue_id for queue in answer.queues}
            self._redrives.queue_ids = self._queue_ids
            if self.keeper is None:
                self.invariants.sure_moves = frozenset(self._queue_ids[name] for name in names)
            client.close()

        await process.run(create())

    def start(self) -> None:
        self._clocks = asyncio.create_task(self._watch_clocks())
        self._striking = asyncio.create_task(self._move_faults.run())
        for number in range(PRODUCERS):
            self._start(f"producer-{number}", self._produce)
        self._start("delayer", self._put_later)
        self._start("watcher", self._watch_queues)
        plans = [*self.plans.values()]
        if self.loose is not None:
            plans.append(self.loose.plan)
            self._start("loose-writer", self._put_loosely)
            self._start("loose-operator", self._treat_loosely)
        for plan in plans:
            for number in range(WORKERS[plan.name]):
                slot = f"worker-{plan.name}-{number}"
                self._lives.fill(slot, partial(self._work, plan), lambda: self._is_working)
        if self.keeper is not None:
            self._start("elector", self._elect)
        if self.has_alters:
            self._start("alterer", self._alter)
        for number in range(REDRIVERS):
            slot = f"redriver-{number}"
            self._lives.fill(slot, self._redrive, lambda: self._is_moving)

    def calm_down(self) -> None:
        self._is_wild = self._lives.is_wild = False
        self._striking.cancel()
        self._calm_since_s = self._cluster.world.now_s

    async def stop_sending(self) -> None:
        await super().stop_sending()
        await self._end("delayer")
        await self._end("loose")
        await self._end("alterer")
        await self._end("elector")
        self._is_moving = False

    # --- the end ----------------------------------------------------------------------------------

    async def read_all(self, limit_s: float) -> int:
        """Before that, each queue has to settle everything."""
        await self._wait_for_all_settled()
        self._is_working = False
        await self._lives.end(END_LIMIT_S)
        await self._end("watcher")
        await self._clocks
        count = await super().read_all(limit_s)
        await self._read_own_topics(limit_s)
        return count

    async def _wait_for_all_settled(self) -> None:
        process, world = self._process("settled-watcher"), self._cluster.world

        async def wait_for(client: Client, plan: QueuePlan, number: int) -> None:
            """Returns whether few records may be locked at once, so that all of it may take
            long."""
            until_s = world.now_s + END_LIMIT_S
            seen: tuple[int, int] | None = None
            while True:
                found = await self._describe(client, plan, number)
                if found is not None and _is_settled(found):
                    return
                if found is not None and (found.start_offset, found.done) != seen:
                    until_s, seen = world.now_s + END_LIMIT_S, (found.start_offset, found.done)
                assert world.now_s < until_s, (
                    f"{plan.name} of {plan.topic}-{number} settles nothing more: {found}"
                )
                await asyncio.sleep(0.3)

        async def wait() -> None:
            client = self._client(process)
            plans = [*self.plans.values()]
            plans += [] if self.loose is None else [self.loose.plan]
            for plan in plans:
                for number in range(self.partition_count(plan.topic)):
                    await wait_for(client, plan, number)
            client.close()

        await process.run(wait())

    async def _read_own_topics(self, limit_s: float) -> None:
        """Returns the records of the topics that only queues read, and of those of dead letters."""
        dead = [f"{name}.dead" for name in self.plans]
        places = [
            *(TopicPartition(LATER, number) for number in range(self.partition_count(LATER))),
            *(TopicPartition(topic, 0) for topic in (AGAIN, *dead)),
        ]
        if self.loose is not None:
            self.loose.note_cuts()
            places += [TopicPartition(topic, 0) for topic in (LOOSE, f"{LOOSE}.dead")]
        process, world = self._process("final-queue-reader"), self._cluster.world

        async def read() -> list[Record]:
            client = self._client(process)
            consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
            await consumer.assign(places)
            ends = await consumer.end_offsets(places)
            deadline_s = world.now_s + limit_s
            records: list[Record] = []
            while any([await consumer.position(place) < ends[place] for place in places]):
                assert world.now_s < deadline_s, "the final read of the queues takes too long"
                records += await consumer.poll(1.0)
            await consumer.close()
            client.close()
            return records

        before = self._redrives.kept() if self.keeper is None else {}
        records = await process.run(read())
        self.recorder.found(records)
        if self.keeper is None:
            self.problems += self._redrives.problems(records, before, self._redrives.kept())

    # --- clients ----------------------------------------------------------------------------------

    async def _work(
        self, plan: QueuePlan, name: str, process: Process, rng: random.Random
    ) -> None:
        client, recorder = self._client(process), self.recorder

        def now_s() -> float:
            return self._cluster.world.now_s

        worker: RawWorker | TaskWorker
        has_large_values = self.has_large_values and plan.topic == LATER
        if rng.random() < 0.5 and not has_large_values:
            queue_id = partial(self._queue_id, plan)
            count = partial(self.partition_count, plan.topic)
            worker = RawWorker(
                name, client, rng, plan, queue_id, count, recorder, now_s, self.problems
            )
        else:
            plans = [plan]
            if self.has_weights and not plan.is_loose:
                plans = rng.sample([*self.plans.values()], len(self.plans))
            worker = TaskWorker(name, client, rng, plans, recorder, now_s, self.problems)
        await worker.work(lambda: self._is_working, lambda: self._is_wild)
        client.close()

    async def _put_later(self, name: str, process: Process, rng: random.Random) -> None:
        recorder, world = self.recorder, self._cluster.world
        recorder.opened(name)
        self.acknowledged_by[name] = 0
        client = self._client(process)
        large = "chunks" if self.has_large_values else None
        config = ProducerConfig(linger_ms=rng.choice((0, 20)), large_values=large)
        producer = AsyncProducer(client, config)
        count = 0
        while self._is_sending:
            for _ in range(rng.randint(1, 5)):
                count += 1
                value = b"%s/%d" % (name.encode(), count)
                if self.has_large_values and rng.random() < LARGE_VALUES:
                    value = value.ljust(rng.randint(LARGE_BYTES // 2, 4 * LARGE_BYTES), b".")
                headers = []
                if rng.random() < 0.7:
                    due_s = world.now_s + rng.uniform(0.1, 6.0)
                    headers = [due_header(START_WALL_MS + round(due_s * 1000))]
                    recorder.delayed(value, round(due_s * 1000) / 1000)
                number = recorder.sending(name, LATER, None, value)
                try:
                    future = await producer.send(
                        LATER,
                        value,
                        headers=headers,
                        partition=rng.randrange(self.partition_count(LATER)),
                    )
                except RayqError as error:
                    recorder.not_delivered(name, number, error)
                else:
                    future.call_on_delivery(partial(self._note_delivery, name, number))
            await asyncio.sleep(rng.uniform(0, 1.0))
        with contextlib.suppress(DeliveryError):
            await producer.close()
        client.close()

    async def _put_loosely(self, name: str, process: Process, rng: random.Random) -> None:
        assert self.loose is not None
        client = self._client(process)
        await self.loose.write(name, client, rng, lambda: self._is_sending)
        client.close()

    async def _treat_loosely(self, name: str, process: Process, rng: random.Random) -> None:
        assert self.loose is not None
        client, plan = self._client(process), self.loose.plan
        describe = partial(self._describe, client, plan, 0)
        await self.loose.treat(client, rng, lambda: self._is_wild, describe)
        await self._cluster.wait_until(
            lambda: not self._is_wild and self._cluster.is_whole(), "the calm", limit_s=600.0
        )
        await self.loose.calm_down(describe)
        client.close()

    async def _elect(self, name: str, process: Process, rng: random.Random) -> None:
        assert self.keeper is not None
        client = self._client(process)
        await self.keeper.operate(client, lambda: self._is_wild)
        client.close()

    async def _alter(self, name: str, process: Process, rng: random.Random) -> None:
        """Configs change, while locks, delays and moves last."""
        client = self._client(process)
        while self._is_wild:
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            plan = rng.choice([*self.plans.values()])
            changes: ConfigOptions = {
                "visibility_timeout_s": plan.timeout_s * rng.choice((1.0, 1.5)),
                "max_deliveries": rng.choice((2, 3, 5)),
                "backoff_s": rng.choice((0.0, 0.2, 1.0)),
            }
            with contextlib.suppress(RayqError):
                await client.change(
                    AlterQueue(request_id="-", name=plan.name, config=changes), timeout_s=8.0
                )
        client.close()

    async def _redrive(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        while self._is_moving:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            with contextlib.suppress(RayqError):
                await self._redrives.redrive_some(client, rng)
        client.close()

    # --- watching ---------------------------------------------------------------------------------

    async def _watch_queues(self, name: str, process: Process, rng: random.Random) -> None:
        """The start of a queue never goes back, and nothing lies ready beside a waiting take."""
        client, world = self._client(process), self._cluster.world

        async def watch(plan: QueuePlan, number: int) -> None:
            start = 0
            idle: tuple[int, int, int] | None = None
            idle_since_s = 0.0
            while self._is_working:
                found = await self._describe(client, plan, number)
                if found is not None:
                    where = f"{plan.name} of {plan.topic}-{number}"
                    if found.start_offset < start and self.keeper is None:
                        self.problems.append(
                            f"{where}: its start goes back from {start} to {found.start_offset}"
                        )
                    start = found.start_offset
                    is_idle = bool(found.ready and found.waiting_takes)
                    state = (found.start_offset, found.done, found.locked)
                    if not is_idle or self._is_wild or state != idle:
                        idle, idle_since_s = state, world.now_s
                    since_s = max(idle_since_s, self._calm_since_s + CALM_S)
                    limit_s = IDLE_MAX_S if found.trouble is None else FULL_MAX_S
                    if world.now_s - since_s > limit_s:
                        self.problems.append(f"{where}: nobody gets what is ready: {found}")
                        return
                await asyncio.sleep(rng.uniform(0, 2 * LOOK_S))

        async def compare() -> None:
            while self._is_working:
                await asyncio.sleep(rng.uniform(0, 2 * LOOK_S))
                for _, leader in self._leaders():
                    self.invariants.check_live(leader)

        await asyncio.gather(
            compare(),
            *(
                watch(plan, partition)
                for plan in self.plans.values()
                for partition in range(PARTITIONS)
            ),
        )
        client.close()

    async def _watch_clocks(self) -> None:
        """A server that begins while the clock of its host is ahead cannot know it. Beside that,
        the locks of consumers that are gone."""
        known: set[Process] = set()
        doubtful: set[Process] = set()
        while self._is_working:
            for process in self._cluster.replica_hosts.keys() - known:
                known.add(process)
                if process.alive and self._is_ahead(process):
                    doubtful.add(process)
                    self.recorder.clock_in_doubt()
            for process in [
                place for place in doubtful if not (place.alive and self._is_ahead(place))
            ]:
                doubtful.remove(process)
                self.recorder.clock_in_doubt(is_over=True)
            self._gone_holders.look(self._leaders())
            await asyncio.sleep(HOLDERS_LOOK_S)

    def _is_ahead(self, process: Process) -> bool:
        return any(host.clock_offset_ms > 0 for host in self._cluster.hosts if host is process.host)

    def _leaders(self) -> Iterator[tuple[Process, QueueLeader]]:
        """The leaders of all queues in live processes, each with its process."""
        for process, replica in self._cluster.live_replicas():
            for leader in queue_leaders_of(replica):
                yield process, leader

    def _queue_id(self, plan: QueuePlan) -> str:
        if plan.is_loose:
            assert self.loose is not None
            return self.loose.queue_id
        return self._queue_ids[plan.name]

    async def _describe(
        self, client: Client, plan: QueuePlan, partition: int
    ) -> DescribeQueueResponse | None:
        """None: its leader does not answer."""

        def build(topic_id: str, leader: LeaderAndEpoch) -> Request[DescribeQueueResponse]:
            return DescribeQueue(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader.epoch,
                queue_id=self._queue_id(plan),
            )

        try:
            return await client.ask_leader(
                plan.topic, partition, build, timeout_s=4.0, attempt_timeout_s=2.0
            )
        except RayqError:
            return None


def _is_settled(found: DescribeQueueResponse) -> bool:
    return found.start_offset == found.end_offset and not (
        found.ready or found.blocked or found.locked or found.delayed or found.moving
    )

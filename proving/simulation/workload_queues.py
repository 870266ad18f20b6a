"""Queues over two topics, their consumers, and operators that redrive dead letters.

The ordinary producers write `orders`, which two queues read: `plain`, and `by-key`, whose records
of one key are handled in order. `later` is a topic of a queue alone; most of its records are
delayed. Each queue has consumers, one life after the other: they are killed, hang, are cut off,
and handle records badly, by single messages (`queue_workers`) or rayq's own client
(`queue_tasks`). Operators move dead letters back, those of `later` to
`later`, the others to `again`; they are killed half-way as well. In the end every queue has to be
settled, and the checker judges what the consumers saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import SYNC_S
from proving.simulation.faults import WITH_GROUPS, Injection
from proving.simulation.faults_queues import MoveFaults
from proving.simulation.invariants import Invariants
from proving.simulation.invariants_queues import QueueInvariants, is_done
from proving.simulation.owner import Owner
from proving.simulation.process import Process
from proving.simulation.queue_tasks import TaskWorker
from proving.simulation.queue_workers import QueuePlan, RawWorker
from proving.simulation.workload import Workload
from proving.simulation.world import START_WALL_MS, Host
from rayq.actors.queues.queue_leader import QueueLeader
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.consuming.consumer import AsyncConsumer
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.core.queue_records import Kept
from rayq.core.topic_changes import QUEUES_TOPIC
from rayq.errors import DeliveryError, RayqError
from rayq.records import Record, TopicPartition
from rayq.storage.batch import due_header
from rayq.testing.checker.recorder import as_text
from rayq.wire.messages import (
    AlterQueue,
    CreateQueue,
    DescribeQueue,
    DescribeQueueResponse,
    DescribeQueues,
    ListQueueRecords,
    MoveQueueRecords,
    Request,
)

ORDERS, LATER, AGAIN = "orders", "later", "again"
PARTITIONS = 2
PRODUCERS = 2
WORKERS = {"plain": 2, "by-key": 2, "later": 1}
OPERATORS = 2
LIFE_S = (1.0, 10.0)
END_LIMIT_S = 90.0
LOOK_S = 0.7
CLOCK_LOOK_S = 0.02
IDLE_MAX_S = 5.0
"""So long a record may be ready beside a take that waits, once the cluster is whole."""
CALM_S = 15.0
"""After the last fault, so long records may be ready and not be given out."""

Life = Callable[[str, Process, random.Random], Coroutine[Any, Any, None]]


class QueueWorkload(Workload):
    """See the module."""

    topics = (ORDERS,)
    topics_on_disk: tuple[str, ...] = (ORDERS, LATER, "plain.dead", QUEUES_TOPIC)
    more_faults: Sequence[Injection] = WITH_GROUPS
    lasts_s = 24.0
    heals_at_s = 18.0
    records_min = 300
    syncs_s = (SYNC_S, (0.002, 0.03), (0.005, 0.1))

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        rng = self._rng
        self.plans = {
            name: QueuePlan(name, topic, PARTITIONS, rng.choice((1.0, 2.0, 4.0)), name == "by-key")
            for name, topic in (("plain", ORDERS), ("by-key", ORDERS), ("later", LATER))
        }
        self.invariants = QueueInvariants()
        self.invariants.moved_to = frozenset({AGAIN, *(f"{name}.dead" for name in self.plans)})
        self._move_faults = MoveFaults(cluster, cluster.world.new_random("move faults"))
        self.invariants.on_move = self._move_faults.noted
        self._queue_ids: dict[str, str] = {}
        self._is_wild = True
        self._is_working = True
        self._is_moving = True
        self._calm_since_s = 0.0
        self._slots: list[asyncio.Task[None]] = []
        self._workers: dict[Owner, str] = {}
        self._moved: set[tuple[str, int]] = set()
        """The dead letters that a leader says it moved, by queue and offset."""
        self._discarded: set[tuple[str, int]] = set()
        cluster.world.network.on_lost = self._lost_connection

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "queue_state_partitions": rng.choice((1, 2)),
            "compaction_check_interval_ms": rng.choice((1_000, 3_000)),
        }

    def observer(self, invariants: Invariants) -> Callable[[Owner], None]:
        invariants.on_committed = self.invariants.committed
        return invariants.observe

    # --- the beginning ----------------------------------------------------------------------------

    async def create_topics(self) -> None:
        await super().create_topics()
        process = self._process("queues-admin")
        rng = self._rng

        async def create() -> None:
            client = self._client(process)
            admin = AsyncAdmin(client)
            await admin.create_topic(AGAIN, 1, 3, **self.topic_options)
            await admin.create_topic(LATER, PARTITIONS, 3, **self.topic_options)
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
            while len(self._queue_ids) < 2 * len(self.plans):
                answer = await client.ask_any(DescribeQueues(), timeout_s=END_LIMIT_S)
                self._queue_ids = {one.name: one.queue_id for one in answer.queues}
            client.close()

        await process.run(create())

    def start(self) -> None:
        self._clocks = asyncio.create_task(self._watch_clocks())
        self._striking = asyncio.create_task(self._move_faults.run())
        for number in range(PRODUCERS):
            self._start(f"producer-{number}", self._produce)
        self._start("delayer", self._put_later)
        self._start("watcher", self._watch_queues)
        for name, count in WORKERS.items():
            for number in range(count):
                slot = f"worker-{name}-{number}"
                self._fill(slot, partial(self._work, self.plans[name]), lambda: self._is_working)
        for number in range(OPERATORS):
            self._fill(f"operator-{number}", self._redrive, lambda: self._is_moving)

    def calm_down(self) -> None:
        self._is_wild = False
        self._striking.cancel()
        self._calm_since_s = self._cluster.world.now_s

    async def stop_sending(self) -> None:
        await super().stop_sending()
        await self._end("delayer")
        self._is_moving = False

    # --- the end ----------------------------------------------------------------------------------

    async def read_all(self, limit_s: float) -> int:
        """Before that, each queue has to settle everything."""
        await self._wait_for_all_settled()
        self._is_working = False
        done, late = await asyncio.wait(self._slots, timeout=END_LIMIT_S)
        assert not late, f"{len(late)} consumers of queues did not end"
        for slot in done:
            slot.result()
        await self._end("watcher")
        await self._clocks
        count = await super().read_all(limit_s)
        await self._read_own_topics(limit_s)
        return count

    async def _wait_for_all_settled(self) -> None:
        process, world = self._process("settled-watcher"), self._cluster.world

        async def wait() -> None:
            client = self._client(process)
            until_s = world.now_s + END_LIMIT_S
            for plan in self.plans.values():
                for number in range(plan.partitions):
                    while True:
                        found = await self._describe(client, plan.name, plan.topic, number)
                        if found is not None and _is_settled(found):
                            break
                        assert world.now_s < until_s, (
                            f"{plan.name} of {plan.topic}-{number} is not settled: {found}"
                        )
                        await asyncio.sleep(0.3)
            client.close()

        await process.run(wait())

    async def _read_own_topics(self, limit_s: float) -> None:
        """What stands in the topics that only queues read, and in those of dead letters."""
        dead = [f"{name}.dead" for name in self.plans]
        places = [
            *(TopicPartition(LATER, number) for number in range(PARTITIONS)),
            *(TopicPartition(topic, 0) for topic in (AGAIN, *dead)),
        ]
        process, world = self._process("final-queue-reader"), self._cluster.world

        async def read() -> list[Record]:
            client = self._client(process)
            consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
            await consumer.assign(places)
            ends = await consumer.end_offsets(places)
            deadline_s = world.now_s + limit_s
            records: list[Record] = []
            while any([await consumer.position(one) < ends[one] for one in places]):
                assert world.now_s < deadline_s, "the final read of the queues takes too long"
                records += await consumer.poll(1.0)
            await consumer.close()
            client.close()
            return records

        before = self._kept_of_dead_letters()
        records = await process.run(read())
        self.recorder.found(records)
        self._judge_moves(records, before, self._kept_of_dead_letters())

    def _kept_of_dead_letters(self) -> dict[str, Kept]:
        names = [f"{name}.dead" for name in self.plans]
        return {name: self.invariants.kept(self._queue_ids[name], 0) for name in names}

    def _judge_moves(
        self, records: list[Record], before: dict[str, Kept], after: dict[str, Kept]
    ) -> None:
        """Each dead letter that is settled stands once where it was moved to, unless an operator
        asked to drop it; one that is not settled stands there only as far as its move goes on.
        `before` the topics were read this was kept of them, `after` that."""
        stands = Counter((one.topic, as_text(one.value or b"")) for one in records)
        least: Counter[tuple[str, str]] = Counter()
        most: Counter[tuple[str, str]] = Counter()
        for one in records:
            if not one.topic.endswith(".dead"):
                continue
            target = LATER if one.topic == f"{LATER}.dead" else AGAIN
            value = as_text(one.value or b"")
            is_settled = is_done(before[one.topic], one.offset)
            moves = after[one.topic].moves.values()
            may_be_there = is_done(after[one.topic], one.offset) or any(
                one.offset == record.offset for move in moves for record in move.records
            )
            is_dropped = (one.topic, one.offset) in self._discarded
            least[target, value] += is_settled and not is_dropped
            most[target, value] += may_be_there
            if (one.topic, one.offset) in self._moved and not is_settled:
                self.problems.append(
                    f"{one.topic}@{one.offset} {value!r} was told to be moved, and is unsettled"
                )
        for target, value in most.keys() | {one for one in stands if one[0] == AGAIN}:
            there = stands[target, value] - (target == LATER)
            if not least[target, value] <= there <= most[target, value]:
                self.problems.append(
                    f"{there} copies of {value!r} are in {target}: between {least[target, value]} "
                    f"and {most[target, value]} dead letters were moved there"
                )

    # --- lives ------------------------------------------------------------------------------------

    def _fill(self, slot: str, life: Life, goes_on: Callable[[], bool]) -> None:
        host = self._cluster.world.host(slot)
        self.hosts.append(host)
        self._slots.append(asyncio.create_task(self._lives(slot, host, life, goes_on)))

    async def _lives(
        self, slot: str, host: Host, life: Life, goes_on: Callable[[], bool]
    ) -> None:
        """One life after the other, each disturbed now and then."""
        world = self._cluster.world
        rng = world.new_random(slot)
        lives = 0
        while goes_on():
            lives += 1
            name = f"{slot}.{lives}"
            process = host.process(name)
            self._workers[process] = name
            task = process.start(life(name, process, random.Random(rng.getrandbits(64))))
            while process.alive and not task.done():
                await asyncio.wait(
                    (task, process.exited),
                    timeout=rng.uniform(*LIFE_S) if self._is_wild else 1.0,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not self._is_wild or not process.alive or task.done():
                    continue
                await self._disturb(rng.choice(("kill", "pause", "cut", "nothing")), process, rng)
            if process.alive:
                task.result()
            self.recorder.killed(name)
            process.kill()
            del self._workers[process]
            await asyncio.sleep(rng.uniform(0.05, 2.0))

    async def _disturb(self, what: str, process: Process, rng: random.Random) -> None:
        world = self._cluster.world
        world.trace.note(f"SLOT {process.name}: {what}")
        if what == "kill":
            process.kill()
        elif what == "pause":
            process.pause()
            await asyncio.sleep(rng.uniform(0.5, 8.0))
            process.resume()
        elif what == "cut":
            one, others = [process.host], self._cluster.hosts
            world.network.cut(one, others, both_ways=rng.random() < 0.7)
            await asyncio.sleep(rng.uniform(0.5, 8.0))
            world.network.heal(one, others)

    def _lost_connection(self, owner: Owner) -> None:
        name = self._workers.get(owner)
        if name is not None:
            self.recorder.disturbed(name)

    # --- clients ----------------------------------------------------------------------------------

    async def _work(
        self, plan: QueuePlan, name: str, process: Process, rng: random.Random
    ) -> None:
        client, recorder = self._client(process), self.recorder

        def now_s() -> float:
            return self._cluster.world.now_s

        worker: RawWorker | TaskWorker
        if rng.random() < 0.5:
            queue_id = self._queue_ids[plan.name]
            worker = RawWorker(
                name, client, rng, plan, queue_id, recorder, now_s, self.problems
            )
        else:
            worker = TaskWorker(name, client, rng, plan, recorder, now_s)
        await worker.work(lambda: self._is_working, lambda: self._is_wild)
        client.close()

    async def _put_later(self, name: str, process: Process, rng: random.Random) -> None:
        recorder, world = self.recorder, self._cluster.world
        recorder.opened(name)
        self.acknowledged_by[name] = 0
        client = self._client(process)
        producer = AsyncProducer(client, ProducerConfig(linger_ms=rng.choice((0, 20))))
        count = 0
        while self._is_sending:
            for _ in range(rng.randint(1, 5)):
                count += 1
                value = b"%s/%d" % (name.encode(), count)
                headers = []
                if rng.random() < 0.7:
                    due_s = world.now_s + rng.uniform(0.1, 6.0)
                    headers = [due_header(START_WALL_MS + round(due_s * 1000))]
                    recorder.delayed(value, round(due_s * 1000) / 1000)
                number = recorder.sending(name, LATER, None, value)
                try:
                    future = await producer.send(
                        LATER, value, headers=headers, partition=rng.randrange(PARTITIONS)
                    )
                except RayqError as error:
                    recorder.not_delivered(name, number, error)
                else:
                    future.call_on_delivery(partial(self._note_delivery, name, number))
            await asyncio.sleep(rng.uniform(0, 1.0))
        with contextlib.suppress(DeliveryError):
            await producer.close()
        client.close()

    async def _redrive(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        while self._is_moving:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            queue = rng.choice([*self.plans])
            with contextlib.suppress(RayqError):
                await self._redrive_some(client, queue, rng)
        client.close()

    async def _redrive_some(self, client: Client, queue: str, rng: random.Random) -> None:
        topic = f"{queue}.dead"
        queue_id = self._queue_ids[topic]

        def list_them(topic_id: str, leader: LeaderAndEpoch) -> Request[Any]:
            return ListQueueRecords(
                topic_id=topic_id,
                partition=0,
                leader_epoch=leader.epoch,
                queue_id=queue_id,
                offset=0,
                states=[],
                records_max=rng.choice((2, 100)),
            )

        found = await client.ask_leader(topic, 0, list_them, timeout_s=8, attempt_timeout_s=4)
        offsets = [one.offset for one in found.records if rng.random() < 0.8]
        if not offsets:
            return
        is_discarded = rng.random() < 0.1
        target = None if is_discarded else "" if queue == "later" else AGAIN
        if is_discarded:
            self._discarded |= {(topic, one) for one in offsets}

        def move(topic_id: str, leader: LeaderAndEpoch) -> Request[Any]:
            return MoveQueueRecords(
                topic_id=topic_id,
                partition=0,
                leader_epoch=leader.epoch,
                queue_id=queue_id,
                offsets=offsets,
                to_topic=target,
            )

        answer = await client.ask_leader(topic, 0, move, timeout_s=12, attempt_timeout_s=6)
        self._moved |= {(topic, one) for one in answer.moved}

    # --- watching ---------------------------------------------------------------------------------

    async def _watch_queues(self, name: str, process: Process, rng: random.Random) -> None:
        """The start of a queue never goes back, and nothing lies ready beside a waiting take."""
        client, world = self._client(process), self._cluster.world

        async def watch(plan: QueuePlan, number: int) -> None:
            start = 0
            idle: tuple[int, int, int] | None = None
            idle_since_s = 0.0
            while self._is_working:
                found = await self._describe(client, plan.name, plan.topic, number)
                if found is not None:
                    where = f"{plan.name} of {plan.topic}-{number}"
                    if found.start_offset < start:
                        self.problems.append(
                            f"{where}: its start goes back from {start} to {found.start_offset}"
                        )
                    start = found.start_offset
                    is_idle = bool(found.ready and found.waiting_takes)
                    state = (found.start_offset, found.done, found.locked)
                    if not is_idle or self._is_wild or state != idle:
                        idle, idle_since_s = state, world.now_s
                    since_s = max(idle_since_s, self._calm_since_s + CALM_S)
                    if world.now_s - since_s > IDLE_MAX_S:
                        self.problems.append(f"{where}: nobody gets what is ready: {found}")
                        return
                await asyncio.sleep(rng.uniform(0, 2 * LOOK_S))

        async def compare() -> None:
            while self._is_working:
                await asyncio.sleep(rng.uniform(0, 2 * LOOK_S))
                for leader in self._leaders():
                    self.invariants.check_replay(leader)

        await asyncio.gather(
            compare(),
            *(watch(plan, one) for plan in self.plans.values() for one in range(plan.partitions)),
        )
        client.close()

    async def _watch_clocks(self) -> None:
        """A server that begins while the clock of its host is ahead cannot know it."""
        known: set[Process] = set()
        doubtful: set[Process] = set()
        while self._is_working:
            for process in self._cluster.replica_hosts.keys() - known:
                known.add(process)
                if process.alive and self._is_ahead(process):
                    doubtful.add(process)
                    self.recorder.clock_in_doubt()
            for process in [one for one in doubtful if not (one.alive and self._is_ahead(one))]:
                doubtful.remove(process)
                self.recorder.clock_in_doubt(is_over=True)
            await asyncio.sleep(CLOCK_LOOK_S)

    def _is_ahead(self, process: Process) -> bool:
        return any(one.clock_offset_ms > 0 for one in self._cluster.hosts if one is process.host)

    def _leaders(self) -> Iterator[QueueLeader]:
        """Of all queues, as the processes that live know it."""
        for process, host in self._cluster.replica_hosts.items():
            for replica in host._replicas.values() if process.alive else ():
                if replica._queues is not None:
                    yield from replica._queues._queues.values()

    async def _describe(
        self, client: Client, queue: str, topic: str, partition: int
    ) -> DescribeQueueResponse | None:
        """None: its leader does not answer."""

        def build(topic_id: str, leader: LeaderAndEpoch) -> Request[DescribeQueueResponse]:
            return DescribeQueue(
                topic_id=topic_id,
                partition=partition,
                leader_epoch=leader.epoch,
                queue_id=self._queue_ids[queue],
            )

        try:
            return await client.ask_leader(
                topic, partition, build, timeout_s=4.0, attempt_timeout_s=2.0
            )
        except RayqError:
            return None


def _is_settled(found: DescribeQueueResponse) -> bool:
    return found.start_offset == found.end_offset and not (
        found.ready or found.blocked or found.locked or found.delayed or found.moving
    )

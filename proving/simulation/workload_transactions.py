"""Clients with transactions: writers that share ids, a group that copies a topic, readers, cuts.

The ordinary producers write `orders` without transactions. *Writers* write `pairs`, which is
compacted in most seeds: a transaction has some records in several partitions. They share fewer ids
than there are writers, so they fence each other; they abort, die, hang, and pause past their
time-out. *Copiers* are the members of a group: each reads some orders and writes a copy of each to
`copies`, in one transaction with its positions. *Drivers* have batch jobs write to `pairs` too
(`atomic_jobs`). *Readers* read what is committed; a *cutter* takes snapshots over all partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Any

from proving.simulation.atomic_jobs import ID as JOB
from proving.simulation.atomic_jobs import AtomicJobs
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import SYNC_S
from proving.simulation.faults import Injection
from proving.simulation.faults_aimed import OF_TRANSACTIONS
from proving.simulation.faults_groups import WITH_GROUPS
from proving.simulation.invariants import Invariants
from proving.simulation.invariants_groups import GroupInvariants
from proving.simulation.invariants_transactions import TransactionInvariants
from proving.simulation.new_topic import create_topic
from proving.simulation.owner import Owner
from proving.simulation.principals import POISONER, VISITOR, Rights, may
from proving.simulation.process import Process
from proving.simulation.transaction_times import TransactionTimes
from proving.simulation.workload import PRODUCERS, Workload
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.replica.replica import Replica
from rayq.batch.job_partition import JobPartition
from rayq.batch.taking_cuts import take_cut, together
from rayq.batch.transaction_cut import Cut
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.subscription import Stream
from rayq.client.coordinator import offsets_partitions
from rayq.client.producing.producer import AsyncProducer
from rayq.client.producing.transaction import AsyncTransaction
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.core.access.rights import Needed
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from rayq.errors import (
    MaxPollIntervalError,
    ProducerFencedError,
    RayqError,
    TransactionAbortedError,
    TransactionOutcomeUnknownError,
)
from rayq.records import Record, TopicPartition
from rayq.storage.batch import encode_batch
from rayq.testing.checker.history import Sent
from rayq.testing.checker.transactions import TransactionHistory

GROUP = "copiers"
PAIRS, COPIES = "pairs", "copies"
PAIRS_PARTITIONS, COPIES_PARTITIONS = 3, 2
WRITERS, WRITER_IDS = 3, 2
COPIERS = 2
READERS = 2
LIFE_S = (1.0, 12.0)
POISON_S, POISON_TIMEOUT_S = 0.5, 2.0
POISON_ID = 100_000
LOOK_S, LOOKS = 0.2, 10
"""A producer id of a family that no task of a job has."""
END_LIMIT_S = 90.0
CUT_LIMIT_S = 20.0

Life = Callable[[str, Process, random.Random], Coroutine[Any, Any, None]]


class TransactionWorkload(Workload):
    """See the module."""

    topics = ("orders",)
    topics_on_disk: tuple[str, ...] = ("orders", PAIRS, COPIES, OFFSETS_TOPIC, TRANSACTIONS_TOPIC)
    more_faults: Sequence[Injection] = (*WITH_GROUPS, *OF_TRANSACTIONS)
    lasts_s = 42.0
    heals_at_s = 32.0
    syncs_s = (SYNC_S, (0.002, 0.03), (0.005, 0.1))

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self.history = TransactionHistory()
        self.groups = GroupInvariants(cluster)
        self.invariants = TransactionInvariants()
        self._times = TransactionTimes(self.problems)
        self._is_wild = True
        self._is_copying = True
        self._slots: list[asyncio.Task[None]] = []
        self._names = 0
        self._keys: list[list[bytes]] = [[] for _ in range(PAIRS_PARTITIONS)]
        """Keys of the records that writers have sent, by partition; no two of them are the
        same."""
        self._pairs_options = dict(self.topic_options)
        if self._rng.random() < 0.7:
            self._pairs_options |= {
                "cleanup_policy": "compact",
                "segment_bytes": self._rng.choice((1024, 4096)),
                "min_cleanable_dirty_ratio": self._rng.choice((0.01, 0.3)),
                "delete_retention_ms": self._rng.choice((300, 1_500, 6_000)),
                "max_compaction_lag_ms": self._rng.choice((None, 1_000, 5_000)),
            }
        self._jobs = AtomicJobs(cluster, self.history, PAIRS, PAIRS_PARTITIONS, self._client)
        self.hosts += self._jobs.hosts

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "group_disconnect_grace_ms": rng.choice((300, 1_000)),
            "transaction_state_partitions": rng.choice((1, 2)),
            "offsets_topic_partitions": 1,
            "compaction_check_interval_ms": rng.choice((1_000, 3_000)),
            "compaction_memory_bytes": rng.choice((2_048, 1 << 20)),
        }

    def rights(self) -> Rights:
        writers = [f"id-{number}" for number in range(WRITER_IDS)]
        copiers = [f"copier-{number}" for number in range(COPIERS)]
        read = may("read", "topic", *self.topics, PAIRS, COPIES)
        job = [
            *may("write", "topic", PAIRS),
            *may("read", "topic", PAIRS),
            *may("write", "transactional_id", JOB),
        ]
        return {
            **super().rights(),
            "reader": read,
            "final-output-reader": read,
            "cutter": [*read, *may("describe", "transactional_id", *writers, *copiers, JOB)],
            "writer": [*may("write", "topic", PAIRS), *may("write", "transactional_id", *writers)],
            "copier": [
                *may("read", "topic", *self.topics),
                *may("read", "group", GROUP),
                *may("write", "topic", COPIES),
                *may("write", "transactional_id", *copiers),
            ],
            "driver|executor": job,
        }

    def rights_of_guests(self) -> Sequence[Needed]:
        return [
            *super().rights_of_guests(),
            *may("write", "topic", PAIRS),
            *may("write", "transactional_id", VISITOR),
        ]

    def start_guests(self) -> None:
        super().start_guests()
        self._start(POISONER, self._poison)
        self._start(VISITOR, self._visit)

    async def end_guests(self) -> None:
        await super().end_guests()
        await self._end(POISONER)
        await self._end(VISITOR)

    def observer(self, invariants: Invariants) -> Callable[[Owner], None]:
        def committed(replica: Replica, leader_epoch: int, batch: bytes) -> None:
            self.groups.committed(replica, leader_epoch, batch)
            self.invariants.committed(replica, leader_epoch, batch)

        def observe(owner: Owner) -> None:
            invariants.observe(owner)
            self.invariants.observe()
            self.groups.observe(owner)

        invariants.on_committed = committed
        return observe

    def judging(self) -> AbstractContextManager[None]:
        return self._times.judging()

    @property
    def outputs(self) -> list[TopicPartition]:
        return [
            *(TopicPartition(PAIRS, number) for number in range(PAIRS_PARTITIONS)),
            *(TopicPartition(COPIES, number) for number in range(COPIES_PARTITIONS)),
        ]

    async def create_topics(self) -> None:
        await super().create_topics()
        process = self._process("transactions-admin")

        async def create() -> None:
            client = self._client(process)
            await offsets_partitions(client, create=True, timeout_s=END_LIMIT_S)
            await create_topic(client, PAIRS, PAIRS_PARTITIONS, **self._pairs_options)
            await create_topic(client, COPIES, COPIES_PARTITIONS, **self.topic_options)
            client.close()

        await process.run(create())

    def start(self) -> None:
        for number in range(PRODUCERS):
            self._start(f"producer-{number}", self._produce)
        for number in range(READERS):
            self._start(f"reader-{number}", self._read)
        self._start("watcher", self._watch_ends)
        self._start("cutter", self._take_cuts)
        for number in range(WRITERS):
            self._fill(f"writer-{number}", self._write, lambda: self._is_sending)
        for number in range(COPIERS):
            self._fill(f"copier-{number}", self._copy, lambda: self._is_copying)
        self._fill("driver", self._drive, lambda: self._is_sending or not self._jobs.is_settled)

    def calm_down(self) -> None:
        self._is_wild = False

    async def read_all(self, limit_s: float) -> int:
        """Before that, the group has to copy all acknowledged orders."""
        ends: dict[int, int] = {}
        for event in self.recorder.events:
            if isinstance(event, Sent) and event.partition is not None and event.offset is not None:
                ends[event.partition] = max(event.offset + 1, ends.get(event.partition, 0))
        await self._cluster.wait_until(
            lambda: all(self.groups.highest(GROUP, place) >= end for place, end in ends.items()),
            "the group to copy every acknowledged order",
            limit_s=END_LIMIT_S,
        )
        self._is_copying = False
        done, late = await asyncio.wait(self._slots, timeout=END_LIMIT_S)
        assert not late, f"{len(late)} clients with transactions did not end"
        for slot in done:
            slot.result()
        await self._jobs.end(END_LIMIT_S)
        count = await super().read_all(limit_s)
        await self._read_outputs(limit_s)
        self.problems.extend(self.history.faults())
        return count

    async def stop_reading(self) -> None:
        await super().stop_reading()
        await self._end("reader")
        await self._end("cutter")

    # --- lives ------------------------------------------------------------------------------------

    def _fill(self, slot: str, life: Life, goes_on: Callable[[], bool]) -> None:
        host = self._cluster.world.host(slot)
        self.hosts.append(host)
        self._slots.append(asyncio.create_task(self._lives(slot, host, life, goes_on)))

    async def _lives(
        self, slot: str, host: Host, life: Life, goes_on: Callable[[], bool]
    ) -> None:
        """One life after the other, each disturbed now and then."""
        rng = self._cluster.world.new_random(slot)
        lives = 0
        while goes_on():
            lives += 1
            name = f"{slot}.{lives}"
            process = host.process(name)
            task = process.start(life(name, process, random.Random(rng.getrandbits(64))))
            while process.alive and not task.done():
                await asyncio.wait(
                    (task, process.exited),
                    timeout=rng.uniform(*LIFE_S) if self._is_wild else 1.0,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not self._is_wild or not process.alive or task.done():
                    continue
                what = rng.choice(("kill", "kill", "pause", "nothing"))
                self._cluster.world.trace.note(f"SLOT {name}: {what}")
                if what == "kill":
                    process.kill()
                elif what == "pause":
                    process.pause()
                    await asyncio.sleep(rng.uniform(0.5, 12.0))
                    process.resume()
            if process.alive:
                task.result()
                process.kill()
            await asyncio.sleep(rng.uniform(0.05, 2.0))

    # --- transactions -----------------------------------------------------------------------------

    def _producer(self, process: Process, rng: random.Random, name: str) -> AsyncProducer:
        return AsyncProducer(
            self._client(process),
            ProducerConfig(
                transactional_id=name,
                transaction_timeout_ms=rng.choice((1_000, 4_000, 15_000)),
                commit_wait_ms=rng.choice((0, 1_000)),
                max_block_ms=rng.choice((3_000, 20_000)),
                request_timeout_ms=rng.choice((2_000, 5_000)),
                batch_size=rng.choice((512, 65_536)),
                linger_ms=rng.choice((0, 5)),
            ),
        )

    async def _in_transaction(
        self,
        block: AbstractAsyncContextManager[AsyncTransaction],
        work: Callable[[AsyncTransaction, str], Coroutine[Any, Any, None]],
    ) -> None:
        """Runs one transaction and notes its outcome. Raises ProducerFencedError."""
        self._names += 1
        name, history = f"x{self._names}", self.history
        was_asked = False
        try:
            async with block as transaction:
                history.begun(name)
                await work(transaction, name)
                was_asked = True
                # A failure before the commit is asked for is one of these errors, too.
                history.ended(name, "unknown")
        except (TransactionAbortedError, ProducerFencedError, _WantedAbortError) as error:
            if was_asked:
                history.ended(name, "aborted")
            if isinstance(error, ProducerFencedError):
                raise
        except TransactionOutcomeUnknownError:
            pass
        except RayqError:
            pass  # It could not begin, or its end could not be asked for in time.
        else:
            history.ended(name, "committed")

    async def _write(self, name: str, process: Process, rng: random.Random) -> None:
        producer = self._producer(process, rng, f"id-{rng.randrange(WRITER_IDS)}")

        async def work(transaction: AsyncTransaction, name: str) -> None:
            is_wanted = rng.random() >= 0.15
            for number in range(rng.randint(1, 8)):
                value = b"%s/%d " % (name.encode(), number) + b"." * rng.randint(0, 100)
                partition = rng.randrange(PAIRS_PARTITIONS)
                known, key = self._keys[partition], b"key of " + value
                if is_wanted:
                    known.append(key)
                elif known:
                    key = rng.choice(known)  # What is aborted replaces nothing.
                self.history.sending(name, value)
                await transaction.send(PAIRS, value, key=key, partition=partition)
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.uniform(0, 0.1))
            if self._is_wild and rng.random() < 0.05:
                await asyncio.sleep(rng.uniform(0.5, 6.0))
            if not is_wanted:
                raise _WantedAbortError

        while self._is_sending:
            try:
                await self._in_transaction(producer.transaction(), work)
            except ProducerFencedError:
                break
            await asyncio.sleep(rng.uniform(0, 0.5))
        await self._close(producer)

    async def _visit(self, name: str, process: Process, rng: random.Random) -> None:
        """Writes in transactions, while its rights come and go. Half of the transactions have their
        topic hidden and shown again in the middle, when nothing is under way."""
        principals = self.principals
        assert principals is not None
        while self._has_guests:
            producer = self._producer(process, rng, VISITOR)
            client, until_s = producer.core.client, producer.core.client.now + rng.uniform(*LIFE_S)

            async def sees(is_seen: bool) -> None:
                """Fetches metadata, as something else in the process may, until they show it."""
                for _ in range(LOOKS):
                    with contextlib.suppress(RayqError):
                        await client.fetch_all(timeout_s=LOOK_S)  # noqa: B023
                    if (PAIRS in client.metadata.topics) == is_seen:  # noqa: B023
                        return
                    await asyncio.sleep(LOOK_S)

            async def work(transaction: AsyncTransaction, name: str) -> None:
                hides_before = rng.randint(1, 4) if rng.random() < 0.5 else 0
                for number in range(rng.randint(2, 5)):
                    if number and number == hides_before:
                        await principals.hide_for_visitor(PAIRS, partial(sees, False))
                        await sees(True)
                    value = b"%s/%d" % (name.encode(), number)
                    self.history.sending(name, value)
                    partition = rng.randrange(PAIRS_PARTITIONS)
                    sent = await transaction.send(PAIRS, value, key=value, partition=partition)
                    await sent

            while self._has_guests and client.now < until_s:
                try:
                    await self._in_transaction(producer.transaction(), work)
                except ProducerFencedError:
                    break
                await asyncio.sleep(rng.uniform(0, 2 * LOOK_S))
            await self._close(producer)

    async def _poison(self, name: str, process: Process, rng: random.Random) -> None:
        """Writes in the transactions of others, to a topic that it may write to."""
        client, spy = self._client(process), self._superuser(process)
        count = 0
        while self._has_guests:
            await asyncio.sleep(rng.uniform(0, 2 * POISON_S))
            count += 1
            with contextlib.suppress(RayqError):
                await self._poison_one(client, spy, rng, count)
        client.close()
        spy.close()

    async def _poison_one(
        self, client: Client, spy: Client, rng: random.Random, count: int
    ) -> None:
        states = await spy.topic(TRANSACTIONS_TOPIC, timeout_s=POISON_TIMEOUT_S)
        number = rng.randrange(len(states.partitions))
        listed = await spy.ask_leader(
            TRANSACTIONS_TOPIC,
            number,
            lambda topic_id, leader: messages.ListTransactions(topic_id, number, leader.epoch),
            timeout_s=POISON_TIMEOUT_S,
            attempt_timeout_s=POISON_TIMEOUT_S,
        )
        victims = [victim for victim in listed.transactions if victim.state == "open"]
        if not victims:
            return
        victim, value = rng.choice(victims), b"poison/%d" % count
        self.history.begun(value.decode())
        self.history.sending(value.decode(), value)
        self.history.ended(value.decode(), "aborted")
        payload = encode_batch(
            [value],
            [value],
            producer_id=victim.family + POISON_ID + count,
            producer_epoch=victim.epoch,
            base_sequence=0,
            is_transactional=True,
        )
        partition = rng.randrange(PAIRS_PARTITIONS)
        await client.exchange_with_leader(
            PAIRS,
            partition,
            lambda topic_id, leader: messages.Produce(
                topic_id, partition, leader.epoch, acks=-1, timeout_ms=1_000
            ),
            payload,
            timeout_s=POISON_TIMEOUT_S,
            attempt_timeout_s=POISON_TIMEOUT_S,
        )

    async def _copy(self, name: str, process: Process, rng: random.Random) -> None:
        producer = self._producer(process, rng, name.split(".")[0])
        config = ConsumerConfig(
            auto_offset_reset="earliest",
            group_session_timeout_ms=rng.choice((4_000, 8_000)),
            group_heartbeat_interval_ms=rng.choice((300, 1_500)),
            max_poll_records=rng.choice((20, 200)),
        )
        consumer = AsyncConsumer(self._client(process), config, self.topics, group=GROUP)
        self.groups.consumers[process] = consumer

        async def work(transaction: AsyncTransaction, name: str) -> None:
            records: list[Record] = []
            try:
                records = await consumer.poll(0.5)
            except MaxPollIntervalError:
                raise _WantedAbortError from None
            if rng.random() < 0.5:
                await transaction.send_offsets(consumer)  # Its group knows the transaction early.
            for record in records:
                value = b"%s of %s" % (name.encode(), _place(record))
                self.history.sending(name, value, made_of=_place(record))
                await transaction.send(COPIES, value)
            if self._is_wild and rng.random() < 0.03:
                await asyncio.sleep(rng.uniform(0.5, 6.0))
            if rng.random() < 0.05:
                raise _WantedAbortError

        while self._is_copying:
            try:
                await self._in_transaction(producer.transaction(reads=consumer), work)
            except ProducerFencedError:
                break
            await asyncio.sleep(rng.uniform(0, 0.1))
        self.groups.consumers.pop(process, None)
        await consumer.close()
        consumer.core.client.close()
        await self._close(producer)

    async def _drive(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        await self._jobs.drive(client, rng, lambda: self._is_sending)
        client.close()

    async def _close(self, producer: AsyncProducer) -> None:
        try:
            await producer.close()
        except RayqError:
            pass  # What was not delivered is in no committed transaction.
        producer.core.client.close()

    # --- reading ----------------------------------------------------------------------------------

    async def _read(self, name: str, process: Process, rng: random.Random) -> None:
        client, world = self._client(process), self._cluster.world
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        again_s = 0.0
        while self._is_reading:
            if world.now_s > again_s:
                again_s = world.now_s + rng.uniform(5.0, 20.0)
                await consumer.assign([])
                await consumer.assign(self.outputs)
            self.history.read(record.value for record in await consumer.poll(0.5) if record.value)
        await consumer.close()
        client.close()

    async def _read_outputs(self, limit_s: float) -> None:
        """Reads all outputs to their ends, once every transaction is decided."""
        process, world = self._process("final-output-reader"), self._cluster.world

        async def read() -> None:
            client = self._client(process)
            deadline_s = world.now_s + limit_s
            everything = AsyncConsumer(client, ConsumerConfig(isolation_level="read_uncommitted"))
            consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
            stable: dict[TopicPartition, int] = {}
            # A marker that is yet to come moves the ends, too.
            while stable != (ends := await everything.end_offsets(self.outputs)):
                assert world.now_s < deadline_s, f"not decided: {stable} of {ends}"
                await asyncio.sleep(0.5)
                stable = await consumer.end_offsets(self.outputs)
            await consumer.assign(self.outputs)
            while any([await consumer.position(output) < ends[output] for output in self.outputs]):
                assert world.now_s < deadline_s, "the final read of the outputs takes too long"
                records = await consumer.poll(1.0)
                self.history.read_in_the_end(record.value for record in records if record.value)
            await consumer.assign(self.places)
            ends = await consumer.end_offsets(self.places)
            while any([await consumer.position(place) < ends[place] for place in self.places]):
                for record in await consumer.poll(1.0):
                    self.history.input(_place(record))
            await consumer.close()
            await everything.close()
            client.close()

        await process.run(read())

    async def _take_cuts(self, name: str, process: Process, rng: random.Random) -> None:
        client, world = self._client(process), self._cluster.world
        while self._is_reading:
            await asyncio.sleep(rng.uniform(0.5, 4.0))
            try:
                cut = await self._cut(client)
            except RayqError:
                continue  # A partition is offline.
            consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
            await consumer.assign(self.outputs)
            core = consumer.core
            streams = [
                Stream(
                    place,
                    0,
                    topic_id=core.subscription.get(place).stream.topic_id,
                    end=end,
                    without=frozenset(cut.without),
                )
                for place, end in zip(self.outputs, cut.ends, strict=True)
            ]
            for stream in streams:
                core.subscription.restart(stream.partition, stream)
            core.fetcher.stop_stale()
            core.fetcher.start(streams)
            values: list[bytes] = []
            deadline_s = world.now_s + CUT_LIMIT_S
            while not all(stream.is_finished for stream in streams) and world.now_s < deadline_s:
                values += [record.value for record in await consumer.poll(0.5) if record.value]
            if all(stream.is_finished for stream in streams):
                self.history.cut(values)
            await consumer.close()
        client.close()

    async def _cut(self, client: Client) -> Cut:
        topics = {
            name: await client.topic(name, timeout_s=CUT_LIMIT_S) for name in (PAIRS, COPIES)
        }
        partitions = [
            JobPartition(client, place, topics[place.topic].topic_id, CUT_LIMIT_S)
            for place in self.outputs
        ]
        first = await together(partition.open_transactions() for partition in partitions)
        return await take_cut(client, partitions, first, CUT_LIMIT_S)


class _WantedAbortError(Exception):
    """Ends a block without a commit."""


def _place(record: Record) -> bytes:
    return b"%s-%d@%d" % (record.topic.encode(), record.partition, record.offset)

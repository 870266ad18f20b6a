"""Clients for consumer groups: producers, and members that join, leave, crash, hang and come back.

The members of one group read one topic of four partitions. Each *slot* is a client host whose
member lives one life after the other. Each life chooses how it commits, how patient the group is
with it, and how fast it works. A member counts a record as processed before it commits it.

Beside that topic there is a compacted topic, and `__consumer_offsets` has segments so small that it
is compacted too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.compacted_history import CompactedHistory
from proving.simulation.compacted_topic import PARTITIONS, CompactedTopic
from proving.simulation.compacted_topic import TOPIC as COMPACTED
from proving.simulation.disk import SYNC_S
from proving.simulation.faults import Injection
from proving.simulation.faults_groups import WITH_GROUPS
from proving.simulation.invariants import Invariants
from proving.simulation.invariants_groups import GroupInvariants
from proving.simulation.link import NetworkHost
from proving.simulation.new_topic import create_topic
from proving.simulation.owner import Owner
from proving.simulation.principals import Rights, may
from proving.simulation.process import Process
from proving.simulation.workload import PRODUCERS, Workload
from proving.simulation.world import Host
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.group_consumer import Callbacks
from rayq.client.coordinator import offsets_partitions
from rayq.config import ConsumerConfig
from rayq.config.keywords import TopicKeywords
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.errors import (
    ClosedError,
    CommitRefusedError,
    FencedMemberError,
    MaxPollIntervalError,
    TimeoutError,
)
from rayq.records import Record, TopicPartition
from rayq.testing.checker.history import Sent

GROUP = "billing"
KEEPERS = 2
"""The number of producers of the compacted topic."""
STATIC_SHARE = 0.3
"""The share of the slots whose members are static."""
PATIENT_S = (2.0, 15.0)
"""The time for which a slot leaves its member alone."""
AWAY_S = (0.05, 6.0)
"""The pause between two lives of a slot."""
END_LIMIT_S = 60.0
COMMIT_STYLES = ("each poll", "sometimes", "auto", "behind")


class Member:
    """One life of a slot."""

    def __init__(self, name: str, process: Process, rng: random.Random, instance: str | None):
        self.name = name
        self.process = process
        self.rng = rng
        self.style = rng.choice(COMMIT_STYLES)
        self.wants_to_leave = False
        self.work_s = rng.choice((0.0, 0.02, 0.2))
        """The usual maximum of the seconds of work on the records of one poll."""
        self.is_slow = rng.random() < 0.2
        """True if the member sometimes works for longer than it may."""
        self.config = ConsumerConfig(
            auto_offset_reset="earliest",
            group_instance_id=instance,
            assignor=rng.choice(("uniform", "uniform", "range")),
            group_session_timeout_ms=rng.choice((4_000, 8_000, 20_000)),
            group_heartbeat_interval_ms=rng.choice((300, 1_500)),
            max_poll_interval_ms=4_000 if self.is_slow else 60_000,
            max_poll_records=rng.choice((3, 20, 500)),
            enable_auto_commit=self.style == "auto",
            auto_commit_interval_ms=rng.choice((200, 2_000)),
            default_api_timeout_ms=rng.choice((5_000, 60_000)),
        )
        self.owned: set[TopicPartition] = set()
        self.positions: dict[TopicPartition, int] = {}
        """The position after the last processed record of each partition that the member owns."""
        self.committed: dict[TopicPartition, int] = {}
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return not self.process.alive or (self.task is not None and self.task.done())


class GroupWorkload(Workload):
    """See the module."""

    topics = ("orders",)
    topics_on_disk: tuple[str, ...] = ("orders", COMPACTED, OFFSETS_TOPIC)
    partitions = 4
    more_faults: Sequence[Injection] = WITH_GROUPS
    lasts_s = 42.0
    heals_at_s = 32.0
    # There are twice as many logs as in the ordinary workload, and they are compacted all the time.
    syncs_s = (SYNC_S, (0.002, 0.03), (0.005, 0.1))

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self.invariants = GroupInvariants(cluster)
        self.compacted = CompactedTopic(cluster.world, self._rng, self.problems)
        self.processed: dict[TopicPartition, int] = {}
        """The offset below which members have processed all records."""
        self._histories: dict[tuple[str, int], CompactedHistory] = {}
        self._is_wild = True
        self._slots: list[asyncio.Task[None]] = []
        self._offsets_options: TopicKeywords = {
            "segment_bytes": self._rng.choice((1024, 8192)),
            "min_cleanable_dirty_ratio": self._rng.choice((0.01, 0.5)),
            "delete_retention_ms": self._rng.choice((300, 10_000)),
        }
        self._slot_count = self._rng.choice((3, 4))
        self._keeper_count = KEEPERS
        self._producer_count = PRODUCERS

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "group_disconnect_grace_ms": rng.choice((300, 1_000)),
            "compaction_check_interval_ms": rng.choice((1_000, 3_000)),
            "compaction_memory_bytes": rng.choice((2_048, 1 << 20)),
        }

    def rights(self) -> Rights:
        read = may("read", "topic", COMPACTED)
        return {
            **super().rights(),
            "keeper": may("write", "topic", COMPACTED),
            "table-reader": read,
            "final-table-reader": read,
            "member": [*may("read", "topic", *self.topics), *may("read", "group", GROUP)],
        }

    def observer(self, invariants: Invariants) -> Callable[[Owner], None]:
        invariants.on_committed = self.invariants.committed
        self._histories = invariants.histories

        def observe(owner: Owner) -> None:
            invariants.observe(owner)
            self.invariants.observe(owner)

        return observe

    async def create_topics(self) -> None:
        await super().create_topics()
        process = self._process("group-admin")

        async def create() -> None:
            client = self._client(process)
            await offsets_partitions(client, create=True, timeout_s=END_LIMIT_S)
            admin = AsyncAdmin(client)
            await admin.alter_topic_config(OFFSETS_TOPIC, **self._offsets_options)
            await create_topic(client, COMPACTED, PARTITIONS, **self.compacted.options)
            client.close()

        await process.run(create())

    def start(self) -> None:
        for number in range(self._producer_count):
            self._start(f"producer-{number}", self._produce)
        for number in range(self._keeper_count):
            self._start(f"keeper-{number}", self._keep)
        self._start("watcher", self._watch_ends)
        if self._keeper_count:
            self._start("table-reader", self._read_table)
        if self._slot_count:
            self.recorder.group_opened(GROUP, self.topics)
        for number in range(self._slot_count):
            host = self._cluster.world.host(f"member-{number}")
            self.hosts.append(host)
            self._slots.append(asyncio.create_task(self._fill_slot(number, host)))

    def calm_down(self) -> None:
        self._is_wild = False

    async def read_all(self, limit_s: float) -> int:
        """Before that, the group has to process all acknowledged records."""
        ends: dict[TopicPartition, int] = {}
        for event in self.recorder.events:
            if isinstance(event, Sent) and event.partition is not None and event.offset is not None:
                place = TopicPartition(self.topics[0], event.partition)
                ends[place] = max(event.offset + 1, ends.get(place, 0))
        processed = self.processed
        if self._slot_count:
            await self._cluster.wait_until(
                lambda: all(processed.get(place, 0) >= end for place, end in ends.items()),
                "the group to process every acknowledged record",
                limit_s=limit_s,
            )
        if self._keeper_count:
            await self._read_table_in_the_end()
        return await super().read_all(limit_s)

    async def stop_sending(self) -> None:
        await super().stop_sending()
        await self._end("keeper")

    async def stop_reading(self) -> None:
        await super().stop_reading()
        await self._end("table-reader")
        if not self._slots:
            return
        done, late = await asyncio.wait(self._slots, timeout=END_LIMIT_S)
        assert not late, f"{len(late)} members did not close within {END_LIMIT_S} s"
        for slot in done:
            slot.result()

    # --- the compacted topic ----------------------------------------------------------------------

    async def _keep(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        await self.compacted.write(name, client, rng, lambda: self._is_sending)
        client.close()

    async def _read_table(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        await self.compacted.read_now_and_then(client, rng, lambda: self._is_reading)
        client.close()

    async def _read_table_in_the_end(self) -> None:
        process = self._process("final-table-reader")
        topic_id = self._cluster.topic_id(COMPACTED)
        histories = [history for key, history in self._histories.items() if key[0] == topic_id]

        async def read() -> None:
            client = self._client(process)
            await self.compacted.read_in_the_end(client, histories)
            client.close()

        await process.run(read())

    # --- slots ------------------------------------------------------------------------------------

    async def _fill_slot(self, number: int, host: Host) -> None:
        world = self._cluster.world
        rng = world.new_random(f"slot {number}")
        instance = f"instance-{number}" if rng.random() < STATIC_SHARE else None
        lives = 0
        await asyncio.sleep(rng.uniform(0, 4))
        while self._reads():
            lives += 1
            member = self._begin(f"member-{number}.{lives}", host, rng, instance)
            while not member.is_over:
                patience_s = rng.uniform(*PATIENT_S) if self._is_wild else 0.5
                await self._wait(member, patience_s)
                if not self._reads():
                    member.wants_to_leave = True
                elif self._is_wild and not member.is_over:
                    successor = await self._break(member, host, rng, lives)
                    if successor is not None:
                        lives += 1
                        member = successor
            self._kill(member)
            if self._is_wild:
                await asyncio.sleep(rng.uniform(*AWAY_S) * rng.random())

    def _reads(self) -> bool:
        return self._is_reading

    def _begin(self, name: str, host: Host, rng: random.Random, instance: str | None) -> Member:
        process = host.process(name)
        member = Member(name, process, random.Random(rng.getrandbits(64)), instance)
        member.task = process.start(self._live(member))
        return member

    def _kill(self, member: Member) -> None:
        if not member.is_over:
            self.recorder.killed(member.name)
        self.invariants.consumers.pop(member.process, None)
        member.process.kill()

    async def _wait(self, member: Member, limit_s: float) -> None:
        assert member.task is not None
        await asyncio.wait(
            (member.task, member.process.exited),
            timeout=limit_s,
            return_when=asyncio.FIRST_COMPLETED,
        )

    async def _break(
        self, member: Member, host: Host, rng: random.Random, lives: int
    ) -> Member | None:
        """Disturbs a member. Returns the member that is left, where another one came beside it."""
        trace = self._cluster.world.trace
        static = member.config.group_instance_id
        what = rng.choice(("leave", "crash", "crash", "pause", "cut", "replace"))
        trace.note(f"SLOT {member.name}: {what}")
        if what == "leave":
            member.wants_to_leave = True
            await self._wait(member, 30.0)
        elif what == "crash":
            self._kill(member)
        elif what == "cut":
            servers: list[NetworkHost] = [rng.choice(self._cluster.hosts)]
            network = self._cluster.world.network
            network.cut([host], servers, both_ways=rng.random() < 0.7)
            await asyncio.sleep(rng.uniform(0.3, 8.0))
            network.heal([host], servers)
        elif what == "pause" or static is None:
            member.process.pause()
            await asyncio.sleep(rng.uniform(0.5, 15.0))
            member.process.resume()
        else:
            # Another member takes over the instance, while this one does not hear of it.
            member.process.pause()
            successor = self._begin(f"{member.name}-again", host, rng, static)
            await asyncio.sleep(rng.uniform(0.2, 6.0))
            member.process.resume()
            # One of the two is fenced: the first, or the second where the first lost its session
            # and joined again.
            while not member.is_over and not successor.is_over:
                await self._wait(member, 0.5)
            loser, winner = (member, successor) if member.is_over else (successor, member)
            self._kill(loser)
            return winner
        return None

    # --- a life -----------------------------------------------------------------------------------

    async def _live(self, member: Member) -> None:
        client = self._client(member.process)
        name, recorder, rng = member.name, self.recorder, member.rng

        async def assigned(places: set[TopicPartition]) -> None:
            epoch = (await consumer.group_membership()).member_epoch
            recorder.owns(name, GROUP, epoch, places)
            member.owned |= places
            if rng.random() < 0.3:
                await see_commits(epoch, places)

        async def see_commits(epoch: int, places: set[TopicPartition]) -> None:
            with contextlib.suppress(TimeoutError):
                found = await consumer.committed(places)
                # If the member has owned them all the time, no other member has committed since.
                now = (await consumer.group_membership()).member_epoch
                if now == epoch and self.invariants.owns(consumer, places):
                    recorder.commits_seen(name, GROUP, found)

        async def revoked(places: set[TopicPartition]) -> None:
            if member.style in ("each poll", "sometimes"):
                await self._commit(consumer, member, places)
            # A member that was out of the group, and has not heard of it, gives up partitions that
            # other members may own by now.
            is_owner = self.invariants.owns(consumer, places)
            how: Literal["closed", "revoked"] = "closed" if member.wants_to_leave else "revoked"
            given_up(places, how if is_owner else "lost")

        def given_up(
            places: set[TopicPartition], how: Literal["closed", "revoked", "lost"] = "lost"
        ) -> None:
            recorder.released(name, places, how)
            member.owned -= places
            for place in places:
                member.positions.pop(place, None)
                member.committed.pop(place, None)

        consumer = AsyncConsumer(
            client,
            member.config,
            self.topics,
            group=GROUP,
            callbacks=Callbacks(assigned, revoked, given_up),
        )
        self.invariants.consumers[member.process] = consumer
        while not member.wants_to_leave:
            try:
                records = await consumer.poll(0.5)
            except (MaxPollIntervalError, TimeoutError):
                continue  # The member was too slow, or no broker answered.
            except FencedMemberError:
                break
            recorder.polled(name, records)
            polled = {TopicPartition(record.topic, record.partition) for record in records}
            if not polled <= member.owned:
                self.problems.append(f"{name} polled {polled}, it owns {member.owned}")
            await self._work(member, records)
            if member.style == "each poll" or (member.style == "sometimes" and rng.random() < 0.3):
                await self._commit(consumer, member, set(member.positions))
            elif member.style == "auto" and records:
                # The polled records are processed: the next poll may commit them.
                recorder.committing(name, GROUP, {})
            elif member.style == "behind" and records:
                member.process.start(self._commit(consumer, member, set(member.positions)))
        self.invariants.consumers.pop(member.process, None)  # The member does not read any more.
        await consumer.close()
        client.close()

    async def _work(self, member: Member, records: list[Record]) -> None:
        if records:
            await asyncio.sleep(member.rng.uniform(0, member.work_s))
            if self._is_wild and member.is_slow and member.rng.random() < 0.05:
                await asyncio.sleep(member.rng.uniform(3.0, 9.0))
        for record in records:
            place = TopicPartition(record.topic, record.partition)
            member.positions[place] = record.offset + 1
            if record.offset == self.processed.get(place, 0):
                self.processed[place] = record.offset + 1

    async def _commit(
        self, consumer: AsyncConsumer, member: Member, places: set[TopicPartition]
    ) -> None:
        positions = {
            place: offset
            for place, offset in member.positions.items()
            if place in places and member.committed.get(place) != offset
        }
        if not positions:
            return
        number = self.recorder.committing(member.name, GROUP, positions)
        try:
            await consumer.commit(positions)
        except (CommitRefusedError, TimeoutError, ClosedError) as error:
            self.recorder.not_committed(member.name, number, error)
            return
        self.recorder.committed(member.name, number)
        member.committed.update(positions)
        self._check_committed(member, positions)

    def _check_committed(self, member: Member, positions: dict[TopicPartition, int]) -> None:
        """Positions whose commit was acknowledged are in the group's log."""
        for place, offset in positions.items():
            found = self.invariants.highest(GROUP, place.partition)
            if found < offset:
                self.problems.append(
                    f"{member.name} was told that {offset} is committed for {place}; committed is "
                    f"{found}"
                )

"""Changes of metadata, many at once and often repeated, while controllers come and go.

Each changer, a client process, owns a few names of topics. It creates and deletes them, changes
their config and adds partitions, for several names at the same time, so that a controller that is
cut off has a long tail of changes that nobody committed. Some changes go to all brokers at once
under one request id, as a client repeats one whose answer was lost.

Because nobody else changes a name, its changer knows what the cluster may say of it: one state
after an answer, two after a time-out. Each answer about metadata is held against that, and in the
end what all brokers say. What servers answer each other is judged by `metadata_answers`.

Changers also write single records to their topics. At the end each topic that exists has all the
records that were acknowledged to it, however often its name had other topics before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from proving.simulation import buggify
from proving.simulation.buggify import Disturbance
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import SYNC_S
from proving.simulation.faults_metadata import OF_METADATA
from proving.simulation.principals import Rights, may
from proving.simulation.process import Process
from proving.simulation.workload import Workload
from rayq import messages
from rayq.actors.metadata import quorum, snapshot_parts
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.errors import DeliveryError, InvalidReplicationFactorError, RayqError, TimeoutError
from rayq.records import TopicPartition

CHANGERS = 2
NAMES = 3
"""The number of names that each changer owns."""
NOBODYS_TOPIC = "no-such-topic"
PARTITIONS_MAX = 3
REPLICAS = 2
PAUSE_S = 0.3
"""About how long a changer pauses between two rounds."""
TIMEOUTS_S = (0.5, 2.0, 6.0)
ATTEMPT_S = 1.5
"""The time that one broker has to answer a repeated change."""
POINTS = (
    "false-alarms",
    "late-timers",
    "late-threads",
    "stutters",
    "late-bytes",
    "breaking-connections",
    "early-write-backs",
    "short-writes",
)
"""The points of `buggify` that matter to metadata."""
POINTS_MAX = 3
PUSHES_BYTES_MAX = (500, 2_000, quorum.APPEND_BYTES_MAX)
"""Choices of a seed for the maximum size of a push to a voter: a tail takes several pushes."""
PARTS_BYTES_MAX = (60, 400, snapshot_parts.PART_BYTES_MAX)
"""Choices of a seed for the maximum size of a part of a snapshot: controllers change, and brokers
end, between two of them."""
LOOK_TIMEOUT_S = 5.0
SERIAL_KEY = "delete_retention_ms"
"""A config that says nothing to these topics, as nothing compacts them."""
WRITE_TIMEOUT_MS = 3_000
WRITE_SHARE = 0.7
"""The share of rounds in which a changer writes to a topic that exists."""


class TopicState(NamedTuple):
    """A topic as its changer knows it."""

    serial: int
    """The serial number of the last change of its config, kept in SERIAL_KEY."""
    partitions: int


Possible = frozenset[TopicState | None]
"""All that the cluster may say of a name. None: there is no such topic."""


class MetadataWorkload(Workload):
    """See the module."""

    fault_kinds = OF_METADATA
    syncs_s = (SYNC_S, (0.005, 0.1))
    lose_disks = False
    records_min = 100
    lasts_s = 34.0
    heals_at_s = 30.0
    points: frozenset[str] = frozenset()
    push_bytes_max = quorum.APPEND_BYTES_MAX
    part_bytes_max = snapshot_parts.PART_BYTES_MAX

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self._disturbance = Disturbance(cluster, self.points)
        self._may_change = True
        self._serial = 0
        self._known: dict[str, Possible] = {}
        self._written: dict[str, list[bytes]] = {}
        """The acknowledged records of each topic id."""
        self._ends: dict[tuple[str, TopicPartition], int] = {}
        """The end that each partition of a topic id has at least, by what was acknowledged."""

    @classmethod
    def of_seed(cls, seed: int, features: frozenset[str] | None) -> type[MetadataWorkload]:
        rng = random.Random(f"{seed}/metadata")
        points = frozenset(rng.sample(POINTS, rng.randint(0, POINTS_MAX)))
        drawn = {
            "points": points,
            "push_bytes_max": rng.choice(PUSHES_BYTES_MAX),
            "part_bytes_max": rng.choice(PARTS_BYTES_MAX),
        }
        return type(cls.__name__, (cls,), drawn)

    @classmethod
    @contextlib.contextmanager
    def conditions(cls, seed: int) -> Iterator[None]:
        with (
            buggify.patched(cls.points),
            mock.patch.object(quorum, "APPEND_BYTES_MAX", cls.push_bytes_max),
            mock.patch.object(snapshot_parts, "PART_BYTES_MAX", cls.part_bytes_max),
        ):
            yield

    @classmethod
    def broker_count(cls, rng: random.Random) -> int:
        return rng.choice((3, 3, 4))

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "metadata_snapshot_records": rng.choice((10, 40, 10_000)),
            **buggify.options(cls.points),
        }

    def rights(self) -> Rights:
        change = [
            *may("create", "topic", "changer-*"),
            *may("delete", "topic", "changer-*", NOBODYS_TOPIC),
            *may("alter", "topic", "changer-*"),
            *may("alter_configs", "topic", "changer-*"),
            *may("read", "topic", "changer-*"),
            *may("write", "topic", "changer-*"),
        ]
        return {**super().rights(), "changer|final-reader-of-changed-topics": change}

    def start(self) -> None:
        super().start()
        self._disturbance.start()
        for number in range(CHANGERS):
            self._start(f"changer-{number}", self._change_topics)

    def calm_down(self) -> None:
        super().calm_down()
        self._may_change = False
        self._disturbance.calm_down()

    async def read_all(self, limit_s: float) -> int:
        await self._end("changer")
        await self._wait_for_none(self._wrong_names, "are not as they were left")
        process = self._process("final-reader-of-changed-topics")
        await process.run(self._read_changed_topics(process, limit_s))
        return await super().read_all(limit_s)

    async def _read_changed_topics(self, process: Process, limit_s: float) -> None:
        """Reads every topic that its changer left, and looks for the records it was told of."""
        client = self._client(process)
        left = [name for name, possible in self._known.items() if None not in possible]
        await client.refresh(left, timeout_s=limit_s)
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        until_s = self._cluster.world.now_s + limit_s
        for name in left:
            topic = client.metadata.topics[name]
            places = [TopicPartition(name, number) for number in range(len(topic.partitions))]
            await consumer.assign(places)
            ends = await consumer.end_offsets(places)
            values: set[bytes] = set()
            while any([await consumer.position(place) < ends[place] for place in places]):
                assert self._cluster.world.now_s < until_s, f"reading {name} took {limit_s} s"
                values.update(record.value or b"" for record in await consumer.poll(1.0))
            lost = set(self._written.get(topic.topic_id, ())) - values
            assert not lost, f"{name} lacks {sorted(lost)}, which were acknowledged"
        await consumer.close()
        client.close()

    def _wrong_names(self) -> list[str]:
        """The names of which any broker knows something else than their changer."""
        wrong = []
        for number, broker in self._cluster.brokers.items():
            state = broker.metadata.state
            for name, possible in self._known.items():
                topic = state.topic_named(name)
                found = topic and _topic_state(topic.whole_config, len(topic.partitions))
                if found not in possible:
                    wrong.append(f"{name} on broker {number}: {found}, not of {set(possible)}")
        return wrong

    # --- a changer --------------------------------------------------------------------------------

    async def _change_topics(self, changer: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        numbers = itertools.count()
        names = [f"{changer}-topic-{next(numbers)}" for _ in range(NAMES)]
        self._known.update((name, frozenset([None])) for name in names)
        producer = AsyncProducer(client, ProducerConfig(delivery_timeout_ms=WRITE_TIMEOUT_MS))
        consumer = AsyncConsumer(client, ConsumerConfig())
        while self._may_change:
            chosen = rng.sample(names, rng.randint(1, NAMES))
            await asyncio.gather(
                self._ask_in_vain(client, rng),
                *(self._change(client, rng, name) for name in chosen),
            )
            left = [name for name in chosen if len(self._known[name]) == 1]
            there = [name for name in left if None not in self._known[name]]
            with contextlib.suppress(RayqError):
                await client.refresh(there, timeout_s=LOOK_TIMEOUT_S)
                ids = {name: client.metadata.topics[name].topic_id for name in there}
                await asyncio.gather(
                    *(self._look_at_ends(consumer, *topic) for topic in ids.items()),
                    *(
                        self._write(producer, name, topic_id)
                        for name, topic_id in ids.items()
                        if rng.random() < WRITE_SHARE
                    ),
                )
            for place, name in enumerate(names):
                if len(self._known[name]) > 1:  # A change may come late: take another name.
                    names[place] = f"{changer}-topic-{next(numbers)}"
                    self._known[names[place]] = frozenset([None])
            await asyncio.sleep(rng.uniform(0, 2 * PAUSE_S))
        with contextlib.suppress(DeliveryError):  # Each record's own outcome has the error.
            await producer.close()
        await consumer.close()
        client.close()

    async def _look_at_ends(self, consumer: AsyncConsumer, name: str, topic_id: str) -> None:
        """Holds the ends of a topic's partitions against what was acknowledged to it."""
        ends = {place: end for (of, place), end in self._ends.items() if of == topic_id}
        with contextlib.suppress(RayqError):
            found = await consumer.end_offsets(list(ends)) if ends else {}
            for place, end in ends.items():
                if found[place] < end:
                    self.problems.append(f"{place} ends at {found[place]}, not at {end} or later")

    async def _write(self, producer: AsyncProducer, name: str, topic_id: str) -> None:
        value = b"%s %d" % (name.encode(), self._serial)
        with contextlib.suppress(RayqError):
            written = await producer.send_and_wait(name, value)
            self._written.setdefault(topic_id, []).append(value)
            place = TopicPartition(name, written.partition)
            assert written.offset is not None  # It is known with acks="all".
            end = max(self._ends.get((topic_id, place), 0), written.offset + 1)
            self._ends[topic_id, place] = end

    async def _ask_in_vain(self, client: Client, rng: random.Random) -> None:
        """A change that is refused, while others are under way: what it is based on may not be
        committed yet."""
        await asyncio.sleep(rng.uniform(0, 0.05))
        timeout_s = rng.choice(TIMEOUTS_S)
        with contextlib.suppress(RayqError):
            await client.change(messages.DeleteTopic(NOBODYS_TOPIC), timeout_s=timeout_s)

    async def _change(self, client: Client, rng: random.Random, name: str) -> None:
        (state,) = before = self._known[name]
        request, after = self._choose(rng, name, state)
        self._known[name] = before | {after}  # Until it is answered, both may be seen.
        timeout_s = rng.choice(TIMEOUTS_S)
        try:
            if rng.random() < 0.5:
                await client.change(request, timeout_s=timeout_s)
            else:
                await self._repeat(client, request, timeout_s)
        except RayqError as error:
            if not error.retriable:
                self._known[name] = before
                if not isinstance(error, InvalidReplicationFactorError):
                    self.problems.append(f"{name} is {state}; {request} was refused: {error}")
        else:
            self._known[name] = frozenset([after])
        if rng.random() < 0.5:
            await self._look(client, name)

    def _choose(
        self, rng: random.Random, name: str, state: TopicState | None
    ) -> tuple[messages.Change, TopicState | None]:
        """A change of a topic in this state, and the state after it."""
        self._serial += 1
        config: messages.ConfigOptions = {SERIAL_KEY: self._serial}
        if state is None:
            partitions = rng.randint(1, PARTITIONS_MAX - 1)
            request = messages.CreateTopic(name, partitions, REPLICAS, config)
            return request, TopicState(self._serial, partitions)
        draw = rng.random()
        if draw < 0.35:
            return messages.DeleteTopic(name), None
        if draw < 0.5 and state.partitions < PARTITIONS_MAX:
            partitions = state.partitions + 1
            return messages.CreatePartitions(name, partitions), TopicState(
                state.serial, partitions
            )
        return messages.AlterTopicConfig(name, config), TopicState(self._serial, state.partitions)

    async def _repeat(self, client: Client, request: messages.Change, timeout_s: float) -> None:
        """Sends a change to all brokers at once, and to all again until one confirms it."""
        request = msgspec.structs.replace(request, request_id=client.environment.new_id())
        until_s = client.now + timeout_s
        error: RayqError | None = None
        while client.now < until_s:
            attempts = [
                client.ask(address, request, timeout_s=min(ATTEMPT_S, timeout_s))
                for address in client.addresses()
            ]
            for outcome in await asyncio.gather(*attempts, return_exceptions=True):
                if isinstance(outcome, tuple):
                    answer: messages.ChangeResponse = outcome[0]
                    client.metadata.require(answer.version)
                    return
                if not isinstance(outcome, RayqError):
                    raise outcome
                if error is None or not outcome.retriable:
                    error = outcome
            if error is not None and not error.retriable:
                raise error
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{type(request).__name__} was not confirmed: {error}")

    async def _look(self, client: Client, name: str) -> None:
        """Holds what the cluster says of a name against what it may say."""
        with contextlib.suppress(RayqError):
            await client.refresh([name], timeout_s=LOOK_TIMEOUT_S)
            topic = client.metadata.topics.get(name)
            found = topic and _topic_state(topic.config, len(topic.partitions))
            if found not in self._known[name]:
                self.problems.append(
                    f"{name} is {found}, says a broker; it may be {set(self._known[name])}"
                )


def _topic_state(config: dict[str, Any], partitions: int) -> TopicState:
    return TopicState(config[SERIAL_KEY], partitions)

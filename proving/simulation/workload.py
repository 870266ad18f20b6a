"""The ordinary clients of a simulated cluster, and the history of what they did and saw.

The clients are three producers (acks="all", idempotent, keyed records) and two consumers, each a
process on a host of its own. Consumers read all partitions from the beginning; the second begins
again now and then. A watcher asks for the end of each partition, which never goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from proving.simulation.charged import is_charged
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import SYNC_S
from proving.simulation.faults import Injection
from proving.simulation.faults_ordinary import ORDINARY
from proving.simulation.guests import Guest, Stranger
from proving.simulation.invariants import Invariants
from proving.simulation.new_topic import create_topic
from proving.simulation.owner import Owner
from proving.simulation.principals import Principals, Rights, has_principals, may
from proving.simulation.process import Process
from proving.simulation.world import Host
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.core.access.rights import Needed
from rayq.errors import DeliveryError, RayqError
from rayq.records import RecordMetadata, TopicPartition
from rayq.testing.checker import Recorder

TOPICS = ("orders", "payments")
PARTITIONS = 2
PRODUCERS = 3
CONSUMERS = 2
KEYS = 5
ROUND_S = 0.4
"""About how long a producer pauses after it has sent some records."""
ROUND_RECORDS_MAX = 8
AGAIN_S = (8.0, 25.0)
"""The second consumer begins again after this time."""
WATCH_S = 0.5
"""About how often the watcher asks for the end of each partition."""
DELIVERY_TIMEOUTS_MS = (4_000, 15_000, 120_000)
Work = Callable[[str, Process, random.Random], Coroutine[Any, Any, None]]


class Workload:
    """See the module. `create_topics`, `start`, later `stop_sending`, then `read_all`."""

    topics: tuple[str, ...] = TOPICS
    """The topics that the checker judges: values are unique, and every record stays."""
    partitions = PARTITIONS
    topics_on_disk: tuple[str, ...] = TOPICS
    """The topics whose disks fail."""
    fault_kinds: Sequence[Injection] = ORDINARY
    more_faults: Sequence[Injection] = ()
    """Faults beside `fault_kinds`; they also come just when another fault's victim is coming
    back."""
    lose_disks = True
    """True if a broker may lose its disk, for which all replicas have to be in sync first."""
    lasts_s = 60.0
    """The number of virtual seconds that it runs; longer where recovery or the records take longer.
    """
    records_min = 1_000
    """Minimum number of acknowledged records: the run lasts until then."""
    syncs_s: Sequence[tuple[float, float]] = (SYNC_S, (0.005, 0.1), (0.02, 0.3))
    cuts_brokers = True
    """False: no broker is cut off from the others, since a session that ends is judged."""
    """The sync time of a seed's disks."""
    heals_at_s = 48.0
    """The end of the faults."""
    faults_min = 8
    """Minimum number of faults: they end no earlier."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        world = cluster.world
        self.recorder = Recorder()
        self.hosts: list[Host] = []
        self._cluster = cluster
        self._rng = world.new_random("workload")
        self._is_sending = True
        self._is_reading = True
        self._tasks: list[tuple[Process, asyncio.Task[None]]] = []
        self.acknowledged_by: dict[str, int] = {}
        self.principals: Principals | None = None
        """The principals of the seed, if it has any."""
        self._has_guests = True
        self.problems: list[str] = []
        """The problems that clients saw, besides those that the checker finds in the history."""
        self.topic_options: dict[str, Any] = {
            "segment_bytes": self._rng.choice((4096, 16_384, 1 << 20)),
            "index_interval_bytes": self._rng.choice((256, 4096)),
        }

    @classmethod
    def of_seed(cls, seed: int, features: frozenset[str] | None) -> type[Workload]:
        """The scenario with what a seed settles before its world exists. `features` replace those
        that the seed would draw, in scenarios that draw any."""
        return cls

    @classmethod
    def is_charged(cls, seed: int, features: frozenset[str] | None) -> bool:
        """Returns whether computing takes time in this seed."""
        return is_charged(seed, features)

    @classmethod
    def has_principals(cls, seed: int, features: frozenset[str] | None) -> bool:
        """Returns whether clients log in as principals in this seed."""
        return has_principals(seed, features)

    def rights(self) -> Rights:
        """The rights that each kind of client needs, of those that may be principals."""
        write, read = may("write", "topic", *self.topics), may("read", "topic", *self.topics)
        return {"producer": write, "consumer": read, "watcher": read, "final-reader": read}

    def rights_of_guests(self) -> Sequence[Needed]:
        """The rights that come and go."""
        topic = self.topics[0]
        return [
            Needed(operation, "topic", topic) for operation in ("read", "write", "alter_configs")
        ]

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        """Further fields of the seed's `ClusterConfig`."""
        return {}

    @classmethod
    def broker_count(cls, rng: random.Random) -> int:
        """The number of brokers of the seed's cluster."""
        return 3

    def observer(self, invariants: Invariants) -> Callable[[Owner], None]:
        """The function that is called after each event."""
        return invariants.observe

    @classmethod
    def conditions(cls, seed: int) -> AbstractContextManager[None]:
        """Returns a context for the run of a seed, with constants that a run is too small for
        lowered."""
        return contextlib.nullcontext()

    def judging(self) -> AbstractContextManager[None]:
        """Returns a context in which the workload judges methods of servers, while the seed
        runs."""
        return contextlib.nullcontext()

    def calm_down(self) -> None:
        """Ends for good what clients do that disturbs others."""

    @property
    def places(self) -> list[TopicPartition]:
        numbers = range(self.partitions)
        return [TopicPartition(topic, number) for topic in self.topics for number in numbers]

    async def create_topics(self) -> None:
        process = self._process("admin")

        async def create() -> None:
            client = self._client(process)
            for topic in self.topics:
                await create_topic(client, topic, self.partitions, **self.topic_options)
            client.close()

        await process.run(create())

    def start(self) -> None:
        for number in range(PRODUCERS):
            self._start(f"producer-{number}", self._produce)
        for number in range(CONSUMERS):
            self._start(f"consumer-{number}", self._consume)
        self._start("watcher", self._watch_ends)

    async def set_up_principals(self) -> None:
        """Makes the principals of the seed."""
        assert self.principals is not None
        process = self._process("access-admin")
        await process.run(self.principals.set_up(self._client(process)))

    def start_guests(self) -> None:
        """Starts the clients whose rights come and go, and the one that has none."""
        assert self.principals is not None
        for guest in self.principals.guests:
            self._start(guest.name, self._be_a_guest)
        self._start(self.principals.stranger.name, self._be_a_stranger)

    async def end_guests(self) -> None:
        """Returns once everything that guests sent has an outcome."""
        assert self.principals is not None
        self._has_guests = False
        for login in (*self.principals.guests, self.principals.stranger):
            await self._end(login.name)

    async def stop_sending(self) -> None:
        """Returns once every record that was sent has an outcome."""
        self._is_sending = False
        await self._end("producer")

    async def stop_reading(self) -> None:
        self._is_reading = False
        await self._end("consumer")
        await self._end("watcher")

    async def read_all(self, limit_s: float) -> int:
        """One more consumer reads each partition up to its end. Returns the number of records.
        Raises AssertionError when that takes longer than `limit_s`."""
        process = self._process("final-reader")
        world = self._cluster.world

        async def read() -> int:
            client = self._client(process)
            consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
            for place in self.places:
                self.recorder.assigned("final-reader", *place, reads_all=True)
            await consumer.assign(self.places)
            ends = await consumer.end_offsets(self.places)
            count = 0
            deadline_s = world.now_s + limit_s
            while any([await consumer.position(place) < ends[place] for place in self.places]):
                assert world.now_s < deadline_s, f"the final read took more than {limit_s} s"
                records = await consumer.poll(1.0)
                self.recorder.polled("final-reader", records)
                count += len(records)
            await consumer.close()
            client.close()
            return count

        return await process.run(read())

    # --- inside -----------------------------------------------------------------------------------

    async def _wait_for_none(
        self, find: Callable[[], list[str]], what: str, *, limit_s: float = 60.0
    ) -> None:
        """Waits until `find` finds nothing. Raises AssertionError after `limit_s`."""
        until_s = self._cluster.world.now_s + limit_s
        while found := find():
            assert self._cluster.world.now_s < until_s, (
                f"{found[:20]} ({len(found)}) {what}, after {limit_s} s.\n"
                f"{self._cluster.describe()}"
            )
            await asyncio.sleep(0.1)

    def _process(self, name: str) -> Process:
        host = self._cluster.world.host(name)
        self.hosts.append(host)
        return host.process(name)

    def _client(self, process: Process) -> Client:
        cluster = self._cluster
        endpoints = cluster.endpoints
        self._rng.shuffle(endpoints)
        identity = cluster.client_identity
        if self.principals is not None:
            identity = self.principals.identity_of(process)
        return Client(process.environment, identity, endpoints, cluster.config)

    def _start(self, name: str, work: Work) -> None:
        process = self._process(name)
        rng = self._cluster.world.new_random(name)
        self._tasks.append((process, process.start(work(name, process, rng))))

    async def _end(self, kind: str) -> None:
        for process, task in self._tasks:
            if process.name.startswith(kind) and process.alive:
                await asyncio.wait([task])
                task.result()

    async def _produce(self, name: str, process: Process, rng: random.Random) -> None:
        recorder = self.recorder
        recorder.opened(name)
        self.acknowledged_by[name] = 0
        client = self._client(process)
        producer = AsyncProducer(
            client,
            ProducerConfig(
                delivery_timeout_ms=rng.choice(DELIVERY_TIMEOUTS_MS),
                request_timeout_ms=rng.choice((2_000, 5_000)),
                batch_size=rng.choice((512, 65_536)),
                linger_ms=rng.choice((0, 5, 50)),
            ),
        )
        count = 0
        while self._is_sending:
            for _ in range(rng.randint(1, ROUND_RECORDS_MAX)):
                count += 1
                topic = rng.choice(self.topics)
                key = b"%s-%d" % (name.encode(), rng.randrange(KEYS))
                value = b"%s/%d " % (name.encode(), count) + self._padding(rng)
                number = recorder.sending(name, topic, key, value)
                try:
                    future = await producer.send(topic, value, key=key)
                except RayqError as error:
                    recorder.not_delivered(name, number, error)
                else:
                    future.call_on_delivery(partial(self._note_delivery, name, number))
            await asyncio.sleep(rng.uniform(0, 2 * ROUND_S))
        try:
            await producer.close()
        except DeliveryError:
            pass  # Each record's own outcome has the error.
        client.close()

    @property
    def _guest_places(self) -> list[TopicPartition]:
        return [place for place in self.places if place.topic == self.topics[0]]

    async def _be_a_guest(self, name: str, process: Process, rng: random.Random) -> None:
        self.acknowledged_by[name] = 0

        def acknowledged() -> None:
            self.acknowledged_by[name] += 1

        principals = self.principals
        assert principals is not None
        guest = Guest(
            name,
            process,
            rng,
            self._client,
            self._cluster.endpoints,
            self._guest_places,
            self.recorder,
            acknowledged,
            lambda: name in principals.eager,
        )
        await guest.live(lambda: self._has_guests)

    def _superuser(self, process: Process) -> Client:
        """A superuser's client in a process whose other clients may be principals: it finds out
        what others know."""
        cluster = self._cluster
        return Client(
            process.environment, cluster.client_identity, cluster.endpoints, cluster.config
        )

    async def _be_a_stranger(self, name: str, process: Process, rng: random.Random) -> None:
        assert self.principals is not None
        client, victim = self._client(process), self.principals.guests[0].name
        spy = self._superuser(process)
        stranger = Stranger(name, client, spy, rng, self.places, self.recorder, victim)
        await stranger.live(lambda: self._has_guests)
        client.close()
        spy.close()

    def _padding(self, rng: random.Random) -> bytes:
        """Padding of values."""
        return b"." * rng.randint(0, 200)

    def _note_delivery(
        self,
        name: str,
        number: int,
        metadata: RecordMetadata | None,
        error: BaseException | None,
    ) -> None:
        if metadata is not None:
            self.acknowledged_by[name] += 1
        self.recorder.outcome(name, number, metadata, error)

    async def _consume(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        world = self._cluster.world
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        starts_over = name.endswith("1")
        again_s = 0.0
        while self._is_reading:
            if again_s == 0.0 or (starts_over and world.now_s > again_s):
                again_s = world.now_s + rng.uniform(*AGAIN_S)
                await consumer.assign(self.places)
                for place in self.places:
                    self.recorder.assigned(name, *place)
            self.recorder.polled(name, await consumer.poll(0.5))
        await consumer.close()
        client.close()

    async def _watch_ends(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        consumer = AsyncConsumer(client, ConsumerConfig())

        async def watch(place: TopicPartition) -> None:
            highest = 0
            while self._is_reading:
                with contextlib.suppress(RayqError):  # There was no leader for too long: ask again.
                    end = (await consumer.end_offsets([place]))[place]
                    assert end >= highest, f"the end of {place} goes back from {highest} to {end}"
                    highest = end
                await asyncio.sleep(rng.uniform(0, 2 * WATCH_S))

        await asyncio.gather(*(watch(place) for place in self.places))
        await consumer.close()
        client.close()

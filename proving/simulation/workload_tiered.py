"""Topics whose old records are in an object store, and clients that read them in every way.

The ordinary clients write and read `orders`, which keeps everything: judged by the checker, whose
final reader has to find every acknowledged record. A *prober* reads a few records from any offset
on, and asks which offset a time has. A *direct reader* asks leaders for objects and reads those.
The oldest records of `clicks` go, by retention over store and disk, and by `delete_records`; a
*pinner* keeps them from retention for a while. An *undertaker* makes topics, fills and deletes
them.

In the end everything is stored, and once other leaders were elected and have swept, the store holds
nothing that nobody refers to.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import SYNC_S
from proving.simulation.faults import Injection
from proving.simulation.faults_aimed import (
    OF_REMOTE_STORAGE,
    OF_TRANSACTIONS,
    PATIENCE_S,
    lists_being_loaded,
)
from proving.simulation.faults_groups import WITH_GROUPS
from proving.simulation.faults_remote import WITH_REMOTE_STORAGE
from proving.simulation.invariants import Invariants
from proving.simulation.invariants_tiered import TieredInvariants
from proving.simulation.new_topic import create_topic
from proving.simulation.object_store import ProcessObjectStore
from proving.simulation.owner import Owner
from proving.simulation.patches import applied
from proving.simulation.principals import Rights, may
from proving.simulation.process import Process
from proving.simulation.server_view import open_log_of, role_of
from proving.simulation.trimmed_topic import PARTITIONS as TRIMMED_PARTITIONS
from proving.simulation.trimmed_topic import TOPIC as TRIMMED
from proving.simulation.trimmed_topic import TrimmedTopic
from proving.simulation.unclean_topic import PLACE as UNCLEAN_PLACE
from proving.simulation.unclean_topic import TOPIC as UNCLEAN
from proving.simulation.unclean_topic import UncleanTopic, elect_uncleanly
from proving.simulation.workload import Workload
from proving.simulation.workload_moves import OPERATORS, Operators
from proving.simulation.workload_transactions import TransactionWorkload
from rayq import messages
from rayq.actors.broker import remote_garbage
from rayq.actors.remote import catch_up, object_collector
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica import Replica
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.errors import DeliveryError, OffsetOutOfRangeError, RayqError, RemoteMissingError
from rayq.messages.remote_names import parse_name
from rayq.records import Record, TopicPartition
from rayq.storage.batch import decode_columns, split_batches
from rayq.storage.log import Log
from rayq.storage.remote import data_object, manifest

URL = "s3://simulated/rayq"
END_LIMIT_S = 90.0
QUESTION_TIMEOUT_S = 6.0
PROBE_S = 1.0
PROBED_MAX = 20
PIN_S = 6.0
LIST_LOOK_S = 0.002
UNCLEAN_SHARE = 8
"""The weight of unclean elections among the faults, where there is a topic for it."""
BURY_S = 8.0
BRIEF = "brief-"
"""The prefix of the names of the topics that are deleted."""
OBJECT_BYTES = 4096
SMALL = (
    (manifest, "PAGE_OBJECTS", 3),
    (manifest, "ROOT_OBJECTS_MAX", 6),
    (data_object, "OBJECT_DATA_BYTES_MAX", OBJECT_BYTES),
    (data_object, "PLACE_BYTES", 512),
    (data_object, "CRC_BYTES", 1024),
    (remote_garbage, "LATE_PUTS_MS", 65_000),  # Lists may be a minute old.
    (remote_garbage, "CHECK_INTERVAL_S", 2.0),
    (remote_garbage, "CLOCK_LOOK_S", 0.2),
    (object_collector, "SUPERSEDED_S", 10.0),
    (catch_up, "LISTING_DELAY_S", 5.0),
)
"""Constants of the code that a run is too small for."""


class TieredTopic(TrimmedTopic):
    """The topic whose oldest records go, from disks and from the store."""

    def __init__(
        self, cluster: SimulatedCluster, rng: random.Random, problems: list[str]
    ) -> None:
        super().__init__(cluster, rng, problems)
        self.retention_bytes = rng.choice((None, 6_000, 20_000))
        self.options |= {"retention_bytes": self.retention_bytes}
        self.unit_bytes = self.options["segment_bytes"] + OBJECT_BYTES
        # Where operators delete records, little is left for retention.
        self._deletes = cluster.world.new_random("deletions").random() < 0.5

    async def trim(self, client: Client, rng: random.Random, is_on: Callable[[], bool]) -> None:
        if self._deletes:
            await super().trim(client, rng, is_on)

    def fault_of_start(
        self, replica: Replica, log: Log, bytes_between: Callable[[int, int], int]
    ) -> str | None:
        """The reason why the log of a replica must not start where it does. None: it may.
        `bytes_between(start, end)` are the bytes of committed batches."""
        partition, start = replica.assignment.partition, log.start_offset
        asked = self._asked[partition]
        if start <= asked:
            return None
        pinned = replica.assignment.pinned_offset
        if not isinstance(role_of(replica), Leader):
            return None if self.retention_bytes is not None else f"{asked} was asked for"
        if pinned is not None and start > pinned:
            return f"{pinned} is pinned, and {asked} was asked for"
        if self.retention_bytes is None:
            return f"{asked} was asked for"
        kept = log.size_bytes + bytes_between(start, max(start, log.local_start_offset))
        if kept < self.retention_bytes - self.unit_bytes:
            return f"{kept} bytes are left, {self.retention_bytes} have to be kept"
        return None

    def _check_what_is_kept(self) -> None:
        """`fault_of_start` says it whenever a log start moves."""


class RemoteStorage(Workload):
    """The part that workloads with remote storage share: the faults, the invariants, and the end,
    in which everything is stored and no garbage is left."""

    more_faults: Sequence[Injection] = (*WITH_REMOTE_STORAGE, *OF_REMOTE_STORAGE)

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        rng = self._remote_rng = cluster.world.new_random("remote storage")
        self.tiered = TieredInvariants(cluster, self._fault_of_start)
        self.topic_options |= {"segment_bytes": rng.choice((1024, 2048, 8192))} | _remote(rng)
        if rng.random() < 0.5:
            # A store is never all well.
            share = rng.choice((0.02, 0.1))
            cluster.objects.faults.refused = cluster.objects.faults.unanswered = share

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            **super().cluster_options(rng),
            "remote_storage_url": URL,
            "remote_delete_delay_ms": rng.choice((500, 3_000, 8_000, 60_000)),
            "remote_sweep_interval_ms": rng.choice((1_000, 5_000)),
            "remote_cache_bytes": rng.choice((0, 5_000, 1 << 20)),
            "remote_read_bytes_per_s": rng.choice((None, 100_000)),
            "remote_upload_bytes_per_s": rng.choice((None, 100_000)),
            "remote_backlog_bytes": rng.choice((None, 40_000)),
            "retention_check_interval_ms": rng.choice((200, 2_000)),
        }

    @classmethod
    @contextlib.contextmanager
    def conditions(cls, seed: int) -> Iterator[None]:
        """Objects, pages and the parts of objects are as small as segments are."""
        with applied(SMALL):
            yield

    def observer(self, invariants: Invariants) -> Callable[[Owner], None]:
        observe_others = super().observer(invariants)
        self.tiered.watch(invariants)

        def observe(owner: Owner) -> None:
            observe_others(owner)
            self.tiered.observe(owner)

        return observe

    async def read_all(self, limit_s: float) -> int:
        await self._wait_for_none(self._not_stored, "are not in the store", limit_s=END_LIMIT_S)
        count = await super().read_all(limit_s)
        self._elect_others()
        await self._cluster.wait_until(
            self._cluster.is_whole, "all replicas in sync again", limit_s=END_LIMIT_S
        )
        delay_s = self._cluster.config.remote_delete_delay_ms / 1000
        await self._wait_for_none(
            self._garbage,
            "are in the store, and nothing refers to them",
            limit_s=END_LIMIT_S + 2 * delay_s,
        )
        await self._wait_for_none(
            lambda: [*self.tiered.state.pins], "are pins that do not end", limit_s=END_LIMIT_S
        )
        self.tiered.check_ends()
        return count

    def _fault_of_start(self, replica: Replica, log: Log) -> str | None:
        if replica.assignment.topic in self.topics:
            return "everything has to be kept"
        return None

    def _not_stored(self) -> list[str]:
        """The partitions whose committed records are not all in the store. (Where wall clocks have
        jumped, a segment may be young for long.)"""
        if any(host.clock_changes for host in self._cluster.hosts):
            return []
        starts = {
            (replica.assignment.topic_id, replica.assignment.partition): log.start_offset
            for _, replica in self._cluster.live_replicas()
            if (log := open_log_of(replica)) is not None
        }
        found = []
        for topic, number, partition in self.tiered.state.all_partitions():
            key = topic.topic_id, number
            end = self.tiered.committed_end(key)
            remote = 0 if partition.remote is None else partition.remote.end
            if topic.config.remote_storage and max(remote, starts.get(key, 0)) < end:
                found.append(f"{topic.name}-{number} ({remote} of {end})")
        return found

    def _elect_others(self) -> None:
        """A leader leaves the objects of its own epoch alone, so only the next one sweeps them."""
        for number in range(len(self._cluster.hosts)):
            for process in self._cluster.replica_processes(number):
                process.kill()

    def _garbage(self) -> list[str]:
        kept = self.tiered.named()
        return [
            name
            for name in self._cluster.objects.names()
            if name not in kept and parse_name(name) is not None
        ]


class TieredWorkload(RemoteStorage, Operators):
    """See the module."""

    topics = ("orders",)
    topics_on_disk: tuple[str, ...] = ("orders", TRIMMED)
    lasts_s = 45.0
    heals_at_s = 36.0
    syncs_s = (SYNC_S, (0.002, 0.03), (0.005, 0.1))

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self.trimmed = TieredTopic(cluster, self._remote_rng, self.problems)
        self.trimmed.options |= _remote(self._remote_rng)
        self._operator_count = OPERATORS if len(cluster.hosts) > 3 else 0
        self.unclean: UncleanTopic | None = None
        if self._remote_rng.random() < 0.4:
            self.unclean = UncleanTopic(cluster, self.problems)
            unclean = partial(elect_uncleanly, UNCLEAN_PLACE)
            self.more_faults = (*self.more_faults, *[unclean] * UNCLEAN_SHARE)

    @classmethod
    def broker_count(cls, rng: random.Random) -> int:
        return rng.choice((3, 3, 4))

    def _fault_of_start(self, replica: Replica, log: Log) -> str | None:
        if replica.assignment.topic != TRIMMED:
            return super()._fault_of_start(replica, log)
        key = replica.assignment.topic_id, replica.assignment.partition
        return self.trimmed.fault_of_start(
            replica, log, lambda start, end: self.tiered.bytes_between(key, start, end)
        )

    async def create_topics(self) -> None:
        await super().create_topics()
        process = self._process("tiered-admin")

        async def create() -> None:
            client = self._client(process)
            options = self.trimmed.options
            await create_topic(client, TRIMMED, TRIMMED_PARTITIONS, **options)
            if self.unclean is not None:
                options = self.topic_options | {"unclean_leader_election": True}
                await create_topic(client, UNCLEAN, 1, **options)
            client.close()

        await process.run(create())

    def start(self) -> None:
        super().start()
        self._start("prober", self._probe)
        self._start("direct-reader", self._read_directly)
        self._start("trimmer", self._write_trimmed)
        self._start("trim-operator", self._trim)
        self._start("trimmed-reader", self._read_trimmed)
        self._start("trim-pinner", self._pin)
        self._start("trim-undertaker", self._bury)

        if self.unclean is not None:
            self._start("trim-loosely", self._write_unclean)

    async def stop_sending(self) -> None:
        await super().stop_sending()
        await self._end("trim")

    async def stop_reading(self) -> None:
        await super().stop_reading()
        await self._end("prober")
        await self._end("direct-reader")

    async def read_all(self, limit_s: float) -> int:
        await self._read_trimmed_in_the_end(limit_s)
        count = await super().read_all(limit_s)
        if self.unclean is not None:
            await self._read_unclean_in_the_end(self.unclean, limit_s)
        return count

    def rights(self) -> Rights:
        read, trimmed = may("read", "topic", *self.topics), may("read", "topic", TRIMMED)
        return {
            **super().rights(),
            "prober": read,
            "direct-reader": read,
            "trimmer": may("write", "topic", TRIMMED),
            "trim-operator": [*may("delete", "topic", TRIMMED), *trimmed],
            "trimmed-reader": trimmed,
            "final-trimmed-reader": trimmed,
            "trim-pinner": trimmed,
            "trim-undertaker": [
                *may("create", "topic", f"{BRIEF}*"),
                *may("delete", "topic", f"{BRIEF}*"),
                *may("write", "topic", f"{BRIEF}*"),
            ],
        }

    def observer(self, invariants: Invariants) -> Callable[[Owner], None]:
        invariants.unclean_topics = frozenset([UNCLEAN])
        return super().observer(invariants)

    def _left_behind(self) -> list[str]:
        """Directories of topics that were deleted while their broker was away stay, put aside."""
        return [item for item in super()._left_behind() if BRIEF not in item]

    # --- readers ----------------------------------------------------------------------------------

    async def _probe(self, name: str, process: Process, rng: random.Random) -> None:
        """Reads a few records from any offset on, and looks for the offsets of times."""
        client = self._client(process)
        consumer = AsyncConsumer(client, ConsumerConfig(auto_offset_reset="earliest"))
        await consumer.assign(self.places)
        known: list[Record] = []
        while self._is_reading:
            await asyncio.sleep(rng.expovariate(1 / PROBE_S))
            place = rng.choice(self.places)
            with self._watching(name):
                end = (await consumer.end_offsets([place]))[place]
                if not end:
                    continue
                await consumer.assign([place])
                await consumer.seek(place, rng.randrange(end))
                self.recorder.assigned(name, *place)
                for _ in range(rng.choice((1, 3, 10))):
                    records = await consumer.poll(0.5, PROBED_MAX)
                    self.recorder.polled(name, records)
                    known += records[:1]
                if known:
                    await self._look_for(consumer, rng.choice(known))
        await consumer.close()
        client.close()

    @contextlib.contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        """Notes errors that say that records are gone, since all are kept. An answer that did not
        come in time does not matter."""
        try:
            yield
        except (RemoteMissingError, OffsetOutOfRangeError) as error:
            self.problems.append(f"{name}: {type(error).__name__}: {error}")
        except RayqError as error:
            self._cluster.world.trace.note(f"{name}: {type(error).__name__}: {error}")

    async def _look_for(self, consumer: AsyncConsumer, record: Record) -> None:
        """The offset of a record's time is that of the record, or of one before it."""
        place = TopicPartition(record.topic, record.partition)
        found = (await consumer.offsets_for_times({place: record.timestamp_ms}))[place]
        if found is None or found > record.offset:
            self.problems.append(
                f"{place}: {found} is said to be the first of {record.timestamp_ms} or later, "
                f"which {record.offset} is"
            )

    async def _read_directly(self, name: str, process: Process, rng: random.Random) -> None:
        """Asks the leader for the objects of a range, and reads them without it."""
        client = self._client(process)
        store = ProcessObjectStore(self._cluster.objects, process)
        while self._is_reading:
            await asyncio.sleep(rng.expovariate(1 / PROBE_S))
            place = rng.choice(self.places)
            start = rng.randrange(2_000) if rng.random() < 0.7 else 0

            def ask(topic_id: str, leader: Any, place: Any = place, start: int = start) -> Any:
                return messages.DescribeRemote(
                    topic_id, place.partition, leader.epoch, start=start, end=start + 500
                )

            with self._watching(name):
                answer, _ = await client.exchange_with_leader(
                    *place, ask, timeout_s=QUESTION_TIMEOUT_S, attempt_timeout_s=QUESTION_TIMEOUT_S
                )
                self.recorder.assigned(name, *place)
                for span in answer.ranges:
                    data = await store.get(span.name)
                    if len(data) < span.object_bytes:
                        break  # The body is too short: a reader asks again.
                    self.recorder.polled(name, _records_of(data[: span.data_bytes], place))
        client.close()

    # --- the topic that may lose records ----------------------------------------------------------

    async def _write_unclean(self, name: str, process: Process, rng: random.Random) -> None:
        assert self.unclean is not None
        client = self._client(process)
        await self.unclean.write(name, client, rng, lambda: self._is_sending)
        client.close()

    async def _read_unclean_in_the_end(self, unclean: UncleanTopic, limit_s: float) -> None:
        process = self._process("final-unclean-reader")
        stored = self.tiered.stored_values(UNCLEAN)

        async def read() -> None:
            client = self._client(process)
            await asyncio.wait_for(unclean.read_in_the_end(client, stored), limit_s)
            client.close()

        await process.run(read())

    # --- the topic whose oldest records go --------------------------------------------------------

    async def _write_trimmed(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        await self.trimmed.write(name, client, rng, lambda: self._is_sending)
        client.close()

    async def _trim(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        await self.trimmed.trim(client, rng, lambda: self._is_sending)
        client.close()

    async def _read_trimmed(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        await self.trimmed.read_now_and_then(client, rng, lambda: self._is_sending)
        client.close()

    async def _read_trimmed_in_the_end(self, limit_s: float) -> None:
        await self._end("trimmed-reader")
        process = self._process("final-trimmed-reader")

        async def read() -> None:
            client = self._client(process)
            await asyncio.wait_for(self.trimmed.read_in_the_end(client), limit_s)
            client.close()

        await process.run(read())

    async def _pin(self, name: str, process: Process, rng: random.Random) -> None:
        """Pins what the topic begins with, for a while."""
        client = self._client(process)
        topic_id = self._cluster.topic_id(TRIMMED)
        consumer = AsyncConsumer(client, ConsumerConfig())
        places = [TopicPartition(TRIMMED, number) for number in range(TRIMMED_PARTITIONS)]
        while self._is_sending:
            await asyncio.sleep(rng.expovariate(1 / PIN_S))
            pin_id = process.environment.new_id()
            if rng.random() < 0.7:
                await self._until_a_list_is_loaded(topic_id)
            with contextlib.suppress(RayqError):
                starts = await consumer.beginning_offsets(places)
                for _ in range(rng.choice((1, 3))):
                    pin = messages.PinSnapshot(
                        request_id=process.environment.new_id(),
                        pin_id=pin_id,
                        topic_id=topic_id,
                        starts={place.partition: start for place, start in starts.items()},
                        ttl_ms=rng.choice((1_000, 20_000)),
                    )
                    await client.change(pin, timeout_s=QUESTION_TIMEOUT_S)
                    await asyncio.sleep(rng.uniform(0, 4))
                if rng.random() < 0.7:
                    self.tiered.given_up.add(pin_id)
                    unpin = messages.UnpinSnapshot(
                        request_id=process.environment.new_id(), pin_id=pin_id
                    )
                    await client.change(unpin, timeout_s=QUESTION_TIMEOUT_S)
        await consumer.close()
        client.close()

    async def _until_a_list_is_loaded(self, topic_id: str) -> None:
        """Retention has to look at the pins after that, not before."""
        until_s = self._cluster.world.now_s + PATIENCE_S
        while not lists_being_loaded(self._cluster, topic_id):
            if self._cluster.world.now_s > until_s:
                return
            await asyncio.sleep(LIST_LOOK_S)

    async def _bury(self, name: str, process: Process, rng: random.Random) -> None:
        """Makes a topic, fills it and deletes it."""
        client = self._client(process)
        admin = AsyncAdmin(client)
        options = self.topic_options | {"segment_bytes": 1024}
        made = 0
        while self._is_sending:
            made += 1
            topic = f"{BRIEF}{made}"
            with contextlib.suppress(RayqError):
                await admin.create_topic(topic, 1, 3, timeout_s=QUESTION_TIMEOUT_S, **options)
            producer = AsyncProducer(client, ProducerConfig(delivery_timeout_ms=4_000))
            for number in range(40):
                with contextlib.suppress(RayqError):
                    await producer.send(topic, b"%d" % number + b"." * 100)
            with contextlib.suppress(DeliveryError, RayqError):
                await producer.close()
            await asyncio.sleep(rng.uniform(0, BURY_S))
            for _ in range(10):
                with contextlib.suppress(RayqError):
                    await admin.delete_topic(topic, timeout_s=QUESTION_TIMEOUT_S)
                    break
        client.close()


class TieredTransactionWorkload(RemoteStorage, TransactionWorkload):
    """The clients with transactions, whose topics have remote storage."""

    more_faults = (*WITH_GROUPS, *WITH_REMOTE_STORAGE, *OF_REMOTE_STORAGE, *OF_TRANSACTIONS)


def _records_of(data: bytes, place: TopicPartition) -> list[Record]:
    """The records of a data object."""
    records: list[Record] = []
    for position, header in split_batches(data):
        columns = decode_columns(data, position, header)
        records += [
            Record(*place, offset, timestamp_ms, None, value, [])
            for offset, timestamp_ms, value in zip(
                columns.offsets, columns.timestamps_ms, columns.values, strict=True
            )
        ]
    return records


def _remote(rng: random.Random) -> dict[str, Any]:
    return {
        "remote_storage": True,
        "local_retention_ms": rng.choice((0, 500, 4_000, None)),
        "local_retention_bytes": rng.choice((None, 0, 3_000)),
        "remote_max_lag_ms": rng.choice((200, 1_000, 5_000)),
    }

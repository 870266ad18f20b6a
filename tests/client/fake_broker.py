"""Brokers that a test plays: rayq's own server over a log in memory, with faults on demand.

One shared log stands for all replicas of a partition, so that a change of leader keeps what was
acknowledged. The cluster runs in a thread of its own; every public method may be called from the
test's thread.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
import threading
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from rayq import messages as m
from rayq.client.cluster import Cluster
from rayq.config import TopicConfig, as_dict, parse
from rayq.environment import Environment, LoopTasks, SystemClock
from rayq.errors import (
    FencedEpochError,
    InvalidPartitionsError,
    LogTruncatedError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RayqError,
    RecordTooLargeError,
    TopicExistsError,
    UnknownProducerError,
    UnknownTopicError,
    UnsupportedVersionError,
)
from rayq.messages.transaction_ids import is_transactional
from rayq.storage.batch import (
    BatchHeader,
    check_body,
    check_produced,
    decode_columns,
    encode_batch,
    read_header,
    stamp,
)
from rayq.wire.authentication import Identity, client_key
from rayq.wire.network import AsyncioNetwork
from rayq.wire.peer import Peer
from rayq.wire.server import Server
from tests.client.fake_groups import FakeGroups
from tests.client.fake_queues import FakeQueues
from tests.client.fake_transaction_log import (
    PlayedTransactions,
    Transaction,
    marker_batch,
    transactional_batch,
)
from tests.client.fake_transactions import FakeTransactions

SECRET = b"the secret of the played cluster"
T = TypeVar("T")
SEQUENCES = 2**31


# --- faults ---------------------------------------------------------------------------------------


@dataclass
class Fault:
    """The fault that meets the next requests of a kind instead of a plain answer."""

    kind: type[m.AnyRequest]
    times: int
    carry_out: bool = False
    """Whether the request takes effect all the same."""
    error: RayqError | None = None
    is_lost: bool = False
    """No answer comes at all."""
    disconnect: bool = False
    delay_s: float = 0.0
    """The delay of the answer, in seconds."""
    is_held: bool = False
    """No answer comes before `FakeCluster.release`."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    change: Callable[[Any, bytes], tuple[Any, bytes]] | None = None
    """Alters the answer and its payload."""
    matches: Callable[[Any, int], bool] = lambda _request, _broker: True

    @property
    def takes_effect(self) -> bool:
        return self.carry_out or not (self.error or self.is_lost or self.disconnect)


@dataclass
class FakePartition:
    number: int
    leader: int | None
    leader_epoch: int = 1
    isr: list[int] = field(default_factory=list)
    batches: list[tuple[BatchHeader, bytes]] = field(default_factory=list)
    log_start: int = 0
    end: int = 0
    cleaned: int = 0
    """The offset below which there may be gaps."""
    producers: dict[int, tuple[int, list[tuple[int, int, int]]]] = field(default_factory=dict)
    """producer id -> (epoch, [(base sequence, last sequence, base offset)] of the last 5)"""
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        self.grew.set()
        self.grew = asyncio.Event()

    @property
    def transactions(self) -> PlayedTransactions:
        return PlayedTransactions(header for header, _ in self.batches)

    def end_for(self, isolation: int) -> int:
        """Where the log ends for a reader."""
        transactions = self.transactions
        if isolation == m.ISOLATION_NONE and transactions.is_used:
            raise UnsupportedVersionError("This client does not know transactions.")
        return transactions.stable_offset(self.end) if isolation == m.READ_COMMITTED else self.end


@dataclass
class FakeTopic:
    name: str
    topic_id: str
    config: TopicConfig
    partitions: list[FakePartition]


class FakeBroker:
    def __init__(self, cluster: FakeCluster, broker: int, environment: Environment) -> None:
        self.cluster = cluster
        self.broker = broker
        self.port = 0
        self.frozen: m.MetadataResponse | None = None
        """The metadata that this broker keeps on answering."""
        self._environment = environment
        self.server: Server | None = None

    async def start(self) -> None:
        identity = Identity(
            role="server", key=SECRET, cluster_id=self.cluster.cluster_id, broker=self.broker
        )
        self.server = Server(self._environment, identity, self._handle)
        await self.server.start("127.0.0.1", self.port)
        self.port = self.server.port

    def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def drop_connections(self) -> None:
        if self.server is not None:
            for stream in list(self.server._authenticated):
                stream.end(None)

    def _handle(self, peer: Peer, request: m.AnyRequest, payload: memoryview) -> Any:
        self.cluster.requests.append((self.broker, request))
        fault = self.cluster.take_fault(request, self.broker)
        result: Any = None
        if fault is None or fault.takes_effect:
            result = self._apply(request, payload)
        return result if fault is None else self._answer(fault, result)

    async def _answer(self, fault: Fault, result: Any) -> Any:
        if asyncio.iscoroutine(result):
            result = await result
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.is_held:
            await fault.released.wait()
        if fault.disconnect:
            self.drop_connections()
        if fault.is_lost or fault.disconnect:
            await asyncio.Event().wait()
        if fault.error is not None:
            raise copy.copy(fault.error)
        if fault.change is not None:
            response, data = result if isinstance(result, tuple) else (result, [])
            result = fault.change(response, b"".join(data))
        return result

    def _apply(self, request: m.AnyRequest, payload: memoryview) -> Any:
        if isinstance(request, m.Fetch):
            return self.cluster.fetch(self.broker, request)
        if isinstance(request, m.Metadata):
            if self.frozen is not None:
                wanted = None if request.topics is None else set(request.topics)
                topics = [t for t in self.frozen.topics if wanted is None or t.name in wanted]
                return msgspec.structs.replace(self.frozen, topics=topics)
            return self.cluster.metadata(request)
        return self.cluster.apply(self.broker, request, payload)


class FakeCluster:
    """A context manager. `cluster()` makes a client of the fake cluster."""

    def __init__(self, brokers: int = 1) -> None:
        self.cluster_id = uuid.uuid4().hex
        self.topics: dict[str, FakeTopic] = {}
        self.denied: dict[str, str] = {}
        """Topics that the client's principal may not describe, each with the reason."""
        self.requests: list[tuple[int, m.AnyRequest]] = []
        self.version = 1
        self.next_producer_id = 100
        self.append_time_ms = 5_000_000
        self.checked: list[m.CheckRange] = []
        self.deleted: set[str] = set()
        self.requests_done: set[str] = set()
        """The ids of changes that were made; they are not made again when a client repeats them."""
        self.groups = FakeGroups(self)
        self.transactions = FakeTransactions(self)
        self.queues = FakeQueues(self)
        self._faults: list[Fault] = []
        self._changed = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._tasks = LoopTasks()
        environment = Environment(
            clock=SystemClock(),
            random=random.SystemRandom(),
            disk=None,  # type: ignore[arg-type]
            network=AsyncioNetwork(),
            threads=None,  # type: ignore[arg-type]
            tasks=self._tasks,
            pid=os.getpid(),
            boot_id="boot",
        )
        self._metrics = environment.metrics
        self.brokers = {number: FakeBroker(self, number, environment) for number in range(1, brokers + 1)}

    def __enter__(self) -> FakeCluster:
        self._thread.start()
        for broker in self.brokers.values():
            self.run(broker.start())
        return self

    def __exit__(self, *_error: object) -> None:
        async def stop() -> None:
            for broker in self.brokers.values():
                broker.stop()
            self._tasks.cancel_all()
            await asyncio.sleep(0.01)

        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def connections(self) -> int:
        """The number of connections of all brokers."""
        samples = self.call(self._metrics.collect)
        return int(sum(sample.value for sample in samples if sample.name == "rayq_connections"))

    def call(self, function: Callable[[], T]) -> T:
        async def work() -> T:
            return function()

        return self.run(work())

    def cluster(self, **options: Any) -> Cluster:
        addresses = [("127.0.0.1", broker.port) for broker in self.brokers.values()]
        return Cluster(addresses, client_key(SECRET), **options)

    # --- what a test arranges -------------------------------------------------------------------

    def create_topic(self, name: str, partitions: int = 1, **config: Any) -> FakeTopic:
        return self.call(lambda: self.make_topic(name, partitions, config))

    def make_topic(self, name: str, partitions: int, config: dict[str, Any]) -> FakeTopic:
        ids = list(self.brokers)
        topic = FakeTopic(
            name,
            uuid.uuid4().hex,
            parse(TopicConfig, config),
            [FakePartition(n, ids[n % len(ids)], isr=ids[:]) for n in range(partitions)],
        )
        self.topics[name] = topic
        self.bump_version()
        return topic

    def delete_topic(self, name: str) -> None:
        def delete() -> None:
            self.topics.pop(name)
            self.bump_version()

        self.call(delete)

    def hide_topic(self, name: str) -> FakeTopic:
        """Takes the client's right to describe a topic away, until `bring_back`."""
        topic = self.topics[name]
        self.call(lambda: self.denied.setdefault(name, f"You may not describe topic {name!r}."))
        self.delete_topic(name)
        return topic

    def bring_back(self, topic: FakeTopic) -> None:
        """Shows a topic again that was deleted, as to a principal that may describe it again."""

        def show() -> None:
            self.denied.pop(topic.name, None)
            self.topics[topic.name] = topic
            self.bump_version()

        self.call(show)

    def add_partitions(self, name: str, total: int) -> None:
        def add() -> None:
            ids = list(self.brokers)
            partitions = self.topics[name].partitions
            for number in range(len(partitions), total):
                partitions.append(FakePartition(number, ids[number % len(ids)], isr=ids[:]))
            self.bump_version()

        self.call(add)

    def move_leader(self, topic: str, partition: int, leader: int | None) -> None:
        """Elects another leader (or none) under the next epoch."""

        def move() -> None:
            found = self.topics[topic].partitions[partition]
            found.leader = leader
            found.leader_epoch += 1
            found.notify()
            self.bump_version()

        self.call(move)

    def fault(self, kind: type[m.AnyRequest], times: int = 1, **what: Any) -> Fault:
        fault = Fault(kind, times, **what)
        self.call(lambda: self._faults.append(fault))
        return fault

    def release(self, fault: Fault) -> None:
        """Sends the answers that `fault` holds, and holds no more."""
        self.call(fault.released.set)

    def clear_faults(self) -> None:
        self.call(self._faults.clear)

    def stand_still(self, until: threading.Event) -> None:
        """No broker reads or does anything until `until` is set (or for a minute)."""
        self.loop.call_soon_threadsafe(until.wait, 60)

    def stop_broker(self, broker: int) -> None:
        self.call(self.brokers[broker].stop)

    def start_broker(self, broker: int) -> None:
        self.run(self.brokers[broker].start())

    def freeze_metadata(self, broker: int) -> None:
        """From now on this broker answers the present metadata."""

        async def freeze() -> None:
            self.brokers[broker].frozen = self._metadata(None)

        self.run(freeze())

    def thaw_metadata(self, broker: int) -> None:
        """This broker answers the true metadata again."""

        def thaw() -> None:
            self.brokers[broker].frozen = None

        self.call(thaw)

    def write(self, topic: str, values: list[bytes], partition: int = 0, **columns: Any) -> int:
        """Appends a batch, as a producer without numbers does. Returns its base offset."""

        def append() -> int:
            batch = encode_batch(values, **{"timestamps_ms": 1000, **columns})
            return self.append(self.topics[topic].partitions[partition], batch)

        return self.call(append)

    def write_in(
        self,
        of: Transaction,
        topic: str,
        values: list[bytes],
        partition: int = 0,
        **columns: Any,
    ) -> int:
        """As `write`, in a transaction, which has joined the partition."""

        def append() -> int:
            batch = transactional_batch(values, of, **{"timestamps_ms": 1000, **columns})
            return self.append(self.topics[topic].partitions[partition], batch)

        return self.call(append)

    def end_in(
        self, of: Transaction, topic: str, partition: int = 0, *, is_commit: bool = True
    ) -> int:
        """Appends the marker of a transaction. Returns its offset."""

        def append() -> int:
            batch = marker_batch(of, is_commit=is_commit)
            return self.append(self.topics[topic].partitions[partition], batch)

        return self.call(append)

    def records(self, topic: str, partition: int = 0) -> list[tuple[int, bytes | None]]:
        """The `(offset, value)` of each record in the log."""

        def read() -> list[tuple[int, bytes | None]]:
            found: list[tuple[int, bytes | None]] = []
            for header, data in self.topics[topic].partitions[partition].batches:
                if header.is_control:
                    continue
                columns = decode_columns(data, 0, header)
                found += zip(columns.offsets, columns.values, strict=True)
            return found

        return self.call(read)

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return [value for _, value in self.records(topic, partition)]

    def headers(self, topic: str, partition: int = 0) -> list[BatchHeader]:
        return self.call(
            lambda: [header for header, _ in self.topics[topic].partitions[partition].batches]
        )

    def asked(self, kind: type[m.AnyRequest]) -> list[Any]:
        return self.call(lambda: [request for _, request in self.requests if type(request) is kind])

    def truncate(self, topic: str, partition: int, end: int) -> None:
        """Removes the batches from `end` on, as an unclean election would."""

        def cut() -> None:
            found = self.topics[topic].partitions[partition]
            found.batches = [batch for batch in found.batches if batch[0].next_offset <= end]
            found.end = end
            found.leader_epoch += 1
            found.producers.clear()
            self.bump_version()

        self.call(cut)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        def delete() -> None:
            found = self.topics[topic].partitions[partition]
            found.log_start = offset
            found.batches = [batch for batch in found.batches if batch[0].next_offset > offset]

        self.call(delete)

    def replace_batch(self, topic: str, index: int, data: bytes | None, partition: int = 0) -> None:
        """Puts other bytes (or, as compaction does, none at all) in the place of a batch."""

        def replace() -> None:
            found = self.topics[topic].partitions[partition]
            header, _ = found.batches[index]
            if data is None:
                del found.batches[index]
                found.cleaned = max(found.cleaned, header.next_offset)
            else:
                found.batches[index] = (header, data)

        self.call(replace)

    def forget_producers(self, topic: str, partition: int = 0) -> None:
        self.call(self.topics[topic].partitions[partition].producers.clear)

    # --- the servers' side ----------------------------------------------------------------------

    def take_fault(self, request: m.AnyRequest, broker: int) -> Fault | None:
        for fault in self._faults:
            if type(request) is fault.kind and fault.times > 0 and fault.matches(request, broker):
                fault.times -= 1
                return fault
        return None

    def bump_version(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def metadata(self, request: m.Metadata) -> m.MetadataResponse:
        deadline = self.loop.time() + request.wait_ms / 1000
        while self.version < request.version_min and self.loop.time() < deadline:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                break
        return self._metadata(request.topics)

    def _metadata(self, names: list[str] | None) -> m.MetadataResponse:
        endpoints = [
            m.BrokerEndpoint(broker.broker, "127.0.0.1", broker.port, "node", broker.server is not None)
            for broker in self.brokers.values()
        ]
        topics = [
            m.TopicMetadata(
                topic.name,
                topic.topic_id,
                as_dict(topic.config),
                [self._partition_metadata(partition) for partition in topic.partitions],
            )
            for topic in self.topics.values()
            if names is None or topic.name in names
        ]
        return m.MetadataResponse(
            self.cluster_id,
            self.version,
            1,
            "127.0.0.1:1",
            list(self.brokers),
            endpoints,
            topics,
            denied={name: why for name, why in self.denied.items() if name in (names or ())},
        )

    def _partition_metadata(self, partition: FakePartition) -> m.PartitionMetadata:
        replicas = [
            m.ReplicaEndpoint(broker.broker, "127.0.0.1", broker.port)
            if broker.server is not None
            else m.ReplicaEndpoint(broker.broker, None, None)
            for broker in self.brokers.values()
        ]
        reason = None if partition.leader is not None else "waiting for broker 9"
        return m.PartitionMetadata(
            partition.number, partition.leader, partition.leader_epoch, 1, partition.isr, replicas, reason
        )

    def apply(self, broker: int, request: m.AnyRequest, payload: memoryview) -> Any:
        if not isinstance(request, m.Change):
            return self._apply(broker, request, payload)
        assert request.request_id is not None
        if request.request_id in self.requests_done:
            return m.ChangeResponse(self.version)
        answer = self._apply(broker, request, payload)
        self.requests_done.add(request.request_id)
        return answer

    def _apply(self, broker: int, request: m.AnyRequest, payload: memoryview) -> Any:
        match request:
            case m.AllocateProducerId():
                self.next_producer_id += 1
                return m.AllocateProducerIdResponse(self.next_producer_id, 0)
            case m.CreateTopic():
                if request.name in self.topics:
                    raise TopicExistsError(f"Topic {request.name!r} exists.")
                if request.partitions < 1:
                    raise InvalidPartitionsError("A topic needs at least one partition.")
                self.make_topic(request.name, request.partitions, request.config)
                return m.ChangeResponse(self.version)
            case m.DeleteTopic():
                if self.topics.pop(request.name, None) is None:
                    raise UnknownTopicError(f"No topic {request.name!r}.")
                self.bump_version()
                return m.ChangeResponse(self.version)
            case m.CreatePartitions():
                partitions = self.topics[request.name].partitions
                for number in range(len(partitions), request.total):
                    ids = list(self.brokers)
                    partitions.append(FakePartition(number, ids[number % len(ids)], isr=ids))
                self.bump_version()
                return m.ChangeResponse(self.version)
            case m.AlterTopicConfig():
                topic = self.topics[request.name]
                topic.config = parse(TopicConfig, {**as_dict(topic.config), **request.changes})
                self.bump_version()
                return m.ChangeResponse(self.version)
            case m.ElectLeaders():
                for partition in self.topics[request.name].partitions:
                    if request.partitions is None or partition.number in request.partitions:
                        partition.leader = next(iter(self.brokers))
                        partition.leader_epoch += 1
                self.bump_version()
                return m.ChangeResponse(self.version)
            case m.DescribeObjectStore():
                return m.DescribeObjectStoreResponse(None, [], [], None, None, self.version)
            case m.Produce():
                return self._produce(broker, request, payload)
            case m.DescribeQueues():
                return self.queues.describe(request)
            case m.Take():
                return self.queues.take(broker, request)
            case m.Settle():
                return self.queues.settle(broker, request)
            case m.ListOffsets():
                return self._list_offsets(broker, request)
            case m.DescribeOpenTransactions():
                return self._describe_open(broker, request)
            case m.DeleteRecords():
                partition = self.led_partition(broker, request)
                before = partition.end if request.before_offset is None else request.before_offset
                if before > partition.end:
                    raise OffsetOutOfRangeError(f"{before} is above the high watermark {partition.end}.")
                partition.log_start = max(partition.log_start, before)
                return m.DeleteRecordsResponse(partition.log_start)
            case m.DescribeReplica():
                partition = self._partition(request)
                return m.DescribeReplicaResponse(
                    broker,
                    1000 + broker,
                    partition.leader_epoch,
                    partition.leader == broker,
                    partition.log_start,
                    partition.end,
                    partition.end,
                    partition.end,
                    sum(len(data) for _, data in partition.batches),
                )
            case m.CheckRange():
                self.checked.append(request)
                return m.Done()
            case m.ConfirmMetadata():
                return m.ChangeResponse(self.version)
            case m.EnsureOffsetsTopic():
                if "__consumer_offsets" not in self.topics:
                    self.make_topic("__consumer_offsets", 1, {})
                return m.ChangeResponse(self.version)
            case m.EnsureTransactionsTopic():
                if "__transaction_state" not in self.topics:
                    self.make_topic("__transaction_state", 1, {})
                return m.ChangeResponse(self.version)
            case m.InitProducer() | m.EndTransaction():
                self.led_partition(broker, request)
                return self.transactions.apply(request)
            case m.CommitOffsets(transaction=(_, _)):
                self.led_partition(broker, request)
                return self.transactions.commit_offsets(request)
        if 30 <= request.api < 40:
            self.led_partition(broker, request)
            return self.groups.apply(request)
        raise AssertionError(f"the fake broker does not know {request}")

    def _partition(self, request: Any) -> FakePartition:
        for topic in self.topics.values():
            if topic.topic_id == request.topic_id:
                return topic.partitions[request.partition]
        raise UnknownTopicError(f"No topic of id {request.topic_id}.")

    def _topic(self, topic_id: str) -> FakeTopic:
        return next(topic for topic in self.topics.values() if topic.topic_id == topic_id)

    def led_partition(self, broker: int, request: Any) -> FakePartition:
        partition = self._partition(request)
        if partition.leader != broker:
            raise NotLeaderError(f"Broker {broker} does not lead.")
        if request.leader_epoch < partition.leader_epoch:
            raise FencedEpochError(f"Epoch {request.leader_epoch} is over.")
        return partition

    def _produce(self, broker: int, request: m.Produce, payload: memoryview) -> Any:
        partition = self.led_partition(broker, request)
        header = read_header(payload)
        check_body(payload, 0, header)
        check_produced(header)
        config = self._topic(request.topic_id).config
        if len(payload) > config.max_message_bytes:
            raise RecordTooLargeError(f"{len(payload)} bytes are too many.")
        if is_transactional(header.producer_id):
            assert header.producer_id is not None
            self.transactions.join(header.producer_id, header.producer_epoch)
        base_offset = self._duplicate_of(partition, header)
        if base_offset is None:
            base_offset = self.append(partition, bytearray(payload))
            self._remember(partition, header, base_offset)
        return m.ProduceResponse(base_offset, self.append_time_ms, partition.log_start)

    def _duplicate_of(self, partition: FakePartition, header: BatchHeader) -> int | None:
        if header.producer_id is None:
            return None
        assert header.base_sequence is not None
        known = partition.producers.get(header.producer_id)
        if known is None:
            if header.base_sequence != 0:
                raise UnknownProducerError("No state of this producer.")
            return None
        epoch, batches = known
        if header.producer_epoch < epoch:
            raise ProducerFencedError(f"Epoch {header.producer_epoch} is below {epoch}.")
        if header.producer_epoch > epoch:
            if header.base_sequence != 0:
                raise OutOfOrderSequenceError("A new epoch begins at 0.")
            return None
        for base, last, offset in batches:
            if (base, last) == (header.base_sequence, header.last_sequence):
                return offset
        if header.base_sequence != (batches[-1][1] + 1) % SEQUENCES:
            raise OutOfOrderSequenceError(
                f"{header.base_sequence} does not follow {batches[-1][1]}."
            )
        return None

    def _remember(self, partition: FakePartition, header: BatchHeader, base_offset: int) -> None:
        if header.producer_id is None:
            return
        assert header.base_sequence is not None and header.last_sequence is not None
        epoch, batches = partition.producers.get(header.producer_id, (header.producer_epoch, []))
        if header.producer_epoch > epoch:
            batches = []
        entry = (header.base_sequence, header.last_sequence, base_offset)
        partition.producers[header.producer_id] = (header.producer_epoch, [*batches, entry][-5:])

    def append(self, partition: FakePartition, batch: bytearray) -> int:
        base_offset = partition.end
        header = stamp(
            batch,
            0,
            base_offset=base_offset,
            leader_epoch=partition.leader_epoch,
            append_time_ms=self.append_time_ms,
        )
        partition.batches.append((header, bytes(batch)))
        partition.end = header.next_offset
        partition.notify()
        return base_offset

    def _list_offsets(self, broker: int, request: m.ListOffsets) -> m.ListOffsetsResponse:
        partition = self.led_partition(broker, request)
        if request.timestamp_ms == m.EARLIEST:
            return m.ListOffsetsResponse(partition.log_start, None)
        if request.timestamp_ms == m.LATEST:
            return m.ListOffsetsResponse(partition.end_for(request.isolation), None)
        for header, data in partition.batches:
            if header.is_control:
                continue
            columns = decode_columns(data, 0, header)
            for offset, timestamp_ms in zip(columns.offsets, columns.timestamps_ms, strict=True):
                if offset >= partition.end_for(request.isolation):
                    return m.ListOffsetsResponse(None, None)
                if timestamp_ms >= request.timestamp_ms:
                    return m.ListOffsetsResponse(offset, timestamp_ms)
        return m.ListOffsetsResponse(None, None)

    def _describe_open(
        self, broker: int, request: m.DescribeOpenTransactions
    ) -> m.DescribeOpenTransactionsResponse:
        partition = self.led_partition(broker, request)
        transactions, since = partition.transactions, request.since_offset
        return m.DescribeOpenTransactionsResponse(
            high_watermark=partition.end,
            last_stable_offset=transactions.stable_offset(partition.end),
            open=[(*of, first) for of, first in transactions.open.items()],
            ended=[] if since is None else transactions.ended_between(since, partition.end),
            is_used=transactions.is_used,
            leader_epoch=partition.leader_epoch,
        )

    async def fetch(self, broker: int, request: m.Fetch) -> Any:
        deadline = self.loop.time() + request.wait_ms / 1000
        while True:
            partition = self.led_partition(broker, request)
            if request.offset < partition.log_start:
                raise OffsetOutOfRangeError(f"The log starts at {partition.log_start}.")
            if request.offset > partition.end and request.last_epoch is not None:
                raise LogTruncatedError(f"The log ends at {partition.end}.")
            if request.offset > partition.end:
                raise OffsetOutOfRangeError(f"The log ends at {partition.end}.")
            end = partition.end_for(request.isolation)
            if request.offset < end or self.loop.time() >= deadline:
                break
            try:
                async with asyncio.timeout_at(deadline):
                    await partition.grew.wait()
            except TimeoutError:
                continue
        found: list[bytes] = []
        size = 0
        next_offset = request.offset
        for header, data in partition.batches:
            if header.next_offset <= request.offset or header.base_offset >= end:
                continue
            if found and size + len(data) > request.bytes_max:
                break
            found.append(data)
            size += len(data)
            next_offset = header.next_offset
        if not found:
            next_offset = max(request.offset, end)
        transactions = partition.transactions
        answer = m.FetchResponse(
            high_watermark=partition.end,
            log_start_offset=partition.log_start,
            cleaned_offset=partition.cleaned,
            next_offset=next_offset,
            last_stable_offset=transactions.stable_offset(partition.end),
            aborted=transactions.aborted_between(request.offset, next_offset),
        )
        return answer, found

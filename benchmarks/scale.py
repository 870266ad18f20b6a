"""Costs of a large cluster for its controller and its brokers.

    python -m benchmarks.scale [brokers] [partitions] [--json FILE]

It runs in the simulated world: time is virtual, so nothing depends on how busy this machine is, and
the processor time of each process is that of its own events. The controller, the quorum of three
keepers of the metadata log and one broker are real. That broker's replica processes are stand-ins
without logs, and the other brokers are stand-ins that take the metadata log, keep their sessions
and say what leaders and replicas would say. The metadata begin with all partitions created, led and
in sync. Times of a run in which Python collects garbage are left out: the world does that between
its events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.report import Row, print_all, wide_console
from proving.simulation import World
from proving.simulation.owner import Owner
from proving.simulation.process import Process
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.broker.broker import Broker
from rayq.actors.controller.server import ControllerServer
from rayq.actors.hosting import HostProcess, ObjectServerSpec, ReplicaHostSpec
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.config import ClusterConfig
from rayq.core.cluster.records import (
    BrokerRegistered,
    EpochStarted,
    Member,
    PartitionChanged,
    PartitionValue,
    ReplicaRegistered,
    TopicCreated,
    Voter,
    VotersChanged,
    encode_records,
)
from rayq.core.cluster.state import ClusterState, Partition, Topic, find_topic
from rayq.environment import Address
from rayq.errors import RayqError, StalePartitionError
from rayq.messages.limits import PROPOSALS_MAX
from rayq.runtime.local_runtime import wait_until
from rayq.storage.data_directory import DataDirectory, format_directory
from rayq.storage.metadata_log import MetadataLog
from rayq.wire.authentication import Identity
from rayq.wire.handler import Result
from rayq.wire.peer import Peer
from rayq.wire.pool import ConnectionPool
from rayq.wire.server import Server

CONFIG = ClusterConfig(max_replicas_per_broker=1_000_000)
CLUSTER_ID = "c" * 32
SECRET = b"s" * 32
ROOT = "/data"
PORT = 9000
REPLICATION_FACTOR = 3
PARTITIONS_PER_TOPIC = 1_000
VOTERS = 3
REAL = VOTERS
"""The broker that is real."""
IDLE_S = 20.0
PATIENCE_S = 600.0
REQUESTS_AT_ONCE = 20
"""Number of requests for in-sync sets that are on their way at once, of all leaders."""
REPLICAS_AT_ONCE = 500
"""Number of replicas that a stand-in reports at once: a broker's come back in portions."""
Placed = tuple[Topic, int, Partition]


class Meter:
    """The processor time of each process of a world, by the names of its processes."""

    def __init__(self, world: World) -> None:
        self._spent_s: Counter[str] = Counter()
        self._last_s = time.thread_time()
        world.loop.observer = self._spent

    def _spent(self, owner: Owner) -> None:
        now_s = time.thread_time()
        self._spent_s[owner.name.partition("#")[0]] += now_s - self._last_s  # type: ignore[assignment]
        self._last_s = now_s

    def spent_s(self, process: str) -> float:
        return self._spent_s[process]


class StandInReplicas:
    """A replica process that has no logs: each replica is open as soon as it is assigned."""

    def __init__(self, process: Process, spec: ReplicaHostSpec) -> None:
        self._process = process
        self._spec = spec
        process.start(self._run())

    async def wait_dead(self) -> str:
        await asyncio.shield(self._process.exited)
        return "it ended"

    def kill(self) -> None:
        self._process.kill()

    async def _run(self) -> None:
        environment, spec = self._process.environment, self._spec
        identity = Identity(
            role="server", key=SECRET, cluster_id=CLUSTER_ID, broker=spec.broker
        )
        pool = ConnectionPool(environment, identity, CONFIG)
        at = DataDirectory.read_endpoint(environment.disk, spec.data_path)
        assert at is not None
        pid = self._process.pid
        attach = messages.AttachReplicaHost(spec.incarnation, pid, pid, at[0], 1, [])
        attached, _ = await pool.request(*at, attach, timeout_s=PATIENCE_S)
        opened: dict[tuple[str, int], messages.ReplicaStatus] = {}
        closed: list[tuple[str, int]] = []
        version = 0
        while True:
            request = messages.ReplicaHostHeartbeat(
                spec.incarnation, version, list(opened.values()), CONFIG.heartbeat_interval_ms,
                has_all=False, closed=closed, session=attached.session,
            )  # fmt: skip
            answer, _ = await pool.request(*at, request, timeout_s=PATIENCE_S)
            version = answer.version
            opened = {
                (given.topic_id, given.partition): messages.ReplicaStatus(
                    given.topic_id, given.partition, None, 0
                )
                for given in answer.assignments
            }
            closed = list(answer.removed)


class StandInRuntime:
    """Starts stand-ins for replica processes."""

    processes_max = 8

    def __init__(self, host: Host) -> None:
        self._host = host

    async def start_replica_host(self, spec: ReplicaHostSpec) -> HostProcess:
        return StandInReplicas(self._host.process(f"replicas-{spec.broker}"), spec)

    async def start_object_server(self, spec: ObjectServerSpec) -> HostProcess:
        raise NotImplementedError

    def adopt(self, pid: int, pid_start_time: int) -> HostProcess | None:
        return None


class StandInBroker:
    """A broker that has no replica processes, and renews its session. It takes the metadata log
    without keeping it, unless it is a voter: then its keeper of the log is real."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.starts = 1
        self.host = world.host(f"broker-{number}")
        self.controller: Address | None = None
        self.keeper: MetadataKeeper | None = None
        self.commit_index = 0
        self.received_bytes = 0
        self.received_snapshots = 0
        self.heard_s = 0.0
        """Time at which its last heartbeat was sent."""
        self.directory_id = f"{number:032d}"
        self._world = world
        self._last_index = 0
        self._process: Process | None = None
        self._pool: ConnectionPool

    @property
    def incarnation(self) -> str:
        return f"b{self.number:015d}{self.starts:016d}"

    @property
    def replicas_incarnation(self) -> str:
        return f"r{self.number:015d}{self.starts:016d}"

    @property
    def is_connected(self) -> bool:
        return self._process is not None

    def registration(self) -> BrokerRegistered:
        return BrokerRegistered(
            self.number, self.directory_id, self.starts, self.incarnation, self.host.address, PORT,
            f"node{self.number}", 1_000_000,
        )  # fmt: skip

    def keep(self, snapshot: bytes) -> None:
        """Has its directory hold this snapshot as the metadata log."""
        process = self.host.process("format")
        environment = process.environment
        log = process.call(MetadataLog.open, environment.disk, f"{ROOT}/metadata")
        process.call(log.promise, 1)
        process.call(log.install_snapshot, 1, 1, snapshot)
        process.call(log.close)
        process.kill()

    def start(self, *, keeps: bool = False) -> None:
        self._process = process = self.host.process(f"stand-in-{self.number}")
        environment = process.environment
        identity = Identity(
            role="server", key=SECRET, cluster_id=CLUSTER_ID, broker=self.number
        )
        self._pool = ConnectionPool(environment, identity, CONFIG)
        server = Server(environment, identity, self._handle, CONFIG)

        async def serve() -> None:
            if keeps:
                self.keeper = MetadataKeeper(
                    environment,
                    DataDirectory.open(environment, ROOT),
                    MetadataLog.open(environment.disk, f"{ROOT}/metadata"),
                    incarnation=self.incarnation,
                    snapshot_records=CONFIG.metadata_snapshot_records,
                    now_s=environment.clock.monotonic,
                    on_applied=lambda records: None,
                )
            await server.start(self.host.address, PORT)
            await self._keep_session()

        process.start(serve())

    def die(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process = None

    def stand_still(self, seconds: float) -> None:
        assert self._process is not None
        self._process.pause()
        self._world.loop.call_later(seconds, self._process.resume)

    async def ask(self, request: messages.Request[messages.ResponseT]) -> messages.ResponseT:
        """Asks the controller, as code of its own process."""
        assert self._process is not None

        async def asked() -> messages.ResponseT:
            assert self.controller is not None
            answer, _ = await self._pool.request(*self.controller, request, timeout_s=PATIENCE_S)
            return answer

        return await self._process.run(asked())

    async def _keep_session(self) -> None:
        while True:
            await asyncio.sleep(CONFIG.heartbeat_interval_ms / 1000)
            if self.controller is None:
                continue
            sent_s = self._world.now_s
            heartbeat = messages.BrokerHeartbeat(self.number, self.incarnation)
            with contextlib.suppress(RayqError):
                await self._pool.request(*self.controller, heartbeat, timeout_s=1)
                self.heard_s = sent_s

    async def register(self) -> None:
        known = self.registration()
        await self.ask(
            messages.RegisterBroker(
                CLUSTER_ID, self.number, known.directory_id, known.start_counter,
                known.incarnation, known.host, known.port, known.node_id, known.replicas_max, [],
            )
        )  # fmt: skip

    def _handle(
        self, peer: Peer, request: messages.AnyRequest, payload: memoryview
    ) -> Result | Coroutine[Any, Any, Result]:
        if isinstance(request, messages.AppendMetadata):
            self.controller = request.host, request.port
            self.commit_index = max(self.commit_index, request.commit_index)
        self.received_bytes += len(payload)
        if self.keeper is not None:
            match request:
                case messages.Prepare():
                    return self.keeper.prepare(request)
                case messages.ReadMetadataLog():
                    return self.keeper.read(request)
                case messages.AppendMetadata():
                    return self.keeper.append(request, payload)
                case messages.InstallMetadataSnapshot():
                    return self.keeper.install(request, payload)
                case messages.InstallMetadataSnapshotPart():
                    return self.keeper.install_part(request, payload)
        if isinstance(request, messages.InstallMetadataSnapshot):
            self.received_snapshots += 1
            self._last_index = request.last_index
        elif isinstance(request, messages.InstallMetadataSnapshotPart):
            received_bytes = request.position + len(payload)
            is_whole = received_bytes == request.snapshot_bytes
            if is_whole:
                self.received_snapshots += 1
                self._last_index = request.last_index
            return messages.InstallMetadataSnapshotPartResponse(
                self.directory_id, received_bytes, request.last_index if is_whole else 0
            )
        elif isinstance(request, messages.AppendMetadata):
            if request.previous_index > self._last_index:
                if request.previous_index > 2:  # It has what the metadata begin with.
                    raise StalePartitionError(f"Broker {self.number} is not that far.")
                self._last_index = request.previous_index
            self._last_index = max(self._last_index, request.previous_index + _length(payload))
        else:
            raise RayqError(f"A stand-in does not answer {type(request).__name__}.")
        return messages.AppendMetadataResponse(self.directory_id, self._last_index)


def _length(payload: memoryview) -> int:
    """Number of items of a msgpack list."""
    kind = payload[0]
    if kind >> 4 == 0x9:
        return kind & 0x0F
    return int.from_bytes(payload[1 : 3 if kind == 0xDC else 5], "big")


class Scale:
    """A cluster of `brokers` with topics of 1,000 partitions each, and what happens to it."""

    def __init__(self, world: World, brokers: int, partitions: int) -> None:
        self._world = world
        self._meter = Meter(world)
        self._size = brokers
        self._partitions = partitions
        self._topics = max(1, partitions // PARTITIONS_PER_TOPIC)
        self.rows: list[Row] = []
        self.brokers = {
            number: StandInBroker(world, number) for number in range(brokers) if number != REAL
        }
        self._voter = self.brokers[0]
        self._real_host = world.host(f"broker-{REAL}")
        self._real: Broker | None = None
        self._controller_host = world.host("controller")
        self._controller: Process | None = None
        self._client = world.host("client").process("client")
        self._pool = ConnectionPool(
            self._client.environment,
            Identity(role="server", key=SECRET, cluster_id=CLUSTER_ID, broker=None),
            CONFIG,
        )
        self._idle_rates = {"controller": 0.0, "broker": 0.0}

    @property
    def state(self) -> ClusterState:
        assert self._voter.keeper is not None
        return self._voter.keeper.state

    @property
    def version(self) -> int:
        assert self._voter.keeper is not None
        return self._voter.keeper.version

    @property
    def victim(self) -> StandInBroker:
        """The broker that ends."""
        return self.brokers[VOTERS + 1]

    def row(self, name: str, unit: str, value: float, target: float | None = None) -> None:
        print(f"{self._size} x {self._partitions:,}: {name}: {value:,.3f} {unit}", flush=True)
        self.rows.append(
            Row(name=name, unit=unit, samples=[value], target=target, better="lower")
        )

    # --- the beginning ----------------------------------------------------------------------------

    def _first_records(self) -> bytes:
        """A snapshot of metadata in which every partition is led, and all replicas are in sync."""
        for number in range(VOTERS):
            self.brokers[number].directory_id = _format(self.brokers[number].host, number)
        directories = {REAL: _format(self._real_host, REAL)}
        directories |= {number: broker.directory_id for number, broker in self.brokers.items()}
        incarnations = {
            number: "r" * 32 if number == REAL else self.brokers[number].replicas_incarnation
            for number in range(self._size)
        }
        state = ClusterState()
        state.replay(EpochStarted(1, self._controller_host.address, 1, CLUSTER_ID))
        state.replay(
            VotersChanged(tuple(Voter(number, directories[number]) for number in range(VOTERS)))
        )
        for number in range(self._size):
            if number == REAL:
                state.replay(
                    BrokerRegistered(
                        REAL, directories[REAL], 0, "b" * 32, self._real_host.address, PORT,
                        f"node{REAL}", 1_000_000,
                    )
                )  # fmt: skip
            else:
                state.replay(self.brokers[number].registration())
        for topic in range(self._topics):
            topic_id = f"{topic:032d}"
            state.replay(TopicCreated(topic_id, f"topic{topic}", {}, REPLICATION_FACTOR))
            for number in range(min(PARTITIONS_PER_TOPIC, self._partitions)):
                # A broker's end spreads its leaders over all others.
                first = topic * PARTITIONS_PER_TOPIC + number
                step = 1 + first // self._size % (self._size // 2 - 1)
                placed = tuple((first + place * step) % self._size for place in range(3))
                members = tuple(
                    Member(broker, directories[broker], incarnations[broker]) for broker in placed
                )
                value = PartitionValue(
                    placed, members, leader=placed[0], leader_epoch=1, partition_epoch=1,
                    leader_incarnation=incarnations[placed[0]],
                )
                state.replay(PartitionChanged(topic_id, number, value))
                for broker in placed:
                    state.replay(
                        ReplicaRegistered(
                            topic_id, number, broker, directories[broker], incarnations[broker],
                            "10.0.0.1", PORT, None, 0,
                        )
                    )  # fmt: skip
        state.validate()
        return encode_records(state.snapshot())

    async def start(self) -> None:
        snapshot = self._first_records()
        self.row("a snapshot of the metadata", "MB", len(snapshot) / 1e6)
        for number in range(VOTERS):
            self.brokers[number].keep(snapshot)
        for number, broker in self.brokers.items():
            broker.start(keeps=number < VOTERS)
        await asyncio.sleep(1)
        await self.another_controller("a controller's start")

    def _start_controller(self) -> None:
        self._controller = process = self._controller_host.process("controller")
        brokers = [(self.brokers[number].host.address, PORT) for number in range(VOTERS)]

        async def serve() -> None:
            await ControllerServer(
                process.environment, CONFIG, cluster_id=CLUSTER_ID, secret=SECRET,
                host=self._controller_host.address, brokers=brokers,
            ).start()  # fmt: skip

        process.start(serve())

    def _start_real(self) -> None:
        process = self._real_host.process("broker")

        async def serve() -> None:
            self._real = Broker(
                process.environment, CONFIG, StandInRuntime(self._real_host),
                DataDirectory.open(process.environment, ROOT),
                cluster_name="scale", host=self._real_host.address, port=PORT,
                node_id=f"node{REAL}", replicas_max=1_000_000,
                peers=[(self._voter.host.address, PORT)],
            )  # fmt: skip
            await self._real.start()

        process.start(serve())

    # --- waiting and measuring --------------------------------------------------------------------

    async def _ask(self, request: messages.Request[messages.ResponseT]) -> messages.ResponseT:
        controller = self._voter.controller
        assert controller is not None
        return await self._ask_at(controller, request)

    async def _ask_at(
        self, at: Address, request: messages.Request[messages.ResponseT]
    ) -> messages.ResponseT:
        answer, _ = await self._client.run(
            self._pool.request(*at, request, timeout_s=PATIENCE_S)
        )
        return answer

    async def _until(self, holds: Callable[[ClusterState], bool], what: str) -> None:
        """Waits for a committed state. It looks at each once."""
        seen = -1

        def is_there() -> bool:
            nonlocal seen
            before, seen = seen, self.version
            return seen != before and holds(self.state)

        await wait_until(is_there, PATIENCE_S, what)

    async def _everywhere(self) -> None:
        """Waits until all brokers have applied what is committed now."""
        version = self.version

        def have_it() -> bool:
            connected = (broker for broker in self.brokers.values() if broker.is_connected)
            is_at_real = self._real is None or self._real.metadata.version >= version
            return is_at_real and all(broker.commit_index >= version for broker in connected)

        await wait_until(have_it, PATIENCE_S, "all brokers")

    @contextlib.asynccontextmanager
    async def _measured(self, name: str, target_s: float | None = None) -> AsyncIterator[None]:
        """Measures the processor time of the controller and of a broker beyond what they need when
        idle, and what is pushed to a broker."""
        gc.collect()
        before = {process: self._meter.spent_s(process) for process in self._idle_rates}
        pushed = {number: broker.received_bytes for number, broker in self.brokers.items()}
        started_s = self._world.now_s
        yield
        seconds = self._world.now_s - started_s
        for process, rate in self._idle_rates.items():
            spent_s = self._meter.spent_s(process) - before[process] - rate * seconds
            target = target_s if process == "controller" else None
            self.row(f"{name}: processor time of the {process}", "s", spent_s, target)
        received_bytes = max(
            broker.received_bytes - pushed[number] for number, broker in self.brokers.items()
        )
        self.row(f"{name}: pushed to each broker", "MB", received_bytes / 1e6)

    # --- the scenes -------------------------------------------------------------------------------

    async def another_controller(self, name: str) -> None:
        if self._controller is not None:
            self._controller.kill()
        epoch = self.state.controller_epoch
        before_s = self._meter.spent_s("controller")
        started_s = self._world.now_s
        self._start_controller()
        await self._until(lambda state: state.controller_epoch > epoch, "a controller")
        await self._everywhere()
        self.row(f"{name}: until its epoch is everywhere", "virtual s",
                 self._world.now_s - started_s)  # fmt: skip
        await asyncio.sleep(CONFIG.session_timeout_ms / 1000)
        spent_s = self._meter.spent_s("controller") - before_s
        self.row(f"{name}: its processor time, with one session", "s", spent_s)

    async def idle(self) -> None:
        await asyncio.sleep(12)  # The balance of leaders.
        before = {process: self._meter.spent_s(process) for process in self._idle_rates}
        await asyncio.sleep(IDLE_S)
        for process in self._idle_rates:
            rate = (self._meter.spent_s(process) - before[process]) / IDLE_S
            self._idle_rates[process] = rate
            self.row(f"idle: the {process}", "% of a core", 100 * rate)

    async def a_broker_joins(self) -> None:
        """The real broker returns with an empty copy of the metadata."""
        async with self._measured("a broker starts, until its replicas are in sync"):
            self._start_real()
            await self._until(
                lambda state: all(
                    REAL in partition.processes
                    and partition.processes[REAL].incarnation != "r" * 32
                    for _, _, partition in state.replicas_on(REAL)
                ),
                "its replicas",
            )
            await self._rejoin(REAL)

    async def end_of_a_broker(self) -> StandInBroker:
        leads = Counter(partition.value.leader for _, _, partition in self.state.all_partitions())
        victim = self.victim
        self.row("a broker ends: it led", "partitions", leads[victim.number])
        had = list(self.state.index.by_broker[victim.number])
        async with self._measured("a broker ends, until all lead", target_s=1.0):
            victim.die()
            await self._until(lambda state: not state.is_live(victim.number), "its session")
            await self._until(lambda state: _all_led(state, state.found(had)), "leaders")
            await self._everywhere()
            session_s = CONFIG.session_timeout_ms / 1000
            beyond_s = self._world.now_s - victim.heard_s - session_s
        self.row("a broker ends: until all lead, beyond its session", "virtual s", beyond_s, 2.0)
        return victim

    async def return_of(self, broker: StandInBroker) -> None:
        async with self._measured("it returns, until all are in sync"):
            await self._start_again(broker)

    async def controlled_restart(self) -> None:
        broker = self.brokers[VOTERS + 2]
        async with self._measured("a controlled restart of a broker"):
            ends = [
                messages.ReplicaRegistration(
                    topic.topic_id, number, broker.replicas_incarnation, "10.0.0.1", 1, None, 0
                )
                for topic, number, _ in self.state.replicas_on(broker.number)
            ]
            stopped = messages.BrokerStopped(broker.number, broker.incarnation, ends)
            await broker.ask(stopped)
            broker.die()
            await self._start_again(broker)

    async def _start_again(self, broker: StandInBroker) -> None:
        broker.starts += 1
        broker.controller = self._voter.controller
        broker.start()
        await broker.register()
        await self._until(lambda state: state.is_live(broker.number), "its session")
        await self._register({broker.number}, self.state.replicas_on(broker.number))
        incarnation = broker.replicas_incarnation

        def all_run(state: ClusterState) -> bool:
            return all(
                broker.number in partition.processes
                and partition.processes[broker.number].incarnation == incarnation
                for _, _, partition in state.replicas_on(broker.number)
            )

        await self._until(all_run, "its replicas")
        await self._rejoin(broker.number)

    async def create(self) -> None:
        """Creates a topic, and waits until all brokers see each of its partitions led."""
        async with self._measured("1,000 more partitions, until all lead"):
            request = messages.CreateTopic(
                request_id="t" * 32, name="more", partitions=PARTITIONS_PER_TOPIC,
                replication_factor=REPLICATION_FACTOR, config={},
            )  # fmt: skip
            await self._ask(request)

            def partitions(state: ClusterState) -> Iterator[Placed]:
                topic = find_topic(state, "more")
                return state.found((topic.topic_id, number) for number in topic.partitions)

            await self._until(lambda state: "more" in state.topic_ids, "the topic")
            await self._register(set(self.brokers), partitions(self.state))
            await self._until(lambda state: _all_led(state, partitions(state)), "its leaders")
            await self._everywhere()

    async def a_client(self) -> None:
        for name in ("a client's first metadata", "a client's metadata again", "and after a move"):
            if name == "and after a move":
                move = ("topic0", 0, [broker % self._size for broker in (5, 6, 7)])
                await self._ask(messages.AlterReassignments(request_id="m" * 32, moves=[move]))
                await self._everywhere()
            before_s = {who: self._meter.spent_s(who) for who in ("broker", "client")}
            after: str | None = ""
            while after is not None:
                request = messages.Metadata(topics=None, after=after)
                answer = await self._ask_at((self._real_host.address, PORT), request)
                after = answer.next_after
            for who, spent_s in before_s.items():
                spent_s = self._meter.spent_s(who) - spent_s
                self.row(f"{name}: processor time of the {who}", "s", spent_s)

    async def _register(self, brokers: Set[int], partitions: Iterable[Placed]) -> None:
        """The replicas of brokers start."""
        missing: dict[int, list[messages.ReplicaRegistration]] = defaultdict(list)
        for topic, number, partition in partitions:
            for replica in brokers & set(partition.value.replicas):
                missing[replica].append(
                    messages.ReplicaRegistration(
                        topic.topic_id, number, self.brokers[replica].replicas_incarnation,
                        "10.0.0.1", 1, None, 0, partition.value.partition_epoch,
                    )
                )  # fmt: skip

        async def register(broker: StandInBroker) -> None:
            replicas = missing[broker.number]
            for first in range(0, len(replicas), REPLICAS_AT_ONCE):
                portion = replicas[first : first + REPLICAS_AT_ONCE]
                await broker.ask(
                    messages.RegisterReplicas(broker.number, broker.incarnation, portion)
                )

        await asyncio.gather(*(register(self.brokers[number]) for number in sorted(missing)))

    async def _rejoin(self, broker: int) -> None:
        """Leaders take the broker's replicas into their in-sync sets again."""
        turns = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def propose(proposals: list[messages.AlterPartition]) -> None:
            for first in range(0, len(proposals), PROPOSALS_MAX):
                async with turns:
                    await self._ask(
                        messages.AlterPartitions(proposals[first : first + PROPOSALS_MAX])
                    )

        by_leader: dict[int, list[messages.AlterPartition]] = defaultdict(list)
        for topic, number, partition in self.state.replicas_on(broker):
            value = partition.value
            members = [(member.broker, member.incarnation) for member in value.isr]
            process = partition.processes.get(broker)
            if process is None or value.leader is None or (broker, process.incarnation) in members:
                continue
            assert value.leader_incarnation is not None
            request = messages.AlterPartition(
                topic.topic_id, number, value.leader, value.leader_incarnation, value.leader_epoch,
                value.partition_epoch, [*members, (broker, process.incarnation)],
            )  # fmt: skip
            by_leader[value.leader].append(request)
        await asyncio.gather(*map(propose, by_leader.values()))
        await self._everywhere()


def _format(host: Host, broker: int) -> str:
    """Formats a host's disk. Returns the directory id."""
    process = host.process("format")
    meta = process.call(
        lambda: format_directory(
            process.environment, ROOT, cluster_id=CLUSTER_ID, broker=broker, secret=SECRET
        )
    )
    process.kill()
    return meta.directory_id


def _all_led(state: ClusterState, partitions: Iterable[Placed]) -> bool:
    return all(
        partition.value.leader is not None and state.is_live(partition.value.leader)
        for _, _, partition in partitions
    )


async def _measure(scale: Scale) -> None:
    await scale.start()
    await scale.a_broker_joins()
    await scale.idle()
    victim = await scale.end_of_a_broker()
    await scale.return_of(victim)
    await scale.controlled_restart()
    await scale.create()
    await scale.a_client()
    await scale.another_controller("another controller")


def main() -> None:
    logging.disable(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("brokers", type=int, nargs="?", default=30)
    parser.add_argument("partitions", type=int, nargs="?", default=10_000)
    parser.add_argument("--json", type=Path, default=Path(".bench/scale.json"))
    given = parser.parse_args()
    with World(seed=1) as world:
        scale = Scale(world, given.brokers, given.partitions)
        world.run(_measure(scale), limit_s=10_000)
    print_all(wide_console(), given.json, scale.rows, machine.describe(), [])


if __name__ == "__main__":
    main()

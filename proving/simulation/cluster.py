"""A whole rayq cluster in a simulated world: it runs the actors of production.

There is one host for each broker, with a disk of its own, and one for the controller's process.
Clients run on further hosts of the world, with the `Identity` of `client_identity`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from proving.simulation.object_store import ProcessObjectStore, SimulatedObjectStore
from proving.simulation.process import Process
from proving.simulation.server_view import (
    directory_of,
    log_of,
    replica_log_of,
    replicas_of,
    role_of,
    spec_of,
)
from proving.simulation.world import Host, World
from rayq.actors.broker.broker import Broker
from rayq.actors.controller.server import ControllerServer
from rayq.actors.hosting import (
    HostProcess,
    ObjectServerSpec,
    ReplicaHostSpec,
    host_name,
)
from rayq.actors.objects.object_server import ObjectServer
from rayq.actors.replica.replica import Replica
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.config import ClusterConfig
from rayq.core.cluster.records import Voter
from rayq.environment import Address
from rayq.errors import RayqError
from rayq.runtime.layout import directory_path, voter_count, write_first_record
from rayq.storage.data_directory import DataDirectory, format_directory
from rayq.wire.authentication import Identity, client_key

ROOT = "/data"
PORT = 9392
REPLICAS_MAX = 1000
OBJECT_SERVER = "objects-"
"""The prefix of the names of object servers."""


class SimulatedHostProcess:
    """`HostProcess` of a simulated process. `on_kill` is told before its broker kills it."""

    def __init__(self, process: Process, on_kill: Callable[[Process], None]) -> None:
        self.process = process
        self._on_kill = on_kill

    async def wait_dead(self) -> str:
        await asyncio.shield(self.process.exited)
        return f"process {self.process.pid} ended"

    def kill(self) -> None:
        if self.process.alive:
            self._on_kill(self.process)
        self.process.kill()


class SimulatedRuntime:
    """`Runtime` of one host."""

    processes_max = 2

    def __init__(
        self,
        host: Host,
        config: ClusterConfig,
        running: dict[Process, ReplicaHost],
        objects: SimulatedObjectStore,
        on_kill: Callable[[Process], None],
    ) -> None:
        """`running` is told of each replica process that starts, `on_kill` of each that the broker
        kills."""
        self._host = host
        self._config = config
        self._running = running
        self._objects = objects
        self._on_kill = on_kill

    async def start_replica_host(self, spec: ReplicaHostSpec) -> HostProcess:
        process = self._host.process(host_name(spec))

        async def live() -> None:
            host = ReplicaHost(
                process.environment,
                self._config,
                spec,
                host=self._host.address,
                pid_start_time=process.pid,
            )
            self._running[process] = host
            await host.run()
            self._host.world.loop.call_soon(process.kill)

        process.start(live())
        return SimulatedHostProcess(process, self._on_kill)

    async def start_object_server(self, spec: ObjectServerSpec) -> HostProcess:
        process = self._host.process(f"{OBJECT_SERVER}{spec.broker}")

        async def live() -> None:
            server = ObjectServer(
                process.environment,
                self._config,
                spec,
                ProcessObjectStore(self._objects, process),
                host=self._host.address,
                pid_start_time=process.pid,
            )
            await server.run()
            self._host.world.loop.call_soon(process.kill)

        process.start(live())
        return SimulatedHostProcess(process, self._on_kill)

    def adopt(self, pid: int, pid_start_time: int) -> HostProcess | None:
        process = self._host.find_process(pid)
        return None if process is None else SimulatedHostProcess(process, self._on_kill)


class SimulatedCluster:
    """See the module. Call `start` once, then inject any faults."""

    def __init__(
        self, world: World, *, brokers: int = 3, config: ClusterConfig | None = None
    ) -> None:
        self.world = world
        self.config = config or ClusterConfig()
        self.hosts = [world.host(f"broker-{number}") for number in range(brokers)]
        self.controller_host = world.host("controller")
        self.objects = SimulatedObjectStore(world)
        self.brokers: dict[int, Broker] = {}
        """The last broker object of each broker, even when it is dead."""
        self.broker_of: dict[Process, Broker] = {}
        """Every broker object that ever started, by its process."""
        self.replica_hosts: dict[Process, ReplicaHost] = {}
        """Every replica process that was ever started."""
        self.broker_processes: dict[int, Process] = {}
        self.controller_process: Process | None = None
        self.controller: ControllerServer | None = None
        self.loses_a_disk = False
        """True if a broker is losing its disk: no other fault may begin until all is in sync."""
        self.on_put_aside: Callable[[int, str], None] | None = None
        """Called with broker and path before a broker moves a partition to its quarantine."""
        self.on_kill: Callable[[Process], None] | None = None
        """Called with a process that lives before its broker kills it."""
        self.peers = self.endpoints
        """The addresses at which brokers look for each other when they start. On Ray the brokers of
        a fresh cluster know no addresses."""
        self.secret = b"s" * 32
        self.cluster_id = f"{world.seed:032x}"

    @property
    def endpoints(self) -> list[Address]:
        """The addresses at which clients find the brokers. The ports are those of the first
        start."""
        return [(host.address, PORT) for host in self.hosts]

    @property
    def client_identity(self) -> Identity:
        return Identity(
            role="client", key=client_key(self.secret), cluster_id=self.cluster_id, broker=None
        )

    async def start(self) -> None:
        """Formats the disks, starts brokers and controller, waits until all have registered."""
        voters = []
        for number, host in enumerate(self.hosts):
            process = host.process("format")
            meta = process.call(self._format, process, number)
            voters.append(Voter(number, meta))
        chosen = tuple(voters[: voter_count(len(voters))])
        for voter in chosen:
            process = next(iter(self.hosts[voter.broker].processes))
            path = directory_path(ROOT, voter.broker)
            process.call(write_first_record, process.environment, path, chosen)
        for host in self.hosts:
            for process in list(host.processes):
                process.kill()
        for number in range(len(self.hosts)):
            self.start_broker(number)
        self.start_controller()
        await self.wait_until(
            lambda: (
                len(self.brokers) == len(self.hosts)
                and all(broker.is_registered for broker in self.brokers.values())
            ),
            "every broker to register",
        )

    def _format(self, process: Process, number: int) -> str:
        meta = format_directory(
            process.environment,
            directory_path(ROOT, number),
            cluster_id=self.cluster_id,
            broker=number,
            secret=self.secret,
        )
        return meta.directory_id

    def start_broker(self, number: int) -> None:
        """Boots the host if it is dark, and starts a broker process on its disk."""
        host = self.hosts[number]
        process = host.process(f"broker-{number}")
        self.broker_processes[number] = process

        async def live() -> None:
            try:
                broker = Broker(
                    process.environment,
                    self.config,
                    SimulatedRuntime(
                        host, self.config, self.replica_hosts, self.objects, self._killed
                    ),
                    DataDirectory.open(process.environment, directory_path(ROOT, number)),
                    cluster_name="simulated",
                    host=host.address,
                    port=PORT,
                    node_id=host.name,
                    replicas_max=REPLICAS_MAX,
                    peers=self.peers,
                )
                await broker.start()
            except RayqError as error:
                self.world.trace.note(f"broker {number} does not start: {error}")
            else:
                self._watch_directory(number, broker)
                self.brokers[number] = self.broker_of[process] = broker
                await broker.stopped
            self.world.loop.call_soon(process.kill)

        process.start(live())

    def _killed(self, process: Process) -> None:
        if self.on_kill is not None:
            self.on_kill(process)

    def _watch_directory(self, number: int, broker: Broker) -> None:
        directory = directory_of(broker)
        put_aside = directory.quarantine

        def watched(path: str, **options: bool) -> str:
            if self.on_put_aside is not None:
                self.on_put_aside(number, path)
            return put_aside(path, **options)

        directory.quarantine = watched  # type: ignore[method-assign]

    def start_controller(self) -> None:
        """Starts the controller's own process (the preferred host)."""
        process = self.controller_host.process("controller")
        self.controller_process = process

        async def live() -> None:
            self.controller = ControllerServer(
                process.environment,
                self.config,
                cluster_id=self.cluster_id,
                secret=self.secret,
                host=self.controller_host.address,
                brokers=self.endpoints,
            )
            await self.controller.start()

        process.start(live())

    def format_empty_disk(self, number: int) -> None:
        """Puts an empty disk into a host on which nothing runs, formatted for its broker id."""
        host = self.hosts[number]
        disk = self.world.new_disk(f"{host.name}.disk-{self.world.next_pid()}")
        old = host.swap_disk(disk)
        disk.sync_s, disk.writebacks = old.sync_s, old.writebacks
        process = host.process("format")
        process.call(self._format, process, number)
        process.kill()

    def kill_controller(self) -> None:
        if self.controller_process is not None:
            self.controller_process.kill()

    def kill_broker(self, number: int) -> None:
        """Kills only the broker's process. Its replica processes run on."""
        self.broker_processes[number].kill()

    def replica_processes(self, number: int) -> list[Process]:
        """The replica processes that run on a broker's host."""
        return [
            process for process in self.hosts[number].processes if process.name.startswith("rayq:")
        ]

    def live_replicas(self) -> Iterator[tuple[Process, Replica]]:
        """The replicas in processes that live, each with its process."""
        for process, host in self.replica_hosts.items():
            if process.alive:
                for replica in replicas_of(host).values():
                    yield process, replica

    def object_servers(self) -> list[Process]:
        """The object servers that run."""
        return [
            process
            for host in self.hosts
            for process in host.processes
            if process.name.startswith(OBJECT_SERVER)
        ]

    def topic_id(self, name: str) -> str:
        """The topic's id, as the broker with the newest metadata knows it."""
        newest = max(self.brokers.values(), key=lambda broker: broker.metadata.version)
        return newest.metadata.state.topic_ids[name]

    def is_whole(self) -> bool:
        """Returns whether every broker is live and every partition has a leader and all its
        replicas in sync, as the live broker with the newest metadata knows it. Only replica
        processes that run now count. Of a partition that is being moved, the replicas before the
        move count."""
        live = [
            self.broker_of[process]
            for process in self.broker_processes.values()
            if process.alive and process in self.broker_of
        ]
        if len(live) < len(self.hosts) or not all(broker.is_registered for broker in live):
            return False
        running = {
            (spec.broker, spec.incarnation)
            for process, host in self.replica_hosts.items()
            if process.alive and (spec := spec_of(host))
        }
        state = max(live, key=lambda broker: broker.metadata.version).metadata.state
        return all(
            partition.value.leader is not None
            and {broker.broker for broker in partition.value.isr}.issuperset(
                partition.value.origin or partition.value.replicas
            )
            and running.issuperset(
                (broker.broker, broker.incarnation) for broker in partition.value.isr
            )
            for _, _, partition in state.all_partitions()
        )

    def is_replicated(self) -> bool:
        """Returns whether all replicas of each partition end where their leader's log ends, with
        all of it committed and flushed."""
        ends: dict[tuple[str, int], set[tuple[int, int, int]]] = {}
        for _, replica in self.live_replicas():
            held = replica_log_of(replica)
            if not held.is_open:  # A move has just placed it there.
                return False
            key = replica.assignment.topic_id, replica.assignment.partition
            ends.setdefault(key, set()).add(
                (held.log.end_offset, held.log.flushed_offset, held.high_watermark)
            )
        return all(len(found) == 1 and len(set(next(iter(found)))) == 1 for found in ends.values())

    def describe(self) -> str:
        """The present brokers, partitions and replicas, for the message of a failure."""
        lines = []
        for number, process in self.broker_processes.items():
            broker = self.broker_of.get(process)
            if not process.alive or broker is None:
                lines.append(f"broker {number}: {'starting' if process.alive else 'dead'}")
                continue
            metadata = broker.metadata
            lines.append(
                f"broker {number}: {process.name}, metadata {metadata.version}, controller epoch "
                f"{metadata.controller_epoch} at {metadata.controller}, hosts one: "
                f"{broker.controller_host.controller is not None}"
            )
            for topic, partition, known in metadata.state.all_partitions():
                lines.append(f"  {topic.name}-{partition}: {known.value}")
        for process, replica in self.live_replicas():
            held, log, role = replica_log_of(replica), log_of(replica), role_of(replica)
            does = "nothing" if role is None else type(role).__name__
            lines.append(f"{process.name}: {replica.where} {does}, failure {held.failure}")
            if log is not None:
                lines.append(
                    f"  start {log.start_offset}, local start {log.local_start_offset}, "
                    f"high watermark {held.high_watermark}, "
                    f"flushed {log.flushed_offset}, end {log.end_offset}"
                )
        return "\n".join(lines)

    async def wait_until(
        self, holds: Callable[[], bool], what: str, *, limit_s: float = 60.0
    ) -> None:
        """Waits until `holds()`. Raises AssertionError after `limit_s` virtual seconds."""
        deadline_s = self.world.now_s + limit_s
        while not holds():
            assert self.world.now_s < deadline_s, (
                f"waited {limit_s} s in vain for {what}.\n{self.describe()}"
            )
            await asyncio.sleep(0.02)

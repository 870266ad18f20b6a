"""All actors in this process, on one event loop: for users' unit tests and notebooks.

The same actors, real files, real sockets on the loopback; no Ray. A "process" here is a set of
tasks and sockets that end together, so a kill is prompt but not the real thing: the tests of
durability use real processes and the simulation.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from rayq.actors.broker.broker import Broker
from rayq.actors.controller.server import ControllerServer
from rayq.actors.hosting import HostProcess, ObjectServerSpec, ReplicaHostSpec
from rayq.actors.objects.object_server import ObjectServer
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.config import ClusterConfig
from rayq.environment import Address, Environment
from rayq.errors import RayqError
from rayq.runtime.cleaner_process import run_cleaner_process
from rayq.runtime.layout import (
    Directory,
    check_all_found,
    directory_path,
    find_directories,
    format_cluster,
    of_one_cluster,
)
from rayq.runtime.object_store import open_store
from rayq.runtime.start_checks import tell_recovering
from rayq.storage.data_directory import DataDirectory, read_secret
from rayq.wire.descriptors import shares

READY_TIMEOUT_S = 30.0
RECOVERY_TIMEOUT_S = 5.0
"""The maximum time that a start waits for partitions that were there before to be in sync."""
LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)
_process_numbers = itertools.count(1)
NewEnvironment = Callable[[str], Environment]
"""Makes the environment of one process, by its name; the simulation gives its own."""


class LocalProcess:
    """A "process" that a broker starts: `kill` drops it at once, its page cache stays."""

    def __init__(self, host: ReplicaHost | ObjectServer, environment: Environment) -> None:
        self._host = host
        self._environment = environment
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        try:
            await self._host.run()
        finally:
            self._end("it ended")

    def kill(self) -> None:
        self._environment.tasks.cancel_all()
        self._host.abort()
        self._end("it was killed")

    @property
    def is_running(self) -> bool:
        return not self._dead.done()

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._dead)

    def _end(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(reason)


class LocalHostProcess(LocalProcess):
    """A replica "process"."""

    def __init__(self, host: ReplicaHost, environment: Environment) -> None:
        super().__init__(host, environment)
        self._replica_host = host

    def has_replica(self, name: str) -> bool:
        """Returns whether it hosts that replica, `topic-partition`."""
        return any(replica.where == name for replica in self._replica_host.replicas)


class LocalRuntime:
    """Starts replica processes for one broker, on this loop."""

    processes_max = 8

    def __init__(self, new_environment: NewEnvironment, config: ClusterConfig, host: str) -> None:
        self._new_environment = new_environment
        self._config = config
        self._host = host
        self.processes: dict[int, LocalHostProcess] = {}
        self.object_servers: dict[int, LocalProcess] = {}

    async def start_replica_host(self, spec: ReplicaHostSpec) -> HostProcess:
        environment = self._new_environment(f"replica {spec.broker}/{spec.names[0]}")
        number = next(_process_numbers)
        host = ReplicaHost(
            environment,
            self._config,
            spec,
            host=self._host,
            pid_start_time=number,
            run_cleaner=run_cleaner_process,
        )
        process = LocalHostProcess(host, environment)
        self.processes[number] = process
        environment.tasks.spawn(process.run(), f"replica host {spec.names[0]}")
        return process

    async def start_object_server(self, spec: ObjectServerSpec) -> HostProcess:
        """Raises ConfigError where the object store cannot be used at all."""
        environment = self._new_environment(f"objects {spec.broker}")
        config = self._config
        assert config.remote_storage_url is not None
        store = open_store(
            config.remote_storage_url, environment, credentials=config.remote_storage_credentials
        )
        number = next(_process_numbers)
        server = ObjectServer(
            environment, config, spec, store, host=self._host, pid_start_time=number
        )
        process = LocalProcess(server, environment)
        self.object_servers[number] = process
        environment.tasks.spawn(process.run(), f"object server {spec.broker}")
        return process

    def adopt(self, pid: int, pid_start_time: int) -> HostProcess | None:
        return self.processes.get(pid_start_time) or self.object_servers.get(pid_start_time)


class LocalServers:
    """The servers of one cluster on this event loop. `start` returns when every broker has
    registered; `stop` is a controlled stop, `abort` a crash of them all."""

    def __init__(
        self,
        new_environment: NewEnvironment,
        config: ClusterConfig,
        *,
        root: str,
        brokers: int | None,
        name: str = "local",
        port: int = 0,
    ) -> None:
        self._new_environment = new_environment
        self._config = config
        self._root = root
        self._wanted = brokers
        self._name = name
        self._host = config.bind_host or LOOPBACK
        self._port = port
        self._ports: dict[int, int] = {}
        """The port on which each broker has listened: clients look for it there when it starts
        again."""
        self._brokers_here = 1
        self.brokers: dict[int, Broker] = {}
        self.runtimes: dict[int, LocalRuntime] = {}
        self.environments: dict[int, Environment] = {}
        self.controller: ControllerServer | None = None
        self.controller_environment: Environment | None = None
        self.cluster_id = ""
        self.secret = b""

    @property
    def endpoints(self) -> list[Address]:
        return [broker.endpoint for broker in self.brokers.values()]

    async def start(self) -> None:
        """Raises the errors of `Broker.start`, and RayqError when no controller comes up."""
        environment = self._new_environment("layout")
        directories = open_or_format(environment, self._root, self._wanted)
        self._brokers_here = len(directories)
        self.cluster_id = directories[0].cluster_id
        self.secret = read_secret(environment.disk, directories[0].path)
        try:
            for directory in directories:
                await self.start_broker(directory.broker)
            await self.start_controller()
            await self._wait_registered()
        except BaseException:
            self.abort()
            raise

    async def start_broker(self, number: int) -> Broker:
        environment = self._new_environment(f"broker {number}")
        runtime = LocalRuntime(self._new_environment, self._config, self._host)
        broker = Broker(
            environment,
            self._config,
            runtime,
            DataDirectory.open(environment, directory_path(self._root, number)),
            cluster_name=self._name,
            host=self._host,
            port=self._ports.get(number, self._port),
            node_id="local",
            replicas_max=self._config.max_replicas_per_broker
            or max(1, shares().replicas_max // self._brokers_here),
            peers=self.endpoints,
        )
        await broker.start()
        self._ports[number] = broker.endpoint[1]
        self.brokers[number] = broker
        self.runtimes[number] = runtime
        self.environments[number] = environment
        return broker

    async def start_controller(self) -> None:
        environment = self._new_environment("controller")
        environment.metrics.label(cluster=self._name)
        self.controller_environment = environment
        self.controller = ControllerServer(
            environment,
            self._config,
            cluster_id=self.cluster_id,
            secret=self.secret,
            host=self._host,
            brokers=self.endpoints,
        )
        await self.controller.start()

    def kill_controller(self) -> None:
        """The controller's process dies. Start another, or let a voter stand in."""
        if self.controller is not None:
            self.controller.close()
            self.controller = None

    def kill_broker(self, number: int) -> None:
        """The broker and its replica processes die, as a node does."""
        broker = self.brokers.pop(number)
        self.environments.pop(number).tasks.cancel_all()
        runtime = self.runtimes.pop(number)
        for process in (*runtime.processes.values(), *runtime.object_servers.values()):
            process.kill()
        broker.close()

    async def restart_broker(self, number: int) -> None:
        """Stops a broker and its replicas in a controlled way, unless it died, and starts it on its
        directory."""
        if number in self.brokers:
            await self.brokers[number].stop()
            self.kill_broker(number)
        broker = await self.start_broker(number)
        await wait_until(
            lambda: broker.is_registered, READY_TIMEOUT_S, f"broker {number} to register"
        )

    def kill_replica(self, number: int, name: str) -> None:
        """The process of one replica (`topic-partition`) on a broker dies."""
        for process in list(self.runtimes[number].processes.values()):
            if process.is_running and process.has_replica(name):
                process.kill()

    def kill_object_server(self, number: int) -> None:
        """The object server of a broker dies."""
        for process in list(self.runtimes[number].object_servers.values()):
            process.kill()

    async def stop(self) -> None:
        """A controlled stop of everything; the data stays."""
        if self.controller is not None:
            try:
                await self.controller.prepare_stop()
            except RayqError as error:
                logger.warning("stopping without a working controller: %s", error)
        await asyncio.gather(*(broker.stop() for broker in self.brokers.values()))
        self.abort()

    def abort(self) -> None:
        self.kill_controller()
        for number in list(self.brokers):
            self.kill_broker(number)

    async def _wait_registered(self) -> None:
        def all_registered() -> bool:
            return all(broker.is_registered for broker in self.brokers.values())

        await wait_until(all_registered, READY_TIMEOUT_S, "the brokers to register")
        first = next(iter(self.brokers.values()))
        try:
            await wait_until(
                lambda: not first.is_recovering(), RECOVERY_TIMEOUT_S, "old partitions"
            )
        except RayqError:
            tell_recovering(first.recovering_partitions())


def open_or_format(environment: Environment, root: str, brokers: int | None) -> list[Directory]:
    """The directories found below `root`, or those of a new cluster of `brokers` (default 1). Fewer
    than asked for are an error."""
    found = of_one_cluster(find_directories(environment, root), root)
    check_all_found(found, root, brokers)
    return found or format_cluster(
        environment,
        root,
        brokers=1 if brokers is None else brokers,
        run=lambda _broker, job, *args, **kwargs: job(environment, *args, **kwargs),
    )


async def wait_until(holds: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Raises RayqError when `holds` is still false after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not holds():
        if loop.time() > deadline_s:
            raise RayqError(f"Waited {timeout_s:.0f} s in vain for {what}.")
        await asyncio.sleep(0.005)


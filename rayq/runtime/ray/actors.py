"""The servers of a cluster as Ray actors: each is a process around a class that does not use Ray.

| actor               | how many                             | hosts              |
|---------------------|--------------------------------------|--------------------|
| `ControllerActor`   | one per cluster                      | `ControllerServer` |
| `BrokerActor`       | one per data directory               | `Broker`           |
| `ReplicaHostActor`  | one per replica, or for several      | `ReplicaHost`      |
| `ObjectServerActor` | one per broker, with an object store | `ObjectServer`     |

(How many replicas of a broker share a `ReplicaHostActor`: see `replicas_per_process`.)

Only lifecycle goes through Ray; records never do. The controller and the brokers are detached named
actors that Ray restarts forever. A broker starts and restarts its replica processes itself, and
watches them by pidfd: Ray must not restart them, or two processes could serve one directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Collection
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from rayq.actors.broker.broker import Broker
from rayq.actors.broker.broker import replicas_max as replicas_max_of
from rayq.actors.controller.server import ControllerServer
from rayq.actors.hosting import (
    HostProcess,
    ObjectServerSpec,
    ReplicaHostSpec,
    host_name,
    object_server_name,
)
from rayq.actors.objects.object_server import ObjectServer
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.backoff import Backoff
from rayq.config import ClusterConfig
from rayq.environment import Address, Environment, ThreadPool
from rayq.errors import (
    ConfigError,
    ControllerUnavailableError,
    DirectoryInUseError,
    RayqError,
    StorageError,
    to_wire,
)
from rayq.runtime.cleaner_process import run_cleaner_process
from rayq.runtime.kept_settings import KeptSettings, read_settings, write_settings
from rayq.runtime.layout import (
    Directory,
    directories_to_serve,
    directory_path,
    find_directories,
    format_broker,
    placed_now,
)
from rayq.runtime.object_store import open_store
from rayq.runtime.processes import adopt_process, process_start_time
from rayq.runtime.ray.lookup import (
    NAMESPACE,
    START_TIMEOUT_S,
    broker_name,
    checked_endpoint,
    controller_name,
)
from rayq.runtime.ray.metrics import export_group_lag_forever
from rayq.runtime.ray.nodes import broker_share, live_nodes, pinned, run_on_node
from rayq.runtime.ray.process import bind_host, memory_bytes, server_environment, start_reports
from rayq.runtime.ray.specs import BrokerSpec, ClusterSpec
from rayq.storage.data_directory import BROKER_LOCK, DataDirectory, lock_holder

logger = logging.getLogger(__name__)

PROCESSES_PER_CORE = 2
"""Replica processes of a node, all its brokers together: a few more than cores, since they wait for
disks now and then."""

OBJECT_SERVER_NICE = 10
"""Checksums and copies of old records do not take the time of those that serve new ones."""

RAY_CALLS_MAX = 4
"""Calls of a broker to Ray that may block, at a time."""
ANSWER_S = 1.0
"""The time that a process that ends by itself leaves for its last answer to be sent."""
NODE_CHECK_S = 2.0
LOCK_PATIENCE_S = 2.0
"""The maximum time that a broker waits for its directory's lock. The process that served the
directory before may take a moment to end, and a process that looks whether a directory is idle
takes the lock for an instant."""
LOCK_RETRY_S = 0.05
BROKER_RETRY_S = 1.0
BROKER_RETRY_MAX_S = 10.0
"""The wait of a broker after a start that failed, at first and at most."""


# --- replica processes ----------------------------------------------------------------------------


class ReplicaHostActor:
    """The Ray actor around one `ReplicaHost`: the process of a partition replica."""

    async def start(self, spec: ReplicaHostSpec, config: ClusterConfig) -> tuple[int, int]:
        """Returns `(pid, start time)`; the process presents itself to its broker."""
        pid = os.getpid()
        started = process_start_time(pid)
        assert started is not None
        environment = server_environment(config)
        self._reports = start_reports(environment, config, host_name(spec))
        self._host = ReplicaHost(
            environment,
            config,
            spec,
            host=bind_host(config),
            pid_start_time=started,
            run_cleaner=run_cleaner_process,
        )
        self._task = asyncio.get_running_loop().create_task(self._run())
        return pid, started

    async def _run(self) -> None:
        await self._host.run()
        # The broker has stopped it and the logs are closed. To Ray this end is intended.
        ray.kill(ray.get_runtime_context().current_actor)


class ObjectServerActor:
    """The Ray actor around one `ObjectServer`."""

    async def start(self, spec: ObjectServerSpec, config: ClusterConfig) -> tuple[int, int]:
        """Like `ReplicaHostActor.start`. Raises ConfigError where the object store cannot be used
        at all; then the process ends by itself, since its broker may have ended meanwhile."""
        pid = os.getpid()
        started = process_start_time(pid)
        assert started is not None
        os.nice(OBJECT_SERVER_NICE)  # Of this thread, and of those that it starts.
        environment = server_environment(config)
        self._reports = start_reports(environment, config, object_server_name(spec))
        assert config.remote_storage_url is not None
        loop = asyncio.get_running_loop()
        try:
            store = open_store(
                config.remote_storage_url,
                environment,
                credentials=config.remote_storage_credentials,
            )
        except RayqError:
            loop.call_later(ANSWER_S, self._end)
            raise
        self._server = ObjectServer(
            environment, config, spec, store, host=bind_host(config), pid_start_time=started
        )
        self._task = loop.create_task(self._run())
        return pid, started

    async def _run(self) -> None:
        try:
            await self._server.run()
        except Exception:
            logger.exception("the object server ends")
        self._end()

    def _end(self) -> None:
        """Ends this actor in a way that Ray takes as intended. The broker starts another one if it
        wants one."""
        ray.kill(ray.get_runtime_context().current_actor)


class RayRuntime:
    """Starts replica processes and object servers on this node as Ray actors."""

    def __init__(self, config: ClusterConfig, node_id: str, brokers_on_node: int) -> None:
        self._config = config
        self._node_id = node_id
        cores = len(os.sched_getaffinity(0))
        self.processes_max = max(2, PROCESSES_PER_CORE * cores // max(1, brokers_on_node))
        self._calls = ThreadPool(RAY_CALLS_MAX)
        self._late = 0
        """Starts that were given up, and that Ray may still carry out."""

    async def start_replica_host(self, spec: ReplicaHostSpec) -> HostProcess:
        """Raises RayqError."""
        return await self._start(ReplicaHostActor, spec, host_name(spec))

    async def start_object_server(self, spec: ObjectServerSpec) -> HostProcess:
        """Raises RayqError."""
        return await self._start(ObjectServerActor, spec, object_server_name(spec))

    async def _start(self, kind: type, spec: object, name: str) -> HostProcess:
        """Ray's head takes part in the start of an actor. While it is away such a call blocks the
        thread that makes it, for as long as the raylet waits for its head; the broker continues."""
        if self._late:
            raise RayqError(
                f"Ray could not start {name}: its head has not answered for {START_TIMEOUT_S:g} s. "
                "Bring it back (`ray up`); what runs continues without it."
            )
        creating = self._calls.run(self._create, kind, name)
        try:
            actor = await asyncio.wait_for(asyncio.shield(creating), START_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            self._late += 1
            creating.add_done_callback(self._created_late)
            raise RayqError(
                f"Ray did not start {name} within {START_TIMEOUT_S:g} s: is its head away?"
            ) from error
        except (RayError, ValueError) as error:
            raise RayqError(f"Ray could not start {name}: {error}") from error
        try:
            pid, started = await asyncio.wait_for(
                actor.start.remote(spec, self._config), START_TIMEOUT_S
            )
        except (RayError, asyncio.TimeoutError) as error:
            self._calls.run(_end, actor)
            if isinstance(cause := getattr(error, "cause", None), RayqError):
                raise cause from error
            raise RayqError(f"Ray could not start {name}: {error}") from error
        process = adopt_process(pid, started)
        if process is None:
            raise RayqError(f"The process {name} (pid {pid}) ended at once.")
        return process

    def _create(self, kind: type, name: str) -> Any:
        options = {**pinned(self._node_id), "name": name, "max_restarts": 0}
        return ray.remote(kind).options(**options).remote()

    def _created_late(self, creating: asyncio.Future[Any]) -> None:
        """The broker has given this process up, and perhaps started another one."""
        self._late -= 1
        if creating.exception() is None:
            self._calls.run(_end, creating.result())

    def adopt(self, pid: int, pid_start_time: int) -> HostProcess | None:
        return adopt_process(pid, pid_start_time)


# --- brokers --------------------------------------------------------------------------------------


class BrokerActor:
    """The Ray actor around one `Broker`. It starts by itself, because Ray restarts it without any
    call, and tries again after a start that failed: Ray sees a live process and would do nothing.
    """

    def __init__(self, spec: BrokerSpec) -> None:
        self._spec = spec
        self._broker: Broker | None = None
        """None until it has started."""
        self._environment = server_environment(spec.config)
        name = broker_name(spec.cluster_name, spec.broker)
        self._reports = start_reports(self._environment, spec.config, name)
        loop = asyncio.get_running_loop()
        self._started = loop.create_task(self._start())
        """The last attempt."""
        self._starting = loop.create_task(self._start_again())

    async def _start_again(self) -> None:
        """Waits until it has started."""
        backoff = Backoff(self._environment, BROKER_RETRY_S, BROKER_RETRY_MAX_S)
        while True:
            await asyncio.wait((self._started,))
            error = self._started.exception()
            if error is None:
                return
            retry_s = backoff.next_s()
            logger.error(
                "broker %d did not start, and tries again in %.0f s: %s",
                *(self._spec.broker, retry_s, error),
                exc_info=None if isinstance(error, RayqError) else error,
            )
            await asyncio.sleep(retry_s)
            self._started = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> Address:
        spec, config = self._spec, self._spec.config
        runtime = RayRuntime(config, spec.node_id, spec.brokers_on_node)
        host = bind_host(config)
        replicas_max = replicas_max_of(
            config,
            memory_bytes() // max(1, spec.brokers_on_node),
            processes_max=runtime.processes_max,
        )
        broker = Broker(
            self._environment,
            config,
            runtime,
            await self._lock_directory(),
            cluster_name=spec.cluster_name,
            host=host,
            port=spec.port,
            node_id=spec.node_id,
            replicas_max=replicas_max,
            peers=spec.peers,
        )
        endpoint = await broker.start()
        try:
            self._keep(spec.settings)
        except RayqError:
            await broker.stop()
            raise
        self._broker = broker
        return endpoint

    async def _lock_directory(self) -> DataDirectory:
        """Opens and locks the directory; an earlier process may still be about to end. Raises
        DirectoryInUseError, and the other errors of `DataDirectory.open`."""
        path = directory_path(self._spec.root, self._spec.broker)
        give_up_s = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                return DataDirectory.open(self._environment, path)
            except DirectoryInUseError:
                if time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(LOCK_RETRY_S)

    def _keep(self, settings: KeptSettings | None) -> None:
        """The directory, which is locked now, keeps what this broker was started with. Raises
        StorageError."""
        path, disk = directory_path(self._spec.root, self._spec.broker), self._environment.disk
        kept = None
        with contextlib.suppress(StorageError):  # A damaged file is written again.
            kept = read_settings(disk, path)
        if settings is not None and settings != kept:
            write_settings(disk, path, settings)

    async def endpoint(self) -> tuple[str, int | str, str]:
        """The address on which it listens, or the reason why it does not: see `checked_endpoint`.
        An error is returned as a value, or Ray would wrap it in one of its own."""
        try:
            host, port = await asyncio.shield(self._started)
        except RayqError as error:
            return ("error", *to_wire(error))
        except OSError as error:
            told = ConfigError(
                f"Broker {self._spec.broker} cannot listen on {bind_host(self._spec.config)} of "
                f"its node: {error}. bind_host says where it is to listen."
            )
            return ("error", *to_wire(told))
        return ("ok", port, host)

    async def is_registered(self) -> bool:
        return self._broker is not None and self._broker.is_registered

    async def is_recovering(self) -> bool:
        """See `Broker`."""
        assert self._broker is not None
        return self._broker.is_recovering()

    async def recovering_partitions(self) -> dict[str, str]:
        """See `Broker`."""
        assert self._broker is not None
        return self._broker.recovering_partitions()

    async def stop(self) -> None:
        self._starting.cancel()
        if self._broker is not None:
            await self._broker.stop()


def start_broker_actor(spec: BrokerSpec) -> Any:
    """Replaces an actor of that name whose node is gone."""
    name = broker_name(spec.cluster_name, spec.broker)
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        pass
    return (
        ray.remote(BrokerActor)
        .options(
            **pinned(spec.node_id),
            resources=broker_share(spec.config),
            name=name,
            max_restarts=-1,
            max_concurrency=1000,
        )
        .remote(spec)
    )


# --- the controller -------------------------------------------------------------------------------


class ControllerActor:
    """The Ray actor around `ControllerServer`; it also gives a broker to nodes that join."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._placed = dict(spec.placed)
        self._nodes = set(spec.nodes)
        self._endpoints: dict[int, Address] = {}
        self._stops_until_s = 0.0
        """Time until which nodes that join get no broker, as the cluster is being stopped."""
        environment = server_environment(spec.config)
        environment.metrics.label(cluster=spec.cluster_name)
        self._server = ControllerServer(
            environment,
            spec.config,
            cluster_id=spec.cluster_id,
            secret=spec.secret,
            host=bind_host(spec.config),
            brokers=spec.brokers,
        )
        loop = asyncio.get_running_loop()
        name = controller_name(spec.cluster_name)
        self._reports = start_reports(environment, spec.config, name)
        self._lag_report = environment.tasks.spawn(
            export_group_lag_forever(
                spec.config,
                cluster_name=spec.cluster_name,
                cluster_id=spec.cluster_id,
                secret=spec.secret,
                brokers=spec.brokers,
            ),
            "group lag",
        )
        self._started = loop.create_task(self._server.start())
        self._watch = loop.create_task(self._watch_nodes())

    async def spec(self) -> ClusterSpec:
        """With the brokers that joined since the start."""
        brokers = dict.fromkeys([*self._endpoints.values(), *self._spec.brokers])
        return msgspec.structs.replace(self._spec, brokers=tuple(brokers))

    async def broker_nodes(self) -> dict[int, str]:
        """See `ControllerServer`."""
        return await self._server.broker_nodes()

    async def prepare_stop(self) -> list[int]:
        """Stops the election of leaders. Returns the brokers."""
        self._stops_until_s = time.monotonic() + START_TIMEOUT_S
        try:
            await self._server.prepare_stop()
        except RayqError as error:
            logger.warning("stopping without a working controller: %s", error)
        try:
            self._placed.update(await self._server.broker_nodes())
        except RayqError as error:
            logger.warning("stopping the brokers there were at the start: %s", error)
        return sorted(self._placed)

    async def _watch_nodes(self) -> None:
        """A node that joins, or returns with its disk, gets its brokers."""
        await self._started
        while True:
            await asyncio.sleep(NODE_CHECK_S)
            if time.monotonic() < self._stops_until_s:
                continue
            try:
                nodes = await asyncio.to_thread(live_nodes, self._spec.config.broker_resource)
                for node_id in sorted(set(nodes) - self._nodes):
                    if await self._serve_node(node_id, nodes):
                        self._nodes.add(node_id)
                self._nodes &= set(nodes)  # A node that leaves and returns is served again.
            except (RayError, RayqError, OSError) as error:
                logger.warning("looking after new nodes: %s", error)

    async def _serve_node(self, node_id: str, live: Collection[str]) -> bool:
        """Starts the brokers whose directories the node holds; a new one where it holds none.
        False: it is too early to tell, look again (see `directories_to_serve`)."""
        spec = self._spec
        try:
            self._placed = placed_now(self._placed, await self._server.broker_nodes(), live)
            knows_all = True
        except ControllerUnavailableError:
            # All brokers may have been lost at once, and then nothing else starts them: those whose
            # directories return are started. No directory is made on knowledge that may be old.
            knows_all = False
        found, idle = await run_on_node(node_id, _survey, spec.root)
        ours = directories_to_serve(
            found,
            cluster_id=spec.cluster_id,
            node_id=node_id,
            placed=self._placed,
            live=live,
            idle=idle,
        )
        if ours is None:
            logger.info("node %s holds directories of brokers placed on other nodes", node_id)
            return False
        if not ours and not knows_all:
            return False
        is_served = node_id in self._placed.values()
        is_foreign = any(
            directory.cluster_id != spec.cluster_id and not directory.is_blank
            for directory in found
        )
        if not ours and not is_served and not is_foreign:
            broker = (
                max({*self._placed, *(directory.broker for directory in found)}, default=-1) + 1
            )
            made = await run_on_node(
                node_id,
                format_broker,
                spec.root,
                broker,
                cluster_id=spec.cluster_id,
                secret=spec.secret,
                settings=spec.settings,
            )
            ours = [made]
        for directory in ours:
            logger.warning("node %s joined: broker %d starts there", node_id, directory.broker)
            actor = await asyncio.to_thread(
                start_broker_actor, spec.broker_spec(directory.broker, node_id, len(ours))
            )
            self._placed[directory.broker] = node_id
            self._endpoints[directory.broker] = checked_endpoint(await actor.endpoint.remote())
        return True


def start_controller_actor(spec: ClusterSpec) -> Any:
    return (
        ray.remote(ControllerActor)
        .options(
            resources=broker_share(spec.config),
            name=controller_name(spec.cluster_name),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=1000,
        )
        .remote(spec)
    )


# --- helpers --------------------------------------------------------------------------------------


def _end(actor: Any) -> None:
    """Ends a detached actor, which nobody else would end."""
    try:
        ray.kill(actor)
    except RayError as error:
        logger.warning("a process that is not wanted keeps running: %s", error)


def _survey(environment: Environment, root: str) -> tuple[list[Directory], list[Directory]]:
    """The directories on a node, and those of them that no broker holds."""
    found, disk = find_directories(environment, root), environment.disk
    idle = [
        directory
        for directory in found
        if lock_holder(disk, f"{directory.path}/{BROKER_LOCK}") is None
    ]
    return found, idle

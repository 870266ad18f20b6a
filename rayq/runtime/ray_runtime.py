"""Production: each actor is a Ray actor process. Ray places, pins, names and restarts them.

Only lifecycle goes through Ray. The controller and the brokers are detached named actors that Ray
restarts for ever; a broker starts and restarts its replica processes itself (Ray must not: two
processes for one directory), and watches them by pidfd. Records never pass through Ray.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import logging
import os
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayq.actors.broker.broker import Broker
from rayq.actors.broker.broker import replicas_max as replicas_max_of
from rayq.actors.controller.server import ControllerServer
from rayq.actors.hosting import HostProcess, ReplicaHostSpec, host_name
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.core.metadata_records import Voter
from rayq.descriptors import raise_limit
from rayq.environment import Address, Environment
from rayq.errors import (
    ControllerUnavailableError,
    DirectoryInUseError,
    NoClusterError,
    RayqError,
    TimeoutError,
    from_wire,
    to_wire,
)
from rayq.runtime.cleaner_process import run_cleaner_process
from rayq.runtime.layout import (
    Directory,
    check_broker_count,
    check_one_cluster,
    directories_to_serve,
    directory_path,
    find_directories,
    voter_count,
    write_first_record,
)
from rayq.runtime.processes import adopt_process, process_start_time
from rayq.runtime.ray_logs import log_to_session
from rayq.runtime.ray_metrics import export_for_ever, export_group_lag_for_ever
from rayq.runtime.recover_quorum import Survivor, lost_voters, survivors
from rayq.runtime.start_checks import check_start
from rayq.storage.data_directory import (
    BROKER_LOCK,
    format_directory,
    lock_holder,
    read_secret,
)
from rayq.wire.authentication import HasSecret

logger = logging.getLogger(__name__)

NAMESPACE = "rayq"
NODE_CHECK_S = 2.0
LOCK_PATIENCE_S = 2.0
"""How long a broker waits for its directory's lock: its dead predecessor's may take a moment to go,
and who looks whether a directory is idle takes the lock for an instant."""
LOCK_RETRY_S = 0.05
BROKER_RETRY_S = 1.0
BROKER_RETRY_MAX_S = 10.0
"""How long a broker waits after a start that failed, at first and at most."""
START_TIMEOUT_S = 60.0
"""For one process, or one broker's registration. A start takes as long as it gets on: on a crowded
machine each of its processes may need half a minute."""
CONNECT_PAUSE_S = 0.2
NODES_TIMEOUT_S = 600.0
NODES_POLL_S = 0.5
RECOVERY_TIMEOUT_S = 30.0
"""How long a start waits for partitions that were there before to be in sync."""


class BrokerSpec(msgspec.Struct, frozen=True):
    """All that a broker actor needs, so that Ray can start it again without anyone's help."""

    cluster_name: str
    broker: int
    root: str
    node_id: str
    port: int
    config: ClusterConfig
    brokers_on_node: int
    peers: tuple[Address, ...]


class ControllerSpec(HasSecret, frozen=True):
    """All that the controller actor needs to start, again and again."""

    cluster_name: str
    cluster_id: str
    secret: bytes
    root: str
    port: int
    config: ClusterConfig
    brokers: tuple[Address, ...]
    placed: tuple[tuple[int, str], ...]
    """`(broker, node id)` at the start."""
    nodes: tuple[str, ...]
    """The nodes there were at the start; those that join later get a broker."""


class ConnectionInfo(HasSecret, frozen=True):
    """What a client in the same Ray cluster needs."""

    cluster_name: str
    cluster_id: str
    secret: bytes
    brokers: tuple[Address, ...]
    config: ClusterConfig
    root: str


def _actor(kind: type) -> Any:
    """Ray's typing of actor classes does not follow options and methods; ours is in the classes."""
    return ray.remote(kind)


def controller_name(cluster_name: str) -> str:
    return f"rayq:{cluster_name}:controller"


def broker_name(cluster_name: str, broker: int) -> str:
    return f"rayq:{cluster_name}:broker-{broker}"


def server_environment(config: ClusterConfig) -> Environment:
    """The world of a process that serves: it may open as many files as the machine allows, and what
    was imported by now is never looked at again by the garbage collector. (A full collection took
    50 to 90 ms, in which nothing was answered: nearly all that it saw were the modules of Ray.)"""
    raise_limit()
    gc.freeze()
    return system_environment(config)


def start_reports(
    environment: Environment, config: ClusterConfig, name: str
) -> asyncio.Task[None]:
    """What this process logs goes into a file, and what it measures to Ray, from now on."""
    log_to_session(name)
    return environment.tasks.spawn(export_for_ever(environment, config), "metrics")


# --- replica processes ----------------------------------------------------------------------------


class ReplicaHostActor:
    """The Ray actor around one `ReplicaHost`."""

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
            host=_bind_host(config),
            pid_start_time=started,
            run_cleaner=run_cleaner_process,
        )
        self._task = asyncio.get_running_loop().create_task(self._run())
        return pid, started

    async def _run(self) -> None:
        await self._host.run()
        # Stopped by its broker: the logs are closed. To Ray this end is intended.
        ray.kill(ray.get_runtime_context().current_actor)


class RayRuntime:
    """Starts replica processes on this node as Ray actors."""

    def __init__(self, config: ClusterConfig, node_id: str) -> None:
        self._config = config
        self._node_id = node_id

    async def start_replica_host(self, spec: ReplicaHostSpec) -> HostProcess:
        try:
            actor = _actor(ReplicaHostActor).options(
                **_pinned(self._node_id), name=host_name(spec), max_restarts=0
            ).remote()
            pid, started = await asyncio.wait_for(
                actor.start.remote(spec, self._config), START_TIMEOUT_S
            )
        except (RayError, ValueError, asyncio.TimeoutError) as error:
            raise RayqError(f"Ray could not start {host_name(spec)}: {error}") from error
        process = adopt_process(pid, started)
        if process is None:
            raise RayqError(f"The process {host_name(spec)} (pid {pid}) ended at once.")
        return process

    def adopt(self, pid: int, pid_start_time: int) -> HostProcess | None:
        return adopt_process(pid, pid_start_time)


# --- brokers and the controller -------------------------------------------------------------------


class BrokerActor:
    """The Ray actor around one `Broker`. It starts by itself, for Ray restarts it so, and tries
    again after a start that failed: Ray sees a process that lives, and would do nothing."""

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
        """Until it has started."""
        retry_s = BROKER_RETRY_S
        while True:
            await asyncio.wait((self._started,))
            error = self._started.exception()
            if error is None:
                return
            logger.error(
                "broker %d did not start, and tries again in %.0f s: %s",
                *(self._spec.broker, retry_s, error),
                exc_info=None if isinstance(error, RayqError) else error,
            )
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, BROKER_RETRY_MAX_S)
            self._started = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> Address:
        spec, config = self._spec, self._spec.config
        broker = Broker(
            self._environment,
            config,
            RayRuntime(config, spec.node_id),
            cluster_name=spec.cluster_name,
            data_path=directory_path(spec.root, spec.broker),
            host=_bind_host(config),
            port=spec.port,
            node_id=spec.node_id,
            replicas_max=replicas_max_of(config, _memory_bytes(), spec.brokers_on_node),
            peers=spec.peers,
        )
        give_up_s = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                endpoint = await broker.start()
            except DirectoryInUseError:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(LOCK_RETRY_S)
            else:
                self._broker = broker
                return endpoint

    async def endpoint(self) -> tuple[str, int | str, str]:
        """Where it listens, or why it does not: see `checked_endpoint`. An error is returned as a
        value, or Ray would wrap it in one of its own."""
        return await _unwrapped(self._started)

    async def is_registered(self) -> bool:
        return self._broker is not None and self._broker.is_registered

    async def recovering_partitions(self) -> dict[str, str]:
        """See `Broker`."""
        assert self._broker is not None
        return self._broker.recovering_partitions()

    async def stop(self) -> None:
        self._starting.cancel()
        if self._broker is not None:
            await self._broker.stop()


class ControllerActor:
    """The Ray actor around `ControllerServer`; it also gives a broker to nodes that join."""

    def __init__(self, spec: ControllerSpec) -> None:
        self._spec = spec
        self._placed = dict(spec.placed)
        self._nodes = set(spec.nodes)
        self._endpoints: dict[int, Address] = {}
        self._stops_until_s = 0.0
        """Until then nodes that join get no broker: the cluster is being stopped."""
        environment = server_environment(spec.config)
        environment.metrics.label(cluster=spec.cluster_name)
        self._server = ControllerServer(
            environment,
            spec.config,
            cluster_id=spec.cluster_id,
            secret=spec.secret,
            host=_bind_host(spec.config),
            brokers=spec.brokers,
        )
        loop = asyncio.get_running_loop()
        name = controller_name(spec.cluster_name)
        self._reports = start_reports(environment, spec.config, name)
        self._lag_report = environment.tasks.spawn(
            export_group_lag_for_ever(
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

    async def connection_info(self) -> ConnectionInfo:
        brokers = dict.fromkeys([*self._endpoints.values(), *self._spec.brokers])
        return ConnectionInfo(
            self._spec.cluster_name,
            self._spec.cluster_id,
            self._spec.secret,
            tuple(brokers),
            self._spec.config,
            self._spec.root,
        )

    async def broker_nodes(self) -> dict[int, str]:
        """See `ControllerServer`."""
        return await self._server.broker_nodes()

    async def spec(self) -> ControllerSpec:
        """What it was started with."""
        return self._spec

    async def prepare_stop(self) -> list[int]:
        """Nobody is elected any more. Returns the brokers."""
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
                self._nodes &= set(nodes)  # One that leaves and returns is served anew.
            except (RayError, RayqError, OSError) as error:
                logger.warning("looking after new nodes: %s", error)

    async def _serve_node(self, node_id: str, live: Collection[str]) -> bool:
        """Starts the brokers whose directories the node holds; a new one where it holds none.
        False: it is too early to tell, look again (see `directories_to_serve`)."""
        spec = self._spec
        try:
            self._placed.update(await self._server.broker_nodes())
            knows_all = True
        except ControllerUnavailableError:
            # All brokers may have been lost at once, and nobody else starts them: those whose
            # directories return are started. None is made anew on what is known from long ago.
            knows_all = False
        found, idle = await _remote_survey(node_id, spec.root)
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
        is_another_clusters = any(one.cluster_id != spec.cluster_id for one in found)
        if not ours and not is_served and not is_another_clusters:
            broker = max({*self._placed, *(one.broker for one in found)}, default=-1) + 1
            ours = [
                await _remote_format(node_id, spec.root, spec.cluster_id, broker, spec.secret)
            ]
        for directory in ours:
            logger.warning("node %s joined: broker %d starts there", node_id, directory.broker)
            actor = await asyncio.to_thread(
                start_broker_actor,
                BrokerSpec(
                    spec.cluster_name,
                    directory.broker,
                    spec.root,
                    node_id,
                    spec.port,
                    spec.config,
                    len(ours),
                    spec.brokers,
                ),
            )
            self._placed[directory.broker] = node_id
            self._endpoints[directory.broker] = checked_endpoint(await actor.endpoint.remote())
        return True


# --- starting and stopping a cluster --------------------------------------------------------------


def find_cluster(
    cluster_name: str, *, timeout_s: float = START_TIMEOUT_S
) -> ConnectionInfo | None:
    """The cluster of that name in the connected Ray; None when there is none. Raises TimeoutError
    where its controller's process has not answered in time."""
    try:
        info: ConnectionInfo = ask_controller(
            cluster_name, "connection_info", timeout_s=timeout_s
        )
    except NoClusterError:
        return None
    return info


def ask_controller(
    cluster_name: str, method: str, *, timeout_s: float = START_TIMEOUT_S
) -> Any:
    """What a method of `ControllerActor` without arguments answers, also while Ray starts its
    process again: it may be called more than once. Raises NoClusterError, TimeoutError, and what
    rayq raises in the method."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            actor: Any = controller_actor(cluster_name)
            # Not ray.get, against which Ray warns in an actor with coroutines: a pool's consumer.
            answer = getattr(actor, method).remote().future()
            return answer.result(max(deadline_s - time.monotonic(), 0.0))
        except (RayError, builtins.TimeoutError) as error:  # Ray may be starting it again.
            cause = getattr(error, "cause", None)
            if isinstance(cause, RayqError):
                raise cause from error
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                why = " ".join(f"{type(error).__name__} {error}".split())
                raise TimeoutError(
                    f"The cluster {cluster_name!r} is in this Ray, but its controller's process "
                    f"has not answered for {timeout_s:g} s ({why}). Ray starts it again where it "
                    "has ended: see `ray list actors`. Try again, or give the address of a broker: "
                    "brokers serve without that process."
                ) from error
            time.sleep(min(CONNECT_PAUSE_S, left_s))


def controller_actor(cluster_name: str) -> Any:
    """Raises NoClusterError."""
    try:
        return ray.get_actor(controller_name(cluster_name), namespace=NAMESPACE)
    except ValueError:
        raise NoClusterError(f"No cluster named {cluster_name!r} runs in this Ray.") from None


def start_cluster(
    root: str,
    *,
    brokers: int | None,
    cluster_name: str,
    port: int,
    config: ClusterConfig,
    nodes_min: int | None = None,
) -> ConnectionInfo:
    """Formats or reopens the directories and starts the actors; returns when every broker has
    registered. Raises the errors that `rayq.start` documents."""
    nodes = _wait_for_nodes(nodes_min, config.broker_resource)
    if list(nodes) == [ray.get_runtime_context().get_node_id()]:
        check_start(root, brokers, config, patience_s=LOCK_PATIENCE_S)
    found = {node: ray.get(_find_on(node, root)) for node in nodes}
    placed, cluster_id, secret = _open_or_format(nodes, found, root, brokers)
    per_node = {node: sum(at == node for at in placed.values()) for node in nodes}
    actors: list[Any] = []
    try:
        endpoints: list[Address] = []
        for broker, node in sorted(placed.items()):
            actor = start_broker_actor(
                BrokerSpec(
                    cluster_name,
                    broker,
                    root,
                    node,
                    port,
                    config,
                    per_node[node],
                    tuple(endpoints),
                )
            )
            actors.append(actor)
        answers = [actor.endpoint.remote() for actor in actors]
        endpoints = [
            checked_endpoint(_started(answer, f"broker {broker}"))
            for broker, answer in zip(sorted(placed), answers, strict=True)
        ]
        spec = ControllerSpec(
            cluster_name,
            cluster_id,
            secret,
            root,
            port,
            config,
            tuple(endpoints),
            tuple(placed.items()),
            tuple(nodes),
        )
        controller: Any = (
            _actor(ControllerActor)
            .options(
                resources=_share(config),
                name=controller_name(cluster_name),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=1000,
            )
            .remote(spec)
        )
        actors.append(controller)
        info: ConnectionInfo = _started(controller.connection_info.remote(), "the controller")
        _wait_registered(actors[:-1], root, found)
        _wait_recovered(actors[0])
        return info
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


def stop_cluster(cluster_name: str) -> None:
    """A controlled stop of all actors of the cluster; does nothing when it does not run. Raises
    TimeoutError where the controller's process has not answered in time: nothing was stopped."""
    try:
        controller = controller_actor(cluster_name)
        numbers: list[int] = ask_controller(cluster_name, "prepare_stop")
    except NoClusterError:
        return
    brokers: list[Any] = []
    for number in numbers:
        try:
            brokers.append(ray.get_actor(broker_name(cluster_name, number), namespace=NAMESPACE))
        except ValueError:
            continue
    stopping = [broker.stop.remote() for broker in brokers]
    for done in stopping:
        try:
            ray.get(done, timeout=START_TIMEOUT_S)
        except RayError as error:
            logger.warning("a broker did not stop by itself: %s", error)
    for actor in (controller, *brokers):
        ray.kill(actor)


def start_broker_actor(spec: BrokerSpec) -> Any:
    """Replaces an actor of that name whose node is gone."""
    name = broker_name(spec.cluster_name, spec.broker)
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        pass
    return (
        _actor(BrokerActor)
        .options(
            **_pinned(spec.node_id),
            resources=_share(spec.config),
            name=name,
            max_restarts=-1,
            max_concurrency=1000,
        )
        .remote(spec)
    )


def live_nodes(resource: str | None = None) -> dict[str, str]:
    """Node ids and addresses, in a stable order; only of those that offer `resource`."""
    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [
        node
        for node in listed
        if node["Alive"] and (resource is None or node["Resources"].get(resource, 0) > 0)
    ]
    nodes.sort(key=lambda node: (str(node["NodeManagerAddress"]), str(node["NodeID"])))
    return {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in nodes}


def _wait_for_nodes(count: int | None, resource: str | None) -> dict[str, str]:
    """At least `count` nodes that may have brokers; None: those there are, at once."""
    patience_s = 0.0 if count is None else NODES_TIMEOUT_S
    deadline_s = time.monotonic() + patience_s
    while True:
        nodes = live_nodes(resource)
        if len(nodes) >= (count or 1):
            return nodes
        if time.monotonic() >= deadline_s:
            offering = f" that offer the resource {resource!r}" if resource else ""
            raise RayqError(
                f"A start on {count or 1} nodes was asked for; after {patience_s:.0f} s Ray has "
                f"{len(nodes)}{offering} ({', '.join(nodes.values()) or 'none'}). See `ray status` "
                "for those that do not come, or start with fewer."
            )
        time.sleep(NODES_POLL_S)


def _open_or_format(
    nodes: dict[str, str],
    found: dict[str, list[Directory]],
    root: str,
    brokers: int | None,
) -> tuple[dict[int, str], str, bytes]:
    """`(broker -> node, cluster id, secret)`."""
    placed: dict[int, str] = {}
    directories: list[Directory] = []
    for node, some in found.items():
        for one in some:
            if one.broker in placed:
                raise RayqError(
                    f"Broker {one.broker} has a directory below {root} on two nodes "
                    f"({nodes[placed[one.broker]]} and {nodes[node]}): one is a copy, or the nodes "
                    "share the path. Move the copy away, or give each node a disk of its own."
                )
            placed[one.broker] = node
            directories.append(one)
    check_one_cluster(directories, root)
    if directories:
        if brokers is not None and len(directories) < brokers:
            raise RayqError(
                f"{root} holds brokers {sorted(placed)} on the live nodes; {brokers} were asked "
                "for. Wait for the missing nodes, or start without `brokers=`."
            )
        first = min(directories)
        secret: bytes = ray.get(_secret_on(placed[first.broker], first.path))
        return placed, first.cluster_id, secret
    count = len(nodes) if brokers is None else brokers
    check_broker_count(count)
    environment = system_environment(None)
    cluster_id, secret = environment.new_id(), environment.token_bytes(32)
    names = list(nodes)
    placed = {broker: names[broker % len(names)] for broker in range(count)}
    made = {
        broker: ray.get(_format_on(node, root, cluster_id, broker, secret))
        for broker, node in sorted(placed.items(), reverse=True)
    }
    voters = tuple(Voter(broker, made[broker].directory_id) for broker in range(voter_count(count)))
    for voter in reversed(voters):
        ray.get(_write_first_on(placed[voter.broker], made[voter.broker].path, voters))
    return placed, cluster_id, secret


def _started(answer: Any, who: str) -> Any:
    """The answer of an actor that was just created. Raises RayqError."""
    try:
        return ray.get(answer, timeout=START_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise RayqError(
            f"The process of {who} did not start within {START_TIMEOUT_S:.0f} s. See `ray status` "
            "for whether its node has room, and the logs below the Ray session's directory."
        ) from error


def _wait_registered(
    brokers: Sequence[Any], root: str, found: dict[str, list[Directory]]
) -> None:
    most, deadline_s = 0, time.monotonic() + START_TIMEOUT_S
    while True:
        registered = sum(ray.get([broker.is_registered.remote() for broker in brokers]))
        if registered == len(brokers):
            return
        if registered > most:
            most, deadline_s = registered, time.monotonic() + START_TIMEOUT_S
        if time.monotonic() > deadline_s:
            raise ControllerUnavailableError(
                f"Only {registered} of {len(brokers)} brokers are registered with a controller, "
                f"and no other came within {START_TIMEOUT_S:.0f} s: "
                + (
                    _why_no_quorum(root, found)
                    or "see the actors' logs below the Ray session's directory."
                )
            )
        time.sleep(0.02)


def _why_no_quorum(root: str, found: dict[str, list[Directory]]) -> str | None:
    """What to do where a majority of the voters' directories was not found on the nodes."""
    left: list[Survivor] = []
    for node, directories in found.items():
        if directories:
            there: list[Survivor] = ray.get(_survivors_on(node, root))
            left += there
    if not left:
        return None
    best = max(left, key=lambda one: (one.epoch, one.last_index))
    lost = lost_voters([one.directory for one in left], best.voters)
    if 2 * len(lost) < len(best.voters):
        return None
    return (
        f"of its voters, brokers {', '.join(str(one.broker) for one in best.voters)}, the "
        f"directories of {', '.join(map(str, lost))} are not there. Start their nodes; where they "
        f"are lost for good: rayq cluster recover-quorum --from {root}, on each node that is left."
    )


def _wait_recovered(broker: Any) -> None:
    """Waits until the partitions that were there before are in sync; says which are not in time."""
    deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
    while recovering := ray.get(broker.recovering_partitions.remote()):
        if time.monotonic() > deadline_s:
            for where, reason in recovering.items():
                logger.warning("%s %s", where, reason)
            return
        time.sleep(0.05)


# --- small jobs on a node -------------------------------------------------------------------------


def on_node(node_id: str) -> dict[str, Any]:
    return {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }


def _pinned(node_id: str) -> dict[str, Any]:
    return {**on_node(node_id), "namespace": NAMESPACE, "lifetime": "detached"}


def _share(config: ClusterConfig) -> dict[str, float]:
    """A token amount of what only nodes for brokers offer: it keeps the controller off the others,
    and Ray's autoscaler from taking a node with a broker for idle."""
    return {} if config.broker_resource is None else {config.broker_resource: 0.001}


def _find_on(node_id: str, root: str) -> Any:
    return ray.remote(_find).options(**on_node(node_id)).remote(root)


def _find(root: str) -> list[Directory]:
    return find_directories(system_environment(None), root)


def _survey(root: str) -> tuple[list[Directory], list[Directory]]:
    """The directories on a node, and those of them that no broker holds."""
    disk = system_environment(None).disk
    found = _find(root)
    idle = [one for one in found if lock_holder(disk, f"{one.path}/{BROKER_LOCK}") is None]
    return found, idle


def _format_on(node_id: str, root: str, cluster_id: str, broker: int, secret: bytes) -> Any:
    return ray.remote(_format).options(**on_node(node_id)).remote(root, cluster_id, broker, secret)


def _format(root: str, cluster_id: str, broker: int, secret: bytes) -> Directory:
    path = directory_path(root, broker)
    meta = format_directory(
        system_environment(None), path, cluster_id=cluster_id, broker=broker, secret=secret
    )
    return Directory(broker, path, cluster_id, meta.directory_id)


def _survivors_on(node_id: str, root: str) -> Any:
    return ray.remote(_survivors).options(**on_node(node_id)).remote(root)


def _survivors(root: str) -> list[Survivor]:
    return survivors(system_environment(None), root)


def _secret_on(node_id: str, path: str) -> Any:
    return ray.remote(_secret).options(**on_node(node_id)).remote(path)


def _secret(path: str) -> bytes:
    return read_secret(system_environment(None).disk, path)


def _write_first_on(node_id: str, path: str, voters: tuple[Voter, ...]) -> Any:
    return ray.remote(_write_first).options(**on_node(node_id)).remote(path, voters)


def _write_first(path: str, voters: tuple[Voter, ...]) -> None:
    write_first_record(system_environment(None), path, voters)


async def _remote_survey(node_id: str, root: str) -> tuple[list[Directory], list[Directory]]:
    survey: tuple[list[Directory], list[Directory]] = await (
        ray.remote(_survey).options(**on_node(node_id)).remote(root)
    )
    return survey


async def _remote_format(
    node_id: str, root: str, cluster_id: str, broker: int, secret: bytes
) -> Directory:
    made: Directory = await _format_on(node_id, root, cluster_id, broker, secret)
    return made


# --- helpers --------------------------------------------------------------------------------------


async def _unwrapped(task: asyncio.Task[Address]) -> tuple[str, int | str, str]:
    try:
        host, port = await asyncio.shield(task)
    except RayqError as error:
        return ("error", *to_wire(error))
    return ("ok", port, host)


def checked_endpoint(answer: tuple[str, int | str, str]) -> Address:
    kind, first, second = answer
    if kind == "error":
        raise from_wire(str(first), second)
    return second, int(first)


def _bind_host(config: ClusterConfig) -> str:
    return config.bind_host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


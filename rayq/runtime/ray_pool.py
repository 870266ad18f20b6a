"""Consumer pools on Ray: the pool and each of its consumers are detached actors.

Ray restarts the pool for ever. Consumers it does not restart: their pool sees that one is gone and
starts another, or not. A consumer that Ray has no room for is a pending actor, which is what makes
Ray's autoscaler add a node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

import msgspec
import ray
from ray import cloudpickle
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
)

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolControl, PoolSpec
from rayq.client.environment import system_environment
from rayq.config import RAY_OPTIONS, ClusterConfig, PoolConfig
from rayq.environment import Address
from rayq.errors import HandlerError, PoolExistsError, RayqError, TimeoutError, UnknownPoolError
from rayq.pools.pool_member import (
    MemberDiedError,
    MemberReport,
    MemberSpec,
    PoolMember,
    is_async,
)
from rayq.pools.running_pool import NAME_CHARACTERS, MemberHandle, RunningPool
from rayq.records import PoolStatus
from rayq.runtime.local_pool import with_one_thread
from rayq.runtime.ray_runtime import NAMESPACE, broker_name, checked_endpoint, start_reports

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
RETRY_S = 0.2
"""While Ray starts a pool again."""
STOP_WITH_CLUSTER_S = 10.0
"""How long the stop of a cluster lets each pool's consumers finish."""
STOP_SLACK_S = 10.0
"""On top of what a stop is given, for the pool to say that it is done."""
UNAVAILABLE_PAUSE_S = 1.0
LINGER_S = 30.0
"""How long a consumer that has ended can still be asked why."""
ADDRESSES_PATIENCE_S = 2.0
"""How long brokers have to say where they listen."""


class PoolWork(msgspec.Struct, frozen=True):
    """What a pool is to do, as it goes to other processes."""

    cluster: Cluster
    name: str
    topic: str
    group: str
    config: PoolConfig
    handler: bytes
    """Pickled. Only consumers unpickle it: what it imports has to be where they run."""


def pool_name(cluster_name: str, pool: str) -> str:
    return f"rayq:{cluster_name}:pool-{pool}"


def consumer_prefix(cluster_name: str, pool: str) -> str:
    """What the names of a pool's consumers begin with; `NAME_CHARACTERS` follow."""
    return f"rayq:{cluster_name}:consumer-{pool}:"


# --- a consumer -----------------------------------------------------------------------------------


class PoolConsumerActor:
    """The Ray actor around one `PoolMember`."""

    def __init__(self, work: PoolWork) -> None:
        environment = system_environment(None)
        self._reports = start_reports(
            environment, ClusterConfig(), ray.get_runtime_context().get_actor_name() or work.name
        )
        self._member = PoolMember(
            with_one_thread(environment),
            work.cluster,
            MemberSpec(work.name, work.topic, work.group, work.config),
            lambda: _loaded(work.handler),
        )
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._member.run())
        self._end_task = loop.create_task(self._end())

    async def _end(self) -> None:
        """Where nobody asks for it any more it has left its group by itself."""
        await asyncio.wait([self._task])
        await asyncio.sleep(LINGER_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def report(self) -> MemberReport:
        self._raise_failure()
        return self._member.report()

    async def drain(self) -> MemberReport:
        self._member.drain()
        await asyncio.wait([self._task])
        self._raise_failure()
        return self._member.report()

    def _raise_failure(self) -> None:
        if self._task.done() and (error := self._task.exception()) is not None:
            raise error


class RayConsumer:
    """A consumer as its pool reaches it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def report(self) -> MemberReport:
        report: MemberReport = await self._ask(self._actor.report)
        return report

    async def drain(self) -> MemberReport:
        report: MemberReport = await self._ask(self._actor.drain)
        return report

    async def _ask(self, method: Any) -> Any:
        while True:
            try:
                return await method.remote()
            except ActorUnavailableError as error:  # It may be there and only out of reach.
                logger.warning("a consumer does not answer: %s", error)
                await asyncio.sleep(UNAVAILABLE_PAUSE_S)
            except RayError as error:
                raise MemberDiedError(_in_one_line(error)) from error

    def kill(self) -> None:
        ray.kill(self._actor)


# --- the pool -------------------------------------------------------------------------------------


class RayHosting:
    """Starts consumers, and finds those that an earlier process of the pool started."""

    def __init__(self, work: PoolWork) -> None:
        self._work = work

    async def start_member(self, name: str) -> MemberHandle:
        prefix = consumer_prefix(self._work.cluster.name, self._work.name)
        try:
            actor = (
                ray.remote(PoolConsumerActor)
                .options(
                    name=prefix + name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    max_restarts=0,
                    max_concurrency=100,
                    **ray_options(self._work.config.resources),
                )
                .remote(self._work)
            )
        except (RayError, ValueError) as error:
            raise RayqError(f"Ray refused a consumer: {_in_one_line(error)}") from error
        return RayConsumer(actor)

    async def find_members(self) -> dict[str, MemberHandle]:
        work = self._work
        found = await asyncio.to_thread(_consumers_of, work.cluster.name, work.name)
        return {name[-NAME_CHARACTERS:]: RayConsumer(actor) for name, actor in found}


class PoolActor:
    """The Ray actor around `RunningPool`. It starts by itself: Ray restarts it so."""

    def __init__(self, work: PoolWork) -> None:
        spec = PoolSpec(work.name, work.topic, work.group, _no_handler, work.config)
        environment = system_environment(None)
        self._reports = start_reports(
            environment, ClusterConfig(), pool_name(work.cluster.name, work.name)
        )
        self._pool = RunningPool(environment, work.cluster, spec, RayHosting(work))
        self._task = asyncio.get_running_loop().create_task(self._run(work.cluster))

    async def _run(self, cluster: Cluster) -> None:
        cluster.add_addresses(await present_addresses(cluster.name))
        self._pool.start()
        if not await self._pool.wait_stopped():
            # Ray itself may not have answered, say. Ray starts it again.
            ray.kill(ray.get_runtime_context().current_actor, no_restart=False)

    async def ready(self) -> None:
        await self._pool.ready.wait()

    async def status(self) -> PoolStatus:
        return self._pool.status()

    async def stop(self, drain: bool, timeout_s: float) -> None:
        await self._pool.stop(drain, timeout_s)


# --- reaching a pool ------------------------------------------------------------------------------


class RayPool:
    """A pool as any process of its Ray reaches it; pickles."""

    def __init__(self, cluster_name: str, name: str) -> None:
        self._cluster_name = cluster_name
        self._name = name

    def status(self) -> PoolStatus:
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                status: PoolStatus = ray.get(
                    self._actor().status.remote(), timeout=ANSWER_TIMEOUT_S
                )
                return status
            except ActorDiedError as error:
                raise self._unknown() from error
            except (RayActorError, GetTimeoutError) as error:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"The consumer pool {self._name!r} has not answered for "
                        f"{ANSWER_TIMEOUT_S:.0f} s: {_in_one_line(error)}"
                    ) from error
                time.sleep(RETRY_S)

    def stop(self, drain: bool, timeout_s: float) -> None:
        try:
            actor = self._actor()
        except UnknownPoolError:
            actor = None
        if actor is not None:
            try:
                ray.get(actor.stop.remote(drain, timeout_s), timeout=timeout_s + STOP_SLACK_S)
            except RayError as error:
                logger.warning("pool %r did not stop by itself: %s", self._name, error)
            ray.kill(actor)
        # Those that a pool which died amid the stop has left behind.
        for _, consumer in _consumers_of(self._cluster_name, self._name):
            ray.kill(consumer)

    def _actor(self) -> Any:
        try:
            return ray.get_actor(pool_name(self._cluster_name, self._name), namespace=NAMESPACE)
        except ValueError:
            raise self._unknown() from None

    def _unknown(self) -> UnknownPoolError:
        return UnknownPoolError(
            f"No consumer pool named {self._name!r} runs beside cluster {self._cluster_name!r}."
        )


def start_pool(cluster: Cluster, spec: PoolSpec) -> PoolControl:
    """Returns when the pool has looked at its topic once. Raises PoolExistsError, HandlerError."""
    work = PoolWork(
        cluster, spec.name, spec.topic, spec.group, spec.config, _pickled(spec.handler)
    )
    try:
        actor: Any = (
            ray.remote(PoolActor)
            .options(
                name=pool_name(cluster.name, spec.name),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=1000,
            )
            .remote(work)
        )
    except ValueError as error:
        raise PoolExistsError(
            f"A consumer pool named {spec.name!r} runs beside cluster {cluster.name!r} already: "
            "cluster.consumer_pools() has it. Stop it, or name this one otherwise (name=)."
        ) from error
    try:
        ray.get(actor.ready.remote(), timeout=START_TIMEOUT_S)
    except RayError as error:
        ray.kill(actor)
        raise RayqError(
            f"Ray could not start the consumer pool {spec.name!r}: {_in_one_line(error)}"
        ) from error
    return RayPool(cluster.name, spec.name)


def pools(cluster_name: str) -> dict[str, PoolControl]:
    """Those that run, by name."""
    prefix = pool_name(cluster_name, "")
    return {
        name.removeprefix(prefix): RayPool(cluster_name, name.removeprefix(prefix))
        for name in _names_with(prefix)
    }


def stop_pools(cluster_name: str) -> None:
    """Before their cluster stops."""
    for pool in pools(cluster_name).values():
        pool.stop(True, STOP_WITH_CLUSTER_S)
    for _, consumer in _actors_with(consumer_prefix(cluster_name, "").removesuffix(":")):
        ray.kill(consumer)  # of pools that are gone


# --- helpers --------------------------------------------------------------------------------------


def ray_options(resources: dict[str, float | int] | None) -> dict[str, Any]:
    """As options of a Ray actor."""
    given = {"num_cpus": 1} if resources is None else resources
    options: dict[str, Any] = {"num_cpus": 0}
    options.update({name: amount for name, amount in given.items() if name in RAY_OPTIONS})
    custom = {name: amount for name, amount in given.items() if name not in RAY_OPTIONS}
    if custom:
        options["resources"] = custom
    return options


def _pickled(handler: Handler) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(handler)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise HandlerError(
            f"The handler cannot be sent to other processes: {error}. Make connections and locks "
            "inside of it: a class as handler is made anew in each consumer."
        ) from error
    return pickled


def _unpickled(pickled: bytes) -> Handler:
    try:
        handler: Handler = cloudpickle.loads(pickled)
    except BaseException as error:  # a module may call sys.exit()
        raise HandlerError(
            f"The handler cannot be loaded where consumers run ({type(error).__name__}: {error}): "
            "its modules have to be installed there, or sent along by Ray's runtime_env."
        ) from error
    return handler


def _loaded(pickled: bytes) -> Handler:
    handler = _unpickled(pickled)
    if not is_async(handler):
        # It has a thread of its own: its ray.get blocks no event loop, of which Ray would warn.
        os.environ.setdefault(RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, "0")
    return handler


def _no_handler(_batch: object) -> None:
    """The pool itself handles nothing."""


async def present_addresses(cluster_name: str) -> list[Address]:
    """Where the brokers listen now, as far as they say so at once: each may have moved since the
    cluster's `addresses` were told to a pool."""
    prefix = broker_name(cluster_name, 0).removesuffix("0")
    found: list[Address] = []
    try:
        async with asyncio.timeout(ADDRESSES_PATIENCE_S):
            brokers = await asyncio.to_thread(_actors_with, prefix)
            asked = [asyncio.ensure_future(_address(actor)) for _, actor in brokers]
            for answer in asyncio.as_completed(asked):
                found += await answer
    except (RayError, asyncio.TimeoutError) as error:
        logger.warning("not all brokers said where they listen: %r", error)
    return found


async def _address(broker: Any) -> list[Address]:
    try:
        return [checked_endpoint(await broker.endpoint.remote())]
    except (RayError, RayqError) as error:
        logger.info("a broker does not say where it listens: %s", error)
        return []


def _names_with(prefix: str) -> list[str]:
    """Of the actors there are, those that wait for room included."""
    listed: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        one["name"]
        for one in listed
        if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)
    )


def _actors_with(prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in _names_with(prefix):
        try:
            found.append((name, ray.get_actor(name, namespace=NAMESPACE)))
        except ValueError:
            continue  # it has ended meanwhile
    return found


def _consumers_of(cluster_name: str, pool: str) -> list[tuple[str, Any]]:
    """Not those of a pool whose name begins with that of this one and a colon."""
    prefix = consumer_prefix(cluster_name, pool)
    found = _actors_with(prefix)
    return [one for one in found if len(one[0]) == len(prefix) + NAME_CHARACTERS]


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500]

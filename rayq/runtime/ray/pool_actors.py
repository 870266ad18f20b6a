"""A consumer pool and its consumers as Ray actors, all of them detached.

Ray restarts the pool forever. It does not restart consumers: their pool sees that one is gone and
starts another, or not. A consumer that Ray has no room for is a pending actor, which makes Ray's
autoscaler add a node.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import msgspec
import ray
from ray import cloudpickle
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray.exceptions import ActorUnavailableError, RayError

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolSpec
from rayq.client.environment import system_environment
from rayq.config import RAY_OPTIONS, ClusterConfig
from rayq.environment import Address
from rayq.errors import HandlerError, RayqError
from rayq.pools.make_member import make_member
from rayq.pools.member import MemberDiedError, MemberReport
from rayq.pools.running_pool import NAME_CHARACTERS, MemberHandle, RunningPool
from rayq.records import PoolStatus
from rayq.runtime.local_pool import with_one_thread
from rayq.runtime.ray.lookup import NAMESPACE, actors_with, broker_name, checked_endpoint
from rayq.runtime.ray.process import start_reports
from rayq.user_functions import is_coroutine_function, told

logger = logging.getLogger(__name__)

UNAVAILABLE_PAUSE_S = 1.0
LINGER_S = 30.0
"""The time in which a consumer that has ended can still be asked why."""
ADDRESSES_PATIENCE_S = 2.0
"""The maximum time for brokers to say where they listen."""


class PoolWork(msgspec.Struct, frozen=True):
    """The work of a pool, as it is sent to other processes."""

    cluster: Cluster
    spec: PoolSpec
    handler: bytes
    """Pickled. Only consumers unpickle it: what it imports has to be where they run."""


def pool_name(cluster_name: str, pool: str) -> str:
    return f"rayq:{cluster_name}:pool-{pool}"


def consumer_prefix(cluster_name: str, pool: str) -> str:
    """The prefix of the names of a pool's consumers; `NAME_CHARACTERS` follow."""
    return f"rayq:{cluster_name}:consumer-{pool}:"


# --- a consumer -----------------------------------------------------------------------------------


class PoolConsumerActor:
    """The Ray actor around one `Member`."""

    def __init__(self, work: PoolWork) -> None:
        environment = system_environment(None)
        name = ray.get_runtime_context().get_actor_name() or work.spec.name
        self._reports = start_reports(environment, ClusterConfig(), name)
        self._member = make_member(
            with_one_thread(environment),
            work.cluster,
            work.spec,
            name[-NAME_CHARACTERS:],
            lambda: _loaded(work.handler),
        )
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._member.run())
        self._end_task = loop.create_task(self._end())

    async def _end(self) -> None:
        """Ends the process a while after the member has ended, also where its pool is gone."""
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
                raise MemberDiedError(in_one_line(error)) from error

    def kill(self) -> None:
        ray.kill(self._actor)


# --- the pool -------------------------------------------------------------------------------------


class RayHosting:
    """Starts consumers, and finds the consumers that an earlier process of the pool started."""

    def __init__(self, work: PoolWork) -> None:
        self._work = work

    async def start_member(self, name: str) -> MemberHandle:
        try:
            # In a thread: the call blocks for as long as Ray's head is away.
            return RayConsumer(await asyncio.to_thread(self._create, name))
        except (RayError, ValueError) as error:
            raise RayqError(f"Ray refused a consumer: {in_one_line(error)}") from error

    def _create(self, name: str) -> Any:
        prefix = consumer_prefix(self._work.cluster.name, self._work.spec.name)
        return (
            ray.remote(PoolConsumerActor)
            .options(
                name=prefix + name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                max_concurrency=100,
                **ray_options(self._work.spec.config.resources),
            )
            .remote(self._work)
        )

    async def find_members(self) -> dict[str, MemberHandle]:
        work = self._work
        found = await asyncio.to_thread(consumers_of, work.cluster.name, work.spec.name)
        return {name[-NAME_CHARACTERS:]: RayConsumer(actor) for name, actor in found}


class PoolActor:
    """The Ray actor around `RunningPool`. It starts by itself, because Ray restarts it without any
    call."""

    def __init__(self, work: PoolWork) -> None:
        environment = system_environment(None)
        self._reports = start_reports(
            environment, ClusterConfig(), pool_name(work.cluster.name, work.spec.name)
        )
        self._pool = RunningPool(environment, work.cluster, work.spec, RayHosting(work))
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


# --- helpers --------------------------------------------------------------------------------------


def consumers_of(cluster_name: str, pool: str) -> list[tuple[str, Any]]:
    """The consumers of this pool, and not of a pool whose name is this one, a colon and more."""
    prefix = consumer_prefix(cluster_name, pool)
    found = actors_with(prefix)
    return [consumer for consumer in found if len(consumer[0]) == len(prefix) + NAME_CHARACTERS]


def ray_options(resources: dict[str, float | int] | None) -> dict[str, Any]:
    """The resources as options of a Ray actor."""
    given = {"num_cpus": 1} if resources is None else resources
    options: dict[str, Any] = {"num_cpus": 0}
    options.update({name: amount for name, amount in given.items() if name in RAY_OPTIONS})
    custom = {name: amount for name, amount in given.items() if name not in RAY_OPTIONS}
    if custom:
        options["resources"] = custom
    return options


def _unpickled(pickled: bytes) -> Handler:
    try:
        handler: Handler = cloudpickle.loads(pickled)
    except BaseException as error:  # a module may call sys.exit()
        raise HandlerError(
            f"The handler cannot be loaded where consumers run ({told(error).removesuffix('.')}): "
            "its modules have to be installed there, or sent along by Ray's runtime_env."
        ) from error
    return handler


def _loaded(pickled: bytes) -> Handler:
    handler = _unpickled(pickled)
    if not is_coroutine_function(handler):
        # It has a thread of its own: its ray.get blocks no event loop, of which Ray would warn.
        os.environ.setdefault(RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, "0")
    return handler


async def present_addresses(cluster_name: str) -> list[Address]:
    """The addresses on which the brokers listen now, as far as they say so at once: each may have
    moved since the cluster's `addresses` were told to a pool."""
    prefix = broker_name(cluster_name, 0).removesuffix("0")
    found: list[Address] = []
    try:
        async with asyncio.timeout(ADDRESSES_PATIENCE_S):
            brokers = await asyncio.to_thread(actors_with, prefix)
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


def in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500]

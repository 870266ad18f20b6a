"""Consumer pools in this process: they run on the client's event loop, their handlers in threads.
"""

from __future__ import annotations

import asyncio
import dataclasses

from rayq.client.background import BackgroundLoop, background_loop
from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolControl, PoolSpec
from rayq.client.environment import system_environment
from rayq.environment import Environment, ThreadPool
from rayq.errors import PoolExistsError, UnknownPoolError
from rayq.pools.make_member import make_member
from rayq.pools.member import Member, MemberDiedError, MemberReport
from rayq.pools.running_pool import MemberHandle, RunningPool
from rayq.records import PoolStatus


def with_one_thread(environment: Environment) -> Environment:
    """For the handler of one consumer: see `PoolHandler`."""
    return dataclasses.replace(environment, threads=ThreadPool(1))


class LocalMember:
    """A consumer as a task of this loop. A kill ends it without a commit; a plain handler that is
    at a call is left to its thread."""

    def __init__(self, member: Member, name: str) -> None:
        self._member = member
        self._task = asyncio.get_running_loop().create_task(member.run(), name=name)

    async def report(self) -> MemberReport:
        self._check()
        return self._member.report()

    async def drain(self) -> MemberReport:
        self._member.drain()
        await asyncio.wait([self._task])
        self._check()
        return self._member.report()

    def _check(self) -> None:
        if not self._task.done():
            return
        if self._task.cancelled():
            raise MemberDiedError("it was killed")
        if (error := self._task.exception()) is not None:
            raise MemberDiedError(repr(error))

    def kill(self) -> None:
        self._task.cancel()


class LocalHosting:
    """Starts consumers on the running loop."""

    def __init__(self, cluster: Cluster, spec: PoolSpec, handler: Handler) -> None:
        self._cluster = cluster
        self._spec = spec
        self._handler = handler

    async def start_member(self, name: str) -> MemberHandle:
        environment = with_one_thread(system_environment(None))
        member = make_member(
            environment, self._cluster, self._spec, name, lambda: self._handler
        )
        return LocalMember(member, f"consumer {name} of pool {self._spec.name}")

    async def find_members(self) -> dict[str, MemberHandle]:
        return {}


class LocalPools:
    """The pools of one cluster in this process. Any thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pools: dict[str, _LocalPool] = {}

    def start_pool(self, cluster: Cluster, spec: PoolSpec, handler: Handler) -> PoolControl:
        """`cluster` may be closed before the pool ends, so the pool goes by the one it belongs
        to."""
        if spec.name in self._pools:
            raise PoolExistsError(
                f"A consumer pool named {spec.name!r} runs in this process already: stop it, or "
                "name this one otherwise (name=)."
            )
        pool = self._pools[spec.name] = _LocalPool(self, self._cluster, spec, handler)
        return pool

    def pools(self, cluster: Cluster) -> dict[str, PoolControl]:
        return dict(self._pools)

    def forget(self, name: str) -> None:
        self._pools.pop(name, None)

    def stop(self, timeout_s: float) -> None:
        """All of them."""
        for pool in list(self._pools.values()):
            pool.stop(True, timeout_s)


class _LocalPool:
    """A pool on the background loop, reached from other threads."""

    def __init__(
        self, owner: LocalPools, cluster: Cluster, spec: PoolSpec, handler: Handler
    ) -> None:
        self._owner = owner
        self._name = spec.name
        self._loop: BackgroundLoop = background_loop()
        self._pool: RunningPool | None = self._loop.run(_started(cluster, spec, handler))

    def status(self) -> PoolStatus:
        pool = self._pool
        if pool is None:
            raise UnknownPoolError(f"The consumer pool {self._name!r} was stopped.")

        async def ask() -> PoolStatus:
            return pool.status()

        return self._loop.run(ask())

    def stop(self, drain: bool, timeout_s: float) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            self._loop.run(pool.stop(drain, timeout_s))
            self._owner.forget(self._name)


async def _started(cluster: Cluster, spec: PoolSpec, handler: Handler) -> RunningPool:
    hosting = LocalHosting(cluster, spec, handler)
    pool = RunningPool(system_environment(None), cluster, spec, hosting)
    pool.start()
    await pool.ready.wait()
    return pool

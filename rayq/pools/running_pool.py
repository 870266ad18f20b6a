"""A running pool of consumers: it looks at the lag of its group or queue once a second, and starts
and stops consumers.

A pool keeps nothing on disk. The group's commits, or the queue, tell which records are handled; the
consumers outlive the pool's process and are found again by name. A consumer that is not found is
harmless: it shares the work with the others until it ends by itself (`member.LEASE_S`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from rayq.actors.listening_clock import ListeningClock
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import PoolSpec
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.config import ConsumerConfig
from rayq.core.pool_scaling import Decision, Limits, Look, PoolScaling
from rayq.environment import Environment
from rayq.errors import RayqError
from rayq.logs import log_event
from rayq.metrics import Sample
from rayq.pools.group_progress import OFFSET_TIMEOUT_MS, GroupProgress
from rayq.pools.member import LOOK_S, MemberDiedError, MemberReport
from rayq.pools.queue_progress import QueueProgress
from rayq.records import PoolConsumer, PoolStatus

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
LOOK_PATIENCE_S = 10.0
"""Time after which an unknown lag is a warning; the first group of a cluster has to wait for the
topic of its positions."""
NAME_CHARACTERS = 8
"""The length of a consumer's name, in hexadecimal digits."""
REPORT_PATIENCE_S = 0.5
"""Maximum time a look waits for running consumers; for a late one the last report remains valid."""
RESTART_PAUSE_S = 0.5
RESTART_PAUSE_MAX_S = 30.0
"""The first and the maximum pause before consumers are started again, if the last one ended without
having handled anything."""


class MemberHandle(Protocol):
    """A consumer, as its pool reaches it."""

    async def report(self) -> MemberReport:
        """The report of the consumer. Waits while it has yet to start. Raises MemberDiedError."""
        ...

    async def drain(self) -> MemberReport:
        """Drains the consumer. Returns its last report when it has finished and left. Raises
        MemberDiedError."""
        ...

    def kill(self) -> None: ...


class PoolHosting(Protocol):
    """The runtime that starts and finds consumers."""

    async def start_member(self, name: str) -> MemberHandle:
        """Starts a consumer. Returns at once, although it may take long until there is room for it.
        Raises RayqError."""
        ...

    async def find_members(self) -> dict[str, MemberHandle]:
        """The consumers that an earlier process of this pool started, by name."""
        ...


@dataclass
class _Member:
    name: str
    handle: MemberHandle
    last: MemberReport | None = None
    asking: asyncio.Task[None] | None = None
    asked_at_s: float = 0.0
    draining: asyncio.Task[None] | None = None
    is_gone: bool = False
    counted: tuple[int, float, int, int] = field(default=(0, 0.0, 0, 0))
    """The part of its reports that the pool's sums contain: records, busy seconds, retries, dead
    letters."""

    @property
    def is_draining(self) -> bool:
        return self.draining is not None

    @property
    def state(self) -> str:
        if self.is_draining:
            return "draining"
        return "pending" if self.last is None else "running"


class RunningPool:
    """See the module. Runs from `start` to `stop`."""

    def __init__(
        self, environment: Environment, cluster: Cluster, spec: PoolSpec, hosting: PoolHosting
    ) -> None:
        config = spec.config
        self._environment = environment
        self._listening = ListeningClock(environment.clock, LOOK_S)
        self._cluster = cluster
        self._spec = spec
        self._hosting = hosting
        self._members: dict[str, _Member] = {}
        self._scaling = PoolScaling(
            Limits(
                consumers_min=config.min_consumers,
                consumers_max=config.max_consumers,
                target_lag_s=config.target_lag_s,
                cool_down_s=config.cool_down_s,
                one_each=spec.queue is None,
            )
        )
        self._progress: GroupProgress | QueueProgress | None = None
        """None before `start`."""
        self._decision: Decision | None = None
        self._wanted = 0
        self._looks = 0
        self._records = self._retries = self._dead_letters = 0
        self._busy_s = 0.0
        self._look_problem: str | None = None
        self._member_problem: str | None = None
        self._futile_starts = 0
        self._start_after_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()
        """Set when the first look was tried."""

    @property
    def _now_s(self) -> float:
        return self._environment.clock.monotonic()

    # --- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the pool, on the loop it will run on."""
        self._environment.metrics.label(cluster=self._cluster.name)
        self._environment.metrics.add_source(self._figures)
        spawn = self._environment.tasks.spawn
        self._task = spawn(self._run(), f"pool {self._spec.name}")
        self._looking = spawn(self._listening.run(), "listening-clock")

    async def wait_stopped(self) -> bool:
        """Waits after `start` until the pool is stopped. Returns False if it has failed, which is
        logged."""
        assert self._task is not None
        await asyncio.wait([self._task])
        return self._task.cancelled()

    async def _run(self) -> None:
        for name, handle in (await self._hosting.find_members()).items():
            logger.info("pool %r found its consumer %s again", self._spec.name, name)
            self._members[name] = _Member(name, handle)
        self._wanted = len(self._members)
        client = self._cluster.new_client()
        progress = self._progress = self._measuring(client)
        looked_s = self._now_s
        try:
            while True:
                began_s = self._now_s
                await self._hear_members()
                try:
                    await self._look(progress)
                except RayqError as error:
                    self._look_problem = (
                        f"the lag could not be measured: {type(error).__name__}: {error}"
                    )
                    is_long = self._now_s - looked_s > LOOK_PATIENCE_S
                    level = logging.WARNING if is_long else logging.INFO
                    logger.log(level, "pool %r: %s", self._spec.name, self._look_problem)
                else:
                    looked_s = self._now_s
                self._cluster.add_addresses(client.addresses())  # for consumers yet to start
                self.ready.set()
                await self._start_and_stop()
                await asyncio.sleep(max(began_s + LOOK_INTERVAL_S - self._now_s, 0.05))
        finally:
            await progress.close()

    def _measuring(self, client: Client) -> GroupProgress | QueueProgress:
        if self._spec.queue is not None:
            return QueueProgress(self._spec, client)
        config = ConsumerConfig(default_api_timeout_ms=OFFSET_TIMEOUT_MS)
        watcher = AsyncConsumer(client, config, (), client.close, group=self._spec.group)
        return GroupProgress(self._environment.clock, self._spec, client, watcher)

    async def stop(self, drain: bool, timeout_s: float) -> None:
        """Stops the pool. Returns when all consumers have left or were killed."""
        if self._looking is not None:
            self._looking.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if drain:
            await self._hear_members(those_on_their_way=True)
        for member in list(self._members.values()):
            if not drain or member.last is None:
                self._kill(member)
            else:
                self._begin_drain(member, timeout_s)
        leaving = [
            member.draining for member in self._members.values() if member.draining is not None
        ]
        if leaving:
            await asyncio.wait(leaving, timeout=timeout_s)
        for member in list(self._members.values()):
            self._kill(member)

    # --- looking --------------------------------------------------------------------------------

    async def _look(self, progress: GroupProgress | QueueProgress) -> None:
        has_consumers = any(member.last is not None for member in self._members.values())
        unknown = await progress.measure(has_consumers=has_consumers)
        self._look_problem = None
        if unknown:
            self._look_problem = f"partitions whose leader has not said where they end: {unknown}"
        if not progress.partitions:
            return
        members = [member for member in self._members.values() if not member.is_draining]
        before = self._wanted
        self._decision = self._scaling.decide(
            Look(
                at_s=self._now_s,
                partitions=dict(progress.partitions),
                consumers=self._wanted,
                running=sum(member.state == "running" for member in members),
                handled=self._records,
                busy_s=self._busy_s,
            )
        )
        self._wanted = self._decision.wanted
        self._looks += not unknown
        if self._wanted != before:
            log_event(
                logger,
                logging.INFO,
                "pool_scaled",
                pool=self._spec.name,
                group=self._spec.group,
                was=before,
                wanted=self._wanted,
                reason=self._decision.reason,
            )

    # --- consumers ------------------------------------------------------------------------------

    async def _hear_members(self, *, those_on_their_way: bool = False) -> None:
        """Asks all consumers, and waits for those that are known to run: the others may take long
        to start."""
        for member in list(self._members.values()):
            if member.asking is None and not member.is_draining:
                member.asked_at_s = self._listening.now_s()
                member.asking = self._environment.tasks.spawn(
                    self._ask(member), f"report of {member.name}"
                )
        waited_for = [
            member.asking
            for member in self._members.values()
            if member.asking is not None and (member.last is not None or those_on_their_way)
        ]
        if waited_for:
            await asyncio.wait(waited_for, timeout=REPORT_PATIENCE_S)
        limit_s = self._spec.config.max_poll_interval_ms / 1000
        for member in list(self._members.values()):
            if member.last is None or member.is_draining:
                continue
            silent_s = 0.0
            if member.asking is not None:
                silent_s = self._listening.now_s() - member.asked_at_s
            if max(member.last.handling_s, silent_s) > limit_s:
                limit = f"max_poll_interval_ms ({limit_s * 1000:.0f} ms)"
                advice = "Give it fewer records (max_records), or raise the limit"
                if self._spec.queue is not None:
                    limit = f"max_handling_s ({limit_s:g} s)"
                    advice = "Divide the work, or alter the queue"
                self._member_problem = (
                    f"a call of the handler on {member.last.node} (pid {member.last.pid}) took "
                    f"more than {limit}: its consumer was killed. {advice}"
                )
                logger.warning("pool %r: %s", self._spec.name, self._member_problem)
                self._kill(member)

    async def _ask(self, member: _Member) -> None:
        try:
            report = await member.handle.report()
            self._count(member, report)
            if report.is_leaving:  # An earlier process of this pool has asked it to.
                self._begin_drain(member, self._spec.config.drain_timeout_s)
            elif report.failure is not None and not member.is_draining:
                raise MemberDiedError(report.failure)
        except MemberDiedError as error:
            if not member.is_draining and not member.is_gone:
                self._died(member, str(error))
        finally:
            member.asking = None

    def _count(self, member: _Member, report: MemberReport) -> None:
        records, busy_s, retries, dead_letters = member.counted
        self._records += report.records - records
        self._busy_s += report.busy_s - busy_s
        self._retries += report.retries - retries
        self._dead_letters += report.dead_letters - dead_letters
        member.counted = (report.records, report.busy_s, report.retries, report.dead_letters)
        member.last = report
        if report.records > records:
            self._futile_starts = 0
            self._start_after_s = 0.0
            self._member_problem = None

    def _died(self, member: _Member, reason: str) -> None:
        self._member_problem = f"a consumer ended: {reason}"
        logger.warning("pool %r: consumer %s ended: %s", self._spec.name, member.name, reason)
        if member.counted[0] == 0 and self._now_s >= self._start_after_s:
            # (Consumers that were started together count once.)
            pause_s = RESTART_PAUSE_S * 2 ** min(self._futile_starts, 10)
            self._futile_starts += 1
            self._start_after_s = self._now_s + min(pause_s, RESTART_PAUSE_MAX_S)
        self._kill(member)

    def _kill(self, member: _Member) -> None:
        member.is_gone = True
        self._members.pop(member.name, None)
        member.handle.kill()

    async def _start_and_stop(self) -> None:
        """Starts and stops consumers until the wanted number runs."""
        there = [member for member in self._members.values() if not member.is_draining]
        if self._now_s >= self._start_after_s:
            for _ in range(self._wanted - len(there)):
                await self._start_one()
        excess = len(there) - self._wanted
        if excess > 0:
            self._stop_some(there, excess)

    def _stop_some(self, there: list[_Member], count: int) -> None:
        """Stops consumers: first those that have yet to start, then the youngest."""
        pending = [member for member in reversed(there) if member.last is None]
        running = [member for member in reversed(there) if member.last is not None]
        for member in (pending + running)[:count]:
            if member.last is None:
                self._kill(member)
            else:
                self._begin_drain(member, self._spec.config.drain_timeout_s)

    async def _start_one(self) -> None:
        name = self._environment.new_id()[:NAME_CHARACTERS]
        try:
            handle = await self._hosting.start_member(name)
        except RayqError as error:
            self._member_problem = f"a consumer could not be started: {error}"
            logger.warning("pool %r: %s", self._spec.name, self._member_problem)
            return
        self._members[name] = _Member(name, handle)

    def _begin_drain(self, member: _Member, timeout_s: float) -> None:
        if member.draining is None:
            member.draining = self._environment.tasks.spawn(
                self._drain(member, timeout_s), f"drain {member.name}"
            )

    async def _drain(self, member: _Member, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                self._count(member, await member.handle.drain())
        except asyncio.TimeoutError:
            logger.warning(
                "pool %r: consumer %s has not finished within %g s: it is killed, and what it was "
                "at is handled again",
                self._spec.name,
                member.name,
                timeout_s,
            )
        except MemberDiedError as error:
            logger.warning("pool %r: consumer %s ended: %s", self._spec.name, member.name, error)
        finally:
            self._kill(member)

    # --- what it tells --------------------------------------------------------------------------

    def _figures(self) -> list[Sample]:
        status = self.status()
        figures = {
            "rayq_pool_wanted_consumers": status.wanted,
            "rayq_pool_running_consumers": status.running,
            "rayq_pool_pending_consumers": status.pending,
            "rayq_pool_lag_seconds": status.lag_s,
            "rayq_pool_target_lag_seconds": status.target_lag_s,
            "rayq_pool_records_total": status.records,
            "rayq_pool_retries_total": status.retries,
            "rayq_pool_dead_letters_total": status.dead_letters,
        }
        sample, at = self._environment.metrics.sample, {"pool": status.name, "group": status.group}
        return [sample(name, value, **at) for name, value in figures.items()]

    def status(self) -> PoolStatus:
        found = self._decision
        problems = [self._look_problem, self._member_problem]
        problems += [m.last.problem for m in self._members.values() if m.last is not None]
        return PoolStatus(
            name=self._spec.name,
            topic=self._spec.topic,
            group=self._spec.group,
            wanted=self._wanted,
            reason="it has just started" if found is None else found.reason,
            consumers=[_shown(member) for member in self._members.values()],
            partitions=0 if self._progress is None else len(self._progress.partitions),
            lag=None if found is None else found.lag,
            lag_s=0.0 if found is None else found.lag_s,
            lag_slope=0.0 if found is None else found.lag_slope,
            target_lag_s=self._spec.config.target_lag_s,
            incoming_per_s=0.0 if found is None else found.incoming_per_s,
            handled_per_s=0.0 if found is None else found.handled_per_s,
            capacity_per_s=None if found is None else found.capacity_per_s,
            records=self._records,
            retries=self._retries,
            dead_letters=self._dead_letters,
            problem=next((problem for problem in problems if problem is not None), None),
            looks=self._looks,
        )


def _shown(member: _Member) -> PoolConsumer:
    last = member.last
    return PoolConsumer(
        consumer=member.name,
        state=member.state,
        node="" if last is None else last.node,
        pid=None if last is None else last.pid,
        partitions=[] if last is None else last.partitions,
        records=0 if last is None else last.records,
        retries=0 if last is None else last.retries,
        dead_letters=0 if last is None else last.dead_letters,
        problem=None if last is None else last.problem,
    )

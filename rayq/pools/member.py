"""Base of the consumers of all pools: their reports to the pool, and how they end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

import msgspec

from rayq.actors.listening_clock import ListeningClock
from rayq.client.consumer_pool import PoolSpec
from rayq.environment import Environment
from rayq.errors import HandlerError
from rayq.pools.handler import PoolHandler

logger = logging.getLogger(__name__)

POLL_S = 0.5
LOOK_S = 1.0
"""Interval at which a pool, and each of its consumers, looks at the clock by which it judges the
other's silence."""
LEASE_S = 60.0
"""Lease of a consumer: if its pool has not asked for it for this long, the pool is gone, and the
consumer finishes and ends."""
FAILED_POLL_PAUSE_S = 1.0
FAILED_POLLS_MAX = 60
"""Number of failed polls in a row after which the consumer ends, and its pool starts another: the
consumer's membership may have failed for good."""
ABORT_TIMEOUT_S = 1.0


class MemberDiedError(Exception):
    """A consumer is gone; the message gives the reason, as far as it is known."""


class MemberReport(msgspec.Struct, frozen=True):
    """The report of a consumer to its pool. The counts are since its start."""

    node: str
    pid: int
    partitions: list[int]
    """The assigned partitions. Empty in a queue's pool: its consumers share the partitions."""
    records: int
    busy_s: float
    retries: int
    dead_letters: int
    handling_s: float
    """The time that the current call of the handler has taken so far."""
    problem: str | None
    is_leaving: bool
    """True if it finishes, or has ended, because its pool asked it to, or because its pool is
    gone."""
    failure: str | None
    """The reason why it has ended by itself; None while it has not."""


class Member:
    """One consumer of a pool. Runs on one event loop; a plain handler runs in a thread."""

    def __init__(self, environment: Environment, spec: PoolSpec, handler: PoolHandler) -> None:
        self._environment = environment
        self._spec = spec
        self._config = spec.config
        self._handler = handler
        self._failed_polls = 0
        self._draining = asyncio.Event()
        self._listening = ListeningClock(environment.clock, LOOK_S)
        self._heard_at_s = self._listening.now_s()
        self._handling_since_s: float | None = None
        self._records = self._retries = self._dead_letter_count = 0
        self._busy_s = 0.0
        self._partitions: set[int] = set()
        self._problem: str | None = None
        self._failure: str | None = None

    # --- what the pool asks ---------------------------------------------------------------------

    def report(self) -> MemberReport:
        """The report of this consumer. Asking also keeps it alive: see LEASE_S."""
        self._heard_at_s = self._listening.now_s()
        since_s = self._handling_since_s
        return MemberReport(
            node=socket.gethostname(),
            pid=os.getpid(),
            partitions=sorted(self._partitions),
            records=self._records,
            busy_s=self._busy_s,
            retries=self._retries,
            dead_letters=self._dead_letter_count,
            handling_s=0.0 if since_s is None else self._now_s - since_s,
            problem=self._problem,
            is_leaving=self._draining.is_set(),
            failure=self._failure,
        )

    def drain(self) -> None:
        """Makes the consumer finish its current work and leave: then `run` returns."""
        self._draining.set()

    # --- its life -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until it is drained, or its pool is gone. Cancelling it is the end of a killed
        consumer: its current work is not settled."""
        self._handling_since_s = self._now_s
        try:
            await self._handler.make()
        except HandlerError as error:
            self._failure = str(error)
            return
        finally:
            self._handling_since_s = None
        looks = self._environment.tasks.spawn(self._listening.run(), "listening-clock")
        try:
            await self._consume()
        finally:
            looks.cancel()
        await self._handler.close()
        if not self._draining.is_set():
            self._failure = self._problem

    async def _consume(self) -> None:
        """Polls and handles until it is drained, then leaves."""
        raise NotImplementedError

    @property
    def _is_going_on(self) -> bool:
        return not self._draining.is_set() and self._failed_polls < FAILED_POLLS_MAX

    @property
    def _now_s(self) -> float:
        return self._environment.clock.monotonic()

    @property
    def _pool(self) -> str:
        return self._spec.name

    async def _check_lease(self) -> None:
        """Finishes if the pool is gone. Time in which it could not be heard does not count: what it
        asked while this process stood still, or was busy with the handler, may still be unread."""
        if self._is_unheard():
            await self._listening.read_arrived()
        if self._is_unheard() and not self._draining.is_set():
            logger.warning("pool %r has not been heard of, its consumer ends", self._pool)
            self._draining.set()

    def _is_unheard(self) -> bool:
        return self._listening.now_s() - self._heard_at_s > LEASE_S

    async def _sleep(self, pause_s: float) -> None:
        """Sleeps; returns early when the consumer is drained."""
        try:
            async with asyncio.timeout(pause_s):
                await self._draining.wait()
        except asyncio.TimeoutError:
            pass

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("a consumer of pool %r: %s", self._pool, problem)
        self._problem = problem

"""Settler of one partition: tells its leader what a consumer has decided, in requests one after
another. Decisions made while a request is in flight go together in the next one. Belongs to the
loop."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
from typing import Protocol

from rayq.backoff import Backoff
from rayq.client.client import Client
from rayq.client.leader_requests import LEADER_PATIENCE_S, may_retry
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.queues.settling import Round, Settlement
from rayq.config import QueueConfig
from rayq.errors import RayqError, UnknownQueueError, UnknownServerError, UnknownTopicError
from rayq.messages import Settle, SettleResponse
from rayq.wire.connection import Connection

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""Timeout of a request, in addition to the time that it waits for."""
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 1.0
SETTLE_LINGER_S = 0.005
"""Time that decisions wait to be batched with others."""
SETTLE_PATIENCE_S = 60.0
"""Maximum time for which telling the leader a decision is retried."""


class Addressed(Protocol):
    """The queue, as requests name it."""

    name: str
    topic: str
    topic_id: str
    queue_id: str
    config: QueueConfig


class Decides(Protocol):
    """The lane that makes the decisions."""

    partition: int
    is_closed: bool

    @property
    def source(self) -> Addressed: ...

    @property
    def name(self) -> str: ...

    def leader(self) -> LeaderAndEpoch:
        """The current leader. Raises RayqError while there is none."""
        ...

    def suspect(self, leader: LeaderAndEpoch | None, error: RayqError) -> None: ...

    def doubts(self, error: RayqError) -> None:
        """The leader reports that there is no such queue, or topic."""
        ...

    def settled(
        self, settlement: Settlement, sent_at_s: float, answer: SettleResponse
    ) -> None: ...

    def gave_up(self, settlement: Settlement, error: RayqError) -> None: ...


class Settler:
    """See the module."""

    def __init__(self, client: Client, lane: Decides) -> None:
        self._client = client
        self._lane = lane
        self.named_over: Connection | None = None
        """The connection over which the leader last heard of this consumer."""
        self._next = Round()
        self._current: Round | None = None
        self._settling: asyncio.Task[None] | None = None
        self._is_waited_for = asyncio.Event()
        self._flushing = 0
        """The number of callers that wait until decisions are durable."""

    def outgoing(self, holder: str, state_epoch: int) -> Settlement:
        """The next settlement for these locks; everything added to it now will be sent."""
        self._begin()
        return self._next.of(holder, state_epoch)

    def _begin(self) -> None:
        # A task that is cancelled before its first step does nothing, and reports nothing.
        if self._settling is None or self._settling.done():
            self._settling = self._client.environment.tasks.spawn(
                self._settle(), f"settle for {self._lane.source.name} at {self._lane.name}"
            )

    async def flush(self) -> None:
        """Waits until all earlier decisions are durable, or given up."""
        waited_for = [self._current, self._next if self._next.settlements else None]
        self._flushing += 1
        self._is_waited_for.set()
        if self._next.settlements:
            self._begin()
        try:
            for sent_round in waited_for:
                if sent_round is not None:
                    await sent_round.wait()
        finally:
            self._flushing -= 1

    async def _settle(self) -> None:
        try:
            while self._next.settlements:
                await self._linger()
                current = self._current = self._next
                self._next = Round()
                for settlement in current.settlements.values():
                    for part in settlement.parts():
                        await self._send(part)
                self._current = None
                current.done()
        except asyncio.CancelledError:
            self._cancelled()
            raise
        except BaseException:
            self._settling = None
            raise
        self._settling = None

    def _cancelled(self) -> None:
        """Handles cancellation with all tasks of an event loop that ends. The caller that closes
        the queue then flushes, and decisions in flight are sent again: repeating them does no
        harm."""
        current, self._current, self._settling = self._current, None, None
        if current is not None:
            current.add(self._next)
            self._next = current
        if self._flushing and self._next.settlements:
            self._begin()

    async def _linger(self) -> None:
        """Waits a moment for more decisions, unless somebody waits for these."""
        self._is_waited_for.clear()
        if not self._flushing:
            with contextlib.suppress(builtins.TimeoutError):
                async with asyncio.timeout(SETTLE_LINGER_S):
                    await self._is_waited_for.wait()

    async def _send(self, settlement: Settlement) -> None:
        began_s = self._client.now
        backoff = Backoff(self._client.environment, BACKOFF_FIRST_S, BACKOFF_MAX_S)
        while True:
            leader: LeaderAndEpoch | None = None
            sent_at_s = self._client.now
            try:
                leader = self._lane.leader()
                answer = await self._send_once(leader, settlement)
            except RayqError as error:
                self._lane.suspect(leader, error)
                if isinstance(error, UnknownQueueError | UnknownTopicError):
                    self._lane.doubts(error)
                is_over = self._client.now - began_s > self._patience_s
                if is_over or not (may_retry(error) or isinstance(error, UnknownQueueError)):
                    self._lane.gave_up(settlement, error)
                    return
                source, partition = self._lane.source, self._lane.partition
                logger.info("queue %s: settle at %s again: %s", source.name, self._lane.name, error)
                await self._client.wait_for_leader(
                    source.topic, source.topic_id, partition, leader, backoff.next_s()
                )
            except Exception as error:
                logger.exception("settling at %s failed", self._lane.name)
                self._lane.gave_up(settlement, UnknownServerError(f"It failed: {error!r}."))
                return
            else:
                self._lane.settled(settlement, sent_at_s, answer)
                return

    @property
    def _patience_s(self) -> float:
        """The time for which sending is retried. A queue, or a topic, that is gone accepts nothing
        any longer."""
        return 0.0 if self._lane.is_closed else SETTLE_PATIENCE_S

    async def _send_once(
        self, leader: LeaderAndEpoch, settlement: Settlement
    ) -> SettleResponse:
        source = self._lane.source
        request = Settle(
            topic_id=source.topic_id,
            partition=self._lane.partition,
            leader_epoch=leader.epoch,
            queue_id=source.queue_id,
            may_linger=not (self._flushing or source.config.ordered_by_key),
            **settlement.fields(),
        )
        response, _ = await self._client.ask_while_leader(
            source.topic,
            source.topic_id,
            self._lane.partition,
            leader,
            request,
            timeout_s=REQUEST_TIMEOUT_S,
            patience_s=LEADER_PATIENCE_S,
        )
        self.named_over = self._client.pool.current(leader.host, leader.port)
        return response

"""Tells the leader of one partition what a consumer has decided, in requests one after another:
what is decided while one is under way goes together in the next. Belongs to the loop."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
from typing import Protocol

from rayq.client.backoff import Backoff
from rayq.client.client import LEADER_PATIENCE_S, Client, may_retry
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.queues.settling import Round, Settlement
from rayq.config import QueueConfig
from rayq.errors import RayqError, UnknownQueueError, UnknownServerError, UnknownTopicError
from rayq.messages import Settle, SettleResponse
from rayq.wire.connection import Connection

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""How long a request may take on top of what it waits for."""
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 1.0
SETTLE_LINGER_S = 0.005
"""How long what was decided waits for company."""
SETTLE_PATIENCE_S = 60.0
"""How long what was decided is tried to be told to the leader."""


class Addressed(Protocol):
    """The queue, as requests name it."""

    name: str
    topic: str
    topic_id: str
    queue_id: str
    config: QueueConfig


class Decides(Protocol):
    """The lane whose decisions these are."""

    partition: int
    is_closed: bool

    @property
    def source(self) -> Addressed: ...

    @property
    def name(self) -> str: ...

    def leader(self) -> LeaderAndEpoch:
        """Raises RayqError while there is none."""
        ...

    def suspect(self, leader: LeaderAndEpoch | None, error: RayqError) -> None: ...

    def doubts(self, error: RayqError) -> None:
        """The leader says that there is no such queue, or topic."""
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
        """Over which connection the leader last heard of this consumer."""
        self._next = Round()
        self._current: Round | None = None
        self._settling: asyncio.Task[None] | None = None
        self._is_waited_for = asyncio.Event()
        self._flushing = 0
        """How many wait until what was decided is durable."""

    def outgoing(self, holder: str, state_epoch: int) -> Settlement:
        """What goes next for these locks; what is put there now goes for certain."""
        self._begin()
        return self._next.of(holder, state_epoch)

    def _begin(self) -> None:
        # One that is cancelled before its first step has done nothing, and says nothing.
        if self._settling is None or self._settling.done():
            self._settling = self._client.environment.tasks.spawn(
                self._settle(), f"settle for {self._lane.source.name} at {self._lane.name}"
            )

    async def flush(self) -> None:
        """Waits until all that was decided before is durable, or given up."""
        waited_for = [self._current, self._next if self._next.settlements else None]
        self._flushing += 1
        self._is_waited_for.set()
        if self._next.settlements:
            self._begin()
        try:
            for one in waited_for:
                if one is not None:
                    await one.wait()
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
        """With all tasks of an event loop that ends. Who closes the queue then flushes, and what
        was under way goes again: to repeat it does no harm."""
        current, self._current, self._settling = self._current, None, None
        if current is not None:
            current.add(self._next)
            self._next = current
        if self._flushing and self._next.settlements:
            self._begin()

    async def _linger(self) -> None:
        """What is decided within the next moment goes along, unless somebody waits for it."""
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
        """A queue, or a topic, that is gone takes nothing any more."""
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

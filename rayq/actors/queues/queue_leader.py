"""The queue leader: it runs a queue in one partition, beside the leader of that partition.

It loads the queue's state from the coordinator and serves the queue (`QueuePartition`) until
another replica leads. If its writes are refused it loads the state again. """

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, ClassVar

from rayq import messages
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.handlers import HandlerTable, answers_peer
from rayq.actors.peers import Peers
from rayq.actors.queues.partition import QueuePartition, Settled
from rayq.actors.queues.persister import QueueStatePersister
from rayq.actors.queues.reads import QueueReads
from rayq.actors.queues.waiting import Answer, LockClock, LockOwners, WaitingTakes
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.config import QueueConfig, parse_stored
from rayq.errors import NotLeaderError, QueueLimitError, QueueLoadingError, RayqError
from rayq.wire.server import Peer, Result

logger = logging.getLogger(__name__)

LOADING_WAIT_S = 0.5
"""Maximum time that a request waits for the queue to load before it is told to try again."""
RETRY_S = 0.1
FAILURE_PAUSE_S = 1.0


class QueueLeader:
    """See the module. Ends with the data leader's role, or when the queue is deleted."""

    handlers: ClassVar[HandlerTable]

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        queue: messages.QueueMetadata,
        *,
        reads: QueueReads,
        peers: Peers,
        clock_watch: ClockWatch,
    ) -> None:
        self._replica_log = replica_log
        self._leader = leader
        self._environment = replica_log.environment
        self._clock_watch = clock_watch
        self._peers = peers
        self._reads = reads
        self._partition = assignment.partition
        self.queue = queue
        self.config = parse_stored(QueueConfig, queue.config)
        self.where = f"queue {queue.name} in {replica_log.where}"
        self.open: QueuePartition | None = None
        """The open queue; None while the state is being loaded."""
        self._ready = Signal()
        self._failure: str | None = None
        self._was_full = False
        """True if the coordinator has refused locks of the last opening."""
        self._ended: RayqError | None = None
        self.takes = WaitingTakes(self._make_empty)
        self.owners = LockOwners(on_gone=self._holders_gone, on_closed=self.takes.closed)
        self._lock_clock = LockClock(self._environment.clock, self._can_hear)
        self._task = self._environment.tasks.spawn(self._run(), f"leads {self.where}")

    def reconfigure(self, queue: messages.QueueMetadata) -> None:
        """Takes the queue's changed config."""
        self.queue = queue
        self.config = parse_stored(QueueConfig, queue.config)
        if self.open is not None:
            self.open.reconfigure(queue, self.config)

    def end(self, error: RayqError) -> None:
        """Ends, as another process leads or the queue was deleted: the requests that wait are
        told."""
        self._ended = error
        self._task.cancel()
        self._close(error)
        self.takes.fail(error)
        self.owners.end()
        self._ready.notify()

    def _close(self, error: RayqError) -> None:
        """Ends the opening. Decisions that are not kept are void."""
        opened, self.open = self.open, None
        if opened is not None:
            opened.end(error)

    # --- opening --------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            pause_s = RETRY_S
            try:
                await self._open_and_serve()
            except QueueLimitError as error:
                # Its locks are void. From the next opening on there is room to settle.
                logger.warning("%s starts over: %s", self.where, error)
                self._failure, self._was_full = str(error), True
            except RayqError as error:
                # A later opening fenced this one, or nothing can be read just now.
                if self._failure != str(error):
                    logger.info("%s starts over: %s", self.where, error)
                self._failure = str(error)
            except Exception as error:
                # The records have other readers: this ends no replica.
                logger.exception("%s failed", self.where)
                self._failure, pause_s = f"{type(error).__name__}: {error}", FAILURE_PAUSE_S
            self._close(self._loading())
            await asyncio.sleep(pause_s)

    async def _open_and_serve(self) -> None:
        persister = QueueStatePersister(
            self._environment,
            self._peers,
            queue_id=self.queue.queue_id,
            data_partition=self._partition,
            data_leader_epoch=self._leader.leader_epoch,
            is_full=self._was_full,
        )
        records = await persister.open()
        while not self._leader.state.may_serve:
            await self._replica_log.committed.wait(RETRY_S)
        opened = await QueuePartition.open(
            records,
            self,
            persister,
            partition=self._partition,
            replica_log=self._replica_log,
            leader=self._leader,
            reads=self._reads,
            peers=self._peers,
            clock_watch=self._clock_watch,
        )
        try:
            await opened.begin()
            opened.reconfigure(self.queue, self.config)  # It may have changed meanwhile.
            self._lock_clock.look()
            self._failure, self._was_full, self.open = None, False, opened
            opened.free_holders(self.owners.gone)
            self._ready.notify()
            await opened.serve()
        finally:
            opened.end(self._loading())

    def _loading(self) -> QueueLoadingError:
        because = "" if self._failure is None else f" ({self._failure})"
        return QueueLoadingError(f"The {self.where} is beginning{because}: try again.")

    async def _opened(self) -> QueuePartition:
        """Returns the open queue. Raises QueueLoadingError, NotLeaderError, UnknownQueueError."""
        await self._ready.wait_until(
            lambda: self._ended is not None or self.open is not None, LOADING_WAIT_S
        )
        self._check()
        if self.open is None:
            raise self._loading()
        return self.open

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._leader.check()

    def _can_hear(self) -> bool:
        try:
            self._leader.check()
        except NotLeaderError:
            return False
        return True

    # --- requests -------------------------------------------------------------------------------

    def handle(
        self, peer: Peer, request: messages.ToQueueLeader[Any]
    ) -> Result | Awaitable[Result]:
        """Answers a request. See the messages for the errors."""
        self._check()
        if self.open is None and not isinstance(request, messages.Take):
            return self._handle_later(peer, request)
        return self.handlers.answer(self, peer, request)

    async def _handle_later(self, peer: Peer, request: messages.ToQueueLeader[Any]) -> Result:
        await self._opened()
        answer = self.handle(peer, request)
        return await answer if isinstance(answer, Awaitable) else answer

    @answers_peer(messages.Take)
    def _take(self, peer: Peer, request: messages.Take, _: memoryview) -> asyncio.Future[Answer]:
        self.owners.heard(request.holder, peer)
        answer = self.takes.add(request, peer.closed)
        self.wake()
        return answer

    @answers_peer(messages.Settle)
    def _settle(
        self, peer: Peer, request: messages.Settle, _: memoryview
    ) -> messages.SettleResponse | Settled:
        assert self.open is not None
        self.owners.heard(request.holder, peer)
        return self.open.settle(request)

    def _make_empty(self) -> Answer | RayqError:
        if self.open is None:
            return self._loading()
        try:
            return self.open.response([]), []
        except RayqError as error:  # The log is closed: the role ends.
            return error

    def _holders_gone(self, holders: set[str]) -> None:
        if self.open is not None:
            with self.open.guard():
                self.open.free_holders(holders)

    def wake(self) -> None:
        """Wakes the delivery: there may be records to give out, or a consumer that wants some."""
        if self.open is not None:
            self.open.wake()

    def tick(self) -> None:
        """Does the periodic work; call it a few times per second."""
        prolong_s = self._lock_clock.look()
        if self.open is not None:
            with suppress(Exception), self.open.guard():
                self.open.tick(prolong_s, can_hear=self._can_hear())


QueueLeader.handlers = HandlerTable("queue leader", QueueLeader, open=QueuePartition)

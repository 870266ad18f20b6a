"""Queues of a data partition, beside the leader of that partition: a `QueueLeader` for each.

A queue leader loads the queue's state from the queue state coordinator and serves the queue
(`OpenQueue`) until another replica leads. If its writes are refused it loads the state again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, ClassVar

import msgspec

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.handlers import HandlerTable, answers_peer
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.peers import Peers
from rayq.actors.queues.metrics import QueueMetrics
from rayq.actors.queues.open_queue import OpenQueue, Settled
from rayq.actors.queues.persister import QueueStatePersister
from rayq.actors.queues.reads import DataPartition, QueueReads
from rayq.actors.queues.scanner import LogScanner
from rayq.actors.queues.waiting import Answer, LockOwners, WaitingTakes
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.config import QueueConfig, parse_stored
from rayq.core.access.unknown import unknown_queue
from rayq.errors import (
    NotLeaderError,
    QueueLimitError,
    QueueLoadingError,
    RayqError,
    UnknownQueueError,
)
from rayq.metrics import Sample
from rayq.wire.frames import size_of
from rayq.wire.handler import Result
from rayq.wire.peer import Peer
from rayq.wire.throttling import Throttle

logger = logging.getLogger(__name__)

LOADING_WAIT_S = 0.5
"""Maximum time that a request waits for the queue to load before it is told to try again."""
RETRY_S = 0.1
FAILURE_PAUSE_S = 1.0
IDLE_WAIT_S = 60.0


class PartitionQueues:
    """See the module. Every leader of a data partition has one, since its topic may get a queue at
    any time; without queues it costs next to nothing. `committed` takes each newer assignment of
    the same epoch, `end` is final."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        *,
        peers: Peers,
        clock_watch: ClockWatch,
        age_watch: ClockWatch,
        access: Access,
    ) -> None:
        """`clock_watch` is for delays, `age_watch` for deletion by age."""
        self._replica_log = replica_log
        self._reads = QueueReads(leader, replica_log.environment.clock)
        self._data = DataPartition(
            assignment.partition, replica_log, leader, self._reads, peers, clock_watch, access
        )
        self._age_watch = age_watch
        self._queues: dict[str, QueueLeader] = {}
        self._changed = Signal()
        self._ended: NotLeaderError | None = None
        self._watching: asyncio.Task[None] | None = None
        self.committed(assignment)

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes the queues of the topic from the partition's committed metadata."""
        queues = {queue.queue_id: queue for queue in assignment.queues}
        for queue_id in [queue_id for queue_id in self._queues if queue_id not in queues]:
            gone = self._queues.pop(queue_id)
            gone.end(UnknownQueueError(f"Queue {gone.queue.name} was deleted."))
        for queue_id, queue in queues.items():
            known = self._queues.get(queue_id)
            if known is None:
                self._queues[queue_id] = QueueLeader(queue, self._data)
            elif known.queue != queue:
                known.reconfigure(queue)
        if self._queues and self._watching is None:
            self._watching = self._replica_log.environment.tasks.spawn(
                self._watch(), f"new records for the queues of {self._replica_log.where}"
            )
        self._hold()
        self._changed.notify()

    async def _watch(self) -> None:
        """Wakes waiting takes at once for each committed record."""
        while True:
            await self._replica_log.committed.wait(IDLE_WAIT_S)
            for queue in self._queues.values():
                queue.wake()

    def end(self, reason: str) -> None:
        """Ends all queues, as another replica leads: the requests that wait are told."""
        self._ended = NotLeaderError(
            f"Broker {self._replica_log.broker} no longer leads {self._replica_log.where} "
            f"({reason}): ask for new metadata."
        )
        if self._watching is not None:
            self._watching.cancel()
        for queue in self._queues.values():
            queue.end(self._ended)
        self._replica_log.hold_log_start(None)
        self._changed.notify()

    def handle(
        self, peer: Peer, request: messages.ToQueueLeader[Any]
    ) -> Result | Awaitable[Result]:
        """Answers a request about a queue. See the messages for the errors."""
        queue = self._queues.get(request.queue_id)
        if queue is None or not queue.can_answer(request):
            return self._handle_later(peer, request)
        return queue.handlers.answer(queue, peer, request)

    async def _handle_later(self, peer: Peer, request: messages.ToQueueLeader[Any]) -> Result:
        queue = await self._find(request.queue_id)
        if not queue.can_answer(request):
            await queue.until_open()
        answer = self.handle(peer, request)
        return await answer if isinstance(answer, Awaitable) else answer

    async def _find(self, queue_id: str) -> QueueLeader:
        """Finds the queue's leader here; the metadata that name a new queue may be on their way.
        Raises UnknownQueueError, NotLeaderError."""
        await self._changed.wait_until(
            lambda: self._ended is not None or queue_id in self._queues, LOADING_WAIT_S
        )
        if self._ended is not None:
            raise self._ended
        if queue_id not in self._queues:
            raise unknown_queue(queue_id)
        return self._queues[queue_id]

    def drop_reads(self) -> None:
        """Drops all reads, as a reader found damage in them."""
        self._reads.drop_all()

    def tick(self) -> None:
        """Does the periodic work; call it a few times per second."""
        self._reads.drop_unused()
        if not self._queues:
            return
        for queue in self._queues.values():
            queue.tick()
        self._hold()

    def _hold(self) -> None:
        """Makes retention wait for the queues that own the topic."""
        held: int | None = None
        is_followed = False
        for queue in self._queues.values():
            if queue.config.retention == "topic":
                continue
            limit = None
            if queue.open is not None:
                limit = queue.open.retention_limit(self._age_watch.now_ms())
            if limit is None:
                limit = self._replica_log.log.start_offset
            held = limit if held is None else min(held, limit)
            is_followed = is_followed or queue.config.retention == "delete_done"
        self._replica_log.hold_log_start(held, deletes_what_is_done=is_followed)

    def measure(self) -> list[Sample]:
        """The metrics of all open queues."""
        return [
            sample
            for queue in self._queues.values()
            if queue.metrics is not None
            for sample in queue.metrics.measure()
        ]


class QueueLeader:
    """Leader of one queue in a partition. It ends with the data leader's role, or when the queue is
    deleted."""

    handlers: ClassVar[HandlerTable]

    def __init__(self, queue: messages.QueueMetadata, data: DataPartition) -> None:
        self._data = data
        self._environment = data.replica_log.environment
        self.queue = queue
        self.config = parse_stored(QueueConfig, queue.config)
        self.where = f"queue {queue.name} in {data.replica_log.where}"
        self.open: OpenQueue | None = None
        """The open queue; None while the state is being loaded."""
        self.metrics: QueueMetrics | None = None
        """The figures of the open queue."""
        self._ready = Signal()
        self._failure: str | None = None
        self._was_full = False
        """True if the coordinator has refused locks of the last opening."""
        self._ended: RayqError | None = None
        self.takes = WaitingTakes(self._make_empty)
        self._listening = ListeningClock(
            self._environment.clock, data.replica_log.config.heartbeat_interval_ms / 1000 / 2
        )
        """The clock by which locks expire."""
        self.owners = LockOwners(
            on_gone=self._holders_gone,
            on_closed=self.takes.closed,
            unheard_s=self._listening.unheard_s,
        )
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
        opened, self.open, self.metrics = self.open, None, None
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
        data = self._data
        persister = QueueStatePersister(
            self._environment,
            data.peers,
            queue_id=self.queue.queue_id,
            data_partition=data.partition,
            data_leader_epoch=data.leader.leader_epoch,
            is_full=self._was_full,
        )
        records = await persister.open()
        while not data.leader.state.may_serve:
            await data.replica_log.committed.wait(RETRY_S)
        scanner = await LogScanner.open(
            records,
            self.config,
            self.queue,
            data,
            fence=persister.fence,
            fence_min=persister.fence_min,
        )
        opened = OpenQueue(self.queue, data, scanner, persister, self.takes, self.owners)
        metrics = QueueMetrics(opened)
        looking: asyncio.Task[None] | None = None
        try:
            await opened.begin()
            opened.reconfigure(self.queue, self.config)  # It may have changed meanwhile.
            self._listening.look()
            self._failure, self._was_full = None, False
            self.open, self.metrics = opened, metrics
            opened.free_holders(self.owners.gone)
            self._ready.notify()
            looking = self._environment.tasks.spawn(metrics.run(), f"looks at {self.where}")
            await opened.serve()
        finally:
            if looking is not None:
                looking.cancel()
            opened.end(self._loading())

    def _loading(self) -> QueueLoadingError:
        because = "" if self._failure is None else f" ({self._failure})"
        return QueueLoadingError(f"The {self.where} is still loading{because}: try again.")

    async def until_open(self) -> None:
        """Returns once the queue is open. Raises QueueLoadingError, NotLeaderError,
        UnknownQueueError."""
        await self._ready.wait_until(
            lambda: self._ended is not None or self.open is not None, LOADING_WAIT_S
        )
        self._check()
        if self.open is None:
            raise self._loading()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._data.leader.check()

    def _can_hear(self) -> bool:
        try:
            self._data.leader.check()
        except NotLeaderError:
            return False
        return True

    # --- requests -------------------------------------------------------------------------------

    def can_answer(self, request: messages.ToQueueLeader[Any]) -> bool:
        """Returns False if the request has to wait until the queue is open: a take may come before.
        Raises NotLeaderError, UnknownQueueError."""
        self._check()
        return self.open is not None or isinstance(request, messages.Take)

    @answers_peer(messages.Take)
    def _take(self, peer: Peer, request: messages.Take, _: memoryview) -> Awaitable[Answer]:
        self.owners.heard(request.holder, peer)
        if peer.throttle is not None and peer.throttle.limited_by:
            return self._take_throttled(peer, peer.throttle, request)
        return self._wait_for_records(peer, request)

    async def _take_throttled(
        self, peer: Peer, throttle: Throttle, request: messages.Take
    ) -> Answer:
        """Takes once the client has not used up its quotas."""
        await throttle.acquire("take_rate", 0)
        await throttle.acquire("consumer_byte_rate", 0)
        self._check()
        response, payload = await self._wait_for_records(
            peer,
            msgspec.structs.replace(
                request,
                records_max=int(throttle.most("take_rate", request.records_max)),
                bytes_max=int(throttle.most("consumer_byte_rate", request.bytes_max)),
            ),
        )
        taken = sum(last - first + 1 for first, last, *_ in response.locks)
        throttle.use("take_rate", taken)
        throttle.use("consumer_byte_rate", sum(map(size_of, payload)))
        return response, payload

    def _wait_for_records(self, peer: Peer, request: messages.Take) -> asyncio.Future[Answer]:
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
        can_hear = self._can_hear()
        prolong_s = self._listening.look(can_hear=can_hear)
        if self.open is not None:
            with suppress(Exception), self.open.guard():
                self.open.tick(prolong_s, can_hear=can_hear)


QueueLeader.handlers = HandlerTable(
    "queue leader", QueueLeader, open=OpenQueue, metrics=QueueMetrics
)

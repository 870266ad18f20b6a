"""The queues of one data partition's leader: a `QueueLeader` for each queue that reads its
topic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from rayq import messages
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.peers import Peers
from rayq.actors.queues.queue_leader import LOADING_WAIT_S, QueueLeader
from rayq.actors.queues.reads import QueueReads
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.errors import NotLeaderError, UnknownQueueError
from rayq.metrics import Sample
from rayq.wire.server import Peer, Result

IDLE_WAIT_S = 60.0


class LeaderQueues:
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
    ) -> None:
        """`clock_watch` is for delays, `age_watch` for deletion by age."""
        self._replica_log = replica_log
        self._leader = leader
        self._environment = replica_log.environment
        self._peers = peers
        self._clock_watch = clock_watch
        self._age_watch = age_watch
        self._reads = QueueReads(leader, replica_log.environment.clock)
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
                self._queues[queue_id] = QueueLeader(
                    self._replica_log,
                    self._leader,
                    assignment,
                    queue,
                    reads=self._reads,
                    peers=self._peers,
                    clock_watch=self._clock_watch,
                )
            elif known.queue != queue:
                known.reconfigure(queue)
        if self._queues and self._watching is None:
            self._watching = self._environment.tasks.spawn(
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
            f"Broker {self._replica_log.broker} leads {self._replica_log.where} no more "
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
        if queue is None:
            return self._handle_later(peer, request)
        return queue.handle(peer, request)

    async def _handle_later(self, peer: Peer, request: messages.ToQueueLeader[Any]) -> Result:
        answer = (await self._find(request.queue_id)).handle(peer, request)
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
            raise UnknownQueueError(
                f"No queue with id {queue_id} reads {self._replica_log.where}: it was deleted, or "
                "this server has not heard of it yet."
            )
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
            if queue.open is not None
            for sample in queue.open.figures.measure()
        ]

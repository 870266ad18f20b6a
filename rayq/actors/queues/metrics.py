"""Figures of a queue's leader, for operators and as metrics."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from rayq import messages
from rayq.actors.queues.moves import QueueMoves
from rayq.actors.queues.persister import GroupCommit, QueueStatePersister
from rayq.actors.queues.waiting import WaitingTakes
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.queues.state import QueueState
from rayq.errors import RayqError
from rayq.messages.secret_names import shown_holder
from rayq.metrics import Sample

LOOK_INTERVAL_S = 5.0


class Opened(Protocol):
    """The opened queue that the figures are of."""

    queue: str
    topic: str
    topic_id: str
    partition: int
    state: QueueState
    persister: QueueStatePersister
    commits: GroupCommit
    moves: QueueMoves
    takes: WaitingTakes
    read_trouble: str | None

    def available(self) -> int: ...

    def due_in_ms(self) -> int | None: ...


class QueueMetrics:
    """Figures of one opening. See the module."""

    def __init__(self, opened: Opened, replica_log: ReplicaLog, leader: Leader) -> None:
        self._opened = opened
        self._replica_log = replica_log
        self._leader = leader
        self._environment = replica_log.environment
        self._clock = replica_log.environment.clock
        self._look_s = 0.0
        self._oldest_append_ms: int | None = None
        """Append time of the oldest ready record, as of the last look."""

    @property
    def trouble(self) -> str | None:
        """The reason that records are not given out or moved. None: nothing prevents it."""
        opened = self._opened
        return (
            opened.persister.trouble
            or opened.read_trouble
            or opened.state.trouble
            or ("The coordinator of this queue is full." if opened.persister.is_full else None)
            or opened.moves.trouble
        )

    async def describe(self, start_offset: int) -> messages.DescribeQueueResponse:
        """See `messages.DescribeQueue`."""
        opened = self._opened
        oldest_ms = None
        if (offset := self._oldest()) is not None:
            with suppress(RayqError):  # The other figures are reported anyway.
                oldest_ms = (await self._ask(offset)).age_ms
        counts = opened.state.counts()
        oldest_lock = opened.state.oldest_lock(self._clock.monotonic()) or (None, None)
        return messages.DescribeQueueResponse(
            start_offset=start_offset,
            end_offset=self._replica_log.last_stable_offset,
            ready=opened.available(),
            locked=counts.locked,
            delayed=counts.delayed,
            moving=counts.moving,
            done=counts.done,
            dead=opened.state.dead,
            expired=opened.state.expired,
            oldest_ready_ms=oldest_ms,
            next_due_ms=opened.due_in_ms(),
            waiting_takes=len(opened.takes),
            trouble=self.trouble,
            blocked=counts.blocked,
            oldest_locked_ms=oldest_lock[0],
            oldest_holder=oldest_lock[1] and shown_holder(oldest_lock[1]),
        )

    def _oldest(self) -> int | None:
        """The oldest record that nobody holds, as far as is known."""
        state = self._opened.state
        oldest = state.first_unsettled_ready()
        if oldest is None and state.learned < self._replica_log.last_stable_offset:
            oldest = state.learned
        return oldest

    async def _ask(self, offset: int) -> messages.DescribeOffsetResponse:
        opened = self._opened
        return await self._leader.reads.describe_offset(
            messages.DescribeOffset(
                opened.topic_id, opened.partition, self._leader.leader_epoch, offset
            )
        )

    # --- metrics --------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Returns whether `look` has something to do."""
        return self._clock.monotonic() >= self._look_s

    async def look(self) -> None:
        """Finds the age of the oldest ready record from time to time. It does not look in the
        object store: takes would wait for that."""
        if not self.is_due:
            return
        self._look_s = self._clock.monotonic() + LOOK_INTERVAL_S
        offset = self._oldest()
        if offset is None:
            self._oldest_append_ms = None
        elif offset >= self._replica_log.log.local_start_offset:
            # Takes report read errors: a figure is not worth one.
            with suppress(RayqError):
                self._oldest_append_ms = (await self._ask(offset)).append_time_ms

    def measure(self) -> list[Sample]:
        opened, counts = self._opened, self._opened.state.counts()
        age_ms = 0
        if self._oldest_append_ms is not None:
            age_ms = max(self._clock.wall_ms() - self._oldest_append_ms, 0)
        figures = {
            "rayq_queue_ready": opened.available(),
            "rayq_queue_locked": counts.locked,
            "rayq_queue_delayed": counts.delayed,
            "rayq_queue_moving": counts.moving,
            "rayq_queue_oldest_ready_seconds": age_ms / 1000,
            "rayq_queue_trouble": int(self.trouble is not None),
            "rayq_queue_dead_total": opened.state.dead,
            "rayq_queue_expired_total": opened.state.expired,
        }
        at = {"queue": opened.queue, "topic": opened.topic, "partition": opened.partition}
        return [
            self._environment.metrics.sample(name, value, **at) for name, value in figures.items()
        ]

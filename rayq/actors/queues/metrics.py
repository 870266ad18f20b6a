"""Figures of a queue's leader, for operators and as metrics."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rayq import messages
from rayq.actors.handlers import answers
from rayq.actors.queues.open_queue import OpenQueue
from rayq.errors import RayqError
from rayq.messages.secret_names import shown_holder
from rayq.metrics import Sample

LOOK_INTERVAL_S = 5.0


class QueueMetrics:
    """Figures of one opening. See the module. `run` is to be a task as long as it is open."""

    def __init__(self, opened: OpenQueue) -> None:
        data = opened.data
        self._opened = opened
        self._replica_log = data.replica_log
        self._leader = data.leader
        self._environment = data.replica_log.environment
        self._clock = data.replica_log.environment.clock
        self._told_start = 0
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

    @answers(messages.DescribeQueue)
    async def describe(self, _: messages.DescribeQueue) -> messages.DescribeQueueResponse:
        """See `messages.DescribeQueue`. It also reports a coordinator that is unavailable, so it
        does not wait for that; but it reports only a start that cannot go back."""
        opened = self._opened
        self._told_start = max(self._told_start, await opened.kept_start())
        oldest_ms = None
        if (offset := self._oldest()) is not None:
            with suppress(RayqError):  # The other figures are reported anyway.
                oldest_ms = (await self._ask(offset)).age_ms
        counts = opened.state.counts()
        oldest_lock = opened.state.oldest_lock(self._clock.monotonic()) or (None, None)
        return messages.DescribeQueueResponse(
            start_offset=self._told_start,
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

    async def run(self) -> None:
        """Finds the age of the oldest ready record from time to time. It does not look in the
        object store: a figure is not worth that."""
        while True:
            # Takes report read errors: a figure is not worth one.
            with suppress(RayqError):
                offset = self._oldest()
                if offset is None:
                    self._oldest_append_ms = None
                elif offset >= self._replica_log.log.local_start_offset:
                    self._oldest_append_ms = (await self._ask(offset)).append_time_ms
            await asyncio.sleep(LOOK_INTERVAL_S)

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

"""Retention of a log that has no records in the object store: its leader moves the log start."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from rayq import messages
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.errors import DiskFullError
from rayq.logs import log_event

logger = logging.getLogger(__name__)


class LogRetention:
    """See the module. Call `tick` from time to time, and `end` once."""

    def __init__(self, replica_log: ReplicaLog) -> None:
        self._replica_log = replica_log
        self._environment = replica_log.environment
        self._next_s = self._environment.clock.monotonic()
        self._task: asyncio.Task[None] | None = None

    def tick(
        self, now_s: float, clock_watch: ClockWatch, assignment: messages.PartitionAssignment
    ) -> None:
        """Moves the log start past what is too old or too much, or past what a queue has
        settled."""
        is_running = self._task is not None and not self._task.done()
        if now_s < self._next_s or is_running:
            return
        replica_log, log = self._replica_log, self._replica_log.log
        self._next_s = now_s + replica_log.config.retention_check_interval_ms / 1000
        start = log.retention_start(clock_watch.now_ms(), replica_log.high_watermark)
        if not assignment.is_remote_doubted:
            # The topic gave up its objects: records that are only there are gone.
            start = max(start, log.local_start_offset)
        held = replica_log.held_offset
        if held is not None:
            start = held if replica_log.deletes_what_is_done else min(start, held)
        if start <= log.start_offset:
            return
        self._task = self._environment.tasks.spawn(
            replica_log.guard(partial(move_log_start, replica_log, assignment, start)),
            f"retention of {replica_log.where}",
        )

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def move_log_start(
    replica_log: ReplicaLog, assignment: messages.PartitionAssignment, start: int
) -> None:
    """Durably moves a leader's log start, as retention demands. Raises StorageError."""
    log_event(
        logger,
        logging.INFO,
        "retention",
        **assignment.labels,
        epoch=assignment.leader_epoch,
        log_start_offset=start,
    )
    try:
        await replica_log.advance_log_start(start)
    except DiskFullError as error:
        logger.warning("%s", error)
    replica_log.appended.notify()  # Followers hear of it with their next fetch.

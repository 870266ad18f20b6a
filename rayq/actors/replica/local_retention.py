"""Local retention: deletes segments that are in the object store and old enough."""

from __future__ import annotations

import asyncio
import logging

from rayq.actors.clock_watch import ClockWatch
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.errors import DiskFullError
from rayq.messages.remote_pointer import RemotePointer

logger = logging.getLogger(__name__)


class LocalRetention:
    """See the module. Each replica decides for itself, by the committed metadata that it has seen:
    if it trusted a leader, it could drop records that a later leader does not count as stored."""

    def __init__(self, replica_log: ReplicaLog, clock_watch: ClockWatch) -> None:
        self._replica_log = replica_log
        self._clock_watch = clock_watch
        self._next_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def tick(self, now_s: float, pointer: RemotePointer | None) -> None:
        """Drops the segments that may go, with `pointer` committed. The log must be open."""
        is_running = self._task is not None and not self._task.done()
        if pointer is None or now_s < self._next_s or is_running:
            return
        replica = self._replica_log
        self._next_s = now_s + replica.config.retention_check_interval_ms / 1000
        start = replica.log.local_retention_start(self._clock_watch.now_ms(), pointer.end)
        if start is None:
            return

        # What the committed list lacks at its start was deleted under another leader, and is only
        # on this disk: it must not be offered once it is gone from here.
        floor = min(pointer.start, start)

        async def drop() -> None:
            try:
                await replica.advance_log_start(floor)
                await replica.drop_local(start)
            except DiskFullError as error:
                logger.warning("%s", error)

        self._task = replica.environment.tasks.spawn(
            replica.guard(drop), f"local retention of {replica.where}"
        )

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

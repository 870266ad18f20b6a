"""Group commit of a replica's log: one flush at a time covers everything that was appended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from rayq.actors.replica.directory_jobs import DirectoryJobs
from rayq.actors.replica.flush_lock import FlushLock
from rayq.actors.signal import Signal
from rayq.environment import Environment
from rayq.errors import DiskFullError, StorageError
from rayq.storage.log import Log
from rayq.storage.plans import FlushPlan

logger = logging.getLogger(__name__)

FLUSH_WAIT_S = 60.0
CHECKPOINT_RETRY_S = 1.0
"""Retry interval of a checkpoint that found no room on the disk."""


class Flusher:
    """See the module. `begin` once the log is open, `stop` last.

    `is_open()` says whether the log may be flushed. `on_flushed(offset)` is called when the disk
    holds more, `on_failure(error)` when a flush failed, which is final.
    """

    def __init__(
        self,
        environment: Environment,
        jobs: DirectoryJobs,
        where: str,
        *,
        is_open: Callable[[], bool],
        high_watermark: Callable[[], int],
        on_flushed: Callable[[int], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._environment = environment
        self._jobs = jobs
        self._where = where
        self._is_open = is_open
        self._high_watermark = high_watermark
        self._on_flushed = on_flushed
        self._on_failure = on_failure
        self._flush_seconds = environment.metrics.histogram("rayq_log_flush_seconds")
        self.lock = FlushLock(self._flush)
        """Lock that is held while a flush or a truncation runs."""
        self._log: Log | None = None
        self._is_dirty = False
        """True if there may be data that no flush has started with."""
        self._flushed = Signal()
        self._checkpoints_wanted = 0
        self._checkpoints_made = 0
        self._checkpoint_from_s = 0.0
        """Time from which a checkpoint that found no room may be retried; 0.0 if the last one
        succeeded."""
        self._checkpoint_retry: asyncio.TimerHandle | None = None
        self._is_abandoned = False

    def begin(self, log: Log) -> None:
        """Flushes this log from now on."""
        self._log = log
        self.wake()

    def wake(self) -> None:
        """Has everything that was appended flushed: now, or after the running flush."""
        self._is_dirty = True
        self._flush()

    async def checkpoint(self) -> None:
        """Returns when everything that is here now, including the log start, is durable. Raises
        StorageError; DiskFullError when it found no room."""
        self._checkpoints_wanted += 1
        wanted = self._checkpoints_wanted
        self.wake()
        while self._checkpoints_made < wanted:
            await self._flushed.wait(FLUSH_WAIT_S)
            if self._log is None or not self._is_open():
                raise StorageError(f"The replica of {self._where} stopped before its flush.")
            if self._checkpoint_from_s > 0.0:
                raise DiskFullError(
                    f"{self._log.directory}: no room for a checkpoint. Free space on this disk; it "
                    "will be retried."
                )

    def stop(self, *, is_abandoned: bool = False) -> None:
        """Tells those who wait for a checkpoint. With `is_abandoned` a running flush counts for
        nothing."""
        self._is_abandoned = self._is_abandoned or is_abandoned
        if self._checkpoint_retry is not None:
            self._checkpoint_retry.cancel()
        self._flushed.notify()

    def _flush(self) -> None:
        """Starts a flush if there may be something to flush and none is running. It covers
        everything that was appended so far. It runs by callbacks: each record waits for a flush of
        each replica, and a task would cost several turns of the loop."""
        log = self._log
        if not self._is_dirty or log is None or not self._is_open():
            return
        if not self.lock.begin_flush():
            return
        self._is_dirty = False
        wanted, began_s = self._checkpoints_wanted, self._environment.clock.monotonic()
        try:
            plan = log.plan_flush(
                self._high_watermark(),
                checkpoint=wanted > self._checkpoints_made,
                may_checkpoint=began_s >= self._checkpoint_from_s,
            )
            step = None if plan is None else self._jobs.begin(plan.run)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the replica
            # Later: the caller may be in the middle of an append.
            asyncio.get_running_loop().call_soon(self._failed, error)
            self.lock.end_flush()
            return
        if plan is None or step is None:
            self._flushed_until(wanted)
        else:
            step.add_done_callback(partial(self._flush_done, log, plan, wanted, began_s))

    def _flush_done(
        self,
        log: Log,
        plan: FlushPlan,
        wanted: int,
        began_s: float,
        step: asyncio.Future[bool],
    ) -> None:
        if step.cancelled() or self._is_abandoned:
            self.lock.end_flush()
            return
        now_s = self._environment.clock.monotonic()
        try:
            has_checkpoint = step.result()
            self._flush_seconds.observe(now_s - began_s)
            if plan.checkpoint is not None:
                self._checkpoint_from_s = 0.0 if has_checkpoint else now_s + CHECKPOINT_RETRY_S
            log.apply_flush(plan, has_checkpoint=has_checkpoint)
            self._on_flushed(log.flushed_offset)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the replica
            self._failed(error)
        self._flushed_until(wanted)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, OSError | StorageError):
            logger.error("flushing the log of %s failed", self._where, exc_info=error)
        # The kernel may have dropped the pages: never retry, never trust them.
        self._on_failure(StorageError(f"Flushing the log of {self._where} failed: {error}"))

    def _flushed_until(self, wanted: int) -> None:
        """Handles the end of a flush that was to write `wanted` checkpoints, and starts the next
        one."""
        if self._checkpoint_from_s == 0.0:
            self._checkpoints_made = wanted
        elif self._checkpoint_retry is None and self._is_open():
            self._checkpoint_retry = asyncio.get_running_loop().call_later(
                CHECKPOINT_RETRY_S, self._retry_checkpoint
            )
        self._flushed.notify()
        self.lock.end_flush()

    def _retry_checkpoint(self) -> None:
        self._checkpoint_retry = None
        self.wake()

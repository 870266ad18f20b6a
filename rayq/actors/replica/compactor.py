"""Scheduling of a replica's log compaction: leader and followers each clean their own log.

The pass itself runs elsewhere, at low priority (`RunCleaner`: a helper process of the runtime).
This module decides when it runs, and puts its result in place.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from rayq.actors.clock_watch import ClockWatch
from rayq.actors.hosting import RunCleaner
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import MIB
from rayq.environment import Environment
from rayq.errors import CorruptBatchError, DirectoryInUseError, RayqError
from rayq.storage.cleaner import CleaningJob, CleaningResult, Steps, clean, cleaner_turn

logger = logging.getLogger(__name__)

BUSY_RETRY_S = 1.0
"""Retry interval while another log on the same disk is being compacted."""


class Compactor:
    """See the module. Call `tick` from time to time, and `stop` once."""

    def __init__(
        self, replica_log: ReplicaLog, run_cleaner: RunCleaner, clock_watch: ClockWatch
    ) -> None:
        self._replica_log = replica_log
        self._run_cleaner = run_cleaner
        self._environment = replica_log.environment
        self._clock_watch = clock_watch
        """The clock for compaction lags and for the time that tombstones stay."""
        self._task: asyncio.Task[None] | None = None
        self._next_s: float | None = None
        self.unreadable_batches = 0
        """Number of unreadable batches in the last pass: their bytes are as written, but they are
        no batches of records."""

    def tick(self, now_s: float) -> None:
        """Starts a pass when it is time for one; does nothing for logs with other policies."""
        replica_log = self._replica_log
        if not replica_log.topic_config.is_compacted:
            return
        if self._next_s is None:  # A broker's logs start at different times.
            self._next_s = now_s + self._interval_s * self._environment.random.random()
        is_running = self._task is not None and not self._task.done()
        if now_s < self._next_s or is_running or not replica_log.is_open:
            return
        self._next_s = now_s + self._interval_s
        self._task = self._environment.tasks.spawn(
            replica_log.guard(self._compact), f"compact {replica_log.where}"
        )

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def _interval_s(self) -> float:
        return self._replica_log.config.compaction_check_interval_ms / 1000

    async def _compact(self) -> None:
        try:
            is_done = await self._pass(at_once=False)
            while not is_done:
                is_done = await self._pass(at_once=True)
        except DirectoryInUseError:
            self._next_s = self._environment.clock.monotonic() + BUSY_RETRY_S
        except (RayqError, OSError) as error:
            # A full disk, or a helper that was killed: the log is unchanged.
            logger.warning("%s was not compacted: %s", self._replica_log.where, error)

    async def _pass(self, *, at_once: bool) -> bool:
        """Runs a pass if one is due. Returns False if its memory did not suffice for all keys: run
        another."""
        replica_log, config = self._replica_log, self._replica_log.config
        await replica_log.remove_below_start()
        log, clock = replica_log.log, self._environment.clock
        if log.roll_to_clean(self._clock_watch.now_ms()):
            replica_log.flusher.wake()
        if log.wants_checkpoint_to_clean(replica_log.high_watermark):
            await replica_log.flusher.checkpoint()
        cleaning = log.plan_cleaning(
            self._clock_watch.now_ms(),
            memory_bytes=config.compaction_memory_bytes,
            bytes_per_s=config.compaction_bytes_per_s,
            at_once=at_once,
        )
        if cleaning is None:
            return True
        started_s = clock.monotonic()
        try:
            with replica_log.compacting():
                result = await self._run_cleaner(cleaning.job)
                is_swapped = await replica_log.swap(
                    cleaning, result, self._clock_watch.latest_ms()
                )
        except CorruptBatchError as error:
            if log.is_current(cleaning):
                # Below the recovery point this is damage, as a reader would find it.
                replica_log.unreadable(log, log.generation, cleaning.job.dirty_offset, error)
            return True
        if not is_swapped:
            return True
        self.unreadable_batches = result.unreadable_batches
        if result.unreadable_batches:
            logger.warning(
                "%s has %d batches that no reader can read, the first at offset %d: compaction "
                "keeps them as they are (consumers get past them by seek or on_corrupt='skip')",
                *(replica_log.where, result.unreadable_batches, result.unreadable_offset),
            )
        logger.info(
            "compacted %s up to %d in %.1f s: %d of %d records stay, %d of %d bytes; %d keys took "
            "%d MiB of memory",
            *(replica_log.where, result.end_offset, clock.monotonic() - started_s),
            *(result.records_kept, result.records_read, result.bytes_kept, result.bytes_read),
            *(result.keys, (result.peak_memory_bytes or 0) // MIB),
        )
        return result.end_offset >= cleaning.segments[-1].next_offset


# --- a cleaner without a process of its own -------------------------------------------------------


class _Step(NamedTuple):
    bytes_moved: int
    result: CleaningResult | None


def _next_step(steps: Steps) -> _Step:
    try:
        return _Step(next(steps), None)
    except StopIteration as end:
        return _Step(0, end.value)


def cleaner_in_steps(environment: Environment) -> RunCleaner:
    """Runs passes in threads of this process, step by step: for the simulation, where a crash can
    then fall between any two steps."""

    async def run(job: CleaningJob) -> CleaningResult:
        clock = environment.clock
        turn = cleaner_turn(environment.disk, job.directory)
        turn.__enter__()
        step: asyncio.Future[_Step] | None = None
        try:
            steps = clean(environment.disk, job)
            started_s, bytes_moved = clock.monotonic(), 0
            while True:
                step = asyncio.ensure_future(environment.threads.run(_next_step, steps))
                done = await asyncio.shield(step)
                if done.result is not None:
                    return done.result
                bytes_moved += done.bytes_moved
                ahead_s = bytes_moved / job.bytes_per_s - (clock.monotonic() - started_s)
                await asyncio.sleep(max(ahead_s, 0.0))
        finally:
            if step is None or step.done():
                turn.__exit__(None, None, None)
            else:  # Cancelled, and a thread still works.
                step.add_done_callback(lambda _: turn.__exit__(None, None, None))

    return run

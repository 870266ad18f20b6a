"""The leader's remote storage task: it uploads closed segments, enforces retention in the store and
on disk, and sweeps objects that nothing refers to.

A single task does it all, so that deletion keeps its order (docs/protocol.md, rule 41). The log
start is in a checkpoint before a list is committed that lacks the objects below it; objects that
left the list are deleted after a delay, and forgotten after that. While the store fails, the task
retries with growing backoff, and the leader continues to serve.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from rayq import messages
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.remote.object_collector import ObjectCollector
from rayq.actors.remote.reads import RemoteReads
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.remote.retention import RemoteRetention
from rayq.actors.remote.uploads import Uploads, waiting
from rayq.actors.remote.verification import Verification
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.backoff import Backoff
from rayq.core.partition.state import PartitionState
from rayq.core.remote.retention import Piece, is_backlog_too_large
from rayq.errors import (
    DiskFullError,
    FencedEpochError,
    NotLeaderError,
    RayqError,
    RemoteBacklogError,
    RemoteSlowError,
    StalePartitionError,
    UnknownTopicError,
)
from rayq.logs import log_event
from rayq.metrics import Sample
from rayq.storage.remote.manifest import Manifest

logger = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 1.0
"""Minimum interval between changes of a partition's list of objects."""
RETRY_S, RETRY_MAX_S = 1.0, 60.0
"""Backoff after the first failure in a row, and its maximum."""
SLOW_S = 300.0
"""Time after which an object server that is busy with other uploads counts as a failure."""
SWEEP_RETRY_S = 600.0
START_S = 10.0
"""Time that a new leader waits for an object server that may be starting, too."""


class LeaderRemote:
    """See the module. `log` is the leader's view of the remote log. Call `tick` from time to time,
    and `end` once."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        remote_log: RemoteLog,
        state: PartitionState,
        assignment: messages.PartitionAssignment,
    ) -> None:
        self._replica_log = replica_log
        self._state = state
        self._assignment = assignment
        self.log = remote_log
        environment, config = replica_log.environment, replica_log.config
        self._environment = environment
        self.reads = RemoteReads(replica_log, remote_log)
        self._uploads = Uploads(replica_log, remote_log)
        self._retention = RemoteRetention(replica_log, remote_log)
        self._collector = ObjectCollector(environment, remote_log, config.remote_delete_delay_ms)
        self.verification = Verification(replica_log, remote_log, self._uploads)
        self._task: asyncio.Task[None] | None = None
        self.trouble: str | None = None
        """The reason that nothing is stored or deleted now. None: it works."""
        self._backoff = Backoff(environment, RETRY_S, RETRY_MAX_S)
        self._busy_since_s: float | None = None
        """Time since which the object server has been too busy for any upload."""
        self._refusal: str | None = None
        self._began_s = self._pause_until_s = now_s = environment.clock.monotonic()
        self._active = (-1, now_s)
        """The base offset of the active segment, and the time since which it has records, as far as
        is known here."""
        # The leaders of a broker start together, and must not ask the store all at once.
        self._retention_interval_s = config.retention_check_interval_ms / 1000
        self._retention_s = now_s + self._retention_interval_s * environment.random.random()
        self._sweep_interval_s = config.remote_sweep_interval_ms / 1000
        self._sweep_s = now_s + self._sweep_interval_s * environment.random.random()
        self._retention.raise_to_floor()

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes the partition's committed metadata, in this epoch."""
        self._assignment = assignment
        self.log.committed(assignment)
        self._retention.raise_to_floor()

    def end(self, reason: str) -> None:
        self.log.end(reason)
        if self._task is not None:
            self._task.cancel()

    # --- work that is due -------------------------------------------------------------------

    def tick(self, now_s: float, clock_watch: ClockWatch) -> None:
        """Does the periodic work. Raises StorageError."""
        self._refusal = self._why_refused()
        is_running = self._task is not None and not self._task.done()
        if is_running or not (self._replica_log.is_open and self._state.may_serve):
            return
        self._close_old_segment(now_s, clock_watch.now_ms())
        is_starting = self.log.objects.endpoint is None and now_s < self._began_s + START_S
        if now_s >= self._pause_until_s and not is_starting and self._is_due(now_s):
            self._task = self._environment.tasks.spawn(
                self._replica_log.guard(partial(self._work, clock_watch)),
                f"remote log of {self._replica_log.where}",
            )

    @property
    def _stores(self) -> bool:
        return self._replica_log.topic_config.remote_storage is True

    def _close_old_segment(self, now_s: float, now_ms: int) -> None:
        if not self._stores:
            return
        log, lag_ms = self._replica_log.log, self._replica_log.topic_config.remote_max_lag_ms
        base_offset = log.active_base_offset
        if self._active[0] != base_offset or log.end_offset == base_offset:
            self._active = base_offset, now_s
        elif now_s - self._active[1] > lag_ms / 1000:
            # Regardless of the dates of its appends: a clock may have been ahead.
            now_ms = max(now_ms, (log.last_append_time_ms or 0) + lag_ms)
        try:
            if log.roll_to_upload(now_ms):
                self._replica_log.flusher.wake()
        except DiskFullError as error:
            logger.warning("%s", error)

    def _is_due(self, now_s: float) -> bool:
        superseded_s = self._collector.next_superseded_s()
        return (
            now_s >= min(self._retention_s, self._sweep_s)
            or (superseded_s is not None and now_s >= superseded_s)
            or self._has_uploads
        )

    @property
    def _has_uploads(self) -> bool:
        return self._stores and self._uploads.has_work

    async def _work(self, clock_watch: ClockWatch) -> None:
        clock = self._environment.clock
        try:
            while True:
                began_s = clock.monotonic()
                await self._run_once(began_s, clock_watch)
                self._succeeded()
                if not self._has_uploads:
                    return
                await asyncio.sleep(max(began_s + COMMIT_INTERVAL_S - clock.monotonic(), 0.0))
        except (FencedEpochError, NotLeaderError, StalePartitionError, UnknownTopicError) as error:
            # Newer metadata are on their way.
            logger.debug("the remote log of %s: %s", self._replica_log.where, error)
            self._pause_until_s = clock.monotonic() + RETRY_S
        except RayqError as error:
            now_s = clock.monotonic()
            if self._busy_since_s is None:
                self._busy_since_s = now_s
            if isinstance(error, RemoteSlowError) and now_s < self._busy_since_s + SLOW_S:
                self._pause_until_s = now_s + RETRY_S
            else:
                self._failed(error)

    async def _run_once(self, now_s: float, clock_watch: ClockWatch) -> None:
        is_retention_due = now_s >= self._retention_s
        if is_retention_due:
            self._retention_s = now_s + self._retention_interval_s
            await self._retention.advance(self._assignment, clock_watch.now_ms())
        failure = None
        if self._stores:
            try:
                if self._uploads.waits_for_a_checkpoint:
                    await self._replica_log.flusher.checkpoint()
                await self._uploads.store()
            except RayqError as error:
                failure = error
        if self._uploads.stored:
            self._busy_since_s = None
        # Objects that were stored before a failure count, too.
        if is_retention_due or self._uploads.stored:
            await self._change_list(clock_watch, deletes=is_retention_due)
        if failure is not None:
            raise failure
        await self._collector.delete_superseded()
        if now_s >= self._sweep_s:
            self._sweep_s = now_s + min(SWEEP_RETRY_S, self._sweep_interval_s)
            await self._collector.sweep()
            self._sweep_s = now_s + self._sweep_interval_s

    async def _change_list(self, clock_watch: ClockWatch, *, deletes: bool) -> None:
        """Commits the stored objects, and removes from the list those that are below the log start
        by now. With `deletes` it first deletes objects that were removed long enough ago, which
        then leave the list."""
        manifest = await self.log.manifest()
        if manifest is None and not self._uploads.stored:
            return
        deleted = list[str]()
        if manifest is not None and deletes:
            deleted = await self._collector.delete_removed(manifest, clock_watch.now_ms())
        log, now_ms = self._replica_log.log, clock_watch.latest_ms()
        log_start = log.persisted_log_start

        def change(manifest: Manifest) -> Manifest:
            if deleted:
                manifest = manifest.without_removed(deleted)
            if log_start > manifest.log_start:
                manifest = manifest.without_below(log_start, now_ms)
            stored = self._uploads.not_listed(manifest.end)
            if not stored:
                return manifest
            end = stored[-1].end
            manifest = msgspec.structs.replace(
                manifest.appended(*stored),
                epochs=[entry for entry in log.epochs.entries() if entry[1] < end],
                producer_snapshot=log.producer_snapshot_at(end),
            )
            return manifest.without_below(log_start, now_ms)

        try:
            await self.log.change(change)
        except StalePartitionError:
            self._uploads.forget_stored()
            raise
        self._uploads.forget_stored()

    def check_backlog(self) -> None:
        """Raises RemoteBacklogError while the topic accepts no more records."""
        if self._refusal is not None:
            raise RemoteBacklogError(self._refusal)

    def _why_refused(self) -> str | None:
        backlog_bytes = self.log.objects.backlog_bytes
        if not (self._stores and backlog_bytes and self._replica_log.is_open):
            return None
        config, directory = self._replica_log.config, self._replica_log.log.directory
        try:
            free_bytes = self._environment.disk.free_bytes(directory)
        except OSError:
            return None  # Appends will report it.
        if not is_backlog_too_large(
            backlog_bytes,
            config.remote_backlog_bytes,
            free_bytes,
            is_stuck=self.trouble is not None,
        ):
            return None
        return (
            f"{self._replica_log.where} takes no records for now: {backlog_bytes} bytes on the "
            f"disk of broker {self._replica_log.broker}, which has {free_bytes} bytes free, wait "
            f"for the object store ({self.trouble or 'it is too slow'}). Nothing was written; it "
            "can be tried again when more of them are stored."
        )

    def _succeeded(self) -> None:
        if self.trouble is not None:
            self._log(logging.INFO, "remote storage works again")
        self.trouble = self._busy_since_s = None
        self._backoff.reset()

    def _failed(self, error: RayqError) -> None:
        if self.trouble is None:
            self._log(logging.WARNING, "remote storage fails", error=error)
        self.trouble = str(error)
        self._pause_until_s = self._environment.clock.monotonic() + self._backoff.next_s()

    def _log(self, level: int, event: str, **fields: object) -> None:
        assignment = self._assignment
        log_event(
            logger,
            level,
            event,
            **assignment.labels,
            epoch=assignment.leader_epoch,
            **fields,
        )

    # --- figures ----------------------------------------------------------------------------

    def _waiting(self) -> list[Piece]:
        """The parts of closed segments that are not stored yet."""
        return waiting(self._replica_log.log, self.log.pointer) if self._stores else []

    def describe(self) -> messages.DescribeRemoteStorageResponse:
        """Describes the progress of the partition in the object store."""
        waiting, log = self._waiting(), self._replica_log.log
        return messages.DescribeRemoteStorageResponse(
            pointer=self.log.pointer,
            log_start_offset=log.start_offset,
            local_start_offset=log.local_start_offset,
            high_watermark=self._replica_log.high_watermark,
            lag_bytes=sum(piece.size_bytes for piece in waiting),
            lag_ms=self._lag_ms(waiting),
            trouble=self.trouble,
        )

    def _lag_ms(self, waiting: list[Piece]) -> int:
        if not waiting:
            return 0
        return max(self._environment.clock.wall_ms() - waiting[0].last_append_ms, 0)

    def measure(self, at: dict[str, object]) -> list[Sample]:
        waiting, sample = self._waiting(), self._environment.metrics.sample
        size_bytes = 0 if self.log.pointer is None else self.log.pointer.data_bytes
        lag_bytes = sum(piece.size_bytes for piece in waiting)
        return [
            sample("rayq_remote_size_bytes", size_bytes, **at),
            sample("rayq_remote_upload_lag_bytes", lag_bytes, **at),
            sample("rayq_remote_upload_lag_seconds", self._lag_ms(waiting) / 1000, **at),
        ]

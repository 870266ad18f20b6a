"""Retention of a log whose old records are in the object store. The leader applies it to the
committed list of objects and to its own segments above the remote end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rayq import messages
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.remote.uploads import closed_segments
from rayq.actors.replica.log_retention import move_log_start
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.remote.retention import Piece, closed_above, retention_start
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.remote.manifest import RemoteObject


class RemoteRetention:
    """See the module."""

    def __init__(self, replica_log: ReplicaLog, remote_log: RemoteLog) -> None:
        self._replica_log = replica_log
        self._remote_log = remote_log

    def raise_to_floor(self) -> None:
        """Raises the log start to the start of the committed list if the disk begins later still:
        the records between were deleted under an earlier leader. Takes effect at once."""
        pointer = self._remote_log.pointer
        if pointer is not None and self._replica_log.is_open:
            log = self._replica_log.log
            floor = min(pointer.start, log.local_start_offset)
            if floor > log.start_offset:
                log.advance_start(floor, keeps_segments=True)
                self._replica_log.flusher.wake()
                self._replica_log.appended.notify()

    async def advance(self, assignment: messages.PartitionAssignment, now_ms: int) -> None:
        """Durably moves the log start as retention demands, or past records that a queue has
        settled. Raises the errors of `RemoteLog.manifest`, and StorageError."""
        replica_log = self._replica_log
        if replica_log.deletes_what_is_done:
            start: int | None = self._limit_offset()
        else:
            start = await self._due_start(now_ms)
        if start is not None and start > replica_log.log.start_offset:
            await move_log_start(replica_log, assignment, start)

    def _limit_offset(self) -> int:
        """Offset below which records may be deleted."""
        replica_log = self._replica_log
        limit_offset = replica_log.last_stable_offset
        pinned_offset = self._remote_log.pinned_offset  # It may be newer than the assignment here.
        if pinned_offset is not None:
            limit_offset = min(limit_offset, pinned_offset)
        if replica_log.held_offset is not None:
            limit_offset = min(limit_offset, replica_log.held_offset)
        return limit_offset

    async def _due_start(self, now_ms: int) -> int | None:
        """The log start by age and size. Records in the object store count only by the committed
        list: without it nothing moves."""
        replica_log, config = self._replica_log, self._replica_log.topic_config
        if not self._may_be_due(self._remote_log.pointer):
            return None
        manifest = await self._remote_log.manifest()
        log, remote_end, remote_bytes = replica_log.log, 0, 0
        objects: Sequence[RemoteObject] = ()
        if manifest is not None:
            objects, remote_end = manifest.objects, manifest.end
            remote_bytes = manifest.data_bytes
        return retention_start(
            chain(
                (Piece(remote.end, remote.data_bytes, remote.last_append_ms) for remote in objects),
                closed_above(closed_segments(log), remote_end),
            ),
            remote_bytes + self._bytes_above(remote_end),
            now_ms=now_ms,
            limit_offset=self._limit_offset(),
            retention_ms=config.retention_ms,
            retention_bytes=config.retention_bytes,
        )

    def _may_be_due(self, pointer: RemotePointer | None) -> bool:
        """Returns whether the committed list must be checked."""
        config = self._replica_log.topic_config
        if config.retention_ms is not None or config.retention_bytes is None:
            return config.retention_ms is not None
        stored = (0, 0) if pointer is None else (pointer.end, pointer.data_bytes)
        return stored[1] + self._bytes_above(stored[0]) > config.retention_bytes

    def _bytes_above(self, remote_end: int) -> int:
        """Size of the segments on this disk above the remote end, including the active one."""
        log = self._replica_log.log
        closed = closed_segments(log)
        active_bytes = log.size_bytes - sum(segment.size_bytes for segment in closed)
        return active_bytes + sum(
            segment.size_bytes for segment in closed_above(closed, remote_end)
        )

"""Uploads of ranges of whole batches from the leader's closed segments as data objects."""

from __future__ import annotations

import asyncio

from rayq import messages
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.remote.retention import ClosedSegment, Piece, closed_above, upload_limit
from rayq.errors import CorruptBatchError, RemoteStorageError, StorageError
from rayq.messages.remote_names import ObjectKind, new_name
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.log import Log
from rayq.storage.plans import VERIFY_BYTES_MAX
from rayq.storage.remote import data_object
from rayq.storage.remote.manifest import RemoteObject
from rayq.storage.upload_plan import UploadRange

OBJECTS_AT_ONCE = 4
"""Maximum number of objects that are stored in parallel, and then committed together."""


def closed_segments(log: Log) -> list[ClosedSegment]:
    """The closed segments on this disk, oldest first."""
    return [
        ClosedSegment(
            segment.base_offset,
            segment.next_offset,
            segment.size_bytes,
            segment.last_append_time_ms or 0,
        )
        for segment in log.local_segments()
        if segment.is_closed and segment.size_bytes
    ]


def waiting(log: Log, pointer: RemotePointer | None) -> list[Piece]:
    """The parts of this disk's closed segments that are not in the object store yet."""
    start = max(0 if pointer is None else pointer.end, log.start_offset)
    return closed_above(closed_segments(log), start) if log.active_base_offset > start else []


class Uploads:
    """See the module. `stored` are objects that no manifest has yet."""

    def __init__(self, replica_log: ReplicaLog, remote_log: RemoteLog) -> None:
        self._replica_log = replica_log
        self._remote_log = remote_log
        self._environment = replica_log.environment
        self.stored: list[RemoteObject] = []
        self._made_ahead: dict[int, RemoteObject] = {}
        """Stored objects after one whose upload failed, by start offset."""

    @property
    def next_offset(self) -> int:
        """Start offset of the next object, or an offset in its first batch."""
        remote_end = self._remote_log.end_offset or 0
        if stored := self.not_listed(remote_end):
            return stored[-1].end
        return max(remote_end, self._replica_log.log.persisted_log_start)

    def not_listed(self, remote_end: int) -> list[RemoteObject]:
        """The objects of `stored` that follow the committed list, which ends at `remote_end`. A
        commit that was abandoned, because this process seemed to no longer lead, may have succeeded
        since."""
        later = [remote for remote in self.stored if remote.end > remote_end]
        return later if later and later[0].start >= remote_end else []

    def forget_stored(self) -> None:
        """Forgets the objects of `stored`: a manifest has them, or another leader's list counts."""
        self.stored = []

    @property
    def has_work(self) -> bool:
        if self._replica_log.log.active_base_offset <= self.next_offset:
            return bool(self.stored)  # No closed segment goes further.
        return bool(self.stored) or self.limit() is not None or self.waits_for_a_checkpoint

    def limit(self) -> int | None:
        """Offset up to which uploads may go now. None: there is nothing to store."""
        log = self._replica_log.log
        stable_offset = min(self._replica_log.last_stable_offset, log.persisted_recovery_point)
        limit = upload_limit(closed_segments(log), stable_offset)
        return limit if limit is not None and limit > self.next_offset else None

    @property
    def waits_for_a_checkpoint(self) -> bool:
        """Returns whether only the recovery point keeps closed segments from being stored. It
        advances by itself only after flush_checkpoint_bytes: without more writes never."""
        log = self._replica_log.log
        limit = upload_limit(closed_segments(log), self._replica_log.last_stable_offset)
        return limit is not None and limit > max(self.next_offset, log.persisted_recovery_point)

    async def store(self) -> None:
        """Stores the next objects; those that are stored without a gap are then in `stored`, also
        after an error. Raises RemoteStorageError; StorageError, which may have ended the replica.
        """
        limit = self.limit()
        if limit is None:
            return
        if self._replica_log.log.cleaned_offset > 0:
            raise RemoteStorageError(
                f"{self._replica_log.where} was compacted once, so offsets are missing in it: it "
                "cannot be stored. Copy the records to a new topic, or set remote_storage=False."
            )
        ranges = await self._plan(limit)
        if not ranges:
            return
        self.stored = self.not_listed(self._remote_log.end_offset or 0)
        outcomes = await asyncio.gather(
            *(self._made_or_make(upload) for upload in ranges), return_exceptions=True
        )
        made = {remote.start: remote for remote in outcomes if isinstance(remote, RemoteObject)}
        for wanted in ranges:
            if wanted.start not in made:
                break
            self.stored.append(made.pop(wanted.start))
        self._made_ahead = made
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _made_or_make(self, upload: UploadRange) -> RemoteObject:
        ahead = self._made_ahead.get(upload.start)
        return ahead if ahead is not None and ahead.end == upload.end else await self.make(upload)

    async def _plan(self, limit: int) -> list[UploadRange]:
        log, threads = self._replica_log.log, self._environment.threads
        generation, next_offset = log.generation, self.next_offset
        ranges: list[UploadRange] = []
        while len(ranges) < OBJECTS_AT_ONCE and next_offset < limit:
            plan = log.plan_upload(next_offset, limit, data_object.OBJECT_DATA_BYTES_MAX)
            if plan is None:
                break
            try:
                upload = await threads.run(plan.run)
            except (CorruptBatchError, StorageError) as error:
                raise self._replica_log.unreadable(log, generation, next_offset, error) from error
            if upload is None:
                break
            ranges.append(upload)
            next_offset = upload.end
        return ranges

    async def make(self, upload: UploadRange) -> RemoteObject:
        """Makes an object of these records. Raises as `store`."""
        remote_log, log = self._remote_log, self._replica_log.log
        remote_log.check()
        name = new_name(
            self._environment.random,
            remote_log.prefix,
            ObjectKind.DATA,
            upload.start,
            remote_log.leader_epoch,
        )
        request = messages.StoreRecords(
            name,
            upload.start,
            upload.end,
            [messages.LocalRange(*local_range) for local_range in upload.ranges],
            log.aborted_between(upload.start, upload.end),
        )
        try:
            async with remote_log.objects.uploads:
                answer, _ = await remote_log.objects.ask(request)
        except (CorruptBatchError, StorageError) as error:
            await self._verify(upload)
            raise RemoteStorageError(
                f"The object server cannot store the offsets {upload.start} to {upload.end} of "
                f"{self._replica_log.where}: {error}"
            ) from error
        return RemoteObject(
            start=upload.start,
            end=upload.end,
            name=name,
            object_bytes=answer.object_bytes,
            data_bytes=answer.data_bytes,
            crc32c=answer.crc32c,
            first_append_ms=answer.first_append_ms,
            last_append_ms=answer.last_append_ms,
            newest_timestamp_ms=answer.newest_timestamp_ms,
            end_epoch=answer.end_epoch,
        )

    async def _verify(self, upload: UploadRange) -> None:
        """Reads the range that the object server found damaged. Raises StorageError if it is, which
        ends the replica if others can lead."""
        log, offset = self._replica_log.log, max(upload.start, self._replica_log.log.start_offset)
        ends = [segment.end for segment in closed_segments(log)]
        while offset < upload.end:
            await self._replica_log.verify(offset)
            limit = min([end for end in ends if end > offset], default=upload.end)
            plan = self._replica_log.log.plan_upload(offset, limit, VERIFY_BYTES_MAX)
            checked = None if plan is None else await self._environment.threads.run(plan.run)
            offset = limit if checked is None else checked.end

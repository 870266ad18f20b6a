"""Verification of the objects in the store against the committed list, and repair of
differences."""

from __future__ import annotations

import asyncio
from functools import partial

import google_crc32c

from rayq import messages
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.remote.uploads import Uploads
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import MIB
from rayq.environment import Disk
from rayq.errors import (
    CorruptBatchError,
    RemoteDamagedError,
    RemoteMissingError,
    RemoteSlowError,
    StorageError,
)
from rayq.storage.batch import HEADER_BYTES, check_body, read_header
from rayq.storage.remote.data_object import read_footer
from rayq.storage.remote.manifest import Manifest, RemoteObject
from rayq.storage.upload_plan import UploadRange

PAGE_S = 5.0
"""Time limit of a page: it ends with the object after which this time has passed."""
CHUNK_BYTES = 4 * MIB
WAIT_S = 30.0
RETRY_S = 0.5
ATTEMPTS_MAX = 3


class Verification:
    """See the module."""

    def __init__(self, replica_log: ReplicaLog, remote_log: RemoteLog, uploads: Uploads) -> None:
        self._replica_log = replica_log
        self._remote_log = remote_log
        self._uploads = uploads
        self._environment = replica_log.environment

    async def verify(self, request: messages.VerifyRemote) -> messages.VerifyRemoteResponse:
        """See `messages.VerifyRemote`. Raises the errors of `RemoteLog.manifest`, and StorageError
        if local records that would repair an object are damaged, too."""
        manifest = await self._remote_log.manifest() or self._remote_log.empty_manifest()
        first = max(0, manifest.objects.number_of(request.start) - 1)
        page = manifest.objects[first : first + request.objects_max]
        if not page:
            return messages.VerifyRemoteResponse(0, None, [], [])
        until_s = self._environment.clock.monotonic() + PAGE_S
        answer, _ = await self._remote_log.objects.ask(
            messages.HeadObjects([remote.name for remote in page])
        )
        checked = 0
        problems: list[tuple[str, int, int, str]] = []
        repaired: list[str] = []
        for listed, stored in zip(page, answer.objects, strict=True):
            if checked and self._environment.clock.monotonic() >= until_s:
                break
            checked += 1
            wrong = await self._problem(listed, stored, deep=request.deep)
            if wrong is None or not await self._is_listed(listed):
                continue
            problems.append((listed.name, listed.start, listed.end, wrong))
            if request.repair and await self._repair(listed):
                repaired.append(listed.name)
        number = first + checked
        is_last = number >= len(manifest.objects)
        next_offset = None if is_last else manifest.objects[number].start
        return messages.VerifyRemoteResponse(checked, next_offset, problems, repaired)

    async def _problem(
        self, remote: RemoteObject, stored: tuple[int, int] | None, *, deep: bool
    ) -> str | None:
        if stored is None:
            return "It is missing."
        if stored[0] != remote.object_bytes:
            return f"It has {stored[0]} bytes, not {remote.object_bytes}."
        if not deep:
            return None
        try:
            await self._read_whole(remote)
        except (CorruptBatchError, RemoteDamagedError, RemoteMissingError) as error:
            return str(error)
        return None

    async def _is_listed(self, remote: RemoteObject) -> bool:
        """Returns whether the object is on the list now: retention may have removed it
        meanwhile."""
        manifest = await self._remote_log.manifest()
        return manifest is not None and manifest.find(remote.start) == remote

    # --- reading ----------------------------------------------------------------------------

    async def _read_whole(self, remote: RemoteObject) -> None:
        """Reads an object from the store, not from the cache. Raises CorruptBatchError,
        RemoteDamagedError."""
        await self._remote_log.objects.ask(messages.DropCached(remote.name))
        check = ObjectCheck(remote)
        for position in range(0, remote.object_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, remote.object_bytes - position)
            data = await self._read(remote, position, length)
            await self._environment.threads.run(check.add, data)
        check.finish()

    async def _read(self, remote: RemoteObject, position: int, length: int) -> bytes:
        request = messages.ReadObject(
            name=remote.name,
            object_bytes=remote.object_bytes,
            data_bytes=remote.data_bytes,
            position=position,
            length=length,
            read_ahead_bytes=0,
            wait_ms=int(WAIT_S * 1000),
        )
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                cached, _ = await self._remote_log.objects.ask(request)
                return await self._environment.threads.run(
                    partial(_read_place, self._environment.disk, cached)
                )
            except RemoteSlowError:
                if attempt == ATTEMPTS_MAX:
                    raise
            except OSError as error:  # The cache has dropped it meanwhile.
                if attempt == ATTEMPTS_MAX:
                    raise StorageError(f"The cache lost {remote.name}: {error}.") from error
            await asyncio.sleep(RETRY_S)
        raise AssertionError("the last attempt returns or raises")

    # --- repairing --------------------------------------------------------------------------

    async def _repair(self, remote: RemoteObject) -> bool:
        """Makes the object again if this disk has all of its records in closed segments, and has it
        listed in place of the other."""
        local = await self._local(remote)
        if local is None:
            return False
        made = await self._uploads.make(local)
        removed_ms = self._environment.clock.wall_ms()

        def change(manifest: Manifest) -> Manifest:
            is_listed = manifest.find(remote.start) == remote
            return manifest.replaced(made, removed_ms) if is_listed else manifest

        manifest = await self._remote_log.change(change)
        return manifest.find(remote.start) == made

    async def _local(self, remote: RemoteObject) -> UploadRange | None:
        log = self._replica_log.log
        if not log.local_start_offset <= remote.start or remote.end > log.persisted_recovery_point:
            return None
        ranges: list[tuple[str, int, int]] = []
        next_offset = remote.start
        while next_offset < remote.end:
            plan = log.plan_upload(next_offset, remote.end, remote.data_bytes)
            upload = None if plan is None else await self._environment.threads.run(plan.run)
            if upload is None or upload.start != next_offset:
                return None
            ranges += upload.ranges
            next_offset = upload.end
        local = UploadRange(remote.start, next_offset, ranges)
        return local if local.size_bytes == remote.data_bytes else None


class ObjectCheck:
    """Checks the bytes of an object, which come in pieces: CRCs, offsets, epochs."""

    def __init__(self, remote: RemoteObject) -> None:
        self._one = remote
        self._crc = 0
        self._size_bytes = 0
        self._rest = b""
        """The incomplete beginning of a batch, or of the footer."""
        self._next_offset = remote.start
        self._epoch = 0

    def add(self, data: bytes) -> None:
        """Checks the next bytes. Raises CorruptBatchError."""
        self._crc = google_crc32c.extend(self._crc, data)
        self._rest += data
        self._size_bytes += len(data)
        begin = self._size_bytes - len(self._rest)
        position = 0
        while begin + position < self._one.data_bytes:
            if len(self._rest) - position < HEADER_BYTES:
                break
            header = read_header(self._rest, position)
            if position + header.length > len(self._rest):
                break
            check_body(self._rest, position, header)
            if header.base_offset != self._next_offset or header.leader_epoch < self._epoch:
                raise CorruptBatchError(
                    f"The batch at {begin + position} has offset {header.base_offset} and epoch "
                    f"{header.leader_epoch} after {self._next_offset - 1} and {self._epoch}."
                )
            self._next_offset, self._epoch = header.next_offset, header.leader_epoch
            position += header.length
        self._rest = self._rest[position:]

    def finish(self) -> None:
        """Finishes the check after all bytes were added. Raises CorruptBatchError,
        RemoteDamagedError."""
        remote = self._one
        if (self._next_offset, self._epoch) != (remote.end, remote.end_epoch):
            raise CorruptBatchError(
                f"It ends at offset {self._next_offset} in epoch {self._epoch}, not at "
                f"{remote.end} in {remote.end_epoch}."
            )
        footer = read_footer(self._rest, remote.name)
        if (footer.start, footer.end) != (remote.start, remote.end):
            raise RemoteDamagedError(
                f"Its footer is about offsets {footer.start} to {footer.end}, not "
                f"{remote.start} to {remote.end}."
            )
        if self._crc != remote.crc32c:
            raise RemoteDamagedError("It does not match the CRC of the list.")


def _read_place(disk: Disk, cached: messages.ReadObjectResponse) -> bytes:
    """Reads the cached bytes. Raises OSError."""
    file = disk.open(cached.path, writable=False)
    try:
        data = file.pread(cached.length, cached.position)
    finally:
        file.close()
    if len(data) != cached.length:
        raise OSError(f"{cached.path} is shorter than it was")
    return data

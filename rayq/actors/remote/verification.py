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
"""A page ends with the object after which this time is over."""
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
        """See `messages.VerifyRemote`. Raises what `RemoteLog.manifest` raises, and StorageError
        where local records that shall repair an object are damaged, too."""
        manifest = await self._remote_log.manifest() or self._remote_log.empty_manifest()
        first = max(0, manifest.objects.number_of(request.start) - 1)
        page = manifest.objects[first : first + request.objects_max]
        if not page:
            return messages.VerifyRemoteResponse(0, None, [], [])
        until_s = self._environment.clock.monotonic() + PAGE_S
        answer, _ = await self._remote_log.objects.ask(
            messages.HeadObjects([one.name for one in page])
        )
        checked = 0
        problems: list[tuple[str, int, int, str]] = []
        repaired: list[str] = []
        for one, found in zip(page, answer.objects, strict=True):
            if checked and self._environment.clock.monotonic() >= until_s:
                break
            checked += 1
            wrong = await self._problem(one, found, deep=request.deep)
            if wrong is None or not await self._is_listed(one):
                continue
            problems.append((one.name, one.start, one.end, wrong))
            if request.repair and await self._repair(one):
                repaired.append(one.name)
        number = first + checked
        is_last = number >= len(manifest.objects)
        next_offset = None if is_last else manifest.objects[number].start
        return messages.VerifyRemoteResponse(checked, next_offset, problems, repaired)

    async def _problem(
        self, one: RemoteObject, found: tuple[int, int] | None, *, deep: bool
    ) -> str | None:
        if found is None:
            return "It is missing."
        if found[0] != one.object_bytes:
            return f"It has {found[0]} bytes, not {one.object_bytes}."
        if not deep:
            return None
        try:
            await self._read_whole(one)
        except (CorruptBatchError, RemoteDamagedError, RemoteMissingError) as error:
            return str(error)
        return None

    async def _is_listed(self, one: RemoteObject) -> bool:
        """Whether the object is on the list now: retention may have taken it meanwhile."""
        manifest = await self._remote_log.manifest()
        return manifest is not None and manifest.find(one.start) == one

    # --- reading ----------------------------------------------------------------------------

    async def _read_whole(self, one: RemoteObject) -> None:
        """Reads an object from the store, not from the cache. Raises CorruptBatchError,
        RemoteDamagedError."""
        await self._remote_log.objects.ask(messages.DropCached(one.name))
        check = ObjectCheck(one)
        for position in range(0, one.object_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, one.object_bytes - position)
            data = await self._read(one, position, length)
            await self._environment.threads.run(check.add, data)
        check.finish()

    async def _read(self, one: RemoteObject, position: int, length: int) -> bytes:
        request = messages.ReadObject(
            name=one.name,
            object_bytes=one.object_bytes,
            data_bytes=one.data_bytes,
            position=position,
            length=length,
            read_ahead_bytes=0,
            wait_ms=int(WAIT_S * 1000),
        )
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                place, _ = await self._remote_log.objects.ask(request)
                return await self._environment.threads.run(
                    partial(_read_place, self._environment.disk, place)
                )
            except RemoteSlowError:
                if attempt == ATTEMPTS_MAX:
                    raise
            except OSError as error:  # It left the cache meanwhile.
                if attempt == ATTEMPTS_MAX:
                    raise StorageError(f"The cache lost {one.name}: {error}.") from error
            await asyncio.sleep(RETRY_S)
        raise AssertionError("the last attempt returns or raises")

    # --- repairing --------------------------------------------------------------------------

    async def _repair(self, one: RemoteObject) -> bool:
        """Makes the object anew where this disk has all of its records in closed segments, and has
        it listed in the other's place."""
        local = await self._local(one)
        if local is None:
            return False
        made = await self._uploads.make(local)
        removed_ms = self._environment.clock.wall_ms()

        def change(manifest: Manifest) -> Manifest:
            is_listed = manifest.find(one.start) == one
            return manifest.replaced(made, removed_ms) if is_listed else manifest

        manifest = await self._remote_log.change(change)
        return manifest.find(one.start) == made

    async def _local(self, one: RemoteObject) -> UploadRange | None:
        log = self._replica_log.log
        if not log.local_start_offset <= one.start or one.end > log.persisted_recovery_point:
            return None
        ranges: list[tuple[str, int, int]] = []
        next_offset = one.start
        while next_offset < one.end:
            plan = log.plan_upload(next_offset, one.end, one.data_bytes)
            found = None if plan is None else await self._environment.threads.run(plan.run)
            if found is None or found.start != next_offset:
                return None
            ranges += found.ranges
            next_offset = found.end
        local = UploadRange(one.start, next_offset, ranges)
        return local if local.size_bytes == one.data_bytes else None


class ObjectCheck:
    """Checks the bytes of an object, which come in pieces: CRCs, offsets, epochs."""

    def __init__(self, one: RemoteObject) -> None:
        self._one = one
        self._crc = 0
        self._size_bytes = 0
        self._rest = b""
        """The beginning of a batch, or of the footer."""
        self._next_offset = one.start
        self._epoch = 0

    def add(self, data: bytes) -> None:
        """Raises CorruptBatchError."""
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
        """All bytes were added. Raises CorruptBatchError, RemoteDamagedError."""
        one = self._one
        if (self._next_offset, self._epoch) != (one.end, one.end_epoch):
            raise CorruptBatchError(
                f"It ends at offset {self._next_offset} in epoch {self._epoch}, not at {one.end} "
                f"in {one.end_epoch}."
            )
        footer = read_footer(self._rest, one.name)
        if (footer.start, footer.end) != (one.start, one.end):
            raise RemoteDamagedError(
                f"Its footer is about offsets {footer.start} to {footer.end}, not {one.start} to "
                f"{one.end}."
            )
        if self._crc != one.crc32c:
            raise RemoteDamagedError("It does not match the CRC of the list.")


def _read_place(disk: Disk, place: messages.ReadObjectResponse) -> bytes:
    """Raises OSError."""
    file = disk.open(place.path, writable=False)
    try:
        data = file.pread(place.length, place.position)
    finally:
        file.close()
    if len(data) != place.length:
        raise OSError(f"{place.path} is shorter than it was")
    return data

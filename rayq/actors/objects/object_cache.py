"""Cache of object ranges on the node's disk, from which replicas read remote records.

Each object has one sparse file below `remote-cache/<incarnation>/`, with its bytes at their own
positions. It is filled in *parts*: the ranges that the footer has CRCs for, and the footer itself.
Only verified bytes are written. Nothing is synced: the directory is emptied at the next start.

The least recently used objects are removed first. A file whose path was given out a moment ago
stays, so that the caller can open it; once it is open, its bytes stay readable although the file is
removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from contextlib import closing

import google_crc32c

from rayq import messages
from rayq.actors.handlers import answers
from rayq.actors.objects.store_client import StoreClient
from rayq.config import GIB, MIB
from rayq.environment import Disk, Environment
from rayq.errors import (
    InvalidRequestError,
    RayqError,
    RemoteDamagedError,
    RemoteSlowError,
    RemoteStorageError,
)
from rayq.storage import checked_file
from rayq.storage.remote import data_object
from rayq.storage.remote.data_object import Footer, read_footer

logger = logging.getLogger(__name__)

DIRECTORY = "remote-cache"
GET_BYTES_MAX = 8 * MIB
"""Maximum size of one request to the object store; larger reads are several requests in
parallel."""
READ_AHEAD_BYTES_MAX = 32 * MIB
GRACE_S = 2.0
"""Time for which a file stays after its path was given out."""
KEPT_FREE_BYTES = GIB
"""Disk space that the cache leaves to the logs."""
FOOTER = -1
"""The part number of the footer."""

_Loading = asyncio.Task["RayqError | None"]


class _Object:
    """The cached parts of one object."""

    def __init__(self, name: str, object_bytes: int, data_bytes: int, path: str) -> None:
        self.name = name
        self.object_bytes = object_bytes
        self.data_bytes = data_bytes
        self.path = path
        self.footer: Footer | None = None
        self.present: set[int] = set()
        self.loading: dict[int, _Loading] = {}
        self.size_bytes = 0
        self.used_s = 0.0
        self.is_dropped = False

    def parts(self, start: int, end: int) -> list[int]:
        """The numbers of the parts that hold bytes from `start` up to `end`, in their order."""
        part_bytes = data_object.CRC_BYTES
        data_end = min(end, self.data_bytes)
        numbers = list(range(start // part_bytes, -(-data_end // part_bytes)))
        return [*numbers, FOOTER] if end > self.data_bytes else numbers

    def place(self, part: int) -> tuple[int, int]:
        """The start and end of a part in the object."""
        if part == FOOTER:
            return self.data_bytes, self.object_bytes
        start = part * data_object.CRC_BYTES
        return start, min(start + data_object.CRC_BYTES, self.data_bytes)


class ObjectCache:
    """See the module. `start` comes first."""

    def __init__(
        self,
        environment: Environment,
        client: StoreClient,
        *,
        data_path: str,
        incarnation: str,
        bytes_max: int,
    ) -> None:
        self._environment = environment
        self._client = client
        self._above = f"{data_path}/{DIRECTORY}"
        self._directory = f"{self._above}/{incarnation}"
        self._bytes_max = bytes_max
        self._limit_bytes = bytes_max
        self._objects: dict[str, _Object] = {}
        """Objects, least recently used first."""
        self._made = 0
        self._size_bytes = 0
        self._hits = environment.metrics.counter("rayq_remote_cache_hits_total")
        self._misses = environment.metrics.counter("rayq_remote_cache_misses_total")
        environment.metrics.add_source(
            lambda: [environment.metrics.sample("rayq_remote_cache_bytes", self._size_bytes)]
        )

    async def start(self) -> None:
        """Removes the files of earlier processes. Raises OSError."""
        await self._environment.threads.run(
            _empty, self._environment.disk, self._above, self._directory
        )

    @answers(messages.ReadObject)
    async def read(self, request: messages.ReadObject) -> messages.ReadObjectResponse:
        """See `messages.ReadObject`."""
        start, end = request.position, request.position + request.length
        end = min(end, request.object_bytes)
        if request.data_bytes > request.object_bytes or start >= end:
            raise InvalidRequestError(
                f"{request.name} has {request.object_bytes} bytes, {request.data_bytes} of them "
                f"records: no {request.length} bytes at {start}."
            )
        cached = self._object(request)
        wanted = cached.parts(start, end)
        self._load(cached, wanted)
        if cached.present.issuperset(wanted):
            self._hits.value += 1
        else:
            self._misses.value += 1
        ahead_end = end + min(request.read_ahead_bytes, READ_AHEAD_BYTES_MAX)
        if end < cached.data_bytes and request.read_ahead_bytes:
            self._load(cached, cached.parts(end, min(ahead_end, cached.data_bytes)))
        await self._wait(cached, wanted, request.wait_ms / 1000)
        cached.used_s = self._environment.clock.monotonic()
        return messages.ReadObjectResponse(cached.path, start, end - start)

    def drop(self, name: str) -> None:
        """Drops an object, so that the next read loads it again."""
        cached = self._objects.pop(name, None)
        if cached is not None:
            cached.is_dropped = True
            self._size_bytes -= cached.size_bytes
            self._environment.tasks.spawn(self._remove(cached.path), f"remove {cached.path}")

    async def make_room(self) -> None:
        """Adapts the size limit to the free disk space, and evicts objects beyond it."""
        try:
            free_bytes = await self._environment.threads.run(
                self._environment.disk.free_bytes, self._directory
            )
        except OSError as error:
            logger.warning("the disk of the cache of the object store: %s", error)
            return
        spare_bytes = max(0, self._size_bytes + free_bytes - KEPT_FREE_BYTES)
        self._limit_bytes = min(self._bytes_max, spare_bytes)
        self._evict()

    def _evict(self) -> None:
        old_s = self._environment.clock.monotonic() - GRACE_S
        for cached in list(self._objects.values()):
            if self._size_bytes <= self._limit_bytes:
                return
            if not cached.loading and cached.used_s < old_s:
                self.drop(cached.name)

    async def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            await self._environment.threads.run(self._environment.disk.remove, path)

    # --- filling ----------------------------------------------------------------------------------

    def _object(self, request: messages.ReadObject) -> _Object:
        sizes = (request.object_bytes, request.data_bytes)
        cached = self._objects.pop(request.name, None)
        if cached is None or (cached.object_bytes, cached.data_bytes) != sizes:
            if cached is not None:
                self._objects[cached.name] = cached
                self.drop(cached.name)
            self._made += 1
            cached = _Object(request.name, *sizes, f"{self._directory}/{self._made}")
        self._objects[cached.name] = cached  # Behind those used before.
        cached.used_s = self._environment.clock.monotonic()
        return cached

    async def _wait(self, cached: _Object, parts: Sequence[int], wait_s: float) -> None:
        """Returns when the parts are there. Raises RemoteSlowError, or the error of reading
        them."""
        loading = {cached.loading[part]: None for part in parts if part in cached.loading}
        if not loading:
            return
        done, pending = await asyncio.wait(loading, timeout=wait_s)
        for task in loading:
            if task in done and (error := task.result()) is not None:
                raise type(error)(error.message)
        if pending:
            raise RemoteSlowError(
                f"{cached.name} was not read from the object store within {wait_s:.1f} s. The read "
                "continues: ask again."
            )

    def _load(self, cached: _Object, parts: Sequence[int]) -> None:
        """Starts to read the missing parts, and the footer with them."""
        missing = [part for part in parts if part not in cached.present | cached.loading.keys()]
        if not missing:
            return
        footer_loads = cached.footer is None and FOOTER not in cached.loading
        if footer_loads and FOOTER not in missing:
            missing.append(FOOTER)
        footer_run: _Loading | None = cached.loading.get(FOOTER)
        # The run with the footer comes first, since the others wait for it.
        for run in sorted(self._runs(cached, missing), key=lambda run: FOOTER not in run):
            work = self._fetch(cached, run, footer_run)
            task = self._environment.tasks.spawn(work, f"read {cached.name}")
            if FOOTER in run:
                footer_run = task
            cached.loading.update(dict.fromkeys(run, task))

    def _runs(self, cached: _Object, parts: Sequence[int]) -> list[list[int]]:
        """Groups the parts into requests: contiguous in the object, up to `GET_BYTES_MAX`."""
        runs: list[list[int]] = []
        for part in parts:
            start, end = cached.place(part)
            if runs:
                run_start, run_end = cached.place(runs[-1][0])[0], cached.place(runs[-1][-1])[1]
                if run_end == start and end - run_start <= GET_BYTES_MAX:
                    runs[-1].append(part)
                    continue
            runs.append([part])
        return runs

    async def _fetch(
        self, cached: _Object, run: Sequence[int], footer_run: _Loading | None
    ) -> RayqError | None:
        """Reads a run of parts. Returns an error instead of raising it: several may wait for it, or
        nobody."""
        start, end = cached.place(run[0])[0], cached.place(run[-1])[1]

        async def take(data: bytes) -> None:
            await self._take(cached, run, data, footer_run)

        is_read = False
        try:
            await self._client.get_checked(cached.name, take, start, end - start)
            is_read = True
        except RayqError as error:
            return error
        except OSError as error:
            # The logs need the space more.
            self._limit_bytes = 0
            self._evict()
            return RemoteStorageError(
                f"The cache of the object store cannot be written: {error}. It was emptied, and is "
                "tried again."
            )
        finally:
            for part in run:
                cached.loading.pop(part, None)
            is_known = self._objects.get(cached.name) is cached
            if is_known and not (is_read or cached.present or cached.loading):
                # What never can be read would be remembered forever.
                self.drop(cached.name)
        if cached.is_dropped:
            await self._remove(cached.path)
        else:
            cached.present.update(run)
            cached.size_bytes += end - start
            self._size_bytes += end - start
            self._evict()
        return None

    async def _take(
        self, cached: _Object, run: Sequence[int], data: bytes, footer_run: _Loading | None
    ) -> None:
        """Checks the bytes of a run, and writes them to the file. Raises RemoteDamagedError,
        OSError, and the error of reading the footer."""
        start, end = cached.place(run[0])[0], cached.place(run[-1])[1]
        if len(data) != end - start:
            raise RemoteDamagedError(
                f"{cached.name} has {len(data)} bytes at {start} instead of {end - start}."
            )
        if run[-1] == FOOTER:
            footer = read_footer(data[cached.data_bytes - start :], cached.name)
            if footer.data_bytes != cached.data_bytes:
                raise RemoteDamagedError(
                    f"{cached.name} has {footer.data_bytes} bytes of records by its footer, and "
                    f"{cached.data_bytes} by the manifest."
                )
            cached.footer = footer
        elif cached.footer is None:
            assert footer_run is not None
            if (error := await asyncio.shield(footer_run)) is not None:
                raise type(error)(error.message)
        assert cached.footer is not None
        parts = cached.footer.crc_parts(start, end - start) if run[0] != FOOTER else []
        await self._environment.threads.run(
            _write_checked, self._environment.disk, cached.path, cached.name, data, start, parts
        )


def _empty(disk: Disk, above: str, directory: str) -> None:
    for name in disk.list(above):
        disk.remove_tree(f"{above}/{name}")
    disk.make_dirs(directory, syncs=False)


def _write_checked(
    disk: Disk,
    path: str,
    name: str,
    data: bytes,
    start: int,
    parts: Sequence[tuple[int, int, int]],
) -> None:
    """Writes a run of an object to its file. Raises OSError, and RemoteDamagedError if a part does
    not match its CRC."""
    for position, length, crc in parts:
        if google_crc32c.value(data[position - start : position - start + length]) != crc:
            raise RemoteDamagedError(
                f"{name} does not match its CRC from {position} to {position + length}."
            )
    with closing(disk.open(path, create=True)) as file:
        checked_file.write_all(file, data, start)

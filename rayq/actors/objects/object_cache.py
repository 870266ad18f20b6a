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
"""One request to the object store reads so much; larger reads are several, side by side."""
READ_AHEAD_BYTES_MAX = 32 * MIB
GRACE_S = 2.0
"""A file whose place was told stays for so long."""
KEPT_FREE_BYTES = GIB
"""The cache leaves so much of the disk to the logs."""
FOOTER = -1
"""The number of the part that is the footer."""

_Loading = asyncio.Task["RayqError | None"]


class _Object:
    """What the cache has of one object."""

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
        found = list(range(start // part_bytes, -(-data_end // part_bytes)))
        return [*found, FOOTER] if end > self.data_bytes else found

    def place(self, part: int) -> tuple[int, int]:
        """Where a part begins and ends."""
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
        """Those used longest ago come first."""
        self._made = 0
        self._size_bytes = 0
        self._hits = environment.metrics.counter("rayq_remote_cache_hits_total")
        self._misses = environment.metrics.counter("rayq_remote_cache_misses_total")
        environment.metrics.add_source(
            lambda: [environment.metrics.sample("rayq_remote_cache_bytes", self._size_bytes)]
        )

    async def start(self) -> None:
        """Removes what earlier processes have left. Raises OSError."""
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
        one = self._object(request)
        wanted = one.parts(start, end)
        self._load(one, wanted)
        if one.present.issuperset(wanted):
            self._hits.value += 1
        else:
            self._misses.value += 1
        ahead_end = end + min(request.read_ahead_bytes, READ_AHEAD_BYTES_MAX)
        if end < one.data_bytes and request.read_ahead_bytes:
            self._load(one, one.parts(end, min(ahead_end, one.data_bytes)))
        await self._wait(one, wanted, request.wait_ms / 1000)
        one.used_s = self._environment.clock.monotonic()
        return messages.ReadObjectResponse(one.path, start, end - start)

    def drop(self, name: str) -> None:
        """The next read gets the object anew."""
        one = self._objects.pop(name, None)
        if one is not None:
            one.is_dropped = True
            self._size_bytes -= one.size_bytes
            self._environment.tasks.spawn(self._remove(one.path), f"remove {one.path}")

    async def make_room(self) -> None:
        """Takes notice of how much of the disk is free, and drops what is too much."""
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
        for one in list(self._objects.values()):
            if self._size_bytes <= self._limit_bytes:
                return
            if not one.loading and one.used_s < old_s:
                self.drop(one.name)

    async def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            await self._environment.threads.run(self._environment.disk.remove, path)

    # --- filling ----------------------------------------------------------------------------------

    def _object(self, request: messages.ReadObject) -> _Object:
        sizes = (request.object_bytes, request.data_bytes)
        one = self._objects.pop(request.name, None)
        if one is None or (one.object_bytes, one.data_bytes) != sizes:
            if one is not None:
                self._objects[one.name] = one
                self.drop(one.name)
            self._made += 1
            one = _Object(request.name, *sizes, f"{self._directory}/{self._made}")
        self._objects[one.name] = one  # Behind those used before.
        one.used_s = self._environment.clock.monotonic()
        return one

    async def _wait(self, one: _Object, parts: Sequence[int], wait_s: float) -> None:
        """Returns when the parts are there. Raises RemoteSlowError, or why they cannot be read."""
        loading = {one.loading[part]: None for part in parts if part in one.loading}
        if not loading:
            return
        done, pending = await asyncio.wait(loading, timeout=wait_s)
        for task in loading:
            if task in done and (error := task.result()) is not None:
                raise type(error)(error.message)
        if pending:
            raise RemoteSlowError(
                f"{one.name} was not read from the object store within {wait_s:.1f} s. The read "
                "goes on: ask again."
            )

    def _load(self, one: _Object, parts: Sequence[int]) -> None:
        """Begins to read those of the parts that are not there. The footer comes along."""
        missing = [part for part in parts if part not in one.present | one.loading.keys()]
        if not missing:
            return
        footer_loads = one.footer is None and FOOTER not in one.loading
        if footer_loads and FOOTER not in missing:
            missing.append(FOOTER)
        footer_run: _Loading | None = one.loading.get(FOOTER)
        # The run with the footer comes first, since the others wait for it.
        for run in sorted(self._runs(one, missing), key=lambda run: FOOTER not in run):
            work = self._fetch(one, run, footer_run)
            task = self._environment.tasks.spawn(work, f"read {one.name}")
            if FOOTER in run:
                footer_run = task
            one.loading.update(dict.fromkeys(run, task))

    def _runs(self, one: _Object, parts: Sequence[int]) -> list[list[int]]:
        """The parts by requests: side by side in the object, up to `GET_BYTES_MAX`."""
        runs: list[list[int]] = []
        for part in parts:
            start, end = one.place(part)
            if runs:
                run_start, run_end = one.place(runs[-1][0])[0], one.place(runs[-1][-1])[1]
                if run_end == start and end - run_start <= GET_BYTES_MAX:
                    runs[-1].append(part)
                    continue
            runs.append([part])
        return runs

    async def _fetch(
        self, one: _Object, run: Sequence[int], footer_run: _Loading | None
    ) -> RayqError | None:
        """Reads a run of parts. An error is a value: several wait for it, or nobody."""
        start, end = one.place(run[0])[0], one.place(run[-1])[1]

        async def take(data: bytes) -> None:
            await self._take(one, run, data, footer_run)

        try:
            await self._client.get_checked(one.name, take, start, end - start)
        except RayqError as error:
            return error
        except OSError as error:
            # The logs need the room more.
            self._limit_bytes = 0
            self._evict()
            return RemoteStorageError(
                f"The cache of the object store cannot be written: {error}. It was emptied, and is "
                "tried again."
            )
        finally:
            for part in run:
                one.loading.pop(part, None)
        if one.is_dropped:
            await self._remove(one.path)
        else:
            one.present.update(run)
            one.size_bytes += end - start
            self._size_bytes += end - start
            self._evict()
        return None

    async def _take(
        self, one: _Object, run: Sequence[int], data: bytes, footer_run: _Loading | None
    ) -> None:
        """Checks the bytes of a run, and writes them to the file. Raises RemoteDamagedError,
        OSError, and why the footer could not be read."""
        start, end = one.place(run[0])[0], one.place(run[-1])[1]
        if len(data) != end - start:
            raise RemoteDamagedError(
                f"{one.name} has {len(data)} bytes at {start} instead of {end - start}."
            )
        if run[-1] == FOOTER:
            footer = read_footer(data[one.data_bytes - start :], one.name)
            if footer.data_bytes != one.data_bytes:
                raise RemoteDamagedError(
                    f"{one.name} has {footer.data_bytes} bytes of records by its footer, and "
                    f"{one.data_bytes} by the manifest."
                )
            one.footer = footer
        elif one.footer is None:
            assert footer_run is not None
            if (error := await asyncio.shield(footer_run)) is not None:
                raise type(error)(error.message)
        assert one.footer is not None
        parts = one.footer.crc_parts(start, end - start) if run[0] != FOOTER else []
        await self._environment.threads.run(
            _write_checked, self._environment.disk, one.path, one.name, data, start, parts
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
    """Writes a run of an object to its file. Raises OSError, and RemoteDamagedError where a part
    does not match its CRC."""
    for position, length, crc in parts:
        if google_crc32c.value(data[position - start : position - start + length]) != crc:
            raise RemoteDamagedError(
                f"{name} does not match its CRC from {position} to {position + length}."
            )
    with closing(disk.open(path, create=True)) as file:
        checked_file.write_all(file, data, start)

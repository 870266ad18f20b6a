"""Reads of records that are no longer on the leader's disk, from the object store.

The node's object server loads ranges of objects into files of its cache, and threads read them
here. An object's footer says where its batches begin, and which transactions were aborted. The
read-ahead of a sequential reader grows, also into the next object.

No request waits longer than `WAIT_S` for the store: the reader is told to ask again, and the read
continues in the background.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from rayq import messages
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import MIB
from rayq.environment import Disk
from rayq.errors import (
    CorruptBatchError,
    OffsetOutOfRangeError,
    RayqError,
    RemoteDamagedError,
    RemoteMissingError,
    RemoteSlowError,
    RemoteStorageError,
)
from rayq.storage.batch import read_header, split_batches
from rayq.storage.plans import first_not_older
from rayq.storage.remote.data_object import Footer, Span, read_footer
from rayq.storage.remote.manifest import Manifest, RemoteObject

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_S = 5.0
"""Maximum time that a reader's request waits for the object store."""
ANSWER_SLACK_S = 2.0
"""Extra time that it waits for the object server to report that the store is slow."""
READ_AHEAD_BYTES_MIN, READ_AHEAD_BYTES_MAX = MIB, 8 * MIB
READERS_MAX = 64
"""Maximum number of readers of a partition that are tracked, to read ahead of them."""
FOOTERS_MAX = 8
"""Maximum number of decoded footers that are cached for a partition: 64 MiB of records have about
10 KiB."""
ATTEMPTS_MAX = 3
"""Maximum number of attempts to load bytes that were gone from the cache, or damaged there."""


class CachedBatches(NamedTuple):
    """A run of whole batches of one object, in a file of the object server's cache."""

    found: RemoteObject
    span: Span
    file: messages.ReadObjectResponse
    aborted: list[tuple[int, int]]
    """`(family, epoch)` of the aborted transactions that may have batches in it."""


class RemoteReads:
    """See the module. It lives as long as its leader. Every method that waits raises
    RemoteSlowError, RemoteStorageError, RemoteMissingError and RemoteDamagedError."""

    def __init__(self, replica_log: ReplicaLog, remote_log: RemoteLog) -> None:
        self._replica_log = replica_log
        self._remote_log = remote_log
        self._objects = remote_log.objects
        self._environment = environment = replica_log.environment
        self._seconds = environment.metrics.histogram("rayq_remote_read_seconds")
        self._footers: OrderedDict[str, Footer] = OrderedDict()
        self._readers: OrderedDict[int, int] = OrderedDict()
        """Offsets at which readers will probably continue, with the size of the read-ahead for
        each."""
        self._loading: asyncio.Task[Manifest | RayqError] | None = None
        self._next_read: tuple[str, asyncio.Task[None]] | None = None
        """The last object that was read ahead."""

    # --- records --------------------------------------------------------------------------------

    async def bring(self, offset: int, bytes_max: int) -> CachedBatches:
        """Loads the batches from `offset` on into the cache: at least the first, and not much more
        than `bytes_max` bytes."""
        began_s = self._environment.clock.monotonic()
        remote = await self._find(offset)
        footer = await self._footer(remote)
        span = footer.span(offset, remote.end, bytes_max)
        ahead = self._readers.get(offset, 0)
        file = await self._cached(remote, span.position, span.length, ahead)
        self._bring_next(remote, remote.data_bytes - span.position - span.length, ahead)
        self._seconds.observe(self._environment.clock.monotonic() - began_s)
        return CachedBatches(remote, span, file, footer.aborted)

    async def read(
        self, cached: CachedBatches, offset: int, bytes_max: int
    ) -> tuple[bytes, int]:
        """Returns whole batches, the first of which has `offset`, and the offset of the next one.
        Only the first may have more than `bytes_max`."""
        cut = partial(cut_batches, span=cached.span, offset=offset, bytes_max=bytes_max)
        data, next_offset = await self._use(cached.found, cached.file, cut)
        ahead = self._readers.pop(offset, 0)
        self._readers[next_offset] = min(max(2 * ahead, READ_AHEAD_BYTES_MIN), READ_AHEAD_BYTES_MAX)
        if len(self._readers) > READERS_MAX:
            self._readers.popitem(last=False)
        return data, next_offset

    async def drop_cached(self, offset: int) -> None:
        """Drops the cached bytes at `offset`, in which a reader found damage. It may have happened
        in the cache: the next read gets them from the store again."""
        await self._drop(await self._find(offset))

    # --- what is where --------------------------------------------------------------------------

    async def offset_for_time(self, timestamp_ms: int) -> tuple[int, int] | None:
        """The first record that is not older than `timestamp_ms`, as (offset, timestamp). None:
        there is none among the records that are only in the object store."""
        log = self._replica_log.log
        threads = self._environment.threads
        start, end = log.start_offset, log.local_start_offset
        while start < end:
            manifest = await self._manifest()
            remote = await threads.run(manifest.find_time, timestamp_ms, start)
            if remote is None or remote.start >= end:
                return None
            footer = await self._footer(remote)
            starts = [place.offset for place in footer.places]
            for place, behind in zip(footer.places, [*starts[1:], footer.end], strict=True):
                if place.newest_timestamp_ms < timestamp_ms or behind <= start:
                    continue
                span = footer.span(place.offset, behind)
                file = await self._cached(remote, span.position, span.length, 0)
                look = partial(first_not_older, timestamp_ms=timestamp_ms, start_offset=start)
                hit = await self._use(remote, file, look)
                if hit is not None:
                    return hit
            start = remote.end
        return None

    async def append_time_ms(self, offset: int) -> int:
        """Approximate append time of a record: that of the first record of its object."""
        return (await self._find(offset)).first_append_ms

    async def ranges(
        self, start: int, end: int, *, ranges_max: int, bytes_max: float | None = None
    ) -> list[messages.RemoteRange]:
        """The objects that hold the records of [start, end), from the one of `start` on, without
        URLs: at most `ranges_max`, and beside the first no more than `bytes_max` bytes. [] if
        `start` is not in the object store."""
        manifest = None if self._remote_log.pointer is None else await self._manifest()
        if manifest is None or manifest.find(start) is None:
            return []
        first = manifest.objects.number_of(start) - 1
        objects = [
            remote for remote in manifest.objects[first : first + ranges_max] if remote.start < end
        ]
        if bytes_max is not None:
            sizes = itertools.accumulate(remote.object_bytes for remote in objects)
            objects = objects[: max(sum(size <= bytes_max for size in sizes), 1)]
        return [
            messages.RemoteRange(
                remote.name, remote.start, remote.end, remote.data_bytes, remote.object_bytes, None
            )
            for remote in objects
        ]

    async def signed(
        self, ranges: Sequence[messages.RemoteRange], valid_ms: int
    ) -> list[messages.RemoteRange]:
        """The same objects with URLs that are valid for `valid_ms` from now on."""
        answer, _ = await self._objects.ask(
            messages.SignObjects([found.name for found in ranges], valid_ms), timeout_s=WAIT_S
        )
        return [
            msgspec.structs.replace(found, url=url)
            for found, url in zip(ranges, answer.urls, strict=True)
        ]

    # --- manifest and footers -------------------------------------------------------------------

    async def _find(self, offset: int) -> RemoteObject:
        manifest = await self._manifest()
        remote = manifest.find(offset)
        if remote is not None:
            return remote
        log, where = self._replica_log.log, self._replica_log.where
        if offset < log.start_offset:
            raise OffsetOutOfRangeError(
                f"Offset {offset} of {where} is below the log start {log.start_offset}: retention "
                "or delete_records removed it."
            )
        raise RemoteMissingError(
            f"Offset {offset} of {where} is below {log.local_start_offset}, where the leader's "
            f"disk begins, and the manifest lists objects from {manifest.start} to {manifest.end} "
            "only. `rayq storage verify-remote` tells more."
        )

    async def _manifest(self) -> Manifest:
        loading = self._loading
        if loading is None or loading.done():
            loading = self._loading = self._environment.tasks.spawn(
                self._load(), f"manifest of {self._replica_log.where}"
            )
        # Another reader may begin the next load before this one continues: only `loading` is its
        # own.
        await asyncio.wait([loading], timeout=WAIT_S)
        if not loading.done():
            raise RemoteSlowError(
                f"The object store has not sent the manifest of {self._replica_log.where} within "
                f"{WAIT_S:g} s: ask again, it is on its way."
            )
        loaded = loading.result()
        if isinstance(loaded, RayqError):
            raise loaded.with_message(loaded.message)  # Each waiter has a traceback of its own.
        return loaded

    async def _load(self) -> Manifest | RayqError:
        try:
            return await self._remote_log.manifest() or self._remote_log.empty_manifest()
        except RayqError as error:
            return error

    async def _footer(self, remote: RemoteObject) -> Footer:
        if remote.name in self._footers:
            self._footers.move_to_end(remote.name)
            return self._footers[remote.name]
        length = remote.object_bytes - remote.data_bytes
        file = await self._cached(remote, remote.data_bytes, length, 0)
        footer = await self._use(remote, file, partial(read_footer, name=remote.name))
        self._footers[remote.name] = footer
        if len(self._footers) > FOOTERS_MAX:
            self._footers.popitem(last=False)
        return footer

    # --- bytes ----------------------------------------------------------------------------------

    async def _cached(
        self, remote: RemoteObject, position: int, length: int, ahead: int
    ) -> messages.ReadObjectResponse:
        """Loads these bytes of an object into the cache, and returns their range there."""
        file, _ = await self._objects.ask(
            messages.ReadObject(
                name=remote.name,
                object_bytes=remote.object_bytes,
                data_bytes=remote.data_bytes,
                position=position,
                length=length,
                read_ahead_bytes=ahead,
                wait_ms=int(WAIT_S * 1000),
            ),
            timeout_s=WAIT_S + ANSWER_SLACK_S,
        )
        if file.length < length:
            raise RemoteDamagedError(
                f"{remote.name} ends at {position + file.length}: it was longer when it was stored."
            )
        return file

    async def _use(
        self,
        remote: RemoteObject,
        file: messages.ReadObjectResponse,
        use: Callable[[bytes], T],
    ) -> T:
        """Returns the result of `use` on the cached bytes, in a thread. If it raises
        CorruptBatchError or RemoteDamagedError, or the bytes cannot be read, they are loaded
        again."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                return await self._environment.threads.run(
                    _use_bytes, self._environment.disk, file, use
                )
            except (CorruptBatchError, RemoteDamagedError, OSError) as error:
                await self._drop(remote)
                if attempt == ATTEMPTS_MAX:
                    kind = RemoteStorageError if isinstance(error, OSError) else RemoteDamagedError
                    raise kind(f"{remote.name} at {file.position}: {error}") from error
                file = await self._cached(remote, file.position, file.length, 0)
        raise AssertionError("the last attempt returns or raises")

    async def _drop(self, remote: RemoteObject) -> None:
        self._footers.pop(remote.name, None)
        await self._objects.ask(messages.DropCached(remote.name), timeout_s=WAIT_S)

    def _bring_next(self, remote: RemoteObject, left_bytes: int, ahead: int) -> None:
        """Loads the beginning of the next object into the cache when a sequential reader comes to
        the end of this one."""
        is_read = self._next_read is not None and self._next_read[0] == remote.name
        is_last = remote.end >= self._replica_log.log.local_start_offset
        if is_read or is_last or left_bytes >= ahead:
            return
        task = self._environment.tasks.spawn(
            self._read_start(remote.end, ahead - left_bytes),
            f"read ahead of {self._replica_log.where}",
        )
        self._next_read = remote.name, task

    async def _read_start(self, offset: int, length: int) -> None:
        try:
            remote = await self._find(offset)
            await self._footer(remote)
            await self._cached(remote, 0, min(length, remote.data_bytes), 0)
        except RayqError as error:  # A reader that needs it gets the error.
            logger.debug("reading ahead in %s: %s", self._replica_log.where, error)


# --- in threads -----------------------------------------------------------------------------------


def _use_bytes(
    disk: Disk, cached: messages.ReadObjectResponse, use: Callable[[bytes], T]
) -> T:
    """Applies `use` to the cached bytes. Raises OSError, also if the cache dropped the file between
    the answer that named it and this read; and the errors of `use`."""
    file = disk.open(cached.path, writable=False)
    try:
        data = file.pread(cached.length, cached.position)
    finally:
        file.close()
    if len(data) < cached.length:
        raise OSError(f"{cached.path} is shorter than it was.")
    return use(data)


def cut_batches(data: bytes, span: Span, offset: int, bytes_max: int) -> tuple[bytes, int]:
    """Returns those of a run of batches from the one with `offset` on, as many as fit into
    `bytes_max` but at least one, and the offset of the next one. Raises CorruptBatchError."""
    first, end, next_offset = 0, 0, span.start
    if (first_offset := read_header(data).base_offset) != span.start:
        raise CorruptBatchError(f"offset {first_offset} is where {span.start} has to be.")
    if span.start == offset and len(data) <= bytes_max:
        return data, span.end
    for position, header in split_batches(data):
        if header.next_offset <= offset:
            first = end = position + header.length
            continue
        if end > first and position + header.length - first > bytes_max:
            break
        if len(data) - first <= bytes_max:
            return data[first:], span.end
        end, next_offset = position + header.length, header.next_offset
    return data[first:end], next_offset

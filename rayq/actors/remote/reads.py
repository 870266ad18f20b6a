"""Reads of records that are no longer on the leader's disk, from the object store.

The node's object server loads ranges of objects into files of its cache, and threads read them
here. An object's footer says where its batches begin, and which transactions were aborted. The
read-ahead of a sequential reader grows, also into the next object.

No request waits longer than `WAIT_S` for the store: the reader is told to ask again, and the read
continues in the background.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

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
"""How long a question of a reader waits for the object store."""
ANSWER_SLACK_S = 2.0
"""How much longer it waits for the object server to say that the store takes long."""
READ_AHEAD_BYTES_MIN, READ_AHEAD_BYTES_MAX = MIB, 8 * MIB
READERS_MAX = 64
"""How many readers of one partition are followed, to read ahead of them."""
FOOTERS_MAX = 8
"""Decoded footers that are kept for one partition: 64 MiB of records have about 10 KiB."""
ATTEMPTS_MAX = 3
"""How often bytes are brought anew that were gone from the cache, or damaged there."""


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
        """Where readers will probably go on, and how much is then read ahead of them."""
        self._loading: asyncio.Task[Manifest | RayqError] | None = None
        self._next_read: tuple[str, asyncio.Task[None]] | None = None
        """The last object that was read from before anybody asked for it."""

    # --- records --------------------------------------------------------------------------------

    async def bring(self, offset: int, bytes_max: int) -> CachedBatches:
        """Has the batches from `offset` on brought into the cache: at least the first, and not many
        more than `bytes_max` bytes of them."""
        began_s = self._environment.clock.monotonic()
        found = await self._find(offset)
        footer = await self._footer(found)
        span = footer.span(offset, found.end, bytes_max)
        ahead = self._readers.get(offset, 0)
        file = await self._cached(found, span.position, span.length, ahead)
        self._bring_next(found, found.data_bytes - span.position - span.length, ahead)
        self._seconds.observe(self._environment.clock.monotonic() - began_s)
        return CachedBatches(found, span, file, footer.aborted)

    async def read(
        self, cached: CachedBatches, offset: int, bytes_max: int
    ) -> tuple[bytes, int]:
        """Whole batches, the first of which has `offset`, and where the next one begins. Only the
        first may have more than `bytes_max`."""
        cut = partial(cut_batches, span=cached.span, offset=offset, bytes_max=bytes_max)
        data, next_offset = await self._use(cached.found, cached.file, cut)
        ahead = self._readers.pop(offset, 0)
        self._readers[next_offset] = min(max(2 * ahead, READ_AHEAD_BYTES_MIN), READ_AHEAD_BYTES_MAX)
        if len(self._readers) > READERS_MAX:
            self._readers.popitem(last=False)
        return data, next_offset

    async def drop_cached(self, offset: int) -> None:
        """A reader found damage in what a read from `offset` gave. It may have come about in the
        cache: the next read gets it anew from the store."""
        await self._drop(await self._find(offset))

    # --- what is where --------------------------------------------------------------------------

    async def offset_for_time(self, timestamp_ms: int) -> tuple[int, int] | None:
        """The first record that is not older than `timestamp_ms`, as (offset, timestamp). None: no
        record is, of those that are only in the object store."""
        log = self._replica_log.log
        threads = self._environment.threads
        start, end = log.start_offset, log.local_start_offset
        while start < end:
            manifest = await self._manifest()
            found = await threads.run(manifest.find_time, timestamp_ms, start)
            if found is None or found.start >= end:
                return None
            footer = await self._footer(found)
            starts = [place.offset for place in footer.places]
            for place, behind in zip(footer.places, [*starts[1:], footer.end], strict=True):
                if place.newest_timestamp_ms < timestamp_ms or behind <= start:
                    continue
                span = footer.span(place.offset, behind)
                file = await self._cached(found, span.position, span.length, 0)
                look = partial(first_not_older, timestamp_ms=timestamp_ms, start_offset=start)
                hit = await self._use(found, file, look)
                if hit is not None:
                    return hit
            start = found.end
        return None

    async def append_time_ms(self, offset: int) -> int:
        """About when the record was appended: when the first of its object was."""
        return (await self._find(offset)).first_append_ms

    async def ranges(
        self, start: int, end: int, *, ranges_max: int, expires_ms: int
    ) -> list[messages.RemoteRange]:
        """The objects that hold the records of [start, end), from the one of `start` on. [] where
        `start` is not in the object store."""
        manifest = None if self._remote_log.pointer is None else await self._manifest()
        if manifest is None or manifest.find(start) is None:
            return []
        first = manifest.objects.number_of(start) - 1
        found = [one for one in manifest.objects[first : first + ranges_max] if one.start < end]
        urls: Sequence[str | None] = [None] * len(found)
        if expires_ms:
            names = [one.name for one in found]
            answer, _ = await self._objects.ask(
                messages.SignObjects(names, expires_ms), timeout_s=WAIT_S
            )
            urls = answer.urls
        return [
            messages.RemoteRange(
                one.name, one.start, one.end, one.data_bytes, one.object_bytes, url
            )
            for one, url in zip(found, urls, strict=True)
        ]

    # --- manifest and footers -------------------------------------------------------------------

    async def _find(self, offset: int) -> RemoteObject:
        manifest = await self._manifest()
        found = manifest.find(offset)
        if found is not None:
            return found
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
        # Another reader may begin the next load before this one goes on: only `loading` is its own.
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

    async def _footer(self, found: RemoteObject) -> Footer:
        if found.name in self._footers:
            self._footers.move_to_end(found.name)
            return self._footers[found.name]
        length = found.object_bytes - found.data_bytes
        file = await self._cached(found, found.data_bytes, length, 0)
        footer = await self._use(found, file, partial(read_footer, name=found.name))
        self._footers[found.name] = footer
        if len(self._footers) > FOOTERS_MAX:
            self._footers.popitem(last=False)
        return footer

    # --- bytes ----------------------------------------------------------------------------------

    async def _cached(
        self, found: RemoteObject, position: int, length: int, ahead: int
    ) -> messages.ReadObjectResponse:
        """Where these bytes of an object are in the cache."""
        file, _ = await self._objects.ask(
            messages.ReadObject(
                name=found.name,
                object_bytes=found.object_bytes,
                data_bytes=found.data_bytes,
                position=position,
                length=length,
                read_ahead_bytes=ahead,
                wait_ms=int(WAIT_S * 1000),
            ),
            timeout_s=WAIT_S + ANSWER_SLACK_S,
        )
        if file.length < length:
            raise RemoteDamagedError(
                f"{found.name} ends at {position + file.length}: it was longer when it was stored."
            )
        return file

    async def _use(
        self,
        found: RemoteObject,
        file: messages.ReadObjectResponse,
        use: Callable[[bytes], T],
    ) -> T:
        """What `use` makes of the cached bytes, in a thread. Where it raises CorruptBatchError or
        RemoteDamagedError, or the bytes cannot be read, they are brought anew."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                return await self._environment.threads.run(
                    _use_bytes, self._environment.disk, file, use
                )
            except (CorruptBatchError, RemoteDamagedError, OSError) as error:
                await self._drop(found)
                if attempt == ATTEMPTS_MAX:
                    kind = RemoteStorageError if isinstance(error, OSError) else RemoteDamagedError
                    raise kind(f"{found.name} at {file.position}: {error}") from error
                file = await self._cached(found, file.position, file.length, 0)
        raise AssertionError("the last attempt returns or raises")

    async def _drop(self, found: RemoteObject) -> None:
        self._footers.pop(found.name, None)
        await self._objects.ask(messages.DropCached(found.name), timeout_s=WAIT_S)

    def _bring_next(self, found: RemoteObject, left_bytes: int, ahead: int) -> None:
        """Has the next object's beginning brought into the cache when a reader who goes on comes to
        the end of this one."""
        is_read = self._next_read is not None and self._next_read[0] == found.name
        is_last = found.end >= self._replica_log.log.local_start_offset
        if is_read or is_last or left_bytes >= ahead:
            return
        task = self._environment.tasks.spawn(
            self._read_start(found.end, ahead - left_bytes),
            f"read ahead of {self._replica_log.where}",
        )
        self._next_read = found.name, task

    async def _read_start(self, offset: int, length: int) -> None:
        try:
            found = await self._find(offset)
            await self._footer(found)
            await self._cached(found, 0, min(length, found.data_bytes), 0)
        except RayqError as error:  # Whoever needs it hears of it.
            logger.debug("reading ahead in %s: %s", self._replica_log.where, error)


# --- in threads -----------------------------------------------------------------------------------


def _use_bytes(
    disk: Disk, place: messages.ReadObjectResponse, use: Callable[[bytes], T]
) -> T:
    """Raises OSError, also where the cache dropped the file between the answer that named it and
    this read; and what `use` raises."""
    file = disk.open(place.path, writable=False)
    try:
        data = file.pread(place.length, place.position)
    finally:
        file.close()
    if len(data) < place.length:
        raise OSError(f"{place.path} is shorter than it was.")
    return use(data)


def cut_batches(data: bytes, span: Span, offset: int, bytes_max: int) -> tuple[bytes, int]:
    """Of a run of batches those from the one with `offset` on, as many as fit into `bytes_max` but
    at least one, and where the next one begins. Raises CorruptBatchError."""
    first, end, next_offset = 0, 0, span.start
    if (found := read_header(data).base_offset) != span.start:
        raise CorruptBatchError(f"offset {found} is where {span.start} has to be.")
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

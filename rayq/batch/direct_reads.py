"""Direct reads of records from the object store's objects, past the brokers.

The leader names the objects that hold a range, with URLs that need no credentials; the rest is
between this process and the store. An object's footer says where its batches begin and which
transactions were aborted. The CRCs of the batches are checked like those of batches from a leader.

Where the leader gives no URLs, it is asked for the records. After any failure, it is asked for the
objects again. After a second failure, and where the objects end, it is asked for the records
instead: it reads the store in its own way, or says in a typed error why nobody can.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from rayq.batch.job_partition import JobPartition
from rayq.client.consuming.subscription import Fetched
from rayq.config import MIB
from rayq.environment import OpenObject
from rayq.errors import CorruptBatchError, RayqError, RemoteDamagedError
from rayq.messages import RemoteRange
from rayq.storage.batch import HEADER_BYTES, BatchHeader, read_header
from rayq.storage.remote.data_object import Footer, read_footer

logger = logging.getLogger(__name__)
T = TypeVar("T")

DIRECT_BYTES_MIN = MIB
"""Minimum size in the store for a direct read; the leader delivers less sooner."""
URLS_EXPIRE_MS = 900_000
URLS_USED_S = 600.0
"""Maximum age of the URLs by which objects are opened."""
OBJECTS_MAX = 16
"""Maximum number of URLs in one request."""
DESCRIBE_TIMEOUT_S = 10.0
FAILURES_MAX = 2
"""Maximum number of failures in a row, without a batch in between."""


class DirectReads:
    """See the module: reads the records of one partition below `end`, starting where `next` is
    first called. All methods run on the loop."""

    def __init__(self, partition: JobPartition, end: int) -> None:
        self._partition = partition._replace(timeout_s=DESCRIBE_TIMEOUT_S)
        self._end = end
        self._environment = partition.client.environment
        self._ranges: deque[RemoteRange] = deque()
        self._asked_s = 0.0
        self._object: _ObjectReader | None = None
        self._job: asyncio.Future[Any] | None = None
        """The current job of a thread on the object."""
        self._failures = 0
        self._is_first = True
        self._is_over = False

    async def next(self, offset: int, bytes_max: int) -> Fetched | None:
        """The batches from the one with `offset` on, about `bytes_max` bytes. None: ask the leader
        for them, from here on."""
        while not self._is_over:
            try:
                fetched = await self._next(offset, bytes_max)
            except RayqError as error:
                self._drop_object()
                self._ranges.clear()
                self._failures += 1
                if self._failures == FAILURES_MAX:
                    logger.warning(
                        "%s is read through its leader from offset %d on, because its objects "
                        "cannot be read here: %s",
                        self._partition,
                        offset,
                        error,
                    )
                    self.stop()
            else:
                self._failures = 0
                return fetched
        return None

    def stop(self) -> None:
        """Stops direct reads: from now on the leader is asked."""
        self._is_over = True
        self._drop_object()

    async def _next(self, offset: int, bytes_max: int) -> Fetched | None:
        if self._object is None or self._object.next_offset != offset:
            self._drop_object()
            found = await self._range_of(offset)
            if found is None:
                self.stop()
                return None
            assert found.url is not None
            self._object = await self._run(
                _ObjectReader, self._environment.open_object, found, offset, self._end
            )
        reader = self._object
        fetched = await self._run(reader.read, bytes_max)
        if reader.is_finished:
            self._drop_object()
        return fetched

    async def _range_of(self, offset: int) -> RemoteRange | None:
        while self._ranges and self._ranges[0].end_offset <= offset:
            self._ranges.popleft()
        clock = self._environment.clock
        if not self._ranges or clock.monotonic() - self._asked_s > URLS_USED_S:
            self._asked_s = clock.monotonic()
            found = await self._partition.objects(
                offset, self._end, objects_max=OBJECTS_MAX, expires_ms=URLS_EXPIRE_MS
            )
            if any(part.url is None for part in found):
                return None  # The cluster gives no URLs to this client (`remote_direct_reads`).
            self._ranges = deque(found)
            if self._is_first and self._stored_bytes(offset) < DIRECT_BYTES_MIN:
                return None
            self._is_first = False
        return self._ranges[0] if self._ranges else None

    def _stored_bytes(self, offset: int) -> float:
        """The approximate number of the bytes to read that lie in the known objects."""
        return sum(
            part.data_bytes
            * (min(part.end_offset, self._end) - max(part.start_offset, offset))
            / (part.end_offset - part.start_offset)
            for part in self._ranges
        )

    # --- threads --------------------------------------------------------------------------------

    async def _run(self, job: Callable[..., T], *arguments: object) -> T:
        """Runs a job in a thread. The object is closed when no thread reads it."""
        running = asyncio.ensure_future(self._environment.threads.run(job, *arguments))
        self._job = running
        return await asyncio.shield(running)

    def _drop_object(self) -> None:
        dropped, self._object = self._object, None
        job, self._job = self._job, None
        if job is None or job.done():
            _close(dropped, job)
        else:
            job.add_done_callback(lambda done: _close(dropped, done))


def _close(reader: _ObjectReader | None, job: asyncio.Future[Any] | None) -> None:
    """Closes a reader, and also one that the job has just opened for nobody."""
    if job is not None and not job.cancelled() and job.exception() is None:
        made = job.result()
        if isinstance(made, _ObjectReader) and made is not reader:
            made.close()
    if reader is not None:
        reader.close()


class _ObjectReader:
    """A reader of one object, from the batch with `offset` on. Runs in threads, one call after
    another. Raises RemoteStorageError, RemoteDeniedError, RemoteMissingError,
    RemoteDamagedError."""

    def __init__(
        self, open_object: OpenObject, found: RemoteRange, offset: int, end: int
    ) -> None:
        assert found.url is not None
        self._name = found.name
        self._footer = _footer(open_object, found)
        span = self._footer.span(offset, min(end, self._footer.end))
        self._left_bytes = span.length
        self._expected = span.start
        """The offset at which the next batch begins."""
        self.next_offset = offset
        """The offset at which the next read begins."""
        self._rest = b""
        """The beginning of a batch whose end has not arrived."""
        self._bytes = open_object(found.url, span.position, span.length)

    @property
    def is_finished(self) -> bool:
        return self._left_bytes == 0 and not self._rest

    def read(self, bytes_max: int) -> Fetched:
        """The next batches: about `bytes_max` bytes, at least one batch."""
        data = self._rest
        wanted = bytes_max
        batches: list[tuple[int, BatchHeader]] = []
        try:
            while not batches:
                missing = max(wanted - len(data), HEADER_BYTES)
                arrived = self._bytes.read(min(missing, self._left_bytes))
                if not arrived:
                    raise RemoteDamagedError(
                        f"{self._name} ends {self._left_bytes} bytes early, or the store broke off."
                    )
                self._left_bytes -= len(arrived)
                data += arrived
                found, end, wanted = self._split(data, bytes_max)
                # The footer's entry may lie before the requested offset.
                batches = [batch for batch in found if batch[1].next_offset > self.next_offset]
                if not batches:
                    data = data[end:]
        except CorruptBatchError as error:
            raise RemoteDamagedError(f"{self._name}: {error}") from error
        self._rest = data[end:]
        self.next_offset = batches[-1][1].next_offset
        return Fetched(
            memoryview(data)[:end],
            batches,
            self.next_offset,
            aborted=frozenset(self._footer.aborted),
        )

    def _split(
        self, data: bytes, bytes_max: int
    ) -> tuple[list[tuple[int, BatchHeader]], int, int]:
        """The whole batches, their end, and the number of bytes needed for one more."""
        batches: list[tuple[int, BatchHeader]] = []
        position = 0
        while len(data) - position >= HEADER_BYTES:
            header = read_header(data, position)
            if header.base_offset != self._expected:
                raise CorruptBatchError(
                    f"offset {header.base_offset} comes where {self._expected} has to be."
                )
            if position + header.length > len(data):
                return batches, position, header.length
            batches.append((position, header))
            position += header.length
            self._expected = header.next_offset
        return batches, position, bytes_max

    def close(self) -> None:
        self._bytes.close()


def _footer(open_object: OpenObject, found: RemoteRange) -> Footer:
    assert found.url is not None
    length = found.object_bytes - found.data_bytes
    tail = open_object(found.url, found.data_bytes, length)
    try:
        data = b""
        while len(data) < length and (arrived := tail.read(length - len(data))):
            data += arrived
    finally:
        tail.close()
    footer = read_footer(data, found.name)
    if (footer.start, footer.end) != (found.start_offset, found.end_offset):
        raise RemoteDamagedError(
            f"{found.name} holds the offsets {footer.start} to {footer.end}, not "
            f"{found.start_offset} to {found.end_offset}."
        )
    return footer

"""The object server's client of the object store, with rate limits, retries and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import google_crc32c

from rayq.backoff import Backoff
from rayq.config import ClusterConfig
from rayq.environment import Buffer, Clock, Environment, ObjectMeta, ObjectStore
from rayq.errors import (
    RayqError,
    RemoteDamagedError,
    RemoteDeniedError,
    RemoteListError,
    RemoteMissingError,
    RemoteSlowError,
    RemoteStorageError,
)
from rayq.storage.remote.listing import check_page

logger = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS_MAX = 3
RETRY_S, RETRY_MAX_S = 0.3, 0.6
RETRIES_BEGIN_S_MAX = 20.0
"""Time after which a request is no longer retried: the caller has a deadline."""
DAMAGED_ATTEMPTS_MAX = 3
READS_AT_ONCE_MAX = 16
UPLOADS_AT_ONCE_MAX = 3
"""Maximum number of concurrent uploads. Each is in memory, with up to 64 MiB."""
UPLOAD_TURN_S_MAX = 15.0
"""Maximum time that an upload waits for its turn; else it is refused, and its leader asks again
later."""
BURST_S = 1.0

COUNTED_ERRORS = (
    RemoteStorageError,
    RemoteDeniedError,
    RemoteListError,
    RemoteMissingError,
    RemoteDamagedError,
)


class Throttle:
    """Limit of the bytes per second, in the order of the callers. None: no limit."""

    def __init__(self, clock: Clock, bytes_per_s: int | None) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def take(self, size_bytes: int, patience_s: float | None = None) -> None:
        """Returns when the bytes may be sent. Raises RemoteSlowError at once if that would take
        longer than `patience_s`."""
        if self._bytes_per_s is None:
            return
        wait_s = self._free_at_s - self._clock.monotonic()
        if patience_s is not None and wait_s > patience_s:
            raise RemoteSlowError(
                f"The limit of {self._bytes_per_s} bytes a second is used up for {wait_s:.0f} s: "
                "it will be retried. Or raise remote_upload_bytes_per_s."
            )
        self.spend(size_bytes)
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def spend(self, size_bytes: int) -> None:
        """Counts bytes that are sent at once, so that later callers wait for them."""
        if self._bytes_per_s is not None:
            now_s = self._clock.monotonic()
            starts_s = max(self._free_at_s, now_s - BURST_S)
            self._free_at_s = starts_s + size_bytes / self._bytes_per_s


class StoreClient:
    """The object store within the limits of the config. Each call is retried if its outcome is
    unknown: names are written once, so that a repeated PUT or DELETE changes nothing. Raises the
    errors of `ObjectStore`. `on_error` is called at each error that is the store's, and not that of
    the requested name."""

    def __init__(
        self,
        environment: Environment,
        config: ClusterConfig,
        store: ObjectStore,
        on_error: Callable[[], None],
    ) -> None:
        self._environment = environment
        self._store = store
        self._url = config.remote_storage_url or "the object store"
        self._on_error = on_error
        self._clock = environment.clock
        self._uploads = Throttle(self._clock, config.remote_upload_bytes_per_s)
        self._downloads = Throttle(self._clock, config.remote_read_bytes_per_s)
        self._upload_turns = asyncio.Semaphore(UPLOADS_AT_ONCE_MAX)
        self._read_turns = asyncio.Semaphore(READS_AT_ONCE_MAX)
        self._uploaded = environment.metrics.counter("rayq_remote_uploaded_bytes_total")
        self._downloaded = environment.metrics.counter("rayq_remote_downloaded_bytes_total")
        for error in COUNTED_ERRORS:  # Counts start at 0, or the first error would be no increase.
            environment.metrics.counter("rayq_remote_errors_total", error=error.__name__)

    @asynccontextmanager
    async def upload_turn(self, size_bytes: int) -> AsyncIterator[None]:
        """Context in which `size_bytes` may be read and sent. Raises RemoteSlowError if the turn
        would come too late."""
        try:
            async with asyncio.timeout(UPLOAD_TURN_S_MAX):
                await self._upload_turns.acquire()
        except TimeoutError:
            raise RemoteSlowError(
                f"{UPLOADS_AT_ONCE_MAX} uploads are under way on this node, none of which was done "
                f"within {UPLOAD_TURN_S_MAX:.0f} s: it will be retried."
            ) from None
        try:
            await self._uploads.take(size_bytes, UPLOAD_TURN_S_MAX)
            yield
        finally:
            self._upload_turns.release()

    async def put_small(self, name: str, data: Buffer) -> None:
        """Does `put` without a turn: the commit of an upload does not wait for other uploads."""
        self._uploads.spend(len(data))
        await self.put(name, data)

    async def put(self, name: str, data: Buffer) -> None:
        """Stores an object; call it within `upload_turn`."""
        await self._repeat("put", lambda: self._store.put(name, data))
        self._uploaded.value += len(data)

    async def get(self, name: str, position: int = 0, length: int | None = None) -> bytes:
        """Reads an object or a range. A whole object, such as a manifest, does not wait for the
        rate limit."""
        async with self._read_turns:
            if length is not None:
                await self._downloads.take(length)
            data = await self._repeat("get", lambda: self._store.get(name, position, length))
        if length is None:
            self._downloads.spend(len(data))
        self._downloaded.value += len(data)
        return data

    async def get_checked(
        self,
        name: str,
        check: Callable[[bytes], Awaitable[None]],
        position: int = 0,
        length: int | None = None,
    ) -> bytes:
        """Does `get`, and `check` verifies the bytes. If it raises RemoteDamagedError they are read
        again: they may have been damaged in transit. The error is final only when the store returns
        the same wrong bytes twice; else RemoteStorageError."""
        seen: set[int] = set()
        for attempt in range(1, DAMAGED_ATTEMPTS_MAX + 1):
            data = await self.get(name, position, length)
            try:
                await check(data)
            except RemoteDamagedError as error:
                logger.warning("%s", error)
                crc = google_crc32c.value(data)
                if crc in seen:
                    self._count(error)
                    raise
                seen.add(crc)
                if attempt == DAMAGED_ATTEMPTS_MAX:
                    raise RemoteStorageError(
                        f"{error} Each of {attempt} times there were other bytes, so they are "
                        "damaged on the way here. It will be retried."
                    ) from error
            else:
                return data
        raise AssertionError("unreachable")

    async def head(self, name: str) -> ObjectMeta | None:
        """Returns the object's metadata. None: there is no such object."""
        async with self._read_turns:
            try:
                return await self._repeat("head", lambda: self._store.head(name))
            except RemoteMissingError:
                return None

    async def list(self, prefix: str, after: str) -> Sequence[ObjectMeta]:
        """Lists a page of objects. Raises RemoteListError for an impossible page."""

        async def checked() -> Sequence[ObjectMeta]:
            page = await self._store.list(prefix, after)
            check_page(page, prefix, after, self._url)
            return page

        return await self._repeat("list", checked)

    async def delete(self, names: Sequence[str]) -> None:
        await self._repeat("delete", lambda: self._store.delete(names))

    async def sign(self, name: str, expires_s: float) -> str:
        return await self._store.sign(name, expires_s)

    def _count(self, error: RayqError) -> None:
        kind = type(error).__name__
        self._environment.metrics.counter("rayq_remote_errors_total", error=kind).value += 1

    async def _repeat(self, operation: str, ask: Callable[[], Awaitable[T]]) -> T:
        metrics = self._environment.metrics
        began_s = self._clock.monotonic()
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            asked_s = self._clock.monotonic()
            try:
                return await ask()
            except (RemoteStorageError, RemoteMissingError) as error:
                if isinstance(error, RemoteMissingError) and operation == "head":
                    raise
                self._count(error)
                if isinstance(error, RemoteMissingError):
                    raise
                self._on_error()
                is_late = self._clock.monotonic() - began_s > RETRIES_BEGIN_S_MAX
                if isinstance(error, RemoteDeniedError) or attempt == ATTEMPTS_MAX or is_late:
                    raise
            finally:
                metrics.histogram("rayq_remote_request_seconds", operation=operation).observe(
                    self._clock.monotonic() - asked_s
                )
            await asyncio.sleep(backoff.next_s())
        raise AssertionError("unreachable")

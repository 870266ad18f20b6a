"""Lock that keeps the flushes of a log apart from operations that must not run beside one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class FlushLock:
    """A lock that is held while a flush runs, which starts without waiting; and, by `async with`,
    while the log is truncated or closed. A flush does not start while such a holder waits.

    `on_free()` is called each time that a holder releases the lock: a flush may now start.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._on_free = on_free
        self._others = asyncio.Lock()
        self._no_flush = asyncio.Event()
        self._no_flush.set()

    def locked(self) -> bool:
        return self._others.locked() or not self._no_flush.is_set()

    def begin_flush(self) -> bool:
        """Takes the lock for a flush, or returns False."""
        if self.locked():
            return False
        self._no_flush.clear()
        return True

    def end_flush(self) -> None:
        self._no_flush.set()
        self._on_free()

    async def __aenter__(self) -> None:
        await self._others.acquire()
        try:
            await self._no_flush.wait()
        except BaseException:
            self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        self._others.release()
        self._on_free()

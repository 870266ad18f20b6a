"""Room for the answers to one client: the requests of a client that reads no answers have to wait.

A handler takes room before it makes a large answer. There is room for a limited number of bytes at
a time, and only as long as the client takes its answers. A handler that waits for room holds a
request, but no answer yet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

ANSWER_BYTES_MAX = 16 * 1024**2
"""The answers that are made for one client at a time have at most this many bytes together, or it
is one larger answer."""


class AnswerRoom:
    """See the module. `is_taking()` says whether the client takes its answers. Call `grant` when
    it does so again."""

    def __init__(self, is_taking: Callable[[], bool]) -> None:
        self._is_taking = is_taking
        self._taken_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Waits, first come first served, for room for `size` bytes, and holds it. Do not wait for
        other answers while you hold room."""
        if self._waiting or not self._fits(size):
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, granted))
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._give_back(size)
                raise
        else:
            self._taken_bytes += size
        try:
            yield
        finally:
            # Two turns later the answer has been written, and `is_taking` knows its effect.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._give_back, size)

    def grant(self) -> None:
        """Gives room to the handlers that wait for it, as far as there is room."""
        waiting = self._waiting
        while waiting and (waiting[0][1].done() or self._fits(waiting[0][0])):
            size, granted = waiting.popleft()
            if not granted.done():
                self._taken_bytes += size
                granted.set_result(None)

    def _fits(self, size: int) -> bool:
        if not self._is_taking():
            return False
        return self._taken_bytes == 0 or self._taken_bytes + size <= ANSWER_BYTES_MAX

    def _give_back(self, size: int) -> None:
        self._taken_bytes -= size
        self.grant()

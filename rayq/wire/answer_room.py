"""Room for the answers to one client: whoever asks for much and reads nothing is made to wait.

A handler that is about to make a large answer takes room for it first. There is some as long as
the peer takes what was written to it, for so many bytes at a time; whoever waits holds a request,
and no answer yet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

ANSWER_BYTES_MAX = 16 * 1024**2
"""Answers of so many bytes are made at a time for one client, or one that is larger."""


class AnswerRoom:
    """See the module. `is_taking()` says whether the peer takes what is written to it; call `grant`
    when it does so again."""

    def __init__(self, is_taking: Callable[[], bool]) -> None:
        self._is_taking = is_taking
        self._taken_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Waits, first come first served, for room for `size` bytes, and holds it. Not to be held
        while waiting for something to be answered."""
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
            # Two turns later: the answer is written first, and then the peer may take no more.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._give_back, size)

    def grant(self) -> None:
        """Lets those in whom there is room for."""
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

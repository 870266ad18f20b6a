"""Numbers that nobody had before: the controller grants blocks, and a broker hands them out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class GrantedNumbers:
    """See the module. A block ends with this process: the rest of it is never handed out."""

    def __init__(self, ask_for_block: Callable[[], Awaitable[range]]) -> None:
        self._ask_for_block = ask_for_block
        self._block = range(0)
        self._lock = asyncio.Lock()

    async def draw(self) -> int:
        """Returns the next number. Raises what the request for a block raises."""
        async with self._lock:
            if not self._block:
                self._block = await self._ask_for_block()
            number, self._block = self._block[0], self._block[1:]
            return number

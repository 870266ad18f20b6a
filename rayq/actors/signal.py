"""Waiting for something to change, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes every task that waits, each time `notify` is called. Nothing is remembered: check the
    condition, then wait, with no `await` between."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Whether a notification came in time."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        timer = loop.call_later(timeout_s, _cancel, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return False
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return True

    async def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `holds()`, which is checked at each notification. False: it took too long."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while not holds():
            remaining_s = deadline_s - loop.time()
            if remaining_s <= 0 or not await self.wait(remaining_s):
                return holds()
        return True


def _cancel(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.cancel()

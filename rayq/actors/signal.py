"""Signal to wait for a change, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes every task that waits, each time `notify` is called. Nothing is remembered: check the
    condition, then wait, with no `await` between."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], Callable[[], bool] | None] = {}
        """Waiters, each with the condition that must hold before it is woken. Dicts keep their
        order."""

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter, holds in waiters.items():
            if waiter.done():
                continue
            if holds is None or holds():
                waiter.set_result(None)
            else:
                self._waiters[waiter] = holds

    async def wait(self, timeout_s: float, *, holds: Callable[[], bool] | None = None) -> bool:
        """Returns whether a notification came in time; if `holds` is given, one at which it held.
        The notifier calls `holds`, so that none of thousands of tasks that wait for different
        things is woken in vain. So it must be cheap, and raise nothing."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = holds
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
            self._waiters.pop(waiter, None)
        return True

    async def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `holds()` is true, which is checked at each notification. Returns False after
        `timeout_s`."""
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

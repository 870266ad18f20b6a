"""Inbox of the loop: what users decide on their records, in any thread, is carried out there."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from rayq.errors import ClosedError

INTERVAL_S = 0.005
"""Minimum interval at which frequent calls wake the loop: waking it costs more than acknowledging a
record."""

Call = tuple[Callable[..., int], tuple[Any, ...]]


class Inbox:
    """See the module. Made on the loop; `add` and `add_dropped` may be called from any thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        """`work` runs on the loop soon after calls were added, and drains the inbox."""
        self.is_closed = False
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._calls: deque[Call] = deque()
        self._dropped: deque[Call] = deque()
        self._is_announced = False

    def __len__(self) -> int:
        """The number of calls that users made."""
        return len(self._calls)

    def add(self, call: Callable[..., int], *arguments: Any) -> None:
        """Adds a call, which returns the number of records that the user settled by it. Raises
        ClosedError."""
        if self.is_closed:
            raise ClosedError(
                "The queue was closed before this record was settled: it was released and will be "
                "redelivered."
            )
        self._calls.append((call, arguments))
        self._announce()

    def add_dropped(self, call: Callable[..., int], *arguments: Any) -> None:
        """Adds a call for records that were dropped. The collector may run this at any point of any
        thread, so it takes no lock and does not wait."""
        if not self.is_closed:
            self._dropped.append((call, arguments))
            try:
                self._announce()
            except RuntimeError:  # The loop has ended, and with it the locks.
                pass

    def drain(self) -> int:
        """Carries out all calls. Returns the number of settled records. Runs on the loop."""
        count = 0
        for calls in (self._calls, self._dropped):
            while calls:
                call, arguments = calls.popleft()
                count += call(*arguments)
        return count

    def _announce(self) -> None:
        if self._is_announced:
            return
        if threading.get_ident() == self._loop_thread:
            self._is_announced = True
            self._loop.call_soon(self._announced)
        else:
            # No call may stand in between: a signal handler could run there and wait for the loop.
            self._is_announced = True
            try:
                self._loop.call_soon_threadsafe(self._announced)
            except BaseException:  # a Ctrl+C, before it began
                self._is_announced = False
                raise

    def _announced(self) -> None:
        """Has the calls carried out, and checks for more every INTERVAL_S while there are any."""
        if self._calls or self._dropped:
            self._loop.call_later(INTERVAL_S, self._announced)
            self._work()
            return
        self._is_announced = False
        # added just now, by a thread that found `_is_announced` set
        if self._calls or self._dropped:
            self._announce()

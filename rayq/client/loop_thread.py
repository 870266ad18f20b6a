"""Event loop in a daemon thread, which leaves its loop before the interpreter ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from rayq.errors import ClosedError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LoopThread:
    """An event loop (uvloop's if installed) that runs in a daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._is_leaving = False
        """The program ends: requests to the loop are no longer carried out."""
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _all.add(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
                if self._is_leaving:
                    self._has_left.set()
                    # This frame keeps the loop and its tasks: collecting tasks that never ended
                    # would print a complaint for each.
                    threading.Event().wait()
                self.loop.close()  # it was stopped
            except BaseException:  # SystemExit ends a loop, and this one may serve all threads.
                logger.exception(
                    "a callback tried to end the event loop of a thread; the loop continues"
                )

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it. May be called from any other thread.
        Raises ClosedError if the program ends."""
        try:
            self.check_not_leaving()
        except ClosedError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def check_not_leaving(self) -> None:
        """Raises ClosedError if the program ends."""
        if self._is_leaving or sys.is_finalizing():
            raise ClosedError(
                "The program is ending, and with it went the thread that this needs. Close what "
                "you made before, in a `with` block or by what atexit calls first, which is what "
                "was registered last."
            )

    def stop(self) -> None:
        """Closes the loop soon. May be called from any thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self) -> None:
        """Waits until the loop is closed."""
        self._thread.join()

    def leave_for_good(self, timeout_s: float) -> None:
        """Leaves the loop as it is, for the end of the program."""
        if not self._thread.is_alive() or self.is_current:
            return  # it was stopped, or belongs to the parent process of this fork
        self._is_leaving = True
        with contextlib.suppress(RuntimeError):  # It is being stopped, and the loop is closed.
            self.stop()
            self._has_left.wait(timeout_s)


_all: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def leave_all_for_good(timeout_s: float) -> list[asyncio.AbstractEventLoop]:
    """Makes all threads leave their loops, and returns the loops.

    An event that reached uvloop after the interpreter has ended, and before the process has, would
    end the process by SIGSEGV: uvloop would ask for the lock of an interpreter that no longer
    exists. `timeout_s` is for all together; a callback that takes longer is left alone.
    """
    end_s = time.monotonic() + timeout_s
    threads = list(_all)
    for thread in threads:
        thread.leave_for_good(max(end_s - time.monotonic(), 0.0))
    return [thread.loop for thread in threads]


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop if uvloop is installed, else one of asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()

"""Waiting of a thread for the client's event loop."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue


class Wakeup:
    """A wakeup of one waiting thread by the loop.

    Unlike that of a `threading.Event`, `set` never waits: a signal handler or a finalizer may run
    in the middle of `wait` or `clear` and itself wait for the loop, which must then not wait for
    the thread below it.
    """

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Wakes the waiting thread, or else the next call of `wait`. May be called from any
        thread."""
        if self._tokens.empty():
            self._tokens.put(None)

    def clear(self) -> None:
        """Takes back an earlier `set`."""
        while self.wait(0.0):
            pass

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for `set`, and takes it back; returns False after `timeout_s` seconds without
        it."""
        if timeout_s is not None:
            timeout_s = min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        try:
            self._tokens.get(timeout=timeout_s)
        except Empty:
            return False
        return True

"""The event-loop thread behind the synchronous classes: one for each process, made at first use and
anew after a fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rayq.errors import ClosedError, InvalidRequestError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class BackgroundLoop:
    """An event loop (uvloop's where it is installed) that runs in a daemon thread."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._is_lost = False
        self._on_fork: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._run, name="rayq-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it. An interrupt (Ctrl+C) cancels it."""
        try:
            self.check_callable()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise ClosedError("The client was closed meanwhile.") from error
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine on the loop, without waiting for it."""
        if self._is_lost:
            work.close()
            self.check_callable()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def check_callable(self) -> None:
        """Raises where waiting for the loop would never end."""
        if self._is_lost:
            raise ClosedError(
                "This was made before a fork, in the parent process. Make a new one from the "
                "cluster in this process."
            )
        if self.is_current_thread:
            raise InvalidRequestError(
                "A synchronous call from a delivery callback would wait for itself. Use the async "
                "classes there, or hand the work to another thread."
            )

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        """From any thread."""
        self.loop.call_soon_threadsafe(callback, *arguments)

    def on_fork(self, method: Callable[[], None]) -> None:
        """Calls a bound method in a forked child, where this loop has no thread. Held weakly."""
        self._on_fork = [known for known in self._on_fork if known() is not None]
        self._on_fork.append(weakref.WeakMethod(method))

    def forked(self) -> None:
        self._is_lost = True
        for reference in self._on_fork:
            method = reference()
            if method is not None:
                method()


_lock = threading.Lock()
_background: BackgroundLoop | None = None
_lost: list[BackgroundLoop] = []
"""Loops of the parent process, kept: collecting them would touch what is shared with it."""


def background_loop() -> BackgroundLoop:
    """This process's loop."""
    global _background
    with _lock:
        if _background is None:
            _background = BackgroundLoop()
        return _background


def _after_fork_in_child() -> None:
    global _background, _lock
    _lock = threading.Lock()
    lost, _background = _background, None
    if lost is not None:
        _lost.append(lost)
        lost.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()

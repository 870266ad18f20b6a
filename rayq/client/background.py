"""The event-loop thread behind the synchronous classes: one for each process, made at first use and
again after a fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from rayq.client.loop_thread import LoopThread
from rayq.client.wakeup import Wakeup
from rayq.errors import ClosedError, InvalidRequestError, RayqError

T = TypeVar("T")


class _Call:
    """A coroutine that runs on the loop while a thread waits for it."""

    __slots__ = ("task", "done", "failure")

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.done = Wakeup()
        self.failure: RayqError | None = None
        """The reason why the call will never be carried out."""


class BackgroundLoop:
    """An event loop that runs in a daemon thread until the program ends.

    The loop never waits for a user's thread: such a thread may be blocked in a signal handler or a
    finalizer, which in turn may wait for the loop.
    """

    def __init__(self) -> None:
        self._thread = LoopThread("rayq-client")
        self.loop = self._thread.loop
        self._is_lost = False
        self._on_fork: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._calls: dict[_Call, None] = {}
        """The calls that threads wait for."""

    def stop(self) -> None:
        self._thread.stop()

    @property
    def is_current_thread(self) -> bool:
        return self._thread.is_current

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and waits for it. An interrupt (Ctrl+C) cancels it."""
        call = _Call()
        try:
            self.check_callable()
            self._calls[call] = None
            self.call_soon(self._start, call, work)
        except BaseException:
            self._calls.pop(call, None)
            work.close()
            raise
        try:
            call.done.wait(None)
        except BaseException:
            self.call_soon(_cancel, call)
            raise
        finally:
            self._calls.pop(call, None)
        if call.failure is not None:
            raise call.failure
        assert call.task is not None
        try:
            result: T = call.task.result()
        except asyncio.CancelledError as error:
            raise ClosedError("The client was closed meanwhile.") from error
        return result

    def _start(self, call: _Call, work: Coroutine[Any, Any, T]) -> None:
        def ended(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                # Keeps asyncio from logging an error that nobody waits for any longer.
                task.exception()
            call.done.set()

        call.task = self.loop.create_task(work)
        call.task.add_done_callback(ended)

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine on the loop, without waiting for it."""
        if self._is_lost:
            work.close()
            self.check_callable()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def check_callable(self) -> None:
        """Raises ClosedError or InvalidRequestError if waiting for the loop would never end."""
        if self._is_lost:
            raise _lost_error()
        if self.is_current_thread:
            raise InvalidRequestError(
                "A call that waits cannot be made on the client's own thread, which is where "
                "delivery callbacks run (and sometimes finalizers): it would wait for itself. Use "
                "the async classes there, or hand the work to another thread."
            )
        self._thread.check_not_leaving()

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Runs a callback on the loop, without waiting for it. May be called from any thread."""
        self.loop.call_soon_threadsafe(callback, *arguments)

    def on_fork(self, method: Callable[[], None]) -> None:
        """Calls a bound method in a forked child, where this loop has no thread. The method is
        referenced weakly."""
        self._on_fork = [known for known in self._on_fork if known() is not None]
        self._on_fork.append(weakref.WeakMethod(method))

    def forked(self) -> None:
        self._is_lost = True
        for call in list(self._calls):  # A signal handler may fork while its thread waits.
            call.failure = _lost_error()
            call.done.set()
        for reference in self._on_fork:
            method = reference()
            if method is not None:
                method()


def _cancel(call: _Call) -> None:
    if call.task is not None:
        call.task.cancel()


def _lost_error() -> ClosedError:
    return ClosedError(
        "This was made before a fork, in the parent process. Make a new one from the cluster in "
        "this process."
    )


_current: dict[Literal["loop"], BackgroundLoop] = {}
"""The loop of this process, once there is one."""
_lost: list[BackgroundLoop] = []
"""The loops of the parent process. They are kept, because collecting them would touch what is
shared with that process."""


def background_loop() -> BackgroundLoop:
    """The loop of this process."""
    found = _current.get("loop")
    if found is None:
        # No lock is held here: a signal handler that also calls this may interrupt the thread that
        # holds it. If two threads start at the same time, the loop of one of them is stopped again.
        made = BackgroundLoop()
        found = _current.setdefault("loop", made)
        if found is not made:
            made.stop()
    return found


def _after_fork_in_child() -> None:
    lost = _current.pop("loop", None)
    if lost is not None:
        _lost.append(lost)
        lost.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)

"""Guard that lets one thread at a time into a consumer for threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rayq.errors import ConcurrentUseError


class OneThread:
    """A guard for one thread at a time, which may enter again (for example from a callback). A
    second thread gets ConcurrentUseError."""

    __slots__ = ("_asking", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asking = threading.RLock()

    def __enter__(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        with self._asking:  # Now no thread that only asks has the lock.
            if not self._lock.acquire(blocking=False):
                raise concurrent_use_error()

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Yields whether no thread was inside. If so, the caller is, and a thread that arrives
        meanwhile waits instead of being refused. Only for work that takes no time."""
        with self._asking:
            is_free = self._lock.acquire(blocking=False)
            try:
                yield is_free
            finally:
                if is_free:
                    self._lock.release()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


def concurrent_use_error(what: str = "thread") -> ConcurrentUseError:
    """The error of a second user. `what` uses the consumer: a thread, or a task of an async
    consumer."""
    return ConcurrentUseError(
        f"Another {what} uses this consumer at the moment; together they would miss records and "
        f"see others twice. Give each {what} a consumer of its own (in a group they share the "
        "partitions), or hand this one over between two calls."
    )

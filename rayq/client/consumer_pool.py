"""Consumer pools for users: `cluster.consumer_pool(...)` or `cluster.queue_pool(...)` starts one,
on any runtime."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from rayq.client.queues.arguments import PREFETCH
from rayq.client.timeouts import takes_timeout
from rayq.client.user_objects import closing_after
from rayq.config import PoolConfig
from rayq.errors import HandlerError, TimeoutError, counted
from rayq.records import PoolStatus
from rayq.user_functions import check_function, check_kind

Handler = Callable[..., Any]
"""`handler(batch)`, a plain function or a coroutine function; or a class: each consumer makes an
instance, calls it, and at the end calls its `close()`, if it has one."""

IDLE_CHECK_S = 0.2
STOP_TIMEOUT_S = 90.0
"""Default of `stop(timeout_s=...)`: longer than a consumer's `drain_timeout_s`."""


@dataclass(frozen=True)
class PoolSpec:
    """The specification of a pool, apart from its handler."""

    name: str
    topic: str
    group: str
    """The group; for a queue's pool, the queue."""
    config: PoolConfig
    queue: str | None = None
    """The queue; None if the consumers are members of the group."""
    large_values: str | None = None
    """The same argument as in `cluster.queue`."""
    prefetch: int = PREFETCH
    """The same argument as in `cluster.queue`."""


class PoolControl(Protocol):
    """Control of a running pool, through its runtime; it can be pickled if the runtime has
    processes."""

    def status(self) -> PoolStatus:
        """The status of the pool. Raises UnknownPoolError if it was stopped."""
        ...

    def stop(self, drain: bool, timeout_s: float) -> None:
        """Stops the pool, and returns when nothing of it runs any longer; does nothing if nothing
        does."""
        ...


class ConsumerPool:
    """A pool of consumers that runs by itself; made by `cluster.consumer_pool(...)` or
    `cluster.queue_pool(...)`.

    On Ray it outlives this process (`cluster.consumer_pools()` finds it again), and this handle can
    be pickled. The end of a `with` block stops the pool.
    """

    def __init__(self, name: str, control: PoolControl) -> None:
        self.name = name
        self._control = control

    def status(self) -> PoolStatus:
        """The status of the pool as of its last look (one a second). Raises UnknownPoolError if it
        was stopped."""
        return self._control.status()

    @takes_timeout
    def wait_idle(self, timeout_s: float | None = None) -> PoolStatus:
        """Waits until everything in the topic is handled and committed, including everything
        delivered before this call; for a queue's pool, until nothing waits and nothing is in hand
        (delayed records, including those delayed after a failure, do not count). Raises
        TimeoutError after `timeout_s` seconds, UnknownPoolError."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        looks = self.status().looks
        while True:
            status = self.status()
            looks = min(looks, status.looks)  # A pool that Ray restarted counts from 0 again.
            # The next look to end may have begun before this call; the one after it has not.
            if status.lag == 0 and status.looks >= looks + 2:
                return status
            if deadline_s is not None and time.monotonic() > deadline_s:
                problem = f" Its problem: {status.problem}" if status.problem else ""
                raise TimeoutError(
                    f"After {timeout_s:g} s {_shown(status.lag)} of topic {status.topic!r} still "
                    f"wait for pool {self.name!r}, which has {status.running} consumers of "
                    f"{status.wanted} wanted ({status.reason}).{problem}"
                )
            time.sleep(IDLE_CHECK_S)

    @takes_timeout
    def stop(self, drain: bool = True, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops the pool and its consumers; idempotent. With `drain` each finishes its current
        batch, commits and leaves; consumers that have not done so after `timeout_s` seconds are
        killed, as all are without `drain`. The next consumers of the group handle those batches
        again."""
        self._control.stop(drain, timeout_s)

    def __repr__(self) -> str:
        return f"ConsumerPool({self.name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with closing_after(error):
            self.stop()


def check_handler(handler: object) -> Handler:
    """Checks a pool's handler. Raises HandlerError."""
    named = handler if inspect.isclass(handler) else type(handler)
    if not callable(handler) or not any("__call__" in vars(kind) for kind in named.__mro__):
        raise HandlerError(
            "A pool's handler is a function, or a class with __call__, that takes a batch of "
            f"records; {named.__name__} cannot be called."
        )
    check = check_kind if inspect.isclass(handler) else check_function
    check("The handler", handler, is_awaited=True)
    return handler


def _shown(lag: int | None) -> str:
    return "an unknown number of records" if lag is None else counted(lag, "record")

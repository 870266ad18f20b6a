"""A virtual-time asyncio event loop: deterministic, and done with an hour in a second.

Nothing here waits. When no callback is ready, `time()` jumps to the next timer. Each callback
belongs to an `Owner` (a simulated process, or the world outside of all processes), found by a
context variable that asyncio copies into tasks, timers and callbacks by itself; a dead owner's
callbacks are dropped, a held owner's wait for their release.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import logging
import sys
import threading
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from proving.simulation.owner import DEAD, HELD, OPEN, OWNER, Owner, ProcessDied
from proving.simulation.trace import Trace

logger = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 1000.0
"""The first value of `time()`. It is not 0, as on a real machine."""

EVENTS_MAX = 200_000_000
"""The most events of one loop. More count as a livelock."""

EVENTS_PER_INSTANT_MAX = 1_000_000
"""The most events at one point of virtual time. More count as a livelock."""

COLLECT_EVERY_EVENTS = 500_000
"""Garbage is collected at fixed events, never by chance: finalizers may schedule callbacks."""

_CANCELLED_TIMERS_MAX = 1000
_TAIL_EVENTS = 30
_REPORTED_TASKS_MAX = 40
_REPORTED_ERRORS_MAX = 1000


class SimulationError(Exception):
    """The simulated program cannot continue. The message says what it was doing."""


class DeadlockError(SimulationError):
    """Nothing is ready and no timer is set, but the script has not ended."""


class LimitError(SimulationError):
    """The script took more virtual time or more events than it was given."""


@dataclass(frozen=True)
class ReportedError:
    """An error that no code handled, which asyncio would have logged."""

    time_s: float
    owner: str
    message: str
    exception: BaseException | None


class Call(asyncio.TimerHandle):
    """One scheduled callback."""

    __slots__ = ()
    _loop: SimulationLoop

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SimulationLoop,
        context: contextvars.Context,
    ) -> None:
        # asyncio.Handle.__init__ asks the loop for its debug flag; this is the rest of it, but for
        # what only its `__repr__` reads.
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context
        self._cancelled = False
        self._scheduled = False

    __repr__ = object.__repr__

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = _nothing
            self._args = ()
            if self._scheduled:
                self._loop.timer_was_cancelled()


def _nothing() -> None:
    pass


class SimulatedTask(asyncio.Task[Any]):
    """A task that hashes by its number: sets of tasks (`asyncio.wait`, `TaskGroup`) have one order
    in every run."""

    def __init__(
        self,
        number: int,
        work: Any,
        loop: SimulationLoop,
        name: str,
        context: contextvars.Context | None,
    ) -> None:
        self.number = number
        super().__init__(work, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


def _refuse(*args: Any, **options: Any) -> NoReturn:
    raise RuntimeError(
        "the simulation's loop has no real sockets, threads, processes or signals, nor factories "
        "or handlers to set: use the Environment's network, disk and threads"
    )


_REFUSE: Any = _refuse


class SimulationLoop(asyncio.AbstractEventLoop):
    """The event loop. Callbacks run in the order in which they were scheduled; timers by time, then
    in the order in which they were set. Real I/O and real threads are refused."""

    def __init__(self, *, keeps_log: bool = False) -> None:
        """With `keeps_log` `event_log` holds a line for every event, to see where two runs part."""
        self.root = Owner("world", 0)
        self.events = 0
        self.event_log: list[str] | None = [] if keeps_log else None
        self.errors: list[ReportedError] = []
        self._now = START_S
        self.trace = Trace(self.time)
        self._ready: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._timers_set = 0
        self._timers_cancelled = 0
        self._owners: list[Owner] = [self.root]
        self._held: dict[Owner, deque[Call]] = {}
        """Callbacks of owners whose gates are held."""
        self._tasks_made = 0
        self._stopping = False
        self._running = False
        self._closed = False
        self._deadline = float("inf")
        self._check_at = 0
        self._instant_events_end = EVENTS_PER_INSTANT_MAX
        self._collect_at = COLLECT_EVERY_EVENTS
        self._tail: deque[tuple[float, Owner, object]] = deque(maxlen=_TAIL_EVENTS)
        self._thread = threading.get_ident()
        self.observer: Callable[[Owner], None] | None = None
        """Called after each event with its owner. Its exceptions end the run. Set it before
        `run`."""

    # --- scheduling -------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> Call:
        call = Call(self._now, callback, args, self, context or contextvars.copy_context())
        self._ready.append(call)
        return call

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> Call:
        if context is None:
            context = contextvars.copy_context()
        call = Call(when, callback, args, self, context)
        if when <= self._now:
            self._ready.append(call)
        else:
            call._scheduled = True
            self._timers_set += 1
            heapq.heappush(self._timers, (when, self._timers_set, call))
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> Call:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> Call:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a real thread called into the simulation: use environment.threads instead"
            )
        return self.call_soon(callback, *args, context=context)

    def timer_was_cancelled(self) -> None:
        """Drops the cancelled timers once they are most of the timers."""
        self._timers_cancelled += 1
        if self._timers_cancelled > max(_CANCELLED_TIMERS_MAX, len(self._timers) // 2):
            self._timers = [timer for timer in self._timers if not timer[2]._cancelled]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        owner = OWNER.get(self.root) if context is None else context.get(OWNER, self.root)
        if not owner.alive:
            coro.close()
            owner.check_alive()
        self._tasks_made += 1
        name = name or f"task-{self._tasks_made}"
        task = SimulatedTask(self._tasks_made, coro, self, name, context)
        owner.add_task(task)
        return task

    # --- owners -----------------------------------------------------------------------------------

    def new_owner(self, owner: Owner) -> None:
        self._owners.append(owner)

    def current_owner(self) -> Owner:
        """The owner whose code runs now."""
        return OWNER.get(self.root)

    def pause(self, owner: Owner) -> None:
        owner.paused = True
        self._hold(owner)

    def resume(self, owner: Owner) -> None:
        owner.paused = False
        self._release(owner)

    def block(self, owner: Owner, seconds: float) -> None:
        """Blocks the owner's thread in a system call for so long, from now or from the end of an
        earlier one."""
        owner.blocked_until = max(owner.blocked_until, self._now) + seconds
        self._hold(owner)
        self.call_at(owner.blocked_until, self._release, owner, context=self.root.context)

    def bury(self, owner: Owner) -> None:
        """Ends an owner: none of its callbacks runs again, its tasks are closed."""
        self._owners.remove(owner)
        if not self._end(owner):
            self.call_soon(owner.close_tasks, context=self.root.context)

    def _end(self, owner: Owner) -> bool:
        owner.gate = DEAD
        for call in self._held.pop(owner, ()):
            _forget_errors(call)
        running = events._get_running_loop()
        events._set_running_loop(self)  # Needed where it dies in a thread's job or at `close`.
        all_closed = owner.close_tasks()
        events._set_running_loop(running)
        return all_closed

    def _hold(self, owner: Owner) -> None:
        if owner.gate == OPEN:
            owner.gate = HELD

    def _release(self, owner: Owner) -> None:
        if owner.gate == HELD and not owner.paused and owner.blocked_until <= self._now:
            owner.gate = OPEN
            self._ready.extendleft(reversed(self._held.pop(owner, ())))

    # --- running ----------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T], *, limit_s: float) -> T:
        """Runs until `work` is done. Raises what it raises, `DeadlockError`, or `LimitError` after
        `limit_s` virtual seconds."""
        self._deadline = self._now + limit_s
        try:
            result: T = self.run_until_complete(work)
            return result
        finally:
            self._deadline = float("inf")

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(self._main_is_done)
        self.run_forever()
        if not task.done():
            raise SimulationError("the loop was stopped before its script was done")
        return task.result()

    def _main_is_done(self, task: asyncio.Future[Any]) -> None:
        self._stopping = True

    def run_forever(self) -> None:
        if self._running or self._closed:
            raise RuntimeError("the loop is running or closed")
        collecting = gc.isenabled()
        hooks = sys.get_asyncgen_hooks()
        events._set_running_loop(self)
        self._running, self._stopping = True, False
        gc.disable()
        sys.set_asyncgen_hooks(finalizer=self._finalize_generator)
        try:
            self._turn()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            if collecting:
                gc.enable()
            self._running = False
            self._tail.clear()
            events._set_running_loop(None)

    def _turn(self) -> None:
        ready, trace, root, tail = self._ready, self.trace, self.root, self._tail
        observer = self.observer
        log = self.event_log
        while not self._stopping:
            if not ready:
                self._jump()
            call = ready.popleft()
            if call._cancelled:
                continue
            context = call._context
            owner = context.get(OWNER, root)
            if owner.gate:
                if owner.gate == HELD:
                    self._held.setdefault(owner, deque()).append(call)
                else:
                    _forget_errors(call)
                continue
            self.events += 1
            if self.events >= self._check_at:
                self._check_limits()
            now = self._now
            trace.value = hash((trace.value, owner.number, now))
            tail.append((now, owner, call._callback))
            if log is not None:
                log.append(f"{now:.6f} {owner.name}: {_name(call._callback)} {trace.digest()}")
            try:
                context.run(call._callback, *call._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio does; reported, not hidden
                if not (isinstance(error, ProcessDied) and not owner.alive):
                    self._report(owner, f"callback {call._callback!r} failed", error)
            if observer is not None:
                observer(owner)

    def _jump(self) -> None:
        """Goes to the time of the next timer and makes all timers of that time ready."""
        timers, ready, root = self._timers, self._ready, self.root
        while timers:
            when, _, call = heapq.heappop(timers)
            call._scheduled = False
            if call._cancelled:
                self._timers_cancelled -= 1
                continue
            if call._context.get(OWNER, root).gate == DEAD:
                continue
            if when > self._deadline:
                heapq.heappush(timers, (when, 0, call))
                call._scheduled = True
                self._now = self._deadline
                raise LimitError(f"the time limit is over.\n{self.describe()}")
            self._now = when
            ready.append(call)
            while timers and timers[0][0] == when:
                call = heapq.heappop(timers)[2]
                call._scheduled = False
                if call._cancelled:
                    self._timers_cancelled -= 1
                ready.append(call)
            self._instant_events_end = self.events + EVENTS_PER_INSTANT_MAX
            return
        raise DeadlockError(f"nothing is ready and no timer is set.\n{self.describe()}")

    def _check_limits(self) -> None:
        if self.events >= EVENTS_MAX:
            raise LimitError(f"{self.events} events.\n{self.describe()}")
        if self.events >= self._instant_events_end:
            raise LimitError(
                f"{EVENTS_PER_INSTANT_MAX} events without a step of time.\n{self.describe()}"
            )
        if self.events >= self._collect_at:
            gc.collect()
            self._collect_at = self.events + COLLECT_EVERY_EVENTS
        self._check_at = min(EVENTS_MAX, self._instant_events_end, self._collect_at)

    def _finalize_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if self.current_owner().alive:
            self.create_task(generator.aclose(), name="close an abandoned generator")

    def describe(self) -> str:
        """Returns the tasks with what each waits for, and the last events."""
        lines = [f"At {self._now:.6f} s, after {self.events} events:"]
        tasks = [(owner, task) for owner in self._owners for task in owner.tasks()]
        for owner, task in tasks[:_REPORTED_TASKS_MAX]:
            state = " (held)" if owner.gate == HELD else ""
            lines.append(f"  {owner.name}{state}: {task.get_name()} {_where(task)}")
        if len(tasks) > _REPORTED_TASKS_MAX:
            lines.append(f"  ... and {len(tasks) - _REPORTED_TASKS_MAX} more tasks")
        lines.append("Last events:")
        lines += [f"  {when:.6f} {owner.name}: {_name(call)}" for when, owner, call in self._tail]
        return "\n".join(lines)

    # --- the rest of asyncio's loop ---------------------------------------------------------------

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Closes every task that is left and drops all callbacks."""
        for owner in self._owners:
            self._end(owner)
        self._ready.clear()
        self._timers.clear()
        self._closed = True

    async def shutdown_asyncgens(self) -> None:
        pass

    async def shutdown_default_executor(self) -> None:
        pass

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        owner = self.current_owner()
        if owner.alive:
            self._report(owner, context.get("message", ""), context.get("exception"))

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def _report(self, owner: Owner, message: str, error: BaseException | None) -> None:
        logger.error("%s: %s", owner.name, message, exc_info=error)
        if len(self.errors) < _REPORTED_ERRORS_MAX:
            self.errors.append(ReportedError(self._now, owner.name, message, error))

    run_in_executor = set_default_executor = getaddrinfo = getnameinfo = _REFUSE
    create_connection = create_server = start_tls = sendfile = create_unix_connection = _REFUSE
    create_unix_server = create_datagram_endpoint = connect_accepted_socket = _REFUSE
    connect_read_pipe = connect_write_pipe = subprocess_shell = subprocess_exec = _REFUSE
    add_signal_handler = remove_signal_handler = add_reader = remove_reader = add_writer = _REFUSE
    remove_writer = sock_recv = sock_recv_into = sock_recvfrom = sock_recvfrom_into = _REFUSE
    get_exception_handler = set_exception_handler = get_task_factory = set_task_factory = _REFUSE
    sock_sendall = sock_sendto = sock_connect = sock_accept = sock_sendfile = _REFUSE


def _forget_errors(call: Call) -> None:
    """A dead owner would have taken the error of a future in this callback: nobody misses it."""
    for argument in call._args:
        if isinstance(argument, asyncio.Future) and argument.done() and not argument.cancelled():
            argument.exception()


def _name(callback: object) -> str:
    """A callback's name, the same in every run. A step of a task has the task's name."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return owner.get_name()
    function = getattr(callback, "func", callback)  # the function of a partial
    return str(getattr(function, "__qualname__", type(function).__name__))


def _where(task: asyncio.Task[Any]) -> str:
    coroutine: Any = task.get_coro()
    while getattr(getattr(coroutine, "cr_await", None), "cr_frame", None) is not None:
        coroutine = coroutine.cr_await
    frame = getattr(coroutine, "cr_frame", None)
    if frame is None:
        return "is about to start or end"
    awaited = getattr(task, "_fut_waiter", None)
    code = frame.f_code
    return f"at {code.co_filename}:{frame.f_lineno} in {code.co_qualname}, waits for {awaited!r}"

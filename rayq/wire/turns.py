"""The time of a server's event loop, shared among the connections of clients.

A request may cost more to answer than to send. So a connection that has used its slice of the
loop's time waits for its next turn, with the requests that it has sent and with those that are
being worked on; others are served in between. Connections of servers do not wait: leases and the
in-sync set depend on them.

The clock is the environment's. In a simulation no time passes while code runs, so nobody waits.
"""

from __future__ import annotations

import asyncio
import types
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from rayq.environment import Clock

T = TypeVar("T")

SLICE_S = 0.02
"""A connection that has used so much of the loop's time since its last turn waits for its next one.
It may use more by the one request, or the one step of a task, that it is at."""

TURN_S = 0.05
"""The loop time after which all clients together wait, while servers are served and timers fire.
Then those resume that have waited longest."""


class Turns:
    """The turns of all connections of clients to one server."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self._line: deque[Slice] = deque()
        self._is_scheduled = False

    def __len__(self) -> int:
        """Number of connections that wait for their turn."""
        return len(self._line)

    def line_up(self, slice_: Slice) -> None:
        self._line.append(slice_)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_scheduled = False
        self.used_s = 0.0
        for _ in range(len(self._line)):
            if self.used_s > TURN_S:
                break
            self._line.popleft().begin()
        if self._line:
            self._schedule()


class Slice:
    """The time that one connection of a client may use in a turn. Calls `on_turn` when it has
    waited and may take further requests."""

    def __init__(self, turns: Turns, clock: Clock, on_turn: Callable[[], None]) -> None:
        self._turns = turns
        self._now = clock.monotonic
        self._on_turn = on_turn
        self._used_s = 0.0
        self.spent_s = 0.0
        """Time that the connection has used since whoever charges for it set this to 0."""
        self.is_waiting = False
        """True if no further request may be taken now: the connection waits for its turn, or its
        tasks do. They go first, since requests are handled in the order of their arrival."""
        self._is_in_line = False
        self._has_ended = False
        self._parked: deque[asyncio.Future[None]] = deque()
        """The tasks that wait for the connection's turn."""
        self._woken = 0
        """The number of tasks that have waited and have not resumed yet."""

    def used(self, seconds: float) -> None:
        """Notes that the connection has used the loop for so long."""
        self._used_s += seconds
        self.spent_s += seconds
        self._turns.used_s += seconds
        if self._used_s > SLICE_S or self._turns.used_s > TURN_S:
            self._line_up()

    def must_wait(self) -> bool:
        """Returns whether no further bytes may be read now. `on_turn` is called once they may."""
        if self._turns.used_s > TURN_S:
            self._line_up()
        return self.is_waiting

    def _line_up(self) -> None:
        if not self._is_in_line and not self._has_ended:
            self._is_in_line = self.is_waiting = True
            self._turns.line_up(self)

    def begin(self) -> None:
        """The connection's turn has come."""
        self._is_in_line = False
        self._used_s = 0.0
        self._wake()
        if self._woken:
            self._turns.used_s += SLICE_S  # They will use it, once the loop comes to them.
        else:
            self.is_waiting = False
            self._on_turn()

    def end(self) -> None:
        """The connection has ended: what its tasks still do waits for nothing."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        while self._parked:
            task = self._parked.popleft()
            if not task.done():
                task.set_result(None)
                self._woken += 1

    # --- tasks ----------------------------------------------------------------------------------

    @types.coroutine
    def steps_of(self, work: Awaitable[T]) -> Generator[Any, Any, T]:
        """Does the work of a request, each step of it only when the connection may use time."""
        turns, now = self._turns, self._now
        steps = work.__await__()
        error: BaseException | None = None
        while True:
            if self._used_s > SLICE_S or turns.used_s > TURN_S or self._parked:
                error = error or (yield from self._park())
            if isinstance(error, GeneratorExit):
                steps.close()
                raise error
            began_s = now()
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as done:
                self.used(now() - began_s)
                result: T = done.value
                return result
            except Exception:
                self.used(now() - began_s)
                raise
            used_s = now() - began_s
            self._used_s += used_s
            self.spent_s += used_s
            turns.used_s += used_s
            error = None
            try:
                yield waits_for
            except BaseException as thrown:  # noqa: BLE001 - the work gets it
                error = thrown

    def _park(self) -> Generator[Any, Any, BaseException | None]:
        """Waits for the connection's turn. Returns what else ended the wait, if anything did."""
        error: BaseException | None = None
        while not self._has_ended:
            self._line_up()
            turn = asyncio.get_running_loop().create_future()
            self._parked.append(turn)
            try:
                yield from turn
            except BaseException as thrown:  # noqa: BLE001 - the work gets it
                error = thrown
            if turn.done() and not turn.cancelled():
                self._woken -= 1
            else:
                turn.cancel()  # It stays in its place, and wakes nobody.
            if error is not None or self._used_s <= SLICE_S:
                break
        if not (self._woken or self._parked or self._is_in_line):
            self.is_waiting = False
            asyncio.get_running_loop().call_soon(self._on_turn)
        return error

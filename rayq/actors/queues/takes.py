"""The takes that wait at a queue's leader: first come, first served, each with its fair share.
Those of consumers that have something to do come after all others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayq.actors.queues.holders import Connection
from rayq.environment import Buffer
from rayq.errors import RayqError
from rayq.wire import messages

TAKE_BYTES_MAX = 4 * 1024**2
"""One take brings no more, but for a single larger batch."""

Answer = tuple[messages.TakeResponse, Sequence[Buffer]]


@dataclass(slots=True, eq=False)
class WaitingTake:
    """A take that has no answer yet."""

    holder: str
    records_max: int
    bytes_max: int
    connection: Connection
    answer: asyncio.Future[Answer]
    tells_begins: bool = False
    is_ahead: bool = False
    timer: asyncio.TimerHandle | None = None

    def finish(self, answer: Answer | RayqError) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.answer.done():
            return
        if isinstance(answer, RayqError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


    def drop(self) -> None:
        """Nobody would get the answer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.answer.cancel()


class WaitingTakes:
    """See the module. `make_empty()` makes the answer of a take that was given nothing in time."""

    def __init__(self, make_empty: Callable[[], Answer | RayqError]) -> None:
        self._make_empty = make_empty
        self._takes: deque[WaitingTake] = deque()
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._takes)

    def add(self, request: messages.Take, connection: Connection) -> asyncio.Future[Answer]:
        """The answer of a take, which waits from now on."""
        take = WaitingTake(
            request.holder,
            request.records_max,
            min(request.bytes_max, TAKE_BYTES_MAX),
            connection,
            self._loop.create_future(),
            request.tells_begins,
            request.is_ahead,
        )
        take.timer = self._loop.call_later(request.wait_ms / 1000, self._too_long, take)
        self._takes.append(take)
        return take.answer

    def next(self) -> WaitingTake | None:
        """The take that is next, which is in the caller's hands now: `finish` it, or put it
        `back`."""
        if not self._takes:
            return None
        if self._takes[0].is_ahead:
            for take in self._takes:
                if not take.is_ahead:
                    self._takes.remove(take)
                    return take
        return self._takes.popleft()

    def idle_count(self) -> int:
        """How many of those that wait have nothing to do."""
        return sum(not take.is_ahead for take in self._takes)

    def back(self, take: WaitingTake) -> bool:
        """There is nothing for it yet: it stays the next. False: it waits no more."""
        if take.connection.done():
            take.drop()
            return False
        if take.timer is None:
            take.finish(self._make_empty())
            return False
        self._takes.appendleft(take)
        return True

    def share(self, available: int) -> int:
        """How many of the available records the take may have that is in the caller's hands."""
        return max(1, -(-available // (len(self._takes) + 1)))

    def _too_long(self, take: WaitingTake) -> None:
        take.timer = None
        if take in self._takes:
            self._takes.remove(take)
            take.finish(self._make_empty())

    def closed(self, connection: Connection) -> None:
        """Nobody would get the answers of this connection's takes."""
        gone = [take for take in self._takes if take.connection is connection]
        for take in gone:
            self._takes.remove(take)
            take.drop()

    def fail(self, error: RayqError) -> None:
        takes, self._takes = self._takes, deque()
        for take in takes:
            take.finish(error)

"""Waiting takes of a queue's leader: first come, first served, each with its fair share. Takes of
consumers that still have work come after all others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayq import messages
from rayq.actors.queues.holders import Connection
from rayq.environment import Buffer
from rayq.errors import RayqError

TAKE_BYTES_MAX = 4 * 1024**2
"""Maximum size of a take's answer, except for a single larger batch."""

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
        """Drops the take, as nobody would get the answer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.answer.cancel()


class WaitingTakes:
    """See the module. `make_empty()` makes the answer of a take that was given nothing in time."""

    def __init__(self, make_empty: Callable[[], Answer | RayqError]) -> None:
        self._make_empty = make_empty
        # There may be a hundred thousand takes: nothing here iterates over all of them.
        self._idle: OrderedDict[WaitingTake, None] = OrderedDict()
        """Takes of consumers that have nothing to do, in the order of arrival."""
        self._ahead: OrderedDict[WaitingTake, None] = OrderedDict()
        """The other takes, in the order of arrival."""
        self._of: dict[Connection, dict[WaitingTake, None]] = {}
        """All waiting takes, by the connection over which they came."""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._idle) + len(self._ahead)

    def add(self, request: messages.Take, connection: Connection) -> asyncio.Future[Answer]:
        """Adds a waiting take, and returns the future of its answer."""
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
        self._put(take)
        return take.answer

    def _line_of(self, take: WaitingTake) -> OrderedDict[WaitingTake, None]:
        return self._ahead if take.is_ahead else self._idle

    def _put(self, take: WaitingTake) -> None:
        self._line_of(take)[take] = None
        self._of.setdefault(take.connection, {})[take] = None

    def _remove(self, take: WaitingTake) -> bool:
        """Removes a take. Returns whether it was waiting here, and not handed to a caller."""
        line = self._line_of(take)
        if take not in line:
            return False
        del line[take]
        takes = self._of[take.connection]
        del takes[take]
        if not takes:
            del self._of[take.connection]
        return True

    def next(self) -> WaitingTake | None:
        """Hands the next take to the caller, who must `finish` it or put it `back`."""
        take = next(iter(self._idle or self._ahead), None)
        if take is not None:
            self._remove(take)
        return take

    def idle_count(self) -> int:
        """Number of waiting takes whose consumers have nothing to do."""
        return len(self._idle)

    def back(self, take: WaitingTake) -> bool:
        """Puts a take back, as there is nothing for it yet: it stays the next. Returns False if it
        no longer waits."""
        if take.connection.done():
            take.drop()
            return False
        if take.timer is None:
            take.finish(self._make_empty())
            return False
        self._put(take)
        self._line_of(take).move_to_end(take, last=False)
        return True

    def share(self, available: int) -> int:
        """Maximum number of the available records for the take that was handed to the caller."""
        return max(1, -(-available // (len(self) + 1)))

    def _too_long(self, take: WaitingTake) -> None:
        take.timer = None
        if self._remove(take):
            take.finish(self._make_empty())

    def closed(self, connection: Connection) -> None:
        """Drops the takes of a closed connection."""
        for take in list(self._of.get(connection, ())):
            self._remove(take)
            take.drop()

    def fail(self, error: RayqError) -> None:
        for take in [*self._idle, *self._ahead]:
            self._remove(take)
            take.finish(error)

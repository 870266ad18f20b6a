"""Consumers of a queue's leader: the takes that wait, and the owners of locks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from rayq import messages
from rayq.environment import Buffer
from rayq.errors import RayqError
from rayq.wire.peer import Peer

GRACE_S = 1.0
"""Time that a holder may be without a connection: it reconnects within it, and says so."""
HOLDERS_MAX = 10_000
"""Maximum number of known holders of a connection. The holder that was named first is forgotten:
its locks expire by time."""

TAKE_BYTES_MAX = 4 * 1024**2
"""Maximum size of a take's answer, except for a single larger batch."""

Connection = asyncio.Future[None]
Answer = tuple[messages.TakeResponse, Sequence[Buffer]]


class LockOwners:
    """Liveness of the holders of locks: once a connection has been gone for a second, the locks of
    its holders are released (docs/protocol.md, the rules of queues). `on_gone(holders)` is called
    when some have had no connection for `GRACE_S`; `on_closed(peer's connection)` when a connection
    ends. `unheard_s()` is the time so far in which nobody could be heard, nor connect again
    (`ListeningClock`)."""

    def __init__(
        self,
        *,
        on_gone: Callable[[set[str]], None],
        on_closed: Callable[[Connection], None],
        unheard_s: Callable[[], float],
    ) -> None:
        self._on_gone = on_gone
        self._unheard_s = unheard_s
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._connections: dict[Connection, dict[str, None]] = {}
        self._holders: dict[str, dict[Connection, None]] = {}
        self._left: dict[str, Connection] = {}
        """Holders without a connection, each with its last one."""
        self._gone: dict[str, None] = {}
        """The last holders that have had no connection for `GRACE_S`."""
        self._timers: dict[Connection, asyncio.TimerHandle] = {}

    @property
    def connections(self) -> int:
        """Number of connections that have named holders, which is about the number of consumers.
        There are more holders: a consumer takes another name after each failed take."""
        return len(self._connections)

    @property
    def gone(self) -> Set[str]:
        """The last `HOLDERS_MAX` that have had no connection for `GRACE_S`. A queue that is opened
        again has their locks again if their release was not kept."""
        return self._gone.keys()

    def heard(self, holder: str, peer: Peer) -> None:
        """Notes that a request of this holder came over a connection."""
        connection = peer.closed
        connections = self._holders.get(holder)
        if connections is not None and connection in connections:
            return
        if connection.done():
            return
        named = self._connections.get(connection)
        if named is None:
            named = self._connections[connection] = {}
            connection.add_done_callback(self._closed)
        elif len(named) >= HOLDERS_MAX:
            self._forget(connection, next(iter(named)))
        named[holder] = None
        self._holders.setdefault(holder, {})[connection] = None
        self._left.pop(holder, None)
        self._gone.pop(holder, None)

    def _closed(self, connection: Connection) -> None:
        self._on_closed(connection)
        # They end together: searching the locks of each one separately would keep all others
        # waiting.
        holders = list(self._connections.get(connection, ()))
        left = [holder for holder in holders if self._forget(connection, holder)]
        self._connections.pop(connection, None)
        if left:
            self._left.update(dict.fromkeys(left, connection))
            self._wait(self._loop.time() + GRACE_S, connection, left)

    def _wait(self, until_s: float, connection: Connection, left: list[str]) -> None:
        self._timers[connection] = self._loop.call_at(
            until_s, self._have_waited, connection, left, until_s, self._unheard_s()
        )

    def _have_waited(
        self, connection: Connection, left: list[str], until_s: float, unheard_s: float
    ) -> None:
        # A process that stood still fires the timer late. That lateness does not count twice.
        until_s += self._unheard_s() - unheard_s
        if until_s > self._loop.time() + 0.001:  # Else the clocks have been rounded.
            self._wait(until_s, connection, left)
        else:
            self._are_gone(connection, left)

    def _forget(self, connection: Connection, holder: str) -> bool:
        """Forgets a holder of a connection. Returns whether no other connection has named it."""
        del self._connections[connection][holder]
        connections = self._holders[holder]
        del connections[connection]
        if connections:
            return False
        del self._holders[holder]
        return True

    def _are_gone(self, connection: Connection, left: list[str]) -> None:
        del self._timers[connection]
        gone = [holder for holder in left if self._left.get(holder) is connection]
        for holder in gone:
            del self._left[holder]
        self._gone.update(dict.fromkeys(gone))
        while len(self._gone) > HOLDERS_MAX:
            del self._gone[next(iter(self._gone))]
        if gone:
            self._on_gone(set(gone))

    def end(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._left.clear()
        self._gone.clear()
        for connection in self._connections:
            connection.remove_done_callback(self._closed)
        self._connections.clear()


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
    """Waiting takes: first come, first served, each with its fair share. Those of consumers that
    still have work come after all others. `make_empty()` makes the answer of a take that was given
    nothing in time."""

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

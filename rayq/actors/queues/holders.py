"""Liveness of the holders of locks: when a connection has been gone for a second, the locks of its
holders are released (docs/protocol.md, the rules of queues)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

from rayq.wire.server import Peer

GRACE_S = 1.0
"""Time that a holder may be without a connection: it reconnects within it, and says so."""
HOLDERS_MAX = 10_000
"""Maximum number of known holders of a connection. The holder that was named first is forgotten:
its locks expire by time."""

Connection = asyncio.Future[None]


class Holders:
    """The holders of one queue's partition. `on_gone(holders)` is called when some have had no
    connection for `GRACE_S`; `on_closed(peer's connection)` when a connection ends."""

    def __init__(
        self, *, on_gone: Callable[[set[str]], None], on_closed: Callable[[Connection], None]
    ) -> None:
        self._on_gone = on_gone
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
            self._timers[connection] = self._loop.call_later(
                GRACE_S, self._are_gone, connection, left
            )

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

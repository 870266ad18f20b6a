"""Which holders of locks can be heard: a connection that was gone for a second frees what its
holders have (docs/protocol.md, the rules of queues)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rayq.wire.server import Peer

GRACE_S = 1.0
"""So long a holder may be without a connection: it connects anew within it, and says so."""
HOLDERS_MAX = 10_000
"""The most holders that are known of one connection. One that was named before so many others is
forgotten: its locks run out by time."""

Connection = asyncio.Future[None]


class Holders:
    """The holders of one queue's partition. `on_gone(holder)` is called when one has had no
    connection for `GRACE_S`; `on_closed(peer's connection)` when a connection ends."""

    def __init__(
        self, *, on_gone: Callable[[str], None], on_closed: Callable[[Connection], None]
    ) -> None:
        self._on_gone = on_gone
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._connections: dict[Connection, dict[str, None]] = {}
        self._holders: dict[str, dict[Connection, None]] = {}
        self._gone: dict[str, asyncio.TimerHandle] = {}

    @property
    def connections(self) -> int:
        """How many connections have named holders: as many as there are consumers, about. Holders
        are more: a consumer takes another name after each take that failed."""
        return len(self._connections)

    def heard(self, holder: str, peer: Peer) -> None:
        """A request of this holder came over a connection."""
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
        timer = self._gone.pop(holder, None)
        if timer is not None:
            timer.cancel()

    def _closed(self, connection: Connection) -> None:
        self._on_closed(connection)
        for holder in list(self._connections.get(connection, ())):
            if self._forget(connection, holder):
                self._gone[holder] = self._loop.call_later(GRACE_S, self._is_gone, holder)
        self._connections.pop(connection, None)

    def _forget(self, connection: Connection, holder: str) -> bool:
        """Whether no other connection has named it."""
        del self._connections[connection][holder]
        connections = self._holders[holder]
        del connections[connection]
        if connections:
            return False
        del self._holders[holder]
        return True

    def _is_gone(self, holder: str) -> None:
        del self._gone[holder]
        self._on_gone(holder)

    def end(self) -> None:
        for timer in self._gone.values():
            timer.cancel()
        self._gone.clear()
        for connection in self._connections:
            connection.remove_done_callback(self._closed)
        self._connections.clear()

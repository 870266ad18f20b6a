"""Connections that are not authenticated yet: their number is limited, and shared out fairly.

Anybody who reaches the port can open connections and say nothing. So the newest connection is
always let in. Where there are too many, it evicts the oldest connection of the address that has the
most. A peer that completes the handshake needs a round trip or two; idle sockets are evicted first.
And an address that floods the port evicts its own connections, not those of brokers and clients
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Connection = TypeVar("Connection")


class UnfinishedHandshakes(Generic[Connection]):
    """See the module."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        # Dicts keep their order: the oldest connection comes first.
        self._addresses: dict[Connection, str] = {}
        self._by_address: dict[str, dict[Connection, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._addresses))

    def add(self, connection: Connection, address: str) -> Connection | None:
        """Adds a connection. Returns the connection that it evicts for it, or None."""
        evicted = None
        if len(self._addresses) >= self._connections_max:
            evicted = self._next_to_go()
            self.remove(evicted)
        self._addresses[connection] = address
        self._by_address.setdefault(address, {})[connection] = None
        return evicted

    def remove(self, connection: Connection) -> bool:
        """Removes a connection that is authenticated, or has ended. Returns whether it was here."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return False
        those = self._by_address[address]
        del those[connection]
        if not those:
            del self._by_address[address]
        return True

    def _next_to_go(self) -> Connection:
        most = max(len(those) for those in self._by_address.values())
        if most == 1:
            return next(iter(self._addresses))
        return next(next(iter(those)) for those in self._by_address.values() if len(those) == most)

"""Connections that have not proven yet who they are: so many at most, and shared out fairly.

Whoever reaches the port can open connections and say nothing. So the newest is always let in, and
where there are too many another goes: the oldest of the address that has the most. Who completes
the handshake needs a round trip or two, who holds sockets open for nothing loses them first; and an
address that floods the port takes its places from itself, not from brokers and clients elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Connection = TypeVar("Connection")


class UnfinishedHandshakes(Generic[Connection]):
    """See the module."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max
        # Dicts for their order: oldest first.
        self._addresses: dict[Connection, str] = {}
        self._by_address: dict[str, dict[Connection, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._addresses))

    def add(self, connection: Connection, address: str) -> Connection | None:
        """Takes one in. Returns the one that has to go for it, which is taken out; None where there
        was room."""
        evicted = None
        if len(self._addresses) >= self._connections_max:
            evicted = self._next_to_go()
            self.remove(evicted)
        self._addresses[connection] = address
        self._by_address.setdefault(address, {})[connection] = None
        return evicted

    def remove(self, connection: Connection) -> bool:
        """It is through, or over. Whether it was here."""
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

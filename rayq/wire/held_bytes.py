"""The memory that a server holds for its clients: answers that they do not take, requests without
an answer, frames that have not arrived whole. When it is too much, clients are disconnected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

logger = logging.getLogger(__name__)

CLIENT_BYTES_HELD_MAX = 512 * 1024**2
"""The maximum that a server holds for all its clients together. Beyond it the server disconnects
the clients for which it holds most, and first of all those whose connections stand still."""

HELD_BYTES_TO_GO = 1024**2
"""A client for which the server holds less is not disconnected."""

STANDSTILL_S = 1.0
"""A connection on which nothing has moved for this long stands still."""


class Client(Protocol):
    """A client's connection."""

    address: str

    @property
    def held_bytes(self) -> int: ...

    @property
    def moved_at(self) -> float: ...

    def end(self, cause: BaseException | None) -> None: ...


class HeldBytes:
    """The sum for all clients. `clients()` gives those that are connected."""

    def __init__(self, clients: Callable[[], Iterable[Client]]) -> None:
        self._clients = clients
        self._bytes_max = 0
        """An upper bound of the sum: the sum at the last count, and what was added since."""

    def add(self, more_bytes: int) -> None:
        """The server holds this many more bytes for a client."""
        self._bytes_max += more_bytes
        if self._bytes_max > CLIENT_BYTES_HELD_MAX:
            self._disconnect_the_worst()

    def _disconnect_the_worst(self) -> None:
        held = {client: client.held_bytes for client in self._clients()}
        self._bytes_max = sum(held.values())
        if self._bytes_max <= CLIENT_BYTES_HELD_MAX:
            return
        moved_since = asyncio.get_running_loop().time() - STANDSTILL_S
        worst = sorted(
            (client for client in held if held[client] >= HELD_BYTES_TO_GO),
            key=lambda client: (client.moved_at > moved_since, -held[client]),
        )
        for client in worst:
            if self._bytes_max <= CLIENT_BYTES_HELD_MAX * 3 // 4:
                break
            self._bytes_max -= held[client]
            logger.warning(
                "disconnected %s, for which %d bytes were held: all clients together may not hold "
                "more than %d",
                client.address,
                held[client],
                CLIENT_BYTES_HELD_MAX,
            )
            client.end(None)

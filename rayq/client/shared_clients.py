"""The clients of this process: one for each cluster on each event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rayq.client.client import Client


class _Shared:
    """A client, and the number of its users: it is closed with the last of them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users = 0


_clients: dict[tuple[asyncio.AbstractEventLoop, object], _Shared] = {}
"""The clients by event loop and cluster. Each entry is touched only on its loop."""


def acquire(cluster_key: object, make: Callable[[], Client]) -> tuple[Client, Callable[[], None]]:
    """The client for a cluster on the running loop, made at its first use, and the function that
    gives it back. Equal keys share a client."""
    key = (asyncio.get_running_loop(), cluster_key)
    for known in list(_clients):
        if known[0].is_closed():
            _clients.pop(known, None)
    found = _clients.get(key)
    if found is None:
        found = _clients[key] = _Shared(make())
    shared = found
    shared.users += 1

    def release() -> None:
        if key[0].is_closed():
            _clients.pop(key, None)
            return
        shared.users -= 1
        if shared.users == 0:
            del _clients[key]
            shared.client.close()

    return shared.client, release

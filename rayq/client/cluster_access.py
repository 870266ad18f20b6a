"""Access of a `Cluster` to its servers: addresses, key, and the clients that it shares."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable

from rayq.client.addresses import format_address, parse_addresses
from rayq.client.background import BackgroundLoop, background_loop
from rayq.client.broker_client import BOOTSTRAP_MAX
from rayq.client.client import Client
from rayq.client.environment import process_name, system_environment
from rayq.config import ClusterConfig
from rayq.environment import Address
from rayq.errors import ClosedError, ConfigError
from rayq.wire.authentication import ClientKey, Identity


class ClusterAccess:
    """The addresses, key and clients of one `Cluster` object. Cheap to make: it connects at first
    use.

    Its client on the background loop stays acquired from the first use until `give_back`.
    """

    def __init__(
        self,
        addresses: str | Iterable[str | Address],
        key: ClientKey,
        cluster_id: str | None,
        config: ClusterConfig,
        client_id: str = "",
    ) -> None:
        """Takes the arguments of `Cluster`. Raises ConfigError."""
        self._bootstrap = parse_addresses(addresses)
        if not self._bootstrap:
            raise ConfigError("A cluster needs the address of at least one broker, host:port.")
        self.key = key
        self.client_id = client_id
        Identity.of_client(key, cluster_id, client_id=client_id)  # Checks it.
        self.config = config
        self.is_closed = False
        self._cluster_id = cluster_id
        self._goes_to = cluster_id or tuple(self._bootstrap)
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        """The clients made or shared for this object, on any loop."""
        self._shared: tuple[Client, BackgroundLoop, Callable[[], None]] | None = None

    @property
    def addresses(self) -> list[str]:
        """The address of every known broker, as `host:port`."""
        known = list(self._bootstrap)
        shared = self._shared
        if shared is not None:
            brokers = shared[0].metadata.brokers.values()
            known = [*((broker.host, broker.port) for broker in brokers), *known]
        return [format_address(address) for address in dict.fromkeys(known)]

    @property
    def cluster_id(self) -> str | None:
        """The cluster's id. None before the first connection, unless it was given."""
        shared = self._shared
        found = None if shared is None else shared[0].metadata.cluster_id
        return self._cluster_id or found

    def add_addresses(self, addresses: str | Iterable[str | Address]) -> None:
        """Adds addresses of brokers, the newest first, also for clients that are open. Raises
        ConfigError."""
        added = parse_addresses(addresses)
        self._bootstrap = list(dict.fromkeys([*added, *self._bootstrap]))[:BOOTSTRAP_MAX]
        for client in list(self._clients):
            client.add_bootstrap(added)

    def check_open(self) -> None:
        """Raises ClosedError if this cluster was closed."""
        if self.is_closed:
            raise ClosedError("This cluster was closed: connect again with rayq.connect().")

    def new_client(self) -> Client:
        """Makes a client for the running loop that is not shared."""
        identity = Identity.of_client(self.key, self._cluster_id, client_id=self.client_id)
        environment = system_environment(self.config)
        client = Client(environment, identity, self._bootstrap, self.config, name=process_name())
        self._clients.add(client)
        return client

    def acquire(self) -> tuple[Client, Callable[[], None]]:
        """The shared client for the running loop, and the function that gives it back."""
        # Principals share no client: each connection has the rights of one.
        shared_by = (self._goes_to, self.key, self.client_id, self.config)
        client, release = _acquire(shared_by, self.new_client)
        self._clients.add(client)
        client.add_bootstrap(self._bootstrap)
        return client, release

    def on_background_loop(self) -> tuple[Client, BackgroundLoop]:
        """The shared client for this process's background loop, and that loop. Raises
        ClosedError."""
        self.check_open()
        background = background_loop()
        shared = self._shared
        if shared is None or shared[1] is not background:  # the first use, or after a fork

            async def acquire_once() -> tuple[Client, BackgroundLoop, Callable[[], None]]:
                """Runs on the loop, so that calls come one after another. With a lock, a signal
                handler that interrupts the thread holding it would wait forever."""
                self.check_open()
                found = self._shared
                if found is None or found[1] is not background:
                    client, release = self.acquire()
                    found = self._shared = (client, background, release)
                return found

            shared = background.run(acquire_once())
        return shared[0], background

    def give_back(self) -> None:
        """Gives back what `on_background_loop` has acquired."""
        background = background_loop()

        async def on_loop() -> None:
            shared, self._shared = self._shared, None
            if shared is not None and shared[1] is background:
                shared[2]()

        if self._shared is not None:
            background.run(on_loop())


# --- the clients of this process: one for each cluster on each event loop ------------------------


class _Shared:
    """A client, and the number of its users: it is closed with the last of them."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users = 0


_clients: dict[tuple[asyncio.AbstractEventLoop, object], _Shared] = {}
"""The clients by event loop and cluster. Each entry is touched only on its loop."""


def _acquire(cluster_key: object, make: Callable[[], Client]) -> tuple[Client, Callable[[], None]]:
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

"""The connections of a process: all its users of an address share one connection to it."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Sequence

from rayq.config import ClusterConfig
from rayq.environment import Address, Buffer, Environment
from rayq.errors import ClosedError, RayqError, TimeoutError
from rayq.messages import Request, ResponseT
from rayq.wire.authentication import Identity
from rayq.wire.connection import Connection


class ConnectionPool:
    """One connection for each address, opened at its first use, and again after it closed."""

    def __init__(
        self,
        environment: Environment,
        identity: Identity,
        config: ClusterConfig | None = None,
        on_refused: Callable[[Connection, RayqError], None] | None = None,
        *,
        keeps_alive: bool = False,
        unheard_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`on_refused`: see `Connection`. `keeps_alive`: see `Connection.keep_alive`; only servers
        may. `unheard_s`: see `Connection.open`."""
        self.identity = identity
        """The identity of the connections that are opened from now on."""
        self._on_refused = on_refused
        self._keeps_alive = keeps_alive
        self._unheard_s = unheard_s
        self._environment = environment
        self._config = config or ClusterConfig()
        self._connections: dict[Address, Connection] = {}
        # Attempts under way. An error is a value: asyncio logs exceptions that nobody fetches.
        self._attempts: dict[Address, asyncio.Future[Connection | RayqError]] = {}
        self._is_closed = False

    def current(self, host: str, port: int) -> Connection | None:
        """The connection to an address, if one is open."""
        return self._connections.get((host, port))

    async def get(self, host: str, port: int) -> Connection:
        """The open connection to an address. Concurrent callers share one attempt to open it.

        Raises what `Connection.open` raises, and ClosedError.
        """
        address = (host, port)
        connection = self._connections.get(address)
        if connection is not None and not connection.closed:
            return connection
        if self._is_closed:
            raise ClosedError("The connection pool was closed.")
        attempt = self._attempts.get(address)
        if attempt is None:
            attempt = asyncio.get_running_loop().create_future()
            self._attempts[address] = attempt
            self._environment.tasks.spawn(self._open(address, attempt), f"connect to {host}:{port}")
        outcome = await asyncio.shield(attempt)
        if isinstance(outcome, Connection):
            return outcome
        raise type(outcome)(outcome.message) from outcome.__cause__

    async def get_within(self, host: str, port: int, timeout_s: float) -> Connection:
        """Like `get`; also raises TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.get(host, port)
        except builtins.TimeoutError as error:
            if isinstance(error, RayqError):
                raise
            raise TimeoutError(
                f"{host}:{port} could not be connected to within {timeout_s:g} s."
            ) from error

    async def request(
        self,
        host: str,
        port: int,
        request: Request[ResponseT],
        payload: Buffer | Sequence[Buffer] = b"",
        *,
        timeout_s: float,
    ) -> tuple[ResponseT, memoryview]:
        """`(response, payload)` within `timeout_s` seconds, including the time to connect. Raises
        what `get_within` and `Connection.request` raise."""
        connection = self._connections.get((host, port))
        if connection is None or connection.closed:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + timeout_s
            connection = await self.get_within(host, port, timeout_s)
            timeout_s = deadline - loop.time()
        return await connection.request(request, payload, timeout_s=timeout_s)

    def close(self) -> None:
        """Closes all connections. Attempts under way fail with ClosedError."""
        self._is_closed = True
        attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            if not attempt.done():
                attempt.set_result(ClosedError("The connection pool was closed."))
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    async def _open(
        self, address: Address, attempt: asyncio.Future[Connection | RayqError]
    ) -> None:
        host, port = address
        outcome: Connection | RayqError = ClosedError(
            "The opening of the connection was cancelled."
        )
        try:
            outcome = await Connection.open(
                self._environment,
                host,
                port,
                self.identity,
                config=self._config,
                unheard_s=self._unheard_s,
            )
        except RayqError as error:
            outcome = error
        finally:
            if self._attempts.get(address) is attempt:
                del self._attempts[address]
            if isinstance(outcome, Connection):
                self._keep(address, outcome)
            if not attempt.done():
                attempt.set_result(outcome)

    def _keep(self, address: Address, connection: Connection) -> None:
        if self._is_closed:
            connection.close()
            return
        connection.on_refused = self._on_refused
        if self._keeps_alive:
            connection.keep_alive()
        self._connections[address] = connection

        def forget() -> None:
            if self._connections.get(address) is connection:
                del self._connections[address]

        connection.on_close(forget)

"""The server: listens, admits connections and ends them, and counts what they do."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

from rayq.config import ClusterConfig
from rayq.environment import Environment, Listener
from rayq.errors import (
    OverloadedError,
    RayqError,
    UnknownServerError,
)
from rayq.logs import RateLimitedLogger
from rayq.messages import (
    REQUESTS,
)
from rayq.metrics import Histogram, Sample
from rayq.wire.accepted_connection import AcceptedConnection
from rayq.wire.authentication import (
    Identity,
    Role,
)
from rayq.wire.certificates import CertificatePrincipals
from rayq.wire.descriptors import shares
from rayq.wire.handler import Handler
from rayq.wire.handshakes import UnfinishedHandshakes
from rayq.wire.held_bytes import HeldBytes
from rayq.wire.peer import Audit, Gate, NobodyAudits, NobodyKnown
from rayq.wire.throttling import Throttles
from rayq.wire.turns import Turns

logger = logging.getLogger(__name__)

UNFINISHED_HANDSHAKES_MAX = 256
"""While this many connections are not authenticated, each further connection evicts one of them
(see `handshakes`). The limit is lower where the process may have few file descriptors."""

FOR_SUPERUSERS_MAX = 64
"""This many connections, an eighth of all at most, are kept for superusers. A principal that opens
all that it gets does not keep out whoever would revoke its token."""

EXPIRY_INTERVAL_S = 1.0
"""Interval at which connections are ended whose token has expired."""

PORTS_TRIED_MAX = 1000
IDLE_CHECKS_PER_LIMIT = 4


class Server:
    """Serves one handler on one address."""

    def __init__(
        self,
        environment: Environment,
        identity: Identity,
        handler: Handler,
        config: ClusterConfig | None = None,
        gate: Gate | None = None,
        audit: Audit | None = None,
        throttles: Throttles | None = None,
    ) -> None:
        assert identity.role == "server", "a server needs the cluster's secret"
        self.environment = environment
        self.identity = identity
        self.handler = handler
        self.config = config or ClusterConfig()
        self.gate: Gate = gate or NobodyKnown()
        self.audit: Audit = audit or NobodyAudits()
        self.throttles = throttles
        self.host = ""
        self.port = 0
        self.certificates = (
            None if self.config.tls_principals is None else CertificatePrincipals(self.config)
        )
        self._listener: Listener | None = None
        # Dicts keep their order: the simulation must not depend on memory addresses.
        self._authenticated: dict[AcceptedConnection, None] = {}
        self._unauthenticated: UnfinishedHandshakes[AcceptedConnection] = UnfinishedHandshakes(
            min(UNFINISHED_HANDSHAKES_MAX, shares().reserve // 2)
        )
        self._refused = RateLimitedLogger(logger, logging.INFO, environment.clock.monotonic)
        self._idle_timer: asyncio.TimerHandle | None = None
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._latencies: dict[int, Histogram] = {}
        self._forget_connections: Callable[[], None] | None = None
        self.turns = Turns()
        self.held_bytes = HeldBytes(
            lambda: [connection for connection in self._authenticated if connection.is_client]
        )

    async def start(self, host: str, port: int, *, first_free: bool = False) -> None:
        """Listens on `port` (0: any free port), or with `first_free` on the first free port from
        `port` on. Raises OSError."""
        self._listener = await self._listen(host, port, first_free)
        self.host, self.port = self._listener.host, self._listener.port
        self._forget_connections = self.environment.metrics.add_source(self._count_connections)
        self._check_idle()

    async def _listen(self, host: str, port: int, first_free: bool) -> Listener:
        last = min(port + PORTS_TRIED_MAX, 65_535) if first_free and port != 0 else port
        while True:
            try:
                return await self.environment.network.listen(host, port, self._accept)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or port >= last:
                    raise
            port += 1

    def close(self) -> None:
        """Stops listening and aborts all connections."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for timer in (self._idle_timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        self._idle_timer = self._expiry_timer = None
        if self._forget_connections is not None:
            self._forget_connections()
            self._forget_connections = None
        for connection in [*self._authenticated, *self._unauthenticated]:
            connection.end(None)

    def _accept(self, host: str, give_up: Callable[[], None]) -> asyncio.BaseProtocol | None:
        if self._listener is None:
            return None
        connection = AcceptedConnection(self, host, give_up)
        evicted = self._unauthenticated.add(connection, host)
        if evicted is not None:
            self.refused(
                "closed %s before it was authenticated, to make room for %s", evicted.address, host
            )
            evicted.end(None)
        return connection

    def end_revoked(self) -> None:
        """Ends the connections of principals that are gone, or whose token was revoked or has
        expired. Call it after each change of them; for tokens that expire it looks by itself. A
        server that cannot know whether others are still valid ends these all the same."""
        valid: dict[str, set[tuple[str | None, bytes | None]]] = {}
        """Ids and keys of the valid tokens of each principal, and Nones if it exists."""
        for connection in list(self._authenticated):
            peer = connection.peer
            if peer is None or peer.principal is None:
                continue
            if peer.principal not in valid:
                tokens = self.gate.valid_tokens_of(peer.principal)
                valid[peer.principal] = set()
                if tokens is not None:
                    ids = {(token.token_id, token.key) for token in tokens}
                    valid[peer.principal] = {(None, None), *ids}
            if (peer.token_id, peer.token_key) not in valid[peer.principal]:
                self.refused(
                    "closed %s: principal %s or its token is no longer valid",
                    *(peer.address, peer.principal),
                )
                connection.end(None)

    # --- for its connections --------------------------------------------------------------------

    def authenticated(
        self, connection: AcceptedConnection, role: Role, principal: str | None
    ) -> None:
        """Raises OverloadedError for a client too many. Servers are always let in."""
        if role == "client":
            self._check_room(connection, is_superuser=principal is None)
        self._unauthenticated.remove(connection)
        self._authenticated[connection] = None

    def watch_expiry(self) -> None:
        """Looks now and then for tokens that have expired, as long as principals are connected."""
        if self._expiry_timer is None:
            loop = asyncio.get_running_loop()
            self._expiry_timer = loop.call_later(EXPIRY_INTERVAL_S, self._end_expired)

    def _check_room(self, connection: AcceptedConnection, *, is_superuser: bool) -> None:
        def room(count: int) -> int:
            return count if is_superuser else count - min(count // 8, FOR_SUPERUSERS_MAX)

        if len(self._authenticated) >= room(self.config.max_connections):
            raise OverloadedError(
                f"{self.host}:{self.port} has {len(self._authenticated)} connections, "
                f"{'its limit' if is_superuser else 'and keeps the rest for superusers'}: "
                "close some, or raise max_connections."
            )
        allowed = shares()
        for_client = room(allowed.for_clients)
        if connection.descriptor >= for_client:
            raise OverloadedError(
                f"{self.host}:{self.port} may open {allowed.limit} files and connections, and "
                f"{for_client} are open: the rest is kept for its logs and for "
                f"{'servers' if is_superuser else 'servers and superusers'}. "
                "Close some connections, or raise the limit of its process (ulimit -n)."
            )

    def refused(self, message: str, *arguments: object) -> None:
        """Logs that a connection was refused, but seldom: anybody can cause that often."""
        self._refused.say(message, *arguments)

    def disconnected(self, connection: AcceptedConnection) -> None:
        self._unauthenticated.remove(connection)
        self._authenticated.pop(connection, None)

    def took(self, api: int, seconds: float) -> None:
        """A request was answered, or refused, this many seconds after its arrival."""
        latency = self._latencies.get(api)
        if latency is None:
            name = _name_of(api)
            latency = self.environment.metrics.histogram("rayq_request_seconds", request=name)
            if api in REQUESTS:
                self._latencies[api] = latency
        latency.observe(seconds)

    def failed(self, api: int, error: BaseException) -> None:
        """Counts a request that was answered by an error."""
        kind = type(error) if isinstance(error, RayqError) else UnknownServerError
        self.environment.metrics.counter(
            "rayq_failed_requests_total", request=_name_of(api), error=kind.__name__
        ).value += 1

    def _count_connections(self) -> list[Sample]:
        sample, connections = self.environment.metrics.sample, self._authenticated
        return [
            sample("rayq_connections", len(connections)),
            sample(
                "rayq_requests_in_flight",
                sum(connection.requests_in_flight for connection in connections),
            ),
            sample("rayq_connections_waiting", len(self.turns)),
        ]

    def _check_idle(self) -> None:
        loop = asyncio.get_running_loop()
        limit_s = self.config.idle_connection_ms / 1000
        for connection in list(self._authenticated):
            if connection.is_idle_since(loop.time() - limit_s):
                connection.end_unless_writing()
        self._idle_timer = loop.call_later(limit_s / IDLE_CHECKS_PER_LIMIT, self._check_idle)

    def _end_expired(self) -> None:
        self._expiry_timer = None
        if any(connection.peer and connection.peer.principal for connection in self._authenticated):
            self.watch_expiry()
            self.end_revoked()


def _name_of(api: int) -> str:
    kind = REQUESTS.get(api)
    return "unknown" if kind is None else kind.__name__

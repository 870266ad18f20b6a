"""The real network: TCP through the running asyncio loop, with TLS when it is configured."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from rayq.config import ClusterConfig
from rayq.environment import Accept
from rayq.errors import ConfigError
from rayq.logs import RateLimitedLogger
from rayq.wire.certificates import CertificatePrincipals
from rayq.wire.descriptors import shares

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024
TLS_HANDSHAKE_TIMEOUT_S = 5.0

ACCEPTS_PER_TURN = 64
"""After this many accepted connections the other work of the event loop has its turn."""

ACCEPT_RETRY_S = 0.1
"""The time after which accepting resumes when there was no descriptor or no memory for a
connection."""

KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_PROBES = 3
UNACKNOWLEDGED_TIMEOUT_MS = 10_000
"""The kernel ends the connection to a machine that vanished: after about 11 s when it is idle
(keepalive), after 10 s when bytes wait for their acknowledgement."""

KEPT_BLOCK_BYTES = 8 * 1024**2

_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_TIMEOUT_MS),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class AsyncioListener:
    """A listening socket of the running loop. It accepts by itself rather than through the loop's
    server, so that connections that flood the port are refused before they cost a TLS handshake, a
    transport or one of the descriptors that files need."""

    def __init__(
        self,
        listening: socket.socket,
        host: str,
        accept: Accept,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.host = host
        self.port = int(listening.getsockname()[1])
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._accept = accept
        self._tls = tls
        self._retry: asyncio.TimerHandle | None = None
        self._refused = RateLimitedLogger(logger, logging.WARNING, self._loop.time)
        self._listen()

    def close(self) -> None:
        """Stops accepting connections. Those that exist stay."""
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._listening)
        self._listening.close()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening, self._accept_some)

    def _accept_some(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connected, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # There is no descriptor or no memory now: that passes.
                self._refused.say("cannot accept connections on port %d: %s", self.port, error)
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._listen)
                return
            self._take(connected, str(address[0]))

    def _take(self, connected: socket.socket, host: str) -> None:
        allowed = shares()
        if connected.fileno() >= allowed.for_connections:
            connected.close()
            self._refused.say(
                "refused a connection from %s: %d of %d file descriptors (ulimit -n) are in use, "
                "the rest is for files",
                host,
                allowed.for_connections,
                allowed.limit,
            )
            return
        connected.setblocking(False)
        arrival = _Arrival(connected)
        protocol = self._accept(host, arrival.give_up)
        if protocol is None:
            connected.close()
        else:
            arrival.start(protocol, self._tls)


class _Arrival:
    """A connection between its acceptance and `connection_made`, while TLS begins."""

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected
        self._is_started = False
        self._task: asyncio.Task[None] | None = None

    def start(self, protocol: asyncio.BaseProtocol, tls: ssl.SSLContext | None) -> None:
        self._task = asyncio.get_running_loop().create_task(self._start(protocol, tls))
        self._task.add_done_callback(lambda task: self._started(protocol, task))

    def give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _start(self, protocol: asyncio.BaseProtocol, tls: ssl.SSLContext | None) -> None:
        self._is_started = True  # From here on the transport closes the socket.
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol,
            self._connected,
            ssl=tls,
            ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if tls else None,
        )

    def _started(self, protocol: asyncio.BaseProtocol, task: asyncio.Task[None]) -> None:
        error: BaseException | None = None
        if not task.cancelled():
            error = task.exception()
            if error is None:
                return
        if not self._is_started:
            self._connected.close()
        # The TLS handshake failed, or was given up. The transport does not tell the protocol.
        protocol.connection_lost(error if isinstance(error, Exception) else None)


class AsyncioNetwork:
    """Implements `environment.Network`. With the TLS files of `config` every connection is
    encrypted, and each side must show a certificate that `tls_ca` signed, or for clients
    `tls_client_ca`. The server's certificate
    must name the host that the client connects to, unless `tls_check_hostname` is off."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self._client_tls: ssl.SSLContext | None = None
        self._server_tls: ssl.SSLContext | None = None
        _keep_freed_memory()
        if config is not None and config.tls_certificate is not None:
            self._client_tls = _tls_context(ssl.PROTOCOL_TLS_CLIENT, config)
            self._client_tls.check_hostname = config.tls_check_hostname
            self._server_tls = _tls_context(ssl.PROTOCOL_TLS_SERVER, config)
            if config.tls_client_ca is not None:
                CertificatePrincipals(config)  # Checks the file, before any server starts.
                self._server_tls.load_verify_locations(config.tls_client_ca)

    async def connect(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.BaseProtocol:
        loop = asyncio.get_running_loop()
        if self._client_tls is None:
            transport, protocol = await loop.create_connection(protocol_factory, host, port)
        else:
            transport, protocol = await loop.create_connection(
                protocol_factory,
                host,
                port,
                ssl=self._client_tls,
                ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S,
            )
        connected = transport.get_extra_info("socket")
        if connected is not None:
            try:
                _set_options(connected)
            except ValueError as error:  # It broke right away: uvloop's socket is gone.
                raise ConnectionResetError(f"it ended as it began ({error})") from error
        return protocol

    async def listen(self, host: str, port: int, accept: Accept) -> AsyncioListener:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _set_options(listening)  # Accepted sockets inherit the options.
            listening.bind(address)
            # Two sockets may bind one port before either listens. The later one fails only here.
            listening.listen(LISTEN_BACKLOG)
            return AsyncioListener(listening, host, accept, self._server_tls)
        except BaseException:
            listening.close()
            raise


def _keep_freed_memory() -> None:
    """glibc returns freed memory to the kernel beyond twice the size of the largest block that was
    freed before. Payloads have megabytes: the kernel would fault each of them in page by page, at
    four times the CPU of receiving it. One block that is allocated and freed lifts that limit to
    16 MiB for this process. It is never touched, so it costs nothing."""
    bytes(KEPT_BLOCK_BYTES)


def _set_options(to: socket.socket) -> None:
    for level, option, value in _SOCKET_OPTIONS:
        to.setsockopt(level, option, value)


def _tls_context(protocol: int, config: ClusterConfig) -> ssl.SSLContext:
    assert config.tls_certificate and config.tls_key and config.tls_ca  # ClusterConfig checks it
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.verify_mode = ssl.CERT_REQUIRED
    try:
        for path in (config.tls_certificate, config.tls_key, config.tls_ca):
            with open(path, "rb"):  # OpenSSL does not say which file it cannot open.
                pass
        # Without a passphrase of our own OpenSSL would ask the terminal for one.
        context.load_cert_chain(config.tls_certificate, config.tls_key, lambda: "")
        context.load_verify_locations(config.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS cannot use tls_certificate {config.tls_certificate}, tls_key {config.tls_key} "
            f"and tls_ca {config.tls_ca}: {error}. They must be readable PEM files, the key "
            "without a passphrase and matching the certificate."
        ) from error
    return context

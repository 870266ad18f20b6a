"""The real network: TCP through the running asyncio loop, with TLS when it is configured."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from rayq.config import ClusterConfig
from rayq.errors import ConfigError

LISTEN_BACKLOG = 1024
TLS_HANDSHAKE_TIMEOUT_S = 5.0

KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_PROBES = 3
UNACKNOWLEDGED_TIMEOUT_MS = 10_000
"""A peer whose machine vanished is noticed after about 11 s when the connection is idle
(keepalive), after 10 s when bytes wait for its acknowledgement."""

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
    """A listening socket of the running loop."""

    def __init__(self, server: asyncio.AbstractServer, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._server = server

    def close(self) -> None:
        """Accepts no more; connections that exist stay."""
        self._server.close()


class AsyncioNetwork:
    """Implements `environment.Network`. Of `config` it takes the TLS files: with them every
    connection is encrypted, and each side must show a certificate that `tls_ca` signed; a server's
    must name the host it was reached by, unless `tls_check_hostname` is off."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self._client_tls: ssl.SSLContext | None = None
        self._server_tls: ssl.SSLContext | None = None
        _keep_freed_memory()
        if config is not None and config.tls_certificate is not None:
            self._client_tls = _tls_context(ssl.PROTOCOL_TLS_CLIENT, config)
            self._client_tls.check_hostname = config.tls_check_hostname
            self._server_tls = _tls_context(ssl.PROTOCOL_TLS_SERVER, config)

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
            _set_options(connected)
        return protocol

    async def listen(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]
    ) -> AsyncioListener:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _set_options(listening)  # accepted sockets inherit them
            listening.bind(address)
            # Two may bind one port before either listens. Whoever is late is told so only here:
            # uvloop's own listen closes the socket and says nothing.
            listening.listen(LISTEN_BACKLOG)
            server = await loop.create_server(
                protocol_factory,
                sock=listening,
                backlog=LISTEN_BACKLOG,
                ssl=self._server_tls,
                ssl_handshake_timeout=TLS_HANDSHAKE_TIMEOUT_S if self._server_tls else None,
            )
        except BaseException:
            listening.close()
            raise
        return AsyncioListener(server, host, listening.getsockname()[1])


def _keep_freed_memory() -> None:
    """glibc returns freed memory to the kernel beyond twice the size of the largest block it has
    seen freed. Payloads come and go by the megabyte: each would be faulted in page by page, at four
    times the CPU of receiving it. One block allocated and freed, which is never touched and so
    costs nothing, lifts that limit to 16 MiB for this process."""
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
        context.load_cert_chain(config.tls_certificate, config.tls_key)
        context.load_verify_locations(config.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS cannot use tls_certificate {config.tls_certificate}, tls_key {config.tls_key} "
            f"and tls_ca {config.tls_ca}: {error}. They must be readable PEM files, the key "
            "without a passphrase and matching the certificate."
        ) from error
    return context

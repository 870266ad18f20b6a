"""An HTTP server whose `/metrics` Prometheus scrapes: the metrics of the whole cluster."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

import rayq
from rayq.client.addresses import parse_address
from rayq.client.admin.prometheus import CONTENT_TYPE, exposition
from rayq.errors import ConfigError, RayqError

LOOPBACK = "127.0.0.1"
PATH = "/metrics"
REQUEST_TIMEOUT_S = 10.0
"""The time after which a client that sends no request, or reads no answer, is disconnected."""


class MetricsServer(ThreadingHTTPServer):
    """Asks the cluster at each scrape. `where` is "PORT" (of 127.0.0.1) or "HOST:PORT"; port 0 is
    any free one. Raises ConfigError, OSError."""

    daemon_threads = True

    def __init__(self, cluster: rayq.Cluster, where: str) -> None:
        host, _, port = where.rpartition(":")
        if port == "0":
            address = (host.strip("[]") or LOOPBACK, 0)
        elif where.isdecimal():
            address = parse_address(f"{LOOPBACK}:{where}")
        elif port.isdecimal():
            address = parse_address(where)
        else:
            raise ConfigError(f"{where!r} is not a place to listen: give PORT or HOST:PORT.")
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self._cluster = cluster
        self._asking = threading.Lock()
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}{PATH}"

    def scrape(self) -> str:
        """The text of one scrape; one after the other, each asks every process of the cluster.
        Raises RayqError."""
        with self._asking:
            return exposition(self._cluster.metrics())


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(404, f"See {PATH}.\n")
            return
        try:
            text = self.server.scrape()
        except RayqError as error:  # Prometheus takes the cluster for down.
            self._answer(503, f"{error}\n")
        else:
            self._answer(200, text)

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppresses the log line of each request."""

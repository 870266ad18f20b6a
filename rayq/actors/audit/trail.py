"""A server process's part of the audit: it notes who was denied, logged in or failed to, and sends
the lines to the coordinator of `__audit`.

No request waits for the lines. They wait in a bounded buffer while `__audit` cannot be written;
lines that do not fit are counted and logged. Lines that wait in a process that dies are lost;
changes of the metadata are not among them (`AuditCoordinator`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection

from rayq import messages
from rayq.backoff import Backoff
from rayq.core.access.audit import WHAT_LENGTH_MAX, AuditLine, AuditLines, encode_line
from rayq.environment import Environment
from rayq.errors import RayqError
from rayq.logs import RateLimitedLogger
from rayq.messages.acls import SUPERUSER
from rayq.wire.peer import Audit, Peer

logger = logging.getLogger(__name__)

SEND_INTERVAL_S = 1.0
RETRY_S = 1.0
RETRY_MAX_S = 30.0
UNKNOWN = "(unknown)"
"""Principal of all failed logins by names that nobody has: anybody can make up many."""
_TOKEN = re.compile(r"rayq2?-.{40,}")
"""A token that somebody gave as a name."""


class AuditTrail(Audit):
    """See the module. `principals()` are those beside the superuser: while there are none, nothing
    is noted. `send(lines)` returns once they are written, or raises RayqError."""

    def __init__(
        self,
        environment: Environment,
        *,
        server: str,
        principals: Callable[[], Collection[str]],
        send: Callable[[list[bytes]], Awaitable[object]],
    ) -> None:
        self._environment = environment
        self._server = server
        self._principals = principals
        self._send = send
        self._lines = AuditLines()
        self._writer: asyncio.Task[None] | None = None
        self._id_prefix = ""
        self._noted = 0
        self._dropped = RateLimitedLogger(logger, logging.ERROR, environment.clock.monotonic)

    # --- events -----------------------------------------------------------------------------

    def denied(self, peer: Peer, request: type[messages.AnyRequest], error: RayqError) -> None:
        """Notes a request that was refused for lack of a right. Its error names the right."""
        self._note("denied", peer, request=request.__name__, what=error.message)

    def login(self, peer: Peer) -> None:
        """Notes a client that has proven a token, or a server that acts for a principal."""
        self._note("login", peer)

    def failed_login(self, host: str, claimed: str) -> None:
        """Notes that somebody claimed to be a principal, and did not prove it."""
        known = self._principals()
        if not known:
            return
        is_known = claimed == SUPERUSER or claimed in known
        shown = "(a token)" if _TOKEN.match(claimed) else claimed
        self._add(
            AuditLine(
                time_ms=self._environment.clock.wall_ms(),
                kind="failed_login",
                principal=claimed if is_known else UNKNOWN,
                address=host,
                what="" if is_known else f"claimed to be {shown!r}",
                server=self._server,
                id=self._next_id(),
            )
        )

    def urls(self, peer: Peer, where: str, *, objects: int, size: int, expires_ms: int) -> None:
        """Notes that a client got URLs of objects of a partition, of `size` bytes together, which
        end at `expires_ms`."""
        what = f"objects of {where}, by URLs that end at {expires_ms}"
        self._note("urls", peer, what=what, objects=objects, size=size)

    def redrive(self, peer: Peer, what: str, *, records: int) -> None:
        """Notes that a client had records of a queue moved or discarded."""
        self._note("redrive", peer, what=what, objects=records)

    def _note(
        self,
        kind: str,
        peer: Peer,
        *,
        request: str = "",
        what: str = "",
        objects: int = 0,
        size: int = 0,
    ) -> None:
        if peer.principal is None and not self._principals():
            return
        self._add(
            AuditLine(
                time_ms=self._environment.clock.wall_ms(),
                kind=kind,
                principal=peer.who,
                address=peer.host,
                client_id=peer.client_id,
                token_id=peer.token_id or "",
                request=request,
                what=what[:WHAT_LENGTH_MAX],
                objects=objects,
                bytes=size,
                server=self._server,
                id=self._next_id(),
            )
        )

    def _next_id(self) -> str:
        if not self._noted:
            self._id_prefix = self._environment.new_id()[:16]
        self._noted += 1
        return f"{self._id_prefix}-{self._noted}"

    # --- writing ----------------------------------------------------------------------------

    def _add(self, line: AuditLine) -> None:
        metrics = self._environment.metrics
        metrics.counter("rayq_audited_events_total", kind=line.kind).value += 1
        metrics.counter("rayq_audit_events_dropped_total", kind=line.kind)  # Counts start at 0.
        self._lines.add(line, self._environment.clock.monotonic())
        self._tell_dropped()
        if self._writer is None or self._writer.done():
            self._writer = self._environment.tasks.spawn(self._write(), "audit-trail")

    def _tell_dropped(self) -> None:
        """Counts and logs what could not be written."""
        dropped = self._lines.dropped
        for kind, count in dropped.items():
            self._environment.metrics.counter(
                "rayq_audit_events_dropped_total", kind=kind
            ).value += count
            self._dropped.say(
                "the audit lacks %d events of kind %s: __audit could not be written for too long",
                *(count, kind),
            )
        dropped.clear()

    async def _write(self) -> None:
        """Sends the lines, until none is left."""
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while self._lines:
            await asyncio.sleep(SEND_INTERVAL_S)
            now_s = self._environment.clock.monotonic()
            due = self._lines.due(now_s, messages.AUDIT_LINES_MAX)
            self._tell_dropped()
            if not due:
                continue
            try:
                await self._send([encode_line(line) for line in due])
            except RayqError as error:
                logger.debug("%s: the audit is not written yet: %s", self._server, error)
                await asyncio.sleep(backoff.next_s())
                continue
            self._lines.written(len(due))
            backoff.reset()

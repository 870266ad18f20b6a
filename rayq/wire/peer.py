"""The other side of a connection to a server, and the gate that decides what it may ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rayq.errors import AuthorizationError, RayqError
from rayq.messages import AnyRequest
from rayq.messages.acls import SUPERUSER
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.authentication import Credentials, Role, ValidToken
from rayq.wire.throttling import Throttle


class Audit(Protocol):
    """Takes note of what is told to the audit. It never waits, and never raises."""

    def denied(self, peer: Peer, request: type[AnyRequest], error: RayqError) -> None:
        """Notes a request that was refused for lack of a right. Its error says which."""

    def login(self, peer: Peer) -> None:
        """Notes a client that has proven that it is a principal or the superuser."""

    def failed_login(self, host: str, claimed: str) -> None:
        """Notes that somebody did not prove to be the principal that was claimed."""

    def urls(self, peer: Peer, where: str, *, objects: int, size: int, expires_ms: int) -> None:
        """Notes that a client got URLs of objects of a partition, of `size` bytes together, which
        end at `expires_ms`."""

    def redrive(self, peer: Peer, what: str, *, records: int) -> None:
        """Notes that a client had records of a queue moved or discarded."""


class NobodyAudits:
    """The audit of a server that has none."""

    def denied(self, peer: Peer, request: type[AnyRequest], error: RayqError) -> None:
        pass

    def login(self, peer: Peer) -> None:
        pass

    def failed_login(self, host: str, claimed: str) -> None:
        pass

    def urls(self, peer: Peer, where: str, *, objects: int, size: int, expires_ms: int) -> None:
        pass

    def redrive(self, peer: Peer, what: str, *, records: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side of one connection: the client or server that sends the requests."""

    role: Role
    broker: int | None
    """The broker id that a server gave in its handshake."""
    address: str
    """The other end of the connection, for people: `host:port`."""
    closed: asyncio.Future[None] = field(compare=False, repr=False)
    """Done when the connection has ended, whichever side ended it."""
    room: AnswerRoom = field(compare=False, repr=False)
    """A handler takes room here before it makes a large answer for a client."""
    principal: str | None = None
    """The principal whose rights the client has. None: a superuser, or a server."""
    token_id: str | None = None
    """Id of the token that the principal has proven. None: a server acts for it."""
    token_key: bytes | None = field(default=None, repr=False)
    """Key that proofs of this token are checked with. A later token may have the same id, and
    another key."""
    client_id: str = ""
    """The name that the client gave itself. Nothing proves it."""
    throttle: Throttle | None = field(default=None, compare=False, repr=False)
    """The quotas of a named principal. None: there are none for a superuser, or a server."""
    audit: Audit = field(default_factory=NobodyAudits, compare=False, repr=False)
    """The audit of the server, for handlers that have something to tell it."""
    token_expires_ms: int | None = None
    """Time by the wall clock at which the token expires. None: never, or there is none."""
    grants: dict[type[AnyRequest], dict[object, object]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Grants of the gate on this connection, by kind of request, for the gate alone."""

    @property
    def host(self) -> str:
        """The address without the port, which ACLs name."""
        return self.address.rpartition(":")[0] or self.address

    @property
    def who(self) -> str:
        """Name, for people, of the client or server that asks."""
        return SUPERUSER if self.principal is None else self.principal


class Gate(Protocol):
    """Decides which principals may connect, and what each may ask for."""

    def credentials_of(self, principal: str) -> Credentials | None:
        """The salt and valid tokens of a principal. None: there is none. May raise a retriable
        RayqError."""

    def valid_tokens_of(self, principal: str) -> Sequence[ValidToken] | None:
        """The valid tokens of a principal as this server knows them, however old that is. None:
        there is no such principal."""

    def check(self, peer: Peer, request: AnyRequest, now_s: float | None = None) -> None:
        """Raises AuthorizationError unless the peer's principal may send the request now, or a
        retriable RayqError while nobody can say. Never called for a superuser or a server.
        `now_s` is the time on the monotonic clock, where the caller has just read it."""


class NobodyKnown:
    """The gate of a server that knows no principals."""

    def credentials_of(self, principal: str) -> Credentials | None:
        return None

    def valid_tokens_of(self, principal: str) -> Sequence[ValidToken] | None:
        return None

    def check(self, peer: Peer, request: AnyRequest, now_s: float | None = None) -> None:
        raise AuthorizationError(f"This server knows no principal {peer.principal!r}.")

"""One connection that a server has accepted: authenticates it, calls the handler with its requests,
and sends the answers.

It takes no more than it can hold: it stops reading where too many requests wait for an answer, or
where the peer takes none.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from rayq.config import ClusterConfig
from rayq.environment import Environment
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    DisconnectedError,
    InvalidRequestError,
    ProtocolError,
    RayqError,
    UnknownServerError,
)
from rayq.messages import REQUESTS, THROTTLED_API, AnyRequest, Done, Ping, Response, Throttled
from rayq.messages.acls import QuotaName
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.authentication import (
    HANDSHAKE_FRAME_BYTES_MAX,
    HANDSHAKE_VERSION,
    NONCE_BYTES,
    Identity,
    Role,
    ServerHandshake,
)
from rayq.wire.certificates import CertificatePrincipals
from rayq.wire.codec import DECODERS, ENCODER, decode, encode_error
from rayq.wire.frames import FLAG_ERROR, FLAG_ONE_WAY, FLAGS_KNOWN, HANDSHAKE_API, Frame
from rayq.wire.handler import Handler, Result
from rayq.wire.held_bytes import HeldBytes
from rayq.wire.peer import Audit, Gate, Peer
from rayq.wire.stream import FrameStream
from rayq.wire.throttling import PARKED_BYTES_MAX, ParkedRequests, Throttle, Throttles
from rayq.wire.turns import Slice, Turns

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
"""A connection that is not authenticated by then, TLS included, is closed."""

REQUEST_BYTES_IN_FLIGHT_MAX = 256 * 1024**2
"""The server reads no further from a connection whose unanswered requests hold more than this."""

CLIENT_HEADER_BYTES_MAX = 4 * 1024**2
"""A client's request with a longer header is refused."""

HEADER_WEIGHT = 32
"""A header of many small values takes this many bytes of memory for each byte when decoded."""

LARGE_HEADER_BYTES = 4096
"""Before a task begins, only a header of this length has used time that counts."""

REQUESTS_PER_TURN = 64
"""After this many requests of one connection the other connections have their turn."""

UNSENT_BYTES_MAX = 64 * 1024**2
"""A client that gets a further answer while it has not taken this many bytes is disconnected."""

UNSENT_TIMEOUT_S = 60.0
"""A client that has taken nearly no bytes of its answers for this long is disconnected."""


class ConnectionOwner(Protocol):
    """The server that has accepted the connection."""

    environment: Environment
    identity: Identity
    handler: Handler
    config: ClusterConfig
    gate: Gate
    audit: Audit
    throttles: Throttles | None
    certificates: CertificatePrincipals | None
    turns: Turns
    held_bytes: HeldBytes

    def authenticated(
        self, connection: AcceptedConnection, role: Role, principal: str | None
    ) -> None:
        """Raises OverloadedError for a client too many. Servers are always let in."""

    def watch_expiry(self) -> None:
        """Looks now and then for tokens that have expired, as long as principals are connected."""

    def disconnected(self, connection: AcceptedConnection) -> None:
        """The connection has ended."""

    def refused(self, message: str, *arguments: object) -> None:
        """Logs that a connection was refused, but seldom: anybody can cause that often."""

    def took(self, api: int, seconds: float) -> None:
        """A request was answered, or refused, this many seconds after its arrival."""

    def failed(self, api: int, error: BaseException) -> None:
        """Counts a request that was answered by an error."""


class AcceptedConnection(FrameStream):
    """See the module."""

    def __init__(self, owner: ConnectionOwner, host: str, give_up: Callable[[], None]) -> None:
        super().__init__(HANDSHAKE_VERSION, HANDSHAKE_FRAME_BYTES_MAX)
        self._owner = owner
        self.address = host
        self._give_up = give_up
        self._handler = owner.handler
        self._clock = owner.environment.clock
        self._requests_max = owner.config.max_requests_in_flight
        self._requests = 0
        self._request_bytes = 0
        self._until_next_turn = REQUESTS_PER_TURN
        self._release_scheduled = False
        self._slice: Slice | None = None
        """The client's use of the loop's time. None: the peer is a server, or not known yet."""
        self._throttle: Throttle | None = None
        self._parked: ParkedRequests | None = None
        """Requests of a named principal that wait for a quota."""
        self._cancellable: dict[asyncio.Task[Any], None] = {}
        self._room = AnswerRoom(self._is_taking)
        self._unsent_timer: asyncio.TimerHandle | None = None
        self._sent_at = self.received_at
        self._peer: Peer | None = None
        self.is_client = False
        """True if the peer has authenticated itself as a client."""
        self._handshake: ServerHandshake | None = None
        self._handshake_timer: asyncio.TimerHandle | None = self._loop.call_later(
            HANDSHAKE_TIMEOUT_S, self._handshake_late
        )

    @property
    def peer(self) -> Peer | None:
        """The authenticated peer. None during the handshake."""
        return self._peer

    @property
    def descriptor(self) -> int:
        """The number of the socket's file descriptor. -1 in a network without descriptors."""
        assert self._transport is not None
        used = self._transport.get_extra_info("socket")
        return -1 if used is None else int(used.fileno())

    def is_idle_since(self, since: float) -> bool:
        return self.is_client and self._requests == 0 and self.received_at < since

    @property
    def requests_in_flight(self) -> int:
        return self._requests

    @property
    def held_bytes(self) -> int:
        """The bytes that the server holds for the peer."""
        parked_bytes = 0 if self._parked is None else self._parked.bytes
        return self.unsent_bytes + self._request_bytes + self._parser.large_bytes + parked_bytes

    @property
    def moved_at(self) -> float:
        """The time at which the last bytes came, or the peer took its answers again, on the loop's
        clock."""
        return max(self.received_at, self._sent_at)

    # --- the handshake --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._ended:
            return
        owner = self._owner
        nonce = owner.environment.token_bytes(NONCE_BYTES)
        certified = None
        if owner.certificates is not None:
            certified = owner.certificates.named_in(transport.get_extra_info("peercert"))
        self._handshake = ServerHandshake(
            owner.identity, nonce, owner.gate.credentials_of, certified
        )

    def _handshake_late(self) -> None:
        self._owner.refused(
            "closed %s: not authenticated within %g s", self.address, HANDSHAKE_TIMEOUT_S
        )
        self.end(None)

    def end(self, cause: BaseException | None) -> None:
        if self._transport is None:
            self._give_up()
        super().end(cause)

    def _take_handshake(self, frame: Frame, handshake: ServerHandshake) -> None:
        if frame.api != HANDSHAKE_API or frame.flags or frame.payload:
            raise ProtocolError(f"{self.address} sent a request before it was authenticated.")
        header = bytes(frame.header)
        try:
            if handshake.hello is None:
                self.write_frame(0, HANDSHAKE_API, 0, handshake.challenge(header))
                return
            accepted = handshake.accept(header)
            self._owner.authenticated(self, handshake.role, handshake.principal)
            self._throttle_client(handshake.principal, handshake.hello.client_id)
        except ProtocolError:
            raise  # Garbage gets no answer.
        except RayqError as error:
            self._owner.refused("refused %s: %s", self.address, error)
            if isinstance(error, AuthenticationError):
                self._owner.audit.failed_login(self.address.rpartition(":")[0], handshake.claimed)
            self.write_frame(FLAG_ERROR, HANDSHAKE_API, 0, encode_error(error))
            self.end_after_writing()
            return
        assert handshake.version is not None
        self.write_frame(0, HANDSHAKE_API, 0, accepted)
        self.flush()
        self.accept(handshake.version, self._owner.config.max_frame_bytes)
        token = handshake.token
        self._peer = Peer(
            handshake.role,
            handshake.hello.broker,
            self.address,
            self._loop.create_future(),
            self._room,
            handshake.principal,
            None if token is None else token.token_id,
            None if token is None else token.key,
            handshake.hello.client_id,
            token_expires_ms=None if token is None else token.expires_ms,
            throttle=self._throttle,
            audit=self._owner.audit,
        )
        self.is_client = handshake.role == "client"
        if handshake.principal is not None:
            self._owner.watch_expiry()
        if self.is_client:
            self._slice = Slice(self._owner.turns, self._clock, self._release)
            self._owner.audit.login(self._peer)
        self._handshake = None
        self._stop_handshake_timer()

    def _throttle_client(self, principal: str | None, client_id: str) -> None:
        """Raises QuotaLimitError."""
        throttles = self._owner.throttles
        if principal is not None and throttles is not None:
            self._throttle = throttles.connect(principal, client_id, self._tell_throttled)
            self._parked = ParkedRequests(
                self._throttle, self._handle_frame, self._release_soon
            )

    def _tell_throttled(self, quota: QuotaName, throttle_s: float) -> None:
        if not self._ended:
            message = Throttled(quota, math.ceil(throttle_s * 1000))
            self.write_frame(0, THROTTLED_API, 0, ENCODER.encode(message))

    def _stop_handshake_timer(self) -> None:
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
            self._handshake_timer = None

    # --- requests -------------------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        peer = self._peer
        if peer is None:
            if self._handshake is not None:
                self._take_handshake(frame, self._handshake)
            return
        if frame.flags & FLAGS_KNOWN & ~FLAG_ONE_WAY:
            raise ProtocolError(f"{self.address} sent an answer where a request was expected.")
        self._until_next_turn -= 1
        if self._until_next_turn <= 0:
            self._until_next_turn = REQUESTS_PER_TURN
            self.hold_reading()
            self._release_soon()
        parked = self._parked
        # Those that are parked stay before this one when the quota is removed.
        if parked is not None and (parked.throttle.limited_by or parked.bytes):
            before_bytes = parked.bytes
            if parked.park(frame):
                self._owner.held_bytes.add(parked.bytes - before_bytes)
                if parked.bytes >= PARKED_BYTES_MAX:
                    self.hold_reading()
                return
        self._handle_frame(frame)

    def _handle_frame(self, frame: Frame) -> None:
        peer = self._peer
        assert peer is not None
        flags, api, correlation, header, payload = frame
        one_way = bool(flags)
        arrived_s = self._clock.monotonic()
        try:
            request = self._read_request(peer, api, header, arrived_s)
            result: Result | Awaitable[Result] = (
                Done() if isinstance(request, Ping) else self._handler(peer, request, payload)
            )
        except Exception as error:
            if not isinstance(error, RayqError):
                logger.exception("%s from %s failed", REQUESTS[api].__name__, peer)
            self._answer_error(api, correlation, one_way, error)
            self._took(api, arrived_s, arrived_s)
            return
        if result is None or isinstance(result, (Response, tuple)):
            self._answer(api, correlation, one_way, result)
            self._took(api, arrived_s, arrived_s)
            return
        request_bytes = len(payload) + HEADER_WEIGHT * len(header)
        self._requests += 1
        self._request_bytes += request_bytes
        if self.is_client:
            self._owner.held_bytes.add(request_bytes)
        # The work of a coroutine is still to come.
        if self._slice is not None and (
            len(header) >= LARGE_HEADER_BYTES or asyncio.isfuture(result)
        ):
            self._slice.used(self._clock.monotonic() - arrived_s)
        if self._is_full:
            self.hold_reading()
        answer = functools.partial(
            self._answer_awaited, request, correlation, one_way, request_bytes, arrived_s, result
        )
        if asyncio.isfuture(result):
            result.add_done_callback(answer)
        else:
            work = result if self._slice is None else self._slice.steps_of(result)
            task = self._owner.environment.tasks.spawn(_outcome(work), REQUESTS[api].__name__)
            if request.ends_with_connection:
                self._cancellable[task] = None
            task.add_done_callback(answer)

    def _took(self, api: int, arrived_s: float, since_s: float) -> None:
        """A request is answered, which has used the loop since `since_s`."""
        now_s = self._clock.monotonic()
        self._owner.took(api, now_s - arrived_s)
        if self._slice is not None:
            self._slice.used(now_s - since_s)
            if self._slice.is_waiting:
                self.hold_reading()
            if self._throttle is not None:
                if self._throttle.limited_by:
                    self._throttle.spent(self._slice.spent_s)
                self._slice.spent_s = 0.0

    def _read_request(
        self, peer: Peer, api: int, header: memoryview, now_s: float
    ) -> AnyRequest:
        kind = REQUESTS.get(api)
        if kind is None:
            raise ProtocolError(
                f"There is no request of kind {api}: this server runs an older rayq, or the "
                "client is not rayq."
            )
        if not kind.sent_by_clients and peer.role != "server":
            raise AuthenticationError(
                f"{kind.__name__} is for the cluster's servers, and {self.address} "
                "connected as a client."
            )
        if self.is_client and len(header) > CLIENT_HEADER_BYTES_MAX:
            raise InvalidRequestError(
                f"{kind.__name__} has {len(header)} bytes beside its payload, and "
                f"{CLIENT_HEADER_BYTES_MAX} are allowed: ask for less at once."
            )
        request: AnyRequest = decode(DECODERS[kind], header, kind.__name__)
        if peer.principal is not None:
            self._owner.gate.check(peer, request, now_s)
        return request

    # --- answers --------------------------------------------------------------------------------

    def _answer_awaited(
        self,
        request: AnyRequest,
        correlation: int,
        one_way: bool,
        request_bytes: int,
        arrived_s: float,
        work: Awaitable[Result],
        done: asyncio.Future[Any],
    ) -> None:
        since_s = self._clock.monotonic()
        api = request.api
        self._requests -= 1
        self._request_bytes -= request_bytes
        self._cancellable.pop(done, None)  # type: ignore[call-overload]
        self._release_soon()
        outcome: Any
        if done.cancelled():
            if asyncio.iscoroutine(work):
                work.close()  # The coroutine may not have begun.
            if self._ended:
                return
            outcome = DisconnectedError("The server stopped while it worked on the request.")
        else:
            outcome = done.exception() or done.result()
        peer = self._peer
        assert peer is not None
        if isinstance(outcome, BaseException) and not isinstance(outcome, RayqError):
            name = REQUESTS[api].__name__
            logger.error("%s from %s failed", name, peer, exc_info=outcome)
        if peer.principal is not None and request.checked_when_answered:
            # Its right may have gone while the request was held. Errors tell something, too.
            try:
                self._owner.gate.check(peer, request, since_s)
            except RayqError as error:
                outcome = error
        if isinstance(outcome, BaseException):
            self._answer_error(api, correlation, one_way, outcome)
        else:
            self._answer(api, correlation, one_way, outcome)
        self._took(api, arrived_s, since_s)

    def _answer(self, api: int, correlation: int, one_way: bool, result: Result) -> None:
        if one_way or self._ended:
            return
        if isinstance(result, tuple):
            response, payload = result
        elif result is not None:
            response, payload = result, b""
        else:
            logger.error("the handler of %s gave no answer", REQUESTS[api].__name__)
            error = UnknownServerError(f"{REQUESTS[api].__name__} was given no answer.")
            self._answer_error(api, correlation, one_way, error)
            return
        try:
            frame_bytes = self.write_frame(0, api, correlation, ENCODER.encode(response), payload)
        except InvalidRequestError as error:
            self._answer_error(api, correlation, one_way, error)
            return
        if self.is_client:
            self._owner.held_bytes.add(frame_bytes)
            if self.is_write_paused and self.unsent_bytes - frame_bytes > UNSENT_BYTES_MAX:
                logger.warning(
                    "disconnected %s: it takes no answers, %d bytes wait for it",
                    self.address,
                    self.unsent_bytes,
                )
                self.end(None)

    def _answer_error(
        self, api: int, correlation: int, one_way: bool, error: BaseException
    ) -> None:
        """Sends the error. A client gets it for a one-way request too: it cannot learn otherwise
        that this is the wrong server. Servers learn that from the metadata."""
        self._owner.failed(api, error)
        # A refusal that hides what it is about has the whole of it as its cause.
        denial = error.__cause__ if isinstance(error.__cause__, AuthorizationError) else error
        if isinstance(denial, AuthorizationError | AuthenticationError) and self._peer is not None:
            self._owner.audit.denied(self._peer, REQUESTS[api], denial)
        if not self._ended and (self.is_client or not one_way):
            self.write_frame(FLAG_ERROR, api, correlation, encode_error(error))

    # --- holding back ---------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return (
            (self._requests >= self._requests_max and self.is_client)
            or self._request_bytes >= REQUEST_BYTES_IN_FLIGHT_MAX
            or self.is_write_paused
            or (self._slice is not None and self._slice.is_waiting)
            or (self._parked is not None and self._parked.bytes >= PARKED_BYTES_MAX)
        )

    def _release_soon(self) -> None:
        if self.is_reading_held and not self._release_scheduled:
            self._release_scheduled = True
            self._loop.call_soon(self._release)

    def _release(self) -> None:
        self._release_scheduled = False
        if not self._is_full:
            self.release_reading()

    def _is_taking(self) -> bool:
        return not self.is_write_paused

    def pause_writing(self) -> None:
        """The peer does not take its answers, so the server stops taking its requests."""
        super().pause_writing()
        self.hold_reading()
        if self._unsent_timer is None and self.is_client:
            self._unsent_timer = self._loop.call_later(UNSENT_TIMEOUT_S, self._unsent_for_long)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._sent_at = self._loop.time()
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
            self._unsent_timer = None
        if not self._ended:
            self._room.grant()
            self._release_soon()

    def _unsent_for_long(self) -> None:
        self._unsent_timer = None
        logger.warning(
            "disconnected %s: it has taken no answers for %g s, %d bytes wait for it",
            self.address,
            UNSENT_TIMEOUT_S,
            self.unsent_bytes,
        )
        self.end(None)

    def buffer_updated(self, nbytes: int) -> None:
        if self._parser.large_bytes and self.is_client:
            self._owner.held_bytes.add(nbytes)
        if self._slice is not None and self._slice.must_wait():
            self.hold_reading()
        super().buffer_updated(nbytes)

    def end_unless_writing(self) -> None:
        """Ends an idle stream: once all is sent, or at once when the peer takes no bytes."""
        if self.is_write_paused:
            self.end(None)
        else:
            self.end_after_writing()

    # --- the end --------------------------------------------------------------------------------

    def stream_ended(self, cause: BaseException | None) -> None:
        self._stop_handshake_timer()
        if self._slice is not None:
            self._slice.end()
        if self._parked is not None:
            self._parked.end()
        self._owner.disconnected(self)
        cancellable, self._cancellable = self._cancellable, {}
        for task in cancellable:
            task.cancel()
        if self._peer is not None and not self._peer.closed.done():
            self._peer.closed.set_result(None)
        if isinstance(cause, ProtocolError):
            self._owner.refused("closed %s: %s", self.address, cause)


async def _outcome(work: Awaitable[Result]) -> Result | Exception:
    """The result of the work, or its exception as a value: an error is an answer, too."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - the peer gets it, and the log has unexpected ones
        return error

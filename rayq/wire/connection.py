"""The client's side of a connection: many requests at once, whose answers come in any order."""

from __future__ import annotations

import asyncio
import builtins
import ssl
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rayq.config import ClusterConfig
from rayq.environment import Buffer, Environment
from rayq.errors import (
    AuthenticationError,
    DisconnectedError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    RayqError,
    TimeoutError,
)
from rayq.messages import THROTTLED_API, AnyRequest, Ping, Request, ResponseT, Throttled
from rayq.wire.authentication import (
    HANDSHAKE_FRAME_BYTES_MAX,
    HANDSHAKE_VERSION,
    NONCE_BYTES,
    ClientHandshake,
    Identity,
)
from rayq.wire.codec import DECODERS, decode, decode_error, encode_request
from rayq.wire.frames import FLAG_ERROR, FLAG_ONE_WAY, HANDSHAKE_API, Frame
from rayq.wire.stream import FrameStream

OPEN_TIMEOUT_S = 5.0
"""TCP, TLS and the handshake must be done within this time."""

PENDING_REQUESTS_MAX = 65_536
"""A connection with this many unanswered requests fails the next with OverloadedError."""

SILENT_PEER_S = 5.0
"""The minimum timeout of a request after which the connection counts as dead, if no byte came from
the peer since the request was sent."""

PING_AFTER_S = 1.0
"""See `Connection.keep_alive`: how long the peer may be silent before it is asked."""

PING_PATIENCE_S = 300.0
"""The maximum time for the answer to that while bytes come: a large batch on a slow link may be
before it."""

TIMER_SLACK_S = 0.001
"""The timers of uvloop have a resolution of a millisecond, and may fire that much too early."""

_LAST_CORRELATION = 2**32 - 1

Answer = tuple[Any, memoryview]
"""The response struct that the request class names, and the payload."""


class _Pending(NamedTuple):
    future: asyncio.Future[Answer]
    kind: type[AnyRequest]
    sent_at: float
    deadline: float
    timeout_s: float
    patience_s: float
    unheard_s: float
    """The time that had not counted when the deadline was set."""


class Connection(FrameStream):
    """One connection to a server, made by `await Connection.open(...)`.

    `request` and `send` write when they are called, so frames leave in the order of the calls,
    whether or not the caller awaits anything in between.
    """

    def __init__(
        self,
        environment: Environment,
        host: str,
        port: int,
        identity: Identity,
        config: ClusterConfig,
        expect_broker: int | None,
        unheard_s: Callable[[], float],
    ) -> None:
        super().__init__(HANDSHAKE_VERSION, HANDSHAKE_FRAME_BYTES_MAX)
        self.host = host
        self.port = port
        self.peer_cluster_id: str | None = None
        self.peer_broker: int | None = None
        self._unheard_s = unheard_s
        self._frame_bytes_max = config.max_frame_bytes
        nonce = environment.token_bytes(NONCE_BYTES)
        self._handshake = ClientHandshake(identity, nonce, expect_broker)
        # An error of the handshake is a value here: asyncio logs exceptions that nobody fetches.
        self._opened: asyncio.Future[RayqError | None] = self._loop.create_future()
        self._is_open = False
        self._closed_because: RayqError | None = None
        self._close_callbacks: list[Callable[[], None]] = []
        self.on_refused: Callable[[Connection, RayqError], None] | None = None
        """Called with the error of a one-way request. It is not known of which request."""
        self._pending: dict[int, _Pending] = {}
        self._correlation = 0
        # One timer for all requests, at the earliest of their deadlines or before it.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._ping_timer: asyncio.TimerHandle | None = None
        self._throttled_until: dict[str, float] = {}
        """See `throttled_s`, by quota."""
        self._on_throttled_less: list[Callable[[], None]] = []

    @classmethod
    async def open(
        cls,
        environment: Environment,
        host: str,
        port: int,
        identity: Identity,
        *,
        config: ClusterConfig | None = None,
        expect_broker: int | None = None,
        unheard_s: Callable[[], float] = lambda: 0.0,
    ) -> Connection:
        """Connects and authenticates, within 5 s. `unheard_s()` is the time so far in which this
        process could hear nobody: it counts for no time-out of a request.

        Raises DisconnectedError (there is no connection, or it broke; `__cause__` is a
        ConnectionRefusedError where no server listens), AuthenticationError, WrongClusterError,
        UnsupportedVersionError, OverloadedError, ProtocolError.
        """
        config = config or ClusterConfig()
        connection = cls(
            environment, host, port, identity, config, expect_broker, unheard_s
        )
        is_opened = False
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await environment.network.connect(host, port, lambda: connection)
                failure = await asyncio.shield(connection._opened)
            if failure is not None:
                raise failure
            is_opened = True
        except builtins.TimeoutError as error:
            raise DisconnectedError(
                f"{host}:{port} did not answer within {OPEN_TIMEOUT_S:g} s: is a rayq server "
                "running there, and reachable?"
            ) from error
        except ssl.SSLError as error:
            raise AuthenticationError(f"TLS with {host}:{port} failed: {error}.") from error
        except OSError as error:
            raise DisconnectedError(f"Cannot connect to {host}:{port}: {error}.") from error
        finally:
            if not is_opened:
                connection.end(None)
        return connection

    # --- for callers ----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the connection ends, or soon when it has ended already."""
        if self.closed:
            self._loop.call_soon(callback)
        else:
            self._close_callbacks.append(callback)

    def request(
        self,
        request: Request[ResponseT],
        payload: Buffer | Sequence[Buffer] = b"",
        *,
        timeout_s: float,
        patience_s: float = 0.0,
    ) -> asyncio.Future[tuple[ResponseT, memoryview]]:
        """Sends a request. The result of the future is `(response, payload)`.

        Until `patience_s` seconds have passed, the request waits on beyond `timeout_s` as long as
        the last byte from the server came less than `timeout_s` ago. So a large answer on a slow
        link is not given up half-way.

        A large payload is not copied: leave it unchanged until the answer. The future raises the
        error that the server answered, DisconnectedError (the outcome is unknown), TimeoutError
        after `timeout_s` seconds (the outcome is unknown), OverloadedError (65,536 requests are
        unanswered), InvalidRequestError (the request is larger than `max_frame_bytes`, or cannot be
        encoded), ProtocolError (the answer cannot be read).
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._closed_because is not None:
            future.set_exception(_again(self._closed_because))
            return future
        if len(self._pending) >= PENDING_REQUESTS_MAX:
            future.set_exception(
                OverloadedError(
                    f"{len(self._pending)} requests to {self.host}:{self.port} are unanswered: "
                    "wait for some of them first."
                )
            )
            return future
        correlation = self._next_correlation()
        try:
            self.write_frame(0, request.api, correlation, encode_request(request), payload)
        except InvalidRequestError as error:
            future.set_exception(error)
            return future
        now = self._loop.time()
        deadline = now + timeout_s
        self._pending[correlation] = _Pending(
            future, type(request), now, deadline, timeout_s, patience_s, self._unheard_s()
        )
        if self._timer is None or deadline < self._timer_at:
            self._set_timer(deadline)
        return future

    def send(self, request: AnyRequest, payload: Buffer | Sequence[Buffer] = b"") -> None:
        """Sends a one-way request, which the server answers only by an error (see `on_refused`).
        Raises DisconnectedError, InvalidRequestError."""
        if self._closed_because is not None:
            raise _again(self._closed_because)
        self.write_frame(FLAG_ONE_WAY, request.api, 0, encode_request(request), payload)

    def throttled_s(self, kind: type[AnyRequest]) -> float:
        """The time for which the server takes no such requests from this client, since it has used
        up a quota. One that is sent all the same waits there, and the wait counts for no
        time-out."""
        return max(self._throttled_until_of(kind) - self._loop.time(), 0.0)

    def _throttled_until_of(self, kind: type[AnyRequest]) -> float:
        untils = self._throttled_until
        return max((untils[quota] for quota in kind.quotas if quota in untils), default=0.0)

    def on_throttled_less(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, when the server says that something is throttled for a shorter
        time than it said before, or when the connection ends."""
        if self.closed:
            self._loop.call_soon(callback)
        else:
            self._on_throttled_less.append(callback)

    def _take_throttled(self, header: memoryview) -> None:
        said = decode(DECODERS[Throttled], header, "Throttled")
        until = self._loop.time() + said.throttle_ms / 1000
        is_less = until < self._throttled_until.get(said.quota, 0.0)
        self._throttled_until[said.quota] = until
        if is_less:
            self._call_throttled_less()

    def _call_throttled_less(self) -> None:
        callbacks, self._on_throttled_less = self._on_throttled_less, []
        for callback in callbacks:
            callback()

    def keep_alive(self) -> None:
        """Makes the connection end within some seconds when the peer is gone without a word, also
        while all its requests may wait for long: one question a second asks for a sign of life,
        where nothing else came. Only servers may ask it."""
        self._ping_timer = self._loop.call_later(PING_AFTER_S, self._ping)

    def _ping(self) -> None:
        self._ping_timer = None
        if self.closed:
            return
        silent_s = self._loop.time() - self.received_at
        if self._pending and silent_s >= PING_AFTER_S - TIMER_SLACK_S:
            answer = self.request(Ping(), timeout_s=SILENT_PEER_S, patience_s=PING_PATIENCE_S)
            answer.add_done_callback(self._pinged)
        else:
            self.keep_alive()

    def _pinged(self, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled():
            answer.exception()  # A time-out of it has ended the connection: see `_expire`.
        if not self.closed:
            self.keep_alive()

    def close(self) -> None:
        """Closes once all is sent. Pending requests fail with DisconnectedError."""
        if not self.closed:
            self._closed_because = DisconnectedError(
                f"The connection to {self.host}:{self.port} was closed on this side."
            )
        self.end_after_writing()

    # --- the protocol ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._ended:
            return
        self.write_frame(0, HANDSHAKE_API, 0, self._handshake.hello())
        self.flush()

    def frame_received(self, frame: Frame) -> None:
        if not self._is_open:
            self._take_handshake(frame)
            return
        pending = self._pending.pop(frame.correlation, None)
        if pending is None or pending.future.done():
            # The answer to a one-way request, or to one that timed out or was cancelled before.
            if frame.correlation == 0 and frame.flags & FLAG_ERROR and self.on_refused is not None:
                self.on_refused(self, decode_error(frame.header))
            elif frame.api == THROTTLED_API:
                self._take_throttled(frame.header)
            return
        future = pending.future
        try:
            if frame.flags & FLAG_ERROR:
                future.set_exception(decode_error(frame.header))
            else:
                decoder = DECODERS[pending.kind.response]
                response = decode(decoder, frame.header, pending.kind.response.__name__)
                future.set_result((response, frame.payload))
        except ProtocolError as error:
            future.set_exception(error)

    def _take_handshake(self, frame: Frame) -> None:
        if frame.api != HANDSHAKE_API:
            raise ProtocolError(
                f"{self.host}:{self.port} sent a message of kind {frame.api} in the handshake."
            )
        header = bytes(frame.header)
        try:
            if frame.flags & FLAG_ERROR:
                raise decode_error(header)
            if self._handshake.version is None:
                answer = self._handshake.answer(header)
                self.write_frame(0, HANDSHAKE_API, 0, answer)
                return
            accepted = self._handshake.finish(header)
        except RayqError as error:
            self.end(error)
            return
        assert self._handshake.version is not None
        self.peer_cluster_id = accepted.cluster_id
        self.peer_broker = accepted.broker
        self.accept(self._handshake.version, self._frame_bytes_max)
        self._is_open = True
        self._opened.set_result(None)

    def stream_ended(self, cause: BaseException | None) -> None:
        if self._closed_because is None:
            self._closed_because = self._reason(cause)
        if not self._opened.done():
            self._opened.set_result(self._closed_because)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        pending, self._pending = self._pending, {}
        for request in pending.values():
            if not request.future.done():
                request.future.set_exception(_again(self._closed_because))
        self._call_throttled_less()
        callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in callbacks:
            callback()

    def _reason(self, cause: BaseException | None) -> RayqError:
        where = f"{self.host}:{self.port}"
        if self._is_open:
            why = f": {cause}" if cause is not None else " by the server"
            return DisconnectedError(f"The connection to {where} was closed{why}.")
        if isinstance(cause, RayqError):
            return cause
        if isinstance(cause, ssl.SSLError):
            return AuthenticationError(f"TLS with {where} failed: {cause}.")
        why = f": {cause}" if cause is not None else ""
        return DisconnectedError(
            f"{where} closed the connection during the handshake{why}. Is it a rayq server, with "
            "TLS on both sides or on none, and not flooded with connections?"
        )

    # --- time -----------------------------------------------------------------------------------

    def _next_correlation(self) -> int:
        while True:
            self._correlation = self._correlation % _LAST_CORRELATION + 1
            if self._correlation not in self._pending:
                return self._correlation

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        """Fails the requests whose deadline has passed, and waits for the next deadline."""
        self._timer = None
        now, unheard_s = self._loop.time(), self._unheard_s()
        is_silent = False
        due = [
            key for key, pending in self._pending.items() if pending.deadline <= now + TIMER_SLACK_S
        ]
        for correlation in due:
            pending = self._pending[correlation]
            longer = max(
                pending.deadline + unheard_s - pending.unheard_s,
                self._throttled_until_of(pending.kind) + pending.timeout_s,
            )
            if longer > now + TIMER_SLACK_S:
                self._pending[correlation] = pending._replace(
                    deadline=longer, unheard_s=unheard_s
                )
                continue
            waited_s = now - pending.sent_at
            until = self.received_at + pending.timeout_s
            if waited_s < pending.patience_s and until > now + TIMER_SLACK_S:
                self._pending[correlation] = pending._replace(deadline=until)
                continue
            del self._pending[correlation]
            is_long = waited_s >= SILENT_PEER_S - TIMER_SLACK_S
            is_silent |= is_long and self.received_at <= pending.sent_at
            if not pending.future.done():
                pending.future.set_exception(
                    TimeoutError(
                        f"{self.host}:{self.port} did not answer {pending.kind.__name__} within "
                        f"{waited_s:.3g} s. It may have been carried out all the same."
                    )
                )
        if is_silent:
            self.end(DisconnectedError("nothing came from the server while requests timed out"))
        elif self._pending:
            self._set_timer(min(pending.deadline for pending in self._pending.values()))


def _again(error: RayqError) -> RayqError:
    """The same error as a new exception, since each raise would add to the traceback of one."""
    return type(error)(error.message)

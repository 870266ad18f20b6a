"""Requests of clients that have used up a quota: they wait in the server, a limited number of bytes
of each connection, while its other requests continue.

A client that heeds what it is told (`messages.Throttled`) sends hardly any such requests. One that
does not, and one that wants no answers, has them parked here, unread. When they are too many, the
server reads nothing more from that connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from rayq.messages import REQUESTS, AnyRequest, Produce
from rayq.messages.acls import QuotaName
from rayq.wire.frames import Frame

PARKED_BYTES_MAX = 15 * 1024**2
"""The server reads no further from a connection for which it has parked this much. With the last
request it holds less than 16 MiB, while requests are not larger than 1 MiB."""
PARKED_FRAME_BYTES = 512
"""Memory of a parked request beside its bytes."""


class Throttle(Protocol):
    """The quotas of the client of one connection."""

    @property
    def limited_by(self) -> Collection[QuotaName]:
        """The rates that limit the client now. A request needs to ask for, and to be charged to,
        none but these: most principals have none, and pay nothing then."""

    def admits(self, kind: type[AnyRequest], size: int) -> bool:
        """Returns whether a request may be handled now, and charges it then."""

    def wait(self, kind: type[AnyRequest], size: int, go: Callable[[], None]) -> None:
        """Calls `go()` once a request may be handled, which is charged then: never before this
        returns, and after those that wait for the same quota already."""

    def most(self, name: QuotaName, units: float) -> float:
        """The units that one request should take at most, of those that it asks for."""

    async def acquire(self, name: QuotaName, units: float) -> None:
        """Waits while the quota is used up, then takes units of it. Raises DisconnectedError once
        the connection has ended."""

    def use(self, name: QuotaName, units: float) -> None:
        """Takes units that have been used, or with a negative number gives them back."""

    def spent(self, seconds: float) -> None:
        """Takes note that the client has used this much of the process's time."""

    def throttled_s(self, kind: type[AnyRequest]) -> float:
        """The time for which the client should send no more of these requests."""

    def end(self) -> None:
        """Ends with the connection: nothing waits for it any longer, or is charged."""


class Throttles(Protocol):
    """The quotas of all clients of a server."""

    def connect(
        self, principal: str, client_id: str, tell: Callable[[QuotaName, float], None]
    ) -> Throttle:
        """Takes a new connection. `tell(name, seconds)` tells the client to send no more of what
        this quota limits for this time. Raises QuotaLimitError."""


class ParkedRequests:
    """The requests of one connection that wait for a quota, in the order of their arrival.
    `handle(frame)` handles one whose turn has come, `release()` is called when there is room
    again."""

    def __init__(
        self, throttle: Throttle, handle: Callable[[Frame], None], release: Callable[[], None]
    ) -> None:
        self.throttle = throttle
        self._handle = handle
        self._release = release
        # A produce request may wait while fetches continue, but the order of each stays.
        self._lines: dict[bool, deque[Frame]] = {True: deque(), False: deque()}
        self._has_ended = False
        self.bytes = 0
        """The bytes that are parked. From `PARKED_BYTES_MAX` on no more should come."""

    def park(self, frame: Frame) -> bool:
        """Returns whether the request has to wait: then it is handled later."""
        kind = REQUESTS.get(frame.api)
        if kind is None or not kind.quotas:
            return False
        line = self._lines[kind is Produce]
        size = len(frame.header) + len(frame.payload)
        if not line and self.throttle.admits(kind, size):
            return False
        # The parser uses the memory of headers again.
        line.append(frame._replace(header=memoryview(bytes(frame.header))))
        self.bytes += size + PARKED_FRAME_BYTES
        if len(line) == 1:
            self._wait(line)
        return True

    def _wait(self, line: deque[Frame]) -> None:
        frame = line[0]
        size = len(frame.header) + len(frame.payload)
        self.throttle.wait(REQUESTS[frame.api], size, lambda: self._go(line))

    def _go(self, line: deque[Frame]) -> None:
        if self._has_ended:
            return
        frame = line.popleft()
        self.bytes -= len(frame.header) + len(frame.payload) + PARKED_FRAME_BYTES
        if line:
            self._wait(line)
        self._handle(frame)
        self._release()

    def end(self) -> None:
        """Drops all of them, as the connection has ended."""
        self._has_ended = True
        self.throttle.end()
        for line in self._lines.values():
            line.clear()
        self.bytes = 0

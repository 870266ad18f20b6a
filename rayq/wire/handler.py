"""The handler of a server: the function that is called with each request, and its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rayq.environment import Buffer
from rayq.messages import AnyRequest, Response
from rayq.wire.peer import Peer

Payload = Buffer | Sequence[Buffer]
Result = Response | tuple[Response, Payload] | None

Handler = Callable[[Peer, AnyRequest, memoryview], "Result | Awaitable[Result]"]
"""The server calls the handler with each request, in the order of arrival on its connection. The
handler returns the answer, or an awaitable of it: a future, or a coroutine, which runs in a task of
`environment.tasks`. When the connection ends, the server cancels the task of a request that
`ends_with_connection`; other tasks run on. The payload is writable and belongs to the handler. A
RayqError that the handler raises becomes an error answer. Any other exception is logged and becomes
an UnknownServerError."""

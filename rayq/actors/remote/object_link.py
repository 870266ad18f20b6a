"""The connection from a replica process to the object server of its node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from rayq import messages
from rayq.environment import Address, Buffer
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    RayqError,
    RemoteDamagedError,
    RemoteMissingError,
    RemoteStorageError,
    StorageError,
)
from rayq.storage.remote.listing import pages
from rayq.wire.pool import ConnectionPool

REQUEST_TIMEOUT_S = 120.0
"""Timeout of a request. The object server has a deadline for each request to the store, and answers
before this."""
UPLOADS_AT_ONCE = 3
"""Maximum number of concurrent uploads of a process, which is what the object server takes at once:
others wait here, where waiting is not a failure."""
_ANSWERS = (
    RemoteStorageError,
    RemoteMissingError,
    RemoteDamagedError,
    CorruptBatchError,
    StorageError,
    InvalidRequestError,
)
"""Errors that the object server itself answers. Any other error happened on the way to it."""
ListedObject = tuple[str, int, int]
"""`(name, bytes, last modified in ms)`."""
_CHANGES = (messages.StoreRecords, messages.PutBlob, messages.DeleteObjects)


class ObjectLink:
    """See the module. A process has one, which its replicas share."""

    def __init__(self, pool: ConnectionPool, cluster_id: str) -> None:
        self._pool = pool
        self.cluster_id = cluster_id
        self.endpoint: Address | None = None
        """Address of the object server, from the broker's last heartbeat. None: there is none."""
        self.halt: str | None = None
        """The reason that objects may be read, but neither stored nor deleted. None: they may."""
        self.backlog_bytes = 0
        """Bytes on this node's disk that wait to be uploaded to the object store."""
        self.uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)

    def update(
        self, endpoint: Address | None, halt: str | None = None, backlog_bytes: int = 0
    ) -> None:
        """Takes what the broker says of the object server."""
        self.endpoint, self.halt, self.backlog_bytes = endpoint, halt, backlog_bytes

    async def ask(
        self,
        request: messages.Request[messages.ResponseT],
        payload: Buffer | Sequence[Buffer] = b"",
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> tuple[messages.ResponseT, memoryview]:
        """Returns `(response, payload)`. Raises the errors of the request, and RemoteStorageError
        if the object server does not answer: then the outcome is unknown."""
        if self.endpoint is None:
            raise RemoteStorageError(
                "This node has no object server now: it is starting. `rayq storage status` tells "
                "more."
            )
        if self.halt is not None and isinstance(request, _CHANGES):
            raise RemoteStorageError(f"No objects are stored or deleted: {self.halt}.")
        try:
            return await self._pool.request(
                *self.endpoint, request, payload, timeout_s=timeout_s
            )
        except _ANSWERS:
            raise
        except RayqError as error:
            raise RemoteStorageError(f"The object server did not answer: {error}") from error


def list_objects(objects: ObjectLink, prefix: str) -> AsyncIterator[Sequence[ListedObject]]:
    """Lists the objects below `prefix`, page by page. Raises as `ObjectLink.ask`, and
    RemoteListError."""

    is_over = False

    async def list_page(after: str) -> Sequence[ListedObject]:
        nonlocal is_over
        if is_over:
            return ()
        answer, _ = await objects.ask(messages.ListObjects(prefix, after))
        is_over = answer.next_after is None
        return answer.objects

    return pages(list_page, prefix, "The object server")

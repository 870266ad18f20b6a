"""The producers, consumers and queues for threads that one `Cluster` object has made, and that are
closed with it."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from rayq.client.background import background_loop
from rayq.client.consuming.consumer import Consumer
from rayq.client.producing.producer import Producer
from rayq.client.queues.queue import Queue
from rayq.errors import ConcurrentUseError, RayqError


class OpenClients:
    """A registry of objects that are closed with their cluster. It does not keep alive an object
    that the user drops."""

    def __init__(self) -> None:
        self._clients: weakref.WeakSet[Producer[Any, Any] | Consumer[Any, Any] | Queue] = (
            weakref.WeakSet()
        )

    def add(self, client: Producer[Any, Any] | Consumer[Any, Any] | Queue) -> None:
        self._clients.add(client)

    def close_all(self) -> RayqError | None:
        """Closes all consumers and queues, then all producers, because a consumer's callbacks may
        send at its end. Returns the first error."""
        first_error: RayqError | None = None
        clients = list(self._clients)
        for consumer in (client for client in clients if isinstance(client, Consumer)):
            try:
                try:
                    consumer.close()
                except ConcurrentUseError:  # Another thread polls it.
                    consumer.abandon()
            except RayqError as error:
                first_error = first_error or error
        for queue in (client for client in clients if isinstance(client, Queue)):
            try:
                queue.close()
            except RayqError as error:
                first_error = first_error or error
        # All at once: each takes as long as its records may, if no broker answers.
        closing = [client.closing() for client in clients if isinstance(client, Producer)]

        async def close_producers() -> list[BaseException | None]:
            return await asyncio.gather(*closing, return_exceptions=True)

        if closing:
            for outcome in background_loop().run(close_producers()):
                if isinstance(outcome, RayqError):
                    first_error = first_error or outcome
                elif outcome is not None:
                    raise outcome
        return first_error

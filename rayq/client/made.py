"""The producers, consumers and queues for threads that one `Cluster` object has made."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from rayq.client.background import background_loop
from rayq.client.consuming.consumer import Consumer
from rayq.client.producing.producer import Producer
from rayq.client.queues.queue import Queue
from rayq.errors import ConcurrentUseError, RayqError


class Made:
    """A registry of objects that are closed with their cluster. It does not keep alive an object
    that the user drops."""

    def __init__(self) -> None:
        self._made: weakref.WeakSet[Producer[Any, Any] | Consumer[Any, Any] | Queue] = (
            weakref.WeakSet()
        )

    def add(self, made: Producer[Any, Any] | Consumer[Any, Any] | Queue) -> None:
        self._made.add(made)

    def close_all(self) -> RayqError | None:
        """Closes all consumers and queues, then all producers, because a consumer's callbacks may
        send at its end. Returns the first error."""
        first_error: RayqError | None = None
        made = list(self._made)
        for consumer in (closable for closable in made if isinstance(closable, Consumer)):
            try:
                try:
                    consumer.close()
                except ConcurrentUseError:  # Another thread polls it.
                    consumer.abandon()
            except RayqError as error:
                first_error = first_error or error
        for queue in (closable for closable in made if isinstance(closable, Queue)):
            try:
                queue.close()
            except RayqError as error:
                first_error = first_error or error
        # All at once: each takes as long as its records may, if no broker answers.
        closing = [closable.closing() for closable in made if isinstance(closable, Producer)]

        async def close_producers() -> list[BaseException | None]:
            return await asyncio.gather(*closing, return_exceptions=True)

        if closing:
            for outcome in background_loop().run(close_producers()):
                if isinstance(outcome, RayqError):
                    first_error = first_error or outcome
                elif outcome is not None:
                    raise outcome
        return first_error

"""The user's handler in one consumer of a pool: how it is made, called and closed.

A handler may raise anything, and may be a function, a coroutine function or a class, of which each
consumer makes one instance.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any, cast

from rayq.client.consumer_pool import Handler
from rayq.environment import Threads
from rayq.errors import HandlerError
from rayq.records import Outgoing

logger = logging.getLogger(__name__)

ERROR_MESSAGE_CHARACTERS_MAX = 1_000
"""Of a handler's error, in the headers of a dead letter and in a status."""


class PoolHandler:
    """A coroutine function runs on the event loop, everything else in `threads`."""

    def __init__(
        self, threads: Threads, load: Callable[[], Handler], *, exactly_once: bool = False
    ) -> None:
        """`load` may take its time, and may raise HandlerError. `threads` is one thread: what a
        handler opens in its first call, the others find in the same thread."""
        self._threads = threads
        self._load = load
        self._outgoing_of = outgoing_of if exactly_once else refuse_outgoing
        self._handler: Handler | None = None

    async def make(self) -> None:
        """Raises HandlerError."""
        self._handler = await self._threads.run(_made, self._load)

    async def call(self, given: Any) -> list[Outgoing] | BaseException:
        """Returns what is to be sent, or the error that the handler raised."""
        assert self._handler is not None
        if is_async(self._handler):
            return await _awaited(self._handler, given, self._outgoing_of)
        return await self._threads.run(_called, self._handler, given, self._outgoing_of)

    async def close(self) -> None:
        """Calls `close` of an instance that has it; an error of it is logged."""
        await self._threads.run(_close, self._handler)


def is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - it is known to be callable
    )


def error_message(error: BaseException) -> str:
    """At most `ERROR_MESSAGE_CHARACTERS_MAX` characters that can be encoded."""
    try:
        text = str(error)
    except Exception as failed:  # noqa: BLE001 - a user's class may do anything
        text = f"(its message could not be made: {type(failed).__qualname__})"
    return text[:ERROR_MESSAGE_CHARACTERS_MAX].encode(errors="replace").decode()


def described(error: BaseException) -> str:
    """Class, message, and the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__qualname__}: {error_message(error)}{where}"


# --- what a handler returns -----------------------------------------------------------------------

OutgoingOf = Callable[[Any], list[Outgoing]]


def outgoing_of(result: Any) -> list[Outgoing]:
    """What a handler of a pool with exactly_once has returned. Raises TypeError, and what an
    iterator raises."""
    if result is None:
        return []
    if isinstance(result, Outgoing):
        return [result]
    found = list(result) if isinstance(result, Iterable) else [result]
    for one in found:
        if not isinstance(one, Outgoing):
            raise TypeError(
                "with exactly_once the handler returns an Outgoing, an iterable of them, or None, "
                f"not {type(one).__qualname__}"
            )
    return found


def refuse_outgoing(result: Any) -> list[Outgoing]:
    """The same without exactly_once: nothing is sent. Raises TypeError."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError("the handler returned a generator, of which nothing has run: no yield")
    first = result[0] if isinstance(result, list | tuple) and result else result
    if isinstance(first, Outgoing):
        raise TypeError(
            "the handler returned an Outgoing, which this pool does not send: start it with "
            "exactly_once=True, or send by a producer of your own and return nothing"
        )
    return []


# --- in a thread ----------------------------------------------------------------------------------


def _made(load: Callable[[], Handler]) -> Handler:
    """Raises HandlerError."""
    handler = load()
    if not inspect.isclass(handler):
        return handler
    try:
        return cast(Callable[[], Handler], handler)()
    except BaseException as error:
        raise HandlerError(
            f"{handler.__qualname__}(), the pool's handler, could not be made: {described(error)}"
        ) from error


def _close(handler: Handler | None) -> None:
    close = getattr(handler, "close", None)
    if callable(close) and not inspect.isfunction(handler):
        try:
            close()
        except BaseException:  # a user's method may raise anything
            logger.exception("close() of the pool's handler failed")


def _called(
    handler: Handler, given: Any, outgoing: OutgoingOf
) -> list[Outgoing] | BaseException:
    """The error is returned, because a future cannot carry every error, and a SystemExit would end
    the event loop that waits for the future."""
    try:
        result = handler(given)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError(
                "the handler returned an awaitable: make it a coroutine function (async def)"
            )
        return outgoing(result)
    except BaseException as error:  # noqa: BLE001 - a user's handler may raise anything
        return error


# --- on the event loop ----------------------------------------------------------------------------


async def _awaited(
    handler: Handler, given: Any, outgoing: OutgoingOf
) -> list[Outgoing] | BaseException:
    """Also a CancelledError of its own. A handler that is cancelled with its consumer has not
    handled the batch, however it ended."""
    result: list[Outgoing] | BaseException
    try:
        result = outgoing(await handler(given))
    except GeneratorExit:  # the loop itself is gone
        raise
    except BaseException as raised:  # noqa: BLE001 - a user's handler may raise anything
        result = raised
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from (result if isinstance(result, BaseException) else None)
    return result

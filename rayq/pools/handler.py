"""The user's handler in one consumer of a pool: how it is made, called and closed.

A handler may raise anything, and may be a function, a coroutine function or a class, of which each
consumer makes one instance.
"""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any, cast

from rayq.client.callbacks import outcome_of
from rayq.client.consumer_pool import Handler
from rayq.environment import Threads
from rayq.errors import HandlerError
from rayq.records import Outgoing
from rayq.user_functions import call, check_ran, is_awaitable, is_coroutine_function, told

logger = logging.getLogger(__name__)

ERROR_MESSAGE_CHARACTERS_MAX = 1_000
"""Maximum length of a handler's error, in the headers of a dead letter and in a status."""


class PoolHandler:
    """The handler of one consumer. A coroutine function runs on the event loop, everything else in
    `threads`; an awaitable that it returns is awaited on the loop."""

    def __init__(
        self, threads: Threads, load: Callable[[], Handler], *, exactly_once: bool = False
    ) -> None:
        """`load` may take time, and may raise HandlerError. `threads` is one thread, so that
        objects that a handler opens in its first call stay in the thread of the later calls."""
        self._threads = threads
        self._load = load
        self._outgoing_of = outgoing_of if exactly_once else refuse_outgoing
        self._handler: Handler | None = None

    async def make(self) -> None:
        """Makes the handler. Raises HandlerError."""
        self._handler = await self._threads.run(_made, self._load)

    async def call(self, given: Any) -> list[Outgoing] | BaseException:
        """Calls the handler. Returns the records to send, or the error that it raised."""
        assert self._handler is not None
        if is_coroutine_function(self._handler):
            result, error = call(self._handler, given)  # This only makes the coroutine.
        else:
            result, error = await self._threads.run(self._called, self._handler, given)
        if error is None and is_awaitable(result):
            result, error = await outcome_of(result)
            if error is None:
                result, error = call(self._outgoing_of, result)
        return result if error is None else error

    def _called(self, handler: Handler, given: Any) -> tuple[Any, BaseException | None]:
        """Calls the handler in a thread, where an iterator that it returned runs as well."""
        result, error = call(handler, given)
        if error is not None or is_awaitable(result):
            return result, error
        return call(self._outgoing_of, result)

    async def close(self) -> None:
        """Calls `close` of an instance that has it; its error is logged."""
        close = getattr(self._handler, "close", None)
        if not callable(close) or inspect.isfunction(self._handler):
            return
        result, error = await self._threads.run(call, close)
        if error is None and is_awaitable(result):
            result, error = await outcome_of(result)
        if error is None:
            _, error = call(check_ran, "close()", result)
        if error is not None:
            logger.error("close() of the pool's handler failed: %s", told(error), exc_info=error)


def error_message(error: BaseException) -> str:
    """The message of an error: at most `ERROR_MESSAGE_CHARACTERS_MAX` characters that can be
    encoded."""
    try:
        text = str(error)
    except BaseException as failed:  # noqa: BLE001 - a user's class may do anything
        text = f"(its message could not be made: {type(failed).__qualname__})"
    return text[:ERROR_MESSAGE_CHARACTERS_MAX].encode(errors="replace").decode()


def described(error: BaseException) -> str:
    """The class and message of an error, and the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__qualname__}: {error_message(error)}{where}"


# --- what a handler returns -----------------------------------------------------------------------

OutgoingOf = Callable[[Any], list[Outgoing]]


def outgoing_of(result: Any) -> list[Outgoing]:
    """The records that a handler of a pool with exactly_once has returned. Raises TypeError,
    HandlerError, and the errors of an iterator."""
    if result is None:
        return []
    if isinstance(result, Outgoing):
        return [result]
    if is_awaitable(result):
        check_ran("The handler", result)
    found = list(result) if isinstance(result, Iterable) else [result]
    for item in found:
        if not isinstance(item, Outgoing):
            raise TypeError(
                "with exactly_once the handler returns an Outgoing, an iterable of them, or None, "
                f"not {type(item).__qualname__}"
            )
    return found


def refuse_outgoing(result: Any) -> list[Outgoing]:
    """Checks the result of a handler without exactly_once: nothing is sent. Raises TypeError,
    HandlerError."""
    check_ran("The handler", result)
    first = result[0] if isinstance(result, list | tuple) and result else result
    if isinstance(first, Outgoing):
        raise TypeError(
            "the handler returned an Outgoing, which this pool does not send: start it with "
            "exactly_once=True, or send by a producer of your own and return nothing"
        )
    return []


# --- in a thread ----------------------------------------------------------------------------------


def _made(load: Callable[[], Handler]) -> Handler:
    """Makes a handler. Raises HandlerError."""
    handler = load()
    if not inspect.isclass(handler):
        return handler
    try:
        return cast(Callable[[], Handler], handler)()
    except BaseException as error:
        raise HandlerError(
            f"{handler.__qualname__}(), the pool's handler, could not be made: {described(error)}"
        ) from error

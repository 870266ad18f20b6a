"""Calls of users' functions whose errors stay theirs: they end no loop, and cancel nobody."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from rayq.errors import HandlerError
from rayq.user_functions import call, check_ran, close_unrun, is_awaitable, told

CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
"""Errors that Python would misinterpret if a user's function raised them by itself: as the end of
an iteration, or of the calling task."""


async def outcome_of(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Awaits the result of a user's function in a new task; returns its result, or the error that
    it raised, including a CancelledError of its own. If the caller is cancelled, the task is
    cancelled and waited for, and CancelledError is raised, however the task ended."""
    caller = asyncio.current_task()
    assert caller is not None
    before = caller.cancelling()
    try:
        outcome = await asyncio.get_running_loop().create_task(_caught(work))
    except asyncio.CancelledError as error:  # before its first step
        close_unrun(work)
        outcome = None, error
    if caller.cancelling() > before:
        raise asyncio.CancelledError from outcome[1]
    return outcome


async def _caught(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Awaits, and returns an error as a value: a task that raises SystemExit ends its loop, and a
    GeneratorExit would close the code that awaits the task."""
    try:
        return await work, None
    except BaseException as error:
        if ends_program(error):
            raise
        return None, error


def call_here(function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Does the same as `call`, in a thread that may be interrupted."""
    result, error = call(function, *arguments)
    if error is not None and ends_program(error):
        raise error
    return result, error


def ends_program(error: BaseException) -> bool:
    """Returns whether an error that came out of a user's function is meant for the program: a
    signal handler raised it, such as that of Ctrl+C. This happens only in the main thread, at any
    point. A KeyboardInterrupt or SystemExit that the function raised is its own."""
    if not isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True  # Python's own handler leaves no trace; `asyncio.run` has another.
    functions = [
        handler.func if isinstance(handler, functools.partial) else handler for handler in handlers
    ]
    codes = {
        code for function in functions if (code := getattr(function, "__code__", None)) is not None
    }
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def call_callback(name: str, callback: Any, *arguments: Any) -> Any:
    """Calls a user's callback in the middle of a call by the user; returns its result and raises
    its errors. Raises HandlerError instead of errors that Python would misinterpret."""
    try:
        return callback(*arguments)
    except CONTROL_FLOW as error:
        raise raised_error(name, error) from error


async def await_callback(name: str, waiting: Awaitable[Any]) -> None:
    """Awaits the result of a callback on an event loop, with the same errors. Cancelled, it cancels
    the result."""
    result, error = await outcome_of(waiting)
    if isinstance(error, CONTROL_FLOW):
        raise raised_error(name, error) from error
    if error is not None:
        raise error
    check_ran(name, result, may_go_on=True)


async def finish_callback(name: str, result: object) -> None:
    """Awaits the result of a callback, if it is an awaitable. Raises HandlerError if it has not
    run."""
    if is_awaitable(result):
        assert isinstance(result, Awaitable)
        await await_callback(name, result)
    else:
        check_ran(name, result)


def raised_error(name: str, error: BaseException) -> HandlerError:
    return HandlerError(f"{name} raised {told(error)}")

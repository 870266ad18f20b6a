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
"""What Python takes for something else, where a user's function raises it by itself: for the end of
an iteration, or of the task that calls."""


async def outcome_of(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Awaits what a user's function returned; gives its result, or the error that it raised, also a
    CancelledError of its own. It runs as a task of its own. Where the caller is cancelled, that is
    cancelled, and waited for: however it ends then, CancelledError is raised."""
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
    """The error is returned: a task that raises SystemExit ends its loop, and a GeneratorExit would
    close whoever awaits the task."""
    try:
        return await work, None
    except BaseException as error:
        if ends_program(error):
            raise
        return None, error


def call_here(function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """As `call`, in a thread that may be interrupted."""
    result, error = call(function, *arguments)
    if error is not None and ends_program(error):
        raise error
    return result, error


def ends_program(error: BaseException) -> bool:
    """Whether an error that came out of a user's function is meant for the program: what a signal
    handler raised, such as that of Ctrl+C. That comes in the main thread only, in the middle of
    anything. A KeyboardInterrupt or SystemExit that the function raised is its own."""
    if not isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in handlers:
        return True  # Python's own handler leaves no trace. In `asyncio.run` there is another.
    functions = [one.func if isinstance(one, functools.partial) else one for one in handlers]
    codes = {code for one in functions if (code := getattr(one, "__code__", None)) is not None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def call_callback(name: str, callback: Any, *arguments: Any) -> Any:
    """Calls a user's callback in the middle of a call of the user's, which raises what it raises;
    returns what it returned. Raises HandlerError instead of what Python would take for something
    else."""
    try:
        return callback(*arguments)
    except CONTROL_FLOW as error:
        raise raised_error(name, error) from error


async def await_callback(name: str, waiting: Awaitable[Any]) -> None:
    """The same for what a callback returned, on an event loop. Cancelled, it cancels that."""
    result, error = await outcome_of(waiting)
    if isinstance(error, CONTROL_FLOW):
        raise raised_error(name, error) from error
    if error is not None:
        raise error
    check_ran(name, result, may_go_on=True)


async def finish_callback(name: str, result: object) -> None:
    """Awaits what a callback returned, if that is an awaitable. Raises HandlerError where it has
    not run."""
    if is_awaitable(result):
        assert isinstance(result, Awaitable)
        await await_callback(name, result)
    else:
        check_ran(name, result)


def raised_error(name: str, error: BaseException) -> HandlerError:
    return HandlerError(f"{name} raised {told(error)}")

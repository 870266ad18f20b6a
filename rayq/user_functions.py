"""The functions that users give to rayq: whether a call of one has done its work, and how errors
name them.

Python calls a coroutine function, or a function with `yield`, without running a line of it. So a
call that returns an awaitable has done nothing until that is awaited, and one that returns a
generator has done nothing at all. `check_function` refuses what is known to be of such a kind, and
`check_ran` looks at what comes back: only a lambda, a decorated function or an object with
`__call__` gets so far.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from types import BuiltinFunctionType, CoroutineType, FunctionType, MethodType
from typing import Any

from rayq.errors import HandlerError

_NOT_PLAIN = (
    inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_GENERATOR
    | inspect.CO_ASYNC_GENERATOR
)
LAZY: tuple[type, ...] = (
    Generator,
    AsyncGenerator,
    map,
    filter,
    zip,
    enumerate,
    type(iter(int, None)),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
    type(contextlib.contextmanager(iter)([])),
    type(contextlib.asynccontextmanager(iter)([])),  # type: ignore[arg-type]
)
"""Types that run nothing until somebody iterates over them, or enters them. Not every iterator:
files and the cursors of databases come back from work that is done."""
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
_COLLECTIONS = (list, tuple, set, frozenset, dict)
_LOOKED_AT_MAX = 100
"""The maximum number of items of a returned collection that are checked."""


def name_of(function: object) -> str:
    """The module and the qualified name of a function."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else str(name)


def told(error: BaseException) -> str:
    """The class and the text of an error that a user's function raised. Ends in a full stop."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - a user's class may do anything
        text = ""
    name = type(error).__qualname__
    return (f"{name}: {text}" if text else name).removesuffix(".") + "."


# --- before a call --------------------------------------------------------------------------------


def is_coroutine_function(function: object) -> bool:
    """Returns whether a call is known to return a coroutine: also for a partial, and for an object
    or a class with such a `__call__`."""
    return any(inspect.iscoroutinefunction(body) for body in _bodies(function))


def makes_generator(function: object) -> bool:
    """Returns whether a call is known to return a generator, or an async one. For the kinds of
    callables see `is_coroutine_function`."""
    return any(
        inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body)
        for body in _bodies(function)
    )


def _whole(function: Any) -> Any:
    """The function that a partial calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _bodies(function: object) -> Iterator[Any]:
    """The functions that a call may run."""
    function = _whole(function)
    yield function
    kind = function if inspect.isclass(function) else type(function)
    yield getattr(kind, "__call__", None)  # noqa: B004 - not to learn whether it is callable


def check_function(
    what: str, function: Any, *, is_awaited: bool = False, instead: str = ""
) -> None:
    """Checks a function that is called for what it does. `what` begins the error's sentence, such
    as "on_delivery"; `instead` ends it, and says what takes coroutine functions. `is_awaited`: this
    does. Raises HandlerError."""
    bare = function.__func__ if type(function) is MethodType else function
    if type(bare) is FunctionType and not bare.__code__.co_flags & _NOT_PLAIN:
        return
    if not callable(function):
        raise HandlerError(f"{what} has to be a function, not {type(function).__name__}.")
    if inspect.isclass(made := _whole(function)):
        raise HandlerError(
            f"{what} has to be a function, and a call of class {name_of(made)} only makes an "
            "instance: give an instance whose __call__ does the work."
        )
    check_kind(what, function, is_awaited=is_awaited, instead=instead)


def check_kind(
    what: str, function: object, *, is_awaited: bool = False, instead: str = ""
) -> None:
    """Like `check_function`, for a value that is known to be callable, and may be a class."""
    if makes_generator(function):
        raise HandlerError(
            f"{what} {name_of(function)} makes a generator, of which nothing would run: do the "
            "work without yield."
        )
    if not is_awaited and is_coroutine_function(function):
        raise HandlerError(
            f"{what} {name_of(function)} is a coroutine function, and has to be a plain function "
            f"here, where nobody awaits it.{instead and ' '}{instead}"
        )


# --- after a call ---------------------------------------------------------------------------------


def call(function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """The result of a call, or the error that it raised, whatever that is. For threads that nobody
    interrupts: not for the main thread."""
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        return None, error


def is_awaitable(result: object) -> bool:
    """Returns whether the result of a function must be awaited."""
    return type(result) is CoroutineType or (result is not None and inspect.isawaitable(result))


def check_ran(what: str, result: object, *, may_go_on: bool = False) -> None:
    """Checks the result of a function that is called for its effect. Raises HandlerError where
    that, or an item of it, shows that it has not done it. `may_go_on`: nobody counts on it, so it
    may be a future, which continues by itself."""
    if result is None:
        return
    if isinstance(result, _FUNCTIONS):
        raise HandlerError(
            f"{what} returned a function ({name_of(result)}), which nobody calls: call it, or take "
            "it for the handler itself."
        )
    if (why := _unrun(result, may_go_on=may_go_on)) is not None:
        close_unrun(result)
        raise HandlerError(f"{what} returned {why}")
    items = list(_items(result))
    for item in items:
        if (why := _unrun(item, may_go_on=may_go_on)) is not None:
            for unrun in items:
                close_unrun(unrun)
            raise HandlerError(f"{what} returned a {type(result).__name__} with {why}")


def _unrun(result: object, *, may_go_on: bool) -> str | None:
    """Says of a result that has not run, or not ended, what it is and what to do instead."""
    is_future = hasattr(type(result), "add_done_callback")
    if may_go_on and is_future:
        return None
    name = type(result).__name__
    if is_awaitable(result):
        kind = "an awaitable"
    elif isinstance(result, LAZY):
        return f"a {name}, of which nothing has run: do the work without yield."
    elif is_future or (not may_go_on and _continues_by_itself(result)):
        kind = "a future" if is_future else "work that has not ended"
    else:
        return None
    return (
        f"{kind} ({name}), which nobody awaits here: do the work, or wait for its result, before "
        "it returns."
    )


def _continues_by_itself(result: Any) -> bool:
    """Returns whether it is a thread or a process that continues by itself, or was not started yet.
    It is recognised by its methods: `core`, which knows no threads, uses this module."""
    kind = type(result)
    if hasattr(kind, "is_alive") and hasattr(kind, "join"):
        return getattr(result, "ident", None) is None or bool(result.is_alive())
    return hasattr(kind, "communicate") and hasattr(kind, "poll") and result.poll() is None


def _items(result: object) -> Iterator[object]:
    """The first items of a collection."""
    if not isinstance(result, _COLLECTIONS):
        return iter(())
    items: Iterable[object] = result.values() if isinstance(result, dict) else result
    return itertools.islice(items, _LOOKED_AT_MAX)


def close_unrun(result: object) -> None:
    """Has Python not complain of a coroutine that was never awaited: an error tells of it."""
    if inspect.iscoroutine(result) and inspect.getcoroutinestate(result) == inspect.CORO_CREATED:
        result.close()

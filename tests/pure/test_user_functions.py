"""Functions of users that do nothing when they are called: known before the call, or by what comes
back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import inspect
import itertools
import multiprocessing
import sqlite3
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest

from rayq.client.consuming.deserializing import Deserializers
from rayq.client.consuming.subscription import Slice
from rayq.client.producing.partitioner import call_partitioner
from rayq.client.producing.serializing import Serializers
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.core.groups.assignors import find_assignor, load_assignors, run_assignor
from rayq.errors import (
    ConfigError,
    HandlerError,
    InvalidAssignmentError,
    SerializationError,
    UnknownAssignorError,
)
from rayq.user_functions import check_function, check_ran, told


def plain(*_: object) -> None:
    pass


async def coroutine(*_: object) -> None:
    pass


def generator(*_: object) -> Iterator[int]:
    yield 1


async def async_generator(*_: object) -> AsyncIterator[int]:
    yield 1


def decorated(*arguments: object) -> object:
    """As a plain decorator around a coroutine function leaves it."""
    return coroutine(*arguments)


class Calls:
    """An object whose call runs another function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> object:
        return self._function(*arguments)

    def method(self, *_: object) -> None:
        pass

    async def coroutine(self, *_: object) -> None:
        pass

    def generator(self, *_: object) -> Iterator[int]:
        yield 1


class AsyncCall:
    async def __call__(self, *_: object) -> None:
        pass


class YieldingCall:
    def __call__(self, *_: object) -> Iterator[int]:
        yield 1


class Awaited:
    def __await__(self) -> Generator[None, None, None]:
        yield


GOOD = [plain, Calls(plain), Calls(plain).method, functools.partial(plain, 1), lambda *_: None, print]
COROUTINES = [
    coroutine,
    Calls(plain).coroutine,
    AsyncCall(),
    functools.partial(coroutine, 1),
    functools.partial(AsyncCall(), 1),
    functools.partial(functools.partial(coroutine, 1), 2),
]
GENERATORS = [
    generator,
    async_generator,
    Calls(plain).generator,
    YieldingCall(),
    functools.partial(generator, 1),
    functools.partial(YieldingCall(), 1),
]
UNKNOWN = [decorated, lambda *_: coroutine(), Calls(coroutine), functools.partial(decorated, 1)]
"""What only shows by what comes back: an awaitable."""
UNKNOWN_LAZY = [
    lambda *_: generator(),
    Calls(async_generator),
    lambda *_: map(plain, [1]),
    lambda *_: itertools.starmap(plain, [(1,)]),
    lambda *_: itertools.chain.from_iterable([map(plain, [1])]),
    lambda *_: itertools.islice(map(plain, [1]), 1),
    lambda *_: itertools.takewhile(plain, [1]),
    lambda *_: zip(map(plain, [1]), [2], strict=True),
    lambda *_: enumerate(map(plain, [1])),
    lambda *_: iter(lambda: plain(1), None),
    contextlib.contextmanager(generator),
    contextlib.asynccontextmanager(async_generator),
]


@pytest.mark.parametrize("function", GOOD)
def test_what_runs_when_it_is_called_is_taken(function: Callable[..., Any]) -> None:
    check_function("f", function)
    check_ran("f", function())


@pytest.mark.parametrize("function", COROUTINES)
def test_a_coroutine_function_is_refused_where_nobody_awaits(function: Callable[..., Any]) -> None:
    check_function("f", function, is_awaited=True)
    with pytest.raises(HandlerError, match=r"^f .*coroutine function.* Use that\.$"):
        check_function("f", function, instead="Use that.")


@pytest.mark.parametrize("is_awaited", [False, True])
@pytest.mark.parametrize("function", [*GENERATORS, Calls, list, functools.partial(Calls, plain), 5, None, "f"])
def test_what_does_nothing_is_refused_everywhere(function: Any, is_awaited: bool) -> None:
    with pytest.raises(HandlerError, match="^f "):
        check_function("f", function, is_awaited=is_awaited)


@pytest.mark.parametrize("function", [*UNKNOWN, *UNKNOWN_LAZY, lambda: Awaited()])
def test_what_comes_back_shows_that_nothing_has_run(function: Callable[..., Any]) -> None:
    check_function("f", function)
    result = function()
    with pytest.raises(HandlerError, match="^f returned an? "):
        check_ran("f", result)
    if inspect.iscoroutine(result):
        assert inspect.getcoroutinestate(result) == inspect.CORO_CLOSED, "Python has no complaint"


@pytest.mark.parametrize(
    "collected",
    [
        lambda one: [one],
        lambda one: (None, one),
        lambda one: {"a": one},
        lambda one: {one},
        lambda one: frozenset([one]),
    ],
)
@pytest.mark.parametrize("function", [coroutine, generator, async_generator, Awaited])
def test_a_collection_of_what_has_not_run_is_no_work_that_is_done(
    function: Callable[..., Any], collected: Callable[[Any], Any]
) -> None:
    one = function()
    with pytest.raises(HandlerError, match=r"^f returned a \w+ with an? "):
        check_ran("f", collected(one))
    if inspect.iscoroutine(one):
        assert inspect.getcoroutinestate(one) == inspect.CORO_CLOSED, "Python has no complaint"


@pytest.mark.parametrize(
    "result", [plain, coroutine, Calls(plain).method, functools.partial(plain, 1), [].append]
)
def test_a_function_that_comes_back_was_called_by_nobody(result: object) -> None:
    with pytest.raises(HandlerError, match="^f returned a function .* which nobody calls"):
        check_ran("f", result)


def test_a_thread_or_process_that_has_not_ended_is_no_work_that_is_done() -> None:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    child = multiprocessing.get_context("spawn").Process(target=plain)
    for result in (thread, [thread], process, child):
        with pytest.raises(HandlerError, match="work that has not ended"):
            check_ran("f", result)
        check_ran("f", result, may_go_on=True)
    thread.start()
    with pytest.raises(HandlerError, match="work that has not ended"):
        check_ran("f", thread)
    may_end.set()
    thread.join()
    process.communicate()
    check_ran("f", [thread, process])


def test_the_cursor_of_a_statement_that_ran_may_come_back() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        check_ran("f", connection.execute("SELECT 1"))


def test_a_future_is_no_work_that_is_done_but_may_go_on_where_nobody_counts_on_it() -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    with pytest.raises(HandlerError, match="returned a future"):
        check_ran("f", future)
    with pytest.raises(HandlerError, match="returned a list with a future"):
        check_ran("f", [future])
    check_ran("f", future, may_go_on=True)
    check_ran("f", [future], may_go_on=True)


@pytest.mark.parametrize("result", [0, [], "text", iter([1]), {"a": 1}, object(), ValueError("x"), [1] * 1000, int])
def test_anything_else_may_come_back(result: object) -> None:
    check_ran("f", result)


@pytest.mark.parametrize("function", [*COROUTINES, *GENERATORS])
@pytest.mark.parametrize(
    "config, name",
    [
        (ProducerConfig, "value_serializer"),
        (ProducerConfig, "key_serializer"),
        (ProducerConfig, "partitioner"),
        (ConsumerConfig, "value_deserializer"),
        (ConsumerConfig, "key_deserializer"),
    ],
)
def test_a_config_takes_plain_functions_only(
    config: Callable[..., Any], name: str, function: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} "):
        config(**{name: function})


@pytest.mark.parametrize("function", [*UNKNOWN, *UNKNOWN_LAZY])
def test_what_serializers_and_partitioners_return_unrun_is_no_value(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(SerializationError):
        Serializers(None, function).pair("t", 1, None)
    with pytest.raises(ValueError, match="has to return an int"):
        call_partitioner(function, b"k", 3)
    part = Slice("t", 0, [4, 5], [0, 0], None, [None, b"x"], None)
    read, failure = Deserializers(None, function).apply(part)
    assert read.values == [None] and failure is not None
    assert failure.offset == 5 and isinstance(failure.__cause__, HandlerError)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise SystemExit("in __str__")


@pytest.mark.parametrize(
    "error", [UnprintableError(), StopIteration(), GeneratorExit(), SystemExit(3), KeyError("k")]
)
def test_an_error_can_be_told_and_an_assignor_that_raises_it_ends_nothing(
    error: BaseException,
) -> None:
    assert told(error).startswith(type(error).__name__) and told(error).endswith(".")

    def fails(*_: object) -> Any:
        raise error

    with pytest.raises(InvalidAssignmentError, match=type(error).__name__):
        run_assignor("mine", fails, {}, {}, {})


@pytest.mark.parametrize("function", [*UNKNOWN, *UNKNOWN_LAZY])
def test_an_assignor_that_has_not_run_has_no_answer(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidAssignmentError, match="returned a"):
        run_assignor("mine", function, {}, {}, {})


@pytest.mark.parametrize("name", ["coroutine", "generator", "async_generator", "Calls"])
def test_an_assignor_that_would_not_run_is_refused_by_name(name: str) -> None:
    found = load_assignors({"mine": f"{__name__}:{name}"})
    with pytest.raises(UnknownAssignorError, match="mine"):
        find_assignor(found, "mine")

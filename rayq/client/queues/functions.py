"""Functions that run as tasks of a queue: `@q.task`. Arguments travel as JSON; nothing is pickled,
so a record can run no code except the functions that the worker knows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, ParamSpec, TypeVar

from rayq.client.arguments import shown
from rayq.client.queues.task import QueueTask
from rayq.client.queues.task_arguments import TaskArguments
from rayq.config import is_unicode
from rayq.errors import HandlerError, InvalidRequestError
from rayq.user_functions import check_function, is_coroutine_function, name_of

P = ParamSpec("P")
R = TypeVar("R")
PutT = TypeVar("PutT")

TASK_HEADER = "rayq.task"
"""Header that names the function of a record. The record's value holds the arguments, as JSON:
`[[positional], {by name}]`."""


class TaskFunction(Generic[P, R, PutT]):
    """A function that runs as a task of a queue; made by `@queue.task`. Calling it runs it here, at
    once; `delay` makes a worker run it."""

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        retries: int | None,
        put: Callable[..., PutT],
    ) -> None:
        """`put(value, headers=..., key=..., delay_s=..., deliver_at=...)` writes a record."""
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name
        self.retries = retries
        self.is_async = is_coroutine_function(function)
        self._put = put
        self._arguments = TaskArguments(name, function)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<TaskFunction {self.name!r}>"

    def delay(self, /, *args: P.args, **kwargs: P.kwargs) -> PutT:
        """Makes a worker call the function with these arguments. Returns, as `put` does, once the
        record is durable. Raises TypeError (the function takes no such arguments),
        SerializationError (an argument would arrive changed), and the errors of `put`."""
        return self.put(args, kwargs)

    def put(
        self,
        args: Any = (),
        kwargs: Any = None,
        *,
        key: bytes | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | None = None,
    ) -> PutT:
        """Does the same as `delay(*args, **kwargs)`, with the other arguments of `queue.put`: a
        key, or the due time. Raises TypeError if `args` is not a list or tuple, or `kwargs` not a
        dict."""
        if not isinstance(args, list | tuple):
            raise TypeError(
                f"The args of {self.name} must be a list or a tuple, not {shown(args)}: "
                "put([argument]), or delay(argument)."
            )
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError(f"kwargs must be a dict, not {shown(kwargs)}.")
        value = self._arguments.encoded(args, kwargs or {})
        headers = [(TASK_HEADER, self.name.encode())]
        return self._put(
            value, headers=headers, key=key, delay_s=delay_s, deliver_at=deliver_at
        )

    def arguments(self, value: bytes | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the function, each as its annotation says. Raises
        TaskArgumentsError."""
        return self._arguments.decoded(value)


class Functions(Generic[PutT]):
    """The functions of one queue, by name."""

    def __init__(self) -> None:
        self._known: dict[str, TaskFunction[Any, Any, PutT]] = {}

    def add(
        self,
        function: Callable[P, R],
        name: str | None,
        retries: int | None,
        put: Callable[..., PutT],
    ) -> TaskFunction[P, R, PutT]:
        """Adds a function. For `put` see `TaskFunction`. Raises HandlerError,
        InvalidRequestError."""
        check_function("A task", function, is_awaited=True)
        if retries is not None and (type(retries) is not int or retries < 0):
            raise InvalidRequestError(f"retries must be a whole number from 0, not {retries!r}.")
        name = name_of(function) if name is None else name
        if not isinstance(name, str) or not name or not is_unicode(name):
            raise InvalidRequestError(f"The name of a task must be Unicode text, not {name!r}.")
        known = self._known.get(name)
        if known is not None and known.function is not function:
            raise InvalidRequestError(
                f"This queue has a task {name!r} already: give one of them another name, "
                "@q.task(name=...)."
            )
        try:
            made = self._known[name] = TaskFunction(function, name, retries, put)
        except ValueError as error:
            raise HandlerError(f"Cannot read the parameters of task {name!r}: {error}.") from error
        return made

    def check_plain(self, instead: str) -> None:
        """Checks the functions of a worker that awaits nothing; `instead` names one that does.
        Raises HandlerError."""
        for known in self._known.values():
            check_function(f"Task {known.name!r}:", known.function, instead=instead)

    def of(self, task: QueueTask) -> TaskFunction[Any, Any, PutT]:
        """The function that a record calls. Raises LookupError."""
        name = next((value for key, value in task.headers if key == TASK_HEADER), None)
        if name is None:
            raise LookupError(
                f"the record has no header {TASK_HEADER!r}, which names a function: give work() a "
                "handler for records that were put as values"
            )
        known = self._known.get(name.decode(errors="replace"))
        if known is None:
            raise LookupError(f"this worker has no task {name.decode(errors='replace')!r}")
        return known

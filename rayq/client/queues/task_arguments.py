"""Arguments of tasks, as JSON: `[[positional], {by name}]`. A call is written only if a worker
reads the caller's arguments from it.

JSON knows fewer types than Python. An annotation says what a text or a list was before; without one
a tuple would arrive as a list, a date as a text, and NaN as None. So the writer of a call reads it
back, and compares.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, time
from typing import Any, get_type_hints

import msgspec

from rayq.client.arguments import shown
from rayq.errors import SerializationError, TaskArgumentsError
from rayq.user_functions import told

DEPTH_MAX = 100
"""Maximum nesting of arguments: a worker may have less of Python's stack left than the caller."""
_EXACT = (str, int, bool, type(None), bytes)


class TaskArguments:
    """The arguments of one function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """`name` is used in errors."""
        self._name = name
        self._function = function
        self._signature = inspect.signature(function)
        self._hints: dict[str, Any] | None = None

    def encoded(self, args: Any, kwargs: Mapping[str, Any]) -> bytes:
        """Encodes the arguments of a call. Raises TypeError (the function takes no such arguments),
        SerializationError."""
        given = self._signature.bind(*args, **kwargs).arguments
        try:
            value = msgspec.json.encode([list(args), kwargs])
            arrived = self._bound(value).arguments
            changed = [name for name, value in given.items() if not _is_same(value, arrived[name])]
        except Exception as error:
            raise self._refused(given, error) from error
        for name in changed:
            raise self._not_same(name, given[name], arrived[name])
        return value

    def decoded(self, value: bytes | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a record, each converted to its annotation. Raises
        TaskArgumentsError."""
        try:
            bound = self._bound(value or b"")
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise TaskArgumentsError(
                f"The record is not a call of {self._name}: {error}"
            ) from error
        return bound.args, bound.kwargs

    def _bound(self, value: bytes) -> inspect.BoundArguments:
        args, kwargs = msgspec.json.decode(value, type=tuple[list[Any], dict[str, Any]])
        bound = self._signature.bind(*args, **kwargs)
        for name, arrived in bound.arguments.items():
            bound.arguments[name] = self._converted(name, arrived)
        return bound

    def _converted(self, name: str, arrived: Any) -> Any:
        hint = self._known_hints().get(name, inspect.Parameter.empty)
        if hint is inspect.Parameter.empty:
            return arrived
        kind = self._signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            hint = tuple[hint, ...]  # type: ignore[valid-type]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            hint = dict[str, hint]  # type: ignore[valid-type]
        return msgspec.convert(arrived, type=hint, str_keys=True)

    def _known_hints(self) -> dict[str, Any]:
        """The annotations. They may name objects defined below the function, so they are resolved
        at the first call. Raises TypeError."""
        if self._hints is None:
            try:
                self._hints = get_type_hints(_annotated(self._function))
            except NameError as error:
                raise TypeError(f"an annotation is not known: {error}") from error
        return self._hints

    # --- refusals -------------------------------------------------------------------------------

    def _refused(self, given: dict[str, Any], error: Exception) -> SerializationError:
        """The error that names the first argument that cannot be written or read."""
        for name, argument in given.items():
            try:
                written = msgspec.json.encode(argument)
            except Exception as unwritten:  # noqa: BLE001 - any that an argument's class raises
                return self._error(name, argument, f"JSON has no form for it: {told(unwritten)}")
            try:
                self._converted(name, msgspec.json.decode(written))
            except Exception as unread:  # noqa: BLE001
                return self._error(name, argument, f"no worker could read it: {told(unread)}")
        return SerializationError(f"The arguments of {self._name} cannot be sent: {told(error)}")

    def _not_same(self, name: str, given: Any, arrived: Any) -> SerializationError:
        if _depth(given) > DEPTH_MAX:
            return self._error(name, given, f"it is nested more than {DEPTH_MAX} levels deep.")
        return self._error(
            name,
            given,
            f"a worker would get {_shown(arrived)} instead. Annotate the parameter with what it "
            "is, or give what JSON knows: texts, whole and finite numbers, True, False, None, "
            "lists, and dicts by texts.",
        )

    def _error(self, name: str, given: Any, why: str) -> SerializationError:
        return SerializationError(
            f"Argument {name!r} of {self._name}, {_shown(given)}, cannot be sent as JSON: {why}"
        )


def _annotated(function: Any) -> Any:
    """The object with a function's annotations, also for a partial, and for an object with
    `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _shown(given: object) -> str:
    try:
        text = shown(given).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - a user's class may do anything
        text = "a value"
    return f"{text} ({type(given).__name__})"


def _is_same(given: Any, arrived: Any, depth: int = 0) -> bool:
    """Returns whether an argument has arrived unchanged, including its type. (A function that takes
    a float also takes a whole number.)"""
    if depth >= DEPTH_MAX:
        return False
    if type(given) is not type(arrived):
        return type(given) is int and type(arrived) is float and given == arrived
    if type(given) in _EXACT:
        return bool(given == arrived)
    if isinstance(given, dict):
        return len(given) == len(arrived) and all(
            _is_same(key, its_key, depth + 1) and _is_same(value, its_value, depth + 1)
            for (key, value), (its_key, its_value) in zip(
                given.items(), arrived.items(), strict=True
            )
        )
    if isinstance(given, list | tuple):
        return len(given) == len(arrived) and all(
            _is_same(item, its_item, depth + 1)
            for item, its_item in zip(given, arrived, strict=True)
        )
    if isinstance(given, set | frozenset):
        found = {item: item for item in arrived}
        return len(given) == len(found) and all(
            item in found and _is_same(item, found[item], depth + 1) for item in given
        )
    if (names := _fields(given)) is not None:
        return all(
            _is_same(getattr(given, name, None), getattr(arrived, name, None), depth + 1)
            for name in names
        )
    try:
        if isinstance(given, datetime | time):
            return _is_same_time(given, arrived)
        return bool(given == arrived)
    except Exception:  # noqa: BLE001 - a user's class may do anything
        return False


def _is_same_time(given: Any, arrived: Any) -> bool:
    """Returns whether two times are the same. A zone travels as its offset from UTC, which also
    tells which of two equal hours it is."""
    if (given.tzinfo is None) != (arrived.tzinfo is None):
        return False
    if given.tzinfo is None:
        return bool(given == arrived and given.fold == arrived.fold)
    if isinstance(given, datetime):
        return bool(given.astimezone(UTC) == arrived.astimezone(UTC))
    return bool(given == arrived)


def _fields(given: object) -> list[str] | None:
    """The names of the fields of a dataclass, a struct, or an attrs class; None for other
    objects."""
    if isinstance(given, type):
        return None
    if isinstance(given, msgspec.Struct):
        return list(given.__struct_fields__)
    if dataclasses.is_dataclass(given):
        return [field.name for field in dataclasses.fields(given)]
    attributes = getattr(type(given), "__attrs_attrs__", None)
    return None if attributes is None else [attribute.name for attribute in attributes]


def _depth(given: Any) -> int:
    """The nesting depth, up to one more than the maximum."""
    level, depth = [given], 0
    while level and depth <= DEPTH_MAX:
        depth += 1
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below += value.values()
            elif isinstance(value, list | tuple | set | frozenset):
                below += value
            elif (names := _fields(value)) is not None:
                below += [getattr(value, name, None) for name in names]
        level = below
    return depth

"""Values of configs: their units, ranges and types, and the checks on them."""

from __future__ import annotations

import math
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from rayq.errors import ConfigError, HandlerError
from rayq.user_functions import check_kind

KIB, MIB, GIB = 1024, 1024**2, 1024**3
SECOND_MS, HOUR_MS, DAY_MS = 1000, 3_600_000, 86_400_000
INT64_MAX = 2**63 - 1

def require(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(what)


def is_unicode(text: str) -> bool:
    """Returns whether a text can be sent: a str may hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Bounds(NamedTuple):
    """The range of a number, both ends included."""

    least: float = 0
    most: float = math.inf
    above_zero: bool = False
    """True if 0 itself is refused, where `least` is 0."""
    in_bytes: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        return self.least <= value <= self.most and not (self.above_zero and value == 0)

    def __str__(self) -> str:
        if self.most < math.inf:
            least = "above 0" if self.above_zero else f"from {self.said(self.least)}"
            return f"{least} to {self.said(self.most)}"
        if self.above_zero or self.least == 1:
            return "positive"
        return f"at least {self.said(self.least)}"

    def said(self, number: float) -> str:
        """A number of this kind, as people write it: 64 KiB, 45,000."""
        for unit, title in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if self.in_bytes else ():
            if number >= unit and number % unit == 0:
                return f"{number // unit} {title}"
        return "2**63 - 1" if number == INT64_MAX else f"{number:,}"


Positive = Annotated[int, Bounds(1)]
NotNegative = Annotated[int, Bounds(0)]
PositiveBytes = Annotated[int, Bounds(1, in_bytes=True)]
NotNegativeBytes = Annotated[int, Bounds(0, in_bytes=True)]
PositiveSeconds = Annotated[float, Bounds(0, above_zero=True)]
NotNegativeSeconds = Annotated[float, Bounds(0)]
SessionMs = Annotated[int, Bounds(100, HOUR_MS)]
PollIntervalMs = Annotated[int, Bounds(1, INT64_MAX)]
TransactionTimeoutMs = Annotated[int, Bounds(1000, 15 * 60_000)]


def check_plain_functions(config: object, *names: str) -> None:
    for name in names:
        try:
            check_kind(name, getattr(config, name))
        except HandlerError as error:
            raise ConfigError(str(error)) from error


@cache
def types_of(kind: type[Any]) -> dict[str, Any]:
    """The types of a config's keys, with their ranges."""
    return get_type_hints(kind, include_extras=True)


def range_of(hint: Any) -> Bounds | None:
    """The range of the numbers that a key takes; None where it takes every number, or none."""
    if get_origin(hint) is Annotated:
        return next(each for each in hint.__metadata__ if isinstance(each, Bounds))
    found = (range_of(argument) for argument in get_args(hint))
    return next((each for each in found if each is not None), None)


def check_values(config: Any) -> None:
    """Refuses a value of the wrong type, which would otherwise fail far from the mistake, and one
    out of range."""
    kind: type = type(config)
    for name, hint in types_of(kind).items():
        value = getattr(config, name)
        if not _is_of_type(value, hint):
            raise ConfigError(f"{name} cannot be {value!r}: it takes {described(hint)}.")
        allowed = range_of(hint)
        if allowed is not None and value is not None:
            require(value in allowed, f"{name} must be {allowed}, not {value}.")


def _is_of_type(value: Any, hint: Any) -> bool:
    arguments, origin = get_args(hint), get_origin(hint)
    if origin is Annotated:
        return _is_of_type(value, arguments[0])
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (Union, UnionType):
        return any(_is_of_type(value, argument) for argument in arguments)
    if origin is dict:
        return type(value) is dict and all(
            _is_of_type(key, arguments[0]) and _is_of_type(item, arguments[1])
            for key, item in value.items()
        )
    if hint is type(None):
        return value is None
    if isinstance(hint, type):  # An int will do for a float, as to type checkers.
        return type(value) is hint or (hint is float and type(value) is int)
    return callable(value)


def described(hint: Any) -> str:
    """A type in words."""
    arguments, origin = get_args(hint), get_origin(hint)
    if origin is Annotated:
        return described(arguments[0])
    if origin is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(described(argument) for argument in arguments)
    if origin is dict:
        return f"a dict of {described(arguments[0])} to {described(arguments[1])}"
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) else "a function"

"""Timeouts that callers may give: one rule for every `timeout_s`, and the rest of one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from rayq.errors import InvalidRequestError, TimeoutError

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S_MAX = 10 * 365 * 86_400.0
"""Maximum timeout: a longer time, also `math.inf`, counts as this, because clocks and selectors
have limits."""


def seconds(timeout_s: Any) -> float:
    """A given timeout in seconds, limited to TIMEOUT_S_MAX. Raises InvalidRequestError for a
    negative one and for NaN, TypeError."""
    if not issubclass(type(timeout_s), Real) or type(timeout_s) is bool:  # NumPy's numbers are
        raise TypeError(
            f"A timeout must be a number of seconds, not {type(timeout_s).__name__}; math.inf "
            "waits without end."
        )
    if not timeout_s >= 0:  # NaN is neither.
        raise InvalidRequestError(
            f"A timeout must be a number of seconds, not {timeout_s!r}: 0 does not wait, math.inf "
            "waits without end."
        )
    return float(min(timeout_s, TIMEOUT_S_MAX))


def takes_timeout(function: Callable[P, T]) -> Callable[P, T]:
    """Checks the argument `timeout_s` of a function or coroutine function with `seconds`, if the
    caller gives it. None is allowed if it is the default."""
    parameters = inspect.signature(function).parameters
    position = list(parameters).index("timeout_s")
    may_be_none = parameters["timeout_s"].default is None

    def check(timeout_s: Any) -> float | None:
        return None if timeout_s is None and may_be_none else seconds(timeout_s)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "timeout_s" in kwargs:
            kwargs["timeout_s"] = check(kwargs["timeout_s"])
        elif len(args) > position:
            changed: Any = (*args[:position], check(args[position]), *args[position + 1 :])
            return function(*changed, **kwargs)
        return function(*args, **kwargs)

    return call


def time_left_s(now_s: float, deadline_s: float) -> float:
    """Seconds until the deadline of a call. Raises TimeoutError once it is over: servers that
    answer at once would else have the call continue for as long as they like."""
    left_s = deadline_s - now_s
    if left_s <= 0:
        raise TimeoutError(
            "The call reached its timeout before all of it was answered. Changes that it "
            "asked for may have been made. Give it more time, or ask for less at once."
        )
    return left_s

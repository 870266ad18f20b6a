"""How errors name the functions that users gave, and what those raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def name_of(function: Callable[..., Any] | None) -> str:
    """The module and the qualified name of a function."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else str(name)


def told(error: BaseException) -> str:
    """The class and the text of an error that a user's function raised. Ends in a full stop."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's class may do anything
        text = ""
    name = type(error).__qualname__
    return (f"{name}: {text}" if text else name).removesuffix(".") + "."

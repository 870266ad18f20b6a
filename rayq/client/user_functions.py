"""What errors say of functions that users gave, and of what those raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def name_of(function: Callable[..., Any] | None) -> str:
    """Where a user finds it."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else str(name)


def told(error: Exception) -> str:
    """Ends in a full stop."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's class may do anything
        text = ""
    name = type(error).__qualname__
    return (f"{name}: {text}" if text else name).removesuffix(".") + "."

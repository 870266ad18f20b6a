"""JSON that has one meaning only, as texts of schemas must have."""

from __future__ import annotations

import json
import math
from typing import Any

from rayq.errors import InvalidSchemaError

NESTING_MAX = 500
"""Arrays and objects within each other: about 160 Avro records, or 250 JSON Schemas."""
NUMBER_DIGITS_MAX = 1000


class _AmbiguousError(ValueError):
    """A text that parsers read in different ways."""


def parse_json(text: str, subject: str) -> Any:
    """The value of a JSON text.

    Raises InvalidSchemaError, which names the subject, where the text is no JSON, has a key twice
    in one object, a number that is not finite or very long, or is nested deeper than `NESTING_MAX`:
    parsers would differ about it, or fail.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except json.JSONDecodeError as error:
        raise InvalidSchemaError(
            f"{subject} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except _AmbiguousError as error:
        raise InvalidSchemaError(f"{subject} cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise InvalidSchemaError(_too_deep(subject)) from error
    if _nesting(value) > NESTING_MAX:
        raise InvalidSchemaError(_too_deep(subject))
    return value


def compact_json(value: Any, *, sort_keys: bool = False) -> str:
    """A JSON text without white space, and with every character as it is."""
    return json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _AmbiguousError(
            f"an object has the key {twice!r:.100} more than once, and parsers differ about which"
            " counts. Remove all but one."
        )
    return value


def _constant(name: str) -> Any:
    raise _AmbiguousError(f"{name} is no number of JSON. Leave it out.")


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number) or len(digits) > NUMBER_DIGITS_MAX:
        raise _AmbiguousError(f"the number {digits:.40} is too large. Use a smaller one.")
    return number


def _int(digits: str) -> int:
    if len(digits) > NUMBER_DIGITS_MAX:
        raise _AmbiguousError(f"the number {digits:.40}... is too long. Use a shorter one.")
    return int(digits)


def _nesting(value: Any) -> int:
    """The depth of a value, found without recursion."""
    deepest, left = 0, [(value, 1)]
    while left:
        container, depth = left.pop()
        if not isinstance(container, dict | list):
            continue
        members = container.values() if isinstance(container, dict) else container
        deepest = max(deepest, depth)
        left.extend((member, depth + 1) for member in members)
    return deepest


def _too_deep(subject: str) -> str:
    return (
        f"{subject} has arrays and objects nested more than {NESTING_MAX:,} deep. Give nested types"
        " names, and refer to them."
    )

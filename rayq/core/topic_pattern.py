"""Regular expressions over topic names, as members subscribe by them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from rayq.errors import InvalidRequestError

PATTERN_LENGTH_MAX = 1024


def check_pattern(pattern: str) -> None:
    """Raises InvalidRequestError."""
    if len(pattern) > PATTERN_LENGTH_MAX:
        raise InvalidRequestError(
            f"A pattern has up to {PATTERN_LENGTH_MAX} characters, not {len(pattern)}."
        )
    _compiled(pattern)


def matches(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that match as a whole; rayq's own topics never do."""
    compiled = _compiled(pattern)
    return {name for name in names if not name.startswith("__") and compiled.fullmatch(name)}


@functools.lru_cache(256)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidRequestError(f"The pattern {pattern!r} does not compile: {error}") from error

"""Log lines for people and for programs: an event and its fields, as `key=value`."""

from __future__ import annotations

import logging
from collections.abc import Callable

LOG_INTERVAL_S = 10.0
"""The minimum interval between two lines of a `RateLimitedLogger`."""


class RateLimitedLogger:
    """Logs events that strangers can cause as often as they like: one line in ten seconds, which
    says how many more events there were since the last line. `monotonic` is the clock, in seconds.
    """

    def __init__(self, logger: logging.Logger, level: int, monotonic: Callable[[], float]) -> None:
        self._logger = logger
        self._level = level
        self._monotonic = monotonic
        self._next_s: float | None = None
        self._left_out = 0

    def say(self, message: str, /, *arguments: object) -> None:
        """Logs like `logger.log`."""
        now_s = self._monotonic()
        if self._next_s is not None and now_s < self._next_s:
            self._left_out += 1
            return
        self._next_s = now_s + LOG_INTERVAL_S
        left_out, self._left_out = self._left_out, 0
        if left_out:
            message, arguments = message + " (and %d more before)", (*arguments, left_out)
        self._logger.log(self._level, message, *arguments, stacklevel=2)


def log_event(logger: logging.Logger, level: int, event: str, /, **fields: object) -> None:
    """Logs one line, `event key=value ...`. A text with blanks, quotes or unprintable characters
    stands in quotes, escaped as in Python. Handlers find the parts in `rayq_event` and
    `rayq_fields` of the record."""
    if logger.isEnabledFor(level):
        line = " ".join((event, *(f"{key}={_shown(value)}" for key, value in fields.items())))
        extra = {"rayq_event": event, "rayq_fields": fields}
        logger.log(level, "%s", line, extra=extra, stacklevel=2)


def _shown(value: object) -> str:
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, (list, tuple)):
        text = ",".join(map(str, value))
    else:
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and not any(character in text for character in ' ="'):
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    """Escapes a character: clients choose some texts, and none may end the line or send commands to
    a terminal."""
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else character.encode("unicode_escape").decode()

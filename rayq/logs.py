"""Log lines that people read and programs take apart: an event and its fields, `key=value`."""

from __future__ import annotations

import logging


def log_event(logger: logging.Logger, level: int, event: str, /, **fields: object) -> None:
    """One line, `event key=value ...`; a text with blanks, quotes or what cannot be printed stands
    in quotes, escaped as in Python. Handlers that want the parts find them in the record's
    `rayq_event` and `rayq_fields`."""
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
    if text and text.isprintable() and not any(one in text for one in ' ="'):
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(one: str) -> str:
    """Clients choose some texts: none may end the line, or speak to a terminal."""
    if one in '"\\':
        return "\\" + one
    return one if one.isprintable() else one.encode("unicode_escape").decode()

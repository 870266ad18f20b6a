"""Log lines that people read and programs take apart: an event and its fields, `key=value`."""

from __future__ import annotations

import logging


def log_event(logger: logging.Logger, level: int, event: str, /, **fields: object) -> None:
    """One line, `event key=value ...`; a text with blanks or quotes stands in quotes. Handlers that
    want the parts find them in the record's `rayq_event` and `rayq_fields`."""
    if logger.isEnabledFor(level):
        line = " ".join((event, *(f"{key}={_shown(value)}" for key, value in fields.items())))
        extra = {"rayq_event": event, "rayq_fields": fields}
        logger.log(level, "%s", line, extra=extra, stacklevel=2)


def _shown(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    if value is None:
        return "none"
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if not text or any(one in text for one in " =\"\n"):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return text

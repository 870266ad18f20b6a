"""The times at which a streaming query looks for its next batch."""

from __future__ import annotations

import re
from typing import NamedTuple

from rayq.errors import InvalidRequestError

AVAILABLE_NOW = "available_now"
IDLE_S = 0.25
"""Time after which a query without an interval that found nothing looks again."""

_UNITS_S = {
    "millisecond": 0.001,
    "ms": 0.001,
    "second": 1.0,
    "s": 1.0,
    "minute": 60.0,
    "min": 60.0,
    "hour": 3600.0,
    "day": 86_400.0,
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)(s?)\s*(?=\d|$)")


class Trigger(NamedTuple):
    """The trigger of a query. With `interval_s` 0 a batch follows the previous one at once. With
    `drains` the query ends when it has read the records that were there at its start."""

    interval_s: float
    drains: bool = False

    def next_s(self, started_s: float, now_s: float, *, found_any: bool) -> float:
        """The time of the next look, after a look that began at `started_s`: one interval later, or
        at once if the batch took longer than that."""
        if self.interval_s:
            return max(started_s + self.interval_s, now_s)
        return now_s if found_any or self.drains else now_s + IDLE_S


def parse_trigger(text: str | None) -> Trigger:
    """The trigger for None (no pause), "available_now", or an interval such as "5 seconds" or
    "1 minute 30 seconds". Raises InvalidRequestError."""
    if text is None:
        return Trigger(0.0)
    if text == AVAILABLE_NOW:
        return Trigger(0.0, drains=True)
    if isinstance(text, str):
        seconds = _seconds(text.strip().lower())
        if seconds is not None:
            return Trigger(seconds)
    raise InvalidRequestError(
        f'trigger={text!r}: give an interval such as "5 seconds", "{AVAILABLE_NOW}", or None.'
    )


def _seconds(text: str) -> float | None:
    position, seconds = 0, 0.0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        number, unit, plural = part.groups()
        scale = _UNITS_S.get(unit + plural) or _UNITS_S.get(unit)
        if scale is None:
            return None
        seconds += float(number) * scale
        position = part.end()
    return seconds if text else None

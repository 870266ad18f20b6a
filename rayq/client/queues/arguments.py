"""Checks of arguments of queues, with errors that say what to write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from numbers import Real
from typing import Any

from rayq.client.admin.queues import queue_name
from rayq.client.arguments import many, shown, whole_number
from rayq.client.timeouts import seconds
from rayq.errors import InvalidRequestError
from rayq.storage.batch import DUE_HEADER, due_header

PutHeaders = Iterable[tuple[str, bytes]] | None

DELAY_S_MAX = 10 * 365 * 86_400.0
"""Maximum delay of a record: ten years."""
TAKEN_MAX = 10_000
PREFETCH = 256
PREFETCH_MAX = 10_000
WEIGHT_MAX = 1_000
CONCURRENCY_MAX = 10_000


def names_and_weights(
    names: str | Sequence[str], weights: Sequence[int] | None
) -> tuple[list[str], list[int]]:
    """The queues to take from, and a weight for each, 1 by default. Raises TypeError,
    InvalidRequestError."""
    if isinstance(names, str):
        names = [names]
    given: Any = names
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(f"Queues must be a name, or a list of names, not {shown(names)}.")
    checked = [queue_name(name) for name in given]
    if not checked or len(set(checked)) < len(checked):
        raise InvalidRequestError(f"Name at least one queue, and each only once, not {checked!r}.")
    if weights is None:
        return checked, [1] * len(checked)
    each = [whole_number("A weight", weight) for weight in weights]
    if len(each) != len(checked) or not all(1 <= weight <= WEIGHT_MAX for weight in each):
        raise InvalidRequestError(
            f"{len(checked)} queues need a weight each, from 1 to {WEIGHT_MAX}, not {each!r}."
        )
    return checked, each


def whole_between(name: str, given: Any, least: int, most: int) -> int:
    """An int from `least` to `most`. Raises TypeError, InvalidRequestError."""
    number = whole_number(name, given)
    if not least <= number <= most:
        raise InvalidRequestError(f"{name} must be from {least} to {most}, not {number}.")
    return number


def with_due_time(
    headers: PutHeaders, delay_s: Any, deliver_at: Any, wall_ms: int
) -> PutHeaders:
    """The headers of a put record, with the header of its due time, which replaces one copied from
    another record. Raises TypeError, InvalidRequestError."""
    if delay_s is None and deliver_at is None:
        return headers
    if delay_s is not None and deliver_at is not None:
        raise InvalidRequestError("Give delay_s or deliver_at, not both.")
    if delay_s is not None:
        due_ms = wall_ms + round(seconds_between("delay_s", delay_s, DELAY_S_MAX) * 1000)
    else:
        due_ms = _due_ms(deliver_at)
        if due_ms - wall_ms > DELAY_S_MAX * 1000:
            raise InvalidRequestError(f"deliver_at must be within ten years, not {deliver_at!r}.")
    kept = [
        header
        for header in headers or ()
        if not (isinstance(header, tuple | list) and header and header[0] == DUE_HEADER)
    ]
    return [*kept, due_header(max(due_ms, 0))]


def worker_times(stop_when_idle_s: Any, stop_timeout_s: Any) -> tuple[float | None, float]:
    """The idle time after which a worker ends (None: never), and the time that its handlers may
    then take. Raises TypeError, InvalidRequestError."""
    idle_s = None if stop_when_idle_s is None else seconds(stop_when_idle_s)
    return idle_s, seconds(stop_timeout_s)


def seconds_between(name: str, given: Any, most_s: float) -> float:
    """A number of seconds from 0 to `most_s`. Raises TypeError, InvalidRequestError."""
    if not issubclass(type(given), Real) or type(given) is bool:
        raise TypeError(f"{name} must be a number of seconds, not {type(given).__name__}.")
    if not 0 <= given <= most_s:
        raise InvalidRequestError(
            f"{name} must be a number of seconds, from 0 to {most_s:.0f}, not {given!r}."
        )
    return float(given)


def with_keys(
    values: Iterable[bytes | None], keys: Iterable[bytes | None] | None
) -> list[tuple[bytes | None, bytes | None]]:
    """Each value with its key, or with None. Raises TypeError, InvalidRequestError."""
    values = many("values", values)
    if keys is None:
        return [(value, None) for value in values]
    keys = many("keys", keys)
    if len(keys) != len(values):
        raise InvalidRequestError(
            f"put_many got {len(values)} values and {len(keys)} keys: it needs one each."
        )
    return list(zip(values, keys, strict=True))


def _due_ms(deliver_at: Any) -> int:
    if not isinstance(deliver_at, datetime):
        raise TypeError(
            f"deliver_at must be a datetime with a time zone, not {type(deliver_at).__name__}."
        )
    if deliver_at.tzinfo is None:
        raise InvalidRequestError(
            "deliver_at needs a time zone, such as datetime.now(timezone.utc) + timedelta(hours=1):"
            " without one it would mean another time on each machine."
        )
    return round(deliver_at.timestamp() * 1000)

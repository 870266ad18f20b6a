"""What people type for numbers, sizes, durations, times, positions and configs. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from rayq.config import (
    ClusterConfig,
    ConsumerConfig,
    ProducerConfig,
    QueueConfig,
    TopicConfig,
    parse,
)
from rayq.errors import ConfigError, InvalidRequestError
from rayq.records import TopicPartition

ConfigKind = (
    type[TopicConfig]
    | type[ClusterConfig]
    | type[ProducerConfig]
    | type[ConsumerConfig]
    | type[QueueConfig]
)

_DURATIONS_MS = {
    "": 1,
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_SIZES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZES[_letter] = _SIZES[f"{_letter}i"] = _SIZES[f"{_letter}ib"] = 1024**_power
    _SIZES[f"{_letter}b"] = 1000**_power
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_NOTHING = ("none", "null", "unlimited")
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
SECONDS_DIGITS_MAX = 10
"""A time of up to so many digits is in seconds, a longer one in milliseconds."""
NUMBER_END = 2**62
"""What offsets, sizes and times stay below."""
DIGITS_MAX = 18
"""A number of at most so many digits is below NUMBER_END."""
PARTITIONS_MAX = 100_000
"""How many partitions ranges may name."""


def is_number(text: str | bytes) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX


def is_decimal(text: str) -> bool:
    return re.fullmatch(r"\d+(?:\.\d*)?", text, re.ASCII) is not None


# --- numbers with units ---------------------------------------------------------------------------


def duration_ms(text: str) -> int:
    """Reads `500ms`, `30s`, `10m`, `12h`, `7d`, `2w`; a bare number is milliseconds."""
    found = _with_unit(text, _DURATIONS_MS)
    if found is None:
        raise InvalidRequestError(f"{text!r} is no duration: such as 500ms, 30s, 12h or 7d.")
    return found


def size_bytes(text: str) -> int:
    """Reads `4096`, `64k`, `64KiB` (1024), `50MB` (1000), with or without `/s`."""
    found = _with_unit(text.strip().removesuffix("/s"), _SIZES)
    if found is None:
        raise InvalidRequestError(f"{text!r} is no size: such as 4096, 64KiB or 50MB.")
    return found


def _with_unit(text: str, units: Mapping[str, int]) -> int | None:
    found = _NUMBER.fullmatch(text.strip())
    unit = found and units.get(found[2].lower())
    if found is None or unit is None:
        return None
    number = float(found[1]) * unit
    return round(number) if number < NUMBER_END else None


def time_ms(text: str, now_ms: int) -> int:
    """A moment as Unix milliseconds: `-1h` (so long ago), Unix seconds or milliseconds, or ISO 8601
    such as `2013-01-31T12:00:00Z` (without a zone: this machine's)."""
    given = text.strip()
    if given.startswith("-"):
        return max(0, now_ms - duration_ms(given[1:]))
    if is_number(given):
        return int(given) * (1000 if len(given) <= SECONDS_DIGITS_MAX else 1)
    try:
        return round(datetime.fromisoformat(given).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise InvalidRequestError(
            f"{text!r} is no time: such as 2013-01-31T12:00:00Z, -1h or Unix milliseconds."
        ) from None


# --- positions in a log ---------------------------------------------------------------------------


class Where(NamedTuple):
    """A position to read from; `number` is the offset, the count or the time in milliseconds."""

    kind: Literal["beginning", "end", "offset", "last", "time"]
    number: int = 0


_WORDS: Mapping[str, Where] = {
    **dict.fromkeys(("beginning", "start", "earliest", "oldest"), Where("beginning")),
    **dict.fromkeys(("end", "latest", "newest"), Where("end")),
}


def where(text: str, now_ms: int) -> Where:
    """Reads `beginning`, `end`, an offset, `-N` for the last N of each partition, or `@time`."""
    given = text.strip()
    if given.lower() in _WORDS:
        return _WORDS[given.lower()]
    if given.startswith("@"):
        return Where("time", time_ms(given[1:], now_ms))
    if is_number(given):
        return Where("offset", int(given))
    if given.startswith("-") and is_number(given[1:]):
        return Where("last", int(given[1:]))
    raise InvalidRequestError(
        f"{text!r} is no position: beginning, end, an offset, -N for the last N, or @time (such as "
        "@-1h or @2013-01-31T12:00:00Z)."
    )


def partition_numbers(text: str) -> list[int]:
    """Reads a list such as `0,2,5-7`."""
    numbers: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        last = last if dash else first
        if not (is_number(first) and is_number(last)) or not (
            0 <= int(last) - int(first) < PARTITIONS_MAX
        ):
            raise InvalidRequestError(f"{text!r} names no partitions: such as 0,2 or 0-3.")
        numbers += range(int(first), int(last) + 1)
    return numbers


def topic_partition(text: str) -> TopicPartition:
    """Reads `flights/3`, or `flights-3` as directories and messages write it."""
    topic, _, number = text.rpartition("/") if "/" in text else text.rpartition("-")
    if not topic or not is_number(number):
        raise InvalidRequestError(f"{text!r} names no partition: such as flights/3.")
    return TopicPartition(topic, int(number))


def pair(text: str, what: str) -> tuple[str, str]:
    """Reads `name=value`, or `name:value`."""
    found = re.match(r"[^=:]+(?=[=:])", text)
    if found is None:
        raise InvalidRequestError(f"{text!r} is no {what}: give name=value.")
    return found[0], text[len(found[0]) + 1 :]


# --- configs --------------------------------------------------------------------------------------


def config_values(kind: ConfigKind, assignments: Iterable[str]) -> dict[str, Any]:
    """Reads `key=value` as the config takes it: `retention_ms=7d`, `segment.bytes=64MiB`,
    `retention_bytes=none`. Raises ConfigError; an unknown key suggests the nearest."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{assignment!r} is no config: give key=value.")
        name = key.strip().replace(".", "_")
        known = name in hints
        values[key.strip()] = _config_value(name, text.strip(), hints[name]) if known else text
    parse(kind, values)  # type: ignore[type-var]
    return {key.replace(".", "_"): value for key, value in values.items()}


def config_names(kind: ConfigKind) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def default_of(name: str, kind: type[TopicConfig] | type[QueueConfig]) -> Any:
    """The default of a config key. Raises ConfigError."""
    if name not in config_names(kind):
        parse(kind, {name: None})  # type: ignore[type-var]
    return getattr(kind(), name)


def _config_value(name: str, text: str, hint: Any) -> Any:
    kinds = _kinds(hint)
    if type(None) in kinds and text.lower() in _NOTHING:
        return None
    if bool in kinds and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    try:
        if int in kinds and re.match(r"[0-9]", text):
            if name.endswith("_ms"):
                return duration_ms(text)
            return size_bytes(text) if _is_size(name) else int(text)
        if float in kinds:
            is_time = name.endswith("_s") and _NUMBER.fullmatch(text) and not is_decimal(text)
            return duration_ms(text) / 1000 if is_time else float(text)
        if dict in kinds:
            return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be {text!r}: {error}") from None
    if int in kinds and re.fullmatch(r"-1", text) and type(None) in kinds:
        raise ConfigError(f"{name} cannot be -1: say {name}=none for no limit.")
    choices = [choice for choice in kinds if not isinstance(choice, type)]
    return next((choice for choice in choices if str(choice) == text), text)


def _is_size(name: str) -> bool:
    return "bytes" in name or name in ("batch_size", "buffer_memory")


def _kinds(hint: Any) -> list[Any]:
    """The types and literal values that a type hint allows."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [kind for argument in get_args(hint) for kind in _kinds(argument)]
    if origin is Literal:
        return list(get_args(hint))
    return [origin or hint]

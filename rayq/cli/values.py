"""Parsers of arguments: numbers, sizes, durations, times, positions and configs. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
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
_NUMBER = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_WHOLE = re.compile(r"\d+(?:_\d+)*", re.ASCII)
_BITS = re.compile(r"[KMGT]b")
_NOTHING = ("none", "null", "unlimited")
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
SECONDS = range(10**9, 10**10)
MILLISECONDS = range(10**12, 10**13)
"""Unix times that can be told apart by their length: those from 2001 to 2286."""
NUMBER_END = 2**62
"""The exclusive upper bound of offsets, sizes and times."""
DIGITS_MAX = 18
"""The maximum number of digits of a number that is surely below NUMBER_END."""
PARTITIONS_MAX = 100_000
"""The maximum number of partitions that ranges may name."""


class WrongUseError(InvalidRequestError):
    """An argument that can never be right, whatever the cluster holds."""


def did_you_mean(word: str, known: Sequence[str], otherwise: str) -> str:
    """The end of an error about a word that is none of the known ones: the nearest of them, or
    `otherwise` where none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else otherwise


def is_number(text: str | bytes) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX


# --- numbers with units ---------------------------------------------------------------------------


def duration_ms(text: str, bare_ms: int | None = None) -> int:
    """Reads `500ms`, `30s`, `10m`, `12h`, `7d`, `2w`. A bare number counts in units of `bare_ms`;
    None: only 0 needs no unit. Raises WrongUseError."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise _no_duration(text)
    number, unit = found.groups()
    if not unit and bare_ms is None and float(number):
        raise WrongUseError(
            f"{text!r} has no unit, and could be seconds or milliseconds: say {number}s or "
            f"{number}ms."
        )
    if unit not in _DURATIONS_MS and unit.lower() in _DURATIONS_MS:
        others = {"m": "minutes or months", "ms": "milliseconds or megaseconds"}
        reading = others.get(unit.lower(), "another unit")
        raise WrongUseError(
            f"{text!r} could be {reading}: units are in lower case, such as "
            f"{number}{unit.lower()}; there are none for months and years."
        )
    if unit and unit not in _DURATIONS_MS:
        raise _no_duration(text)
    return _whole(text, number, _DURATIONS_MS[unit] if unit else bare_ms or 1, "milliseconds")


def _no_duration(text: str) -> WrongUseError:
    return WrongUseError(f"{text!r} is not a duration, e.g. 500ms, 30s, 12h or 7d.")


def size_bytes(text: str) -> int:
    """Reads `4096`, `64k`, `64KiB` (1024), `50MB` (1000). Raises WrongUseError."""
    found = _NUMBER.fullmatch(text.strip())
    factor = found and _SIZES.get(found[2].lower())
    if found is None or factor is None:
        raise WrongUseError(f"{text!r} is not a size, e.g. 4096, 64KiB or 50MB.")
    number, unit = found.groups()
    if _BITS.fullmatch(unit):
        raise WrongUseError(
            f"{text!r} could be bits or bytes: say {number}{unit[0]}B (a thousand each) or "
            f"{number}{unit[0]}iB (1024 each)."
        )
    return _whole(text, number, factor, "bytes")


def rate_bytes_per_s(text: str) -> int:
    """Reads a size, with or without `/s`. Raises WrongUseError."""
    return size_bytes(text.strip().removesuffix("/s"))


def _whole(text: str, number: str, factor: int, what: str) -> int:
    """The number times `factor`, computed exactly. Raises WrongUseError."""
    exact = Decimal(number) * factor
    if not exact < NUMBER_END:
        raise WrongUseError(f"{text!r} is too large.")
    if exact != int(exact):
        raise WrongUseError(f"{text!r} is not a whole number of {what}, such as {int(exact)}.")
    return int(exact)


def time_ms(text: str, now_ms: int) -> int:
    """A moment as Unix milliseconds: `-1h` (so long ago), Unix seconds (10 digits) or milliseconds
    (13 digits) or 0, or ISO 8601 such as `2013-01-31T12:00:00Z` (without a zone: this machine's,
    unless its clocks change just then). Raises WrongUseError."""
    given = text.strip()
    if given.startswith("-"):
        return max(0, now_ms - duration_ms(given[1:]))
    if given.isascii() and given.isdigit():
        number = int(given) if is_number(given) and str(int(given)) == given else -1
        if number in SECONDS:
            return number * 1000
        if number in MILLISECONDS or number == 0:
            return number
        raise WrongUseError(
            f"{text!r} could be Unix time or a date: Unix seconds have 10 digits, milliseconds "
            "have 13, and a date has dashes, such as 2013-01-31 or 2013-01-31T12:00:00Z."
        )
    try:
        moment = datetime.fromisoformat(given)
        found, other = (round(moment.replace(fold=n).timestamp() * 1000) for n in (0, 1))
    except (ValueError, OverflowError):
        raise WrongUseError(
            f"{text!r} is not a time, e.g. 2013-01-31T12:00:00Z, -1h or Unix milliseconds."
        ) from None
    if found != other:  # Clocks are set back, and it comes twice; or forward, and it never comes.
        first, second = (datetime.fromtimestamp(ms / 1000).astimezone() for ms in (found, other))
        raise WrongUseError(
            f"{text!r} could be {first.isoformat()} or {second.isoformat()}, as clocks change here "
            "just then: give the zone."
        )
    return found


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
    raise WrongUseError(
        f"{text!r} is not a position: beginning, end, an offset, -N for the last N, or @time (such "
        "as @-1h or @2013-01-31T12:00:00Z)."
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
            raise WrongUseError(f"{text!r} is not a list of partitions, e.g. 0,2 or 0-3.")
        numbers += range(int(first), int(last) + 1)
    return numbers


def topic_partition(text: str) -> TopicPartition:
    """Reads `flights/3`, or `flights-3` as directories and messages write it."""
    topic, _, number = text.rpartition("/") if "/" in text else text.rpartition("-")
    if not topic or not is_number(number):
        raise WrongUseError(f"{text!r} is not a partition, e.g. flights/3.")
    return TopicPartition(topic, int(number))


def pair(text: str, what: str) -> tuple[str, str]:
    """Reads `name=value`, or `name:value` where there is no `=`. Raises WrongUseError."""
    name, equals, value = text.partition("=")
    other_name, colon, other_value = text.partition(":")
    if equals and colon and len(other_name) < len(name):
        raise WrongUseError(
            f"{text!r} is ambiguous: the {what} could be {other_name!r} with {other_value!r}, or "
            f"{name!r} with {value!r}. A name cannot have a colon here; use JSON records for that."
        )
    if not equals:
        name, equals, value = other_name, colon, other_value
        if value[:1].isspace():
            raise WrongUseError(
                f"{text!r} could have a space in its value or not: give {name}={value.strip()}, or "
                f"{name}={value}."
            )
    if not (name and equals):
        raise WrongUseError(f"{text!r} is not a {what}: give name=value.")
    return name, value


# --- configs --------------------------------------------------------------------------------------


def config_values(kind: ConfigKind, assignments: Iterable[str]) -> dict[str, Any]:
    """Reads `key=value` as the config takes it: `retention_ms=7d`, `segment.bytes=64MiB`,
    `retention_bytes=none`. Raises ConfigError; an unknown key suggests the nearest."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{assignment!r} is not a config: give key=value.")
        name = key.strip().replace(".", "_")
        known = name in hints
        if key.strip() in values:
            raise ConfigError(f"{key.strip()} is given twice.")
        if known and kind is ClusterConfig and text.strip().lower() in _NOTHING:
            values[key.strip()] = None  # A start takes back what is kept.
            continue
        values[key.strip()] = _config_value(name, text.strip(), hints[name]) if known else text
    if kind is not ClusterConfig:  # A start checks it together with what its data keeps.
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
                return duration_ms(text, bare_ms=1)
            if _is_size(name):
                return size_bytes(text)
            if not _WHOLE.fullmatch(text):
                raise ValueError("it is not a whole number, such as 3.")
            return int(text)
        if float in kinds:
            if name.endswith("_s") and _NUMBER.fullmatch(text):
                return duration_ms(text, bare_ms=1000) / 1000
            if not text.isascii():
                raise ValueError("it is not a number, such as 0.5.")
            return float(text)
        if dict in kinds:
            return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be {text!r}: {error}") from None
    if int in kinds and re.fullmatch(r"-1", text) and type(None) in kinds:
        raise ConfigError(f"{name} cannot be -1: say {name}=none for no limit.")
    choices = [choice for choice in kinds if not isinstance(choice, type)]
    return next((choice for choice in choices if str(choice) == text), text)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError where a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice.")
    return found


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

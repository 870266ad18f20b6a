"""Checks of the topics, partitions and counts that callers give: one rule for every call, and an
error that says what to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from rayq.records import TopicPartition

V = TypeVar("V")

SHOWN_MAX = 100
"""Maximum number of characters of a wrong value that an error shows."""
EXAMPLE = "TopicPartition('orders', 0)"


def topic_name(given: object) -> str:
    """The name of one topic. Raises TypeError."""
    if not isinstance(given, str):
        raise TypeError(f"A topic name must be a str, such as 'orders', not {shown(given)}.")
    return given


def topic_names(given: object) -> tuple[str, ...]:
    """The topics in a list of names, or of lists of names; a str is one name. Raises TypeError."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"Topics must be a list of names, such as ['orders'], not {shown(given)}.")
    names: list[str] = []
    for item in given:
        is_several = isinstance(item, list | tuple | set | frozenset)
        names += map(topic_name, item) if is_several else (topic_name(item),)
    return tuple(dict.fromkeys(names))


def as_partition(given: object) -> TopicPartition:
    """One partition, which may be given as a plain tuple. Raises TypeError."""
    if (
        not isinstance(given, tuple)
        or len(given) != 2
        or not isinstance(given[0], str)
        or type(given[1]) is not int
    ):
        raise TypeError(
            f"A partition must be a pair of a topic and a number from 0, such as {EXAMPLE}, not "
            f"{shown(given)}."
        )
    return TopicPartition(*given)


def as_partitions(given: object) -> list[TopicPartition]:
    """A list of partitions. Raises TypeError."""
    is_one = isinstance(given, TopicPartition)
    if is_one or isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"Partitions must be a list, such as [{EXAMPLE}], not {shown(given)}.")
    return [as_partition(partition) for partition in given]


def by_partition(given: Mapping[TopicPartition, V], what: str) -> dict[TopicPartition, V]:
    """A mapping of partitions to `what`. Raises TypeError."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"A mapping of each partition to {what} is needed, such as {{{EXAMPLE}: ...}}, not "
            f"{shown(given)}."
        )
    return {as_partition(partition): value for partition, value in given.items()}


def whole_number(name: str, given: object) -> int:
    """An int, and not a bool. Raises TypeError."""
    if type(given) is not int:
        raise TypeError(f"{name} must be an int, not {type(given).__name__}.")
    return given


def partition_numbers(given: object) -> list[int] | None:
    """Numbers of partitions of one topic, or None. Raises TypeError."""
    if given is None:
        return None
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"partitions must be a list of numbers, not {shown(given)}.")
    return [whole_number("A partition", partition) for partition in given]


def shown(given: object) -> str:
    """The repr of a value, cut where it is long."""
    text = repr(given)
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."


def many(what: str, given: object) -> list[Any]:
    """The values or keys of many records, as a list. Raises TypeError, also for a text, because
    each of its characters would become a record."""
    if isinstance(given, list):
        return given
    if isinstance(given, str | bytes | bytearray | memoryview | Mapping) or not isinstance(
        given, Iterable
    ):
        raise TypeError(
            f"The {what} of many records must be a list (a list of bytes, where nothing serializes "
            f"them), not {shown(given)}."
        )
    return list(given)

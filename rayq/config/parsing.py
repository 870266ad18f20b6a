"""Configs from a user's keywords, from the wire and from disk, and back."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from rayq.config.clients import ConsumerConfig, PoolConfig, ProducerConfig
from rayq.config.kafka_names import said_here
from rayq.config.servers import ClusterConfig, QueueConfig, TopicConfig
from rayq.config.values import types_of
from rayq.errors import ConfigError

NEAR = 0.7
"""The minimum similarity (by difflib) of a known name that is suggested; a less similar one would
mislead."""
Config = TypeVar(
    "Config",
    TopicConfig,
    ClusterConfig,
    ProducerConfig,
    ConsumerConfig,
    PoolConfig,
    QueueConfig,
)


def parse(kind: type[Config], options: Mapping[str, Any]) -> Config:
    """A config of `kind` from a user's keywords. Raises `ConfigError`."""
    names = [field.name for field in dataclasses.fields(kind)]
    known: dict[str, Any] = {}
    for given, value in options.items():
        name = given.replace(".", "_")
        if name not in names:
            raise ConfigError(f"Unknown {_title(kind)} config {given!r}{_hint(kind, name, names)}")
        if name in known:
            raise ConfigError(f"{_title(kind)} config {name!r} was given twice.")
        known[name] = value
    return kind(**known)


def given_values(kind: type[Config], options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that were given, under their names, with the values that `parse` makes of them.
    Raises `ConfigError`."""
    config = parse(kind, options)
    return {name: getattr(config, name) for name in (key.replace(".", "_") for key in options)}


def parse_stored(kind: type[Config], options: Mapping[str, Any]) -> Config:
    """A config of `kind` as it came over the wire or from disk. Keys that this version does not
    know are ignored: a newer version wrote them. Raises `ConfigError` for other mistakes."""
    any_kind: Any = kind  # mypy takes no class with a __hash__ of its own for hashable.
    parsed: Config = _parsed(any_kind, msgspec.msgpack.encode(options))
    return parsed


@lru_cache(256)
def _parsed(kind: Any, encoded: bytes) -> Any:
    """Caches parsed configs: a broker with many partitions receives few different configs many
    times."""
    return parse(kind, only_known(kind, msgspec.msgpack.decode(encoded)))


def only_known(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a stored config that this version knows."""
    names = types_of(kind)
    return {name: value for name, value in options.items() if name in names}


def _hint(kind: type, name: str, names: list[str]) -> str:
    """Names the key that may have been meant."""
    said = said_here(_title(kind), name)
    if said is not None:
        return f": {said}."
    for other in (TopicConfig, ProducerConfig, ConsumerConfig, ClusterConfig):
        if name in {field.name for field in dataclasses.fields(other)}:
            return f": it is a config of a {_title(other)}."
    near = difflib.get_close_matches(name, names, n=1, cutoff=NEAR)
    return f". Did you mean {near[0]!r}?" if near else f". Known: {', '.join(names)}."


def as_dict(config: TopicConfig | QueueConfig) -> dict[str, Any]:
    """The whole config as plain values, defaults included; `parse` takes it back."""
    kind: Any = type(config)
    return {name: getattr(config, name) for name in types_of(kind)}


def _title(kind: type) -> str:
    return kind.__name__.removesuffix("Config").lower()

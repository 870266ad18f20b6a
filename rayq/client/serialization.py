"""Serializers and deserializers for producers and consumers: JSON, of any shape or of one type.

Any function from a value to bytes is a serializer, and any function from bytes to a value is a
deserializer: `str.encode` and `bytes.decode` are such a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def json_serializer(value: Any) -> bytes:
    """The JSON of a value that `msgspec.json.encode` takes: dicts, lists, str, numbers, bool, None,
    times, enums, dataclasses, `msgspec.Struct`s and more. Raises TypeError for other types."""
    return msgspec.json.encode(value)


def json_deserializer(data: bytes) -> Any:
    """The dicts, lists, str, numbers, bool and None of JSON. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data)


def typed_json_deserializer(kind: type[T]) -> Callable[[bytes], T]:
    """A deserializer from JSON to objects of a type that msgspec knows: a `msgspec.Struct`, a
    dataclass, a TypedDict, `dict[str, int]`. It checks fields and types, and raises
    msgspec.ValidationError for data that does not fit. Raises TypeError for a type that msgspec
    does not know."""
    return msgspec.json.Decoder(kind).decode

"""Serializers and deserializers to give to producers and consumers: JSON, free or of a type.

Any function from a value to bytes is a serializer, any from bytes to a value a deserializer:
`str.encode` and `bytes.decode` are a pair, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def json_serializer(value: Any) -> bytes:
    """JSON of what `msgspec.json.encode` takes: dicts, lists, texts, numbers, truths, None, times,
    enums, dataclasses, `msgspec.Struct`s and more. Raises TypeError for anything else."""
    return msgspec.json.encode(value)


def json_deserializer(data: bytes) -> Any:
    """The dicts, lists, texts, numbers, truths and None of JSON. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data)


def typed_json_deserializer(kind: type[T]) -> Callable[[bytes], T]:
    """A deserializer from JSON to objects of a type that msgspec knows: a `msgspec.Struct`, a
    dataclass, a TypedDict, `dict[str, int]`. It checks fields and types, and raises
    msgspec.ValidationError for what does not fit. Raises TypeError for a type that msgspec does not
    know."""
    return msgspec.json.Decoder(kind).decode

"""Each list, map and byte string of a request has a limit, and a longer one costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from rayq.errors import ProtocolError
from rayq.messages import REQUESTS, CreateTopic
from rayq.wire.codec import DECODERS, ENCODER, decode

COLLECTIONS = (
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.VarTupleType,
    inspect.DictType,
    inspect.BytesType,
    inspect.ByteArrayType,
    inspect.MemoryViewType,
)


def unbounded(kind: inspect.Type, where: str) -> Iterator[str]:
    """The places in a type that may be as long as a frame."""
    match kind:
        case inspect.AnyType() | inspect.RawType() | inspect.ExtType():
            yield f"{where} may be anything"
        case inspect.StructType(fields=fields) | inspect.NamedTupleType(fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{where}.{field.name}")
        case inspect.UnionType(types=types):
            for one in types:
                yield from unbounded(one, where)
        case inspect.TupleType(item_types=types):
            for number, one in enumerate(types):
                yield from unbounded(one, f"{where}[{number}]")
        case _ if isinstance(kind, COLLECTIONS):
            if kind.max_length is None:
                yield f"{where} has no max_length"
    if isinstance(kind, inspect.DictType):
        yield from unbounded(kind.key_type, f"{where} (key)")
        yield from unbounded(kind.value_type, f"{where} (value)")
    elif isinstance(kind, inspect.CollectionType):
        yield from unbounded(kind.item_type, f"{where}[...]")


@pytest.mark.parametrize("request_type", REQUESTS.values(), ids=lambda one: one.__name__)
def test_whatever_a_request_collects_has_a_limit(request_type: Any) -> None:
    assert not list(unbounded(inspect.type_info(request_type), request_type.__name__))


def test_what_is_nested_or_unnamed_is_found_too() -> None:
    class Inner(msgspec.Struct):
        many: set[int]

    kind = inspect.type_info(tuple[list[Any] | None, Inner])
    assert list(unbounded(kind, "x")) == [
        "x[0] has no max_length",
        "x[0][...] may be anything",
        "x[1].many has no max_length",
    ]


def test_a_config_holds_single_values_of_few_keys() -> None:
    """Values of any type would be millions of lists in a frame of some MiB."""
    good = CreateTopic("t", 1, 1, {"a": 1, "b": None, "c": True, "d": 0.5, "e": "x"})
    kind = CreateTopic.__name__
    assert decode(DECODERS[CreateTopic], ENCODER.encode(good), kind) == good
    too_much: list[dict[str, Any]] = [
        {"a": [[]] * 1000},
        {str(number): number for number in range(200_000)},
    ]
    for config in too_much:
        request = CreateTopic("t", 1, 1, config)
        with pytest.raises(ProtocolError, match="Not a valid CreateTopic message"):
            decode(DECODERS[CreateTopic], ENCODER.encode(request), kind)

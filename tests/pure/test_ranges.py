"""Every number and text of a request has a range: what no handler could use does not reach it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from rayq import config
from rayq.errors import ProtocolError
from rayq.messages import REQUESTS, GroupHeartbeat
from rayq.messages.remote_pointer import RemotePointer
from rayq.wire.authentication import Accepted, Challenge, Hello, Proof
from rayq.wire.codec import DECODERS, ENCODER, decode
from tests.wire.recorded_messages import example_of, kinds

REQUEST_KINDS = [kind for kind in kinds().values() if kind in REQUESTS.values()]
HANDSHAKE_KINDS = [Hello, Challenge, Proof, Accepted]
I64_MIN, U64_MAX = -(2**63), 2**64 - 1
Path = tuple[int | str, ...]


def leaves(of: inspect.Type, path: Path = ()) -> Iterator[tuple[Path, inspect.Type]]:
    """Each place of a request that holds one value, and its type."""
    match of:
        case inspect.UnionType():
            for choice in of.types:
                yield from leaves(choice, path)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            yield from leaves(of.item_type, (*path, 0))
        case inspect.TupleType():
            for number, item in enumerate(of.item_types):
                yield from leaves(item, (*path, number))
        case inspect.DictType():
            yield from leaves(of.key_type, (*path, "key"))
            if isinstance(of.value_type, inspect.UnionType):
                return  # Values of a config: a number may be in the place of a text.
            yield from leaves(of.value_type, (*path, "value"))
        case inspect.StructType(cls=cls) if cls is RemotePointer:
            pass  # What it points to is checked where it is made the pointer.
        case inspect.StructType() | inspect.NamedTupleType():
            for number, field in enumerate(of.fields):
                yield from leaves(field.type, (*path, number))
        case _:
            yield path, of


def is_bounded(of: inspect.Type) -> bool:
    match of:
        case inspect.IntType() | inspect.FloatType():
            low = of.ge if of.gt is None else of.gt
            high = of.le if of.lt is None else of.lt
            return low is not None and high is not None
        case inspect.StrType() | inspect.BytesType():
            return of.max_length is not None
        case inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            return True
    return False


@pytest.mark.parametrize("kind", REQUEST_KINDS + HANDSHAKE_KINDS, ids=lambda kind: kind.__name__)
def test_every_number_and_text_of_a_request_has_a_range(kind: type[Any]) -> None:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    names = [field.name for field in info.fields]
    unbounded = [
        (names[int(path[0])], path[1:], of)
        for path, of in leaves(info)
        if not is_bounded(of)
    ]
    assert unbounded == []


def replaced(message: Any, path: Path, value: object) -> Any:
    """The message with another value at that place."""
    first, *rest = path
    if isinstance(message, dict):
        ((key, kept),) = message.items()
        if first == "key":
            return {value: kept}
        return {key: replaced(kept, tuple(rest), value) if rest else value}
    changed = list(message)
    changed[first] = replaced(changed[first], tuple(rest), value) if rest else value
    return changed


def wrong_values(of: inspect.Type) -> list[Any]:
    match of:
        case inspect.IntType():
            return [I64_MIN, U64_MAX, 1.5, float("nan"), float("inf"), "1"]
        case inspect.FloatType():
            return [float("inf"), float("-inf"), "1"]
        case inspect.StrType():
            return ["x" * (1 + (of.max_length or 0)), 7]
        case inspect.BytesType():
            return [b"x" * (1 + (of.max_length or 0)), 7]
    return []


@pytest.mark.parametrize("kind", REQUEST_KINDS, ids=lambda kind: kind.__name__)
def test_what_is_out_of_range_is_refused_in_every_place(kind: type[Any]) -> None:
    filled = msgspec.msgpack.decode(ENCODER.encode(example_of(kind)), strict=True)
    info = inspect.type_info(kind)

    def read(fields: Any) -> Any:
        return decode(DECODERS[kind], ENCODER.encode(fields), kind.__name__)

    read(filled)
    for path, of in leaves(info):
        for value in wrong_values(of):
            with pytest.raises(ProtocolError, match=f"Not a valid {kind.__name__} message"):
                read(replaced(filled, path, value))


def test_what_configs_allow_is_in_range() -> None:
    beat = replaced(
        msgspec.msgpack.decode(ENCODER.encode(example_of(GroupHeartbeat)), strict=True),
        (GroupHeartbeat.__struct_fields__.index("max_poll_interval_ms"),),
        config.INT64_MAX,
    )
    read = decode(DECODERS[GroupHeartbeat], ENCODER.encode(beat), "GroupHeartbeat")
    assert read.max_poll_interval_ms == config.INT64_MAX

"""Messages of earlier and of later versions are read: unknown fields are passed over."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rayq.wire.codec import ENCODER
from tests.wire.recorded_messages import kinds, recorded

RECORDED = recorded()


def test_each_message_is_recorded() -> None:
    missing = kinds().keys() - RECORDED.keys()
    assert not missing, "add them: python -m tests.wire.recorded_messages"


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_what_an_earlier_version_sent_is_read_as_it_was_meant(name: str) -> None:
    fields = msgspec.msgpack.decode(RECORDED[name], strict=False)
    message = msgspec.msgpack.decode(RECORDED[name], type=kinds()[name])
    read = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert begins_with(plain(read), plain(fields))


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_fields_of_tomorrow_are_passed_over(name: str) -> None:
    kind = kinds()[name]
    today = msgspec.msgpack.decode(RECORDED[name], type=kind)
    known = ENCODER.encode(today)
    fields = [*msgspec.msgpack.decode(known, strict=False), {"of": ["tomorrow"]}, 7]
    assert msgspec.msgpack.decode(ENCODER.encode(fields), type=kind) == today


def begins_with(read: Any, sent: Any) -> bool:
    """Whether each struct that was read has what was sent, and defaults for newer fields behind."""
    if isinstance(read, list) and isinstance(sent, list):
        return len(read) >= len(sent) and all(map(begins_with, read, sent))
    return bool(read == sent)


def plain(value: Any) -> Any:
    """The value with lists in place of tuples."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))

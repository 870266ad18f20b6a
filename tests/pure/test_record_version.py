"""Values of rayq's own topics begin with a version: what is newer than this rayq is not guessed at."""

from __future__ import annotations

import msgspec
import pytest

from rayq.core.record_version import check_version
from rayq.errors import UnsupportedFormatError


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("rest", [[], ["a", {"b": None}]])
def test_a_version_that_this_rayq_knows_is_taken_whatever_follows_it(
    version: int, rest: list[object]
) -> None:
    check_version(msgspec.msgpack.encode([version, *rest]), "__queue_state", 2)


def test_a_newer_version_is_refused_with_what_wrote_it() -> None:
    with pytest.raises(UnsupportedFormatError) as refused:
        check_version(msgspec.msgpack.encode([3, "a"]), "__queue_state", 2)
    assert str(refused.value).startswith(
        "A record of __queue_state has version 3, this rayq reads up to 2: it was written by a newer"
    )


@pytest.mark.parametrize("value", [b"", b"\xc1", *map(msgspec.msgpack.encode, ([], ["1"], 1, {}))])
def test_a_value_without_a_version_is_damaged(value: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        check_version(value, "__queue_state", 2)

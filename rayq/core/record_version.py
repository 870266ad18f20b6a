"""The version at the start of each value in rayq's own compacted topics."""

from __future__ import annotations

import msgspec

from rayq.errors import UnsupportedFormatError


class _Versioned(msgspec.Struct, array_like=True, frozen=True):
    """The part of a value that every version has."""

    version: int


_decoder = msgspec.msgpack.Decoder(_Versioned)


def check_version(value: bytes, topic: str, version_max: int) -> None:
    """Raises UnsupportedFormatError for a value of a newer version than `version_max`, and
    msgspec's error for one that has no version."""
    version = _decoder.decode(value).version
    if version > version_max:
        raise UnsupportedFormatError(
            f"A record of {topic} has version {version}, this rayq reads up to {version_max}: it "
            "was written by a newer one."
        )

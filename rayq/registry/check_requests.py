"""Messages between a `CheckPool` and its processes: a length of `LENGTH_BYTES`, big endian, and
msgpack of a `Check` or of a `Reply`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from rayq.registry.checks import SubjectVersion
from rayq.registry.levels import CompatibilityLevel
from rayq.registry.schema_text import ResolvedSchema

LENGTH_BYTES = 4
READY = b"ready"
"""A process says this, once, when it can take a check."""


class Canonicalize(msgspec.Struct, frozen=True, tag=True):
    """The check `canonical_schema`."""

    resolved: ResolvedSchema
    normalize: bool


class Compare(msgspec.Struct, frozen=True, tag=True):
    """The check `incompatibilities`."""

    new: ResolvedSchema
    versions: tuple[SubjectVersion, ...]
    level: CompatibilityLevel


class Write(msgspec.Struct, frozen=True, tag=True):
    """The check `written`."""

    resolved: ResolvedSchema
    text_format: str


Check: TypeAlias = Canonicalize | Compare | Write


class Reply(msgspec.Struct, frozen=True):
    """The result in msgpack, or the code and the message of an error."""

    result: bytes = b""
    failure: tuple[str, str] | None = None

"""Checks of schemas, whatever their format: whether one is allowed, what its canonical form is, and
whether it fits earlier versions.

Nothing here limits time or memory: servers have it done by `CheckPool` (`check_process.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from rayq.errors import IncompatibleSchemaError, InvalidSchemaError
from rayq.registry.compatibility.avro import avro_incompatibilities
from rayq.registry.compatibility.incompatibility import Incompatibility
from rayq.registry.compatibility.json_schema import json_schema_incompatibilities
from rayq.registry.compatibility.protobuf import protobuf_incompatibilities
from rayq.registry.formats.avro import canonical_avro
from rayq.registry.formats.json_schema import canonical_json_schema
from rayq.registry.formats.proto_text import proto_text
from rayq.registry.formats.protobuf import canonical_protobuf
from rayq.registry.levels import CompatibilityLevel
from rayq.registry.schema_text import (
    CanonicalSchema,
    ResolvedSchema,
    SchemaType,
    check_size,
    guid_of,
)

REASONS_MAX = 100
"""The reasons that are told; more would not help."""

Incompatibilities: TypeAlias = Callable[[ResolvedSchema, ResolvedSchema], list[Incompatibility]]

_INCOMPATIBILITIES: dict[SchemaType, Incompatibilities] = {
    SchemaType.AVRO: avro_incompatibilities,
    SchemaType.JSON: json_schema_incompatibilities,
    SchemaType.PROTOBUF: protobuf_incompatibilities,
}


class SubjectVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a subject. One that is deleted counts for nothing."""

    version: int
    resolved: ResolvedSchema
    deleted: bool = False


class VersionIncompatibility(msgspec.Struct, frozen=True):
    """A reason why a new schema does not fit an earlier version. `direction` is "BACKWARD" where
    the new schema is the reader, "FORWARD" where the earlier one is."""

    version: int
    direction: str
    reason: Incompatibility

    def __str__(self) -> str:
        roles = (
            "the new schema cannot read all that it wrote"
            if self.direction == "BACKWARD"
            else "it cannot read all that the new schema writes"
        )
        return f"Version {self.version}: {roles}: {self.reason}"


def canonical_schema(resolved: ResolvedSchema, *, normalize: bool = False) -> CanonicalSchema:
    """The schema with its canonical text and its guid.

    `normalize` removes differences in spelling that the canonical text keeps: the order of keys,
    names relative to a namespace, the order of references and of imports.

    Raises InvalidSchemaError, SchemaTooLargeError.
    """
    schema = resolved.schema
    check_size(schema)
    match schema.type:
        case SchemaType.AVRO:
            text = canonical_avro(resolved, normalize=normalize)
        case SchemaType.PROTOBUF:
            text = canonical_protobuf(resolved, normalize=normalize)
        case SchemaType.JSON:
            text = canonical_json_schema(resolved, normalize=normalize)
    references = schema.references
    if normalize:
        references = tuple(sorted(set(references), key=lambda reference: reference.name))
    canonical = msgspec.structs.replace(
        schema,
        text=text,
        references=references,
        metadata=schema.metadata or None,
        rule_set=schema.rule_set or None,
    )
    return CanonicalSchema(canonical, guid_of(canonical))


def incompatibilities(
    new: ResolvedSchema, versions: Sequence[SubjectVersion], level: CompatibilityLevel
) -> list[VersionIncompatibility]:
    """Reasons why a new schema does not fit earlier versions of its subject, at most `REASONS_MAX`,
    those of the latest version first. An empty list: it fits.

    A schema never fits one of another type, except at level NONE.

    Raises InvalidSchemaError where the new schema cannot be read, or an earlier one: it may have
    been imported from a registry that looks at less.
    """
    check_size(new.schema)
    if level is CompatibilityLevel.NONE:
        return []
    alive = [version for version in versions if not version.deleted]
    alive.sort(key=lambda version: version.version, reverse=True)
    found: list[VersionIncompatibility] = []
    for earlier in alive if level.transitive else alive[:1]:
        try:
            found += _misfits(new, earlier, level)
        except InvalidSchemaError as error:
            canonical_schema(new)  # raises its own error, if it is the new schema's
            raise InvalidSchemaError(
                f"Version {earlier.version}, which the schema has to fit, cannot be compared with"
                f" it: {error} Delete that version, or set the level of the subject to NONE."
            ) from error
        if len(found) >= REASONS_MAX:
            break
    return found[:REASONS_MAX]


def _misfits(
    new: ResolvedSchema, earlier: SubjectVersion, level: CompatibilityLevel
) -> list[VersionIncompatibility]:
    found = []
    if level.backward:
        reasons = _reasons(new, earlier.resolved)
        found += [VersionIncompatibility(earlier.version, "BACKWARD", why) for why in reasons]
    if level.forward:
        reasons = _reasons(earlier.resolved, new)
        found += [VersionIncompatibility(earlier.version, "FORWARD", why) for why in reasons]
    return found


def written(canonical: ResolvedSchema, text_format: str = "") -> str:
    """The text of a schema as the API gives it to somebody who asks for a `format`.

    That of a Protobuf schema is the `.proto` text; with the format "serialized" it is base64 of the
    descriptor. Those of other schemas are their canonical texts. A format that is unknown makes no
    difference, as in Confluent's registry.

    Raises InvalidSchemaError.
    """
    if canonical.schema.type is SchemaType.PROTOBUF and text_format != "serialized":
        return proto_text(canonical)
    return canonical.schema.text


def incompatible(
    subject: str, level: CompatibilityLevel, found: Sequence[VersionIncompatibility]
) -> IncompatibleSchemaError:
    """The error that refuses a schema, with the reasons that `incompatibilities` found."""
    reasons = " ".join(f"{reason}." for reason in found)
    return IncompatibleSchemaError(
        f"The schema is incompatible with earlier versions of subject {subject!r:.300}, whose"
        f" compatibility level is {level.value}. {reasons} Change the schema, or the level of the"
        " subject."
    )


def _reasons(reader: ResolvedSchema, writer: ResolvedSchema) -> list[Incompatibility]:
    if reader.schema.type is not writer.schema.type:
        return [
            Incompatibility(
                "schema_type_changed",
                "#",
                f"the reader's schema is {reader.schema.type.value}, and the writer's"
                f" {writer.schema.type.value}",
            )
        ]
    return _INCOMPATIBILITIES[reader.schema.type](reader, writer)

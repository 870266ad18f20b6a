"""Schemas in few words, and checks of two of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rayq.registry.checks import (
    SubjectVersion,
    VersionIncompatibility,
    canonical_schema,
    incompatibilities,
)
from rayq.registry.levels import CompatibilityLevel
from rayq.registry.references import resolve
from rayq.registry.schema_text import ResolvedSchema, SchemaReference, SchemaText, SchemaType

AVRO, JSON, PROTOBUF = SchemaType.AVRO, SchemaType.JSON, SchemaType.PROTOBUF


def schema_of(schema_type: SchemaType, schema: Any, **more: Any) -> SchemaText:
    """A schema from its text, or from the value that its text stands for."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return SchemaText(type=schema_type, text=text, **more)


def alone(schema_type: SchemaType, schema: Any) -> ResolvedSchema:
    return ResolvedSchema(schema=schema_of(schema_type, schema))


def resolved_with(schema: SchemaText, registered: dict[str, SchemaText]) -> ResolvedSchema:
    """A schema with what it refers to: version 1 of each subject is in `registered`."""

    async def look_up(subject: str, version: int) -> SchemaText | None:
        return registered.get(subject) if version == 1 else None

    return asyncio.run(resolve(schema, look_up))


def named(*names: str) -> tuple[SchemaReference, ...]:
    """References to version 1 of the subjects of these names."""
    return tuple(SchemaReference(name, name, 1) for name in names)


def text_of(schema_type: SchemaType, schema: Any, *, normalize: bool = False) -> str:
    """The canonical text of a schema."""
    return canonical_schema(alone(schema_type, schema), normalize=normalize).schema.text


def guid(schema_type: SchemaType, schema: Any, *, normalize: bool = False) -> str:
    return canonical_schema(alone(schema_type, schema), normalize=normalize).guid


def between(
    new: ResolvedSchema, earlier: ResolvedSchema, level: str = "BACKWARD"
) -> list[VersionIncompatibility]:
    versions = [SubjectVersion(version=1, resolved=earlier)]
    return incompatibilities(new, versions, CompatibilityLevel(level))


def misfits(schema_type: SchemaType, new: Any, earlier: Any, level: str = "BACKWARD") -> list[str]:
    """The kinds of what does not fit; [] if it fits."""
    found = between(alone(schema_type, new), alone(schema_type, earlier), level)
    return [version.reason.kind for version in found]

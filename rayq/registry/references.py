"""References of schemas: a schema with all that it refers to, through any number of others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from rayq.errors import InvalidSchemaError, SchemaTooLargeError
from rayq.registry.schema_text import (
    REFERENCE_DEPTH_MAX,
    REFERENCED_BYTES_MAX,
    REFERENCES_MAX,
    TEXT_BYTES_MAX,
    NamedSchema,
    ResolvedSchema,
    SchemaReference,
    SchemaText,
    check_size,
)

LookUp: TypeAlias = Callable[[str, int], Awaitable[SchemaText | None]]
"""The schema of a version of a subject; None if there is none."""


async def resolve(schema: SchemaText, look_up: LookUp) -> ResolvedSchema:
    """A schema with all that it refers to.

    Raises InvalidSchemaError where a reference leads to nothing, to a schema of another type or
    back to itself, where one name leads to two schemas, and where the chain of references is longer
    than `REFERENCE_DEPTH_MAX`; SchemaTooLargeError where they are too many or too long.
    """
    check_size(schema)
    resolution = _Resolution(schema, look_up)
    await resolution.add(schema, ())
    return ResolvedSchema(schema=schema, referenced=tuple(resolution.referenced))


class _Resolution:
    def __init__(self, schema: SchemaText, look_up: LookUp) -> None:
        self.referenced: list[NamedSchema] = []
        self._schema = schema
        self._look_up = look_up
        self._versions: dict[str, SchemaReference] = {}
        self._bytes_left = REFERENCED_BYTES_MAX

    async def add(self, schema: SchemaText, chain: tuple[SchemaReference, ...]) -> None:
        """Adds all that a schema refers to, which `chain` leads to, before the schema itself."""
        for reference in schema.references:
            if any(_version(step) == _version(reference) for step in chain):
                raise InvalidSchemaError(
                    f"{_told(reference)} leads back to itself, by way of"
                    f" {', '.join(repr(step.name) for step in chain)}. Remove one of them."
                )
            known = self._versions.get(reference.name)
            if known is not None and _version(known) == _version(reference):
                continue
            if known is not None:
                raise InvalidSchemaError(
                    f"The name {reference.name!r:.200} leads to version {known.version} of subject"
                    f" {known.subject!r:.300} and to version {reference.version} of"
                    f" {reference.subject!r:.300}. Refer to one of them everywhere."
                )
            if len(chain) >= REFERENCE_DEPTH_MAX:
                raise InvalidSchemaError(
                    f"{_told(reference)} is more than {REFERENCE_DEPTH_MAX} references below the"
                    " schema. Make the chain shorter."
                )
            target = await self._find(reference)
            await self.add(target, (*chain, reference))
            self._versions[reference.name] = reference
            self.referenced.append(NamedSchema(reference.name, target))

    async def _find(self, reference: SchemaReference) -> SchemaText:
        target = await self._look_up(reference.subject, reference.version)
        if target is None:
            raise InvalidSchemaError(
                f"{_told(reference)} leads to nothing: there is no such version. Register it first."
            )
        if target.type is not self._schema.type:
            raise InvalidSchemaError(
                f"{_told(reference)} leads to a schema of type {target.type.value}, and this one is"
                f" of type {self._schema.type.value}. Refer to schemas of the same type."
            )
        self._bytes_left -= len(target.text.encode())
        if self._bytes_left < 0:
            raise SchemaTooLargeError(
                f"The schemas that the schema refers to have more than {REFERENCED_BYTES_MAX:,}"
                f" bytes of text together. ({TEXT_BYTES_MAX:,} are allowed for each.) Refer to"
                " fewer."
            )
        if len(self._versions) >= REFERENCES_MAX:
            raise SchemaTooLargeError(
                f"The schema refers to more than {REFERENCES_MAX:,} schemas, directly or through"
                " others. Refer to fewer."
            )
        return target


def _version(reference: SchemaReference) -> tuple[str, int]:
    return reference.subject, reference.version


def _told(reference: SchemaReference) -> str:
    return (
        f"The reference {reference.name!r:.200} to version {reference.version} of subject"
        f" {reference.subject!r:.300}"
    )

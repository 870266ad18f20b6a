"""Schemas as values: what a client registers, and what makes two schemas the same.

This file knows no format and imports no library of schemas.
"""

from __future__ import annotations

import enum
import hashlib
import uuid
from typing import Any, TypeAlias

import msgspec

from rayq.errors import InvalidSchemaError, SchemaTooLargeError, counted
from rayq.registry.strict_json import compact_json

TEXT_BYTES_MAX = 1024 * 1024
"""The text of a schema in UTF-8; and, beside it, its references, metadata and rules together."""
REFERENCE_DEPTH_MAX = 100
"""The longest chain of references below a schema."""
REFERENCES_MAX = 1000
"""All schemas that a schema refers to, directly or through others."""
REFERENCED_BYTES_MAX = 8 * TEXT_BYTES_MAX
"""The texts of all these schemas together."""

JsonObject: TypeAlias = dict[str, Any]


class SchemaType(enum.Enum):
    """The format of a schema, by its name in the API (`schemaType`)."""

    AVRO = "AVRO"
    JSON = "JSON"
    PROTOBUF = "PROTOBUF"


def schema_type_of(name: str | None) -> SchemaType:
    """The format that a request names; None, a request without `schemaType`, is Avro.

    Raises InvalidSchemaError for a name that is none of them.
    """
    try:
        return SchemaType.AVRO if name is None else SchemaType(name)
    except ValueError as error:
        known = ", ".join(schema_type.value for schema_type in SchemaType)
        raise InvalidSchemaError(
            f"The schemaType {name!r:.100} is unknown. Use one of {known}; without a schemaType a"
            " schema is Avro."
        ) from error


class SchemaReference(msgspec.Struct, frozen=True):
    """A version of a subject that a schema uses, under the name by which its text speaks of it:
    the full name of a type (Avro), the path of an import (Protobuf), or a URI (JSON Schema)."""

    name: str
    subject: str
    version: int


class SchemaText(msgspec.Struct, frozen=True, kw_only=True):
    """A schema with what is registered together with it.

    `metadata` and `rule_set` are the JSON objects of the API. They are kept whole, members of newer
    clients included, and never evaluated. An empty one is the same as none.
    """

    type: SchemaType
    text: str
    references: tuple[SchemaReference, ...] = ()
    metadata: JsonObject | None = None
    rule_set: JsonObject | None = None


class NamedSchema(msgspec.Struct, frozen=True):
    """A schema under the name of the reference that leads to it."""

    name: str
    schema: SchemaText


class ResolvedSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema with all that it refers to, directly or through others: each name once, and each
    schema after those that it refers to itself."""

    schema: SchemaText
    referenced: tuple[NamedSchema, ...] = ()


class CanonicalSchema(msgspec.Struct, frozen=True):
    """A schema that its format allows, with its text in canonical form, and its `guid`."""

    schema: SchemaText
    guid: str


def content_of(schema: SchemaText) -> bytes:
    """The bytes that identify a schema: schemas with equal bytes are one schema.

    They are UTF-8 of a JSON array: the schema type, the text, the references (each an array of
    name, subject and version, in their order), the metadata, and the rule set (null where there is
    none). Keys are sorted by code point, there is no white space, and no character is escaped that
    need not be. The text has to be the canonical one, else spelling makes a difference.

    Raises InvalidSchemaError where a string is no text, such as half of a surrogate pair, and where
    metadata or rules are no JSON or nested too deeply.
    """
    references = [
        [reference.name, reference.subject, reference.version] for reference in schema.references
    ]
    content = [
        schema.type.value,
        schema.text,
        references,
        schema.metadata or None,
        schema.rule_set or None,
    ]
    try:
        text = compact_json(content, sort_keys=True)
    except (ValueError, RecursionError) as error:
        raise InvalidSchemaError(
            f"The schema's metadata or rules cannot be kept: {error}. Make them JSON with finite"
            " numbers, and not nested deeply."
        ) from error
    return encoded_text(text, "The schema")


def guid_of(schema: SchemaText) -> str:
    """The name of a schema in every registry: the first 16 bytes of the SHA-256 of `content_of`,
    as they are (no bits of them say a version), written as a UUID in lower case."""
    return str(uuid.UUID(bytes=hashlib.sha256(content_of(schema)).digest()[:16]))


def encoded_text(text: str, subject: str) -> bytes:
    """UTF-8 of a text. Raises InvalidSchemaError, naming the subject, where there is none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidSchemaError(
            f"{subject} contains {text[error.start]!a} at character {error.start:,}, which is no"
            " character of Unicode, so it has no UTF-8. Remove it."
        ) from error


def check_size(schema: SchemaText) -> None:
    """Raises SchemaTooLargeError; InvalidSchemaError if the text is empty or cannot be encoded."""
    # A character has one byte at least: what is far too long need not be encoded to be refused.
    text_bytes = len(schema.text)
    if text_bytes <= TEXT_BYTES_MAX:
        text_bytes = len(encoded_text(schema.text, "The schema's text"))
    if text_bytes > TEXT_BYTES_MAX:
        raise SchemaTooLargeError(
            f"The schema's text has {text_bytes:,} bytes, and {TEXT_BYTES_MAX:,} are allowed. Split"
            " it, and let the parts refer to each other."
        )
    if not schema.text.strip():
        raise InvalidSchemaError("The schema's text is empty. Give the text of a schema.")
    if len(schema.references) > REFERENCES_MAX:
        raise SchemaTooLargeError(
            f"The schema has {counted(len(schema.references), 'reference')}, and {REFERENCES_MAX:,}"
            " are allowed. Refer to fewer schemas."
        )
    beside_bytes = len(content_of(schema)) - text_bytes
    # The text itself is escaped in there, which makes it six times as long at most.
    if beside_bytes > 6 * text_bytes + TEXT_BYTES_MAX:
        raise SchemaTooLargeError(
            f"The schema's references, metadata and rules are longer than {TEXT_BYTES_MAX:,} bytes."
            " Shorten them."
        )

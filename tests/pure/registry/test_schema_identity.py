"""Schemas are the same when their content is, whatever their spelling."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import pytest

from rayq.errors import InvalidSchemaError, SchemaTooLargeError
from rayq.registry.checks import canonical_schema
from rayq.registry.schema_text import (
    TEXT_BYTES_MAX,
    ResolvedSchema,
    SchemaReference,
    SchemaText,
    check_size,
    content_of,
    guid_of,
    schema_type_of,
)
from tests.pure.registry.support import AVRO, JSON, guid


def test_a_guid_is_the_beginning_of_a_sha256_of_the_content() -> None:
    schema = SchemaText(
        type=AVRO,
        text='"string"',
        references=(SchemaReference("a.B", "b-value", 3),),
        metadata={"properties": {"owner": "Zoë", "a": "b"}},
    )
    content = (
        '["AVRO","\\"string\\"",[["a.B","b-value",3]],{"properties":{"a":"b","owner":"Zoë"}},null]'
    ).encode()
    assert content_of(schema) == content
    assert guid_of(schema) == str(uuid.UUID(bytes=hashlib.sha256(content).digest()[:16]))


def test_each_part_of_the_content_makes_another_schema() -> None:
    plain = SchemaText(type=AVRO, text='"string"')
    others = [
        SchemaText(type=JSON, text='"string"'),
        SchemaText(type=AVRO, text='"bytes"'),
        SchemaText(type=AVRO, text='"string"', references=(SchemaReference("a", "b", 1),)),
        SchemaText(type=AVRO, text='"string"', references=(SchemaReference("a", "b", 2),)),
        SchemaText(type=AVRO, text='"string"', metadata={"properties": {"a": "b"}}),
        SchemaText(type=AVRO, text='"string"', rule_set={"domainRules": []}),
    ]
    assert len({guid_of(schema) for schema in [plain, *others]}) == 1 + len(others)


def test_empty_metadata_is_none() -> None:
    assert guid_of(SchemaText(type=AVRO, text="1", metadata={}, rule_set={})) == guid_of(
        SchemaText(type=AVRO, text="1")
    )


def test_metadata_and_rules_are_kept_whole() -> None:
    """Members that this version does not know, too: what clients run, the registry returns."""
    metadata = {"tags": {"**.ssn": ["PII"]}, "newInTenYears": [1, {"a": None}]}
    rules = {"domainRules": [{"name": "r", "kind": "CONDITION", "params": {"x": "y"}}]}
    schema = SchemaText(type=AVRO, text='"string"', metadata=metadata, rule_set=rules)
    canonical = canonical_schema(ResolvedSchema(schema=schema)).schema
    assert canonical.metadata == metadata and canonical.rule_set == rules


def test_normalized_references_have_one_order() -> None:
    references = (SchemaReference("b", "s", 1), SchemaReference("a", "s", 2))
    one, other = (
        SchemaText(type=AVRO, text='"string"', references=order)
        for order in (references, references[::-1])
    )
    assert canonical_schema(ResolvedSchema(schema=one), normalize=True).guid == (
        canonical_schema(ResolvedSchema(schema=other), normalize=True).guid
    )
    assert canonical_schema(ResolvedSchema(schema=one)).guid != (
        canonical_schema(ResolvedSchema(schema=other)).guid
    )


def test_a_schema_without_a_type_is_avro() -> None:
    assert schema_type_of(None) is AVRO and schema_type_of("JSON") is JSON


@pytest.mark.parametrize("name", ["", "avro", "XML", "x" * 10_000])
def test_an_unknown_schema_type_is_refused(name: str) -> None:
    with pytest.raises(InvalidSchemaError, match="AVRO, JSON, PROTOBUF"):
        schema_type_of(name)


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_an_empty_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidSchemaError, match="empty"):
        guid(AVRO, text)


def test_a_text_of_two_megabytes_is_refused() -> None:
    with pytest.raises(SchemaTooLargeError, match="1,048,576 are allowed"):
        guid(AVRO, '"' + "x" * 2_000_000 + '"')


def test_the_limit_counts_bytes_not_characters() -> None:
    check_size(SchemaText(type=AVRO, text="x" * TEXT_BYTES_MAX))
    with pytest.raises(SchemaTooLargeError):
        check_size(SchemaText(type=AVRO, text="ä" * (TEXT_BYTES_MAX // 2 + 1)))


def test_metadata_has_a_limit_of_its_own() -> None:
    with pytest.raises(SchemaTooLargeError, match="metadata"):
        check_size(SchemaText(type=AVRO, text="1", metadata={"a": "x" * 2_000_000}))


def test_metadata_that_is_no_json_is_refused() -> None:
    for metadata in ({"a": float("nan")}, nested(100_000)):
        with pytest.raises(InvalidSchemaError, match="metadata or rules cannot be kept"):
            guid_of(SchemaText(type=AVRO, text="1", metadata=metadata))


def nested(depth: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(depth):
        metadata = {"a": metadata}
    return metadata


def test_what_is_not_unicode_is_refused() -> None:
    """HTTP and JSON can both carry half of a surrogate pair; UTF-8 cannot."""
    with pytest.raises(InvalidSchemaError, match="no character of Unicode"):
        guid(AVRO, '"a\ud800"')
    with pytest.raises(InvalidSchemaError, match="no character of Unicode"):
        guid(AVRO, '{"type": "string", "doc": "\\ud800"}')
    with pytest.raises(InvalidSchemaError, match="no character of Unicode"):
        guid_of(SchemaText(type=AVRO, text="1", metadata={"a": "\ud800"}))

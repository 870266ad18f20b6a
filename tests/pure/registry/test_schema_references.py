"""A schema is resolved with all that it refers to, or refused with the reference at fault."""

from __future__ import annotations

import pytest

from rayq.errors import InvalidSchemaError, SchemaTooLargeError
from rayq.registry import schema_text
from rayq.registry.schema_text import SchemaReference
from tests.pure.registry.support import AVRO, JSON, named, resolved_with, schema_of


def test_what_a_schema_refers_to_comes_before_it() -> None:
    registered = {
        "top": schema_of(AVRO, "string", references=named("left", "right")),
        "left": schema_of(AVRO, "string", references=named("base")),
        "right": schema_of(AVRO, "string", references=named("base")),
        "base": schema_of(AVRO, "string"),
    }
    resolved = resolved_with(schema_of(AVRO, "string", references=named("top")), registered)
    assert [schema.name for schema in resolved.referenced] == ["base", "left", "right", "top"]


def test_a_reference_to_nothing_is_refused() -> None:
    with pytest.raises(
        InvalidSchemaError, match="'b' to version 1 of subject 'b' leads to nothing"
    ):
        resolved_with(schema_of(AVRO, "string", references=named("b")), {})


def test_a_reference_to_another_type_is_refused() -> None:
    registered = {"b": schema_of(JSON, {})}
    with pytest.raises(InvalidSchemaError, match="type JSON, and this one is of type AVRO"):
        resolved_with(schema_of(AVRO, "string", references=named("b")), registered)


def test_a_cycle_of_references_is_refused() -> None:
    """Whatever the names by which its members call each other."""
    registered = {
        "a": schema_of(AVRO, "string", references=(SchemaReference("to b", "b", 1),)),
        "b": schema_of(AVRO, "string", references=(SchemaReference("to a", "a", 1),)),
    }
    with pytest.raises(InvalidSchemaError, match="leads back to itself, by way of 'a', 'to b'"):
        resolved_with(schema_of(AVRO, "string", references=named("a")), registered)


def test_one_name_for_two_schemas_is_refused() -> None:
    registered = {
        "a": schema_of(AVRO, "string", references=(SchemaReference("same", "b", 1),)),
        "b": schema_of(AVRO, "string"),
        "c": schema_of(AVRO, "string"),
    }
    top = schema_of(AVRO, "string", references=(*named("a"), SchemaReference("same", "c", 1)))
    with pytest.raises(InvalidSchemaError, match="The name 'same' leads to"):
        resolved_with(top, registered)


def test_a_hundred_references_may_follow_each_other_and_no_more() -> None:
    def chain(links: int) -> None:
        registered = {
            str(link): schema_of(AVRO, "string", references=named(str(link - 1)))
            for link in range(1, links)
        }
        registered["0"] = schema_of(AVRO, "string")
        resolved_with(schema_of(AVRO, "string", references=named(str(links - 1))), registered)

    chain(100)
    with pytest.raises(InvalidSchemaError, match="more than 100 references below"):
        chain(101)


def test_what_is_referred_to_has_limits() -> None:
    many = named(*(str(number) for number in range(schema_text.REFERENCES_MAX + 1)))
    with pytest.raises(SchemaTooLargeError, match="1,001 references, and 1,000 are allowed"):
        resolved_with(schema_of(AVRO, "string", references=many), {})
    large = {str(number): schema_of(AVRO, '"' + "x" * 1_000_000 + '"') for number in range(9)}
    with pytest.raises(SchemaTooLargeError, match="more than 8,388,608 bytes"):
        resolved_with(schema_of(AVRO, "string", references=named(*large)), large)

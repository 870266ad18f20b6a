"""JSON Schemas: their canonical text, which evolve into which, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rayq.errors import InvalidSchemaError
from rayq.registry.checks import canonical_schema
from rayq.registry.compatibility import json_schema
from rayq.registry.formats import json_schema as json_schemas
from rayq.registry.schema_text import SchemaReference
from tests.pure.registry.support import (
    JSON,
    alone,
    between,
    guid,
    misfits,
    named,
    resolved_with,
    schema_of,
    text_of,
)

DRAFTS = {
    4: "http://json-schema.org/draft-04/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    7: "http://json-schema.org/draft-07/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
    2020: "https://json-schema.org/draft/2020-12/schema",
}
VALIDATORS = {
    4: jsonschema.Draft4Validator,
    6: jsonschema.Draft6Validator,
    7: jsonschema.Draft7Validator,
    2019: jsonschema.Draft201909Validator,
    2020: jsonschema.Draft202012Validator,
}
STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def record(*required: str, closed: bool = True, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others, unless it is not closed."""
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    if closed:
        schema["additionalProperties"] = False
    return schema


# --- canonical text -------------------------------------------------------------------------------


def test_white_space_makes_no_difference_and_order_only_until_normalized() -> None:
    one, other = '{ "type": "string",\n "maxLength": 1 }', '{"maxLength":1,"type":"string"}'
    assert text_of(JSON, one) == '{"type":"string","maxLength":1}'
    assert guid(JSON, one) != guid(JSON, other)
    assert guid(JSON, one, normalize=True) == guid(JSON, other, normalize=True)


def test_all_that_users_wrote_is_kept() -> None:
    schema = {
        **record("name", name={"type": "string", "title": "Größe 😀", "default": "x"}),
        "$id": "http://example.com/a.json",
        "javaType": "a.B",
        "x-more": [1, 2.5, None, {"b": 1, "a": 2}],
        "examples": [{"name": "y"}],
    }
    assert json.loads(text_of(JSON, schema)) == schema
    assert json.loads(text_of(JSON, schema, normalize=True)) == schema


@pytest.mark.parametrize("draft", DRAFTS)
def test_each_draft_is_known(draft: int) -> None:
    schema = {"$schema": DRAFTS[draft], **record("a", a=STRING)}
    assert json.loads(text_of(JSON, schema)) == schema
    assert (
        misfits(JSON, {**schema, "required": []} if draft > 4 else record(a=STRING), schema) == []
    )
    assert misfits(JSON, schema, {"$schema": DRAFTS[draft], **record(a=STRING)}) == [
        "required_attribute_added"
    ]


# --- references -----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [None, "http://example.com/schemas/order.json"])
def test_schemas_of_references_are_found(base: str | None) -> None:
    """By the name of the reference, or by it within the URI of the schema."""
    registered = {
        "address.json": schema_of(
            JSON,
            {"type": "object", "properties": {"at": {"$ref": "geo.json#/definitions/point"}}},
            references=named("geo.json"),
        ),
        "geo.json": schema_of(JSON, {"definitions": {"point": record(x=NUMBER)}}),
    }
    schema = {**({"$id": base} if base else {}), **record(to={"$ref": "address.json"})}
    order = schema_of(JSON, schema, references=named("address.json"))
    resolved = resolved_with(order, registered)
    canonical_schema(resolved)
    geo = schema_of(JSON, {"definitions": {"point": record(x=INTEGER)}})
    narrowed = resolved_with(order, {**registered, "geo.json": geo})
    assert between(resolved, narrowed) == []
    (found,) = between(narrowed, resolved)
    assert found.reason.kind == "type_narrowed"
    assert found.reason.path == "#/properties/to/properties/at/properties/x/type"


def test_the_name_of_a_reference_may_be_the_id_of_its_schema() -> None:
    uri = "http://example.com/base.json"
    registered = {"base": schema_of(JSON, {"$id": uri, "type": "string"})}
    top = schema_of(JSON, {"$ref": uri}, references=(SchemaReference(uri, "base", 1),))
    resolved = resolved_with(top, registered)
    canonical_schema(resolved)
    assert between(resolved, alone(JSON, STRING), "FULL") == []


def test_a_schema_that_refers_to_itself() -> None:
    def tree(value: Any) -> dict[str, Any]:
        return {
            "$ref": "#/definitions/tree",
            "definitions": {
                "tree": record(
                    value=value,
                    children={"type": "array", "items": {"$ref": "#/definitions/tree"}},
                )
            },
        }

    assert misfits(JSON, tree(NUMBER), tree(INTEGER)) == []
    assert set(misfits(JSON, tree(INTEGER), tree(NUMBER))) == {"type_narrowed"}
    assert misfits(JSON, {**tree(INTEGER), "title": "t"}, tree(INTEGER), "FULL") == []


def test_a_reference_that_leads_straight_back_is_not_judged() -> None:
    loop = {
        "definitions": {"a": {"allOf": [{"$ref": "#/definitions/a"}]}},
        "$ref": "#/definitions/a",
    }
    text_of(JSON, loop)
    assert misfits(JSON, loop, STRING) == ["cannot_be_judged"]
    assert misfits(JSON, STRING, loop) == ["type_narrowed"]


@pytest.mark.parametrize(
    "reference",
    [
        *("#/definitions/missing", "missing.json", "http://example.com/a.json", "#anchor"),
        *("file:///etc/passwd", "#/enum/x", "http://[", "#/enum/5"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused_and_nothing_is_fetched(reference: str) -> None:
    schema = {"type": "string", "enum": ["a"], "allOf": [{"$ref": reference}]}
    with pytest.raises(InvalidSchemaError, match="leads nowhere: no schema is fetched"):
        text_of(JSON, schema)


def test_a_reference_to_what_is_no_schema_is_refused() -> None:
    with pytest.raises(InvalidSchemaError, match="wrong at #/type"):
        text_of(JSON, {"x": {"type": "nonsense"}, "$ref": "#/x"})
    with pytest.raises(InvalidSchemaError, match="wrong at #"):
        text_of(JSON, {"x": 5, "$ref": "#/x"})


# --- evolution: new, earlier, kinds of what does not fit -------------------------------------------

A, B = record("a", a=STRING), record("b", b=STRING)
CHANGES: dict[str, tuple[Any, Any, list[str]]] = {
    "anything": ({}, {"type": "object"}, []),
    "anything is narrowed": ({"type": "object"}, {}, ["type_narrowed"]),
    "true": (True, STRING, []),
    "false": (False, STRING, ["schema_is_false"]),
    "from false": (STRING, False, []),
    "annotations": (
        {**STRING, "title": "a", "format": "email", "default": 1, "unknown": 2},
        STRING,
        [],
    ),
    "another type": (STRING, NUMBER, ["type_changed"]),
    "integer to number": (NUMBER, INTEGER, []),
    "number to integer": (INTEGER, NUMBER, ["type_narrowed"]),
    "more types": ({"type": ["string", "null"]}, STRING, []),
    "fewer types": (STRING, {"type": ["string", "null"]}, ["type_narrowed"]),
    # strings
    "longer": ({**STRING, "maxLength": 12}, {**STRING, "maxLength": 10}, []),
    "shorter": ({**STRING, "maxLength": 9}, {**STRING, "maxLength": 10}, ["max_length_decreased"]),
    "a limit": ({**STRING, "maxLength": 9}, STRING, ["max_length_added"]),
    "a limit for strings is none for numbers": ({"maxLength": 9}, NUMBER, []),
    "less at least": ({**STRING, "minLength": 1}, {**STRING, "minLength": 2}, []),
    "more at least": (
        {**STRING, "minLength": 3},
        {**STRING, "minLength": 2},
        ["min_length_increased"],
    ),
    "a pattern": ({**STRING, "pattern": "a"}, STRING, ["pattern_added"]),
    "another pattern": (
        {**STRING, "pattern": "a"},
        {**STRING, "pattern": "b"},
        ["pattern_changed"],
    ),
    "no pattern": (STRING, {**STRING, "pattern": "b"}, []),
    # numbers
    "a higher maximum": ({**NUMBER, "maximum": 11}, {**NUMBER, "maximum": 10}, []),
    "a lower maximum": ({**NUMBER, "maximum": 9}, {**NUMBER, "maximum": 10}, ["maximum_decreased"]),
    "a maximum that is excluded": (
        {**NUMBER, "exclusiveMaximum": 10},
        {**NUMBER, "maximum": 10},
        ["maximum_decreased"],
    ),
    "a maximum that is included": (
        {**NUMBER, "maximum": 10},
        {**NUMBER, "exclusiveMaximum": 10},
        [],
    ),
    "a minimum": ({**NUMBER, "minimum": 0}, NUMBER, ["minimum_added"]),
    "a lower minimum": ({**NUMBER, "minimum": 0.5}, {**NUMBER, "exclusiveMinimum": 0.5}, []),
    "a higher minimum": ({**NUMBER, "minimum": 1}, {**NUMBER, "minimum": 0}, ["minimum_increased"]),
    "a finer multiple": ({**NUMBER, "multipleOf": 2}, {**NUMBER, "multipleOf": 10}, []),
    "a coarser multiple": (
        {**NUMBER, "multipleOf": 10},
        {**NUMBER, "multipleOf": 2},
        ["multiple_of_changed"],
    ),
    "decimal multiples": ({**NUMBER, "multipleOf": 0.01}, {**NUMBER, "multipleOf": 0.1}, []),
    "integers are multiples": ({**NUMBER, "multipleOf": 0.5}, INTEGER, []),
    # values
    "another value more": ({"enum": ["a", "b"]}, {"enum": ["a"]}, []),
    "a value less": ({"enum": ["a"]}, {"enum": ["a", "b"]}, ["enum_array_narrowed"]),
    "values to their type": (STRING, {"enum": ["a"]}, []),
    "a type to values": ({"enum": ["a"]}, STRING, ["enum_array_narrowed"]),
    "values to a type that lacks one": (STRING, {"enum": ["a", 1]}, ["value_refused"]),
    "values that their own type excludes": (STRING, {**STRING, "enum": ["a", 1]}, []),
    "values to a pattern": ({**STRING, "pattern": "^a"}, {"enum": ["a", "ab"]}, []),
    "another constant": ({"const": 1}, {"const": 2}, ["enum_array_narrowed"]),
    "true is not 1": ({"const": 1}, {"const": True}, ["enum_array_narrowed"]),
    "booleans are two values": ({"enum": [True, False]}, {"type": "boolean"}, []),
    # objects
    "an optional property more, closed": (record(a=STRING, b=STRING), record(a=STRING), []),
    "an optional property more, open": (
        record(a=STRING, b=STRING, closed=False),
        record(a=STRING, closed=False),
        ["property_added_to_open_content_model"],
    ),
    "an optional property of any value more, open": (
        record(a=STRING, b={}, closed=False),
        record(a=STRING, closed=False),
        [],
    ),
    "a required property more": (
        record("b", a=STRING, b=STRING),
        record(a=STRING),
        ["required_property_added"],
    ),
    "a required property with a default": (
        record("b", b={**STRING, "default": ""}),
        record(),
        ["required_property_added"],
    ),
    "a property becomes required": (A, record(a=STRING), ["required_attribute_added"]),
    "a property becomes optional": (record(a=STRING), A, []),
    "a property less, closed": (
        record(),
        record(a=STRING),
        ["property_removed_from_closed_content_model"],
    ),
    "a property less, open": (record(closed=False), record(a=STRING, closed=False), []),
    "a property less, covered": (
        {**record(), "additionalProperties": STRING},
        {**record(a=STRING), "additionalProperties": STRING},
        [],
    ),
    "a property less, not covered": (
        {**record(), "additionalProperties": NUMBER},
        {**record(a=STRING), "additionalProperties": NUMBER},
        ["property_removed_from_partially_open_content_model"],
    ),
    "a property more, covered": (
        {**record(a=STRING), "additionalProperties": STRING},
        {**record(), "additionalProperties": STRING},
        [],
    ),
    "a property more, not covered": (
        {**record(a=NUMBER), "additionalProperties": STRING},
        {**record(), "additionalProperties": STRING},
        ["property_added_not_covered_by_partially_open_content_model"],
    ),
    "an object is closed": (
        record(a=STRING),
        record(a=STRING, closed=False),
        ["additional_properties_removed"],
    ),
    "an object is opened": (record(a=STRING, closed=False), record(a=STRING), []),
    "a property that was impossible": (record(a=STRING), record(a=False), []),
    "names by a pattern": (
        {**record(), "patternProperties": {"^a": STRING}},
        record(ab=STRING),
        [],
    ),
    "names by a pattern with another type": (
        {**record(), "patternProperties": {"^a": NUMBER}},
        record(ab=STRING),
        ["type_changed"],
    ),
    "the same pattern": (
        {**record(), "patternProperties": {"^a": NUMBER}},
        {**record(), "patternProperties": {"^a": INTEGER}},
        [],
    ),
    "a pattern less": (
        record(),
        {**record(), "patternProperties": {"^a": INTEGER}},
        ["additional_properties_removed"],
    ),
    "a pattern more, open": (
        {"type": "object", "patternProperties": {"^a": INTEGER}},
        {"type": "object"},
        ["type_narrowed"],
    ),
    "a pattern of JavaScript": (
        {**record(a=STRING, closed=False), "patternProperties": {r"^\p{L}": STRING}},
        record(a=STRING),
        ["cannot_be_judged"],
    ),
    "more properties": ({"type": "object", "maxProperties": 2}, record(a={}, b={}), []),
    "fewer properties": (
        {"type": "object", "maxProperties": 1},
        record(a={}, b={}),
        ["max_properties_added"],
    ),
    "what is required is at least there": ({"type": "object", "minProperties": 1}, A, []),
    "names of properties": (
        {"type": "object", "propertyNames": {"maxLength": 3}},
        record(abc=STRING),
        [],
    ),
    "names of properties that do not fit": (
        {"type": "object", "propertyNames": {"maxLength": 2}},
        record(abc=STRING),
        ["property_names_narrowed"],
    ),
    "a dependency": (
        {"type": "object", "dependencies": {"a": ["b"]}},
        {"type": "object"},
        ["dependency_array_extended"],
    ),
    "a dependency less": (
        {"type": "object"},
        {"type": "object", "dependencies": {"a": ["b"]}},
        [],
    ),
    "a dependency on what is required": (
        {"type": "object", "dependencies": {"a": ["b"]}},
        {"type": "object", "required": ["b"]},
        [],
    ),
    "a dependency of what cannot be there": ({"dependencies": {"z": ["b"]}}, A, []),
    "a schema as dependency": (
        {"type": "object", "dependencies": {"a": {"required": ["c"]}}},
        {"type": "object"},
        ["required_property_added"],
    ),
    # arrays
    "items": ({"type": "array", "items": NUMBER}, {"type": "array", "items": INTEGER}, []),
    "narrower items": (
        {"type": "array", "items": INTEGER},
        {"type": "array", "items": NUMBER},
        ["type_narrowed"],
    ),
    "items of a tuple": (
        {"type": "array", "items": [NUMBER, STRING], "additionalItems": False},
        {"type": "array", "items": [INTEGER, STRING], "additionalItems": False},
        [],
    ),
    "a tuple grows": (
        {"type": "array", "items": [NUMBER, STRING], "additionalItems": False},
        {"type": "array", "items": [NUMBER], "additionalItems": False},
        [],
    ),
    "a tuple shrinks": (
        {"type": "array", "items": [NUMBER], "additionalItems": False},
        {"type": "array", "items": [NUMBER, STRING], "additionalItems": False},
        ["item_removed_from_closed_content_model"],
    ),
    "a tuple to a list": (
        {"type": "array", "items": NUMBER},
        {"type": "array", "items": [NUMBER, INTEGER], "additionalItems": False},
        [],
    ),
    "longer arrays": (
        {"type": "array", "maxItems": 2},
        {"type": "array", "items": [{}], "additionalItems": False},
        [],
    ),
    "unique items": (
        {"type": "array", "uniqueItems": True},
        {"type": "array"},
        ["unique_items_added"],
    ),
    "one item is unique": (
        {"type": "array", "uniqueItems": True},
        {"type": "array", "maxItems": 1},
        [],
    ),
    "contains": ({"type": "array", "contains": STRING}, {"type": "array"}, ["cannot_be_judged"]),
    "contains the same": (
        {"type": "array", "contains": STRING, "maxItems": 3},
        {"type": "array", "contains": STRING, "maxItems": 2},
        [],
    ),
    # alternatives
    "one alternative more": ({"anyOf": [STRING, NUMBER]}, {"anyOf": [STRING]}, []),
    "one alternative less": ({"anyOf": [STRING]}, {"anyOf": [NUMBER, STRING]}, ["type_changed"]),
    "a type becomes one of several": ({"oneOf": [NUMBER, STRING]}, STRING, []),
    "several types become alternatives": (
        {"oneOf": [{"type": "null"}, NUMBER, STRING]},
        {"type": ["string", "number"]},
        [],
    ),
    "one of several becomes a type": (STRING, {"oneOf": [STRING]}, []),
    "alternatives that are not apart": (
        {"oneOf": [STRING, {"maxLength": 5}]},
        STRING,
        ["cannot_be_judged"],
    ),
    "objects one of which": ({"oneOf": [A, B]}, A, []),
    "alternatives that stay apart": (
        {"oneOf": [record(a=STRING), record(a=STRING, b=NUMBER), NUMBER]},
        {"oneOf": [record(a=STRING), record(a=STRING, b=NUMBER)]},
        [],
    ),
    "alternatives by a constant": (
        {"oneOf": [record("t", t={"const": 1}), record("t", t={"const": 2})]},
        record("t", t={"const": 1}),
        [],
    ),
    "one of to any of": ({"anyOf": [STRING, NUMBER]}, {"oneOf": [STRING, NUMBER]}, []),
    "all of in another order": (
        {"allOf": [{"maxLength": 5}, STRING]},
        {"allOf": [STRING, {"maxLength": 5}]},
        [],
    ),
    "all of to one schema": (
        {**STRING, "maxLength": 5},
        {"allOf": [STRING, {"maxLength": 5}]},
        [],
    ),
    "one schema to all of": (
        {"allOf": [STRING, {"maxLength": 5}]},
        {**STRING, "maxLength": 5},
        [],
    ),
    "all of is narrowed": (
        {"allOf": [STRING, {"enum": ["blue"]}]},
        {"allOf": [STRING, {"enum": ["red"]}]},
        ["value_refused"],
    ),
    "not less": ({"not": INTEGER}, {"not": NUMBER}, []),
    "not more": ({"not": NUMBER}, {"not": INTEGER}, ["not_type_extended"]),
    "not another type": ({"not": NUMBER}, STRING, []),
    "if": (
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"type": "object"},
        ["required_property_added"],
    ),
    "the same if": (
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "maxProperties": 5},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "maxProperties": 4},
        [],
    ),
    "an if that is met": (
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        record("a", "b", a={}, b={}),
        [],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_evolution_of_draft_7(change: str) -> None:
    new, earlier, kinds = CHANGES[change]
    new, earlier = json.dumps(new), json.dumps(earlier)
    assert misfits(JSON, new, earlier) == kinds
    assert misfits(JSON, earlier, new, "FORWARD") == kinds
    assert misfits(JSON, new, new, "FULL") == misfits(JSON, earlier, earlier, "FULL") == []


def test_a_reason_says_what_and_where() -> None:
    (found,) = between(
        alone(JSON, record(a=STRING, b=STRING, closed=False)),
        alone(JSON, record(a=STRING, closed=False)),
    )
    assert str(found) == (
        "Version 1: the new schema cannot read all that it wrote: the writer may have put anything"
        " into property 'b' (property_added_to_open_content_model at #/properties/b)"
    )


def test_drafts_say_the_same_in_other_words() -> None:
    new, old = DRAFTS[2020], DRAFTS[4]
    pairs = [
        (
            {"type": "array", "prefixItems": [NUMBER], "items": False},
            {"type": "array", "items": [NUMBER], "additionalItems": False},
        ),
        ({**NUMBER, "exclusiveMinimum": 1}, {**NUMBER, "minimum": 1, "exclusiveMinimum": True}),
        (
            {"type": "object", "dependentRequired": {"a": ["b"]}},
            {"type": "object", "dependencies": {"a": ["b"]}},
        ),
        ({**record(a=STRING, closed=False), "unevaluatedProperties": False}, record(a=STRING)),
        ({"$defs": {"s": STRING}, "$ref": "#/$defs/s", "maxLength": 3}, {**STRING, "maxLength": 3}),
    ]
    for modern, draft_4 in pairs:
        schemas = {"$schema": new, **modern}, {"$schema": old, **draft_4}
        assert misfits(JSON, *schemas, "FULL") == []


def test_integers_of_draft_4_are_fewer() -> None:
    """1.0 is none there."""
    integers = [{"$schema": DRAFTS[draft], **INTEGER} for draft in (4, 6)]
    assert misfits(JSON, integers[1], integers[0]) == []
    assert misfits(JSON, *integers) == ["type_narrowed"]


def test_keywords_of_other_drafts_mean_nothing() -> None:
    schemas = [{"$schema": DRAFTS[4], "const": 1}, {"$schema": DRAFTS[4]}]
    assert misfits(JSON, *schemas, "FULL") == []
    beside = {"$ref": "#/definitions/s", "definitions": {"s": STRING}, "maxLength": 3}
    assert misfits(JSON, {"$schema": DRAFTS[7], **beside}, STRING) == []
    assert misfits(JSON, {"$schema": DRAFTS[2019], **beside}, STRING) == ["max_length_added"]


@pytest.mark.parametrize("keyword", ["unevaluatedProperties", "$dynamicRef"])
def test_what_cannot_be_judged_is_refused_by_its_keyword(keyword: str) -> None:
    value = False if keyword == "unevaluatedProperties" else "#"
    schema = {"$schema": DRAFTS[2020], "allOf": [record(closed=False)], keyword: value}
    (found,) = between(alone(JSON, schema), alone(JSON, {"type": "object"}))
    assert found.reason.kind == "cannot_be_judged"
    assert f"the keyword {keyword} cannot be judged here" in str(found)


HUGE = int("9" * 900)
LOOP = {"definitions": {"a": {"allOf": [{"$ref": "#/definitions/a"}]}}, "$ref": "#/definitions/a"}


def test_a_panic_of_the_tables_in_rust_is_no_end() -> None:
    """They do not know what to do with a RecursionError in the middle of a comparison."""

    class PanicException(BaseException):
        pass

    class Panics:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def is_valid(self, value: Any) -> bool:
            raise PanicException

    node = json_schemas.parse_json_schema(alone(JSON, STRING))
    draft = dataclasses.replace(node.draft, validator=Panics)
    assert dataclasses.replace(node, draft=draft).accepts("a") is None


@pytest.mark.parametrize(
    "schema",
    [
        {**STRING, "pattern": r"^\p{L}"},
        {"pattern": "("},
        {"patternProperties": {"(": {}}},
        {"multipleOf": HUGE},
        {"multipleOf": 0.5},
        {"maximum": HUGE, "minimum": -HUGE},
        {"maxLength": HUGE},
        LOOP,
    ],
)
@pytest.mark.parametrize("other", [{"enum": ["a", {"b": 1}, HUGE, 0.1]}, {}, STRING, NUMBER, LOOP])
def test_what_no_validator_can_tell_is_told_by_none(schema: Any, other: Any) -> None:
    """No check fails, whatever the answer."""
    misfits(JSON, json.dumps(schema), json.dumps(other), "FULL")
    excluding = {"not": schema, "definitions": schema.get("definitions", {})}
    misfits(JSON, json.dumps(excluding), json.dumps(other), "FULL")


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "no JSON"),
        ("[]", r"\[\], and a schema is an object"),
        ("5", "5, and a schema is an object"),
        ("null", "None, and a schema is an object"),
        ('{"type": "nonsense"}', "wrong at #/type: 'nonsense'"),
        ('{"type": 5}', "wrong at #/type"),
        ('{"properties": []}', "wrong at #/properties"),
        ('{"properties": {"a": 5}}', "wrong at #/properties/a"),
        ('{"required": "a"}', "wrong at #/required"),
        ('{"minLength": -1}', "wrong at #/minLength"),
        ('{"allOf": []}', "wrong at #/allOf"),
        ('{"items": 3}', "wrong at #/items"),
        ('{"$ref": 3}', "wrong at|no type|not of type"),
        ('{"$schema": "http://example.com/my-draft"}', "is unknown. Use one of json-schema.org"),
        ('{"$schema": 5}', "is unknown"),
        ('{"$schema": "http://json-schema.org/draft-03/schema#"}', "is unknown"),
        ('{"$schema": "http://json-schema.org/draft-04/schema#", "allOf": [true]}', "wrong at"),
        ('{"a": 1, "a": 2}', "more than once"),
        ('{"multipleOf": 1e999}', "too large"),
        ('{"$id": "http://["}', "no URI: Invalid IPv6 URL"),
        ('{"$id": 5}', "wrong at #"),
        ('{"pattern": "("}', None),
        ('{"title": "\\u0000", "properties": {"": {}, "größe/~": {}}}', None),
    ],
)
def test_what_is_no_json_schema_is_refused_and_told(text: str, why: str | None) -> None:
    if why is None:
        text_of(JSON, text)
        assert misfits(JSON, text, text, "FULL") == []
        return
    with pytest.raises(InvalidSchemaError, match=why):
        text_of(JSON, text)


def test_ten_thousand_nested_schemas_are_refused() -> None:
    def nested(depth: int) -> str:
        return '{"items":' * depth + "{}" + "}" * depth

    assert text_of(JSON, nested(50)) == nested(50)
    assert misfits(JSON, nested(50), nested(50)) == []
    for depth in (1_000, 10_000):
        with pytest.raises(InvalidSchemaError, match="nested"):
            text_of(JSON, nested(depth))


def test_schemas_that_are_used_in_many_places_are_compared_once() -> None:
    """Else each level would make the proof several times as long."""

    def levels(value: Any) -> dict[str, Any]:
        definitions = {"0": record("value", value=value)}
        for level in range(1, 15):
            inner = {"$ref": f"#/definitions/{level - 1}"}
            definitions[str(level)] = record(
                one={"anyOf": [inner, {"type": "null"}]},
                many={"type": "array", "items": inner},
                by_name={"type": "object", "additionalProperties": inner},
            )
        return {"$ref": "#/definitions/14", "definitions": definitions}

    assert misfits(JSON, levels(NUMBER), levels(INTEGER)) == []
    assert misfits(JSON, levels(INTEGER), levels(NUMBER)) != []
    assert "too_complex" not in misfits(JSON, levels(INTEGER), levels(NUMBER))


def test_a_proof_that_would_take_forever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many alternatives on one side against each on the other, on every level."""

    def alternatives(limit: int) -> dict[str, Any]:
        levels: dict[str, Any] = {"0": {"type": "integer", "maximum": limit}}
        for level in range(1, 30):
            inner = {"$ref": f"#/definitions/{level - 1}"}
            levels[str(level)] = {"anyOf": [record(p=inner, **{f"q{n}": {}}) for n in range(4)]}
        return {"$ref": "#/definitions/29", "definitions": levels}

    monkeypatch.setattr(json_schema, "STEPS_MAX", 1_000)
    assert misfits(JSON, alternatives(1), alternatives(2)) == ["too_complex"]


# --- what is accepted, is accepted by validators -----------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c"])


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> Any:
    """Schemas of draft 7 over few names and values, so that two of them often meet."""
    leaves = ["string", "number", "integer", "boolean", "null", "enum", "any", "ref", "ref"]
    branches = ["object"] * 3 + ["array", "tuple", "anyOf", "oneOf", "allOf", "not", "types", "if"]
    kind = draw(st.sampled_from(leaves + branches if depth > 0 else leaves))
    inner = schemas(depth=depth - 1)
    small = st.integers(0, 3)
    schema: dict[str, Any] = {"type": kind}
    if kind == "ref":
        return {"$ref": draw(st.sampled_from(["#/definitions/d", "#/definitions/e"]))}
    if kind == "any":
        return draw(st.sampled_from([{}, True, False, {"maxLength": 2}, {"minimum": 1}]))
    if kind == "enum":
        return {
            "enum": draw(
                st.lists(
                    st.sampled_from(["x", "yy", 1, 2.5, None, True]), min_size=1, unique_by=repr
                )
            )
        }
    if kind == "types":
        names = st.sampled_from(
            ["string", "number", "integer", "boolean", "null", "object", "array"]
        )
        return {"type": draw(st.lists(names, min_size=1, max_size=3, unique=True))}
    if kind == "string":
        schema |= draw(st.fixed_dictionaries({}, optional={"minLength": small, "maxLength": small}))
    elif kind in ("number", "integer"):
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        schema |= draw(st.fixed_dictionaries({}, optional=dict.fromkeys(bounds, small)))
        if draw(st.booleans()):
            schema["multipleOf"] = draw(st.sampled_from([1, 2, 4]))
    elif kind == "object":
        properties = draw(st.dictionaries(NAMES, inner, max_size=3))
        schema["properties"] = properties
        schema["additionalProperties"] = draw(st.one_of(st.booleans(), st.just(False), inner))
        schema["required"] = draw(st.lists(NAMES, max_size=2, unique=True))
        extra = draw(st.sampled_from(["", "", "pattern", "dependency", "names", "count"]))
        if extra == "pattern":
            schema["patternProperties"] = {draw(st.sampled_from(["^a", "b|c"])): draw(inner)}
        elif extra == "dependency":
            schema["dependencies"] = {
                draw(NAMES): draw(st.one_of(st.lists(NAMES, min_size=1, max_size=1), inner))
            }
        elif extra == "names":
            schema["propertyNames"] = draw(
                st.sampled_from([{"maxLength": 1}, {"enum": ["a", "b"]}])
            )
        elif extra == "count":
            schema |= draw(
                st.fixed_dictionaries({}, optional={"minProperties": small, "maxProperties": small})
            )
    elif kind == "array":
        schema["items"] = draw(inner)
        schema |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "minItems": small,
                    "maxItems": small,
                    "uniqueItems": st.booleans(),
                    "contains": inner,
                },
            )
        )
    elif kind == "tuple":
        schema = {
            "type": "array",
            "items": draw(st.lists(inner, min_size=1, max_size=2)),
            "additionalItems": draw(st.one_of(st.booleans(), inner)),
        }
    elif kind in ("anyOf", "oneOf", "allOf"):
        return {kind: draw(st.lists(inner, min_size=1, max_size=3))}
    elif kind == "not":
        return {"not": draw(inner)}
    elif kind == "if":
        return {"if": draw(inner), "then": draw(inner), "else": draw(inner)}
    return schema


@st.composite
def evolved(draw: st.DrawFn, schema: Any) -> Any:
    """A schema somewhat changed."""
    change = draw(st.integers(0, 11))
    if change == 0 or not isinstance(schema, dict):
        return draw(schemas(depth=1))
    if change == 1:
        return {"anyOf": draw(st.permutations([schema, draw(schemas(depth=1))]))}
    if change == 2:
        return {"oneOf": draw(st.permutations([schema, draw(schemas(depth=0))]))}
    changed = dict(schema)
    if changed and change in (3, 4):
        changed.pop(draw(st.sampled_from(sorted(changed))))
        return changed
    for keyword, value in schema.items():
        if keyword in ("minLength", "minItems", "minimum", "minProperties"):
            changed[keyword] = value + draw(st.sampled_from([0, -1, 1])) if value else value
        elif keyword in ("maxLength", "maxItems", "maximum", "maxProperties"):
            changed[keyword] = value + draw(st.sampled_from([0, 1, 1]))
        elif keyword == "required":
            changed[keyword] = value[: draw(st.integers(0, len(value)))]
        elif keyword in ("properties", "patternProperties"):
            changed[keyword] = {name: draw(evolved(inner)) for name, inner in value.items()}
            if change == 5:
                changed[keyword] |= draw(st.dictionaries(NAMES, schemas(depth=0), max_size=1))
        elif keyword in ("anyOf", "oneOf", "allOf"):
            changed[keyword] = [draw(evolved(inner)) for inner in value]
            if change == 6:
                changed[keyword].append(draw(schemas(depth=0)))
        elif isinstance(value, dict) and keyword != "dependencies":
            changed[keyword] = draw(evolved(value))
    return changed


@st.composite
def definitions(draw: st.DrawFn) -> dict[str, Any]:
    """Two objects, which may refer to themselves and to each other."""
    return {
        name: {
            "type": "object",
            "properties": draw(st.dictionaries(NAMES, schemas(depth=1), max_size=2)),
            "additionalProperties": draw(st.booleans()),
        }
        for name in "de"
    }


def in_draft(schema: Any, draft: int) -> Any:
    """A schema of draft 7 in the words of another draft."""
    if not isinstance(schema, dict) or draft <= 7:
        return schema
    written: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("anyOf", "oneOf", "allOf") or (
            keyword == "items" and isinstance(value, list)
        ):
            value = [in_draft(inner, draft) for inner in value]
            if keyword == "items" and draft == 2020:
                keyword = "prefixItems"
        elif keyword in ("properties", "patternProperties"):
            value = {name: in_draft(inner, draft) for name, inner in value.items()}
        elif keyword == "dependencies":
            for name, needed in value.items():
                if isinstance(needed, list):
                    written.setdefault("dependentRequired", {})[name] = needed
                else:
                    written.setdefault("dependentSchemas", {})[name] = in_draft(needed, draft)
            continue
        else:
            if keyword == "additionalItems" and draft == 2020:
                keyword = "items"
            value = in_draft(value, draft)
        written[keyword] = value
    return written


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 5),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.text("xyab", max_size=4),
    st.lists(st.integers(0, 2), max_size=3),
    st.dictionaries(NAMES, st.sampled_from(["x", 1, None, {}]), max_size=3),
)


def values(schema: Any, defined: dict[str, Any], refs_left: int = 3) -> st.SearchStrategy[Any]:
    """Values of which many are valid by a schema."""

    def within(inner: Any) -> st.SearchStrategy[Any]:
        return values(inner, defined, refs_left)

    if not isinstance(schema, dict):
        return ANY
    if "$ref" in schema:
        if not refs_left:
            return ANY
        return values(defined[schema["$ref"][-1]], defined, refs_left - 1)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return st.one_of([within(inner) for inner in schema[keyword]])
    if "if" in schema:
        return st.one_of(within(schema["then"]), within(schema["else"]), within(schema["if"]))
    match schema.get("type"):
        case "string":
            return st.text("xyab", min_size=schema.get("minLength", 0), max_size=6)
        case "number":
            return st.integers(-2, 20) | st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
        case "integer":
            return st.integers(-2, 20) | st.sampled_from([1.0, 2.0])
        case "object":
            given_by = {name: within(inner) for name, inner in schema["properties"].items()}
            for name in "abcd":
                given_by.setdefault(name, within(schema.get("additionalProperties", True)))
            required = {name: given_by.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(required, optional=given_by)
        case "array" if isinstance(schema["items"], list):
            first = [within(inner) for inner in schema["items"]]
            rest = within(schema["additionalItems"])
            return st.builds(
                lambda some, more, count: [*some, *more][:count],
                st.tuples(*first),
                st.lists(rest, max_size=2),
                st.integers(0, 4),
            )
        case "array":
            return st.lists(within(schema["items"]), min_size=schema.get("minItems", 0), max_size=4)
    return ANY


def accepted_is_valid(data: st.DataObject) -> None:
    earlier = data.draw(schemas())
    new = data.draw(st.one_of(evolved(earlier), evolved(earlier), schemas()))
    draft = data.draw(st.sampled_from([6, 7, 2019, 2020]))
    defined = data.draw(definitions())
    evolved_definitions = {
        name: {
            **schema,
            "properties": {key: data.draw(evolved(s)) for key, s in schema["properties"].items()},
        }
        for name, schema in defined.items()
    }
    texts = [
        json.dumps(
            {
                "$schema": DRAFTS[draft],
                "definitions": {n: in_draft(k, draft) for n, k in known.items()},
                "allOf": [in_draft(schema, draft)],
            }
        )
        for schema, known in ((new, evolved_definitions), (earlier, defined))
    ]
    fits = misfits(JSON, *texts) == []
    event(f"fits: {fits}")
    if not fits:
        return
    new_validator, earlier_validator = (VALIDATORS[draft](json.loads(text)) for text in texts)
    for value in data.draw(st.lists(values(earlier, defined), max_size=6)):
        valid = [earlier_validator.is_valid(value), new_validator.is_valid(value)]
        event(f"valid: {valid}")
        assert valid != [True, False], (value, texts)


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@settings(max_examples=60, suppress_health_check=QUIET)
@given(st.data())
def test_what_is_accepted_is_valid(data: st.DataObject) -> None:
    accepted_is_valid(data)


@pytest.mark.thorough
@settings(max_examples=3_000, suppress_health_check=QUIET)
@given(st.data())
def test_much_that_is_accepted_is_valid(data: st.DataObject) -> None:
    accepted_is_valid(data)


@settings(max_examples=60, suppress_health_check=QUIET)
@given(schemas())
def test_a_schema_fits_itself(schema: Any) -> None:
    text = json.dumps({"allOf": [schema], "definitions": {"d": A, "e": B}})
    assert misfits(JSON, text, text, "FULL") == []
    assert text_of(JSON, text_of(JSON, text)) == text_of(JSON, text)

"""Avro schemas: their canonical text, which evolve into which, and what is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from rayq.errors import InvalidSchemaError
from rayq.registry.checks import canonical_schema
from rayq.registry.schema_text import ResolvedSchema
from tests.pure.registry.support import (
    AVRO,
    alone,
    between,
    guid,
    misfits,
    named,
    resolved_with,
    schema_of,
    text_of,
)


def record(*fields: Any, name: str = "R", **more: Any) -> dict[str, Any]:
    """A record. A field is a whole field, or (name, type) or (name, type, default)."""
    whole = [
        field
        if isinstance(field, dict)
        else dict(zip(("name", "type", "default"), field, strict=False))
        for field in fields
    ]
    return {"type": "record", "name": name, "fields": whole, **more}


def refused(new: Any, earlier: Any, level: str = "BACKWARD") -> list[str]:
    """The kinds of what does not fit between two types; [] if they fit."""
    return misfits(AVRO, json.dumps(new), json.dumps(earlier), level)


# --- canonical text -------------------------------------------------------------------------------


def test_spelling_makes_no_difference() -> None:
    assert guid(AVRO, '  { "type" :\n "string" } ') == guid(AVRO, '"string"')
    plain = record(("a", "int"), namespace="x.y")
    for other in (
        {"namespace": "x.y", "fields": plain["fields"], "name": "R", "type": "record"},
        record(("a", {"type": "int"}), name="x.y.R"),
        record({"type": "int", "name": "a", "order": "ascending"}, namespace="x.y"),
    ):
        assert text_of(AVRO, other) == text_of(AVRO, plain)


def test_the_canonical_text_keeps_all_that_users_wrote() -> None:
    schema = record(
        {"name": "a", "type": {"type": "int", "logicalType": "date"}, "default": 1, "doc": "é"},
        {"name": "b", "type": "string", "aliases": ["c"], "order": "ignore", "my": [1.5, None]},
        doc="all",
        aliases=["Old"],
        **{"connect.name": "x"},
    )
    assert json.loads(text_of(AVRO, schema)) == schema
    assert json.loads(text_of(AVRO, schema, normalize=True)) == schema


def test_names_are_relative_to_their_namespace() -> None:
    inner = record(("x", "int"), name="Inner", namespace="a.b")
    schema = record(("one", inner), ("two", "a.b.Inner"), ("three", "a.b.Inner"), namespace="a.b")
    assert text_of(AVRO, schema) == (
        '{"type":"record","name":"R","namespace":"a.b","fields":[{"name":"one","type":{"type":'
        '"record","name":"Inner","fields":[{"name":"x","type":"int"}]}},{"name":"two","type":'
        '"Inner"},{"name":"three","type":"Inner"}]}'
    )


def test_normalized_texts_differ_in_nothing_but_content() -> None:
    one = record(("a", {"type": "int", "z": 1, "b": {"y": 1, "x": 2}}), namespace="n", q=1, p=2)
    other = {
        **record(("a", {"b": {"x": 2, "y": 1}, "type": "int", "z": 1}), name="n.R", p=2, q=1),
        "namespace": "ignored",
    }
    assert guid(AVRO, one) != guid(AVRO, other)
    assert guid(AVRO, one, normalize=True) == guid(AVRO, other, normalize=True)


def test_a_type_without_a_namespace_within_one_that_has_one() -> None:
    inner = record(("x", "int"), name="Inner", namespace="")
    schema = record(("one", inner), namespace="a.b")
    for normalize in (False, True):
        text = text_of(AVRO, schema, normalize=normalize)
        parsed = fastavro.parse_schema(json.loads(text))
        assert parsed["fields"][0]["type"]["name"] == "Inner"
        assert text_of(AVRO, text, normalize=normalize) == text


def test_a_recursive_record_is_a_schema() -> None:
    tree = record(("value", "int"), ("children", {"type": "array", "items": "R"}))
    wider = record(("value", "long"), ("children", {"type": "array", "items": "R"}))
    assert json.loads(text_of(AVRO, tree)) == tree
    assert misfits(AVRO, wider, tree) == []
    assert misfits(AVRO, tree, wider) == ["type_mismatch"]


def test_types_of_references_are_known() -> None:
    registered = {
        "base": schema_of(AVRO, record(("x", "int"), name="n.Base")),
        "middle": schema_of(
            AVRO, record(("base", "n.Base"), name="n.Middle"), references=named("base")
        ),
    }
    top = schema_of(AVRO, record(("m", "n.Middle"), ("b", "n.Base")), references=named("middle"))
    resolved = resolved_with(top, registered)
    assert canonical_schema(resolved).schema.text == (
        '{"type":"record","name":"R","fields":[{"name":"m","type":"n.Middle"},'
        '{"name":"b","type":"n.Base"}]}'
    )
    wider = {**registered, "base": schema_of(AVRO, record(("x", "long"), name="n.Base"))}
    assert between(resolved_with(top, wider), resolved) == []
    assert between(resolved, resolved_with(top, wider)) != []


# --- evolution ------------------------------------------------------------------------------------

R = record(("a", "int"))
ENUM = {"type": "enum", "name": "E", "symbols": ["X", "Y"]}
FITS = {
    "the same": (R, R),
    "a field with a default": (record(("a", "int"), ("b", "string", "")), R),
    "a field is gone": (record(), R),
    "int to long": (record(("a", "long")), R),
    "int to double": ("double", "int"),
    "string to bytes": ("bytes", "string"),
    "a type becomes a union": (["null", "int"], "int"),
    "a union grows": (["null", "int", "string"], ["null", "int"]),
    "a symbol more": ({**ENUM, "symbols": ["X", "Y", "Z"]}, ENUM),
    "a symbol less, with a default": ({**ENUM, "symbols": ["X"], "default": "X"}, ENUM),
    "a field has a new name and an alias": (
        record({"name": "b", "type": "int", "aliases": ["a"]}),
        R,
    ),
    "a record has a new name and an alias": (record(("a", "int"), name="S", aliases=["R"]), R),
    "an alias is within the namespace": (
        record(("a", "int"), name="n.S", aliases=["R"]),
        record(("a", "int"), name="n.R"),
    ),
    "another logical type": (
        {"type": "long", "logicalType": "timestamp-millis"},
        {"type": "long", "logicalType": "timestamp-micros"},
    ),
}
DOES_NOT_FIT = {
    "a field without a default": (
        record(("a", "int"), ("b", "string")),
        R,
        "reader_field_missing_default_value",
    ),
    "long to int": ("int", "long", "type_mismatch"),
    "another name": (record(("a", "int"), name="S"), R, "name_mismatch"),
    "a symbol less": ({**ENUM, "symbols": ["X"]}, ENUM, "missing_enum_symbols"),
    "a union shrinks": (["null"], ["null", "int"], "missing_union_branch"),
    "another size": (
        {"type": "fixed", "name": "F", "size": 4},
        {"type": "fixed", "name": "F", "size": 5},
        "fixed_size_mismatch",
    ),
    "array to map": (
        {"type": "map", "values": "int"},
        {"type": "array", "items": "int"},
        "type_mismatch",
    ),
}


@pytest.mark.parametrize("change", FITS)
def test_a_reader_fits(change: str) -> None:
    new, earlier = FITS[change]
    assert refused(new, earlier) == []
    assert refused(earlier, new, "FORWARD") == []


@pytest.mark.parametrize("change", DOES_NOT_FIT)
def test_a_reader_does_not_fit(change: str) -> None:
    new, earlier, kind = DOES_NOT_FIT[change]
    assert refused(new, earlier) == [kind]
    assert refused(earlier, new, "FORWARD") == [kind]


def test_a_reason_says_what_and_where() -> None:
    new = record(("a", "int"), ("b", "string"))
    (found,) = between(alone(AVRO, new), alone(AVRO, R))
    assert str(found) == (
        "Version 1: the new schema cannot read all that it wrote: the writer lacks fields for which"
        " the reader has no default: b (reader_field_missing_default_value at /fields/1)"
    )


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema, why",
    [
        ("{", "no JSON: .* at line 1, column 2"),
        ("5", "no type"),
        ("null", "no type"),
        ("{}", "no attribute 'type'"),
        ('{"type": "record"}', "no name"),
        ('{"type": {"a": 1}}', "no attribute 'type'"),
        ('{"type": 3}', "3 is no type"),
        ('"Missing"', "no type 'Missing'. Define it before it is used, or add a reference"),
        ('{"type": "string", "type": "int"}', "key 'type' more than once"),
        ('{"type": "int", "x": NaN}', "NaN is no number"),
        ('{"type": "int", "x": 1e999}', "too large"),
        ('{"type": "int", "x": ' + "9" * 5000 + "}", "too long"),
        ({"type": "array"}, "no attribute 'items'"),
        (["int", "int"], "int type already in Union"),
        (["int", ["null"]], "cannot contain other unions"),
        (record(("ä", "int")), "'ä' is no name. Names of Avro begin with"),
        (record(name="Größe"), "is no name"),
        (record(name="a..b"), "is no name"),
        (record(name="int"), "'int' is the name of a type of Avro itself"),
        (record(("a", "int"), ("a", "int")), "Field name a already in use"),
        (record(("a",)), "field 'a' has no type"),
        ({"type": "record", "name": "R", "fields": [[]]}, "no field: a field is an object"),
        ({"type": "record", "name": "R", "fields": {}}, "no list of fields"),
        (record(aliases="Old"), "no list of strings"),
        (record({"name": "a", "type": "int", "order": "up"}), "order is none of"),
        (record(("a", R), ("b", R), name="S"), "'R' is defined already"),
        ({"type": "enum", "name": "E"}, "no list of strings"),
        ({"type": "enum", "name": "E", "symbols": ["a b"]}, "'a b' is no name"),
        ({"type": "fixed", "name": "F", "size": -1}, "valid positive integer"),
        ({"type": "int", "logicalType": {}}, None),
        (
            record(("a", "int", "x")),
            "default at #/fields/0/default is 'x', .* no value of type int",
        ),
        (record(("a", "int", 1 << 31)), "no value of type int"),
        (record(("a", ["null", "int"], "null")), r"no value of type \[null, int\]"),
        (record(("a", ["null", "string"], "x")), None),
        (record(("a", {"type": "array", "items": "int"}, [1, "2"])), "no value of type array"),
        (record(("a", record(("b", "int"), name="S"), {})), "no value of type S"),
        (record(("a", record(("b", "int", 1), name="S"), {})), None),
    ],
)
def test_what_is_no_avro_is_refused_and_told(schema: Any, why: str | None) -> None:
    if why is None:
        text_of(AVRO, schema)
        return
    with pytest.raises(InvalidSchemaError, match=why):
        text_of(AVRO, schema)


def test_ten_thousand_nested_records_are_refused() -> None:
    """Not by an overflow of somebody's stack. A hundred are a schema."""

    def nested(depth: int) -> str:
        opening = "".join(
            f'{{"type":"record","name":"R{number}","fields":[{{"name":"f","type":'
            for number in range(depth)
        )
        return opening + '"int"' + "}]}" * depth

    assert text_of(AVRO, nested(100)) == nested(100)
    assert misfits(AVRO, nested(100), nested(100)) == []
    for depth in (500, 10_000):
        with pytest.raises(InvalidSchemaError, match="nested"):
            text_of(AVRO, nested(depth))
    with pytest.raises(InvalidSchemaError, match="nested"):
        text_of(AVRO, "[" * 1_000_000)


def test_a_wrong_default_of_long_ago_does_not_stop_new_versions() -> None:
    """Registries that did not look at defaults have such schemas."""
    earlier = record(("a", ["null", "int"], "null"))
    assert misfits(AVRO, record(("a", ["null", "int"], None)), earlier) == []


# --- what is accepted, is read --------------------------------------------------------------------

NAMES = st.sampled_from(["A", "B", "C"])
PRIMITIVES = st.sampled_from(
    ["null", "boolean", "int", "long", "float", "double", "bytes", "string"]
)
DEFAULTS: dict[str, Any] = {
    **{"null": None, "boolean": True, "int": 1, "long": 2, "float": 0.5, "double": 1.5},
    **{"bytes": "b", "string": "s"},
}


@st.composite
def types(draw: st.DrawFn, depth: int = 3) -> Any:
    """Types over few names, so that two of them often have something to do with each other."""
    kinds = ["primitive", "enum", "fixed"] + ["array", "map", "union", "record", "record"] * (
        depth > 0
    )
    kind = draw(st.sampled_from(kinds))
    if kind == "enum":
        symbols = draw(st.lists(st.sampled_from("XYZ"), min_size=1, unique=True))
        enum: dict[str, Any] = {"type": "enum", "name": f"E{draw(NAMES)}", "symbols": symbols}
        if draw(st.booleans()):
            enum["default"] = symbols[0]
        return enum
    if kind == "fixed":
        return {"type": "fixed", "name": f"F{draw(NAMES)}", "size": draw(st.integers(1, 2))}
    if kind == "array":
        return {"type": "array", "items": draw(types(depth=depth - 1))}
    if kind == "map":
        return {"type": "map", "values": draw(types(depth=depth - 1))}
    if kind == "union":
        branches = draw(
            st.lists(
                types(depth=depth - 1).filter(lambda branch: not isinstance(branch, list)),
                min_size=1,
                max_size=3,
                unique_by=lambda branch: branch if isinstance(branch, str) else branch["type"],
            )
        )
        return branches
    if kind == "record":
        fields = draw(
            st.lists(
                st.tuples(st.sampled_from("abc"), types(depth=depth - 1), st.booleans()),
                max_size=3,
                unique_by=lambda field: field[0],
            )
        )
        return record(
            *(
                (name, node, DEFAULTS[node])
                if defaulted and isinstance(node, str)
                else (name, node)
                for name, node, defaulted in fields
            ),
            name=f"R{draw(NAMES)}",
        )
    return draw(PRIMITIVES)


@st.composite
def evolved(draw: st.DrawFn, node: Any) -> Any:
    """A type somewhat changed."""
    if draw(st.integers(0, 9)) == 0:
        return draw(types(depth=1))
    if isinstance(node, list):
        branches = [draw(evolved(branch)) for branch in node]
        return branches if draw(st.booleans()) else [*branches, draw(types(depth=1))]
    if isinstance(node, str):
        wider = {"int": "long", "long": "double", "float": "double", "string": "bytes"}
        return draw(st.sampled_from([node, node, wider.get(node, node), ["null", node]]))
    if node["type"] == "record":
        fields = []
        for field in node["fields"]:
            if draw(st.integers(0, 5)) > 0:
                kept = {"name": field["name"], "type": draw(evolved(field["type"]))}
                fields.append(kept)
        if draw(st.booleans()):
            fields.append({"name": "z", "type": "string", "default": ""})
        return {**node, "fields": fields}
    if node["type"] == "enum":
        return {
            **node,
            "symbols": list(dict.fromkeys([*node["symbols"], draw(st.sampled_from("XYZ"))])),
        }
    if node["type"] == "array":
        return {**node, "items": draw(evolved(node["items"]))}
    if node["type"] == "map":
        return {**node, "values": draw(evolved(node["values"]))}
    return node


def values(node: Any, defined: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Data of a type. A name leads to its definition in `defined`."""
    if isinstance(node, list):
        return st.one_of([values(branch, defined) for branch in node])
    if isinstance(node, str) and node in defined:
        node = defined[node]
    match node if isinstance(node, str) else node["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "int":
            return st.integers(-(1 << 31), (1 << 31) - 1)
        case "long":
            return st.integers(-(1 << 63), (1 << 63) - 1)
        case "float":
            return st.floats(width=32, allow_nan=False)
        case "double":
            return st.floats(allow_nan=False)
        case "bytes":  # which are also UTF-8, as a reader may take them for a string
            return st.text(max_size=3).map(str.encode)
        case "string":
            return st.text(max_size=3)
        case "enum":
            return st.sampled_from(node["symbols"])
        case "fixed":
            return st.binary(min_size=node["size"], max_size=node["size"])
        case "array":
            return st.lists(values(node["items"], defined), max_size=2)
        case "map":
            return st.dictionaries(st.sampled_from("kl"), values(node["values"], defined))
        case _:
            return st.fixed_dictionaries(
                {field["name"]: values(field["type"], defined) for field in node["fields"]}
            )


def accepted_is_read(data: st.DataObject) -> None:
    writer = data.draw(types())
    reader = data.draw(st.one_of(evolved(writer), evolved(writer), types()))
    try:
        fits = refused(reader, writer) == []
    except InvalidSchemaError:
        assume(False)
    event(f"fits: {fits}")
    written_by, read_by = (fastavro.parse_schema(node) for node in (writer, reader))
    value = data.draw(values(writer, {}))
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, written_by, value)
    stream.seek(0)
    if fits:
        fastavro.schemaless_reader(stream, written_by, read_by)


@settings(max_examples=40)
@given(st.data())
def test_what_is_accepted_is_read_by_fastavro(data: st.DataObject) -> None:
    accepted_is_read(data)


@pytest.mark.thorough
@settings(max_examples=2_000)
@given(st.data())
def test_much_that_is_accepted_is_read_by_fastavro(data: st.DataObject) -> None:
    accepted_is_read(data)


@settings(max_examples=25)
@given(types())
def test_texts_stay_what_they_are(node: Any) -> None:
    """Canonical text is its own canonical text, and the normalized one means the same."""
    try:
        text = text_of(AVRO, json.dumps(node))
    except InvalidSchemaError:
        assume(False)
    assert text_of(AVRO, text) == text
    normalized = text_of(AVRO, text, normalize=True)
    assert text_of(AVRO, normalized, normalize=True) == normalized
    assert misfits(AVRO, normalized, text) == misfits(AVRO, text, normalized) == []
    assert canonical_schema(ResolvedSchema(schema=schema_of(AVRO, normalized))).guid == (
        guid(AVRO, text)
    )

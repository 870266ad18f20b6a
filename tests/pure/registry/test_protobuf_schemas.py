"""Protobuf schemas: text and descriptor of one file are one schema; which evolve into which."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from hypothesis import event, given, settings
from hypothesis import strategies as st

from rayq.errors import InvalidSchemaError
from rayq.registry.checks import canonical_schema, written
from rayq.registry.formats.protobuf import compiled_files
from rayq.registry.schema_text import ResolvedSchema, SchemaText
from tests.pure.registry.support import (
    PROTOBUF,
    alone,
    between,
    guid,
    misfits,
    named,
    resolved_with,
    schema_of,
    text_of,
)

ALL_OF_PROTO2 = r"""
syntax = "proto2";
package a.b;
import "google/protobuf/timestamp.proto";
import public "google/protobuf/descriptor.proto";
option java_package = "x.y\"z\303\244";
option (top) = "hi";
option (sub) = { a: 1 s: "q" r: [1, 2] };
extend google.protobuf.FileOptions { optional string top = 50001; optional Sub sub = 50002; }
extend google.protobuf.FieldOptions { repeated Color col = 50001; optional double d = 50003; }
message Sub { optional int32 a = 1; optional string s = 2; repeated int32 r = 3; }
enum Color {
  option allow_alias = true;
  RED = 0; ROT = 0; NEG = -1 [deprecated = true];
  reserved 5 to 7, 9, 100 to max;
  reserved "X";
}
message M {
  option deprecated = true;
  required int32 id = 1 [default = -5];
  optional string name = 2 [default = "a\n\"\344\270\200", json_name = "nom"];
  optional bytes by = 3 [default = "\000\xff\"x", (d) = 1.5, (col) = RED, (col) = NEG];
  optional double d1 = 4 [default = inf];
  optional float f1 = 16 [default = nan];
  repeated int32 nums = 5 [packed = true];
  optional Color c = 6 [default = NEG];
  message BeforeTheMap { }
  map<string, M> ms = 7;
  oneof choice {
    option (o) = true;
    string x = 8;
    google.protobuf.Timestamp y = 9;
    group Gr = 17 { optional int32 z = 1; }
  }
  optional group Foo = 10 { message Inner { } optional Inner inner = 2; }
  extensions 100 to 199, 300 to max;
  reserved 20, 25 to 27;
  reserved "old", "older";
  message N { enum E { A = 1; } optional E e = 1; }
  extend M { optional int32 inside = 101; }
  optional bool bb = 11 [default = true];
}
extend google.protobuf.OneofOptions { optional bool o = 50001; }
extend M { optional string ext = 100; }
service S {
  option deprecated = true;
  rpc Go(M) returns (stream M);
  rpc Up(stream M) returns (M) { option idempotency_level = IDEMPOTENT; }
  rpc Empty(M) returns (M) { }
}
"""
ALL_OF_PROTO3 = """
syntax = "proto3";
package q;
message A {
  optional int32 a = 1;
  int32 b_c_ = 2;
  repeated B d = 3;
  oneof o { string s = 4; int64 i = 5; }
  map<int32, E> m = 6;
}
message B {}
enum E { Z = 0; }
"""
ALL_OF_EDITIONS = """
edition = "2023";
package e;
option features.field_presence = IMPLICIT;
message A {
  int32 a = 1;
  string b = 2 [features.field_presence = EXPLICIT];
  repeated int32 c = 3 [features.repeated_field_encoding = EXPANDED];
  A d = 4 [features.message_encoding = DELIMITED];
  reserved foo, bar;
}
enum X { option features.enum_type = CLOSED; ONE = 1; }
"""


def message(body: str, *, syntax: str = "proto3", name: str = "M", rest: str = "") -> str:
    return f'syntax = "{syntax}"; package p; message {name} {{ {body} }} {rest}'


def serialized(text: str, **changes: Any) -> str:
    """What a client sends: the descriptor that its generated code has, in base64."""
    file = compiled_files(alone(PROTOBUF, text))[-1]
    for field, value in changes.items():
        setattr(file, field, value)
    return base64.b64encode(file.SerializeToString()).decode()


# --- canonical text -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [ALL_OF_PROTO2, ALL_OF_PROTO3, ALL_OF_EDITIONS])
def test_text_and_descriptor_of_a_file_are_one_schema(text: str) -> None:
    canonical = canonical_schema(alone(PROTOBUF, text))
    assert guid(PROTOBUF, serialized(text, name="flight.proto")) == canonical.guid
    shown = written(ResolvedSchema(schema=canonical.schema))
    assert guid(PROTOBUF, shown, normalize=True) == guid(PROTOBUF, text, normalize=True)
    assert written(alone(PROTOBUF, shown)) == shown
    assert misfits(PROTOBUF, shown, text, "FULL") == []


def test_the_format_serialized_gives_what_clients_parse() -> None:
    """confluent-kafka sets the name of the file to that of the subject."""
    canonical = canonical_schema(alone(PROTOBUF, ALL_OF_PROTO3)).schema
    text = written(ResolvedSchema(schema=canonical), "serialized")
    file = descriptor_pb2.FileDescriptorProto.FromString(base64.standard_b64decode(text))
    file.name = "flights-value"
    DescriptorPool().AddSerializedFile(file.SerializeToString())


def test_spelling_makes_no_difference() -> None:
    texts = (
        message("string a = 1; Inner i = 2; message Inner {}"),
        message('string a = 1 [json_name = "a"]; .p.M.Inner i = 2; message Inner {}'),
        "// a comment\n" + message("string a=1;\n\nM.Inner i = 0x2; message Inner {}"),
    )
    assert len({guid(PROTOBUF, text) for text in texts}) == 1
    assert guid(PROTOBUF, 'syntax = "proto2"; message M {}') == guid(PROTOBUF, "message M {}")


def test_normalized_files_have_one_order() -> None:
    one = message("string a = 1; string b = 2;")
    other = message("string b = 2; string a = 1;")
    assert guid(PROTOBUF, one) != guid(PROTOBUF, other)
    assert guid(PROTOBUF, one, normalize=True) == guid(PROTOBUF, other, normalize=True)
    imports = ['import "google/protobuf/any.proto";', 'import public "google/protobuf/api.proto";']
    guids = {
        guid(PROTOBUF, f'syntax = "proto3"; {first} {second}', normalize=True)
        for first, second in (imports, imports[::-1])
    }
    assert len(guids) == 1


def test_the_order_of_messages_is_content() -> None:
    """Records name their message by its place."""
    one, other = "message A {} message B {}", "message B {} message A {}"
    assert guid(PROTOBUF, one, normalize=True) != guid(PROTOBUF, other, normalize=True)
    assert misfits(PROTOBUF, one, other, "FULL") == []


def test_files_of_references_are_imported() -> None:
    """Whether they are kept as text or in canonical form."""
    base = schema_of(PROTOBUF, 'syntax = "proto3"; package n; message Base { int32 x = 1; }')
    middle = schema_of(
        PROTOBUF,
        'syntax = "proto3"; package n; import "dir/base.proto"; message Middle { Base b = 1; }',
        references=named("dir/base.proto"),
    )
    top = schema_of(
        PROTOBUF,
        'syntax = "proto3"; import "middle.proto"; message Top { n.Middle m = 1; }',
        references=named("middle.proto"),
    )
    registered = {"dir/base.proto": base, "middle.proto": middle}
    resolved = resolved_with(top, registered)
    canonical = {
        subject: canonical_schema(resolved_with(schema, registered)).schema
        for subject, schema in registered.items()
    }
    assert canonical_schema(resolved_with(top, canonical)) == canonical_schema(resolved)
    assert "  .n.Middle m = 1;" in written(resolved)
    other_base = SchemaText(type=PROTOBUF, text=base.text.replace("int32", "string"))
    changed = resolved_with(top, {**registered, "dir/base.proto": other_base})
    (found,) = between(changed, resolved)
    assert found.reason.kind == "field_scalar_kind_changed"
    assert found.reason.path == "#/Base/1"


def test_some_files_are_always_there() -> None:
    """Confluent's clients register no reference to them."""
    text = message(
        'confluent.type.Decimal price = 1 [(confluent.field_meta).doc = "in cents"];'
        "google.type.LatLng at = 2;"
    ).replace(
        "message M",
        'import "confluent/meta.proto"; import "confluent/type/decimal.proto";'
        'import "google/type/latlng.proto"; message M',
    )
    canonical = canonical_schema(alone(PROTOBUF, text)).schema
    shown = written(ResolvedSchema(schema=canonical))
    assert '[(.confluent.field_meta) = { doc: "in cents" }]' in shown


# --- evolution ------------------------------------------------------------------------------------

FITS = {
    "the same": ("string a = 1;", "string a = 1;"),
    "a field more": ("string a = 1; string b = 2;", "string a = 1;"),
    "a field less": ("string a = 1;", "string a = 1; string b = 2;"),
    "another number": ("string a = 2;", "string a = 1;"),
    "another name": ("string b = 1;", "string a = 1;"),
    "numbers as varint": ("int64 a = 1; bool b = 2;", "uint32 a = 1; int32 b = 2;"),
    "string and bytes": ("bytes a = 1;", "string a = 1;"),
    "enum and number": ("E a = 1; enum E { Z = 0; }", "int32 a = 1;"),
    "number and enum": ("int32 a = 1;", "E a = 1; enum E { Z = 0; }"),
    "constants of an enum": (
        "E a = 1; enum E { Z = 0; Q = 2; }",
        "E a = 1; enum E { Z = 0; Y = 1; }",
    ),
    "optional": ("optional int32 a = 1;", "int32 a = 1;"),
    "one string to many": ("repeated string a = 1;", "string a = 1;"),
    "one message to many": ("repeated M a = 1;", "M a = 1;"),
    "a field into a new oneof": ("oneof o { string a = 1; int32 b = 2; }", "string a = 1;"),
    "a oneof grows": ("oneof o { string a = 1; int32 b = 2; }", "oneof o { string a = 1; }"),
    "a oneof has another name": (
        "oneof o { string a = 1; int32 b = 2; }",
        "oneof q { string a = 1; int32 b = 2; }",
    ),
    "a oneof is dissolved": (
        "string a = 1; int32 b = 2;",
        "oneof o { string a = 1; int32 b = 2; }",
    ),
    "a field leaves its oneof": (
        "string a = 1; oneof o { int32 b = 2; }",
        "oneof o { string a = 1; int32 b = 2; }",
    ),
    "a map": ("map<string, int64> a = 1;", "map<string, int32> a = 1;"),
    "a nested message more": ("message N {}", ""),
}
DOES_NOT_FIT = {
    "another scalar": ("int32 a = 1;", "sint32 a = 1;", ["field_scalar_kind_changed"]),
    "fixed": ("fixed32 a = 1;", "int32 a = 1;", ["field_scalar_kind_changed"]),
    "float": ("float a = 1;", "double a = 1;", ["field_scalar_kind_changed"]),
    "string to number": ("int32 a = 1;", "string a = 1;", ["field_scalar_kind_changed"]),
    "a message for a scalar": ("M a = 1;", "int32 a = 1;", ["field_kind_changed"]),
    "bytes for a message": ("bytes a = 1;", "M a = 1;", ["field_kind_changed"]),
    "another message": (
        "A a = 1; message A {} message B {}",
        "B a = 1; message A {} message B {}",
        ["field_named_type_changed"],
    ),
    "a map for a message": ("map<string, string> a = 1;", "M a = 1;", ["field_kind_changed"]),
    "values of a map": (
        "map<string, string> a = 1;",
        "map<string, int32> a = 1;",
        ["field_scalar_kind_changed"],
    ),
    "one number to many": (
        "repeated int32 a = 1;",
        "int32 a = 1;",
        ["field_numeric_label_changed"],
    ),
    "a message is gone": ("", "message N {}", ["message_removed"]),
    "two fields into a oneof": (
        "oneof o { string a = 1; string b = 2; }",
        "string a = 1; string b = 2;",
        ["multiple_fields_moved_to_oneof"],
    ),
    "a field into an old oneof": (
        "oneof o { string a = 1; string b = 2; }",
        "string a = 1; oneof o { string b = 2; }",
        ["field_moved_to_existing_oneof"],
    ),
    "a field into an old oneof with another name": (
        "oneof q { string a = 1; string b = 2; }",
        "string a = 1; oneof o { string b = 2; }",
        ["field_moved_to_existing_oneof"],
    ),
    "two oneofs become one": (
        "oneof o { string a = 1; string b = 2; }",
        "oneof o { string a = 1; } oneof q { string b = 2; }",
        ["oneofs_merged"],
    ),
    "a oneof shrinks": (
        "oneof o { string a = 1; }",
        "oneof o { string a = 1; string b = 2; }",
        ["oneof_field_removed"],
    ),
    "a type changes with its oneof": (
        "oneof q { int32 a = 1; }",
        "oneof o { string a = 1; }",
        ["field_scalar_kind_changed"],
    ),
    "a nested message changes": (
        "message N { int32 a = 1; }",
        "message N { string a = 1; }",
        ["field_scalar_kind_changed"],
    ),
}
PROTO2 = {
    "a required field more": ("required int32 a = 1;", "", ["required_field_added"]),
    "a required field less": ("", "required int32 a = 1;", ["required_field_removed"]),
    "a field becomes required": (
        "required int32 a = 1;",
        "optional int32 a = 1;",
        ["required_field_added"],
    ),
    "a required field becomes optional": ("optional int32 a = 1;", "required int32 a = 1;", []),
    "a group for a message": (
        "optional group A = 1 {}",
        "optional A a = 1; message A {}",
        ["field_kind_changed"],
    ),
}


@pytest.mark.parametrize("change", FITS)
def test_a_reader_fits(change: str) -> None:
    new, earlier = FITS[change]
    assert misfits(PROTOBUF, message(new), message(earlier)) == []
    assert misfits(PROTOBUF, message(earlier), message(new), "FORWARD") == []


@pytest.mark.parametrize("change", DOES_NOT_FIT)
def test_a_reader_does_not_fit(change: str) -> None:
    new, earlier, kinds = DOES_NOT_FIT[change]
    assert misfits(PROTOBUF, message(new), message(earlier)) == kinds
    assert misfits(PROTOBUF, message(earlier), message(new), "FORWARD") == kinds


@pytest.mark.parametrize("change", PROTO2)
def test_changes_of_proto2(change: str) -> None:
    new, earlier, kinds = PROTO2[change]
    new, earlier = (message(body, syntax="proto2") for body in (new, earlier))
    assert misfits(PROTOBUF, new, earlier) == kinds


def test_another_package_does_not_fit() -> None:
    new, earlier = (f"package {package}; message M {{ optional M m = 1; }}" for package in "pq")
    (found,) = between(alone(PROTOBUF, new), alone(PROTOBUF, earlier))
    assert str(found) == (
        "Version 1: the new schema cannot read all that it wrote: the package is 'p', and was 'q'"
        " (package_changed at #)"
    )


def test_encodings_of_editions_count() -> None:
    edition = 'edition = "2023"; message M { M m = 1 %s; }'
    delimited = edition % "[features.message_encoding = DELIMITED]"
    option = "option features.message_encoding = DELIMITED; message"
    whole_file = (edition % "").replace("message", option, 1)
    assert misfits(PROTOBUF, delimited, edition % "") == ["field_kind_changed"]
    assert misfits(PROTOBUF, delimited, whole_file) == []
    required = edition % "[features.field_presence = LEGACY_REQUIRED]"
    assert misfits(PROTOBUF, required, edition % "") == ["required_field_added"]


def test_a_type_may_move_between_files_and_packages_keep_their_names() -> None:
    registered = {
        "a.proto": schema_of(PROTOBUF, "package one; message T { optional int32 x = 1; }"),
        "b.proto": schema_of(PROTOBUF, "package two; message T { optional int64 x = 1; }"),
    }
    earlier, new = (
        resolved_with(
            schema_of(
                PROTOBUF,
                f'import "{file}"; message M {{ optional {package}.T t = 1; }}',
                references=named(file),
            ),
            registered,
        )
        for file, package in (("a.proto", "one"), ("b.proto", "two"))
    )
    local = alone(PROTOBUF, "message M { optional T t = 1; } message T { optional int32 x = 1; }")
    assert between(new, earlier) == []
    assert between(local, earlier) == []
    assert [found.reason.kind for found in between(earlier, local)] == ["message_removed"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, why",
    [
        ("message M {", "protoc does not allow this schema: the-schema.proto:1:12"),
        ("nonsense", "neither the text of a .proto file nor base64"),
        ("AAAA", "neither the text"),
        ("message M { optional X x = 1; }", '"X" is not defined'),
        ('import "missing.proto";', "missing.proto"),
        ('import "../../../etc/passwd";', "not found"),
        ('import "/etc/passwd";', "/etc/passwd"),
        ('import "google/type/../protobuf/any.proto";', "google/type/../protobuf/any.proto"),
        ('import "google/api/http.proto";', "google/api/http.proto"),
        ("message Größe {}", '1:11: Expected "{"'),
        ("message M { optional int32 a = 1; optional int32 b = 1; }", "already been used"),
        (message("", name="M") + " enum E { ONE = 1; }", "must be zero|must be 0|first enum value"),
        ('message M { optional string s = 1 [default = "\x01"]; }', None),
        ("message M { " * 10_000, "recursion|nested"),
        ("{}", "protoc does not allow"),
    ],
)
def test_what_is_no_protobuf_is_refused_and_told(text: str, why: str | None) -> None:
    if why is None:
        text_of(PROTOBUF, text)
        return
    with pytest.raises(InvalidSchemaError, match=why):
        text_of(PROTOBUF, text)


def test_a_descriptor_that_protoc_would_not_make_is_refused() -> None:
    for file in (
        descriptor_pb2.FileDescriptorProto(
            message_type=[descriptor_pb2.DescriptorProto(name="not a name")]
        ),
        descriptor_pb2.FileDescriptorProto(syntax="proto9"),
        descriptor_pb2.FileDescriptorProto(dependency=["missing.proto"]),
        descriptor_pb2.FileDescriptorProto(dependency=["the-schema.proto"]),
    ):
        text = base64.b64encode(file.SerializeToString()).decode()
        with pytest.raises(InvalidSchemaError, match="protoc does not allow"):
            text_of(PROTOBUF, text)


def test_names_that_are_not_utf8_are_refused() -> None:
    file = descriptor_pb2.FileDescriptorProto(
        message_type=[descriptor_pb2.DescriptorProto(name="NAME")]
    )
    text = base64.b64encode(file.SerializeToString().replace(b"NAME", b"\xff\xfe\xfd\xfc")).decode()
    with pytest.raises(InvalidSchemaError):
        text_of(PROTOBUF, text)


def test_options_that_are_not_utf8_are_kept_but_have_no_text() -> None:
    text = 'option java_package = "PLACE"; message M {}'
    raw = base64.b64decode(serialized(text)).replace(b"PLACE", b"\xff\xfe\xfd\xfc\xfb")
    try:
        canonical = canonical_schema(alone(PROTOBUF, base64.b64encode(raw).decode())).schema
        written(ResolvedSchema(schema=canonical))
    except InvalidSchemaError:
        pass


@pytest.mark.parametrize("name", ["imports", "compiled", "source", "a b.proto", "größe.proto"])
def test_a_file_of_any_other_name_can_be_imported(name: str) -> None:
    top = schema_of(
        PROTOBUF, f'import "{name}"; message M {{ optional N n = 1; }}', references=named(name)
    )
    canonical_schema(resolved_with(top, {name: schema_of(PROTOBUF, "message N {}")}))


@pytest.mark.parametrize(
    "name", ["../outside.proto", "/etc/passwd", "a//b.proto", "a\\b", "", ".", "a/../b", "x\0y"]
)
def test_a_reference_whose_name_is_no_path_of_an_import_is_refused(name: str) -> None:
    top = schema_of(PROTOBUF, "message M {}", references=named(name))
    with pytest.raises(InvalidSchemaError, match="no name that a file can import"):
        canonical_schema(resolved_with(top, {name: schema_of(PROTOBUF, "message N {}")}))


@pytest.mark.parametrize(
    "name", ["google/protobuf/descriptor.proto", "google/type/date.proto", "confluent/meta.proto"]
)
def test_a_reference_cannot_stand_for_a_file_that_is_always_there(name: str) -> None:
    top = schema_of(PROTOBUF, "message M {}", references=named(name))
    with pytest.raises(InvalidSchemaError, match="a file that is always there"):
        canonical_schema(resolved_with(top, {name: schema_of(PROTOBUF, "message N {}")}))


def test_what_protoc_prints_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidSchemaError):
        text_of(PROTOBUF, "message M {")
    assert capfd.readouterr() == ("", "")


# --- what is accepted, is read --------------------------------------------------------------------

SCALARS = {
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "uint64": st.integers(0, (1 << 64) - 1),
    "sint64": st.integers(-(1 << 63), (1 << 63) - 1),
    "fixed32": st.integers(0, (1 << 32) - 1),
    "sfixed64": st.integers(-(1 << 63), (1 << 63) - 1),
    "bool": st.booleans(),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(max_size=5),
    # As a reader may take them for a string; only UTF-8 is one.
    "bytes": st.text(max_size=5).map(str.encode),
}


@st.composite
def bodies(draw: st.DrawFn) -> str:
    """Fields of a message M: few numbers, so that two messages share some."""
    numbers = draw(st.lists(st.integers(1, 6), unique=True, max_size=5))
    oneof, others = [], []
    for number in numbers:
        kind = draw(st.sampled_from(["oneof", "repeated", "", "map"]))
        field_type = draw(st.sampled_from([*SCALARS, "M", "N"]))
        if kind == "map":
            others.append(f"map<string, {field_type}> f{number} = {number};")
        elif kind == "oneof":
            oneof.append(f"{field_type} f{number} = {number};")
        else:
            others.append(f"{kind} {field_type} f{number} = {number};")
    if oneof:
        others.append(f"oneof o {{ {' '.join(oneof)} }}")
    return " ".join(others)


def class_of(text: str) -> Any:
    pool = DescriptorPool()
    for file in compiled_files(alone(PROTOBUF, text)):
        pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("p.M"))


def type_name(field: Any) -> str:
    return descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def fill(draw: Any, record: Any, depth: int) -> None:
    """Sets some fields of a message."""
    for field in record.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        scalar = SCALARS.get(type_name(field))
        value = getattr(record, field.name)
        if field.message_type and field.message_type.GetOptions().map_entry:
            part = field.message_type.fields_by_name["value"]
            if part.message_type:
                value["k"].SetInParent()
            else:
                value["k"] = draw(SCALARS[type_name(part)])
        elif scalar is None and depth > 0:
            inner = value.add() if field.is_repeated else value
            inner.SetInParent()
            fill(draw, inner, depth - 1)
        elif scalar is not None and field.is_repeated:
            value.extend(draw(st.lists(scalar, max_size=2)))
        elif scalar is not None:
            setattr(record, field.name, draw(scalar))


def accepted_is_read(data: st.DataObject) -> None:
    rest = "message N { int32 n = 1; }"
    writer, reader = (message(data.draw(bodies()), rest=rest) for _ in range(2))
    fits = misfits(PROTOBUF, reader, writer) == []
    event(f"fits: {fits}")
    if not fits:
        return
    record = class_of(writer)()
    fill(data.draw, record, 1)
    read = class_of(reader).FromString(record.SerializeToString())
    old_fields = {field.number: field for field in record.DESCRIPTOR.fields}
    for field in read.DESCRIPTOR.fields:
        old = old_fields.get(field.number)
        if old is None or old.type != field.type or old.is_repeated != field.is_repeated:
            continue
        if old.message_type is None:
            assert getattr(read, field.name) == getattr(record, old.name)


@settings(max_examples=25)
@given(st.data())
def test_what_is_accepted_is_read(data: st.DataObject) -> None:
    accepted_is_read(data)


@pytest.mark.thorough
@settings(max_examples=1_500)
@given(st.data())
def test_much_that_is_accepted_is_read(data: st.DataObject) -> None:
    accepted_is_read(data)

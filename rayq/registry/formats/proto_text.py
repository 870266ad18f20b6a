"""Text of a Protobuf file from its descriptor: what readers of `.proto` files are given.

Comments are not in a descriptor, so they are not in the text either. Names of types are full. The
text is compiled again before it is given to anybody: it has the same descriptor, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, message_factory, text_format
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.text_encoding import CEscape

from rayq.errors import InvalidSchemaError
from rayq.registry.formats.protobuf import compiled_files, default_json_name, text_of_file
from rayq.registry.schema_text import ResolvedSchema, SchemaText, SchemaType

_Field = FieldDescriptorProto

_FIELD_NUMBER_MAX = 536_870_911
_ENUM_NUMBER_MAX = 2_147_483_647


def proto_text(resolved: ResolvedSchema) -> str:
    """The `.proto` text of a schema.

    Raises InvalidSchemaError where the file has what this cannot write. That is not known to happen
    with files that protoc made of a text.
    """
    files = compiled_files(resolved)
    try:
        text = _Printer(files).print()
    except (UnicodeDecodeError, TypeError, KeyError) as error:
        raise _unwritable(f"{type(error).__name__}: {error}") from error
    again = ResolvedSchema(
        schema=SchemaText(type=SchemaType.PROTOBUF, text=text), referenced=resolved.referenced
    )
    try:
        # The order of fields says nothing, and cannot always be written.
        same = text_of_file(compiled_files(again)[-1], normalize=True) == (
            text_of_file(files[-1], normalize=True)
        )
    except InvalidSchemaError as error:
        raise _unwritable(str(error)) from error
    if not same:
        raise _unwritable("its text has another meaning")
    return text


def _unwritable(why: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"The Protobuf schema cannot be written as text: {why}. Ask for it with format=serialized."
    )


class _Printer:
    def __init__(self, files: list[Any]) -> None:
        self._file = files[-1]
        self._proto3 = self._file.syntax == "proto3"
        self._editions = self._file.syntax == "editions"
        # Options of users are extensions, which only a pool with their files can read.
        self._pool = DescriptorPool()
        known = {file.name for file in files}
        own = descriptor_pb2.FileDescriptorProto()
        descriptor_pb2.DESCRIPTOR.CopyToProto(own)
        for file in [*(() if own.name in known else (own,)), *files]:
            self._pool.AddSerializedFile(file.SerializeToString())

    def print(self) -> str:
        file = self._file
        lines: list[str] = []
        if self._editions:
            edition = descriptor_pb2.Edition.Name(file.edition).removeprefix("EDITION_")
            lines.append(f'edition = "{edition}";')
        else:
            lines.append(f'syntax = "{file.syntax or "proto2"}";')
        if file.package:
            lines += ["", f"package {file.package};"]
        if file.dependency:
            lines.append("")
        for index, imported in enumerate(file.dependency):
            public = "public " if index in file.public_dependency else ""
            weak = "weak " if index in file.weak_dependency else ""
            lines.append(f"import {public}{weak}{_quoted(imported)};")
        options = list(self._option_lines(file.options, ""))
        if options:
            lines += ["", *options]
        scope = f".{file.package}" if file.package else ""
        for enum in file.enum_type:
            lines += ["", *self._enum(enum, "")]
        groups = self._groups(file, scope)
        for message in file.message_type:
            full = f"{scope}.{message.name}"
            if full not in groups:
                lines += ["", *self._message(message, full, "")]
        for lines_of_one in self._extensions(file, scope, ""):
            lines += ["", *lines_of_one]
        for service in file.service:
            lines += ["", *self._service(service)]
        return "\n".join(lines) + "\n"

    def _message(self, message: Any, full: str, indent: str) -> Iterator[str]:
        yield f"{indent}message {message.name} {{"
        yield from self._body(message, full, indent + "  ")
        yield f"{indent}}}"

    def _body(self, message: Any, full: str, indent: str) -> Iterator[str]:
        yield from self._option_lines(message.options, indent)
        for number_range in message.reserved_range:
            yield f"{indent}reserved {_range(number_range, _FIELD_NUMBER_MAX, 1)};"
        yield from self._reserved_names(message, indent)
        for number_range in message.extension_range:
            options = self._bracketed(self._options(number_range.options))
            yield f"{indent}extensions {_range(number_range, _FIELD_NUMBER_MAX, 1)}{options};"
        for enum in message.enum_type:
            yield from self._enum(enum, indent)
        yield from self._members(message, full, indent)

    def _members(self, message: Any, full: str, indent: str) -> Iterator[str]:
        """Nested messages, fields and extensions.

        The order of nested messages is kept, as records on the wire name a message by its place.
        Maps and groups are messages there, too, which stand where their fields do.
        """
        nested = {f"{full}.{inner.name}": inner for inner in message.nested_type}
        entries = {name: inner for name, inner in nested.items() if inner.options.map_entry}
        groups = self._groups(message, full)
        inline = entries.keys() | groups.keys()
        left = list(nested)

        def nested_before(field: Any) -> Iterator[str]:
            if field is None or (field.type_name in left and field.type_name in inline):
                while left and (field is None or left[0] != field.type_name):
                    name = left.pop(0)
                    if name not in inline:
                        yield from self._message(nested[name], name, indent)

        printed: set[int] = set()
        for field in message.field:
            if not field.HasField("oneof_index") or field.proto3_optional:
                yield from nested_before(field)
                yield from self._field(field, entries, groups, indent)
            elif field.oneof_index not in printed:
                printed.add(field.oneof_index)
                members = [
                    member
                    for member in message.field
                    if member.HasField("oneof_index") and member.oneof_index == field.oneof_index
                ]
                for member in members:
                    yield from nested_before(member)
                oneof = message.oneof_decl[field.oneof_index]
                yield f"{indent}oneof {oneof.name} {{"
                yield from self._option_lines(oneof.options, indent + "  ")
                for member in members:
                    yield from self._field(member, entries, groups, indent + "  ")
                yield f"{indent}}}"
        for field in message.extension:
            yield from nested_before(field)
        for lines in self._extensions(message, full, indent):
            yield from lines
        yield from nested_before(None)

    def _reserved_names(self, message: Any, indent: str) -> Iterator[str]:
        for name in message.reserved_name:
            yield f"{indent}reserved {name if self._editions else _quoted(name)};"

    def _groups(self, message: Any, full: str) -> dict[str, Any]:
        """The messages that stand within the fields that are groups of them."""
        types = {
            field.type_name
            for field in (*getattr(message, "field", ()), *message.extension)
            if field.type == _Field.TYPE_GROUP
        }
        nested = message.nested_type if hasattr(message, "nested_type") else message.message_type
        names = {f"{full}.{inner.name}": inner for inner in nested}
        return {name: inner for name, inner in names.items() if name in types}

    def _field(
        self, field: Any, entries: dict[str, Any], groups: dict[str, Any], indent: str
    ) -> Iterator[str]:
        options = self._bracketed(
            [*self._default(field), *_json_name(field), *self._options(field.options)]
        )
        entry = entries.get(field.type_name)
        if entry is not None:
            key, value = (self._type(part) for part in entry.field)
            yield f"{indent}map<{key}, {value}> {field.name} = {field.number}{options};"
            return
        group = groups.get(field.type_name)
        if group is None:
            yield (
                f"{indent}{self._label(field)}{self._type(field)} {field.name} ="
                f" {field.number}{options};"
            )
            return
        yield f"{indent}{self._label(field)}group {group.name} = {field.number}{options} {{"
        yield from self._body(group, field.type_name, indent + "  ")
        yield f"{indent}}}"

    def _label(self, field: Any) -> str:
        if field.label == _Field.LABEL_REPEATED:
            return "repeated "
        in_oneof = field.HasField("oneof_index") and not field.proto3_optional
        implicit = self._editions or (self._proto3 and not field.proto3_optional)
        if in_oneof or implicit:
            return ""
        return "required " if field.label == _Field.LABEL_REQUIRED else "optional "

    def _type(self, field: Any) -> str:
        if field.type_name:
            return str(field.type_name)
        return str(_Field.Type.Name(field.type)).removeprefix("TYPE_").lower()

    def _default(self, field: Any) -> list[str]:
        if not field.HasField("default_value"):
            return []
        if field.type == _Field.TYPE_STRING:
            return [f"default = {_quoted(field.default_value)}"]
        if field.type == _Field.TYPE_BYTES:  # which is escaped already
            return [f'default = "{field.default_value}"']
        return [f"default = {field.default_value}"]

    def _enum(self, enum: Any, indent: str) -> Iterator[str]:
        yield f"{indent}enum {enum.name} {{"
        yield from self._option_lines(enum.options, indent + "  ")
        for number_range in enum.reserved_range:
            yield f"{indent}  reserved {_range(number_range, _ENUM_NUMBER_MAX, 0)};"
        yield from self._reserved_names(enum, indent + "  ")
        for value in enum.value:
            options = self._bracketed(self._options(value.options))
            yield f"{indent}  {value.name} = {value.number}{options};"
        yield f"{indent}}}"

    def _extensions(self, container: Any, scope: str, indent: str) -> Iterator[list[str]]:
        groups = self._groups(container, scope)
        for extended in dict.fromkeys(field.extendee for field in container.extension):
            lines = [f"{indent}extend {extended} {{"]
            for field in container.extension:
                if field.extendee == extended:
                    lines += self._field(field, {}, groups, indent + "  ")
            yield [*lines, f"{indent}}}"]

    def _service(self, service: Any) -> Iterator[str]:
        yield f"service {service.name} {{"
        yield from self._option_lines(service.options, "  ")
        for method in service.method:
            asked = f"{'stream ' if method.client_streaming else ''}{method.input_type}"
            answered = f"{'stream ' if method.server_streaming else ''}{method.output_type}"
            options = list(self._option_lines(method.options, "    "))
            opening = f"  rpc {method.name}({asked}) returns ({answered})"
            yield from [opening + " {", *options, "  }"] if options else [opening + ";"]
        yield "}"

    # --- options ----------------------------------------------------------------------------------

    def _option_lines(self, options: Any, indent: str) -> Iterator[str]:
        for option in self._options(options):
            yield f"{indent}option {option};"

    def _bracketed(self, options: list[str]) -> str:
        return f" [{', '.join(options)}]" if options else ""

    def _options(self, options: Any) -> list[str]:
        """Each option that is set, as `name = value`."""
        serialized = options.SerializeToString()
        if not serialized:
            return []
        descriptor = self._pool.FindMessageTypeByName(options.DESCRIPTOR.full_name)
        known = message_factory.GetMessageClass(descriptor).FromString(serialized)
        written = []
        for field, value in known.ListFields():
            name = f"(.{field.full_name})" if field.is_extension else field.name
            if name == "map_entry":
                continue
            values = value if field.is_repeated else [value]
            written += [f"{name} = {_value(field, element)}" for element in values]
        return written


def _value(field: Any, value: Any) -> str:
    if field.type == field.TYPE_MESSAGE or field.type == field.TYPE_GROUP:
        return f"{{ {text_format.MessageToString(value, as_one_line=True)} }}"
    if field.type == field.TYPE_ENUM:
        return str(field.enum_type.values_by_number[value].name)
    if field.type == field.TYPE_BOOL:
        return "true" if value else "false"
    if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        return _quoted(value)
    return str(value)


def _json_name(field: Any) -> list[str]:
    if not field.HasField("json_name") or field.json_name == default_json_name(field.name):
        return []
    return [f"json_name = {_quoted(field.json_name)}"]


def _quoted(value: str | bytes) -> str:
    return f'"{CEscape(value, as_utf8=isinstance(value, str))}"'


def _range(number_range: Any, number_max: int, beyond: int) -> str:
    """A range of numbers whose end is `beyond` the last of them."""
    last = number_range.end - beyond
    if last == number_range.start:
        return str(last)
    return f"{number_range.start} to {'max' if last == number_max else last}"

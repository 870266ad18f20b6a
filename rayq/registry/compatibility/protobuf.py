"""Compatibility of Protobuf schemas: the rules of Confluent's registry, on descriptors.

A field is known by its number. What a reader does not know, it skips, so that fields come and go;
what has another type on the wire, or belongs to another `oneof`, does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor_pb2 import FeatureSet, FieldDescriptorProto

from rayq.registry.compatibility.incompatibility import Incompatibility
from rayq.registry.formats.protobuf import compiled_files
from rayq.registry.schema_text import ResolvedSchema

_Field = FieldDescriptorProto

_SCALARS = {
    **dict.fromkeys(
        (
            *(_Field.TYPE_INT32, _Field.TYPE_INT64, _Field.TYPE_UINT32, _Field.TYPE_UINT64),
            *(_Field.TYPE_BOOL, _Field.TYPE_ENUM),
        ),
        "a number as varint",
    ),
    **dict.fromkeys((_Field.TYPE_SINT32, _Field.TYPE_SINT64), "a number in zigzag"),
    **dict.fromkeys((_Field.TYPE_FIXED32, _Field.TYPE_SFIXED32), "a number of 32 bits"),
    **dict.fromkeys((_Field.TYPE_FIXED64, _Field.TYPE_SFIXED64), "a number of 64 bits"),
    _Field.TYPE_FLOAT: "a float",
    _Field.TYPE_DOUBLE: "a double",
    **dict.fromkeys((_Field.TYPE_STRING, _Field.TYPE_BYTES), "a string or bytes"),
}
"""Types that read each other's bytes have the same name here."""
_LENGTH_DELIMITED = ("a string or bytes", "a message", "a map")


def protobuf_incompatibilities(
    reader: ResolvedSchema, writer: ResolvedSchema
) -> list[Incompatibility]:
    """Reasons why `reader` does not read what `writer` writes. Raises InvalidSchemaError."""
    return _Comparison(_Types(compiled_files(reader)), _Types(compiled_files(writer))).compare()


class _Types:
    """All messages and enums of a file, and of those that it imports, by full name."""

    def __init__(self, files: list[Any]) -> None:
        self.file = files[-1]
        self.messages: dict[str, Any] = {}
        self.files: dict[str, Any] = {}
        """The file of each message."""
        for file in files:
            scope = f".{file.package}" if file.package else ""
            self._add(file, file.message_type, scope)

    def _add(self, file: Any, messages: Any, scope: str) -> None:
        for message in messages:
            full = f"{scope}.{message.name}"
            self.messages[full], self.files[full] = message, file
            self._add(file, message.nested_type, full)

    def local_name(self, full: str) -> str:
        """The name of a message within its package."""
        package = self.files[full].package
        return full.removeprefix(f".{package}.") if package else full[1:]

    def is_local(self, full: str) -> bool:
        """True if the message is in the file itself."""
        return self.files[full] is self.file

    def map_entry(self, field: Any) -> Any:
        """The message that stands for an entry of a map; None if the field is no map."""
        if field.type != _Field.TYPE_MESSAGE:
            return None
        message = self.messages[field.type_name]
        return message if message.options.map_entry else None

    def kind(self, message_name: str, field: Any) -> str:
        """A word for what a field is on the wire."""
        if field.type in _SCALARS:
            return _SCALARS[field.type]
        if self.map_entry(field) is not None:
            return "a map"
        return "a group" if self._is_delimited(message_name, field) else "a message"

    def _is_delimited(self, message_name: str, field: Any) -> bool:
        if field.type == _Field.TYPE_GROUP:
            return True
        for options in (field.options, self.files[message_name].options):
            if options.features.HasField("message_encoding"):
                return bool(options.features.message_encoding == FeatureSet.DELIMITED)
        return False


class _Comparison:
    def __init__(self, reader: _Types, writer: _Types) -> None:
        self._reader = reader
        self._writer = writer
        self._found: list[Incompatibility] = []
        self._compared: set[tuple[str, str]] = set()

    def compare(self) -> list[Incompatibility]:
        new, old = self._reader.file, self._writer.file
        if new.package != old.package:
            self._add(
                "package_changed",
                "#",
                f"the package is {new.package!r}, and was {old.package!r}",
            )
        new_scope, old_scope = (f".{file.package}" if file.package else "" for file in (new, old))
        self._messages(new.message_type, old.message_type, new_scope, old_scope, "#")
        return self._found

    def _messages(
        self, new_messages: Any, old_messages: Any, new_scope: str, old_scope: str, path: str
    ) -> None:
        new_names = {message.name for message in new_messages}
        for old in old_messages:
            if old.options.map_entry:
                continue
            at = f"{path}/{old.name}"
            if old.name in new_names:
                self._message(f"{new_scope}.{old.name}", f"{old_scope}.{old.name}", at)
            else:
                self._add("message_removed", at, f"the message {old.name!r} is gone")

    def _message(self, new_name: str, old_name: str, path: str) -> None:
        if (new_name, old_name) in self._compared:
            return
        self._compared.add((new_name, old_name))
        new, old = self._reader.messages[new_name], self._writer.messages[old_name]
        new_fields = {field.number: field for field in new.field}
        old_fields = {field.number: field for field in old.field}
        new_oneofs, old_oneofs = _oneofs(new), _oneofs(old)
        for number in sorted(new_fields.keys() | old_fields.keys()):
            at = f"{path}/{number}"
            new_field, old_field = new_fields.get(number), old_fields.get(number)
            if new_field is None:
                self._removed(old_field, old_oneofs, new_oneofs, at)
            elif old_field is None:
                if _is_required(new_field):
                    self._add("required_field_added", at, f"the required {new_field.name!r} is new")
            else:
                self._field(new_name, old_name, new_field, old_field, at)
        for oneof, members in _members(new_oneofs):
            self._moved(oneof, members, old_fields, old_oneofs, f"{path}/{oneof}")
        self._messages(new.nested_type, old.nested_type, new_name, old_name, path)

    def _removed(
        self, old_field: Any, old_oneofs: dict[int, str], new_oneofs: dict[int, str], path: str
    ) -> None:
        oneof = old_oneofs.get(old_field.number)
        if _is_required(old_field):
            self._add("required_field_removed", path, f"the required {old_field.name!r} is gone")
        elif oneof in new_oneofs.values():
            self._add(
                "oneof_field_removed", path, f"{old_field.name!r} is gone from oneof {oneof!r}"
            )

    def _moved(
        self,
        oneof: str,
        members: list[int],
        old_fields: dict[int, Any],
        old_oneofs: dict[int, str],
        path: str,
    ) -> None:
        """Fields that were set side by side exclude each other in a `oneof`: the reader keeps the
        last."""
        existing = [number for number in members if number in old_oneofs]
        moved = [number for number in members if number in old_fields and number not in old_oneofs]
        if len(moved) > 1:
            self._add(
                "multiple_fields_moved_to_oneof",
                path,
                f"fields {_listed(moved)} exclude each other",
            )
        elif moved and existing:
            self._add(
                "field_moved_to_existing_oneof",
                path,
                f"field {moved[0]} and fields {_listed(existing)} exclude each other",
            )
        elif len({old_oneofs[number] for number in existing}) > 1:
            self._add("oneofs_merged", path, f"fields {_listed(existing)} were in different oneofs")

    def _field(
        self, new_name: str, old_name: str, new_field: Any, old_field: Any, path: str
    ) -> None:
        new_kind = self._reader.kind(new_name, new_field)
        old_kind = self._writer.kind(old_name, old_field)
        if new_kind != old_kind:
            self._add(
                "field_scalar_kind_changed"
                if new_field.type in _SCALARS and old_field.type in _SCALARS
                else "field_kind_changed",
                path,
                f"{new_field.name!r} is {new_kind}, and was {old_kind}",
            )
            return
        new_repeated, old_repeated = (
            field.label == _Field.LABEL_REPEATED for field in (new_field, old_field)
        )
        if new_repeated != old_repeated and new_kind not in _LENGTH_DELIMITED:
            self._add(
                "field_numeric_label_changed",
                path,
                f"{new_field.name!r} became {'repeated' if new_repeated else 'single'}",
            )
        if _is_required(new_field) and not _is_required(old_field):
            self._add("required_field_added", path, f"{new_field.name!r} became required")
        if new_kind == "a map":
            entries = zip(
                self._reader.map_entry(new_field).field,
                self._writer.map_entry(old_field).field,
                strict=True,
            )
            for new_part, old_part in entries:
                self._field(new_name, old_name, new_part, old_part, f"{path}/{new_part.name}")
        elif new_kind in ("a message", "a group"):
            self._message_type(new_field, old_field, path)

    def _message_type(self, new_field: Any, old_field: Any, path: str) -> None:
        new_full, old_full = new_field.type_name, old_field.type_name
        new_local = self._reader.local_name(new_full)
        if new_local != self._writer.local_name(old_full):
            self._add(
                "field_named_type_changed",
                path,
                f"{new_field.name!r} is of type {new_full[1:]!r}, and was of {old_full[1:]!r}",
            )
        elif not (self._reader.is_local(new_full) and self._writer.is_local(old_full)):
            self._message(new_full, old_full, f"#/{new_local.replace('.', '/')}")

    def _add(self, kind: str, path: str, message: str) -> None:
        self._found.append(Incompatibility(kind, path, message))


def _is_required(field: Any) -> bool:
    return bool(
        field.label == _Field.LABEL_REQUIRED
        or field.options.features.field_presence == FeatureSet.LEGACY_REQUIRED
    )


def _oneofs(message: Any) -> dict[int, str]:
    """The `oneof` of each field that is in one, but for those that stand for `optional`."""
    return {
        field.number: message.oneof_decl[field.oneof_index].name
        for field in message.field
        if field.HasField("oneof_index") and not field.proto3_optional
    }


def _members(oneofs: dict[int, str]) -> Iterator[tuple[str, list[int]]]:
    for name in sorted(set(oneofs.values())):
        yield name, sorted(number for number, oneof in oneofs.items() if oneof == name)


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)

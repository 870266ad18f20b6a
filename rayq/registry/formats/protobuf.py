"""Protobuf schemas: one file, as `.proto` text or as base64 of its serialized FileDescriptorProto.

The canonical text is the base64, so that the text and the descriptor of one file are one schema.
The descriptor in it is protoc's (types resolved, names of types full), serialized in the
deterministic order of fields, without what is not content: the name of the file, comments and
positions, the JSON names that follow from names, and `syntax = "proto2"`, which is the default. The
normalized descriptor also has imports in alphabetical order and fields in that of their numbers.

protoc runs in this process: servers let a `CheckPool` have it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc_tools
from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError
from google.type import latlng_pb2
from grpc_tools import protoc

from rayq.errors import InvalidSchemaError
from rayq.registry.schema_text import ResolvedSchema

FILE_NAME = "the-schema.proto"
"""The name that protoc knows the schema by."""
_ALWAYS_THERE = {
    "google/protobuf/": Path(grpc_tools.__file__).with_name("_proto") / "google" / "protobuf",
    "google/type/": Path(latlng_pb2.__file__).parent,
    "confluent/": Path(__file__).with_name("protos") / "confluent",
}
"""Files that each schema may import without a reference, as Confluent's clients register none."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+=*\s*")
"""No `.proto` text looks like this: each declaration of one ends with a semicolon or a brace."""
_IMPORT_PATH = re.compile(r"[^/\\\x00-\x1f]+(/[^/\\\x00-\x1f]+)*")
_PROTOC_MESSAGES_MAX = 2000
_LOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:")
"""A line of protoc's log, such as a warning that a file names no syntax."""


def canonical_protobuf(resolved: ResolvedSchema, *, normalize: bool) -> str:
    """The canonical text of a schema, or the normalized one. Raises InvalidSchemaError."""
    return text_of_file(compiled_files(resolved)[-1], normalize=normalize)


def text_of_file(file: Any, *, normalize: bool = False) -> str:
    """The canonical text of a FileDescriptorProto that protoc made."""
    content = descriptor_pb2.FileDescriptorProto()
    content.CopyFrom(file)
    for field in ("name", "source_code_info"):
        content.ClearField(field)
    if content.syntax == "proto2":
        content.ClearField("syntax")
    _clear_json_names(content.extension)
    for message in content.message_type:
        _clear_json_names_of(message)
    for service in content.service:
        for method in service.method:
            if not method.options.ByteSize():  # "{}" instead of ";"
                method.ClearField("options")
    if normalize:
        _sort(content)
    return base64.b64encode(content.SerializeToString(deterministic=True)).decode()


def compiled_files(resolved: ResolvedSchema) -> list[Any]:
    """The FileDescriptorProtos of a schema and of all that it imports, each after those that it
    imports itself, as protoc has them. Raises InvalidSchemaError with what protoc says."""
    files: dict[str, Any] = {}
    for referenced in resolved.referenced:
        _check_import_path(referenced.name)
        for file in _compile(referenced.schema.text, files, f"reference {referenced.name!r:.200}"):
            if file.name == FILE_NAME:
                file.name = referenced.name
            files.setdefault(file.name, file)
    return _compile(resolved.schema.text, files, "schema")


def _check_import_path(name: str) -> None:
    if (
        not _IMPORT_PATH.fullmatch(name)
        or name == FILE_NAME
        or any(part in (".", "..") for part in name.split("/"))
    ):
        raise InvalidSchemaError(
            f"The reference {name!r:.200} has no name that a file can import. Name it by the path"
            ' of the import, such as "common/address.proto".'
        )
    if any(
        name.startswith(prefix) and (folder / name.removeprefix(prefix)).exists()
        for prefix, folder in _ALWAYS_THERE.items()
    ):
        raise InvalidSchemaError(
            f"The reference {name!r:.200} has the name of a file that is always there. Remove the"
            " reference."
        )


def _compile(text: str, files: dict[str, Any], subject: str) -> list[Any]:
    imports = descriptor_pb2.FileDescriptorSet(file=files.values())
    serialized = _decoded(text, subject) if _BASE64.fullmatch(text) else None
    with tempfile.TemporaryDirectory(prefix="rayq-protoc-") as directory:
        folder = Path(directory)
        source = folder / "source"  # The schema can import what is in there.
        source.mkdir()
        if serialized is None:
            (source / FILE_NAME).write_text(text, encoding="utf-8", newline="")
        else:
            imports.file.append(serialized)
        (folder / "imports").write_bytes(imports.SerializeToString())
        failure = _run_protoc(
            f"--proto_path={source}",
            *(f"--proto_path={prefix}={known}" for prefix, known in _ALWAYS_THERE.items()),
            f"--descriptor_set_in={folder / 'imports'}",
            f"--descriptor_set_out={folder / 'compiled'}",
            "--include_imports",
            FILE_NAME,
        )
        if failure is not None:
            told = failure.replace(f"{source}{os.sep}", "").strip()[:_PROTOC_MESSAGES_MAX]
            raise InvalidSchemaError(f"protoc does not allow this {subject}: {told}")
        compiled = descriptor_pb2.FileDescriptorSet.FromString((folder / "compiled").read_bytes())
    return list(compiled.file)


def _decoded(text: str, subject: str) -> Any:
    try:
        file = descriptor_pb2.FileDescriptorProto.FromString(
            base64.b64decode("".join(text.split()), validate=True)
        )
    except (binascii.Error, DecodeError) as error:
        raise InvalidSchemaError(
            f"The {subject} is neither the text of a .proto file nor base64 of a serialized"
            f" FileDescriptorProto: {error}."
        ) from error
    file.name = FILE_NAME
    return file


def _run_protoc(*arguments: str) -> str | None:
    """The output of protoc where it fails; None where it does not. It prints to file descriptor 2,
    which is somewhere else meanwhile."""
    sys.stderr.flush()
    printed_before = os.dup(2)
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            failed = protoc.main(["protoc", *arguments]) != 0
        finally:
            os.dup2(printed_before, 2)
            os.close(printed_before)
        printed.seek(0)
        lines = printed.read().decode(errors="replace").splitlines()
        said = [line for line in lines if not _LOG_LINE.match(line)]
        return "\n".join(said) if failed else None


# --- what is no content ---------------------------------------------------------------------------


def default_json_name(name: str) -> str:
    """The JSON name that protoc gives a field: without underscores, the letter after each in upper
    case."""
    first, *others = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in others)


def _clear_json_names_of(message: Any) -> None:
    _clear_json_names(message.field)
    _clear_json_names(message.extension)
    for nested in message.nested_type:
        _clear_json_names_of(nested)


def _clear_json_names(fields: Any) -> None:
    for field in fields:
        if field.json_name == default_json_name(field.name):
            field.ClearField("json_name")


def _sort(content: Any) -> None:
    imports = list(content.dependency)
    order = sorted(range(len(imports)), key=lambda index: imports[index])
    places = {index: place for place, index in enumerate(order)}
    for kind in ("public_dependency", "weak_dependency"):
        moved = sorted(places[index] for index in getattr(content, kind))
        content.ClearField(kind)
        getattr(content, kind).extend(moved)
    content.ClearField("dependency")
    content.dependency.extend(imports[index] for index in order)
    for message in content.message_type:
        _sort_fields(message)


def _sort_fields(message: Any) -> None:
    message.field.sort(key=lambda field: field.number)
    for nested in message.nested_type:
        _sort_fields(nested)

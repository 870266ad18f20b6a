"""Avro schemas (specification 1.12): read by our own walk, which resolves all names, and judged by
Apache's library as well.

The canonical text is what Java's `Schema.toString` writes: compact JSON, attributes in a fixed
order, names relative to their namespace, documentation and properties of users kept. It is not the
Parsing Canonical Form of the specification, which drops documentation and defaults. The normalized
text has full names everywhere and the properties of users sorted.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, TypeAlias

import avro.errors
import avro.name
import avro.schema

from rayq.errors import InvalidSchemaError
from rayq.registry.schema_text import ResolvedSchema
from rayq.registry.strict_json import compact_json, parse_json

Node: TypeAlias = Any
"""A type as JSON has it: a name, a list (a union), or an object."""

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED = frozenset({"record", "error", "enum", "fixed"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ORDERS = ("ascending", "descending", "ignore")
_TYPE_ATTRIBUTES = (
    *("type", "name", "namespace", "doc", "fields", "symbols", "size", "items", "values"),
    *("default", "aliases"),
)
_FIELD_ATTRIBUTES = ("name", "type", "doc", "default", "order", "aliases")
_INT_BITS = {"int": 32, "long": 64}


def canonical_avro(resolved: ResolvedSchema, *, normalize: bool) -> str:
    """The canonical text of a schema, or the normalized one.

    Raises InvalidSchemaError, also where the default of a field is no value of its type.
    """
    reader, nodes = _read(resolved)
    _by_library(nodes)
    for default, type_node, path in reader.defaults:
        if not _fits(default, type_node, reader.types):
            raise InvalidSchemaError(
                f"The default at {path} is {default!r:.100}, which is no value of type"
                f" {_type_name(type_node)}. Readers fail when they need it: correct it."
            )
    return compact_json(_normalized(nodes[-1]) if normalize else _relative(nodes[-1], ""))


def parse_avro(resolved: ResolvedSchema) -> avro.schema.Schema:
    """The schema as Apache's library has it, reduced to what decides about compatibility: all names
    and aliases are full, and logical types and properties of users are gone.

    Raises InvalidSchemaError. Defaults are not looked at: a schema of long ago may have wrong ones.
    """
    return _by_library(_read(resolved)[1])


def _read(resolved: ResolvedSchema) -> tuple[_Reader, list[Node]]:
    """The nodes of all schemas that the schema refers to, and its own as the last one."""
    reader, nodes = _Reader(), []
    try:
        for referenced in resolved.referenced:
            subject = f"The schema of reference {referenced.name!r:.200}"
            nodes.append(reader.read(parse_json(referenced.schema.text, subject), "", "#"))
        reader.defaults.clear()  # They were accepted with their own schemas.
        nodes.append(reader.read(parse_json(resolved.schema.text, "The Avro schema"), "", "#"))
    except RecursionError as error:
        raise _too_deep() from error
    return reader, nodes


def _by_library(nodes: list[Node]) -> avro.schema.Schema:
    names = avro.name.Names()
    try:
        with warnings.catch_warnings(action="ignore"):
            return [avro.schema.make_avsc_object(_bare(node), names) for node in nodes][-1]
    except avro.errors.AvroException as error:
        raise InvalidSchemaError(f"Avro does not allow this schema: {error!s:.1000}") from error
    except RecursionError as error:
        raise _too_deep() from error


def _too_deep() -> InvalidSchemaError:
    return InvalidSchemaError(
        "The types of the Avro schema are nested too deeply. Give inner types names, register them"
        " as schemas of their own, and refer to them."
    )


class _Reader:
    """A walk over types as users write them. It makes a node in which each name and alias is full,
    and each attribute is in its place."""

    def __init__(self) -> None:
        self.types: dict[str, Node] = {}
        self.defaults: list[tuple[Any, Node, str]] = []

    def read(self, node: Node, space: str, path: str) -> Node:
        """The node of a type in a namespace ("" is none). `path` says where it is."""
        if isinstance(node, str):
            return self._named(node, space, path)
        if isinstance(node, list):
            return [
                self.read(branch, space, f"{path}/{index}") for index, branch in enumerate(node)
            ]
        if not isinstance(node, dict):
            raise _wrong(path, f"{node!r:.100} is no type: a type is a name, a list or an object")
        if "type" not in node:
            raise _wrong(path, "the type has no attribute 'type'")
        kind = node["type"]
        if isinstance(kind, dict | list):
            if len(node) > 1:
                raise _wrong(path, "attributes stand beside a 'type' that is a type of its own")
            return self.read(kind, space, f"{path}/type")
        if not isinstance(kind, str):
            raise _wrong(path, f"{kind!r:.100} is no type")
        if kind in PRIMITIVES:
            return kind if len(node) == 1 else dict(node)
        if kind in _NAMED:
            return self._definition(kind, node, space, path)
        if kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            if inner not in node:
                raise _wrong(path, f"the {kind} has no attribute {inner!r}")
            return {**node, inner: self.read(node[inner], space, f"{path}/{inner}")}
        return self._named(kind, space, path)

    def _named(self, name: str, space: str, path: str) -> str:
        if name in PRIMITIVES:
            return name
        full = name if "." in name or not space else f"{space}.{name}"
        if full not in self.types:
            raise _wrong(
                path,
                f"there is no type {full!r:.200}. Define it before it is used, or add a reference"
                " to the schema that has it",
            )
        return full

    def _definition(self, kind: str, node: dict[str, Any], space: str, path: str) -> Node:
        full = self._full_name(node, space, path)
        if full in self.types:
            raise _wrong(path, f"the type {full!r:.200} is defined already: give one another name")
        space = full.rpartition(".")[0]
        read: dict[str, Any] = {**node, "name": full}
        read.pop("namespace", None)
        if "aliases" in node:
            aliases = _strings(node["aliases"], f"{path}/aliases")
            for alias in aliases:
                _check_name(alias, f"{path}/aliases")
            read["aliases"] = [
                alias if "." in alias or not space else f"{space}.{alias}" for alias in aliases
            ]
        self.types[full] = read
        if kind == "enum":
            for symbol in _strings(node.get("symbols"), f"{path}/symbols"):
                if not _NAME.fullmatch(symbol):
                    raise _wrong_name(f"{path}/symbols", symbol)
        elif kind in ("record", "error"):
            fields = node.get("fields")
            if not isinstance(fields, list):
                raise _wrong(path, f"the record {full!r:.200} has no list of fields")
            read["fields"] = [
                self._field(field, space, f"{path}/fields/{index}")
                for index, field in enumerate(fields)
            ]
        return read

    def _full_name(self, node: dict[str, Any], space: str, path: str) -> str:
        name, own_space = node.get("name"), node.get("namespace", space)
        if not isinstance(name, str):
            raise _wrong(path, "the type has no name")
        if own_space is None:
            own_space = ""
        if not isinstance(own_space, str):
            raise _wrong(path, f"the namespace {own_space!r:.100} is no string")
        full = name if "." in name or not own_space else f"{own_space}.{name}"
        if full in PRIMITIVES:
            raise _wrong(path, f"{full!r} is the name of a type of Avro itself: use another one")
        _check_name(full, path)
        return full

    def _field(self, field: Any, space: str, path: str) -> dict[str, Any]:
        if not isinstance(field, dict):
            raise _wrong(path, f"{field!r:.100} is no field: a field is an object")
        name = field.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _wrong_name(path, name)
        if "type" not in field:
            raise _wrong(path, f"the field {name!r:.200} has no type")
        if field.get("order", "ascending") not in _ORDERS:
            raise _wrong(path, f"the order is none of {', '.join(_ORDERS)}")
        if "aliases" in field:
            _strings(field["aliases"], f"{path}/aliases")
        read = {**field, "type": self.read(field["type"], space, f"{path}/type")}
        if "default" in field:
            self.defaults.append((field["default"], read["type"], f"{path}/default"))
        return read


def _check_name(full: str, path: str) -> None:
    for part in full.split("."):
        if not _NAME.fullmatch(part):
            raise _wrong_name(path, full)


def _strings(value: Any, path: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(member, str) for member in value):
        raise _wrong(path, f"{value!r:.100} is no list of strings")
    return value


def _wrong(path: str, why: str) -> InvalidSchemaError:
    return InvalidSchemaError(f"The Avro schema is wrong at {path}: {why}.")


def _wrong_name(path: str, name: Any) -> InvalidSchemaError:
    return _wrong(
        path,
        f"{name!r:.200} is no name. Names of Avro begin with one of A-Z, a-z and _, and go on with"
        " these and digits",
    )


# --- writing a node -------------------------------------------------------------------------------


def _ordered(node: dict[str, Any], attributes: tuple[str, ...]) -> dict[str, Any]:
    known = {name: node[name] for name in attributes if name in node}
    return {**known, **{name: value for name, value in node.items() if name not in known}}


def _relative(node: Node, space: str) -> Node:
    """A node as it is written within a namespace."""
    if isinstance(node, str):
        return _relative_name(node, space)
    if isinstance(node, list):
        return [_relative(branch, space) for branch in node]
    written = dict(node)
    if node["type"] in _NAMED:
        own_space, _, short = node["name"].rpartition(".")
        written["name"] = short
        if own_space != space:
            written["namespace"] = own_space
        if "aliases" in node:
            written["aliases"] = [_relative_name(alias, own_space) for alias in node["aliases"]]
        space = own_space
    for inner in ("items", "values"):
        if inner in node:
            written[inner] = _relative(node[inner], space)
    if "fields" in node:
        written["fields"] = [
            _ordered(_plain_field(field, _relative(field["type"], space)), _FIELD_ATTRIBUTES)
            for field in node["fields"]
        ]
    return _ordered(written, _TYPE_ATTRIBUTES)


def _relative_name(full: str, space: str) -> str:
    own_space, _, short = full.rpartition(".")
    return short if own_space == space else full


def _plain_field(field: dict[str, Any], type_node: Node) -> dict[str, Any]:
    written = {**field, "type": type_node}
    if written.get("order") == "ascending":  # as if it were not said
        del written["order"]
    return written


def _normalized(node: Node, space: str = "") -> Node:
    """A node with full names, within a namespace, and with all other keys sorted."""
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        return [_normalized(branch, space) for branch in node]
    written = {name: _sorted(node[name]) for name in sorted(node)}
    written["type"] = node["type"]
    if node["type"] in _NAMED:
        own_space = node["name"].rpartition(".")[0]
        if space and not own_space:
            written["namespace"] = ""
        space = own_space
    for inner in ("items", "values"):
        if inner in node:
            written[inner] = _normalized(node[inner], space)
    if "fields" in node:
        written["fields"] = [
            _ordered(
                {
                    **_plain_field({name: _sorted(field[name]) for name in sorted(field)}, None),
                    "type": _normalized(field["type"], space),
                },
                _FIELD_ATTRIBUTES,
            )
            for field in node["fields"]
        ]
    return _ordered(written, _TYPE_ATTRIBUTES)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(member) for member in value]
    return value


def _bare(node: Node) -> Node:
    """A node with nothing but what decides which data it reads."""
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        return [_bare(branch) for branch in node]
    kind = node["type"]
    if kind in PRIMITIVES:
        return kind
    if kind in ("array", "map"):
        inner = "items" if kind == "array" else "values"
        return {"type": kind, inner: _bare(node[inner])}
    kept = ("type", "name", "symbols", "size", "aliases", *(("default",) if kind == "enum" else ()))
    written = {name: node[name] for name in kept if name in node}
    if "." not in node["name"]:
        written["namespace"] = ""
    if "fields" in node:
        written["fields"] = [
            {
                **{name: field[name] for name in ("name", "default", "aliases") if name in field},
                "type": _bare(field["type"]),
            }
            for field in node["fields"]
        ]
    return written


# --- defaults -------------------------------------------------------------------------------------


def _type_name(node: Node) -> str:
    if isinstance(node, str):
        return node
    if isinstance(node, list):
        return f"[{', '.join(_type_name(branch) for branch in node)}]"
    return str(node.get("name", node["type"]))


def _fits(value: Any, node: Node, types: dict[str, Node]) -> bool:
    """True if a default is a value of a type, in the JSON that the specification has for defaults.
    That of a union is a value of any of its branches."""
    if isinstance(node, list):
        return any(_fits(value, branch, types) for branch in node)
    if isinstance(node, str) and node not in PRIMITIVES:
        node = types[node]
    kind = node if isinstance(node, str) else node["type"]
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            bound = 1 << (_INT_BITS[kind] - 1)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            return is_int and -bound <= value < bound
        case "float" | "double":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "bytes":
            return isinstance(value, str) and all(ord(character) < 256 for character in value)
        case "fixed":
            return (
                isinstance(value, str)
                and len(value) == node["size"]
                and all(ord(character) < 256 for character in value)
            )
        case "enum":
            return value in node["symbols"]
        case "array":
            return isinstance(value, list) and all(
                _fits(member, node["items"], types) for member in value
            )
        case "map":
            return isinstance(value, dict) and all(
                _fits(member, node["values"], types) for member in value.values()
            )
        case _:
            return isinstance(value, dict) and all(
                _fits(value[field["name"]], field["type"], types)
                if field["name"] in value
                else "default" in field
                for field in node["fields"]
            )

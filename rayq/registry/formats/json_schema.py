"""JSON Schemas of drafts 4, 6, 7, 2019-09 and 2020-12: checked by the meta-schema of their draft.

A schema that does not say its draft (`$schema`) is of draft 7. The canonical text is compact JSON,
keys in the order of the user; the normalized text has them sorted. No schema is ever fetched: what
a `$ref` leads to is in the schema itself, in one of its references, or it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urljoin

import jsonschema
import referencing.exceptions
import referencing.jsonschema
from jsonschema_specifications import REGISTRY as META_SCHEMAS
from referencing import Resource

from rayq.errors import InvalidSchemaError
from rayq.registry.schema_text import ResolvedSchema
from rayq.registry.strict_json import compact_json, parse_json

Contents: TypeAlias = Any
"""A schema as JSON has it: an object, or a boolean (since draft 6, and within draft 4)."""


@dataclass(frozen=True)
class Draft:
    """A version of JSON Schema: its number (4, 6, 7, 2019, 2020), where its subschemas are, and who
    judges values by it."""

    number: int
    specification: Any
    validator: Any

    @property
    def ref_stands_alone(self) -> bool:
        """True if the keywords beside a `$ref` mean nothing."""
        return self.number <= 7


_SPECIFICATIONS = referencing.jsonschema
DRAFTS = {
    "json-schema.org/draft-04/schema": Draft(4, _SPECIFICATIONS.DRAFT4, jsonschema.Draft4Validator),
    "json-schema.org/draft-06/schema": Draft(6, _SPECIFICATIONS.DRAFT6, jsonschema.Draft6Validator),
    "json-schema.org/draft-07/schema": Draft(7, _SPECIFICATIONS.DRAFT7, jsonschema.Draft7Validator),
    "json-schema.org/draft/2019-09/schema": Draft(
        2019, _SPECIFICATIONS.DRAFT201909, jsonschema.Draft201909Validator
    ),
    "json-schema.org/draft/2020-12/schema": Draft(
        2020, _SPECIFICATIONS.DRAFT202012, jsonschema.Draft202012Validator
    ),
}
"""Each draft by its URI, without the scheme and the empty fragment."""
_DEFAULT_DRAFT = "json-schema.org/draft-07/schema"
REF_KEYWORDS = ("$ref", "$recursiveRef", "$dynamicRef")


@dataclass(frozen=True)
class Node:
    """A schema or a subschema, and how its references are resolved."""

    contents: Contents
    resolver: Any = field(repr=False)
    draft: Draft

    def sub(self, contents: Contents) -> Node:
        """The node of a subschema of this one."""
        if not isinstance(contents, Mapping):
            return Node(contents, self.resolver, self.draft)
        draft = draft_of(contents, self.draft)
        resource = draft.specification.create_resource(contents)
        return Node(contents, self.resolver.in_subresource(resource), draft)

    def target(self, reference: str) -> Node:
        """The node that a reference leads to. Raises InvalidSchemaError if it leads nowhere."""
        try:
            resolved = self.resolver.lookup(reference)
        except (
            referencing.exceptions.Unresolvable,
            referencing.exceptions.NoSuchAnchor,
            referencing.exceptions.CannotDetermineSpecification,
            ValueError,  # a pointer into a list by something that is no number
            TypeError,  # a pointer into what is neither a list nor an object
        ) as error:
            raise InvalidSchemaError(
                f"The $ref {reference!r:.300} of the JSON Schema leads nowhere: no schema is"
                " fetched. Put what it means into the schema, or register it and add a reference"
                " with that name."
            ) from error
        draft = draft_of(resolved.contents, self.draft)
        return Node(resolved.contents, resolved.resolver, draft)

    def accepts(self, value: Any) -> bool | None:
        """True if a value is valid by this schema; None if the validator cannot tell: a pattern is
        one of JavaScript only, a number too large, or a reference leads back to itself."""
        # The validator could make a resolver only for a whole document, and this may be a part.
        validator = self.draft.validator(self.contents, _resolver=self.resolver)
        try:
            return bool(validator.is_valid(value))
        except (re.error, OverflowError, RecursionError):
            return None
        except BaseException as error:
            # What becomes of a RecursionError that passes through the validator's tables in Rust.
            if type(error).__name__ == "PanicException":
                return None
            raise


def canonical_json_schema(resolved: ResolvedSchema, *, normalize: bool) -> str:
    """The canonical text of a schema, or the normalized one. Raises InvalidSchemaError."""
    return compact_json(parse_json_schema(resolved).contents, sort_keys=normalize)


def parse_json_schema(resolved: ResolvedSchema) -> Node:
    """The root of a schema, whose references all lead somewhere. Raises InvalidSchemaError."""
    contents = parse_json(resolved.schema.text, "The JSON Schema")
    if not isinstance(contents, dict | bool):
        raise InvalidSchemaError(
            f"The JSON Schema is {contents!r:.100}, and a schema is an object, true or false."
        )
    draft = draft_of(contents, DRAFTS[_DEFAULT_DRAFT])
    _check_by_meta_schema(contents, draft)
    resource = draft.specification.create_resource(contents)
    uri = resource.id() or ""
    try:
        registry = META_SCHEMAS.with_resources(_named_resources(resolved, resource))
        registry = registry.with_resource(uri, resource).crawl()
        root = Node(contents, registry.resolver(uri), draft)
    except ValueError as error:
        raise InvalidSchemaError(
            f"An $id of the JSON Schema, or the name of a reference, is no URI: {error}. Correct"
            " it."
        ) from error
    _check_references(root)
    return root


def draft_of(contents: Contents, default: Draft) -> Draft:
    """The draft that a schema names, or the default if it names none.

    Raises InvalidSchemaError for a draft that is unknown.
    """
    named = contents.get("$schema") if isinstance(contents, Mapping) else None
    if named is None:
        return default
    uri = named.rstrip("#").partition("://")[2] if isinstance(named, str) else ""
    draft = DRAFTS.get(uri)
    if draft is None:
        known = ", ".join(DRAFTS)
        raise InvalidSchemaError(
            f"The $schema {named!r:.200} is unknown. Use one of {known}; without a $schema a schema"
            " is of draft 7."
        )
    return draft


def _named_resources(
    resolved: ResolvedSchema, root: Resource[Any]
) -> Iterator[tuple[str, Resource[Any]]]:
    """All that the schema refers to, under each URI by which a `$ref` may name it: the name of the
    reference, seen from the schema that has the reference."""
    resources: dict[str, Resource[Any]] = {}
    for referenced in resolved.referenced:
        contents = parse_json(
            referenced.schema.text, f"The schema of reference {referenced.name!r:.200}"
        )
        draft = draft_of(contents, DRAFTS[_DEFAULT_DRAFT])
        resources[referenced.name] = draft.specification.create_resource(contents)
    bases = {name: {name, resource.id() or name} for name, resource in resources.items()}
    owners = [(resolved.schema, {root.id() or ""})]
    # From the top: the URIs of a schema are known before those of what it refers to.
    owners += [(named.schema, bases[named.name]) for named in reversed(resolved.referenced)]
    for schema, own in owners:
        for reference in schema.references:
            seen = {urljoin(base, reference.name) for base in own}
            if resources[reference.name].id() is None:
                bases[reference.name] |= seen
            for uri in {reference.name, *seen}:
                yield uri.rstrip("#"), resources[reference.name]


def _check_references(root: Node) -> None:
    """Raises InvalidSchemaError where a reference leads nowhere, or to what is no schema."""
    seen: set[int] = set()
    left = [root]
    while left:
        node = left.pop()
        if id(node.contents) in seen or not isinstance(node.contents, Mapping):
            continue
        seen.add(id(node.contents))
        subschemas = node.draft.specification.subresources_of(node.contents)
        left += [node.sub(contents) for contents in subschemas]
        for keyword in REF_KEYWORDS:
            if isinstance(reference := node.contents.get(keyword), str):
                target = node.target(reference)
                if id(target.contents) not in seen:
                    # A pointer can lead into what is no subschema, so nobody has looked at it.
                    _check_by_meta_schema(target.contents, target.draft)
                    left.append(target)


def _check_by_meta_schema(contents: Contents, draft: Draft) -> None:
    try:
        # Not whether patterns are ones of Python: theirs are those of JavaScript.
        draft.validator.check_schema(contents, format_checker=None)
    except jsonschema.SchemaError as error:
        path = "/".join(str(step) for step in ("#", *error.absolute_path))
        raise InvalidSchemaError(
            f"The JSON Schema is wrong at {path}: {error.message:.500}."
        ) from error
    except RecursionError as error:
        raise InvalidSchemaError(
            "The JSON Schema is nested too deeply. Give inner schemas names in $defs, and refer to"
            " them."
        ) from error

"""Keywords of one JSON Schema in the words of draft 2020-12, whatever its draft, and without those
that say nothing about values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

from rayq.registry.formats.json_schema import Contents, Node

_IN_PLACE = frozenset(
    {
        *("$ref", "$recursiveRef", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if"),
        *("dependentSchemas", "contains"),
    }
)
"""Keywords that evaluate properties or items for `unevaluatedProperties` and `unevaluatedItems`."""

ALL_TYPES = frozenset({"null", "boolean", "object", "array", "string", "int", "whole", "fraction"})
"""Types that have no value in common. "int" and "whole" are 1 and 1.0, which only draft 4 tells
apart; a "fraction" is any other number."""
Bound: TypeAlias = tuple[Fraction, bool]
"""A number, and whether it is excluded itself."""
NUMBERS = frozenset({"int", "whole", "fraction"})


def types_named(name: str, draft_number: int) -> frozenset[str]:
    """The types, among `ALL_TYPES`, of a name for `type`."""
    if name == "number":
        return NUMBERS
    if name == "integer":
        return frozenset({"int"} if draft_number == 4 else {"int", "whole"})
    return frozenset({name})


@dataclass(slots=True)
class View:
    """The keywords of a node. None, or an empty one, where the schema does not have it."""

    node: Node
    always: bool | None = None
    """True or False: the schema accepts all values, or none."""
    types: frozenset[str] = ALL_TYPES
    values: list[Any] | None = None
    """`enum` or `const`."""
    minimum: Bound | None = None
    maximum: Bound | None = None
    multiple_of: Fraction | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """`minLength`, `maxItems` and their kin."""
    pattern: str | None = None
    unique_items: bool = False
    prefix_items: list[Contents] = field(default_factory=list)
    items: Contents | None = None
    """The schema of all items after the first ones."""
    properties: dict[str, Contents] = field(default_factory=dict)
    pattern_properties: dict[str, Contents] = field(default_factory=dict)
    additional: Contents | None = None
    required: frozenset[str] = frozenset()
    property_names: Contents | None = None
    dependent_required: dict[str, frozenset[str]] = field(default_factory=dict)
    dependent_schemas: dict[str, Contents] = field(default_factory=dict)
    ref: Node | None = None
    all_of: list[Contents] = field(default_factory=list)
    any_of: list[Contents] = field(default_factory=list)
    one_of: list[Contents] = field(default_factory=list)
    negated: Contents | None = None
    condition: tuple[Contents, Contents, Contents] | None = None
    """`if`, `then` and `else`."""
    contains: Contents | None = None
    """`contains`, with `minContains` and `maxContains`."""
    unjudged: dict[str, str] = field(default_factory=dict)
    """Keywords that a proof knows nothing about, each with the type of the values they concern."""


def view_of(node: Node) -> View:
    """The view of a node. Raises InvalidSchemaError where its reference leads nowhere."""
    contents = node.contents
    if not isinstance(contents, Mapping):
        return View(node, always=bool(contents))
    draft = node.draft
    if "$ref" in contents and draft.ref_stands_alone:
        return View(node, ref=node.target(contents["$ref"]))
    known = {
        name: value
        for name, value in contents.items()
        # Validators know `then` and the like as parts of other keywords.
        if name in draft.validator.VALIDATORS
        or name in ("then", "else", "minContains", "maxContains")
    }
    view = View(node)
    if "$ref" in known:
        view.ref = node.target(known["$ref"])
    _read_values(view, known)
    _read_arrays(view, known)
    _read_objects(view, known)
    for keyword in ("$recursiveRef", "$dynamicRef"):
        if keyword in known:
            view.unjudged[keyword] = ""
    view.all_of, view.any_of = known.get("allOf", []), known.get("anyOf", [])
    view.one_of, view.negated = known.get("oneOf", []), known.get("not")
    if "if" in known:
        view.condition = (known["if"], known.get("then", True), known.get("else", True))
    return view


def _read_values(view: View, known: Mapping[str, Any]) -> None:
    draft_number = view.node.draft.number
    if "type" in known:
        names = known["type"] if isinstance(known["type"], list) else [known["type"]]
        view.types = frozenset().union(*(types_named(name, draft_number) for name in names))
    if "enum" in known:
        view.values = known["enum"]
    if "const" in known:
        view.values = [known["const"]]
    if draft_number == 4:
        if "minimum" in known:
            excluded = view.node.contents.get("exclusiveMinimum") is True
            view.minimum = (_number(known["minimum"]), excluded)
        if "maximum" in known:
            excluded = view.node.contents.get("exclusiveMaximum") is True
            view.maximum = (_number(known["maximum"]), excluded)
    else:
        lower = [(_number(known[name]), name != "minimum") for name in _LOWER if name in known]
        upper = [(_number(known[name]), name != "maximum") for name in _UPPER if name in known]
        view.minimum = max(lower, default=None)
        view.maximum = min(upper, key=lambda bound: (bound[0], not bound[1]), default=None)
    if "multipleOf" in known:
        view.multiple_of = _number(known["multipleOf"])
    for name in _SIZES:
        if name in known:
            view.sizes[name] = int(known[name])
    view.pattern = known.get("pattern")


_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_CONTAINS = ("contains", "minContains", "maxContains")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def _number(value: int | float) -> Fraction:
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)


def _read_arrays(view: View, known: Mapping[str, Any]) -> None:
    view.unique_items = bool(known.get("uniqueItems", False))
    if view.node.draft.number == 2020:
        view.prefix_items, view.items = known.get("prefixItems", []), known.get("items")
    elif isinstance(known.get("items"), list):
        view.prefix_items, view.items = known["items"], known.get("additionalItems")
    else:
        view.items = known.get("items")
    if "contains" in known:
        view.contains = {name: known[name] for name in _CONTAINS if name in known}
    unevaluated = known.get("unevaluatedItems", True)
    if unevaluated is not True and view.items is None:
        if _IN_PLACE.isdisjoint(known):
            view.items = unevaluated
        else:
            view.unjudged["unevaluatedItems"] = "array"


def _read_objects(view: View, known: Mapping[str, Any]) -> None:
    view.properties = known.get("properties", {})
    view.pattern_properties = known.get("patternProperties", {})
    view.additional = known.get("additionalProperties")
    view.required = frozenset(known.get("required", ()))
    view.property_names = known.get("propertyNames")
    dependencies = known.get("dependencies", {})
    view.dependent_required = {
        name: frozenset(needed)
        for name, needed in {**dependencies, **known.get("dependentRequired", {})}.items()
        if isinstance(needed, list)
    }
    view.dependent_schemas = {
        name: needed
        for name, needed in {**dependencies, **known.get("dependentSchemas", {})}.items()
        if not isinstance(needed, list)
    }
    unevaluated = known.get("unevaluatedProperties", True)
    if unevaluated is not True and view.additional is None:
        if _IN_PLACE.isdisjoint(known):
            view.additional = unevaluated
        else:
            view.unjudged["unevaluatedProperties"] = "object"


def matches(pattern: str, name: str) -> bool | None:
    """True if a name matches a pattern of `patternProperties`; None if Python cannot tell, since
    the pattern is one of JavaScript only."""
    try:
        return re.search(pattern, name) is not None
    except (re.error, OverflowError, RecursionError):
        return None

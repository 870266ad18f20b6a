"""Compatibility of JSON Schemas: a proof that all values that the writer's schema accepts are
accepted by the reader's.

The proof is by parts: each keyword of the reader must follow from what the writer's schema says.
Where it cannot be found the schemas count as incompatible, and the reason names the keyword; so
some that fit are refused, and none is accepted that does not fit. `format` and the keywords about
content are annotations, which no validator of rayq looks at.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from rayq.errors import InvalidSchemaError
from rayq.registry.compatibility.incompatibility import Incompatibility
from rayq.registry.compatibility.json_facts import Facts, Nodes, Synthetic
from rayq.registry.compatibility.json_views import (
    NUMBERS,
    Bound,
    View,
    matches,
    types_named,
    view_of,
)
from rayq.registry.formats.json_schema import Contents, Node, parse_json_schema
from rayq.registry.schema_text import ResolvedSchema
from rayq.registry.strict_json import compact_json

STEPS_MAX = 20_000
"""Pairs of subschemas that a proof looks at, which takes about 3 s."""
Found: TypeAlias = list[Incompatibility]
_Pair: TypeAlias = tuple[frozenset[tuple[int, int]], tuple[int, int], frozenset[int]]
"""Old schemas, a new one, and which alternatives are chosen; schemas by `_identity`."""
_NOTHING = sys.maxsize


def json_schema_incompatibilities(reader: ResolvedSchema, writer: ResolvedSchema) -> Found:
    """Reasons why `reader` does not accept all that `writer` accepts. Raises InvalidSchemaError."""
    proof = _Proof()
    try:
        found = proof.included((parse_json_schema(writer),), parse_json_schema(reader), "#")
        return list(dict.fromkeys(found))
    except RecursionError as error:
        raise InvalidSchemaError(
            "The JSON Schemas are nested too deeply to be compared. Make them flatter."
        ) from error
    except _TooComplexError:
        return [
            Incompatibility(
                "too_complex",
                "#",
                f"more than {STEPS_MAX:,} pairs of subschemas had to be compared: use fewer"
                " alternatives",
            )
        ]


class _TooComplexError(Exception):
    """The proof has become too long."""


class _Proof:
    def __init__(self) -> None:
        self._steps = 0
        self._views: dict[tuple[int, int], View] = {}
        self._texts: dict[int, tuple[Any, str]] = {}
        self._synthetic = Synthetic()
        self._depth = 0
        """The depth within the value that the proof speaks of now."""
        self._assumed: dict[_Pair, tuple[int, int]] = {}
        """Pairs that are being proved, outermost first: the depth and the place of each. A pair
        that comes again deeper is proved by induction."""
        self._leans_on = _NOTHING
        """The outermost of these that the present proof has made use of."""
        self._known: dict[_Pair, Found] = {}
        """The outcomes that made use of no pair that is not proved itself."""

    def included(
        self, old: Nodes, new: Node, path: str, split: frozenset[int] = frozenset()
    ) -> Found:
        """Reasons why not all values of the old schemas, together, are values of the new one.

        `split` has the alternatives among the old ones, by identity, of which one was chosen.
        """
        self._step()
        view = self._view(new)
        if view.always is True:
            return []
        facts = self._facts(old)
        if facts.never:
            return []
        if any(self._same(known.node, new) for known in facts.views):
            return []
        values = facts.values()
        if values is not None:
            return self._values_included(facts, values, new, path)
        if view.always is False:
            if self._empty(facts, split):
                return []
            return [_found("schema_is_false", path, "the reader accepts nothing here")]
        pair = (frozenset(_identity(known.node) for known in facts.views), _identity(new), split)
        if pair in self._known:
            return self._known[pair]
        if pair in self._assumed:
            depth, place = self._assumed[pair]
            self._leans_on = min(self._leans_on, place)
            if depth < self._depth:
                return []
            return [_unjudged("$ref", path, "it leads back to itself")]
        place = len(self._assumed)
        leant_on, self._leans_on = self._leans_on, _NOTHING
        self._assumed[pair] = (self._depth, place)
        found = self._proved(facts, view, path, split)
        del self._assumed[pair]
        if self._leans_on >= place:
            self._known[pair] = found
            self._leans_on = _NOTHING
        self._leans_on = min(self._leans_on, leant_on)
        return found

    def _proved(self, facts: Facts, view: View, path: str, split: frozenset[int]) -> Found:
        found: Found = []
        alternatives = self._alternatives(facts, view, split)
        # Each case of the old values has an alternative of its own, so the cases come first there.
        # Elsewhere all cases have the same proof, as a rule.
        if alternatives is None or not _has_alternatives(view):
            found = self._directly(facts, view, path, split)
            if not found or self._empty(facts, split):
                return []
        if alternatives is None:
            return found
        chosen, branches = alternatives
        for branch in branches:
            remaining = self.included((*facts.nodes, *branch), view.node, path, split | {chosen})
            if remaining:
                return remaining
        return []

    def _alternatives(
        self, facts: Facts, view: View, split: frozenset[int]
    ) -> tuple[int, list[Nodes]] | None:
        """A way to split the old values into cases, by what they satisfy besides; None if none is
        left."""
        for known in facts.views:
            for alternatives, exclusive in ((known.any_of, False), (known.one_of, True)):
                if not alternatives or id(alternatives) in split:
                    continue
                branches = []
                for index, alternative in enumerate(alternatives):
                    branch = [known.node.sub(alternative)]
                    if exclusive:
                        branch += [
                            self._synthetic.node(known.node, "not", other, ("not", place))
                            for place, other in enumerate(alternatives)
                            if place != index
                        ]
                    branches.append(tuple(branch))
                return id(alternatives), branches
            if known.condition is not None and id(known.condition[0]) not in split:
                condition, then, otherwise = known.condition
                negated = self._synthetic.node(known.node, "not", condition, "condition")
                return id(condition), [
                    (known.node.sub(condition), known.node.sub(then)),
                    (negated, known.node.sub(otherwise)),
                ]
        if not _has_alternatives(view) or id(_TYPE_GROUPS) in split:
            return None
        groups = [group for group in _TYPE_GROUPS if facts.types & types_named(group, 2020)]
        if len(groups) > 1:
            owner = facts.nodes[0]
            return id(_TYPE_GROUPS), [
                (self._synthetic.node(owner, "type", group, ("type", group)),) for group in groups
            ]
        return None

    def _directly(self, facts: Facts, view: View, path: str, split: frozenset[int]) -> Found:
        """Reasons that remain when each keyword is looked at for itself."""
        found = self._types(facts, view, path)
        if view.values is not None:
            found.append(_found("enum_array_narrowed", path, "the reader lists the values"))
        if facts.types & NUMBERS:
            found += self._numbers(facts, view, path)
        found += self._sizes(facts, view, path)
        if "string" in facts.types and view.pattern is not None:
            patterns = {known.pattern for known in facts.views}
            if view.pattern not in patterns:
                found.append(
                    _found(
                        "pattern_added" if patterns == {None} else "pattern_changed",
                        f"{path}/pattern",
                        f"strings have to match {view.pattern!r:.200}",
                    )
                )
        if "array" in facts.types:
            found += self._arrays(facts, view, path)
        if "object" in facts.types:
            found += self._objects(facts, view, path)
        return found + self._in_place(facts, view, path, split)

    # --- keywords about one value -----------------------------------------------------------------

    def _types(self, facts: Facts, view: View, path: str) -> Found:
        more = facts.types - view.types
        if not more:
            return []
        kind = "type_changed" if not facts.types & view.types else "type_narrowed"
        told = sorted({_TYPE_NAMES.get(name, name) for name in more})
        return [_found(kind, f"{path}/type", f"the reader does not accept {', '.join(told)}")]

    def _values_included(self, facts: Facts, values: list[Any], new: Node, path: str) -> Found:
        for value in values:
            self._step()
            accepted = new.accepts(value)
            if accepted or not facts.accept(value):
                continue
            told = f"the reader does not accept {value!r:.100}"
            if accepted is None:
                told = f"nobody can tell if the reader accepts {value!r:.100}"
                return [_found("cannot_be_judged", path, told)]
            kind = "enum_array_narrowed" if self._view(new).values else "value_refused"
            return [_found(kind, path, told)]
        return []

    def _numbers(self, facts: Facts, view: View, path: str) -> Found:
        found = []
        lower, upper = facts.minimum(), facts.maximum()
        if view.minimum is not None and (lower is None or lower < view.minimum):
            change = "added" if lower is None else "increased"
            told = f"numbers have to be {_bound('above', view.minimum)}"
            found.append(_found(f"minimum_{change}", f"{path}/minimum", told))
        if view.maximum is not None:
            limit, excluded = view.maximum
            if upper is None or upper[0] > limit or (upper[0] == limit and excluded > upper[1]):
                change = "added" if upper is None else "decreased"
                told = f"numbers have to be {_bound('below', view.maximum)}"
                found.append(_found(f"maximum_{change}", f"{path}/maximum", told))
        if view.multiple_of is not None:
            known = [known.multiple_of for known in facts.views if known.multiple_of]
            if "fraction" not in facts.types:
                known.append(Fraction(1))
            if not any(divisor % view.multiple_of == 0 for divisor in known):
                told = f"numbers have to be multiples of {_shown(view.multiple_of)}"
                found.append(_found("multiple_of_changed", f"{path}/multipleOf", told))
        return found

    def _sizes(self, facts: Facts, view: View, path: str) -> Found:
        found = []
        for keyword, size in view.sizes.items():
            kind = _SIZED[keyword[3:]]
            if kind not in facts.types:
                continue
            if keyword.startswith("min"):
                known: int | None = facts.at_least(keyword)
                wrong, change = known is not None and known < size, "increased"
            else:
                known = facts.at_most(keyword)
                wrong, change = known is None or known > size, "decreased"
            if wrong:
                stated = any(keyword in other.sizes for other in facts.views)
                found.append(
                    _found(
                        f"{_snake(keyword)}_{change if stated else 'added'}",
                        f"{path}/{keyword}",
                        f"{keyword} is {size:,} for the reader",
                    )
                )
        return found

    # --- arrays and objects -----------------------------------------------------------------------

    def _arrays(self, facts: Facts, view: View, path: str) -> Found:
        found = []
        longest = facts.at_most("maxItems")
        if view.unique_items and not (
            any(known.unique_items for known in facts.views)
            or (longest is not None and longest < 2)
        ):
            found.append(
                _found("unique_items_added", f"{path}/uniqueItems", "items have to be unique")
            )
        named = max(len(known.prefix_items) for known in (view, *facts.views))
        for index in range(named):
            if longest is not None and index >= longest:
                break
            if index < len(view.prefix_items):
                contents, at = view.prefix_items[index], f"{path}/items/{index}"
            elif view.items is not None:
                contents, at = view.items, f"{path}/items"
            else:
                break
            inside = self._inside(facts.item(index), view.node.sub(contents), at)
            if inside and contents is False:
                told = "the reader accepts fewer items"
                inside = [_found("item_removed_from_closed_content_model", at, told)]
            found += inside
        if view.items is not None and (longest is None or longest > named):
            found += self._inside(facts.item(None), view.node.sub(view.items), f"{path}/items")
        return found

    def _objects(self, facts: Facts, view: View, path: str) -> Found:
        found = []
        for name in sorted(view.required - facts.required):
            known = any(name in other.properties for other in facts.views)
            found.append(
                _found(
                    "required_attribute_added" if known else "required_property_added",
                    f"{path}/required/{name}",
                    f"the property {name!r:.200} is required by the reader only",
                )
            )
        named = {name for known in facts.views for name in known.properties}
        for name in sorted(named | view.properties.keys()):
            found += self._property(facts, view, name, path)
        for pattern, contents in view.pattern_properties.items():
            at = f"{path}/patternProperties/{pattern}"
            found += self._inside(facts.other_property(pattern), view.node.sub(contents), at)
        if view.additional is not None:
            at = f"{path}/additionalProperties"
            inside = self._inside(
                self._unmatched_property(facts, view), view.node.sub(view.additional), at
            )
            if inside:
                kind = "removed" if view.additional is False else "narrowed"
                told = "properties that no schema names are not all accepted"
                found.append(_found(f"additional_properties_{kind}", at, told))
        found += self._dependencies(facts, view, path)
        if view.property_names is not None:
            found += self._property_names(facts, view, path)
        return found

    def _unmatched_property(self, facts: Facts, view: View) -> Nodes:
        """All that is known of a property that no schema names and no pattern of the reader
        matches."""
        nodes = []
        for known in facts.views:
            others = {
                pattern: contents
                for pattern, contents in known.pattern_properties.items()
                if pattern not in view.pattern_properties
            }
            if not others:
                if known.additional is not None:
                    nodes.append(known.node.sub(known.additional))
            else:
                additional = {} if known.additional is None else known.additional
                nodes.append(
                    self._synthetic.node(
                        known.node,
                        "anyOf",
                        [additional, *others.values()],
                        ("unmatched", *others),
                    )
                )
        return tuple(nodes)

    def _property(self, facts: Facts, view: View, name: str, path: str) -> Found:
        at = f"{path}/properties/{name}"
        matched = {pattern: matches(pattern, name) for pattern in view.pattern_properties}
        if None in matched.values():
            return [_unjudged("patternProperties", path, "a pattern is none of Python")]
        targets = [view.properties[name]] if name in view.properties else []
        targets += [view.pattern_properties[p] for p, matching in matched.items() if matching]
        if not targets:
            targets = [] if view.additional is None else [view.additional]
        known = facts.property(name)
        found = [
            reason
            for contents in targets
            for reason in self._inside(known, view.node.sub(contents), at)
        ]
        if not found:
            return []
        if not any(name in other.properties for other in facts.views):
            if not known:
                told = f"the writer may have put anything into property {name!r:.200}"
                return [_found("property_added_to_open_content_model", at, told)]
            told = f"what the writer may put into property {name!r:.200} is not all accepted"
            return [_found("property_added_not_covered_by_partially_open_content_model", at, told)]
        if name not in view.properties and not any(matched.values()):
            closed = view.additional is False
            told = f"the reader does not know the property {name!r:.200}"
            model = "closed" if closed else "partially_open"
            return [_found(f"property_removed_from_{model}_content_model", at, told)]
        return found

    def _dependencies(self, facts: Facts, view: View, path: str) -> Found:
        found = []
        for name, needed in view.dependent_required.items():
            given = facts.required.union(
                *(known.dependent_required.get(name, ()) for known in facts.views)
            )
            if not needed <= given and not self._impossible(facts, name):
                told = f"property {name!r:.200} needs {', '.join(sorted(needed - given))}"
                at = f"{path}/dependentRequired/{name}"
                found.append(_found("dependency_array_extended", at, told))
        for name, contents in view.dependent_schemas.items():
            if self._impossible(facts, name):
                continue
            given_nodes = [
                known.node.sub(known.dependent_schemas[name])
                for known in facts.views
                if name in known.dependent_schemas
            ]
            owner = facts.nodes[0]
            present = self._synthetic.node(owner, "required", [name], ("required", name))
            typed = self._synthetic.node(owner, "type", "object", ("type", "object"))
            nodes = (*facts.nodes, typed, present, *given_nodes)
            at = f"{path}/dependentSchemas/{name}"
            found += self.included(nodes, view.node.sub(contents), at)
        return found

    def _impossible(self, facts: Facts, name: str) -> bool:
        return any(self._view(node).always is False for node in facts.property(name))

    def _property_names(self, facts: Facts, view: View, path: str) -> Found:
        at = f"{path}/propertyNames"
        new = view.node.sub(view.property_names)
        given = tuple(
            known.node.sub(known.property_names)
            for known in facts.views
            if known.property_names is not None
        )
        string = self._synthetic.node(facts.nodes[0], "type", "string", ("type", "string"))
        if not self.included((*given, string), new, at):
            return []
        for known in facts.views:
            if known.additional is False and not known.pattern_properties:
                refused = [name for name in known.properties if not new.accepts(name)]
                if not refused:
                    return []
        return [_found("property_names_narrowed", at, "not all names are accepted")]

    def _inside(self, old: Nodes, new: Node, path: str) -> Found:
        """The same question about an item or a property of the value."""
        self._depth += 1
        try:
            return self.included(old or (self._anything(new),), new, path)
        finally:
            self._depth -= 1

    def _anything(self, node: Node) -> Node:
        return Node(_ANYTHING, node.resolver, node.draft)

    # --- schemas of schemas -----------------------------------------------------------------------

    def _in_place(self, facts: Facts, view: View, path: str, split: frozenset[int]) -> Found:
        old, node = facts.nodes, view.node
        found = []
        if view.ref is not None:
            found += self.included(old, view.ref, path, split)
        for index, contents in enumerate(view.all_of):
            found += self.included(old, node.sub(contents), f"{path}/allOf/{index}", split)
        if view.any_of:
            found += self._any_of(facts, view, path, split)
        if view.one_of:
            found += self._one_of(facts, view, path, split)
        if view.negated is not None and not self._excluded(facts, node.sub(view.negated), split):
            told = "values that the reader excludes are not excluded by the writer"
            found.append(_found("not_type_extended", f"{path}/not", told))
        if view.condition is not None:
            condition, then, otherwise = view.condition
            negated = self._synthetic.node(node, "not", condition, "condition")
            found += self.included(
                (*old, node.sub(condition)), node.sub(then), f"{path}/then", split
            )
            found += self.included((*old, negated), node.sub(otherwise), f"{path}/else", split)
        if view.contains is not None and "array" in facts.types:
            contains = node.sub(view.contains)
            if not any(
                known.contains is not None and self._same(known.node.sub(known.contains), contains)
                for known in facts.views
            ):
                found.append(_unjudged("contains", path, "it is judged only where it is the same"))
        for keyword, concerned in view.unjudged.items():
            if not concerned or concerned in facts.types:
                why = "it is judged only where its whole schema is the same"
                found.append(_unjudged(keyword, path, why))
        return found

    def _any_of(self, facts: Facts, view: View, path: str, split: frozenset[int]) -> Found:
        reasons = []
        for index, contents in enumerate(view.any_of):
            at = f"{path}/anyOf/{index}"
            reasons = self.included(facts.nodes, view.node.sub(contents), at, split)
            if not reasons:
                return []
        if len(view.any_of) == 1:
            return reasons
        told = "no alternative accepts all that the writer writes"
        return [_found("sum_type_narrowed", f"{path}/anyOf", told)]

    def _one_of(self, facts: Facts, view: View, path: str, split: frozenset[int]) -> Found:
        nodes = [view.node.sub(contents) for contents in view.one_of]
        reasons = []
        accepted = False
        for index, node in enumerate(nodes):
            reasons = self.included(facts.nodes, node, f"{path}/oneOf/{index}", split)
            if reasons:
                continue
            accepted = True
            others = (other for place, other in enumerate(nodes) if place != index)
            if all(self._excluded(facts, other, split) for other in others):
                return []
        if accepted:
            return [
                _unjudged("oneOf", path, "another alternative may accept the same values as well")
            ]
        if len(nodes) == 1:
            return reasons
        told = "no alternative accepts all that the writer writes"
        return [_found("sum_type_narrowed", f"{path}/oneOf", told)]

    def _excluded(self, facts: Facts, other: Node, split: frozenset[int]) -> bool:
        """True if no value of the old schemas is one of another schema."""
        return self._empty(self._facts((*facts.nodes, other)), split)

    def _empty(self, facts: Facts, split: frozenset[int]) -> bool:
        """True if it can be shown that the schemas have no value in common."""
        self._step()
        if facts.never:
            return True
        values = facts.values()
        if values is not None:
            return not any(facts.accept(value) for value in values)
        for known in facts.views:
            if known.negated is None:
                continue
            rest = tuple(node for node in facts.nodes if node.contents is not known.node.contents)
            if rest and not self.included(rest, known.node.sub(known.negated), "#", split):
                return True
        if facts.types <= NUMBERS and _crossed(facts.minimum(), facts.maximum()):
            return True
        if facts.types == {"object"} and any(
            self._empty_inside(facts.property(name)) for name in sorted(facts.required)
        ):
            return True
        for known in facts.views:
            for alternatives in (known.any_of, known.one_of):
                if alternatives and id(alternatives) not in split:
                    chosen = split | {id(alternatives)}
                    if all(
                        self._empty(self._facts((*facts.nodes, known.node.sub(branch))), chosen)
                        for branch in alternatives
                    ):
                        return True
        return False

    def _empty_inside(self, nodes: Nodes) -> bool:
        if not nodes:
            return False
        self._depth += 1
        try:
            return self._depth < _EMPTY_DEPTH_MAX and self._empty(self._facts(nodes), frozenset())
        finally:
            self._depth -= 1

    # --- what a proof knows -----------------------------------------------------------------------

    def _step(self) -> None:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise _TooComplexError

    def _view(self, node: Node) -> View:
        key = (id(node.contents), id(node.draft)) if isinstance(node.contents, Mapping) else None
        if key is None:
            return view_of(node)
        known = self._views.get(key)
        if known is None:
            known = self._views[key] = view_of(node)
        return known

    def _facts(self, nodes: Nodes) -> Facts:
        """The schemas with all that they refer to and consist of, each once."""
        views: list[View] = []
        seen: set[int] = set()
        left = list(reversed(nodes))
        while left:
            node = left.pop()
            if isinstance(node.contents, Mapping):
                if id(node.contents) in seen:
                    continue
                seen.add(id(node.contents))
            view = self._view(node)
            views.append(view)
            if view.ref is not None:
                left.append(view.ref)
            left += [view.node.sub(contents) for contents in view.all_of]
        return Facts(nodes, views, self._synthetic)

    def _same(self, node: Node, other: Node) -> bool:
        """True if two schemas are written alike, and mean the same by their references."""
        pending, seen = [(node, other)], set()
        while pending:
            node, other = pending.pop()
            if node.contents is other.contents or (id(node.contents), id(other.contents)) in seen:
                continue
            seen.add((id(node.contents), id(other.contents)))
            if node.draft is not other.draft or self._text(node) != self._text(other):
                return False
            references = _references(node.contents)
            if references is None:
                return False
            try:
                pending += [(node.target(uri), other.target(uri)) for uri in references]
            except InvalidSchemaError:  # It only looks like a reference: a value of an `enum`.
                return False
        return True

    def _text(self, node: Node) -> str:
        known = self._texts.get(id(node.contents))
        if known is None or known[0] is not node.contents:
            text = compact_json(_without_annotations(node.contents), sort_keys=True)
            known = self._texts[id(node.contents)] = (node.contents, text)
        return known[1]


_ANYTHING: dict[str, Any] = {}
_TYPE_GROUPS = ("null", "boolean", "object", "array", "string", "number")
_TYPE_NAMES = {"int": "integers", "whole": "integers such as 1.0", "fraction": "fractions"}
_SIZED = {"Length": "string", "Items": "array", "Properties": "object"}
_EMPTY_DEPTH_MAX = 20
_CHANGES_REFERENCES = ("$id", "id", "$recursiveRef", "$dynamicRef")
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly"),
        *("writeOnly", "$schema", "$id", "id", "$defs", "definitions"),
    }
)
"""Keywords that say nothing about values, at the top of a schema."""


def _without_annotations(contents: Contents) -> Contents:
    if not isinstance(contents, Mapping):
        return contents
    return {name: value for name, value in contents.items() if name not in _ANNOTATIONS}


def _references(contents: Any) -> list[str] | None:
    """All references within a schema, wherever they are; None if what they mean depends on more
    than the URI of the schema."""
    references = []
    left = [_without_annotations(contents)]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            if any(isinstance(value.get(keyword), str) for keyword in _CHANGES_REFERENCES):
                return None
            if isinstance(value.get("$ref"), str):
                references.append(value["$ref"])
            left += value.values()
        elif isinstance(value, list):
            left += value
    return references


def _identity(node: Node) -> tuple[int, int]:
    return id(node.contents), node.draft.number


def _has_alternatives(view: View) -> bool:
    return bool(view.any_of or view.one_of or view.condition or view.negated is not None)


def _crossed(lower: Bound | None, upper: Bound | None) -> bool:
    if lower is None or upper is None:
        return False
    return lower[0] > upper[0] or (lower[0] == upper[0] and (lower[1] or upper[1]))


def _found(kind: str, path: str, message: str) -> Incompatibility:
    return Incompatibility(kind, path, message)


def _unjudged(keyword: str, path: str, why: str) -> Incompatibility:
    told = f"the keyword {keyword} cannot be judged here: {why}"
    return Incompatibility("cannot_be_judged", f"{path}/{keyword}", told)


def _bound(word: str, bound: Bound) -> str:
    number, excluded = bound
    return f"{word} {_shown(number)}" if excluded else f"{_shown(number)}, or {word}"


def _shown(number: Fraction) -> str:
    return f"{number.numerator:,}" if number.denominator == 1 else f"{float(number):g}"


def _snake(keyword: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in keyword)

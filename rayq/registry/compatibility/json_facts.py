"""JSON Schemas that a value satisfies all at once, taken together."""

from __future__ import annotations

from typing import Any, TypeAlias

from rayq.registry.compatibility.json_views import ALL_TYPES, Bound, View, matches
from rayq.registry.formats.json_schema import Contents, Node

VALUES_MAX = 10_000
"""Values of an `enum` that are looked at one by one."""

Nodes: TypeAlias = tuple[Node, ...]
"""Schemas that a value satisfies all at once."""


class Synthetic:
    """Schemas that nobody wrote, which a proof makes. Each is made once: the proof knows a schema
    again by its identity."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Contents] = {}
        self._kept: list[Any] = []

    def node(self, owner: Node, keyword: str, value: Any, key: object) -> Node:
        """A schema of one keyword, whose references are those of its owner."""
        made = self._made.setdefault((id(owner.contents), keyword, key), {keyword: value})
        self._kept.append(owner.contents)  # else its identity could become that of another
        return Node(made, owner.resolver, owner.draft)

    def any_other_property(self, view: View) -> Node:
        additional = {} if view.additional is None else view.additional
        alternatives = [additional, *view.pattern_properties.values()]
        return self.node(view.node, "anyOf", alternatives, "other properties")


class Facts:
    """All that is known of a value that satisfies some schemas at once: their keywords, and those
    of all that they refer to or consist of."""

    def __init__(self, nodes: Nodes, views: list[View], synthetic: Synthetic) -> None:
        self.nodes = nodes
        self.views = views
        self._synthetic = synthetic
        self.types = frozenset.intersection(*(view.types for view in views), ALL_TYPES)
        self.required = frozenset().union(*(view.required for view in views))

    @property
    def never(self) -> bool:
        """True if there is obviously no such value."""
        return not self.types or any(view.always is False for view in self.views)

    def values(self) -> list[Any] | None:
        """All values there can be, where they can be listed; each may still be invalid."""
        listed = [view.values for view in self.views if view.values is not None]
        if listed:
            fewest = min(listed, key=len)
            return fewest if len(fewest) <= VALUES_MAX else None
        if self.types <= {"null", "boolean"}:
            return [None, True, False]
        return None

    def accept(self, value: Any) -> bool:
        """True if the schemas accept a value, or nobody can tell."""
        return all(node.accepts(value) is not False for node in self.nodes)

    def minimum(self) -> Bound | None:
        return max((view.minimum for view in self.views if view.minimum), default=None)

    def maximum(self) -> Bound | None:
        bounds = [view.maximum for view in self.views if view.maximum]
        return min(bounds, key=lambda bound: (bound[0], not bound[1]), default=None)

    def at_least(self, keyword: str) -> int:
        sizes = [view.sizes[keyword] for view in self.views if keyword in view.sizes]
        if keyword == "minProperties":
            sizes.append(len(self.required))
        return max(sizes, default=0)

    def at_most(self, keyword: str) -> int | None:
        sizes = [view.sizes[keyword] for view in self.views if keyword in view.sizes]
        if keyword == "maxItems":
            sizes += [len(view.prefix_items) for view in self.views if view.items is False]
        if keyword == "maxProperties":
            sizes += [
                len(view.properties)
                for view in self.views
                if view.additional is False and not view.pattern_properties
            ]
        return min(sizes, default=None)

    def item(self, index: int | None) -> Nodes:
        """All that is known of an item; None is one behind all that have schemas of their own."""
        nodes = []
        for view in self.views:
            if index is not None and index < len(view.prefix_items):
                nodes.append(view.node.sub(view.prefix_items[index]))
            elif view.items is not None:
                nodes.append(view.node.sub(view.items))
        return tuple(nodes)

    def property(self, name: str) -> Nodes:
        """All that is known of a property, if it is there."""
        nodes = []
        for view in self.views:
            found = [view.properties[name]] if name in view.properties else []
            matched = {pattern: matches(pattern, name) for pattern in view.pattern_properties}
            found += [view.pattern_properties[p] for p, matching in matched.items() if matching]
            if not found and None not in matched.values() and view.additional is not None:
                found = [view.additional]
            nodes += [view.node.sub(contents) for contents in found]
        return tuple(nodes)

    def other_property(self, pattern: str | None = None) -> Nodes:
        """All that is known of a property that no schema names; it may match any pattern, and
        matches the one that is given."""
        nodes = []
        for view in self.views:
            if pattern is not None and pattern in view.pattern_properties:
                nodes.append(view.node.sub(view.pattern_properties[pattern]))
            elif view.pattern_properties:
                nodes.append(self._synthetic.any_other_property(view))
            elif view.additional is not None:
                nodes.append(view.node.sub(view.additional))
        return tuple(nodes)

"""The ACLs of a cluster, and what they decide, by Kafka's rules (KIP-11, KIP-290).

A deny wins over each allow. Without an allow the answer is no: there is no "open until the first
ACL", so that removing somebody's ACL never opens a resource. Read, write, delete and alter imply
describe, and alter_configs implies describe_configs; a deny denies only its own operation.

Each principal may describe and alter itself without a rule, so that it can rotate its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rayq.messages.acls import ANY, Acl, AclFilter, Operation, ResourceType

IMPLIED_BY: dict[Operation, tuple[Operation, ...]] = {
    "describe": ("read", "write", "delete", "alter"),
    "describe_configs": ("alter_configs",),
}
"""The operations that imply an operation when they are allowed."""
OF_ITSELF: tuple[Operation, ...] = ("describe", "alter")
"""The operations that a principal may do on itself."""


class AclVerdict(NamedTuple):
    """A decision: is the operation allowed, and by which rule."""

    is_allowed: bool
    acl: Acl | None
    """None: there is no rule, and a principal may do nothing but look at itself and alter itself.
    """


class AclTable:
    """The ACLs of a cluster, found by principal, resource and name.

    The cost of a decision is that of the rules which match the name: literal names are looked up,
    and of prefixes each length that occurs.
    """

    def __init__(self, acls: Iterable[Acl] = ()) -> None:
        self._acls: dict[Acl, None] = {}
        self._literal: dict[tuple[str, ResourceType, str], dict[Acl, None]] = {}
        self._prefixed: dict[tuple[str, ResourceType], dict[int, dict[str, dict[Acl, None]]]] = {}
        """Rules by the length of their prefix, then by the prefix."""
        for acl in acls:
            self.add(acl)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AclTable) and self._acls == other._acls

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"AclTable({list(self)})"

    def __len__(self) -> int:
        return len(self._acls)

    def __iter__(self) -> Iterator[Acl]:
        return iter(self._acls)

    def __contains__(self, acl: object) -> bool:
        return acl in self._acls

    def add(self, acl: Acl) -> None:
        """Adds a rule. The same rule again changes nothing."""
        if acl not in self._acls:
            self._acls[acl] = None
            self._place_of(acl)[acl] = None

    def remove(self, acl: Acl) -> None:
        """Removes a rule, if it is there."""
        if acl not in self._acls:
            return
        del self._acls[acl]
        place = self._place_of(acl)
        del place[acl]
        if place:
            return
        if acl.pattern == "literal":
            del self._literal[acl.principal, acl.resource_type, acl.name]
            return
        lengths = self._prefixed[acl.principal, acl.resource_type]
        del lengths[len(acl.name)][acl.name]
        if not lengths[len(acl.name)]:
            del lengths[len(acl.name)]

    def _place_of(self, acl: Acl) -> dict[Acl, None]:
        if acl.pattern == "literal":
            return self._literal.setdefault((acl.principal, acl.resource_type, acl.name), {})
        lengths = self._prefixed.setdefault((acl.principal, acl.resource_type), {})
        return lengths.setdefault(len(acl.name), {}).setdefault(acl.name, {})

    def decide(
        self,
        principal: str,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        host: str,
    ) -> AclVerdict:
        """Returns whether the named principal may do the operation, and the rule that says so: the
        first deny, or else the first allow."""
        allowing = (operation, "all", *IMPLIED_BY.get(operation, ()))
        allow: Acl | None = None
        for acl in self._matching(principal, resource_type, name):
            if acl.host not in (ANY, host):
                continue
            if acl.permission == "deny":
                if acl.operation in (operation, "all"):
                    return AclVerdict(False, acl)
            elif allow is None and acl.operation in allowing:
                allow = acl
        is_itself = resource_type == "principal" and name == principal and operation in OF_ITSELF
        return AclVerdict(allow is not None or is_itself, allow)

    def _matching(self, principal: str, resource_type: ResourceType, name: str) -> Iterator[Acl]:
        for who in (principal, ANY):
            for literal in (name, ANY):
                yield from self._literal.get((who, resource_type, literal), ())
            for length, prefixes in self._prefixed.get((who, resource_type), {}).items():
                if length <= len(name):
                    yield from prefixes.get(name[:length], ())


def passes(acl: Acl, wanted: AclFilter) -> bool:
    """Returns whether a rule is one of those that a filter looks for (KIP-290)."""
    if (
        wanted.principal not in (None, acl.principal)
        or wanted.permission not in (None, acl.permission)
        or wanted.operation not in (None, acl.operation)
        or wanted.resource_type not in (None, acl.resource_type)
        or wanted.host not in (None, acl.host)
    ):
        return False
    if wanted.pattern == "match":
        return wanted.name is None or _matches(acl, wanted.name)
    return wanted.name in (None, acl.name) and wanted.pattern in (None, acl.pattern)


def _matches(acl: Acl, name: str) -> bool:
    if acl.pattern == "prefixed":
        return name.startswith(acl.name)
    return acl.name in (name, ANY)

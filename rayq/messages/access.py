"""Access control: the words of an ACL, in Kafka's terms.

A principal may do what an ACL allows it and no other ACL denies. See `rayq.core.access.acls`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from rayq.messages.base import Name

Operation = Literal[
    "all",
    "read",
    "write",
    "create",
    "delete",
    "alter",
    "describe",
    "alter_configs",
    "describe_configs",
]
ResourceType = Literal[
    "cluster", "topic", "group", "queue", "transactional_id", "subject", "principal", "link"
]
PatternType = Literal["literal", "prefixed"]
PermissionType = Literal["allow", "deny"]

ANY = "*"
"""As the principal of an ACL: each named principal. As its literal resource: each of that type. As
its host: each host."""
CLUSTER = "cluster"
"""Name of the only resource of the type `cluster`."""
SUPERUSER = "superuser"
"""Principal that may do everything: whoever holds the cluster's own client key."""

PRINCIPAL_NAME = r"[A-Za-z0-9._@:/+-]+"
"""Pattern of a principal's name: also an email address, or the URI of a workload's certificate."""
PrincipalName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=249, pattern=f"^{PRINCIPAL_NAME}$")
]


class Acl(msgspec.Struct, array_like=True, frozen=True):
    """One rule (Kafka's AclBinding): whether a principal may do an operation on the resources that
    the pattern matches, from a host."""

    principal: Name
    permission: PermissionType
    operation: Operation
    resource_type: ResourceType
    name: Name
    """Name of the resource, or with `prefixed` the beginning of names."""
    pattern: PatternType = "literal"
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = ANY
    """Address of the client, as the server sees it."""

    def __str__(self) -> str:
        resource = f"{self.resource_type} {self.name!r}"
        if self.pattern == "prefixed":
            resource = f"each {self.resource_type} that begins with {self.name!r}"
        elif self.name == ANY:
            resource = f"each {self.resource_type}"
        host = "" if self.host == ANY else f" from {self.host}"
        return f"{self.permission} {self.principal!r} {self.operation} on {resource}{host}"

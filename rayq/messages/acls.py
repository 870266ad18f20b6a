"""The words of access control and quotas, in Kafka's terms.

A principal may do what an ACL allows it and no other ACL denies. See `rayq.core.access.acls`.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=249)]
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

QuotaName = Literal[
    "producer_byte_rate",
    "consumer_byte_rate",
    "request_percentage",
    "controller_mutation_rate",
    "connection_creation_rate",
    "take_rate",
    "max_connections",
    "max_topics",
    "max_partitions",
]
"""Names of the quotas, Kafka's where it has one. Rates are per second, in the whole cluster: bytes
of produce requests and of fetch answers, created and deleted partitions, records taken from queues.
`request_percentage`, the share of a server process's time, holds for each process, and so do
`connection_creation_rate` and `max_connections`, since each client needs a connection to each
process. `max_topics` and `max_partitions` count what the principal has created."""

ANY = "*"
"""Wildcard of an ACL: each named principal, each resource of a type (as a literal name), or each
host."""
CLUSTER = "cluster"
"""Name of the only resource of the type `cluster`."""
SUPERUSER = "superuser"
"""Principal that may do everything: whoever holds the cluster's own client key."""

PRINCIPAL_NAME = r"[A-Za-z0-9._@:/+-]+"
"""Pattern of a principal's name: also an email address, or the URI of a workload's certificate."""
PRINCIPAL_NAME_LENGTH_MAX = 249
PrincipalName = Annotated[
    str,
    msgspec.Meta(
        min_length=1, max_length=PRINCIPAL_NAME_LENGTH_MAX, pattern=f"^{PRINCIPAL_NAME}$"
    ),
]


class Acl(msgspec.Struct, array_like=True, frozen=True):
    """A rule (Kafka's AclBinding): a principal may do an operation on the resources that the
    pattern matches, from a host, or may not."""

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


class AclFilter(msgspec.Struct, array_like=True, frozen=True):
    """A filter of ACLs (Kafka's AclBindingFilter). A field that is None passes every value."""

    principal: Name | None = None
    permission: PermissionType | None = None
    operation: Operation | None = None
    resource_type: ResourceType | None = None
    name: Name | None = None
    pattern: Literal["literal", "prefixed", "match"] | None = None
    """`match`: each pattern that matches the resource called `name`."""
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None


class Right(NamedTuple):
    """An operation on a resource that the sender of a request must be allowed."""

    operation: Operation
    resource_type: ResourceType
    field: str = ""
    """Field of the request that names the resource: by its name, or a topic or queue by its id.
    Empty for the cluster."""


Rights = tuple[Right, ...] | None
"""The rights that a class of requests declares. None: no client sends it."""

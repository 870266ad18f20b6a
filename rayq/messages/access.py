"""Principals, their tokens and ACLs: the words of access control in Kafka's terms, and the requests
that change and list it.

A principal may do what an ACL allows it and no other ACL denies. See `rayq.core.access.acls`. A
token never crosses the wire: whoever creates one draws it, and sends what proofs are checked with.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from rayq.messages.any_broker import Change
from rayq.messages.base import CheckedInt, CheckedName, Id, Name

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
"""Wildcard of an ACL: each named principal, each resource of a type (as a literal name), or each
host."""
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


ACLS_AT_ONCE_MAX = 1_000
"""Maximum number of ACLs that one request adds or removes."""

Salt = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
TokenId = Id
Sha256 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Sha512 = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class TokenVerifiers(msgspec.Struct, array_like=True, frozen=True):
    """Keys with which servers check the proof of a token (`rayq.wire.scram.Verifier`), for
    SCRAM-SHA-256 and SCRAM-SHA-512."""

    stored_key_sha256: Sha256
    server_key_sha256: Sha256
    stored_key_sha512: Sha512
    server_key_sha512: Sha512


class CreatePrincipal(Change, frozen=True):
    """Creates a principal, which may do nothing yet. Raises PrincipalExistsError,
    PrincipalLimitError, InvalidRequestError."""

    api: ClassVar[int] = 140
    name: CheckedName
    salt: Salt
    """Salt of all tokens of this principal."""


class DeletePrincipal(Change, frozen=True):
    """Deletes a principal with its tokens and its ACLs, so that a later principal of that name
    inherits nothing. Raises UnknownPrincipalError."""

    api: ClassVar[int] = 141
    name: CheckedName


class CreateToken(Change, frozen=True):
    """Adds a token to a principal; its other tokens stay valid. Raises UnknownPrincipalError,
    PrincipalLimitError, and InvalidRequestError for an expiry in the past."""

    api: ClassVar[int] = 142
    principal: CheckedName
    token_id: TokenId
    verifiers: TokenVerifiers
    expires_ms: CheckedInt | None = None
    """Time by the wall clock from which on the token is refused. None: it does not expire."""


class RevokeToken(Change, frozen=True):
    """Removes a token. Raises UnknownPrincipalError, UnknownTokenError."""

    api: ClassVar[int] = 143
    principal: CheckedName
    token_id: TokenId


AclList = Annotated[list[Acl], msgspec.Meta(min_length=1, max_length=ACLS_AT_ONCE_MAX)]


class CreateAcls(Change, frozen=True):
    """Adds ACLs: all of them, or none. Those that exist stay. Raises UnknownPrincipalError,
    PrincipalLimitError, InvalidRequestError."""

    api: ClassVar[int] = 144
    acls: AclList


class DeleteAcls(Change, frozen=True):
    """Removes exactly these ACLs. Those that do not exist are passed over."""

    api: ClassVar[int] = 145
    acls: AclList

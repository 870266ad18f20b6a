"""Requests about principals, their tokens and ACLs.

A token never crosses the wire: the client that creates it draws it, and sends only its verifiers,
by which proofs are checked. Each principal may describe and alter itself, so it may rotate its own
tokens.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from rayq.messages.acls import ANY, Acl, AclFilter, Operation, ResourceType, Right, Rights
from rayq.messages.any_broker import Change, ChangeResponse
from rayq.messages.base import (
    Answerer,
    CheckedInt,
    CheckedName,
    Counter,
    HostName,
    Id,
    Milliseconds,
    Name,
    Response,
    ToBroker,
    ToController,
)

ACLS_AT_ONCE_MAX = 1_000
"""Maximum number of ACLs that one request adds or removes."""
PRINCIPALS_PAGE = 1_000
"""Maximum number of principals in an answer."""
ACLS_PAGE = 5_000
"""Maximum number of ACLs in an answer."""

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
    rights: ClassVar[Rights] = (Right("create", "principal", "name"),)
    name: CheckedName
    salt: Salt
    """Salt of all tokens of this principal."""


class DeletePrincipal(Change, frozen=True):
    """Deletes a principal with its tokens, ACLs and quotas, so that a later principal of that name
    inherits nothing. Raises UnknownPrincipalError."""

    api: ClassVar[int] = 141
    rights: ClassVar[Rights] = (Right("delete", "principal", "name"),)
    name: CheckedName


class CreateToken(Change, frozen=True):
    """Adds a token to a principal. Raises UnknownPrincipalError, PrincipalLimitError, and
    InvalidRequestError for an expiry in the past."""

    api: ClassVar[int] = 142
    rights: ClassVar[Rights] = (Right("alter", "principal", "principal"),)
    principal: CheckedName
    token_id: TokenId
    verifiers: TokenVerifiers
    expires_ms: CheckedInt | None = None
    """Time by the wall clock from which on the token is refused. None: it does not expire."""
    others_expire_ms: CheckedInt | None = None
    """Time from which on the principal's other tokens are refused, unless they expire sooner: a
    rotation. None: they stay as they are."""


class RevokeToken(Change, frozen=True):
    """Removes a token. Raises UnknownPrincipalError, UnknownTokenError."""

    api: ClassVar[int] = 143
    rights: ClassVar[Rights] = (Right("alter", "principal", "principal"),)
    principal: CheckedName
    token_id: TokenId


AclList = Annotated[list[Acl], msgspec.Meta(min_length=1, max_length=ACLS_AT_ONCE_MAX)]


class CreateAcls(Change, frozen=True):
    """Adds ACLs: all of them, or none. Those that exist stay. Raises UnknownPrincipalError,
    PrincipalLimitError, InvalidRequestError."""

    api: ClassVar[int] = 144
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    acls: AclList


class DeleteAcls(Change, frozen=True):
    """Removes exactly these ACLs. Those that do not exist are passed over."""

    api: ClassVar[int] = 145
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    acls: AclList


# --- questions ------------------------------------------------------------------------------------
# Each broker answers by its metadata. It waits up to `wait_ms` for those of at least `version_min`.


class TokenMetadata(msgspec.Struct, array_like=True, frozen=True):
    """A token, without its verifiers."""

    token_id: str
    created_ms: int
    expires_ms: int | None


class PrincipalMetadata(msgspec.Struct, array_like=True, frozen=True):
    name: str
    salt: bytes
    """Salt of its tokens. It is not secret: anybody who begins a handshake gets it."""
    created_ms: int
    tokens: list[TokenMetadata]
    """The oldest first; also those that have expired."""


class DescribePrincipalsResponse(Response, frozen=True):
    version: int
    """Metadata version, as that of `MetadataResponse`."""
    principals: list[PrincipalMetadata]
    """Sorted by name."""
    next_after: str | None = None
    """Not None if one answer does not hold all: ask again with this as `after`."""


class DescribePrincipals(ToBroker[DescribePrincipalsResponse], frozen=True):
    """The principals that the sender may describe."""

    api: ClassVar[int] = 146
    rights: ClassVar[Rights] = ()
    ends_with_connection: ClassVar[bool] = True
    names: (
        Annotated[list[CheckedName], msgspec.Meta(max_length=PRINCIPALS_PAGE)] | None
    ) = None
    """None: all of them. A name that does not exist is missing in the answer."""
    version_min: Counter = 0
    wait_ms: Milliseconds = 0
    after: CheckedName = ""
    """Only principals with names after this one."""


class DescribeAclsResponse(Response, frozen=True):
    version: int
    """Metadata version, as that of `MetadataResponse`."""
    acls: list[Acl]
    """Sorted by their fields."""
    next_after: Acl | None = None
    """Not None if one answer does not hold all: ask again with this as `after`."""


class DescribeAcls(ToBroker[DescribeAclsResponse], frozen=True):
    """The ACLs that pass a filter, of the principals that the sender may describe."""

    api: ClassVar[int] = 147
    rights: ClassVar[Rights] = ()
    ends_with_connection: ClassVar[bool] = True
    filter: AclFilter
    version_min: Counter = 0
    wait_ms: Milliseconds = 0
    after: Acl | None = None
    """Only ACLs that are sorted after this one."""


class CheckAclResponse(Response, frozen=True):
    version: int
    """Metadata version, as that of `MetadataResponse`."""
    is_allowed: bool
    acl: Acl | None
    """The rule that decides. None: there is none. Then only the superuser may do it, or a principal
    describe and alter itself."""


class CheckAcl(ToBroker[CheckAclResponse], frozen=True):
    """Asks whether a principal may do an operation, and by which rule. Raises
    UnknownPrincipalError, InvalidRequestError."""

    api: ClassVar[int] = 148
    rights: ClassVar[Rights] = (Right("describe", "principal", "principal"),)
    ends_with_connection: ClassVar[bool] = True
    principal: CheckedName
    operation: Operation
    resource_type: ResourceType
    name: CheckedName
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = ANY
    """Address of the client. ANY: only rules for each host apply."""
    version_min: Counter = 0
    wait_ms: Milliseconds = 0


# --- between servers ------------------------------------------------------------------------------


class AccessNews(msgspec.Struct, array_like=True, frozen=True):
    """Tells the processes of a broker's node of principals, tokens and ACLs."""

    digest: bytes
    """Digest of all of them. Empty: there are none."""
    known_for_ms: int
    """The time for which the broker may go by what it knows. 0: it cannot know who may do what."""
    records: bytes | None = None
    """All of them, as records of the metadata. None: the process knows those of this digest."""


AccessDigest = Annotated[bytes, msgspec.Meta(max_length=64)]

FORWARDED_BYTES_MAX = 4 * 1024**2


class Forward(ToController[ChangeResponse], frozen=True):
    """A broker forwards a request with the client that sent it. The controller checks a principal's
    rights again, as the broker may know less, and the metadata log names who made a change. The
    handler of the forwarded request answers. (In a cluster without principals requests are
    forwarded as they are.)"""

    api: ClassVar[int] = 160
    answered_by: ClassVar[tuple[Answerer, ...]] = ()
    by: Name | None
    """None: a superuser."""
    address: HostName
    """Address of the client, as the broker sees it."""
    client_id: CheckedName
    token_id: Id | None
    """The token that the principal has proven. None: a server acts for it."""
    kind: Counter
    """The `api` of the request."""
    request: Annotated[bytes, msgspec.Meta(max_length=FORWARDED_BYTES_MAX)]
    token_key: Sha256 | None = None
    """Key that proofs of the token are checked with: a later token may have the same id."""

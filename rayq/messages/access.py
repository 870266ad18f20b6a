"""Requests that change principals, their tokens and ACLs.

A token never crosses the wire: whoever creates one draws it, and sends what proofs are checked
with.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from rayq.messages.acls import Acl
from rayq.messages.any_broker import Change
from rayq.messages.base import CheckedInt, CheckedName, Id

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

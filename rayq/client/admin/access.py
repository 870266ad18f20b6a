"""Administration of principals, their tokens and ACLs.

Each answer has all that was committed before it was asked for, by any client and through any
broker: an operator who has just taken a right away wants to see that it is gone. A change returns
once the brokers know it; the processes of replicas hear of it from them a moment later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from rayq.client.admin.base import ADMIN_TIMEOUT_S, WAIT_MS, AdminMethods, Call
from rayq.client.arguments import shown
from rayq.client.client import Client
from rayq.client.timeouts import TIMEOUT_S_MAX, takes_timeout
from rayq.core.access.acls import AclVerdict
from rayq.core.cluster.access_changes import unknown_principal
from rayq.errors import InvalidRequestError, RayqError
from rayq.messages import (
    ACLS_AT_ONCE_MAX,
    Change,
    CheckAcl,
    CreateAcls,
    CreatePrincipal,
    CreateToken,
    DeleteAcls,
    DeletePrincipal,
    DescribeAcls,
    DescribePrincipals,
    Metadata,
    MetadataResponse,
    PrincipalMetadata,
    RevokeToken,
)
from rayq.messages.acls import (
    ANY,
    CLUSTER,
    Acl,
    AclFilter,
    Operation,
    PermissionType,
    ResourceType,
)
from rayq.records import PrincipalInfo, TokenInfo
from rayq.wire.authentication import HasSecret
from rayq.wire.paging import check_advances
from rayq.wire.scram import SALT_BYTES
from rayq.wire.tokens import draw_token, verifiers_of

StructT = TypeVar("StructT", Acl, AclFilter)

OVERLAP_S = 86_400.0
"""Default of the time for which the tokens before a rotation stay valid."""
TOKEN_ID_BYTES = 6


class NewToken(HasSecret, frozen=True):
    """A token that was just created. `token` is a password, which nobody can look up later; the
    repr hides it."""

    principal: str
    token_id: str
    token: str
    expires_ms: int | None
    """Unix time from which on it is refused. None: it does not expire."""


class AccessAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about principals, their tokens and ACLs."""

    # --- principals -----------------------------------------------------------------------------

    @takes_timeout
    async def create_principal(
        self, principal: str, *, exist_ok: bool = False, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Creates a principal: a name for a program or a person, of 1 to 249 letters, digits and
        characters of `._@:/+-`. It may do nothing yet, and nobody can log in as it: `create_acls`
        and `create_token` are next. With `exist_ok` one that exists is left as it is. Raises
        PrincipalExistsError, PrincipalLimitError, InvalidRequestError, AuthorizationError."""
        call = Call(self._client, timeout_s)
        if exist_ok and await _find(call, principal_name(principal)) is not None:
            return
        salt = self._client.environment.token_bytes(SALT_BYTES)
        await _change(call, CreatePrincipal(principal_name(principal), salt))

    @takes_timeout
    async def delete_principal(
        self, principal: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Deletes a principal with its tokens and its ACLs; its connections end. What it wrote
        stays. Raises UnknownPrincipalError, InvalidRequestError (for `superuser`),
        AuthorizationError."""
        await _change(Call(self._client, timeout_s), DeletePrincipal(principal_name(principal)))

    @takes_timeout
    async def list_principals(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[str]:
        """The names of the principals that one may describe, sorted. `superuser`, which holds the
        cluster's own token, is not among them."""
        found = await _describe(Call(self._client, timeout_s), None)
        return [principal.name for principal in found]

    @takes_timeout
    async def describe_principal(
        self, principal: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> PrincipalInfo:
        """Describes a principal and its tokens. A principal may always describe itself. Raises
        UnknownPrincipalError, AuthorizationError."""
        call = Call(self._client, timeout_s)
        return _info(await get_principal(call, principal_name(principal)))

    @takes_timeout
    async def describe_principals(
        self, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[PrincipalInfo]:
        """Describes the principals that one may describe, each as `describe_principal` does."""
        found = await _describe(Call(self._client, timeout_s), None)
        return [_info(principal) for principal in found]

    # --- tokens ---------------------------------------------------------------------------------

    @takes_timeout
    async def create_token(
        self,
        principal: str,
        *,
        expires_in_s: float | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> NewToken:
        """Draws a token with which programs log in as a principal, and returns it. Only keys to
        check it leave this process, so nobody can look it up later. The principal's other tokens
        stay valid; it may have 8.

        The token is refused from `expires_in_s` seconds on, by the servers' clocks; None: it does
        not expire. A principal may always create tokens for itself, unless an ACL denies it `alter`
        on itself. Raises UnknownPrincipalError, PrincipalLimitError, InvalidRequestError,
        AuthorizationError.
        """
        call = Call(self._client, timeout_s)
        found = await get_principal(call, principal_name(principal))
        return await self._add_token(call, found, expires_in_s, None)

    @takes_timeout
    async def rotate_token(
        self,
        principal: str,
        *,
        overlap_s: float = OVERLAP_S,
        expires_in_s: float | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> NewToken:
        """Draws a token as `create_token` does, and has the principal's other tokens expire after
        `overlap_s` seconds (default: a day), in one step. Tokens that expire sooner stay as they
        are; 0 ends all others, and their connections, at once.

        The token is refused from `expires_in_s` seconds on; None: it lasts as long as the newest
        one was to last from its creation on; `math.inf`: it does not expire. Raises as
        `create_token` does.
        """
        call = Call(self._client, timeout_s)
        found = await get_principal(call, principal_name(principal))
        if expires_in_s is None and found.tokens:
            newest = found.tokens[-1]
            if newest.expires_ms is not None:
                expires_in_s = (newest.expires_ms - newest.created_ms) / 1000
        return await self._add_token(call, found, expires_in_s, _seconds("overlap_s", overlap_s))

    @takes_timeout
    async def revoke_token(
        self, principal: str, token_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Removes a token, by its id as `list_tokens` has it. It is refused from now on, and the
        connections that were opened with it end within a second. Raises UnknownPrincipalError,
        UnknownTokenError, AuthorizationError."""
        if not isinstance(token_id, str):
            raise TypeError(f"A token id must be a str, not {shown(token_id)}.")
        request = RevokeToken(principal_name(principal), token_id)
        await _change(Call(self._client, timeout_s), request)

    @takes_timeout
    async def revoke_tokens(
        self, principal: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[str]:
        """Removes all tokens of a principal in one step, and returns the ids of those that it had:
        whoever has stolen one cannot create another meanwhile. Raises as `create_token` does."""
        call = Call(self._client, timeout_s)
        found = await get_principal(call, principal_name(principal))
        if not found.tokens:
            return []
        # Nobody ever sees this token, which ends the others.
        last = await self._add_token(call, found, None, 0.0)
        await _change(call, RevokeToken(found.name, last.token_id))
        return [token.token_id for token in found.tokens]

    @takes_timeout
    async def list_tokens(
        self, principal: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[TokenInfo]:
        """The tokens of a principal, without their secret parts, the oldest first; also those that
        have expired, until the next one is created. Raises as `describe_principal` does."""
        call = Call(self._client, timeout_s)
        return _info(await get_principal(call, principal_name(principal))).tokens

    async def _add_token(
        self,
        call: Call,
        principal: PrincipalMetadata,
        expires_in_s: float | None,
        overlap_s: float | None,
    ) -> NewToken:
        environment = self._client.environment
        now_ms = environment.clock.wall_ms()
        expires_ms = None
        if expires_in_s is not None and expires_in_s != math.inf:
            expires_ms = now_ms + int(_seconds("expires_in_s", expires_in_s) * 1000)
        token = draw_token(principal.name, environment.token_bytes)
        request = CreateToken(
            principal=principal.name,
            token_id=environment.token_bytes(TOKEN_ID_BYTES).hex(),
            verifiers=verifiers_of(token, principal.salt),
            expires_ms=expires_ms,
            others_expire_ms=_others_expire_ms(overlap_s, now_ms),
        )
        await _change(call, request)
        return NewToken(principal.name, request.token_id, token.text, expires_ms)

    # --- ACLs -----------------------------------------------------------------------------------

    @takes_timeout
    async def create_acls(
        self, acls: Acl | Iterable[Acl], *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Adds ACLs; those that exist stay. They hold on every server within a second. Up to 1,000
        are added together or not at all, more of them in steps of 1,000. Raises
        UnknownPrincipalError, PrincipalLimitError, InvalidRequestError, AuthorizationError."""
        await _change_acls(Call(self._client, timeout_s), CreateAcls, _acls(acls))

    @takes_timeout
    async def delete_acls(
        self, acls: Acl | Iterable[Acl], *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Removes exactly these ACLs, such as those that `list_acls` has found; what does not exist
        is passed over. Without any ACL a principal may do nothing. Raises as `create_acls` does."""
        await _change_acls(Call(self._client, timeout_s), DeleteAcls, _acls(acls))

    @takes_timeout
    async def list_acls(
        self,
        *,
        principal: str | None = None,
        permission: PermissionType | None = None,
        operation: Operation | None = None,
        resource_type: ResourceType | None = None,
        name: str | None = None,
        pattern: str | None = None,
        host: str | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> list[Acl]:
        """The ACLs that have all the given values, of the principals that one may describe; sorted.
        With `pattern="match"` those that match the resource called `name`: by that name, by "*" or
        by a prefix. Otherwise `pattern` is "literal" or "prefixed". Raises InvalidRequestError, and
        AuthorizationError for a `principal` that one may not describe."""
        wanted = _checked(
            AclFilter,
            {
                "principal": principal,
                "permission": permission,
                "operation": operation,
                "resource_type": resource_type,
                "name": name,
                "pattern": pattern,
                "host": host,
            },
            "filter of ACLs",
        )
        return await _list_acls(Call(self._client, timeout_s), wanted)

    @takes_timeout
    async def check_acl(
        self,
        principal: str,
        operation: Operation,
        resource_type: ResourceType,
        name: str = CLUSTER,
        *,
        host: str = ANY,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> AclVerdict:
        """Returns whether the ACLs let a principal do an operation on a resource (which need not
        exist), and the ACL that decides: the first that denies it, else the first that allows it.
        Rules for single hosts apply where `host` is such an address. Raises UnknownPrincipalError,
        InvalidRequestError, AuthorizationError."""
        call = Call(self._client, timeout_s)
        if not isinstance(host, str) or not host:
            raise InvalidRequestError(f"host must be an address, or {ANY!r}, not {shown(host)}.")
        acl = _acls(Acl(principal_name(principal), "allow", operation, resource_type, name))[0]
        await call.confirm_metadata()
        answer = await call.ask_metadata(
            CheckAcl(
                acl.principal,
                acl.operation,
                acl.resource_type,
                acl.name,
                host,
                self._client.metadata.oldest_acceptable,
                WAIT_MS,
            )
        )
        return AclVerdict(answer.is_allowed, answer.acl)


# --- asking ---------------------------------------------------------------------------------------


async def _change(call: Call, request: Change) -> None:
    """Makes a change, and waits until each broker that answers knows it: a new token works with
    the next connection, and a revoked one does not."""
    client = call.client
    await client.change(request, timeout_s=call.left_s)
    version = client.metadata.oldest_acceptable
    question = Metadata([], version, WAIT_MS)
    answer: MetadataResponse = await client.ask_any(
        question, timeout_s=call.left_s, accept=lambda answer: answer.version >= version
    )
    brokers = [(broker.host, broker.port) for broker in answer.brokers if broker.live]
    timeout_s = min(call.left_s, 2 * WAIT_MS / 1000)
    questions = (client.ask(address, question, timeout_s=timeout_s) for address in brokers)
    for outcome in await asyncio.gather(*questions, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, RayqError):
            raise outcome


async def _change_acls(
    call: Call, kind: type[CreateAcls] | type[DeleteAcls], acls: list[Acl]
) -> None:
    for first in range(0, len(acls), ACLS_AT_ONCE_MAX):
        await _change(call, kind(acls[first : first + ACLS_AT_ONCE_MAX]))


async def get_principal(call: Call, name: str) -> PrincipalMetadata:
    """Finds a principal. Raises UnknownPrincipalError."""
    found = await _find(call, name)
    if found is None:
        raise unknown_principal(name)
    return found


async def _find(call: Call, name: str) -> PrincipalMetadata | None:
    found = await _describe(call, [name])
    return found[0] if found else None


async def _describe(call: Call, names: list[str] | None) -> list[PrincipalMetadata]:
    await call.confirm_metadata()
    return await _describe_known(call, names)


async def principals_known(client: Client, *, timeout_s: float) -> list[PrincipalInfo]:
    """The principals as some broker knows them, also while there is no controller."""
    found = await _describe_known(Call(client, timeout_s), None)
    return [_info(principal) for principal in found]


async def _describe_known(call: Call, names: list[str] | None) -> list[PrincipalMetadata]:
    principals: list[PrincipalMetadata] = []
    after: str | None = ""
    while after is not None:
        version_min = call.client.metadata.oldest_acceptable
        answer = await call.ask_metadata(DescribePrincipals(names, version_min, WAIT_MS, after))
        principals += answer.principals
        check_advances(after, answer.next_after, "the cluster's principals")
        after = answer.next_after
    return principals


async def _list_acls(call: Call, wanted: AclFilter) -> list[Acl]:
    await call.confirm_metadata()
    acls: list[Acl] = []
    after: Acl | None = None
    while True:
        version_min = call.client.metadata.oldest_acceptable
        answer = await call.ask_metadata(DescribeAcls(wanted, version_min, WAIT_MS, after))
        acls += answer.acls
        if answer.next_after is None:
            return acls
        check_advances(_place(after), _place(answer.next_after), "the cluster's ACLs")
        after = answer.next_after


def _place(acl: Acl | None) -> tuple[str, ...]:
    """The place of an ACL among the others."""
    return () if acl is None else msgspec.structs.astuple(acl)


# --- what callers give ----------------------------------------------------------------------------


def principal_name(given: object) -> str:
    """The name of a principal that a caller gives. Raises TypeError."""
    if not isinstance(given, str):
        raise TypeError(f"A principal name must be a str, such as 'billing', not {shown(given)}.")
    return given


def _others_expire_ms(overlap_s: float | None, now_ms: int) -> int | None:
    """The time from which on other tokens are refused. At once: whatever the time is here."""
    if not overlap_s:
        return None if overlap_s is None else 0
    return now_ms + int(overlap_s * 1000)


def _seconds(name: str, given: object) -> float:
    """A duration, at most as long as a timeout may be. Raises TypeError, InvalidRequestError."""
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise TypeError(f"{name} must be a number of seconds, not {shown(given)}.")
    if not given >= 0:  # NaN is neither.
        raise InvalidRequestError(f"{name} must be a number of seconds from 0, not {given!r}.")
    return min(float(given), TIMEOUT_S_MAX)


def _acls(given: object) -> list[Acl]:
    """Raises TypeError, and InvalidRequestError for one that no server would take."""
    listed = [given] if isinstance(given, Acl) else given
    if not isinstance(listed, Iterable) or isinstance(listed, str | bytes):
        raise TypeError(f"ACLs must be a list of rayq.Acl, not {shown(given)}.")
    acls = list(listed)
    for acl in acls:
        if not isinstance(acl, Acl):
            raise TypeError(f"An ACL must be a rayq.Acl, not {shown(acl)}.")
        _checked(Acl, msgspec.structs.asdict(acl), "ACL")
    return acls


def _checked(kind: type[StructT], fields: dict[str, object], what: str) -> StructT:
    """A struct whose fields have the types and values that they may have. Raises
    InvalidRequestError."""
    try:
        return msgspec.convert(list(fields.values()), kind)
    except msgspec.ValidationError as error:
        text = ", ".join(f"{name}={shown(value)}" for name, value in fields.items())
        raise InvalidRequestError(f"Not a valid {what}: {error}. Given: {text}.") from None


def _info(principal: PrincipalMetadata) -> PrincipalInfo:
    return PrincipalInfo(
        principal.name,
        principal.created_ms,
        [TokenInfo(*msgspec.structs.astuple(token)) for token in principal.tokens],
    )

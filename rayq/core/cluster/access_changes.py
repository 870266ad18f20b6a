"""The controller's decisions about principals, tokens and ACLs.

Each decision reads the state and changes nothing. Errors are those of `rayq.errors`.
"""

from __future__ import annotations

import ipaddress
import re

import msgspec

from rayq import messages
from rayq.core.access.rights import check_rights, no_longer_valid
from rayq.core.cluster.facts import ClusterDecision, Facts, changed
from rayq.core.cluster.records import (
    AclCreated,
    AclDeleted,
    MetadataRecord,
    PrincipalCreated,
    PrincipalDeleted,
    TokenCreated,
    TokenRevoked,
)
from rayq.core.cluster.state import ClusterState, Principal
from rayq.core.cluster.topic_changes import INTERNAL_PREFIX
from rayq.errors import (
    InvalidRequestError,
    PrincipalExistsError,
    PrincipalLimitError,
    UnknownPrincipalError,
    UnknownTokenError,
)
from rayq.messages.acls import (
    ANY,
    CLUSTER,
    PRINCIPAL_NAME,
    PRINCIPAL_NAME_LENGTH_MAX,
    SUPERUSER,
    Acl,
    Operation,
    ResourceType,
)

PRINCIPALS_MAX = 10_000
"""Maximum number of principals of a cluster."""
TOKENS_MAX = 8
"""Maximum number of valid tokens of a principal: a proof is tried with each."""
ACLS_MAX = 100_000
"""Maximum number of ACLs of a cluster."""

OPERATIONS: dict[ResourceType, tuple[Operation, ...]] = {
    "cluster": ("create", "alter", "describe", "alter_configs", "describe_configs"),
    "topic": (
        "read", "write", "create", "delete", "alter", "describe", "alter_configs",
        "describe_configs",
    ),
    "group": ("read", "delete", "alter", "describe"),
    "queue": ("read", "create", "delete", "alter", "describe"),
    "transactional_id": ("write", "alter", "describe"),
    "subject": ("read", "write", "delete", "alter", "describe"),
    "principal": ("create", "delete", "alter", "describe"),
    "link": ("create", "delete", "alter", "describe"),
}
"""The operations that each type of resource has, beside `all`."""


def create_principal(
    state: ClusterState, request: messages.CreatePrincipal, facts: Facts
) -> ClusterDecision:
    """Creates a principal. Raises InvalidRequestError for an illegal or reserved name,
    PrincipalExistsError, PrincipalLimitError."""
    name = request.name
    if not re.fullmatch(PRINCIPAL_NAME, name) or len(name) > PRINCIPAL_NAME_LENGTH_MAX:
        raise InvalidRequestError(
            f"{name[:PRINCIPAL_NAME_LENGTH_MAX]!r} is not a legal name of a principal: use 1 to "
            f"{PRINCIPAL_NAME_LENGTH_MAX} letters, digits and characters of '._@:/+-'."
        )
    if name == SUPERUSER:
        raise InvalidRequestError(
            f"{SUPERUSER!r} is the principal of the cluster's own token: choose another name."
        )
    if name in state.principals:
        raise PrincipalExistsError(f"Principal {name!r} exists already.")
    if len(state.principals) >= PRINCIPALS_MAX:
        raise PrincipalLimitError(
            f"The cluster has {PRINCIPALS_MAX} principals, its limit: delete some."
        )
    return changed([PrincipalCreated(name, request.salt, facts.now_ms())])


def delete_principal(
    state: ClusterState, request: messages.DeletePrincipal, facts: Facts
) -> ClusterDecision:
    """Deletes a principal with its tokens, ACLs and quotas. Raises UnknownPrincipalError, and
    InvalidRequestError for the superuser."""
    if request.name == SUPERUSER:
        raise InvalidRequestError(
            f"{SUPERUSER!r} cannot be deleted: nobody could create principals any more."
        )
    find_principal(state, request.name)
    return changed([PrincipalDeleted(request.name)])


def create_token(
    state: ClusterState, request: messages.CreateToken, facts: Facts
) -> ClusterDecision:
    """Adds a token, forgets those of this principal that have expired, and has the others expire
    where the request says so. Raises UnknownPrincipalError, PrincipalLimitError,
    InvalidRequestError."""
    name, now_ms = request.principal, facts.now_ms()
    principal = find_principal(state, name)
    if request.token_id in principal.tokens:
        raise InvalidRequestError(
            f"Principal {name!r} has a token {request.token_id} already: draw another id."
        )
    if request.expires_ms is not None and request.expires_ms <= now_ms:
        raise InvalidRequestError(
            f"The token of {name!r} would expire {(now_ms - request.expires_ms) / 1000:.0f} s ago: "
            "choose a time to come, and look at this machine's clock."
        )
    expiries = {
        token_id: _earlier(token.expires_ms, request.others_expire_ms)
        for token_id, token in principal.tokens.items()
    }
    left = {
        token_id: expires_ms
        for token_id, expires_ms in expiries.items()
        if expires_ms is None or expires_ms > now_ms
    }
    if len(left) >= TOKENS_MAX:
        raise PrincipalLimitError(
            f"Principal {name!r} has {TOKENS_MAX} valid tokens, its limit: revoke one of "
            f"{', '.join(left)}."
        )
    records: list[MetadataRecord] = [
        TokenRevoked(name, token_id) for token_id in principal.tokens if token_id not in left
    ]
    records += [
        msgspec.structs.replace(principal.tokens[token_id], expires_ms=expires_ms)
        for token_id, expires_ms in left.items()
        if expires_ms != principal.tokens[token_id].expires_ms
    ]
    records.append(
        TokenCreated(name, request.token_id, request.verifiers, now_ms, request.expires_ms)
    )
    return changed(records)


def _earlier(left_ms: int | None, right_ms: int | None) -> int | None:
    """The earlier one of two times; None never comes."""
    return min((time_ms for time_ms in (left_ms, right_ms) if time_ms is not None), default=None)


def revoke_token(
    state: ClusterState, request: messages.RevokeToken, facts: Facts
) -> ClusterDecision:
    """Removes a token. Raises UnknownPrincipalError, UnknownTokenError."""
    principal = find_principal(state, request.principal)
    if request.token_id not in principal.tokens:
        raise UnknownTokenError(
            f"Principal {request.principal!r} has no token {request.token_id}: it has "
            f"{', '.join(principal.tokens) or 'none'}."
        )
    return changed([TokenRevoked(request.principal, request.token_id)])


def create_acls(
    state: ClusterState, request: messages.CreateAcls, facts: Facts
) -> ClusterDecision:
    """Adds ACLs: all of them, or none. Raises UnknownPrincipalError, PrincipalLimitError,
    InvalidRequestError."""
    for acl in request.acls:
        _check_acl(acl)
        if acl.principal != ANY:
            find_principal(state, acl.principal)
    new = [acl for acl in dict.fromkeys(request.acls) if acl not in state.acls]
    if len(state.acls) + len(new) > ACLS_MAX:
        raise PrincipalLimitError(
            f"The cluster has {len(state.acls)} ACLs and may have {ACLS_MAX}: delete some, or use "
            "prefixes."
        )
    return changed([AclCreated(acl) for acl in new])


def delete_acls(
    state: ClusterState, request: messages.DeleteAcls, facts: Facts
) -> ClusterDecision:
    """Removes ACLs. Those that do not exist are passed over."""
    found = [acl for acl in dict.fromkeys(request.acls) if acl in state.acls]
    return changed([AclDeleted(acl) for acl in found])


def check_forwarded(
    state: ClusterState, forward: messages.Forward, request: messages.AnyRequest, now_ms: int
) -> None:
    """Raises AuthorizationError unless the principal for which a broker forwards the request exists
    with that token, which has not expired, and may send it."""
    if forward.by is None:
        return
    principal = state.principals.get(forward.by)
    is_valid = principal is not None and principal.has(forward.token_id, forward.token_key)
    if is_valid and principal is not None and forward.token_id is not None:
        expires_ms = principal.tokens[forward.token_id].expires_ms
        is_valid = expires_ms is None or now_ms < expires_ms
    if not is_valid:
        raise no_longer_valid(forward.by)
    check_rights(state.acls, forward.by, forward.address, request, state)


def _check_acl(acl: Acl) -> None:
    """Raises InvalidRequestError for a rule that could never decide anything."""
    if acl.operation != "all":
        check_operation(acl.operation, acl.resource_type)
    if acl.resource_type == "cluster" and (acl.pattern, acl.name) != ("literal", CLUSTER):
        raise InvalidRequestError(
            f"An ACL of the cluster names {CLUSTER!r}, literally, and not {acl.name!r}."
        )
    if acl.resource_type == "topic" and acl.name.startswith(INTERNAL_PREFIX):
        raise InvalidRequestError(
            f"Topics whose names begin with {INTERNAL_PREFIX!r} are rayq's own, and no ACL of "
            "topics counts for them: describe and alter on the cluster do."
        )
    _check_host(acl.host)
    if acl.principal == SUPERUSER:
        raise InvalidRequestError(
            f"{SUPERUSER!r} may do everything: no ACL changes that. Give people principals of "
            "their own."
        )


def _check_host(host: str) -> None:
    """Raises InvalidRequestError unless it is written as servers see clients: as an address, not a
    name, and an IPv4 address as such."""
    if host == ANY:
        return
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise InvalidRequestError(
            f"The host of an ACL is the address of clients, such as '10.0.0.1', or {ANY!r}, and "
            f"not {host!r}: servers do not look names up."
        ) from error
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if str(mapped or address) != host:
        raise InvalidRequestError(
            f"Servers know the address {host!r} as {str(mapped or address)!r}: write it so."
        )


def check_operation(operation: Operation, resource_type: ResourceType) -> None:
    """Raises InvalidRequestError for an operation that this type of resource does not have."""
    operations = OPERATIONS[resource_type]
    if operation not in operations:
        raise InvalidRequestError(
            f"{operation!r} is not an operation on a {resource_type}: it is one of all, "
            f"{', '.join(operations)}."
        )


def find_principal(state: ClusterState, name: str) -> Principal:
    """The principal of that name. Raises UnknownPrincipalError."""
    principal = state.principals.get(name)
    if principal is None:
        raise unknown_principal(name)
    return principal


def unknown_principal(name: str) -> UnknownPrincipalError:
    """The error for a principal that does not exist, or is the superuser, which is none of those
    that are created."""
    if name == SUPERUSER:
        return UnknownPrincipalError(
            f"{SUPERUSER!r} is whoever has the cluster's own token, which `rayq token` prints. It "
            "may do everything, has no other token and no ACLs, and cannot be removed."
        )
    return UnknownPrincipalError(
        f"There is no principal {name!r}: `rayq principal list` shows those that there are."
    )

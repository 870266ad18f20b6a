"""The controller's decisions about quotas.

Each decision reads the state and changes nothing. Errors are those of `rayq.errors`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from rayq import messages
from rayq.core.cluster.access_changes import find_principal
from rayq.core.cluster.facts import ClusterDecision, Facts, changed
from rayq.core.cluster.records import QuotaChanged
from rayq.core.cluster.state import ClusterState
from rayq.errors import InvalidRequestError, PrincipalLimitError
from rayq.messages.acls import PRINCIPAL_NAME_LENGTH_MAX, SUPERUSER

QUOTAS_MAX = 20_000
"""Maximum number of principals and client ids with quotas."""
LIMIT_MAX = 1e15
"""Maximum value of a limit. No cluster can use that much."""


def set_quota(state: ClusterState, request: messages.SetQuota, facts: Facts) -> ClusterDecision:
    """Sets limits of a principal, of one of its client ids, or the default. Raises
    UnknownPrincipalError, InvalidRequestError, PrincipalLimitError."""
    principal, client_id = request.principal, request.client_id
    if principal == SUPERUSER:
        raise InvalidRequestError(
            f"{SUPERUSER!r} has no quotas. Give people principals of their own."
        )
    if not request.limits:
        raise InvalidRequestError(
            f"Name a limit to set: {', '.join(get_args(messages.QuotaName))}."
        )
    if principal is not None:
        find_principal(state, principal)
    if client_id is not None:
        _check_client_id(principal, client_id)
    before = state.quotas.limits_of(principal, client_id)
    after = dict(before)
    for name, value in request.limits.items():
        _check_limit(name, value)
        after[name] = value
    if after == before:
        return changed([])
    if not before and len(state.quotas) >= QUOTAS_MAX:
        raise PrincipalLimitError(
            f"The cluster has quotas of {QUOTAS_MAX} principals and client ids, its limit: remove "
            "some, or set a default."
        )
    return changed([QuotaChanged(principal, client_id, after)])


def remove_quota(
    state: ClusterState, request: messages.RemoveQuota, facts: Facts
) -> ClusterDecision:
    """Removes limits. Those that do not exist are passed over."""
    before = state.quotas.limits_of(request.principal, request.client_id)
    names: Collection[str] = request.names or before
    after = {name: value for name, value in before.items() if name not in names}
    if after == before:
        return changed([])
    return changed([QuotaChanged(request.principal, request.client_id, after)])


def partitions_changed(state: ClusterState, request: messages.AnyRequest) -> int:
    """The partitions that a request creates or deletes, by which it counts for
    `controller_mutation_rate`."""
    if isinstance(request, messages.CreateTopic | messages.RestoreTopic | messages.CreateQueue):
        return max(request.partitions or 0, 0)
    if isinstance(request, messages.CreatePartitions | messages.DeleteTopic):
        topic = state.topic_named(request.name)
        known = 0 if topic is None else len(topic.partitions)
        if isinstance(request, messages.DeleteTopic):
            return known
        return max(request.total - known, 0)
    return 0


def _check_client_id(principal: str | None, client_id: str) -> None:
    if principal is None:
        raise InvalidRequestError(
            "The default holds for each principal, whatever its client id: name the principal of "
            f"client id {client_id[:PRINCIPAL_NAME_LENGTH_MAX]!r}."
        )
    is_legal = client_id.isprintable() and 1 <= len(client_id) <= PRINCIPAL_NAME_LENGTH_MAX
    if not is_legal:
        raise InvalidRequestError(
            f"{client_id[:PRINCIPAL_NAME_LENGTH_MAX]!r} is no client id: use 1 to "
            f"{PRINCIPAL_NAME_LENGTH_MAX} printable characters."
        )


def _check_limit(name: str, value: float) -> None:
    if not 0 <= value <= LIMIT_MAX:
        raise InvalidRequestError(
            f"{name} is {value:g}: it is a number from 0, for nothing at all, to {LIMIT_MAX:g}. "
            "Remove the quota to have no limit."
        )
    if name.startswith("max_") and value != int(value):
        raise InvalidRequestError(f"{name} is {value:g}: it counts, so it is a whole number.")

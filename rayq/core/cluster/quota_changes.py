"""The controller's decisions about quotas.

Each decision reads the state and changes nothing. Errors are those of `rayq.errors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import cast, get_args

import msgspec

from rayq import messages
from rayq.core.access.rights import Needed, check_needed, may_describe
from rayq.core.cluster import remote_changes
from rayq.core.cluster.access_changes import find_principal
from rayq.core.cluster.facts import ClusterDecision, Facts, changed
from rayq.core.cluster.queue_changes import new_dead_letters
from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    QuotaChanged,
    SnapshotPinned,
    SnapshotUnpinned,
    TopicCreated,
)
from rayq.core.cluster.state import ClusterState
from rayq.core.cluster.topic_changes import OWN_TOPICS
from rayq.errors import InvalidRequestError, PrincipalLimitError, QuotaLimitError, counted
from rayq.messages.acls import CLUSTER, PRINCIPAL_NAME_LENGTH_MAX, SUPERUSER, QuotaName

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
            f"Name a limit to set: {', '.join(get_args(QuotaName))}."
        )
    if principal is not None:
        find_principal(state, principal)
    if client_id is not None:
        _check_client_id(principal, client_id)
    before = state.quotas.limits_of(principal, client_id)
    after = dict(before)
    for name, value in request.limits.items():
        _check_limit(name, value)
        if client_id is not None and name in ("max_topics", "max_partitions"):
            raise InvalidRequestError(
                f"{name} counts what a principal owns: set it for {principal!r}, and not for one "
                "of its client ids."
            )
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


def owned_records(
    state: ClusterState, forward: messages.Forward, records: Sequence[MetadataRecord]
) -> list[MetadataRecord]:
    """The records of a decision for a principal, which owns the topics and the pins that it
    creates. Raises QuotaLimitError where it, or another owner, would have more topics or partitions
    than its quotas allow, or more than its part of all pins."""
    owned: list[MetadataRecord] = []
    owners: dict[str, str | None] = {}
    topics: Counter[str] = Counter()
    partitions: Counter[str] = Counter()
    for record in records:
        if isinstance(record, TopicCreated) and record.name not in OWN_TOPICS:
            record = msgspec.structs.replace(record, owner=forward.by)
            owners[record.topic_id] = forward.by
            topics[forward.by or ""] += 1
        elif isinstance(record, SnapshotPinned):
            assert forward.by is not None
            _check_pin(state, forward, record.pin_id)
            record = remote_changes.own_pin(state, forward.by, record)
        elif isinstance(record, SnapshotUnpinned):
            _check_pin(state, forward, record.pin_id)
        elif isinstance(record, PartitionChanged):
            topic_id, known = record.topic_id, state.topics.get(record.topic_id)
            owner = owners.get(topic_id) if known is None else known.owner
            if owner is not None and (known is None or record.partition not in known.partitions):
                partitions[owner] += 1
        owned.append(record)
    for name, added in (("max_topics", topics), ("max_partitions", partitions)):
        for owner, count in added.items():
            _check_count(state, forward, owner, cast(QuotaName, name), count)
    return owned


def _check_pin(state: ClusterState, forward: messages.Forward, pin_id: str) -> None:
    """Raises AuthorizationError where the principal renews or ends another's pin and may not alter
    the cluster: with a shorter time or higher offsets, retention would take what that one reads."""
    known = state.pins.get(pin_id)
    if known is not None and known.owner != forward.by:
        assert forward.by is not None
        needed = Needed("alter", "cluster", CLUSTER)
        check_needed(state.acls, forward.by, forward.address, [needed])


def _check_count(
    state: ClusterState, forward: messages.Forward, owner: str, name: QuotaName, added: int
) -> None:
    limit = state.quotas.limit(owner, "", name)
    if limit is None:
        return
    mine = [topic for topic in state.topics.values() if topic.owner == owner]
    is_topics = name == "max_topics"
    count = len(mine) if is_topics else sum(len(topic.partitions) for topic in mine)
    if count + added > limit.value:
        what = "topic" if is_topics else "partition"
        if not may_describe(state.acls, forward.by, forward.address, "principal", owner):
            raise QuotaLimitError(
                f"The topic's owner, whom you may not describe, cannot have {added} more: its "
                f"quota {name} does not allow it. Ask an administrator of the cluster."
            )
        raise QuotaLimitError(
            f"Principal {owner!r} owns {counted(count, what)}, and its quota {name} is "
            f"{limit.value:g}, so it cannot have {added} more. Delete some of its topics, or ask "
            f"an administrator of the cluster for more (rayq quota set {owner} {name}=...)."
        )


def partitions_changed(state: ClusterState, request: messages.AnyRequest) -> int:
    """Number of partitions that a request creates or deletes, which counts for
    `controller_mutation_rate`."""
    if isinstance(request, messages.CreateQueue):
        own = max(request.partitions or 0, 0)
        return own + new_dead_letters(state, request.name, request.config)
    if isinstance(request, messages.AlterQueue):
        return new_dead_letters(state, request.name, request.config)
    if isinstance(request, messages.CreateTopic | messages.RestoreTopic):
        return max(request.partitions, 0)
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
            f"{client_id[:PRINCIPAL_NAME_LENGTH_MAX]!r} is not a client id: use 1 to "
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

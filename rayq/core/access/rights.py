"""The rights that a request needs, and whether its sender has them.

A request class declares what its fields name (`Request.rights`); what only its content tells is
here. Ids are looked up in the metadata. A name is checked before anybody looks whether it exists,
so that a refusal tells nothing about that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from rayq import messages
from rayq.core.access.acls import AclTable
from rayq.errors import AuthorizationError
from rayq.messages.acls import CLUSTER, Acl, Operation, ResourceType


class Names(Protocol):
    """The names behind ids, as the metadata have them. None: there is no such topic or queue."""

    def topic_name(self, topic_id: str) -> str | None: ...

    def queue_name(self, queue_id: str) -> str | None: ...

    def topic_of_queue(self, name: str) -> str | None: ...

    def pinned_topic_id(self, pin_id: str) -> str | None: ...


class Needed(NamedTuple):
    """An operation on a resource."""

    operation: Operation
    resource_type: ResourceType
    name: str


def needed_by(request: messages.AnyRequest, names: Names) -> Iterator[Needed]:
    """Yields all that the sender of a request must be allowed. What does not exist needs nothing:
    the handler says that it does not."""
    for right in request.rights or ():
        named: str | None = getattr(request, right.field) if right.field else CLUSTER
        if named is not None and right.field == "topic_id":
            named = names.topic_name(named)
        elif named is not None and right.field == "queue_id":
            named = names.queue_name(named)
        if named is not None:
            yield Needed(right.operation, right.resource_type, named)
    more = NEEDED_BY_CONTENT.get(type(request))
    if more is not None:
        yield from more(request, names)


def check_rights(
    acls: AclTable, principal: str, host: str, request: messages.AnyRequest, names: Names
) -> None:
    """Raises AuthorizationError unless the named principal may send the request from this host."""
    assert request.rights is not None, type(request).__name__
    check_needed(acls, principal, host, needed_by(request, names))


def check_needed(acls: AclTable, principal: str, host: str, all_needed: Iterable[Needed]) -> None:
    """Raises AuthorizationError unless the named principal may do all of it from this host."""
    for needed in all_needed:
        verdict = acls.decide(principal, *needed, host)
        if not verdict.is_allowed:
            raise _refusal(principal, needed, verdict.acl)


def no_longer_valid(principal: str) -> AuthorizationError:
    """The error for a connection of a principal that is gone, or whose token was revoked."""
    return AuthorizationError(
        f"Principal {principal!r}, or its token, is no longer valid: ask whoever administers the "
        "cluster for a new one (rayq token create)."
    )


def may_describe(
    acls: AclTable, principal: str | None, host: str, resource_type: ResourceType, name: str
) -> bool:
    """Returns whether lists show this resource to a principal; None is the superuser."""
    return (
        principal is None
        or acls.decide(principal, "describe", resource_type, name, host).is_allowed
    )


def _refusal(principal: str, needed: Needed, denied_by: Acl | None) -> AuthorizationError:
    operation, resource_type, name = needed
    why = "no ACL allows it" if denied_by is None else f"an ACL says: {denied_by}"
    resource = "the cluster" if resource_type == "cluster" else f"{resource_type} {name!r}"
    return AuthorizationError(
        f"Principal {principal!r} may not {operation} {resource}: {why}. Whoever administers the "
        f"cluster can allow it: rayq acl add {principal} {operation} {resource_type} {name}"
    )


# --- what only the content of a request tells -----------------------------------------------------


def _of_topic_ids(operation: Operation, topic_ids: set[str], names: Names) -> Iterator[Needed]:
    found = {names.topic_name(topic_id) for topic_id in topic_ids}
    for name in sorted(name for name in found if name is not None):
        yield Needed(operation, "topic", name)


def _commit_offsets(request: messages.CommitOffsets, names: Names) -> Iterator[Needed]:
    yield from _of_topic_ids("read", {offset.topic_id for offset in request.offsets}, names)


def _set_group_offsets(request: messages.SetGroupOffsets, names: Names) -> Iterator[Needed]:
    yield from _of_topic_ids("read", {topic_id for topic_id, _, _ in request.offsets}, names)


def _group_heartbeat(request: messages.GroupHeartbeat, names: Names) -> Iterator[Needed]:
    for topic in sorted(set(request.topics)):
        yield Needed("read", "topic", topic)
    yield from _of_topic_ids("read", {topic_id for topic_id, _ in request.owned}, names)


def _unpin_snapshot(request: messages.UnpinSnapshot, names: Names) -> Iterator[Needed]:
    topic_id = names.pinned_topic_id(request.pin_id)
    if topic_id is not None:
        yield from _of_topic_ids("read", {topic_id}, names)


def _describe_principals(
    request: messages.DescribePrincipals, names: Names
) -> Iterator[Needed]:
    for name in sorted(set(request.names or ())):
        yield Needed("describe", "principal", name)


def _describe_acls(request: messages.DescribeAcls, names: Names) -> Iterator[Needed]:
    if request.filter.principal is not None:
        yield Needed("describe", "principal", request.filter.principal)


def _create_queue(request: messages.CreateQueue, names: Names) -> Iterator[Needed]:
    if request.partitions is not None:
        yield Needed("create", "topic", request.topic)
    elif _owns_its_topic(request.config):
        yield Needed("alter", "topic", request.topic)


def _alter_queue(request: messages.AlterQueue, names: Names) -> Iterator[Needed]:
    topic = names.topic_of_queue(request.name)
    if topic is not None and _owns_its_topic(request.config):
        yield Needed("alter", "topic", topic)


def _owns_its_topic(config: Mapping[str, object]) -> bool:
    """Returns whether a queue would hold back the deletion of its topic's records, or delete them.
    """
    return config.get("retention", "topic") != "topic"


NEEDED_BY_CONTENT: dict[type[messages.AnyRequest], Callable[[Any, Names], Iterator[Needed]]] = {
    messages.CommitOffsets: _commit_offsets,
    messages.SetGroupOffsets: _set_group_offsets,
    messages.GroupHeartbeat: _group_heartbeat,
    messages.UnpinSnapshot: _unpin_snapshot,
    messages.DescribePrincipals: _describe_principals,
    messages.DescribeAcls: _describe_acls,
    messages.CreateQueue: _create_queue,
    messages.AlterQueue: _alter_queue,
}
"""What the content of a request needs, beside the rights of its class."""

"""The rights that a request needs, and whether its sender has them.

A request class declares what its fields name (`Request.rights`); what only its content tells is
here. A name that the sender gave is checked before anybody looks whether it exists, so that a
refusal tells nothing about that. Ids are looked up in the metadata: what the sender may not
describe is refused as what does not exist.

No ACL of topics opens rayq's own topics. To see what they are is to describe the cluster, to
configure them is to alter it, and only servers write them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rayq import messages
from rayq.config import QueueConfig
from rayq.core.access.acls import IMPLIED_BY, AclTable, AclVerdict
from rayq.core.access.unknown import unknown_partition, unknown_queue, unknown_topic
from rayq.core.cluster.queue_changes import DEAD
from rayq.core.cluster.topic_changes import INTERNAL_PREFIX
from rayq.errors import AuthorizationError, RayqError
from rayq.messages.acls import CLUSTER, Acl, Operation, ResourceType

KEEP = QueueConfig.dead_letters
"""The value of `dead_letters` by default: a queue writes them to a topic."""
NAME_LENGTH_MAX = 256
"""Maximum length of a name in an error."""


class Names(Protocol):
    """The names behind ids, as the metadata have them. None: there is no such topic or queue."""

    def topic_name(self, topic_id: str) -> str | None:
        """Name of the topic to whose partition a request goes."""

    def other_topic_name(self, topic_id: str) -> str | None:
        """Name of any other topic. May raise a retriable RayqError while it is looked up."""

    def queue_name(self, queue_id: str) -> str | None: ...

    def topic_of_queue(self, name: str) -> str | None: ...

    def topic_exists(self, name: str) -> bool: ...

    def pinned_topic_id(self, pin_id: str) -> str | None: ...


class Needed(NamedTuple):
    """An operation on a resource."""

    operation: Operation
    resource_type: ResourceType
    name: str


class Found(Needed):
    """An operation on a resource that the request does not name: the server looked its name up."""


@dataclass(frozen=True, slots=True)
class View:
    """The resources that a named principal sees: those that it may describe. All else is not
    there."""

    acls: AclTable
    principal: str
    host: str
    names: Names

    def shows(self, resource_type: ResourceType, name: str) -> bool:
        """Returns whether the principal may describe the resource."""
        return decide(
            self.acls, self.principal, self.host, Needed("describe", resource_type, name)
        ).is_allowed

    def knows_of(self, resource_type: ResourceType, name: str) -> bool:
        """Returns whether the principal may hear of the resource. Everybody knows that rayq's own
        topics are there: coordinators are found by them."""
        return is_own_topic(resource_type, name) or self.shows(resource_type, name)

    def shows_topic_id(self, topic_id: str) -> bool:
        """Returns whether no topic has this id that the principal may not describe: an id without
        a topic tells nothing. May raise a retriable RayqError while the name is looked up."""
        name = self.names.other_topic_name(topic_id)
        return name is None or self.shows("topic", name)

    def refusal(self, resource_type: ResourceType, name: str) -> AuthorizationError:
        """The error for a principal that named what it may not describe, whether that exists or
        not."""
        needed = Needed("describe", resource_type, name)
        verdict = decide(self.acls, self.principal, self.host, needed)
        return _refusal(self.principal, needed, verdict.acl)


def topic_of_queue_denied(view: View, queue: str) -> AuthorizationError:
    """The error for a queue that the principal may describe, without its topic."""
    return AuthorizationError(
        f"Principal {view.principal!r} may not describe the topic of queue {queue!r}, and so does "
        "not see the queue: no ACL allows it. An administrator of the cluster can."
    )


def view_of(acls: AclTable, principal: str | None, host: str, names: Names) -> View | None:
    """Returns the resources that a principal sees. None: all of them, as the superuser."""
    return None if principal is None else View(acls, principal, host, names)


def shows(view: View | None, resource_type: ResourceType, name: str) -> bool:
    """Returns whether a view, or None for all, has the resource."""
    return view is None or view.shows(resource_type, name)


def decide(acls: AclTable, principal: str, host: str, needed: Needed) -> AclVerdict:
    """Returns whether a named principal may do the operation, and the ACL that says so."""
    of_cluster = _of_own_topic(needed)
    if of_cluster is None:
        return AclVerdict(False, None)
    return acls.decide(principal, *of_cluster, host)


def needed_by(request: messages.AnyRequest, names: Names) -> Iterator[Needed]:
    """Yields all that the sender of a request must be allowed. What does not exist needs
    nothing."""
    for right in request.rights or ():
        if not right.field:
            yield Needed(right.operation, right.resource_type, CLUSTER)
            continue
        named: str | None = getattr(request, right.field)
        find = _NAMES_OF_IDS.get(right.field)
        if find is None:
            if named is not None:
                yield Needed(right.operation, right.resource_type, named)
            continue
        named = None if named is None else find(names, named)
        if named is not None:
            yield Found(right.operation, right.resource_type, named)
    more = NEEDED_BY_CONTENT.get(type(request))
    if more is not None:
        yield from more(request, names)


def check_rights(
    acls: AclTable, principal: str, host: str, request: messages.AnyRequest, names: Names
) -> None:
    """Raises AuthorizationError unless the named principal may send the request from this host.
    Raises UnknownTopicError or UnknownQueueError, as a handler does, for an id that nothing has
    which the principal may describe. The cause of an error that hides a name is the
    AuthorizationError that has it, for the audit."""
    assert request.rights is not None, type(request).__name__
    view = View(acls, principal, host, names)
    _check_topic_id(view, request)
    for needed in needed_by(request, names):
        verdict = decide(acls, principal, host, needed)
        if verdict.is_allowed:
            continue
        if isinstance(needed, Found) and not view.knows_of(needed.resource_type, needed.name):
            refusal = _refusal(principal, needed, verdict.acl)
            raise _as_unknown(principal, request, needed) from refusal
        raise _refusal(principal, needed, verdict.acl)
    # A queue that is not known here might be known to the handler a moment later.
    if isinstance(request, messages.ToQueueLeader) and names.queue_name(request.queue_id) is None:
        raise unknown_queue(request.queue_id)


def check_needed(acls: AclTable, principal: str, host: str, all_needed: Iterable[Needed]) -> None:
    """Raises AuthorizationError unless the named principal may do all of it from this host."""
    for needed in all_needed:
        verdict = decide(acls, principal, host, needed)
        if not verdict.is_allowed:
            raise _refusal(principal, needed, verdict.acl)


def _check_topic_id(view: View, request: messages.AnyRequest) -> None:
    """Raises UnknownTopicError unless there is a topic of the request's id which the principal may
    hear of."""
    topic_id: str | None = getattr(request, "topic_id", None)
    if topic_id is None:
        return
    name = view.names.topic_name(topic_id)
    if name is not None and view.knows_of("topic", name):
        return
    refusal = None if name is None else view.refusal("topic", name)
    if isinstance(request, messages.ToPartition):
        raise unknown_partition(topic_id, request.partition) from refusal
    raise unknown_topic(topic_id) from refusal


def no_longer_valid(principal: str) -> AuthorizationError:
    """The error for a connection of a principal that is gone, or whose token was revoked."""
    return AuthorizationError(
        f"Principal {principal!r}, or its token, is no longer valid: ask an administrator of the "
        "cluster for a new one (rayq token create)."
    )


def may_describe(
    acls: AclTable, principal: str | None, host: str, resource_type: ResourceType, name: str
) -> bool:
    """Returns whether lists show this resource to a principal; None is the superuser."""
    needed = Needed("describe", resource_type, name)
    return principal is None or decide(acls, principal, host, needed).is_allowed


# --- refusals -------------------------------------------------------------------------------------


def _as_unknown(principal: str, request: messages.AnyRequest, needed: Needed) -> RayqError:
    """The error for a resource that the request does not name and its sender may not describe."""
    if isinstance(request, messages.ToQueueLeader):
        return unknown_queue(request.queue_id)
    return AuthorizationError(
        f"Principal {principal!r} may not {needed.operation} a {needed.resource_type} that this "
        f"{type(request).__name__} is about: no ACL allows it. An administrator of the cluster can."
    )


def _refusal(principal: str, needed: Needed, denied_by: Acl | None) -> AuthorizationError:
    name = needed.name
    if len(name) > NAME_LENGTH_MAX:  # No resource has such a name.
        needed = Needed(needed.operation, needed.resource_type, f"{name[:NAME_LENGTH_MAX]}...")
        name = needed.name
    of_cluster = _of_own_topic(needed)
    if of_cluster is None:
        return AuthorizationError(
            f"Principal {principal!r} may not {needed.operation} topic {name!r}: it is "
            "rayq's own, and only servers do."
        )
    why = "no ACL allows it" if denied_by is None else f"an ACL says: {denied_by}"
    if denied_by is None and needed.operation == "describe" and of_cluster is needed:
        implied_by = ", ".join(IMPLIED_BY["describe"])
        why = f"no ACL allows it, nor anything that implies it ({implied_by})"
    if of_cluster is not needed:
        operation = of_cluster.operation
        why = f"it is rayq's own, for which one has to {operation} the cluster, and {why}"
    resource = (
        "the cluster"
        if needed.resource_type == "cluster"
        else f"{needed.resource_type} {name!r}"
    )
    refused = f"Principal {principal!r} may not {needed.operation} {resource}: {why}."
    if denied_by is not None:  # A rule that allows would change nothing.
        return AuthorizationError(
            f"{refused} An administrator of the cluster can remove that rule (rayq acl remove)."
        )
    return AuthorizationError(
        f"{refused} An administrator of the cluster can allow it{_command(principal, of_cluster)}"
    )


def _command(principal: str, needed: Needed) -> str:
    """The command that a superuser would run. The sender of a request chose the name: so it is
    quoted for a shell, and one that would not be seen as it is has no command."""
    operation, resource_type, name = needed
    if not name.isprintable():
        return "."
    word = f"{'-- ' if name.startswith('-') else ''}{shlex.quote(name)}"
    return f": rayq acl add {principal} {operation} {resource_type} {word}"


def is_own_topic(resource_type: ResourceType, name: str) -> bool:
    """Returns whether the resource is one of rayq's own topics."""
    return resource_type == "topic" and name.startswith(INTERNAL_PREFIX)


def _of_own_topic(needed: Needed) -> Needed | None:
    """The right on the cluster that an operation on one of rayq's own topics needs; other
    operations as they are. None: nobody has it."""
    operation = needed.operation
    if not is_own_topic(needed.resource_type, needed.name):
        return needed
    if operation in ("create", "write", "delete"):
        return None
    is_look = operation in ("read", "describe", "describe_configs")
    return Needed("describe" if is_look else "alter", "cluster", CLUSTER)


# --- what only the content of a request tells -----------------------------------------------------


def _of_topic_ids(operation: Operation, topic_ids: set[str], names: Names) -> Iterator[Needed]:
    found = {names.other_topic_name(topic_id) for topic_id in topic_ids}
    for name in sorted(name for name in found if name is not None):
        yield Found(operation, "topic", name)


def _allocate_producer_id(
    request: messages.AllocateProducerId, _: Names
) -> Iterator[Needed]:
    if request.topic is None:
        yield Needed("alter", "cluster", CLUSTER)


def _commit_offsets(request: messages.CommitOffsets, names: Names) -> Iterator[Needed]:
    yield from _of_topic_ids("read", {offset.topic_id for offset in request.offsets}, names)


def _set_group_offsets(request: messages.SetGroupOffsets, names: Names) -> Iterator[Needed]:
    yield from _of_topic_ids("read", {topic_id for topic_id, _, _ in request.offsets}, names)


def _fetch_committed(request: messages.FetchCommitted, names: Names) -> Iterator[Needed]:
    topic_ids = {topic_id for topic_id, _ in request.partitions or ()}
    yield from _of_topic_ids("describe", topic_ids, names)


def _group_heartbeat(request: messages.GroupHeartbeat, _: Names) -> Iterator[Needed]:
    """Leaving, and giving partitions up, needs no right on them."""
    if request.member_epoch >= messages.MEMBER_EPOCH_JOIN:
        for topic in sorted(set(request.topics)):
            yield Needed("read", "topic", topic)


def _unpin_snapshot(request: messages.UnpinSnapshot, names: Names) -> Iterator[Needed]:
    topic_id = names.pinned_topic_id(request.pin_id)
    if topic_id is not None:
        yield from _of_topic_ids("read", {topic_id}, names)


def _describe_principals(
    request: messages.DescribePrincipals, _: Names
) -> Iterator[Needed]:
    for name in sorted(set(request.names or ())):
        yield Needed("describe", "principal", name)


def _describe_acls(request: messages.DescribeAcls, _: Names) -> Iterator[Needed]:
    if request.filter.principal is not None:
        yield Needed("describe", "principal", request.filter.principal)


def _abort_transaction(request: messages.AbortTransaction, _: Names) -> Iterator[Needed]:
    """The coordinator aborts no transaction of another id than the one that is named."""
    if request.transactional_id is None:
        yield Needed("alter", "cluster", CLUSTER)
    else:
        yield Needed("alter", "transactional_id", request.transactional_id)


def _create_queue(request: messages.CreateQueue, names: Names) -> Iterator[Needed]:
    if request.partitions is not None:
        yield Needed("create", "topic", request.topic)
    elif _owns_its_topic(request.config):
        yield Needed("alter", "topic", request.topic)
    if _plain(request.config).get("dead_letters", KEEP) == KEEP:
        yield from _dead_letters(request.name, names)


def _alter_queue(request: messages.AlterQueue, names: Names) -> Iterator[Needed]:
    topic = names.topic_of_queue(request.name)
    if topic is not None and _owns_its_topic(request.config):
        yield Found("alter", "topic", topic)
    if _plain(request.config).get("dead_letters") == KEEP:
        yield from _dead_letters(request.name, names)


def _dead_letters(queue: str, names: Names) -> Iterator[Needed]:
    """The right to have a queue's dead letters written into a topic that exists: it may be
    another's. One that does not exist yet is made as a part of the queue."""
    if names.topic_exists(queue + DEAD):
        yield Needed("write", "topic", queue + DEAD)


def _move_queue_records(request: messages.MoveQueueRecords, names: Names) -> Iterator[Needed]:
    """Whoever moves records could read them where they go. Targets that headers name are checked
    when they are read."""
    if request.to_topic is None:
        return
    topic = names.topic_name(request.topic_id)
    if topic is not None:
        yield Found("read", "topic", topic)
    if request.to_topic:
        yield Needed("write", "topic", request.to_topic)


def _owns_its_topic(config: Mapping[str, object]) -> bool:
    """Returns whether a queue would hold back the deletion of its topic's records, or delete them.
    """
    return _plain(config).get("retention", "topic") != "topic"


def _plain(config: Mapping[str, object]) -> dict[str, object]:
    """A config by rayq's names of the keys, which may also be written with dots."""
    return {key.replace(".", "_"): value for key, value in config.items()}


_NAMES_OF_IDS: dict[str, Callable[[Names, str], str | None]] = {
    "topic_id": lambda names, topic_id: names.topic_name(topic_id),
    "queue_id": lambda names, queue_id: names.queue_name(queue_id),
}
"""The fields that name a resource by its id."""

NEEDED_BY_CONTENT: dict[type[messages.AnyRequest], Callable[[Any, Names], Iterator[Needed]]] = {
    messages.AbortTransaction: _abort_transaction,
    messages.CommitOffsets: _commit_offsets,
    messages.FetchCommitted: _fetch_committed,
    messages.SetGroupOffsets: _set_group_offsets,
    messages.GroupHeartbeat: _group_heartbeat,
    messages.UnpinSnapshot: _unpin_snapshot,
    messages.AllocateProducerId: _allocate_producer_id,
    messages.DescribePrincipals: _describe_principals,
    messages.DescribeAcls: _describe_acls,
    messages.CreateQueue: _create_queue,
    messages.AlterQueue: _alter_queue,
    messages.MoveQueueRecords: _move_queue_records,
}
"""The rights that the content of a request needs, beside those of its class."""

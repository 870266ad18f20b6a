"""Whole requests: they pass as a table says that was written by hand from docs/security.md, and by
Kafka's rules of ACLs word for word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq import messages
from rayq.core.access.acls import AclTable
from rayq.core.access.rights import check_rights
from rayq.core.cluster.records import QueueChanged, SnapshotPinned, TopicCreated
from rayq.core.cluster.state import ClusterState
from rayq.errors import AuthorizationError, RayqError, UnknownQueueError, UnknownTopicError
from rayq.messages.acls import Acl, AclFilter, Operation, ResourceType
from tests.pure.test_acls import oracle
from tests.pure.test_rights import CLIENT_REQUESTS
from tests.wire.recorded_messages import example_of

OWN = "__consumer_offsets"
TOPIC_IDS = {"T": "orders", "U": "orders.eu", "O": OWN}
QUEUE_IDS = {"Q": "billing", "R": "mails"}
TOPIC_OF = {"billing": "orders", "mails": "orders.eu"}
NAMES = ["orders", "orders.eu", "billing", "mails", "missing", "anna", OWN]
HOST = "10.0.0.1"

OF_TOPIC_ID: dict[str, str] = {
    "Produce": "write", "SealPartition": "write",
    "Fetch": "read", "ListOffsets": "read", "CheckRange": "read", "DescribeOffset": "read",
    "DescribeProducers": "read", "DescribeRemote": "read", "PinSnapshot": "read",
    "Take": "read", "Settle": "read", "ListQueueRecords": "read",
    "DescribeReplica": "describe", "DescribeOpenTransactions": "describe",
    "DescribeRemoteStorage": "describe", "DeleteRecords": "delete", "VerifyRemote": "alter",
}  # fmt: skip
"""The operation on the topic of the request's `topic_id`."""
OF_QUEUE_ID: dict[str, str] = {
    "Take": "read", "Settle": "read", "ListQueueRecords": "read", "DescribeQueue": "describe",
    "PurgeQueue": "alter", "MoveQueueRecords": "alter",
}  # fmt: skip
OF_NAME: dict[str, tuple[str, str, str]] = {
    "CreateTopic": ("create", "topic", "name"), "DeleteTopic": ("delete", "topic", "name"),
    "CreatePartitions": ("alter", "topic", "name"), "RestoreTopic": ("create", "topic", "name"),
    "AlterTopicConfig": ("alter_configs", "topic", "name"),
    "EndRemoteStorage": ("alter_configs", "topic", "name"),
    "CreateQueue": ("create", "queue", "name"), "AlterQueue": ("alter", "queue", "name"),
    "DeleteQueue": ("delete", "queue", "name"),
    "GroupHeartbeat": ("read", "group", "group"), "CommitOffsets": ("read", "group", "group"),
    "FetchCommitted": ("describe", "group", "group"),
    "DescribeGroup": ("describe", "group", "group"), "DeleteGroup": ("delete", "group", "group"),
    "SetGroupOffsets": ("alter", "group", "group"),
    "InitProducer": ("write", "transactional_id", "transactional_id"),
    "EndTransaction": ("write", "transactional_id", "transactional_id"),
    "TouchTransaction": ("write", "transactional_id", "transactional_id"),
    "SealTransaction": ("write", "transactional_id", "transactional_id"),
    "DescribeTransaction": ("describe", "transactional_id", "transactional_id"),
    "AbortTransaction": ("alter", "transactional_id", "transactional_id"),
    "CreatePrincipal": ("create", "principal", "name"),
    "DeletePrincipal": ("delete", "principal", "name"),
    "CreateToken": ("alter", "principal", "principal"),
    "RevokeToken": ("alter", "principal", "principal"),
    "CheckAcl": ("describe", "principal", "principal"),
    "DescribeQuotaUse": ("describe", "principal", "principal"),
}  # fmt: skip
"""Operation, resource type and the field with the name."""
OF_CLUSTER: dict[str, str] = {
    "ElectLeaders": "alter", "AlterReassignments": "alter", "CordonBroker": "alter",
    "RemoveBroker": "alter", "SetReplicationFactor": "alter", "AbortUnknownTransaction": "alter",
    "RestoreTopic": "alter", "CreateAcls": "alter", "DeleteAcls": "alter", "SetQuota": "alter",
    "RemoveQuota": "alter", "DescribeMetrics": "describe", "DescribeObjectStore": "describe",
    "ReadAudit": "describe",
}  # fmt: skip
FREE = {
    "Metadata", "AllocateProducerId", "EnsureOffsetsTopic", "EnsureTransactionsTopic",
    "ConfirmMetadata", "ListGroups", "ListTransactions", "DescribeQueues", "DescribePrincipals",
    "DescribeAcls", "UnpinSnapshot", "DescribeQuotas",
}  # fmt: skip
"""Requests that need nothing but what their content names."""


def needs(request: Any) -> Iterator[tuple[str, str, str]]:
    """All that a request needs, by the tables."""
    kind = type(request).__name__
    if kind in OF_CLUSTER:
        yield OF_CLUSTER[kind], "cluster", "cluster"
    if kind in OF_TOPIC_ID:
        yield OF_TOPIC_ID[kind], "topic", TOPIC_IDS[request.topic_id]
    if kind in OF_QUEUE_ID:
        yield OF_QUEUE_ID[kind], "queue", QUEUE_IDS[request.queue_id]
    if kind in OF_NAME:
        operation, resource_type, field = OF_NAME[kind]
        yield operation, resource_type, getattr(request, field)
    match request:
        case messages.AllocateProducerId(topic=None):
            yield "alter", "cluster", "cluster"
        case messages.AllocateProducerId():
            yield "write", "topic", request.topic
        case messages.GroupHeartbeat():
            yield from (("read", "topic", name) for name in request.topics)
        case messages.CommitOffsets() | messages.SetGroupOffsets():
            yield from (("read", "topic", TOPIC_IDS[at[0]]) for at in request.offsets)
        case messages.FetchCommitted():
            yield from (("describe", "topic", TOPIC_IDS[at[0]]) for at in request.partitions or ())
        case messages.DescribePrincipals():
            yield from (("describe", "principal", name) for name in request.names or ())
        case messages.DescribeAcls() if request.filter.principal is not None:
            yield "describe", "principal", request.filter.principal
        case messages.UnpinSnapshot() if request.pin_id == "P":
            yield "read", "topic", "orders"
        case messages.CreateQueue():
            yield "read", "topic", request.topic
            if request.partitions is not None:
                yield "create", "topic", request.topic
            elif request.config:
                yield "alter", "topic", request.topic
        case messages.AlterQueue() if request.config and request.name in TOPIC_OF:
            yield "alter", "topic", TOPIC_OF[request.name]
        case messages.MoveQueueRecords() if request.to_topic is not None:
            yield "read", "topic", TOPIC_IDS[request.topic_id]
            yield "write", "topic", request.to_topic


def is_allowed(acls: list[Acl], operation: str, resource_type: str, name: str) -> bool:
    """Kafka's rules, and two of rayq's own: about its topics, and about oneself."""
    if resource_type == "topic" and name.startswith("__"):
        if operation in ("write", "create", "delete"):
            return False
        looks = operation in ("read", "describe", "describe_configs")
        operation, resource_type, name = "describe" if looks else "alter", "cluster", "cluster"
    asked: Any = ("anna", operation, resource_type, name, HOST)
    if oracle(acls, asked):
        return True
    is_itself = resource_type == "principal" and name == "anna"
    is_denied = any(
        acl.permission == "deny"
        and acl.operation in (operation, "all")
        and oracle([_allowing(acl)], asked)
        for acl in acls
    )
    return is_itself and operation in ("describe", "alter") and not is_denied


def _allowing(acl: Acl) -> Acl:
    return msgspec.structs.replace(acl, permission="allow")


def metadata() -> ClusterState:
    state = ClusterState()
    for topic_id, name in TOPIC_IDS.items():
        state.replay(TopicCreated(topic_id, name, {}, 1))
    for queue_id, name in QUEUE_IDS.items():
        topic = TOPIC_OF[name]
        topic_id = next(key for key, value in TOPIC_IDS.items() if value == topic)
        state.replay(QueueChanged(queue_id, name, topic_id, {}, 1))
    state.replay(SnapshotPinned("P", "T", {0: 0}, 1))
    return state


STATE = metadata()
NAME = st.sampled_from(NAMES)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "name": NAME, "topic": NAME, "group": NAME, "transactional_id": NAME, "principal": NAME,
    "to_topic": st.none() | NAME,
    "queue_id": st.sampled_from([*QUEUE_IDS]),
    "topics": st.lists(NAME, max_size=2),
    "names": st.none() | st.lists(NAME, max_size=2),
    "pin_id": st.sampled_from(["P", "another"]),
    "member_epoch": st.just(1),
    "filter": st.builds(AclFilter, principal=st.none() | NAME),
}  # fmt: skip
DATA_ID, ANY_ID = st.sampled_from(["T", "U"]), st.sampled_from([*TOPIC_IDS])


@st.composite
def requests_of(draw: st.DrawFn, kind: type[Any]) -> Any:
    request = example_of(kind)
    changes: dict[str, Any] = {}
    for field in kind.__struct_fields__:
        if field == "topic_id":
            is_coordinated = issubclass(kind, messages.ToCoordinator)
            changes[field] = "O" if is_coordinated else draw(ANY_ID)
        elif field == "offsets" and kind in (messages.CommitOffsets, messages.SetGroupOffsets):
            ids = draw(st.lists(DATA_ID, max_size=2))
            changes[field] = [
                messages.OffsetCommit(topic_id, 0, 1, None, "")
                if kind is messages.CommitOffsets else (topic_id, 0, 1)
                for topic_id in ids
            ]  # fmt: skip
        elif field == "partitions" and kind is messages.FetchCommitted:
            changes[field] = draw(st.none() | st.lists(st.tuples(DATA_ID, st.just(0)), max_size=2))
        elif field == "topic" and kind is messages.AllocateProducerId:
            changes[field] = draw(st.none() | NAME)
        elif field == "partitions" and kind is messages.CreateQueue:
            changes[field] = draw(st.sampled_from([None, 3]))
        elif field == "config" and kind in (messages.CreateQueue, messages.AlterQueue):
            changes[field] = draw(st.sampled_from([{}, {"retention": "hold"}]))
        elif field in FIELDS and kind is not messages.Metadata:
            changes[field] = draw(FIELDS[field])
    return msgspec.structs.replace(request, **changes)


ACLS = st.builds(
    Acl,
    principal=st.sampled_from(["anna", "*", "ben"]),
    permission=st.sampled_from(["allow", "allow", "allow", "deny"]),
    operation=st.sampled_from(get_args(Operation)),
    resource_type=st.sampled_from(["topic", "queue", "group", "transactional_id", "principal"]),
    name=st.sampled_from([*NAMES, "*", "orders"]),
    pattern=st.sampled_from(["literal", "prefixed"]),
    host=st.sampled_from(["*", "*", HOST, "10.0.0.2"]),
) | st.builds(
    Acl,
    principal=st.just("anna"),
    permission=st.sampled_from(["allow", "deny"]),
    operation=st.sampled_from(["all", "alter", "describe"]),
    resource_type=st.just("cluster"),
    name=st.just("cluster"),
)


def outcome(acls: list[Acl], request: Any) -> RayqError | None:
    try:
        check_rights(AclTable(acls), "anna", HOST, request, STATE)
    except RayqError as error:
        return error
    return None


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(st.data())
def test_a_request_passes_as_the_tables_say(kind: type[Any], data: st.DataObject) -> None:
    request_ = data.draw(requests_of(kind))
    needed: list[Any] = list(needs(request_))
    # Few lists of rules allow anything by chance: so all that is needed is added, or all but one.
    left_out = data.draw(st.sampled_from([None, *dict.fromkeys(needed)]), "left out")
    is_added = data.draw(st.sampled_from([True, True, True, False]), "added")
    acls = data.draw(st.lists(ACLS, max_size=4) if left_out is None else st.just([]), "rules")
    acls += [Acl("anna", "allow", *need) for need in needed if is_added and need != left_out]
    if left_out is not None and left_out[1] == "topic" and data.draw(st.booleans()):
        acls.append(Acl("anna", "allow", "describe", "topic", left_out[2]))
    hidden_place = False
    if hasattr(request_, "topic_id"):
        topic = TOPIC_IDS[request_.topic_id]
        hidden_place = topic != OWN and not is_allowed(acls, "describe", "topic", topic)
    error = outcome(acls, request_)
    if hidden_place:
        assert isinstance(error, UnknownTopicError), error
        assert topic not in str(error)
        return
    expected = all(is_allowed(acls, *need) for need in needed)
    assert (error is None) == expected, (error, needed)
    assert error is None or isinstance(error, AuthorizationError | UnknownQueueError), error
    if isinstance(error, UnknownQueueError):
        queue = QUEUE_IDS[request_.queue_id]
        assert not is_allowed(acls, "describe", "queue", queue) and queue not in str(error)


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_each_request_is_in_a_table(kind: type[messages.AnyRequest]) -> None:
    tables: list[Any] = [OF_TOPIC_ID, OF_QUEUE_ID, OF_NAME, OF_CLUSTER, FREE]
    assert any(kind.__name__ in table for table in tables)


def test_all_types_of_resources_are_drawn() -> None:
    drawn = {"topic", "queue", "group", "transactional_id", "principal", "cluster"}
    assert drawn == {*get_args(ResourceType)} - {"subject", "link"}  # Nothing needs these yet.

"""The rights that requests need: each request of clients, as a stranger and as who has them."""

from __future__ import annotations

from typing import Any

import pytest

from rayq import messages
from rayq.core.access.acls import AclTable
from rayq.core.access.rights import check_rights, may_describe, needed_by
from rayq.core.cluster.access_changes import OPERATIONS
from rayq.errors import AuthorizationError
from rayq.messages.access import TokenVerifiers
from rayq.messages.acls import Acl, AclFilter
from tests.wire.recorded_messages import example_of

CLIENT_REQUESTS = [
    kind
    for kind in messages.REQUESTS.values()
    if kind.sent_by_clients and kind.__module__.startswith("rayq.")
]
FREE = {
    "Metadata",  # It shows what the principal may describe.
    "DescribeQueues",
    "ListGroups",
    "ListTransactions",
    "AllocateProducerId",
    "ConfirmMetadata",
    "EnsureOffsetsTopic",
    "EnsureTransactionsTopic",
}
"""Requests that each principal may send."""


class EverythingExists:
    """Metadata in which each id has a name."""

    def topic_name(self, topic_id: str) -> str | None:
        return f"topic of {topic_id}"

    def queue_name(self, queue_id: str) -> str | None:
        return f"queue of {queue_id}"

    def topic_of_queue(self, name: str) -> str | None:
        return f"topic of queue {name}"

    def pinned_topic_id(self, pin_id: str) -> str | None:
        return f"topic id of {pin_id}"


class NothingExists:
    """Metadata without topics, queues and pins."""

    def topic_name(self, topic_id: str) -> str | None:
        return None

    queue_name = topic_of_queue = pinned_topic_id = topic_name


NAMES = EverythingExists()
VERIFIERS = TokenVerifiers(b"a" * 32, b"b" * 32, b"c" * 64, b"d" * 64)


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_each_request_of_clients_declares_its_rights(kind: type[messages.AnyRequest]) -> None:
    assert kind.rights is not None
    for right in kind.rights:
        assert right.operation in OPERATIONS[right.resource_type]
        assert (right.field in kind.__struct_fields__) != (right.resource_type == "cluster")


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_a_stranger_is_refused_and_told_the_command_that_would_allow_it(kind: type[Any]) -> None:
    request = example_of(kind)
    needed = list(needed_by(request, NAMES))
    if kind.__name__ in FREE or (kind is messages.UnpinSnapshot and not needed):
        assert needed == []
        check_rights(AclTable(), "anna", "h", request, NAMES)
        return
    assert needed
    with pytest.raises(AuthorizationError) as caught:
        check_rights(AclTable(), "anna", "h", request, NAMES)
    operation, resource_type, name = needed[0]
    assert str(caught.value).endswith(f"rayq acl add anna {operation} {resource_type} {name}")


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_each_right_is_needed_and_all_are_enough(kind: type[Any]) -> None:
    request = example_of(kind)
    acls = [
        Acl("anna", "allow", operation, resource_type, name)
        for operation, resource_type, name in needed_by(request, NAMES)
    ]
    check_rights(AclTable(acls), "anna", "h", request, NAMES)
    for acl in dict.fromkeys(acls):
        rest = AclTable(other for other in acls if other != acl)
        with pytest.raises(AuthorizationError):
            check_rights(rest, "anna", "h", request, NAMES)
        denied = Acl("*", "deny", "all", acl.resource_type, acl.name)
        with pytest.raises(AuthorizationError, match="an ACL says: deny"):
            check_rights(AclTable([*acls, denied]), "anna", "h", request, NAMES)


def needs(request: messages.AnyRequest) -> list[tuple[str, str, str]]:
    return [tuple(needed) for needed in needed_by(request, NAMES)]


def commit(*topic_ids: str) -> messages.CommitOffsets:
    offsets = [messages.OffsetCommit(topic_id, 0, 1, None, "") for topic_id in topic_ids]
    return messages.CommitOffsets("O", 0, 1, "billing", "m", 1, 1, offsets)


def test_a_commit_needs_each_topic_that_it_names_once() -> None:
    assert needs(commit("T", "U", "T")) == [
        ("read", "group", "billing"),
        ("read", "topic", "topic of T"),
        ("read", "topic", "topic of U"),
    ]


def test_a_take_does_not_launder_a_topic() -> None:
    request = messages.Take("T", 0, 1, "Q", "holder", 1, 1, 0)
    only_the_queue = AclTable([Acl("anna", "allow", "read", "queue", "queue of Q")])
    with pytest.raises(AuthorizationError, match="may not read topic 'topic of T'"):
        check_rights(only_the_queue, "anna", "h", request, NAMES)


@pytest.mark.parametrize(
    ("config", "partitions", "more"),
    [
        ({}, None, []),
        ({"retention": "topic"}, None, []),
        ({"retention": "hold"}, None, [("alter", "topic", "orders")]),
        ({"retention": "delete_done"}, None, [("alter", "topic", "orders")]),
        ({"retention": "hold"}, 3, [("create", "topic", "orders")]),
    ],
)
def test_a_queue_that_holds_or_deletes_records_needs_to_alter_the_topic(
    config: dict[str, Any], partitions: int | None, more: list[tuple[str, str, str]]
) -> None:
    request = messages.CreateQueue(
        name="billing", topic="orders", config=config, partitions=partitions
    )
    assert needs(request) == [
        ("create", "queue", "billing"), ("read", "topic", "orders"), *more,
    ]  # fmt: skip
    if partitions is None:
        altered = needs(messages.AlterQueue(name="billing", config=config))
        assert altered[0] == ("alter", "queue", "billing")
        assert altered[1:] == [(*need[:2], "topic of queue billing") for need in more]


def test_a_move_of_records_needs_to_write_where_they_go() -> None:
    request = messages.MoveQueueRecords("T", 0, 1, "Q", [1], "elsewhere")
    assert needs(request) == [("alter", "queue", "queue of Q"), ("write", "topic", "elsewhere")]


def test_what_does_not_exist_is_left_to_the_handler_to_say() -> None:
    request = messages.Fetch("T", 0, 1, 0, None, 1, 0)
    assert list(needed_by(request, NothingExists())) == []
    named = messages.DeleteTopic("nowhere")
    with pytest.raises(AuthorizationError):
        check_rights(AclTable(), "anna", "h", named, NothingExists())


def test_lists_show_what_a_principal_may_describe() -> None:
    acls = AclTable([Acl("anna", "allow", "write", "topic", "orders", "prefixed")])
    shown = [
        name
        for name in ("orders", "orders.eu", "billing")
        if may_describe(acls, "anna", "h", "topic", name)
    ]
    assert shown == ["orders", "orders.eu"]
    assert may_describe(acls, None, "h", "topic", "billing")


@pytest.mark.parametrize(
    "request_of",
    [
        lambda name: messages.CreateToken(name, "1", VERIFIERS),
        lambda name: messages.RevokeToken(name, "1"),
        lambda name: messages.DescribePrincipals([name]),
        lambda name: messages.DescribeAcls(AclFilter(principal=name)),
        lambda name: messages.CheckAcl(name, "read", "topic", "orders"),
    ],
)
def test_a_principal_may_look_at_itself_and_rotate_its_own_tokens_unless_a_rule_denies_it(
    request_of: Any,
) -> None:
    check_rights(AclTable(), "anna", "h", request_of("anna"), NAMES)
    with pytest.raises(AuthorizationError, match="principal 'anna': no ACL allows it"):
        check_rights(AclTable(), "ben", "h", request_of("anna"), NAMES)
    denied = AclTable([Acl("anna", "deny", "all", "principal", "anna")])
    with pytest.raises(AuthorizationError, match="an ACL says: deny"):
        check_rights(denied, "anna", "h", request_of("anna"), NAMES)


@pytest.mark.parametrize(
    "request_",
    [
        messages.DeletePrincipal("anna"),
        messages.CreatePrincipal("anna", b"0" * 16),
        messages.CreateAcls([Acl("anna", "allow", "read", "topic", "orders")]),
        messages.DeleteAcls([Acl("anna", "deny", "read", "topic", "orders")]),
    ],
)
def test_a_principal_gives_itself_no_rights(request_: messages.AnyRequest) -> None:
    with pytest.raises(AuthorizationError):
        check_rights(AclTable(), "anna", "h", request_, NAMES)

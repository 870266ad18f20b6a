"""The rights that requests need: each request of clients, as a stranger and as who has them."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest

from rayq import messages
from rayq.core.access.acls import AclTable
from rayq.core.access.rights import Needed, View, check_rights, may_describe, needed_by
from rayq.core.access.unknown import unknown_partition, unknown_queue, unknown_topic
from rayq.core.cluster.access_changes import OPERATIONS
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.errors import AuthorizationError, RayqError
from rayq.messages.access import TokenVerifiers
from rayq.messages.acls import Acl, AclFilter
from rayq.messages.transaction_ids import make_family
from tests.wire.recorded_messages import example_of

CLIENT_REQUESTS = [
    kind
    for kind in messages.REQUESTS.values()
    if kind.sent_by_clients and kind.__module__.startswith("rayq.")
]
FREE = {
    "Metadata",  # It shows what the principal may describe.
    "DescribeQueues",
    "DescribeQuotas",
    "ListGroups",
    "ListTransactions",
    "ConfirmMetadata",
    "EnsureOffsetsTopic",
    "EnsureTransactionsTopic",
}
"""Requests that each principal may send."""


OWN_TOPIC_ID = "id of rayq's own"


class EverythingExists:
    """Metadata in which each id has a name."""

    def topic_name(self, topic_id: str) -> str | None:
        return OFFSETS_TOPIC if topic_id == OWN_TOPIC_ID else f"topic of {topic_id}"

    other_topic_name = topic_name

    def queue_name(self, queue_id: str) -> str | None:
        return f"queue of {queue_id}"

    def topic_of_queue(self, name: str) -> str | None:
        return f"topic of queue {name}"

    def topic_exists(self, name: str) -> bool:
        return True

    def pinned_topic_id(self, pin_id: str) -> str | None:
        return f"topic id of {pin_id}"


class NothingExists:
    """Metadata without topics, queues and pins."""

    def topic_name(self, topic_id: str) -> str | None:
        return None

    other_topic_name = queue_name = topic_of_queue = pinned_topic_id = topic_name

    def topic_exists(self, name: str) -> bool:
        return False


class OnlyTopicsExist(EverythingExists):
    """Metadata without queues."""

    def queue_name(self, queue_id: str) -> str | None:
        return None


NAMES = EverythingExists()
VERIFIERS = TokenVerifiers(b"a" * 32, b"b" * 32, b"c" * 64, b"d" * 64)


def request_of(kind: type[Any]) -> Any:
    """An example of a request. A coordinator is asked beside one of rayq's own topics."""
    request = example_of(kind)
    if isinstance(request, messages.ToCoordinator):
        return msgspec.structs.replace(request, topic_id=OWN_TOPIC_ID)
    return request


def refused(
    request: messages.AnyRequest, *acls: Acl, names: Any = NAMES, host: str = "h"
) -> RayqError:
    with pytest.raises(RayqError) as caught:
        check_rights(AclTable(acls), "anna", host, request, names)
    return caught.value


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_each_request_of_clients_declares_its_rights(kind: type[messages.AnyRequest]) -> None:
    assert kind.rights is not None
    for right in kind.rights:
        assert right.operation in OPERATIONS[right.resource_type]
        assert (right.field in kind.__struct_fields__) != (right.resource_type == "cluster")


def test_requests_that_only_read_are_checked_again_when_they_are_answered() -> None:
    """Each other request is a change, which its sender has to hear of."""
    others = {kind for kind in CLIENT_REQUESTS if not kind.checked_when_answered}
    to_controller = {kind for kind in others if issubclass(kind, messages.ToController)}
    assert others - to_controller == {
        messages.AbortTransaction,
        messages.AbortUnknownTransaction,
        messages.AllocateProducerId,
        messages.CommitOffsets,
        messages.DeleteGroup,
        messages.DeleteRecords,
        messages.EndTransaction,
        messages.InitProducer,
        messages.MoveQueueRecords,
        messages.Produce,
        messages.PurgeQueue,
        messages.SealPartition,
        messages.SealTransaction,
        messages.SetGroupOffsets,
        messages.Settle,
        messages.TouchTransaction,
    }


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_a_stranger_is_refused_and_told_the_command_that_would_allow_it(kind: type[Any]) -> None:
    request = request_of(kind)
    needed = list(needed_by(request, NAMES))
    if kind.__name__ in FREE or (kind is messages.UnpinSnapshot and not needed):
        assert needed == []
        check_rights(AclTable(), "anna", "h", request, NAMES)
        return
    assert needed
    error = refused(request)
    if type(needed[0]) is Needed and not is_at_hidden_place(request):
        operation, resource_type, name = needed[0]
        assert isinstance(error, AuthorizationError)
        command = shlex.join(("rayq", "acl", "add", "anna", operation, resource_type, name))
        assert str(error).endswith(command)


def is_at_hidden_place(request: messages.AnyRequest) -> bool:
    return isinstance(request, messages.ToPartition) and request.topic_id != OWN_TOPIC_ID


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_a_refusal_has_no_name_that_the_request_does_not_have(kind: type[Any]) -> None:
    request = request_of(kind)
    said = msgspec.json.encode(request).decode()
    for name in {need.name for need in needed_by(request, NAMES)} - {"cluster"}:
        if name not in said:
            assert name not in str(refused(request))


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_an_id_of_what_is_hidden_is_refused_as_an_id_that_nothing_has(kind: type[Any]) -> None:
    request = request_of(kind)
    all_but_topics = [
        Acl("anna", "allow", "all", resource_type, name)
        for resource_type, name in (("cluster", "cluster"), ("queue", "*"), ("group", "*"))
    ]
    if is_at_hidden_place(request):
        expected = unknown_partition(request.topic_id, request.partition)
    elif kind is messages.PinSnapshot:
        expected = unknown_topic(request.topic_id)
    else:
        return
    error = refused(request, *all_but_topics)
    assert (type(error), str(error)) == (type(expected), str(expected))
    error = refused(request, *all_but_topics, names=NothingExists())
    assert (type(error), str(error)) == (type(expected), str(expected))


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_each_right_is_needed_and_all_are_enough(kind: type[Any]) -> None:
    request = request_of(kind)
    acls = [
        Acl("anna", "allow", operation, resource_type, name)
        for operation, resource_type, name in needed_by(request, NAMES)
    ]
    if is_at_hidden_place(request):  # Who may not know of the topic knows of no partition.
        topic = NAMES.topic_name(request.topic_id)
        assert topic is not None
        if not any(acl.resource_type == "topic" and acl.name == topic for acl in acls):
            refused(request, *acls)
            acls.append(Acl("anna", "allow", "describe", "topic", topic))
    check_rights(AclTable(acls), "anna", "h", request, NAMES)
    for acl in dict.fromkeys(acls):
        refused(request, *(other for other in acls if other != acl))
        denied = Acl("*", "deny", "all", acl.resource_type, acl.name)
        refused(request, *acls, denied)


def needs(request: messages.AnyRequest) -> list[tuple[str, str, str]]:
    return [tuple(needed) for needed in needed_by(request, NAMES)]


def commit(*topic_ids: str) -> messages.CommitOffsets:
    offsets = [messages.OffsetCommit(topic_id, 0, 1, None, "") for topic_id in topic_ids]
    return messages.CommitOffsets(OWN_TOPIC_ID, 0, 1, "billing", "m", 1, 1, offsets)


def test_a_commit_needs_each_topic_that_it_names_once() -> None:
    assert needs(commit("T", "U", "T")) == [
        ("read", "group", "billing"),
        ("read", "topic", "topic of T"),
        ("read", "topic", "topic of U"),
    ]


def test_a_take_does_not_launder_a_topic() -> None:
    request = messages.Take("T", 0, 1, "Q", "holder", 1, 1, 0)
    only_the_queue = Acl("anna", "allow", "read", "queue", "queue of Q")
    assert str(refused(request, only_the_queue)) == str(unknown_partition("T", 0))
    seen = Acl("anna", "allow", "describe", "topic", "topic of T")
    assert "may not read topic 'topic of T'" in str(refused(request, only_the_queue, seen))


def test_a_queue_that_is_hidden_is_refused_as_one_that_does_not_exist() -> None:
    request = messages.Take("T", 0, 1, "Q", "holder", 1, 1, 0)
    topic = Acl("anna", "allow", "read", "topic", "topic of T")
    hidden = refused(request, topic)
    every_queue = Acl("anna", "allow", "all", "queue", "*")
    missing = refused(request, topic, every_queue, names=OnlyTopicsExist())
    assert str(hidden) == str(missing) == str(unknown_queue("Q"))
    assert type(hidden) is type(missing)


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
        name="billing",
        topic="orders",
        config={**config, "dead_letters": "discard"},
        partitions=partitions,
    )
    assert needs(request) == [
        ("create", "queue", "billing"), ("read", "topic", "orders"), *more,
    ]  # fmt: skip
    if partitions is None:
        altered = needs(messages.AlterQueue(name="billing", config=config))
        assert altered[0] == ("alter", "queue", "billing")
        assert altered[1:] == [(*need[:2], "topic of queue billing") for need in more]


@pytest.mark.parametrize(
    ("config", "names", "on_creation", "on_change"),
    [
        ({}, NAMES, True, False),
        ({"dead_letters": "keep"}, NAMES, True, True),
        ({"dead.letters": "keep"}, NAMES, True, True),
        ({"dead.letters": "discard"}, NAMES, False, False),
        ({"dead_letters": "stay"}, NAMES, False, False),
        ({"dead_letters": "keep"}, NothingExists(), False, False),
    ],
)
def test_dead_letters_go_into_a_topic_that_exists_only_with_the_right_to_write_there(
    config: dict[str, Any], names: Any, on_creation: bool, on_change: bool
) -> None:
    """Without that right the queue's leaders would write into another's topic because somebody
    named a queue so."""
    write = Needed("write", "topic", "billing.dead")
    create = messages.CreateQueue(name="billing", topic="orders", config=config)
    assert (write in needed_by(create, names)) == on_creation
    alter = messages.AlterQueue(name="billing", config=config)
    assert (write in needed_by(alter, names)) == on_change


def test_aborting_the_transaction_of_an_id_needs_the_right_to_alter_the_id() -> None:
    family = make_family(0, 1)
    named = messages.AbortTransaction("T", 0, 1, family, 2, "payments")
    assert needs(named) == [("alter", "transactional_id", "payments")]
    any_id = messages.AbortTransaction("T", 0, 1, family, 2)
    assert needs(any_id) == [("alter", "cluster", "cluster")]


@pytest.mark.parametrize(
    ("to_topic", "more"),
    [
        (None, []),
        ("", [("read", "topic", "topic of T")]),
        ("elsewhere", [("read", "topic", "topic of T"), ("write", "topic", "elsewhere")]),
    ],
)
def test_a_move_needs_to_read_the_records_and_to_write_where_they_go(
    to_topic: str | None, more: list[tuple[str, str, str]]
) -> None:
    """A principal that moves records could read them where they go: a queue launders no topic."""
    request = messages.MoveQueueRecords("T", 0, 1, "Q", [1], to_topic)
    assert needs(request) == [("alter", "queue", "queue of Q"), *more]


def test_a_name_is_refused_whether_it_exists_or_not() -> None:
    named = messages.DeleteTopic("nowhere")
    assert str(refused(named)) == str(refused(named, names=NothingExists()))
    assert isinstance(refused(named), AuthorizationError)


@pytest.mark.parametrize(
    ("request_", "allowed_by"),
    [
        (messages.DescribeReplica(OWN_TOPIC_ID, 0), "describe"),
        (messages.Fetch(OWN_TOPIC_ID, 0, 1, 0, None, 1, 0), "describe"),
        (messages.AlterTopicConfig(name=OFFSETS_TOPIC, changes={}), "alter"),
        (messages.Produce(OWN_TOPIC_ID, 0, 1, -1, 1), None),
        (messages.DeleteTopic(name=OFFSETS_TOPIC), None),
        (messages.CreateTopic(name="__mine", partitions=1, replication_factor=1, config={}), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_acl_of_topics_opens_the_topics_that_are_rayqs_own(
    request_: messages.AnyRequest, allowed_by: Any
) -> None:
    for acl in (
        Acl("anna", "allow", "all", "topic", "*"),
        Acl("anna", "allow", "all", "topic", OFFSETS_TOPIC),
        Acl("anna", "allow", "all", "topic", "__", "prefixed"),
    ):
        assert isinstance(refused(request_, acl), AuthorizationError)
    of_cluster = [
        Acl("anna", "allow", operation, "cluster", "cluster") for operation in ("describe", "alter")
    ]
    if allowed_by is None:
        assert "only servers do" in str(refused(request_, *of_cluster))
        return
    told = str(refused(request_))
    assert f"rayq's own, for which one has to {allowed_by} the cluster" in told
    assert f"rayq acl add anna {allowed_by} cluster cluster" in told
    needed = [acl for acl in of_cluster if acl.operation == allowed_by]
    check_rights(AclTable(needed), "anna", "h", request_, NAMES)


def test_a_member_may_leave_and_give_up_what_it_may_no_longer_read() -> None:
    in_group = Acl("anna", "allow", "read", "group", "g")

    def heartbeat(epoch: int, topics: list[str]) -> messages.GroupHeartbeat:
        return messages.GroupHeartbeat(
            OWN_TOPIC_ID, 0, 1, "g", "m", epoch, None, "", topics, None, "uniform", 1, 1,
            [("T", 0)], 0,
        )  # fmt: skip

    for request in (heartbeat(-1, ["orders"]), heartbeat(-2, ["orders"]), heartbeat(3, [])):
        check_rights(AclTable([in_group]), "anna", "h", request, NAMES)
    assert "may not read topic 'orders'" in str(refused(heartbeat(3, ["orders"]), in_group))


def test_positions_of_hidden_topics_are_neither_told_nor_set() -> None:
    group = Acl("anna", "allow", "all", "group", "g")
    told = messages.FetchCommitted(OWN_TOPIC_ID, 0, 1, "g", [("T", 0)])
    assert "topic of T" not in str(refused(told, group))
    assert "topic of T" not in str(refused(commit("T"), group))
    everything = messages.FetchCommitted(OWN_TOPIC_ID, 0, 1, "g", None)
    check_rights(AclTable([group]), "anna", "h", everything, NAMES)


def test_a_view_shows_what_may_be_described() -> None:
    acls = AclTable([Acl("anna", "allow", "read", "topic", "topic of T", host="10.0.0.1")])
    view = View(acls, "anna", "10.0.0.1", NAMES)
    assert view.shows("topic", "topic of T") and view.shows_topic_id("T")
    assert not view.shows("topic", "topic of U") and not view.shows_topic_id("U")
    assert not View(acls, "anna", "10.0.0.2", NAMES).shows_topic_id("T")
    assert View(acls, "anna", "h", NothingExists()).shows_topic_id("gone")
    assert str(view.refusal("topic", "x")).endswith("rayq acl add anna describe topic x")


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
    "request_about",
    [
        lambda name: messages.CreateToken(name, "1", VERIFIERS),
        lambda name: messages.RevokeToken(name, "1"),
        lambda name: messages.DescribePrincipals([name]),
        lambda name: messages.DescribeAcls(AclFilter(principal=name)),
        lambda name: messages.CheckAcl(name, "read", "topic", "orders"),
    ],
)
def test_a_principal_may_look_at_itself_and_rotate_its_own_tokens_unless_a_rule_denies_it(
    request_about: Any,
) -> None:
    check_rights(AclTable(), "anna", "h", request_about("anna"), NAMES)
    with pytest.raises(AuthorizationError, match="principal 'anna': no ACL allows it"):
        check_rights(AclTable(), "ben", "h", request_about("anna"), NAMES)
    denied = AclTable([Acl("anna", "deny", "all", "principal", "anna")])
    with pytest.raises(AuthorizationError, match="an ACL says: deny.*rayq acl remove") as caught:
        check_rights(denied, "anna", "h", request_about("anna"), NAMES)
    assert "rayq acl add" not in str(caught.value), "a rule that denies wins over it"


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


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("x; reboot", "rayq acl add anna delete topic 'x; reboot'"),
        ("$(reboot)", "rayq acl add anna delete topic '$(reboot)'"),
        ("it's", "rayq acl add anna delete topic 'it'\"'\"'s'"),
        ("", "rayq acl add anna delete topic ''"),
        ("--deny", "rayq acl add anna delete topic -- --deny"),
        ("a\nrayq acl add anna all cluster", "administrator of the cluster can allow it."),
        ("\x1b[2J", "administrator of the cluster can allow it."),
    ],
)
def test_the_command_in_an_error_is_safe_to_run_whatever_the_name(name: str, end: str) -> None:
    told = str(refused(messages.DeleteTopic(name)))
    assert told.endswith(end)
    assert told.isprintable()


def test_a_long_name_makes_no_long_error() -> None:
    assert len(str(refused(messages.DeleteTopic("x" * 65_536)))) < 1_000
    assert len(str(refused(messages.DeleteTopic("__" + "x" * 65_536)))) < 1_000


def test_a_refusal_that_hides_a_name_has_it_for_the_audit() -> None:
    for request, name in (
        (messages.Fetch("T", 0, 1, 0, None, 1, 0), "topic of T"),
        (messages.DescribeQueue("T", 0, 1, "Q"), "topic of T"),
        (commit("T"), "topic of T"),
    ):
        error = refused(request, Acl("anna", "allow", "all", "group", "billing"))
        assert isinstance(error.__cause__, AuthorizationError)
        assert name in str(error.__cause__) and name not in str(error)
    missing = refused(messages.Fetch("T", 0, 1, 0, None, 1, 0), names=NothingExists())
    assert missing.__cause__ is None

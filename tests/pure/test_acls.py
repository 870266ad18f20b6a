"""The decisions of ACLs: equal to a naive oracle, and never open by mistake."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.access.acls import AclTable, AclVerdict, passes
from rayq.messages.acls import (
    Acl,
    AclFilter,
    Operation,
    PatternType,
    PermissionType,
    ResourceType,
)

NAMES = ["orders", "orders.eu", "orders.eu.dead", "o", "billing", "*"]
HOSTS = ["*", "10.0.0.1", "10.0.0.2"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
ASKED = st.tuples(
    st.sampled_from(["anna", "ben"]),
    st.sampled_from([operation for operation in OPERATIONS if operation != "all"]),
    st.sampled_from(["topic", "group"]),
    st.sampled_from(NAMES[:-1]),
    st.sampled_from(HOSTS[1:]),
)
ACLS = st.builds(
    Acl,
    principal=st.sampled_from(["anna", "ben", "*"]),
    permission=st.sampled_from(get_args(PermissionType)),
    operation=st.sampled_from(OPERATIONS),
    resource_type=st.sampled_from(["topic", "group"]),
    name=st.sampled_from(NAMES),
    pattern=st.sampled_from(get_args(PatternType)),
    host=st.sampled_from(HOSTS),
)
Asked = tuple[str, Operation, ResourceType, str, str]


def oracle(acls: list[Acl], asked: Asked) -> bool:
    """The rules of Kafka's page, word for word."""
    principal, operation, resource_type, name, host = asked

    def matches(acl: Acl) -> bool:
        is_name = (
            name.startswith(acl.name) if acl.pattern == "prefixed" else acl.name in (name, "*")
        )
        return (
            acl.principal in (principal, "*")
            and acl.resource_type == resource_type
            and is_name
            and acl.host in (host, "*")
        )

    matching = [acl for acl in acls if matches(acl)]
    if any(a.permission == "deny" and a.operation in (operation, "all") for a in matching):
        return False
    allowing = {operation, "all"}
    if operation == "describe":
        allowing |= {"read", "write", "delete", "alter"}
    if operation == "describe_configs":
        allowing |= {"alter_configs"}
    return any(a.permission == "allow" and a.operation in allowing for a in matching)


@given(st.lists(ACLS, max_size=12), ASKED)
def test_a_table_decides_as_the_rules_say(acls: list[Acl], asked: Asked) -> None:
    verdict = AclTable(acls).decide(*asked)
    assert verdict.is_allowed == oracle(acls, asked)
    if verdict.acl is not None:
        assert verdict.acl in acls
        assert (verdict.acl.permission == "allow") == verdict.is_allowed


@given(st.lists(ACLS, max_size=12), st.lists(st.integers(0, 11), max_size=12), ASKED)
def test_a_table_after_removals_is_that_of_the_rest(
    acls: list[Acl], removed: list[int], asked: Asked
) -> None:
    table = AclTable(acls)
    gone = [acls[number] for number in removed if number < len(acls)]
    for acl in gone:
        table.remove(acl)
    rest = [acl for acl in dict.fromkeys(acls) if acl not in gone]
    assert list(table) == rest and len(table) == len(rest)
    assert table.decide(*asked).is_allowed == oracle(rest, asked)
    for acl in gone:
        table.add(acl)
    assert table.decide(*asked).is_allowed == oracle(acls, asked)


@given(st.lists(ACLS, max_size=12), ACLS, ASKED)
def test_no_removal_of_an_allow_and_no_new_deny_opens_anything(
    acls: list[Acl], changed: Acl, asked: Asked
) -> None:
    table = AclTable(acls)
    before = table.decide(*asked).is_allowed
    if changed.permission == "deny":
        table.add(changed)
    else:
        table.remove(changed)
    assert before or not table.decide(*asked).is_allowed


def test_without_any_rule_everything_is_denied() -> None:
    assert AclTable().decide("anna", "read", "topic", "orders", "h") == AclVerdict(False, None)


@pytest.mark.parametrize("operation", ["read", "write", "delete", "alter"])
def test_who_may_do_something_may_describe_it(operation: Operation) -> None:
    table = AclTable([Acl("anna", "allow", operation, "topic", "orders")])
    assert table.decide("anna", "describe", "topic", "orders", "h").is_allowed
    assert not table.decide("anna", "describe_configs", "topic", "orders", "h").is_allowed
    assert not table.decide("ben", "describe", "topic", "orders", "h").is_allowed


@given(ACLS, ASKED)
def test_the_rules_that_match_a_name_are_those_that_decide_about_it(acl: Acl, asked: Asked) -> None:
    wanted = AclFilter(resource_type=asked[2], name=asked[3], pattern="match")
    allow = msgspec.structs.replace(
        acl, principal=asked[0], permission="allow", operation=asked[1], host="*"
    )
    assert passes(acl, wanted) == AclTable([allow]).decide(*asked).is_allowed


@given(ACLS)
def test_a_filter_passes_the_rules_that_have_its_values(acl: Acl) -> None:
    assert passes(acl, AclFilter())
    assert passes(acl, AclFilter(**msgspec.structs.asdict(acl)))
    for field, value in msgspec.structs.asdict(acl).items():
        others = (AclFilter(**{field: other}) for other in OTHER_VALUES[field] if other != value)
        assert passes(acl, AclFilter(**{field: value}))
        assert not any(passes(acl, other) for other in others)


OTHER_VALUES = {
    "principal": ["anna", "*"],
    "permission": get_args(PermissionType),
    "operation": OPERATIONS,
    "resource_type": ["topic", "group"],
    "name": NAMES,
    "pattern": get_args(PatternType),
    "host": HOSTS,
}


def test_a_rule_says_what_it_allows() -> None:
    said = {
        "allow 'anna' read on topic 'orders'": Acl("anna", "allow", "read", "topic", "orders"),
        "deny '*' all on each topic": Acl("*", "deny", "all", "topic", "*"),
        "allow 'anna' write on each queue that begins with 'mail.' from 10.0.0.1": Acl(
            "anna", "allow", "write", "queue", "mail.", "prefixed", "10.0.0.1"
        ),
    }
    assert {str(acl): acl for acl in said.values()} == said

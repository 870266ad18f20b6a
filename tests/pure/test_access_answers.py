"""A broker's answers about principals and ACLs: those that the asking principal may describe, in
pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from rayq import messages
from rayq.actors.broker.access_answers import AccessAnswers
from rayq.core.access.acls import passes
from rayq.core.cluster.records import AclCreated, PrincipalCreated, TokenCreated
from rayq.core.cluster.state import ClusterState
from rayq.errors import InvalidRequestError, UnknownPrincipalError
from rayq.messages.access import TokenVerifiers
from rayq.messages.acls import Acl, AclFilter

T = TypeVar("T")
SALT = b"0123456789abcdef"
VERIFIERS = TokenVerifiers(b"a" * 32, b"b" * 32, b"c" * 64, b"d" * 64)
NO_PAYLOAD = memoryview(b"")
ACLS = [
    Acl("anna", "allow", "read", "topic", "orders"),
    Acl("anna", "allow", "describe", "principal", "ben"),
    Acl("ben", "allow", "write", "topic", "pay", "prefixed"),
    Acl("carl", "deny", "all", "topic", "orders"),
    Acl("*", "deny", "write", "topic", "audit"),
]


class Room:
    @contextlib.asynccontextmanager
    async def take(self, _size: int) -> AsyncIterator[None]:
        yield


def peer(principal: str | None) -> Any:
    return SimpleNamespace(principal=principal, host="10.0.0.1", room=Room())


@pytest.fixture
def answers() -> AccessAnswers:
    state = ClusterState()
    for name in ("carl", "ben", "anna"):
        state.replay(PrincipalCreated(name, SALT, 1))
    state.replay(TokenCreated("ben", "01", VERIFIERS, 2, None))
    state.replay(TokenCreated("ben", "02", VERIFIERS, 3, 4))
    for acl in ACLS:
        state.replay(AclCreated(acl))

    async def wait(_version: int, _wait_ms: int) -> None: ...

    return AccessAnswers(cast(Any, SimpleNamespace(state=state, version=7, wait_for_version=wait)))


def told(answer: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(answer)


def names_told(answers: AccessAnswers, principal: str | None, **fields: Any) -> list[str]:
    request = messages.DescribePrincipals(**fields)
    told_ = told(answers.principals(peer(principal), request, NO_PAYLOAD))
    assert told_.version == 7
    return [found.name for found in told_.principals]


def test_a_list_of_principals_has_those_that_one_may_describe(answers: AccessAnswers) -> None:
    assert names_told(answers, None) == ["anna", "ben", "carl"]
    assert names_told(answers, "anna") == ["anna", "ben"]
    assert names_told(answers, "ben") == ["ben"]
    assert names_told(answers, "nobody") == []
    assert names_told(answers, None, names=["carl", "zoe"]) == ["carl"]
    assert names_told(answers, "anna", names=["carl"]) == []


def test_a_principal_is_told_with_its_tokens_and_nothing_that_proves_them(
    answers: AccessAnswers,
) -> None:
    request = messages.DescribePrincipals(["ben"])
    [ben] = told(answers.principals(peer(None), request, NO_PAYLOAD)).principals
    assert ben == messages.PrincipalMetadata(
        "ben", SALT, 1, [messages.TokenMetadata("01", 2, None), messages.TokenMetadata("02", 3, 4)]
    )


def acls_told(answers: AccessAnswers, principal: str | None, wanted: AclFilter) -> list[Acl]:
    request = messages.DescribeAcls(wanted)
    return told(answers.acls(peer(principal), request, NO_PAYLOAD)).acls


def test_a_list_of_acls_has_those_of_principals_that_one_may_describe(
    answers: AccessAnswers,
) -> None:
    everything = AclFilter()
    assert sorted(map(str, acls_told(answers, None, everything))) == sorted(map(str, ACLS))
    assert {acl.principal for acl in acls_told(answers, "anna", everything)} == {"anna", "ben"}
    assert {acl.principal for acl in acls_told(answers, "ben", everything)} == {"ben"}
    assert acls_told(answers, "nobody", everything) == []


def test_acls_are_found_by_a_filter(answers: AccessAnswers) -> None:
    for wanted in (
        AclFilter(principal="anna"),
        AclFilter(resource_type="topic", name="payments", pattern="match"),
        AclFilter(permission="deny"),
    ):
        found = acls_told(answers, None, wanted)
        assert set(found) == {acl for acl in ACLS if passes(acl, wanted)} != set()


def test_long_lists_come_in_pages(
    answers: AccessAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PRINCIPALS_PAGE", 2)
    monkeypatch.setattr(messages, "ACLS_PAGE", 2)
    first = told(answers.principals(peer(None), messages.DescribePrincipals(), NO_PAYLOAD))
    assert first.next_after == "ben"
    assert names_told(answers, None, after="ben") == ["carl"]
    found: list[Acl] = []
    after: Acl | None = None
    for _ in range(3):
        request = messages.DescribeAcls(AclFilter(), after=after)
        page = told(answers.acls(peer(None), request, NO_PAYLOAD))
        found += page.acls
        after = page.next_after
    assert after is None
    assert len(found) == len(ACLS) and set(found) == set(ACLS)


def check(answers: AccessAnswers, *asked: Any) -> tuple[bool, Acl | None]:
    told_ = told(answers.check(peer(None), messages.CheckAcl(*asked), NO_PAYLOAD))
    return told_.is_allowed, told_.acl


def test_a_check_says_which_rule_decides(answers: AccessAnswers) -> None:
    assert check(answers, "anna", "read", "topic", "orders") == (True, ACLS[0])
    assert check(answers, "ben", "describe", "topic", "payments") == (True, ACLS[2])
    assert check(answers, "carl", "read", "topic", "orders") == (False, ACLS[3])
    assert check(answers, "ben", "write", "topic", "audit") == (False, ACLS[4])
    assert check(answers, "ben", "read", "topic", "orders") == (False, None)
    assert check(answers, "ben", "alter", "principal", "ben") == (True, None)
    assert check(answers, "superuser", "write", "topic", "audit") == (True, None)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (("zoe", "read", "topic", "orders"), UnknownPrincipalError),
        (("anna", "write", "group", "g"), InvalidRequestError),
        (("anna", "all", "topic", "orders"), InvalidRequestError),
    ],
)
def test_a_check_that_could_only_mislead_is_refused(
    answers: AccessAnswers, asked: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        check(answers, *asked)

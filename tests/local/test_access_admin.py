"""Principals, tokens and ACLs by the admin, over both faces, against real servers."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rayq
from rayq import Acl, AclVerdict
from rayq.client.client import Client
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    InvalidRequestError,
    PrincipalExistsError,
    RayqError,
    UnknownPrincipalError,
    UnknownTokenError,
)
from rayq.messages import CreateToken, RevokeToken
from rayq.testing import LocalCluster
from rayq.wire.tokens import principal_token
from tests.client.faces import Faces

_numbers = itertools.count(1)
DAY_MS = 86_400_000


@pytest.fixture(params=["threads", "async"])
def admin(request: pytest.FixtureRequest, cluster: LocalCluster) -> Iterator[Any]:
    faces = Faces(cluster, is_async=request.param == "async")
    made = faces.admin()
    yield made
    if faces.is_async:
        made.close()
    faces.close()


@pytest.fixture
def anna(admin: Any) -> Iterator[str]:
    name = f"admin-anna-{next(_numbers)}"
    admin.create_principal(name)
    yield name
    admin.create_principal(name, exist_ok=True)
    admin.delete_principal(name)


def test_a_principal_is_created_described_and_deleted(admin: Any, anna: str) -> None:
    with pytest.raises(PrincipalExistsError, match=anna):
        admin.create_principal(anna)
    admin.create_principal(anna, exist_ok=True)
    assert anna in admin.list_principals()
    described = admin.describe_principal(anna)
    assert (described.name, described.tokens) == (anna, [])
    assert described in admin.describe_principals()
    admin.delete_principal(anna)
    assert anna not in admin.list_principals()
    for call in (admin.describe_principal, admin.delete_principal, admin.create_token):
        with pytest.raises(UnknownPrincipalError, match=f"There is no principal '{anna}'"):
            call(anna)


def test_a_token_is_returned_once_and_expires_in_time(admin: Any, anna: str) -> None:
    forever = admin.create_token(anna)
    a_day = admin.create_token(anna, expires_in_s=86_400)
    assert principal_token(forever.token).principal == anna
    assert forever.token not in repr(forever) and forever.expires_ms is None
    listed = admin.list_tokens(anna)
    assert [(token.token_id, token.expires_ms) for token in listed] == [
        (forever.token_id, None), (a_day.token_id, a_day.expires_ms),
    ]  # fmt: skip
    assert abs(listed[1].expires_ms - listed[1].created_ms - DAY_MS) < 60_000
    admin.revoke_token(anna, forever.token_id)
    assert [token.token_id for token in admin.list_tokens(anna)] == [a_day.token_id]
    with pytest.raises(UnknownTokenError, match=a_day.token_id):
        admin.revoke_token(anna, forever.token_id)


def test_a_rotation_leaves_the_old_tokens_valid_for_the_overlap(admin: Any, anna: str) -> None:
    old = admin.create_token(anna, expires_in_s=90 * 86_400)
    new = admin.rotate_token(anna)
    first, second = admin.list_tokens(anna)
    assert first.token_id == old.token_id and second.token_id == new.token_id
    assert abs(first.expires_ms - second.created_ms - DAY_MS) < 60_000, "a day of overlap"
    assert abs(second.expires_ms - second.created_ms - 90 * DAY_MS) < 60_000, "as the old one"
    last = admin.rotate_token(anna, overlap_s=0, expires_in_s=math.inf)
    assert [(token.token_id, token.expires_ms) for token in admin.list_tokens(anna)] == [
        (last.token_id, None)
    ]


def test_acls_are_added_found_and_removed(admin: Any, anna: str) -> None:
    reads = Acl(anna, "allow", "read", "topic", "orders")
    all_of_billing = Acl(anna, "allow", "all", "topic", "billing.", "prefixed")
    admin.create_acls([reads, all_of_billing])
    admin.create_acls(reads)
    assert set(admin.list_acls(principal=anna)) == {reads, all_of_billing}
    assert admin.list_acls(principal=anna, operation="read") == [reads]
    matching = admin.list_acls(
        principal=anna, resource_type="topic", name="billing.eu", pattern="match"
    )
    assert matching == [all_of_billing]
    admin.delete_acls(admin.list_acls(principal=anna, operation="read"))
    assert admin.list_acls(principal=anna) == [all_of_billing]
    admin.delete_acls([reads])
    admin.delete_principal(anna)
    admin.create_principal(anna)
    assert admin.list_acls(principal=anna) == [], "a later principal inherits nothing"


def test_a_check_says_which_acl_decides(admin: Any, anna: str) -> None:
    allow = Acl(anna, "allow", "all", "topic", "*")
    deny = Acl(anna, "deny", "write", "topic", "audit", host="10.0.0.1")
    admin.create_acls([allow, deny])
    assert admin.check_acl(anna, "write", "topic", "audit") == AclVerdict(True, allow)
    assert admin.check_acl(anna, "write", "topic", "audit", host="10.0.0.1") == (False, deny)
    assert admin.check_acl(anna, "read", "group", "g") == (False, None)
    assert admin.check_acl(anna, "alter", "cluster") == (False, None)
    assert admin.check_acl("superuser", "alter", "cluster") == (True, None)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda of: of.create_principal(7), TypeError, "name must be a str"),
        (lambda of: of.create_principal("two words"), InvalidRequestError, "not a legal name"),
        (lambda of: of.create_principal("superuser"), InvalidRequestError, "cluster's own token"),
        (lambda of: of.delete_principal("superuser"), InvalidRequestError, "cannot be deleted"),
        (lambda of: of.create_token("anna", expires_in_s=-1), RayqError, "from 0, not -1"),
        (lambda of: of.create_token("anna", expires_in_s=math.nan), RayqError, "from 0, not nan"),
        (lambda of: of.create_token("anna", expires_in_s="1d"), TypeError, "number of seconds"),
        (lambda of: of.rotate_token("anna", overlap_s=None), TypeError, "overlap_s must be a number"),
        (lambda of: of.revoke_token("anna", 1), TypeError, "A token id must be"),
        (lambda of: of.create_acls("anna"), TypeError, "list of rayq.Acl"),
        (lambda of: of.create_acls([("anna", "read")]), TypeError, "must be a rayq.Acl"),
        (
            lambda of: of.create_acls(Acl("anna", "allow", "reed", "topic", "t")),  # type: ignore[arg-type]
            InvalidRequestError,
            "operation='reed'",
        ),
        (
            lambda of: of.create_acls(Acl("anna", "allow", "write", "group", "g")),
            InvalidRequestError,
            "it is one of all, read",
        ),
        (lambda of: of.list_acls(pattern="any"), InvalidRequestError, "Not a valid filter of ACLs"),
        (lambda of: of.check_acl("anna", "all", "topic", "t"), InvalidRequestError, "not a single"),
        (lambda of: of.check_acl("zoe", "read", "topic", "t"), UnknownPrincipalError, "'zoe'"),
        (lambda of: of.check_acl("anna", "read", "topic", host=""), InvalidRequestError, "host"),
    ],
)
def test_a_call_that_can_never_be_right_is_refused_with_a_hint(
    admin: Any, call: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    admin.create_principal("anna", exist_ok=True)
    with pytest.raises(error, match=text):
        call(admin)


def test_a_principal_rotates_its_own_token_and_sees_and_changes_nobody_else(
    cluster: LocalCluster, admin: Any, anna: str
) -> None:
    token = admin.create_token(anna).token
    acl = Acl(anna, "allow", "read", "topic", "t")
    admin.create_acls([acl, Acl("*", "allow", "read", "topic", "for-all")])
    with rayq.connect(cluster.addresses[0], token=token) as connection:
        its = connection.admin
        assert its.list_principals() == [anna]
        assert its.list_acls() == [acl]
        assert its.check_acl(anna, "read", "topic", "t") == (True, acl)
        new = its.rotate_token(anna, overlap_s=3600)
        refused: list[Callable[[], Any]] = [
            lambda: its.describe_principal("somebody"),
            lambda: its.create_token("somebody"),
            lambda: its.list_acls(principal="somebody"),
            lambda: its.check_acl("somebody", "read", "topic", "t"),
            lambda: its.create_acls(Acl(anna, "allow", "alter", "cluster", "cluster")),
            lambda: its.delete_acls(acl),
            lambda: its.create_principal("somebody"),
            lambda: its.delete_principal(anna),
        ]
        for call in refused:
            with pytest.raises(AuthorizationError, match=f"rayq acl add {anna}"):
                call()
    with rayq.connect(cluster.addresses[0], token=new.token) as connection:
        connection.admin.revoke_token(anna, connection.admin.list_tokens(anna)[0].token_id)
        assert [info.token_id for info in connection.admin.list_tokens(anna)] == [new.token_id]
        admin.create_acls(Acl(anna, "deny", "alter", "principal", anna))
        with pytest.raises(AuthorizationError, match="an ACL says: deny"):
            connection.admin.create_token(anna)
    cluster.make_current()


def test_without_the_right_to_see_metrics_the_error_says_so_and_not_that_processes_are_down(
    cluster: LocalCluster, anna: str, admin: Any
) -> None:
    token = admin.create_token(anna).token
    with rayq.connect(cluster.addresses[0], token=token) as connection:
        with pytest.raises(AuthorizationError, match=f"rayq acl add {anna} describe cluster"):
            connection.metrics()
        admin.create_acls(Acl(anna, "allow", "describe", "cluster", "cluster"))
        samples = connection.metrics()
        assert all(sample.value for sample in samples if sample.name == "rayq_process_up")
    cluster.make_current()


def test_a_new_principal_is_known_at_once_to_another_client(cluster: LocalCluster) -> None:
    other = rayq.Cluster(cluster.addresses, cluster._access.key)
    with other:
        for _ in range(10):
            name = f"late-{next(_numbers)}"
            cluster.admin.create_principal(name)
            assert other.admin.describe_principal(name).name == name
            cluster.admin.create_acls(Acl(name, "allow", "read", "topic", "t"))
            assert other.admin.check_acl(name, "read", "group", "g") == (False, None)


def test_all_tokens_end_in_one_step_so_that_a_thief_creates_no_other(
    admin: Any, anna: str, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [admin.create_token(anna) for _ in range(3)]
    stolen = rayq.connect(cluster.addresses[0], token=tokens[-1].token)
    cluster.make_current()
    made: list[Any] = []
    change = Client.change

    async def change_and_thief(self: Client, request: Any, **options: Any) -> Any:
        answer = await change(self, request, **options)
        if isinstance(request, RevokeToken | CreateToken) and not made:
            made.append(None)  # Between the steps of whoever revokes.
            try:
                made[0] = await asyncio.to_thread(stolen.admin.create_token, anna, timeout_s=10)
            except (AuthenticationError, AuthorizationError) as error:
                made[0] = error
        return answer

    monkeypatch.setattr(Client, "change", change_and_thief)
    with stolen:
        stolen.admin.describe_principal(anna)
        assert admin.revoke_tokens(anna) == [token.token_id for token in tokens]
        assert isinstance(made[0], AuthenticationError | AuthorizationError)
    assert admin.list_tokens(anna) == [] and admin.revoke_tokens(anna) == []


def test_a_clock_that_is_ahead_here_delays_no_end_of_tokens(
    admin: Any, anna: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.create_token(anna)
    change, asked = Client.change, []

    async def noting(self: Client, request: Any, **options: Any) -> Any:
        asked.append(request)
        return await change(self, request, **options)

    monkeypatch.setattr(Client, "change", noting)
    last = admin.rotate_token(anna, overlap_s=0)
    [created] = [request for request in asked if isinstance(request, CreateToken)]
    assert created.others_expire_ms == 0, "at once, whatever the time is here"
    assert [token.token_id for token in admin.list_tokens(anna)] == [last.token_id]

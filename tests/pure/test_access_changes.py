"""The controller's decisions about principals, tokens and ACLs."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rayq import messages
from rayq.core.access.rights import check_rights
from rayq.core.cluster import access_changes
from rayq.core.cluster.records import (
    PrincipalCreated,
    TopicCreated,
    decode_records,
    encode_records,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    AuthorizationError,
    InvalidRequestError,
    PrincipalExistsError,
    PrincipalLimitError,
    RayqError,
    UnknownPrincipalError,
    UnknownTokenError,
    UnknownTopicError,
)
from rayq.messages.access import TokenVerifiers
from rayq.messages.acls import SUPERUSER, Acl, Operation, ResourceType
from tests.pure.deciding import decide
from tests.pure.test_cluster_state import apply

SALT = b"0123456789abcdef"
VERIFIERS = TokenVerifiers(b"a" * 32, b"b" * 32, b"c" * 64, b"d" * 64)
READS = Acl("anna", "allow", "read", "topic", "orders")


def change(state: ClusterState, request: messages.AnyRequest, now_ms: int = 100) -> None:
    apply(state, decide(state, request, now_ms=now_ms))


def token(number: int, expires_ms: int | None = None) -> messages.CreateToken:
    return messages.CreateToken("anna", f"{number:016x}", VERIFIERS, expires_ms)


@pytest.fixture
def state() -> ClusterState:
    state = ClusterState()
    change(state, messages.CreatePrincipal("anna", SALT))
    return state


@pytest.mark.parametrize(
    "name",
    ["", "*", "a b", "a\n", "a\0", "zażółć", "a,b", 'a"b', "x" * 250, SUPERUSER],
)
def test_an_illegal_name_is_refused(state: ClusterState, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        decide(state, messages.CreatePrincipal(name, SALT))


@pytest.mark.parametrize(
    "name", ["anna.b-c_d", "anna@example.com", "spiffe://example.com/billing", "x" * 249, "1"]
)
def test_a_name_may_be_an_address_or_a_uri(state: ClusterState, name: str) -> None:
    change(state, messages.CreatePrincipal(name, SALT))
    assert state.principals[name].created.salt == SALT


def test_a_principal_is_created_once(state: ClusterState) -> None:
    with pytest.raises(PrincipalExistsError, match="'anna' exists already"):
        decide(state, messages.CreatePrincipal("anna", SALT))


def test_what_names_nobody_is_refused(state: ClusterState) -> None:
    stranger = Acl("ben", "allow", "read", "topic", "orders")
    for request in (
        messages.DeletePrincipal("ben"),
        messages.CreateToken("ben", "1" * 16, VERIFIERS),
        messages.RevokeToken("ben", "1" * 16),
        messages.CreateAcls([READS, stranger]),
    ):
        with pytest.raises(UnknownPrincipalError, match="There is no principal 'ben'"):
            decide(state, request)
    assert not state.acls
    with pytest.raises(UnknownTokenError, match="it has none"):
        decide(state, messages.RevokeToken("anna", "1" * 16))


def test_the_superuser_cannot_be_deleted_and_takes_no_acl(state: ClusterState) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be deleted"):
        decide(state, messages.DeletePrincipal(SUPERUSER))
    with pytest.raises(InvalidRequestError, match="may do everything"):
        decide(state, messages.CreateAcls([Acl(SUPERUSER, "deny", "read", "topic", "*")]))


@pytest.mark.parametrize("expires_ms", [-1, 0, 99, 100])
def test_a_token_that_has_expired_already_is_refused(
    state: ClusterState, expires_ms: int
) -> None:
    with pytest.raises(InvalidRequestError, match="look at this machine's clock"):
        decide(state, token(1, expires_ms), now_ms=100)


def test_a_principal_has_few_valid_tokens_and_expired_ones_make_room(state: ClusterState) -> None:
    for number in range(access_changes.TOKENS_MAX):
        change(state, token(number, 200 if number % 2 else None))
    with pytest.raises(PrincipalLimitError, match="revoke one of 0000000000000000, "):
        decide(state, token(99))
    with pytest.raises(InvalidRequestError, match="draw another id"):
        decide(state, token(2))
    change(state, token(99), now_ms=200)
    left = list(state.principals["anna"].tokens)
    assert left == [f"{number:016x}" for number in (0, 2, 4, 6, 99)]


def test_a_rotation_has_the_other_tokens_expire_unless_they_do_so_sooner(
    state: ClusterState,
) -> None:
    for number, expires_ms in enumerate((None, 150, 300)):
        change(state, token(number, expires_ms))
    rotated = messages.CreateToken("anna", "new", VERIFIERS, 900, others_expire_ms=200)
    change(state, rotated)
    tokens = state.principals["anna"].tokens
    assert [(token.token_id, token.expires_ms) for token in tokens.values()] == [
        ("0" * 16, 200), ("0" * 15 + "1", 150), ("0" * 15 + "2", 200), ("new", 900),
    ]  # fmt: skip
    replayed = ClusterState()
    for record in state.snapshot():
        replayed.replay(record)
    assert replayed.principals == state.principals


def test_a_rotation_without_overlap_makes_room_at_once(state: ClusterState) -> None:
    for number in range(access_changes.TOKENS_MAX):
        change(state, token(number))
    with pytest.raises(PrincipalLimitError):
        decide(state, messages.CreateToken("anna", "new", VERIFIERS, others_expire_ms=101))
    change(state, messages.CreateToken("anna", "new", VERIFIERS, others_expire_ms=100))
    assert list(state.principals["anna"].tokens) == ["new"]


def test_acls_are_added_once_and_removed_exactly(state: ClusterState) -> None:
    prefixed = Acl("anna", "allow", "read", "topic", "orders", "prefixed")
    change(state, messages.CreateAcls([READS, READS]))
    assert decide(state, messages.CreateAcls([READS])) == []
    assert decide(state, messages.DeleteAcls([prefixed])) == []
    change(state, messages.CreateAcls([prefixed]))
    change(state, messages.DeleteAcls([READS, READS]))
    assert list(state.acls) == [prefixed]


@pytest.mark.parametrize("resource_type", get_args(ResourceType))
def test_an_acl_has_an_operation_that_its_resource_knows(
    state: ClusterState, resource_type: ResourceType
) -> None:
    name = "cluster" if resource_type == "cluster" else "x"
    known = {*access_changes.OPERATIONS[resource_type], "all"}
    for operation in get_args(Operation):
        request = messages.CreateAcls([Acl("anna", "allow", operation, resource_type, name)])
        if operation in known:
            assert len(decide(state, request)) == 1
        else:
            with pytest.raises(InvalidRequestError, match=f"not an operation on a {resource_type}"):
                decide(state, request)


@pytest.mark.parametrize(
    "acl",
    [
        Acl("anna", "allow", "alter", "cluster", "mine"),
        Acl("anna", "allow", "alter", "cluster", "*"),
        Acl("anna", "allow", "alter", "cluster", "cluster", "prefixed"),
    ],
)
def test_there_is_one_cluster_to_name(state: ClusterState, acl: Acl) -> None:
    with pytest.raises(InvalidRequestError, match="names 'cluster', literally"):
        decide(state, messages.CreateAcls([acl]))


@pytest.mark.parametrize("host", ["10.0.0.1", "*", "::1", "2001:db8::1", "fe80::1%eth0"])
def test_a_host_is_an_address_as_servers_see_it(state: ClusterState, host: str) -> None:
    change(state, messages.CreateAcls([Acl("anna", "deny", "read", "topic", "orders", host=host)]))


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("db.example.com", "do not look names up"),
        ("10.0.0.0/8", "do not look names up"),
        ("10.0.0.1:9092", "do not look names up"),
        ("::ffff:10.0.0.1", "'10.0.0.1': write it so"),
        ("2001:DB8:0::1", "'2001:db8::1': write it so"),
    ],
)
def test_a_rule_for_a_host_that_no_client_has_is_refused(
    state: ClusterState, host: str, told: str
) -> None:
    acl = Acl("anna", "deny", "read", "topic", "orders", host=host)
    with pytest.raises(InvalidRequestError, match=re.escape(told)):
        change(state, messages.CreateAcls([acl]))


def test_no_acl_of_topics_is_about_rayqs_own(state: ClusterState) -> None:
    acl = Acl("anna", "allow", "read", "topic", "__consumer_offsets")
    with pytest.raises(InvalidRequestError, match="describe and alter on the cluster"):
        change(state, messages.CreateAcls([acl]))


def test_a_rule_is_kept_for_what_does_not_exist_and_counts_when_it_appears(
    state: ClusterState,
) -> None:
    change(state, messages.CreateAcls([Acl("anna", "allow", "read", "topic", "later")]))
    fetch = messages.Fetch("L", 0, 1, 0, None, 1, 0)
    with pytest.raises(UnknownTopicError):
        check_rights(state.acls, "anna", "10.0.0.1", fetch, state)
    state.replay(TopicCreated("L", "later", {}, 1))
    check_rights(state.acls, "anna", "10.0.0.1", fetch, state)


def test_a_cluster_has_so_many_principals_and_acls(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_changes, "PRINCIPALS_MAX", 1)
    monkeypatch.setattr(access_changes, "ACLS_MAX", 1)
    with pytest.raises(PrincipalLimitError, match="has 1 principals, its limit"):
        decide(state, messages.CreatePrincipal("ben", SALT))
    change(state, messages.CreateAcls([READS]))
    writes = Acl("anna", "allow", "write", "topic", "orders")
    with pytest.raises(PrincipalLimitError, match="has 1 ACLs and may have 1"):
        decide(state, messages.CreateAcls([READS, writes]))


NAMES = st.sampled_from(["anna", "ben", "*", SUPERUSER])
TOKEN_IDS = st.sampled_from(["1" * 16, "2" * 16])
ACLS = st.builds(
    Acl,
    principal=NAMES,
    permission=st.sampled_from(["allow", "deny"]),
    operation=st.sampled_from(get_args(Operation)),
    resource_type=st.sampled_from(["topic", "cluster"]),
    name=st.sampled_from(["orders", "cluster"]),
    pattern=st.sampled_from(["literal", "prefixed"]),
)


class AnyChanges(RuleBasedStateMachine):
    """Requests in any order: each is refused by an error, or leaves a valid state that a snapshot
    has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.now_ms = 0

    def ask(self, request: messages.AnyRequest) -> None:
        try:
            records = decide(self.state, request, now_ms=self.now_ms)
        except RayqError:
            return
        apply(self.state, records)

    @rule(name=NAMES)
    def create_principal(self, name: str) -> None:
        self.ask(messages.CreatePrincipal(name, SALT))

    @rule(name=NAMES)
    def delete_principal(self, name: str) -> None:
        self.ask(messages.DeletePrincipal(name))
        assert name not in self.state.principals

    @rule(name=NAMES, token_id=TOKEN_IDS, lives_ms=st.none() | st.integers(-1, 3))
    def create_token(self, name: str, token_id: str, lives_ms: int | None) -> None:
        expires_ms = None if lives_ms is None else self.now_ms + lives_ms
        self.ask(messages.CreateToken(name, token_id, VERIFIERS, expires_ms))

    @rule(name=NAMES, token_id=TOKEN_IDS)
    def revoke_token(self, name: str, token_id: str) -> None:
        self.ask(messages.RevokeToken(name, token_id))
        known = self.state.principals.get(name)
        assert known is None or token_id not in known.tokens

    @rule(acls=st.lists(ACLS, min_size=1, max_size=3))
    def create_acls(self, acls: list[Acl]) -> None:
        self.ask(messages.CreateAcls(acls))

    @rule(acls=st.lists(ACLS, min_size=1, max_size=3))
    def delete_acls(self, acls: list[Acl]) -> None:
        self.ask(messages.DeleteAcls(acls))
        assert not any(acl in self.state.acls for acl in acls)

    @rule()
    def pass_time(self) -> None:
        self.now_ms += 2

    @invariant()
    def a_snapshot_has_all_of_it(self) -> None:
        self.state.validate()
        copy = ClusterState()
        apply(copy, decode_records(encode_records(self.state.snapshot())))
        assert copy.principals == self.state.principals
        assert list(copy.acls) == list(self.state.acls)


TestAnyChanges = AnyChanges.TestCase
TestAnyChanges.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


def test_the_controller_checks_again_what_a_broker_forwards(state: ClusterState) -> None:
    may_create = Acl("anna", "allow", "create", "topic", "orders", "prefixed")
    change(state, token(1, expires_ms=1_000))
    change(state, messages.CreateAcls([may_create]))

    def check(
        name: str, by: str | None = "anna", token_id: str | None = f"{1:016x}", now_ms: int = 999
    ) -> None:
        request = messages.CreateTopic(name, 1, 1, {})
        key = None if token_id is None else VERIFIERS.stored_key_sha256
        forward = messages.Forward(by, "10.0.0.1", "", token_id, request.api, b"", key)
        access_changes.check_forwarded(state, forward, request, now_ms)

    check("orders.eu")
    check("orders.eu", token_id=None, now_ms=1_000)
    check("billing", by=None, token_id=None)
    with pytest.raises(AuthorizationError, match="no longer valid"):
        check("orders.eu", now_ms=1_000)
    with pytest.raises(AuthorizationError, match="may not create topic 'billing'"):
        check("billing")
    with pytest.raises(AuthorizationError, match="'nobody', or its token, is no longer valid"):
        check("orders.eu", by="nobody")
    change(state, messages.RevokeToken("anna", f"{1:016x}"))
    with pytest.raises(AuthorizationError, match="no longer valid"):
        check("orders.eu")
    later = msgspec.structs.replace(VERIFIERS, stored_key_sha256=b"e" * 32)
    change(state, messages.CreateToken("anna", f"{1:016x}", later))
    with pytest.raises(AuthorizationError, match="no longer valid"):
        check("orders.eu")  # It was sent with the revoked one, which had the same id.
    change(state, messages.DeleteAcls([may_create]))
    with pytest.raises(AuthorizationError, match="may not create"):
        check("orders.eu", token_id=None, now_ms=1_000)
    check("billing", by=None, token_id=None)
    with pytest.raises(AuthorizationError, match="no longer valid"):
        check("orders.eu", now_ms=1_000)


def test_a_principal_of_a_newer_version_is_read_and_what_is_not_known_is_refused() -> None:
    state = ClusterState()
    change(state, messages.CreatePrincipal("anna", SALT))
    [created] = [record for record in state.snapshot() if isinstance(record, PrincipalCreated)]
    data = msgspec.msgpack.decode(encode_records([created]))
    data[0].append({"a further": "field"})
    assert decode_records(msgspec.msgpack.encode(data)) == [created]
    # What an older version does not know stops it: it must not go by half of the rules.
    data[0][0] = "PrincipalLimited"
    with pytest.raises(msgspec.DecodeError):
        decode_records(msgspec.msgpack.encode(data))

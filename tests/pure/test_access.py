"""The gate over the principals that a server knows: grants, and when they count no more."""

from __future__ import annotations

from typing import Any

import pytest

from rayq import messages
from rayq.actors.access import QUESTIONS_MAX, Access
from rayq.core.cluster.records import (
    AclCreated,
    AclDeleted,
    MetadataRecord,
    PrincipalCreated,
    PrincipalDeleted,
    QueueChanged,
    TokenCreated,
    TokenRevoked,
    TopicCreated,
    TopicDeleted,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    AuthorizationError,
    ControllerUnavailableError,
    UnknownQueueError,
    UnknownTopicError,
)
from rayq.messages.acls import Acl
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.peer import Peer
from rayq.wire.tokens import draw_token, verifiers_of

SALT = b"0123456789abcdef"
TOKEN = draw_token("anna", lambda count: b"t" * count)
VERIFIERS = verifiers_of(TOKEN, SALT)
READ = Acl("anna", "allow", "read", "topic", "orders")
READ_QUEUE = Acl("anna", "allow", "read", "queue", "billing")


def fetch(topic_id: str) -> messages.Fetch:
    return messages.Fetch(topic_id, 0, 1, 0, None, 1, 0)


def peer(principal: str | None, token_id: str | None) -> Peer:
    closed: Any = None
    return Peer(
        "client",
        None,
        "10.0.0.1",
        closed,
        AnswerRoom(lambda: True),
        principal,
        token_id,
        None if token_id is None else VERIFIERS.stored_key_sha256,
    )


class Stage:
    """A gate over metadata, one of whose principals is connected."""

    def __init__(self, *records: MetadataRecord) -> None:
        self.now_ms = 1_000
        self.state = ClusterState()
        self.now_s = 0.0
        self.access = Access(self)  # type: ignore[arg-type]
        self.access.freshness.note(self.now_s, 15.0)
        self.anna = peer("anna", "01")
        self.happens(
            TopicCreated("T", "orders", {}, 1),
            QueueChanged("Q", "billing", "T", {}, 1),
            PrincipalCreated("anna", SALT, 0),
            TokenCreated("anna", "01", VERIFIERS, 0, None),
            *records,
        )

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_s

    def happens(self, *records: MetadataRecord) -> None:
        for record in records:
            self.state.replay(record)
        self.access.update(self.state, self.state)

    def may(self, request: messages.AnyRequest) -> bool:
        try:
            self.access.check(self.anna, request)
        except (AuthorizationError, UnknownTopicError, UnknownQueueError):
            return False
        return True

    def valid_tokens(self) -> list[str] | None:
        known = self.access.credentials_of("anna")
        return None if known is None else [token.token_id for token in known.tokens]


def test_a_named_principal_may_what_an_acl_allows_and_nothing_else() -> None:
    stage = Stage()
    assert not stage.may(fetch("T"))
    stage.happens(AclCreated(READ))
    assert stage.may(fetch("T"))
    assert not stage.may(messages.Produce("T", 0, 1, -1, 1000))
    assert stage.may(messages.Metadata())
    with pytest.raises(AuthorizationError, match=r"'anna' may not write topic 'orders'.*acl add"):
        stage.access.check(stage.anna, messages.Produce("T", 0, 1, -1, 1000))


def test_no_grant_outlives_its_acl() -> None:
    stage = Stage(AclCreated(READ), AclCreated(READ_QUEUE))
    take = messages.Take("T", 0, 1, "Q", "holder", 1, 1, 0)
    for request, acl in ((fetch("T"), READ), (take, READ), (take, READ_QUEUE)):
        assert stage.may(request) and stage.may(request)
        stage.happens(AclDeleted(acl))
        assert not stage.may(request)
        stage.happens(AclCreated(acl))
        assert stage.may(request)
        stage.happens(AclCreated(Acl("*", "deny", "all", acl.resource_type, acl.name)))
        assert not stage.may(request)
        stage.happens(AclDeleted(Acl("*", "deny", "all", acl.resource_type, acl.name)))


def test_no_refusal_outlives_the_acl_that_allows() -> None:
    stage = Stage()
    assert not stage.may(fetch("T"))
    stage.happens(AclCreated(READ))
    assert stage.may(fetch("T"))


def test_a_topic_that_is_made_again_inherits_no_grant() -> None:
    stage = Stage(AclCreated(READ))
    assert stage.may(fetch("T"))
    stage.happens(TopicDeleted("T"), TopicCreated("U", "other", {}, 1))
    assert not stage.may(fetch("U"))
    assert not stage.may(fetch("T"))


def test_an_id_without_a_name_yet_is_refused_as_one_that_does_not_exist() -> None:
    stage = Stage(AclCreated(Acl("anna", "allow", "read", "topic", "*")))
    with pytest.raises(UnknownTopicError):
        stage.access.check(stage.anna, fetch("U"))
    # Names come without a change of principals or ACLs.
    stage.state.replay(TopicCreated("U", "orders.eu", {}, 1))
    assert stage.may(fetch("U"))


@pytest.mark.parametrize(
    "end", [TokenRevoked("anna", "01"), PrincipalDeleted("anna")], ids=["token", "principal"]
)
def test_no_grant_outlives_the_token(end: MetadataRecord) -> None:
    stage = Stage(AclCreated(READ), AclCreated(Acl("*", "allow", "read", "topic", "orders")))
    assert stage.may(fetch("T")) and stage.valid_tokens() == ["01"]
    stage.happens(end)
    assert not stage.may(fetch("T")) and not stage.valid_tokens()


def test_a_principal_that_is_made_again_does_not_take_the_old_token() -> None:
    stage = Stage(AclCreated(READ))
    stage.happens(PrincipalDeleted("anna"), PrincipalCreated("anna", SALT, 2), AclCreated(READ))
    assert not stage.may(fetch("T"))
    assert stage.valid_tokens() == []


def test_a_later_token_with_the_id_of_a_revoked_one_lets_nobody_stay() -> None:
    stage = Stage(AclCreated(READ))
    assert stage.may(fetch("T"))
    # A server may hear of both at once, and sees the id all the time.
    other = verifiers_of(draw_token("anna", lambda count: b"u" * count), SALT)
    stage.happens(TokenRevoked("anna", "01"), TokenCreated("anna", "01", other, 5, None))
    assert stage.valid_tokens() == ["01"]
    with pytest.raises(AuthorizationError, match="no longer valid"):
        stage.access.check(stage.anna, fetch("T"))
    # One that expires sooner is the same token.
    stage = Stage(AclCreated(READ), TokenCreated("anna", "01", VERIFIERS, 0, 5_000))
    assert stage.may(fetch("T"))


def test_a_server_acts_for_a_principal_while_it_exists() -> None:
    stage = Stage(AclCreated(READ))
    stage.anna = peer("anna", None)
    stage.happens(TokenRevoked("anna", "01"))
    assert stage.may(fetch("T"))
    stage.happens(PrincipalDeleted("anna"))
    assert not stage.may(fetch("T"))


def test_tokens_expire_by_the_wall_clock_of_each_moment() -> None:
    stage = Stage(TokenCreated("anna", "02", VERIFIERS, 0, 2_000))
    assert stage.valid_tokens() == ["01", "02"]
    stage.now_ms = 2_000
    assert stage.valid_tokens() == ["01"]
    stage.now_ms = 1_000  # A clock that was set back.
    assert stage.valid_tokens() == ["01", "02"]
    stage.happens(TokenRevoked("anna", "02"))
    for stage.now_ms in (0, 1_000, 3_000):
        assert stage.valid_tokens() == ["01"]


def test_a_gate_without_news_refuses_all_principals_until_it_has_news() -> None:
    stage = Stage(AclCreated(READ))
    assert stage.may(fetch("T"))
    stage.now_s = 15.0
    assert stage.may(fetch("T"))
    stage.now_s = 15.1
    for _ in range(2):
        with pytest.raises(ControllerUnavailableError, match="superusers only"):
            stage.access.check(stage.anna, fetch("T"))
        with pytest.raises(ControllerUnavailableError):
            stage.access.credentials_of("anna")
    stage.access.freshness.note(stage.now_s, 15.0)
    assert stage.may(fetch("T")) and stage.valid_tokens() == ["01"]


def test_a_server_that_cannot_know_who_is_valid_still_knows_whose_token_was_revoked() -> None:
    stage = Stage(TokenCreated("anna", "02", VERIFIERS, 0, 5_000))
    stage.now_s = 15.1

    def valid_tokens() -> list[str]:
        return [token.token_id for token in stage.access.valid_tokens_of("anna") or ()]

    assert valid_tokens() == ["01", "02"]
    stage.happens(TokenRevoked("anna", "01"))
    assert valid_tokens() == ["02"]
    stage.now_ms = 5_000
    assert valid_tokens() == []
    stage.happens(PrincipalDeleted("anna"))
    assert stage.access.valid_tokens_of("anna") is None


def test_an_answer_counts_from_its_question_once_its_metadata_are_here() -> None:
    stage = Stage(AclCreated(READ))
    freshness = stage.access.freshness
    freshness.note_question(10.0, 15.0, version=7)
    freshness.note_question(12.0, 15.0, version=8)
    stage.now_s = 16.0
    freshness.note_applied(6)
    with pytest.raises(ControllerUnavailableError):
        stage.access.check(stage.anna, fetch("T"))
    freshness.note_applied(7)
    assert stage.may(fetch("T")) and freshness.left_s == 9.0
    freshness.note_applied(7)
    assert freshness.left_s == 9.0
    freshness.note_applied(9)
    assert freshness.left_s == 11.0
    # What is known already is not forgotten for an older answer.
    freshness.note_question(1.0, 15.0, version=9)
    freshness.note_applied(9)
    assert freshness.left_s == 11.0


def test_a_broker_that_catches_up_late_keeps_few_questions_and_the_last_ones() -> None:
    freshness = Stage().access.freshness
    for asked in range(1_000):
        freshness.note_question(float(asked), 15.0, version=asked)
    freshness.note_applied(999)
    assert freshness.left_s == 999 + 15
    for asked in range(1_000):
        freshness.note_question(float(asked), 15.0, version=2_000 + asked)
    freshness.note_applied(2_000 + 999 - QUESTIONS_MAX)
    freshness.note_question(2_000.0, 15.0, version=0)  # Only this one is not ahead.
    freshness.note_applied(2_000 + 999 - QUESTIONS_MAX)
    assert freshness.left_s == 2_015


def test_handlers_check_the_rights_that_only_they_know_of() -> None:
    stage = Stage(AclCreated(READ))
    superuser, access, anna = peer(None, None), stage.access, stage.anna
    assert access.may(anna, "describe", "topic", "orders")
    assert not access.may(anna, "describe", "topic", "other")
    assert access.may(superuser, "alter", "cluster", "cluster")
    access.require(anna, "read", "topic", "orders")
    access.require(superuser, "alter", "cluster", "cluster")
    with pytest.raises(AuthorizationError, match="'anna' may not alter the cluster"):
        access.require(anna, "alter", "cluster", "cluster")
    assert (anna.who, superuser.who) == ("anna", "superuser")


def test_grants_of_a_connection_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr("rayq.actors.access.GRANTS_MAX", 3)
    topics = [TopicCreated(f"T{number}", f"orders{number}", {}, 1) for number in range(10)]
    stage = Stage(AclCreated(Acl("anna", "allow", "read", "topic", "orders", "prefixed")), *topics)
    for number in range(10):
        assert stage.may(fetch(f"T{number}"))
    assert sum(map(len, stage.anna.grants.values())) <= 3


# --- from a broker to the processes of its node ---------------------------------------------------


def test_a_process_is_told_once_what_the_broker_knows_and_how_long_it_holds() -> None:
    broker = Stage(AclCreated(READ))
    process = Access(broker)  # type: ignore[arg-type]
    news = broker.access.news(process.digest)
    assert news is not None and news.known_for_ms == 15_000
    assert process.take(news, asked_s=0.0, names=broker.state)
    process.check(broker.anna, fetch("T"))
    assert broker.access.credentials_of("anna") == process.credentials_of("anna")
    again = broker.access.news(process.digest)
    assert again is not None and again.records is None
    assert not process.take(again, asked_s=0.0, names=broker.state)
    # What it is told holds until the broker would refuse, and no longer.
    broker.now_s = 14.0
    later = broker.access.news(process.digest)
    assert later is not None and later.known_for_ms == 1_000
    process.take(later, asked_s=13.5, names=broker.state)
    broker.now_s = 15.5
    with pytest.raises(ControllerUnavailableError):
        process.check(broker.anna, fetch("T"))
    stale = broker.access.news(process.digest)
    assert stale is not None and stale.known_for_ms == 0


def test_a_process_hears_that_nobody_is_left_and_then_nothing_more() -> None:
    broker = Stage()
    process = Access(broker)  # type: ignore[arg-type]
    process.take(broker.access.news(b""), asked_s=0.0)
    broker.happens(PrincipalDeleted("anna"))
    news = broker.access.news(process.digest)
    assert news is not None and news.digest == b"" and process.take(news, asked_s=0.0)
    assert process.digest == b"" and process.credentials_of("anna") is None
    assert broker.access.news(b"") is None
    assert not process.take(None, asked_s=0.0)


def test_the_digest_is_that_of_the_contents_and_not_of_a_count() -> None:
    stage, other = Stage(AclCreated(READ)), Stage(AclCreated(READ_QUEUE))
    assert stage.access.digest != other.access.digest
    other.happens(AclDeleted(READ_QUEUE), AclCreated(READ))
    assert stage.access.digest == other.access.digest

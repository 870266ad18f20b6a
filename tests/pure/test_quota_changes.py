"""The controller's decisions about quotas, and whose limit holds."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rayq import messages
from rayq.core.access.quotas import AccountKey, Limit, QuotaTable
from rayq.core.cluster import quota_changes, remote_changes
from rayq.core.cluster.records import AclCreated, decode_records, encode_records
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    AuthorizationError,
    InvalidRequestError,
    PrincipalLimitError,
    QuotaLimitError,
    RayqError,
    UnknownPrincipalError,
)
from rayq.messages.acls import SUPERUSER, Acl, QuotaName
from rayq.messages.quotas import Quota
from tests.pure.deciding import decide
from tests.pure.test_cluster_state import apply, registration
from tests.pure.test_remote_changes import check_snapshot, id_of, tiered

SALT = b"0123456789abcdef"


def change(state: ClusterState, request: messages.AnyRequest) -> None:
    apply(state, decide(state, request))


@pytest.fixture
def state() -> ClusterState:
    state = ClusterState()
    change(state, messages.CreatePrincipal("anna", SALT))
    change(state, messages.CreatePrincipal("ben", SALT))
    return state


def test_limits_are_set_one_by_one_and_removed_one_by_one(state: ClusterState) -> None:
    change(state, messages.SetQuota("anna", None, {"producer_byte_rate": 10, "take_rate": 5}))
    change(state, messages.SetQuota("anna", None, {"producer_byte_rate": 20}))
    assert [*state.quotas] == [Quota("anna", None, {"producer_byte_rate": 20, "take_rate": 5})]
    change(state, messages.RemoveQuota("anna", None, ["take_rate", "max_topics"]))
    assert [*state.quotas] == [Quota("anna", None, {"producer_byte_rate": 20})]
    change(state, messages.SetQuota("anna", "etl", {"take_rate": 0}))
    change(state, messages.RemoveQuota("anna", None))
    assert [*state.quotas] == [Quota("anna", "etl", {"take_rate": 0})]
    change(state, messages.RemoveQuota("anna", "etl", ["take_rate"]))
    assert len(state.quotas) == 0


def test_what_changes_nothing_writes_nothing(state: ClusterState) -> None:
    change(state, messages.SetQuota(None, None, {"take_rate": 5}))
    assert decide(state, messages.SetQuota(None, None, {"take_rate": 5})) == []
    assert decide(state, messages.RemoveQuota("ben", None)) == []
    assert decide(state, messages.RemoveQuota("carl", "etl", ["take_rate"])) == []


@pytest.mark.parametrize(
    "value", [-1, -0.001, math.nan, math.inf, -math.inf, 1e16, 1e300]
)
def test_an_impossible_limit_is_refused(state: ClusterState, value: float) -> None:
    with pytest.raises(InvalidRequestError, match="producer_byte_rate is"):
        decide(state, messages.SetQuota("anna", None, {"producer_byte_rate": value}))


def test_counts_are_whole_numbers(state: ClusterState) -> None:
    with pytest.raises(InvalidRequestError, match="max_topics is 1.5: it counts"):
        decide(state, messages.SetQuota("anna", None, {"max_topics": 1.5}))
    change(state, messages.SetQuota("anna", None, {"max_topics": 0, "take_rate": 0.5}))


@pytest.mark.parametrize("client_id", ["", "a\n", "a\0", "x" * 250, "\ud800"])
def test_an_illegal_client_id_is_refused(state: ClusterState, client_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a client id"):
        decide(state, messages.SetQuota("anna", client_id, {"take_rate": 1}))


def test_a_quota_needs_a_principal_that_exists(state: ClusterState) -> None:
    limits: dict[QuotaName, float] = {"take_rate": 1}
    with pytest.raises(UnknownPrincipalError, match="no principal 'carl'"):
        decide(state, messages.SetQuota("carl", None, limits))
    with pytest.raises(UnknownPrincipalError):
        decide(state, messages.SetQuota("x" * 60_000, None, limits))
    with pytest.raises(InvalidRequestError, match="'superuser' has no quotas"):
        decide(state, messages.SetQuota(SUPERUSER, None, limits))
    with pytest.raises(InvalidRequestError, match="name the principal of client id 'etl'"):
        decide(state, messages.SetQuota(None, "etl", limits))
    with pytest.raises(InvalidRequestError, match="Name a limit to set: producer_byte_rate, "):
        decide(state, messages.SetQuota("anna", None, {}))


def test_deleting_a_principal_deletes_its_quotas(state: ClusterState) -> None:
    for principal, client_id in (("anna", None), ("anna", "etl"), ("ben", "etl"), (None, None)):
        change(state, messages.SetQuota(principal, client_id, {"take_rate": 1}))
    change(state, messages.DeletePrincipal("anna"))
    assert [*state.quotas] == [
        Quota("ben", "etl", {"take_rate": 1}),
        Quota(None, None, {"take_rate": 1}),
    ]
    state.validate()


def test_the_number_of_quotas_has_a_limit(
    state: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_changes, "QUOTAS_MAX", 1)
    change(state, messages.SetQuota("anna", None, {"take_rate": 1}))
    change(state, messages.SetQuota("anna", None, {"take_rate": 2}))
    with pytest.raises(PrincipalLimitError, match="quotas of 1 principals"):
        decide(state, messages.SetQuota("ben", None, {"take_rate": 1}))


def asked_by(principal: str, request: messages.AnyRequest) -> messages.Forward:
    return messages.Forward(
        by=principal, address="h", client_id="", token_id=None, kind=request.api, request=b""
    )


def make(state: ClusterState, request: Any, by: str) -> None:
    """The change as the controller makes it for a principal."""
    records = decide(state, request, new_id=lambda: f"id of {request.name}")
    apply(state, quota_changes.owned_records(state, asked_by(by, request), records))


def topic(name: str, partitions: int) -> messages.CreateTopic:
    return messages.CreateTopic(name, partitions, 1, {})


def test_partitions_of_dead_letters_count_as_changes_where_they_are_created(
    state: ClusterState,
) -> None:
    apply(state, [registration(0)])
    make(state, topic("a", 3), "anna")

    def queue(name: str, **config: Any) -> messages.CreateQueue:
        return messages.CreateQueue(name=name, topic="a", config=config)

    def units(request: messages.AnyRequest) -> int:
        return quota_changes.partitions_changed(state, request)

    assert units(queue("q")) == 1
    assert units(queue("q", **{"dead.letters": "discard"})) == 0
    assert units(msgspec.structs.replace(queue("q"), topic="b", partitions=4)) == 5
    numbers = itertools.count()
    create = queue("q", dead_letters="discard")
    apply(state, decide(state, create, new_id=lambda: f"id-{next(numbers)}"))
    assert units(messages.AlterQueue(name="q", config={"max_deliveries": 3})) == 0
    keep = messages.AlterQueue(name="q", config={"dead_letters": "keep"})
    assert units(keep) == 1
    apply(state, decide(state, keep, new_id=lambda: f"id-{next(numbers)}"))
    assert units(keep) == 0


def pinned(state: ClusterState, pin_id: str, by: str | None, **changes: Any) -> None:
    request = messages.PinSnapshot(
        **{"pin_id": pin_id, "topic_id": id_of("t"), "starts": {0: 5}, "ttl_ms": 9, **changes}
    )
    records = decide(state, request)
    if by is not None:
        records = quota_changes.owned_records(state, asked_by(by, request), records)
    apply(state, records)
    check_snapshot(state)


def unpinned(state: ClusterState, pin_id: str, by: str) -> None:
    request = messages.UnpinSnapshot(pin_id=pin_id)
    records = decide(state, request)
    apply(state, quota_changes.owned_records(state, asked_by(by, request), records))


def test_a_principal_leaves_pins_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_changes, "PINS_MAX", 8)
    monkeypatch.setattr(remote_changes, "PINNED_PARTITIONS_MAX", 12)
    state = tiered(partitions=3)
    pinned(state, "a", "anna")
    pinned(state, "b", "anna")
    with pytest.raises(QuotaLimitError, match="up to 2 pins, of 3 partitions.*'anna'"):
        pinned(state, "c", "anna")
    pinned(state, "b", "anna", starts={0: 1, 1: 1})
    with pytest.raises(QuotaLimitError, match="'anna' would have more"):
        pinned(state, "b", "anna", starts={0: 1, 1: 1, 2: 1})
    pinned(state, "c", "ben")
    for number in range(5):
        pinned(state, f"of a superuser {number}", None)
    unpinned(state, "a", "anna")
    pinned(state, "d", "anna")


def test_nobody_renews_or_ends_anothers_pin_with_less_than_a_right_on_the_cluster() -> None:
    state = tiered()
    pinned(state, "a", "anna")
    pinned(state, "restore-t", None)
    for pin_id, others in (("a", ("ben",)), ("restore-t", ("anna", "ben"))):
        before = state.pins[pin_id]
        for other in others:
            with pytest.raises(AuthorizationError, match=f"'{other}' may not alter the cluster"):
                pinned(state, pin_id, other, starts={0: 1_000}, ttl_ms=1)
            with pytest.raises(AuthorizationError, match=f"'{other}' may not alter the cluster"):
                unpinned(state, pin_id, other)
        assert state.pins[pin_id] == before
    change(state, messages.CreatePrincipal("ben", SALT))
    apply(state, [AclCreated(Acl("ben", "allow", "alter", "cluster", "cluster"))])
    pinned(state, "a", "ben", ttl_ms=10)
    assert (state.pins["a"].owner, state.pins["a"].ttl_ms) == ("anna", 10)
    pinned(state, "a", None, ttl_ms=11)
    assert state.pins["a"].owner == "anna"
    unpinned(state, "a", "ben")
    unpinned(state, "never", "anna")
    assert list(state.pins) == ["restore-t"]


def test_topics_and_partitions_count_for_the_principal_that_created_them(state: ClusterState) -> None:
    apply(state, [registration(0)])
    change(state, messages.SetQuota(None, None, {"max_topics": 2, "max_partitions": 5}))
    make(state, topic("a", 3), "anna")
    make(state, topic("b", 2), "anna")
    with pytest.raises(QuotaLimitError, match="'anna' owns 2 topics, and its quota max_topics is"):
        make(state, topic("c", 1), "anna")
    make(state, topic("c", 3), "ben")
    with pytest.raises(QuotaLimitError, match="'anna' owns 5 partitions.*max_partitions is 5"):
        make(state, messages.CreatePartitions("a", 4), "anna")
    make(state, messages.CreatePartitions("c", 5), "anna")
    with pytest.raises(QuotaLimitError, match="max_partitions does not") as hidden:
        make(state, messages.CreatePartitions("c", 6), "anna")
    assert "ben" not in str(hidden.value)
    change(state, messages.CreateAcls([Acl("anna", "allow", "describe", "principal", "ben")]))
    with pytest.raises(QuotaLimitError, match="rayq quota set ben max_partitions="):
        make(state, messages.CreatePartitions("c", 6), "anna")
    make(state, messages.DeleteTopic("a"), "anna")
    make(state, topic("d", 3), "anna")
    copy = ClusterState()
    apply(copy, decode_records(encode_records(state.snapshot())))
    assert [topic.owner for topic in copy.topics.values()] == ["anna", "ben", "anna"]
    # Whoever has the name later has created none of them, and superusers have no quotas.
    change(state, messages.DeletePrincipal("anna"))
    change(state, messages.CreatePrincipal("anna", SALT))
    make(state, topic("e", 5), "anna")
    for number in range(9):
        apply(state, decide(state, topic(f"s{number}", 9), new_id=lambda: f"s-{number}"))  # noqa: B023
    assert state.topics["s-4"].owner is None


def test_a_client_id_owns_no_topics(state: ClusterState) -> None:
    with pytest.raises(InvalidRequestError, match="set it for 'anna'"):
        decide(state, messages.SetQuota("anna", "etl", {"max_topics": 2}))


ENTITIES = st.sampled_from(
    [(None, None), ("anna", None), ("anna", "a"), ("anna", "b"), ("ben", None), ("ben", "a")]
)
NAMES = st.sampled_from(get_args(QuotaName))


@given(st.dictionaries(st.tuples(ENTITIES, NAMES), st.floats(0, 9)))
def test_the_most_specific_limit_holds(limits: dict[tuple[Any, QuotaName], float]) -> None:
    table = QuotaTable()
    for entity in {entity for entity, _ in limits}:
        named = {name: value for (other, name), value in limits.items() if other == entity}
        table.replace(*entity, named)
    for principal in ("anna", "ben", "carl"):
        for client_id in ("a", "b", "c", ""):
            for name in get_args(QuotaName):
                expected = None
                for entity, owner in (
                    ((None, None), None),
                    ((principal, None), None),
                    ((principal, client_id), client_id),
                ):
                    if (entity, name) in limits:
                        key = AccountKey(principal, owner, name)
                        expected = Limit(key, limits[entity, name])
                assert table.limit(principal, client_id, name) == expected


VALUES = st.dictionaries(NAMES, st.floats() | st.integers(0, 5).map(float), max_size=3)


class AnyChanges(RuleBasedStateMachine):
    """Requests in any order: each is refused by an error, or leaves a valid state that a snapshot
    has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()

    def ask(self, request: messages.AnyRequest) -> None:
        try:
            records = decide(self.state, request)
        except RayqError:
            return
        apply(self.state, records)

    @rule(name=st.sampled_from(["anna", "ben"]), is_new=st.booleans())
    def change_principal(self, name: str, is_new: bool) -> None:
        create, delete = messages.CreatePrincipal(name, SALT), messages.DeletePrincipal(name)
        self.ask(create if is_new else delete)

    @rule(entity=ENTITIES, limits=VALUES)
    def set_quota(self, entity: tuple[str | None, str | None], limits: Any) -> None:
        self.ask(messages.SetQuota(*entity, limits))

    @rule(entity=ENTITIES, names=st.lists(NAMES, max_size=2))
    def remove_quota(self, entity: tuple[str | None, str | None], names: Any) -> None:
        self.ask(messages.RemoveQuota(*entity, names))

    @invariant()
    def a_snapshot_has_all_of_it(self) -> None:
        self.state.validate()
        copy = ClusterState()
        apply(copy, decode_records(encode_records(self.state.snapshot())))
        assert copy.quotas == self.state.quotas


TestAnyChanges = AnyChanges.TestCase
TestAnyChanges.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)

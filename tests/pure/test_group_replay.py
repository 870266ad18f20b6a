"""What a coordinator's state makes of each record, of topics and of patterns."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from rayq.core.groups import state as group_state
from rayq.core.groups.assignors import MemberSubscription, load_assignors
from rayq.core.groups.records import (
    NOTHING,
    EndedRecord,
    EndedTransaction,
    GroupRecord,
    GroupValue,
    MemberRecord,
    MemberValue,
    OffsetRecord,
    OffsetValue,
    PendingOffset,
    PendingRecord,
    Record,
)
from rayq.core.groups.state import (
    Group,
    GroupState,
    OpenTransaction,
    Session,
    SubscribedTopic,
    partitions_of,
)

replace = msgspec.structs.replace
P0, P1, P2 = (("T", number) for number in range(3))
VALUE = GroupValue("range", 3, "why", 7, None)
MEMBER = MemberValue("i", "c", ("t",), None, "range", 1, 2, 3, 2, frozenset({P0, P1}), frozenset({P0}))
OFFSET = OffsetValue(5, 1, "note", 9)
PENDING = PendingOffset(70, 4, "m", 1, 6, None, "")
ENDED = EndedTransaction(2, 1, 8)


def state_of(*records: Record) -> GroupState:
    made = GroupState(load_assignors(None))
    for record in records:
        made.replay(record)
    return made


def durable(state: GroupState) -> Any:
    groups = {
        name: (one.value, one.members, one.offsets, one.pending, set(one.sessions))
        for name, one in state.groups.items()
    }
    return groups, state.transactions, state.ended


def test_each_record_sets_what_it_names_and_its_tombstone_ends_it() -> None:
    state = state_of(
        GroupRecord("g", VALUE), MemberRecord("g", "m", MEMBER), OffsetRecord("g", *P0, OFFSET),
        OffsetRecord("g", *P1, OFFSET), PendingRecord("g", *P1, PENDING), EndedRecord(70, ENDED),
        EndedRecord(71, ENDED), GroupRecord("h", VALUE),
    )
    open_one = OpenTransaction(4, {("g", *P1)}, {("g", "m")})
    assert durable(state) == (
        {
            "g": (VALUE, {"m": MEMBER}, {P0: OFFSET, P1: OFFSET}, {P1: PENDING}, {"m"}),
            "h": (VALUE, {}, {}, {}, set()),
        },
        {70: open_one},
        {70: ENDED, 71: ENDED},
    )
    for tombstone in (
        MemberRecord("g", "m", None), OffsetRecord("g", *P1, None), PendingRecord("g", *P1, None),
        EndedRecord(70, None), GroupRecord("h", None),
    ):
        state.replay(tombstone)
    assert durable(state) == (
        {"g": (VALUE, {}, {P0: OFFSET}, {}, set())}, {}, {71: ENDED},
    )


@pytest.mark.parametrize(
    "tombstone",
    [
        GroupRecord("g", None), MemberRecord("g", "m", None), OffsetRecord("g", *P0, None),
        PendingRecord("g", *P0, None), EndedRecord(70, None),
    ],
)
def test_a_tombstone_of_what_is_not_there_changes_nothing(tombstone: Record) -> None:
    """Compaction may have taken what it ends."""
    state = state_of(tombstone)
    assert durable(state) == ({}, {}, {})
    if isinstance(tombstone, GroupRecord):
        return
    state.replay(GroupRecord("g", VALUE))
    state.replay(tombstone)
    assert durable(state) == ({"g": (VALUE, {}, {}, {}, set())}, {}, {})


@pytest.mark.parametrize(
    "left",
    [MemberRecord("g", "m", MEMBER), OffsetRecord("g", *P0, OFFSET), PendingRecord("g", *P0, PENDING)],
)
def test_a_group_that_ends_before_what_it_has_begins_from_nothing(left: Record) -> None:
    state = state_of(GroupRecord("g", VALUE), left, GroupRecord("g", None))
    assert state.groups["g"].value == GroupValue()
    state.replay(left._replace(value=None))
    state.replay(GroupRecord("g", None))
    assert state.groups == {}


def test_records_of_different_keys_give_one_state_in_any_order() -> None:
    records: list[Record] = [
        GroupRecord("g", VALUE), MemberRecord("g", "m", MEMBER), OffsetRecord("g", *P0, OFFSET),
        PendingRecord("g", *P0, PENDING), PendingRecord("g", *P1, PENDING),
    ]
    expected = durable(state_of(*records))
    for order in itertools.permutations(records):
        assert durable(state_of(*order)) == expected


def test_a_transaction_is_open_as_long_as_it_holds_a_position_anywhere() -> None:
    state = state_of(
        PendingRecord("g", *P0, PENDING), PendingRecord("g", *P1, replace(PENDING, member="")),
        PendingRecord("h", *P0, replace(PENDING, member="n")),
        PendingRecord("h", *P1, replace(PENDING, family=71, epoch=9, member="")),
    )
    places = {("g", *P0), ("g", *P1), ("h", *P0)}
    members = {("g", "m"), ("h", "n")}
    other = OpenTransaction(9, {("h", *P1)}, set())
    assert state.transactions == {70: OpenTransaction(4, places, members), 71: other}
    state.replay(PendingRecord("g", *P0, None))
    state.replay(PendingRecord("h", *P0, None))
    assert state.transactions == {70: OpenTransaction(4, {("g", *P1)}, members), 71: other}
    state.replay(PendingRecord("g", *P1, replace(PENDING, offset=8)))
    assert state.transactions == {70: OpenTransaction(4, {("g", *P1)}, {("g", "m")}), 71: other}, "begun again"
    state.replay(PendingRecord("g", *P1, replace(PENDING, family=71, epoch=9)))
    assert set(state.transactions) == {71}


def test_a_member_s_epoch_means_one_assignment_which_it_has_to_hear_of() -> None:
    state = state_of(MemberRecord("g", "m", replace(MEMBER, assigned=frozenset({P0}))))
    session = state.groups["g"].sessions["m"]
    assert session == Session()
    session.is_acked, session.heard_s, session.last_sequence = True, 5.0, 3
    state.replay(MemberRecord("g", "m", replace(MEMBER, client="renamed")))
    assert session.is_acked, "the epoch is the same"
    grown = replace(
        MEMBER, member_epoch=4, assigned=frozenset({P0, P2}), revoking=frozenset({P1}),
    )
    state.replay(MemberRecord("g", "m", grown))
    assert session == Session(heard_s=5.0, last_sequence=3, gained=frozenset({P2}))
    session.is_acked = True
    state.replay(
        MemberRecord("g", "m", replace(grown, member_epoch=5, assigned=frozenset({P0, P1, P2}), revoking=NOTHING))
    )
    assert not session.is_acked
    assert session.gained == NOTHING, "it had it all the time, on its way out"
    state.replay(MemberRecord("g", "m", None))
    state.replay(MemberRecord("g", "m", grown))
    assert state.groups["g"].sessions["m"] == Session()


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "members, name",
    [
        ([], "empty"),
        ([replace(MEMBER, target=frozenset({P0}))], "stable"),
        ([MEMBER], "rebalancing"),
        ([replace(MEMBER, target=frozenset({P0}), revoking=frozenset({P1}))], "rebalancing"),
        ([replace(MEMBER, target=frozenset({P0})), MEMBER], "rebalancing"),
        ([replace(MEMBER, target=NOTHING, assigned=NOTHING)], "stable"),
    ],
)
def test_a_group_is_stable_once_each_member_has_its_target(
    members: list[MemberValue], name: str
) -> None:
    records = [MemberRecord("g", f"m{number}", one) for number, one in enumerate(members)]
    group = state_of(GroupRecord("g", VALUE), *records).groups["g"]
    assert group.name_of_state == name
    assert group.is_settled is (name != "rebalancing")


def test_whether_a_group_is_stable_follows_its_members() -> None:
    state = state_of(MemberRecord("g", "m", MEMBER))
    group = state.groups["g"]
    assert group.name_of_state == "rebalancing"
    state.replay(MemberRecord("g", "m", replace(MEMBER, assigned=MEMBER.target)))
    assert group.name_of_state == "stable"
    state.replay(MemberRecord("g", "n", MEMBER))
    assert group.name_of_state == "rebalancing"
    state.replay(MemberRecord("g", "n", None))
    assert group.name_of_state == "stable"


@pytest.mark.parametrize(
    "instance, member", [("i", "a"), ("j", "b"), ("k", None), (None, None), ("", None)]
)
def test_a_static_member_is_found_by_its_instance(instance: str | None, member: str | None) -> None:
    group = Group()
    for name, of in (("z", None), ("a", "i"), ("b", "j")):
        group.members[name] = replace(MEMBER, instance=of)
    assert group.member_of_instance(instance) == member


@pytest.mark.parametrize(
    "assigned, revoking, owned", [("01", "", "01"), ("0", "1", "01"), ("", "2", "2"), ("", "", "")]
)
def test_a_member_owns_what_it_has_not_given_up_yet(assigned: str, revoking: str, owned: str) -> None:
    def places(numbers: str) -> frozenset[tuple[str, int]]:
        return frozenset(("T", int(one)) for one in numbers)

    value = replace(MEMBER, assigned=places(assigned), revoking=places(revoking))
    assert value.owned == places(owned)


# --- topics and patterns --------------------------------------------------------------------------


def topics(*names: str) -> dict[str, SubscribedTopic]:
    return {name: SubscribedTopic(name.upper(), 1) for name in names}


def found(state: GroupState, *names: str, pattern: str | None = None) -> set[str]:
    one = replace(MEMBER, topics=names, pattern=pattern)
    assert state.subscription(one).instance == "i"
    return set(state.subscription(one).topics)


def test_a_subscription_has_the_topics_that_there_are_by_name_and_by_pattern() -> None:
    state = state_of()
    assert found(state, "a", pattern="b.*") == set()
    state.take_topics(topics("a", "b1", "c", "__b"))
    assert found(state) == set()
    assert found(state, "a", "gone") == {"a"}
    assert found(state, pattern="b.*|.*b") == {"b1"}
    assert found(state, "a", "c", pattern="b.*|a") == {"a", "b1", "c"}
    assert state.subscription(replace(MEMBER, instance=None)) == MemberSubscription(frozenset(), None)


def test_patterns_follow_the_topics_that_come_and_go() -> None:
    state = state_of(
        *(MemberRecord("g", one, replace(MEMBER, pattern=one)) for one in ("a.*", "b.*")),
        MemberRecord("g", "none", MEMBER),
    )
    assert state.patterns() == {"a.*", "b.*"}
    for names, a, b in (
        (["a1", "b1"], {"a1"}, {"b1"}),
        (["a1", "a2", "b1"], {"a1", "a2"}, {"b1"}),
        (["a2"], {"a2"}, set()),
        (["a1", "b1", "b2"], {"a1"}, {"b1", "b2"}),
    ):
        state.take_topics(topics(*names))
        assert (found(state, pattern="a.*"), found(state, pattern="b.*")) == (a, b)
    state.replay(MemberRecord("h", "x", replace(MEMBER, pattern="c")))
    state.replay(MemberRecord("g", "a.*", None))
    assert state.patterns() == {"b.*", "c"}


def test_only_patterns_that_members_have_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_state, "PATTERNS_MAX", 2)
    looked: list[str] = []

    def counting(pattern: str, names: Any) -> set[str]:
        looked.append(pattern)
        return set()

    monkeypatch.setattr(group_state, "matches", counting)
    state = state_of(MemberRecord("g", "m", replace(MEMBER, pattern="mine")))

    def look(*patterns: str) -> list[str]:
        looked.clear()
        for pattern in patterns:
            found(state, pattern=pattern)
        return looked

    assert look("mine", "a", "b", "c") == ["mine", "a", "b", "c"]
    assert look("mine", "a", "b", "c") == []
    assert look("d", "mine", "a") == ["d", "a"], "one more than twice as many as members may have"
    looked.clear()
    state.take_topics(topics("t"))
    assert looked == ["mine"]
    assert look("mine", "a") == ["a"]


def test_a_topic_s_name_is_known_as_long_as_there_is_the_topic_or_a_member_that_has_it() -> None:
    def called(*ids: str) -> list[str]:
        return [state.name_of_topic(topic_id) for topic_id in ids]

    has = {"target": "A", "assigned": "B", "revoking": "C"}
    nowhere = replace(MEMBER, target=NOTHING, assigned=NOTHING)
    state = state_of(
        *(
            MemberRecord("g", name, replace(nowhere, **{name: frozenset({(topic_id, 0)})}))
            for name, topic_id in has.items()
        )
    )
    assert called("A", "D") == ["A", "D"]
    state.take_topics(topics("a", "b", "c", "d"))
    assert called("A", "B", "C", "D", "E") == ["a", "b", "c", "d", "E"]
    state.take_topics(topics("e"))
    assert called("A", "B", "C", "D", "E") == ["a", "b", "c", "D", "e"]
    state.take_topics({"renamed": SubscribedTopic("A", 1)})
    assert called("A", "E") == ["renamed", "E"]
    state.replay(MemberRecord("g", "assigned", None))
    state.take_topics({})
    assert called("A", "B", "C") == ["renamed", "B", "c"]
    assert state.topics == {}


def test_the_topics_that_a_state_takes_are_its_own() -> None:
    given = topics("a")
    state = state_of()
    state.take_topics(given)
    given.clear()
    assert state.topics == topics("a")


def test_all_partitions_of_topics() -> None:
    sizes = {"a": SubscribedTopic("A", 2), "b": SubscribedTopic("B", 0), "c": SubscribedTopic("C", 1)}
    assert partitions_of(sizes) == {("A", 0), ("A", 1), ("C", 0)}
    assert partitions_of({}) == frozenset()


# --- what must hold -------------------------------------------------------------------------------


def whole() -> GroupState:
    """A state with all that it may have."""
    state = state_of(
        GroupRecord("g", VALUE),
        MemberRecord("g", "m", MEMBER),
        MemberRecord("g", "n", replace(MEMBER, target=NOTHING, assigned=NOTHING, revoking=frozenset({P1}))),
        GroupRecord("empty", replace(VALUE, empty_since_ms=1)),
        PendingRecord("g", *P0, PENDING), PendingRecord("empty", *P0, PENDING),
    )
    for session in state.groups["g"].sessions.values():
        session.is_acked = True
    return state


def with_member(name: str, **fields: Any) -> Any:
    def change(state: GroupState) -> None:
        members = state.groups["g"].members
        members[name] = replace(members[name], **fields)

    return change


def with_group(name: str, **fields: Any) -> Any:
    def change(state: GroupState) -> None:
        state.groups[name].value = replace(state.groups[name].value, **fields)

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_member("m", revoking=frozenset({P0})),
        with_member("m", assigned=frozenset({P0, P2})),
        with_member("n", revoking=frozenset({P2}), target=frozenset({P2})),
        with_member("m", previous_epoch=4),
        with_member("m", member_epoch=4),
        with_member("n", revoking=frozenset({P0})),
        with_member("n", target=frozenset({P0})),
        with_group("g", empty_since_ms=1),
        with_group("empty", empty_since_ms=None),
        lambda state: setattr(state.transactions[70], "epoch", 5),
        lambda state: state.transactions[70].offsets.discard(("g", *P0)),
        lambda state: state.transactions[70].offsets.discard(("empty", *P0)),
    ],
)
def test_a_state_that_breaks_a_rule_is_noticed(change: Any) -> None:
    state = whole()
    state.validate()
    change(state)
    with pytest.raises(AssertionError):
        state.validate()


def test_the_target_of_a_member_that_was_not_heard_may_be_ahead() -> None:
    state = whole()
    state.groups["g"].sessions["m"].is_acked = False
    with_member("m", target=frozenset({P2}))(state)
    state.validate()
    state.groups["g"].sessions["n"].is_acked = False
    with_member("n", target=frozenset({P1}))(state)
    state.validate()

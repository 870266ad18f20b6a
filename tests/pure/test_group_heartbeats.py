"""What each heartbeat makes of a member and of its group, record by record."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rayq.core.decision import Times
from rayq.core.groups import changes as group_changes
from rayq.core.groups import draft as group_draft
from rayq.core.groups.records import NOTHING, GroupRecord, GroupValue, MemberRecord, MemberValue
from rayq.core.groups.state import PATTERNS_MAX, SubscribedTopic
from rayq.errors import (
    FencedMemberError,
    GroupLimitError,
    InvalidAssignmentError,
    InvalidRequestError,
    RayqError,
    UnknownAssignorError,
    UnknownGroupError,
    UnknownMemberError,
)
from tests.pure import all_groups
from tests.pure.group_requests import heartbeat_of
from tests.pure.test_group_changes import P0, P1, P2, P3, SAID, Coordinator

replace = msgspec.structs.replace
OTHERWISE = {
    "instance": "i", "client": "etl", "topics": ("t", "u"), "pattern": "u.*", "assignor": "range",
    "session_timeout_ms": 7_000, "max_poll_interval_ms": 8_000,
}
"""Of everything that a member says, something else than by default."""
REBALANCES = ("instance", "topics", "pattern", "assignor")
"""What the targets depend on."""


def said(value: MemberValue) -> dict[str, Any]:
    return {name: getattr(value, name) for name in SAID}


def group_of(one: Coordinator) -> GroupValue:
    return one.state.groups["g"].value


def test_the_first_member_makes_the_group() -> None:
    one = Coordinator(partitions=2)
    one.now_s = 3
    all_of_t = frozenset({P0, P1})
    member = MemberValue(**OTHERWISE, member_epoch=1, previous_epoch=1, target=all_of_t, assigned=all_of_t)
    assert one.beat("a", **OTHERWISE) == [
        MemberRecord("g", "a", member),
        GroupRecord("g", GroupValue("range", 1, "member a (etl) joined", 3_000, None)),
    ]


def test_a_member_that_joins_gets_what_is_free_at_once_and_the_rest_later() -> None:
    one = Coordinator(partitions=4)
    one.join("a")
    before = one.members["a"]
    one.now_s = 2
    records = one.beat("b")
    target = one.members["b"].target
    assert len(target) == 2
    moved = replace(
        before, target=before.target - target, assigned=before.assigned - target,
        revoking=target, member_epoch=2, previous_epoch=1,
    )
    joined = replace(before, target=target, assigned=NOTHING, member_epoch=2, previous_epoch=2)
    assert records == [
        MemberRecord("g", "a", moved),
        MemberRecord("g", "b", joined),
        GroupRecord("g", GroupValue("uniform", 2, "member b joined", 2_000, None)),
    ]
    one.beat("b")
    one.now_s = 4
    assert one.beat("a") == [
        MemberRecord("g", "a", replace(moved, revoking=NOTHING)),
        MemberRecord("g", "b", replace(joined, assigned=target, member_epoch=3, previous_epoch=2)),
        GroupRecord("g", GroupValue("uniform", 3, "member b joined", 2_000, None)),
    ]
    assert one.state.groups["g"].sessions["b"].gained == target


def test_a_member_with_nothing_new_to_say_makes_no_record() -> None:
    one = Coordinator(partitions=2)
    one.beat("a")
    before = one.members["a"]
    assert one.beat("a") == one.beat("a") == []
    assert one.members["a"] is before


def test_a_member_that_was_not_heard_under_its_epoch_waits_for_the_rest() -> None:
    """That it heard of its epoch is what others' partitions, free meanwhile, wait for."""
    one = Coordinator(partitions=2)
    one.join("a")
    one.beat("b")
    one.beat("a")
    assert one.members["b"].assigned == NOTHING
    records = one.beat("b")
    assert one.members["b"].assigned == one.members["b"].target
    assert [record[:2] for record in records] == [("g", "b"), ("g", one.state.groups["g"].value)]


def test_under_the_previous_epoch_a_member_is_heard_and_gives_nothing_up() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.beat("b")
    value = one.members["a"]
    assert one.beat("a", value.previous_epoch, owned=()) == []
    assert one.members["a"] is value
    assert not one.state.groups["g"].sessions["a"].is_acked


@pytest.mark.parametrize(
    "epoch, is_heard", [(2, False), (3, True), (4, False), (5, True), (6, False)]
)
def test_a_heartbeat_counts_under_the_present_epoch_and_the_one_before(
    epoch: int, is_heard: bool
) -> None:
    one = Coordinator(partitions=4)
    one.join("a")
    one.beat("a", 0)
    one.beat("a")
    for member in "bc":
        one.beat(member)
    one.beat("a")
    value = one.members["a"]
    assert (value.previous_epoch, value.member_epoch) == (3, 5)
    if is_heard:
        one.beat("a", epoch)
        return
    with pytest.raises(FencedMemberError, match=f"is in epoch 5, the heartbeat in {epoch}"):
        one.beat("a", epoch, client="other")
    assert one.members["a"] is value


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("is_again", [False, True], ids=["stays", "begins again"])
def test_what_a_member_says_otherwise_is_kept_and_the_rest_stays(name: str, is_again: bool) -> None:
    """A rebalance follows where the targets depend on it."""
    one = Coordinator(partitions=2)
    one.apply(all_groups.set_topics(one.state, {**one.topics, "u": SubscribedTopic("U", 1)}, now_ms=0))
    one.join("a")
    before, group = one.members["a"], group_of(one)
    one.now_s = 5
    one.beat("a", 0 if is_again else None, **{name: OTHERWISE[name]})
    more = frozenset({("U", 0)}) if name in ("topics", "pattern") else NOTHING
    is_later = is_again or more != NOTHING
    epoch = group.epoch + 1 if is_later else before.member_epoch
    expected = replace(
        before, **{name: OTHERWISE[name]}, member_epoch=epoch,
        previous_epoch=epoch if is_again else before.previous_epoch,
        target=before.target | more, assigned=before.assigned | more,
    )
    assert one.members["a"] == expected
    if name not in REBALANCES:
        assert group_of(one) == replace(group, epoch=epoch)
        return
    assert group_of(one) == GroupValue(
        "range" if name == "assignor" else "uniform", group.epoch + 1,
        "member a changed its subscription", 5_000, None,
    )


def test_a_join_that_says_something_else_is_no_repetition() -> None:
    one = Coordinator()
    one.beat("a")
    assert one.beat("a", 0) == []
    one.beat("a", 0, client="etl")
    assert (one.members["a"].client, one.members["a"].member_epoch) == ("etl", 2)
    one.beat("a", 2)
    one.beat("a", 0)
    assert one.members["a"].member_epoch == 3, "who has heard of its epoch begins again"


# --- static members -------------------------------------------------------------------------------


def test_another_process_takes_over_an_instance_without_a_rebalance() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.join("s1", instance="i", client="one", session_timeout_ms=9_000)
    before, group = one.members["s1"], group_of(one)
    one.now_s = 5
    taken_over = replace(
        before, client="two", session_timeout_ms=10_000, member_epoch=group.epoch + 1,
        previous_epoch=group.epoch + 1,
    )
    assert one.beat("s2", 0, instance="i", client="two") == [
        MemberRecord("g", "s1", None),
        MemberRecord("g", "s2", taken_over),
        GroupRecord("g", replace(group, epoch=group.epoch + 1)),
    ]


def test_a_process_that_takes_over_and_asks_for_other_topics_is_rebalanced() -> None:
    one = Coordinator(partitions=2)
    one.join("s1", instance="i")
    one.beat("s2", 0, instance="i", topics=("u",), client="etl")
    assert one.reason == "member s (etl) took over the instance 'i'"
    assert one.members["s2"].target == NOTHING
    assert set(one.members) == {"s2"}


def test_a_member_that_becomes_another_ones_instance_gives_up_its_own_place() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.join("s", instance="i")
    had = one.members["s"]
    records = one.beat("a", 0, instance="i")
    assert set(one.members) == {"a"}
    assert one.reason == "member a took over the instance 'i'"
    assert one.members["a"].target == {P0, P1}
    assert one.members["a"].assigned == {P0, P1} and had.assigned < {P0, P1}
    assert records[0] == MemberRecord("g", "s", None)


def test_a_static_member_that_begins_again_keeps_its_partitions() -> None:
    one = Coordinator(partitions=2)
    one.join("s", instance="i")
    before, group = one.members["s"], group_of(one)
    one.beat("s", 0, instance="i")
    epoch = group.epoch + 1
    assert one.members["s"] == replace(before, member_epoch=epoch, previous_epoch=epoch)
    assert group_of(one) == replace(group, epoch=epoch), "that is no rebalance"


@pytest.mark.parametrize("instance", ["i", "j", None])
def test_who_is_out_is_told_whether_another_process_has_its_instance(instance: str | None) -> None:
    one = Coordinator()
    one.join("s1", instance="i")
    one.join("s2", instance="i")
    error, text = (
        (FencedMemberError, "Another process joined group 'g' as 'i': member s is out")
        if instance == "i"
        else (UnknownMemberError, "Group 'g' has no member s:")
    )
    with pytest.raises(error, match=text):
        one.beat("s1", 3, instance=instance)
    with pytest.raises(error, match=text):
        group_changes.find_member(one.state, "g", "s1", instance)


def test_look_ups_find_what_there_is_and_say_what_there_is_not() -> None:
    one = Coordinator()
    with pytest.raises(UnknownMemberError, match="Group 'g' has no member a"):
        one.beat("a", 1, instance="i")
    with pytest.raises(UnknownMemberError, match="Group 'g' has no member a"):
        group_changes.find_member(one.state, "g", "a", "i")
    with pytest.raises(UnknownGroupError, match="no group 'g'"):
        group_changes.find_group(one.state, "g")
    one.join("a")
    assert group_changes.find_member(one.state, "g", "a", None) is one.members["a"]
    assert group_changes.find_group(one.state, "g") is one.state.groups["g"]


# --- limits ---------------------------------------------------------------------------------------

HALF = "x" * 8_191
MANY = frozenset(("T", number) for number in range(100_001))


@pytest.mark.parametrize(
    "good, bad, text",
    [
        (
            {"topics": tuple(str(number) for number in range(1_000))},
            {"topics": tuple(str(number) for number in range(1_001))},
            "up to 1000 topics of 16384 bytes in all, not 1001 of 2894",
        ),
        ({"topics": ("ä", HALF, HALF)}, {"topics": ("ä", HALF, HALF + "x")}, "not 3 of 16385"),
        ({"client": "x" * 256}, {"client": "x" * 257}, "up to 256 characters, not 257"),
        ({"owned": MANY - {P0}}, {"owned": MANY}, "up to 100000 partitions, not 100001"),
        ({"session_timeout_ms": 100}, {"session_timeout_ms": 99}, "at least 100, not 99"),
    ],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_what_a_member_may_say_has_limits(
    good: dict[str, Any], bad: dict[str, Any], text: str, is_new: bool
) -> None:
    one = Coordinator()
    if not is_new:
        one.beat("a")
        bad = {**bad, "client": bad.get("client", "etl")}
    before = dict(one.members)
    with pytest.raises(InvalidRequestError, match=text):
        one.beat("a", **bad)
    assert one.members == before
    one.beat("a", **good)
    assert "a" in one.members


@pytest.mark.parametrize("epoch", [0, None])
@pytest.mark.parametrize(
    "changes, error",
    [
        ({"assignor": "nobodys"}, UnknownAssignorError),
        ({"assignor": "failing"}, InvalidAssignmentError),
        ({"pattern": "("}, InvalidRequestError),
    ],
)
def test_a_member_that_asks_for_the_impossible_later_stays_as_it_is(
    epoch: int | None, changes: dict[str, Any], error: type[RayqError]
) -> None:
    one = Coordinator()
    one.join("a")
    before, group = one.members["a"], group_of(one)
    with pytest.raises(error):
        one.beat("a", epoch, **changes)
    assert one.members["a"] is before and group_of(one) is group


def test_an_assignor_that_nobody_has_is_refused_also_where_others_name_another() -> None:
    one = Coordinator()
    one.join("a", "b")
    with pytest.raises(UnknownAssignorError, match="'nobodys'"):
        one.beat("c", assignor="nobodys")
    assert set(one.members) == {"a", "b"}


def test_the_last_of_all_members_finds_room_and_a_static_one_its_own_place() -> None:
    one = Coordinator()
    value = MemberValue("i", "", (), None, "uniform", 10_000, 60_000)
    for number in range(group_changes.MEMBERS_MAX - 1):
        named = replace(value, instance="i" if number == 0 else None)
        one.state.replay(MemberRecord("g", f"m{number}", named))
    assert group_changes.MEMBERS_MAX == 1_000
    one.beat("last")
    with pytest.raises(GroupLimitError, match="Group 'g' has 1000 members"):
        one.beat("more")
    one.beat("again", 0, instance="i", topics=())
    assert len(one.members) == 1_000 and "m0" not in one.members
    one.beat("last", 0)


def test_the_last_of_all_groups_finds_room() -> None:
    one = Coordinator()
    for number in range(group_draft.GROUPS_MAX - 1):
        one.state.replay(GroupRecord(f"h{number}", GroupValue(empty_since_ms=0)))
    assert group_draft.GROUPS_MAX == 10_000
    one.beat("a")
    beat = heartbeat_of("b", 0, None, "", ("t",), None, "uniform", 1_000, 1_000, NOTHING)
    another = msgspec.structs.replace(beat, group="another")
    with pytest.raises(GroupLimitError, match="has 10000 groups"):
        group_changes.heartbeat(one.state, another, Times(**one.now))
    group_changes.heartbeat(
        one.state, msgspec.structs.replace(beat, group="h0"), Times(**one.now)
    )


def test_the_last_of_all_patterns_finds_room() -> None:
    one = Coordinator()
    value = MemberValue(None, "", (), None, "uniform", 10_000, 60_000)
    for number in range(PATTERNS_MAX - 1):
        one.state.replay(MemberRecord(f"h{number % 3}", f"m{number}", replace(value, pattern=f"p{number}")))
    assert PATTERNS_MAX == 250
    one.beat("none")
    one.beat("last", pattern="last")
    with pytest.raises(GroupLimitError, match="have 250 different patterns"):
        one.beat("more", pattern="more")
    one.beat("same", pattern="p7")


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "present, votes, chosen",
    [
        ("uniform", {"range": 1}, "range"),
        ("uniform", {"range": 1, "uniform": 1}, "uniform"),
        ("range", {"range": 1, "uniform": 1}, "range"),
        ("range", {"range": 1, "uniform": 2}, "uniform"),
        ("uniform", {"range": 2, "uniform": 1}, "range"),
        ("other", {"range": 2, "third": 2, "uniform": 1}, "range"),
        ("third", {"range": 2, "third": 2, "uniform": 1}, "third"),
        ("uniform", {"range": 2, "third": 2, "uniform": 1}, "range"),
        ("range", {}, "range"),
    ],
)
def test_the_assignor_with_most_votes_counts_and_the_present_one_in_a_tie(
    present: str, votes: dict[str, int], chosen: str
) -> None:
    one = Coordinator()
    one.state.assignors = {**one.state.assignors, "third": one.state.assignors["uniform"]}
    one.state.replay(GroupRecord("g", GroupValue(assignor=present)))
    value = MemberValue(None, "", ("t",), None, "uniform", 10_000, 60_000)
    names = [name for name, count in votes.items() for _ in range(count)]
    for number, name in enumerate(reversed(names)):
        one.state.replay(MemberRecord("g", f"m{number}", replace(value, assignor=name)))
    draft = group_draft.GroupDraft(one.state, "g", 7)
    draft.rebalance("why", may_fail=True)
    assert draft.records()[-1] == GroupRecord("g", GroupValue(chosen, 1, "why", 7, None if votes else 7))


def test_a_rebalance_tells_the_assignor_what_there_is_now() -> None:
    one = Coordinator(partitions=2)
    asked: list[Any] = []

    def asking(members: Any, partitions: Any, current: Any) -> Any:
        asked.append((members, partitions, current))
        return one.state.assignors["range"](members, partitions, current)

    one.state.assignors = {**one.state.assignors, "asking": asking}
    topics = {**one.topics, "u": SubscribedTopic("U", 1), "v": SubscribedTopic("V", 1)}
    one.apply(all_groups.set_topics(one.state, topics, now_ms=0))
    one.join("b", topics=("t", "gone"), assignor="asking")
    one.join("a", topics=(), pattern="u|t", assignor="asking", instance="i")
    del topics["u"]
    asked.clear()
    one.apply(all_groups.set_topics(one.state, {**topics, "t": SubscribedTopic("T", 3)}, now_ms=0))
    ((members, partitions, current),) = asked
    assert list(members.items()) == [("a", ({"t"}, "i")), ("b", ({"t"}, None))]
    assert partitions == {"t": 3}
    assert current == {"a": {("t", 1)}, "b": {("t", 0)}}


def test_where_an_assignor_fails_the_reason_says_so_within_bounds() -> None:
    one = Coordinator()
    good = one.state.assignors
    one.state.assignors = {**good, "failing": good["uniform"]}
    one.join("a", "b", assignor="failing")
    one.state.assignors = good
    one.apply(group_changes.leave(one.state, "g", "b", "x" * 600, now_ms=0))
    assert one.reason == ("member b left: " + "x" * 600)[:512]
    assert group_of(one).assignor == "failing"
    one.state.assignors = {name: good[name] for name in ("uniform", "range")}
    one.apply(all_groups.set_topics(one.state, {"t": SubscribedTopic("T", 4)}, now_ms=0))
    assert one.reason.startswith(
        "the partitions of t changed (uniform instead of 'failing': There is no assignor 'failing'"
    )
    assert one.members["a"].target == {P0, P1, P2, P3}


def test_a_member_whose_assignor_is_gone_stays_as_long_as_it_asks_for_nothing_else() -> None:
    """A cluster's `group_assignors` may lack one after a restart."""
    one = Coordinator()
    good = one.state.assignors
    one.state.assignors = {**good, "mine": good["uniform"]}
    one.join("a", "b", assignor="mine")
    one.state.assignors = good
    assert one.beat("a", assignor="mine") == []
    one.apply(group_changes.leave(one.state, "g", "b", "", now_ms=0))
    one.beat("a", assignor="mine")
    assert one.members["a"].assigned == {P0, P1, P2}
    with pytest.raises(UnknownAssignorError):
        one.beat("a", assignor="mine", client="etl")


def test_members_whose_target_stays_are_not_written_again() -> None:
    one = Coordinator(partitions=4)
    one.join("a", "b", "c", "d")
    before = dict(one.members)
    records = one.beat("e")
    assert [record[1] for record in records if isinstance(record, MemberRecord)] == ["e"]
    assert {name: one.members[name] for name in before} == before
    assert all(one.members[name] is value for name, value in before.items())


def test_what_moves_back_and_what_moves_away_change_places_in_one_step() -> None:
    one = Coordinator(partitions=4)
    one.join("a")
    value, group = one.members["a"], group_of(one)
    one.state.replay(
        MemberRecord("g", "a", replace(
            value, target=frozenset({P0, P2}), assigned=frozenset({P0, P1}), revoking=frozenset({P2, P3}),
        ))
    )
    one.state.groups["g"].sessions["a"].is_acked = True
    draft = group_draft.GroupDraft(one.state, "g", 0)
    draft.reconcile()
    moved = draft.members["a"]
    assert (moved.assigned, moved.revoking) == ({P0, P2}, {P1, P3})
    assert (moved.member_epoch, moved.previous_epoch) == (group.epoch + 1, value.member_epoch)
    assert draft.records() == [
        MemberRecord("g", "a", moved), GroupRecord("g", replace(group, epoch=group.epoch + 1)),
    ]

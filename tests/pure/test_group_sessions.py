"""How long a coordinator of groups waits for whom, and what it says of those that it takes out."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.core.decision import Times
from rayq.core.groups import changes as group_changes
from rayq.core.groups.assignors import load_assignors
from rayq.core.groups.records import GroupRecord, MemberRecord
from rayq.core.groups.state import GroupState, SubscribedTopic
from rayq.errors import FencedMemberError, InvalidRequestError, UnknownMemberError
from tests.pure import all_groups
from tests.pure.group_requests import heartbeat_of
from tests.pure.test_group_changes import P0, P1, P2, P3, Coordinator

HASTY = {"max_poll_interval_ms": 4_000}


def silent(one: Coordinator) -> None:
    """The member is not heard any more."""


def cut_off(one: Coordinator) -> None:
    group_changes.disconnected(one.state, "g", "a", now_s=one.now_s)


def holding(one: Coordinator) -> None:
    """The member is to give up a partition, and says that it still has it."""
    one.beat("b")
    one.beat("a", owned=(P0, P1), **HASTY)


@pytest.mark.parametrize(
    "begins, waits_s, reason",
    [
        (silent, 10, "member a was silent for 10.5 s, its session is 10 s"),
        (
            cut_off, 1,
            "member a is gone: its connection broke and it did not come back in 1000 ms",
        ),
        (holding, 4, "member a did not give up partitions within max_poll_interval_ms = 4000"),
    ],
)
def test_a_member_has_the_whole_of_its_time_and_no_more(
    begins: Any, waits_s: float, reason: str
) -> None:
    one = Coordinator(partitions=2)
    one.now_s = 100
    one.join("a", **HASTY)
    begins(one)
    one.pass_time(0)
    before = one.state.groups["g"].value
    one.pass_time(waits_s)
    assert "a" in one.members
    assert one.state.groups["g"].value is before, "nothing was decided"
    one.pass_time(0.5)
    assert "a" not in one.members
    assert one.reason == reason
    assert one.state.groups["g"].value.rebalance_time_ms == (100 + waits_s + 0.5) * 1000


def test_a_member_that_holds_on_is_out_by_the_time_that_it_held_on_in_a_row() -> None:
    one = Coordinator(partitions=2)
    one.join("a", **HASTY)
    for _ in range(3):
        one.beat("b")
        one.beat("a", owned=(P0, P1), **HASTY)
        assert one.members["a"].revoking
        one.pass_time(0)
        one.pass_time(3)
        assert "a" in one.members
        one.apply(group_changes.leave(one.state, "g", "b", "", now_ms=0))
        for _ in range(2):
            one.beat("a", owned=(P0, P1), **HASTY)
        assert one.members["a"].assigned == {P0, P1}
        one.pass_time(0)


def test_under_a_new_coordinator_each_member_has_a_session_from_its_first_look_on() -> None:
    one = Coordinator()
    one.join("a", "b")
    records = [
        *(MemberRecord("g", name, value) for name, value in one.members.items()),
        GroupRecord("g", one.state.groups["g"].value),
    ]
    later = Coordinator()
    later.apply(records)
    later.now_s = 500
    later.pass_time(0)
    later.pass_time(6)
    later.beat("b")
    later.pass_time(4)
    assert set(later.members) == {"a", "b"}
    later.pass_time(0.1)
    assert set(later.members) == {"b"}


@pytest.mark.parametrize(
    "members, reason",
    [
        ("a", "member a S"),
        ("ab", "member a S; member b S"),
        ("abc", "member a S; member b S; member c S"),
        ("abcd", "member a S; member b S; member c S (and 1 more)"),
        ("abcde", "member a S; member b S; member c S (and 2 more)"),
    ],
)
def test_three_of_those_that_are_taken_out_together_are_named(members: str, reason: str) -> None:
    one = Coordinator()
    one.join(*members)
    one.now_s = 11
    records = all_groups.end_sessions(one.state, disconnect_grace_ms=1000, **one.now)
    assert [record[:2] for record in records[:-1]] == [("g", member) for member in members]
    assert all(record.value is None for record in records[:-1])
    one.apply(records)
    assert one.reason == reason.replace("S", "was silent for 11.0 s, its session is 10 s")
    assert one.state.groups["g"].value.empty_since_ms == 11_000


def test_sessions_end_in_each_group_for_itself() -> None:
    one = Coordinator()
    one.join("a")
    one.beat("z", client="other")
    for name in ("h", "i"):
        beat = heartbeat_of(
            "x", 0, None, "cli", ("t",), None, "uniform", 20_000, 60_000, (), name
        )
        one.apply(group_changes.heartbeat(one.state, beat, Times(**one.now)))
    one.pass_time(0)
    untouched = one.state.groups["h"].value
    one.now_s = 15
    records = all_groups.end_sessions(one.state, disconnect_grace_ms=1000, **one.now)
    assert {record[0] for record in records} == {"g"}
    one.apply(records)
    assert one.state.groups["h"].value is untouched
    one.now_s = 20.1
    one.apply(all_groups.end_sessions(one.state, disconnect_grace_ms=1000, **one.now))
    assert not one.state.groups["h"].members and not one.state.groups["i"].members
    reason = "member x (cli) was silent for 20.1 s, its session is 20 s"
    assert one.state.groups["h"].value.reason == one.state.groups["i"].value.reason == reason


@pytest.mark.parametrize(
    "begins, waits_s", [(silent, 10), (cut_off, 1), (holding, 4)]
)
def test_each_wait_is_longer_by_the_time_in_which_nobody_could_be_heard(
    begins: Any, waits_s: float
) -> None:
    one = Coordinator(partitions=2)
    one.join("a", **HASTY)
    begins(one)
    one.pass_time(0)
    group_changes.prolong_sessions(one.state, 2.5)
    one.pass_time(waits_s + 2.4)
    assert "a" in one.members
    one.pass_time(0.2)
    assert "a" not in one.members


def test_who_was_not_looked_at_has_no_wait_that_could_be_longer() -> None:
    state = GroupState(load_assignors(None))
    one = Coordinator()
    one.join("a")
    state.replay(MemberRecord("g", "a", one.members["a"]))
    group_changes.prolong_sessions(state, 30)
    session = state.groups["g"].sessions["a"]
    assert (session.heard_s, session.disconnected_s, session.revoking_since_s) == (None, None, None)


def test_a_heartbeat_that_is_refused_prolongs_no_session() -> None:
    one = Coordinator()
    one.join("a")
    one.pass_time(9)
    group_changes.disconnected(one.state, "g", "a", now_s=one.now_s)
    epoch = one.members["a"].member_epoch
    with pytest.raises(FencedMemberError):
        one.beat("a", epoch + 1)
    for at in (0, epoch):
        with pytest.raises(InvalidRequestError):
            one.beat("a", at, pattern="(")
    session = one.state.groups["g"].sessions["a"]
    assert (session.heard_s, session.disconnected_s) == (0.0, 9.0)


def test_a_heartbeat_of_any_accepted_epoch_begins_the_session_again() -> None:
    one = Coordinator()
    one.join("a")
    one.beat("b")
    one.beat("a", owned=(P0, P1, P2))
    value = one.members["a"]
    assert value.previous_epoch < value.member_epoch
    for seconds, epoch in ((3, value.previous_epoch), (6, value.member_epoch), (9, 0)):
        one.now_s = seconds
        group_changes.disconnected(one.state, "g", "a", now_s=one.now_s)
        one.beat("a", epoch)
        session = one.state.groups["g"].sessions["a"]
        assert (session.heard_s, session.disconnected_s) == (seconds, None)


@pytest.mark.parametrize(
    "group, member", [("g", "stranger"), ("elsewhere", "a"), ("g", "static")]
)
def test_a_connection_that_breaks_concerns_no_one_else(group: str, member: str) -> None:
    one = Coordinator()
    one.join("a")
    one.join("static", instance="i")
    group_changes.disconnected(one.state, group, member, now_s=5)
    assert {one.disconnected_s for one in one.state.groups["g"].sessions.values()} == {None}
    assert set(one.state.groups) == {"g"}


# --- who leaves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("group, member", [("g", "stranger"), ("elsewhere", "a")])
def test_who_is_no_member_has_left_already(group: str, member: str) -> None:
    one = Coordinator()
    one.join("a")
    assert group_changes.leave(one.state, group, member, "", now_ms=0) == []
    assert group_changes.leave_static(one.state, group, member, **one.now) == []
    assert set(one.state.groups) == {"g"}


@pytest.mark.parametrize(
    "client, why, reason",
    [
        ("", "", "member abcd left"),
        ("etl", "", "member abcd (etl) left"),
        ("etl", "done", "member abcd (etl) left: done"),
    ],
)
def test_who_leaves_is_out_at_once_and_named(client: str, why: str, reason: str) -> None:
    one = Coordinator(partitions=2)
    one.join("abcdefghi", client=client)
    one.beat("b")
    one.now_s = 7
    records = one.apply(group_changes.leave(one.state, "g", "abcdefghi", why, now_ms=7_000))
    assert records[0] == MemberRecord("g", "abcdefghi", None)
    assert set(one.members) == set(one.state.groups["g"].sessions) == {"b"}
    assert one.members["b"].target == {P0, P1}
    value = one.state.groups["g"].value
    assert (value.reason, value.rebalance_time_ms, value.empty_since_ms) == (reason, 7_000, None)


def test_a_static_member_that_goes_gives_up_what_it_was_asked_to_and_keeps_the_rest() -> None:
    one = Coordinator(partitions=2)
    one.join("s", instance="i")
    one.beat("b")
    one.beat("b")
    one.beat("s", owned=(P0, P1), instance="i")
    before = one.members["s"]
    assert before.assigned and before.revoking
    group = one.state.groups["g"].value
    one.now_s = 8
    records = one.apply(group_changes.leave_static(one.state, "g", "s", **one.now))
    assert one.members["s"].revoking == frozenset()
    assert (one.members["s"].assigned, one.members["s"].member_epoch) == (
        before.assigned, before.member_epoch,
    )
    assert one.members["b"].assigned == before.revoking
    assert [record[:2] for record in records[:-1]] == [("g", "s"), ("g", "b")]
    assert one.state.groups["g"].value.reason == group.reason, "that is no rebalance"
    one.pass_time(9.9)
    assert "s" in one.members, "its session begins when it goes"


def test_while_a_static_member_is_away_nothing_of_its_is_moved() -> None:
    one = Coordinator(partitions=4)
    one.join("s", instance="i")
    had = one.members["s"]
    assert one.apply(group_changes.leave_static(one.state, "g", "s", **one.now)) == []
    assert one.members["s"] is had
    one.beat("b")
    one.beat("b")
    assert one.members["s"].assigned == had.assigned == {P0, P1, P2, P3}
    assert len(one.members["s"].target) == 2 and not one.members["b"].assigned
    one.beat("s2", 0, instance="i")
    assert one.members["s2"].assigned == one.members["s2"].target
    one.beat("s2", instance="i")
    assert one.members["b"].assigned == one.members["b"].target != frozenset()


def test_a_static_member_that_is_away_longer_than_its_session_is_unknown() -> None:
    one = Coordinator()
    one.join("s", instance="i")
    one.apply(group_changes.leave_static(one.state, "g", "s", **one.now))
    one.pass_time(10.1)
    assert not one.members
    with pytest.raises(UnknownMemberError):
        one.beat("s", 1, instance="i")


# --- topics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grown, reason",
    [
        ("a", "the partitions of a changed"),
        ("cba", "the partitions of a, b, c changed"),
        ("dcba", "the partitions of a, b, c, ... changed"),
    ],
)
def test_up_to_three_topics_that_changed_are_named(grown: str, reason: str) -> None:
    one = Coordinator()
    topics = {name: SubscribedTopic(name.upper(), 1) for name in "abcd"}
    one.apply(all_groups.set_topics(one.state, topics, now_ms=0))
    one.join("m", topics=("a", "b", "c", "d"))
    later = {
        name: info._replace(partitions=2) if name in grown else info
        for name, info in topics.items()
    }
    one.apply(all_groups.set_topics(one.state, later, now_ms=3_000))
    value = one.state.groups["g"].value
    assert (value.reason, value.rebalance_time_ms) == (reason, 3_000)
    assert one.members["m"].assigned == {
        (info.topic_id, number) for info in later.values() for number in range(info.partitions)
    }


def test_topics_that_a_group_does_not_read_are_nothing_to_it() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    before = one.state.groups["g"].value
    assert all_groups.set_topics(one.state, dict(one.topics), now_ms=9) == []
    more = {**one.topics, "u": SubscribedTopic("U", 3)}
    assert all_groups.set_topics(one.state, more, now_ms=9) == []
    assert one.state.topics == more
    one.apply(group_changes.leave(one.state, "g", "a", "", now_ms=0))
    empty = one.state.groups["g"].value
    assert all_groups.set_topics(one.state, {}, now_ms=9) == [], "a group without members"
    assert one.state.groups["g"].value is empty is not before


def test_a_topic_that_went_is_named_and_its_partitions_are_given_up() -> None:
    one = Coordinator(partitions=2)
    one.join("a", "b", topics=("t", "u"))
    one.apply(all_groups.set_topics(one.state, {}, now_ms=0))
    assert one.reason == "the partitions of t changed"
    for member in ("a", "b"):
        value = one.members[member]
        assert (value.target, value.assigned, len(value.revoking)) == (frozenset(), frozenset(), 1)
        one.beat(member, topics=("t", "u"), owned=())
        assert not one.members[member].owned

"""Single decisions of a coordinator about members and positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from rayq.core.decision import Times
from rayq.core.groups import changes as group_changes
from rayq.core.groups import draft as group_draft
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups.assignors import load_assignors
from rayq.core.groups.records import NOTHING, OffsetRecord, Record
from rayq.core.groups.state import GroupState, Reader, SubscribedTopic
from rayq.core.groups.topic_pattern import matches
from rayq.errors import (
    FencedMemberError,
    GroupLimitError,
    GroupNotEmptyError,
    InvalidAssignmentError,
    InvalidRequestError,
    RayqError,
    UnknownAssignorError,
    UnknownGroupError,
    UnknownMemberError,
)
from rayq.messages import OffsetCommit
from tests.pure import all_groups, group_requests
from tests.pure.group_requests import delete_group, heartbeat_of, set_offsets

P0, P1, P2, P3 = (("T", number) for number in range(4))
SAID = (
    "instance", "client", "topics", "pattern", "assignor", "session_timeout_ms",
    "max_poll_interval_ms",
)
"""What a member says of itself, and is kept."""


def failing(members: Any, partitions: Any, current: Any) -> Any:
    raise RuntimeError("boom")


class Coordinator:
    """A group's state with its clock. Every decision is replayed at once."""

    def __init__(self, partitions: int = 3) -> None:
        self.readable = {"t"}
        """The topics that named principals may read, whoever they are."""
        self.state = GroupState(
            {**load_assignors(None), "failing": failing}, lambda _, topic: topic in self.readable
        )
        self.now_s = 0.0
        self.topics = {"t": SubscribedTopic("T", partitions)}
        self.apply(all_groups.set_topics(self.state, self.topics, now_ms=0))

    @property
    def now(self) -> dict[str, Any]:
        return {"now_s": self.now_s, "now_ms": int(self.now_s * 1000)}

    def apply(self, records: list[Record]) -> list[Record]:
        for record in records:
            self.state.replay(record)
        self.state.validate()
        return records

    def beat(
        self, member: str, epoch: int | None = None, owned: Any = None, **changes: Any
    ) -> list[Record]:
        """A heartbeat. By default it owns the assigned partitions; `epoch` None is the present
        epoch."""
        known = self.members.get(member)
        values = {
            "member": member, "member_epoch": 0 if known is None else known.member_epoch,
            "instance": None, "client": "", "topics": ("t",), "pattern": None, "assignor": "uniform",
            "session_timeout_ms": 10_000, "max_poll_interval_ms": 60_000,
            "owned": frozenset() if known is None else known.assigned,
        }
        if epoch is not None:
            values["member_epoch"] = epoch
        if owned is not None:
            values["owned"] = frozenset(owned)
        reader = changes.pop("reader", None)
        beat = heartbeat_of(**{**values, **changes})
        return self.apply(group_changes.heartbeat(self.state, beat, Times(**self.now), reader))

    def join(self, *members: str, **changes: Any) -> None:
        """Members join, and everything settles."""
        for member in members:
            self.beat(member, **changes)
        for _ in range(3):
            for member, value in list(self.members.items()):
                self.beat(member, **{name: getattr(value, name) for name in SAID})

    @property
    def members(self) -> Any:
        return self.state.groups["g"].members if "g" in self.state.groups else {}

    def commit(self, member: str, epoch: int, offset: int, *at: Any, sequence: int = 1) -> Any:
        records, refused = group_requests.commit(
            self.state, "g", member=member, member_epoch=epoch, sequence=sequence,
            offsets=[OffsetCommit(*one, offset, None, "") for one in at], now_ms=self.now["now_ms"],
        )
        self.apply(list(records))
        return refused

    def offset(self, at: Any) -> int:
        return self.state.groups["g"].offsets[at].offset

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.apply(all_groups.end_sessions(self.state, disconnect_grace_ms=1000, **self.now))

    @property
    def reason(self) -> str:
        return self.state.groups["g"].value.reason


def test_members_whose_partitions_do_not_move_see_no_change_when_another_joins() -> None:
    one = Coordinator(partitions=3)
    one.join("c1", "c2")
    assert {len(one.members[name].assigned) for name in ("c1", "c2")} == {1, 2}
    before = dict(one.members)
    records = one.beat("c3")
    gives = max(before, key=lambda name: len(before[name].assigned))
    (stays,) = set(before) - {gives}
    assert one.members[stays] is before[stays]
    assert not any(record[1] == stays for record in records)
    assert len(one.members[gives].revoking) == 1
    assert not one.members["c3"].assigned


def test_a_partition_is_given_on_only_when_its_owner_says_it_gave_it_up() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.beat("b")
    (moving,) = one.members["a"].revoking
    assert one.beat("b") == []
    one.beat("a", owned=(P0, P1))  # the member knows, but still owns it
    assert not one.members["b"].assigned
    epoch = one.members["a"].member_epoch
    one.beat("a")
    assert one.members["b"].assigned == {moving}
    assert not one.members["a"].revoking
    # Its epoch, which it knows, means what it meant.
    assert one.members["a"].member_epoch == epoch
    assert one.state.groups["g"].sessions["a"].is_acked


def test_an_old_heartbeat_gives_nothing_up() -> None:
    one = Coordinator(partitions=2)
    one.beat("a")
    epoch = one.members["a"].member_epoch
    one.beat("a", epoch, owned=())  # the member has not taken them yet
    one.beat("b")
    assert one.members["a"].revoking
    one.beat("a", epoch, owned=())  # the same again, late: it may have taken them since
    assert one.members["a"].revoking
    one.beat("a", owned=one.members["a"].assigned)
    assert not one.members["a"].revoking


def test_an_assignment_stays_until_the_member_knows_it() -> None:
    """Hence each epoch of a member means one assignment."""
    one = Coordinator(partitions=2)
    one.beat("a")
    before = one.members["a"]
    one.beat("b")
    assert (one.members["a"].member_epoch, one.members["a"].assigned) == (
        before.member_epoch, before.assigned,
    )
    one.beat("a")
    assert one.members["a"].member_epoch > before.member_epoch
    assert one.members["a"].previous_epoch == before.member_epoch


def test_a_partition_that_is_to_stay_after_all_goes_back_to_its_owner() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.beat("b")
    one.apply(group_changes.leave(one.state, "g", "b", "", now_ms=0))
    one.beat("a", owned=(P0, P1))
    assert one.members["a"].assigned == {P0, P1}
    assert not one.members["a"].revoking


def test_commits_count_under_the_present_and_the_previous_epoch() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    epoch = one.members["a"].member_epoch
    one.beat("b")
    (moving,) = one.members["a"].revoking
    assert one.commit("a", epoch, 5, moving) == []  # given up, answer not heard yet
    assert one.commit("a", one.members["a"].member_epoch, 6, P0, P1, sequence=2) == []
    assert one.offset(moving) == 6
    with pytest.raises(FencedMemberError):
        one.commit("a", epoch - 1, 7, P0)
    with pytest.raises(UnknownMemberError):
        one.commit("stranger", 1, 7, P0)


def test_a_commit_for_what_was_taken_away_is_refused_and_the_rest_is_done() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.join("b")
    (kept,) = one.members["a"].assigned
    (gone,) = one.members["b"].assigned
    refused = one.commit("a", one.members["a"].member_epoch, 9, kept, gone)
    assert [(*at, code) for *at, code, _ in refused] == [(*gone, "CommitRefusedError")]
    assert "t-" in refused[0][3]
    assert one.offset(kept) == 9
    assert gone not in one.state.groups["g"].offsets


def test_a_late_commit_of_an_earlier_life_is_refused() -> None:
    one = Coordinator(partitions=1)
    one.join("a")
    epoch = one.members["a"].member_epoch
    one.commit("a", epoch, 5, P0)
    one.pass_time(0.1)
    one.pass_time(11)  # the member's session ends
    one.join("b")
    one.commit("b", one.members["b"].member_epoch, 50, P0)
    one.apply(group_changes.leave(one.state, "g", "b", "", now_ms=0))
    one.join("a")
    with pytest.raises(FencedMemberError):
        one.commit("a", epoch, 6, P0, sequence=9)
    assert one.offset(P0) == 50


def test_a_late_commit_is_refused_when_the_partition_went_and_came_back_meanwhile() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.beat("b")
    (moving,) = one.members["a"].revoking
    one.beat("a", owned=(P0, P1))  # the member still gives it up
    late = one.members["a"].member_epoch
    one.join("b")
    (kept,) = one.members["a"].assigned
    assert one.commit("b", one.members["b"].member_epoch, 50, moving) == []
    one.apply(group_changes.leave(one.state, "g", "b", "", now_ms=0))
    assert one.members["a"].assigned == {kept, moving}
    assert one.members["a"].previous_epoch == late
    refused = one.commit("a", late, 6, moving, kept)
    assert [tuple(at) for *at, _, _ in refused] == [moving]
    assert (one.offset(moving), one.offset(kept)) == (50, 6)
    assert one.commit("a", one.members["a"].member_epoch, 60, moving, sequence=2) == []


def test_who_begins_anew_is_not_bound_by_its_commits_of_before() -> None:
    one = Coordinator(partitions=1)
    one.join("a")
    epoch = one.members["a"].member_epoch
    one.beat("a", 0, owned=())
    assert one.members["a"].member_epoch > epoch
    with pytest.raises(FencedMemberError):
        one.commit("a", epoch, 6, P0)


def test_who_begins_anew_with_other_topics_gets_another_target() -> None:
    one = Coordinator(partitions=1)
    one.join("a", client="etl")
    assert one.reason == "member a (etl) joined"
    assert one.members["a"].target == {P0}
    one.beat("a", 0, owned=(), topics=("u",))
    assert not one.members["a"].target
    assert one.reason == "member a changed its subscription"


def test_a_join_whose_answer_was_lost_may_be_repeated() -> None:
    one = Coordinator()
    one.beat("a", 0)
    before = one.members["a"]
    assert one.beat("a", 0, owned=()) == []
    assert one.members["a"] is before


@pytest.mark.parametrize("instance", [None, "i"])
def test_who_begins_anew_or_takes_over_has_nothing_to_give_up(instance: str | None) -> None:
    one = Coordinator(partitions=2)
    one.join("a", instance=instance)
    one.beat("b")
    (moving,) = one.members["a"].revoking
    one.beat("a", owned=(P0, P1), instance=instance)  # It knows.
    later = "a2" if instance else "a"
    one.beat(later, 0, owned=(), instance=instance)
    assert not one.members[later].revoking
    one.beat("b")
    assert one.members["b"].assigned == {moving}


def test_who_says_something_else_still_has_what_it_did_not_give_up() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.beat("b")
    (moving,) = one.members["a"].revoking
    one.beat("a", owned=(P0, P1), client="renamed")
    one.beat("b")
    assert one.members["a"].revoking == {moving} and not one.members["b"].assigned


def test_a_join_that_is_repeated_is_heard() -> None:
    one = Coordinator()
    one.beat("a", 0)
    group_changes.disconnected(one.state, "g", "a", now_s=one.now_s)
    one.now_s += 9
    one.beat("a", 0)  # The answer was lost with the connection.
    one.pass_time(9)
    assert set(one.members) == {"a"}


def test_a_commit_that_was_overtaken_is_dropped() -> None:
    one = Coordinator(partitions=1)
    one.join("a")
    epoch = one.members["a"].member_epoch
    one.commit("a", epoch, 10, P0, sequence=2)
    assert one.commit("a", epoch, 5, P0, sequence=1) == []
    assert one.offset(P0) == 10
    one.commit("a", epoch, 3, P0, sequence=3)  # the member sought back, as it may
    assert one.offset(P0) == 3


def test_a_silent_member_is_out_after_its_session() -> None:
    one = Coordinator()
    one.join("a", "b")
    one.pass_time(6)
    one.beat("a")
    one.pass_time(6)
    assert set(one.members) == {"a"}
    assert "silent for 12.0 s" in one.reason
    with pytest.raises(UnknownMemberError, match="join"):
        one.beat("b", 1)
    one.beat("a")
    assert one.members["a"].assigned == {P0, P1, P2}


def test_a_broken_connection_gives_a_dynamic_member_a_short_grace() -> None:
    one = Coordinator()
    one.join("a", "b")
    one.join("s", instance="i")
    for member in ("a", "b", "s"):
        group_changes.disconnected(one.state, "g", member, now_s=one.now_s)
    one.pass_time(0.9)
    one.beat("b")  # the member is back, on another connection
    one.pass_time(0.2)
    assert set(one.members) == {"b", "s"}
    assert "connection broke" in one.reason


def test_who_does_not_give_up_in_time_is_out() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.beat("b")
    for _ in range(14):
        one.beat("a", owned=(P0, P1))
        one.beat("b")
        one.pass_time(5)
    assert set(one.members) == {"b"}
    assert "max_poll_interval_ms = 60000" in one.reason
    one.beat("b")
    assert one.members["b"].assigned == {P0, P1}


def test_time_in_which_nobody_could_be_heard_does_not_count() -> None:
    one = Coordinator()
    one.join("a")
    one.pass_time(0.1)
    group_changes.prolong_sessions(one.state, 30)
    one.pass_time(30)
    assert set(one.members) == {"a"}


def test_a_static_member_comes_back_to_what_it_had() -> None:
    one = Coordinator(partitions=4)
    one.join("a")
    one.join("s1", instance="i")
    had, others = one.members["s1"].assigned, one.members["a"]
    one.apply(group_changes.leave_static(one.state, "g", "s1", **one.now))
    assert one.state.groups["g"].name_of_state == "stable"
    one.beat("s2", 0, instance="i")
    assert one.members["s2"].assigned == had
    assert one.members["a"] is others
    assert "s1" not in one.members
    with pytest.raises(FencedMemberError, match="group_instance_id"):
        one.beat("s1", 1, instance="i")


def test_a_member_without_an_instance_id_leaves_for_good_whatever_it_says() -> None:
    one = Coordinator(partitions=2)
    one.join("a", "b")
    one.apply(group_changes.leave_static(one.state, "g", "a", **one.now))
    assert one.members.keys() == {"b"}


def test_a_static_member_that_stays_away_loses_its_partitions_with_its_session() -> None:
    one = Coordinator(partitions=2)
    one.join("a")
    one.join("s", instance="i")
    one.apply(group_changes.leave_static(one.state, "g", "s", **one.now))
    one.pass_time(9)
    one.beat("a")
    assert "s" in one.members
    one.pass_time(2)
    one.beat("a")
    assert one.members["a"].assigned == {P0, P1}


ANNA, BEN = Reader("anna", "10.0.0.1"), Reader("ben", "10.0.0.1")


def test_a_pattern_matches_what_its_principal_may_read() -> None:
    one = Coordinator(partitions=1)
    topics = {name: SubscribedTopic(name.upper(), 1) for name in ("t", "secret", "orders")}
    one.apply(all_groups.set_topics(one.state, topics, now_ms=0))
    one.beat("a", topics=(), pattern=".*", reader=ANNA)
    assert one.members["a"].assigned == {("T", 0)}
    assert "secret" not in one.reason and "orders" not in one.reason
    # Who may read everything may do so in the same group.
    one.beat("b", topics=(), pattern=".*")
    assert one.members["b"].target >= {("SECRET", 0), ("ORDERS", 0)}
    assert one.members["a"].target <= {("T", 0)}


def test_a_pattern_follows_what_its_principal_may_read() -> None:
    one = Coordinator(partitions=1)
    topics = {name: SubscribedTopic(name.upper(), 1) for name in ("t", "orders")}
    one.apply(all_groups.set_topics(one.state, topics, now_ms=0))
    one.beat("a", topics=(), pattern=".*", reader=ANNA)

    def access_changes(*readable: str) -> None:
        one.readable = set(readable)
        one.state.take_topics(topics)
        one.apply(group_changes.follow_topics(one.state, "g", now_ms=0))
        one.beat("a", topics=(), pattern=".*", reader=ANNA)

    access_changes("t", "orders")
    assert one.members["a"].assigned == {("T", 0), ("ORDERS", 0)}
    access_changes("orders")
    assert one.members["a"].assigned == {("ORDERS", 0)}
    one.beat("b", topics=(), pattern=".*")
    access_changes()  # The other member still reads it.
    assert one.members["a"].target == NOTHING
    assert one.members["b"].target == {("T", 0), ("ORDERS", 0)}


def test_a_member_that_goes_on_as_another_principal_reads_what_that_may() -> None:
    one = Coordinator(partitions=1)
    one.state = GroupState(load_assignors(None), lambda reader, _: reader.principal == "anna")
    one.apply(all_groups.set_topics(one.state, one.topics, now_ms=0))
    one.beat("a", topics=(), pattern=".*", reader=ANNA)
    assert one.members["a"].assigned == {("T", 0)}
    one.beat("a", topics=(), pattern=".*", reader=BEN)
    assert one.members["a"].target == NOTHING
    one.beat("a", topics=(), pattern=".*")
    assert one.members["a"].target == {("T", 0)}


def test_a_group_follows_its_topics() -> None:
    one = Coordinator(partitions=2)
    one.beat("a", topics=("later",), pattern="t|new-.*")
    one.beat("a", topics=("later",), pattern="t|new-.*")
    assert one.members["a"].assigned == {P0, P1}
    topics = {"t": SubscribedTopic("T2", 1), "new-1": SubscribedTopic("N", 1), "later": SubscribedTopic("L", 1)}
    one.apply(all_groups.set_topics(one.state, topics, now_ms=0))
    assert one.members["a"].assigned == {("T2", 0), ("N", 0), ("L", 0)}
    assert one.members["a"].revoking == {P0, P1}
    assert "later" in one.reason


def test_positions_in_a_deleted_topic_are_forgotten_after_a_while() -> None:
    one = Coordinator(partitions=1)
    one.commit("", 0, 5, P0, ("new", 0))
    for seconds in (0, 5, 6):
        one.now_s += seconds
        one.apply(all_groups.forget_topics(one.state, now_s=one.now_s))
    assert set(one.state.groups["g"].offsets) == {P0}


def test_positions_without_members_are_set_only_while_there_are_none() -> None:
    one = Coordinator()
    one.commit("", 0, 5, P0)
    one.apply(set_offsets(one.state, "g", [OffsetCommit(*P0, 2, None, "")], now_ms=0))
    assert one.offset(P0) == 2
    one.join("a")
    with pytest.raises(GroupNotEmptyError):
        one.commit("", 0, 6, P0)
    with pytest.raises(GroupNotEmptyError):
        set_offsets(one.state, "g", [], now_ms=0)
    with pytest.raises(GroupNotEmptyError):
        delete_group(one.state, "g")
    one.apply(group_changes.leave(one.state, "g", "a", "done", now_ms=0))
    assert one.reason == "member a left: done"
    records = one.apply(delete_group(one.state, "g"))
    assert all(record.value is None for record in records)
    assert one.state.groups == {}
    with pytest.raises(UnknownGroupError):
        delete_group(one.state, "g")


def test_positions_of_an_idle_group_expire_and_the_group_with_them() -> None:
    one = Coordinator()
    one.commit("", 0, 5, P0)
    one.now_s = 8
    one.commit("", 0, 5, P1)

    def expire(now_ms: int) -> int:
        records = all_groups.expire_offsets(one.state, now_ms=now_ms, retention_ms=10_000)
        one.apply(records)
        return sum(isinstance(record, OffsetRecord) for record in records)

    assert expire(10_000) == 0
    assert expire(10_001) == 1
    assert expire(18_001) == 1
    assert one.state.groups == {}
    one.join("a")
    one.commit("a", one.members["a"].member_epoch, 5, P0)
    assert expire(10**9) == 0


def test_the_assignor_that_most_members_name_is_used() -> None:
    one = Coordinator(partitions=4)
    one.join("a", "b")
    assert one.state.groups["g"].value.assignor == "uniform"
    one.beat("b", assignor="range")
    assert one.state.groups["g"].value.assignor == "uniform"
    one.beat("a", assignor="range")
    assert one.state.groups["g"].value.assignor == "range"


def test_a_failing_assignor_refuses_the_join_and_never_strands_the_others() -> None:
    one = Coordinator()
    with pytest.raises(InvalidAssignmentError, match="boom"):
        one.beat("a", assignor="failing")
    assert not one.members
    good = one.state.assignors
    one.state.assignors = {**good, "failing": good["uniform"]}
    for member in ("b", "a", "a"):
        one.beat(member, assignor="failing")
    one.state.assignors = {**good, "failing": failing}
    one.apply(group_changes.leave(one.state, "g", "b", "", now_ms=0))
    assert "b" not in one.members
    one.apply(all_groups.set_topics(one.state, {"t": SubscribedTopic("T", 4)}, now_ms=0))
    assert one.members["a"].target == {P0, P1, P2, P3}
    assert "uniform instead of 'failing'" in one.reason


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"assignor": "nobodys"}, UnknownAssignorError),
        ({"pattern": "("}, InvalidRequestError),
        ({"pattern": "x" * 2000}, InvalidRequestError),
        ({"topics": tuple(f"t{n}" for n in range(1001))}, InvalidRequestError),
        ({"topics": tuple("x" * 240 + str(n) for n in range(100))}, InvalidRequestError),
        ({"client": "x" * 257}, InvalidRequestError),
        ({"session_timeout_ms": 1}, InvalidRequestError),
        ({"owned": (("T", n) for n in range(100_001))}, InvalidRequestError),
    ],
)
def test_a_member_that_asks_for_the_impossible_is_refused(
    changes: dict[str, Any], error: type[RayqError]
) -> None:
    one = Coordinator()
    with pytest.raises(error):
        one.beat("a", **changes)
    assert "g" not in one.state.groups


def test_a_new_topic_costs_each_pattern_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Coordinator(partitions=1)
    one.beat("a", topics=(), pattern="t.*")
    looked: list[str] = []

    def counting(pattern: str, names: Iterable[str]) -> set[str]:
        looked.extend(names)
        return matches(pattern, names)

    monkeypatch.setattr("rayq.core.groups.state.matches", counting)
    topics = {"t": SubscribedTopic("T", 1), "t2": SubscribedTopic("U", 1), "u": SubscribedTopic("V", 1)}
    one.apply(all_groups.set_topics(one.state, topics, now_ms=0))
    one.beat("a", topics=(), pattern="t.*")
    assert looked == ["t2", "u"]
    assert one.members["a"].target == {P0, ("U", 0)}
    one.apply(all_groups.set_topics(one.state, {"t2": SubscribedTopic("U", 1)}, now_ms=0))
    assert looked == ["t2", "u"]
    assert one.members["a"].target == {("U", 0)}


def test_there_is_a_limit_on_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_changes, "PATTERNS_MAX", 2)
    one = Coordinator()
    one.beat("a", pattern="a.*")
    one.beat("b", pattern="b.*")
    with pytest.raises(GroupLimitError, match="2 different patterns"):
        one.beat("c", pattern="c.*")
    one.beat("c", pattern="a.*")


def test_there_is_a_limit_on_members_and_groups_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_changes, "MEMBERS_MAX", 2)
    monkeypatch.setattr(group_draft, "GROUPS_MAX", 2)
    monkeypatch.setattr(group_offsets, "OFFSETS_MAX", 2)
    one = Coordinator()
    one.join("a", "b")
    with pytest.raises(GroupLimitError, match="2 members"):
        one.beat("c")
    group_requests.commit(one.state, "g", member="a", member_epoch=one.members["a"].member_epoch,
                         sequence=1, offsets=[], now_ms=0)
    empty = [OffsetCommit(*P0, 1, None, "")]
    one.apply(set_offsets(one.state, "h", empty, now_ms=0))
    with pytest.raises(GroupLimitError, match="2 groups"):
        set_offsets(one.state, "i", empty, now_ms=0)
    three = [OffsetCommit(*at, 1, None, "") for at in (P0, P1, P2)]
    with pytest.raises(GroupLimitError, match="3 positions"):
        set_offsets(one.state, "h", three, now_ms=0)
    one.apply(group_requests.commit(one.state, "h", member="", member_epoch=0, sequence=0, now_ms=0,
                                   offsets=[OffsetCommit(*P0, 1, None, "x" * 2**19)])[0])
    for at, length in ((P0, 2**20 + 1), (P1, 2**19 + 1)):
        with pytest.raises(GroupLimitError, match="metadata"):
            group_requests.commit(one.state, "h", member="", member_epoch=0, sequence=0, now_ms=0,
                                 offsets=[OffsetCommit(*at, 1, None, "x" * length)])

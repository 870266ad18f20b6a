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
            self.state,
            "g",
            member=member,
            member_epoch=epoch,
            sequence=sequence,
            offsets=[OffsetCommit(*place, offset, None, "") for place in at],
            now_ms=self.now["now_ms"],
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
    group = Coordinator(partitions=3)
    group.join("c1", "c2")
    assert {len(group.members[name].assigned) for name in ("c1", "c2")} == {1, 2}
    before = dict(group.members)
    records = group.beat("c3")
    gives = max(before, key=lambda name: len(before[name].assigned))
    (stays,) = set(before) - {gives}
    assert group.members[stays] is before[stays]
    assert not any(record[1] == stays for record in records)
    assert len(group.members[gives].revoking) == 1
    assert not group.members["c3"].assigned


def test_a_partition_is_given_on_only_when_its_owner_says_it_gave_it_up() -> None:
    group = Coordinator(partitions=2)
    group.join("a")
    group.beat("b")
    (moving,) = group.members["a"].revoking
    assert group.beat("b") == []
    group.beat("a", owned=(P0, P1))  # the member knows, but still owns it
    assert not group.members["b"].assigned
    epoch = group.members["a"].member_epoch
    group.beat("a")
    assert group.members["b"].assigned == {moving}
    assert not group.members["a"].revoking
    # Its epoch, which it knows, means what it meant.
    assert group.members["a"].member_epoch == epoch
    assert group.state.groups["g"].sessions["a"].is_acked


def test_an_old_heartbeat_gives_nothing_up() -> None:
    group = Coordinator(partitions=2)
    group.beat("a")
    epoch = group.members["a"].member_epoch
    group.beat("a", epoch, owned=())  # the member has not taken them yet
    group.beat("b")
    assert group.members["a"].revoking
    group.beat("a", epoch, owned=())  # the same again, late: it may have taken them since
    assert group.members["a"].revoking
    group.beat("a", owned=group.members["a"].assigned)
    assert not group.members["a"].revoking


def test_an_assignment_stays_until_the_member_knows_it() -> None:
    """Hence each epoch of a member means one assignment."""
    group = Coordinator(partitions=2)
    group.beat("a")
    before = group.members["a"]
    group.beat("b")
    assert (group.members["a"].member_epoch, group.members["a"].assigned) == (
        before.member_epoch, before.assigned,
    )
    group.beat("a")
    assert group.members["a"].member_epoch > before.member_epoch
    assert group.members["a"].previous_epoch == before.member_epoch


def test_a_partition_that_is_to_stay_after_all_goes_back_to_its_owner() -> None:
    group = Coordinator(partitions=2)
    group.join("a")
    group.beat("b")
    group.apply(group_changes.leave(group.state, "g", "b", "", now_ms=0))
    group.beat("a", owned=(P0, P1))
    assert group.members["a"].assigned == {P0, P1}
    assert not group.members["a"].revoking


def test_commits_count_under_the_present_and_the_previous_epoch() -> None:
    group = Coordinator(partitions=2)
    group.join("a")
    epoch = group.members["a"].member_epoch
    group.beat("b")
    (moving,) = group.members["a"].revoking
    assert group.commit("a", epoch, 5, moving) == []  # given up, answer not heard yet
    assert group.commit("a", group.members["a"].member_epoch, 6, P0, P1, sequence=2) == []
    assert group.offset(moving) == 6
    with pytest.raises(FencedMemberError):
        group.commit("a", epoch - 1, 7, P0)
    with pytest.raises(UnknownMemberError):
        group.commit("stranger", 1, 7, P0)


def test_a_commit_for_what_was_taken_away_is_refused_and_the_rest_is_done() -> None:
    group = Coordinator(partitions=2)
    group.join("a")
    group.join("b")
    (kept,) = group.members["a"].assigned
    (gone,) = group.members["b"].assigned
    refused = group.commit("a", group.members["a"].member_epoch, 9, kept, gone)
    assert [(*at, code) for *at, code, _ in refused] == [(*gone, "CommitRefusedError")]
    assert "t-" in refused[0][3]
    assert group.offset(kept) == 9
    assert gone not in group.state.groups["g"].offsets


def test_a_late_commit_of_an_earlier_life_is_refused() -> None:
    group = Coordinator(partitions=1)
    group.join("a")
    epoch = group.members["a"].member_epoch
    group.commit("a", epoch, 5, P0)
    group.pass_time(0.1)
    group.pass_time(11)  # the member's session ends
    group.join("b")
    group.commit("b", group.members["b"].member_epoch, 50, P0)
    group.apply(group_changes.leave(group.state, "g", "b", "", now_ms=0))
    group.join("a")
    with pytest.raises(FencedMemberError):
        group.commit("a", epoch, 6, P0, sequence=9)
    assert group.offset(P0) == 50


def test_a_late_commit_is_refused_when_the_partition_went_and_came_back_meanwhile() -> None:
    group = Coordinator(partitions=2)
    group.join("a")
    group.beat("b")
    (moving,) = group.members["a"].revoking
    group.beat("a", owned=(P0, P1))  # the member still gives it up
    late = group.members["a"].member_epoch
    group.join("b")
    (kept,) = group.members["a"].assigned
    assert group.commit("b", group.members["b"].member_epoch, 50, moving) == []
    group.apply(group_changes.leave(group.state, "g", "b", "", now_ms=0))
    assert group.members["a"].assigned == {kept, moving}
    assert group.members["a"].previous_epoch == late
    refused = group.commit("a", late, 6, moving, kept)
    assert [tuple(at) for *at, _, _ in refused] == [moving]
    assert (group.offset(moving), group.offset(kept)) == (50, 6)
    assert group.commit("a", group.members["a"].member_epoch, 60, moving, sequence=2) == []


def test_who_begins_again_is_not_bound_by_its_commits_of_before() -> None:
    group = Coordinator(partitions=1)
    group.join("a")
    epoch = group.members["a"].member_epoch
    group.beat("a", 0, owned=())
    assert group.members["a"].member_epoch > epoch
    with pytest.raises(FencedMemberError):
        group.commit("a", epoch, 6, P0)


def test_who_begins_again_with_other_topics_gets_another_target() -> None:
    group = Coordinator(partitions=1)
    group.join("a", client="etl")
    assert group.reason == "member a (etl) joined"
    assert group.members["a"].target == {P0}
    group.beat("a", 0, owned=(), topics=("u",))
    assert not group.members["a"].target
    assert group.reason == "member a changed its subscription"


def test_a_join_whose_answer_was_lost_may_be_repeated() -> None:
    group = Coordinator()
    group.beat("a", 0)
    before = group.members["a"]
    assert group.beat("a", 0, owned=()) == []
    assert group.members["a"] is before


@pytest.mark.parametrize("instance", [None, "i"])
def test_who_begins_again_or_takes_over_has_nothing_to_give_up(instance: str | None) -> None:
    group = Coordinator(partitions=2)
    group.join("a", instance=instance)
    group.beat("b")
    (moving,) = group.members["a"].revoking
    group.beat("a", owned=(P0, P1), instance=instance)  # It knows.
    later = "a2" if instance else "a"
    group.beat(later, 0, owned=(), instance=instance)
    assert not group.members[later].revoking
    group.beat("b")
    assert group.members["b"].assigned == {moving}


def test_who_says_something_else_still_has_what_it_did_not_give_up() -> None:
    group = Coordinator(partitions=2)
    group.join("a")
    group.beat("b")
    (moving,) = group.members["a"].revoking
    group.beat("a", owned=(P0, P1), client="renamed")
    group.beat("b")
    assert group.members["a"].revoking == {moving} and not group.members["b"].assigned


def test_a_join_that_is_repeated_is_heard() -> None:
    group = Coordinator()
    group.beat("a", 0)
    group_changes.disconnected(group.state, "g", "a", now_s=group.now_s)
    group.now_s += 9
    group.beat("a", 0)  # The answer was lost with the connection.
    group.pass_time(9)
    assert set(group.members) == {"a"}


def test_a_commit_that_was_overtaken_is_dropped() -> None:
    group = Coordinator(partitions=1)
    group.join("a")
    epoch = group.members["a"].member_epoch
    group.commit("a", epoch, 10, P0, sequence=2)
    assert group.commit("a", epoch, 5, P0, sequence=1) == []
    assert group.offset(P0) == 10
    group.commit("a", epoch, 3, P0, sequence=3)  # the member sought back, as it may
    assert group.offset(P0) == 3


def test_a_silent_member_is_out_after_its_session() -> None:
    group = Coordinator()
    group.join("a", "b")
    group.pass_time(6)
    group.beat("a")
    group.pass_time(6)
    assert set(group.members) == {"a"}
    assert "silent for 12.0 s" in group.reason
    with pytest.raises(UnknownMemberError, match="join"):
        group.beat("b", 1)
    group.beat("a")
    assert group.members["a"].assigned == {P0, P1, P2}


def test_a_broken_connection_gives_a_dynamic_member_a_short_grace() -> None:
    group = Coordinator()
    group.join("a", "b")
    group.join("s", instance="i")
    for member in ("a", "b", "s"):
        group_changes.disconnected(group.state, "g", member, now_s=group.now_s)
    group.pass_time(0.9)
    group.beat("b")  # the member is back, on another connection
    group.pass_time(0.2)
    assert set(group.members) == {"b", "s"}
    assert "connection broke" in group.reason


def test_who_does_not_give_up_in_time_is_out() -> None:
    group = Coordinator(partitions=2)
    group.join("a")
    group.beat("b")
    for _ in range(14):
        group.beat("a", owned=(P0, P1))
        group.beat("b")
        group.pass_time(5)
    assert set(group.members) == {"b"}
    assert "max_poll_interval_ms = 60000" in group.reason
    group.beat("b")
    assert group.members["b"].assigned == {P0, P1}


def test_time_in_which_nobody_could_be_heard_does_not_count() -> None:
    group = Coordinator()
    group.join("a")
    group.pass_time(0.1)
    group_changes.prolong_sessions(group.state, 30)
    group.pass_time(30)
    assert set(group.members) == {"a"}


def test_a_static_member_comes_back_to_what_it_had() -> None:
    group = Coordinator(partitions=4)
    group.join("a")
    group.join("s1", instance="i")
    had, others = group.members["s1"].assigned, group.members["a"]
    group.apply(group_changes.leave_static(group.state, "g", "s1", **group.now))
    assert group.state.groups["g"].name_of_state == "stable"
    group.beat("s2", 0, instance="i")
    assert group.members["s2"].assigned == had
    assert group.members["a"] is others
    assert "s1" not in group.members
    with pytest.raises(FencedMemberError, match="group_instance_id"):
        group.beat("s1", 1, instance="i")


def test_a_member_without_an_instance_id_leaves_for_good_whatever_it_says() -> None:
    group = Coordinator(partitions=2)
    group.join("a", "b")
    group.apply(group_changes.leave_static(group.state, "g", "a", **group.now))
    assert group.members.keys() == {"b"}


def test_a_static_member_that_stays_away_loses_its_partitions_with_its_session() -> None:
    group = Coordinator(partitions=2)
    group.join("a")
    group.join("s", instance="i")
    group.apply(group_changes.leave_static(group.state, "g", "s", **group.now))
    group.pass_time(9)
    group.beat("a")
    assert "s" in group.members
    group.pass_time(2)
    group.beat("a")
    assert group.members["a"].assigned == {P0, P1}


ANNA, BEN = Reader("anna", "10.0.0.1"), Reader("ben", "10.0.0.1")


def test_a_pattern_matches_what_its_principal_may_read() -> None:
    group = Coordinator(partitions=1)
    topics = {name: SubscribedTopic(name.upper(), 1) for name in ("t", "secret", "orders")}
    group.apply(all_groups.set_topics(group.state, topics, now_ms=0))
    group.beat("a", topics=(), pattern=".*", reader=ANNA)
    assert group.members["a"].assigned == {("T", 0)}
    assert "secret" not in group.reason and "orders" not in group.reason
    # Who may read everything may do so in the same group.
    group.beat("b", topics=(), pattern=".*")
    assert group.members["b"].target >= {("SECRET", 0), ("ORDERS", 0)}
    assert group.members["a"].target <= {("T", 0)}


def test_a_pattern_follows_what_its_principal_may_read() -> None:
    group = Coordinator(partitions=1)
    topics = {name: SubscribedTopic(name.upper(), 1) for name in ("t", "orders")}
    group.apply(all_groups.set_topics(group.state, topics, now_ms=0))
    group.beat("a", topics=(), pattern=".*", reader=ANNA)

    def access_changes(*readable: str) -> None:
        group.readable = set(readable)
        group.state.take_topics(topics)
        group.apply(group_changes.follow_topics(group.state, "g", now_ms=0))
        group.beat("a", topics=(), pattern=".*", reader=ANNA)

    access_changes("t", "orders")
    assert group.members["a"].assigned == {("T", 0), ("ORDERS", 0)}
    access_changes("orders")
    assert group.members["a"].assigned == {("ORDERS", 0)}
    group.beat("b", topics=(), pattern=".*")
    access_changes()  # The other member still reads it.
    assert group.members["a"].target == NOTHING
    assert group.members["b"].target == {("T", 0), ("ORDERS", 0)}


def test_a_member_that_goes_on_as_another_principal_reads_what_that_may() -> None:
    group = Coordinator(partitions=1)
    group.state = GroupState(load_assignors(None), lambda reader, _: reader.principal == "anna")
    group.apply(all_groups.set_topics(group.state, group.topics, now_ms=0))
    group.beat("a", topics=(), pattern=".*", reader=ANNA)
    assert group.members["a"].assigned == {("T", 0)}
    group.beat("a", topics=(), pattern=".*", reader=BEN)
    assert group.members["a"].target == NOTHING
    group.beat("a", topics=(), pattern=".*")
    assert group.members["a"].target == {("T", 0)}


def test_a_group_follows_its_topics() -> None:
    group = Coordinator(partitions=2)
    group.beat("a", topics=("later",), pattern="t|new-.*")
    group.beat("a", topics=("later",), pattern="t|new-.*")
    assert group.members["a"].assigned == {P0, P1}
    topics = {"t": SubscribedTopic("T2", 1), "new-1": SubscribedTopic("N", 1), "later": SubscribedTopic("L", 1)}
    group.apply(all_groups.set_topics(group.state, topics, now_ms=0))
    assert group.members["a"].assigned == {("T2", 0), ("N", 0), ("L", 0)}
    assert group.members["a"].revoking == {P0, P1}
    assert "later" in group.reason


def test_positions_in_a_deleted_topic_are_forgotten_after_a_while() -> None:
    group = Coordinator(partitions=1)
    group.commit("", 0, 5, P0, ("new", 0))
    for seconds in (0, 5, 6):
        group.now_s += seconds
        group.apply(all_groups.forget_topics(group.state, now_s=group.now_s))
    assert set(group.state.groups["g"].offsets) == {P0}


def test_positions_without_members_are_set_only_while_there_are_none() -> None:
    group = Coordinator()
    group.commit("", 0, 5, P0)
    group.apply(set_offsets(group.state, "g", [OffsetCommit(*P0, 2, None, "")], now_ms=0))
    assert group.offset(P0) == 2
    group.join("a")
    with pytest.raises(GroupNotEmptyError):
        group.commit("", 0, 6, P0)
    with pytest.raises(GroupNotEmptyError):
        set_offsets(group.state, "g", [], now_ms=0)
    with pytest.raises(GroupNotEmptyError):
        delete_group(group.state, "g")
    group.apply(group_changes.leave(group.state, "g", "a", "done", now_ms=0))
    assert group.reason == "member a left: done"
    records = group.apply(delete_group(group.state, "g"))
    assert all(record.value is None for record in records)
    assert group.state.groups == {}
    with pytest.raises(UnknownGroupError):
        delete_group(group.state, "g")


def test_positions_of_an_idle_group_expire_and_the_group_with_them() -> None:
    group = Coordinator()
    group.commit("", 0, 5, P0)
    group.now_s = 8
    group.commit("", 0, 5, P1)

    def expire(now_ms: int) -> int:
        records = all_groups.expire_offsets(group.state, now_ms=now_ms, retention_ms=10_000)
        group.apply(records)
        return sum(isinstance(record, OffsetRecord) for record in records)

    assert expire(10_000) == 0
    assert expire(10_001) == 1
    assert expire(18_001) == 1
    assert group.state.groups == {}
    group.join("a")
    group.commit("a", group.members["a"].member_epoch, 5, P0)
    assert expire(10**9) == 0


def test_the_assignor_that_most_members_name_is_used() -> None:
    group = Coordinator(partitions=4)
    group.join("a", "b")
    assert group.state.groups["g"].value.assignor == "uniform"
    group.beat("b", assignor="range")
    assert group.state.groups["g"].value.assignor == "uniform"
    group.beat("a", assignor="range")
    assert group.state.groups["g"].value.assignor == "range"


def test_a_failing_assignor_refuses_the_join_and_never_strands_the_others() -> None:
    group = Coordinator()
    with pytest.raises(InvalidAssignmentError, match="boom"):
        group.beat("a", assignor="failing")
    assert not group.members
    good = group.state.assignors
    group.state.assignors = {**good, "failing": good["uniform"]}
    for member in ("b", "a", "a"):
        group.beat(member, assignor="failing")
    group.state.assignors = {**good, "failing": failing}
    group.apply(group_changes.leave(group.state, "g", "b", "", now_ms=0))
    assert "b" not in group.members
    group.apply(all_groups.set_topics(group.state, {"t": SubscribedTopic("T", 4)}, now_ms=0))
    assert group.members["a"].target == {P0, P1, P2, P3}
    assert "uniform instead of 'failing'" in group.reason


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
    group = Coordinator()
    with pytest.raises(error):
        group.beat("a", **changes)
    assert "g" not in group.state.groups


def test_a_new_topic_costs_each_pattern_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Coordinator(partitions=1)
    group.beat("a", topics=(), pattern="t.*")
    looked: list[str] = []

    def counting(pattern: str, names: Iterable[str]) -> set[str]:
        looked.extend(names)
        return matches(pattern, names)

    monkeypatch.setattr("rayq.core.groups.state.matches", counting)
    topics = {"t": SubscribedTopic("T", 1), "t2": SubscribedTopic("U", 1), "u": SubscribedTopic("V", 1)}
    group.apply(all_groups.set_topics(group.state, topics, now_ms=0))
    group.beat("a", topics=(), pattern="t.*")
    assert looked == ["t2", "u"]
    assert group.members["a"].target == {P0, ("U", 0)}
    group.apply(all_groups.set_topics(group.state, {"t2": SubscribedTopic("U", 1)}, now_ms=0))
    assert looked == ["t2", "u"]
    assert group.members["a"].target == {("U", 0)}


def test_there_is_a_limit_on_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_changes, "PATTERNS_MAX", 2)
    group = Coordinator()
    group.beat("a", pattern="a.*")
    group.beat("b", pattern="b.*")
    with pytest.raises(GroupLimitError, match="2 different patterns"):
        group.beat("c", pattern="c.*")
    group.beat("c", pattern="a.*")


def test_a_principal_leaves_patterns_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_changes, "PATTERNS_OF_PRINCIPAL_MAX", 2)
    one = Coordinator()
    one.beat("a", pattern="a.*", reader=ANNA)
    one.beat("b", pattern="b.*", reader=Reader("anna", "10.0.0.2"))
    for pattern in ("c.*", "d.*"):
        with pytest.raises(GroupLimitError, match="principal 'anna' have 2 different patterns"):
            one.beat("c", pattern=pattern, reader=ANNA)
        one.beat("of ben", pattern=pattern, reader=BEN)
    one.beat("c", pattern="a.*", reader=ANNA)
    one.beat("of a superuser", pattern="e.*")
    one.beat("d", topics=("t",), reader=ANNA)


def test_there_is_a_limit_on_members_and_groups_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_changes, "MEMBERS_MAX", 2)
    monkeypatch.setattr(group_draft, "GROUPS_MAX", 2)
    monkeypatch.setattr(group_offsets, "OFFSETS_MAX", 2)
    group = Coordinator()
    group.join("a", "b")
    with pytest.raises(GroupLimitError, match="2 members"):
        group.beat("c")
    group_requests.commit(
        group.state,
        "g",
        member="a",
        member_epoch=group.members["a"].member_epoch,
        sequence=1,
        offsets=[],
        now_ms=0,
    )
    empty = [OffsetCommit(*P0, 1, None, "")]
    group.apply(set_offsets(group.state, "h", empty, now_ms=0))
    with pytest.raises(GroupLimitError, match="2 groups"):
        set_offsets(group.state, "i", empty, now_ms=0)
    three = [OffsetCommit(*at, 1, None, "") for at in (P0, P1, P2)]
    with pytest.raises(GroupLimitError, match="3 positions"):
        set_offsets(group.state, "h", three, now_ms=0)
    group.apply(
        group_requests.commit(
            group.state,
            "h",
            member="",
            member_epoch=0,
            sequence=0,
            now_ms=0,
            offsets=[OffsetCommit(*P0, 1, None, "x" * 2**19)],
        )[0]
    )
    for at, length in ((P0, 2**20 + 1), (P1, 2**19 + 1)):
        with pytest.raises(GroupLimitError, match="metadata"):
            group_requests.commit(group.state, "h", member="", member_epoch=0, sequence=0, now_ms=0,
                                 offsets=[OffsetCommit(*at, 1, None, "x" * length)])

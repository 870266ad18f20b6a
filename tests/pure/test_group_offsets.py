"""Committed positions: which count, what is written of them, how many there may be, and for how
long they are kept."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.core.groups import changes as group_changes
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups.offsets import METADATA_LENGTH_MAX, OFFSETS_MAX
from rayq.core.groups.records import (
    GroupRecord,
    GroupValue,
    OffsetRecord,
    OffsetValue,
    PendingOffset,
    PendingRecord,
    Record,
)
from rayq.core.groups.state import Group, GroupState, SubscribedTopic
from rayq.errors import (
    FencedMemberError,
    GroupLimitError,
    GroupNotEmptyError,
    OffsetPendingError,
    UnknownMemberError,
)
from rayq.messages import OffsetCommit
from tests.pure import all_groups, group_requests
from tests.pure.group_requests import delete_group, set_offsets
from tests.pure.test_group_changes import P0, P1, P2, Coordinator

HOLDS = PendingOffset(7, 3, "", 0, 11, None, "")


EMPTY = GroupState({})


def position(at: tuple[str, int], offset: int = 5, metadata: str = "") -> OffsetCommit:
    return OffsetCommit(*at, offset, None, metadata)


def hold(one: Coordinator, *places: tuple[str, int], group: str = "g") -> None:
    """A transaction holds these positions."""
    if group not in one.state.groups:
        one.apply([GroupRecord(group, GroupValue(empty_since_ms=0))])
    one.apply([PendingRecord(group, *at, HOLDS) for at in places])


def commit(
    one: Coordinator, member: str, epoch: int, *offsets: OffsetCommit, sequence: int = 1, group: str = "g"
) -> Any:
    return group_requests.commit(
        one.state, group, member, epoch, sequence, list(offsets), now_ms=one.now["now_ms"]
    )


# --- commits --------------------------------------------------------------------------------------


def test_a_commit_without_a_member_makes_the_group_and_writes_what_it_was_given() -> None:
    one = Coordinator()
    one.now_s = 4
    first = OffsetCommit("T", 1, 9, 3, "note"), OffsetCommit("U", 0, 7, None, "")
    expected = [
        OffsetRecord("g", "T", 1, OffsetValue(9, 3, "note", 4_000)),
        OffsetRecord("g", "U", 0, OffsetValue(7, None, "", 4_000)),
    ]
    records, refused = commit(one, "", 0, *first)
    assert records == [GroupRecord("g", GroupValue(empty_since_ms=4_000)), *expected]
    assert refused == []
    one.apply(records)
    assert commit(one, "", 0, *first) == (expected, [])
    expected = [
        OffsetRecord("g", "T", 1, OffsetValue(9, None, "", 4_000)),
        OffsetRecord("g", "U", 0, OffsetValue(7, None, "", 4_000)),
    ]
    assert set_offsets(one.state, "g", first, now_ms=4_000) == expected
    assert set_offsets(one.state, "h", first, now_ms=4_000) == [
        GroupRecord("h", GroupValue(empty_since_ms=4_000)),
        *(record._replace(group="h") for record in expected),
    ]


def test_a_member_commits_what_it_owns_and_hears_why_the_rest_is_refused() -> None:
    one = Coordinator(partitions=2)
    one.join("a", "b")
    (kept,), (gone,) = one.members["a"].assigned, one.members["b"].assigned
    records, refused = commit(
        one, "a", one.members["a"].member_epoch, position(gone), position(kept), position(("X", 4))
    )
    assert records == [OffsetRecord("g", *kept, OffsetValue(5, None, "", 0))]
    taken_away = (
        "is not assigned to member a of group 'g': it was taken away meanwhile, and another may "
        "have continued from the last commit."
    )
    assert refused == [
        (*gone, "CommitRefusedError", f"t-{gone[1]} {taken_away}"),
        ("X", 4, "CommitRefusedError", f"X-4 {taken_away}"),
    ]


@pytest.mark.parametrize(
    "epoch, is_taken", [(2, False), (3, True), (4, False), (5, True), (6, False)]
)
def test_commits_count_under_two_epochs(epoch: int, is_taken: bool) -> None:
    one = Coordinator(partitions=3)
    one.join("a")
    one.beat("a", 0)
    one.beat("a")
    for member in "bc":
        one.beat(member)
    one.beat("a", owned=(P0, P1, P2))
    value = one.members["a"]
    assert (value.previous_epoch, value.member_epoch, len(value.revoking)) == (3, 5, 2)
    if is_taken:
        assert len(commit(one, "a", epoch, position(P0), position(P1))[0]) == 2
        return
    with pytest.raises(FencedMemberError, match=f"'g' is in epoch 5, the commit in {epoch}"):
        commit(one, "a", epoch, position(P0))


def test_what_came_with_the_present_epoch_is_committed_under_it_alone() -> None:
    one = Coordinator(partitions=2)
    one.join("a", "b")
    (had,), (gained,) = one.members["a"].assigned, one.members["b"].assigned
    one.apply(group_changes.leave(one.state, "g", "b", "", now_ms=0))
    value = one.members["a"]
    both = position(had), position(gained)
    assert len(commit(one, "a", value.member_epoch, *both)[0]) == 2
    records, refused = commit(one, "a", value.previous_epoch, *both)
    assert [record[1:3] for record in records] == [had]
    assert [one[:2] for one in refused] == [gained]


def test_of_two_commits_the_later_one_counts_also_where_they_come_in_the_other_order() -> None:
    one = Coordinator()
    one.join("a")
    epoch = one.members["a"].member_epoch
    for sequence, is_written in ((5, True), (4, False), (5, True), (6, True), (5, False)):
        records, refused = commit(one, "a", epoch, position(P0), sequence=sequence)
        assert (bool(records), refused) == (is_written, [])


def test_a_commit_that_a_transaction_overtook_is_refused_as_a_whole() -> None:
    one = Coordinator()
    one.join("a")
    epoch = one.members["a"].member_epoch
    one.state.groups["g"].sessions["a"].transaction_sequence = 5
    records, refused = commit(one, "a", epoch, position(P0), position(P1), sequence=5)
    text = "the member has put newer positions into a transaction since"
    assert records == []
    assert [(at[:3], text in at[3]) for at in refused] == [
        ((*P0, "CommitRefusedError"), True), ((*P1, "CommitRefusedError"), True),
    ]
    assert len(commit(one, "a", epoch, position(P0), sequence=6)[0]) == 1


def test_a_commit_that_is_refused_leaves_the_order_of_commits_alone() -> None:
    one = Coordinator()
    one.join("a")
    epoch = one.members["a"].member_epoch
    with pytest.raises(FencedMemberError):
        commit(one, "a", epoch + 1, position(P0), sequence=9)
    assert commit(one, "a", epoch, position(P0), sequence=8)[0]


def test_who_is_no_member_commits_nothing() -> None:
    one = Coordinator()
    with pytest.raises(UnknownMemberError):
        commit(one, "a", 1, position(P0))
    one.join("a")
    with pytest.raises(UnknownMemberError, match="Group 'g' has no member b"):
        commit(one, "b", 1, position(P0))


def test_a_position_that_a_transaction_holds_stops_only_commits_of_it() -> None:
    one = Coordinator()
    hold(one, P0)
    waits = (
        "The position of group 'g' in partition 0 of the topic with id T waits for the end of a "
        r"transaction \(family 7, epoch 3\)"
    )
    for offsets in ([position(P0)], [position(P1), position(P0)]):
        with pytest.raises(OffsetPendingError, match=waits):
            commit(one, "", 0, *offsets)
        with pytest.raises(OffsetPendingError, match=waits):
            set_offsets(one.state, "g", offsets, now_ms=0)
    with pytest.raises(OffsetPendingError, match=waits):
        delete_group(one.state, "g")
    assert len(commit(one, "", 0, position(P1))[0]) == 1
    assert len(commit(one, "", 0, position(P0), group="h")[0]) == 2
    assert len(set_offsets(one.state, "g", [position(P1)], now_ms=0)) == 1
    one.join("a")
    group = one.state.groups["g"]
    for wanted, is_free in (([P0], False), ([P1, P2], True), ([], True), (None, False)):
        if is_free:
            group_offsets.check_none_pending(group, "g", wanted)
        else:
            with pytest.raises(OffsetPendingError, match=waits):
                group_offsets.check_none_pending(group, "g", wanted)
    group_offsets.check_none_pending(None, "g", None)


def test_what_is_refused_anyway_waits_for_no_transaction() -> None:
    one = Coordinator(partitions=2)
    one.join("a", "b")
    (kept,), (gone,) = one.members["a"].assigned, one.members["b"].assigned
    hold(one, gone)
    epoch = one.members["a"].member_epoch
    records, refused = commit(one, "a", epoch, position(kept), position(gone))
    assert ([record[1:3] for record in records], [one[:2] for one in refused]) == ([kept], [gone])


@pytest.mark.parametrize(
    "what, does",
    [
        (
            "Positions can be committed without a member",
            lambda one: commit(one, "", 0, position(P0)),
        ),
        (
            "Its positions can be set",
            lambda one: set_offsets(one.state, "g", [position(P0)], now_ms=0),
        ),
        ("It can be deleted", lambda one: delete_group(one.state, "g")),
    ],
)
def test_what_needs_a_group_without_members_says_so(what: str, does: Any) -> None:
    one = Coordinator()
    one.join("a", "b")
    text = f"Group 'g' has 2 members. {what} only while it has none: stop them first."
    with pytest.raises(GroupNotEmptyError, match=text):
        does(one)


# --- limits ---------------------------------------------------------------------------------------


def made_of(offsets: int = 0, pending: int = 0, metadata: str = "") -> Group:
    """A group with positions in partitions from 0 on, and pending ones in those that follow."""
    group = Group()
    held = PendingOffset(7, 0, "", 0, 0, None, metadata)
    for number in range(offsets):
        group.offsets["T", number] = OffsetValue(0, None, metadata, 0)
    for number in range(offsets, offsets + pending):
        group.pending["T", number] = held
    group.metadata_characters = (offsets + pending) * len(metadata)
    return group


class Unwalked(dict[Any, Any]):
    """Positions that are looked up and never gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("A commit of one position went through all of its group.")

    items = values = keys = __iter__


def test_a_commit_goes_through_the_positions_it_names_and_no_others() -> None:
    known = made_of(OFFSETS_MAX, 0, "m")
    known.offsets = Unwalked(known.offsets)
    group_offsets.check_metadata(known, "g", [position(("T", 3), metadata="long")])
    records: list[Record] = [OffsetRecord("g", "T", 3, None)]
    state = GroupState({})
    group_offsets.check_offset_count(state, known, "g", records)
    with pytest.raises(GroupLimitError):
        more = [*records, OffsetRecord("g", "U", 0, None)]
        group_offsets.check_offset_count(state, known, "g", more)


@pytest.mark.parametrize(
    "known, lengths, total",
    [
        (None, [0], None),
        (None, [4], None),
        (None, [5], 5),
        (None, [2, 3], 5),
        (made_of(2, 0, "mm"), [0], None),
        (made_of(3, 0, "mm"), [0], None),
        (made_of(9, 9, "mm"), [0, 0], None),
        (made_of(3, 0, "mm"), [0, 1], None),
        (made_of(3, 0, "mm"), [1], 5),
        (made_of(2, 0, "mm"), [2], None),
        (made_of(2, 0, "mm"), [3], 5),
        (made_of(1, 0, "mm"), [4], None),
        (made_of(1, 1, "mm"), [2], None),
        (made_of(1, 1, "mm"), [3], 5),
        (made_of(1, 1, "mm"), [2, 2], None),
        (made_of(1, 1, "mm"), [2, 3], 5),
        (made_of(0, 2, "mm"), [2], None),
        (made_of(0, 2, "mm"), [3], 5),
        (made_of(0, 3, "mm"), [1], 5),
    ],
)
def test_metadata_is_counted_with_all_that_stays(
    monkeypatch: pytest.MonkeyPatch, known: Group | None, lengths: list[int], total: int | None
) -> None:
    """The new positions stand in the partitions from 0 on; with none of theirs nothing grows."""
    assert METADATA_LENGTH_MAX == 1_048_576
    monkeypatch.setattr(group_offsets, "METADATA_LENGTH_MAX", 4)
    offsets = [position(("T", number), 1, "x" * length) for number, length in enumerate(lengths)]
    if total is None:
        group_offsets.check_metadata(known, "g", offsets)
        return
    with pytest.raises(GroupLimitError, match=f"'g' would have {total} characters .* most are 4"):
        group_offsets.check_metadata(known, "g", offsets)


def offset_at(number: int) -> Record:
    return OffsetRecord("g", "T", number, OffsetValue(0, None, "", 0))


def pending_at(number: int) -> Record:
    return PendingRecord("g", "T", number, HOLDS)


@pytest.mark.parametrize(
    "known, records, total",
    [
        (None, [offset_at(0), offset_at(1), offset_at(2)], None),
        (None, [offset_at(0), offset_at(1), offset_at(2), offset_at(3)], 4),
        (made_of(2), [offset_at(2)], None),
        (made_of(2), [offset_at(0), offset_at(1)], None),
        (made_of(2), [offset_at(0), offset_at(2)], None),
        (made_of(2), [offset_at(2), offset_at(3)], 4),
        (made_of(2), [offset_at(0), offset_at(2), pending_at(3)], 4),
        (made_of(1, 1), [offset_at(0), pending_at(1), pending_at(2)], None),
        (made_of(1, 1), [pending_at(0), offset_at(1), pending_at(2)], None),
        (made_of(1, 1), [pending_at(2), pending_at(3)], 4),
        (made_of(3), [pending_at(0), pending_at(2)], None),
        (made_of(0, 3), [pending_at(0), GroupRecord("g", GroupValue())], None),
        (made_of(0, 3), [offset_at(3)], 4),
        (made_of(2, 1), [pending_at(4), offset_at(5)], 5),
    ],
)
def test_positions_are_counted_once_whether_they_are_pending_or_not(
    monkeypatch: pytest.MonkeyPatch, known: Group | None, records: list[Record], total: int | None
) -> None:
    monkeypatch.setattr(group_offsets, "OFFSETS_MAX", 3)
    if total is None:
        group_offsets.check_offset_count(EMPTY, known, "g", records)
        return
    with pytest.raises(GroupLimitError, match=f"'g' would have {total} positions, the most are 3"):
        group_offsets.check_offset_count(EMPTY, known, "g", records)


def test_a_position_of_both_kinds_takes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_offsets, "OFFSETS_MAX", 3)
    group = made_of(2)
    group.pending["T", 0] = group.pending["T", 1] = HOLDS
    group_offsets.check_offset_count(EMPTY, group, "g", [offset_at(2)])
    with pytest.raises(GroupLimitError, match="4 positions"):
        group_offsets.check_offset_count(EMPTY, group, "g", [offset_at(2), offset_at(3)])


def test_so_many_positions_one_group_may_have() -> None:
    assert OFFSETS_MAX == 100_000
    known = made_of(99_999)
    group_offsets.check_offset_count(EMPTY, known, "g", [offset_at(100_000)])
    with pytest.raises(GroupLimitError, match="100001 positions, the most are 100000"):
        group_offsets.check_offset_count(EMPTY, known, "g", [offset_at(100_000), offset_at(100_001)])


def test_the_positions_of_all_groups_together_have_a_limit_that_stops_no_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_offsets, "POSITIONS_MAX", 3)
    one = Coordinator()
    for group in ("g", "h", "i"):
        records = set_offsets(one.state, group, [position(P0)], now_ms=0)
        one.apply(records)
    assert one.state.positions == 3
    with pytest.raises(GroupLimitError, match="have 3 positions, of 3 that there may be: group"):
        set_offsets(one.state, "g", [position(P1)], now_ms=0)
    with pytest.raises(GroupLimitError, match="group 'j' gets no more"):
        set_offsets(one.state, "j", [position(P0)], now_ms=0)
    one.apply(set_offsets(one.state, "g", [position(P0)], now_ms=1))
    one.apply(all_groups.expire_offsets(one.state, now_ms=10, retention_ms=1))
    assert one.state.positions == 0
    one.apply(set_offsets(one.state, "j", [position(P0)], now_ms=10))


def test_each_way_to_commit_keeps_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_offsets, "OFFSETS_MAX", 2)
    one = Coordinator()
    three = [position(at) for at in (P0, P1, P2)]
    one.apply(commit(one, "", 0, *three[:1])[0])
    one.apply(set_offsets(one.state, "g", three[:2], now_ms=0))
    for does in (
        lambda: commit(one, "", 0, *three),
        lambda: set_offsets(one.state, "g", three, now_ms=0),
    ):
        with pytest.raises(GroupLimitError, match="'g' would have 3 positions"):
            does()


# --- what is forgotten ----------------------------------------------------------------------------


def test_a_deleted_group_leaves_nothing_and_says_so_record_by_record() -> None:
    one = Coordinator()
    one.apply(commit(one, "", 0, position(P1), position(("A", 3)), position(P0))[0])
    one.apply(commit(one, "", 0, position(P2), group="h")[0])
    assert one.apply(delete_group(one.state, "g")) == [
        OffsetRecord("g", "A", 3, None), OffsetRecord("g", *P0, None), OffsetRecord("g", *P1, None),
        GroupRecord("g", None),
    ]
    assert set(one.state.groups) == {"h"}


@pytest.mark.parametrize(
    "empty_since_s, committed_s, now_s, is_old",
    [
        (None, 5, 15, False),
        (None, 5, 15.001, True),
        (3, 5, 15, False),
        (3, 5, 15.001, True),
        (9, 5, 19, False),
        (9, 5, 19.001, True),
    ],
)
def test_a_position_is_kept_from_its_commit_and_from_the_last_member_on(
    empty_since_s: int | None, committed_s: int, now_s: float, is_old: bool
) -> None:
    one = Coordinator()
    empty_since_ms = None if empty_since_s is None else empty_since_s * 1_000
    one.state.replay(GroupRecord("g", GroupValue(empty_since_ms=empty_since_ms)))
    one.state.replay(OffsetRecord("g", *P0, OffsetValue(1, None, "", committed_s * 1_000)))
    records = all_groups.expire_offsets(one.state, now_ms=int(now_s * 1_000), retention_ms=10_000)
    forgotten = [OffsetRecord("g", *P0, None), GroupRecord("g", None)]
    assert records == (forgotten if is_old else [])


def test_what_is_old_goes_and_what_is_young_or_held_stays() -> None:
    one = Coordinator()
    old, young = OffsetValue(1, None, "", 0), OffsetValue(1, None, "", 9_000)
    for group, values in (
        ("all", {P1: old, P0: old}), ("some", {P0: old, P1: young}), ("none", {P0: young}),
        ("held", {P0: old, P1: old}), ("g", {P0: old}), ("empty", {}),
    ):
        one.apply([GroupRecord(group, GroupValue(empty_since_ms=0))])
        one.apply([OffsetRecord(group, *at, value) for at, value in values.items()])
    hold(one, P0, group="held")
    hold(one, P2, group="pending alone")
    one.join("a")
    expected = [
        OffsetRecord("all", *P0, None), OffsetRecord("all", *P1, None), GroupRecord("all", None),
        OffsetRecord("some", *P0, None),
        OffsetRecord("held", *P1, None),
        GroupRecord("empty", None),
    ]
    assert all_groups.expire_offsets(one.state, now_ms=10_001, retention_ms=10_000) == expected


def test_positions_of_a_topic_that_is_gone_for_ten_seconds_are_forgotten() -> None:
    one = Coordinator()
    one.apply(commit(one, "", 0, position(P0), position(("X", 1)), position(("X", 0)))[0])
    one.apply(commit(one, "", 0, position(P1), position(("X", 7)), position(("Y", 0)), group="h")[0])
    hold(one, ("X", 7), group="h")

    def forget(now_s: float) -> list[Record]:
        return all_groups.forget_topics(one.state, now_s=now_s)

    def exists(*ids: str) -> None:
        one.state.take_topics({name: SubscribedTopic(name, 1) for name in ids})

    exists("T", "Y")
    assert forget(100) == []
    assert one.state.topics_gone == {"X": 100}
    exists("T", "X")
    assert forget(105) == []
    assert one.state.topics_gone == {"Y": 105}, "X was there again"
    exists("T")
    assert forget(108) == forget(115) == []
    assert forget(115.5) == [OffsetRecord("h", "Y", 0, None)]
    assert forget(118) == [OffsetRecord("h", "Y", 0, None)], "again, until it is committed"
    one.apply(forget(118))
    assert one.apply(forget(118.5)) == [OffsetRecord("g", "X", 0, None), OffsetRecord("g", "X", 1, None)]
    assert forget(200) == [], "a transaction holds the one that is left"
    assert one.state.topics_gone == {"X": 108}
    one.apply([PendingRecord("h", "X", 7, None)])
    one.apply(forget(200))
    assert forget(300) == [] and one.state.topics_gone == {}
    assert set(one.state.groups["g"].offsets) | set(one.state.groups["h"].offsets) == {P0, P1}

"""Positions inside transactions: what each decision writes, record by record, and its bounds."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.core.groups import changes as group_changes
from rayq.core.groups import draft as group_draft
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups import transactions as group_transactions
from rayq.core.groups.records import (
    EndedRecord,
    EndedTransaction,
    GroupRecord,
    GroupValue,
    OffsetRecord,
    OffsetValue,
    PendingOffset,
    PendingRecord,
    Record,
)
from rayq.errors import (
    FencedEpochError,
    GroupLimitError,
    OffsetPendingError,
    RayqError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)
from rayq.messages import OffsetCommit
from tests.pure import group_requests
from tests.pure.test_group_changes import P0, P1
from tests.pure.test_group_transactions import FAMILY, HOUR_MS, OTHER, Groups


def test_positions_that_a_transaction_takes_are_kept_with_whose_they_are() -> None:
    one = Groups(partitions=2)
    one.now_s = 3
    offsets = [OffsetCommit(*P1, 9, 4, "note"), OffsetCommit("U", 7, 8, None, "")]
    expected = [
        PendingRecord("g", *P1, PendingOffset(FAMILY, 2, "", 6, 9, 4, "note")),
        PendingRecord("g", "U", 7, PendingOffset(FAMILY, 2, "", 6, 8, None, "")),
    ]

    def commit() -> tuple[list[Record], list[group_offsets.Refused]]:
        return group_requests.commit(
            one.state, "g", "", 0, 6, offsets, now_ms=3_000, transaction=(FAMILY, 2)
        )

    assert commit() == ([GroupRecord("g", GroupValue(empty_since_ms=3_000)), *expected], [])
    one.apply(commit()[0])
    assert commit() == (expected, []), "the same again"
    one.now_s = 5
    assert one.end(2, coordinator=8) == [
        EndedRecord(FAMILY, EndedTransaction(2, 8, 5_000)),
        OffsetRecord("g", *P1, OffsetValue(9, 4, "note", 5_000)),
        PendingRecord("g", *P1, None),
        OffsetRecord("g", "U", 7, OffsetValue(8, None, "", 5_000)),
        PendingRecord("g", "U", 7, None),
    ]
    assert one.state.transactions == {}


def test_the_end_of_an_abort_writes_no_position() -> None:
    one = Groups()
    one.send("", 5, P1, group="h")
    one.send("", 5, P1, P0)
    one.now_s = 5
    assert one.end(is_commit=False, coordinator=3) == [
        EndedRecord(FAMILY, EndedTransaction(0, 3, 5_000)),
        PendingRecord("g", *P0, None), PendingRecord("g", *P1, None), PendingRecord("h", *P1, None),
    ]


def test_a_member_s_positions_name_it_and_what_is_not_its_own_is_refused() -> None:
    one = Groups(partitions=2)
    one.join("a", "b")
    (kept,), (gone,) = one.members["a"].assigned, one.members["b"].assigned
    records, refused = group_requests.commit(
        one.state, "g", "a", one.members["a"].member_epoch, 4,
        [OffsetCommit(*gone, 5, None, ""), OffsetCommit(*kept, 6, None, "")],
        now_ms=0, transaction=(FAMILY, 0),
    )
    assert records == [PendingRecord("g", *kept, PendingOffset(FAMILY, 0, "a", 4, 6, None, ""))]
    assert [at[:3] for at in refused] == [(*gone, "CommitRefusedError")]
    one.apply(records)
    assert one.state.transactions[FAMILY].members == {("g", "a")}


@pytest.mark.parametrize("last, is_taken", [(4, True), (5, True), (6, False)])
def test_of_two_positions_in_one_transaction_the_one_of_the_later_request_stays(
    last: int, is_taken: bool
) -> None:
    one = Groups()
    one.send("", 1, P0, sequence=last)
    one.send("", 2, P0, P1, sequence=5)
    held = one.state.groups["g"].pending
    assert (held[P0].offset, held[P1].offset) == (2 if is_taken else 1, 2)


def test_the_highest_request_of_a_member_s_transactions_bounds_its_plain_commits() -> None:
    one = Groups()
    one.join("a")
    session = one.state.groups["g"].sessions["a"]
    for sequence, highest in ((3, 3), (2, 3), (7, 7)):
        one.send("a", 5, P0, sequence=sequence)
        assert session.transaction_sequence == highest


def test_a_coordinator_knows_which_transactions_have_positions_here() -> None:
    one = Groups()
    assert not group_transactions.has_joined(one.state, FAMILY, 0)
    one.send("", 5, P0, epoch=2)
    found = {
        (family, epoch)
        for family in (FAMILY, OTHER)
        for epoch in range(4)
        if group_transactions.has_joined(one.state, family, epoch)
    }
    assert found == {(FAMILY, 2)}
    one.end(2)
    assert not group_transactions.has_joined(one.state, FAMILY, 2)


@pytest.mark.parametrize(
    "ended, known, epoch, error",
    [
        (None, None, 0, None),
        (3, None, 4, None),
        (3, None, 3, TransactionEndedError),
        (3, None, 2, TransactionEndedError),
        (None, 3, 3, None),
        (None, 3, 2, TransactionEndedError),
        (None, 3, 4, OffsetPendingError),
        (2, 3, 3, None),
        (3, 3, 3, TransactionEndedError),
    ],
)
def test_which_transaction_of_a_producer_takes_positions(
    ended: int | None, known: int | None, epoch: int, error: type[RayqError] | None
) -> None:
    one = Groups()
    if known is not None:
        one.send("", 1, P1, epoch=known)
    if ended is not None:
        one.apply([EndedRecord(FAMILY, EndedTransaction(ended, 0, 0))])
    one.apply([EndedRecord(OTHER, EndedTransaction(9, 0, 0))])
    if error is None:
        one.send("", 5, P0, epoch=epoch)
        assert one.state.groups["g"].pending[P0].epoch == epoch
        return
    with pytest.raises(error, match=f"{FAMILY}, {known if error is OffsetPendingError else epoch}"):
        one.send("", 5, P0, epoch=epoch)


@pytest.mark.parametrize(
    "ended, known, epoch, found",
    [
        (None, None, 0, "noted"),
        (3, None, 4, "noted"),
        (3, None, 3, "nothing"),
        (3, None, 2, "nothing"),
        (None, 3, 3, "applied"),
        (2, 3, 3, "applied"),
        (3, 3, 3, "applied"),
        (None, 3, 2, "nothing"),
        (None, 3, 4, TransactionOrderError),
        (2, 3, 4, TransactionOrderError),
    ],
)
def test_what_the_end_of_a_transaction_does(
    ended: int | None, known: int | None, epoch: int, found: Any
) -> None:
    one = Groups()
    if known is not None:
        one.send("", 1, P1, epoch=known)
    if ended is not None:
        one.apply([EndedRecord(FAMILY, EndedTransaction(ended, 5, 0))])
    if not isinstance(found, str):
        with pytest.raises(found, match=f"{FAMILY}, {known} is still open here: {epoch} ends after"):
            one.end(epoch, coordinator=5)
        return
    noted: list[Record] = [EndedRecord(FAMILY, EndedTransaction(epoch, 5, 0))]
    applied = [OffsetRecord("g", *P1, OffsetValue(1, None, "", 0)), PendingRecord("g", *P1, None)]
    expected = {"nothing": [], "noted": noted, "applied": noted + applied}
    assert one.end(epoch, coordinator=5) == expected[found]


@pytest.mark.parametrize("coordinator, is_heard", [(4, False), (5, True), (6, True)])
def test_an_end_counts_from_the_latest_coordinator_that_was_heard(
    coordinator: int, is_heard: bool
) -> None:
    one = Groups()
    one.end(1, coordinator=5)
    for epoch in (1, 2):
        if is_heard:
            one.end(epoch, coordinator=coordinator)
            continue
        with pytest.raises(FencedEpochError, match="speaks in epoch 4, a later one was heard in 5"):
            one.end(epoch, coordinator=coordinator)
    one.end(2, family=OTHER, coordinator=1)


def test_an_end_is_kept_for_a_day_and_no_longer() -> None:
    one = Groups()
    one.now_s = 100
    one.end()
    day_ms = 24 * HOUR_MS + 100_000
    assert group_transactions.forget_ended(one.state, now_ms=day_ms) == []
    assert group_transactions.forget_ended(one.state, now_ms=day_ms + 1) == [EndedRecord(FAMILY, None)]
    one.apply([EndedRecord(FAMILY, None)])
    assert one.state.ended == {}
    one.send("", 5, P0)


def test_the_last_of_all_transactions_finds_room() -> None:
    one = Groups()
    assert group_transactions.OPEN_MAX == 10_000
    one.state.replay(GroupRecord("g", GroupValue(empty_since_ms=0)))
    for number in range(9_999):
        held = PendingOffset(number, 0, "", 0, 0, None, "")
        one.state.replay(PendingRecord("g", "U", number, held))
    one.send("", 5, P0)
    with pytest.raises(TransactionLimitError, match="10000 transactions hold positions"):
        one.send("", 5, P1, family=OTHER)
    one.send("", 5, P1)


def test_groups_of_transactions_have_the_limits_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Groups()
    one.send("", 5, P0)
    monkeypatch.setattr(group_draft, "GROUPS_MAX", 1)
    with pytest.raises(GroupLimitError, match="has 1 groups"):
        one.send("", 5, P0, group="h")
    one.send("", 5, P1)


def test_only_members_that_are_out_leave_their_transactions_behind() -> None:
    one = Groups(partitions=2)
    one.join("a", "b")
    (of_a,), (of_b,) = one.members["a"].assigned, one.members["b"].assigned
    one.send("a", 5, of_a)
    one.send("b", 5, of_b)
    one.send("", 5, P0, family=OTHER, epoch=4, group="h")
    one.apply(group_changes.leave(one.state, "g", "b", "", now_ms=0))
    assert group_transactions.abandoned(one.state) == [(FAMILY, 0)], "one of its two members"
    one.end()
    assert group_transactions.abandoned(one.state) == []

"""Positions inside transactions: single decisions, and any order of requests, ends and crashes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rayq.core.groups import changes as group_changes
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups import transactions as group_transactions
from rayq.core.groups.assignors import load_assignors
from rayq.core.groups.records import EndedRecord, OffsetRecord, Record
from rayq.core.groups.state import GroupState
from rayq.errors import (
    FencedEpochError,
    FencedMemberError,
    GroupLimitError,
    GroupNotEmptyError,
    OffsetPendingError,
    RayqError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
    UnknownMemberError,
)
from rayq.messages import OffsetCommit
from tests.pure import all_groups, group_requests
from tests.pure.group_requests import delete_group, set_offsets
from tests.pure.test_group_changes import P0, P1, Coordinator

FAMILY, OTHER = 1 << 61, (1 << 61) + (1 << 20)
HOUR_MS = 3_600_000


class Groups(Coordinator):
    """A coordinator with the requests of transactions."""

    def send(
        self,
        member: str,
        offset: int,
        *at: tuple[str, int],
        family: int = FAMILY,
        epoch: int = 0,
        member_epoch: int | None = None,
        sequence: int = 1,
        group: str = "g",
    ) -> list[group_offsets.Refused]:
        if member_epoch is None:
            member_epoch = self.members[member].member_epoch if member in self.members else 0
        records, refused = group_requests.commit(
            self.state, group, member, member_epoch, sequence,
            [OffsetCommit(*one, offset, None, "") for one in at],
            now_ms=self.now["now_ms"], transaction=(family, epoch),
        )
        self.apply(records)
        return refused

    def end(
        self, epoch: int = 0, *, family: int = FAMILY, is_commit: bool = True, coordinator: int = 0
    ) -> list[Record]:
        return self.apply(
            group_transactions.end(
                self.state, family, epoch, is_commit=is_commit, coordinator_epoch=coordinator,
                now_ms=self.now["now_ms"],
            )
        )

    def committed(self, group: str = "g") -> dict[Any, int]:
        return {at: one.offset for at, one in self.state.groups[group].offsets.items()}

    def check(self, *at: Any, group: str = "g") -> None:
        group_offsets.check_none_pending(self.state.groups.get(group), group, at or None)


def test_positions_take_effect_when_their_transaction_commits() -> None:
    one = Groups()
    assert one.send("", 5, P0, P1) == []
    assert one.committed() == {}
    with pytest.raises(OffsetPendingError, match=f"family {FAMILY}, epoch 0"):
        one.check(P1)
    one.end()
    assert one.committed() == {P0: 5, P1: 5}
    one.check()


def test_positions_of_an_aborted_transaction_are_dropped() -> None:
    one = Groups()
    one.commit("", 0, 3, P0)
    one.send("", 5, P0)
    one.end(is_commit=False)
    assert one.committed() == {P0: 3}
    one.check(P0)


def test_the_end_is_noted_where_no_position_came_and_a_late_position_is_refused() -> None:
    one = Groups()
    assert [type(record) for record in one.end(epoch=2)] == [EndedRecord]
    for epoch in (0, 1, 2):
        with pytest.raises(TransactionEndedError):
            one.send("", 5, P0, epoch=epoch)
    one.send("", 5, P0, epoch=3)


def test_a_repeated_end_changes_nothing() -> None:
    one = Groups()
    one.send("", 5, P0)
    one.end()
    one.commit("", 0, 9, P0)
    assert one.end() == []
    one.send("", 11, P0, epoch=4)
    assert one.end(epoch=0) == one.end(epoch=3) == []
    assert one.committed() == {P0: 9}


def test_an_end_waits_for_that_of_an_older_transaction_of_the_producer() -> None:
    one = Groups()
    one.send("", 5, P0)
    with pytest.raises(TransactionOrderError):
        one.end(epoch=1)
    with pytest.raises(OffsetPendingError):
        one.send("", 6, P1, epoch=1)
    one.end()
    one.send("", 6, P1, epoch=1)
    with pytest.raises(TransactionEndedError):
        one.send("", 5, P0, epoch=0)


def test_a_position_is_pending_in_one_transaction_at_a_time() -> None:
    one = Groups()
    one.send("", 5, P0)
    with pytest.raises(OffsetPendingError):
        one.send("", 6, P0, P1, family=OTHER)
    one.send("", 6, P1, family=OTHER)
    one.end(family=OTHER)
    assert one.committed() == {P1: 6}
    one.end()
    assert one.committed() == {P0: 5, P1: 6}


def test_everybody_else_who_would_write_a_pending_position_waits() -> None:
    one = Groups()
    one.commit("", 0, 1, P1)
    one.send("", 5, P0)
    with pytest.raises(OffsetPendingError):
        one.commit("", 0, 6, P0)
    with pytest.raises(OffsetPendingError):
        set_offsets(one.state, "g", [OffsetCommit(*P0, 6, None, "")], now_ms=0)
    with pytest.raises(OffsetPendingError):
        delete_group(one.state, "g")
    one.commit("", 0, 6, P1)  # this one is not pending
    one.end()
    one.commit("", 0, 6, P0)
    assert one.committed() == {P0: 6, P1: 6}


def test_pending_positions_outlive_the_retention_of_positions_and_deleted_topics() -> None:
    one = Groups()
    one.commit("", 0, 1, P0)
    one.send("", 5, P0)
    all_groups.set_topics(one.state, {}, now_ms=0)
    assert all_groups.forget_topics(one.state, now_s=0) == []
    assert all_groups.forget_topics(one.state, now_s=60) == []
    assert all_groups.expire_offsets(one.state, now_ms=10**9, retention_ms=1) == []
    one.end()
    assert len(all_groups.forget_topics(one.state, now_s=60)) == 1
    assert len(all_groups.expire_offsets(one.state, now_ms=10**9, retention_ms=1)) == 2


def test_a_group_may_have_nothing_but_pending_positions() -> None:
    one = Groups()
    one.send("", 5, P0, group="new")
    assert all_groups.expire_offsets(one.state, now_ms=10**9, retention_ms=1) == []
    one.end(is_commit=False)
    assert all_groups.expire_offsets(one.state, now_ms=10**9, retention_ms=1) != []


def test_only_what_a_member_owns_goes_into_its_transaction() -> None:
    one = Groups(partitions=2)
    one.join("a", "b")
    (kept,), (gone,) = one.members["a"].assigned, one.members["b"].assigned
    assert [code for *_, code, _ in one.send("a", 5, kept, gone)] == ["CommitRefusedError"]
    one.end()
    assert one.committed() == {kept: 5}
    with pytest.raises(FencedMemberError):
        one.send("a", 6, kept, epoch=1, member_epoch=one.members["a"].member_epoch - 3)
    with pytest.raises(UnknownMemberError):
        one.send("stranger", 6, kept, epoch=1)
    with pytest.raises(GroupNotEmptyError):
        one.send("", 6, kept, epoch=1)


def test_a_late_request_of_a_transaction_sets_no_newer_position_of_it_back() -> None:
    one = Groups()
    one.send("", 5, P0, sequence=1)
    one.send("", 9, P0, sequence=3)
    one.send("", 7, P0, P1, sequence=2)
    one.end()
    assert one.committed() == {P0: 9, P1: 7}


def test_a_plain_commit_from_before_the_transaction_comes_too_late() -> None:
    one = Groups()
    one.join("a")
    epoch = one.members["a"].member_epoch
    assert one.commit("a", epoch, 3, P0, sequence=4) == []
    one.send("a", 9, P0, sequence=5)
    one.end()
    for sequence in (4, 5):
        assert [code for *_, code, _ in one.commit("a", epoch, 3, P0, sequence=sequence)] == [
            "CommitRefusedError"
        ]
    assert one.committed() == {P0: 9}
    assert one.commit("a", epoch, 3, P0, sequence=6) == []


def test_transactions_of_members_that_are_gone_are_abandoned() -> None:
    one = Groups(partitions=2)
    one.join("a", "b")
    one.send("a", 5, *one.members["a"].assigned)
    one.send("b", 5, *one.members["b"].assigned, family=OTHER)
    one.send("", 5, P0, family=OTHER + (1 << 20), group="by hand")
    assert group_transactions.abandoned(one.state) == []
    one.apply(group_changes.leave(one.state, "g", "a", "", now_ms=0))
    assert group_transactions.abandoned(one.state) == [(FAMILY, 0)]
    one.end(is_commit=False)
    assert group_transactions.abandoned(one.state) == []


def test_an_end_is_forgotten_a_day_later_unless_it_is_half_done() -> None:
    one = Groups()
    one.end()
    one.send("", 5, P0, family=OTHER)
    half_done = group_transactions.end(
        one.state, OTHER, 0, is_commit=True, coordinator_epoch=0, now_ms=0
    )[:1]
    one.apply(half_done)
    assert group_transactions.forget_ended(one.state, now_ms=23 * HOUR_MS) == []
    assert group_transactions.forget_ended(one.state, now_ms=25 * HOUR_MS) == [
        EndedRecord(FAMILY, None)
    ]


def test_an_end_that_a_crash_left_half_done_is_finished_by_its_repetition() -> None:
    one = Groups()
    one.send("", 5, P0, P1)
    records = group_transactions.end(
        one.state, FAMILY, 0, is_commit=True, coordinator_epoch=0, now_ms=0
    )
    for count in range(1, len(records)):
        half = Groups()
        half.send("", 5, P0, P1)
        half.apply(records[:count])
        with pytest.raises(OffsetPendingError):
            half.check()
        with pytest.raises(TransactionEndedError):
            half.send("", 5, P0)
        half.end()
        assert half.committed() == {P0: 5, P1: 5}
        assert half.end() == []


def test_a_coordinator_that_was_replaced_ends_nothing() -> None:
    one = Groups()
    one.end(coordinator=3)
    with pytest.raises(FencedEpochError):
        one.end(epoch=1, coordinator=2)
    one.end(epoch=1, coordinator=3)


def test_there_are_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Groups()
    monkeypatch.setattr(group_offsets, "OFFSETS_MAX", 2)
    one.commit("", 0, 1, P0)
    one.send("", 5, P0)
    with pytest.raises(GroupLimitError):
        one.send("", 5, P1, ("T", 2))
    one.send("", 5, P1)
    monkeypatch.setattr(group_transactions, "OPEN_MAX", 1)
    with pytest.raises(TransactionLimitError):
        one.send("", 5, P0, family=OTHER, group="other")
    one.send("", 6, P0, sequence=2)
    monkeypatch.setattr(group_offsets, "METADATA_LENGTH_MAX", 3)
    with pytest.raises(GroupLimitError):
        group_requests.commit(
            one.state, "g", "", 0, 3, [OffsetCommit(*P0, 7, None, "long")],
            now_ms=0, transaction=(FAMILY, 0),
        )


# --- any order ------------------------------------------------------------------------------------


@dataclass
class Producer:
    """A member of the group that takes it further by one in each transaction."""

    family: int
    epoch: int = 0
    member_epoch: int = 0
    at: int | None = None
    """The position that it goes on from; None: it has to ask."""
    pending: int | None = None
    """The input that it has put into its transaction."""


class Positions(RuleBasedStateMachine):
    """Members of a group that take one partition further, inside transactions: each input has to be
    dealt with once. Requests come late and twice, the partition changes hands at any time, and the
    coordinator dies. A transaction is forgotten once its end was acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[list[Record]] = []
        self.committed = 0
        self.state = GroupState(load_assignors(None))
        self.producers = [Producer(FAMILY + n * (1 << 20)) for n in range(2)]
        self.member_epoch = 0
        """Of the member that owns the partition."""
        self.late: list[tuple[Producer, int]] = []
        self.ending: dict[tuple[int, int], bool] = {}
        self.answers: list[tuple[int, tuple[int, int]]] = []
        self.inputs: list[int] = []

    def append(self, records: list[Record]) -> None:
        """Long decisions are committed bit by bit."""
        for record in records:
            self.state.replay(record)
        self.log += [records[at : at + 2] for at in range(0, len(records), 2)]

    @rule(kept=st.integers(0, 3))
    def the_coordinator_dies(self, kept: int) -> None:
        self.log = self.log[: self.committed + kept]
        self.answers = []
        self.some_is_committed(kept)
        self.state = GroupState(load_assignors(None))
        for record in (one for records in self.log for one in records):
            self.state.replay(record)

    @rule(count=st.integers(1, 5))
    def some_is_committed(self, count: int) -> None:
        self.committed = min(len(self.log), self.committed + count)
        for decided, transaction in self.answers:
            if decided <= self.committed:
                self.ending.pop(transaction, None)

    @rule(which=st.integers(0, 1))
    def the_partition_changes_hands(self, which: int) -> None:
        self.member_epoch += 1
        self.producers[which].member_epoch = self.member_epoch
        self.producers[which].at = None

    @rule(which=st.integers(0, 1), is_late=st.booleans())
    def a_producer_works(self, which: int, is_late: bool) -> None:
        one = self.producers[which]
        group = self.state.groups.get("g")
        if one.at is None:
            try:
                group_offsets.check_none_pending(group, "g", [P0])
            except OffsetPendingError:
                return
            found = None if group is None else group.offsets.get(P0)
            one.at = 0 if found is None else found.offset
            self.some_is_committed(len(self.log))
        if is_late:
            self.late.append((replace(one), one.at))
        if self.take(one, one.at):
            self.some_is_committed(len(self.log))
            one.pending = one.at

    @rule()
    def a_late_request_comes(self) -> None:
        if self.late:
            self.take(*self.late.pop(0))

    def take(self, one: Producer, at: int) -> bool:
        if one.member_epoch != self.member_epoch:
            return False
        try:
            records, _ = group_requests.commit(
                self.state, "g", "", 0, 1,
                [OffsetCommit(*place, at + 1, None, "") for place in (P0, P1)],
                now_ms=0, transaction=(one.family, one.epoch),
            )
        except RayqError:
            return False
        self.append(records)
        return True

    @rule(which=st.integers(0, 1), is_commit=st.booleans(), has_new_family=st.booleans())
    def a_transaction_is_decided(self, which: int, is_commit: bool, has_new_family: bool) -> None:
        """The producer goes on, sometimes under the ids of another family."""
        one = self.producers[which]
        done = one.pending if is_commit else None
        if done is not None:
            self.inputs.append(done)
        self.ending[one.family, one.epoch] = done is not None
        at = None if done is None or one.at is None else done + 1
        family = one.family + (1 << 30 if has_new_family else 0)
        self.producers[which] = replace(
            one, family=family, epoch=one.epoch + 1, at=at, pending=None
        )

    @rule(which=st.integers(0, 9))
    def an_end_comes(self, which: int) -> None:
        if not self.ending:
            return
        family, epoch = sorted(self.ending)[which % len(self.ending)]
        try:
            records = group_transactions.end(
                self.state, family, epoch, is_commit=self.ending[family, epoch],
                coordinator_epoch=0, now_ms=0,
            )
        except TransactionOrderError:
            return
        self.append(records)
        self.answers.append((len(self.log), (family, epoch)))

    @invariant()
    def the_log_alone_gives_the_state(self) -> None:
        self.state.validate()
        replayed = GroupState(load_assignors(None))
        for record in (one for records in self.log for one in records):
            replayed.replay(record)
        assert _durable(replayed) == _durable(self.state)

    @invariant()
    def positions_go_forward_one_by_one(self) -> None:
        last = 0
        for record in (one for records in self.log for one in records):
            if isinstance(record, OffsetRecord) and record.partition == 0:
                assert record.value is not None
                assert record.value.offset in (last, last + 1)
                last = record.value.offset

    def teardown(self) -> None:
        for which in range(2):
            self.a_transaction_is_decided(which, False, False)
        while self.ending:
            for which in range(len(self.ending)):
                self.an_end_comes(which)
            self.some_is_committed(len(self.log))
        while self.late:
            self.member_epoch = self.late[0][0].member_epoch  # Who is no member is refused anyway.
            self.a_late_request_comes()
        assert self.state.transactions == {}, "nobody would ever end it"
        group = self.state.groups.get("g")
        assert group is None or group.pending == {}
        assert sorted(self.inputs) == list(range(len(self.inputs))), "each input once"
        if self.inputs and group is not None:
            assert [group.offsets[at].offset for at in (P0, P1)] == [len(self.inputs)] * 2


def _durable(state: GroupState) -> Any:
    groups = {name: (one.value, one.offsets, one.pending) for name, one in state.groups.items()}
    return groups, state.transactions, state.ended


@pytest.mark.slow
class TestPositions(Positions.TestCase):
    settings = settings(max_examples=80, stateful_step_count=50)


@pytest.mark.thorough
class TestManyPositions(Positions.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50)

"""Transactions under any order of events: late and repeated requests, owners that are replaced,
coordinators that die between any two steps, deposed coordinators that go on talking."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayq.core.transactions import changes
from rayq.core.transactions.records import IdRecord, Record, TransactionKey, TransactionRecord
from rayq.core.transactions.state import TransactionState
from rayq.errors import ProducerFencedError, RayqError, TransactionEndedError
from tests.pure import transaction_requests

ID = "id"
EPOCH_MAX = 3
PARTICIPANTS = [("T", number) for number in range(3)]
participants = st.sampled_from(PARTICIPANTS)
rarely = st.sampled_from([False, False, True])


class Coordinator:
    """A state, and how much of the log it is based on."""

    def __init__(self, log: list[list[Record]]) -> None:
        self.state = TransactionState()
        self.based_on = len(log)
        for batch in log:
            for record in batch:
                self.state.replay(record)


class Transactions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        patch = mock.patch.object(changes, "EPOCH_MAX", EPOCH_MAX)
        patch.start()
        self.teardown = patch.stop  # type: ignore[method-assign]
        self.log: list[list[Record]] = []
        self.committed = 0
        self.coordinator = Coordinator(self.log)
        self.deposed: Coordinator | None = None
        self.families = iter(range(1 << 61, 1 << 62, 1 << 20))
        self.answers: list[tuple[int, Callable[[], None]]] = []
        self.now_s = 0.0
        # What answers have said.
        self.owners: list[str] = []
        self.known: dict[str, TransactionKey] = {}
        self.heard: list[tuple[str, TransactionKey]] = []
        self.outcomes: dict[TransactionKey, bool] = {}
        self.joined: dict[TransactionKey, set[tuple[str, int]]] = {}
        self.sealed: dict[TransactionKey, frozenset[tuple[str, int]]] = {}

    # --- the coordinator and its log ------------------------------------------------------------

    def decide(
        self,
        decision: Callable[[TransactionState], list[Record]],
        told: Callable[[TransactionState], Callable[[], None]] | None = None,
        *,
        commits: bool = False,
        by_the_deposed: bool = False,
    ) -> None:
        """Runs a decision. Its answer comes once what it is based on is committed."""
        if by_the_deposed and self.deposed is not None:
            # What it appends is never committed, so only what it says out of its memory arrives.
            state = self.deposed.state
            state.families = state.families or [next(self.families)]
            is_settled = self.deposed.based_on <= self.committed
            if is_settled and decision(state) == [] and told is not None:
                told(state)()
            return
        state = self.coordinator.state
        state.families = state.families or [next(self.families)]
        records = decision(state)
        if records:
            self.log.append(records)
            self.coordinator.based_on = len(self.log)
            for record in records:
                self.check_growth(record)
                state.replay(record)
        if told is not None:
            self.answers.append((len(self.log), told(state)))
        if commits:
            self.commit_up_to(len(self.log))

    def check_growth(self, record: Record) -> None:
        state = self.coordinator.state
        if isinstance(record, IdRecord) and record.value is not None:
            before = state.ids.get(record.transactional_id)
            if before is None:
                return
            old, new = before.next, record.value.next
            if new.family == old.family:
                assert new.epoch == old.epoch + 1
            else:
                assert old.epoch == EPOCH_MAX and new.epoch == 0
            assert record.value.last is not None and record.value.last.key == old

    def decided(self, key: TransactionKey, is_committed: bool) -> None:
        assert self.outcomes.setdefault(key, is_committed) == is_committed

    @rule(count=st.integers(1, 3))
    def commit(self, count: int) -> None:
        self.commit_up_to(min(len(self.log), self.committed + count))

    def commit_up_to(self, end: int) -> None:
        self.committed = end
        ready = [told for at, told in self.answers if at <= self.committed]
        self.answers = [one for one in self.answers if one[0] > self.committed]
        for told in ready:
            told()
        for batch in self.log[: self.committed]:
            for record in batch:
                transaction = record.value if isinstance(record, TransactionRecord) else None
                if transaction is not None and transaction.is_decided:
                    self.decided(record[0], transaction.state == "committing")
                    assert self.joined.get(record[0], set()) <= transaction.participants

    @rule(kept=st.integers(0, 3), data=st.data())
    def fail_over(self, kept: int, data: st.DataObject) -> None:
        self.log = self.log[: self.committed + kept]
        self.committed = len(self.log)
        latest = {
            (type(record).__name__, record[0]): (at, place)
            for at, batch in enumerate(self.log)
            for place, record in enumerate(batch)
        }
        cleaned = data.draw(st.integers(0, len(self.log)))
        compacted = [
            [
                record
                for place, record in enumerate(batch)
                if at >= cleaned or latest[type(record).__name__, record[0]] == (at, place)
            ]
            for at, batch in enumerate(self.log)
        ]
        self.deposed, self.coordinator = self.coordinator, Coordinator(compacted)
        if self.deposed.based_on > len(self.log):
            self.deposed.based_on = sys.maxsize  # What it decided last is never committed.
        self.answers = []
        whole = Coordinator(self.log).state
        assert self.coordinator.state.ids == whole.ids
        assert self.coordinator.state.transactions == whole.transactions

    def one_of_the_latest(self, data: st.DataObject) -> tuple[str, TransactionKey]:
        """An owner and a transaction that it was told of."""
        return self.heard[-1 - data.draw(st.sampled_from([0, 0, 0, 1, 2, 3])) % len(self.heard)]

    # --- producers ------------------------------------------------------------------------------

    @rule(is_new=rarely, late=rarely, commits=st.booleans(), data=st.data())
    def init(self, is_new: bool, late: bool, commits: bool, data: st.DataObject) -> None:
        if is_new or not self.owners:
            self.owners.append(f"owner-{len(self.owners)}")
        owner = self.owners[-1] if not late else data.draw(st.sampled_from(self.owners))
        state = self.coordinator.state
        value = state.ids.get(ID)
        was_replaced = value is not None and owner in value.former_owners

        def told(state: TransactionState) -> Callable[[], None]:
            key = state.ids[ID].next

            def hear() -> None:
                self.known[owner] = key
                self.heard.append((owner, key))

            return hear

        try:
            self.decide(
                lambda state: transaction_requests.init_producer(
                    state, ID, owner, transaction_timeout_ms=10_000, now_ms=int(self.now_s * 1000)
                ),
                told,
                commits=commits,
            )
        except ProducerFencedError:
            assert was_replaced
        else:
            assert not was_replaced

    @precondition(lambda self: self.heard)
    @rule(
        participant=participants,
        commits=st.booleans(),
        by_the_deposed=rarely,
        data=st.data(),
    )
    def join(
        self,
        participant: tuple[str, int],
        commits: bool,
        by_the_deposed: bool,
        data: st.DataObject,
    ) -> None:
        _, key = self.one_of_the_latest(data)

        def told(state: TransactionState) -> Callable[[], None]:
            def hear() -> None:
                assert key not in self.sealed
                self.joined.setdefault(key, set()).add(participant)

            return hear

        try:
            self.decide(
                lambda state: transaction_requests.join(
                    state, key, participant, now_s=self.now_s, now_ms=int(self.now_s * 1000)
                ),
                told,
                commits=commits,
                by_the_deposed=by_the_deposed,
            )
        except RayqError:
            pass

    @precondition(lambda self: self.heard)
    @rule(commits=st.booleans(), by_the_deposed=rarely, data=st.data())
    def seal(self, commits: bool, by_the_deposed: bool, data: st.DataObject) -> None:
        owner, key = self.one_of_the_latest(data)

        def told(state: TransactionState) -> Callable[[], None]:
            participants = state.transactions[key].participants

            def hear() -> None:
                assert self.joined.get(key, set()) <= participants
                assert self.sealed.setdefault(key, participants) == participants

            return hear

        try:
            self.decide(
                lambda state: transaction_requests.seal(
                    state, ID, owner, key, now_ms=int(self.now_s * 1000)
                ),
                told,
                commits=commits,
                by_the_deposed=by_the_deposed,
            )
        except RayqError:
            pass

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        owner, key = self.one_of_the_latest(data)
        now = {"now_s": self.now_s, "now_ms": int(self.now_s * 1000)}
        try:
            self.decide(lambda state: transaction_requests.touch(state, ID, owner, key, **now))
        except RayqError:
            pass

    @precondition(lambda self: self.heard)
    @rule(
        is_commit=st.booleans(),
        name=st.sampled_from([None, "m", "n"]),
        commits=st.booleans(),
        by_the_deposed=rarely,
        data=st.data(),
    )
    def end(
        self,
        is_commit: bool,
        name: str | None,
        commits: bool,
        by_the_deposed: bool,
        data: st.DataObject,
    ) -> None:
        owner, key = self.one_of_the_latest(data)
        value = self.coordinator.state.ids.get(ID)
        how: dict[str, Any] = {"is_commit": is_commit, "name": name}

        def told(state: TransactionState) -> Callable[[], None]:
            try:
                is_committed, following = transaction_requests.ended(state, ID, owner, key, **how)
            except RayqError:
                return lambda: self.decided(key, False)
            is_owner = state.ids[ID].owner == owner
            assert (following != key) == is_owner, "only the owner may go on"

            def hear() -> None:
                self.decided(key, is_committed)
                if is_owner:
                    self.known[owner] = following
                    self.heard.append((owner, following))

            return hear

        before = len(self.log)
        try:
            self.decide(
                lambda state: transaction_requests.end(
                    state, ID, owner, key, **how, now_ms=int(self.now_s * 1000)
                ),
                told,
                commits=commits,
                by_the_deposed=by_the_deposed,
            )
        except (ProducerFencedError, TransactionEndedError):
            pass
        if value is not None and (value.owner != owner or value.next != key):
            assert len(self.log) == before, "a late request ends nothing"

    # --- time and markers -----------------------------------------------------------------------

    @rule(by_s=st.sampled_from([1.0, 4.0, 20.0]))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s
        now_ms = int(self.now_s * 1000)
        for key in changes.expired(self.coordinator.state, now_s=self.now_s, now_ms=now_ms):
            self.decide(lambda state, key=key: changes.abort(state, key, now_ms=now_ms))

    @rule(participant=participants, data=st.data())
    def mark(self, participant: tuple[str, int], data: st.DataObject) -> None:
        state = self.coordinator.state
        ended = [key for key, one in state.transactions.items() if one.is_decided]
        if not ended or self.coordinator.based_on > self.committed:
            return  # Markers are written once the decision is committed.
        key = data.draw(st.sampled_from(ended))
        if participant in state.transactions[key].participants:
            self.decide(lambda state: changes.marker_written(state, key, participant))

    # --- what holds -----------------------------------------------------------------------------

    @invariant()
    def what_is_open_is_the_owners_present_transaction(self) -> None:
        state = self.coordinator.state
        for key, one in state.transactions.items():
            is_present = state.ids[one.transactional_id].next == key
            assert one.is_decided != is_present
            assert state.id_of(key) == (one.transactional_id if is_present else None)
        assert len(state.under_way(ID)) <= changes.UNFINISHED_MAX + 1
        assert set(state.under_way(ID)) == set(state.transactions)
        assert set(state.written) <= set(state.transactions)
        assert all(not state.transactions[key].is_decided for key in state.deadlines_s)


@pytest.mark.slow
class TestTransactions(Transactions.TestCase):
    settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@pytest.mark.thorough
class TestManyTransactions(Transactions.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)

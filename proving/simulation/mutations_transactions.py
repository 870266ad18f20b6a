"""Bugs planted into transactions: see `mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

from proving.simulation.planting import Patch, plants
from rayq.actors.replica.leader_transactions import LeaderTransactions
from rayq.actors.transactions.transaction_coordinator import TransactionCoordinator
from rayq.batch import taking_cuts
from rayq.batch.transaction_cut import Cut
from rayq.core import group_transactions, transaction_changes
from rayq.core.transaction_admission import Step, TransactionAdmission
from rayq.core.transaction_records import IdRecord
from rayq.wire import messages

TRANSACTIONS = "transactions"


# --- the coordinator ------------------------------------------------------------------------------


@plants("transactions", "the next transaction has the epoch of the one that ended", TRANSACTIONS)
def epoch_of_a_transaction_kept() -> list[Patch]:
    end = transaction_changes._end

    def mutated(state: Any, transactional_id: str, value: Any, **options: Any) -> Any:
        first, *others = end(state, transactional_id, value, **options)
        assert isinstance(first, IdRecord) and first.value is not None
        kept = msgspec.structs.replace(first.value, next=value.next)
        return [IdRecord(transactional_id, kept), *others]

    return [(transaction_changes, "_end", mutated)]


@plants("transactions", "a commit is answered before its decision is committed", TRANSACTIONS)
def end_answered_before_it_is_committed() -> list[Patch]:
    async def until_committed(self: Any) -> None:
        self._check(None)

    return [(TransactionCoordinator, "_until_committed", until_committed)]


# --- the leader -----------------------------------------------------------------------------------


@plants("transactions", "a leader appends before its partition has joined", TRANSACTIONS)
def appended_before_the_join() -> list[Patch]:
    batch = TransactionAdmission.batch

    def mutated(self: Any, *key: int, **log: Any) -> Any:
        step = batch(self, *key, **log)
        return Step.APPEND if step is Step.JOIN else step

    return [(TransactionAdmission, "batch", mutated)]


@plants("transactions", "a join counts for every later transaction of the family", TRANSACTIONS)
def joined_without_epoch() -> list[Patch]:
    batch = TransactionAdmission.batch

    def mutated(self: Any, family: int, epoch: int, **log: Any) -> Any:
        step = batch(self, family, epoch, **log)
        had_joined = family in {one for one, _ in self._joined}
        return Step.APPEND if step is Step.JOIN and had_joined else step

    def marker(self: Any, *key: int, **log: Any) -> Any:
        joined = set(self._joined)
        is_new = before(self, *key, **log)
        self._joined |= joined
        return is_new

    before = TransactionAdmission.marker
    return [(TransactionAdmission, "batch", mutated), (TransactionAdmission, "marker", marker)]


@plants("transactions", "where nothing is open a marker is acknowledged unwritten", TRANSACTIONS)
def no_marker_where_nothing_is_open() -> list[Patch]:
    marker = TransactionAdmission.marker

    def mutated(self: Any, *key: int, open_epoch: Any, **log: Any) -> bool:
        return marker(self, *key, open_epoch=open_epoch, **log) and open_epoch is not None

    return [(TransactionAdmission, "marker", mutated)]


@plants("transactions", "a repeated marker is acknowledged at once", TRANSACTIONS)
def repeated_marker_acknowledged_at_once() -> list[Patch]:
    write_marker = LeaderTransactions.write_marker

    def mutated(self: Any, request: messages.WriteMarker) -> Any:
        if self._log.ended_epoch(request.family) >= request.epoch:
            return messages.Done()
        return write_marker(self, request)

    return [(LeaderTransactions, "write_marker", mutated)]


# --- groups ---------------------------------------------------------------------------------------


@plants("transactions", "a group notes no end of what it holds no position of", TRANSACTIONS)
def end_without_positions_not_noted() -> list[Patch]:
    end = group_transactions.end

    def mutated(state: Any, family: int, epoch: int, **options: Any) -> Any:
        records = end(state, family, epoch, **options)
        return records if family in state.transactions else []

    return [(group_transactions, "end", mutated)]


# --- readers --------------------------------------------------------------------------------------


@plants("transactions", "a snapshot asks each partition once", TRANSACTIONS)
def snapshot_in_one_pass() -> list[Patch]:
    def mutated(first: Any) -> Cut:
        undecided = {(family, epoch) for one in first for family, epoch, _ in one.open}
        return Cut([one.high_watermark for one in first], tuple(sorted(undecided)))

    return [(taking_cuts, "cut_of_one_pass", mutated)]


@plants("transactions", "a snapshot believes leaders that were replaced", TRANSACTIONS)
def cut_not_confirmed() -> list[Patch]:
    async def mutated(*_: Any) -> bool:
        return True

    return [(taking_cuts, "still_lead", mutated)]

"""Bugs planted into transactions: see `mutations`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from proving.simulation import atomic_jobs
from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq import messages
from rayq.actors import coordinator_log
from rayq.actors.coordinator_log import CoordinatorLog
from rayq.actors.replica.leader_transactions import LeaderTransactions
from rayq.actors.transactions.transaction_coordinator import TransactionCoordinator
from rayq.batch import taking_cuts
from rayq.batch.transaction_cut import Cut
from rayq.client.producing.transaction_state import TransactionState
from rayq.core.groups import transactions as group_transactions
from rayq.core.transactions import changes as transaction_changes
from rayq.core.transactions.admission import Step, TransactionAdmission
from rayq.core.transactions.records import IdRecord, TransactionRecord
from rayq.messages.transaction_ids import family_of
from rayq.storage import cleaner, recovery
from rayq.storage.log import Log
from rayq.storage.open_transactions import OpenTransactions

TRANSACTIONS = "transactions"


# --- the coordinator ------------------------------------------------------------------------------


@plants("29", "the next transaction has the epoch of the one that ended", TRANSACTIONS)
def epoch_of_a_transaction_kept() -> list[Patch]:
    end = transaction_changes._end

    def mutated(state: Any, transactional_id: str, value: Any, **options: Any) -> Any:
        first, *others = end(state, transactional_id, value, **options)
        assert isinstance(first, IdRecord) and first.value is not None
        kept = msgspec.structs.replace(first.value, next=value.next)
        return [IdRecord(transactional_id, kept), *others]

    return [(transaction_changes, "_end", mutated)]


@plants("20, 30", "a commit is answered before its decision is committed", TRANSACTIONS)
def end_answered_before_it_is_committed() -> list[Patch]:
    async def until_committed(self: Any) -> None:
        self._check(None)

    return [(TransactionCoordinator, "_until_committed", until_committed)]


@plants("29", "a new owner's beginning ends only what is open", TRANSACTIONS)
def only_what_is_open_fenced() -> list[Patch]:
    init_producer = transaction_changes._init_producer

    def mutated(state: Any, request: Any, *others: Any) -> Any:
        records = init_producer(state, request, *others)
        transactional_id = request.transactional_id
        before = state.ids.get(transactional_id)
        if before is None or not records or before.next in state.transactions:
            return records
        only: Any = records[0]
        kept = msgspec.structs.replace(only.value, next=before.next, last=before.last)
        return [IdRecord(transactional_id, kept)]

    return [(transaction_changes, "_init_producer", mutated)]


@plants("30", "markers are written before their decision is committed", TRANSACTIONS)
def marker_before_its_decision() -> list[Patch]:
    def mutated(self: Any, key: Any, transaction: Any) -> None:
        async def write() -> None:
            await asyncio.gather(
                *(
                    self._write_marker(key, transaction, participant)
                    for participant in transaction.participants
                )
            )
            self._markers.pop(key, None)

        if transaction.is_decided:
            self._markers[key] = self._environment.tasks.spawn(
                self._replica_log.guard(write), f"markers of {key}"
            )

    return [(TransactionCoordinator, "_write_markers_of", mutated)]


@plants("30", "each record of a decision is a batch of its own", TRANSACTIONS)
def decision_split() -> list[Patch]:
    append = CoordinatorLog.append

    def mutated(self: Any, records: list[Any]) -> None:
        is_transaction = isinstance(records[0], IdRecord | TransactionRecord)
        for part in [[record] for record in records] if is_transaction else [records]:
            append(self, part)

    return [(CoordinatorLog, "append", mutated), (coordinator_log, "BATCH_BYTES", 1)]


@plants("30", "markers end with the coordinator that decided", TRANSACTIONS)
def markers_end_with_their_coordinator() -> list[Patch]:
    load = TransactionCoordinator._load

    async def mutated(self: Any) -> None:
        self._write_markers_of = lambda *_: None
        try:
            await load(self)
        finally:
            del self._write_markers_of

    return [(TransactionCoordinator, "_load", mutated)]


@plants("30", "a participant that cannot be reached needs no marker", TRANSACTIONS)
def unreachable_participant_left_out() -> list[Patch]:
    is_marked = TransactionCoordinator._is_marked

    async def mutated(self: Any, *args: Any) -> bool:
        await is_marked(self, *args)
        return True

    return [(TransactionCoordinator, "_is_marked", mutated)]


# --- the leader -----------------------------------------------------------------------------------


@plants("31", "a transaction has half of its time", TRANSACTIONS)
def transactions_time_out_early() -> list[Patch]:
    join = transaction_changes._join

    def mutated(state: Any, key: Any, participant: Any, times: Any) -> Any:
        is_known = key in state.deadlines_s
        records = join(state, key, participant, times)
        if not is_known and key in state.deadlines_s:
            state.deadlines_s[key] -= (state.deadlines_s[key] - times.now_s) / 2
        return records

    return [(transaction_changes, "_join", mutated)]


@plants("31", "a new coordinator grants a transaction no time", TRANSACTIONS)
def no_time_after_a_failover() -> list[Patch]:
    return [(transaction_changes, "FAILOVER_TIMEOUT_MS", 0)]


@plants("31", "a transaction of a dead producer stays open", TRANSACTIONS)
def transactions_never_time_out() -> list[Patch]:
    return [(transaction_changes, "expired", lambda state, now_s, now_ms: [])]


@plants("25", "a leader appends before its partition has joined", TRANSACTIONS)
def appended_before_the_join() -> list[Patch]:
    batch = TransactionAdmission.batch

    def mutated(self: Any, *key: int, **log: Any) -> Any:
        step = batch(self, *key, **log)
        return Step.APPEND if step is Step.JOIN else step

    return [(TransactionAdmission, "batch", mutated)]


@plants("25", "a join counts for every later transaction of the family", TRANSACTIONS)
def joined_without_epoch() -> list[Patch]:
    batch = TransactionAdmission.batch

    def mutated(self: Any, family: int, epoch: int, **log: Any) -> Any:
        step = batch(self, family, epoch, **log)
        had_joined = family in {joined for joined, _ in self._joined}
        return Step.APPEND if step is Step.JOIN and had_joined else step

    def marker(self: Any, *key: int, **log: Any) -> Any:
        joined = dict(self._joined)
        is_new = before(self, *key, **log)
        self._joined.update(joined)
        return is_new

    before = TransactionAdmission.marker
    return [(TransactionAdmission, "batch", mutated), (TransactionAdmission, "marker", marker)]


@plants("26", "where nothing is open a marker is acknowledged unwritten", TRANSACTIONS)
def no_marker_where_nothing_is_open() -> list[Patch]:
    marker = TransactionAdmission.marker

    def mutated(self: Any, *key: int, open_epoch: Any, **log: Any) -> bool:
        return marker(self, *key, open_epoch=open_epoch, **log) and open_epoch is not None

    return [(TransactionAdmission, "marker", mutated)]


@plants("26", "a repeated marker is acknowledged at once", TRANSACTIONS)
def repeated_marker_acknowledged_at_once() -> list[Patch]:
    write_marker = LeaderTransactions.write_marker

    def mutated(self: Any, request: messages.WriteMarker) -> Any:
        if self._log.ended_epoch(request.family) >= request.epoch:
            return messages.Done()
        return write_marker(self, request)

    return [(LeaderTransactions, "write_marker", mutated)]


@plants("26", "a marker is acknowledged before it is committed", TRANSACTIONS)
def marker_acknowledged_at_once() -> list[Patch]:
    def mutated(self: Any) -> messages.Done:
        return messages.Done()

    return [(LeaderTransactions, "_once_committed", mutated)]


@plants("26", "a marker ends whatever its family has open", TRANSACTIONS)
def marker_of_any_epoch() -> list[Patch]:
    marker, update = TransactionAdmission.marker, OpenTransactions.update

    def mutated(self: Any, family: int, epoch: int, *rest: int, **log: Any) -> bool:
        is_open = log["open_epoch"] is not None
        log["open_epoch"] = epoch if is_open else None
        return marker(self, family, epoch, *rest, **log) or is_open

    def closing(self: Any, header: Any, time_ms: int) -> Any:
        if header.is_transactional and header.is_control:
            family = family_of(header.producer_id)
            if family in self._open:
                opened = self._open[family]
                self._open[family] = opened._replace(epoch=header.producer_epoch)
        return update(self, header, time_ms)

    return [(TransactionAdmission, "marker", mutated), (OpenTransactions, "update", closing)]


@plants("26", "a batch does not wait for the marker of the one before", TRANSACTIONS)
def next_transaction_not_held_back() -> list[Patch]:
    batch = TransactionAdmission.batch

    def mutated(self: Any, family: int, epoch: int, **log: Any) -> Any:
        step = batch(self, family, epoch, **log)
        if step is not Step.WAIT:
            return step
        return Step.APPEND if (family, epoch) in self._joined else Step.JOIN

    return [(TransactionAdmission, "batch", mutated)]


# --- a partition's log ----------------------------------------------------------------------------


@plants("27", "the last stable offset passes with an uncommitted marker", TRANSACTIONS)
def stable_offset_over_an_uncommitted_marker() -> list[Patch]:
    def mutated(self: Any, _: int) -> int | None:
        first: int | None = self.first_open
        return first

    return [(OpenTransactions, "first_undecided", mutated)]


@plants("27", "recovery forgets what is open", TRANSACTIONS)
def open_transactions_forgotten_in_recovery() -> list[Patch]:
    load_producers = recovery.load_producers

    def mutated(*args: Any) -> Any:
        producers = load_producers(*args)
        producers.transactions._open.clear()
        return producers

    return [(recovery, "load_producers", mutated)]


@plants("27", "a truncation leaves the open transactions as they were", TRANSACTIONS)
def open_transactions_kept_over_truncation() -> list[Patch]:
    truncate = Log._truncate

    def mutated(self: Any, offset: int) -> None:
        transactions = self.producers.transactions
        truncate(self, offset)
        self.producers.transactions = transactions

    return [(Log, "_truncate", mutated)]


# --- groups ---------------------------------------------------------------------------------------


@plants("26", "a group notes no end of what it holds no position of", TRANSACTIONS)
def end_without_positions_not_noted() -> list[Patch]:
    end = group_transactions.end

    def mutated(state: Any, family: int, epoch: int, **options: Any) -> Any:
        records = end(state, family, epoch, **options)
        return records if family in state.transactions else []

    return [(group_transactions, "end", mutated)]


# --- producers ------------------------------------------------------------------------------------


@plants("29", "a producer commits as if nothing of its transaction failed", TRANSACTIONS)
def failed_batch_committed() -> list[Patch]:
    def mutated(*_: Any) -> None:
        return

    return [(TransactionState, "failed", mutated)]


# --- readers --------------------------------------------------------------------------------------


@plants("32", "a snapshot asks each partition once", TRANSACTIONS)
def snapshot_in_one_pass() -> list[Patch]:
    def mutated(first: Any) -> Cut:
        undecided = {
            (family, epoch) for participant in first for family, epoch, _ in participant.open
        }
        return Cut([participant.high_watermark for participant in first], tuple(sorted(undecided)))

    return [(taking_cuts, "cut_of_one_pass", mutated)]


@plants("32", "a snapshot believes leaders that were replaced", TRANSACTIONS)
def cut_not_confirmed() -> list[Patch]:
    async def mutated(*_: Any) -> bool:
        return True

    return [(taking_cuts, "still_lead", mutated)]


# --- batch writes ---------------------------------------------------------------------------------


@plants("33", "a batch write is committed without a seal", TRANSACTIONS)
def job_committed_unsealed() -> list[Patch]:
    async def mutated(transaction: Any, topic: str, reported: Any) -> None:
        await transaction.commit()

    return [(atomic_jobs, "_commit", mutated)]


# --- compaction -----------------------------------------------------------------------------------


@plants("27", "cleaning takes aborted records for committed ones", TRANSACTIONS)
def aborted_records_cleaned_as_committed() -> list[Patch]:
    return [(cleaner, "_is_aborted", lambda job, header: False)]

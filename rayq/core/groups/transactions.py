"""A group coordinator's decisions about offsets that are committed in transactions.

A position that a transaction commits is *pending*: until the transaction has ended here, nobody is
told the position before it, and nobody else may write one. Otherwise the next owner of the
partition would read records again that the transaction dealt with, or the late end of an older
transaction would set the group back. As in `offsets`, functions read the state and return a
decision, or its records.
"""

from __future__ import annotations

from rayq import messages
from rayq.core.decision import Decision, Times
from rayq.core.groups.draft import check_group_count
from rayq.core.groups.offsets import (
    OffsetsDecision,
    answered,
    check_metadata,
    check_none_pending,
    check_offset_count,
    committable,
    places_of,
)
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
from rayq.core.groups.state import GroupState
from rayq.errors import (
    FencedEpochError,
    OffsetPendingError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)

OPEN_MAX = 10_000
"""Maximum number of transactions that hold positions in a partition of `__consumer_offsets`."""
ENDED_KEPT_MS = 24 * 3_600_000

Transaction = tuple[int, int]
"""`(family, epoch)`"""


def has_joined(state: GroupState, family: int, epoch: int) -> bool:
    """Returns whether the transaction's coordinator already knows that it has positions here."""
    known = state.transactions.get(family)
    return known is not None and known.epoch == epoch


def commit(
    state: GroupState, request: messages.CommitOffsets, times: Times
) -> OffsetsDecision:
    """Takes positions into a transaction, which has joined. Raises the errors of
    `group_offsets.commit`, TransactionEndedError, TransactionLimitError, OffsetPendingError (also
    while an older transaction of the same producer waits for its end here)."""
    assert request.transaction is not None
    family, epoch = request.transaction
    group, member, sequence = request.group, request.member, request.sequence
    _check_may_take(state, family, epoch)
    known = state.groups.get(group)
    check_metadata(known, group, request.offsets)
    taken, refused = committable(state, request)
    pending = {} if known is None else known.pending
    held = [at for at in places_of(taken) if at in pending]
    check_none_pending(known, group, [at for at in held if pending[at].family != family])
    if member:
        session = state.groups[group].sessions[member]
        session.transaction_sequence = max(session.transaction_sequence, sequence)
    records: list[Record] = []
    if known is None:
        check_group_count(state)
        records.append(GroupRecord(group, GroupValue(empty_since_ms=times.now_ms)))
    for offset in taken:
        before = pending.get((offset.topic_id, offset.partition))
        if before is not None and before.sequence > sequence:
            continue  # This commit is late: the transaction has a newer position.
        value = PendingOffset(
            family, epoch, member, sequence, offset.offset, offset.last_epoch, offset.metadata
        )
        records.append(PendingRecord(group, offset.topic_id, offset.partition, value))
    check_offset_count(state, known, group, records)
    return answered(records, refused)


def write_marker(
    state: GroupState, request: messages.WriteMarker, times: Times
) -> Decision[Record, messages.Done]:
    """Applies the end of a transaction: all of its positions take effect, or none. Raises the
    errors of `end`."""
    records = end(
        state,
        request.family,
        request.epoch,
        is_commit=request.is_commit,
        coordinator_epoch=request.coordinator_epoch,
        now_ms=times.now_ms,
    )
    return Decision(records, messages.Done)


def describe_open(
    state: GroupState, request: messages.DescribeOpenTransactions, _: Times
) -> Decision[Record, messages.DescribeOpenTransactionsResponse]:
    """Tells the transactions that hold positions here; the answer has no offsets of them."""

    def answer() -> messages.DescribeOpenTransactionsResponse:
        held = [
            (family, transaction.epoch, 0)
            for family, transaction in sorted(state.transactions.items())
        ]
        return messages.DescribeOpenTransactionsResponse(
            0, 0, held, [], leader_epoch=request.leader_epoch
        )

    return Decision([], answer)


def end(
    state: GroupState,
    family: int,
    epoch: int,
    *,
    is_commit: bool,
    coordinator_epoch: int,
    now_ms: int,
) -> list[Record]:
    """Applies or drops the positions that a transaction holds; does nothing if it has ended here.
    The end is noted even if the transaction holds nothing: a position of it may still be in flight.
    Raises TransactionOrderError, FencedEpochError."""
    ended = state.ended.get(family)
    if ended is not None and coordinator_epoch < ended.coordinator_epoch:
        raise FencedEpochError(
            f"The coordinator of transaction {family}, {epoch} speaks in epoch "
            f"{coordinator_epoch}, a later one was heard in {ended.coordinator_epoch}."
        )
    known = state.transactions.get(family)
    if known is not None and known.epoch < epoch:
        raise TransactionOrderError(
            f"Transaction {family}, {known.epoch} is still open here: {epoch} ends after it."
        )
    is_open = known is not None and known.epoch == epoch
    if not is_open and (known is not None or (ended is not None and ended.epoch >= epoch)):
        return []
    # First the end, then each position before its pending one is removed: so the records may be
    # committed one after the other. Positions that a crash leaves pending wait for the retry of
    # this end.
    records: list[Record] = [
        EndedRecord(family, EndedTransaction(epoch, coordinator_epoch, now_ms))
    ]
    for group, topic_id, partition in [] if known is None else sorted(known.offsets):
        pending = state.groups[group].pending[topic_id, partition]
        if is_commit:
            value = OffsetValue(pending.offset, pending.last_epoch, pending.metadata, now_ms)
            records.append(OffsetRecord(group, topic_id, partition, value))
        records.append(PendingRecord(group, topic_id, partition, None))
    return records


def abandoned(state: GroupState) -> list[Transaction]:
    """The transactions that hold positions of members who are out of their group: the positions'
    next owners wait for the end."""
    return [
        (family, transaction.epoch)
        for family, transaction in state.transactions.items()
        if any(member not in state.groups[group].members for group, member in transaction.members)
    ]


def forget_ended(state: GroupState, *, now_ms: int) -> list[Record]:
    """Forgets transactions that ended a day ago: no request is that late."""
    return [
        EndedRecord(family, None)
        for family, ended in state.ended.items()
        if now_ms - ended.ended_ms > ENDED_KEPT_MS and family not in state.transactions
    ]


def _check_may_take(state: GroupState, family: int, epoch: int) -> None:
    ended, known = state.ended.get(family), state.transactions.get(family)
    if (ended is not None and ended.epoch >= epoch) or (known is not None and known.epoch > epoch):
        raise TransactionEndedError(f"Transaction {family}, {epoch} has ended.")
    if known is not None and known.epoch < epoch:
        raise OffsetPendingError(
            f"Transaction {family}, {known.epoch} of the same producer waits for its end here."
        )
    if known is None and len(state.transactions) >= OPEN_MAX:
        raise TransactionLimitError(
            f"{len(state.transactions)} transactions hold positions with this coordinator, the "
            "most there may be: try again when some have ended."
        )

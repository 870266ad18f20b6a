"""A coordinator's decisions about transactional ids and their transactions.

Each function reads the state and returns a decision, or its records, which are one batch; of the
state it changes only the soft part. Errors are those of `rayq.errors`. Every end of a transaction,
whoever asks for it, gives the id its next epoch. So a (family, epoch) has one outcome forever, and
a late batch, marker or request is recognised by its epoch.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from rayq import messages
from rayq.core.decision import Decision, Times
from rayq.core.transactions.records import (
    IdRecord,
    IdValue,
    Outcome,
    Record,
    TransactionKey,
    TransactionRecord,
    TransactionValue,
)
from rayq.core.transactions.state import TransactionState
from rayq.errors import (
    AlreadyCommittedError,
    AuthorizationError,
    CoordinatorLoadingError,
    InvalidRequestError,
    ProducerFencedError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)
from rayq.messages.transaction_ids import EPOCH_MAX
from rayq.records import TopicIdPartition

IDS_MAX = 100_000
"""Maximum number of transactional ids of a coordinator."""
PARTICIPANTS_MAX = 10_000
"""Maximum number of partitions of a transaction."""
UNFINISHED_MAX = 5
"""Maximum number of transactions of an id that wait for markers while the next one begins."""
FORMER_OWNERS_MAX = 10
"""Maximum number of remembered former owners of an id."""
TRANSACTION_TIMEOUT_MS_MIN = 1_000
TRANSACTION_TIMEOUT_MS_MAX = 15 * 60_000
FAILOVER_TIMEOUT_MS = 5_000
"""Minimum remaining time of a transaction under a new coordinator: its producer must find that
one."""
TOUCHED_MS_MAX = 3_600_000
"""Maximum total time of a transaction whose owner touches it; each touch restarts its timeout."""
UNUSED_ID_MS = 7 * 24 * 3_600_000
"""Time without use after which an id without a named transaction is forgotten."""


def needs_family(state: TransactionState, transactional_id: str) -> bool:
    """Returns whether the next owner or the next end of this id takes one of `state.families`."""
    value = state.ids.get(transactional_id)
    return value is None or value.next.epoch == EPOCH_MAX


def init_producer(
    state: TransactionState, request: messages.InitProducer, times: Times, principal: str | None
) -> Decision[Record, messages.InitProducerResponse]:
    """Makes the sender, which has this principal, the owner of an id. Raises the errors of
    `_init_producer`."""
    name = request.transactional_id

    def answer() -> messages.InitProducerResponse:
        value = state.ids[name]
        return messages.InitProducerResponse(value.next.family, value.next.epoch, value.last_name)

    return Decision(_init_producer(state, request, principal, times.now_ms), answer)


def _init_producer(
    state: TransactionState,
    request: messages.InitProducer,
    principal: str | None,
    now_ms: int,
) -> list[Record]:
    """Makes `owner` the owner of an id; the previous owner's open transaction is aborted. Raises
    ProducerFencedError, TransactionLimitError, InvalidRequestError."""
    transactional_id, owner = request.transactional_id, request.owner
    transaction_timeout_ms = request.transaction_timeout_ms
    if not TRANSACTION_TIMEOUT_MS_MIN <= transaction_timeout_ms <= TRANSACTION_TIMEOUT_MS_MAX:
        raise InvalidRequestError(
            f"transaction_timeout_ms is {TRANSACTION_TIMEOUT_MS_MIN} to "
            f"{TRANSACTION_TIMEOUT_MS_MAX}, not {transaction_timeout_ms}."
        )
    value = state.ids.get(transactional_id)
    if value is None:
        if len(state.ids) >= IDS_MAX:
            raise TransactionLimitError(
                f"This coordinator has {IDS_MAX} transactional ids. Those without named "
                "transactions are forgotten after 7 days without use; use the same ids again, or "
                "more transaction_state_partitions in a new cluster."
            )
        family = _take_family(state)
        begun = IdValue(
            owner, transaction_timeout_ms, TransactionKey(family, 0), now_ms, principal=principal
        )
        return [IdRecord(transactional_id, begun)]
    if owner == value.owner:
        if principal == value.principal:
            return []
        return [IdRecord(transactional_id, msgspec.structs.replace(value, principal=principal))]
    if owner in value.former_owners:
        raise _fenced(transactional_id)
    former = (*value.former_owners, value.owner)[-FORMER_OWNERS_MAX:]
    value = msgspec.structs.replace(
        value,
        owner=owner,
        transaction_timeout_ms=transaction_timeout_ms,
        former_owners=former,
        principal=principal,
    )
    return _end(state, transactional_id, value, is_commit=False, name=None, now_ms=now_ms)


def join(
    state: TransactionState, request: messages.JoinTransaction, times: Times
) -> Decision[Record, messages.Done]:
    """Makes a partition a participant of a transaction. Raises the errors of `_join` and
    `_check_principal`."""
    participant = request.participant_topic_id, request.participant_partition
    key = _key(request)
    _check_principal(state, key, request.principal)
    return Decision(_join(state, key, participant, times), messages.Done)


def _check_principal(
    state: TransactionState, key: TransactionKey, principal: str | None
) -> None:
    """Raises AuthorizationError if a named principal writes in the transaction of another one. The
    transactional id is not named: a family can be guessed."""
    transactional_id = state.id_of(key)
    if principal is None or transactional_id is None:
        return
    if principal != state.ids[transactional_id].principal:
        raise AuthorizationError(
            f"Principal {principal!r} may not write in transaction {key.family}:{key.epoch}: its "
            "producer has another principal. Use a transactional id of your own."
        )


def _join(
    state: TransactionState, key: TransactionKey, participant: TopicIdPartition, times: Times
) -> list[Record]:
    """Makes a partition a participant of a transaction, which is open from the first one on. Raises
    TransactionEndedError, TransactionLimitError, TransactionOrderError."""
    transaction = state.transactions.get(key)
    if transaction is None:
        transactional_id = state.id_of(key)
        if transactional_id is None:
            raise _ended(key)
        if len(state.under_way(transactional_id)) >= UNFINISHED_MAX:
            raise TransactionOrderError(
                f"{UNFINISHED_MAX} earlier transactions of {transactional_id!r} still lack markers "
                "in some partition: the next one waits for them."
            )
        timeout_ms = state.ids[transactional_id].transaction_timeout_ms
        state.deadlines_s[key] = times.now_s + timeout_ms / 1000
        begun = TransactionValue(transactional_id, "open", times.now_ms, frozenset([participant]))
        return [TransactionRecord(key, begun)]
    if transaction.state == "sealed":
        raise TransactionEndedError(
            f"Transaction {key.epoch} of family {key.family} takes no more records: its owner ends "
            "it."
        )
    if transaction.state != "open":
        raise _ended(key)
    if participant in transaction.participants:
        # When it is committed again, no newer coordinator had started, which might have sealed it.
        return [TransactionRecord(key, transaction)]
    if len(transaction.participants) >= PARTICIPANTS_MAX:
        raise TransactionLimitError(
            f"A transaction has at most {PARTICIPANTS_MAX} partitions; one of "
            f"{transaction.transactional_id!r} has them already."
        )
    participants = transaction.participants | {participant}
    return [TransactionRecord(key, msgspec.structs.replace(transaction, participants=participants))]


def touch(
    state: TransactionState, request: messages.TouchTransaction, times: Times
) -> Decision[Record, messages.Done]:
    """Restarts the timeout of the owner's present transaction, on which it still works. Raises
    ProducerFencedError, TransactionEndedError."""
    _check_present(state, request)
    key = _key(request)
    transaction = state.transactions.get(key)
    if transaction is None:
        return Decision([], messages.Done)
    touched = msgspec.structs.replace(transaction, is_touched=True)
    state.deadlines_s[key] = _deadline_s(state, touched, *times)
    records = [] if transaction.is_touched else [TransactionRecord(key, touched)]
    return Decision(records, messages.Done)


def seal(
    state: TransactionState, request: messages.SealTransaction, times: Times
) -> Decision[Record, messages.SealTransactionResponse]:
    """Seals the owner's present transaction: it gets no more participants. Raises
    ProducerFencedError, TransactionEndedError."""
    _check_present(state, request)
    key = _key(request)
    transaction = state.transactions.get(key)
    if transaction is None:
        name = request.transactional_id
        transaction = TransactionValue(name, "open", times.now_ms, frozenset())
    sealed = msgspec.structs.replace(transaction, state="sealed")
    return Decision(
        [] if transaction == sealed else [TransactionRecord(key, sealed)],
        lambda: messages.SealTransactionResponse(sorted(state.transactions[key].participants)),
    )


def _check_present(
    state: TransactionState,
    request: messages.EndTransaction | messages.TouchTransaction | messages.SealTransaction,
) -> None:
    key, value = _key(request), state.ids.get(request.transactional_id)
    if value is None:
        raise _ended(key)
    if value.owner != request.owner:
        raise _fenced(request.transactional_id)
    if value.next != key:
        raise _ended(key)


def end(
    state: TransactionState, request: messages.EndTransaction, times: Times
) -> Decision[Record, tuple[bool, TransactionKey]]:
    """Ends the owner's present transaction; does nothing if it has ended. Under a name that is
    already committed it is aborted. The answer is that of `ended`. Raises ProducerFencedError,
    TransactionEndedError."""
    transactional_id, name = request.transactional_id, request.name
    key, value = _key(request), state.ids.get(transactional_id)
    if value is None:
        raise _ended(key)
    records: list[Record] = []
    if value.last is None or value.last.key != key:
        _check_present(state, request)
        is_commit = request.is_commit and (name is None or name != value.last_name)
        records = _end(
            state, transactional_id, value, is_commit=is_commit, name=name, now_ms=times.now_ms
        )
    return Decision(records, lambda: ended(state, request))


def ended(
    state: TransactionState, request: messages.EndTransaction
) -> tuple[bool, TransactionKey]:
    """Returns whether the last transaction of an id was committed, and its owner's next one.
    Another producer than the owner gets the same transaction again, and cannot continue. Raises
    AlreadyCommittedError."""
    transactional_id, name, key = request.transactional_id, request.name, _key(request)
    value = state.ids[transactional_id]
    assert value.last is not None and value.last.key == key
    is_committed = value.last.is_committed
    if request.is_commit and not is_committed and name is not None and name == value.last_name:
        raise AlreadyCommittedError(
            f"A transaction of {transactional_id!r} with the name {name!r} is committed: this one "
            "was aborted."
        )
    return is_committed, value.next if value.owner == request.owner else key


def abort(state: TransactionState, key: TransactionKey, *, now_ms: int) -> list[Record]:
    """Aborts exactly this transaction; does nothing if it is not open (any more)."""
    transaction = state.transactions.get(key)
    if transaction is None or transaction.is_decided:
        return []
    transactional_id = transaction.transactional_id
    value = state.ids[transactional_id]
    return _end(state, transactional_id, value, is_commit=False, name=None, now_ms=now_ms)


def expired(state: TransactionState, *, now_s: float, now_ms: int) -> list[TransactionKey]:
    """The open transactions that timed out. One from an earlier coordinator has only its remaining
    time."""
    expired_keys = []
    for key, transaction in state.transactions.items():
        if transaction.is_decided:
            continue
        deadline_s = state.deadlines_s.get(key)
        if deadline_s is None:
            least_s = now_s + FAILOVER_TIMEOUT_MS / 1000
            deadline_s = _deadline_s(state, transaction, now_s, now_ms)
            deadline_s = state.deadlines_s[key] = max(deadline_s, least_s)
        if deadline_s <= now_s:
            expired_keys.append(key)
    return expired_keys


def _deadline_s(
    state: TransactionState, transaction: TransactionValue, now_s: float, now_ms: int
) -> float:
    """Time at which a transaction times out if its owner is heard now for the last time."""
    timeout_ms = state.ids[transaction.transactional_id].transaction_timeout_ms
    all_ms = TOUCHED_MS_MAX if transaction.is_touched else timeout_ms
    return now_s + min(timeout_ms, transaction.start_ms + all_ms - now_ms) / 1000


def prolong(state: TransactionState, by_s: float) -> None:
    """Prolongs all transactions by time in which nobody could be heard."""
    for key in state.deadlines_s:
        state.deadlines_s[key] += by_s


def prolong_throttled(
    state: TransactionState, request: messages.ProlongTransaction, times: Times
) -> Decision[Record, messages.Done]:
    """Prolongs a transaction by the time for which its producer has to wait from now on. Raises the
    error of `_check_principal`."""
    _check_principal(state, _key(request), request.principal)
    key, until_s = _key(request), times.now_s + request.throttle_ms / 1000
    transaction, deadline_s = state.transactions.get(key), state.deadlines_s.get(key)
    if transaction is not None and deadline_s is not None:
        from_s = max(state.throttled_until_s.get(key, 0.0), times.now_s)
        last_s = times.now_s + (transaction.start_ms + TOUCHED_MS_MAX - times.now_ms) / 1000
        if until_s > from_s:
            state.throttled_until_s[key] = until_s
            state.deadlines_s[key] = max(deadline_s, min(deadline_s + until_s - from_s, last_s))
    return Decision([], messages.Done)


def unmarked(state: TransactionState, key: TransactionKey) -> set[TopicIdPartition]:
    """The participants of an ended transaction that may lack its marker."""
    return set(state.transactions[key].participants) - state.written.get(key, set())


def marker_written(
    state: TransactionState, key: TransactionKey, participant: TopicIdPartition
) -> list[Record]:
    """Notes that a participant durably has its marker. With the last one the transaction is
    forgotten."""
    state.written.setdefault(key, set()).add(participant)
    return [] if unmarked(state, key) else [TransactionRecord(key, None)]


def describe_outcome(
    state: TransactionState, request: messages.DescribeOutcome, _: Times
) -> Decision[Record, messages.DescribeOutcomeResponse]:
    """Tells the outcome of a transaction."""
    key = _key(request)
    known = outcome(state, key)
    # A record that changes nothing: when it is committed, no newer coordinator had started.
    records = [] if key in state.transactions else [TransactionRecord(key, None)]
    return Decision(records, lambda: messages.DescribeOutcomeResponse(known))


def outcome(state: TransactionState, key: TransactionKey) -> str:
    """The outcome of a transaction: see `messages.DescribeOutcomeResponse`."""
    transaction = state.transactions.get(key)
    if transaction is not None:
        return transaction.state
    last = state.last_of_family(key.family)
    if last is None or last.key != key:
        return "unknown"
    return "committed" if last.is_committed else "aborted"


def forget_unused(state: TransactionState, *, now_ms: int) -> list[Record]:
    """Forgets ids that were unused for long. A producer that comes back draws another family."""
    return [
        IdRecord(transactional_id, None)
        for transactional_id, value in state.ids.items()
        if value.last_name is None
        and now_ms - value.used_ms > UNUSED_ID_MS
        and not state.under_way(transactional_id)
    ]


def _end(
    state: TransactionState,
    transactional_id: str,
    value: IdValue,
    *,
    is_commit: bool,
    name: str | None,
    now_ms: int,
) -> list[Record]:
    key = value.next
    if key.epoch < EPOCH_MAX:
        following = TransactionKey(key.family, key.epoch + 1)
    else:
        following = TransactionKey(_take_family(state), 0)
    changed = msgspec.structs.replace(
        value,
        next=following,
        used_ms=now_ms,
        last=Outcome(key, is_commit),
        last_name=name if is_commit and name is not None else value.last_name,
    )
    records: list[Record] = [IdRecord(transactional_id, changed)]
    transaction = state.transactions.get(key)
    if transaction is not None:
        decided = msgspec.structs.replace(
            transaction, state="committing" if is_commit else "aborting"
        )
        # Without participants there are no markers, after which it would be forgotten.
        records.append(TransactionRecord(key, decided if decided.participants else None))
    return records


class _OfTransaction(Protocol):
    @property
    def family(self) -> int: ...
    @property
    def epoch(self) -> int: ...


def _key(request: _OfTransaction) -> TransactionKey:
    return TransactionKey(request.family, request.epoch)


def _take_family(state: TransactionState) -> int:
    if not state.families:
        raise CoordinatorLoadingError("The coordinator has no producer ids in hand: try again.")
    return state.families.pop()


def _fenced(transactional_id: str) -> ProducerFencedError:
    return ProducerFencedError(
        f"Another producer has the transactional id {transactional_id!r} now: two producers that "
        "live at the same time need two ids."
    )


def _ended(key: TransactionKey) -> TransactionEndedError:
    return TransactionEndedError(
        f"Transaction {key.epoch} of family {key.family} has ended, or was never begun."
    )

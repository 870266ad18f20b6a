"""Requests of producers and leaders to the coordinator of a transaction, and its requests to
leaders.

The coordinator of a transactional id is the leader of one partition of `__transaction_state`:
partition crc32(id) % partitions. Clients find it, and it answers errors, as with the coordinator of
a group. A transaction is a `family` of producer ids and an `epoch`, used once.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from rayq.messages.acls import QuotaName, Right, Rights
from rayq.messages.any_broker import ChangeResponse
from rayq.messages.base import (
    Answerer,
    CheckedName,
    Done,
    Epoch,
    Family,
    Id,
    Milliseconds,
    Name,
    Partition,
    Response,
    ToController,
    ToLeader,
    ToTransactionCoordinator,
    TransactionEpoch,
)

TransactionalId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TransactionName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class EnsureTransactionsTopic(ToController[ChangeResponse], frozen=True):
    """Creates `__transaction_state` unless it exists, at the first use of a transaction."""

    api: ClassVar[int] = 13
    rights: ClassVar[Rights] = ()


# --- from producers -----------------------------------------------------------------------------


class InitProducerResponse(Response, frozen=True):
    """The family and epoch of the producer's first transaction."""

    family: int
    epoch: int
    last_name: str | None
    """The name of the last named transaction of this id that committed."""


class InitProducer(ToTransactionCoordinator[InitProducerResponse], frozen=True):
    """Makes `owner` the only producer of a transactional id: the previous owner's open transaction
    is aborted, and that owner is fenced. The family is then that of the owner's principal. A
    repetition by the present owner answers the same. Raises ProducerFenced (a former owner asks),
    TransactionLimit."""

    api: ClassVar[int] = 70
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (Right("write", "transactional_id", "transactional_id"),)
    transactional_id: TransactionalId
    owner: Id
    """A random id that the producer draws at its start."""
    transaction_timeout_ms: Milliseconds


class EndTransactionResponse(Response, frozen=True):
    """The outcome of the transaction, and the family and epoch of the next one."""

    is_committed: bool
    family: int
    epoch: int
    is_complete: bool
    """True if all its markers are written: every reader sees its outcome."""


class EndTransaction(ToTransactionCoordinator[EndTransactionResponse], frozen=True):
    """Commits or aborts a transaction. The coordinator answers once the decision is committed and
    all markers are written, or `wait_ms` after the decision. A repetition, and a question for the
    last transaction of the id, are answered by what was decided, whatever is asked. Raises
    ProducerFenced, TransactionEnded (it ended otherwise than by this owner, long ago),
    AlreadyCommitted (a transaction with this name is committed)."""

    api: ClassVar[int] = 71
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (Right("write", "transactional_id", "transactional_id"),)
    transactional_id: TransactionalId
    owner: Id
    family: Family
    epoch: TransactionEpoch
    is_commit: bool
    name: TransactionName | None
    wait_ms: Milliseconds


class TouchTransaction(ToTransactionCoordinator[Done], frozen=True):
    """Restarts the timeout of a transaction on which its owner still works, for at most an hour
    from the first partition on. Raises ProducerFenced, TransactionEnded."""

    api: ClassVar[int] = 75
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (Right("write", "transactional_id", "transactional_id"),)
    transactional_id: TransactionalId
    owner: Id
    family: Family
    epoch: TransactionEpoch


class SealTransactionResponse(Response, frozen=True):
    participants: list[tuple[str, int]]
    """`(topic id, partition)` of all that have records of the transaction, sorted."""


class SealTransaction(ToTransactionCoordinator[SealTransactionResponse], frozen=True):
    """No further partition may join the transaction: the first part of the end of one that many
    writers write. Answers once that is committed. A repetition answers the same. Raises
    ProducerFenced, TransactionEnded."""

    api: ClassVar[int] = 76
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (Right("write", "transactional_id", "transactional_id"),)
    transactional_id: TransactionalId
    owner: Id
    family: Family
    epoch: TransactionEpoch


class SealPartitionResponse(Response, frozen=True):
    written: list[tuple[int, int]]
    """`(producer id, records)` of each writer, ascending."""
    leader_epoch: Epoch


class SealPartition(ToLeader[SealPartitionResponse], frozen=True):
    """Sent by the owner of a sealed transaction to the leader of each participant, which takes no
    more of its batches from now on: it asks the coordinator first. The answer lists what is there,
    once that is committed. Raises TransactionEnded, and Authorization if the transaction is another
    principal's."""

    api: ClassVar[int] = 77
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = (Right("write", "topic", "topic_id"),)
    family: Family
    epoch: TransactionEpoch


# --- from operators -----------------------------------------------------------------------------


class TransactionSummary(Response, frozen=True):
    transactional_id: str
    family: int
    epoch: int
    state: str
    """"open", "sealed", "committing" or "aborting"; "ready" if no transaction is in progress."""
    age_ms: int | None
    """Age since its first partition joined."""
    partitions: int
    transaction_timeout_ms: int
    """Maximum time that it may be open; an hour for the transaction of a batch write."""


LISTED_IDS_MAX = 10_000
"""Maximum number of transactional ids in an answer to ListTransactions."""


class ListTransactionsResponse(Response, frozen=True):
    transactions: list[TransactionSummary]
    """Sorted by transactional id; those of an id oldest first."""
    next_after: str | None
    """Not None if one answer does not hold all ids: ask again with this as `after`."""


class ListTransactions(ToTransactionCoordinator[ListTransactionsResponse], frozen=True):
    """Lists the transactions in progress of the transactional ids of one partition of
    `__transaction_state`."""

    api: ClassVar[int] = 72
    rights: ClassVar[Rights] = ()
    checked_when_answered: ClassVar[bool] = True
    after: CheckedName = ""
    """Only ids after this one."""
    idle: bool = False
    """True: the ids without a transaction in progress, too."""


class DescribeTransactionResponse(Response, frozen=True):
    transactional_id: str
    owner: str
    """The beginning: see `rayq.messages.secret_names`."""
    family: int
    epoch: int
    transaction_timeout_ms: int
    last_name: str | None
    transactions: list[TransactionSummary]
    """The transactions in progress, oldest first."""
    participants: list[tuple[int, int, str, int, bool]]
    """`(family, epoch, topic id, partition, marker is written)`"""


class DescribeTransaction(ToTransactionCoordinator[DescribeTransactionResponse], frozen=True):
    """Describes a transactional id. Raises InvalidRequest for an id that the coordinator does not
    know."""

    api: ClassVar[int] = 73
    rights: ClassVar[Rights] = (
        Right("describe", "transactional_id", "transactional_id"),
    )
    checked_when_answered: ClassVar[bool] = True
    transactional_id: TransactionalId


class AbortTransaction(ToTransactionCoordinator[Done], frozen=True):
    """Aborts the transaction if it is open, so that its producer hears TransactionAborted; else
    nothing is done. Answers once the decision is committed. A group's coordinator asks it, too: a
    member that put positions into the transaction is out of its group, and the next owners of its
    partitions wait for the end."""

    api: ClassVar[int] = 74
    quotas: ClassVar[tuple[QuotaName, ...]] = ()
    rights: ClassVar[Rights] = ()
    family: Family
    epoch: TransactionEpoch
    transactional_id: TransactionalId | None = None
    """Id that the transaction has to have: the transaction of another id is not aborted. A client
    that may alter this id may ask. None: any id, for a client that may alter the cluster."""


# --- between servers ----------------------------------------------------------------------------


class JoinTransaction(ToTransactionCoordinator[Done], frozen=True):
    """Sent by the leader of a partition before it appends the transaction's first batch (or by the
    group coordinator, before it takes positions): from now on the partition gets a marker when the
    transaction ends. Answers once that is committed. Raises TransactionEnded, TransactionLimit, and
    Authorization if the family is another principal's."""

    api: ClassVar[int] = 54
    family: Family
    epoch: TransactionEpoch
    participant_topic_id: Id
    participant_partition: Partition
    principal: Name | None = None
    """The principal that sent the batch or the positions. None: a superuser, or an older leader
    asks."""


class ProlongTransaction(ToTransactionCoordinator[Done], frozen=True):
    """Sent by the leader of a partition whose producer has used up a quota: the time for which it
    has to wait does not count for the timeout of its transaction, for at most an hour from the
    first partition on. Times that leaders report together count once. Nothing is done where the
    transaction is not open."""

    api: ClassVar[int] = 153
    family: Family
    epoch: TransactionEpoch
    throttle_ms: Milliseconds
    principal: Name | None = None
    """The principal that has used up its quota: nobody prolongs another's transaction."""


OUTCOMES_OVER = ("committed", "aborted", "unknown")
"""The states of a transaction about which a coordinator does nothing any more."""


class DescribeOutcomeResponse(Response, frozen=True):
    state: str
    """"open" or "sealed"; "committing" or "aborting" until all its markers are written; then
    "committed" or "aborted", as long as it is the last of its id; else "unknown": forgotten, or
    never heard of."""


class DescribeOutcome(ToTransactionCoordinator[DescribeOutcomeResponse], frozen=True):
    """Asks for the outcome of a transaction that a leader has had open for longer than the
    maximum."""

    api: ClassVar[int] = 55
    family: Family
    epoch: TransactionEpoch


class WriteMarker(ToLeader[Done], frozen=True):
    """Sent by the coordinator to the leader of a participant, until it is answered: the transaction
    ended. The leader answers once the marker is committed. Raises FencedEpoch for a coordinator
    that was replaced, TransactionOrder while an older transaction of the family is open there."""

    api: ClassVar[int] = 56
    answered_by: ClassVar[tuple[Answerer, ...]] = ("leader", "group coordinator")
    family: Family
    epoch: TransactionEpoch
    is_commit: bool
    coordinator_epoch: Epoch
    """The leader epoch of the coordinator's partition."""

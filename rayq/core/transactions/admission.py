"""Admission of the batches and markers of transactions by a partition's leader.

Pure. The log tells which transactions are open and which have ended. This module holds what a
leader knows besides, for one leader epoch: who has joined, and which coordinators it has heard
(docs/protocol.md, rules 25, 26).
"""

from __future__ import annotations

from enum import Enum, auto

from rayq.errors import (
    FencedEpochError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)
from rayq.messages.transaction_ids import coordinator_of

OPEN_TRANSACTIONS_MAX = 10_000
"""Maximum number of open transactions in a partition."""


class Step(Enum):
    """The next step before a batch is appended."""

    APPEND = auto()
    """The batch can be appended."""
    JOIN = auto()
    """The coordinator must know that the partition takes part."""
    WAIT = auto()
    """An older transaction of the family must get its marker."""


class TransactionAdmission:
    """See the module. One object lives for one leader epoch: the coordinator may have forgotten a
    membership of which an earlier leader knew.

    `open_epoch` is the epoch of the family's open transaction, or None; `ended_epoch` is its
    highest epoch that has a marker, or -1.
    """

    def __init__(self) -> None:
        self._joined: dict[tuple[int, int], set[str | None]] = {}
        """The principals that may write in each transaction, by the coordinator's answers."""
        self._coordinator_epochs: dict[int, int] = {}
        """The highest leader epoch that sent a marker, by partition of `__transaction_state`."""

    def batch(
        self,
        family: int,
        epoch: int,
        *,
        principal: str | None,
        open_epoch: int | None,
        ended_epoch: int,
        open_count: int,
    ) -> Step:
        """Returns the next step of a principal's batch; ask again after each wait. Raises
        TransactionEndedError, TransactionLimitError."""
        self._check_not_ended(family, epoch, open_epoch, ended_epoch)
        if open_epoch is not None and open_epoch < epoch:
            return Step.WAIT
        if open_epoch is None and open_count >= OPEN_TRANSACTIONS_MAX:
            raise TransactionLimitError(
                f"{open_count} transactions are open in this partition, the limit: nothing was "
                "written. Let some of them end, or use fewer producers at a time."
            )
        return Step.APPEND if principal in self._joined.get((family, epoch), ()) else Step.JOIN

    def joined(
        self, family: int, epoch: int, *, principal: str | None, ended_epoch: int
    ) -> None:
        """Notes a coordinator's answer that the partition takes part, and the principal may write.
        It may be a replaced coordinator, which answers after the transaction's end."""
        if epoch > ended_epoch:
            self._joined.setdefault((family, epoch), set()).add(principal)

    def seal(
        self, family: int, epoch: int, *, open_epoch: int | None, ended_epoch: int
    ) -> None:
        """Makes the partition join again before another batch of the transaction, here as under any
        later leader. A coordinator that has sealed the transaction does not let it join. So there
        is nothing to remember, and nobody else's seal does harm. Raises TransactionEndedError."""
        self._check_not_ended(family, epoch, open_epoch, ended_epoch)
        self._joined.pop((family, epoch), None)

    def _check_not_ended(
        self, family: int, epoch: int, open_epoch: int | None, ended_epoch: int
    ) -> None:
        if epoch <= ended_epoch or (open_epoch is not None and epoch < open_epoch):
            raise TransactionEndedError(
                f"The transaction {family}:{epoch} has ended in this partition, or another has "
                "begun after it. Nothing was written."
            )

    def marker(
        self,
        family: int,
        epoch: int,
        coordinator_epoch: int,
        *,
        open_epoch: int | None,
        ended_epoch: int,
    ) -> bool:
        """Returns whether a coordinator's marker is to be appended; else it is a repetition. Raises
        FencedEpochError, TransactionOrderError."""
        partition = coordinator_of(family)
        heard = self._coordinator_epochs.get(partition, 0)
        if coordinator_epoch < heard:
            raise FencedEpochError(
                f"Coordinator {partition} is in leader epoch {heard}, the marker is from "
                f"{coordinator_epoch}: another coordinates its transactions by now."
            )
        self._coordinator_epochs[partition] = coordinator_epoch
        if open_epoch is not None and open_epoch < epoch:
            raise TransactionOrderError(
                f"The transaction {family}:{open_epoch} is open in this partition: its marker "
                f"comes before that of {family}:{epoch}."
            )
        self._joined.pop((family, epoch), None)
        return epoch > ended_epoch and (open_epoch is None or open_epoch == epoch)

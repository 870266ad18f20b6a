"""The open and the ended transactions of a partition, from the headers of its log."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from rayq.messages.transaction_ids import family_of, is_transactional
from rayq.storage.batch import BatchHeader

ENDED_REMEMBERED = 10_000
"""The last markers of a partition stay in memory, so that a snapshot over several partitions can
ask which transactions ended between two moments."""
FAMILIES_MAX = 100_000
"""Above this the family that ended a transaction longest ago is forgotten."""


class OpenTransaction(NamedTuple):
    """A transaction, and the offset of its first batch in this partition."""

    family: int
    epoch: int
    first_offset: int


class AbortedTransaction(NamedTuple):
    """A transaction that was aborted, as the index of aborted transactions has it."""

    family: int
    epoch: int
    first_offset: int
    marker_offset: int
    stable_offset: int
    """Each transaction whose marker follows this marker has its first batch here or later."""


class _Ended(NamedTuple):
    """A marker. `first_offset` is None where it found nothing to end."""

    family: int
    epoch: int
    marker_offset: int
    first_offset: int | None


class _EndedEpoch(NamedTuple):
    """The last epoch of a family that ended, by its marker, and the partition's time then."""

    epoch: int
    marker_offset: int
    time_ms: int


class TransactionsSnapshot(msgspec.Struct, array_like=True, frozen=True):
    """The part of a producer snapshot that concerns transactions."""

    used_from: int
    open: list[OpenTransaction]
    ended_epochs: list[tuple[int, _EndedEpoch]]
    ended_from: int
    ended: list[_Ended]
    """The markers that the high watermark had not reached."""


class OpenTransactions:
    """The transactions of one partition.

    It is a function of the headers that `update` gets in order, so recovery and followers have it
    as the leader has it. A family has one transaction open at a time, since a leader takes no batch
    of the next while the one before has no marker.
    """

    def __init__(self) -> None:
        self.used_from: int | None = None
        """The offset of the first batch of a transaction, or marker, that is known. None: the
        partition knows no transactions."""
        self.ended_from = 0
        """All markers from here on are in memory."""
        # By family, in the order of the first offsets.
        self._open: dict[int, OpenTransaction] = {}
        # By family, in the order of the markers.
        self._ended_epochs: dict[int, _EndedEpoch] = {}
        self._ended: deque[_Ended] = deque()

    @property
    def is_used(self) -> bool:
        """True if the partition holds, or held, batches of transactions or markers."""
        return self.used_from is not None

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def first_open(self) -> int | None:
        """The first offset of all transactions that have no marker."""
        return next(iter(self._open.values())).first_offset if self._open else None

    def open_epoch(self, family: int) -> int | None:
        """The epoch of the family's transaction that has no marker yet, or None."""
        opened = self._open.get(family)
        return None if opened is None else opened.epoch

    def ended_epoch(self, family: int) -> int:
        """The highest epoch of the family whose marker is known, or -1."""
        ended = self._ended_epochs.get(family)
        return -1 if ended is None else ended.epoch

    def is_open(self, producer_id: int) -> bool:
        """Returns whether the transaction of this producer's family is open."""
        return is_transactional(producer_id) and family_of(producer_id) in self._open

    def undecided(self, high_watermark: int) -> list[OpenTransaction]:
        """The transactions without a marker below the high watermark, by their first offsets."""
        ended = []
        for transaction in reversed(self._ended):
            if transaction.marker_offset < high_watermark:
                break
            if transaction.first_offset is not None:
                ended.append(
                    OpenTransaction(transaction.family, transaction.epoch, transaction.first_offset)
                )
        return sorted(
            [*self._open.values(), *ended], key=lambda transaction: transaction.first_offset
        )

    def first_undecided(self, high_watermark: int) -> int | None:
        """The first offset of all that `undecided` returns, or None."""
        first = self.first_open
        for transaction in reversed(self._ended):
            if transaction.marker_offset < high_watermark:
                break
            if transaction.first_offset is not None and (
                first is None or transaction.first_offset < first
            ):
                first = transaction.first_offset
        return first

    def ended_between(self, start: int, end: int) -> list[tuple[int, int]] | None:
        """`(family, epoch)` of the markers from `start` up to `end` (exclusive), or None where
        markers that far back are not in memory any more."""
        if start < self.ended_from:
            return None
        found = []
        for transaction in reversed(self._ended):
            if transaction.marker_offset < start:
                break
            if transaction.marker_offset < end:
                found.append((transaction.family, transaction.epoch))
        return found[::-1]

    # --- changes ----------------------------------------------------------------------------------

    def update(self, header: BatchHeader, time_ms: int) -> AbortedTransaction | None:
        """Counts a batch that was appended, at the partition's time `time_ms`. Returns what it
        aborted."""
        if not header.is_transactional or header.producer_id is None:
            return None
        if self.used_from is None:
            self.used_from = header.base_offset
        family, epoch = family_of(header.producer_id), header.producer_epoch
        opened = self._open.get(family)
        if not header.is_control:
            if opened is None and epoch > self.ended_epoch(family):
                self._open[family] = OpenTransaction(family, epoch, header.base_offset)
            return None
        marker_offset = header.base_offset
        if epoch >= self.ended_epoch(family):
            self._ended_epochs.pop(family, None)
            self._ended_epochs[family] = _EndedEpoch(epoch, marker_offset, time_ms)
            if len(self._ended_epochs) > FAMILIES_MAX:
                del self._ended_epochs[next(iter(self._ended_epochs))]
        if opened is None or opened.epoch != epoch:
            self._ended.append(_Ended(family, epoch, marker_offset, None))
            return None
        del self._open[family]
        self._ended.append(_Ended(family, epoch, marker_offset, opened.first_offset))
        if not header.is_abort:
            return None
        first_open = self.first_open
        stable_offset = marker_offset + 1 if first_open is None else first_open
        return AbortedTransaction(*opened, marker_offset, stable_offset)

    def forget_decided(self, high_watermark: int) -> None:
        """Forgets all markers below the high watermark but the last."""
        ended = self._ended
        while len(ended) > ENDED_REMEMBERED and ended[0].marker_offset < high_watermark:
            self.ended_from = ended.popleft().marker_offset + 1

    def forget_ended_before(self, time_ms: int) -> None:
        """Forgets the epochs that ended before `time_ms`."""
        for family, ended in list(self._ended_epochs.items()):
            if ended.time_ms >= time_ms:
                break
            del self._ended_epochs[family]

    def forget_from(self, offset: int) -> None:
        """Resets the state for a log that begins again at `offset`. It has none of the batches
        before, so nothing is open, whatever was; and none of the markers that follow."""
        if self.used_from is not None and self.used_from >= offset:
            self.used_from = None
        self.ended_from = offset
        self._open.clear()
        self._ended.clear()
        for family, ended in list(self._ended_epochs.items()):
            if ended.marker_offset >= offset:
                del self._ended_epochs[family]

    # --- snapshots --------------------------------------------------------------------------------

    def snapshot(self, high_watermark: int) -> TransactionsSnapshot | None:
        """None: the partition knows no transactions."""
        if self.used_from is None:
            return None
        return TransactionsSnapshot(
            used_from=self.used_from,
            open=list(self._open.values()),
            ended_epochs=list(self._ended_epochs.items()),
            ended_from=max(self.ended_from, high_watermark),
            ended=[
                transaction
                for transaction in self._ended
                if transaction.marker_offset >= high_watermark
            ],
        )

    @staticmethod
    def of(snapshot: TransactionsSnapshot | None) -> OpenTransactions:
        transactions = OpenTransactions()
        if snapshot is not None:
            transactions.used_from = snapshot.used_from
            transactions.ended_from = snapshot.ended_from
            transactions._open = {transaction.family: transaction for transaction in snapshot.open}
            transactions._ended_epochs = dict(snapshot.ended_epochs)
            transactions._ended = deque(snapshot.ended)
        return transactions

"""What transactions leave in a played log, and what its leader tells of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rayq.client.consuming.subscription import transaction_of
from rayq.messages.transaction_ids import make_family
from rayq.storage.batch import BatchHeader, Marker, encode_batch, encode_marker

Transaction = tuple[int, int]
"""`(family, epoch)`."""


def transaction(number: int, epoch: int = 0) -> Transaction:
    return make_family(0, number), epoch


def transactional_batch(
    values: Sequence[bytes | None], of: Transaction, *, writer: int = 0, **columns: Any
) -> bytearray:
    """A batch of the transaction's writer of that number, as a producer sends it."""
    family, epoch = of
    return encode_batch(
        values,
        producer_id=family + writer,
        producer_epoch=epoch,
        base_sequence=0,
        is_transactional=True,
        **columns,
    )


def marker_batch(of: Transaction, *, is_commit: bool) -> bytearray:
    """What ends a transaction in a partition."""
    return encode_marker(Marker(*of, is_commit, coordinator_partition=0, coordinator_epoch=1))


class PlayedTransactions:
    """The transactions of a log, by the headers of its batches up to some offset."""

    def __init__(self, headers: Iterable[BatchHeader]) -> None:
        self.open: dict[Transaction, int] = {}
        """The first offset of each."""
        self._ended: list[tuple[Transaction, int, BatchHeader]] = []
        for header in headers:
            if (of := transaction_of(header)) is None:
                continue
            if header.is_control:
                first = self.open.pop(of, header.base_offset)
                self._ended.append((of, first, header))
            elif header.is_transactional:
                self.open.setdefault(of, header.base_offset)

    @property
    def is_used(self) -> bool:
        return bool(self.open or self._ended)

    def stable_offset(self, high_watermark: int) -> int:
        return min([high_watermark, *self.open.values()])

    def aborted_between(self, start: int, end: int) -> list[Transaction]:
        """Those with batches in the range, wherever their markers are."""
        return [
            of
            for of, first, marker in self._ended
            if marker.is_abort and first < end and marker.base_offset >= start
        ]

    def ended_between(self, start: int, end: int) -> list[Transaction]:
        """Those with markers in the range."""
        return [of for of, _, marker in self._ended if start <= marker.base_offset < end]

"""What transactions leave in a played log, and what its leader tells of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rayq.client.consuming.subscription import transaction_of
from rayq.storage.batch import (
    HEADER_BYTES,
    BatchHeader,
    assemble,
    encode_batch,
    read_header,
)
from rayq.transaction_ids import make_family

Transaction = tuple[int, int]
"""`(family, epoch)`."""
TRANSACTIONAL, CONTROL, ABORT = 1 << 4, 1 << 5, 1 << 7


def transaction(number: int, epoch: int = 0) -> Transaction:
    return make_family(0, number), epoch


def transactional_batch(
    values: Sequence[bytes | None], of: Transaction, *, writer: int = 0, **columns: Any
) -> bytearray:
    """A batch of the transaction's writer of that number, as a producer sends it."""
    family, epoch = of
    batch = encode_batch(
        values, producer_id=family + writer, producer_epoch=epoch, base_sequence=0, **columns
    )
    return _with_attributes(batch, TRANSACTIONAL)


def marker_batch(of: Transaction, *, is_commit: bool) -> bytearray:
    """The control batch that ends a transaction in a partition."""
    family, epoch = of
    header = BatchHeader(
        base_offset=0,
        length=HEADER_BYTES,
        leader_epoch=0,
        attributes=TRANSACTIONAL | CONTROL | (0 if is_commit else ABORT),
        record_count=1,
        producer_id=family,
        producer_epoch=epoch,
    )
    return assemble(header, b"")


def without_bit(batch: bytes) -> bytes:
    """The batch as compaction leaves it once its transaction is committed."""
    return bytes(_with_attributes(batch, -TRANSACTIONAL))


def _with_attributes(batch: bytes | bytearray, change: int) -> bytearray:
    header = read_header(batch)
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    fields["attributes"] += change
    return assemble(BatchHeader(**fields), bytes(batch[HEADER_BYTES:]))


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
            elif header.attributes & TRANSACTIONAL:
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
            if marker.attributes & ABORT and first < end and marker.base_offset >= start
        ]

    def ended_between(self, start: int, end: int) -> list[Transaction]:
        """Those with markers in the range."""
        return [of for of, _, marker in self._ended if start <= marker.base_offset < end]

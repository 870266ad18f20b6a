"""Batches of records that leave a queue together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rayq.config import MIB
from rayq.core.queues.moves import Dying
from rayq.records import Headers

BATCH_BYTES = MIB // 2
"""Maximum size of the records of a batch; a single record may be larger."""


class MovedRecord(NamedTuple):
    """A record as the source's log has it."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    is_large: bool = False
    """True if the value is a manifest (`core.large_values`)."""

    @property
    def size_bytes(self) -> int:
        headers_bytes = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.value or b"") + len(self.key or b"") + headers_bytes


Records = list[tuple[Dying, MovedRecord]]


def batches(records: Records) -> Iterator[Records]:
    """Splits records into batches. A large record has a batch of its own."""
    batch: Records = []
    batch_bytes = 0
    for pair in records:
        size_bytes = pair[1].size_bytes + len(pair[0].error)
        is_alone = bool(batch) and (pair[1].is_large or batch[0][1].is_large)
        if is_alone or (batch and batch_bytes + size_bytes > BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(pair)
        batch_bytes += size_bytes
    if batch:
        yield batch

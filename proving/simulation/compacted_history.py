"""History of one compacted partition: the committed records, and those that a replica may lack.

A record may be missing below a replica's cleaned offset when a later one of its key is committed.
The latest record of a key is missing only when it is a tombstone, below the replica's tombstone
horizon, and older than `delete_retention_ms`; then no record of that key is left before it, which
would be alive again. Records of a transaction count once it is committed, and may be missing once
it is aborted; its marker may be missing as a tombstone may.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from rayq.messages.transaction_ids import family_of
from rayq.storage.batch import decode_columns, read_header

_DECODED_MAX = 4096


class _Kept(NamedTuple):
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Any


class _Written(NamedTuple):
    record: _Kept
    at_s: float
    """The time of the commit."""


class CompactedHistory:
    """See the module."""

    def __init__(self) -> None:
        self._written: dict[int, _Written] = {}
        """The committed records by offset."""
        self._latest: dict[bytes | None, int] = {}
        self._undecided: dict[tuple[int, int], list[int]] = {}
        """The offsets of each transaction without a marker."""
        self._aborted: set[int] = set()
        self._markers: set[int] = set()

    def add(self, batch: bytes, now_s: float) -> None:
        """Records a batch that a leader has committed."""
        header = read_header(batch)
        offsets = []
        for offset, record in _records(batch):
            self._written[offset] = _Written(record, now_s)
            offsets.append(offset)
        if not header.is_transactional:
            self._count(offsets)
            return
        assert header.producer_id is not None and header.producer_epoch is not None
        transaction = (family_of(header.producer_id), header.producer_epoch)
        if not header.is_control:
            self._undecided.setdefault(transaction, []).extend(offsets)
            return
        self._markers.update(offsets)
        ended = self._undecided.pop(transaction, [])
        if header.is_abort:
            self._aborted.update(ended)
        else:
            self._count(ended)

    def _count(self, offsets: list[int]) -> None:
        for offset in offsets:
            key = self._written[offset].record.key
            self._latest[key] = max(offset, self._latest.get(key, -1))

    def fault_of_all(self, batches: Iterable[bytes], limit: int) -> str | None:
        """The error in a replica's whole log below `limit`. A key whose latest record is at or
        above `limit` is not checked, since the replica will still copy that record."""
        last: dict[bytes | None, tuple[int, _Kept]] = {}
        hidden = self._aborted.union(self._markers, *self._undecided.values())
        for batch in batches:
            for offset, record in _records(batch):
                if offset < limit and offset not in hidden:
                    last[record.key] = offset, record
        for key, (offset, record) in last.items():
            latest = self._latest.get(key, -1)
            if offset < latest < limit and record.value is not None:
                return (
                    f"key {key!r} is alive again: its last record there is {record} at {offset}, "
                    f"committed was {self._written[latest].record} at {latest}"
                )
        return None

    def repeated(self) -> dict[tuple[bytes | None, bytes], list[int]]:
        """The values that stand at several offsets, with these offsets, by key."""
        found: dict[tuple[bytes | None, bytes], list[int]] = {}
        for offset, (record, _) in self._written.items():
            if record.value is not None:
                found.setdefault((record.key, record.value), []).append(offset)
        return {what: offsets for what, offsets in found.items() if len(offsets) > 1}

    def fault_of(
        self, start: int, batch: bytes, *, horizon: int, deleted_before_s: float
    ) -> str | None:
        """The error in the batch that is a replica's next one after offset `start`, or None."""
        header = read_header(batch)
        found = dict(_records(batch))
        for offset, record in found.items():
            written = self._written.get(offset)
            if written is None or written.record != record:
                return f"at {offset} it has {record}, committed was {written}"
        for offset in range(start, header.next_offset):
            if offset not in found:
                fault = self.fault_of_missing(
                    offset, horizon=horizon, deleted_before_s=deleted_before_s
                )
                if fault is not None:
                    return fault
        return None

    def fault_of_missing(self, offset: int, *, horizon: int, deleted_before_s: float) -> str | None:
        """The error where a replica has no record at this offset, or None."""
        written = self._written.get(offset)
        if written is None or offset in self._aborted:
            return None
        record, at_s = written
        is_marker = offset in self._markers
        if not is_marker and self._latest.get(record.key, -1) > offset:
            return None
        if record.value is not None and not is_marker:
            return f"it lacks the latest record of key {record.key!r}, at {offset}"
        if offset >= horizon:
            return (
                f"it lacks the tombstone of key {record.key!r} at {offset}, above its horizon "
                f"{horizon}"
            )
        if at_s > deleted_before_s:
            return (
                f"it lacks the tombstone of key {record.key!r} at {offset}, committed at "
                f"{at_s:.3f}; those from before {deleted_before_s:.3f} may go"
            )
        return None

    def state(self) -> dict[bytes | None, bytes]:
        """The latest value of each key that has a value."""
        return {
            key: value
            for key, offset in self._latest.items()
            if (value := self._written[offset].record.value) is not None
        }


@functools.lru_cache(_DECODED_MAX)
def _records(batch: bytes) -> tuple[tuple[int, _Kept], ...]:
    """The records of a batch. All replicas have the same batches, and each look at a log that was
    compacted meets most of them again."""
    header = read_header(batch)
    if header.is_control:
        return ((header.base_offset, _Kept(header.append_time_ms, None, batch, None)),)
    columns = decode_columns(batch, 0, header)
    count = len(columns.values)
    keys = columns.keys or [None] * count
    headers = columns.headers or [None] * count
    return tuple(
        (offset, _Kept(timestamp_ms, key, value, header))
        for offset, timestamp_ms, key, value, header in zip(
            columns.offsets, columns.timestamps_ms, keys, columns.values, headers, strict=True
        )
    )

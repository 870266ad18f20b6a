"""Cutter of batches: it turns the rows of a task into numbered batches, the same in each attempt at
the task."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from rayq.batch.task_rows import TaskRows
from rayq.batch.write_job import WriteJob
from rayq.client.producing.accumulator import HEADER_OVERHEAD_BYTES, RECORD_OVERHEAD_BYTES
from rayq.client.producing.partitioner import partition_of_key
from rayq.errors import InvalidRequestError, RecordTooLargeError
from rayq.records import Headers
from rayq.storage.batch import SEQUENCE_COUNT, encode_batch

BATCH_RECORDS = 8192
KEYLESS_RUN = 4096
"""Number of rows without a key and a partition that go to one partition, before the next ones go to
the next."""


class _Open:
    """The rows of one partition that wait until a batch of them is full."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.timestamps_ms: list[int] = []
        self.headers: list[Headers | None] = []
        self.sizes: list[int] = []
        self.next_sequence = 0


class Cutter:
    """A cutter that divides rows by partition and cuts them into batches. The batches depend only
    on the rows."""

    def __init__(self, job: WriteJob, task: int) -> None:
        self._job = job
        self._task = task
        self._open: defaultdict[int, _Open] = defaultdict(_Open)
        self._row = 0

    def cut(self, rows: TaskRows) -> Iterator[tuple[int, bytearray]]:
        """Takes rows in. Yields the batches that are full by now, each with its partition."""
        for partition, part in self._divide(rows):
            open_ = self._open[partition]
            self._add(open_, part)
            yield from ((partition, batch) for batch in self._full(open_))

    def rest(self) -> Iterator[tuple[int, bytearray]]:
        """Yields the batches that are not full, at the end."""
        for partition in sorted(self._open):
            open_ = self._open[partition]
            if open_.values:
                yield partition, self._batch(open_, len(open_.values))

    # --- by partition ---------------------------------------------------------------------------

    def _divide(self, rows: TaskRows) -> Iterator[tuple[int, TaskRows]]:
        places = self._places(rows)
        self._row += len(places)
        distinct = dict.fromkeys(places)
        if len(distinct) <= 1:
            yield from ((partition, rows) for partition in distinct)
            return
        members: dict[int, list[int]] = {partition: [] for partition in distinct}
        for index, partition in enumerate(places):
            members[partition].append(index)
        for partition, chosen in members.items():
            yield partition, TaskRows(*(_taken(column, chosen) for column in rows))

    def _places(self, rows: TaskRows) -> list[int]:
        """The partition of each row."""
        count = len(self._job.start_offsets)
        length = len(rows.values)
        if rows.partitions is None and rows.keys is None:
            return [self._keyless(index, count) for index in range(self._row, self._row + length)]
        keys: Sequence[bytes | None] = rows.keys or [None] * length
        if rows.partitions is None:
            given: Sequence[int | None] = [None] * length
        else:
            given = rows.partitions
            for partition in set(given):
                if partition is not None and not 0 <= partition < count:
                    raise InvalidRequestError(
                        f"Topic {self._job.topic!r} has partitions 0 to {count - 1}, not "
                        f"{partition}, which the column partition names."
                    )
        return [
            partition
            if partition is not None
            else (self._keyless(row, count) if key is None else partition_of_key(key, count))
            for row, (partition, key) in enumerate(zip(given, keys, strict=True), self._row)
        ]

    def _keyless(self, row: int, count: int) -> int:
        return (self._task + row // KEYLESS_RUN) % count

    # --- into batches ---------------------------------------------------------------------------

    def _add(self, open_: _Open, rows: TaskRows) -> None:
        count = len(rows.values)
        default_ms = self._job.timestamp_ms
        keys = rows.keys or [None] * count
        headers = rows.headers or [None] * count
        times = rows.timestamps_ms
        open_.values += rows.values
        open_.keys += keys
        open_.headers += headers
        open_.timestamps_ms += (
            [default_ms] * count
            if times is None
            else [default_ms if time is None else time for time in times]
        )
        open_.sizes += [
            RECORD_OVERHEAD_BYTES + len(value or b"") + len(key or b"")
            for value, key in zip(rows.values, keys, strict=True)
        ]
        if rows.headers is not None:
            first = len(open_.sizes) - count
            for index, row_headers in enumerate(rows.headers, first):
                for name, value in row_headers or ():
                    open_.sizes[index] += HEADER_OVERHEAD_BYTES + len(name.encode()) + len(value)

    def _full(self, open_: _Open) -> Iterator[bytearray]:
        """Yields the full batches. A batch is full when the next row does not fit; a single row
        always fits."""
        while True:
            ends = list(accumulate(open_.sizes[: BATCH_RECORDS + 1]))
            fitting = max(bisect_right(ends, self._job.batch_bytes), 1)
            fitting = min(fitting, BATCH_RECORDS)
            if fitting >= len(open_.sizes):
                return
            yield self._batch(open_, fitting)

    def _batch(self, open_: _Open, count: int) -> bytearray:
        if open_.next_sequence + count > SEQUENCE_COUNT:
            raise RecordTooLargeError(
                f"One task writes at most {SEQUENCE_COUNT} records to a partition: use more tasks."
            )
        producer = self._job.first_producer_id + self._task
        batch = encode_batch(
            open_.values[:count],
            open_.keys[:count],
            open_.headers[:count],
            open_.timestamps_ms[:count],
            producer_id=producer,
            producer_epoch=self._job.epoch,
            base_sequence=open_.next_sequence,
            append_time=self._job.append_time,
            is_transactional=self._job.transactional_id is not None,
        )
        open_.next_sequence += count
        for column in (open_.values, open_.keys, open_.headers, open_.timestamps_ms, open_.sizes):
            del column[:count]
        return batch


def _taken(column: list[Any] | None, chosen: Sequence[int]) -> Any:
    return None if column is None else [column[index] for index in chosen]

"""Sender of batches whose numbers the caller chose, so that leaders recognise repeated ones.

An ordinary producer takes a new producer id when it starts. Here the id and the sequence numbers
come from the job and the rows, so a second attempt at the same work sends the same batches under
the same numbers, and the leader appends each of them once.

A leader recognises the last five batches of a producer. A batch that it considers out of order may
be older than these. Then the sender reads the partition from where the job began, and the numbers
in the log tell what is written. A batch that is already in the log counts as sent only if its CRC
is that of the batch to send.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rayq.batch.job_partition import ATTEMPT_TIMEOUT_S, JobPartition
from rayq.config import MIB
from rayq.errors import (
    LogTruncatedError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    PartitionOfflineError,
    RayqError,
    RewriteMismatchError,
    TimeoutError,
    UnknownServerError,
)
from rayq.messages import EARLIEST, READ_UNCOMMITTED, Fetch, Produce
from rayq.records import OffsetRange
from rayq.storage.batch import BatchHeader, read_header, split_batches

logger = logging.getLogger(__name__)

WAITING_MAX = 4
"""Maximum number of encoded batches of one partition that wait for their turn; then the caller
waits."""
SCAN_BYTES = 4 * MIB


class NumberedBatch(NamedTuple):
    """An encoded batch and its numbers."""

    payload: bytearray
    header: BatchHeader

    @property
    def base_sequence(self) -> int:
        assert self.header.base_sequence is not None
        return self.header.base_sequence

    @property
    def next_sequence(self) -> int:
        return self.base_sequence + self.header.record_count


class _Known(NamedTuple):
    """A batch of this producer in the log."""

    next_sequence: int
    base_offset: int
    body_crc: int
    is_whole: bool
    """True if compaction took no records out of it."""


class NumberedSender:
    """The sender of one producer id in one partition. Belongs to the client's loop.

    Batches go one at a time, in the order of their numbers, which start at 0. `on_change` is called
    whenever a batch is done and when the sender failed.
    """

    def __init__(
        self,
        partition: JobPartition,
        producer_id: int,
        *,
        epoch: int = 0,
        scan_from: int,
        scan_first: bool,
        on_change: Callable[[], None],
    ) -> None:
        """The timeout of `partition` is for each batch, from its turn to its acknowledgement.
        Earlier attempts wrote nothing below the offset `scan_from`. `scan_first`: look for their
        records before anything is sent, because the leader may have forgotten them."""
        self._partition = partition
        self._producer = (producer_id, epoch)
        self._on_change = on_change
        self._waiting: deque[NumberedBatch] = deque()
        self._task: asyncio.Task[None] | None = None
        self._known: dict[int, _Known] = {}
        self._known_next = 0
        """The sequence number after the last one that was found in the log."""
        self._scanned_to = scan_from
        self._scan_first = scan_first
        self._may_have_gaps = False
        """True if retention or compaction may have removed batches from the part that was read."""
        self.failure: RayqError | None = None
        self.ranges: list[OffsetRange] = []
        self.repeated = 0
        """The number of records that were there from an earlier attempt."""
        self._ends_in_repeat = False
        self._next_sequence = 0

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < WAITING_MAX

    @property
    def count(self) -> int:
        """The number of records written, by this attempt or an earlier one."""
        return self._next_sequence

    @property
    def is_idle(self) -> bool:
        return self._task is None

    def put(self, payload: bytearray) -> None:
        """Takes the next batch of the sequence, encoded with its numbers."""
        self._waiting.append(NumberedBatch(payload, read_header(payload)))
        if self._task is None and self.failure is None:
            tasks = self._partition.client.environment.tasks
            self._task = tasks.spawn(self._run(), f"write to {self._partition}")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            if self._scan_first:
                await self._scan()
                self._scan_first = False
            while self._waiting:
                await self._send(self._waiting[0])
                self._waiting.popleft()
                self._on_change()
        except RayqError as error:
            self.failure = error
        except Exception as error:
            logger.exception("writing to %s failed", self._partition)
            self.failure = UnknownServerError(f"The writer failed: {error!r}.")
        finally:
            self._task = None
            self._on_change()

    async def check_end(self) -> None:
        """Checks that no earlier attempt wrote more: its batches would stand behind the last batch
        of this attempt. Call it after the last batch. Raises RewriteMismatchError."""
        if not self._ends_in_repeat:
            return
        if self.ranges:
            self._scanned_to = max(self._scanned_to, self.ranges[-1].end)
        await self._scan()
        if self._known_next > self._next_sequence:
            raise self._mismatch(self._next_sequence)

    # --- one batch ------------------------------------------------------------------------------

    async def _send(self, batch: NumberedBatch) -> None:
        while batch.next_sequence > self._known_next:
            known_before = self._known_next
            try:
                await self._produce(batch)
                return
            except RayqError as error:
                if not error.breaks_sequence:
                    raise
                # Another attempt may be ahead, by more than the leader recognises.
                await self._scan()
                if batch.base_sequence < self._known_next < batch.next_sequence:
                    raise self._mismatch(batch.base_sequence) from None
                if self._known_next == known_before:
                    raise
        self._is_there(batch)

    async def _produce(self, batch: NumberedBatch) -> None:
        partition = self._partition
        try:
            answer, _ = await partition.exchange(
                lambda leader_epoch: Produce(
                    topic_id=partition.topic_id,
                    partition=partition.place.partition,
                    leader_epoch=leader_epoch,
                    acks=-1,
                    timeout_ms=int(ATTEMPT_TIMEOUT_S * 1000),
                ),
                batch.payload,
            )
        except (PartitionOfflineError, TimeoutError) as error:
            is_offline = isinstance(error, PartitionOfflineError)
            raise (PartitionOfflineError if is_offline else OutcomeUnknownError)(
                f"A batch for {partition} was not acknowledged within {partition.timeout_s:g} s "
                f"and may or may not be written: {error} Running the same task of the same job "
                "again finds out."
            ) from error
        if answer.is_repeat:
            await self._compare(batch, answer.base_offset)
        self._done(batch, is_repeat=answer.is_repeat)
        self._written(answer.base_offset, batch.header.record_count)

    def _done(self, batch: NumberedBatch, *, is_repeat: bool) -> None:
        self._next_sequence = batch.next_sequence
        self._ends_in_repeat = is_repeat
        if is_repeat:
            self.repeated += batch.header.record_count

    def _written(self, base_offset: int, count: int) -> None:
        start = base_offset
        if self.ranges and self.ranges[-1].end == base_offset:
            start = self.ranges.pop().start
        self.ranges.append(OffsetRange(*self._partition.place, start, base_offset + count))

    # --- what an earlier attempt left -----------------------------------------------------------

    def _is_there(self, batch: NumberedBatch) -> None:
        """Counts the batch as sent. Raises RewriteMismatchError if another one has its place."""
        known = self._known.get(batch.base_sequence)
        if known is None:
            if not self._may_have_gaps:
                raise self._mismatch(batch.base_sequence)
        else:
            same_numbers = known.next_sequence == batch.next_sequence
            if not same_numbers or (known.is_whole and known.body_crc != batch.header.body_crc):
                raise self._mismatch(batch.base_sequence)
            self._written(known.base_offset, batch.header.record_count)
        self._done(batch, is_repeat=True)

    async def _compare(self, batch: NumberedBatch, offset: int) -> None:
        """Compares a batch with the one that the leader reports at `offset`: it was sent before, by
        this attempt or another."""
        try:
            headers, _ = await self._fetch(offset)
        except OffsetOutOfRangeError as error:
            await self._start_above(offset, error)
            return  # it expired in between, and there is nothing to compare with
        for header in headers:
            if header.base_offset == offset:
                self._remember(header)
        known = self._known.get(batch.base_sequence)
        if known is not None and known.is_whole and known.body_crc != batch.header.body_crc:
            raise self._mismatch(batch.base_sequence)

    def _mismatch(self, sequence: int) -> RewriteMismatchError:
        return RewriteMismatchError(
            f"An earlier attempt at this task wrote other records to {self._partition} than this "
            f"one makes, from the task's record {sequence} there on: its rows or their order "
            "changed between the attempts. What is in the topic may lack rows or hold them twice. "
            "Make the task repeatable: sort its rows within partitions, or persist what is written "
            "before the write."
        )

    async def _scan(self) -> None:
        """Looks for batches of this producer, from where the job began to the end."""
        while True:
            try:
                headers, next_offset = await self._fetch(self._scanned_to)
            except OffsetOutOfRangeError as error:
                self._scanned_to = await self._start_above(self._scanned_to, error)
                self._may_have_gaps = True
                continue
            for header in headers:
                self._remember(header)
            if next_offset <= self._scanned_to:
                return
            self._scanned_to = next_offset

    def _remember(self, header: BatchHeader) -> None:
        if header.base_sequence is None:
            return
        if (header.producer_id, header.producer_epoch) != self._producer:
            return
        next_sequence = header.base_sequence + header.last_offset_delta + 1
        self._known[header.base_sequence] = _Known(
            next_sequence=next_sequence,
            base_offset=header.base_offset,
            body_crc=header.body_crc,
            is_whole=header.record_count == header.last_offset_delta + 1,
        )
        self._known_next = max(self._known_next, next_sequence)

    # --- reading --------------------------------------------------------------------------------

    async def _fetch(self, offset: int) -> tuple[list[BatchHeader], int]:
        """The headers of committed batches from `offset` on, and the offset at which to
        continue."""
        partition = self._partition
        answer, payload = await partition.exchange(
            lambda leader_epoch: Fetch(
                topic_id=partition.topic_id,
                partition=partition.place.partition,
                leader_epoch=leader_epoch,
                offset=offset,
                last_epoch=None,
                bytes_max=SCAN_BYTES,
                wait_ms=0,
                isolation=READ_UNCOMMITTED,
            )
        )
        if answer.cleaned_offset > offset:
            self._may_have_gaps = True
        return [header for _, header in split_batches(payload)], answer.next_offset

    async def _start_above(self, offset: int, error: OffsetOutOfRangeError) -> int:
        """The log start, if it is above `offset`: that is why the offset is gone. Otherwise raises
        LogTruncatedError."""
        start = await self._partition.offset(EARLIEST)
        assert start is not None, "EARLIEST has no timestamp to miss"
        if start <= offset:
            raise LogTruncatedError(
                f"{error} Yet it was there: an unclean election cut it off, and perhaps records of "
                "this task with it."
            )
        return start

"""Group-commit log of one coordinator partition: it appends decisions in batches with acks=all,
keeps a few batches in flight, and replays the log when a coordinator starts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from rayq import messages
from rayq.actors.purgatory import Purgatory
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import MIB
from rayq.errors import CorruptBatchError, RayqError
from rayq.storage.batch import decode_columns, encode_batch, split_batches

RecordT = TypeVar("RecordT")

RETRY_S = 0.1
READ_BYTES = MIB
BATCH_BYTES = MIB
"""Maximum size of a batch of several decisions; a decision is never split."""
WRITES_MAX = 4
"""Maximum number of batches in flight. A decision need not wait for the whole write of another one;
decisions that come while all of them are in flight are written together."""
APPEND_TIMEOUT_MS = 3_600_000
"""Timeout of an append, long enough to learn its outcome: at the latest, the role ends."""


class CoordinatorLog(Generic[RecordT]):
    """See the module. `encode` makes `(key, value)` of a record. `on_failure(error)` is called when
    an append failed: what was decided may never be committed."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        *,
        encode: Callable[[RecordT], tuple[bytes, bytes | None]],
        on_failure: Callable[[RayqError], None],
    ) -> None:
        self._replica_log = replica_log
        self._leader = leader
        self._environment = replica_log.environment
        self._topic_id = assignment.topic_id
        self._partition = assignment.partition
        self._encode = encode
        self._on_failure = on_failure
        self._pending: deque[list[RecordT]] = deque()
        self._later: list[RecordT] = []
        """Records that are written with the next decision."""
        self.decided = 0
        """Number of decisions that were appended here."""
        self.committed = 0
        """Number of them that are committed."""
        self.generation = 0
        """Generation of the decisions; a new one begins whenever decisions were dropped."""
        self._written = 0
        """Number of them that are in the log, committed or not."""
        self._writes = 0
        """Number of batches that wait to be committed."""
        self._is_write_scheduled = False
        self._waiting: Purgatory[None] = Purgatory()

    def append(self, records: list[RecordT]) -> None:
        """Takes the records of a decision, to be written to the log. Either all of them are
        committed, or none."""
        self._pending.append(records)
        self.decided += 1
        if self._writes < WRITES_MAX and not self._is_write_scheduled:
            # At the end of the turn: requests that came together are written together.
            self._is_write_scheduled = True
            asyncio.get_running_loop().call_soon(self._write)

    def append_later(self, records: list[RecordT]) -> None:
        """Takes records on which no answer is based. They are written with the next decision or by
        `write_rest`, and need no batch of their own while decisions keep coming."""
        self._later += records

    def write_rest(self) -> None:
        """Writes the records that `append_later` took, unless a decision has taken them along."""
        if self._later:
            records, self._later = self._later, []
            self.append(records)

    async def until_committed(self) -> None:
        """Returns when everything decided so far is committed. Raises the error that `drop` is
        given."""
        if self.committed < self.decided:
            await self._waiting.add(self.decided, None)

    def drop(self, error: RayqError) -> None:
        """Forgets uncommitted decisions; the requests that wait for them get the error."""
        self.generation += 1
        self._writes = 0
        self._pending.clear()
        self._later.clear()
        self.committed = self._written = self.decided
        self._waiting.fail(error)

    def _write(self) -> None:
        self._is_write_scheduled = False
        if self._writes >= WRITES_MAX or not self._pending:
            return
        later, self._later = self._later, []
        self._pending[0] = later + self._pending[0]
        keys: list[bytes | None] = []
        values: list[bytes | None] = []
        decisions = size_bytes = 0
        while self._pending and size_bytes < BATCH_BYTES:
            decisions += 1
            for record in self._pending.popleft():
                key, value = self._encode(record)
                keys.append(key)
                values.append(value)
                size_bytes += len(key) + len(value or b"")
        request = messages.Produce(
            topic_id=self._topic_id,
            partition=self._partition,
            leader_epoch=self._leader.leader_epoch,
            acks=-1,
            timeout_ms=APPEND_TIMEOUT_MS,
        )
        try:
            batch = encode_batch(values, keys, timestamps_ms=self._environment.clock.wall_ms())
            outcome = self._leader.produce(request, memoryview(batch), principal=None)
        except RayqError as error:
            self._on_failure(error)
            return
        self._written += decisions
        index, generation = self._written, self.generation
        if isinstance(outcome, messages.ProduceResponse):
            self._committed_up_to(index)
            return
        self._writes += 1

        def done(future: asyncio.Future[messages.ProduceResponse]) -> None:
            error = future.exception()
            if generation != self.generation:
                return
            self._writes -= 1
            if error is None:
                self._committed_up_to(index)
            else:
                assert isinstance(error, RayqError)
                self._on_failure(error)

        outcome.add_done_callback(done)

    def _committed_up_to(self, index: int) -> None:
        self.committed = max(self.committed, index)
        self._waiting.reached(index)
        self._write()

    async def replay(
        self, take: Callable[[bytes | None, bytes | None], None], *, only_last: bool = False
    ) -> int:
        """Gives `take` each key and value up to the log's present end, once all of it is committed;
        returns the number of records. `only_last`: those of the last batch. Raises
        CorruptBatchError, StorageError, and the errors of `take`."""
        replica_log = self._replica_log
        end = replica_log.log.end_offset
        while not self._leader.state.may_serve or replica_log.high_watermark < end:
            await replica_log.committed.wait(RETRY_S)
        offset = replica_log.log.start_offset
        if only_last:
            offset = max(offset, end - 1)
        count = 0
        while offset < end:
            data, next_offset = await replica_log.read(offset, end, READ_BYTES)
            try:
                for position, header in split_batches(data):
                    columns = decode_columns(data, position, header)
                    keys = columns.keys or [None] * len(columns.values)
                    for key, value in zip(keys, columns.values, strict=True):
                        take(key, value)
                        count += 1
            except CorruptBatchError:
                # Where the disk is the reason, this replica ends, and a sound replica takes over.
                await replica_log.verify(offset)
                raise
            offset = next_offset
            await asyncio.sleep(0)  # The process leads other partitions, too.
        return count

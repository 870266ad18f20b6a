"""Read-ahead of a queue's leader: it learns the records of the log and reads those it hands out.

It reads ahead of the takes, but only as far as they need. A take reads before it locks, so a failed
read locks nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rayq import messages
from rayq.actors.queues.reads import DataPartition, Found, Piece
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import QueueConfig
from rayq.core.large.holds import OPEN_VALUE_MS_MAX, LargeHolds
from rayq.core.large.values import first_chunk_in
from rayq.core.queues.cut import common_end
from rayq.core.queues.state import KeptRecord, Lock, QueueState
from rayq.environment import Buffer
from rayq.errors import CorruptBatchError, OffsetOutOfRangeError, RayqError
from rayq.logs import log_event

logger = logging.getLogger(__name__)


PIECES_AHEAD_MAX = 16
"""Maximum number of pieces of the log that one take of an ordered queue scans."""


class Given(NamedTuple):
    """The result of a take: locks, and the batches that have their records."""

    locks: list[Lock]
    parts: list[Buffer]


class LogScanner:
    """See the module. One task takes; others may learn beside it."""

    def __init__(
        self,
        state: QueueState,
        data: DataPartition,
        *,
        was_kept: bool,
        place: tuple[str, int],
    ) -> None:
        self.state = state
        self.was_kept = was_kept
        """True if the queue existed before this opening."""
        self._replica_log = data.replica_log
        self._reads = data.reads
        self._place = place
        self._clock = data.replica_log.environment.clock
        self._clock_watch = data.clock_watch

    # --- opening --------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        records: Iterable[KeptRecord],
        config: QueueConfig,
        queue: messages.QueueMetadata,
        data: DataPartition,
        *,
        fence: int,
        fence_min: int,
    ) -> LogScanner:
        """Loads the kept state of a queue, compared with the log, for the opening of this fence.
        Its first changes must be kept before anything else."""
        replica_log, clock_watch, partition = data.replica_log, data.clock_watch, data.partition
        log = replica_log.log
        now_s = replica_log.environment.clock.monotonic()
        now_ms = clock_watch.now_ms()
        state = QueueState.replay(config, records, now_ms=now_ms, now_s=now_s)
        was_kept = state is not None
        if state is None:
            is_latest = config.start == "latest" and partition < queue.partitions
            start = replica_log.last_stable_offset if is_latest else log.start_offset
            state = QueueState.begin(config, start, state_epoch=fence)
            state.holds = LargeHolds()
            if start > log.start_offset:
                state.holds.chunk(log.start_offset, clock_watch.now_ms())
        else:
            _compare(state, queue, replica_log, fence)
            if state.state_epoch < fence_min:
                state.void_locks(fence)
        if log.start_offset > state.start_offset:
            state.advance_start(log.start_offset)
        scanner = cls(state, data, was_kept=was_kept, place=(queue.topic_id, partition))
        scanner.configure(config)
        scanner.learn_epoch()
        if config.ordered_by_key:
            await scanner._tell_keys()
        return scanner

    def configure(self, config: QueueConfig) -> None:
        """Takes the queue's config."""
        self.state.config = config
        state = self.state
        if config.retention == "topic":
            state.holds = None
        elif state.holds is None:
            # Nobody noted the chunks of what was learned so far: there may be some anywhere.
            until_ms = self._clock_watch.now_ms() + OPEN_VALUE_MS_MAX
            log_start = self._replica_log.log.start_offset
            state.holds = LargeHolds([(log_start, state.learned, until_ms)])

    async def _tell_keys(self) -> None:
        """Tells the state the keys of unsettled records. They may be scattered: each piece of the
        log is scanned once."""
        told = 0
        for first, last in self.state.keys_wanted():
            offset = max(first, told)
            while offset <= last:
                piece = await self._reads.piece(offset)
                try:
                    for found in piece.found(offset, with_keys=True):
                        if not found.is_gap:
                            count = found.next_offset - found.first
                            self.state.tell_keys(found.first, _keys(found, count))
                        offset = found.next_offset
                except CorruptBatchError:
                    await self.check(offset)
                    raise
                offset = told = piece.next_offset
                await asyncio.sleep(0)  # Other tasks of this process may have waited for long.
        # Records that compaction has removed since have none.
        self.state.tell_keys(self.state.learned, [])

    # --- learning -------------------------------------------------------------------------------

    async def learn(self, *, is_listing: bool = False) -> bool:
        """Learns the next part of the log. Returns False if there is no more for now, or no room to
        hold it (`QueueState`). Raises the errors of the reads."""
        try:
            return await self._learn_more(is_listing=is_listing)
        except CorruptBatchError:
            await self.check(self.state.learned)
            raise

    async def check(self, offset: int) -> None:
        """Checks this disk after a read found a damaged batch at or after this offset. This ends
        the replica if others have better bytes."""
        self._reads.drop_all()
        try:
            await self._replica_log.verify(offset)
        except RayqError as error:
            logger.warning("%s: %s", self._replica_log.where, error)

    async def _learn_more(self, *, is_listing: bool) -> bool:
        state, log = self.state, self._replica_log.log
        if log.start_offset > state.start_offset:
            state.advance_start(log.start_offset)
        room, offset = state.room(is_listing=is_listing), state.learned
        if room <= 0 or offset >= self._replica_log.last_stable_offset:
            return False
        piece = await self._reads.piece(offset)
        if state.learned != offset:
            return True  # Somebody purged the queue meanwhile.
        limit = min(offset + room, piece.next_offset)
        with_keys = state.config.ordered_by_key
        while state.learned < limit:
            stop = min(limit, self.learn_epoch() or limit)
            for found in piece.found(state.learned, with_keys=with_keys):
                if found.first >= stop:
                    break
                self._learn(found, stop, with_keys=with_keys)
        self._hold_large(piece, offset, limit)
        return True

    def _hold_large(self, piece: Piece, first: int, end: int) -> None:
        """Makes retention wait for the large values in the offsets [first, end), just learned."""
        holds = self.state.holds
        if holds is None:
            return
        for offset, append_time_ms, manifest in piece.large(first, end):
            if manifest is None:
                holds.chunk(offset, append_time_ms)
            elif (first_chunk := first_chunk_in(manifest, *self._place)) is not None:
                holds.large(offset, first_chunk)

    def hold_moved(self, value: bytes | None) -> None:
        """Makes retention wait for the chunks of this manifest: a copy of its record refers to
        them."""
        first_chunk = first_chunk_in(value, *self._place)
        if self.state.holds is not None and first_chunk is not None:
            self.state.holds.moved(first_chunk, self._clock_watch.now_ms())

    def purge(self, end: int) -> int:
        """See `QueueState.purge`. It skips records that were not read: there may be chunks among
        them."""
        if self.state.holds is not None and end > self.state.learned:
            self.state.holds.chunk(self.state.learned, self._clock_watch.now_ms())
        return self.state.purge(end)

    def learn_epoch(self) -> int | None:
        """Tells the state the leader epoch under which the next record was appended. Returns the
        start offset of the following epoch; None: there is none."""
        epochs, learned = self._replica_log.log.epochs.entries(), self.state.learned
        behind = None
        for epoch, first in reversed(epochs):
            if first <= learned:
                self.state.learn_epoch(epoch, first)
                return behind
            behind = first
        return behind

    def _learn(self, found: Found, stop: int, *, with_keys: bool) -> None:
        state = self.state
        last = min(found.next_offset, stop) - 1
        if found.is_gap:
            state.learn_gap(last)
            return
        count = last - found.first + 1
        state.learn(last, _keys(found, count) if with_keys else None)
        if found.due_ms is not None:
            now_ms = self._clock_watch.now_ms()
            for offset, due_ms in enumerate(found.due_ms[:count], found.first):
                if due_ms is not None and due_ms > now_ms:
                    state.learn_due(offset, due_ms)

    # --- taking ---------------------------------------------------------------------------------

    async def take(
        self,
        holder: str,
        count_max: int,
        bytes_max: int,
        *,
        is_gone: Callable[[], bool],
        tells_begins: bool = False,
    ) -> Given:
        """Locks up to `count_max` records, and returns them; more than `bytes_max` bytes only if
        the first batch has more. Gives nothing to a holder that `is_gone`. Raises the errors of the
        reads before anything is locked."""
        given = Given([], [])
        from_offset = 0
        while count_max > 0:
            try:
                first = self.state.first_ready(from_offset)
                if first is None:
                    if await self.learn():
                        continue
                    break
                piece = await self._reads.piece(first)
                end = piece.end_of(first, bytes_max, at_least_one=not given.locks)
                if end <= first:
                    break
                pieces = [piece]
                if self.state.config.ordered_by_key:
                    end = await self._look_ahead(pieces, first, end, count_max, bytes_max)
            except RayqError as error:
                log_start = self._replica_log.log.start_offset
                is_gone_by_now = log_start > self.state.start_offset
                if isinstance(error, OffsetOutOfRangeError) and is_gone_by_now:
                    self.state.advance_start(log_start)  # Retention was faster.
                    continue
                if given.locks:
                    break
                raise
            if is_gone():
                break
            locks = self.state.take(
                holder,
                count_max,
                now_s=self._clock.monotonic(),
                from_offset=first,
                below_offset=end,
                tells_begins=tells_begins,
            )
            for piece in pieces:
                runs = [run for run in locks if piece.has_some(*run[:2])]
                if runs:
                    parts = piece.cut(runs)
                    given.parts.extend(parts)
                    bytes_max -= sum(len(part) for part in parts)
            given.locks.extend(locks)
            count_max -= sum(last - first + 1 for first, last, _ in locks)
            from_offset = end
        return given

    async def _look_ahead(
        self, pieces: list[Piece], first: int, end: int, count_max: int, bytes_max: int
    ) -> int:
        """Reads on from `end`, and returns the offset that it reached: the later records of a key
        go to a consumer only in the same take as its first."""
        bytes_max -= pieces[0].bytes_between(first, end)
        while bytes_max > 0 and len(pieces) < PIECES_AHEAD_MAX:
            if self.state.learned <= end and (
                end - first >= count_max or not await self.learn()
            ):
                break
            if end < pieces[-1].next_offset:
                break  # The byte limit is used up.
            piece = await self._reads.piece(end)
            stop = piece.end_of(end, bytes_max, at_least_one=False)
            if stop <= end:
                break
            bytes_max -= piece.bytes_between(end, stop)
            pieces.append(piece)
            end = stop
        return end


def _compare(
    state: QueueState, queue: messages.QueueMetadata, replica_log: ReplicaLog, fence: int
) -> None:
    """Checks whether an unclean election truncated records that the queue knows, and forgets
    those."""
    log = replica_log.log
    end = common_end(
        state.epochs,
        state.learned,
        log.epochs.entries(),
        log.end_offset,
        log_start=log.start_offset,
    )
    if end < state.learned:
        log_event(
            logger,
            logging.ERROR,
            "queue_cut",
            queue=queue.name,
            where=replica_log.where,
            offset=end,
            learned=state.learned,
        )
        state.cut(end, fence)


def _keys(found: Found, count: int) -> list[bytes | None]:
    return [None] * count if found.keys is None else [*found.keys[:count]]

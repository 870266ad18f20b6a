"""Acknowledger of one partition: holds the locks of what a consumer has acquired, and tells the
leader what becomes of it, in requests one after another. What is acknowledged while a request is in
flight goes together in the next one. Belongs to the loop."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging

from rayq.client.leader_requests import may_retry
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.queues.ack_batch import AckBatch
from rayq.client.queues.acquired import AcquiredBatch
from rayq.client.queues.partition_client import BACKOFF_FIRST_S, BACKOFF_MAX_S, QueuePartitionClient
from rayq.core.queues.lock_times import LONG_TIMEOUTS
from rayq.errors import (
    AuthorizationError,
    LockLostError,
    RayqError,
    UnknownQueueError,
    UnknownServerError,
)
from rayq.messages import Settle, SettleResponse

logger = logging.getLogger(__name__)

LINGER_S = 0.005
"""Time that acknowledgements wait to be batched with others."""
PATIENCE_S = 60.0
"""Maximum time for which telling the leader is retried."""
REASON_CHARACTERS_MAX = 1_000
"""Maximum length of a reason that is kept with a dead letter."""


class Acknowledger:
    """See the module. What settles a record returns the number of records that it settled."""

    def __init__(self, partition: QueuePartitionClient) -> None:
        self.partition = partition
        self.batches: list[AcquiredBatch] = []
        """The batches with open records, the oldest first."""
        self._client = partition.client
        self._queue = partition.queue
        self._next: dict[tuple[str, int], AckBatch] = {}
        """The next round of requests, by holder and state epoch."""
        self._current: dict[tuple[str, int], AckBatch] = {}
        """The round in flight."""
        self._rounds_begun = self._rounds_done = 0
        self._round_done = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._is_waited_for = asyncio.Event()
        self._flushing = 0
        """The number of callers that wait until acknowledgements are durable."""

    # --- what becomes of records ----------------------------------------------------------------

    def ack(self, batch: AcquiredBatch, offset: int) -> int:
        count = batch.open.pop(offset, None)
        if count is not None:
            outgoing = self._outgoing(batch)
            outgoing.acks[offset] = count, batch
            outgoing.extends.pop(offset, None)
        return 1

    def nack(self, batch: AcquiredBatch, offset: int, delay_ms: int | None) -> int:
        count = batch.open.pop(offset, None)
        if count is not None:
            outgoing = self._outgoing(batch)
            outgoing.nacks[offset] = count, delay_ms, batch
            outgoing.extends.pop(offset, None)
            self._lose_later(batch, offset)
        return 1

    def reject(self, batch: AcquiredBatch, offset: int, reason: str, is_failure: bool) -> int:
        """Rejects a record. `is_failure`: it failed its last delivery."""
        count = batch.open.pop(offset, None)
        if count is not None:
            outgoing = self._outgoing(batch)
            outgoing.rejects[offset] = count, reason, is_failure, batch
            outgoing.extends.pop(offset, None)
        return 1

    def dropped(self, batch: AcquiredBatch, offsets: list[int], is_seen: bool) -> int:
        """Gives back records that nobody can settle any longer."""
        left = [offset for offset in offsets if offset in batch.open]
        if not is_seen:
            self.release(batch, left)
            return 0
        if left:
            logger.warning(
                "queue %s: %d records of %s were dropped without being settled, the first at "
                "offset %d: they are given back",
                self._queue.name,
                len(left),
                self.partition.name,
                left[0],
            )
        for offset in left:
            self.nack(batch, offset, None)
        return len(left)

    def release(self, batch: AcquiredBatch, offsets: list[int]) -> None:
        """Gives back records that nobody has been given."""
        for offset in offsets:
            count = batch.open.pop(offset, None)
            if count is not None:
                self._outgoing(batch).releases[offset] = count, batch
        for offset in offsets:
            self._lose_later(batch, offset)

    def release_waiting(self) -> None:
        """Gives back all records that were not handed out."""
        for batch in self.batches:
            self.release(batch, batch.give_back_all())

    def ack_missing(self, batch: AcquiredBatch, offset: int, count: int) -> None:
        """Acknowledges a locked record that compaction has removed: nothing is to be done with
        it."""
        self._outgoing(batch).acks[offset] = count, batch

    def begin(self, batch: AcquiredBatch, offsets: list[int]) -> None:
        """Tells the leader that a user is about to get these. Once that is flushed they are no
        longer `unbegun`, or lost."""
        begins = self._outgoing(batch).begins
        for offset in offsets:
            count = batch.open.get(offset)
            if count is not None:
                begins[offset] = count, batch

    # --- locks ----------------------------------------------------------------------------------

    def extend(self, batch: AcquiredBatch, offset: int, timeout_s: float) -> int:
        """Extends a lock to at least `timeout_s` from now."""
        count = batch.open.get(offset)
        if count is not None:
            extends = self._outgoing(batch).extends
            asked_s = extends[offset][1] if offset in extends else 0.0
            extends[offset] = count, max(timeout_s, asked_s), batch
        return 0

    def _extend_out(self, batch: AcquiredBatch) -> None:
        """Extends the records that users hold of it by the queue's timeout. This includes locks
        that users extended for longer, of which a new leader knows nothing."""
        visibility_timeout_s = self._queue.config.visibility_timeout_s
        timeout_s = min(visibility_timeout_s, max(batch.handling_left_s(), 0.001))
        batch.renew_at_s = self._client.now + visibility_timeout_s / 3
        waiting = set(batch.waiting_offsets())
        for offset in batch.open:
            if offset not in waiting:
                self.extend(batch, offset, timeout_s)

    def renew(self) -> None:
        """Extends locks that are due for it, and gives back records that nobody took meanwhile. A
        record that is handled for longer than `max_handling_s` soon goes to another consumer. After
        a connection has ended, a leader frees within a second what it held, so all held records are
        named to it at once."""
        now_s = self._client.now
        if self.partition.named_over is not None and self.partition.named_over.closed:
            self.partition.named_over = None
            for batch in self.batches:
                self._extend_out(batch)
        for batch in self.batches:
            if now_s < batch.renew_at_s or not batch.open:
                continue
            self.release(batch, batch.give_back_all())
            if batch.handling_left_s() > 0:
                self._extend_out(batch)
                self._tell_long(batch)
            elif now_s >= batch.until_s:
                limit_s = self._queue.config.max_handling_s
                for offset in list(batch.open):
                    self.lose(batch, offset, f"it was handled for more than {limit_s:g} s")
        self.forget_settled()

    def forget_settled(self) -> None:
        """Forgets the batches without open records."""
        self.batches = [batch for batch in self.batches if batch.open]

    def _tell_long(self, batch: AcquiredBatch) -> None:
        """Logs a handler that seems to hang and keeps its record."""
        config = self._queue.config
        handled_s = self._client.now - batch.acquired_at_s
        if handled_s > LONG_TIMEOUTS * config.visibility_timeout_s and not batch.is_told_long:
            batch.is_told_long = True
            logger.warning(
                "queue %s: offset %d of %s has been handled for %d s; it is another consumer's "
                "after %g s (max_handling_s)",
                self._queue.name,
                next(iter(batch.open)),
                self.partition.name,
                handled_s,
                config.max_handling_s,
            )

    def lose(self, batch: AcquiredBatch, offset: int, why: str) -> None:
        """Marks a lock as lost, and with it those of later records of its key."""
        if batch.lose(offset, self._lost_error(offset, why)):
            self._lose_later(batch, offset)

    def _lose_later(self, batch: AcquiredBatch, offset: int) -> None:
        if not self._queue.config.ordered_by_key:
            return
        key = batch.keys.get(offset)
        if key is None:
            return
        why = f"offset {offset}, which has its key, is redelivered first"
        for other in self.batches:
            if other.acquired_at_s == batch.acquired_at_s:  # A take may have been divided.
                for later in [held for held in other.open if held > offset]:
                    if other.keys[later] == key:
                        other.lose(later, self._lost_error(later, why))

    def _lost_error(self, offset: int, why: str) -> LockLostError:
        return LockLostError(
            f"Offset {offset} of {self.partition.name} is not this consumer's any more in queue "
            f"{self._queue.name!r}: {why}. It may be handled a second time."
        )

    # --- telling the leader ---------------------------------------------------------------------

    def _outgoing(self, batch: AcquiredBatch) -> AckBatch:
        """The next request for the locks of a batch; everything added to it now will be sent."""
        self._start()
        lock = batch.holder, batch.state_epoch
        outgoing = self._next.get(lock)
        if outgoing is None:
            outgoing = self._next[lock] = AckBatch(*lock)
        return outgoing

    def _start(self) -> None:
        # A task that is cancelled before its first step does nothing, and reports nothing.
        if self._sending is None or self._sending.done():
            self._sending = self._client.environment.tasks.spawn(
                self._send_all(), f"settle for {self._queue.name} at {self.partition.name}"
            )

    async def flush(self) -> None:
        """Waits until all earlier acknowledgements are durable, or given up."""
        until = self._rounds_begun + bool(self._next)
        self._flushing += 1
        self._is_waited_for.set()
        if self._next:
            self._start()
        try:
            while self._rounds_done < until:
                await self._round_done.wait()
        finally:
            self._flushing -= 1

    async def _send_all(self) -> None:
        try:
            while self._next:
                await self._linger()
                self._current, self._next = self._next, {}
                self._rounds_begun += 1
                for outgoing in self._current.values():
                    for part in outgoing.parts():
                        await self._send(part)
                self._current = {}
                self._rounds_done = self._rounds_begun
                self._round_done.set()
                self._round_done = asyncio.Event()
        except asyncio.CancelledError:
            self._cancelled()
            raise
        except BaseException:
            self._sending = None
            raise
        self._sending = None

    def _cancelled(self) -> None:
        """Handles cancellation with all tasks of an event loop that ends. The caller that closes
        the queue then flushes, and what is in flight is sent again: repeating it does no harm."""
        for lock, later in self._next.items():
            self._current.setdefault(lock, AckBatch(*lock)).add(later)
        self._current, self._next, self._sending = {}, self._current, None
        if self._flushing and self._next:
            self._start()

    async def _linger(self) -> None:
        """Waits a moment for more acknowledgements, unless somebody waits for these."""
        self._is_waited_for.clear()
        if not self._flushing:
            with contextlib.suppress(builtins.TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._is_waited_for.wait()

    async def _send(self, part: AckBatch) -> None:
        began_s = self._client.now
        backoff = self._client.backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        while True:
            leader: LeaderAndEpoch | None = None
            sent_at_s = self._client.now
            try:
                leader = self.partition.leader()
                answer, _ = await self.partition.ask(leader, self._request(leader, part))
            except RayqError as error:
                self.partition.request_failed(leader, error)
                # A queue, or a topic, that is gone accepts nothing any longer. One that is denied
                # may be allowed again before the lock ends.
                patience_s = 0.0 if self.partition.is_closed else PATIENCE_S
                is_over = self._client.now - began_s > patience_s
                is_denied = isinstance(error, UnknownQueueError | AuthorizationError)
                if is_over or not (may_retry(error) or is_denied):
                    self._give_up(part, error)
                    return
                name = self.partition.name
                logger.info("queue %s: settle at %s again: %s", self._queue.name, name, error)
                await self.partition.wait_for_leader(leader, backoff.next_s())
            except Exception as error:
                logger.exception("settling at %s failed", self.partition.name)
                self._give_up(part, UnknownServerError(f"It failed: {error!r}."))
                return
            else:
                self._answered(part, sent_at_s, answer)
                return

    def _request(self, leader: LeaderAndEpoch, part: AckBatch) -> Settle:
        return Settle(
            topic_id=self._queue.topic_id,
            partition=self.partition.number,
            leader_epoch=leader.epoch,
            queue_id=self._queue.queue_id,
            may_linger=not (self._flushing or self._queue.config.ordered_by_key),
            **part.fields(),
        )

    def _answered(self, part: AckBatch, sent_at_s: float, answer: SettleResponse) -> None:
        """Notes that the leader has stored everything, except for lost locks."""
        for _, timeout_s, batch in part.extends.values():
            batch.until_s = max(batch.until_s, sent_at_s + timeout_s)
        for offset, (_, batch) in part.begins.items():
            batch.unbegun.discard(offset)
        for first, last, who in answer.lost:
            for offset, batch in part.decided_in(first, last):
                self._came_too_late(batch, offset, who)
            for offset, batch in list(part.held_in(first, last)):
                self.lose(batch, offset, who)
        if answer.wanted:
            self.partition.listener.wanted(self.partition, answer.wanted)

    def _give_up(self, part: AckBatch, error: RayqError) -> None:
        why = f"its leader could not be told: {str(error).removesuffix('.')}"
        for offset, batch in part.decided_in(0, 1 << 62):
            self._came_too_late(batch, offset, why)

    def _came_too_late(self, batch: AcquiredBatch, offset: int, why: str) -> None:
        error = batch.lost[offset] = self._lost_error(offset, why)
        self.partition.listener.was_lost(error)


def shortened(reason: str) -> str:
    """The part of a reason that is kept, as text that can be encoded."""
    return reason[:REASON_CHARACTERS_MAX].encode(errors="replace").decode()

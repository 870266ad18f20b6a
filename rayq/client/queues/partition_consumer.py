"""Consumer of one partition of a queue: its takes, at most one of them in flight. Belongs to the
loop.

A take whose answer was lost may have locked records that nobody knows of. So the consumer takes a
new holder name after each failed take. The leader frees records that only the old name holds, once
its connection or its locks have ended, and never mixes the two.
"""

from __future__ import annotations

import asyncio
import logging

from rayq.client.large.reader import LargeValues
from rayq.client.leader_requests import check_range, may_retry
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.queues.acknowledger import Acknowledger, shortened
from rayq.client.queues.acquired import (
    TAKE_RECORDS_MAX,
    AcquiredBatch,
    AcquiredRecord,
    acquired_batches,
    check_ranges,
)
from rayq.client.queues.inbox import Inbox
from rayq.client.queues.partition_client import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    REQUEST_TIMEOUT_S,
    QueuePartitionClient,
    is_gone,
)
from rayq.client.queues.task import Delivery, HandedOut
from rayq.client.record_errors import is_final
from rayq.errors import CorruptBatchError, RayqError, UnknownServerError, UnreadableRecordError
from rayq.messages import Take, TakeResponse
from rayq.records import TopicPartition

logger = logging.getLogger(__name__)

EMPTY_ANSWERS_MAX = 10
QUICK_S = 0.02
"""A leader that has nothing holds a take that waits. After more than EMPTY_ANSWERS_MAX empty
answers in a row that came within QUICK_S each, the consumer pauses between takes."""
TAKE_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of one take; at least one batch is always returned."""
HOLDER_NAME_MAX = 31
LATE_S = 0.5
"""Time after which a late answer is no longer waited for."""
LARGE_AHEAD_BYTES = 64 * 1024 * 1024
"""Maximum size of large values that wait here for users; one more value may exceed it."""
DAMAGED_TRIES_MAX = 5
"""Maximum number of times a record may arrive with a wrong CRC before its delivery has failed."""
DAMAGED_MAX = 10_000
LARGE_PAUSE_S = 0.2
"""Time for which nothing is taken once LARGE_AHEAD_BYTES is reached."""


class PartitionConsumer:
    """See the module."""

    def __init__(self, partition: QueuePartitionClient, inbox: Inbox, large: LargeValues) -> None:
        self.partition = partition
        self.acknowledger = Acknowledger(partition)
        self._client = partition.client
        self._queue = partition.queue
        self._inbox = inbox
        self._large = large
        self._holder = self._new_holder()
        self.asked = 0
        """The number of records that the take in flight asks for; 0 without one."""
        self.asked_at_s = -1.0
        self._waits_until_s = -1.0
        """The time until which the leader may hold that take, because it had nothing for it."""
        self._is_reading = False
        """True if the values of its records are being read."""
        self._unavailable = 0
        """The number of values of the last answer that were unavailable. The next take gets their
        records again first: it asks for that many more, so that it gets others too."""
        self.ready = 0
        """The number of further records ready at the leader, as of the last answer."""
        self.known_at_s = -1.0
        """The time at which the take that reported `ready` was sent."""
        self.next_sweep_s = 0.0
        self.found_at_s = -1.0
        """The time at which a take last returned records."""
        self._damaged: dict[int, int] = {}
        """The number of arrivals with a wrong CRC, by offset."""
        self._backoff = self._client.backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        self._pause_until_s = 0.0
        self._empty_answers = 0
        self._taking: asyncio.Task[None] | None = None

    def _new_holder(self) -> str:
        """A holder name with the host and the process, for operators who look for a process that
        hangs."""
        return f"{self._client.name[-HOLDER_NAME_MAX:]}/{self._client.environment.new_id()}"

    # --- what is here ---------------------------------------------------------------------------

    @property
    def batches(self) -> list[AcquiredBatch]:
        """The batches with open records, the oldest first."""
        return self.acknowledger.batches

    @property
    def waiting(self) -> int:
        """The number of records here that nobody has been given."""
        return sum(batch.waiting for batch in self.batches)

    @property
    def available(self) -> int:
        """The number of waiting records that may be handed out now. In a queue that is ordered by
        key, a record behind another one of its key may not."""
        if not self._queue.config.ordered_by_key:
            return self.waiting
        busy = self._keys_out()
        count = 0
        for batch in self.batches:
            for record in batch.records:
                if record.offset in batch.open and record.key not in busy:
                    count += 1
                    if record.key is not None:
                        busy.add(record.key)
        return count

    @property
    def out(self) -> int:
        """The approximate number of records that users hold."""
        return sum(len(batch.open) - batch.waiting for batch in self.batches)

    def hand_out(self, count: int, *, is_at_once: bool = False) -> HandedOut:
        """Hands out up to `count` waiting records, the oldest first. In a queue that is ordered by
        key, only one record of a key at a time. `is_at_once`: only records of which the leader need
        not be told first."""
        found: HandedOut = []
        busy = self._keys_out() if self._queue.config.ordered_by_key else None
        for batch in self.batches:
            if count <= 0:
                break
            if records := batch.hand_out(count, busy, is_at_once=is_at_once):
                count -= len(records)
                offsets = [record.offset for record in records]
                found.append((Delivery(batch, offsets, self.acknowledger, self._inbox), records))
        return found

    def _keys_out(self) -> set[bytes]:
        """The keys of the records that users hold."""
        return {key for batch in self.batches for key in batch.keys_out()}

    def give_back(self, count: int) -> None:
        """Gives back the last `count` of the records waiting here."""
        for batch in reversed(self.batches):
            if count <= 0:
                break
            given = batch.give_back(count)
            count -= len(given)
            self.acknowledger.release(batch, given)
            self.ready += len(given)
        self.acknowledger.forget_settled()

    # --- taking ---------------------------------------------------------------------------------

    def may_ask(self, now_s: float) -> bool:
        return not self.asked and not self.partition.is_closed and now_s >= self._pause_until_s

    def expected(self, now_s: float) -> int:
        """The number of records that will probably arrive: without those that a leader has to wait
        for, and those of a leader that does not answer."""
        is_due = self._waits_until_s <= now_s < max(self.asked_at_s, self._waits_until_s) + LATE_S
        return self.asked if is_due or self._is_reading else 0

    def take(
        self, records_max: int, wait_ms: int, *, is_ahead: bool, waits: bool = False
    ) -> None:
        """Sends a take; none is in flight. `is_ahead`: nobody waits for the records; `waits`: the
        leader has none at the moment."""
        self.asked = records_max
        self.asked_at_s = self._client.now
        self._waits_until_s = self.asked_at_s + wait_ms / 1000 if waits else -1.0
        self._taking = self._client.environment.tasks.spawn(
            self._take(records_max, wait_ms, is_ahead),
            f"take from {self._queue.name} at {self.partition.name}",
        )

    async def taken_all(self) -> None:
        """Waits for the take in flight."""
        if self._taking is not None:
            await asyncio.wait([self._taking])

    async def _take(self, records_max: int, wait_ms: int, is_ahead: bool) -> None:
        leader: LeaderAndEpoch | None = None
        try:
            leader = self.partition.leader()
            await self._ask(leader, records_max, wait_ms, is_ahead)
            if self._empty_answers > EMPTY_ANSWERS_MAX:
                self._pause_until_s = self._client.now + self._backoff.next_s()
            else:
                self._backoff.reset()
        except RayqError as error:
            self._holder = self._new_holder()
            self._pause_until_s = self._client.now + self._backoff.next_s()
            self.partition.request_failed(leader, error)
            if not may_retry(error) and not is_gone(error):
                self.partition.listener.failed(self.partition, error)
            elif not is_gone(error):
                name = self.partition.name
                logger.info("queue %s: take at %s again: %s", self._queue.name, name, error)
        except Exception as error:
            logger.exception("taking from %s failed", self.partition.name)
            self._holder = self._new_holder()
            failure = UnknownServerError(f"A take failed: {error!r}.")
            self.partition.listener.failed(self.partition, failure)
        finally:
            self.asked = 0
            self._taking = None
            self._arrived()

    async def _ask(
        self, leader: LeaderAndEpoch, records_max: int, wait_ms: int, is_ahead: bool
    ) -> None:
        sent_at_s = self._client.now
        request = Take(
            topic_id=self._queue.topic_id,
            partition=self.partition.number,
            leader_epoch=leader.epoch,
            queue_id=self._queue.queue_id,
            holder=self._holder,
            records_max=min(records_max + self._unavailable, TAKE_RECORDS_MAX),
            bytes_max=TAKE_BYTES_MAX,
            wait_ms=wait_ms,
            tells_begins=True,
            is_ahead=is_ahead,
        )
        response, payload = await self.partition.ask(leader, request, wait_s=wait_ms / 1000)
        check_ranges(response)
        # If a waiting take was given nothing, `ready` records cannot be had just by asking. A take
        # that does not wait is answered before its leader has read the ready records.
        self.ready = response.ready if response.locks or not wait_ms else 0
        self.known_at_s = sent_at_s
        self.next_sweep_s = self._client.now + response.sweep_ms / 1000
        self._unavailable = 0
        is_quick = self._client.now - sent_at_s < QUICK_S
        is_empty = is_quick and not response.locks and (wait_ms > 0 or response.ready > 0)
        self._empty_answers = self._empty_answers + 1 if is_empty else 0
        if response.locks:
            self.found_at_s = self._client.now
            await self._keep(response, payload, sent_at_s)

    async def _keep(
        self, response: TakeResponse, payload: memoryview, sent_at_s: float
    ) -> None:
        """Keeps what was acquired for users, as far as it can be read."""
        batches, unreadable = acquired_batches(
            self.partition, self._holder, sent_at_s, response, payload
        )
        self._ack_missing(batches, response)
        for batch in batches:
            for older in self.batches:
                for offset in older.open.keys() & batch.open.keys():
                    self.acknowledger.lose(older, offset, "it was given to this consumer again")
        self.batches.extend(batches)
        damaged = self._leave_unreadable(batches, unreadable) if unreadable else None
        checking: asyncio.Task[None] | None = None
        if damaged is not None:
            checking = self._client.environment.tasks.spawn(
                self._ask_to_check(damaged), f"check {self.partition.name}"
            )
        if response.wanted:
            self.partition.listener.wanted(self.partition, response.wanted)
        large = [batch for batch in batches[1:] if batch.records]
        if large:
            self._is_reading = True
            try:
                await self._read_large(large)
            finally:
                self._is_reading = False
        if checking is not None:
            await asyncio.wait([checking])

    def _leave_unreadable(
        self, batches: list[AcquiredBatch], unreadable: dict[int, UnreadableRecordError]
    ) -> int | None:
        """Withholds unreadable records, given by offset, from users. Those that arrived with a
        wrong CRC are given back, to be taken again once their leader has compared them with its
        disk; after DAMAGED_TRIES_MAX tries they count as records that nobody can read. Returns the
        offset of the first of them."""
        damaged: int | None = None
        for batch in batches:
            if not batch.records or batch.records[0].offset not in unreadable:
                continue
            (record,) = batch.withhold()
            error = unreadable[record.offset]
            tries = self._damaged.pop(record.offset, 0) + 1
            if is_final(error) or tries == DAMAGED_TRIES_MAX:
                self._put_aside(batch, record, error)
                continue
            if len(self._damaged) < DAMAGED_MAX:
                self._damaged[record.offset] = tries
            damaged = record.offset if damaged is None else damaged
            self.acknowledger.release(batch, [record.offset])
        if damaged is not None:
            name, error = self.partition.name, unreadable[damaged]
            logger.warning("queue %s at %s: %s", self._queue.name, name, error)
            self._pause_until_s = self._client.now + BACKOFF_MAX_S
        return damaged

    async def _ask_to_check(self, damaged: int) -> None:
        self._arrived()  # Other records of the answer need not wait.
        try:
            await self._client.ask_leader(
                self._queue.topic,
                self.partition.number,
                check_range(self.partition.number, damaged),
                timeout_s=REQUEST_TIMEOUT_S,
                attempt_timeout_s=REQUEST_TIMEOUT_S,
            )
        except RayqError as failure:
            logger.warning("the leader did not check offset %d: %s", damaged, failure)

    def _ack_missing(self, batches: list[AcquiredBatch], response: TakeResponse) -> None:
        """Acknowledges locked records that compaction has removed."""
        locked = sum(last - first + 1 for first, last, _ in response.locks)
        if sum(len(batch.open) for batch in batches) == locked:
            return
        known = {offset for batch in batches for offset in batch.open}
        for first, last, count in response.locks:
            for offset in range(first, last + 1):
                if offset not in known:
                    self.acknowledger.ack_missing(batches[0], offset, count)

    async def _read_large(self, batches: list[AcquiredBatch]) -> None:
        """Replaces manifests by their large values, one after the other, as far as there is room
        here; the other records are given back. Their locks are extended meanwhile, as if users held
        them. A value that is unavailable for now does not block those behind it. After two in a row
        the reason is not a single value, and it is raised."""
        failure: RayqError | None = None
        has_just_failed = False
        left = [(batch, record) for batch in batches for record in batch.withhold()]
        self._arrived()  # Other records of the answer need not wait.
        place = TopicPartition(self._queue.topic, self.partition.number)
        try:
            while left:
                if sum(batch.waiting_bytes for batch in self.batches) >= LARGE_AHEAD_BYTES:
                    self._pause_until_s = self._client.now + LARGE_PAUSE_S
                    break
                batch, record = left[0]
                try:
                    value = await self._large.value(
                        place, self._queue.topic_id, record.offset, record.value
                    )
                except UnreadableRecordError as error:
                    if not is_final(error):
                        raise
                    self._put_aside(batch, record, error)
                except RayqError as error:
                    if has_just_failed or not may_retry(error):
                        raise
                    failure, has_just_failed = error, True
                    self._unavailable += 1
                    self.acknowledger.release(batch, [record.offset])
                else:
                    has_just_failed = False
                    if value is None:
                        self.acknowledger.ack(batch, record.offset)
                    else:
                        batch.records = [record._replace(value=value, is_large=False)]
                left.pop(0)
                self._arrived()
        finally:
            for batch, record in left:
                self.acknowledger.release(batch, [record.offset])
        if failure is not None:
            raise failure

    def _put_aside(
        self, batch: AcquiredBatch, record: AcquiredRecord, error: UnreadableRecordError
    ) -> None:
        """Fails the delivery of a record that cannot be read. A record that nobody can read becomes
        a dead letter at once. A record that only this reader cannot read is first tried as often as
        any other, because others may read it; so is every record of a queue that drops its dead
        letters."""
        logger.warning("queue %s: %s", self._queue.name, error)
        config = self._queue.config
        deliveries = record.delivery_count - batch.excused.get(record.offset, 0)
        is_for_nobody = isinstance(error, CorruptBatchError)
        is_dead = is_for_nobody or deliveries >= config.max_deliveries
        if config.dead_letters == "discard" or not is_dead:
            self.acknowledger.nack(batch, record.offset, None)
            return
        reason = shortened(error.message)
        self.acknowledger.reject(batch, record.offset, reason, is_failure=not is_for_nobody)

    def _arrived(self) -> None:
        self.partition.listener.arrived(self.partition)

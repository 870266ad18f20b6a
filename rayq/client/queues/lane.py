"""A queue consumer's lane to one partition: its takes, of which at most one is in flight, and its
locks. Belongs to the loop.

A take whose answer was lost may have locked records that nobody knows of. So the lane takes a new
holder name after each failed take. The leader frees records that only the old name holds, once its
connection or its locks have ended, and never mixes the two.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from rayq.backoff import Backoff
from rayq.client.client import Client
from rayq.client.large.reader import LargeValues
from rayq.client.leader_requests import LEADER_PATIENCE_S, check_range, epoch_of, may_retry
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.queues.settler import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    REQUEST_TIMEOUT_S,
    Addressed,
    Settler,
)
from rayq.client.queues.settling import Settlement
from rayq.client.queues.taken import Origin, Row, Taken
from rayq.client.queues.task import REASON_CHARACTERS_MAX
from rayq.client.record_errors import is_final
from rayq.core.queues.lock_times import LONG_TIMEOUTS
from rayq.errors import (
    CorruptBatchError,
    LockLostError,
    ProtocolError,
    RayqError,
    UnknownQueueError,
    UnknownServerError,
    UnknownTopicError,
    UnreadableRecordError,
    UnsupportedBatchError,
    UnsupportedFormatError,
)
from rayq.messages import SettleResponse, Take, TakeResponse
from rayq.records import TopicPartition
from rayq.storage.batch import decode_columns, is_as_written, split_batches

logger = logging.getLogger(__name__)

TAKE_RECORDS_MAX = 10_000
EMPTY_ANSWERS_MAX = 10
QUICK_S = 0.02
"""A leader that has nothing holds a take that waits, and one that has something gives it. So many
answers in a row that came that soon and are otherwise are followed by pauses."""
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


class Source(Origin, Addressed, Protocol):
    """The queue of a lane."""


class Owner(Protocol):
    """Receiver of a lane's events."""

    @property
    def now_s(self) -> float: ...

    @property
    def large(self) -> LargeValues: ...

    def arrived(self, lane: Lane) -> None:
        """A take was answered, or failed."""
        ...

    def doubts(self, lane: Lane, error: RayqError) -> None:
        """The leader reports that there is no such queue, or topic."""
        ...

    def failed(self, lane: Lane, error: RayqError) -> None:
        """A take failed for a reason that no retry fixes."""
        ...

    def was_lost(self, error: LockLostError) -> None:
        """A user's decision came too late."""
        ...

    def wanted(self, lane: Lane, count: int) -> None:
        """`count` other consumers are idle, and the leader has no records for them."""
        ...


class Lane:
    """See the module."""

    def __init__(self, client: Client, owner: Owner, source: Source, partition: int) -> None:
        self.source = source
        self.partition = partition
        self._client = client
        self._owner = owner
        self._holder = self._new_holder()
        self.takens: list[Taken] = []
        """The takes with open records, the oldest first."""
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
        self.is_closed = False
        self._damaged: dict[int, int] = {}
        """The number of arrivals with a wrong CRC, by offset."""
        self._backoff = Backoff(client.environment, BACKOFF_FIRST_S, BACKOFF_MAX_S)
        self._pause_until_s = 0.0
        self._empty_answers = 0
        self._settler = Settler(client, self)
        self._taking: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"{self.source.topic}-{self.partition}"

    def _new_holder(self) -> str:
        """A holder name with the host and the process, for operators who look for a process that
        hangs."""
        return f"{self._client.name[-HOLDER_NAME_MAX:]}/{self._client.environment.new_id()}"

    @property
    def waiting(self) -> int:
        """The number of records here that nobody has been given."""
        return sum(taken.waiting for taken in self.takens)

    def available(self) -> int:
        """The number of waiting records that may be handed out now. In a queue that is ordered by
        key, a record behind another one of its key may not."""
        if not self.source.config.ordered_by_key:
            return self.waiting
        busy = self._keys_out()
        count = 0
        for taken in self.takens:
            for row in taken.rows:
                if row.offset in taken.open and row.key not in busy:
                    count += 1
                    if row.key is not None:
                        busy.add(row.key)
        return count

    @property
    def out(self) -> int:
        """The approximate number of records that users hold."""
        return sum(len(taken.open) - taken.waiting for taken in self.takens)

    def may_ask(self, now_s: float) -> bool:
        return not self.asked and not self.is_closed and now_s >= self._pause_until_s

    def expected(self, now_s: float) -> int:
        """The number of records that will probably arrive: without those that a leader has to wait
        for, and those of a leader that does not answer."""
        is_due = self._waits_until_s <= now_s < max(self.asked_at_s, self._waits_until_s) + LATE_S
        return self.asked if is_due or self._is_reading else 0

    def handling_left_s(self, taken: Taken) -> float:
        """The time for which a record of it may still be handled."""
        return taken.taken_at_s + self.source.config.max_handling_s - self._owner.now_s

    # --- taking ---------------------------------------------------------------------------------

    def take(
        self, records_max: int, wait_ms: int, *, is_ahead: bool, waits: bool = False
    ) -> None:
        """Sends a take; none is in flight. `is_ahead`: nobody waits for the records; `waits`: the
        leader has none at the moment."""
        self.asked = records_max
        self.asked_at_s = self._owner.now_s
        self._waits_until_s = self.asked_at_s + wait_ms / 1000 if waits else -1.0
        self._taking = self._client.environment.tasks.spawn(
            self._take(records_max, wait_ms, is_ahead),
            f"take from {self.source.name} at {self.name}",
        )

    async def taken_all(self) -> None:
        """Waits for the take in flight."""
        if self._taking is not None:
            await asyncio.wait([self._taking])

    async def _take(self, records_max: int, wait_ms: int, is_ahead: bool) -> None:
        leader: LeaderAndEpoch | None = None
        try:
            leader = self.leader()
            await self._ask(leader, records_max, wait_ms, is_ahead)
            if self._empty_answers > EMPTY_ANSWERS_MAX:
                self._pause_until_s = self._owner.now_s + self._backoff.next_s()
            else:
                self._backoff.reset()
        except RayqError as error:
            self._holder = self._new_holder()
            self._pause_until_s = self._owner.now_s + self._backoff.next_s()
            self.suspect(leader, error)
            if isinstance(error, UnknownQueueError | UnknownTopicError):
                self.doubts(error)
            elif not may_retry(error):
                self._owner.failed(self, error)
            else:
                logger.info("queue %s: take at %s again: %s", self.source.name, self.name, error)
        except Exception as error:
            logger.exception("taking from %s failed", self.name)
            self._holder = self._new_holder()
            self._owner.failed(self, UnknownServerError(f"A take failed: {error!r}."))
        finally:
            self.asked = 0
            self._taking = None
            self._owner.arrived(self)

    def leader(self) -> LeaderAndEpoch:
        place = self.source.topic, self.source.topic_id, self.partition
        leader = self._client.metadata.leader(*place)
        if leader is None:
            raise self._client.no_leader_error(*place)
        return leader

    def suspect(self, leader: LeaderAndEpoch | None, error: RayqError) -> None:
        if error.stale_metadata or leader is None:
            self._client.suspect(
                self.source.topic, self.source.topic_id, self.partition, epoch_of(leader)
            )

    def doubts(self, error: RayqError) -> None:
        self._owner.doubts(self, error)

    async def _ask(
        self, leader: LeaderAndEpoch, records_max: int, wait_ms: int, is_ahead: bool
    ) -> None:
        source, sent_at_s = self.source, self._owner.now_s
        response, payload = await self._client.ask_while_leader(
            source.topic,
            source.topic_id,
            self.partition,
            leader,
            Take(
                topic_id=source.topic_id,
                partition=self.partition,
                leader_epoch=leader.epoch,
                queue_id=source.queue_id,
                holder=self._holder,
                records_max=min(records_max + self._unavailable, TAKE_RECORDS_MAX),
                bytes_max=TAKE_BYTES_MAX,
                wait_ms=wait_ms,
                tells_begins=True,
                is_ahead=is_ahead,
            ),
            timeout_s=wait_ms / 1000 + REQUEST_TIMEOUT_S,
            patience_s=wait_ms / 1000 + LEADER_PATIENCE_S,
        )
        _check_ranges(response)
        self._settler.named_over = self._client.pool.current(leader.host, leader.port)
        # If a waiting take was given nothing, `ready` records cannot be had just by asking. A take
        # that does not wait is answered before its leader has read the ready records.
        self.ready = response.ready if response.locks or not wait_ms else 0
        self.known_at_s = sent_at_s
        self.next_sweep_s = self._owner.now_s + response.sweep_ms / 1000
        self._unavailable = 0
        is_quick = self._owner.now_s - sent_at_s < QUICK_S
        is_empty = is_quick and not response.locks and (wait_ms > 0 or response.ready > 0)
        self._empty_answers = self._empty_answers + 1 if is_empty else 0
        if not response.locks:
            return
        self.found_at_s = self._owner.now_s
        rows, unreadable = rows_of(response, payload)
        parts = [[row for row in rows if not row.is_large and row.offset not in unreadable]]
        parts += [[row] for row in rows if row.is_large or row.offset in unreadable]
        takens = [
            Taken(self, self._holder, response.state_epoch, sent_at_s, part) for part in parts
        ]
        if response.excused:
            excused = {
                offset: many
                for first, last, many in response.excused
                for offset in range(first, last + 1)
            }
            for taken in takens:
                taken.excused = excused
        if response.unbegun:
            unbegun = {
                offset for first, last in response.unbegun for offset in range(first, last + 1)
            }
            for taken in takens:
                taken.unbegun = unbegun & taken.open.keys()
        if len(rows) < sum(last - first + 1 for first, last, _ in response.locks):
            self._ack_missing(takens[0], {row.offset for row in rows}, response)
        for taken in takens:
            for older in self.takens:
                for offset in older.open.keys() & taken.open.keys():
                    self.lose(older, offset, "it was given to this consumer again")
        self.takens += takens
        damaged = self._leave_unreadable(takens, unreadable) if unreadable else None
        checking: asyncio.Task[None] | None = None
        if damaged is not None:
            checking = self._client.environment.tasks.spawn(
                self._ask_to_check(damaged), f"check {self.name}"
            )
        if response.wanted:
            self._owner.wanted(self, response.wanted)
        large = [taken for taken in takens[1:] if taken.rows]
        if large:
            self._is_reading = True
            try:
                await self._read_large(large)
            finally:
                self._is_reading = False
        if checking is not None:
            await asyncio.wait([checking])

    def _leave_unreadable(
        self, takens: list[Taken], unreadable: dict[int, UnreadableRecordError]
    ) -> int | None:
        """Withholds unreadable records, given by offset, from users. Those that arrived with a
        wrong CRC are given back, to be taken again once their leader has compared them with its
        disk; after DAMAGED_TRIES_MAX tries they count as records that nobody can read. Returns the
        offset of the first of them."""
        damaged: int | None = None
        for taken in takens:
            if not taken.rows or taken.rows[0].offset not in unreadable:
                continue
            (row,) = taken.withhold()
            error = unreadable[row.offset]
            tries = self._damaged.pop(row.offset, 0) + 1
            if is_final(error) or tries == DAMAGED_TRIES_MAX:
                self._put_aside(taken, row, error)
                continue
            if len(self._damaged) < DAMAGED_MAX:
                self._damaged[row.offset] = tries
            damaged = row.offset if damaged is None else damaged
            self.release(taken, [row.offset])
        if damaged is not None:
            logger.warning("queue %s at %s: %s", self.source.name, self.name, unreadable[damaged])
            self._pause_until_s = self._owner.now_s + BACKOFF_MAX_S
        return damaged

    async def _ask_to_check(self, damaged: int) -> None:
        self._owner.arrived(self)  # Other records of the answer need not wait.
        try:
            await self._client.ask_leader(
                self.source.topic,
                self.partition,
                check_range(self.partition, damaged),
                timeout_s=REQUEST_TIMEOUT_S,
                attempt_timeout_s=REQUEST_TIMEOUT_S,
            )
        except RayqError as failure:
            logger.warning("the leader did not check offset %d: %s", damaged, failure)

    def _ack_missing(self, taken: Taken, known: set[int], response: TakeResponse) -> None:
        """Acknowledges locked records that compaction has removed: nothing is to be done with
        them."""
        for first, last, count in response.locks:
            for offset in range(first, last + 1):
                if offset not in known:
                    self._outgoing(taken).acks[offset] = count, taken

    async def _read_large(self, takens: list[Taken]) -> None:
        """Replaces manifests by their large values, one after the other, as far as there is room
        here; the other records are given back. Their locks are extended meanwhile, as if users held
        them. A value that is unavailable for now does not block those behind it. After two in a row
        the reason is not a single value, and it is raised."""
        failure: RayqError | None = None
        has_just_failed = False
        left = [(taken, row) for taken in takens for row in taken.withhold()]
        self._owner.arrived(self)  # Other records of the answer need not wait.
        place = TopicPartition(self.source.topic, self.partition)
        try:
            while left:
                if sum(taken.waiting_bytes for taken in self.takens) >= LARGE_AHEAD_BYTES:
                    self._pause_until_s = self._owner.now_s + LARGE_PAUSE_S
                    break
                taken, row = left[0]
                try:
                    value = await self._owner.large.value(
                        place, self.source.topic_id, row.offset, row.value
                    )
                except UnreadableRecordError as error:
                    if not is_final(error):
                        raise
                    self._put_aside(taken, row, error)
                except RayqError as error:
                    if has_just_failed or not may_retry(error):
                        raise
                    failure, has_just_failed = error, True
                    self._unavailable += 1
                    self.release(taken, [row.offset])
                    self._lose_later(taken, row.offset)
                else:
                    has_just_failed = False
                    if value is None:
                        self.ack(taken, row.offset)
                    else:
                        taken.rows = [row._replace(value=value, is_large=False)]
                left.pop(0)
                self._owner.arrived(self)
        finally:
            for taken, row in left:
                self.release(taken, [row.offset])
        if failure is not None:
            raise failure

    def _put_aside(self, taken: Taken, row: Row, error: UnreadableRecordError) -> None:
        """Fails the delivery of a record that cannot be read. A record that nobody can read becomes
        a dead letter at once. A record that only this reader cannot read is first tried as often as
        any other, because others may read it; so is every record of a queue that drops its dead
        letters."""
        logger.warning("queue %s: %s", self.source.name, error)
        config = self.source.config
        deliveries = row.delivery_count - taken.excused.get(row.offset, 0)
        is_for_nobody = isinstance(error, CorruptBatchError)
        is_dead = is_for_nobody or deliveries >= config.max_deliveries
        if config.dead_letters == "discard" or not is_dead:
            self.nack(taken, row.offset, None)
            return
        reason = error.message[:REASON_CHARACTERS_MAX].encode(errors="replace").decode()
        self.reject(taken, row.offset, reason, is_failure=not is_for_nobody)

    def hand_out(
        self, count: int, *, is_at_once: bool = False
    ) -> list[tuple[Taken, list[Row]]]:
        """Hands out up to `count` waiting records, the oldest first. In a queue that is ordered by
        key, only one record of a key at a time. `is_at_once`: only records of which the leader need
        not be told first."""
        found: list[tuple[Taken, list[Row]]] = []
        busy = self._keys_out() if self.source.config.ordered_by_key else None
        for taken in self.takens:
            if count <= 0:
                break
            if rows := taken.hand_out(count, busy, is_at_once=is_at_once):
                count -= len(rows)
                found.append((taken, rows))
        return found

    def _keys_out(self) -> set[bytes]:
        """The keys of the records that users hold."""
        keys: set[bytes] = set()
        for taken in self.takens:
            waiting = set(taken.waiting_offsets())
            of_taken = (taken.keys[offset] for offset in taken.open if offset not in waiting)
            keys.update(key for key in of_taken if key is not None)
        return keys

    # --- settling -------------------------------------------------------------------------------

    def ack(self, taken: Taken, offset: int) -> None:
        count = taken.open.pop(offset, None)
        if count is not None:
            outgoing = self._outgoing(taken)
            outgoing.acks[offset] = count, taken
            outgoing.extends.pop(offset, None)

    def nack(self, taken: Taken, offset: int, delay_ms: int | None) -> None:
        count = taken.open.pop(offset, None)
        if count is not None:
            outgoing = self._outgoing(taken)
            outgoing.nacks[offset] = count, delay_ms, taken
            outgoing.extends.pop(offset, None)
            self._lose_later(taken, offset)

    def reject(
        self, taken: Taken, offset: int, reason: str, *, is_failure: bool = False
    ) -> None:
        """Rejects a record. `is_failure`: it failed its last delivery."""
        count = taken.open.pop(offset, None)
        if count is not None:
            outgoing = self._outgoing(taken)
            outgoing.rejects[offset] = count, reason, is_failure, taken
            outgoing.extends.pop(offset, None)

    def release(self, taken: Taken, offsets: list[int]) -> None:
        """Gives back records that nobody has been given."""
        for offset in offsets:
            count = taken.open.pop(offset, None)
            if count is not None:
                self._outgoing(taken).releases[offset] = count, taken
        for offset in offsets:
            self._lose_later(taken, offset)

    def give_back(self, count: int) -> None:
        """Gives back the last `count` of the records waiting here."""
        for taken in reversed(self.takens):
            if count <= 0:
                break
            given = taken.give_back(count)
            count -= len(given)
            self.release(taken, given)
            self.ready += len(given)
        self.takens = [taken for taken in self.takens if taken.open]

    def begin(self, taken: Taken, offsets: list[int]) -> None:
        """Tells the leader that a user is about to get these. Once that is flushed they are no
        longer `unbegun`, or lost."""
        begins = self._outgoing(taken).begins
        for offset in offsets:
            count = taken.open.get(offset)
            if count is not None:
                begins[offset] = count, taken

    def extend(self, taken: Taken, offset: int, timeout_s: float) -> None:
        """Extends a lock to at least `timeout_s` from now."""
        count = taken.open.get(offset)
        if count is not None:
            extends = self._outgoing(taken).extends
            asked_s = extends[offset][1] if offset in extends else 0.0
            extends[offset] = count, max(timeout_s, asked_s), taken

    def extend_out(self, taken: Taken) -> None:
        """Extends the records that users hold of it by the queue's timeout. This includes locks
        that users extended for longer, of which a new leader knows nothing."""
        now_s, timeout_s = self._owner.now_s, self.source.config.visibility_timeout_s
        timeout_s = min(timeout_s, max(self.handling_left_s(taken), 0.001))
        taken.renew_at_s = now_s + self.source.config.visibility_timeout_s / 3
        waiting = set(taken.waiting_offsets())
        for offset in taken.open:
            if offset not in waiting:
                self.extend(taken, offset, timeout_s)

    def renew(self) -> None:
        """Extends locks that are due for it, and gives back records that nobody took meanwhile. A
        record that is handled for longer than `max_handling_s` soon goes to another consumer. After
        a connection has ended, a leader frees within a second what it held, so all held records are
        named to it at once."""
        now_s = self._owner.now_s
        if self._settler.named_over is not None and self._settler.named_over.closed:
            self._settler.named_over = None
            for taken in self.takens:
                self.extend_out(taken)
        for taken in self.takens:
            if now_s < taken.renew_at_s or not taken.open:
                continue
            self.release(taken, taken.waiting_offsets())
            taken.rows, taken.next_row = [], 0
            if self.handling_left_s(taken) > 0:
                self.extend_out(taken)
                self._tell_long(taken)
            elif now_s >= taken.until_s:
                limit_s = self.source.config.max_handling_s
                for offset in list(taken.open):
                    self.lose(taken, offset, f"it was handled for more than {limit_s:g} s")
        self.takens = [taken for taken in self.takens if taken.open]

    def _tell_long(self, taken: Taken) -> None:
        """Logs a handler that seems to hang and keeps its record."""
        now_s, config = self._owner.now_s, self.source.config
        handled_s = now_s - taken.taken_at_s
        if handled_s > LONG_TIMEOUTS * config.visibility_timeout_s and not taken.is_told_long:
            taken.is_told_long = True
            logger.warning(
                "queue %s: offset %d of %s has been handled for %d s; it is another consumer's "
                "after %g s (max_handling_s)",
                self.source.name,
                next(iter(taken.open)),
                self.name,
                handled_s,
                config.max_handling_s,
            )

    def lose(self, taken: Taken, offset: int, why: str) -> None:
        """Marks a lock as lost, and with it those of later records of its key."""
        if taken.lose(offset, self._lost_error(offset, why)):
            self._lose_later(taken, offset)

    def _lose_later(self, taken: Taken, offset: int) -> None:
        if not self.source.config.ordered_by_key:
            return
        key = taken.keys.get(offset)
        if key is None:
            return
        why = f"offset {offset}, which has its key, comes again first"
        for other in self.takens:
            if other.taken_at_s == taken.taken_at_s:  # A take may have been divided.
                for later in [held for held in other.open if held > offset]:
                    if other.keys[later] == key:
                        other.lose(later, self._lost_error(later, why))

    def _lost_error(self, offset: int, why: str) -> LockLostError:
        return LockLostError(
            f"Offset {offset} of {self.name} is not this consumer's any more in queue "
            f"{self.source.name!r}: {why}. It may be handled a second time."
        )

    def _outgoing(self, taken: Taken) -> Settlement:
        return self._settler.outgoing(taken.holder, taken.state_epoch)

    async def flush(self) -> None:
        """Waits until everything decided before is durable, or given up."""
        await self._settler.flush()

    def settled(
        self, settlement: Settlement, sent_at_s: float, answer: SettleResponse
    ) -> None:
        """The leader has stored the settlement, except for lost locks."""
        self._extended(settlement, sent_at_s)
        for offset, (_, taken) in settlement.begins.items():
            taken.unbegun.discard(offset)
        for first, last, who in answer.lost:
            self._lost(settlement, first, last, who)
        if answer.wanted:
            self._owner.wanted(self, answer.wanted)

    def _extended(self, settlement: Settlement, sent_at_s: float) -> None:
        for _, timeout_s, taken in settlement.extends.values():
            taken.until_s = max(taken.until_s, sent_at_s + timeout_s)

    def _lost(self, settlement: Settlement, first: int, last: int, who: str) -> None:
        for offset, taken in settlement.decided_in(first, last):
            error = self._lost_error(offset, who)
            taken.lost[offset] = error
            self._owner.was_lost(error)
        held = [(offset, taken) for offset, (_, _, taken) in settlement.extends.items()]
        held += [(offset, taken) for offset, (_, taken) in settlement.begins.items()]
        for offset, taken in held:
            if first <= offset <= last:
                self.lose(taken, offset, who)

    def gave_up(self, settlement: Settlement, error: RayqError) -> None:
        for offset, taken in settlement.decided_in(0, 1 << 62):
            lost = self._lost_error(
                offset, f"its leader could not be told: {str(error).removesuffix('.')}"
            )
            taken.lost[offset] = lost
            self._owner.was_lost(lost)


def _check_ranges(response: TakeResponse) -> None:
    """Raises ProtocolError where an answer is about more records than can be asked for: each of
    them is looked at one by one."""
    for ranges in (response.locks, response.excused, response.unbegun):
        if sum(max(last - first + 1, 0) for first, last, *_ in ranges) > TAKE_RECORDS_MAX:
            raise ProtocolError(
                f"The answer to a take is about more than {TAKE_RECORDS_MAX} records, which is the "
                "most that can be asked for. It is not used."
            )


def rows_of(
    response: TakeResponse, payload: memoryview
) -> tuple[list[Row], dict[int, UnreadableRecordError]]:
    """The records of a take, out of the batches that hold them, and the errors of unreadable ones
    by offset; an unreadable row has only its offset. Raises CorruptBatchError."""
    locks = iter(response.locks)
    first, last, count = next(locks)
    rows: list[Row] = []
    unreadable: dict[int, UnreadableRecordError] = {}
    for position, header in split_batches(payload):
        if header.is_control or header.next_offset <= first:
            continue
        try:
            offsets, times, keys, values, headers = decode_columns(payload, position, header)
        except (CorruptBatchError, UnsupportedFormatError) as error:
            failure = _unreadable(error, is_as_written(payload, position, header))
            for begin, end, its_count in response.locks:
                for offset in range(
                    max(begin, header.base_offset), min(end, header.last_offset) + 1
                ):
                    rows.append(Row(offset, its_count, None, None, None, 0))
                    unreadable[offset] = failure
            continue
        for index, offset in enumerate(offsets):
            while offset > last:
                first, last, count = next(locks, (1 << 62, 1 << 62, 0))
            if offset >= first:
                rows.append(
                    Row(
                        offset,
                        count,
                        None if keys is None else keys[index],
                        values[index],
                        None if headers is None else headers[index],
                        times[index],
                        header.is_large,
                    )
                )
    return rows, unreadable


def _unreadable(error: RayqError, is_as_written: bool) -> UnreadableRecordError:
    message = f"A record cannot be read: {error.message}"
    if isinstance(error, UnsupportedFormatError):
        return UnsupportedBatchError(message)
    found = CorruptBatchError(message)
    found.crc_matches = is_as_written
    return found

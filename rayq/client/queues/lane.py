"""One consumer of a queue at one partition: its takes, of which one is under way at a time, and
the locks that it has. Belongs to the loop.

A take whose answer was lost may have locked records that nobody knows of. So the lane takes a new
holder name after each take that failed: the leader frees what the old name alone holds, once its
connection or its locks have ended, and never mixes the two.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from rayq.client.backoff import Backoff
from rayq.client.client import LEADER_PATIENCE_S, Client, epoch_of, may_retry
from rayq.client.large.reader import LargeValues
from rayq.client.leader_requests import check_range
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
from rayq.client.unreadable import is_final
from rayq.core.lock_times import LONG_TIMEOUTS
from rayq.errors import (
    CorruptBatchError,
    LockLostError,
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
TAKE_BYTES_MAX = 4 * 1024 * 1024
"""What one take asks for; at least one batch always comes."""
HOLDER_NAME_MAX = 31
LATE_S = 0.5
"""An answer that is late by so much is not waited for."""
LARGE_AHEAD_BYTES = 64 * 1024 * 1024
"""So much of large values waits here for users, and one value more."""
DAMAGED_TRIES_MAX = 5
"""How often a record may arrive with a wrong CRC before its delivery has failed."""
DAMAGED_MAX = 10_000
LARGE_PAUSE_S = 0.2
"""How long nothing is taken once that is reached."""


class Source(Origin, Addressed, Protocol):
    """The queue of a lane."""


class Owner(Protocol):
    """What a lane tells of."""

    @property
    def now_s(self) -> float: ...

    @property
    def large(self) -> LargeValues: ...

    def arrived(self, lane: Lane) -> None:
        """A take was answered, or failed."""
        ...

    def doubts(self, lane: Lane, error: RayqError) -> None:
        """The leader says that there is no such queue, or topic."""
        ...

    def failed(self, lane: Lane, error: RayqError) -> None:
        """A take failed for a reason that no retry mends."""
        ...

    def was_lost(self, error: LockLostError) -> None:
        """What a user had decided came too late."""
        ...

    def wanted(self, lane: Lane, count: int) -> None:
        """So many other consumers have nothing to do, and the leader has nothing for them."""
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
        """Those with open records, the oldest first."""
        self.asked = 0
        """For how many records the take that is under way asks; 0: there is none."""
        self.asked_at_s = -1.0
        self._waits_until_s = -1.0
        """How long the leader may hold that take. Until then there was nothing for it."""
        self._is_reading = False
        """Whether the values of what it brought are being read."""
        self._unavailable = 0
        """How many values of the last answer could not be had. Their records are the first that the
        next take gets again: it asks for as many more, so that it gets others too."""
        self.ready = 0
        """What more there was to take, as of the last answer."""
        self.known_at_s = -1.0
        """When the take was sent that has told this."""
        self.next_sweep_s = 0.0
        self.found_at_s = -1.0
        """When a take last brought something."""
        self.is_closed = False
        self._damaged: dict[int, int] = {}
        """By offset: how often a record arrived with a wrong CRC."""
        self._backoff = Backoff(client.environment, BACKOFF_FIRST_S, BACKOFF_MAX_S)
        self._pause_until_s = 0.0
        self._settler = Settler(client, self)
        self._taking: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"{self.source.topic}-{self.partition}"

    def _new_holder(self) -> str:
        """It names the host and the process, for operators who look for one that hangs."""
        return f"{self._client.name[-HOLDER_NAME_MAX:]}/{self._client.environment.new_id()}"

    @property
    def waiting(self) -> int:
        """How many records are here that nobody has been given."""
        return sum(taken.waiting for taken in self.takens)

    def available(self) -> int:
        """How many of them may be handed out now. In a queue that is ordered by key, those behind
        another record of their key may not."""
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
        """How many records users have in hand, about."""
        return sum(len(taken.open) - taken.waiting for taken in self.takens)

    def may_ask(self, now_s: float) -> bool:
        return not self.asked and not self.is_closed and now_s >= self._pause_until_s

    def expected(self, now_s: float) -> int:
        """How many records are on their way, most likely: not those that a leader has to wait for,
        nor those of a leader that does not answer."""
        is_due = self._waits_until_s <= now_s < max(self.asked_at_s, self._waits_until_s) + LATE_S
        return self.asked if is_due or self._is_reading else 0

    def handling_left_s(self, taken: Taken) -> float:
        """How much longer a record of it may be handled."""
        return taken.taken_at_s + self.source.config.max_handling_s - self._owner.now_s

    # --- taking ---------------------------------------------------------------------------------

    def take(
        self, records_max: int, wait_ms: int, *, is_ahead: bool, waits: bool = False
    ) -> None:
        """Asks for records; no take is under way. `is_ahead`: nobody waits for them; `waits`: the
        leader has none just now."""
        self.asked = records_max
        self.asked_at_s = self._owner.now_s
        self._waits_until_s = self.asked_at_s + wait_ms / 1000 if waits else -1.0
        self._taking = self._client.environment.tasks.spawn(
            self._take(records_max, wait_ms, is_ahead),
            f"take from {self.source.name} at {self.name}",
        )

    async def taken_all(self) -> None:
        """Waits for the take that is under way."""
        if self._taking is not None:
            await asyncio.wait([self._taking])

    async def _take(self, records_max: int, wait_ms: int, is_ahead: bool) -> None:
        leader: LeaderAndEpoch | None = None
        try:
            leader = self.leader()
            await self._ask(leader, records_max, wait_ms, is_ahead)
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
        self._settler.named_over = self._client.pool.current(leader.host, leader.port)
        # Where nothing was given to a take that waited, more than to ask is needed to get it. One
        # that does not wait is answered before its leader has read what is ready.
        self.ready = response.ready if response.locks or not wait_ms else 0
        self.known_at_s = sent_at_s
        self.next_sweep_s = self._owner.now_s + response.sweep_ms / 1000
        self._unavailable = 0
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
        """Nobody is handed these records, by their offsets. Those that arrived with a wrong CRC are
        given back, to be taken again once their leader has compared its disk with it; after some
        tries they count as those that nobody can read. Returns the offset of the first."""
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
        """Compaction has removed records that were locked: nothing is to be done with them."""
        for first, last, count in response.locks:
            for offset in range(first, last + 1):
                if offset not in known:
                    self._outgoing(taken).acks[offset] = count, taken

    async def _read_large(self, takens: list[Taken]) -> None:
        """Puts large values in the place of their manifests, one after the other, as far as there
        is room for them here; the other records are given back. Their locks are extended meanwhile,
        as if users had them in hand. A value that cannot be had for now keeps none behind it
        waiting; after two in a row the reason is not one value's. Raises it."""
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
        """The delivery of a record that cannot be read has failed. What nobody can read becomes a
        dead letter at once. What this reader cannot read, others may: it is tried as often as any
        other record first, and so is all in a queue that drops its dead letters."""
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
        """Up to `count` records that are here, the oldest first. Of those with one key, in a queue
        that is ordered by key, one at a time. `is_at_once`: none of which the leader has to be told
        first."""
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
        """The keys of what users have in hand."""
        keys: set[bytes] = set()
        for taken in self.takens:
            waiting = set(taken.waiting_offsets())
            of_taken = (taken.keys[one] for one in taken.open if one not in waiting)
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
        """`is_failure`: it failed its last delivery."""
        count = taken.open.pop(offset, None)
        if count is not None:
            outgoing = self._outgoing(taken)
            outgoing.rejects[offset] = count, reason, is_failure, taken
            outgoing.extends.pop(offset, None)

    def release(self, taken: Taken, offsets: list[int]) -> None:
        """Gives records back that nobody has been given."""
        for offset in offsets:
            count = taken.open.pop(offset, None)
            if count is not None:
                self._outgoing(taken).releases[offset] = count, taken
        for offset in offsets:
            self._lose_later(taken, offset)

    def give_back(self, count: int) -> None:
        """Gives so many back of those that wait here, the last ones."""
        for taken in reversed(self.takens):
            if count <= 0:
                break
            given = taken.give_back(count)
            count -= len(given)
            self.release(taken, given)
            self.ready += len(given)
        self.takens = [taken for taken in self.takens if taken.open]

    def begin(self, taken: Taken, offsets: list[int]) -> None:
        """A user is about to get these. Once that is flushed they are no more `unbegun`, or lost.
        """
        begins = self._outgoing(taken).begins
        for offset in offsets:
            count = taken.open.get(offset)
            if count is not None:
                begins[offset] = count, taken

    def extend(self, taken: Taken, offset: int, timeout_s: float) -> None:
        """By so much from now at least."""
        count = taken.open.get(offset)
        if count is not None:
            extends = self._outgoing(taken).extends
            asked_s = extends[offset][1] if offset in extends else 0.0
            extends[offset] = count, max(timeout_s, asked_s), taken

    def extend_out(self, taken: Taken) -> None:
        """Extends what users have of it, by the queue's timeout; also what they extended for
        longer, of which a leader that is new knows nothing."""
        now_s, timeout_s = self._owner.now_s, self.source.config.visibility_timeout_s
        timeout_s = min(timeout_s, max(self.handling_left_s(taken), 0.001))
        taken.renew_at_s = now_s + self.source.config.visibility_timeout_s / 3
        waiting = set(taken.waiting_offsets())
        for offset in taken.open:
            if offset not in waiting:
                self.extend(taken, offset, timeout_s)

    def renew(self) -> None:
        """Extends what is due for it, and gives back what nobody came for meanwhile. What is
        handled for longer than `max_handling_s` is another's soon. A leader frees within a second
        what a connection that has gone had held: then all that is held is named to it at once."""
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
        """A handler that hangs keeps its record: its worker says so."""
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
        """The lock has gone, and with it those of later records of its key."""
        if taken.lose(offset, self._lost_error(offset, why)):
            self._lose_later(taken, offset)

    def _lose_later(self, taken: Taken, offset: int) -> None:
        if not self.source.config.ordered_by_key:
            return
        key = taken.keys.get(offset)
        if key is None:
            return
        why = f"offset {offset}, which has its key, comes again first"
        for one in self.takens:
            if one.taken_at_s == taken.taken_at_s:  # A take may have been divided.
                for later in [place for place in one.open if place > offset]:
                    if one.keys[later] == key:
                        one.lose(later, self._lost_error(later, why))

    def _lost_error(self, offset: int, why: str) -> LockLostError:
        return LockLostError(
            f"Offset {offset} of {self.name} is not this consumer's any more in queue "
            f"{self.source.name!r}: {why}. It may be handled a second time."
        )

    def _outgoing(self, taken: Taken) -> Settlement:
        return self._settler.outgoing(taken.holder, taken.state_epoch)

    async def flush(self) -> None:
        """Waits until all that was decided before is durable, or given up."""
        await self._settler.flush()

    def settled(
        self, settlement: Settlement, sent_at_s: float, answer: SettleResponse
    ) -> None:
        """The leader has kept it, but for what was lost."""
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


def rows_of(
    response: TakeResponse, payload: memoryview
) -> tuple[list[Row], dict[int, UnreadableRecordError]]:
    """The records that a take was given, out of the batches that hold them; and by offset, why some
    of them cannot be read, which have no more than their offset. Raises CorruptBatchError."""
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
            found = _unreadable(error, is_as_written(payload, position, header))
            for begin, end, its_count in response.locks:
                for offset in range(
                    max(begin, header.base_offset), min(end, header.last_offset) + 1
                ):
                    rows.append(Row(offset, its_count, None, None, None, 0))
                    unreadable[offset] = found
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

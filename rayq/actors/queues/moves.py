"""Moves of records out of a queue: each gets into its target exactly once (docs/protocol.md).

A move is one batch under a number of its own: a producer id that this opening of the queue drew,
and a new epoch of it for each batch, whose sequence is 0. The number and what goes under it are
kept before the batch is appended. So who finds a move that was begun, perhaps a later leader,
appends it under the same number, and the target's leader recognises what it has already. Since it
may have forgotten (a producer expires), the target is read first, from where it ended when the
move began.

A number is used for nothing else: it is let go only where the batch never gets into the target.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

from rayq.actors.queues.move_targets import MoveTargets, Target
from rayq.actors.queues.moved_batches import MovedRecord, Records, batches
from rayq.actors.signal import Signal
from rayq.actors.transactions.links import Links
from rayq.config import MIB
from rayq.core.large_values import pinned
from rayq.core.moved_records import (
    dead_letter_headers,
    own_headers,
    source_of,
    target_partition,
)
from rayq.core.queue_changes import DEAD
from rayq.core.queue_moves import Dying, Move, Outcome
from rayq.core.queue_state import QueueState
from rayq.core.topic_changes import check_not_internal
from rayq.environment import Environment
from rayq.errors import (
    InvalidRequestError,
    RayqError,
    UnknownTopicError,
)
from rayq.storage.batch import BATCH_BYTES_MAX, encode_batch, read_header
from rayq.wire import messages

logger = logging.getLogger(__name__)

RECORDS_MAX = 500
"""How many records one batch moves."""
READ_BYTES = 4 * MIB
"""So much is read at once."""
RETRY_S, RETRY_MAX_S = 0.1, 2.0
HELD_S = 15.0
"""A dead letter that its target refuses is tried again after so long: somebody may have raised
`max_message_bytes`."""
ANSWER_S = 20.0
"""A request for moves is answered by then; what is still under way goes on."""
HELD_SHORT_S = 0.5
"""The same, where the leaders or brokers asked cannot answer just now."""
EPOCHS = 60_000
"""So many batches go under one producer id (an epoch has 16 bits), then under a new one."""


class MoveSource(Protocol):
    """What moves ask of the leader of the queue in one partition."""

    queue: str
    topic: str
    topic_id: str
    partition: int

    async def read_records(
        self, offsets: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, MovedRecord], int]:
        """The records of the first of these offsets, until they have `bytes_max` bytes, and how
        many offsets these were, one at least. What is gone is missing. Raises CorruptBatchError,
        StorageError, and what else a read raises."""
        ...

    def hold_moved(self, value: bytes | None) -> None:
        """The record with this manifest goes to another partition, its chunks stay for a while."""
        ...

    async def commit(self) -> None:
        """Returns once all that the state has decided so far is kept. Raises where this opening has
        ended: nothing that it decides counts from then on."""
        ...

    def wake(self) -> None:
        """Records can be given out again."""
        ...


class QueueMoves:
    """See the module. One opening of one queue in one partition; `stop` is final.

    `trouble` says what keeps records from being moved, None where all is well.
    """

    def __init__(
        self, state: QueueState, source: MoveSource, links: Links, environment: Environment
    ) -> None:
        self._state = state
        self._source = source
        self._links = links
        self._targets = MoveTargets(links)
        self._environment = environment
        self._changed = Signal()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._under_way: dict[int, asyncio.Future[str | None]] = {}
        """By offset: what becomes of a record that is being moved. None: it is in its target; else
        why it is not."""
        self._held: dict[int, float] = {}
        """Dead letters that were refused, and when each is tried again."""
        self._troubles: dict[object, str] = {}
        self._locks: dict[Target, asyncio.Lock] = {}
        """One batch of a producer id is under way per target partition."""
        self._producer_id: int | None = None
        self._epoch = 0
        self._last_move_id = max((move.move_id for move in state.moves()), default=0)
        self._where = f"queue {source.queue} in {source.topic}-{source.partition}"

    @property
    def trouble(self) -> str | None:
        return next(iter(self._troubles.values()), None)

    def start(self) -> None:
        """Goes on with what was begun, then moves each record that fails for good."""
        for move in self._state.moves():
            for record in move.records:
                self._expect(record.offset)
            self._spawn(self._resume(move), f"{self._where}: move {move.move_id} again")
        self._spawn(self._run(), f"{self._where}: dead letters")

    def wake(self) -> None:
        """Records may have failed for good."""
        self._changed.notify()

    def stop(self) -> None:
        """The leader ends; moves that are under way are left to the next one."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        for end in self._under_way.values():
            if not end.done():
                end.set_result("the partition's leader ended meanwhile: ask again")
        self._under_way.clear()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._environment.tasks.spawn(self._until_ended(work), name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_ended(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RayqError as error:  # The opening has ended: what it decides counts no more.
            logger.info("%s: %s", self._where, error)

    # --- dead letters ---------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._is_stopped:
            dying = self._dying()
            if dying:
                await self._bury(dying)
            else:
                now_s = self._environment.clock.monotonic()
                await self._changed.wait(min(self._held.values(), default=now_s + HELD_S) - now_s)

    def _dying(self) -> list[Dying]:
        """Those to move now, one batch at most."""
        now_s = self._environment.clock.monotonic()
        self._held = {offset: at_s for offset, at_s in self._held.items() if at_s > now_s}
        if not self._held:
            self._troubles.pop("dead letters", None)
        waiting = self._state.to_move(RECORDS_MAX + len(self._held))
        return [one for one in waiting if one.offset not in self._held][:RECORDS_MAX]

    def _hold(
        self, dying: Iterable[Dying], why: str, error: RayqError | None = None
    ) -> None:
        """What another attempt may mend is tried again soon: later records of their keys wait."""
        is_short = error is not None and error.retriable
        until_s = self._environment.clock.monotonic() + (HELD_SHORT_S if is_short else HELD_S)
        self._held.update((one.offset, until_s) for one in dying)
        self._troubles["dead letters"] = f"dead letters cannot be written: {why}"

    async def _bury(self, dying: list[Dying]) -> None:
        """Moves these to the dead letters, or holds them where that fails."""
        if self._state.config.dead_letters == "discard":  # It was changed meanwhile.
            self._state.discard([one.offset for one in dying])
            await self._source.commit()
            return
        try:
            topic_id, partitions = await self._links.find_topic(self._source.queue + DEAD)
        except RayqError as error:
            self._hold(dying, str(error), error)
            return
        target = Target(topic_id, target_partition(self._source.partition, partitions))
        for records in batches(await self._read(dying)):
            await self._write(target, records)

    async def _write(self, target: Target, records: Records) -> None:
        refusal = await self._move(target, "dead", records)
        if refusal is not None and len(records) == 1:
            dying = records[0][0]
            self._hold([dying], f"{self._name(dying.offset)}: {refusal}")
        elif refusal is not None:
            for one in records:  # Perhaps only one of them is refused.
                await self._write(target, [one])

    async def _read(self, dying: list[Dying]) -> Records:
        """The first of the records, as many as are read at once. What cannot be read is held."""
        try:
            found, count = await self._source.read_records(
                [one.offset for one in dying], READ_BYTES
            )
        except RayqError as error:
            if len(dying) == 1:
                why = f"{self._name(dying[0].offset)} cannot be read: {error}"
                self._hold(dying, why, error)
                return []
            return await self._read(dying[: len(dying) // 2]) or await self._read(
                dying[len(dying) // 2 :]
            )
        dying = dying[:count]
        gone = [one.offset for one in dying if one.offset not in found]
        if gone:
            logger.warning("%s: %d dying records are gone by retention", self._where, len(gone))
            self._state.discard(gone)
            await self._source.commit()
        return [(one, found[one.offset]) for one in dying if one.offset in found]

    def _name(self, offset: int) -> str:
        return f"{self._source.topic}/{self._source.partition}/{offset}"

    # --- what somebody asked for ----------------------------------------------------------------

    async def move_records(
        self, request: messages.MoveQueueRecords
    ) -> messages.MoveQueueRecordsResponse:
        """See `messages.MoveQueueRecords`. Raises InvalidTopicError, InvalidRequestError."""
        to_topic = request.to_topic
        if to_topic:
            check_not_internal(to_topic)
            if to_topic == self._source.topic:
                raise InvalidRequestError(f"The records are in topic {to_topic!r} already.")
        claimed, moved, refused = self._state.claim(request.offsets)
        ends = {
            offset: self._under_way[offset] for offset, _ in refused if offset in self._under_way
        }
        if to_topic is None:
            self._state.discard(claimed)
            moved += claimed
        elif claimed:
            ends |= {offset: self._expect(offset) for offset in claimed}
            self._spawn(self._send_back(claimed, to_topic), f"{self._where}: asked moves")
        if ends:
            await asyncio.wait(ends.values(), timeout=ANSWER_S)
        await self._source.commit()
        reasons = {offset: why for offset, why in refused if offset not in ends}
        for offset, end in ends.items():
            why = end.result() if end.done() else f"it is being moved: {self.trouble or 'wait'}"
            if why is None:
                moved.append(offset)
            else:
                reasons[offset] = why
        return messages.MoveQueueRecordsResponse(sorted(moved), sorted(reasons.items()))

    async def _send_back(self, claimed: list[int], to_topic: str) -> None:
        """Moves claimed records to a topic, or each to the one that it came from ("")."""
        ends: dict[int, str | None] = dict.fromkeys(claimed, "it could not be moved: ask again")
        unsent = set(claimed)
        try:
            while claimed:
                found, count = await self._source.read_records(claimed, READ_BYTES)
                claimed = claimed[count:]
                targets = await self._by_target(found, to_topic, ends)
                for target, records in targets.items():
                    for some in batches(records):
                        unsent.difference_update(one.offset for one, _ in some)
                        refusal = await self._move(target, "done", some)
                        if refusal is None or len(some) == 1:
                            ends |= {one.offset: refusal for one, _ in some}
                        else:
                            await self._send_singly(target, some, ends)
        except RayqError as error:
            ends |= dict.fromkeys(unsent, f"it cannot be moved now: {error}")
        finally:
            self._state.unclaim(unsent)
            self._source.wake()
            for offset, end in ends.items():
                self._end(offset, end)

    async def _send_singly(
        self, target: Target, records: Records, ends: dict[int, str | None]
    ) -> None:
        """Perhaps only one of them is refused. Between, others may take them."""
        for one, record in records:
            claimed, settled, refused = self._state.claim([one.offset])
            if claimed:
                ends[one.offset] = await self._move(target, "done", [(one, record)])
            else:
                ends[one.offset] = None if settled else refused[0][1]

    async def _by_target(
        self, found: dict[int, MovedRecord], to_topic: str, ends: dict[int, str | None]
    ) -> dict[Target, Records]:
        """Where each of these records goes. What cannot go anywhere has its reason in `ends`."""
        topics: dict[str, tuple[str, int] | str] = {}
        by_target: dict[Target, Records] = {}
        for offset, record in sorted(found.items()):
            source = source_of(record.headers)
            if not to_topic and source is None:
                ends[offset] = "it has no header rayq.source that says where it came from"
                continue
            came_from, partition = source or ("", self._source.partition)
            topic = to_topic or came_from
            if topic not in topics:
                topics[topic] = await self._find(topic)
            place = topics[topic]
            if isinstance(place, str):
                ends[offset] = place
                continue
            target = Target(place[0], target_partition(partition, place[1]))
            by_target.setdefault(target, []).append((Dying(offset, 0, "", ""), record))
        return by_target

    async def _find(self, topic: str) -> tuple[str, int] | str:
        """The id of a topic and how many partitions it has; or why records cannot go there."""
        if topic == self._source.topic:
            return f"it is in topic {topic!r} already"
        try:
            check_not_internal(topic)
            return await self._links.find_topic(topic)
        except RayqError as error:
            return str(error)

    # --- one batch ------------------------------------------------------------------------------

    async def _move(self, target: Target, outcome: Outcome, records: Records) -> str | None:
        """Moves dying or claimed records as one batch. Returns once it is in the target: None; or
        once it is certain that it never gets there: why. Then they are what they were. Raises where
        the opening ended."""
        async with self._locks.setdefault(target, asyncio.Lock()):
            number, scan_from = await self._number(target)
            if scan_from is None:
                if outcome == "done":
                    self._state.unclaim([one.offset for one, _ in records])
                return "its target was deleted"
            payload = self._encode(outcome, records, number)
            self._last_move_id += 1
            move = Move(
                move_id=self._last_move_id,
                outcome=outcome,
                topic_id=target.topic_id,
                partition=target.partition,
                producer_id=number[0],
                producer_epoch=number[1],
                scan_from=scan_from,
                time_ms=self._environment.clock.wall_ms(),
                crc=read_header(payload).body_crc,
                records=tuple(one for one, _ in records),
            )
            if records[0][1].is_large:
                self._source.hold_moved(records[0][1].value)
            self._state.begin_move(move)
            await self._source.commit()
            return await self._carry_out(move, payload, is_new=True)

    async def _number(self, target: Target) -> tuple[tuple[int, int], int | None]:
        """The number of the next batch, and where its target ends now; None: it was deleted."""
        retry_s = RETRY_S
        while True:
            try:
                if self._producer_id is None or self._epoch >= EPOCHS:
                    self._producer_id, self._epoch = await self._links.new_producer_id(), 0
                end = await self._targets.end_of(target)
                break
            except RayqError as error:
                if self._links.is_gone(target.topic_id):
                    return (0, 0), None
                self._troubles[target] = f"{self._where}: records cannot be moved: {error}"
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)
        self._troubles.pop(target, None)
        self._epoch += 1
        return (self._producer_id, self._epoch), end

    def _encode(self, outcome: Outcome, records: Records, number: tuple[int, int]) -> bytearray:
        """The batch, the same each time: its records have the time of the append."""
        source = self._source
        headers = [
            dead_letter_headers(source.topic, source.partition, one, record.headers)
            if outcome == "dead"
            else own_headers(record.headers)
            for one, record in records
        ]
        values = [
            pinned(record.value, source.topic, source.topic_id, source.partition)
            if record.is_large
            else record.value
            for _, record in records
        ]
        return encode_batch(
            values,
            [record.key for _, record in records],
            headers,
            producer_id=number[0],
            producer_epoch=number[1],
            base_sequence=0,
            append_time=True,
            is_large=records[0][1].is_large,
        )

    async def _resume(self, move: Move) -> None:
        """Ends a move that was begun by a leader before."""
        offsets = [one.offset for one in move.records]
        trouble = "move", move.move_id
        retry_s = RETRY_S
        while True:
            try:
                found, _ = await self._source.read_records(offsets, BATCH_BYTES_MAX)
                break
            except RayqError as error:
                self._troubles[trouble] = f"{self._name(offsets[0])} cannot be read: {error}"
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)
        self._troubles.pop(trouble, None)
        payload = None
        if len(found) == len(offsets):
            records = [(one, found[one.offset]) for one in move.records]
            number = move.producer_id, move.producer_epoch
            payload = self._encode(move.outcome, records, number)
        refusal = await self._carry_out(move, payload, is_new=False)
        for offset in offsets:
            self._end(offset, refusal)

    async def _carry_out(
        self, move: Move, payload: bytearray | None, *, is_new: bool
    ) -> str | None:
        """Appends the batch of a move that was begun, unless it is there, and ends the move. As
        `_move`. `payload` None: records of it are gone from the source."""
        trouble = "move", move.move_id
        may_be_there = looks = not is_new
        looked_to = move.scan_from
        refusal: str | None = None
        retry_s = RETRY_S
        while True:
            try:
                if looks:
                    is_there, looked_to = await self._targets.look(move, looked_to)
                    if is_there:
                        break
                    looks = False
                if payload is None:
                    refusal = "records of it are gone"
                else:
                    refusal = await self._targets.append(move, payload)
                break
            except RayqError as error:
                if self._links.is_gone(move.topic_id):
                    refusal = "its target was deleted"
                    break
                if error.retriable or isinstance(error, UnknownTopicError):
                    may_be_there = True
                elif not may_be_there:
                    refusal = str(error)
                    break
                self._troubles[trouble] = f"{self._where}: records cannot be moved: {error}"
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)
            # After a while the target's leader may have forgotten the number.
            looks = looks or (may_be_there and retry_s == RETRY_MAX_S)
        self._troubles.pop(trouble, None)
        if refusal is None:
            self._state.end_move(move.move_id)
        else:
            self._state.release_move(move.move_id)
        await self._source.commit()
        return refusal

    # --- who waits ------------------------------------------------------------------------------

    def _expect(self, offset: int) -> asyncio.Future[str | None]:
        end = self._under_way[offset] = asyncio.get_running_loop().create_future()
        return end

    def _end(self, offset: int, refusal: str | None) -> None:
        end = self._under_way.pop(offset, None)
        if end is not None and not end.done():
            end.set_result(refusal)

"""Moves of records out of a queue: records that failed for good go to the dead letters, others
where an operator sends them. `numbered_moves` moves one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from rayq import messages
from rayq.actors.peers import Peers
from rayq.actors.queues.numbered_moves import (
    MovedRecord,
    MoveSource,
    NumberedMoves,
    Records,
    Refusal,
    Target,
    TargetSilentError,
    batches,
)
from rayq.actors.signal import Signal
from rayq.config import MIB
from rayq.core.cluster.queue_changes import DEAD
from rayq.core.cluster.topic_changes import check_not_internal, check_topic_name
from rayq.core.queues.moved_records import SOURCE_HEADER, source_of, target_partition
from rayq.core.queues.moves import FailedRecord, Move
from rayq.core.queues.state import QueueState
from rayq.environment import Environment
from rayq.errors import InvalidRequestError, OutcomeUnknownError, RayqError

logger = logging.getLogger(__name__)

RECORDS_MAX = 500
"""Maximum number of records that one batch moves."""
READ_BYTES = 4 * MIB
"""Maximum number of bytes that are read at once."""
HELD_S = 15.0
"""Interval at which a dead letter that its target refused is retried: somebody may have raised
`max_message_bytes`."""
ANSWER_S = 20.0
"""Timeout of the answer to a request for moves; unfinished moves continue."""
HELD_SHORT_S = 0.5
"""The retry interval if the leaders or brokers that were asked cannot answer just now."""


CheckTarget = Callable[[str], None]
"""Function that raises a RayqError unless the client that asked for a move may now have records
moved to this topic."""


class _Aim(NamedTuple):
    target: Target
    topic: str
    """Name of the target's topic."""


def _refusal(check: CheckTarget, aim: _Aim) -> str | None:
    try:
        check(aim.topic)
    except RayqError as error:
        return str(error)
    return None


class QueueMoves:
    """See the module. One opening of one queue in one partition; `stop` is final.

    `trouble` says what keeps records from being moved; None: nothing does.
    """

    def __init__(
        self, state: QueueState, source: MoveSource, peers: Peers, environment: Environment
    ) -> None:
        self._state = state
        self._source = source
        self._peers = peers
        self._numbered = NumberedMoves(state, source, peers, environment)
        self._environment = environment
        self._changed = Signal()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._under_way: dict[int, asyncio.Future[str | None]] = {}
        """Outcome of each record that is being moved, by offset. None: it is in its target; else
        the reason that it is not."""
        self._held: dict[int, float] = {}
        """Refused dead letters, with the time at which each is retried."""
        self._troubles = self._numbered.troubles
        self._where = self._numbered.where

    @property
    def trouble(self) -> str | None:
        return next(iter(self._troubles.values()), None)

    def start(self) -> None:
        """Finishes the moves that were begun, then moves each record that fails for good."""
        for move in self._state.moves.all():
            for record in move.records:
                self._expect(record.offset)
            self._spawn(partial(self._resume, move), f"{self._where}: move {move.move_id} again")
        self._spawn(self._run, f"{self._where}: dead letters")

    def wake(self) -> None:
        """Wakes the mover, as records may have failed for good."""
        self._changed.notify()

    def stop(self) -> None:
        """Stops, as the leader ends; moves in progress are left to the next leader."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        for end in self._under_way.values():
            if not end.done():
                end.set_result("the partition's leader ended meanwhile: ask again")
        self._under_way.clear()

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Runs a task. It takes a function, because the coroutine of a task that is cancelled
        before it begins would never be awaited."""
        task = self._environment.tasks.spawn(self._until_ended(work), name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_ended(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except RayqError as error:  # The opening has ended: its decisions no longer count.
            logger.info("%s: %s", self._where, error)
        except Exception as error:
            self._source.failed(error)
            raise

    # --- dead letters ---------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._is_stopped:
            failed = self._next_failed()
            if failed:
                await self._move_to_dead_letters(failed)
            else:
                now_s = self._environment.clock.monotonic()
                await self._changed.wait(min(self._held.values(), default=now_s + HELD_S) - now_s)

    def _next_failed(self) -> list[FailedRecord]:
        """The records to move now, at most one batch."""
        now_s = self._environment.clock.monotonic()
        self._held = {offset: at_s for offset, at_s in self._held.items() if at_s > now_s}
        if not self._held:
            self._troubles.pop("dead letters", None)
        waiting = self._state.moves.to_move(RECORDS_MAX + len(self._held))
        return [record for record in waiting if record.offset not in self._held][:RECORDS_MAX]

    def _hold(
        self, failed: Iterable[FailedRecord], why: str, error: RayqError | None = None
    ) -> None:
        """Postpones the move of these records. A retriable failure is retried soon: later records
        of their keys wait."""
        is_short = error is not None and error.retriable
        until_s = self._environment.clock.monotonic() + (HELD_SHORT_S if is_short else HELD_S)
        self._held.update((record.offset, until_s) for record in failed)
        self._troubles["dead letters"] = f"dead letters cannot be written: {why}"

    async def _move_to_dead_letters(self, failed: list[FailedRecord]) -> None:
        """Moves these records to the dead letters, or holds them if that fails."""
        if self._state.config.dead_letters == "discard":  # It was changed meanwhile.
            self._state.moves.discard([record.offset for record in failed])
            await self._source.commit()
            return
        try:
            topic_id, partitions = await self._peers.find_topic(self._source.queue + DEAD)
        except RayqError as error:
            self._hold(failed, str(error), error)
            return
        target = Target(topic_id, target_partition(self._source.partition, partitions))
        for records in batches(await self._read(failed)):
            await self._write(target, records)

    async def _write(self, target: Target, records: Records) -> None:
        refusal = await self._numbered.move(target, "dead", records)
        if refusal is not None and len(records) == 1:
            failed = records[0][0]
            self._hold([failed], f"{self._name(failed.offset)}: {refusal}")
        elif refusal is not None:
            for record in records:  # Perhaps only one of them is refused.
                await self._write(target, [record])

    async def _read(self, failed: list[FailedRecord]) -> Records:
        """Reads the first of the records, as many as are read at once. Records that cannot be read
        are held."""
        try:
            moved, count = await self._source.read_records(
                [record.offset for record in failed], READ_BYTES
            )
        except RayqError as error:
            if len(failed) == 1:
                why = f"{self._name(failed[0].offset)} cannot be read: {error}"
                self._hold(failed, why, error)
                return []
            return await self._read(failed[: len(failed) // 2]) or await self._read(
                failed[len(failed) // 2 :]
            )
        failed = failed[:count]
        gone = [record.offset for record in failed if record.offset not in moved]
        if gone:
            logger.warning("%s: %d failed records are gone by retention", self._where, len(gone))
            self._state.moves.discard(gone)
            await self._source.commit()
        return [(record, moved[record.offset]) for record in failed if record.offset in moved]

    def _name(self, offset: int) -> str:
        return f"{self._source.topic}/{self._source.partition}/{offset}"

    # --- what somebody asked for ----------------------------------------------------------------

    async def move_records(
        self, request: messages.MoveQueueRecords, check: CheckTarget
    ) -> messages.MoveQueueRecordsResponse:
        """See `messages.MoveQueueRecords`. Raises InvalidTopicError, InvalidRequestError."""
        to_topic = request.to_topic
        if to_topic:
            check_not_internal(to_topic)
            if to_topic == self._source.topic:
                raise InvalidRequestError(f"The records are in topic {to_topic!r} already.")
        # In their order, each piece of the log is read once.
        claimed, moved, refused = self._state.moves.claim(sorted(set(request.offsets)))
        ends = {
            offset: self._under_way[offset] for offset, _ in refused if offset in self._under_way
        }
        if to_topic is None:
            self._state.moves.discard(claimed)
            moved += claimed
        elif claimed:
            ends |= {offset: self._expect(offset) for offset in claimed}
            self._spawn(
                partial(self._send_back, claimed, to_topic, check), f"{self._where}: asked moves"
            )
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

    async def _send_back(self, claimed: list[int], to_topic: str, check: CheckTarget) -> None:
        """Moves claimed records to a topic, or ("") each to the topic that it says it came from.
        Its header is data of whoever wrote the record, so each target is checked."""
        unsent = set(claimed)
        silent: dict[Target, str] = {}
        why = "it could not be moved: ask again"
        try:
            while claimed:
                moved, count = await self._source.read_records(claimed, READ_BYTES)
                tried, claimed = claimed[:count], claimed[count:]
                gone = [offset for offset in tried if offset not in moved]
                self._leave(unsent, gone, "its record is gone from the topic: it can be discarded")
                by_target = await self._by_target(moved, to_topic, unsent, check)
                # A target that does not answer does not delay the others.
                await asyncio.gather(
                    *(
                        self._send(aim, records, unsent, silent, partial(_refusal, check, aim))
                        for aim, records in by_target.items()
                    )
                )
        except RayqError as error:
            why = f"it cannot be moved now: {error}"
        finally:
            self._leave(unsent, list(unsent), why)

    def _leave(self, unsent: set[int], offsets: Iterable[int], why: str) -> None:
        """Releases claimed records that are not sent: they return to their state before."""
        offsets = [offset for offset in offsets if offset in unsent]
        unsent.difference_update(offsets)
        self._state.moves.unclaim(offsets)
        self._source.wake()
        for offset in offsets:
            self._end(offset, why)

    async def _send(
        self,
        aim: _Aim,
        records: Records,
        unsent: set[int],
        silent: dict[Target, str],
        refused: Refusal,
    ) -> None:
        """Moves claimed records to one target, unless it is known to be silent."""
        target = aim.target
        try:
            for batch in batches(records) if target not in silent else ():
                offsets = [failed.offset for failed, _ in batch]
                try:
                    refusal = await self._numbered.move(target, "done", batch, refused)
                except OutcomeUnknownError as error:
                    self._leave(unsent, offsets, str(error))
                    continue
                unsent.difference_update(offsets)
                if refusal is not None and len(batch) > 1:
                    await self._send_singly(target, batch, refused)
                    continue
                for offset in offsets:
                    self._end(offset, refusal)
        except TargetSilentError as error:
            silent[target] = str(error)
        if target in silent:
            self._leave(unsent, [failed.offset for failed, _ in records], silent[target])
        self._source.wake()

    async def _send_singly(self, target: Target, records: Records, refused: Refusal) -> None:
        """Moves the records one by one, as perhaps only one of them is refused. In between,
        consumers may take them. Raises TargetSilentError."""
        for index, (failed, record) in enumerate(records):
            claimed, settled, held = self._state.moves.claim([failed.offset])
            if not claimed:
                self._end(failed.offset, None if settled else held[0][1])
                continue
            try:
                refusal = await self._numbered.move(target, "done", [(failed, record)], refused)
            except OutcomeUnknownError as error:
                refusal = str(error)
            except TargetSilentError as error:
                self._state.moves.unclaim([failed.offset])
                for left, _ in records[index:]:
                    self._end(left.offset, str(error))
                raise
            self._end(failed.offset, refusal)

    async def _by_target(
        self,
        moved: dict[int, MovedRecord],
        to_topic: str,
        unsent: set[int],
        check: CheckTarget,
    ) -> dict[_Aim, Records]:
        """Groups these records by target. Records without a possible target are released."""
        topics: dict[str, tuple[str, int] | str] = {}
        by_target: dict[_Aim, Records] = {}
        for offset, record in sorted(moved.items()):
            source = source_of(record.headers)
            if not to_topic and source is None:
                why = f"it has no header {SOURCE_HEADER} that says where it came from"
                self._leave(unsent, [offset], why)
                continue
            came_from, partition = source or ("", self._source.partition)
            topic = to_topic or came_from
            if topic not in topics:
                topics[topic] = await self._find(topic, check)
            resolved = topics[topic]
            if isinstance(resolved, str):
                self._leave(unsent, [offset], resolved)
                continue
            target = Target(resolved[0], target_partition(partition, resolved[1]))
            by_target.setdefault(_Aim(target, topic), []).append(
                (FailedRecord(offset, 0, "", ""), record)
            )
        return by_target

    async def _find(self, topic: str, check: CheckTarget) -> tuple[str, int] | str:
        """The id and partition count of a topic, or the reason that records cannot go there. A
        refusal does not tell whether the topic exists."""
        if topic == self._source.topic:
            return f"it is in topic {topic!r} already"
        try:
            check_topic_name(topic)  # A header says it.
            check(topic)
            return await self._peers.find_topic(topic)
        except RayqError as error:
            return str(error)

    async def _resume(self, move: Move) -> None:
        """Finishes a move that an earlier leader began."""
        refusal = await self._numbered.resume(move)
        for moved in move.records:
            self._end(moved.offset, refusal)
        self.wake()
        self._source.wake()

    # --- who waits ------------------------------------------------------------------------------

    def _expect(self, offset: int) -> asyncio.Future[str | None]:
        end = self._under_way[offset] = asyncio.get_running_loop().create_future()
        return end

    def _end(self, offset: int, refusal: str | None) -> None:
        end = self._under_way.pop(offset, None)
        if end is not None and not end.done():
            end.set_result(refusal)

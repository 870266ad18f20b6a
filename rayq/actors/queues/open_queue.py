"""An open queue in one partition: it gives out records and settles them.

`QueueState` decides, and `GroupCommit` makes the decisions durable. No answer, not even a refusal,
is sent before what it depends on is kept. See the rules of queues in docs/protocol.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypedDict

from rayq import messages
from rayq.actors.handlers import answers, answers_peer
from rayq.actors.queues.moves import QueueMoves
from rayq.actors.queues.numbered_moves import MovedRecord
from rayq.actors.queues.persister import FULL_GIVEN, GroupCommit, QueueStatePersister, as_error
from rayq.actors.queues.reads import DataPartition
from rayq.actors.queues.scanner import LogScanner
from rayq.actors.queues.waiting import LockOwners, WaitingTake, WaitingTakes
from rayq.config import QueueConfig
from rayq.core.queues.moves import DELIVERIES
from rayq.core.queues.state import Lock, Lost
from rayq.environment import Buffer
from rayq.errors import AuthorizationError, CorruptBatchError, InvalidRequestError, RayqError
from rayq.messages.secret_names import shown_holder
from rayq.wire.peer import Peer

KEPT_WAIT_S = 1.0
"""Maximum time that an answer to an operator waits for the coordinator; then it reports the trouble
there."""
SWEEP_MS_MIN = 100
SWEEPS_PER_S = 20
"""Target for the number of takes per second that a partition gets from consumers that look
around."""
Settled = asyncio.Future[messages.SettleResponse]


class _Now(TypedDict):
    """The times by which `QueueState` decides about delays."""

    now_ms: int
    now_s: float


class OpenQueue:
    """See the module. Call `begin`, then `serve`, which raises the error that ends the opening;
    `end` is final. `takes` and `owners` outlive an opening."""

    def __init__(
        self,
        queue: messages.QueueMetadata,
        data: DataPartition,
        scanner: LogScanner,
        persister: QueueStatePersister,
        takes: WaitingTakes,
        owners: LockOwners,
    ) -> None:
        environment = data.replica_log.environment
        self.queue = queue.name
        self.topic = queue.topic
        self.topic_id = queue.topic_id
        self.partition = data.partition
        self.data = data
        self.state = state = scanner.state
        self.commits = GroupCommit(state, persister, on_kept=self.wake)
        if scanner.was_kept:
            self.commits.kept_start = state.start_offset
        self.persister = persister
        self.takes = takes
        self._scanner = scanner
        self._owners = owners
        self._replica_log = data.replica_log
        self._clock = environment.clock
        self._tasks = environment.tasks
        self._clock_watch = data.clock_watch
        self._loop = asyncio.get_running_loop()
        self._is_woken = False
        self._waker: asyncio.Future[None] | None = None
        self._due_timer: asyncio.TimerHandle | None = None
        self._settled: tuple[asyncio.Future[None], Settled] | None = None
        self._ended: RayqError | None = None
        self._broken: asyncio.Future[None] = self._loop.create_future()
        """Fails with the error that ended the opening."""
        self._writing: asyncio.Task[None] | None = None
        """Task that ends by itself only if it failed."""
        self.read_trouble: str | None = None
        """The reason that the last read for a take failed."""
        self.moves = QueueMoves(state, self, data.peers, environment)

    # --- life -----------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Returns when the changes of the opening are kept: the start of a queue must not move."""
        self._writing = self._spawn(self.commits.run, f"keeps {self.queue}")
        kept = self.commits.kept()
        if kept is not None:
            await asyncio.wait((kept, self._writing), return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            self._broken.result()

    async def serve(self) -> None:
        """Gives out and settles records until an error, which it raises."""
        assert self._writing is not None
        self.moves.start()
        serving = self._spawn(self._serve, f"serves {self.queue}")
        try:
            await asyncio.shield(self._broken)
        finally:
            serving.cancel()

    def _spawn(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None]:
        """Runs a task that ends only with an error, and the opening with it. A fence by another
        leader is ordinary, and is not logged as a task's failure."""

        async def run() -> None:
            try:
                with self.guard():
                    await work()
            except RayqError as error:
                if not self._broken.done():
                    self._broken.set_exception(error)

        return self._tasks.spawn(run(), name)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Ends the opening if a decision fails half-way: its state cannot be trusted, and is loaded
        again from the coordinator."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise

    def failed(self, error: Exception) -> None:
        """See `MoveSource`."""
        if not isinstance(error, RayqError) and not self._broken.done():
            self._broken.set_exception(error)

    def end(self, error: RayqError) -> None:
        """Ends the opening. Decisions that are not kept are void: all that wait for them get the
        error."""
        if self._ended is not None:
            return
        self._ended = error
        if not self._broken.cancel():
            self._broken.exception()  # The task that waited for it may be gone.
        self.moves.stop()
        if self._writing is not None:
            self._writing.cancel()
        if self._due_timer is not None:
            self._due_timer.cancel()
        self.commits.end(error)

    def reconfigure(self, queue: messages.QueueMetadata, config: QueueConfig) -> None:
        """Takes the queue's changed config."""
        self.queue = queue.name
        self._scanner.configure(config)
        self.wake()

    async def commit(self) -> None:
        """See `MoveSource`."""
        if self._ended is not None:
            raise self._ended
        await self.commits.until_kept()

    # --- giving out -----------------------------------------------------------------------------

    def wake(self) -> None:
        """Wakes the delivery: there may be records to give out, or a consumer that wants some."""
        self._is_woken = True
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def _serve(self) -> None:
        while True:
            self._is_woken = False
            await self._give_out()
            self._arm_due_timer()
            if not self._is_woken:
                self._waker = self._loop.create_future()
                await self._waker

    async def _give_out(self) -> None:
        """Gives records to the waiting takes, first come, first served, until there are none to
        give."""
        while (take := self.takes.next()) is not None:
            try:
                is_given = await self._give(take)
            except RayqError as error:
                self.read_trouble = str(error)
                take.finish(error)
                continue
            except BaseException:
                take.drop()
                raise
            self.read_trouble = None
            if not is_given and self.takes.back(take):
                return

    async def _give(self, take: WaitingTake) -> bool:
        """Gives a take its share. Returns False if there is nothing for it."""
        is_full = self.persister.is_full
        if is_full and self.state.locked:
            return False
        # A take may have blocked records, together with those that block them.
        ready = self.available() + self.state.blocked
        wanted = min(take.records_max, self.takes.share(ready))
        if is_full:
            wanted = min(wanted, FULL_GIVEN)
        given = await self._scanner.take(
            take.holder,
            wanted,
            take.bytes_max,
            is_gone=take.connection.done,
            tells_begins=take.tells_begins,
        )
        if given.locks:
            self._answer(take, given.locks, given.parts)
        return bool(given.locks)

    def _answer(self, take: WaitingTake, locks: list[Lock], parts: list[Buffer]) -> None:
        """Answers a take once its locks are kept."""
        answer = self.response(locks), parts
        kept = self.commits.kept()
        if kept is None:
            take.finish(answer)
            return

        def done(kept: asyncio.Future[None]) -> None:
            error = kept.exception()
            take.finish(answer if error is None else as_error(error))

        kept.add_done_callback(done)

    def available(self) -> int:
        """Number of records that could be taken now, as far as is known."""
        unlearned = self._replica_log.last_stable_offset - self.state.learned
        return self.state.ready + max(unlearned, 0)

    def response(self, locks: list[Lock]) -> messages.TakeResponse:
        return messages.TakeResponse(
            self.state.state_epoch,
            locks,
            self.available(),
            sweep_ms=max(SWEEP_MS_MIN, 1000 * self._owners.connections // SWEEPS_PER_S),
            excused=self.state.excused(locks),
            unbegun=self.state.unbegun(locks),
            wanted=self._wanted(),
        )

    def _wanted(self) -> int:
        """Number of consumers that are idle and for which there is nothing here."""
        return 0 if self.available() else self.takes.idle_count()

    def due_in_ms(self) -> int | None:
        return self.state.due_in_ms(
            now_ms=self._clock_watch.now_ms(), now_s=self._clock.monotonic()
        )

    # --- settling -------------------------------------------------------------------------------

    def settle(self, request: messages.Settle) -> messages.SettleResponse | Settled:
        """See `messages.Settle`. Raises InvalidRequestError."""
        _check_size(request)
        try:
            lost = self._settle(request)
        except Exception as error:
            self.failed(error)
            raise
        may_move = bool(request.rejects or request.failures)
        if request.nacks or may_move or request.releases:
            self.moves.wake()
            self.wake()
        elif len(self.takes):
            self.wake()
        is_urgent = not request.may_linger or request.nacks or may_move or request.begins
        kept = self.commits.kept(may_linger=not is_urgent)
        if kept is None:
            return messages.SettleResponse(lost, self._wanted())
        if lost:
            return _after(kept, messages.SettleResponse(lost, self._wanted()))
        # Nearly all requests settle without a loss, many at a time: they share one future.
        if self._settled is None or self._settled[0] is not kept:
            self._settled = kept, _after(kept, messages.SettleResponse([], self._wanted()))
        return self._settled[1]

    def _settle(self, request: messages.Settle) -> list[Lost]:
        state, holder, epoch = self.state, request.holder, request.state_epoch
        lost: list[Lost] = []
        if request.acks:
            lost += state.ack(holder, epoch, request.acks)
        if request.nacks:
            lost += state.nack(holder, epoch, request.nacks, **self._now())
        if request.rejects:
            lost += state.reject(holder, epoch, request.rejects, **self._now())
        if request.failures:
            failures = request.failures
            lost += state.reject(holder, epoch, failures, reason=DELIVERIES, **self._now())
        if request.releases:
            lost += state.release(holder, epoch, request.releases)
        if request.begins:
            lost += state.note_begun(holder, epoch, request.begins)
        if request.extends:
            now_s = self._clock.monotonic()
            lost += state.extend(holder, epoch, request.extends, now_s=now_s)
        return lost

    def _now(self) -> _Now:
        return {"now_ms": self._clock_watch.now_ms(), "now_s": self._clock.monotonic()}

    def free_holders(self, holders: Set[str]) -> None:
        """Frees the records of holders that were not heard for a while."""
        if self.state.free_holders(holders):
            self._decided()

    def _decided(self) -> None:
        """Handles a decision that time made: it is kept, and there may be records to give out or to
        move."""
        self.commits.kept()
        self.moves.wake()
        self.wake()

    # --- time -----------------------------------------------------------------------------------

    def tick(self, prolong_s: float, *, can_hear: bool) -> None:
        """Does the periodic work. In the last `prolong_s` nobody could be heard."""
        if self._ended is not None:
            return
        state, now_s = self.state, self._clock.monotonic()
        if prolong_s > 0:
            state.prolong(prolong_s)
        log_start = self._replica_log.log.start_offset
        if log_start > state.start_offset:
            state.advance_start(log_start)
        next_expiry_s = state.next_expiry_s
        if can_hear and next_expiry_s is not None and next_expiry_s <= now_s:
            state.expire(now_s)
        state.due(now_ms=self._clock_watch.now_ms(), now_s=now_s)
        if state.is_changed:
            self._decided()
        if self.persister.is_full:
            self.commits.ask_for_room()

    def retention_limit(self, now_ms: int) -> int | None:
        """Maximum log start that the queue allows, at `now_ms` by the clock for deletion by age.
        None: no limit."""
        holds = self.state.holds
        if holds is None:
            return None
        now_ms = min(now_ms, self._clock_watch.now_ms())
        return holds.floor(self.commits.kept_start, now_ms)

    def _arm_due_timer(self) -> None:
        if self._due_timer is not None:
            self._due_timer.cancel()
            self._due_timer = None
        due_in_ms = self.due_in_ms()
        if due_in_ms is not None:
            self._due_timer = self._loop.call_later(max(due_in_ms, 1) / 1000, self._due)

    def _due(self) -> None:
        self._due_timer = None
        if self._ended is not None:
            return
        with self.guard():
            self.state.due(now_ms=self._clock_watch.now_ms(), now_s=self._clock.monotonic())
            self._decided()

    # --- for operators --------------------------------------------------------------------------

    async def kept_start(self) -> int:
        """The start of the queue, which cannot go back. It waits for a while until that is so of
        the latest one."""
        if self._ended is not None:
            raise self._ended
        kept = self.commits.kept()
        if kept is not None:
            await asyncio.wait((kept,), timeout=KEPT_WAIT_S)
        return self.state.start_offset if self.commits.kept() is None else self.commits.kept_start

    @answers(messages.ListQueueRecords)
    async def list_records(
        self, request: messages.ListQueueRecords
    ) -> messages.ListQueueRecordsResponse:
        """See `messages.ListQueueRecords`."""
        await self.commit()
        state = self.state
        await self._learn_past(request.offset + request.records_max)
        found, next_offset = state.unsettled(
            request.offset,
            request.states,
            request.records_max,
            now_ms=self._clock_watch.now_ms(),
            now_s=self._clock.monotonic(),
        )
        is_all = state.learned >= self._replica_log.last_stable_offset
        if next_offset is None and not is_all and state.room(is_listing=True):
            next_offset = state.learned
        excused = {
            offset: many
            for first, last, many in state.excused((at.offset, at.offset, 0) for at in found)
            for offset in range(first, last + 1)
        }
        records = [
            messages.QueueRecordState(
                record.offset,
                record.state,
                record.count - excused.get(record.offset, 0),
                record.holder and shown_holder(record.holder),
                record.due_ms,
            )
            for record in found
        ]
        return messages.ListQueueRecordsResponse(records, next_offset)

    @answers_peer(messages.MoveQueueRecords)
    async def move_records(
        self, peer: Peer, request: messages.MoveQueueRecords, _: memoryview
    ) -> messages.MoveQueueRecordsResponse:
        """See `messages.MoveQueueRecords`. The records need not be known yet: perhaps nobody has
        taken from the queue. A principal's rights are looked at again for each batch."""
        access = self.data.access

        def check(topic: str) -> None:
            if peer.principal is None:
                return
            try:
                access.check(peer, request)
                access.require(peer, "write", "topic", topic)
            except AuthorizationError as error:
                peer.audit.denied(peer, type(request), error)
                raise

        await self._learn_past(max(request.offsets, default=-1))
        answer = await self.moves.move_records(request, check)
        if answer.moved:
            done = {None: "discarded", "": "moved back"}.get(request.to_topic)
            done = done or f"moved to {request.to_topic}"
            what = f"{done}, from queue {self.queue} in {self._replica_log.where}"
            peer.audit.redrive(peer, what, records=len(answer.moved))
        return answer

    async def _learn_past(self, offset: int) -> None:
        """Learns until the record at `offset` is known, if there is one and room for it."""
        while self.state.learned <= offset:
            if not await self._scanner.learn(is_listing=True):
                return
            await asyncio.sleep(0)  # The reads may have been served from memory.

    @answers(messages.PurgeQueue)
    async def purge(self, _: messages.PurgeQueue) -> messages.PurgeQueueResponse:
        """See `messages.PurgeQueue`."""
        end, purged = self._replica_log.last_stable_offset, 0
        while True:
            # Each leader epoch that is skipped is told to the state.
            epoch_end = self._scanner.learn_epoch() or end
            purged += self._scanner.purge(min(epoch_end, end))
            if epoch_end >= end:
                break
        await self.commit()
        self.wake()
        return messages.PurgeQueueResponse(purged)

    def hold_moved(self, value: bytes | None) -> None:
        """See `MoveSource`."""
        self._scanner.hold_moved(value)

    async def read_records(
        self, offsets: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, MovedRecord], int]:
        """See `MoveSource`."""
        records: dict[int, MovedRecord] = {}
        for count, offset in enumerate(offsets, start=1):
            if offset < self._replica_log.log.start_offset:
                continue
            piece = await self.data.reads.piece(offset)
            try:
                record = piece.record(offset)
            except CorruptBatchError:
                await self._scanner.check(offset)
                raise
            if record is None:
                continue
            records[offset] = MovedRecord(*record)
            bytes_max -= records[offset].size_bytes
            if bytes_max <= 0:
                return records, count
        return records, len(offsets)


def _check_size(request: messages.Settle) -> None:
    """Raises InvalidRequestError for too many ranges or offsets. Nobody has so many locks, and
    processing them would keep others waiting. An offset counts as often as it is named: few ranges
    may name many offsets repeatedly."""
    ranges, named = len(request.rejects) + len(request.failures), 0
    for kind in (
        request.acks,
        request.nacks,
        request.releases,
        request.extends,
        request.begins,
    ):
        ranges += len(kind)
        for first, last, *_ in kind:
            named += max(last - first + 1, 0)
    if ranges > messages.QUEUE_RANGES_MAX:
        raise InvalidRequestError(
            f"The request names {ranges} ranges, and {messages.QUEUE_RANGES_MAX} go into one: "
            "settle the others in further requests."
        )
    if named > messages.SETTLED_MAX:
        raise InvalidRequestError(
            f"The request names {named} offsets, and {messages.SETTLED_MAX} go into one: settle "
            "the others in further requests."
        )


def _after(kept: asyncio.Future[None], answer: messages.SettleResponse) -> Settled:
    """Returns the answer once the decisions that it depends on are kept."""
    answered: Settled = asyncio.get_running_loop().create_future()

    def done(kept: asyncio.Future[None]) -> None:
        error = kept.exception()
        if error is None:
            answered.set_result(answer)
        else:
            answered.set_exception(as_error(error))

    kept.add_done_callback(done)
    return answered

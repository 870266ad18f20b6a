"""A queue's leader in one partition: it gives records out and settles them.

It lives beside the leader of the data partition, and begins by taking over what the keeper has
kept of the queue. `QueueState` decides, `QueueCommits` makes the decisions durable, and no answer
leaves before. See the rules of queues in docs/protocol.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rayq.actors.clock_watch import ClockWatch
from rayq.actors.queues.commits import QueueCommits
from rayq.actors.queues.holders import Connection, Holders
from rayq.actors.queues.journal import Journal
from rayq.actors.queues.learning import Learner
from rayq.actors.queues.lock_clock import LockClock
from rayq.actors.queues.reads import QueueReads
from rayq.actors.queues.takes import Answer, WaitingTake, WaitingTakes
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.actors.transactions.links import Links
from rayq.config import QueueConfig, parse_stored
from rayq.core.queue_state import Lost, QueueState
from rayq.environment import Buffer
from rayq.errors import (
    NotLeaderError,
    QueueFencedError,
    QueueLoadingError,
    RayqError,
    UnknownQueueError,
)
from rayq.wire import messages
from rayq.wire.server import Peer

logger = logging.getLogger(__name__)

LOADING_WAIT_S = 0.5
"""How long a request waits for the queue to begin before it is told to try again."""
RETRY_S = 0.1
SWEEP_MS_MIN = 100
SWEEPS_PER_S = 20
"""So many takes of consumers that look around a partition sees each second."""


class QueueLeader:
    """See the module. Ends with the data leader's role, or when the queue is deleted."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        queue: messages.QueueMetadata,
        *,
        reads: QueueReads,
        links: Links,
        clock_watch: ClockWatch,
    ) -> None:
        self._replica_log = replica_log
        self._leader = leader
        self._environment = replica_log.environment
        self._clock = replica_log.environment.clock
        self._clock_watch = clock_watch
        self._links = links
        self._reads = reads
        self._partition = assignment.partition
        self.queue = queue
        self.config = parse_stored(QueueConfig, queue.config)
        self.where = f"queue {queue.name} in {replica_log.where}"
        self._loop = asyncio.get_running_loop()
        self._state: QueueState | None = None
        self._commits: QueueCommits | None = None
        self._learner: Learner | None = None
        self._ready = Signal()
        self._failure: str | None = None
        self._ended: RayqError | None = None
        self._takes = WaitingTakes(self._empty_answer)
        self._holders = Holders(on_gone=self._holder_gone, on_closed=self._takes.closed)
        self._lock_clock = LockClock(self._clock, self._can_hear)
        self._is_woken = False
        self._waker: asyncio.Future[None] | None = None
        self._due_timer: asyncio.TimerHandle | None = None
        self._settled: tuple[object, asyncio.Future[messages.SettleResponse]] | None = None
        self._tasks = [self._spawn(self._run, f"leads {self.where}")]

    def _spawn(
        self, work: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> asyncio.Task[None]:
        return self._environment.tasks.spawn(self._replica_log.guard(work), name)

    def reconfigure(self, queue: messages.QueueMetadata) -> None:
        """Takes the queue's changed config."""
        self.queue = queue
        self.config = parse_stored(QueueConfig, queue.config)
        if self._state is not None:
            self._state.config = self.config
            self.wake()

    def end(self, error: RayqError) -> None:
        """Another process leads, or the queue was deleted: the requests that wait are told."""
        self._ended = error
        for task in self._tasks:
            task.cancel()
        self._close(error)
        self._takes.fail(error)
        self._holders.end()
        self._ready.notify()

    def _close(self, error: RayqError) -> None:
        """What was decided and is not kept is void."""
        if self._due_timer is not None:
            self._due_timer.cancel()
            self._due_timer = None
        if self._commits is not None:
            self._commits.end(error)
        self._state = self._commits = self._learner = None

    # --- opening --------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._open_and_serve()
            except QueueFencedError as error:
                # Of a later leader, or of a later opening here whose answer was lost.
                logger.info("%s begins anew: %s", self.where, error)
                self._failure = str(error)
            except RayqError as error:
                logger.warning("%s begins anew: %s", self.where, error)
                self._failure = str(error)
            self._close(QueueLoadingError(f"The {self.where} begins anew: {self._failure}"))
            await asyncio.sleep(RETRY_S)

    async def _open_and_serve(self) -> None:
        journal = Journal(
            self._environment,
            self._links,
            queue_id=self.queue.queue_id,
            data_partition=self._partition,
            data_leader_epoch=self._leader.leader_epoch,
        )
        records = await journal.open()
        while not self._leader.state.may_serve:
            await self._replica_log.committed.wait(RETRY_S)
        learner = await Learner.open(
            self.config,
            self.queue,
            records,
            partition=self._partition,
            replica_log=self._replica_log,
            reads=self._reads,
        )
        state = learner.state
        commits = QueueCommits(state, journal, on_kept=self.wake)
        writing = self._environment.tasks.spawn(commits.run(), f"keeps {self.where}")
        try:
            await commits.until_kept()  # Where the queue begins must not move.
            self._state, self._commits, self._learner = state, commits, learner
            self._failure = None
            self._lock_clock.look()
            self._ready.notify()
            serving = self._environment.tasks.spawn(self._serve(), f"serves {self.where}")
            try:
                await asyncio.wait((writing, serving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                serving.cancel()
            for task in (writing, serving):
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            writing.cancel()

    async def _opened(self) -> QueueState:
        """The state, once it was taken over. Raises QueueLoadingError, NotLeaderError."""
        if self._state is None:
            await self._ready.wait_until(
                lambda: self._ended is not None or self._state is not None, LOADING_WAIT_S
            )
        self._check()
        if self._state is None:
            because = "" if self._failure is None else f" ({self._failure})"
            raise QueueLoadingError(f"The {self.where} is beginning{because}: try again.")
        return self._state

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._leader.check()

    def _can_hear(self) -> bool:
        try:
            self._leader.check()
        except NotLeaderError:
            return False
        return True

    # --- taking ---------------------------------------------------------------------------------

    def take(self, peer: Peer, request: messages.Take) -> asyncio.Future[Answer]:
        """See `messages.Take`."""
        self._check()
        self._holders.heard(request.holder, peer)
        answer = self._takes.add(request, peer.closed)
        self.wake()
        return answer

    def wake(self) -> None:
        """There may be something to give out, or somebody who wants it."""
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
        """Gives to those that wait, first come first served, until there is nothing to give."""
        state, learner = self._state, self._learner
        assert state is not None and learner is not None
        while (take := self._takes.next()) is not None:
            try:
                available = self._available(state)
                wanted = min(take.records_max, self._takes.share(available))
                given = await learner.take(
                    take.holder, wanted, take.bytes_max, is_gone=take.connection.done
                )
            except RayqError as error:
                take.finish(error)
                continue
            except BaseException:
                take.drop()
                raise
            if not given.locks:
                self._takes.back(take)
                return
            self._answer(take, given.locks, given.parts)

    def _answer(
        self, take: WaitingTake, locks: list[tuple[int, int, int]], parts: list[Buffer]
    ) -> None:
        """Answers a take once its locks are kept."""
        state, commits = self._state, self._commits
        assert state is not None and commits is not None
        answer = self._response(state, locks), parts
        kept = commits.kept()
        if kept is None:
            take.finish(answer)
            return

        def done(kept: asyncio.Future[None]) -> None:
            error = kept.exception()
            take.finish(answer if error is None else _as_error(error))

        kept.add_done_callback(done)

    def _available(self, state: QueueState) -> int:
        unlearned = self._replica_log.last_stable_offset - state.learned
        return state.counts().ready + max(unlearned, 0)

    def _response(
        self, state: QueueState, locks: list[tuple[int, int, int]]
    ) -> messages.TakeResponse:
        next_due_ms = state.next_due_ms
        if next_due_ms is not None:
            next_due_ms = max(next_due_ms - self._clock_watch.now_ms(), 0)
        return messages.TakeResponse(
            state.state_epoch,
            locks,
            self._available(state),
            next_due_ms,
            sweep_ms=max(SWEEP_MS_MIN, 1000 * len(self._holders) // SWEEPS_PER_S),
        )

    def _empty_answer(self) -> Answer | RayqError:
        if self._state is None:
            because = "" if self._failure is None else f" ({self._failure})"
            return QueueLoadingError(f"The {self.where} is beginning{because}: try again.")
        return self._response(self._state, []), []

    # --- settling -------------------------------------------------------------------------------

    def settle(
        self, peer: Peer, request: messages.Settle
    ) -> (
        messages.SettleResponse
        | asyncio.Future[messages.SettleResponse]
        | Coroutine[Any, Any, messages.SettleResponse]
    ):
        """See `messages.Settle`."""
        self._check()
        if self._state is None:
            return self._settle_later(peer, request)
        return self._settle(self._state, peer, request)

    async def _settle_later(
        self, peer: Peer, request: messages.Settle
    ) -> messages.SettleResponse:
        answer = self._settle(await self._opened(), peer, request)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def _settle(
        self, state: QueueState, peer: Peer, request: messages.Settle
    ) -> messages.SettleResponse | asyncio.Future[messages.SettleResponse]:
        self._holders.heard(request.holder, peer)
        assert self._commits is not None
        holder, epoch = request.holder, request.state_epoch
        lost: list[Lost] = []
        if request.acks:
            lost += state.ack(holder, epoch, request.acks)
        if request.nacks:
            now_ms = self._clock_watch.now_ms()
            lost += state.nack(holder, epoch, request.nacks, now_ms=now_ms)
        if request.rejects:
            lost += state.reject(holder, epoch, request.rejects)
        if request.extends:
            now_s = self._clock.monotonic()
            lost += state.extend(holder, epoch, request.extends, now_s=now_s)
        if len(self._takes):
            self.wake()
        kept = self._commits.kept()
        if kept is None:
            return messages.SettleResponse(lost)
        if lost:
            return _after(kept, messages.SettleResponse(lost))
        # Nearly all settle without a loss, many at a time: they share one future.
        if self._settled is None or self._settled[0] is not kept:
            self._settled = kept, _after(kept, messages.SettleResponse([]))
        return self._settled[1]

    def _holder_gone(self, holder: str) -> None:
        if self._state is not None and self._state.free_holder(holder):
            assert self._commits is not None
            self._commits.kept()
            self.wake()

    # --- time -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """What is due by time; to be called a few times a second."""
        prolong_s = self._lock_clock.look()
        state, commits = self._state, self._commits
        if state is None or commits is None:
            return
        if prolong_s > 0:
            state.prolong(prolong_s)
        log_start = self._replica_log.log.start_offset
        if log_start > state.start_offset:
            state.advance_start(log_start)
        next_expiry_s, now_s = state.next_expiry_s, self._clock.monotonic()
        if next_expiry_s is not None and next_expiry_s <= now_s and self._can_hear():
            state.expire(now_s)
        self._look_for_due()
        if state.is_changed:
            commits.kept()
            self.wake()

    def _arm_due_timer(self) -> None:
        if self._due_timer is not None:
            self._due_timer.cancel()
            self._due_timer = None
        state = self._state
        next_due_ms = None if state is None else state.next_due_ms
        if next_due_ms is not None:
            wait_ms = max(next_due_ms - self._clock_watch.now_ms(), 1)
            self._due_timer = self._loop.call_later(wait_ms / 1000, self._look_for_due)

    def _look_for_due(self) -> None:
        state = self._state
        if state is None or state.next_due_ms is None:
            return
        now_ms = self._clock_watch.now_ms()
        if state.next_due_ms <= now_ms and state.due(now_ms):
            assert self._commits is not None
            self._commits.kept()
        self.wake()

    # --- operators ------------------------------------------------------------------------------

    async def describe(self) -> messages.DescribeQueueResponse:
        """See `messages.DescribeQueue`."""
        state = await self._opened()
        await self._until_kept()
        counts = state.counts()
        end_offset = self._replica_log.last_stable_offset
        oldest = state.first_unsettled_ready()
        if oldest is None and state.learned < end_offset:
            oldest = state.learned
        oldest_ms = None
        if oldest is not None:
            asked = messages.DescribeOffset(
                self._replica_log_topic_id, self._partition, self._leader.leader_epoch, oldest
            )
            oldest_ms = (await self._leader.reads.describe_offset(asked)).age_ms
        next_due_ms = state.next_due_ms
        return messages.DescribeQueueResponse(
            start_offset=state.start_offset,
            end_offset=end_offset,
            ready=self._available(state) + counts.blocked,
            locked=counts.locked,
            delayed=counts.delayed,
            moving=counts.moving,
            done=counts.done,
            dead=state.dead,
            expired=state.expired,
            oldest_ready_ms=oldest_ms,
            next_due_ms=(
                None
                if next_due_ms is None
                else max(next_due_ms - self._clock_watch.now_ms(), 0)
            ),
            waiting_takes=len(self._takes),
            trouble=self.trouble,
        )

    @property
    def trouble(self) -> str | None:
        """What keeps the queue from going on. None: nothing does."""
        return None

    async def _until_kept(self) -> None:
        if self._commits is None:
            raise QueueLoadingError(f"The {self.where} begins anew: try again.")
        await self._commits.until_kept()
        self._check()


def _after(
    kept: asyncio.Future[None], answer: messages.SettleResponse
) -> asyncio.Future[messages.SettleResponse]:
    """The answer, once that is kept on which it rests."""
    answered: asyncio.Future[messages.SettleResponse]
    answered = asyncio.get_running_loop().create_future()

    def done(kept: asyncio.Future[None]) -> None:
        if answered.done():
            return
        error = kept.exception()
        if error is None:
            answered.set_result(answer)
        else:
            answered.set_exception(_as_error(error))

    kept.add_done_callback(done)
    return answered


def _as_error(error: BaseException) -> RayqError:
    assert isinstance(error, RayqError)
    return error

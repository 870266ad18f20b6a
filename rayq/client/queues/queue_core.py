"""The part that both kinds of queue share, on the client's loop. Users' threads call `decide` and
little else.

Nothing here refers to the queue that the user holds, so a queue that the user drops is
garbage-collected.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
import threading
from collections import deque
from typing import Any

from rayq.client.admin.base import Call
from rayq.client.admin.queues import find_queue
from rayq.client.client import Client
from rayq.client.large.reader import LargeValues
from rayq.client.queues.arguments import PREFETCH_MAX, whole_between
from rayq.client.queues.lane import TAKE_RECORDS_MAX, Lane
from rayq.client.queues.pace import TICK_S, Pace
from rayq.client.queues.source import (
    COMING_S,
    READY_WAIT_MS,
    TAKE_WAIT_MS,
    Source,
)
from rayq.client.queues.taken import Taken
from rayq.client.queues.task import ACK, EXTEND, NACK, Lease, QueueTask
from rayq.client.queues.weights import Rounds
from rayq.config import ConsumerConfig
from rayq.errors import ClosedError, LockLostError, RayqError, TimeoutError, UnknownQueueError

logger = logging.getLogger(__name__)

FIND_TIMEOUT_S = 10.0
DECIDED_S = 0.005
"""Minimum interval at which frequent decisions wake the loop: waking it costs more than
acknowledging a record."""
CONFIG_AGE_MAX_S = 30.0
"""Maximum time until a change of a queue's config is known here."""
ANSWER_GRACE_S = 0.25
"""Time beyond its timeout for which a take waits for an answer in flight."""
SURPLUS_S = 0.02
"""Time after which records that nobody waits for are given back: the consumer that took some may
come again at once."""
BEGIN_S_MIN = 1.0
"""Minimum time a take waits until leaders know which records begin."""
KNOWN_S = 0.5
"""Time for which a leader is believed to have nothing."""
LOOK_AGAIN_S = 60.0
"""Maximum time a take sleeps, however long it may wait."""
CLOSE_TIMEOUT_S = 5.0
"""Default timeout for telling the leaders at close."""

Handed = tuple[list[QueueTask], list[Lease]]


class QueueCore:
    """The core of a queue, made on the client's loop; methods under "any thread" may be called from
    others."""

    def __init__(
        self,
        client: Client,
        names: list[str],
        weights: list[int],
        prefetch: int,
        on_close: Any,
        large_values: str | None = None,
    ) -> None:
        """`large_values` is the URL below which large values stored as objects are read."""
        self.client = client
        self.large = LargeValues(client, ConsumerConfig(large_values=large_values))
        self.names = names
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        self.sources: list[Source] = []
        self._replaced: list[Source] = []
        """Sources whose queue was deleted and created again, until what users decide about their
        records has been reported."""
        self.prefetch = prefetch
        """The maximum number of records locked ahead."""
        self._weights = weights
        self._rounds = Rounds(weights)
        self._on_close = on_close
        self._loop_thread = threading.get_ident()
        self._decided: deque[tuple[Taken, int, str, Any]] = deque()
        self._dropped: deque[tuple[Taken, list[int], bool]] = deque()
        self._is_announced = False
        self._demand = 0
        """The number of records that the calls of `take` wait for."""
        self._demand_since_s = 0.0
        self._demand_until_s = 0.0
        self._surplus: asyncio.TimerHandle | None = None
        """Timer of the next check for surplus records."""
        self._largest = 0
        """The largest count that a call has asked for."""
        self._pace = Pace()
        self._waiters: set[asyncio.Future[None]] = set()
        self._failure: RayqError | None = None
        """The error that the next take raises."""
        self._lost: list[LockLostError] = []
        """The errors of records settled too late, since the last flush."""
        self._opening = asyncio.Lock()
        self._ticking: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._looked_at_s = self.now_s

    # --- any thread -----------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.client.now

    def describe(self) -> str:
        names = ", ".join(map(repr, self.names))
        return f"{names}, {'closed' if self.is_closed else 'open'}"

    def check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("The queue is closed: make a new one with cluster.queue().")

    def set_prefetch(self, prefetch: int | None) -> None:
        """Sets the prefetch from now on; None leaves it. Raises TypeError, InvalidRequestError."""
        if prefetch is not None:
            self.prefetch = whole_between("prefetch", prefetch, 0, PREFETCH_MAX)

    def unsent_count(self) -> int:
        return len(self._decided)

    def at_hand(self, count: int) -> list[QueueTask]:
        """Records that can be handed out without the loop; [] if there are fewer than `count`."""
        sources = self.sources
        return sources[0].shelf.take(count) if len(sources) == 1 and not self.is_closed else []

    def decide(self, taken: Taken, offset: int, what: str, argument: Any) -> None:
        """Queues a user's decision on a record. Raises ClosedError."""
        if self.is_closed:
            raise ClosedError(
                "The queue was closed before this record was settled: it was given back, and comes "
                "again."
            )
        self._decided.append((taken, offset, what, argument))
        self._announce()

    def dropped(self, taken: Taken, offsets: list[int], is_seen: bool) -> None:
        """Queues dropped records. The collector may run this at any point of any thread, so it
        takes no lock and does not wait."""
        if not self.is_closed:
            self._dropped.append((taken, offsets, is_seen))
            try:
                self._announce()
            except RuntimeError:  # The loop has ended, and with it the locks.
                pass

    def _announce(self) -> None:
        if self._is_announced:
            return
        if threading.get_ident() == self._loop_thread:
            self._is_announced = True
            self.loop.call_soon(self._announced)
        else:
            # No call may stand in between: a signal handler could run there and wait for the loop.
            self._is_announced = True
            try:
                self.loop.call_soon_threadsafe(self._announced)
            except BaseException:  # a Ctrl+C, before it began
                self._is_announced = False
                raise

    def forked(self) -> None:
        """Closes the queue in a forked child: every use raises ClosedError; the parent
        continues."""
        self.is_closed = True

    def loop_has_ended(self) -> None:
        self.is_closed = True
        self._on_close()

    # --- the loop: what was decided -------------------------------------------------------------

    def _announced(self) -> None:
        """Processes decisions, and checks for more every DECIDED_S while there are any."""
        if self._decided or self._dropped:
            self.loop.call_later(DECIDED_S, self._announced)
            self._work()
            return
        self._is_announced = False
        # decided just now, by a thread that found `_is_announced` set
        if self._decided or self._dropped:
            self._announce()

    def _work(self) -> None:
        """Processes the decisions of users."""
        count = 0
        while self._decided:
            taken, offset, what, argument = self._decided.popleft()
            lane = taken.lane
            if what == ACK:
                lane.ack(taken, offset)
            elif what == EXTEND:
                lane.extend(taken, offset, argument)
                continue
            elif what == NACK:
                lane.nack(taken, offset, argument)
            else:
                reason, is_failure = argument
                lane.reject(taken, offset, reason, is_failure=is_failure)
            count += 1
        while self._dropped:
            taken, offsets, is_seen = self._dropped.popleft()
            left = [offset for offset in offsets if offset in taken.open]
            if not is_seen:
                taken.lane.release(taken, left)
                continue
            if left:
                logger.warning(
                    "queue %s: %d records of %s were dropped without being settled, the first at "
                    "offset %d: they are given back",
                    taken.lane.source.name,
                    len(left),
                    taken.lane.name,
                    left[0],
                )
            for offset in left:
                taken.lane.nack(taken, offset, None)
            count += len(left)
        if count:
            self._pace.settled(count, self.now_s, is_idle=not self._is_busy)
            self._ask()

    @property
    def _is_busy(self) -> bool:
        """True if users hold records, or may get some at once."""
        return any(source.out or source.shelf for source in self.sources)

    def was_lost(self, error: LockLostError) -> None:
        self._lost.append(error)
        logger.warning("%s", error)

    async def flush(self, timeout_s: float | None) -> None:
        """Waits until all decisions are durable. Raises LockLostError, TimeoutError."""
        self._work()
        sources = [*self.sources, *self._replaced]
        lanes = [lane for source in sources for lane in source.lanes]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(lane.flush() for lane in lanes))
        except builtins.TimeoutError:
            raise TimeoutError(
                f"flush: the leaders have not confirmed everything within {timeout_s:g} s. The "
                "client goes on telling them: flush again to wait for it."
            ) from None
        self._replaced = [source for source in self._replaced if source.out]
        lost, self._lost = self._lost, []
        if lost:
            more = f" So it was with {len(lost)} records since the last flush." if lost[1:] else ""
            raise LockLostError(lost[0].message + more)

    # --- the loop: taking -----------------------------------------------------------------------

    async def open(self) -> None:
        """Finds the queues, before anything else is done. Raises UnknownQueueError, ClosedError."""
        self.check_open()
        if self.sources:
            return
        async with self._opening:
            if self.sources:
                return
            call = Call(self.client, FIND_TIMEOUT_S)
            found = [await find_queue(call, name) for name in self.names]
            for queue in found:
                await self.client.topic(queue.topic, timeout_s=FIND_TIMEOUT_S)
            self.check_open()
            self.sources = [Source(self.client, self, queue) for queue in found]
            self.client.metadata.add_listener(self._metadata_changed)
            self._ticking = self.client.environment.tasks.spawn(self._tick(), "watch locks")

    def _metadata_changed(self) -> None:
        for source in self.sources:
            source.look_for_partitions()

    async def take(
        self, count: int, timeout_s: float, *, is_for_threads: bool = False
    ) -> Handed:
        """Takes up to `count` records, as soon as there is one; none after `timeout_s`. With
        `is_for_threads`, more may be `at_hand` afterwards."""
        await self.open()
        now_s = self.now_s
        deadline_s = now_s + timeout_s
        if not self._demand:
            self._demand_since_s = now_s
        demand = count
        self._demand += demand
        self._demand_until_s = max(self._demand_until_s, deadline_s)
        self._largest = max(self._largest, count)
        try:
            while True:
                self.check_open()
                self._work()
                handed = self._hand_out(count)
                if handed[0]:
                    # Calls that wait come next.
                    is_alone = len(self.sources) == 1 and self._demand == count
                    self._demand -= demand
                    demand = 0
                    handed = await self._begin(handed, deadline_s)
                if handed[0]:
                    if is_for_threads and is_alone:
                        self.sources[0].fill_shelf(self, count)
                    return handed
                if not demand:  # They were another consumer's by then.
                    demand = count
                    self._demand += demand
                self._raise_failure()
                left_s = deadline_s - self.now_s
                self._ask()
                is_asking = any(source.expected(self.now_s) for source in self.sources)
                if left_s <= 0 and (not is_asking or left_s <= -ANSWER_GRACE_S):
                    return handed
                patience_s = max(left_s, ANSWER_GRACE_S + min(left_s, 0.0), 0.001)
                patience_s = min(patience_s, LOOK_AGAIN_S)
                if len(self.sources) > 1:
                    patience_s = min(patience_s, COMING_S)
                await self._news(patience_s)
        finally:
            self._demand -= demand
            self._pace.asked()
            self._ask()
            self._look_at_surplus()

    async def _begin(self, handed: Handed, deadline_s: float) -> Handed:
        """Tells the leaders that want to know it that a user is about to get these records, and
        waits until that is durable. Leaves out records that are another's by then, or whose leader
        could not be told in time."""
        tasks, leases = handed
        told = [
            (lease.taken, offsets)
            for lease in leases
            if lease.taken.unbegun
            and (offsets := [offset for offset in lease.offsets if offset in lease.taken.unbegun])
        ]
        if not told:
            return handed
        for taken, offsets in told:
            taken.lane.begin(taken, offsets)
        with contextlib.suppress(builtins.TimeoutError):
            async with asyncio.timeout(max(deadline_s - self.now_s, BEGIN_S_MIN)):
                await asyncio.gather(*(taken.lane.flush() for taken, _ in told))
        for taken, offsets in told:
            taken.lane.release(taken, [offset for offset in offsets if offset in taken.unbegun])
        return [task for task in tasks if task.is_open], leases

    def _hand_out(self, count: int) -> Handed:
        tasks: list[QueueTask] = []
        leases: list[Lease] = []
        for source in self.sources:
            source.clear_shelf()
        if len(self.sources) == 1:
            self._hand_out_of(self.sources[0], count, tasks, leases)
        else:
            waiting = [source.available for source in self.sources]
            coming = [source.is_coming(self.now_s) for source in self.sources]
            while len(tasks) < count:
                turn = self._rounds.next(waiting, coming)
                if turn is None:
                    break
                before = len(tasks)
                self._hand_out_of(self.sources[turn], 1, tasks, leases)
                # In an ordered queue all waiting records may be behind those in hand.
                waiting[turn] = waiting[turn] - 1 if len(tasks) > before else 0
        if tasks:
            self._pace.began(self.now_s)
        return tasks, leases

    def _hand_out_of(
        self, source: Source, count: int, tasks: list[QueueTask], leases: list[Lease]
    ) -> None:
        for taken, rows in source.hand_out(count):
            lease = Lease(taken, [row.offset for row in rows], self)
            tasks += [QueueTask(row, lease) for row in rows]
            leases.append(lease)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure.with_message(failure.message) from failure.__cause__
        for source in self.sources:
            if source.failure is not None:
                raise source.failure.with_message(source.failure.message)

    async def _news(self, timeout_s: float) -> None:
        """Waits until something arrived, for at most `timeout_s`."""
        waiter = self.loop.create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except builtins.TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)

    def _tell(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _ahead(self) -> int:
        """The number of records that may be here without anybody waiting for them."""
        most = max(self.prefetch, self._largest) if self.prefetch else 0
        return self._pace.ahead(most)

    def _ask(self) -> None:
        """Keeps takes in flight for the records that users wait for and will soon want. Each take
        costs its leader a write, so records taken ahead are refilled once half of them are gone."""
        if self.is_closed:
            return
        is_in_use = self._demand > 0 or self._is_busy
        if not is_in_use:
            return
        now_s, demand = self.now_s, self._demand
        wait_ms = TAKE_WAIT_MS
        if demand:
            # A call that does not wait at all asks every leader.
            known_s = self._demand_since_s
            if self._demand_until_s > known_s:
                known_s -= KNOWN_S
            left_ms = round((self._demand_until_s - now_s) * 1000)
            wait_ms = max(min(wait_ms, left_ms), 0)
        else:
            known_s = now_s - KNOWN_S
            self._demand_until_s = 0.0
        ahead = self._ahead()
        lacking = self._lacking(ahead, known_s, now_s)
        ready_wait_ms = wait_ms if ahead else min(wait_ms, READY_WAIT_MS)
        for source, count in lacking.items():
            count -= source.expected(now_s)
            source.look(count, known_s, now_s, ready_wait_ms, is_ahead=not demand)
        if not wait_ms:
            return
        idle = demand - sum(source.available for source in self.sources)
        if any(source.expected(now_s) for source in self.sources):
            idle = 0
        for source in self.sources:
            count = max(lacking.get(source, 0) - source.expected(now_s), idle)
            if count > 0 and source.failure is None:
                source.wait(count, wait_ms, now_s, is_ahead=not demand, is_idle=idle > 0)

    def _lacking(self, ahead: int, known_s: float, now_s: float) -> dict[Source, int]:
        """The number of further records each source should have here or in flight, if that is worth
        a take."""
        found: dict[Source, int] = {}
        wanted = self._wanted_of_each(ahead, known_s, now_s)
        for source, want in zip(self.sources, wanted, strict=True):
            here = source.available
            is_enough = here >= self._demand and 2 * (want - here) < want - self._demand
            if want > here and not is_enough and source.failure is None:
                found[source] = want - here
        return found

    def _wanted_of_each(self, ahead: int, known_s: float, now_s: float) -> list[int]:
        """The number of records of each queue that should be here or in flight."""
        if len(self.sources) == 1:
            return [self._demand + ahead]
        if ahead:
            return [self._demand + max(ahead, 2 * weight) for weight in self._weights]
        # Nothing is taken ahead: each queue asks for the records it is to give next.
        limits = [
            source.available
            + source.expected(now_s)
            + (TAKE_RECORDS_MAX if source.may_have(known_s, now_s) else 0)
            for source in self.sources
        ]
        return self._rounds.plan(self._demand, limits)

    def _look_at_surplus(self) -> None:
        """Schedules giving back records that nobody waits for."""
        if self._surplus is None and not self.is_closed and self._surplus_count() > 0:
            self._surplus = self.loop.call_later(SURPLUS_S, self._give_back_surplus)

    def _surplus_count(self) -> int:
        """The number of surplus records. A consumer's pace changes, so twice the number allowed
        ahead is not too much."""
        allowed = 2 * self._ahead()
        if len(self.sources) > 1 and allowed:
            allowed = sum(max(allowed, 4 * weight) for weight in self._weights)
        here = sum(lane.waiting for source in self.sources for lane in source.lanes)
        return here + sum(len(source.shelf) for source in self.sources) - self._demand - allowed

    def _give_back_surplus(self) -> None:
        self._surplus = None
        count = self._surplus_count()
        if self.is_closed or count <= 0:
            return
        for source in reversed(self.sources):
            source.clear_shelf()
            here = sum(lane.waiting for lane in source.lanes)
            source.give_back(min(count, here))
            count -= min(count, here)

    def wanted(self, lane: Lane, count: int) -> None:
        """Gives idle consumers their share of the records waiting here, except those handled within
        a moment."""
        if self.is_closed:
            return
        for source in self.sources:
            if lane.source is source:
                source.clear_shelf()
        kept = max(-(-lane.waiting // (count + 1)), self._pace.in_a_moment())
        lane.give_back(lane.waiting - max(kept, self._demand))

    # --- the loop: what lanes tell --------------------------------------------------------------

    def arrived(self, lane: Lane) -> None:
        for source in self.sources:
            if lane.source is source:
                source.arrived(lane)
        self._tell()
        self._look_at_surplus()
        if not self._demand or self.now_s < self._demand_until_s:
            # Otherwise the calls are about to return, and takes that do not wait would go back and
            # forth.
            self._ask()

    def failed(self, lane: Lane, error: RayqError) -> None:
        logger.warning("queue %s: take at %s failed: %s", lane.source.name, lane.name, error)
        self._failure = error

    def doubts(self, lane: Lane, error: RayqError) -> None:
        logger.info("queue %s at %s: %s", lane.source.name, lane.name, error)
        self._look_soon()

    def _look_soon(self) -> None:
        if self._looking is None and self.sources:
            self._looking = self.client.environment.tasks.spawn(self._look(), "look for queues")

    async def _look(self) -> None:
        """Checks whether the queues are still the same."""
        try:
            for index, source in enumerate(self.sources):
                if source.failure is None:
                    await self._look_for(index, source)
        finally:
            self._looked_at_s = self.now_s
            self._looking = None
            self._tell()

    async def _look_for(self, index: int, source: Source) -> None:
        try:
            found = await find_queue(Call(self.client, FIND_TIMEOUT_S), source.name)
            if source.is_now(found):
                return
            await self.client.topic(found.topic, timeout_s=FIND_TIMEOUT_S, age_max_s=0.0)
        except UnknownQueueError as error:
            source.close()
            source.failure = UnknownQueueError(f"Queue {source.name!r} was deleted: {error}")
            return
        except RayqError as error:
            logger.info("queue %s: not looked up: %s", source.name, error)
            return
        logger.warning(
            "queue %s was deleted and created again: it is taken from the start", source.name
        )
        source.close()
        self._replaced.append(source)
        self.sources[index] = Source(self.client, self, found)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._pace.tick()
            for source in self.sources:
                source.clear_shelf()
                for lane in source.lanes:
                    lane.renew()
            self._look_at_surplus()
            if self._demand:
                self._ask()
            if self.now_s - self._looked_at_s > CONFIG_AGE_MAX_S:
                self._look_soon()

    # --- the loop: the end ----------------------------------------------------------------------

    def give_back_waiting(self) -> None:
        """Gives back the records here that nobody has been given."""
        for source in self.sources:
            source.clear_shelf()
            for lane in source.lanes:
                for taken in lane.takens:
                    lane.release(taken, taken.waiting_offsets())
                    taken.rows, taken.next_row = [], 0

    async def rest(self) -> None:
        """Reports the settlements of a worker that has stopped, and leaves the next records to
        others. Raises as `flush` does."""
        if not self.is_closed:
            self._work()
            self.give_back_waiting()
            await self.flush(CLOSE_TIMEOUT_S)

    async def close(self, timeout_s: float | None = None) -> None:
        """Reports all decisions, gives back everything else, then ends. Raises LockLostError."""
        if self.is_closed:
            return
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        deadline_s = self.now_s + timeout_s
        self._work()
        self.is_closed = True
        self._tell()
        self.give_back_waiting()
        lanes = [lane for source in self.sources for lane in source.lanes]
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*(lane.taken_all() for lane in lanes))
            except builtins.TimeoutError:
                pass
            self.give_back_waiting()  # the records of those takes
            for lane in lanes:
                for taken in lane.takens:
                    for offset in list(taken.open):
                        lane.nack(taken, offset, 0)
            await self.flush(max(deadline_s - self.now_s, 0.001))
        except TimeoutError:
            raise TimeoutError(
                f"close: the leaders have not confirmed everything within {timeout_s:g} s, and are "
                "not asked again: what was settled last may come again."
            ) from None
        finally:
            self._release()

    async def leave(self, timeout_s: float | None) -> None:
        """Does the same as `close`, for a queue that its user dropped."""
        await self.close(timeout_s)

    def _release(self) -> None:
        self.client.metadata.remove_listener(self._metadata_changed)
        if self._surplus is not None:
            self._surplus.cancel()
        for task in (self._ticking, self._looking):
            if task is not None:
                task.cancel()
        for source in self.sources:
            if source.failure is None:
                source.close()
        self.sources, self._replaced = [], []
        self._tell()
        self._on_close()

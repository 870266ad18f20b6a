"""The part that both kinds of queue share, on the client's loop.

Nothing here refers to the queue that the user holds, so a queue that the user drops is
garbage-collected.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
from typing import Any

from rayq.client.admin.base import Call
from rayq.client.admin.queues import find_queue
from rayq.client.client import Client
from rayq.client.large.reader import LargeValues
from rayq.client.queues.acquired import TAKE_RECORDS_MAX
from rayq.client.queues.arguments import PREFETCH_MAX, whole_between
from rayq.client.queues.inbox import Inbox
from rayq.client.queues.partition_client import QueuePartitionClient, ResolvedQueue
from rayq.client.queues.partition_consumer import PartitionConsumer
from rayq.client.queues.queue_consumer import (
    COMING_S,
    READY_WAIT_MS,
    TAKE_WAIT_MS,
    QueueConsumer,
)
from rayq.client.queues.round_robin import DeficitRoundRobin
from rayq.client.queues.task import HandedOut, QueueTask
from rayq.client.queues.throughput import TICK_S, ThroughputEstimator
from rayq.config import ConsumerConfig
from rayq.errors import (
    AuthorizationError,
    ClosedError,
    LockLostError,
    RayqError,
    TimeoutError,
    UnknownQueueError,
)
from rayq.messages import QueueMetadata

logger = logging.getLogger(__name__)

FIND_TIMEOUT_S = 10.0
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
        self.queues: list[QueueConsumer] = []
        self._replaced: list[QueueConsumer] = []
        """Consumers of queues that were deleted and created again, until what users decided about
        their records has been reported."""
        self.prefetch = prefetch
        """The maximum number of records locked ahead."""
        self._weights = weights
        self._turns = DeficitRoundRobin(weights)
        self._on_close = on_close
        self._inbox = Inbox(self._work)
        self._demand = 0
        """The number of records that the calls of `take` wait for."""
        self._demand_since_s = 0.0
        self._demand_until_s = 0.0
        self._surplus: asyncio.TimerHandle | None = None
        """Timer of the next check for surplus records."""
        self._largest = 0
        """The largest count that a call has asked for."""
        self._throughput = ThroughputEstimator()
        self._news = asyncio.Event()
        """Set, and replaced, when something arrived."""
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
        return len(self._inbox)

    def at_hand(self, count: int) -> list[QueueTask]:
        """Records that can be handed out without the loop; [] if there are fewer than `count`."""
        queues = self.queues
        return queues[0].take_prefetched(count) if len(queues) == 1 and not self.is_closed else []

    def forked(self) -> None:
        """Closes the queue in a forked child: every use raises ClosedError; the parent
        continues."""
        self.is_closed = self._inbox.is_closed = True

    def loop_has_ended(self) -> None:
        self.is_closed = self._inbox.is_closed = True
        self._on_close()

    # --- the loop: what users have settled ------------------------------------------------------

    def _work(self) -> None:
        """Passes on what users have settled."""
        if count := self._inbox.drain():
            self._throughput.settled(count, self.now_s, is_idle=not self._is_busy)
            self._ask()

    @property
    def _is_busy(self) -> bool:
        """True if users hold records, or may get some at once."""
        return any(queue.out or queue.prefetched for queue in self.queues)

    async def flush(self, timeout_s: float | None) -> None:
        """Waits until everything settled is durable. Raises LockLostError, TimeoutError."""
        self._work()
        try:
            async with asyncio.timeout(timeout_s):
                partitions = self._partitions(*self._replaced)
                await asyncio.gather(*(each.acknowledger.flush() for each in partitions))
        except builtins.TimeoutError:
            raise TimeoutError(
                f"flush: the leaders have not confirmed everything within {timeout_s:g} s. The "
                "client keeps telling them: flush again to wait for it."
            ) from None
        self._replaced = [queue for queue in self._replaced if queue.out]
        lost, self._lost = self._lost, []
        if lost:
            more = f" So it was with {len(lost)} records since the last flush." if lost[1:] else ""
            raise LockLostError(lost[0].message + more)

    # --- the loop: taking -----------------------------------------------------------------------

    async def open(self) -> None:
        """Finds the queues, before anything else is done. Raises UnknownQueueError, ClosedError."""
        self.check_open()
        if self.queues:
            return
        async with self._opening:
            if self.queues:
                return
            call = Call(self.client, FIND_TIMEOUT_S)
            found = [await find_queue(call, name) for name in self.names]
            for queue in found:
                await self.client.topic(queue.topic, timeout_s=FIND_TIMEOUT_S)
            self.check_open()
            self.queues = [self._consumer(queue) for queue in found]
            self.client.metadata.add_listener(self._metadata_changed)
            self._ticking = self.client.environment.tasks.spawn(self._tick(), "watch locks")

    def _consumer(self, found: QueueMetadata) -> QueueConsumer:
        return QueueConsumer(self.client, ResolvedQueue(found), self, self._inbox, self.large)

    def _partitions(self, *replaced: QueueConsumer) -> list[PartitionConsumer]:
        return [part for queue in (*self.queues, *replaced) for part in queue.partitions]

    def _metadata_changed(self) -> None:
        for queue in self.queues:
            queue.look_for_partitions()

    async def take(
        self, count: int, timeout_s: float, *, is_for_threads: bool = False
    ) -> HandedOut:
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
                handed_out = self._hand_out(count)
                if handed_out:
                    # Calls that wait come next.
                    is_alone = len(self.queues) == 1 and self._demand == count
                    self._demand -= demand
                    demand = 0
                    handed_out = await self._begin(handed_out, deadline_s)
                if handed_out:
                    if is_for_threads and is_alone:
                        self.queues[0].prefetch(count)
                    return handed_out
                if not demand:  # They were another consumer's by then.
                    demand = count
                    self._demand += demand
                self._raise_failure()
                left_s = deadline_s - self.now_s
                self._ask()
                is_asking = any(queue.expected(self.now_s) for queue in self.queues)
                if left_s <= 0 and (not is_asking or left_s <= -ANSWER_GRACE_S):
                    return handed_out
                patience_s = max(left_s, ANSWER_GRACE_S + min(left_s, 0.0), 0.001)
                patience_s = min(patience_s, LOOK_AGAIN_S)
                if len(self.queues) > 1:
                    patience_s = min(patience_s, COMING_S)
                await self._wait_for_news(patience_s)
        finally:
            self._demand -= demand
            self._throughput.asked()
            self._ask()
            self._look_at_surplus()

    async def _begin(self, handed_out: HandedOut, deadline_s: float) -> HandedOut:
        """Tells the leaders that want to know it that a user is about to get these records, and
        waits until that is durable. Leaves out records that are another's by then, or whose leader
        could not be told in time."""
        told = [
            (delivery, offsets)
            for delivery, _ in handed_out
            if (unbegun := delivery.batch.unbegun)
            and (offsets := [offset for offset in delivery.offsets if offset in unbegun])
        ]
        if not told:
            return handed_out
        for delivery, offsets in told:
            delivery.acknowledger.begin(delivery.batch, offsets)
        with contextlib.suppress(builtins.TimeoutError):
            async with asyncio.timeout(max(deadline_s - self.now_s, BEGIN_S_MIN)):
                await asyncio.gather(*(delivery.acknowledger.flush() for delivery, _ in told))
        for delivery, offsets in told:
            batch = delivery.batch
            late = [offset for offset in offsets if offset in batch.unbegun]
            delivery.acknowledger.release(batch, late)
        left = [
            (delivery, [record for record in records if record.offset in delivery.batch.open])
            for delivery, records in handed_out
        ]
        return [(delivery, records) for delivery, records in left if records]

    def _hand_out(self, count: int) -> HandedOut:
        for queue in self.queues:
            queue.put_back_prefetched()
        if len(self.queues) == 1:
            handed_out = self.queues[0].hand_out(count)
        else:
            handed_out = self._hand_out_by_weight(count)
        if handed_out:
            self._throughput.began(self.now_s)
        return handed_out

    def _hand_out_by_weight(self, count: int) -> HandedOut:
        handed_out: HandedOut = []
        waiting = [queue.available for queue in self.queues]
        coming = [queue.is_coming(self.now_s) for queue in self.queues]
        while len(handed_out) < count:
            turn = self._turns.next(waiting, coming)
            if turn is None:
                break
            found = self.queues[turn].hand_out(1)
            handed_out += found
            # In an ordered queue all waiting records may be behind those in hand.
            waiting[turn] = waiting[turn] - 1 if found else 0
        return handed_out

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure.with_message(failure.message) from failure.__cause__
        for queue in self.queues:
            if queue.failure is not None:
                if not queue.was_deleted:
                    self._look_soon()  # It may be allowed again.
                raise queue.failure.with_message(queue.failure.message)

    async def _wait_for_news(self, timeout_s: float) -> None:
        """Waits until something arrived, for at most `timeout_s`."""
        with contextlib.suppress(builtins.TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _ahead(self) -> int:
        """The number of records that may be here without anybody waiting for them."""
        most = max(self.prefetch, self._largest) if self.prefetch else 0
        return self._throughput.ahead(most)

    def _ask(self) -> None:
        """Keeps takes in flight for the records that users wait for and will soon want. Each take
        costs its leader a write, so records taken ahead are refilled once half of them are gone."""
        if self.is_closed or not (self._demand or self._is_busy):
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
        for queue, count in lacking.items():
            count -= queue.expected(now_s)
            queue.look(count, known_s, now_s, ready_wait_ms, is_ahead=not demand)
        if not wait_ms:
            return
        idle = demand - sum(queue.available for queue in self.queues)
        if any(queue.expected(now_s) for queue in self.queues):
            idle = 0
        for queue in self.queues:
            count = max(lacking.get(queue, 0) - queue.expected(now_s), idle)
            if count > 0 and queue.failure is None:
                queue.wait(count, wait_ms, now_s, is_ahead=not demand, is_idle=idle > 0)

    def _lacking(self, ahead: int, known_s: float, now_s: float) -> dict[QueueConsumer, int]:
        """The number of further records each queue should have here or in flight, if that is worth
        a take."""
        found: dict[QueueConsumer, int] = {}
        wanted = self._wanted_of_each(ahead, known_s, now_s)
        for queue, want in zip(self.queues, wanted, strict=True):
            here = queue.available
            soon = here + queue.expected(now_s)
            is_enough = soon >= self._demand and 2 * (want - soon) < want - self._demand
            if want > here and not is_enough and queue.failure is None:
                found[queue] = want - here
        return found

    def _wanted_of_each(self, ahead: int, known_s: float, now_s: float) -> list[int]:
        """The number of records of each queue that should be here or in flight."""
        if len(self.queues) == 1:
            return [self._demand + ahead]
        if ahead:
            return [self._demand + max(ahead, 2 * weight) for weight in self._weights]
        # Nothing is taken ahead: each queue asks for the records it is to give next.
        limits = [
            queue.available
            + queue.expected(now_s)
            + (TAKE_RECORDS_MAX if queue.may_have(known_s, now_s) else 0)
            for queue in self.queues
        ]
        return self._turns.plan(self._demand, limits)

    def _look_at_surplus(self) -> None:
        """Schedules giving back records that nobody waits for."""
        if self._surplus is None and not self.is_closed and self._surplus_count() > 0:
            self._surplus = self.loop.call_later(SURPLUS_S, self._give_back_surplus)

    def _surplus_count(self) -> int:
        """The number of surplus records. A consumer's throughput changes, so twice the number
        allowed ahead is not too much."""
        allowed = 2 * self._ahead()
        if len(self.queues) > 1 and allowed:
            allowed = sum(max(allowed, 4 * weight) for weight in self._weights)
        return sum(queue.waiting for queue in self.queues) - self._demand - allowed

    def _give_back_surplus(self) -> None:
        self._surplus = None
        count = self._surplus_count()
        if self.is_closed or count <= 0:
            return
        for queue in reversed(self.queues):
            given = min(count, queue.waiting)
            queue.give_back(given)
            count -= given

    # --- the loop: events of partitions ---------------------------------------------------------

    def _consumers_of(
        self, partition: QueuePartitionClient
    ) -> tuple[QueueConsumer, PartitionConsumer] | None:
        """None if its queue was deleted."""
        for queue in self.queues:
            if queue.queue is partition.queue:
                return queue, queue.partitions[partition.number]
        return None

    def wanted(self, partition: QueuePartitionClient, count: int) -> None:
        """Gives idle consumers their share of the records waiting here, except those handled within
        a moment."""
        if self.is_closed or (found := self._consumers_of(partition)) is None:
            return
        queue, consumer = found
        queue.put_back_prefetched()
        share = -(-consumer.waiting // (count + 1))
        kept = max(share, self._throughput.in_a_moment(), self._demand)
        consumer.give_back(consumer.waiting - kept)

    def arrived(self, partition: QueuePartitionClient) -> None:
        if (found := self._consumers_of(partition)) is not None:
            queue, consumer = found
            queue.arrived(consumer)
        self._tell()
        self._look_at_surplus()
        if not self._demand or self.now_s < self._demand_until_s:
            # Otherwise the calls are about to return, and takes that do not wait would go back and
            # forth.
            self._ask()

    def was_lost(self, error: LockLostError) -> None:
        self._lost.append(error)
        logger.warning("%s", error)

    def failed(self, partition: QueuePartitionClient, error: RayqError) -> None:
        name = partition.queue.name
        logger.warning("queue %s: take at %s failed: %s", name, partition.name, error)
        self._failure = error

    def doubts(self, partition: QueuePartitionClient, error: RayqError) -> None:
        logger.info("queue %s at %s: %s", partition.queue.name, partition.name, error)
        self._look_soon()

    def _look_soon(self) -> None:
        if self._looking is None and self.queues:
            self._looking = self.client.environment.tasks.spawn(self._look(), "look for queues")

    async def _look(self) -> None:
        """Checks whether the queues are still the same."""
        try:
            for index, queue in enumerate(self.queues):
                if not queue.was_deleted:
                    await self._look_for(index, queue)
        finally:
            self._looked_at_s = self.now_s
            self._looking = None
            self._tell()

    async def _look_for(self, index: int, queue: QueueConsumer) -> None:
        name = queue.queue.name
        try:
            found = await find_queue(Call(self.client, FIND_TIMEOUT_S), name)
            if queue.queue.update(found):
                queue.failure = None
                return
            await self.client.topic(found.topic, timeout_s=FIND_TIMEOUT_S, age_max_s=0.0)
        except UnknownQueueError as error:
            queue.close()
            queue.failure = UnknownQueueError(f"Queue {name!r} was deleted: {error}")
            return
        except AuthorizationError as error:
            queue.failure = error
            return
        except RayqError as error:
            logger.info("queue %s: not looked up: %s", name, error)
            return
        logger.warning("queue %s was deleted and created again: it is taken from the start", name)
        queue.close()
        self._replaced.append(queue)
        self.queues[index] = self._consumer(found)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._throughput.tick()
            for queue in self.queues:
                queue.put_back_prefetched()
            for partition in self._partitions():
                partition.acknowledger.renew()
            self._look_at_surplus()
            if self._demand:
                self._ask()
            if self.now_s - self._looked_at_s > CONFIG_AGE_MAX_S:
                self._look_soon()

    # --- the loop: the end ----------------------------------------------------------------------

    def _release_waiting(self) -> None:
        """Gives back the records here that nobody has been given."""
        for queue in self.queues:
            queue.release_waiting()

    async def rest(self) -> None:
        """Reports the acknowledgements of a worker that has stopped, and leaves the next records to
        others. Raises as `flush` does."""
        if not self.is_closed:
            self._work()
            self._release_waiting()
            await self.flush(CLOSE_TIMEOUT_S)

    async def close(self, timeout_s: float | None = None) -> None:
        """Reports everything settled, gives back all else, then ends. Raises LockLostError."""
        if self.is_closed:
            return
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        deadline_s = self.now_s + timeout_s
        self._work()
        self.is_closed = self._inbox.is_closed = True
        self._tell()
        self._release_waiting()
        partitions = self._partitions()
        try:
            with contextlib.suppress(builtins.TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*(partition.taken_all() for partition in partitions))
            self._release_waiting()  # the records of those takes
            for partition in partitions:
                for batch in partition.batches:
                    for offset in list(batch.open):
                        partition.acknowledger.nack(batch, offset, 0)
            await self.flush(max(deadline_s - self.now_s, 0.001))
        except TimeoutError:
            raise TimeoutError(
                f"close: the leaders have not confirmed everything within {timeout_s:g} s, and are "
                "not asked again: what was settled last may be redelivered."
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
        for queue in self.queues:
            if not queue.was_deleted:
                queue.close()
        self.queues, self._replaced = [], []
        self._tell()
        self._on_close()

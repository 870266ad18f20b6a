"""Consumer of one queue: what it has taken from the partitions, and where it asks for more."""

from __future__ import annotations

from collections import deque

from rayq.client.client import Client
from rayq.client.large.reader import LargeValues
from rayq.client.queues.acquired import TAKE_RECORDS_MAX, AcquiredRecord
from rayq.client.queues.inbox import Inbox
from rayq.client.queues.partition_client import (
    PartitionListener,
    QueuePartitionClient,
    ResolvedQueue,
)
from rayq.client.queues.partition_consumer import PartitionConsumer
from rayq.client.queues.task import Delivery, HandedOut, QueueTask
from rayq.errors import AuthorizationError, UnknownQueueError

WAITING_PARTITIONS_MAX = 8
"""Maximum number of partitions at which takes wait for records; the others are swept."""
TAKE_WAIT_MS = 500
"""Maximum time a leader holds a take that finds nothing."""
READY_WAIT_MS = 20
"""The same, if there were records a moment ago, and the consumer takes nothing ahead: another may
have them by now."""
COMING_S = 0.2
"""Maximum time other queues wait for records that were asked for."""
PREFETCHED_MAX = 64
"""Maximum number of records that threads can take without the loop."""
PREFETCHED_BYTES_MAX = 1024 * 1024
PREFETCHED_SHARE = 8
"""Minimum ratio of PREFETCHED_MAX to the number of records asked for: a thread that asks for more
goes to the loop, which has all waiting records."""


class QueueConsumer:
    """See the module. Belongs to the loop, except for `take_prefetched`.

    Users' threads take prefetched records without asking the loop, because a round trip there costs
    more than a short task. There is no lock: a record belongs to the thread, or loop, that pops it.
    Prefetched records still count as waiting, and the loop takes them back before it decides about
    waiting records.
    """

    def __init__(
        self,
        client: Client,
        queue: ResolvedQueue,
        listener: PartitionListener,
        inbox: Inbox,
        large: LargeValues,
    ) -> None:
        self._client = client
        self.queue = queue
        self._listener = listener
        self._inbox = inbox
        self._large = large
        self.partitions: list[PartitionConsumer] = []
        self.prefetched: deque[tuple[AcquiredRecord, Delivery]] = deque()
        self.failure: UnknownQueueError | AuthorizationError | None = None
        """Set when the queue was deleted, and while the principal may not describe it."""
        self._waiting_partitions: dict[PartitionConsumer, None] = {}
        client.add_interest(queue.topic)
        self.look_for_partitions()

    def look_for_partitions(self) -> None:
        """Adds consumers of new partitions."""
        topic = self._client.metadata.topics.get(self.queue.topic)
        if topic is None or topic.topic_id != self.queue.topic_id:
            return
        for number in range(len(self.partitions), len(topic.partitions)):
            self.partitions.append(
                PartitionConsumer(
                    QueuePartitionClient(self._client, self.queue, number, self._listener),
                    self._inbox,
                    self._large,
                )
            )
        random = self._client.environment.random
        candidates = [each for each in self.partitions if each not in self._waiting_partitions]
        random.shuffle(candidates)
        for partition in candidates[: WAITING_PARTITIONS_MAX - len(self._waiting_partitions)]:
            self._waiting_partitions[partition] = None

    def close(self) -> None:
        """Stops asking and reporting."""
        self._client.drop_interest(self.queue.topic)
        for partition in self.partitions:
            partition.partition.is_closed = True

    @property
    def was_deleted(self) -> bool:
        return isinstance(self.failure, UnknownQueueError)

    # --- how much there is ----------------------------------------------------------------------

    @property
    def available(self) -> int:
        """The number of records here that may be handed out now."""
        return sum(partition.available for partition in self.partitions) + len(self.prefetched)

    @property
    def waiting(self) -> int:
        """The number of records here that nobody has been given."""
        return sum(partition.waiting for partition in self.partitions) + len(self.prefetched)

    @property
    def out(self) -> int:
        """The approximate number of records that users hold."""
        return max(sum(partition.out for partition in self.partitions) - len(self.prefetched), 0)

    def is_coming(self, now_s: float) -> bool:
        """Returns whether records that are known to be ready were just asked for."""
        return any(
            partition.asked and partition.ready and now_s - partition.asked_at_s < COMING_S
            for partition in self.partitions
        )

    # --- handing out ----------------------------------------------------------------------------

    def hand_out(self, count: int, *, is_at_once: bool = False) -> HandedOut:
        """Hands out up to `count` waiting records, those taken first. See `PartitionConsumer`."""
        found: HandedOut = []
        for partition in sorted(self._with_batches(), key=_oldest_s):
            if count <= 0:
                break
            parts = partition.hand_out(count, is_at_once=is_at_once)
            count -= sum(len(records) for _, records in parts)
            found += parts
        return found

    def prefetch(self, asked: int) -> None:
        """Prefetches records after a thread got those that it asked for."""
        if self.queue.config.ordered_by_key or asked * PREFETCHED_SHARE > PREFETCHED_MAX:
            return
        parts = self.hand_out(PREFETCHED_MAX, is_at_once=True)
        size = sum(len(record.value or b"") for _, records in parts for record in records)
        if size > PREFETCHED_BYTES_MAX:
            _put_back(parts)  # That many bytes are counted where they wait.
            return
        for whole, records in parts:
            whole.end()
            for record in records:
                delivery = Delivery(whole.batch, [record.offset], whole.acknowledger, whole.inbox)
                self.prefetched.append((record, delivery))

    def take_prefetched(self, count: int) -> list[QueueTask]:
        """Takes `count` records; [] if there are fewer. May be called from any thread."""
        found: list[QueueTask] = []
        if len(self.prefetched) < count:
            return found
        while len(found) < count:
            try:
                record, delivery = self.prefetched.popleft()
            except IndexError:  # Another thread was faster.
                break
            # If a Ctrl+C comes before the next line, the delivery gives the record back.
            if record.offset in delivery.batch.open:
                found.append(QueueTask(record, delivery))
                delivery.is_seen = True
        return found

    def put_back_prefetched(self) -> None:
        """Puts all records that no thread has taken back into their batches."""
        parts: HandedOut = []
        while self.prefetched:
            try:
                record, delivery = self.prefetched.popleft()
            except IndexError:
                break
            if parts and parts[-1][0].batch is delivery.batch:
                delivery.end()
                parts[-1][1].append(record)
            else:
                parts.append((delivery, [record]))
        _put_back(parts)

    # --- giving back ----------------------------------------------------------------------------

    def give_back(self, count: int) -> None:
        """Gives back `count` of the waiting records, those taken last."""
        self.put_back_prefetched()
        for partition in sorted(self._with_batches(), key=_newest_s, reverse=True):
            given = min(count, partition.waiting)
            if given > 0:
                partition.give_back(given)
                count -= given

    def release_waiting(self) -> None:
        """Gives back all records that nobody has been given."""
        self.put_back_prefetched()
        for partition in self.partitions:
            partition.acknowledger.release_waiting()

    def _with_batches(self) -> list[PartitionConsumer]:
        return [partition for partition in self.partitions if partition.batches]

    # --- asking ---------------------------------------------------------------------------------
    # A partition is *known* if its leader has reported since `known_s` how many more records there
    # are. While the leader holds a take, there are none.

    def expected(self, now_s: float) -> int:
        """The number of records that will probably arrive."""
        return sum(partition.expected(now_s) for partition in self.partitions)

    def may_have(self, known_s: float, now_s: float) -> bool:
        """Returns whether there may be records at a leader that can be asked now."""
        return any(
            partition.ready or self._is_unknown(partition, known_s, now_s)
            for partition in self.partitions
            if partition.may_ask(now_s)
        )

    def _is_unknown(self, partition: PartitionConsumer, known_s: float, now_s: float) -> bool:
        if partition in self._waiting_partitions:
            return partition.known_at_s < known_s
        return now_s >= partition.next_sweep_s

    def look(
        self, budget: int, known_s: float, now_s: float, ready_wait_ms: int, *, is_ahead: bool
    ) -> None:
        """Asks for `budget` records where there may be some: first where more are known to be, then
        where nothing is known, at few leaders at a time. So no more are locked than asked for."""
        free = sorted(
            (partition for partition in self.partitions if partition.may_ask(now_s)),
            key=lambda partition: partition.asked_at_s,
        )
        even = -(-budget // max(len(free), 1))
        for partition in [partition for partition in free if partition.ready]:
            if budget <= 0:
                return
            # Others may have arrived since; they would need one more take.
            count = min(budget, max(partition.ready, even), TAKE_RECORDS_MAX)
            partition.take(count, ready_wait_ms, is_ahead=is_ahead)
            budget -= count
        unknown = [
            partition
            for partition in free
            if not partition.asked and self._is_unknown(partition, known_s, now_s)
        ]
        width = max(budget, -(-len(unknown) // WAITING_PARTITIONS_MAX)) if budget > 0 else 0
        unknown = unknown[:width]
        for index, partition in enumerate(unknown):
            count = max(1, -(-budget // (len(unknown) - index)))
            partition.take(min(count, TAKE_RECORDS_MAX), 0, is_ahead=is_ahead)
            budget -= count

    def wait(
        self, budget: int, wait_ms: int, now_s: float, *, is_ahead: bool, is_idle: bool
    ) -> None:
        """Sends takes that wait for `budget` records at some leaders that have none. If the
        consumer `is_idle`, for at least one at each: records that arrive from several leaders at
        once are given back."""
        free = [partition for partition in self._waiting_partitions if partition.may_ask(now_s)]
        random = self._client.environment.random
        for index, partition in enumerate(free):
            count = -(-budget // (len(free) - index))
            if count <= 0 and not is_idle:
                return
            count = max(count, 1)
            # The takes of one consumer should not be the first everywhere.
            its_wait_ms = round(wait_ms * random.uniform(0.5, 1.0))
            partition.take(min(count, TAKE_RECORDS_MAX), its_wait_ms, is_ahead=is_ahead, waits=True)
            budget -= count

    def arrived(self, partition: PartitionConsumer) -> None:
        """Moves waiting takes to the partitions where records were found last."""
        if partition.ready and partition not in self._waiting_partitions:
            oldest = min(self._waiting_partitions, key=lambda partition: partition.found_at_s)
            if oldest.found_at_s < partition.found_at_s:
                del self._waiting_partitions[oldest]
                self._waiting_partitions[partition] = None


def _put_back(parts: HandedOut) -> None:
    """Puts records that were handed out to nobody back into their batches."""
    for delivery, records in parts:
        delivery.end()
        delivery.batch.put_back(records)


def _oldest_s(partition: PartitionConsumer) -> float:
    return partition.batches[0].acquired_at_s


def _newest_s(partition: PartitionConsumer) -> float:
    return partition.batches[-1].acquired_at_s

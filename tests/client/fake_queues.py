"""The leaders of queues, as a test plays them: in memory, without timeouts of their own. The test
says which locks go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayq import messages as m
from rayq.config import QueueConfig, as_dict, parse
from rayq.errors import UnknownQueueError

if TYPE_CHECKING:
    from tests.client.fake_broker import FakeCluster, FakePartition


@dataclass
class FakeQueue:
    name: str
    queue_id: str
    topic: str
    config: QueueConfig
    locks: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    """By partition and offset: holder and count."""
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    done: set[tuple[int, int]] = field(default_factory=set)
    rejected: dict[tuple[int, int], str] = field(default_factory=dict)
    has_to_read: bool = False
    """Whether its leaders have to read records first: a take that does not wait is only told how
    many there are."""
    waiting: int = 0
    most_waiting: int = 0
    """How many takes waited at one time."""


class FakeQueues:
    """All queues of a fake cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.queues: dict[str, FakeQueue] = {}
        self.newer: dict[str, Any] = {}
        """What this rayq does not know of a queue's config."""

    def create(self, name: str, partitions: int = 1, **config: Any) -> FakeQueue:
        """With a topic of its own. From the test's thread."""
        self._cluster.create_topic(name, partitions)
        queue = FakeQueue(name, f"id of {name}", name, parse(QueueConfig, config))
        self.queues[name] = queue
        return queue

    def free(self, queue: FakeQueue, holder: str | None = None) -> None:
        """All locks (of one holder) have gone. From the test's thread."""

        def go() -> None:
            for place, (its_holder, _) in list(queue.locks.items()):
                if holder in (None, its_holder):
                    del queue.locks[place]
            for one in self._cluster.topics[queue.topic].partitions:
                one.notify()

        self._cluster.call(go)

    def describe(self, request: m.DescribeQueues) -> m.DescribeQueuesResponse:
        found = [
            m.QueueMetadata(
                one.queue_id,
                one.name,
                self._cluster.topics[one.topic].topic_id,
                one.topic,
                {**as_dict(one.config), **self.newer},
                len(self._cluster.topics[one.topic].partitions),
            )
            for one in self.queues.values()
            if request.names is None or one.name in request.names
        ]
        return m.DescribeQueuesResponse(self._cluster.version, found)

    def _of(self, queue_id: str) -> FakeQueue:
        for one in self.queues.values():
            if one.queue_id == queue_id:
                return one
        raise UnknownQueueError("There is no such queue.")

    async def take(self, broker: int, request: m.Take) -> Any:
        queue = self._of(request.queue_id)
        deadline = asyncio.get_running_loop().time() + request.wait_ms / 1000
        queue.waiting += request.wait_ms > 0
        queue.most_waiting = max(queue.most_waiting, queue.waiting)
        try:
            while True:
                one = self._cluster.led_partition(broker, request)
                offsets = [
                    offset
                    for offset in range(one.end)
                    if (one.number, offset) not in queue.locks
                    and (one.number, offset) not in queue.done
                ]
                if queue.has_to_read and not request.wait_ms:
                    return m.TakeResponse(1, [], len(offsets), sweep_ms=20)
                if offsets or asyncio.get_running_loop().time() >= deadline:
                    return self._given(queue, one, request, offsets)
                try:
                    async with asyncio.timeout_at(deadline):
                        await one.grew.wait()
                except TimeoutError:
                    continue
        finally:
            queue.waiting -= request.wait_ms > 0

    def _given(
        self, queue: FakeQueue, one: FakePartition, request: m.Take, offsets: list[int]
    ) -> Any:
        given = offsets[: request.records_max]
        locks: list[tuple[int, int, int]] = []
        for offset in given:
            place = (one.number, offset)
            count = queue.counts[place] = queue.counts.get(place, 0) + 1
            queue.locks[place] = request.holder, count
            locks.append((offset, offset, count))
        payload = [
            data
            for header, data in one.batches
            if given and header.next_offset > given[0] and header.base_offset <= given[-1]
        ]
        ready = len(offsets) - len(given)
        return m.TakeResponse(1, locks, ready, sweep_ms=20), payload

    def settle(self, broker: int, request: m.Settle) -> m.SettleResponse:
        one = self._cluster.led_partition(broker, request)
        queue = self._of(request.queue_id)
        lost: list[tuple[int, int, str]] = []

        def named(first: int, last: int, count: int) -> list[tuple[int, int]]:
            found = []
            for offset in range(first, last + 1):
                place = (one.number, offset)
                if queue.locks.get(place) == (request.holder, count):
                    found.append(place)
                elif place not in queue.done:
                    lost.append((offset, offset, "another consumer has it"))
            return found

        for run in request.acks:
            for place in named(*run):
                del queue.locks[place]
                queue.done.add(place)
        for first, last, count, _ in request.nacks:
            for place in named(first, last, count):
                del queue.locks[place]
        for run in request.releases:
            for place in named(*run):
                del queue.locks[place]
        for offset, count, reason in [*request.rejects, *request.failures]:
            for place in named(offset, offset, count):
                del queue.locks[place]
                queue.done.add(place)
                queue.rejected[place] = reason
        for first, last, count, _ in request.extends:
            named(first, last, count)
        one.notify()
        return m.SettleResponse(lost)

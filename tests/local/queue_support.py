"""Consumers of queues that send the requests themselves, over connections of their own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from rayq import Cluster, messages
from rayq.client.environment import system_environment
from rayq.errors import RayqError, UnknownQueueError
from rayq.storage.batch import decode_columns, split_batches
from rayq.wire.connection import Connection
from tests.local.support import client_identity

PATIENCE_S = 60.0
Lock = tuple[int, int, int]
_numbers = itertools.count(1)


class Taken:
    """What one take brought."""

    def __init__(
        self, answer: messages.TakeResponse, payload: bytes | memoryview, holder: str
    ) -> None:
        self.answer = answer
        self.holder = holder
        self.epoch = answer.state_epoch
        self.locks = answer.locks
        self.payload = bytes(payload)
        held: dict[int, int] = {}
        for first, last, count in answer.locks:
            held |= dict.fromkeys(range(first, last + 1), count)
        self.counts = held
        self.values: dict[int, bytes | None] = {}
        for position, header in split_batches(self.payload):
            columns = decode_columns(self.payload, position, header)
            for offset, value in zip(columns.offsets, columns.values, strict=True):
                if offset in held:
                    self.values[offset] = value

    @property
    def offsets(self) -> list[int]:
        return sorted(self.counts)


class Raw:
    """One client process: a connection to the leader of each partition that it asks."""

    def __init__(self, cluster: Cluster, queue: str) -> None:
        self._cluster = cluster
        self.queue = queue
        found = cluster.admin.describe_queue(queue)
        self._queue_id, self._topic = found.queue_id, found.topic
        self._topic_id = ""
        self._environment = system_environment(None)
        self._connections: dict[tuple[str, int], Connection] = {}
        self.holder = f"holder-{next(_numbers)}"

    async def ask(self, kind: Callable[..., Any], *fields: Any, partition: int = 0) -> Any:
        """The answer of the partition's leader, and its payload. Asks again after errors that
        another attempt may not meet."""
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                return await self.ask_once(kind, *fields, partition=partition)
            except RayqError as error:
                is_new = isinstance(error, UnknownQueueError)
                if not (error.retriable or error.stale_metadata or is_new):
                    raise
                if asyncio.get_running_loop().time() > deadline_s:
                    raise
            await asyncio.sleep(0.02)

    async def ask_once(self, kind: Callable[..., Any], *fields: Any, partition: int = 0) -> Any:
        topic = await asyncio.to_thread(self._cluster.admin.describe_topic, self._topic)
        found = topic.partitions[partition]
        at = next(one for one in found.replicas if one.broker == found.leader)
        assert at.host is not None and at.port is not None
        connection = self._connections.get((at.host, at.port))
        if connection is None or connection.closed:
            connection = await Connection.open(
                self._environment, at.host, at.port, client_identity(self._cluster)
            )
            self._connections[at.host, at.port] = connection
        request = kind(topic.topic_id, partition, found.leader_epoch, self._queue_id, *fields)
        return await connection.request(request, timeout_s=PATIENCE_S)

    async def take(
        self, count: int = 10, *, wait_ms: int = 5_000, holder: str | None = None,
        bytes_max: int = 1 << 20, partition: int = 0,
    ) -> Taken:
        holder = holder or self.holder
        answer, payload = await self.ask(
            messages.Take, holder, count, bytes_max, wait_ms, partition=partition
        )
        return Taken(answer, payload, holder)

    async def settle(
        self, taken: Taken, *, holder: str | None = None, partition: int = 0, **parts: Any
    ) -> list[tuple[int, int, str]]:
        def build(*place: Any) -> messages.Settle:
            return messages.Settle(*place, holder or taken.holder, taken.epoch, **parts)

        answer, _ = await self.ask(build, partition=partition)
        lost: list[tuple[int, int, str]] = answer.lost
        return lost

    async def ack(self, taken: Taken, **options: Any) -> list[tuple[int, int, str]]:
        return await self.settle(taken, acks=taken.locks, **options)

    async def describe(self, partition: int = 0) -> messages.DescribeQueueResponse:
        answer, _ = await self.ask(messages.DescribeQueue, partition=partition)
        assert isinstance(answer, messages.DescribeQueueResponse)
        return answer

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def running(work: Callable[[], Awaitable[None]]) -> None:
    """Runs what a test does on a loop of its own."""

    async def guarded() -> None:
        await asyncio.wait_for(work(), 3 * PATIENCE_S)

    asyncio.run(guarded())

"""Progress of a pool's queue: the waiting and locked records in each partition."""

from __future__ import annotations

from rayq.client.admin.base import Call
from rayq.client.admin.queues import describe_queue
from rayq.client.client import Client
from rayq.client.consumer_pool import PoolSpec
from rayq.core.pool_scaling import PartitionProgress

DESCRIBE_TIMEOUT_S = 3.0
"""Timeout for a partition's leader; without its answer the partition keeps its last value."""


class QueueProgress:
    """The progress of a queue, measured at each call of `measure`."""

    def __init__(self, spec: PoolSpec, client: Client) -> None:
        """Made on the loop of `client`, which is closed with this."""
        assert spec.queue is not None
        self._queue = spec.queue
        self._client = client
        self.partitions: dict[int, PartitionProgress] = {}

    async def close(self) -> None:
        self._client.close()

    async def measure(self, *, has_consumers: bool) -> list[int]:
        """Measures all partitions. Returns those that keep their last value, because their leader
        has not answered. Raises RayqError if nothing can be measured."""
        found = await describe_queue(Call(self._client, DESCRIBE_TIMEOUT_S), self._queue)
        unknown: list[int] = []
        for partition in found.partitions:
            if partition.ready is None or partition.locked is None or partition.end_offset is None:
                unknown.append(partition.partition)
                continue
            oldest_ms = partition.oldest_ready_ms or 0
            self.partitions[partition.partition] = PartitionProgress(
                partition.end_offset - partition.ready - partition.locked,
                partition.end_offset,
                oldest_ms / 1000,
            )
        for gone in set(self.partitions) - {partition.partition for partition in found.partitions}:
            del self.partitions[gone]
        return unknown

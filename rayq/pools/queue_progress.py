"""How many records of a pool's queue wait, and how many are in hand, in each partition."""

from __future__ import annotations

from rayq.client.admin.queues import QueueAdmin
from rayq.client.client import Client
from rayq.client.consumer_pool import PoolSpec
from rayq.core.pool_scaling import PartitionProgress

DESCRIBE_TIMEOUT_S = 3.0
"""A partition whose leader has not said by then how it stands is as it was before."""


class QueueProgress:
    """Measures it anew at each call of `measure`."""

    def __init__(self, spec: PoolSpec, client: Client) -> None:
        """On the loop of `client`, which is closed with this."""
        assert spec.queue is not None
        self._queue = spec.queue
        self._client = client
        self.partitions: dict[int, PartitionProgress] = {}

    async def close(self) -> None:
        self._client.close()

    async def measure(self, *, has_consumers: bool) -> list[int]:
        """Returns the partitions that are as they were before, because their leader has not
        answered. Raises RayqError when nothing can be said."""
        found = await QueueAdmin(self._client, DESCRIBE_TIMEOUT_S).describe(self._queue)
        unknown: list[int] = []
        for one in found.partitions:
            if one.ready is None or one.locked is None or one.end_offset is None:
                unknown.append(one.partition)
                continue
            oldest_ms = one.oldest_ready_ms or 0
            self.partitions[one.partition] = PartitionProgress(
                one.end_offset - one.ready - one.locked, one.end_offset, oldest_ms / 1000
            )
        for gone in set(self.partitions) - {one.partition for one in found.partitions}:
            del self.partitions[gone]
        return unknown

"""Where a pool's group is in each partition of its topic, and where the partitions end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable

from rayq.client.client import Client
from rayq.client.consumer_pool import PoolSpec
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.core.pool_scaling import PartitionProgress
from rayq.environment import Clock
from rayq.errors import GroupNotEmptyError, RayqError
from rayq.records import TopicPartition

logger = logging.getLogger(__name__)

OFFSET_TIMEOUT_MS = 3_000
"""A partition whose leader has not said by then where it ends is as it was before."""
RENEW_INTERVAL_S = 600.0
"""A group without members forgets its positions after `offsets_retention_ms`, and with them what
was handled: they are committed once more so often while no consumer runs."""


class GroupProgress:
    """Measures it anew at each call of `measure`."""

    def __init__(
        self, clock: Clock, spec: PoolSpec, client: Client, watcher: AsyncConsumer
    ) -> None:
        """`watcher` is of the group, without being a member; it is closed with this."""
        self._clock = clock
        self._client = client
        self._watcher = watcher
        self._pool = spec.name
        self._topic = spec.topic
        self._is_pinned = spec.config.auto_offset_reset == "earliest"
        self._renewed_at_s = clock.monotonic()
        self.partitions: dict[int, PartitionProgress] = {}

    async def close(self) -> None:
        await self._watcher.close()

    async def measure(self, *, has_consumers: bool) -> list[int]:
        """Returns the partitions that are as they were before, because their leader has not
        answered. Raises RayqError when nothing can be said."""
        watcher = self._watcher
        topic = await self._client.topic(
            self._topic, timeout_s=OFFSET_TIMEOUT_MS / 1000, age_max_s=0.0
        )
        places = [TopicPartition(self._topic, number) for number in range(len(topic.partitions))]
        committed = await watcher.committed(places)
        ends = await _known(watcher.end_offsets([place]) for place in places)
        if not self._is_pinned:
            await self._pin(watcher, committed, ends)
            committed = await watcher.committed(places)
        if not has_consumers:
            await self._renew(watcher, committed)
        behind = [
            place
            for place in places
            if place in ends and (committed[place] is None or committed[place] != ends[place])
        ]
        # Records that retention deleted need no handling, and no consumer commits them.
        starts = await _known(watcher.beginning_offsets([place]) for place in behind)
        unknown: list[int] = []
        for place in places:
            if place in ends and (committed[place] is not None or place in starts):
                position = max(committed[place] or 0, starts.get(place, 0))
                self.partitions[place.partition] = PartitionProgress(
                    min(position, ends[place]), ends[place]
                )
            else:
                unknown.append(place.partition)
        for gone in set(self.partitions) - {place.partition for place in places}:
            del self.partitions[gone]
        return unknown

    async def _pin(
        self,
        watcher: AsyncConsumer,
        committed: dict[TopicPartition, int | None],
        ends: dict[TopicPartition, int],
    ) -> None:
        """auto_offset_reset="latest": a group without any position begins where the partitions end
        now. Consumers that start later would skip what came in between."""
        if all(offset is None for offset in committed.values()):
            if len(ends) < len(committed):
                raise RayqError(
                    "not every partition has said yet where it ends, and auto_offset_reset is "
                    '"latest"'
                )
            try:
                await watcher.commit(ends)
            except GroupNotEmptyError as error:
                logger.warning("pool %r begins at the earliest: %s", self._pool, error)
        self._is_pinned = True

    async def _renew(
        self, watcher: AsyncConsumer, committed: dict[TopicPartition, int | None]
    ) -> None:
        """Commits the positions once more where `RENEW_INTERVAL_S` is over."""
        if self._clock.monotonic() - self._renewed_at_s < RENEW_INTERVAL_S:
            return
        self._renewed_at_s = self._clock.monotonic()
        known = {place: offset for place, offset in committed.items() if offset is not None}
        if known:
            try:
                await watcher.commit(known)
            except GroupNotEmptyError as error:
                logger.info("positions of pool %r are not renewed: %s", self._pool, error)


async def _known(
    asked: Iterable[Awaitable[dict[TopicPartition, int]]],
) -> dict[TopicPartition, int]:
    """The answers of the leaders that gave one. Raises the first RayqError where none did."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: dict[TopicPartition, int] = {}
    failed: list[RayqError] = []
    for answer in answers:
        if isinstance(answer, dict):
            found.update(answer)
        elif isinstance(answer, RayqError):
            failed.append(answer)
        else:
            raise answer
    if failed and not found:
        raise type(failed[0])(failed[0].message)
    return found

"""Progress of a pool's group: its position and the end of each partition of its topic."""

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
"""Timeout for a partition's end; without its leader's answer the partition keeps its last value."""
RENEW_INTERVAL_S = 600.0
"""Interval at which positions are committed again while no consumer runs. A group without members
forgets its positions after `offsets_retention_ms`, and with them which records were handled."""


class GroupProgress:
    """The progress of a group, measured at each call of `measure`."""

    def __init__(
        self, clock: Clock, spec: PoolSpec, client: Client, watcher: AsyncConsumer
    ) -> None:
        """`watcher` is a consumer of the group that is not a member; it is closed with this."""
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
        """Measures all partitions. Returns those that keep their last value, because their leader
        has not answered. Raises RayqError if nothing can be measured."""
        watcher = self._watcher
        topic = await self._client.topic(
            self._topic, timeout_s=OFFSET_TIMEOUT_MS / 1000, age_max_s=0.0
        )
        places = [TopicPartition(self._topic, number) for number in range(len(topic.partitions))]
        committed = await watcher.committed(places)
        ends = await _known(watcher.end_offsets([partition]) for partition in places)
        if not self._is_pinned:
            await self._pin(watcher, committed, ends)
            committed = await watcher.committed(places)
        if not has_consumers:
            await self._renew(watcher, committed)
        behind = [
            partition
            for partition in places
            if partition in ends
            and (committed[partition] is None or committed[partition] != ends[partition])
        ]
        # Records that retention deleted need no handling, and no consumer commits them.
        starts = await _known(watcher.beginning_offsets([partition]) for partition in behind)
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
        """Commits the current ends for a group without any position, with
        auto_offset_reset="latest". Otherwise consumers that start later would skip records that
        came in between."""
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
        """Commits the positions again once `RENEW_INTERVAL_S` has passed."""
        if self._clock.monotonic() - self._renewed_at_s < RENEW_INTERVAL_S:
            return
        self._renewed_at_s = self._clock.monotonic()
        known = {partition: offset for partition, offset in committed.items() if offset is not None}
        if known:
            try:
                await watcher.commit(known)
            except GroupNotEmptyError as error:
                logger.info("positions of pool %r are not renewed: %s", self._pool, error)


async def _known(
    asked: Iterable[Awaitable[dict[TopicPartition, int]]],
) -> dict[TopicPartition, int]:
    """The answers of the leaders that gave one. Raises the first RayqError if none did."""
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

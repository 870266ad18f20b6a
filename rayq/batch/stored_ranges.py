"""Stored parts of a job's ranges: the offsets at which objects in an object store begin."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rayq.batch.job_partition import JobPartition
from rayq.batch.offset_ranges import Split
from rayq.batch.taking_cuts import together
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.errors import RayqError
from rayq.records import TopicPartition

logger = logging.getLogger(__name__)

OBJECTS_MAX = 1000
"""Maximum number of objects that one answer names."""
ASK_TIMEOUT_S = 10.0
"""Timeout of a request that a job can do without."""


async def uses_remote_storage(client: Client, topic: str, timeout_s: float) -> bool:
    """Returns whether records of the topic may be in an object store. Raises UnknownTopicError,
    TimeoutError."""
    found = await client.topic(topic, timeout_s=timeout_s)
    return bool(found.config.get("remote_storage"))


async def stored_ranges(
    client: Client, ranges: Iterable[Split], timeout_s: float
) -> list[Split]:
    """The ranges that are not empty, of topics that may have records in an object store. Raises as
    `uses_remote_storage` does."""
    filled = [split for split in ranges if not split.is_empty]
    stored = {
        topic
        for topic in sorted({split.topic for split in filled})
        if await uses_remote_storage(client, topic, timeout_s)
    }
    return [split for split in filled if split.topic in stored]


def object_starts(
    cluster: Cluster, ranges: Sequence[Split], *, timeout_s: float
) -> dict[TopicPartition, list[int]]:
    """The offsets at which objects begin inside the ranges: the best points to cut them. Offsets
    that a leader does not tell within 10 s are left out: a range can be cut anywhere."""
    client, background = cluster.shared_client()

    async def starts_of(split: Split) -> list[int]:
        partition = JobPartition(client, split.place, split.topic_id, min(ASK_TIMEOUT_S, timeout_s))
        try:
            return await _starts(partition, split)
        except RayqError as error:
            logger.info("where the objects of %s begin: %s", partition, error)
            return []

    async def starts() -> dict[TopicPartition, list[int]]:
        asked = await stored_ranges(client, ranges, timeout_s)
        found = await together(starts_of(split) for split in asked)
        return {split.place: offsets for split, offsets in zip(asked, found, strict=True)}

    return background.run(starts())


async def _starts(partition: JobPartition, split: Split) -> list[int]:
    starts: list[int] = []
    offset = split.start
    while offset < split.end:
        found = await partition.objects(offset, split.end, objects_max=OBJECTS_MAX)
        if not found:
            break
        starts += [each.start_offset for each in found]
        offset = found[-1].end_offset
        if offset < split.end:
            starts.append(offset)
    return sorted({start for start in starts if start > split.start})

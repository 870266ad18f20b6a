"""Bugs planted into what removes the oldest records: see `mutations`."""

from __future__ import annotations

from typing import Any

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.partition.state import PartitionState
from rayq.storage.log import Log

SWARM = "swarm"


@plants("15", "delete_records is answered before the followers have moved their log start", SWARM)
def deletion_answered_at_once() -> list[Patch]:
    return [
        (PartitionState, "is_log_start_committed", lambda self, offset: True),
        (PartitionState, "committed_log_start", lambda self, own_start: own_start),
    ]


@plants("15", "the log start is kept in memory alone, and counts as durable", SWARM)
def log_start_not_written() -> list[Patch]:
    async def advance(self: Any, offset: int) -> None:
        self.log._start = max(self.log._start, min(offset, self.log.end_offset))

    return [(ReplicaLog, "advance_log_start", advance)]


@plants("15", "retention passes the high watermark", SWARM)
def retention_above_the_high_watermark() -> list[Patch]:
    retention_start = Log.retention_start
    return [
        (
            Log,
            "retention_start",
            lambda self, now_ms, high_watermark: retention_start(self, now_ms, self.end_offset),
        )
    ]


@plants("15", "the oldest records of a topic without retention go, once they were read", SWARM)
def retention_where_none_is_set() -> list[Patch]:
    """Only a reader of everything in the end can tell: whoever reads along has read the records."""

    def mutated(self: Any, now_ms: int, high_watermark: int) -> int:
        config = self._config
        if config.retention_bytes is not None or not config.is_deleted_by_retention:
            return retention_start(self, now_ms, high_watermark)
        segments = [segment.base_offset for segment in self._segments]
        start: int = max(
            [self._start, *(segment for segment in segments[:-3] if segment <= high_watermark)]
        )
        return start

    retention_start = Log.retention_start
    return [(Log, "retention_start", mutated)]

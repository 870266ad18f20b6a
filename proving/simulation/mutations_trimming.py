"""Bugs planted into what removes the oldest records: see `mutations`."""

from __future__ import annotations

from typing import Any

from proving.simulation.planting import Patch, plants
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.partition_state import PartitionState
from rayq.storage.log import Log

SWARM = "swarm"


@plants("15", "delete_records is answered before the followers have moved their log start", SWARM)
def deletion_answered_at_once() -> list[Patch]:
    return [(PartitionState, "is_log_start_committed", lambda self, offset: True)]


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

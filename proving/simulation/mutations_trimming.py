"""Bugs planted into what removes the oldest records: see `mutations`."""

from __future__ import annotations

from typing import Any

from proving.simulation.planting import Patch, plants
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.partition_state import PartitionState
from rayq.storage.log import Log
from rayq.storage.producer_state import ProducerState

SWARM = "swarm"


@plants("15", "delete_records is answered before the followers have moved their log start", SWARM)
def deletion_answered_at_once() -> list[Patch]:
    return [(PartitionState, "is_log_start_committed", lambda self, offset: True)]


@plants("15", "a follower joins the in-sync set below the log start of its leader", SWARM)
def isr_joined_below_the_log_start() -> list[Patch]:
    propose = Leader.propose_isr

    def mutated(self: Any) -> None:
        held, self._replica_log = self._replica_log, _WithoutStart(self._replica_log)
        try:
            propose(self)
        finally:
            self._replica_log = held

    return [(Leader, "propose_isr", mutated)]


class _WithoutStart:
    """A replica's log that says that it begins at 0."""

    start_offset = 0

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return self if name == "log" else getattr(self._held, name)


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


@plants("15", "a follower that begins anew forgets the producers below the log start", SWARM)
def producers_forgotten_in_a_reset() -> list[Patch]:
    reset = Log.reset

    def mutated(self: Any, start_offset: int, epochs: Any, producer_snapshot: bytes) -> None:
        reset(self, start_offset, epochs, ProducerState().snapshot())

    return [(Log, "reset", mutated)]

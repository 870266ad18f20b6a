"""A leader alone in the simulated world, with its followers acted by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from proving.simulation import World
from proving.simulation.process import Process
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.storage.data_directory import PartitionDirectory
from rayq.wire.answer_room import AnswerRoom
from tests.storage.support import NOW_MS, append, make_batch

ALL = [(1, "1a"), (2, "2a"), (3, "3a")]
EPOCHS = [(2, 0), (4, 10), (6, 20)]
END = 30
LEADER_EPOCH = 8
BATCH_BYTES = len(make_batch(0))
"""Of each batch of the log, which has one record."""
ROOM = AnswerRoom(lambda: True)


class Led:
    """A leader over a log of 30 records in three epochs, in epoch 8."""

    def __init__(self, log: ReplicaLog, host: Host, config: dict[str, Any] | None = None) -> None:
        self.log, self.host = log, host
        self.clock = log.environment.clock
        self.has_lease = True
        self.proposals: list[messages.AlterPartition] = []
        self.refusal: Exception | None = None
        given = assignment(config=config)
        self.leader = Leader(
            log,
            given,
            propose=self._propose,
            has_lease=lambda: self.has_lease,
            now_s=log.environment.clock.monotonic,
            peers=cast(Any, None),  # There are no transactions.
        )
        self.leader.committed(given)

    async def _propose(self, request: messages.AlterPartition) -> None:
        self.proposals.append(request)
        if self.refusal is not None:
            raise self.refusal

    def flushed(self, offset: int) -> None:
        self.leader.flushed(offset)

    def copying(
        self, broker: int, offset: int, last_epoch: int | None = LEADER_EPOCH,
        flushed: int | None = None, *, incarnation: str | None = None, log_start: int = 0,
        local_start: int = 0, copied_horizon: int = 0, bytes_max: int = 1 << 20, wait_ms: int = 0,
    ) -> Awaitable[tuple[messages.ReplicaFetchResponse, bytes]]:
        """What a follower hears and gets."""
        return self.leader.followers.fetch(
            messages.ReplicaFetch(
                "id", 0, broker, incarnation or f"{broker}a", LEADER_EPOCH, offset,
                offset if flushed is None else flushed, log_start, last_epoch, bytes_max, wait_ms,
                copied_horizon, local_start,
            )
        )

    async def fetched(
        self, broker: int, offset: int, last_epoch: int | None = LEADER_EPOCH,
        flushed: int | None = None, **fields: Any,
    ) -> messages.ReplicaFetchResponse:
        return (await self.copying(broker, offset, last_epoch, flushed, **fields))[0]

    async def all_agree(self, end: int = END, *, log_start: int = 0) -> None:
        for broker in (2, 3):
            last_epoch = 6 if end == END else LEADER_EPOCH
            await self.fetched(broker, end, last_epoch, log_start=log_start)

    def produce(
        self, sequence: int, *, acks: int = -1, timeout_ms: int = 60_000,
        timestamp_ms: int = NOW_MS,
    ) -> messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]:
        batch = make_batch(
            0, 1, producer_id=7, base_sequence=sequence, timestamp_ms=timestamp_ms
        )
        request = messages.Produce("id", 0, LEADER_EPOCH, acks, timeout_ms)
        return self.leader.produce(request, memoryview(batch), principal=None)

    def waiting(self, sequence: int, **options: Any) -> asyncio.Future[messages.ProduceResponse]:
        found = self.produce(sequence, **options)
        assert isinstance(found, asyncio.Future)
        return found

    def reading(
        self, offset: int, last_epoch: int | None = None, *, bytes_max: int = 1 << 20,
        wait_ms: int = 0, isolation: int = messages.ISOLATION_NONE, room: AnswerRoom = ROOM,
    ) -> Awaitable[tuple[messages.FetchResponse, bytes]]:
        """What a consumer hears and gets."""
        request = messages.Fetch(
            "id", 0, LEADER_EPOCH, offset, last_epoch, bytes_max, wait_ms, isolation
        )
        return self.leader.reads.fetch(request, room)

    async def listed(self, timestamp_ms: int) -> messages.ListOffsetsResponse:
        request = messages.ListOffsets("id", 0, LEADER_EPOCH, timestamp_ms)
        return await self.leader.reads.list_offsets(request)

    def deleting(
        self, before: int | None, *, timeout_ms: int = 0
    ) -> Awaitable[messages.DeleteRecordsResponse]:
        request = messages.DeleteRecords("id", 0, LEADER_EPOCH, before, timeout_ms)
        return self.leader.delete_records(request)


def assignment(
    partition_epoch: int = 1,
    isr: list[tuple[int, str]] | None = None,
    *,
    config: dict[str, Any] | None = None,
    **fields: Any,
) -> messages.PartitionAssignment:
    return messages.PartitionAssignment(
        "t", "id", 0, {"min_insync_replicas": 2} | (config or {}), 1, "1a", "h", 1, LEADER_EPOCH,
        partition_epoch, None, ALL if isr is None else isr, list(ALL), **fields,
    )


def leading(
    work: Callable[[Led], Awaitable[None]],
    *,
    cluster: ClusterConfig | None = None,
    before: Callable[[ReplicaLog], Awaitable[None]] | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    """`before` prepares the log before its leader begins; `config` is the topic's."""

    async def script(process: Process, host: Host) -> None:
        environment = process.environment
        log = ReplicaLog(
            environment, cluster or ClusterConfig(), assignment(config=config), broker=1,
            incarnation="1a", on_flushed=lambda _: None, on_failure=lambda: None,
        )
        await log.open(
            PartitionDirectory.open(
                environment, "/data/t-0", topic="t", topic_id="id", partition=0, incarnation="1a",
                pid_start_time=1,
            )
        )
        for epoch, start in EPOCHS:
            for _ in range(start, start + 10):
                append(log.log, epoch=epoch)
        await log.flusher.checkpoint()
        if before is not None:
            await before(log)
        await work(Led(log, host, config))

    with World(seed=1) as world:
        host = world.host("broker")
        process = host.process("replica")
        world.run(process.run(script(process, host)))

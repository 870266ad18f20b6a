"""One replica's log alone in the simulated world, on a disk that a test holds up or breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.core.partition.state import PartitionState
from rayq.errors import (
    DirectoryInUseError,
    RayqError,
)
from rayq.storage.batch import encode_batch, read_header
from rayq.storage.checked_file import make_directory
from rayq.storage.data_directory import PartitionDirectory
from tests.storage.support import NOW_MS, value_of

PATH = "/data/t-0"
BATCH_BYTES = len(encode_batch([value_of(0, 16)], [b"k"], compression="none"))
SLOW_S = 1.0
AT_ONCE_S = 0.1
SMALL: dict[str, object] = {"segment_bytes": 1024}
COMPACTED: dict[str, object] = {"cleanup_policy": "compact", "max_compaction_lag_ms": 1}


class Held:
    """A log, its disk, and what it has told its replica."""

    def __init__(self, process: Process, host: Host, config: dict[str, object]) -> None:
        self.process, self.host, self.disk = process, host, host.disk
        self.environment = process.environment
        self.clock = process.environment.clock
        self.flushed: list[int] = []
        self.failures = 0
        self.log = ReplicaLog(
            self.environment,
            ClusterConfig(),
            assignment(config),
            broker=1,
            incarnation="1a",
            on_flushed=self.flushed.append,
            on_failure=self._failed,
        )

    def _failed(self) -> None:
        self.failures += 1

    def lead_alone(self, *, other_replicas: int = 0) -> None:
        """The replica leads, and is the only one in sync."""
        state = PartitionState(
            broker=1, incarnation="1a", leader_epoch=3, epoch_start_offset=0, min_insync=1,
            lag_time_max_s=10.0, end_offset=self.log.log.end_offset,
            flushed_offset=self.log.log.flushed_offset, high_watermark=self.log.high_watermark,
            started_s=self.clock.monotonic(),
        )
        others = [(2 + number, None) for number in range(other_replicas)]
        state.committed(1, [(1, "1a")], [(1, "1a"), *others], 1)
        self.log.lead(state)

    def directory(self) -> PartitionDirectory:
        return PartitionDirectory.open(
            self.environment, PATH, topic="t", topic_id="id", partition=0, incarnation="1a",
            pid_start_time=1,
        )

    async def open(self) -> None:
        await self.log.open(self.directory())

    def fill(self, records: int = 30) -> None:
        for number in range(records):
            batch = encode_batch(
                [value_of(number, 16)], [b"k"], timestamps_ms=NOW_MS, compression="none"
            )
            self.log.log.append_as_leader(
                batch, read_header(batch), leader_epoch=3, now_ms=NOW_MS
            )

    def is_free(self) -> bool:
        """Whether another process could take the directory over."""
        try:
            self.directory().close()
        except DirectoryInUseError:
            return False
        return True

    def segments(self) -> list[int]:
        """The first offsets of the segments on disk."""
        names = [path.rpartition("/")[2] for path in self.disk.paths() if path.startswith(PATH)]
        return sorted(int(name[:-4]) for name in names if name.endswith(".log"))


def assignment(config: dict[str, object]) -> messages.PartitionAssignment:
    return messages.PartitionAssignment(
        "t", "id", 0, config, 1, "1a", "h", 1, 3, 1, None, [(1, "1a")], [(1, "1a")]
    )


def holding(
    work: Callable[[Held], Awaitable[None]],
    config: dict[str, object] | None = None,
    *,
    seed: int = 1,
    records: int | None = 30,
    after_power_loss: Callable[[Held], Awaitable[None]] | None = None,
) -> None:
    """`work` with an open log of so many records, all on disk; None: it is not open yet. Then the
    same replica in a new process: what was only in the page cache may be gone."""

    async def script(held: Held) -> None:
        if records is not None:
            await held.open()
            held.fill(records)
            await held.log.flusher.checkpoint()
        await work(held)

    with World(seed=seed) as world:
        host = world.host("broker")
        process = host.process("replica")
        process.call(make_directory, process.environment.disk, "/data")
        world.run(process.run(script(Held(process, host, config or {}))))
        if after_power_loss is not None:
            process.kill()
            host.power_loss()
            again = host.process("again")
            world.run(again.run(reopened(Held(again, host, config or {}), after_power_loss)))


async def reopened(held: Held, work: Callable[[Held], Awaitable[None]]) -> None:
    await held.open()
    await work(held)


async def raised(error: type[RayqError], work: Awaitable[object], match: str = ".") -> None:
    with pytest.raises(error, match=match):
        await asyncio.wait_for(work, SLOW_S)

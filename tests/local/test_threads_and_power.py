"""A replica's log while real threads flush it: it is appended to, cut and read meanwhile, and after a
power loss at any moment it has what was told to be flushed.

The simulation shows the same with threads that it plays, one step at a time. Here two threads really
run at once, and a sync takes a while.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rayq import messages
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.disk import LocalDisk, LocalFile
from rayq.storage.log import Log
from tests.storage.support import NOW_MS, append

STEPS = 150
SYNC_S_MAX = 0.003
OPTIONS = {"segment_bytes": 1024, "index_interval_bytes": 1}


class SlowFile(LocalFile):
    def __init__(self, descriptor: int, disk: DiskOfSlowSyncs) -> None:
        super().__init__(descriptor)
        self._disk = disk

    def sync_data(self) -> None:
        self._disk.sync(self.descriptor)


class DiskOfSlowSyncs(LocalDisk):
    """Remembers what is synced: of each file and directory what it held when the last sync that
    has ended began. After a power loss there would be no more than that."""

    def __init__(self, seed: int) -> None:
        self._lock = threading.Lock()
        self._rng = random.Random(seed)
        self._files: dict[int, bytes] = {}
        """By inode."""
        self._directories: dict[str, dict[str, int]] = {}
        self._kept: list[int] = []
        """Descriptors of all files: no other file gets the inode of one that was removed."""

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> LocalFile:
        file = super().open(path, create=create, writable=writable)
        with self._lock:
            self._kept.append(os.dup(file.descriptor))
        return SlowFile(os.dup(file.descriptor), self)

    def sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        held = os.pread(descriptor, status.st_size, 0)
        time.sleep(self._rng.uniform(0, SYNC_S_MAX))
        with self._lock:
            self._files[status.st_ino] = held

    def sync_dir(self, path: str) -> None:
        with os.scandir(path) as entries:
            held = {entry.name: entry.inode() for entry in entries if entry.is_file()}
        time.sleep(self._rng.uniform(0, SYNC_S_MAX))
        with self._lock:
            self._directories[path] = held

    def after_a_power_loss(self, path: str, copy: Path) -> None:
        """Makes a copy of what the directory would be."""
        copy.mkdir()
        with self._lock:
            for name, inode in self._directories[path].items():
                (copy / name).write_bytes(self._files.get(inode, b""))

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)


def batches_of(log: Log, start: int, end: int) -> bytes:
    offset, data = start, b""
    while offset < end:
        result = log.plan_read(offset, end, 1 << 20).run()
        offset, data = result.next_offset, data + result.data
    return data


async def change(log: ReplicaLog, rng: random.Random, told: list[int]) -> None:
    """One step of what leaders and followers do with a log."""
    what = rng.random()
    if what < 0.6:
        append(
            log.log, rng.randint(1, 3), epoch=log.log.last_epoch or 0, size=rng.choice((20, 300))
        )
        log.flusher.wake()
    elif what < 0.75:
        log.advance_high_watermark(rng.randint(log.high_watermark, told[-1]))
    elif what < 0.85:
        cut = rng.randint(log.high_watermark, log.log.end_offset)
        async with log.files_lock, log.flush_lock:
            log.log.truncate(cut)
            told.append(log.log.flushed_offset)
            epoch = (log.log.last_epoch or 0) + 1
            append(log.log, epoch=epoch)
        log.flusher.wake()
    elif what < 0.9:
        await log.advance_log_start(rng.randint(log.log.start_offset, log.high_watermark))
    elif what < 0.95:
        await log.flusher.checkpoint()
    else:
        await log.read(log.log.start_offset, log.log.end_offset, 1 << 20)


@pytest.mark.parametrize("seed", range(2))
def test_what_was_told_to_be_flushed_outlives_a_power_loss_at_any_moment(
    tmp_path: Path, seed: int
) -> None:
    rng, disk = random.Random(seed), DiskOfSlowSyncs(seed)
    told = [0]

    async def main() -> None:
        environment = replace(system_environment(), disk=disk)
        directory = PartitionDirectory.open(
            environment,
            str(tmp_path / "t-0"),
            topic="t",
            topic_id="id",
            partition=0,
            incarnation="ours",
            pid_start_time=1,
        )
        assignment = messages.PartitionAssignment(
            "t", "id", 0, OPTIONS, 1, "ours", "leader", 1, 1, 0, None, [(0, "ours")], [(0, "ours")]
        )
        log = ReplicaLog(
            environment,
            replace(ClusterConfig(), flush_checkpoint_bytes=1 << 16),
            assignment,
            broker=0,
            incarnation="ours",
            on_flushed=told.append,
            on_failure=lambda: None,
        )
        await log.open(directory)
        for step in range(STEPS):
            await change(log, rng, told)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0, SYNC_S_MAX))
            if step % 5 == 0:
                expect_after_a_power_loss(log.log, told[-1], tmp_path / f"after-{step}")
        await log.flusher.checkpoint()
        assert (log.failure, told[-1]) == (None, log.log.end_offset)
        await log.close()
        environment.tasks.cancel_all()

    def expect_after_a_power_loss(log: Log, flushed: int, copy: Path) -> None:
        disk.after_a_power_loss(log.directory, copy)
        found = Log.open(
            LocalDisk(), str(copy), log.config, checkpoint_bytes=1 << 30, now_ms=NOW_MS
        )
        assert found.end_offset >= flushed
        start = log.start_offset
        assert found.start_offset <= start
        assert batches_of(found, start, flushed) == batches_of(log, start, flushed)

    asyncio.run(main())
    disk.close()

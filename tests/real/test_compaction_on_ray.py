"""Compaction by real helper processes under Ray's workers, which are killed at their work."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

import rayq
from rayq import Cluster
from rayq.storage.disk import LocalDisk
from rayq.storage.verify import verify
from tests.local.support import (
    eventually,
    leader_of,
    log_size,
    partition_of,
    read_all,
    wait_in_sync,
)
from tests.real.support import is_gone

KEYS = 100
WAIT_S = 60.0
"""The limit for work of helpers: they get little time on a busy machine."""


def helpers() -> dict[int, int]:
    """The running cleaners and the processes that started them."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            command = (
                (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            )
        except OSError:
            continue
        if b"rayq.runtime.cleaner_process" in command:
            found[int(entry.name)] = int(command[-2])
    return found


def replica_pids(cluster: Cluster) -> dict[int, int]:
    return {
        one.pid: one.broker
        for one in partition_of(cluster, "state").replicas
        if one.pid is not None
    }


@pytest.mark.thorough
def test_helpers_and_replicas_die_while_a_topic_is_compacted(
    ray_here: None, tmp_path: Path
) -> None:
    cluster = rayq.start(
        str(tmp_path),
        brokers=3,
        name="compacting",
        port=19792,
        compaction_check_interval_ms=100,
        compaction_bytes_per_s=150_000,
    )
    cluster.create_topic(
        "state",
        cleanup_policy="compact",
        segment_bytes=16_384,
        min_cleanable_dirty_ratio=0.01,
        max_compaction_lag_ms=100,
    )
    state: dict[bytes | None, bytes | None] = {}

    def write(producer: rayq.Producer, count: int) -> None:
        for number in range(count):
            key = b"k%d" % (number * 7 % KEYS)
            state[key] = None if number % 13 == 0 else b"%d " % number * 6
            producer.send("state", state[key], key=key)
        producer.flush()

    def check() -> None:
        assert {one.key: one.value for one in read_all(cluster, "state", timeout_s=WAIT_S)} == state

    def helper() -> tuple[int, int]:
        """A helper of one of our replicas, and that replica's process."""
        ours: list[tuple[int, int]] = []

        def runs() -> bool:
            pids = replica_pids(cluster)
            ours[:] = [(pid, parent) for pid, parent in helpers().items() if parent in pids]
            return bool(ours)

        eventually(runs, "a replica has a helper", WAIT_S)
        return ours[0]

    with cluster.producer(compression_type="none", request_timeout_ms=2000) as producer:
        write(producer, 3000)
        pid, parent = helper()
        with suppress(ProcessLookupError):  # it may have ended already
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: is_gone(pid), "the helper is gone", WAIT_S)
        assert not is_gone(parent), "its replica is not"
        check()
        pid, parent = helper()
        os.kill(parent, signal.SIGKILL)
        eventually(lambda: is_gone(pid), "the helper ends with its replica", WAIT_S)
        write(producer, 500)
        wait_in_sync(cluster, "state", timeout_s=WAIT_S)
        leader = leader_of(cluster, "state")
        for one, broker in replica_pids(cluster).items():
            if broker == leader:
                os.kill(one, signal.SIGKILL)
        write(producer, 500)
    wait_in_sync(cluster, "state", timeout_s=WAIT_S)
    check()

    def is_compacted(broker: int) -> bool:
        """Whether one record of each key is left, of 4000 records of 60 bytes and more."""
        return log_size(tmp_path / f"broker-{broker}" / "state-0") < 20_000

    eventually(lambda: all(map(is_compacted, range(3))), "all replicas are compacted", 2 * WAIT_S)
    check()
    cluster.stop()
    assert all(report.is_sound for report in verify(LocalDisk(), str(tmp_path)))

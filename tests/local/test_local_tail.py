"""Replicas of a topic with remote storage keep the tail only, and copy the tail only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayq import TopicPartition
from rayq.storage.checkpoint import read_checkpoint
from rayq.storage.disk import LocalDisk
from rayq.testing import LocalCluster
from tests.local.support import (
    FAST,
    eventually,
    leader_of,
    log_size,
    partition_of,
    read_all,
    values,
)

TIERED: dict[str, Any] = {
    "remote_storage": True,
    "segment_bytes": 64 * 1024,
    "local_retention_bytes": 0,
    "local_retention_ms": None,
}
RECORD_BYTES = 1000
WRITTEN = [b"%06d" % number + b"." * RECORD_BYTES for number in range(600)]


@pytest.fixture
def cluster(tmp_path: Path, store: Path) -> Iterator[LocalCluster]:
    with start(tmp_path, store, 4) as cluster:
        yield cluster


def start(tmp_path: Path, store: Path, brokers: int | None = None) -> LocalCluster:
    return LocalCluster(
        brokers,
        data_dir=tmp_path / "data",
        remote_storage_url=f"file://{store}",
        retention_check_interval_ms=200,
        **FAST,
    )


def directory(cluster: LocalCluster, broker: int) -> Path:
    return Path(cluster.data_dir) / f"broker-{broker}" / "t-0"


def local_start(path: Path) -> int:
    found = read_checkpoint(LocalDisk(), str(path))
    return 0 if found is None else found.local_start_offset


def produce(cluster: LocalCluster, records: list[bytes]) -> None:
    with cluster.producer(compression_type="none", batch_size=8 * 1024) as producer:
        producer.send_many("t", records).result(60)


def wait_until_dropped(cluster: LocalCluster, brokers: list[int], offset: int) -> None:
    kept_bytes = RECORD_BYTES * max(len(WRITTEN) - offset, 0)
    eventually(
        lambda: all(
            local_start(directory(cluster, one)) > offset
            and log_size(directory(cluster, one)) < kept_bytes
            for one in brokers
        ),
        f"the records below {offset} left the disks of {brokers}",
    )


def test_replicas_keep_and_copy_the_tail_only(cluster: LocalCluster) -> None:
    cluster.create_topic("t", replication_factor=3, **TIERED)
    produce(cluster, WRITTEN)
    before = [one.broker for one in partition_of(cluster, "t").replicas]
    wait_until_dropped(cluster, before, 400)

    leader = leader_of(cluster, "t")
    (added,) = set(range(4)) - set(before)
    target = [leader, added, *(one for one in before if one != leader)][:3]
    cluster.admin.reassign_partitions({TopicPartition("t", 0): target}, timeout_s=100)
    copied = [
        sample.value
        for sample in cluster.metrics()
        if sample.name == "rayq_replication_bytes_in_total"
        and sample.labels.get("topic") == "t"
        and sample.labels.get("broker") == str(added)
    ]
    assert len(copied) == 1 and copied[0] < 200 * RECORD_BYTES
    assert local_start(directory(cluster, added)) > 400

    # It leads, and every record is still there.
    cluster.kill_broker(leader)
    eventually(lambda: partition_of(cluster, "t").leader not in (None, leader), "another leads")
    produce(cluster, [b"more"])
    assert values(read_all(cluster, "t")) == [*WRITTEN, b"more"]

"""Records on their way to the object store: while it is away, and where it lost some of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from rayq.actors.remote import leader_remote
from rayq.records import RemotePartitionInfo
from rayq.testing import LocalCluster
from tests.local.support import FAST, eventually, read_all

RANDOM = Random(1)
TIERED = {"remote_storage": True, "segment_bytes": 1024, "remote_max_lag_ms": 100}


@pytest.fixture
def tiered(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalCluster]:
    monkeypatch.setattr(leader_remote, "RETRY_MAX_S", 1.0)
    with LocalCluster(
        brokers=2,
        data_dir=tmp_path / "data",
        remote_storage_url=f"file://{store}",
        remote_backlog_bytes=8192,
        retention_check_interval_ms=100,
        **FAST,
    ) as cluster:
        yield cluster


def described(cluster: LocalCluster) -> RemotePartitionInfo:
    (found,) = cluster.admin.describe_remote_storage("t")
    return found


def is_stored(cluster: LocalCluster, end: int) -> bool:
    return described(cluster).remote_end_offset == end


def test_a_store_that_is_away_is_told_of_and_gets_everything_once_it_is_back(
    tiered: LocalCluster, store: Path
) -> None:
    tiered.create_topic("t", **TIERED)
    away = store.rename(store.with_name("away"))
    with tiered.producer() as producer:
        # Fewer than are refused while nothing of them is stored, however long that takes.
        for _ in range(5):
            producer.send("t", RANDOM.randbytes(500)).result(60)
        eventually(lambda: described(tiered).trouble is not None, "it is told")
        waiting = [producer.send("t", RANDOM.randbytes(500)) for _ in range(5, 300)]
        eventually(lambda: described(tiered).lag_bytes > 8192, "much waits on the disk")
        away.rename(store)
        for one in waiting:  # What was refused was sent again.
            one.result(60)
    eventually(lambda: is_stored(tiered, 300), "all of it is stored")
    assert described(tiered).trouble is None
    assert [record.offset for record in read_all(tiered, "t")] == list(range(300))


def test_what_the_store_lost_or_changed_is_found_and_made_again(
    tiered: LocalCluster, store: Path
) -> None:
    tiered.create_topic("t", **TIERED)
    with tiered.producer() as producer:
        for number in range(100):
            producer.send("t", b"%d" % number * 50).result(60)
    eventually(lambda: is_stored(tiered, 100), "all of it is stored")
    lost, changed, *_ = sorted(store.glob(f"{tiered.cluster_id}/*/*/data/*"))
    lost.unlink()
    data = bytearray(changed.read_bytes())
    data[100] ^= 1
    changed.write_bytes(data)

    (found,) = tiered.admin.verify_remote("t", deep=True)
    assert [one.object.rpartition("/")[2] for one in found.problems] == [lost.name, changed.name]
    (repaired,) = tiered.admin.verify_remote("t", deep=True, repair=True)
    assert len(repaired.repaired) == 2
    (sound,) = tiered.admin.verify_remote("t", deep=True)
    assert sound.problems == [] and sound.checked_objects == found.checked_objects

"""A data directory is opened again: after a stop, after a crash, and in every wrong way."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rayq.client.environment import system_environment
from rayq.errors import (
    DirectoryInUseError,
    InvalidRequestError,
    RayqError,
    UnsupportedFormatError,
    WrongClusterError,
)
from rayq.storage.data_directory import format_directory, read_meta
from rayq.testing import LocalCluster
from tests.local.support import (
    FAST,
    Load,
    eventually,
    partition_of,
    place,
    read_all,
    values,
    wait_in_sync,
)

Ending = Callable[[LocalCluster], None]


def start(path: Path, brokers: int | None = 3) -> LocalCluster:
    return LocalCluster(brokers, data_dir=path, **FAST)


def fill(cluster: LocalCluster, topic: str = "t", count: int = 100, first: int = 0) -> None:
    with cluster.producer() as producer:
        producer.send_many(topic, [b"%d" % number for number in range(first, first + count)])
        producer.flush(timeout_s=60)


def numbers(count: int) -> list[bytes | None]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("end", [LocalCluster.stop, LocalCluster.abort])
def test_everything_is_there_again(tmp_path: Path, end: Ending) -> None:
    cluster = start(tmp_path)
    cluster.create_topic("t", retention_ms=999_999, flush="os")
    cluster.create_topic("deleted")
    cluster.admin.alter_topic_config("t", flush="disk", segment_bytes=4096)
    cluster_id = cluster.admin.describe_cluster().cluster_id
    fill(cluster)
    cluster.admin.delete_records({place("t"): 10})
    cluster.admin.delete_topic("deleted")
    epoch = partition_of(cluster, "t").leader_epoch
    end(cluster)
    with start(tmp_path, brokers=None) as cluster:
        assert cluster.admin.list_topics() == ["t"]
        info = cluster.admin.describe_topic("t")
        assert (info.config["retention_ms"], info.config["flush"]) == (999_999, "disk")
        assert info.config["segment_bytes"] == 4096
        assert info.partitions[0].leader_epoch > epoch
        assert cluster.admin.describe_cluster().cluster_id == cluster_id
        found = read_all(cluster, "t")
        assert values(found) == numbers(100)[10:] and found[0].offset == 10
        wait_in_sync(cluster, "t")
        fill(cluster, first=100, count=1)
        assert read_all(cluster, "t")[-1].offset == 100


def test_a_crash_under_load_loses_nothing_acknowledged(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.create_topic("t", partitions=2)
    with Load(first, "t") as load:
        load.wait_for_more(100)
        load.finish()
    first.abort()
    with start(tmp_path) as second:
        load.check(second)


def test_crash_after_crash_keeps_every_record(tmp_path: Path) -> None:
    for run in range(3):
        cluster = start(tmp_path)
        if run == 0:
            cluster.create_topic("t")
        fill(cluster, first=50 * run, count=50)
        cluster.abort()
    with start(tmp_path) as cluster:
        assert values(read_all(cluster, "t")) == numbers(150)


def test_a_directory_in_use_is_refused_and_the_process_named(tmp_path: Path) -> None:
    with start(tmp_path) as cluster:
        with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()}"):
            start(tmp_path)
        cluster.create_topic("unharmed")


def test_directories_of_two_clusters_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        start(tmp_path / name).stop()
    shutil.rmtree(tmp_path / "a" / "broker-1")
    shutil.copytree(tmp_path / "b" / "broker-1", tmp_path / "a" / "broker-1")
    with pytest.raises(WrongClusterError, match="2 clusters"):
        start(tmp_path / "a")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    start(tmp_path).stop()
    meta = tmp_path / "broker-1" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format_version": 99}))
    with pytest.raises(UnsupportedFormatError, match="format 99"):
        start(tmp_path)


def test_missing_directories_are_named(tmp_path: Path) -> None:
    cluster = start(tmp_path)
    cluster.create_topic("t")
    fill(cluster)
    cluster.stop()
    (tmp_path / "broker-1").rename(tmp_path / "elsewhere")
    with pytest.raises(RayqError, match="broker-1"):
        start(tmp_path)
    with start(tmp_path, brokers=None) as cluster:  # two of three voters are a majority
        assert values(read_all(cluster, "t")) == numbers(100)
        fill(cluster, first=100)
    (tmp_path / "elsewhere").rename(tmp_path / "broker-1")
    with start(tmp_path) as cluster:
        wait_in_sync(cluster, "t")
        assert values(read_all(cluster, "t")) == numbers(200)


def test_more_directories_than_asked_for_are_all_started(tmp_path: Path) -> None:
    start(tmp_path).stop()
    with start(tmp_path, brokers=1) as cluster:
        assert len(cluster.admin.describe_cluster().brokers) == 3


@pytest.mark.parametrize("brokers", [0, -1, 101])
def test_an_impossible_number_of_brokers_is_refused(tmp_path: Path, brokers: int) -> None:
    with pytest.raises(InvalidRequestError, match="brokers must be"):
        start(tmp_path, brokers)


def test_an_old_copy_of_a_directory_catches_up_and_takes_nothing_back(tmp_path: Path) -> None:
    cluster = start(tmp_path / "data")
    cluster.create_topic("t")
    fill(cluster)
    cluster.stop()
    shutil.copytree(tmp_path / "data" / "broker-0", tmp_path / "copy")
    with start(tmp_path / "data") as cluster:
        fill(cluster, first=100)
    shutil.rmtree(tmp_path / "data" / "broker-0")
    (tmp_path / "copy").rename(tmp_path / "data" / "broker-0")
    with start(tmp_path / "data") as cluster:
        wait_in_sync(cluster, "t")
        assert values(read_all(cluster, "t")) == numbers(200)
        assert {one.log_end_offset for one in partition_of(cluster, "t").replicas} == {200}


def test_a_lost_disk_is_filled_again_by_the_others(tmp_path: Path) -> None:
    cluster = start(tmp_path)
    cluster.create_topic("t")
    fill(cluster)
    cluster.stop()
    environment = system_environment(None)
    lost = str(tmp_path / "broker-0")
    meta = read_meta(environment.disk, lost)
    assert meta is not None
    secret = (tmp_path / "broker-0" / "secret").read_bytes()
    shutil.rmtree(lost)
    format_directory(environment, lost, cluster_id=meta.cluster_id, broker=0, secret=secret)
    with start(tmp_path) as cluster:
        wait_in_sync(cluster, "t")
        assert values(read_all(cluster, "t")) == numbers(100)
        # The new directory becomes a voter in place of the lost one.
        eventually(lambda: sorted(cluster.admin.describe_cluster().voters) == [0, 1, 2], "it votes")
    with start(tmp_path) as cluster:
        assert values(read_all(cluster, "t")) == numbers(100)


def test_a_partition_directory_that_is_gone_is_filled_again(tmp_path: Path) -> None:
    cluster = start(tmp_path)
    cluster.create_topic("t")
    fill(cluster)
    cluster.stop()
    shutil.rmtree(tmp_path / "broker-0" / "t-0")
    with start(tmp_path) as cluster:
        wait_in_sync(cluster, "t")
        assert values(read_all(cluster, "t")) == numbers(100)


def test_a_directory_of_no_known_topic_is_put_aside_and_not_deleted(tmp_path: Path) -> None:
    cluster = start(tmp_path)
    cluster.create_topic("t")
    fill(cluster)
    cluster.stop()
    stray = tmp_path / "broker-0" / "stray-0"
    shutil.copytree(tmp_path / "broker-0" / "t-0", stray)
    meta = stray / "partition.json"
    meta.write_text(
        json.dumps(json.loads(meta.read_text()) | {"topic": "stray", "topic_id": "f" * 32})
    )
    with start(tmp_path) as cluster:
        eventually(lambda: not stray.exists(), "it is put aside")
        (aside,) = (tmp_path / "broker-0" / "quarantine").iterdir()
        assert any(path.suffix == ".log" for path in aside.iterdir())
        assert cluster.admin.list_topics() == ["t"]
        assert values(read_all(cluster, "t")) == numbers(100)


@pytest.mark.parametrize("end", [LocalCluster.stop, LocalCluster.abort])
def test_a_topic_created_again_is_there_though_the_last_snapshot_names_the_one_before(
    tmp_path: Path, end: Ending
) -> None:
    """A broker starts with the metadata of its last snapshot, which may be of long ago."""
    cluster = LocalCluster(1, data_dir=tmp_path, metadata_snapshot_records=30, **FAST)
    cluster.create_topic("t")
    snapshot = tmp_path / "broker-0" / "metadata" / "metadata.snapshot"
    for retention_ms in range(1000, 1100):
        if snapshot.exists():
            break
        cluster.admin.alter_topic_config("t", retention_ms=retention_ms)
    before = snapshot.read_bytes()
    cluster.admin.delete_topic("t")
    cluster.create_topic("t")
    fill(cluster)
    end(cluster)
    assert snapshot.read_bytes() == before
    with start(tmp_path, brokers=None) as cluster:
        assert values(read_all(cluster, "t")) == numbers(100)
        assert not list((tmp_path / "broker-0").glob("quarantine/*"))


def test_damage_below_the_recovery_point_costs_no_record_and_is_mended(tmp_path: Path) -> None:
    cluster = start(tmp_path)
    cluster.create_topic("t")
    fill(cluster)
    leader = partition_of(cluster, "t").leader
    cluster.stop()
    (log,) = (tmp_path / f"broker-{leader}" / "t-0").glob("*.log")
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    log.write_bytes(damaged)
    with start(tmp_path) as cluster:
        assert values(read_all(cluster, "t")) == numbers(100)
        fill(cluster, first=100, count=1)
        wait_in_sync(cluster, "t")
        eventually(
            lambda: damaged not in log.read_bytes() and log.stat().st_size > len(damaged),
            "the log is copied again",
        )


@pytest.mark.parametrize("end", [LocalCluster.stop, LocalCluster.abort])
def test_partitions_that_wait_for_a_start_to_get_on_are_no_warning(
    tmp_path: Path, end: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start(tmp_path)
    cluster.create_topic("t", partitions=4)
    end(cluster)
    caplog.set_level(logging.INFO, "rayq")
    with start(tmp_path) as again:
        wait_in_sync(again, "t")
    said = [one for one in caplog.records if "_offline " in one.getMessage()]
    assert said or end is LocalCluster.stop
    assert {one.levelno for one in said} <= {logging.INFO}

"""The broker that a directory belongs to, and the process that holds it."""

from __future__ import annotations

import random
import stat
from contextlib import closing
from pathlib import Path

import pytest

from proving.simulation import ProcessDied, World
from rayq.config import ClusterConfig
from rayq.environment import Environment, LoopTasks, SystemClock, ThreadPool
from rayq.errors import (
    DirectoryInUseError,
    StorageError,
    UnsupportedFormatError,
    WrongClusterError,
)
from rayq.storage.data_directory import (
    DataDirectory,
    PartitionDirectory,
    find_brokers,
    format_directory,
    read_meta,
    read_secret,
)
from rayq.storage.disk import LocalDisk
from rayq.wire.network import AsyncioNetwork

SECRET = b"s" * 32


def environment(pid: int = 4711) -> Environment:
    return Environment(
        clock=SystemClock(),
        random=random.Random(pid),
        disk=LocalDisk(),
        network=AsyncioNetwork(ClusterConfig()),
        threads=ThreadPool(1),
        tasks=LoopTasks(),
        pid=pid,
        boot_id="boot",
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "data" / "broker-3")
    format_directory(environment(), path, cluster_id="c1", broker=3, secret=SECRET)
    return path


def open_partition(path: str, *, pid: int = 1, topic_id: str = "t1") -> PartitionDirectory:
    return PartitionDirectory.open(
        environment(pid),
        path,
        topic="flights",
        topic_id=topic_id,
        partition=0,
        incarnation="i1",
        pid_start_time=99,
    )


def test_a_formatted_directory_is_found_and_says_what_it_is(path: str) -> None:
    meta = read_meta(LocalDisk(), path)
    assert meta is not None
    assert (meta.cluster_id, meta.broker, meta.start_counter) == ("c1", 3, 0)
    root = str(Path(path).parent)
    Path(root, "broker-9").mkdir()
    Path(root, "broker-x").mkdir()
    format_directory(environment(2), f"{root}/broker-10", cluster_id="c1", broker=10, secret=SECRET)
    assert find_brokers(LocalDisk(), root) == [(3, path), (10, f"{root}/broker-10")]
    assert find_brokers(LocalDisk(), "/nowhere") == []
    assert read_meta(LocalDisk(), "/nowhere") is None


def test_the_secret_is_for_the_owner_only(path: str) -> None:
    assert read_secret(LocalDisk(), path) == SECRET
    assert stat.S_IMODE(Path(path, "secret").stat().st_mode) == 0o600
    Path(path, "secret").unlink()
    with pytest.raises(StorageError, match="secret is missing"):
        read_secret(LocalDisk(), path)


def test_each_start_is_counted(path: str) -> None:
    for count in (1, 2, 3):
        directory = DataDirectory.open(environment(), path, cluster_id="c1")
        assert directory.meta.start_counter == count
        assert directory.secret == SECRET
        directory.close()
    meta = read_meta(LocalDisk(), path)
    assert meta is not None
    assert meta.start_counter == 3


def test_a_second_opener_is_told_who_holds_the_directory(path: str) -> None:
    first = DataDirectory.open(environment(4711), path)
    with pytest.raises(DirectoryInUseError, match="4711") as raised:
        DataDirectory.open(environment(2), path)
    assert raised.value.holder_pid == 4711
    meta = read_meta(LocalDisk(), path)
    assert meta is not None
    assert meta.start_counter == 1
    first.close()
    DataDirectory.open(environment(2), path).close()


def test_a_directory_of_another_cluster_or_format_is_refused(path: str) -> None:
    with pytest.raises(WrongClusterError, match="c1"):
        DataDirectory.open(environment(), path, cluster_id="c2")
    with pytest.raises(StorageError, match=r"not a data directory"):
        DataDirectory.open(environment(), str(Path(path).parent))
    meta = Path(path, "meta.json")
    good = meta.read_text()
    for version in (0, 2):
        meta.write_text(good.replace('"format_version": 1', f'"format_version": {version}'))
        with pytest.raises(UnsupportedFormatError, match="format"):
            DataDirectory.open(environment(), path)
        with pytest.raises(UnsupportedFormatError):
            read_meta(LocalDisk(), path)
    meta.write_text(good[:-10])
    with pytest.raises(StorageError, match="damaged"):
        DataDirectory.open(environment(), path)
    meta.write_text(good)
    DataDirectory.open(environment(), path).close()


def test_a_new_directory_id_stays(path: str) -> None:
    directory = DataDirectory.open(environment(5), path)
    before = directory.meta.directory_id
    directory.renew_directory_id()
    assert directory.meta.directory_id != before
    assert read_meta(LocalDisk(), path) == directory.meta


def test_replicas_read_where_their_broker_listens(path: str) -> None:
    assert DataDirectory.read_endpoint(LocalDisk(), path) is None
    directory = DataDirectory.open(environment(), path)
    directory.write_endpoint("10.0.0.1", 9392)
    assert DataDirectory.read_endpoint(LocalDisk(), path) == ("10.0.0.1", 9392)


def test_a_partition_has_one_holder(path: str) -> None:
    directory = DataDirectory.open(environment(), path)
    at = directory.partition_path("flights", 0)
    assert at == f"{path}/flights-0" == DataDirectory.path_of_partition(path, "flights", 0)
    assert DataDirectory.partition_holder(LocalDisk(), at) is None
    assert DataDirectory.partition_topic_id(LocalDisk(), at) is None
    first = open_partition(at, pid=11)
    assert DataDirectory.partition_topic_id(LocalDisk(), at) == "t1"
    holder = DataDirectory.partition_holder(LocalDisk(), at)
    assert holder is not None
    assert (holder.pid, holder.start_time) == (11, 99)
    with pytest.raises(DirectoryInUseError, match="process 11") as raised:
        open_partition(at, pid=12)
    assert (raised.value.holder_pid, raised.value.holder_start_time) == (11, 99)
    first.close()
    assert DataDirectory.partition_holder(LocalDisk(), at) is None
    open_partition(at, pid=12).close()


def test_a_partition_of_another_topic_is_refused_then_put_aside(path: str) -> None:
    directory = DataDirectory.open(environment(), path)
    at = directory.partition_path("flights", 0)
    open_partition(at).close()
    with pytest.raises(WrongClusterError, match="t1"):
        open_partition(at, topic_id="t2")
    (meta, found) = directory.partitions()[0]
    assert (meta.topic, meta.topic_id, meta.partition, found) == ("flights", "t1", 0, at)
    aside = directory.quarantine(at)
    assert aside == f"{path}/quarantine/flights-0.t1"
    assert Path(aside, "partition.json").exists()
    assert directory.partitions() == []
    open_partition(at, topic_id="t2").close()
    open_partition(directory.partition_path("flights-2", 10)).close()
    assert [meta.topic_id for meta, _ in directory.partitions()] == ["t2", "t1"]
    directory.quarantine(at)
    open_partition(at).close()
    assert directory.quarantine(at) == f"{path}/quarantine/flights-0.t1.2"


def test_one_partition_that_cannot_be_read_hides_none_of_the_others(path: str) -> None:
    directory = DataDirectory.open(environment(), path)
    good, bad, newer = (directory.partition_path("flights", number) for number in range(3))
    for at in (good, bad, newer):
        open_partition(at).close()
    Path(bad, "partition.json").write_text("{garbage")
    Path(bad, "checkpoint").touch()  # There was a log.
    Path(newer, "partition.json").write_text('{"format_version": 99}')
    assert [at for _, at in directory.partitions()] == [good]
    assert DataDirectory.partition_topic_id(LocalDisk(), bad) is None
    with pytest.raises(StorageError, match=r"partition\.json is damaged"):  # its replica raises it
        open_partition(bad)
    directory.close()


def test_a_part_of_a_partitions_name_that_a_power_loss_left_is_written_again(path: str) -> None:
    with closing(DataDirectory.open(environment(), path)) as directory:
        at = directory.partition_path("flights", 0)
        open_partition(at).close()
        Path(at, "partition.json").write_bytes(Path(at, "partition.json").read_bytes()[:20])
        open_partition(at).close()
        assert [found for _, found in directory.partitions()] == [at]


def test_what_a_process_began_to_make_is_unfinished_and_what_holds_more_is_not(path: str) -> None:
    with closing(DataDirectory.open(environment(), path)) as directory:
        made, lost, torn, empty, file, cleaned = (
            Path(directory.partition_path("flights", number)) for number in range(6)
        )
        for one in (made, lost, torn):
            open_partition(str(one)).close()
        (lost / "partition.json").unlink()
        (lost / "00000000000000000000.log").touch()
        (torn / "partition.json").write_bytes(b"{")
        empty.mkdir()
        file.touch()
        Path(path, "notes").mkdir()
        # A compaction that still ran when the partition had been removed made its directory again.
        (cleaned / "cleaning").mkdir(parents=True)
        (cleaned / "cleaning" / "00000000000000000000.log").touch()
        assert directory.unfinished() == [str(torn), str(empty), str(cleaned)]
        assert directory.unfinished(except_for=[("flights", 2), ("flights", 5)]) == [str(empty)]


def test_what_is_to_be_removed_is_found_again_and_what_is_put_aside_is_left_alone(
    path: str,
) -> None:
    directory = DataDirectory.open(environment(), path)
    at = directory.partition_path("flights", 0)
    open_partition(at).close()
    directory.quarantine(at)
    assert directory.leftovers() == []
    for name in ("flights-0.t1.removed", "flights-0.t1.2.removed"):
        open_partition(at).close()
        assert directory.quarantine(at, to_remove=True) == f"{path}/quarantine/{name}"
    assert len(directory.leftovers()) == 2
    for left in directory.leftovers():
        LocalDisk().remove_tree(left)
    assert directory.leftovers() == []
    assert LocalDisk().exists(f"{path}/quarantine/flights-0.t1")
    directory.close()


@pytest.mark.parametrize("seed", range(40))
def test_a_crash_while_formatting_or_starting_leaves_a_directory_that_starts(seed: int) -> None:
    path = "/data/broker-0"
    with World(seed) as world:
        rng, host = world.random, world.host()
        counter, is_formatted = 0, False
        for _ in range(15):
            process = host.process("broker")
            disk = process.environment.disk
            process.kill_at_disk_operation(rng.randint(1, 25), power_loss=rng.random() < 0.7)
            try:
                meta = read_meta(disk, path)
                assert meta is not None or not is_formatted
                if meta is None:
                    format_directory(
                        process.environment, path, cluster_id="c", broker=0, secret=SECRET
                    )
                is_formatted = True
                directory = DataDirectory.open(process.environment, path, "c")
                assert directory.meta.start_counter > counter
                assert directory.secret == SECRET
                counter = directory.meta.start_counter
                directory.write_endpoint("h", 1)
                host.power_loss()
            except ProcessDied:
                pass
            host.boot()

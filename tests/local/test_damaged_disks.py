"""Disks that change their bytes: whichever byte changes, readers get every record, and the replica
on that disk is copied again from the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayq.client.queues import partition_consumer
from rayq.errors import CorruptBatchError
from rayq.storage.batch import BatchHeader, encode_batch, split_batches
from rayq.storage.disk import LocalDisk
from rayq.storage.verify import verify
from rayq.testing import LocalCluster
from tests.local.group_support import OFFSETS_TOPIC
from tests.local.support import (
    FAST,
    eventually,
    leader_of,
    partition_of,
    place,
    produce_raw,
    read_all,
    values,
    wait_in_sync,
)

BATCHES, RECORDS = 50, 5
EVERYTHING = [b"%d" % number for number in range(BATCHES * RECORDS)]
Where = Callable[[BatchHeader], int]
HEADER: dict[str, Where] = {
    "base offset": lambda header: 0,
    "length": lambda header: 9,
    "magic": lambda header: 16,
    "body CRC": lambda header: 29,
    "attributes": lambda header: 33,
    "record count": lambda header: 35,
    "last offset": lambda header: 39,
}
BODY: dict[str, Where] = {
    "first byte": lambda header: header.length // 2,
    "last byte": lambda header: header.length - 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def cluster(data: Path) -> Iterator[LocalCluster]:
    with LocalCluster(3, data_dir=data, **FAST) as cluster:
        yield cluster


def filled(cluster: LocalCluster, topic: str, *, replicas: int = 3) -> str:
    """A topic of many small segments, whose records are numbered."""
    cluster.create_topic(
        topic, replication_factor=replicas, segment_bytes=1024, index_interval_bytes=128
    )
    for first in range(0, BATCHES * RECORDS, RECORDS):
        values = [b"%d" % number for number in range(first, first + RECORDS)]
        produce_raw(cluster, topic, encode_batch(values, timestamps_ms=first))
    wait_in_sync(cluster, topic, replicas)
    return topic


def flip(data: Path, broker: int, topic: str, segment: int, byte: Where, suffix: str = ".log") -> (
    tuple[int, int]
):
    """Flips a bit in the middle batch of a segment, in the file that the replica has open. Returns
    the batch's offsets."""
    path = sorted((data / f"broker-{broker}" / f"{topic}-0").glob("*.log"))[segment]
    batches = list(split_batches(path.read_bytes()))
    position, header = batches[len(batches) // 2]
    path = path.with_suffix(suffix)
    at = byte(header) + (position if suffix == ".log" else 0)
    with path.open("r+b") as file:
        (old,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([old ^ 4]), at)
    return header.base_offset, header.next_offset


def is_sound(data: Path, topic: str, *, at_least: int = 3) -> bool:
    try:
        reports = [
            report
            for broker in range(3)
            for report in verify(LocalDisk(), str(data / f"broker-{broker}" / f"{topic}-0"))
        ]
    except FileNotFoundError:  # It is being put aside at this moment.
        return False
    return sum(not report.damage for report in reports) >= at_least


@pytest.mark.parametrize("part", [*HEADER, *BODY])
def test_a_flipped_bit_on_the_leaders_disk_costs_readers_nothing_and_is_mended(
    cluster: LocalCluster, data: Path, part: str
) -> None:
    topic = filled(cluster, f"t-{part.replace(' ', '-')}")
    damaged = leader_of(cluster, topic)
    flip(data, damaged, topic, 2, {**HEADER, **BODY}[part])
    assert values(read_all(cluster, topic)) == EVERYTHING
    eventually(lambda: is_sound(data, topic), "the damaged log is copied again")
    wait_in_sync(cluster, topic)


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_flipped_bit_in_an_index_costs_nothing(
    cluster: LocalCluster, data: Path, suffix: str
) -> None:
    topic = filled(cluster, f"t{suffix}")
    flip(data, leader_of(cluster, topic), topic, 2, lambda header: 9, suffix)
    assert values(read_all(cluster, topic)) == EVERYTHING


def test_a_damaged_log_that_others_had_to_count_on_is_copied_again_once_they_need_not(
    cluster: LocalCluster, data: Path
) -> None:
    topic = filled(cluster, "counted-on")
    damaged = leader_of(cluster, topic)
    away = next(broker for broker in range(3) if broker != damaged)
    cluster.kill_broker(away)
    eventually(lambda: len(partition_of(cluster, topic).isr) == 2, "two are in sync")
    flip(data, damaged, topic, 2, HEADER["base offset"])
    assert values(read_all(cluster, topic)) == EVERYTHING
    wait_in_sync(cluster, topic, 2)
    assert not is_sound(data, topic), "the only other replica in sync is no ground to give it up"
    cluster.start_broker(away)
    eventually(lambda: is_sound(data, topic), "it is copied again though nobody read it")
    wait_in_sync(cluster, topic)


@pytest.mark.thorough
def test_three_replicas_damaged_at_different_places_lose_nothing(
    cluster: LocalCluster, data: Path
) -> None:
    topic = filled(cluster, "three")
    for broker in range(3):
        flip(data, broker, topic, 1 + broker, HEADER["base offset"])

    def are_two_sound() -> bool:
        """Damage is found by reading. No reader reads the third replica, which follows by then."""
        assert values(read_all(cluster, topic)) == EVERYTHING
        wait_in_sync(cluster, topic)
        return is_sound(data, topic, at_least=2)

    eventually(are_two_sound, "two are copied again")


@pytest.mark.parametrize("at", [0, 39, 70])
def test_a_group_whose_coordinator_finds_its_log_damaged_gets_another(
    cluster: LocalCluster, data: Path, at: int
) -> None:
    topic = filled(cluster, f"grouped-{at}")
    with cluster.consumer(topic, group=topic, auto_offset_reset="earliest") as consumer:
        assert consumer.poll(60)
        consumer.commit()
        committed = consumer.position((topic, 0))
    (name,) = {
        path.parent.name
        for path in data.glob(f"broker-*/{OFFSETS_TOPIC}-*/*.log")
        if path.stat().st_size
    }
    partition = int(name.rpartition("-")[2])

    def have_all_copied() -> bool:
        logs = list(data.glob(f"broker-*/{name}/*.log"))
        return len({path.read_bytes() for path in logs}) == 1 and len(logs) == 3

    eventually(have_all_copied, "what an earlier test damaged is copied again")
    info = wait_in_sync(cluster, OFFSETS_TOPIC, partition=partition)
    assert info.leader is not None
    next_one = next(one.broker for one in info.replicas if one.broker != info.leader)
    (path,) = (data / f"broker-{next_one}" / name).glob("*.log")
    with path.open("r+b") as file:
        (old,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([old ^ 4]), at)
    cluster.kill_replica(OFFSETS_TOPIC, partition, info.leader)
    with cluster.consumer(topic, group=topic) as consumer:
        assert consumer.committed([(topic, 0)]) == {(topic, 0): committed}

    def is_mended() -> bool:
        try:
            return path.read_bytes()[at] == old
        except (FileNotFoundError, IndexError):
            return False

    eventually(is_mended, "what was damaged is copied again")


@pytest.mark.parametrize("part", ["base offset", "last offset", "first byte"])
def test_a_replica_that_is_alone_goes_on_without_what_is_damaged(
    cluster: LocalCluster, data: Path, part: str
) -> None:
    topic = filled(cluster, f"alone-{part.replace(' ', '-')}", replicas=1)
    leader = leader_of(cluster, topic)
    first, end = flip(data, leader, topic, 2, {**HEADER, **BODY}[part])
    found: list[bytes | None] = []
    with cluster.consumer() as consumer:
        consumer.assign([(topic, 0)])
        consumer.seek((topic, 0), 0)
        is_told = False
        while len(found) < len(EVERYTHING) - RECORDS:
            try:
                found += values(consumer.poll(60))
            except CorruptBatchError:
                assert consumer.position((topic, 0)) == first
                consumer.seek((topic, 0), end)
                is_told = True
    assert is_told
    assert found == EVERYTHING[:first] + EVERYTHING[end:]
    more = produce_raw(cluster, topic, encode_batch([b"more"], timestamps_ms=1))
    assert more.base_offset == len(EVERYTHING)
    assert leader_of(cluster, topic) == leader


def test_others_copy_a_damaged_log_once_what_is_damaged_was_deleted(
    cluster: LocalCluster, data: Path
) -> None:
    topic = filled(cluster, "deleted", replicas=1)
    leader = leader_of(cluster, topic)
    other = (leader + 1) % 3
    first, end = flip(data, leader, topic, 2, HEADER["base offset"])
    cluster.admin.reassign_partitions({place(topic): [other]}, wait=False)

    def copied() -> int:
        path = data / f"broker-{other}" / f"{topic}-0"
        reports = verify(LocalDisk(), str(path)) if path.exists() else []
        return (reports[0].end_offset or 0) if reports else 0

    eventually(lambda: copied() == first, "what is sound before the damage is copied")
    cluster.admin.delete_records({place(topic): end})
    eventually(lambda: leader_of(cluster, topic) == other, "the move is done")
    assert values(read_all(cluster, topic)) == EVERYTHING[end:]


def test_a_leader_under_min_insync_deletes_what_is_damaged_so_that_another_copies_the_rest(
    cluster: LocalCluster, data: Path
) -> None:
    topic = filled(cluster, "under-min-insync", replicas=2)
    info = partition_of(cluster, topic)
    leader = info.leader
    (other,) = {one.broker for one in info.replicas} - {leader}
    path = data / f"broker-{other}" / f"{topic}-0"
    assert leader is not None
    cluster.kill_broker(other)
    eventually(lambda: partition_of(cluster, topic).isr == [leader], "the leader is alone")
    first, end = flip(data, leader, topic, 2, HEADER["base offset"])
    shutil.rmtree(path)
    cluster.start_broker(other)

    def copied() -> int:
        reports = verify(LocalDisk(), str(path)) if path.exists() else []
        return (reports[0].end_offset or 0) if reports else 0

    eventually(lambda: copied() == first, "what is sound before the damage is copied")
    assert cluster.admin.delete_records({place(topic): end}) == {place(topic): end}
    wait_in_sync(cluster, topic, 2)
    assert values(read_all(cluster, topic)) == EVERYTHING[end:]


def test_a_leader_that_was_alone_with_damage_has_no_trouble_once_it_is_deleted(
    cluster: LocalCluster, data: Path
) -> None:
    topic = filled(cluster, "no-trouble", replicas=1)
    first, _ = flip(data, leader_of(cluster, topic), topic, 2, HEADER["base offset"])

    def trouble() -> str | None:
        (replica,) = partition_of(cluster, topic).replicas
        return replica.trouble

    with cluster.consumer() as consumer:
        consumer.assign([(topic, 0)])
        consumer.seek((topic, 0), first)
        with pytest.raises(CorruptBatchError):
            consumer.poll(60)
    assert "continues without what is damaged" in (trouble() or "")
    rest = EVERYTHING[-10:]
    cluster.admin.delete_records({place(topic): len(EVERYTHING) - len(rest)})
    assert values(read_all(cluster, topic)) == rest
    assert trouble() is None


@pytest.mark.parametrize("ordered_by_key", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_queue_hands_out_all_but_what_no_replica_has_which_becomes_dead_letters(
    cluster: LocalCluster,
    data: Path,
    replicas: int,
    ordered_by_key: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition_consumer, "BACKOFF_MAX_S", 0.05)
    name = f"queue-{replicas}-{ordered_by_key}".lower()
    topic = filled(cluster, name, replicas=replicas)
    first, end = flip(data, leader_of(cluster, topic), topic, 2, BODY["first byte"])
    lost = range(first, end) if replicas == 1 else range(0)
    found: list[bytes] = []
    with cluster.create_queue(name, topic=topic, ordered_by_key=ordered_by_key) as queue:

        def take() -> bool:
            for task in queue.take(100, 0.1):
                found.append(task.value or b"")
                task.ack()
            return len(found) >= len(EVERYTHING) - len(lost)

        eventually(take, "all that is whole was handed out")
        dead = f"{name}.dead"
        eventually(
            lambda: bool(take()) and len(read_all(cluster, dead)) >= len(lost), "all else is dead"
        )
    assert sorted(found) == sorted(set(EVERYTHING) - {b"%d" % offset for offset in lost})
    sources = [dict(one.headers)["rayq.source"] for one in read_all(cluster, dead)]
    assert sorted(sources) == sorted(b"%s/0/%d" % (topic.encode(), one) for one in lost)

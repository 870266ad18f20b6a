"""Partitions move between brokers under load; brokers are drained, removed, replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayq import TopicPartition
from rayq.actors.broker import replica_processes
from rayq.actors.replica import follower
from rayq.client.admin.health import min_insync_of, partition_state
from rayq.errors import (
    BrokerInUseError,
    InvalidReassignmentError,
    InvalidReplicationFactorError,
    NoReassignmentError,
    ReassignmentInProgressError,
    TimeoutError,
    UnknownBrokerError,
    UnknownTopicError,
)
from rayq.records import DrainProgress
from rayq.testing import LocalCluster
from tests.local.faulty_disk import Faults
from tests.local.support import (
    FAST,
    Load,
    eventually,
    leader_of,
    partition_of,
    read_all,
    values,
)

BROKERS = 4


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with pytest.MonkeyPatch.context() as patch:
        made = Faults()
        made.install(patch)
        yield made


@pytest.fixture(scope="module")
def four(faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Four brokers that stay alive. Replicas share processes, as with many partitions."""
    with LocalCluster(
        BROKERS, data_dir=tmp_path_factory.mktemp("four"), replicas_per_process=2, **FAST
    ) as cluster:
        yield cluster


@pytest.fixture
def fragile_four(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        BROKERS, data_dir=tmp_path / "data", replica_rebuild_delay_ms=1_000, **FAST
    ) as cluster:
        yield cluster


def replicas_of(cluster: LocalCluster, topic: str, partition: int = 0) -> list[int]:
    return [one.broker for one in partition_of(cluster, topic, partition).replicas]


def outsider(cluster: LocalCluster, topic: str) -> int:
    """A broker without a replica of the topic."""
    (broker,) = set(range(BROKERS)) - set(replicas_of(cluster, topic))
    return broker


def directory(cluster: LocalCluster, topic: str, broker: int) -> Path:
    return Path(cluster.data_dir) / f"broker-{broker}" / f"{topic}-0"


def fill(cluster: LocalCluster, topic: str, megabytes: int) -> None:
    with cluster.producer(compression_type="none") as producer:
        producer.send_many(topic, [b"." * 1024] * (1024 * megabytes)).result(60)


def test_a_partition_moves_under_load_and_its_old_directory_goes(four: LocalCluster) -> None:
    four.create_topic("moved", replication_factor=3)
    before = replicas_of(four, "moved")
    leader = leader_of(four, "moved")
    target = [outsider(four, "moved"), *(one for one in before if one != leader)]
    with Load(four, "moved") as load:
        four.admin.reassign_partitions({TopicPartition("moved", 0): target}, timeout_s=100)
        info = partition_of(four, "moved")
        assert [one.broker for one in info.replicas] == target
        assert sorted(info.isr) == sorted(target)
        assert info.leader in target and info.target == []
        load.wait_for_more()
        # Back again: the replica that returns is a new replica.
        four.admin.reassign_partitions({TopicPartition("moved", 0): before}, timeout_s=100)
        load.wait_for_more()
    assert load.failures() == []
    load.check()
    assert four.admin.list_reassignments() == []
    gone = directory(four, "moved", target[0])
    eventually(lambda: not gone.exists(), "the directory that was moved away is removed")
    eventually(
        lambda: not list((gone.parent / "quarantine").glob("*")), "and nothing is put aside"
    )


def test_a_broker_is_drained_under_load_and_takes_replicas_again(four: LocalCluster) -> None:
    for name, partitions in (("busy", 3), ("quiet", 2)):
        four.create_topic(name, partitions=partitions, replication_factor=3)
    with four.consumer("busy", group="readers", auto_offset_reset="earliest") as consumer:
        consumer.poll(timeout_s=0.2)  # makes rayq's own topic, too
    victim = leader_of(four, "busy")
    told: list[DrainProgress] = []
    plan = four.admin.plan_drain(victim)
    assert plan and all(victim not in target for target in plan.values())
    with Load(four, "busy") as load:
        four.admin.drain_broker(victim, concurrency=2, timeout_s=100, on_progress=told.append)
        load.wait_for_more()
    assert load.failures() == []
    load.check()
    assert told[-1].done >= len(plan) and told[-1].moving == told[-1].waiting == 0
    assert all(progress.moving <= 2 for progress in told)
    cluster = four.admin.describe_cluster()
    assert [one.broker for one in cluster.brokers if one.cordoned] == [victim]
    assert victim not in cluster.voters and len(cluster.voters) == 3
    assert four.admin.plan_drain(victim) == {}
    four.create_topic("later", partitions=2, replication_factor=3)
    assert all(victim not in replicas_of(four, "later", number) for number in (0, 1))
    with pytest.raises(InvalidReassignmentError, match="cannot be drained.*only the brokers"):
        four.admin.drain_broker(next(one for one in range(BROKERS) if one != victim))
    four.admin.undrain_broker(victim)
    plan = four.admin.plan_spread()
    assert any(victim in target for target in plan.values())
    four.admin.reassign_partitions(plan, timeout_s=100)
    assert four.admin.plan_spread() == {}
    load.check()


def test_a_throttled_move_is_slow_can_be_watched_hurried_and_cancelled(four: LocalCluster) -> None:
    four.create_topic("slow", replication_factor=3, segment_bytes=1 << 20)
    fill(four, "slow", 3)
    before = replicas_of(four, "slow")
    place, added = TopicPartition("slow", 0), outsider(four, "slow")
    target = [added, *before[:2]]
    with pytest.raises(TimeoutError, match=rf"broker {added}.*They continue"):
        four.admin.reassign_partitions(
            {place: target}, throttle_bytes_per_s=256 * 1024, timeout_s=1.5
        )
    (move,) = four.admin.list_reassignments()
    assert (move.topic_partition, move.target) == (place, target)
    assert (move.adding, move.removing) == ([added], [before[2]])
    assert sorted(move.replicas) == sorted({*before, added})
    assert move.throttle_bytes_per_s == 256 * 1024
    eventually(
        lambda: "has copied up to offset" in (four.admin.list_reassignments()[0].waits_for or ""),
        "it says how far it is",
    )
    with pytest.raises(ReassignmentInProgressError):
        four.admin.reassign_partitions({place: [added, *before[1:]]})
    assert four.admin.cancel_reassignments() == [place]
    assert replicas_of(four, "slow") == before
    with pytest.raises(NoReassignmentError):
        four.admin.cancel_reassignments([place])
    eventually(lambda: not directory(four, "slow", added).exists(), "the copy is removed")
    four.admin.reassign_partitions({place: target}, throttle_bytes_per_s=64 * 1024, wait=False)
    four.admin.reassign_partitions({place: target}, timeout_s=100)  # Without the throttle.
    assert len(read_all(four, "slow")) == 3 * 1024


def test_a_throttled_replica_that_is_in_sync_keeps_no_writer_waiting(
    four: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "THROTTLE_PAUSE_MAX_S", 60.0)
    four.create_topic("hasty", replication_factor=3)
    leader, *others = replicas_of(four, "hasty")
    with four.producer(compression_type="none", batch_size=512 * 1024) as producer:
        producer.send("hasty", b"." * 400 * 1024).result(60)
        # One fetch copies all records, and the throttle wants a pause of a minute after it.
        four.admin.reassign_partitions(
            {TopicPartition("hasty", 0): [leader, others[0], outsider(four, "hasty")]},
            throttle_bytes_per_s=1024,
            timeout_s=100,
        )
        began_s = time.monotonic()
        producer.send("hasty", b"next").result(60)
        assert time.monotonic() - began_s < 30


def test_a_topic_that_goes_and_comes_while_it_moves_begins_empty_and_leaves_nothing(
    four: LocalCluster,
) -> None:
    four.create_topic("comes", replication_factor=3, segment_bytes=1 << 20)
    fill(four, "comes", 1)
    with four.consumer("comes", group="waits", auto_offset_reset="earliest") as consumer:
        assert consumer.poll(timeout_s=60)
        consumer.commit()
    target = [outsider(four, "comes"), *replicas_of(four, "comes")[:2]]
    four.admin.reassign_partitions(
        {TopicPartition("comes", 0): target}, throttle_bytes_per_s=32 * 1024, wait=False
    )
    four.admin.delete_topic("comes")
    assert four.admin.list_reassignments() == []
    four.create_topic("comes", partitions=2, replication_factor=3)
    with four.producer() as producer:
        for partition in (0, 1):
            producer.send("comes", b"new", partition=partition).result(60)
    with four.consumer("comes", group="waits", auto_offset_reset="earliest") as consumer:
        found: list[bytes | None] = []
        while len(found) < 2:
            found += values(consumer.poll(timeout_s=60))
    assert found == [b"new", b"new"]
    placed = {
        (broker, f"comes-{partition}")
        for partition in (0, 1)
        for broker in replicas_of(four, "comes", partition)
    }
    root = Path(four.data_dir)
    eventually(
        lambda: {(int(path.parent.name[-1]), path.name) for path in root.glob("broker-*/comes-*")}
        == placed
        and not list(root.glob("broker-*/quarantine/comes-*")),
        "only the new topic has directories",
    )


def test_who_waits_for_a_move_that_another_cancels_is_told(four: LocalCluster) -> None:
    four.create_topic("undone", replication_factor=3, segment_bytes=1 << 20)
    fill(four, "undone", 1)
    place = TopicPartition("undone", 0)
    target = [outsider(four, "undone"), *replicas_of(four, "undone")[:2]]

    def cancel() -> None:
        eventually(lambda: bool(four.admin.list_reassignments()), "the move begins")
        four.admin.cancel_reassignments([place])

    other = threading.Thread(target=cancel)
    other.start()
    with pytest.raises(NoReassignmentError, match="was cancelled"):
        four.admin.reassign_partitions({place: target}, throttle_bytes_per_s=32 * 1024)
    other.join()


def test_impossible_moves_are_refused_with_what_is_possible(four: LocalCluster) -> None:
    four.create_topic("stays", replication_factor=3)
    place = TopicPartition("stays", 0)
    for target, why in [([0, 1, 7], "no broker 7"), ([0, 0, 1], "twice"), ([0, 1], "name 3")]:
        with pytest.raises(InvalidReassignmentError, match=why):
            four.admin.reassign_partitions({place: target})
    with pytest.raises(UnknownTopicError):
        four.admin.reassign_partitions({TopicPartition("nope", 0): [0, 1, 2]})
    with pytest.raises(UnknownTopicError):
        four.admin.reassign_partitions({TopicPartition("stays", 9): [0, 1, 2]})
    for call in (four.admin.plan_drain, four.admin.drain_broker, four.admin.undrain_broker):
        with pytest.raises(UnknownBrokerError, match="no broker 7"):
            call(7)
    with pytest.raises(BrokerInUseError, match="drain it first"):
        four.admin.remove_broker(leader_of(four, "stays"))
    four.admin.reassign_partitions({})


def test_a_move_to_a_full_disk_waits_says_so_and_can_be_cancelled(
    faults: Faults, four: LocalCluster
) -> None:
    four.create_topic("big", replication_factor=3, segment_bytes=1 << 20)
    fill(four, "big", 1)
    before = replicas_of(four, "big")
    place, added = TopicPartition("big", 0), outsider(four, "big")
    faults.full.add(f"broker-{added}/big-0/0")
    try:
        four.admin.reassign_partitions({place: [added, *before[:2]]}, wait=False)

        def says_so() -> bool:
            waits = [one.waits_for or "" for one in four.admin.list_reassignments()]
            return any(f"broker {added}" in one and "no room" in one.lower() for one in waits)

        eventually(says_so, "the move says that the disk is full")
        assert set(partition_of(four, "big").isr) == set(before)
        four.admin.cancel_reassignments([place])
        assert replicas_of(four, "big") == before
        four.admin.reassign_partitions({place: [added, *before[:2]]}, wait=False)
        eventually(says_so, "the move says that the disk is full")
    finally:
        faults.full.clear()
    four.admin.reassign_partitions({place: [added, *before[:2]]}, timeout_s=100)
    assert len(read_all(four, "big")) == 1024


def test_a_group_goes_on_while_its_coordinator_moves(four: LocalCluster) -> None:
    four.create_topic("orders", replication_factor=3)
    offsets = TopicPartition("__consumer_offsets", 0)
    with four.consumer(
        "orders", group="billing", auto_offset_reset="earliest"
    ) as consumer, four.producer() as producer:
        seen: list[bytes | None] = []
        for number in range(4):
            producer.send("orders", b"%d" % number).result(60)
            while len(seen) <= number:
                seen += values(consumer.poll(timeout_s=1.0))
            replicas = replicas_of(four, "__consumer_offsets")
            target = [outsider(four, "__consumer_offsets"), *replicas[1:]]
            four.admin.reassign_partitions({offsets: target}, timeout_s=100)
            consumer.commit()
    assert seen == [b"0", b"1", b"2", b"3"]
    group = four.admin.describe_group("billing")
    assert group.partitions[TopicPartition("orders", 0)].offset == 4


def test_a_compacted_log_moves_with_its_gaps(four: LocalCluster) -> None:
    four.create_topic(
        "table",
        replication_factor=3,
        cleanup_policy="compact",
        segment_bytes=4096,
        min_cleanable_dirty_ratio=0.01,
    )
    with four.producer(compression_type="none", batch_size=512) as producer:
        for number in range(600):
            producer.send("table", b"%d" % number + b"." * 50, key=b"%d" % (number % 5))
    before = replicas_of(four, "table")
    target = [outsider(four, "table"), *before[:2]]
    four.admin.reassign_partitions({TopicPartition("table", 0): target}, timeout_s=100)
    latest = {record.key: record.value for record in read_all(four, "table")}
    assert latest == {b"%d" % (n % 5): b"%d" % n + b"." * 50 for n in range(595, 600)}


def test_a_dead_brokers_replicas_are_rebuilt_and_what_it_brings_back_is_removed(
    fragile_four: LocalCluster,
) -> None:
    cluster = fragile_four
    cluster.create_topic("t", replication_factor=3)
    dead = replicas_of(cluster, "t")[0]
    spare = outsider(cluster, "t")
    with Load(cluster, "t") as load:
        cluster.kill_broker(dead)
        eventually(
            lambda: sorted(partition_of(cluster, "t").isr)
            == sorted(set(range(BROKERS)) - {dead})
            and dead not in replicas_of(cluster, "t"),
            "the replica is rebuilt elsewhere",
        )
        load.wait_for_more()
        assert directory(cluster, "t", dead).exists()
        # A process died just when it made a directory, for a replica that is placed elsewhere now.
        begun = directory(cluster, "begun", dead)
        begun.mkdir()
        (begun / "lock").touch()
        cluster.start_broker(dead)
        eventually(lambda: not begun.exists(), "the directory without a log is removed")
        eventually(
            lambda: not directory(cluster, "t", dead).exists(), "the old directory is removed"
        )
        # The broker gets the partition again, and begins from nothing.
        target = [dead, *(one for one in replicas_of(cluster, "t") if one != spare)]
        cluster.admin.reassign_partitions({TopicPartition("t", 0): target}, timeout_s=100)
        load.wait_for_more()
    assert load.failures() == []
    load.check()


def test_a_drained_broker_is_stopped_and_removed_and_may_join_again(tmp_path: Path) -> None:
    with LocalCluster(BROKERS, data_dir=tmp_path / "data", **FAST) as cluster:
        cluster.create_topic("t", partitions=2, replication_factor=3)
        with Load(cluster, "t") as load:
            with pytest.raises(BrokerInUseError, match="drain it first"):
                cluster.stop_broker(leader_of(cluster, "t"))
            cluster.admin.drain_broker(2, timeout_s=100)
            with pytest.raises(BrokerInUseError, match="is running"):
                cluster.admin.remove_broker(2)
            with pytest.raises(UnknownBrokerError):
                cluster.stop_broker(9)
            cluster.stop_broker(2)
            cluster.admin.remove_broker(2)
            assert [one.broker for one in cluster.admin.describe_cluster().brokers] == [0, 1, 3]
            with pytest.raises(UnknownBrokerError):
                cluster.admin.remove_broker(2)
            cluster.start_broker(2)
            eventually(
                lambda: [
                    (one.broker, one.live, one.cordoned)
                    for one in cluster.admin.describe_cluster().brokers
                ][2] == (2, True, False),
                "it joins again",
            )
            load.wait_for_more()
        assert load.failures() == []
        load.check()


def test_the_last_broker_cannot_be_drained_nor_one_of_too_few(tmp_path: Path) -> None:
    with LocalCluster(2, data_dir=tmp_path / "data", **FAST) as cluster:
        cluster.create_topic("t", replication_factor=2)
        with pytest.raises(InvalidReassignmentError, match="with 2 replicas.*Add a broker first"):
            cluster.admin.drain_broker(1)
        cluster.admin.delete_topic("t")
        cluster.create_topic("alone", replication_factor=1)
        with cluster.producer() as producer:
            producer.send("alone", b"kept").result(60)
        leader = leader_of(cluster, "alone")
        cluster.admin.drain_broker(leader, timeout_s=100)
        assert leader_of(cluster, "alone") == 1 - leader
        with pytest.raises(InvalidReassignmentError, match="no other broker"):
            cluster.admin.drain_broker(1 - leader)
        assert values(read_all(cluster, "alone")) == [b"kept"]
        eventually(
            lambda: cluster.admin.describe_cluster().voters == [1 - leader],
            "the only vote goes to the other",
        )


def test_a_move_goes_on_after_a_full_stop(tmp_path: Path) -> None:
    place = TopicPartition("t", 0)
    with LocalCluster(BROKERS, data_dir=tmp_path / "data", **FAST) as cluster:
        cluster.create_topic("t", replication_factor=3)
        fill(cluster, "t", 1)
        before = replicas_of(cluster, "t")
        target = [outsider(cluster, "t"), *before[:2]]
        cluster.admin.reassign_partitions({place: target}, throttle_bytes_per_s=1024, wait=False)
        began_s = time.monotonic()
    # Though the new replica has only just started.
    assert time.monotonic() - began_s < replica_processes.STOP_TIMEOUT_S
    with LocalCluster(BROKERS, data_dir=tmp_path / "data", **FAST) as cluster:
        (move,) = cluster.admin.list_reassignments()
        assert (move.topic_partition, move.target) == (place, target)
        cluster.admin.reassign_partitions({place: target}, timeout_s=100)
        assert replicas_of(cluster, "t") == target
        assert len(read_all(cluster, "t")) == 1024


def test_the_replication_factor_goes_up_and_down_under_writes(four: LocalCluster) -> None:
    four.create_topic("grows", partitions=2, replication_factor=1)
    leaders = [leader_of(four, "grows", number) for number in (0, 1)]
    with Load(four, "grows") as load:
        for factor, min_insync in ((3, 2), (2, 2), (3, 2), (1, 1)):
            four.admin.set_replication_factor("grows", factor, timeout_s=100)
            info = four.admin.describe_topic("grows")
            for partition in info.partitions:
                assert len(partition.replicas) == len(partition.isr) == factor
                assert partition_state(partition, min_insync) == "in sync"
                assert min_insync_of(info, partition) == min_insync
            assert [one.leader for one in info.partitions] == leaders
            load.wait_for_more()
        four.admin.set_replication_factor("grows", 3, throttle_bytes_per_s=1 << 20)
        load.wait_for_more()
    assert load.failures() == []
    load.check()
    four.admin.create_partitions("grows", 3)
    assert len(replicas_of(four, "grows", 2)) == 3
    with pytest.raises(InvalidReplicationFactorError, match="Add brokers"):
        four.admin.set_replication_factor("grows", 5)
    with pytest.raises(TypeError, match="replication_factor must be an int, not bool"):
        four.admin.set_replication_factor("grows", True)
    with pytest.raises(UnknownTopicError):
        four.admin.set_replication_factor("nope", 1)


def test_a_group_of_a_cluster_of_one_broker_is_made_safe_when_others_have_joined(
    tmp_path: Path,
) -> None:
    with LocalCluster(3, data_dir=tmp_path / "data", **FAST) as cluster:
        for broker in (1, 2):
            cluster.admin.drain_broker(broker, timeout_s=100)
        cluster.create_topic("t")
        with cluster.producer() as producer:
            producer.send("t", b"before").result(60)
        with cluster.consumer("t", group="g", auto_offset_reset="earliest") as consumer:
            assert consumer.poll(timeout_s=100)
            consumer.commit()
        names = cluster.admin.list_topics(internal=True)
        assert [replicas_of(cluster, name) for name in names] == [[0], [0]]
        for broker in (1, 2):
            cluster.admin.undrain_broker(broker)
        for name in names:
            cluster.admin.set_replication_factor(name, 3, timeout_s=100)
        cluster.kill_broker(0)
        assert cluster.admin.describe_group("g").lag == 0
        assert values(read_all(cluster, "t")) == [b"before"]

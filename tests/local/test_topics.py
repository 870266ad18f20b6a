"""Topics: create, delete, grow, configure, describe, elect; retention and deleted records."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import rayq
from rayq.errors import (
    InvalidPartitionsError,
    InvalidReplicationFactorError,
    InvalidTopicError,
    ReplicaLimitError,
    TopicExistsError,
    UnknownTopicError,
)
from rayq.runtime.local_runtime import LocalHostProcess
from rayq.testing import LocalCluster
from tests.local.support import (
    FAST,
    eventually,
    leader_of,
    partition_of,
    place,
    read_all,
    values,
    wait_in_sync,
)

NewTopic = Callable[..., str]


def test_a_new_topic_has_leaders_and_full_in_sync_sets(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=3, retention_ms=1_000_000)
    assert topic in cluster.admin.list_topics()
    info = cluster.admin.describe_topic(topic)
    assert info.config["retention_ms"] == 1_000_000
    assert info.config["flush"] == "disk"
    assert len({one.leader for one in info.partitions}) == 3
    for number, partition in enumerate(info.partitions):
        assert partition.partition == number
        assert sorted(partition.isr) == [0, 1, 2]
        assert partition.leader_epoch >= 1 and partition.offline_reason is None
        for replica in partition.replicas:
            assert replica.pid == os.getpid()
            assert (replica.log_start_offset, replica.log_end_offset) == (0, 0)


def test_an_event_loop_administers_without_threads(cluster: LocalCluster) -> None:
    async def administer() -> None:
        async with cluster.async_admin() as admin:
            await admin.create_topic("by-a-loop", 2)
            assert "by-a-loop" in await admin.list_topics()
            info, own = await asyncio.gather(
                admin.describe_topic("by-a-loop"), admin.describe_cluster()
            )
            assert isinstance(info, rayq.TopicInfo) and isinstance(own, rayq.ClusterInfo)
            assert len(info.partitions) == 2
            await admin.delete_topic("by-a-loop")
        await admin.close()

    asyncio.run(administer())
    with pytest.raises(rayq.errors.InvalidRequestError, match="event loop"):
        cluster.async_admin()


def test_the_cluster_describes_itself(cluster: LocalCluster) -> None:
    info = cluster.admin.describe_cluster()
    assert [one.broker for one in info.brokers] == [0, 1, 2]
    assert all(one.live for one in info.brokers)
    assert info.voters == [0, 1, 2] and info.controller is not None
    assert info.cluster_id == cluster.cluster_id


def test_a_deleted_topic_is_gone_and_its_files_too(
    cluster: LocalCluster, shared: LocalCluster, topic: str
) -> None:
    with cluster.producer() as producer:
        producer.send(topic, b"x").result(60)
    roots = [Path(shared.data_dir, f"broker-{broker}") for broker in range(3)]
    assert all((root / f"{topic}-0").is_dir() for root in roots)
    cluster.admin.delete_topic(topic)
    assert topic not in cluster.admin.list_topics()
    with pytest.raises(UnknownTopicError, match=topic):
        cluster.admin.delete_topic(topic)
    with pytest.raises(UnknownTopicError, match=topic), cluster.producer() as producer:
        producer.send(topic, b"x").result(60)
    eventually(
        lambda: (
            not any(
                path for root in roots for path in root.rglob("*") if path.name.startswith(topic)
            )
        ),
        "the files are removed",
    )


def test_a_stop_just_after_a_topic_was_deleted_asks_none_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were killed, and the broker may not have noticed that yet."""
    was_killed = LocalHostProcess.wait_dead

    async def wait_dead_and_notice_late(process: LocalHostProcess) -> str:
        reason = await was_killed(process)
        await asyncio.sleep(60)
        return reason

    monkeypatch.setattr(LocalHostProcess, "wait_dead", wait_dead_and_notice_late)
    with LocalCluster(1, data_dir=tmp_path) as cluster:
        cluster.create_topic("t", replication_factor=1)
        assert cluster._servers is not None
        processes = list(cluster._servers.runtimes[0].processes.values())
        cluster.admin.delete_topic("t")
        eventually(lambda: not any(one.is_running for one in processes), "they are killed")
    assert processes
    assert [one.message for one in caplog.records if "did not stop by itself" in one.message] == []


def test_neither_a_broker_nor_a_process_remembers_the_replicas_of_deleted_topics(
    tmp_path: Path,
) -> None:
    """A process tells what it was told to close, when its broker is new: with each topic that there
    ever was, no request would hold that."""
    with LocalCluster(1, data_dir=tmp_path, replicas_per_process=100) as cluster:
        cluster.create_topic("stays")
        for number in range(3):
            cluster.create_topic(f"t{number}", partitions=2)
            cluster.admin.delete_topic(f"t{number}")
        servers = cluster._servers
        assert servers is not None
        (process,) = servers.runtimes[0].processes.values()
        assert isinstance(process, LocalHostProcess)
        host = process._replica_host
        eventually(lambda: len(host.replicas) == 1, "the replicas are closed")
        eventually(lambda: not host._let_go, "the process has forgotten them")
        (known,) = servers.brokers[0]._replicas._hosts
        assert not known.let_go


def test_a_topic_created_again_is_another_topic(cluster: LocalCluster, topic: str) -> None:
    producer = cluster.producer()
    producer.send(topic, b"old").result(60)
    consumer = cluster.consumer(topic, auto_offset_reset="earliest")
    assert values(consumer.poll(timeout_s=60)) == [b"old"]
    cluster.admin.delete_topic(topic)
    cluster.create_topic(topic)
    with pytest.raises(UnknownTopicError, match=topic):
        consumer.poll(timeout_s=60)
    assert read_all(cluster, topic) == []
    eventually(lambda: _sends(producer, topic), "the old producer finds the new topic")
    assert values(read_all(cluster, topic)) == [b"new"]
    consumer.close()
    producer.close()


def _sends(producer: rayq.client.producing.producer.Producer, topic: str) -> bool:
    try:
        return producer.send(topic, b"new").result(60).offset == 0
    except UnknownTopicError:
        return False


def test_partitions_can_be_added_and_never_removed(cluster: LocalCluster, topic: str) -> None:
    with cluster.producer() as producer:
        producer.send(topic, b"0").result(60)
        cluster.admin.create_partitions(topic, 3)
        assert len(cluster.admin.describe_topic(topic).partitions) == 3
        producer.send(topic, b"2", partition=2).result(60)
    assert {(record.partition, record.value) for record in read_all(cluster, topic)} == {
        (0, b"0"),
        (2, b"2"),
    }
    for total in (3, 2, 0):
        with pytest.raises(InvalidPartitionsError):
            cluster.admin.create_partitions(topic, total)


def test_a_changed_config_takes_effect_at_once(cluster: LocalCluster, topic: str) -> None:
    with cluster.producer() as producer:
        cluster.admin.alter_topic_config(topic, **{"max.message.bytes": 2000, "retention_ms": None})
        config = cluster.admin.describe_topic(topic).config
        assert (config["max_message_bytes"], config["retention_ms"]) == (2000, None)
        eventually(lambda: _is_too_large(producer, topic), "the new limit holds")


def _is_too_large(producer: rayq.client.producing.producer.Producer, topic: str) -> bool:
    try:
        producer.send(topic, os.urandom(3000)).result(60)
    except rayq.RecordTooLargeError:
        return True
    return False


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "../up", ".", "..", "ümlaut", "x" * 201, "__consumer_offsets"]
)
def test_an_illegal_or_reserved_name_is_refused(cluster: LocalCluster, name: str) -> None:
    with pytest.raises(InvalidTopicError):
        cluster.create_topic(name)


@pytest.mark.parametrize("partitions", [0, -1, 10_001])
def test_an_impossible_number_of_partitions_is_refused(
    cluster: LocalCluster, partitions: int
) -> None:
    with pytest.raises(InvalidPartitionsError, match=f"not {partitions}"):
        cluster.create_topic("refused", partitions)


@pytest.mark.parametrize("factor", [0, -1, 4])
def test_a_factor_above_the_brokers_is_refused(cluster: LocalCluster, factor: int) -> None:
    with pytest.raises(InvalidReplicationFactorError, match="live brokers"):
        cluster.create_topic("refused", replication_factor=factor)


def test_an_existing_topic_is_not_created_twice(cluster: LocalCluster, topic: str) -> None:
    with pytest.raises(TopicExistsError, match=topic):
        cluster.create_topic(topic)


def test_unknown_config_keys_are_refused_and_the_nearest_is_named(
    cluster: LocalCluster, topic: str
) -> None:
    with pytest.raises(rayq.ConfigError, match="'retention_ms'"):
        cluster.create_topic("refused", retentoin_ms=1)
    with pytest.raises(rayq.ConfigError, match="'segment_bytes'"):
        cluster.admin.alter_topic_config(topic, segment_byte=1)
    with pytest.raises(rayq.ConfigError, match="'linger_ms'"):
        cluster.producer(lingerms=1)
    with pytest.raises(rayq.ConfigError, match="'max_poll_records'"):
        cluster.consumer(topic, max_poll_record=1)
    with pytest.raises(rayq.ConfigError, match="'session_timeout_ms'"):
        LocalCluster(session_timeout=1)
    assert "refused" not in cluster.admin.list_topics()


def test_config_values_out_of_range_are_refused(cluster: LocalCluster, topic: str) -> None:
    with pytest.raises(rayq.ConfigError, match="min_insync_replicas 4 is above"):
        cluster.create_topic("refused", min_insync_replicas=4)
    with pytest.raises(rayq.ConfigError, match="min_insync_replicas 4 is above"):
        cluster.admin.alter_topic_config(topic, min_insync_replicas=4)
    with pytest.raises(rayq.ConfigError, match="segment_bytes"):
        cluster.create_topic("refused", segment_bytes=10)
    with pytest.raises(rayq.ConfigError, match="flush"):
        cluster.create_topic("refused", flush="never")
    assert "refused" not in cluster.admin.list_topics()


def test_a_broker_carries_no_more_replicas_than_allowed(tmp_path: Path) -> None:
    with LocalCluster(3, data_dir=tmp_path, max_replicas_per_broker=4, **FAST) as cluster:
        cluster.create_topic("first", partitions=3)
        with pytest.raises(ReplicaLimitError, match=r"3 \+ 2 = 5 .* max_replicas_per_broker = 4"):
            cluster.create_topic("second", partitions=2)
        with pytest.raises(ReplicaLimitError, match=r"3 \+ 2 = 5"):
            cluster.admin.create_partitions("first", 5)
        cluster.create_topic("third")
        assert cluster.admin.list_topics() == ["first", "third"]


def test_deleted_records_are_gone_on_every_replica(cluster: LocalCluster, topic: str) -> None:
    at = place(topic)
    with cluster.producer() as producer:
        producer.send_many(topic, [b"x"] * 50).result(60)
    assert cluster.admin.delete_records({at: 20}) == {at: 20}
    assert {one.log_start_offset for one in partition_of(cluster, topic).replicas} == {20}
    assert read_all(cluster, topic)[0].offset == 20
    assert cluster.admin.delete_records({at: 5}) == {at: 20}
    with pytest.raises(rayq.OffsetOutOfRangeError, match="51 is past the high watermark 50"):
        cluster.admin.delete_records({at: 51})
    with pytest.raises(rayq.RayqError, match="-1"):
        cluster.admin.delete_records({at: -1})
    assert cluster.admin.delete_records({at: None}) == {at: 50}
    assert read_all(cluster, topic) == []
    with cluster.producer() as producer:
        assert producer.send(topic, b"next").result(60).offset == 50


@pytest.mark.parametrize("limit", [{"retention_bytes": 20_000}, {"retention_ms": 200}])
def test_retention_deletes_closed_segments_in_the_background(
    cluster: LocalCluster, new_topic: NewTopic, limit: dict[str, int]
) -> None:
    topic = new_topic(segment_bytes=10_000, **limit)
    with cluster.producer(compression_type="none", batch_size=2000) as producer:
        # The timestamps are old, but retention goes by the time of the append.
        for _ in range(20):
            for _ in range(5):
                producer.send(topic, b"x" * 1000, timestamp_ms=1)
            producer.flush()

    def starts() -> set[int | None]:
        return {one.log_start_offset for one in partition_of(cluster, topic).replicas}

    eventually(lambda: len(starts()) == 1 and min(one or 0 for one in starts()) > 60, "it moves")
    found = read_all(cluster, topic)
    assert found[-1].offset == 99 and 0 < len(found) < 40


def test_old_timestamps_of_fresh_records_do_not_delete_them(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(segment_bytes=2000, retention_ms=3_600_000)
    with cluster.producer(compression_type="none") as producer:
        for _ in range(10):
            producer.send(topic, b"x" * 1000, timestamp_ms=1_356_998_400_000).result(60)
    # Another topic's segments, closed later, go first when retention has run.
    test_retention_deletes_closed_segments_in_the_background(
        cluster, new_topic, {"retention_ms": 200}
    )
    assert len(read_all(cluster, topic)) == 10


def test_elections_bring_back_the_preferred_leader(fragile: LocalCluster) -> None:
    fragile.create_topic("t")
    preferred = partition_of(fragile, "t").replicas[0].broker
    assert leader_of(fragile, "t") == preferred
    fragile.kill_replica("t", 0, preferred)
    eventually(lambda: leader_of(fragile, "t") != preferred, "another leads")
    wait_in_sync(fragile, "t")
    epoch = partition_of(fragile, "t").leader_epoch
    fragile.admin.elect_leaders("t")
    after = partition_of(fragile, "t")
    assert after.leader == preferred and after.leader_epoch > epoch
    with pytest.raises(UnknownTopicError):
        fragile.admin.elect_leaders("none")
    with pytest.raises(UnknownTopicError, match="partition 9"):
        fragile.admin.elect_leaders("t", [9])


def test_records_flow_under_flush_os(cluster: LocalCluster, new_topic: NewTopic) -> None:
    topic = new_topic(flush="os")
    with cluster.producer() as producer:
        producer.send_many(topic, [b"x"] * 1000).result(60)
    assert len(read_all(cluster, topic)) == 1000


def test_several_replicas_may_share_a_process(tmp_path: Path) -> None:
    with LocalCluster(3, data_dir=tmp_path, replicas_per_process=4, **FAST) as cluster:
        cluster.create_topic("t", partitions=6)
        info = cluster.admin.describe_topic("t")
        ends = {(one.host, one.port) for part in info.partitions for one in part.replicas}
        assert len(ends) == 6
        with cluster.producer() as producer:
            producer.send_many(
                "t", [b"%d" % n for n in range(600)], keys=[b"%d" % (n % 50) for n in range(600)]
            ).result(60)
            cluster.kill_replica("t", 0, leader_of(cluster, "t"))
            producer.send("t", b"after", partition=0).result(60)
        assert len(read_all(cluster, "t")) == 601

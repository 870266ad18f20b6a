"""`cluster.metrics()`, and the lines that elections and rebalances leave."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayq.client.admin.metrics import GroupLag
from rayq.errors import TimeoutError, TopicExistsError
from rayq.metrics import CATALOGUE, Sample
from rayq.testing import LocalCluster
from tests.local.support import eventually, leader_of, read_all, wait_in_sync

MESSAGE = b"x" * 1000


def select(samples: list[Sample], name: str, **labels: object) -> list[Sample]:
    wanted = {key: str(value) for key, value in labels.items()}.items()
    return [one for one in samples if one.name == name and wanted <= one.labels.items()]


def total(samples: list[Sample], name: str, **labels: object) -> float:
    return sum(one.value for one in select(samples, name, **labels))


def value(samples: list[Sample], name: str, **labels: object) -> float:
    (found,) = select(samples, name, **labels)
    return found.value


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three brokers whose figures no other test file changes. Each test has its own topic."""
    with LocalCluster(brokers=3, data_dir=tmp_path_factory.mktemp("metrics")) as cluster:
        yield cluster


def test_what_goes_in_and_out_is_counted_once(own: LocalCluster) -> None:
    own.create_topic("traffic", partitions=2)
    with own.producer(compression_type="none") as producer:
        producer.send_many("traffic", [MESSAGE] * 200).result(60)
    assert len(read_all(own, "traffic")) == 200
    wait_in_sync(own, "traffic")
    samples = own.metrics()
    assert total(samples, "rayq_records_in_total", topic="traffic") == 200
    assert total(samples, "rayq_records_out_total", topic="traffic") == 200
    stored = total(samples, "rayq_bytes_in_total", topic="traffic")
    assert 200_000 < stored < 220_000
    assert total(samples, "rayq_bytes_out_total", topic="traffic") == stored
    assert total(samples, "rayq_replication_bytes_in_total", topic="traffic") == 2 * stored
    assert total(samples, "rayq_replication_bytes_out_total", topic="traffic") == 2 * stored
    assert total(samples, "rayq_log_size_bytes", topic="traffic") == 3 * stored
    ends = [
        value(samples, "rayq_partition_latest_offset", topic="traffic", partition=number)
        for number in (0, 1)
    ]
    assert sum(ends) == 200
    for number in (0, 1):
        end = ends[number]
        replicas = select(samples, "rayq_log_end_offset", topic="traffic", partition=number)
        assert [one.value for one in replicas] == [end] * 3
    assert value(samples, "rayq_partition_in_sync_replicas", topic="traffic", partition=0) == 3
    lags = select(samples, "rayq_replica_lag", topic="traffic")
    assert len(lags) == 4 and all(one.value == 0 for one in lags)
    produced = select(samples, "rayq_request_seconds", request="Produce")
    assert sum(one.count or 0 for one in produced) >= 1
    assert all(one.count == 0 or 0 < (one.quantile(0.99) or 0) < 10 for one in produced)
    assert sum(one.count or 0 for one in select(samples, "rayq_log_flush_seconds")) >= 3
    assert sum(one.count or 0 for one in select(samples, "rayq_end_to_end_seconds")) >= 1


def test_a_healthy_cluster_says_so(tmp_path: Path) -> None:
    with LocalCluster(brokers=3, data_dir=tmp_path / "data") as cluster:
        cluster.create_topic("orders", partitions=4)
        samples = cluster.metrics()
    expected = {
        "rayq_active_brokers": 3,
        "rayq_fenced_brokers": 0,
        "rayq_topics": 1,
        "rayq_partitions": 4,
        "rayq_offline_partitions": 0,
        "rayq_underreplicated_partitions": 0,
        "rayq_under_min_isr_partitions": 0,
        "rayq_reassigning_partitions": 0,
        "rayq_unclean_leader_elections_total": 0,
        "rayq_leader_elections_total": 4,
    }
    assert {name: value(samples, name) for name in expected} == expected
    assert value(samples, "rayq_active_controller", broker="controller") == 1
    assert total(samples, "rayq_active_controller") == 1
    assert all(one.value > 0 for one in select(samples, "rayq_disk_free_bytes"))
    up = select(samples, "rayq_process_up")
    assert len(up) == 3 + 1 + 4 * 3 and all(one.value == 1 for one in up)
    for sample in samples:
        assert tuple(sample.labels) == CATALOGUE[sample.name].labels, sample.name
        assert sample.labels["cluster"] == "local"
    assert samples == sorted(samples, key=lambda one: (one.name, sorted(one.labels.items())))


def test_a_group_s_lag_is_told_in_records_and_in_seconds(own: LocalCluster) -> None:
    own.create_topic("behind")
    with own.producer() as producer:
        # The records' own timestamps are old: the time of the append counts.
        for number in range(10):
            producer.send("behind", b"%d" % number, timestamp_ms=1000).result(60)
    with own.consumer("behind", group="behind", auto_offset_reset="earliest") as consumer:
        seen = 0
        while seen < 4:
            seen += len(consumer.poll(timeout_s=1.0, max_records=4 - seen))
        consumer.commit()
        time.sleep(0.05)
        at = {"group": "behind", "topic": "behind", "partition": 0}
        samples = own.metrics()
        assert value(samples, "rayq_consumergroup_group_offset", **at) == 4
        assert value(samples, "rayq_consumergroup_group_lag", **at) == 6
        first = value(samples, "rayq_consumergroup_group_lag_seconds", **at)
        assert 0.05 <= first < 60
        assert value(samples, "rayq_consumergroup_group_max_lag", group="behind") == 6
        assert value(samples, "rayq_consumergroup_group_sum_lag", group="behind") == 6
        assert value(samples, "rayq_consumergroup_members", group="behind") == 1
        assert value(samples, "rayq_consumergroup_rebalances_total", group="behind") >= 1
        time.sleep(0.05)
        later = value(own.metrics(), "rayq_consumergroup_group_max_lag_seconds", group="behind")
        assert later >= first + 0.05
        while seen < 10:
            seen += len(consumer.poll(timeout_s=1.0))
        consumer.commit()
        samples = own.metrics()
        assert value(samples, "rayq_consumergroup_group_lag", **at) == 0
        assert value(samples, "rayq_consumergroup_group_lag_seconds", **at) == 0


def test_the_lag_of_a_position_below_the_log_start_is_that_of_the_oldest_record(
    own: LocalCluster,
) -> None:
    own.create_topic("cut")
    with own.producer() as producer:
        for number in range(5):
            producer.send("cut", b"%d" % number).result(60)
    own.admin.set_group_offsets("cut", "cut", to="earliest")
    place = next(iter(own.admin.describe_group("cut").partitions))
    own.admin.delete_records({place: 3})
    samples = own.metrics()
    assert value(samples, "rayq_consumergroup_group_lag", group="cut") == 5
    assert 0 < value(samples, "rayq_consumergroup_group_lag_seconds", group="cut") < 60


def test_figures_are_told_though_there_is_no_time_left_for_the_lag_of_groups(
    own: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def collect(*_: object, **__: object) -> list[Sample]:
        raise TimeoutError("a process hung")

    monkeypatch.setattr(GroupLag, "collect", collect)
    assert value(own.metrics(), "rayq_active_brokers") == 3


def test_figures_of_a_deleted_topic_go_with_it(own: LocalCluster) -> None:
    own.create_topic("deleted")
    assert select(own.metrics(), "rayq_log_end_offset", topic="deleted")
    own.admin.delete_topic("deleted")
    eventually(
        lambda: not [one for one in own.metrics() if "deleted" in one.labels.values()],
        "nothing is told of the deleted topic",
    )


def test_requests_that_are_refused_are_counted_by_their_error(own: LocalCluster) -> None:
    own.create_topic("twice")
    with pytest.raises(TopicExistsError):
        own.create_topic("twice")
    failed = select(own.metrics(), "rayq_failed_requests_total", error="TopicExistsError")
    # The broker that was asked counted the failure, and the controller before it.
    assert sum(one.value for one in failed if one.labels["broker"] == "controller") == 1
    assert sum(one.value for one in failed if one.labels["broker"] != "controller") == 1


def test_a_broker_that_dies_is_seen_in_the_figures_and_in_the_log(
    fragile: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rayq.actors")
    fragile.create_topic("orders", partitions=3)
    leader = leader_of(fragile, "orders")
    fragile.kill_broker(leader)
    assert min(one.value for one in select(fragile.metrics(), "rayq_process_up")) == 0
    eventually(lambda: value(fragile.metrics(), "rayq_fenced_brokers") == 1, "one is fenced")
    eventually(
        lambda: value(fragile.metrics(), "rayq_underreplicated_partitions") == 3,
        "all partitions lack a replica",
    )
    samples = fragile.metrics()
    assert value(samples, "rayq_offline_partitions") == 0
    assert value(samples, "rayq_under_min_isr_partitions") == 0
    assert total(samples, "rayq_isr_shrinks_total", replica=leader) == 3
    line = next(
        message
        for message in caplog.messages
        if message.startswith("leader_elected topic=orders partition=0 ")
        and "was=none" not in message
    )
    assert f"was={leader}" in line
    assert f'reason="broker {leader} was silent for ' in line
    fragile.start_broker(leader)
    wait_in_sync(fragile, "orders")
    eventually(
        lambda: value(fragile.metrics(), "rayq_underreplicated_partitions") == 0,
        "all replicas are back",
    )
    came_back = [
        message
        for message in caplog.messages
        if message.startswith("isr_expanded topic=orders ") and f"joined={leader} " in message
    ]
    assert len(came_back) == 3
    if not any(message.startswith("controller_ended") for message in caplog.messages):
        # (Another controller, where this machine stood still for a moment, counts again.)
        assert total(fragile.metrics(), "rayq_isr_expands_total", replica=leader) == 3


def test_whoever_hosts_the_controller_says_so(fragile: LocalCluster) -> None:
    fragile.kill_controller()

    def hosts() -> list[str]:
        found = select(fragile.metrics(), "rayq_active_controller")
        return [one.labels["broker"] for one in found if one.value == 1]

    eventually(lambda: hosts() not in ([], ["controller"]), "a broker hosts the controller")
    assert len(hosts()) == 1
    eventually(lambda: value(fragile.metrics(), "rayq_active_brokers") == 3, "it has heard of all")


def test_each_rebalance_leaves_one_line_with_the_reason(
    own: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rayq.actors.groups.group_coordinator")
    own.create_topic("shared", partitions=2)

    def reasons() -> list[str]:
        lines = [one.getMessage() for one in caplog.records]
        return [one for one in lines if one.startswith("group_rebalanced group=shared ")]

    def owned() -> list[int]:
        for one in consumers:
            one.poll(timeout_s=0.02)
        return [len(one.assignment()) for one in consumers]

    consumers = [own.consumer("shared", group="shared")]
    eventually(lambda: owned() == [2], "the first has both partitions")
    consumers.append(own.consumer("shared", group="shared"))
    eventually(lambda: owned() == [1, 1], "each has one partition")
    for consumer in reversed(consumers):
        consumer.close()
    all_lines = reasons()
    # The coordinator may hear of the partitions' leaders after the first member.
    lines = [line for line in all_lines if "partitions of shared changed" not in line]
    assert ["joined" in line for line in lines] == [True, True, False, False]
    assert "epoch=1 " in lines[0] and "left: the consumer was closed" in lines[3]
    rebalances = total(own.metrics(), "rayq_consumergroup_rebalances_total", group="shared")
    assert rebalances == len(all_lines)
    own.admin.delete_group("shared")
    assert not [one for one in own.metrics() if one.labels.get("group") == "shared"]

"""Brokers restarted one by one under load, and the reasons to refuse that."""

from __future__ import annotations

import pytest

from rayq.errors import NotEnoughReplicasError, RayqError
from rayq.testing import LocalCluster
from tests.local.support import FAST, Load, partition_of, wait_in_sync


def test_every_broker_is_restarted_under_load_and_no_write_fails() -> None:
    with LocalCluster(brokers=3, **FAST) as cluster:
        cluster.create_topic("t", partitions=3)
        cluster.kill_controller()  # the broker that stands in is restarted, too
        with Load(cluster, "t") as load:
            for broker in range(3):
                before = {one.broker: one.port for one in partition_of(cluster, "t").replicas}
                cluster.restart_broker(broker, timeout_s=100)
                after = partition_of(cluster, "t")
                assert sorted(after.isr) == [0, 1, 2]
                ports = {one.broker: one.port for one in after.replicas}
                assert ports[broker] != before[broker]
                load.wait_for_more(50)
        load.check()
        assert load.failures() == []


def test_a_broker_that_cannot_be_spared_is_left_alone() -> None:
    with LocalCluster(brokers=3, **FAST) as cluster:
        cluster.create_topic("t")
        cluster.kill_broker(0)
        before = wait_in_sync(cluster, "t", brokers=2)
        with pytest.raises(NotEnoughReplicasError, match="not restarted.*the metadata, t-0"):
            cluster.restart_broker(1, timeout_s=3)
        after = partition_of(cluster, "t")
        assert [one.port for one in after.replicas if one.broker == 1] == [
            one.port for one in before.replicas if one.broker == 1
        ]
        cluster.kill_broker(1)
        for broker in (0, 1):  # both are away: only starting them helps
            cluster.restart_broker(broker, timeout_s=100)


def test_a_topic_with_one_replica_does_not_stand_in_the_way() -> None:
    with LocalCluster(brokers=3, **FAST) as cluster:
        cluster.create_topic("single", replication_factor=1)
        leader = partition_of(cluster, "single").leader
        assert leader is not None
        with Load(cluster, "single") as load:
            cluster.restart_broker(leader, timeout_s=100)
            load.wait_for_more(50)
        assert load.failures() == []


def test_an_unknown_broker_is_named() -> None:
    with LocalCluster(brokers=1) as cluster:
        with pytest.raises(RayqError, match=r"no broker 7.*\[0\]"):
            cluster.restart_broker(7)

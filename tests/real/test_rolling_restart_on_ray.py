"""A rolling restart of real processes under load."""

from __future__ import annotations

import pytest

from rayq import Cluster, UnknownBrokerError
from tests.local.support import Load, partition_of
from tests.real.support import actor_pid


def test_all_brokers_are_restarted_one_by_one_and_no_write_fails(cluster: Cluster) -> None:
    cluster.create_topic("rolling", partitions=2)
    with Load(cluster, "rolling") as load:
        for broker in range(3):
            name = f"rayq:{cluster.name}:broker-{broker}"
            before = actor_pid(name)
            replica_before = _replica_pid(cluster, broker)
            cluster.restart_broker(broker)
            assert actor_pid(name) not in (None, before)
            assert _replica_pid(cluster, broker) not in (None, replica_before)
            assert broker in partition_of(cluster, "rolling").isr
            load.wait_for_more(50)
    assert load.failures() == []
    load.check()
    assert load.longest_pause_s < 5


def test_a_broker_that_does_not_exist_is_named(cluster: Cluster) -> None:
    with pytest.raises(UnknownBrokerError, match="no broker 9"):
        cluster.restart_broker(9)


def _replica_pid(cluster: Cluster, broker: int) -> int | None:
    replicas = partition_of(cluster, "rolling").replicas
    return next(one.pid for one in replicas if one.broker == broker)

"""What operators do: a rolling restart under load, a broker on a new disk, nodes to choose."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

import rayq
from rayq import Cluster
from rayq.errors import InvalidRequestError, RayqError, UnknownBrokerError
from tests.local.support import Load, eventually, partition_of, wait_in_sync
from tests.real.support import actor_pid


@pytest.mark.thorough
def test_all_brokers_and_the_controller_are_restarted_one_by_one_and_no_write_fails(cluster: Cluster) -> None:
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
        name = f"rayq:{cluster.name}:controller"
        before = actor_pid(name)
        cluster.restart_controller()
        assert actor_pid(name) not in (None, before)
        load.wait_for_more(50)
    assert load.failures() == []
    load.check()
    assert load.longest_pause_s < 15


@pytest.mark.thorough
def test_a_broker_that_does_not_exist_is_named(cluster: Cluster) -> None:
    with pytest.raises(UnknownBrokerError, match="no broker 9"):
        cluster.restart_broker(9)


@pytest.mark.thorough
def test_a_start_where_no_node_may_have_brokers_says_so(ray_here: None, tmp_path: Path) -> None:
    with pytest.raises(RayqError, match="Ray has 0 that offer the resource 'nobody_has_it'"):
        rayq.start(str(tmp_path), name="nowhere", broker_resource="nobody_has_it")
    assert list(tmp_path.iterdir()) == []


def _replica_pid(cluster: Cluster, broker: int) -> int | None:
    replicas = partition_of(cluster, "rolling").replicas
    return next(one.pid for one in replicas if one.broker == broker)


@pytest.mark.thorough
def test_a_broker_starts_on_a_new_disk_and_copies_what_it_had(cluster: Cluster) -> None:
    cluster.create_topic("disk")
    with cluster.producer() as producer:
        producer.send_many("disk", [b"%d" % number for number in range(1000)]).result(60)
    with pytest.raises(InvalidRequestError, match="not empty"):
        cluster.replace_disk(2)
    controller = ray.get_actor(f"rayq:{cluster.name}:controller", namespace="rayq")
    path = Path(ray.get(controller.spec.remote()).root) / "broker-2"
    path.rename(path.with_name("lost"))
    cluster.replace_disk(2)
    wait_in_sync(cluster, "disk", timeout_s=60)
    (copy,) = (one for one in partition_of(cluster, "disk").replicas if one.broker == 2)
    assert copy.log_end_offset == 1000
    assert (path / "disk-0").is_dir()
    eventually(
        lambda: sorted(cluster.admin.describe_cluster().voters) == [0, 1, 2], "it votes again"
    )

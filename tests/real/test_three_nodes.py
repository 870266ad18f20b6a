"""Several nodes of Ray, played on this machine: brokers spread, join and leave with their node."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster as RayNodes

import rayq
from rayq.runtime.ray_runtime import NODE_CHECK_S
from tests.local.support import Load, eventually, partition_of, wait_in_sync
from tests.real.support import actor_pid, actors_of


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    ray.shutdown()
    cluster = RayNodes(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_brokers_follow_the_nodes(nodes: RayNodes, tmp_path: Path) -> None:
    cluster = rayq.start(str(tmp_path), port=19792, name="spread")
    info = cluster.admin.describe_cluster()
    node_of = {one.broker: one.node_id for one in info.brokers}
    assert sorted(node_of) == [0, 1, 2]
    assert len(set(node_of.values())) == 3

    cluster.create_topic("t")
    at = {one["Pid"]: one["Address"]["NodeID"] for one in actors_of("spread")}
    for replica in partition_of(cluster, "t").replicas:
        assert at[replica.pid] == node_of[replica.broker]

    joined = nodes.add_node(num_cpus=1)
    eventually(lambda: _live(cluster) == {0, 1, 2, 3}, "the new node has a broker", 60)
    assert set(node_of.values()) | {joined.node_id} == {
        one.node_id for one in cluster.admin.describe_cluster().brokers
    }

    # A controller that starts anew sees nodes that joined since: their brokers are left alone.
    before = {one["Name"]: one["Pid"] for one in actors_of("spread") if "broker" in one["Name"]}
    controller = actor_pid("rayq:spread:controller")
    assert controller is not None
    os.kill(controller, signal.SIGKILL)
    eventually(
        lambda: actor_pid("rayq:spread:controller") not in (None, controller), "it is back", 30
    )
    time.sleep(2 * NODE_CHECK_S)
    assert before == {
        one["Name"]: one["Pid"] for one in actors_of("spread") if "broker" in one["Name"]
    }

    leader = partition_of(cluster, "t").leader
    assert leader is not None
    head = nodes.head_node.node_id
    lost = leader if node_of[leader] != head else next(n for n in node_of if node_of[n] != head)
    with Load(cluster, "t", pause_s=0.005) as load:
        (gone,) = (one for one in nodes.worker_nodes if one.node_id == node_of[lost])
        nodes.remove_node(gone, allow_graceful=False)
        eventually(lambda: lost not in _live(cluster), "its broker's session ended")
        load.wait_for_more(50)
        assert lost not in partition_of(cluster, "t").isr
    load.check()
    wait_in_sync(cluster, "t", brokers=2)
    cluster.stop()
    eventually(lambda: actors_of("spread") == [], "no actor is left")


def _live(cluster: rayq.Cluster) -> set[int]:
    return {one.broker for one in cluster.admin.describe_cluster().brokers if one.live}

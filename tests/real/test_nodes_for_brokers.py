"""Several nodes of Ray on this machine: brokers spread, join and leave with their node."""

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
from rayq.runtime.ray.actors import NODE_CHECK_S
from tests.local.support import (
    Load,
    eventually,
    partition_of,
    read_all,
    values,
    wait_in_sync,
)
from tests.real.support import actor_pid, actors_of

WAIT_S = 120.0
"""The limit for starts of Ray's processes, each of which may take 30 s on a busy machine."""
OFFER = {"num_cpus": 1, "resources": {"rayq_broker": 1}}
NOTICES_SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
"""A node whose process is gone is noticed in 2 s, not 12; a slow node does not count as gone."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """The head and two more nodes, one of which offers the resource that brokers may ask for."""
    ray.shutdown()
    cluster = RayNodes(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "_system_config": NOTICES_SOON,
        },
    )
    cluster.add_node(num_cpus=1)
    cluster.add_node(**OFFER)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.thorough
def test_brokers_start_again_when_every_node_of_theirs_was_lost(
    nodes: RayNodes, tmp_path: Path
) -> None:
    first = max(nodes.worker_nodes, key=lambda node: _offers(node.node_id))
    cluster = rayq.start(
        str(tmp_path), nodes=1, port=19892, name="few", broker_resource="rayq_broker"
    )
    (broker,) = cluster.admin.describe_cluster().brokers
    assert broker.node_id == first.node_id  # Only nodes that offer the resource get brokers.
    cluster.create_topic("t", timeout_s=WAIT_S)
    with cluster.producer() as producer:
        producer.send("t", b"kept").result(60)

    nodes.remove_node(first, allow_graceful=False)
    second = nodes.add_node(**OFFER)

    def is_back() -> bool:
        try:
            found = cluster.admin.describe_cluster(timeout_s=1).brokers
        except rayq.RayqError:
            return False
        return [one.node_id for one in found if one.live] == [second.node_id]

    eventually(is_back, "its broker serves on the node that returned", WAIT_S)
    assert values(read_all(cluster, "t")) == [b"kept"]
    cluster.stop()


def _offers(node_id: str) -> float:
    listed = ray.nodes()  # type: ignore[no-untyped-call]
    (offered,) = (node["Resources"] for node in listed if node["NodeID"] == node_id)
    return float(offered.get("rayq_broker", 0))


@pytest.mark.thorough
def test_brokers_follow_the_nodes(nodes: RayNodes, tmp_path: Path) -> None:
    cluster = rayq.start(str(tmp_path), port=19792, name="spread")
    info = cluster.admin.describe_cluster()
    node_of = {one.broker: one.node_id for one in info.brokers}
    assert sorted(node_of) == [0, 1, 2]
    assert len(set(node_of.values())) == 3

    cluster.create_topic("t", timeout_s=WAIT_S)
    at = {one["Pid"]: one["Address"]["NodeID"] for one in actors_of("spread")}
    for replica in partition_of(cluster, "t").replicas:
        assert at[replica.pid] == node_of[replica.broker]

    joined = nodes.add_node(num_cpus=1)
    eventually(lambda: _live(cluster) == {0, 1, 2, 3}, "the new node has a broker", WAIT_S)
    assert set(node_of.values()) | {joined.node_id} == {
        one.node_id for one in cluster.admin.describe_cluster().brokers
    }

    # A controller that starts again sees nodes that joined since, and leaves their brokers alone.
    before = {one["Name"]: one["Pid"] for one in actors_of("spread") if "broker" in one["Name"]}
    controller = actor_pid("rayq:spread:controller")
    assert controller is not None
    epoch = cluster.admin.describe_cluster().controller_epoch
    os.kill(controller, signal.SIGKILL)
    eventually(
        lambda: actor_pid("rayq:spread:controller") not in (None, controller), "it is back", WAIT_S
    )
    eventually(lambda: _acts_itself(cluster, epoch), "it has taken over", WAIT_S)
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
        eventually(lambda: lost not in _live(cluster), "its broker's session ended", WAIT_S)
        load.wait_for_more(50)
        assert lost not in partition_of(cluster, "t").isr
    load.check()
    wait_in_sync(cluster, "t", brokers=2, timeout_s=WAIT_S)
    cluster.stop()
    eventually(lambda: actors_of("spread") == [], "no actor is left", WAIT_S)


def _acts_itself(cluster: rayq.Cluster, after_epoch: int) -> bool:
    """Whether the controller acts in a later epoch, and no broker stands in for it."""
    info = cluster.admin.describe_cluster()
    if info.controller_epoch <= after_epoch:
        return False
    brokers = {f"{one.host}:{one.port}" for one in info.brokers}
    return info.controller is not None and info.controller not in brokers


def _live(cluster: rayq.Cluster) -> set[int]:
    return {one.broker for one in cluster.admin.describe_cluster().brokers if one.live}

"""Only nodes that offer a resource get brokers; all of them may be lost at once, and return."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster as RayNodes

import rayq
from tests.local.support import eventually, read_all, values

OFFER = {"num_cpus": 1, "resources": {"rayq_broker": 1}}


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    ray.shutdown()
    cluster = RayNodes(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_brokers_start_again_when_every_node_of_theirs_was_lost(
    nodes: RayNodes, tmp_path: Path
) -> None:
    first = nodes.add_node(**OFFER)
    cluster = rayq.start(
        str(tmp_path), nodes=1, port=19892, name="few", broker_resource="rayq_broker"
    )
    (broker,) = cluster.admin.describe_cluster().brokers
    assert broker.node_id == first.node_id  # and not the head
    cluster.create_topic("t")
    with cluster.producer() as producer:
        producer.send("t", b"kept").result(20)

    nodes.remove_node(first, allow_graceful=False)
    second = nodes.add_node(**OFFER)

    def is_back() -> bool:
        try:
            found = cluster.admin.describe_cluster(timeout_s=1).brokers
        except rayq.RayqError:
            return False
        return [one.node_id for one in found if one.live] == [second.node_id]

    eventually(is_back, "its broker serves on the node that returned", 60)
    assert values(read_all(cluster, "t")) == [b"kept"]
    cluster.stop()

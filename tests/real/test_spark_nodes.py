"""Spark end to end where brokers and executors live on different nodes of Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private import state
from ray.cluster_utils import Cluster as RayNodes

import rayq
from tests.local.support import partition_of
from tests.real.support import actors_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, and there is none"),
]

RECORDS = 20_000


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    ray.shutdown()
    cluster = RayNodes(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=0)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.thorough
def test_executors_on_one_node_read_from_and_write_to_brokers_on_others(
    nodes: RayNodes, tmp_path: Path
) -> None:
    from pyspark.sql import functions as fn

    cluster = rayq.start(str(tmp_path), brokers=2, port=19992, name="nodes")
    cluster.create_topic("in", 4, 2)
    cluster.create_topic("out", 2, 2)
    with cluster.producer() as producer:
        producer.send_many("in", [b"%d" % number for number in range(RECORDS)])
    for_spark = nodes.add_node(num_cpus=2)

    with rayq.spark.session("nodes", executors=1, cores=2) as spark:
        number = fn.col("value").cast("string").cast("int")
        even = rayq.spark.read(spark, "in", cluster=cluster).where(number % 2 == 0)
        written = rayq.spark.write(even, "out", key="value", cluster=cluster)
        assert written.records == RECORDS // 2
        back = rayq.spark.read(spark, "out", cluster=cluster)
        found = back.agg(fn.count("*"), fn.sum(number), fn.countDistinct("value")).collect()[0]
        assert tuple(found) == (RECORDS // 2, sum(range(0, RECORDS, 2)), RECORDS // 2)

        executors = [
            one["Address"]["NodeID"]
            for one in state.actors().values()
            if one["Name"].startswith("raydp-executor") and one["State"] == "ALIVE"
        ]
        assert executors == [for_spark.node_id]
    at = {one["Pid"]: one["Address"]["NodeID"] for one in actors_of("nodes")}
    for topic, partitions in (("in", 4), ("out", 2)):
        for partition in range(partitions):
            for replica in partition_of(cluster, topic, partition).replicas:
                assert at[replica.pid] != for_spark.node_id
    cluster.stop()

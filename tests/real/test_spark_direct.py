"""Spark and Ray Data read what is in an object store there: a real S3 server, and real processes
without credentials."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayq
from rayq import Cluster
from rayq.data import read_topic
from tests.local.support import eventually
from tests.real.s3 import s3_server

pytestmark = pytest.mark.slow

TOPIC = "stored"
RECORDS = 4000
VALUE_BYTES = 2000


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One broker, and a topic of which the brokers have little on their disks."""
    path: Path = tmp_path_factory.mktemp("direct")
    with s3_server(path) as s3:
        made = rayq.start(
            str(path / "data"),
            brokers=1,
            port=19792,
            name="direct",
            remote_storage_url=s3.url("direct"),
            remote_storage_credentials=str(s3.credentials),
            retention_check_interval_ms=200,
        )
        try:
            fill(made)
            yield made
        finally:
            made.stop()


def fill(cluster: Cluster) -> None:
    cluster.create_topic(
        TOPIC,
        timeout_s=120.0,
        remote_storage=True,
        segment_bytes=1_000_000,
        local_retention_bytes=0,
        remote_max_lag_ms=500,
    )
    rng = random.Random(7)
    with cluster.producer() as producer:
        producer.send_many(
            TOPIC, [b"%d " % number + rng.randbytes(VALUE_BYTES) for number in range(RECORDS)]
        )

    def is_stored() -> bool:
        (found,) = cluster.admin.describe_remote_storage([TOPIC])
        return found.local_start_offset == RECORDS

    eventually(is_stored, "all records are in the object store only", 120.0)
    cluster.admin.alter_topic_config(TOPIC, remote_max_lag_ms=3_600_000)
    with cluster.producer() as producer:
        producer.send_many(TOPIC, [b"%d at the end" % number for number in range(RECORDS, 4100)])


def numbers(values: Any) -> list[int]:
    return sorted(int(bytes(value).split(b" ")[0]) for value in values)


def sent_bytes(cluster: Cluster) -> float:
    """What the leader has sent to clients of the topic."""
    return sum(
        sample.value
        for sample in cluster.metrics()
        if sample.name == "rayq_bytes_out_total" and sample.labels.get("topic") == TOPIC
    )


def test_ray_data_reads_the_store_and_the_rest_from_the_leader(cluster: Cluster) -> None:
    before = sent_bytes(cluster)
    dataset = read_topic(TOPIC, cluster=cluster, min_partitions=2)
    assert numbers(row["value"] for row in dataset.iter_rows()) == list(range(4100))
    eventually(
        lambda: [pin.topic for pin in cluster.admin.describe_object_store().pins] == [TOPIC],
        "the dataset's records are pinned",
    )
    assert sent_bytes(cluster) - before < 100 * VALUE_BYTES


def test_spark_reads_the_store_and_the_rest_from_the_leader(cluster: Cluster, spark: Any) -> None:
    before = sent_bytes(cluster)
    frame = rayq.spark.read(spark, TOPIC, cluster=cluster, min_partitions=2)
    assert numbers(row.value for row in frame.select("value").collect()) == list(range(4100))
    assert sent_bytes(cluster) - before < 100 * VALUE_BYTES

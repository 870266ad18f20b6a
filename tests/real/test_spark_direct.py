"""Spark reads what is in an object store there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rayq
from rayq import Cluster
from tests.real.stored_topic import ALL, TOPIC, VALUE_BYTES, numbers, sent_bytes, stored_topic

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with stored_topic(tmp_path_factory.mktemp("direct")) as made:
        yield made


def test_spark_reads_the_store_and_the_rest_from_the_leader(cluster: Cluster, spark: Any) -> None:
    before = sent_bytes(cluster)
    frame = rayq.spark.read(spark, TOPIC, cluster=cluster, min_partitions=2)
    assert numbers(row.value for row in frame.select("value").collect()) == ALL
    assert sent_bytes(cluster) - before < 100 * VALUE_BYTES

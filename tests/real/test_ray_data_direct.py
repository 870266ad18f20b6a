"""Ray Data reads what is in an object store there. (Spark has a file of its own: while a session of
it runs, Ray has no CPU left for other tasks.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rayq import Cluster
from rayq.data import read_topic
from tests.local.support import eventually
from tests.real.stored_topic import ALL, TOPIC, VALUE_BYTES, numbers, sent_bytes, stored_topic

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with stored_topic(tmp_path_factory.mktemp("direct")) as made:
        yield made


def test_ray_data_reads_the_store_and_the_rest_from_the_leader(cluster: Cluster) -> None:
    before = sent_bytes(cluster)
    dataset = read_topic(TOPIC, cluster=cluster, min_partitions=2)
    assert numbers(row["value"] for row in dataset.iter_rows()) == ALL
    eventually(
        lambda: [pin.topic for pin in cluster.admin.describe_object_store().pins] == [TOPIC],
        "the dataset's records are pinned",
    )
    assert sent_bytes(cluster) - before < 100 * VALUE_BYTES

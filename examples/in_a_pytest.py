"""Testing code that uses a log: the fixture `rayq_cluster` is a whole cluster in this process.

    pytest examples/in_a_pytest.py

No Ray, no Docker, ready in well under a second. pytest finds the fixture by itself once rayq is
installed.
"""

from __future__ import annotations

import json

import rayq
from rayq.testing import LocalCluster


def total_cents(cluster: rayq.Cluster, topic: str, count: int) -> int:
    """The code under test: adds up the first `count` payments of a topic."""
    total = 0
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        for _ in range(count):
            value = next(consumer).value
            assert value is not None
            total += json.loads(value)["cents"]
    return total


def test_payments_are_added_up(rayq_cluster: LocalCluster) -> None:
    rayq_cluster.create_topic("payments", partitions=3)
    with rayq_cluster.producer() as producer:
        for cents in (250, 1999, 1):
            producer.send("payments", json.dumps({"cents": cents}).encode())
        producer.flush(timeout_s=10)

    assert total_cents(rayq_cluster, "payments", count=3) == 2250

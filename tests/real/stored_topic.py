"""A topic whose records are in a real S3 server, for tests of batch jobs that read it there: real
processes, without credentials."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rayq
from rayq import Cluster
from tests.local.support import eventually
from tests.real.s3 import s3_server

TOPIC = "stored"
RECORDS = 4000
VALUE_BYTES = 2000
ALL = list(range(RECORDS + 100))


@contextmanager
def stored_topic(path: Path) -> Iterator[Cluster]:
    """One broker, and a topic of which the brokers have little on their disks."""
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
        producer.send_many(TOPIC, [b"%d at the end" % number for number in range(RECORDS, len(ALL))])


def numbers(values: Any) -> list[int]:
    return sorted(int(bytes(value).split(b" ")[0]) for value in values)


def sent_bytes(cluster: Cluster) -> float:
    """What the leader has sent to clients of the topic."""
    return sum(
        sample.value
        for sample in cluster.metrics()
        if sample.name == "rayq_bytes_out_total" and sample.labels.get("topic") == TOPIC
    )

"""Tiered storage: old records go to an object store, and readers do not notice.

    python examples/tiered_storage.py

A directory stands for the store; in earnest it is `remote_storage_url="s3://bucket/prefix"`. The
topic keeps almost nothing on the brokers' disks. It is read from its beginning, and in the end it
comes back from the store alone, after the loss of all brokers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rayq import Cluster
from rayq.testing import LocalCluster

READINGS = 2000


def reading(number: int) -> bytes:
    return b"%06d " % number + os.urandom(500)


def start(directory: Path, name: str) -> LocalCluster:
    """Two brokers, with data below `directory/name` and the store beside it."""
    store = directory / "store"
    store.mkdir(exist_ok=True)
    return LocalCluster(
        brokers=2,
        data_dir=directory / name,
        remote_storage_url=f"file://{store}",
        retention_check_interval_ms=200,  # In earnest nobody waits: 30 s will do.
    )


def wait_until_stored(cluster: Cluster) -> int:
    """Until only the newest segment is on the disks. Returns where the store ends."""
    while True:
        (found,) = cluster.admin.describe_remote_storage("readings")
        end = found.remote_end_offset
        if end and found.local_start_offset == end and found.lag_bytes == 0:
            return end
        time.sleep(0.1)


def count(cluster: Cluster, expected: int) -> int:
    seen = 0
    with cluster.consumer("readings", auto_offset_reset="earliest") as consumer:
        while seen < expected:
            seen += len(consumer.poll(timeout_s=10.0))
    return seen


def restore(cluster: Cluster) -> None:
    """`rayq topic restore readings`, as an operator types it."""
    addresses = ",".join(cluster.addresses)
    environment = {**os.environ, "RAYQ_CLUSTER": addresses, "RAYQ_TOKEN": cluster.token}
    command = [sys.executable, "-m", "rayq.cli", "topic", "restore", "readings", "--yes"]
    subprocess.run(command, env=environment, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with start(path, "before") as cluster:
            cluster.create_topic(
                "readings",
                remote_storage=True,
                segment_bytes=128 * 1024,  # Small, so that there is something to see.
                local_retention_bytes=0,
            )
            with cluster.producer() as producer:
                for number in range(READINGS):
                    producer.send("readings", reading(number))
                    if number % 100 == 99:
                        producer.flush()
            end = wait_until_stored(cluster)
            print(f"the store has the readings up to {end}, the disks the rest")
            print(f"read {count(cluster, READINGS)} of {READINGS} from the beginning")

        # All disks are lost: another cluster has nothing but the store.
        with start(path, "after") as cluster:
            restore(cluster)
            print(f"read {count(cluster, end)} of {end} that were stored")


if __name__ == "__main__":
    main()

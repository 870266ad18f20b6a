"""Ray tasks that write to a log, and an actor that reads it: the cluster is passed like any value.

python examples/produce_and_consume_in_ray_tasks.py
"""

from __future__ import annotations

import sys
import tempfile

import ray

import rayq

TASKS = 4
READINGS_PER_TASK = 1000


@ray.remote(num_cpus=0)
def measure(cluster: rayq.Cluster, sensor: int) -> int:
    """Writes the sensor's readings. Returns how many were acknowledged."""
    readings = [f"{sensor}:{reading}".encode() for reading in range(READINGS_PER_TASK)]
    keys = [f"sensor-{sensor}".encode()] * len(readings)
    with cluster.producer() as producer:
        ranges = producer.send_many("readings", readings, keys=keys).result(timeout=60)
    return sum(written.end - written.start for written in ranges)


@ray.remote(num_cpus=0)
class Collector:
    """Counts the readings by sensor."""

    def __init__(self) -> None:
        # Any process of the Ray cluster finds rayq by itself.
        self.consumer = rayq.connect().consumer("readings", auto_offset_reset="earliest")

    def collect(self, count: int) -> dict[str, int]:
        seen: dict[str, int] = {}
        while sum(seen.values()) < count:
            for record in self.consumer.poll(timeout_s=1.0):
                assert record.key is not None
                sensor = record.key.decode()
                seen[sensor] = seen.get(sensor, 0) + 1
        return dict(sorted(seen.items()))


def main(data_dir: str) -> None:
    with rayq.start(data_dir, brokers=3) as cluster:
        cluster.create_topic("readings", partitions=4, replication_factor=3)
        collector = Collector.remote()  # type: ignore[attr-defined]
        counted = collector.collect.remote(TASKS * READINGS_PER_TASK)
        written = ray.get([measure.remote(cluster, sensor) for sensor in range(TASKS)])
        print("written by task:", written)
        print("read by sensor: ", ray.get(counted))
        cluster.stop()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="rayq-tasks-"))

"""The driver of an atomic batch write, a process of its own, for test_ray_data to kill.

`python batch_driver.py RAY_ADDRESS CLUSTER TOPIC ID NAME` writes numbers to the topic, and stands
still in the middle of them.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray

import rayq
from rayq.batch.task_writer import begin_write
from rayq.data import write_topic


def stand_still(batch: dict[str, Any]) -> dict[str, Any]:
    if 15_000 in batch["id"]:
        time.sleep(600)
    return {"value": [b"%d" % number + b" " * 1000 for number in batch["id"]]}


if __name__ == "__main__":
    address, cluster_name, topic, transactional_id, name = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    cluster = rayq.connect(name=cluster_name)
    job = begin_write(cluster, topic, transactional_id=transactional_id, name=name)
    dataset = ray.data.range(20_000, override_num_blocks=2)
    write_topic(dataset.map_batches(stand_still, batch_size=500), topic, job=job)

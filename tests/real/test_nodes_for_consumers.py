"""Consumers that find no room make Ray's autoscaler add nodes, and leave them to be taken away."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray

import rayq
from rayq import Record
from tests.local.support import eventually
from tests.real.autoscaling import AutoscaledRay


def node_count() -> int:
    return sum(one["Alive"] for one in ray.nodes())


@pytest.mark.thorough
@pytest.mark.slow
def test_a_backlog_brings_a_node_and_an_idle_pool_gives_it_back(tmp_path: Path) -> None:
    path = str(tmp_path / "handled")

    def handler(records: list[Record]) -> None:
        import time

        time.sleep(0.001 * len(records))
        with open(path, "a") as file:
            file.write("".join(f"{(record.value or b'').decode()}\n" for record in records))

    ray.shutdown()
    workers = {"consumers": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 2}}
    with AutoscaledRay(
        tmp_path, head={"CPU": 0, "brokers": 1}, workers=workers, idle_timeout_s=2
    ) as nodes:
        try:
            ray.init(address=nodes.address, log_to_driver=False)
            cluster = rayq.start(
                str(tmp_path / "data"), brokers=1, port=19892, name="scaled", broker_resource="brokers"
            )
            cluster.create_topic("t", partitions=2)
            pool = cluster.consumer_pool("t", "t", handler, cool_down_s=1, target_lag_s=5)
            assert pool.status().wanted == 0 and node_count() == 1
            began_s = time.monotonic()
            with cluster.producer() as producer:
                producer.send_many("t", [b"%d" % number for number in range(1_000)])
            eventually(lambda: pool.status().pending == 1, "a consumer waits for room", 20)
            eventually(lambda: node_count() >= 2, "a node was added", 40)
            print(f"a node after {time.monotonic() - began_s:.1f} s")  # noqa: T201
            pool.wait_idle(30)
            print(f"all handled after {time.monotonic() - began_s:.1f} s")  # noqa: T201
            handled = sorted(int(one) for one in Path(path).read_text().split())
            assert handled == list(range(1_000))
            eventually(lambda: not pool.status().consumers, "none runs", 20)
            eventually(lambda: node_count() == 1, "the node was taken away", 60)
            print(f"nodes gone after {time.monotonic() - began_s:.1f} s")  # noqa: T201
            cluster.stop()
        finally:
            ray.shutdown()

"""Groups on real processes: members come and go, some by SIGKILL, and every record is dealt with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

import rayq
from rayq import Cluster
from tests.local.support import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.slow
def test_half_a_minute_of_members_that_come_and_go_leaves_nothing_out(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    file = tmp_path / "groups.json"
    command = ["--minutes", "0.5", "--seed", "7", "--json", str(file)]
    ran = subprocess.run(
        [sys.executable, "-m", "proving.chaos.groups", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(file.read_text())
    record_property("groups", json.dumps(result))
    print(ran.stdout)  # noqa: T201
    assert result["problems"] == [] and result["checker_faults"] == []
    assert result["acknowledged"] > 1_000 and result["changes"] >= 5
    # The limit is generous: `make bench` measures in earnest.
    assert all(took_s < 30 for took_s in result["settling_s"]["kill"])
    assert result["longest_gap_in_rebalances_s"] < result["longest_gap_quiet_s"] + 10


def lags(cluster: Cluster) -> list[int | None]:
    return [one.lag for one in cluster.admin.describe_group("tasks").partitions.values()]


@pytest.mark.thorough
def test_ray_tasks_share_a_topic_as_members_of_one_group(cluster: Cluster) -> None:
    @ray.remote(num_cpus=0)
    def work(given: Cluster) -> list[int]:
        seen: list[int] = []
        with given.consumer(
            "tasks", group="tasks", auto_offset_reset="earliest", max_poll_records=20
        ) as consumer:
            idle = 0
            # On a busy machine a partition may wait for longer than that for its first reader.
            while idle < 10 or lags(given) != [0] * 4:
                records = consumer.poll(timeout_s=0.3)
                idle = 0 if records else idle + 1
                seen += [int(record.value or b"") for record in records]
                consumer.commit()
        return seen

    cluster.create_topic("tasks", partitions=4)
    with cluster.producer() as producer:
        for number in range(1000):
            producer.send("tasks", b"%d" % number, partition=number % 4)
    found: list[list[int]] = ray.get([work.remote(cluster) for _ in range(2)])
    assert sorted(found[0] + found[1]) == list(range(1000))
    assert cluster.admin.describe_group("tasks").lag == 0


@pytest.mark.thorough
def test_the_coordinator_s_process_dies_and_members_go_on(cluster: Cluster) -> None:
    cluster.create_topic("moved", partitions=2)
    lost: list[object] = []
    with (
        cluster.consumer(
            "moved", group="moved", auto_offset_reset="earliest", on_lost=lost.append
        ) as consumer,
        cluster.producer() as producer,
    ):
        eventually(lambda: (consumer.poll(0.05), len(consumer.assignment()) == 2)[1], "joined")
        before = consumer.group_membership()
        topic = cluster.admin.describe_topic("__consumer_offsets")
        leader = topic.partitions[0].leader
        (pid,) = (one.pid for one in topic.partitions[0].replicas if one.broker == leader)
        assert pid is not None
        producer.send("moved", b"v", partition=0).result(60)
        eventually(lambda: len(consumer.poll(0.1)) == 1, "the record came")
        os.kill(pid, 9)
        consumer.commit()
        eventually(
            lambda: cluster.admin.describe_group("moved").state == "stable", "it is stable again"
        )
        consumer.poll(0.05)
        assert lost == []
        assert consumer.group_membership().member == before.member
        assert cluster.admin.describe_group("moved").lag == 0
        with pytest.raises(rayq.errors.GroupNotEmptyError):
            cluster.admin.delete_group("moved")

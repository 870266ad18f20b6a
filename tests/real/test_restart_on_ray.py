"""The data outlives the cluster: after a stop, and after kill -9 of all processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rayq
from tests.local.support import eventually, partition_of, read_all, values, wait_in_sync
from tests.real.support import actors_of, kill_all_below

ROOT = Path(__file__).resolve().parents[2]

PRODUCER = """
import sys, rayq
cluster = rayq.start(sys.argv[1], brokers=3, port=19492)
cluster.create_topic("t", retention_ms=123_456_789)
with cluster.producer() as producer:
    def report(metadata, error):
        if error is None:
            sys.stdout.write(f"{metadata.offset}\\n")
            sys.stdout.flush()
    number = 0
    while True:
        producer.send("t", b"%d" % number, on_delivery=report)
        number += 1
"""


@pytest.mark.thorough
def test_kill_9_of_everything_loses_nothing_that_was_acknowledged(
    ray_here: None, tmp_path: Path
) -> None:
    """Driver, Ray, controller, brokers and replicas die under load; a new Ray takes over."""
    path = str(tmp_path / "data")
    producer = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    assert producer.stdout is not None
    acknowledged = [int(producer.stdout.readline()) for _ in range(5000)]
    kill_all_below(producer.pid)
    rest = producer.stdout.read().splitlines(keepends=True)
    acknowledged += [int(line) for line in rest if line.endswith("\n")]
    producer.wait(10)
    assert acknowledged == list(range(len(acknowledged)))

    cluster = rayq.start(path, port=19492, name="reopened")
    found = values(read_all(cluster, "t"))
    assert len(found) >= len(acknowledged)
    assert found == [b"%d" % number for number in range(len(found))]
    assert cluster.admin.describe_topic("t").config["retention_ms"] == 123_456_789
    wait_in_sync(cluster, "t")
    cluster.stop()


@pytest.mark.thorough
def test_stop_ends_every_actor_and_start_brings_everything_back(
    ray_here: None, tmp_path: Path
) -> None:
    path = str(tmp_path / "data")
    cluster = rayq.start(path, brokers=3, name="twice", port=19592)
    cluster.create_topic("t")
    with cluster.producer() as producer:
        producer.send_many("t", [b"%d" % number for number in range(1000)]).result(60)
    epoch = partition_of(cluster, "t").leader_epoch
    cluster.stop()
    # Ray kills them after its answer; all that they had to say was said before.
    eventually(lambda: actors_of("twice") == [], "no actor is left")
    with pytest.raises(rayq.errors.NoClusterError, match="twice"):
        rayq.connect(name="twice")

    cluster = rayq.start(path)  # The name and the port are kept with the data.
    assert (cluster.name, "127.0.0.1:19592" in cluster.addresses) == ("twice", True)
    assert cluster.admin.list_topics() == ["t"]
    assert values(read_all(cluster, "t")) == [b"%d" % number for number in range(1000)]
    after = partition_of(cluster, "t")
    assert after.leader_epoch > epoch and len(after.isr) == 3
    cluster.stop()


def test_too_many_brokers_for_the_directories_are_refused(ray_here: None, tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    rayq.start(path, brokers=1, name="small", port=19692).stop()
    with pytest.raises(rayq.RayqError, match="2 were asked for"):
        rayq.start(path, brokers=2, name="small")
    with pytest.raises(rayq.ConfigError, match="'session_timeout_ms'"):
        rayq.start(path, sesion_timeout_ms=1)
    with pytest.raises(rayq.errors.InvalidRequestError, match="brokers must be"):
        rayq.start(str(tmp_path / "other"), brokers=0)

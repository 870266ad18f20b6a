"""A cluster on Ray whose old records are in S3: the object server's process, and its secrets."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import worker

import rayq
from rayq import Cluster
from rayq.errors import RayqError
from rayq.runtime.ray.actors import OBJECT_SERVER_NICE
from tests.local.support import eventually
from tests.real.s3 import S3, SECRET, s3_server
from tests.real.support import actor_pid, actors_of

RECORDS = 3000
WAIT_S = 120.0


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def remote(ray_here: None, s3: S3, tmp_path: Path) -> Iterator[Cluster]:
    """One broker, with an object store."""
    cluster = rayq.start(
        str(tmp_path / "data"),
        name="remote",
        brokers=1,
        port=19592,
        retention_check_interval_ms=200,
        remote_storage_url=s3.url("ray"),
        remote_storage_credentials=str(s3.credentials),
    )
    yield cluster
    cluster.stop()


@pytest.mark.thorough
def test_an_object_server_that_cannot_start_is_told_of_and_leaves_no_process(
    ray_here: None, s3: S3, tmp_path: Path
) -> None:
    with rayq.start(
        str(tmp_path / "data"),
        name="remote-bad",
        brokers=1,
        port=19592,
        remote_storage_url=s3.url("bad"),
        remote_storage_credentials=str(tmp_path / "nowhere"),
    ) as cluster:
        with pytest.raises(RayqError, match=r"/nowhere' cannot be read: No such file"):
            cluster.create_topic("old", replication_factor=1, remote_storage=True, timeout_s=20)
        eventually(
            lambda: len(object_server_pids("remote-bad")) <= 1, "the failed ones end", WAIT_S
        )
        cluster.stop()
    eventually(lambda: object_server_pids("remote-bad") == [], "none outlives its cluster", WAIT_S)


def object_server_pids(cluster_name: str = "remote") -> list[int]:
    prefix = f"rayq:{cluster_name}:objects-0:"
    return [one["Pid"] for one in actors_of(cluster_name) if one["Name"].startswith(prefix)]


def niceness_of_threads(pid: int) -> set[int]:
    """Those of Ray itself are as in any process, those of the object server are not."""
    threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    return {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}


@pytest.mark.thorough
def test_old_records_go_to_the_bucket_and_come_from_there_whatever_dies(
    remote: Cluster, s3: S3, tmp_path: Path
) -> None:
    remote.create_topic(
        "old",
        replication_factor=1,
        remote_storage=True,
        segment_bytes=200_000,
        local_retention_ms=0,
    )
    values = [random.Random(number).randbytes(500) for number in range(RECORDS)]
    with remote.producer() as producer:
        for value in values:
            producer.send("old", value)
    partition = next((tmp_path / "data").glob("broker-0/old-0"))
    eventually(
        lambda: all(int(file.stem) > 0 for file in partition.glob("*.log")),
        "the first segments are only in the bucket",
        WAIT_S,
    )
    assert any("/data/" in name for name in s3.names("ray/"))

    def read() -> list[bytes]:
        with remote.consumer("old") as consumer:
            consumer.seek_to_beginning()
            found: list[bytes] = []
            while len(found) < RECORDS:
                found += [record.value for record in consumer.poll(10.0)]
        return found

    assert read() == values
    (pid,) = object_server_pids()
    broker_pid = actor_pid("rayq:remote:broker-0")
    assert broker_pid is not None
    usual = os.getpriority(os.PRIO_PROCESS, broker_pid)
    assert niceness_of_threads(pid) >= {usual, min(19, usual + OBJECT_SERVER_NICE)}
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: object_server_pids() not in ([], [pid]), "another one runs", WAIT_S)
    assert read() == values
    logs = Path(worker.global_worker.node.get_logs_dir_path())
    assert list(logs.glob("rayq-remote-objects-0-*.log"))
    for file in logs.glob("*remote*"):
        assert SECRET.encode() not in file.read_bytes(), file

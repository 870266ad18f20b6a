"""A cluster of real processes: in and outside Ray, and when its processes die under load."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

import rayq
from rayq import Cluster, TopicPartition
from tests.local.support import (
    Load,
    eventually,
    leader_of,
    partition_of,
    read_all,
    values,
    wait_in_sync,
)
from tests.real.support import actor_pid, actors_of, is_gone

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def topic(cluster: Cluster) -> str:
    cluster.create_topic("t")
    return "t"


def replica_pid(cluster: Cluster, topic: str, broker: int | None) -> int:
    """Waits until the replica has started and answers: on a busy machine each step may take a
    while."""
    pids: list[int] = []

    def answers() -> bool:
        replicas = partition_of(cluster, topic).replicas
        pids.extend(one.pid for one in replicas if one.broker == broker and one.pid is not None)
        return bool(pids)

    eventually(answers, f"the replica of {topic} on broker {broker} answers", 60)
    return pids[0]


def test_records_go_in_and_out_from_the_driver_and_inside_tasks(
    cluster: Cluster, topic: str
) -> None:
    @ray.remote(num_cpus=0)
    def produce(given: Cluster | None, value: bytes) -> int | None:
        with (given or rayq.connect()).producer() as producer:
            return producer.send("t", value).result(60).offset

    @ray.remote(num_cpus=0)
    def consume(given: Cluster) -> list[bytes | None]:
        return values(read_all(given, "t"))

    with cluster.producer() as producer:
        producer.send(topic, b"0").result(60)
    assert ray.get(produce.remote(cluster, b"1")) == 1
    assert ray.get(produce.remote(None, b"2")) == 2
    assert ray.get(consume.remote(cluster)) == [b"0", b"1", b"2"]


def test_a_process_outside_ray_connects_by_address_and_token(cluster: Cluster, topic: str) -> None:
    script = (
        "import rayq, sys\n"
        "with rayq.connect(sys.argv[1]) as cluster:\n"
        "    with cluster.producer() as producer:\n"
        "        print(producer.send('t', b'from outside').result(60).partition)\n"
        "    with cluster.consumer('t', auto_offset_reset='earliest') as consumer:\n"
        "        print(consumer.poll(timeout_s=60)[0].value)\n"
        "assert 'ray' not in sys.modules\n"
    )

    def outside(token: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, cluster.addresses[0]],
            env=os.environ | {"PYTHONPATH": str(ROOT), "RAYQ_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=170,
        )

    ran = outside(cluster.token)
    assert ran.stdout.splitlines() == ["0", "b'0'"], ran.stderr
    assert "AuthenticationError" in outside(rayq.wire.authentication.token_of(b"no")).stderr


def test_servers_in_a_ray_that_plays_all_hosts_listen_where_only_this_machine_reaches_them(
    cluster: Cluster, topic: str
) -> None:
    """Ray itself was started by this process, on the address of the machine."""
    (node,) = {one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}
    replicas = [(one.host, one.port) for one in partition_of(cluster, topic).replicas]
    brokers = [(at.rpartition(":")[0], int(at.rpartition(":")[2])) for at in cluster.addresses]
    for host, port in replicas + brokers:
        assert (host, port is None) == ("127.0.0.1", False)
        socket.create_connection((host, port), timeout=5).close()
        if not node.startswith("127."):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((node, port), timeout=5)


def test_actors_are_named_detached_pinned_and_take_no_cpu(cluster: Cluster, topic: str) -> None:
    ours = actors_of("default")
    names = sorted(one["Name"] for one in ours)
    assert "rayq:default:controller" in names
    assert [f"rayq:default:broker-{number}" in names for number in range(3)] == [True] * 3
    assert sum(":t-0:" in name for name in names) == 3
    assert all(one["IsDetached"] for one in ours)
    pids = {one["Pid"] for one in ours}
    assert {one.pid for one in partition_of(cluster, topic).replicas} <= pids
    assert len(pids) == len(ours)
    assert ray.available_resources()["CPU"] == 2


def test_a_second_start_is_refused_clearly(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(rayq.RayqError, match=r"named 'default' runs in this Ray already"):
        rayq.start(str(tmp_path))
    path = _data_path(cluster)
    with rayq.start(path, brokers=3, exist_ok=True) as again:  # a notebook's cell, run twice
        assert again.cluster_id == cluster.cluster_id
    with pytest.raises(rayq.RayqError, match=rf"path {path}, not {tmp_path}; 3 brokers, not 4"):
        rayq.start(str(tmp_path), brokers=4, exist_ok=True)
    with pytest.raises(rayq.RayqError, match=r"It has replicas_per_process None, not 7\."):
        rayq.start(path, exist_ok=True, **{"replicas.per.process": 7})
    with pytest.raises(rayq.errors.DirectoryInUseError, match=r"broker-\d is in use by process \d+"):
        rayq.start(path, name="second")
    assert rayq.connect().admin.list_topics() == cluster.admin.list_topics()
    cluster.make_current()


def _data_path(cluster: Cluster) -> str:
    pid = actor_pid("rayq:default:broker-0")
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.endswith("/broker-0/broker.lock"):
            return str(Path(target).parents[1])
    raise AssertionError("broker 0 holds no lock")


def test_a_killed_leader_is_replaced_within_a_second_or_so(cluster: Cluster, topic: str) -> None:
    pauses_s = []
    with _own_topic(cluster, "killed") as load:
        for _ in range(2):  # The machine may be busy with other work during one of them.
            wait_in_sync(cluster, "killed")
            load.forget_pauses()
            os.kill(replica_pid(cluster, "killed", leader_of(cluster, "killed")), signal.SIGKILL)
            load.wait_for_more()
            pauses_s.append(load.longest_pause_s)
    load.check()
    assert min(pauses_s) < 3


@pytest.mark.thorough
def test_a_leader_that_hangs_is_replaced_within_its_session(cluster: Cluster, topic: str) -> None:
    with _own_topic(cluster, "hung") as load:
        pid = replica_pid(cluster, "hung", leader_of(cluster, "hung"))
        os.kill(pid, signal.SIGSTOP)
        load.wait_for_more()
        eventually(lambda: is_gone(pid), "it is killed")
        wait_in_sync(cluster, "hung")
    load.check()
    assert load.longest_pause_s < 15


def test_a_killed_controller_is_not_missed_and_changes_go_on(cluster: Cluster, topic: str) -> None:
    before = cluster.admin.describe_cluster()
    topics = cluster.admin.list_topics()
    pauses_s, created = [], []
    with _own_topic(cluster, "without-controller") as load:
        for turn in range(2):  # The machine may be busy with other work during one of them.
            eventually(lambda: actor_pid("rayq:default:controller") is not None, "it runs")
            load.forget_pauses()
            os.kill(actor_pid("rayq:default:controller") or 0, signal.SIGKILL)
            with ThreadPoolExecutor(1) as threads:
                meanwhile = threads.submit(rayq.connect)
                load.wait_for_more(50)
                created.append(f"after-controller-{turn}")
                cluster.create_topic(created[-1], timeout_s=100)
                load.wait_for_more(50)
            assert meanwhile.result().cluster_id == before.cluster_id
            pauses_s.append(load.longest_pause_s)
    cluster.make_current()
    load.check()
    assert min(pauses_s) < 3
    after = cluster.admin.describe_cluster()
    assert after.controller_epoch > before.controller_epoch
    assert after.cluster_id == before.cluster_id and all(one.live for one in after.brokers)
    expected = {*topics, "without-controller", *created}
    assert set(cluster.admin.list_topics()) == expected


def test_replicas_outlive_their_broker_and_attach_to_the_next(cluster: Cluster, topic: str) -> None:
    with _own_topic(cluster, "orphans") as load:
        info = wait_in_sync(cluster, "orphans")
        pids = {one.broker: one.pid for one in info.replicas}
        broker = info.leader
        pid = actor_pid(f"rayq:default:broker-{broker}")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        load.wait_for_more(50)
        eventually(
            lambda: actor_pid(f"rayq:default:broker-{broker}") not in (None, pid),
            "Ray started the broker again",
            120,
        )
        load.wait_for_more(50)
        info = wait_in_sync(cluster, "orphans")
        assert {one.broker: one.pid for one in info.replicas} == pids
    load.check()
    assert load.longest_pause_s < 15


def _own_topic(cluster: Cluster, name: str) -> Load:
    cluster.create_topic(name)
    return Load(cluster, name, pause_s=0.005)


def test_too_many_replicas_are_refused_with_the_arithmetic(cluster: Cluster, topic: str) -> None:
    with pytest.raises(
        rayq.errors.ReplicaLimitError, match=r"\d+ \+ 9000 = \d+ .*max_replicas_per_broker"
    ):
        cluster.create_topic("too-many", partitions=9000)
    assert "too-many" not in cluster.admin.list_topics()


def _serving(cluster: Cluster) -> set[int | None]:
    """The processes that host any replica."""
    return {
        replica.pid
        for name in cluster.admin.list_topics()
        for partition in cluster.admin.describe_topic(name).partitions
        for replica in partition.replicas
    }


def test_deleted_topics_end_their_processes(cluster: Cluster, topic: str) -> None:
    cluster.create_topic("short-lived")
    pids = {one.pid for one in partition_of(cluster, "short-lived").replicas if one.pid}
    cluster.admin.delete_topic("short-lived")
    eventually(
        lambda: all(is_gone(pid) for pid in pids if pid not in _serving(cluster)),
        "the processes end that host no other replica",
    )
    assert cluster.admin.delete_records({TopicPartition(topic, 0): 0})


@pytest.mark.thorough
def test_a_partition_moves_though_the_process_that_copies_it_is_killed(cluster: Cluster) -> None:
    cluster.create_topic("moving", replication_factor=2, segment_bytes=1 << 20)
    with cluster.producer(compression_type="none") as producer:
        producer.send_many("moving", [b"0" * 1024] * 2048).result(60)
    before = [one.broker for one in partition_of(cluster, "moving").replicas]
    (added,) = {0, 1, 2} - set(before)
    place, leaving = TopicPartition("moving", 0), replica_pid(cluster, "moving", before[0])
    target = [added, before[1]]
    cluster.create_topic("moving-load", replication_factor=2)
    load_place = TopicPartition("moving-load", 0)
    load_before = [one.broker for one in partition_of(cluster, "moving-load").replicas]
    load_target = [*({0, 1, 2} - set(load_before)), load_before[1]]
    with Load(cluster, "moving-load") as load:
        cluster.admin.reassign_partitions(
            {place: target, load_place: load_target}, throttle_bytes_per_s=512 * 1024, wait=False
        )
        os.kill(replica_pid(cluster, "moving", added), signal.SIGKILL)
        # Again, without the throttle: it begins where the one before was killed.
        cluster.admin.reassign_partitions({place: target, load_place: load_target}, timeout_s=60)
        load.wait_for_more()
    assert load.failures() == []
    load.check()
    eventually(lambda: partition_of(cluster, "moving").leader in target, "one of them leads")
    eventually(
        lambda: leaving in _serving(cluster) or is_gone(leaving),
        "the process of the replica that left ends, or hosts others",
    )
    assert len(read_all(cluster, "moving")) == 2048

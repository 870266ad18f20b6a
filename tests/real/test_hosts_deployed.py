"""`deploy/local.yaml` on hosts with networks and processes of their own, under faults."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from proving.deployment import PORT, Deployment
from proving.hosts import Host, Hosts, why_not
from rayq import Cluster, TopicPartition
from rayq.errors import TimeoutError
from tests.local.support import Load, eventually, leader_of, read_all, wait_in_sync

PARTITIONS = 2
WRITER = """
import json, os, sys, time, rayq
from rayq.errors import RayqError
address, token, partition, acks = sys.argv[1:]
cluster = rayq.connect(address, token=token)
producer = cluster.producer(
    acks="all" if acks == "all" else int(acks), delivery_timeout_ms=3000, request_timeout_ms=1000
)
producer.send("t", b"0", key=acks.encode() + b" acks", partition=int(partition)).result(60)
print("ready")
while not os.path.exists("/tmp/go"):
    time.sleep(0.01)
futures = [producer.send("t", b"cut off", partition=int(partition)) for _ in range(10)]
answers = []
for future in futures:
    try:
        answers.append(future.result(60).offset)
    except RayqError as error:
        answers.append(type(error).__name__)
print(json.dumps(answers))
sys.stdout.flush()
os._exit(0)  # Closing the producer would raise what the answers tell.
"""
"""Writes to a leader from its own host, once that is cut off. Prints the outcome of each record."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        # Where the test is possible, nobody would notice that it was skipped.
        assert os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("sshd")), reason
        pytest.skip(reason)
    with Hosts(tmp_path, 5) as made:
        yield made


@pytest.mark.thorough
def test_a_deployed_cluster_outlives_a_cut_off_and_a_killed_host(hosts: Hosts) -> None:
    """`ray up`, a real partition with the old leader alive on the other side, a host that dies, a
    host that is added: no acknowledged record is lost."""
    desk, head, first, second, spare = hosts
    deployment = Deployment(desk, [head, first, second], hosts.key)
    deployment.up()
    with deployment.connect() as cluster:
        brokers = cluster.admin.describe_cluster().brokers
        assert {one.host for one in brokers} == {host.address for host in (head, first, second)}
        cluster.create_topic("t", partitions=PARTITIONS, replication_factor=3)
        leaders = {leader_of(cluster, "t", one) for one in range(PARTITIONS)}
        cut, killed = first, second
        if _broker_on(cluster, cut) not in leaders:
            cut, killed = killed, cut
        with Load(cluster, "t") as load:
            _cut_off(cluster, cut, load)
            _kill_and_add(cluster, deployment, killed, spare, load)
        values = {record.value for record in read_all(cluster, "t")}
        assert b"cut off" not in values
        load.check()
        assert load.failures() == []


@pytest.mark.thorough
def test_a_deployed_cluster_goes_on_without_rays_head_and_takes_the_new_one(hosts: Hosts) -> None:
    """The head's host dies, with a broker and perhaps the controller on it. The others go on; the
    same `ray up` brings Ray's head and all brokers back on their disks."""
    desk, head, *others = hosts
    deployment = Deployment(desk, [head, *others[:2]], hosts.key)
    deployment.up()
    with deployment.connect() as cluster:
        cluster.create_topic("t", partitions=PARTITIONS, replication_factor=3)
        lost = _broker_on(cluster, head)
        with Load(cluster, "t") as load:
            head.kill()
            eventually(lambda: lost not in _live(cluster), "its session is over", 30)
            eventually(
                lambda: all(leader_of(cluster, "t", one) != lost for one in range(PARTITIONS)),
                "others lead",
            )
            # Its replicas want new processes, which only Ray's head can start. The brokers that ask
            # for them serve on meanwhile.
            with contextlib.suppress(TimeoutError):
                cluster.create_topic("u", partitions=2, replication_factor=2, timeout_s=20)
            load.wait_for_more(2_000)
            head.boot()
            deployment.up()
            _wait_all_in_sync(cluster, 3)
            load.wait_for_more(200)
        with cluster.producer() as producer:
            producer.send("u", b"at last").result(60)
        load.check()
        assert load.failures() == []


def _broker_on(cluster: Cluster, host: Host) -> int:
    brokers = cluster.admin.describe_cluster().brokers
    return next(one.broker for one in brokers if one.host == host.address)


def _live(cluster: Cluster) -> set[int]:
    return {one.broker for one in cluster.admin.describe_cluster().brokers if one.live}


def _wait_all_in_sync(cluster: Cluster, brokers: int) -> None:
    for partition in range(PARTITIONS):
        wait_in_sync(cluster, "t", brokers, partition, timeout_s=60)


def _cut_off(cluster: Cluster, host: Host, load: Load) -> None:
    """A real partition: the leader on the host goes on, and reaches itself and a producer beside
    it. It must not get a single record into the log that all acknowledge."""
    broker = _broker_on(cluster, host)
    partition = next(n for n in range(PARTITIONS) if leader_of(cluster, "t", n) == broker)
    writers = [
        host.start(
            "python", "-c", WRITER, f"{host.address}:{PORT}", cluster.token, str(partition), acks
        )
        for acks in ("1", "all")
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    host.cut()
    (host.root / "tmp/go").touch()
    eventually(lambda: leader_of(cluster, "t", partition) != broker, "somebody else leads", 30)
    load.wait_for_more(200)
    by_one, by_all = (json.loads(writer.communicate(timeout=60)[0]) for writer in writers)
    host.mend()
    # The leader could tell only after a while that it was alone, so it took records that no other
    # replica was to get.
    assert any(isinstance(answer, int) for answer in by_one), by_one
    assert all(isinstance(answer, str) for answer in by_all), by_all
    _wait_all_in_sync(cluster, 3)


def _kill_and_add(
    cluster: Cluster, deployment: Deployment, host: Host, spare: Host, load: Load
) -> None:
    """A host dies, and another is added as an operator does: its address is added to the file, and
    `ray up` restarts nothing."""
    dead = _broker_on(cluster, host)
    known = {one.broker for one in cluster.admin.describe_cluster().brokers}
    host.kill()
    deployment.machines.append(spare)
    deployment.up("--no-restart")
    eventually(lambda: dead not in _live(cluster), "its session is over", 30)
    eventually(
        lambda: all(leader_of(cluster, "t", one) != dead for one in range(PARTITIONS)),
        "others lead",
    )
    load.wait_for_more(200)
    eventually(lambda: bool(_live(cluster) - known), "a broker more", 60)
    # The new host takes over the replicas of the dead one.
    (new,) = _live(cluster) - known
    cluster.admin.reassign_partitions(
        {TopicPartition("t", one): sorted(_live(cluster)) for one in range(PARTITIONS)},
        timeout_s=60,
    )
    for partition in range(PARTITIONS):
        assert new in wait_in_sync(cluster, "t", 3, partition).isr
    load.wait_for_more(200)

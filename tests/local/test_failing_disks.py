"""A full disk heals when space returns; a disk that fails a sync ends its replica."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayq.actors.broker import replica_processes
from rayq.cli.cluster_snapshot import snapshot_of, troubles_of
from rayq.client.admin.health import Problem
from rayq.errors import (
    DeliveryError,
    DiskFullError,
    InvalidReplicationFactorError,
    RayqError,
)
from rayq.storage.batch import encode_batch
from rayq.testing import LocalCluster
from tests.local.faulty_disk import Faults
from tests.local.support import (
    FAST,
    Load,
    eventually,
    leader_of,
    partition_of,
    place,
    produce_raw,
    read_all,
    values,
    wait_in_sync,
)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    made = Faults()
    made.install(monkeypatch)
    return made


@pytest.fixture
def faulty(faults: Faults, tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        3, data_dir=tmp_path / "data", replica_lag_time_max_ms=600, **FAST
    ) as cluster:
        yield cluster


def test_a_full_disk_of_the_leader_is_said_and_heals(faults: Faults, faulty: LocalCluster) -> None:
    faulty.create_topic("t")
    faulty.create_topic("other")
    with faulty.producer() as producer:
        producer.send("t", b"0").result(60)
        faults.full.add(f"broker-{leader_of(faulty, 't')}/t-0")
        with pytest.raises(DiskFullError, match="no room for the append"):
            produce_raw(faulty, "t", encode_batch([b"x"], timestamps_ms=1))
        with (
            pytest.raises(DeliveryError, match="no room for the append"),
            faulty.producer(delivery_timeout_ms=2000) as impatient,
        ):
            impatient.send("t", b"given up")
        producer.send("other", b"others go on").result(60)
        future = producer.send("t", b"1")
        faults.full.clear()
        assert future.result(60).offset == 1
    assert values(read_all(faulty, "t")) == [b"0", b"1"]
    assert len(wait_in_sync(faulty, "t").isr) == 3


def test_a_full_disk_of_a_follower_costs_it_its_place_until_space_returns(
    faults: Faults, faulty: LocalCluster
) -> None:
    faulty.create_topic("t")
    with faulty.producer() as producer:
        producer.send("t", b"0").result(60)
        follower = next(
            one for one in partition_of(faulty, "t").isr if one != leader_of(faulty, "t")
        )
        faults.full.add(f"broker-{follower}/")
        producer.send("t", b"1").result(60)
        eventually(lambda: follower not in partition_of(faulty, "t").isr, "it left")
        producer.send("t", b"2").result(60)
        faults.full.clear()
        wait_in_sync(faulty, "t")
    assert values(read_all(faulty, "t")) == [b"0", b"1", b"2"]


def test_a_disk_that_is_full_all_over_heals_too(faults: Faults, faulty: LocalCluster) -> None:
    faulty.create_topic("t")
    with Load(faulty, "t") as load:
        faults.full.add(f"broker-{leader_of(faulty, 't')}/")
        eventually(lambda: _fails_or_moves(faulty), "the full disk is noticed")
        faults.full.clear()
        load.wait_for_more()
        wait_in_sync(faulty, "t")
    load.check()


def _fails_or_moves(cluster: LocalCluster) -> bool:
    try:
        produce_raw(cluster, "t", encode_batch([b"-1"], timestamps_ms=1), timeout_s=0.5)
    except RayqError:
        return True
    return False


def test_after_a_failed_sync_a_follower_takes_over_and_nothing_is_lost(
    faults: Faults, faulty: LocalCluster
) -> None:
    faulty.create_topic("t")
    with Load(faulty, "t") as load:
        failing = leader_of(faulty, "t")
        faults.sync_fails.add(f"broker-{failing}/t-0")
        eventually(lambda: leader_of_or_none(faulty) not in (failing, None), "another leads")
        load.wait_for_more()
        eventually(lambda: failing not in partition_of(faulty, "t").isr, "it left")
    load.check()


def leader_of_or_none(cluster: LocalCluster) -> int | None:
    return partition_of(cluster, "t").leader


def test_a_follower_whose_sync_fails_leaves_and_the_rest_goes_on(
    faults: Faults, faulty: LocalCluster
) -> None:
    faulty.create_topic("t")
    with Load(faulty, "t") as load:
        failing = next(
            one for one in partition_of(faulty, "t").isr if one != leader_of(faulty, "t")
        )
        faults.sync_fails.add(f"broker-{failing}/t-0")
        eventually(lambda: failing not in partition_of(faulty, "t").isr, "it leaves")
        load.wait_for_more()
        # A new process of the broker trusts its disk again, once the disk is mended.
        faults.sync_fails.clear()
        faulty.kill_broker(failing)
        faulty.start_broker(failing)
        wait_in_sync(faulty, "t")
    load.check()


def test_a_stop_with_a_full_disk_is_prompt_and_loses_nothing(
    faults: Faults, tmp_path: Path
) -> None:
    cluster = LocalCluster(3, data_dir=tmp_path, **FAST)
    cluster.create_topic("t")
    with cluster.producer() as producer:
        producer.send_many("t", [b"x"] * 100).result(60)
    faults.full.add("/t-0/")
    started_s = time.monotonic()
    cluster.stop()
    assert time.monotonic() - started_s < replica_processes.STOP_TIMEOUT_S
    faults.full.clear()
    with LocalCluster(3, data_dir=tmp_path, **FAST) as cluster:
        assert len(read_all(cluster, "t")) == 100


def test_a_topic_made_again_is_safe_from_a_checkpoint_of_the_old_one_that_hung(
    faults: Faults, faulty: LocalCluster
) -> None:
    faulty.create_topic("t")
    with faulty.producer() as producer:
        producer.send_many("t", [b"old"] * 50).result(60)
    isr = wait_in_sync(faulty, "t").isr
    follower = next(one for one in isr if one != leader_of(faulty, "t"))
    faults.held = f"broker-{follower}/t-0/checkpoint.tmp"
    with pytest.raises(TimeoutError):
        faulty.admin.delete_records({place("t"): 20}, timeout_s=0.5)
    assert faults.is_held.wait(60)
    faulty.admin.delete_topic("t")
    with contextlib.suppress(TimeoutError):  # The creation waits for the thread that hangs.
        faulty.admin.create_topic("t", timeout_s=1)
    faults.go_on.set()
    faulty.create_topic("t", exist_ok=True)  # A busy machine may not have begun it by then.
    with faulty.producer() as producer:
        producer.send_many("t", [b"new"] * 5).result(60)
    wait_in_sync(faulty, "t")
    faulty.kill_broker(follower)
    eventually(lambda: follower not in partition_of(faulty, "t").isr, "it is gone")
    faulty.start_broker(follower)
    wait_in_sync(faulty, "t")
    assert values(read_all(faulty, "t")) == [b"new"] * 5


@pytest.fixture
def losing(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(3, data_dir=tmp_path / "data", **FAST) as cluster:
        cluster.create_topic("t")
        with cluster.producer() as producer:
            producer.send_many("t", [b"%d" % number for number in range(50)]).result(60)
        yield cluster


@pytest.mark.parametrize("loss", ["removed", "emptied", "replaced by a copy"])
def test_a_broker_whose_directory_is_lost_gives_up_and_says_what_to_do(
    losing: LocalCluster, tmp_path: Path, loss: str
) -> None:
    leader = leader_of(losing, "t")
    path, aside = tmp_path / f"data/broker-{leader}", tmp_path / "aside"
    if loss == "emptied":
        aside.mkdir()
        for held in path.iterdir():
            held.rename(aside / held.name)
    else:
        path.rename(aside)
        if loss == "replaced by a copy":
            shutil.copytree(aside, path)
    eventually(lambda: leader_of(losing, "t") not in (None, leader), "another leads")
    with losing.producer() as producer:
        producer.send("t", b"50").result(60)
    assert values(read_all(losing, "t")) == [b"%d" % number for number in range(51)]

    def told() -> Problem | None:
        found = snapshot_of(losing).problems()
        return next((one for one in found if one.what == f"Broker {leader} cannot use its disk"), None)

    eventually(lambda: told() is not None, "it is told")
    problem = told()
    assert problem is not None and str(path) in problem.why
    assert f"rayq cluster replace-disk {leader}" in problem.next_command
    assert str(path) in troubles_of(losing, losing.admin.describe_cluster())[leader]

    if loss == "removed":  # A disk that is mounted again heals.
        aside.rename(path)
        wait_in_sync(losing, "t")
        eventually(lambda: told() is None, "all is well")


def test_a_broker_without_its_directory_counts_for_no_majority(
    losing: LocalCluster, tmp_path: Path
) -> None:
    """What it writes would be lost with its process."""
    paths = [tmp_path / f"data/broker-{broker}" for broker in (0, 1)]
    for path in paths:
        path.rename(path.with_name(f"{path.name}-aside"))
    with pytest.raises(RayqError):
        losing.create_topic("lost", timeout_s=3)
    for path in paths:
        path.with_name(f"{path.name}-aside").rename(path)

    def kept() -> bool:
        # A session that was given up may end only now, and then a broker has to come back first.
        try:
            losing.create_topic("kept", replication_factor=3, exist_ok=True, timeout_s=10)
        except RayqError as error:
            if not error.retriable and not isinstance(error, InvalidReplicationFactorError):
                raise
            return False
        return True

    eventually(kept, "both have their sessions again")
    assert len(wait_in_sync(losing, "kept").isr) == 3


def test_a_replica_whose_directory_is_lost_ends_and_another_leads(
    losing: LocalCluster, tmp_path: Path
) -> None:
    leader = leader_of(losing, "t")
    shutil.rmtree(tmp_path / f"data/broker-{leader}/t-0")
    eventually(lambda: leader_of(losing, "t") not in (None, leader), "another leads")
    with losing.producer() as producer:
        producer.send("t", b"50").result(60)
    assert values(read_all(losing, "t")) == [b"%d" % number for number in range(51)]
    assert len(losing.admin.describe_cluster().brokers) == 3
    assert all(one.live for one in losing.admin.describe_cluster().brokers)


    def failed() -> float:
        samples = losing.metrics()
        return sum(sample.value for sample in samples if sample.name == "rayq_failed_replicas")

    assert failed() == 1
    losing.admin.delete_topic("t")
    eventually(lambda: failed() == 0, "the replica is forgotten with its topic")

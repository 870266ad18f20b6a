"""The majority of the metadata's voters is lost: one directory has to be enough."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rayq.actors.remote import catch_up
from rayq.client.environment import system_environment
from rayq.core.cluster.records import VotersChanged, decode_record
from rayq.errors import DirectoryInUseError, InvalidRequestError
from rayq.runtime.layout import find_directories, format_broker
from rayq.runtime.ray import cluster as ray_cluster
from rayq.runtime.recover_quorum import EPOCH_LEAP, recover_quorum, survivors
from rayq.storage.data_directory import read_secret
from rayq.storage.disk import LocalDisk
from rayq.storage.metadata_log import MetadataLog
from rayq.testing import LocalCluster
from tests.local.support import (
    FAST,
    eventually,
    leader_of,
    partition_of,
    read_all,
    values,
    wait_in_sync,
)

ENVIRONMENT = system_environment(None)
WRITTEN = [b"%d" % number for number in range(500)]


def _lose_two_of_three(path: Path) -> None:
    with LocalCluster(brokers=3, data_dir=path, **FAST) as cluster:
        cluster.create_topic("t")
        with cluster.producer() as producer:
            producer.send_many("t", WRITTEN).result(60)
        cluster.abort()
    for broker in (0, 1):
        shutil.rmtree(path / f"broker-{broker}")


def test_from_one_of_three_directories_everything_comes_back(tmp_path: Path) -> None:
    _lose_two_of_three(tmp_path)
    done = recover_quorum(ENVIRONMENT, str(tmp_path))
    assert (done.directory.broker, done.topics) == (2, 1)
    assert [voter.broker for voter in done.voters_before] == [0, 1, 2]

    with LocalCluster(data_dir=tmp_path, **FAST) as cluster:
        assert cluster.admin.describe_cluster().voters == [2]
        assert cluster.admin.describe_cluster().controller_epoch > EPOCH_LEAP
        assert cluster.admin.list_topics() == ["t"]
        eventually(
            lambda: "broker 0" in (partition_of(cluster, "t").offline_reason or ""),
            "it says whom it waits for",
        )
        cluster.admin.elect_leaders("t", unclean=True)

        # New disks under the old ids are filled from the copy that is left, and take part again.
        secret = read_secret(ENVIRONMENT.disk, done.directory.path)
        for broker in (0, 1):
            format_broker(
                ENVIRONMENT,
                str(tmp_path),
                broker,
                cluster_id=done.directory.cluster_id,
                secret=secret,
            )
            cluster.start_broker(broker)
        wait_in_sync(cluster, "t")
        eventually(
            lambda: sorted(cluster.admin.describe_cluster().voters) == [0, 1, 2], "three vote again"
        )
        with cluster.producer() as producer:
            producer.send("t", b"together").result(60)
        assert values(read_all(cluster, "t")) == [*WRITTEN, b"together"]


def test_it_is_on_record_that_it_was_not_clean(tmp_path: Path) -> None:
    _lose_two_of_three(tmp_path)
    before = survivors(ENVIRONMENT, str(tmp_path))[0]
    with (tmp_path / "broker-2/metadata/metadata.log").open("ab") as file:
        file.write(b"RQML, torn")
    done = recover_quorum(ENVIRONMENT, str(tmp_path / "broker-2"))
    log = MetadataLog.inspect(LocalDisk(), str(tmp_path / "broker-2/metadata"))
    index, epoch, data = log.read(before.last_index + 1, 1 << 20)[-1]
    assert (index, epoch) == (done.record_index, done.epoch) == (log.last_index, log.promised_epoch)
    assert epoch >= before.epoch + EPOCH_LEAP
    record = decode_record(data)
    assert isinstance(record, VotersChanged)
    assert not record.clean and [voter.broker for voter in record.voters] == [2]
    with pytest.raises(InvalidRequestError, match="1 of the 1 voters"):
        recover_quorum(ENVIRONMENT, str(tmp_path))  # Once is enough.


def test_what_older_metadata_does_not_know_is_not_granted_again(tmp_path: Path) -> None:
    """The copy that is left was written before an election and a block of producer ids. The log
    holds batches of that epoch and that producer: its present leader must be able to append."""
    metadata, old = tmp_path / "broker-2/metadata", tmp_path / "old"
    with LocalCluster(brokers=3, data_dir=tmp_path, **FAST) as cluster:
        cluster.create_topic("t")
        wait_in_sync(cluster, "t")
        shutil.copytree(metadata, old)
        cluster.kill_replica("t", 0, leader_of(cluster, "t"))
        eventually(lambda: partition_of(cluster, "t").leader_epoch > 1, "another leads")
        epoch = wait_in_sync(cluster, "t").leader_epoch
        with cluster.producer() as producer:
            producer.send_many("t", WRITTEN).result(60)
        cluster.abort()
    for lost in (tmp_path / "broker-0", tmp_path / "broker-1", metadata):
        shutil.rmtree(lost)
    shutil.copytree(old, metadata)
    recover_quorum(ENVIRONMENT, str(tmp_path / "broker-2"))
    with LocalCluster(data_dir=tmp_path, **FAST) as cluster:
        cluster.admin.alter_topic_config("t", min_insync_replicas=1)
        eventually(lambda: partition_of(cluster, "t").leader == 2, "what is left leads")
        assert partition_of(cluster, "t").leader_epoch > epoch
        with cluster.producer() as producer:
            producer.send_many("t", WRITTEN).result(60)
        assert values(read_all(cluster, "t")) == [*WRITTEN, *WRITTEN]


def test_what_older_metadata_does_not_know_comes_back_from_the_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All disks are lost but one copy of the metadata, from before anything was stored: the leader
    finds what is in the object store, and goes on behind it."""
    monkeypatch.setattr(catch_up, "LISTING_DELAY_S", 0.0)
    (tmp_path / "store").mkdir()
    options = {**FAST, "remote_storage_url": f"file://{tmp_path}/store"}
    metadata, old = tmp_path / "broker-2/metadata", tmp_path / "old"
    with LocalCluster(brokers=3, data_dir=tmp_path, **options) as cluster:
        cluster.create_topic("t", remote_storage=True, segment_bytes=1024, remote_max_lag_ms=1)
        wait_in_sync(cluster, "t")
        shutil.copytree(metadata, old)
        with cluster.producer() as producer:
            producer.send_many("t", WRITTEN).result(60)
        eventually(
            lambda: cluster.admin.describe_remote_storage("t")[0].remote_end_offset == len(WRITTEN),
            "all of it is in the object store",
        )
        cluster.abort()
    for lost in ("broker-0", "broker-1", "broker-2/metadata", "broker-2/t-0"):
        shutil.rmtree(tmp_path / lost)
    shutil.copytree(old, metadata)
    recover_quorum(ENVIRONMENT, str(tmp_path / "broker-2"))
    with LocalCluster(data_dir=tmp_path, **options) as cluster:
        cluster.admin.alter_topic_config("t", min_insync_replicas=1)
        with cluster.producer() as producer:
            producer.send("t", b"behind").result(60)
        assert values(read_all(cluster, "t")) == [*WRITTEN, b"behind"]
        assert cluster.admin.describe_object_store().troubles == {}  # Its marks count again.


def test_a_voter_that_was_taken_for_lost_follows_the_recovered_one(tmp_path: Path) -> None:
    """Two voters come back after all: though they are a majority of the old voters, they are
    behind."""
    with LocalCluster(brokers=3, data_dir=tmp_path, **FAST) as cluster:
        cluster.create_topic("t")
        with cluster.producer() as producer:
            producer.send_many("t", WRITTEN).result(60)
        cluster.abort()
    aside = tmp_path / "aside"
    aside.mkdir()
    for broker in (0, 1):
        (tmp_path / f"broker-{broker}").rename(aside / f"broker-{broker}")
    recover_quorum(ENVIRONMENT, str(tmp_path))
    for broker in (0, 1):
        (aside / f"broker-{broker}").rename(tmp_path / f"broker-{broker}")
    with LocalCluster(data_dir=tmp_path, **FAST) as cluster:
        eventually(
            lambda: sorted(cluster.admin.describe_cluster().voters) == [0, 1, 2], "three vote again"
        )
        assert cluster.admin.describe_cluster().controller_epoch > EPOCH_LEAP
        wait_in_sync(cluster, "t")
        assert values(read_all(cluster, "t")) == WRITTEN


def test_where_a_majority_is_left_nothing_is_touched(tmp_path: Path) -> None:
    with LocalCluster(brokers=3, data_dir=tmp_path, **FAST) as cluster:
        cluster.abort()
    shutil.rmtree(tmp_path / "broker-0")
    before = survivors(ENVIRONMENT, str(tmp_path))
    for path in (tmp_path, tmp_path / "broker-1"):  # also where only one of the two is named
        with pytest.raises(InvalidRequestError, match="2 of the 3 voters"):
            recover_quorum(ENVIRONMENT, str(path))
    assert survivors(ENVIRONMENT, str(tmp_path)) == before


def test_a_start_on_ray_names_the_voters_that_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(brokers=3, data_dir=tmp_path, **FAST) as cluster:
        cluster.abort()
    root = str(tmp_path)
    monkeypatch.setattr(
        ray_cluster, "on_node", lambda _node, job, *given: job(ENVIRONMENT, *given)
    )
    shutil.rmtree(tmp_path / "broker-0")
    found = {"empty": [], "node": find_directories(ENVIRONMENT, root)}
    assert ray_cluster._why_no_quorum(root, found) is None
    shutil.rmtree(tmp_path / "broker-1")
    format_broker(ENVIRONMENT, str(tmp_path / "other"), 0, cluster_id="c", secret=b"s")
    found["blank"] = find_directories(ENVIRONMENT, str(tmp_path / "other"))
    why = ray_cluster._why_no_quorum(root, found)
    assert why is not None and "brokers 0, 1, 2, the directories of 0, 1 are not there" in why
    assert f"rayq cluster recover-quorum --from {root}" in why
    metadata = tmp_path / "broker-2" / "metadata"
    shutil.rmtree(metadata)
    why = ray_cluster._why_no_quorum(root, found)
    assert why is not None and "holds metadata" in why and "move these directories away" in why


def test_a_directory_in_use_and_one_that_holds_nothing_are_refused(tmp_path: Path) -> None:
    with LocalCluster(brokers=3, data_dir=tmp_path, **FAST) as cluster:
        cluster.kill_broker(2)  # only its directory is idle now
        for path in (tmp_path, tmp_path / "broker-2"):
            with pytest.raises(DirectoryInUseError, match="stop all brokers first"):
                recover_quorum(ENVIRONMENT, str(path))
    with pytest.raises(InvalidRequestError, match="no broker's directory"):
        recover_quorum(ENVIRONMENT, str(tmp_path / "nothing"))
    empty = format_broker(ENVIRONMENT, str(tmp_path / "new"), 3, cluster_id="c", secret=b"s").path
    with pytest.raises(InvalidRequestError, match="broker-3 holds no metadata: recover from"):
        recover_quorum(ENVIRONMENT, empty)


def test_a_directory_that_holds_something_is_not_replaced(tmp_path: Path) -> None:
    with LocalCluster(brokers=1, data_dir=tmp_path, **FAST):
        pass
    with pytest.raises(InvalidRequestError, match="not empty"):
        format_broker(ENVIRONMENT, str(tmp_path), 0, cluster_id="c", secret=b"s")

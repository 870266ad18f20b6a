"""Brokers and their object store: topics wait for it, one cluster uses it, nothing stays in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rayq.actors.broker import remote_garbage, store_ownership
from rayq.errors import ConfigError, InvalidRequestError, TimeoutError
from rayq.messages import PinSnapshot, RestoreTopic
from rayq.messages.remote_names import ObjectKind, RemoteName, partition_prefix
from rayq.messages.remote_pointer import RemotePointer
from rayq.records import SnapshotPin
from rayq.testing import LocalCluster
from tests.local.support import FAST, eventually

TIERED = {"remote_storage": True, "segment_bytes": 1024, "remote_max_lag_ms": 1}


@pytest.fixture
def tiered(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalCluster]:
    """Two brokers with an object store, of which deleted topics leave at once."""
    monkeypatch.setattr(store_ownership, "CHECK_INTERVAL_S", 0.2)
    monkeypatch.setattr(remote_garbage, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(remote_garbage, "LATE_PUTS_MS", 0)
    with LocalCluster(
        brokers=2,
        data_dir=tmp_path / "data",
        remote_storage_url=f"file://{store}",
        remote_delete_delay_ms=0,
        **FAST,
    ) as cluster:
        yield cluster


def objects(store: Path, cluster: LocalCluster, kind: str = "data") -> list[str]:
    """The names of the objects of all partitions."""
    return [str(path.relative_to(store)) for path in store.glob(f"{cluster.cluster_id}/*/*/{kind}/*")]


def write_until_stored(cluster: LocalCluster, store: Path, topic: str) -> None:
    with cluster.producer() as producer:
        for number in range(50):
            producer.send(topic, b"%d" % number * 100).result(60)
    eventually(lambda: bool(objects(store, cluster)), "records are in the object store")


def test_an_object_server_that_dies_is_replaced(tiered: LocalCluster) -> None:
    tiered.create_topic("t", **TIERED)
    tiered.kill_object_server(0)
    eventually(lambda: 0 in troubles(tiered), "it is gone")
    eventually(lambda: not troubles(tiered), "another one works")


def test_a_topic_waits_until_each_broker_reaches_the_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/not-mounted"
    with LocalCluster(brokers=1, data_dir=tmp_path / "data", remote_storage_url=url) as cluster:
        eventually(lambda: "not-mounted" in troubles(cluster).get(0, ""), "the broker has tried")
        with pytest.raises(TimeoutError, match="not-mounted"):
            cluster.create_topic("t", **TIERED, timeout_s=2)
        cluster.create_topic("plain")
        (tmp_path / "not-mounted").mkdir()
        cluster.create_topic("t", **TIERED, timeout_s=60)
        cluster.admin.alter_topic_config("plain", remote_storage=True)


def test_without_a_store_no_topic_is_stored_there(cluster: LocalCluster) -> None:
    with pytest.raises(ConfigError, match="remote_storage_url"):
        cluster.create_topic("never", remote_storage=True)


def test_a_deleted_topic_leaves_nothing_in_the_store(tiered: LocalCluster, store: Path) -> None:
    tiered.create_topic("t", **TIERED)
    write_until_stored(tiered, store, "t")
    tiered.admin.delete_topic("t")
    eventually(lambda: not tiered.admin.describe_object_store().garbage, "it is removed")
    assert not [path for path in store.rglob("*") if path.is_file() and "data" in path.parts]
    assert not objects(store, tiered, "manifest")


def test_a_topic_that_leaves_the_store_keeps_what_is_on_disk(
    tiered: LocalCluster, store: Path
) -> None:
    tiered.create_topic("t", **TIERED)
    write_until_stored(tiered, store, "t")
    with pytest.raises(ConfigError, match="delete_remote"):
        tiered.admin.alter_topic_config("t", remote_storage=False)
    tiered.admin.alter_topic_config("t", remote_storage=False, delete_remote=True)
    eventually(lambda: not tiered.admin.describe_object_store().garbage, "it is removed")
    eventually(lambda: not objects(store, tiered), "nothing is stored any more")
    with tiered.consumer("t", auto_offset_reset="earliest") as consumer:
        assert len(list(consumer.until_end(60))) == 50
    tiered.admin.alter_topic_config("t", remote_storage=True)
    eventually(lambda: bool(objects(store, tiered)), "it is stored again")


def test_a_mark_of_another_cluster_stops_stores_and_deletes_and_no_reads(
    tiered: LocalCluster, store: Path
) -> None:
    tiered.create_topic("t", **TIERED)
    write_until_stored(tiered, store, "t")
    owners = store / tiered.cluster_id / "owners"
    assert list(owners.iterdir())  # This cluster's own.
    clone = owners / f"{10**6:020d}-{'c' * 32}"
    clone.write_bytes(b"")
    eventually(lambda: len(troubles(tiered)) == 2, "the mark is noticed")
    assert all("another cluster" in one for one in troubles(tiered).values())

    tiered.create_topic("u", remote_storage=True)
    tiered.admin.delete_topic("u")
    before = objects(store, tiered)
    with tiered.consumer("t", auto_offset_reset="earliest") as consumer:
        assert len(list(consumer.until_end(60))) == 50
    assert objects(store, tiered) == before and tiered.admin.describe_object_store().garbage

    clone.unlink()
    eventually(lambda: not troubles(tiered), "it goes on")
    eventually(lambda: not tiered.admin.describe_object_store().garbage, "and removes what it left")


def test_a_pointer_of_the_wire_names_nothing_but_folders_that_nobody_uses(
    tiered: LocalCluster, store: Path
) -> None:
    """Whoever may make topics may ask for a restore; what it names is deleted with the topic."""
    tiered.create_topic("t", 2, **TIERED)
    write_until_stored(tiered, store, "t")
    topic_id = tiered.admin.describe_topic("t").topic_id
    client, background = tiered.shared_client()

    def restore(name: str, manifest: str, **changes: int) -> None:
        pointer = RemotePointer(1, 1, manifest, 0, 5, 1, 10)
        request = RestoreTopic(
            name=name, partitions=1, replication_factor=1, config={"remote_storage": True},
            pointers=[msgspec.structs.replace(pointer, **changes)],
        )
        background.run(client.change(request, timeout_s=60))

    other = partition_prefix("a" * 32, "b" * 32, 0)
    victim = store / str(RemoteName(other, ObjectKind.DATA, 0, 1, 1))
    victim.parent.mkdir(parents=True)
    victim.write_bytes(b"of another cluster")
    mine = partition_prefix(tiered.cluster_id, topic_id, 1)
    sound = str(RemoteName(other, ObjectKind.MANIFEST, 1, 1, 1))
    for number, wrong in enumerate(
        (f"{tiered.cluster_id}/x/y", "a/b/c", f"{'a' * 32}/x/y", "../x/y/z",
         str(RemoteName(mine, ObjectKind.MANIFEST, 1, 1, 1)))
    ):
        with pytest.raises(InvalidRequestError, match="cannot be restored"):
            restore(f"wrong-{number}", wrong)
    for number, numbers in enumerate(
        ({"leader_epoch": 2**64 - 1}, {"end_epoch": 2**63}, {"end": 2**62}, {"version": 2**63})
    ):
        with pytest.raises(InvalidRequestError, match="cannot be restored"):
            restore(f"beyond-{number}", sound, **numbers)
    tiered.create_topic("next")  # It gets a leader.
    with tiered.producer() as producer:
        producer.send("next", b"1").result(60)

    # A folder of a cluster that was not taken over may be named; nothing there is changed.
    restore("theirs", sound)
    tiered.admin.delete_topic("theirs")
    tiered.admin.delete_topic("t")
    eventually(lambda: not objects(store, tiered), "this cluster's own are removed")
    eventually(
        lambda: {one.name for one in tiered.admin.describe_object_store().garbage} == {"theirs"},
        "and nothing else",
    )
    assert victim.read_bytes() == b"of another cluster"


def test_a_pin_lasts_until_its_time_is_over_or_a_job_ends_it(tiered: LocalCluster) -> None:
    tiered.create_topic("t", partitions=2, **TIERED)
    topic_id = tiered.admin.describe_topic("t").topic_id
    pin(tiered, "short", topic_id, ttl_ms=1)
    pin(tiered, "long", topic_id, ttl_ms=3_600_000)
    eventually(lambda: [one.pin_id for one in pins(tiered)] == ["long"], "one pin is over")
    tiered.kill_controller()
    assert pins(tiered)[0].starts == {0: 5, 1: 0}
    tiered.admin.unpin("long")
    eventually(lambda: not pins(tiered), "the other pin is ended")


def pin(cluster: LocalCluster, pin_id: str, topic_id: str, ttl_ms: int) -> None:
    client, background = cluster.shared_client()
    request = PinSnapshot(pin_id=pin_id, topic_id=topic_id, starts={0: 5, 1: 0}, ttl_ms=ttl_ms)
    background.run(client.change(request, timeout_s=60))


def pins(cluster: LocalCluster) -> list[SnapshotPin]:
    return cluster.admin.describe_object_store().pins


def troubles(cluster: LocalCluster) -> dict[int, str]:
    return cluster.admin.describe_object_store().troubles

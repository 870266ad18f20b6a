"""Remote storage as operators see it: status, checks, pins, health, the way back of a topic."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayq import RemotePartitionInfo
from rayq.errors import ConfigError, InvalidRequestError
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.support import FAST, eventually, read_all

RECORDS = 40
VALUE_BYTES = 500
SMALL: dict[str, Any] = {"segment_bytes": 4096, "local_retention_bytes": 0, "replication_factor": 2}
QUICK = {**FAST, "retention_check_interval_ms": 100}


@pytest.fixture
def cluster(tmp_path: Path, store: Path) -> Iterator[LocalCluster]:
    with started(tmp_path / "data", store) as cluster:
        yield cluster


def started(data: Path, store: Path) -> LocalCluster:
    return LocalCluster(
        brokers=2, data_dir=data, remote_storage_url=f"file://{store}", **QUICK
    )


def record(number: int) -> bytes:
    """A value that does not compress."""
    return b"%d " % number + os.urandom(VALUE_BYTES)


def fill(
    cluster: LocalCluster, topic: str = "flights", partitions: int = 1, **options: Any
) -> list[bytes]:
    """A topic whose closed segments are in the object store, and, unless `options` say otherwise,
    on no disk any more. Returns the values of partition 0."""
    cluster.create_topic(topic, partitions, remote_storage=True, **(SMALL | options))
    sent = [record(number) for number in range(RECORDS)]
    with cluster.producer(linger_ms=0) as producer:
        for value in sent:  # One by one, so that segments are small.
            producer.send(topic, value, partition=0).result(60)
    has_arrived = is_stored if "local_retention_bytes" in options else is_away
    eventually(lambda: has_arrived(remote(cluster, topic)), "what is closed is in the store")
    return sent


def remote(cluster: LocalCluster, topic: str = "flights") -> RemotePartitionInfo:
    return cluster.admin.describe_remote_storage(topic)[0]


def is_stored(one: RemotePartitionInfo) -> bool:
    return one.lag_bytes == 0 and bool(one.remote_end_offset)


def is_away(one: RemotePartitionInfo) -> bool:
    return is_stored(one) and one.local_start_offset == one.remote_end_offset


def objects(store: Path) -> list[Path]:
    return sorted(store.glob("*/*/*/data/*"))


def test_status_says_what_is_where(rayq_command: Command, cluster: LocalCluster) -> None:
    sent = fill(cluster, partitions=2)
    found = rayq_command.well("storage", "status", "--json").json
    first, second = found["partitions"]
    assert found["url"].startswith("file:///") and found["troubles"] == {}
    assert first["topic"] == "flights" and first["trouble"] is None
    assert 0 == first["log_start_offset"] < first["local_start_offset"] <= RECORDS
    assert first["high_watermark"] == RECORDS and first["lag_bytes"] == 0
    assert first["remote_bytes"] > first["remote_end_offset"] * VALUE_BYTES
    assert second["remote_end_offset"] is None and second["remote_bytes"] == 0
    shown = rayq_command.well("storage", "status", "flights").out
    assert "remote end" in shown and "0 pins" in shown
    described = rayq_command.well("topic", "describe", "flights").out
    assert "of it are in the object store" in described
    assert [record.value for record in read_all(cluster, "flights")] == sent
    assert rayq_command.well("cluster", "health").out.startswith("Healthy")


def test_no_line_is_longer_than_a_terminal_of_80_columns(
    rayq_command: Command, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cluster, "flights-of-a-name-that-is-longer")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    for line in ("storage status", "storage pins", "topic restore"):
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            rayq_command.well(*line.split())
        shown = terminal.getvalue()
        too_long = [one.strip() for one in shown.splitlines() if len(one) > 80]
        assert [one for one in too_long if " " in one] == [], (line, shown)  # but long names


def test_a_topic_comes_back_from_the_store_alone(
    tmp_path: Path,
    store: Path,
    cluster: LocalCluster,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = fill(cluster, partitions=2)
    end = remote(cluster).remote_end_offset
    assert end is not None
    cluster.abort()  # Nobody looks at its directories again.

    with started(tmp_path / "new", store) as new:
        command = Command(new, tmp_path / "home", capfd, monkeypatch)
        (listed,) = command.well("topic", "restore", "--json").json
        assert (listed["topic"], listed["partitions"]) == ("flights", 2)
        dry = command.well("topic", "restore", "flights", "--dry-run", "--json").json
        assert [one["end_offset"] for one in dry["partitions"]] == [end, 0]
        assert new.admin.list_topics() == []

        command.well("topic", "restore", "flights", "--yes")
        assert [record.value for record in read_all(new, "flights")] == sent[:end]
        with new.producer() as producer:
            assert producer.send("flights", b"next", partition=0).result(60).offset == end
        assert new.admin.describe_topic("flights").config["segment_bytes"] == 4096

        (pin,) = new.admin.describe_object_store().pins
        assert (pin.topic, pin.ttl_ms) == ("flights", 86_400_000)
        assert pin.pin_id in command.well("storage", "pins").out
        command.well("storage", "unpin", pin.pin_id, "--yes")
        # Other clients hear of it as soon as the broker that they ask.
        eventually(lambda: not new.admin.describe_object_store().pins, "the pin is ended")
        eventually(
            lambda: "no pin" in command("storage", "unpin", pin.pin_id, "--yes").err,
            "it cannot be ended again",
        )

        again = command("topic", "restore", "flights", "--as", "twice", "--yes")
        assert again.code == 1 and "--copy" in again.err, "two topics would share objects"
        command.well("topic", "restore", "flights", "--as", "copied", "--copy", "--yes")
        assert [record.value for record in read_all(new, "copied")] == sent[:end]


def test_a_deleted_topic_comes_back_with_what_was_stored(
    rayq_command: Command, cluster: LocalCluster
) -> None:
    sent = fill(cluster)
    end = remote(cluster).remote_end_offset
    assert end is not None
    rayq_command.well("topic", "delete", "flights", "--yes")
    assert "1 deleted topic" in rayq_command.well("storage", "status").out
    rayq_command.well("topic", "restore", "flights", "--yes")
    assert remote(cluster).remote_end_offset == end  # And this client hears of the new topic.
    assert [record.value for record in read_all(cluster, "flights")] == sent[:end]
    assert "0 deleted topics" in rayq_command.well("storage", "status").out


def test_a_restore_that_cannot_be_changes_nothing(
    rayq_command: Command, cluster: LocalCluster, store: Path, tmp_path: Path
) -> None:
    fill(cluster)
    before = sorted(store.rglob("*"))
    for wrong, said in (
        (["flights"], "exists already"),
        (["flights", "--as", "more"], "--copy copies them"),
        (["flights", "--as", "__own", "--copy"], "reserved"),
        (["flights", "--as", "more", "--copy", "-r", "3"], "replication_factor 3"),
        (["nothing"], "There is no topic 'nothing'"),
        (["flights", "--topic-id", "0" * 32], "There is no topic 'flights'"),
        (["flights", "--from", f"file://{tmp_path}"], "There is no topic 'flights'"),
        (["flights", "--from", "s3://key:secret@bucket"], "credentials"),
    ):
        ran = rayq_command("topic", "restore", *wrong, "--yes")
        assert ran.code == (2 if said in ("reserved", "credentials") else 1) and said in ran.err, (wrong, ran)
        assert "secret" not in ran.err
    left = [one for one in sorted(store.rglob("*")) if one not in before and one.is_file()]
    assert [one for one in left if "/owners/" not in str(one)] == []

    shutil.copytree(store, tmp_path / "elsewhere")
    elsewhere = rayq_command(
        "topic", "restore", "flights", "--from", f"file://{tmp_path}/elsewhere", "--yes"
    )
    assert elsewhere.code == 1 and "--copy" in elsewhere.err
    rayq_command.well("topic", "delete", "flights", "--yes")
    objects(store)[0].unlink()
    missing = rayq_command("topic", "restore", "flights", "--yes")
    assert missing.code == 1 and "does not exist" in missing.err


def test_a_check_names_what_is_missing_or_damaged_and_mends_what_the_disks_have(
    rayq_command: Command, cluster: LocalCluster, store: Path
) -> None:
    fill(cluster, "away")
    fill(cluster, "both", local_retention_bytes=None)
    for topic in ("away", "both"):
        assert ": 0 wrong" in rayq_command.well("storage", "verify-remote", topic, "--deep").out

    for path in objects(store):
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
    assert ": 0 wrong" in rayq_command.well("storage", "verify-remote", "both").out, "sizes only"
    found = rayq_command("storage", "verify-remote", "both", "--deep", "--json")
    assert found.code == 3
    assert found.json[0]["problems"] and found.json[0]["repaired"] == []
    mended = rayq_command("storage", "verify-remote", "both", "--deep", "--repair")
    assert mended.code == 0 and "repaired" in mended.out
    assert ": 0 wrong" in rayq_command.well("storage", "verify-remote", "both", "--deep").out

    for path in objects(store):
        path.unlink()
    missing = rayq_command("storage", "verify-remote", "away", "--repair")
    assert missing.code == 3 and "of which 0 repaired" in missing.out
    rayq_command.well("storage", "verify-remote", "both", "--repair")
    assert ": 0 wrong" in rayq_command.well("storage", "verify-remote", "both", "--deep").out


def test_while_the_store_is_away_writing_goes_on_and_health_says_so(
    rayq_command: Command, cluster: LocalCluster, store: Path
) -> None:
    sent = fill(cluster)
    away = store.rename(store.with_name("away"))
    with cluster.producer(linger_ms=0) as producer:
        for number in range(RECORDS):
            sent.append(record(number))
            producer.send("flights", sent[-1], partition=0).result(60)

    def complaints() -> list[str]:
        health = rayq_command("cluster", "health", "--json")
        return [one["what"] for one in health.json["problems"]]

    eventually(
        lambda: any("nothing into the object store: flights-0" in one for one in complaints()),
        "health says that records wait",
    )
    assert rayq_command("cluster", "health").code == 3
    assert remote(cluster).trouble is not None
    away.rename(store)
    eventually(lambda: is_away(remote(cluster)), "what waited is stored")
    eventually(lambda: not complaints(), "health has nothing to say")
    assert [record.value for record in read_all(cluster, "flights")] == sent


def test_remote_storage_ends_by_a_call_that_says_what_goes(
    rayq_command: Command, cluster: LocalCluster
) -> None:
    fill(cluster)
    refused = rayq_command("topic", "alter", "flights", "-c", "remote_storage=false")
    assert refused.code == 2 and "delete_remote=True" in refused.err
    with pytest.raises(InvalidRequestError, match="alone"):
        cluster.admin.alter_topic_config(
            "flights", remote_storage=False, retention_ms=1000, delete_remote=True
        )
    start = remote(cluster).local_start_offset
    rayq_command.well(
        *("topic", "alter", "flights", "-c", "remote_storage=false", "--delete-remote", "--yes")
    )
    with cluster.consumer("flights", auto_offset_reset="earliest") as consumer:
        eventually(
            lambda: next(iter(consumer.beginning_offsets(consumer.assignment()).values())) == start,
            "the log begins with what is on the disks",
        )


def test_a_cluster_without_an_object_store_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(brokers=1) as plain:
        command = Command(plain, tmp_path / "home", capfd, monkeypatch)
        assert "no object store" in command.well("storage", "status").out
        assert "no object store" in command("topic", "restore").err
        with pytest.raises(ConfigError, match="remote_storage_url"):
            plain.create_topic("flights", remote_storage=True)

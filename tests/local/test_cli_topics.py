"""Topics, groups, health and the other verbs, except produce and consume."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayq import Cluster, Consumer
from rayq.cli import bench_profile, current
from rayq.client import client
from rayq.errors import InvalidRequestError
from rayq.runtime import current_cluster
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.conftest import NewTopic
from tests.local.support import eventually, wait_in_sync, wait_until_all_brokers_know

# --- topics ---------------------------------------------------------------------------------------


def test_a_topic_from_create_to_delete(rayq_command: Command) -> None:
    rayq = rayq_command
    made = rayq.well("topic", "create", "cli-a", "cli-b", "-p", "2", "-r", "3", "--json")
    assert made.json == [
        {"topic": "cli-a", "created": True},
        {"topic": "cli-b", "created": True},
    ]
    rayq.well("topic", "alter", "cli-a", "-c", "retention.ms=7h", "--set", "segment_bytes=1MiB")
    described = rayq.well("topic", "describe", "cli-a", "--json").json
    assert described["config"]["retention_ms"] == 25_200_000
    assert described["config"]["segment_bytes"] == 2**20
    assert [partition["isr"] for partition in described["partitions"]] != [[], []]
    rayq.well("topic", "alter", "cli-a", "--delete", "retention_ms")
    described = rayq.well("topic", "describe", "cli-a", "--json").json
    assert described["config"]["retention_ms"] == 7 * 86_400_000

    rayq.well("topic", "add-partitions", "cli-a", "--num", "1")
    assert "5 partitions now, 3 before" in rayq.well("topic", "add-partitions", "cli-a", "-p", "5").out
    listed = {row["topic"]: row for row in rayq.well("topic", "list", "--json").json}
    assert listed["cli-a"]["partitions"] == 5
    assert listed["cli-b"]["state"] == "in sync"
    rayq.well("topic", "delete", "cli-a", "cli-b", "--yes")
    listed = {row["topic"]: row for row in rayq.well("topic", "list", "--json").json}
    assert not listed.keys() & {"cli-a", "cli-b"}


def test_a_topic_that_is_there_may_be_no_error(rayq_command: Command, topic: str) -> None:
    assert rayq_command("topic", "create", topic).code == 1
    ran = rayq_command.well("topic", "create", topic, "--if-not-exists", "--json")
    assert ran.json == [{"topic": topic, "created": False}]


def test_in_a_pipe_tables_are_aligned_columns_without_colors(
    rayq_command: Command, new_topic: NewTopic
) -> None:
    name = new_topic(partitions=2, replication_factor=3)
    lines = rayq_command.well("topic", "describe", name).out.splitlines()
    assert lines[1].split() == [
        *("partition", "leader", "epoch", "replicas", "isr", "start", "end", "size", "state")
    ]
    assert lines[2].split()[0] == "0" and lines[3].split()[0] == "1"
    assert "\x1b" not in "".join(lines)
    assert any(line.split() == ["retention_bytes", "none", "default"] for line in lines)


def test_the_oldest_records_are_deleted_up_to_where_one_says(
    rayq_command: Command, new_topic: NewTopic
) -> None:
    rayq, name = rayq_command, new_topic(partitions=2)
    rayq.well("topic", "produce", name, "-p", "0", stdin=b"a\nb\nc\nd\n")
    rayq.well("topic", "produce", name, "-p", "1", stdin=b"e\n")
    delete = ("topic", "delete-records", name)
    ran = rayq(*delete, "--before", "2", "-y")
    assert ran.code == 1
    assert f"past the end of {name}-1" in ran.err and "nothing was deleted" in ran.err
    of_partition_0 = (*delete, "-p", "0")
    dry = rayq.well(*of_partition_0, "--before", "2", "--dry-run", "--json").json
    assert dry == [{"partition": 0, "start_before": 0, "start": 2, "deleted": 2}]
    assert "Nothing was deleted" in rayq.well(*of_partition_0, "--before", "2", "--dry-run").out
    assert sorted(rayq.well("topic", "consume", name, "-e").out.split()) == list("abcde")
    rayq.well(*of_partition_0, "--before", "1", "--yes")
    assert rayq.well(*of_partition_0, "--before", "-1", "-y", "--json").json[0]["start"] == 3
    assert sorted(rayq.well("topic", "consume", name, "-e").out.split()) == ["d", "e"]
    (unchanged, _) = rayq.well(*delete, "--before", "@-1h", "-y", "--json").json
    assert (unchanged["start"], unchanged["deleted"]) == (3, 0)
    assert [row["start"] for row in rayq.well(*delete, "--before", "end", "-y", "--json").json] == [
        *(4, 1)
    ]
    assert rayq(*delete, "-p", "2", "--before", "end", "-y").code == 1


def test_a_topic_gets_more_replicas_and_fewer(
    rayq_command: Command, new_topic: NewTopic
) -> None:
    rayq, names = rayq_command, [new_topic(replication_factor=1), new_topic(replication_factor=2)]
    change = ("topic", "set-replication-factor", *names, "-y")
    assert f"{names[1]} has 3 replicas of each partition now" in rayq.well(*change, "-r", "3").out
    described = rayq.well("topic", "describe", *names, "--json").json
    assert [len(topic["partitions"][0]["isr"]) for topic in described] == [3, 3]
    rayq.well("topic", "alter", names[0], "-c", "min_insync_replicas=2")
    ran = rayq(*change, "--replicas", "1")
    assert ran.code == 1
    assert "min_insync_replicas is 2" in ran.err and ran.err.count("\n") == 1
    assert rayq(*change, "-r", "4").code == 1


def test_leaders_are_elected_and_nothing_to_do_is_said(
    rayq_command: Command, new_topic: NewTopic
) -> None:
    name = new_topic(partitions=2, replication_factor=3)
    assert "Nothing to change" in rayq_command.well("cluster", "elect-leaders", name).out
    assert rayq_command.well("cluster", "elect-leaders", name, "-p", "0,1", "--json").json == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client does not wait for a topic that does not exist."""
    monkeypatch.setattr(client, "UNKNOWN_TOPIC_PATIENCE_S", 0.05)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("topc",), 2, "Did you mean 'topic'"),
        (("topic", "creat", "a"), 2, "Did you mean 'create'"),
        (("topic", "create"), 2, "Missing argument 'TOPIC'"),
        (("topic", "create", "a", "--foo"), 2, "No such option: --foo"),
        (("topic", "create", "a", "-p", "many"), 2, "valid integer"),
        (("topic", "create", "a", "-c", "retention=7d"), 2, "Did you mean"),
        (("topic", "create", "a/b"), 2, "a/b"),
        (("topic", "create", "a", "-r", "9"), 1, "9"),
        (("topic", "create", "a", "-p", "0"), 2, "equal to 1"),
        (("topic", "describe", "cli-none"), 1, "There is no topic 'cli-none'"),
        (("topic", "delete", "cli-none", "-y"), 1, "cli-none"),
        (("topic", "delete", "cli-none"), 2, "--yes"),
        (("topic", "delete-records", "cli-none", "--before", "end"), 2, "--yes"),
        (("topic", "delete-records", "cli-none", "--before", "end", "-y"), 1, "cli-none"),
        (("topic", "delete-records", "cli-none", "-y"), 2, "--before"),
        (("topic", "set-replication-factor", "cli-none", "-r", "2"), 2, "--yes"),
        (("topic", "set-replication-factor", "cli-none", "-r", "2", "-y"), 1, "cli-none"),
        (("topic", "alter", "cli-none", "-c", "replication.factor=2"), 2, "set-replication-factor"),
        (("topic", "alter", "cli-none", "-c", "flush=os"), 1, "cli-none"),
        (("topic", "alter", "cli-none"), 2, "--set KEY=VALUE"),
        (("topic", "add-partitions", "cli-none"), 2, "one of --num"),
        (("topic", "consume", "cli-none"), 1, "There is no topic 'cli-none'"),
        (("topic", "consume", "cli-none", "-o", "middle"), 2, "'middle' is not a position"),
        (("topic", "consume", "cli-none", "-f", "%z"), 2, "%z is unknown"),
        (("topic", "describe", os.fsdecode(b"\xff")), 1, "cannot be encoded as UTF-8"),
        (("topic", "consume", "cli-none", "--json", "-f", "%s"), 2, "give one of --json and --format"),
        (("topic", "produce", "cli-none"), 1, "There is no topic 'cli-none'"),
        (("topic", "produce", "cli-none", "-f", "%k"), 2, "where is the value"),
        (("topic", "produce", "cli-none", "-H", "x"), 2, "name=value"),
        (("topic", "produce", "cli-none", "--acks", "most"), 2, "acks"),
        (("group", "describe", "cli-none"), 1, "cli-none"),
        (("group", "delete", "cli-none", "-y"), 1, "cli-none"),
        (("group", "delete", "cli-none"), 2, "--yes"),
        (("group", "seek", "cli-none", "--to", "end"), 2, "--yes"),
        (("cluster", "elect-leaders", "cli-none", "--unclean"), 2, "--yes"),
        (("start", "x", "--num-cpus", "2", "--ray-address", "auto"), 2, "--num-cpus"),
        (("bench", "latency", "-n", "9", "--seconds", "1"), 2, "one of"),
        (("group", "seek", "cli-none"), 2, "--to"),
        (("cluster", "elect-leaders", "--unclean"), 2, "needs topic names"),
        (("bench", "produce", "--rate", "0"), 2, "greater than or equal to 1"),
        (("bench", "produce", "--acks", "most"), 2, "acks"),
        (("bench", "produce", "-s", "1GiB"), 2, "not 1073741824"),
        (("start", "x", "--brokers", "0"), 2, "greater than or equal to 1"),
        (("log", "verify", "/nowhere"), 1, "/nowhere"),
        (("log", "dump", "/tmp"), 1, "/tmp"),
        (("topic", "list", "--cluster", "nowhere:port"), 2, "not an address"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    rayq_command: Command, impatient: None, arguments: tuple[str, ...], code: int, said: str
) -> None:
    ran = rayq_command(*arguments)
    assert ran.code == code, ran
    assert ran.out == ""
    assert ran.err.count("\n") == 1 and ran.err.startswith("Error: "), ran.err
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_the_nearest_name_is_suggested(
    rayq_command: Command, impatient: None, topic: str
) -> None:
    wait_until_all_brokers_know(rayq_command.cluster, topic)
    near = f"{topic}s"
    meant = f"There is no topic '{near}'. Did you mean '{topic}'?"
    assert meant in rayq_command("topic", "describe", near).err
    assert meant in rayq_command("topic", "alter", near, "-c", "retention_ms=7d").err
    assert rayq_command("topic", "create", "short-lived").code == 0
    ran = rayq_command("topic", "delete", "short-lived", near, "--yes")
    assert ran.out == "Deleted topic short-lived.\n" and meant in ran.err
    assert "`rayq topic list` shows" in rayq_command("topic", "describe", "nothing-like-it").err
    assert "`rayq group list` shows" in rayq_command("group", "describe", "nothing-like-it").err


def test_a_level_of_the_log_that_is_none_is_one_line(
    rayq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYQ_LOG", "loud")
    ran = rayq_command("topic", "list")
    assert ran.code == 2
    assert ran.err == "Error: RAYQ_LOG cannot be 'loud': debug, info, warning, error.\n"


def test_every_verb_has_help_and_json(rayq_command: Command) -> None:
    import typer

    from rayq.cli.app import app

    seen = 0
    groups = [typer.main.get_command(app)]
    for group in groups:
        for verb in group.commands.values():  # type: ignore[attr-defined]
            assert verb.help, verb.name
            if hasattr(verb, "commands"):
                groups.append(verb)
            else:
                options = {name for param in verb.params for name in param.opts}
                # What `work` prints is what the user's command prints.
                assert "--json" in options or verb.name == "work", verb.name
                seen += 1
    assert seen >= 32
    assert "--json" in rayq_command.well("topic", "create", "-h").out


# --- groups ---------------------------------------------------------------------------------------


def test_a_group_is_listed_described_moved_and_deleted(
    rayq_command: Command, new_topic: NewTopic
) -> None:
    rayq, name, group = rayq_command, new_topic(partitions=2), "cli-group"
    rayq.well("topic", "produce", name, "-p", "0", stdin=b"a\nb\nc\n")
    rayq.well("topic", "produce", name, "-p", "1", stdin=b"d\n")
    read = rayq.well("topic", "consume", name, "-g", group, "-e").out
    assert sorted(read.split()) == ["a", "b", "c", "d"]
    listed = {row["group"]: row for row in rayq.well("group", "list", "--json").json}
    assert listed[group] == {
        "group": group,
        "state": "empty",
        "members": 0,
        "partitions": 2,
        "lag": 0,
    }
    # Printed records are committed: none comes again.
    assert rayq.well("topic", "consume", name, "-g", group, "-e").out == ""

    dry = rayq.well("group", "seek", group, "--to", "beginning", "--dry-run", "--json").json
    assert [(row["before"], row["after"]) for row in dry] == [(3, 0), (1, 0)]
    assert rayq.well("topic", "consume", name, "-g", group, "-e").out == ""
    rayq.well("group", "seek", group, "--to", "-2", "-t", f"{name}/0", "-y")
    assert rayq.well("topic", "consume", name, "-g", group, "-e").out == "b\nc\n"
    rayq.well("group", "seek", group, "--shift", "-1", "-t", name, "--execute")
    described = rayq.well("group", "describe", group, "--json").json
    assert [partition["lag"] for partition in described["partitions"]] == [1, 1]
    text = rayq.well("group", "describe", group).out
    assert f"{group}: empty, 0 members, lag 2" in text
    rayq.well("group", "seek", group, "--to", "@-1h", "-y")
    described = rayq.well("group", "describe", group, "--json").json
    assert described["lag"] == 4
    rayq.well("group", "delete", group, "-y")
    assert group not in rayq.well("group", "list").out


# --- the cluster ----------------------------------------------------------------------------------


def test_status_and_health_of_a_cluster_that_is_well(rayq_command: Command, topic: str) -> None:
    status = rayq_command.well("status", "--json").json
    assert status["healthy"] is True
    assert [broker["state"] for broker in status["brokers"]] == ["live"] * 3
    assert status["partitions"]["in sync"] == sum(status["partitions"].values())
    assert all(broker["disk_free_bytes"] > 0 for broker in status["brokers"])
    text = rayq_command.well("status").out
    assert "3 of 3 brokers live" in text and text.endswith("Healthy.\n")
    assert "__" not in rayq_command.well("topic", "list").out
    with rayq_command.cluster.consumer(topic, group="makes-offsets") as consumer:
        eventually(lambda: not consumer.poll(0.1) and bool(consumer.assignment()), "it has joined")
    wait_in_sync(rayq_command.cluster, "__consumer_offsets")
    assert "__consumer_offsets" in rayq_command.well("topic", "list", "-i").out
    again, whole = (
        rayq_command.well("status", *flags, "--json").json for flags in ((), ("--internal",))
    )
    assert again["topics"] == status["topics"]
    # Others may have used transactions, queues, principals.
    assert whole["topics"] - status["topics"] in range(1, 5)
    assert sum(again["partitions"].values()) < sum(whole["partitions"].values())
    health = rayq_command.well("cluster", "health", "--json").json
    assert health["healthy"] is True
    info = rayq_command.well("cluster", "info", "--json").json
    assert [broker["broker"] for broker in info["brokers"]] == [0, 1, 2]
    assert info["voters"] == [0, 1, 2]


def test_metrics_are_printed_and_chosen_by_name(rayq_command: Command, topic: str) -> None:
    rayq_command.well("topic", "produce", topic, stdin=b"a\n")
    active = rayq_command.well("cluster", "metrics", "active_controller", "--json").json
    assert sum(sample["value"] for sample in active) == 1
    text = rayq_command.well("cluster", "metrics", "records_in").out
    assert f"topic={topic}" in text


@pytest.fixture
def fragile_command(
    fragile: LocalCluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    return Command(fragile, tmp_path / "home", capfd, monkeypatch)


def test_health_of_a_cluster_without_a_broker_exits_3_and_says_what_to_do(
    fragile: LocalCluster, fragile_command: Command
) -> None:
    fragile.create_topic("t")
    assert fragile_command("cluster", "health").code == 0
    fragile.kill_broker(2)

    def is_noticed() -> bool:
        info = fragile.admin.describe_topic("t").partitions[0]
        live = [broker.live for broker in fragile.admin.describe_cluster().brokers]
        return live == [True, True, False] and 2 not in info.isr

    eventually(is_noticed, "the loss of broker 2 is noticed")
    ran = fragile_command("cluster", "health")
    assert ran.code == 3
    assert "warning: Broker 2 is down" in ran.out
    assert "t-0" in ran.out
    assert "next: rayq topic describe t" in ran.out
    ran = fragile_command("cluster", "health", "--json")
    assert ran.code == 3
    assert ran.json["healthy"] is False
    assert all(problem["next_command"] for problem in ran.json["problems"])
    status = fragile_command.well("status").out
    assert "2 of 3 brokers live" in status
    # Without the other voters no controller can declare a broker dead.
    fragile.kill_broker(1)
    ran = fragile_command("cluster", "health")
    assert ran.code == 3
    assert "No controller acts" in ran.out and "Broker 1 does not answer" in ran.out
    assert "1 of 3 brokers live" in fragile_command.well("status").out
    fragile.start_broker(1)
    fragile.start_broker(2)
    eventually(
        lambda: fragile_command("cluster", "health").code == 0, "the cluster is well again"
    )


def test_where_no_broker_answers_health_exits_3_and_others_1(
    rayq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "CONNECT_TIMEOUT_S", 0.3)
    ran = rayq_command("topic", "list", "--cluster", "127.0.0.1:1")
    assert ran.code == 1
    assert "No broker answers at 127.0.0.1:1" in ran.err
    ran = rayq_command("cluster", "health", "--cluster", "127.0.0.1:1")
    assert ran.code == 3
    assert "rayq start" in ran.out


def test_without_a_cluster_one_is_told_how_to_get_one(
    rayq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYQ_CLUSTER")
    monkeypatch.delenv("RAYQ_TOKEN")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ran = rayq_command("status")
    assert ran.code == 1
    assert "rayq start DIR" in ran.err
    ran = rayq_command("stop")
    assert ran.code == 1
    ran = rayq_command("topic", "list", "--cluster", "127.0.0.1:1")
    assert "RAYQ_TOKEN" in ran.err


def test_the_current_cluster_is_what_verbs_use(
    rayq_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = rayq_command.cluster
    monkeypatch.delenv("RAYQ_CLUSTER")
    monkeypatch.delenv("RAYQ_TOKEN")
    current_cluster.write_current(
        current_cluster.Current(
            ray_address="127.0.0.1:1",
            name="mine",
            brokers=cluster.addresses,
            path="/data",
            started_ray=False,
            token=cluster.token,
        )
    )
    path = tmp_path / "home" / "current.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["name"] == "mine"
    assert "Cluster mine" in rayq_command.well("status").out
    assert rayq_command.well("token").out.strip() == cluster.token
    # A second start is refused while the first one's cluster runs, whatever its directory.
    ran = rayq_command("start", str(tmp_path / "other"))
    assert ran.code == 1
    assert "runs on /data already" in ran.err and "rayq stop" in ran.err
    assert not os.path.exists(tmp_path / "other")
    without_token = path.read_bytes().replace(cluster.token.encode(), b"none")
    for damaged in (b"{", b"{}", b"\xff\xfe{", without_token):
        path.write_bytes(damaged)
        ran = rayq_command("status")
        assert ran.code == 1
        assert "current.json is damaged" in ran.err and ran.err.count("\n") == 1


def test_a_wrong_token_is_refused(
    rayq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYQ_TOKEN", "rayq-" + "A" * 43)
    ran = rayq_command("topic", "list")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    monkeypatch.setenv("RAYQ_TOKEN", "no token")
    assert "token" in rayq_command("topic", "list").err


def test_a_directory_in_use_cannot_be_started_on(
    rayq_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = rayq_command.cluster
    assert isinstance(cluster, LocalCluster)
    ran = rayq_command("start", cluster.data_dir)
    assert ran.code == 1
    assert f"in use by process {os.getpid()}" in ran.err
    assert "Did you mean" in rayq_command("start", "x", "-c", "sesion_timeout_ms=5s").err


# --- data directories, measurements ---------------------------------------------------------------


def test_a_log_is_dumped_and_verified_from_disk(rayq_command: Command, topic: str) -> None:
    rayq, cluster = rayq_command, rayq_command.cluster
    assert isinstance(cluster, LocalCluster)
    rayq.well("topic", "produce", topic, "-K", ":", "-H", "h=1", stdin=b"k:v\nl:w\n")
    place = (cluster.data_dir, "-p", f"{topic}/0")
    rows = rayq.well("log", "dump", *place, "--json").json
    assert sum(row["records"] for row in rows) == 2
    assert rows[0]["base_offset"] == 0
    assert "base offset" in rayq.well("log", "dump", *place).out
    out = rayq.well("log", "dump", *place, "-f", r"%t %p %o %k %s %h\n").out
    assert out == f"{topic} 0 0 k v h=1\n{topic} 0 1 l w h=1\n"
    lines = rayq.well("log", "dump", *place, "--records", "-o", "1").out.splitlines()
    assert [json.loads(line)["offset"] for line in lines] == [1]
    metadata = rayq.well("log", "dump", f"{cluster.data_dir}/broker-0/metadata").out.splitlines()
    kinds = {json.loads(line)["record"] for line in metadata}
    assert {"VotersChanged", "TopicCreated"} <= kinds
    assert rayq("log", "dump", cluster.data_dir, "-p", "nothing/0").code == 1

    directory = f"{cluster.data_dir}/broker-1/{topic}-0"
    assert "0 damaged" in rayq.well("log", "verify", directory).out
    reports = rayq.well("log", "verify", directory, "--json").json
    assert [report["damage"] for report in reports] == [[]]


def test_verify_exits_3_on_damage(
    fragile: LocalCluster, fragile_command: Command
) -> None:
    fragile.create_topic("t")
    with fragile.producer() as producer:
        producer.send_many("t", [b"x" * 100] * 50).result(timeout=60)
    fragile.stop()
    segment = Path(fragile.data_dir, "broker-0", "t-0", f"{0:020d}.log")
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    ran = fragile_command("log", "verify", fragile.data_dir)
    assert ran.code == 3
    assert "1 damaged" in ran.out
    ran = fragile_command("log", "dump", str(segment), "-r")
    assert ran.code == 1
    assert str(segment) in ran.err


def test_the_measurements_measure_and_leave_nothing_behind(
    rayq_command: Command, topic: str
) -> None:
    rayq = rayq_command
    figures = rayq.well("bench", "produce", "-n", "5000", "-s", "1KiB", "--json").json
    assert figures["records"] == 5000
    assert figures["latency_ms"]["p99"] > 0
    figures = rayq.well("bench", "produce", "-t", topic, "-n", "300", "--rate", "1000", "--json").json
    assert 0 < figures["records_per_s"] < 1100
    assert "consumed" in rayq.well("bench", "consume", "-t", topic).out
    figures = rayq.well(
        "bench", "latency", "-t", topic, "--rate", "100", "--seconds", "0.5", "--json"
    ).json
    assert figures["records"] == 50
    assert "end to end" in rayq.well("bench", "latency", "-t", topic, "-n", "9").out
    assert 0 < figures["acknowledged_ms"]["p50"] <= figures["end_to_end_ms"]["max"]
    assert "rayq-bench" not in rayq.well("topic", "list").out


def test_a_profile_of_costs_is_what_a_plan_reads(
    rayq_command: Command, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_profile, "FREE_BYTES_MIN", 0)
    monkeypatch.setattr(bench_profile, "KEPT_BYTES", 2_000_000)
    rayq, file = rayq_command, tmp_path / "profile.json"
    rayq.well("topic", "produce", topic, stdin=b"a\nb\n")
    found = rayq.well("bench", "profile", "--seconds", "3", "-o", str(file), "--json").json
    assert found["acknowledged_bytes_per_s"] > 0 and found["fdatasync_p99_s"] > 0
    assert found["write_cpu_s_per_byte"] is None  # Servers share a process with the command.
    assert any("processor time" in note for note in found["notes"])
    costs = json.loads(file.read_text())
    assert list(costs) == ["partition_write_bytes_per_s", "consumer_read_bytes_per_s"]
    assert costs == found["costs"]
    load = ("--rate", "1k/s", "--size", "1KB", "--retention", "7d")
    assumed = rayq.well("plan", *load, "--profile", str(file), "--json").json["assumptions"]
    assert assumed["partition_write_bytes_per_s"]["source"] == "profile"
    described = {row["topic"]: row for row in rayq.well("topic", "list", "--json").json}
    assert "rayq-bench" not in described and described[topic]["records"] == 2


@pytest.mark.parametrize("at", ["the creation of its topic", "rest", "writing", "reading"])
def test_a_profile_that_is_interrupted_leaves_no_topic_and_no_file(
    rayq_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(bench_profile, "FREE_BYTES_MIN", 0)
    monkeypatch.setattr(bench_profile, "CALLS_IN_FLIGHT", 0)
    create = Cluster.create_topic

    def interrupt(*arguments: Any, **options: Any) -> None:
        if at.startswith("the creation"):
            create(*arguments, **options)
        raise KeyboardInterrupt

    target, name = {
        "the creation of its topic": (Cluster, "create_topic"),
        "rest": (bench_profile, "time"),
        "writing": (bench_profile, "_end"),
        "reading": (Consumer, "end_offsets"),
    }[at]
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(sleep=interrupt, perf_counter=time.perf_counter)
        patch.setattr(target, name, clock if name == "time" else interrupt)
        file = tmp_path / "profile.json"
        assert rayq_command("bench", "profile", "--seconds", "2", "-o", str(file)).code == 130
    assert "rayq-bench" not in rayq_command.well("topic", "list").out
    assert not file.exists()


def test_a_profile_leaves_a_topic_of_its_name_and_full_disks_alone(
    rayq_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rayq = rayq_command
    assert rayq("bench", "profile", "-o", str(tmp_path)).code == 2
    with monkeypatch.context() as patch:
        patch.setattr(bench_profile, "FREE_BYTES_MIN", 2**60)
        ran = rayq("bench", "profile")
        assert (ran.code, "Free some space first" in ran.err) == (1, True)
    monkeypatch.setattr(bench_profile, "FREE_BYTES_MIN", 0)
    rayq.well("topic", "create", "rayq-bench", "-p", "2")
    ran = rayq("bench", "profile")
    assert (ran.code, "is there" in ran.err) == (1, True)
    assert len(rayq.well("topic", "describe", "rayq-bench", "--json").json["partitions"]) == 2
    rayq.well("topic", "delete", "rayq-bench", "-y")


def test_a_plan_is_compared_with_the_cluster(rayq_command: Command, topic: str) -> None:
    load = ("plan", "--size", "1KB", "--retention", "1m", "-r", "2", "--check", "--seconds", "0.3")
    ran = rayq_command(*load, "--rate", "10/s", "--json")
    found = ran.json["check"]
    assert (ran.code, found["is_within"], found["over"]) == (0, True, []), found
    assert found["unknown"] == ["memory", "cores"]  # Servers share a process with the command.
    assert found["next"] not in ("brokers", "partitions", "disk size", None)
    assert {"what", "where", "measured", "planned", "allowed", "share", "remedy"} == set(
        found["figures"][0]
    )
    ran = rayq_command(*load, "--rate", "30M/s")
    assert ran.code == 3
    assert "error: brokers: 3; the plan needs at least" in ran.out
    assert "What comes next is" in ran.out
    assert rayq_command(*load, "--rate", "10/s").out.count("Within the plan.") == 1


def test_the_admin_plans_and_checks_as_the_command_does(rayq_command: Command) -> None:
    admin = rayq_command.cluster.admin
    planned = admin.plan(records_per_s=1e6, record_bytes=1000, retention_s=7 * 86_400)
    told = rayq_command.well("plan", "--rate", "1M/s", "--size", "1KB", "--retention", "7d", "--json")
    assert (planned.brokers, planned.disk_bytes) == (told.json["brokers"], told.json["disk_bytes"])
    found = admin.check_plan(planned, seconds=0.2)
    assert not found.is_within
    assert {"brokers", "disk size"} <= {figure.what for figure in found.over}
    for seconds in (0, float("nan"), 1e9):
        with pytest.raises(InvalidRequestError, match="seconds must be from"):
            admin.check_plan(planned, seconds=seconds)

"""Moving partitions by the command."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayq.cli import operations
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.support import FAST, eventually

SOON = ("--timeout", "60")
"""A limit, since otherwise a move that does not end is waited for without end or message."""


@pytest.fixture
def four(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(brokers=4, data_dir=tmp_path / "data", **FAST) as cluster:
        yield cluster


@pytest.fixture
def rayq(
    four: LocalCluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    return Command(four, tmp_path / "home", capfd, monkeypatch)


def replicas(cluster: LocalCluster, topic: str) -> list[list[int]]:
    partitions = cluster.admin.describe_topic(topic).partitions
    return [[replica.broker for replica in one.replicas] for one in partitions]


def test_a_plan_is_shown_saved_and_executed(
    rayq: Command, four: LocalCluster, tmp_path: Path
) -> None:
    four.create_topic("t", 2, 2)
    rayq.well("topic", "produce", "t", stdin=b"a\nb\nc\n")
    before = replicas(four, "t")
    target = [[broker for broker in range(4) if broker not in now][:2] for now in before]
    moves = [f"t/{number}={one},{two}" for number, (one, two) in enumerate(target)]
    shown = rayq.well("cluster", "reassign", "-m", moves[0], "-m", moves[1], "--dry-run").out
    assert "Nothing was moved" in shown and f"{target[0][0]},{target[0][1]}" in shown
    assert replicas(four, "t") == before

    dry = ("--dry-run", "--json")
    saved = rayq.well("cluster", "reassign", "-m", moves[0], "-m", moves[1], *dry).out
    assert json.loads(saved)["partitions"][1] == {
        "topic": "t",
        "partition": 1,
        "replicas": target[1],
    }
    (tmp_path / "plan.json").write_text(saved)
    plan = ("cluster", "reassign", "--plan", str(tmp_path / "plan.json"))
    assert "2 moves done" in rayq.well(*plan, "-y", "--throttle", "50MB", *SOON).out
    # (The brokers hear of the move one by one, and any of them may be asked.)
    eventually(lambda: replicas(four, "t") == target, "every broker knows")
    assert sorted(rayq.well("topic", "consume", "t", "-e").out.split()) == ["a", "b", "c"]
    assert rayq.well("cluster", "reassign", "--list", "--json").json == []
    assert "No move" in rayq.well("cluster", "reassign", "--cancel").out


def test_a_broker_is_drained_removed_or_taken_back(
    rayq: Command, four: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    four.create_topic("t", 4, 3)
    assert "Nothing was moved" in rayq.well("cluster", "drain", "3", "--dry-run").out
    drained = rayq.well("cluster", "drain", "3", "-y", "--json", *SOON).json
    assert len(drained["moved"]) == 3
    eventually(lambda: all(3 not in one for one in replicas(four, "t")), "every broker knows")
    states = {one["broker"]: one["state"] for one in rayq.well("status", "--json").json["brokers"]}
    assert states[3] == "live, cordoned"

    assert "takes replicas again" in rayq.well("cluster", "undrain", "3").out
    assert "to copy" in rayq.well("cluster", "reassign", "--spread", "--dry-run").out
    rayq.well("cluster", "reassign", "--spread", "--execute", *SOON)
    eventually(lambda: sum(3 in one for one in replicas(four, "t")) == 3, "every broker knows")
    assert "Nothing to move" in rayq.well("cluster", "reassign", "--spread", "--dry-run").out

    rayq.well("cluster", "drain", "3", "--yes", *SOON)
    ran = rayq("cluster", "remove-broker", "3")
    assert ran.code == 1
    assert "3" in ran.err
    monkeypatch.setattr(operations, "operated", lambda _: contextlib.nullcontext(four))
    assert rayq("cluster", "stop-broker", "2").code == 1
    assert "remove-broker 3" in rayq.well("cluster", "stop-broker", "3").out
    eventually(
        lambda: not four.admin.describe_cluster().brokers[3].live, "broker 3 counts as down"
    )
    rayq.well("cluster", "remove-broker", "3")

    def told() -> list[int]:
        brokers = rayq.well("cluster", "info", "--json").json["brokers"]
        return [one["broker"] for one in brokers]

    eventually(lambda: told() == [0, 1, 2], "every broker knows that broker 3 is gone")
    ran = rayq("cluster", "drain", "2", "-y")
    assert ran.code == 1
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("{", "is not a plan"),
        ('{"partitons": []}', "`partitions`"),
        ('{"partitions": [{"topic": "%s", "partition": "0", "replicas": [1]}]}', "partition"),
        ('{"partitions": [{"topic": "%s", "partition": 0, "replicas": "12"}]}', "replicas"),
        ('{"partitions": [{"topic": "%s", "partition": 7, "replicas": [1]}]}', "no partition 7"),
        ('{"partitions": [{"topic": "%s", "partition": 0, "replicas": [9]}]}', "no broker 9"),
    ],
)
def test_a_plan_with_a_slip_is_refused_before_anything_moves(
    rayq_command: Command, topic: str, plan: str, said: str
) -> None:
    ran = rayq_command("cluster", "reassign", "--plan", "-", "--dry-run", stdin=plan.replace("%s", topic).encode())
    assert ran.code == 1
    assert said in ran.err and ran.err.count("\n") == 1
    assert ran.out == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("cluster", "reassign"), 2),
        (("cluster", "reassign", "--spread", "--list"), 2),
        (("cluster", "reassign", "-m", "t/0", "-y"), 2),
        (("cluster", "reassign", "-m", "t/0=1"), 2),
        (("cluster", "drain", "1"), 2),
        (("cluster", "reassign", "-m", "t/0=0,9", "--execute"), 1),
        (("cluster", "reassign", "-m", "none/0=0,1", "--execute"), 1),
        (("cluster", "reassign", "--plan", "/nowhere", "-y"), 1),
        (("cluster", "reassign", "-m", "t/0=1", "-m", "t/0=2", "-y"), 2),
        (("cluster", "reassign", "--spread", "--throttle", "fast", "-y"), 2),
        (("cluster", "reassign", "--cancel", "-m", "t/0"), 1),
        (("cluster", "drain", "9", "-y"), 1),
        (("cluster", "undrain", "9"), 1),
        (("cluster", "remove-broker", "0"), 1),
        (("cluster", "recover-quorum"), 2),
        (("cluster", "recover-quorum", "--from", "/nowhere", "-y"), 1),
        (("cluster", "recover-quorum", "--from", "/tmp"), 2),
    ],
)
def test_a_wrong_move_is_one_line_on_stderr(
    rayq_command: Command, arguments: tuple[str, ...], code: int
) -> None:
    ran = rayq_command(*arguments)
    assert ran.code == code, ran
    assert ran.err.count("\n") == 1 and ran.err.startswith("Error: "), ran
    assert ran.out == ""


def test_a_lost_quorum_is_shown_and_recovered(
    rayq: Command, four: LocalCluster, tmp_path: Path
) -> None:
    four.create_topic("t", 1, 3)
    directory = f"{four.data_dir}/broker-2"
    ran = rayq("cluster", "recover-quorum", "--from", directory, "--execute")
    assert ran.code == 1
    assert "stop all brokers first" in ran.err
    four.stop()
    for lost in (0, 1):
        shutil.rmtree(f"{four.data_dir}/broker-{lost}")
    (copy,) = rayq.well("cluster", "recover-quorum", "--from", directory, "--dry-run", "--json").json
    assert (copy["broker"], copy["voter"]) == (2, True)
    shown = rayq.well("cluster", "recover-quorum", "--from", directory, "--dry-run").out
    assert "Nothing was changed" in shown
    done = rayq.well("cluster", "recover-quorum", "--from", directory, "--execute", "--json").json
    assert (done["broker"], done["topics"]) == (2, 1)

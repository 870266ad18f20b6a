"""Wrong use of the command is exit code 2, whatever the cluster holds: here there is none."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import typer

from rayq.cli.main import run

GROUPS = (
    "",
    "topic",
    "group",
    "queue",
    "dead-letters",
    "transactions",
    "principal",
    "acl",
    "storage",
    "values",
    "cluster",
    "bench",
    "log",
)

WRONG = """
nosuch
topic nosuch
topic create
topic create a/b/c --cluster a:b
topic create a -p 0
topic create a -p 1.5
topic create a -r 0
topic create a -c retention_ms
topic create a -c retention_ms=6M
topic create a -c retention=1d
topic create a -c flush=yes
topic create a -c retention_ms=1d -c retention.ms=2d
topic alter a
topic alter a -c retention_ms=soon
topic alter a -c retention_ms=1d -d retention_ms
topic add-partitions a
topic add-partitions a -n 0
topic add-partitions a -n 1 -p 2
topic produce a -H x
topic produce a -p -1
topic produce a -t soon
topic produce a -t 20270101
topic produce a -f %z
topic produce a -f %k
topic produce a -D \\q
topic produce a -K : -f %s
topic produce a -K : -k key
topic produce a -k key -f %k:%s
topic produce a -p 1 -f %p:%s
topic produce a -t 0 -f %T:%s
topic produce a -f %s:%s
topic produce a -f %s:%v
topic produce a -f %k:%k:%s
topic produce a --acks most
topic produce a --acks 1 -X acks=all
topic produce a -X linger=1
topic consume a -o middle
topic consume a -o @20270101
topic consume a -p 1-
topic consume a -f %z
topic consume a --json -f %s
topic consume a --json -K :
topic consume a --json -D ;
topic consume a -f %s -K :
topic consume a -f %s -D ;
topic consume a -n many
topic consume a -g g -p 0
topic consume a -g g -o 5
topic consume a -g g -o @-1h
topic delete a
topic delete-records a -y
topic delete-records a --before middle -y
topic set-replication-factor a -r 0 -y
group seek g -y
group seek g --to middle -y
queue create q -c backoff=1
queue create q -t topic -p 3
queue create q -r 0
queue put q --delay 6M
queue put q --delay 1h --at -1h
queue put q --at 20270101
queue put q -H x
queue put q -H a:=b
queue take q --wait soon
queue take q -n 0
queue take q -f %z
queue work q -j 0 true
queue work q -e soon true
queue work q no-such-command-anywhere
dead-letters list q --where since
dead-letters list q --where since=20270101
dead-letters list q --where colour=red
dead-letters list q --where header=name
dead-letters discard q -y --where since=soon
dead-letters discard q -y --rate fast
dead-letters show q 7
values collect file:///nowhere --older-than 6M -y
cluster reassign
cluster reassign -m t/0 -y
cluster reassign -m t/0=1 -m t/0=2 -y
cluster reassign --spread --throttle fast -y
cluster drain 1 -y --throttle 5x
cluster elect-leaders --unclean
bench produce -s 1x
bench produce --rate 0
start x --brokers 0
start x -c session_timeout_ms=6M
start x --node-ip-address 127.0.0.1
start x --node-ip-address here
start x --node-ip-address ::1
start x --ray-address auto --node-ip-address 10.0.0.1
principal create
token create
token create anna --expires 90
token create anna --expires soon
token rotate anna --overlap 1M
token revoke anna
token revoke anna 1 --all -y
token revoke anna 1
acl add anna read
acl add anna reed topic orders
acl add anna write group g
acl add anna read table orders
acl add anna read topic
acl add anna read topic orders.*
acl add anna read topic * --prefix
acl add anna alter cluster mine
acl remove anna read topic orders
acl check anna all topic orders
acl check anna read,write topic orders
log dump
topic list --cluster nowhere:port
topic list --cluster a:1,,b:2
"""


built = functools.cache(typer.main.get_command)
"""To put the verbs together takes longer than most of them do."""


@pytest.fixture(autouse=True)
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQ_HOME", str(tmp_path))
    for name in ("RAYQ_CLUSTER", "RAYQ_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(typer.main, "get_command", built)


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_use_is_one_line_and_exit_code_2(
    line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2, capfd.readouterr()
    said = capfd.readouterr()
    assert said.err.startswith("Error: ") and said.err.count("\n") == 1, said


def test_what_is_right_and_cannot_be_done_is_exit_code_1(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for line in ("topic create a -p 3 -c retention_ms=7d", "queue put q --delay 30s", "status"):
        assert run(line.split()) == 1, line
        assert "no current cluster" in capfd.readouterr().err


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_without_a_verb_prints_its_help(
    group: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*group.split(), "--help"]) == 0
    asked = capfd.readouterr()
    assert run(group.split()) == 0
    said = capfd.readouterr()
    assert said == asked and "\nCommands:\n" in said.out and said.err == ""

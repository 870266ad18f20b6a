"""Every verb that prints for people, on a terminal of 80 columns: no line is longer, so the
terminal breaks no word. (The tests of `layout` show that it breaks no word either.)"""

from __future__ import annotations

import io
import sys

import pytest
import typer

from rayq.cli.app import app
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.conftest import NewTopic

LINES = """
status
status -i
topic create NEW -p 2
topic list -i
topic describe TOPIC
topic alter NEW -c retention_ms=3d
topic add-partitions NEW -n 1
topic set-replication-factor NEW -r 2 -y
topic set-replication-factor NEW -r 9 -y
topic delete-records TOPIC --before -2 --dry-run
topic delete NEW -y
topic restore
storage status
storage status TOPIC
storage verify-remote TOPIC
storage pins
storage unpin PIN -y
values collect VALUES --dry-run
group list
group describe GROUP
group seek GROUP --to beginning --dry-run
group delete GROUP -y
queue create QUEUE -t TOPIC
queue list -a
queue describe QUEUE
queue alter QUEUE -c backoff_s=3
queue peek QUEUE -n 3
queue purge QUEUE -y
dead-letters list TOPIC -n 2
dead-letters show TOPIC 0/1
dead-letters redrive TOPIC --dry-run
dead-letters discard QUEUE -y
queue delete QUEUE -y
transactions list -a
transactions describe ID
transactions abort ID -y
transactions find-hanging
principal create ANNA
principal list
acl add ANNA read,write topic TOPIC
acl list
acl check ANNA read topic TOPIC
acl check ANNA read group GROUP
acl remove ANNA read topic TOPIC -y
quota set ANNA producer_byte_rate=5e6
quota list ANNA
quota describe ANNA
quota remove ANNA -y
audit
token create ANNA --expires 90d
token rotate ANNA
token list
principal describe ANNA
token revoke ANNA --all -y
principal delete ANNA -y
plan --rate 1M/s --size 1KB --retention 7d --local 6h
plan --rate 1M/s --size 1KB --retention 7d --local 6h --check --seconds 0.2
cluster info
cluster health
cluster metrics records
cluster elect-leaders
cluster reassign --list
cluster reassign -m TOPIC/0=2,1 --dry-run
cluster drain 2 --dry-run
cluster undrain 2
cluster remove-broker 0
bench produce -t TOPIC -n 100
bench consume -t TOPIC -n 2
bench latency -t TOPIC -n 5
bench profile --seconds 1
log dump DATA -p TOPIC/0 -n 2
log verify DATA/broker-0
"""
ELSEWHERE = {
    *("start", "stop", "token"),
    *("topic produce", "topic consume", "queue put", "queue take", "queue work"),  # Records.
    *("cluster restart-broker", "cluster stop-broker", "cluster replace-disk"),
    "cluster recover-quorum",
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_verb_is_shown_here() -> None:
    listed = {tuple(line.split()[:2]) for line in LINES.split("\n")} | {("status",), ("plan",), ("audit",)}
    root = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    verbs = [
        (name, below) if below else (name,)
        for name, command in root.items()
        for below in getattr(command, "commands", {"": None})
    ]
    assert [" ".join(verb) for verb in verbs if verb not in listed] == [
        " ".join(verb) for verb in verbs if " ".join(verb) in ELSEWHERE
    ]


def test_no_line_is_longer_than_the_terminal(
    rayq_command: Command,
    cluster: LocalCluster,
    new_topic: NewTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = new_topic() + "-of-a-name-that-is-longer"
    cluster.create_topic(topic, 2, 2)
    group = "a-group-whose-name-is-longer"
    rayq_command.well("topic", "produce", topic, stdin=b"a\nb\nc\nd\n" * 50)
    rayq_command.well("topic", "consume", topic, "-g", group, "-e", "-n", "3")
    names = {"TOPIC": topic, "NEW": topic + "-new", "GROUP": group, "DATA": cluster.data_dir}
    names["VALUES"] = f"file://{cluster.data_dir}/values"
    names["QUEUE"] = "a-queue-whose-name-is-longer"
    names["ANNA"] = "a-principal-whose-name-is-longer"
    names["ID"] = "a-transactional-id-whose-name-is-longer"
    producer = cluster.producer(transactional_id=names["ID"])
    producer.begin_transaction()
    producer.send(topic, b"v").result()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    for line in LINES.strip().splitlines():
        for name, stands_for in names.items():
            line = line.replace(name, stands_for)
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            rayq_command(*line.split())
        shown = terminal.getvalue()
        assert shown.strip(), line
        too_long = [text.strip() for text in shown.splitlines() if len(text) > 80]
        assert [text for text in too_long if " " in text] == [], (line, shown)  # but long paths
    producer.close()

"""The command with input that nobody should type: one line, an exit code, and no traceback."""

from __future__ import annotations

import pytest

from rayq import TopicPartition
from rayq.testing import LocalCluster
from tests.local.cli_support import Command

HUGE = "9" * 20
DEEP = b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
LONE_SURROGATE = rb'{"value": "v", "headers": {"\ud800": "x"}}' + b"\n"
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202eback"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\x9b2J\u202eback"


@pytest.mark.parametrize(
    "line",
    [
        ("topic", "create", "huge", "-p", HUGE),
        ("topic", "create", "huge", "-r", HUGE),
        ("topic", "add-partitions", "TOPIC", "-n", HUGE),
        ("topic", "add-partitions", "TOPIC", "-p", HUGE),
        ("topic", "create", "huge", "-c", f"retention_ms={HUGE}"),
        ("topic", "create", "huge", "-c", f"min_insync_replicas={HUGE}"),
        ("topic", "produce", "TOPIC", "-p", HUGE),
        ("topic", "produce", "TOPIC", "-X", f"linger_ms={HUGE}"),
        ("topic", "produce", "TOPIC", "-t", HUGE),
        ("topic", "consume", "TOPIC", "-e", "-p", HUGE),
        ("topic", "consume", "TOPIC", "-e", "-n", HUGE),
        ("topic", "consume", "TOPIC", "-e", "-o", HUGE),
        ("topic", "delete-records", "TOPIC", "--before", HUGE, "-y"),
        ("topic", "delete-records", "TOPIC", "--before", "0", "-p", HUGE, "-y"),
        ("topic", "set-replication-factor", "TOPIC", "-r", HUGE, "-y"),
        ("cluster", "undrain", HUGE),
        ("cluster", "drain", HUGE, "-y"),
        ("cluster", "remove-broker", HUGE),
        ("cluster", "elect-leaders", "TOPIC", "-p", HUGE),
        ("cluster", "reassign", "--execute", "-m", f"TOPIC/0={HUGE}"),
        ("cluster", "reassign", "--execute", "-m", f"TOPIC/{HUGE}=1"),
        ("group", "seek", "huge", "-t", "TOPIC", "--to", HUGE, "-y"),
        ("group", "seek", "huge", "-t", "TOPIC", "--shift", HUGE, "-y"),
    ],
)
def test_a_number_beyond_all_bounds_is_one_line(
    rayq_command: Command, topic: str, line: tuple[str, ...]
) -> None:
    ran = rayq_command(*(word.replace("TOPIC", topic) for word in line))
    assert ran.code in (0, 1, 2), ran
    assert (ran.code == 0) == ("-n" in line and "consume" in line), ran
    assert ran.err.count("\n") <= 1 and "Traceback" not in ran.err, ran


def test_records_that_are_no_json_are_one_line(rayq_command: Command, topic: str) -> None:
    for stdin, why in ((DEEP, "nest"), (LONE_SURROGATE, "surrogate")):
        ran = rayq_command("topic", "produce", topic, "-f", "json", stdin=stdin)
        assert ran.code == 1 and ran.err.count("\n") == 1, ran
        assert "Record 1" in ran.err and why in ran.err, ran
    ran = rayq_command("topic", "produce", topic, "-H", "\udcff=x", stdin=b"line\n")
    assert ran.code == 1 and ran.err.count("\n") == 1, ran
    assert "name of a header" in ran.err, ran
    plan = b'{"partitions": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ran = rayq_command("cluster", "reassign", "--plan", "-", "-y", stdin=plan)
    assert ran.code == 1 and ran.err.count("\n") == 1 and "is not a plan" in ran.err, ran


def test_names_that_others_chose_do_not_reach_the_terminal_as_escape_sequences(
    rayq_command: Command, cluster: LocalCluster, topic: str
) -> None:
    with cluster.consumer(group=ESCAPES) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.commit({TopicPartition(topic, 0): 0})
    for line in (
        ("group", "list"),
        ("group", "describe", ESCAPES),
        ("group", "describe", ESCAPES + "?"),
        ("group", "delete", ESCAPES, "-y"),
    ):
        ran = rayq_command(*line)
        assert SHOWN in ran.out + ran.err, ran
        for raw in ("\x1b", "\x9b", "\x07", "\u202e"):
            assert raw not in ran.out + ran.err, ran
    with cluster.consumer(group=ESCAPES) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.commit({TopicPartition(topic, 0): 0})
    ran = rayq_command("group", "list", "--json")
    assert "\x9b" not in ran.out and "\u202e" not in ran.out
    assert ESCAPES in [one["group"] for one in ran.json]
    rayq_command.well("group", "delete", ESCAPES, "-y")

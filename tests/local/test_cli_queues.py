"""`rayq queue` and `rayq dead-letters`, against servers of their own process."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from typing import Any

import pytest

from rayq import Cluster
from rayq.client.admin.dead_letters import DeadLetters, Filter, Progress
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.support import eventually

_numbers = itertools.count(1)


@pytest.fixture
def queue() -> str:
    return f"cli-queue-{next(_numbers)}"


def dead_letters(rayq: Command, name: str, count: int) -> list[dict[str, Any]]:
    """Waits for so many, and returns them."""
    found: list[dict[str, Any]] = []

    def are_there() -> bool:
        found[:] = rayq.well("dead-letters", "list", name, "--json").json
        return len(found) >= count

    eventually(are_there, f"{count} dead letters of {name}")
    return found


def fail_all(cluster: Cluster, name: str, count: int) -> None:
    """Rejects `count` records, by different reasons."""
    with cluster.queue(name) as opened:
        left = count
        while left:
            for task in opened.take(left, 10.0):
                task.reject(f"ValueError: {task.value!r}" if left % 2 else "Timeout")
                left -= 1
        opened.flush()


def test_a_queue_from_create_to_delete(rayq_command: Command, queue: str) -> None:
    rayq = rayq_command
    made = rayq.well("queue", "create", queue, "-p", "2", "-c", "visibility_timeout_s=1m", "--json")
    assert made.json == [{"queue": queue, "created": True}]
    ran = rayq("queue", "create", queue)
    assert ran.code == 1 and queue in ran.err and ran.err.count("\n") == 1
    assert "exists already" in rayq.well("queue", "create", queue, "--if-not-exists").out
    rayq.well("queue", "alter", queue, "-c", "max_deliveries=9", "--set", "backoff_s=2.5")
    described = rayq.well("queue", "describe", queue, "--json").json
    assert described["topic"] == queue and len(described["partitions"]) == 2
    config = described["config"]
    assert (config["visibility_timeout_s"], config["max_deliveries"]) == (60.0, 9)
    assert (config["backoff_s"], config["retention"]) == (2.5, "hold")
    rayq.well("queue", "alter", queue, "-d", "max_deliveries")
    assert rayq.well("queue", "describe", queue, "--json").json["config"]["max_deliveries"] == 5
    # One that reads a topic that is there: from its beginning, beside the other.
    rayq.well("queue", "put", queue, stdin=b"one\ntwo\n")
    rayq.well("queue", "create", queue + "-b", "-t", queue)
    assert sorted(rayq.well("queue", "take", queue + "-b").out.split()) == ["one", "two"]
    listed: dict[str, Any] = {}

    def ready() -> tuple[int, int]:
        listed.update({row["queue"]: row for row in rayq.well("queue", "list", "--json").json})
        return listed[queue]["ready"], listed[queue + "-b"]["ready"]

    # A leader that is just opening the queue does not count what is ready there.
    eventually(lambda: ready() == (2, 0), "both queues tell what is ready")
    assert not any(name.endswith(".dead") for name in listed)
    assert f"{queue}.dead" in rayq.well("queue", "list", "-a").out
    ran = rayq("queue", "describe", queue + "x")
    assert ran.code == 1 and f"Did you mean '{queue}" in ran.err
    assert rayq("queue", "delete", queue).code == 2, "nobody can be asked"
    rayq.well("queue", "delete", queue, queue + "-b", "-y")
    assert queue not in {row["queue"] for row in rayq.well("queue", "list", "--json").json}


def test_lines_are_put_taken_and_settled(rayq_command: Command, queue: str) -> None:
    rayq = rayq_command
    rayq.well("queue", "create", queue)
    put = rayq.well("queue", "put", queue, "-k", "k", "-H", "a=b", "--json", stdin=b"1\n\n3")
    assert put.json == {"queue": queue, "put": 3}
    rayq.well("queue", "put", queue, "--delay", "1h", stdin=b"later\n")
    rayq.well("queue", "put", queue, "--at", "2000-01-01T00:00:00Z", stdin=b"4\n")
    peeked = rayq.well("queue", "peek", queue, "--json").json
    assert [record["state"] for record in peeked] == ["ready", "ready", "ready", "delayed", "ready"]
    delayed = rayq.well("queue", "peek", queue, "--delayed", "--json").json
    assert [record["offset"] for record in delayed] == [3]
    assert rayq.well("queue", "take", queue, "--keep", "-n", "1").out == "1\n"
    eventually(
        lambda: rayq.well("queue", "describe", queue, "--json").json["partitions"][0]["ready"] == 4,
        "the record that was only shown is ready again",
    )
    ran = rayq.well("queue", "take", queue, "-f", r"%k %o %s %h\n", "--wait", "300ms")
    lines = sorted(ran.out.splitlines())
    assert lines[0].startswith(" 4 4 rayq.due=") and lines[1:] == [
        "k 0 1 a=b",
        "k 1  a=b",
        "k 2 3 a=b",
    ]
    assert rayq.well("queue", "take", queue, "--wait", "10ms").out == ""
    assert "1 record of" in rayq.well("queue", "purge", queue, "-y").out
    assert "There are none" in rayq.well("queue", "peek", queue).out


@pytest.mark.thorough
def test_a_command_works_through_a_queue(rayq_command: Command, queue: str) -> None:
    rayq = rayq_command
    rayq.well("queue", "create", queue, "-c", "max_deliveries=2", "-c", "backoff_s=0")
    rayq.well("queue", "put", queue, "-k", "key", stdin=b"good\nbad\n")
    script = 'read x; echo "$x $RAYQ_KEY $RAYQ_DELIVERY"; [ $x = good ] || { echo no >&2; exit 3; }'
    worker = rayq.popen(
        *("queue", "work", queue, "-e", "1500ms", "--", "sh", "-c", script),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = worker.communicate(timeout=60)
    assert worker.returncode == 0, err
    assert sorted(out.decode().splitlines()) == ["bad key 1", "bad key 2", "good key 1"]
    assert err.count(b"no\n") == 2
    (letter,) = dead_letters(rayq, queue, 1)
    assert letter["value"] == "bad" and letter["count"] == 2
    assert "exit code 3: no" in letter["error"]
    ran = rayq("queue", "work", queue, "no-such-command-anywhere")
    assert ran.code == 2 and ran.err.count("\n") == 1


def test_dead_letters_are_looked_at_sent_back_and_dropped(
    rayq_command: Command, cluster: LocalCluster, queue: str
) -> None:
    rayq = rayq_command
    rayq.well("queue", "create", queue)
    with cluster.queue(queue) as opened:
        for number in range(6):
            opened.send(b"v%d" % number, key=b"k%d" % number, headers=[("h", b"%d" % number)])
    fail_all(cluster, queue, 6)
    found = dead_letters(rayq, queue, 6)
    assert {letter["source"] for letter in found} == {f"{queue}/0/{n}" for n in range(6)}
    assert {letter["reason"] for letter in found} == {"rejected"}
    listed = ("dead-letters", "list", queue, "--json", "--where")
    assert len(rayq.well(*listed, "error=timeout").json) == 3
    assert [letter["key"] for letter in rayq.well(*listed, "key=k2", "--where", "key=k9").json] == [
        "k2"
    ]
    assert [letter["value"] for letter in rayq.well(*listed, "header=h=4").json] == ["v4"]
    assert rayq.well(*listed, "since=-0s").json == []
    assert len(rayq.well(*listed, "since=-1h").json) == 6
    shown = rayq.well("dead-letters", "show", queue, f"0/{found[0]['offset']}").out
    assert "header rayq.source: " in shown and "value: v" in shown and "error: " in shown

    redrive = ("dead-letters", "redrive", queue)
    dry = rayq.well(*redrive, "--dry-run", "--where", "error=Timeout", "--json").json
    assert (dry["seen"], dry["matched"], dry["moved"]) == (6, 3, 0)
    # Twice at once, and once more: each goes back once.
    client, background = cluster.shared_client()

    async def twice() -> list[Progress]:
        letters = DeadLetters(client, queue, timeout_s=60.0)
        timeouts = Filter(errors=("timeout",))
        return await asyncio.gather(*(letters.settle(timeouts, to_topic="") for _ in range(2)))

    assert {3} >= {ended.moved for ended in background.run(twice())} - {0}
    assert rayq.well(*redrive, "-y", "--where", "error=Timeout", "--json").json["matched"] == 0
    assert len(rayq.well("queue", "peek", queue, "--json").json) == 3
    back = rayq.well("queue", "take", queue, "--json").out
    assert back.count('"rayq.') == 0 and back.count('["h",') == 3

    aside = queue + "-aside"
    rayq.well("topic", "create", aside)
    some = rayq.well(*redrive, "-y", "--to", aside, "--where", "key=k1", "--rate", "5/s", "--json")
    others = rayq.well("dead-letters", "list", queue, "--json").json
    assert some.json["moved"] == 3 - len(others)
    for wrong in (queue + ".dead", "__consumer_offsets", "no-such-topic"):
        ran = rayq(*redrive, "-y", "--to", wrong)
        assert ran.code == 1 or (ran.code == 2 and wrong == "__consumer_offsets"), ran
        assert ran.err.count("\n") == 1, ran
    assert len(rayq.well("dead-letters", "list", queue, "--json").json) == len(others)
    dropped = rayq.well("dead-letters", "discard", queue, "-y", "--json").json
    assert dropped["moved"] == len(others)
    assert "There are none" in rayq.well("dead-letters", "list", queue).out


def test_a_dead_letter_that_a_producer_wrote_is_marked_and_its_target_shown(
    rayq_command: Command, cluster: LocalCluster, queue: str
) -> None:
    rayq = rayq_command
    with cluster.create_queue(queue) as opened:
        opened.send(b"v")
    fail_all(cluster, queue, 1)
    dead_letters(rayq, queue, 1)
    with cluster.producer() as producer:
        source = [("rayq.source", b"payments/0/7"), ("rayq.reason", b"rejected")]
        producer.send(queue + ".dead", b"forged", headers=source).result()
        producer.send(queue + ".dead", b"aimless").result()
    found = rayq.well("dead-letters", "list", queue, "--json").json
    assert {letter["value"]: letter["by"] for letter in found} == {
        "v": "queue", "forged": "producer", "aimless": "producer",
    }
    forged = next(letter for letter in found if letter["value"] == "forged")
    shown = rayq.well("dead-letters", "show", queue, f"0/{forged['offset']}").out
    assert "written by: a producer" in shown
    preview = rayq.well("dead-letters", "redrive", queue, "--dry-run").out
    assert f"1 dead letter to topic {queue}\n" in preview
    assert "1 dead letter to topic payments, 1 of them written by a producer" in preview
    assert "1 dead letter without a target, 1 of them" in preview
    targets = rayq.well("dead-letters", "redrive", queue, "--dry-run", "--json").json["targets"]
    assert {target["topic"]: (target["letters"], target["by_producers"]) for target in targets} == {
        queue: (1, 0), "payments": (1, 1), None: (1, 1),
    }


def test_the_dead_letters_of_a_pool_go_back_too(
    rayq_command: Command, cluster: LocalCluster, queue: str
) -> None:
    rayq, topic = rayq_command, queue
    rayq.well("topic", "create", topic, topic + "-dlq")
    with cluster.producer() as producer:
        for number in range(3):
            producer.send(
                topic + "-dlq",
                b"v%d" % number,
                headers=[
                    ("own", b"x"),
                    ("rayq.error.class", b"KeyError"),
                    ("rayq.error.message", b"no %d" % number),
                    ("rayq.source", f"{topic}/0/{number}".encode()),
                ],
            )
    name = topic + "-dlq"
    found = rayq.well("dead-letters", "list", name, "--where", "error=keyerror: no", "--json").json
    assert [letter["error"] for letter in found] == [
        f"KeyError: no {number}" for number in range(3)
    ]
    redrive = ("dead-letters", "redrive", name, "-y", "--json")
    assert rayq.well(*redrive, "--where", "error=no 1").json["moved"] == 1
    assert len(rayq.well("dead-letters", "list", name, "--json").json) == 2
    assert rayq.well(*redrive).json["moved"] == 2
    assert rayq.well(*redrive).json["matched"] == 0
    came = rayq.well("topic", "consume", topic, "-e", "-f", r"%s %h\n").out.splitlines()
    assert sorted(came) == [f"v{number} own=x" for number in range(3)]


LINES = """
queue create QUEUE -p 99999999999999999999
queue create QUEUE -p 0
queue create QUEUE -c max_deliveries=99999999999999999999
queue create QUEUE -c backoff_s=nan
queue create QUEUE -c colour=red
queue create QUEUE -t no-such-topic
queue create QUEUE -t t -p 3
queue create a/b
queue create LONG
queue alter QUEUE
queue put QUEUE --delay soon
queue put QUEUE --at 999999999999999999
queue take QUEUE --wait -1s
queue take QUEUE -f %q
queue work QUEUE true -j 0
queue peek QUEUE -n 0
queue purge QUEUE
queue describe ESCAPE
dead-letters list QUEUE
dead-letters list QUEUE --where error
dead-letters list QUEUE --where colour=red
dead-letters list QUEUE --where since=yesterday
dead-letters list QUEUE --where header=x
dead-letters show QUEUE 7
dead-letters show QUEUE 0/999999999999999999999999999999
dead-letters redrive QUEUE -y --rate 0/s
dead-letters redrive QUEUE -y --rate -5/s
dead-letters redrive QUEUE -y --rate fast
dead-letters redrive QUEUE
dead-letters discard QUEUE
"""


def test_what_nobody_should_type_is_one_line(rayq_command: Command, queue: str) -> None:
    for line in LINES.strip().splitlines():
        words = {"QUEUE": queue, "LONG": "x" * 300, "ESCAPE": "\x1b[31m"}
        ran = rayq_command(*(words.get(word, word) for word in line.split()))
        assert ran.code in (1, 2), (line, ran)
        assert ran.err.count("\n") <= 1 and "Traceback" not in ran.err, (line, ran)
        assert "\x1b" not in ran.err, (line, ran)

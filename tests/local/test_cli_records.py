"""`rayq topic produce` and `consume`: the records that go in come out."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from rayq import TopicPartition
from rayq.demo import flights_csv
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.conftest import NewTopic
from tests.local.support import eventually


@pytest.mark.thorough
def test_the_flights_as_consumed_equal_the_source(
    rayq_command: Command, new_topic: NewTopic, tmp_path: Path
) -> None:
    """336,776 lines through real pipes, keyed by tail number."""
    rows = flights_csv().splitlines()
    tail_number = rows[0].split(b",").index(b"tailnum")
    source = [row.split(b",")[tail_number] + b"\t" + row for row in rows[1:]]
    assert len(source) == 336_776
    Path(tmp_path / "source").write_bytes(b"\n".join(source) + b"\n")
    name = new_topic(partitions=6, replication_factor=1)
    ran = rayq_command.shell(
        f"rayq topic produce {name} -K '\\t' < {tmp_path}/source &&"
        rf" rayq topic consume {name} -o beginning -e -f '%p %o\t%k\t%s\n' > {tmp_path}/read"
    )
    assert ran.code == 0, ran
    assert (ran.out, ran.err) == (f"Produced 336,776 records to {name}.\n", "")

    read = [line.split(b"\t", 1) for line in Path(tmp_path / "read").read_bytes().splitlines()]
    assert sorted(line for _, line in read) == sorted(source)
    # Each partition is in the order of its offsets, without a gap; each key is in one partition, in
    # order.
    offsets = defaultdict(list)
    by_key: defaultdict[bytes, list[bytes]] = defaultdict(list)
    partition_of: defaultdict[bytes, set[bytes]] = defaultdict(set)
    for place, line in read:
        partition, offset = place.split()
        offsets[partition].append(int(offset))
        by_key[line.split(b"\t")[0]].append(line)
        partition_of[line.split(b"\t")[0]].add(partition)
    assert all(found == list(range(len(found))) for found in offsets.values())
    assert all(len(found) == 1 for found in partition_of.values())
    sent: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for line in source:
        sent[line.split(b"\t")[0]].append(line)
    assert by_key == sent


def test_lines_become_records_and_records_lines(rayq_command: Command, topic: str) -> None:
    rayq = rayq_command
    assert "Produced 3 records" in rayq.well("topic", "produce", topic, stdin=b"a\n\nc").out
    assert rayq.well("topic", "consume", topic, "-e").out == "a\n\nc\n"
    assert rayq.well("topic", "consume", topic, "-e", "-D", ";").out == "a;;c;"
    assert rayq.well("topic", "consume", topic, "-e", "-D", "%", "-K", "%").out == "%a%%%%c%"


def test_a_record_goes_round_as_json_with_all_it_has(
    rayq_command: Command, new_topic: NewTopic
) -> None:
    rayq, first, second = rayq_command, new_topic(), new_topic(partitions=3)
    rayq.well(
        *("topic", "produce", first, "-f", r"%k|%h|%T|%s\n"),
        stdin=b"k|a=1,b=\xff|1700000000000|v\xfe\n",
    )
    rayq.well("topic", "produce", first, "-k", "key", "-Z", "-H", "x=y", stdin=b"\n")
    lines = rayq.well("topic", "consume", first, "--json", "-e").out
    one, two = map(json.loads, lines.splitlines())
    assert one["timestamp_ms"] == 1_700_000_000_000
    assert (one["key"], one["value"]) == ("k", {"base64": "dv4="})
    assert one["headers"] == [["a", "1"], ["b", {"base64": "/w=="}]]
    assert (two["key"], two["value"], two["headers"]) == ("key", None, [["x", "y"]])
    moved = lines.replace('"partition":0', '"partition":2')
    tally = rayq.well("topic", "produce", second, "-f", "json", "--json", stdin=moved.encode()).json
    assert tally == {"topic": second, "records": 2, "partitions": {"2": 2}}
    again = rayq.well("topic", "consume", second, "-J", "-e").out
    assert again.replace(second, first) == moved


@pytest.fixture(scope="module")
def ten(shared: LocalCluster) -> str:
    """Two partitions of five records, `<partition>:<offset>`, one a second from second 100 on."""
    name = "cli-ten"
    shared.create_topic(name, 2)
    with shared.producer() as producer:
        for offset in range(5):
            for partition in (0, 1):
                value, time_ms = f"{partition}:{offset}".encode(), 100_000 + 1000 * offset
                producer.send(name, value, partition=partition, timestamp_ms=time_ms)
    return name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-o beginning", "0:0 0:1 0:2 0:3 0:4 1:0 1:1 1:2 1:3 1:4"),
        ("-o end", ""),
        ("-o 3", "0:3 0:4 1:3 1:4"),
        ("-o 99", ""),
        ("-o -2", "0:3 0:4 1:3 1:4"),
        ("-o -99", "0:0 0:1 0:2 0:3 0:4 1:0 1:1 1:2 1:3 1:4"),
        ("-o @1970-01-01T00:01:42Z", "0:2 0:3 0:4 1:2 1:3 1:4"),
        ("-o @1970-01-01T00:01:44Z", "0:4 1:4"),
        ("-o @-1h", ""),
        ("-p 1 -o 4", "1:4"),
        ("-p 0-1 -o 4", "0:4 1:4"),
    ],
)
def test_reading_begins_where_it_is_told_to(
    rayq_command: Command, ten: str, options: str, expected: str
) -> None:
    out = rayq_command.well("topic", "consume", ten, "-e", *options.split()).out
    assert sorted(out.split()) == expected.split()


def test_reading_ends_after_so_many_records(rayq_command: Command, ten: str) -> None:
    for count in (0, 1, 4):
        out = rayq_command.well("topic", "consume", ten, "-n", str(count)).out
        assert len(out.split()) == count
    out = rayq_command.well("topic", "consume", ten, "-n", "99", "-e").out
    assert len(out.split()) == 10


def test_what_was_aborted_is_shown_only_when_asked_and_no_group_is_behind_it(
    rayq_command: Command, topic: str
) -> None:
    with rayq_command.cluster.producer(transactional_id=topic) as producer:
        for value in (b"committed", b"aborted"):
            producer.begin_transaction()
            producer.send(topic, value)
            producer.flush()
            if value == b"committed":
                producer.commit_transaction()
            else:
                producer.abort_transaction()
    read = ("topic", "consume", topic, "-e")
    assert rayq_command.well(*read).out.split() == ["committed"]
    everything = rayq_command.well(*read, "--isolation-level", "read_uncommitted").out
    assert everything.split() == ["committed", "aborted"]
    assert rayq_command.well(*read, "-g", topic).out.split() == ["committed"]
    at = rayq_command.cluster.admin.describe_group(topic).partitions
    assert [one.lag for one in at.values()] == [0]


def test_an_offset_that_is_not_there_is_told(rayq_command: Command, topic: str) -> None:
    rayq_command.well("topic", "produce", topic, stdin=b"a\nb\nc\nd\n")
    rayq_command.cluster.admin.delete_records({TopicPartition(topic, 0): 3})
    ran = rayq_command.well("topic", "consume", topic, "-p", "0", "-o", "1", "-e")
    assert ran.out.split() == ["d"]
    assert ran.err == f"{topic}-0 begins at 3: reading from there.\n"
    ran = rayq_command.well("topic", "consume", topic, "-o", "5000", "-e")
    assert ran.out == "" and ran.err == f"{topic}-0 ends at 4: reading from there.\n"
    assert rayq_command.well("topic", "consume", topic, "-o", "4", "-e").err == ""


def test_several_topics_are_read_at_once(rayq_command: Command, ten: str, topic: str) -> None:
    rayq_command.well("topic", "produce", topic, stdin=b"other\n")
    out = rayq_command.well("topic", "consume", ten, topic, "-e", "-f", r"%t\n").out.split()
    assert sorted(set(out)) == sorted([ten, topic])
    assert len(out) == 11


def test_null_keys_and_values_are_shown_when_asked(rayq_command: Command, topic: str) -> None:
    rayq_command.well("topic", "produce", topic, "-Z", "-K", ":", stdin=b"k:\n:v\n")
    assert rayq_command.well("topic", "consume", topic, "-e", "-K", "=").out == "k=\n=v\n"
    assert rayq_command.well("topic", "consume", topic, "-eZ", "-K", "=").out == "k=NULL\nNULL=v\n"


@pytest.mark.parametrize(
    ("options", "stdin", "said"),
    [
        (("-f", "json"), b'{"value": "a"}\nno json\n', "Record 2: 'no json' is not JSON"),
        (
            ("-K", ":"),
            b"k:v\nnone\n",
            "Record 2: 'none' has no key: there is no ':' in it.",
        ),
        (("-K", ":", "-H", "a=b"), b"k:v\nnone\n", "Record 2: 'none' has no key"),
        (("-f", "%p %s"), b"0 a\n7 b\n", "Record 2: "),
        (("-k", "k", "-t", "1h"), b"a\n", "is not a time"),
        (("-p", "9"), b"a\n", "9"),
        ((), random.Random(1).randbytes(2**21).replace(b"\n", b""), "-X large_values=chunks"),
        (
            ("-H", "a=b"),
            random.Random(1).randbytes(2**21).replace(b"\n", b""),
            "-X large_values=chunks",
        ),
    ],
)
def test_a_record_that_cannot_be_written_is_named(
    rayq_command: Command, topic: str, options: tuple[str, ...], stdin: bytes, said: str
) -> None:
    ran = rayq_command("topic", "produce", topic, *options, stdin=stdin)
    assert ran.code == (2 if said == "is not a time" else 1)
    assert ran.err.count("\n") == 1
    assert said in ran.err
    # The records before the bad one are there.
    there = rayq_command.well("topic", "consume", topic, "-e").out.split()
    assert there == (["a"] if said.startswith("Record 2") and options[0] != "-K" else there)


def test_records_that_servers_refuse_fail_the_command(
    rayq_command: Command, new_topic: NewTopic
) -> None:
    name = new_topic(cleanup_policy="compact")
    ran = rayq_command("topic", "produce", name, stdin=b"no key\n")
    assert ran.code == 1
    assert "key" in ran.err


def test_when_the_reader_of_a_pipe_goes_the_command_ends_quietly(
    rayq_command: Command, topic: str
) -> None:
    rayq_command.well("topic", "produce", topic, stdin=b"line\n" * 20_000)
    # The command also ends while no record comes that it could not write: head has enough.
    ran = rayq_command.shell(f"rayq topic consume {topic} | head -2; echo ${{PIPESTATUS[0]}}")
    assert ran.out.split() == ["line", "line", "141"]
    assert ran.err == ""


def test_a_disk_that_is_full_is_one_line(rayq_command: Command, topic: str) -> None:
    rayq_command.well("topic", "produce", topic, stdin=b"line\n")
    ran = rayq_command.shell(f"rayq topic consume {topic} -e > /dev/full; rayq status > /dev/full")
    assert ran.code == 1
    assert ran.err == "Error: No space left on device.\n" * 2


def test_a_closed_stream_is_one_line(rayq_command: Command, topic: str) -> None:
    ran = rayq_command.shell(f"rayq topic produce {topic} <&- ; rayq topic list >&-")
    assert ran.code == 1
    assert ran.err == "Error: stdin is closed.\nError: stdout is closed.\n"


def test_records_come_through_a_pipe_as_soon_as_they_are_there(
    rayq_command: Command, topic: str
) -> None:
    """`tail -f ... | rayq topic produce` and `rayq topic consume | ...` hold nothing back."""
    pipe = subprocess.PIPE
    writer = rayq_command.popen("topic", "produce", topic, stdin=pipe, stdout=pipe)
    reader = rayq_command.popen("topic", "consume", topic, stdout=pipe)
    try:
        assert writer.stdin is not None and reader.stdout is not None
        for number in range(3):
            writer.stdin.write(b"line %d\n" % number)
            writer.stdin.flush()
            assert reader.stdout.readline() == b"line %d\n" % number
        writer.stdin.close()
        assert writer.wait(60) == 0
        reader.send_signal(signal.SIGINT)
        assert reader.wait(60) == 130
    finally:
        writer.kill()
        reader.kill()


def test_members_of_a_group_share_and_go_on_where_they_stopped(
    rayq_command: Command, new_topic: NewTopic, tmp_path: Path
) -> None:
    name = new_topic(partitions=2)
    group = f"group-of-{name}"
    outputs = [tmp_path / "one", tmp_path / "two"]
    one, two = (
        rayq_command.popen(
            "topic", "consume", name, "-g", group, "-f", r"%p\n", stdout=output.open("wb")
        )
        for output in outputs
    )
    admin = rayq_command.cluster.admin

    def both_have_one() -> bool:
        if group not in [listed.group for listed in admin.list_groups(timeout_s=100)]:
            return False
        members = admin.describe_group(group).members
        return [len(member.assigned) for member in members] == [1, 1]

    try:
        eventually(both_have_one, "each member has a partition")
        lines = b"".join(b"%d v\n" % (number % 2) for number in range(100))
        rayq_command.well("topic", "produce", name, "-f", "%p %s", stdin=lines)
        eventually(
            lambda: [at.lag for at in admin.describe_group(group).partitions.values()] == [0, 0],
            "all is committed",
        )
        one.send_signal(signal.SIGINT)
        two.send_signal(signal.SIGTERM)
        assert [one.wait(60), two.wait(60)] == [130, 143]
        outs = [output.read_bytes().split() for output in outputs]
        assert sorted(len(out) for out in outs) == [50, 50]
        assert {len(set(out)) for out in outs} == {1}
        assert admin.describe_group(group).members == []
    finally:
        one.kill()
        two.kill()
    assert rayq_command.well("topic", "consume", name, "-g", group, "-e").out == ""


def test_a_shell_completes_verbs_and_topics(
    rayq_command: Command, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "_RAYQ_COMPLETE=complete_bash COMP_WORDS='rayq topic con' COMP_CWORD=2 rayq"
    assert rayq_command.shell(script).out.split() == ["consume"]

    def completed(*words: str) -> list[str]:
        """Completes words in this process."""
        monkeypatch.setenv("_RAYQ_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        ran = rayq_command()
        assert (ran.code, ran.err) == (0, "")
        return ran.out.split()

    assert topic in completed("rayq", "topic", "consume", topic[:6])
    broker = rayq_command.cluster.addresses[0]
    monkeypatch.delenv("RAYQ_CLUSTER")
    assert topic in completed("rayq", "topic", "alter", "--cluster", broker, topic[:6])
    assert completed("rayq", "topic", "alter", topic[:6]) == []

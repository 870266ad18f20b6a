"""The command's standard streams as they come: non-blocking, full, with a reader that goes."""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from io import FileIO

import pytest

from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.support import eventually

_numbers = itertools.count(1)

TELLS_OF_WAITS = """
import os
from rayq.cli import streams
from rayq.cli.main import main

wait = streams._wait

def wait_and_tell(descriptor, event):
    os.write(2, b"It waits.\\n")
    streams._wait = wait
    wait(descriptor, event)

streams._wait = wait_and_tell
main()
"""
"""The command, which says on stderr that it waits for a stream, the first time."""


@pytest.fixture
def queue(cluster: LocalCluster) -> str:
    name = f"pipes-{next(_numbers)}"
    cluster.admin.create_queue(name)
    return name


@pytest.fixture
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Its ends for reading and for writing."""
    read_end, write_end = os.pipe()
    with FileIO(read_end, "rb") as reader, FileIO(write_end, "wb") as writer:
        yield reader, writer


def is_empty(pipe: FileIO) -> bool:
    left = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, left)
    return left[0] == 0


def left_in(cluster: LocalCluster, queue: str) -> list[tuple[str, int]]:
    """State and number of deliveries of all that is not settled."""
    found = cluster.admin.list_queue_records(queue, limit=1_000)
    return [(record.state, record.count) for record in found]


@pytest.mark.parametrize("verb", ["topic produce", "queue put"])
def test_lines_of_a_non_blocking_stdin_are_whole(
    rayq_command: Command,
    cluster: LocalCluster,
    queue: str,
    pipe: tuple[FileIO, FileIO],
    verb: str,
) -> None:
    reader, writer = pipe
    os.set_blocking(reader.fileno(), False)
    program = rayq_command.popen(*verb.split(), queue, stdin=reader)
    with cluster.consumer(queue) as consumer:
        writer.write(b"one\ntw")
        records = [record.value for record in consumer.poll(60.0)]
        assert records == [b"one"]
        writer.write(b"o\nthree\r\n\xff\0four")
        writer.close()
        assert program.wait(60) == 0
        eventually(
            lambda: records.extend(record.value for record in consumer.poll(0.1))
            or records == [b"one", b"two", b"three\r", b"\xff\0four"],
            f"all lines, not {records}",
        )


def test_a_non_blocking_stdout_is_waited_for(
    rayq_command: Command, topic: str, pipe: tuple[FileIO, FileIO]
) -> None:
    lines = b"".join(b"%06d %s\n" % (number, b"x" * 93) for number in range(5_000))
    rayq_command.well("topic", "produce", topic, stdin=lines)
    reader, writer = pipe
    os.set_blocking(writer.fileno(), False)
    program = rayq_command.popen("topic", "consume", topic, "-e", stdout=writer)
    full = select.poll()  # `select` takes no descriptor above 1,023.
    full.register(writer, select.POLLOUT)
    eventually(lambda: not full.poll(0), "the pipe is full")
    writer.close()
    assert reader.readall() == lines
    assert program.wait(60) == 0


def test_what_is_for_people_waits_for_room_too(pipe: tuple[FileIO, FileIO]) -> None:
    reader, writer = pipe
    os.set_blocking(writer.fileno(), False)
    room_bytes = writer.write(b"x" * 2**20)  # All that there is room for.
    program = subprocess.Popen(
        [sys.executable, "-c", TELLS_OF_WAITS, "topic"], stdout=writer, stderr=subprocess.PIPE
    )
    writer.close()
    assert program.stderr is not None and program.stderr.readline() == b"It waits.\n"
    said = reader.readall()[room_bytes:]
    program.stderr.close()
    assert program.wait(60) == 0
    assert said.startswith(b"Usage: rayq topic") and b"delete-records" in said


def test_queue_take_settles_what_the_next_program_has_read(
    rayq_command: Command, cluster: LocalCluster, queue: str, pipe: tuple[FileIO, FileIO]
) -> None:
    rayq_command.well("queue", "put", queue, stdin=b"line\n" * 200)
    reader, writer = pipe
    program = rayq_command.popen("queue", "take", queue, stdout=writer)
    writer.close()
    read = reader.read(12)
    reader.close()
    assert program.wait(60) == 141
    settled = read.count(b"line\n")
    assert settled in (1, 2)
    # The one that was on its way may have been seen; nobody has had the others.
    eventually(
        lambda: {state for state, _ in left_in(cluster, queue)} == {"ready"}, "all is given back"
    )
    deliveries = [count for _, count in left_in(cluster, queue)]
    assert len(deliveries) in (200 - settled, 199 - settled)
    assert max(deliveries) <= 1  # An answer that was on its way to the command counts as one.
    ran = rayq_command.shell(f"rayq queue take {queue} > /dev/full")
    assert ran.code == 1 and ran.err == "Error: No space left on device.\n"
    assert len(left_in(cluster, queue)) == len(deliveries)


def test_a_member_commits_what_the_next_program_has_read(
    rayq_command: Command, cluster: LocalCluster, topic: str, pipe: tuple[FileIO, FileIO]
) -> None:
    lines = b"".join(b"%03d\n" % number for number in range(200))
    rayq_command.well("topic", "produce", topic, stdin=lines)
    group = f"group-of-{topic}"
    reader, writer = pipe
    program = rayq_command.popen("topic", "consume", topic, "-g", group, stdout=writer)
    writer.close()
    assert reader.read(4) == b"000\n"
    reader.close()
    assert program.wait(60) == 141
    again = rayq_command.well("topic", "consume", topic, "-g", group, "-e").out
    assert again.encode() == lines
    assert rayq_command.well("topic", "consume", topic, "-g", group, "-e").out == ""


def test_queue_work_waits_for_the_command_alone(
    rayq_command: Command, cluster: LocalCluster, queue: str
) -> None:
    """Not for what the command has left behind, be it with its stdin, stdout or stderr."""
    with cluster.queue(queue) as opened:
        opened.send(b"x" * 300_000).result()
    started_s = time.monotonic()
    script = "sleep 300 <&0 >/dev/null & echo said >&2"
    work = ("queue", "work", queue, "-e", "300ms", "--", "sh", "-c", script)
    ran = rayq_command.shell(f"timeout 120 rayq {' '.join(work[:-1])} '{script}'")
    assert ran.code == 0 and "said\n" in ran.err, ran
    assert time.monotonic() - started_s < 200
    assert left_in(cluster, queue) == []


def test_queue_work_takes_nothing_while_its_stdout_is_closed(
    rayq_command: Command, cluster: LocalCluster, queue: str
) -> None:
    with cluster.queue(queue) as opened:
        opened.put(b"v")
    ran = rayq_command.shell(f"rayq queue work {queue} -e 1s -- cat >&-")
    assert (ran.code, ran.err) == (1, "Error: stdout is closed.\n")
    assert left_in(cluster, queue) == [("ready", 0)]


def test_an_error_that_nobody_can_be_told_has_its_exit_code(rayq_command: Command) -> None:
    ran = rayq_command.shell(
        "rayq topic create a -p 0 2>/dev/full; echo $?; rayq topic create a -p 0 <&- >&- 2>&-; echo $?"
    )
    assert ran.out == "2\n2\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_worker_lets_its_command_finish(
    rayq_command: Command, cluster: LocalCluster, queue: str, number: signal.Signals
) -> None:
    """Ctrl+C at a terminal, and `timeout`, signal the whole process group."""
    cluster.admin.alter_queue(queue, max_deliveries=1)
    with cluster.queue(queue) as opened:
        opened.put_many([b"1", b"2"])
    script = "echo begun; sleep 1; echo done"
    worker = rayq_command.popen(
        *("queue", "work", queue, "--prefetch", "0", "--", "sh", "-c", script),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert worker.stdout is not None and worker.stdout.readline() == b"begun\n"
    os.killpg(worker.pid, number)
    assert worker.stdout.read() == b"done\n"
    assert worker.wait(60) == 128 + number
    assert left_in(cluster, queue) == [("ready", 0)]


def test_a_second_interrupt_ends_the_command(
    rayq_command: Command, cluster: LocalCluster, queue: str
) -> None:
    with cluster.queue(queue) as opened:
        opened.put(b"1")
    script = "trap 'echo ended; kill $!' TERM; echo begun; sleep 300 & wait"
    worker = rayq_command.popen(
        *("queue", "work", queue, "--", "sh", "-c", script),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert worker.stdout is not None and worker.stdout.readline() == b"begun\n"
    ends_s = time.monotonic() + 60
    while worker.poll() is None and time.monotonic() < ends_s:
        os.killpg(worker.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(2)
    assert worker.returncode == 130
    assert worker.stdout.read() == b"ended\n"


@pytest.mark.parametrize(
    "key, in_variable",
    [(None, "0 set"), (b"", "0 set"), (b"k" * 65_536, "65536 set"), (b"k" * 200_000, "0 "), (b"a\0b", "0 ")],
)
def test_queue_work_gives_the_command_every_key(
    rayq_command: Command,
    cluster: LocalCluster,
    queue: str,
    key: bytes | None,
    in_variable: str,
) -> None:
    with cluster.queue(queue) as opened:
        opened.send(b"value", key=key).result()
    script = (
        'echo "${#RAYQ_KEY} ${RAYQ_KEY+set}"; '
        '[ -z "$RAYQ_KEY_FILE" ] || cat "$RAYQ_KEY_FILE" | wc -c; cat'
    )
    ran = rayq_command.well("queue", "work", queue, "-e", "200ms", "--", "sh", "-c", script)
    length = [] if key is None else [str(len(key))]
    assert ran.out.splitlines() == [in_variable, *length, "value"]


@pytest.fixture
def hang_ups_count() -> Iterator[None]:
    """Under nohup this process, and so the command, would ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_ups_count")
def test_what_was_typed_is_delivered_when_the_terminal_goes(
    rayq_command: Command, cluster: LocalCluster, topic: str, pipe: tuple[FileIO, FileIO]
) -> None:
    reader, writer = pipe
    program = rayq_command.popen("topic", "produce", topic, "-X", "linger_ms=60s", stdin=reader)
    with cluster.consumer(topic) as consumer:
        for line in (b"typed\n", b"just now\n"):  # Once the second is read, the first is accepted.
            writer.write(line)
            eventually(lambda: is_empty(reader), "the command has read it")
        program.send_signal(signal.SIGHUP)
        assert program.wait(60) == 129
        assert [record.value for record in consumer.poll(60.0)][:1] == [b"typed"]

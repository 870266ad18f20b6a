"""`rayq queue put`, `take` and `work`: records into a queue, out of it, and through a command."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, BinaryIO

import typer

from rayq.cli import output
from rayq.cli.consume import Printer
from rayq.cli.current import connected
from rayq.cli.formats import JSON, NULL, InputError, formatter, to_bytes
from rayq.cli.options import ClusterAddress, Json, QueueName
from rayq.cli.produce import Answers, records_of
from rayq.cli.streams import write_all
from rayq.cli.values import WrongUseError, duration_ms, pair, time_ms
from rayq.client.cluster import Cluster
from rayq.client.queues.arguments import PREFETCH, PREFETCH_MAX
from rayq.client.queues.task import QueueTask
from rayq.errors import RayqError, RecordTooLargeError
from rayq.records import Record
from rayq.storage.batch import BATCH_BYTES_MAX

PENDING_MAX = 10_000
"""The maximum number of records without a known outcome; beyond it the command waits for the
oldest."""
PREFETCHED_MAX = 500
KEY_BYTES_MAX = 65_536
"""A longer key is not a variable: a program takes 128 KiB in each."""
ERROR_CHARACTERS = 1_000
"""The maximum size of the tail of a command's stderr that goes into its record's error."""


class CommandError(RayqError):
    """A command that was run for a record ended with an exit code other than 0."""


def put(
    queue: QueueName,
    key: Annotated[
        str | None, typer.Option("-k", "--key", help="The key of every record.", show_default=False)
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("-H", "--header", metavar="NAME=VALUE", help="Add a header to every record."),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="DURATION", help="Delay before delivery, e.g. 30s or 2h."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="Deliver the records at this time, not earlier."),
    ] = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Put the lines of stdin into a queue, each as a record; returns when all are on disk."""
    if delay is not None and at is not None:
        raise typer.BadParameter("give one of --delay and --at")
    delay_s = None if delay is None else duration_ms(delay) / 1000
    deliver_at = None if at is None else _moment(at)
    headers = [(name, to_bytes(value)) for name, value in (pair(h, "header") for h in header or ())]
    count = 0
    answers = Answers(PENDING_MAX)
    with connected(cluster, queues=[queue]) as connection, connection.queue(queue) as opened:
        output.hush()
        with output.patience(answers.waits_for):
            for lines in records_of(sys.stdin.fileno(), b"\n", BATCH_BYTES_MAX):
                for line in lines:
                    count += 1
                    try:
                        future = opened.send(
                            line,
                            key=None if key is None else to_bytes(key),
                            headers=headers or None,
                            delay_s=delay_s,
                            deliver_at=deliver_at,
                        )
                    except RecordTooLargeError as error:
                        said = f"Record {count}: {error} (Those before it are put.)"
                        raise InputError(said) from error
                    answers.add(future)
                answers.take_those_there()
            answers.all()
    if json:
        output.print_json({"queue": queue, "put": count})
    else:
        output.say(f"{output.counted(count, 'record')} put into {queue}.")


def _moment(text: str) -> datetime:
    try:
        return datetime.fromtimestamp(time_ms(text, output.now_ms()) / 1000, tz=UTC)
    except (ValueError, OverflowError):
        raise WrongUseError(f"{text!r} is not a time that a record can wait for.") from None


def take(
    queue: QueueName,
    count: Annotated[
        int | None,
        typer.Option("-n", "--num", "--count", help="Stop after N records.", min=1),
    ] = None,
    wait: Annotated[
        str,
        typer.Option(
            "--wait", metavar="DURATION", help="Stop when no record has arrived for this time."
        ),
    ] = "1s",
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Release the records instead of settling them. (Each counts as a delivery; `rayq "
            "queue peek` only looks.)",
        )
    ] = False,
    format_: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--format",
            help="A format as for `rayq topic consume`, or json.",
            show_default=r"'%s\n'",
        ),
    ] = None,
    show_null: Annotated[
        bool, typer.Option("-Z", "--null", help="Print NULL for a key or value that is null.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", "-J", help="Print one JSON object per line for each record.")
    ] = False,
    cluster: ClusterAddress = None,
) -> None:
    """Take records out of a queue and print them. What was printed is settled; in a pipe, what the
    next program has read.
    """
    if json and format_:
        raise typer.BadParameter("--json is a format: give one")
    wait_s = duration_ms(wait) / 1000
    template = JSON if json else format_ or r"%s\n"
    printer = Printer(formatter(template, null=NULL if show_null else b""), count)
    kept: list[QueueTask] = []
    # Of those that were fetched and not printed nobody knows: they are given back as they were.
    prefetch = PREFETCHED_MAX if count is None else min(PREFETCHED_MAX, count)
    with (
        connected(cluster, queues=[queue]) as connection,
        connection.queue(queue, prefetch=prefetch) as opened,
    ):
        output.hush()
        try:
            while not printer.is_done and (tasks := opened.take(1, wait_s)):
                kept += tasks
                printer.print([_record(task) for task in tasks])
                printer.wait_taken()
                if not keep:
                    kept.pop().ack()
            opened.flush()
        finally:
            for task in kept:
                task.nack(0.0)
        if not printer.is_done:
            _tell_trouble(connection, queue)


def _tell_trouble(cluster: Cluster, queue: str) -> None:
    """Nothing has come: says so where that is for another reason than that there is nothing."""
    for partition in cluster.admin.describe_queue(queue).partitions:
        if partition.trouble is not None:
            output.note(f"Partition {partition.partition} gave nothing: {partition.trouble}")


def _record(task: QueueTask) -> Record:
    return Record(
        topic=task.topic,
        partition=task.partition,
        offset=task.offset,
        timestamp_ms=task.timestamp_ms,
        key=task.key,
        value=task.value,
        headers=task.headers,
    )


def work(
    queue: QueueName,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...",
            help="The command to run for each record, with its value on stdin. Put -- before a "
            "command with options.",
        ),
    ],
    concurrency: Annotated[
        int,
        typer.Option(
            "-j",
            "--concurrency",
            help="Number of commands to run at the same time.",
            min=1,
            max=1000,
        ),
    ] = 1,
    prefetch: Annotated[
        int,
        typer.Option(
            "--prefetch",
            help="Maximum number of records locked ahead; none where commands take long.",
            min=0,
            max=PREFETCH_MAX,
        ),
    ] = PREFETCH,
    exit_when_idle: Annotated[
        str | None,
        typer.Option(
            "-e",
            "--exit-after",
            metavar="DURATION",
            help="Stop when no record has arrived for this time. Default: never.",
        ),
    ] = None,
    cluster: ClusterAddress = None,
) -> None:
    """Run a command for each record of a queue, until Ctrl+C, after which the commands that run may
    finish; a second one ends them. Exit code 0 settles the record; after any other it is tried
    again, and goes to the dead letters in the end.

    The command sees RAYQ_QUEUE, RAYQ_PARTITION, RAYQ_OFFSET, RAYQ_DELIVERY and RAYQ_KEY, which is
    not there for a key that has more than 65,536 bytes or a NUL: the file RAYQ_KEY_FILE has every
    key.
    """
    idle_s = None if exit_when_idle is None else duration_ms(exit_when_idle) / 1000
    if shutil.which(command[0]) is None:
        raise WrongUseError(f"There is no command {command[0]!r} to run.")

    commands = _Commands()

    def handle(task: QueueTask) -> None:
        code, said = commands.run(task, command)
        with contextlib.suppress(OSError):  # Whether stderr can be read says nothing of the record.
            write_all(sys.stderr.fileno(), said)
        if code != 0:
            text = said.decode(errors="replace").strip()[-ERROR_CHARACTERS:]
            raise CommandError(f"exit code {code}" + (f": {text}" if text else ""))

    with connected(cluster, queues=[queue]) as connection, connection.queue(queue) as opened:
        output.hush()
        os.write(sys.stdout.fileno(), b"")  # Where it is closed the command fails for every record.
        with commands.ended():
            opened.work(
                handle, concurrency=concurrency, prefetch=prefetch, stop_when_idle_s=idle_s
            )
        _tell_trouble(connection, queue)


class _Commands:
    """The commands that run. Each is a process group of its own: what ends a whole group, as Ctrl+C
    at a terminal and `timeout` do, is meant for the worker, which lets them finish."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, task: QueueTask, command: list[str]) -> tuple[int, bytes]:
        """Runs the command for a record. Returns its exit code and what it said on stderr. It has
        files and no pipes: nothing that it started and left behind is waited for."""
        with contextlib.ExitStack() as files:
            stdin = files.enter_context(_file_of(task.value or b""))
            stderr = files.enter_context(tempfile.TemporaryFile())
            environment = _environment(task)
            descriptors = []
            if task.key is not None:
                descriptors = [files.enter_context(_file_of(task.key)).fileno()]
                environment["RAYQ_KEY_FILE"] = f"/dev/fd/{descriptors[0]}"
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stderr=stderr,
                env=environment,
                pass_fds=descriptors,
                process_group=0,
            )
            self._running.add(process)
            try:
                code = process.wait()
            finally:
                self._running.discard(process)
            stderr.seek(0)
            return code, stderr.read()

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """A block after which none runs: those that were not waited for, after a second Ctrl+C for
        example, get a SIGTERM."""
        try:
            yield
        finally:
            for process in list(self._running):
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM)


@contextlib.contextmanager
def _file_of(data: bytes) -> Iterator[BinaryIO]:
    """A file in memory that holds `data`."""
    with open(os.memfd_create("rayq"), "w+b") as file:
        file.write(data)
        file.seek(0)
        yield file


def _environment(task: QueueTask) -> dict[str, str]:
    environment = {
        **os.environ,
        "RAYQ_QUEUE": task.queue,
        "RAYQ_PARTITION": str(task.partition),
        "RAYQ_OFFSET": str(task.offset),
        "RAYQ_DELIVERY": str(task.delivery_count),
    }
    for name in ("RAYQ_KEY", "RAYQ_KEY_FILE"):
        environment.pop(name, None)
    key = task.key or b""
    if len(key) <= KEY_BYTES_MAX and b"\0" not in key:
        environment["RAYQ_KEY"] = key.decode(errors="surrogateescape")
    return environment

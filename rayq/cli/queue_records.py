"""`rayq queue put`, `take` and `work`: records into a queue, out of it, and through a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from rayq.cli import output
from rayq.cli.consume import Printer
from rayq.cli.current import connected
from rayq.cli.formats import JSON, NULL, formatter, shown, to_bytes
from rayq.cli.options import ClusterAddress, Json, QueueName
from rayq.cli.values import duration_ms, pair, time_ms
from rayq.client.producing.futures import DeliveryFuture
from rayq.client.queues.arguments import PREFETCH, PREFETCH_MAX
from rayq.client.queues.task import QueueTask
from rayq.errors import InvalidRequestError, RayqError
from rayq.records import Record
from rayq.storage.batch import BATCH_BYTES_MAX

PENDING_MAX = 10_000
"""How many records may be without a known outcome; beyond that the command waits for the oldest."""
TAKEN_AT_ONCE = 500
ERROR_CHARACTERS = 1_000
"""So much of the end of what a command says on stderr goes into its record's error."""


class CommandError(RayqError):
    """A command that was run for a record ended with another exit code than 0."""


def put(
    queue: QueueName,
    key: Annotated[
        str | None, typer.Option("-k", "--key", help="The key of every record.", show_default=False)
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("-H", "--header", metavar="NAME=VALUE", help="A header of every record."),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="DURATION", help="Nobody gets them before: 30s, 2h."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="Nobody gets them before this time."),
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
    pending: deque[DeliveryFuture] = deque()
    with connected(cluster, queues=[queue]) as connection, connection.queue(queue) as opened:
        for line in _lines():
            pending.append(
                opened.send(
                    line,
                    key=None if key is None else to_bytes(key),
                    headers=headers or None,
                    delay_s=delay_s,
                    deliver_at=deliver_at,
                )
            )
            if len(pending) > PENDING_MAX:
                pending.popleft().result()
                count += 1
        while pending:
            pending.popleft().result()
            count += 1
    if json:
        output.print_json({"queue": queue, "put": count})
    else:
        output.say(f"{output.counted(count, 'record')} put into {queue}.")


def _moment(text: str) -> datetime:
    try:
        return datetime.fromtimestamp(time_ms(text, output.now_ms()) / 1000, tz=UTC)
    except (ValueError, OverflowError):
        raise InvalidRequestError(f"{text!r} is no time that a record can wait for.") from None


def _lines() -> Iterator[bytes]:
    """The lines of stdin without their ends. Raises InvalidRequestError for one that is too long
    for any record."""
    stdin = sys.stdin.buffer
    while line := stdin.readline(BATCH_BYTES_MAX):
        if len(line) == BATCH_BYTES_MAX and not line.endswith(b"\n"):
            raise InvalidRequestError(f"The line {shown(line)} is longer than any record.")
        yield line.removesuffix(b"\n")


def take(
    queue: QueueName,
    count: Annotated[
        int | None,
        typer.Option("-n", "--num", "--count", help="Stop after so many records.", min=1),
    ] = None,
    wait: Annotated[
        str,
        typer.Option(
            "--wait", metavar="DURATION", help="Stop once no record has come for so long."
        ),
    ] = "1s",
    keep: Annotated[
        bool, typer.Option("--keep", help="Give them back instead of settling them.")
    ] = False,
    format_: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--format",
            help="As `rayq topic consume` has it, or json.",
            show_default=r"'%s\n'",
        ),
    ] = None,
    show_null: Annotated[
        bool, typer.Option("-Z", "--null", help="Print NULL for a key or value that is null.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", "-J", help="One JSON object on a line for each record.")
    ] = False,
    cluster: ClusterAddress = None,
) -> None:
    """Take records out of a queue and print them. What was printed is settled."""
    if json and format_:
        raise typer.BadParameter("--json is a format: give one")
    wait_s = duration_ms(wait) / 1000
    template = JSON if json else format_ or r"%s\n"
    printer = Printer(formatter(template, null=NULL if show_null else b""), count)
    kept: list[QueueTask] = []
    with (
        connected(cluster, queues=[queue]) as connection,
        connection.queue(queue, prefetch=0) as opened,
    ):
        while not printer.is_done:
            left = TAKEN_AT_ONCE if count is None else min(TAKEN_AT_ONCE, count - printer.printed)
            tasks = opened.take(left, wait_s)
            if not tasks:
                break
            printer.print([_record(task) for task in tasks])
            for task in tasks:
                if keep:
                    kept.append(task)
                else:
                    task.ack()
        opened.flush()
        for task in kept:
            task.nack(0.0)


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
            help="What is run for each record, with its value on stdin; put -- before it where it "
            "has options.",
        ),
    ],
    concurrency: Annotated[
        int, typer.Option("-j", "--concurrency", help="So many at a time.", min=1, max=1000)
    ] = 1,
    prefetch: Annotated[
        int,
        typer.Option(
            "--prefetch",
            help="Lock at most so many ahead; none are where commands take long.",
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
            help="Stop once no record has come for so long. Without: never.",
        ),
    ] = None,
    cluster: ClusterAddress = None,
) -> None:
    """Run a command for each record of a queue, until Ctrl+C. Exit code 0 settles the record; after
    any other it is tried again, and goes to the dead letters in the end.

    The command sees RAYQ_QUEUE, RAYQ_PARTITION, RAYQ_OFFSET, RAYQ_DELIVERY and RAYQ_KEY.
    """
    idle_s = None if exit_when_idle is None else duration_ms(exit_when_idle) / 1000
    if shutil.which(command[0]) is None:
        raise InvalidRequestError(f"There is no command {command[0]!r} to run.")

    def handle(task: QueueTask) -> None:
        ran = subprocess.run(
            command, input=task.value or b"", stderr=subprocess.PIPE, env=_environment(task)
        )
        if ran.stderr:
            os.write(sys.stderr.fileno(), ran.stderr)
        if ran.returncode != 0:
            said = ran.stderr.decode(errors="replace").strip()[-ERROR_CHARACTERS:]
            raise CommandError(f"exit code {ran.returncode}" + (f": {said}" if said else ""))

    with connected(cluster, queues=[queue]) as connection, connection.queue(queue) as opened:
        opened.work(
            handle, concurrency=concurrency, prefetch=prefetch, stop_when_idle_s=idle_s
        )


def _environment(task: QueueTask) -> dict[str, str]:
    key = "" if task.key is None else task.key.replace(b"\0", b"").decode(errors="surrogateescape")
    return {
        **os.environ,
        "RAYQ_QUEUE": task.queue,
        "RAYQ_PARTITION": str(task.partition),
        "RAYQ_OFFSET": str(task.offset),
        "RAYQ_DELIVERY": str(task.delivery_count),
        "RAYQ_KEY": key,
    }

"""`rayq topic consume`: records to stdout, in kcat's formats or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import typer

from rayq.cli import output
from rayq.cli.current import connected
from rayq.cli.formats import JSON, NULL, Formatter, formatter
from rayq.cli.options import ClusterAddress, TopicNames, complete_group
from rayq.cli.streams import Pipe
from rayq.cli.values import Where, config_values, partition_numbers, where
from rayq.client.client import check_partition
from rayq.client.cluster import Cluster
from rayq.client.consuming.consumer import Consumer
from rayq.config import ConsumerConfig
from rayq.records import Record, TopicPartition

IsolationLevel = Literal["read_committed", "read_uncommitted"]

POLL_S = 0.2
POLL_RECORDS_MAX = 10_000
TOPIC_TIMEOUT_S = 30.0
END_TIMEOUT_S = 60.0
"""--exit fails after so long without progress: a partition has no leader, or a group does not
settle."""


def consume(
    topics: TopicNames,
    offset: Annotated[
        str,
        typer.Option(
            "-o",
            "--offset",
            metavar="WHERE",
            help="Start position: beginning, end, an offset, -N (the last N of each partition), "
            "@TIME (@-1h, @2013-01-31T12:00:00Z, Unix milliseconds). In a group: only for "
            "partitions without a committed offset.",
        ),
    ] = "beginning",
    exit_at_end: Annotated[
        bool,
        typer.Option(
            "-e", "--exit", help="Stop at the end that the log has when the command starts."
        ),
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("-n", "--num", "--count", help="Stop after N records.", min=0),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--format",
            help=r"%s value, %k key, %t topic, %p partition, %o offset, %T timestamp, %h headers, "
            r"%S and %K lengths, %R the length as four bytes, \n \t \xHH; or json.",
            show_default=r"'%s\n'",
        ),
    ] = None,
    key_delimiter: Annotated[
        str | None,
        typer.Option("-K", "--key-delimiter", help="Print the key, this delimiter, and the value."),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            "-D",
            "--delimiter",
            help="The delimiter after each record, without --format.",
            show_default=r"'\n'",
        ),
    ] = None,
    show_null: Annotated[
        bool, typer.Option("-Z", "--null", help="Print NULL for a key or value that is null.")
    ] = False,
    partitions: Annotated[
        str | None,
        typer.Option(
            "-p", "--partition", "--partitions", help="Only these partitions: 0,2 or 0-3."
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "-g",
            "-G",
            "--group",
            help="Read as a member of this group; printed records are committed.",
            autocompletion=complete_group,
        ),
    ] = None,
    isolation_level: Annotated[
        IsolationLevel | None,
        typer.Option(
            "--isolation-level",
            help="Read only committed transactions, or all replicated records.",
            show_default="read_committed",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("-X", "--config", metavar="KEY=VALUE", help="Set a config of the consumer."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", "-J", help="Print one JSON object per line for each record.")
    ] = False,
    cluster: ClusterAddress = None,
) -> None:
    r"""Print records, forever or until --exit or --num stops it.

    Examples: `rayq topic consume flights -o -5 -e`;
    `rayq topic consume flights -f '%p %o %k %s\n' -o @-1h`;
    `rayq topic consume flights -e | wc -l`.
    """
    if json and format_:
        raise typer.BadParameter("give one of --json and --format")
    template = JSON if json else format_
    if template is not None and (key_delimiter is not None or delimiter is not None):
        raise typer.BadParameter("--format sets the delimiters: leave out -K and -D")
    if template is None:
        key = "" if key_delimiter is None else "%k" + key_delimiter.replace("%", "%%")
        end = r"\n" if delimiter is None else delimiter
        template = key + "%s" + end.replace("%", "%%")
    if group is not None and partitions is not None:
        raise typer.BadParameter("a group assigns the partitions: leave out --partition")
    begin = where(offset, output.now_ms())
    if group is not None and begin.kind not in ("beginning", "end"):
        raise typer.BadParameter(
            "in a group -o is beginning or end; `rayq group seek` sets a group's positions"
        )
    numbers = None if partitions is None else partition_numbers(partitions)
    given = [] if isolation_level is None else [f"isolation_level={isolation_level}"]
    options = config_values(ConsumerConfig, [*given, *(config or ())])
    printer = Printer(formatter(template, null=NULL if show_null else b""), count)
    with connected(cluster, topics=topics) as connection:
        output.hush()
        with output.patience(lambda: _without_leader(connection, topics, numbers)):
            if group is not None:
                _as_member(connection, topics, group, begin, options, exit_at_end, printer)
            else:
                wanted = _partitions(connection, topics, numbers)
                _alone(connection, wanted, begin, options, exit_at_end, printer)


class Printer:
    """Writes records to stdout, each poll's at once, up to a number of them."""

    def __init__(self, format_records: Formatter, count: int | None) -> None:
        self._format = format_records
        self._count = count
        self.printed = 0
        self._pipe = Pipe(sys.stdout.fileno())

    @property
    def is_done(self) -> bool:
        return self._count is not None and self.printed >= self._count

    @property
    def records_max(self) -> int:
        left = POLL_RECORDS_MAX if self._count is None else self._count - self.printed
        return max(1, min(POLL_RECORDS_MAX, left))

    def print(self, records: list[Record]) -> None:
        """Prints records. Raises BrokenPipeError, even without records: the program that read the
        output may have ended meanwhile."""
        if not records:
            self._pipe.check_reader()
            return
        self._pipe.write(self._format(records))
        self.printed += len(records)

    @property
    def is_taken(self) -> bool:
        """Returns whether the program that reads the output has all of it, as far as can be told.
        """
        return self._pipe.is_taken

    def wait_taken(self) -> None:
        """Waits until the program that reads the output has it, before anybody is told that it was
        printed. Raises BrokenPipeError where the program ended before."""
        self._pipe.wait_taken()


def _partitions(
    cluster: Cluster, topics: Iterable[str], numbers: list[int] | None
) -> list[TopicPartition]:
    """The partitions to read. Raises UnknownTopicError, InvalidRequestError."""
    client, background = cluster.shared_client()
    wanted = []
    for name in dict.fromkeys(topics):
        topic = background.run(client.topic(name, timeout_s=TOPIC_TIMEOUT_S))
        some = range(len(topic.partitions)) if numbers is None else numbers
        for number in some:
            check_partition(topic, number)
            wanted.append(TopicPartition(name, number))
    return list(dict.fromkeys(wanted))


def _without_leader(
    cluster: Cluster, topics: Iterable[str], numbers: list[int] | None
) -> str | None:
    """For `output.patience`."""
    client, _ = cluster.shared_client()
    known = [topic for name in topics if (topic := client.metadata.topics.get(name)) is not None]
    found = [
        f"{topic.name}-{partition.partition}"
        for topic in known
        for partition in topic.partitions
        if partition.leader is None and (numbers is None or partition.partition in numbers)
    ]
    if not found:
        return None
    return f"Waiting for a leader of {', '.join(found)}. `rayq cluster health` says what is wrong."


# --- without a group ------------------------------------------------------------------------------


def _alone(
    cluster: Cluster,
    wanted: list[TopicPartition],
    begin: Where,
    options: dict[str, Any],
    exit_at_end: bool,
    printer: Printer,
) -> None:
    with cluster.consumer(**{"auto_offset_reset": "earliest", **options}) as consumer:
        ends = consumer.end_offsets(wanted)
        first = consumer.beginning_offsets(wanted)
        consumer.assign(wanted)
        if begin.kind == "last":
            consumer.seek_to_last(begin.number)
            starts = {place: consumer.position(place) for place in wanted}
        else:
            starts = _starts(consumer, begin, first, ends)
            for place in wanted:
                consumer.seek(place, starts[place])
        total = sum(ends[place] - starts[place] for place in wanted) if exit_at_end else None
        with output.progress(
            "consuming", total, wanted=total is not None and not sys.stdout.isatty()
        ) as advance:
            for records in _polls(consumer, exit_at_end, printer):
                printer.print(records)
                advance(printer.printed)


def _polls(consumer: Consumer, exit_at_end: bool, printer: Printer) -> Iterator[list[Record]]:
    """Yields batches of records to print; [] now and then while there are none."""
    until = consumer.begin_until_end(END_TIMEOUT_S) if exit_at_end else None
    while not printer.is_done:
        if until is None:
            yield consumer.poll(POLL_S, printer.records_max)
        elif records := consumer.poll_until(until, printer.records_max):
            yield records
        else:
            return


def _starts(
    consumer: Consumer,
    begin: Where,
    first: dict[TopicPartition, int],
    ends: dict[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """The start offset of each partition, inside its log as it is now."""
    if begin.kind == "beginning":
        return first
    if begin.kind == "end":
        return ends
    if begin.kind == "time":
        found = consumer.offsets_for_times(dict.fromkeys(first, begin.number))
        return {place: ends[place] if at is None else at for place, at in found.items()}
    for place, at in first.items():
        if begin.number < at:
            output.note(f"{place.topic}-{place.partition} begins at {at}: reading from there.")
        elif begin.number > ends[place]:
            name = f"{place.topic}-{place.partition}"
            output.note(f"{name} ends at {ends[place]}: reading from there.")
    return {place: min(max(first[place], begin.number), ends[place]) for place in first}


# --- in a group -----------------------------------------------------------------------------------


def _as_member(
    cluster: Cluster,
    topics: list[str],
    group: str,
    begin: Where,
    options: dict[str, Any],
    exit_at_end: bool,
    printer: Printer,
) -> None:
    reset = "earliest" if begin.kind == "beginning" else "latest"
    options = {"auto_offset_reset": reset, **options}
    # What was printed is committed once the next program of a pipe has it. All else comes again.
    with cluster.consumer(*topics, group=group, **options) as consumer:
        has_printed = False
        for records in _polls(consumer, exit_at_end, printer):
            printer.print(records)
            has_printed = has_printed or bool(records)
            if has_printed and printer.is_taken:
                consumer.commit()
                has_printed = False
        if has_printed:
            printer.wait_taken()
            consumer.commit()

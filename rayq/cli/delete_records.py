"""`rayq topic delete-records`: deletes the oldest records of a topic, up to a given position."""

from __future__ import annotations

from typing import Annotated

import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, DryRun, Json, TopicName
from rayq.cli.values import Where, partition_numbers, where
from rayq.client.cluster import Cluster
from rayq.errors import OffsetOutOfRangeError, UnknownTopicError
from rayq.records import TopicPartition


def delete_records(
    topic: TopicName,
    before: Annotated[
        str,
        typer.Option(
            "--before",
            metavar="WHERE",
            help="Delete the records before: an offset, @TIME, end (all records), or -N (all but "
            "the last N of each partition).",
            show_default=False,
        ),
    ],
    partitions: Annotated[
        str | None, typer.Option("-p", "--partitions", help="Only these partitions: 0,2 or 0-3.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Delete the oldest records of a topic permanently."""
    check_can_ask(yes or dry_run)
    goal = where(before, output.now_ms())
    chosen = None if partitions is None else partition_numbers(partitions)
    with connected(cluster, topics=[topic]) as connection:
        places = _places(connection, topic, chosen)
        starts, new_starts = _new_starts(connection, places, goal)
        gone = sum(new_starts[place] - starts[place] for place in places)
        if not dry_run:
            agree(
                f"Delete {output.counted(gone, 'record')} of {topic}, in "
                f"{output.counted(len(places), 'partition')}?",
                yes,
            )
            new_starts = connection.admin.delete_records(new_starts)
    rows = [
        (place.partition, starts[place], new_starts[place], new_starts[place] - starts[place])
        for place in places
    ]
    if json:
        names = ("partition", "start_before", "start", "deleted")
        output.print_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    output.table(("partition", "start before", "start", "deleted"), rows)
    if dry_run:
        output.say("Nothing was deleted: run it without --dry-run to delete.")


def _places(cluster: Cluster, topic: str, chosen: list[int] | None) -> list[TopicPartition]:
    known = [info.partition for info in cluster.admin.describe_topic(topic).partitions]
    unknown = sorted(set(chosen or ()) - set(known))
    if unknown:
        raise UnknownTopicError(f"Topic {topic!r} has no partition {unknown[0]}.")
    return [TopicPartition(topic, number) for number in known if chosen is None or number in chosen]


def _new_starts(
    cluster: Cluster, places: list[TopicPartition], goal: Where
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """The present and the new start of each log. Raises OffsetOutOfRangeError before anything is
    deleted."""
    with cluster.consumer() as consumer:
        starts, ends = consumer.beginning_offsets(places), consumer.end_offsets(places)
        match goal.kind:
            case "beginning":
                wanted = starts
            case "end":
                wanted = ends
            case "offset":
                wanted = dict.fromkeys(places, goal.number)
            case "last":
                wanted = {place: ends[place] - goal.number for place in places}
            case "time":
                found = consumer.offsets_for_times(dict.fromkeys(places, goal.number))
                # Where no record is at or after that time, all records are older.
                wanted = {
                    place: ends[place] if offset is None else offset
                    for place, offset in found.items()
                }
    for place in places:
        if wanted[place] > ends[place]:
            raise OffsetOutOfRangeError(
                f"Offset {wanted[place]} is past the end of {place.topic}-{place.partition}, "
                f"{ends[place]}: nothing was deleted. Choose partitions with -p, or say end."
            )
    return starts, {place: max(wanted[place], starts[place]) for place in places}

"""`rayq storage`: status, verify-remote, pins and unpin."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask, one_by_one
from rayq.cli.current import connected
from rayq.cli.exit_codes import UNHEALTHY
from rayq.cli.options import (
    COMPLETION_TIMEOUT_S,
    ClusterAddress,
    Json,
    TopicName,
    complete_topic,
    offered,
    quickly,
)
from rayq.cli.values import partition_numbers
from rayq.errors import RayqError
from rayq.records import ObjectStoreInfo, RemotePartitionInfo, RemoteVerification


def _complete_pin(ctx: typer.Context, incomplete: str) -> list[str]:
    with contextlib.suppress(RayqError, OSError), quickly(ctx) as cluster:
        found = cluster.admin.describe_object_store(timeout_s=COMPLETION_TIMEOUT_S)
        return offered([pin.pin_id for pin in found.pins], incomplete)
    return []


def status(
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC",
            help="Topics. Default: all with remote_storage.",
            autocompletion=complete_topic,
        ),
    ] = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Show the object store, and up to which offset each partition is stored in it."""
    with connected(cluster, topics=topics or ()) as connection:
        store = connection.admin.describe_object_store()
        found = connection.admin.describe_remote_storage(topics)
    if json:
        output.print_json(
            {**msgspec.to_builtins(store), "partitions": [_as_json(info) for info in found]}
        )
        return
    _show_store(store)
    if found:
        output.say()
        _show_partitions(found)


def _show_store(store: ObjectStoreInfo) -> None:
    if store.url is None:
        output.say("This cluster has no object store: `rayq start` takes remote_storage_url.")
        return
    output.heading(f"Object store {store.url}")
    for broker, trouble in sorted(store.troubles.items()):
        output.verdict(f"Broker {broker} does not reach it: {trouble}", "error")
    output.say(
        f"{output.counted(len(store.pins), 'pin')}; "
        f"{output.counted(len(store.garbage), 'deleted topic')} with objects to be removed"
    )


def _show_partitions(found: list[RemotePartitionInfo]) -> None:
    output.table(
        (
            "topic",
            "partition",
            "start",
            "local start",
            "remote end",
            "end",
            "remote size",
            "waiting",
            "for s",
            "trouble",
        ),
        [
            (
                *info.topic_partition,
                info.log_start_offset,
                info.local_start_offset,
                info.remote_end_offset,
                info.high_watermark,
                output.human_size(info.remote_bytes),
                output.human_size(info.lag_bytes),
                None if info.lag_ms is None else info.lag_ms // 1000,
                info.trouble,
            )
            for info in found
        ],
        styles=["ok" if info.trouble is None else "warning" for info in found],
        optional=("start", "for s", "local start"),
    )


def _as_json(info: RemotePartitionInfo | RemoteVerification) -> dict[str, Any]:
    fields = msgspec.to_builtins(info)
    del fields["topic_partition"]
    return {**info.topic_partition._asdict(), **fields}


def verify_remote(
    topic: TopicName,
    partitions: Annotated[
        str | None, typer.Option("-p", "--partitions", help="Only these partitions: 0,2 or 0-3.")
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Read every object and check its whole content, not only its size."
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Store wrong or missing objects again if the leader's disk has the records.",
        ),
    ] = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Check that the objects of a topic are in the object store; exit 3 if one is not."""
    chosen = None if partitions is None else partition_numbers(partitions)
    with (
        connected(cluster, topics=[topic]) as connection,
        output.waiting(f"Checking the objects of {topic}"),
    ):
        found = connection.admin.verify_remote(topic, chosen, deep=deep, repair=repair)
    wrong = [
        (
            info.topic_partition.partition,
            problem.object,
            problem.start_offset,
            problem.end_offset,
            problem.what,
            problem.object in info.repaired,
        )
        for info in found
        for problem in info.problems
    ]
    if json:
        output.print_json([_as_json(info) for info in found])
    else:
        checked = sum(info.checked_objects for info in found)
        repaired = sum(is_repaired for *_, is_repaired in wrong)
        if wrong:
            output.table(
                ("partition", "object", "start", "end", "what is wrong", "repaired"), wrong
            )
        output.say(
            f"{output.counted(checked, 'object')} of {topic}: {len(wrong)} wrong"
            + (f", of which {repaired} repaired." if repair else ".")
        )
    if any(not is_repaired for *_, is_repaired in wrong):
        raise typer.Exit(UNHEALTHY)


def pins(json: Json = False, cluster: ClusterAddress = None) -> None:
    """List the pins that hold retention back: batch jobs that read, and restored topics."""
    with connected(cluster) as connection:
        found = connection.admin.describe_object_store().pins
    if json:
        output.print_json(msgspec.to_builtins(found))
        return
    output.table(
        ("pin", "topic", "partitions", "ends after s, unless renewed"),
        [(pin.pin_id, pin.topic, len(pin.starts), pin.ttl_ms // 1000) for pin in found],
    )


def unpin(
    pin_ids: Annotated[
        list[str], typer.Argument(metavar="PIN", autocompletion=_complete_pin)
    ],
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """End pins, so that retention continues."""
    check_can_ask(yes)
    with connected(cluster) as connection:
        agree(f"End {', '.join(pin_ids)}? A job that still reads may find records gone.", yes)
        one_by_one(list(pin_ids), connection.admin.unpin, "Ended pin", json)
    if json:
        output.print_json({"unpinned": pin_ids})

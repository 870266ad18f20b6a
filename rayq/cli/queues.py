"""`rayq queue`: create, list, describe, alter, delete, peek, purge; others have own files."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.alter import DeletedKeys, SetKeys, changes_of, tell_changes
from rayq.cli.confirm import Yes, agree, check_can_ask, one_by_one
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Json, Limit, QueueName, QueueNames, complete_topic
from rayq.cli.values import config_values
from rayq.config import QueueConfig, as_dict
from rayq.core.cluster.queue_changes import DEAD
from rayq.errors import QueueExistsError
from rayq.records import QueueInfo, QueueRecordInfo

PEEKED = 100
UNSETTLED = ("ready", "blocked", "locked", "delayed", "moving")


def create(
    queues: QueueNames,
    topic: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--topic",
            help="Read this existing topic. Default: the queue gets a topic of its own.",
            autocompletion=complete_topic,
            show_default=False,
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            "-p", "--partitions", help="Partitions of its own topic.", show_default="1", min=1
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "-r",
            "--replicas",
            "--replication-factor",
            help="Replicas of each partition of its own topic.",
            min=1,
            show_default="3, or as many as there are brokers",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "-c",
            "--config",
            metavar="KEY=VALUE",
            help="Set a config of the queue, such as visibility_timeout_s=1m; may be repeated.",
        ),
    ] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Do not fail if the queue exists.")
    ] = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Create queues, each with its topic unless --topic names one, and with its dead letters."""
    if topic is not None and (partitions, replicas) != (None, None):
        raise typer.BadParameter("--partitions and --replicas are for a topic of the queue's own")
    values = config_values(QueueConfig, config or ())
    made = []
    with connected(cluster, topics=[] if topic is None else [topic]) as connection:
        for name in queues:
            try:
                connection.admin.create_queue(
                    name,
                    topic=topic,
                    partitions=1 if partitions is None else partitions,
                    replication_factor=replicas,
                    **values,
                )
                is_new = True
            except QueueExistsError:
                if not if_not_exists:
                    raise
                is_new = False
            made.append({"queue": name, "created": is_new})
            if not json:
                output.say(
                    f"Created queue {name}." if is_new else f"Queue {name} exists already."
                )
    if json:
        output.print_json(made)


def list_queues(
    dead_letters: Annotated[
        bool, typer.Option("-a", "--all", help="Include the queues of dead letters.")
    ] = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """List the queues."""
    with connected(cluster) as connection:
        infos = connection.admin.describe_queues()
    by_name = {info.name: info for info in infos}
    rows = [
        _overview(info, by_name.get(info.name + DEAD))
        for info in infos
        if dead_letters or not info.name.endswith(DEAD)
    ]
    if json:
        output.print_json(rows)
        return
    output.table(
        ("queue", "topic", "partitions", "ready", "locked", "delayed", "dead letters", "trouble"),
        [tuple(row.values()) for row in rows],
        styles=["ok" if row["trouble"] is None else "warning" for row in rows],
        optional=("partitions", "topic"),
    )


def _overview(info: QueueInfo, dead: QueueInfo | None) -> dict[str, Any]:
    return {
        "queue": info.name,
        "topic": info.topic,
        "partitions": len(info.partitions),
        "ready": _sum(info, "ready"),
        "locked": _sum(info, "locked"),
        "delayed": _sum(info, "delayed"),
        "dead_letters": None if dead is None else _unsettled(dead),
        "trouble": next(
            (partition.trouble for partition in info.partitions if partition.trouble), None
        ),
    }


def _sum(info: QueueInfo, field: str) -> int:
    """Sums over the partitions whose leaders answered."""
    return sum(getattr(partition, field) or 0 for partition in info.partitions)


def _unsettled(info: QueueInfo) -> int:
    return sum(_sum(info, state) for state in UNSETTLED)


def describe(queues: QueueNames, json: Json = False, cluster: ClusterAddress = None) -> None:
    """Show the state of a queue in each partition, and its config."""
    with connected(cluster, queues=queues) as connection:
        infos = [connection.admin.describe_queue(name) for name in queues]
    if json:
        output.print_json_of(queues, [msgspec.to_builtins(info) for info in infos])
        return
    for number, info in enumerate(infos):
        if number:
            output.say()
        _show(info)


def _show(info: QueueInfo) -> None:
    output.heading(f"{info.name}: reads topic {info.topic}")
    output.table(
        (
            "partition",
            "start",
            "end",
            "ready",
            "blocked",
            "locked",
            "delayed",
            "moving",
            "oldest s",
            "next due s",
            "takes",
            "dead",
            "expired",
        ),
        [
            (
                partition.partition,
                partition.start_offset,
                partition.end_offset,
                partition.ready,
                partition.blocked,
                partition.locked,
                partition.delayed,
                partition.moving,
                _seconds(partition.oldest_ready_ms),
                _seconds(partition.next_due_ms),
                partition.waiting_takes,
                partition.dead,
                partition.expired,
            )
            for partition in info.partitions
        ],
        styles=["ok" if partition.trouble is None else "warning" for partition in info.partitions],
        optional=("takes", "expired", "dead", "blocked", "next due s", "start", "end", "oldest s"),
    )
    for partition in info.partitions:
        if partition.trouble:
            output.say(f"Partition {partition.partition}: {partition.trouble}", hang=2)
    output.say()
    output.config_table(info.config, as_dict(QueueConfig()), "queue")


def _seconds(milliseconds: int | None) -> int | None:
    return None if milliseconds is None else milliseconds // 1000


def alter(
    queue: QueueName,
    config: SetKeys = None,
    delete: DeletedKeys = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Change the config of a queue."""
    changes = changes_of(QueueConfig, config, delete)
    with connected(cluster, queues=[queue]) as connection:
        connection.admin.alter_queue(queue, **changes)
    tell_changes("queue", queue, changes, json)


def delete(
    queues: QueueNames, yes: Yes = False, json: Json = False, cluster: ClusterAddress = None
) -> None:
    """Delete queues and their settled state. Their topics and dead letters stay."""
    check_can_ask(yes)
    left = list(queues)
    with connected(cluster, queues=left) as connection:
        agree(f"Forget {', '.join(queues)} and what is settled there?", yes)
        one_by_one(left, connection.admin.delete_queue, "Deleted queue", json)
    if json:
        output.print_json({"deleted": queues})


def peek(
    queue: QueueName,
    in_flight: Annotated[
        bool, typer.Option("--in-flight", help="Only records that consumers hold.")
    ] = False,
    delayed: Annotated[
        bool, typer.Option("--delayed", help="Only records that wait for their delivery time.")
    ] = False,
    limit: Limit = PEEKED,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Show the records of a queue that are not settled, and their holders. Nothing is taken."""
    states = [*(["locked"] if in_flight else []), *(["delayed"] if delayed else [])]
    with connected(cluster, queues=[queue]) as connection:
        found = connection.admin.list_queue_records(queue, states=states, limit=limit)
    if json:
        output.print_json([_as_json(record) for record in found])
        return
    if not found:
        output.say("There are none.")
        return
    now_ms = output.now_ms()
    output.table(
        ("partition", "offset", "state", "deliveries", "for s", "holder"),
        [
            (
                record.topic_partition.partition,
                record.offset,
                record.state,
                record.count,
                _left_s(record, now_ms),
                record.holder,
            )
            for record in found
        ],
        optional=("holder",),
    )
    if len(found) == limit:
        output.say(f"There may be more than {limit}: --limit shows them.")


def _left_s(record: QueueRecordInfo, now_ms: int) -> int | None:
    if record.due_ms is None:
        return None
    left_ms = record.due_ms if record.state == "locked" else record.due_ms - now_ms
    return max(0, left_ms) // 1000


def _as_json(record: QueueRecordInfo) -> dict[str, Any]:
    fields = msgspec.to_builtins(record)
    del fields["topic_partition"]
    return {**record.topic_partition._asdict(), **fields}


def purge(
    queue: QueueName, yes: Yes = False, json: Json = False, cluster: ClusterAddress = None
) -> None:
    """Settle all records that no consumer holds, so that they are not delivered. They stay in the
    topic."""
    check_can_ask(yes)
    with connected(cluster, queues=[queue]) as connection:
        if not yes:
            waiting = _unsettled(connection.admin.describe_queue(queue))
            agree(f"Settle all of {queue} that no consumer holds (of {waiting:,} records)?", yes)
        purged = connection.admin.purge_queue(queue)
    if json:
        output.print_json({"queue": queue, "purged": purged})
    else:
        output.say(f"{output.counted(purged, 'record')} of {queue} settled.")

"""`rayq topic`: create, list, describe, alter, delete and add-partitions; others have own files."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.alter import DeletedKeys, SetKeys, changes_of, tell_changes
from rayq.cli.cluster_snapshot import topics_of
from rayq.cli.confirm import Yes, agree, check_can_ask, one_by_one
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Internal, Json, TopicName, TopicNames
from rayq.cli.values import config_values
from rayq.client.admin.health import min_insync_of, partition_state
from rayq.config import TopicConfig, as_dict
from rayq.errors import TopicExistsError
from rayq.records import TopicInfo

Configs = Annotated[
    list[str] | None,
    typer.Option(
        "-c",
        "--config",
        "--topic-config",
        metavar="KEY=VALUE",
        help="Set a config of the topic, such as retention_ms=7d; may be repeated.",
    ),
]


def create(
    topics: TopicNames,
    partitions: Annotated[
        int, typer.Option("-p", "--partitions", help="Number of partitions.", min=1)
    ] = 1,
    replicas: Annotated[
        int | None,
        typer.Option(
            "-r",
            "--replicas",
            "--replication-factor",
            help="Replicas of each partition.",
            min=1,
            show_default="3, or as many as there are brokers",
        ),
    ] = None,
    config: Configs = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Do not fail if the topic exists.")
    ] = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Create topics; returns when every partition has a leader and all its replicas in sync."""
    values = config_values(TopicConfig, config or ())
    made = []
    with connected(cluster) as connection:
        for name in topics:
            try:
                connection.create_topic(name, partitions, replicas, **values)
                is_new = True
            except TopicExistsError:
                if not if_not_exists:
                    raise
                is_new = False
            made.append({"topic": name, "created": is_new})
            if not json:
                output.say(
                    f"Created topic {name}: {output.counted(partitions, 'partition')}."
                    if is_new
                    else f"Topic {name} exists already."
                )
    if json:
        output.print_json(made)


def list_topics(
    internal: Internal = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """List the topics.

    Records are counted by their offsets, so chunks of large values, transaction markers and records
    that compaction has removed count, too.
    """
    with connected(cluster) as connection:
        infos = topics_of(connection, internal=internal)
    rows = [_overview(info) for info in infos]
    if json:
        output.print_json(rows)
        return
    output.table(
        ("topic", "partitions", "replicas", "records", "size", "state"),
        [
            (
                row["topic"],
                row["partitions"],
                row["replicas"],
                row["records"],
                output.human_size(row["size_bytes"]),
                row["state"],
            )
            for row in rows
        ],
        styles=["ok" if row["state"] == "in sync" else "warning" for row in rows],
        optional=("size", "replicas"),
    )


def _overview(topic: TopicInfo) -> dict[str, Any]:
    states = [
        partition_state(partition, min_insync_of(topic, partition))
        for partition in topic.partitions
    ]
    order = ("offline", "under min ISR", "under-replicated", "in sync")
    records = size = 0
    for partition in topic.partitions:
        leader = next((r for r in partition.replicas if r.broker == partition.leader), None)
        if leader is not None and leader.high_watermark is not None:
            records += leader.high_watermark - (leader.log_start_offset or 0)
        size += sum(replica.size_bytes or 0 for replica in partition.replicas)
    return {
        "topic": topic.name,
        "partitions": len(topic.partitions),
        "replicas": max((len(partition.replicas) for partition in topic.partitions), default=0),
        "records": records,
        "size_bytes": size,
        "remote_bytes": sum(partition.remote_bytes for partition in topic.partitions),
        "state": min(states, key=order.index, default="in sync"),
    }


def describe(
    topics: TopicNames,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Show partitions, leaders, replicas, offsets and the config of topics."""
    with connected(cluster, topics=topics) as connection:
        infos = [connection.admin.describe_topic(name) for name in topics]
    if json:
        output.print_json_of(topics, [msgspec.to_builtins(info) for info in infos])
        return
    for number, info in enumerate(infos):
        if number:
            output.say()
        _show(info)


def _show(topic: TopicInfo) -> None:
    output.heading(f"{topic.name} ({topic.topic_id})")
    rows, styles = [], []
    for partition in topic.partitions:
        leader = next((r for r in partition.replicas if r.broker == partition.leader), None)
        state = partition_state(partition, min_insync_of(topic, partition))
        rows.append(
            (
                partition.partition,
                partition.leader,
                partition.leader_epoch,
                output.numbers(replica.broker for replica in partition.replicas),
                output.numbers(partition.isr),
                None if leader is None else leader.log_start_offset,
                None if leader is None else leader.high_watermark,
                output.human_size(None if leader is None else leader.size_bytes),
                f"moving to {output.numbers(partition.target)}" if partition.target else state,
            )
        )
        styles.append("ok" if state == "in sync" else "warning")
    output.table(
        ("partition", "leader", "epoch", "replicas", "isr", "start", "end", "size", "state"),
        rows,
        styles=styles,
        optional=("epoch", "size"),
    )
    for partition in topic.partitions:
        if partition.offline_reason:
            output.say(f"Partition {partition.partition} is offline: {partition.offline_reason}")
    if remote_bytes := sum(partition.remote_bytes for partition in topic.partitions):
        output.say(
            f"{output.human_size(remote_bytes)} of it are in the object store: rayq storage status "
            f"{topic.name}"
        )
    output.say()
    output.config_table(topic.config, as_dict(TopicConfig()), "topic")


def alter(
    topic: TopicName,
    config: SetKeys = None,
    delete: DeletedKeys = None,
    delete_remote: Annotated[
        bool,
        typer.Option(
            "--delete-remote",
            help="With remote_storage=false: delete the topic's objects. Records that are no "
            "longer on a broker's disk are lost.",
        ),
    ] = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Change the config of a topic."""
    check_can_ask(yes or not delete_remote)
    changes = changes_of(TopicConfig, config, delete)
    with connected(cluster, topics=[topic]) as connection:
        agree(
            f"Remove what the object store has of {topic}? Records that are on no broker's disk "
            "any more are gone.",
            yes or not delete_remote,
        )
        connection.admin.alter_topic_config(topic, delete_remote=delete_remote, **changes)
    tell_changes("topic", topic, changes, json)


def delete(
    topics: TopicNames, yes: Yes = False, json: Json = False, cluster: ClusterAddress = None
) -> None:
    """Delete topics and their records."""
    check_can_ask(yes)
    left = list(topics)
    with connected(cluster, topics=left) as connection:
        agree(f"Delete {', '.join(topics)} with all records?", yes)
        one_by_one(left, connection.admin.delete_topic, "Deleted topic", json)
    if json:
        output.print_json({"deleted": topics})


def add_partitions(
    topic: TopicName,
    num: Annotated[
        int | None,
        typer.Option("-n", "--num", help="Number of partitions to add.", show_default=False, min=1),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            "-p", "--partitions", help="Total number of partitions.", show_default=False, min=1
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Do it even if a queue needs the order of keys.")
    ] = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Add partitions to a topic. Records with a key may go to other partitions from then on."""
    if (num is None) == (partitions is None):
        raise typer.BadParameter("give one of --num (how many more) and --partitions (in all)")
    with connected(cluster, topics=[topic]) as connection:
        before = len(connection.admin.describe_topic(topic).partitions)
        total = partitions if partitions is not None else before + (num or 0)
        connection.admin.create_partitions(topic, total, force=force)
    if json:
        output.print_json({"topic": topic, "before": before, "partitions": total})
    else:
        output.say(f"{topic} has {total} partitions now, {before} before.")

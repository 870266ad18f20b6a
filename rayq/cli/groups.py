"""`rayq group`: list, describe, seek, delete."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, YesOrExecute, agree, check_can_ask, one_by_one
from rayq.cli.current import connected
from rayq.cli.options import (
    ClusterAddress,
    DryRun,
    GroupName,
    GroupNames,
    Json,
    complete_topic,
)
from rayq.cli.values import topic_partition, where
from rayq.client.cluster import Cluster
from rayq.errors import InvalidRequestError, UnknownGroupError
from rayq.records import GroupInfo, TopicPartition


def list_groups(json: Json = False, cluster: ClusterAddress = None) -> None:
    """List the groups with their state, members and lag."""
    with connected(cluster) as connection:
        groups = describe_all(connection)
    if json:
        output.print_json([_overview(group) for group in groups])
        return
    output.table(
        ("group", "state", "members", "partitions", "lag"),
        [
            (group.group, group.state, len(group.members), len(group.partitions), group.lag)
            for group in groups
        ],
    )


def describe_all(cluster: Cluster) -> list[GroupInfo]:
    """Describes all groups. A group that is deleted meanwhile is left out."""
    infos = []
    for listing in cluster.admin.list_groups():
        try:
            infos.append(cluster.admin.describe_group(listing.group))
        except UnknownGroupError:
            continue
    return infos


def _overview(group: GroupInfo) -> dict[str, Any]:
    return {
        "group": group.group,
        "state": group.state,
        "members": len(group.members),
        "partitions": len(group.partitions),
        "lag": group.lag,
    }


def _as_json(group: GroupInfo) -> dict[str, Any]:
    return {
        **_overview(group),
        "epoch": group.epoch,
        "assignor": group.assignor,
        "members": msgspec.to_builtins(group.members),
        "partitions": [
            {
                "topic": place.topic,
                "partition": place.partition,
                **msgspec.to_builtins(progress),
            }
            for place, progress in group.partitions.items()
        ],
        "rebalance_reason": group.rebalance_reason,
        "rebalance_time_ms": group.rebalance_time_ms,
    }


def describe(groups: GroupNames, json: Json = False, cluster: ClusterAddress = None) -> None:
    """Show the members of a group, their partitions, and the position and lag in every partition.
    """
    with connected(cluster, groups=groups) as connection:
        infos = [connection.admin.describe_group(name) for name in groups]
    if json:
        output.print_json_of(groups, [_as_json(info) for info in infos])
        return
    for number, info in enumerate(infos):
        if number:
            output.say()
        _show(info)


def _show(group: GroupInfo) -> None:
    output.heading(
        f"{group.group}: {group.state}, {output.counted(len(group.members), 'member')}, lag "
        f"{group.lag:,}, assignor {group.assignor}, epoch {group.epoch}"
    )
    output.say(
        f"Last rebalanced at {output.moment(group.rebalance_time_ms)}: {group.rebalance_reason}"
    )
    clients = {member.member: member.client for member in group.members}
    output.say()
    output.table(
        ("topic", "partition", "committed", "end", "lag", "member", "client"),
        [
            (
                place.topic,
                place.partition,
                position.offset,
                position.end_offset,
                position.lag,
                position.member,
                clients.get(position.member or ""),
            )
            for place, position in group.partitions.items()
        ],
        styles=["warning" if position.lag else "ok" for position in group.partitions.values()],
        optional=("client", "member"),
    )
    idle = [member for member in group.members if not member.assigned]
    if idle:
        output.say()
        output.say(
            f"{output.counted(len(idle), 'member has', 'members have')} no partition: "
            + ", ".join(f"{member.member} ({member.client})" for member in idle)
        )


def seek(
    group: GroupName,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="WHERE",
            help="beginning, end, an offset, -N (the last N records), or @TIME.",
            show_default=False,
        ),
    ] = None,
    shift: Annotated[
        int | None,
        typer.Option(
            "--shift",
            help="Move by this many records from the committed position; negative: back.",
        ),
    ] = None,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "-t",
            "--topic",
            "--topics",
            metavar="TOPIC[/PARTITION]",
            help="Only this topic; may be repeated. Default: all with committed offsets.",
            autocompletion=complete_topic,
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: YesOrExecute = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Set the positions of a group without members."""
    if (to is None) == (shift is None):
        raise typer.BadParameter("give one of --to and --shift")
    check_can_ask(yes or dry_run)
    how: dict[str, Any] = {"shift": shift} if to is None else _target(to)
    chosen = [topic_partition(topic) if "/" in topic else topic for topic in topics or ()] or None
    named = [number if isinstance(number, str) else number.topic for number in chosen or ()]
    with connected(cluster, topics=named) as connection:
        before = _committed(connection, group)
        if "last" in how:
            how = {"to": _before_the_end(connection, how["last"], chosen, before)}
            chosen = None
        after = connection.admin.set_group_offsets(group, chosen, dry_run=dry_run or not yes, **how)
        if not after:
            raise InvalidRequestError(
                f"Group {group!r} has committed nothing: name the topics with --topic."
            )
        rows = [(*place, before.get(place), offset) for place, offset in sorted(after.items())]
        if not json:
            output.table(("topic", "partition", "before", "after"), rows)
        if not (yes or dry_run):
            agree(f"Set the positions of group {group} so?", yes)
            connection.admin.set_group_offsets(group, to=after)
    if json:
        names = ("topic", "partition", "before", "after")
        output.print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif dry_run:
        output.say("Nothing was changed: run it without --dry-run to change it.")


def _target(text: str) -> dict[str, Any]:
    place = where(text, output.now_ms())
    match place.kind:
        case "beginning":
            return {"to": "earliest"}
        case "end":
            return {"to": "latest"}
        case "offset":
            return {"to": place.number}
        case "time":
            return {"timestamp_ms": place.number}
        case "last":
            return {"last": place.number}


def _committed(cluster: Cluster, group: str) -> dict[TopicPartition, int | None]:
    """The committed offsets. None for a group that does not exist: setting its offsets creates it.
    """
    try:
        found = cluster.admin.describe_group(group)
    except UnknownGroupError:
        return {}
    return {place: position.offset for place, position in found.partitions.items()}


def _before_the_end(
    cluster: Cluster,
    count: int,
    chosen: list[str | TopicPartition] | None,
    committed: dict[TopicPartition, int | None],
) -> dict[TopicPartition, int]:
    places: list[TopicPartition] = []
    for position in committed if chosen is None else chosen:
        if isinstance(position, TopicPartition):
            places.append(position)
        else:
            info = cluster.admin.describe_topic(position)
            places += [TopicPartition(position, each.partition) for each in info.partitions]
    with cluster.consumer() as consumer:
        consumer.assign(places)
        consumer.seek_to_last(count)
        return {place: consumer.position(place) for place in places}


def delete(
    groups: GroupNames, yes: Yes = False, json: Json = False, cluster: ClusterAddress = None
) -> None:
    """Delete groups without members, and their offsets."""
    check_can_ask(yes)
    left = list(groups)
    with connected(cluster, groups=left) as connection:
        agree(f"Forget {', '.join(groups)} and how far each has read?", yes)
        one_by_one(left, connection.admin.delete_group, "Deleted group", json)
    if json:
        output.print_json({"deleted": groups})

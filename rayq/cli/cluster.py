"""`rayq cluster`: info, health, elect-leaders, and moving partitions."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from rayq.cli import output
from rayq.cli.cluster_snapshot import snapshot_of, troubles_of
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.exit_codes import UNHEALTHY
from rayq.cli.options import ClusterAddress, Json, complete_topic
from rayq.cli.serve_metrics import MetricsServer
from rayq.cli.values import partition_numbers
from rayq.client.admin.health import Problem, is_healthy
from rayq.errors import NoClusterError, TimeoutError


def info(json: Json = False, cluster: ClusterAddress = None) -> None:
    """Show the brokers, the controller and the voters."""
    with connected(cluster) as connection:
        found = connection.admin.describe_cluster()
        troubles = troubles_of(connection, found)
    if json:
        output.print_json({**msgspec.to_builtins(found), "troubles": troubles})
        return
    output.say(f"Cluster {found.cluster_id}")
    output.say(f"Controller {found.controller or 'none'}, epoch {found.controller_epoch}")
    output.say(f"Voters {output.numbers(found.voters)}")
    output.table(
        ("broker", "host", "port", "node", "state"),
        [
            (
                broker.broker,
                broker.host,
                broker.port,
                broker.node_id[:12] or None,
                ("live" if broker.live else "down") + (", cordoned" if broker.cordoned else ""),
            )
            for broker in found.brokers
        ],
        styles=["ok" if broker.live else "warning" for broker in found.brokers],
        optional=("node",),
    )
    for broker, trouble in sorted(troubles.items()):
        output.verdict(f"Broker {broker} cannot use its disk: {trouble}.", "warning")
        output.say(f"Where it is lost: rayq cluster replace-disk {broker}")


def health(json: Json = False, cluster: ClusterAddress = None) -> None:
    """Check the health of the cluster; if it is not healthy, exit 3 with the reasons and what to
    run next."""
    try:
        with connected(cluster) as connection:
            found = snapshot_of(connection)
        problems = found.problems()
    except (NoClusterError, TimeoutError) as error:
        problems = [Problem("error", "The cluster is down", str(error), "rayq start DIR")]
    healthy = is_healthy(problems)
    if json:
        output.print_json({"healthy": healthy, "problems": msgspec.to_builtins(problems)})
    else:
        for problem in problems:
            output.verdict(f"{problem.severity}: {problem.what}", problem.severity)
            output.say(f"  why:  {problem.why}", hang=6)
            output.say(f"  next: {problem.next_command}", hang=6)
        if healthy:
            output.verdict("Healthy.", "ok")
    if not healthy:
        raise typer.Exit(UNHEALTHY)


def elect_leaders(
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC", help="Topics. Default: all.", autocompletion=complete_topic
        ),
    ] = None,
    partitions: Annotated[
        str | None, typer.Option("-p", "--partitions", help="Only these partitions: 0,2 or 0-3.")
    ] = None,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean",
            help="Elect any live replica of a partition without a leader. Acknowledged records may "
            "be lost.",
        ),
    ] = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Elect the first replica of each partition as leader if it is in sync."""
    if partitions is not None and len(topics or ()) != 1:
        raise typer.BadParameter("--partitions needs one topic")
    if unclean and not topics:
        raise typer.BadParameter("--unclean needs topic names")
    check_can_ask(yes or not unclean)
    numbers = None if partitions is None else partition_numbers(partitions)
    rows = []
    with connected(cluster, topics=topics or ()) as connection:
        agree(
            f"Let any live replica lead partitions of {', '.join(topics or ())} that have no "
            "leader? Records that were acknowledged may be lost.",
            yes or not unclean,
        )
        for name in topics or connection.admin.list_topics(internal=True):
            before = connection.admin.describe_topic(name)
            connection.admin.elect_leaders(name, numbers, unclean=unclean)
            after = connection.admin.describe_topic(name)
            rows += [  # Partitions may have been added in between.
                (name, now.partition, was.leader, now.leader)
                for was, now in zip(before.partitions, after.partitions, strict=False)
                if was.leader != now.leader
            ]
    head = ("topic", "partition", "leader before", "leader")
    if json:
        names = ("topic", "partition", "before", "leader")
        output.print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif rows:
        output.table(head, rows)
    else:
        output.say("Nothing to change.")


def metrics(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Only metrics whose names contain one of these."),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            "--serve",
            metavar="[HOST:]PORT",
            help="Keep running, and serve the metrics to Prometheus at http://HOST:PORT/metrics. "
            "HOST defaults to 127.0.0.1.",
        ),
    ] = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Print the metrics of every process of the cluster; docs/metrics.md explains them."""
    if serve is not None and (names or json):
        raise typer.BadParameter("--serve serves all figures, in Prometheus's format")
    with connected(cluster) as connection:
        if serve is not None:
            with MetricsServer(connection, serve) as server:
                output.say(f"Serving {server.url} until Ctrl+C.")
                sys.stdout.flush()
                server.serve_forever()
        found = [
            sample
            for sample in connection.metrics()
            if not names or any(name in sample.name for name in names)
        ]
    if json:
        output.print_json(
            [
                dict(zip(sample.__struct_fields__, msgspec.to_builtins(sample), strict=False))
                for sample in found
            ]
        )
        return
    output.table(
        ("name", "labels", "value", "count"),
        [
            (
                sample.name,
                ",".join(f"{key}={value}" for key, value in sample.labels.items()),
                f"{sample.value:g}",
                sample.count,
            )
            for sample in found
        ],
        optional=("count",),
    )

"""Options that many commands share, and shell completion of the names that there are."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from rayq.cli.current import connected
from rayq.client.cluster import Cluster
from rayq.errors import RayqError

COMPLETIONS_MAX = 200
COMPLETION_TIMEOUT_S = 2.0
"""The maximum time that a shell waits after the tab key."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Limit = Annotated[
    int, typer.Option("-n", "--num", "--limit", help="Maximum number of results.", min=1)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
Internal = Annotated[
    bool, typer.Option("-i", "--internal", help="Include rayq's internal topics (__...).")
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="HOST:PORT",
        envvar="RAYQ_CLUSTER",
        help="A broker of the cluster, several separated by commas; its token is in RAYQ_TOKEN. "
        "Default: the cluster started by `rayq start`.",
    ),
]


def quickly(context: typer.Context) -> contextlib.AbstractContextManager[Cluster]:
    return connected(context.params.get("cluster"), COMPLETION_TIMEOUT_S)


def offered(names: list[str], incomplete: str) -> list[str]:
    """The names to offer, without those that a terminal would take for more than a name."""
    names = [name for name in names if name.startswith(incomplete) and name.isprintable()]
    return names[:COMPLETIONS_MAX]


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics to offer. No topics where no cluster answers: a completion must not complain."""
    with contextlib.suppress(RayqError, OSError), quickly(ctx) as cluster:
        names = cluster.admin.list_topics(timeout_s=COMPLETION_TIMEOUT_S)
        return offered(names, incomplete)
    return []


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    with contextlib.suppress(RayqError, OSError), quickly(ctx) as cluster:
        groups = [info.group for info in cluster.admin.list_groups(timeout_s=COMPLETION_TIMEOUT_S)]
        return offered(groups, incomplete)
    return []


def complete_queue(ctx: typer.Context, incomplete: str) -> list[str]:
    with contextlib.suppress(RayqError, OSError), quickly(ctx) as cluster:
        return offered(cluster.admin.list_queues(timeout_s=COMPLETION_TIMEOUT_S), incomplete)
    return []


def complete_principal(ctx: typer.Context, incomplete: str) -> list[str]:
    with contextlib.suppress(RayqError, OSError), quickly(ctx) as cluster:
        names = cluster.admin.list_principals(timeout_s=COMPLETION_TIMEOUT_S)
        return offered(names, incomplete)
    return []


TopicName = Annotated[
    str, typer.Argument(metavar="TOPIC", autocompletion=complete_topic, show_default=False)
]
TopicNames = Annotated[
    list[str], typer.Argument(metavar="TOPIC", autocompletion=complete_topic)
]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", autocompletion=complete_group)]
GroupNames = Annotated[
    list[str], typer.Argument(metavar="GROUP", autocompletion=complete_group)
]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", autocompletion=complete_queue)]
QueueNames = Annotated[
    list[str], typer.Argument(metavar="QUEUE", autocompletion=complete_queue)
]
PrincipalName = Annotated[
    str, typer.Argument(metavar="PRINCIPAL", autocompletion=complete_principal)
]
PrincipalOrAll = Annotated[
    str | None,
    typer.Argument(metavar="[PRINCIPAL]", autocompletion=complete_principal, show_default="all"),
]
PrincipalNames = Annotated[
    list[str], typer.Argument(metavar="PRINCIPAL", autocompletion=complete_principal)
]

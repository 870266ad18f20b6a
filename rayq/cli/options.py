"""Options that many verbs share, and what completes names of topics, groups and queues in a shell.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from rayq.cli.current import connected
from rayq.client.cluster import Cluster
from rayq.errors import RayqError

COMPLETIONS_MAX = 200
COMPLETION_TIMEOUT_S = 2.0
"""How long a shell may wait after the tab key."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Limit = Annotated[
    int, typer.Option("-n", "--num", "--limit", help="At most so many.", min=1)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]
Internal = Annotated[
    bool, typer.Option("-i", "--internal", help="Also rayq's own topics (__...).")
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="HOST:PORT",
        envvar="RAYQ_CLUSTER",
        help="A broker of the cluster, several with commas; its token is in RAYQ_TOKEN. Without: "
        "the cluster that `rayq start` has started.",
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
        groups = [one.group for one in cluster.admin.list_groups(timeout_s=COMPLETION_TIMEOUT_S)]
        return offered(groups, incomplete)
    return []


def complete_queue(ctx: typer.Context, incomplete: str) -> list[str]:
    with contextlib.suppress(RayqError, OSError), quickly(ctx) as cluster:
        return offered(cluster.admin.list_queues(timeout_s=COMPLETION_TIMEOUT_S), incomplete)
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

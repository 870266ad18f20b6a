"""The Typer application, with every verb of `rayq` and the function that is it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from rayq.cli import (
    acls,
    audit,
    bench,
    bench_profile,
    cluster,
    consume,
    dead_letters,
    delete_records,
    groups,
    large_values,
    log,
    moves,
    operations,
    plan,
    principals,
    produce,
    queue_records,
    queues,
    quotas,
    restore,
    servers,
    status,
    storage,
    tokens,
    topics,
    transactions,
)
from rayq.cli.verbs import Verbs, VerbsOrAlone

ROOT_VERBS: dict[str, Callable[..., None]] = {
    "start": servers.start,
    "stop": servers.stop,
    "status": status.status,
    "plan": plan.plan,
    "audit": audit.audit,
}
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "topic": (
        "Topics and their records.",
        {
            "create": topics.create,
            "list": topics.list_topics,
            "describe": topics.describe,
            "alter": topics.alter,
            "delete": topics.delete,
            "add-partitions": topics.add_partitions,
            "produce": produce.produce,
            "consume": consume.consume,
            "delete-records": delete_records.delete_records,
            "restore": restore.restore,
            "set-replication-factor": moves.set_replication_factor,
        },
    ),
    "group": (
        "Consumer groups.",
        {
            "list": groups.list_groups,
            "describe": groups.describe,
            "seek": groups.seek,
            "delete": groups.delete,
        },
    ),
    "queue": (
        "Queues of records and tasks.",
        {
            "create": queues.create,
            "list": queues.list_queues,
            "describe": queues.describe,
            "alter": queues.alter,
            "delete": queues.delete,
            "peek": queues.peek,
            "purge": queues.purge,
            "put": queue_records.put,
            "take": queue_records.take,
            "work": queue_records.work,
        },
    ),
    "dead-letters": (
        "Records that failed for good: list, redrive or discard them.",
        {
            "list": dead_letters.list_letters,
            "show": dead_letters.show,
            "redrive": dead_letters.redrive,
            "discard": dead_letters.discard,
        },
    ),
    "transactions": (
        "Transactions of producers: list, describe or abort them.",
        {
            "list": transactions.list_transactions,
            "describe": transactions.describe,
            "abort": transactions.abort,
            "find-hanging": transactions.find_hanging,
        },
    ),
    "principal": (
        "Programs and people with their own rights.",
        {
            "create": principals.create,
            "list": principals.list_principals,
            "describe": principals.describe,
            "delete": principals.delete,
        },
    ),
    "token": (
        "The cluster's own token, and those of principals.",
        {
            "create": tokens.create,
            "rotate": tokens.rotate,
            "revoke": tokens.revoke,
            "list": tokens.list_tokens,
        },
    ),
    "acl": (
        "Rules about what principals may do.",
        {
            "add": acls.add,
            "list": acls.list_acls,
            "remove": acls.remove,
            "check": acls.check,
        },
    ),
    "quota": (
        "Limits on what principals use.",
        {
            "set": quotas.set_quota,
            "list": quotas.list_quotas,
            "describe": quotas.describe,
            "remove": quotas.remove,
        },
    ),
    "storage": (
        "Topics in the object store: progress, verification and pins.",
        {
            "status": storage.status,
            "verify-remote": storage.verify_remote,
            "pins": storage.pins,
            "unpin": storage.unpin,
        },
    ),
    "values": (
        "Large values that producers keep as objects (large_values=URL).",
        {"collect": large_values.collect},
    ),
    "cluster": (
        "Brokers, health, and where partitions are.",
        {
            "info": cluster.info,
            "health": cluster.health,
            "elect-leaders": cluster.elect_leaders,
            "metrics": cluster.metrics,
            "reassign": moves.reassign,
            "drain": moves.drain,
            "undrain": moves.undrain,
            "remove-broker": moves.remove_broker,
            "restart-broker": operations.restart_broker,
            "stop-broker": operations.stop_broker,
            "replace-disk": operations.replace_disk,
            "recover-quorum": operations.recover_quorum,
        },
    ),
    "bench": (
        "Measure produce, consume, latency and what a byte costs.",
        {
            "produce": bench.produce,
            "consume": bench.consume,
            "latency": bench.latency,
            "profile": bench_profile.profile,
        },
    ),
    "log": ("Data directories, offline.", {"verify": log.verify, "dump": log.dump}),
}
"""The groups of verbs, with the help of each. They are listed in this order."""
ALONE: dict[str, Callable[..., None]] = {"token": tokens.show}
"""The groups that do something without a subcommand. The others print their help."""

app = typer.Typer(
    name="rayq",
    help="A distributed, durable log on Ray: start, use and operate clusters.",
    cls=Verbs,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for verb, function in ROOT_VERBS.items():
    app.command(verb)(function)
for name, (text, verbs) in GROUPS.items():
    group = typer.Typer(help=text, cls=Verbs)
    if name in ALONE:
        group = typer.Typer(cls=VerbsOrAlone, invoke_without_command=True)
        group.callback()(ALONE[name])
    for verb, function in verbs.items():
        group.command(verb)(function)
    app.add_typer(group, name=name)


def _show_version(wanted: bool) -> None:
    if wanted:
        from rayq import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """A distributed, durable log on Ray: start, use and operate clusters."""

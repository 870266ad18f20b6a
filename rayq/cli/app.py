"""The Typer application with all commands of `rayq`."""

from __future__ import annotations

from typing import Annotated

import typer

from rayq.cli import (
    bench,
    cluster,
    dead_letters,
    groups,
    large_values,
    log,
    moves,
    operations,
    queues,
    servers,
    storage,
    topics,
    transactions,
)
from rayq.cli.consume import consume
from rayq.cli.delete_records import delete_records
from rayq.cli.produce import produce
from rayq.cli.queue_records import put, take, work
from rayq.cli.restore import restore
from rayq.cli.verbs import Verbs

app = typer.Typer(
    name="rayq",
    help="A distributed, durable log on Ray: start, use and operate clusters.",
    cls=Verbs,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(servers.start)
app.command()(servers.stop)
app.command()(servers.status)
app.command()(servers.token)
topics.app.command()(produce)
topics.app.command()(consume)
topics.app.command("delete-records")(delete_records)
topics.app.command()(restore)
for queue_verb in (put, take, work):
    queues.app.command()(queue_verb)
topics.app.command("set-replication-factor")(moves.set_replication_factor)
for verb in (moves.reassign, moves.drain, moves.undrain):
    cluster.app.command()(verb)
cluster.app.command("remove-broker")(moves.remove_broker)
cluster.app.command("restart-broker")(operations.restart_broker)
cluster.app.command("stop-broker")(operations.stop_broker)
cluster.app.command("replace-disk")(operations.replace_disk)
cluster.app.command("recover-quorum")(operations.recover_quorum)
app.add_typer(topics.app, name="topic")
app.add_typer(groups.app, name="group")
app.add_typer(queues.app, name="queue")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(transactions.app, name="transactions")
app.add_typer(storage.app, name="storage")
app.add_typer(large_values.app, name="values")
app.add_typer(cluster.app, name="cluster")
app.add_typer(bench.app, name="bench")
app.add_typer(log.app, name="log")


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

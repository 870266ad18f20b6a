"""`rayq values collect`: removes large values that no record stands for any more."""

from __future__ import annotations

from typing import Annotated

import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, DryRun, Json
from rayq.cli.values import duration_ms
from rayq.cli.verbs import Verbs
from rayq.client.large.collect import CollectedValues, collect_values

app = typer.Typer(
    help="Large values that producers keep as objects (large_values=URL).", cls=Verbs
)


@app.callback()
def values() -> None:
    """Large values that producers keep as objects (large_values=URL)."""


@app.command()
def collect(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="What producers have as large_values."),
    ],
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="DURATION",
            help="Leave younger objects alone; an hour at least.",
        ),
    ] = "1d",
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Remove objects of this cluster that no record stands for.

    It reads all logs, once to look, and again before it removes anything.
    """
    check_can_ask(yes or dry_run)
    older_than_s = duration_ms(older_than) / 1000
    with connected(cluster) as connection:
        client, background = connection.shared_client()

        def swept(*, dry_run: bool) -> CollectedValues:
            with output.waiting("Reading all logs"):
                return background.run(
                    collect_values(client, url, older_than_s=older_than_s, dry_run=dry_run)
                )

        found = swept(dry_run=True)
        if not dry_run and found.removed:
            agree(f"Remove {_told(found)}?", yes)
            found = swept(dry_run=False)
    if json:
        output.print_json(
            {
                "removed": not dry_run,
                "objects": [one._asdict() for one in found.removed],
                "kept": found.kept,
                "young": found.young,
            }
        )
        return
    if found.removed:
        output.table(
            ("object", "size", "written"),
            [
                (one.uri, output.human_size(one.size_bytes), output.moment(int(one.time_s * 1000)))
                for one in found.removed
            ],
        )
    done = "to be removed" if dry_run else "removed"
    output.say(
        f"{_told(found)} {done}; {found.kept} in use, {found.young} younger than {older_than}."
    )
    if dry_run and found.removed:
        output.say("Nothing was removed: leave --dry-run out to do it.")


def _told(found: CollectedValues) -> str:
    size_bytes = sum(one.size_bytes for one in found.removed)
    return f"{output.counted(len(found.removed), 'object')} of {output.human_size(size_bytes)}"

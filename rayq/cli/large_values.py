"""`rayq values collect`: removes large values that no record refers to any longer."""

from __future__ import annotations

from typing import Annotated

import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, DryRun, Json
from rayq.cli.values import duration_ms
from rayq.client.large.collect import CollectedValues, collect_values


def collect(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="The URL that producers use as large_values."),
    ],
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="DURATION",
            help="Keep younger objects; at least an hour.",
        ),
    ] = "1d",
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Remove objects of this cluster that no record refers to.

    It reads all logs, first to find such objects, and again before it removes anything.
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
                "objects": [item._asdict() for item in found.removed],
                "kept": found.kept,
                "young": found.young,
            }
        )
        return
    if found.removed:
        output.table(
            ("object", "size", "written"),
            [
                (
                    item.uri,
                    output.human_size(item.size_bytes),
                    output.moment(int(item.time_s * 1000)),
                )
                for item in found.removed
            ],
        )
    done = "to be removed" if dry_run else "removed"
    output.say(
        f"{_told(found)} {done}; {found.kept} in use, {found.young} younger than {older_than}."
    )
    if dry_run and found.removed:
        output.say("Nothing was removed: run it without --dry-run to remove.")


def _told(found: CollectedValues) -> str:
    size_bytes = sum(item.size_bytes for item in found.removed)
    return f"{output.counted(len(found.removed), 'object')} of {output.human_size(size_bytes)}"

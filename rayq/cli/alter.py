"""Shared parts of `rayq topic alter` and `rayq queue alter`: the keys that change, and the output.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rayq.cli import output
from rayq.cli.values import WrongUseError, config_values, default_of
from rayq.config import QueueConfig, TopicConfig

SetKeys = Annotated[
    list[str] | None,
    typer.Option(
        "-c", "--config", "--set", metavar="KEY=VALUE", help="Set a key; may be repeated."
    ),
]
DeletedKeys = Annotated[
    list[str] | None,
    typer.Option("-d", "--delete", metavar="KEY", help="Reset a key to its default."),
]


def changes_of(
    kind: type[TopicConfig] | type[QueueConfig], config: SetKeys, delete: DeletedKeys
) -> dict[str, Any]:
    """Returns the keys that change, with their new values. Raises typer.BadParameter where none
    does, ConfigError, WrongUseError (a key is both set and deleted)."""
    if not (config or delete):
        raise typer.BadParameter("give --set KEY=VALUE or --delete KEY")
    changes = config_values(kind, config or ())
    for key in delete or ():
        name = key.replace(".", "_")
        if name in changes:
            raise WrongUseError(f"{key} is both set and deleted.")
        changes[name] = default_of(name, kind)
    return changes


def tell_changes(kind: str, whose: str, changes: dict[str, Any], json: bool) -> None:
    """Reports that a topic or a queue (the `kind`) was changed."""
    if json:
        output.print_json({kind: whose, "changed": changes})
        return
    for name, value in changes.items():
        output.say(f"{whose}: {name} is {output.config_text(value)} now.")

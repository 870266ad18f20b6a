"""Asks before records, positions or replicas go, in the same way for all verbs that delete or move.

On a terminal they say what they will do and ask; `--yes` answers beforehand. Where nobody can be
asked, in a script or a pipe, they do nothing without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from rayq.cli import output
from rayq.cli.exit_codes import FAILED
from rayq.cli.visible import visible

Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do it without asking.")]
YesOrExecute = Annotated[
    bool, typer.Option("-y", "--yes", "--execute", help="Do it without asking.")
]


def check_can_ask(yes: bool) -> None:
    """Raises typer.BadParameter where there is neither `--yes` nor a person to ask: before anything
    else is done."""
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(
            "it asks before it does this, and there is nobody to ask: add --yes"
        )


def agree(question: str, yes: bool) -> None:
    """Returns when the answer is yes. Raises typer.Exit when it is anything else."""
    if yes:
        return
    output.hush()
    sys.stdout.flush()
    sys.stderr.write(f"{visible(question)} [y/N] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if answer.strip().lower() in ("y", "yes"):
        return
    if not answer.endswith("\n"):  # Ctrl+D
        output.note("")
    output.note("Nothing was changed.")
    raise typer.Exit(FAILED)


def one_by_one(left: list[str], act: Callable[[str], object], said: str, json: bool) -> None:
    """Acts on each name, and says so unless it is to be JSON: `said` and the name. Takes a name out
    of `left` once it is done."""
    while left:
        act(left[0])
        name = left.pop(0)
        if not json:
            output.say(f"{said} {name}.")

"""Asks before records, positions or replicas are deleted or moved, in the same way for all
commands.

On a terminal a command says what it will do and asks; `--yes` answers beforehand. Where nobody can
be asked, in a script or a pipe, the command does nothing without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from rayq.cli import output
from rayq.cli.exit_codes import FAILED
from rayq.cli.terminal_safe import visible

Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")]
YesOrExecute = Annotated[
    bool, typer.Option("-y", "--yes", "--execute", help="Do not ask for confirmation.")
]


def check_can_ask(yes: bool) -> None:
    """Raises typer.BadParameter where there is neither `--yes` nor a person to ask: before anything
    else is done."""
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(
            "this needs a confirmation, and there is no terminal to ask on: add --yes"
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
    """Acts on each name, and reports `said` and the name unless the output is JSON. Takes a name
    out of `left` once it is done."""
    while left:
        act(left[0])
        name = left.pop(0)
        if not json:
            output.say(f"{said} {name}.")

"""docs/command.md names the verbs and options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from rayq.cli.app import app

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "command.md").read_text()


def verbs() -> list[str]:
    found: list[str] = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found += getattr(command, "commands", {name: command})
    return found


def test_every_verb_is_in_the_docs_of_the_command() -> None:
    table = "\n".join(line for line in TEXT.splitlines() if line.startswith("|"))
    missing = [verb for verb in verbs() if not re.search(rf"\b{re.escape(verb)}\b", table)]
    assert missing == []

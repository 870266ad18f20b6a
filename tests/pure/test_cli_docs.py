"""docs/command.md names the verbs and options that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from rayq.cli.app import app
from rayq.cli.main import run

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "command.md").read_text()


def commands() -> dict[str, Any]:
    """Every verb by all of its words, such as `topic create`."""
    found: dict[str, Any] = {}
    for name, command in groups().items():
        verbs = getattr(command, "commands", None)
        found |= (
            {name: command} if verbs is None else {f"{name} {verb}": verbs[verb] for verb in verbs}
        )
    return found


def groups() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined, no-any-return]


def verbs() -> list[str]:
    return [name.split()[-1] for name in commands()]


def test_every_verb_is_in_the_docs_of_the_command() -> None:
    table = "\n".join(line for line in TEXT.splitlines() if line.startswith("|"))
    missing = [verb for verb in verbs() if not re.search(rf"\b{re.escape(verb)}\b", table)]
    assert missing == []


def test_every_option_says_what_it_does() -> None:
    silent = [
        f"{name} --{option.name}"
        for name, command in commands().items()
        for option in command.params
        if option.param_type_name == "option" and not option.help
    ]
    assert silent == []


def test_every_verb_answers_as_json_but_the_one_whose_output_is_that_of_others() -> None:
    without = [
        name
        for name, command in commands().items()
        if not any("--json" in option.opts for option in command.params)
    ]
    assert without == ["queue work"]


@pytest.mark.parametrize(
    "group", ["", *(name for name, it in groups().items() if hasattr(it, "commands"))]
)
def test_a_list_of_verbs_has_the_first_sentence_of_each_whole(
    group: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run([*group.split(), "--help"])
    said = " ".join(capfd.readouterr().out.split())
    assert "Commands:" in said and "..." not in said.partition("Commands:")[2]

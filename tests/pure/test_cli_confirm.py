"""Verbs that delete or move ask first; without a terminal they need --yes."""

from __future__ import annotations

import io

import pytest
import typer

from rayq.cli.confirm import agree, check_can_ask


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["y\n", "Y\n", " yes \n"])
def test_yes_is_yes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    agree("Delete \x1b[2J?", False)
    assert capsys.readouterr() == ("", "Delete \\x1b[2J? [y/N] ")


@pytest.mark.parametrize("answer", ["n\n", "\n", "yess\n", ""])
def test_all_else_is_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    with pytest.raises(typer.Exit) as refused:
        agree("Delete?", False)
    assert refused.value.exit_code == 1
    assert capsys.readouterr().err.endswith("Nothing was changed.\n")


def test_where_nobody_can_be_asked_it_takes_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin, stderr in ((io.StringIO(), Terminal()), (Terminal(), io.StringIO())):
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.stderr", stderr)
        with pytest.raises(typer.BadParameter, match="--yes"):
            check_can_ask(False)
        check_can_ask(True)
        agree("Delete?", True)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stderr", Terminal())
    check_can_ask(False)

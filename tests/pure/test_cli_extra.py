from __future__ import annotations

import sys

import pytest

from rayq.cli.main import run


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert run(["status"]) == 1
    assert capsys.readouterr().err == (
        f"Error: The command needs {package}: pip install 'rayq[cli]'\n"
    )

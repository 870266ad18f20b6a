from __future__ import annotations

import sys
import time

import pytest

from rayq.cli import produce
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


def test_who_interrupts_produce_while_nothing_is_delivered_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(produce, "END_PATIENCE_S", 0.0)
    with pytest.raises(KeyboardInterrupt), produce._told_of_a_long_end():
        raise KeyboardInterrupt
    deadline_s = time.monotonic() + 60
    while "interrupt again" not in (said := capsys.readouterr().err):
        assert time.monotonic() < deadline_s, said
        time.sleep(0.005)

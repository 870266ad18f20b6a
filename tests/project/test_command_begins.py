"""The first moments of the `rayq` command: little is loaded, and Ctrl+C is quiet from then on."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import rayq

COMMAND = [sys.executable, "-X", "importtime", "-m", "rayq.cli"]
"""Prints the name of each module on stderr as soon as it is imported."""
NOBODY = "127.0.0.1:1"


def test_the_version_is_told_without_loading_what_the_verbs_need() -> None:
    ran = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, f"{rayq.__version__}\n")
    for heavy in ("msgspec", "typer", "rich", "asyncio", "rayq.client", "rayq.errors"):
        assert f" {heavy}" not in ran.stderr


@pytest.mark.parametrize("module", ["msgspec", "typer", "rayq.client.client"])
def test_ctrl_c_while_the_command_is_loading_is_quiet(module: str) -> None:
    line = [*COMMAND, "topic", "list", "--cluster", NOBODY]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(told.split()[-1] == module for told in process.stderr)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "Traceback" not in rest and "Error" not in rest


def test_ctrl_c_is_ignored_where_it_was_ignored_before() -> None:
    # `nohup`, and a `&` in a script, ignore SIGINT.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "sys.argv = ['rayq', '--version']; from rayq.cli.main import main\n"
        "try: main()\n"
        "finally: assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr

"""What a continuous integration server runs tries a failed test once more, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FLAKY = """
import pathlib

def test_good():
    pass

def test_flaky():
    ran = pathlib.Path("ran")
    was_there = ran.exists()
    ran.touch()
    assert was_there
"""
BAD = "def test_bad():\n    assert False\n"
DEAD = """
import os, pathlib

def test_dead():
    ran = pathlib.Path("ran")
    if not ran.exists():
        ran.touch()
        os._exit(3)
"""
MANY = """
import pathlib, pytest

@pytest.mark.parametrize("number", range(21))
def test_many(number):
    ran = pathlib.Path(f"ran-{number}")
    was_there = ran.exists()
    ran.touch()
    assert was_there
"""


def ran(where: Path, source: str, *arguments: str) -> tuple[int, str]:
    (where / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (where / "test_it.py").write_text(source)
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/twice.py", *arguments],
        cwd=where,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


def test_what_passes_alone_is_listed_and_fails_nothing(tmp_path: Path) -> None:
    code, said = ran(tmp_path, FLAKY)
    assert code == 0, said
    *_, head, name, last = said.splitlines()
    assert (head, name) == ("Failed once, passed alone:", "  test_it.py::test_flaky")
    assert "1 passed" in last and "1 failed, 1 passed" in said


@pytest.mark.parametrize(
    "source, arguments, code, said",
    [
        (FLAKY + BAD, (), 1, "1 failed, 1 passed"),
        (DEAD, ("-n", "1"), 1, "crashed while running"),
        ("import nothing_of_this_name", ("-n", "1"), 1, "1 error"),
        (MANY, (), 1, "21 failed"),
        (FLAKY, ("--no-such-option",), 4, ""),
    ],
)
def test_what_fails_again_or_is_more_than_a_failed_test_fails(
    tmp_path: Path, source: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, text = ran(tmp_path, source, *arguments)
    assert found == code, text
    assert said in text
    assert "passed alone" not in text
    assert ("Once more" in text) == (source == FLAKY + BAD), text

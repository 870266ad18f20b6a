"""What `make lint` checks, as tests: a submission that breaks it does not pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def passes(*command: str) -> None:
    program = Path(sys.executable).with_name(command[0])
    ran = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_ruff_finds_nothing() -> None:
    passes("ruff", "check", "--no-cache", ".")


@pytest.mark.slow
def test_mypy_strict_finds_nothing() -> None:
    passes("mypy")

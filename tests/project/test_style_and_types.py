"""The checks of `make lint`, as tests: a change that breaks one of them does not pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_ruff_finds_nothing() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    ran = subprocess.run(
        [ruff, "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.thorough
def test_mypy_strict_finds_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

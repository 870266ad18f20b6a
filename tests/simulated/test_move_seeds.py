"""Partitions that move under faults: some seeds, and planted bugs that are found at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

QUICK_HUNTS = ("completed_by_a_majority", "directory_removed_before_the_commit")
"""Planted bugs that the first seed finds; `make hunt` plants the others."""


def simulate(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rayq.testing.simulation", *options],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", ["moves", "group-moves"])
def test_partitions_move_and_nothing_is_lost(scenario: str) -> None:
    done = simulate("--scenario", scenario, "0:2")
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    lines = done.stdout.splitlines()
    assert "all passed" in lines[-1]
    assert all(" moves, " in line for line in lines[:-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_moves_is_found_at_once(name: str) -> None:
    done = simulate("--mutation", name, "0", "--processes", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}: found by seed 0, ")

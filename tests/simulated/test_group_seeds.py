"""Groups and compaction under faults: some seeds, and those that once found a bug."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SEEDS = "0:3"
FOUND_BUGS = (6, 33)
"""Seeds that failed once; docs/reliability.md tells what each found."""
QUICK_HUNTS = ("assigned_before_it_was_given_up", "served_before_the_replay")
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
def test_groups_keep_their_promises_under_faults() -> None:
    done = simulate("--scenario", "groups", SEEDS)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    assert "all passed" in done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", FOUND_BUGS)
def test_a_seed_of_groups_that_found_a_bug_passes(seed: int) -> None:
    done = simulate("--scenario", "groups", str(seed))
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_groups_is_found_at_once(name: str) -> None:
    done = simulate("--mutation", name, "0:5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}: found by seed ")

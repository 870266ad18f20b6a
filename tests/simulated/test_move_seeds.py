"""Partitions that move under faults: some seeds, and planted bugs that are found at once."""

from __future__ import annotations

import pytest

from tests.ahead import Done
from tests.simulated.support import SIMULATION

QUICK_HUNTS = ("completed_by_a_majority", "directory_removed_before_the_commit")
"""Planted bugs that the first seed finds; `make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(name, marks=pytest.mark.ahead(*SIMULATION, "--scenario", name, "0:2"))
        for name in ("moves", "group-moves")
    ],
)
def test_partitions_move_and_nothing_is_lost(scenario: str, ahead: Done) -> None:
    assert ahead.returncode == 0, ahead.stdout[-20_000:] + ahead.stderr
    lines = ahead.stdout.splitlines()
    assert lines[-1].startswith("2 seeds (")
    assert all(" moves, " in line for line in lines[:-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ahead(*SIMULATION, "--mutation", name, "0"))
        for name in QUICK_HUNTS
    ],
)
def test_a_bug_planted_into_moves_is_found_at_once(name: str, ahead: Done) -> None:
    assert ahead.returncode == 1, ahead.stdout + ahead.stderr
    assert ahead.stdout.startswith(f"{name}: found by seed 0, ")

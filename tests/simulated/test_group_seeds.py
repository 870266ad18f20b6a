"""Groups and compaction under faults: some seeds, and those that once found a bug."""

from __future__ import annotations

import pytest

from tests.ahead import Done
from tests.simulated.support import SIMULATION

SEEDS = "0:3,6,33"
"""The last two failed once; docs/reliability.md tells what each found."""
GROUPS = (*SIMULATION, "--scenario", "groups")
QUICK_HUNTS = ("assigned_before_it_was_given_up", "served_before_the_replay")
"""Planted bugs that the first seed finds; `make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.ahead(*GROUPS, SEEDS)
def test_groups_keep_their_promises_under_faults(ahead: Done) -> None:
    assert ahead.returncode == 0, ahead.stdout[-20_000:] + ahead.stderr
    assert ahead.stdout.splitlines()[-1].startswith("5 seeds (")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ahead(*SIMULATION, "--mutation", name, "0:5"))
        for name in QUICK_HUNTS
    ],
)
def test_a_bug_planted_into_groups_is_found_at_once(name: str, ahead: Done) -> None:
    assert ahead.returncode == 1, ahead.stdout + ahead.stderr
    assert ahead.stdout.startswith(f"{name}: found by seed ")

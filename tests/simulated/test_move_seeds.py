"""Partitions that move under faults: some seeds, and planted bugs that the first seeds find."""

from __future__ import annotations

import pytest

from tests.simulated.support import found_by, passing

QUICK_HUNTS = ("completed_by_a_majority", "directory_removed_before_the_commit")
"""`make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("scenario", "seeds"), [("moves", "0:4"), ("group-moves", "0:3")])
def test_partitions_move_and_nothing_is_lost(scenario: str, seeds: str) -> None:
    assert " moves, " in passing("--scenario", scenario, seeds)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_moves_is_found_by_the_first_seeds(name: str) -> None:
    assert found_by(name, "0:3")

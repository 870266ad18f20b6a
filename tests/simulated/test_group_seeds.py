"""Groups and compaction under faults: some seeds, and seeds that once found a bug."""

from __future__ import annotations

import pytest

from tests.simulated.support import found_by, passing

GROUPS = ("--scenario", "groups")
FOUND_BUGS = "6,33"
"""Seeds that failed once; docs/history.md tells which bug each found."""
QUICK_HUNTS = ("assigned_before_it_was_given_up", "served_before_the_replay")
"""Planted bugs that the first seeds find; `make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("seeds", ["0:6", FOUND_BUGS])
@pytest.mark.timeout(1800)
def test_groups_keep_their_promises_under_faults(seeds: str) -> None:
    assert " passed" in passing(*GROUPS, seeds)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_groups_is_found_by_the_first_seeds(name: str) -> None:
    assert found_by(name, "0:5")

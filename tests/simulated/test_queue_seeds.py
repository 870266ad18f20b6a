"""Queues under faults: some seeds, and bugs that the first seeds find."""

from __future__ import annotations

import pytest

from tests.simulated.support import found_by, passing

QUEUES = ("--scenario", "queues")
QUICK_HUNTS = (
    "ack_answered_early",
    "late_ack_accepted",
    "key_order_ignored",
    "dead_before_written",
    "moved_batch_not_recognised",
    "move_unnumbered",
    "gone_holders_keep_locks",
    "no_grace_for_holders",
)
"""Planted bugs that the first seeds find; `make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.parametrize("seeds", ["4", pytest.param("1:4,5:7", marks=pytest.mark.thorough)])
@pytest.mark.timeout(1800)
def test_queues_keep_their_promises_under_faults(seeds: str) -> None:
    assert " passed" in passing(*QUEUES, seeds)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_queues_is_found_by_the_first_seeds(name: str) -> None:
    assert found_by(name, "0:8")

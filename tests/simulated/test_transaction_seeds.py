"""Transactions under faults: some seeds, and bugs that the first seeds find."""

from __future__ import annotations

import pytest

from tests.simulated.support import found_by, passing

TRANSACTIONS = ("--scenario", "transactions")
QUICK_HUNTS = (
    "appended_before_the_join",
    "no_marker_where_nothing_is_open",
    "decision_split",
    "transactions_time_out_early",
    "transactions_never_time_out",
    "no_time_after_a_failover",
)
"""Planted bugs that the first seeds find; `make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_transactions_keep_their_promises_under_faults() -> None:
    assert " passed" in passing(*TRANSACTIONS, "0:7")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_transactions_is_found_by_the_first_seeds(name: str) -> None:
    assert found_by(name, "0:5")

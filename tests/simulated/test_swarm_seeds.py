"""Seeds that draw a small selection of clients, faults and sizes, and how they describe it."""

from __future__ import annotations

import pytest

from proving.simulation.situations import SITUATIONS
from tests.simulated.support import found_by, passing

SWARM = ("--scenario", "swarm")
QUICK_HUNTS = {"deletion_answered_at_once": "23", "retention_where_none_is_set": "2"}
"""Planted bugs, and seeds that find them; `make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_small_selections_lose_nothing_and_recover() -> None:
    assert " passed" in passing(*SWARM, "0:6")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_what_removes_records_is_found(name: str) -> None:
    assert found_by(name, QUICK_HUNTS[name])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_a_seed_that_is_watched_is_the_same_run_and_says_what_it_met() -> None:
    # Both lines name the trace: so this is also the test that one seed gives one trace.
    alone, watched = (passing("6", *options) for options in ((), ("--situations",)))
    assert alone.splitlines()[0] == watched.splitlines()[0]
    met = {
        line.split()[1].rstrip(":"): int(line.split()[0])
        for line in watched.splitlines()[1:-1]
    }
    assert met.keys() == SITUATIONS.keys()
    assert met["recovery-of-a-tail"] == 1 and met["start-moved"] == 0

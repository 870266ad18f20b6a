"""Seeds of changes to the metadata, and planted bugs of what servers answer about it."""

from __future__ import annotations

import pytest

from tests.simulated.support import found_by, passing

PLANTED = (
    "previous_record_not_compared",
    "repetition_answered_at_once",
    "repetitions_forgotten",
    "old_config_told",
    "refusal_answered_at_once",
    "sessions_left_out_of_snapshots",
    "put_aside_by_old_metadata",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", ["3", pytest.param("0:3", marks=pytest.mark.thorough)])
def test_changes_that_are_repeated_are_made_once_and_told_as_they_are(seeds: str) -> None:
    assert " passed" in passing("--scenario", "metadata", seeds)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_answer_about_metadata_is_found(name: str) -> None:
    assert found_by(name, "0:10")

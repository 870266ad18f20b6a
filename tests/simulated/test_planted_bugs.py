"""Each planted bug is found by the seeds of its scenario: the simulation can fail."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rayq.testing.simulation.mutations import MUTATIONS, planted

SEEDS_MAX = 200

FIRST_SEEDS = {
    "uncommitted_metadata_applied": 6,
    "metadata_committed_by_one": 3,
    "election_outside_the_isr": 4,
    "isr_joined_at_a_stale_high_watermark": 42,
    "high_watermark_moves_below_min_isr": 3,
    "high_watermark_without_followers": 3,
    "end_acknowledged_instead_of_flushed": 7,
    "duplicate_answered_at_once": 18,
    "waiters_outlive_the_epoch": 15,
    "divergence_by_offset_only": 4,
    "fetch_above_the_high_watermark": 4,
    "body_crc_skipped": 7,
    "horizon_ignored": 15,
}
"""Where to begin, so that a test need not look for long; where it stands does not matter."""


@pytest.mark.slow
@pytest.mark.hunt
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found_within_two_hundred_seeds(name: str) -> None:
    first = FIRST_SEEDS.get(name, 0)
    seeds = f"{first}:{first + SEEDS_MAX}"
    done = subprocess.run(
        [sys.executable, "-m", "rayq.testing.simulation", "--mutation", name, seeds],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}: found by seed ")


def test_a_planted_bug_is_taken_out_again() -> None:
    for name, mutation in MUTATIONS.items():
        before = [getattr(target, attribute) for target, attribute, _ in mutation.patches()]
        with planted(name):
            pass
        assert [getattr(target, attribute) for target, attribute, _ in mutation.patches()] == before


def test_there_are_sixteen_or_more_and_each_names_its_rule() -> None:
    assert len(MUTATIONS) >= 16
    assert all(mutation.rule and mutation.what for mutation in MUTATIONS.values())

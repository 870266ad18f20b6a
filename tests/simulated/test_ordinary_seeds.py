"""The ordinary workload under faults: fifty seeds, and those that once found a bug.

Each runs in a process of its own under one hash seed, as `make sim` does, so that what fails here
replays there.
"""

from __future__ import annotations

import pytest

from tests.ahead import Done
from tests.simulated.support import SIMULATION, simulate

SEEDS = "0:50"
FOUND_BUGS = "53,61,62,249,413"
"""Seeds from 50 on that failed once; docs/reliability.md tells what each found."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.ahead(*SIMULATION, SEEDS)
def test_fifty_seeds_lose_nothing_and_recover(ahead: Done) -> None:
    assert ahead.returncode == 0, ahead.stdout[-20_000:] + ahead.stderr
    assert ahead.stdout.splitlines()[-1].startswith("50 seeds (0:50)")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.ahead(*SIMULATION, FOUND_BUGS)
def test_seeds_that_found_a_bug_pass(ahead: Done) -> None:
    assert ahead.returncode == 0, ahead.stdout[-20_000:] + ahead.stderr
    assert ahead.stdout.splitlines()[-1].startswith("5 seeds (")


def test_one_seed_gives_one_trace() -> None:
    first, second = simulate("7"), simulate("7")
    assert first.returncode == 0, first.stdout[-20_000:] + first.stderr
    line = first.stdout.splitlines()[0]
    assert "trace" in line
    assert line == second.stdout.splitlines()[0]


def test_a_range_of_seeds_is_half_open_and_summed_up() -> None:
    done = simulate("3:5", "--processes", "2")
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["seed 3", "seed 4"]
    assert "2 seeds (3:5)" in lines[-1] and "all passed" in lines[-1]

"""The simulation as `make sim` runs it, for the tests of this floor."""

from __future__ import annotations

import os
import subprocess
import sys

SIMULATION = ("-m", "proving.simulation")


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the simulation now, in a process of its own and under one hash seed. It runs at low
    priority, since it needs only CPU, and tests on real processes beside it have times to hold."""
    return subprocess.run(
        ["nice", "-n", "19", sys.executable, *SIMULATION, *arguments],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def passing(*arguments: str) -> str:
    """The output, whose last line is the summary. Every seed must pass."""
    done = simulate("--processes", "1", *arguments)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    return done.stdout


def found_by(mutation: str, seeds: str, *options: str) -> str:
    """The line that names the seed which found a planted bug; one of the seeds must find it."""
    done = simulate("--processes", "1", *options, "--mutation", mutation, seeds)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith(f"{mutation}: found by seed ")
    return done.stdout.splitlines()[0]

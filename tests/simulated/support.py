"""The simulation as `make sim` runs it, for the tests of this floor."""

from __future__ import annotations

import os
import subprocess
import sys

SIMULATION = ("-m", "rayq.testing.simulation")


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it now, in a process of its own and under one hash seed."""
    return subprocess.run(
        [sys.executable, *SIMULATION, *arguments],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )

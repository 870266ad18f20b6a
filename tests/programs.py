"""Programs that tests run in a process of their own, to see how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Ended(NamedTuple):
    """What is left of a program."""

    exit_code: int
    """Below 0: the signal that ended it."""
    stdout: str
    stderr: str


def run_to_its_end(program: str) -> Ended:
    """Runs the source text of a program, which may import from the tests."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        capture_output=True,
        check=False,
        text=True,
    )
    return Ended(done.returncode, done.stdout, done.stderr)

"""`make demo`, its first part: the main job of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_demo_accounts_for_every_flight_and_cleans_up(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "rayq.demo"],
        cwd=tmp_path,
        # The demo gets a Ray of its own, as on a reader's machine.
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "336,776" in ran.stdout
    assert "paused for" in ran.stdout
    assert "All of it held." in ran.stdout
    assert os.listdir(tmp_path) == []

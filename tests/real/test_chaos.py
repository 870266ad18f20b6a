"""A slice of `make chaos`: real processes die and hang under load, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("kill-leader", "stop-leader", "kill-broker", "kill-controller", "kill-node")
"""The seed chooses whether a lost node returns before Ray has noticed its loss, or after."""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_minute_of_chaos_loses_nothing_and_stops_nobody(tmp_path: Path) -> None:
    result = run_chaos(tmp_path, "--seed", "3", "--kinds", ",".join(KINDS))
    assert set(result["injected"]) == set(KINDS)
    assert (result["lost"], result["duplicated"]) == (0, 0)
    assert result["acknowledged"] > 5_000


@pytest.mark.thorough
@pytest.mark.slow
def test_a_minute_of_chaos_tears_no_transaction_and_copies_each_record_once(tmp_path: Path) -> None:
    kinds = "kill-leader,stop-leader,kill-broker"
    result = run_chaos(tmp_path, "--transactions", "--seed", "3", "--rate", "200", "--kinds", kinds)
    done = result["transactions"]
    assert done["committed"] > 20 and done["aborted"] > 0
    assert done["copied"] > 1_000 and done["snapshots"] > 1
    assert done["killed"] > 1 and done["hung"] > 1


def run_chaos(tmp_path: Path, *options: str) -> Any:
    """A minute of it. Returns the JSON of the run, which held and left no process."""
    file = tmp_path / "chaos.json"
    # `make chaos` requires the limits, on a quiet machine
    command = ["--minutes", "1", "--leniency", "6", "--json", str(file), *options]
    ran = subprocess.run(
        [sys.executable, "-m", "proving.chaos", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CHAOS_TEST": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(file.read_text())
    assert result["problems"] == [] and result["checker_faults"] == []
    assert processes_started_with(f"CHAOS_TEST={tmp_path}\0") == []
    return result


def processes_started_with(setting: str) -> list[str]:
    """All processes that inherited an environment variable from the run."""
    left = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and setting in (entry / "environ").read_text("latin-1"):
                left.append((entry / "cmdline").read_text("latin-1"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return left

"""How the command joins a Ray."""

from __future__ import annotations

import pytest
import ray
from ray._private import worker

from rayq.cli.local_ray import connected_to_ray


def test_what_a_raylet_warns_of_stays_out_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray prints it on stdout, also for a driver that asked for no logs."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(worker, "_worker_logs_enabled", True)
    warning = {"lines": ["13 worker processes"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(warning, ignore_prefix=True)
    assert "13 worker processes" in capsys.readouterr().out
    with connected_to_ray("somewhere"):
        worker.print_to_stdstream({**warning, "lines": ["14 processes"]}, ignore_prefix=True)
    assert capsys.readouterr().out == ""
